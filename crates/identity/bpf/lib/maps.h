/* The maps, pinned by name in one folder. */
#ifndef SANDWIRE_IDENTITY_MAPS_H
#define SANDWIRE_IDENTITY_MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"

/* By cgroup. A program finds the entry of the cgroup that it is attached to, also for sockets of the cgroups below.
 * Written by the command line, once it is complete and once more at its end. */
struct {
	__uint(type, BPF_MAP_TYPE_CGROUP_STORAGE);
	__type(key, __u64);
	__type(value, struct identity);
} identities SEC(".maps");

/* By cgroup, as above. Written by the programs. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_CGROUP_STORAGE);
	__type(key, __u64);
	__type(value, struct counters);
} counters SEC(".maps");

/* Written and read by the command line alone. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, struct record);
} records SEC(".maps");

/* All addresses of all identities. Written by the command line. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct address);
	__type(value, struct owner);
} addresses SEC(".maps");

/* Written by the kernel's own rules: a socket leaves when it is closed. */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKHASH);
	__uint(max_entries, 262144);
	__type(key, struct listener_key);
	__type(value, __u64);
} listeners SEC(".maps");

/* A socket that isn't in here is none of an identity's. Accepted sockets get their listener's entry. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_CLONE);
	__type(key, int);
	__type(value, struct socket_state);
} sockets SEC(".maps");

/* Of UDP sockets that were called by whom their policy denies. Written and read by the programs. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct callers);
} called SEC(".maps");

/* By number of the identity. One that isn't in here may reach nothing. Written by the command line, after all that the
 * policy's index stands for. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct policy);
} policies SEC(".maps");

/* Written by the command line, as are the lists and the texts. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 1048576);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct prefix_key);
	__type(value, struct prefix);
} prefixes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 262144);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct part_key);
	__type(value, struct rule_list);
} rule_lists SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 262144);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct part_key);
	__type(value, struct text);
} texts SEC(".maps");

/* By number of the identity. Entries are made and deleted by the command line, and counted in by the programs. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct tally);
} tallies SEC(".maps");

/* Of identities that have TCP only: the sources of connections to the own loopback. An entry is there for as long as its
 * connection is. Written by the programs; the command line deletes what an identity has left. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1048576);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct dialer_key);
	__type(value, struct dialer);
} dialers SEC(".maps");

/* Of a socket that is among the dialers: its entry. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct dialer_key);
} dialed SEC(".maps");

/* By number of the identity, as the tallies. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct tcp_tally);
} tcp_tallies SEC(".maps");

/* How much of what a socket has done is in its identity's tally. Written by the programs. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct tcp_traffic);
} counted SEC(".maps");

/* UDP sockets of identities that have several addresses. The kernel lets no program do that which is told of a bind, so
 * receivers.bpf.c does, soon after; a socket leaves when it is closed. */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKHASH);
	__uint(max_entries, 262144);
	__type(key, struct listener_key);
	__type(value, __u64);
} receivers SEC(".maps");

/* Whether any identity may have receivers: else nobody's datagrams are looked at. Written by the command line. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} has_receivers SEC(".maps");

/* Of a UDP socket that is to be among the receivers. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct receiver);
} receiving SEC(".maps");

/* Tells a daemon that there is something to do for receivers.bpf.c: numbers of identities. Where none reads it, it is
 * full, and a daemon that starts looks anyway. As large as the largest page there is. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 65536);
} bound SEC(".maps");

/* Of UDP sockets that were asked at another address than they answer from by themselves. Written and read by the
 * programs. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct asked_table);
} asked SEC(".maps");

#endif

/* The maps, shared by all programs and the daemon: pinned by name in the instance's folder. The
 * daemon may load them with other sizes. */
#ifndef SANDWIRE_MAPS_H
#define SANDWIRE_MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"

#define NICS_MAX 16384

/* Processors with lines of their own in `ledgers` and `decisions`: those below this number, which are there when the daemon
 * loads the programs. What a kernel could take in later is often a hundred times as many. Those who come do without,
 * until the daemon starts anew. */
const volatile __u32 processors = 0;

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, NICS_MAX);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, __u32);
	__type(value, struct nic);
} nics SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, NICS_MAX);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, __u32);
	__type(value, struct policy);
} policies SEC(".maps");

/* Drops aren't per processor: with 64 of them and 16,384 interfaces that would be 384 MiB, and they are few. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, NICS_MAX);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, __u32);
	__type(value, struct counters);
} counters SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, NICS_MAX);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, __u32);
	__type(value, struct meters);
} meters SEC(".maps");

/* Clone addresses of active interfaces. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 2 * NICS_MAX);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, struct address);
	__type(value, struct clone_value);
} clones SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 1024 * 1024);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, struct prefix_key);
	__type(value, struct prefix_value);
} prefixes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024 * 1024);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, __u32);
	__type(value, struct rule_list);
} rule_lists SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 64 * 1024);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, struct group_pair);
	__type(value, __u8);
} group_pairs SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 256);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, __u32);
	__type(value, struct uplink);
} uplinks SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, struct answer_key);
	__type(value, struct answer_value);
} answers SEC(".maps");

/* Of those that enter more than their share, which push out each other's alone. As many as in `answers`. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, struct answer_key);
	__type(value, struct answer_value);
} answers_crowd SEC(".maps");

/* What each interface has entered into `answers`; see is_within in share.h. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, NICS_MAX);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, __u32);
	__type(value, __u64);
} answer_shares SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, NICS_MAX);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, __u32);
	__type(value, struct neighbour_share);
} neighbour_shares SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, NICS_MAX);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, __u32);
	__type(value, struct neighbour_samples);
} neighbour_samples SEC(".maps");

/* For each processor a line of each interface, and after them the daemon's: it alone writes that, and none of theirs.
 * So no two processors write to a line. The daemon loads it for the processors that are there. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, NICS_MAX);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, __u32);
	__type(value, struct ledger);
} ledgers SEC(".maps");

/* One entry, and so one piece that stays in a processor's cache, which `answers` of many flows doesn't. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, __u32);
	__type(value, struct noted);
} noted SEC(".maps");

/* DECISIONS_MAX of each processor, one after the other's: so each is a line of the cache, which it is neither in a map
 * per CPU nor without being mapped. A flow has two entries, next to each other; three that fall on the same
 * two decide anew in turn. The daemon loads it for the processors that are there, and for each that may come two entries
 * behind those. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, DECISIONS_MAX);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, __u32);
	__type(value, struct decision);
} decisions SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1024 * 1024);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} trace SEC(".maps");

/* What each interface has entered into `trace`; see is_within in share.h. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, NICS_MAX);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, __u32);
	__type(value, __u64);
} trace_shares SEC(".maps");

/* Events of each interface that found no room in `trace`. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, NICS_MAX);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, __u32);
	__type(value, __u64);
} trace_lost SEC(".maps");

/* XDP has no class id: host ends in the profile `xdp`, by ifindex. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, NICS_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, __u32);
	__type(value, __u32);
} xdp_nics SEC(".maps");

#endif

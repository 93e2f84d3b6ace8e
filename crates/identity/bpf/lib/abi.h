/* What the programs and the command line share. Mirrored by src/abi.rs, which a test compares with this. */
#ifndef SANDWIRE_IDENTITY_ABI_H
#define SANDWIRE_IDENTITY_ABI_H

#include <linux/types.h>

/* Most sockets of one identity that listen on one port and that are kept apart. */
#define LISTENERS_MAX 8
/* Most sockets of one identity that listen at the same time, UDP's receivers among them: the maps of them are everybody's. */
#define LISTENERS_OF_ONE_MAX 1024
/* Most TCP sockets of one identity that are connected to its own loopback, where programs on connections judge them. */
#define DIALERS_OF_ONE_MAX 16384
#define REFUSALS_MAX 16
/* Ports at the own loopback that an unconnected UDP socket is remembered to have asked, the last ones. */
#define KNOWN_MAX 8
/* The highest eight bits of marks by which packets for elsewhere come to the relay of this host, by its loopback: the first
 * of them, and one for each of 64 cgroups. */
#define RELAY_MARK_FIRST 92
#define RELAY_MARK_LAST 156

/* In network order; IPv4 as ::ffff:a.b.c.d. */
struct address {
	__u32 words[4];
};

enum identity_flag {
	IDENTITY_ACTIVE = 1,
	/* Sockets other than TCP and UDP may be made. */
	IDENTITY_ALLOW_OTHER = 2,
	/* Everybody on the host may reach the identity's loopback. */
	IDENTITY_ALLOW_LOOPBACK = 4,
	/* What nobody of the identity listens to leads to services of the host on the wildcard. */
	IDENTITY_ALLOW_HOST = 8,
	/* No sockets but TCP's, and so no programs on packets. */
	IDENTITY_TCP_ONLY = 16,
	/* Sockets of IPv6 begin with IPV6_V6ONLY (net.ipv6.bindv6only). */
	IDENTITY_V6ONLY = 32,
	/* It has several addresses, and UDP: its servers may be asked at one that they aren't bound to. */
	IDENTITY_SEVERAL = 64,
};

/* An identity, as its cgroup's programs find it. All zero until it is active, and once it has ended. */
struct identity {
	/* The network namespace that it holds in. */
	__u64 netns;
	__u32 number;
	__u32 flags;
	/* The address that sockets get which choose none; 0 if there is none. In network order. */
	__u32 ipv4;
	/* The first of its 256 addresses in 127.0.0.0/8. */
	__u32 loopback4;
	__u32 ipv6[4];
	__u32 loopback6[4];
};

/* Whose an address is. Of 127.0.0.0/8, the first of 256. */
struct owner {
	__u32 number;
	__u32 flags;
};

enum owner_flag {
	OWNER_LOOPBACK = 1,
	/* As IDENTITY_ALLOW_HOST. */
	OWNER_ALLOW_HOST = 2,
	/* As IDENTITY_TCP_ONLY: who calls the loopback is judged here or nowhere. */
	OWNER_TCP_ONLY = 4,
	/* As IDENTITY_ALLOW_LOOPBACK. */
	OWNER_ALLOW_LOOPBACK = 8,
	/* As IDENTITY_SEVERAL. Not of a loopback. */
	OWNER_SEVERAL = 16,
};

/* A TCP socket that listens, or a UDP socket that receives. */
struct listener_key {
	/* Zero if it is for all of the identity's addresses. */
	struct address address;
	__u32 number;
	/* In the host's order. */
	__u16 port;
	__u8 family;
	/* Tells several sockets on one port apart. */
	__u8 position;
};

enum socket_flag {
	/* Asked for the wildcard, and has an address of the identity instead. */
	SOCKET_WILDCARD = 1,
	/* Asked for a peer at the loopback, and has one at the identity's own address. */
	SOCKET_PEER_LOOPBACK = 2,
	/* A bind, or a connect, was let through. These and the next one stay. */
	SOCKET_BOUND = 4,
	SOCKET_CONNECTED = 8,
	/* If it is connected, the kernel may have chosen its source: it asked for a group's address, which is none, or a bind may
	 * have taken its source away after the program on connect gave it (both let go of a UDP socket in between). */
	SOCKET_UNSURE = 16,
	/* Asked for the wildcard of both families, and is bound to the loopback, where nobody finds it by itself. */
	SOCKET_HIDDEN = 32,
	/* Bound to no interface there is, so that it hears nothing. */
	SOCKET_DEAF = 64,
	/* IPV6_V6ONLY is set, as far as anybody was told. */
	SOCKET_V6ONLY = 128,
	/* Its bind named an address, or a port. */
	SOCKET_SERVES = 256,
};

/* A socket that was made in an identity. */
struct socket_state {
	__u32 number;
	__u32 flags;
	/* The port that it asked for, in the host's order, if it has another instead; else 0. */
	__u32 port;
	/* The port that its entry among the listeners is for. */
	__u32 listens_at;
	/* Its own cookie, once it counts as a listener: an accepted socket has a copy of this, and another cookie. */
	__u64 listener;
	/* Family and port of peers at the identity's own address that it knows by its loopback address. */
	__u32 known[KNOWN_MAX];
	__u32 known_next;
	__u32 padding;
};

#define RULES_MAX 32
#define SERVICES_MAX 16
#define TALKS_MAX 16

/* As in the data paths of slots. Protocol 0 is every protocol; ports in the host's order. */
struct port_rule {
	__u8 protocol;
	__u8 allows;
	__u16 first;
	__u16 last;
	__u16 padding;
};

enum policy_flag {
	/* What no rule covers may be reached. */
	POLICY_ALLOW = 1,
	/* There are prefixes to look up. */
	POLICY_PREFIXES = 2,
	POLICY_HOST_ALL = 4,
	POLICY_HOST_ICMP = 8,
	/* Identities of the same group may be reached. */
	POLICY_SAME_GROUP = 16,
};

/* What an identity may reach. Exchanged as a whole. */
struct policy {
	/* Under which its prefixes and lists are found; another one for each change. Never 0. */
	__u32 index;
	__u32 flags;
	__u32 group;
	__u32 talk_count;
	__u32 service_count;
	__u32 padding;
	/* Groups that it may talk to, if those name its group too. */
	__u32 talks[TALKS_MAX];
	struct port_rule services[SERVICES_MAX];
};

struct prefix_key {
	/* In bits, the policy's index included. */
	__u32 prefix_length;
	__u32 policy;
	struct address address;
};

struct prefix {
	/* Number of its list of rules; 0 if it is for all ports. */
	__u32 list;
	__u16 allows;
	/* Whether it is cloud metadata. */
	__u16 metadata;
};

struct part_key {
	__u32 policy;
	__u32 part;
};

/* The rules of a prefix that speak of ports, the first that covers a packet decides. */
struct rule_list {
	__u32 count;
	__u32 padding;
	struct port_rule rules[RULES_MAX];
};

#define TEXT_PART 2048

/* A part of a policy as it was written, in JSON; zeros behind it. Programs have no use for it. */
struct text {
	__u8 bytes[TEXT_PART];
};

/* What is counted by an identity's number, where the cgroup's own counters can't be had. */
struct tally {
	/* TCP sockets that listen. */
	__u64 listeners;
	/* Connections to services of the host that were refused. */
	__u64 host_service;
};

/* A TCP connection to an identity's own loopback. Ports in the host's order. */
struct dialer_key {
	struct address source;
	struct address destination;
	__u16 source_port;
	__u16 destination_port;
};

struct dialer {
	/* Of the socket. */
	__u64 cookie;
	/* Of the identity. */
	__u32 number;
	__u32 padding;
};

/* What TCP connections have done. */
struct tcp_traffic {
	__u64 segments_out;
	/* Of data, that the other end has acknowledged. */
	__u64 bytes_out;
	__u64 segments_in;
	__u64 bytes_in;
};

/* What is counted by an identity's number, if it has TCP only. */
struct tcp_tally {
	struct tcp_traffic traffic;
	/* Entries among the dialers. */
	__u64 dialers;
	/* Connections of others to its loopback that were refused. */
	__u64 ingress_loopback;
};

/* Who has called a UDP socket, and may be answered though the policy denies it. */
struct caller {
	struct address address;
	__u16 port;
	__u16 padding;
	/* In units of 2^30 ns. */
	__u32 time;
	/* Held by whom reads or writes it. */
	__u32 busy;
};

enum receiver_state {
	/* Its key isn't written yet, or its identity was removed before it was entered. */
	RECEIVER_NONE = 0,
	/* It is to be put among the receivers. */
	RECEIVER_WAITS = 1,
	RECEIVER_ENTERED = 2,
};

/* A UDP socket that receives at addresses which it isn't bound to. */
struct receiver {
	struct listener_key key;
	/* enum receiver_state. */
	__u32 state;
};

/* Callers that are remembered, and how many of them are at one place. All that a socket has beside its buffers may have
 * 20 KiB (net.core.optmem_max before Linux 6.8). */
#define ASKED_PLACES 512
#define ASKED_WAYS 4
/* Addresses at which one socket was asked, not counting those that it answers from by itself. */
#define ASKED_ADDRESSES 16

/* At which address somebody has asked a UDP socket, and is to be answered from. */
struct asked_table {
	/* Each is written once. */
	struct address addresses[ASKED_ADDRESSES];
	__u32 count;
	/* Held by whom writes one. */
	__u32 busy;
	/* A bit that it is there, 27 by which the caller is known, and four that say which address. */
	__u32 callers[ASKED_PLACES][ASKED_WAYS];
};

#define CALLERS_MAX 64

struct callers {
	struct caller callers[CALLERS_MAX];
};

#define RECORD_ADDRESSES_MAX 16
#define RECORD_NAME_MAX 64
#define RECORD_PATH_MAX 512

enum record_state {
	/* Being added, or what is left of that after a crash. */
	RECORD_BUILDING = 1,
	RECORD_COMPLETE = 2,
	/* Being removed, or what is left of that. */
	RECORD_REMOVING = 3,
	/* Another cgroup has the identity now, and sockets of this one are open. */
	RECORD_FORMER = 4,
};

enum record_flag {
	/* Its loopback address for IPv6 was put on an interface. */
	RECORD_LOOPBACK6 = 1,
	/* Its cgroup was made for it, and goes with it. */
	RECORD_OWN_CGROUP = 2,
};

/* What is remembered of an identity, by cgroup. Written before the first step of adding one, gone after the last one of
 * removing it. Programs have no use for it. */
struct record {
	__u64 netns;
	__u32 state;
	__u32 number;
	/* As of struct identity. */
	__u32 identity_flags;
	__u32 flags;
	/* The interface that the addresses were put on. */
	__u32 interface;
	__u32 address_count;
	/* A bit for each address that was put there by us. */
	__u32 ours;
	/* Number of the daemon's instance that has it in its configuration; 0 if it was added by a command. */
	__u32 declared_by;
	struct address addresses[RECORD_ADDRESSES_MAX];
	__u8 name[RECORD_NAME_MAX];
	__u8 path[RECORD_PATH_MAX];
};

/* Why something was refused. */
enum refusal {
	REFUSED_BIND_ADDRESS = 0,
	REFUSED_BIND_FAMILY = 1,
	REFUSED_CONNECT_LOOPBACK = 2,
	REFUSED_CONNECT_FAMILY = 3,
	REFUSED_SOURCE = 4,
	REFUSED_PROTOCOL = 5,
	REFUSED_INGRESS_ADDRESS = 6,
	REFUSED_INGRESS_LOOPBACK = 7,
	REFUSED_EGRESS_SOURCE = 8,
	REFUSED_POLICY = 9,
	REFUSED_METADATA = 10,
	REFUSED_OTHER_IDENTITY = 11,
	REFUSED_HOST_SERVICE = 12,
	REFUSED_NO_POLICY = 13,
	REFUSED_LISTENERS = 14,
};

struct traffic {
	__u64 packets;
	__u64 bytes;
};

/* Of one identity on one CPU. */
struct counters {
	struct traffic egress;
	struct traffic ingress;
	__u64 refusals[REFUSALS_MAX];
};

#endif

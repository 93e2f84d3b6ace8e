/* What the programs share with the daemon: every struct, number and limit, once.
 *
 * `src/abi.rs` is its mirror; a test compares the two by the BTF of the compiled programs. A change
 * that an older daemon or older programs would misread needs a new ABI_VERSION: maps of another
 * version are rebuilt from the journal instead of being reused.
 *
 * Addresses are sixteen bytes in network order, IPv4 as ::ffff:a.b.c.d, unless a name ends in 4.
 */
#ifndef SANDWIRE_ABI_H
#define SANDWIRE_ABI_H

#include <linux/types.h>

#define ABI_VERSION 1

/* Host services that one policy may list, and rules that one prefix may have (its own and those of
 * the prefixes around it). */
#define SERVICES_MAX 16
#define RULES_MAX 32
/* Room for reasons; see enum drop_reason. */
#define DROP_REASONS_MAX 48
/* Bytes of a packet that a trace event carries. */
#define TRACE_BYTES 192
/* Interfaces of one sandbox. */
#define NICS_PER_SLOT 8

/* Read by halves. In packets and maps that may be anywhere; on the stack the verifier insists on its alignment, and where a
 * compiler puts it there is its own choice. */
struct address {
	__u32 word[4];
} __attribute__((aligned(8)));

/* Where an entry of `nics` is in its life. */
enum nic_state {
	NIC_ABSENT = 0, /* nobody's */
	NIC_READY = 1,  /* built, not leased: every packet is dropped */
	NIC_ACTIVE = 2, /* leased */
};

enum nic_flag {
	NIC_NETNS = 1 << 0,      /* the host end is a veth whose other end is in the slot's namespace */
	NIC_PROCESS = 1 << 1,    /* the sandbox is a process in that namespace, not behind a TAP */
	NIC_TRACE = 1 << 2,      /* somebody watches */
	NIC_LEARN = 1 << 3,      /* just moved here from nft: any packet towards it may open an answer */
	NIC_XDP = 1 << 4,        /* frames of the TAP provably have complete checksums and no GSO */
	NIC_PUBLISHED = 1 << 5,  /* the host's stack translates ports to it: answers go back that way */
	NIC_IMPAIRED = 1 << 6,   /* tc programs before ours divert its packets, which XDP and the way
				  * past the egress of a host end must leave to them */
	NIC_PEER = 1 << 7,       /* the host end is one of a pair whose other end is the sandbox's own */
	NIC_CHILD = 1 << 8,      /* no host end: the sandbox's interface is a child of one of the host's, by
				  * whose network alone it is reached */
	NIC_SHARED_MAC = 1 << 9, /* its MAC is that of its parent, and of all its parent's children */
};

/* One interface of a sandbox. Indexed by the class id of the filter on its host end; those of one
 * sandbox are neighbours. Entry 0 is never used by the daemon. Written field by field while not
 * active; afterwards `policy`, `generation`, `group`, `flags` and `state` change by one store each, and interfaces,
 * MACs and MTU before `generation` does. */
struct nic {
	__u32 state;          /* enum nic_state */
	__u32 flags;          /* enum nic_flag */
	__u32 policy;         /* index into `policies` */
	__u32 generation;     /* goes up whenever cached decisions no longer hold */
	__u32 ifindex;        /* host end: a TAP, or a veth */
	__u32 shared_ifindex; /* interface through which the host's own stack sees sandboxes */
	__u32 group;
	__u32 mtu;            /* of the guest's interface, in bytes */
	__u8 guest_mac[6];
	__u8 gateway_mac[6];
	__u8 veth_mac[6];     /* of both veth ends; only NIC_NETNS */
	__u8 shared_mac[6];   /* of the shared interface */
	__u32 guest4;         /* network order; zero without IPv4 */
	__u32 clone4;
	__u32 gateway4;
	__u32 slot;           /* slot number, for adoption */
	__u32 pool;           /* hash of the pool's name, for adoption */
	__u8 position;        /* which interface of its sandbox, from 0 */
	__u8 count;           /* how many the sandbox has */
	__u8 has_ipv6;
	__u8 reserved;
	struct address guest6; /* zero without IPv6 */
	struct address clone6;
	struct address gateway6;
	__u32 lease;          /* goes up with each lease: what one has opened is closed to the next */
	__u32 reserved_half;
	__u64 reserved_words[9];
};

enum uplink_mode {
	UPLINK_DENY = 0,
	UPLINK_ROUTE = 1,
	UPLINK_MASQUERADE = 2,
};

enum action {
	ACTION_DENY = 0,
	ACTION_ALLOW = 1,
};

enum policy_flag {
	POLICY_PREFIXES = 1 << 0,     /* `prefixes` has entries of this policy */
	POLICY_ALLOW = 1 << 1,        /* default action for what no rule covers; else deny */
	POLICY_HOST_ALL = 1 << 2,     /* every service of the host */
	POLICY_HOST_ICMP = 1 << 3,    /* echo to the host */
	POLICY_SAME_GROUP = 1 << 4,   /* sandboxes of the same group may talk */
	POLICY_OTHER_GROUPS = 1 << 5, /* `group_pairs` is worth a look */
	POLICY_ANSWERS = 1 << 6,      /* answers must be remembered: something is denied or masqueraded */
	POLICY_REDIRECTS = 1 << 7,    /* only entry 0: `prefixes` has what may leave only by the relay */
};

/* Ports of one protocol. Protocol 0 is any, ports 0-65535 are all; for ICMP and others only the
 * protocol counts. */
struct port_rule {
	__u8 protocol; /* 0 any, 6, 17, 1 (also ICMPv6), … */
	__u8 action;   /* enum action */
	__u16 first;   /* host order, both ends included */
	__u16 last;
	__u16 reserved;
};

/* A virtual-scheduling (GCRA) limit. A packet conforms if the debt of those before it is at most
 * the burst; it then adds its own cost. A cost of zero means no limit. */
struct limit {
	__u64 byte_cost;    /* nanoseconds per byte of IP packet and Ethernet header, times 2^20 */
	__u64 byte_burst;   /* nanoseconds */
	__u64 packet_cost;  /* nanoseconds per packet on the wire: a GSO packet counts its segments */
	__u64 packet_burst; /* nanoseconds */
};

struct policy {
	__u32 flags;   /* enum policy_flag */
	__u32 uplink;  /* enum uplink_mode */
	__u32 mark;    /* for the route look-up and packets handed to the host's stack; 0 none */
	__u32 table;   /* routing table to look up; 0: by the host's rules */
	__u32 service_count;
	__u32 reserved;
	struct port_rule services[SERVICES_MAX];
	struct limit egress;
	struct limit ingress;
};

/* Policy 0 is nobody's. Its prefixes are sources: what they have for a list is the number by which the destinations
 * are kept that may be reached only by the relay. */
struct prefix_key {
	__u32 prefix_length; /* 32 for the policy, plus that of the address (IPv4: plus 96) */
	__u32 policy;
	struct address address;
};

struct prefix_value {
	__u32 list;    /* index into `rule_lists`; 0: `action` holds for every port */
	__u16 action;  /* enum action */
	__u16 reason;  /* enum drop_reason when denied */
};

/* First match decides; what none matches falls to the policy's default action. */
struct rule_list {
	__u32 count;
	__u32 reserved;
	struct port_rule rules[RULES_MAX];
};

struct clone_value {
	__u32 nic;
};

struct group_pair {
	__u32 from;
	__u32 to;
};

/* Interfaces that packets may leave by without the host's own stack. */
struct uplink {
	__u32 flags; /* enum uplink_flag */
	__u32 reserved;
};

enum uplink_flag {
	UPLINK_FQ = 1 << 0,  /* its queue honours departure times */
	UPLINK_XDP = 1 << 1, /* it takes frames from XDP */
};

enum answer_via {
	ANSWER_UPLINK = 1, /* the packet came past an uplink's program: answers leave the same way */
	ANSWER_STACK = 2,  /* it came through the host's stack: so do its answers */
};

struct answer_key {
	__u32 nic;
	__u16 peer_port;  /* network order; zero for ICMP and others */
	__u16 guest_port; /* network order; the identifier of an echo */
	struct address peer;
	__u32 fragment;   /* place of a fragmented answer, from one, or zero */
	__u8 protocol;
	__u8 reserved[3];
};

struct answer_value {
	__u64 seen; /* CLOCK_MONOTONIC, nanoseconds */
	__u8 via;   /* enum answer_via */
	__u8 own;   /* the guest might send there by itself when it came: it may be no call, but an answer */
	__u16 fragment; /* of a fragmented answer's identification, what its place doesn't say */
	__u32 lease; /* of the interface, when it came */
};

struct traffic {
	__u64 packets;  /* as the driver hands them over */
	__u64 bytes;
	__u64 segments; /* as they are on the wire */
};

/* `egress` and `ingress` are what programs of before `ledgers` have let through, or what was at other maps. Today's add
 * drops alone. All processors add here, and so atomically. */
struct counters {
	struct traffic egress;
	struct traffic ingress;
	__u64 drops[DROP_REASONS_MAX];
};

/* What one processor has paid ahead by a meter, in nanoseconds of it. */
struct credit {
	__u32 bytes;
	__u32 packets;
};

struct credits {
	struct credit egress;
	struct credit ingress;
};

/* What one processor has let through of one interface: a line of the cache, which no other processor writes. Traffic never
 * goes down. In the daemon's own line: what the sum of the others was when the lease began, or when it was moved elsewhere. */
struct ledger {
	struct traffic egress;
	struct traffic ingress;
	__u64 lease; /* the daemon's: of the interface, when it was written. Others: from here on struct credits */
	__u64 reserved;
};

/* Theoretical arrival times, CLOCK_MONOTONIC nanoseconds. */
struct meter {
	__u64 bytes;
	__u64 packets;
};

struct meters {
	struct meter egress;
	struct meter ingress;
};

/* Entries of `decisions` that a processor has. */
#define DECISIONS_MAX 4096
/* The same of a processor that came after the maps were made. */
#define DECISIONS_LATER 2
/* Bytes of struct sk_buff that skb_places may span. */
#define SKB_SPAN_MAX 96
/* Stands in a call for the kernel's number of bpf_cast_to_kern_ctx. */
#define SKB_CAST 0x73776b63

/* Flows whose answers were looked at of late, by each CPU. */
struct noted {
	__u64 secret;      /* so that nobody outside can make two flows' hashes alike */
	__u64 flows[2048]; /* upper half of the hash; CLOCK_MONOTONIC in units of 2^20 nanoseconds */
};

/* Neighbours that one interface may have the host look for in a while; see share.h. A power of two. */
#define NEIGHBOURS_MAX 32

/* Those that it had looked for of late, in turn. */
struct neighbour_share {
	__u64 secret;                /* so that nobody outside can make two neighbours' hashes alike */
	__u64 next;                  /* how many it were; where the next one goes is the oldest of them */
	__u64 asked[NEIGHBOURS_MAX]; /* upper half of the hash; CLOCK_MONOTONIC in units of 2^20 nanoseconds */
};

/* Where neighbour_samples has that of an interface. A power of two. */
#define SAMPLES_MAX 4

/* Addresses to which one interface has sent by some of the host's interfaces, each the first of late that wasn't known there. */
struct neighbour_samples {
	struct address sent[SAMPLES_MAX];
};

/* Decided once per destination and policy, and port where that has a say, and kept for a short time per CPU. */
struct decision {
	__u32 nic;
	__u32 generation;
	struct address destination;
	__u16 port;
	__u8 protocol;
	__u8 variant;   /* bits: 1 fragment after the first, 2 answer sent as UPLINK_ROUTE would be, 4 all ports */
	__u16 verdict;  /* enum verdict; or, of all ports: LEFT_TO_PORTS */
	__u16 mtu;      /* of `ifindex`, or what no packet exceeds */
	__u64 until;    /* CLOCK_MONOTONIC, nanoseconds */
	__u32 ifindex;  /* interface to leave by */
	__u32 target;   /* VERDICT_SANDBOX: entry of `nics`; VERDICT_DROP: enum drop_reason */
	__u8 source_mac[6];
	__u8 destination_mac[6];
	__u32 flags;    /* enum decision_flag; VERDICT_SANDBOX: generation of the target */
};

enum decision_flag {
	DECISION_FQ = 1 << 0,         /* UPLINK_FQ of the interface */
	DECISION_XDP = 1 << 1,        /* UPLINK_XDP of the interface */
	DECISION_MASQUERADE = 1 << 2, /* to the stack, to be masqueraded: unless it is an answer */
	DECISION_PAST_HOST = 1 << 3,  /* past the stack or not at all: it would be the host's own */
	DECISION_PAST_RULES = 1 << 4, /* past the stack or not at all: it would send it by another table */
};

enum verdict {
	VERDICT_DROP = 0,
	VERDICT_UPLINK = 1,   /* left by an uplink */
	VERDICT_SANDBOX = 2,  /* delivered to another sandbox */
	VERDICT_STACK = 3,    /* handed to the host's own stack */
	VERDICT_ANSWERED = 4, /* answered by the path itself: ARP, neighbour discovery, gateway echo */
	VERDICT_GUEST = 5,    /* delivered to the guest */
	VERDICT_PASS = 6,     /* not ours; left to the host */
};

enum stage {
	STAGE_PARSE = 0,
	STAGE_ANTISPOOF = 1,
	STAGE_POLICY = 2,
	STAGE_ROUTE = 3,
	STAGE_POLICE = 4,
	STAGE_NAT = 5,
	STAGE_REDIRECT = 6,
};

enum direction {
	DIRECTION_EGRESS = 0,
	DIRECTION_INGRESS = 1,
};

struct trace_event {
	__u64 time; /* CLOCK_MONOTONIC, nanoseconds */
	__u32 nic;
	__u32 target;   /* interface it was sent to, or zero */
	__u32 length;   /* of the frame as it came */
	__u32 captured; /* bytes in `frame` */
	__u16 segments;
	__u8 direction; /* enum direction */
	__u8 verdict;   /* enum verdict */
	__u8 reason;    /* enum drop_reason */
	__u8 stage;     /* enum stage: where the verdict fell */
	__u16 reserved;
	__u8 frame[TRACE_BYTES]; /* as it came, before translation */
};

/* Where the kernel's struct sk_buff says which checksum of a packet is to be finished. Zeros: that isn't known. */
struct skb_places {
	__u16 first;           /* in struct sk_buff; the others are counted from there */
	__u16 length;          /* from the first of these fields to the last */
	__u16 state;           /* ip_summed */
	__u16 state_mask;      /* its bits, all set in a packet with an unfinished checksum */
	__u16 checksum_start;  /* from the buffer's head, like mac_header */
	__u16 checksum_offset; /* from checksum_start */
	__u16 mac_header;
};

/* Where the kernel says whether its routes depend on ports. Zeros: that isn't known. */
struct netns_places {
	__u16 device;     /* in struct sk_buff */
	__u16 netns;      /* in struct net_device */
	__u16 rules4;     /* in struct net: how many rules look at protocol or ports */
	__u16 rules6;
	__u16 multipath4; /* in struct net: fib_multipath_hash_policy, one byte */
	__u16 multipath6;
};

/* Why a packet was dropped. Names and texts are in crates/api/src/drop_reason.rs; a test compares. */
enum drop_reason {
	DROP_NONE = 0,
	DROP_NOT_LEASED = 1,
	DROP_VLAN_TAG = 2,
	DROP_ETHERTYPE = 3,
	DROP_MALFORMED = 4,
	DROP_SOURCE_MAC = 5,
	DROP_SOURCE_ADDRESS = 6,
	DROP_ROGUE_DHCP = 7,
	DROP_ROGUE_RA = 8,
	DROP_ARP = 9,
	DROP_NEIGHBOUR = 10,
	DROP_LINK_CHATTER = 11,
	DROP_MULTICAST = 12,
	DROP_DESTINATION = 13,
	DROP_GATEWAY_SERVICE = 14,
	DROP_OTHER_SANDBOX = 15,
	DROP_NO_SUCH_SANDBOX = 16,
	DROP_POLICY = 17,
	DROP_METADATA = 18,
	DROP_HOST_SERVICE = 19,
	DROP_UPLINK_DENIED = 20,
	DROP_NO_ROUTE = 21,
	DROP_BIT_LIMIT = 22,
	DROP_PACKET_LIMIT = 23,
	DROP_TOO_BIG = 24,
	DROP_HELPER = 25,
	DROP_ROUTING_HEADER = 26,
	DROP_EXTENSION_HEADERS = 27,
	DROP_NO_ADDRESS = 28,
	DROP_NOT_RELAYED = 29,
	DROP_NEIGHBOUR_LIMIT = 30,
};

#endif

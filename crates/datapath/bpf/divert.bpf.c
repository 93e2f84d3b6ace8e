/* A diversion: what an interface receives or is about to send goes through a process that has two TAPs, a TAP for
 * each direction, and comes back to the very place where it was taken off.
 *
 *   interface, ingress: divert_ingress -> TAP -> process -> TAP: return_ingress -> ingress of the interface again
 *   interface, egress:  divert_egress  -> TAP -> process -> TAP: return_egress  -> egress of the interface again
 *
 * A packet that comes back is told from one that comes first by tc_index, which stays with the packet from program to
 * program, and by a number that nobody knows, which it has for a hash. Neither sockets nor netfilter can set either, and
 * nobody without eBPF both: whoever has the other end of a veth can choose tc_index there (a filter's class), but not the
 * hash. So no packet passes by claiming to have been there, and the marks of others are left alone. Each of the four
 * programs on its way takes them off or replaces them, so that nobody after us sees them.
 *
 * A TAP goes with its process. Whether it is there is asked of the kernel for each packet, so that what happens when
 * the process dies takes nobody to notice it. */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

char _license[] SEC("license") = "Dual MIT/GPL";

/* In tc_index, between our programs alone. */
#define ON_THE_WAY 0x5d1a
#define RETURNED 0x5d1b

#define DIRECTION_INGRESS 0
#define DIRECTION_EGRESS 1

/* Packets pass without being diverted. */
#define FLAG_PASS 1
/* When the TAP is gone packets pass; else they are dropped. */
#define FLAG_OPEN 2
/* With FLAG_PASS: as soon as nothing is under way, so that no packet overtakes one that was diverted before. */
#define FLAG_WHEN_EMPTY 4

#define ENODEV 19

/* As in lib/parse.h: by one write of TCP a guest could otherwise have the kernel make 65,535 packets for the TAP. */
#define SEGMENTS_MAX 2048

/* In a packet, beside the one that the kernel takes off. */
#define TAGS_MAX 2
#define EXTENSIONS_MAX 8
#define IPV6_HEADER_LENGTH 40
#define UDP_HEADER_LENGTH 8

enum protocol {
	PROTOCOL_HOP_BY_HOP = 0,
	PROTOCOL_TCP = 6,
	PROTOCOL_UDP = 17,
	PROTOCOL_ROUTING = 43,
	PROTOCOL_NONE = 59,
	PROTOCOL_DESTINATION = 60,
};

struct direction {
	/* Number of the TAP in the low half, flags in the high one: read and written as one. */
	__u64 way;
	/* Number of the interface in the low half, the hash of what comes back in the high one. */
	__u64 interface;
	__u64 diverted;
	__u64 returned;
	/* The TAP was gone. */
	__u64 dead_dropped;
	__u64 dead_passed;
	/* Packets diverted that have not come back and never will, for FLAG_WHEN_EMPTY. */
	__u64 lost;
	/* Super-packets of too many segments. */
	__u64 uncut;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct direction);
} directions SEC(".maps");

static __always_inline struct direction *find(__u32 key)
{
	return bpf_map_lookup_elem(&directions, &key);
}

/* Where a header begins, and of which protocol it is. */
struct header {
	__u32 at;
	__u32 protocol;
};

static __always_inline __u32 byte_at(struct __sk_buff *skb, __u32 at)
{
	__u8 byte = 0;

	bpf_skb_load_bytes(skb, at, &byte, sizeof(byte));
	return byte;
}

/* The IP header, behind tags. */
static __always_inline void find_network(struct __sk_buff *skb, struct header *h)
{
	__be16 ethertype = 0;

	h->at = ETH_HLEN;
	/* Unrolled, as below: Linux 6.1 takes no loop whose last instruction falls through to its first. */
#pragma unroll
	for (int i = 0; i <= TAGS_MAX; i++) {
		bpf_skb_load_bytes(skb, h->at - sizeof(ethertype), &ethertype, sizeof(ethertype));
		h->protocol = ethertype;
		if (ethertype != bpf_htons(ETH_P_8021Q) && ethertype != bpf_htons(ETH_P_8021AD))
			break;
		h->at += 4;
	}
}

/* From the IP header on to what it carries. */
static __always_inline void find_transport(struct __sk_buff *skb, struct header *h)
{
	__u32 network = h->at;

	if (h->protocol == bpf_htons(ETH_P_IP)) {
		h->protocol = byte_at(skb, network + 9);
		h->at = network + (byte_at(skb, network) & 15) * 4;
		return;
	}
	if (h->protocol != bpf_htons(ETH_P_IPV6)) {
		h->protocol = PROTOCOL_NONE;
		return;
	}
	h->protocol = byte_at(skb, network + 6);
	h->at = network + IPV6_HEADER_LENGTH;
	/* The kernel cuts super-packets with no others than these. */
#pragma unroll
	for (int i = 0; i < EXTENSIONS_MAX; i++) {
		__u32 at = h->at;

		if (h->protocol != PROTOCOL_HOP_BY_HOP && h->protocol != PROTOCOL_ROUTING &&
		    h->protocol != PROTOCOL_DESTINATION)
			break;
		h->protocol = byte_at(skb, at);
		h->at = at + 8 + byte_at(skb, at + 1) * 8;
	}
}

/* Nobody has counted the segments of what a VMM writes to a TAP for its guest: so as the kernel will cut it. Of a
 * tunnel the outer headers are all that is known. Not inlined: it is seldom needed. */
__noinline __u64 count_segments(struct __sk_buff *skb)
{
	__u32 size = skb->gso_size, length = skb->len;
	struct header h;

	find_network(skb, &h);
	find_transport(skb, &h);
	if (h.protocol == PROTOCOL_TCP)
		h.at += (byte_at(skb, h.at + 12) >> 4) * 4;
	else if (h.protocol == PROTOCOL_UDP)
		h.at += UDP_HEADER_LENGTH;
	if (!size || length <= h.at + size)
		return 1;
	return (length - h.at + size - 1) / size;
}

/* Wire packets, not super-packets. */
static __always_inline __u64 packets_of(struct __sk_buff *skb)
{
	if (skb->gso_segs > 1)
		return skb->gso_segs;
	return skb->gso_size ? count_segments(skb) : 1;
}

static __always_inline int is_empty(const struct direction *direction)
{
	__u64 diverted = *(volatile __u64 *)&direction->diverted;
	__u64 returned = *(volatile __u64 *)&direction->returned;

	return diverted - returned == direction->lost;
}

static __always_inline int has_returned(const struct __sk_buff *skb,
					const struct direction *direction)
{
	return skb->tc_index == RETURNED &&
	       skb->hash == *(volatile __u64 *)&direction->interface >> 32;
}

static __always_inline int divert(struct __sk_buff *skb, __u32 key)
{
	struct direction *direction;
	__u32 tap, flags, mtu = 0;
	__u64 way, packets;

	direction = find(key);
	if (!direction)
		return TC_ACT_UNSPEC;
	if (has_returned(skb, direction)) {
		skb->tc_index = 0;
		bpf_set_hash_invalid(skb);
		return TC_ACT_UNSPEC;
	}
	way = *(volatile __u64 *)&direction->way;
	tap = (__u32)way;
	flags = way >> 32;
	if (flags & FLAG_PASS && (!(flags & FLAG_WHEN_EMPTY) || is_empty(direction)))
		return TC_ACT_UNSPEC;
	/* Larger than the MTU may be any super-packet: only whether the TAP is there counts. */
	packets = packets_of(skb);
	if (bpf_check_mtu(skb, tap, &mtu, 0, 0) == -ENODEV) {
		if (flags & FLAG_OPEN) {
			__sync_fetch_and_add(&direction->dead_passed, packets);
			return TC_ACT_UNSPEC;
		}
		__sync_fetch_and_add(&direction->dead_dropped, packets);
		return TC_ACT_SHOT;
	}
	if (packets > SEGMENTS_MAX) {
		__sync_fetch_and_add(&direction->uncut, 1);
		return TC_ACT_SHOT;
	}
	__sync_fetch_and_add(&direction->diverted, packets);
	skb->tc_index = ON_THE_WAY;
	return bpf_redirect(tap, 0);
}

/* Ingress of the interface. */
SEC("classifier")
int divert_ingress(struct __sk_buff *skb)
{
	return divert(skb, DIRECTION_INGRESS);
}

/* Egress of the interface. */
SEC("classifier")
int divert_egress(struct __sk_buff *skb)
{
	return divert(skb, DIRECTION_EGRESS);
}

/* Egress of both TAPs: nothing but what was diverted leaves by them, neither what the namespace's own stack says to
 * a new interface nor what somebody in it sends there. */
SEC("classifier")
int divert_admit(struct __sk_buff *skb)
{
	if (skb->tc_index != ON_THE_WAY)
		return TC_ACT_SHOT;
	skb->tc_index = 0;
	return TC_ACT_UNSPEC;
}

static __always_inline int come_back(struct __sk_buff *skb, __u32 key, __u64 flags)
{
	struct direction *direction = find(key);
	__u64 interface;

	if (!direction)
		return TC_ACT_SHOT;
	__sync_fetch_and_add(&direction->returned, 1);
	interface = *(volatile __u64 *)&direction->interface;
	skb->tc_index = RETURNED;
	bpf_set_hash(skb, interface >> 32);
	return bpf_redirect((__u32)interface, flags);
}

/* Ingress of the TAP for what the interface receives. */
SEC("classifier")
int return_ingress(struct __sk_buff *skb)
{
	return come_back(skb, DIRECTION_INGRESS, BPF_F_INGRESS);
}

/* Ingress of the TAP for what the interface sends. */
SEC("classifier")
int return_egress(struct __sk_buff *skb)
{
	return come_back(skb, DIRECTION_EGRESS, 0);
}

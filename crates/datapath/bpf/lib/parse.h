/* Parsing: from an Ethernet frame to the few facts that the stages need. */
#ifndef SANDWIRE_PARSE_H
#define SANDWIRE_PARSE_H

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <bpf/bpf_endian.h>

#include "abi.h"

#define READ_ONCE(x) (*(const volatile __typeof__(x) *)&(x))

/* For the layout of the code: what is rare is kept out of the way of the rest. */
#define rarely(x) __builtin_expect(!!(x), 0)

#define EXTENSIONS_MAX 8
/* Segments that a guest may leave to the host to cut: 64 KiB in the smallest that Linux's TCP sends with an option
 * in each (TCP_MIN_SND_MSS), and more than that of UDP. By one write a guest could otherwise have the kernel make
 * 65,535 packets at once, and no other packet pass on that processor meanwhile. */
#define SEGMENTS_MAX 2048
#define SCTP_HEADER_LENGTH 12
/* What a length in an IP header can say. Longer are only super-packets of TCP ("BIG TCP": Linux 5.19 for IPv6, 6.3 for
 * IPv4), and say zero. */
#define LENGTH_MAX 0xffff
/* What Linux puts before the TCP header of such a packet of IPv6, and takes away again as it cuts it up: a hop-by-hop
 * header of a jumbo payload option alone (RFC 2675). Its first four bytes, and its length. */
#define JUMBO_BEFORE_TCP bpf_htonl(0x0600c204)
#define JUMBO_LENGTH 8
#define IPV4_L4 (ETH_HLEN + sizeof(struct iphdr))
#define IPV6_L4 (ETH_HLEN + sizeof(struct ipv6hdr))
#define IPV4_OPTIONS_MAX 40
#define IPV4_MORE_FRAGMENTS 0x2000
#define IPV4_OFFSET 0x1fff
#define MAPPED_PREFIX bpf_htonl(0x0000ffff)

/* Linux's own headers for user space name only some of these. */
enum protocol {
	PROTOCOL_HOP_BY_HOP = 0,
	PROTOCOL_ICMP = 1,
	PROTOCOL_TCP = 6,
	PROTOCOL_UDP = 17,
	PROTOCOL_DCCP = 33,
	PROTOCOL_ROUTING = 43,
	PROTOCOL_FRAGMENT = 44,
	PROTOCOL_AUTHENTICATION = 51,
	PROTOCOL_ICMPV6 = 58,
	PROTOCOL_NONE = 59,
	PROTOCOL_DESTINATION = 60,
	PROTOCOL_UDP_LITE = 136,
};

enum ipv4_option {
	OPTION_END = 0,
	OPTION_NOTHING = 1,
	OPTION_LOOSE_ROUTE = 131,
	OPTION_STRICT_ROUTE = 137,
};

enum fragment {
	FRAGMENT_WHOLE = 0,
	FRAGMENT_FIRST = 1,
	FRAGMENT_LATER = 2,
};

enum icmp_kind {
	ICMP_NONE = 0, /* another protocol, or a fragment after the first */
	ICMP_REQUEST = 1,
	ICMP_REPLY = 2,
	ICMP_ERROR = 3,
	ICMP_OTHER = 4,
};

struct packet {
	struct address source;
	struct address destination;
	__u32 identification; /* of the fragments, host order */
	__u32 bytes;          /* of the frame */
	__u32 segments;
	__u32 wire_bytes;     /* of all segments, each with its headers */
	__u32 largest;        /* IP packet that goes over the wire, with what is behind it, bytes; see by_fragments */
	__u32 length;         /* of the IP packet */
	__u32 unfinished;     /* where in the frame a checksum ends that is left to be finished; zero: none, or not asked */
	__u16 l4;             /* offset of the L4 header in the frame */
	__u16 payload;        /* offset of what follows it, in a tunnel's super-packet all headers; equal to l4 where unknown */
	__u16 source_port;    /* network order; zero without ports */
	__u16 destination_port;
	__u16 identifier;     /* of an ICMP echo, network order */
	__u8 version;
	__u8 protocol;
	__u8 fragment;        /* enum fragment */
	__u8 ttl;
	__u8 icmp_type;
	__u8 icmp_kind;       /* enum icmp_kind */
	__u8 opens;           /* TCP: SYN without ACK */
	__u8 as_answer;       /* routed as UPLINK_ROUTE would be */
	__u8 any_port;        /* a decision for all ports of the destination is asked for */
	__u8 from_host;       /* towards a guest: the host itself has made it */
	__u8 by_fragments;    /* a super-packet whose segments are what the kernel keeps apart; `largest` is all of it */
	__u8 unsent;          /* bytes of a super-packet's headers that none of its segments has */
	__u8 is_relayed;      /* a new decision: the relay's rules in the host's stack have a say */
	__u8 has_new_hop;     /* a new decision sends it to a neighbour that the kernel has yet to look for, and no router */
	/* Where a new decision says that the packet must go; the neighbour may be unknown yet. */
	struct bpf_redir_neigh next_hop;
};

/* Result of walking IPv6 extension headers. */
struct extensions {
	__u32 l4;
	__u32 identification;
	__u8 protocol;
	__u8 fragment;
	__u8 reserved[2];
};

static __always_inline int same_mac(const void *a, const void *b)
{
	return *(const __u32 *)a == *(const __u32 *)b &&
	       *(const __u16 *)(a + 4) == *(const __u16 *)(b + 4);
}

/* In packets and maps, not on the stack: there the verifier insists on alignment. Two stores, where the
 * compiler would make six. */
static __always_inline void copy_mac(void *to, const void *from)
{
	*(__u32 *)to = *(const __u32 *)from;
	*(__u16 *)(to + 4) = *(const __u16 *)(from + 4);
}

static __always_inline int same_address(const struct address *a, const struct address *b)
{
	const __u64 *x = (const __u64 *)a, *y = (const __u64 *)b;

	return x[0] == y[0] && x[1] == y[1];
}

static __always_inline struct address mapped(__be32 address4)
{
	struct address address = {.word = {0, 0, MAPPED_PREFIX, address4}};

	return address;
}

static __always_inline int is_mapped(const struct address *a)
{
	return !a->word[0] && !a->word[1] && a->word[2] == MAPPED_PREFIX;
}

static __always_inline int is_link_local(const struct address *a)
{
	return (a->word[0] & bpf_htonl(0xffc00000)) == bpf_htonl(0xfe800000);
}

static __always_inline int is_unspecified(const struct address *a)
{
	return !(a->word[0] | a->word[1] | a->word[2] | a->word[3]);
}

/* fe80::1, by which every guest may know its gateway. */
static __always_inline int is_router_address(const struct address *a)
{
	return a->word[0] == bpf_htonl(0xfe800000) && !a->word[1] && !a->word[2] &&
	       a->word[3] == bpf_htonl(1);
}

static __always_inline int is_extension(__u8 protocol)
{
	return protocol == PROTOCOL_HOP_BY_HOP || protocol == PROTOCOL_ROUTING ||
	       protocol == PROTOCOL_FRAGMENT || protocol == PROTOCOL_AUTHENTICATION ||
	       protocol == PROTOCOL_DESTINATION;
}

/* Bytes of L4 header that whole packets and first fragments must have. */
static __always_inline __u32 l4_demand(const struct packet *p)
{
	switch (p->protocol) {
	case PROTOCOL_TCP:
		return 20;
	case PROTOCOL_UDP:
		return 8;
	case PROTOCOL_ICMP:
		return p->version == 4 ? 8 : 0;
	case PROTOCOL_ICMPV6:
		return p->version == 6 ? 8 : 0;
	default:
		return 0;
	}
}

/* Walks the extension headers of the IPv6 packet that ends at `end` of the frame, from `out->l4` and
 * `out->protocol` on. Returns a drop reason. A function of its own: the verifier sees it once. */
__noinline int walk_extensions(frame *f, __u32 end, struct extensions *out)
{
	__u32 offset, length;
	__u8 header[8], next;

	if (!out)
		return DROP_MALFORMED;
	offset = out->l4;
	next = out->protocol;
	/* Unrolled: Linux 6.1 takes no loop whose last instruction falls through to its first. */
#pragma unroll
	for (int i = 0; i <= EXTENSIONS_MAX; i++) {
		if (!is_extension(next))
			break;
		if (i == EXTENSIONS_MAX)
			return DROP_EXTENSION_HEADERS;
		if (offset + 8 > end || offset > 0xffff || frame_load(f, offset, header, 8))
			return DROP_MALFORMED;
		length = (header[1] + 1) * 8;
		if (next == PROTOCOL_AUTHENTICATION)
			length = (header[1] + 2) * 4;
		if (next == PROTOCOL_FRAGMENT)
			length = 8;
		if (offset + length > end)
			return DROP_MALFORMED;
		if (next == PROTOCOL_ROUTING && header[3])
			return DROP_ROUTING_HEADER;
		offset += length;
		if (next == PROTOCOL_FRAGMENT) {
			__u32 place = header[2] << 8 | header[3];

			out->identification = (__u32)header[4] << 24 | header[5] << 16 |
					      header[6] << 8 | header[7];
			if (place & 0xfff8) {
				out->fragment = FRAGMENT_LATER;
				next = header[0];
				break;
			}
			if (place & 1)
				out->fragment = FRAGMENT_FIRST;
		}
		next = header[0];
	}
	out->l4 = offset;
	out->protocol = next;
	return DROP_NONE;
}

/* Whether an IPv4 header that ends at `end` of the frame has a source route: the destination is only the next of
 * those that it leads to. Linux itself drops such packets unless it is told otherwise. */
__noinline int has_source_route(frame *f, __u32 end)
{
	__u32 offset = IPV4_L4;
	__u8 option, length;

	for (int i = 0; i < IPV4_OPTIONS_MAX; i++) {
		if (offset >= end || frame_load(f, offset, &option, 1) || option == OPTION_END)
			return 0;
		if (option == OPTION_LOOSE_ROUTE || option == OPTION_STRICT_ROUTE)
			return 1;
		length = 1;
		if (option != OPTION_NOTHING &&
		    (frame_load(f, offset + 1, &length, 1) || length < 2))
			return 0;
		offset += length;
	}
	return 0;
}

static __always_inline __u8 icmp_kind_of(__u8 version, __u8 type)
{
	if (version == 4) {
		if (type == 8)
			return ICMP_REQUEST;
		if (type == 0)
			return ICMP_REPLY;
		/* Unreachable, source quench, redirect, time exceeded, parameter problem. */
		if (type == 3 || type == 4 || type == 5 || type == 11 || type == 12)
			return ICMP_ERROR;
		return ICMP_OTHER;
	}
	if (type == 128)
		return ICMP_REQUEST;
	if (type == 129)
		return ICMP_REPLY;
	return type >= 1 && type <= 4 ? ICMP_ERROR : ICMP_OTHER;
}

/* `head` is the start of the L4 header: eight bytes. */
static __always_inline void read_l4(struct packet *p, const __u8 *head)
{
	if (p->protocol == PROTOCOL_TCP || p->protocol == PROTOCOL_UDP) {
		p->source_port = *(const __u16 *)head;
		p->destination_port = *(const __u16 *)(head + 2);
	} else {
		p->icmp_type = head[0];
		p->icmp_kind = icmp_kind_of(p->version, head[0]);
		p->identifier = *(const __u16 *)(head + 4);
	}
	p->payload = p->l4 + 8;
}

/* `rest` is the TCP header from its twelfth byte on. */
static __always_inline void read_tcp(struct packet *p, const __u8 *rest)
{
	p->payload = p->l4 + (rest[0] >> 4) * 4;
	p->opens = (rest[1] & 0x12) == 0x02;
}

static __always_inline int parse_l4(frame *f, struct packet *p, __u32 usual)
{
	__u32 demand = p->fragment == FRAGMENT_LATER ? 0 : l4_demand(p);
	__u8 copy[8] __attribute__((aligned(8)));

	p->payload = p->l4;
	if (!demand)
		return DROP_NONE;
	if (p->length + ETH_HLEN < p->l4 + demand)
		return DROP_MALFORMED;
	if (!rarely(p->l4 != usual)) {
		const __u8 *head = frame_data(f) + usual;

		if (head + 8 > (const __u8 *)frame_end(f))
			return DROP_MALFORMED;
		read_l4(p, head);
		if (p->protocol == PROTOCOL_TCP) {
			if (head + 14 > (const __u8 *)frame_end(f))
				return DROP_MALFORMED;
			read_tcp(p, head + 12);
		}
		return DROP_NONE;
	}
	if (frame_load(f, p->l4, copy, 8))
		return DROP_MALFORMED;
	read_l4(p, copy);
	if (p->protocol == PROTOCOL_TCP) {
		if (frame_load(f, p->l4 + 12, copy, 2))
			return DROP_MALFORMED;
		read_tcp(p, copy);
	}
	return DROP_NONE;
}

/* The length of a super-packet's `rest` of the frame where its header can't say it; else zero. */
static __always_inline __u32 unsaid_length(const frame *f, __u32 rest)
{
	return rest > LENGTH_MAX && frame_gso_size(f) ? rest : 0;
}

/* The headers must be linear. */
static __always_inline int parse_ipv4(frame *f, struct packet *p)
{
	const struct iphdr *ip = frame_data(f) + ETH_HLEN;
	__u32 beyond = frame_length(f) - ETH_HLEN;
	__u16 place;

	if ((const void *)(ip + 1) > frame_end(f) || ip->version != 4)
		return DROP_MALFORMED;
	p->length = bpf_ntohs(ip->tot_len);
	if (rarely(!p->length) && ip->protocol == PROTOCOL_TCP)
		p->length = unsaid_length(f, beyond);
	if (ip->ihl < 5 || p->length < ip->ihl * 4 || p->length > beyond)
		return DROP_MALFORMED;
	p->version = 4;
	p->protocol = ip->protocol;
	p->ttl = ip->ttl;
	p->l4 = ETH_HLEN + ip->ihl * 4;
	p->source = mapped(ip->saddr);
	p->destination = mapped(ip->daddr);
	place = bpf_ntohs(ip->frag_off);
	if (rarely(place & (IPV4_MORE_FRAGMENTS | IPV4_OFFSET))) {
		p->identification = bpf_ntohs(ip->id);
		p->fragment = place & IPV4_OFFSET ? FRAGMENT_LATER : FRAGMENT_FIRST;
		/* It would overwrite the flags that the first fragment was judged by. */
		if (p->protocol == PROTOCOL_TCP && (place & IPV4_OFFSET) == 1)
			return DROP_MALFORMED;
	}
	if (rarely(p->l4 != IPV4_L4) && has_source_route(f, p->l4))
		return DROP_ROUTING_HEADER;
	return parse_l4(f, p, IPV4_L4);
}

/* To the TCP header of an IPv6 packet whose length isn't said. */
static __always_inline int skip_jumbo_option(frame *f, struct packet *p)
{
	__be32 head;

	if (p->protocol == PROTOCOL_HOP_BY_HOP && !frame_load(f, IPV6_L4, &head, sizeof(head)) &&
	    head == JUMBO_BEFORE_TCP) {
		p->protocol = PROTOCOL_TCP;
		p->l4 += JUMBO_LENGTH;
		p->unsent = JUMBO_LENGTH;
	}
	return p->protocol == PROTOCOL_TCP ? DROP_NONE : DROP_MALFORMED;
}

static __always_inline int parse_ipv6(frame *f, struct packet *p)
{
	const struct ipv6hdr *ip = frame_data(f) + ETH_HLEN;
	__u32 beyond = frame_length(f) - ETH_HLEN - sizeof(*ip);
	__u32 payload;
	int reason;

	if ((const void *)(ip + 1) > frame_end(f) || ip->version != 6)
		return DROP_MALFORMED;
	payload = bpf_ntohs(ip->payload_len);
	if (rarely(!payload))
		payload = unsaid_length(f, beyond);
	if (payload > beyond)
		return DROP_MALFORMED;
	if (!payload && ip->nexthdr != PROTOCOL_NONE)
		return DROP_MALFORMED;
	p->length = payload + sizeof(*ip);
	p->version = 6;
	p->protocol = ip->nexthdr;
	p->ttl = ip->hop_limit;
	p->l4 = IPV6_L4;
	__builtin_memcpy(&p->source, &ip->saddr, sizeof(p->source));
	__builtin_memcpy(&p->destination, &ip->daddr, sizeof(p->destination));
	/* It would pass for a peer of IPv4, which answers to it are. Linux takes no such packet either (ip6_rcv_core). */
	if (rarely(is_mapped(&p->source)))
		return DROP_MALFORMED;
	if (rarely(payload > LENGTH_MAX)) {
		reason = skip_jumbo_option(f, p);
		if (reason)
			return reason;
	} else if (rarely(is_extension(p->protocol))) {
		struct extensions extensions = {.l4 = IPV6_L4, .protocol = p->protocol};

		reason = walk_extensions(f, ETH_HLEN + p->length, &extensions);
		if (reason)
			return reason;
		p->l4 = extensions.l4;
		p->protocol = extensions.protocol;
		p->fragment = extensions.fragment;
		p->identification = extensions.identification;
	}
	return parse_l4(f, p, IPV6_L4);
}

/* An IP packet of a guest. Returns a drop reason. */
static __always_inline int parse_of_family(frame *f, const struct nic *nic, __u32 ethertype,
					   struct packet *p)
{
	switch (ethertype) {
	case bpf_htons(ETH_P_IP):
		return nic->guest4 ? parse_ipv4(f, p) : DROP_NO_ADDRESS;
	case bpf_htons(ETH_P_IPV6):
		return nic->has_ipv6 ? parse_ipv6(f, p) : DROP_NO_ADDRESS;
	default:
		return DROP_ETHERTYPE;
	}
}

static __always_inline int has_tag(const frame *f, __u32 ethertype)
{
	return frame_has_vlan(f) || ethertype == bpf_htons(ETH_P_8021Q) ||
	       ethertype == bpf_htons(ETH_P_8021AD);
}

/* What the packet weighs. The kernel doesn't know the segments of a guest's super-packet yet. SCTP's are made by a stack
 * of this kernel's, which has counted them; how long each is, only the kernel sees. One that isn't counted is a guest's
 * word, which older kernels took: it is too long, and from_guest refuses it. */
static __always_inline void measure(const frame *f, struct packet *p)
{
	__u32 size = frame_gso_size(f);

	p->bytes = frame_length(f);
	p->segments = 1;
	p->wire_bytes = p->bytes;
	p->largest = p->bytes - ETH_HLEN;
	if (rarely(size)) {
		__u32 headers = p->payload - p->unsent;

		p->wire_bytes -= p->unsent;

		if (frame_is_by_fragments(f) && frame_gso_segments(f)) {
			p->by_fragments = 1;
			p->segments = frame_gso_segments(f);
			headers += SCTP_HEADER_LENGTH;
		} else {
			if (p->wire_bytes > headers + size)
				p->segments = (p->wire_bytes - headers + size - 1) / size;
			p->largest = size + headers - ETH_HLEN;
		}
		p->wire_bytes += (p->segments - 1) * headers;
	}
}

/* Whether a packet, or a segment of it, is longer than the way allows that leads out by this interface. */
static __always_inline int is_longer(frame *f, const struct packet *p, __u32 mtu, __u32 ifindex)
{
	return p->largest > mtu &&
	       !(rarely(p->by_fragments) && frame_segments_fit(f, ifindex));
}

#endif

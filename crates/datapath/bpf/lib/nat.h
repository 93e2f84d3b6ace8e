/* Stateless translation of addresses, with every checksum that covers them. */
#ifndef SANDWIRE_NAT_H
#define SANDWIRE_NAT_H

#include "parse.h"

/* A TTL or hop limit one lower, as a one's complement change of the 16 bits that it is in. */
#define TTL_STEP bpf_htons(0xfeff)
#define HOP_LIMIT_STEP bpf_htons(0xfffe)

/* What a packet is turned into. */
struct translation {
	struct address source;
	struct address destination;
};

/* The way on: never in memory, so the MACs are copied straight from a map to the packet. */
struct hop {
	const __u8 *source_mac;
	const __u8 *destination_mac;
	__u32 is_router; /* the TTL falls */
};

/* The packet that an ICMP error quotes. */
struct quote {
	struct address source;
	struct address destination;
	__u32 l4; /* offset in the frame */
	__u16 source_port;
	__u16 destination_port;
	__u16 identifier;
	__u8 protocol;
	__u8 icmp_kind;
	__u8 has_l4; /* eight bytes of L4 header are there */
	__u8 reserved[3];
};

/* Adds the change from one word to another to a one's complement sum. Words that stay don't count:
 * they would add minus zero, which turns a checksum of ffff into 0. */
static __always_inline __u64 add_change(__u64 sum, __u32 from, __u32 to)
{
	return from == to ? sum : sum + (__u32)~from + to;
}

static __always_inline __u64 add_address_change(__u64 sum, const struct address *from,
						const struct address *to)
{
	if (same_address(from, to))
		return sum;
	for (int i = 0; i < 4; i++)
		sum = add_change(sum, from->word[i], to->word[i]);
	return sum;
}

static __always_inline __u32 fold_32(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	return (__u32)sum + (__u32)(sum >> 32);
}

static __always_inline __u16 fold_16(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	return (__u16)(sum + (sum >> 16));
}

/* RFC 1624, equation 3. */
static __always_inline __u16 changed_checksum(__u16 checksum, __u32 change)
{
	return ~fold_16((__u32)fold_16(change) + (__u16)~checksum);
}

/* Where the checksum with a pseudo-header is in an L4 header; zero if there is none. */
static __always_inline __u32 checksum_place(__u8 version, __u8 protocol)
{
	switch (protocol) {
	case PROTOCOL_TCP:
		return 16;
	case PROTOCOL_UDP:
	case PROTOCOL_UDP_LITE:
	case PROTOCOL_DCCP:
		return 6;
	case PROTOCOL_ICMPV6:
		return version == 6 ? 2 : 0;
	default:
		return 0;
	}
}

static __always_inline enum checksum_kind checksum_kind_of(__u8 protocol)
{
	if (protocol == PROTOCOL_UDP)
		return CHECKSUM_UDP;
	return protocol == PROTOCOL_UDP_LITE ? CHECKSUM_UDP_LITE : CHECKSUM_PSEUDO;
}

static __always_inline void quote_l4(frame *f, __u32 end, __u8 version, struct quote *q)
{
	__be16 head[4];

	if (q->l4 + 8 > end || q->l4 > 0xffff || frame_load(f, q->l4, head, sizeof(head)))
		return;
	q->has_l4 = 1;
	if (q->protocol == PROTOCOL_TCP || q->protocol == PROTOCOL_UDP) {
		q->source_port = head[0];
		q->destination_port = head[1];
	} else if (q->protocol == (version == 4 ? PROTOCOL_ICMP : PROTOCOL_ICMPV6)) {
		q->icmp_kind = icmp_kind_of(version, *(__u8 *)head);
		q->identifier = head[2];
	}
}

/* The first bytes of the IP header in a quote, up to its addresses. Not all of it: stack is scarce. */
union quoted_header {
	__u8 byte[12];
	__be16 half[6];
};

static __always_inline int read_quote_ipv4(frame *f, __u32 start, __u32 end, struct quote *q)
{
	union quoted_header header;
	__be32 addresses[2];

	if (start + sizeof(struct iphdr) > end || frame_load(f, start, &header, 12) ||
	    frame_load(f, start + 12, addresses, sizeof(addresses)))
		return -1;
	if (header.byte[0] >> 4 != 4 || (header.byte[0] & 15) < 5)
		return -1;
	q->source = mapped(addresses[0]);
	q->destination = mapped(addresses[1]);
	q->protocol = header.byte[9];
	q->l4 = start + (header.byte[0] & 15) * 4;
	if (!(header.half[3] & bpf_htons(IPV4_OFFSET)))
		quote_l4(f, end, 4, q);
	return 0;
}

static __always_inline int read_quote_ipv6(frame *f, __u32 start, __u32 end, struct quote *q)
{
	struct extensions extensions = {};
	union quoted_header header;

	if (start + sizeof(struct ipv6hdr) > end || frame_load(f, start, &header, 8) ||
	    frame_load(f, start + 8, &q->source, 2 * sizeof(q->source)))
		return -1;
	if (header.byte[0] >> 4 != 6)
		return -1;
	extensions.l4 = start + sizeof(struct ipv6hdr);
	extensions.protocol = header.byte[6];
	/* What is cut short behind the addresses is translated without its L4 checksum. */
	if (walk_extensions(f, end, &extensions))
		return 0;
	q->protocol = extensions.protocol;
	q->l4 = extensions.l4;
	if (extensions.fragment != FRAGMENT_LATER)
		quote_l4(f, end, 6, q);
	return 0;
}

/* Reads the packet inside an ICMP error. Returns zero if there is one that can be made sense of. */
static __always_inline int read_quote(frame *f, const struct packet *p, struct quote *q)
{
	__u32 start = p->l4 + 8, end = ETH_HLEN + p->length;

	return p->version == 4 ? read_quote_ipv4(f, start, end, q) : read_quote_ipv6(f, start, end, q);
}

/* Whether an ICMP error is about a packet that its sender can't have received: one to somebody else, or not from whom the
 * error goes to. Who gets it goes by what it quotes, whoever has sent it, so it would have others' connections slowed
 * down or ended. One whose addresses aren't all there could be continued by another fragment. */
__noinline int tells_of_others(frame *f, const struct packet *p)
{
	struct quote q = {};

	if (!p)
		return 1;
	return read_quote(f, p, &q) || !same_address(&q.destination, &p->source) ||
	       !same_address(&q.source, &p->destination);
}

/* Fixes the L4 checksum inside a quote. Returns what that adds to the sum of the error around it. */
static __always_inline long fix_quoted_checksum(frame *f, const struct packet *p,
						const struct quote *q, __u32 change, __u64 *sum)
{
	__u32 place = checksum_place(p->version, q->protocol);
	__u32 at = q->l4 + place;
	__be16 old, new;

	if (!q->has_l4 || !place || at + 2u > ETH_HLEN + p->length || at > 0xffff)
		return 0;
	if (frame_load(f, at, &old, sizeof(old)))
		return -1;
	if (q->protocol == PROTOCOL_UDP && !old)
		return 0;
	new = changed_checksum(old, change);
	if ((q->protocol == PROTOCOL_UDP || q->protocol == PROTOCOL_UDP_LITE) && !new)
		new = 0xffff;
	*sum = add_change(*sum, old, new);
	return frame_store(f, at, &new, sizeof(new));
}

/* Writes an address in a header. In two steps, so that the verifier need not know how its length and
 * place belong together. */
static __always_inline long store_address(frame *f, __u8 version, __u32 at, const struct address *a)
{
	if (version == 6) {
		if (frame_store(f, at, &a->word[0], 12))
			return -1;
		at += 12;
	}
	return frame_store(f, at, &a->word[3], 4);
}

/* Translates the packet inside an ICMP error. It was sent the other way: its destination is the
 * sender of the error, its source the receiver. One that isn't so is left alone. */
__noinline int translate_quote(frame *f, const struct packet *p, const struct translation *t)
{
	struct quote q = {};
	__u32 start, change, source_at, destination_at;
	__u64 sum = 0;
	__be16 old, new;

	if (!p || !t)
		return -1;
	if (read_quote(f, p, &q))
		return 0;
	start = p->l4 + 8;
	source_at = p->version == 4 ? 12 : 8;
	destination_at = p->version == 4 ? 16 : 24;
	if (same_address(&q.destination, &p->source) && !same_address(&p->source, &t->source)) {
		sum = add_address_change(sum, &p->source, &t->source);
		if (store_address(f, p->version, start + destination_at, &t->source))
			return -1;
	}
	if (same_address(&q.source, &p->destination) &&
	    !same_address(&p->destination, &t->destination)) {
		sum = add_address_change(sum, &p->destination, &t->destination);
		if (store_address(f, p->version, start + source_at, &t->destination))
			return -1;
	}
	if (!sum)
		return 0;
	change = fold_32(sum);
	if (p->version == 4) {
		if (frame_load(f, start + 10, &old, sizeof(old)))
			return -1;
		new = changed_checksum(old, change);
		sum = add_change(sum, old, new);
		if (frame_store(f, start + 10, &new, sizeof(new)))
			return -1;
	}
	if (fix_quoted_checksum(f, p, &q, change, &sum))
		return -1;
	return frame_fix_checksum(f, p->l4 + 2, fold_32(sum), CHECKSUM_PAYLOAD) ? -1 : 0;
}

static __always_inline int write_ipv4(frame *f, const struct packet *p,
				      const struct translation *t, const struct hop *hop,
				      __u32 change)
{
	struct ethhdr *ethernet = frame_data(f);
	struct iphdr *ip = (void *)(ethernet + 1);

	if ((void *)(ip + 1) > frame_end(f))
		return -1;
	copy_mac(ethernet->h_source, hop->source_mac);
	copy_mac(ethernet->h_dest, hop->destination_mac);
	ip->saddr = t->source.word[3];
	ip->daddr = t->destination.word[3];
	if (hop->is_router) {
		ip->ttl = p->ttl - 1;
		change = fold_16(change) + TTL_STEP;
	}
	if (change)
		ip->check = changed_checksum(ip->check, change);
	return 0;
}

static __always_inline int write_ipv6(frame *f, const struct packet *p,
				      const struct translation *t, const struct hop *hop,
				      __u32 change)
{
	struct ethhdr *ethernet = frame_data(f);
	struct ipv6hdr *ip = (void *)(ethernet + 1);

	if ((void *)(ip + 1) > frame_end(f))
		return -1;
	copy_mac(ethernet->h_source, hop->source_mac);
	copy_mac(ethernet->h_dest, hop->destination_mac);
	__builtin_memcpy(&ip->saddr, &t->source, sizeof(ip->saddr));
	__builtin_memcpy(&ip->daddr, &t->destination, sizeof(ip->daddr));
	if (hop->is_router)
		ip->hop_limit = p->ttl - 1;
	change = fold_32((__u64)change + (hop->is_router ? HOP_LIMIT_STEP : 0));
	if (change)
		frame_account(f, change);
	return 0;
}

static __always_inline long fix_complete_checksum(frame *f, __u32 at, __u32 change)
{
	__be16 checksum;

	if (frame_load(f, at, &checksum, sizeof(checksum)))
		return -1;
	if (!checksum)
		return 0;
	checksum = changed_checksum(checksum, change);
	if (!checksum)
		checksum = 0xffff;
	return frame_store(f, at, &checksum, sizeof(checksum));
}

static __always_inline long fix_checksum(frame *f, const struct packet *p, __u32 at, __u32 change)
{
	/* That further in is left to be finished. The kernel would take this one for it, as it is in a super-packet. */
	if (rarely(p->unfinished > at + sizeof(__sum16)) && p->protocol == PROTOCOL_UDP &&
	    !frame_gso_size(f))
		return fix_complete_checksum(f, at, change);
	return frame_fix_checksum(f, at, change, checksum_kind_of(p->protocol));
}

/* Turns the packet into what `t` and `hop` say. Fails only if the kernel can't change it. */
static __always_inline int translate(frame *f, const struct packet *p, const struct translation *t,
				     const struct hop *hop)
{
	__u32 place, change;
	__u64 sum = 0;

	sum = add_address_change(sum, &p->source, &t->source);
	sum = add_address_change(sum, &p->destination, &t->destination);
	change = fold_32(sum);
	if (sum && p->fragment != FRAGMENT_LATER) {
		place = checksum_place(p->version, p->protocol);
		if (rarely(p->icmp_kind == ICMP_ERROR) && translate_quote(f, p, t))
			return -1;
		/* UDP-Lite and DCCP may be cut short; the others aren't. */
		if (place && p->l4 + 8u <= ETH_HLEN + p->length &&
		    fix_checksum(f, p, p->l4 + place, change))
			return -1;
	}
	return p->version == 4 ? write_ipv4(f, p, t, hop, change) :
				 write_ipv6(f, p, t, hop, change);
}

#endif

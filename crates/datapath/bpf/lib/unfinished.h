/* Checksums that a sender leaves to be finished: where they are is the sender's word.
 *
 * A guest says so in the virtio-net header, who has packet sockets in theirs, and the kernel only looks whether the
 * place is inside the packet. It writes there when the packet leaves, after all else: into addresses and ports, if
 * that were let be, and what it writes follows from bytes that the sender chooses. */
#ifndef SANDWIRE_UNFINISHED_H
#define SANDWIRE_UNFINISHED_H

#include "nat.h"

/* Set by the loader, from the types that the kernel tells of itself. */
const volatile struct skb_places skb_places = {};
/* Set by the loader where the kernel has bpf_cast_to_kern_ctx (Linux 6.2). */
const volatile __u8 has_skb_cast = 0;

/* bpf_cast_to_kern_ctx, which costs nothing: in place of this number the loader puts the kernel's own. */
static const void *(*const skb_cast)(const struct __sk_buff *skb) = (void *)SKB_CAST;

static __always_inline __u32 skb_field(const __u8 *fields, __u16 place)
{
	return *(const __u16 *)(fields + place);
}

static __always_inline __u32 end_told_by(const __u8 *fields)
{
	__u16 state_mask = skb_places.state_mask;

	if (!rarely((fields[skb_places.state] & state_mask) == state_mask))
		return 0;
	return skb_field(fields, skb_places.checksum_start) -
	       skb_field(fields, skb_places.mac_header) +
	       skb_field(fields, skb_places.checksum_offset) + sizeof(__sum16);
}

/* Not inlined: the callers' stacks have no room for it. */
static __noinline __u32 copied_end(struct __sk_buff *skb)
{
	__u8 fields[SKB_SPAN_MAX] __attribute__((aligned(8)));

	/* What can't be read is taken for the worst. */
	if (bpf_probe_read_kernel(fields, skb_places.length, (void *)skb + skb_places.first))
		return 1;
	return end_told_by(fields);
}

/* Where in the frame the checksum ends that the kernel is to finish; zero if there is none. No field of a packet that
 * programs have tells, but they may read the kernel's own. */
static __always_inline __u32 unfinished_end(struct __sk_buff *skb)
{
	if (has_skb_cast)
		return end_told_by(skb_cast(skb) + skb_places.first);
	return skb_places.length ? copied_end(skb) : 0;
}

/* Where the packet's own checksum ends, or the least that may be written instead: a tunnel's packet has an unfinished
 * one further in. */
static __always_inline __u32 end_of_checksum(const struct packet *p)
{
	if (p->fragment == FRAGMENT_LATER)
		return p->l4 + sizeof(__sum16);
	return p->l4 + sizeof(__sum16) +
	       (p->icmp_kind ? 2 : checksum_place(p->version, p->protocol));
}

/* Whether an unfinished checksum lies before the packet's own. */
static __always_inline int is_forged(struct __sk_buff *skb, struct packet *p)
{
	__u32 end = unfinished_end(skb), own = end_of_checksum(p);

	p->unfinished = end > own;
	return end && end < own;
}

/* Towards a guest the kernel itself says where it is, or somebody who can but harm their own packet. Of UDP alone it
 * matters: to look costs something where there is no cast. */
static __always_inline void note_unfinished(struct __sk_buff *skb, struct packet *p)
{
	if (p->protocol == PROTOCOL_UDP)
		p->unfinished = unfinished_end(skb) > end_of_checksum(p);
}

#endif

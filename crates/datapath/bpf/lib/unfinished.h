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

static __always_inline __u32 skb_field(const __u8 *span, __u16 place)
{
	return *(const __u16 *)(span + place);
}

/* Where in the frame the checksum ends that the kernel is to finish; zero if there is none. No field of a packet that
 * programs have tells, but they may read the kernel's memory. Not inlined: the callers' stacks have no room for it. */
static __noinline __u32 unfinished_end(struct __sk_buff *skb)
{
	__u8 span[SKB_SPAN_MAX] __attribute__((aligned(8)));
	__u16 state_mask = skb_places.state_mask;

	if (!skb_places.length)
		return 0;
	/* What can't be read is taken for the worst. */
	if (bpf_probe_read_kernel(span, skb_places.length, (void *)skb + skb_places.first))
		return 1;
	if ((span[skb_places.state] & state_mask) != state_mask)
		return 0;
	return skb_field(span, skb_places.checksum_start) - skb_field(span, skb_places.mac_header) +
	       skb_field(span, skb_places.checksum_offset) + sizeof(__sum16);
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
	__u32 end = unfinished_end(skb);

	p->unfinished = end != 0;
	return p->unfinished && end < end_of_checksum(p);
}

#endif

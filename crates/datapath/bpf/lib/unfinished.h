/* Checksums that a sender leaves to be finished: where they are is the sender's word.
 *
 * A guest says so in the virtio-net header, who has packet sockets in theirs, and the kernel only looks whether the
 * place is inside the packet. It writes there when the packet leaves, after all else: into addresses and ports, if
 * that were let be, and what it writes follows from bytes that the sender chooses. */
#ifndef SANDWIRE_UNFINISHED_H
#define SANDWIRE_UNFINISHED_H

#include "nat.h"

/* Of a packet in a tunnel, and the tunnel's own: GENEVE's with all options, then Ethernet's, IPv6's and TCP's, with room
 * for others. */
#define INNER_HEADERS_MAX 512

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

/* Whether an unfinished checksum lies before the packet's own; or behind that of an ICMP error, where it would be written over
 * addresses and ports that the error tells of. */
static __always_inline int is_forged(const struct packet *p)
{
	__u32 end = end_of_checksum(p);

	return p->unfinished &&
	       (p->unfinished < end || (p->icmp_kind == ICMP_ERROR && p->unfinished > end));
}

/* How far from its header's start the checksum is that is left to be finished: it tells TCP's from UDP's. */
static __always_inline __u32 unfinished_place(struct __sk_buff *skb)
{
	__u32 at = skb_places.first + skb_places.checksum_offset;
	__u16 place = 0;

	if (has_skb_cast)
		return skb_field(skb_cast(skb), at);
	bpf_probe_read_kernel(&place, sizeof(place), (void *)skb + at);
	return place;
}

/* Where the payload begins of the packet whose unfinished checksum ends at `end`: the innermost one. Zero where that
 * isn't known. */
__noinline __u32 innermost_payload(struct __sk_buff *skb, __u32 end)
{
	__u32 place = unfinished_place(skb);
	__u8 words;

	if (place == checksum_place(4, PROTOCOL_UDP))
		return end;
	if (place != checksum_place(4, PROTOCOL_TCP) ||
	    frame_load(skb, end - sizeof(__sum16) - place + 12, &words, sizeof(words)))
		return 0;
	return end - sizeof(__sum16) - place + (words >> 4) * 4;
}

/* What the packet weighs. Each segment of a super-packet in a tunnel has the inner headers too. A guest may say what it
 * likes of where they are, so they are believed no longer than they can be. */
static __always_inline void measure_all(struct __sk_buff *skb, struct packet *p)
{
	__u32 payload;

	if (rarely(skb->gso_size) && rarely(p->unfinished > end_of_checksum(p))) {
		payload = innermost_payload(skb, p->unfinished);
		if (payload > p->payload && payload - p->payload <= INNER_HEADERS_MAX)
			p->payload = payload;
	}
	measure(skb, p);
}

/* The same towards a guest, where the kernel itself says what is unfinished, or somebody who can but harm their own
 * packets. It matters of super-packets and of UDP, whose own may be complete: to look costs something where there is no
 * cast. */
static __always_inline void measure_arrival(struct __sk_buff *skb, struct packet *p)
{
	if (rarely(skb->gso_size) || p->protocol == PROTOCOL_UDP)
		p->unfinished = unfinished_end(skb);
	measure_all(skb, p);
}

/* A super-packet of fragments to be ("UFO") that is one itself: the kernel would write each one's place anew, from the
 * start on. So its bytes would become a header with ports that nobody has judged. */
static __always_inline int is_cut_twice(const struct __sk_buff *skb, const struct packet *p)
{
	return p->fragment != FRAGMENT_WHOLE && frame_gso_size(skb);
}

/* SCTP's segments are what the kernel keeps apart; whoever leaves it to the kernel to cut up a packet so that has nothing
 * apart may have it crash, before Linux 6.8. */
static __always_inline int is_cut_nowhere(const struct __sk_buff *skb)
{
	return frame_is_by_fragments(skb) && !frame_gso_segments(skb);
}

/* Whether a sender leaves a super-packet to the kernel to be cut as nobody may. It must have been measured. */
static __always_inline int is_cut_badly(const struct __sk_buff *skb, const struct packet *p)
{
	return p->segments > SEGMENTS_MAX || is_cut_twice(skb, p) || is_cut_nowhere(skb);
}

#endif

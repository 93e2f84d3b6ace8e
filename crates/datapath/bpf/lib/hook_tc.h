/* What the stages ask of the hook that they run on; this is tc, hook_xdp.h is XDP. */
#ifndef SANDWIRE_HOOK_H
#define SANDWIRE_HOOK_H

#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <linux/if_ether.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

typedef struct __sk_buff frame;

#define HOOK_DROP TC_ACT_SHOT

/* Ethernet, IP and TCP without options: what is read and written in place. */
#define FRAME_HEADERS4 54
#define FRAME_HEADERS6 74

/* The size of a super-packet's segments, if each is as long as what the kernel keeps of it apart: SCTP's chunks can't be
 * cut anywhere. */
#define GSO_BY_FRAGS 0xffff

static __always_inline void *frame_data(const frame *f)
{
	return (void *)(unsigned long)f->data;
}

static __always_inline void *frame_end(const frame *f)
{
	return (void *)(unsigned long)f->data_end;
}

static __always_inline __u32 frame_length(const frame *f)
{
	return f->len;
}

/* Zero unless the frame is a super-packet. */
static __always_inline __u32 frame_gso_size(const frame *f)
{
	return f->gso_size;
}

static __always_inline int frame_is_by_fragments(const frame *f)
{
	return f->gso_size == GSO_BY_FRAGS;
}

/* How many frames it will be, if the kernel knows. */
static __always_inline __u32 frame_gso_segments(const frame *f)
{
	return f->gso_segs;
}

/* Whether the kernel finds each segment of a super-packet short enough for an interface. */
static __always_inline int frame_segments_fit(frame *f, __u32 ifindex)
{
	__u32 mtu = 0;

	return !bpf_check_mtu(f, ifindex, &mtu, 0, BPF_MTU_CHK_SEGS);
}

static __always_inline int frame_has_vlan(const frame *f)
{
	return f->vlan_present;
}

/* Makes the headers linear, and no more: pulling payload in as well would copy the head of every packet
 * that the host's own TCP sends, whose linear part ends with its header. One whose segments are kept apart has
 * its headers alone there, shorter than TCP's; with anything behind them the kernel no longer knows where the first
 * segment begins, and who receives it ends the connection. The pointers got before no longer hold. */
static __always_inline void frame_pull(frame *f)
{
	__u32 length = f->len, linear = f->data_end - f->data;
	__u32 wanted = f->protocol == bpf_htons(ETH_P_IP) ? FRAME_HEADERS4 : FRAME_HEADERS6;

	if (linear < length && linear < wanted && !frame_is_by_fragments(f))
		bpf_skb_pull_data(f, length < wanted ? length : wanted);
}

static __always_inline long frame_load(const frame *f, __u32 offset, void *to, __u32 length)
{
	return bpf_skb_load_bytes(f, offset, to, length);
}

/* Leaves every checksum as it is. */
static __always_inline long frame_store(frame *f, __u32 offset, const void *from, __u32 length)
{
	return bpf_skb_store_bytes(f, offset, from, length, 0);
}

enum checksum_kind {
	CHECKSUM_PAYLOAD, /* what changed isn't in the pseudo-header */
	CHECKSUM_PSEUDO,
	CHECKSUM_UDP,      /* pseudo-header; zero means that there is none */
	CHECKSUM_UDP_LITE, /* pseudo-header; zero is sent as all ones, and none may be missing */
};

/* Fixes the checksum at `offset` for a change of `difference` (a one's complement sum). The kernel
 * knows whether it is complete or only the pseudo-header's, left to the hardware to finish. */
static __always_inline long frame_fix_checksum(frame *f, __u32 offset, __u32 difference,
					       enum checksum_kind kind)
{
	__u64 flags = 0;

	if (kind != CHECKSUM_PAYLOAD)
		flags = BPF_F_PSEUDO_HDR;
	if (kind == CHECKSUM_UDP)
		flags |= BPF_F_MARK_MANGLED_0;
	if (kind == CHECKSUM_UDP_LITE)
		flags |= BPF_F_MARK_MANGLED_0 | BPF_F_MARK_ENFORCE;
	return bpf_l4_csum_replace(f, offset, 0, difference, flags);
}

/* Tells the kernel, where a NIC summed the whole packet, what in-place writes added to that sum.
 *
 * IPv4 needs none: its header's sum stays zero, and bpf_l4_csum_replace accounts for the rest. With
 * IPv6, addresses and L4 checksum cancel out, but without BPF_F_IPV6 (Linux 6.16) that helper believes
 * it must subtract the difference: so the same call is right with and without an L4 checksum. */
static __always_inline void frame_account(frame *f, __u32 difference)
{
	bpf_csum_update(f, difference);
}

#endif

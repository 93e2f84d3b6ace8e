/* What the stages ask of the hook that they run on; this is XDP, hook_tc.h is tc. Frames are linear
 * here, are no super-packets, and their checksums are complete (NIC_XDP). */
#ifndef SANDWIRE_HOOK_H
#define SANDWIRE_HOOK_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

typedef struct xdp_md frame;

/* No header that we translate begins later. */
#define FRAME_OFFSET_MAX 0x3fff

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
	return f->data_end - f->data;
}

static __always_inline __u32 frame_gso_size(const frame *f)
{
	(void)f;
	return 0;
}

static __always_inline int frame_is_by_fragments(const frame *f)
{
	(void)f;
	return 0;
}

static __always_inline __u32 frame_gso_segments(const frame *f)
{
	(void)f;
	return 0;
}

static __always_inline int frame_segments_fit(frame *f, __u32 ifindex)
{
	(void)f;
	(void)ifindex;
	return 0;
}

static __always_inline int frame_has_vlan(const frame *f)
{
	(void)f;
	return 0;
}

static __always_inline void frame_pull(frame *f)
{
	(void)f;
}

static __always_inline long frame_load(const frame *f, __u32 offset, void *to, __u32 length)
{
	return bpf_xdp_load_bytes((frame *)f, offset, to, length);
}

static __always_inline long frame_store(frame *f, __u32 offset, const void *from, __u32 length)
{
	return bpf_xdp_store_bytes(f, offset, (void *)from, length);
}

enum checksum_kind {
	CHECKSUM_PAYLOAD,
	CHECKSUM_PSEUDO,
	CHECKSUM_UDP,      /* zero means that there is none */
	CHECKSUM_UDP_LITE, /* zero is sent as all ones, and none may be missing */
};

/* RFC 1624, equation 3, of the checksum at `offset` of the frame. */
static __always_inline long frame_fix_checksum(frame *f, __u32 offset, __u32 difference,
					       enum checksum_kind kind)
{
	__u64 place = offset;
	__u16 *at;
	__u32 sum;

	if (offset > FRAME_OFFSET_MAX)
		return -1;
	/* Once more, where it is used: what the compiler keeps on the stack has no bound for Linux 6.1. */
	asm volatile("%[place] &= %[most]" : [place] "+r"(place) : [most] "i"(FRAME_OFFSET_MAX));
	at = frame_data(f) + place;
	if ((void *)(at + 1) > frame_end(f))
		return -1;
	if (kind == CHECKSUM_UDP && !*at)
		return 0;
	sum = (__u16)~*at + (difference & 0xffff) + (difference >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (__u16)~(sum + (sum >> 16));
	if (!sum && (kind == CHECKSUM_UDP || kind == CHECKSUM_UDP_LITE))
		sum = 0xffff;
	*at = sum;
	return 0;
}

/* No sum is kept beside the packet. */
static __always_inline void frame_account(frame *f, __u32 difference)
{
	(void)f;
	(void)difference;
}

#endif

/* What TCP connections do, where nothing counts their packets: the kernel's own figures of a socket, taken over by whoever comes
 * by. Several may at once, and each step is counted once. */
#ifndef SANDWIRE_IDENTITY_TALLY_H
#define SANDWIRE_IDENTITY_TALLY_H

#include "maps.h"

static __always_inline void advance(__u64 *counted, __u64 by, __u64 before, __u64 *total)
{
	if (__sync_val_compare_and_swap(counted, before, before + by) == before)
		__sync_fetch_and_add(total, by);
}

/* The kernel's figure has 32 bits, and begins anew. */
static __always_inline void take_segments(__u64 *counted, __u32 now, __u64 *total)
{
	__u64 before = *(volatile __u64 *)counted;
	__u32 by = now - (__u32)before;

	if ((__s32)by > 0)
		advance(counted, by, before, total);
}

static __always_inline void take_bytes(__u64 *counted, __u64 now, __u64 *total)
{
	__u64 before = *(volatile __u64 *)counted;

	if (now > before)
		advance(counted, now - before, before, total);
}

static __always_inline void take_traffic(struct tcp_traffic *counted, const struct tcp_traffic *now,
					 __u32 number)
{
	struct tcp_tally *tally = bpf_map_lookup_elem(&tcp_tallies, &number);

	if (!tally)
		return;
	take_segments(&counted->segments_out, now->segments_out, &tally->traffic.segments_out);
	take_bytes(&counted->bytes_out, now->bytes_out, &tally->traffic.bytes_out);
	take_segments(&counted->segments_in, now->segments_in, &tally->traffic.segments_in);
	take_bytes(&counted->bytes_in, now->bytes_in, &tally->traffic.bytes_in);
}

/* Of a connection that nobody will look at any more. */
static __always_inline void take_all(const struct tcp_traffic *done, __u32 number)
{
	struct tcp_tally *tally = bpf_map_lookup_elem(&tcp_tallies, &number);

	if (!tally)
		return;
	__sync_fetch_and_add(&tally->traffic.segments_out, done->segments_out);
	__sync_fetch_and_add(&tally->traffic.bytes_out, done->bytes_out);
	__sync_fetch_and_add(&tally->traffic.segments_in, done->segments_in);
	__sync_fetch_and_add(&tally->traffic.bytes_in, done->bytes_in);
}

#endif

/* Trace events, for interfaces that somebody watches. */
#ifndef SANDWIRE_TRACE_H
#define SANDWIRE_TRACE_H

#include "maps.h"
#include "share.h"

/* Direction, verdict, stage and reason in one word: a function has at most five arguments. */
#define FATE(direction, verdict, stage, reason) \
	((__u32)(direction) << 24 | (__u32)(verdict) << 16 | (__u32)(stage) << 8 | (__u32)(reason))

/* Events of one interface in a piece of time of 2^23 nanoseconds, 8 ms, for which there is room while another fills the ring.
 * What is kept free is enough for as many interfaces as all traces together may have. */
#define TRACE_SHARE 16
#define TRACE_SHARE_SHIFT 23

/* Half of the ring is for whoever comes first, the rest for those who are within their share: so a sandbox that is flooded
 * leaves the traces of others whole. */
static __always_inline int has_room(__u32 nic, __u64 now)
{
	__u64 *share = bpf_map_lookup_elem(&trace_shares, &nic);
	int is_within_share = share && is_within(share, now >> TRACE_SHARE_SHIFT, TRACE_SHARE);

	return is_within_share || bpf_ringbuf_query(&trace, BPF_RB_AVAIL_DATA) <
					  bpf_ringbuf_query(&trace, BPF_RB_RING_SIZE) / 2;
}

static __always_inline void count_lost(__u32 nic)
{
	__u64 *lost = bpf_map_lookup_elem(&trace_lost, &nic);

	if (lost)
		__sync_fetch_and_add(lost, 1);
}

/* Called before the packet is changed, so that the event shows it as it came. An event that finds no
 * room is lost, and counted: the path never waits for its reader. */
__noinline int trace_packet(frame *f, __u32 nic, __u32 fate, __u32 target, __u32 segments)
{
	__u32 length = frame_length(f), last = length - 1;
	__u64 now = bpf_ktime_get_ns();
	struct trace_event *event = 0;

	if (has_room(nic, now))
		event = bpf_ringbuf_reserve(&trace, sizeof(*event), 0);
	if (!event) {
		count_lost(nic);
		return 0;
	}
	event->time = now;
	event->nic = nic;
	event->target = target;
	event->length = length;
	event->segments = segments;
	event->direction = fate >> 24;
	event->verdict = fate >> 16;
	event->stage = fate >> 8;
	event->reason = fate;
	event->reserved = 0;
	/* By its last byte: older verifiers must see that it is never zero. */
	if (last > TRACE_BYTES - 1)
		last = TRACE_BYTES - 1;
	asm volatile("" : "+r"(last));
	/* The room may hold what another sandbox sent. */
	__builtin_memset(event->frame, 0, sizeof(event->frame));
	event->captured = 0;
	if (!frame_load(f, 0, event->frame, last + 1))
		event->captured = last + 1;
	bpf_ringbuf_submit(event, 0);
	return 0;
}

#endif

/* Trace events, for interfaces that somebody watches. */
#ifndef SANDWIRE_TRACE_H
#define SANDWIRE_TRACE_H

#include "maps.h"

/* Direction, verdict, stage and reason in one word: a function has at most five arguments. */
#define FATE(direction, verdict, stage, reason) \
	((__u32)(direction) << 24 | (__u32)(verdict) << 16 | (__u32)(stage) << 8 | (__u32)(reason))

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
	struct trace_event *event = bpf_ringbuf_reserve(&trace, sizeof(*event), 0);
	__u32 length = frame_length(f), last = length - 1;

	if (!event) {
		count_lost(nic);
		return 0;
	}
	event->time = bpf_ktime_get_ns();
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

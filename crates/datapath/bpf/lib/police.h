/* Rate limits: virtual scheduling (GCRA), one theoretical arrival time each for bytes and packets. */
#ifndef SANDWIRE_POLICE_H
#define SANDWIRE_POLICE_H

#include "maps.h"
#include "parse.h"

#define NANOSECONDS 1000000000ULL
/* How far ahead a departure time may lie: fq gives up on what is further away than its horizon. */
#define DEPARTURE_MAX (2 * NANOSECONDS)
#define CHARGE_TRIES 4

static __always_inline int is_limited(const struct limit *limit)
{
	return (limit->byte_cost | limit->packet_cost) != 0;
}

/* Nanoseconds by which the debt exceeds the burst. */
static __always_inline __u64 excess(__u64 arrival, __u64 now, __u64 burst)
{
	__u64 latest = now + burst;

	return arrival > latest ? arrival - latest : 0;
}

/* Adds a cost. When other CPUs keep winning, the packet goes free rather than wait. */
static __always_inline void charge(__u64 *arrival, __u64 now, __u64 cost)
{
	__u64 seen = READ_ONCE(*arrival);

	for (int i = 0; i < CHARGE_TRIES; i++) {
		__u64 base = seen > now ? seen : now;
		__u64 found = __sync_val_compare_and_swap(arrival, seen, base + cost);

		if (!rarely(found != seen))
			return;
		seen = found;
	}
}

/* In two parts: a super-packet of tiny segments with long headers may be many megabytes on the wire, and times the
 * cost of a slow limit's byte that is more than 64 bits. */
static __always_inline __u64 cost_of_bytes(const struct limit *limit, __u64 bytes)
{
	return (limit->byte_cost >> 20) * bytes + ((limit->byte_cost & 0xfffff) * bytes >> 20);
}

/* Returns a drop reason. What is dropped costs nothing. Up to `patience` nanoseconds the packet isn't
 * dropped but must leave later: by `wait`. */
static __always_inline int police(const struct limit *limit, struct meter *meter,
				  const struct packet *p, __u64 now, __u64 patience,
				  __u64 *wait)
{
	__u64 bytes = 0, packets = 0;

	if (limit->byte_cost) {
		bytes = excess(READ_ONCE(meter->bytes), now, limit->byte_burst);
		if (bytes > patience)
			return DROP_BIT_LIMIT;
	}
	if (limit->packet_cost) {
		packets = excess(READ_ONCE(meter->packets), now, limit->packet_burst);
		if (packets > patience)
			return DROP_PACKET_LIMIT;
	}
	if (limit->byte_cost)
		charge(&meter->bytes, now, cost_of_bytes(limit, p->wire_bytes));
	if (limit->packet_cost)
		charge(&meter->packets, now, p->segments * limit->packet_cost);
	*wait = bytes > packets ? bytes : packets;
	return DROP_NONE;
}

#endif

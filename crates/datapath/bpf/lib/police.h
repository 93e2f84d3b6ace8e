/* Rate limits: virtual scheduling (GCRA), one theoretical arrival time each for bytes and packets.
 *
 * All processors share these meters, so each of them pays for several packets at once, ahead, and asks neither meter nor
 * clock until that is spent. What all of them have paid ahead is at most a part of the burst, and comes on top of it. */
#ifndef SANDWIRE_POLICE_H
#define SANDWIRE_POLICE_H

#include "count.h"
#include "maps.h"
#include "parse.h"

#define NANOSECONDS 1000000000ULL
/* How far ahead a departure time may lie: fq gives up on what is further away than its horizon. */
#define DEPARTURE_MAX (2 * NANOSECONDS)
/* Packets as long as this one that may wait there already. The queue is everybody's: it takes a number of packets, by default 10,000,
 * whoever has sent them. */
#define HELD_MAX 128
#define CHARGE_TRIES 4
#define CREDIT_MAX 0xffffffffULL

/* By how much less than the burst a processor pays ahead; the daemon says it, by the number of those who do. */
const volatile __u32 credit_shift = 5;

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

/* What a processor pays ahead. */
static __always_inline __u64 ahead_of(__u64 burst)
{
	__u64 ahead = burst >> credit_shift;

	return ahead < CREDIT_MAX ? ahead : CREDIT_MAX;
}

/* Whether this processor has paid for the packet. More than one pays ahead is by another policy, and doesn't count. */
static __always_inline int spend(const struct limit *limit, struct credit *own,
				 const struct packet *p)
{
	__u64 bytes = limit->byte_cost ? cost_of_bytes(limit, p->wire_bytes) : 0;
	__u64 packets = p->segments * limit->packet_cost;

	if (bytes > own->bytes || own->bytes > ahead_of(limit->byte_burst) ||
	    packets > own->packets || own->packets > ahead_of(limit->packet_burst))
		return 0;
	own->bytes -= bytes;
	own->packets -= packets;
	return 1;
}

/* Fills up the processor's credit. Returns what that costs. */
static __always_inline __u64 fill_up(__u32 *own, __u64 ahead)
{
	__u64 left = *own < ahead ? *own : ahead;

	*own = ahead;
	return ahead - left;
}

/* How long a packet that costs so much may wait for its departure. */
static __always_inline __u64 patience_of(__u64 cost)
{
	return cost < DEPARTURE_MAX / HELD_MAX ? cost * HELD_MAX : DEPARTURE_MAX;
}

/* Asks the meter that all processors share. `own` is what this one pays ahead into, if it does. If there is
 * `departure`, a packet that isn't much over the limit is told when to leave. Not inlined: it is long, and seldom needed. */
static __noinline int ask_meter(const struct limit *limit, struct meter *meter, struct credit *own,
				const struct packet *p, __u64 *departure)
{
	__u64 now = bpf_ktime_get_ns(), bytes = 0, packets = 0, ahead;
	__u64 byte_cost = limit->byte_cost ? cost_of_bytes(limit, p->wire_bytes) : 0;
	__u64 packet_cost = p->segments * limit->packet_cost;

	if (limit->byte_cost) {
		bytes = excess(READ_ONCE(meter->bytes), now, limit->byte_burst);
		if (bytes > (departure ? patience_of(byte_cost) : 0))
			return DROP_BIT_LIMIT;
	}
	if (limit->packet_cost) {
		packets = excess(READ_ONCE(meter->packets), now, limit->packet_burst);
		if (packets > (departure ? patience_of(packet_cost) : 0))
			return DROP_PACKET_LIMIT;
	}
	if (limit->byte_cost) {
		ahead = own ? fill_up(&own->bytes, ahead_of(limit->byte_burst)) : 0;
		charge(&meter->bytes, now, ahead + byte_cost);
	} else if (own) {
		own->bytes = 0;
	}
	if (limit->packet_cost) {
		ahead = own ? fill_up(&own->packets, ahead_of(limit->packet_burst)) : 0;
		charge(&meter->packets, now, ahead + packet_cost);
	} else if (own) {
		own->packets = 0;
	}
	if (departure && (bytes | packets))
		*departure = now + (bytes > packets ? bytes : packets);
	return DROP_NONE;
}

/* What this processor has paid ahead for an interface, if it does so. */
static __always_inline struct credit *own_credit(__u32 nic, __u32 direction)
{
	struct ledger *own = own_ledger(nic);
	struct credits *credits;

	if (!own)
		return 0;
	/* The verifier wants to see no sum of what may be null, which the compiler would add before it asks. */
	asm volatile("" : "+r"(own));
	/* Only the daemon's line has a lease, and daemons of the version before look for one there. */
	credits = (struct credits *)&own->lease;
	return direction == DIRECTION_EGRESS ? &credits->egress : &credits->ingress;
}

/* Returns a drop reason. What is dropped costs nothing. If there is `departure`, a packet that isn't much over the limit
 * isn't dropped but must leave then; it is charged by itself, since its time comes of what was sent before it. */
static __always_inline int police(const struct limit *limit, __u32 nic, __u32 direction,
				  const struct packet *p, __u64 *departure)
{
	struct credit *own = departure ? 0 : own_credit(nic, direction);
	struct meters *meter;

	if (own && spend(limit, own, p))
		return DROP_NONE;
	meter = bpf_map_lookup_elem(&meters, &nic);
	if (!meter)
		return DROP_HELPER;
	return ask_meter(limit, direction == DIRECTION_EGRESS ? &meter->egress : &meter->ingress,
			 own, p, departure);
}

#endif

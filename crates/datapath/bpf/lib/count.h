/* Counters of an interface: what was let through, and what was dropped why. */
#ifndef SANDWIRE_COUNT_H
#define SANDWIRE_COUNT_H

#include "maps.h"
#include "parse.h"

/* Entries of `nics`, which the daemon may load with another number of them. */
const volatile __u32 nics_max = NICS_MAX;

static __always_inline void count_drop(__u32 nic, __u32 reason)
{
	struct counters *c = bpf_map_lookup_elem(&counters, &nic);

	/* The verifier wants to see the bound that the compiler would prove needless. */
	asm volatile("" : "+r"(reason));
	if (c && reason < DROP_REASONS_MAX)
		__sync_fetch_and_add(&c->drops[reason], 1);
}

/* The interface's line of this processor, if that has any.
 *
 * It is added to without atomics, since nobody else does meanwhile: on all our hooks bottom halves are disabled, so that
 * the program stays on its processor and no other of ours comes in between. With PREEMPT_RT since Linux 6.18 that is so
 * only with CONFIG_PREEMPT_RT_NEEDS_BH_LOCK; else, at worst, what another counts of this interface between a load and its
 * store is lost. */
static __always_inline struct ledger *own_ledger(__u32 nic)
{
	__u32 processor = bpf_get_smp_processor_id(), index = processor * nics_max + nic;

	if (rarely(processor >= processors))
		return 0;
	return bpf_map_lookup_elem(&ledgers, &index);
}

static __always_inline void count_traffic(struct traffic *traffic, __u32 bytes, __u32 segments)
{
	traffic->packets += 1;
	traffic->bytes += bytes;
	traffic->segments += segments;
}

/* By a processor without lines: where all may count. */
static __noinline int count_shared(__u32 nic, __u32 direction, __u32 bytes, __u32 segments)
{
	struct counters *c = bpf_map_lookup_elem(&counters, &nic);
	struct traffic *traffic;

	if (!c)
		return 0;
	traffic = direction == DIRECTION_EGRESS ? &c->egress : &c->ingress;
	__sync_fetch_and_add(&traffic->packets, 1);
	__sync_fetch_and_add(&traffic->bytes, bytes);
	__sync_fetch_and_add(&traffic->segments, segments);
	return 0;
}

/* The interface must be one of `nics`, here and below: what is beyond would be another processor's. */
static __always_inline void count_egress(__u32 nic, __u32 bytes, __u32 segments)
{
	struct ledger *own = own_ledger(nic);

	if (own)
		count_traffic(&own->egress, bytes, segments);
	else
		count_shared(nic, DIRECTION_EGRESS, bytes, segments);
}

static __always_inline void count_ingress(__u32 nic, __u32 bytes, __u32 segments)
{
	struct ledger *own = own_ledger(nic);

	if (own)
		count_traffic(&own->ingress, bytes, segments);
	else
		count_shared(nic, DIRECTION_INGRESS, bytes, segments);
}

#endif

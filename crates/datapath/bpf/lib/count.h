/* Counters of an interface: what was let through, and what was dropped why. */
#ifndef SANDWIRE_COUNT_H
#define SANDWIRE_COUNT_H

#include "maps.h"
#include "parse.h"

static __always_inline void count_drop(__u32 nic, __u32 reason)
{
	struct counters *c = bpf_map_lookup_elem(&counters, &nic);

	/* The verifier wants to see the bound that the compiler would prove needless. */
	asm volatile("" : "+r"(reason));
	if (c && reason < DROP_REASONS_MAX)
		__sync_fetch_and_add(&c->drops[reason], 1);
}

static __always_inline void count_traffic(struct traffic *traffic, __u32 bytes, __u32 segments)
{
	__sync_fetch_and_add(&traffic->packets, 1);
	__sync_fetch_and_add(&traffic->bytes, bytes);
	__sync_fetch_and_add(&traffic->segments, segments);
}

static __always_inline void count_egress(__u32 nic, __u32 bytes, __u32 segments)
{
	struct counters *c = bpf_map_lookup_elem(&counters, &nic);

	if (c)
		count_traffic(&c->egress, bytes, segments);
}

static __always_inline void count_ingress(__u32 nic, __u32 bytes, __u32 segments)
{
	struct counters *c = bpf_map_lookup_elem(&counters, &nic);

	if (c)
		count_traffic(&c->ingress, bytes, segments);
}

#endif

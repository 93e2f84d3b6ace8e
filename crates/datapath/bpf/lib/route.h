/* Decisions: where a packet that policy lets pass goes, kept for a short time per flow. */
#ifndef SANDWIRE_ROUTE_H
#define SANDWIRE_ROUTE_H

#include "maps.h"
#include "parse.h"
#include "police.h"

#define DECISION_LIFE (NANOSECONDS / 10)
#define VARIANT_LATER_FRAGMENT 1
#define VARIANT_ANSWER 2
#define VARIANT_ANY_PORT 4
/* Verdict of a decision for all ports: they have a say, so each has a decision of its own. */
#define LEFT_TO_PORTS 0x8000

/* What a decision depends on besides interface, generation and address. */
static __always_inline __u32 variant_of(const struct packet *p)
{
	return (p->fragment == FRAGMENT_LATER ? VARIANT_LATER_FRAGMENT : 0) |
	       (p->as_answer ? VARIANT_ANSWER : 0) | (p->any_port ? VARIANT_ANY_PORT : 0);
}

/* Port of the destination; of ICMP the type, because only echo requests may reach the host. */
static __always_inline __u16 decision_port(const struct packet *p)
{
	if (p->any_port)
		return 0;
	return p->icmp_kind ? p->icmp_type : p->destination_port;
}

static __always_inline __u32 decision_slot(const struct packet *p, __u32 nic)
{
	const struct address *a = &p->destination;
	__u32 processor = bpf_get_smp_processor_id();
	__u32 slot = a->word[3] ^ a->word[0] * 3 ^ a->word[1] * 5;

	slot = (slot + p->protocol) * 0x9e3779b1;
	slot = (slot ^ slot >> 15 ^ decision_port(p)) * 0x85ebca6b;
	/* An answer decides twice: first that it is denied. The two mustn't chase each other. */
	slot = (slot ^ slot >> 13 ^ nic ^ variant_of(p) << 16) * 0xc2b2ae35;
	if (rarely(processor >= processors))
		return processors * DECISIONS_MAX + (processor - processors) * DECISIONS_LATER +
		       (slot >> 31);
	return processor * DECISIONS_MAX + (slot >> 20 & (DECISIONS_MAX - 1));
}

/* The interface of the sandbox that a decision sends to, as it was decided. */
static __always_inline struct nic *decided_target(const struct decision *d)
{
	__u32 index = d->target;
	struct nic *target = bpf_map_lookup_elem(&nics, &index);

	if (!target || READ_ONCE(target->state) != NIC_ACTIVE ||
	    READ_ONCE(target->generation) != d->flags)
		return 0;
	return target;
}

static __always_inline int decision_holds(const struct decision *d, const struct packet *p,
					  __u32 nic, __u32 generation, __u64 now)
{
	return d->nic == nic && d->generation == generation &&
	       same_address(&d->destination, &p->destination) && d->port == decision_port(p) &&
	       d->protocol == p->protocol && d->variant == variant_of(p) && now < d->until;
}

/* What is known of where a packet goes: an entry that holds. Else `*holds` is zero, and the entry, of the
 * two that there are for it the one that ends sooner, is to be decided anew. */
static __always_inline struct decision *find_decision(const struct packet *p, __u32 nic,
						      __u32 generation, __u64 now, int *holds)
{
	__u32 slot = decision_slot(p, nic), other = slot ^ 1;
	struct decision *first = bpf_map_lookup_elem(&decisions, &slot), *second;

	*holds = 0;
	if (!first)
		return 0;
	*holds = decision_holds(first, p, nic, generation, now);
	if (*holds)
		return first;
	second = bpf_map_lookup_elem(&decisions, &other);
	if (!second)
		return first;
	*holds = decision_holds(second, p, nic, generation, now);
	return *holds || second->until < first->until ? second : first;
}

/* First what was decided for all ports of the destination is asked for, then, where ports have a say, what was for this one. */
static __always_inline void ask_for_any_port(struct packet *p)
{
	p->any_port = p->destination_port != 0;
}

#endif

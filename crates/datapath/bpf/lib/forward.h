/* Forwarding what a guest sends: the limits on its way, and what the packet is turned into. */
#ifndef SANDWIRE_FORWARD_H
#define SANDWIRE_FORWARD_H

#include "antispoof.h"
#include "maps.h"
#include "nat.h"
#include "police.h"
#include "route.h"

/* Where a packet goes: the decision, corrected for what only this packet shows. */
struct course {
	const struct decision *decision;
	struct nic *target; /* of VERDICT_SANDBOX, else null */
	const struct policy *policy;
	__u32 verdict;
	__u32 reason;
	__u32 fresh;  /* just decided: the kernel shall look after the neighbour */
	__u64 now;
	__u64 departure; /* when it may leave; zero for at once */
};

/* Whether the packet would be let through, past the masquerade, or to the stack that translates it back,
 * if it answers another. `flags` are the sender's. */
static __always_inline int may_be_answer(const struct course *c, __u32 flags)
{
	if (!(c->policy->flags & POLICY_ANSWERS) && !(flags & NIC_PUBLISHED))
		return 0;
	if (c->verdict == VERDICT_UPLINK)
		return flags & NIC_PUBLISHED || c->policy->table;
	if (c->verdict == VERDICT_STACK)
		return c->decision->flags & DECISION_MASQUERADE;
	/* A call may have come by a way that a table of the policy's own doesn't have. */
	return c->verdict == VERDICT_DROP &&
	       (c->reason == DROP_POLICY || c->reason == DROP_METADATA ||
		c->reason == DROP_HOST_SERVICE || c->reason == DROP_UPLINK_DENIED ||
		(c->reason == DROP_NO_ROUTE && c->policy->table));
}

/* Whether it doesn't fit the way out. The stack puts fragments together before it cuts them anew, so it
 * must get all of a datagram or none: where the way is narrower than the guest's interface, all. */
static __always_inline int is_too_big(frame *f, const struct packet *p, const struct nic *nic,
				      const struct decision *d)
{
	__u32 mtu = d->mtu;

	return is_longer(f, p, mtu, d->ifindex) || (p->fragment != FRAGMENT_WHOLE && nic->mtu > mtu);
}

/* The sender's limit. Where the uplink's queue can hold packets back, the excess leaves later. */
static __always_inline int police_egress(const struct sender *s, const struct packet *p,
					 struct course *c)
{
	int fq = c->verdict == VERDICT_UPLINK && c->decision->flags & DECISION_FQ;

	if (!is_limited(&c->policy->egress))
		return DROP_NONE;
	return police(&c->policy->egress, s->index, DIRECTION_EGRESS, p, fq ? &c->departure : 0);
}

/* The receiver's limit: what it drops is the receiver's, and is counted there. */
static __always_inline int police_target(const struct packet *p, struct course *c)
{
	__u32 policy_index = READ_ONCE(c->target->policy);
	const struct policy *policy = bpf_map_lookup_elem(&policies, &policy_index);

	if (!policy || !is_limited(&policy->ingress))
		return DROP_NONE;
	return police(&policy->ingress, c->decision->target, DIRECTION_INGRESS, p, 0);
}

static __always_inline void translate_to_target(struct translation *t, struct hop *hop,
						const struct packet *p, const struct nic *target)
{
	__u32 flags = READ_ONCE(target->flags);

	hop->source_mac = target->gateway_mac;
	if (flags & NIC_PROCESS) {
		hop->destination_mac = target->veth_mac;
		return;
	}
	hop->destination_mac = target->guest_mac;
	t->destination = p->version == 4 ? mapped(target->guest4) : target->guest6;
}

static __always_inline void translate_from_guest(struct translation *t, struct hop *hop,
						 const struct sender *s, const struct packet *p,
						 const struct course *c)
{
	const struct nic *nic = s->nic;

	t->source = p->version == 4 ? mapped(nic->clone4) : nic->clone6;
	t->destination = p->destination;
	if (c->target) {
		hop->is_router = 1;
		translate_to_target(t, hop, p, c->target);
	} else if (c->verdict == VERDICT_UPLINK) {
		hop->is_router = 1;
		hop->source_mac = c->decision->source_mac;
		hop->destination_mac = c->decision->destination_mac;
	} else {
		hop->source_mac = nic->guest_mac;
		hop->destination_mac = nic->shared_mac;
	}
}

#endif

/* Deciding anew: other sandboxes, prefixes, then the kernel's routes. */
#ifndef SANDWIRE_DECIDE_H
#define SANDWIRE_DECIDE_H

#include "policy.h"
#include "ports.h"
#include "route.h"
#include "share.h"

#define AF_INET 2
#define AF_INET6 10
/* No packet is larger. */
#define LARGEST_MTU 0xffff
/* Not in every <linux/bpf.h>. */
#define FIB_DIRECT (1U << 0)
#define FIB_TABLE (1U << 3)
#define FIB_MARK (1U << 5)

/* Flags of bpf_fib_lookup that this kernel has, of those that came late: FIB_TABLE with 6.5,
 * FIB_MARK with 6.10. Set by the loader. */
const volatile __u32 fib_flags = 0;

static __always_inline void decide_drop(struct decision *d, __u32 reason)
{
	d->verdict = VERDICT_DROP;
	d->target = reason;
}

/* Asked for all ports, and they have a say. */
static __always_inline void leave_to_ports(struct decision *d)
{
	d->verdict = LEFT_TO_PORTS;
}

/* Loads before it come before those behind it, also on processors that do them in any order (ARM). BPF has no fence, but
 * atomics that give the former value are one. Of those, clang turns all but the exchange into ones that don't if nobody
 * wants the value. */
static __always_inline void order_loads(void)
{
	__u64 word = 0;

	asm volatile("" : : "r"(&word) : "memory");
	__sync_lock_test_and_set(&word, 1);
	asm volatile("" : : "r"(&word) : "memory");
}

static __always_inline void decide_sandbox(struct decision *d,
					   const struct nic *nic, __u32 target_index,
					   __u32 policy_flags)
{
	struct nic *target = bpf_map_lookup_elem(&nics, &target_index);
	__u32 generation;

	if (!target) {
		decide_drop(d, DROP_NO_SUCH_SANDBOX);
		return;
	}
	generation = READ_ONCE(target->generation);
	order_loads();
	if (READ_ONCE(target->state) != NIC_ACTIVE) {
		decide_drop(d, DROP_NO_SUCH_SANDBOX);
	} else if (!may_reach_sandbox(nic, target, policy_flags)) {
		decide_drop(d, DROP_OTHER_SANDBOX);
	} else if (READ_ONCE(target->flags) & NIC_CHILD) {
		decide_drop(d, DROP_NO_ROUTE);
	} else {
		d->verdict = VERDICT_SANDBOX;
		d->target = target_index;
		d->ifindex = target->ifindex;
		d->mtu = target->mtu < LARGEST_MTU ? target->mtu : LARGEST_MTU;
		d->flags = generation;
	}
}

/* Asks the kernel's routes, by its rules unless `late` says otherwise; `late` are those of FIB_TABLE and FIB_MARK that the policy is followed in. Returns
 * what bpf_fib_lookup does. */
static __always_inline long look_up_route(frame *f, struct packet *p, const struct nic *nic,
					  const struct policy *policy, __u32 late,
					  struct bpf_fib_lookup *fib)
{
	__u32 flags = late;

	fib->ifindex = nic->shared_ifindex;
	fib->l4_protocol = p->protocol;
	/* No port of the source: the decision is for all of them, and would be of whoever came first. */
	fib->dport = p->destination_port;
	/* Any length but zero: so the answer has the route's MTU. */
	fib->tot_len = 1;
	if (p->version == 4) {
		fib->family = AF_INET;
		fib->ipv4_src = nic->clone4;
		fib->ipv4_dst = p->destination.word[3];
	} else {
		fib->family = AF_INET6;
		__builtin_memcpy(fib->ipv6_src, &nic->clone6, sizeof(fib->ipv6_src));
		__builtin_memcpy(fib->ipv6_dst, &p->destination, sizeof(fib->ipv6_dst));
	}
	if (late & FIB_TABLE) {
		flags |= FIB_DIRECT;
		/* The table is read where the VLAN is written, the mark where the source MAC is. */
		__builtin_memcpy(&fib->h_vlan_proto, &policy->table, sizeof(policy->table));
	}
	if (late & FIB_MARK)
		__builtin_memcpy(fib->smac, &policy->mark, sizeof(policy->mark));
	return bpf_fib_lookup(f, fib, sizeof(*fib), flags);
}

static __always_inline void note_next_hop(struct packet *p, const struct bpf_fib_lookup *fib)
{
	p->next_hop.nh_family = fib->family;
	__builtin_memcpy(p->next_hop.ipv6_nh, fib->ipv6_dst, sizeof(p->next_hop.ipv6_nh));
}

/* What the kernel writes to a broadcast address of the link, once it has been sent to. */
static __always_inline int is_to_all(const __u8 *mac)
{
	return (mac[0] & mac[1] & mac[2] & mac[3] & mac[4] & mac[5]) == 0xff;
}

static __always_inline void decide_out(frame *f, struct decision *d, struct packet *p,
				       const struct nic *nic, const struct policy *policy,
				       const struct bpf_fib_lookup *fib, int resolved)
{
	__u32 mode = p->as_answer ? UPLINK_ROUTE : READ_ONCE(policy->uplink);
	__u32 ifindex = fib->ifindex, mtu = fib->mtu_result;
	const struct uplink *uplink;

	if (ifindex == nic->shared_ifindex) {
		decide_drop(d, DROP_NO_SUCH_SANDBOX);
		return;
	}
	if (mode == UPLINK_DENY) {
		decide_drop(d, DROP_UPLINK_DENIED);
		return;
	}
	d->verdict = VERDICT_STACK;
	d->ifindex = ifindex;
	if (mode == UPLINK_MASQUERADE) {
		d->flags = DECISION_MASQUERADE;
		return;
	}
	uplink = bpf_map_lookup_elem(&uplinks, &ifindex);
	if (!uplink)
		return;
	d->verdict = VERDICT_UPLINK;
	d->flags = uplink->flags & (UPLINK_FQ | UPLINK_XDP);
	note_next_hop(p, fib);
	if (resolved && policy->table && is_to_all(fib->dmac)) {
		decide_drop(d, DROP_MULTICAST);
	} else if (resolved) {
		__builtin_memcpy(d->source_mac, fib->smac, sizeof(d->source_mac));
		__builtin_memcpy(d->destination_mac, fib->dmac, sizeof(d->destination_mac));
	} else {
		/* Until the neighbour answers, every packet asks again; and some kernels don't tell
		 * the MTU then. */
		d->until = 0;
		if (mtu <= 1) {
			mtu = 0;
			bpf_check_mtu(f, ifindex, &mtu, 0, 0);
		}
	}
	d->mtu = mtu < LARGEST_MTU ? mtu : LARGEST_MTU;
}

/* A table of the policy's own says nothing of the host's addresses, and the stack goes by the host's rules: it gets
 * what these lead to the host itself, if the policy has that, and what it is to masquerade. Anything else it
 * would send where the table doesn't. */
static __always_inline void keep_to_table(frame *f, struct decision *d, struct packet *p,
					  const struct nic *nic, const struct policy *policy,
					  __u32 late, struct bpf_fib_lookup *fib)
{
	int is_hosts;

	/* Not another one: stack is scarce. */
	__builtin_memset(fib, 0, sizeof(*fib));
	is_hosts = look_up_route(f, p, nic, policy, late, fib) == BPF_FIB_LKUP_RET_NOT_FWDED;
	if (d->verdict == VERDICT_UPLINK)
		d->flags |= DECISION_PAST_RULES;
	if (is_hosts && !may_reach_host(p, policy)) {
		if (d->verdict == VERDICT_UPLINK)
			d->flags |= DECISION_PAST_HOST;
		else
			decide_drop(d, DROP_HOST_SERVICE);
	} else if (!is_hosts && d->verdict == VERDICT_STACK &&
		   !(d->flags & DECISION_MASQUERADE)) {
		decide_drop(d, DROP_NO_ROUTE);
	}
}

/* Whether the relay's rules in the host's stack have a say in what is sent by this protocol, whatever the port; and in all ICMP, since
 * errors quote what came by the relay. */
static __always_inline int is_for_relay(const struct packet *p, const struct nic *nic)
{
	struct address source = p->version == 4 ? mapped(nic->clone4) : nic->clone6;
	__u32 set = find_redirects(&source);
	const struct prefix_value *found = set ? find_prefix(p, set, POLICY_PREFIXES) : 0;
	const struct rule_list *list;

	if (!found || !found->list)
		return found != 0;
	list = bpf_map_lookup_elem(&rule_lists, &found->list);
	for (__u32 i = 0; list && i < RULES_MAX; i++) {
		if (i >= list->count)
			break;
		if (!list->rules[i].protocol || list->rules[i].protocol == p->protocol)
			return 1;
	}
	return p->protocol == PROTOCOL_ICMP || p->protocol == PROTOCOL_ICMPV6;
}

/* The stack has rules of its own for it, such as the relay's. */
static __always_inline void decide_up(struct decision *d, const struct packet *p,
				      const struct policy *policy)
{
	/* What may not leave may not leave so. */
	if (!p->as_answer && READ_ONCE(policy->uplink) == UPLINK_DENY)
		decide_drop(d, DROP_UPLINK_DENIED);
	else
		d->verdict = VERDICT_STACK;
}

/* A table of the policy's own says nothing of it: keep_to_table asks the host's rules. */
static __always_inline void decide_unsaid(struct decision *d, const struct packet *p,
					  const struct policy *policy)
{
	d->verdict = VERDICT_STACK;
	if (!p->as_answer && READ_ONCE(policy->uplink) == UPLINK_MASQUERADE)
		d->flags = DECISION_MASQUERADE;
}

/* Whether a route leads to the destination itself, and not to a router. */
static __always_inline int is_on_link(const struct packet *p, const struct bpf_fib_lookup *fib)
{
	const __u32 *hop = fib->ipv6_dst, *to = p->destination.word;

	if (p->version == 4)
		return fib->family == AF_INET && fib->ipv4_dst == to[3];
	return !((hop[0] ^ to[0]) | (hop[1] ^ to[1]) | (hop[2] ^ to[2]) | (hop[3] ^ to[3]));
}

static __always_inline void decide_route(frame *f, struct decision *d, struct packet *p,
					 const struct nic *nic, const struct policy *policy)
{
	struct bpf_fib_lookup fib = {};
	int is_relayed = p->is_relayed;
	/* The relay comes before a table of the policy's own. */
	__u32 table = is_relayed ? 0 : policy->table;
	__u32 wanted = (table ? FIB_TABLE : 0) | (policy->mark ? FIB_MARK : 0);
	__u32 late = fib_flags & wanted;
	long result = look_up_route(f, p, nic, policy, late, &fib);

	p->has_new_hop = result == BPF_FIB_LKUP_RET_NO_NEIGH && !is_relayed && is_on_link(p, &fib);
	switch (result) {
	case BPF_FIB_LKUP_RET_SUCCESS:
	case BPF_FIB_LKUP_RET_NO_NEIGH:
		if (is_relayed)
			/* Its routing rules would refuse it: somebody has deleted them. */
			decide_up(d, p, policy);
		else
			decide_out(f, d, p, nic, policy, &fib,
				   result == BPF_FIB_LKUP_RET_SUCCESS);
		break;
	case BPF_FIB_LKUP_RET_NOT_FWDED:
		/* The host's own address; or no route at all, which the kernel doesn't tell apart. */
		if (table)
			decide_unsaid(d, p, policy);
		else if (p->any_port && services_have_ports(policy))
			leave_to_ports(d);
		else if (may_reach_host(p, policy))
			d->verdict = VERDICT_STACK;
		else
			decide_drop(d, DROP_HOST_SERVICE);
		break;
	default:
		if (result < 0)
			decide_drop(d, DROP_NO_ROUTE);
		else
			decide_up(d, p, policy);
	}
	if (late != wanted && d->verdict == VERDICT_UPLINK) {
		/* The stack follows rules about marks by itself, but reads no table that it isn't led to. */
		if (wanted & ~late & FIB_TABLE)
			decide_drop(d, DROP_NO_ROUTE);
		else if (!table)
			d->verdict = VERDICT_STACK;
	}
	if (!table || d->verdict == VERDICT_DROP)
		return;
	if (p->any_port && services_have_ports(policy))
		leave_to_ports(d);
	else
		keep_to_table(f, d, p, nic, policy, late & FIB_MARK, &fib);
}

/* To be called before decide(), which has no room on the stack for it: keeps the generation, before all that is decided by, so
 * that the decision doesn't hold if that changes meanwhile; and asks whether the packet is the relay's. */
static __noinline int begin_decision(struct packet *p, __u32 index, struct decision *d)
{
	const struct nic *nic = bpf_map_lookup_elem(&nics, &index);

	if (!nic)
		return 0;
	d->generation = READ_ONCE(nic->generation);
	order_loads();
	p->is_relayed = is_for_relay(p, nic);
	return 0;
}

/* What the decision is for, and until when. */
static __always_inline void name_decision(struct decision *d, const struct packet *p, __u32 index,
					  __u64 now)
{
	d->nic = index;
	d->destination = p->destination;
	d->port = decision_port(p);
	d->protocol = p->protocol;
	d->variant = variant_of(p);
	d->until = now + DECISION_LIFE;
	d->flags = 0;
	d->target = 0;
	d->ifindex = 0;
	__builtin_memset(d->source_mac, 0, sizeof(d->source_mac));
	__builtin_memset(d->destination_mac, 0, sizeof(d->destination_mac));
}

/* Fills `d`, which begin_decision has begun. `p->next_hop` is set for VERDICT_UPLINK, and `p->has_new_hop` for that and VERDICT_STACK;
 * where it is, `d->ifindex` is that of the link. */
__noinline int decide(frame *f, struct packet *p, __u32 index, __u64 now, struct decision *d)
{
	const struct clone_value *clone;
	const struct prefix_value *found;
	struct address destination;
	const struct policy *policy;
	struct nic *nic;
	__u32 policy_index;
	int reason;

	if (!p || !d)
		return 0;
	nic = bpf_map_lookup_elem(&nics, &index);
	if (!nic)
		return 0;
	name_decision(d, p, index, now);
	policy_index = READ_ONCE(nic->policy);
	policy = bpf_map_lookup_elem(&policies, &policy_index);
	if (!policy) {
		decide_drop(d, DROP_POLICY);
		return 0;
	}
	if (!p->as_answer) {
		/* Before Linux 6.2 a key must be on this function's own stack. */
		destination = p->destination;
		clone = bpf_map_lookup_elem(&clones, &destination);
		if (clone) {
			decide_sandbox(d, nic, clone->nic, policy->flags);
			return 0;
		}
		found = find_prefix(p, policy_index, policy->flags);
		if (p->any_port && found && found->list) {
			leave_to_ports(d);
			return 0;
		}
		reason = judge_by(found, p, policy->flags);
		if (reason) {
			decide_drop(d, reason);
			return 0;
		}
	}
	if (p->any_port && routes_have_ports(f, p->version))
		leave_to_ports(d);
	else
		decide_route(f, d, p, nic, policy);
	return 0;
}

/* Refuses what a table of the policy's own leads to a broadcast address of a link. Such a table doesn't tell it from others
 * there, nor do the host's rules tell it from what no route leads to: but to what is beside it they lead, by that link. */
__noinline int refuse_broadcast(frame *f, struct packet *p, __u32 index, struct decision *d)
{
	struct bpf_fib_lookup fib = {};
	const struct policy *policy;
	const struct nic *nic;
	__u32 policy_index, late;
	long result;

	if (!p || !d)
		return 0;
	nic = bpf_map_lookup_elem(&nics, &index);
	if (!nic)
		return 0;
	policy_index = READ_ONCE(nic->policy);
	policy = bpf_map_lookup_elem(&policies, &policy_index);
	/* No link for four addresses or more has another. */
	if (!policy || p->version != 4 || ~p->destination.word[3] & bpf_htonl(3))
		return 0;
	late = fib_flags & (policy->mark ? FIB_MARK : 0);
	if (look_up_route(f, p, nic, policy, late, &fib) != BPF_FIB_LKUP_RET_NOT_FWDED)
		return 0;
	/* Of four addresses the host may have one. */
	for (__u32 bit = 1; bit <= 2; bit++) {
		__builtin_memset(&fib, 0, sizeof(fib));
		p->destination.word[3] ^= bpf_htonl(bit);
		result = look_up_route(f, p, nic, policy, late, &fib);
		if ((result == BPF_FIB_LKUP_RET_SUCCESS || result == BPF_FIB_LKUP_RET_NO_NEIGH) &&
		    fib.ifindex == d->ifindex && is_on_link(p, &fib))
			decide_drop(d, DROP_MULTICAST);
		p->destination.word[3] ^= bpf_htonl(bit);
	}
	return 0;
}

/* Whether the link by which a neighbour is known is one where nobody is looked for, as a tunnel or one without ARP: there the kernel
 * enters everybody without an address of theirs. */
static __always_inline int asks_nobody(const struct bpf_fib_lookup *fib)
{
	__u8 any = 0, other = 0;

	for (int i = 0; i < ETH_ALEN; i++) {
		any |= fib->dmac[i];
		other |= fib->dmac[i] ^ fib->smac[i];
	}
	return !any || !other;
}

/* The same of the link that a new decision has, by somebody to whom the interface has sent there. */
static __always_inline int leads_to_silence(frame *f, struct packet *p, __u32 index,
					    const struct address *sample, __u32 link)
{
	const struct nic *nic = bpf_map_lookup_elem(&nics, &index);
	struct address destination = p->destination;
	struct bpf_fib_lookup fib = {};
	const struct policy *policy;
	__u32 policy_index, wanted;
	long result;

	if (!nic)
		return 0;
	policy_index = READ_ONCE(nic->policy);
	policy = bpf_map_lookup_elem(&policies, &policy_index);
	if (!policy)
		return 0;
	wanted = (policy->table ? FIB_TABLE : 0) | (policy->mark ? FIB_MARK : 0);
	p->destination = *sample;
	result = look_up_route(f, p, nic, policy, fib_flags & wanted, &fib);
	p->destination = destination;
	return result == BPF_FIB_LKUP_RET_SUCCESS && fib.ifindex == link && asks_nobody(&fib);
}

/* Turns a new decision to send to a new neighbour into a drop where that would be one too many. Not where nobody is looked
 * for: the kernel makes room in its table by what it has entered so. Apart from decide(), whose stack has no room for it. */
__noinline int bound_neighbours(frame *f, struct packet *p, __u32 index, __u64 now,
				struct decision *d)
{
	struct neighbour_samples *samples;
	struct address *sample;

	if (!p || !d || (d->verdict != VERDICT_UPLINK && d->verdict != VERDICT_STACK))
		return 0;
	samples = bpf_map_lookup_elem(&neighbour_samples, &index);
	if (!samples)
		return 0;
	sample = &samples->sent[(d->ifindex ^ p->version >> 1) & (SAMPLES_MAX - 1)];
	if (leads_to_silence(f, p, index, sample, d->ifindex))
		return 0;
	if (may_ask_for(p, index, now))
		*sample = p->destination;
	else
		decide_drop(d, DROP_NEIGHBOUR_LIMIT);
	return 0;
}

#endif

/* Policy: which sandboxes, prefixes and host services a packet may go to. */
#ifndef SANDWIRE_POLICY_H
#define SANDWIRE_POLICY_H

#include "maps.h"
#include "parse.h"

/* Only TCP and UDP have ports that rules can name; other protocols are covered by protocol alone, and so are fragments after
 * the first by a rule that allows, or that means all ports. One that denies some would deny others' fragments too, and
 * without the first nobody can put them together; unless it `is_strict`, where no byte may leave. */
static __always_inline int rule_covers(const struct port_rule *rule, const struct packet *p,
				       int is_strict)
{
	__u16 port = bpf_ntohs(p->destination_port);

	if (rule->protocol && rule->protocol != p->protocol &&
	    !(rule->protocol == PROTOCOL_ICMP && p->protocol == PROTOCOL_ICMPV6 && p->version == 6))
		return 0;
	if (p->protocol != PROTOCOL_TCP && p->protocol != PROTOCOL_UDP)
		return 1;
	if (p->fragment == FRAGMENT_LATER)
		return is_strict || rule->action == ACTION_ALLOW ||
		       (rule->first <= 1 && rule->last == 0xffff);
	return rule->first <= port && port <= rule->last;
}

/* Another sandbox: the same one, its group, or a pair of groups. */
static __always_inline int may_reach_sandbox(const struct nic *from, const struct nic *to,
					     __u32 policy_flags)
{
	struct group_pair pair = {.from = from->group, .to = to->group};

	if (from->pool == to->pool && from->slot == to->slot)
		return 1;
	if (from->group == to->group && policy_flags & POLICY_SAME_GROUP)
		return 1;
	return policy_flags & POLICY_OTHER_GROUPS && bpf_map_lookup_elem(&group_pairs, &pair);
}

/* The longest prefix of a policy that has the destination, or none. */
static __always_inline const struct prefix_value *find_prefix(const struct packet *p, __u32 policy,
							      __u32 policy_flags)
{
	struct prefix_key key = {.prefix_length = 32 + 128, .policy = policy};

	if (!(policy_flags & POLICY_PREFIXES))
		return 0;
	key.address = p->destination;
	return bpf_map_lookup_elem(&prefixes, &key);
}

/* Returns a drop reason. Protocol and port have a say only where the prefix has a list. */
static __always_inline int judge_by(const struct prefix_value *found, const struct packet *p,
				    __u32 policy_flags)
{
	int otherwise = policy_flags & POLICY_ALLOW ? DROP_NONE : DROP_POLICY;
	const struct rule_list *list;
	int reason;

	if (!found)
		return otherwise;
	reason = found->reason ? found->reason : DROP_POLICY;
	if (!found->list)
		return found->action == ACTION_ALLOW ? DROP_NONE : reason;
	list = bpf_map_lookup_elem(&rule_lists, &found->list);
	for (__u32 i = 0; list && i < RULES_MAX; i++) {
		if (i >= list->count)
			break;
		if (rule_covers(&list->rules[i], p, reason == DROP_NOT_RELAYED))
			return list->rules[i].action == ACTION_ALLOW ? DROP_NONE : reason;
	}
	return otherwise == DROP_NONE ? DROP_NONE : reason;
}

/* Returns a drop reason. */
static __always_inline int judge_prefixes(const struct packet *p, __u32 policy, __u32 policy_flags)
{
	return judge_by(find_prefix(p, policy, policy_flags), p, policy_flags);
}

/* What a source may send only by the relay: the number of a set of destinations, zero where there is none. */
static __always_inline __u32 find_redirects(const struct address *source)
{
	struct prefix_key key = {.prefix_length = 32 + 128, .address = *source};
	const struct prefix_value *found;
	const struct policy *nobodys;
	__u32 nobody = 0;

	nobodys = bpf_map_lookup_elem(&policies, &nobody);
	if (!nobodys || !(READ_ONCE(nobodys->flags) & POLICY_REDIRECTS))
		return 0;
	found = bpf_map_lookup_elem(&prefixes, &key);
	return found ? found->list : 0;
}

/* What may leave only by the relay, where none takes it. Returns a drop reason. */
static __always_inline int judge_redirects(const struct packet *p)
{
	__u32 set = find_redirects(&p->source);

	return set ? judge_prefixes(p, set, POLICY_PREFIXES | POLICY_ALLOW) : DROP_NONE;
}

/* Whether ports have a say in what may_reach_host answers. */
static __always_inline int services_have_ports(const struct policy *policy)
{
	return policy->service_count && !(policy->flags & POLICY_HOST_ALL);
}

static __always_inline int may_reach_host(const struct packet *p, const struct policy *policy)
{
	__u32 flags = policy->flags;

	if (flags & POLICY_HOST_ALL)
		return 1;
	if (flags & POLICY_HOST_ICMP) {
		__u8 icmp = p->version == 4 ? PROTOCOL_ICMP : PROTOCOL_ICMPV6;

		/* A later fragment is of use only if the first one passed. */
		if (p->protocol == icmp &&
		    (p->icmp_kind == ICMP_REQUEST || p->fragment == FRAGMENT_LATER))
			return 1;
	}
	for (__u32 i = 0; i < SERVICES_MAX; i++) {
		if (i >= policy->service_count)
			break;
		if (rule_covers(&policy->services[i], p, 1))
			return 1;
	}
	return 0;
}

#endif

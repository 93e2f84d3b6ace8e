/* What an identity may reach: other identities by group, everything else by the rules of its policy. What it may reach of
 * the host is judged where it is known that a destination is the host's. */
#ifndef SANDWIRE_IDENTITY_POLICY_H
#define SANDWIRE_IDENTITY_POLICY_H

#include "owner.h"

/* In place of a refusal. */
#define PASSES (-1)

/* Whom a socket of the identity wants to reach. */
struct destination {
	struct address address;
	/* In the host's order; 0 where there is none. */
	__u16 port;
	__u8 protocol;
	/* A fragment without ports. */
	__u8 is_later;
};

static __always_inline const struct policy *policy_of(__u32 number)
{
	return bpf_map_lookup_elem(&policies, &number);
}

/* Only TCP and UDP have ports that rules can name. */
static __always_inline int covers(const struct port_rule *rule, __u8 protocol, __u16 port,
				  int is_later)
{
	if (rule->protocol && rule->protocol != protocol &&
	    !(rule->protocol == IPPROTO_ICMP && protocol == IPPROTO_ICMPV6))
		return 0;
	if (protocol != IPPROTO_TCP && protocol != IPPROTO_UDP)
		return 1;
	return is_later || (rule->first <= port && port <= rule->last);
}

static __always_inline int names_group(const struct policy *policy, __u32 group)
{
	for (__u32 i = 0; i < TALKS_MAX; i++) {
		if (i >= policy->talk_count)
			break;
		if (policy->talks[i] == group)
			return 1;
	}
	return 0;
}

static __always_inline int judge_identity(const struct policy *policy, __u32 other_number)
{
	const struct policy *other = policy_of(other_number);

	if (!other)
		return REFUSED_OTHER_IDENTITY;
	if (policy->group == other->group && policy->flags & POLICY_SAME_GROUP)
		return PASSES;
	if (names_group(policy, other->group) && names_group(other, policy->group))
		return PASSES;
	return REFUSED_OTHER_IDENTITY;
}

static __always_inline int judge_prefixes(const struct policy *policy, const struct destination *to)
{
	int otherwise = policy->flags & POLICY_ALLOW ? PASSES : REFUSED_POLICY;
	struct prefix_key key = {
		.prefix_length = 32 + 128,
		.policy = policy->index,
		.address = to->address,
	};
	const struct rule_list *list;
	const struct prefix *found;
	struct part_key part;

	if (!(policy->flags & POLICY_PREFIXES))
		return otherwise;
	found = bpf_map_lookup_elem(&prefixes, &key);
	if (!found)
		return otherwise;
	if (found->metadata)
		return REFUSED_METADATA;
	if (!found->list)
		return found->allows ? PASSES : REFUSED_POLICY;
	part.policy = policy->index;
	part.part = found->list;
	list = bpf_map_lookup_elem(&rule_lists, &part);
	/* Was replaced while we looked. */
	if (!list)
		return REFUSED_POLICY;
	for (__u32 i = 0; i < RULES_MAX; i++) {
		if (i >= list->count)
			break;
		if (covers(&list->rules[i], to->protocol, to->port, to->is_later))
			return list->rules[i].allows ? PASSES : REFUSED_POLICY;
	}
	return otherwise;
}

/* Whether a service of the host may be reached. */
static __always_inline int serves(const struct policy *policy, __u8 protocol, __u16 port,
				  int is_later)
{
	if (policy->flags & POLICY_HOST_ALL)
		return 1;
	if (policy->flags & POLICY_HOST_ICMP &&
	    (protocol == IPPROTO_ICMP || protocol == IPPROTO_ICMPV6))
		return 1;
	for (__u32 i = 0; i < SERVICES_MAX; i++) {
		if (i >= policy->service_count)
			break;
		if (covers(&policy->services[i], protocol, port, is_later))
			return 1;
	}
	return 0;
}

/* PASSES or a refusal. `is_host` says that the destination is on this host, be it an identity's or not. A function of its own,
 * so that the verifier walks through it once per program, and not once for each way that leads there. */
__noinline int judge(__u32 number, const struct destination *to, int is_host)
{
	const struct policy *policy;
	const struct owner *owner;
	struct address address;
	int verdict;

	/* Nobody calls it so; the verifier doesn't know that. */
	if (!to)
		return REFUSED_NO_POLICY;
	/* Linux 6.1 takes keys from the own stack alone. */
	address = to->address;
	owner = bpf_map_lookup_elem(&addresses, &address);
	if (owner && owner->number == number)
		return PASSES;
	policy = policy_of(number);
	if (!policy)
		return REFUSED_NO_POLICY;
	if (owner)
		return judge_identity(policy, owner->number);
	verdict = judge_prefixes(policy, to);
	if (verdict != PASSES || !is_host)
		return verdict;
	return serves(policy, to->protocol, to->port, to->is_later) ? PASSES : REFUSED_HOST_SERVICE;
}

/* What no other hook judges: connect(2) of TCP, where it isn't known yet whether the destination is the host's; and what is
 * sent to a group of IPv4, of which the host's own sockets get a copy that egress isn't told of. */
static __always_inline int may_call(struct bpf_sock_addr *ctx, const struct identity *identity,
				    const struct address *address)
{
	int is_group = is_mapped(address->words) && is_multicast4(address->words[3]);
	struct destination to = {
		.address = *address,
		.port = bpf_ntohs(ctx->user_port),
		.protocol = ctx->protocol,
	};
	int verdict;

	if (ctx->protocol != IPPROTO_TCP && !is_group)
		return 1;
	verdict = judge(identity->number, &to, is_group);
	return verdict == PASSES ? 1 : refuse(verdict, EPERM);
}

#endif

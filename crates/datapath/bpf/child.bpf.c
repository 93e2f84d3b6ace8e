/* A container's interface that is a child (macvlan, ipvlan) of one of the host's. There is no host end: both
 * programs sit on the child itself. The class id of the filters is the index into `nics`.
 *
 * The parent's network routes, and carries what passes here: nothing is translated or redirected, and what the relay
 * would have to take is dropped. Frames to another
 * child of the same parent may never leave the kernel, and are judged all the same. */
#include "hook_tc.h"
#include "maps.h"
#include "parse.h"
#include "antispoof.h"
#include "neighbours.h"
#include "unfinished.h"
#include "answers.h"
#include "deliver.h"
#include "policy.h"
#include "police.h"
#include "count.h"
#include "trace.h"

char _license[] SEC("license") = "Dual MIT/GPL";

/* On to other people's filters, and the kernel. */
#define PASS TC_ACT_UNSPEC

/* No interface of ours: nothing to count it on. */
#define NOBODY (-1)

__noinline int refuse(struct __sk_buff *skb, __u32 index, __u32 direction, __u32 reason, __u32 stage)
{
	const struct nic *nic = bpf_map_lookup_elem(&nics, &index);

	count_drop(index, reason);
	if (nic && READ_ONCE(nic->flags) & NIC_TRACE)
		trace_packet(skb, index, FATE(direction, VERDICT_DROP, stage, reason), 0, 1);
	return TC_ACT_SHOT;
}

static __always_inline int refuse_egress(struct __sk_buff *skb, const struct sender *s, __u32 reason,
					 __u32 stage)
{
	return refuse(skb, s->index, DIRECTION_EGRESS, reason, stage);
}

static __always_inline int refuse_ingress(struct __sk_buff *skb, const struct receiver *r,
					  __u32 reason, __u32 stage)
{
	return refuse(skb, r->index, DIRECTION_INGRESS, reason, stage);
}

/* Finds out who sends and checks the Ethernet header. Returns a drop reason or NOBODY. */
static __always_inline int find_sender(struct __sk_buff *skb, struct sender *s, __u32 *ethertype)
{
	const struct ethhdr *ethernet = frame_data(skb);

	s->index = skb->tc_classid;
	s->nic = bpf_map_lookup_elem(&nics, &s->index);
	if (!s->nic || (const void *)(ethernet + 1) > frame_end(skb))
		return NOBODY;
	s->flags = READ_ONCE(s->nic->flags);
	if (READ_ONCE(s->nic->state) != NIC_ACTIVE)
		return DROP_NOT_LEASED;
	*ethertype = ethernet->h_proto;
	if (has_tag(skb, *ethertype))
		return DROP_VLAN_TAG;
	return same_mac(ethernet->h_source, s->nic->guest_mac) ? DROP_NONE : DROP_SOURCE_MAC;
}

/* The limit, and then out. */
static __always_inline int leave(struct __sk_buff *skb, const struct sender *s,
				 const struct packet *p, const struct policy *policy, __u32 verdict)
{
	__u32 index = s->index;
	int reason = DROP_NONE;

	if (is_limited(&policy->egress))
		reason = police(&policy->egress, index, DIRECTION_EGRESS, p, 0);
	if (rarely(reason))
		return refuse_egress(skb, s, reason, STAGE_POLICE);
	if (rarely(s->flags & NIC_TRACE))
		trace_packet(skb, index,
			     FATE(DIRECTION_EGRESS, verdict, STAGE_REDIRECT, DROP_NONE), 0,
			     p->segments);
	count_egress(index, p->bytes, p->segments);
	return PASS;
}

static __always_inline const struct policy *policy_of_sender(const struct sender *s)
{
	__u32 index = READ_ONCE(s->nic->policy);

	return bpf_map_lookup_elem(&policies, &index);
}

static __always_inline int leave_link(struct __sk_buff *skb, const struct sender *s, struct packet *p)
{
	const struct policy *policy = policy_of_sender(s);

	if (!policy)
		return refuse_egress(skb, s, DROP_POLICY, STAGE_POLICY);
	measure(skb, p);
	return leave(skb, s, p, policy, VERDICT_UPLINK);
}

/* Another sandbox: a child as well, or none that this network leads to. Returns a drop reason. */
static __always_inline int judge_sibling(const struct nic *nic, __u32 target_index,
					 __u32 policy_flags)
{
	const struct nic *target = bpf_map_lookup_elem(&nics, &target_index);

	if (!target || READ_ONCE(target->state) != NIC_ACTIVE)
		return DROP_NO_SUCH_SANDBOX;
	if (!may_reach_sandbox(nic, target, policy_flags))
		return DROP_OTHER_SANDBOX;
	return READ_ONCE(target->flags) & NIC_CHILD ? DROP_NONE : DROP_NO_ROUTE;
}

/* Whether it may be sent because it answers. The reasons are those of destinations beyond sandboxes. */
static __always_inline int is_answer(struct __sk_buff *skb, const struct sender *s,
				     const struct packet *p, const struct policy *policy, int reason)
{
	if (!(policy->flags & POLICY_ANSWERS) ||
	    (reason != DROP_POLICY && reason != DROP_METADATA && reason != DROP_HOST_SERVICE &&
	     reason != DROP_UPLINK_DENIED))
		return 0;
	return find_answer(skb, p, s->index, bpf_ktime_get_coarse_ns(), 1);
}

/* Frames of ipvlan to the MAC that it shares go to who has the address: another child, or else the host itself. */
static __always_inline int is_to_host(const struct __sk_buff *skb, const struct sender *s)
{
	const struct ethhdr *ethernet = frame_data(skb);

	return s->flags & NIC_SHARED_MAC &&
	       ((const void *)(ethernet + 1) > frame_end(skb) ||
		same_mac(ethernet->h_dest, s->nic->guest_mac));
}

static __always_inline int send(struct __sk_buff *skb, const struct sender *s, const struct packet *p)
{
	/* Once: what a policy says and its prefixes are of one index. */
	__u32 policy_index = READ_ONCE(s->nic->policy);
	const struct policy *policy = bpf_map_lookup_elem(&policies, &policy_index);
	struct address destination = p->destination;
	const struct clone_value *clone;
	int reason;

	if (!policy)
		return refuse_egress(skb, s, DROP_POLICY, STAGE_POLICY);
	clone = bpf_map_lookup_elem(&clones, &destination);
	if (clone) {
		reason = judge_sibling(s->nic, clone->nic, policy->flags);
	} else if (rarely(is_to_host(skb, s))) {
		return refuse_egress(skb, s, DROP_HOST_SERVICE, STAGE_POLICY);
	} else {
		reason = judge_prefixes(p, policy_index, policy->flags);
		if (!reason && READ_ONCE(policy->uplink) == UPLINK_DENY)
			reason = DROP_UPLINK_DENIED;
	}
	if (rarely(reason) && !is_answer(skb, s, p, policy, reason))
		return refuse_egress(skb, s, reason, STAGE_POLICY);
	/* Also answers: what goes between these addresses goes there inside TLS. */
	reason = clone ? DROP_NONE : judge_redirects(p);
	if (rarely(reason))
		return refuse_egress(skb, s, reason, STAGE_POLICY);
	return leave(skb, s, p, policy, clone ? VERDICT_SANDBOX : VERDICT_UPLINK);
}

/* What a guest sends to more than one, in spite of an address of one. */
static __always_inline int is_to_many(const struct __sk_buff *skb)
{
	const struct ethhdr *ethernet = frame_data(skb);

	return (const void *)(ethernet + 1) > frame_end(skb) || ethernet->h_dest[0] & 1;
}

/* Egress of the child. */
SEC("classifier")
int from_child(struct __sk_buff *skb)
{
	struct sender sender = {};
	struct packet packet = {};
	__u32 ethertype = 0;
	int reason, is_link;

	frame_pull(skb);
	reason = find_sender(skb, &sender, &ethertype);
	if (reason == NOBODY)
		return TC_ACT_SHOT;
	if (rarely(reason))
		return refuse_egress(skb, &sender, reason,
				     reason == DROP_SOURCE_MAC ? STAGE_ANTISPOOF : STAGE_PARSE);
	if (rarely(skb->protocol != ethertype))
		return refuse_egress(skb, &sender, DROP_ETHERTYPE, STAGE_PARSE);
	if (rarely(ethertype == bpf_htons(ETH_P_ARP))) {
		reason = unfinished_end(skb) ? DROP_MALFORMED : judge_arp_sender(skb, sender.nic);
		if (reason)
			return refuse_egress(skb, &sender, reason, STAGE_ANTISPOOF);
		return leave_link(skb, &sender, &packet);
	}
	reason = parse_of_family(skb, sender.nic, ethertype, &packet);
	if (rarely(reason))
		return refuse_egress(skb, &sender, reason, STAGE_PARSE);
	packet.unfinished = unfinished_end(skb);
	measure_all(skb, &packet);
	if (rarely(is_cut_badly(skb, &packet) || is_forged(&packet)))
		return refuse_egress(skb, &sender, DROP_MALFORMED, STAGE_PARSE);
	is_link = is_link_packet(&packet);
	reason = antispoof(&sender, &packet, is_link);
	if (rarely(packet.icmp_kind == ICMP_ERROR) && !reason && tells_of_others(skb, &packet))
		reason = DROP_SOURCE_ADDRESS;
	if (rarely(reason))
		return refuse_egress(skb, &sender, reason, STAGE_ANTISPOOF);
	if (rarely(is_link)) {
		reason = judge_own_link_packet(skb, &packet, sender.index);
		if (reason)
			return refuse_egress(skb, &sender, reason, STAGE_ANTISPOOF);
		return leave_link(skb, &sender, &packet);
	}
	reason = is_to_many(skb) ? DROP_MULTICAST : judge_destination(&packet);
	if (rarely(reason))
		return refuse_egress(skb, &sender, reason, STAGE_POLICY);
	return send(skb, &sender, &packet);
}

static __always_inline int arrive(struct __sk_buff *skb, const struct receiver *r,
				  const struct packet *p)
{
	if (rarely(r->flags & NIC_TRACE))
		trace_packet(skb, r->index,
			     FATE(DIRECTION_INGRESS, VERDICT_GUEST, STAGE_REDIRECT, DROP_NONE), 0,
			     p->segments);
	count_ingress(r->index, p->bytes, p->segments);
	return PASS;
}

/* What comes from another sandbox was judged where it was sent, unless somebody went past that. */
static __always_inline int admit_sibling(const struct receiver *r, const struct packet *p,
					 __u32 sender_index)
{
	const struct nic *sender = bpf_map_lookup_elem(&nics, &sender_index);
	const struct policy *policy;
	__u32 policy_index;

	if (!sender || READ_ONCE(sender->state) != NIC_ACTIVE ||
	    !(READ_ONCE(sender->flags) & NIC_CHILD))
		return DROP_SOURCE_ADDRESS;
	policy_index = READ_ONCE(sender->policy);
	policy = bpf_map_lookup_elem(&policies, &policy_index);
	if (!policy || !may_reach_sandbox(sender, r->nic, policy->flags))
		return DROP_OTHER_SANDBOX;
	policy = policy_of(r);
	return policy ? police_ingress(r, p, policy) : DROP_NONE;
}

static __always_inline int receive(struct __sk_buff *skb, const struct receiver *r,
				   struct packet *p)
{
	struct address source = p->source;
	const struct clone_value *clone = bpf_map_lookup_elem(&clones, &source);
	int reason = clone ? admit_sibling(r, p, clone->nic) : admit(r, p, ANSWER_UPLINK);

	if (rarely(reason))
		return refuse_ingress(skb, r, reason,
				      reason == DROP_SOURCE_ADDRESS ? STAGE_ANTISPOOF :
				      reason == DROP_OTHER_SANDBOX  ? STAGE_POLICY :
								      STAGE_POLICE);
	return arrive(skb, r, p);
}

/* Ingress of the child. What the network says to others isn't the sandbox's affair, and isn't counted. */
SEC("classifier")
int to_child(struct __sk_buff *skb)
{
	const struct ethhdr *ethernet;
	struct receiver receiver = {};
	struct packet packet = {};
	struct address destination;
	__u32 ethertype;
	int reason;

	frame_pull(skb);
	ethernet = frame_data(skb);
	receiver.index = skb->tc_classid;
	receiver.nic = bpf_map_lookup_elem(&nics, &receiver.index);
	if (!receiver.nic || (const void *)(ethernet + 1) > frame_end(skb) ||
	    READ_ONCE(receiver.nic->state) != NIC_ACTIVE)
		return TC_ACT_SHOT;
	receiver.flags = READ_ONCE(receiver.nic->flags);
	ethertype = ethernet->h_proto;
	if (has_tag(skb, ethertype))
		return TC_ACT_SHOT;
	if (rarely(ethertype == bpf_htons(ETH_P_ARP))) {
		if (!concerns_arp(skb, receiver.nic))
			return TC_ACT_SHOT;
		measure(skb, &packet);
		return arrive(skb, &receiver, &packet);
	}
	if (!read_destination(skb, &destination))
		return TC_ACT_SHOT;
	if (is_own_destination(receiver.nic, &destination)) {
		reason = parse_ip(skb, &packet);
		if (rarely(reason))
			return refuse_ingress(skb, &receiver, reason, STAGE_PARSE);
		measure_arrival(skb, &packet);
		if (rarely(is_link_packet(&packet)))
			return arrive(skb, &receiver, &packet);
		return receive(skb, &receiver, &packet);
	}
	if (ethertype != bpf_htons(ETH_P_IPV6) || parse_ip(skb, &packet) ||
	    !concerns_link_packet(skb, &packet, receiver.index))
		return TC_ACT_SHOT;
	measure(skb, &packet);
	return arrive(skb, &receiver, &packet);
}

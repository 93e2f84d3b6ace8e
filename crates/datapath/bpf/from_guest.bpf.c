/* From the guest: ingress of a host end. The class id of the filter is the index into `nics`. */
#include "hook_tc.h"
#include "maps.h"
#include "parse.h"
#include "antispoof.h"
#include "link.h"
#include "unfinished.h"
#include "decide.h"
#include "forward.h"
#include "peer.h"
#include "answers.h"
#include "count.h"
#include "trace.h"

char _license[] SEC("license") = "Dual MIT/GPL";

/* No interface of ours: nothing to count it on. */
#define NO_SENDER (-1)

__noinline int refuse(struct __sk_buff *skb, __u32 index, __u32 flags, __u32 reason, __u32 stage)
{
	count_drop(index, reason);
	if (flags & NIC_TRACE)
		trace_packet(skb, index, FATE(DIRECTION_EGRESS, VERDICT_DROP, stage, reason), 0, 1);
	return TC_ACT_SHOT;
}

/* The limit of the sandbox that it is for: counted there, and seen by whoever watches either. */
__noinline int refuse_by_target(struct __sk_buff *skb, __u32 index, __u32 flags, __u32 target,
				__u32 reason)
{
	struct nic *nic = bpf_map_lookup_elem(&nics, &target);

	count_drop(target, reason);
	if (flags & NIC_TRACE)
		trace_packet(skb, index, FATE(DIRECTION_EGRESS, VERDICT_DROP, STAGE_POLICE, reason),
			     0, 1);
	if (nic && READ_ONCE(nic->flags) & NIC_TRACE)
		trace_packet(skb, target,
			     FATE(DIRECTION_INGRESS, VERDICT_DROP, STAGE_POLICE, reason), 0, 1);
	return TC_ACT_SHOT;
}

/* The interfaces of a netns slot share its veth; their MACs tell them apart. */
static __always_inline struct nic *neighbour_nic(struct sender *s, const struct ethhdr *ethernet)
{
	__u8 place = ethernet->h_source[5] - s->nic->guest_mac[5];

	if (!place || place >= s->nic->count || same_mac(ethernet->h_source, s->nic->veth_mac))
		return s->nic;
	s->index += place;
	return bpf_map_lookup_elem(&nics, &s->index);
}

/* Frames from behind the TAP: what goes to the sandbox must follow. */
static __always_inline void note_guest(struct sender *s)
{
	if (s->flags & NIC_PROCESS)
		__sync_fetch_and_and(&s->nic->flags, ~NIC_PROCESS);
}

/* The same for a process in the namespace, told by a packet that goes somewhere: the namespace's own
 * stack speaks on its link too, sandbox or not. */
static __always_inline void note_process(struct sender *s)
{
	if (!(s->flags & NIC_PROCESS))
		__sync_fetch_and_or(&s->nic->flags, NIC_PROCESS);
}

/* A process has the clone addresses of all its interfaces on one veth: the source tells. */
static __always_inline void find_process_nic(struct sender *s, const struct packet *p)
{
	const struct clone_value *clone = bpf_map_lookup_elem(&clones, &p->source);
	struct nic *nic;
	__u32 index;

	if (!clone || clone->nic - s->index >= s->nic->count)
		return;
	index = clone->nic;
	nic = bpf_map_lookup_elem(&nics, &index);
	if (!nic || READ_ONCE(nic->state) != NIC_ACTIVE)
		return;
	s->nic = nic;
	s->index = index;
	s->flags = READ_ONCE(nic->flags);
}

/* Finds out who sends and checks the Ethernet header. Returns a drop reason or NO_SENDER. */
static __always_inline int find_sender(struct __sk_buff *skb, struct sender *s, __u32 *ethertype)
{
	const struct ethhdr *ethernet = frame_data(skb);

	s->index = skb->tc_classid;
	s->nic = bpf_map_lookup_elem(&nics, &s->index);
	if (!s->nic || (const void *)(ethernet + 1) > frame_end(skb))
		return NO_SENDER;
	s->flags = READ_ONCE(s->nic->flags);
	if (rarely(s->flags & NIC_NETNS)) {
		s->nic = neighbour_nic(s, ethernet);
		if (!s->nic)
			return NO_SENDER;
		s->flags = READ_ONCE(s->nic->flags);
	}
	if (READ_ONCE(s->nic->state) != NIC_ACTIVE)
		return DROP_NOT_LEASED;
	*ethertype = ethernet->h_proto;
	if (has_tag(skb, *ethertype))
		return DROP_VLAN_TAG;
	if (rarely(!same_mac(ethernet->h_source, s->nic->guest_mac))) {
		if (!(s->flags & NIC_NETNS) || !same_mac(ethernet->h_source, s->nic->veth_mac))
			return DROP_SOURCE_MAC;
		s->is_process = 1;
	} else if (rarely(s->flags & NIC_NETNS)) {
		note_guest(s);
	}
	return DROP_NONE;
}

static __always_inline int send_back(const struct sender *s, __u32 bytes, int reason)
{
	if (reason) {
		count_drop(s->index, reason);
		return TC_ACT_SHOT;
	}
	count_egress(s->index, bytes, 1);
	return bpf_redirect(s->nic->ifindex, 0);
}

static __always_inline void trace_answer(struct __sk_buff *skb, const struct sender *s)
{
	if (rarely(s->flags & NIC_TRACE))
		trace_packet(skb, s->index,
			     FATE(DIRECTION_EGRESS, VERDICT_ANSWERED, STAGE_REDIRECT, DROP_NONE),
			     s->nic->ifindex, 1);
}

static __always_inline int arp_from_guest(struct __sk_buff *skb, const struct sender *s)
{
	/* The namespace's neighbours are fixed: it has nothing to ask. */
	int reason = s->is_process ? DROP_LINK_CHATTER : judge_arp(skb, s->nic);
	__u32 bytes = skb->len;

	if (reason != LINK_ANSWER)
		return refuse(skb, s->index, s->flags, reason, STAGE_ANTISPOOF);
	trace_answer(skb, s);
	return send_back(s, bytes, answer_arp(skb, s->nic));
}

static __always_inline int link_from_guest(struct __sk_buff *skb, const struct sender *s,
					   const struct packet *p)
{
	int reason = s->is_process ? DROP_LINK_CHATTER : judge_link_packet(skb, p, s->index);

	if (reason != LINK_ANSWER)
		return refuse(skb, s->index, s->flags, reason, STAGE_ANTISPOOF);
	trace_answer(skb, s);
	return send_back(s, p->bytes, answer_solicitation(skb, p, s->index));
}

static __always_inline int gateway_from_guest(struct __sk_buff *skb, const struct sender *s,
					      const struct packet *p)
{
	if (p->icmp_kind != ICMP_REQUEST || p->fragment)
		return refuse(skb, s->index, s->flags, DROP_GATEWAY_SERVICE, STAGE_POLICY);
	trace_answer(skb, s);
	return send_back(s, p->bytes, answer_echo(skb, p));
}

/* Not inlined: it is long, and seldom needed. */
static __noinline struct decision *find_decision_of_port(struct packet *p, __u32 nic,
							 __u32 generation, __u64 now, int *holds)
{
	p->any_port = 0;
	return find_decision(p, nic, generation, now, holds);
}

/* Decides anew unless the decision holds; only then its next hop is known. */
static __always_inline void renew(struct __sk_buff *skb, struct packet *p, __u32 index, int holds,
				  struct decision *d, struct course *c)
{
	c->fresh = rarely(!holds || (d->verdict == VERDICT_SANDBOX && !decided_target(d)));
	if (!c->fresh)
		return;
	begin_decision(p, index, d);
	decide(skb, p, index, c->now, d);
	if (!rarely(p->has_new_hop))
		return;
	if (d->verdict == VERDICT_UPLINK && d->flags & DECISION_PAST_RULES)
		refuse_broadcast(skb, p, index, d);
	bound_neighbours(skb, p, index, c->now, d);
}

/* Takes the decision from the cache, or decides: for all ports, or for the packet's where they have a say. */
static __always_inline void decide_course(struct __sk_buff *skb, struct packet *p, __u32 index,
					  __u32 generation, struct course *c)
{
	struct decision *d;
	int holds;

	c->verdict = VERDICT_DROP;
	c->reason = DROP_HELPER;
	ask_for_any_port(p);
	d = find_decision(p, index, generation, c->now, &holds);
	if (!d)
		return;
	renew(skb, p, index, holds, d, c);
	if (rarely(d->verdict == LEFT_TO_PORTS)) {
		d = find_decision_of_port(p, index, generation, c->now, &holds);
		if (!d)
			return;
		renew(skb, p, index, holds, d, c);
	}
	c->decision = d;
	c->verdict = d->verdict;
	c->reason = d->target;
}

/* Why the stack may not have what can't leave by an uplink as it is: it would send it elsewhere. That no hop is left it
 * may tell the sender. */
static __always_inline __u32 reason_past_stack(const struct packet *p, const struct decision *d)
{
	if (d->flags & DECISION_PAST_HOST)
		return DROP_HOST_SERVICE;
	return d->flags & DECISION_PAST_RULES && p->ttl > 1 ? DROP_NO_ROUTE : DROP_NONE;
}

/* Policy and route. */
static __always_inline void set_course(struct __sk_buff *skb, const struct sender *s,
				       struct packet *p, struct course *c)
{
	/* Before the policy and what comes of it: if they change meanwhile, nothing is kept. */
	__u32 generation = READ_ONCE(s->nic->generation);
	__u32 policy_index = READ_ONCE(s->nic->policy);

	c->policy = bpf_map_lookup_elem(&policies, &policy_index);
	if (!c->policy) {
		c->verdict = VERDICT_DROP;
		c->reason = DROP_POLICY;
		return;
	}
	c->now = bpf_ktime_get_coarse_ns();
	decide_course(skb, p, s->index, generation, c);
	/* There always is one, but Linux 6.1 forgets what that says of the verdict. */
	if (!c->decision)
		return;
	if (rarely(may_be_answer(c, s->flags))) {
		switch (find_answer(skb, p, s->index, c->now, c->verdict == VERDICT_DROP)) {
		case ANSWER_UPLINK:
			if (c->verdict == VERDICT_UPLINK)
				break;
			p->as_answer = 1;
			decide_course(skb, p, s->index, generation, c);
			break;
		case ANSWER_STACK:
			c->verdict = VERDICT_STACK;
			break;
		}
	}
	if (c->verdict == VERDICT_SANDBOX)
		c->target = decided_target(c->decision);
	if (c->verdict == VERDICT_SANDBOX && !c->target) {
		c->verdict = VERDICT_DROP;
		c->reason = DROP_NO_SUCH_SANDBOX;
	}
	/* The stack knows how to tell the sender. */
	if ((c->verdict == VERDICT_UPLINK || c->verdict == VERDICT_SANDBOX) &&
	    (p->ttl <= 1 || is_too_big(skb, p, s->nic, c->decision))) {
		if (c->verdict == VERDICT_UPLINK)
			c->reason = reason_past_stack(p, c->decision);
		if (c->verdict == VERDICT_UPLINK && c->reason) {
			c->verdict = VERDICT_DROP;
			return;
		}
		c->verdict = VERDICT_STACK;
		c->target = 0;
	}
}

static __always_inline int depart(struct __sk_buff *skb, const struct sender *s, struct packet *p,
				  const struct course *c)
{
	__u32 ifindex = c->decision->ifindex;

	if (c->target) {
		if (has_short_way(READ_ONCE(c->target->flags)))
			return bpf_redirect_peer(ifindex, 0);
		return bpf_redirect(ifindex, 0);
	}
	if (c->verdict == VERDICT_UPLINK) {
		if (rarely(c->departure))
			bpf_skb_set_tstamp(skb, c->departure, BPF_SKB_TSTAMP_DELIVERY_MONO);
		/* So the kernel keeps asking whether the neighbour is still there. */
		if (rarely(c->fresh))
			return bpf_redirect_neigh(ifindex, &p->next_hop, sizeof(p->next_hop), 0);
		return bpf_redirect(ifindex, 0);
	}
	if (c->policy->mark)
		skb->mark = c->policy->mark;
	return bpf_redirect(s->nic->shared_ifindex, BPF_F_INGRESS);
}

static __always_inline void trace_course(struct __sk_buff *skb, const struct sender *s,
					 const struct packet *p, const struct course *c)
{
	__u32 out = c->verdict == VERDICT_STACK ? s->nic->shared_ifindex : c->decision->ifindex;

	if (rarely(s->flags & NIC_TRACE))
		trace_packet(skb, s->index,
			     FATE(DIRECTION_EGRESS, c->verdict, STAGE_REDIRECT, DROP_NONE), out,
			     p->segments);
	if (rarely(c->target) && READ_ONCE(c->target->flags) & NIC_TRACE)
		trace_packet(skb, c->decision->target,
			     FATE(DIRECTION_INGRESS, VERDICT_GUEST, STAGE_REDIRECT, DROP_NONE), out,
			     p->segments);
}

static __always_inline __u32 stage_of(__u32 reason)
{
	return reason == DROP_NO_ROUTE || reason == DROP_NEIGHBOUR_LIMIT ? STAGE_ROUTE :
									    STAGE_POLICY;
}

static __always_inline int forward(struct __sk_buff *skb, const struct sender *s, struct packet *p)
{
	struct translation t = {};
	struct course c = {};
	struct hop hop = {};
	int reason;

	set_course(skb, s, p, &c);
	if (rarely(c.verdict == VERDICT_DROP || !c.decision))
		return refuse(skb, s->index, s->flags, c.reason,
			      stage_of(c.reason));
	reason = police_egress(s, p, &c);
	if (rarely(reason))
		return refuse(skb, s->index, s->flags, reason, STAGE_POLICE);
	if (rarely(c.target)) {
		reason = police_target(p, &c);
		if (reason)
			return refuse_by_target(skb, s->index, s->flags, c.decision->target,
						reason);
	}
	trace_course(skb, s, p, &c);
	translate_from_guest(&t, &hop, s, p, &c);
	if (rarely(translate(skb, p, &t, &hop)))
		return refuse(skb, s->index, s->flags, DROP_HELPER, STAGE_NAT);
	count_egress(s->index, p->bytes, p->segments);
	if (rarely(c.target))
		count_ingress(c.decision->target, p->bytes, p->segments);
	return depart(skb, s, p, &c);
}

SEC("classifier")
int from_guest(struct __sk_buff *skb)
{
	struct sender sender = {};
	struct packet packet = {};
	__u32 ethertype = 0;
	int reason, is_link;

	frame_pull(skb);
	reason = find_sender(skb, &sender, &ethertype);
	if (reason == NO_SENDER)
		return TC_ACT_SHOT;
	if (rarely(reason))
		return refuse(skb, sender.index, sender.flags, reason,
			      reason == DROP_SOURCE_MAC ? STAGE_ANTISPOOF : STAGE_PARSE);
	/* netkit leaves this to the sender's word, and the sibling's stack would follow it. */
	if (rarely(skb->protocol != ethertype))
		return refuse(skb, sender.index, sender.flags, DROP_ETHERTYPE, STAGE_PARSE);
	if (rarely(ethertype == bpf_htons(ETH_P_ARP)))
		return arp_from_guest(skb, &sender);
	reason = parse_of_family(skb, sender.nic, ethertype, &packet);
	if (rarely(reason))
		return refuse(skb, sender.index, sender.flags, reason, STAGE_PARSE);
	packet.unfinished = unfinished_end(skb);
	measure_all(skb, &packet);
	if (rarely(sender.is_process) && sender.nic->count > 1)
		find_process_nic(&sender, &packet);
	if (rarely(is_cut_badly(skb, &packet) || is_forged(&packet)))
		return refuse(skb, sender.index, sender.flags, DROP_MALFORMED, STAGE_PARSE);
	is_link = is_link_packet(&packet);
	reason = antispoof(&sender, &packet, is_link);
	if (rarely(packet.icmp_kind == ICMP_ERROR) && !reason && tells_of_others(skb, &packet))
		reason = DROP_SOURCE_ADDRESS;
	if (rarely(reason))
		return refuse(skb, sender.index, sender.flags, reason, STAGE_ANTISPOOF);
	if (rarely(is_link))
		return link_from_guest(skb, &sender, &packet);
	if (rarely(is_gateway(sender.nic, &packet)))
		return gateway_from_guest(skb, &sender, &packet);
	reason = judge_destination(&packet);
	if (rarely(reason))
		return refuse(skb, sender.index, sender.flags, reason, STAGE_POLICY);
	if (rarely(sender.is_process))
		note_process(&sender);
	return forward(skb, &sender, &packet);
}

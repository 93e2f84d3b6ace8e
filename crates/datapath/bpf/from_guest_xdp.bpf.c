/* From the guest by XDP, for host ends whose frames have complete checksums and are no super-packets
 * (NIC_XDP). It takes plain packets of flows that were decided a moment ago; every other one passes to
 * from_guest on tc, untouched and uncounted. */
#include "hook_xdp.h"
#include "maps.h"
#include "parse.h"
#include "antispoof.h"
#include "simple.h"
#include "forward.h"
#include "count.h"

char _license[] SEC("license") = "Dual MIT/GPL";

static __always_inline int find_sender(struct xdp_md *context, struct sender *s)
{
	const struct ethhdr *ethernet = frame_data(context);
	__u32 ifindex = context->ingress_ifindex, *index;

	index = bpf_map_lookup_elem(&xdp_nics, &ifindex);
	if (!index || (const void *)(ethernet + 1) > frame_end(context))
		return 0;
	s->index = *index;
	s->nic = bpf_map_lookup_elem(&nics, &s->index);
	if (!s->nic)
		return 0;
	s->flags = READ_ONCE(s->nic->flags);
	return takes_xdp(s->nic, s->flags) && same_mac(ethernet->h_source, s->nic->guest_mac);
}

static __always_inline int parse_simple(struct xdp_md *context, const struct sender *s,
					struct packet *p)
{
	const struct ethhdr *ethernet = frame_data(context);
	int reason = DROP_ETHERTYPE;

	if ((const void *)(ethernet + 1) > frame_end(context))
		return 0;
	if (ethernet->h_proto == bpf_htons(ETH_P_IP) && s->nic->guest4)
		reason = parse_ipv4(context, p);
	else if (ethernet->h_proto == bpf_htons(ETH_P_IPV6) && s->nic->has_ipv6)
		reason = parse_ipv6(context, p);
	return !reason && is_simple(p);
}

/* Whether nothing but policy has a say. */
static __always_inline int is_plain(const struct sender *s, const struct packet *p)
{
	return !is_link_packet(p) && !antispoof(s, p, 0) && p->ttl > 1;
}

/* Takes the decision from the cache. Returns zero if there is none for XDP. */
static __always_inline int recall_course(frame *f, const struct sender *s, struct packet *p,
					 struct course *c)
{
	__u32 generation = READ_ONCE(s->nic->generation);
	__u32 policy_index = READ_ONCE(s->nic->policy);
	struct decision *d;
	int holds;

	c->policy = bpf_map_lookup_elem(&policies, &policy_index);
	if (!c->policy)
		return 0;
	c->now = bpf_ktime_get_coarse_ns();
	ask_for_any_port(p);
	d = find_decision(p, s->index, generation, c->now, &holds);
	if (d && holds && d->verdict == LEFT_TO_PORTS) {
		p->any_port = 0;
		d = find_decision(p, s->index, generation, c->now, &holds);
	}
	if (!d || !holds)
		return 0;
	c->decision = d;
	c->verdict = d->verdict;
	c->reason = d->target;
	if (c->verdict == VERDICT_DROP)
		return !may_be_answer(c, s->flags);
	if (is_too_big(f, p, s->nic, d) || may_be_answer(c, s->flags))
		return 0;
	if (c->verdict == VERDICT_UPLINK)
		return (d->flags & (DECISION_XDP | DECISION_FQ)) == DECISION_XDP;
	if (c->verdict != VERDICT_SANDBOX)
		return 0;
	c->target = decided_target(d);
	return c->target && takes_xdp(c->target, READ_ONCE(c->target->flags));
}

static __always_inline int refuse(__u32 index, __u32 reason)
{
	count_drop(index, reason);
	return XDP_DROP;
}

SEC("xdp")
int from_guest_xdp(struct xdp_md *context)
{
	struct translation t = {};
	struct sender sender = {};
	struct packet packet = {};
	struct course course = {};
	struct hop hop = {};
	int reason;

	if (!find_sender(context, &sender) || !parse_simple(context, &sender, &packet))
		return XDP_PASS;
	measure(context, &packet);
	if (!is_plain(&sender, &packet) || is_gateway(sender.nic, &packet) ||
	    judge_destination(&packet))
		return XDP_PASS;
	if (!recall_course(context, &sender, &packet, &course) || !course.decision)
		return XDP_PASS;
	if (course.verdict == VERDICT_DROP)
		return refuse(sender.index, course.reason);
	reason = police_egress(&sender, &packet, &course);
	if (reason)
		return refuse(sender.index, reason);
	if (course.target) {
		reason = police_target(&packet, &course);
		if (reason)
			return refuse(course.decision->target, reason);
	}
	translate_from_guest(&t, &hop, &sender, &packet, &course);
	if (translate(context, &packet, &t, &hop))
		return refuse(sender.index, DROP_HELPER);
	count_egress(sender.index, packet.bytes, packet.segments);
	if (course.target)
		count_ingress(course.decision->target, packet.bytes, packet.segments);
	return bpf_redirect(course.decision->ifindex, 0);
}

/* Towards the guest: from uplinks (their ingress), and from the host's own stack (egress of the shared
 * interface). */
#include "hook_tc.h"
#include "maps.h"
#include "parse.h"
#include "deliver.h"
#include "unfinished.h"
#include "peer.h"
#include "count.h"
#include "trace.h"

char _license[] SEC("license") = "Dual MIT/GPL";

/* What isn't ours is left to other programs and the host (TCX_NEXT, TC_ACT_UNSPEC). */
#define PASS (-1)

__noinline int refuse(struct __sk_buff *skb, __u32 index, __u32 flags, __u32 reason, __u32 stage)
{
	count_drop(index, reason);
	if (flags & NIC_TRACE)
		trace_packet(skb, index, FATE(DIRECTION_INGRESS, VERDICT_DROP, stage, reason), 0, 1);
	return TC_ACT_SHOT;
}

static __always_inline int deliver(struct __sk_buff *skb, struct receiver *r, struct packet *p,
				   __u32 via, __u32 is_router)
{
	struct hop hop = {.is_router = is_router};
	struct translation t = {};
	int reason;

	reason = admit(r, p, via);
	if (reason)
		return refuse(skb, r->index, r->flags, reason, STAGE_POLICE);
	if (r->flags & NIC_TRACE)
		trace_packet(skb, r->index,
			     FATE(DIRECTION_INGRESS, VERDICT_GUEST, STAGE_REDIRECT, DROP_NONE),
			     r->nic->ifindex, p->segments);
	translate_to_guest(&t, &hop, r, p);
	if (translate(skb, p, &t, &hop))
		return refuse(skb, r->index, r->flags, DROP_HELPER, STAGE_NAT);
	count_ingress(r->index, p->bytes, p->segments);
	return DROP_NONE;
}

/* Whose clone address an IP packet is for, if anybody's. */
static __always_inline int find_receiver_of(struct __sk_buff *skb, struct receiver *r)
{
	struct address destination;

	frame_pull(skb);
	return !frame_has_vlan(skb) && read_destination(skb, &destination) &&
	       find_receiver(r, &destination);
}

/* A fragment of which others may not fit the guest's interface. The stack puts fragments together
 * before it cuts them anew: it gets all of a datagram or none. */
static __always_inline int is_split(struct __sk_buff *skb, const struct packet *p,
				    const struct nic *nic)
{
	__u32 mtu = 0;

	if (p->fragment == FRAGMENT_WHOLE)
		return 0;
	bpf_check_mtu(skb, 0, &mtu, 0, 0);
	return mtu > nic->mtu;
}

SEC("classifier")
int from_uplink(struct __sk_buff *skb)
{
	struct receiver receiver = {};
	struct packet packet = {};
	int result;

	/* What can't be parsed is the stack's to drop, or to put right. */
	if (skb->pkt_type != PACKET_HOST || !find_receiver_of(skb, &receiver) ||
	    parse_ip(skb, &packet))
		return PASS;
	/* The kernel gives it to the uplink's child, which judges it. */
	if (receiver.flags & NIC_CHILD)
		return PASS;
	if (READ_ONCE(receiver.nic->state) != NIC_ACTIVE)
		return refuse(skb, receiver.index, receiver.flags, DROP_NOT_LEASED, STAGE_PARSE);
	/* Sandboxes of this host don't come in by an uplink. */
	if (bpf_map_lookup_elem(&clones, &packet.source))
		return refuse(skb, receiver.index, receiver.flags, DROP_SOURCE_ADDRESS,
			      STAGE_ANTISPOOF);
	measure_arrival(skb, &packet);
	/* The stack tells the sender. */
	if (packet.ttl <= 1 ||
	    is_longer(skb, &packet, receiver.nic->mtu, receiver.nic->ifindex) ||
	    is_split(skb, &packet, receiver.nic))
		return PASS;
	result = deliver(skb, &receiver, &packet, ANSWER_UPLINK, 1);
	if (result)
		return result;
	if (has_short_way(receiver.flags))
		return bpf_redirect_peer(receiver.nic->ifindex, 0);
	return bpf_redirect(receiver.nic->ifindex, 0);
}

/* Whether somebody else of the host's says that he is a sandbox here. What these send to each other comes up by the
 * shared interface if the stack has to do with it, or by their own host end while they move between data paths. What the
 * host makes itself, such as a reset of its firewall in a sandbox's name, has come by no interface. */
static __always_inline int is_impostor(const struct __sk_buff *skb, const struct packet *p)
{
	const struct clone_value *clone;
	const struct nic *sender;
	__u32 index;

	if (!skb->ingress_ifindex || skb->ingress_ifindex == skb->ifindex)
		return 0;
	clone = bpf_map_lookup_elem(&clones, &p->source);
	if (!clone)
		return 0;
	index = clone->nic;
	sender = bpf_map_lookup_elem(&nics, &index);
	return !sender || sender->ifindex != skb->ingress_ifindex;
}

/* Nothing passes here: behind the shared interface there is nobody else. */
SEC("classifier")
int from_host(struct __sk_buff *skb)
{
	struct receiver receiver = {};
	struct packet packet = {};
	int result;

	if (!find_receiver_of(skb, &receiver))
		return TC_ACT_SHOT;
	if (READ_ONCE(receiver.nic->state) != NIC_ACTIVE)
		return refuse(skb, receiver.index, receiver.flags, DROP_NOT_LEASED, STAGE_PARSE);
	result = parse_ip(skb, &packet);
	if (rarely(result))
		return refuse(skb, receiver.index, receiver.flags, result, STAGE_PARSE);
	if (rarely(is_impostor(skb, &packet)))
		return refuse(skb, receiver.index, receiver.flags, DROP_SOURCE_ADDRESS,
			      STAGE_ANTISPOOF);
	if (receiver.flags & NIC_CHILD)
		return refuse(skb, receiver.index, receiver.flags, DROP_NO_ROUTE, STAGE_ROUTE);
	measure_arrival(skb, &packet);
	packet.from_host = !skb->ingress_ifindex;
	if (is_longer(skb, &packet, receiver.nic->mtu, receiver.nic->ifindex))
		return refuse(skb, receiver.index, receiver.flags, DROP_TOO_BIG, STAGE_ROUTE);
	result = deliver(skb, &receiver, &packet, ANSWER_STACK, 0);
	if (result)
		return result;
	return bpf_redirect(receiver.nic->ifindex, 0);
}

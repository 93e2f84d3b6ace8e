/* Towards the guest by XDP: on uplinks, for interfaces with NIC_XDP. Every packet that isn't plain
 * passes to from_uplink on tc, untouched and uncounted. */
#include "hook_xdp.h"
#include "maps.h"
#include "parse.h"
#include "deliver.h"
#include "simple.h"
#include "count.h"

char _license[] SEC("license") = "Dual MIT/GPL";

/* XDP comes before the kernel looks whose MAC it is: what the NIC lets through is ours, unless it is
 * for many. */
static __always_inline int is_unicast(const struct xdp_md *context)
{
	const struct ethhdr *ethernet = frame_data(context);

	return (const void *)(ethernet + 1) <= frame_end(context) && !(ethernet->h_dest[0] & 1);
}

static __always_inline int refuse(__u32 index, __u32 reason)
{
	count_drop(index, reason);
	return XDP_DROP;
}

SEC("xdp")
int to_guest_xdp(struct xdp_md *context)
{
	struct hop hop = {.is_router = 1};
	struct receiver receiver = {};
	struct translation t = {};
	struct packet packet = {};
	struct address destination;
	int reason;

	if (!is_unicast(context) || !read_destination(context, &destination) ||
	    !find_receiver(&receiver, &destination) || !takes_xdp(receiver.nic, receiver.flags))
		return XDP_PASS;
	if (parse_ip(context, &packet) || !is_simple(&packet))
		return XDP_PASS;
	measure(context, &packet);
	if (packet.ttl <= 1 || packet.largest > receiver.nic->mtu ||
	    bpf_map_lookup_elem(&clones, &packet.source))
		return XDP_PASS;
	reason = admit(&receiver, &packet, ANSWER_UPLINK);
	if (reason)
		return refuse(receiver.index, reason);
	translate_to_guest(&t, &hop, &receiver, &packet);
	if (translate(context, &packet, &t, &hop))
		return refuse(receiver.index, DROP_HELPER);
	count_ingress(receiver.index, packet.bytes, packet.segments);
	return bpf_redirect(receiver.nic->ifindex, 0);
}

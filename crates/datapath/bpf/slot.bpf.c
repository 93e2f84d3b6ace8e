/* Inside the namespace of a netns slot: frames go between TAP and veth past its stack.
 *
 * The numbers of its interfaces are fixed: uplink0, the inner end of the veth, is 1000, and the TAP
 * of interface k is 1001 + k. */
#include "hook_tc.h"
#include "parse.h"

char _license[] SEC("license") = "Dual MIT/GPL";

#define UPLINK_IFINDEX 1000
#define TAP_IFINDEX 1001

/* Ingress of a TAP. */
SEC("classifier")
int tap_to_host_end(struct __sk_buff *skb)
{
	(void)skb;
	return bpf_redirect_peer(UPLINK_IFINDEX, 0);
}

/* Ingress of uplink0. The class id is the last byte of the first guest's MAC, plus one. */
SEC("classifier")
int uplink_to_tap(struct __sk_buff *skb)
{
	static const __u8 veth_mac[ETH_ALEN] = {0x02, 0x73, 0x77, 0x76, 0x00, 0x01};
	const struct ethhdr *ethernet = frame_data(skb);
	__u8 place;

	if ((const void *)(ethernet + 1) > frame_end(skb))
		return TC_ACT_SHOT;
	/* For a process in the namespace. */
	if (same_mac(ethernet->h_dest, veth_mac))
		return TC_ACT_OK;
	place = ethernet->h_dest[5] - (__u8)(skb->tc_classid - 1);
	if (place >= NICS_PER_SLOT)
		return TC_ACT_SHOT;
	return bpf_redirect(TAP_IFINDEX + place, 0);
}

/* The least that a program on a TAP can do to get a packet to the uplink: two Ethernet addresses and
 * a redirect. What the data path's stages cost is measured from here.
 *
 * The filter's class id is the number of the interface to leave by.
 *
 * And less: what a packet costs that is dropped at once.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

char _license[] SEC("license") = "Dual MIT/GPL";

static const __u8 addresses[2 * ETH_ALEN] = {
	0x02, 0xbe, 0x10, 0, 0, 0x02, /* whoever is beyond */
	0x02, 0xbe, 0x10, 0, 0, 0x01, /* the host */
};

SEC("redirect")
int redirect_to_uplink(struct __sk_buff *skb)
{
	void *data = (void *)(long)skb->data;
	void *end = (void *)(long)skb->data_end;

	if (data + sizeof(struct ethhdr) > end)
		return TC_ACT_SHOT;
	__builtin_memcpy(data, addresses, sizeof(addresses));
	return bpf_redirect(skb->tc_classid, 0);
}

SEC("drop")
int drop_at_once(struct __sk_buff *skb)
{
	(void)skb;
	return TC_ACT_SHOT;
}

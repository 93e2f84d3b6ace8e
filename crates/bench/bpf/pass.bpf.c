/* On the far end of a veth, lets that veth take frames that XDP sends into it. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

char _license[] SEC("license") = "Dual MIT/GPL";

SEC("xdp")
int pass(struct xdp_md *frame)
{
	(void)frame;
	return XDP_PASS;
}

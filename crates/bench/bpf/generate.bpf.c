/* Sends each frame that it is run on by one interface: what the suite `engine` makes its load with. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

char _license[] SEC("license") = "Dual MIT/GPL";

/* Set by who loads it. */
const volatile __u32 interface = 0;

SEC("xdp")
int generate(struct xdp_md *frame)
{
	(void)frame;
	return bpf_redirect(interface, 0);
}

/* Inside a container's namespace, whose interface and the TAP beside it are joined: what comes in by one goes out by
 * the other, whatever it is. It is judged at the host end. */
#include "hook_tc.h"

char _license[] SEC("license") = "Dual MIT/GPL";

/* Ingress of each of the two. The class id is the number of the other one. */
SEC("classifier")
int cross_over(struct __sk_buff *skb)
{
	return bpf_redirect(skb->tc_classid, 0);
}

/* Puts UDP sockets among the receivers, which programs that are told of a bind may not: of all that are told of UDP sockets,
 * only those that look through them may (may_update_sockmap in kernel/bpf/verifier.c). Run by a daemon when there is something to do,
 * once for all sockets of the network namespace. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "lib/maps.h"

char _license[] SEC("license") = "Dual MIT/GPL";

/* The context, as programs of this kind are given it since Linux 5.9. */
struct bpf_iter__udp {
	void *meta;
	void *udp_sk;
};

SEC("iter/udp")
int on_udp(struct bpf_iter__udp *ctx)
{
	void *sk = ctx->udp_sk;
	struct receiver *receiver;

	if (!sk)
		return 0;
	receiver = bpf_sk_storage_get(&receiving, sk, 0, 0);
	if (!receiver)
		return 0;
	/* Its identity was removed, and the number may be another one's one day. */
	if (!bpf_map_lookup_elem(&tallies, &receiver->key.number)) {
		__sync_val_compare_and_swap(&receiver->state, RECEIVER_WAITS, RECEIVER_NONE);
		return 0;
	}
	if (__sync_val_compare_and_swap(&receiver->state, RECEIVER_WAITS,
						     RECEIVER_ENTERED) != RECEIVER_WAITS)
		return 0;
	/* Of several that share a port, one is enough; when it goes, the daemon looks again. */
	if (bpf_map_update_elem(&receivers, &receiver->key, sk, BPF_NOEXIST))
		receiver->state = RECEIVER_WAITS;
	return 0;
}

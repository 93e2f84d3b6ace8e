/* Counts what connections have done so far that are open, of identities that have TCP only: nothing counts their packets, and
 * identity.bpf.c counts a connection when it ends. Run by who wants to know, once for all sockets of the network
 * namespace. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "lib/tally.h"

#define AS_THE_KERNEL_HAS_IT __attribute__((preserve_access_index))

char _license[] SEC("license") = "Dual MIT/GPL";

struct sock_common {
	volatile unsigned char skc_state;
} AS_THE_KERNEL_HAS_IT;

struct tcp_sock {
	__u32 segs_in;
	__u32 segs_out;
	__u64 bytes_received;
	__u64 bytes_acked;
} AS_THE_KERNEL_HAS_IT;

/* The context, as programs of this kind are given it since Linux 5.9. */
struct bpf_iter__tcp {
	void *meta;
	struct sock_common *sk_common;
};

SEC("iter/tcp")
int on_tcp(struct bpf_iter__tcp *ctx)
{
	struct sock_common *common = ctx->sk_common;
	const struct socket_state *socket;
	struct tcp_traffic now = {};
	struct tcp_traffic *done;
	struct tcp_sock *tcp;

	if (!common || common->skc_state == BPF_TCP_LISTEN)
		return 0;
	/* None of those that wait for the end of their time, or for the last packet of a handshake. */
	tcp = bpf_skc_to_tcp_sock(common);
	if (!tcp)
		return 0;
	socket = bpf_sk_storage_get(&sockets, tcp, 0, 0);
	/* Others' packets are counted one by one. */
	if (!socket || !bpf_map_lookup_elem(&tcp_tallies, &socket->number))
		return 0;
	done = bpf_sk_storage_get(&counted, tcp, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!done)
		return 0;
	now.segments_out = tcp->segs_out;
	now.bytes_out = tcp->bytes_acked;
	now.segments_in = tcp->segs_in;
	now.bytes_in = tcp->bytes_received;
	take_traffic(done, &now, socket->number);
	return 0;
}

/* The life of a TCP socket, where no program sees its packets. */
#ifndef SANDWIRE_IDENTITY_FOLLOW_H
#define SANDWIRE_IDENTITY_FOLLOW_H

#include "dial.h"
#include "option.h"
#include "steer.h"
#include "tally.h"

/* No interface has this number. */
#define NOWHERE 0x7fffffff

static __always_inline int is_on_wildcard(struct bpf_sock_ops *ctx)
{
	if (ctx->family == AF_INET)
		return !ctx->local_ip4;
	return !(ctx->local_ip6[0] | ctx->local_ip6[1] | ctx->local_ip6[2] | ctx->local_ip6[3]);
}

/* Whoever listens without a bind, or after one that failed, would be at all addresses of the host. No hook is asked before,
 * so it is made deaf as soon as it listens. */
static __always_inline void deafen(struct bpf_sock_ops *ctx, struct socket_state *socket)
{
	int nowhere = NOWHERE;

	socket->flags |= SOCKET_DEAF;
	count_refusal(REFUSED_LISTENERS);
	bpf_setsockopt(ctx, SOL_SOCKET, SO_BINDTOIFINDEX, &nowhere, sizeof(nowhere));
}

/* Only a connection that somebody has looked at before its end has been counted in part. */
static __always_inline void count_ended(struct bpf_sock_ops *ctx, struct bpf_sock *sk,
					const struct socket_state *socket)
{
	struct tcp_traffic *done = bpf_sk_storage_get(&counted, sk, 0, 0);
	struct tcp_traffic now = {
		.segments_out = ctx->segs_out,
		.bytes_out = ctx->bytes_acked,
		.segments_in = ctx->segs_in,
		.bytes_in = ctx->bytes_received,
	};

	if (done)
		take_traffic(done, &now, socket->number);
	else
		take_all(&now, socket->number);
}

/* Accepted sockets are told of their states as those that they come from. */
static __always_inline void follow(struct bpf_sock_ops *ctx, struct bpf_sock *sk,
				   const struct identity *identity, struct socket_state *socket)
{
	if (ctx->op == BPF_SOCK_OPS_STATE_CB) {
		if (ctx->args[1] != BPF_TCP_CLOSE || ctx->args[0] == BPF_TCP_LISTEN ||
		    ctx->args[0] == BPF_TCP_CLOSE)
			return;
		count_ended(ctx, sk, socket);
		/* Others may have the same ports from now on, though the socket is open still. */
		end_dialer(sk, bpf_get_socket_cookie(ctx));
		return;
	}
	bpf_sock_ops_cb_flags_set(ctx, ctx->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_STATE_CB_FLAG);
	if (ctx->op == BPF_SOCK_OPS_TCP_CONNECT_CB) {
		/* A socket that connects anew begins at zero. */
		bpf_sk_storage_delete(&counted, sk);
		note_dialer(ctx, sk, identity);
	} else if (is_on_wildcard(ctx)) {
		deafen(ctx, socket);
	} else {
		add_listener(ctx, socket);
	}
}

#endif

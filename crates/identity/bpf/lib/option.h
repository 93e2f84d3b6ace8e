/* setsockopt(2): what an identity's sockets may not be told, and what is to be known of them. */
#ifndef SANDWIRE_IDENTITY_OPTION_H
#define SANDWIRE_IDENTITY_OPTION_H

#include "policy.h"

#define SOL_SOCKET 1
#define SO_BROADCAST 6
#define SO_BINDTODEVICE 25
#define SO_BINDTOIFINDEX 62
#define SOL_IPV6 41
#define IPV6_V6ONLY 26

static __always_inline int is_watched_option(const struct bpf_sockopt *ctx)
{
	if (ctx->level == SOL_IPV6)
		return ctx->optname == IPV6_V6ONLY;
	return ctx->level == SOL_SOCKET &&
	       (ctx->optname == SO_BROADCAST || ctx->optname == SO_BINDTODEVICE ||
		ctx->optname == SO_BINDTOIFINDEX);
}

/* The kernel refuses it once the socket is bound, and then it is of no consequence here. */
static __always_inline void note_v6only(struct bpf_sockopt *ctx, struct socket_state *socket)
{
	const int *value = ctx->optval;

	if ((const void *)(value + 1) > ctx->optval_end)
		return;
	if (*value)
		socket->flags |= SOCKET_V6ONLY;
	else
		socket->flags &= ~SOCKET_V6ONLY;
}

/* Of a broadcast the host's own sockets get a copy that no hook is told of. The option seems to be set, as many set it who
 * never send one; sending is refused by the kernel, as without the option. */
static __always_inline void judge_broadcast(struct bpf_sockopt *ctx, const struct identity *identity)
{
	const struct policy *policy = policy_of(identity->number);

	if (!policy || !(policy->flags & POLICY_HOST_ALL))
		ctx->optlen = -1;
}

static __always_inline int has_address(const struct bpf_sock *sk)
{
	if (sk->family == AF_INET)
		return sk->src_ip4 != 0;
	return (sk->src_ip6[0] | sk->src_ip6[1] | sk->src_ip6[2] | sk->src_ip6[3]) != 0;
}

/* Who listens without an address is bound to no interface (`deafen`), which the kernel refuses a process without CAP_NET_RAW once
 * another one is chosen (sock_bindtoindex). */
static __always_inline int may_choose_interface(const struct bpf_sockopt *ctx,
						const struct identity *identity,
						const struct socket_state *socket)
{
	if (socket->flags & SOCKET_DEAF)
		return 0;
	if (!(identity->flags & IDENTITY_TCP_ONLY))
		return 1;
	/* One that is just being bound a second time may lose the first one's address. */
	return !(socket->flags & SOCKET_UNSURE) && has_address(ctx->sk);
}

/* Whether the kernel goes on with it. */
static __always_inline int judge_option(struct bpf_sockopt *ctx, const struct identity *identity,
					struct socket_state *socket)
{
	if (ctx->level == SOL_IPV6) {
		note_v6only(ctx, socket);
		return 1;
	}
	if (ctx->optname == SO_BROADCAST) {
		judge_broadcast(ctx, identity);
		return 1;
	}
	return may_choose_interface(ctx, identity, socket) ? 1 : refuse(REFUSED_SOURCE, EPERM);
}

#endif

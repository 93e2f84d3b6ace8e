/* recvmsg(2), getsockname(2), getpeername(2), accept(2): addresses as the application knows them. */
#ifndef SANDWIRE_IDENTITY_SHOW_H
#define SANDWIRE_IDENTITY_SHOW_H

#include "bind.h"

/* Whether the peer at the identity's own address was asked for at its loopback. */
static __always_inline int is_known(struct bpf_sock_addr *ctx, const struct socket_state *socket,
				    __u32 family)
{
	return socket->flags & SOCKET_PEER_LOOPBACK ||
	       knows(socket, known_as(family, ctx->user_port));
}

static __always_inline int is_wildcard(struct bpf_sock_addr *ctx, const struct socket_state *socket)
{
	return socket->flags & SOCKET_WILDCARD && !ctx->sk->dst_port;
}

static __always_inline void show_source4(struct bpf_sock_addr *ctx, const struct identity *identity,
					 const struct socket_state *socket)
{
	__u32 ip = ctx->user_ip4;

	if (is_own_loopback4(identity, ip))
		SET(ctx->user_ip4, to_common_loopback4(ip));
	else if (ip && ip == identity->ipv4 && is_known(ctx, socket, AF_INET))
		SET(ctx->user_ip4, bpf_htonl(0x7f000001));
}

static __always_inline void show_loopback6(struct bpf_sock_addr *ctx)
{
	SET(ctx->user_ip6[0], 0);
	SET(ctx->user_ip6[1], 0);
	SET(ctx->user_ip6[2], 0);
	SET(ctx->user_ip6[3], bpf_htonl(1));
}

static __always_inline void show_source6(struct bpf_sock_addr *ctx, const struct identity *identity,
					 const struct socket_state *socket)
{
	__u32 ip[4] = {ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2], ctx->user_ip6[3]};

	if (is_mapped(ip)) {
		if (is_own_loopback4(identity, ip[3]))
			SET(ctx->user_ip6[3], to_common_loopback4(ip[3]));
		else if (ip[3] && ip[3] == identity->ipv4 && is_known(ctx, socket, AF_INET))
			SET(ctx->user_ip6[3], bpf_htonl(0x7f000001));
	} else if (is_same6(ip, identity->loopback6)) {
		show_loopback6(ctx);
	} else if (is_same6(ip, identity->ipv6) && is_known(ctx, socket, AF_INET6)) {
		show_loopback6(ctx);
	}
}

static __always_inline void show_name4(struct bpf_sock_addr *ctx, const struct identity *identity,
				       const struct socket_state *socket)
{
	__u32 ip = ctx->user_ip4;

	if (is_own_loopback4(identity, ip))
		SET(ctx->user_ip4, to_common_loopback4(ip));
	else if (ip == identity->ipv4 && is_wildcard(ctx, socket))
		SET(ctx->user_ip4, 0);
}

static __always_inline void show_name6(struct bpf_sock_addr *ctx, const struct identity *identity,
				       const struct socket_state *socket)
{
	__u32 ip[4] = {ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2], ctx->user_ip6[3]};
	__u32 any[4] = {};

	if (socket->port && !ctx->sk->dst_port)
		SET(ctx->user_port, bpf_htons(socket->port));
	if (is_wildcard(ctx, socket))
		set_user_ip6(ctx, any);
	else if (is_mapped(ip) && is_own_loopback4(identity, ip[3]))
		SET(ctx->user_ip6[3], to_common_loopback4(ip[3]));
	else if (is_same6(ip, identity->loopback6))
		show_loopback6(ctx);
}

static __always_inline void show_peer4(struct bpf_sock_addr *ctx, const struct identity *identity,
				       const struct socket_state *socket)
{
	__u32 ip = ctx->user_ip4;

	if (is_own_loopback4(identity, ip))
		SET(ctx->user_ip4, to_common_loopback4(ip));
	else if (ip == identity->ipv4 && socket->flags & SOCKET_PEER_LOOPBACK)
		SET(ctx->user_ip4, bpf_htonl(0x7f000001));
}

static __always_inline void show_peer6(struct bpf_sock_addr *ctx, const struct identity *identity,
				       const struct socket_state *socket)
{
	__u32 ip[4] = {ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2], ctx->user_ip6[3]};
	int was_loopback = socket->flags & SOCKET_PEER_LOOPBACK;

	if (is_mapped(ip)) {
		if (is_own_loopback4(identity, ip[3]))
			SET(ctx->user_ip6[3], to_common_loopback4(ip[3]));
		else if (ip[3] == identity->ipv4 && was_loopback)
			SET(ctx->user_ip6[3], bpf_htonl(0x7f000001));
	} else if (is_same6(ip, identity->loopback6)) {
		show_loopback6(ctx);
	} else if (is_same6(ip, identity->ipv6) && was_loopback) {
		show_loopback6(ctx);
	}
}

#endif

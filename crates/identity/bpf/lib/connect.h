/* connect(2): destination, and a source for sockets that have none. */
#ifndef SANDWIRE_IDENTITY_CONNECT_H
#define SANDWIRE_IDENTITY_CONNECT_H

#include "bind.h"
#include "destination.h"
#include "policy.h"

/* The address from which an unbound socket goes to an IPv4 destination; 0 if there is none. */
static __always_inline __u32 source4(const struct identity *identity, enum outcome outcome)
{
	return outcome == OUTCOME_LOOPBACK ? identity->loopback4 | bpf_htonl(1) : identity->ipv4;
}

static __always_inline void note_peer(struct socket_state *socket, enum outcome outcome)
{
	if (outcome == OUTCOME_OWN)
		socket->flags |= SOCKET_PEER_LOOPBACK;
	else
		socket->flags &= ~SOCKET_PEER_LOOPBACK;
}

static __always_inline int note_connected(struct socket_state *socket, int may)
{
	if (may)
		socket->flags |= SOCKET_CONNECTED;
	return may;
}

/* A socket that was bound before, and has no source: bind has failed, or isn't through yet. */
static __always_inline void note_sourceless(struct socket_state *socket)
{
	if (socket->flags & SOCKET_BOUND)
		socket->flags |= SOCKET_UNSURE;
}

/* From a socket that is bound to a multicast address, the kernel would connect by an address of the host. UDP may want to
 * hear one sender to the group; what it sends is stopped. One of IPv6 that is bound to an address of IPv6 may be connected by
 * one of IPv4 alone, too. */
static __always_inline int may_keep_source4(struct bpf_sock_addr *ctx, __u32 source)
{
	if (source == NO_IPV4_SOURCE)
		return refuse(REFUSED_SOURCE, ENETUNREACH);
	if (ctx->protocol == IPPROTO_TCP && is_multicast4(source))
		return refuse(REFUSED_SOURCE, EADDRNOTAVAIL);
	return 1;
}

static __always_inline int connect4(struct bpf_sock_addr *ctx, const struct identity *identity,
				    struct socket_state *socket)
{
	struct sockaddr_in source = {.sin_family = AF_INET};
	struct address address = {.words = {0, 0, MAPPED, ctx->user_ip4}};
	__u32 ip = ctx->user_ip4;
	enum outcome outcome;

	outcome = destination4(ctx, identity, &ip);
	if (outcome == OUTCOME_REFUSED)
		return 0;
	if (outcome == OUTCOME_PASS && !may_call(ctx, identity, &address))
		return 0;
	SET(ctx->user_ip4, ip);
	note_peer(socket, outcome);
	if (ctx->sk->src_ip4)
		return may_keep_source4(ctx, ctx->sk->src_ip4);
	source.sin_addr.s_addr = source4(identity, outcome);
	if (!source.sin_addr.s_addr)
		return refuse(REFUSED_CONNECT_FAMILY, ENETUNREACH);
	note_sourceless(socket);
	if (bpf_bind(ctx, (struct sockaddr *)&source, sizeof(source)))
		return refuse(REFUSED_SOURCE, EADDRNOTAVAIL);
	return 1;
}

/* The loopback that a socket is hidden at is no source. */
static __always_inline int has_source6(struct bpf_sock_addr *ctx, const struct socket_state *socket)
{
	struct bpf_sock *sk = ctx->sk;

	return !(socket->flags & SOCKET_HIDDEN) &&
	       !!(sk->src_ip6[0] | sk->src_ip6[1] | sk->src_ip6[2] | sk->src_ip6[3]);
}

/* From a socket that is bound to an address of IPv6, the kernel would call by 127.0.0.6, which is nobody's. */
static __always_inline int may_keep_mapped_source(struct bpf_sock_addr *ctx)
{
	struct bpf_sock *sk = ctx->sk;

	if (sk->src_ip6[0] | sk->src_ip6[1] || sk->src_ip6[2] != MAPPED)
		return refuse(REFUSED_SOURCE, ENETUNREACH);
	return 1;
}

/* One that is bound to an address of IPv4 has none for IPv6. */
static __always_inline int may_keep_source6(struct bpf_sock_addr *ctx)
{
	struct bpf_sock *sk = ctx->sk;

	if (!(sk->src_ip6[0] | sk->src_ip6[1]) && sk->src_ip6[2] == MAPPED)
		return refuse(REFUSED_SOURCE, ENETUNREACH);
	return 1;
}

static __always_inline int set_source6(struct bpf_sock_addr *ctx, struct socket_state *socket,
				       const __u32 *ip)
{
	struct sockaddr_in6 source = {.sin6_family = AF_INET6};

	note_sourceless(socket);
	for (int i = 0; i < 4; i++)
		source.sin6_addr.in6_u.u6_addr32[i] = ip[i];
	if (bpf_bind(ctx, (struct sockaddr *)&source, sizeof(source)))
		return refuse(REFUSED_SOURCE, EADDRNOTAVAIL);
	socket->flags &= ~SOCKET_HIDDEN;
	return 1;
}

/* An IPv6 socket that goes to an IPv4 address. */
static __always_inline int connect_mapped(struct bpf_sock_addr *ctx,
					  const struct identity *identity,
					  struct socket_state *socket)
{
	__u32 source[4] = {0, 0, MAPPED, 0};
	struct address address = {.words = {0, 0, MAPPED, ctx->user_ip6[3]}};
	__u32 ip = ctx->user_ip6[3];
	enum outcome outcome;

	outcome = destination4(ctx, identity, &ip);
	if (outcome == OUTCOME_REFUSED)
		return 0;
	if (outcome == OUTCOME_PASS && !may_call(ctx, identity, &address))
		return 0;
	SET(ctx->user_ip6[3], ip);
	note_peer(socket, outcome);
	if (has_source6(ctx, socket))
		return may_keep_mapped_source(ctx);
	source[3] = source4(identity, outcome);
	if (!source[3])
		return refuse(REFUSED_CONNECT_FAMILY, ENETUNREACH);
	return set_source6(ctx, socket, source);
}

static __always_inline int is_link_local6(const __u32 *ip)
{
	return (ip[0] & bpf_htonl(0xffc00000)) == bpf_htonl(0xfe800000);
}

static __always_inline int connect6(struct bpf_sock_addr *ctx, const struct identity *identity,
				    struct socket_state *socket)
{
	__u32 ip[4] = {ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2], ctx->user_ip6[3]};
	struct address address = {.words = {ip[0], ip[1], ip[2], ip[3]}};
	enum outcome outcome;

	if (is_mapped(ip))
		return connect_mapped(ctx, identity, socket);
	/* It chooses an interface, as an option does that such a socket may not have (may_choose_interface). */
	if (identity->flags & IDENTITY_TCP_ONLY && socket->flags & SOCKET_UNSURE && is_link_local6(ip))
		return refuse(REFUSED_SOURCE, EADDRNOTAVAIL);
	outcome = destination6(ctx, identity, ip);
	if (outcome == OUTCOME_REFUSED)
		return 0;
	if (outcome == OUTCOME_PASS && !may_call(ctx, identity, &address))
		return 0;
	if (outcome != OUTCOME_PASS)
		set_user_ip6(ctx, ip);
	note_peer(socket, outcome);
	if (has_source6(ctx, socket))
		return may_keep_source6(ctx);
	if (outcome == OUTCOME_LOOPBACK)
		return set_source6(ctx, socket, identity->loopback6);
	if (is_any6(identity->ipv6))
		return refuse(REFUSED_CONNECT_FAMILY, ENETUNREACH);
	return set_source6(ctx, socket, identity->ipv6);
}

#endif

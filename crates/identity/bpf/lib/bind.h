/* bind(2): which address a socket gets for the one that it asks for. */
#ifndef SANDWIRE_IDENTITY_BIND_H
#define SANDWIRE_IDENTITY_BIND_H

#include "owner.h"

/* A second bind that fails takes the first one's address away (__inet_bind), and who then listens is on the wildcard, where it is
 * made deaf; which the kernel refuses once an interface is chosen. */
static __always_inline int may_bind_again(const struct bpf_sock_addr *ctx,
					  const struct identity *identity)
{
	return !(identity->flags & IDENTITY_TCP_ONLY) || !ctx->sk->bound_dev_if;
}

/* Notes down a bind that may be. Nobody tells us whether the kernel is through with one before it, or with a connect: the
 * source that this one gives, that one may take away. */
static __always_inline int note_bound(const struct bpf_sock_addr *ctx,
				      const struct identity *identity,
				      struct socket_state *socket, int may)
{
	if (!may)
		return 0;
	if (!may_bind_again(ctx, identity))
		return refuse(REFUSED_SOURCE, EPERM);
	if (socket->flags & SOCKET_WILDCARD && !ctx->user_port)
		socket->flags &= ~SOCKET_SERVES;
	else
		socket->flags |= SOCKET_SERVES;
	if (socket->flags & (SOCKET_BOUND | SOCKET_CONNECTED))
		socket->flags |= SOCKET_UNSURE;
	socket->flags |= SOCKET_BOUND;
	return 1;
}

/* A socket that is bound to it has no source but what the kernel chooses. One identity of a former version may have it. */
#define LOOPBACK_BROADCAST 0x7fffffff

/* Exchanges the address; returns whether it may be. */
static __always_inline int confine4(const struct identity *identity, struct socket_state *socket,
				    __u32 *ip)
{
	if (!*ip) {
		if (!identity->ipv4)
			return refuse(REFUSED_BIND_FAMILY, EADDRNOTAVAIL);
		socket->flags |= SOCKET_WILDCARD;
		*ip = identity->ipv4;
		return 1;
	}
	if (is_common_loopback4(*ip)) {
		*ip = to_own_loopback4(identity, *ip);
		if (*ip == bpf_htonl(LOOPBACK_BROADCAST))
			return refuse(REFUSED_BIND_ADDRESS, EADDRNOTAVAIL);
		return 1;
	}
	if (is_multicast4(*ip)) {
		socket->flags |= SOCKET_UNSURE;
		return 1;
	}
	if (*ip != bpf_htonl(LOOPBACK_BROADCAST) &&
	    (is_own_loopback4(identity, *ip) || is_own4(identity, *ip)))
		return 1;
	return refuse(REFUSED_BIND_ADDRESS, EADDRNOTAVAIL);
}

static __always_inline int bind4(struct bpf_sock_addr *ctx, const struct identity *identity,
				 struct socket_state *socket)
{
	__u32 ip = ctx->user_ip4;

	socket->flags &= ~SOCKET_WILDCARD;
	if (!confine4(identity, socket, &ip))
		return 0;
	SET(ctx->user_ip4, ip);
	return 1;
}

static __always_inline void set_user_ip6(struct bpf_sock_addr *ctx, const __u32 *ip)
{
	SET(ctx->user_ip6[0], ip[0]);
	SET(ctx->user_ip6[1], ip[1]);
	SET(ctx->user_ip6[2], ip[2]);
	SET(ctx->user_ip6[3], ip[3]);
}

/* The port that the kernel knows of a socket of the identity that listens on this one for both families; 0 if none does. */
static __always_inline __u32 port_of_listener(const struct identity *identity, __u32 port)
{
	struct listener_key key = {
		.number = identity->number,
		.port = port,
		.family = AF_INET6,
	};
	struct bpf_sock *found;
	__u32 known;

	for (int i = 0; i < LISTENERS_MAX; i++) {
		key.position = i;
		found = bpf_map_lookup_elem(&listeners, &key);
		if (!found)
			continue;
		/* 0 of one that was shut down and isn't closed yet. */
		known = found->state == BPF_TCP_LISTEN ? found->src_port : 0;
		bpf_sk_release(found);
		if (known)
			return known;
	}
	return 0;
}

/* Sockets of UDP and others get one address. UDP receives at the others, too (receive.h), and one that is bound to an address
 * of IPv4 may do so at both families' (see bind6_hidden). */
static __always_inline int bind6_first(struct bpf_sock_addr *ctx, const struct identity *identity,
				       struct socket_state *socket)
{
	__u32 mapped[4] = {0, 0, MAPPED, identity->ipv4};
	int is_open = ctx->protocol == IPPROTO_UDP && !(socket->flags & SOCKET_V6ONLY);

	socket->flags |= SOCKET_WILDCARD;
	set_user_ip6(ctx, is_open ? mapped : identity->ipv6);
	return 1;
}

/* A socket bound to :: hears IPv4 too, unless it was told not to, which nobody tells us; bound to an address of IPv6 it
 * never would. So where the identity has both, the socket stays on the wildcard, with a port that the kernel chooses.
 * TCP that comes to the identity's addresses and the port that was asked for is steered to it.
 *
 * Where another socket listens on the port asked for, this one asks for the same port of the kernel's: whether they may
 * share it, by SO_REUSEPORT of both, and who gets which connection then, is for the kernel to say. */
static __always_inline int bind6_both(struct bpf_sock_addr *ctx, const struct identity *identity,
				      struct socket_state *socket)
{
	__u32 port = bpf_ntohs(ctx->user_port);

	if (!port)
		return 1;
	if (ctx->protocol != IPPROTO_TCP)
		return bind6_first(ctx, identity, socket);
	socket->port = port;
	SET(ctx->user_port, bpf_htons(port_of_listener(identity, port)));
	return 1;
}

/* The same where no program on packets keeps those for the host out: not on the wildcard, but at the own loopback, as an
 * address of IPv4, which leaves the socket open to both families (__inet6_bind in net/ipv6/af_inet6.c). One with IPV6_V6ONLY
 * can't have that, and needs nothing but the address of IPv6. */
static __always_inline int bind6_hidden(struct bpf_sock_addr *ctx, const struct identity *identity,
					struct socket_state *socket)
{
	__u32 hidden[4] = {0, 0, MAPPED, to_own_loopback4(identity, bpf_htonl(1))};
	__u32 port = bpf_ntohs(ctx->user_port);

	socket->flags |= SOCKET_WILDCARD;
	if (socket->flags & SOCKET_V6ONLY) {
		set_user_ip6(ctx, identity->ipv6);
		return 1;
	}
	socket->flags |= SOCKET_HIDDEN;
	set_user_ip6(ctx, hidden);
	if (!port)
		return 1;
	socket->port = port;
	SET(ctx->user_port, bpf_htons(port_of_listener(identity, port)));
	return 1;
}

static __always_inline int bind6_any(struct bpf_sock_addr *ctx, const struct identity *identity,
				     struct socket_state *socket)
{
	if (identity->ipv4 && !is_any6(identity->ipv6))
		return identity->flags & IDENTITY_TCP_ONLY ? bind6_hidden(ctx, identity, socket) :
							     bind6_both(ctx, identity, socket);
	socket->flags |= SOCKET_WILDCARD;
	if (!is_any6(identity->ipv6)) {
		set_user_ip6(ctx, identity->ipv6);
		return 1;
	}
	SET(ctx->user_ip6[2], MAPPED);
	SET(ctx->user_ip6[3], identity->ipv4);
	return 1;
}

static __always_inline int bind6(struct bpf_sock_addr *ctx, const struct identity *identity,
				 struct socket_state *socket)
{
	__u32 ip[4] = {ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2], ctx->user_ip6[3]};

	socket->flags &= ~(SOCKET_WILDCARD | SOCKET_HIDDEN);
	socket->port = 0;
	if (is_any6(ip))
		return bind6_any(ctx, identity, socket);
	if (is_mapped(ip)) {
		if (!confine4(identity, socket, &ip[3]))
			return 0;
		SET(ctx->user_ip6[3], ip[3]);
		return 1;
	}
	if (is_loopback6(ip)) {
		set_user_ip6(ctx, identity->loopback6);
		return 1;
	}
	if (is_multicast6(ip)) {
		socket->flags |= SOCKET_UNSURE;
		return 1;
	}
	if (is_own6(identity, ip))
		return 1;
	return refuse(REFUSED_BIND_ADDRESS, EADDRNOTAVAIL);
}

#endif

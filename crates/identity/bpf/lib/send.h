/* sendto(2) and sendmsg(2) of UDP sockets that aren't connected. */
#ifndef SANDWIRE_IDENTITY_SEND_H
#define SANDWIRE_IDENTITY_SEND_H

#include "connect.h"

/* The answer will come from the identity's own address, and is to be shown as from the loopback. */
static __always_inline void remember(struct bpf_sock_addr *ctx, struct socket_state *socket,
				     __u32 family)
{
	__u32 known = known_as(family, ctx->user_port);

	if (!knows(socket, known))
		socket->known[socket->known_next++ % KNOWN_MAX] = known;
}

/* Whether it isn't a message of a connected socket that has just a source of its own. The family doesn't say so: the kernel
 * takes a destination without one for IPv4. */
static __always_inline int has_destination(struct bpf_sock_addr *ctx)
{
	return ctx->user_port != 0;
}

static __always_inline int send4(struct bpf_sock_addr *ctx, const struct identity *identity,
				 struct socket_state *socket)
{
	struct address address = {.words = {0, 0, MAPPED, ctx->user_ip4}};
	__u32 source = ctx->msg_src_ip4, ip = ctx->user_ip4;
	enum outcome outcome = OUTCOME_PASS;

	if (has_destination(ctx)) {
		outcome = destination4(ctx, identity, &ip);
		if (outcome == OUTCOME_REFUSED)
			return 0;
		if (outcome == OUTCOME_PASS && !may_call(ctx, identity, &address))
			return 0;
		SET(ctx->user_ip4, ip);
		if (outcome == OUTCOME_OWN)
			remember(ctx, socket, AF_INET);
	}
	if (!source || (source == NO_IPV4_SOURCE && ctx->family == AF_INET6)) {
		source = source4(identity, outcome);
		if (!source)
			return refuse(REFUSED_CONNECT_FAMILY, ENETUNREACH);
		SET(ctx->msg_src_ip4, source);
		return 1;
	}
	if (is_common_loopback4(source)) {
		SET(ctx->msg_src_ip4, to_own_loopback4(identity, source));
		return 1;
	}
	if (is_own_loopback4(identity, source) || is_own4(identity, source))
		return 1;
	return refuse(REFUSED_SOURCE, EADDRNOTAVAIL);
}

static __always_inline void set_message_source6(struct bpf_sock_addr *ctx, const __u32 *ip)
{
	SET(ctx->msg_src_ip6[0], ip[0]);
	SET(ctx->msg_src_ip6[1], ip[1]);
	SET(ctx->msg_src_ip6[2], ip[2]);
	SET(ctx->msg_src_ip6[3], ip[3]);
}

static __always_inline int send6(struct bpf_sock_addr *ctx, const struct identity *identity,
				 struct socket_state *socket)
{
	__u32 source[4] = {ctx->msg_src_ip6[0], ctx->msg_src_ip6[1], ctx->msg_src_ip6[2],
			   ctx->msg_src_ip6[3]};
	__u32 ip[4] = {ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2], ctx->user_ip6[3]};
	enum outcome outcome = OUTCOME_PASS;

	if (has_destination(ctx)) {
		outcome = destination6(ctx, identity, ip);
		if (outcome == OUTCOME_REFUSED)
			return 0;
		if (outcome != OUTCOME_PASS)
			set_user_ip6(ctx, ip);
		if (outcome == OUTCOME_OWN)
			remember(ctx, socket, AF_INET6);
	}
	if (is_any6(source)) {
		if (outcome == OUTCOME_LOOPBACK) {
			set_message_source6(ctx, identity->loopback6);
			return 1;
		}
		if (is_any6(identity->ipv6))
			return refuse(REFUSED_CONNECT_FAMILY, ENETUNREACH);
		set_message_source6(ctx, identity->ipv6);
		return 1;
	}
	if (is_loopback6(source)) {
		set_message_source6(ctx, identity->loopback6);
		return 1;
	}
	if (is_own6(identity, source))
		return 1;
	return refuse(REFUSED_SOURCE, EADDRNOTAVAIL);
}

#endif

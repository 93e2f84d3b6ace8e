/* sendto(2) and sendmsg(2) of UDP sockets that aren't connected. */
#ifndef SANDWIRE_IDENTITY_SEND_H
#define SANDWIRE_IDENTITY_SEND_H

#include "asked.h"
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

/* Whether it may be an answer that is to leave from where the question went. A source that the message has is not looked at,
 * unless it is another one than the kernel would take. */
static __always_inline int may_be_answer(const struct identity *identity,
					 const struct socket_state *socket, enum outcome outcome)
{
	return identity->flags & IDENTITY_SEVERAL && socket->flags & SOCKET_WILDCARD &&
	       outcome == OUTCOME_PASS;
}

/* The port as it is in packets. */
static __always_inline __u16 peer_port(struct bpf_sock_addr *ctx)
{
	return (__u16)ctx->user_port;
}

static __always_inline __u32 answer_source4(struct bpf_sock_addr *ctx, const struct identity *identity)
{
	__u32 caller[4] = {0, 0, MAPPED, ctx->user_ip4};
	const __u32 *address = asked_at(ctx->sk, caller, peer_port(ctx));

	return address && is_mapped(address) ? address[3] : identity->ipv4;
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
	if (source == identity->ipv4 && has_destination(ctx) &&
	    may_be_answer(identity, socket, outcome)) {
		SET(ctx->msg_src_ip4, answer_source4(ctx, identity));
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

/* What a socket is bound to that answers at all addresses. */
static __always_inline int is_source_of_all(const struct identity *identity,
					    const struct socket_state *socket, const __u32 *source)
{
	return socket->flags & SOCKET_WILDCARD && (is_mapped(source) ? source[3] == identity->ipv4 :
								     is_same6(source, identity->ipv6));
}

/* The source of a message that names none. */
static __always_inline int choose_source6(struct bpf_sock_addr *ctx, const struct identity *identity,
					  const struct socket_state *socket, enum outcome outcome)
{
	__u32 caller[4] = {ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2], ctx->user_ip6[3]};
	const __u32 *address = 0;

	if (outcome == OUTCOME_LOOPBACK) {
		set_message_source6(ctx, identity->loopback6);
		return 1;
	}
	if (is_any6(identity->ipv6))
		return refuse(REFUSED_CONNECT_FAMILY, ENETUNREACH);
	if (has_destination(ctx) && may_be_answer(identity, socket, outcome))
		address = asked_at(ctx->sk, caller, peer_port(ctx));
	set_message_source6(ctx, address && !is_mapped(address) ? address : identity->ipv6);
	return 1;
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
	if (is_any6(source) || is_source_of_all(identity, socket, source))
		return choose_source6(ctx, identity, socket, outcome);
	if (is_loopback6(source)) {
		set_message_source6(ctx, identity->loopback6);
		return 1;
	}
	if (is_own6(identity, source))
		return 1;
	return refuse(REFUSED_SOURCE, EADDRNOTAVAIL);
}

#endif

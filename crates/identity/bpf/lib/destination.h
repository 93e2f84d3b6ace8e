/* connect(2) and sendto(2): where a destination on the loopback really leads. */
#ifndef SANDWIRE_IDENTITY_DESTINATION_H
#define SANDWIRE_IDENTITY_DESTINATION_H

#include "owner.h"

/* What a destination became. */
enum outcome {
	OUTCOME_REFUSED,
	OUTCOME_PASS,
	/* One of the identity's loopback. */
	OUTCOME_LOOPBACK,
	/* The identity's own address in place of its loopback. */
	OUTCOME_OWN,
};

enum holder {
	HOLDER_NOBODY,
	/* A socket of the identity. */
	HOLDER_OWN,
	/* Somebody who is bound to the wildcard. */
	HOLDER_OTHER,
};

/* Lets go of the socket. */
static __always_inline enum holder holder_of(const struct identity *identity, struct bpf_sock *found)
{
	const struct socket_state *socket;
	enum holder holder = HOLDER_OTHER;

	if (!found)
		return HOLDER_NOBODY;
	socket = bpf_sk_storage_get(&sockets, found, 0, 0);
	if (socket && socket->number == identity->number)
		holder = HOLDER_OWN;
	bpf_sk_release(found);
	return holder;
}

static __always_inline enum holder udp_holder4(struct bpf_sock_addr *ctx,
					       const struct identity *identity, __u32 ip)
{
	struct bpf_sock_tuple tuple = {};

	tuple.ipv4.saddr = ip;
	tuple.ipv4.daddr = ip;
	tuple.ipv4.dport = ctx->user_port;
	return holder_of(identity, bpf_sk_lookup_udp(ctx, &tuple, sizeof(tuple.ipv4),
						     BPF_F_CURRENT_NETNS, 0));
}

static __always_inline enum holder udp_holder6(struct bpf_sock_addr *ctx,
					       const struct identity *identity, const __u32 *ip)
{
	struct bpf_sock_tuple tuple = {};

	for (int i = 0; i < 4; i++) {
		tuple.ipv6.saddr[i] = ip[i];
		tuple.ipv6.daddr[i] = ip[i];
	}
	tuple.ipv6.dport = ctx->user_port;
	return holder_of(identity, bpf_sk_lookup_udp(ctx, &tuple, sizeof(tuple.ipv6),
						     BPF_F_CURRENT_NETNS, 0));
}

/* A UDP server on the wildcard has the identity's address and not its loopback: whoever asks for it there is led to
 * it. TCP needs none of this, connections are steered as they come. */
static __always_inline enum outcome choose_udp4(struct bpf_sock_addr *ctx,
						const struct identity *identity, __u32 *ip)
{
	enum holder holder = udp_holder4(ctx, identity, *ip);

	if (holder == HOLDER_OWN)
		return OUTCOME_LOOPBACK;
	if (identity->ipv4 && udp_holder4(ctx, identity, identity->ipv4) == HOLDER_OWN) {
		*ip = identity->ipv4;
		return OUTCOME_OWN;
	}
	if (holder == HOLDER_NOBODY)
		return OUTCOME_LOOPBACK;
	refuse(REFUSED_CONNECT_LOOPBACK, ECONNREFUSED);
	return OUTCOME_REFUSED;
}

static __always_inline enum outcome choose_udp6(struct bpf_sock_addr *ctx,
						const struct identity *identity)
{
	enum holder holder = udp_holder6(ctx, identity, identity->loopback6);

	if (holder == HOLDER_OWN)
		return OUTCOME_LOOPBACK;
	if (!is_any6(identity->ipv6) && udp_holder6(ctx, identity, identity->ipv6) == HOLDER_OWN)
		return OUTCOME_OWN;
	if (holder == HOLDER_NOBODY)
		return OUTCOME_LOOPBACK;
	refuse(REFUSED_CONNECT_LOOPBACK, ECONNREFUSED);
	return OUTCOME_REFUSED;
}

/* Exchanges the destination. The wildcard as a destination means the loopback. */
static __always_inline enum outcome destination4(struct bpf_sock_addr *ctx,
						 const struct identity *identity, __u32 *ip)
{
	if (!*ip)
		*ip = bpf_htonl(0x7f000001);
	if (!is_loopback4(*ip))
		return OUTCOME_PASS;
	if (is_common_loopback4(*ip))
		*ip = to_own_loopback4(identity, *ip);
	else if (!is_own_loopback4(identity, *ip)) {
		refuse(REFUSED_CONNECT_LOOPBACK, ECONNREFUSED);
		return OUTCOME_REFUSED;
	}
	return ctx->protocol == IPPROTO_TCP ? OUTCOME_LOOPBACK : choose_udp4(ctx, identity, ip);
}

static __always_inline int is_somebodys_loopback6(const __u32 *ip)
{
	struct address address = {.words = {ip[0], ip[1], ip[2], ip[3]}};
	const struct owner *owner = bpf_map_lookup_elem(&addresses, &address);

	return owner && owner->flags & OWNER_LOOPBACK;
}

static __always_inline enum outcome destination6(struct bpf_sock_addr *ctx,
						 const struct identity *identity, __u32 *ip)
{
	enum outcome outcome = OUTCOME_LOOPBACK;

	if (!is_any6(ip) && !is_loopback6(ip) && !is_same6(ip, identity->loopback6)) {
		if (!is_somebodys_loopback6(ip))
			return OUTCOME_PASS;
		refuse(REFUSED_CONNECT_LOOPBACK, ECONNREFUSED);
		return OUTCOME_REFUSED;
	}
	if (ctx->protocol != IPPROTO_TCP)
		outcome = choose_udp6(ctx, identity);
	for (int i = 0; i < 4; i++)
		ip[i] = outcome == OUTCOME_OWN ? identity->ipv6[i] : identity->loopback6[i];
	return outcome;
}

#endif

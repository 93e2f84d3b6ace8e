/* TCP connections that come to any address of an identity find the socket that listens for all of them. */
#ifndef SANDWIRE_IDENTITY_STEER_H
#define SANDWIRE_IDENTITY_STEER_H

#include "dial.h"
#include "policy.h"

/* Whether it may listen: one identity can't have all the room there is. */
static __always_inline int take_place(struct socket_state *socket, __u64 cookie)
{
	struct tally *tally = bpf_map_lookup_elem(&tallies, &socket->number);

	if (!tally)
		return 0;
	if (__sync_fetch_and_add(&tally->listeners, 1) >= LISTENERS_OF_ONE_MAX) {
		__sync_fetch_and_sub(&tally->listeners, 1);
		return 0;
	}
	socket->listener = cookie;
	return 1;
}

/* At the end of any socket. */
static __always_inline void give_place(struct socket_state *socket, __u64 cookie)
{
	struct tally *tally;

	if (!socket->listener || socket->listener != cookie)
		return;
	socket->listener = 0;
	tally = bpf_map_lookup_elem(&tallies, &socket->number);
	if (tally)
		__sync_fetch_and_sub(&tally->listeners, 1);
}

/* Notes down a socket that has begun to listen. */
static __always_inline void add_listener(struct bpf_sock_ops *ctx, struct socket_state *socket)
{
	__u64 cookie = bpf_get_socket_cookie(ctx);
	struct listener_key key = {
		.number = socket->number,
		.port = socket->port ? socket->port : ctx->local_port,
		.family = ctx->family,
	};

	if (ctx->family == AF_INET) {
		key.address.words[2] = ctx->local_ip4 ? MAPPED : 0;
		key.address.words[3] = ctx->local_ip4;
	} else {
		key.address.words[0] = ctx->local_ip6[0];
		key.address.words[1] = ctx->local_ip6[1];
		key.address.words[2] = ctx->local_ip6[2];
		key.address.words[3] = ctx->local_ip6[3];
	}
	if (socket->flags & SOCKET_WILDCARD)
		__builtin_memset(&key.address, 0, sizeof(key.address));
	/* It listens again: what has been entered stays until it is closed. At another port it would be one entry more, and one
	 * socket could fill the map. */
	if (socket->listener == cookie) {
		if (socket->listens_at != key.port)
			count_refusal(REFUSED_LISTENERS);
		return;
	}
	if (!take_place(socket, cookie)) {
		count_refusal(REFUSED_LISTENERS);
		return;
	}
	socket->listens_at = key.port;
	for (int i = 0; i < LISTENERS_MAX; i++) {
		key.position = i;
		if (!bpf_sock_hash_update(ctx, &listeners, &key, BPF_NOEXIST))
			return;
	}
	key.position = bpf_get_prandom_u32() % LISTENERS_MAX;
	if (bpf_sock_hash_update(ctx, &listeners, &key, BPF_ANY))
		count_refusal(REFUSED_LISTENERS);
}

/* Gives the connection to a listener; of several with SO_REUSEPORT the kernel chooses one. */
static __always_inline int assign(struct bpf_sk_lookup *ctx, struct listener_key *key)
{
	struct bpf_sock *found;
	long error;

	for (int i = 0; i < LISTENERS_MAX; i++) {
		key->position = i;
		found = bpf_map_lookup_elem(&listeners, key);
		if (!found)
			continue;
		/* One that was shut down stays until it is closed, and would swallow the connection; an IPv6 socket may be closed
		 * to IPv4. */
		error = found->state != BPF_TCP_LISTEN || bpf_sk_assign(ctx, found, 0);
		bpf_sk_release(found);
		if (!error)
			return 1;
	}
	return 0;
}

/* Whether netfilter asks whom to give a connection that leads elsewhere: the relay listens at the host's own loopback,
 * which nobody of an identity can call. Where the connection leads, connect has judged. */
static __always_inline int is_for_relay(struct bpf_sk_lookup *ctx, const struct owner *caller)
{
	__u32 ip[4];

	if (caller->flags & OWNER_LOOPBACK)
		return 0;
	if (ctx->family == AF_INET)
		return is_common_loopback4(ctx->local_ip4);
	ip[0] = ctx->local_ip6[0];
	ip[1] = ctx->local_ip6[1];
	ip[2] = ctx->local_ip6[2];
	ip[3] = ctx->local_ip6[3];
	return is_loopback6(ip);
}

/* A connection that leads to a service of the host: who makes it may be an identity. */
static __always_inline int may_reach_host(struct bpf_sk_lookup *ctx)
{
	struct address address = {};
	const struct policy *policy;
	const struct owner *owner;
	struct tally *tally;

	set_remote(ctx, &address);
	if (ctx->family == AF_INET && is_loopback4(address.words[3]))
		address.words[3] = network24(address.words[3]);
	owner = bpf_map_lookup_elem(&addresses, &address);
	if (!owner || is_for_relay(ctx, owner))
		return SK_PASS;
	policy = policy_of(owner->number);
	if (policy && serves(policy, IPPROTO_TCP, ctx->local_port, 0))
		return SK_PASS;
	tally = bpf_map_lookup_elem(&tallies, &owner->number);
	if (tally)
		__sync_fetch_and_add(&tally->host_service, 1);
	return SK_DROP;
}

/* Asks for a socket on the address, then for one on the wildcard; `give` says whether there is one that takes what comes. A
 * socket of IPv6 may be bound to an IPv4 address, and takes IPv4 on the wildcard. */
static __always_inline int give_in_order(struct bpf_sk_lookup *ctx, const struct address *address,
					 const struct owner *owner,
					 int (*give)(struct bpf_sk_lookup *, struct listener_key *))
{
	struct listener_key key = {
		.address = *address,
		.number = owner->number,
		.port = ctx->local_port,
		.family = ctx->family,
	};

	if (give(ctx, &key))
		return 1;
	if (ctx->family == AF_INET) {
		key.family = AF_INET6;
		if (give(ctx, &key))
			return 1;
		key.family = AF_INET;
	}
	__builtin_memset(&key.address, 0, sizeof(key.address));
	if (give(ctx, &key))
		return 1;
	if (ctx->family != AF_INET)
		return 0;
	key.family = AF_INET6;
	return give(ctx, &key);
}

static __always_inline int steer(struct bpf_sk_lookup *ctx, const struct address *address,
				 const struct owner *owner)
{
	if (!may_dial(ctx, address, owner))
		return SK_DROP;
	if (give_in_order(ctx, address, owner, assign))
		return SK_PASS;
	return owner->flags & OWNER_ALLOW_HOST ? may_reach_host(ctx) : SK_DROP;
}

#endif

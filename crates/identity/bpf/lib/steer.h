/* TCP connections that come to any address of an identity find the socket that listens for all of them. */
#ifndef SANDWIRE_IDENTITY_STEER_H
#define SANDWIRE_IDENTITY_STEER_H

#include "owner.h"

/* Notes down a socket that has begun to listen. */
static __always_inline void add_listener(struct bpf_sock_ops *ctx, const struct socket_state *socket)
{
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
	for (int i = 0; i < LISTENERS_MAX; i++) {
		key.position = i;
		if (!bpf_sock_hash_update(ctx, &listeners, &key, BPF_NOEXIST))
			return;
	}
	key.position = bpf_get_prandom_u32() % LISTENERS_MAX;
	bpf_sock_hash_update(ctx, &listeners, &key, BPF_ANY);
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
		/* An IPv6 socket may be closed to IPv4. */
		error = bpf_sk_assign(ctx, found, 0);
		bpf_sk_release(found);
		if (!error)
			return 1;
	}
	return 0;
}

static __always_inline int steer(struct bpf_sk_lookup *ctx, const struct address *address,
				 const struct owner *owner)
{
	struct listener_key key = {
		.address = *address,
		.number = owner->number,
		.port = ctx->local_port,
		.family = ctx->family,
	};

	if (assign(ctx, &key))
		return SK_PASS;
	if (ctx->family == AF_INET) {
		/* A socket of IPv6 that is bound to an IPv4 address. */
		key.family = AF_INET6;
		if (assign(ctx, &key))
			return SK_PASS;
		key.family = AF_INET;
	}
	__builtin_memset(&key.address, 0, sizeof(key.address));
	if (assign(ctx, &key))
		return SK_PASS;
	if (ctx->family == AF_INET) {
		key.family = AF_INET6;
		if (assign(ctx, &key))
			return SK_PASS;
	}
	return owner->flags & OWNER_ALLOW_HOST ? SK_PASS : SK_DROP;
}

#endif

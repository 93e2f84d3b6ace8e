/* Connections to the own loopback of an identity that has TCP only. Their source doesn't say who makes them: anybody on the
 * host may bind to any loopback address. With programs on packets, one of those looks for the sending socket; here, whoever
 * connects notes down what the connection will be, before its first packet leaves. */
#ifndef SANDWIRE_IDENTITY_DIAL_H
#define SANDWIRE_IDENTITY_DIAL_H

#include "owner.h"

/* Whether it goes to the own loopback, which is noted in the key then. */
static __always_inline int dials_own_loopback(struct bpf_sock_ops *ctx,
					      const struct identity *identity,
					      struct dialer_key *key)
{
	__u32 *source = key->source.words, *destination = key->destination.words;
	__u32 ip;

	key->source_port = ctx->local_port;
	key->destination_port = bpf_ntohl(ctx->remote_port);
	if (ctx->family == AF_INET6) {
		destination[0] = ctx->remote_ip6[0];
		destination[1] = ctx->remote_ip6[1];
		destination[2] = ctx->remote_ip6[2];
		destination[3] = ctx->remote_ip6[3];
	} else {
		destination[2] = MAPPED;
		ip = ctx->remote_ip4;
		LOADED(ip);
		destination[3] = ip;
	}
	if (is_mapped(destination)) {
		ip = ctx->local_ip4;
		LOADED(ip);
		source[2] = MAPPED;
		source[3] = ip;
		return is_own_loopback4(identity, destination[3]);
	}
	source[0] = ctx->local_ip6[0];
	source[1] = ctx->local_ip6[1];
	source[2] = ctx->local_ip6[2];
	source[3] = ctx->local_ip6[3];
	return is_same6(destination, identity->loopback6);
}

static __always_inline void forget_dialer(const struct dialer_key *noted, __u64 cookie)
{
	const struct dialer *dialer = bpf_map_lookup_elem(&dialers, noted);
	struct tcp_tally *tally;
	__u32 number;

	if (!dialer || dialer->cookie != cookie)
		return;
	number = dialer->number;
	if (bpf_map_delete_elem(&dialers, noted))
		return;
	tally = bpf_map_lookup_elem(&tcp_tallies, &number);
	if (tally)
		__sync_fetch_and_sub(&tally->dialers, 1);
}

/* At the end of any connection and of any socket. */
static __always_inline void end_dialer(struct bpf_sock *sk, __u64 cookie)
{
	const struct dialer_key *noted = bpf_sk_storage_get(&dialed, sk, 0, 0);

	if (noted)
		forget_dialer(noted, cookie);
}

/* Returns whether there is room. */
static __always_inline int add_dialer(struct tcp_tally *tally, const struct dialer_key *key,
				      const struct dialer *dialer)
{
	if (__sync_fetch_and_add(&tally->dialers, 1) < DIALERS_OF_ONE_MAX &&
	    !bpf_map_update_elem(&dialers, key, dialer, BPF_NOEXIST))
		return 1;
	__sync_fetch_and_sub(&tally->dialers, 1);
	/* That of a socket which has lost the same connection, and was told of it by nobody: other people's programs may have
	 * taken that away. */
	return !bpf_map_update_elem(&dialers, key, dialer, BPF_EXIST);
}

/* One that finds no room is refused as it comes, as those of others are. */
static __always_inline void note_dialer(struct bpf_sock_ops *ctx, struct bpf_sock *sk,
					const struct identity *identity)
{
	struct dialer dialer = {
		.cookie = bpf_get_socket_cookie(ctx),
		.number = identity->number,
	};
	struct dialer_key key = {};
	struct tcp_tally *tally;
	struct dialer_key *noted;

	if (!dials_own_loopback(ctx, identity, &key))
		return;
	tally = bpf_map_lookup_elem(&tcp_tallies, &dialer.number);
	noted = bpf_sk_storage_get(&dialed, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!tally || !noted)
		return;
	forget_dialer(noted, dialer.cookie);
	if (add_dialer(tally, &key, &dialer))
		*noted = key;
}

static __always_inline int is_noted(struct bpf_sk_lookup *ctx, const struct address *destination,
				    const struct owner *owner)
{
	struct dialer_key key = {
		.destination = *destination,
		.source_port = bpf_ntohs(ctx->remote_port),
		.destination_port = ctx->local_port,
	};
	const struct dialer *dialer;

	set_remote(ctx, &key.source);
	dialer = bpf_map_lookup_elem(&dialers, &key);
	return dialer && dialer->number == owner->number;
}

/* Whether a connection to an identity's loopback may be, where no program on its packets decides that. From the wire, the
 * kernel takes in what is for any address of the host. */
static __always_inline int may_dial(struct bpf_sk_lookup *ctx, const struct address *destination,
				    const struct owner *owner)
{
	struct tcp_tally *tally;

	if (!(owner->flags & OWNER_LOOPBACK) || !(owner->flags & OWNER_TCP_ONLY))
		return 1;
	if (ctx->ingress_ifindex == LOOPBACK_INTERFACE &&
	    (owner->flags & OWNER_ALLOW_LOOPBACK || is_noted(ctx, destination, owner)))
		return 1;
	tally = bpf_map_lookup_elem(&tcp_tallies, &owner->number);
	if (tally)
		__sync_fetch_and_add(&tally->ingress_loopback, 1);
	return 0;
}

#endif

/* An identity without a namespace: the sockets of one cgroup, and of the cgroups below it, have addresses of their
 * own in the host's network namespace.
 *
 *   sock_create               notes down whose the socket is, and refuses what can't be confined
 *   bind                      wildcard -> own address, 127.0.0.1 -> own loopback; refuses what isn't its own
 *   post_bind                 notes down UDP sockets that are to receive at several addresses
 *   connect, sendmsg          own source; 127.0.0.1 -> own loopback; answers leave from where the question went
 *   recvmsg, getsockname,     own loopback -> 127.0.0.1
 *   getpeername
 *   setsockopt                no broadcasts
 *   sock_ops, sk_lookup       a TCP socket on the wildcard hears every own address; a UDP socket, too, once receivers.bpf.c
 *                             has put it among the receivers
 *   sock_release              gives back a listener's place
 *   ingress, egress           counts; stops what comes to or from other addresses
 *
 * Where there is TCP only, nothing runs per packet: instead of the last two, sock_ops and sk_lookup keep others from the
 * loopback, nothing is bound to the wildcard, and connections are counted when they end.
 *
 * Policy is judged for TCP by connect, and by sk_lookup where a connection leads to a service of the host; for everything
 * else by egress.
 *
 * A socket belongs to the cgroup that its maker was in, for ever. Those made before the identity was added are left
 * alone, and so are those in other network namespaces. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "lib/bind.h"
#include "lib/connect.h"
#include "lib/follow.h"
#include "lib/guard.h"
#include "lib/option.h"
#include "lib/receive.h"
#include "lib/send.h"
#include "lib/show.h"
#include "lib/steer.h"

#define IPPROTO_SMC_NUMBER 256
#define IPPROTO_MPTCP_NUMBER 262

char _license[] SEC("license") = "Dual MIT/GPL";

/* A hook of a socket that is told an address: `work` is done for sockets of the identity. */
#define ADDRESS_HOOK(section, name, work)                                                          \
	SEC(section)                                                                               \
	int name(struct bpf_sock_addr *ctx)                                                        \
	{                                                                                          \
		struct identity *identity = active_identity();                                     \
		struct socket_state *socket;                                                       \
												   \
		if (!identity)                                                                     \
			return 1;                                                                  \
		socket = bpf_sk_storage_get(&sockets, ctx->sk, 0, 0);                              \
		if (!socket || socket->number != identity->number)                                 \
			return 1;                                                                  \
		work;                                                                              \
	}

ADDRESS_HOOK("cgroup/bind4", on_bind4, return note_bound(ctx, identity, socket, bind4(ctx, identity, socket)))
ADDRESS_HOOK("cgroup/bind6", on_bind6, return note_bound(ctx, identity, socket, bind6(ctx, identity, socket)))
ADDRESS_HOOK("cgroup/connect4", on_connect4,
	     return note_connected(socket, connect4(ctx, identity, socket)))
ADDRESS_HOOK("cgroup/connect6", on_connect6,
	     return note_connected(socket, connect6(ctx, identity, socket)))
ADDRESS_HOOK("cgroup/sendmsg4", on_sendmsg4, return send4(ctx, identity, socket))
ADDRESS_HOOK("cgroup/sendmsg6", on_sendmsg6, return send6(ctx, identity, socket))
ADDRESS_HOOK("cgroup/recvmsg4", on_recvmsg4, show_source4(ctx, identity, socket); return 1)
ADDRESS_HOOK("cgroup/recvmsg6", on_recvmsg6, show_source6(ctx, identity, socket); return 1)
ADDRESS_HOOK("cgroup/getsockname4", on_getsockname4, show_name4(ctx, identity, socket); return 1)
ADDRESS_HOOK("cgroup/getsockname6", on_getsockname6, show_name6(ctx, identity, socket); return 1)
ADDRESS_HOOK("cgroup/getpeername4", on_getpeername4, show_peer4(ctx, identity, socket); return 1)
ADDRESS_HOOK("cgroup/getpeername6", on_getpeername6, show_peer6(ctx, identity, socket); return 1)

/* 0, or the error of socket(2). */
static __always_inline int forbidden(const struct identity *identity, __u32 type, __u32 protocol)
{
	if (type == SOCK_STREAM && protocol == IPPROTO_TCP)
		return 0;
	if (type == SOCK_DGRAM && protocol == IPPROTO_UDP)
		return identity->flags & IDENTITY_TCP_ONLY ? EPROTONOSUPPORT : 0;
	/* Their connections are made by sockets of the kernel's own, which no hook is told of. */
	if (protocol == IPPROTO_MPTCP_NUMBER || protocol == IPPROTO_SMC_NUMBER)
		return EPROTONOSUPPORT;
	/* What it accepts is made past this hook, and no copy of what is known of the listener (sctp_v4_create_accept_sk): nobody
	 * would know whose it is. */
	if (protocol == IPPROTO_SCTP)
		return EPROTONOSUPPORT;
	if (identity->flags & IDENTITY_ALLOW_OTHER)
		return 0;
	if (type == SOCK_RAW)
		return EPERM;
	if (protocol == IPPROTO_ICMP || protocol == IPPROTO_ICMPV6)
		return EACCES;
	return EPROTONOSUPPORT;
}

SEC("cgroup/sock_create")
int on_sock_create(struct bpf_sock *ctx)
{
	struct identity *identity = active_identity();
	struct socket_state *socket;
	int error;

	if (!identity || bpf_get_netns_cookie(ctx) != identity->netns)
		return 1;
	error = forbidden(identity, ctx->type, ctx->protocol);
	if (error)
		return refuse(REFUSED_PROTOCOL, error);
	socket = bpf_sk_storage_get(&sockets, ctx, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!socket) {
		bpf_set_retval(-ENOMEM);
		return 0;
	}
	socket->number = identity->number;
	if (identity->flags & IDENTITY_V6ONLY)
		socket->flags |= SOCKET_V6ONLY;
	return 1;
}

SEC("sockops")
int on_sock_ops(struct bpf_sock_ops *ctx)
{
	const struct identity *identity;
	struct socket_state *socket;
	struct bpf_sock *sk;

	if (ctx->op != BPF_SOCK_OPS_TCP_LISTEN_CB && ctx->op != BPF_SOCK_OPS_TCP_CONNECT_CB &&
	    ctx->op != BPF_SOCK_OPS_STATE_CB)
		return 1;
	identity = active_identity();
	sk = ctx->sk;
	if (!identity || !sk)
		return 1;
	socket = bpf_sk_storage_get(&sockets, sk, 0, 0);
	if (!socket || socket->number != identity->number)
		return 1;
	if (identity->flags & IDENTITY_TCP_ONLY)
		follow(ctx, sk, identity, socket);
	else if (ctx->op == BPF_SOCK_OPS_TCP_LISTEN_CB)
		add_listener(ctx, socket);
	return 1;
}

/* Also of sockets whose identity was removed: their listeners count for as long as there is a tally. */
SEC("cgroup/sock_release")
int on_sock_release(struct bpf_sock *ctx)
{
	struct socket_state *socket = bpf_sk_storage_get(&sockets, ctx, 0, 0);

	if (!socket)
		return 1;
	give_place(socket, bpf_get_socket_cookie(ctx));
	end_receiver(ctx);
	end_dialer(ctx, bpf_get_socket_cookie(ctx));
	return 1;
}

static __always_inline int is_tcp(struct bpf_sock *sk)
{
	return sk->protocol == IPPROTO_TCP && sk->type == SOCK_STREAM;
}

/* What is known of a socket, if it is one of the identity's. */
static __always_inline struct socket_state *socket_of(struct bpf_sock *sk,
						      const struct identity *identity)
{
	struct socket_state *socket = bpf_sk_storage_get(&sockets, sk, 0, 0);

	return socket && socket->number == identity->number ? socket : 0;
}

/* A socket is bound. */
static __always_inline int note_if_receiver(struct bpf_sock *ctx, struct listener_key *key)
{
	struct identity *identity = active_identity();
	struct socket_state *socket;

	if (!identity || !(identity->flags & IDENTITY_SEVERAL) || ctx->protocol != IPPROTO_UDP ||
	    ctx->type != SOCK_DGRAM)
		return 1;
	socket = socket_of(ctx, identity);
	if (socket && socket->flags & SOCKET_SERVES)
		note_receiver(ctx, identity, socket, key);
	return 1;
}

SEC("cgroup/post_bind4")
int on_post_bind4(struct bpf_sock *ctx)
{
	struct listener_key key = {
		.address = {.words = {0, 0, MAPPED, ctx->src_ip4}},
		.port = ctx->src_port,
		.family = AF_INET,
	};

	return note_if_receiver(ctx, &key);
}

SEC("cgroup/post_bind6")
int on_post_bind6(struct bpf_sock *ctx)
{
	struct listener_key key = {
		.address = {.words = {ctx->src_ip6[0], ctx->src_ip6[1], ctx->src_ip6[2],
				      ctx->src_ip6[3]}},
		.port = ctx->src_port,
		.family = AF_INET6,
	};

	return note_if_receiver(ctx, &key);
}

SEC("cgroup/setsockopt")
int on_setsockopt(struct bpf_sockopt *ctx)
{
	const struct identity *identity;
	struct socket_state *socket;

	if (!is_watched_option(ctx))
		return 1;
	identity = active_identity();
	socket = identity && ctx->sk ? socket_of(ctx->sk, identity) : 0;
	return socket ? judge_option(ctx, identity, socket) : 1;
}

SEC("cgroup_skb/ingress")
int on_ingress(struct __sk_buff *skb)
{
	struct bpf_sock *sk = skb->sk;
	const struct socket_state *socket;
	struct identity *identity;
	struct counters *counted;
	__u32 state;

	if (!sk)
		return 1;
	state = sk->state;
	sk = bpf_sk_fullsock(sk);
	/* All but connections of TCP: what is known of their socket isn't in any cache, and to look at it would cost more than
	 * all the rest. */
	if (sk && (state == BPF_TCP_LISTEN || !is_tcp(sk))) {
		identity = active_identity();
		socket = identity ? socket_of(sk, identity) : 0;
		if (!socket)
			return 1;
		if (!guard_ingress(skb, identity, sk, socket))
			return 0;
	}
	counted = bpf_get_local_storage(&counters, 0);
	count(&counted->ingress, skb);
	return 1;
}

SEC("cgroup_skb/egress")
int on_egress(struct __sk_buff *skb)
{
	struct bpf_sock *sk = skb->sk;
	const struct socket_state *socket;
	struct identity *identity;
	struct counters *counted;

	sk = sk ? bpf_sk_fullsock(sk) : 0;
	if (!sk)
		return 1;
	if (!is_tcp(sk)) {
		identity = active_identity();
		socket = identity ? socket_of(sk, identity) : 0;
		if (!socket)
			return 1;
		if (!guard_egress(skb, identity, sk, socket))
			return 0;
	}
	counted = bpf_get_local_storage(&counters, 0);
	count(&counted->egress, skb);
	return 1;
}

/* In the network namespace, for all its sockets. */
SEC("sk_lookup")
int on_sk_lookup(struct bpf_sk_lookup *ctx)
{
	struct address address = {};
	struct address key;
	const struct owner *owner;

	if (ctx->protocol != IPPROTO_TCP &&
	    (ctx->protocol != IPPROTO_UDP || !are_there_receivers()))
		return SK_PASS;
	if (ctx->family == AF_INET) {
		address.words[2] = MAPPED;
		address.words[3] = ctx->local_ip4;
	} else {
		address.words[0] = ctx->local_ip6[0];
		address.words[1] = ctx->local_ip6[1];
		address.words[2] = ctx->local_ip6[2];
		address.words[3] = ctx->local_ip6[3];
	}
	key = address;
	if (ctx->family == AF_INET && is_loopback4(key.words[3]))
		key.words[3] = network24(key.words[3]);
	owner = bpf_map_lookup_elem(&addresses, &key);
	if (ctx->protocol == IPPROTO_UDP) {
		if (owner)
			hand_over(ctx, &address, owner);
		return SK_PASS;
	}
	return owner ? steer(ctx, &address, owner) : may_reach_host(ctx);
}

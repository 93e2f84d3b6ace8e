/* UDP sockets that are bound to one address of an identity, and receive at others of it, too. */
#ifndef SANDWIRE_IDENTITY_RECEIVE_H
#define SANDWIRE_IDENTITY_RECEIVE_H

#include "steer.h"

/* Has a daemon look, if there is one: this is told before the next packet can be waited for. */
static __always_inline void tell_daemon(__u32 number)
{
	bpf_ringbuf_output(&bound, &number, sizeof(number), 0);
}

/* One with an address of its own comes before one of the wildcard that has the same port, so it is to be known, too. */
static __always_inline int may_receive_beside(const struct identity *identity,
					      const struct address *address)
{
	const struct owner *owner = bpf_map_lookup_elem(&addresses, address);

	return owner && owner->number == identity->number && owner->flags & OWNER_SEVERAL;
}

static __always_inline int is_same_key(const struct listener_key *key,
				       const struct listener_key *other)
{
	return key->port == other->port && key->family == other->family &&
	       is_same6(key->address.words, other->address.words);
}

/* A socket that asked for a port is bound, to the address in the key. One that asked for the wildcard receives at all
 * addresses. */
static __always_inline void note_receiver(struct bpf_sock *sk, const struct identity *identity,
					  struct socket_state *socket, struct listener_key *key)
{
	__u64 cookie = bpf_get_socket_cookie(sk);
	struct receiver *receiver;

	if (socket->flags & SOCKET_WILDCARD)
		__builtin_memset(&key->address, 0, sizeof(key->address));
	else if (!may_receive_beside(identity, &key->address))
		return;
	if (socket->listener != cookie && !take_place(socket, cookie)) {
		count_refusal(REFUSED_LISTENERS);
		return;
	}
	receiver = bpf_sk_storage_get(&receiving, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!receiver)
		return;
	if (receiver->state == RECEIVER_ENTERED) {
		/* Its entry is there as long as it is open, whatever it is bound to: with several it could fill the map. */
		if (!is_same_key(&receiver->key, key))
			count_refusal(REFUSED_LISTENERS);
		return;
	}
	key->number = identity->number;
	receiver->key = *key;
	/* With a barrier. */
	__sync_lock_test_and_set(&receiver->state, RECEIVER_WAITS);
	tell_daemon(identity->number);
}

/* At the end of any socket: another one may have waited for its place. */
static __always_inline void end_receiver(struct bpf_sock *sk)
{
	const struct receiver *receiver = bpf_sk_storage_get(&receiving, sk, 0, 0);

	if (receiver && receiver->state == RECEIVER_ENTERED)
		tell_daemon(receiver->key.number);
}

static __always_inline int are_there_receivers(void)
{
	const __u32 only = 0;
	const __u32 *found = bpf_map_lookup_elem(&has_receivers, &only);

	return found && *found;
}

/* Gives the datagram to a receiver; of several with SO_REUSEPORT the kernel chooses one. */
static __always_inline int assign_receiver(struct bpf_sk_lookup *ctx, struct listener_key *key)
{
	struct bpf_sock *found = bpf_map_lookup_elem(&receivers, key);
	long error;

	if (!found)
		return 0;
	/* One that is connected hears its peer alone; the kernel refuses it. */
	error = bpf_sk_assign(ctx, found, 0);
	bpf_sk_release(found);
	return !error;
}

/* Where nobody is found, the kernel looks. */
static __always_inline void hand_over(struct bpf_sk_lookup *ctx, const struct address *address,
				      const struct owner *owner)
{
	if (owner->flags & OWNER_SEVERAL)
		give_in_order(ctx, address, owner, assign_receiver);
}

#endif

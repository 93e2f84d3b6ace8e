/* At which address a UDP server was asked that has several: its answers leave from there, though the kernel would have them
 * leave from the one that it is bound to. Each socket has a table of its own, so nobody can fill that of others. A caller is
 * known by a hash: who is taken for another one gets an answer from an address that isn't the one which was asked. */
#ifndef SANDWIRE_IDENTITY_ASKED_H
#define SANDWIRE_IDENTITY_ASKED_H

#include "owner.h"

#define CALLER_THERE 0x80000000
#define CALLER_ADDRESS 0xf

static __always_inline __u64 hash_of(const __u32 *caller, __u16 port)
{
	__u64 high = (__u64)caller[0] << 32 | caller[1], low = (__u64)caller[2] << 32 | caller[3];
	__u64 hash = high * 0x9e3779b97f4a7c15 ^ (low + port) * 0xc2b2ae3d27d4eb4f;

	hash ^= hash >> 29;
	return hash * 0x165667b19e3779f9;
}

static __always_inline __u32 *place_in(struct asked_table *table, __u64 hash)
{
	return table->callers[(hash >> 32) % ASKED_PLACES];
}

/* A caller without the address. */
static __always_inline __u32 mark_of(__u64 hash)
{
	return CALLER_THERE | ((__u32)hash & ~CALLER_ADDRESS);
}

/* The number of an address, or as many as there are. */
static __always_inline __u32 find_address(const struct asked_table *table, const __u32 *address)
{
	__u32 i;

	for (i = 0; i < ASKED_ADDRESSES; i++) {
		if (i >= *(volatile const __u32 *)&table->count ||
		    is_same6(table->addresses[i].words, address))
			break;
	}
	return i;
}

/* The same, which is noted down if it is new. ASKED_ADDRESSES if it can't be. */
static __always_inline __u32 number_of(struct asked_table *table, const __u32 *address)
{
	__u32 number = find_address(table, address);

	/* Another one may have come there since it was looked for. */
	if (number < ASKED_ADDRESSES && number < *(volatile __u32 *)&table->count &&
	    is_same6(table->addresses[number].words, address))
		return number;
	/* Somebody else has it only for an instant; then this packet goes without. */
	if (__sync_val_compare_and_swap(&table->busy, 0, 1))
		return ASKED_ADDRESSES;
	number = find_address(table, address);
	if (number < ASKED_ADDRESSES && number == table->count) {
		__builtin_memcpy(table->addresses[number].words, address,
				 sizeof(table->addresses[number].words));
		__sync_fetch_and_add(&table->count, 1);
	}
	__sync_lock_test_and_set(&table->busy, 0);
	return number;
}

/* The last callers of a place are first. Two processors at one place at the same instant may lose one of them. */
static __always_inline void put_first(__u32 *place, __u32 mark, __u32 caller)
{
	__u32 before = place[0];

	place[0] = caller;
	for (int i = 1; i < ASKED_WAYS && before && (before & ~CALLER_ADDRESS) != mark; i++) {
		__u32 next = place[i];

		place[i] = before;
		before = next;
	}
}

/* Whether a socket that has asked for the wildcard answers from there by itself. */
static __always_inline int is_default_source(const struct identity *identity, const __u32 *ip)
{
	return is_mapped(ip) ? ip[3] == identity->ipv4 : is_same6(ip, identity->ipv6);
}

static __always_inline void forget_asked(__u32 *place, __u32 mark)
{
	for (int i = 0; i < ASKED_WAYS; i++) {
		if ((place[i] & ~CALLER_ADDRESS) == mark)
			place[i] = 0;
	}
}

/* Ports as they are in packets. */
static __always_inline void note_asked(struct bpf_sock *sk, const struct identity *identity,
				       const __u32 *caller, __u16 port, const __u32 *address)
{
	int is_default = is_default_source(identity, address);
	__u64 hash = hash_of(caller, port);
	struct asked_table *table;
	__u32 number;

	table = bpf_sk_storage_get(&asked, sk, 0, is_default ? 0 : BPF_SK_STORAGE_GET_F_CREATE);
	if (!table)
		return;
	if (is_default) {
		forget_asked(place_in(table, hash), mark_of(hash));
		return;
	}
	number = number_of(table, address);
	if (number < ASKED_ADDRESSES)
		put_first(place_in(table, hash), mark_of(hash), mark_of(hash) | number);
}

/* Where somebody has asked; 0 if that isn't known, or where the socket answers from by itself. */
static __always_inline const __u32 *asked_at(struct bpf_sock *sk, const __u32 *caller, __u16 port)
{
	struct asked_table *table = bpf_sk_storage_get(&asked, sk, 0, 0);
	__u64 hash = hash_of(caller, port);
	__u32 mark = mark_of(hash);
	__u32 *place, found;

	if (!table)
		return 0;
	place = place_in(table, hash);
	for (int i = 0; i < ASKED_WAYS; i++) {
		found = *(volatile __u32 *)&place[i];
		if ((found & ~CALLER_ADDRESS) == mark)
			return table->addresses[found & CALLER_ADDRESS].words;
	}
	return 0;
}

#endif

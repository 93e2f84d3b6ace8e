/* Who has called a UDP socket: whom a policy denies may be answered for a minute. Each socket has a table of its own, so
 * nobody can fill that of others. */
#ifndef SANDWIRE_IDENTITY_CALLERS_H
#define SANDWIRE_IDENTITY_CALLERS_H

#include "owner.h"

/* 60 seconds in units of 2^30 ns. */
#define ANSWER_TIME 56

static __always_inline __u32 now_units(void)
{
	return bpf_ktime_get_ns() >> 30;
}

static __always_inline struct caller *caller_at(struct callers *callers, const __u32 *address,
						__u16 port)
{
	__u32 hash = address[0] ^ address[1] * 0x85ebca6b ^ address[2] * 0xc2b2ae35 ^ address[3];

	hash = (hash ^ port) * 0x9e3779b1;
	return &callers->callers[(hash >> 16) % CALLERS_MAX];
}

/* Somebody else has it only for an instant; then this packet goes without. */
static __always_inline int claim(struct caller *caller)
{
	return !__sync_val_compare_and_swap(&caller->busy, 0, 1);
}

static __always_inline void release(struct caller *caller)
{
	__sync_lock_test_and_set(&caller->busy, 0);
}

/* Ports as they are in packets. */
static __always_inline void note_caller(struct bpf_sock *sk, const __u32 *address, __u16 port)
{
	struct callers *callers;
	struct caller *caller;

	callers = bpf_sk_storage_get(&called, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!callers)
		return;
	caller = caller_at(callers, address, port);
	if (!claim(caller))
		return;
	__builtin_memcpy(caller->address.words, address, sizeof(caller->address.words));
	caller->port = port;
	caller->time = now_units();
	release(caller);
}

static __always_inline int has_called(struct bpf_sock *sk, const __u32 *address, __u16 port)
{
	struct callers *callers = bpf_sk_storage_get(&called, sk, 0, 0);
	struct caller *caller;
	int is_same;

	if (!callers)
		return 0;
	caller = caller_at(callers, address, port);
	if (!claim(caller))
		return 0;
	is_same = caller->time && is_same6(caller->address.words, address) &&
		  caller->port == port && now_units() - caller->time <= ANSWER_TIME;
	release(caller);
	return is_same;
}

#endif

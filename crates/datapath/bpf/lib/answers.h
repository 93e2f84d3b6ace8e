/* Answers: what a sandbox sends back where it may not send by itself.
 *
 * There is no connection tracking. What comes in opens a way back for a time, by addresses and ports;
 * only sandboxes whose policy denies or masquerades something, or that have published ports, pay for that. The limit: a guest can send
 * anything that fits the flow, answer or not, for as long as the entry lives. */
#ifndef SANDWIRE_ANSWERS_H
#define SANDWIRE_ANSWERS_H

#include "maps.h"
#include "nat.h"
#include "policy.h"
#include "police.h"
#include "share.h"

#define ANSWER_TCP (300 * NANOSECONDS)
#define ANSWER_OTHERS (60 * NANOSECONDS)
/* An entry is written again only when it is older: not for every packet. */
#define ANSWER_REFRESH (5 * NANOSECONDS)
/* Fragmented answers at a time to one peer and by one protocol, which are all that a guest can enter by itself. A
 * power of two; what is to come of one mostly follows at once. */
#define ANSWER_FRAGMENTS 8
/* An interface's share of `answers` is for a piece of time of 2^36 nanoseconds, 69 s. */
#define ANSWER_SHARE_SHIFT 36
/* A power of two. */
#define NOTED_MAX (sizeof(((struct noted *)0)->flows) / sizeof(__u64))

/* What an interface may enter into `answers` in a piece of time; the daemon says how much, by the map's size. */
const volatile __u32 answers_share = 2048;

static __always_inline __s64 age_of(const struct answer_value *answer, __u64 now)
{
	return (__s64)(now - READ_ONCE(answer->seen));
}

/* Whether it is of this lease and of late: who leases the interface next must not answer for the last one. */
static __always_inline int is_alive(const struct answer_value *answer, __u32 lease, __u8 protocol,
				    __u64 now)
{
	__s64 life = protocol == PROTOCOL_TCP ? ANSWER_TCP : ANSWER_OTHERS;

	return answer->lease == lease && age_of(answer, now) <= life;
}

static __always_inline __u32 lease_of(__u32 index)
{
	const struct nic *nic = bpf_map_lookup_elem(&nics, &index);

	return nic ? READ_ONCE(nic->lease) : 0;
}

/* Whether the guest may send by itself to where a packet comes from. */
__noinline int may_send_back(const struct packet *p, __u32 index)
{
	const struct nic *nic = bpf_map_lookup_elem(&nics, &index);
	const struct policy *policy;
	struct packet back = {};
	__u32 policy_index;

	if (!p || !nic)
		return 0;
	policy_index = READ_ONCE(nic->policy);
	policy = bpf_map_lookup_elem(&policies, &policy_index);
	if (!policy)
		return 0;
	back.destination = p->source;
	back.destination_port = p->source_port;
	back.protocol = p->protocol;
	back.version = p->version;
	if (judge_prefixes(&back, policy_index, policy->flags))
		return 0;
	return p->from_host ? may_reach_host(&back, policy) :
			      READ_ONCE(policy->uplink) != UPLINK_DENY;
}

static __always_inline __u64 hash_of(const struct answer_key *key, __u64 secret)
{
	const __u32 *peer = key->peer.word;
	__u64 hash = mix(secret, (__u64)peer[0] << 32 | peer[1]);

	hash = mix(hash, (__u64)peer[2] << 32 | peer[3]);
	hash = mix(hash, (__u64)key->nic << 32 | (__u32)key->peer_port << 16 | key->guest_port);
	return mix(hash, key->protocol);
}

/* Whether the flow's answer was looked at of late; notes that it is now. Should two flows have one hash, the
 * one is looked at up to ANSWER_REFRESH later than it should be, of the minutes that it has. */
static __always_inline int was_noted(const struct answer_key *key, __u64 now)
{
	__u32 zero = 0, moment = now >> 20;
	struct noted *table = bpf_map_lookup_elem(&noted, &zero);
	__u64 hash, *place;

	if (!table)
		return 0;
	if (rarely(!table->secret))
		table->secret = (__u64)bpf_get_prandom_u32() << 32 | bpf_get_prandom_u32() | 1;
	hash = hash_of(key, table->secret);
	place = &table->flows[hash & (NOTED_MAX - 1)];
	if ((*place ^ hash) >> 32 == 0 && moment - (__u32)*place <= ANSWER_REFRESH >> 20)
		return 1;
	*place = hash >> 32 << 32 | moment;
	return 0;
}

static __always_inline struct answer_value *known_answer(const struct answer_key *key)
{
	struct answer_value *known = bpf_map_lookup_elem(&answers, key);

	return known ? known : bpf_map_lookup_elem(&answers_crowd, key);
}

static __always_inline int is_within_share(__u32 nic, __u64 now)
{
	__u64 *share = bpf_map_lookup_elem(&answer_shares, &nic);

	return share && is_within(share, now >> ANSWER_SHARE_SHIFT, answers_share);
}

/* Whoever is called by very many, or has very many answer it, must not push out what others are to answer. */
static __always_inline void enter_answer(const struct answer_key *key,
					 const struct answer_value *value, __u64 now)
{
	if (bpf_map_lookup_elem(&answers, key) || is_within_share(key->nic, now))
		bpf_map_update_elem(&answers, key, value, BPF_ANY);
	else
		bpf_map_update_elem(&answers_crowd, key, value, BPF_ANY);
}

/* Notes a packet towards a guest. `learn`: any TCP packet opens, not only the first of a connection. */
__noinline int remember_answer(const struct packet *p, __u32 nic, __u32 via, __u64 now, __u32 learn)
{
	struct answer_value value = {.seen = now, .via = via}, *known;
	struct answer_key key = {.nic = nic};
	int opens = 1;

	if (!p || p->fragment == FRAGMENT_LATER)
		return 0;
	if (p->icmp_kind == ICMP_REQUEST) {
		key.guest_port = p->identifier;
	} else if (p->protocol == PROTOCOL_TCP || p->protocol == PROTOCOL_UDP) {
		key.peer_port = p->source_port;
		key.guest_port = p->destination_port;
		opens = p->protocol == PROTOCOL_UDP || p->opens || learn;
	} else {
		return 0;
	}
	key.peer = p->source;
	key.protocol = p->protocol;
	/* What opens nothing only keeps an answer from ageing. */
	if (!opens && was_noted(&key, now))
		return 0;
	value.lease = lease_of(nic);
	known = known_answer(&key);
	if (!known || !is_alive(known, value.lease, key.protocol, now)) {
		/* Between sandboxes groups decide, not what has come: else they could push out what others are to answer,
		 * and even one could by itself, by datagrams to itself that the stack has to cut. */
		if (!opens || bpf_map_lookup_elem(&clones, &key.peer))
			return 0;
		value.own = p->protocol == PROTOCOL_UDP && may_send_back(p, nic);
		enter_answer(&key, &value, now);
	} else if (age_of(known, now) > (__s64)ANSWER_REFRESH || (opens && known->via != via)) {
		/* A conversation that is denied since runs out, whatever still comes of it. */
		if (known->own && !may_send_back(p, nic))
			return 0;
		known->seen = now;
		known->via = via;
	}
	return 0;
}

static __always_inline __u32 fragment_place(const struct packet *p)
{
	return p->identification % ANSWER_FRAGMENTS + 1;
}

static __always_inline __u16 fragment_rest(const struct packet *p)
{
	return p->identification / ANSWER_FRAGMENTS;
}

/* The flow that a packet from a guest may be the answer to. Returns zero if it can be none. */
static __always_inline int answer_key_of(frame *f, const struct packet *p, struct answer_key *key)
{
	key->peer = p->destination;
	key->protocol = p->protocol;
	if (p->fragment == FRAGMENT_LATER) {
		key->fragment = fragment_place(p);
		return 1;
	}
	if (p->icmp_kind == ICMP_REPLY) {
		key->guest_port = p->identifier;
		return 1;
	}
	if (p->icmp_kind == ICMP_ERROR) {
		struct quote q = {};

		/* It goes to the sender of what it is about: what else it may tell of, tells_of_others has refused. */
		if (read_quote(f, p, &q) || !q.has_l4)
			return 0;
		key->protocol = q.protocol;
		key->peer_port = q.source_port;
		key->guest_port = q.icmp_kind == ICMP_REQUEST ? q.identifier : q.destination_port;
		return q.protocol == PROTOCOL_TCP || q.protocol == PROTOCOL_UDP ||
		       q.icmp_kind == ICMP_REQUEST;
	}
	key->peer_port = p->destination_port;
	key->guest_port = p->source_port;
	return p->protocol == PROTOCOL_TCP || p->protocol == PROTOCOL_UDP;
}

/* Tells which way a packet that policy denies, or would translate, may leave because it answers one that
 * came: enum answer_via, or zero. */
__noinline int find_answer(frame *f, const struct packet *p, __u32 nic, __u64 now, __u32 denied)
{
	struct answer_key key = {.nic = nic};
	__u32 lease = lease_of(nic), via;
	struct answer_value *known;

	if (!p || !answer_key_of(f, p, &key))
		return 0;
	known = known_answer(&key);
	if (!known || !is_alive(known, lease, key.protocol, now))
		return 0;
	/* Who may have been called must not go on when that is denied. */
	if (denied && known->own)
		return 0;
	if (p->fragment == FRAGMENT_LATER && known->fragment != fragment_rest(p))
		return 0;
	via = known->via;
	if (p->fragment == FRAGMENT_FIRST) {
		/* In here, and the quote of an error in a block of its own: they have one place. Stack is scarce. */
		struct answer_value value = {.seen = now, .lease = lease, .via = via};

		key.protocol = p->protocol;
		key.peer_port = 0;
		key.guest_port = 0;
		key.fragment = fragment_place(p);
		value.fragment = fragment_rest(p);
		enter_answer(&key, &value, now);
	}
	return via;
}

#endif

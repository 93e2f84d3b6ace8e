/* What one interface may take of what all share.
 *
 * Of the host's table of neighbours: who sends to an address on a link of the host's has it entered there until it
 * answers, and some seconds longer if it doesn't. The table is one for the whole machine and has an end (gc_thresh3), at
 * which nobody finds a new neighbour any more: one guest that sends to many addresses of such a link could keep it full. */
#ifndef SANDWIRE_SHARE_H
#define SANDWIRE_SHARE_H

#include "maps.h"
#include "parse.h"
#include "police.h"

/* About as long as the kernel asks before it gives up. */
#define NEIGHBOUR_LIFE (4 * NANOSECONDS)

/* A cheap hash: nobody outside knows what it begins with. */
static __always_inline __u64 mix(__u64 hash, __u64 more)
{
	hash = (hash ^ more) * 0xbf58476d1ce4e5b9;
	return hash ^ hash >> 29;
}

/* Whether one more is within what may be had in a piece of time. The upper half of `share` is the number of the piece, the
 * lower one how many in it. Two processors at the turn may count a few too few. */
static __always_inline int is_within(__u64 *share, __u64 piece, __u32 most)
{
	__u64 window = piece << 32;

	if ((READ_ONCE(*share) ^ window) >> 32)
		*share = window;
	if ((__u32)READ_ONCE(*share) >= most)
		return 0;
	__sync_fetch_and_add(share, 1);
	return 1;
}

/* Whether the interface may have the packet's destination looked for as a neighbour: it is one of the few of late, or becomes
 * one. Two processors at once may note one too many, or one of theirs twice. */
static __always_inline int may_ask_for(const struct packet *p, __u32 nic, __u64 now)
{
	struct neighbour_share *share = bpf_map_lookup_elem(&neighbour_shares, &nic);
	__u32 moment = now >> 20;
	__u64 hash, *place;

	if (!share)
		return 0;
	if (!share->secret)
		share->secret = (__u64)bpf_get_prandom_u32() << 32 | bpf_get_prandom_u32() | 1;
	hash = mix(share->secret,
		   (__u64)p->destination.word[0] << 32 | p->destination.word[1]);
	hash = mix(hash, (__u64)p->destination.word[2] << 32 | p->destination.word[3]);
	for (int i = 0; i < NEIGHBOURS_MAX; i++) {
		__u64 asked = READ_ONCE(share->asked[i]);

		if (!((asked ^ hash) >> 32) && moment - (__u32)asked <= NEIGHBOUR_LIFE >> 20)
			return 1;
	}
	place = &share->asked[READ_ONCE(share->next) & (NEIGHBOURS_MAX - 1)];
	if (*place && moment - (__u32)*place <= NEIGHBOUR_LIFE >> 20)
		return 0;
	*place = hash >> 32 << 32 | moment;
	share->next += 1;
	return 1;
}

#endif

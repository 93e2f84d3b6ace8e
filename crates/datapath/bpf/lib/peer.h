/* Host ends whose other end gets packets without the host end's queue and backlog between. */
#ifndef SANDWIRE_PEER_H
#define SANDWIRE_PEER_H

#include "abi.h"

/* Not while packets are diverted, which is at the egress of the host end; those of guests on the TAPs of a netns slot are
 * inside its namespace, and that needs no flag. */
static __always_inline int has_short_way(__u32 flags)
{
	return flags & (NIC_NETNS | NIC_PEER) && !(flags & NIC_IMPAIRED);
}

#endif

/* Host ends whose other end gets packets without the host end's queue and backlog between. */
#ifndef SANDWIRE_PEER_H
#define SANDWIRE_PEER_H

#include "abi.h"

/* A container's packets are diverted at the egress of its host end, a netns slot's inside its namespace. */
static __always_inline int has_short_way(__u32 flags)
{
	return flags & NIC_NETNS || (flags & (NIC_PEER | NIC_IMPAIRED)) == NIC_PEER;
}

#endif

/* Which packets the XDP programs take: all others, whatever is wrong or special about them, go on to
 * the tc programs, which judge and count them. */
#ifndef SANDWIRE_SIMPLE_H
#define SANDWIRE_SIMPLE_H

#include "parse.h"

/* Only what was parsed at the usual place is changed without helpers. */
static __always_inline int is_simple(const struct packet *p)
{
	return p->fragment == FRAGMENT_WHOLE && p->icmp_kind != ICMP_ERROR &&
	       p->l4 == (p->version == 4 ? IPV4_L4 : IPV6_L4);
}

/* An interface whose frames may go by XDP now. One that is watched or impaired goes by tc. */
static __always_inline int takes_xdp(const struct nic *nic, __u32 flags)
{
	return READ_ONCE(nic->state) == NIC_ACTIVE && flags & NIC_XDP &&
	       !(flags & (NIC_NETNS | NIC_PEER | NIC_TRACE | NIC_IMPAIRED));
}

#endif

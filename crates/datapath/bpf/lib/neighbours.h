/* Neighbours of a sandbox that is on a network with others: what it may say to them of itself, and what of theirs
 * it hears. */
#ifndef SANDWIRE_NEIGHBOURS_H
#define SANDWIRE_NEIGHBOURS_H

#include "link.h"

#define MLD_HOP_LIMIT 1

/* The link-local address made of its MAC (RFC 4291, appendix A), the only one that it has. With its parent's MAC it
 * has none: that address is its parent's. */
static __always_inline int is_own_link_local(const struct nic *nic, const struct address *a)
{
	const __u8 *mac = nic->guest_mac;
	__u32 upper = (__u32)(mac[0] ^ 2) << 24 | (__u32)mac[1] << 16 | (__u32)mac[2] << 8 | 0xff;
	__u32 lower = 0xfe000000 | (__u32)mac[3] << 16 | (__u32)mac[4] << 8 | mac[5];

	return !(READ_ONCE(nic->flags) & NIC_SHARED_MAC) &&
	       a->word[0] == bpf_htonl(0xfe800000) && !a->word[1] &&
	       a->word[2] == bpf_htonl(upper) && a->word[3] == bpf_htonl(lower);
}

static __always_inline int is_own6(const struct nic *nic, const struct address *a)
{
	return nic->has_ipv6 && (same_address(a, &nic->guest6) || is_own_link_local(nic, a));
}

static __always_inline int is_own_destination(const struct nic *nic, const struct address *a)
{
	if (is_mapped(a))
		return nic->guest4 && a->word[3] == nic->guest4;
	return nic->has_ipv6 && same_address(a, &nic->guest6);
}

/* What antispoof has let pass of a sandbox's neighbour discovery and multicast membership. Returns a drop
 * reason. */
__noinline int judge_own_link_packet(frame *f, const struct packet *p, __u32 index)
{
	struct nic *nic = bpf_map_lookup_elem(&nics, &index);
	struct address target;
	int is_asking;

	if (!p || !nic)
		return DROP_NEIGHBOUR;
	if (p->version == 4 || p->icmp_type == MLD_QUERY || p->icmp_type == ROUTER_SOLICITATION)
		return DROP_LINK_CHATTER;
	if (!is_unspecified(&p->source) && !is_own6(nic, &p->source))
		return DROP_SOURCE_ADDRESS;
	if (p->fragment)
		return DROP_NEIGHBOUR;
	is_asking = p->icmp_type == NEIGHBOUR_SOLICITATION;
	/* Membership: switches that watch it would otherwise keep solicitations from it. */
	if (!is_asking && p->icmp_type != NEIGHBOUR_ADVERTISEMENT)
		return p->ttl == MLD_HOP_LIMIT ? DROP_NONE : DROP_NEIGHBOUR;
	if (p->ttl != NDP_HOP_LIMIT || p->l4 != IPV6_L4)
		return DROP_NEIGHBOUR;
	if (p->l4 + NEIGHBOUR_FIXED > ETH_HLEN + p->length ||
	    frame_load(f, p->l4 + 8, &target, sizeof(target)))
		return DROP_MALFORMED;
	if (!has_own_option(f, p, nic, is_asking ? NDP_SOURCE_ADDRESS : NDP_TARGET_ADDRESS))
		return DROP_NEIGHBOUR;
	/* It speaks for itself; and who has no address yet asks for its own alone. */
	if ((!is_asking || is_unspecified(&p->source)) && !is_own6(nic, &target))
		return DROP_NEIGHBOUR;
	return DROP_NONE;
}

/* Whether an ARP packet is about the sandbox's address, or tells of a neighbour that has moved. */
static __always_inline int concerns_arp(const frame *f, const struct nic *nic)
{
	const struct arp *arp = frame_data(f) + ETH_HLEN;
	__u32 target;

	if ((const void *)(arp + 1) > frame_end(f) || !nic->guest4)
		return 0;
	target = load_address4(arp->target);
	return target == nic->guest4 || target == load_address4(arp->sender);
}

/* Whether an IPv6 packet that isn't for the sandbox's address is one that its neighbour discovery and multicast
 * membership need. */
__noinline int concerns_link_packet(frame *f, const struct packet *p, __u32 index)
{
	struct nic *nic = bpf_map_lookup_elem(&nics, &index);
	struct address target;

	if (!p || !nic || !nic->has_ipv6 || p->fragment)
		return 0;
	if (p->icmp_type == MLD_QUERY)
		return p->icmp_kind && p->ttl == MLD_HOP_LIMIT;
	if (!p->icmp_kind || p->ttl != NDP_HOP_LIMIT)
		return 0;
	if (p->icmp_type == NEIGHBOUR_ADVERTISEMENT)
		return 1;
	if (p->icmp_type != NEIGHBOUR_SOLICITATION ||
	    p->l4 + NEIGHBOUR_FIXED > ETH_HLEN + p->length ||
	    frame_load(f, p->l4 + 8, &target, sizeof(target)))
		return 0;
	return is_own6(nic, &target);
}

#endif

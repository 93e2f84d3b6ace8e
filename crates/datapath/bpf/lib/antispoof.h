/* Antispoofing: a guest speaks for itself, and is neither a router nor a DHCP server. */
#ifndef SANDWIRE_ANTISPOOF_H
#define SANDWIRE_ANTISPOOF_H

#include "parse.h"

#define DHCP_SERVER bpf_htons(67)
#define DHCP_CLIENT bpf_htons(68)
#define DHCPV6_SERVER bpf_htons(547)

enum icmpv6_type {
	MLD_QUERY = 130,
	MLD_REPORT = 131,
	MLD_DONE = 132,
	ROUTER_SOLICITATION = 133,
	ROUTER_ADVERTISEMENT = 134,
	NEIGHBOUR_SOLICITATION = 135,
	NEIGHBOUR_ADVERTISEMENT = 136,
	MLD2_REPORT = 143,
};

/* Who sends on a host end. */
struct sender {
	struct nic *nic;
	__u32 index;
	__u32 flags;      /* enum nic_flag, as read once */
	__u32 is_process; /* in the slot's namespace: it uses the clone address itself */
};

/* Packets about the guest's own link, which are judged one by one. */
static __always_inline int is_link_packet(const struct packet *p)
{
	if (p->version == 4)
		return p->protocol == PROTOCOL_UDP && !p->source.word[3] &&
		       p->source_port == DHCP_CLIENT && p->destination_port == DHCP_SERVER;
	if (!p->icmp_kind)
		return 0;
	switch (p->icmp_type) {
	case MLD_QUERY:
	case MLD_REPORT:
	case MLD_DONE:
	case MLD2_REPORT:
	case ROUTER_SOLICITATION:
	case NEIGHBOUR_SOLICITATION:
	case NEIGHBOUR_ADVERTISEMENT:
		return 1;
	default:
		return 0;
	}
}

/* Whether the source is the sender's own. */
static __always_inline int is_own_source(const struct sender *s, const struct packet *p)
{
	const struct nic *nic = s->nic;

	if (p->version == 4)
		return p->source.word[3] == (s->is_process ? nic->clone4 : nic->guest4);
	return same_address(&p->source, s->is_process ? &nic->clone6 : &nic->guest6);
}

static __always_inline int is_multicast6(const struct address *a)
{
	return (a->word[0] & bpf_htonl(0xff000000)) == bpf_htonl(0xff000000);
}

static __always_inline int antispoof(const struct sender *s, const struct packet *p, int is_link)
{
	if (p->protocol == PROTOCOL_UDP &&
	    p->source_port == (p->version == 4 ? DHCP_SERVER : DHCPV6_SERVER))
		return DROP_ROGUE_DHCP;
	if (p->version == 6 && p->icmp_type == ROUTER_ADVERTISEMENT)
		return DROP_ROGUE_RA;
	if (is_own_source(s, p))
		return DROP_NONE;
	if (p->version == 4)
		return is_link ? DROP_NONE : DROP_SOURCE_ADDRESS;
	if (is_link && (is_link_local(&p->source) || is_unspecified(&p->source)))
		return DROP_NONE;
	/* It may ping its gateway from its own link-local address. */
	if (is_link_local(&p->source) && p->icmp_kind == ICMP_REQUEST &&
	    is_router_address(&p->destination))
		return DROP_NONE;
	/* What services on the link say to each other, as mDNS does; in IPv4 it has the guest's own source. */
	if (is_link_local(&p->source) && is_multicast6(&p->destination))
		return DROP_MULTICAST;
	return DROP_SOURCE_ADDRESS;
}

static __always_inline int is_gateway(const struct nic *nic, const struct packet *p)
{
	if (p->version == 4)
		return p->destination.word[3] == nic->gateway4;
	return same_address(&p->destination, &nic->gateway6) || is_router_address(&p->destination);
}

/* Destinations that nobody routes. */
static __always_inline int judge_destination(const struct packet *p)
{
	const struct address *a = &p->destination;
	__u32 first;

	if (p->version == 4) {
		first = bpf_ntohl(a->word[3]) >> 24;
		if (first >> 4 == 14 || a->word[3] == 0xffffffff)
			return DROP_MULTICAST;
		return first == 0 || first == 127 || first >= 240 ? DROP_DESTINATION : DROP_NONE;
	}
	if (is_multicast6(a))
		return DROP_MULTICAST;
	if (is_link_local(a) || is_mapped(a))
		return DROP_DESTINATION;
	if (!(a->word[0] | a->word[1] | a->word[2]) && !(a->word[3] & bpf_htonl(0xfffffffe)))
		return DROP_DESTINATION;
	return DROP_NONE;
}

#endif

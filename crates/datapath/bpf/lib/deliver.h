/* Delivery to a guest: finding it, its limit, answers it may give, and the addresses it knows. */
#ifndef SANDWIRE_DELIVER_H
#define SANDWIRE_DELIVER_H

#include "answers.h"
#include "maps.h"
#include "nat.h"
#include "police.h"

#define PACKET_HOST 0

/* Whom a packet is for. */
struct receiver {
	struct nic *nic;
	__u32 index;
	__u32 flags; /* enum nic_flag, as read once */
};

/* The destination of an IP packet, before it is parsed: most of what passes is for nobody here. IPv6
 * that looks like our way to write IPv4 is nobody's. */
static __always_inline int read_destination(const frame *f, struct address *destination)
{
	const struct ethhdr *ethernet = frame_data(f);
	const void *network = ethernet + 1;

	if (network + sizeof(struct iphdr) > frame_end(f))
		return 0;
	if (ethernet->h_proto == bpf_htons(ETH_P_IP)) {
		*destination = mapped(((const struct iphdr *)network)->daddr);
		return 1;
	}
	if (ethernet->h_proto != bpf_htons(ETH_P_IPV6) ||
	    network + sizeof(struct ipv6hdr) > frame_end(f))
		return 0;
	__builtin_memcpy(destination, &((const struct ipv6hdr *)network)->daddr,
			 sizeof(*destination));
	return !is_mapped(destination);
}

static __always_inline int find_receiver(struct receiver *r, const struct address *destination)
{
	const struct clone_value *clone = bpf_map_lookup_elem(&clones, destination);

	if (!clone)
		return 0;
	r->index = clone->nic;
	r->nic = bpf_map_lookup_elem(&nics, &r->index);
	if (!r->nic)
		return 0;
	r->flags = READ_ONCE(r->nic->flags);
	return 1;
}

/* Returns zero for a packet that can be parsed. */
static __always_inline int parse_ip(frame *f, struct packet *p)
{
	const struct ethhdr *ethernet = frame_data(f);

	if ((const void *)(ethernet + 1) > frame_end(f))
		return DROP_MALFORMED;
	return ethernet->h_proto == bpf_htons(ETH_P_IP) ? parse_ipv4(f, p) : parse_ipv6(f, p);
}

static __always_inline const struct policy *policy_of(const struct receiver *r)
{
	__u32 index = READ_ONCE(r->nic->policy);

	return bpf_map_lookup_elem(&policies, &index);
}

/* The limit. Returns a drop reason. */
static __always_inline int police_ingress(const struct receiver *r, const struct packet *p,
					  const struct policy *policy)
{
	if (!is_limited(&policy->ingress))
		return DROP_NONE;
	return police(&policy->ingress, r->index, DIRECTION_INGRESS, p, 0);
}

/* Opens the way back, then asks the limit. Returns a drop reason. */
static __always_inline int admit(const struct receiver *r, const struct packet *p, __u32 via)
{
	const struct policy *policy = policy_of(r);

	if (!policy)
		return DROP_NONE;
	if (policy->flags & POLICY_ANSWERS || r->flags & NIC_PUBLISHED)
		remember_answer(p, r->index, via, bpf_ktime_get_coarse_ns(), r->flags & NIC_LEARN);
	return police_ingress(r, p, policy);
}

/* A process has the clone address itself, behind the MAC of its veth. */
static __always_inline void translate_to_guest(struct translation *t, struct hop *hop,
					       const struct receiver *r, const struct packet *p)
{
	const struct nic *nic = r->nic;

	t->source = p->source;
	t->destination = p->destination;
	hop->source_mac = nic->gateway_mac;
	if (r->flags & NIC_PROCESS) {
		hop->destination_mac = nic->veth_mac;
		return;
	}
	hop->destination_mac = nic->guest_mac;
	t->destination = p->version == 4 ? mapped(nic->guest4) : nic->guest6;
}

#endif

/* The guest's link: the gateway that the path plays, with ARP, neighbour discovery and echo. */
#ifndef SANDWIRE_LINK_H
#define SANDWIRE_LINK_H

#include "antispoof.h"
#include "nat.h"

/* Not a drop reason: the frame is now the answer, to be sent back. */
#define LINK_ANSWER (-1)
#define NDP_HOP_LIMIT 255
#define NDP_OPTIONS_MAX 8
#define NDP_SOURCE_ADDRESS 1
#define NDP_TARGET_ADDRESS 2
#define ARP_REQUEST 1
#define ARP_REPLY 2

struct arp {
	__be16 hardware;
	__be16 protocol;
	__u8 hardware_length;
	__u8 protocol_length;
	__be16 operation;
	__u8 sender_mac[6];
	__u8 sender[4];
	__u8 target_mac[6];
	__u8 target[4];
} __attribute__((packed));

/* NS and NA, with the option that an answer has. */
struct neighbour_message {
	__u8 type;
	__u8 code;
	__be16 checksum;
	__be32 flags;
	struct address target;
	__u8 option_type;
	__u8 option_length; /* in units of eight bytes */
	__u8 mac[6];
};

struct neighbour_answer {
	struct ipv6hdr ip;
	struct neighbour_message message;
};

#define NEIGHBOUR_FIXED 24
#define NEIGHBOUR_ANSWERED bpf_htonl(0xe0000000) /* router, solicited, override */

static __always_inline __u32 load_address4(const __u8 *from)
{
	__u32 address;

	__builtin_memcpy(&address, from, sizeof(address));
	return address;
}

/* Whether an ARP packet speaks for the guest alone. Returns a drop reason. */
static __always_inline int judge_arp_sender(frame *f, const struct nic *nic)
{
	const struct ethhdr *ethernet = frame_data(f);
	const struct arp *arp = (void *)(ethernet + 1);
	__u32 sender;

	if ((void *)(arp + 1) > frame_end(f))
		return DROP_MALFORMED;
	if (arp->hardware != bpf_htons(1) || arp->protocol != bpf_htons(ETH_P_IP) ||
	    arp->hardware_length != 6 || arp->protocol_length != 4)
		return DROP_MALFORMED;
	if (!nic->guest4)
		return DROP_NO_ADDRESS;
	sender = load_address4(arp->sender);
	if (!same_mac(arp->sender_mac, ethernet->h_source) || (sender && sender != nic->guest4))
		return DROP_ARP;
	return DROP_NONE;
}

/* Judges an ARP packet. Returns a drop reason, or LINK_ANSWER if it is to be answered. */
static __always_inline int judge_arp(frame *f, const struct nic *nic)
{
	const struct arp *arp = frame_data(f) + ETH_HLEN;
	int reason = judge_arp_sender(f, nic);
	__u32 target;

	if (reason)
		return reason;
	if ((void *)(arp + 1) > frame_end(f))
		return DROP_MALFORMED;
	target = load_address4(arp->target);
	if (target == nic->guest4)
		return DROP_LINK_CHATTER;
	if (arp->operation == bpf_htons(ARP_REQUEST) && target == nic->gateway4)
		return LINK_ANSWER;
	return arp->operation == bpf_htons(ARP_REPLY) ? DROP_LINK_CHATTER : DROP_ARP;
}

static __always_inline int answer_arp(frame *f, const struct nic *nic)
{
	struct ethhdr *ethernet = frame_data(f);
	struct arp *arp = (void *)(ethernet + 1);

	if ((void *)(arp + 1) > frame_end(f))
		return DROP_HELPER;
	__builtin_memcpy(ethernet->h_dest, ethernet->h_source, ETH_ALEN);
	__builtin_memcpy(ethernet->h_source, nic->gateway_mac, ETH_ALEN);
	arp->operation = bpf_htons(ARP_REPLY);
	__builtin_memcpy(arp->target_mac, arp->sender_mac, ETH_ALEN);
	__builtin_memcpy(arp->target, arp->sender, sizeof(arp->target));
	__builtin_memcpy(arp->sender_mac, nic->gateway_mac, ETH_ALEN);
	__builtin_memcpy(arp->sender, &nic->gateway4, sizeof(arp->sender));
	return DROP_NONE;
}

/* An option, placed so that the MAC in it is aligned: the verifier insists on the stack. */
struct link_option {
	__u8 before[2];
	__u8 type;
	__u8 length; /* in units of eight bytes */
	__u8 mac[6];
	__u8 after[6];
} __attribute__((aligned(8)));

/* Whether the options of a neighbour message that are of a type name the sender's own MAC, if any. */
static __always_inline int has_own_option(frame *f, const struct packet *p, const struct nic *nic,
					  __u8 type)
{
	__u32 offset = p->l4 + NEIGHBOUR_FIXED, end = ETH_HLEN + p->length;
	struct link_option option;

	for (int i = 0; i < NDP_OPTIONS_MAX; i++) {
		if (offset == end)
			return 1;
		if (offset + 8 > end || offset > 0xffff || frame_load(f, offset, &option.type, 8))
			return 0;
		if (!option.length)
			return 0;
		if (option.type == type &&
		    (option.length != 1 || !same_mac(option.mac, nic->guest_mac)))
			return 0;
		offset += option.length * 8;
	}
	return 0;
}

/* Judges neighbour discovery, multicast membership and DHCP of a guest. Like NDP itself we take no
 * fragments, and solicitations only without extension headers. */
__noinline int judge_link_packet(frame *f, const struct packet *p, __u32 index)
{
	struct nic *nic = bpf_map_lookup_elem(&nics, &index);
	struct address target;
	int unspecified;

	if (!p || !nic)
		return DROP_NEIGHBOUR;
	if (p->version == 4 || (p->icmp_type != ROUTER_SOLICITATION &&
				p->icmp_type != NEIGHBOUR_SOLICITATION &&
				p->icmp_type != NEIGHBOUR_ADVERTISEMENT))
		return DROP_LINK_CHATTER;
	if (p->ttl != NDP_HOP_LIMIT || p->fragment)
		return DROP_NEIGHBOUR;
	if (p->icmp_type == ROUTER_SOLICITATION)
		return DROP_LINK_CHATTER;
	if (p->l4 + NEIGHBOUR_FIXED > ETH_HLEN + p->length)
		return DROP_MALFORMED;
	if (frame_load(f, p->l4 + 8, &target, sizeof(target)))
		return DROP_MALFORMED;
	if (p->icmp_type == NEIGHBOUR_ADVERTISEMENT)
		return same_address(&target, &nic->guest6) || is_link_local(&target) ?
			       DROP_LINK_CHATTER : DROP_NEIGHBOUR;
	if (!has_own_option(f, p, nic, NDP_SOURCE_ADDRESS))
		return DROP_NEIGHBOUR;
	unspecified = is_unspecified(&p->source);
	if (same_address(&target, &nic->gateway6) || is_router_address(&target)) {
		if (unspecified)
			return DROP_LINK_CHATTER;
		return p->l4 == IPV6_L4 ? LINK_ANSWER : DROP_NEIGHBOUR;
	}
	if (unspecified && (same_address(&target, &nic->guest6) || is_link_local(&target)))
		return DROP_LINK_CHATTER;
	return DROP_NEIGHBOUR;
}

/* Turns a solicitation into the advertisement that answers it: a frame of 86 bytes, whatever options
 * were asked with. Its checksum is computed, not fixed: a wrong one mustn't live on. */
__noinline int answer_solicitation(frame *f, const struct packet *p, __u32 index)
{
	struct nic *nic = bpf_map_lookup_elem(&nics, &index);
	struct neighbour_answer answer = {};
	struct ethhdr head;
	__be32 pseudo[2];
	__s64 sum;

	if (!p || !nic)
		return DROP_HELPER;
	if (frame_load(f, p->l4 + 8, &answer.ip.saddr, sizeof(answer.ip.saddr)) ||
	    frame_load(f, 0, &head, sizeof(head)))
		return DROP_HELPER;
	__builtin_memcpy(&answer.message.target, &answer.ip.saddr, sizeof(answer.message.target));
	__builtin_memcpy(&answer.ip.daddr, &p->source, sizeof(answer.ip.daddr));
	answer.ip.version = 6;
	answer.ip.payload_len = bpf_htons(sizeof(answer.message));
	answer.ip.nexthdr = PROTOCOL_ICMPV6;
	answer.ip.hop_limit = NDP_HOP_LIMIT;
	answer.message.type = NEIGHBOUR_ADVERTISEMENT;
	answer.message.flags = NEIGHBOUR_ANSWERED;
	answer.message.option_type = NDP_TARGET_ADDRESS;
	answer.message.option_length = 1;
	__builtin_memcpy(answer.message.mac, nic->gateway_mac, ETH_ALEN);
	pseudo[0] = bpf_htonl(sizeof(answer.message));
	pseudo[1] = bpf_htonl(PROTOCOL_ICMPV6);
	sum = bpf_csum_diff(0, 0, pseudo, sizeof(pseudo), 0);
	sum = bpf_csum_diff(0, 0, (__be32 *)&answer.ip.saddr,
			    2 * sizeof(struct address) + sizeof(answer.message), sum);
	answer.message.checksum = ~fold_16(sum);
	if (frame_length(f) != ETH_HLEN + sizeof(answer) &&
	    bpf_skb_change_tail(f, ETH_HLEN + sizeof(answer), 0))
		return DROP_HELPER;
	__builtin_memcpy(head.h_dest, head.h_source, ETH_ALEN);
	__builtin_memcpy(head.h_source, nic->gateway_mac, ETH_ALEN);
	if (frame_store(f, 0, &head, sizeof(head)) ||
	    frame_store(f, ETH_HLEN, &answer, sizeof(answer)))
		return DROP_HELPER;
	return DROP_NONE;
}

/* Turns an echo request into its reply. */
__noinline int answer_echo(frame *f, const struct packet *p)
{
	__u8 type, mac[ETH_ALEN];
	__be16 before, after;
	struct ethhdr *ethernet;

	if (!p)
		return DROP_HELPER;
	type = p->version == 4 ? 0 : 129;
	before = bpf_htons(p->icmp_type << 8);
	after = bpf_htons(type << 8);
	if (frame_fix_checksum(f, p->l4 + 2, fold_32(add_change(0, before, after)),
			       CHECKSUM_PAYLOAD) ||
	    frame_store(f, p->l4, &type, sizeof(type)))
		return DROP_HELPER;
	ethernet = frame_data(f);
	if ((void *)(ethernet + 1) + sizeof(struct iphdr) > frame_end(f))
		return DROP_HELPER;
	__builtin_memcpy(mac, ethernet->h_source, ETH_ALEN);
	__builtin_memcpy(ethernet->h_source, ethernet->h_dest, ETH_ALEN);
	__builtin_memcpy(ethernet->h_dest, mac, ETH_ALEN);
	if (p->version == 4) {
		struct iphdr *ip = (void *)(ethernet + 1);

		if (ip->ttl != 64) {
			__u16 from = bpf_htons(ip->ttl << 8), to = bpf_htons(64 << 8);

			ip->check = changed_checksum(ip->check, (__u16)~from + to);
			ip->ttl = 64;
		}
		ip->saddr = p->destination.word[3];
		ip->daddr = p->source.word[3];
	} else {
		struct ipv6hdr *ip = (void *)(ethernet + 1);

		if ((void *)(ip + 1) > frame_end(f))
			return DROP_HELPER;
		ip->hop_limit = 64;
		__builtin_memcpy(&ip->saddr, &p->destination, sizeof(ip->saddr));
		__builtin_memcpy(&ip->daddr, &p->source, sizeof(ip->daddr));
	}
	return DROP_NONE;
}

#endif

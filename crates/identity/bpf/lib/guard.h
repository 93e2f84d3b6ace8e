/* Packets: counted; and those stopped that the rules for sockets can't stop. */
#ifndef SANDWIRE_IDENTITY_GUARD_H
#define SANDWIRE_IDENTITY_GUARD_H

#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>

#include "owner.h"

/* Addresses and ports of a packet, up to where we look. */
struct packet {
	__u32 source[4];
	__u32 destination[4];
	__u16 source_port;
	__u16 destination_port;
	__u8 protocol;
};

static __always_inline int parse4(struct __sk_buff *skb, struct packet *packet)
{
	struct iphdr ip;

	if (bpf_skb_load_bytes(skb, 0, &ip, sizeof(ip)))
		return 0;
	packet->source[2] = MAPPED;
	packet->source[3] = ip.saddr;
	packet->destination[2] = MAPPED;
	packet->destination[3] = ip.daddr;
	packet->protocol = ip.protocol;
	bpf_skb_load_bytes(skb, ip.ihl * 4, &packet->source_port, 4);
	return 1;
}

static __always_inline int parse6(struct __sk_buff *skb, struct packet *packet)
{
	struct ipv6hdr ip;

	if (bpf_skb_load_bytes(skb, 0, &ip, sizeof(ip)))
		return 0;
	__builtin_memcpy(packet->source, &ip.saddr, 16);
	__builtin_memcpy(packet->destination, &ip.daddr, 16);
	packet->protocol = ip.nexthdr;
	bpf_skb_load_bytes(skb, sizeof(ip), &packet->source_port, 4);
	return 1;
}

/* 0 if it is no IP packet that we understand. */
static __always_inline int parse(struct __sk_buff *skb, struct packet *packet)
{
	__builtin_memset(packet, 0, sizeof(*packet));
	if (skb->protocol == bpf_htons(ETH_P_IP))
		return parse4(skb, packet);
	return skb->protocol == bpf_htons(ETH_P_IPV6) && parse6(skb, packet);
}

static __always_inline void count(struct traffic *traffic, struct __sk_buff *skb)
{
	traffic->packets += skb->gso_segs > 1 ? skb->gso_segs : 1;
	traffic->bytes += skb->len;
}

static __always_inline int is_own_loopback(const struct identity *identity, const __u32 *ip)
{
	return is_mapped(ip) ? is_own_loopback4(identity, ip[3]) :
			       is_same6(ip, identity->loopback6);
}

static __always_inline int is_own(const struct identity *identity, const __u32 *ip)
{
	return is_mapped(ip) ? is_own4(identity, ip[3]) : is_own6(identity, ip);
}

/* What isn't one host's address. */
static __always_inline int is_for_many(const __u32 *ip)
{
	return is_mapped(ip) ? is_multicast4(ip[3]) || ip[3] == bpf_htonl(0xffffffff) :
			       is_multicast6(ip);
}

static __always_inline struct bpf_sock *find_sender(struct __sk_buff *skb,
						    const struct packet *packet)
{
	struct bpf_sock_tuple tuple = {};
	__u32 size = sizeof(tuple.ipv6);

	if (is_mapped(packet->source)) {
		tuple.ipv4.saddr = packet->destination[3];
		tuple.ipv4.daddr = packet->source[3];
		tuple.ipv4.sport = packet->destination_port;
		tuple.ipv4.dport = packet->source_port;
		size = sizeof(tuple.ipv4);
	} else {
		__builtin_memcpy(tuple.ipv6.saddr, packet->destination, 16);
		__builtin_memcpy(tuple.ipv6.daddr, packet->source, 16);
		tuple.ipv6.sport = packet->destination_port;
		tuple.ipv6.dport = packet->source_port;
	}
	if (packet->protocol == IPPROTO_TCP)
		return bpf_sk_lookup_tcp(skb, &tuple, size, BPF_F_CURRENT_NETNS, 0);
	return bpf_sk_lookup_udp(skb, &tuple, size, BPF_F_CURRENT_NETNS, 0);
}

/* Whether the socket that sent a packet to the identity's loopback is the identity's. Its source doesn't say so:
 * anybody on the host may bind to any loopback address. */
static __always_inline int is_from_own(struct __sk_buff *skb, const struct identity *identity,
				       const struct packet *packet)
{
	struct bpf_sock *sender = find_sender(skb, packet);
	const struct socket_state *socket;
	int is_own = 0;

	if (!sender)
		return 0;
	socket = bpf_sk_storage_get(&sockets, sender, 0, 0);
	if (socket)
		is_own = socket->number == identity->number;
	bpf_sk_release(sender);
	return is_own;
}

/* For sockets that take packets from everybody. */
static __always_inline int guard_ingress(struct __sk_buff *skb, const struct identity *identity)
{
	struct packet packet;

	if (!parse(skb, &packet))
		return 1;
	if (is_own_loopback(identity, packet.destination)) {
		if (identity->flags & IDENTITY_ALLOW_LOOPBACK ||
		    is_from_own(skb, identity, &packet))
			return 1;
		count_refusal(REFUSED_INGRESS_LOOPBACK);
		return 0;
	}
	if (is_own(identity, packet.destination) || is_for_many(packet.destination))
		return 1;
	count_refusal(REFUSED_INGRESS_ADDRESS);
	return 0;
}

/* TCP has its source from bind or connect. */
static __always_inline int guard_egress(struct __sk_buff *skb, const struct identity *identity)
{
	struct packet packet;

	if (!parse(skb, &packet) || packet.protocol == IPPROTO_TCP)
		return 1;
	if (is_own(identity, packet.source) || is_own_loopback(identity, packet.source))
		return 1;
	count_refusal(REFUSED_EGRESS_SOURCE);
	return 0;
}

#endif

/* Packets: counted; and those stopped that the rules for sockets can't stop. */
#ifndef SANDWIRE_IDENTITY_GUARD_H
#define SANDWIRE_IDENTITY_GUARD_H

#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>

#include "asked.h"
#include "callers.h"
#include "policy.h"

/* Extension headers that are looked behind. */
#define EXTENSIONS_MAX 6

/* Addresses and ports of a packet, up to where we look. */
struct packet {
	__u32 source[4];
	__u32 destination[4];
	__u16 source_port;
	__u16 destination_port;
	__u8 protocol;
	/* A fragment other than the first. */
	__u8 is_later;
	/* May lead somewhere else than to the destination: IPv4 with options, IPv6 with a routing header. */
	__u8 is_routed;
};

/* 0 if it should have ports, and has none. */
static __always_inline int load_ports(struct __sk_buff *skb, __u32 at, struct packet *packet)
{
	return !bpf_skb_load_bytes(skb, at, &packet->source_port, 4) ||
	       (packet->protocol != IPPROTO_TCP && packet->protocol != IPPROTO_UDP);
}

static __always_inline int is_extension(__u8 protocol)
{
	return protocol == IPPROTO_HOPOPTS || protocol == IPPROTO_DSTOPTS ||
	       protocol == IPPROTO_FRAGMENT || protocol == IPPROTO_ROUTING;
}

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
	packet->is_later = !!(ip.frag_off & bpf_htons(0x1fff));
	packet->is_routed = ip.ihl > 5;
	return packet->is_later || load_ports(skb, ip.ihl * 4, packet);
}

static __always_inline int parse6(struct __sk_buff *skb, struct packet *packet)
{
	__u32 at = sizeof(struct ipv6hdr);
	struct ipv6hdr ip;
	__u8 next[8];

	if (bpf_skb_load_bytes(skb, 0, &ip, sizeof(ip)))
		return 0;
	__builtin_memcpy(packet->source, &ip.saddr, 16);
	__builtin_memcpy(packet->destination, &ip.daddr, 16);
	packet->protocol = ip.nexthdr;
	for (int i = 0; i < EXTENSIONS_MAX; i++) {
		if (!is_extension(packet->protocol))
			break;
		if (bpf_skb_load_bytes(skb, at, next, sizeof(next)))
			return 0;
		packet->is_routed |= packet->protocol == IPPROTO_ROUTING;
		if (packet->protocol == IPPROTO_FRAGMENT) {
			packet->is_later |= next[2] || next[3] & 0xf8;
			at += sizeof(next);
		} else {
			at += (next[1] + 1) * 8;
		}
		packet->protocol = next[0];
	}
	/* What is behind still more of them isn't known. */
	return packet->is_later ||
	       (!is_extension(packet->protocol) && load_ports(skb, at, packet));
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

/* What the relay takes goes by the loopback, too, and isn't for the host. */
static __always_inline int is_for_host(struct __sk_buff *skb)
{
	__u32 mark = skb->mark >> 24;

	return skb->ifindex == LOOPBACK_INTERFACE &&
	       (mark < RELAY_MARK_FIRST || mark > RELAY_MARK_LAST);
}

/* Whom the policy denies, and who calls nevertheless, may be answered. */
static __always_inline void note_if_denied(struct __sk_buff *skb, const struct identity *identity,
					   struct bpf_sock *sk, const struct packet *packet)
{
	struct destination to = {
		.port = bpf_ntohs(packet->source_port),
		.protocol = packet->protocol,
	};

	__builtin_memcpy(&to.address, packet->source, sizeof(to.address));
	if (judge(identity->number, &to, skb->ifindex == LOOPBACK_INTERFACE) != PASSES)
		note_caller(sk, packet->source, packet->source_port);
}

/* Whom a server may have to answer from another address than that which it is bound to. */
static __always_inline void note_if_several(const struct identity *identity, struct bpf_sock *sk,
					    const struct socket_state *socket,
					    const struct packet *packet)
{
	if (identity->flags & IDENTITY_SEVERAL && socket->flags & SOCKET_WILDCARD &&
	    !is_for_many(packet->destination))
		note_asked(sk, identity, packet->source, packet->source_port, packet->destination);
}

/* For all sockets but those of TCP connections. */
static __always_inline int guard_ingress(struct __sk_buff *skb, const struct identity *identity,
					 struct bpf_sock *sk, const struct socket_state *socket)
{
	struct packet packet;

	if (!parse(skb, &packet)) {
		count_refusal(REFUSED_INGRESS_ADDRESS);
		return 0;
	}
	if (is_own_loopback(identity, packet.destination)) {
		/* From the wire, the kernel takes in what is for any address of the host. */
		if (skb->ifindex == LOOPBACK_INTERFACE &&
		    (identity->flags & IDENTITY_ALLOW_LOOPBACK ||
		     is_from_own(skb, identity, &packet)))
			return 1;
		count_refusal(REFUSED_INGRESS_LOOPBACK);
		return 0;
	}
	if (!is_own(identity, packet.destination) && !is_for_many(packet.destination)) {
		count_refusal(REFUSED_INGRESS_ADDRESS);
		return 0;
	}
	if (packet.protocol == IPPROTO_UDP) {
		note_if_denied(skb, identity, sk, &packet);
		note_if_several(identity, sk, socket, &packet);
	}
	return 1;
}

/* Also of sockets that are connected: no program is told when the kernel has exchanged the peer, so what is remembered of
 * one that passed, while another thread sends there, would let the next one pass. */
static __always_inline int may_send(struct __sk_buff *skb, const struct identity *identity,
				    struct bpf_sock *sk, const struct packet *packet)
{
	struct destination to = {
		.port = bpf_ntohs(packet->destination_port),
		.protocol = packet->protocol,
		.is_later = packet->is_later,
	};
	int verdict;

	__builtin_memcpy(&to.address, packet->destination, sizeof(to.address));
	/* Of what is for many, the host's own sockets get a copy. */
	verdict = judge(identity->number, &to,
			is_for_host(skb) || is_for_many(packet->destination));
	if (verdict == PASSES)
		return 1;
	if (packet->protocol == IPPROTO_UDP && !packet->is_later &&
	    has_called(sk, packet->destination, packet->destination_port))
		return 1;
	count_refusal(verdict);
	return 0;
}

/* Whether a foreign source is an own one that the host has translated (SNAT, masquerade), as it does before packets come
 * here. The packet doesn't say so: what says it is that a UDP socket has no other source than bind, connect and sendmsg
 * gave it. */
static __always_inline int is_translated(const struct bpf_sock *sk,
					 const struct socket_state *socket,
					 const struct packet *packet)
{
	__u32 doubt = SOCKET_CONNECTED | SOCKET_UNSURE;

	return sk->type == SOCK_DGRAM && sk->protocol == IPPROTO_UDP &&
	       packet->protocol == IPPROTO_UDP && (socket->flags & doubt) != doubt;
}

/* All but TCP, which has its source from bind or connect, and was judged there. */
static __always_inline int guard_egress(struct __sk_buff *skb, const struct identity *identity,
					struct bpf_sock *sk, const struct socket_state *socket)
{
	struct packet packet;

	if (!parse(skb, &packet) || packet.is_routed ||
	    (!is_own(identity, packet.source) && !is_own_loopback(identity, packet.source) &&
	     !is_translated(sk, socket, &packet))) {
		count_refusal(REFUSED_EGRESS_SOURCE);
		return 0;
	}
	return is_own_loopback(identity, packet.destination) ||
	       may_send(skb, identity, sk, &packet);
}

#endif

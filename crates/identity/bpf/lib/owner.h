/* Whose socket, and whose address. */
#ifndef SANDWIRE_IDENTITY_OWNER_H
#define SANDWIRE_IDENTITY_OWNER_H

#include <linux/in.h>
#include <linux/in6.h>
#include <bpf/bpf_endian.h>

#include "maps.h"

#define AF_INET 2
#define AF_INET6 10

#define SOCK_STREAM 1
#define SOCK_DGRAM 2
#define SOCK_RAW 3

#define ENOMEM 12
#define EPERM 1
#define EACCES 13
#define EPROTONOSUPPORT 93
#define EADDRNOTAVAIL 99
#define ENETUNREACH 101
#define ECONNREFUSED 111

/* A field of a context is written alone: the verifier takes no pointer into the middle of it, which is what the compiler
 * makes of several fields at once. */
#define SET(field, value) (*(volatile __typeof__(field) *)&(field) = (value))

/* The compiler makes one load through a pointer of loads of two fields in two branches, too. This keeps it from that. */
#define LOADED(value) asm volatile("" : "+r"(value))

/* The interface of what is for the host itself: the kernel gives the first namespace's and every other's loopback this
 * number. */
#define LOOPBACK_INTERFACE 1

#define MAPPED bpf_htonl(0xffff)
/* The source that the kernel notes down for IPv4 on a socket that is bound to an IPv6 address: 127.0.0.6. */
#define NO_IPV4_SOURCE bpf_htonl(0x7f000006)

static __always_inline struct identity *active_identity(void)
{
	struct identity *identity = bpf_get_local_storage(&identities, 0);

	return identity->flags & IDENTITY_ACTIVE ? identity : 0;
}

static __always_inline void count_refusal(enum refusal refusal)
{
	struct counters *found = bpf_get_local_storage(&counters, 0);

	/* The verifier knows of a verdict only that it is a number. */
	found->refusals[refusal & (REFUSALS_MAX - 1)]++;
}

/* For hooks that can name an error. */
static __always_inline int refuse(enum refusal refusal, int error)
{
	count_refusal(refusal);
	bpf_set_retval(-error);
	return 0;
}

static __always_inline int is_loopback4(__u32 ip)
{
	return (ip & bpf_htonl(0xff000000)) == bpf_htonl(0x7f000000);
}

static __always_inline int is_multicast4(__u32 ip)
{
	return (ip & bpf_htonl(0xf0000000)) == bpf_htonl(0xe0000000);
}

static __always_inline __u32 network24(__u32 ip)
{
	return ip & bpf_htonl(0xffffff00);
}

/* 127.0.0.X, that applications know, and 127.A.B.X, that the kernel knows. */
static __always_inline int is_common_loopback4(__u32 ip)
{
	return network24(ip) == bpf_htonl(0x7f000000);
}

static __always_inline __u32 to_own_loopback4(const struct identity *identity, __u32 ip)
{
	return identity->loopback4 | (ip & bpf_htonl(0xff));
}

static __always_inline __u32 to_common_loopback4(__u32 ip)
{
	return bpf_htonl(0x7f000000) | (ip & bpf_htonl(0xff));
}

static __always_inline int is_own_loopback4(const struct identity *identity, __u32 ip)
{
	return network24(ip) == identity->loopback4;
}

static __always_inline int is_any6(const __u32 *ip)
{
	return !(ip[0] | ip[1] | ip[2] | ip[3]);
}

static __always_inline int is_loopback6(const __u32 *ip)
{
	return !(ip[0] | ip[1] | ip[2]) && ip[3] == bpf_htonl(1);
}

static __always_inline int is_mapped(const __u32 *ip)
{
	return !(ip[0] | ip[1]) && ip[2] == MAPPED;
}

/* From whom a connection comes. */
static __always_inline void set_remote(struct bpf_sk_lookup *ctx, struct address *address)
{
	__u32 ip;

	if (ctx->family == AF_INET) {
		ip = ctx->remote_ip4;
		LOADED(ip);
		address->words[2] = MAPPED;
		address->words[3] = ip;
	} else {
		address->words[0] = ctx->remote_ip6[0];
		address->words[1] = ctx->remote_ip6[1];
		address->words[2] = ctx->remote_ip6[2];
		address->words[3] = ctx->remote_ip6[3];
	}
}

static __always_inline int is_multicast6(const __u32 *ip)
{
	return (ip[0] & bpf_htonl(0xff000000)) == bpf_htonl(0xff000000);
}

static __always_inline int is_same6(const __u32 *one, const __u32 *other)
{
	return one[0] == other[0] && one[1] == other[1] && one[2] == other[2] && one[3] == other[3];
}

/* A peer as it stands in `known`: its family and its port as in packets. */
static __always_inline __u32 known_as(__u32 family, __u32 port)
{
	return family << 16 | (port & 0xffff);
}

static __always_inline int knows(const struct socket_state *socket, __u32 known)
{
	for (int i = 0; i < KNOWN_MAX; i++) {
		if (socket->known[i] == known)
			return 1;
	}
	return 0;
}

static __always_inline int is_of(const struct identity *identity, const struct address *address)
{
	const struct owner *owner = bpf_map_lookup_elem(&addresses, address);

	return owner && owner->number == identity->number;
}

/* Any of the identity's addresses but its loopback. */
static __always_inline int is_own4(const struct identity *identity, __u32 ip)
{
	struct address address = {.words = {0, 0, MAPPED, ip}};

	return ip == identity->ipv4 || is_of(identity, &address);
}

/* Any of the identity's addresses, also its loopback. */
static __always_inline int is_own6(const struct identity *identity, const __u32 *ip)
{
	struct address address = {.words = {ip[0], ip[1], ip[2], ip[3]}};

	return is_same6(ip, identity->ipv6) || is_of(identity, &address);
}

#endif

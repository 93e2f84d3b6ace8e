/* Checksums that a sender leaves to be finished: where they are is the sender's word.
 *
 * A guest says so in the virtio-net header, who has packet sockets in theirs, and the kernel only looks whether the
 * place is inside the packet. It writes there when the packet leaves, after all else: into addresses and ports, if
 * that were let be, and what it writes follows from bytes that the sender chooses. */
#ifndef SANDWIRE_UNFINISHED_H
#define SANDWIRE_UNFINISHED_H

#include "nat.h"

#define EINVAL 22

/* Whether this kernel answers as is expected below. Set by the loader. */
const volatile __u8 tells_unfinished = 1;

/* No field of a packet tells. A checksum that nobody has looked at can be declared right, and that be taken back; one
 * that is unfinished can't, and neither can a sum of the whole packet, which can be changed instead. */
static __always_inline int is_unfinished(struct __sk_buff *skb)
{
	if (!tells_unfinished)
		return 0;
	bpf_csum_level(skb, BPF_CSUM_LEVEL_INC);
	if (bpf_csum_level(skb, BPF_CSUM_LEVEL_QUERY) >= 0) {
		bpf_csum_level(skb, BPF_CSUM_LEVEL_DEC);
		return 0;
	}
	return bpf_csum_update(skb, 0) < 0;
}

/* Where the last byte of the packet's own checksum is, or of the least that may be written instead: a tunnel's packet
 * has an unfinished one further in. */
static __always_inline __u32 last_of_checksum(const struct packet *p)
{
	if (p->fragment == FRAGMENT_LATER)
		return p->l4 + 1;
	return p->l4 + 1 + (p->icmp_kind ? 2 : checksum_place(p->version, p->protocol));
}

/* Whether an unfinished checksum lies before the packet's own. The kernel takes off no tail that one is in: that it
 * refuses to is how it should be, and leaves the packet as it is. */
static __always_inline int is_forged(struct __sk_buff *skb, struct packet *p)
{
	p->unfinished = is_unfinished(skb);
	return p->unfinished && bpf_skb_change_tail(skb, last_of_checksum(p), 0) != -EINVAL;
}

#endif

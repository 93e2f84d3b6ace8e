/* Whether the kernel's routes depend on ports: by rules that name them, or among several next hops. */
#ifndef SANDWIRE_PORTS_H
#define SANDWIRE_PORTS_H

#include "parse.h"

/* The sysctl fib_multipath_hash_policy: by addresses alone. */
#define MULTIPATH_BY_ADDRESSES 0

/* Set by the loader, from the types that the kernel tells of itself. */
const volatile struct netns_places netns_places = {};

/* Asked once for a decision, so it may cost something. What can't be read is taken to depend on ports. No rule can be
 * added unseen: decisions are kept no longer than those of other routes. */
static __noinline int routes_have_ports(frame *f, __u32 version)
{
	__u32 rules_at = version == 4 ? netns_places.rules4 : netns_places.rules6;
	__u32 multipath_at = version == 4 ? netns_places.multipath4 : netns_places.multipath6;
	void *device = 0, *netns = 0;
	__u8 multipath = 0;
	__u32 rules = 0;

	if (!netns_places.device)
		return 1;
	if (bpf_probe_read_kernel(&device, sizeof(device), (void *)f + netns_places.device) ||
	    bpf_probe_read_kernel(&netns, sizeof(netns), device + netns_places.netns) ||
	    bpf_probe_read_kernel(&rules, sizeof(rules), netns + rules_at) ||
	    bpf_probe_read_kernel(&multipath, sizeof(multipath), netns + multipath_at))
		return 1;
	return rules || multipath != MULTIPATH_BY_ADDRESSES;
}

#endif

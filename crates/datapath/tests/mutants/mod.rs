//! Faults put into the programs on purpose. The differential test must see every one of them, or it
//! would not see such a fault made by mistake either.

use std::{
    fs,
    path::{Path, PathBuf},
};

use sandwire_bpf_compiler::Compiler;

/// A fault: a text of a file of `bpf/` replaced by another.
pub(crate) struct Mutant {
    pub(crate) name: &'static str,
    file: &'static str,
    text: &'static str,
    instead: &'static str,
    /// Classes that are likely to see it, tried first.
    pub(crate) classes: &'static [&'static str],
}

const fn mutant(
    name: &'static str,
    file: &'static str,
    text: &'static str,
    instead: &'static str,
    classes: &'static [&'static str],
) -> Mutant {
    Mutant {
        name,
        file,
        text,
        instead,
        classes,
    }
}

/// The faults by name.
pub(crate) const MUTANTS: &[Mutant] = &[
    mutant(
        "transport checksum not fixed",
        "lib/nat.h",
        "fix_checksum(f, p, p->l4 + place, change)",
        "0",
        &["tcp"],
    ),
    mutant(
        "transport checksum fixed in later fragments",
        "lib/nat.h",
        "if (sum && p->fragment != FRAGMENT_LATER) {",
        "if (sum) {",
        &["fragment-later"],
    ),
    mutant(
        "zero checksum of UDP made a number",
        "lib/hook_tc.h",
        "if (kind == CHECKSUM_UDP)",
        "if (0)",
        &["udp-no-checksum"],
    ),
    mutant(
        "packet inside an ICMP error left as it is",
        "lib/nat.h",
        "same_address(&q.destination, &p->source) && !same_address(&p->source, &t->source)",
        "0",
        &["icmp-error"],
    ),
    mutant(
        "zero checksum of UDP inside an ICMP error made a number",
        "lib/nat.h",
        "if (q->protocol == PROTOCOL_UDP && !old)",
        "if (0)",
        &["icmp-error", "ingress-icmp-error"],
    ),
    mutant(
        "what a table leads elsewhere is the host's all the same",
        "lib/decide.h",
        "if (is_hosts && !may_reach_host(p, policy)) {",
        "if (0) {",
        &["host-service"],
    ),
    mutant(
        "the host gets what has no hop left past it",
        "from_guest.bpf.c",
        "if (d->flags & DECISION_PAST_HOST)",
        "if (0)",
        &["host-service"],
    ),
    mutant(
        "what a table refuses goes by another",
        "lib/decide.h",
        "} else if (!is_hosts && d->verdict == VERDICT_STACK &&",
        "} else if (0 && d->verdict == VERDICT_STACK &&",
        &["udp", "tcp"],
    ),
    mutant(
        "what is too big for a table's uplink goes by another",
        "from_guest.bpf.c",
        "d->flags & DECISION_PAST_RULES && p->ttl > 1",
        "0",
        &["mtu"],
    ),
    mutant(
        "what the namespace says on its link taken for a process",
        "from_guest.bpf.c",
        "s->is_process = 1;",
        "s->is_process = 1, note_process(s);",
        &["process"],
    ),
    mutant(
        "wrong reason for a wrong source address",
        "lib/antispoof.h",
        "return is_link ? DROP_NONE : DROP_SOURCE_ADDRESS;",
        "return is_link ? DROP_NONE : DROP_SOURCE_MAC;",
        &["spoofed-address"],
    ),
    mutant(
        "nine extension headers instead of eight",
        "lib/parse.h",
        "#define EXTENSIONS_MAX 8",
        "#define EXTENSIONS_MAX 9",
        &["ipv6-extension-chain"],
    ),
    mutant(
        "extension headers followed beyond the packet",
        "lib/parse.h",
        "if (offset + length > end)",
        "if (0)",
        &["ipv6-extension-bad"],
    ),
    mutant(
        "what sandboxes send each other remembered",
        "lib/answers.h",
        "if (!opens || bpf_map_lookup_elem(&clones, &key.peer))",
        "if (!opens)",
        &["from-host"],
    ),
    mutant(
        "source route let through",
        "lib/parse.h",
        "option == OPTION_LOOSE_ROUTE || option == OPTION_STRICT_ROUTE",
        "option == OPTION_LOOSE_ROUTE",
        &["ipv4-options"],
    ),
    mutant(
        "routing header with hops left let through",
        "lib/parse.h",
        "if (next == PROTOCOL_ROUTING && header[3])",
        "if (0)",
        &["ipv6-extension-bad"],
    ),
    mutant(
        "TCP fragment at offset 1 let through",
        "lib/parse.h",
        "(place & IPV4_OFFSET) == 1",
        "0",
        &["fragment-offset-1"],
    ),
    mutant(
        "TTL kept",
        "lib/nat.h",
        "ip->ttl = p->ttl - 1;",
        "ip->ttl = p->ttl;",
        &["tcp"],
    ),
    mutant(
        "TTL of one forwarded",
        "from_guest.bpf.c",
        "(p->ttl <= 1 ||",
        "(!p->ttl ||",
        &["ttl"],
    ),
    mutant(
        "IPv4 header checksum not fixed",
        "lib/nat.h",
        "\tif (change)\n\t\tip->check = changed_checksum(ip->check, change);",
        "",
        &["udp"],
    ),
    mutant(
        "any IPv6 source believed",
        "lib/antispoof.h",
        "return same_address(&p->source, s->is_process ? &nic->clone6 : &nic->guest6);",
        "return 1;",
        &["spoofed-address"],
    ),
    mutant(
        "ARP answered for anybody",
        "lib/link.h",
        "arp->operation == bpf_htons(ARP_REQUEST) && target == nic->gateway4",
        "arp->operation == bpf_htons(ARP_REQUEST)",
        &["arp"],
    ),
    mutant(
        "hop limit of neighbour discovery not looked at",
        "lib/link.h",
        "if (p->ttl != NDP_HOP_LIMIT || p->fragment)",
        "if (p->fragment)",
        &["neighbour-solicitation", "neighbour-others"],
    ),
    mutant(
        "policy's default inverted",
        "lib/policy.h",
        "policy_flags & POLICY_ALLOW ? DROP_NONE : DROP_POLICY",
        "policy_flags & POLICY_ALLOW ? DROP_POLICY : DROP_NONE",
        &["policy"],
    ),
    mutant(
        "last port of a rule left out",
        "lib/policy.h",
        "port <= rule->last",
        "port < rule->last",
        &["policy"],
    ),
    mutant(
        "groups not compared",
        "lib/policy.h",
        "from->group == to->group && policy_flags & POLICY_SAME_GROUP",
        "policy_flags & POLICY_SAME_GROUP",
        &["groups"],
    ),
    mutant(
        "limit asked after the packet's own cost is added",
        "lib/police.h",
        "bytes = excess(READ_ONCE(meter->bytes), now, limit->byte_burst);",
        "bytes = excess(READ_ONCE(meter->bytes) + (p->wire_bytes * limit->byte_cost >> 20), now, \
         limit->byte_burst);",
        &["byte-limit"],
    ),
    mutant(
        "what is paid ahead charged to nobody",
        "lib/police.h",
        "return ahead - left;",
        "return 0;",
        &["byte-limit", "packet-limit"],
    ),
    mutant(
        "what is paid ahead never spent",
        "lib/police.h",
        "own->bytes -= bytes;",
        "",
        &["byte-limit"],
    ),
    mutant(
        "paid ahead by another policy",
        "lib/police.h",
        "own->bytes > ahead_of(limit->byte_burst) ||",
        "",
        &["byte-limit", "packet-limit"],
    ),
    mutant(
        "paid ahead where the time to leave counts",
        "lib/police.h",
        "departure ? 0 : own_credit(nic, direction)",
        "own_credit(nic, direction)",
        &["byte-limit", "packet-limit"],
    ),
    mutant(
        "super-packets charged as one packet",
        "lib/police.h",
        "p->segments * limit->packet_cost",
        "limit->packet_cost",
        &["packet-limit"],
    ),
    mutant(
        "super-packets counted as one segment",
        "lib/count.h",
        "traffic->segments += segments;",
        "traffic->segments += 1;",
        &["mtu", "from-uplink"],
    ),
    mutant(
        "all interfaces counted at the first",
        "lib/count.h",
        "processor * nics_max + nic",
        "processor * nics_max",
        &["groups", "segments"],
    ),
    mutant(
        "what comes counted as what leaves",
        "lib/count.h",
        "count_traffic(&own->ingress, bytes, segments);",
        "count_traffic(&own->egress, bytes, segments);",
        &["from-uplink"],
    ),
    mutant(
        "size of a super-packet taken for that of its segments",
        "lib/parse.h",
        "p->largest = size + headers - ETH_HLEN;",
        "p->largest = p->length;",
        &["mtu"],
    ),
    mutant(
        "segments that the kernel keeps apart taken for one",
        "lib/parse.h",
        "p->segments = frame_gso_segments(f);",
        "p->segments = 1;",
        &["sctp-super-packet"],
    ),
    mutant(
        "each of SCTP's segments without its header",
        "lib/parse.h",
        "headers += SCTP_HEADER_LENGTH;",
        "headers += 0;",
        &["sctp-super-packet"],
    ),
    mutant(
        "size of segments that the kernel keeps apart taken for a length",
        "lib/parse.h",
        "if (size == GSO_BY_FRAGS && frame_gso_segments(f)) {",
        "if (0) {",
        &["sctp-super-packet", "ingress-sctp-super-packet"],
    ),
    mutant(
        "segments that nobody has counted believed",
        "lib/parse.h",
        "if (size == GSO_BY_FRAGS && frame_gso_segments(f)) {",
        "if (size == GSO_BY_FRAGS) {",
        &["sctp-super-packet", "ingress-sctp-super-packet"],
    ),
    mutant(
        "bytes behind the IP packet taken for none",
        "lib/parse.h",
        "p->largest = p->bytes - ETH_HLEN;",
        "p->largest = p->length;",
        &["mtu"],
    ),
    mutant(
        "decision kept over a change of policy",
        "lib/route.h",
        "d->generation == generation",
        "generation",
        &["policy-change"],
    ),
    mutant(
        "decision on a whole packet used for later fragments",
        "lib/route.h",
        "p->fragment == FRAGMENT_LATER ? VARIANT_LATER_FRAGMENT : 0",
        "0",
        &["same-flow"],
    ),
    mutant(
        "decision for all ports where a policy names some",
        "lib/decide.h",
        "p->any_port && found && found->list",
        "0",
        &["same-flow"],
    ),
    mutant(
        "decision for all ports where the host's services have some",
        "lib/policy.h",
        "policy->service_count && !(policy->flags & POLICY_HOST_ALL)",
        "0",
        &["same-flow", "host-service"],
    ),
    mutant(
        "answers that never expire",
        "lib/answers.h",
        "if (!known || !is_alive(known, value.lease, key.protocol, now))\n\t\treturn 0;",
        "if (!known)\n\t\treturn 0;",
        &["answer"],
    ),
    mutant(
        "answers to what the last lease was asked",
        "lib/answers.h",
        "answer->lease == lease && ",
        "",
        &["answer"],
    ),
    mutant(
        "datagrams that a policy denies since go on as answers",
        "lib/answers.h",
        "if (denied && known->own)",
        "if (denied > 1 && known->own)",
        &["answer"],
    ),
    mutant(
        "datagrams that a policy denies since kept alive from outside",
        "lib/answers.h",
        "if (known->own && !may_send_back(p, nic))",
        "if (0)",
        &["answer-after-question"],
    ),
    mutant(
        "datagrams from whom the sandbox may send to counted as calls",
        "lib/answers.h",
        "value.own = p->protocol == PROTOCOL_UDP && may_send_back(p, nic);",
        "",
        &["answer-after-question"],
    ),
    mutant(
        "what is forwarded judged as the host's own",
        "to_guest.bpf.c",
        "packet.from_host = !skb->ingress_ifindex;",
        "packet.from_host = 1;",
        &["answer-after-question"],
    ),
    mutant(
        "questions passed over whose flow was looked at of late",
        "lib/answers.h",
        "if (!opens && was_noted",
        "if (was_noted",
        &["answer-after-question"],
    ),
    mutant(
        "answers never renewed",
        "lib/answers.h",
        "if (!opens && was_noted(&key, now))",
        "if (!opens)",
        &["answer-after-question"],
    ),
    mutant(
        "answers that expired renewed by any packet",
        "lib/answers.h",
        "if (!known || !is_alive(known, value.lease, key.protocol, now)) {",
        "if (!known) {",
        &["answer-after-question"],
    ),
    mutant(
        "answers of published ports sent by the uplink",
        "lib/forward.h",
        "if (c->verdict == VERDICT_UPLINK)\n\t\treturn flags & NIC_PUBLISHED || c->policy->table;",
        "",
        &["published"],
    ),
    mutant(
        "calls of published ports not remembered",
        "lib/deliver.h",
        "policy->flags & POLICY_ANSWERS || r->flags & NIC_PUBLISHED",
        "policy->flags & POLICY_ANSWERS",
        &["published"],
    ),
    mutant(
        "answers looked for though nothing is published",
        "lib/forward.h",
        "return flags & NIC_PUBLISHED || c->policy->table;",
        "return 1;",
        &["answer", "published"],
    ),
    mutant(
        "answers to the host sent where a table leads",
        "lib/forward.h",
        "flags & NIC_PUBLISHED || c->policy->table",
        "flags & NIC_PUBLISHED",
        &["answer", "answer-after-question"],
    ),
    mutant(
        "any number of segments left to the host",
        "from_guest.bpf.c",
        "packet.segments > SEGMENTS_MAX",
        "0",
        &["segments"],
    ),
    mutant(
        "later fragments let through for another answer's",
        "lib/answers.h",
        "known->fragment != fragment_rest(p)",
        "0",
        &["answer", "published"],
    ),
    mutant(
        "any SYN opens the way back",
        "lib/parse.h",
        "(rest[1] & 0x12) == 0x02",
        "(rest[1] & 0x02) != 0",
        &["answer-after-question"],
    ),
    mutant(
        "sandboxes believed to be outside",
        "to_guest.bpf.c",
        "if (bpf_map_lookup_elem(&clones, &packet.source))",
        "if (0)",
        &["from-uplink-spoofed"],
    ),
    mutant(
        "DHCP servers let through",
        "lib/antispoof.h",
        "return DROP_ROGUE_DHCP;",
        ";",
        &["rogue-dhcp"],
    ),
    mutant(
        "the relay's routing rules alone asked",
        "lib/decide.h",
        "int is_relayed = is_for_relay(p, nic);",
        "int is_relayed = 0;",
        &["policy", "ttl"],
    ),
    mutant(
        "a table of the policy's own before the relay",
        "lib/decide.h",
        "__u32 table = is_relayed ? 0 : policy->table;",
        "__u32 table = policy->table;",
        &["policy", "ttl"],
    ),
    mutant(
        "all protocols led to the relay",
        "lib/decide.h",
        "list->rules[i].protocol == p->protocol)",
        "1)",
        &["policy", "ttl"],
    ),
    mutant(
        "sources of IPv6 that stand for IPv4 taken",
        "lib/parse.h",
        "if (rarely(is_mapped(&p->source)))",
        "if (0)",
        &["from-uplink"],
    ),
    mutant(
        "departure time not set",
        "from_guest.bpf.c",
        "if (rarely(c->departure))",
        "if (0)",
        &["byte-limit", "packet-limit"],
    ),
    mutant(
        "mark not set",
        "from_guest.bpf.c",
        "if (c->policy->mark)",
        "if (0)",
        &["policy", "ttl"],
    ),
    mutant(
        "later fragments of an answer denied",
        "lib/answers.h",
        "if (p->fragment == FRAGMENT_FIRST) {",
        "if (0) {",
        &["answer"],
    ),
    mutant(
        "ICMP errors about what somebody else has sent",
        "lib/answers.h",
        "|| !same_address(&q.source, &p->destination)",
        "",
        &["answer"],
    ),
    mutant(
        "size for the receiver not looked at",
        "to_guest.bpf.c",
        "if (is_longer(skb, &packet, receiver.nic->mtu, receiver.nic->ifindex))",
        "if (0)",
        &["ingress-mtu"],
    ),
    mutant(
        "a child reaches a sibling that it may not",
        "child.bpf.c",
        "if (!may_reach_sandbox(nic, target, policy_flags))",
        "if (0)",
        &["child-sibling"],
    ),
    mutant(
        "a child hears a sibling that may not reach it",
        "child.bpf.c",
        "if (!policy || !may_reach_sandbox(sender, r->nic, policy->flags))",
        "if (!policy)",
        &["child-sibling"],
    ),
    mutant(
        "what answers a call leaves past the relay",
        "child.bpf.c",
        "reason = clone ? DROP_NONE : judge_redirects(p);",
        "reason = clone || reason ? DROP_NONE : judge_redirects(p);",
        &["child-redirect"],
    ),
    mutant(
        "the host reached by the MAC that it shares",
        "child.bpf.c",
        "return s->flags & NIC_SHARED_MAC &&",
        "return 0 &&",
        &["child-egress"],
    ),
    mutant(
        "a child's multicast let out",
        "child.bpf.c",
        "reason = is_to_many(skb) ? DROP_MULTICAST : judge_destination(&packet);",
        "reason = judge_destination(&packet);",
        &["child-egress"],
    ),
    mutant(
        "a child speaks for the address of its parent",
        "lib/neighbours.h",
        "return !(READ_ONCE(nic->flags) & NIC_SHARED_MAC) &&",
        "return",
        &["child-link"],
    ),
    mutant(
        "membership from beyond the link",
        "lib/neighbours.h",
        "return p->ttl == MLD_HOP_LIMIT ? DROP_NONE : DROP_NEIGHBOUR;",
        "return DROP_NONE;",
        &["child-link"],
    ),
    mutant(
        "advertisements from beyond the link heard",
        "lib/neighbours.h",
        "if (!p->icmp_kind || p->ttl != NDP_HOP_LIMIT)",
        "if (!p->icmp_kind)",
        &["child-neighbours"],
    ),
    mutant(
        "any ICMP reaches the host",
        "lib/policy.h",
        "(p->icmp_kind == ICMP_REQUEST || p->fragment == FRAGMENT_LATER)",
        "1",
        &["host-service"],
    ),
];

/// Stages that only children have.
const OF_CHILDREN: [&str; 1] = ["lib/neighbours.h"];

/// A fault that only packets with an unfinished checksum show.
#[allow(dead_code, reason = "for the test with real TAPs")]
pub(crate) const PARTIAL: Mutant = mutant(
    "unfinished checksum taken for a finished one",
    "lib/hook_tc.h",
    "flags = BPF_F_PSEUDO_HDR;",
    "flags = 0;",
    &[],
);

/// A fault that only packets show for whose checksum another place is named.
#[allow(dead_code, reason = "for the test with real TAPs")]
pub(crate) const TRUSTING: Mutant = mutant(
    "checksums written wherever the guest says",
    "lib/unfinished.h",
    "return p->unfinished && p->unfinished < end_of_checksum(p);",
    "return 0;",
    &[],
);

/// A fault that only packets whose payload isn't linear show.
#[allow(dead_code, reason = "for the test with real TAPs")]
pub(crate) const GREEDY: Mutant = mutant(
    "payload made linear",
    "lib/hook_tc.h",
    "#define FRAME_HEADERS4 54",
    "#define FRAME_HEADERS4 74",
    &[],
);

/// No fault: programs as a version had them that lacks a map of this one.
#[allow(dead_code, reason = "for the test with real TAPs")]
pub(crate) const OLDER: Mutant = mutant(
    "older than a map",
    "lib/trace.h",
    "count_lost(nic);",
    "",
    &[],
);

/// Puts a fault into a copy of the programs and compiles them. Returns the folder of the objects.
///
/// # Errors
/// The text to replace isn't there, or the result doesn't compile: then the fault must be put
/// otherwise.
pub(crate) fn compile(mutant: &Mutant) -> Result<PathBuf, String> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join("mutants")
        .join(mutant.name.replace(' ', "-"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("bpf");
    for sub in ["", "lib"] {
        copy(&source.join(sub), &folder.join(sub)).map_err(|error| error.to_string())?;
    }
    let path = folder.join(mutant.file);
    let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", mutant.file))?;
    if !text.contains(mutant.text) {
        return Err(format!("{} doesn't contain {:?}", mutant.file, mutant.text));
    }
    let text = text.replacen(mutant.text, mutant.instead, 1);
    fs::write(&path, text).map_err(|error| error.to_string())?;
    for object in ["from_guest", "to_guest", "child"] {
        // What the fault isn't in is as the build script made it. Of the stages that children share with others, one
        // of them is enough to show a fault.
        let is_of_stages = mutant.file.starts_with("lib/");
        let is_childs = OF_CHILDREN.contains(&mutant.file);
        if mutant.file.starts_with(object) || (is_of_stages && (object == "child") == is_childs) {
            run_clang(&folder, object)?;
        } else {
            let object = format!("{object}.o");
            let built = Path::new(env!("OUT_DIR")).join(&object);
            fs::copy(built, folder.join(&object)).map_err(|error| error.to_string())?;
        }
    }
    Ok(folder)
}

fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        if let (true, Some(name)) = (path.is_file(), path.file_name()) {
            fs::copy(&path, to.join(name))?;
        }
    }
    Ok(())
}

/// As the build script does it, but a fault may leave something unused.
fn run_clang(folder: &Path, object: &str) -> Result<(), String> {
    let headers = format!("-I{}", folder.join("lib").display());
    let source = folder.join(format!("{object}.bpf.c"));
    let object = folder.join(format!("{object}.o"));
    Compiler::find()
        .and_then(|compiler| compiler.compile(&source, &object, &[&headers, "-w"]))
        .map_err(|error| error.to_string())
}

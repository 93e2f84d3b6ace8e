//! What the programs share with the daemon: the mirror of `bpf/lib/abi.h`, where each field is explained.
//!
//! The tests compile that header and compare the BTF of the result with what is declared here: every
//! size, offset, number and limit.

#[macro_use]
mod declare;
mod plain;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

#[cfg(test)]
pub(crate) use declare::{Field, Layout, Numbers};
pub use plain::Plain;

/// Version of structs and maps. A change that others would misread needs a new one.
pub const ABI_VERSION: u32 = 1;
/// Host services that one policy may list.
pub const SERVICES_MAX: usize = 16;
/// Rules that one prefix may have, with those of the prefixes around it.
pub const RULES_MAX: usize = 32;
/// Room for reasons of drops.
pub const DROP_REASONS_MAX: usize = 48;
/// Entries of the map of [`Decision`]s that a processor has.
pub const DECISIONS_MAX: usize = 4096;
/// The same of a processor that came after the maps were made.
pub const DECISIONS_LATER: usize = 2;
/// Neighbours that one NIC may have the host look for in four seconds.
pub const NEIGHBOURS_MAX: usize = 32;
/// Addresses that tell of links, of one NIC.
pub const SAMPLES_MAX: usize = 4;
/// Bytes of `struct sk_buff` that [`SkbPlaces`] may span.
pub const SKB_SPAN_MAX: usize = 96;
/// Stands in a call for the kernel's number of `bpf_cast_to_kern_ctx`.
pub(crate) const SKB_CAST: usize = 0x7377_6b63;
/// Bytes of a packet that a trace event carries.
pub const TRACE_BYTES: usize = 192;
/// Interfaces of one sandbox.
pub const NICS_PER_SLOT: u8 = 8;

/// The constants of the header, with their names there.
#[cfg(test)]
pub(crate) const CONSTANTS: &[(&str, usize)] = &[
    ("ABI_VERSION", ABI_VERSION as usize),
    ("SERVICES_MAX", SERVICES_MAX),
    ("RULES_MAX", RULES_MAX),
    ("DROP_REASONS_MAX", DROP_REASONS_MAX),
    ("DECISIONS_MAX", DECISIONS_MAX),
    ("NEIGHBOURS_MAX", NEIGHBOURS_MAX),
    ("SAMPLES_MAX", SAMPLES_MAX),
    ("DECISIONS_LATER", DECISIONS_LATER),
    ("SKB_SPAN_MAX", SKB_SPAN_MAX),
    ("SKB_CAST", SKB_CAST),
    ("TRACE_BYTES", TRACE_BYTES),
    ("NICS_PER_SLOT", NICS_PER_SLOT as usize),
];

enums! {
    /// Where a NIC is in its life.
    NicState = "nic_state" {
        /// Nobody's.
        Absent = 0 "NIC_ABSENT",
        /// Built, not leased: every packet is dropped.
        Ready = 1 "NIC_READY",
        /// Leased.
        Active = 2 "NIC_ACTIVE",
    }
    /// Flags of a NIC.
    NicFlag = "nic_flag" {
        /// The host end is a veth whose other end is in the slot's namespace.
        Netns = 1 "NIC_NETNS",
        /// The sandbox is a process in that namespace, not behind a TAP.
        Process = 2 "NIC_PROCESS",
        /// Somebody watches.
        Trace = 4 "NIC_TRACE",
        /// Just moved here from nft: any packet towards it may open an answer.
        Learn = 8 "NIC_LEARN",
        /// Frames of the TAP provably have complete checksums and no GSO.
        Xdp = 16 "NIC_XDP",
        /// The host's stack translates ports to it: answers go back that way.
        Published = 32 "NIC_PUBLISHED",
        /// Programs on tc before ours divert its packets, which XDP and the way past the egress of a host end
        /// must leave to them.
        Impaired = 64 "NIC_IMPAIRED",
        /// The host end is one of a pair whose other end is the sandbox's own.
        Peer = 128 "NIC_PEER",
        /// No host end: the sandbox's interface is a child of one of the host's, by whose network alone it is
        /// reached.
        Child = 256 "NIC_CHILD",
        /// Its MAC is that of its parent, and of all its parent's children.
        SharedMac = 512 "NIC_SHARED_MAC",
    }
    /// What leaves the host.
    UplinkMode = "uplink_mode" {
        /// Nothing.
        Deny = 0 "UPLINK_DENY",
        /// Packets with the clone address.
        Route = 1 "UPLINK_ROUTE",
        /// Packets with the host's address, by way of the host's stack.
        Masquerade = 2 "UPLINK_MASQUERADE",
    }
    /// Whether a rule lets packets pass.
    Action = "action" {
        /// They are dropped.
        Deny = 0 "ACTION_DENY",
        /// They pass.
        Allow = 1 "ACTION_ALLOW",
    }
    /// Flags of a policy.
    PolicyFlag = "policy_flag" {
        /// There are prefixes of this policy.
        Prefixes = 1 "POLICY_PREFIXES",
        /// What no rule covers passes.
        Allow = 2 "POLICY_ALLOW",
        /// Every service of the host.
        HostAll = 4 "POLICY_HOST_ALL",
        /// Echo to the host.
        HostIcmp = 8 "POLICY_HOST_ICMP",
        /// Sandboxes of the same group may talk.
        SameGroup = 16 "POLICY_SAME_GROUP",
        /// Pairs of groups are worth a look.
        OtherGroups = 32 "POLICY_OTHER_GROUPS",
        /// Something is denied or masqueraded, so that answers must be remembered.
        Answers = 64 "POLICY_ANSWERS",
        /// Of entry 0 alone: there are destinations that may be reached only by the relay.
        Redirects = 128 "POLICY_REDIRECTS",
    }
    /// Flags of an uplink.
    UplinkFlag = "uplink_flag" {
        /// Its queue honours departure times.
        Fq = 1 "UPLINK_FQ",
        /// It takes frames from XDP.
        Xdp = 2 "UPLINK_XDP",
    }
    /// Flags of a decision.
    DecisionFlag = "decision_flag" {
        /// The interface's queue honours departure times.
        Fq = 1 "DECISION_FQ",
        /// The interface takes frames from XDP.
        Xdp = 2 "DECISION_XDP",
        /// To the stack, to be masqueraded, unless it is an answer.
        Masquerade = 4 "DECISION_MASQUERADE",
        /// Past the stack or not at all: it would be the host's own.
        PastHost = 8 "DECISION_PAST_HOST",
        /// Past the stack or not at all: it would send it by another table.
        PastRules = 16 "DECISION_PAST_RULES",
    }
    /// Which way a packet came whose answers are let through.
    AnswerVia = "answer_via" {
        /// Past an uplink's program.
        Uplink = 1 "ANSWER_UPLINK",
        /// Through the host's stack.
        Stack = 2 "ANSWER_STACK",
    }
    /// What became of a packet.
    Verdict = "verdict" {
        /// Dropped.
        Drop = 0 "VERDICT_DROP",
        /// Left by an uplink.
        Uplink = 1 "VERDICT_UPLINK",
        /// Delivered to another sandbox.
        Sandbox = 2 "VERDICT_SANDBOX",
        /// Handed to the host's own stack.
        Stack = 3 "VERDICT_STACK",
        /// Answered by the path itself.
        Answered = 4 "VERDICT_ANSWERED",
        /// Delivered to the guest.
        Guest = 5 "VERDICT_GUEST",
        /// Not ours; left to the host.
        Pass = 6 "VERDICT_PASS",
    }
    /// Where a verdict fell.
    Stage = "stage" {
        /// Reading the headers.
        Parse = 0 "STAGE_PARSE",
        /// Checking the source.
        Antispoof = 1 "STAGE_ANTISPOOF",
        /// Looking at the policy.
        Policy = 2 "STAGE_POLICY",
        /// Finding the way.
        Route = 3 "STAGE_ROUTE",
        /// Applying the limits.
        Police = 4 "STAGE_POLICE",
        /// Translating addresses.
        Nat = 5 "STAGE_NAT",
        /// Sending it on.
        Redirect = 6 "STAGE_REDIRECT",
    }
    /// Which way a packet goes, as the sandbox sees it.
    Direction = "direction" {
        /// It leaves the sandbox.
        Egress = 0 "DIRECTION_EGRESS",
        /// It reaches the sandbox.
        Ingress = 1 "DIRECTION_INGRESS",
    }
}

structs! {
    /// An address: sixteen bytes in network order, IPv4 as `::ffff:a.b.c.d`.
    Address = "address" {
        /// The bytes, four by four.
        word: [u32; 4],
    }
    /// One interface of a sandbox.
    Nic = "nic" {
        /// See [`NicState`].
        state: u32,
        /// See [`NicFlag`].
        flags: u32,
        /// Index of its policy.
        policy: u32,
        /// Goes up whenever cached decisions no longer hold.
        generation: u32,
        /// Host end: a TAP, or a veth.
        ifindex: u32,
        /// Interface through which the host's own stack sees sandboxes.
        shared_ifindex: u32,
        /// Number of its group.
        group: u32,
        /// Of the guest's interface, in bytes.
        mtu: u32,
        /// The guest's.
        guest_mac: [u8; 6],
        /// The gateway's.
        gateway_mac: [u8; 6],
        /// Of both veth ends; only with [`NicFlag::Netns`].
        veth_mac: [u8; 6],
        /// Of the shared interface.
        shared_mac: [u8; 6],
        /// Network order; zero without IPv4.
        guest4: u32,
        /// Network order; zero without IPv4.
        clone4: u32,
        /// Network order; zero without IPv4.
        gateway4: u32,
        /// Slot number, for adoption.
        slot: u32,
        /// Hash of the pool's name, for adoption.
        pool: u32,
        /// Which interface of its sandbox, from 0.
        position: u8,
        /// How many the sandbox has.
        count: u8,
        /// 1 with IPv6.
        has_ipv6: u8,
        /// Zero.
        reserved: u8,
        /// Zero without IPv6.
        guest6: Address,
        /// Zero without IPv6.
        clone6: Address,
        /// Zero without IPv6.
        gateway6: Address,
        /// Goes up with each lease: what one has opened is closed to the next.
        lease: u32,
        /// Zero.
        reserved_half: u32,
        /// Zero.
        reserved_words: [u64; 9],
    }
    /// Ports of one protocol. Protocol 0 is any, ports 0-65535 are all.
    PortRule = "port_rule" {
        /// 0 any, 6, 17, 1 (also ICMPv6), …
        protocol: u8,
        /// See [`Action`].
        action: u8,
        /// Host order, included.
        first: u16,
        /// Host order, included.
        last: u16,
        /// Zero.
        reserved: u16,
    }
    /// A virtual-scheduling limit. A cost of zero means no limit.
    Limit = "limit" {
        /// Nanoseconds per byte times 2^20.
        byte_cost: u64,
        /// Nanoseconds.
        byte_burst: u64,
        /// Nanoseconds per packet on the wire.
        packet_cost: u64,
        /// Nanoseconds.
        packet_burst: u64,
    }
    /// What a sandbox may do.
    Policy = "policy" {
        /// See [`PolicyFlag`].
        flags: u32,
        /// See [`UplinkMode`].
        uplink: u32,
        /// Firewall mark; 0 none.
        mark: u32,
        /// Routing table to look up; 0 by the host's rules.
        table: u32,
        /// Entries of `services` that count.
        service_count: u32,
        /// Zero.
        reserved: u32,
        /// Services of the host.
        services: [PortRule; SERVICES_MAX],
        /// Of what leaves the sandbox.
        egress: Limit,
        /// Of what reaches it.
        ingress: Limit,
    }
    /// Key of a prefix.
    PrefixKey = "prefix_key" {
        /// 32 for the policy, plus that of the address (IPv4: plus 96).
        prefix_length: u32,
        /// Index of the policy.
        policy: u32,
        /// First address.
        address: Address,
    }
    /// What a prefix means.
    PrefixValue = "prefix_value" {
        /// Index of a list of rules; 0: `action` holds for every port.
        list: u32,
        /// See [`Action`].
        action: u16,
        /// Number of a `DropReason` when denied.
        reason: u16,
    }
    /// First match decides; what none matches falls to the policy's default.
    RuleList = "rule_list" {
        /// Entries of `rules` that count.
        count: u32,
        /// Zero.
        reserved: u32,
        /// In order.
        rules: [PortRule; RULES_MAX],
    }
    /// Whose a clone address is.
    CloneValue = "clone_value" {
        /// Index of the NIC.
        nic: u32,
    }
    /// Two groups that may talk, this way round.
    GroupPair = "group_pair" {
        /// Who sends.
        from: u32,
        /// Who receives.
        to: u32,
    }
    /// An interface that packets may leave by without the host's own stack.
    UplinkValue = "uplink" {
        /// See [`UplinkFlag`].
        flags: u32,
        /// Zero.
        reserved: u32,
    }
    /// Key of a remembered direction.
    AnswerKey = "answer_key" {
        /// Index of the NIC.
        nic: u32,
        /// Network order; zero for ICMP and others.
        peer_port: u16,
        /// Network order; the identifier of an echo.
        guest_port: u16,
        /// Who is answered.
        peer: Address,
        /// Place of a fragmented answer, from one, or zero.
        fragment: u32,
        /// IP protocol.
        protocol: u8,
        /// Zero.
        reserved: [u8; 3],
    }
    /// When and how the packet came whose answers pass.
    AnswerValue = "answer_value" {
        /// `CLOCK_MONOTONIC`, nanoseconds.
        seen: u64,
        /// See [`AnswerVia`].
        via: u8,
        /// 1 if the guest might send there by itself when it came, and so may have begun.
        own: u8,
        /// Of a fragmented answer's identification, what its place doesn't say.
        fragment: u16,
        /// Lease of the interface, when it came.
        lease: u32,
    }
    /// Traffic in one direction.
    Traffic = "traffic" {
        /// As the driver hands them over.
        packets: u64,
        /// Lengths of frames.
        bytes: u64,
        /// As they are on the wire.
        segments: u64,
    }
    /// Counters of a NIC.
    Counters = "counters" {
        /// What left the sandbox. In the map, only what isn't in the ledgers.
        egress: Traffic,
        /// What reached it. Likewise.
        ingress: Traffic,
        /// Dropped packets by number of `DropReason`.
        drops: [u64; DROP_REASONS_MAX],
    }
    /// What one processor has paid ahead by a meter, in nanoseconds of it.
    Credit = "credit" {
        /// Of the limit of bits.
        bytes: u32,
        /// Of the limit of packets.
        packets: u32,
    }
    /// Credits of a NIC.
    Credits = "credits" {
        /// Of what leaves the sandbox.
        egress: Credit,
        /// Of what reaches it.
        ingress: Credit,
    }
    /// What one processor has let through of one NIC; in the daemon's own line, the sum from which it counts.
    Ledger = "ledger" {
        /// What left the sandbox.
        egress: Traffic,
        /// What reached it.
        ingress: Traffic,
        /// The daemon's: lease of the NIC, when it was written. Others: from here on [`Credits`].
        lease: u64,
        /// Zero.
        reserved: u64,
    }
    /// Flows whose answers were looked at of late, by one CPU.
    Noted = "noted" {
        /// Of the hashes.
        secret: u64,
        /// Upper half of the hash, and the moment.
        flows: [u64; 2048],
    }
    /// Neighbours that one NIC had the host look for of late.
    NeighbourShare = "neighbour_share" {
        /// Of the hashes.
        secret: u64,
        /// How many they were.
        next: u64,
        /// Upper half of the hash, and the moment.
        asked: [u64; NEIGHBOURS_MAX],
    }
    /// Addresses to which one NIC has sent by some of the host's interfaces.
    NeighbourSamples = "neighbour_samples" {
        /// By a few bits of the interface's number.
        sent: [Address; SAMPLES_MAX],
    }
    /// What was decided for a destination, kept for a short time by each CPU.
    Decision = "decision" {
        /// Index of the NIC.
        nic: u32,
        /// Of the NIC, when it was decided.
        generation: u32,
        /// Where to.
        destination: Address,
        /// Destination port.
        port: u16,
        /// IP protocol.
        protocol: u8,
        /// Kinds of packets that are decided apart.
        variant: u8,
        /// See [`Verdict`].
        verdict: u16,
        /// Of the interface to leave by.
        mtu: u16,
        /// `CLOCK_MONOTONIC`, nanoseconds.
        until: u64,
        /// Interface to leave by.
        ifindex: u32,
        /// A NIC or a reason.
        target: u32,
        /// Of the frame that leaves.
        source_mac: [u8; 6],
        /// Of the frame that leaves.
        destination_mac: [u8; 6],
        /// See [`DecisionFlag`].
        flags: u32,
    }
    /// Theoretical arrival times, `CLOCK_MONOTONIC` nanoseconds.
    Meter = "meter" {
        /// Of the limit of bits.
        bytes: u64,
        /// Of the limit of packets.
        packets: u64,
    }
    /// Meters of a NIC.
    Meters = "meters" {
        /// Of what leaves the sandbox.
        egress: Meter,
        /// Of what reaches it.
        ingress: Meter,
    }
    /// One packet of a NIC that is traced.
    TraceEvent = "trace_event" {
        /// `CLOCK_MONOTONIC`, nanoseconds.
        time: u64,
        /// Index of the NIC.
        nic: u32,
        /// Interface that it was sent to, or zero.
        target: u32,
        /// Of the frame as it came.
        length: u32,
        /// Bytes in `frame` that count.
        captured: u32,
        /// How many packets it is on the wire.
        segments: u16,
        /// See [`Direction`].
        direction: u8,
        /// See [`Verdict`].
        verdict: u8,
        /// Number of a `DropReason`, or zero.
        reason: u8,
        /// See [`Stage`].
        stage: u8,
        /// Zero.
        reserved: u16,
        /// As it came, before translation.
        frame: [u8; TRACE_BYTES],
    }
    /// Where the kernel's `struct sk_buff` says which checksum of a packet is to be finished. Zeros: that isn't known.
    SkbPlaces = "skb_places" {
        /// Of what is read, in `struct sk_buff`; the others are counted from there.
        first: u16,
        /// From the first of these fields to the end of the last.
        length: u16,
        /// The byte with `ip_summed`.
        state: u16,
        /// The bits of `ip_summed`, all set in a packet with an unfinished checksum (`CHECKSUM_PARTIAL`).
        state_mask: u16,
        /// `csum_start`: from the buffer's head, like `mac_header`.
        checksum_start: u16,
        /// `csum_offset`: from `csum_start`.
        checksum_offset: u16,
        /// `mac_header`.
        mac_header: u16,
    }
    /// Where the kernel says whether its routes depend on ports. Zeros: that isn't known.
    NetnsPlaces = "netns_places" {
        /// `dev` in `struct sk_buff`.
        device: u16,
        /// `nd_net` in `struct net_device`.
        netns: u16,
        /// In `struct net`, for IPv4: how many rules look at protocol or ports, four bytes.
        rules4: u16,
        /// The same for IPv6.
        rules6: u16,
        /// In `struct net`: the sysctl `fib_multipath_hash_policy` of IPv4, one byte.
        multipath4: u16,
        /// The same for IPv6.
        multipath6: u16,
    }
}

impl From<IpAddr> for Address {
    fn from(address: IpAddr) -> Self {
        let octets = match address {
            IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
            IpAddr::V6(address) => address.octets(),
        };
        Self::read(&octets).expect("an address has sixteen bytes")
    }
}

impl From<Ipv4Addr> for Address {
    fn from(address: Ipv4Addr) -> Self {
        IpAddr::from(address).into()
    }
}

impl From<Ipv6Addr> for Address {
    fn from(address: Ipv6Addr) -> Self {
        IpAddr::from(address).into()
    }
}

impl From<Address> for IpAddr {
    fn from(address: Address) -> Self {
        let octets = <[u8; 16]>::try_from(address.bytes());
        Ipv6Addr::from(octets.expect("an address has sixteen bytes")).to_canonical()
    }
}

/// An IPv4 address as the fields whose names end in 4 hold it.
#[must_use]
pub fn network_order(address: Ipv4Addr) -> u32 {
    u32::from_ne_bytes(address.octets())
}

/// The reverse of [`network_order`]; `None` for zero.
#[must_use]
pub fn ipv4_of(field: u32) -> Option<Ipv4Addr> {
    (field != 0).then(|| Ipv4Addr::from(field.to_ne_bytes()))
}

#[cfg(test)]
mod tests;

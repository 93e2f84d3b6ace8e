//! The model's world in the bytes of `bpf/lib/abi.h`: written by hand from that file, so that a
//! mistake in the product's mirror of it can't hide here.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use sandwire_datapath::abi::{self, Plain};

use crate::model::{
    answers::{Answer, Flow, Via},
    world::{Counters, Credit, Limit, Meter, Nic, Policy, PortRule, Prefix, Traffic},
};

/// Length of `struct counters`.
pub(crate) const COUNTERS: usize = 432;
/// Length of `struct ledger`.
pub(crate) const LEDGER: usize = 64;
/// Where a `struct ledger` has its `struct credits`, up to its end.
pub(crate) const CREDITS: usize = 48;
/// Length of `struct meters`.
pub(crate) const METERS: usize = 32;
/// Length of `struct answer_key`.
pub(crate) const ANSWER_KEY: usize = 32;
/// Length of `struct answer_value`.
pub(crate) const ANSWER_VALUE: usize = 16;
/// Length of `struct nic`.
pub(crate) const NIC: usize = 208;

pub(crate) fn number(value: u32) -> [u8; 4] {
    value.to_ne_bytes()
}

/// Sixteen bytes; IPv4 as ::ffff:a.b.c.d.
pub(crate) fn address(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

fn address4(address: Option<IpAddr>) -> [u8; 4] {
    match address {
        Some(IpAddr::V4(address)) => address.octets(),
        _ => Ipv4Addr::UNSPECIFIED.octets(),
    }
}

fn address6(address: Option<IpAddr>) -> [u8; 16] {
    match address {
        Some(IpAddr::V6(address)) => address.octets(),
        _ => Ipv6Addr::UNSPECIFIED.octets(),
    }
}

/// An interface is watched, because the event tells what the return code doesn't; or it takes frames by
/// XDP, which leaves watched ones to tc.
pub(crate) fn nic(nic: &Nic, generation: u32, by_xdp: bool) -> Vec<u8> {
    let flags = u32::from(nic.netns)
        | u32::from(nic.process) << 1
        | u32::from(!by_xdp) << 2
        | u32::from(nic.learn) << 3
        | u32::from(by_xdp && !nic.child) << 4
        | u32::from(nic.published) << 5
        | u32::from(nic.child) << 8
        | u32::from(nic.has_parents_mac) << 9;
    let mut bytes = Vec::new();
    for field in [
        nic.state as u32,
        flags,
        nic.policy as u32,
        generation,
        nic.ifindex,
        nic.shared_ifindex,
        nic.group,
        nic.mtu,
    ] {
        bytes.extend(number(field));
    }
    for mac in [nic.guest_mac, nic.gateway_mac, nic.veth_mac, nic.shared_mac] {
        bytes.extend(mac);
    }
    let v4 = nic.v4.as_ref();
    bytes.extend(address4(v4.map(|own| own.guest)));
    bytes.extend(address4(v4.map(|own| own.clone)));
    bytes.extend(address4(v4.map(|own| own.gateway)));
    bytes.extend(number(nic.slot));
    bytes.extend(number(nic.pool));
    bytes.extend([nic.position, nic.count, u8::from(nic.v6.is_some()), 0]);
    let v6 = nic.v6.as_ref();
    bytes.extend(address6(v6.map(|own| own.guest)));
    bytes.extend(address6(v6.map(|own| own.clone)));
    bytes.extend(address6(v6.map(|own| own.gateway)));
    bytes.extend(number(nic.lease));
    bytes.resize(NIC, 0);
    bytes
}

/// Whether the NIC_PROCESS flag is set in the bytes of a `struct nic`.
pub(crate) fn is_process(nic: &[u8]) -> bool {
    nic[4] & 2 != 0
}

fn port_rule(rule: &PortRule) -> Vec<u8> {
    let mut bytes = vec![rule.protocol, u8::from(rule.allow)];
    for port in [rule.first, rule.last, 0] {
        bytes.extend(port.to_ne_bytes());
    }
    bytes
}

fn limit(limit: &Limit) -> Vec<u8> {
    [
        limit.byte_cost,
        limit.byte_burst,
        limit.packet_cost,
        limit.packet_burst,
    ]
    .iter()
    .flat_map(|field| field.to_ne_bytes())
    .collect()
}

pub(crate) fn policy(policy: &Policy) -> Vec<u8> {
    let flags = [
        !policy.prefixes.is_empty(),
        policy.allow,
        policy.host_all,
        policy.host_icmp,
        policy.same_group,
        policy.other_groups,
        policy.answers,
    ];
    let flags = flags
        .iter()
        .enumerate()
        .map(|(bit, set)| u32::from(*set) << bit)
        .sum();
    let mut bytes = Vec::new();
    for field in [
        flags,
        policy.uplink as u32,
        policy.mark,
        policy.table,
        policy.services.len() as u32,
        0,
    ] {
        bytes.extend(number(field));
    }
    for service in &policy.services {
        bytes.extend(port_rule(service));
    }
    bytes.resize(24 + 16 * 8, 0);
    bytes.extend(limit(&policy.egress));
    bytes.extend(limit(&policy.ingress));
    bytes
}

/// `POLICY_REDIRECTS`, of policy 0.
pub(crate) const REDIRECTS: u8 = 1 << 7;
/// The number by which the first set of redirected destinations is kept.
pub(crate) const SETS: u32 = 1 << 31;

/// Key and value of the sources that lead to a set.
pub(crate) fn source(net: IpNet, set: u32) -> (Vec<u8>, Vec<u8>) {
    let sources = Prefix {
        net,
        rules: Vec::new(),
        allow: false,
        reason: 0,
    };
    prefix(0, &sources, set)
}

/// Key and value of a prefix. `list` names its rules, if it has any.
pub(crate) fn prefix(policy: u32, prefix: &Prefix, list: u32) -> (Vec<u8>, Vec<u8>) {
    let before = if prefix.net.addr().is_ipv4() { 96 } else { 0 };
    let length = 32 + before + u32::from(prefix.net.prefix_len());
    let mut key = number(length).to_vec();
    key.extend(number(policy));
    key.extend(address(prefix.net.network()));
    let mut value = number(list).to_vec();
    value.extend(u16::from(prefix.allow).to_ne_bytes());
    value.extend(u16::from(prefix.reason).to_ne_bytes());
    (key, value)
}

pub(crate) fn rule_list(rules: &[PortRule]) -> Vec<u8> {
    let mut bytes = number(rules.len() as u32).to_vec();
    bytes.extend(number(0));
    for rule in rules {
        bytes.extend(port_rule(rule));
    }
    bytes.resize(8 + 32 * 8, 0);
    bytes
}

pub(crate) fn answer_key(flow: &Flow) -> Vec<u8> {
    let mut bytes = number(flow.nic as u32).to_vec();
    bytes.extend(flow.peer_port.to_be_bytes());
    bytes.extend(flow.guest_port.to_be_bytes());
    bytes.extend(address(flow.peer));
    bytes.extend(number(flow.fragment.unwrap_or(0)));
    bytes.extend([flow.protocol, 0, 0, 0]);
    bytes
}

pub(crate) fn answer_value(answer: &Answer) -> Vec<u8> {
    let mut bytes = answer.seen.to_ne_bytes().to_vec();
    bytes.extend([answer.via as u8, u8::from(answer.own)]);
    bytes.extend(answer.fragment.to_ne_bytes());
    bytes.extend(number(answer.lease));
    bytes
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

pub(crate) fn read_answer(bytes: &[u8]) -> Answer {
    Answer {
        seen: long(bytes, 0),
        via: if bytes[8] == 1 {
            Via::Uplink
        } else {
            Via::Stack
        },
        own: bytes[9] != 0,
        fragment: u16::from_ne_bytes(bytes[10..12].try_into().expect("two bytes")),
        lease: u32::from_ne_bytes(bytes[12..16].try_into().expect("four bytes")),
    }
}

/// From a `struct counters`, which has the drops.
pub(crate) fn read_counters(bytes: &[u8]) -> Counters {
    let mut counters = Counters::default();
    add_traffic(&mut counters, bytes);
    for (reason, count) in counters.drops.iter_mut().enumerate() {
        *count = long(bytes, 48 + reason * 8);
    }
    counters
}

/// Adds what a `struct ledger` says, or the start of a `struct counters`.
pub(crate) fn add_traffic(counters: &mut Counters, bytes: &[u8]) {
    let add = |traffic: &mut Traffic, at| {
        traffic.packets += long(bytes, at);
        traffic.bytes += long(bytes, at + 8);
        traffic.segments += long(bytes, at + 16);
    };
    add(&mut counters.egress, 0);
    add(&mut counters.ingress, 24);
}

pub(crate) fn meters(egress: Meter, ingress: Meter) -> Vec<u8> {
    [egress.bytes, egress.packets, ingress.bytes, ingress.packets]
        .iter()
        .flat_map(|field| field.to_ne_bytes())
        .collect()
}

/// A `struct meters` and the `struct ledger` of who has run the program.
pub(crate) fn read_meters(bytes: &[u8], ledger: &[u8]) -> (Meter, Meter) {
    let word = |at: usize| u32::from_ne_bytes(ledger[at..at + 4].try_into().expect("four bytes"));
    let meter = |at, credit| Meter {
        bytes: long(bytes, at),
        packets: long(bytes, at + 8),
        credit: Credit {
            bytes: word(credit).into(),
            packets: word(credit + 4).into(),
        },
    };
    (meter(0, CREDITS), meter(16, CREDITS + 8))
}

/// The `struct credits`.
pub(crate) fn credits(egress: Credit, ingress: Credit) -> Vec<u8> {
    [egress.bytes, egress.packets, ingress.bytes, ingress.packets]
        .iter()
        .flat_map(|field| (*field as u32).to_ne_bytes())
        .collect()
}

/// A `struct neighbour_share` in which so many neighbours were asked for just now, of which no packet has the hash.
pub(crate) fn neighbour_share(asked: usize, now: u64) -> Vec<u8> {
    let mut share = abi::NeighbourShare::default();
    // The programs' clock may be behind.
    let moment = (now.saturating_sub(100_000_000) >> 20) & 0xffff_ffff;
    share.next = asked as u64;
    for (number, place) in share.asked[..asked].iter_mut().enumerate() {
        *place = (number as u64 + 1) << 32 | moment;
    }
    share.bytes().to_vec()
}

/// A `struct trace_event`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) time: u64,
    pub(crate) nic: usize,
    pub(crate) target: u32,
    pub(crate) length: usize,
    pub(crate) segments: u64,
    pub(crate) direction: u8,
    pub(crate) verdict: u8,
    pub(crate) reason: u8,
    pub(crate) stage: u8,
    pub(crate) frame: Vec<u8>,
}

pub(crate) fn read_event(bytes: &[u8]) -> Event {
    let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    let captured = word(20) as usize;
    Event {
        time: long(bytes, 0),
        nic: word(8) as usize,
        target: word(12),
        length: word(16) as usize,
        segments: u64::from(u16::from_ne_bytes([bytes[24], bytes[25]])),
        direction: bytes[26],
        verdict: bytes[27],
        reason: bytes[28],
        stage: bytes[29],
        frame: bytes[32..32 + captured].to_vec(),
    }
}

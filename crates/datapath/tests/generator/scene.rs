//! The small world that all cases play in: twelve interfaces of sandboxes, the host's interfaces and
//! routes, and policies made from the seed.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    rc::Rc,
};

use ipnet::IpNet;
use sandwire_api::drop_reason::DropReason;

use super::random::Random;
use crate::model::{
    Mac,
    world::{
        Addresses, Counters, Interface, Limit, Meter, Nic, Policy, PortRule, Prefix, Redirect,
        Route, State, TABLE_LOCAL, TABLE_MAIN, Uplink, Way, World,
    },
};

pub(crate) const NICS: usize = 12;
pub(crate) const POLICIES: usize = 40;
/// Policies below this number are made by hand; see [`policies`].
pub(crate) const POLICIES_BY_HAND: usize = 12;

/// Number of the host end of entry 0; those of the others follow.
pub(crate) const HOST_ENDS: u32 = 1000;

/// What entries 0 and 1 can be like.
pub(crate) const HOST_SLOT: usize = 0;
pub(crate) const ONLY_IPV4: usize = 1;
pub(crate) const ONLY_IPV6: usize = 2;
pub(crate) const NETNS_SLOT: usize = 3;
pub(crate) const READY: usize = 4;
pub(crate) const ABSENT: usize = 5;
/// Interfaces of a container that are children of the host's, with MACs of their own or their parent's.
pub(crate) const CHILD: usize = 6;
pub(crate) const SHARED_CHILD: usize = 7;

pub(crate) const GUEST_MAC: Mac = [0x06, 0, 0xac, 0x10, 0, 0x12];
pub(crate) const GATEWAY_MAC: Mac = [0x02, 0x73, 0x77, 0x67, 0, 1];
pub(crate) const VETH_MAC: Mac = [0x02, 0x73, 0x77, 0x76, 0, 1];
pub(crate) const SHARED_MAC: Mac = [0x02, 0x73, 0x77, 0x68, 0, 1];

/// Interfaces of the host by name. Two uplinks, one whose queue honours departure times, one that is
/// no uplink, and the shared one.
pub(crate) const INTERFACES: [(&str, Mac, u32); 5] = [
    ("up0", [0x02, 0, 0, 0, 0, 0x10], 1500),
    ("up1", [0x02, 0, 0, 0, 0, 0x11], 1400),
    ("fq0", [0x02, 0, 0, 0, 0, 0x12], 1500),
    ("plain0", [0x02, 0, 0, 0, 0, 0x13], 1500),
    ("shared", SHARED_MAC, 1500),
];
/// MAC addresses of the routers behind the first four.
pub(crate) const ROUTERS: [Mac; 4] = [
    [0x02, 0, 0, 0, 1, 0x10],
    [0x02, 0, 0, 0, 1, 0x11],
    [0x02, 0, 0, 0, 1, 0x12],
    [0x02, 0, 0, 0, 1, 0x13],
];

/// The mark that leads to table 100, and the table itself.
pub(crate) const MARK: u32 = 7;
pub(crate) const TABLE: u32 = 100;

pub(crate) const GUEST4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));
pub(crate) const GATEWAY4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
pub(crate) const GUEST6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd00, 0xaa, 0, 0, 0, 0, 0, 2));
pub(crate) const GATEWAY6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd00, 0xaa, 0, 0, 0, 0, 0, 1));

/// Clone address of an entry of `nics`.
pub(crate) fn clone(version: u8, nic: usize) -> IpAddr {
    if version == 4 {
        IpAddr::V4(Ipv4Addr::new(10, 64, 0, 10 + nic as u8))
    } else {
        IpAddr::V6(Ipv6Addr::new(
            0xfd00,
            0x64,
            0,
            0,
            0,
            0,
            0,
            0x10 + nic as u16,
        ))
    }
}

pub(crate) fn guest(version: u8) -> IpAddr {
    if version == 4 { GUEST4 } else { GUEST6 }
}

pub(crate) fn gateway(version: u8) -> IpAddr {
    if version == 4 { GATEWAY4 } else { GATEWAY6 }
}

/// Addresses beyond the sandboxes, IPv4 and IPv6 of each kind.
pub(crate) const OUTSIDE: [[&str; 2]; 15] = [
    ["8.8.8.8", "2001:4860::8888"],       // default route by up0
    ["8.8.4.4", "2001:4860::8844"],       // the same
    ["198.51.100.9", "2001:db8:51::9"],   // by up0
    ["192.0.2.7", "2001:db8:1::7"],       // on the link of up0, known
    ["192.0.2.99", "2001:db8:1::99"],     // on the link of up0, unknown
    ["203.0.113.5", "2001:db8:113::5"],   // by up1
    ["100.64.3.4", "2001:db8:64::4"],     // by fq0
    ["198.18.0.3", "2001:db8:18::3"],     // by plain0, no uplink
    ["198.19.1.1", "2001:db8:191::1"],    // blackhole
    ["198.19.2.1", "2001:db8:192::1"],    // unreachable
    ["198.19.3.1", "2001:db8:193::1"],    // prohibit
    ["192.0.2.1", "2001:db8:1::1"],       // the host itself
    ["169.254.169.254", "fd00:ec2::254"], // metadata, by the default route
    ["192.0.2.255", "2001:db8:1::ff"],    // all on the link of up0
    ["192.0.3.255", "2001:db8:2::ff"],    // all on that of up1, as the kernel knows
];
/// The host's own address among [`OUTSIDE`].
pub(crate) const HOST: usize = 11;
/// Cloud metadata among [`OUTSIDE`].
pub(crate) const METADATA: usize = 12;

/// The first of those of everybody on a link among [`OUTSIDE`].
pub(crate) const ALL: usize = 13;

pub(crate) fn outside(version: u8, number: usize) -> IpAddr {
    let [v4, v6] = OUTSIDE[number];
    let text = if version == 4 { v4 } else { v6 };
    text.parse().expect("an address")
}

/// Routes as `ip route` takes them: table, network, and where it leads.
pub(crate) const ROUTES: [(u32, &str, To); 39] = [
    (TABLE_MAIN, "0.0.0.0/0", To::Router(0)),
    (TABLE_MAIN, "::/0", To::Router(0)),
    (TABLE_MAIN, "198.51.100.0/24", To::Router(0)),
    (TABLE_MAIN, "2001:db8:51::/48", To::Router(0)),
    (TABLE_MAIN, "192.0.2.0/24", To::Link(0)),
    (TABLE_MAIN, "2001:db8:1::/64", To::Link(0)),
    (TABLE_MAIN, "203.0.113.0/24", To::Router(1)),
    (TABLE_MAIN, "2001:db8:113::/48", To::Router(1)),
    (TABLE_MAIN, "192.0.3.0/24", To::Link(1)),
    (TABLE_MAIN, "2001:db8:2::/64", To::Link(1)),
    (TABLE_MAIN, "100.64.0.0/16", To::Router(2)),
    (TABLE_MAIN, "2001:db8:64::/48", To::Router(2)),
    (TABLE_MAIN, "192.0.4.0/24", To::Link(2)),
    (TABLE_MAIN, "2001:db8:3::/64", To::Link(2)),
    (TABLE_MAIN, "198.18.0.0/24", To::Router(3)),
    (TABLE_MAIN, "2001:db8:18::/48", To::Router(3)),
    (TABLE_MAIN, "192.0.5.0/24", To::Link(3)),
    (TABLE_MAIN, "2001:db8:4::/64", To::Link(3)),
    (TABLE_MAIN, "198.19.1.0/24", To::Refused("blackhole")),
    (TABLE_MAIN, "2001:db8:191::/48", To::Refused("blackhole")),
    (TABLE_MAIN, "198.19.2.0/24", To::Refused("unreachable")),
    (TABLE_MAIN, "2001:db8:192::/48", To::Refused("unreachable")),
    (TABLE_MAIN, "198.19.3.0/24", To::Refused("prohibit")),
    (TABLE_MAIN, "2001:db8:193::/48", To::Refused("prohibit")),
    (TABLE_MAIN, "10.64.0.0/24", To::Link(4)),
    (TABLE_MAIN, "fd00:64::/64", To::Link(4)),
    (TABLE, "0.0.0.0/0", To::Router(1)),
    (TABLE, "::/0", To::Router(1)),
    (TABLE, "8.8.4.0/24", To::Router(3)),
    (TABLE, "2001:4860::8844/128", To::Router(3)),
    (TABLE, "198.51.100.0/24", To::Refused("unreachable")),
    (TABLE, "2001:db8:51::/48", To::Refused("prohibit")),
    (TABLE, "192.0.2.0/24", To::Link(0)),
    (TABLE, "192.0.3.0/24", To::Link(1)),
    (TABLE_LOCAL, "192.0.3.255/32", To::Local),
    (TABLE_LOCAL, "192.0.2.1/32", To::Local),
    (TABLE_LOCAL, "2001:db8:1::1/128", To::Local),
    (TABLE_LOCAL, "192.0.2.255/32", To::Local),
    (TABLE_LOCAL, "192.0.3.1/32", To::Local),
];

#[derive(Clone, Copy, Debug)]
pub(crate) enum To {
    /// The router behind this one of [`INTERFACES`]; see [`router`].
    Router(usize),
    /// The link itself.
    Link(usize),
    Refused(&'static str),
    Local,
}

/// Address of the router behind one of [`INTERFACES`].
pub(crate) fn router(version: u8, interface: usize) -> IpAddr {
    let text = if version == 4 {
        format!("192.0.{}.254", interface + 2)
    } else {
        format!("2001:db8:{}::fe", interface + 1)
    };
    text.parse().expect("an address")
}

/// The world of a variant. `ifindex` tells the number of one of [`INTERFACES`]; hosts ends of slots
/// are numbers that no interface has, since nothing is sent.
pub(crate) fn world(variant: usize, ifindex: &[u32; 5], policies: &Rc<Vec<Policy>>) -> World {
    let nics: Vec<Nic> = (0..NICS)
        .map(|number| nic(number, variant, ifindex[4]))
        .collect();
    let mut clones = BTreeMap::new();
    for (number, nic) in nics.iter().enumerate() {
        // Entry 5 is caught between losing its lease and losing its addresses.
        if nic.state == State::Active || number == 5 {
            for addresses in [nic.v4, nic.v6].into_iter().flatten() {
                clones.insert(addresses.clone, number);
            }
        }
    }
    let interfaces = INTERFACES
        .iter()
        .zip(ifindex)
        .map(|((_, mac, mtu), ifindex)| {
            let interface = Interface {
                mac: *mac,
                mtu: *mtu,
            };
            (*ifindex, interface)
        });
    World {
        nics,
        policies: Rc::clone(policies),
        clones,
        group_pairs: [(1, 2), (2, 1)].into(),
        uplinks: [(ifindex[0], false), (ifindex[1], false), (ifindex[2], true)].into(),
        interfaces: Rc::new(interfaces.collect()),
        routes: Rc::new(ROUTES.iter().map(|route| resolve(route, ifindex)).collect()),
        neighbours: [
            ((ifindex[0], outside(4, 3)), ROUTERS[0]),
            ((ifindex[0], outside(6, 3)), ROUTERS[0]),
        ]
        .into(),
        broadcasts: [0, 1]
            .map(|link| (ifindex[link], outside(4, ALL + link)))
            .into(),
        rules: [(MARK, TABLE)].into(),
        answers: BTreeMap::new(),
        redirects: Rc::new(redirects()),
        credit_shift: credit_shift(),
        pays_ahead: true,
    }
}

/// All processors together pay the sixteenth part of a burst ahead, or less.
pub(crate) fn credit_shift() -> u32 {
    let processors = aya::util::nr_cpus().expect("the kernel tells");
    4 + processors.next_power_of_two().trailing_zeros()
}

/// Other sandboxes that are children too: one that talks to its group, and one that talks to nobody.
pub(crate) const SIBLING: usize = 10;
pub(crate) const STRANGER: usize = 11;
/// The policy of who talks to nobody.
const APART: usize = 8;

/// What the first sandboxes may send to some destinations only by the relay: with one port, with any.
fn redirects() -> Vec<Redirect> {
    let rules = |protocol, port| {
        vec![PortRule {
            protocol,
            allow: false,
            first: port,
            last: port,
        }]
    };
    let redirect = |from: &str, to: &str, rules| Redirect {
        from: from.parse().expect("a network"),
        to: Prefix {
            net: to.parse().expect("a network"),
            rules,
            allow: false,
            reason: DropReason::NotRelayed as u8,
        },
    };
    vec![
        redirect("10.64.0.8/30", "198.51.100.0/24", rules(6, 443)),
        redirect("10.64.0.8/30", "203.0.113.0/24", Vec::new()),
        redirect("fd00:64::/64", "2001:db8:51::/48", rules(17, 53)),
        redirect("fd00:64::/64", "2001:db8:113::5/128", Vec::new()),
    ]
}

fn resolve((table, net, to): &(u32, &str, To), ifindex: &[u32; 5]) -> Route {
    let to = match to {
        To::Router(number) => Way::Out {
            ifindex: ifindex[*number],
            neighbour: Some(ROUTERS[*number]),
        },
        To::Link(number) => Way::Out {
            ifindex: ifindex[*number],
            neighbour: None,
        },
        To::Refused(_) => Way::Refused,
        To::Local => Way::Local,
    };
    Route {
        table: *table,
        net: net.parse().expect("a network"),
        to,
    }
}

fn nic(number: usize, variant: usize, shared_ifindex: u32) -> Nic {
    let pair = number < 2;
    let child = number >= SIBLING || (pair && [CHILD, SHARED_CHILD].contains(&variant));
    let addresses = |version| Addresses {
        guest: if child {
            clone(version, number)
        } else {
            guest(version)
        },
        clone: clone(version, number),
        gateway: gateway(version),
    };
    let netns = matches!(number, 6 | 7) || (pair && variant == NETNS_SLOT);
    let mut guest_mac = GUEST_MAC;
    guest_mac[5] += number as u8;
    Nic {
        state: match (number, variant) {
            (0 | 1, READY) | (5, _) => State::Ready,
            (0 | 1, ABSENT) => State::Absent,
            _ => State::Active,
        },
        netns,
        process: number == 7,
        learn: false,
        published: false,
        child,
        has_parents_mac: child && variant == SHARED_CHILD,
        policy: if number == STRANGER {
            APART
        } else {
            number % POLICIES_BY_HAND
        },
        lease: 10 + number as u32,
        ifindex: if netns && number == 1 {
            HOST_ENDS
        } else {
            HOST_ENDS + number as u32
        },
        shared_ifindex,
        group: match number {
            3 => 2,
            4 => 3,
            _ => 1,
        },
        mtu: if number == 8 { 1280 } else { 1500 },
        guest_mac,
        gateway_mac: GATEWAY_MAC,
        veth_mac: VETH_MAC,
        shared_mac: SHARED_MAC,
        v4: (!(pair && variant == ONLY_IPV6)).then(|| addresses(4)),
        v6: (number != 9 && !(pair && variant == ONLY_IPV4)).then(|| addresses(6)),
        pool: 77,
        slot: if pair { 0 } else { number as u32 },
        position: u8::from(number == 1),
        count: if pair { 2 } else { 1 },
        counters: Counters::default(),
        egress: Meter::default(),
        ingress: Meter::default(),
        asked: BTreeSet::new(),
        asked_before: 0,
    }
}

/// Entry of another sandbox of the same group.
pub(crate) const NEIGHBOUR: usize = 2;

/// A second, as a cost or a burst.
pub(crate) const SECOND: u64 = 1_000_000_000;

/// The policies that cases choose from: some by hand, the rest from the seed.
pub(crate) fn policies(random: &mut Random) -> Vec<Policy> {
    let open = Policy {
        allow: true,
        same_group: true,
        other_groups: true,
        ..Policy::default()
    };
    // A hundredth of a second per byte, a second per packet: what passes leaves a debt that can't be missed, and small ones
    // are paid ahead.
    let limited = |bytes: bool, packets: bool| Limit {
        byte_cost: if bytes { (SECOND / 100) << 20 } else { 0 },
        byte_burst: 100 * SECOND,
        packet_cost: if packets { SECOND } else { 0 },
        packet_burst: 200 * SECOND,
    };
    let with = |change: fn(&mut Policy)| {
        let mut policy = open.clone();
        change(&mut policy);
        policy
    };
    let mut policies = vec![
        open.clone(),
        with(|policy| (policy.allow, policy.answers) = (false, true)),
        with(|policy| (policy.uplink, policy.answers) = (Uplink::Deny, true)),
        with(|policy| (policy.uplink, policy.answers) = (Uplink::Masquerade, true)),
        with(|policy| policy.mark = MARK),
        with(|policy| (policy.table, policy.answers) = (TABLE, true)),
        with(|policy| (policy.host_icmp, policy.answers) = (true, true)),
        with(|policy| policy.host_all = true),
        with(|policy| (policy.same_group, policy.other_groups) = (false, false)),
    ];
    for (bytes, packets) in [(true, false), (false, true), (true, true)] {
        policies.push(Policy {
            egress: limited(bytes, packets),
            ingress: limited(bytes, packets),
            ..open.clone()
        });
    }
    assert_eq!(policies.len(), POLICIES_BY_HAND);
    while policies.len() < POLICIES {
        policies.push(random_policy(random));
    }
    policies
}

fn random_policy(random: &mut Random) -> Policy {
    Policy {
        allow: random.chance(50),
        host_all: random.chance(10),
        host_icmp: random.chance(30),
        same_group: random.chance(50),
        other_groups: random.chance(50),
        answers: true,
        uplink: random.one_of(&[
            Uplink::Route,
            Uplink::Route,
            Uplink::Masquerade,
            Uplink::Deny,
        ]),
        mark: random.one_of(&[0, 0, 0, MARK, 9]),
        table: random.one_of(&[0, 0, 0, 0, TABLE]),
        services: (0..random.below(17)).map(|_| rule(random, true)).collect(),
        prefixes: prefixes(random),
        egress: Limit::default(),
        ingress: Limit::default(),
    }
}

/// Networks of different lengths around the addresses that are used, without doubles.
fn prefixes(random: &mut Random) -> Vec<Prefix> {
    let mut prefixes = BTreeMap::new();
    for _ in 0..random.below(40) {
        let version = random.one_of(&[4, 6]);
        let address = outside(version, random.below(OUTSIDE.len()));
        let longest = if version == 4 { 32 } else { 128 };
        let length = random.one_of(&[0, 1, 7, 8, 9, 15, 16, 23, 24, 25, 31, longest, longest]);
        let net = IpNet::new(address, length).expect("a length").trunc();
        let rules = random.one_of(&[0, 0, 1, 2, 3, 8, 31, 32]);
        let allow = random.chance(50);
        let prefix = Prefix {
            net,
            rules: (0..rules)
                .map(|_| {
                    let allow = random.chance(50);
                    rule(random, allow)
                })
                .collect(),
            allow,
            // Policy, metadata, or none of its own.
            reason: random.one_of(&[0, 17, 18]),
        };
        prefixes.insert(net, prefix);
    }
    prefixes.into_values().collect()
}

/// Whether it is an IPv6 prefix around the addresses that stand for IPv4.
pub(crate) fn covers_mapped(prefix: &Prefix) -> bool {
    let mapped = Ipv4Addr::UNSPECIFIED.to_ipv6_mapped();
    prefix.net.prefix_len() <= 96 && prefix.net.contains(&IpAddr::V6(mapped))
}

pub(crate) fn covers_ipv4(prefix: &Prefix) -> bool {
    prefix.net.addr().is_ipv4() && prefix.net.prefix_len() == 0
}

/// The default of a policy, as a prefix of all IPv4.
pub(crate) fn otherwise(policy: &Policy) -> Prefix {
    Prefix {
        net: "0.0.0.0/0".parse().expect("a network"),
        rules: Vec::new(),
        allow: policy.allow,
        reason: 0,
    }
}

/// Ports that rules are about and packets go to.
pub(crate) const PORTS: [u16; 8] = [0, 22, 53, 80, 443, 8080, 40000, 65535];

fn rule(random: &mut Random, allow: bool) -> PortRule {
    let protocol = random.one_of(&[0, 6, 6, 6, 17, 17, 17, 1]);
    let (mut first, mut last) = (0, 65535);
    if matches!(protocol, 6 | 17) && random.chance(85) {
        // Beside or on a port that is used.
        first = random
            .one_of(&PORTS)
            .saturating_add(random.one_of(&[0, 0, 0, 1]));
        last = first.saturating_add(random.one_of(&[0, 0, 1, 100]));
    }
    PortRule {
        protocol,
        allow,
        first,
        last,
    }
}

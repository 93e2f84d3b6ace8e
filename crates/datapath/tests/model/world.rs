//! What the path knows and remembers: interfaces, policies, routes, limits, answers.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    rc::Rc,
};

use ipnet::IpNet;

use super::{Mac, answers::Answer, answers::Flow};

/// Everything that decides over a packet beside its bytes.
#[derive(Clone, Debug, Default)]
pub(crate) struct World {
    pub(crate) nics: Vec<Nic>,
    pub(crate) policies: Rc<Vec<Policy>>,
    /// Who has a clone address now.
    pub(crate) clones: BTreeMap<IpAddr, usize>,
    pub(crate) group_pairs: BTreeSet<(u32, u32)>,
    /// Interfaces that packets may leave by past the stack, and whether their queue honours
    /// departure times.
    pub(crate) uplinks: BTreeMap<u32, bool>,
    pub(crate) interfaces: Rc<BTreeMap<u32, Interface>>,
    pub(crate) routes: Rc<Vec<Route>>,
    /// MAC addresses of neighbours on the link.
    pub(crate) neighbours: BTreeMap<(u32, IpAddr), Mac>,
    /// Broadcast addresses on a link.
    pub(crate) broadcasts: BTreeSet<(u32, IpAddr)>,
    /// Tables that a mark leads to.
    pub(crate) rules: BTreeMap<u32, u32>,
    pub(crate) answers: BTreeMap<Flow, Answer>,
    /// What leaves only by the relay.
    pub(crate) redirects: Rc<Vec<Redirect>>,
    /// By how many powers of two less than the burst a processor pays ahead, if it does.
    pub(crate) credit_shift: u32,
    pub(crate) pays_ahead: bool,
}

/// Destinations to which what some sources send goes only by the relay: those that the prefix denies.
#[derive(Clone, Debug)]
pub(crate) struct Redirect {
    pub(crate) from: IpNet,
    pub(crate) to: Prefix,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Absent = 0,
    Ready = 1,
    Active = 2,
}

/// One interface of a sandbox.
#[derive(Clone, Debug)]
pub(crate) struct Nic {
    pub(crate) state: State,
    pub(crate) netns: bool,
    pub(crate) process: bool,
    pub(crate) learn: bool,
    /// The host's stack translates ports to it.
    pub(crate) published: bool,
    /// It is a child of one of the host's interfaces.
    pub(crate) child: bool,
    /// Its MAC is its parent's.
    pub(crate) has_parents_mac: bool,
    pub(crate) policy: usize,
    /// Goes up with each lease.
    pub(crate) lease: u32,
    pub(crate) ifindex: u32,
    pub(crate) shared_ifindex: u32,
    pub(crate) group: u32,
    pub(crate) mtu: u32,
    pub(crate) guest_mac: Mac,
    pub(crate) gateway_mac: Mac,
    pub(crate) veth_mac: Mac,
    pub(crate) shared_mac: Mac,
    pub(crate) v4: Option<Addresses>,
    pub(crate) v6: Option<Addresses>,
    pub(crate) pool: u32,
    pub(crate) slot: u32,
    pub(crate) position: u8,
    pub(crate) count: u8,
    pub(crate) counters: Counters,
    pub(crate) egress: Meter,
    pub(crate) ingress: Meter,
    /// Neighbours that the host looks for because of it, and how many others it did a moment ago.
    pub(crate) asked: BTreeSet<IpAddr>,
    pub(crate) asked_before: usize,
}

/// Of one IP version.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addresses {
    pub(crate) guest: IpAddr,
    pub(crate) clone: IpAddr,
    pub(crate) gateway: IpAddr,
}

impl Nic {
    /// Whether calls to it are remembered for its answers.
    pub(crate) fn remembers(&self, policies: &[Policy]) -> bool {
        policies[self.policy].answers || self.published
    }

    /// Its addresses of IP version 4 or 6.
    pub(crate) fn addresses(&self, version: u8) -> Option<Addresses> {
        if version == 4 { self.v4 } else { self.v6 }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Counters {
    pub(crate) egress: Traffic,
    pub(crate) ingress: Traffic,
    /// By the number of the reason.
    pub(crate) drops: [u64; 48],
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            egress: Traffic::default(),
            ingress: Traffic::default(),
            drops: [0; 48],
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Traffic {
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
    pub(crate) segments: u64,
}

impl Traffic {
    pub(crate) fn add(&mut self, bytes: usize, segments: u64) {
        self.packets += 1;
        self.bytes += bytes as u64;
        self.segments += segments;
    }
}

/// Times at which everything let through so far would be paid for, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Meter {
    pub(crate) bytes: u64,
    pub(crate) packets: u64,
    pub(crate) credit: Credit,
}

/// What the processor that runs the programs has paid for already, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Credit {
    pub(crate) bytes: u64,
    pub(crate) packets: u64,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Limit {
    /// Nanoseconds per byte, times 2^20.
    pub(crate) byte_cost: u64,
    pub(crate) byte_burst: u64,
    pub(crate) packet_cost: u64,
    pub(crate) packet_burst: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) enum Uplink {
    Deny = 0,
    #[default]
    Route = 1,
    Masquerade = 2,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Policy {
    pub(crate) allow: bool,
    pub(crate) host_all: bool,
    pub(crate) host_icmp: bool,
    pub(crate) same_group: bool,
    pub(crate) other_groups: bool,
    pub(crate) answers: bool,
    pub(crate) uplink: Uplink,
    pub(crate) mark: u32,
    pub(crate) table: u32,
    pub(crate) services: Vec<PortRule>,
    pub(crate) prefixes: Vec<Prefix>,
    pub(crate) egress: Limit,
    pub(crate) ingress: Limit,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct PortRule {
    /// Zero: any.
    pub(crate) protocol: u8,
    pub(crate) allow: bool,
    pub(crate) first: u16,
    pub(crate) last: u16,
}

#[derive(Clone, Debug)]
pub(crate) struct Prefix {
    pub(crate) net: IpNet,
    /// Empty: `allow` holds for every port.
    pub(crate) rules: Vec<PortRule>,
    pub(crate) allow: bool,
    /// Number of the reason when denied; zero: the policy.
    pub(crate) reason: u8,
}

/// An interface of the host.
#[derive(Clone, Debug)]
pub(crate) struct Interface {
    pub(crate) mac: Mac,
    pub(crate) mtu: u32,
}

#[derive(Clone, Debug)]
pub(crate) struct Route {
    pub(crate) table: u32,
    pub(crate) net: IpNet,
    pub(crate) to: Way,
}

/// Where a route leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// This host, or a broadcast address of it. Also what the kernel's look-up says of an address
    /// that no route covers.
    Local,
    /// A route that refuses: blackhole, unreachable, prohibit.
    Refused,
    /// Out by an interface, to a neighbour whose MAC address is known or not.
    Out {
        ifindex: u32,
        neighbour: Option<Mac>,
    },
}

/// Table of the addresses of this host.
pub(crate) const TABLE_LOCAL: u32 = 255;
/// Table of everything else.
pub(crate) const TABLE_MAIN: u32 = 254;

impl World {
    /// Frames from outside come in by the first interface.
    pub(crate) fn mtu_of_way_in(&self) -> u32 {
        let first = self.interfaces.values().next();
        first.expect("a world has uplinks").mtu
    }
}

//! What the host's side is asked to serve.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use sandwire_api::{pool::UplinkPolicy, published_port::PublishPort, slot::DataPath};

use crate::plan::Plan;

/// Ports that the host publishes: what was asked for, and the clone addresses it leads to.
type PublishedPorts = Vec<(PublishPort, Vec<IpAddr>)>;

/// What the host's side should look like.
#[derive(Default)]
pub(super) struct HostState {
    pub(super) pools: BTreeMap<String, Hosted>,
    /// Pools of an earlier daemon that the host refuses. Their sandboxes may be running, and the table keeps them apart.
    pub(super) refused: BTreeMap<String, Hosted>,
    /// Pools of an earlier daemon that use XDP and are still to be taken up.
    expected_xdp: BTreeSet<String>,
    /// Numbers of the pools whose sandboxes have children of other interfaces, to which the host leads nobody.
    pub(super) children: BTreeMap<String, u32>,
    pub(super) published: PublishedPorts,
    /// Addresses on the host that published ports leave alone.
    pub(super) spared: BTreeSet<IpAddr>,
}

impl HostState {
    /// Notes which pools of an earlier daemon are to be taken up.
    pub(super) fn expect(&mut self, plans: &[&Plan]) {
        let uses_xdp = |plan: &&&Plan| plan.spec.data_path == DataPath::Xdp;
        let by_xdp = plans.iter().filter(uses_xdp);
        self.expected_xdp = by_xdp.map(|plan| plan.spec.name.to_string()).collect();
    }

    /// The host has taken a pool up, or refused it.
    pub(super) fn expect_no_longer(&mut self, pool: &str) {
        self.expected_xdp.remove(pool);
    }

    /// Whether sandboxes may go by XDP, also those of pools that are not taken up yet or are refused: taking it off an
    /// uplink makes the rings of a network card anew, and what they send there meanwhile is lost.
    pub(super) fn uses_xdp(&self) -> bool {
        let mut pools = self.pools.values().chain(self.refused.values());
        !self.expected_xdp.is_empty() || pools.any(Hosted::uses_xdp)
    }

    /// Whether sandboxes may have children of other interfaces. Who knows of no pool has perhaps lost the journal.
    pub(super) fn may_have_children(&self) -> bool {
        !self.children.is_empty() || self.pools.is_empty()
    }

    /// All that the host serves.
    pub(super) fn served(&self) -> Served<'_> {
        Served {
            pools: self.pools.values().collect(),
            refused: self.refused.values().collect(),
            published: &self.published,
            spared: &self.spared,
        }
    }

    /// What the host serves beside a pool.
    pub(super) fn beside(&self, pool: &str) -> Served<'_> {
        let pools = self.pools.iter().filter(|(name, _)| *name != pool);
        let refused = self.refused.iter().filter(|(name, _)| *name != pool);
        Served {
            pools: pools.map(|(_, other)| other).collect(),
            refused: refused.map(|(_, other)| other).collect(),
            published: &self.published,
            spared: &self.spared,
        }
    }
}

/// A pool that the host serves.
#[derive(Clone, Debug)]
pub(super) struct Hosted {
    pub(super) plan: Plan,
    /// The data path that some of its slots may still have.
    pub(super) from: Option<DataPath>,
}

impl Hosted {
    pub(super) fn serves_nft(&self) -> bool {
        self.plan.spec.data_path == DataPath::Nft || self.from == Some(DataPath::Nft)
    }

    pub(super) fn uses_xdp(&self) -> bool {
        self.plan.spec.data_path == DataPath::Xdp
    }

    pub(super) fn serves_ebpf(&self) -> bool {
        let is_ebpf = |data_path| data_path != DataPath::Nft;
        is_ebpf(self.plan.spec.data_path) || self.from.is_some_and(is_ebpf)
    }
}

/// Pools and published ports that the host serves together.
pub(super) struct Served<'a> {
    pub(super) pools: Vec<&'a Hosted>,
    /// Further pools that are in the table, of which nothing else is looked after.
    pub(super) refused: Vec<&'a Hosted>,
    /// With the clone addresses that they lead to.
    pub(super) published: &'a [(PublishPort, Vec<IpAddr>)],
    /// Addresses that these leave alone.
    pub(super) spared: &'a BTreeSet<IpAddr>,
}

impl<'a> Served<'a> {
    pub(super) fn with(&self, pool: &'a Hosted) -> Self {
        Self {
            pools: self.pools.iter().copied().chain([pool]).collect(),
            refused: self.refused.clone(),
            published: self.published,
            spared: self.spared,
        }
    }

    /// All that the table is about.
    pub(super) fn all(&self) -> impl Iterator<Item = &'a Hosted> {
        self.pools.iter().chain(&self.refused).copied()
    }

    /// Whether one of the pools needs the shared interface to carry packets.
    pub(super) fn need_shared(&self) -> bool {
        self.all().any(Hosted::serves_ebpf)
    }

    /// Whether the host's table has to judge or translate anything.
    pub(super) fn need_judge(&self) -> bool {
        let needs = |pool: &Hosted| {
            pool.serves_nft() || pool.plan.spec.policy.uplink == UplinkPolicy::Masquerade
        };
        !self.published.is_empty() || self.all().any(needs)
    }
}

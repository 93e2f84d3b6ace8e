//! Who holds which slot.

use std::{sync::Arc, time::Duration};

use sandwire_api::{
    lease::{Lease, LeaseState},
    name::Name,
    pool::PolicySpec,
};

use crate::{
    attach::AttachRecord,
    channel::{ChannelPlan, ChannelRecord},
    plan::{Plan, SlotNumber, SlotPlan},
};

/// What a lease is known by: its owner's own name for it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseKey {
    /// Numeric user that acquired it.
    pub owner_uid: u32,
    /// Name, unique among the owner's leases.
    pub name: Name,
}

impl std::fmt::Display for LeaseKey {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} of uid {}", self.name, self.owner_uid)
    }
}

/// What is remembered of a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseRecord {
    /// What it is known by.
    pub key: LeaseKey,
    /// Pool that the slot belongs to.
    pub pool: Name,
    /// The slot.
    pub slot: SlotNumber,
    /// Where it is in its life.
    pub state: LeaseState,
    /// When it was acquired, in seconds since 1970-01-01 UTC.
    pub acquired_at: u64,
    /// When it ends by itself.
    pub expiry: Option<Expiry>,
    /// Its own policy; without one it has the pool's. Shared, since it may have very many prefixes.
    pub policy: Option<Arc<PolicySpec>>,
    /// Whether the sandbox is a process in the slot's namespace.
    pub is_process: bool,
    /// Its vsock channel. Shared, since its policy may have very many rules.
    pub channel: Option<Arc<ChannelRecord>>,
    /// Its interface in somebody else's namespace.
    pub attach: Option<AttachRecord>,
}

/// When a lease ends by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expiry {
    /// By the clock that decides: time since the host booted.
    pub since_boot: Duration,
    /// By the clock that people read: seconds since 1970-01-01 UTC, as of the time of acquiring.
    pub since_epoch_seconds: u64,
}

impl LeaseRecord {
    /// The slot as this lease has it.
    #[must_use]
    pub fn slot_of(&self, pool: &Plan) -> SlotPlan {
        pool.slot(self.slot).attached_by(self.attach.as_ref())
    }

    /// Whether its time is over, which ends it.
    #[must_use]
    pub fn is_over(&self, now: Duration) -> bool {
        self.expiry.is_some_and(|expiry| expiry.since_boot <= now)
    }

    /// The lease as the API shows it.
    #[must_use]
    pub fn to_api(&self, slot: &SlotPlan, channel: Option<&ChannelPlan>) -> Lease {
        Lease {
            name: self.key.name.clone(),
            pool: self.pool.clone(),
            slot: self.slot.0,
            owner_uid: self.key.owner_uid,
            state: self.state,
            acquired_at: self.acquired_at,
            expires_at: self.expiry.map(|expiry| expiry.since_epoch_seconds),
            netns: slot.has_netns().then(|| slot.netns_path()),
            netns_name: slot.has_netns().then(|| slot.netns_name.clone()),
            nics: slot.api_nics(),
            vsock: channel.map(ChannelPlan::to_api),
            // The slot service knows nothing of it.
            impairment: None,
            attached: self
                .attach
                .as_ref()
                .and_then(|attach| attach.attached(slot)),
        }
    }
}

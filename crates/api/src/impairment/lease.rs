//! Impairments of leases.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Impairment, State, Way};
use crate::name::Name;

/// How a lease is impaired, and what became of its packets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LeaseImpairment {
    /// Name of the lease.
    pub lease: Name,
    /// Numeric user that holds it.
    pub owner_uid: u32,
    /// How it is impaired. Absent if it isn't.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub impairment: Option<Impairment>,
    /// Its interfaces that are impaired, in order.
    pub interfaces: Vec<InterfaceImpairment>,
}

/// One impaired interface of a lease. Egress and ingress are as the sandbox sees them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct InterfaceImpairment {
    /// Its name.
    pub interface: String,
    /// What becomes of its packets.
    #[serde(flatten)]
    pub state: State,
    /// Whether the timing of every rule, both ways, was within its budget. If not, what was measured with it doesn't count.
    pub valid: bool,
    /// What leaves the sandbox.
    pub egress: Way,
    /// What comes to the sandbox.
    pub ingress: Way,
}

/// The end of a lease's impairment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImpairmentCleared {
    /// Whether it was impaired at all.
    pub was_impaired: bool,
    /// Packets that were under way and have been released, those that came meanwhile not counted.
    pub released: u64,
    /// Packets that were under way and have been dropped.
    pub flushed: u64,
}

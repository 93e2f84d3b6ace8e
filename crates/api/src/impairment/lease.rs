//! Impairments of leases.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Impairment, OnDeath, State, Way};
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

/// That a lease is impaired, in a line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImpairmentSummary {
    /// How, as `sandwire impair` takes it; of a long one the beginning.
    #[schema(example = "preset lte loss 2%")]
    pub summary: String,
    /// Whether the service that carries it out is there.
    pub service_alive: bool,
    /// What becomes of the lease's packets while it isn't.
    pub on_death: OnDeath,
}

impl ImpairmentSummary {
    /// Characters of a summary.
    const LENGTH_MAX: usize = 160;

    /// Of an impairment.
    #[must_use]
    pub fn new(impairment: &Impairment, service_alive: bool) -> Self {
        let whole = impairment.to_string();
        let mut summary: String = whole.chars().take(Self::LENGTH_MAX).collect();
        if summary.len() < whole.len() {
            summary.push('…');
        }
        Self {
            summary,
            service_alive,
            on_death: impairment.on_death,
        }
    }
}

impl fmt::Display for ImpairmentSummary {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.summary)?;
        match (self.service_alive, self.on_death) {
            (true, _) => Ok(()),
            (false, OnDeath::Closed) => {
                formatter.write_str(" (the impairment service is dead: packets are dropped)")
            }
            (false, OnDeath::Open) => {
                formatter.write_str(" (the impairment service is dead: packets pass untouched)")
            }
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_is_the_text_or_its_beginning() {
        let short: Impairment = "on-death open; preset lte loss 2%".parse().unwrap();
        let summary = ImpairmentSummary::new(&short, true);
        assert_eq!(summary.to_string(), "on-death open; preset lte loss 2%");
        let dead = ImpairmentSummary::new(&short, false).to_string();
        assert!(dead.contains("dead: packets pass"), "{dead}");
        let rules = ["match port=22 pass"; 40].join("; ");
        let long = ImpairmentSummary::new(&rules.parse().unwrap(), false);
        assert_eq!(
            long.summary.chars().count(),
            ImpairmentSummary::LENGTH_MAX + 1
        );
        assert!(
            long.to_string()
                .contains("… (the impairment service is dead: packets are dropped")
        );
    }
}

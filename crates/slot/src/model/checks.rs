//! What must never be done to the kernel of a model, noted when it is.

use super::{KernelState, ModelSlot};
use crate::{network::Tenancy, plan::SlotPlan};

impl KernelState {
    /// Says whose tenant a slot has, with a policy that must be known.
    pub(super) fn set_tenancy(&mut self, slot: &SlotPlan, tenancy: Option<Tenancy>) {
        let known = |policy: u32| self.policies.contains_key(&policy);
        let name = &slot.netns_name;
        if let Some(tenancy) = tenancy
            && !known(tenancy.policy.0)
        {
            let policy = tenancy.policy.0;
            self.violations
                .push(format!("{name} has policy {policy}, which is not known"));
        }
        if let Some(found) = self.slots.get_mut(name) {
            found.tenancy = tenancy;
        }
    }

    /// Whoever has the slot's addresses next must not be reached by what was published of it.
    pub(super) fn check_unpublished(&mut self, slot: &SlotPlan) {
        let nics = slot.api_nics();
        let mut own = nics.iter().flat_map(|nic| nic.clone_addresses());
        if own.any(|own| self.ports.iter().any(|(_, led)| led.contains(&own))) {
            let name = &slot.netns_name;
            self.violations
                .push(format!("{name} torn down while a port leads to it"));
        }
    }

    pub(super) fn check_unused(&mut self, policy: u32) {
        let uses = |slot: &&ModelSlot| slot.tenancy.is_some_and(|own| own.policy.0 == policy);
        if let Some(slot) = self.slots.values().find(uses) {
            let number = slot.number;
            self.violations
                .push(format!("policy {policy} removed under slot {number}"));
        }
    }
}

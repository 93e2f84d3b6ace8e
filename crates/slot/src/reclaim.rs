//! What to do, after a start, with what the journal says and what the kernel has. Pure.
//!
//! | kernel \ journal | nothing | lease | released slot |
//! |---|---|---|---|
//! | complete slot | adopt as ready | keep | tear down |
//! | pieces of one | tear down | repair | tear down |
//! | nothing | – | build again | tear down, or let rest if that was done |
//!
//! A complete slot without an entry was never handed out (a hand-out is journaled before its
//! answer), so that it may be. What belongs to no pool of the journal is removed. A lease wins over
//! anything else said of its slot. An interface without a namespace of ours is a piece of a slot, but all of one
//! that a lease has attached to somebody's.

use std::collections::{BTreeMap, BTreeSet};

use sandwire_api::name::Name;

use crate::{
    journal::ReleasedSlot,
    lease::LeaseRecord,
    network::{Inventory, Leftover},
    plan::{Plan, SlotNumber, names},
};

/// A slot by its pool and number.
pub type SlotKey = (Name, SlotNumber);

/// What to do, each slot in one list at most.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Actions {
    /// Complete slots that nobody has: ready to be handed out.
    pub adopt: Vec<SlotKey>,
    /// Leased slots, complete or not.
    pub keep: Vec<SlotKey>,
    /// Of these, slots with missing pieces.
    pub repair: Vec<SlotKey>,
    /// Of these, slots of which nothing is left.
    pub rebuild: Vec<SlotKey>,
    /// Slots to tear down.
    pub tear_down: Vec<SlotKey>,
    /// Slots that are torn down and whose clone addresses rest.
    pub rest: Vec<SlotKey>,
    /// Objects of no pool, to be removed one by one.
    pub reclaim: Vec<Leftover>,
}

/// Decides. `plans` are the pools of the journal.
#[must_use]
pub fn decide(
    instance: &Name,
    plans: &BTreeMap<Name, &Plan>,
    leases: &[LeaseRecord],
    released: &[ReleasedSlot],
    inventory: &Inventory,
) -> Actions {
    let mut actions = Actions::default();
    let (mut complete, mut pieces) = (BTreeSet::new(), BTreeSet::new());
    for (pool, number) in &inventory.slots {
        let number = SlotNumber(*number);
        match known_pool(plans, pool, number) {
            Some(pool) => {
                complete.insert((pool, number));
            }
            None => actions.reclaim.extend(objects_of(instance, pool, number)),
        }
    }
    let leased: BTreeSet<SlotKey> = leases.iter().map(slot_of).collect();
    for leftover in &inventory.leftovers {
        match owner(instance, plans, leftover) {
            // Nobody else takes away what isn't on the host.
            Some(slot) if matches!(leftover, Leftover::Child(_)) => {
                if !leased.contains(&slot) {
                    actions.reclaim.push(leftover.clone());
                }
            }
            // Beside a complete slot of that number: the inventory was taken while the kernel was still
            // at work, and the slot's inspection will see what is wrong.
            Some(slot) if complete.contains(&slot) => {}
            Some(slot) => {
                pieces.insert(slot);
            }
            None => actions.reclaim.push(leftover.clone()),
        }
    }

    let mut decided = BTreeSet::new();
    for lease in leases {
        let slot = slot_of(lease);
        if has_child(lease) {
            // Nothing of it is on the host: the inspection looks for it in its namespace.
        } else if pieces.contains(&slot) {
            // An interface that leads into somebody's namespace is all that there is of such a slot.
            if lease.attach.is_none() {
                actions.repair.push(slot.clone());
            }
        } else if !complete.contains(&slot) {
            actions.rebuild.push(slot.clone());
        }
        actions.keep.push(slot.clone());
        decided.insert(slot);
    }
    for released in released {
        let slot = (released.pool.clone(), released.slot);
        if !plans.contains_key(&slot.0) || !decided.insert(slot.clone()) {
            continue;
        }
        let in_kernel = complete.contains(&slot) || pieces.contains(&slot);
        if released.is_torn_down && !in_kernel {
            actions.rest.push(slot);
        } else {
            actions.tear_down.push(slot);
        }
    }
    let unowned = pieces.difference(&decided).cloned();
    actions.tear_down.extend(unowned);
    actions.adopt.extend(complete.difference(&decided).cloned());
    actions
}

fn slot_of(lease: &LeaseRecord) -> SlotKey {
    (lease.pool.clone(), lease.slot)
}

fn has_child(lease: &LeaseRecord) -> bool {
    let attach = lease.attach.as_ref();
    attach.is_some_and(|attach| attach.parent.is_some())
}

fn known_pool(plans: &BTreeMap<Name, &Plan>, pool: &str, number: SlotNumber) -> Option<Name> {
    let pool: Name = pool.parse().ok()?;
    let plan = plans.get(&pool)?;
    (number.0 < plan.slots_max).then_some(pool)
}

/// The slot of a known pool that an object is a piece of.
fn owner(instance: &Name, plans: &BTreeMap<Name, &Plan>, leftover: &Leftover) -> Option<SlotKey> {
    match leftover {
        Leftover::Namespace(name) => {
            let (of_instance, pool, number) = names::parse_netns(name)?;
            (of_instance == instance.as_str()).then_some(())?;
            Some((known_pool(plans, pool, number)?, number))
        }
        Leftover::Interface(name) => {
            let (tag, number) = names::parse_host_interface(name)?;
            let (pool, plan) = plans.iter().find(|(_, plan)| plan.tag == tag)?;
            Some((pool.clone(), plan.slot_of_interface(number)?))
        }
        Leftover::Alias(alias) | Leftover::Child(alias) => {
            let (of_instance, pool, number) = names::parse_alias(alias)?;
            (of_instance == instance.as_str()).then_some(())?;
            Some((known_pool(plans, pool, number)?, number))
        }
    }
}

/// The two objects that make a complete slot visible; what else it has goes with them.
fn objects_of(instance: &Name, pool: &str, number: SlotNumber) -> [Leftover; 2] {
    [
        Leftover::Alias(names::host_alias(instance.as_str(), pool, number)),
        Leftover::Namespace(names::netns(instance.as_str(), pool, number)),
    ]
}

#[cfg(test)]
mod tests;

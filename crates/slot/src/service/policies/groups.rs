//! Groups that policies name, and which of them may talk.
//!
//! The data path knows a group by a number. That stands for one name while a policy names it, and until the data path
//! has no pair of it any more; then another name may have it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::{Arc, PoisonError},
};

use sandwire_api::{name::Name, slot::DataPath};
use sandwire_datapath::group_number;

use super::{Shared, State};
use crate::{
    error::{NetworkError, ServiceError},
    plan::Plan,
};

/// Names behind the numbers of groups.
#[derive(Debug, Default)]
pub(super) struct Groups {
    named: HashMap<u32, Named>,
    /// Groups that may talk by what the data path was told, each pair in both directions. It has no others.
    pairs: BTreeSet<(u32, u32)>,
    /// Whether it has all of them, which isn't known before it was told after a start, nor when that failed or nobody was there to
    /// be told.
    pub(super) are_told: bool,
}

#[derive(Debug)]
struct Named {
    name: Name,
    /// How often policies name it.
    uses: usize,
}

/// The group of a policy, and those to which it may talk.
#[derive(Clone, Debug)]
pub(super) struct Membership {
    pub(super) group: u32,
    talks_to: Arc<[u32]>,
}

impl Membership {
    fn new(group: &Name, talks_to: &[Name]) -> Self {
        let number_of = |name: &Name| group_number(name.as_str());
        Self {
            group: number_of(group),
            talks_to: talks_to.iter().map(number_of).collect(),
        }
    }

    fn numbers(&self) -> impl Iterator<Item = u32> {
        self.talks_to.iter().copied().chain([self.group])
    }

    pub(super) fn talks(&self) -> bool {
        !self.talks_to.is_empty()
    }
}

impl Groups {
    /// Refuses names of which one can't be told from another. Keeps none.
    pub(super) fn check(&self, group: &Name, talks_to: &[Name]) -> Result<(), ServiceError> {
        let mut own = HashMap::new();
        for name in talks_to.iter().chain([group]) {
            let number = group_number(name.as_str());
            let named = self.named.get(&number).map(|named| &named.name);
            let known = named.unwrap_or_else(|| own.entry(number).or_insert(name));
            if known != name {
                return Err(ServiceError::Conflict {
                    operation: "use",
                    object: format!("group '{name}'"),
                    reason: format!("it can't be told from group '{known}': choose another name"),
                });
            }
        }
        Ok(())
    }

    /// Keeps the names of a policy, which were checked.
    pub(super) fn add(&mut self, group: &Name, talks_to: &[Name]) -> Membership {
        for name in talks_to.iter().chain([group]) {
            let number = group_number(name.as_str());
            let named = self.named.entry(number).or_insert_with(|| Named {
                name: name.clone(),
                uses: 0,
            });
            named.uses += 1;
        }
        Membership::new(group, talks_to)
    }

    /// Forgets the names of a policy that nobody has any more.
    pub(super) fn remove(&mut self, membership: &Membership) {
        for number in membership.numbers() {
            let Some(named) = self.named.get_mut(&number) else {
                continue;
            };
            named.uses -= 1;
            if named.uses == 0 && !self.may_talk(number) {
                self.named.remove(&number);
            }
        }
    }

    fn may_talk(&self, number: u32) -> bool {
        let mut of_group = self.pairs.range((number, 0)..=(number, u32::MAX));
        of_group.next().is_some()
    }

    fn has_exactly(&self, pairs: &BTreeSet<(u32, u32)>) -> bool {
        self.are_told && self.pairs == *pairs
    }

    /// Notes what the data path may have of these, because it failed when it was told.
    fn may_have(&mut self, pairs: BTreeSet<(u32, u32)>) {
        self.pairs.extend(pairs);
        self.are_told = false;
    }

    /// Notes what the data path has, if it was told.
    fn set_pairs(&mut self, pairs: BTreeSet<(u32, u32)>, are_told: bool) {
        self.are_told = are_told;
        let before = std::mem::replace(&mut self.pairs, pairs);
        for (number, _) in before {
            let is_unused = self.named.get(&number).is_some_and(|named| named.uses == 0);
            if is_unused && !self.may_talk(number) {
                self.named.remove(&number);
            }
        }
    }
}

impl State {
    /// Of all policies that the data path knows, and of pools that the host refuses since a start: their sandboxes run on, by
    /// policies of before.
    fn memberships(&self) -> Vec<Membership> {
        let known = self.policies.known.values();
        let known = known.map(|known| known.membership.clone());
        let waiting: BTreeMap<&Name, &Plan> = self
            .pools
            .iter()
            .filter(|(_, entry)| entry.not_added.is_some())
            .filter(|(_, entry)| {
                entry.plan.spec.data_path != DataPath::Nft || entry.moving.is_some()
            })
            .map(|(name, entry)| (name, &*entry.plan))
            .collect();
        let of_pools = waiting.values().map(|plan| (*plan, &plan.spec.policy));
        let leases = (!waiting.is_empty()).then(|| self.leases.values());
        let of_leases = leases.into_iter().flatten().filter_map(|lease| {
            let plan = waiting.get(&lease.record.pool)?;
            Some((*plan, lease.record.policy.as_deref()?))
        });
        let of_waiting = of_pools
            .chain(of_leases)
            .map(|(plan, policy)| Membership::new(plan.group_of(policy), &policy.talks_to));
        known.chain(of_waiting).filter(Membership::talks).collect()
    }
}

impl Shared {
    /// Tells the data path which groups may talk, if that has changed. The auditor tries again what fails.
    pub(in crate::service) fn sync_group_pairs(&self) {
        let _gate = self
            .policies_gate
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = self.tell_group_pairs() {
            tracing::error!(%error, "cannot say which groups may talk; trying again");
        }
    }

    /// The same for who holds the gate. Lists are compared without the lock: there may be very many.
    pub(super) fn tell_group_pairs(&self) -> Result<(), NetworkError> {
        let memberships = self.lock().memberships();
        let wanted = pairs_of(&memberships);
        if self.lock().policies.groups.has_exactly(&wanted) {
            return Ok(());
        }
        let told = self.network.set_group_pairs(&wanted);
        let groups = &mut self.lock().policies.groups;
        match &told {
            Ok(are_told) => groups.set_pairs(wanted, *are_told),
            Err(_) => groups.may_have(wanted),
        }
        told.map(|_| ())
    }

    /// Refuses a policy by which more groups would talk than the data path has room for, for who holds the gate. Returns
    /// whether by it any do that don't yet.
    pub(super) fn check_group_pairs(
        &self,
        group: &Name,
        talks_to: &[Name],
    ) -> Result<bool, ServiceError> {
        if talks_to.is_empty() {
            return Ok(false);
        }
        let mut memberships = self.lock().memberships();
        let before = pairs_of(&memberships).len();
        memberships.push(Membership::new(group, talks_to));
        let (after, most) = (pairs_of(&memberships).len(), self.network.group_pairs_max());
        // Former versions refused nothing: where there are too many already, others may still become fewer.
        if after > before.max(most) {
            return Err(ServiceError::Conflict {
                operation: "let others talk to",
                object: format!("group '{group}'"),
                reason: format!(
                    "with its talks_to {} pairs of groups would name each other, of {} that the data path has room for: have \
                     sandboxes that may all talk to each other share a group, with clone_to_clone, or take groups out of talks_to",
                    after.div_ceil(2),
                    most / 2
                ),
            });
        }
        Ok(after > before)
    }
}

/// Pairs of groups of which each lists the other.
fn pairs_of(memberships: &[Membership]) -> BTreeSet<(u32, u32)> {
    let lists = memberships.iter().flat_map(|membership| {
        let listed = membership.talks_to.iter();
        listed.map(|other| (membership.group, *other))
    });
    let lists: HashSet<(u32, u32)> = lists.collect();
    let agreed = lists
        .iter()
        .filter(|(from, to)| lists.contains(&(*to, *from)));
    agreed.copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both have the number 0xc9bd57cd.
    const ALIKE: [&str; 2] = ["yiijsv", "ktodoe"];

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    #[test]
    fn a_name_is_kept_as_long_as_a_policy_or_a_pair_has_it() {
        let [first, second] = ALIKE.map(name);
        let mut groups = Groups::default();
        groups
            .check(&name("web"), &[first.clone(), second.clone()])
            .unwrap_err();
        groups.check(&second, &[]).unwrap();

        let [one, other] = [&[first.clone()][..], &[]].map(|list| groups.add(&name("web"), list));
        groups.check(&second, &[]).unwrap_err();
        groups.check(&first, &[]).unwrap();
        groups.remove(&one);
        groups.check(&second, &[]).unwrap();
        groups.remove(&other);
        assert!(groups.named.is_empty(), "{groups:?}");

        let ours = groups.add(&name("web"), std::slice::from_ref(&first));
        let theirs = groups.add(&first, &[name("web")]);
        let pairs = pairs_of(&[ours.clone(), theirs.clone()]);
        assert_eq!(pairs.len(), 2);
        groups.set_pairs(pairs, true);
        groups.remove(&ours);
        groups.remove(&theirs);
        groups.check(&second, &[]).unwrap_err();
        groups.set_pairs(BTreeSet::new(), true);
        groups.check(&second, &[]).unwrap();
        assert!(groups.named.is_empty(), "{groups:?}");
    }
}

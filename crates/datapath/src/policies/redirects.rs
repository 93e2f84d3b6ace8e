//! What may be reached only by the relay, in the maps of policies: for interfaces whose packets don't pass the host's
//! stack, where the relay takes them.
//!
//! Sources are prefixes of policy 0, which is nobody's. Each leads to the number of a set, by which destinations are kept
//! as those of a policy are. A set is complete before a source leads to it, and goes when others are told of the next
//! time: packets that are under way may still look at it.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;

use super::{Belongings, Policies};
use crate::{
    Error,
    abi::{Policy, PolicyFlag, PrefixKey, PrefixValue},
    policy::{self, Redirect, key_of},
};

/// The first number of a set, behind those of all policies. This one stays empty.
const SETS: u32 = 1 << 31;

/// A source, and the number of its set.
type Source = (PrefixKey, u32);

impl Policies {
    /// Says what may be reached only by the relay: exactly this.
    pub(crate) fn set_redirects(&self, redirects: &[Redirect]) -> Result<(), Error> {
        let mut told = self
            .redirects
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if told.as_deref() == Some(redirects) {
            return Ok(());
        }
        let has_any = self.array.read(0).flags != 0;
        if has_any || !redirects.is_empty() {
            // If it fails half of it may be there.
            *told = None;
            self.exchange(redirects)?;
        }
        *told = Some(redirects.to_vec());
        Ok(())
    }

    fn exchange(&self, redirects: &[Redirect]) -> Result<(), Error> {
        let (before, sets) = self.known_redirects()?;
        let is_used = |set: &u32| before.iter().any(|(_, used)| used == set);
        let (used, stale): (Vec<_>, Vec<_>) = sets.iter().partition(|(set, _)| is_used(set));
        for (_, stale) in stale {
            self.remove_set(stale)?;
        }
        let mut next = sets.keys().next_back().map_or(SETS, |last| *last) + 1;
        let mut sources = Vec::new();
        for (from, of_source) in by_source(redirects) {
            let set = match of_source.is_empty() {
                true => SETS,
                false => {
                    let compiled = policy::compile_redirects(&of_source);
                    let first_list = self.take_lists(compiled.lists.len())?;
                    let set = Belongings::new(&compiled, next, first_list);
                    if let Err(error) = self.write_belongings(&compiled, &set) {
                        // What stays all the same is stale for the next exchange.
                        let _ = self.remove_set(&set);
                        return Err(error);
                    }
                    next += 1;
                    next - 1
                }
            };
            sources.push((key_of(from), set));
        }
        for (key, set) in &sources {
            let value = PrefixValue {
                list: *set,
                ..PrefixValue::default()
            };
            self.prefixes.set(key, &value)?;
        }
        let flags = match sources.is_empty() {
            true => 0,
            false => PolicyFlag::Redirects.number(),
        };
        let nobodys = Policy {
            flags,
            ..Policy::default()
        };
        self.array.write(0, &nobodys);
        for (key, _) in &before {
            if !sources.iter().any(|(kept, _)| kept == key) {
                self.prefixes.remove(key)?;
            }
        }
        if sources.is_empty() {
            // What is still looked at may pass.
            for (_, used) in used {
                self.remove_set(used)?;
            }
        }
        Ok(())
    }

    /// Sources with the numbers of their sets, and what belongs to each set.
    fn known_redirects(&self) -> Result<(Vec<Source>, BTreeMap<u32, Belongings>), Error> {
        let mut sources = Vec::new();
        let mut sets: BTreeMap<u32, Belongings> = BTreeMap::new();
        for (key, value) in self.prefixes.entries()? {
            if key.policy == 0 {
                sources.push((key, value.list));
            } else if key.policy >= SETS {
                let set = sets.entry(key.policy).or_default();
                set.prefixes.push(key);
                set.lists.extend(Some(value.list).filter(|list| *list != 0));
            }
        }
        Ok((sources, sets))
    }

    fn remove_set(&self, set: &Belongings) -> Result<(), Error> {
        let lists: BTreeSet<u32> = set.lists.iter().copied().collect();
        self.lists.remove_all(&Vec::from_iter(lists))?;
        self.prefixes.remove_all(&set.prefixes)
    }
}

/// Each source with all that is said of it. The longest prefix counts, so it has what is said of those around it too.
fn by_source(redirects: &[Redirect]) -> BTreeMap<IpNet, Vec<&Redirect>> {
    let mut sources: BTreeMap<IpNet, Vec<&Redirect>> = BTreeMap::new();
    for of_source in redirects {
        sources.entry(of_source.from.trunc()).or_default();
    }
    // In the trie IPv4 lies inside IPv6: what is said of ::/0 must not hold for IPv4.
    if sources.keys().any(|from| from.contains(&policy::mapped())) {
        sources.entry(policy::all_ipv4()).or_default();
    }
    for (from, of_source) in &mut sources {
        of_source.extend(redirects.iter().filter(|said| said.from.contains(from)));
    }
    sources
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redirect(from: &str, to: &str) -> Redirect {
        Redirect {
            from: from.parse().unwrap(),
            to: to.parse().unwrap(),
            protocol: None,
            ports: None,
        }
    }

    #[test]
    fn a_source_has_what_is_said_of_the_sources_around_it() {
        let all = [
            redirect("10.0.0.0/8", "198.51.100.0/24"),
            redirect("10.1.0.0/16", "192.0.2.0/24"),
            redirect("::/0", "2001:db8::/32"),
        ];
        let sources: Vec<(String, usize)> = by_source(&all)
            .into_iter()
            .map(|(from, of_source)| (from.to_string(), of_source.len()))
            .collect();
        let expected = [
            ("0.0.0.0/0", 0),
            ("10.0.0.0/8", 1),
            ("10.1.0.0/16", 2),
            ("::/0", 1),
        ];
        assert_eq!(
            sources,
            expected.map(|(from, count)| (from.to_owned(), count))
        );
    }
}

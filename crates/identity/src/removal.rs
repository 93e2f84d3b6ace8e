//! Taking identities away: one that is to go, and all at once whose cgroup is gone or that a crash has left.
//!
//! What can be done for all at once is: a host loses a thousand containers in the same second.

use std::{collections::BTreeSet, fs, net::IpAddr, path::Path};

use sandwire_api::name::Name;
use sandwire_kernel_net::netns;

use crate::{
    Error, Identities, Identity,
    abi::{Record, record_state},
    cgroup, connections,
    identities::{LOOPBACK, Open, is_meant},
    interface, loading,
    maps::{self, Maps},
    numbers, programs, receivers,
    record::Facts,
    takeover,
};

/// What was found to be left over, and taken away.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Repaired {
    /// Identities whose cgroup is gone.
    pub ended: Vec<String>,
    /// Identities that somebody had begun to add or to remove.
    pub incomplete: Vec<String>,
    /// Identities whose addresses somebody had taken off their interface, and which have them again.
    pub restored: Vec<String>,
    /// What couldn't be taken away or put back, with the reason; the next call tries again.
    pub failures: Vec<String>,
}

impl Identities {
    /// Removes an identity, by name or by the path of its cgroup. Its sockets stay as they are, and are no longer
    /// watched; their addresses are gone.
    ///
    /// # Errors
    /// There is none, or something of it can't be removed; the rest is.
    pub fn remove(&self, wanted: &str) -> Result<Identity, Error> {
        self.remove_watched(wanted, &mut |_| ())
    }

    /// As [`Identities::remove`]; `watch` is told of each step before it is done.
    ///
    /// # Errors
    /// As of [`Identities::remove`].
    pub fn remove_watched(
        &self,
        wanted: &str,
        watch: &mut dyn FnMut(&'static str),
    ) -> Result<Identity, Error> {
        let is_wanted = |_, facts: &Facts| is_meant(facts.name.as_str(), &facts.path, wanted);
        self.remove_where(wanted, is_wanted, watch)
    }

    /// As [`Identities::remove_watched`], of the first one that is wanted.
    pub(crate) fn remove_where(
        &self,
        name: &str,
        is_wanted: impl Fn(u64, &Facts) -> bool,
        watch: &mut dyn FnMut(&'static str),
    ) -> Result<Identity, Error> {
        let missing = || Error::NoIdentity {
            name: name.to_owned(),
        };
        let mut open = self.open()?.ok_or_else(missing)?;
        self.repair_open(&mut open)?;
        let records = open.maps.records()?;
        let mut known = records
            .iter()
            .filter_map(|(cgroup, record)| Some((*cgroup, Facts::read(record)?)));
        let found = known.find(|(cgroup, facts)| facts.has_number() && is_wanted(*cgroup, facts));
        let (cgroup, facts) = found.ok_or_else(missing)?;
        self.count_connections([&facts])?;
        let last = self.describe(&open.maps, cgroup, &facts)?;
        let mut outcome = self.take_away(&mut open, &[(cgroup, facts)], watch)?;
        outcome.remove(0)?;
        Ok(last)
    }

    /// Removes what a crash has left, and identities whose cgroup is gone.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn repair(&self) -> Result<Repaired, Error> {
        match self.open()? {
            Some(mut open) => {
                let repaired = self.repair_open(&mut open)?;
                self.forget_unused(&open.maps)?;
                Ok(repaired)
            }
            None => Ok(Repaired::default()),
        }
    }

    pub(crate) fn repair_open(&self, open: &mut Open) -> Result<Repaired, Error> {
        let known = self.known(open)?;
        // Of those that are complete; former cgroups with open sockets keep them.
        let alive: BTreeSet<&Name> = known
            .iter()
            .filter(|known| known.is_alive && known.state != record_state::REMOVING)
            .map(|known| &known.facts.name)
            .collect();
        let complete = known.iter().filter(|known| known.is_complete());
        let standing: BTreeSet<Name> = complete
            .filter(|known| alive.contains(&known.facts.name) && !known.is_abandoned())
            .map(|known| known.facts.name.clone())
            .collect();
        let mut kept = BTreeSet::new();
        let mut staying = Vec::new();
        let (mut leaving, mut were_complete) = (Vec::new(), Vec::new());
        for known in known {
            let is_standing = standing.contains(&known.facts.name);
            let is_former = known.state == record_state::FORMER && known.is_alive;
            if is_standing && (known.is_complete() || is_former) {
                kept.insert(known.cgroup);
                staying.push(known.facts);
            } else {
                were_complete.push(known.is_complete());
                leaving.push((known.cgroup, known.facts));
            }
        }
        let mut repaired = Repaired::default();
        let outcomes = self.take_away(open, &leaving, &mut |_| ())?;
        for (((cgroup, facts), was_complete), outcome) in
            leaving.iter().zip(were_complete).zip(outcomes)
        {
            let name = facts.name.to_string();
            match outcome {
                // One that can't be removed is in nobody else's way.
                Err(error) => {
                    kept.insert(*cgroup);
                    repaired.failures.push(error.to_string());
                }
                // The identity goes on, or is told itself.
                Ok(()) if !facts.has_number() => {}
                Ok(()) if was_complete => repaired.ended.push(name),
                Ok(()) => repaired.incomplete.push(name),
            }
        }
        put_back_addresses(&staying, &mut repaired)?;
        open.maps.policies.repair()?;
        self.remove_strays(&kept)?;
        Ok(repaired)
    }

    /// What the records say, all of this network namespace, once takeovers are finished. What can't be read is none of ours.
    fn known(&self, open: &mut Open) -> Result<Vec<Known>, Error> {
        let here = netns::cookie()?;
        let records = open.maps.records()?;
        let mut read = records.iter().filter_map(|(_, record)| Facts::read(record));
        if read.any(|facts| facts.netns != here) {
            return Err(self.other_namespace());
        }
        takeover::finish(&mut open.maps, &records)?;
        let mut known = Vec::new();
        for (cgroup, record) in open.maps.records()? {
            let Some(facts) = Facts::read(&record) else {
                open.maps.delete_record(cgroup)?;
                continue;
            };
            known.push(Known {
                cgroup,
                state: record.word(Record::state()),
                is_alive: open.maps.is_alive(cgroup)?,
                facts,
            });
        }
        Ok(known)
    }

    /// Folders of links that no record speaks of.
    fn remove_strays(&self, cgroups: &BTreeSet<u64>) -> Result<(), Error> {
        let links = self.links();
        let failed = |source| Error::system("list", links.display().to_string(), source);
        if !links.exists() {
            return Ok(());
        }
        for entry in fs::read_dir(&links).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let cgroup = entry.file_name().to_string_lossy().parse::<u64>();
            if !cgroup.is_ok_and(|cgroup| cgroups.contains(&cgroup)) {
                programs::detach(&entry.path())?;
            }
        }
        Ok(())
    }

    /// Takes identities away; what came of each. Every step is tried, and the record of each goes only if all of its
    /// steps were done. `watch` is told of each step before it is done.
    pub(crate) fn take_away(
        &self,
        open: &mut Open,
        leaving: &[(u64, Facts)],
        watch: &mut dyn FnMut(&'static str),
    ) -> Result<Vec<Result<(), Error>>, Error> {
        if leaving.is_empty() {
            return Ok(Vec::new());
        }
        let formers = takeover::formers_of(&open.maps, leaving)?;
        let all = [leaving, &formers].concat();
        let mut removal = Removal::new(&all, watch);
        removal.deactivate(&mut open.maps);
        removal.clear_maps(&mut open.maps);
        removal.each("programs", |cgroup, _| {
            programs::detach(&self.links_folder(cgroup))
        });
        let listening = removal.find_listening(&open.maps);
        removal.each_numbered("tally", |facts| open.maps.end_tally(facts.number));
        removal.take_off_addresses();
        removal.remove_own_cgroups();
        removal.forget_sockets(&self.maps_folder(), &listening);
        removal.forget(&mut open.maps);
        let records = open.maps.records()?;
        open.maps.set_has_receivers(receivers::may_be(&records))?;
        if records.is_empty() {
            (removal.watch)("namespace");
            programs::detach_from_namespace(&self.maps_folder())?;
            loading::forget(&self.maps_folder())?;
            connections::LOOKER.forget(&self.maps_folder())?;
            receivers::LOOKER.forget(&self.maps_folder())?;
        }
        let mut outcomes = removal.outcomes();
        // What stays of former cgroups the next call takes away, and tells of.
        outcomes.truncate(leaving.len());
        Ok(outcomes)
    }
}

/// A record, and whether its cgroup is there or has open sockets.
struct Known {
    cgroup: u64,
    state: u32,
    is_alive: bool,
    facts: Facts,
}

impl Known {
    fn is_complete(&self) -> bool {
        self.state == record_state::COMPLETE
    }

    fn is_abandoned(&self) -> bool {
        self.facts.has_own_cgroup && cgroup::is_abandoned(&self.facts.path, self.cgroup)
    }
}

/// Puts addresses on their interfaces again that nobody has any more: who manages the host's network may take off what it
/// doesn't know, as NetworkManager when it turns networking off.
fn put_back_addresses(staying: &[Facts], repaired: &mut Repaired) -> Result<(), Error> {
    if staying.is_empty() {
        return Ok(());
    }
    let held = interface::addresses()?;
    let lo = interface::find(LOOPBACK)?.0;
    for facts in staying {
        let mut has_again = false;
        for (interface, address) in put_on(facts, lo) {
            if held.contains_key(&address) {
                continue;
            }
            match interface::put_back(interface, address) {
                Ok(done) => has_again |= done,
                Err(error) => repaired.failures.push(error.to_string()),
            }
        }
        if has_again {
            repaired.restored.push(facts.name.to_string());
        }
    }
    Ok(())
}

/// The addresses that were put on interfaces for an identity; `lo` is the loopback's number.
fn put_on(facts: &Facts, lo: u32) -> Vec<(u32, IpAddr)> {
    let ours = facts.addresses.iter().zip(&facts.ours);
    let ours = ours
        .filter(|(_, is_ours)| **is_ours)
        .map(|(address, _)| (facts.interface, *address));
    let of_loopback = (lo, IpAddr::V6(numbers::loopback6(facts.number)));
    let of_loopback = facts.has_loopback6.then_some(of_loopback);
    ours.chain(of_loopback).collect()
}

/// Identities on their way out, and what has failed of each.
struct Removal<'a> {
    leaving: &'a [(u64, Facts)],
    failures: Vec<Vec<String>>,
    watch: &'a mut dyn FnMut(&'static str),
}

impl<'a> Removal<'a> {
    fn new(leaving: &'a [(u64, Facts)], watch: &'a mut dyn FnMut(&'static str)) -> Self {
        Self {
            leaving,
            failures: vec![Vec::new(); leaving.len()],
            watch,
        }
    }

    /// Does a step of each.
    fn each(&mut self, step: &'static str, mut act: impl FnMut(u64, &Facts) -> Result<(), Error>) {
        for ((cgroup, facts), failures) in self.leaving.iter().zip(&mut self.failures) {
            (self.watch)(step);
            if let Err(error) = act(*cgroup, facts) {
                failures.push(error.to_string());
            }
        }
    }

    /// Does a step of each that has a number: of others, that is another's still.
    fn each_numbered(
        &mut self,
        step: &'static str,
        mut act: impl FnMut(&Facts) -> Result<(), Error>,
    ) {
        for ((_, facts), failures) in self.leaving.iter().zip(&mut self.failures) {
            if !facts.has_number() {
                continue;
            }
            (self.watch)(step);
            if let Err(error) = act(facts) {
                failures.push(error.to_string());
            }
        }
    }

    /// Does a step of all at once: if it fails, it fails for each.
    fn all(&mut self, step: &'static str, act: impl FnOnce(&[(u64, Facts)]) -> Result<(), Error>) {
        (self.watch)(step);
        if let Err(error) = act(self.leaving) {
            for failures in &mut self.failures {
                failures.push(error.to_string());
            }
        }
    }

    fn deactivate(&mut self, maps: &mut Maps) {
        self.each("record", |cgroup, facts| {
            maps.set_record(cgroup, &facts.record(record_state::REMOVING)?)
        });
        self.each("deactivate", |cgroup, _| maps.clear_identity(cgroup));
    }

    /// Numbers of those that have sockets which listen, or may have: most have none any more. Once their programs are gone none
    /// comes to be counted.
    fn find_listening(&mut self, maps: &Maps) -> BTreeSet<u32> {
        let mut listening = BTreeSet::new();
        self.each_numbered("listening", |facts| {
            if maps.may_listen(facts.number)? {
                listening.insert(facts.number);
            }
            Ok(())
        });
        listening
    }

    /// Long after the tallies, without which no program enters a socket: one that was at it is through with it by now.
    fn forget_sockets(&mut self, maps_folder: &Path, listening: &BTreeSet<u32>) {
        if !listening.is_empty() {
            self.all("sockets", |_| maps::forget_sockets(maps_folder, listening));
        }
    }

    fn clear_maps(&mut self, maps: &mut Maps) {
        self.each_numbered("owners", |facts| {
            let addresses = facts.owners().into_iter().map(|(address, _)| address);
            maps.delete_owned(facts.number, addresses)
        });
        self.all("policies", |leaving| {
            let numbered = leaving.iter().filter(|(_, facts)| facts.has_number());
            let numbers: Vec<u32> = numbered.map(|(_, facts)| facts.number).collect();
            maps.policies.remove(&numbers)
        });
        self.all("dialers", |leaving| {
            let tcp_only = leaving
                .iter()
                .filter(|(_, facts)| facts.tcp_only && facts.has_number());
            maps.forget_dialers(&tcp_only.map(|(_, facts)| facts.number).collect())
        });
    }

    /// Takes the addresses off that were put on for them.
    fn take_off_addresses(&mut self) {
        let lo = match interface::find(LOOPBACK) {
            Ok(lo) => lo.0,
            Err(error) => return self.all("addresses", |_| Err(error)),
        };
        let (mut owners, mut addresses) = (Vec::new(), Vec::new());
        for (owner, (_, facts)) in self.leaving.iter().enumerate() {
            let mut put_on = put_on(facts, lo);
            owners.resize(owners.len() + put_on.len(), owner);
            addresses.append(&mut put_on);
        }
        (self.watch)("addresses");
        match interface::remove(&addresses) {
            Ok(failures) => {
                for (index, error) in failures {
                    self.failures[owners[index]].push(error.to_string());
                }
            }
            Err(error) => self.all("addresses", |_| Err(error)),
        }
    }

    /// Where somebody is in it still, who made it removes it, or the next who finds it empty.
    fn remove_own_cgroups(&mut self) {
        for (cgroup, facts) in self.leaving {
            if facts.has_own_cgroup {
                (self.watch)("cgroup");
                cgroup::remove_if_empty(&facts.path, *cgroup);
            }
        }
    }

    /// Deletes the records of those of which nothing is left.
    fn forget(&mut self, maps: &mut Maps) {
        for ((cgroup, _), failures) in self.leaving.iter().zip(&mut self.failures) {
            if failures.is_empty() {
                (self.watch)("forget");
                if let Err(error) = maps.delete_record(*cgroup) {
                    failures.push(error.to_string());
                }
            }
        }
    }

    fn outcomes(self) -> Vec<Result<(), Error>> {
        let failures = self.leaving.iter().zip(self.failures);
        let outcomes = failures.map(|((_, facts), failures)| {
            if failures.is_empty() {
                return Ok(());
            }
            Err(Error::Remains {
                name: facts.name.to_string(),
                failures: failures.join("; "),
            })
        });
        outcomes.collect()
    }
}

//! Adding and listing identities, and their policies.
//!
//! One process at a time: the folder of pins is locked. The order of steps is such that a crash between any two leaves
//! either a record that isn't complete, which the next call takes back, or a complete identity:
//!
//! ```text
//! add     record (building), addresses, namespace, programs (idle), owners, policy, entry (active), record (complete); for a
//!         cgroup that is made anew see `takeover`
//! remove  record (removing), entry (idle), owners, policy, programs, tally, addresses, own cgroup, sockets, record away
//! ```

use std::{
    fs::{self, File},
    net::IpAddr,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use rustix::fs::FlockOperation;
use sandwire_kernel_net::netns;

use crate::{
    Cgroup, Error, Identity, IdentityPolicy, NewIdentity, State,
    abi::record_state,
    connections, interface,
    loading::{self, Programs},
    maps::Maps,
    numbers,
    plan::{Planned, check_families, check_groups, plan},
    policies::Prepared,
    programs,
    record::{Facts, is_complete},
};

const BPF_FS_MAGIC: u64 = 0xcafe_4a11;
const FOLDER_MODE: u32 = 0o700;
/// How long one whose cgroup is gone is waited for, if it is in the way.
const PATIENCE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(20);
/// Maps of this layout.
const VERSION: &str = "v2";
const LINKS: &str = "links";

/// The identities of a host, by the folder of their pins.
#[derive(Clone, Debug)]
pub struct Identities {
    folder: PathBuf,
}

/// Maps that nobody else changes meanwhile.
pub(crate) struct Open {
    pub(crate) maps: Maps,
    _lock: File,
}

impl Identities {
    /// Those with pins in a folder on a bpffs; [`crate::FOLDER`] unless somebody wants another.
    #[must_use]
    pub fn new(folder: &Path) -> Self {
        Self {
            folder: folder.to_owned(),
        }
    }

    /// Gives a cgroup an identity, which holds for sockets made from now on.
    ///
    /// # Errors
    /// The request can't be had, or the kernel refuses; then nothing is left of it.
    pub fn add(&self, new: &NewIdentity) -> Result<Identity, Error> {
        self.add_watched(new, &mut |_| ())
    }

    /// As [`Identities::add`], for who tries again: what is in the way until the kernel lets go of it isn't waited for.
    ///
    /// # Errors
    /// As of [`Identities::add`].
    pub fn add_at_once(&self, new: &NewIdentity) -> Result<Identity, Error> {
        self.add_within(new, Duration::ZERO, &mut |_| ())
    }

    /// As [`Identities::add`]; `watch` is told of each step before it is done.
    ///
    /// # Errors
    /// As of [`Identities::add`].
    pub fn add_watched(
        &self,
        new: &NewIdentity,
        watch: &mut dyn FnMut(&'static str),
    ) -> Result<Identity, Error> {
        self.add_within(new, PATIENCE, watch)
    }

    fn add_within(
        &self,
        new: &NewIdentity,
        patience: Duration,
        watch: &mut dyn FnMut(&'static str),
    ) -> Result<Identity, Error> {
        let cgroup = Cgroup::open(&new.cgroup)?;
        new.check()?;
        check_families(&new.addresses, &new.prefixes)?;
        let netns = netns::cookie()?;
        let lock = self.lock()?;
        self.repair_first(&lock)?;
        let programs = Programs::prepare(&self.maps_folder())?;
        let maps = Maps::open(&self.maps_folder())?.ok_or_else(|| self.vanished())?;
        let mut open = Open { maps, _lock: lock };
        let planned = self.plan(&mut open, new, &cgroup, netns, patience);
        let (Planned { facts, former }, policy) = match planned {
            Ok(planned) => planned,
            Err(error) => {
                // What can't be let go of now, the next call lets go of.
                let _ = self.forget_unused(&open.maps);
                return Err(error);
            }
        };
        let (done, built) = match former {
            None => {
                let done = self.build(&mut open, &programs, &cgroup, &facts, &policy, watch);
                (done, facts.clone())
            }
            Some(former) => {
                let held = open.maps.policies.get(facts.number).ok().flatten();
                let policy = (held.as_ref() != Some(&new.policy)).then_some(&policy);
                let both = (&facts, former);
                let done = self.take_over(&mut open, &programs, &cgroup, both, policy, watch);
                (done, facts.without_number())
            }
        };
        if let Err(error) = done {
            // What can't be taken back now is taken back by the next call.
            let _ = self.take_away(&mut open, &[(cgroup.id, built)], &mut |_| ());
            return Err(error);
        }
        self.describe(&open.maps, cgroup.id, &facts)
    }

    /// Repairs what there is before the programs are loaded: with the last identity they would go again.
    fn repair_first(&self, lock: &File) -> Result<(), Error> {
        let Some(maps) = Maps::open(&self.maps_folder())? else {
            return Ok(());
        };
        let folder = || self.maps_folder().display().to_string();
        let again = lock.try_clone();
        let _lock = again.map_err(|source| Error::system("lock", folder(), source))?;
        self.repair_open(&mut Open { maps, _lock }).map(drop)
    }

    /// What is to be built. One whose cgroup was removed a moment ago is waited for: the kernel lets go of it by and by.
    fn plan(
        &self,
        open: &mut Open,
        new: &NewIdentity,
        cgroup: &Cgroup,
        netns: u64,
        patience: Duration,
    ) -> Result<(Planned, Prepared), Error> {
        let begun = Instant::now();
        let planned = loop {
            match plan(&open.maps, new, cgroup, netns) {
                Err(Error::Dying { .. }) if begun.elapsed() < patience => thread::sleep(PAUSE),
                planned => break planned?,
            }
            self.repair_open(open)?;
        };
        let facts = &planned.facts;
        let policy = Prepared::new(&facts.name, &new.policy)?;
        check_groups(&open.maps, facts.number, &facts.name, &new.policy)?;
        Ok((planned, policy))
    }

    /// Lets go of the programs if nobody has an identity: who was to have the first one may have been refused, or killed.
    pub(crate) fn forget_unused(&self, maps: &Maps) -> Result<(), Error> {
        if maps.records()?.is_empty() {
            loading::forget(&self.maps_folder())?;
        }
        Ok(())
    }

    fn build(
        &self,
        open: &mut Open,
        programs: &Programs,
        cgroup: &Cgroup,
        facts: &Facts,
        policy: &Prepared,
        watch: &mut dyn FnMut(&'static str),
    ) -> Result<(), Error> {
        watch("number");
        open.maps.set_last_number(facts.number)?;
        watch("record");
        let building = facts.record(record_state::BUILDING)?;
        open.maps.set_record(cgroup.id, &building)?;
        watch("tally");
        open.maps.start_tally(facts)?;
        let ours = facts.addresses.iter().zip(&facts.ours);
        for (address, _) in ours.filter(|(_, is_ours)| **is_ours) {
            watch("address");
            interface::add(facts.interface, *address)?;
        }
        if facts.has_loopback6 {
            watch("loopback");
            let loopback = interface::find(LOOPBACK)?;
            interface::add(loopback.0, IpAddr::V6(numbers::loopback6(facts.number)))?;
        }
        self.activate(open, programs, cgroup, facts, Some(policy), watch)?;
        watch("complete");
        let complete = facts.record(record_state::COMPLETE)?;
        open.maps.set_record(cgroup.id, &complete)
    }

    /// Attaches the programs to a cgroup, sets the policy if it is another, and has them work.
    pub(crate) fn activate(
        &self,
        open: &mut Open,
        programs: &Programs,
        cgroup: &Cgroup,
        facts: &Facts,
        policy: Option<&Prepared>,
        watch: &mut dyn FnMut(&'static str),
    ) -> Result<(), Error> {
        watch("namespace");
        // Or has it run this build's, where a former one has attached its own.
        programs.renew_on_namespace(&self.maps_folder())?;
        if facts.tcp_only {
            watch("connections");
            connections::LOOKER.prepare(&self.maps_folder())?;
        }
        let folder = self.links_folder(cgroup.id);
        make_folder(&folder)?;
        for name in programs::names(facts.needs()) {
            watch(name);
            programs.attach(name, cgroup, &folder.join(name))?;
        }
        watch("counters");
        open.maps.clear_counters(cgroup.id)?;
        for (address, owner) in facts.owners() {
            watch("owner");
            open.maps.set_owner(address, owner)?;
        }
        if facts.has_receivers() {
            watch("receivers");
            open.maps.set_has_receivers(true)?;
        }
        if let Some(policy) = policy {
            open.maps.policies.set(facts.number, policy, watch)?;
        }
        watch("activate");
        open.maps.set_identity(cgroup.id, &facts.value())
    }

    /// All identities. What a crash has left, and those whose cgroup is gone, are removed first, as far as they can be
    /// ([`Identities::repair`] says why not).
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn list(&self) -> Result<Vec<Identity>, Error> {
        let Some(mut open) = self.open()? else {
            return Ok(Vec::new());
        };
        self.repair_open(&mut open)?;
        self.forget_unused(&open.maps)?;
        let records = open.maps.records()?;
        let complete = records.iter().filter(|(_, record)| is_complete(record));
        let known: Vec<(u64, Facts)> = complete
            .filter_map(|(cgroup, record)| Some((*cgroup, Facts::read(record)?)))
            .collect();
        self.count_connections(known.iter().map(|(_, facts)| facts))?;
        known
            .iter()
            .map(|(cgroup, facts)| self.describe(&open.maps, *cgroup, facts))
            .collect()
    }

    /// One identity, by name or by the path of its cgroup.
    ///
    /// # Errors
    /// There is none, or the kernel refuses.
    pub fn show(&self, wanted: &str) -> Result<Identity, Error> {
        let mut listed = self.list()?.into_iter();
        listed
            .find(|identity| is_meant(identity.name.as_str(), &identity.cgroup, wanted))
            .ok_or_else(|| Error::NoIdentity {
                name: wanted.to_owned(),
            })
    }

    /// What an identity may reach, by its name or the path of its cgroup.
    ///
    /// # Errors
    /// There is none, or the kernel refuses.
    pub fn policy(&self, wanted: &str) -> Result<IdentityPolicy, Error> {
        let is_wanted = |_, facts: &Facts| is_meant(facts.name.as_str(), &facts.path, wanted);
        let (open, facts) = self.find(wanted, is_wanted)?;
        let policy = open.maps.policies.get(facts.number)?;
        policy.ok_or_else(|| Error::NoPolicy {
            name: facts.name.to_string(),
        })
    }

    /// Says what an identity may reach, from now on and in one step. Connections of TCP that are open stay.
    ///
    /// # Errors
    /// There is none, the policy can't be had, or the kernel refuses; then the old one holds.
    pub fn set_policy(&self, wanted: &str, policy: &IdentityPolicy) -> Result<(), Error> {
        self.set_policy_watched(wanted, policy, &mut |_| ())
    }

    /// As [`Identities::set_policy`]; `watch` is told of each step before it is done.
    ///
    /// # Errors
    /// As of [`Identities::set_policy`].
    pub fn set_policy_watched(
        &self,
        wanted: &str,
        policy: &IdentityPolicy,
        watch: &mut dyn FnMut(&'static str),
    ) -> Result<(), Error> {
        let is_wanted = |_, facts: &Facts| is_meant(facts.name.as_str(), &facts.path, wanted);
        self.set_policy_where(wanted, is_wanted, policy, watch)
    }

    /// As [`Identities::set_policy_watched`], of the first one that is wanted.
    pub(crate) fn set_policy_where(
        &self,
        name: &str,
        is_wanted: impl Fn(u64, &Facts) -> bool,
        policy: &IdentityPolicy,
        watch: &mut dyn FnMut(&'static str),
    ) -> Result<(), Error> {
        let (mut open, facts) = self.find(name, is_wanted)?;
        let prepared = Prepared::new(&facts.name, policy)?;
        check_groups(&open.maps, facts.number, &facts.name, policy)?;
        open.maps.policies.set(facts.number, &prepared, watch)
    }

    /// The maps, repaired, and what is known of an identity.
    fn find(
        &self,
        name: &str,
        is_wanted: impl Fn(u64, &Facts) -> bool,
    ) -> Result<(Open, Facts), Error> {
        let missing = || Error::NoIdentity {
            name: name.to_owned(),
        };
        let mut open = self.open()?.ok_or_else(missing)?;
        self.repair_open(&mut open)?;
        let records = open.maps.records()?;
        let mut known = records
            .iter()
            .filter(|(_, record)| is_complete(record))
            .filter_map(|(cgroup, record)| Some((*cgroup, Facts::read(record)?)));
        let found = known.find(|(cgroup, facts)| is_wanted(*cgroup, facts));
        let (_, facts) = found.ok_or_else(missing)?;
        Ok((open, facts))
    }

    /// Where each identity has a folder of its own, which comes and goes with it. It may not be there yet.
    #[must_use]
    pub fn links(&self) -> PathBuf {
        self.maps_folder().join(LINKS)
    }

    /// Has what connections have done counted that are open, where nothing else counts it.
    pub(crate) fn count_connections<'a>(
        &self,
        identities: impl IntoIterator<Item = &'a Facts>,
    ) -> Result<(), Error> {
        if identities.into_iter().any(|facts| facts.tcp_only) {
            connections::LOOKER.run(&self.maps_folder())?;
        }
        Ok(())
    }

    pub(crate) fn describe(
        &self,
        maps: &Maps,
        cgroup: u64,
        facts: &Facts,
    ) -> Result<Identity, Error> {
        let state = if Cgroup::is_there(&facts.path, cgroup) {
            State::Active
        } else {
            State::Dying
        };
        let interface = interface::name(facts.interface)?;
        Ok(facts.answer(cgroup, state, interface, maps.counters(cgroup, facts)?))
    }

    /// The maps with the lock; `None` if there never was an identity.
    pub(crate) fn open(&self) -> Result<Option<Open>, Error> {
        if !self.maps_folder().exists() {
            return Ok(None);
        }
        let lock = self.lock()?;
        let maps = Maps::open(&self.maps_folder())?;
        Ok(maps.map(|maps| Open { maps, _lock: lock }))
    }

    fn lock(&self) -> Result<File, Error> {
        let nearest = self.folder.ancestors().find(|path| path.exists());
        if !nearest.is_some_and(is_bpffs) {
            return Err(Error::NoBpffs {
                folder: self.folder.clone(),
            });
        }
        let folder = self.maps_folder();
        make_folder(&folder)?;
        let failed = |source| Error::system("lock", folder.display().to_string(), source);
        let lock = File::open(&folder).map_err(failed)?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive)
            .map_err(|error| failed(error.into()))?;
        Ok(lock)
    }

    pub(crate) fn maps_folder(&self) -> PathBuf {
        self.folder.join(VERSION)
    }

    pub(crate) fn links_folder(&self, cgroup: u64) -> PathBuf {
        self.links().join(cgroup.to_string())
    }

    pub(crate) fn other_namespace(&self) -> Error {
        Error::OtherNamespace {
            folder: self.folder.clone(),
        }
    }

    pub(crate) fn vanished(&self) -> Error {
        let source = std::io::Error::from(std::io::ErrorKind::NotFound);
        Error::system("open", self.maps_folder().display().to_string(), source)
    }
}

pub(crate) const LOOPBACK: &str = "lo";

pub(crate) fn is_meant(name: &str, path: &Path, wanted: &str) -> bool {
    name == wanted || (wanted.contains('/') && path == Path::new(wanted.trim_end_matches('/')))
}

fn is_bpffs(path: &Path) -> bool {
    // The type of the magic number depends on the machine.
    rustix::fs::statfs(path).is_ok_and(|found| {
        u64::try_from(found.f_type).is_ok_and(|found| found & 0xffff_ffff == BPF_FS_MAGIC)
    })
}

fn make_folder(folder: &Path) -> Result<(), Error> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(FOLDER_MODE)
        .create(folder)
        .map_err(|source| Error::system("create", folder.display().to_string(), source))
}

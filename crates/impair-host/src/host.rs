//! All targets: begun, changed, ended, found again.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex, mpsc},
};

use sandwire_api::impairment::Impairment;
use sandwire_datapath::divert::Diversion;
use sandwire_engine::PoolLimits;
use sandwire_impair::{
    app::Direction,
    compile::{CompileError, Compiled},
};
use sandwire_kernel_net::{
    interface::{self, InterfaceIndex},
    netlink::Socket,
    tc::Hook,
};

use crate::{
    control::{Cleared, Owner, State, Target},
    diversion::{DivertedTap, Making, Prepared, hooks_of, through},
    error::Error,
    fitness::Demands,
    namespace::Namespace,
    state::{Memory, Remembered},
    worker::{Id, LaneWay, Lanes, Worker},
};

mod ending;
mod looking;
mod parting;
mod recall;
mod revive;
mod room;
mod shared;
mod status;
mod torn_down;
mod waiting;

use parting::Parting;
use room::bytes_of;
pub(crate) use shared::SharedHost;

/// How all targets are served.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Where it is remembered what there is.
    pub(crate) memory: PathBuf,
    /// Where the pins of diversions are.
    pub(crate) pins: PathBuf,
    /// Engines.
    pub(crate) threads: usize,
    /// Targets at most.
    pub(crate) targets_max: usize,
    /// What each engine may have.
    pub(crate) limits: PoolLimits,
    /// Whether programs are attached by links.
    pub(crate) uses_links: bool,
}

/// An interface of the machine: inode of its namespace, and its number there.
type Key = (u64, u32);

/// All targets.
#[derive(Debug)]
pub(crate) struct Host {
    settings: Settings,
    memory: Memory,
    workers: Vec<Arc<Worker>>,
    own_inode: u64,
    /// Of the machine's namespace, whose default route nobody is to take by mistake.
    machines_inode: u64,
    next: Id,
    entries: BTreeMap<Key, Entry>,
    /// Ends that have been taken note of, for whoever has the lock to carry out without it.
    partings: Vec<Parting>,
    /// The last one that was looked at, where others are still to be.
    looked: Option<Key>,
    /// Whether all end, and none begins any more.
    is_ending: bool,
}

#[derive(Debug)]
struct Entry {
    id: Id,
    remembered: Remembered,
    /// What the engine has of its impairment.
    compiled: Compiled,
    /// What its impairment takes; see [`room`].
    bytes: usize,
    namespace: Arc<Namespace>,
    diversion: Arc<Diversion>,
    /// By ingress and egress of the interface.
    taps: [(String, InterfaceIndex); 2],
    worker: usize,
    state: State,
    /// Whether somebody carries its end out, see [`parting`]: nobody else touches it until that is done.
    is_parting: bool,
    /// Asks about interfaces of its namespace, which isn't entered for that.
    route: Mutex<Socket>,
}

/// A target whose packets are on their way out.
#[derive(Debug)]
pub(crate) struct Leaving {
    key: Key,
    id: Id,
    done: mpsc::Receiver<Cleared>,
}

impl Leaving {
    /// Waits until all have gone.
    pub(crate) fn wait(&self) -> Result<Cleared, Error> {
        self.done.recv().map_err(|_| Error::EngineGone)
    }
}

const HOOKS: [Hook; 2] = [Hook::Ingress, Hook::Egress];

impl Host {
    /// Starts the engines, without targets.
    pub(crate) fn start(settings: Settings) -> Result<Self, Error> {
        let memory = Memory::open(settings.memory.clone())?;
        let workers = (0..settings.threads.max(1))
            .map(|number| Worker::start(number, settings.limits).map(Arc::new))
            .collect::<Result<_, _>>()
            .map_err(|source| Error::State {
                operation: "start an engine for",
                path: settings.memory.clone(),
                source,
            })?;
        let own_inode = Namespace::open(None)?.inode;
        Ok(Self {
            own_inode,
            machines_inode: Namespace::machines().map_or(own_inode, |machines| machines.inode),
            settings,
            memory,
            workers,
            next: 1,
            entries: BTreeMap::new(),
            partings: Vec::new(),
            looked: None,
            is_ending: false,
        })
    }

    pub(crate) fn threads(&self) -> usize {
        self.workers.len()
    }

    /// Inode of the namespace that targets without one are in.
    pub(crate) fn own_inode(&self) -> u64 {
        self.own_inode
    }

    /// Impairs a target, or changes how.
    pub(crate) fn set(
        &mut self,
        target: &Target,
        owner: &Owner,
        impairment: &Impairment,
        force: bool,
    ) -> Result<(), Error> {
        impairment.check().map_err(|error| Error::Impairment {
            target: target.clone(),
            reason: error.to_string(),
        })?;
        if self.is_ending {
            return Err(Error::Ending {
                target: target.clone(),
            });
        }
        let namespace = Namespace::open(target.netns.as_deref())?;
        let index = index_in(&namespace, target)?.ok_or_else(|| Error::NoInterface {
            target: target.clone(),
        })?;
        let key = (namespace.inode, index.0);
        self.drop_replaced(target, key);
        let remembered = Remembered {
            target: target.clone(),
            owner: owner.clone(),
            impairment: impairment.clone(),
            force,
            inode: namespace.inode,
            cookie: namespace.cookie(),
            ifindex: index.0,
        };
        self.check_room(key, &remembered)?;
        if self.entries.get(&key).is_some_and(Entry::has_ended) {
            self.entries.remove(&key);
        }
        if self.entries.contains_key(&key) {
            return self.change(key, remembered);
        }
        if self.count() >= self.settings.targets_max && !self.drop_ended() {
            return Err(Error::Full {
                target: target.clone(),
                count: self.count(),
            });
        }
        self.begin(namespace, remembered)
    }

    /// Targets, without those whose end is being carried out.
    fn count(&self) -> usize {
        let entries = self.entries.values();
        entries.filter(|entry| !entry.is_parting).count()
    }

    /// Forgets the target that began first of those that have ended by themselves; whether there was one.
    fn drop_ended(&mut self) -> bool {
        let ended = self.entries.iter().filter(|(_, entry)| entry.has_ended());
        let first = ended.min_by_key(|(_, entry)| entry.id);
        let first = first.map(|(key, _)| *key);
        first.is_some_and(|key| self.entries.remove(&key).is_some())
    }

    fn change(&mut self, key: Key, mut remembered: Remembered) -> Result<(), Error> {
        let Some(entry) = self.entries.get_mut(&key) else {
            return Ok(());
        };
        let target = remembered.target.clone();
        if entry.state == State::Draining {
            return Err(Error::Draining { target });
        }
        if !remembered.owner.is_same(&entry.remembered.owner) && !remembered.force {
            return Err(Error::Owned {
                target,
                owner: entry.remembered.owner.clone(),
            });
        }
        if entry.remembered.target.side != target.side {
            return Err(Error::Unfit {
                target,
                reason:
                    "it is impaired with egress and ingress the other way round; clear it first"
                        .to_owned(),
            });
        }
        // Who insisted at its beginning has it taken up again.
        remembered.force |= entry.remembered.force;
        let before = &entry.remembered.impairment;
        let compiled = Compiled::after(&remembered.impairment, before, &entry.compiled);
        let compiled = compiled.map_err(|error| impossible(&target, &error))?;
        // First what a full disk could forbid, so that nothing has changed then.
        let written = self.memory.prepare(&remembered)?;
        let changed = self.workers[entry.worker].change(entry.id, &compiled)?;
        changed.map_err(|reason| Error::Impairment { target, reason })?;
        for (hook, (_, tap)) in HOOKS.into_iter().zip(&entry.taps) {
            let way = through(*tap, remembered.impairment.on_death);
            entry.diversion.set_way(hook, way);
        }
        entry.bytes = bytes_of(&remembered);
        entry.compiled = compiled;
        entry.remembered = remembered;
        written.commit()
    }

    fn begin(&mut self, namespace: Namespace, remembered: Remembered) -> Result<(), Error> {
        let compiled = Compiled::new(&remembered.impairment);
        let compiled = compiled.map_err(|error| impossible(&remembered.target, &error))?;
        let making = Making {
            target: &remembered.target,
            demands: Demands {
                force: remembered.force,
                is_machines: namespace.inode == self.machines_inode,
                is_of_lease: matches!(remembered.owner, Owner::Lease { .. }),
                by_filters: !self.settings.uses_links,
                frame_bytes_max: self.settings.limits.frame_bytes_max,
            },
            uses_links: self.settings.uses_links,
            folder: &self.settings.pins,
        };
        let prepared = making.prepare(&namespace)?;
        let written = self.memory.write(&remembered);
        let begun =
            written.and_then(|()| self.attach(namespace, remembered.clone(), compiled, prepared));
        if begun.is_err() {
            self.forget(&remembered);
        }
        begun
    }

    /// Hands the TAPs to an engine, and then puts the programs on the interface.
    fn attach(
        &mut self,
        namespace: Namespace,
        remembered: Remembered,
        compiled: Compiled,
        prepared: Prepared,
    ) -> Result<(), Error> {
        let Prepared {
            diversion,
            interface,
            taps,
        } = prepared;
        let id = self.next;
        self.next += 1;
        let worker = self.least_loaded();
        let named = [0, 1].map(|place| (taps[place].name.clone(), taps[place].index));
        let lanes = Lanes {
            id,
            diversion: diversion.clone(),
            compiled: compiled.clone(),
            ways: ways_of(&remembered.target, taps),
        };
        let added = self.workers[worker].add(lanes)?;
        added.map_err(|reason| Error::Impairment {
            target: remembered.target.clone(),
            reason,
        })?;
        for (hook, (_, tap)) in HOOKS.into_iter().zip(&named) {
            diversion.set_way(hook, through(*tap, remembered.impairment.on_death));
        }
        let attached = namespace.inside(|| {
            let route = Socket::route()?;
            diversion.attach()?;
            Ok(route)
        });
        let route = match attached {
            Ok(route) => Mutex::new(route),
            Err(error) => {
                drop(self.workers[worker].remove(id)?);
                return Err(error);
            }
        };
        tracing::info!(target = %remembered.target, owner = %remembered.owner, "impaired");
        let entry = Entry {
            id,
            compiled,
            bytes: bytes_of(&remembered),
            remembered,
            namespace: Arc::new(namespace),
            diversion,
            taps: named,
            worker,
            state: State::Impaired,
            is_parting: false,
            route,
        };
        let key = (entry.namespace.inode, interface.index.0);
        self.entries.insert(key, entry);
        Ok(())
    }

    fn least_loaded(&self) -> usize {
        let load = |worker: &usize| {
            let entries = self.entries.values();
            entries.filter(|entry| entry.worker == *worker).count()
        };
        (0..self.workers.len()).min_by_key(load).unwrap_or(0)
    }

    /// Begins to end the impairment of a target; none if it isn't impaired.
    pub(crate) fn begin_clear(
        &mut self,
        target: &Target,
        flush: bool,
    ) -> Result<Option<Leaving>, Error> {
        let Some(key) = self.key_now(target)? else {
            return Ok(None);
        };
        let waits = !flush && self.entries.get(&key).is_some_and(Entry::is_impaired);
        if waits && !self.may_wait(&key) {
            return Err(Error::Waiting {
                target: target.clone(),
                owner: self.entries[&key].remembered.owner.clone(),
            });
        }
        self.begin_leaving(key, flush)
    }

    /// Which of the targets that one is, if it is one.
    fn key_now(&self, target: &Target) -> Result<Option<Key>, Error> {
        let by_name = self
            .entries
            .iter()
            .find(|(_, entry)| entry.remembered.target.is_same_interface(target));
        match (key_of(target), by_name) {
            // The same namespace may have another file, and another interface the name that this one had.
            (Ok(Some(key)), _) if self.entries.contains_key(&key) => Ok(Some(key)),
            (_, Some((key, _))) => Ok(Some(*key)),
            (found, None) => found.map(|_| None),
        }
    }

    fn begin_leaving(&mut self, key: Key, flush: bool) -> Result<Option<Leaving>, Error> {
        let Some(entry) = self.entries.get_mut(&key) else {
            return Ok(None);
        };
        match entry.state {
            State::Ended { .. } => {
                self.entries.remove(&key);
                return Ok(None);
            }
            State::Draining if !flush => {
                return Err(Error::Draining {
                    target: entry.remembered.target.clone(),
                });
            }
            _ => entry.state = State::Draining,
        }
        let id = entry.id;
        let done = self.workers[entry.worker].drain(id, flush)?;
        Ok(Some(Leaving { key, id, done }))
    }

    /// Has the diversion taken away whose packets have gone, unless somebody else who waited for that does.
    pub(crate) fn finish_clear(&mut self, leaving: &Leaving) -> Option<Parting> {
        self.has(leaving).then(|| self.part(leaving.key, None))?
    }

    /// Whether it is still there.
    fn has(&self, leaving: &Leaving) -> bool {
        let found = self.entries.get(&leaving.key);
        found.is_some_and(|entry| entry.id == leaving.id)
    }
}

impl Entry {
    fn is_impaired(&self) -> bool {
        self.state == State::Impaired
    }

    fn has_ended(&self) -> bool {
        matches!(self.state, State::Ended { .. })
    }

    fn is_of_lease(&self) -> bool {
        matches!(self.remembered.owner, Owner::Lease { .. })
    }
}

/// Of an impairment that can't be compiled.
fn impossible(target: &Target, error: &CompileError) -> Error {
    Error::Impairment {
        target: target.clone(),
        reason: error.to_string(),
    }
}

/// The interface that has the target's name now, if there is one.
fn key_of(target: &Target) -> Result<Option<Key>, Error> {
    let namespace = Namespace::open(target.netns.as_deref())?;
    let index = index_in(&namespace, target)?;
    Ok(index.map(|index| (namespace.inode, index.0)))
}

/// Number of the target's interface, if there is one.
fn index_in(namespace: &Namespace, target: &Target) -> Result<Option<InterfaceIndex>, Error> {
    namespace.inside(|| {
        let found = interface::find(&mut Socket::route()?, &target.interface)?;
        Ok(found.map(|found| found.index))
    })
}

/// Lanes by ingress and egress of the interface, with what the sandbox calls them.
fn ways_of(target: &Target, taps: [DivertedTap; 2]) -> [LaneWay; 2] {
    let (egress, _) = hooks_of(target.side);
    let mut hooks = HOOKS.into_iter();
    taps.map(|tap| {
        let hook = hooks.next().unwrap_or(Hook::Egress);
        let direction = if hook == egress {
            Direction::Egress
        } else {
            Direction::Ingress
        };
        LaneWay {
            direction,
            hook,
            tap,
        }
    })
}

#[cfg(test)]
mod tests;

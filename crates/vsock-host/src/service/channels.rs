//! All channels of the service, and what is done to them.
//!
//! One thread, that of the control socket, owns this. Each change is done as a whole or undone again:
//! checked, entered in the directory, remembered on disk, and last made real by a worker or the router.

mod error;

use std::{
    collections::BTreeMap,
    io,
    os::{fd::OwnedFd, unix::net::UnixListener},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::Ordering::Relaxed,
        mpsc::{Receiver, sync_channel},
    },
    thread::JoinHandle,
    time::Duration,
};

use sandwire_api::vsock::{VsockConnection, VsockKind, VsockPolicy, VsockType};

pub use self::error::ChannelError;
use crate::{
    address::VmKey,
    budget::Budget,
    capture::{Captures, Sink},
    control::{VmSpec, VmTraffic},
    directory::{Directory, DirectoryError, Face, Placement},
    hybrid::{
        callee::Callee,
        router::{self, HybridSetup, RouterCommand, RouterHandle},
    },
    lifeline::Lifeline,
    listener::{self, Descriptors, PATH_MAX, listen_at},
    place::{Place, Spot},
    policy::{self},
    readiness::Waker,
    state::{Remembered, State},
    statistics::VmCounters,
    worker::{self, Command, VmSetup, WorkerHandle, WorkerSettings},
};

/// How long a worker or the router may take to do as it was told.
const PATIENCE: Duration = Duration::from_secs(10);

/// All channels.
#[derive(Debug)]
pub struct Channels {
    directory: Arc<Directory>,
    state: State,
    workers: Vec<Thread<WorkerHandle>>,
    router: Thread<RouterHandle>,
    captures: Captures,
    vms: BTreeMap<VmKey, Channel>,
    /// How long one of these threads may take to do as it was told.
    patience: Duration,
}

#[derive(Debug)]
struct Channel {
    spec: VmSpec,
    /// Its folder, if it could be looked at.
    place: Option<Place>,
    counters: Arc<VmCounters>,
    /// The worker that serves it; the router without.
    worker: Option<usize>,
    sink: Option<Arc<Sink>>,
}

#[derive(Debug)]
struct Thread<H> {
    handle: H,
    thread: JoinHandle<()>,
}

impl Channels {
    /// Starts the threads: so many workers, the router.
    ///
    /// # Errors
    /// When the kernel has no threads or descriptors.
    pub fn start(
        threads: usize,
        total_bytes: u64,
        settings: &WorkerSettings,
        state: State,
        captures: Captures,
        failed: &Arc<Waker>,
    ) -> io::Result<Self> {
        let directory = Arc::new(Directory::new());
        let budget = Arc::new(Budget::new(total_bytes));
        let workers: io::Result<Vec<_>> = (0..threads)
            .map(|index| {
                let (directory, budget) = (directory.clone(), budget.clone());
                let lifeline = Lifeline::of(failed.clone());
                let (handle, thread) =
                    worker::spawn(index, directory, budget, settings.clone(), lifeline)?;
                Ok(Thread { handle, thread })
            })
            .collect();
        let workers = workers?;
        let lifeline = Lifeline::of(failed.clone());
        let (handle, thread) = router::spawn(directory.clone(), budget, lifeline)?;
        Ok(Self {
            directory,
            state,
            workers,
            router: Thread { handle, thread },
            captures,
            vms: BTreeMap::new(),
            patience: PATIENCE,
        })
    }

    /// How many workers there are.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.workers.len()
    }

    /// Serves a guest, and remembers it.
    ///
    /// # Errors
    /// See [`ChannelError`].
    pub fn add(&mut self, spec: VmSpec) -> Result<(), ChannelError> {
        check(&spec)?;
        let found = Place::of(&spec.folder);
        if is_gone(&found) {
            return Err(gone(spec));
        }
        self.take_in(spec, found.ok(), true)
    }

    /// Serves a guest that is remembered already. If that fails, it stays remembered, as what is missing now may be there
    /// at the next start; unless its folder is gone, and with it the lease.
    ///
    /// # Errors
    /// See [`ChannelError`].
    pub fn restore(&mut self, remembered: Remembered) -> Result<(), ChannelError> {
        let Remembered { vm, place } = remembered;
        let found = Place::of(&vm.folder);
        let is_another = matches!((&found, place), (Ok(found), Some(place)) if *found != place);
        if is_another || is_gone(&found) {
            self.forget(&vm.key);
            return Err(gone(vm));
        }
        check(&vm)?;
        self.take_in(vm, place.or(found.ok()), false)
    }

    fn take_in(
        &mut self,
        spec: VmSpec,
        place: Option<Place>,
        is_new: bool,
    ) -> Result<(), ChannelError> {
        let key = spec.key.clone();
        let worker = (spec.kind == VsockKind::VhostUser).then(|| self.idlest());
        let counters = Arc::new(VmCounters::default());
        let callee = || Callee::new(&spec.limits, counters.clone());
        self.directory.add(Placement {
            key: key.clone(),
            face: match worker {
                Some(index) => Face::Local(self.workers[index].handle.clone()),
                None => Face::Hybrid(Arc::new(callee())),
            },
            cid: spec.cid,
            virtual_cid: spec.virtual_cid,
            socket: spec.stream_socket(),
            policy: spec.policy.clone(),
        })?;
        let remembered = match is_new {
            true => self.state.write(&spec, place),
            false => Ok(()),
        };
        let outcome = remembered
            .map_err(ChannelError::from)
            .and_then(|()| self.serve(&spec, place, worker, counters.clone()));
        if let Err(error) = outcome {
            self.directory.remove(&key);
            if is_new {
                self.forget(&key);
            }
            return Err(error);
        }
        self.vms.insert(
            key,
            Channel {
                spec,
                place,
                counters,
                worker,
                sink: None,
            },
        );
        Ok(())
    }

    /// The worker with the fewest guests.
    fn idlest(&self) -> usize {
        let mut guests = vec![0_usize; self.workers.len()];
        for worker in self.vms.values().filter_map(|vm| vm.worker) {
            guests[worker] += 1;
        }
        let least = guests.iter().enumerate().min_by_key(|(_, guests)| **guests);
        least.map_or(0, |(index, _)| index)
    }

    fn serve(
        &self,
        spec: &VmSpec,
        place: Option<Place>,
        worker: Option<usize>,
        counters: Arc<VmCounters>,
    ) -> Result<(), ChannelError> {
        let Some(worker) = worker else {
            let setup = HybridSetup {
                key: spec.key.clone(),
                cid: spec.cid,
                socket: spec.stream_socket(),
                place,
                limits: spec.limits.clone(),
                counters,
            };
            let (sender, answer) = sync_channel(1);
            let command = RouterCommand::Add(Box::new(setup), sender);
            self.router.handle.send(command);
            let outcome = await_answer(&answer, self.patience);
            if matches!(outcome, Err(ChannelError::Silent)) {
                // It may do it yet.
                let (sender, _) = sync_channel(1);
                let command = RouterCommand::Remove(spec.key.clone(), sender);
                self.router.handle.send(command);
            }
            return Ok(outcome??);
        };
        let setup = listen(spec, place, counters)?;
        let (sender, answer) = sync_channel(1);
        let command = Command::AddVm(Box::new(setup), sender);
        self.workers[worker].handle.send(command);
        let outcome = await_answer(&answer, self.patience);
        if matches!(outcome, Err(ChannelError::Silent)) {
            // It may do it yet.
            let (sender, _) = sync_channel(1);
            let command = Command::RemoveVm(spec.key.clone(), sender);
            self.workers[worker].handle.send(command);
        }
        let outcome = outcome.and_then(|outcome| Ok(outcome?));
        if outcome.is_err() {
            remove_sockets(spec, place);
        }
        outcome
    }

    /// Forgets what is on disk, after something else went wrong.
    fn forget(&self, key: &VmKey) {
        if let Err(error) = self.state.remove(key) {
            tracing::warn!(vm = %key, %error, "a vsock channel that couldn't be made is still remembered");
        }
    }

    /// Serves a guest no more. Right too for one that isn't served, remembered or not.
    ///
    /// # Errors
    /// When its file can't be removed: it would come back with the next start.
    pub fn remove(&mut self, key: &VmKey) -> Result<(), ChannelError> {
        self.state.remove(key)?;
        let Some(vm) = self.vms.remove(key) else {
            return Ok(());
        };
        self.directory.remove(key);
        if let Some(sink) = &vm.sink {
            sink.end_because("its channel was removed");
        }
        let (sender, answer) = sync_channel(1);
        match vm.worker {
            Some(worker) => {
                let command = Command::RemoveVm(key.clone(), sender);
                self.workers[worker].handle.send(command);
            }
            None => {
                let command = RouterCommand::Remove(key.clone(), sender);
                self.router.handle.send(command);
            }
        }
        let outcome = await_answer(&answer, self.patience);
        if vm.worker.is_some() {
            remove_sockets(&vm.spec, vm.place);
        }
        outcome
    }

    /// Replaces what a guest may reach.
    ///
    /// # Errors
    /// See [`ChannelError`].
    pub fn set_policy(&mut self, key: &VmKey, policy: VsockPolicy) -> Result<(), ChannelError> {
        let vm = self.vms.get_mut(key);
        let vm = vm.ok_or_else(|| DirectoryError::Unknown(key.clone()))?;
        policy::check(&policy, vm.spec.kind, &vm.spec.stream_socket())?;
        let mut spec = vm.spec.clone();
        spec.policy = policy.clone();
        self.state.write(&spec, vm.place)?;
        let outcome = match vm.worker {
            Some(worker) => {
                let outcome = self.directory.set_policy(key, policy);
                let command = Command::PolicyChanged(key.clone());
                self.workers[worker].handle.send(command);
                outcome.map_err(ChannelError::from)
            }
            None => {
                let (sender, answer) = sync_channel(1);
                let command = RouterCommand::SetPolicy(key.clone(), policy, sender);
                self.router.handle.send(command);
                let outcome = await_answer(&answer, self.patience);
                if matches!(outcome, Err(ChannelError::Silent)) {
                    // It may do it yet.
                    let (sender, _) = sync_channel(1);
                    let before = vm.spec.policy.clone();
                    let command = RouterCommand::SetPolicy(key.clone(), before, sender);
                    self.router.handle.send(command);
                }
                outcome.and_then(|outcome| Ok(outcome?))
            }
        };
        match outcome {
            Ok(()) => {
                vm.spec = spec;
                Ok(())
            }
            Err(error) => {
                if let Err(error) = self.state.write(&vm.spec, vm.place) {
                    tracing::error!(vm = %key, %error, "a policy that was refused is still remembered");
                }
                Err(error)
            }
        }
    }

    /// All guests.
    #[must_use]
    pub fn list(&self) -> Vec<VmSpec> {
        self.vms.values().map(|vm| vm.spec.clone()).collect()
    }

    /// The counters of one guest or of all.
    ///
    /// # Errors
    /// No such guest.
    pub fn traffic(&self, key: Option<&VmKey>) -> Result<Vec<VmTraffic>, ChannelError> {
        let describe = |vm: &Channel| {
            if vm.worker.is_none() {
                let spot = Spot::of(&vm.spec.stream_socket());
                let there = spot.is_ok_and(|spot| spot.find().is_ok());
                vm.counters.attached.store(there, Relaxed);
            }
            VmTraffic {
                key: vm.spec.key.clone(),
                traffic: vm.counters.snapshot(),
            }
        };
        match key {
            None => Ok(self.vms.values().map(describe).collect()),
            Some(key) => Ok(vec![describe(self.get(key)?)]),
        }
    }

    fn get(&self, key: &VmKey) -> Result<&Channel, DirectoryError> {
        let vm = self.vms.get(key);
        vm.ok_or_else(|| DirectoryError::Unknown(key.clone()))
    }

    /// The connections of one guest or of all.
    ///
    /// # Errors
    /// No such guest, or a thread that doesn't answer.
    pub fn connections(&self, key: Option<&VmKey>) -> Result<Vec<VsockConnection>, ChannelError> {
        let (sender, answers) = sync_channel(self.workers.len() + 1);
        // Who isn't asked about carries on: a list takes time from all guests of a thread.
        let (workers, router): (&[_], _) = match key.map(|key| self.get(key)).transpose()? {
            Some(Channel {
                worker: Some(worker),
                ..
            }) => (std::slice::from_ref(&self.workers[*worker]), None),
            Some(_) => (&[], Some(&self.router)),
            None => (&self.workers, Some(&self.router)),
        };
        for worker in workers {
            let command = Command::List(key.cloned(), sender.clone());
            worker.handle.send(command);
        }
        if let Some(router) = router {
            let command = RouterCommand::List(key.cloned(), sender);
            router.handle.send(command);
        }
        let mut connections = Vec::new();
        for _ in 0..workers.len() + usize::from(router.is_some()) {
            connections.append(&mut await_answer(&answers, self.patience)?);
        }
        connections.sort_by(|left, right| {
            let order = |one: &VsockConnection| {
                let ports = (one.guest_port, one.peer_port);
                (
                    one.owner_uid,
                    one.lease.clone(),
                    ports,
                    one.age_milliseconds,
                )
            };
            order(left).cmp(&order(right))
        });
        Ok(connections)
    }

    /// Begins a capture of a guest.
    ///
    /// # Errors
    /// See [`ChannelError`].
    pub fn start_capture(
        &mut self,
        key: &VmKey,
        output: OwnedFd,
        snap_length: u32,
    ) -> Result<Arc<Sink>, ChannelError> {
        self.get(key)?;
        let vm = self.vms.get_mut(key);
        let vm = vm.ok_or_else(|| DirectoryError::Unknown(key.clone()))?;
        if vm.sink.is_some() {
            return Err(ChannelError::Captured(key.clone()));
        }
        let counters = Arc::clone(&vm.counters);
        let sink = self.captures.start(output, snap_length, counters);
        let sink = sink.map_err(|source| ChannelError::Capture {
            vm: key.clone(),
            source,
        })?;
        vm.sink = Some(sink.clone());
        self.set_sink(key);
        Ok(sink)
    }

    /// Ends a capture, if it is still the guest's.
    pub fn end_capture(&mut self, key: &VmKey, sink: &Arc<Sink>) {
        sink.end();
        if let Some(vm) = self.vms.get_mut(key)
            && vm.sink.as_ref().is_some_and(|own| Arc::ptr_eq(own, sink))
        {
            vm.sink = None;
            self.set_sink(key);
        }
    }

    fn set_sink(&self, key: &VmKey) {
        let Some(vm) = self.vms.get(key) else {
            return;
        };
        let (key, sink) = (key.clone(), vm.sink.clone());
        match vm.worker {
            Some(worker) => {
                let worker = &self.workers[worker];
                worker.handle.send(Command::SetCapture(key, sink));
            }
            None => {
                let command = RouterCommand::SetCapture(key, sink);
                self.router.handle.send(command);
            }
        }
    }

    /// Ends all threads, in order. What is remembered stays so.
    pub fn end(self) {
        self.router.handle.send(RouterCommand::Stop);
        for worker in &self.workers {
            worker.handle.send(Command::Stop);
        }
        let workers = self.workers.into_iter().map(|worker| worker.thread);
        for thread in workers.chain([self.router.thread]) {
            if thread.join().is_err() {
                tracing::error!("a thread of the vsock service had panicked");
            }
        }
        drop(self.captures);
    }
}

/// What must be true of a guest whoever else there is.
fn check(spec: &VmSpec) -> Result<(), ChannelError> {
    let vm = || spec.key.clone();
    let longest = spec.seqpacket_socket();
    if !spec.folder.is_absolute() || longest.as_os_str().len() > PATH_MAX {
        return Err(ChannelError::Folder {
            vm: vm(),
            folder: spec.folder.clone(),
        });
    }
    let limits = spec.limits.check();
    limits.map_err(|source| ChannelError::Limits { vm: vm(), source })?;
    policy::check(&spec.policy, spec.kind, &spec.stream_socket())?;
    Ok(())
}

/// Whether a folder isn't there. One that can't be looked at may be.
fn is_gone(found: &io::Result<Place>) -> bool {
    matches!(found, Err(error) if error.kind() == io::ErrorKind::NotFound)
}

fn gone(spec: VmSpec) -> ChannelError {
    ChannelError::Gone {
        vm: spec.key,
        folder: spec.folder,
    }
}

/// Makes the three sockets of a guest, or none.
fn listen(
    spec: &VmSpec,
    place: Option<Place>,
    counters: Arc<VmCounters>,
) -> Result<VmSetup, ChannelError> {
    let one = |path: PathBuf, kind, descriptors| {
        listen_at(&path, kind, descriptors).map_err(|source| ChannelError::Listen {
            vm: spec.key.clone(),
            source,
        })
    };
    let refused = Descriptors::Refused;
    let stream_listener = one(spec.stream_socket(), VsockType::Stream, refused)?;
    let rest = one(spec.seqpacket_socket(), VsockType::Seqpacket, refused).and_then(|seqpacket| {
        // Last: closing it may wait for what VMMs have sent there, and a failure of the others would close it here.
        let vhost = one(spec.vhost_socket(), VsockType::Stream, Descriptors::Taken);
        if vhost.is_err() {
            remove_socket(place, &spec.seqpacket_socket());
        }
        Ok((seqpacket, vhost?))
    });
    if rest.is_err() {
        remove_socket(place, &spec.stream_socket());
    }
    let (seqpacket_listener, vhost) = rest?;
    Ok(VmSetup {
        key: spec.key.clone(),
        cid: spec.cid,
        limits: spec.limits.clone(),
        vhost_listener: UnixListener::from(vhost),
        stream_listener,
        seqpacket_listener,
        counters,
    })
}

fn remove_sockets(spec: &VmSpec, place: Option<Place>) {
    for path in [
        spec.vhost_socket(),
        spec.stream_socket(),
        spec.seqpacket_socket(),
    ] {
        remove_socket(place, &path);
    }
}

fn remove_socket(place: Option<Place>, path: &Path) {
    if let Err(error) = listener::remove_in(place, path) {
        tracing::warn!(path = %path.display(), %error, "removing a socket failed");
    }
}

fn await_answer<T>(answer: &Receiver<T>, patience: Duration) -> Result<T, ChannelError> {
    answer
        .recv_timeout(patience)
        .map_err(|_| ChannelError::Silent)
}

#[cfg(test)]
mod tests;

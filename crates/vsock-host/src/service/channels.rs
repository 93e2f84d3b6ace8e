//! All channels of the service, and what is done to them.
//!
//! One thread, that of the control socket, owns this. Each change is done as a whole or undone again:
//! checked, entered in the directory, remembered on disk, and last made real by a worker or the router.

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

use crate::{
    address::VmKey,
    budget::Budget,
    capture::{Captures, Sink},
    control::{RefusalCode, VmSpec, VmTraffic},
    directory::{Directory, DirectoryError, Face, Placement},
    hybrid::router::{self, HybridSetup, RouterCommand, RouterError, RouterHandle},
    lifeline::Lifeline,
    limits::LimitsError,
    listener::{self, Descriptors, ListenerError, PATH_MAX, listen_on},
    policy::{self, PolicyError},
    readiness::Waker,
    socket_file::SocketFile,
    state::{State, StateError},
    statistics::VmCounters,
    worker::{self, Command, VmError, VmSetup, WorkerHandle, WorkerSettings},
};

/// How long a worker or the router may take to do as it was told.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why something isn't done to a channel. Nothing has changed then.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// A CID or a guest that is taken or not there.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// A policy that can't be carried out.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// Limits that make no sense.
    #[error("limits of vsock channel {vm}: {source}")]
    Limits {
        /// Whose.
        vm: VmKey,
        /// What is wrong.
        source: LimitsError,
    },
    /// A folder that no socket can be in.
    #[error(
        "folder {folder} of vsock channel {vm}: {}",
        if folder.is_absolute() { "its longest socket has a path of more than 107 bytes" } else { "it isn't absolute" }
    )]
    Folder {
        /// Whose.
        vm: VmKey,
        /// The folder.
        folder: PathBuf,
    },
    /// A socket that can't be had.
    #[error("serve vsock channel {vm}: {source}")]
    Listen {
        /// Whose.
        vm: VmKey,
        /// Why.
        source: ListenerError,
    },
    /// The disk is full, or the like.
    #[error("remember vsock channel: {0}")]
    State(#[from] StateError),
    /// A worker refused.
    #[error(transparent)]
    Worker(#[from] VmError),
    /// The router refused.
    #[error(transparent)]
    Router(#[from] RouterError),
    /// It is being captured already.
    #[error("vsock channel {0} is being captured already; end that first")]
    Captured(VmKey),
    /// The descriptor of a capture.
    #[error("capture vsock channel {vm}: the file to write to: {source}")]
    Capture {
        /// Whose.
        vm: VmKey,
        /// What the kernel said.
        source: io::Error,
    },
    /// A thread doesn't answer.
    #[error("a thread of the vsock service doesn't answer; restart it, its channels come back")]
    Silent,
}

impl ChannelError {
    /// Whose fault it is.
    #[must_use]
    pub fn code(&self) -> RefusalCode {
        match self {
            Self::Directory(error) | Self::Router(RouterError::Directory(error)) => match error {
                DirectoryError::ReservedCid { .. } => RefusalCode::Invalid,
                DirectoryError::CidInUse { .. } | DirectoryError::Exists(_) => RefusalCode::InUse,
                DirectoryError::Unknown(_) => RefusalCode::NotFound,
            },
            Self::Policy(_) | Self::Limits { .. } | Self::Folder { .. } | Self::Capture { .. } => {
                RefusalCode::Invalid
            }
            Self::Listen { source, .. } | Self::Router(RouterError::Listen { source, .. }) => {
                match source {
                    ListenerError::InUse(_) | ListenerError::NotASocket(_) => RefusalCode::InUse,
                    ListenerError::TooLong { .. } => RefusalCode::Invalid,
                    ListenerError::Refused { .. } => RefusalCode::Failed,
                }
            }
            Self::Captured(_) => RefusalCode::InUse,
            Self::State(_) | Self::Worker(_) | Self::Router(_) | Self::Silent => {
                RefusalCode::Failed
            }
        }
    }
}

/// All channels.
#[derive(Debug)]
pub struct Channels {
    directory: Arc<Directory>,
    state: State,
    workers: Vec<Thread<WorkerHandle>>,
    router: Thread<RouterHandle>,
    captures: Captures,
    vms: BTreeMap<VmKey, Channel>,
}

#[derive(Debug)]
struct Channel {
    spec: VmSpec,
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
        self.take_in(spec, true)
    }

    /// Serves a guest that is remembered already. If that fails, it stays remembered, as what is missing now may be there
    /// at the next start; unless its folder is gone, and with it the lease.
    ///
    /// # Errors
    /// See [`ChannelError`].
    pub fn restore(&mut self, spec: VmSpec) -> Result<(), ChannelError> {
        self.take_in(spec, false)
    }

    fn take_in(&mut self, spec: VmSpec, is_new: bool) -> Result<(), ChannelError> {
        check(&spec)?;
        let key = spec.key.clone();
        let worker = (spec.kind == VsockKind::VhostUser).then(|| self.idlest());
        self.directory.add(Placement {
            key: key.clone(),
            face: worker.map_or(Face::Hybrid, |index| {
                Face::Local(self.workers[index].handle.clone())
            }),
            cid: spec.cid,
            virtual_cid: spec.virtual_cid,
            socket: spec.stream_socket(),
            policy: spec.policy.clone(),
        })?;
        let counters = Arc::new(VmCounters::default());
        let remembered = match is_new {
            true => self.state.write(&spec),
            false => Ok(()),
        };
        let outcome = remembered
            .map_err(ChannelError::from)
            .and_then(|()| self.serve(&spec, worker, counters.clone()));
        if let Err(error) = outcome {
            self.directory.remove(&key);
            if is_new || is_gone(&spec.folder) {
                self.forget(&key);
            }
            return Err(error);
        }
        self.vms.insert(
            key,
            Channel {
                spec,
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
        worker: Option<usize>,
        counters: Arc<VmCounters>,
    ) -> Result<(), ChannelError> {
        let Some(worker) = worker else {
            let setup = HybridSetup {
                key: spec.key.clone(),
                cid: spec.cid,
                socket: spec.stream_socket(),
                limits: spec.limits.clone(),
                counters,
            };
            let (sender, answer) = sync_channel(1);
            let command = RouterCommand::Add(Box::new(setup), sender);
            self.router.handle.send(command);
            return Ok(await_answer(&answer)??);
        };
        let setup = listen(spec, counters)?;
        let (sender, answer) = sync_channel(1);
        let command = Command::AddVm(Box::new(setup), sender);
        self.workers[worker].handle.send(command);
        let outcome = await_answer(&answer).and_then(|outcome| Ok(outcome?));
        if outcome.is_err() {
            remove_sockets(spec);
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
        let outcome = await_answer(&answer);
        if vm.worker.is_some() {
            remove_sockets(&vm.spec);
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
        self.state.write(&spec)?;
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
                await_answer(&answer).and_then(|outcome| Ok(outcome?))
            }
        };
        match outcome {
            Ok(()) => {
                vm.spec = spec;
                Ok(())
            }
            Err(error) => {
                if let Err(error) = self.state.write(&vm.spec) {
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
                let there = SocketFile::find(&vm.spec.stream_socket()).is_ok();
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
        if let Some(key) = key {
            self.get(key)?;
        }
        let (sender, answers) = sync_channel(self.workers.len() + 1);
        for worker in &self.workers {
            worker.handle.send(Command::List(sender.clone()));
        }
        self.router.handle.send(RouterCommand::List(sender));
        let mut connections = Vec::new();
        for _ in 0..=self.workers.len() {
            connections.append(&mut await_answer(&answers)?);
        }
        if let Some(key) = key {
            connections.retain(|one| one.owner_uid == key.tenant && one.lease == key.lease);
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

/// Whether a folder isn't there any more. One that can't be looked at may be.
fn is_gone(folder: &Path) -> bool {
    matches!(folder.try_exists(), Ok(false))
}

/// Makes the three sockets of a guest, or none.
fn listen(spec: &VmSpec, counters: Arc<VmCounters>) -> Result<VmSetup, ChannelError> {
    let one = |path: PathBuf, kind, descriptors| {
        listen_on(&path, kind, descriptors).map_err(|source| ChannelError::Listen {
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
            remove_socket(&spec.seqpacket_socket());
        }
        Ok((seqpacket, vhost?))
    });
    if rest.is_err() {
        remove_socket(&spec.stream_socket());
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

fn remove_sockets(spec: &VmSpec) {
    remove_socket(&spec.vhost_socket());
    remove_socket(&spec.stream_socket());
    remove_socket(&spec.seqpacket_socket());
}

fn remove_socket(path: &Path) {
    if let Err(error) = listener::remove(path) {
        tracing::warn!(path = %path.display(), %error, "removing a socket failed");
    }
}

fn await_answer<T>(answer: &Receiver<T>) -> Result<T, ChannelError> {
    answer
        .recv_timeout(PATIENCE)
        .map_err(|_| ChannelError::Silent)
}

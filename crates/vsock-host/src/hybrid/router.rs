//! The guest's way out where the VMM owns the device: a socket `PATH_PORT` for each port that the guest's
//! policy allows, and behind it whatever the policy says.
//!
//! A port without a rule has no socket, so the VMM itself refuses it. Ports that lead to the owner's own
//! socket (`to = host`) are left alone: the VMM connects there without us. One thread serves all guests and
//! all their connections; a change of policy opens and closes sockets and breaks off what is no longer
//! allowed.

mod connection;
mod starved;
mod turns;
mod watch;

use std::{
    collections::{BTreeSet, HashMap, HashSet, VecDeque},
    io,
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc::SyncSender},
    thread::{self, JoinHandle},
    time::Instant,
};

use sandwire_api::vsock::{VsockConnection, VsockDestination, VsockPolicy, VsockType};
use sandwire_rate::{Allowance, Share};

use self::{
    connection::Connection,
    starved::Starved,
    turns::{Accepts, Turns},
};
use super::{pipe::PipePool, relay::COPY_BYTES};
use crate::{
    address::VmKey,
    budget::Budget,
    capture::Sink,
    directory::{Directory, DirectoryError, host_path},
    lifeline::Lifeline,
    limits::Limits,
    listener::{self, Descriptors, ListenerError, listen_at},
    place::Place,
    readiness::{Interest, Poller, Waker},
    statistics::VmCounters,
};

/// What the router is told.
#[derive(Debug)]
pub enum RouterCommand {
    /// Serve this guest from now on; it has to be in the directory.
    Add(Box<HybridSetup>, SyncSender<Result<(), RouterError>>),
    /// Forget this guest, and close all that is its.
    Remove(VmKey, SyncSender<()>),
    /// Replace what the guest may reach, here and in the directory: all of it or nothing.
    SetPolicy(VmKey, VsockPolicy, SyncSender<Result<(), RouterError>>),
    /// Record the guest's connections there from now on, or no more.
    SetCapture(VmKey, Option<Arc<Sink>>),
    /// All connections of one guest, or of all.
    List(Option<VmKey>, SyncSender<Vec<VsockConnection>>),
    /// End, closing everything.
    Stop,
    /// Fail.
    #[cfg(test)]
    Panic,
}

/// A guest whose VMM owns the device.
#[derive(Debug)]
pub struct HybridSetup {
    /// Who it is.
    pub key: VmKey,
    /// Its CID.
    pub cid: u32,
    /// The VMM's socket, after which ours are called.
    pub socket: PathBuf,
    /// The folder that it is in, if known.
    pub place: Option<Place>,
    /// What bounds it.
    pub limits: Limits,
    /// Where to count.
    pub counters: Arc<VmCounters>,
}

/// Why the router didn't do as it was told.
#[derive(Debug, thiserror::Error)]
pub enum RouterError {
    /// A socket that can't be had. Nothing has changed.
    #[error("serve port {port} of vsock channel {vm}: {source}")]
    Listen {
        /// Whose.
        vm: VmKey,
        /// Which port.
        port: u32,
        /// Why.
        source: ListenerError,
    },
    /// The kernel refuses to watch a socket.
    #[error("serve port {port} of vsock channel {vm}: watch its socket: {source}")]
    Watch {
        /// Whose.
        vm: VmKey,
        /// Which port.
        port: u32,
        /// What the kernel said.
        source: io::Error,
    },
    /// The directory doesn't know it, or the router knows it already.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
}

/// How others speak to the router. Cheap to clone.
#[derive(Clone, Debug)]
pub struct RouterHandle {
    inbox: Arc<Inbox>,
}

#[derive(Debug)]
struct Inbox {
    commands: Mutex<Vec<RouterCommand>>,
    wake: Waker,
}

impl RouterHandle {
    /// Puts a command in the queue and wakes the router. Never blocks. A router that has ended drops it, and
    /// with it the sender of an answer.
    pub fn send(&self, command: RouterCommand) {
        self.queue().push(command);
        self.inbox.wake.wake();
    }

    fn queue(&self) -> MutexGuard<'_, Vec<RouterCommand>> {
        let queue = self.inbox.commands.lock();
        queue.unwrap_or_else(PoisonError::into_inner)
    }
}

/// Starts the router.
///
/// # Errors
/// When the kernel has no descriptors or threads.
pub fn spawn(
    directory: Arc<Directory>,
    budget: Arc<Budget>,
    lifeline: Lifeline,
) -> io::Result<(RouterHandle, JoinHandle<()>)> {
    let handle = RouterHandle {
        inbox: Arc::new(Inbox {
            commands: Mutex::new(Vec::new()),
            wake: Waker::new()?,
        }),
    };
    let poller = Poller::new()?;
    poller.add(&handle.inbox.wake, WAKE, Interest::READ)?;
    let mut router = Router {
        directory,
        budget,
        handle: handle.clone(),
        poller,
        vms: HashMap::new(),
        entries: HashMap::new(),
        next: 1,
        round: 0,
        deadlines: BTreeSet::new(),
        run: Turns::default(),
        resting: VecDeque::new(),
        starved: Starved::default(),
        pipes: PipePool::default(),
        scratch: vec![0; COPY_BYTES].into_boxed_slice(),
    };
    let thread = thread::Builder::new()
        .name("vsock-router".to_owned())
        .spawn(move || {
            if router.run() {
                lifeline.let_go();
            }
        })?;
    Ok((handle, thread))
}

/// Token of the wake-up; the others are `number * 2`, and one more for a relay's second socket.
const WAKE: u64 = 0;
struct Router {
    directory: Arc<Directory>,
    /// Bytes of all guests.
    budget: Arc<Budget>,
    handle: RouterHandle,
    poller: Poller,
    vms: HashMap<VmKey, Vm>,
    entries: HashMap<u64, Entry>,
    next: u64,
    /// Number of the round: all that was ready at once.
    round: u64,
    /// When a dial is over or a listener tries again, by number.
    deadlines: BTreeSet<(Instant, u64)>,
    /// Relays that have something to do.
    run: Turns,
    /// Sockets (0 or 1 of a relay) that rest, and until when; see [`watch`].
    resting: VecDeque<(Instant, u64, usize)>,
    /// Relays that wait for what other relays have, and when they try again.
    starved: Starved,
    pipes: PipePool,
    scratch: Box<[u8]>,
}

struct Vm {
    setup: HybridSetup,
    listeners: HashMap<u32, u64>,
    connections: HashSet<u64>,
    connects: Allowance,
    accepts: Accepts,
    sink: Option<Arc<Sink>>,
    /// Numbers of the guest's own ports, which its VMM doesn't tell us, for captures and lists.
    next_port: u32,
}

/// What a number stands for.
enum Entry {
    Listener {
        vm: VmKey,
        port: u32,
        socket: OwnedFd,
    },
    Connection(Box<Connection>),
}

impl Router {
    /// Until it is told to end, which is true, or can't go on.
    fn run(&mut self) -> bool {
        loop {
            let ready = match self.poller.wait(self.next_deadline()) {
                Ok(ready) => ready.to_vec(),
                Err(error) => {
                    tracing::error!(%error, "the vsock router can't wait for its sockets; it ends");
                    return false;
                }
            };
            self.round += 1;
            for ready in ready {
                if ready.token == WAKE {
                    self.handle.inbox.wake.clear();
                    if !self.obey() {
                        return true;
                    }
                } else {
                    self.ready(ready);
                }
            }
            self.pass_deadlines(Instant::now());
            self.end_rests(Instant::now());
            self.feed(Instant::now());
            self.turns();
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        if !self.run.is_empty() {
            return Some(Instant::now());
        }
        let first = self.deadlines.first().map(|(at, _)| *at);
        let rest = self.resting.front().map(|(at, ..)| *at);
        let fed = self.starved.next();
        fed.into_iter().chain(first).chain(rest).min()
    }

    /// Does what it was told; false when that was to end.
    fn obey(&mut self) -> bool {
        let commands = std::mem::take(&mut *self.handle.queue());
        for command in commands {
            match command {
                RouterCommand::Add(setup, answer) => {
                    // Who asked may have given up waiting; then there is nobody to tell.
                    let _ = answer.send(self.add(*setup));
                }
                RouterCommand::Remove(vm, answer) => {
                    self.remove(&vm);
                    let _ = answer.send(());
                }
                RouterCommand::SetPolicy(vm, policy, answer) => {
                    let _ = answer.send(self.set_policy(&vm, policy));
                }
                RouterCommand::SetCapture(vm, sink) => {
                    if let Some(vm) = self.vms.get_mut(&vm) {
                        vm.sink = sink;
                    }
                }
                RouterCommand::List(of, answer) => {
                    let _ = answer.send(self.list(of.as_ref()));
                }
                RouterCommand::Stop => {
                    let all: Vec<VmKey> = self.vms.keys().cloned().collect();
                    all.iter().for_each(|vm| self.remove(vm));
                    return false;
                }
                #[cfg(test)]
                RouterCommand::Panic => panic!("a test says so"),
            }
        }
        true
    }

    fn add(&mut self, setup: HybridSetup) -> Result<(), RouterError> {
        let key = setup.key.clone();
        if self.vms.contains_key(&key) {
            return Err(DirectoryError::Exists(key).into());
        }
        let placement = self.directory.get(&key);
        let placement = placement.ok_or_else(|| DirectoryError::Unknown(key.clone()))?;
        let wanted = wanted_ports(&placement.policy);
        let bound = self.bind(&setup, wanted.into_iter())?;
        let vm = Vm {
            connects: Allowance::new(
                Share::per_second(setup.limits.connects_per_second),
                Instant::now(),
            ),
            setup,
            accepts: Accepts::default(),
            listeners: bound.into_iter().collect(),
            connections: HashSet::new(),
            sink: None,
            next_port: 0,
        };
        self.vms.insert(key, vm);
        Ok(())
    }

    /// Listens on each port, or on none.
    fn bind(
        &mut self,
        setup: &HybridSetup,
        ports: impl Iterator<Item = u32>,
    ) -> Result<Vec<(u32, u64)>, RouterError> {
        let mut bound = Vec::new();
        for port in ports {
            match self.bind_one(setup, port) {
                Ok(number) => bound.push((port, number)),
                Err(error) => {
                    for (port, number) in bound {
                        self.unbind(setup, port, number);
                    }
                    return Err(error);
                }
            }
        }
        Ok(bound)
    }

    fn bind_one(&mut self, setup: &HybridSetup, port: u32) -> Result<u64, RouterError> {
        let vm = setup.key.clone();
        let path = host_path(&setup.socket, port);
        let socket = match listen_at(&path, VsockType::Stream, Descriptors::Refused) {
            Ok(socket) => socket,
            Err(source) => return Err(RouterError::Listen { vm, port, source }),
        };
        let number = self.number();
        if let Err(source) = self.poller.add(&socket, number * 2, Interest::READ) {
            let _ = listener::remove_in(setup.place, &path);
            return Err(RouterError::Watch { vm, port, source });
        }
        self.entries
            .insert(number, Entry::Listener { vm, port, socket });
        Ok(number)
    }

    fn unbind(&mut self, setup: &HybridSetup, port: u32, number: u64) {
        self.entries.remove(&number);
        let path = host_path(&setup.socket, port);
        if let Err(error) = listener::remove_in(setup.place, &path) {
            tracing::warn!(path = %path.display(), %error, "removing a socket failed");
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn remove(&mut self, key: &VmKey) {
        let Some(mut vm) = self.vms.remove(key) else {
            return;
        };
        for (port, number) in std::mem::take(&mut vm.listeners) {
            self.unbind(&vm.setup, port, number);
        }
        for number in std::mem::take(&mut vm.connections) {
            self.close(number, &mut vm);
        }
    }

    fn set_policy(&mut self, key: &VmKey, policy: VsockPolicy) -> Result<(), RouterError> {
        let Some(mut vm) = self.vms.remove(key) else {
            return Err(DirectoryError::Unknown(key.clone()).into());
        };
        let outcome = self.exchange_policy(&mut vm, policy);
        self.vms.insert(key.clone(), vm);
        outcome
    }

    fn exchange_policy(&mut self, vm: &mut Vm, policy: VsockPolicy) -> Result<(), RouterError> {
        let wanted = wanted_ports(&policy);
        let new: Vec<u32> = wanted
            .iter()
            .copied()
            .filter(|port| !vm.listeners.contains_key(port))
            .collect();
        let bound = self.bind(&vm.setup, new.into_iter())?;
        if let Err(error) = self.directory.set_policy(&vm.setup.key, policy) {
            for (port, number) in bound {
                self.unbind(&vm.setup, port, number);
            }
            return Err(error.into());
        }
        let (stay, go): (HashMap<u32, u64>, HashMap<u32, u64>) = std::mem::take(&mut vm.listeners)
            .into_iter()
            .partition(|(port, _)| wanted.contains(port));
        for (port, number) in go {
            self.unbind(&vm.setup, port, number);
        }
        vm.listeners = stay;
        vm.listeners.extend(bound);
        self.recheck(vm);
        Ok(())
    }
}

/// The ports that we listen on: all but those that lead to the owner's own sockets.
fn wanted_ports(policy: &VsockPolicy) -> HashSet<u32> {
    policy
        .rules
        .iter()
        .filter(|rule| rule.to != VsockDestination::Host)
        .flat_map(|rule| rule.port.first()..=rule.port.last())
        .collect()
}

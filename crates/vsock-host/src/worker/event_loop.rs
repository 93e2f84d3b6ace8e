//! The loop of a worker: wait, and give each event to the guest that it is about.

use std::{
    collections::HashMap,
    io,
    rc::Rc,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rustix::{
    event::{
        Timespec,
        epoll::{self, CreateFlags, Event, EventData, EventFlags},
    },
    io::Errno,
};
use sandwire_api::vsock::{VsockConnection, VsockType};

use super::{Command, VmError, VmSetup, WorkerHandle, WorkerSettings, patience::Patience};
use crate::{
    address::VmKey,
    bell::Bell,
    budget::Budget,
    device::{Context, MOST_NUMBERS, Token, Vm},
    directory::Directory,
    disposal::Disposal,
    front_end::{FROM_GUEST, TO_GUEST},
    lifeline::Lifeline,
    readiness::timespec,
    slab::Slab,
};

/// Events taken from the kernel at once.
const EVENTS: usize = 256;

/// Most guests whose rings are looked at without a kick: those that did something last.
const MOST_AWAKE: usize = 16;

/// Longest look for more of a stream in full flow: about what falling asleep and being woken takes, so that at
/// most as much processor time is lost by looking in vain as by not looking.
const LONGEST_PATIENCE: Duration = Duration::from_micros(50);

/// Starts a worker, in a thread of its own.
///
/// # Errors
/// When the kernel has no more descriptors or threads.
pub fn spawn(
    index: usize,
    directory: Arc<Directory>,
    budget: Arc<Budget>,
    settings: WorkerSettings,
    lifeline: Lifeline,
) -> io::Result<(WorkerHandle, JoinHandle<()>)> {
    let handle = WorkerHandle::new()?;
    let disposal = Disposal::spawn(index)?;
    let bell = Bell::new();
    let epoll = epoll::create(CreateFlags::CLOEXEC)?;
    let wake = EventData::new_u64(Token::Wake.pack());
    epoll::add(
        &epoll,
        handle.waker(),
        wake,
        EventFlags::IN | EventFlags::ET,
    )?;
    let for_thread = handle.clone();
    let thread = thread::Builder::new()
        .name(format!("vsock-{index}"))
        .spawn(move || {
            // Made in the thread: what it holds of guests' memory never leaves it.
            let context = Context::new(epoll, directory, budget, (Rc::new(bell), disposal));
            let mut worker = Worker {
                handle: for_thread,
                settings,
                context,
                vms: Slab::default(),
                by_key: HashMap::new(),
                patience: Patience::new(LONGEST_PATIENCE),
                stopping: false,
            };
            worker.run();
            let was_told = worker.stopping;
            worker.end();
            if was_told {
                lifeline.let_go();
            }
        })?;
    Ok((handle, thread))
}

struct Worker {
    handle: WorkerHandle,
    settings: WorkerSettings,
    context: Context,
    vms: Slab<Box<Vm>>,
    by_key: HashMap<VmKey, u32>,
    patience: Patience,
    stopping: bool,
}

impl Worker {
    fn run(&mut self) {
        let mut events: Vec<Event> = Vec::with_capacity(EVENTS);
        // When something last happened.
        let mut busy = Instant::now();
        while !self.stopping {
            let timeout = self.timeout(busy);
            events.clear();
            let room = rustix::buffer::spare_capacity(&mut events);
            match epoll::wait(&self.context.epoll, room, timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "a worker can't wait for events; it ends");
                    return;
                }
            }
            self.context.now = Instant::now();
            self.context.round += 1;
            if timeout != Some(timespec(Duration::ZERO)) {
                self.patience.slept(self.context.now);
            }
            let mut did = !events.is_empty();
            for event in &events {
                self.dispatch(event.data.u64(), event.flags);
            }
            did |= self.go_on();
            did |= self.remind();
            did |= self.look_at_rings();
            self.ask_for_kicks(MOST_AWAKE);
            if did {
                busy = self.context.now;
            }
            if self.context.take_bulk() {
                self.patience.moved(Instant::now());
            }
        }
    }

    /// How long to wait: not at all if somebody has more to do or polling isn't over, else until the next
    /// reminder. Who waits is told by kicks of what comes meanwhile.
    fn timeout(&mut self, busy: Instant) -> Option<Timespec> {
        let polling = self.context.now.saturating_duration_since(busy) < self.settings.busy_poll;
        let waiting = self.patience.is_waiting(self.context.now);
        if !(polling || waiting) {
            self.ask_for_kicks(0);
        }
        if !self.context.again.is_empty() || polling || waiting {
            return Some(timespec(Duration::ZERO));
        }
        let next = self.context.timers.next()?;
        Some(timespec(next.saturating_duration_since(Instant::now())))
    }

    fn dispatch(&mut self, token: u64, flags: EventFlags) {
        let Some(token) = Token::unpack(token) else {
            return;
        };
        let context = &mut self.context;
        if let Token::Kick(slot, _) | Token::Flow(slot, _) = token
            && !self.settings.busy_poll.is_zero()
        {
            context.awake.add(slot);
        }
        let vms = &mut self.vms;
        // A number may name a guest that has gone, or a newer one: then there is nothing to do, or to find.
        match token {
            Token::Wake => self.obey(),
            Token::VmmListener(slot) => with(vms, slot, |vm| vm.accept_vmm(context)),
            Token::StreamListener(slot) => with(vms, slot, |vm| {
                vm.accept_clients(VsockType::Stream, context);
            }),
            Token::SeqpacketListener(slot) => with(vms, slot, |vm| {
                vm.accept_clients(VsockType::Seqpacket, context);
            }),
            Token::FrontEnd(slot) => with(vms, slot, |vm| vm.vmm_is_ready(context)),
            Token::Handshake(slot, number) => {
                with(vms, slot, |vm| vm.client_is_ready(number, context));
            }
            Token::Kick(slot, ring) => with(vms, slot, |vm| kicked(vm, ring as usize, context)),
            Token::Flow(slot, number) => {
                with(vms, slot, |vm| vm.flow_is_ready(number, flags, context));
            }
            Token::Hold(_) => {}
        }
    }

    /// Guests that have used up their turn go on. Whether there were any.
    fn go_on(&mut self) -> bool {
        if self.context.again.is_empty() {
            return false;
        }
        let mut again = std::mem::take(&mut self.context.again);
        again.sort_unstable();
        again.dedup();
        for slot in again {
            if let Some(vm) = self.vms.get_mut(slot) {
                vm.serve_from_guest(&mut self.context);
            }
        }
        true
    }

    /// Whether a reminder was due.
    fn remind(&mut self) -> bool {
        let mut reminded = false;
        while let Some(token) = self.context.timers.take_due(self.context.now) {
            reminded = true;
            let context = &mut self.context;
            let vms = &mut self.vms;
            match Token::unpack(token) {
                Some(Token::Flow(slot, number)) => {
                    if let Some(vm) = vms.get_mut(slot) {
                        vm.flow_is_due(number, context);
                    }
                }
                Some(Token::Handshake(slot, number)) => {
                    if let Some(vm) = vms.get_mut(slot) {
                        vm.client_is_due(number, context);
                    }
                }
                Some(Token::Hold(slot)) => {
                    if let Some(vm) = vms.get_mut(slot) {
                        vm.hold_is_due(context);
                    }
                }
                Some(
                    token @ (Token::VmmListener(slot)
                    | Token::StreamListener(slot)
                    | Token::SeqpacketListener(slot)),
                ) => {
                    if let Some(vm) = vms.get_mut(slot) {
                        vm.listen_again(token, context);
                    }
                }
                _ => {}
            }
        }
        reminded
    }

    /// Looks into rings without having been kicked. Whether there was something.
    fn look_at_rings(&mut self) -> bool {
        let (mut index, mut found) = (0, false);
        while let Some(slot) = self.context.awake.get(index) {
            index += 1;
            if let Some(vm) = self.vms.get_mut(slot)
                && vm.has_packets()
            {
                found = true;
                vm.serve_from_guest(&mut self.context);
            }
        }
        found
    }

    /// Asks guests to kick again until so many are awake: those first who have been it longest.
    fn ask_for_kicks(&mut self, most: usize) {
        while let Some(slot) = self.context.awake.take_beyond(most) {
            if let Some(vm) = self.vms.get_mut(slot)
                && vm.ask_for_kicks()
            {
                self.context.again.push(slot);
            }
        }
    }

    fn obey(&mut self) {
        for command in self.handle.take() {
            match command {
                Command::AddVm(setup, answer) => {
                    // Whoever doesn't wait for an answer gets none.
                    let _ = answer.send(self.add(*setup));
                }
                Command::RemoveVm(key, answer) => {
                    self.remove(&key);
                    let _ = answer.send(());
                }
                Command::Connect {
                    vm,
                    port,
                    socket,
                    kind,
                    caller,
                } => {
                    if let Some(vm) = self
                        .by_key
                        .get(&vm)
                        .and_then(|&slot| self.vms.get_mut(slot))
                    {
                        let caller = Some(caller);
                        vm.connect_to_guest(socket, port, kind, caller, &mut self.context);
                    }
                }
                Command::PolicyChanged(key) => {
                    if let Some(vm) = self
                        .by_key
                        .get(&key)
                        .and_then(|&slot| self.vms.get_mut(slot))
                    {
                        vm.policy_changed(&mut self.context);
                    }
                }
                Command::SetCapture(key, sink) => {
                    if let Some(vm) = self
                        .by_key
                        .get(&key)
                        .and_then(|&slot| self.vms.get_mut(slot))
                    {
                        vm.set_capture(sink);
                    }
                }
                Command::List(of, answer) => {
                    let _ = answer.send(self.list(of.as_ref()));
                }
                Command::Stop => self.stopping = true,
                #[cfg(test)]
                Command::Panic => panic!("a test says so"),
            }
        }
    }

    fn list(&self, of: Option<&VmKey>) -> Vec<VsockConnection> {
        let now = self.context.now;
        let Some(key) = of else {
            return self.vms.iter().flat_map(|(_, vm)| vm.list(now)).collect();
        };
        let vm = self.by_key.get(key).and_then(|slot| self.vms.get(*slot));
        vm.map_or_else(Vec::new, |vm| vm.list(now).collect())
    }

    fn add(&mut self, setup: VmSetup) -> Result<(), VmError> {
        let key = setup.key.clone();
        if self.by_key.contains_key(&key) || self.vms.len() >= MOST_NUMBERS as usize - 1 {
            self.context.disposal.close_listener(setup.vhost_listener);
            return Err(VmError::Exists { key });
        }
        // The number is needed before the guest exists.
        let slot = self.vms.next_number();
        let vm = Vm::new(setup, slot, &self.context).map_err(|(socket, error)| VmError::Watch {
            key: key.clone(),
            socket,
            source: error.into(),
        })?;
        let taken = self.vms.insert(Box::new(vm));
        debug_assert_eq!(slot, taken, "nothing came between");
        self.by_key.insert(key, slot);
        Ok(())
    }

    fn remove(&mut self, key: &VmKey) {
        let Some(vm) = self
            .by_key
            .remove(key)
            .and_then(|slot| self.vms.remove(slot))
        else {
            return;
        };
        vm.close(&mut self.context);
    }

    fn end(mut self) {
        for command in self.handle.close() {
            if let Command::AddVm(setup, _) = command {
                self.context.disposal.close_listener(setup.vhost_listener);
            }
        }
        for slot in self.vms.numbers() {
            if let Some(vm) = self.vms.remove(slot) {
                vm.close(&mut self.context);
            }
        }
    }
}

fn with(vms: &mut Slab<Box<Vm>>, slot: u32, event: impl FnOnce(&mut Vm)) {
    if let Some(vm) = vms.get_mut(slot) {
        event(vm);
    }
}

fn kicked(vm: &mut Vm, ring: usize, context: &mut Context) {
    match ring {
        TO_GUEST => vm.kicked_to_guest(context),
        FROM_GUEST => vm.serve_from_guest(context),
        // A buffer for an event, or nothing at all: both are looked at when packets flow.
        _ => vm.serve_from_guest(context),
    }
}

//! Watching the packets of a lease.
//!
//! The data path tells of packets of traced slots in one stream. One thread reads it, for as long as
//! somebody watches, and gives each packet to those who watch its slot. Who is too slow misses
//! packets, and is told how many.

use std::{
    collections::HashMap,
    sync::{
        Arc, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use sandwire_api::{name::Name, trace::TracePacket};

use super::{Caller, Shared, Slots, State, no_lease};
use crate::{
    error::ServiceError,
    lease::LeaseKey,
    network::{Network, TraceSource, TracedPacket},
    plan::SlotPlan,
};

/// Packets that wait for one watcher.
const QUEUE: usize = 4096;
/// How soon the reader notices that nobody watches any more.
const READ_AT_MOST: Duration = Duration::from_millis(200);
/// After how many packets without a pause it is asked what the data path has lost.
const LOOK_EVERY: u32 = 4096;

/// A lease being watched. Dropping it ends that.
pub struct Trace {
    shared: Arc<Shared>,
    number: u64,
    slot: SlotPlan,
    packets: Receiver<TracePacket>,
    lost: Arc<AtomicU64>,
}

/// What [`Trace::next`] saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Traced {
    /// A packet.
    Packet(TracePacket),
    /// This many packets came faster than they were taken.
    Lost(u64),
    /// Nothing within the time.
    Nothing,
    /// Nothing will follow: the lease has ended, or the daemon stops.
    End,
}

/// Who watches what.
#[derive(Default)]
pub(super) struct Traces {
    watchers: HashMap<(u32, u32), Vec<Watcher>>,
    next_number: u64,
    is_read: bool,
}

struct Watcher {
    number: u64,
    packets: SyncSender<TracePacket>,
    lost: Arc<AtomicU64>,
    slot: SlotPlan,
    /// What the data path had lost of the slot when it was asked last.
    known_lost: u64,
}

impl Slots {
    /// Watches a lease's packets from now on.
    ///
    /// # Errors
    /// There is no such lease for this caller, or its data path doesn't tell.
    pub fn trace(
        &self,
        caller: Caller,
        owner_uid: Option<u32>,
        name: &Name,
    ) -> Result<Trace, ServiceError> {
        let key = caller.lease_key(owner_uid, name);
        let shared = &self.shared;
        let state = shared.lock();
        let record = &state.lease(caller, &key)?.record;
        let slot = state.slot_plan(record)?;
        drop(state);
        let (trace, reader) = shared.watch(&key, slot)?;
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.extend(reader);
        // Those of earlier traces have ended.
        threads.retain(|thread| !thread.is_finished());
        Ok(trace)
    }
}

impl Trace {
    /// The next packet, waiting at most this long.
    #[must_use]
    pub fn next(&self, at_most: Duration) -> Traced {
        let lost = self.lost.swap(0, Ordering::Relaxed);
        if lost > 0 {
            return Traced::Lost(lost);
        }
        match self.packets.recv_timeout(at_most) {
            Ok(packet) => Traced::Packet(packet),
            Err(RecvTimeoutError::Timeout) => Traced::Nothing,
            Err(RecvTimeoutError::Disconnected) => Traced::End,
        }
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        let mut traces = self.shared.traces();
        let place = place_of(&self.slot);
        // There are none if the reader has stopped before.
        let watchers = traces.watchers.entry(place).or_default();
        watchers.retain(|watcher| watcher.number != self.number);
        if watchers.is_empty() {
            traces.watchers.remove(&place);
            // Under the lock, so that it doesn't undo what the next watcher asks for.
            if let Err(error) = self.shared.network.set_trace(&self.slot, false) {
                tracing::debug!(slot = %self.slot.netns_name, %error, "the slot's trace can't be ended");
            }
        }
    }
}

impl Shared {
    pub(super) fn traces(&self) -> MutexGuard<'_, Traces> {
        self.traces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Also returns the thread that reads the stream, if it is a new one.
    pub(super) fn watch(
        self: &Arc<Self>,
        key: &LeaseKey,
        slot: SlotPlan,
    ) -> Result<(Trace, Option<JoinHandle<()>>), ServiceError> {
        let failed = |source| ServiceError::Network {
            operation: "trace",
            object: format!("lease '{}'", key.name),
            source,
        };
        let (sender, packets) = sync_channel(QUEUE);
        let lost = Arc::new(AtomicU64::new(0));
        let mut traces = self.traces();
        // If the lease ends from here on, so does its trace: the slot's next tenant may be another's.
        if !self.lock().has_slot(key, &slot) {
            return Err(no_lease(key));
        }
        let mut reader = None;
        if !traces.is_read {
            let source = self.network.trace_events().map_err(failed)?;
            let shared = Arc::clone(self);
            let thread = thread::Builder::new()
                .name("trace".to_owned())
                .spawn(move || shared.read_traces(source))
                .map_err(|error| {
                    let path = std::path::Path::new("/proc/self/task");
                    ServiceError::system("start a thread", path, error)
                })?;
            reader = Some(thread);
            traces.is_read = true;
        }
        let known_lost = self.network.trace_lost(&slot);
        self.network.set_trace(&slot, true).map_err(failed)?;
        traces.next_number += 1;
        let number = traces.next_number;
        let watcher = Watcher {
            number,
            packets: sender,
            lost: Arc::clone(&lost),
            slot: slot.clone(),
            known_lost,
        };
        traces
            .watchers
            .entry(place_of(&slot))
            .or_default()
            .push(watcher);
        drop(traces);
        let trace = Trace {
            shared: Arc::clone(self),
            number,
            slot,
            packets,
            lost,
        };
        Ok((trace, reader))
    }

    /// Gives packets to their watchers until there is none, or the service stops.
    fn read_traces(&self, mut source: Box<dyn TraceSource>) {
        let mut since_look = 0;
        loop {
            let read = source.next_event(READ_AT_MOST);
            let is_stopping = self.lock().stopping;
            let mut traces = self.traces();
            match read {
                Ok(Some(traced)) if since_look < LOOK_EVERY => {
                    since_look += 1;
                    traces.give(traced);
                }
                Ok(traced) => {
                    since_look = 0;
                    traced.into_iter().for_each(|traced| traces.give(traced));
                    traces.note_lost(&*self.network);
                }
                Err(error) => {
                    tracing::error!(%error, "traces end");
                    traces.watchers.clear();
                }
            }
            if is_stopping {
                traces.watchers.clear();
            }
            if traces.watchers.is_empty() {
                traces.is_read = false;
                return;
            }
        }
    }

    /// Ends the traces of a slot whose lease has ended.
    pub(super) fn end_traces(&self, slot: &SlotPlan) {
        self.traces().watchers.remove(&place_of(slot));
    }
}

impl State {
    /// Not while the lease is being made: if it can't be, its slot goes without a release, which would end the trace.
    fn has_slot(&self, key: &LeaseKey, slot: &SlotPlan) -> bool {
        let lease = self.leases.get(key).filter(|lease| !lease.is_opening);
        let of_lease = lease.and_then(|lease| self.slot_plan(&lease.record).ok());
        of_lease.is_some_and(|of_lease| place_of(&of_lease) == place_of(slot))
    }
}

impl Traces {
    /// Counts what the data path's own stream had no room for.
    fn note_lost(&mut self, network: &dyn Network) {
        for watcher in self.watchers.values_mut().flatten() {
            let lost = network.trace_lost(&watcher.slot);
            // Less than before: of new maps, which count anew.
            let more = lost.checked_sub(watcher.known_lost).unwrap_or(lost);
            watcher.known_lost = lost;
            watcher.lost.fetch_add(more, Ordering::Relaxed);
        }
    }

    fn give(&mut self, traced: TracedPacket) {
        let Some(watchers) = self.watchers.get(&(traced.pool, traced.slot)) else {
            return;
        };
        for watcher in watchers {
            if let Err(TrySendError::Full(_)) = watcher.packets.try_send(traced.packet.clone()) {
                watcher.lost.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

fn place_of(slot: &SlotPlan) -> (u32, u32) {
    (slot.pool_number, slot.number.0)
}

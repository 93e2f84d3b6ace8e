//! FQ-CoDel, RFC 8290: a queue for each flow by its hash, turns of a quantum of bytes by deficit, flows that
//! are new before those that were there, CoDel in each.

use std::collections::VecDeque;

use super::{CodelSettings, Dropped, Fifo, Queued, codel::Codel};
use crate::{DropCause, Nanoseconds};

/// Settings of FQ-CoDel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FqCodelSettings {
    /// Of each flow's CoDel; its limit is that of all flows together.
    pub codel: CodelSettings,
    /// Queues that flows are spread over; at least one, at most [`FLOWS_MAX`]. A queue costs memory once it had a packet.
    pub flows: usize,
    /// Bytes of a flow's turn.
    pub quantum: u32,
}

#[derive(Debug)]
pub(super) struct FqCodel<T> {
    settings: FqCodelSettings,
    /// Where the flow of each queue number is in `flows`, or [`ABSENT`]; empty until the first packet.
    places: Vec<u32>,
    /// Those that ever had a packet.
    flows: Vec<Flow<T>>,
    new: VecDeque<usize>,
    old: VecDeque<usize>,
    packets: usize,
    bytes: u64,
}

#[derive(Debug)]
struct Flow<T> {
    fifo: Fifo<T>,
    codel: Codel,
    deficit: i64,
    is_listed: bool,
}

/// Queues that flows are spread over at most, whatever the settings say.
pub const FLOWS_MAX: usize = 1 << 16;

const ABSENT: u32 = u32::MAX;

/// RFC 8290 §4.1: at most this many packets are dropped at once when the queues are full.
const BATCH_MAX: usize = 64;

impl Default for FqCodelSettings {
    /// RFC 8290 §5.2: 1024 queues, one frame of 1514 bytes.
    fn default() -> Self {
        Self {
            codel: CodelSettings::default(),
            flows: 1024,
            quantum: 1514,
        }
    }
}

impl<T> FqCodel<T> {
    pub(super) fn new(settings: FqCodelSettings) -> Self {
        Self {
            settings,
            places: Vec::new(),
            flows: Vec::new(),
            new: VecDeque::new(),
            old: VecDeque::new(),
            packets: 0,
            bytes: 0,
        }
    }

    /// Takes other settings; not if there are another number of queues.
    pub(super) fn reconfigure(&mut self, settings: FqCodelSettings) -> bool {
        let is_same = settings.flows == self.settings.flows;
        if is_same {
            self.settings = settings;
        }
        is_same
    }

    /// All packets, in the order in which they came.
    pub(super) fn take_all(&mut self) -> Vec<Queued<T>> {
        let mut packets: Vec<_> = self
            .flows
            .iter_mut()
            .flat_map(|flow| flow.fifo.take_all())
            .collect();
        packets.sort_by_key(|packet| packet.arrived);
        *self = Self::new(self.settings);
        packets
    }

    pub(super) fn packets(&self) -> usize {
        self.packets
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn push(&mut self, packet: Queued<T>, dropped: Dropped<'_, T>) {
        self.push_beyond(packet);
        let limit = self.settings.codel.limit;
        while self.packets > limit.packets || self.bytes > limit.bytes {
            self.drop_from_longest(dropped);
        }
    }

    pub(super) fn push_beyond(&mut self, packet: Queued<T>) {
        let index = self.flow_of(packet.flow_hash);
        self.packets += 1;
        self.bytes += u64::from(packet.bytes);
        let flow = &mut self.flows[index];
        flow.fifo.push(packet);
        if !flow.is_listed {
            flow.is_listed = true;
            flow.deficit = i64::from(self.settings.quantum);
            self.new.push_back(index);
        }
    }

    /// Where the flow with this hash is.
    fn flow_of(&mut self, hash: u64) -> usize {
        if self.places.is_empty() {
            self.places = vec![ABSENT; self.settings.flows.clamp(1, FLOWS_MAX)];
        }
        let number = hash % self.places.len() as u64;
        let place = &mut self.places[usize::try_from(number).unwrap_or(0)];
        if *place == ABSENT {
            *place = u32::try_from(self.flows.len()).unwrap_or(0);
            self.flows.push(Flow {
                fifo: Fifo::default(),
                codel: Codel::default(),
                deficit: 0,
                is_listed: false,
            });
        }
        *place as usize
    }

    pub(super) fn pop(&mut self, now: Nanoseconds, dropped: Dropped<'_, T>) -> Option<Queued<T>> {
        loop {
            let (index, is_new) = match (self.new.front(), self.old.front()) {
                (Some(index), _) => (*index, true),
                (None, Some(index)) => (*index, false),
                (None, None) => return None,
            };
            let flow = &mut self.flows[index];
            if flow.deficit <= 0 {
                flow.deficit += i64::from(self.settings.quantum.max(1));
                self.unlist(is_new);
                self.old.push_back(index);
                continue;
            }
            let (packets, bytes) = (flow.fifo.items.len(), flow.fifo.bytes);
            let packet = flow
                .codel
                .pop(&mut flow.fifo, &self.settings.codel, now, dropped);
            self.packets -= packets - flow.fifo.items.len();
            self.bytes -= bytes - flow.fifo.bytes;
            if let Some(packet) = packet {
                flow.deficit -= i64::from(packet.bytes);
                return Some(packet);
            }
            self.unlist(is_new);
            if is_new {
                // RFC 8290 §4.2: else a flow could stay new by falling silent for a moment.
                self.old.push_back(index);
            } else {
                self.flows[index].is_listed = false;
            }
        }
    }

    fn unlist(&mut self, is_new: bool) {
        if is_new {
            self.new.pop_front();
        } else {
            self.old.pop_front();
        }
    }

    /// Half of the longest flow's packets, from its head.
    fn drop_from_longest(&mut self, dropped: Dropped<'_, T>) {
        // Of equal ones that which came last.
        let Some(flow) = self.flows.iter_mut().max_by_key(|flow| flow.fifo.bytes) else {
            return;
        };
        let batch = flow.fifo.items.len().div_ceil(2).min(BATCH_MAX);
        for _ in 0..batch {
            let Some(packet) = flow.fifo.pop() else {
                return;
            };
            self.packets -= 1;
            self.bytes -= u64::from(packet.bytes);
            dropped(packet, DropCause::QueueFull);
        }
    }
}

#[cfg(test)]
impl<T> FqCodel<T> {
    pub(super) fn places(&self) -> usize {
        let lists = self.new.capacity() + self.old.capacity();
        self.places.capacity() + self.flows.capacity() + lists
    }
}

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
    /// Queues that flows are spread over; at least one.
    pub flows: usize,
    /// Bytes of a flow's turn.
    pub quantum: u32,
}

#[derive(Debug)]
pub(super) struct FqCodel<T> {
    settings: FqCodelSettings,
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
        let flow = || Flow {
            fifo: Fifo::default(),
            codel: Codel::default(),
            deficit: 0,
            is_listed: false,
        };
        Self {
            settings,
            flows: std::iter::repeat_with(flow)
                .take(settings.flows.max(1))
                .collect(),
            new: VecDeque::new(),
            old: VecDeque::new(),
            packets: 0,
            bytes: 0,
        }
    }

    pub(super) fn packets(&self) -> usize {
        self.packets
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn push(&mut self, packet: Queued<T>, dropped: Dropped<'_, T>) {
        let flows = self.flows.len() as u64;
        let index = usize::try_from(packet.flow_hash % flows).unwrap_or(0);
        self.packets += 1;
        self.bytes += u64::from(packet.bytes);
        let flow = &mut self.flows[index];
        flow.fifo.push(packet);
        if !flow.is_listed {
            flow.is_listed = true;
            flow.deficit = i64::from(self.settings.quantum);
            self.new.push_back(index);
        }
        let limit = self.settings.codel.limit;
        while self.packets > limit.packets || self.bytes > limit.bytes {
            self.drop_from_longest(dropped);
        }
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

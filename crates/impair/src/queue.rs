//! What waits for the bottleneck: drop-tail, CoDel (RFC 8289), FQ-CoDel (RFC 8290).
//!
//! Packets are pushed when they arrive and popped when the line is free, both in virtual time. What a queue
//! drops is handed to the caller with its cause. Every queue is bounded; what exceeds a bound is
//! [`DropCause::QueueFull`], what a control law chooses is [`DropCause::Codel`].

mod codel;
mod fq_codel;

use std::collections::VecDeque;

pub use codel::CodelSettings;
pub use fq_codel::{FLOWS_MAX, FqCodelSettings};

use crate::{DropCause, Nanoseconds};

/// What waits in a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Queued<T> {
    /// The packet.
    pub item: T,
    /// Its length in bytes, as limits and quanta count it.
    pub bytes: u32,
    /// The same for all packets of a flow.
    pub flow_hash: u64,
    /// When it came.
    pub arrived: Nanoseconds,
}

/// Takes what a queue drops.
pub type Dropped<'a, T> = &'a mut dyn FnMut(Queued<T>, DropCause);

/// How much a queue holds. A packet that would exceed either limit isn't taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Packets, at most.
    pub packets: usize,
    /// Bytes, at most.
    pub bytes: u64,
}

/// Which queue, and its settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueModel {
    /// First in, first out; what doesn't fit is dropped on arrival.
    DropTail(Limit),
    /// One queue that is kept short.
    Codel(CodelSettings),
    /// A short queue for each flow, and turns between them.
    FqCodel(FqCodelSettings),
}

/// A queue of one of the three kinds.
#[derive(Debug)]
pub struct Queue<T> {
    kind: Kind<T>,
}

#[derive(Debug)]
enum Kind<T> {
    DropTail(Fifo<T>, Limit),
    Codel(Fifo<T>, codel::Codel, CodelSettings),
    FqCodel(fq_codel::FqCodel<T>),
}

/// Packets in order of arrival, and how many bytes they are.
#[derive(Debug)]
struct Fifo<T> {
    items: VecDeque<Queued<T>>,
    bytes: u64,
}

/// Packets whose memory an empty queue keeps; what a burst needed beyond is given back.
const ITEMS_KEPT: usize = 1024;

impl Default for Limit {
    /// 10,000 packets, 16 MiB.
    fn default() -> Self {
        Self {
            packets: 10_000,
            bytes: 16 << 20,
        }
    }
}

impl<T> Queue<T> {
    /// An empty queue.
    #[must_use]
    pub fn new(model: QueueModel) -> Self {
        let kind = match model {
            QueueModel::DropTail(limit) => Kind::DropTail(Fifo::default(), limit),
            QueueModel::Codel(settings) => {
                Kind::Codel(Fifo::default(), codel::Codel::default(), settings)
            }
            QueueModel::FqCodel(settings) => Kind::FqCodel(fq_codel::FqCodel::new(settings)),
        };
        Self { kind }
    }

    /// Packets that wait.
    #[must_use]
    pub fn packets(&self) -> usize {
        match &self.kind {
            Kind::DropTail(fifo, _) | Kind::Codel(fifo, ..) => fifo.items.len(),
            Kind::FqCodel(queue) => queue.packets(),
        }
    }

    /// Bytes that wait.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match &self.kind {
            Kind::DropTail(fifo, _) | Kind::Codel(fifo, ..) => fifo.bytes,
            Kind::FqCodel(queue) => queue.bytes(),
        }
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.packets() == 0
    }

    /// Goes on with another model. What waits stays, beyond a lower limit too; the control law goes on if the
    /// new queue has one of the same kind.
    #[must_use]
    pub fn reconfigured(mut self, model: QueueModel) -> Self {
        let is_kept = match (&mut self.kind, model) {
            (Kind::DropTail(_, limit), QueueModel::DropTail(new)) => {
                *limit = new;
                true
            }
            (Kind::Codel(_, _, settings), QueueModel::Codel(new)) => {
                *settings = new;
                true
            }
            (Kind::FqCodel(queue), QueueModel::FqCodel(new)) => queue.reconfigure(new),
            _ => false,
        };
        if is_kept {
            return self;
        }
        let mut queue = Self::new(model);
        for packet in self.take_all() {
            queue.push_beyond(packet);
        }
        queue
    }

    /// Takes out all that waits, in the order in which it came.
    pub fn take_all(&mut self) -> Vec<Queued<T>> {
        match &mut self.kind {
            Kind::DropTail(fifo, _) | Kind::Codel(fifo, ..) => fifo.take_all(),
            Kind::FqCodel(queue) => queue.take_all(),
        }
    }

    /// Takes a packet whatever the limit.
    pub fn push_beyond(&mut self, packet: Queued<T>) {
        match &mut self.kind {
            Kind::DropTail(fifo, _) | Kind::Codel(fifo, ..) => fifo.push(packet),
            Kind::FqCodel(queue) => queue.push_beyond(packet),
        }
    }

    /// Takes a packet, or drops it or others.
    pub fn push(&mut self, packet: Queued<T>, dropped: Dropped<'_, T>) {
        match &mut self.kind {
            Kind::DropTail(fifo, limit) => fifo.push_within(packet, *limit, dropped),
            Kind::Codel(fifo, _, settings) => fifo.push_within(packet, settings.limit, dropped),
            Kind::FqCodel(queue) => queue.push(packet, dropped),
        }
    }

    /// The packet whose turn it is now. None if nothing waits, or if all that waited was dropped.
    pub fn pop(&mut self, now: Nanoseconds, dropped: Dropped<'_, T>) -> Option<Queued<T>> {
        match &mut self.kind {
            Kind::DropTail(fifo, _) => fifo.pop(),
            Kind::Codel(fifo, codel, settings) => codel.pop(fifo, settings, now, dropped),
            Kind::FqCodel(queue) => queue.pop(now, dropped),
        }
    }
}

impl<T> Default for Fifo<T> {
    fn default() -> Self {
        Self {
            items: VecDeque::new(),
            bytes: 0,
        }
    }
}

impl<T> Fifo<T> {
    fn push(&mut self, packet: Queued<T>) {
        self.bytes += u64::from(packet.bytes);
        self.items.push_back(packet);
    }

    fn push_within(&mut self, packet: Queued<T>, limit: Limit, dropped: Dropped<'_, T>) {
        if self.items.len() >= limit.packets || self.bytes + u64::from(packet.bytes) > limit.bytes {
            dropped(packet, DropCause::QueueFull);
        } else {
            self.push(packet);
        }
    }

    fn pop(&mut self) -> Option<Queued<T>> {
        let packet = self.items.pop_front()?;
        self.bytes -= u64::from(packet.bytes);
        if self.items.is_empty() && self.items.capacity() > ITEMS_KEPT {
            self.items.shrink_to(ITEMS_KEPT);
        }
        Some(packet)
    }

    fn take_all(&mut self) -> Vec<Queued<T>> {
        self.bytes = 0;
        std::mem::take(&mut self.items).into()
    }
}

#[cfg(test)]
impl<T> Queue<T> {
    /// Packets and flows that memory is held for.
    pub(crate) fn places(&self) -> usize {
        match &self.kind {
            Kind::DropTail(fifo, _) | Kind::Codel(fifo, ..) => fifo.items.capacity(),
            Kind::FqCodel(queue) => queue.places(),
        }
    }
}

#[cfg(test)]
mod tests;

//! The impairments of one direction and one flow rule, one after the other.
//!
//! Packets are offered as they come; the classifier that chose the rule is the caller's. They pass loss →
//! queue and rate → delay and jitter → duplication → corruption and are released at their deadlines, which
//! are absolute. Inside, time is virtual: the line serves the queue at the moments when it is free, however
//! late [`Pipeline::release`] is called, so verdicts and deadlines depend on nothing but seed, settings and
//! the packets offered with their times. The one exception has a cause of its own: a consumer that leaves
//! too many due packets where they are loses them as [`DropCause::Unread`].
//!
//! At all times packets in + copies = out + dropped + those inside.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, VecDeque},
};

use crate::{
    DropCause, Nanoseconds, Packet,
    corrupt::{CorruptModel, bit_flips},
    delay::{Delay, DelayModel},
    loss::{Loss, LossModel},
    queue::{Limit, Queue, QueueModel, Queued},
    random::{Flow, Impairment, Stream},
    rate::{Overhead, Serialiser},
};

/// What happens to the packets of one rule. What is absent doesn't happen.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Which are lost.
    pub loss: Option<LossModel>,
    /// The bottleneck.
    pub bottleneck: Option<Bottleneck>,
    /// How long they are under way.
    pub delay: Option<DelayModel>,
    /// What may be under way at once, the default being [`DELAY_LIMIT`].
    pub delay_limit: Limit,
    /// That a packet comes twice, from 0 to 1.
    pub duplicate: f64,
    /// Which bits flip.
    pub corrupt: Option<CorruptModel>,
    /// Due packets that wait for the consumer, at most.
    pub unread_packets_max: usize,
}

/// A line and what waits for it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bottleneck {
    /// Of the line.
    pub bits_per_second: u64,
    /// What a frame occupies beyond its length.
    pub overhead: Overhead,
    /// What waits.
    pub queue: QueueModel,
}

/// What a delay line holds unless somebody says otherwise: 262,144 packets, 256 MiB.
pub const DELAY_LIMIT: Limit = Limit {
    packets: 1 << 18,
    bytes: 256 << 20,
};

/// A packet at the end of its way.
#[derive(Debug, PartialEq, Eq)]
pub struct Released<T> {
    /// The packet.
    pub packet: T,
    /// Its number within the rule, from 0.
    pub number: u64,
    /// Whether it is the second of a pair.
    pub is_copy: bool,
    /// When it was due.
    pub deadline: Nanoseconds,
    /// Bits that the caller flips; see [`bit_flips`].
    pub bit_flips: Vec<u64>,
}

/// A packet that goes no further.
#[derive(Debug, PartialEq, Eq)]
pub struct Dropped<T> {
    /// The packet.
    pub packet: T,
    /// Its number within the rule, from 0.
    pub number: u64,
    /// What dropped it.
    pub cause: DropCause,
}

/// What happened so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Packets offered.
    pub offered: u64,
    /// Packets made by duplication.
    pub copies: u64,
    /// Packets that should have been duplicated, but there was no room for a copy.
    pub copies_refused: u64,
    /// Packets released, copies too.
    pub released: u64,
    /// Packets released with flipped bits.
    pub corrupted: u64,
    /// Packets released after one of a higher number: reordered as RFC 4737 §3 defines it. Copies don't count.
    pub out_of_order: u64,
    /// Packets dropped, by cause.
    pub dropped: BTreeMap<DropCause, u64>,
}

/// The impairments of one direction and one flow rule.
#[derive(Debug)]
pub struct Pipeline<T> {
    settings: Settings,
    streams: Streams,
    loss: Option<Loss>,
    bottleneck: Option<(Serialiser, Queue<Numbered<T>>)>,
    delay: Option<Delay>,
    delayed: BinaryHeap<Reverse<Delayed<T>>>,
    delayed_bytes: u64,
    /// Packets delayed so far: what breaks a tie between equal deadlines.
    sequence: u64,
    due: VecDeque<Released<T>>,
    /// One more than the highest number released.
    next_in_order: u64,
    now: Nanoseconds,
    /// When the queue last got its first packet: the line had nothing to send before.
    idle_until: Nanoseconds,
    counters: Counters,
}

#[derive(Debug)]
struct Streams {
    loss: Stream,
    delay: Stream,
    duplicate: Stream,
    corrupt: Stream,
}

#[derive(Debug)]
struct Numbered<T> {
    packet: T,
    number: u64,
}

/// Ordered by deadline, then by when it got here.
#[derive(Debug)]
struct Delayed<T> {
    deadline: Nanoseconds,
    sequence: u64,
    numbered: Numbered<T>,
}

impl Default for Settings {
    /// Nothing happens.
    fn default() -> Self {
        Self {
            loss: None,
            bottleneck: None,
            delay: None,
            delay_limit: DELAY_LIMIT,
            duplicate: 0.0,
            corrupt: None,
            unread_packets_max: 1 << 16,
        }
    }
}

impl Counters {
    /// Packets dropped for whatever cause.
    #[must_use]
    pub fn dropped_in_all(&self) -> u64 {
        self.dropped.values().sum()
    }
}

impl<T: Packet> Pipeline<T> {
    /// An empty pipeline for the packets of this flow.
    #[must_use]
    pub fn new(flow: Flow, settings: Settings) -> Self {
        let stream = |impairment| Stream::new(flow, impairment);
        Self {
            streams: Streams {
                loss: stream(Impairment::Loss),
                delay: stream(Impairment::Delay),
                duplicate: stream(Impairment::Duplicate),
                corrupt: stream(Impairment::Corrupt),
            },
            loss: settings.loss.clone().map(Loss::new),
            bottleneck: settings.bottleneck.map(|bottleneck| {
                let line = Serialiser::new(bottleneck.bits_per_second, bottleneck.overhead);
                (line, Queue::new(bottleneck.queue))
            }),
            delay: settings.delay.clone().map(Delay::new),
            settings,
            delayed: BinaryHeap::new(),
            delayed_bytes: 0,
            sequence: 0,
            due: VecDeque::new(),
            next_in_order: 0,
            now: 0,
            idle_until: 0,
            counters: Counters::default(),
        }
    }

    /// What happened so far.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Packets inside: in the queue, under way, or due. Copies count from when they are due.
    #[must_use]
    pub fn packets(&self) -> usize {
        self.queued().0 + self.delayed.len() + self.due.len()
    }

    /// Packets and bytes that wait for the line.
    #[must_use]
    pub fn queued(&self) -> (usize, u64) {
        self.bottleneck
            .as_ref()
            .map_or((0, 0), |(_, queue)| (queue.packets(), queue.bytes()))
    }

    /// Takes a packet that came at `now`; a moment before the last one counts as the last one. What is
    /// dropped, this packet or others, goes to `dropped`.
    pub fn offer(&mut self, now: Nanoseconds, packet: T, dropped: &mut dyn FnMut(Dropped<T>)) {
        self.advance(now, dropped);
        let now = self.now;
        let number = self.counters.offered;
        self.counters.offered += 1;
        if let Some(loss) = &mut self.loss
            && loss.is_lost(number, &mut self.streams.loss.draw(number))
        {
            self.drop_packet(Numbered { packet, number }, DropCause::Loss, dropped);
            return;
        }
        let numbered = Numbered { packet, number };
        if let Some((_, queue)) = &mut self.bottleneck {
            if queue.is_empty() {
                self.idle_until = now;
            }
            let queued = Queued {
                bytes: numbered.packet.frame_bytes(),
                flow_hash: numbered.packet.flow_hash(),
                arrived: now,
                item: numbered,
            };
            let counters = &mut self.counters;
            queue.push(queued, &mut |queued, cause| {
                counters.drop_packet(queued.item, cause, dropped);
            });
        } else {
            self.send(now, now, numbered, dropped);
        }
        self.advance(now, dropped);
    }

    /// When [`Pipeline::release`] has something to do again; none if nothing is inside.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Nanoseconds> {
        if let Some(due) = self.due.front() {
            return Some(due.deadline);
        }
        let delayed = self.delayed.peek().map(|Reverse(first)| first.deadline);
        let line = self
            .bottleneck
            .as_ref()
            .filter(|(_, queue)| !queue.is_empty())
            .map(|(line, _)| line.free_at());
        delayed.into_iter().chain(line).min()
    }

    /// The next packet that is due at `now`, in the order of deadlines. Ask until there is none; whoever has
    /// no room asks again later.
    pub fn release(
        &mut self,
        now: Nanoseconds,
        dropped: &mut dyn FnMut(Dropped<T>),
    ) -> Option<Released<T>> {
        self.advance(now, dropped);
        let released = self.due.pop_front()?;
        self.counters.released += 1;
        if !released.bit_flips.is_empty() {
            self.counters.corrupted += 1;
        }
        if released.number >= self.next_in_order {
            self.next_in_order = released.number + 1;
        } else if !released.is_copy {
            self.counters.out_of_order += 1;
        }
        Some(released)
    }

    /// Lets virtual time go on: whatever the line would have begun to send until now, it sends.
    fn advance(&mut self, now: Nanoseconds, dropped: &mut dyn FnMut(Dropped<T>)) {
        self.now = self.now.max(now);
        while let Some((line, queue)) = &mut self.bottleneck {
            // Before each push the queue was served up to that moment, so if the line was free then, the
            // queue was empty, and what waits now has come at that moment: it starts then.
            let start = line.free_at().max(self.idle_until);
            if queue.is_empty() || start > self.now {
                break;
            }
            let counters = &mut self.counters;
            let served = queue.pop(start, &mut |queued, cause| {
                counters.drop_packet(queued.item, cause, dropped);
            });
            if let Some(queued) = served {
                let departure = line.send(start, queued.bytes);
                self.send(start, departure, queued.item, dropped);
            }
        }
        self.ripen(self.now, dropped);
    }

    /// Puts a packet on its way whose line began to send it at `start` and has sent it at `departure`.
    fn send(
        &mut self,
        start: Nanoseconds,
        departure: Nanoseconds,
        numbered: Numbered<T>,
        dropped: &mut dyn FnMut(Dropped<T>),
    ) {
        // Those who have arrived by then make room, whether or not somebody fetched them.
        self.ripen(start, dropped);
        let bytes = u64::from(numbered.packet.frame_bytes());
        let limit = self.settings.delay_limit;
        if self.delayed.len() >= limit.packets || self.delayed_bytes + bytes > limit.bytes {
            self.drop_packet(numbered, DropCause::DelayFull, dropped);
            return;
        }
        let deadline = self.delay.as_mut().map_or(departure, |delay| {
            delay.deadline(departure, &mut self.streams.delay.draw(numbered.number))
        });
        self.delayed_bytes += bytes;
        self.delayed.push(Reverse(Delayed {
            deadline,
            sequence: self.sequence,
            numbered,
        }));
        self.sequence += 1;
    }

    /// Moves those whose deadline has come to those that are due.
    fn ripen(&mut self, now: Nanoseconds, dropped: &mut dyn FnMut(Dropped<T>)) {
        while self
            .delayed
            .peek()
            .is_some_and(|Reverse(first)| first.deadline <= now)
        {
            let Some(Reverse(first)) = self.delayed.pop() else {
                return;
            };
            let Numbered { packet, number } = first.numbered;
            self.delayed_bytes -= u64::from(packet.frame_bytes());
            let is_doubled = self.settings.duplicate > 0.0
                && self
                    .streams
                    .duplicate
                    .draw(number)
                    .happens(self.settings.duplicate);
            let copy = if is_doubled { packet.copy() } else { None };
            self.counters.copies += u64::from(copy.is_some());
            self.counters.copies_refused += u64::from(is_doubled && copy.is_none());
            self.enqueue_due(first.deadline, number, packet, false, dropped);
            if let Some(copy) = copy {
                self.enqueue_due(first.deadline, number, copy, true, dropped);
            }
        }
    }

    fn enqueue_due(
        &mut self,
        deadline: Nanoseconds,
        number: u64,
        packet: T,
        is_copy: bool,
        dropped: &mut dyn FnMut(Dropped<T>),
    ) {
        if self.due.len() >= self.settings.unread_packets_max {
            self.drop_packet(Numbered { packet, number }, DropCause::Unread, dropped);
            return;
        }
        let bit_flips = self.settings.corrupt.map_or_else(Vec::new, |model| {
            let mut draw = self.streams.corrupt.draw_copy(number, u32::from(is_copy));
            bit_flips(&model, packet.frame_bytes(), &mut draw)
        });
        self.due.push_back(Released {
            packet,
            number,
            is_copy,
            deadline,
            bit_flips,
        });
    }

    fn drop_packet(
        &mut self,
        numbered: Numbered<T>,
        cause: DropCause,
        dropped: &mut dyn FnMut(Dropped<T>),
    ) {
        self.counters.drop_packet(numbered, cause, dropped);
    }
}

impl Counters {
    fn drop_packet<T>(
        &mut self,
        numbered: Numbered<T>,
        cause: DropCause,
        dropped: &mut dyn FnMut(Dropped<T>),
    ) {
        *self.dropped.entry(cause).or_default() += 1;
        let Numbered { packet, number } = numbered;
        dropped(Dropped {
            packet,
            number,
            cause,
        });
    }
}

impl<T> PartialEq for Delayed<T> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl<T> Eq for Delayed<T> {}

impl<T> PartialOrd for Delayed<T> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Delayed<T> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.deadline, self.sequence).cmp(&(other.deadline, other.sequence))
    }
}

#[cfg(test)]
mod tests;

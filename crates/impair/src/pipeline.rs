//! The impairments of one direction and one flow rule, one after the other.
//!
//! Packets are offered as they come; the classifier that chose the rule is the caller's. They pass cuts
//! (partition, blackhole, flap) → MTU → loss → queue and line → delay and jitter → reordering → duplication →
//! corruption and are released at their deadlines, which are absolute. Inside, time is virtual: the line
//! serves the queue at the moments when it is free, however late [`Pipeline::release`] is called, so verdicts
//! and deadlines depend on nothing but seed, settings and the packets offered with their times. The one exception
//! has a cause of its own: a consumer that leaves too many due packets where they are loses them as
//! [`DropCause::Unread`].
//!
//! At all times packets in + copies + made = out + dropped + those inside.

mod change;

use std::collections::{BTreeMap, VecDeque};

use crate::{
    DropCause, Nanoseconds, Packet,
    corrupt::bit_flips,
    delay::Delay,
    delay_line::DelayLine,
    line::Line,
    loss::Loss,
    mtu::{Answers, Passage},
    queue::{Queue, Queued},
    random::{Draw, Flow, Impairment, Stream},
    reorder::Held,
};

pub use crate::settings::{Bottleneck, DELAY_LIMIT, DELAY_PACKETS_MAX, Settings};

/// A packet at the end of its way.
#[derive(Debug, PartialEq, Eq)]
pub struct Released<T> {
    /// The packet.
    pub packet: T,
    /// Its number within the rule, from 0.
    pub number: u64,
    /// 0 for the packet or its first fragment; the others count from 1.
    pub part: u32,
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
    /// 0 for the packet or its first fragment; the others count from 1.
    pub part: u32,
    /// Whether it is the second of a pair.
    pub is_copy: bool,
    /// When, in virtual time.
    pub at: Nanoseconds,
    /// What dropped it.
    pub cause: DropCause,
    /// A frame that the caller sends back to where the packet came from, unimpaired: ICMP's "fragmentation needed" and its like.
    pub answer: Option<Vec<u8>>,
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
    /// Packets made by fragmentation: a packet in three parts makes two.
    pub made: u64,
    /// ICMP messages that the caller was given to send back.
    pub answers: u64,
    /// Packets released, copies too.
    pub released: u64,
    /// Packets released with flipped bits.
    pub corrupted: u64,
    /// Packets that were chosen to be held back for others to overtake them.
    pub held_back: u64,
    /// Packets released after one of a higher number: reordered as RFC 4737 §3 defines it. Copies and later
    /// fragments don't count.
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
    answers: Answers,
    bottleneck: Option<(Line, Queue<Numbered<T>>)>,
    delay: Option<Delay>,
    delayed: DelayLine<Numbered<T>>,
    held: Held<Numbered<T>>,
    due: VecDeque<Released<T>>,
    /// What came while the pipeline is drained, and when: it leaves behind all else.
    behind: VecDeque<(Nanoseconds, Numbered<T>)>,
    behind_bytes: u64,
    is_draining: bool,
    /// The deadline of the last that became due.
    last_due: Nanoseconds,
    /// Without delay nothing arrives before this: what was sent before a change of settings comes first.
    not_before: Nanoseconds,
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
    reorder: Stream,
    duplicate: Stream,
    corrupt: Stream,
}

#[derive(Debug)]
struct Numbered<T> {
    packet: T,
    number: u64,
    part: u32,
}

/// Takes what is dropped.
type Drops<'a, T> = &'a mut dyn FnMut(Dropped<T>);

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
                reorder: stream(Impairment::Reorder),
                duplicate: stream(Impairment::Duplicate),
                corrupt: stream(Impairment::Corrupt),
            },
            loss: settings.loss.clone().map(Loss::new),
            answers: Answers::default(),
            bottleneck: settings.bottleneck.clone().map(|bottleneck| {
                let line = Line::new(bottleneck.capacity);
                (line, Queue::new(bottleneck.queue))
            }),
            delay: settings.delay.clone().map(Delay::new),
            settings,
            delayed: DelayLine::default(),
            held: Held::default(),
            due: VecDeque::new(),
            behind: VecDeque::new(),
            behind_bytes: 0,
            is_draining: false,
            last_due: 0,
            not_before: 0,
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

    /// What is asked for.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Packets inside: in the queue, under way, or due. Copies count from when they are due.
    #[must_use]
    pub fn packets(&self) -> usize {
        self.queued().0 + self.under_way().0 + self.due.len()
    }

    /// Whether nothing is inside.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.packets() == 0
    }

    /// Packets and bytes that wait for the line.
    #[must_use]
    pub fn queued(&self) -> (usize, u64) {
        self.bottleneck
            .as_ref()
            .map_or((0, 0), |(_, queue)| (queue.packets(), queue.bytes()))
    }

    /// Packets and bytes behind the line and not yet due: delayed, held back, or waiting for the end of a drain.
    #[must_use]
    pub fn under_way(&self) -> (usize, u64) {
        (
            self.delayed.len() + self.held.len() + self.behind.len(),
            self.delayed.bytes() + self.held.bytes() + self.behind_bytes,
        )
    }

    /// Takes a packet that came at `now`; a moment before the last one counts as the last one. What is
    /// dropped, this packet or others, goes to `dropped`.
    pub fn offer(&mut self, now: Nanoseconds, packet: T, dropped: Drops<'_, T>) {
        self.advance(now, dropped);
        let now = self.now;
        let number = self.counters.offered;
        self.counters.offered += 1;
        let numbered = Numbered {
            packet,
            number,
            part: 0,
        };
        if self.is_draining {
            self.enqueue_behind(numbered, dropped);
            return;
        }
        // Asked for every packet, so that no other impairment changes which are lost.
        let is_lost = self
            .loss
            .as_mut()
            .is_some_and(|loss| loss.is_lost(number, &mut self.streams.loss.draw(number)));
        let cause = if let Some(cut) = self.cut(now) {
            cut
        } else {
            match self.passage(now, &numbered.packet) {
                Passage::Fits if is_lost => DropCause::Loss,
                Passage::Fits => {
                    self.enter(now, numbered, dropped);
                    self.advance(now, dropped);
                    return;
                }
                Passage::Fragments(frames) => {
                    self.enter_parts(now, numbered, &frames, is_lost, dropped);
                    self.advance(now, dropped);
                    return;
                }
                Passage::Refused(answer) => {
                    self.counters.answers += u64::from(answer.is_some());
                    self.counters
                        .drop_packet(now, numbered, DropCause::Mtu, answer, dropped);
                    return;
                }
            }
        };
        self.counters
            .drop_packet(now, numbered, cause, None, dropped);
    }

    /// Takes a packet that came at `now` and drops it for a reason of the caller's, as [`DropCause::Nat`]: it
    /// has a number and is counted as all others.
    pub fn refuse(&mut self, now: Nanoseconds, packet: T, cause: DropCause, dropped: Drops<'_, T>) {
        self.advance(now, dropped);
        let number = self.counters.offered;
        self.counters.offered += 1;
        if let Some(loss) = self.loss.as_mut().filter(|_| !self.is_draining) {
            let _ = loss.is_lost(number, &mut self.streams.loss.draw(number));
        }
        let numbered = Numbered {
            packet,
            number,
            part: 0,
        };
        self.counters
            .drop_packet(self.now, numbered, cause, None, dropped);
    }

    /// Lets virtual time go on to `now`. If something is due then, [`Pipeline::next_deadline`] is the moment when it was.
    pub fn catch_up(&mut self, now: Nanoseconds, dropped: Drops<'_, T>) {
        self.advance(now, dropped);
    }

    /// When [`Pipeline::release`] has something to do again; none if nothing is inside.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Nanoseconds> {
        if let Some(due) = self.due.front() {
            return Some(due.deadline);
        }
        let line = self
            .bottleneck
            .as_ref()
            .filter(|(_, queue)| !queue.is_empty())
            .map(|(line, _)| line.starts_at(self.idle_until));
        let inside = line
            .into_iter()
            .chain(self.delayed.next_deadline())
            .chain(self.held.next_deadline())
            .min();
        inside.or_else(|| {
            self.behind
                .front()
                .map(|(came, _)| *came.max(&self.last_due))
        })
    }

    /// The next packet that is due at `now`, in the order of deadlines. Ask until there is none; whoever has
    /// no room asks again later.
    pub fn release(&mut self, now: Nanoseconds, dropped: Drops<'_, T>) -> Option<Released<T>> {
        self.advance(now, dropped);
        let released = self.due.pop_front()?;
        self.counters.released += 1;
        if !released.bit_flips.is_empty() {
            self.counters.corrupted += 1;
        }
        if released.number >= self.next_in_order {
            self.next_in_order = released.number + 1;
        } else if !released.is_copy && released.part == 0 {
            self.counters.out_of_order += 1;
        }
        Some(released)
    }

    /// What stops every packet that comes now.
    fn cut(&self, now: Nanoseconds) -> Option<DropCause> {
        let is_down = || self.settings.flap.is_some_and(|flap| flap.is_down(now));
        if self.settings.partition {
            Some(DropCause::Partition)
        } else if self.settings.blackhole {
            Some(DropCause::Blackhole)
        } else {
            is_down().then_some(DropCause::Flap)
        }
    }

    fn passage(&mut self, now: Nanoseconds, packet: &T) -> Passage {
        self.settings.mtu.map_or(Passage::Fits, |model| {
            model.passage(packet.bytes(), now, &mut self.answers)
        })
    }

    /// Takes a packet's fragments in its place; they share its number and what the loss model said.
    fn enter_parts(
        &mut self,
        now: Nanoseconds,
        whole: Numbered<T>,
        frames: &[Vec<u8>],
        is_lost: bool,
        dropped: Drops<'_, T>,
    ) {
        let number = whole.number;
        let made: Option<Vec<T>> = frames
            .iter()
            .map(|frame| whole.packet.with_bytes(frame))
            .collect();
        let Some(made) = made.filter(|_| !is_lost) else {
            let cause = if is_lost {
                DropCause::Loss
            } else {
                DropCause::Mtu
            };
            self.counters.drop_packet(now, whole, cause, None, dropped);
            return;
        };
        self.counters.made += made.len().saturating_sub(1) as u64;
        for (part, packet) in (0..).zip(made) {
            let numbered = Numbered {
                packet,
                number,
                part,
            };
            self.enter(now, numbered, dropped);
        }
    }

    /// Puts a packet into the queue or, without one, on its way.
    fn enter(&mut self, now: Nanoseconds, numbered: Numbered<T>, dropped: Drops<'_, T>) {
        let Some((_, queue)) = &mut self.bottleneck else {
            self.send(now, now, numbered, dropped);
            return;
        };
        if queue.is_empty() {
            self.idle_until = self.idle_until.max(now);
        }
        let counters = &mut self.counters;
        queue.push(numbered.into_queued(now), &mut |queued, cause| {
            counters.drop_packet(now, queued.item, cause, None, dropped);
        });
    }

    /// Lets virtual time go on: whatever the line would have begun to send until now, it sends.
    fn advance(&mut self, now: Nanoseconds, dropped: Drops<'_, T>) {
        self.now = self.now.max(now);
        while let Some((line, queue)) = &mut self.bottleneck {
            if queue.is_empty() {
                break;
            }
            // Before each push the queue was served up to that moment, so if the line was free then, the
            // queue was empty, and what waits now has come at that moment: it starts then.
            let start = line.starts_at(self.idle_until);
            if start > self.now {
                break;
            }
            let counters = &mut self.counters;
            let served = queue.pop(start, &mut |queued, cause| {
                counters.drop_packet(start, queued.item, cause, None, dropped);
            });
            if let Some(queued) = served {
                let departure = line.send(start, queued.bytes);
                self.send(start, departure, queued.item, dropped);
            }
        }
        self.ripen(self.now, dropped);
        if self.is_draining {
            self.settle_behind();
        }
    }

    /// Puts a packet on its way whose line began to send it at `start` and has sent it at `departure`.
    fn send(
        &mut self,
        start: Nanoseconds,
        departure: Nanoseconds,
        numbered: Numbered<T>,
        dropped: Drops<'_, T>,
    ) {
        // Those who have arrived by then make room, whether or not somebody fetched them.
        self.ripen(start, dropped);
        let bytes = numbered.packet.frame_bytes();
        if !self.has_room(bytes) {
            self.counters
                .drop_packet(start, numbered, DropCause::DelayFull, None, dropped);
            return;
        }
        let deadline = match &mut self.delay {
            Some(delay) => delay.deadline(departure, &mut numbered.draw(&self.streams.delay)),
            None => departure.max(self.not_before),
        };
        self.delayed.push(deadline, bytes, numbered);
    }

    /// Whether a packet of this length may be under way too.
    fn has_room(&self, bytes: u32) -> bool {
        let (packets, bytes_inside) = self.under_way();
        let limit = self.settings.delay_limit;
        packets < limit.packets.min(DELAY_PACKETS_MAX)
            && bytes_inside + u64::from(bytes) <= limit.bytes
    }

    /// Moves those whose deadline has come to those that are due. Who arrives and who has been held back for
    /// long enough at the same moment leave in this order.
    fn ripen(&mut self, now: Nanoseconds, dropped: Drops<'_, T>) {
        loop {
            let arrival = self.delayed.next_deadline().filter(|at| *at <= now);
            let expiry = self.held.next_deadline().filter(|at| *at <= now);
            let is_arrival = arrival.is_some_and(|at| expiry.is_none_or(|expiry| at <= expiry));
            if is_arrival && let Some((deadline, numbered)) = self.delayed.pop() {
                self.arrive(deadline, numbered, dropped);
            } else if let Some(deadline) = expiry
                && let Some(numbered) = self.held.pop()
            {
                self.finish(deadline, numbered, dropped);
            } else {
                return;
            }
        }
    }

    /// Holds a packet back that has got through its delay, or lets it pass and those that it overtakes behind it.
    fn arrive(&mut self, deadline: Nanoseconds, numbered: Numbered<T>, dropped: Drops<'_, T>) {
        if let Some(model) = &self.settings.reorder
            && numbered
                .draw(&self.streams.reorder)
                .happens(model.probability)
        {
            self.counters.held_back += 1;
            let bytes = numbered.packet.frame_bytes();
            self.held.hold(deadline, model, bytes, numbered);
            return;
        }
        self.finish(deadline, numbered, dropped);
        self.held.pass();
        while let Some(overtaken) = self.held.overtaken() {
            self.finish(deadline, overtaken, dropped);
        }
    }

    /// Doubles and corrupts a packet that is due, or not.
    fn finish(&mut self, deadline: Nanoseconds, numbered: Numbered<T>, dropped: Drops<'_, T>) {
        let is_doubled = self.settings.duplicate > 0.0
            && numbered
                .draw(&self.streams.duplicate)
                .happens(self.settings.duplicate);
        let copy = if is_doubled {
            numbered.packet.copy()
        } else {
            None
        };
        self.counters.copies += u64::from(copy.is_some());
        self.counters.copies_refused += u64::from(is_doubled && copy.is_none());
        let Numbered { number, part, .. } = numbered;
        let released = |packet: T, is_copy| {
            let bit_flips = self.settings.corrupt.map_or_else(Vec::new, |model| {
                let copy = part * 2 + u32::from(is_copy);
                let mut draw = self.streams.corrupt.draw_copy(number, copy);
                bit_flips(&model, packet.frame_bytes(), &mut draw)
            });
            Released {
                packet,
                number,
                part,
                is_copy,
                deadline,
                bit_flips,
            }
        };
        let first = released(numbered.packet, false);
        let second = copy.map(|copy| released(copy, true));
        for released in [Some(first), second].into_iter().flatten() {
            self.enqueue_due(released, dropped);
        }
    }

    fn enqueue_due(&mut self, released: Released<T>, dropped: Drops<'_, T>) {
        self.last_due = released.deadline;
        if self.due.len() < self.settings.unread_packets_max {
            self.due.push_back(released);
        } else {
            self.counters
                .drop_released(released, DropCause::Unread, dropped);
        }
    }
}

impl<T: Packet> Numbered<T> {
    fn draw(&self, stream: &Stream) -> Draw {
        stream.draw_copy(self.number, self.part)
    }

    fn into_queued(self, arrived: Nanoseconds) -> Queued<Self> {
        Queued {
            bytes: self.packet.frame_bytes(),
            flow_hash: self.packet.flow_hash(),
            arrived,
            item: self,
        }
    }
}

impl Counters {
    fn drop_packet<T>(
        &mut self,
        at: Nanoseconds,
        numbered: Numbered<T>,
        cause: DropCause,
        answer: Option<Vec<u8>>,
        dropped: Drops<'_, T>,
    ) {
        *self.dropped.entry(cause).or_default() += 1;
        dropped(Dropped {
            packet: numbered.packet,
            number: numbered.number,
            part: numbered.part,
            is_copy: false,
            at,
            cause,
            answer,
        });
    }

    fn drop_released<T>(&mut self, released: Released<T>, cause: DropCause, dropped: Drops<'_, T>) {
        *self.dropped.entry(cause).or_default() += 1;
        dropped(Dropped {
            packet: released.packet,
            number: released.number,
            part: released.part,
            is_copy: released.is_copy,
            at: released.deadline,
            cause,
            answer: None,
        });
    }
}

#[cfg(test)]
mod tests;

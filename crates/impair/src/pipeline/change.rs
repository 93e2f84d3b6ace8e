//! What happens to packets inside when the settings change, and at the end.

use super::{Drops, Numbered, Pipeline, Released};
use crate::{
    DropCause, Nanoseconds, Packet,
    delay::Delay,
    line::Line,
    loss::Loss,
    queue::Queue,
    settings::{Bottleneck, Settings},
};

impl<T: Packet> Pipeline<T> {
    /// Goes on with other settings from `now` on. Nothing is dropped and nothing overtakes for it:
    ///
    /// - What is under way keeps its deadline. What is due stays due.
    /// - What is queued stays, in its order, also beyond a lower limit; a new line serves it from when the old one
    ///   has sent the packet that it is sending. Without a bottleneck it leaves at once.
    /// - Duplication and corruption are as they are set when a packet gets there. What is held back leaves no
    ///   later than the new settings would have it, so at once if nothing is to be reordered.
    /// - Random numbers go by packet number and go on. The state of a loss model stays if the model does; the
    ///   correlation of jitter goes on whatever the distribution.
    /// - If order is kept, or there is no delay, what comes waits for what is under way.
    ///
    /// A drain ends; what came during it is queued as if it had come now, not lost and not cut.
    pub fn reconfigure(&mut self, now: Nanoseconds, settings: Settings, dropped: Drops<'_, T>) {
        self.advance(now, dropped);
        let now = self.now;
        if settings.loss != self.settings.loss {
            self.loss = settings.loss.clone().map(Loss::new);
        }
        self.not_before = self.delayed.latest();
        if settings.delay != self.settings.delay {
            self.change_delay(&settings);
        }
        self.held.reconfigure(now, settings.reorder.as_ref());
        let before = std::mem::replace(&mut self.settings, settings).bottleneck;
        if before != self.settings.bottleneck {
            self.change_bottleneck(before, dropped);
            self.not_before = self.delayed.latest();
        }
        self.is_draining = false;
        self.behind_bytes = 0;
        for (_, numbered) in std::mem::take(&mut self.behind) {
            match &mut self.bottleneck {
                None => self.send(now, now, numbered, dropped),
                Some((_, queue)) => {
                    if queue.is_empty() {
                        self.idle_until = self.idle_until.max(now);
                    }
                    queue.push_beyond(numbered.into_queued(now));
                }
            }
        }
        self.advance(now, dropped);
    }

    /// From now on nothing that comes is impaired: it leaves as soon as all that is inside now has left at its
    /// deadlines, and in the order in which it came. Limits still hold, as [`DropCause::DelayFull`]. When
    /// [`Pipeline::is_empty`] the packets can go another way.
    pub fn begin_drain(&mut self, now: Nanoseconds, dropped: Drops<'_, T>) {
        self.advance(now, dropped);
        self.is_draining = true;
    }

    /// Drops all that is inside as [`DropCause::Flushed`], and says how many that was.
    pub fn flush(&mut self, now: Nanoseconds, dropped: Drops<'_, T>) -> u64 {
        self.advance(now, dropped);
        let before = self.counters.dropped_in_all();
        for released in std::mem::take(&mut self.due) {
            self.counters
                .drop_released(released, DropCause::Flushed, dropped);
        }
        let mut inside: Vec<Numbered<T>> = Vec::new();
        inside.extend(std::iter::from_fn(|| self.held.pop()));
        inside.extend(std::iter::from_fn(|| self.delayed.pop()).map(|(_, numbered)| numbered));
        if let Some((_, queue)) = &mut self.bottleneck {
            inside.extend(queue.take_all().into_iter().map(|queued| queued.item));
        }
        let behind = std::mem::take(&mut self.behind);
        self.behind_bytes = 0;
        self.not_before = 0;
        if let Some(delay) = &mut self.delay {
            delay.forget_order();
        }
        inside.extend(behind.into_iter().map(|(_, numbered)| numbered));
        for numbered in inside {
            self.counters
                .drop_packet(self.now, numbered, DropCause::Flushed, None, dropped);
        }
        self.counters.dropped_in_all() - before
    }

    fn change_delay(&mut self, settings: &Settings) {
        let latest = self.delayed.latest();
        match (&mut self.delay, settings.delay.clone()) {
            (Some(delay), Some(model)) => delay.reconfigure(model, latest),
            (delay, Some(model)) => {
                let mut new = Delay::new(model.clone());
                new.reconfigure(model, latest);
                *delay = Some(new);
            }
            (delay, None) => *delay = None,
        }
    }

    fn change_bottleneck(&mut self, before: Option<Bottleneck>, dropped: Drops<'_, T>) {
        let now = self.now;
        let old = self.bottleneck.take();
        // A new line begins now; or later, as the frame on the old one ends as it began.
        let busy_until = old.as_ref().map_or(0, |(line, _)| line.busy_until());
        self.idle_until = self.idle_until.max(busy_until).max(now);
        let Some(new) = self.settings.bottleneck.clone() else {
            let queue = old.map(|(_, mut queue)| queue.take_all());
            for queued in queue.into_iter().flatten() {
                self.send(now, self.idle_until, queued.item, dropped);
            }
            return;
        };
        let is_same_line = before.is_some_and(|before| before.capacity == new.capacity);
        self.bottleneck = Some(match old {
            Some((line, queue)) if is_same_line => (line, queue.reconfigured(new.queue)),
            Some((_, queue)) => (Line::new(new.capacity), queue.reconfigured(new.queue)),
            None => (Line::new(new.capacity), Queue::new(new.queue)),
        });
    }

    /// Puts a packet that comes during a drain behind all else.
    pub(super) fn enqueue_behind(&mut self, numbered: Numbered<T>, dropped: Drops<'_, T>) {
        if self.is_settled() {
            self.enqueue_due(numbered.into_released(self.now), dropped);
            return;
        }
        let bytes = numbered.packet.frame_bytes();
        if self.has_room(bytes) {
            self.behind_bytes += u64::from(bytes);
            self.behind.push_back((self.now, numbered));
        } else {
            self.counters
                .drop_packet(self.now, numbered, DropCause::DelayFull, None, dropped);
        }
    }

    /// Makes those due that came during a drain, once all that was before them is.
    pub(super) fn settle_behind(&mut self) {
        if !self.is_settled() {
            return;
        }
        self.behind_bytes = 0;
        for (came, numbered) in self.behind.drain(..) {
            self.last_due = came.max(self.last_due);
            self.due.push_back(numbered.into_released(self.last_due));
        }
    }

    /// Whether nothing is inside that isn't due, but for what came during a drain.
    fn is_settled(&self) -> bool {
        self.queued().0 + self.delayed.len() + self.held.len() == 0
    }
}

impl<T> Numbered<T> {
    fn into_released(self, deadline: Nanoseconds) -> Released<T> {
        Released {
            packet: self.packet,
            number: self.number,
            part: self.part,
            is_copy: false,
            deadline,
            bit_flips: Vec::new(),
        }
    }
}

//! One rule of a line: its pipeline, and what is measured at its end.

use sandwire_api::impairment::{Packets, RuleReport, Timing};
use sandwire_engine::classify::{Headers, Match};

use super::{
    frame::{Framed, flip, repair_checksums},
    histogram::Histogram,
};
use crate::{
    Nanoseconds, Packet as _,
    compile::CompiledRule,
    nat::NatModel,
    pipeline::{Dropped, Pipeline, Released},
    queue::QueueModel,
    random::Flow,
};

/// When nothing happens ever.
pub(super) const NEVER: Nanoseconds = Nanoseconds::MAX;

#[derive(Debug)]
pub(super) struct RuleState {
    pub(super) compiled: CompiledRule,
    pub(super) pipeline: Pipeline<Framed>,
    /// When the pipeline has something to release.
    pub(super) next: Nanoseconds,
    is_draining: bool,
    lateness: Histogram,
    /// Packets that were later than the budget of their moment.
    late: u64,
    released_bytes: u64,
    this_second: Second,
    last_second: Second,
}

/// What was released in one second.
#[derive(Clone, Copy, Debug, Default)]
struct Second {
    /// Which, from the start of time.
    number: u64,
    packets: u64,
    bytes: u64,
    /// Sum of nanoseconds inside.
    delay: u128,
}

const SECOND: Nanoseconds = 1_000_000_000;

type Drops<'a> = &'a mut dyn FnMut(Dropped<Framed>);

impl RuleState {
    pub(super) fn new(now: Nanoseconds, compiled: &CompiledRule, flow: Flow) -> Self {
        Self {
            compiled: compiled.clone(),
            pipeline: Pipeline::new(flow, compiled.settings_from(now)),
            next: NEVER,
            is_draining: false,
            lateness: Histogram::default(),
            late: 0,
            released_bytes: 0,
            this_second: Second::default(),
            last_second: Second::default(),
        }
    }

    /// Goes on with another description of the same name.
    pub(super) fn change(&mut self, now: Nanoseconds, compiled: &CompiledRule, drops: Drops<'_>) {
        if self.is_draining || !compiled.has_settings_of(&self.compiled) {
            let running = self.pipeline.settings();
            let settings = compiled.settings_after(now, &self.compiled, running);
            self.pipeline.reconfigure(now, settings, drops);
        }
        self.is_draining = false;
        self.compiled = compiled.clone();
        self.look_ahead();
    }

    /// Takes nothing more on its way but what comes while something is inside.
    pub(super) fn begin_drain(&mut self, now: Nanoseconds, drops: Drops<'_>) {
        self.is_draining = true;
        self.pipeline.begin_drain(now, drops);
        self.look_ahead();
    }

    /// Whether it may go.
    pub(super) fn is_drained(&self) -> bool {
        self.is_draining && self.pipeline.is_empty()
    }

    /// Notes when the pipeline has something to do; at once if it may go.
    pub(super) fn look_ahead(&mut self) {
        self.next = self.pipeline.next_deadline().unwrap_or(NEVER);
    }

    /// Whether the packet with these headers is one of its own.
    pub(super) fn is_for(&self, headers: &Headers) -> bool {
        self.compiled
            .matches
            .iter()
            .any(|rule| rule.matches(headers))
    }

    /// Whether it asks for more than the packet's length.
    pub(super) fn reads_headers(&self) -> bool {
        let settings = self.pipeline.settings();
        let bottleneck = settings.bottleneck.as_ref();
        let is_fair = |queue| matches!(queue, QueueModel::FqCodel(_));
        self.compiled
            .matches
            .iter()
            .any(|rule| *rule != Match::default())
            || bottleneck.is_some_and(|bottleneck| is_fair(bottleneck.queue))
    }

    /// How it translates, if it does.
    pub(super) fn nat(&self) -> Option<&NatModel> {
        let model = self.pipeline.settings().nat.as_ref();
        model.filter(|_| !self.is_draining)
    }

    /// Corrupts what is to be corrupted, and measures.
    pub(super) fn finish(&mut self, now: Nanoseconds, released: &mut Released<Framed>) {
        if !released.bit_flips.is_empty() {
            let frame = released.packet.frame_mut();
            flip(frame, &released.bit_flips);
            if self.compiled.repairs_checksums {
                repair_checksums(frame);
            }
        }
        let lateness = now.saturating_sub(released.deadline);
        self.lateness.add(lateness);
        self.late += u64::from(lateness > self.compiled.budget);
        let bytes = u64::from(released.packet.frame_bytes());
        self.released_bytes += bytes;
        let number = now / SECOND;
        if number != self.this_second.number {
            self.last_second = self.this_second;
            self.this_second = Second {
                number,
                ..Second::default()
            };
        }
        self.this_second.packets += 1;
        self.this_second.bytes += bytes;
        self.this_second.delay += u128::from(now.saturating_sub(released.packet.came()));
    }

    pub(super) fn inside(&self) -> u64 {
        self.pipeline.packets() as u64
    }

    pub(super) fn packets(&self) -> Packets {
        let counters = self.pipeline.counters();
        let dropped = counters.dropped.iter();
        Packets {
            offered: counters.offered,
            released: counters.released,
            released_bytes: self.released_bytes,
            copies: counters.copies,
            copies_refused: counters.copies_refused,
            made: counters.made,
            answers: counters.answers,
            corrupted: counters.corrupted,
            held_back: counters.held_back,
            out_of_order: counters.out_of_order,
            dropped: dropped
                .map(|(cause, count)| (cause.name().to_owned(), *count))
                .collect(),
        }
    }

    pub(super) fn report(&self, now: Nanoseconds) -> RuleReport {
        let (queued_packets, queued_bytes) = self.pipeline.queued();
        let (delayed_packets, delayed_bytes) = self.pipeline.under_way();
        let whole = (now / SECOND).checked_sub(1);
        let seconds = [self.this_second, self.last_second];
        let second = seconds
            .into_iter()
            .find(|second| Some(second.number) == whole);
        let second = second.unwrap_or_default();
        let mean = second.delay.checked_div(u128::from(second.packets));
        RuleReport {
            name: self.compiled.name.clone(),
            draining: self.is_draining,
            packets: self.packets(),
            queued_packets: queued_packets as u64,
            queued_bytes,
            delayed_packets: delayed_packets as u64,
            delayed_bytes,
            achieved_bits_per_second: second.bytes * 8,
            achieved_delay_nanoseconds: mean.and_then(|mean| u64::try_from(mean).ok()),
            timing: self.timing(),
        }
    }

    fn timing(&self) -> Timing {
        Timing {
            packets: self.lateness.count(),
            p50_nanoseconds: self.lateness.percentile(50),
            p99_nanoseconds: self.lateness.percentile(99),
            max_nanoseconds: self.lateness.max(),
            budget_nanoseconds: self.compiled.budget,
            late: self.late,
            valid: self.is_valid(),
        }
    }

    /// Whether 99 of 100 packets were in time.
    fn is_valid(&self) -> bool {
        self.late.saturating_mul(100) <= self.lateness.count()
    }
}

/// Rules that are gone, all together.
#[derive(Debug, Default)]
pub(super) struct Gone {
    pub(super) packets: Packets,
    /// Whether the timing of one of them wasn't within its budget.
    pub(super) is_invalid: bool,
}

impl Gone {
    pub(super) fn add(&mut self, rule: &RuleState) {
        self.packets.add(&rule.packets());
        self.is_invalid |= !rule.is_valid();
    }
}

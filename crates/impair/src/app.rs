//! Impairments as an app of an engine: one [`Line`] for each way of each link.
//!
//! A packet from `input` goes to the first rule that matches it, and through that rule's pipeline; what no rule matches
//! goes on at once. What is due leaves by `output` in the order of deadlines over all rules, and only as far as there is
//! room: what isn't fetched waits, and is dropped with a cause of its own when too much waits. ICMP messages of a clamped
//! MTU leave by `back`, towards where the packet came from. An idle line rests.
//!
//! A line changes under traffic: [`Engine::configure`](sandwire_engine::Engine::configure) with another description of
//! the same direction and link, or [`LineApp::change`]. Rules are known by name. Those that stay the same go on with all
//! their state; those that change go on with their packets, as [`Pipeline::reconfigure`] says; those that
//! go first let out what they hold, in order, and what comes for them meanwhile leaves behind that.

mod frame;
mod histogram;
mod reporter;
mod rule;
mod share;

use std::{cell::RefCell, collections::VecDeque, fmt, rc::Rc};

use sandwire_api::impairment::{Impairment, LineReport, Packets};
use sandwire_engine::{
    App, BuildError, Config, Figure, LINK_PACKETS_MAX, Packet, PortList, Ports, Time, Wake,
    classify::{self, Headers},
};

use self::{
    frame::Framed,
    reporter::Reporter,
    rule::{Gone, NEVER, RuleState},
};
use crate::{
    DropCause, Nanoseconds,
    compile::{CompileError, Compiled, CompiledRule},
    decision::Decision,
    nat::{Nat, Translation},
    random::Flow,
};

pub use crate::random::Direction;

/// What is to happen to the packets of one way of a link; the description of a [`LineApp`].
///
/// Ports: `input`; `output`, `back`.
#[derive(Clone, Debug)]
pub struct Line {
    direction: Direction,
    link: u64,
    seed: u64,
    rules: Rc<[CompiledRule]>,
    nat: SharedNat,
    shares: bool,
}

/// A running [`Line`].
pub struct LineApp {
    direction: Direction,
    link: u32,
    seed: u64,
    /// Rules that the next breath puts in place.
    pending: Option<Rc<[CompiledRule]>>,
    rules: Vec<RuleState>,
    /// Whether any rule asks for what is in the headers.
    reads_headers: bool,
    translates: bool,
    nat: SharedNat,
    /// Whether it leaves others their part of the engine's packets.
    shares: bool,
    /// Packets without a rule that found no room.
    waiting: VecDeque<Packet>,
    /// ICMP messages on their way to `back`.
    answers: Vec<Vec<u8>>,
    /// When a rule has something to do.
    next: Nanoseconds,
    is_blocked: bool,
    now: Nanoseconds,
    passed: u64,
    passed_dropped: u64,
    nat_dropped: u64,
    answers_dropped: u64,
    gone: Gone,
    observer: Option<Observer>,
}

/// What became of a packet that a rule matched.
#[derive(Debug)]
pub struct Observation<'a> {
    /// The rule's name.
    pub rule: &'a str,
    /// Which way.
    pub direction: Direction,
    /// When it came.
    pub came: Nanoseconds,
    /// Its fate.
    pub decision: Decision,
    /// The frame as it left, or as it was when it was dropped.
    pub frame: &'a [u8],
}

/// Is told of every packet whose fate is known.
pub type Observer = Box<dyn FnMut(&Observation<'_>)>;

/// The translation of a link, which both of its lines have.
#[derive(Clone)]
struct SharedNat(Rc<RefCell<Nat>>);

const INPUT: usize = 0;
const OUTPUT: usize = 0;
const BACK: usize = 1;

/// When a line looks again whose consumer leaves no room.
const BLOCKED_PAUSE: Nanoseconds = 1_000_000;

impl Line {
    /// What this impairment does one way of the link of this number. Numbers tell the random streams of links apart.
    ///
    /// A NAT of a rule translates only this way then: use [`Line::pair`] for both.
    ///
    /// # Errors
    /// If the impairment asks for what can't be, or a trace in it isn't one.
    pub fn new(
        impairment: &Impairment,
        direction: Direction,
        link: u64,
    ) -> Result<Self, CompileError> {
        Ok(Self::of(&Compiled::new(impairment)?, direction, link))
    }

    /// What it does both ways: egress and ingress. They must be apps of one engine.
    ///
    /// # Errors
    /// As [`Line::new`].
    pub fn pair(impairment: &Impairment, link: u64) -> Result<(Self, Self), CompileError> {
        Ok(Self::pair_of(&Compiled::new(impairment)?, link))
    }

    /// The same, of what was compiled before.
    #[must_use]
    pub fn pair_of(compiled: &Compiled, link: u64) -> (Self, Self) {
        let egress = Self::of(compiled, Direction::Egress, link);
        let ingress = Self {
            direction: Direction::Ingress,
            ..egress.clone()
        };
        let ingress = ingress.changed_to(compiled);
        (egress, ingress)
    }

    /// The same line with other rules, for [`LineApp::change`] and for another graph.
    #[must_use]
    pub fn changed_to(&self, compiled: &Compiled) -> Self {
        Self {
            seed: compiled.seed,
            rules: compiled.rules(self.direction).into(),
            ..self.clone()
        }
    }

    /// The same line among others of its engine, to which it leaves their part of the packets that this may have under way.
    #[must_use]
    pub fn sharing(self) -> Self {
        Self {
            shares: true,
            ..self
        }
    }

    /// Whether packets go by without being looked at.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        self.rules.is_empty()
    }

    fn of(compiled: &Compiled, direction: Direction, link: u64) -> Self {
        let nat = Nat::new(compiled.seed, stream_of(link));
        Self {
            direction,
            link,
            seed: compiled.seed,
            rules: compiled.rules(direction).into(),
            nat: SharedNat(Rc::new(RefCell::new(nat))),
            shares: false,
        }
    }
}

impl PartialEq for Line {
    fn eq(&self, other: &Self) -> bool {
        (self.direction, self.link, self.seed) == (other.direction, other.link, other.seed)
            && self.rules == other.rules
    }
}

impl Config for Line {
    type App = LineApp;

    fn inputs(&self) -> PortList {
        PortList::named(["input"])
    }

    fn outputs(&self) -> PortList {
        PortList::named(["output", "back"])
    }

    fn build(&self) -> Result<LineApp, BuildError> {
        Ok(LineApp {
            direction: self.direction,
            link: stream_of(self.link),
            seed: self.seed,
            pending: Some(Rc::clone(&self.rules)),
            rules: Vec::new(),
            reads_headers: false,
            translates: false,
            nat: self.nat.clone(),
            shares: self.shares,
            waiting: VecDeque::new(),
            answers: Vec::new(),
            next: NEVER,
            is_blocked: false,
            now: 0,
            passed: 0,
            passed_dropped: 0,
            nat_dropped: 0,
            answers_dropped: 0,
            gone: Gone::default(),
            observer: None,
        })
    }

    fn keeps_state_of(&self, running: &Self) -> bool {
        (self.direction, self.link) == (running.direction, running.link)
    }

    fn apply(&self, app: &mut LineApp) {
        app.change(self);
    }
}

impl App for LineApp {
    fn pull(&mut self, now: Time, ports: &mut Ports<'_>) {
        let now = now.as_nanos();
        if now < self.next && self.pending.is_none() && self.waiting.is_empty() {
            return;
        }
        self.now = now;
        if let Some(rules) = self.pending.take() {
            self.put_in_place(now, &rules);
        }
        self.send(now, ports);
    }

    fn push(&mut self, now: Time, ports: &mut Ports<'_>) {
        if ports.queued(INPUT) == 0 {
            return;
        }
        let now = now.as_nanos();
        self.now = now;
        if self.rules.is_empty() && self.waiting.is_empty() && !self.translates {
            let count = ports.queued(INPUT);
            if count <= ports.space(OUTPUT) {
                self.passed += ports.forward(INPUT, OUTPUT) as u64;
                return;
            }
        }
        while let Some(packet) = ports.receive(INPUT) {
            self.take(now, packet, ports);
        }
        self.send(now, ports);
    }

    fn wake(&self) -> Wake {
        if self.pending.is_some() {
            return Wake::at(Time::START);
        }
        if self.is_blocked {
            let again = self.now.saturating_add(BLOCKED_PAUSE);
            return Wake::at(Time::from_nanos(again));
        }
        if self.next == NEVER {
            return Wake::default();
        }
        Wake::at(Time::from_nanos(self.next))
    }

    fn report(&self) -> Vec<Figure> {
        let packets = self.packets();
        vec![
            Figure::new("passed", self.passed),
            Figure::new("offered", packets.offered),
            Figure::new("released", packets.released),
            Figure::new("dropped", packets.dropped_in_all()),
            Figure::new("inside", self.inside()),
        ]
    }
}

impl LineApp {
    /// Follows another description from the next breath on. The seed of rules that go on stays.
    pub fn change(&mut self, line: &Line) {
        self.seed = line.seed;
        self.pending = Some(Rc::clone(&line.rules));
    }

    /// Tells somebody of every packet whose fate is known, or nobody any more.
    pub fn observe(&mut self, observer: Option<Observer>) {
        self.observer = observer;
    }

    /// Whether nothing is inside and no rule is left: whoever diverted packets here can stop to. Rules are taken away by
    /// changing to an impairment without any.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let is_pending = self.pending.as_ref().is_some_and(|rules| !rules.is_empty());
        !is_pending && self.rules.is_empty() && self.waiting.is_empty()
    }

    /// Packets inside.
    #[must_use]
    pub fn inside(&self) -> u64 {
        let rules = self.rules.iter().map(RuleState::inside);
        rules.sum::<u64>() + self.waiting.len() as u64
    }

    /// Takes all rules away at once and drops what is inside; how many packets that was.
    pub fn flush(&mut self) -> u64 {
        self.pending = None;
        let mut flushed = self.waiting.len() as u64;
        self.passed_dropped += flushed;
        self.waiting.clear();
        let mut reporter = Reporter {
            direction: self.direction,
            answers: &mut self.answers,
            observer: &mut self.observer,
        };
        for mut rule in self.rules.drain(..) {
            let name = rule.compiled.name.clone();
            let pipeline = &mut rule.pipeline;
            flushed += pipeline.flush(self.now, &mut |dropped| reporter.dropped(&name, dropped));
            self.gone.add(&rule);
        }
        self.answers.clear();
        self.next = NEVER;
        self.is_blocked = false;
        flushed
    }

    /// What happened, up to `now`.
    #[must_use]
    pub fn line_report(&self, now: Time) -> LineReport {
        let rules: Vec<_> = self
            .rules
            .iter()
            .map(|rule| rule.report(now.as_nanos()))
            .collect();
        LineReport {
            passed: self.passed,
            passed_dropped: self.passed_dropped,
            nat_dropped: self.nat_dropped,
            answers_dropped: self.answers_dropped,
            inside: self.inside(),
            valid: !self.gone.is_invalid && rules.iter().all(|rule| rule.timing.valid),
            rules,
            gone: self.gone.packets.clone(),
        }
    }

    /// What became of packets that a rule matched, gone rules too.
    fn packets(&self) -> Packets {
        let mut packets = self.gone.packets.clone();
        for rule in &self.rules {
            packets.add(&rule.packets());
        }
        packets
    }

    /// Gives each rule that goes on its settings, begins those that are new, and lets those that go drain. A rule that
    /// goes stays in front of the rule that it stood in front of.
    fn put_in_place(&mut self, now: Nanoseconds, rules: &[CompiledRule]) {
        let mut reporter = Reporter {
            direction: self.direction,
            answers: &mut self.answers,
            observer: &mut self.observer,
        };
        let (seed, link, direction) = (self.seed, self.link, self.direction);
        let flow = |rule: &CompiledRule| Flow {
            seed,
            link,
            direction,
            rule: rule.stream(),
        };
        let mut old: Vec<RuleState> = std::mem::take(&mut self.rules);
        let is_kept = |state: &RuleState| rules.iter().any(|rule| rule.name == state.compiled.name);
        let mut new: Vec<RuleState> = Vec::with_capacity(rules.len());
        for rule in rules {
            let place = old
                .iter()
                .position(|state| state.compiled.name == rule.name);
            let Some(place) = place else {
                new.push(RuleState::new(now, rule, flow(rule)));
                continue;
            };
            // Those that go and stood in front of it.
            let before = old[..place]
                .iter()
                .rposition(is_kept)
                .map_or(0, |kept| kept + 1);
            let mut moved: Vec<RuleState> = old.drain(before..=place).collect();
            if let Some(state) = moved.last_mut() {
                state.change(now, rule, &mut |dropped| {
                    reporter.dropped(&rule.name, dropped)
                });
            }
            new.append(&mut moved);
        }
        new.append(&mut old);
        for state in &mut new {
            if !is_kept(state) {
                let name = state.compiled.name.clone();
                state.begin_drain(now, &mut |dropped| reporter.dropped(&name, dropped));
            }
        }
        self.rules = new;
        self.translates |= self.rules.iter().any(|rule| rule.compiled.translates());
        self.reads_headers = self.rules.iter().any(RuleState::reads_headers);
        self.remove_drained();
    }

    /// Gives a packet that came to its rule, or sends it on.
    fn take(&mut self, now: Nanoseconds, mut packet: Packet, ports: &mut Ports<'_>) {
        let mut translation = Translation::Untouched;
        if self.translates && self.direction == Direction::Ingress {
            translation = self.nat.0.borrow_mut().arrive(now, packet.bytes_mut());
        }
        let headers = if self.reads_headers {
            classify::parse(packet.bytes())
        } else {
            Headers::default()
        };
        let is_beyond = self.shares && share::is_exceeded(ports.pool(), || self.inside());
        let found = self.rules.iter_mut().find(|rule| rule.is_for(&headers));
        if self.translates && self.direction == Direction::Egress {
            let model = found.as_ref().and_then(|rule| rule.nat());
            translation = self
                .nat
                .0
                .borrow_mut()
                .leave(now, model, packet.bytes_mut());
        }
        let Some(rule) = found else {
            if translation == Translation::Dead {
                self.nat_dropped += 1;
            } else {
                self.pass(packet, ports);
            }
            return;
        };
        let mut reporter = Reporter {
            direction: self.direction,
            answers: &mut self.answers,
            observer: &mut self.observer,
        };
        let framed = Framed::new(packet, &headers, now);
        let mut dropped = |dropped| reporter.dropped(&rule.compiled.name, dropped);
        if translation == Translation::Dead {
            rule.pipeline
                .refuse(now, framed, DropCause::Nat, &mut dropped);
        } else if is_beyond {
            rule.pipeline
                .refuse(now, framed, DropCause::Share, &mut dropped);
        } else {
            rule.pipeline.offer(now, framed, &mut dropped);
        }
        rule.look_ahead();
        // A rule that may go is looked at in this breath.
        let next = if rule.is_drained() { now } else { rule.next };
        self.next = self.next.min(next);
    }

    /// Sends a packet on that no rule matches.
    fn pass(&mut self, packet: Packet, ports: &mut Ports<'_>) {
        if self.waiting.is_empty() && ports.space(OUTPUT) > 0 {
            self.passed += 1;
            ports.transmit(OUTPUT, packet);
        } else if self.waiting.len() < LINK_PACKETS_MAX {
            self.waiting.push_back(packet);
        } else {
            self.passed_dropped += 1;
        }
    }

    /// Sends all that is due and has room.
    fn send(&mut self, now: Nanoseconds, ports: &mut Ports<'_>) {
        while ports.space(OUTPUT) > 0
            && let Some(packet) = self.waiting.pop_front()
        {
            self.passed += 1;
            ports.transmit(OUTPUT, packet);
        }
        if now >= self.next {
            self.release(now, ports);
        }
        self.is_blocked = !self.waiting.is_empty() || self.next <= now;
        self.send_answers(ports);
    }

    /// Releases what is due, over all rules in the order of deadlines.
    fn release(&mut self, now: Nanoseconds, ports: &mut Ports<'_>) {
        let mut reporter = Reporter {
            direction: self.direction,
            answers: &mut self.answers,
            observer: &mut self.observer,
        };
        for rule in self.rules.iter_mut().filter(|rule| rule.next <= now) {
            let name = &rule.compiled.name;
            rule.pipeline
                .catch_up(now, &mut |dropped| reporter.dropped(name, dropped));
            rule.look_ahead();
        }
        loop {
            let first = self.rules.iter_mut().min_by_key(|rule| rule.next);
            let Some(rule) = first.filter(|rule| rule.next <= now && ports.space(OUTPUT) > 0)
            else {
                break;
            };
            let name = &rule.compiled.name;
            let released = rule
                .pipeline
                .release(now, &mut |dropped| reporter.dropped(name, dropped));
            rule.look_ahead();
            if let Some(mut released) = released {
                rule.finish(now, &mut released);
                reporter.released(&rule.compiled.name, now, &released);
                ports.transmit(OUTPUT, released.packet.into_packet());
            }
        }
        self.remove_drained();
    }

    /// Lets rules go that are to and hold nothing any more, and looks what comes next.
    fn remove_drained(&mut self) {
        if self.rules.iter().any(RuleState::is_drained) {
            for rule in self.rules.extract_if(.., |rule| rule.is_drained()) {
                self.gone.add(&rule);
            }
            self.reads_headers = self.rules.iter().any(RuleState::reads_headers);
        }
        let next = self.rules.iter().map(|rule| rule.next).min();
        self.next = next.unwrap_or(NEVER);
    }

    fn send_answers(&mut self, ports: &mut Ports<'_>) {
        for mut answer in self.answers.drain(..) {
            let mut nat = self.nat.0.borrow_mut();
            nat.answer(self.now, self.direction, &mut answer);
            let packet = ports.pool().take().filter(|_| ports.space(BACK) > 0);
            match packet.map(|mut packet| (packet.set_bytes(&answer), packet)) {
                Some((true, packet)) => ports.transmit(BACK, packet),
                _ => self.answers_dropped += 1,
            }
        }
    }
}

impl fmt::Debug for LineApp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LineApp")
            .field("direction", &self.direction)
            .field("link", &self.link)
            .field("rules", &self.rules.len())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for SharedNat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SharedNat")
    }
}

/// The number of a link among random streams.
fn stream_of(link: u64) -> u32 {
    let folded = (link ^ (link >> 32)) & u64::from(u32::MAX);
    u32::try_from(folded).unwrap_or(0)
}

#[cfg(test)]
mod tests;

//! An engine on a thread of its own, with the lanes of many targets.
//!
//! The thread sleeps until a TAP has packets, a packet is due, or an order comes; each order is answered. A lane is one
//! direction of a target: from its TAP through its line and back to the TAP.

mod lane;

use std::{
    collections::BTreeMap,
    io,
    os::fd::OwnedFd,
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
    time::Duration,
};

use sandwire_api::impairment::LineReport;
use sandwire_datapath::divert::Diversion;
use sandwire_engine::{
    Engine, Graph, PoolLimits, Time,
    io::{Waiter, Waker, wait::WaitError},
};
use sandwire_impair::{
    app::{Direction, Line},
    compile::Compiled,
};
use sandwire_kernel_net::{tc::Hook, thread::answer_promptly};

use self::lane::{Lane, Phase};
use crate::{
    control::Cleared,
    diversion::DivertedTap,
    error::{Error, chain},
};

/// How often lanes are looked at whose packets are let go.
const LOOK: Duration = Duration::from_millis(1);
/// How soon an engine that the system lets not wait tries again. Meanwhile packets wait in the TAPs.
const RETRY: Duration = Duration::from_millis(10);

/// The number of every target among random streams: the same seed gives the same losses whichever interface is
/// impaired, and when.
const LINK: u64 = 0;

/// Number of a target among those of the process, never used again.
pub(crate) type Id = u64;

/// Both directions of a target.
pub(crate) struct Lanes {
    pub(crate) id: Id,
    pub(crate) diversion: Arc<Diversion>,
    pub(crate) compiled: Compiled,
    pub(crate) ways: [LaneWay; 2],
}

/// One direction.
pub(crate) struct LaneWay {
    pub(crate) direction: Direction,
    pub(crate) hook: Hook,
    pub(crate) tap: DivertedTap,
}

/// What an engine says of a direction.
#[derive(Clone, Debug, Default)]
pub(crate) struct LaneReport {
    /// Packets that came from the TAP and could not be used.
    pub(crate) unread: u64,
    /// Packets that were longer than the engine's frames.
    pub(crate) too_long: u64,
    /// Packets that the kernel didn't take back.
    pub(crate) refused: u64,
    pub(crate) line: LineReport,
}

type Answer<T> = mpsc::Sender<T>;

enum Order {
    Add(Box<Lanes>, Answer<Result<(), String>>),
    Change(Id, Box<Compiled>, Answer<Result<(), String>>),
    /// Answered when all packets have gone and the diversion lets packets pass.
    Drain(Id, bool, Answer<Cleared>),
    /// Answered with its TAPs.
    Remove(Id, Answer<Vec<OwnedFd>>),
    Report(Vec<Id>, Answer<BTreeMap<Id, [LaneReport; 2]>>),
    End,
    #[cfg(test)]
    Configure(Answer<Result<(), String>>),
    #[cfg(test)]
    Panic,
}

/// The handle of an engine's thread.
#[derive(Debug)]
pub(crate) struct Worker {
    orders: mpsc::Sender<Order>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts the thread.
    pub(crate) fn start(number: usize, limits: PoolLimits) -> io::Result<Self> {
        let (orders, received) = mpsc::channel();
        let (ready, started) = mpsc::channel();
        let thread = thread::Builder::new()
            .name(format!("engine-{number}"))
            .spawn(move || match Running::new(limits, received) {
                Ok(mut running) => {
                    let _ = ready.send(Ok(running.waiter.waker()));
                    running.run();
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                }
            })?;
        let gone = |_| io::Error::other("its thread ended at once");
        let waker = started.recv().map_err(gone)??;
        Ok(Self {
            orders,
            waker,
            thread: Some(thread),
        })
    }

    /// Whether the thread is gone, though nobody told it to end: it has panicked.
    pub(crate) fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Has the engine configured anew, as another target would.
    #[cfg(test)]
    pub(crate) fn configure(&self) -> Result<Result<(), String>, Error> {
        self.ask(Order::Configure)
    }

    /// Has the thread panic.
    #[cfg(test)]
    pub(crate) fn panic(&self) {
        let _ = self.orders.send(Order::Panic);
        self.waker.wake();
        while !self.has_ended() {
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Begins to carry a target's packets.
    pub(crate) fn add(&self, lanes: Lanes) -> Result<Result<(), String>, Error> {
        self.ask(|answer| Order::Add(Box::new(lanes), answer))
    }

    /// Changes what happens to them.
    pub(crate) fn change(&self, id: Id, compiled: &Compiled) -> Result<Result<(), String>, Error> {
        let compiled = Box::new(compiled.clone());
        self.ask(|answer| Order::Change(id, compiled, answer))
    }

    /// Lets packets go that are under way. What comes out of the receiver, when all have gone, is the account.
    pub(crate) fn drain(&self, id: Id, flush: bool) -> Result<mpsc::Receiver<Cleared>, Error> {
        self.order(|answer| Order::Drain(id, flush, answer))
    }

    /// Forgets a target. Its TAPs are left to the caller to close: the kernel takes some 20 ms for each, for which the packets of all
    /// targets would wait.
    pub(crate) fn remove(&self, id: Id) -> Result<Vec<OwnedFd>, Error> {
        self.ask(|answer| Order::Remove(id, answer))
    }

    /// What each of these targets has done, by ingress and egress of its interface. Those that it doesn't have are left out.
    pub(crate) fn report(&self, ids: Vec<Id>) -> Result<BTreeMap<Id, [LaneReport; 2]>, Error> {
        self.ask(|answer| Order::Report(ids, answer))
    }

    fn ask<T>(&self, order: impl FnOnce(Answer<T>) -> Order) -> Result<T, Error> {
        let answer = self.order(order)?;
        answer.recv().map_err(|_| Error::EngineGone)
    }

    fn order<T>(&self, order: impl FnOnce(Answer<T>) -> Order) -> Result<mpsc::Receiver<T>, Error> {
        let (sender, receiver) = mpsc::channel();
        let sent = self.orders.send(order(sender));
        sent.map_err(|_| Error::EngineGone)?;
        self.waker.wake();
        Ok(receiver)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.orders.send(Order::End);
        self.waker.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("an engine's thread panicked");
        }
    }
}

/// What the thread has.
struct Running {
    orders: mpsc::Receiver<Order>,
    waiter: Waiter,
    engine: Engine,
    graph: Graph,
    targets: BTreeMap<Id, Target>,
}

struct Target {
    lanes: [Lane; 2],
    cleared: Option<(Cleared, Vec<Answer<Cleared>>)>,
}

impl Running {
    fn new(limits: PoolLimits, orders: mpsc::Receiver<Order>) -> io::Result<Self> {
        Ok(Self {
            orders,
            waiter: Waiter::new().map_err(io::Error::other)?,
            engine: Engine::with_limits(limits).map_err(io::Error::other)?,
            graph: Graph::new(),
            targets: BTreeMap::new(),
        })
    }

    fn run(&mut self) {
        // A packet that is due must not wait for the end of somebody else's slice.
        if let Err(error) = answer_promptly() {
            tracing::debug!(%error, "the engine is scheduled as everybody");
        }
        let mut is_stuck = false;
        loop {
            while let Ok(order) = self.orders.try_recv() {
                if matches!(order, Order::End) {
                    return;
                }
                self.obey(order);
            }
            match self.carry() {
                Ok(()) => is_stuck = false,
                Err(error) => {
                    if !is_stuck {
                        tracing::error!(%error, "the engine can't wait for packets, and carries none until it can");
                    }
                    is_stuck = true;
                    thread::sleep(RETRY);
                }
            }
        }
    }

    /// Carries packets until an order comes or lanes are to be looked at, which they also are after every breath.
    fn carry(&mut self) -> Result<(), WaitError> {
        let until = self.is_draining().then(|| self.now() + LOOK);
        let targets = &mut self.targets;
        let look = |engine: &Engine| {
            if until.is_some() {
                look_at_draining(targets, engine);
            }
            false
        };
        self.waiter.run(&mut self.engine, until, look).map(drop)
    }

    fn now(&self) -> Time {
        self.waiter.clock().now()
    }

    fn is_draining(&self) -> bool {
        self.targets.values().any(|target| target.cleared.is_some())
    }

    fn obey(&mut self, order: Order) {
        // Who doesn't wait for the answer any more has gone.
        match order {
            Order::Add(lanes, answer) => drop(answer.send(self.add(*lanes))),
            Order::Change(id, compiled, answer) => {
                drop(answer.send(self.change(id, &compiled)));
            }
            Order::Drain(id, flush, answer) => self.drain(id, flush, answer),
            Order::Remove(id, answer) => drop(answer.send(self.remove(id))),
            Order::Report(ids, answer) => drop(answer.send(self.report(&ids))),
            Order::End => {}
            #[cfg(test)]
            Order::Configure(answer) => drop(answer.send(self.follow(self.graph.clone()))),
            #[cfg(test)]
            Order::Panic => panic!("a test says so"),
        }
    }

    fn add(&mut self, lanes: Lanes) -> Result<(), String> {
        let Lanes {
            id,
            diversion,
            compiled,
            ways,
        } = lanes;
        let (egress, ingress) = Line::pair_of(&compiled, LINK);
        let line_of = |direction| match direction {
            Direction::Egress => egress.clone().sharing(),
            Direction::Ingress => ingress.clone().sharing(),
        };
        let mut graph = self.graph.clone();
        let lanes = ways.map(|way| {
            let lane = Lane::new(id, &way, line_of(way.direction), diversion.clone());
            let added = lane.add(&mut graph, way.tap);
            added.map(|()| lane).map_err(|error| error.to_string())
        });
        let [one, other] = lanes;
        let (one, other) = (one?, other?);
        one.answer_by(&mut graph, &other)
            .and_then(|()| other.answer_by(&mut graph, &one))
            .map_err(|error| error.to_string())?;
        self.follow(graph)?;
        let target = Target {
            lanes: [one, other],
            cleared: None,
        };
        self.targets.insert(id, target);
        Ok(())
    }

    /// Has the engine run another graph, if it can.
    fn follow(&mut self, graph: Graph) -> Result<(), String> {
        let configured = self.engine.configure(&graph);
        configured.map_err(|error| chain(&error))?;
        self.graph = graph;
        Ok(())
    }

    fn change(&mut self, id: Id, compiled: &Compiled) -> Result<(), String> {
        let Some(target) = self.targets.get_mut(&id) else {
            return Err("the engine doesn't have it".to_owned());
        };
        for lane in &mut target.lanes {
            let config = lane.config().changed_to(compiled);
            let changed = lane.change(&mut self.graph, &mut self.engine, config);
            changed.map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Takes the rules away, and lets go or drops what is inside.
    fn drain(&mut self, id: Id, flush: bool, answer: Answer<Cleared>) {
        // Without rules there is nothing that could be refused.
        if let Err(reason) = self.change(id, &Compiled::default()) {
            tracing::error!(reason, "rules can't be taken away");
        }
        let Some(target) = self.targets.get_mut(&id) else {
            let _ = answer.send(Cleared::default());
            return;
        };
        let is_counted = target.cleared.is_some();
        let (cleared, answers) = target.cleared.get_or_insert_default();
        cleared.was_impaired = true;
        for lane in &mut target.lanes {
            let inside = lane.drain(&mut self.engine, flush);
            if flush {
                cleared.released = cleared.released.saturating_sub(inside);
                cleared.flushed += inside;
            } else if !is_counted {
                cleared.released += inside;
            }
        }
        answers.push(answer);
    }

    /// Its TAPs, which aren't read any more.
    fn remove(&mut self, id: Id) -> Vec<OwnedFd> {
        let Some(mut target) = self.targets.remove(&id) else {
            return Vec::new();
        };
        // Who still waits for its last packets is told that they were dropped.
        if let Some((mut cleared, answers)) = target.cleared.take() {
            let lanes = target.lanes.iter_mut();
            let inside: u64 = lanes.map(|lane| lane.drain(&mut self.engine, true)).sum();
            cleared.released = cleared.released.saturating_sub(inside);
            cleared.flushed += inside;
            for answer in answers {
                let _ = answer.send(cleared);
            }
        }
        let mut taps = Vec::new();
        for lane in &target.lanes {
            taps.extend(lane.tap(&self.engine));
            lane.remove(&mut self.graph);
        }
        if let Err(error) = self.engine.configure(&self.graph) {
            tracing::error!(%error, "the engine can't forget a target");
        }
        taps
    }

    fn report(&self, ids: &[Id]) -> BTreeMap<Id, [LaneReport; 2]> {
        let now = self.now();
        let targets = ids.iter();
        targets
            .filter_map(|id| Some((id, self.targets.get(id)?)))
            .map(|(id, target)| {
                let lanes = &target.lanes;
                let report = |lane: usize| lanes[lane].report(&self.engine, now);
                (*id, [report(0), report(1)])
            })
            .collect()
    }
}

/// Goes on with lanes whose packets are let go; answers where all have gone.
fn look_at_draining(targets: &mut BTreeMap<Id, Target>, engine: &Engine) {
    for target in targets.values_mut() {
        if target.cleared.is_none() {
            continue;
        }
        let mut all = true;
        for lane in &mut target.lanes {
            lane.advance(engine, engine.now());
            all &= lane.phase == Phase::Passing;
        }
        if all && let Some((cleared, answers)) = target.cleared.take() {
            for answer in answers {
                let _ = answer.send(cleared);
            }
        }
    }
}

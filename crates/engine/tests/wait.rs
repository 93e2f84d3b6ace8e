//! What ends a wait, and when.

use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use rustix::event::{EventfdFlags, eventfd};
use rustix::pipe::pipe;
use sandwire_engine::apps::{Sink, Source};
use sandwire_engine::io::{Stop, Waiter};
use sandwire_engine::{
    App, BuildError, Clock, Config, Engine, Figure, Graph, PortList, Ports, Readiness, Runner,
    Time, Wake, Watch,
};

/// How long something may take that has to happen.
const PATIENCE: Duration = Duration::from_secs(120);
/// How often something is tried that a busy machine can spoil.
const ATTEMPTS: u32 = 200;

/// An app that wants to be called at certain times, and notes when it was.
#[derive(Debug, Clone, PartialEq)]
struct Alarm(Vec<Time>);

struct AlarmApp {
    times: Vec<Time>,
    late_max: Duration,
    early: u64,
    calls: u64,
}

impl Config for Alarm {
    type App = AlarmApp;

    fn inputs(&self) -> PortList {
        PortList::none()
    }

    fn outputs(&self) -> PortList {
        PortList::none()
    }

    fn build(&self) -> Result<AlarmApp, BuildError> {
        Ok(AlarmApp {
            times: self.0.iter().rev().copied().collect(),
            late_max: Duration::ZERO,
            early: 0,
            calls: 0,
        })
    }
}

impl App for AlarmApp {
    fn pull(&mut self, now: Time, _ports: &mut Ports<'_>) {
        self.calls += 1;
        match self.times.pop_if(|time| *time <= now) {
            Some(time) => self.late_max = self.late_max.max(now.since(time)),
            None => self.early += 1,
        }
    }

    fn wake(&self) -> Wake {
        self.times
            .last()
            .map_or(Wake::default(), |time| Wake::at(*time))
    }

    fn report(&self) -> Vec<Figure> {
        let late = u64::try_from(self.late_max.as_nanos()).unwrap_or(u64::MAX);
        vec![
            Figure::new("left", self.times.len() as u64),
            Figure::new("late_max_ns", late),
            Figure::new("calls", self.calls),
            Figure::new("early", self.early),
        ]
    }
}

/// An app that reads an eventfd, and counts how often.
#[derive(Debug, Clone)]
struct Bell {
    descriptor: Rc<OwnedFd>,
    /// As if a look were no system call.
    looks_for_free: bool,
}

struct BellApp {
    descriptor: Rc<OwnedFd>,
    readiness: Readiness,
    reads: u64,
    rings: u64,
}

impl PartialEq for Bell {
    fn eq(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.descriptor, &other.descriptor)
    }
}

impl Bell {
    fn new() -> Result<Self> {
        Ok(Self {
            descriptor: Rc::new(eventfd(0, EventfdFlags::NONBLOCK)?),
            looks_for_free: false,
        })
    }
}

impl Config for Bell {
    type App = BellApp;

    fn inputs(&self) -> PortList {
        PortList::none()
    }

    fn outputs(&self) -> PortList {
        PortList::none()
    }

    fn build(&self) -> Result<BellApp, BuildError> {
        let readiness = if self.looks_for_free {
            Readiness::of_shared_memory()
        } else {
            Readiness::new()
        };
        Ok(BellApp {
            descriptor: Rc::clone(&self.descriptor),
            readiness,
            reads: 0,
            rings: 0,
        })
    }
}

impl App for BellApp {
    fn pull(&mut self, _now: Time, _ports: &mut Ports<'_>) {
        if !self.readiness.is_ready() {
            return;
        }
        self.reads += 1;
        match rustix::io::read(&*self.descriptor, &mut [0; 8]) {
            Ok(_) => self.rings += 1,
            Err(_) => self.readiness.drained(),
        }
    }

    fn wake(&self) -> Wake {
        self.readiness.wake()
    }

    fn watch(&self) -> Option<Watch<'_>> {
        Some(Watch {
            descriptor: self.descriptor.as_fd(),
            readiness: &self.readiness,
        })
    }

    fn report(&self) -> Vec<Figure> {
        vec![
            Figure::new("reads", self.reads),
            Figure::new("rings", self.rings),
        ]
    }
}

fn engine_of(name: &str, app: impl Config) -> Result<Engine> {
    let mut graph = Graph::new();
    graph.app(name, app)?;
    let mut engine = Engine::new();
    engine.configure(&graph)?;
    Ok(engine)
}

fn ring(bell: &OwnedFd) -> Result<()> {
    rustix::io::write(bell, &1_u64.to_ne_bytes())?;
    Ok(())
}

#[test]
fn deadlines_are_met_and_nothing_is_called_before() -> Result<()> {
    for polling in [false, true] {
        let mut late = Vec::new();
        let on_time = (0..ATTEMPTS).any(|_| {
            late.push(latest_of_twenty(polling).unwrap());
            late.last() < Some(&Duration::from_millis(50))
        });
        // Other tests share the machine; the waiter's own error is measured by `sandwire bench`.
        ensure!(on_time, "late by {late:?}, polling: {polling}");
    }
    Ok(())
}

/// How late the latest of twenty deadlines was met.
fn latest_of_twenty(polling: bool) -> Result<Duration> {
    let mut waiter = Waiter::new()?.polling(polling);
    let start = waiter.clock().now() + Duration::from_millis(5);
    let times = (0..20).map(|number| start + number * Duration::from_micros(1_234));
    let mut engine = engine_of("alarm", Alarm(times.collect()))?;
    let stop = waiter.run(&mut engine, Some(start + PATIENCE), |engine| {
        engine.figure("alarm", "left") == Some(0)
    })?;
    assert_eq!(stop, Stop::Done);
    // One when it began, unless that was so late that a deadline had come; one for each deadline.
    let early = engine.figure("alarm", "early").unwrap_or(u64::MAX);
    ensure!(early <= 1, "{early} calls before there was anything to do");
    assert_eq!(engine.figure("alarm", "calls"), Some(20 + early));
    let late = engine.figure("alarm", "late_max_ns").unwrap_or(u64::MAX);
    Ok(Duration::from_nanos(late))
}

#[test]
fn the_end_of_a_run_is_a_deadline_too() -> Result<()> {
    let mut waiter = Waiter::new()?;
    let mut engine = engine_of("bell", Bell::new()?)?;
    let mut seen = Vec::new();
    for _ in 0..ATTEMPTS {
        let before = waiter.clock().now();
        let load = waiter.run_for(&mut engine, Duration::from_millis(20))?;
        let took = waiter.clock().now().since(before);
        ensure!(took >= Duration::from_millis(20), "only {took:?}");
        // One when it began, one at the end; just that one where beginning took the whole time.
        ensure!(load.breaths <= 2, "{} breaths", load.breaths);
        if load.breaths == 2 && load.sleep > Duration::from_millis(10) {
            return Ok(());
        }
        seen.push(load);
    }
    anyhow::bail!("it never slept until the end: {seen:?}")
}

#[test]
fn another_thread_ends_a_wait_without_end() -> Result<()> {
    for polling in [false, true] {
        let mut waiter = Waiter::new()?.polling(polling);
        let mut engine = engine_of("bell", Bell::new()?)?;
        let waker = waiter.waker();
        let other = thread::spawn(move || {
            waker.wake();
            waker.wake();
        });
        assert_eq!(waiter.run(&mut engine, None, |_| false)?, Stop::Woken);
        other.join().unwrap();
        let soon = waiter.clock().now() + Duration::from_millis(1);
        let _ = waiter.run(&mut engine, Some(soon), |_| false)?;
        // However many wakes there were, none is left.
        let soon = waiter.clock().now() + Duration::from_millis(1);
        assert_eq!(waiter.run(&mut engine, Some(soon), |_| false)?, Stop::Due);
    }
    Ok(())
}

#[test]
fn a_descriptor_of_the_caller_ends_a_wait_until_it_is_read_or_given_up() -> Result<()> {
    let mut waiter = Waiter::new()?;
    let mut engine = engine_of("bell", Bell::new()?)?;
    let (reader, writer) = pipe()?;
    let (quiet, _open) = pipe()?;
    assert_eq!(waiter.watch(&quiet)?, 0);
    let number = waiter.watch(&reader)?;
    rustix::io::write(&writer, b"x")?;
    for _ in 0..2 {
        assert_eq!(
            waiter.run(&mut engine, None, |_| false)?,
            Stop::Descriptor(number)
        );
    }
    // A new graph doesn't lose it.
    let mut graph = Graph::new();
    graph.app("other", Bell::new()?)?;
    engine.configure(&graph)?;
    assert_eq!(
        waiter.run(&mut engine, None, |_| false)?,
        Stop::Descriptor(number)
    );
    waiter.unwatch(number);
    let soon = waiter.clock().now() + Duration::from_millis(5);
    assert_eq!(waiter.run(&mut engine, Some(soon), |_| false)?, Stop::Due);
    assert_eq!(waiter.watch(&reader)?, number, "numbers are used again");
    Ok(())
}

#[test]
fn where_nothing_can_happen_the_run_ends() -> Result<()> {
    let mut waiter = Waiter::new()?;
    let mut graph = Graph::new();
    graph.app("source", Source::sizes(&[60]).limit(1000))?;
    graph.app("sink", Sink)?;
    graph.link("source.output -> sink.input")?;
    let mut engine = Engine::new();
    engine.configure(&graph)?;
    assert_eq!(waiter.run(&mut engine, None, |_| false)?, Stop::Idle);
    assert_eq!(engine.figure("sink", "packets"), Some(1000));
    Ok(())
}

#[test]
fn only_what_is_ready_is_read() -> Result<()> {
    const BELLS: usize = 400;
    let mut graph = Graph::new();
    let bells: Vec<Bell> = (0..BELLS).map(|_| Bell::new()).collect::<Result<_>>()?;
    for (number, bell) in bells.iter().enumerate() {
        graph.app(&format!("bell{number}"), bell.clone())?;
    }
    let mut engine = Engine::new();
    engine.configure(&graph)?;
    let mut waiter = Waiter::new()?;
    waiter.run_for(&mut engine, Duration::from_millis(1))?;
    let reads = |engine: &Engine| -> u64 {
        let figures = (0..BELLS).map(|number| engine.figure(&format!("bell{number}"), "reads"));
        figures.map(Option::unwrap_or_default).sum()
    };
    let before = reads(&engine);
    for round in 1..=100 {
        ring(&bells[7].descriptor)?;
        let end = waiter.clock().now() + PATIENCE;
        let stop = waiter.run(&mut engine, Some(end), |engine| {
            engine.figure("bell7", "rings") == Some(round)
        })?;
        assert_eq!(stop, Stop::Done);
    }
    waiter.run_for(&mut engine, Duration::from_millis(1))?;
    let made = reads(&engine) - before;
    ensure!(made <= 200, "{made} reads for 100 rings");
    Ok(())
}

#[test]
fn an_app_that_is_not_watched_any_more_looks_for_itself() -> Result<()> {
    let bell = Bell::new()?;
    let mut engine = engine_of("bell", bell.clone())?;
    let clock = Clock::new();
    let mut waiter = Waiter::with_clock(clock)?;
    waiter.run_for(&mut engine, Duration::from_millis(1))?;
    drop(waiter);
    ring(&bell.descriptor)?;
    let mut rings = 0;
    Runner::with_clock(clock).run_until(&mut engine, |engine| {
        rings += 1;
        engine.figure("bell", "rings") == Some(1) || rings > 1000
    });
    assert_eq!(engine.figure("bell", "rings"), Some(1));
    Ok(())
}

#[test]
fn who_polls_leaves_apps_of_shared_memory_to_look_and_still_hears_others() -> Result<()> {
    for polling in [false, true] {
        let bell = Bell {
            looks_for_free: true,
            ..Bell::new()?
        };
        let mut engine = engine_of("bell", bell.clone())?;
        let mut waiter = Waiter::new()?.polling(polling);
        if polling {
            let looks = |engine: &Engine| engine.figure("bell", "reads") >= Some(10);
            assert_eq!(waiter.run(&mut engine, None, looks)?, Stop::Done);
        } else {
            waiter.run_for(&mut engine, Duration::from_millis(5))?;
            assert_eq!(engine.figure("bell", "reads"), Some(1));
        }
        ring(&bell.descriptor)?;
        let rang = |engine: &Engine| engine.figure("bell", "rings") == Some(1);
        assert_eq!(waiter.run(&mut engine, None, rang)?, Stop::Done);
        let other = eventfd(0, EventfdFlags::NONBLOCK)?;
        let number = waiter.watch(&other)?;
        ring(&other)?;
        let stop = waiter.run(&mut engine, None, |_| false)?;
        assert_eq!(stop, Stop::Descriptor(number));
        waiter.unwatch(number);
        waiter.waker().wake();
        let stop = waiter.run(&mut engine, None, |_| false)?;
        assert_eq!(stop, Stop::Woken);
    }
    Ok(())
}

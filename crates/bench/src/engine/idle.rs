//! What a breath costs while hundreds of impaired targets are idle: each has two lanes of an edge, a line and a join, as
//! the service for bad networks lays them. The edges have descriptors that are watched and never ready.

use std::{os::fd::AsFd, os::fd::OwnedFd, time::Instant};

use anyhow::{Context, Result, ensure};
use rustix::event::{EventfdFlags, eventfd};
use sandwire_engine::{
    App, BuildError, Config, Engine, Graph, PortList, Ports, Readiness, Time, Wake, Watch,
    apps::Join, io::Waiter,
};

use crate::rig::impaired;

/// Idle targets.
pub(super) const TARGETS: u32 = 300;

/// Nanoseconds per breath of an engine in which nothing happens, over so many.
pub(super) fn nanos_per_breath(breaths: u32) -> Result<f64> {
    let mut engine = Engine::new();
    engine.configure(&graph(TARGETS)?)?;
    let mut waiter = Waiter::new()?;
    // The descriptors are watched from the first breath on; a few more, and all there was to do is done.
    for _ in 0..4 {
        waiter.run(&mut engine, Some(Time::START), |_| false)?;
    }
    let now = engine.now();
    let start = Instant::now();
    let mut wake = Wake::polling();
    for _ in 0..breaths {
        let breath = engine.breathe(now);
        ensure!(breath.moved == 0, "a packet came from nowhere");
        wake = breath.wake;
    }
    let nanos = start.elapsed().as_secs_f64() * 1e9 / f64::from(breaths);
    ensure!(wake == Wake::default(), "idle targets ask for {wake:?}");
    Ok(nanos)
}

fn graph(targets: u32) -> Result<Graph> {
    let mut graph = Graph::new();
    for target in 0..targets {
        for lane in ["in", "out"] {
            let name = |app: &str| format!("{target}-{lane}-{app}");
            let (edge, line, join) = (name("edge"), name("line"), name("join"));
            graph.app(&edge, Edge)?;
            graph.app(&line, impaired("delay 50ms loss 1%")?)?;
            graph.app(&join, Join)?;
            graph.connect((&edge, "output"), (&line, "input"))?;
            graph.connect((&line, "output"), (&join, "line"))?;
            graph.connect((&join, "output"), (&edge, "input"))?;
        }
        for (lane, other) in [("in", "out"), ("out", "in")] {
            let line = format!("{target}-{lane}-line");
            let join = format!("{target}-{other}-join");
            graph.connect((&line, "back"), (&join, "answers"))?;
        }
    }
    Ok(graph)
}

/// An edge app whose outside is silent.
#[derive(Debug, PartialEq)]
struct Edge;

struct EdgeApp {
    descriptor: OwnedFd,
    readiness: Readiness,
}

impl Config for Edge {
    type App = EdgeApp;

    fn inputs(&self) -> PortList {
        PortList::named(["input"])
    }

    fn outputs(&self) -> PortList {
        PortList::named(["output"])
    }

    fn is_edge(&self) -> bool {
        true
    }

    fn build(&self) -> Result<EdgeApp, BuildError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let descriptor = eventfd(0, flags).context("cannot make an eventfd")?;
        Ok(EdgeApp {
            descriptor,
            readiness: Readiness::new(),
        })
    }
}

impl App for EdgeApp {
    fn pull(&mut self, _now: Time, _ports: &mut Ports<'_>) {
        self.readiness.drained();
    }

    fn push(&mut self, _now: Time, ports: &mut Ports<'_>) {
        ports.discard(0);
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_targets_are_idle() {
        assert!(nanos_per_breath(10).unwrap() > 0.0);
    }
}

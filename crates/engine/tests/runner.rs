//! The runner's loop by the real clock: when it breathes, and that it doesn't in between. Bounds hold on a busy machine too.

use std::time::Duration;

use anyhow::Result;
use sandwire_engine::apps::{Sink, Source};
use sandwire_engine::{
    App, BuildError, Config, Engine, Figure, Graph, PortList, Ports, Runner, Time, Wake,
};

/// Counts breaths, and wants to be called as it was told.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Idle {
    wake: Wake,
}

struct IdleApp {
    wake: Wake,
    breaths: u64,
    before: u64,
}

impl Config for Idle {
    type App = IdleApp;

    fn inputs(&self) -> PortList {
        PortList::none()
    }

    fn outputs(&self) -> PortList {
        PortList::none()
    }

    fn build(&self) -> Result<IdleApp, BuildError> {
        Ok(IdleApp {
            wake: self.wake,
            breaths: 0,
            before: 0,
        })
    }
}

impl App for IdleApp {
    fn pull(&mut self, now: Time, _ports: &mut Ports<'_>) {
        self.breaths += 1;
        if self.wake.at.is_some_and(|at| now < at) {
            self.before += 1;
        } else {
            self.wake.at = None;
        }
    }

    fn wake(&self) -> Wake {
        self.wake
    }

    fn report(&self) -> Vec<Figure> {
        vec![
            Figure::new("breaths", self.breaths),
            Figure::new("before", self.before),
        ]
    }
}

fn idle(wake: Wake) -> Result<Engine> {
    let mut graph = Graph::new();
    graph.app("idle", Idle { wake })?;
    let mut engine = Engine::new();
    engine.configure(&graph)?;
    Ok(engine)
}

#[test]
fn until_a_deadline_it_sleeps_and_then_it_is_there() -> Result<()> {
    let deadline = Time::START + Duration::from_millis(30);
    let mut engine = idle(Wake::at(deadline))?;
    Runner::new().run_until(&mut engine, |_| false);
    // It ended by itself after the deadline, since nothing can happen then.
    assert!(engine.now() >= deadline);
    assert_eq!(engine.figure("idle", "breaths"), Some(2));
    assert_eq!(engine.figure("idle", "before"), Some(1));
    Ok(())
}

#[test]
fn an_app_that_looks_outside_is_asked_often_but_not_all_the_time() -> Result<()> {
    let mut engine = idle(Wake::polling())?;
    let load = Runner::new().run_for(&mut engine, Duration::from_millis(50));
    // A hundred pauses up to 5.05 ms, then one each 0.1 ms.
    assert!(load.breaths <= 100 + 450 + 2, "{}", load.breaths);
    assert!(load.breaths >= 3, "{}", load.breaths);
    assert!(load.sleep <= Duration::from_micros(100), "{:?}", load.sleep);
    assert!(load.time >= Duration::from_millis(45), "{:?}", load.time);
    Ok(())
}

#[test]
fn while_packets_move_it_never_sleeps() -> Result<()> {
    let mut graph = Graph::new();
    graph
        .app("source", Source::sizes(&[60]))?
        .app("sink", Sink)?;
    graph.link("source.output -> sink.input")?;
    graph.app(
        "idle",
        Idle {
            wake: Wake::polling(),
        },
    )?;
    let mut engine = Engine::new();
    engine.configure(&graph)?;
    let load = Runner::new().run_for(&mut engine, Duration::from_millis(20));
    assert_eq!(load.sleep, Duration::ZERO);
    assert_eq!(load.frees, load.breaths * 102, "each breath moved a batch");
    Ok(())
}

#[test]
fn a_time_without_packets_or_deadlines_is_slept_through() -> Result<()> {
    let mut engine = idle(Wake::default())?;
    let load = Runner::new().run_for(&mut engine, Duration::from_millis(20));
    assert_eq!(load.breaths, 2, "one at each end");
    Ok(())
}

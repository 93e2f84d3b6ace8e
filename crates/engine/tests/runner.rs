//! The runner's loop by the real clock: when it breathes, and that it doesn't in between. Bounds hold on a busy machine too.

use std::time::Duration;

use anyhow::{Result, bail};
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

/// Tries until a busy machine has let it happen once.
fn at_last(what: &str, mut happens: impl FnMut() -> Result<bool>) -> Result<()> {
    for _ in 0..200 {
        if happens()? {
            return Ok(());
        }
    }
    bail!("{what} in none of 200 attempts")
}

#[test]
fn until_a_deadline_it_sleeps_and_then_it_is_there() -> Result<()> {
    at_last("it began before the deadline", || {
        let deadline = Time::START + Duration::from_millis(30);
        let mut engine = idle(Wake::at(deadline))?;
        Runner::new().run_until(&mut engine, |_| false);
        // It ended by itself after the deadline, since nothing can happen then.
        assert!(engine.now() >= deadline);
        let before = engine.figure("idle", "before").unwrap_or(u64::MAX);
        assert!(before <= 1, "{before} breaths before the deadline");
        assert_eq!(engine.figure("idle", "breaths"), Some(before + 1));
        Ok(before == 1)
    })
}

#[test]
fn an_app_that_looks_outside_is_asked_often_but_not_all_the_time() -> Result<()> {
    at_last("it was asked all the time through", || {
        let mut engine = idle(Wake::polling())?;
        let load = Runner::new().run_for(&mut engine, Duration::from_millis(50));
        // A hundred pauses up to 5.05 ms, then one each 0.1 ms.
        assert!(load.breaths <= 100 + 450 + 2, "{}", load.breaths);
        assert!(load.sleep <= Duration::from_micros(100), "{:?}", load.sleep);
        Ok(load.breaths >= 30 && load.time >= Duration::from_millis(45))
    })
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
    at_last("it began at the begin", || {
        let mut engine = idle(Wake::default())?;
        let load = Runner::new().run_for(&mut engine, Duration::from_millis(20));
        assert!(load.breaths <= 2, "{} breaths", load.breaths);
        Ok(load.breaths == 2)
    })
}

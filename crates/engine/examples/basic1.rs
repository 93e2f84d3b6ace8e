//! How fast the engine is with nothing but packets in memory, on one core, counters on:
//!
//! - `basic1_mpps`: source → tee → two sinks, one real copy, counted as source packets;
//! - `basic1_like_seed_mpps`: the same with a tee that copies twice and frees the original;
//! - `pass_app_ns`: what one more app costs per packet, slope over 1 to 16 apps, for [`Pass`] and for a filter that
//!   looks at each packet.
//!
//! Each is the median of several runs of a fraction of a second, in turn.

#![expect(clippy::print_stdout, reason = "a program that prints its results")]
#![expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
#![expect(clippy::disallowed_methods, reason = "what is measured is time")]

use std::time::Instant;

use sandwire_engine::apps::{Filter, Pass, Sink, Source, Tee};
use sandwire_engine::{App, BuildError, Config, Engine, Graph, PortList, Ports, Time};

fn main() -> anyhow::Result<()> {
    let mut samples = [const { Vec::new() }; 4];
    for _ in 0..RUNS {
        samples[0].push(1e3 / nanos_per_packet(&basic1(Tee)?)?);
        samples[1].push(1e3 / nanos_per_packet(&basic1(CopyingTee)?)?);
        samples[2].push(slope(|_| Ok(Pass))?);
        samples[3].push(slope(|_| Ok(Filter::new(|packet| packet.length() > 0)))?);
    }
    let names = [
        "basic1_mpps",
        "basic1_like_seed_mpps",
        "pass_app_ns",
        "filter_app_ns",
    ];
    for (name, mut samples) in names.into_iter().zip(samples) {
        samples.sort_by(f64::total_cmp);
        let [min, median, max] = [samples[0], samples[RUNS / 2], samples[RUNS - 1]];
        println!("{name} {median:.2} (min {min:.2}, max {max:.2})");
    }
    Ok(())
}

fn basic1(tee: impl Config) -> anyhow::Result<Graph> {
    let mut graph = Graph::new();
    graph.app("source", Source::sizes(&[60]))?.app("tee", tee)?;
    graph.app("sink1", Sink)?.app("sink2", Sink)?;
    graph.link("source.output -> tee.input")?;
    graph.link("tee.output1 -> sink1.input")?;
    graph.link("tee.output2 -> sink2.input")?;
    Ok(graph)
}

/// Nanoseconds that each of 15 more apps adds per packet.
fn slope<C: Config>(config: impl Fn(usize) -> anyhow::Result<C>) -> anyhow::Result<f64> {
    let mut times = [0.0; 2];
    for (time, apps) in times.iter_mut().zip([1, 16]) {
        let mut graph = Graph::new();
        graph
            .app("source", Source::sizes(&[60]))?
            .app("sink", Sink)?;
        let mut from = "source".to_owned();
        for index in 0..apps {
            let name = format!("app{index:02}");
            graph.app(&name, config(index)?)?;
            graph.connect((&from, "output"), (&name, "input"))?;
            from = name;
        }
        graph.connect((&from, "output"), ("sink", "input"))?;
        *time = nanos_per_packet(&graph)?;
    }
    Ok((times[1] - times[0]) / 15.0)
}

/// Runs the graph for a fixed number of breaths, and divides the time by what the source sent.
fn nanos_per_packet(graph: &Graph) -> anyhow::Result<f64> {
    let mut engine = Engine::new();
    engine.configure(graph)?;
    breathe(&mut engine, WARM_UP_BREATHS);
    let before = engine.figure("source", "packets").unwrap_or(0);
    let start = Instant::now();
    breathe(&mut engine, BREATHS);
    let nanos = start.elapsed().as_nanos() as f64;
    let packets = engine.figure("source", "packets").unwrap_or(0) - before;
    anyhow::ensure!(packets > 0, "the source sent nothing");
    Ok(nanos / packets as f64)
}

fn breathe(engine: &mut Engine, breaths: u32) {
    for _ in 0..breaths {
        engine.breathe(Time::START);
    }
}

/// A tee that keeps nothing: every output gets a copy.
#[derive(Debug, PartialEq)]
struct CopyingTee;

impl Config for CopyingTee {
    type App = Self;

    fn inputs(&self) -> PortList {
        PortList::named(["input"])
    }

    fn outputs(&self) -> PortList {
        PortList::Any
    }

    fn build(&self) -> Result<Self, BuildError> {
        Ok(Self)
    }
}

impl App for CopyingTee {
    fn push(&mut self, _now: Time, ports: &mut Ports<'_>) {
        for output in 0..ports.outputs() {
            ports.copy(0, output);
        }
        ports.discard(0);
    }
}

const RUNS: usize = 9;
const WARM_UP_BREATHS: u32 = 2_000;
const BREATHS: u32 = 40_000;

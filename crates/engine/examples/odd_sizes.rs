//! Drops packets of odd size on their way from a source to a sink.

#![expect(clippy::print_stdout, reason = "an example that prints its reports")]

use std::time::Duration;

use sandwire_engine::apps::{Filter, Sink, Source};
use sandwire_engine::{Engine, Graph, Runner};

fn main() -> anyhow::Result<()> {
    let mut graph = Graph::new();
    graph.app("source", Source::sizes(&[60, 61, 1514, 333]))?;
    graph.app("clumsy", Filter::new(|packet| packet.length() % 2 == 0))?;
    graph.app("sink", Sink)?;
    graph.link("source.output -> clumsy.input")?;
    graph.link("clumsy.output -> sink.input")?;

    let mut engine = Engine::new();
    engine.configure(&graph)?;
    let mut runner = Runner::new();
    for _ in 0..3 {
        println!("{}", runner.run_for(&mut engine, Duration::from_secs(1)));
        println!("{}", engine.report_links());
    }
    Ok(())
}

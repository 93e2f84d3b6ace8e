//! Source, tee and two sinks: every packet is copied once and freed twice.

#![expect(clippy::print_stdout, reason = "an example that prints its reports")]

use std::time::Duration;

use sandwire_engine::apps::{Sink, Source, Tee};
use sandwire_engine::{Engine, Graph, Runner};

fn main() -> anyhow::Result<()> {
    let mut graph = Graph::new();
    graph.app("source", Source::sizes(&[60]))?.app("tee", Tee)?;
    graph.app("sink1", Sink)?.app("sink2", Sink)?;
    graph.link("source.output -> tee.input")?;
    graph.link("tee.output1 -> sink1.input")?;
    graph.link("tee.output2 -> sink2.input")?;

    let mut engine = Engine::new();
    engine.configure(&graph)?;
    let mut runner = Runner::new();
    for _ in 0..3 {
        println!("{}", runner.run_for(&mut engine, Duration::from_secs(1)));
        println!("{}", engine.report_links());
    }
    Ok(())
}

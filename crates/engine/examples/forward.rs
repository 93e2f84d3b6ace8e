//! Forwards between two interfaces, and drops packets of odd size on the way from the first to the second:
//! `forward IF1 IF2 [SECONDS]`, in a namespace of its own for a start.

#![expect(clippy::print_stdout, reason = "an example that prints its reports")]

use std::env;
use std::time::Duration;

use anyhow::Context;
use sandwire_engine::apps::Filter;
use sandwire_engine::io::{Ring, Waiter};
use sandwire_engine::{Engine, Graph};

fn main() -> anyhow::Result<()> {
    let mut arguments = env::args().skip(1);
    let mut next = || arguments.next().context("usage: forward IF1 IF2 [SECONDS]");
    let mut graph = Graph::new();
    graph.app("if1", Ring::interface(&next()?))?;
    graph.app("if2", Ring::interface(&next()?))?;
    graph.app("clumsy", Filter::new(|packet| packet.length() % 2 == 0))?;
    graph.link("if1.output -> clumsy.input")?;
    graph.link("clumsy.output -> if2.input")?;
    graph.link("if2.output -> if1.input")?;

    let mut engine = Engine::new();
    engine.configure(&graph)?;
    let mut waiter = Waiter::new()?;
    let seconds = next().map_or(Ok(u64::MAX), |text| text.parse())?;
    for _ in 0..seconds {
        println!("{}", waiter.run_for(&mut engine, Duration::from_secs(1))?);
        println!("{}", engine.report_links());
    }
    Ok(())
}

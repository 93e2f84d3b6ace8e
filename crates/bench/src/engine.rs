//! The suite `engine`: what the packet engine costs with nothing but packets in memory, and how fast it forwards
//! between two interfaces.
//!
//! All that is compared takes turns within a round. What runs in memory runs on one processor, the last.

mod forward;
mod generator;
mod idle;
mod instructions;
mod memory;
mod round_trip;

use std::{collections::BTreeMap, io::Write};

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::{
    cpu,
    extent::{self, Pace},
    host::HostFacts,
    progress::Step,
    record::Record,
    statistics::slope,
};
use memory::Load;

pub(crate) use instructions::Counted;

/// Case of the chains of apps.
const CHAIN: &str = "chain";
/// Case of an engine whose targets are all idle.
const IDLE: &str = "idle_targets";
/// Numbers of apps in a chain.
const CHAINS: [u32; 5] = [1, 2, 4, 8, 16];

/// Parts of the suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// Packets per second in memory.
    Memory,
    /// Instructions per packet in memory, by valgrind.
    Instructions,
    /// Packets per second between two interfaces.
    Forward,
    /// Round trips through a forwarder.
    RoundTrip,
}

impl extent::Part for Part {
    const QUICK: Pace = Pace {
        rounds: 3,
        milliseconds: 300,
    };
    const FULL: Pace = Pace {
        rounds: 15,
        milliseconds: 1000,
    };
}

/// How much of the suite is run.
pub(crate) type Extent = extent::Extent<Part>;

/// Breaths of each measurement in memory.
fn breaths(extent: &Extent) -> u32 {
    if extent.is_quick() { 20_000 } else { 100_000 }
}

/// Round trips of each measurement.
fn probes(extent: &Extent) -> u32 {
    if extent.is_quick() { 300 } else { 1000 }
}

/// Runs the suite. To be called inside a private host.
pub(crate) fn run(extent: &Extent) -> Result<Record> {
    let settings = BTreeMap::from([
        ("rounds".to_owned(), u64::from(extent.rounds())),
        ("breaths".to_owned(), u64::from(breaths(extent))),
        ("milliseconds".to_owned(), u64::from(extent.milliseconds())),
        ("probes".to_owned(), u64::from(probes(extent))),
        ("idle_targets".to_owned(), u64::from(idle::TARGETS)),
        (
            "batch_packets".to_owned(),
            sandwire_engine::BATCH_PACKETS as u64,
        ),
    ]);
    let mut record = Record::new("engine", HostFacts::read()?, settings);
    cpu::go_first();
    if extent.has(Part::Memory) {
        in_memory(extent, &mut record)?;
    }
    if extent.has(Part::Instructions) {
        instructions::measure(&mut record);
    }
    if extent.has(Part::Forward) {
        forward::measure(extent, &mut record)?;
    }
    if extent.has(Part::RoundTrip) {
        round_trip::measure(extent, &mut record)?;
    }
    add_ratios(&mut record);
    Ok(record)
}

/// In a thread of its own, which alone stays on one processor.
fn in_memory(extent: &Extent, record: &mut Record) -> Result<()> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            cpu::pin(0)?;
            let step = Step::begin("packets in memory", extent.rounds());
            for round in 0..extent.rounds() {
                memory_round(breaths(extent), record)?;
                step.at(round + 1);
            }
            Ok(())
        });
        let outcome = thread.join().ok();
        outcome.context("the thread of a measurement panicked")?
    })
}

fn memory_round(breaths: u32, record: &mut Record) -> Result<()> {
    for load in [Load::Basic1, Load::LikeSeed, Load::CopyFloor] {
        let nanos = load.nanos_per_packet(breaths)?;
        record.add(load.name(), "mpps", "million/s", &[1e3 / nanos]);
    }
    for (name, chain) in [
        ("pass", Load::Passes as fn(u32) -> Load),
        ("filter", Load::Filters),
    ] {
        let mut points = Vec::new();
        for apps in CHAINS {
            // A chain is up to sixteen times slower than the others, and each has fewer breaths for that.
            let nanos = chain(apps).nanos_per_packet(breaths / 2)?;
            points.push((f64::from(apps), nanos));
        }
        if let Some(slope) = slope(&points) {
            record.add(CHAIN, &format!("{name}_app"), "ns", &[slope]);
        }
    }
    let nanos = idle::nanos_per_breath(breaths)?;
    record.add(IDLE, "breath", "ns", &[nanos]);
    Ok(())
}

fn add_ratios(record: &mut Record) {
    let basic1 = (Load::Basic1.name(), "mpps");
    record.add_ratio(
        "basic1_vs_copy_floor",
        basic1,
        (Load::CopyFloor.name(), "mpps"),
    );
    for (name, case, metric) in [
        ("basic1_mpps", Load::Basic1.name(), "mpps"),
        ("basic1_like_seed_mpps", Load::LikeSeed.name(), "mpps"),
        ("pass_app_ns", CHAIN, "pass_app"),
        ("filter_app_ns", CHAIN, "filter_app"),
        ("idle_breath_ns", IDLE, "breath"),
    ] {
        if let Some(median) = record.row(case, metric).map(|row| row.median) {
            record.insert_ratio(name, median);
        }
    }
}

/// What [`instructions`] runs under valgrind; prints how many packets it made.
pub(crate) fn stand_in(counted: &Counted) -> Result<()> {
    let packets = counted.run()?;
    writeln!(std::io::stdout(), "{packets}").context("cannot say how many packets there were")
}

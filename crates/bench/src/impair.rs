//! The suite `impair`: whether impaired packets leave when they should, at the rate they should, and what a link of
//! them takes of memory.
//!
//! Times are taken three ways: by the app behind the line, by the kernel's stamps in captures of both cables, and of
//! a thread that only sleeps, which is what this machine can do. They take turns within a round.

mod capture;
mod delay;
mod memory;
mod metronome;
mod rate;

use std::{collections::BTreeMap, io::Write};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;

use crate::{
    cpu,
    extent::{self, Pace},
    host::HostFacts,
    record::Record,
};

/// Parts of the suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// How late packets leave.
    Delay,
    /// The rate within a tenth of a second.
    Rate,
    /// Memory of a link.
    Memory,
}

impl extent::Part for Part {
    const QUICK: Pace = Pace {
        rounds: 2,
        milliseconds: 700,
    };
    const FULL: Pace = Pace {
        rounds: 7,
        milliseconds: 3000,
    };
}

/// How much of the suite is run.
pub(crate) type Extent = extent::Extent<Part>;

/// Runs the suite. To be called inside a private host.
pub(crate) fn run(extent: &Extent) -> Result<Record> {
    let settings = BTreeMap::from([
        ("rounds".to_owned(), u64::from(extent.rounds())),
        ("milliseconds".to_owned(), u64::from(extent.milliseconds())),
        ("delay_ms".to_owned(), 50),
        ("packets_per_second".to_owned(), 10_000),
        ("window_ms".to_owned(), 100),
    ]);
    let mut record = Record::new("impair", HostFacts::read()?, settings);
    cpu::go_first();
    if extent.has(Part::Memory) {
        memory::measure(&mut record);
    }
    if extent.has(Part::Delay) {
        delay::measure(extent, &mut record)?;
    }
    if extent.has(Part::Rate) {
        rate::measure(extent, &mut record)?;
    }
    Ok(record)
}

/// What [`memory`] runs as a process of its own.
pub(crate) fn stand_in(name: &str) -> Result<()> {
    ensure!(name == memory::STAND_IN, "there is no stand-in '{name}'");
    let line = memory::stand_in()?;
    writeln!(std::io::stdout(), "{line}").context("cannot say what a link takes")
}

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

use std::{collections::BTreeMap, io::Write, time::Duration};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;

use crate::{cpu, host::HostFacts, record::Record};

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

/// Sizes of the suite.
#[derive(Clone, Debug)]
pub(crate) struct Sizes {
    /// Rounds in which all take turns.
    pub(crate) rounds: u32,
    /// Milliseconds of each measurement.
    pub(crate) milliseconds: u32,
    /// Run only these parts; all if empty.
    pub(crate) only: Vec<Part>,
}

impl Sizes {
    pub(crate) const QUICK: Self = Self {
        rounds: 2,
        milliseconds: 700,
        only: Vec::new(),
    };
    pub(crate) const FULL: Self = Self {
        rounds: 7,
        milliseconds: 3000,
        only: Vec::new(),
    };

    fn has(&self, part: Part) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }

    fn time(&self) -> Duration {
        Duration::from_millis(self.milliseconds.into())
    }
}

/// Runs the suite. To be called inside a private host.
pub(crate) fn run(sizes: &Sizes) -> Result<Record> {
    let settings = BTreeMap::from([
        ("rounds".to_owned(), u64::from(sizes.rounds)),
        ("milliseconds".to_owned(), u64::from(sizes.milliseconds)),
        ("delay_ms".to_owned(), 50),
        ("packets_per_second".to_owned(), 10_000),
        ("window_ms".to_owned(), 100),
    ]);
    let mut record = Record::new("impair", HostFacts::read()?, settings);
    cpu::go_first();
    if sizes.has(Part::Memory) {
        memory::measure(&mut record);
    }
    if sizes.has(Part::Delay) {
        delay::measure(sizes, &mut record)?;
    }
    if sizes.has(Part::Rate) {
        rate::measure(sizes, &mut record)?;
    }
    Ok(record)
}

/// What [`memory`] runs as a process of its own.
pub(crate) fn stand_in(name: &str) -> Result<()> {
    ensure!(name == memory::STAND_IN, "there is no stand-in '{name}'");
    let line = memory::stand_in()?;
    writeln!(std::io::stdout(), "{line}").context("cannot say what a link takes")
}

//! The suite `slots`: how fast slots are built, handed out, torn down and adopted.
//!
//! Each case runs in rounds with a daemon of its own; what is compared alternates within a round, and
//! every run begins when the kernel has got rid of the one before.

mod acquire;
mod adopt;
mod fill;
mod flatness;
mod host;
mod queues;
mod teardown;

use std::collections::BTreeMap;

use anyhow::{Context, Result};

use crate::{daemon_process::DaemonProcess, host::HostFacts, private_host, record::Record};

/// A part of the suite that can be run by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Case {
    /// Time to build a slot: the recipe by `ip` and `iptables`, and ours.
    Fill,
    /// Time to acquire a lease over the API.
    Acquire,
    /// Whether the last slots of a large pool are built as fast as the first.
    Flatness,
    /// Time to tear a slot down.
    Teardown,
    /// Time to adopt all slots after a crash.
    Adopt,
    /// Ten thousand host slots, and who waits for them.
    Host,
    /// What the queues of TAPs take, of plain ones and of slots.
    Queues,
}

impl Case {
    const ALL: [Self; 7] = [
        Self::Fill,
        Self::Acquire,
        Self::Flatness,
        Self::Teardown,
        Self::Adopt,
        Self::Host,
        Self::Queues,
    ];
}

/// Sizes of the suite.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    rounds: u32,
    fill_slots: u32,
    acquire_slots: u32,
    large_slots: u32,
    teardown_slots: u32,
    host_slots: u32,
    queue_slots: u32,
}

impl Sizes {
    /// Sizes that the project's figures are stated for.
    pub(crate) const FULL: Self = Self {
        rounds: 3,
        fill_slots: 300,
        acquire_slots: 1000,
        large_slots: 3000,
        teardown_slots: 1000,
        host_slots: 10_000,
        queue_slots: 100,
    };

    /// Sizes for a first impression within a minute.
    pub(crate) const QUICK: Self = Self {
        rounds: 1,
        fill_slots: 40,
        acquire_slots: 200,
        large_slots: 600,
        teardown_slots: 200,
        host_slots: 1000,
        queue_slots: 40,
    };

    fn settings(self) -> BTreeMap<String, u64> {
        [
            ("rounds", self.rounds),
            ("fill_slots", self.fill_slots),
            ("acquire_slots", self.acquire_slots),
            ("large_slots", self.large_slots),
            ("teardown_slots", self.teardown_slots),
            ("host_slots", self.host_slots),
            ("queue_slots", self.queue_slots),
        ]
        .map(|(name, value)| (name.to_owned(), u64::from(value)))
        .into()
    }
}

/// Runs the suite, or parts of it. To be called inside a private host.
pub(crate) fn run(sizes: Sizes, only: &[Case]) -> Result<Record> {
    let mut record = Record::new("slots", HostFacts::read()?, sizes.settings());
    for case in Case::ALL {
        if !only.is_empty() && !only.contains(&case) {
            continue;
        }
        for round in 1..=sizes.rounds {
            let round = Round {
                label: format!("round {round} of {}", sizes.rounds),
                sizes,
            };
            match case {
                Case::Fill => fill::run(&round, &mut record)?,
                Case::Acquire => acquire::run(&round, &mut record)?,
                Case::Flatness => flatness::run(&round, &mut record)?,
                Case::Teardown => teardown::run(&round, &mut record)?,
                Case::Adopt => adopt::run(&round, &mut record)?,
                Case::Host => host::run(&round, &mut record)?,
                Case::Queues => queues::run(&round, &mut record)?,
            }
        }
    }
    fill::add_ratios(&mut record);
    flatness::add_ratios(&mut record);
    host::add_ratios(&mut record);
    Ok(record)
}

/// One round of a case.
struct Round {
    label: String,
    sizes: Sizes,
}

impl Round {
    /// Says what is being done.
    fn step(&self, what: &str, total: u32) -> crate::progress::Step {
        crate::progress::Step::begin(&format!("{what}, {}", self.label), total)
    }
}

/// Runs `measure` with a fresh daemon, once nothing is left of what ran before, and stops the daemon.
fn with_daemon<T>(measure: impl FnOnce(&mut DaemonProcess) -> Result<T>) -> Result<T> {
    private_host::settle()?;
    let folder = tempfile::tempdir_in("/run")?;
    let mut daemon = DaemonProcess::start(folder.path())?;
    let result = measure(&mut daemon).with_context(|| daemon.state())?;
    daemon.stop()?;
    Ok(result)
}

//! The suite `rr`: how many small requests and answers a host carries, and what of its processors that takes, with the
//! server in the host's own namespace, in a cgroup with an identity, and in namespaces joined to the host in several
//! ways.
//!
//! The table of a talk by Meta's engineers is repeated (500 connections, 36 threads, one byte each way), with every row
//! on a played host of its own, all alike; the client is beyond the same veth for all rows. Rows take turns within a
//! round. On few processors client and server share them, so what is compared is the whole of a transaction.

mod caller;
mod calls;
mod datagrams;
mod life;
mod load;
mod place;

pub(crate) use self::place::Case;

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use self::{
    load::{Figures, Pair},
    place::Place,
};
use crate::{
    cpu,
    extent::{self, Pace},
    host::HostFacts,
    progress::Step,
    record::Record,
    statistics::median,
};

/// Parts of the suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// Requests and answers, in all rows.
    Transactions,
    /// What an identity adds to connect and to bind.
    Calls,
    /// What an identity adds to a datagram, and how soon a UDP server receives at all its addresses.
    Datagrams,
    /// What it takes to add and to remove identities, beside few and beside many.
    Life,
}

impl extent::Part for Part {
    const QUICK: Pace = Pace {
        rounds: 10,
        milliseconds: 100,
    };
    const FULL: Pace = Pace {
        rounds: 100,
        milliseconds: 100,
    };
}

/// How much of the suite is run.
pub(crate) type Extent = extent::Extent<Part>;

/// Connections and threads of client and server each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    flows: usize,
    threads: usize,
}

impl Size {
    const FULL: Self = Self {
        flows: 500,
        threads: 36,
    };
    const QUICK: Self = Self {
        flows: 100,
        threads: 8,
    };
}

const PER_CPU: &str = "transactions_per_cpu_percent";
const RATE: &str = "transactions_per_second";

/// Ratios of two cases' samples of the same round.
const RATIOS: [(&str, Case, Case, &str); 4] = [
    (
        "identity_vs_bare_per_cpu",
        Case::Identity,
        Case::Bare,
        PER_CPU,
    ),
    (
        "identity_tcp_vs_bare_per_cpu",
        Case::IdentityTcp,
        Case::Bare,
        PER_CPU,
    ),
    ("veth_ebpf_vs_bare", Case::VethEbpf, Case::Bare, RATE),
    (
        "veth_ebpf_vs_veth_kernel",
        Case::VethEbpf,
        Case::VethKernel,
        RATE,
    ),
];

/// Runs the suite. To be called inside a private host.
pub(crate) fn run(extent: &Extent, rows: &[Case]) -> Result<Record> {
    let size = if extent.is_quick() {
        Size::QUICK
    } else {
        Size::FULL
    };
    let settings = BTreeMap::from([
        ("rounds".to_owned(), u64::from(extent.rounds())),
        ("milliseconds".to_owned(), u64::from(extent.milliseconds())),
        ("flows".to_owned(), size.flows as u64),
        ("threads".to_owned(), size.threads as u64),
        ("calls".to_owned(), calls::count(extent)),
        ("datagrams".to_owned(), datagrams::count(extent)),
    ]);
    let mut record = Record::new("rr", HostFacts::read()?, settings);
    cpu::go_first();
    place::mount_cgroups()?;
    if extent.has(Part::Calls) {
        calls::measure(extent, &mut record)?;
    }
    if extent.has(Part::Datagrams) {
        datagrams::measure(extent, &mut record)?;
    }
    if extent.has(Part::Life) {
        life::measure(extent, &mut record)?;
    }
    if extent.has(Part::Transactions) {
        transactions(extent, size, rows, &mut record)?;
    }
    Ok(record)
}

/// What the suite runs as processes of their own.
pub(crate) fn stand_in(words: &str) -> Result<()> {
    let words: Vec<&str> = words.split(' ').collect();
    match words[..] {
        ["server", port, flows, threads] => {
            load::serve(port.parse()?, flows.parse()?, threads.parse()?)
        }
        ["client", address, flows, threads, server] => load::call(
            address.parse()?,
            flows.parse()?,
            threads.parse()?,
            server.parse()?,
        ),
        ["calls"] => calls::stand_in(),
        ["datagrams", port] => datagrams::stand_in(port.parse()?),
        ["flood", target] => datagrams::flood(target.parse()?),
        _ => bail!("there is no stand-in '{}'", words.join(" ")),
    }
}

/// A row of the table.
struct Lane {
    case: Case,
    pair: Pair,
    /// Of all slices.
    sum: Figures,
    /// Outlives its processes.
    _place: Place,
}

fn transactions(extent: &Extent, size: Size, rows: &[Case], record: &mut Record) -> Result<()> {
    let mut lanes = Vec::new();
    for case in Case::value_variants() {
        if !rows.is_empty() && !rows.contains(case) {
            continue;
        }
        let _step = Step::begin(&format!("prepare {}", case.name()), 1);
        let lane = Place::create(*case).and_then(|place| {
            let mut pair = Pair::start(&place, size)?;
            // The first packets of a connection are others than those that are measured.
            pair.slice(extent.milliseconds())?;
            Ok(Lane {
                case: *case,
                pair,
                sum: Figures::default(),
                _place: place,
            })
        });
        match lane {
            Ok(lane) => lanes.push(lane),
            Err(error) => record.not_run(case.name(), &format!("{error:#}")),
        }
    }
    let mut samples: BTreeMap<(&str, &str), Vec<f64>> = BTreeMap::new();
    let step = Step::begin("rounds", extent.rounds());
    for round in 0..extent.rounds() {
        step.at(round);
        for lane in &mut lanes {
            let name = lane.case.name();
            let figures = lane.pair.slice(extent.milliseconds());
            let figures = figures.with_context(|| format!("measure {name}"))?;
            lane.sum.add(&figures);
            for (metric, value) in [(PER_CPU, figures.per_cpu_percent()), (RATE, figures.rate())] {
                record.add(name, metric, "per second", &[value]);
                samples.entry((name, metric)).or_default().push(value);
            }
        }
        // Nobody always comes behind the same one.
        lanes.reverse();
        if round % 2 == 1 && !lanes.is_empty() {
            lanes.rotate_left(1);
        }
    }
    for lane in &lanes {
        add(record, lane.case, &lane.sum);
    }
    for (name, numerator, denominator, metric) in RATIOS {
        let of = |case: Case| samples.get(&(case.name(), metric));
        let Some((above, below)) = of(numerator).zip(of(denominator)) else {
            continue;
        };
        let rounds: Vec<f64> = above.iter().zip(below).map(|(a, b)| a / b).collect();
        record.add("by_round", name, "ratio", &rounds);
        if let Some(middle) = median(&rounds) {
            record.insert_ratio(name, middle);
        }
    }
    for name in ["identity_vs_bare_per_cpu", "identity_tcp_vs_bare_per_cpu"] {
        record.note(
            name,
            "time of the client's and the server's threads, with what the kernel did for packets on their backs; \
             the median of the quotients of each round",
        );
    }
    Ok(())
}

/// What all slices took together: the kernel counts these by the hundredth of a second.
fn add(record: &mut Record, case: Case, sum: &Figures) {
    for (metric, seconds) in [
        ("cpu", sum.cpu),
        ("cpu_user", sum.user),
        ("cpu_system", sum.system),
        ("machine_user", sum.machine.user),
        ("machine_system", sum.machine.system),
        ("machine_softirq", sum.machine.softirq),
    ] {
        let percent = seconds / sum.seconds * 100.0;
        record.add(case.name(), metric, "% of a processor", &[percent]);
    }
}

//! What an identity adds to `connect` and to `bind`: the calls alone, on one processor, by two processes that take turns.
//!
//! connect goes to a port beyond the wire at which nobody listens, so that each call is one packet there and one back
//! and leaves nothing behind. A process makes a batch of calls and says the middle of their times; what is compared are
//! neighbouring batches.

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};
use rustix::{
    io::Errno,
    net::{AddressFamily, SocketType, bind, connect, socket},
};

use super::{
    Extent,
    caller::Caller,
    load::say,
    place::{Case, Place},
};
use crate::{cpu, progress::Step, record::Record, statistics::median, world};

/// Calls of a batch.
const BATCH: u32 = 1000;
/// Where nobody listens.
const CLOSED: u16 = 9;
/// The first of the ports that are bound to, one after the other: one that was just closed may stay taken for a moment, if
/// somebody looks at this process's descriptors.
const PORT: u16 = 20_000;
const CALLS: [&str; 2] = ["connect", "bind"];

fn batches(extent: &Extent) -> u32 {
    if extent.is_quick() { 10 } else { 100 }
}

/// Calls of each kind by each process.
pub(super) fn count(extent: &Extent) -> u64 {
    u64::from(BATCH * batches(extent))
}

pub(super) fn measure(extent: &Extent, record: &mut Record) -> Result<()> {
    for case in [Case::Identity, Case::IdentityTcp] {
        measure_case(case, extent, record)?;
    }
    Ok(())
}

fn measure_case(case: Case, extent: &Extent, record: &mut Record) -> Result<()> {
    let batches = batches(extent);
    let name = case.name();
    let step = Step::begin(&format!("calls of {name}"), batches);
    let place = Place::create(case)?;
    let mut with = Caller::start(place.server_command("calls")?, name)?;
    let mut without = Caller::start(place.host_command("calls")?, "bare")?;
    for call in CALLS {
        let mut added = Vec::new();
        for batch in 0..batches {
            // Who comes first has a warmer or a colder cache: that must not always be the same one.
            let (bare, own) = if batch % 2 == 0 {
                let bare = without.ask(call)?;
                (bare, with.ask(call)?)
            } else {
                let own = with.ask(call)?;
                (without.ask(call)?, own)
            };
            record.add("bare", &format!("{call}_us"), "us", &[bare]);
            record.add(name, &format!("{call}_us"), "us", &[own]);
            added.push(own - bare);
            step.at(batch);
        }
        let name = format!("{name}_{call}_added_us");
        record.add("by_round", &name, "us", &added);
        record.insert_ratio(&name, median(&added).unwrap_or(f64::NAN));
    }
    Ok(())
}

/// The process: a batch for each line.
pub(super) fn stand_in() -> Result<()> {
    cpu::pin(0)?;
    for line in std::io::stdin().lines() {
        let times: Result<Vec<f64>> = match line.context("cannot read what to do")?.as_str() {
            "connect" => (0..BATCH).map(|_| one_connect()).collect(),
            "bind" => (PORT..).take(BATCH as usize).map(one_bind).collect(),
            other => bail!("there is no call '{other}'"),
        };
        let middle = median(&times?).context("no calls")?;
        say(&format!("{middle}"))?;
    }
    Ok(())
}

fn one_connect() -> Result<f64> {
    let made = socket(AddressFamily::INET, SocketType::STREAM, None)?;
    let target = SocketAddrV4::new(world::BEYOND_VETH, CLOSED);
    let begun = Instant::now();
    let answer = connect(&made, &target);
    let time = begun.elapsed();
    ensure!(
        answer == Err(Errno::CONNREFUSED),
        "connect to a closed port gives {answer:?}"
    );
    Ok(time.as_secs_f64() * 1e6)
}

fn one_bind(port: u16) -> Result<f64> {
    let made = socket(AddressFamily::INET, SocketType::STREAM, None)?;
    let begun = Instant::now();
    let answer = bind(&made, &SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port));
    let time = begun.elapsed();
    answer.context("bind")?;
    Ok(time.as_secs_f64() * 1e6)
}

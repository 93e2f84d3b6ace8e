//! Ten thousand host slots: whether the last are built as fast as the first, what one weighs, how long
//! tearing them down takes, and how long anybody else who speaks netlink has to wait meanwhile.

mod bystander;

use anyhow::{Context, Result};

use super::{
    Round,
    flatness::{self, FIRST, LAST, MemoryTaken},
    with_daemon,
};
use crate::{
    daemon_process::{Families, Kind, pool_of},
    record::Record,
};
use bystander::{Bystander, Waits};

const LARGE: &str = "large_host";
/// The first and the last so many slots are compared.
const PART: u32 = 500;

/// Fills a large pool of host slots, and deletes it.
pub(super) fn run(round: &Round, record: &mut Record) -> Result<()> {
    let slots = round.sizes.host_slots;
    let step = round.step(&format!("fill and tear down {slots} host slots"), slots);
    let (ready_at, taken, filling, teardown, deleting) = with_daemon(|daemon| {
        daemon.warm_up(Kind::HostEbpf, &step)?;
        let before = MemoryTaken::read(daemon)?;
        let spec = pool_of(Kind::HostEbpf, slots, Families::Dual)?;
        let bystander = Bystander::start()?;
        let ready_at = daemon.fill(&spec, &step)?;
        let filling = bystander.end()?;
        let taken = MemoryTaken::read(daemon)?.since(&before);
        let bystander = Bystander::start()?;
        let teardown = daemon.delete(&spec.name)?;
        Ok((ready_at, taken, filling, teardown, bystander.end()?))
    })?;
    let part = PART.min(slots / 4);
    let (first, last) =
        flatness::rates_of_ends(&ready_at, part).context("the pool filled in no time")?;
    record.add(LARGE, FIRST, "slots/s", &[first]);
    record.add(LARGE, LAST, "slots/s", &[last]);
    for (metric, kibibytes) in taken.by_metric() {
        let per_slot = flatness::kibibytes_per_slot(kibibytes, slots);
        record.add(LARGE, metric, "KiB", &[per_slot]);
    }
    let curve_name = format!("{LARGE}, {}", round.label);
    record.add(&curve_name, "ready_at", "s", &flatness::curve(&ready_at));
    let milliseconds = teardown.as_secs_f64() * 1000.0 / f64::from(slots);
    record.add("teardown_host", "teardown_per_slot", "ms", &[milliseconds]);
    add_waits(record, "fill_host", &filling);
    add_waits(record, "teardown_host", &deleting);
    Ok(())
}

/// Rate of the last slots over that of the first.
pub(super) fn add_ratios(record: &mut Record) {
    record.add_ratio("fill_flatness_host", (LARGE, LAST), (LARGE, FIRST));
}

fn add_waits(record: &mut Record, case: &str, waits: &Waits) {
    record.add(case, "longest_wait", "ms", &[waits.longest_ms()]);
    record.add(case, "wait_p99", "ms", &[waits.p99_ms()]);
}

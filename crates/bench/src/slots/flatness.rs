//! Whether the last slots of a large pool are built as fast as the first, and what a slot weighs.

use anyhow::{Context, Result};

use super::{Round, with_daemon};
use crate::{
    daemon_process::{DaemonProcess, Families, pool},
    host::Memory,
    record::Record,
    statistics,
};

pub(super) const FIRST: &str = "fill_rate_first";
pub(super) const LAST: &str = "fill_rate_last";
/// The first and the last sixth of the slots are compared: 500 of 3000.
const PARTS: u32 = 6;
/// Every so many slots, the time is kept for the plot.
const CURVE_STEP: usize = 50;

/// Fills a large pool for each combination of families.
pub(super) fn run(round: &Round, record: &mut Record) -> Result<()> {
    for (case, families) in [("large_v4", Families::V4), ("large_dual", Families::Dual)] {
        fill_large(round, record, case, families)?;
    }
    Ok(())
}

/// Rate of the last slots over that of the first.
pub(super) fn add_ratios(record: &mut Record) {
    record.add_ratio("fill_flatness_v4", ("large_v4", LAST), ("large_v4", FIRST));
    record.add_ratio(
        "fill_flatness_dual",
        ("large_dual", LAST),
        ("large_dual", FIRST),
    );
}

fn fill_large(round: &Round, record: &mut Record, case: &str, families: Families) -> Result<()> {
    let slots = round.sizes.large_slots;
    let step = round.step(&format!("fill {slots} slots, {case}"), slots);
    let (ready_at, taken) = with_daemon(|daemon| {
        let before = MemoryTaken::read(daemon)?;
        let spec = pool(slots, families)?;
        let ready_at = daemon.fill(&spec, &step)?;
        let after = MemoryTaken::read(daemon)?;
        daemon.delete(&spec.name)?;
        Ok((ready_at, after.since(&before)))
    })?;
    let part = slots / PARTS;
    let (first, last) = rates_of_ends(&ready_at, part).context("the pool filled in no time")?;
    record.add(case, FIRST, "slots/s", &[first]);
    record.add(case, LAST, "slots/s", &[last]);
    for (metric, kibibytes) in taken.by_metric() {
        let per_slot = kibibytes_per_slot(kibibytes, slots);
        record.add(case, metric, "KiB", &[per_slot]);
    }
    let curve_name = format!("{case}, {}", round.label);
    record.add(&curve_name, "ready_at", "s", &curve(&ready_at));
    Ok(())
}

/// Memory in KiB, by who holds it.
pub(super) struct MemoryTaken {
    /// Everything, as far as the machine tells; other processes move it too.
    all: i64,
    slab: i64,
    percpu: i64,
    daemon: i64,
}

impl MemoryTaken {
    pub(super) fn read(daemon: &DaemonProcess) -> Result<Self> {
        let memory = Memory::read()?;
        Ok(Self {
            all: -memory.available.cast_signed(),
            slab: memory.slab.cast_signed(),
            percpu: memory.percpu.cast_signed(),
            daemon: daemon.resident_kibibytes()?.cast_signed(),
        })
    }

    pub(super) fn since(&self, before: &Self) -> Self {
        Self {
            all: self.all - before.all,
            slab: self.slab - before.slab,
            percpu: self.percpu - before.percpu,
            daemon: self.daemon - before.daemon,
        }
    }

    pub(super) fn by_metric(&self) -> [(&'static str, i64); 4] {
        [
            ("memory_per_slot", self.all),
            ("slab_per_slot", self.slab),
            ("percpu_per_slot", self.percpu),
            ("daemon_memory_per_slot", self.daemon),
        ]
    }
}

/// Slots per second among the first and the last `part` of all slots, given when each was ready.
pub(super) fn rates_of_ends(ready_at: &[f64], part: u32) -> Option<(f64, f64)> {
    let length = part as usize;
    let before_last = ready_at.len().checked_sub(length + 1)?;
    let first = statistics::rate(part, *ready_at.get(length - 1)?)?;
    let last = statistics::rate(part, ready_at.last()? - ready_at[before_last])?;
    Some((first, last))
}

pub(super) fn curve(ready_at: &[f64]) -> Vec<f64> {
    let every = ready_at.iter().skip(CURVE_STEP - 1).step_by(CURVE_STEP);
    every.copied().collect()
}

#[expect(
    clippy::cast_precision_loss,
    reason = "memory of a machine in KiB is far below 2^52"
)]
pub(super) fn kibibytes_per_slot(kibibytes: i64, slots: u32) -> f64 {
    kibibytes as f64 / f64::from(slots)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_even_fill_is_flat() {
        let ready_at: Vec<f64> = (1..=60).map(|slot| f64::from(slot) * 0.01).collect();
        let (first, last) = rates_of_ends(&ready_at, 10).unwrap();
        assert!(
            (first - 100.0).abs() < 1e-6 && (last - 100.0).abs() < 1e-6,
            "{first} {last}"
        );
    }

    #[test]
    fn a_fill_that_slows_down_is_not() {
        let early = (1..=50).map(|slot| f64::from(slot) * 0.01);
        let late = (1..=10).map(|slot| 0.5 + f64::from(slot) * 0.04);
        let ready_at: Vec<f64> = early.chain(late).collect();
        let (first, last) = rates_of_ends(&ready_at, 10).unwrap();
        assert!((last / first - 0.25).abs() < 1e-6, "{first} {last}");
    }

    #[test]
    fn too_few_slots_have_no_ends() {
        assert_eq!(rates_of_ends(&[0.1, 0.2], 2), None);
    }

    #[test]
    fn the_curve_keeps_every_fiftieth_slot() {
        let ready_at: Vec<f64> = (1..=120).map(f64::from).collect();
        assert_eq!(curve(&ready_at), [50.0, 100.0]);
    }
}

//! Time to build a slot, against the recipe of `ip` and `iptables` commands.

use std::time::Instant;

use anyhow::Result;

use super::{Round, with_daemon};
use crate::{
    daemon_process::{Families, Kind, pool_of},
    private_host, recipe,
    record::Record,
};

const METRIC: &str = "fill_per_slot";
/// The very first slot of a daemon, for which it loads its programs.
const FIRST: &str = "first_slot";
const RECIPE: &str = "recipe";
const OURS_V4: &str = "sandwire_v4";
const OURS_DUAL: &str = "sandwire_dual";
const EBPF_NETNS: &str = "ebpf_netns_v4";
const HOST: &str = "host_v4";
const OURS: [(&str, Kind, Families); 4] = [
    (OURS_V4, Kind::NetnsNft, Families::V4),
    (OURS_DUAL, Kind::NetnsNft, Families::Dual),
    (EBPF_NETNS, Kind::NetnsEbpf, Families::V4),
    (HOST, Kind::HostEbpf, Families::V4),
];

/// The recipe, then ours: with what the recipe has (IPv4), with IPv6 too, and the kinds that have
/// programs, whose attachments are part of a slot.
pub(super) fn run(round: &Round, record: &mut Record) -> Result<()> {
    let slots = round.sizes.fill_slots.min(recipe::SLOTS_MAX);
    let by_recipe = fill_by_recipe(round, slots)?;
    record.add(RECIPE, METRIC, "ms", &[by_recipe]);
    for (case, kind, families) in OURS {
        let step = round.step(&format!("fill {slots} slots, {case}"), slots);
        let seconds = with_daemon(|daemon| {
            let first = match kind {
                Kind::NetnsNft => None,
                Kind::NetnsEbpf | Kind::HostEbpf => Some(daemon.warm_up(kind, &step)?),
            };
            let spec = pool_of(kind, slots, families)?;
            let ready_at = daemon.fill(&spec, &step)?;
            daemon.delete(&spec.name)?;
            Ok((first, ready_at.last().copied().unwrap_or_default()))
        });
        let (first, seconds) = match seconds {
            Err(error) if kind != Kind::NetnsNft => {
                record.not_run(case, &format!("{error:#}"));
                continue;
            }
            other => other?,
        };
        if let Some(first) = first {
            record.add(case, FIRST, "ms", &[first * 1000.0]);
        }
        record.add(case, METRIC, "ms", &[seconds * 1000.0 / f64::from(slots)]);
    }
    Ok(())
}

/// How many times faster we are than the recipe.
pub(super) fn add_ratios(record: &mut Record) {
    record.add_ratio("netns_fill_speedup", (RECIPE, METRIC), (OURS_V4, METRIC));
    record.add_ratio(
        "netns_fill_speedup_dual",
        (RECIPE, METRIC),
        (OURS_DUAL, METRIC),
    );
    record.add_ratio(
        "ebpf_netns_fill_speedup",
        (RECIPE, METRIC),
        (EBPF_NETNS, METRIC),
    );
    record.add_ratio("host_fill_speedup", (RECIPE, METRIC), (HOST, METRIC));
}

fn fill_by_recipe(round: &Round, slots: u32) -> Result<f64> {
    private_host::settle()?;
    let step = round.step(&format!("fill {slots} slots, {RECIPE}"), slots);
    let started = Instant::now();
    for index in 0..slots {
        recipe::build(index)?;
        step.at(index);
    }
    let milliseconds = started.elapsed().as_secs_f64() * 1000.0;
    for index in 0..slots {
        recipe::remove(index)?;
    }
    Ok(milliseconds / f64::from(slots))
}

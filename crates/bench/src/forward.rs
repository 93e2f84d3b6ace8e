//! The suite `forward`: what one packet from a guest's TAP to the uplink costs, and one on the way back.
//!
//! One thread on one processor writes frames to the TAP as a VMM does. Everything up to the uplink
//! happens within that call, softirqs included, so the thread's processor time is the packet's cost.
//! It writes a batch, stops its clock, and then looks at what arrived: what was lost, whose source
//! addresses and checksums are right. All ways stand side by side, each in a played host of its own,
//! and take turns within a round.
//!
//! Ways that must do without segmentation offload send a large payload as full packets of 1514 bytes;
//! their cost is that of all of them.

mod lane;
mod load;
mod sink;
mod stages;
mod to_guest;

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};

use crate::{
    cpu,
    host::HostFacts,
    progress::Step,
    record::Record,
    way::{Limit, Place, Plan, Switches, Way, policy},
};
use lane::{Lane, Takes};
use load::Load;
use to_guest::TO_GUEST;

/// Nanoseconds of processor time for one load.
const COST: &str = "cost";
/// The same by the clock on the wall: more if anything ran elsewhere, or if the machine was busy.
const WALL: &str = "wall";

/// How packets leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// By a TAP.
    Tap,
    /// By a veth.
    Veth,
}

impl Exit {
    const ALL: [Self; 2] = [Self::Tap, Self::Veth];

    fn name(self) -> &'static str {
        match self {
            Self::Tap => "tap_to_tap",
            Self::Veth => "tap_to_veth",
        }
    }
}

/// Sizes of the suite.
#[derive(Clone, Debug)]
pub(crate) struct Sizes {
    /// Rounds in which all ways take turns.
    pub(crate) rounds: u32,
    /// Microseconds of processor time that a sample should take.
    pub(crate) sample_us: u32,
    /// Run only these ways; all if empty.
    pub(crate) only: Vec<Way>,
}

const WAYS: [Way; 9] = [
    Way::Kernel,
    Way::KernelNat,
    Way::Recipe,
    Way::RecipeTwice,
    Way::Nft,
    Way::EbpfNetns,
    Way::EbpfHost,
    Way::XdpGeneric,
    Way::Xdp,
];

/// Stages that a policy can switch off, by row.
const STAGES: [(&str, Switches); 3] = [
    (
        "",
        Switches {
            deny_list: true,
            limit: Limit::Wide,
        },
    ),
    (
        "_without_deny_list",
        Switches {
            deny_list: false,
            limit: Limit::Wide,
        },
    ),
    (
        "_without_limit",
        Switches {
            deny_list: true,
            limit: Limit::None,
        },
    ),
];
/// A lease whose every packet is over its limit.
const SPENT: Switches = Switches {
    deny_list: true,
    limit: Limit::Spent,
};

/// Runs the suite. To be called inside a private host.
pub(crate) fn run(sizes: &Sizes) -> Result<Record> {
    let settings = BTreeMap::from([
        ("rounds".to_owned(), u64::from(sizes.rounds)),
        ("sample_us".to_owned(), u64::from(sizes.sample_us)),
        ("deny_list_prefixes".to_owned(), 100),
    ]);
    let mut record = Record::new("forward", HostFacts::read()?, settings);
    let mut places = Vec::new();
    let mut lanes = Vec::new();
    for way in WAYS {
        if !sizes.only.is_empty() && !sizes.only.contains(&way) {
            continue;
        }
        match prepare(way) {
            Ok((place, mut ready)) => {
                if let Some(note) = place.note {
                    record.not_run(&format!("{} of a pool", way.name()), note);
                }
                places.push(place);
                lanes.append(&mut ready);
            }
            Err(error) => record.not_run(way.name(), &format!("{error:#}")),
        }
    }
    // Placed before any measurement: what follows runs on this processor alone.
    cpu::pin(0)?;
    for exit in Exit::ALL {
        measure(sizes, exit, &mut lanes, &mut record)?;
    }
    to_guest::measure(sizes, &lanes, &mut record)?;
    stages::measure(sizes, &lanes, &mut record)?;
    drop(lanes);
    places.into_iter().try_for_each(Place::end)?;
    stages::add(&mut record);
    add_ratios(&mut record);
    Ok(record)
}

/// Builds a way, with a lane for each of its rows.
fn prepare(way: Way) -> Result<(Place, Vec<Lane>)> {
    let _step = Step::begin(&format!("set up {}", way.name()), 1);
    let stages = match way {
        Way::EbpfNetns | Way::EbpfHost => &STAGES[..],
        _ => &STAGES[..1],
    };
    let mut switches: Vec<_> = stages.iter().map(|(_, switches)| *switches).collect();
    if stages.len() > 1 {
        switches.push(SPENT);
    }
    let plan = Plan {
        slots: 1,
        leases: u32::try_from(switches.len()).unwrap_or(1),
        policies: switches.into_iter().map(policy).collect::<Result<_>>()?,
    };
    let place = Place::build(way, &plan, |_| {})?;
    let sink = std::rc::Rc::new(sink::Sink::open(&place.world)?);
    let mut lanes = Vec::new();
    for (sandbox, (suffix, switches)) in place.sandboxes.iter().zip(stages) {
        let name = format!("{}{suffix}", way.name());
        let takes: Takes = if suffix.is_empty() {
            |_, _| true
        } else {
            |exit, load| exit == Exit::Tap && matches!(load, Load::Udp64 | Load::Tso64k)
        };
        let mut lane = Lane::open(&name, sandbox, sink.clone(), takes)?;
        if way.has_policies() {
            let is_denied = !lane.lets_denied_through()?;
            ensure!(
                is_denied == switches.deny_list,
                "{name}: the deny list is {} but should not be",
                if is_denied { "on" } else { "off" }
            );
        }
        lanes.push(lane);
    }
    if let Some(sandbox) = place.sandboxes.get(STAGES.len()) {
        let name = format!("{}{}", way.name(), stages::SPENT);
        lanes.push(Lane::open(&name, sandbox, sink.clone(), |_, _| false)?);
    }
    if way == Way::Kernel {
        lanes.push(lane::bare(&place, &sink, "redirect", |exit, _| {
            exit == Exit::Tap
        })?);
        lanes.push(lane::bare(&place, &sink, "drop", |_, _| false)?);
    }
    Ok((place, lanes))
}

fn measure(sizes: &Sizes, exit: Exit, lanes: &mut [Lane], record: &mut Record) -> Result<()> {
    for load in Load::ALL {
        let step = Step::begin(
            &format!("{}, {}", exit.name(), load.name()),
            sizes.rounds + 1,
        );
        let mut running = Vec::new();
        for lane in lanes.iter_mut().filter(|lane| lane.takes(exit, load)) {
            let trial = lane.examine(exit, load)?;
            if add_trial(record, exit.name(), load, lane.name(), &trial) {
                running.push(lane);
            }
        }
        for round in 0..sizes.rounds {
            step.at(round + 1);
            for lane in &mut running {
                let sample = lane
                    .sample(exit, load, sizes.sample_us)
                    .with_context(|| format!("cannot measure {}", lane.name()))?;
                add_sample(record, exit.name(), load, lane.name(), &sample);
            }
        }
        for lane in &running {
            tell_discarded(record, exit.name(), load, lane.name());
        }
    }
    Ok(())
}

/// Adds a sample, and its cost if all of it arrived: a packet that is dropped on its way costs less.
fn add_sample(record: &mut Record, path: &str, load: Load, case: &str, sample: &lane::Sample) {
    let metric = |kind: &str| format!("{path}_{}_{kind}", load.name());
    record.add(case, &metric("lost"), "packets", &[sample.lost]);
    if sample.lost == 0.0 {
        record.add(case, &metric(COST), "ns", &[sample.cpu_ns]);
        record.add(case, &metric(WALL), "ns", &[sample.wall_ns]);
    }
}

/// Says why a case that was measured has no cost.
fn tell_discarded(record: &mut Record, path: &str, load: Load, case: &str) {
    let metric = |kind: &str| format!("{path}_{}_{kind}", load.name());
    if record.row(case, &metric(COST)).is_none() {
        let reason = "packets were lost in every round, so their cost isn't that of the way";
        record.not_run(&format!("{case}, {}", metric(COST)), reason);
    }
}

/// Adds what a closer look has found, and returns whether the whole load goes the way, unchanged.
fn add_trial(record: &mut Record, path: &str, load: Load, case: &str, trial: &lane::Trial) -> bool {
    let metric = |kind: &str| format!("{path}_{}_{kind}", load.name());
    let figures = [
        ("checked", "packets", trial.arrived),
        ("wrong", "packets", trial.wrong),
        (
            "missing",
            "packets",
            trial.sent.saturating_sub(trial.arrived),
        ),
    ];
    for (kind, unit, value) in figures {
        record.add(case, &metric(kind), unit, &[f64::from(value)]);
    }
    let is_whole = trial.arrived >= trial.sent && trial.wrong == 0;
    if !is_whole {
        let (sent, arrived, wrong) = (trial.sent, trial.arrived, trial.wrong);
        let reason = format!(
            "of {sent} packets that were looked at {arrived} arrived, {wrong} of them wrong"
        );
        record.not_run(&format!("{case}, {}", metric(COST)), &reason);
    }
    is_whole
}

fn add_ratios(record: &mut Record) {
    let mut add = |name: &str, path: &str, load: Load, above: &str, below: &str| {
        let metric = format!("{path}_{}_{COST}", load.name());
        record.add_ratio(name, (above, &metric), (below, &metric));
    };
    for (name, load, above, below) in [
        ("ebpf_host_vs_recipe_64", Load::Udp64, "ebpf_host", "recipe"),
        (
            "ebpf_netns_vs_recipe_64",
            Load::Udp64,
            "ebpf_netns",
            "recipe",
        ),
        (
            "ebpf_host_vs_recipe_64k",
            Load::Tso64k,
            "ebpf_host",
            "recipe",
        ),
        ("xdp_vs_recipe_64", Load::Udp64, "xdp", "recipe"),
        ("redirect_vs_recipe_64", Load::Udp64, "redirect", "recipe"),
        ("kernel_vs_recipe_64", Load::Udp64, "kernel", "recipe"),
        (
            "ebpf_host_vs_kernel_nat_64",
            Load::Udp64,
            "ebpf_host",
            "kernel_nat",
        ),
        (
            "ebpf_host_vs_recipe_and_host_snat_64",
            Load::Udp64,
            "ebpf_host",
            "recipe_and_host_snat",
        ),
    ] {
        add(name, Exit::Tap.name(), load, above, below);
    }
    for (load, ways) in [
        (
            Load::Udp64,
            &["kernel", "ebpf_host", "ebpf_netns", "xdp"][..],
        ),
        (Load::Tso64k, &["kernel", "ebpf_host", "ebpf_netns"]),
    ] {
        for way in ways {
            let name = format!("{TO_GUEST}_{way}_vs_recipe_{}", load.name());
            add(&name, TO_GUEST, load, way, "recipe");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        Record::new("forward", HostFacts::default(), BTreeMap::new())
    }

    #[test]
    fn a_load_that_does_not_arrive_whole_and_unchanged_is_not_measured() {
        let whole = lane::Trial {
            sent: 8,
            arrived: 8,
            wrong: 0,
        };
        let mut record = record();
        assert!(add_trial(&mut record, "path", Load::Udp64, "a", &whole));
        assert!(record.not_run.is_empty());
        for (arrived, wrong) in [(0, 0), (7, 0), (8, 1)] {
            let trial = lane::Trial {
                arrived,
                wrong,
                ..whole
            };
            assert!(!add_trial(&mut record, "path", Load::Udp64, "b", &trial));
            let reason = &record.not_run["b, path_64_cost"];
            assert!(reason.contains(&format!("{arrived} arrived, {wrong} of them wrong")));
        }
    }

    #[test]
    fn a_round_with_losses_has_no_cost() {
        let sample = |cpu_ns: f64, lost: f64| lane::Sample {
            cpu_ns,
            wall_ns: cpu_ns,
            lost,
        };
        let mut record = record();
        for sample in [sample(500.0, 0.0), sample(100.0, 3.0), sample(520.0, 0.0)] {
            add_sample(&mut record, "path", Load::Udp64, "a", &sample);
        }
        add_sample(&mut record, "path", Load::Udp64, "b", &sample(100.0, 3.0));
        for case in ["a", "b"] {
            tell_discarded(&mut record, "path", Load::Udp64, case);
        }
        let row = record.row("a", "path_64_cost").unwrap();
        assert_eq!(row.samples, [500.0, 520.0]);
        assert_eq!(record.row("a", "path_64_lost").unwrap().max, 3.0);
        assert!(record.row("b", "path_64_cost").is_none());
        let cases: Vec<_> = record.not_run.keys().collect();
        assert_eq!(cases, ["b, path_64_cost"]);
    }
}

//! The suite `forward`: what one packet from a guest's TAP to the uplink costs.
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

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};

use crate::{
    cpu,
    host::HostFacts,
    progress::Step,
    record::Record,
    way::{Place, Plan, Switches, Way, policy},
};
use lane::Lane;
use load::Load;

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
const STAGES: [(&str, Switches); 4] = [
    (
        "",
        Switches {
            deny_list: true,
            limit: true,
        },
    ),
    (
        "_without_deny_list",
        Switches {
            deny_list: false,
            limit: true,
        },
    ),
    (
        "_without_limit",
        Switches {
            deny_list: true,
            limit: false,
        },
    ),
    (
        "_without_both",
        Switches {
            deny_list: false,
            limit: false,
        },
    ),
];

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
    drop(lanes);
    places.into_iter().try_for_each(Place::end)?;
    add_stages(&mut record);
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
    let policies = stages.iter().map(|(_, switches)| policy(*switches));
    let plan = Plan {
        slots: 1,
        leases: u32::try_from(stages.len()).unwrap_or(1),
        policies: policies.collect::<Result<_>>()?,
    };
    let place = Place::build(way, &plan, |_| {})?;
    let sink = std::rc::Rc::new(sink::Sink::open(&place.world)?);
    let mut lanes = Vec::new();
    for (sandbox, (suffix, switches)) in place.sandboxes.iter().zip(stages) {
        let name = format!("{}{suffix}", way.name());
        let mut lane = Lane::open(&name, suffix.is_empty(), sandbox, sink.clone())?;
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
    if way == Way::Kernel {
        lanes.push(lane::bare_redirect(&place, &sink)?);
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
            add_trial(record, exit, load, lane.name(), &trial);
            if trial.arrived > 0 {
                running.push(lane);
            }
        }
        for round in 0..sizes.rounds {
            step.at(round + 1);
            for lane in &mut running {
                let sample = lane
                    .sample(exit, load, sizes.sample_us)
                    .with_context(|| format!("cannot measure {}", lane.name()))?;
                let metric = |kind: &str| format!("{}_{}_{kind}", exit.name(), load.name());
                record.add(lane.name(), &metric(COST), "ns", &[sample.cpu_ns]);
                record.add(lane.name(), &metric(WALL), "ns", &[sample.wall_ns]);
                record.add(lane.name(), &metric("lost"), "packets", &[sample.lost]);
            }
        }
    }
    Ok(())
}

fn add_trial(record: &mut Record, exit: Exit, load: Load, case: &str, trial: &lane::Trial) {
    let metric = |kind: &str| format!("{}_{}_{kind}", exit.name(), load.name());
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
}

/// What each stage costs: the difference between a slot with and one without it. What is left over a
/// bare redirect is what can't be switched off: antispoofing, route, NAT, counters.
fn add_stages(record: &mut Record) {
    for load in [Load::Udp64, Load::Tso64k] {
        let metric = format!("tap_to_tap_{}_{COST}", load.name());
        for way in [Way::EbpfNetns, Way::EbpfHost] {
            let name = way.name();
            let median = |case: &str| record.row(case, &metric).map(|row| row.median);
            let of = |suffix: &str| median(&format!("{name}{suffix}"));
            let stages = [
                ("deny_list", of(""), of("_without_deny_list")),
                ("limit", of(""), of("_without_limit")),
                ("all_others", of("_without_both"), median("redirect")),
            ];
            for (stage, with, without) in stages {
                if let (Some(with), Some(without)) = (with, without) {
                    let case = format!("stages of {name}");
                    let metric = format!("{}_{stage}", load.name());
                    record.add(&case, &metric, "ns", &[with - without]);
                }
            }
        }
    }
}

fn add_ratios(record: &mut Record) {
    let metric = |load: Load| format!("tap_to_tap_{}_{COST}", load.name());
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
    ] {
        let metric = metric(load);
        record.add_ratio(name, (above, &metric), (below, &metric));
    }
    let metric = metric(Load::Udp64);
    let twice = ("recipe_and_host_snat", metric.as_str());
    record.add_ratio(
        "ebpf_host_vs_recipe_and_host_snat_64",
        ("ebpf_host", &metric),
        twice,
    );
}

//! What each stage of the path costs.
//!
//! A packet that a stage refuses has cost what is before that stage, and its refusal. So guests send packets
//! that come further and further, and the difference between one and the next is the stage between. What a
//! policy can switch off is measured by doing so as well.

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    time::Duration,
};

use anyhow::{Context, Result};

use super::{
    COST, Exit, Sizes,
    lane::Lane,
    load::{Load, PORT},
};
use crate::{cpu, packet::Frame, progress::Step, record::Record, way::Way, world};

/// The end of the name of a guest whose every packet is over its limit.
pub(super) const SPENT: &str = "_spent";
/// Guests whose packets meet a program that does nothing but drop or redirect them, and what such a packet costs.
const DROP: (&str, &str) = ("drop", "dropped_cost");
const REDIRECT: (&str, &str) = ("redirect", "redirected_cost");
const WAYS: [Way; 2] = [Way::EbpfNetns, Way::EbpfHost];

/// How far packets of a guest come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reach {
    /// To the program. Their Ethernet address is wrong.
    Program,
    /// To antispoofing. Their source is wrong.
    Antispoof,
    /// To the limit, past policy and route.
    Limit,
    /// To the uplink.
    Uplink,
    /// To the uplink, and nothing is known of where they go.
    Undecided,
}

impl Reach {
    const ALL: [Self; 5] = [
        Self::Program,
        Self::Antispoof,
        Self::Limit,
        Self::Uplink,
        Self::Undecided,
    ];

    fn metric(self) -> &'static str {
        match self {
            Self::Program => "to_program_cost",
            Self::Antispoof => "to_antispoof_cost",
            Self::Limit => "to_limit_cost",
            Self::Uplink => "to_uplink_cost",
            Self::Undecided => "to_uplink_undecided_cost",
        }
    }

    /// The guest that sends them.
    fn lane(self, way: Way) -> String {
        let suffix = if self == Self::Limit { SPENT } else { "" };
        format!("{}{suffix}", way.name())
    }

    fn frames(self, lane: &Lane) -> Vec<Frame> {
        let mut sandbox = lane.sandbox().clone();
        match self {
            // The last byte tells the interfaces of one sandbox apart.
            Self::Program => sandbox.mac[1] ^= 1,
            Self::Antispoof => sandbox.guest = Ipv4Addr::new(192, 0, 2, 1),
            Self::Limit | Self::Uplink | Self::Undecided => {}
        }
        self.targets()
            .flat_map(|target| Load::Udp64.frames(&sandbox, SocketAddrV4::new(target, PORT)))
            .collect()
    }

    /// Where they go, in turn. Those that are to be decided anew go to eight times as many as decisions are kept, so hardly
    /// one finds its own again.
    fn targets(self) -> impl Iterator<Item = Ipv4Addr> {
        let (first, count) = match self {
            Self::Undecided => (world::FAR_TAP, world::FAR_COUNT),
            _ => (world::BEYOND_TAP, 1),
        };
        (u32::from(first)..)
            .take(count as usize)
            .map(Ipv4Addr::from)
    }
}

/// Sends packets that come to each stage. Guests take turns within a round.
pub(super) fn measure(sizes: &Sizes, lanes: &[Lane], record: &mut Record) -> Result<()> {
    let find = |name: &str| lanes.iter().find(|lane| lane.name() == name);
    let mut turns = Vec::new();
    for way in WAYS {
        for reach in Reach::ALL {
            if let Some(lane) = find(&reach.lane(way)) {
                turns.push((way.name(), reach.metric(), lane, reach.frames(lane)));
            }
        }
    }
    for (case, metric) in [DROP, REDIRECT] {
        if let Some(lane) = find(case) {
            turns.push((case, metric, lane, Reach::Uplink.frames(lane)));
        }
    }
    let step = Step::begin("stages", sizes.rounds + 1);
    for round in 0..sizes.rounds {
        step.at(round + 1);
        for (case, metric, lane, frames) in &turns {
            let cost = cost(lane, frames, sizes.sample_us)
                .with_context(|| format!("cannot measure {metric} of {case}"))?;
            record.add(case, metric, "ns", &[cost]);
        }
    }
    Ok(())
}

/// Nanoseconds of processor time for a packet.
fn cost(lane: &Lane, frames: &[Frame], sample_us: u32) -> Result<f64> {
    let enough = Duration::from_micros(sample_us.into());
    let batch = Load::Udp64.batch();
    let mut frames = frames.iter().cycle();
    let mut spent = Duration::ZERO;
    let mut sent = 0;
    while spent < enough {
        let before = cpu::thread_time();
        for frame in frames.by_ref().take(batch as usize) {
            lane.write(frame)?;
        }
        spent += cpu::thread_time() - before;
        sent += batch;
        lane.empty_tap()?;
    }
    Ok(spent.as_secs_f64() * 1e9 / f64::from(sent))
}

/// Adds the differences.
pub(super) fn add(record: &mut Record) {
    for way in WAYS {
        add_switched(way, record);
        add_between(way, record);
    }
}

/// What is between one reach and the next. Translation and counters come after the limit, and so does the way out,
/// which a program that only redirects has as well.
fn add_between(way: Way, record: &mut Record) {
    let median = |case: &str, metric: &str| record.row(case, metric).map(|row| row.median);
    let to = |reach: Reach| median(way.name(), reach.metric());
    let bare = [DROP, REDIRECT].map(|(case, metric)| median(case, metric));
    let [Some(dropped), Some(redirected)] = bare else {
        return;
    };
    let [
        Some(program),
        Some(antispoof),
        Some(limit),
        Some(uplink),
        Some(undecided),
    ] = Reach::ALL.map(to)
    else {
        return;
    };
    let out = redirected - dropped;
    let stages = [
        ("find_sender", program - dropped),
        ("parse_antispoof", antispoof - program),
        ("policy_route_limit", limit - antispoof),
        ("nat_counters", uplink - limit - out),
        ("redirect", out),
        ("decision", undecided - uplink),
    ];
    for (stage, cost) in stages {
        let case = format!("stages of {}", way.name());
        let metric = format!("{}_{stage}", Load::Udp64.name());
        record.add(&case, &metric, "ns", &[cost]);
    }
}

/// The difference between a slot with a stage and one without it.
fn add_switched(way: Way, record: &mut Record) {
    for load in [Load::Udp64, Load::Tso64k] {
        let metric = format!("{}_{}_{COST}", Exit::Tap.name(), load.name());
        let of = |suffix: &str| {
            let case = format!("{}{suffix}", way.name());
            record.row(&case, &metric).map(|row| row.median)
        };
        let Some(whole) = of("") else {
            continue;
        };
        let stages = [
            ("deny_list", of("_without_deny_list")),
            ("limit", of("_without_limit")),
        ];
        for (stage, without) in stages {
            if let Some(without) = without {
                let case = format!("stages of {}", way.name());
                let metric = format!("{}_{stage}", load.name());
                record.add(&case, &metric, "ns", &[whole - without]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::host::HostFacts;

    #[test]
    fn stages_are_what_lies_between_the_ends_of_packets() {
        let mut record = Record::new("forward", HostFacts::default(), BTreeMap::new());
        let costs = [700.0, 720.0, 790.0, 1200.0, 1700.0];
        for (reach, cost) in Reach::ALL.into_iter().zip(costs) {
            record.add("ebpf_host", reach.metric(), "ns", &[cost]);
        }
        add(&mut record);
        assert!(record.row("stages of ebpf_host", "64_redirect").is_none());
        record.add(DROP.0, DROP.1, "ns", &[680.0]);
        record.add(REDIRECT.0, REDIRECT.1, "ns", &[1000.0]);
        add(&mut record);
        let stage = |name: &str| {
            let row = record.row("stages of ebpf_host", &format!("64_{name}"));
            row.map(|row| row.median)
        };
        assert_eq!(stage("find_sender"), Some(20.0));
        assert_eq!(stage("parse_antispoof"), Some(20.0));
        assert_eq!(stage("policy_route_limit"), Some(70.0));
        assert_eq!(stage("redirect"), Some(320.0));
        assert_eq!(stage("nat_counters"), Some(90.0));
        assert_eq!(stage("decision"), Some(500.0));
        assert!(record.row("stages of ebpf_netns", "64_redirect").is_none());
    }
}

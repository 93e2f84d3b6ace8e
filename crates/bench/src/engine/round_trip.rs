//! What a forwarder without impairments adds to a round trip when nothing else is on the way.
//!
//! Single echo requests take turns between the cable that joins the hosts directly and the way through the forwarder.
//! The right host's kernel answers. The prober never sleeps and has a processor of its own, so that what differs is
//! the forwarder's: two crossings, each with a wake-up where it sleeps.

use std::{
    net::Ipv4Addr,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};

use super::{Extent, forward::forward, probes};
use crate::{
    clones::Pinger,
    cpu,
    progress::Step,
    record::Record,
    rig::{Edge, Pace, RIGHT, RIGHT_DIRECT, Rig},
    statistics::{median, percentile},
};

/// The edge app that the promise is about: what forwards unless the user wants another.
const PROMISED: Edge = Edge::Ring;
/// Between probes, so that a forwarder that sleeps has gone to sleep.
const PAUSE: Duration = Duration::from_micros(500);
const PATIENCE: Duration = Duration::from_millis(200);
const REACH_PATIENCE: Duration = Duration::from_secs(5);

/// Measures each edge app, sleeping and polling.
pub(super) fn measure(extent: &Extent, record: &mut Record) -> Result<()> {
    let rig = Rig::build("echo")?;
    let step = Step::begin("round trips", extent.rounds());
    for round in 0..extent.rounds() {
        for edge in Edge::ALL {
            for pace in Pace::ALL {
                let case = format!("round_trip_{}_{}", edge.name(), pace.name());
                if record.not_run.contains_key(&case) {
                    continue;
                }
                match probe(&rig, edge, pace, probes(extent)) {
                    Ok(found) => add(record, &case, &found)?,
                    Err(error) => record.not_run(&case, &format!("{error:#}")),
                }
            }
        }
        step.at(round + 1);
    }
    for pace in Pace::ALL {
        let case = format!("round_trip_{}_{}", PROMISED.name(), pace.name());
        if let Some(row) = record.row(&case, "added_rtt") {
            let added = row.median;
            record.insert_ratio(&format!("forward_added_rtt_us_{}", pace.name()), added);
        }
    }
    Ok(())
}

/// Round trips in microseconds.
#[derive(Default)]
struct Found {
    direct: Vec<f64>,
    through: Vec<f64>,
}

fn add(record: &mut Record, case: &str, found: &Found) -> Result<()> {
    let figures = |samples: &[f64]| median(samples).zip(percentile(samples, 99));
    let (direct, direct_p99) = figures(&found.direct).context("no answer by the direct cable")?;
    let (through, through_p99) = figures(&found.through).context("no answer by the forwarder")?;
    record.add(case, "rtt", "us", &[through]);
    record.add(case, "rtt_direct", "us", &[direct]);
    record.add(case, "added_rtt", "us", &[through - direct]);
    record.add(case, "added_rtt_p99", "us", &[through_p99 - direct_p99]);
    Ok(())
}

fn probe(rig: &Rig, edge: Edge, pace: Pace, probes: u32) -> Result<Found> {
    let forwarder = forward(rig, edge, pace)?;
    reach(rig)?;
    let pinger = Pinger::open(&rig.left)?;
    let found = thread::scope(|scope| {
        let prober = scope.spawn(|| -> Result<Found> {
            cpu::pin(1)?;
            let mut found = Found::default();
            for probe in 0..probes {
                let sequence = u16::try_from(probe % 60_000).unwrap_or(0) + 1;
                let mut ways = [
                    (RIGHT_DIRECT, &mut found.direct),
                    (RIGHT, &mut found.through),
                ];
                // Who goes first changes too.
                if probe % 2 == 1 {
                    ways.reverse();
                }
                for (target, samples) in ways {
                    samples.extend(probe_once(&pinger, target, sequence)?);
                    thread::sleep(PAUSE);
                }
            }
            Ok(found)
        });
        prober.join().map_err(|_| anyhow!("the prober panicked"))?
    })?;
    forwarder.end()?;
    let answered = found.through.len();
    ensure!(
        answered * 100 >= probes as usize * 95,
        "{answered} of {probes} probes were answered"
    );
    Ok(found)
}

/// Waits until the forwarder forwards.
fn reach(rig: &Rig) -> Result<()> {
    let pinger = Pinger::open(&rig.left)?;
    let deadline = Instant::now() + REACH_PATIENCE;
    while probe_once(&pinger, RIGHT, 0)?.is_none() {
        ensure!(Instant::now() < deadline, "{RIGHT} does not answer");
    }
    Ok(())
}

fn probe_once(pinger: &Pinger, target: Ipv4Addr, sequence: u16) -> Result<Option<f64>> {
    let started = Instant::now();
    pinger.send(target, sequence)?;
    loop {
        let answer = pinger.receive()?;
        let elapsed = started.elapsed();
        if answer.is_some_and(|answer| answer.source == target && answer.sequence == sequence) {
            return Ok(Some(elapsed.as_secs_f64() * 1e6));
        }
        if elapsed > PATIENCE {
            return Ok(None);
        }
    }
}

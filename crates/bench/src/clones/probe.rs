//! What a slot adds to a round trip: single probes that take turns between the ways, so that whatever
//! else the machine does falls on all alike, to guests that never sleep.

use std::{
    net::Ipv4Addr,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};

use super::{Client, case, ping::Pinger};
use crate::{
    cpu,
    guest::receiver::{Receivers, Waiting},
    progress::Step,
    record::Record,
    way::{Place, Sandbox, Way},
};

const PATIENCE: Duration = Duration::from_millis(200);
const REACH_PATIENCE: Duration = Duration::from_secs(10);

/// Probes one guest of each way.
pub(super) fn run(
    places: &[(Way, Place)],
    client: Client,
    probes: u32,
    record: &mut Record,
) -> Result<()> {
    let step = Step::begin(&format!("probes, client: {}", client.name()), probes);
    let guests: Vec<Sandbox> = places
        .iter()
        .filter_map(|(_, place)| place.sandboxes.first().cloned())
        .collect();
    // Guest and prober each need a processor, or they only get in each other's way.
    let cpus = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let waiting = if cpus > 1 {
        Waiting::Awake
    } else {
        Waiting::Asleep
    };
    let receivers = Receivers::start(&guests, 1, waiting)?;
    let mut ways = Vec::new();
    for ((way, place), guest) in places.iter().zip(&guests) {
        let namespace = client.namespace(place);
        super::ping::reach_all(namespace, &[guest.clone], REACH_PATIENCE)
            .with_context(|| format!("cannot reach the guest by {}", case(*way)))?;
        ways.push((case(*way), Pinger::open(namespace)?, guest.clone));
    }
    let found = thread::scope(|scope| {
        let prober = scope.spawn(|| -> Result<Vec<Probed>> {
            cpu::pin(1)?;
            alternate(&ways, probes, &step)
        });
        prober.join().map_err(|_| anyhow!("the prober panicked"))?
    })?;
    receivers.end()?;
    for ((case, _, _), probed) in ways.iter().zip(&found) {
        let metric = format!("{}_probe", client.name());
        let kept = u32::try_from(probed.round_trips.len()).unwrap_or(0);
        let lost = f64::from(probes.saturating_sub(kept));
        record.add(case, &format!("{metric}_lost"), "packets", &[lost]);
        record.add_summary(case, &metric, "us", &probed.round_trips);
        record.add_summary(case, &format!("{metric}_sending"), "us", &probed.sending);
    }
    Ok(())
}

fn alternate(ways: &[(&str, Pinger, Ipv4Addr)], probes: u32, step: &Step) -> Result<Vec<Probed>> {
    let mut found = vec![Probed::default(); ways.len()];
    for probe in 0..probes {
        let sequence = u16::try_from(probe % 60_000).unwrap_or(0) + 1;
        for turn in 0..ways.len() {
            // Who goes first changes too.
            let place = (turn + probe as usize) % ways.len();
            let (_, pinger, target) = &ways[place];
            probe_once(pinger, *target, sequence, &mut found[place])?;
        }
        if probe % 100 == 0 {
            step.at(probe);
        }
    }
    Ok(found)
}

/// What probes of one way have found, in microseconds.
#[derive(Clone, Debug, Default)]
struct Probed {
    round_trips: Vec<f64>,
    /// The part of each that it took to send: all the way into the guest's TAP.
    sending: Vec<f64>,
}

fn probe_once(pinger: &Pinger, target: Ipv4Addr, sequence: u16, probed: &mut Probed) -> Result<()> {
    let started = Instant::now();
    pinger.send(target, sequence)?;
    let sent = started.elapsed();
    loop {
        let answer = pinger.receive()?;
        let elapsed = started.elapsed();
        if answer.is_some_and(|answer| answer.source == target && answer.sequence == sequence) {
            probed.round_trips.push(elapsed.as_secs_f64() * 1e6);
            probed.sending.push(sent.as_secs_f64() * 1e6);
            return Ok(());
        }
        if elapsed > PATIENCE {
            return Ok(());
        }
    }
}

/// What is added to the basic case, in microseconds and compared with the recipe.
pub(super) fn add_ratios(record: &mut Record) {
    for client in ["host", "beyond"] {
        let metric = format!("{client}_probe");
        let median = |record: &Record, case| record.row(case, &metric).map(|row| row.median);
        let Some(basic) = median(record, "basic") else {
            continue;
        };
        let mut added = Vec::new();
        for case in ["recipe", "nft", "ebpf_netns", "ebpf_host"] {
            if let Some(median) = median(record, case) {
                let more = median - basic;
                record.add(case, &format!("{client}_ping_added"), "us", &[more]);
                added.push((case, more));
            }
        }
        let of = |name: &str| {
            added
                .iter()
                .find(|(case, _)| *case == name)
                .map(|one| one.1)
        };
        let Some(recipe) = of("recipe").filter(|recipe| *recipe > 0.0) else {
            continue;
        };
        let suffix = if client == "host" { "" } else { "_beyond" };
        for (name, case) in [("ebpf", "ebpf_host"), ("ebpf_netns", "ebpf_netns")] {
            if let Some(ours) = of(case) {
                record.insert_ratio(
                    &format!("ping_added_{name}_vs_recipe{suffix}"),
                    ours / recipe,
                );
            }
        }
    }
}

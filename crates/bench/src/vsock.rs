//! The suite `vsock`: how fast bytes and messages pass the service for vsock, and what they cost.
//!
//! Guests are drivers on real virtqueues in this process (no VM): each byte is copied between the ring and a
//! private buffer, and buffers for what comes have 4 KiB, as in Linux. The service is a process of its own
//! with one worker. `vhost-device-vsock` is driven by the same code, and a plain Unix socket is the limit.
//! All take turns within a round.

mod backend;
mod buffer;
mod connects;
mod echo;
mod figure;
mod fleet;
mod host;
mod idle;
mod limit;
mod neighbour;
mod pages;
mod peer;
mod relay;
mod role;
mod throughput;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use sandwire_vsock_host::limits::Limits;

use crate::{
    extent::{self, Pace},
    host::HostFacts,
    progress::Step,
    record::Record,
    statistics::{median, percentile},
};
use backend::Program;
use throughput::{Direction, Place};

pub(crate) use figure::{FIGURE_CASES, USER_BUFFER};
pub(crate) use peer::install as install_peer;

/// The service with one guest.
const OURS: &str = "sandwire";
/// The service with many.
const OURS_MANY: &str = "sandwire_100_vms";
/// The service that polls.
const POLLING: &str = "sandwire_polling";
const PEER: &str = "vhost_device_vsock";
const PEER_MANY: &str = "vhost_device_vsock_100_vms";
const BARE_HOPS: &str = "bare_hops";
/// The kernel's memory.
const PAGES: &str = "memory";
const SPLICE: &str = "relay_splice";
const COPY: &str = "relay_copy";

/// Sizes of writes, and what they are called.
const WRITES: [(&str, usize); 3] = [("64", 64), ("4k", 4096), ("64k", 65_536)];
/// How long the polling service looks for work.
const BUSY_POLL: Duration = Duration::from_millis(2);

/// Parts of the suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// One guest.
    One,
    /// Many guests.
    Many,
    /// vhost-device-vsock with one guest and with many.
    Peer,
    /// Unix sockets alone.
    Limit,
    /// Wake-ups alone, and a service that polls.
    Echo,
    /// The hybrid router.
    Relay,
    /// Throughput by sizes of buffers.
    Figure,
    /// Memory of idle guests.
    Idle,
    /// A guest beside hostile ones.
    Neighbour,
}

impl extent::Part for Part {
    const QUICK: Pace = Pace {
        rounds: 1,
        milliseconds: 300,
    };
    const FULL: Pace = Pace {
        rounds: 5,
        milliseconds: 1000,
    };
}

/// How much of the suite is run.
pub(crate) type Extent = extent::Extent<Part>;

/// Guests of the measurement with many.
const VMS: u32 = 100;

/// Round trips of each measurement.
fn echoes(extent: &Extent) -> u32 {
    if extent.is_quick() { 2000 } else { 5000 }
}

/// Guests of the measurement of idle ones.
fn idle_vms(extent: &Extent) -> u32 {
    if extent.is_quick() { 200 } else { 1000 }
}

/// Where `vhost-device-vsock` is, or why there is none.
#[derive(Clone, Debug)]
pub(crate) enum Peer {
    At(PathBuf),
    Missing(String),
}

/// Runs the suite. To be called inside a private host.
pub(crate) fn run(extent: &Extent, peer: &Peer) -> Result<Record> {
    let settings = BTreeMap::from([
        ("rounds".to_owned(), u64::from(extent.rounds())),
        ("milliseconds".to_owned(), u64::from(extent.milliseconds())),
        ("echoes".to_owned(), u64::from(echoes(extent))),
        ("vms".to_owned(), u64::from(VMS)),
        ("idle_vms".to_owned(), u64::from(idle_vms(extent))),
        ("worker_threads".to_owned(), 1),
        ("driver_threads".to_owned(), 1),
        (
            "hostile_connects_per_second".to_owned(),
            neighbour::CONNECTS_PER_SECOND.into(),
        ),
        (
            "guest_buffer_bytes".to_owned(),
            backend::GUEST_BUFFER.into(),
        ),
        (
            "queue_size".to_owned(),
            backend::guest_settings().queue_size.into(),
        ),
    ]);
    let mut record = Record::new("vsock", HostFacts::read()?, settings);
    if extent.has(Part::Idle) {
        memory(extent, &mut record);
    }
    let mut lanes = lanes(extent, peer, &mut record);
    for round in 1..=extent.rounds() {
        let _step = Step::begin(&format!("round {round} of {}", extent.rounds()), 1);
        lanes.retain_mut(|lane| match lane.round(extent, &mut record) {
            Ok(()) => true,
            Err(error) => {
                record.not_run(
                    &format!("{}, from round {round} on", lane.case),
                    &format!("{error:#}"),
                );
                false
            }
        });
        others(extent, &mut record);
    }
    drop(lanes);
    add_ratios(&mut record);
    Ok(record)
}

/// A service with its guests, and what is measured of it.
struct Lane {
    case: &'static str,
    place: Place,
    /// Names and sizes of writes.
    writes: &'static [(&'static str, usize)],
    has_latency: bool,
}

fn lanes(extent: &Extent, peer: &Peer, record: &mut Record) -> Vec<Lane> {
    let ours = Program::sandwire();
    let mut plans = Vec::new();
    if extent.has(Part::One) {
        plans.push((OURS, ours, 1, &WRITES[..]));
    }
    if extent.has(Part::Many) {
        plans.push((OURS_MANY, ours, VMS, &WRITES[..]));
    }
    match peer {
        Peer::At(path) if extent.has(Part::Peer) => {
            let theirs = Program::VhostDevice(path);
            plans.push((PEER, theirs, 1, &WRITES[..]));
            plans.push((PEER_MANY, theirs, VMS, &WRITES[2..]));
        }
        Peer::At(_) => {}
        Peer::Missing(reason) => record.not_run(PEER, reason),
    }
    let mut lanes = Vec::new();
    for (case, program, vms, writes) in plans {
        let _step = Step::begin(&format!("start {case}"), 1);
        match Place::build(program, vms as usize) {
            Ok(place) => lanes.push(Lane {
                case,
                place,
                writes,
                has_latency: vms == 1,
            }),
            Err(error) => record.not_run(case, &format!("{error:#}")),
        }
    }
    lanes
}

impl Lane {
    fn round(&mut self, extent: &Extent, record: &mut Record) -> Result<()> {
        for (name, write) in self.writes {
            for direction in Direction::ALL {
                let metric = format!("{}_{name}", direction.name());
                let outcome = self.place.measure(direction, *write, extent.time());
                let figures = outcome.with_context(|| {
                    format!(
                        "{metric} failed; the service said: {}",
                        self.place.backend.log()
                    )
                })?;
                ensure!(figures.bytes > 0, "{metric}: nothing arrived");
                figures.add(record, self.case, &metric);
            }
        }
        if self.has_latency {
            let samples = echo::sleeping(&mut self.place, echoes(extent)).context("echo")?;
            add_echo(record, self.case, &samples);
            let rate = connects::measure(&mut self.place, extent.time()).context("connects")?;
            record.add(self.case, "connects", "per second", &[rate]);
        }
        match self.place.violations() {
            Some(violation) if self.case != PEER && self.case != PEER_MANY => {
                ensure!(false, "the device broke a rule: {violation}");
            }
            _ => {}
        }
        Ok(())
    }
}

fn add_echo(record: &mut Record, case: &str, samples: &[f64]) {
    record.add_summary(case, "echo_samples", "us", samples);
    for (metric, percent) in [("echo_p50", 50), ("echo_p99", 99)] {
        if let Some(value) = percentile(samples, percent) {
            record.add(case, metric, "us", &[value]);
        }
    }
}

/// What isn't a service with guests that stay: limits, hops, polling, relays, and the talk's figure.
fn others(extent: &Extent, record: &mut Record) {
    if extent.has(Part::Limit) {
        limits(extent, record);
    }
    if extent.has(Part::Echo) {
        attempt(record, BARE_HOPS, |record| {
            add_echo(record, BARE_HOPS, &echo::bare_hops(echoes(extent))?);
            Ok(())
        });
        attempt(record, POLLING, |record| {
            let program = Program::Sandwire {
                busy_poll: BUSY_POLL,
                connection_bytes: Limits::default().connection_bytes,
                connects_per_second: backend::NO_LIMIT,
            };
            let mut place = Place::build(program, 1)?;
            add_echo(record, POLLING, &echo::polling(&mut place, echoes(extent))?);
            Ok(())
        });
    }
    if extent.has(Part::Relay) {
        relays(extent, record);
    }
    if extent.has(Part::Neighbour) {
        attempt(record, neighbour::BESIDE, |record| {
            neighbour::measure(extent.time(), record)
        });
    }
    if extent.has(Part::Figure) {
        figure::measure(extent.time() / 2, record);
    }
}

fn limits(extent: &Extent, record: &mut Record) {
    let (fresh, used) = pages::measure();
    record.add(PAGES, "fresh_page", "us", &[fresh]);
    record.add(PAGES, "used_page", "us", &[used]);
    for (case, buffer) in limit::SEND_BUFFERS {
        for (name, write) in WRITES {
            attempt(record, case, |record| {
                let rate = limit::measure(buffer, write, host::READ_BYTES, extent.time())?;
                record.add(case, &format!("unix_{name}"), "Gbit/s", &[rate]);
                Ok(())
            });
        }
    }
    attempt(record, limit::SPREAD, |record| {
        let (name, write) = WRITES[2];
        let rate = limit::measure(Some(4 << 20), write, limit::SPREAD_BYTES, extent.time())?;
        record.add(limit::SPREAD, &format!("unix_{name}"), "Gbit/s", &[rate]);
        Ok(())
    });
}

fn relays(extent: &Extent, record: &mut Record) {
    let relays = [
        (
            SPLICE,
            relay::by_splice as fn(Duration) -> Result<relay::Figures>,
        ),
        (COPY, relay::by_copying),
    ];
    for (case, measure) in relays {
        attempt(record, case, |record| {
            let figures = measure(extent.time())?;
            record.add(case, "relay", "Gbit/s", &[figures.gigabits]);
            record.add(case, "relay_cpu_per_gib", "s", &[figures.cpu_per_gibibyte]);
            Ok(())
        });
    }
}

fn memory(extent: &Extent, record: &mut Record) {
    let _step = Step::begin(&format!("{} idle guests", idle_vms(extent)), 1);
    attempt(record, "idle", |record| {
        let kibibytes = idle::measure(idle_vms(extent) as usize)?;
        record.add("idle", "memory_per_vm", "KiB", &[kibibytes]);
        Ok(())
    });
}

/// Does something that others can do without: a failure is a reason in the record.
fn attempt(record: &mut Record, case: &str, job: impl FnOnce(&mut Record) -> Result<()>) {
    if let Err(error) = job(record) {
        record.not_run(case, &format!("{error:#}"));
    }
}

fn add_ratios(record: &mut Record) {
    for direction in Direction::ALL.map(Direction::name) {
        for (write, _) in WRITES {
            let metric = format!("{direction}_{write}");
            let name = format!("{metric}_vs_vhost_device");
            record.add_ratio(&name, (OURS, &metric), (PEER, &metric));
            let limit = format!("unix_{write}");
            if let Some(best) = best_limit(record, &limit) {
                record.add_ratio(
                    &format!("{metric}_vs_uds_limit"),
                    (OURS, &metric),
                    (best, &limit),
                );
            }
        }
    }
    for (name, metric) in [
        ("echo_p50_vs_bare_hops", "echo_p50"),
        ("echo_p99_vs_bare_hops", "echo_p99"),
    ] {
        record.add_ratio(name, (OURS, metric), (BARE_HOPS, metric));
    }
    let cost = "relay_cpu_per_gib";
    record.add_ratio("relay_cpu_vs_copy", (SPLICE, cost), (COPY, cost));
    for (name, case, base) in [
        ("throughput_100_vms_vs_1", OURS_MANY, OURS),
        (
            "neighbour_beside_hostile_vs_alone",
            neighbour::BESIDE,
            neighbour::ALONE,
        ),
    ] {
        if let Some(ratio) = worse_direction(record, case, base) {
            record.insert_ratio(name, ratio);
        }
    }
    for (name, case, metric) in [
        ("echo_p99_us_polling", POLLING, "echo_p99"),
        ("idle_vm_kib", "idle", "memory_per_vm"),
    ] {
        if let Some(value) = record.row(case, metric).map(|row| row.median) {
            record.insert_ratio(name, value);
        }
    }
}

/// Of writes of 64 KiB, by the direction that suffers more: the one that counts.
fn worse_direction(record: &Record, case: &str, base: &str) -> Option<f64> {
    let of = |metric: &str| {
        let figure = |case| median(&record.row(case, metric)?.samples);
        Some(figure(case)? / figure(base)?)
    };
    Some(of("g2h_64k")?.min(of("h2g_64k")?))
}

/// The size of a socket's buffer with which a Unix socket is fastest.
fn best_limit(record: &Record, metric: &str) -> Option<&'static str> {
    let rows = limit::SEND_BUFFERS
        .iter()
        .filter_map(|(case, _)| Some((*case, record.row(case, metric)?.median)));
    rows.max_by(|one, other| one.1.total_cmp(&other.1))
        .map(|(case, _)| case)
}

/// Runs what the suite starts as a process of its own.
pub(crate) fn stand_in(name: &str) -> Result<()> {
    ensure!(name == echo::BARE_HOPS, "there is no stand-in '{name}'");
    echo::stand_in()
}

/// Whether that is an executable file's path, as far as can be told.
pub(crate) fn check_peer(path: &Path) -> Result<()> {
    ensure!(
        path.is_file(),
        "--peer {}: there is no such file",
        path.display()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_take_the_best_limit_and_the_worse_direction() {
        let mut record = Record::new("vsock", HostFacts::default(), BTreeMap::new());
        for (case, metric, value) in [
            (OURS, "g2h_64k", 40.0),
            (OURS, "h2g_64k", 30.0),
            (OURS_MANY, "g2h_64k", 38.0),
            (OURS_MANY, "h2g_64k", 24.0),
            (neighbour::ALONE, "g2h_64k", 20.0),
            (neighbour::ALONE, "h2g_64k", 20.0),
            (neighbour::BESIDE, "g2h_64k", 16.0),
            (neighbour::BESIDE, "h2g_64k", 18.0),
            ("unix_socket_default", "unix_64k", 50.0),
            ("unix_socket_4m", "unix_64k", 60.0),
            ("idle", "memory_per_vm", 20.0),
        ] {
            record.add(case, metric, "", &[value]);
        }
        add_ratios(&mut record);
        assert_eq!(record.ratios["h2g_64k_vs_uds_limit"], 0.5);
        assert_eq!(record.ratios["throughput_100_vms_vs_1"], 0.8);
        assert_eq!(record.ratios["neighbour_beside_hostile_vs_alone"], 0.8);
        assert_eq!(record.ratios["idle_vm_kib"], 20.0);
        assert!(!record.ratios.contains_key("g2h_4k_vs_vhost_device"));
    }
}

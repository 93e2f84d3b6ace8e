//! Time to acquire a lease over the API, from request to answer, as a client sees it.
//!
//! In a daemon at rest, while it refills, from many clients at once, and while it tears slots down.

use std::{
    sync::{
        Barrier,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Instant,
};

use anyhow::{Context, Result, anyhow};
use sandwire_api::{client::Blocking, lease::AcquireLease, name::Name};

use super::{Round, with_daemon};
use crate::{
    daemon_process::{DaemonProcess, Families, pool},
    record::Record,
    statistics,
};

/// Clients that acquire at the same moment.
const CLIENTS: u32 = 30;

/// Latencies in microseconds, and the leases that they are of.
#[derive(Default)]
struct Acquisitions {
    latencies: Vec<f64>,
    names: Vec<Name>,
}

/// Measures all four situations with one daemon.
pub(super) fn run(round: &Round, record: &mut Record) -> Result<()> {
    let slots = round.sizes.acquire_slots;
    let step = round.step(&format!("acquire at {slots} ready slots"), slots);
    with_daemon(|daemon| {
        let spec = pool(slots, Families::Dual)?;
        let pool = &spec.name;
        daemon.fill(&spec, &step)?;
        let mut held = Vec::new();

        let at_rest = acquire_at_rest(daemon, pool, slots)?;
        held.extend(add_rows(record, "acquire_at_rest", at_rest));

        let refill = acquire_in_a_row(daemon.client(), pool, slots / 2, || true)?;
        held.extend(add_rows(record, "acquire_during_refill", refill));
        daemon.wait_full(pool, slots)?;

        let at_once = acquire_at_once(daemon, pool, slots * 3 / 5 / CLIENTS)?;
        held.extend(add_rows(record, "acquire_30_clients", at_once));
        daemon.wait_full(pool, slots)?;

        let teardown = acquire_during_teardown(daemon, pool, &held, slots * 3 / 4)?;
        let held = add_rows(record, "acquire_during_teardown", teardown);
        for name in &held {
            daemon.client().release(name, None)?;
        }
        daemon.delete(pool)?;
        Ok(())
    })
}

fn add_rows(record: &mut Record, case: &str, acquisitions: Acquisitions) -> Vec<Name> {
    let latencies = &acquisitions.latencies;
    for (metric, percent) in [("acquire_p50_us", 50), ("acquire_p99_us", 99)] {
        let figure = statistics::percentile(latencies, percent);
        record.add(case, metric, "us", figure.as_slice());
    }
    record.add(case, "acquire_us", "us", latencies);
    acquisitions.names
}

/// One client; before each request, the pool is full and nothing else is being done.
fn acquire_at_rest(daemon: &DaemonProcess, pool: &Name, slots: u32) -> Result<Acquisitions> {
    let mut acquisitions = Acquisitions::default();
    let client = daemon.new_client();
    for _ in 0..slots * 3 / 10 {
        acquisitions.acquire(&client, pool)?;
        daemon.wait_full(pool, slots)?;
    }
    Ok(acquisitions)
}

/// One client, one request after another, so that the pool refills all the time.
fn acquire_in_a_row(
    client: &Blocking,
    pool: &Name,
    count: u32,
    wanted: impl Fn() -> bool,
) -> Result<Acquisitions> {
    let mut acquisitions = Acquisitions::default();
    for _ in 0..count {
        if !wanted() {
            break;
        }
        acquisitions.acquire(client, pool)?;
    }
    Ok(acquisitions)
}

/// Many clients, each with a connection of its own, all at once.
fn acquire_at_once(daemon: &DaemonProcess, pool: &Name, count: u32) -> Result<Acquisitions> {
    let barrier = Barrier::new(CLIENTS as usize);
    let results: Vec<Result<Acquisitions>> = thread::scope(|scope| {
        let work = || {
            let client = daemon.new_client();
            let connected = client.health();
            barrier.wait();
            connected?;
            acquire_in_a_row(&client, pool, count, || true)
        };
        let threads: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(work)).collect();
        threads.into_iter().map(joined).collect()
    });
    let mut all = Acquisitions::default();
    for result in results {
        let one = result?;
        all.latencies.extend(one.latencies);
        all.names.extend(one.names);
    }
    Ok(all)
}

/// One client acquires for as long as another one releases what is held.
fn acquire_during_teardown(
    daemon: &DaemonProcess,
    pool: &Name,
    held: &[Name],
    count_max: u32,
) -> Result<Acquisitions> {
    let releasing = AtomicBool::new(true);
    thread::scope(|scope| {
        let releaser = scope.spawn(|| {
            let client = daemon.new_client();
            let outcome = held
                .iter()
                .try_for_each(|name| client.release(name, None).map(drop));
            releasing.store(false, Ordering::Relaxed);
            outcome.context("cannot release a lease")
        });
        let acquired = acquire_in_a_row(daemon.client(), pool, count_max, || {
            releasing.load(Ordering::Relaxed)
        });
        joined(releaser)?;
        acquired
    })
}

fn joined<T>(thread: thread::ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread
        .join()
        .map_err(|_| anyhow!("a client's thread panicked"))?
}

impl Acquisitions {
    fn acquire(&mut self, client: &Blocking, pool: &Name) -> Result<()> {
        let request = AcquireLease {
            pool: pool.clone(),
            name: None,
            clone_address: None,
            ttl_seconds: None,
            policy: None,
            process: false,
            vsock: None,
            attach: None,
        };
        let started = Instant::now();
        let acquired = client.acquire(&request)?;
        self.latencies.push(started.elapsed().as_secs_f64() * 1e6);
        self.names.push(acquired.lease.name);
        Ok(())
    }
}

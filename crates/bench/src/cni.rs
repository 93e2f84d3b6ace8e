//! The suite `cni`: how long a container runtime waits for an `ADD`, one at a time and thirty at once, from the start of the
//! plugin's process to its end.
//!
//! Beside ours stands the reference plugin `bridge` with `host-local`, where it is installed. Both take turns within a round,
//! in namespaces that have been made before.

mod runtime;

use std::{
    collections::BTreeMap,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use sandwire_api::{name::Name, pool::PoolSpec};
use serde_json::json;

use crate::{
    daemon_process::DaemonProcess, host::HostFacts, private_host, progress::Step, record::Record,
    statistics,
};
use runtime::{Containers, Plugin};

/// Containers that come at the same moment.
const AT_ONCE: u32 = 30;
/// Names of the metrics.
const ADD: &str = "add_ms";
const ADD_AT_ONCE: &str = "add_30_ms";
const DEL: &str = "del_ms";
/// Case of the plugin with one address family, as the reference plugin has it.
const OURS: &str = "sandwire";
/// Case of the plugin with both.
const OURS_DUAL: &str = "sandwire_dual_stack";

/// Sizes of the suite.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Containers that come one after the other, in all rounds.
    pub(crate) containers: u32,
    /// Rounds of thirty at once.
    pub(crate) rounds: u32,
}

impl Sizes {
    /// Sizes that the project's figures are stated for.
    pub(crate) const FULL: Self = Self {
        containers: 100,
        rounds: 10,
    };
    /// Sizes for a first impression.
    pub(crate) const QUICK: Self = Self {
        containers: 20,
        rounds: 2,
    };
}

/// Runs the suite. To be called inside a private host.
pub(crate) fn run(sizes: Sizes) -> Result<Record> {
    let settings = BTreeMap::from([
        ("containers".to_owned(), u64::from(sizes.containers)),
        ("rounds".to_owned(), u64::from(sizes.rounds)),
        ("at_once".to_owned(), u64::from(AT_ONCE)),
    ]);
    let mut record = Record::new("cni", HostFacts::read()?, settings);
    private_host::settle()?;
    let folder = tempfile::tempdir_in("/run")?;
    let mut daemon = DaemonProcess::start(folder.path())?;
    let measured = measure(&daemon, folder.path(), sizes, &mut record);
    measured.with_context(|| daemon.state())?;
    daemon.stop()?;
    let p50 = |metric| Some(record.row(OURS_DUAL, metric)?.median);
    let (add, at_once) = (p50(ADD), p50(ADD_AT_ONCE));
    for (name, figure) in [("cni_add_p50_ms", add), ("cni_add_30_p50_ms", at_once)] {
        if let Some(figure) = figure {
            record.insert_ratio(name, figure);
            record.note(name, "of the case sandwire_dual_stack, in milliseconds");
        }
    }
    record.add_ratio("cni_add_vs_bridge", (OURS, ADD), (runtime::BRIDGE, ADD));
    record.add_ratio(
        "cni_add_30_vs_bridge",
        (OURS, ADD_AT_ONCE),
        (runtime::BRIDGE, ADD_AT_ONCE),
    );
    Ok(record)
}

/// A plugin, and the pool that has to be full before it is asked.
struct Contender {
    case: &'static str,
    plugin: Plugin,
    pool: Option<Name>,
}

fn measure(
    daemon: &DaemonProcess,
    folder: &std::path::Path,
    sizes: Sizes,
    record: &mut Record,
) -> Result<()> {
    let mut contenders = Vec::new();
    let step = Step::begin("fill two pools for containers", AT_ONCE);
    for (case, spec) in [
        (
            OURS,
            pool("v4", json!({ "plan": "prefix", "ipv4": "10.64.0.0/16" }))?,
        ),
        (
            OURS_DUAL,
            pool(
                "dual",
                json!({ "plan": "prefix", "ipv4": "10.65.0.0/16", "ipv6": "fd00:c10e::/64" }),
            )?,
        ),
    ] {
        daemon.fill(&spec, &step)?;
        contenders.push(Contender {
            case,
            plugin: Plugin::ours(folder, &spec.name)?,
            pool: Some(spec.name),
        });
    }
    drop(step);
    match Plugin::bridge(folder) {
        Ok(plugin) => contenders.push(Contender {
            case: runtime::BRIDGE,
            plugin,
            pool: None,
        }),
        Err(reason) => record.not_run(runtime::BRIDGE, &reason),
    }
    one_by_one(daemon, &contenders, sizes.containers, record)?;
    let step = Step::begin("thirty containers at once", sizes.rounds);
    for round in 0..sizes.rounds {
        for contender in &contenders {
            at_once(daemon, contender, record)?;
        }
        step.at(round + 1);
    }
    Ok(())
}

/// A pool that holds one burst.
fn pool(name: &str, addresses: serde_json::Value) -> Result<PoolSpec> {
    let mut spec = json!({
        "name": name,
        "kind": "container",
        "data_path": "ebpf",
        "size": AT_ONCE + 2,
        "quarantine_seconds": 0,
    });
    if addresses.get("ipv6").is_none() {
        spec["guest"] = json!({ "ipv6": "" });
    }
    spec["addresses"] = addresses;
    serde_json::from_value(spec).context("the benchmark's pool is not a valid one")
}

/// Nothing else is being done while a container comes or goes.
fn rest(daemon: &DaemonProcess, contender: &Contender) -> Result<()> {
    match &contender.pool {
        Some(pool) => daemon.wait_full(pool, AT_ONCE + 2),
        None => Ok(()),
    }
}

fn one_by_one(
    daemon: &DaemonProcess,
    contenders: &[Contender],
    count: u32,
    record: &mut Record,
) -> Result<()> {
    let step = Step::begin("containers one by one", count);
    for number in 0..count {
        for contender in contenders {
            let containers = Containers::create(contender.case, 1)?;
            rest(daemon, contender)?;
            let started = Instant::now();
            contender.plugin.add(&containers, 0)?;
            let added = started.elapsed();
            rest(daemon, contender)?;
            let started = Instant::now();
            contender.plugin.del(&containers, 0)?;
            record.add(contender.case, ADD, "ms", &[milliseconds(added)]);
            record.add(
                contender.case,
                DEL,
                "ms",
                &[milliseconds(started.elapsed())],
            );
        }
        step.at(number + 1);
    }
    Ok(())
}

/// A runtime with thirty threads, each with a container: how long each waits.
fn at_once(daemon: &DaemonProcess, contender: &Contender, record: &mut Record) -> Result<()> {
    let containers = Containers::create(contender.case, AT_ONCE)?;
    rest(daemon, contender)?;
    let barrier = Barrier::new(AT_ONCE as usize);
    let waits: Vec<Result<Duration>> = thread::scope(|scope| {
        let (containers, barrier) = (&containers, &barrier);
        let add = |number| {
            move || {
                barrier.wait();
                let started = Instant::now();
                contender.plugin.add(containers, number)?;
                Ok(started.elapsed())
            }
        };
        let threads: Vec<_> = (0..AT_ONCE)
            .map(|number| scope.spawn(add(number)))
            .collect();
        let joined = threads.into_iter().map(|thread| {
            let outcome = thread.join();
            outcome.map_err(|_| anyhow!("a thread of the runtime panicked"))?
        });
        joined.collect()
    });
    let waits: Vec<f64> = waits
        .into_iter()
        .map(|wait| wait.map(milliseconds))
        .collect::<Result<_>>()?;
    let p50 = statistics::percentile(&waits, 50);
    record.add(contender.case, ADD_AT_ONCE, "ms", p50.as_slice());
    let longest = statistics::percentile(&waits, 100);
    record.add(
        contender.case,
        "add_30_longest_ms",
        "ms",
        longest.as_slice(),
    );
    for number in 0..AT_ONCE {
        contender.plugin.del(&containers, number)?;
    }
    Ok(())
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

//! SIGKILL at random moments under load, judged by a model of what must hold.
//!
//! Eight clients acquire and release leases over the API while the daemon is killed again and again.
//! After each restart the clients stand still and the daemon's leases are compared with what it had
//! acknowledged: nothing lost, nothing resurrected, no slot held twice. At the end everything is
//! released: the kernel must have the interfaces of the slots that wait and no others, and without the
//! pool be as it was before. The run's seed is printed; `SANDWIRE_TEST_SEED` repeats the sequence of
//! decisions (not the kernel's timing).

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

use std::{
    collections::{BTreeMap, HashSet},
    env,
    sync::{
        Mutex, RwLock,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use sandwire_testlab::{
    lab::{self, Lab},
    sandwire,
};
use serde_json::{Value, json};

const CLIENTS: usize = 8;
/// Leases that come and go, at least.
const CYCLES: usize = 400;
const KILLS: usize = 12;
const SIZE: usize = 24;
const PATIENCE: Duration = Duration::from_secs(600);

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn sigkill_at_random_moments_loses_no_lease_and_leaks_nothing() {
    lab::run_within(PATIENCE, |lab| hammer(lab, "netns", "nft"));
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn sigkill_loses_no_lease_and_leaks_nothing_in_netns_slots_of_ebpf() {
    lab::run_within(PATIENCE, |lab| hammer(lab, "netns", "ebpf"));
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn sigkill_loses_no_lease_and_leaks_nothing_in_host_slots() {
    lab::run_within(PATIENCE, |lab| hammer(lab, "host", "ebpf"));
}

#[expect(
    clippy::print_stdout,
    reason = "who reads of a failure repeats it by the seed"
)]
fn hammer(lab: &Lab, kind: &str, data_path: &str) {
    let seed = seed();
    println!("seed {seed} (repeat with SANDWIRE_TEST_SEED={seed})");
    let before = lab.snapshot();
    let interfaces = interfaces(lab);
    let executable = sandwire::executable().unwrap();
    let config = config(kind, data_path);
    let daemon = sandwire::Daemon::start(&executable, lab.folder(), &config).unwrap();
    let world = World {
        daemon: RwLock::new(daemon),
        model: Mutex::default(),
        cycles: AtomicUsize::new(0),
        kills: AtomicUsize::new(0),
    };
    thread::scope(|scope| {
        for client in 0..CLIENTS {
            let world = &world;
            scope.spawn(move || run_client(world, client, Random(seed ^ client as u64)));
        }
        kill_and_check(&world, Random(!seed));
    });
    let (kills, cycles) = (world.kills.into_inner(), world.cycles.into_inner());
    println!("{kills} kills in {cycles} cycles");
    let mut daemon = world.daemon.into_inner().unwrap();
    release_everything(&daemon);
    assert_slots_are_all(lab, &interfaces);
    daemon.json("pool delete web").unwrap();
    daemon.terminate().unwrap();
    assert_only_programs_are_left(&daemon, data_path);
    lab.assert_unchanged(&before);
}

fn config(kind: &str, data_path: &str) -> String {
    format!(
        r#"
instance = "crash"
[[pool]]
name = "web"
kind = "{kind}"
size = {SIZE}
quarantine_seconds = 0
data_path = "{data_path}"
addresses = {{ plan = "prefix", ipv4 = "10.64.0.0/24", ipv6 = "fd00:c10e::/64" }}
"#
    )
}

/// Names and aliases of the host's interfaces.
fn interfaces(lab: &Lab) -> BTreeMap<String, String> {
    let listed: Value = serde_json::from_str(&lab.run("ip -j link")).unwrap();
    let text = |field: &Value| field.as_str().unwrap_or_default().to_owned();
    let listed = listed.as_array().unwrap().iter();
    listed
        .map(|found| (text(&found["ifname"]), text(&found["ifalias"])))
        .collect()
}

/// Waits until the host has one interface for each slot that waits, one for all, and no other.
fn assert_slots_are_all(lab: &Lab, before: &BTreeMap<String, String>) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let mut new = interfaces(lab);
        new.retain(|name, _| !before.contains_key(name));
        let is_slot = |alias: &&String| alias.starts_with("sandwire:crash:web:");
        let slots: HashSet<_> = new.values().filter(is_slot).collect();
        if slots.len() == SIZE && new.len() == SIZE + 1 {
            return;
        }
        assert!(Instant::now() < deadline, "leaked, or not filled: {new:?}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Maps and programs are pinned until `sandwire cleanup`, which must find nothing else but the journal.
fn assert_only_programs_are_left(daemon: &sandwire::Daemon, data_path: &str) {
    let state = daemon.state_folder();
    let cleanup = format!("cleanup --instance crash --state-dir {}", state.display());
    let report = daemon.json(&cleanup).unwrap();
    let found = report["found"].as_array().unwrap().iter();
    let kinds: Vec<_> = found.map(|found| found["kind"].as_str().unwrap()).collect();
    let expected: &[&str] = if data_path == "ebpf" {
        &["programs", "journal"]
    } else {
        &["journal"]
    };
    assert_eq!(kinds, expected, "{report:#}");
}

/// What the test knows of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    /// The daemon acknowledged it, on this slot.
    Acquired(u64),
    /// Asked for, without an answer: it may or may not be there.
    PerhapsAcquired,
    /// The release got no answer: it may or may not be there.
    PerhapsReleased,
    /// The daemon acknowledged the release.
    Released,
}

struct World {
    /// Read by clients for each request, written by the killer to check in peace.
    daemon: RwLock<sandwire::Daemon>,
    model: Mutex<BTreeMap<String, Known>>,
    cycles: AtomicUsize,
    kills: AtomicUsize,
}

impl World {
    fn is_enough(&self) -> bool {
        self.cycles.load(Ordering::Relaxed) >= CYCLES && self.kills.load(Ordering::Relaxed) >= KILLS
    }

    fn know(&self, name: &str, known: Known) {
        self.model.lock().unwrap().insert(name.to_owned(), known);
    }
}

fn run_client(world: &World, client: usize, mut random: Random) {
    let mut held: Vec<String> = Vec::new();
    let mut number = 0;
    while !world.is_enough() {
        if held.len() < 3 && random.below(2) == 0 {
            number += 1;
            let name = format!("c{client}-{number}");
            if acquire(world, &name) {
                held.push(name);
            }
        } else if !held.is_empty() {
            let at = random.below(held.len() as u64);
            let name = held.swap_remove(usize::try_from(at).unwrap());
            release(world, &name);
            world.cycles.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Returns whether the lease may exist.
fn acquire(world: &World, name: &str) -> bool {
    let daemon = world.daemon.read().unwrap();
    world.know(name, Known::PerhapsAcquired);
    let body = json!({"pool": "web", "name": name});
    match daemon.http("POST", "/v1/leases", Some(&body)) {
        Ok(answer) if answer.status == 201 || answer.status == 200 => {
            let slot = answer.json().unwrap()["slot"].as_u64().unwrap();
            world.know(name, Known::Acquired(slot));
            true
        }
        Ok(answer) => {
            let code = answer.json().unwrap()["code"]
                .as_str()
                .unwrap_or_default()
                .to_owned();
            assert!(
                ["pool_empty", "unavailable"].contains(&code.as_str()),
                "acquire {name}: {}",
                answer.body
            );
            world.know(name, Known::Released);
            drop(daemon);
            thread::sleep(Duration::from_millis(3));
            false
        }
        Err(_) => {
            drop(daemon);
            thread::sleep(Duration::from_millis(3));
            true
        }
    }
}

fn release(world: &World, name: &str) {
    let daemon = world.daemon.read().unwrap();
    let before = world.model.lock().unwrap()[name];
    world.know(name, Known::PerhapsReleased);
    match daemon.http("DELETE", &format!("/v1/leases/{name}"), None) {
        Ok(answer) if answer.status == 200 => world.know(name, Known::Released),
        // Only a lease whose acquire got no answer may be unknown.
        Ok(answer) if answer.status == 404 => {
            assert!(
                !matches!(before, Known::Acquired(_)),
                "{name} was {before:?}, now unknown"
            );
            world.know(name, Known::Released);
        }
        Ok(answer) => assert_eq!(answer.status, 503, "release {name}: {}", answer.body),
        Err(_) => {}
    }
}

/// Kills and restarts the daemon until the clients are through.
fn kill_and_check(world: &World, mut random: Random) {
    while !world.is_enough() {
        thread::sleep(Duration::from_millis(20 + random.below(400)));
        let pid = world.daemon.read().unwrap().pid().unwrap();
        // Without the lock, so that requests are cut off in the middle.
        let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        let mut daemon = world.daemon.write().unwrap();
        daemon.kill().unwrap();
        daemon.restart().unwrap();
        check(&daemon, &world.model.lock().unwrap());
        world.kills.fetch_add(1, Ordering::Relaxed);
    }
}

/// Compares what the daemon says after a restart with what it had acknowledged.
fn check(daemon: &sandwire::Daemon, model: &BTreeMap<String, Known>) {
    let leases = daemon.json("list").unwrap();
    let leases: BTreeMap<&str, &Value> = leases
        .as_array()
        .unwrap()
        .iter()
        .map(|lease| (lease["name"].as_str().unwrap(), lease))
        .collect();
    let mut slots = HashSet::new();
    for (name, lease) in &leases {
        let slot = lease["slot"].as_u64().unwrap();
        assert!(
            slots.insert(slot),
            "slot {slot} is leased twice: {leases:?}"
        );
        assert!(model.contains_key(*name), "nobody asked for {name}");
    }
    for (name, known) in model {
        let lease = leases.get(name.as_str());
        match known {
            Known::Acquired(slot) => {
                let lease = lease.unwrap_or_else(|| panic!("{name} was acknowledged and is lost"));
                assert_eq!(
                    lease["slot"].as_u64(),
                    Some(*slot),
                    "{name} changed its slot"
                );
            }
            Known::Released => assert!(lease.is_none(), "{name} came back"),
            Known::PerhapsAcquired | Known::PerhapsReleased => {}
        }
    }
}

fn release_everything(daemon: &sandwire::Daemon) {
    for lease in daemon.json("list").unwrap().as_array().unwrap() {
        // A release that a kill has cut off ends by itself, perhaps before it is asked for again.
        if lease["state"] == "releasing" {
            continue;
        }
        let name = lease["name"].as_str().unwrap();
        daemon.json(&format!("release {name}")).unwrap();
    }
    let deadline = Instant::now() + Duration::from_secs(60);
    while daemon.json("list").unwrap() != json!([]) {
        assert!(Instant::now() < deadline, "leases remain: {}", daemon.log());
        thread::sleep(Duration::from_millis(20));
    }
}

/// SplitMix64: small, seeded, the same on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (word ^ (word >> 31)) % bound
    }
}

fn seed() -> u64 {
    match env::var("SANDWIRE_TEST_SEED") {
        Ok(text) => text.parse().expect("SANDWIRE_TEST_SEED is a number"),
        Err(_) => SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |since| u64::from(since.subsec_nanos())),
    }
}

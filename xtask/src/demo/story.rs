//! What happens inside the demo's namespaces, step by step.

use std::{
    fmt::Display,
    fs,
    path::Path,
    sync::{Mutex, mpsc::channel},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use sandwire_testlab::{
    command,
    host::{BEYOND_IPV4, BEYOND_IPV6, Beyond, UPLINK},
    lab::Lab,
    sandwire::{Daemon, Lease},
    snapshot::Snapshot,
};
use serde_json::{Value, json};

use super::{
    Arguments, SlotKind,
    clone::{Clone, heading},
    guest::{Original, Saved},
    waiting,
};

/// Shows everything, and fails at the first thing that isn't as it should be.
pub(super) fn tell(arguments: &Arguments, executable: &Path) -> Result<()> {
    let lab = Lab::enter()?;
    let beyond = Beyond::attach()?;
    println!();
    say(
        "host",
        format!(
            "a private namespace; beyond its uplink {UPLINK}, a web server at {BEYOND_IPV4} and \
             {BEYOND_IPV6}"
        ),
    );
    let before = Snapshot::take()?;
    let mut daemon = start_daemon(&lab, executable, arguments)?;
    let saved = make_snapshot(&lab, &daemon, arguments)?;
    let mut clones = restore_clones(&daemon, &saved, arguments.clones)?;
    check_isolation(&clones)?;
    if arguments.kind == SlotKind::Host {
        change_policy(&daemon, &clones)?;
    }
    kill_and_restart(&mut daemon, &clones)?;
    clean_up(&mut daemon, &mut clones)?;
    before
        .wait_unchanged(Duration::from_secs(10))
        .context("the namespace that played the host is not as it was")?;
    say(
        "clean-up",
        "leases released, pool deleted, daemon ended, `sandwire cleanup`: that host is as it was \
         before the daemon, but for IP forwarding, which stays on",
    );
    drop(beyond);
    println!();
    Ok(())
}

fn start_daemon(lab: &Lab, executable: &Path, arguments: &Arguments) -> Result<Daemon> {
    let (kind, data_path) = (arguments.kind.name(), arguments.kind.data_path());
    let started = Instant::now();
    let folder = lab.folder().join("daemon");
    fs::create_dir(&folder).context("make a folder for the daemon")?;
    let daemon = Daemon::start(executable, &folder, "instance = \"demo\"\n")?;
    say("daemon", format!("ready after {}", ms(started.elapsed())));
    let slots = arguments.clones;
    let started = Instant::now();
    daemon.create_pool(&json!({
        "name": POOL,
        "kind": kind,
        "data_path": data_path,
        "size": slots,
        "addresses": {"plan": "prefix", "ipv4": "10.64.0.0/16", "ipv6": "fd00:c10e::/64"},
    }))?;
    let filled = started.elapsed();
    say(
        "pool",
        format!(
            "'{POOL}': {slots} {kind} slots with {data_path}, built in {} ({:.1} ms each)",
            ms(filled),
            filled.as_secs_f64() * 1000.0 / f64::from(slots)
        ),
    );
    Ok(daemon)
}

/// Boots the guest in a slot, saves it there, and gives the slot back.
fn make_snapshot(lab: &Lab, daemon: &Daemon, arguments: &Arguments) -> Result<Saved> {
    let lease = daemon.acquire(POOL, "original")?;
    let started = Instant::now();
    let original = waiting("booting the guest", || {
        Original::boot(
            arguments.vmm,
            arguments.kernel.as_ref(),
            lab.folder(),
            &lease.path,
            &lease.tap,
        )
    })?;
    say(
        "guest",
        format!(
            "Linux with a web server, booted in {:.1} s on {} of {}: {}",
            started.elapsed().as_secs_f64(),
            lease.tap,
            lease.namespace.as_deref().unwrap_or("the host"),
            original.manner()
        ),
    );
    let started = Instant::now();
    let saved = original.save()?;
    let (memory, state) = saved.sizes()?;
    say(
        "snapshot",
        format!(
            "saved in {}: {} MiB of memory, {} KiB of devices; its MAC and addresses are frozen{}",
            ms(started.elapsed()),
            memory >> 20,
            state >> 10,
            match arguments.kind {
                SlotKind::Netns => ", and so is its TAP's name",
                SlotKind::Host => "; each clone gets another TAP",
            }
        ),
    );
    daemon.json(&format!("release {}", lease.name))?;
    Ok(saved)
}

/// Restores all clones at once and prints each as it comes up.
fn restore_clones(daemon: &Daemon, saved: &Saved, count: u16) -> Result<Vec<Clone>> {
    daemon.wait_pool(POOL, u64::from(count), Duration::from_secs(60))?;
    let mut leases = Vec::new();
    let mut slowest = Duration::ZERO;
    for number in 1..=count {
        let started = Instant::now();
        leases.push(daemon.acquire(POOL, &format!("clone-{number}"))?);
        slowest = slowest.max(started.elapsed());
    }
    say(
        "leases",
        format!(
            "{count} acquired, each in at most {} with its command",
            ms(slowest)
        ),
    );
    say(
        "clones",
        format!(
            "{count} from that one file, copy-on-write, into {count} slots, {} at once",
            starters(saved).min(usize::from(count))
        ),
    );
    println!("\n{}", heading());
    let started = Instant::now();
    let mut clones = start_all(saved, leases)?;
    let took = started.elapsed();
    clones.sort_by_key(|clone| clone.number);
    check_values(&clones)?;
    println!();
    say(
        "result",
        format!(
            "all up and looked at in {:.1} s; asked again over IPv6, each still has its own value: \
             different machines behind one and the same guest address",
            took.as_secs_f64()
        ),
    );
    Ok(clones)
}

/// Starts a clone on each lease and prints each as it comes up. Emulated guests starve each other if too
/// many wake up together, so some wait until others are up.
fn start_all(saved: &Saved, leases: Vec<Lease>) -> Result<Vec<Clone>> {
    let waiting = Mutex::new((1..).zip(leases));
    let next = || waiting.lock().ok().and_then(|mut waiting| waiting.next());
    thread::scope(|scope| {
        let (sender, arrivals) = channel();
        for _ in 0..starters(saved) {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || {
                while let Some((number, lease)) = next() {
                    if sender.send(Clone::start(saved, lease, number)).is_err() {
                        // Another clone has failed and nobody waits for this one.
                        return;
                    }
                }
            });
        }
        drop(sender);
        let mut clones = Vec::new();
        for arrival in arrivals {
            let clone = arrival?;
            println!("{}", clone.line());
            clones.push(clone);
        }
        Ok(clones)
    })
}

/// Clones that start at the same time.
fn starters(saved: &Saved) -> usize {
    saved.kind().starts_per_core() * thread::available_parallelism().map_or(1, usize::from)
}

/// Wants no clone to reach the next one, in either family.
fn check_isolation(clones: &[Clone]) -> Result<()> {
    let started = Instant::now();
    let nexts = clones.iter().cycle().skip(1);
    let pairs: Vec<_> = clones
        .iter()
        .zip(nexts)
        .filter(|(one, other)| one.number != other.number)
        .collect();
    thread::scope(|scope| {
        let attempts: Vec<_> = pairs
            .iter()
            .flat_map(|(one, other)| [(one, other.lease.ipv4), (one, other.lease.ipv6)])
            .map(|(one, address)| {
                (
                    one.number,
                    address,
                    scope.spawn(move || one.reaches(address)),
                )
            })
            .collect();
        for (number, address, attempt) in attempts {
            let reached = attempt.join().ok().context("a clone's ping panicked")??;
            ensure!(!reached, "clone {number} reaches its neighbour {address}");
        }
        Ok(())
    })?;
    say(
        "isolation",
        format!(
            "{} pings from clone to clone, both families: none answered ({:.1} s)",
            2 * pairs.len(),
            started.elapsed().as_secs_f64()
        ),
    );
    Ok(())
}

/// Takes the world beyond away from one clone while it runs, and gives it back.
fn change_policy(daemon: &Daemon, clones: &[Clone]) -> Result<()> {
    let clone = clones.first().context("there are no clones")?;
    let (name, beyond) = (&clone.lease.name, BEYOND_IPV4.into());
    ensure!(clone.reaches(beyond)?, "{name} doesn't reach {beyond}");
    let started = Instant::now();
    daemon.set_policy(name, &json!({"egress": {"default": "deny"}}))?;
    let took = started.elapsed();
    ensure!(
        !clone.reaches(beyond)?,
        "{name} reaches {beyond} against its policy"
    );
    clone.check_value()?;
    daemon.call("DELETE", &format!("/v1/leases/{name}/policy"), None)?;
    ensure!(
        clone.reaches(beyond)?,
        "{name} doesn't reach {beyond} again"
    );
    say(
        "policy",
        format!(
            "\"egress\": deny for {name}, live in {:.1} ms: it still serves, and reaches nothing \
             beyond; with its pool's policy it does again",
            took.as_secs_f64() * 1000.0
        ),
    );
    Ok(())
}

/// Ends the daemon by SIGKILL under traffic, looks at the clones, and starts it again.
fn kill_and_restart(daemon: &mut Daemon, clones: &[Clone]) -> Result<()> {
    let leases = leases(daemon)?;
    // As often as emulated guests bear, and for as long as it takes to look at all of them meanwhile.
    let first = clones.first().context("there are no clones")?;
    let interval =
        (5 * first.time_ping()?).clamp(Duration::from_millis(20), Duration::from_secs(1));
    let started = Instant::now();
    check_values(clones)?;
    let span = Duration::from_secs(4) + 2 * started.elapsed();
    let pings = span.as_millis() / interval.as_millis();
    let traffic: Vec<_> = clones
        .iter()
        .map(|clone| {
            let (address, interval) = (clone.lease.ipv4, interval.as_secs_f64());
            let line = format!("ping -n -q -i {interval:.3} -c {pings} -W 30 {address}");
            thread::spawn(move || command::run(&line))
        })
        .collect();
    thread::sleep(Duration::from_millis(500));
    daemon.kill()?;
    let away = Instant::now();
    check_values(clones)?;
    let quiet = Duration::from_secs(1).saturating_sub(away.elapsed());
    thread::sleep(quiet);
    say(
        "kill -9",
        "the daemon is gone; every clone answers and serves its own value",
    );
    let ready = daemon.restart()?;
    let away = away.elapsed();
    let spanned = traffic.iter().all(|ping| !ping.is_finished());
    let adopted = self::leases(daemon)?;
    ensure!(
        adopted == leases,
        "leases before: {leases:?}, after: {adopted:?}"
    );
    say(
        "restart",
        format!(
            "ready after {}; it adopted all {} leases, unchanged",
            ms(ready),
            adopted.len()
        ),
    );
    for ping in traffic {
        let text = ping.join().ok().context("a ping panicked")??;
        let whole = format!("{pings} packets transmitted, {pings} received");
        ensure!(text.contains(&whole), "packets were lost: {text}");
    }
    let all = pings * clones.len() as u128;
    say(
        "traffic",
        format!(
            "{all} of {all} pings answered{} the {:.1} s that the daemon was away",
            if spanned {
                ", before, during and after"
            } else {
                ", before and during"
            },
            away.as_secs_f64()
        ),
    );
    Ok(())
}

/// Wants each clone to have kept its own value.
fn check_values(clones: &[Clone]) -> Result<()> {
    clones.iter().try_for_each(Clone::check_value)
}

fn clean_up(daemon: &mut Daemon, clones: &mut [Clone]) -> Result<()> {
    for clone in clones.iter_mut() {
        clone.vmm.kill()?;
    }
    for clone in clones.iter() {
        daemon.json(&format!("release {}", clone.lease.name))?;
    }
    daemon.json(&format!("pool delete {POOL}"))?;
    let status = daemon.terminate()?;
    ensure!(status.success(), "the daemon ended with {status}");
    // Programs and maps are pinned, so that packets don't need the daemon: they go when told to.
    daemon.json("cleanup --instance demo")?;
    Ok(())
}

/// All leases with their slots and addresses, in order of their names.
fn leases(daemon: &Daemon) -> Result<Vec<Value>> {
    let document = daemon.json("list")?;
    let mut leases = document
        .as_array()
        .context("'sandwire list --json' prints no list")?
        .clone();
    leases.sort_by_key(|lease| lease["name"].to_string());
    Ok(leases)
}

fn say(subject: &str, text: impl Display) {
    println!("{subject:>9}  {text}");
}

fn ms(duration: Duration) -> String {
    format!("{} ms", duration.as_millis())
}

const POOL: &str = "web";

//! SIGKILL of the daemon at any moment while it makes interfaces of containers.

use std::{collections::BTreeSet, thread, time::Duration};

use sandwire_testlab::{command, lab::Lab, namespace::Namespace, sandwire::Daemon};
use serde_json::{Value, json};

use crate::ebpf::{World, assert_sound, wait_until};

const PATIENCE: Duration = Duration::from_secs(60);
/// Leases that are asked for at once.
pub(crate) const LEASES: u32 = 8;

/// All [`LEASES`] of a pool are asked for at once, and the daemon is killed meanwhile: after its next start each is there
/// with a sound interface or not at all, and those are there that it had answered for.
pub(crate) fn leave_whole_leases_or_none(lab: &Lab, pool: &Value) {
    let mut world = World::without_pools(lab);
    world.daemon.create_pool(pool).unwrap();
    let pool = pool["name"].as_str().unwrap();
    let names: Vec<String> = (0..LEASES).map(|number| format!("c{number}")).collect();
    let spaces: Vec<Namespace> = names.iter().map(|name| lab.namespace(name)).collect();
    for round in 0..12 {
        world
            .daemon
            .wait_pool(pool, LEASES.into(), PATIENCE)
            .unwrap();
        // From before the first interface to after the last.
        let moment = Duration::from_micros(900 * round);
        let answered = ask_and_kill(&world.daemon, pool, &names, moment);
        world.daemon.kill().unwrap();
        world.daemon.restart().unwrap();
        assert!(
            held(&world).is_superset(&answered),
            "round {round}: {answered:?} of {:?}",
            held(&world)
        );
        for (name, space) in names.iter().zip(&spaces) {
            let settled = format!("{name} is settled in round {round}");
            let is_held = held(&world).contains(name);
            wait_until(&settled, PATIENCE, || has_interface(space) == is_held);
        }
        for name in &held(&world) {
            assert_sound(&world, name);
            world.daemon.json(&format!("release {name}")).unwrap();
        }
        for space in &spaces {
            assert!(!has_interface(space), "round {round}");
        }
    }
}

/// The leases that the daemon answered for before it was killed.
fn ask_and_kill(
    daemon: &Daemon,
    pool: &str,
    names: &[String],
    moment: Duration,
) -> BTreeSet<String> {
    thread::scope(|scope| {
        let askers: Vec<_> = names
            .iter()
            .map(|name| scope.spawn(move || acquire(daemon, pool, name)))
            .collect();
        thread::sleep(moment);
        command::run(&format!("kill -9 {}", daemon.pid().unwrap())).unwrap();
        let answers = askers.into_iter().filter_map(|asker| asker.join().unwrap());
        answers.collect()
    })
}

/// The lease's name if the daemon answered that it is there.
fn acquire(daemon: &Daemon, pool: &str, name: &str) -> Option<String> {
    let body =
        json!({"pool": pool, "name": name, "attach": {"netns": format!("/run/netns/{name}")}});
    let answer = daemon.http("POST", "/v1/leases", Some(&body)).ok()?;
    (answer.status == 201).then(|| name.to_owned())
}

/// Names of the leases that are whole, as the daemon has it.
fn held(world: &World) -> BTreeSet<String> {
    let leases = world.daemon.call("GET", "/v1/leases", None).unwrap();
    let leases = leases.as_array().unwrap().iter();
    leases
        .filter(|lease| lease["state"] == "active")
        .map(|lease| lease["name"].as_str().unwrap().to_owned())
        .collect()
}

fn has_interface(space: &Namespace) -> bool {
    space.run("ip -o link").unwrap().contains("eth0")
}

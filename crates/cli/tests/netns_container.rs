//! Containers under a running daemon: namespaces that the test makes, leases by the command line, real traffic between
//! container, host and the world beyond the uplink; SIGKILL while interfaces are made; restarts that lose no packet.

#![allow(
    clippy::unwrap_used,
    reason = "a test ends at the first thing that fails"
)]

#[path = "ebpf/mod.rs"]
mod ebpf;
#[path = "kills/mod.rs"]
mod kills;

use std::{
    net::{IpAddr, UdpSocket},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use ebpf::{
    SECOND, World, addresses_of, assert_none_lost, ping_slowly, restart_under_ping, wait_until,
};
use kills::{LEASES, leave_whole_leases_or_none};
use sandwire_testlab::{
    command,
    host::{BEYOND_IPV4, BEYOND_IPV6, ECHO_PORT, HOST_IPV4, answer_http, serve_tcp, serve_udp},
    lab,
    namespace::{self, Namespace},
};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);

fn boxes(size: u32, policy: &Value) -> Value {
    json!({
        "name": "boxes", "kind": "container", "data_path": "auto", "size": size,
        "quarantine_seconds": 0, "policy": policy,
        "addresses": {"plan": "prefix", "ipv4": "10.70.0.0/24", "ipv6": "fd00:b0::/64"},
    })
}

#[track_caller]
fn curl(space: &Namespace, address: &str) -> String {
    let host = if address.contains(':') {
        format!("[{address}]")
    } else {
        address.to_owned()
    };
    space
        .run(&format!("curl -sS -m 20 http://{host}/"))
        .unwrap()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn two_containers_live_under_their_policy_and_vanish_without_a_trace() {
    lab::run(|lab| {
        let mut world = World::without_pools(lab);
        world.daemon.create_pool(&boxes(2, &json!({}))).unwrap();
        let spaces = ["blue", "red"].map(|name| lab.namespace(name));
        let leases = ["blue", "red"].map(|name| {
            world
                .daemon
                .json(&format!("acquire boxes {name} --netns {name}"))
                .unwrap()
        });
        for space in &spaces {
            space.inside(|| serve_tcp(80, answer_http)).unwrap();
        }
        for (number, space) in spaces.iter().enumerate() {
            for server in [BEYOND_IPV4.to_string(), BEYOND_IPV6.to_string()] {
                space
                    .run(&format!("ping -n -q -c 1 -W 5 {server}"))
                    .unwrap();
            }
            for other in addresses_of(&leases[1 - number]) {
                space
                    .run(&format!("ping -n -q -c 1 -W 1 {other}"))
                    .unwrap_err();
            }
        }
        // Live, and each for itself: only blue and red together.
        for name in ["blue", "red"] {
            let together = json!({"clone_to_clone": true});
            world.daemon.set_policy(name, &together).unwrap();
        }
        for (number, space) in spaces.iter().enumerate() {
            for other in addresses_of(&leases[1 - number]) {
                assert!(!curl(space, &other).is_empty());
            }
        }
        world.daemon.json("publish blue 8080:80").unwrap();
        let page = world
            .beyond
            .run(&format!("curl -sS -m 20 http://{HOST_IPV4}:8080/"));
        assert!(!page.unwrap().is_empty());
        let shown = world.daemon.json("show blue").unwrap();
        assert_eq!(shown["defects"], json!([]));
        assert!(shown["traffic"]["egress"]["packets"].as_u64().unwrap() > 4);

        restart_under_ping(&mut world, &spaces[0]);
        let again = world.daemon.json("show blue").unwrap();
        assert_eq!(again["attached"], leases[0]["attached"]);
        let state = world
            .daemon
            .call("GET", "/v1/leases/blue/attached", None)
            .unwrap();
        assert_eq!(state["defects"], json!([]));

        for lease in ["blue", "red"] {
            world.daemon.json(&format!("release {lease}")).unwrap();
        }
        for space in &spaces {
            assert!(!space.run("ip -o link").unwrap().contains("eth0"));
        }
        assert!(
            !command::run("ip -o link")
                .unwrap()
                .contains("sandwire:lab:boxes")
        );
    });
}

/// The kernel gives an interface its queue only a moment after its carrier has come, and drops what is sent before.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_the_host_sends_at_once_arrives() {
    lab::run(|lab| {
        let world = World::without_pools(lab);
        world.daemon.create_pool(&boxes(1, &json!({}))).unwrap();
        let space = lab.namespace("blue");
        space
            .inside(|| serve_udp(ECHO_PORT, |packet, _| packet.to_vec()))
            .unwrap();
        let attach = json!({"pool": "boxes", "name": "blue", "attach": {"netns": space.path()}});
        for _ in 0..40 {
            let patience = Duration::from_secs(20);
            world.daemon.wait_pool("boxes", 1, patience).unwrap();
            let lease = world.daemon.call("POST", "/v1/leases", Some(&attach));
            let address = &addresses_of(&lease.unwrap())[0];
            let caller = UdpSocket::bind("0.0.0.0:0").unwrap();
            caller.set_read_timeout(Some(5 * SECOND)).unwrap();
            let server: IpAddr = address.parse().unwrap();
            caller.send_to(b"?", (server, ECHO_PORT)).unwrap();
            caller.recv(&mut [0; 10]).unwrap();
            world.daemon.json("release blue").unwrap();
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn sigkill_while_interfaces_are_made_leaves_whole_leases_or_none() {
    lab::run_within(Duration::from_secs(300), |lab| {
        leave_whole_leases_or_none(lab, &boxes(LEASES, &json!({})));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_lease_outlives_its_namespace_until_it_is_released() {
    lab::run(|lab| {
        let mut world = World::without_pools(lab);
        world.daemon.create_pool(&boxes(1, &json!({}))).unwrap();
        let mut sleeper = Command::new("unshare")
            .args(["-n", "sleep", "600"])
            .spawn()
            .unwrap();
        let pid = sleeper.id();
        let begun = Instant::now();
        let own = std::fs::read_link("/proc/self/ns/net").unwrap();
        while std::fs::read_link(format!("/proc/{pid}/ns/net")).is_ok_and(|space| space == own) {
            assert!(begun.elapsed() < PATIENCE);
            thread::sleep(Duration::from_millis(5));
        }
        let lease = world
            .daemon
            .json(&format!(
                "acquire boxes a --pid {pid} --interface net1 --mtu 1400"
            ))
            .unwrap();
        assert_eq!(lease["attached"]["mtu"], 1400);
        let inside = format!("nsenter -t {pid} -n ping -n -q -c 1 -W 5 {BEYOND_IPV4}");
        command::run(&inside).unwrap();
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
        let host_end = lease["attached"]["host_interface"].as_str().unwrap();
        let begun = Instant::now();
        while command::run("ip -o link").unwrap().contains(host_end) {
            assert!(begun.elapsed() < PATIENCE);
            thread::sleep(Duration::from_millis(5));
        }
        world.daemon.kill().unwrap();
        world.daemon.restart().unwrap();
        let shown = world.daemon.json("show a").unwrap();
        assert_eq!(shown["attached"], lease["attached"]);
        assert_eq!(shown["defects"].as_array().unwrap().len(), 1);
        let released = world.daemon.json("release a").unwrap();
        assert_eq!(released["released"][0]["outcome"], "released");
        world.daemon.wait_pool("boxes", 1, 60 * SECOND).unwrap();
        let _blue = lab.namespace("blue");
        world.daemon.json("acquire boxes a --netns blue").unwrap();
    });
}

/// Least round trip in milliseconds of some pings.
#[track_caller]
fn round_trip(space: &Namespace, target: &str) -> f64 {
    let said = space
        .run(&format!("ping -n -c 4 -i 0.05 -W 5 {target}"))
        .unwrap();
    let times = said.lines().filter_map(|line| {
        let time = line.split("time=").nth(1)?;
        time.split_whitespace().next()?.parse::<f64>().ok()
    });
    times.fold(f64::MAX, f64::min)
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_impaired_container_is_delayed_each_way_also_by_its_sibling() {
    lab::run_within(Duration::from_secs(300), |lab| {
        let folder = lab.folder().join("impair");
        let world = World::with_config(lab, &format!("[impair]\nfolder = {folder:?}"));
        let together = json!({"clone_to_clone": true});
        world.daemon.create_pool(&boxes(2, &together)).unwrap();
        let spaces = ["blue", "red"].map(|name| lab.namespace(name));
        let leases = ["blue", "red"].map(|name| {
            let line = format!("acquire boxes {name} --netns {name}");
            world.daemon.json(&line).unwrap()
        });
        let (blue, red) = (&spaces[0], &spaces[1]);
        let world_beyond = BEYOND_IPV4.to_string();
        for (ways, least) in [
            (vec!["--egress", "delay 300ms"], 300.0),
            (vec!["--ingress", "delay 300ms"], 300.0),
            (
                vec!["--egress", "delay 300ms", "--ingress", "delay 300ms"],
                600.0,
            ),
        ] {
            let mut impair = world.daemon.command("--json impair blue");
            let output = impair.args(&ways).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{said}");
            assert!(round_trip(blue, &world_beyond) >= least);
            // What a sibling sends comes past the host end's queue otherwise.
            for address in addresses_of(&leases[0]) {
                assert!(round_trip(red, &address) >= least, "{ways:?} {address}");
            }
            assert!(round_trip(red, &world_beyond) < least);
        }
        world.daemon.json("impair clear blue").unwrap();
        assert!(round_trip(red, &addresses_of(&leases[0])[0]) < 300.0);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn containers_go_on_by_maps_of_another_size() {
    lab::run(|lab| {
        let mut world = World::with_config(lab, "nics_max = 128");
        world.daemon.create_pool(&boxes(1, &json!({}))).unwrap();
        let call = |space: &Namespace| {
            let call = format!("ping -n -q -c 1 -W 5 {BEYOND_IPV4}");
            space.run(&call).unwrap();
        };
        let lease = |world: &World, name: &str| {
            world.daemon.wait_pool("boxes", 1, PATIENCE).unwrap();
            let acquire = format!("acquire boxes {name} --netns {name}");
            world.daemon.json(&acquire).unwrap();
        };
        let blue = lab.namespace("blue");
        lease(&world, "blue");
        call(&blue);
        let pinger = ping_slowly(&blue);
        world.daemon.kill().unwrap();
        world.configure("nics_max = 256");
        world.daemon.restart().unwrap();
        let red = lab.namespace("red");
        lease(&world, "red");
        call(&red);
        wait_until("the old maps are gone", PATIENCE, || {
            lab.shell("ls /sys/fs/bpf/sandwire/lab") == "links\nv1\n"
        });
        let sent = assert_none_lost(pinger, "while maps were made anew");
        let detail = world.daemon.json("show blue").unwrap();
        assert_eq!(detail["defects"], json!([]));
        let counted = &detail["traffic"]["egress"]["packets"];
        assert_eq!(counted.as_u64(), Some(u64::from(sent) + 1));
        call(&blue);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn cleanup_keeps_the_network_of_a_container_that_runs() {
    lab::run(|lab| {
        let mut world = World::without_pools(lab);
        world.daemon.create_pool(&boxes(1, &json!({}))).unwrap();
        let blue = lab.namespace("blue");
        world
            .daemon
            .json("acquire boxes blue --netns blue")
            .unwrap();
        let mut container = namespace::command_in(&blue.path(), "sleep")
            .arg("60")
            .spawn()
            .unwrap();
        world.daemon.kill().unwrap();
        let pid = container.id();
        wait_until("the container in its namespace", PATIENCE, || {
            let pids = command::run("ip netns pids blue").unwrap();
            pids.lines().any(|line| line == pid.to_string())
        });
        let dry = world
            .daemon
            .json("cleanup --instance lab --dry-run")
            .unwrap();
        assert!(
            dry.to_string().contains(&format!("\"pid\":{pid}")),
            "{dry:#}"
        );
        let refused = world.daemon.output("cleanup --instance lab").unwrap();
        let message = String::from_utf8(refused.stderr).unwrap();
        assert_eq!(refused.status.code(), Some(1), "{message}");
        assert!(message.contains(&format!("sleep (pid {pid})")), "{message}");
        blue.run(&format!("ping -n -q -c 1 -W 5 {BEYOND_IPV4}"))
            .unwrap();
        container.kill().unwrap();
        container.wait().unwrap();
        let done = world.daemon.json("cleanup --instance lab").unwrap();
        assert_eq!(done["failures"], json!([]));
        blue.run("ip link show dev eth0").unwrap_err();
    });
}

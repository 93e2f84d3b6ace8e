//! Containers that are children of the host's uplink, and what holds for all of them.

#![allow(dead_code, reason = "each test executable uses the part that it needs")]

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    path::PathBuf,
    process::{Child, Stdio},
    thread,
    time::Duration,
};

use sandwire_testlab::{
    command,
    host::{BEYOND_IPV4, BEYOND_IPV6, answer_http, serve_tcp},
    lab::Lab,
    namespace::{self, Namespace},
};
use serde_json::{Value, json};

use crate::ebpf::{SECOND, World, addresses_of, assert_sound, restart_under_ping, wait_until};

pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// Parts of the subnets that the uplink is in.
const IPV4: &str = "203.0.113.64/26";
const IPV6: &str = "2001:db8:1::b0:0/112";

pub(crate) fn on_uplink(device: &str, size: u32, policy: &Value) -> Value {
    json!({
        "name": "lan", "kind": "container", "size": size, "device": device,
        "parent": {"interface": "up0"}, "quarantine_seconds": 0, "policy": policy,
        "addresses": {"plan": "prefix", "ipv4": IPV4, "ipv6": IPV6},
    })
}

pub(crate) fn routed() -> Value {
    json!({"uplink": "route"})
}

/// A world with the leases blue and red in namespaces of these names.
pub(crate) fn with_two(
    lab: &Lab,
    device: &str,
    policy: &Value,
) -> (World, [Namespace; 2], [Value; 2]) {
    let world = World::without_pools(lab);
    let pool = on_uplink(device, 2, policy);
    world.daemon.create_pool(&pool).unwrap();
    world.daemon.wait_pool("lan", 2, PATIENCE).unwrap();
    let spaces = ["blue", "red"].map(|name| lab.namespace(name));
    let leases = ["blue", "red"].map(|name| {
        let line = format!("acquire lan {name} --netns {name}");
        world.daemon.json(&line).unwrap()
    });
    (world, spaces, leases)
}

#[track_caller]
pub(crate) fn ping(space: &Namespace, target: &str, answers: bool) {
    let wait = if answers { 20 } else { 1 };
    let answer = space.run(&format!("ping -n -q -c 1 -W {wait} {target}"));
    assert_eq!(answer.is_ok(), answers, "{target}: {answer:?}");
}

pub(crate) fn drops(world: &World, lease: &str, reason: &str) -> u64 {
    let shown = world.daemon.json(&format!("show {lease}")).unwrap();
    shown["traffic"]["drops"][reason].as_u64().unwrap_or(0)
}

/// What a server in a container says to the world beyond.
#[track_caller]
pub(crate) fn fetch(world: &World, address: &str) -> String {
    let target = SocketAddr::new(address.parse().unwrap(), 80);
    let exchange = || {
        let mut stream = TcpStream::connect_timeout(&target, 20 * SECOND)?;
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
        let mut page = String::new();
        stream.read_to_string(&mut page)?;
        Ok(page)
    };
    world.beyond.inside(exchange).unwrap()
}

/// Each of two children of the uplink reaches the world and is reached from there, in both families, and the other one only
/// when policy says so; through a restart; and then they are gone.
pub(crate) fn live_under_policy(
    device: &str,
    mode: &str,
    world: &mut World,
    spaces: &[Namespace; 2],
    leases: &[Value; 2],
) {
    let attached = &leases[0]["attached"];
    assert_eq!(attached["device"], device, "{attached}");
    assert_eq!(attached["host_interface"], "up0");
    assert_eq!(attached["addresses"][0]["gateway"], BEYOND_IPV4.to_string());
    let link = spaces[0].run("ip -d -j link show dev eth0").unwrap();
    let link: Value = serde_json::from_str(&link).unwrap();
    assert_eq!(link[0]["linkinfo"]["info_kind"], device, "{link}");
    assert_eq!(link[0]["linkinfo"]["info_data"]["mode"], mode, "{link}");
    for (number, space) in spaces.iter().enumerate() {
        space.inside(|| serve_tcp(80, answer_http)).unwrap();
        ping(space, &BEYOND_IPV4.to_string(), true);
        ping(space, &BEYOND_IPV6.to_string(), true);
        for own in addresses_of(&leases[number]) {
            let page = fetch(world, &own);
            assert!(page.contains("200 OK"), "{page}");
        }
        for other in addresses_of(&leases[1 - number]) {
            ping(space, &other, false);
        }
    }
    assert!(drops(world, "blue", "other_sandbox") >= 2);
    for name in ["blue", "red"] {
        let together = json!({"clone_to_clone": true, "uplink": "route"});
        world.daemon.set_policy(name, &together).unwrap();
    }
    for (number, space) in spaces.iter().enumerate() {
        for other in addresses_of(&leases[1 - number]) {
            ping(space, &other, true);
        }
    }
    restart_under_ping(world, &spaces[0]);
    for name in ["blue", "red"] {
        assert_sound(world, name);
    }
    assert_eq!(
        world.daemon.json("show blue").unwrap()["attached"],
        *attached
    );
    for lease in ["blue", "red"] {
        world.daemon.json(&format!("release {lease}")).unwrap();
    }
    for space in spaces {
        let links = space.run("ip -o link").unwrap();
        assert!(
            !links.contains("eth0") && !links.contains(device),
            "{links}"
        );
    }
    world.daemon.wait_pool("lan", 2, PATIENCE).unwrap();
    world.daemon.json("acquire lan blue --netns blue").unwrap();
    ping(&spaces[0], &BEYOND_IPV4.to_string(), true);
}

/// What the world beyond sees come, until this ends.
pub(crate) struct Capture {
    process: Child,
    file: PathBuf,
}

impl Capture {
    pub(crate) fn start(lab: &Lab, filter: &str) -> Self {
        command::require_on_path(&["tcpdump"]).unwrap();
        let file = lab.folder().join("beyond.pcap");
        let process = namespace::command_in(&namespace::path_of("beyond"), "tcpdump")
            .args([
                "-n",
                "-U",
                "--immediate-mode",
                "-i",
                "eth0",
                "-Q",
                "in",
                "-w",
            ])
            .arg(&file)
            .args(filter.split_whitespace())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // The file's header is there when the filter is.
        wait_until("tcpdump listens", PATIENCE, || {
            file.metadata().is_ok_and(|file| file.len() >= 24)
        });
        Self { process, file }
    }

    /// Its packets as tcpdump shows them.
    pub(crate) fn end(mut self, lab: &Lab) -> String {
        thread::sleep(Duration::from_millis(200));
        command::run(&format!("kill -INT {}", self.process.id())).unwrap();
        self.process.wait().unwrap();
        lab.run(&format!("tcpdump -nr {}", self.file.display()))
    }
}

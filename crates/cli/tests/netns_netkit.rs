//! What a container's interface is made of: netkit where the kernel has it, and what the pool says.

#![allow(
    clippy::unwrap_used,
    reason = "a test ends at the first thing that fails"
)]

#[path = "ebpf/mod.rs"]
mod ebpf;

use std::{
    io::Read,
    net::{SocketAddr, TcpStream},
};

use ebpf::{SECOND, World, addresses_of, restart_under_ping};
use sandwire_testlab::{
    command,
    guest::kernel::Series,
    host::{BEYOND_IPV4, BEYOND_IPV6},
    lab::{self, Lab},
    namespace::{Namespace, command_in},
};
use serde_json::{Value, json};

const PORT: u16 = 7000;
const GREETING: &[u8] = b"here\n";

fn boxes(name: &str, number: u8, device: &str) -> Value {
    json!({
        "name": name, "kind": "container", "data_path": "ebpf", "size": 2, "device": device,
        "quarantine_seconds": 0, "policy": {"uplink": "route"},
        "addresses": {
            "plan": "prefix", "ipv4": format!("10.7{number}.0.0/24"), "ipv6": format!("fd00:b{number}::/64"),
        },
    })
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netkit_is_refused_where_there_is_none_and_auto_says_why_it_is_veth() {
    lab::run(|lab| {
        let world = World::without_pools(lab);
        let before = world.daemon.call("GET", "/v1/pools", None).unwrap();
        let body = boxes("wanted", 1, "netkit");
        let wanted = world.daemon.http("POST", "/v1/pools", Some(&body)).unwrap();
        world.daemon.create_pool(&boxes("open", 2, "auto")).unwrap();
        let _blue = lab.namespace("blue");
        let line = "acquire open blue --netns blue";
        let attached = world.daemon.json(line).unwrap()["attached"].clone();
        let reason = attached["device_reason"].as_str().unwrap();
        if wanted.status == 201 {
            assert_eq!(attached["device"], "netkit", "{attached}");
            return;
        }
        let said = &wanted.body;
        assert!(
            wanted.status == 400 && said.contains("netkit pairs"),
            "{said}"
        );
        assert_eq!(attached["device"], "veth");
        assert!(reason.contains("makes no netkit pairs"), "{reason}");
        let pools = world.daemon.call("GET", "/v1/pools", None).unwrap();
        let count = |pools: &Value| pools.as_array().unwrap().len();
        assert_eq!(count(&pools), count(&before) + 1, "{pools}");
        let shown = world.daemon.command("show blue").output().unwrap();
        let shown = String::from_utf8(shown.stdout).unwrap();
        assert!(shown.contains("makes no netkit pairs"), "{shown}");
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn containers_with_netkit_live_under_their_policy_on_linux_6_12() {
    lab::run_on(Series::Linux6_12, 900 * SECOND, |lab| {
        let mut world = World::without_pools(lab);
        world
            .daemon
            .create_pool(&boxes("boxes", 0, "netkit"))
            .unwrap();
        world.beyond.route_through_host("10.70.0.0/24").unwrap();
        world.beyond.route_through_host("fd00:b0::/64").unwrap();
        let spaces = ["blue", "red"].map(|name| lab.namespace(name));
        let leases = ["blue", "red"].map(|name| {
            let line = format!("acquire boxes {name} --netns {name}");
            world.daemon.json(&line).unwrap()
        });
        for lease in &leases {
            assert_is_netkit(lab, lease);
        }
        assert_in_touch(&world, &spaces, &leases);
        restart_under_ping(&mut world, &spaces[0]);
        for (name, lease) in ["blue", "red"].iter().zip(&leases) {
            let shown = world.daemon.json(&format!("show {name}")).unwrap();
            assert_eq!(shown["attached"], lease["attached"]);
            let path = format!("/v1/leases/{name}/attached");
            let state = world.daemon.call("GET", &path, None).unwrap();
            assert_eq!(state["defects"], json!([]));
        }
        assert_in_touch(&world, &spaces, &leases);
        for name in ["blue", "red"] {
            let together = json!({"clone_to_clone": true, "uplink": "route"});
            world.daemon.set_policy(name, &together).unwrap();
        }
        for address in addresses_of(&leases[1]) {
            ping(&spaces[0], &address, true);
        }
        assert_sctp_passes(&world, &spaces, &leases);
        for name in ["blue", "red"] {
            world.daemon.json(&format!("release {name}")).unwrap();
        }
        for space in &spaces {
            assert!(!space.run("ip -o link").unwrap().contains("eth0"));
        }
        assert!(!lab.run("ip -d -o link").contains("netkit"));
        // Without a word of it, it is netkit as well.
        world.daemon.create_pool(&boxes("open", 2, "auto")).unwrap();
        let lease = world.daemon.json("acquire open blue --netns blue").unwrap();
        assert_is_netkit(lab, &lease);
        assert!(lease["attached"]["device_reason"].is_string());
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn containers_with_veth_speak_sctp_on_linux_6_1() {
    lab::run_on(Series::Linux6_1, 300 * SECOND, |lab| {
        let world = World::without_pools(lab);
        let mut spec = boxes("boxes", 0, "veth");
        spec["policy"] = json!({"clone_to_clone": true});
        world.daemon.create_pool(&spec).unwrap();
        let spaces = ["blue", "red"].map(|name| lab.namespace(name));
        let leases = ["blue", "red"].map(|name| {
            let line = format!("acquire boxes {name} --netns {name}");
            world.daemon.json(&line).unwrap()
        });
        assert_sctp_passes(&world, &spaces, &leases);
    });
}

fn assert_is_netkit(lab: &Lab, lease: &Value) {
    let attached = &lease["attached"];
    assert_eq!(attached["device"], "netkit");
    let host_end = attached["host_interface"].as_str().unwrap();
    let shown = lab.run(&format!("ip -d -j link show dev {host_end}"));
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(shown[0]["linkinfo"]["info_kind"], "netkit", "{shown}");
}

#[track_caller]
fn ping(space: &Namespace, target: &str, answers: bool) {
    let wait = if answers { 20 } else { 2 };
    let answer = space.run(&format!("ping -n -q -c 1 -W {wait} {target}"));
    assert_eq!(answer.is_ok(), answers, "{target}: {answer:?}");
}

/// Each reaches the world and is reached from there, in both families, and neither reaches the other.
fn assert_in_touch(world: &World, spaces: &[Namespace; 2], leases: &[Value; 2]) {
    for (number, space) in spaces.iter().enumerate() {
        ping(space, &BEYOND_IPV4.to_string(), true);
        ping(space, &BEYOND_IPV6.to_string(), true);
        for other in addresses_of(&leases[1 - number]) {
            ping(space, &other, false);
        }
        for own in addresses_of(&leases[number]) {
            let target = SocketAddr::new(own.parse().unwrap(), PORT);
            let server = space
                .inside(|| Ok(std::net::TcpListener::bind(target)?))
                .unwrap();
            let greeter = std::thread::spawn(move || {
                let (mut stream, _) = server.accept().unwrap();
                std::io::Write::write_all(&mut stream, GREETING).unwrap();
            });
            let mut heard = Vec::new();
            let stream = world
                .beyond
                .inside(|| Ok(TcpStream::connect_timeout(&target, 20 * SECOND)?));
            stream.unwrap().read_to_end(&mut heard).unwrap();
            assert_eq!(heard, GREETING);
            greeter.join().unwrap();
        }
    }
}

/// Bytes of a stream that goes by SCTP, in super-packets where the kernel makes such.
const SCTP_BYTES: u64 = 4 << 20;

/// A whole stream arrives, and each of its packets counts as the wire would have had it.
fn assert_sctp_passes(world: &World, spaces: &[Namespace; 2], leases: &[Value; 2]) {
    let detail = |lease: &Value| {
        let path = format!("/v1/leases/{}", lease["name"].as_str().unwrap());
        world.daemon.call("GET", &path, None).unwrap()["traffic"].clone()
    };
    let sent_so_far = || {
        let egress = detail(&leases[0])["egress"].clone();
        ["packets", "segments"].map(|figure| egress[figure].as_u64().unwrap())
    };
    for target in addresses_of(&leases[1]) {
        let family = if target.contains(':') {
            "AF_INET6"
        } else {
            "AF_INET"
        };
        let script = |what: &str| {
            let open = format!("s = socket({family}, SOCK_STREAM, IPPROTO_SCTP)");
            let data = format!("data = b\"0123456789abcdef\" * {}", SCTP_BYTES / 16);
            format!("import time; from socket import *\n{data}\n{open}\n{what}")
        };
        let run = |space: &Namespace, script: &str| {
            command::output_of(command_in(&space.path(), "python3").args(["-c", script])).unwrap()
        };
        let receive = script(&format!(
            "s.bind((\"{target}\", {PORT})); s.listen(1); c, _ = s.accept()\n\
             came = b\"\"\n\
             while more := c.recv(65536): came += more\n\
             print(len(came), came == data)"
        ));
        let send = script(&format!(
            "for attempt in range(200):\n\
             \x20   try: s.connect((\"{target}\", {PORT})); break\n\
             \x20   except ConnectionRefusedError: time.sleep(0.1)\n\
             for start in range(0, len(data), 32768): s.sendall(data[start:start + 32768])\n\
             s.close()"
        ));
        let before = sent_so_far();
        let received = std::thread::scope(|scope| {
            let receiving = scope.spawn(|| run(&spaces[1], &receive));
            run(&spaces[0], &send);
            receiving.join().unwrap()
        });
        assert_eq!(received.trim(), format!("{SCTP_BYTES} True"), "{target}");
        let after = sent_so_far();
        let [packets, segments] = [0, 1].map(|figure| after[figure] - before[figure]);
        assert!(segments >= SCTP_BYTES / 1500, "{segments} segments");
        assert!(packets < segments, "no super-packets among {packets}");
    }
    for lease in leases {
        let drops = detail(lease)["drops"].to_string();
        assert!(!drops.contains("too_big"), "{drops}");
    }
}

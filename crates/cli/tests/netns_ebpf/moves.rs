//! A pool that moves between data paths under traffic.

use std::{
    io::{Read, Write},
    net::{IpAddr, SocketAddr, TcpStream},
    thread,
};

use sandwire_kernel_net::{
    interface::InterfaceIndex,
    netlink::Socket,
    tc::{self, Hook},
};
use sandwire_testlab::{
    host::{BEYOND_IPV4, ECHO_PORT},
    lab::{self, Lab},
    sandwire::Lease,
};
use serde_json::{Value, json};

use crate::{
    assert_in_touch,
    ebpf::{HERE, SECOND, World, assert_none_lost, ping, pool, wait_until},
    programs::host_end,
    restarts::{MAPS, old_maps, wait_until_old_maps_are_gone},
    with_small_maps,
};

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_pool_moves_between_data_paths_under_traffic() {
    lab::run(|lab| {
        let world = World::without_pools(lab);
        let mut spec = pool("web", "netns", 0, 2, &json!({"uplink": "route"}));
        spec["data_path"] = json!("nft");
        world.daemon.create_pool(&spec).unwrap();
        world.route_back(0);
        let (lease, guest) = world.guest("web", "one");
        assert_in_touch(&lease, &guest);
        let mut connection = EchoConnection::open(&world, lease.ipv4);
        for data_path in ["ebpf", "nft", "ebpf"] {
            let pingers = [
                ("from beyond", ping(&world.beyond.path(), lease.ipv4)),
                ("from the host", ping(HERE.as_ref(), lease.ipv6)),
            ];
            thread::sleep(SECOND / 2);
            begin_move(&world, "web", data_path);
            wait_until("the lease has moved", 20 * SECOND, || {
                world.detail(&lease)["data_path"] == data_path
            });
            thread::sleep(SECOND / 2);
            for (whence, pinger) in pingers {
                assert_none_lost(pinger, &format!("to {data_path}, {whence}"));
            }
            assert_in_touch(&lease, &guest);
            assert_eq!(
                world.detail(&lease)["defects"],
                json!([]),
                "with {data_path}"
            );
            connection.assert_alive();
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn sums_of_a_pool_go_on_from_where_they_were_after_a_move() {
    lab::run(|lab| {
        let world = World::without_pools(lab);
        let spec = pool("web", "netns", 0, 1, &json!({"uplink": "route"}));
        world.daemon.create_pool(&spec).unwrap();
        world.route_back(0);
        let (lease, guest) = world.guest("web", "one");
        let ping = |count: u64| {
            for _ in 0..count {
                guest.ping(BEYOND_IPV4.into(), 5 * SECOND).unwrap();
            }
        };
        ping(50);
        let before = packets_of_web(&world);
        assert!(before >= 50, "{before}");
        for data_path in ["nft", "ebpf"] {
            begin_move(&world, "web", data_path);
            wait_until("the lease has moved", 20 * SECOND, || {
                world.detail(&lease)["data_path"] == data_path
            });
            let moved = packets_of_web(&world);
            assert!(moved >= before, "to {data_path}: {moved} after {before}");
        }
        let moved = packets_of_web(&world);
        ping(10);
        let after = packets_of_web(&world);
        assert!(
            (moved + 10..before + 30).contains(&after),
            "{before} before the moves, {moved} after them, then {after}"
        );
        world.daemon.call("DELETE", "/v1/leases/one", None).unwrap();
        assert!(packets_of_web(&world) >= after);
    });
}

/// What the guests of pool `web` have sent, as the metrics have it.
fn packets_of_web(world: &World) -> u64 {
    let metrics = world.daemon.http("GET", "/metrics", None).unwrap().body;
    let start = "sandwire_pool_packets_total{pool=\"web\",direction=\"egress\"} ";
    let found = metrics.lines().find_map(|line| line.strip_prefix(start));
    found.unwrap().parse().unwrap()
}

/// Refused while the slots that wait for sandboxes are still built anew after the move before.
pub(crate) fn begin_move(world: &World, pool: &str, data_path: &str) {
    let (path, change) = (format!("/v1/pools/{pool}"), json!({"data_path": data_path}));
    wait_until("the pool can be moved", 60 * SECOND, || {
        world.daemon.call("PATCH", &path, Some(&change)).is_ok()
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_pool_moves_to_nft_while_maps_are_made_anew() {
    lab::run(|lab| {
        let (mut world, guests) = with_small_maps(lab);
        let pingers = guests.iter().map(|(lease, _)| {
            [
                ping(HERE.as_ref(), lease.ipv4),
                ping(&world.beyond.path(), lease.ipv6),
            ]
        });
        let pingers: Vec<_> = pingers.flatten().collect();
        // Where the old maps have gone by then, it is tried with others.
        let is_in_time = [256, 320, 384, 448].into_iter().any(|nics| {
            assert!(world.daemon.terminate().unwrap().success());
            world.configure(&format!("nics_max = {nics}"));
            world.daemon.restart().unwrap();
            begin_move(&world, "netns", "nft");
            let has_old = !old_maps().is_empty();
            if !has_old {
                begin_move(&world, "netns", "ebpf");
                world.daemon.wait_pool("netns", 1, 60 * SECOND).unwrap();
            }
            has_old
        });
        assert!(is_in_time, "the pool moved too late");
        wait_until_old_maps_are_gone();
        let moved = &guests[0].0;
        wait_until_without_programs(lab, moved);
        for pinger in pingers {
            assert_none_lost(pinger, "to other maps, and one pool to nft");
        }
        for (lease, guest) in &guests {
            assert_in_touch(lease, guest);
            assert_eq!(world.detail(lease)["defects"], json!([]));
        }
        assert_eq!(world.detail(moved)["data_path"], "nft");
        assert_eq!(world.detail(&guests[1].0)["data_path"], "ebpf");
    });
}

/// Waits until no program of ours is on the way into a slot's host end.
fn wait_until_without_programs(lab: &Lab, lease: &Lease) {
    let index = lab.run(&format!("cat /sys/class/net/{}/ifindex", host_end(lease)));
    let index = InterfaceIndex(index.trim().parse().unwrap());
    let mut socket = Socket::route().unwrap();
    wait_until("the slot has no program", 20 * SECOND, || {
        tc::list(&mut socket, index, Hook::Ingress)
            .unwrap()
            .is_empty()
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn maps_of_another_size_go_when_a_pool_comes_back_from_nft() {
    lab::run(|lab| {
        let mut world = World::with_config(lab, "nics_max = 128");
        let spec = pool("web", "netns", 0, 1, &json!({"uplink": "route"}));
        world.daemon.create_pool(&spec).unwrap();
        world.route_back(0);
        let (lease, guest) = world.guest("web", "one");
        assert_in_touch(&lease, &guest);
        begin_move(&world, "web", "nft");
        assert!(world.daemon.terminate().unwrap().success());
        world.configure("nics_max = 256");
        world.daemon.restart().unwrap();
        assert_in_touch(&lease, &guest);
        // What the daemon finds at its start it lets go of two seconds later; this comes after.
        thread::sleep(5 * SECOND);
        let pinger = ping(&world.beyond.path(), lease.ipv4);
        begin_move(&world, "web", "ebpf");
        wait_until("the lease has moved", 20 * SECOND, || {
            world.detail(&lease)["traffic"]["ingress"]["packets"].is_u64()
        });
        wait_until_old_maps_are_gone();
        assert_none_lost(pinger, "back to eBPF, by other maps");
        assert_in_touch(&lease, &guest);
        let maps = lab.shell(&format!("bpftool -j map show pinned {MAPS}/v1/nics"));
        let maps: Value = serde_json::from_str(&maps).unwrap();
        assert_eq!(maps["max_entries"], 256, "those of before didn't fit");
        world.daemon.kill().unwrap();
        world.daemon.restart().unwrap();
        assert_eq!(old_maps(), [""; 0], "and the next start keeps these maps");
        assert_in_touch(&lease, &guest);
        assert_eq!(world.detail(&lease)["defects"], json!([]));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_daemon_with_other_maps_ends_a_move_to_nft_that_another_began() {
    lab::run(|lab| {
        let mut world = World::with_config(lab, "nics_max = 128");
        let spec = pool("netns", "netns", 0, 1, &json!({"uplink": "route"}));
        world.daemon.create_pool(&spec).unwrap();
        world.route_back(0);
        let (lease, guest) = world.guest("netns", "one");
        assert_in_touch(&lease, &guest);
        // So that the slot can't be moved for now.
        let end = host_end(&lease);
        lab.run(&format!("ip link set {end} name away"));
        begin_move(&world, "netns", "nft");
        wait_until("the move has failed", 20 * SECOND, || {
            world.daemon.log().contains("cannot move a slot")
        });
        world.daemon.kill().unwrap();
        lab.run(&format!("ip link set away name {end}"));
        assert_in_touch(&lease, &guest);
        let pingers = [
            ("from beyond", ping(&world.beyond.path(), lease.ipv4)),
            ("from the host", ping(HERE.as_ref(), lease.ipv6)),
        ];
        world.configure("nics_max = 256");
        world.daemon.restart().unwrap();
        wait_until_without_programs(lab, &lease);
        wait_until_old_maps_are_gone();
        assert_in_touch(&lease, &guest);
        for (whence, pinger) in pingers {
            assert_none_lost(pinger, &format!("in the rest of a move, {whence}"));
        }
        let detail = world.detail(&lease);
        assert_eq!(
            (&detail["data_path"], &detail["defects"]),
            (&json!("nft"), &json!([]))
        );
    });
}

/// A TCP connection from beyond to a guest's echo server.
struct EchoConnection(TcpStream);

impl EchoConnection {
    fn open(world: &World, address: IpAddr) -> Self {
        let target = SocketAddr::new(address, ECHO_PORT);
        let connect = || Ok(TcpStream::connect_timeout(&target, 5 * SECOND)?);
        let stream = world.beyond.inside(connect).unwrap();
        stream.set_read_timeout(Some(5 * SECOND)).unwrap();
        Self(stream)
    }

    fn assert_alive(&mut self) {
        self.0.write_all(b"still there?").unwrap();
        let mut answer = [0; 12];
        self.0.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"still there?");
    }
}

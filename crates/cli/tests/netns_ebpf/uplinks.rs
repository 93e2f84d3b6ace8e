//! Uplinks: which of them a packet takes, one that goes away, one that can't reach the next hop, one that
//! sends later.

use std::{
    net::{Ipv4Addr, SocketAddr},
    thread,
    time::Instant,
};

use sandwire_testlab::{
    command,
    fake_guest::frame,
    guest::kernel::Series,
    host::{BEYOND_IPV4, ECHO_PORT, WHO_AM_I_PORT, serve_udp},
    lab::{self, Lab},
    namespace::Namespace,
};
use serde_json::json;

use crate::{
    GATEWAY_MAC, assert_in_touch,
    ebpf::{POOLS, SECOND, StackWatch, World, assert_none_lost, ping, pool, prefixes, wait_until},
};

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn two_uplinks_follow_the_hosts_routing_rules() {
    lab::run(|lab| {
        let second = second_uplink(lab);
        let world = World::with_config(lab, "uplinks = [\"up0\", \"up1\"]");
        assert_routing_rules_hold(lab, &world, &second, true);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_is_no_uplink_is_reached_through_the_hosts_stack() {
    lab::run(|lab| {
        let second = second_uplink(lab);
        let world = World::with_config(lab, "uplinks = []");
        assert_routing_rules_hold(lab, &world, &second, false);
    });
}

/// Each pool's packets leave where the host's rules say, and answers to calls the same way. Only what
/// leaves beside the stack can be told a table: the stack knows rules alone.
fn assert_routing_rules_hold(lab: &Lab, world: &World, second: &Namespace, has_tables: bool) {
    // The same address beyond both uplinks tells which way a packet went.
    world
        .beyond
        .run("ip address add 192.0.2.1/32 dev lo")
        .unwrap();
    second.run("ip address add 192.0.2.1/32 dev lo").unwrap();
    for rule in ["fwmark 7", "from 10.66.0.0/24"] {
        lab.run(&format!("ip rule add {rule} lookup 100"));
    }
    lab.run("ip route add default via 198.51.100.2 dev up1 table 100");
    let anywhere = Ipv4Addr::new(192, 0, 2, 1);
    let beyond_second = Ipv4Addr::new(198, 51, 100, 2);
    let route = |key: &str, value: u32| {
        let mut policy = json!({"uplink": "route"});
        policy[key] = json!(value);
        policy
    };
    // Pool, policy, whom it calls, uplink that it must use, by what address it is seen there.
    let plain = json!({"uplink": "route"});
    let masked = json!({"uplink": "masquerade", "route_mark": 7});
    let mut cases = vec![
        ("plain", plain.clone(), anywhere, "first", "clone"),
        (
            "marked",
            route("route_mark", 7),
            anywhere,
            "second",
            "clone",
        ),
        ("bysource", plain, anywhere, "second", "clone"),
        ("masked", masked, beyond_second, "second", "198.51.100.1"),
    ];
    if has_tables {
        cases.push((
            "bytable",
            route("route_table", 100),
            anywhere,
            "second",
            "clone",
        ));
    }
    for (number, (name, policy, target, way, source)) in cases.iter().enumerate() {
        let kind = POOLS[number % 2];
        let spec = pool(name, kind, number, 1, policy);
        world.daemon.create_pool(&spec).unwrap();
        let (lease, guest) = world.guest(name, name);
        if *way == "first" {
            world.route_back(number);
        } else {
            let [ipv4, _] = prefixes(number);
            second
                .run(&format!("ip route add {ipv4} via 198.51.100.1"))
                .unwrap();
        }
        let source = match *source {
            "clone" => lease.ipv4.to_string(),
            address => address.to_owned(),
        };
        let target = SocketAddr::new((*target).into(), WHO_AM_I_PORT);
        let answer = guest.exchange_udp(target, b"?", 5 * SECOND).expect(name);
        let answer = String::from_utf8(answer).unwrap();
        let prefix = if *way == "first" { "" } else { "second " };
        let wanted = format!("{prefix}{source}:");
        assert!(answer.starts_with(&wanted), "{name}: {answer}");
        // Called from there, it answers the same way.
        if *way == "second" && source == lease.ipv4.to_string() {
            let call = format!("ping -n -q -c 3 -i 0.05 -W 5 {source}");
            second.run(&call).expect(name);
        }
        guest.detach().unwrap();
    }
}

/// Another uplink `up1`, with a server behind it that says so.
fn second_uplink(lab: &Lab) -> Namespace {
    let second = lab.namespace("second");
    lab.run("ip link add up1 index 1100 type veth peer name eth0 netns second");
    lab.run("ip address add 198.51.100.1/24 dev up1");
    lab.run("ip link set up1 up");
    second
        .run("ip address add 198.51.100.2/24 dev eth0")
        .unwrap();
    second.run("ip link set eth0 up").unwrap();
    let answer = |_: &[u8], caller: SocketAddr| {
        let caller = SocketAddr::new(caller.ip().to_canonical(), caller.port());
        format!("second {caller}").into_bytes()
    };
    second.inside(|| serve_udp(WHO_AM_I_PORT, answer)).unwrap();
    second
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_uplink_that_comes_back_carries_traffic_again() {
    lab::run(|lab| {
        let world = World::start(lab, "route", 1);
        let guests: Vec<_> = POOLS.iter().map(|pool| world.guest(pool, pool)).collect();
        for (lease, guest) in &guests {
            assert_in_touch(lease, guest);
        }
        world.beyond.disconnect().unwrap();
        for (lease, guest) in &guests {
            guest.ping(BEYOND_IPV4.into(), SECOND / 2).unwrap_err();
            // The host itself still reaches them.
            command::run(&format!("ping -n -q -c 1 -W 5 {}", lease.ipv4)).unwrap();
        }
        world.beyond.connect().unwrap();
        for number in 0..POOLS.len() {
            world.route_back(number);
        }
        let watch = StackWatch::start();
        wait_until(
            "packets pass the new uplink beside the stack",
            30 * SECOND,
            || {
                let before = watch.packets();
                let all_answered = guests.iter().all(|(lease, guest)| {
                    let called = world
                        .beyond
                        .run(&format!("ping -n -q -c 1 -W 1 {}", lease.ipv4));
                    called.is_ok() && guest.ping(BEYOND_IPV4.into(), SECOND).is_ok()
                });
                all_answered && watch.packets() == before
            },
        );
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_next_hop_that_never_resolves_harms_nobody_else() {
    lab::run(|lab| {
        let world = World::start(lab, "route", 2);
        let far = SocketAddr::new(Ipv4Addr::new(192, 0, 2, 1).into(), ECHO_PORT);
        lab.run("ip route add 192.0.2.0/24 via 203.0.113.99");
        for pool in POOLS {
            let (lease, guest) = world.guest(pool, &format!("{pool}-a"));
            let (_, lost) = world.guest(pool, &format!("{pool}-b"));
            let calls = thread::spawn(move || {
                for _ in 0..30 {
                    lost.exchange_udp(far, b"?", SECOND / 10).unwrap_err();
                }
                lost
            });
            assert_in_touch(&lease, &guest);
            let pinger = ping(&world.beyond.path(), lease.ipv4);
            let lost = calls.join().unwrap();
            assert_none_lost(pinger, "while the next hop is sought");
            // Once it is there, it is used.
            world
                .beyond
                .run("ip address add 203.0.113.99/24 dev eth0")
                .unwrap();
            world
                .beyond
                .run("ip address add 192.0.2.1/32 dev lo")
                .unwrap();
            wait_until("the next hop is found", 10 * SECOND, || {
                lost.exchange_udp(far, b"!", SECOND).is_ok()
            });
            world
                .beyond
                .run("ip address delete 203.0.113.99/24 dev eth0")
                .unwrap();
            world
                .beyond
                .run("ip address delete 192.0.2.1/32 dev lo")
                .unwrap();
            lab.run("ip neighbour flush dev up0");
        }
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn an_uplink_with_fq_sends_later_instead_of_dropping() {
    lab::run_on(Series::Linux6_12, 150 * SECOND, |lab| {
        let world = World::without_pools(lab);
        lab.run("tc qdisc replace dev up0 root fq");
        // 20 frames of 1242 bytes a second, and one at once. They wait two seconds at most.
        let limits = json!({"egress": {"bits_per_second": 200_000, "burst_bytes": 2_000}});
        let policy = json!({"uplink": "route", "limits": limits});
        world
            .daemon
            .create_pool(&pool("host", "host", 0, 1, &policy))
            .unwrap();
        world.route_back(0);
        let (lease, guest) = world.guest("host", "slow");
        assert_in_touch(&lease, &guest);
        let before = received_beyond(&world);
        let frame = frame::udp(
            guest.network().mac,
            GATEWAY_MAC,
            SocketAddr::new(guest.network().ipv4.0.into(), 5000),
            SocketAddr::new(BEYOND_IPV4.into(), 5000),
            &[0; 1200],
        );
        let started = Instant::now();
        for _ in 0..30 {
            guest.send_frame(&frame).unwrap();
        }
        assert!(started.elapsed() < SECOND / 2, "sent too slowly to tell");
        wait_until("the last packet came", 10 * SECOND, || {
            received_beyond(&world) - before >= 30
        });
        let took = started.elapsed();
        assert!(took > SECOND, "all 30 packets came within {took:?}");
        let drops = world.detail(&lease)["traffic"]["drops"].to_string();
        assert!(!drops.contains("bit_limit"), "{drops}");
    });
}

/// Packets that have arrived beyond the uplink.
fn received_beyond(world: &World) -> u64 {
    let file = "cat /sys/class/net/eth0/statistics/rx_packets";
    // A sysfs shows the namespace of whoever mounted it; `ip netns exec` mounts one.
    let text = command::run(&format!("ip netns exec beyond {file}")).unwrap();
    assert!(world.beyond.path().ends_with("beyond"));
    text.trim().parse().unwrap()
}

//! Uplinks: which of them a packet takes, one that goes away, one that can't reach the next hop, one that
//! sends later.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    thread,
    time::Instant,
};

use sandwire_testlab::{
    command,
    fake_guest::{FakeGuest, frame},
    host::{BEYOND_IPV4, BEYOND_IPV6, ECHO_PORT, WHO_AM_I_PORT, serve_udp},
    lab::{self, Lab},
    namespace::{self, Namespace},
    sandwire::Lease,
    traffic::{self, Receiver},
};
use serde_json::{Value, json};

use crate::{
    GATEWAY_MAC, assert_in_touch,
    ebpf::{POOLS, SECOND, StackWatch, World, assert_none_lost, ping, pool, prefixes, wait_until},
    guests_in_touch,
};

/// Another port of the servers beyond the uplinks.
const OTHER_PORT: u16 = 7778;

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

/// What is beyond the uplinks in one address family.
pub(crate) struct Family {
    /// Which of a pool's prefixes and a lease's addresses is of this family.
    place: usize,
    /// Option of `ip` for its rules and routes.
    pub(crate) option: &'static str,
    /// A server beyond both uplinks, which tells by its answer which way a packet went.
    pub(crate) anywhere: IpAddr,
    /// The prefix that it is in.
    anywhere_prefix: &'static str,
    /// A router on the first uplink's link, if it is there at all.
    router: IpAddr,
    /// The host's address on the second uplink, and a server's on the same link.
    pub(crate) second: [IpAddr; 2],
    /// Bits of the links' prefixes.
    pub(crate) length: u8,
}

pub(crate) const FAMILIES: [Family; 2] = [
    Family {
        place: 0,
        option: "-4",
        anywhere: IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
        anywhere_prefix: "192.0.2.0/24",
        router: IpAddr::V4(Ipv4Addr::new(203, 0, 113, 99)),
        second: [
            IpAddr::V4(Ipv4Addr::new(198, 51, 100, 1)),
            IpAddr::V4(Ipv4Addr::new(198, 51, 100, 2)),
        ],
        length: 24,
    },
    Family {
        place: 1,
        option: "-6",
        anywhere: IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 3, 0, 0, 0, 0, 1)),
        anywhere_prefix: "2001:db8:3::/64",
        router: IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 0x99)),
        second: [
            IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 1)),
            IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 2)),
        ],
        length: 64,
    },
];

impl Family {
    /// A line that gives an interface an address, to be used at once.
    pub(crate) fn add_address(&self, address: IpAddr, length: u8, interface: &str) -> String {
        let nodad = if address.is_ipv6() { " nodad" } else { "" };
        format!("ip address add {address}/{length} dev {interface}{nodad}")
    }

    /// A line that gives an interface the address of the server anywhere.
    pub(crate) fn add_anywhere(&self, interface: &str) -> String {
        let length = if self.anywhere.is_ipv6() { 128 } else { 32 };
        self.add_address(self.anywhere, length, interface)
    }

    /// The server on the first uplink's link.
    fn first(&self) -> IpAddr {
        match self.anywhere {
            IpAddr::V4(_) => BEYOND_IPV4.into(),
            IpAddr::V6(_) => BEYOND_IPV6.into(),
        }
    }

    pub(crate) fn clone_address(&self, lease: &Lease) -> IpAddr {
        [lease.ipv4, lease.ipv6][self.place]
    }
}

/// A pool whose packets must leave by a certain uplink.
struct Case {
    name: &'static str,
    policy: Value,
    by_second: bool,
}

/// Each pool's packets leave where the host's rules say, and answers to calls the same way. Only what
/// leaves beside the stack can be told a table: the stack knows rules alone.
fn assert_routing_rules_hold(lab: &Lab, world: &World, second: &Namespace, has_tables: bool) {
    let by_source = prefixes(2);
    for family in &FAMILIES {
        world.beyond.run(&family.add_anywhere("lo")).unwrap();
        second.run(&family.add_anywhere("lo")).unwrap();
        let ip = format!("ip {}", family.option);
        let source = format!("from {}", by_source[family.place]);
        for rule in ["fwmark 7", &source] {
            lab.run(&format!("{ip} rule add {rule} lookup 100"));
        }
        let server = family.second[1];
        lab.run(&format!(
            "{ip} route add default via {server} dev up1 table 100"
        ));
    }
    let case = |name, policy: Value, by_second| Case {
        name,
        policy,
        by_second,
    };
    let route = json!({"uplink": "route"});
    let mut cases = vec![
        case("plain", route.clone(), false),
        case("marked", json!({"uplink": "route", "route_mark": 7}), true),
        case("bysource", route, true),
        case(
            "masked",
            json!({"uplink": "masquerade", "route_mark": 7}),
            true,
        ),
    ];
    if has_tables {
        let policy = json!({"uplink": "route", "route_table": 100});
        cases.push(case("bytable", policy, true));
    }
    for (number, case) in cases.iter().enumerate() {
        let name = case.name;
        let kind = POOLS[number % 2];
        let spec = pool(name, kind, number, 1, &case.policy);
        world.daemon.create_pool(&spec).unwrap();
        let (lease, guest) = world.guest(name, name);
        match case.by_second {
            false => world.route_back(number),
            true => routes_back(number)
                .iter()
                .for_each(|route| drop(second.run(route).unwrap())),
        }
        for family in &FAMILIES {
            assert_leaves_by(case, family, (&lease, &guest), second);
        }
        guest.detach().unwrap();
    }
}

/// A packet leaves by the right uplink with the right source; called from there, the guest answers the same way.
fn assert_leaves_by(
    case: &Case,
    family: &Family,
    (lease, guest): (&Lease, &FakeGuest),
    second: &Namespace,
) {
    let what = format!("{} by {}", case.name, family.option);
    let is_masked = case.policy["uplink"] == "masquerade";
    // Behind a masquerade only the address that was called may answer.
    let (target, source) = match is_masked {
        true => (family.second[1], family.second[0]),
        false => (family.anywhere, family.clone_address(lease)),
    };
    let target = SocketAddr::new(target, WHO_AM_I_PORT);
    let answer = guest.exchange_udp(target, b"?", 5 * SECOND).expect(&what);
    let answer = String::from_utf8(answer).unwrap();
    let (by_second, caller) = match answer.strip_prefix("second ") {
        Some(caller) => (true, caller),
        None => (false, answer.as_str()),
    };
    let caller: SocketAddr = caller.parse().expect(&what);
    assert_eq!(
        (by_second, caller.ip()),
        (case.by_second, source),
        "{what}: {answer}"
    );
    if case.by_second && !is_masked {
        let call = format!("ping -n -q -c 3 -i 0.05 -W 5 {source}");
        second.run(&call).expect(&what);
    }
}

/// What was decided for all of a server's ports must not outlive a rule that names one of them: the daemon, which could
/// tell of it, isn't there.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_rule_that_names_a_port_leads_that_port_elsewhere() {
    lab::run(|lab| {
        let second = second_uplink(lab);
        let mut world = World::with_config(lab, "uplinks = [\"up0\", \"up1\"]");
        let policy = json!({"uplink": "route"});
        let spec = pool("ports", POOLS[0], 0, 1, &policy);
        world.daemon.create_pool(&spec).unwrap();
        let (_lease, guest) = world.guest("ports", "ports");
        world.route_back(0);
        for route in routes_back(0) {
            second.run(&route).unwrap();
        }
        second.inside(|| serve_udp(OTHER_PORT, in_second)).unwrap();
        let in_first = |_: &[u8], _| b"first".to_vec();
        world
            .beyond
            .inside(|| serve_udp(OTHER_PORT, in_first))
            .unwrap();
        world.daemon.kill().unwrap();
        for family in &FAMILIES {
            world.beyond.run(&family.add_anywhere("lo")).unwrap();
            second.run(&family.add_anywhere("lo")).unwrap();
            let (option, server) = (family.option, family.second[1]);
            let ip = |line: &str| lab.run(&format!("ip {option} {line}"));
            let via = family.first();
            ip(&format!("route add default via {server} dev up1 table 100"));
            ip(&format!(
                "route replace {} via {via} dev up0",
                family.anywhere_prefix
            ));
            assert_eq!(by_second(&guest, family), [false, false]);
            for rule in [
                format!("ipproto udp dport {OTHER_PORT} lookup 100"),
                format!("dport {WHO_AM_I_PORT} lookup 100"),
            ] {
                let is_other = rule.starts_with("ipproto");
                ip(&format!("rule add {rule}"));
                thread::sleep(SECOND / 5);
                assert_eq!(by_second(&guest, family), [!is_other, is_other], "{rule}");
                ip(&format!("rule delete {rule}"));
                thread::sleep(SECOND / 5);
                assert_eq!(by_second(&guest, family), [false, false], "without {rule}");
            }
        }
    });
}

/// Whether the second uplink leads to a server's two ports, asked in turn.
fn by_second(guest: &FakeGuest, family: &Family) -> [bool; 2] {
    let mut ways = [BTreeSet::new(), BTreeSet::new()];
    for _ in 0..3 {
        for (port, ways) in [WHO_AM_I_PORT, OTHER_PORT].into_iter().zip(&mut ways) {
            let target = SocketAddr::new(family.anywhere, port);
            let answer = ask(guest, target);
            ways.insert(answer.starts_with(b"second "));
        }
    }
    ways.map(|ways| {
        assert_eq!(ways.len(), 1, "{}", family.anywhere);
        ways.contains(&true)
    })
}

/// Where the kernel shares a route's flows among uplinks by their ports, too, those of one sandbox to one server's port go
/// the same way: a decision is kept for all of them, whoever comes first.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_flow_keeps_its_uplink_where_several_share_a_route() {
    lab::run(|lab| {
        let second = second_uplink(lab);
        let world = World::with_config(lab, "uplinks = [\"up0\", \"up1\"]");
        let policy = json!({"uplink": "route"});
        world
            .daemon
            .create_pool(&pool("shared", POOLS[0], 0, 1, &policy))
            .unwrap();
        let (_lease, guest) = world.guest("shared", "shared");
        world.route_back(0);
        for route in routes_back(0) {
            second.run(&route).unwrap();
        }
        for family in &FAMILIES {
            world.beyond.run(&family.add_anywhere("lo")).unwrap();
            second.run(&family.add_anywhere("lo")).unwrap();
            share_route(lab, family);
            let target = SocketAddr::new(family.anywhere, WHO_AM_I_PORT);
            ask(&guest, target);
            assert_flows_keep_their_way(&guest, target);
        }
    });
}

/// A datagram may be lost, as to a neighbour of whom the kernel has no room to ask.
fn ask(guest: &FakeGuest, target: SocketAddr) -> Vec<u8> {
    let mut answers = (0..10).map(|_| guest.exchange_udp(target, b"?", SECOND));
    let answer = answers.find_map(Result::ok);
    answer.unwrap_or_else(|| panic!("{target} doesn't answer"))
}

/// What is anywhere is reached by both uplinks, by a hash of addresses and ports.
fn share_route(lab: &Lab, family: &Family) {
    let (option, prefix) = (family.option, family.anywhere_prefix);
    let family_name = match family.anywhere {
        IpAddr::V4(_) => "ipv4",
        IpAddr::V6(_) => "ipv6",
    };
    let (first, server) = (family.first(), family.second[1]);
    lab.run(&format!(
        "sysctl -q net.{family_name}.fib_multipath_hash_policy=1"
    ));
    lab.run(&format!(
        "ip {option} route replace {prefix} nexthop via {first} dev up0 nexthop via {server} dev up1"
    ));
}

fn assert_flows_keep_their_way(guest: &FakeGuest, target: SocketAddr) {
    let network = guest.network();
    let source: IpAddr = match target.ip() {
        IpAddr::V4(_) => network.ipv4.0.into(),
        IpAddr::V6(_) => network.ipv6.0.into(),
    };
    guest.received_frames().unwrap();
    // Longer than decisions are kept, and in turn: each flow is at some time the first.
    for packet in 0..400_u16 {
        let source = SocketAddr::new(source, 5000 + packet % 7);
        let frame = frame::udp(network.mac, GATEWAY_MAC, source, target, b"?");
        guest.send_frame(&frame).unwrap();
        thread::sleep(SECOND / 250);
    }
    thread::sleep(SECOND / 4);
    let mut ways = BTreeMap::<u16, BTreeSet<bool>>::new();
    for frame in guest.received_frames().unwrap() {
        let text = String::from_utf8_lossy(&frame);
        let port = text.rsplit(':').next().and_then(|end| end.parse().ok());
        if let Some(port) = port {
            ways.entry(port)
                .or_default()
                .insert(text.contains("second "));
        }
    }
    assert_eq!(ways.len(), 7, "{target}: {ways:?}");
    assert!(
        ways.values().all(|ways| ways.len() == 1),
        "{target}: {ways:?}"
    );
}

/// Lines that let a world beyond the second uplink answer the clone addresses of a pool.
pub(crate) fn routes_back(number: usize) -> Vec<String> {
    let prefixes = prefixes(number).into_iter().zip(&FAMILIES);
    prefixes
        .map(|(prefix, family)| format!("ip route add {prefix} via {}", family.second[0]))
        .collect()
}

/// Another uplink `up1`, with a server behind it that says so.
pub(crate) fn second_uplink(lab: &Lab) -> Namespace {
    let second = lab.namespace("second");
    lab.run("ip link add up1 index 1100 type veth peer name eth0 netns second");
    for family in &FAMILIES {
        let [host, server] = family.second;
        lab.run(&family.add_address(host, family.length, "up1"));
        second
            .run(&family.add_address(server, family.length, "eth0"))
            .unwrap();
    }
    lab.run("ip link set up1 up");
    second.run("ip link set eth0 up").unwrap();
    second
        .inside(|| serve_udp(WHO_AM_I_PORT, in_second))
        .unwrap();
    second
}

fn in_second(_: &[u8], caller: SocketAddr) -> Vec<u8> {
    let caller = SocketAddr::new(caller.ip().to_canonical(), caller.port());
    format!("second {caller}").into_bytes()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_uplink_that_comes_back_carries_traffic_again() {
    lab::run(|lab| {
        let world = World::start(lab, "route", 1);
        let guests = guests_in_touch(&world);
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
        for family in &FAMILIES {
            let (prefix, router) = (family.anywhere_prefix, family.router);
            lab.run(&format!("ip route add {prefix} via {router}"));
        }
        for pool in POOLS {
            let (lease, guest) = world.guest(pool, &format!("{pool}-a"));
            let (_, mut lost) = world.guest(pool, &format!("{pool}-b"));
            for family in &FAMILIES {
                let far = SocketAddr::new(family.anywhere, ECHO_PORT);
                let calls = thread::spawn(move || {
                    for _ in 0..30 {
                        lost.exchange_udp(far, b"?", SECOND / 10).unwrap_err();
                    }
                    lost
                });
                assert_in_touch(&lease, &guest);
                let pinger = ping(&world.beyond.path(), family.clone_address(&lease));
                lost = calls.join().unwrap();
                assert_none_lost(pinger, "while the next hop is sought");
                // Once it is there, it is used.
                let lines = [
                    family.add_address(family.router, family.length, "eth0"),
                    family.add_anywhere("lo"),
                ];
                for line in &lines {
                    world.beyond.run(line).unwrap();
                }
                wait_until("the next hop is found", 10 * SECOND, || {
                    lost.exchange_udp(far, b"!", SECOND).is_ok()
                });
                for line in &lines {
                    let line = line.replace(" add ", " delete ");
                    world.beyond.run(&line).unwrap();
                }
                lab.run("ip neighbour flush dev up0");
            }
        }
    });
}

/// An uplink with `fq` sends later what exceeds a limit, instead of dropping it.
pub(crate) fn assert_fq_sends_later(world: &World) {
    // 20 frames of 1242 bytes a second, and one at once. They wait two seconds at most.
    let limits = json!({"egress": {"bits_per_second": 200_000, "burst_bytes": 2_000}});
    let policy = json!({"uplink": "route", "limits": limits});
    let (lease, guest) = world.guest("host", "slow");
    assert_in_touch(&lease, &guest);
    world.daemon.set_policy("slow", &policy).unwrap();
    let before = received_beyond(world);
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
    // Paced, the last one leaves after 1.4 s.
    assert!(
        started.elapsed() < SECOND * 4 / 5,
        "sent too slowly to tell"
    );
    wait_until("the last packet came", 10 * SECOND, || {
        received_beyond(world) - before >= 30
    });
    let took = started.elapsed();
    assert!(took > SECOND, "all 30 packets came within {took:?}");
    let drops = world.detail(&lease)["traffic"]["drops"].to_string();
    assert!(!drops.contains("bit_limit"), "{drops}");
    assert_few_wait(world, (&lease, &guest));
}

/// TCP of a process in a netns slot, with more under way at once than the burst and less than may wait, sees delay alone.
pub(crate) fn assert_fq_delays_tcp(lab: &Lab, world: &World) {
    lab.shell("ip netns exec beyond sysctl -q -w 'net.ipv4.tcp_rmem=4096 8192 8192'");
    let limits = json!({"egress": {"bits_per_second": 400_000, "burst_bytes": 2_000}});
    let policy = json!({"uplink": "route", "limits": limits});
    let acquired = world.daemon.json("acquire netns paced --process").unwrap();
    let lease = Lease::read(&acquired).unwrap();
    world.daemon.set_policy("paced", &policy).unwrap();
    let blocks = 2;
    for server in [IpAddr::from(BEYOND_IPV4), BEYOND_IPV6.into()] {
        let receiver = world
            .beyond
            .inside(|| Receiver::listen(OTHER_PORT))
            .unwrap();
        let receiving = thread::spawn(move || receiver.receive().unwrap());
        let target = SocketAddr::new(server, OTHER_PORT);
        let started = Instant::now();
        let sent = namespace::inside(&lease.path, || traffic::send(target, blocks)).unwrap();
        let took = started.elapsed();
        assert_eq!(receiving.join().unwrap(), sent, "to {server}");
        // At 50,000 bytes a second.
        assert!(took > SECOND * 2, "to {server}: within {took:?}");
    }
    let drops = world.detail(&lease)["traffic"]["drops"].to_string();
    assert!(!drops.contains("bit_limit"), "{drops}");
}

/// The queue is everybody's, and takes a number of packets: who floods it with small ones has few there.
fn assert_few_wait(world: &World, (lease, guest): (&Lease, &FakeGuest)) {
    // 100 of these frames a second, of many flows. In two seconds 200 could wait, which takes longer than to look.
    let limits = json!({"egress": {"bits_per_second": 48_000, "burst_bytes": 2_000}});
    let policy = json!({"uplink": "route", "limits": limits});
    world.daemon.set_policy("slow", &policy).unwrap();
    let frames: Vec<_> = (1..=300)
        .map(|port| {
            frame::udp(
                guest.network().mac,
                GATEWAY_MAC,
                SocketAddr::new(guest.network().ipv4.0.into(), port),
                SocketAddr::new(BEYOND_IPV4.into(), 5000),
                &[0; 18],
            )
        })
        .collect();
    for frame in frames.iter().cycle().take(1500) {
        guest.send_frame(frame).unwrap();
    }
    let queues = command::run("tc -j -s qdisc show dev up0").unwrap();
    let queues: Value = serde_json::from_str(&queues).unwrap();
    let waiting = queues[0]["qlen"].as_u64().unwrap();
    assert!((1..160).contains(&waiting), "{queues}");
    let drops = &world.detail(lease)["traffic"]["drops"];
    // How many depends on how long the sending took: meanwhile packets leave.
    assert!(drops["bit_limit"].as_u64() > Some(0), "{drops}");
}

/// Packets that have arrived beyond the uplink.
fn received_beyond(world: &World) -> u64 {
    let file = "cat /sys/class/net/eth0/statistics/rx_packets";
    // A sysfs shows the namespace of whoever mounted it; `ip netns exec` mounts one.
    let text = command::run(&format!("ip netns exec beyond {file}")).unwrap();
    assert!(world.beyond.path().ends_with("beyond"));
    text.trim().parse().unwrap()
}

//! Uplinks: which of them a packet takes, one that goes away, one that can't reach the next hop, one that
//! sends later.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Instant,
};

use sandwire_testlab::{
    command,
    fake_guest::{FakeGuest, frame},
    host::{BEYOND_IPV4, BEYOND_IPV6, ECHO_PORT, WHO_AM_I_PORT, serve_udp},
    lab::{self, Lab},
    namespace::Namespace,
    sandwire::Lease,
};
use serde_json::{Value, json};

use crate::{
    GATEWAY_MAC, assert_in_touch,
    ebpf::{POOLS, SECOND, StackWatch, World, assert_none_lost, ping, pool, prefixes, wait_until},
    guests_in_touch,
};

/// Where a server of the host listens, and what it has heard.
const HOST_PORT: u16 = 7777;
/// Another port of the servers beyond the uplinks.
const OTHER_PORT: u16 = 7778;
static HEARD: AtomicU64 = AtomicU64::new(0);

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
    option: &'static str,
    /// A server beyond both uplinks, which tells by its answer which way a packet went.
    anywhere: IpAddr,
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
    fn add_anywhere(&self, interface: &str) -> String {
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
            let answer = guest.exchange_udp(target, b"?", 5 * SECOND).unwrap();
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
            guest.exchange_udp(target, b"?", 5 * SECOND).unwrap();
            assert_flows_keep_their_way(&guest, target);
        }
    });
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

/// The host's own addresses are in no other table, and what a table leads elsewhere the stack may get all the same. What
/// the host itself calls answers it.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_table_opens_no_service_of_the_host_and_hides_no_sandbox_from_it() {
    lab::run(|lab| {
        let _second = second_uplink(lab);
        let world = World::with_config(lab, "uplinks = [\"up0\", \"up1\"]");
        for family in &FAMILIES {
            let (option, server) = (family.option, family.second[1]);
            lab.run(&format!(
                "ip {option} route add default via {server} dev up1 table 100"
            ));
        }
        serve_udp(HOST_PORT, |_, _| {
            HEARD.fetch_add(1, Ordering::SeqCst);
            b"host".to_vec()
        })
        .unwrap();
        let cases = [
            ("masked", json!("masquerade"), json!([])),
            ("routed", json!("route"), json!([])),
            ("allowed", json!("masquerade"), json!(["udp/7777"])),
        ];
        for (number, (name, uplink, services)) in cases.iter().enumerate() {
            let policy = json!({"uplink": uplink, "route_table": 100, "host_services": services});
            let spec = pool(name, POOLS[number % 2], number, 1, &policy);
            world.daemon.create_pool(&spec).unwrap();
            let (lease, guest) = world.guest(name, name);
            for family in &FAMILIES {
                let clone = family.clone_address(&lease);
                // The guest asks for its gateway once a second at most, whichever family.
                let call = format!("ping -n -q -c 1 -W 1 {clone}");
                wait_until(&format!("{name}: {clone} answers"), 10 * SECOND, || {
                    command::run(&call).is_ok()
                });
                let host = SocketAddr::new(family.second[0], HOST_PORT);
                let before = HEARD.load(Ordering::SeqCst);
                let answer = guest.exchange_udp(host, b"?", SECOND);
                // The stack gets what has no hop left, whatever the way.
                guest.send_frame(&last_hop(&guest, host)).unwrap();
                thread::sleep(SECOND / 2);
                let heard = HEARD.load(Ordering::SeqCst) - before;
                let expected = if *name == "allowed" { 2 } else { 0 };
                assert_eq!(heard, expected, "{name}: {host}, answered {answer:?}");
            }
            guest.detach().unwrap();
        }
    });
}

/// The stack would send by its own rules what a table doesn't lead out: what is too big for its route, what it refuses,
/// and what it says nothing of, though the policy has that service of the host.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_a_table_does_not_lead_out_leaves_by_no_other() {
    lab::run(|lab| {
        let second = second_uplink(lab);
        let world = World::with_config(lab, "uplinks = [\"up0\", \"up1\"]");
        serve_udp(WHO_AM_I_PORT, |_, _| b"host".to_vec()).unwrap();
        for family in &FAMILIES {
            world.beyond.run(&family.add_anywhere("lo")).unwrap();
            second.run(&family.add_anywhere("lo")).unwrap();
        }
        for (number, kind) in POOLS.into_iter().enumerate() {
            let policy = json!({"uplink": "route", "route_table": 100,
                "host_services": [format!("udp/{WHO_AM_I_PORT}")]});
            let spec = pool(kind, kind, number, 1, &policy);
            world.daemon.create_pool(&spec).unwrap();
            world.route_back(number);
            for route in routes_back(number) {
                second.run(&route).unwrap();
            }
            let (lease, guest) = world.guest(kind, kind);
            for family in &FAMILIES {
                assert_leaves_by_the_table_alone(lab, &world, family, (&lease, &guest));
            }
        }
    });
}

fn assert_leaves_by_the_table_alone(
    lab: &Lab,
    world: &World,
    family: &Family,
    (lease, guest): (&Lease, &FakeGuest),
) {
    let (option, server) = (family.option, family.second[1]);
    let set = |line: &str| {
        lab.shell(&format!("ip {option} route {line}"));
        // As long as decisions are kept.
        thread::sleep(SECOND / 5);
    };
    let refused = || {
        let drops = &world.detail(lease)["traffic"]["drops"];
        drops["no_route"].as_u64().unwrap_or(0)
    };
    let far = SocketAddr::new(family.anywhere, WHO_AM_I_PORT);
    let ask = |payload: &[u8], patience| guest.exchange_udp(far, payload, patience);
    set(&format!(
        "replace default via {server} dev up1 table 100 mtu lock 1300"
    ));
    assert!(ask(b"?", 5 * SECOND).unwrap().starts_with(b"second "));
    let before = refused();
    ask(&[0; 1400], SECOND / 2).unwrap_err();
    assert!(refused() > before, "{far}: not told");
    for table in ["replace unreachable default table 100", "flush table 100"] {
        set(table);
        let before = refused();
        ask(b"?", SECOND / 2).unwrap_err();
        assert!(refused() > before, "{far} after {table}: not told");
        let host = SocketAddr::new(family.second[0], WHO_AM_I_PORT);
        let answer = guest.exchange_udp(host, b"?", 5 * SECOND).unwrap();
        assert_eq!(answer, b"host", "{host} after {table}");
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_table_of_its_own_leads_to_no_clone_address_of_pools_that_come_later() {
    lab::run(|lab| {
        let world = World::without_pools(lab);
        for (option, server) in [
            ("-4", IpAddr::from(BEYOND_IPV4)),
            ("-6", BEYOND_IPV6.into()),
        ] {
            let route = format!("default via {server} dev up0 table 100");
            lab.run(&format!("ip {option} route add {route}"));
        }
        let policy = json!({"uplink": "route", "route_table": 100});
        let early = pool("early", "host", 0, 1, &policy);
        world.daemon.create_pool(&early).unwrap();
        world.route_back(0);
        let (lease, guest) = world.guest("early", "early");
        guest.ping(BEYOND_IPV4.into(), 5 * SECOND).unwrap();
        let nobody = [
            IpAddr::from(Ipv4Addr::new(10, 65, 0, 200)),
            Ipv6Addr::new(0xfd00, 0xc10e, 1, 0, 0, 0, 0, 200).into(),
        ];
        // How many of two packets to addresses that nobody has were dropped as such.
        let dropped = || {
            let count = || {
                let drops = world.detail(&lease)["traffic"]["drops"].clone();
                drops["no_such_sandbox"].as_u64().unwrap_or(0)
            };
            let before = count();
            for address in nobody {
                let target = SocketAddr::new(address, ECHO_PORT);
                guest.exchange_udp(target, b"?", SECOND / 2).unwrap_err();
            }
            count() - before
        };
        assert_eq!(dropped(), 0, "there is no such pool");
        let late = pool("late", "netns", 1, 0, &policy);
        world.daemon.create_pool(&late).unwrap();
        assert_eq!(dropped(), 2);
        guest.ping(BEYOND_IPV4.into(), 5 * SECOND).unwrap();
        world.daemon.json("pool delete late").unwrap();
        assert_eq!(dropped(), 0, "there is no such pool any more");
        assert_eq!(world.detail(&lease)["defects"], json!([]));
    });
}

/// A packet of a guest that no router may pass on.
fn last_hop(guest: &FakeGuest, target: SocketAddr) -> Vec<u8> {
    let network = guest.network();
    let source: IpAddr = match target.ip() {
        IpAddr::V4(_) => network.ipv4.0.into(),
        IpAddr::V6(_) => network.ipv6.0.into(),
    };
    let source = SocketAddr::new(source, 5000);
    let mut frame = frame::udp(network.mac, GATEWAY_MAC, source, target, b"last");
    if target.is_ipv6() {
        frame[21] = 1;
        return frame;
    }
    let hops = u32::from(frame[22]) - 1;
    frame[22] = 1;
    let checksum = u32::from(u16::from_be_bytes([frame[24], frame[25]])) + (hops << 8);
    let checksum = u16::try_from((checksum & 0xffff) + (checksum >> 16)).expect("folded");
    frame[24..26].copy_from_slice(&checksum.to_be_bytes());
    frame
}

/// Lines that let a world beyond the second uplink answer the clone addresses of a pool.
pub(crate) fn routes_back(number: usize) -> Vec<String> {
    let prefixes = prefixes(number).into_iter().zip(&FAMILIES);
    prefixes
        .map(|(prefix, family)| format!("ip route add {prefix} via {}", family.second[0]))
        .collect()
}

/// Another uplink `up1`, with a server behind it that says so.
fn second_uplink(lab: &Lab) -> Namespace {
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
    assert!(started.elapsed() < SECOND / 2, "sent too slowly to tell");
    wait_until("the last packet came", 10 * SECOND, || {
        received_beyond(world) - before >= 30
    });
    let took = started.elapsed();
    assert!(took > SECOND, "all 30 packets came within {took:?}");
    let drops = world.detail(&lease)["traffic"]["drops"].to_string();
    assert!(!drops.contains("bit_limit"), "{drops}");
}

/// Packets that have arrived beyond the uplink.
fn received_beyond(world: &World) -> u64 {
    let file = "cat /sys/class/net/eth0/statistics/rx_packets";
    // A sysfs shows the namespace of whoever mounted it; `ip netns exec` mounts one.
    let text = command::run(&format!("ip netns exec beyond {file}")).unwrap();
    assert!(world.beyond.path().ends_with("beyond"));
    text.trim().parse().unwrap()
}

//! The eBPF data path under a running daemon: what its restarts, its uplinks and other people's programs
//! do to packets. The guests are threads; real ones are in `guest_ebpf.rs`.

#![allow(
    clippy::unwrap_used,
    reason = "a test ends at the first thing that fails"
)]

mod ebpf;

use std::{
    fs::{self, File},
    io::{IoSliceMut, Read, Write},
    mem::MaybeUninit,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    os::{fd::OwnedFd, unix::net::UnixStream},
    process::Stdio,
    thread,
    time::Instant,
};

use ebpf::{POOLS, Pings, SECOND, StackWatch, World, pool, prefixes, wait_until};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use sandwire_testlab::{
    command,
    fake_guest::FakeGuest,
    guest::kernel::Series,
    host::{BEYOND_IPV4, BEYOND_IPV6, ECHO_PORT, HOST_IPV4, WHO_AM_I_PORT, serve_udp},
    lab::{self, Lab},
    namespace::Namespace,
    other_program::{OtherProgram, Place},
    sandwire::{Daemon, Lease},
};
use serde_json::{Value, json};

/// By what address a guest is seen beyond, with its port.
fn seen_as(guest: &FakeGuest, server: impl Into<IpAddr>) -> String {
    let target = SocketAddr::new(server.into(), WHO_AM_I_PORT);
    let answer = guest.exchange_udp(target, b"?", 5 * SECOND).unwrap();
    String::from_utf8(answer).unwrap()
}

/// Both directions in both families work. Outward first: smoltcp loses an answer while it asks for its
/// gateway, which a restored guest knows.
#[track_caller]
fn assert_in_touch(lease: &Lease, guest: &FakeGuest) {
    for server in [IpAddr::from(BEYOND_IPV4), BEYOND_IPV6.into()] {
        guest.ping(server, 5 * SECOND).unwrap();
    }
    for address in [lease.ipv4, lease.ipv6] {
        command::run(&format!("ping -n -q -c 1 -W 5 {address}")).unwrap();
    }
}

/// What must hold on every kernel that we support.
fn assert_works_from_the_first_packet_on(lab: &Lab) {
    let world = World::start(lab, "route", 2);
    let watch = StackWatch::start();
    for pool in POOLS {
        let (lease, guest) = world.guest(pool, &format!("{pool}-a"));
        let (other, _neighbour) = world.guest(pool, &format!("{pool}-b"));
        assert_in_touch(&lease, &guest);
        assert!(seen_as(&guest, BEYOND_IPV4).starts_with(&format!("{}:", lease.ipv4)));
        assert!(seen_as(&guest, BEYOND_IPV6).starts_with(&format!("[{}]:", lease.ipv6)));
        for address in [lease.ipv4, lease.ipv6] {
            world
                .beyond
                .run(&format!("ping -n -q -c 1 -W 5 {address}"))
                .unwrap();
        }
        guest.ping(other.ipv4, SECOND).unwrap_err();
        guest.ping(HOST_IPV4.into(), SECOND).unwrap_err();
        let detail = world.detail(&lease);
        assert_eq!(detail["data_path"], "ebpf", "{detail}");
        let drops = detail["traffic"]["drops"].to_string();
        assert!(drops.contains("other_sandbox"), "{drops}");
        assert!(drops.contains("host_service"), "{drops}");
    }
    assert_eq!(watch.packets(), 0, "packets went through the host's stack");
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn slots_of_both_kinds_work_from_the_first_packet_on() {
    lab::run(|lab| {
        assert_works_from_the_first_packet_on(lab);
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn slots_of_both_kinds_work_on_linux_6_1() {
    lab::run_on(Series::Linux6_1, 150 * SECOND, |lab| {
        assert_works_from_the_first_packet_on(lab);
        assert_all_programs_load(lab);
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn slots_of_both_kinds_work_on_linux_6_12() {
    lab::run_on(Series::Linux6_12, 150 * SECOND, |lab| {
        assert_works_from_the_first_packet_on(lab);
        assert_all_programs_load(lab);
    });
}

/// The daemon loads every program at its start, those that are not attached too.
fn assert_all_programs_load(lab: &Lab) {
    let loaded = lab.run("bpftool prog show");
    for name in [
        "from_guest",
        "from_uplink",
        "from_host",
        "tap_to_host_end",
        "uplink_to_tap",
        "from_guest_xdp",
        "to_guest_xdp",
    ] {
        // The kernel keeps fifteen bytes of a name.
        let kept: String = name.chars().take(15).collect();
        assert!(
            loaded.contains(&format!("name {kept} ")),
            "no {name} in:\n{loaded}"
        );
    }
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
        let frame = sandwire_testlab::fake_guest::frame::udp(
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

const GATEWAY_MAC: [u8; 6] = [0x02, 0x73, 0x77, 0x00, 0x00, 0x01];

/// Packets that have arrived beyond the uplink.
fn received_beyond(world: &World) -> u64 {
    let file = "cat /sys/class/net/eth0/statistics/rx_packets";
    // A sysfs shows the namespace of whoever mounted it; `ip netns exec` mounts one.
    let text = command::run(&format!("ip netns exec beyond {file}")).unwrap();
    assert!(world.beyond.path().ends_with("beyond"));
    text.trim().parse().unwrap()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn killing_restarting_and_upgrading_the_daemon_loses_no_packet() {
    lab::run(|lab| {
        let mut world = World::start(lab, "route", 1);
        let guests: Vec<_> = POOLS.iter().map(|pool| world.guest(pool, pool)).collect();
        for (lease, guest) in &guests {
            assert_in_touch(lease, guest);
        }
        // A daemon takes seconds to start on a machine that runs other tests beside this one.
        let seconds = 30;
        let pings = [
            Pings::start(guests[0].0.ipv4, seconds),
            Pings::start(guests[1].0.ipv6, seconds),
            Pings::start_beyond(&world.beyond, guests[0].0.ipv6, seconds),
            Pings::start_beyond(&world.beyond, guests[1].0.ipv4, seconds),
        ];
        thread::sleep(SECOND);
        world.daemon.kill().unwrap();
        thread::sleep(SECOND);
        world.daemon.restart().unwrap();
        thread::sleep(SECOND);
        // The new version's executable lies where the old one's lay, and the unit is restarted.
        assert!(world.daemon.terminate().unwrap().success());
        world.daemon.restart().unwrap();
        for ping in &pings {
            assert!(
                ping.go_on(),
                "the pings were over before the daemon was back"
            );
        }
        for ping in pings {
            ping.assert_none_lost();
        }
        for (lease, guest) in &guests {
            assert_in_touch(lease, guest);
            assert_eq!(world.detail(lease)["defects"], json!([]));
        }
    });
}

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
            let pings = Pings::start_beyond(&world.beyond, lease.ipv4, 2);
            assert_in_touch(&lease, &guest);
            pings.assert_none_lost();
            let lost = calls.join().unwrap();
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
#[ignore = "needs root: cargo xtask test netns"]
fn other_peoples_programs_stay_before_and_after_ours() {
    lab::run(|lab| {
        let mut world = World::with_config(lab, "uplink_order = \"last\"");
        lab.run("tc qdisc add dev up0 clsact");
        let attach =
            |interface: &str, place| OtherProgram::attach(lab.folder(), interface, place).unwrap();
        // On the uplink: before ours, and after ours in both hooks.
        let first = attach("up0", Place::TcxFirst);
        for (number, kind) in POOLS.into_iter().enumerate() {
            let spec = pool(kind, kind, number, 1, &json!({"uplink": "route"}));
            world.daemon.create_pool(&spec).unwrap();
            world.route_back(number);
        }
        let (last, filter) = (
            attach("up0", Place::TcxLast),
            attach("up0", Place::Filter(1)),
        );
        let guests: Vec<_> = POOLS.iter().map(|pool| world.guest(pool, pool)).collect();
        let ends: Vec<String> = guests.iter().map(|(lease, _)| host_end(lease)).collect();
        let around: Vec<_> = ends
            .iter()
            .map(|end| {
                (
                    attach(end, Place::Filter(100)),
                    attach(end, Place::Filter(50_000)),
                )
            })
            .collect();
        for round in ["before", "after"] {
            let seen = |program: &OtherProgram| program.packets().unwrap();
            let was = [seen(&first), seen(&last), seen(&filter)];
            for ((lease, guest), (low, high)) in guests.iter().zip(&around) {
                let was = [seen(low), seen(high)];
                for _ in 0..10 {
                    guest.ping(BEYOND_IPV4.into(), SECOND).unwrap();
                }
                assert!(seen(low) - was[0] >= 10, "{round} restart: {}", lease.name);
                assert_eq!(
                    seen(high),
                    was[1],
                    "{round} restart: ours lets nothing pass"
                );
            }
            assert!(seen(&first) - was[0] >= 20, "{round} restart");
            world
                .beyond
                .run(&format!("ping -n -q -c 5 -i 0.05 -W 5 {HOST_IPV4}"))
                .unwrap();
            // What is for the host passes ours; what is for a sandbox doesn't.
            for program in [&last, &filter] {
                assert!(seen(program) >= 5, "{round} restart: ours let nothing pass");
            }
            let for_others = seen(&last) - was[1];
            assert!(
                for_others < 20,
                "{round} restart: {for_others} packets passed ours"
            );
            world.daemon.kill().unwrap();
            world.daemon.restart().unwrap();
        }
    });
}

/// The interface of the host that leads to a slot.
fn host_end(lease: &Lease) -> String {
    let text = command::run("ip -json link").unwrap();
    let interfaces: Value = serde_json::from_str(&text).unwrap();
    let slot = lease.namespace.clone().unwrap_or_default();
    let number = slot.rsplit('.').next().unwrap().to_owned();
    let alias = format!("sandwire:lab:netns:{number}");
    let found = interfaces.as_array().unwrap().iter().find(|interface| {
        interface["ifname"] == lease.tap.as_str() || interface["ifalias"] == alias.as_str()
    });
    found.unwrap()["ifname"].as_str().unwrap().to_owned()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_detached_program_is_seen_and_put_back() {
    lab::run(|lab| {
        let world = World::start(lab, "route", 1);
        let guests: Vec<_> = POOLS.iter().map(|pool| world.guest(pool, pool)).collect();
        for (lease, guest) in &guests {
            assert_in_touch(lease, guest);
            lab.run(&format!("tc qdisc delete dev {} ingress", host_end(lease)));
            guest.ping(BEYOND_IPV4.into(), SECOND / 2).unwrap_err();
        }
        detach_from_uplink(lab);
        for (lease, guest) in &guests {
            wait_until("the slot's program is back", 30 * SECOND, || {
                guest.ping(BEYOND_IPV4.into(), SECOND).is_ok()
            });
            assert_in_touch(lease, guest);
        }
        let watch = StackWatch::start();
        wait_until("the uplink's program is back", 30 * SECOND, || {
            let before = watch.packets();
            let call = format!("ping -n -q -c 3 -i 0.05 -W 5 {}", guests[0].0.ipv4);
            world.beyond.run(&call).is_ok() && watch.packets() == before
        });
    });
}

/// As `bpftool link detach` does: the daemon still has its link, but it does nothing any more.
fn detach_from_uplink(lab: &Lab) {
    let links: Value = serde_json::from_str(&lab.run("bpftool -j link show")).unwrap();
    let mut detached = 0;
    for link in links.as_array().unwrap() {
        let program = lab.run(&format!("bpftool -j prog show id {}", link["prog_id"]));
        if program.contains("\"from_uplink\"") && link_is_of_this_lab(lab, link) {
            lab.run(&format!("bpftool link detach id {}", link["id"]));
            detached += 1;
        }
    }
    assert_eq!(detached, 1, "{links}");
}

/// Links of all labs are in one list; ours are those that are pinned here.
fn link_is_of_this_lab(lab: &Lab, link: &Value) -> bool {
    let pinned = lab.shell("find /sys/fs/bpf -type f");
    pinned.lines().any(|path| {
        let shown = command::run(&format!("bpftool -j link show pinned {path}"));
        shown.is_ok_and(|text| {
            serde_json::from_str::<Value>(&text).is_ok_and(|shown| shown["id"] == link["id"])
        })
    })
}

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
            let pings = [
                (
                    "from beyond",
                    Pings::start_beyond(&world.beyond, lease.ipv4, 4),
                ),
                ("from the host", Pings::start(lease.ipv6, 4)),
            ];
            thread::sleep(SECOND);
            let change = json!({"data_path": data_path});
            world
                .daemon
                .call("PATCH", "/v1/pools/web", Some(&change))
                .unwrap();
            wait_until("the lease has moved", 20 * SECOND, || {
                world.detail(&lease)["data_path"] == data_path
            });
            let are_going_on = pings.iter().all(|(_, ping)| ping.go_on());
            assert!(are_going_on, "the pings were over before the move");
            // A packet that the one path has begun with may not be finished by the other.
            for (whence, ping) in pings {
                let lost = ping.lost();
                assert!(lost <= 3, "to {data_path}, {whence}: {lost} packets lost");
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

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_written_trace_is_read_by_tcpdump() {
    lab::run(|lab| {
        let world = World::start(lab, "route", 1);
        for pool in POOLS {
            let (lease, guest) = world.guest(pool, pool);
            let file = lab.folder().join(format!("{pool}.pcapng"));
            let mut trace = world
                .daemon
                .command(&format!("trace {pool} -w {}", file.display()))
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            wait_until("the trace has begun", 10 * SECOND, || {
                guest.ping(BEYOND_IPV4.into(), SECOND).unwrap();
                guest.ping(HOST_IPV4.into(), SECOND / 10).unwrap_err();
                fs::metadata(&file).is_ok_and(|file| file.len() > 1000)
            });
            // By the signal that Ctrl-C sends, after which the file is whole.
            command::run(&format!("kill -INT {}", trace.id())).unwrap();
            trace.wait().unwrap();
            let text = command::run(&format!("tcpdump -n -r {}", file.display())).unwrap();
            let clone = lease.ipv4.to_string();
            let own = guest.network().ipv4.0.to_string();
            assert!(
                text.contains(&format!("{own} > {BEYOND_IPV4}: ICMP echo request")),
                "{text}"
            );
            assert!(
                text.contains(&format!("{BEYOND_IPV4} > {clone}: ICMP echo reply")),
                "{text}"
            );
            let bytes = fs::read(&file).unwrap();
            assert!(
                contains(&bytes, b"host_service"),
                "no verdict in the comments"
            );
        }
    });
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_open_tap_is_handed_to_a_process_that_opens_none() {
    lab::run(|lab| {
        let world = World::without_pools(lab);
        for (number, kind) in POOLS.into_iter().enumerate() {
            let mut spec = pool(kind, kind, number, 1, &json!({"uplink": "route"}));
            spec["tap"] = json!({"vnet_header": false});
            world.daemon.create_pool(&spec).unwrap();
            let lease = world.daemon.acquire(kind, kind).unwrap();
            let descriptors = receive_taps(&world.daemon, &lease.name);
            assert_eq!(descriptors.len(), 1);
            let mut tap = File::from(descriptors.into_iter().next().unwrap());
            // As whoever has it: the gateway answers an ARP request that we write.
            wait_until("the gateway answers", 5 * SECOND, || {
                tap.write_all(&arp_request()).unwrap();
                let mut frame = [0; 1600];
                let read = tap.read(&mut frame);
                read.is_ok_and(|length| is_arp_reply(&frame[..length]))
            });
            let released = world.daemon.json(&format!("release {kind}")).unwrap();
            assert_eq!(released["released"][0]["outcome"], "held", "{released}");
            drop(tap);
            wait_until(
                "the slot ends with the last descriptor",
                20 * SECOND,
                || {
                    world
                        .daemon
                        .json("list")
                        .unwrap()
                        .as_array()
                        .unwrap()
                        .is_empty()
                },
            );
        }
    });
}

/// The TAPs of a lease, as open descriptors: what `GET /v1/leases/NAME/taps` sends.
fn receive_taps(daemon: &Daemon, lease: &str) -> Vec<OwnedFd> {
    let mut stream = UnixStream::connect(daemon.socket()).unwrap();
    stream.set_read_timeout(Some(10 * SECOND)).unwrap();
    write!(
        stream,
        "GET /v1/leases/{lease}/taps HTTP/1.1\r\nHost: localhost\r\n\
         Connection: upgrade\r\nUpgrade: sandwire-fd\r\n\r\n"
    )
    .unwrap();
    let mut text = Vec::new();
    let mut descriptors = Vec::new();
    while descriptors.is_empty() {
        let mut bytes = [0; 4096];
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = RecvAncillaryBuffer::new(&mut room);
        let mut slices = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(&stream, &mut slices, &mut control, flags).unwrap();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                descriptors.extend(rights);
            }
        }
        text.extend_from_slice(&bytes[..received.bytes]);
        let shown = String::from_utf8_lossy(&text);
        assert!(
            shown.starts_with("HTTP/1.1 101") || text.len() < 12,
            "{shown}"
        );
        assert!(
            received.bytes > 0,
            "the daemon closed the connection: {shown}"
        );
    }
    descriptors
}

const GUEST_MAC: [u8; 6] = [0x06, 0x00, 0xc0, 0xa8, 0xf1, 0x02];

/// Who has 192.168.241.1? Tell 192.168.241.2.
fn arp_request() -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend(GUEST_MAC);
    frame.extend([0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend(GUEST_MAC);
    frame.extend([192, 168, 241, 2, 0, 0, 0, 0, 0, 0, 192, 168, 241, 1]);
    frame
}

fn is_arp_reply(frame: &[u8]) -> bool {
    frame.len() >= 42
        && frame[..6] == GUEST_MAC
        && frame[12..14] == [0x08, 0x06]
        && frame[20..22] == [0, 2]
        && frame[22..28] == GATEWAY_MAC
}

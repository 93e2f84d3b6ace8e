//! Leases whose traffic is relayed: of every data path, with the daemon's own names for senders.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

mod children;
mod ebpf;

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use children::{Capture, PATIENCE, drops, ping, routed, with_two};
use ebpf::{SECOND, World, addresses_of, pool, prefixes, wait_until};
use sandwire_testlab::{
    command::{self, Process},
    counters,
    fake_guest::FakeGuest,
    guest::kernel::Series,
    host::{BEYOND_IPV4, BEYOND_IPV6, ECHO_PORT, HTTP_PORT, answer_http, serve_tcp},
    lab::{self, Lab},
    namespace::{Namespace, command_in},
    sandwire,
};
use serde_json::json;

/// Beyond, and by routes alone: what isn't relayed arrives there too.
const DESTINATIONS: [&str; 2] = ["198.51.100.7", "2001:db8:5::7"];

/// Each deletes one of the relay's routing rules.
const DELETE_RULES: [&str; 4] = [
    "ip -4 rule delete table 53570",
    "ip -4 rule delete table 53571",
    "ip -6 rule delete table 53570",
    "ip -6 rule delete table 53571",
];

/// `from` is whose traffic is redirected, `more` what else there is to the redirect.
fn configure(folder: &Path, world: &World, from: &[String], more: &str) {
    if !folder.exists() {
        let keys = Command::new(sandwire::executable().unwrap())
            .args(["relay", "keys"])
            .arg(folder)
            .args(["host.example", "peer.example"])
            .status();
        assert!(keys.unwrap().success());
    }
    let path = folder.display();
    let common = |name: &str| {
        format!(
            "folder = \"{path}/{name}\"\nreport = \"{path}/{name}.report\"\n[tls]\ncertificate = \"{path}/{name}.example.pem\"\n\
             key = \"{path}/{name}.example.key\"\nauthorities = \"{path}/authority.pem\"\n"
        )
    };
    let host = format!(
        "{}[egress]\ndaemon = \"{}\"\n[[peer]]\nname = \"beyond\"\naddress = \"203.0.113.2:4433\"\n\
         server_name = \"peer.example\"\n[[redirect]]\nfrom = {from:?}\n\
         to = [\"198.51.100.0/24\", \"2001:db8:5::/64\"]\nvia = \"beyond\"\n{more}\n",
        common("host"),
        world.daemon.socket().display()
    );
    let peer = format!(
        "{}[deliver]\nlisten = [\"203.0.113.2:4433\"]\nclients = [\"host.example\"]\n\
         allow = [\"198.51.100.0/24\", \"2001:db8:5::/64\"]\n",
        common("peer")
    );
    fs::write(folder.join("host.toml"), host).unwrap();
    fs::write(folder.join("peer.toml"), peer).unwrap();
}

fn start(folder: &Path, name: &str, namespace: Option<&Path>) -> Process {
    let executable = sandwire::executable().unwrap();
    let mut command = match namespace {
        None => Command::new(&executable),
        Some(path) => command_in(path, executable.to_str().unwrap()),
    };
    let log = folder.join(format!("{name}.log"));
    let config = folder.join(format!("{name}.toml"));
    command.args(["relay", "serve", "--config"]).arg(config);
    command
        .stdout(Stdio::null())
        .stderr(fs::File::create(&log).unwrap());
    let process = Process(command.spawn().unwrap());
    wait_until("the relay is ready", PATIENCE, || {
        fs::read_to_string(&log).is_ok_and(|text| text.contains("the relay is ready"))
    });
    process
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn leases_of_every_data_path_are_relayed_by_name() {
    lab::run_within(Duration::from_secs(600), |lab| {
        assert_leases_are_relayed_by_name(lab);
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn leases_are_relayed_on_linux_6_1() {
    lab::run_on(Series::Linux6_1, Duration::from_secs(600), |lab| {
        assert_leases_are_relayed_by_name(lab);
    });
}

fn assert_leases_are_relayed_by_name(lab: &Lab) {
    let world = World::without_pools(lab);
    add_destinations(&world);
    count_arrivals(&world);
    let kinds = [("netns", "ebpf"), ("host", "ebpf"), ("netns", "nft")];
    for (number, (kind, data_path)) in kinds.into_iter().enumerate() {
        let name = format!("pool{number}");
        let mut policy = json!({"uplink": "route"});
        if data_path == "ebpf" {
            // All bits that a policy may have: none of them tells that the relay has looked at a packet.
            policy["route_mark"] = json!(0x00ff_ffff);
        }
        let mut spec = pool(&name, kind, number, 2, &policy);
        spec["data_path"] = json!(data_path);
        world.daemon.create_pool(&spec).unwrap();
        world.route_back(number);
    }
    let folder = lab.folder().join("relay");
    let from: Vec<String> = (0..kinds.len()).flat_map(prefixes).collect();
    configure(&folder, &world, &from, "");
    let _peer = start(&folder, "peer", Some(&world.beyond.path()));
    let host = start(&folder, "host", None);
    let mut guests = Vec::new();
    for number in 0..kinds.len() {
        let (_, guest) = world.guest(&format!("pool{number}"), &format!("lease{number}"));
        for destination in DESTINATIONS {
            let destination: IpAddr = destination.parse().unwrap();
            let page = guest.fetch(SocketAddr::new(destination, HTTP_PORT), PATIENCE);
            assert!(page.unwrap().contains("hello"));
            wait_until("datagrams come back", PATIENCE, || {
                let server = SocketAddr::new(destination, ECHO_PORT);
                guest
                    .exchange_udp(server, b"relayed", 3 * SECOND)
                    .is_ok_and(|answer| answer == b"relayed")
            });
        }
        guests.push(guest);
    }
    drop(host);
    for guest in &guests {
        for destination in DESTINATIONS {
            let destination: IpAddr = destination.parse().unwrap();
            let page = guest.fetch(SocketAddr::new(destination, HTTP_PORT), 2 * SECOND);
            assert!(page.is_err(), "it left without the relay");
        }
    }
    assert_eq!(arrivals(&world), 0, "packets left in the clear");
    wait_until("the report has all of them", PATIENCE, || {
        let report = fs::read_to_string(folder.join("peer.report")).unwrap_or_default();
        (0..kinds.len())
            .all(|number| report.contains(&format!("\"sender\":\"pool{number}/lease{number}\"")))
    });
    lab.run(&format!(
        "{} relay clear",
        sandwire::executable().unwrap().display()
    ));
}

/// Whoever sets up the network anew may delete routing rules and routes, also where no relay runs that would make them again.
/// What is redirected stays on the host as long as one of the two is there that say so, the rules or the relay's table.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn nothing_leaves_in_the_clear_where_somebody_deletes_the_relays_rules() {
    lab::run_within(Duration::from_secs(600), |lab| {
        let mut world = World::without_pools(lab);
        add_destinations(&world);
        count_arrivals(&world);
        for (option, server) in [
            ("-4", IpAddr::from(BEYOND_IPV4)),
            ("-6", BEYOND_IPV6.into()),
        ] {
            lab.run(&format!(
                "ip {option} route add default via {server} dev up0 table 100"
            ));
        }
        let by_rules = json!({"uplink": "route"});
        let by_table = json!({"uplink": "route", "route_table": 100});
        let pools = [
            ("netns", &by_rules),
            ("host", &by_rules),
            ("host", &by_table),
        ];
        let mut guests = Vec::new();
        for (number, (kind, policy)) in pools.into_iter().enumerate() {
            let name = format!("pool{number}");
            world
                .daemon
                .create_pool(&pool(&name, kind, number, 1, policy))
                .unwrap();
            world.route_back(number);
            guests.push(world.guest(&name, &name).1);
        }
        let folder = lab.folder().join("relay");
        let from: Vec<String> = (0..pools.len()).flat_map(prefixes).collect();
        configure(
            &folder,
            &world,
            &from,
            &format!("ports = [{HTTP_PORT}, {ECHO_PORT}]"),
        );
        let peer = start(&folder, "peer", Some(&world.beyond.path()));
        let host = start(&folder, "host", None);
        for guest in &guests {
            assert_eq!(pages(guest, PATIENCE), 2, "they are relayed");
        }
        assert_eq!(arrivals(&world), 0);
        // A relay that runs makes them again; until it has, what it has marked must not leave either.
        let mut deleting = Command::new("timeout");
        let forever = format!("while :; do {}; done", DELETE_RULES.join("; "));
        deleting.args(["5", "sh", "-c", &forever]);
        let mut deleting = deleting.stderr(Stdio::null()).spawn().unwrap();
        for guest in guests.iter().cycle().take(4 * guests.len()) {
            pages(guest, SECOND / 4);
        }
        deleting.wait().unwrap();
        assert_eq!(arrivals(&world), 0, "its rules are deleted while it runs");
        drop(host);
        let stay = |world: &World, after: &str| {
            for guest in &guests {
                assert_eq!(pages(guest, SECOND / 3), 0, "{after}");
                for destination in destinations() {
                    let server = SocketAddr::new(destination, ECHO_PORT);
                    guest.exchange_udp(server, b"?", SECOND / 3).unwrap_err();
                }
            }
            assert_eq!(arrivals(world), 0, "{after}");
        };
        lab.run("ip route flush table 53571");
        lab.run("ip -6 route flush table 53571");
        stay(&world, "its route is gone");
        for delete in DELETE_RULES {
            lab.shell(&format!("while {delete} 2> /dev/null; do :; done"));
        }
        for option in ["-4", "-6"] {
            let left = lab.run(&format!("ip {option} rule list"));
            assert!(!left.contains("5357"), "{left}");
        }
        stay(&world, "its rules are gone");
        world.daemon.kill().unwrap();
        stay(&world, "the daemon is gone, too");
        world.daemon.restart().unwrap();
        stay(&world, "the daemon has read it anew");
        // What isn't redirected goes on leaving.
        for guest in &guests {
            guest
                .ping(DESTINATIONS[0].parse().unwrap(), PATIENCE)
                .unwrap();
        }
        drop(peer);
        lab.run(&format!(
            "{} relay clear",
            sandwire::executable().unwrap().display()
        ));
        for guest in &guests {
            wait_until("it leaves in the clear again", PATIENCE, || {
                pages(guest, SECOND) == 2
            });
        }
    });
}

fn destinations() -> [IpAddr; 2] {
    DESTINATIONS.map(|destination| destination.parse().unwrap())
}

/// At how many of the destinations a guest gets a page.
fn pages(guest: &FakeGuest, patience: Duration) -> usize {
    let pages = destinations()
        .map(|destination| guest.fetch(SocketAddr::new(destination, HTTP_PORT), patience));
    let right = pages.iter().flatten();
    right.filter(|page| page.contains("hello")).count()
}

/// A guest's clones send from one port, and a lease may have the address that another had a moment before.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn datagrams_are_of_the_lease_that_has_the_address_now() {
    lab::run_within(Duration::from_secs(300), |lab| {
        let world = World::without_pools(lab);
        add_destinations(&world);
        let mut spec = pool("boxes", "container", 0, 1, &routed());
        spec["quarantine_seconds"] = json!(0);
        world.daemon.create_pool(&spec).unwrap();
        world.route_back(0);
        let folder = lab.folder().join("relay");
        let limits = "[limits]\nudp_idle_seconds = 20";
        configure(&folder, &world, &prefixes(0), limits);
        let _peer = start(&folder, "peer", Some(&world.beyond.path()));
        let _host = start(&folder, "host", None);
        let mut addresses = Vec::new();
        for name in ["one", "two"] {
            let space = lab.namespace(name);
            world.daemon.wait_pool("boxes", 1, PATIENCE).unwrap();
            let again = addresses
                .first()
                .map_or_else(String::new, |address| format!(" --clone-address {address}"));
            let line = format!("acquire boxes {name} --netns {name}{again}");
            addresses = addresses_of(&world.daemon.json(&line).unwrap());
            // So long it takes until the relay has asked the daemon.
            std::thread::sleep(2 * SECOND);
            wait_until("datagrams come back", PATIENCE, || {
                let exchange = || {
                    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 4000))?;
                    socket.set_read_timeout(Some(SECOND))?;
                    drop(socket.send_to(name.as_bytes(), (DESTINATIONS[0], ECHO_PORT)));
                    let mut room = [0; 16];
                    Ok(socket.recv(&mut room).is_ok())
                };
                space.inside(exchange).unwrap()
            });
            world.daemon.json(&format!("release {name}")).unwrap();
        }
        let senders = |side: &str| -> Vec<String> {
            let report = fs::read_to_string(folder.join(side)).unwrap_or_default();
            let lines = report.lines();
            let lines = lines.map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
            lines
                .map(|line| format!("{} {}", line["sender"], line["outcome"]).replace('"', ""))
                .collect()
        };
        wait_until("the flows have ended", PATIENCE, || {
            senders("host.report").len() > 1 || senders("host.report") == ["boxes/one idle"]
        });
        let found = senders("host.report");
        assert_eq!(found, ["boxes/one cut", "boxes/two idle"]);
        assert_eq!(senders("peer.report")[..1], ["boxes/one cut"]);
    });
}

fn add_destinations(world: &World) {
    for (address, version) in [("198.51.100.7/32", ""), ("2001:db8:5::7/128", "-6 ")] {
        let line = format!("ip {version}address add {address} dev lo");
        world.beyond.run(&line).unwrap();
    }
}

/// What the relay says of a configuration, and whether it is right.
fn check(folder: &Path) -> (bool, String) {
    let config = folder.join("host.toml");
    let mut command = Command::new(sandwire::executable().unwrap());
    let output = command
        .args(["relay", "check", "--config"])
        .arg(config)
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].concat();
    (
        output.status.success(),
        String::from_utf8_lossy(&said).into_owned(),
    )
}

/// Whether a container gets a page from a destination, and has its datagram back, each within this time.
fn reaches(space: &Namespace, destination: &str, patience: Duration) -> (bool, bool) {
    let destination: IpAddr = destination.parse().unwrap();
    let url = match destination {
        IpAddr::V4(address) => format!("http://{address}/"),
        IpAddr::V6(address) => format!("http://[{address}]/"),
    };
    let page = space.run(&format!("curl -sS -m {} {url}", patience.as_secs()));
    let exchange = || {
        let any = match destination {
            IpAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let socket = UdpSocket::bind((any, 0))?;
        socket.set_read_timeout(Some(patience))?;
        // The kernel may tell the sender that it was dropped.
        drop(socket.send_to(b"hello", (destination, ECHO_PORT)));
        let mut room = [0; 16];
        Ok(socket.recv(&mut room).is_ok())
    };
    (page.is_ok(), space.inside(exchange).unwrap())
}

#[track_caller]
fn assert_reach(spaces: &[Namespace], expected: (bool, bool)) {
    for space in spaces {
        for destination in DESTINATIONS {
            let patience = match expected {
                (true, true) => PATIENCE,
                (false, false) => SECOND,
                _ => 3 * SECOND,
            };
            let found = reaches(space, destination, patience);
            assert_eq!(found, expected, "{destination}");
        }
    }
}

/// Children of the uplink under a redirect that covers them: what it says may leave only inside TLS is dropped, exactly
/// that, whoever of relay and daemon is away; what it covers beside them is relayed.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_children_may_send_only_by_the_relay_never_leaves_them() {
    lab::run_within(Duration::from_secs(600), |lab| {
        let (mut world, spaces, leases) = with_two(lab, "macvlan", &routed());
        add_destinations(&world);
        let spec = pool("pool0", "netns", 0, 1, &routed());
        world.daemon.create_pool(&spec).unwrap();
        world.route_back(0);
        let (_, guest) = world.guest("pool0", "lease0");
        let folder = lab.folder().join("relay");
        assert_reach(&spaces, (true, true));

        // Meant for them: an error. That covers them: a note.
        configure(&folder, &world, &["203.0.113.64/26".to_owned()], "");
        let (is_right, said) = check(&folder);
        assert!(
            !is_right && said.contains("macvlan children of up0"),
            "{said}"
        );
        let mut serve = Command::new(sandwire::executable().unwrap());
        serve.args(["relay", "serve", "--config"]);
        let refused = serve.arg(folder.join("host.toml")).output().unwrap();
        let errors = String::from_utf8_lossy(&refused.stderr);
        assert!(
            !refused.status.success() && errors.contains("redirect 1 covers pool 'lan'"),
            "{errors}"
        );
        assert_reach(&spaces[..1], (true, true));
        let mut from = vec!["203.0.113.0/25".to_owned(), "2001:db8:1::/64".to_owned()];
        from.extend(prefixes(0));
        configure(
            &folder,
            &world,
            &from,
            "protocols = [\"tcp\"]\nports = [80, \"8000-8100\"]",
        );
        let (is_right, said) = check(&folder);
        assert!(
            is_right && said.contains("note: redirect 1 covers pool 'lan'"),
            "{said}"
        );

        let _peer = start(&folder, "peer", Some(&world.beyond.path()));
        let host = start(&folder, "host", None);
        let dropped = || drops(&world, "blue", "not_relayed");
        wait_until("the daemon has read it", PATIENCE, || {
            reaches(&spaces[0], DESTINATIONS[0], SECOND);
            dropped() > 0
        });
        let capture = Capture::start(
            lab,
            "tcp port 80 and (dst net 198.51.100.0/24 or dst net 2001:db8:5::/64)",
        );
        assert_reach(&spaces, (false, true));
        ping(&spaces[0], DESTINATIONS[0], true);
        let destination: IpAddr = DESTINATIONS[0].parse().unwrap();
        let page = guest.fetch(SocketAddr::new(destination, HTTP_PORT), PATIENCE);
        assert!(page.unwrap().contains("hello"));
        drop(host);
        assert_reach(&spaces[..1], (false, true));
        let seen = capture.end(lab);
        assert_eq!(seen.lines().count(), 0, "{seen}");
        let log = fs::read_to_string(folder.join("host.log")).unwrap();
        assert_eq!(
            log.matches("redirect 1 covers pool 'lan'").count(),
            1,
            "{log}"
        );

        // All of it, also what answers a call.
        configure(&folder, &world, &from, "");
        let host = start(&folder, "host", None);
        wait_until("the daemon has read it", PATIENCE, || {
            !reaches(&spaces[0], DESTINATIONS[0], SECOND).1
        });
        let capture = Capture::start(lab, "dst net 198.51.100.0/24 or dst net 2001:db8:5::/64");
        assert_reach(&spaces, (false, false));
        ping(&spaces[0], DESTINATIONS[0], false);
        spaces[0]
            .inside(|| serve_tcp(HTTP_PORT, answer_http))
            .unwrap();
        let own = &addresses_of(&leases[0])[0];
        let call = format!(
            "curl -sS -m 3 --interface {} http://{own}/",
            DESTINATIONS[0]
        );
        world.beyond.run(&call).unwrap_err();
        world
            .beyond
            .run(&format!("curl -sS -m 10 http://{own}/"))
            .unwrap();
        world.daemon.kill().unwrap();
        drop(host);
        assert_reach(&spaces, (false, false));
        world.daemon.restart().unwrap();
        assert_reach(&spaces, (false, false));
        world.daemon.json("release red").unwrap();
        world.daemon.wait_pool("lan", 1, PATIENCE).unwrap();
        world.daemon.json("acquire lan red --netns red").unwrap();
        assert_reach(&spaces, (false, false));
        let seen = capture.end(lab);
        assert_eq!(seen.lines().count(), 0, "{seen}");

        let clear = format!("{} relay clear", sandwire::executable().unwrap().display());
        lab.run(&clear);
        wait_until("they may leave in the clear again", PATIENCE, || {
            reaches(&spaces[0], DESTINATIONS[0], SECOND) == (true, true)
        });
        assert_reach(&spaces, (true, true));
    });
}

/// Counts what arrives beyond for the destinations in the clear, whichever way it took on the host.
fn count_arrivals(world: &World) {
    let counting = "table inet leaks { chain arrivals { type filter hook prerouting priority -300;
        ip daddr 198.51.100.0/24 iifname \"eth0\" counter; ip6 daddr 2001:db8:5::/64 iifname \"eth0\" counter; }; }";
    let mut nft = command_in(&world.beyond.path(), "nft");
    command::output_of(nft.arg(counting)).unwrap();
}

fn arrivals(world: &World) -> u64 {
    let table = world.beyond.run("nft -j list table inet leaks").unwrap();
    counters::packets(&table).unwrap()
}

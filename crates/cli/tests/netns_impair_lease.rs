//! `sandwire impair LEASE` under a running daemon: fake guests ping through their impaired slots.

#![allow(
    clippy::unwrap_used,
    reason = "a test ends at the first thing that fails"
)]

#[path = "ebpf/mod.rs"]
mod ebpf;

use std::{
    fs,
    net::IpAddr,
    os::unix::net::UnixStream,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use ebpf::{SECOND, World, pool};
use sandwire_testlab::{
    command,
    fake_guest::{FakeGuest, GuestNetwork},
    guest::kernel::Series,
    host::{BEYOND_IPV4, ECHO_PORT},
    lab::{self, Lab},
    namespace,
    sandwire::{self, Lease},
};
use serde_json::{Value, json};

/// A daemon with a service's folder of its own.
fn start(lab: &Lab) -> World {
    let folder = lab.folder().join("impair");
    World::with_config(lab, &format!("[impair]\nfolder = {folder:?}"))
}

/// Runs `sandwire impair`; words that hold spaces stand in `'…'`. What it says with `--json`.
#[track_caller]
fn impair(world: &World, line: &str) -> Value {
    let mut command = world.daemon.command("--json impair");
    for (number, piece) in line.split('\'').enumerate() {
        if number % 2 == 1 {
            command.arg(piece);
        } else {
            command.args(piece.split_whitespace());
        }
    }
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let log = world.daemon.log();
    assert!(output.status.success(), "impair {line}: {said}\n{log}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Targets that the service lists.
fn listed(lab: &Lab, world: &World) -> Vec<Value> {
    let folder = lab.folder().join("impair");
    let line = format!("show --folder {}", folder.display());
    impair(world, &line).as_array().unwrap().clone()
}

/// Least round trip in milliseconds of some pings to the world beyond.
#[track_caller]
fn round_trip(guest: &FakeGuest) -> f64 {
    let times = (0..5).map(|_| guest.ping(BEYOND_IPV4.into(), 5 * SECOND).unwrap());
    least(times)
}

/// Least time in milliseconds until another guest has sent a datagram back: of each other's pings they take the
/// requests for answers.
#[track_caller]
fn exchange(guest: &FakeGuest, other: IpAddr) -> f64 {
    let server = (other, ECHO_PORT).into();
    let times = (0..5).map(|_| {
        let start = Instant::now();
        guest.exchange_udp(server, b"hello", 5 * SECOND).unwrap();
        start.elapsed()
    });
    least(times)
}

fn least(times: impl Iterator<Item = Duration>) -> f64 {
    times
        .map(|time| time.as_secs_f64() * 1e3)
        .fold(f64::MAX, f64::min)
}

#[track_caller]
fn assert_takes(guest: &FakeGuest, milliseconds: f64) {
    let least = round_trip(guest);
    let most = milliseconds + 25.0;
    assert!(
        least >= milliseconds && least < most,
        "{least} ms, not {milliseconds}"
    );
}

#[track_caller]
fn wait_until(world: &World, what: &str, mut happens: impl FnMut() -> bool) {
    let deadline = Instant::now() + 20 * SECOND;
    while !happens() {
        assert!(
            Instant::now() < deadline,
            "{what}: not so\n{}",
            world.daemon.log()
        );
        thread::sleep(Duration::from_millis(50));
    }
}

fn is_reached(guest: &FakeGuest) -> bool {
    guest.ping(BEYOND_IPV4.into(), SECOND).is_ok()
}

/// The service's process.
fn service(lab: &Lab) -> u32 {
    let socket = lab.folder().join("impair/control.sock");
    let said = command::run("pgrep -f impair.serve.--detach").unwrap();
    assert!(socket.exists());
    said.trim().parse().unwrap()
}

/// Network namespaces that the service keeps alive.
fn held_namespaces(pid: u32) -> usize {
    let links = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let names = links.filter_map(|link| fs::read_link(link.path()).ok());
    names
        .filter(|name| name.to_string_lossy().starts_with("net:["))
        .count()
}

/// Impaired each way, changed live, and cleared; another lease of the pool never is.
fn impaired_alone(lab: &Lab, kind: &str, data_path: &str) {
    let world = start(lab);
    let mut spec = pool("web", kind, 0, 2, &json!({"uplink": "masquerade"}));
    spec["data_path"] = json!(data_path);
    world.daemon.create_pool(&spec).unwrap();
    let (_one, first) = world.guest("web", "one");
    let (_two, second) = world.guest("web", "two");
    assert!(round_trip(&first) < 25.0);

    impair(&world, "one --egress 'delay 40ms'");
    assert_takes(&first, 40.0);
    assert!(round_trip(&second) < 25.0);
    let shown = impair(&world, "show one");
    let ways = &shown["interfaces"][0];
    assert_eq!(ways["state"], "impaired", "{shown:#}");
    let offered = |way: &str| ways[way]["line"]["rules"][0]["offered"].as_u64();
    assert!(offered("egress") >= Some(5) && offered("ingress").unwrap_or(0) == 0);

    impair(&world, "one --egress 'delay 40ms' --ingress 'delay 60ms'");
    assert_takes(&first, 100.0);
    impair(&world, "one --ingress 'match protocol=icmp loss 100%'");
    assert!(!is_reached(&first) && is_reached(&second));
    let shown = impair(&world, "show one");
    let rule = &shown["interfaces"][0]["ingress"]["line"]["rules"][0];
    assert!(rule["dropped"]["loss"].as_u64() > Some(0), "{shown:#}");
    // Other protocols aren't meant.
    let server = (BEYOND_IPV4, 7).into();
    assert!(first.exchange_udp(server, b"hello", 5 * SECOND).is_ok());

    assert_says_impaired(&world);
    let cleared = impair(&world, "clear one");
    assert_eq!(cleared["was_impaired"], true);
    assert!(shown_in_lists(&world).iter().all(Value::is_null));
    assert!(round_trip(&first) < 25.0);
    assert_eq!(impair(&world, "show one").get("impairment"), None);
    assert_eq!(impair(&world, "clear one")["was_impaired"], false);
}

/// What `show`, `list` and `/v1/traffic` say of the impairment of `one`.
fn shown_in_lists(world: &World) -> [Value; 3] {
    let of_one = |all: Value| {
        let mut all = all.as_array().unwrap().iter();
        let one = all.find(|lease| lease["name"] == "one").unwrap();
        one["impairment"].clone()
    };
    [
        world.daemon.json("show one").unwrap()["impairment"].clone(),
        of_one(world.daemon.json("list").unwrap()),
        of_one(world.daemon.call("GET", "/v1/traffic", None).unwrap()),
    ]
}

fn assert_says_impaired(world: &World) {
    let expected = json!({
        "summary": "ingress match protocol=icmp loss 100%",
        "service_alive": true,
        "on_death": "closed",
    });
    for said in shown_in_lists(world) {
        assert_eq!(said, expected);
    }
    let two = world.daemon.json("show two").unwrap();
    assert!(two["impairment"].is_null(), "{two}");
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_lease_with_nft_is_impaired_alone() {
    lab::run(|lab| impaired_alone(lab, "netns", "nft"));
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_lease_with_ebpf_is_impaired_alone() {
    lab::run(|lab| impaired_alone(lab, "netns", "ebpf"));
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_lease_of_a_host_slot_is_impaired_alone() {
    lab::run(|lab| impaired_alone(lab, "host", "ebpf"));
}

/// There an interface of that name would be another one.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_lease_of_a_host_slot_is_refused_by_a_service_in_another_namespace() {
    lab::run(|lab| {
        let world = start(lab);
        let spec = pool("web", "host", 0, 1, &json!({"uplink": "masquerade"}));
        world.daemon.create_pool(&spec).unwrap();
        let (_one, first) = world.guest("web", "one");
        lab.run("ip netns add aside");
        let folder = lab.folder().join("impair");
        let mut serve = Command::new("ip")
            .args(["netns", "exec", "aside"])
            .arg(sandwire::executable().unwrap())
            .args(["impair", "serve", "--folder"])
            .arg(&folder)
            .spawn()
            .unwrap();
        let socket = folder.join("control.sock");
        wait_until(&world, "the service listens", || {
            UnixStream::connect(&socket).is_ok()
        });
        let mut command = world.daemon.command("impair");
        let refused = command
            .args(["one", "--both", "delay 40ms"])
            .output()
            .unwrap();
        let said = String::from_utf8(refused.stderr).unwrap();
        assert!(!refused.status.success(), "{said}");
        assert!(said.contains("in another network namespace"), "{said}");
        command::run(&format!("kill {}", serve.id())).unwrap();
        serve.wait().unwrap();
        impair(&world, "one --both 'delay 40ms'");
        assert_takes(&first, 80.0);
    });
}

/// Its trace, too, which isn't in what the service lists.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_lease_whose_second_interface_cannot_be_impaired_stays_as_it_was() {
    lab::run(|lab| {
        let world = start(lab);
        let mut spec = pool("web", "netns", 0, 1, &json!({"uplink": "masquerade"}));
        spec["nics"] = json!(2);
        world.daemon.create_pool(&spec).unwrap();
        let (one, _first) = world.guest("web", "one");
        let trace = lab.folder().join("slow.trace");
        fs::write(&trace, "40\n").unwrap();
        impair(&world, &format!("one --egress 'trace {}'", trace.display()));
        let shown = impair(&world, "show one");
        let second = shown["interfaces"][1]["interface"].as_str().unwrap();
        let which = format!(
            "--folder {} --netns {} --interface {second}",
            lab.folder().join("impair").display(),
            one.path.display()
        );
        impair(&world, &format!("clear {which}"));
        impair(&world, &format!("{which} --both 'delay 1ms'"));

        let mut command = world.daemon.command("impair");
        let refused = command
            .args(["one", "--both", "delay 1ms"])
            .output()
            .unwrap();
        let said = String::from_utf8(refused.stderr).unwrap();
        assert!(!refused.status.success(), "{said}");
        assert!(said.contains("user 0 impairs it"), "{said}");
        let kept = impair(&world, "show one");
        assert_eq!(kept["impairment"], shown["impairment"], "{kept:#}");
        let log = world.daemon.log();
        assert!(!log.contains("can't be taken back"), "{log}");
    });
}

/// XDP takes packets before anything that diverts, unless it leaves them to it. Of the datagrams, which follow each other
/// within the time that a decision is kept, all but the first would go by XDP from TAP to TAP.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_lease_with_xdp_is_impaired_alone() {
    lab::run(|lab| {
        let mut world = start(lab);
        let policy = json!({"uplink": "route", "clone_to_clone": true});
        let mut spec = pool("web", "host", 0, 3, &policy);
        spec["data_path"] = json!("xdp");
        world.daemon.create_pool(&spec).unwrap();
        let [(one, first), (two, second), (three, _third)] =
            ["one", "two", "three"].map(|name| world.guest("web", name));
        let note = |world: &World, lease| world.detail(lease)["data_path_note"].to_string();
        let takes_70 = || {
            let least = exchange(&first, two.ipv4);
            assert!((70.0..95.0).contains(&least), "{least}");
        };
        assert!(exchange(&first, two.ipv4) < 25.0);
        impair(&world, "one --egress 'delay 40ms' --ingress 'delay 30ms'");
        takes_70();
        assert!(exchange(&second, three.ipv4) < 25.0);
        assert!(note(&world, &one).contains("impaired"));
        assert!(!note(&world, &two).contains("impaired"));
        // What the kernel knows outlives the daemon.
        world.daemon.kill().unwrap();
        takes_70();
        world.daemon.restart().unwrap();
        takes_70();
        impair(&world, "clear one");
        assert!(exchange(&first, two.ipv4) < 25.0);
        assert!(!note(&world, &one).contains("impaired"));
    });
}

/// Debian 12's kernel has no TCX: diversions are filters there, beside those of the slots.
#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn leases_of_every_kind_are_impaired_on_linux_6_1() {
    lab::run_on(Series::Linux6_1, 900 * SECOND, |lab| {
        let world = start(lab);
        let kinds = [("netns", "nft"), ("netns", "ebpf"), ("host", "ebpf")];
        for (number, (kind, data_path)) in kinds.into_iter().enumerate() {
            let name = format!("{kind}-{data_path}");
            let mut spec = pool(&name, kind, number, 2, &json!({"uplink": "masquerade"}));
            spec["data_path"] = json!(data_path);
            world.daemon.create_pool(&spec).unwrap();
            impaired_by_filters(&world, &name);
        }
        refused_beside_an_ingress_qdisc(lab, &world);
    });
}

/// The guest of the test is emulated, so times are long and bounds wide.
fn impaired_by_filters(world: &World, pool: &str) {
    let [one, two] = ["one", "two"].map(|name| format!("{pool}-{name}"));
    let (_one, first) = world.guest(pool, &one);
    let (_two, second) = world.guest(pool, &two);
    for guest in [&first, &second] {
        guest.ping(BEYOND_IPV4.into(), 10 * SECOND).expect(pool);
    }
    let delays = format!("{one} --egress 'delay 400ms' --ingress 'delay 300ms'");
    impair(world, &delays);
    let times = [round_trip(&first), round_trip(&second)];
    assert!(times[0] >= 700.0 && times[1] < 300.0, "{pool}: {times:?}");
    let shown = impair(world, &format!("show {one}"));
    let ways = &shown["interfaces"][0];
    for way in ["egress", "ingress"] {
        let offered = ways[way]["line"]["rules"][0]["offered"].as_u64();
        assert!(offered >= Some(5), "{pool}: {shown:#}");
    }
    impair(
        world,
        &format!("{one} --ingress 'match protocol=icmp loss 100%'"),
    );
    assert!(!is_reached(&first) && is_reached(&second), "{pool}");
    // Nothing of the slot's own is lost by the end of it.
    impair(world, &format!("clear {one}"));
    let time = round_trip(&first);
    assert!(time < 300.0, "{pool}: {time}");
}

fn refused_beside_an_ingress_qdisc(lab: &Lab, world: &World) {
    lab.shell(
        "ip link add old type veth peer name new; ip link set old up
         tc qdisc add dev old ingress",
    );
    let folder = lab.folder().join("impair");
    let mut command = world
        .daemon
        .command("impair --interface old --both blackhole");
    let output = command.arg("--folder").arg(folder).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("`ingress` qdisc"), "{said}");
    assert!(lab.run("tc filter show dev old ingress").is_empty());
}

/// What a released lease leaves: nothing, and the next tenant of its number isn't impaired.
fn released(lab: &Lab, kind: &str) {
    let world = start(lab);
    let mut spec = pool("web", kind, 0, 1, &json!({"uplink": "masquerade"}));
    spec["quarantine_seconds"] = json!(0);
    world.daemon.create_pool(&spec).unwrap();
    for _ in 0..2 {
        let (_lease, guest) = world.guest("web", "one");
        impair(&world, "one --both 'delay 20ms' --on-death open");
        assert_takes(&guest, 40.0);
        guest.detach().unwrap();
        world.daemon.json("release one").unwrap();
        world.daemon.wait_pool("web", 1, 20 * SECOND).unwrap();
        let (_lease, next) = world.guest("web", "next");
        assert!(round_trip(&next) < 25.0);
        wait_until(&world, "nothing is listed", || {
            listed(lab, &world).is_empty()
        });
        assert_eq!(held_namespaces(service(lab)), 0);
        next.detach().unwrap();
        world.daemon.json("release next").unwrap();
        world.daemon.wait_pool("web", 1, 20 * SECOND).unwrap();
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_lease_that_is_released_leaves_no_impairment() {
    lab::run(|lab| released(lab, "netns"));
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_lease_of_a_host_slot_that_is_released_leaves_no_impairment() {
    lab::run(|lab| released(lab, "host"));
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_lease_stays_impaired_over_deaths_of_the_daemon_and_of_the_service() {
    lab::run(|lab| {
        let mut world = start(lab);
        let spec = pool("web", "netns", 0, 1, &json!({"uplink": "masquerade"}));
        world.daemon.create_pool(&spec).unwrap();
        let (_lease, guest) = world.guest("web", "one");
        impair(&world, "one --both 'delay 20ms' --on-death open");
        assert_takes(&guest, 40.0);
        world.daemon.kill().unwrap();
        assert_takes(&guest, 40.0);
        world.daemon.restart().unwrap();
        assert_takes(&guest, 40.0);
        assert_eq!(
            impair(&world, "show one")["interfaces"][0]["state"],
            "impaired"
        );

        // Without the daemon, which would start another at once.
        world.daemon.kill().unwrap();
        command::run(&format!("kill -9 {}", service(lab))).unwrap();
        // The kernel takes the TAPs of a dead process away one after the other.
        wait_until(&world, "packets pass", || is_reached(&guest));
        assert!(round_trip(&guest) < 25.0);
        world.daemon.restart().unwrap();
        wait_until(&world, "it is impaired again", || {
            let ping = guest.ping(BEYOND_IPV4.into(), SECOND);
            ping.is_ok_and(|time| time >= Duration::from_millis(40))
        });
        let shown = impair(&world, "show one");
        let passed = &shown["interfaces"][0]["egress"]["dead_passed"];
        assert!(passed.as_u64() > Some(0), "{shown:#}");
        impair(&world, "clear one --flush");
        assert!(round_trip(&guest) < 25.0);
    });
}

/// A lease of a process that has opened its own sockets, and has a VMM on each TAP.
struct Process {
    lease: Lease,
    guests: Vec<FakeGuest>,
}

impl Process {
    fn start(world: &World) -> Self {
        let acquired = world.daemon.json("acquire web one --process").unwrap();
        let lease = Lease::read(&acquired).unwrap();
        let attach = |nic: &Value| {
            let tap = nic["tap"].as_str().unwrap();
            FakeGuest::attach_as(&lease.path, tap, network_of(nic)).unwrap()
        };
        Self {
            guests: acquired["nics"]
                .as_array()
                .unwrap()
                .iter()
                .map(attach)
                .collect(),
            lease,
        }
    }

    /// Who of these gets an answer: the process and the VMMs from beyond the host, and a sibling from the first VMM.
    fn answered(&self, sibling: &FakeGuest, patience: Duration) -> Vec<bool> {
        let seconds = patience.as_secs();
        let line = format!("ping -n -q -c 1 -W {seconds} {BEYOND_IPV4}");
        let mut all = vec![namespace::run_in(&self.lease.path, &line).is_ok()];
        let pings = self.guests.iter().rev();
        all.extend(pings.map(|guest| guest.ping(BEYOND_IPV4.into(), patience).is_ok()));
        // To whom the first interface's packets are for is told by who has sent last.
        let echo = (self.lease.ipv4, ECHO_PORT).into();
        all.push(sibling.exchange_udp(echo, b"hello", patience).is_ok());
        all
    }
}

/// Packets that have passed the egress of an interface of the host.
fn passed_egress(interface: &str) -> u64 {
    let text = command::run(&format!("ip -s -j link show dev {interface}")).unwrap();
    let link: Value = serde_json::from_str(&text).unwrap();
    link[0]["stats64"]["tx"]["packets"].as_u64().unwrap()
}

/// What a guest on an interface of a lease is told.
fn network_of(nic: &Value) -> GuestNetwork {
    let text = |pointer: &str| nic.pointer(pointer).unwrap().as_str().unwrap();
    let mut mac = [0; 6];
    for (place, byte) in mac.iter_mut().zip(text("/guest_mac").split(':')) {
        *place = u8::from_str_radix(byte, 16).unwrap();
    }
    let with_length = |pointer: &str| {
        let (address, length) = text(pointer).split_once('/').unwrap();
        (address.to_owned(), length.parse().unwrap())
    };
    let (ipv4, ipv6) = (with_length("/ipv4/guest"), with_length("/ipv6/guest"));
    GuestNetwork {
        mac,
        ipv4: (ipv4.0.parse().unwrap(), ipv4.1),
        ipv4_gateway: text("/ipv4/gateway").parse().unwrap(),
        ipv6: (ipv6.0.parse().unwrap(), ipv6.1),
        ipv6_gateway: text("/ipv6/gateway").parse().unwrap(),
    }
}

/// All of it is impaired each way, live and over the daemon's death; and nothing is afterwards.
fn impaired_with_its_vmms(lab: &Lab, data_path: &str) {
    let mut world = start(lab);
    // Answers come by the uplink, past the host's stack, and so by the short way where there is one.
    let policy = json!({"uplink": "route", "clone_to_clone": true});
    let mut spec = pool("web", "netns", 0, 2, &policy);
    (spec["data_path"], spec["nics"]) = (json!(data_path), json!(2));
    world.daemon.create_pool(&spec).unwrap();
    world.route_back(0);
    let process = Process::start(&world);
    let (_two, sibling) = world.guest("web", "two");
    let all_answered = || assert_eq!(process.answered(&sibling, 10 * SECOND), [true; 4]);
    let none_answered = || assert_eq!(process.answered(&sibling, SECOND), [false; 4]);
    all_answered();
    for way in ["egress", "ingress"] {
        // Not ARP and neighbour discovery.
        let drops = "match protocol=icmp loss 100%; match protocol=udp loss 100%";
        impair(&world, &format!("one --{way} '{drops}'"));
        none_answered();
        let shown = impair(&world, "show one");
        let rules = &shown["interfaces"][0][way]["line"]["rules"];
        for (rule, least) in [(0, 3), (1, 1)] {
            let dropped = rules[rule]["dropped"]["loss"].as_u64();
            assert!(dropped >= Some(least), "{data_path} {way}: {shown:#}");
        }
        assert_eq!(shown["interfaces"].as_array().unwrap().len(), 1);
        world.daemon.kill().unwrap();
        none_answered();
        world.daemon.restart().unwrap();
        // Longer than it takes until the daemon has looked.
        none_answered();
        none_answered();
        impair(&world, "one --both 'delay 1ms'");
        all_answered();
    }
    assert_goes_the_long_way_while_impaired(&world, &process, data_path == "ebpf");
    all_answered();
}

fn assert_goes_the_long_way_while_impaired(world: &World, process: &Process, has_short: bool) {
    let shown = impair(world, "show one");
    let host_end = shown["interfaces"][0]["interface"].as_str().unwrap();
    let count = 20;
    let ping = format!("ping -n -q -i 0.01 -c {count} {BEYOND_IPV4}");
    let passed = || {
        let before = passed_egress(host_end);
        namespace::run_in(&process.lease.path, &ping).unwrap();
        passed_egress(host_end) - before
    };
    assert!(passed() >= count);
    impair(world, "clear one");
    let passed = passed();
    // The host says things of its own on the link.
    assert_eq!(passed < count, has_short, "{passed} packets");
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_lease_of_a_process_with_nft_is_impaired_with_its_vmms() {
    lab::run_within(300 * SECOND, |lab| impaired_with_its_vmms(lab, "nft"));
}

/// What a VMM sends goes past the interface of the process there.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_lease_of_a_process_with_ebpf_is_impaired_with_its_vmms() {
    lab::run_within(300 * SECOND, |lab| impaired_with_its_vmms(lab, "ebpf"));
}

/// The engine lets packets go as late as is said, to the process and from it.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_lease_of_a_process_is_impaired_as_the_process_sees_it() {
    lab::run(|lab| {
        let world = start(lab);
        let spec = pool("web", "netns", 0, 1, &json!({"uplink": "masquerade"}));
        world.daemon.create_pool(&spec).unwrap();
        let lease = world.daemon.json("acquire web one --process").unwrap();
        let namespace = lease["netns_name"].as_str().unwrap();
        impair(&world, "one --egress 'delay 40ms'");
        let line = format!("ip netns exec {namespace} ping -n -q -c 5 -i 0.05 {BEYOND_IPV4}");
        let said = command::run(&line).unwrap();
        let least = said.rsplit("= ").next().unwrap().split('/').next().unwrap();
        let least: f64 = least.parse().unwrap();
        assert!((40.0..65.0).contains(&least), "{said}");
        let shown = impair(&world, "show one");
        let ways = &shown["interfaces"][0];
        let offered = |way: &str| ways[way]["line"]["rules"][0]["offered"].as_u64();
        assert!(offered("egress") >= Some(5), "{shown:#}");
        assert_eq!(offered("ingress").unwrap_or(0), 0, "{shown:#}");
    });
}

//! Identities that have TCP only: nothing runs per packet, and all is counted and kept apart nevertheless.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

#[path = "netns_sockets/stage.rs"]
#[allow(dead_code, reason = "the other tests have more players")]
mod stage;

use std::{
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use aya::{
    Ebpf,
    programs::{SkLookup, links::FdLink},
};
use sandwire_identity::{Error, Identities, Identity, NewIdentity, Refusal};
use sandwire_testlab::{
    command,
    lab::{self, Lab},
    namespace::Namespace,
};
use serde_json::{Value, json};

use self::stage::{Application, Cgroups, folder, new_identity, policy};

const DEADLINE: Duration = Duration::from_secs(600);

/// An identity, its application, and a peer on the wire.
struct Scene {
    web: Application,
    peer: Application,
    host: Application,
    added: Identity,
    identities: Identities,
    cgroups: Cgroups,
    wire: Namespace,
}

fn tcp_only(cgroup: &Path) -> NewIdentity {
    let mut new = new_identity(cgroup, &["10.77.0.1", "fd77::1"]);
    new.tcp_only = true;
    new
}

impl Scene {
    fn set(lab: &Lab) -> Self {
        let wire = stage::wire(lab);
        let mut cgroups = Cgroups::new();
        let cgroup = cgroups.make("web");
        let identities = Identities::new(folder());
        let added = identities.add(&tcp_only(&cgroup)).unwrap();
        assert!(added.tcp_only);
        Self {
            web: Application::start(Some(&cgroup), None),
            peer: Application::start(None, Some("peer")),
            host: Application::start(None, None),
            added,
            identities,
            cgroups,
            wire,
        }
    }

    fn shown(&self) -> Identity {
        self.identities.show("web").unwrap()
    }

    fn refused(&self, refusal: Refusal) -> u64 {
        let refused = self.shown().counters.refused;
        refused.get(&refusal).copied().unwrap_or(0)
    }
}

/// Hooks of a cgroup with programs, by the kernel's own word.
fn hooks(lab: &Lab, cgroup: &Path) -> Vec<String> {
    let shown = lab.run(&format!("bpftool -j cgroup show {}", cgroup.display()));
    let shown: Vec<Value> = serde_json::from_str(&shown).unwrap();
    let hooks = shown.iter();
    hooks
        .map(|hook| hook["attach_type"].as_str().unwrap().to_owned())
        .collect()
}

/// Entries of a map, by the kernel's own word.
fn entries(lab: &Lab, map: &str) -> usize {
    let map = folder().join("v2").join(map);
    let text = lab.run(&format!("bpftool -j map dump pinned {}", map.display()));
    let entries: Value = serde_json::from_str(&text).unwrap();
    entries.as_array().unwrap().len()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn no_program_runs_per_packet() {
    lab::run_within(DEADLINE, |lab| {
        let mut scene = Scene::set(lab);
        let before = hooks(lab, &scene.added.cgroup);
        assert_eq!(before.len(), 16, "{before:?}");
        let of_packets = before.iter().filter(|hook| hook.ends_with("gress"));
        assert_eq!(of_packets.count(), 0, "{before:?}");
        // Nor after an upgrade.
        assert_eq!(scene.identities.renew().unwrap(), 1);
        assert_eq!(hooks(lab, &scene.added.cgroup), before);
        assert!(folder().join("v2/on_tcp").exists());
        scene.web.run("l = listen('0.0.0.0', 8080)");
        let dialed = scene.peer.run("c = dial('10.77.0.1', 8080)");
        assert_eq!(dialed, Value::Null);
    });
}

/// The kernel's own figures of the connections at a port of the identity, added up: what was sent and acknowledged, and received.
fn kernels_bytes(lab: &Lab) -> (u64, u64) {
    let text = lab.run("ss -tinH state established src 10.77.0.1");
    let sum = |name: &str| {
        let found = text
            .split_whitespace()
            .filter_map(|word| word.strip_prefix(name));
        found.map(|number| number.parse::<u64>().unwrap()).sum()
    };
    (sum("bytes_acked:"), sum("bytes_received:"))
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn connections_are_counted_while_they_are_open_and_after() {
    lab::run_within(DEADLINE, |lab| {
        let mut scene = Scene::set(lab);
        scene.peer.run("l = listen('192.0.2.2', 9000)");
        scene
            .web
            .run("l = listen('0.0.0.0', 8080); c = dial('192.0.2.2', 9000)");
        scene
            .peer
            .run("d = dial('10.77.0.1', 8080); a = l.accept()[0]");
        scene.web.run("b = l.accept()[0]");
        let mut last = scene.shown().counters;
        for _ in 0..3 {
            // Out by the connection that was made, and in by the one that was accepted.
            scene.web.run("c.sendall(b'x' * 100000)");
            scene
                .peer
                .run("n = 0\nwhile n < 100000: n += len(a.recv(65536))");
            scene.peer.run("d.sendall(b'y' * 3000)");
            scene
                .web
                .run("n = 0\nwhile n < 3000: n += len(b.recv(65536))");
            let counters = scene.shown().counters;
            let done = (
                counters.egress.bytes - last.egress.bytes,
                counters.ingress.bytes - last.ingress.bytes,
            );
            // The first time, with a byte that stands for the beginning of each connection.
            assert!((100_000..=100_002).contains(&done.0), "{done:?}");
            assert!((3000..=3002).contains(&done.1), "{done:?}");
            assert_eq!(
                kernels_bytes(lab),
                (counters.egress.bytes, counters.ingress.bytes)
            );
            // At least a packet for each 64 KiB, at most one for each 500 bytes.
            let packets = counters.egress.packets - last.egress.packets;
            assert!((2..300).contains(&packets), "{packets}");
            last = counters;
        }
        scene.web.run("c.close(); b.close()");
        scene.peer.run("a.close(); d.close()");
        // What has ended is counted as it was, once, with the last packets and their two bytes at most.
        for _ in 0..3 {
            let counters = scene.shown().counters;
            let more = counters.egress.bytes - last.egress.bytes;
            assert!(more <= 2, "{more} bytes more");
            let more = counters.ingress.bytes - last.ingress.bytes;
            assert!(more <= 2, "{more} bytes more");
            let more = counters.egress.packets - last.egress.packets;
            assert!(more <= 8, "{more} packets more");
        }
        // A socket that connects twice.
        let before = scene.shown().counters;
        let refused = "s = socket.socket(); r = [s.connect_ex(('192.0.2.2', 9)) for n in range(2)]";
        assert_eq!(scene.web.run(refused), json!([111, 111]));
        let counters = scene.shown().counters;
        assert_eq!(counters.egress.packets - before.egress.packets, 2);
        assert_eq!(counters.ingress.packets - before.ingress.packets, 2);
        // One that nobody looked at while it was open.
        let before = scene.shown().counters;
        scene
            .web
            .run("c = dial('192.0.2.2', 9000); c.sendall(b'x' * 5000); c.close()");
        scene
            .peer
            .run("a = l.accept()[0]\nwhile a.recv(65536): pass\na.close()");
        // It ends when the peer has said so, too.
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut counted = 0;
        while counted < 5000 && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(20));
            counted = scene.shown().counters.egress.bytes - before.egress.bytes;
        }
        assert!((5000..=5002).contains(&counted), "{counted}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn one_that_was_connected_before_it_listens_is_at_its_own_address() {
    const DISSOLVE: &str =
        "import ctypes; ctypes.CDLL(None).connect(c.fileno(), struct.pack('16x'), 16)";
    lab::run_within(DEADLINE, |lab| {
        let mut scene = Scene::set(lab);
        scene.peer.run("l = listen('192.0.2.2', 9000)");
        scene.web.run("c = dial('192.0.2.2', 9000)");
        scene.web.run(DISSOLVE);
        let port = scene
            .web
            .run("c.listen(4); r = c.getsockname()[1]")
            .as_u64()
            .unwrap();
        let dial = |address: &str| format!("dial('{address}', {port}).close()");
        assert_eq!(scene.peer.run(&dial("192.0.2.1")), "ECONNREFUSED");
        assert_eq!(scene.peer.run(&dial("10.77.0.1")), Value::Null);
        // One whose connect was refused has no address, and hears nothing.
        scene
            .web
            .run("c = fresh(SOCK_STREAM, AF_INET); c.connect(('192.0.2.1', 7000))");
        scene
            .web
            .run("c = fresh(SOCK_STREAM, AF_INET); c.connect(('169.254.169.254', 80))");
        let port = scene.web.run("c.listen(4); r = c.getsockname()[1]");
        for address in ["192.0.2.1", "10.77.0.1"] {
            let dial = format!("dial('{address}', {port})");
            assert_eq!(scene.peer.run(&dial), "ECONNREFUSED");
        }
        assert_eq!(scene.refused(Refusal::Metadata), 1);
    });
}

/// The kernel refuses a process without CAP_NET_RAW to choose another interface in place of a first one, also when a program does
/// it for that process.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn who_listens_without_a_bind_hears_nothing_by_an_interface_of_its_choice() {
    lab::run_within(DEADLINE, |lab| {
        let mut scene = Scene::set(lab);
        scene
            .web
            .run("import os; os.setresuid(65534, 65534, 65534)");
        for (of, address) in [("AF_INET", "192.0.2.1"), ("AF_INET6", "2001:db8::1")] {
            for interface in ["b'uplink'", "b'lo'"] {
                scene.web.run(&format!("l = fresh(SOCK_STREAM, {of})"));
                let choose = format!("l.setsockopt(SOL_SOCKET, 25, {interface})");
                assert_eq!(scene.web.run(&choose), "EPERM");
                let port = scene.web.run("l.listen(4); r = l.getsockname()[1]");
                let dial = format!("dial('{address}', {port})");
                assert_eq!(scene.peer.run(&dial), "ECONNREFUSED");
                assert_eq!(scene.host.run(&dial), "ECONNREFUSED");
            }
        }
        // Nor after a second bind that fails, which takes the first one's address away.
        scene
            .web
            .run("held = listen('10.77.0.1', 7777); held6 = listen('fd77::1', 7777)");
        for (of, own, address) in [
            ("AF_INET", "10.77.0.1", "192.0.2.1"),
            ("AF_INET6", "fd77::1", "2001:db8::1"),
        ] {
            let bound = format!(
                "l = fresh(SOCK_STREAM, {of}); l.setsockopt(IPPROTO_IP, 24, 1); l.bind(('{own}', 0))"
            );
            let choose = "l.setsockopt(SOL_SOCKET, 25, b'uplink')";
            let again = format!("l.bind(('{own}', 7777))");
            let link = "l.connect(('fe80::77', 9, 0, socket.if_nametoindex('lo')))";
            let ways: &[&[&str]] = match of {
                "AF_INET" => &[&[choose, &again], &[&again, choose]],
                _ => &[
                    &[choose, &again],
                    &[&again, choose],
                    &[link, &again],
                    &[&again, link],
                ],
            };
            for way in ways {
                scene.web.run(&bound);
                scene.web.run("l.settimeout(0.2)");
                for step in *way {
                    scene.web.run(step);
                }
                let port = scene.web.run("l.listen(4); r = l.getsockname()[1]");
                assert!(port.is_u64(), "{way:?}: {port}");
                let dial = format!("dial('{address}', {port})");
                assert_eq!(scene.peer.run(&dial), "ECONNREFUSED", "{way:?}");
                assert_eq!(scene.host.run(&dial), "ECONNREFUSED", "{way:?}");
                scene.web.run("l.close()");
            }
        }
        // With an address there is no harm in it.
        scene
            .web
            .run("l = fresh(SOCK_STREAM, AF_INET); l.bind(('10.77.0.1', 8080))");
        let chosen = scene
            .web
            .run("l.setsockopt(SOL_SOCKET, 25, b'uplink'); l.listen(4)");
        assert_eq!(chosen, Value::Null);
        let dial = "dial('10.77.0.1', 8080).close()";
        assert_eq!(scene.peer.run(dial), Value::Null);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_is_counted_by_packets_is_not_counted_by_connections_too() {
    lab::run_within(DEADLINE, |lab| {
        let mut scene = Scene::set(lab);
        let cgroup = scene.cgroups.make("both");
        let new = new_identity(&cgroup, &["10.77.0.2"]);
        scene.identities.add(&new).unwrap();
        let mut both = Application::start(Some(&cgroup), None);
        scene.peer.run("l = listen('192.0.2.2', 9000)");
        both.run("c = dial('192.0.2.2', 9000); c.sendall(b'x' * 100000)");
        scene
            .peer
            .run("a = l.accept()[0]; n = 0\nwhile n < 100000: n += len(a.recv(65536))");
        let shown = || scene.identities.show("both").unwrap().counters.egress.bytes;
        let first = shown();
        // Headers of some packets, and what was acknowledged meanwhile.
        assert!((100_000..120_000).contains(&first), "{first}");
        assert!(shown() - first < 1000);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn nobody_on_the_wire_reaches_the_loopback() {
    lab::run_within(DEADLINE, |lab| {
        let mut scene = Scene::set(lab);
        let route = "ip -6 route add fd53:7764:6c6f:6f70::/64 via 2001:db8::1";
        scene.wire.run(route).unwrap();
        scene.web.run("l = listen('::1', 5000)");
        let loopback = scene.added.loopback[1];
        let dial = format!("dial('{loopback}', 5000).close()");
        assert_eq!(scene.peer.run(&dial), "ECONNREFUSED");
        assert_eq!(scene.refused(Refusal::IngressLoopback), 1);
        // `allow_loopback` is for the host alone.
        assert_eq!(scene.host.run(&dial), "ECONNREFUSED");
        scene.identities.remove("web").unwrap();
        let mut new = tcp_only(&scene.added.cgroup);
        new.allowed.loopback = true;
        let added = scene.identities.add(&new).unwrap();
        scene
            .web
            .run("l = listen('::1', 5000); m = listen('127.0.0.1', 5000)");
        for loopback in added.loopback {
            let dial = format!("dial('{loopback}', 5000).close()");
            assert_eq!(scene.host.run(&dial), Value::Null);
        }
        let dial = format!("dial('{}', 5000)", added.loopback[1]);
        assert_eq!(scene.peer.run(&dial), "ECONNREFUSED");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn the_source_of_a_connection_that_was_reset_is_nobody_s_ticket() {
    const RESET: &str = "c = dial('127.0.0.1', 5000); p = c.getsockname()[1]; s = l.accept()[0]; \
         s.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack('ii', 1, 0)); s.close(); c.recv(1)";
    lab::run_within(DEADLINE, |lab| {
        let mut scene = Scene::set(lab);
        scene.web.run("l = listen('127.0.0.1', 5000)");
        assert_eq!(scene.web.run(RESET), "ECONNRESET");
        // The socket is open still, and its port is free: anybody on the host may have it.
        let port = scene.web.run("r = p");
        let forged = format!(
            "d = socket.socket(); d.bind(('127.1.0.1', {port})); d.connect(('127.1.0.1', 5000))"
        );
        assert_eq!(scene.host.run(&forged), "ECONNREFUSED");
        assert_eq!(scene.refused(Refusal::IngressLoopback), 1);
        assert_eq!(entries(lab, "dialers"), 0);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn one_identity_cannot_take_the_room_of_all_that_call_their_loopback() {
    const LIMIT: usize = 16_384;
    const CALLERS: usize = 16;
    lab::run_within(DEADLINE, |lab| {
        let mut scene = Scene::set(lab);
        assert_eq!(scene.web.run("l = listen('127.0.0.1', 5000)"), Value::Null);
        let each = LIMIT / CALLERS;
        let mut callers: Vec<Application> = (0..CALLERS)
            .map(|_| Application::start(Some(&scene.added.cgroup), None))
            .collect();
        for (port, caller) in (6000..).zip(&mut callers) {
            caller.run("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))");
            let called = caller.run(&format!(
                "l = listen('127.0.0.1', {port}); \
                 made = [(dial('127.0.0.1', {port}), l.accept()[0]) for n in range({each})]"
            ));
            assert_eq!(called, Value::Null);
        }
        assert_eq!(entries(lab, "dialers"), LIMIT);
        assert_eq!(scene.refused(Refusal::IngressLoopback), 0);
        let dial = "c = dial('127.0.0.1', 5000); d = l.accept()";
        assert_eq!(scene.web.run(dial), "ECONNREFUSED");
        assert_eq!(scene.refused(Refusal::IngressLoopback), 1);
        // The accepted end, in whose place nobody is noted down, goes, and the other one after it.
        callers[0].run("c, a = made.pop(); a.close(); c.close()");
        assert_eq!(scene.web.run(dial), Value::Null);
        assert_eq!(entries(lab, "dialers"), LIMIT);
        drop(callers);
        assert_eq!(entries(lab, "dialers"), 1);
        // What is open when the identity goes leaves no entry.
        scene.identities.remove("web").unwrap();
        assert_eq!(entries(lab, "dialers"), 0);
        assert_eq!(entries(lab, "tcp_tallies"), 0);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_a_former_version_has_added_goes_on() {
    lab::run_within(DEADLINE, |lab| {
        let _wire = stage::wire(lab);
        let mut cgroups = Cgroups::new();
        let (old, new) = (cgroups.make("old"), cgroups.make("new"));
        let identities = Identities::new(folder());
        identities.add(&new_identity(&old, &["10.77.0.1"])).unwrap();
        // As it was without these maps.
        for map in ["dialers", "dialed", "tcp_tallies", "counted"] {
            std::fs::remove_file(folder().join("v2").join(map)).unwrap();
        }
        assert!(!identities.show("old").unwrap().tcp_only);
        assert_eq!(identities.renew().unwrap(), 1);
        let mut second = tcp_only(&new);
        second.addresses = stage::addresses(&["10.77.0.2"]);
        second.policy = policy(stage::OPEN);
        identities.add(&second).unwrap();
        let mut new = Application::start(Some(&new), None);
        let called = "l = listen('0.0.0.0', 80); c = dial('127.0.0.1', 80); r = accepted(l)[1]";
        assert_eq!(new.run(called), json!("127.0.0.1"));
        assert!(identities.show("new").unwrap().counters.egress.packets > 0);
        for name in ["old", "new"] {
            identities.remove(name).unwrap();
        }
        assert_eq!(identities.list().unwrap(), []);
        assert!(!folder().join("v2/on_tcp").exists());
    });
}

/// Steers nothing, as that of a former build doesn't what it didn't know of.
const FORMER: &str = "\
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

SEC(\"sk_lookup\")
int former(struct bpf_sk_lookup *lookup)
{
	return SK_PASS;
}
";

/// Puts a program in the place of the one that steers connections.
fn exchange_steering(lab: &Lab, pin: &Path) {
    let [source, object] = ["former.c", "former.o"].map(|file| lab.folder().join(file));
    std::fs::write(&source, FORMER).unwrap();
    let include = format!("-I/usr/include/{}-linux-gnu", std::env::consts::ARCH);
    let mut clang = Command::new("clang");
    clang.args(["-target", "bpf", "-O2", "-g", &include, "-c"]);
    command::output_of(clang.arg(&source).arg("-o").arg(&object)).unwrap();
    let mut loaded = Ebpf::load_file(&object).unwrap();
    let program: &mut SkLookup = loaded.program_mut("former").unwrap().try_into().unwrap();
    program.load().unwrap();
    // The namespace has it no longer once nothing holds it.
    std::fs::remove_file(pin).unwrap();
    let netns = std::fs::File::open("/proc/thread-self/ns/net").unwrap();
    let link = program.attach(netns).unwrap();
    let link: FdLink = program.take_link(link).unwrap().into();
    link.pin(pin).unwrap();
}

/// The name of the program that steers connections, by the kernel's own word.
fn steering(lab: &Lab, pin: &Path) -> String {
    let link = lab.run(&format!("bpftool -j link show pinned {}", pin.display()));
    let link: Value = serde_json::from_str(&link).unwrap();
    let program = lab.run(&format!("bpftool -j prog show id {}", link["prog_id"]));
    let program: Value = serde_json::from_str(&program).unwrap();
    program["name"].as_str().unwrap().to_owned()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn one_that_comes_after_an_upgrade_is_steered_by_its_own_build() {
    lab::run_within(DEADLINE, |lab| {
        let mut cgroups = Cgroups::new();
        let (old, new) = (cgroups.make("old"), cgroups.make("new"));
        let identities = Identities::new(folder());
        identities.add(&new_identity(&old, &["10.77.0.1"])).unwrap();
        let pin = folder().join("v2/on_sk_lookup");
        exchange_steering(lab, &pin);
        assert_eq!(steering(lab, &pin), "former");
        let mut second = tcp_only(&new);
        second.addresses = stage::addresses(&["10.77.0.2"]);
        identities.add(&second).unwrap();
        assert_eq!(steering(lab, &pin), "on_sk_lookup");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn sockets_of_other_protocols_and_tcp_alone_exclude_each_other() {
    lab::run_within(DEADLINE, |_| {
        let mut cgroups = Cgroups::new();
        let mut new = tcp_only(&cgroups.make("web"));
        new.allowed.other_protocols = true;
        let identities = Identities::new(folder());
        let error = identities.add(&new).unwrap_err();
        assert!(matches!(error, Error::TcpOnly), "{error}");
        assert!(error.is_refusal());
        assert_eq!(identities.list().unwrap(), []);
    });
}

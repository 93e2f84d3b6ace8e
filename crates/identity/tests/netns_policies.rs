//! What an identity may reach: judged by what applications are told and by what a peer on the wire gets.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

#[path = "netns_sockets/stage.rs"]
#[allow(dead_code, reason = "the other tests have more players")]
mod stage;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    time::{Duration, Instant},
};

use sandwire_identity::{Error, Identities, LISTENERS_MAX, OwnCgroup, Refusal};
use sandwire_testlab::{
    lab::{self, Lab},
    namespace::Namespace,
};
use serde_json::{Value, json};

use self::stage::{Application, Cgroups, OPEN, folder, new_identity, policy};

const DEADLINE: Duration = Duration::from_secs(600);

/// Identities with default policies, the host and a peer that answers on ports 9000 to 9003.
struct Scene {
    web: Application,
    other: Application,
    host: Application,
    peer: Application,
    identities: Identities,
    cgroups: Cgroups,
    _wire: Namespace,
}

impl Scene {
    fn set(lab: &Lab) -> Self {
        let wire = stage::wire(lab);
        for line in [
            "ip addr add 169.254.169.254/32 dev wire",
            "ip addr add fd00:ec2::254/128 dev wire nodad",
            "ip addr add 198.51.100.7/32 dev wire",
        ] {
            wire.run(line).unwrap();
        }
        lab.run("ip route add 169.254.169.254 via 192.0.2.2");
        lab.run("ip route add 198.51.100.0/24 via 192.0.2.2");
        lab.run("ip -6 route add fd00:ec2::254 via 2001:db8::2");
        let mut cgroups = Cgroups::new();
        let (web, other) = (cgroups.make("web"), cgroups.make("other"));
        let identities = Identities::new(folder());
        let addresses = [
            (&web, ["10.77.0.1", "fd77::1"]),
            (&other, ["10.77.0.2", "fd77::2"]),
        ];
        for (cgroup, texts) in addresses {
            identities.add(&new_identity(cgroup, &texts)).unwrap();
        }
        let mut peer = Application::start(None, Some("peer"));
        peer.run("l = [listen('::', port) for port in range(9000, 9004)]");
        peer.run("u = [udp('::', port) for port in range(9000, 9004)]");
        Self {
            web: Application::start(Some(&web), None),
            other: Application::start(Some(&other), None),
            host: Application::start(None, None),
            peer,
            identities,
            cgroups,
            _wire: wire,
        }
    }

    fn set_policy(&self, name: &str, text: &str) {
        self.identities.set_policy(name, &policy(text)).unwrap();
    }

    fn refused(&self, name: &str, refusal: Refusal) -> u64 {
        let shown = self.identities.show(name).unwrap();
        shown.counters.refused.get(&refusal).copied().unwrap_or(0)
    }

    /// What TCP and UDP of `web` say to a destination: null if it may be reached.
    fn reach(&mut self, address: &str, port: u16) -> [Value; 2] {
        let family = if address.contains(':') {
            "AF_INET6"
        } else {
            "AF_INET"
        };
        let tcp = format!("dial({address:?}, {port}).close()");
        let udp = format!(
            "c = fresh(SOCK_DGRAM, {family}); c.sendto(b'x', ({address:?}, {port})); c.close()"
        );
        [self.web.run(&tcp), self.web.run(&udp)]
    }
}

fn passes() -> [Value; 2] {
    [Value::Null, Value::Null]
}

fn denied() -> [Value; 2] {
    [json!("EPERM"), json!("EPERM")]
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn rules_decide_by_the_longest_prefix_and_by_ports() {
    lab::run_within(DEADLINE, |lab| {
        let mut scene = Scene::set(lab);
        for address in ["192.0.2.2", "2001:db8::2", "198.51.100.7"] {
            assert_eq!(scene.reach(address, 9000), passes(), "{address}");
        }
        scene.set_policy(
            "web",
            r#"{"egress": {"default": "deny", "rules": [
                {"action": "allow", "prefixes": ["192.0.2.0/24", "2001:db8::/64"], "ports": ["tcp/9000-9001", "udp/9001"]},
                {"action": "deny", "prefixes": ["192.0.2.0/24"], "ports": ["tcp/9003"]},
                {"action": "allow", "prefixes": ["192.0.2.2/32"], "ports": ["tcp/9003"]}]}}"#,
        );
        for address in ["192.0.2.2", "2001:db8::2", "::ffff:192.0.2.2"] {
            let [tcp, udp] = scene.reach(address, 9000);
            assert_eq!((tcp, udp), (Value::Null, json!("EPERM")), "{address}");
            assert_eq!(scene.reach(address, 9001), passes(), "{address}");
            assert_eq!(scene.reach(address, 9002), denied(), "{address}");
        }
        assert_eq!(scene.reach("192.0.2.2", 9003)[0], Value::Null);
        assert_eq!(scene.reach("2001:db8::2", 9003), denied());
        assert_eq!(scene.reach("198.51.100.7", 9001), denied());
        assert_eq!(scene.refused("web", Refusal::Policy), 14);
        // Others are as they were.
        let dialled = scene.other.run("dial('192.0.2.2', 9002).close()");
        assert_eq!(dialled, Value::Null);
        scene.set_policy(
            "web",
            r#"{"egress": {"rules": [{"action": "deny", "prefixes": ["::/0"]}]}}"#,
        );
        assert_eq!(scene.reach("192.0.2.2", 9002), passes());
        assert_eq!(scene.reach("2001:db8::2", 9002), denied());
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn metadata_other_identities_and_the_host_are_denied_unless_allowed() {
    lab::run_within(DEADLINE, |lab| {
        let mut scene = Scene::set(lab);
        scene
            .other
            .run("l = listen('::', 8080); u = udp('0.0.0.0', 8080)");
        scene
            .host
            .run("l = listen('0.0.0.0', 7000); m = listen('::', 7001)");
        scene.host.run("u = udp('192.0.2.1', 7000)");
        let metadata = ["169.254.169.254", "fd00:ec2::254"];
        for address in metadata {
            assert_eq!(scene.reach(address, 9000), denied(), "{address}");
        }
        assert_eq!(scene.refused("web", Refusal::Metadata), 4);
        for address in ["10.77.0.2", "::ffff:10.77.0.2"] {
            assert_eq!(scene.reach(address, 8080), denied(), "{address}");
        }
        assert_eq!(scene.reach("fd77::2", 8080)[0], json!("EPERM"));
        assert_eq!(scene.refused("web", Refusal::OtherIdentity), 6);
        // What listens on the host refuses, as if nobody did.
        let host = [json!("ECONNREFUSED"), json!("EPERM")];
        assert_eq!(scene.reach("192.0.2.1", 7000), host);
        assert_eq!(scene.reach("2001:db8::1", 7001)[0], json!("ECONNREFUSED"));
        assert!(scene.refused("web", Refusal::HostService) >= 3);
        // No rule opens metadata.
        scene.set_policy(
            "web",
            r#"{"host_services": ["tcp/7000", "udp/7000"], "egress": {"rules": [
                {"action": "allow", "prefixes": ["169.254.169.254/32"]}]}}"#,
        );
        assert_eq!(scene.reach("169.254.169.254", 9000), denied());
        assert_eq!(scene.reach("192.0.2.1", 7000), passes());
        assert_eq!(scene.reach("2001:db8::1", 7001)[0], json!("ECONNREFUSED"));
        scene.set_policy(
            "web",
            r#"{"host_services": ["all"], "cloud_metadata": true, "group": "one", "clone_to_clone": true}"#,
        );
        for address in metadata {
            assert_eq!(scene.reach(address, 9000), passes(), "{address}");
        }
        assert_eq!(scene.reach("2001:db8::1", 7001)[0], Value::Null);
        assert_eq!(scene.reach("10.77.0.2", 8080), denied());
        scene.set_policy("other", r#"{"group": "one"}"#);
        assert_eq!(scene.reach("10.77.0.2", 8080), passes());
        // The other way was not said.
        let back = scene.other.run("dial('10.77.0.1', 8080)");
        assert_eq!(back, json!("EPERM"));
        scene.set_policy("web", r#"{"talks_to": ["two"]}"#);
        scene.set_policy("other", r#"{"group": "two"}"#);
        assert_eq!(scene.reach("10.77.0.2", 8080), denied());
        scene.set_policy("other", r#"{"group": "two", "talks_to": ["web"]}"#);
        assert_eq!(scene.reach("10.77.0.2", 8080), passes());
        // The own addresses are always there.
        scene.set_policy("web", r#"{"egress": {"default": "deny"}}"#);
        scene.web.run("l = listen('::', 8080)");
        assert_eq!(scene.reach("10.77.0.1", 8080)[0], Value::Null);
        assert_eq!(scene.reach("127.0.0.1", 8080)[0], Value::Null);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_change_holds_at_once_and_udp_that_is_connected_follows() {
    lab::run_within(DEADLINE, |lab| {
        let mut scene = Scene::set(lab);
        scene
            .web
            .run("c = dial('192.0.2.2', 9000, kind=SOCK_DGRAM); d = dial('192.0.2.2', 9000)");
        assert_eq!(scene.web.run("c.send(b'one'); c.send(b'two')"), Value::Null);
        scene.set_policy("web", r#"{"egress": {"default": "deny"}}"#);
        assert_eq!(scene.web.run("c.send(b'three')"), json!("EPERM"));
        // The peer of a connected socket isn't a pass for others.
        assert_eq!(
            scene.web.run("c.sendto(b'x', ('192.0.2.2', 9001))"),
            json!("EPERM")
        );
        assert_eq!(scene.web.run("dial('192.0.2.2', 9000)"), json!("EPERM"));
        // Connections of TCP that are open stay.
        assert_eq!(scene.web.run("d.send(b'x')"), Value::Null);
        scene.set_policy("web", "{}");
        assert_eq!(scene.web.run("c.send(b'four')"), Value::Null);
        for expected in ["one", "two", "four"] {
            let heard = scene.peer.run("r = u[0].recvfrom(100)[0].decode()");
            assert_eq!(heard, expected);
        }
        scene.set_policy(
            "web",
            r#"{"egress": {"rules": [{"action": "deny", "prefixes": ["192.0.2.2/32"], "ports": ["udp/9001"]}]}}"#,
        );
        assert_eq!(scene.web.run("c.send(b'five')"), Value::Null);
        assert_eq!(
            scene.web.run("c.sendto(b'x', ('192.0.2.2', 9001))"),
            json!("EPERM")
        );
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn who_calls_may_be_answered_and_nobody_else() {
    lab::run_within(DEADLINE, |lab| {
        let mut scene = Scene::set(lab);
        for name in ["web", "other"] {
            scene.set_policy(name, r#"{"egress": {"default": "deny"}}"#);
        }
        scene
            .web
            .run("s = udp('0.0.0.0', 5353); l = listen('0.0.0.0', 8080)");
        for (caller, from) in [("peer", "192.0.2.2"), ("host", "192.0.2.1")] {
            let caller = if caller == "peer" {
                &mut scene.peer
            } else {
                &mut scene.host
            };
            caller.run(&format!(
                "c = udp({from:?}, 4000); c.sendto(b'question', ('10.77.0.1', 5353))"
            ));
            assert_eq!(scene.web.run("r = heard(s)"), json!(["question", from]));
            assert_eq!(caller.run("r = answer(c)"), json!(["answer", "10.77.0.1"]));
        }
        // Another port of who has called, by another socket, and somebody else.
        assert_eq!(
            scene.web.run("s.sendto(b'x', ('192.0.2.2', 4001))"),
            json!("EPERM")
        );
        let other_socket = "fresh(SOCK_DGRAM, AF_INET).sendto(b'x', ('192.0.2.2', 4000))";
        assert_eq!(scene.web.run(other_socket), json!("EPERM"));
        assert_eq!(
            scene.web.run("s.sendto(b'x', ('198.51.100.7', 4000))"),
            json!("EPERM")
        );
        // A server that connects its socket to its caller, after the first question or before.
        scene
            .peer
            .run("d = udp('192.0.2.2', 4002); d.sendto(b'question', ('10.77.0.1', 5353))");
        scene
            .web
            .run("q, p = s.recvfrom(100); s.connect(p); s.send(b'answer')");
        assert_eq!(
            scene.peer.run("r = answer(d)"),
            json!(["answer", "10.77.0.1"])
        );
        scene
            .web
            .run("t = udp('10.77.0.1', 5354); t.connect(('192.0.2.2', 4003))");
        assert_eq!(scene.web.run("t.send(b'x')"), json!("EPERM"));
        scene
            .peer
            .run("e = udp('192.0.2.2', 4003); e.sendto(b'question', ('10.77.0.1', 5354))");
        scene.web.run("t.recv(100); t.send(b'answer')");
        assert_eq!(
            scene.peer.run("r = answer(e)"),
            json!(["answer", "10.77.0.1"])
        );
        // Of TCP, accepted connections go on.
        scene
            .peer
            .run("c = dial('10.77.0.1', 8080); c.send(b'question')");
        scene
            .web
            .run("a, p = l.accept(); a.recv(100); a.send(b'answer')");
        assert_eq!(scene.peer.run("r = c.recv(100).decode()"), "answer");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_a_crash_cuts_off_leaves_the_old_policy_or_the_new_one() {
    lab::run_within(DEADLINE, |lab| {
        let mut scene = Scene::set(lab);
        let open = policy("{}");
        let rules: Vec<String> = (0..40)
            .map(|number| format!(r#"{{"action": "allow", "prefixes": ["203.0.113.{number}/32"], "ports": ["tcp/{}"]}}"#, number + 1))
            .collect();
        let text = format!(
            r#"{{"egress": {{"default": "deny", "rules": [{}]}}}}"#,
            rules.join(",")
        );
        let narrow = policy(&text);
        let entries = |lab: &Lab| {
            let pins = folder().join("v2");
            let dump = |map: &str| {
                let text = lab.run(&format!(
                    "bpftool -j map dump pinned {}/{map}",
                    pins.display()
                ));
                let entries: Value = serde_json::from_str(&text).unwrap();
                entries.as_array().unwrap().len()
            };
            (dump("prefixes"), dump("rule_lists"), dump("texts"))
        };
        let bare = entries(lab);
        let mut steps = 0;
        scene
            .identities
            .set_policy_watched("web", &narrow, &mut |_| steps += 1)
            .unwrap();
        let full = entries(lab);
        assert!(full.0 == bare.0 + 40 && steps > 5, "{full:?} {steps}");
        for fatal in 0..steps {
            scene.identities.set_policy("web", &open).unwrap();
            assert_eq!(entries(lab), bare);
            let mut step = 0;
            let died = catch_unwind(AssertUnwindSafe(|| {
                let _ = scene
                    .identities
                    .set_policy_watched("web", &narrow, &mut |_| {
                        assert!(step != fatal, "dies here");
                        step += 1;
                    });
            }));
            assert!(died.is_err());
            let holds = scene.reach("192.0.2.2", 9000);
            let now = scene.identities.policy("web").unwrap();
            if now == open {
                assert_eq!(holds, passes(), "after step {fatal}");
                assert_eq!(entries(lab), bare, "after step {fatal}");
            } else {
                assert_eq!(
                    (now, holds),
                    (narrow.clone(), denied()),
                    "after step {fatal}"
                );
                assert_eq!(entries(lab), full, "after step {fatal}");
            }
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn without_a_policy_nothing_may_be_reached() {
    lab::run_within(DEADLINE, |lab| {
        let mut scene = Scene::set(lab);
        assert_eq!(scene.reach("192.0.2.2", 9000), passes());
        let number = scene.identities.show("web").unwrap().number;
        let bytes: Vec<String> = number
            .to_ne_bytes()
            .iter()
            .map(|byte| byte.to_string())
            .collect();
        let pin = folder().join("v2/policies");
        lab.run(&format!(
            "bpftool map delete pinned {} key {}",
            pin.display(),
            bytes.join(" ")
        ));
        assert_eq!(scene.reach("192.0.2.2", 9000), denied());
        assert_eq!(scene.reach("2001:db8::2", 9000), denied());
        assert_eq!(scene.refused("web", Refusal::NoPolicy), 4);
        let error = scene.identities.policy("web").unwrap_err();
        assert!(matches!(error, Error::NoPolicy { .. }));
        scene.host.run("l = listen('0.0.0.0', 7000)");
        assert_eq!(scene.reach("192.0.2.1", 7000), denied());
        scene.set_policy("web", OPEN);
        assert_eq!(scene.reach("192.0.2.1", 7000), passes());
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_would_lead_somewhere_else_does_not_leave() {
    lab::run_within(DEADLINE, |lab| {
        let mut scene = Scene::set(lab);
        // A loose source route by 192.0.2.2 to 198.51.100.7.
        scene
            .web
            .run("c = fresh(SOCK_DGRAM, AF_INET); o = b'\\x83\\x07\\x04' + inet_aton('192.0.2.2')");
        assert_eq!(
            scene.web.run("c.sendto(b'x', ('198.51.100.7', 9000))"),
            Value::Null
        );
        scene
            .web
            .run("c.setsockopt(IPPROTO_IP, IP_OPTIONS, o + b'\\x00')");
        let sent = scene.web.run("c.sendto(b'x', ('198.51.100.7', 9000))");
        assert_eq!(sent, json!("EPERM"));
        assert_eq!(scene.refused("web", Refusal::EgressSource), 1);
        // MPTCP and SMC would connect by sockets of the kernel's own.
        let mut allowed = new_identity(&scene.cgroups.make("raw"), &["10.77.0.4"]);
        allowed.allowed.other_protocols = true;
        allowed.policy = policy(r#"{"egress": {"default": "deny"}}"#);
        scene.identities.add(&allowed).unwrap();
        let mut raw = Application::start(Some(&allowed.cgroup), None);
        let made = raw.run("socket.socket(AF_INET, SOCK_STREAM, 262)");
        assert_eq!(made, json!("EPROTONOSUPPORT"));
        let made = raw.run("socket.socket(AF_INET, SOCK_STREAM, 256)");
        assert_eq!(made, json!("EPROTONOSUPPORT"));
        // A kernel without SMC says so by itself; of raw sockets it doesn't look at the number, and leaves it to the program.
        let counted = scene.refused("raw", Refusal::Protocol);
        let made = raw.run("socket.socket(AF_INET, SOCK_RAW, 256)");
        assert_eq!(made, json!("EPROTONOSUPPORT"));
        assert_eq!(scene.refused("raw", Refusal::Protocol), counted + 1);
        // A raw socket of TCP's is judged as any other.
        raw.run("s = socket.socket(AF_INET, SOCK_RAW, IPPROTO_TCP); s.bind(('10.77.0.4', 0))");
        let segment = "b'\\x10\\x00\\x23\\x28' + bytes(16)";
        assert_eq!(
            raw.run(&format!("s.sendto({segment}, ('192.0.2.2', 0))")),
            json!("EPERM")
        );
        scene.set_policy("raw", "{}");
        assert_eq!(
            raw.run(&format!("s.sendto({segment}, ('192.0.2.2', 0))")),
            Value::Null
        );
        let forged = "h = socket.socket(AF_INET, SOCK_RAW, IPPROTO_RAW); \
            p = b'\\x45\\0\\0\\x28\\0\\1\\0\\0\\x40\\x06\\0\\0' + inet_aton('192.0.2.1') + inet_aton('192.0.2.2')";
        raw.run(forged);
        assert_eq!(
            raw.run(&format!("h.sendto(p + {segment}, ('192.0.2.2', 0))")),
            json!("EPERM")
        );
        // Nor a datagram that isn't of a socket for such.
        raw.run(
            "u = socket.socket(AF_INET, SOCK_RAW, IPPROTO_UDP); u.setsockopt(IPPROTO_IP, 3, 1)",
        );
        let datagram = format!("p.replace(b'\\x40\\x06', b'\\x40\\x11') + {segment}");
        assert_eq!(
            raw.run(&format!("u.sendto({datagram}, ('192.0.2.2', 0))")),
            json!("EPERM")
        );
        assert_eq!(scene.refused("raw", Refusal::EgressSource), 2);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_policy_that_cannot_be_had_changes_nothing() {
    lab::run_within(DEADLINE, |lab| {
        let mut cgroups = Cgroups::new();
        let identities = Identities::new(folder());
        let web = cgroups.make("web");
        identities.add(&new_identity(&web, &["10.77.0.1"])).unwrap();
        let kept = policy(r#"{"cloud_metadata": true}"#);
        identities.set_policy("web", &kept).unwrap();
        let mapped =
            r#"{"egress": {"rules": [{"action": "deny", "prefixes": ["::ffff:1.2.3.0/120"]}]}}"#;
        let error = identities.set_policy("web", &policy(mapped)).unwrap_err();
        assert!(error.is_refusal(), "{error}");
        assert_eq!(identities.policy("web").unwrap(), kept);
        let missing = identities.set_policy("nobody", &kept).unwrap_err();
        assert!(matches!(missing, Error::NoIdentity { .. }));
        let mut new = new_identity(&cgroups.make("other"), &["10.77.0.2"]);
        new.policy = policy(mapped);
        assert!(identities.add(&new).unwrap_err().is_refusal());
        assert_eq!(identities.list().unwrap().len(), 1);
        // An address is chosen that neither the host nor an identity has.
        lab.run("ip addr add 10.78.0.1/32 dev lo");
        new.policy = kept;
        new.addresses = Vec::new();
        new.prefixes = vec!["10.78.0.0/30".parse().unwrap()];
        let added = identities.add(&new).unwrap();
        assert_eq!(added.addresses, stage::addresses(&["10.78.0.2"]));
        let mut third = new_identity(&cgroups.make("third"), &[]);
        third.prefixes = new.prefixes;
        let error = identities.add(&third).unwrap_err();
        assert!(
            error.to_string().contains("no address of 10.78.0.0/30"),
            "{error}"
        );
    });
}

/// Without a port of its own choice, each time at another one.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_socket_that_listens_again_and_again_has_one_entry() {
    lab::run_within(DEADLINE, |lab| {
        let mut scene = Scene::set(lab);
        scene.web.run(
            "l = fresh(SOCK_STREAM, AF_INET)\nfor n in range(50): l.listen(4); l.shutdown(socket.SHUT_RD)",
        );
        assert_eq!(scene.identities.show("web").unwrap().listeners, 1);
        let map = folder().join("v2").join("listeners");
        let text = lab.run(&format!("bpftool -j map dump pinned {}", map.display()));
        let entries: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(entries.as_array().unwrap().len(), 1, "{text}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn one_identity_cannot_take_the_room_of_all_listeners() {
    lab::run_within(DEADLINE, |lab| {
        let mut scene = Scene::set(lab);
        let (first, count) = (20_000, LISTENERS_MAX);
        scene
            .web
            .run("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))");
        let listened = scene.web.run(&format!(
            "l = [listen('10.77.0.1', {first} + n) for n in range({count})]"
        ));
        assert_eq!(listened, Value::Null);
        assert_eq!(
            scene.identities.show("web").unwrap().listeners,
            count as u64
        );
        let last = first + count - 1;
        assert_eq!(
            scene
                .peer
                .run(&format!("dial('10.77.0.1', {last}).close()")),
            Value::Null
        );
        // One more hears nothing, and is counted; others have their room.
        scene.web.run("m = listen('10.77.0.1', 8080)");
        assert_eq!(
            scene.peer.run("dial('10.77.0.1', 8080)"),
            json!("ECONNREFUSED")
        );
        assert_eq!(scene.refused("web", Refusal::Listeners), 1);
        scene.other.run("l = listen('0.0.0.0', 8080)");
        assert_eq!(
            scene.peer.run("dial('10.77.0.2', 8080).close()"),
            Value::Null
        );
        // Accepted connections that end don't give a place back, listeners do.
        scene.web.run("a, p = l[-1].accept(); a.close(); m.close()");
        assert_eq!(
            scene.identities.show("web").unwrap().listeners,
            count as u64
        );
        scene.web.run("l.pop(0).close()");
        assert_eq!(
            scene.identities.show("web").unwrap().listeners,
            count as u64 - 1
        );
        scene.web.run("m = listen('10.77.0.1', 8080)");
        assert_eq!(
            scene.peer.run("dial('10.77.0.1', 8080).close()"),
            Value::Null
        );
        scene.web.run("m.close(); r = [each.close() for each in l]");
        assert_eq!(scene.identities.show("web").unwrap().listeners, 0);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_own_cgroup_goes_with_its_maker() {
    lab::run_within(DEADLINE, |lab| {
        let cgroups = Cgroups::new();
        let identities = Identities::new(folder());
        let before = lab.run("ip -o addr show dev lo");
        let made = OwnCgroup::create(Some(cgroups.root()), "one").unwrap();
        let mut new = new_identity(made.path(), &["10.77.0.1"]);
        new.own_cgroup = true;
        identities.add(&new).unwrap();
        let path: PathBuf = made.path().to_owned();
        // While its maker is there it stays, also with nobody in it.
        assert_eq!(identities.list().unwrap().len(), 1);
        let mut inside = Application::start(Some(&path), None);
        inside.run("l = listen('0.0.0.0', 8080)");
        drop(made);
        assert!(inside.has_ended(), "what was in it was killed");
        assert!(!path.exists());
        // The kernel lets go of it by and by.
        let deadline = Instant::now() + Duration::from_secs(60);
        while !identities.list().unwrap().is_empty() {
            assert!(Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(lab.run("ip -o addr show dev lo"), before);
    });
}

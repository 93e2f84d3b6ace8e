//! Ways around a policy that an application can try without any privilege: sources of its own choice, and races.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

#[path = "netns_sockets/stage.rs"]
#[allow(dead_code, reason = "the other tests have more players")]
mod stage;

use std::time::Duration;

use sandwire_identity::{Identities, Refusal};
use sandwire_testlab::lab::{self, Lab};
use serde_json::json;

use self::stage::{Application, Cgroups, folder, new_identity, policy};

const DEADLINE: Duration = Duration::from_secs(600);

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_source_of_ones_own_choice_does_not_lead_to_services_of_the_host() {
    lab::run_within(DEADLINE, |lab| {
        assert_a_source_does_not_lead_to_services_of_the_host(lab, false);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn nor_does_one_of_an_identity_that_has_tcp_only() {
    lab::run_within(DEADLINE, |lab| {
        assert_a_source_does_not_lead_to_services_of_the_host(lab, true);
    });
}

fn assert_a_source_does_not_lead_to_services_of_the_host(lab: &Lab, tcp_only: bool) {
    let _wire = stage::wire(lab);
    let mut cgroups = Cgroups::new();
    let web = cgroups.make("web");
    let identities = Identities::new(folder());
    let mut new = new_identity(&web, &["10.77.0.1", "fd77::1"]);
    new.tcp_only = tcp_only;
    identities.add(&new).unwrap();
    let mut host = Application::start(None, None);
    host.run("l = listen('::', 7000)");
    let mut peer = Application::start(None, Some("peer"));
    peer.run("l = listen('::', 7000)");
    let mut web = Application::start(Some(&web), None);
    let mut dial_from = |source: &str, address: &str| {
        web.run(&format!(
            "c = fresh(SOCK_STREAM, family({source:?})); c.bind(({source:?}, 0)); \
             c.connect(({address:?}, 7000)); r = 'reached as ' + c.getsockname()[0]"
        ))
    };
    let attempts = [
        ("10.77.0.1", "192.0.2.1", "ECONNREFUSED"),
        ("127.0.0.1", "192.0.2.1", "ECONNREFUSED"),
        ("127.0.0.77", "192.0.2.1", "ECONNREFUSED"),
        ("::ffff:127.0.0.1", "::ffff:192.0.2.1", "ECONNREFUSED"),
        ("fd77::1", "2001:db8::1", "ECONNREFUSED"),
        ("::1", "2001:db8::1", "ECONNREFUSED"),
        ("fd77::1", "::ffff:192.0.2.1", "ENETUNREACH"),
        ("::1", "::ffff:192.0.2.1", "ENETUNREACH"),
        // From here the kernel would connect by an address of the host.
        ("224.0.0.1", "192.0.2.1", "EADDRNOTAVAIL"),
        ("224.0.0.1", "192.0.2.2", "EADDRNOTAVAIL"),
        ("::ffff:224.0.0.1", "::ffff:192.0.2.1", "EINVAL"),
    ];
    let mut wrong = Vec::new();
    for (source, address, expected) in attempts {
        let found = dial_from(source, address);
        if found != expected {
            wrong.push(format!("{source} to {address}: {found}, not {expected}"));
        }
    }
    assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
    let shown = identities.show("web").unwrap().counters.refused;
    assert_eq!(shown[&Refusal::HostService], 6);
    assert_eq!(shown[&Refusal::Source], 4);
    // What the policy allows is reached by the loopback's addresses, too.
    let open = policy(r#"{"host_services": ["tcp/7000"]}"#);
    identities.set_policy("web", &open).unwrap();
    let reached = dial_from("127.0.0.1", "192.0.2.1");
    assert_eq!(reached, "reached as 127.0.0.1");
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_peer_that_may_be_reached_is_no_pass_for_the_one_that_follows_it() {
    lab::run_within(DEADLINE, |lab| {
        let _wire = stage::wire(lab);
        let mut cgroups = Cgroups::new();
        let web = cgroups.make("web");
        let mut new = new_identity(&web, &["10.77.0.1"]);
        new.policy = policy(
            r#"{"egress": {"rules": [{"action": "deny", "prefixes": ["192.0.2.2/32"], "ports": ["udp/9001"]}]}}"#,
        );
        Identities::new(folder()).add(&new).unwrap();
        let mut peer = Application::start(None, Some("peer"));
        peer.run("allowed = udp('192.0.2.2', 9000); denied = udp('192.0.2.2', 9001)");
        let mut web = Application::start(Some(&web), None);
        // Another process sends by the same socket meanwhile.
        let passed = web.run(
            "\
import os, signal
c = fresh(SOCK_DGRAM, AF_INET); c.settimeout(None); c.connect(('192.0.2.2', 9000))
sender = os.fork()
while sender == 0:
    try: c.send(b'allowed')
    except OSError: pass
r = 0
for _ in range(20000):
    c.connect(('192.0.2.2', 9000))
    c.connect(('192.0.2.2', 9001))
    try:
        c.send(b'denied')
        r += 1
    except PermissionError: pass
os.kill(sender, signal.SIGKILL); os.waitpid(sender, 0)",
        );
        let heard = peer.run("r = hears(denied)");
        assert_eq!((passed, heard), (json!(0), json!("TIMEOUT")));
    });
}

/// An identity of both families with an application in it, and one of the host's beside it.
struct Pair {
    web: Application,
    host: Application,
    identities: Identities,
    _cgroups: Cgroups,
}

impl Pair {
    fn set(text: &str) -> Self {
        let mut cgroups = Cgroups::new();
        let web = cgroups.make("web");
        let mut new = new_identity(&web, &["10.77.0.1", "fd77::1"]);
        new.policy = policy(text);
        let identities = Identities::new(folder());
        identities.add(&new).unwrap();
        Self {
            web: Application::start(Some(&web), None),
            host: Application::start(None, None),
            identities,
            _cgroups: cgroups,
        }
    }

    fn refused(&self, refusal: Refusal) -> u64 {
        let shown = self.identities.show("web").unwrap();
        shown.counters.refused.get(&refusal).copied().unwrap_or(0)
    }
}

/// The kernel takes AF_UNSPEC for AF_INET where a socket of IPv4 sends.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_destination_of_no_family_leads_to_the_own_loopback_too() {
    const SEND: &str = "\
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def unspecified(client, address, port):
    to = struct.pack('=HH4s8x', 0, htons(port), inet_aton(address))
    if libc.sendto(client.fileno(), b'question', 8, 0, to, 16) < 0:
        raise OSError(ctypes.get_errno(), 'sendto')
c = fresh(SOCK_DGRAM, AF_INET)";
    lab::run_within(DEADLINE, |lab| {
        let _wire = stage::wire(lab);
        let mut pair = Pair::set(r#"{"host_services": ["all"]}"#);
        pair.host
            .run("u = udp('127.0.0.1', 7000); v = udp('127.9.9.9', 7000)");
        assert_eq!(pair.web.run(SEND), json!(null));
        let sent = pair.web.run("unspecified(c, '127.0.0.1', 7000)");
        let heard = pair.host.run("hears(u)");
        assert_eq!((sent, heard), (json!(null), json!("TIMEOUT")));
        let sent = pair.web.run("unspecified(c, '127.9.9.9', 7000)");
        assert_eq!(sent, json!("ECONNREFUSED"));
        let heard = pair
            .web
            .run("s = udp('127.0.0.1', 7001); unspecified(c, '127.0.0.1', 7001); r = heard(s)");
        assert_eq!(heard, json!(["question", "127.0.0.1"]));
        // What has no destination at all is that of a connected socket.
        let heard = pair.web.run(
            "d = dial('127.0.0.1', 7001, kind=SOCK_DGRAM); \
             d.sendmsg([b'question'], [(IPPROTO_IP, IP_PKTINFO, struct.pack('=I4s4s', 0, inet_aton('127.0.0.1'), bytes(4)))]); \
             r = heard(s)",
        );
        assert_eq!(heard, json!(["question", "127.0.0.1"]));
    });
}

/// The kernel notes 127.0.0.6 as the IPv4 address of a socket that is bound to one of IPv6.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_address_of_ipv6_is_no_source_for_ipv4() {
    lab::run_within(DEADLINE, |lab| {
        let _wire = stage::wire(lab);
        let mut pair = Pair::set("{}");
        pair.host.run("l = listen('::', 7000)");
        // IP_BIND_ADDRESS_NO_PORT: without a port the socket may still be opened to IPv4.
        let attempts = ["fd77::1", "::1"].map(|source| {
            pair.web.run(&format!(
                "c = fresh(SOCK_STREAM, AF_INET6); c.setsockopt(IPPROTO_IP, 24, 1); c.bind(({source:?}, 0)); \
                 c.setsockopt(SOL_IPV6, IPV6_V6ONLY, 0); \
                 c.connect(('::ffff:192.0.2.1', 7000)); r = 'reached as ' + c.getsockname()[0]"
            ))
        });
        assert_eq!(attempts, [json!("ENETUNREACH"), json!("ENETUNREACH")]);
        assert_eq!(pair.refused(Refusal::Source), 2);
        // UDP may name the address by its own family, too.
        let connected = pair.web.run(
            "\
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
c = fresh(SOCK_DGRAM, AF_INET6); c.setsockopt(IPPROTO_IP, 24, 1); c.bind(('fd77::1', 0))
c.setsockopt(SOL_IPV6, IPV6_V6ONLY, 0)
to = struct.pack('=HH4s8x', AF_INET, htons(7000), inet_aton('192.0.2.1'))
if libc.connect(c.fileno(), to, 16) < 0:
    raise OSError(ctypes.get_errno(), 'connect')",
        );
        assert_eq!(connected, json!("ENETUNREACH"));
    });
}

/// What ends a UDP socket's connection, which Python can't.
const DISSOLVE: &str = "\
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def dissolve(client):
    if libc.connect(client.fileno(), bytes(16), 16) < 0:
        raise OSError(ctypes.get_errno(), 'connect')";

/// The kernel chooses the source of a socket that is bound to a group and connected, and keeps what is begun with it.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_source_of_the_kernels_choice_does_not_leave() {
    lab::run_within(DEADLINE, |lab| {
        let _wire = stage::wire(lab);
        let mut pair = Pair::set("{}");
        let mut peer = Application::start(None, Some("peer"));
        peer.run("s = udp('192.0.2.2', 9000); t = udp('2001:db8::2', 9000)");
        assert_eq!(pair.web.run(DISSOLVE), json!(null));
        for (group, own, to) in [
            ("224.0.0.1", "10.77.0.1", "192.0.2.2"),
            ("ff05::114", "fd77::1", "2001:db8::2"),
        ] {
            let bound = format!("c = udp({group:?}, 0); c.connect(({to:?}, 9000))");
            let sent = pair.web.run(&format!("{bound}; c.send(b'x')"));
            assert_eq!(sent, json!("EPERM"), "{group}");
            // MSG_MORE.
            let begun = format!("{bound}; c.send(b'x', 0x8000); dissolve(c)");
            let sent = pair
                .web
                .run(&format!("{begun}; c.bind(({own:?}, 0)); c.send(b'y')"));
            assert_eq!(sent, json!("EPERM"), "{group}");
        }
        let heard = [peer.run("hears(s)"), peer.run("hears(t)")];
        assert_eq!(heard, [json!("TIMEOUT"), json!("TIMEOUT")]);
        assert_eq!(pair.refused(Refusal::EgressSource), 4);
    });
}

/// A bind that fails takes the source away that connect has just given, if it comes before what the kernel does then.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_bind_beside_a_connect_does_not_lead_to_another_source() {
    lab::run_within(DEADLINE, |lab| {
        let _wire = stage::wire(lab);
        let mut pair = Pair::set("{}");
        let mut peer = Application::start(None, Some("peer"));
        peer.run("s = udp('192.0.2.2', 9000)");
        assert_eq!(pair.web.run(DISSOLVE), json!(null));
        let sources = pair.web.run(
            "\
import os, signal
taken = udp('10.77.0.1', 7000)
c = fresh(SOCK_DGRAM, AF_INET); c.settimeout(None)
binder = os.fork()
while binder == 0:
    try: c.bind(('10.77.0.1', 7000))
    except OSError: pass
sources = set()
for _ in range(20000):
    try:
        c.connect(('192.0.2.2', 9000))
        c.send(b'x')
        sources.add(c.getsockname()[0])
    except OSError: pass
    dissolve(c)
os.kill(binder, signal.SIGKILL); os.waitpid(binder, 0)
r = sorted(sources)",
        );
        assert_eq!(sources, json!(["10.77.0.1"]));
    });
}

/// The kernel gives the host's own sockets a copy of what is sent to many.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_is_sent_to_many_reaches_no_service_of_the_host_that_is_denied() {
    lab::run_within(DEADLINE, |lab| {
        let _wire = stage::wire(lab);
        let mut pair = Pair::set("{}");
        pair.host
            .run("u = udp('0.0.0.0', 7000); v = udp('::', 7001)");
        pair.web.run(
            "\
def many(of):
    made = fresh(SOCK_DGRAM, of)
    made.setsockopt(IPPROTO_IP, 32, inet_aton('192.0.2.1'))
    made.setsockopt(SOL_SOCKET, SO_BROADCAST, 1)
    return made
link = socket.if_nametoindex('uplink')",
        );
        let attempts = [
            ("many(AF_INET).sendto(b'x', ('224.0.0.1', 7000))", "EPERM"),
            (
                "c = many(AF_INET); c.connect(('224.0.0.1', 7000)); c.send(b'x')",
                "EPERM",
            ),
            (
                "many(AF_INET6).sendto(b'x', ('::ffff:224.0.0.1', 7000))",
                "EPERM",
            ),
            (
                "c = many(AF_INET6); c.connect(('::ffff:224.0.0.1', 7000)); c.send(b'x')",
                "EPERM",
            ),
            (
                "many(AF_INET6).sendto(b'x', ('ff02::1', 7001, 0, link))",
                "EPERM",
            ),
            (
                "many(AF_INET).sendto(b'x', ('192.0.2.255', 7000))",
                "EACCES",
            ),
        ];
        let mut wrong = Vec::new();
        for (code, expected) in attempts {
            let sent = pair.web.run(code);
            let heard = pair.host.run("r = [hears(u, 0.2)]");
            let other = pair.host.run("r = [hears(v, 0.2)]");
            let found = (sent, heard, other);
            if found != (json!(expected), json!("TIMEOUT"), json!("TIMEOUT")) {
                wrong.push(format!("{code}: {found:?}"));
            }
        }
        assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
        assert_eq!(pair.refused(Refusal::HostService), 5);
        // What the policy allows.
        let open = policy(r#"{"host_services": ["udp/7000-7001"]}"#);
        pair.identities.set_policy("web", &open).unwrap();
        for (code, heard) in [
            (attempts[0].0, "r = heard(u)[1]"),
            (attempts[4].0, "r = heard(v)[1]"),
        ] {
            assert_eq!(pair.web.run(code), json!(null));
            pair.host.run("u.settimeout(60); v.settimeout(60)");
            let from = pair.host.run(heard);
            assert!(from == "10.77.0.1" || from == "fd77::1", "{from}");
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn nobody_on_the_wire_reaches_the_loopback() {
    lab::run_within(DEADLINE, |lab| {
        let wire = stage::wire(lab);
        wire.run("ip -6 route add fd53:7764:6c6f:6f70::/64 via 2001:db8::1")
            .unwrap();
        let mut pair = Pair::set("{}");
        let mut peer = Application::start(None, Some("peer"));
        // A port that the identity asks from, which whom it asks knows.
        let port = pair
            .web
            .run("s = udp('::1', 5000); c = udp('::', 0); r = c.getsockname()[1]");
        peer.run(&format!(
            "d = udp('2001:db8::2', {port}); d.sendto(b'x', ('fd53:7764:6c6f:6f70::100', 5000))"
        ));
        assert_eq!(pair.web.run("hears(s)"), json!("TIMEOUT"));
        assert_eq!(pair.refused(Refusal::IngressLoopback), 1);
        // `allow_loopback` is for the host alone.
        pair.identities.remove("web").unwrap();
        drop(pair);
        let mut cgroups = Cgroups::new();
        let mut new = new_identity(&cgroups.make("open"), &["10.77.0.1", "fd77::1"]);
        new.allowed.loopback = true;
        let added = Identities::new(folder()).add(&new).unwrap();
        let mut open = Application::start(Some(&added.cgroup), None);
        open.run("l = listen('::1', 5000)");
        let dial = |patience| {
            format!(
                "r = dial('{}', 5000, patience={patience}).getpeername()[1]",
                added.loopback[1]
            )
        };
        assert_eq!(peer.run(&dial(1)), json!("TIMEOUT"));
        let mut host = Application::start(None, None);
        assert_eq!(host.run(&dial(60)), json!(5000));
    });
}

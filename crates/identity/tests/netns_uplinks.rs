//! Hosts with several uplinks: what answers leave by is decided by the address that was asked.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

#[path = "netns_sockets/stage.rs"]
#[allow(dead_code, reason = "the other tests have more players")]
mod stage;

use std::time::Duration;

use sandwire_identity::Identities;
use sandwire_testlab::{
    counters,
    lab::{self, Lab},
    namespace::Namespace,
};
use serde_json::{Value, json};

use self::stage::{Application, Cgroups, folder, new_identity};

const DEADLINE: Duration = Duration::from_secs(600);

/// By the first uplink goes everything but what has the identity's further addresses.
const ROUTES: [&str; 6] = [
    "ip route add default via 192.0.2.2",
    "ip -6 route add default via 2001:db8::2",
    "ip rule add from 10.77.0.9 lookup 77",
    "ip -6 rule add from fd77::9 lookup 77",
    "ip route add default via 198.51.100.2 table 77",
    "ip -6 route add default via 2001:db8:2::2 table 77",
];

/// What leaves by an uplink that isn't its own.
const STRAYS: &str = "nft -f - <<'EOF'
table inet strays {
    chain leaving {
        type filter hook postrouting priority 0
        oif uplink ip saddr 10.77.0.9 counter
        oif uplink ip6 saddr fd77::9 counter
        oif second ip saddr 10.77.0.1 counter
        oif second ip6 saddr fd77::1 counter
    }
}
EOF";

/// An identity of two addresses a family, and who asks it, behind each uplink, from where the host has no route of
/// its own to.
struct Scene {
    web: Application,
    identities: Identities,
    /// By their uplinks, and by address: who asks, and what is asked.
    callers: Vec<(Application, [[&'static str; 2]; 2])>,
    _cgroups: Cgroups,
    _wires: [Namespace; 2],
}

impl Scene {
    fn set(lab: &Lab) -> Self {
        let wires = [stage::wire(lab), second_wire(lab)];
        for line in ROUTES {
            lab.run(line);
        }
        lab.shell("for file in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 > $file; done");
        lab.shell(STRAYS);
        for wire in &wires {
            wire.run("ip addr add 203.0.113.9/32 dev lo").unwrap();
            wire.run("ip addr add 2001:db8:9::9/128 dev lo").unwrap();
            wire.run("ip link set lo up").unwrap();
        }
        let mut cgroups = Cgroups::new();
        let cgroup = cgroups.make("web");
        let identities = Identities::new(folder());
        let addresses = ["10.77.0.1", "10.77.0.9", "fd77::1", "fd77::9"];
        let mut new = new_identity(&cgroup, &addresses);
        new.policy = stage::policy(stage::OPEN);
        identities.add(&new).unwrap();
        let far = ["203.0.113.9", "2001:db8:9::9"];
        let asking = |namespace: &str, asked: [&'static str; 2]| {
            let pairs = [[far[0], asked[0]], [far[1], asked[1]]];
            (Application::start(None, Some(namespace)), pairs)
        };
        Self {
            web: Application::start(Some(&cgroup), None),
            callers: vec![
                asking("peer", ["10.77.0.1", "fd77::1"]),
                asking("second", ["10.77.0.9", "fd77::9"]),
            ],
            identities,
            _cgroups: cgroups,
            _wires: wires,
        }
    }
}

/// A further uplink of the host, and a peer on it.
fn second_wire(lab: &Lab) -> Namespace {
    let peer = lab.namespace("second");
    lab.run("ip link add second type veth peer name wire netns second");
    stage::trust_addresses(lab, &peer, "second");
    for line in [
        "ip addr add 198.51.100.1/24 dev second",
        "ip addr add 2001:db8:2::1/64 dev second nodad",
        "ip link set second up",
    ] {
        lab.run(line);
    }
    for line in [
        "ip addr add 198.51.100.2/24 dev wire",
        "ip addr add 2001:db8:2::2/64 dev wire nodad",
        "ip link set wire up",
        "ip route add 10.77.0.0/24 via 198.51.100.1",
        "ip -6 route add fd77::/64 via 2001:db8:2::1",
    ] {
        peer.run(line).unwrap();
    }
    peer
}

/// Packets that the host has sent by another uplink than their source's.
fn strays(lab: &Lab) -> u64 {
    let text = lab.run("nft -j list table inet strays");
    counters::packets(&text).unwrap()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn answers_leave_by_the_uplink_of_the_address_that_was_asked() {
    lab::run_within(DEADLINE, |lab| {
        let mut scene = Scene::set(lab);
        let serve = "l = listen('::', 8080, v6only=0); s = udp('::', 5353, v6only=0)";
        assert_eq!(scene.web.run(serve), Value::Null);
        scene.identities.enter_receivers().unwrap();
        for (caller, pairs) in &mut scene.callers {
            for [from, asked] in *pairs {
                let dial = format!(
                    "t = fresh(SOCK_STREAM, family('{asked}')); t.bind(('{from}', 0)); \
                     t.connect(('{asked}', 8080)); r = [t.getsockname()[0], t.getpeername()[0]]"
                );
                assert_eq!(caller.run(&dial), json!([from, asked]), "by TCP");
                let told = scene.web.run("r = accepted(l)");
                let mapped = |address: &str| match address.contains(':') {
                    true => address.to_owned(),
                    false => format!("::ffff:{address}"),
                };
                assert_eq!(told, json!([mapped(asked), mapped(from)]), "by TCP");
                let ask = format!(
                    "c = fresh(SOCK_DGRAM, family('{asked}')); c.bind(('{from}', 0)); \
                     c.sendto(b'question', ('{asked}', 5353))"
                );
                caller.run(&ask);
                let heard = scene.web.run("r = heard(s)");
                assert_eq!(heard, json!(["question", mapped(from)]), "by UDP");
                let answered = caller.run("r = answer(c)");
                assert_eq!(answered, json!(["answer", asked]), "by UDP");
            }
        }
        assert_eq!(strays(lab), 0);
    });
}

/// What it says first has the identity's first address, and so the first uplink; or the address that it chose.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_an_identity_begins_leaves_by_the_uplink_of_its_source() {
    lab::run_within(DEADLINE, |lab| {
        let mut scene = Scene::set(lab);
        for (caller, pairs) in &mut scene.callers {
            caller.run("l = listen('::', 8080, v6only=0)");
            for [far, own] in *pairs {
                let bind = match own.ends_with('9') {
                    true => format!("t.bind(('{own}', 0)); "),
                    false => String::new(),
                };
                let dial = format!(
                    "t = fresh(SOCK_STREAM, family('{far}')); {bind}t.connect(('{far}', 8080)); r = t.getsockname()[0]"
                );
                assert_eq!(scene.web.run(&dial), json!(own));
                let told = caller.run("r = accepted(l)");
                let told = told[1].as_str().unwrap().trim_start_matches("::ffff:");
                assert_eq!(told, own, "nobody else's peer");
            }
        }
        assert_eq!(strays(lab), 0);
    });
}

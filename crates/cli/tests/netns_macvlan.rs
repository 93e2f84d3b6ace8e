//! Containers that are macvlan children of the host's uplink, on its network under addresses of their own: judged on
//! themselves, found wherever their namespace is, and gone without a trace.

#![allow(
    clippy::unwrap_used,
    reason = "a test ends at the first thing that fails"
)]

#[path = "children/mod.rs"]
mod children;
#[path = "ebpf/mod.rs"]
mod ebpf;
#[path = "kills/mod.rs"]
mod kills;

use std::{
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    thread,
    time::Duration,
};

use children::{
    Capture, PATIENCE, drops, fetch, live_under_policy, on_uplink, ping, routed, with_two,
};
use ebpf::{SECOND, World, addresses_of, assert_sound, wait_until};
use kills::{LEASES, leave_whole_leases_or_none};
use sandwire_testlab::{
    command,
    guest::kernel::Series,
    host::{BEYOND_IPV4, BEYOND_IPV6, ECHO_PORT, HOST_IPV4, answer_http, serve_tcp},
    lab,
    namespace::{self, Namespace},
};
use serde_json::{Value, json};

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn two_children_live_under_their_policy_and_vanish_without_a_trace() {
    lab::run(|lab| {
        let (mut world, spaces, leases) = with_two(lab, "macvlan", &routed());
        live_under_policy("macvlan", "bridge", &mut world, &spaces, &leases);
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn two_children_live_under_their_policy_on_linux_6_1() {
    lab::run_on(Series::Linux6_1, Duration::from_secs(900), |lab| {
        let (mut world, spaces, leases) = with_two(lab, "macvlan", &routed());
        live_under_policy("macvlan", "bridge", &mut world, &spaces, &leases);
    });
}

/// Sends a datagram with a source port.
fn send_udp(space: &Namespace, port: u16, target: &str) {
    let target = target.to_owned();
    space
        .inside(|| {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))?;
            Ok(socket.send_to(b"hello", target))
        })
        .unwrap()
        // The kernel may tell the sender that it was dropped.
        .ok();
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_a_child_may_not_send_never_leaves_it_and_is_counted() {
    lab::run(|lab| {
        let (world, spaces, leases) = with_two(lab, "macvlan", &routed());
        let (blue, beyond) = (&spaces[0], BEYOND_IPV4.to_string());
        ping(blue, &beyond, true);
        ping(blue, &BEYOND_IPV6.to_string(), true);
        let wrong =
            "host 203.0.113.200 or ether host 02:00:00:00:00:99 or udp or host 2001:db8:1::200";
        let capture = Capture::start(lab, wrong);
        for (address, target) in [
            ("203.0.113.200/32", &beyond),
            ("2001:db8:1::200/128", &BEYOND_IPV6.to_string()),
        ] {
            let before = drops(&world, "blue", "source_address");
            blue.run(&format!(
                "ip address add {address} dev eth0 {}",
                nodad(address)
            ))
            .unwrap();
            let source = address.split('/').next().unwrap();
            let line = format!("ping -n -q -c 2 -i 0.2 -W 1 -I {source} {target}");
            blue.run(&line).unwrap_err();
            assert!(drops(&world, "blue", "source_address") > before, "{source}");
            blue.run(&format!("ip address delete {address} dev eth0"))
                .unwrap();
        }
        send_udp(blue, 67, &format!("{beyond}:68"));
        send_udp(blue, 5353, "224.0.0.251:5353");
        assert!(drops(&world, "blue", "rogue_dhcp") > 0);
        assert!(drops(&world, "blue", "multicast") > 0);
        let own_mac = leases[0]["attached"]["mac"].as_str().unwrap();
        blue.run("ip link set eth0 address 02:00:00:00:00:99")
            .unwrap();
        ping(blue, &beyond, false);
        assert!(drops(&world, "blue", "source_mac") > 0);
        blue.run(&format!("ip link set eth0 address {own_mac}"))
            .unwrap();
        ping(blue, &beyond, true);
        let seen = capture.end(lab);
        assert_eq!(seen.lines().count(), 0, "{seen}");
        // Answers pass where calls are denied.
        blue.inside(|| serve_tcp(80, answer_http)).unwrap();
        let denied = json!({"action": "deny", "prefixes": ["203.0.113.0/24", "2001:db8:1::/64"]});
        for policy in [
            json!({"uplink": "route", "egress": {"rules": [denied]}}),
            json!({"uplink": "deny"}),
        ] {
            world.daemon.set_policy("blue", &policy).unwrap();
            ping(blue, &beyond, false);
            ping(blue, &BEYOND_IPV6.to_string(), false);
            for own in addresses_of(&leases[0]) {
                let page = fetch(&world, &own);
                assert!(page.contains("200 OK"), "{page}");
            }
        }
        assert!(drops(&world, "blue", "policy") >= 2);
        assert!(drops(&world, "blue", "uplink_denied") >= 2);
    });
}

fn nodad(address: &str) -> &'static str {
    if address.contains(':') { "nodad" } else { "" }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn limits_hold_in_both_directions_and_a_trace_tells_of_packets() {
    lab::run(|lab| {
        let (world, spaces, leases) = with_two(lab, "macvlan", &routed());
        let (blue, beyond) = (&spaces[0], BEYOND_IPV4.to_string());
        ping(blue, &beyond, true);
        let file = lab.folder().join("trace.pcapng");
        let mut trace = world
            .daemon
            .command(&format!("trace blue -w {}", file.display()))
            .spawn()
            .unwrap();
        wait_until("the trace has begun", PATIENCE, || {
            file.metadata().is_ok_and(|file| file.len() > 0)
        });
        thread::sleep(Duration::from_millis(300));
        ping(blue, &beyond, true);
        ping(blue, &addresses_of(&leases[1])[0], false);
        thread::sleep(Duration::from_millis(500));
        command::run(&format!("kill -INT {}", trace.id())).unwrap();
        trace.wait().unwrap();
        let seen = lab.run(&format!("tcpdump -nr {} icmp", file.display()));
        assert!(
            seen.contains("echo request") && seen.contains("echo reply"),
            "{seen}"
        );
        let few = json!({"packets_per_second": 20, "burst_packets": 20});
        for direction in ["egress", "ingress"] {
            let before = drops(&world, "blue", "packet_limit");
            let policy = json!({"uplink": "route", "limits": {direction: few}});
            world.daemon.set_policy("blue", &policy).unwrap();
            // As many as the burst at once, and the rate for as long as it takes.
            let heard = echoes(blue, 400);
            assert!(heard > 0 && heard < 400, "{direction}: {heard}");
            let dropped = drops(&world, "blue", "packet_limit") - before;
            // The echo server may have missed some.
            assert!(
                dropped > 200 && dropped + heard <= 400,
                "{direction}: {dropped}, {heard}"
            );
        }
    });
}

/// How many of so many datagrams the world beyond gives back.
fn echoes(space: &Namespace, count: u64) -> u64 {
    let target = SocketAddr::new(BEYOND_IPV4.into(), ECHO_PORT);
    let exchange = || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        socket.set_read_timeout(Some(2 * SECOND))?;
        let (mut heard, mut room) = (0, [0; 64]);
        for number in 0..count {
            // The kernel may tell the sender that it was dropped.
            drop(socket.send_to(&number.to_ne_bytes(), target));
            socket.set_nonblocking(true)?;
            heard += u64::from(socket.recv(&mut room).is_ok());
        }
        socket.set_nonblocking(false)?;
        while socket.recv(&mut room).is_ok() {
            heard += 1;
        }
        Ok(heard)
    };
    space.inside(exchange).unwrap()
}

/// Removes what the container can if it has the right to, and lets the daemon find it.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_filter_or_child_that_somebody_took_away_comes_back() {
    lab::run(|lab| {
        let (world, spaces, leases) = with_two(lab, "macvlan", &routed());
        let blue = &spaces[0];
        let filters = |hook: &str| {
            blue.run(&format!("tc filter show dev eth0 {hook}"))
                .unwrap()
        };
        for damage in [
            "tc filter del dev eth0 egress",
            "tc filter del dev eth0 ingress",
            "tc qdisc del dev eth0 clsact",
            "ip link delete eth0",
        ] {
            blue.run(damage).unwrap();
            wait_until(damage, PATIENCE, || {
                blue.run("ip -o link").unwrap().contains("eth0")
                    && filters("egress").contains("from_child")
                    && filters("ingress").contains("to_child")
            });
            wait_until("no defect is left", PATIENCE, || {
                world.daemon.json("show blue").unwrap()["defects"] == json!([])
            });
        }
        ping(blue, &BEYOND_IPV4.to_string(), true);
        ping(blue, &addresses_of(&leases[1])[0], false);
        let log = world.daemon.log();
        assert!(log.contains("a program on it is gone or replaced"), "{log}");
    });
}

/// A frame that goes past the egress hook, as a container with CAP_NET_RAW can send it, is still judged where a sibling
/// receives it.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_sibling_refuses_what_was_sent_past_the_egress_hook() {
    lab::run(|lab| {
        let (world, spaces, leases) = with_two(lab, "macvlan", &routed());
        let mac = |lease: &Value| lease["attached"]["mac"].as_str().unwrap().replace(':', "");
        let octets = |lease: &Value| -> String {
            let address: Ipv4Addr = addresses_of(lease)[0].parse().unwrap();
            address
                .octets()
                .map(|octet| format!("{octet:02x}"))
                .concat()
        };
        // A UDP packet of 28 bytes, and PACKET_QDISC_BYPASS.
        let frame = format!(
            "{}{}08004500001c0000000040110000{}{}0007000700080000",
            mac(&leases[1]),
            mac(&leases[0]),
            octets(&leases[0]),
            octets(&leases[1])
        );
        let script = format!(
            "import socket\ns = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)\n\
             s.setsockopt(263, 20, 1)\ns.bind(('eth0', 0x800))\ns.send(bytes.fromhex('{frame}'))\n"
        );
        let sent = namespace::command_in(&spaces[0].path(), "python3")
            .args(["-c", &script])
            .output()
            .unwrap();
        assert!(sent.status.success(), "{sent:?}");
        wait_until("red has refused it", PATIENCE, || {
            drops(&world, "red", "other_sandbox") == 1
        });
        assert_eq!(drops(&world, "blue", "other_sandbox"), 0);
        let shown = world.daemon.json("show red").unwrap();
        assert_eq!(shown["traffic"]["ingress"]["packets"], 0, "{shown}");
    });
}

/// Frames of a container that makes them itself, each with a number as the last octet of where it goes. The first is in order.
const FORGED: &str = r#"
import socket, struct, sys
own_mac, own4, own6, red4, red6, gate4, gate6 = sys.argv[1:]
mac = lambda text: bytes.fromhex(text.replace(":", ""))
four = lambda text: socket.inet_pton(socket.AF_INET, text)
six = lambda text: socket.inet_pton(socket.AF_INET6, text)
own, other = mac(own_mac), mac("02:00:00:00:00:99")
beyond4, beyond6 = "198.51.100.9", "2001:db8:99::9"

def total(data):
    data += b"\0" * (len(data) % 2)
    value = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while value >> 16: value = (value & 0xffff) + (value >> 16)
    return ~value & 0xffff

def udp(sport=7, dport=7): return struct.pack("!HHHH", sport, dport, 12, 0) + b"mine"
def ipv4(source, to=beyond4, body=udp(), fragment=0, first=0x45, length=None, protocol=17):
    length = 20 + len(body) if length is None else length
    head = struct.pack("!BBHHHBBH4s4s", first, 0, length, 1, fragment, 64, protocol, 0, four(source), four(to))
    return head[:10] + struct.pack("!H", total(head)) + head[12:] + body
def ipv6(source, to=beyond6, body=udp(), kind=17, hops=64):
    return struct.pack("!IHBB", 6 << 28, len(body), kind, hops) + six(source) + six(to) + body
def icmp6(source, to, kind, body, hops=255, before=b""):
    message = bytes([kind, 0, 0, 0]) + body
    pseudo = six(source) + six(to) + struct.pack("!II", len(message), 58)
    message = message[:2] + struct.pack("!H", total(pseudo + message)) + message[4:]
    return ipv6(source, to, before + message, 0 if before else 58, hops)
def arp(kind, hardware, sender, target):
    return struct.pack("!HHBBH", 1, 0x800, 6, 4, kind) + hardware + four(sender) + b"\xff" * 6 + four(target)
def advert(source, target, hardware=own, **more):
    body = b"\x20\0\0\0" + six(target) + b"\2\1" + hardware
    return icmp6(source, "ff02::1", 136, body, **more)
def tagged(kind, inner): return struct.pack("!HH", 5, kind) + inner

local = six("fe80::")[:8] + bytes([own[0] ^ 2]) + own[1:3] + b"\xff\xfe" + own[3:]
local = socket.inet_ntop(socket.AF_INET6, local)
pad = b"\1\4\0\0\0\0"
rows = [
    (0x800, ipv4(own4)),
    (0x800, ipv4(red4)), (0x800, ipv4(gate4)), (0x800, ipv4("0.0.0.0")), (0x800, ipv4("127.0.0.1")),
    (0x800, ipv4("224.0.0.1")), (0x800, ipv4(red4, fragment=0x2000)), (0x800, ipv4(red4, fragment=100)),
    (0x800, ipv4(red4, first=0x46, body=b"\1" * 4 + udp())), (0x800, ipv4(own4, first=0x44)), (0x800, ipv4(own4, length=10)),
    (0x800, ipv4(own4, length=200)), (0x800, ipv4(own4, body=udp(67, 68))), (0x800, ipv4(own4, "255.255.255.255")),
    (0x800, ipv4(own4, "169.254.169.254")), (0x800, ipv4(red4, protocol=4, body=ipv4(own4))),
    (0x86dd, ipv6(red6)), (0x86dd, ipv6(gate6)), (0x86dd, ipv6("::")), (0x86dd, ipv6("::1")), (0x86dd, ipv6("ff02::1")),
    (0x86dd, ipv6("::ffff:" + own4)), (0x86dd, ipv6("fe80::1")), (0x86dd, ipv6(red6, kind=44, body=b"\x11\0\0\1\0\0\0\1" + udp())),
    (0x86dd, ipv6(own6, body=udp(547, 546))),
    (0x806, arp(2, own, gate4, gate4)), (0x806, arp(1, own, red4, gate4)), (0x806, arp(2, other, own4, gate4)),
    (0x806, arp(1, own, gate4, gate4)), (0x806, arp(2, own, red4, red4)),
    (0x86dd, advert(own6, gate6)), (0x86dd, advert(own6, red6)), (0x86dd, advert(local, red6)), (0x86dd, advert(gate6, own6)),
    (0x86dd, advert(own6, own6, hardware=other)), (0x86dd, advert(own6, own6, hops=64)),
    (0x86dd, advert(own6, gate6, before=b"\x3a\0" + pad)),
    (0x86dd, icmp6(own6, "ff02::1:ff00:1", 135, b"\0" * 4 + six(gate6) + b"\1\1" + other)),
    (0x86dd, icmp6("::", "ff02::1:ff00:1", 135, b"\0" * 4 + six(gate6))),
    (0x86dd, icmp6(local, "ff02::1", 134, b"\x40\0\x07\x08" + b"\0" * 8)),
    (0x86dd, icmp6(local, "ff02::1", 134, b"\x40\0\x07\x08" + b"\0" * 8, before=b"\x3a\0" + pad)),
    (0x86dd, icmp6(local, red6, 137, b"\0" * 4 + six(own6) + six(gate6))),
    (0x86dd, icmp6(local, "ff02::1", 130, b"\0" * 20, hops=1)),
    (0x8100, tagged(0x800, ipv4(own4))), (0x88a8, tagged(0x8100, tagged(0x800, ipv4(own4)))), (0x8100, tagged(0x806, arp(2, own, gate4, gate4))),
    (0x88cc, b"\2\7\4" + own + b"\0" * 40), (0x8847, b"\0\0\x11\x40" + ipv4(red4)), (0x8864, b"\x11\0\0\0\0\0\0!" + ipv4(red4)),
    (0x26, b"\x42\x42\3" + b"\0" * 35), (0x888e, b"\1\1\0\0" + b"\0" * 40),
    (0x86dd, ipv4(own4)), (0x800, ipv6(own6)), (0x806, ipv4(red4)),
]
sent = 0
for as_kind in (None, 0x800, 0x806, 0x86dd, 0x3):
    for number, (kind, body) in enumerate(rows):
        for hardware in (own, other):
            if number == 0 and (hardware == own) != (as_kind is None): continue
            s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
            s.bind(("eth0", kind if as_kind is None else as_kind))
            to = b"\x02\xaa\xaa\xaa\xaa" + bytes([number])
            try: s.send((to + hardware + struct.pack("!H", kind) + body).ljust(60, b"\0"))
            except OSError: pass
            s.close()
            sent += 1
# A later fragment that the kernel is to cut into more (UFO), of which it would make a first one.
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
s.bind(("eth0", 0x800))
s.setsockopt(263, 15, 1) # SOL_PACKET, PACKET_VNET_HDR
cut = struct.pack("=BBHHHH", 1, 3, 42, 1000, 34, 6)
try: s.send(cut + b"\x02\xaa\xaa\xaa\xaa\xff" + own + b"\x08\0" + ipv4(own4, body=udp() + b"\0" * 2000, fragment=100))
except OSError: pass
print(sent + 1)
"#;

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn forged_frames_of_a_child_never_reach_the_network() {
    lab::run(|lab| {
        let (world, spaces, leases) = with_two(lab, "macvlan", &routed());
        let blue = &spaces[0];
        ping(blue, &BEYOND_IPV4.to_string(), true);
        let capture = Capture::start(lab, "ether[0:4] = 0x02aaaaaa");
        let (own, red) = (addresses_of(&leases[0]), addresses_of(&leases[1]));
        let gateways = [BEYOND_IPV4.to_string(), BEYOND_IPV6.to_string()];
        let mac = leases[0]["attached"]["mac"].as_str().unwrap();
        let sent = namespace::command_in(&blue.path(), "python3")
            .args(["-c", FORGED, mac, &own[0], &own[1], &red[0], &red[1]])
            .args(gateways)
            .output()
            .unwrap();
        assert!(sent.status.success(), "{sent:?}");
        let sent: u64 = String::from_utf8(sent.stdout)
            .unwrap()
            .trim()
            .parse()
            .unwrap();
        let seen = capture.end(lab);
        let is_in_order = seen.lines().count() == 1 && seen.contains("> 198.51.100.9.7: UDP");
        assert!(is_in_order, "{seen}");
        let shown = world.daemon.json("show blue").unwrap();
        let drops = shown["traffic"]["drops"].as_object().unwrap();
        let dropped: u64 = drops.values().filter_map(Value::as_u64).sum();
        assert!(dropped > sent / 2, "{sent}: {drops:?}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn sigkill_while_children_are_made_leaves_whole_leases_or_none() {
    lab::run_within(Duration::from_secs(300), |lab| {
        leave_whole_leases_or_none(lab, &on_uplink("macvlan", LEASES, &routed()));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_child_is_deleted_in_a_namespace_that_no_path_leads_to() {
    lab::run(|lab| {
        let (mut world, spaces, _leases) = with_two(lab, "macvlan", &routed());
        // Holds the namespace when its name is gone.
        let mut sleeper = namespace::command_in(&spaces[0].path(), "sleep")
            .arg("600")
            .spawn()
            .unwrap();
        let inside = format!("nsenter -t {} -n ip -o link", sleeper.id());
        let own = std::fs::read_link("/proc/self/ns/net").unwrap();
        let entered = || std::fs::read_link(format!("/proc/{}/ns/net", sleeper.id())).unwrap();
        wait_until("it is in there", PATIENCE, || entered() != own);
        lab.run("umount /run/netns/blue");
        world.daemon.kill().unwrap();
        world.daemon.restart().unwrap();
        assert!(command::run(&inside).unwrap().contains("eth0"));
        world.daemon.json("release blue").unwrap();
        assert!(!command::run(&inside).unwrap().contains("eth0"));
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
        // And one that vanishes with its namespace: nothing is left to be done.
        lab.run("ip netns delete red");
        wait_until("the namespace is missed", PATIENCE, || {
            world.daemon.json("show red").unwrap()["defects"] != json!([])
        });
        world.daemon.json("release red").unwrap();
        world.daemon.wait_pool("lan", 2, PATIENCE).unwrap();
        lab.run("ip netns add red");
        world.daemon.json("acquire lan red --netns red").unwrap();
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_cannot_be_is_refused_with_its_reason() {
    lab::run(|lab| {
        let (world, spaces, leases) = with_two(lab, "macvlan", &routed());
        lab.run("ip link add br0 type bridge");
        lab.run("ip link add port0 type veth peer name port1");
        lab.run("ip link set port0 master br0");
        lab.run("ip link set port0 up");
        let refused = |change: &dyn Fn(&mut Value), reason: &str| {
            let mut body = on_uplink("macvlan", 1, &routed());
            body["name"] = "other".into();
            body["addresses"]["ipv4"] = "203.0.113.128/26".into();
            body["addresses"]["ipv6"] = "2001:db8:1::b1:0/112".into();
            change(&mut body);
            let answer = world.daemon.http("POST", "/v1/pools", Some(&body)).unwrap();
            assert!([400, 422].contains(&answer.status), "{}", answer.body);
            assert!(answer.body.contains(reason), "{}", answer.body);
        };
        let shared = leases[0]["attached"]["host_interface"].as_str().unwrap();
        assert_eq!(shared, "up0");
        for (parent, reason) in [
            ("nowhere", "find interface nowhere"),
            ("port0", "port of another interface"),
            ("port1", "one that is down"),
            ("lo", "it has a meaning of its own"),
        ] {
            refused(&|body| body["parent"]["interface"] = parent.into(), reason);
        }
        refused(
            &|body| body["tap"] = json!({"mtu": 9000}),
            "that of its parent",
        );
        refused(
            &|body| body["policy"]["uplink"] = "masquerade".into(),
            "use uplink = route or deny",
        );
        refused(
            &|body| body["device"] = "veth".into(),
            "device = macvlan or ipvlan is not",
        );
        refused(
            &|body| drop(body.as_object_mut().unwrap().remove("parent")),
            "but parent is not",
        );
        refused(
            &|body| body["parent"]["gateways"] = json!(["203.0.113.2", "203.0.113.3"]),
            "second of its family",
        );
        let said = |verb: &str| {
            let output = world.daemon.command(verb).output().unwrap();
            assert!(!output.status.success(), "{verb}");
            String::from_utf8(output.stderr).unwrap()
        };
        assert!(said("publish blue 8080:80").contains("can't reach lease"));
        let mut impair = world.daemon.command("impair blue");
        let output = impair.args(["--egress", "delay 1ms"]).output().unwrap();
        let why = String::from_utf8(output.stderr).unwrap();
        assert!(why.contains("past every place"), "{why}");
        let masquerade = json!({"uplink": "masquerade"});
        let answer = world
            .daemon
            .http("PUT", "/v1/leases/blue/policy", Some(&masquerade))
            .unwrap();
        assert_eq!(answer.status, 422, "{}", answer.body);
        // Nothing of an attempt is left.
        world.daemon.json("release red").unwrap();
        world.daemon.wait_pool("lan", 1, PATIENCE).unwrap();
        spaces[1].run("ip link add eth0 type bridge").unwrap();
        assert!(said("acquire lan red --netns red").contains("one of that name"));
        assert!(said("acquire lan red --netns red --tap tap0").contains("can't be joined"));
        spaces[1].run("ip link delete eth0").unwrap();
        world.daemon.wait_pool("lan", 1, PATIENCE).unwrap();
        world.daemon.json("acquire lan red --netns red").unwrap();
        lab.run("ip link set up0 down");
        let third = lab.namespace("third");
        assert!(said("acquire lan third --netns third").contains("one that is down"));
        assert!(!third.run("ip -o link").unwrap().contains("eth0"));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn children_that_nobody_owns_any_more_are_taken_away() {
    lab::run(|lab| {
        let (mut world, spaces, _leases) = with_two(lab, "macvlan", &routed());
        spaces[1].run("ip link add other0 type bridge").unwrap();
        world.daemon.kill().unwrap();
        let has_child = |space: &Namespace| space.run("ip -o link").unwrap().contains("eth0");
        // Without its journal a daemon knows of no lease.
        lab.shell(&format!(
            "rm {}/journal*",
            world.daemon.state_folder().display()
        ));
        world.daemon.restart().unwrap();
        for space in &spaces {
            wait_until("it is gone", PATIENCE, || !has_child(space));
        }
        world
            .daemon
            .create_pool(&on_uplink("macvlan", 1, &routed()))
            .unwrap();
        world.daemon.wait_pool("lan", 1, PATIENCE).unwrap();
        world.daemon.json("acquire lan blue --netns blue").unwrap();
        world.daemon.kill().unwrap();
        let dry = world
            .daemon
            .json("cleanup --instance lab --dry-run")
            .unwrap();
        assert!(dry["found"].to_string().contains("\"child\""), "{dry}");
        assert!(has_child(&spaces[0]));
        let mut container = namespace::command_in(&spaces[0].path(), "sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let user = format!("sleep (pid {})", container.id());
        wait_until("the refusal", PATIENCE, || {
            let refused = world
                .daemon
                .output("cleanup --instance lab --dry-run --json");
            let found = String::from_utf8(refused.unwrap().stdout).unwrap();
            found.contains(&container.id().to_string())
        });
        let refused = world.daemon.output("cleanup --instance lab").unwrap();
        let message = String::from_utf8(refused.stderr).unwrap();
        assert!(message.contains(&user), "{message}");
        assert!(has_child(&spaces[0]));
        container.kill().unwrap();
        container.wait().unwrap();
        world.daemon.json("cleanup --instance lab").unwrap();
        assert!(!has_child(&spaces[0]));
        assert!(spaces[1].run("ip -o link").unwrap().contains("other0"));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_child_has_the_name_mac_mtu_routes_and_gateway_that_were_asked_for() {
    lab::run(|lab| {
        let world = World::without_pools(lab);
        let mut pool = on_uplink("macvlan", 2, &routed());
        // Nobody on the wire has an address of the pool, so all goes by the gateway.
        pool["addresses"] =
            json!({"plan": "prefix", "ipv4": "10.70.0.0/24", "ipv6": "fd00:b0::/64"});
        pool["parent"]["gateways"] = json!([BEYOND_IPV4.to_string()]);
        world.daemon.create_pool(&pool).unwrap();
        let space = lab.namespace("blue");
        let line =
            "acquire lan blue --netns blue --interface net1 --mac 06:73:00:00:00:42 --mtu 1400";
        let lease = world.daemon.json(line).unwrap();
        let attached = &lease["attached"];
        assert_eq!(attached["mac"], "06:73:00:00:00:42");
        let own = addresses_of(&lease);
        assert_eq!(
            attached["addresses"][0]["address"],
            format!("{}/32", own[0])
        );
        assert_eq!(attached["addresses"][1]["gateway"], BEYOND_IPV6.to_string());
        let link = space.run("ip -j link show dev net1").unwrap();
        let link: Value = serde_json::from_str(&link).unwrap();
        assert_eq!(link[0]["mtu"], 1400);
        assert_eq!(link[0]["address"], "06:73:00:00:00:42");
        // The way back, as a router of that network would have it.
        for (address, family) in own.iter().zip(["-4", "-6"]) {
            let line = format!("ip {family} route add {address} dev eth0");
            world.beyond.run(&line).unwrap();
        }
        ping(&space, &BEYOND_IPV4.to_string(), true);
        ping(&space, &BEYOND_IPV6.to_string(), true);
        assert_sound(&world, "blue");
        assert_eq!(
            world.daemon.json("show blue").unwrap()["defects"],
            json!([])
        );
    });
}

/// The host's stack, and sandboxes that it leads to, have no way to a child; nor has a child to them.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_child_and_the_host_are_apart() {
    lab::run(|lab| {
        let (world, spaces, leases) = with_two(
            lab,
            "macvlan",
            &json!({"uplink": "route", "clone_to_clone": true, "group": "all"}),
        );
        let policy = json!({"uplink": "route", "clone_to_clone": true, "group": "all"});
        let mut pairs = on_uplink("macvlan", 1, &policy);
        pairs["name"] = "pairs".into();
        pairs["device"] = "veth".into();
        pairs.as_object_mut().unwrap().remove("parent");
        pairs["addresses"] =
            json!({"plan": "prefix", "ipv4": "10.70.0.0/24", "ipv6": "fd00:b0::/64"});
        world.daemon.create_pool(&pairs).unwrap();
        let green = lab.namespace("green");
        let pair = world
            .daemon
            .json("acquire pairs green --netns green")
            .unwrap();
        ping(&green, &BEYOND_IPV4.to_string(), false);
        for own in addresses_of(&leases[0]) {
            ping(&green, &own, false);
            lab.shell(&format!("! ping -n -q -c 1 -W 1 {own}"));
        }
        for other in addresses_of(&pair) {
            ping(&spaces[0], &other, false);
        }
        ping(&spaces[0], &HOST_IPV4.to_string(), false);
        ping(&spaces[0], &addresses_of(&leases[1])[0], true);
        assert!(drops(&world, "green", "no_route") >= 2);
        assert!(drops(&world, "blue", "no_route") >= 2);
    });
}

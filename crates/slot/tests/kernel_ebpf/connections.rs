//! How many connections a sandbox may begin through the host's own stack, which remembers them in one table for all.

use std::{
    net::{IpAddr, SocketAddr},
    thread,
    time::{Duration, Instant},
};

use sandwire_slot::{network::Network, plan::Plan};
use sandwire_testlab::{
    fake_guest::frame,
    host::{BEYOND_IPV4, BEYOND_IPV6, Beyond, ECHO_PORT, HOST_IPV4, HTTP_PORT},
    lab::{self, Lab},
};

use crate::fixture::{
    EBPF_KINDS, ebpf_pool, pool_of, prepare,
    sandbox::{GATEWAY_MAC, Sandbox},
    talk::{PATIENCE, http_get},
    tear_down,
};

const FEW: &str = r#"{"connections_max":50}"#;
/// What others than the guest have in the kernel's table meanwhile.
const OTHERS: u32 = 10;

/// Connections that the host's kernel remembers.
fn tracked(lab: &Lab) -> u32 {
    let text = lab.run("cat /proc/sys/net/netfilter/nf_conntrack_count");
    text.trim().parse().unwrap()
}

/// Packets dropped for this bound.
fn over_the_bound(lab: &Lab, most: u32) -> u64 {
    let chain = format!("nft list chain inet sandwire-test connections_{most}");
    let text = lab.run(&chain);
    let line = text.lines().find(|line| line.contains("too many"));
    let (_, rest) = line.unwrap().split_once("packets ").unwrap();
    rest.split_whitespace().next().unwrap().parse().unwrap()
}

/// A packet to a port that nobody has, from a port of its own.
fn spray(sandbox: &Sandbox, target: IpAddr, ports: std::ops::Range<u16>) {
    let known = sandbox.guest.network();
    for port in ports {
        let source: IpAddr = match target {
            IpAddr::V4(_) => known.ipv4.0.into(),
            IpAddr::V6(_) => known.ipv6.0.into(),
        };
        let source = SocketAddr::new(source, port);
        let target = SocketAddr::new(target, 20_000);
        let udp = frame::udp(known.mac, GATEWAY_MAC, source, target, b"flood");
        sandbox.guest.send_frame(&udp).unwrap();
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_guest_that_sprays_fills_its_own_share_of_the_hosts_connections_alone() {
    lab::run(|lab| {
        let beyond = Beyond::attach().unwrap();
        // Nobody tells the kernel that there is no such port: what isn't answered is remembered, too.
        for iptables in ["iptables", "ip6tables"] {
            let line = format!("{iptables} -A INPUT -p udp --dport 20000 -j DROP");
            beyond.run(&line).unwrap();
        }
        let mut pools = EBPF_KINDS
            .map(|kind| ebpf_pool(kind, kind, FEW, "10.1.0.0/24", "fd00:1::/64"))
            .to_vec();
        pools.push(pool_of("nft", FEW, "{}", "10.1.0.0/24", "fd00:1::/64"));
        for plan in pools {
            let kind = &plan.spec.name;
            let network = prepare(&plan);
            let flooder = Sandbox::start(&network, &plan, 0);
            let neighbour = Sandbox::start(&network, &plan, 1);
            let before = tracked(lab);
            spray(&flooder, BEYOND_IPV4.into(), 10_000..11_000);
            spray(&flooder, BEYOND_IPV6.into(), 10_000..11_000);
            for server in [IpAddr::from(BEYOND_IPV4), BEYOND_IPV6.into()] {
                let page = SocketAddr::new(server, HTTP_PORT);
                neighbour.guest.fetch(page, PATIENCE).unwrap();
            }
            let more = tracked(lab) - before;
            assert!(more >= 50, "{kind}: {more}");
            assert!(more <= 2 * 50 + OTHERS, "{kind}: {more}");
            if flooder.slot.is_ebpf() {
                assert!(over_the_bound(lab, 50) >= 1800, "{kind}");
            }
            // Who calls it is not kept away by what it has.
            for address in flooder.clone_addresses() {
                let answer = http_get(SocketAddr::new(address, 80)).unwrap();
                assert!(answer.starts_with("HTTP/1"), "{kind}: {answer}");
            }
            tear_down(&network, &[flooder.slot, neighbour.slot]);
            // Whoever gets these addresses next has begun nothing.
            for set in ["begun4", "begun6"] {
                let text = lab.run(&format!("nft list set inet sandwire-test {set}"));
                assert!(!text.contains("elements"), "{kind}: {text}");
            }
            network.remove_pool(&plan).unwrap();
            lab.run("conntrack -F");
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn closed_connections_of_a_guest_do_not_fill_the_hosts_table_either() {
    lab::run(|lab| {
        let _beyond = Beyond::attach().unwrap();
        let plan = ebpf_pool("web", "host", FEW, "10.1.0.0/24", "fd00:1::/64");
        let network = prepare(&plan);
        let sandbox = Sandbox::start(&network, &plan, 0);
        let known = sandbox.guest.network();
        let before = tracked(lab);
        let begun = Instant::now();
        for port in 10_000..12_000 {
            let source = SocketAddr::new(known.ipv4.0.into(), port);
            let target = SocketAddr::new(BEYOND_IPV4.into(), HTTP_PORT);
            let syn = frame::tcp_syn(known.mac, GATEWAY_MAC, source, target);
            sandbox.guest.send_frame(&syn).unwrap();
            // The guest's stack knows of no such connection, and resets it: closed, and remembered.
            if port % 20 == 0 {
                let gateway = known.ipv4_gateway.into();
                sandbox.guest.ping(gateway, PATIENCE).unwrap();
            }
        }
        let by_time = u32::try_from(begun.elapsed().as_secs()).unwrap() * 10;
        let more = tracked(lab) - before;
        assert!(more >= 50, "{more}");
        assert!(more <= 100 + by_time + OTHERS, "{more}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_stream_that_nobody_answers_is_one_connection() {
    lab::run(|lab| {
        let beyond = Beyond::attach().unwrap();
        let line = "iptables -A INPUT -p udp --dport 20000 -j DROP";
        beyond.run(line).unwrap();
        let plan = ebpf_pool("web", "host", FEW, "10.1.0.0/24", "fd00:1::/64");
        let network = prepare(&plan);
        let sandbox = Sandbox::start(&network, &plan, 0);
        for _ in 0..1000 {
            spray(&sandbox, BEYOND_IPV4.into(), 10_000..10_001);
        }
        assert_eq!(over_the_bound(lab, 50), 0);
        let echo = SocketAddr::new(BEYOND_IPV4.into(), ECHO_PORT);
        let answer = sandbox.guest.exchange_udp(echo, b"ping", PATIENCE);
        assert_eq!(answer.unwrap(), b"ping");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn each_pool_has_its_own_bound_and_a_change_holds_at_once() {
    lab::run(|lab| {
        let beyond = Beyond::attach().unwrap();
        let line = "iptables -A INPUT -p udp --dport 20000 -j DROP";
        beyond.run(line).unwrap();
        let first = |most: u32| {
            let policy = format!(r#"{{"connections_max":{most}}}"#);
            ebpf_pool("first", "host", &policy, "10.1.0.0/24", "fd00:1::/64")
        };
        // It masquerades nothing, but the host's own services track it as long as another pool does.
        let policy = r#"{"uplink":"route","host_services":["all"],"connections_max":30}"#;
        let second = ebpf_pool("second", "host", policy, "10.2.0.0/24", "fd00:2::/64");
        let network = prepare(&first(20));
        network.add_pool(&second).unwrap();
        let sandboxes = [(first(20), 20), (second.clone(), 30)].map(|(plan, most)| {
            let sandbox = Sandbox::start(&network, &plan, 0);
            (sandbox, most)
        });
        let settle = |sandbox: &Sandbox| {
            let gateway = sandbox.guest.network().ipv4_gateway.into();
            sandbox.guest.ping(gateway, PATIENCE).unwrap();
            // What goes up to the host's stack comes there a moment later.
            thread::sleep(Duration::from_millis(100));
        };
        for ((sandbox, most), target) in sandboxes
            .iter()
            .zip([IpAddr::from(BEYOND_IPV4), HOST_IPV4.into()])
        {
            let before = tracked(lab);
            spray(sandbox, target, 10_000..10_500);
            settle(sandbox);
            let more = tracked(lab) - before;
            assert!((*most..=most + OTHERS).contains(&more), "{more} of {most}");
        }
        let sound = |plan: &Plan| {
            let pools = [plan.spec.name.clone(), second.spec.name.clone()];
            assert_eq!(network.inspect_host(&pools), []);
        };
        sound(&first(20));
        network.change_pool(&first(40), None).unwrap();
        sound(&first(40));
        let before = tracked(lab);
        spray(&sandboxes[0].0, BEYOND_IPV4.into(), 11_000..11_500);
        settle(&sandboxes[0].0);
        let more = tracked(lab) - before;
        assert!((40..=40 + OTHERS).contains(&more), "{more}");
        // What somebody takes away comes back.
        lab.run("nft flush chain inet sandwire-test connections_40");
        let defects = network.inspect_host(&[first(40).spec.name, second.spec.name.clone()]);
        assert_eq!(defects.len(), 1, "{defects:?}");
        assert_eq!(defects[0].action, "repaired", "{defects:?}");
        sound(&first(40));
        // The kernel lets go of who has no connections any more.
        lab.run("conntrack -F");
        let deadline = Instant::now() + Duration::from_secs(20);
        while lab
            .run("nft list set inet sandwire-test open4")
            .contains("10.1.0.")
        {
            assert!(Instant::now() < deadline, "the address stays");
            thread::sleep(Duration::from_millis(100));
        }
    });
}

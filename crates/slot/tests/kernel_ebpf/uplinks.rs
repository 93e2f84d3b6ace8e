//! Several uplinks: which of them a packet takes, and from what address.

use std::{io::Write, net::SocketAddr};

use sandwire_slot::{
    kernel::{KernelNetwork, Settings},
    network::Network,
};
use sandwire_testlab::{
    command,
    host::{Beyond, WHO_AM_I_PORT, serve_tcp},
    lab, namespace,
};

use crate::fixture::{
    EBPF_KINDS, INSTANCE, ebpf_pool, sandbox::Sandbox, talk::PATIENCE, tear_down,
};

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn each_sandbox_leaves_by_the_uplink_that_rules_say_with_the_right_source() {
    lab::run(|lab| {
        let beyond = Beyond::attach().unwrap();
        beyond.run("ip address add 192.0.2.1/32 dev eth0").unwrap();
        let _other = attach_second_uplink(&["10.2.0.0/24", "10.4.0.0/24"]);
        lab.run("ip rule add from 10.2.0.0/24 lookup 100");
        lab.run("ip rule add from 10.3.0.0/24 lookup 100");
        lab.run("ip rule add fwmark 7 lookup 100");
        beyond.route_through_host("10.1.0.0/24").unwrap();
        for kind in EBPF_KINDS {
            let pool = |name, policy, third: u8| {
                let (ipv4, ipv6) = (format!("10.{third}.0.0/24"), format!("fd00:{third}::/64"));
                ebpf_pool(name, kind, policy, &ipv4, &ipv6)
            };
            let route = r#"{"uplink":"route"}"#;
            let pools = [
                (pool("first", route, 1), "", "10.1.0.2"),
                (pool("second", route, 2), "up1 ", "10.2.0.2"),
                (pool("behind", "{}", 3), "up1 ", "198.51.100.1"),
                (
                    pool("marked", r#"{"uplink":"route","route_mark":7}"#, 4),
                    "up1 ",
                    "10.4.0.2",
                ),
            ];
            let mut settings = Settings::new(INSTANCE);
            settings.uplinks = Some(vec!["up0".to_owned(), "up1".to_owned()]);
            let network = KernelNetwork::open_with(settings).unwrap();
            for (plan, ..) in &pools {
                network.add_pool(plan).unwrap();
            }
            for (plan, _, source) in &pools {
                let sandbox = Sandbox::start(&network, plan, 0);
                let server = SocketAddr::new([192, 0, 2, 1].into(), WHO_AM_I_PORT);
                let answer = sandbox.guest.exchange_tcp(server, b"", PATIENCE).unwrap();
                let answer = String::from_utf8(answer).unwrap();
                let by_second = answer.starts_with("up1 ");
                let name = plan.spec.name.as_str();
                assert_eq!(by_second, name != "first", "{name} {kind}: {answer}");
                assert!(answer.contains(source), "{name} {kind}: {answer}");
                drop(sandbox.guest);
                tear_down(&network, &[sandbox.slot]);
            }
            // An uplink that goes away, and comes back as another interface.
            let specs: Vec<_> = pools.iter().map(|(plan, ..)| plan.spec.clone()).collect();
            lab.run("ip link delete up1");
            drop(network.inspect_host(&specs));
            assert_eq!(network.inspect_host(&specs), []);
            command::shell(
                "ip link add up1 type veth peer name eth0 netns other
                 ip address add 198.51.100.1/24 dev up1
                 ip link set up1 up
                 ip route add default via 198.51.100.2 dev up1 table 100
                 ip netns exec other ip address add 198.51.100.2/24 dev eth0
                 ip netns exec other ip address add 192.0.2.1/32 dev eth0
                 ip netns exec other ip link set eth0 up
                 ip netns exec other ip route add 10.2.0.0/24 via 198.51.100.1
                 ip netns exec other ip route add 10.4.0.0/24 via 198.51.100.1",
            )
            .unwrap();
            drop(network.inspect_host(&specs));
            let back = Sandbox::start(&network, &pools[1].0, 1);
            let server = SocketAddr::new([192, 0, 2, 1].into(), WHO_AM_I_PORT);
            let answer = back.guest.exchange_tcp(server, b"", PATIENCE).unwrap();
            assert!(answer.starts_with(b"up1 10.2.0.3"), "{answer:?}");
            drop(back.guest);
            tear_down(&network, &[back.slot]);
            for (plan, ..) in &pools {
                network.remove_pool(plan).unwrap();
            }
        }
    });
}

/// A second uplink, `up1`, with another world behind it that knows the way back to some prefixes.
fn attach_second_uplink(prefixes: &[&str]) -> namespace::Namespace {
    let other = namespace::Namespace::create("other").unwrap();
    command::shell(
        "ip link add up1 index 1100 type veth peer name eth0 netns other
         ip address add 198.51.100.1/24 dev up1
         ip link set up1 up
         ip route add default via 198.51.100.2 dev up1 table 100",
    )
    .unwrap();
    other
        .run("ip address add 198.51.100.2/24 dev eth0")
        .unwrap();
    // The same server is to be had by both uplinks.
    other.run("ip address add 192.0.2.1/32 dev eth0").unwrap();
    other.run("ip link set eth0 up").unwrap();
    for prefix in prefixes {
        other
            .run(&format!("ip route add {prefix} via 198.51.100.1"))
            .unwrap();
    }
    let serve = || {
        serve_tcp(WHO_AM_I_PORT, |mut stream| {
            let caller = stream.peer_addr()?.ip().to_canonical();
            stream.write_all(format!("up1 {caller}").as_bytes())
        })
    };
    other.inside(serve).unwrap();
    other
}

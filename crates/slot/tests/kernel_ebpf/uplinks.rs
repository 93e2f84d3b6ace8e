//! Several uplinks: which of them a packet takes, and from what address.

use std::{
    io::{self, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
};

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

/// A server that is to be had by both uplinks, in both families.
const SERVERS: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 3, 0, 0, 0, 0, 1)),
];

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn each_sandbox_leaves_by_the_uplink_that_rules_say_with_the_right_source() {
    lab::run(|lab| {
        let beyond = Beyond::attach().unwrap();
        for server in SERVERS {
            beyond.run(&add_server(server)).unwrap();
        }
        let other = namespace::Namespace::create("other").unwrap();
        attach_second_uplink(&other);
        other
            .inside(|| serve_tcp(WHO_AM_I_PORT, say_caller))
            .unwrap();
        for family in [0, 1] {
            let option = ["-4", "-6"][family];
            let (second, behind) = (&prefixes(2)[family], &prefixes(3)[family]);
            let rules = [
                format!("from {second}"),
                format!("from {behind}"),
                "fwmark 7".to_owned(),
            ];
            for rule in rules {
                lab.run(&format!("ip {option} rule add {rule} lookup 100"));
            }
            beyond.route_through_host(&prefixes(1)[family]).unwrap();
        }
        for kind in EBPF_KINDS {
            let pool = |name, policy, third| {
                let [ipv4, ipv6] = prefixes(third);
                ebpf_pool(name, kind, policy, &ipv4, &ipv6)
            };
            let route = r#"{"uplink":"route"}"#;
            let marked = r#"{"uplink":"route","route_mark":7}"#;
            let pools = [
                (pool("first", route, 1), false, ["10.1.0.2", "fd00:1::2"]),
                (pool("second", route, 2), true, ["10.2.0.2", "fd00:2::2"]),
                (
                    pool("behind", "{}", 3),
                    true,
                    ["198.51.100.1", "2001:db8:2::1"],
                ),
                (pool("marked", marked, 4), true, ["10.4.0.2", "fd00:4::2"]),
            ];
            let mut settings = Settings::new(INSTANCE);
            settings.uplinks = Some(vec!["up0".to_owned(), "up1".to_owned()]);
            let network = KernelNetwork::open_with(settings).unwrap();
            for (plan, ..) in &pools {
                network.add_pool(plan).unwrap();
            }
            for (plan, second, sources) in &pools {
                let sandbox = Sandbox::start(&network, plan, 0);
                assert_leaves_by(&sandbox, *second, *sources);
                drop(sandbox.guest);
                tear_down(&network, &[sandbox.slot]);
            }
            // An uplink that goes away, and comes back as another interface.
            let names: Vec<_> = pools
                .iter()
                .map(|(plan, ..)| plan.spec.name.clone())
                .collect();
            lab.run("ip link delete up1");
            drop(network.inspect_host(&names));
            assert_eq!(network.inspect_host(&names), []);
            attach_second_uplink(&other);
            drop(network.inspect_host(&names));
            let back = Sandbox::start(&network, &pools[1].0, 1);
            assert_leaves_by(&back, true, ["10.2.0.3", "fd00:2::3"]);
            drop(back.guest);
            tear_down(&network, &[back.slot]);
            for (plan, ..) in &pools {
                network.remove_pool(plan).unwrap();
            }
        }
    });
}

/// In both families the server beyond that uplink is reached, and sees a caller of this address.
#[track_caller]
fn assert_leaves_by(sandbox: &Sandbox, second: bool, sources: [&str; 2]) {
    for (server, source) in SERVERS.into_iter().zip(sources) {
        let server = SocketAddr::new(server, WHO_AM_I_PORT);
        let answer = sandbox.guest.exchange_tcp(server, b"", PATIENCE).unwrap();
        let answer = String::from_utf8(answer).unwrap();
        let slot = &sandbox.slot.netns_name;
        let (by_second, caller) = match answer.strip_prefix("up1 ") {
            Some(caller) => (true, caller),
            None => (false, answer.as_str()),
        };
        let caller: SocketAddr = caller.parse().unwrap();
        let seen = (by_second, caller.ip().to_string());
        assert_eq!(seen, (second, source.to_string()), "{slot}: {answer}");
    }
}

/// Clone addresses of a pool.
fn prefixes(third: u8) -> [String; 2] {
    [format!("10.{third}.0.0/24"), format!("fd00:{third}::/64")]
}

/// A line that gives a server's interface its address.
fn add_server(server: IpAddr) -> String {
    match server {
        IpAddr::V4(server) => format!("ip address add {server}/32 dev eth0"),
        IpAddr::V6(server) => format!("ip address add {server}/128 dev eth0 nodad"),
    }
}

/// A second uplink, `up1`, to another world that knows the way back to some of the pools.
fn attach_second_uplink(other: &namespace::Namespace) {
    command::shell(
        "ip link add up1 index 1100 type veth peer name eth0 netns other
         ip address add 198.51.100.1/24 dev up1
         ip address add 2001:db8:2::1/64 dev up1 nodad
         ip link set up1 up
         ip -4 route add default via 198.51.100.2 dev up1 table 100
         ip -6 route add default via 2001:db8:2::2 dev up1 table 100",
    )
    .unwrap();
    let mut lines = vec![
        "ip address add 198.51.100.2/24 dev eth0".to_owned(),
        "ip address add 2001:db8:2::2/64 dev eth0 nodad".to_owned(),
        "ip link set eth0 up".to_owned(),
    ];
    // The same server is to be had by both uplinks.
    lines.extend(SERVERS.map(add_server));
    for third in [2, 4] {
        let [ipv4, ipv6] = prefixes(third);
        lines.push(format!("ip route add {ipv4} via 198.51.100.1"));
        lines.push(format!("ip route add {ipv6} via 2001:db8:2::1"));
    }
    for line in lines {
        other.run(&line).unwrap();
    }
}

/// Answers as the world beyond the first uplink does, and says that it is the other one.
fn say_caller(mut stream: TcpStream) -> io::Result<()> {
    let caller = stream.peer_addr()?;
    let caller = SocketAddr::new(caller.ip().to_canonical(), caller.port());
    stream.write_all(format!("up1 {caller}").as_bytes())
}

//! What runtimes ask for by capabilities, tried from outside of the host.

use std::{
    net::{IpAddr, SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

use sandwire_testlab::{
    host::{BEYOND_IPV4, Beyond, ECHO_PORT, HOST_IPV4, HOST_IPV6, serve_udp},
    lab,
    namespace::Namespace,
    traffic::{self, BLOCK, Receiver},
};
use serde_json::{Value, json};

use super::World;

const PATIENCE: Duration = Duration::from_secs(60);
const STREAM_PORT: u16 = 5001;

/// A daemon on a host with an uplink, and a container that is to be.
fn build(lab: &lab::Lab) -> (Beyond, World, Namespace) {
    let beyond = Beyond::attach().unwrap();
    (beyond, World::start(lab), lab.namespace("c1"))
}

fn runtime_config(capability: &str, value: Value) -> Value {
    json!({ "runtimeConfig": { capability: value } })
}

fn is_echoed(beyond: &Beyond, address: impl Into<IpAddr>, port: u16) -> bool {
    let target = SocketAddr::new(address.into(), port);
    let exchanged = beyond.inside(|| Ok(traffic::exchange_datagram(target, 1000).is_ok()));
    exchanged.unwrap()
}

fn is_accepted(beyond: &Beyond, address: impl Into<IpAddr>, port: u16) -> bool {
    let target = SocketAddr::new(address.into(), port);
    let connected = beyond.inside(|| {
        let patience = Duration::from_secs(2);
        Ok(TcpStream::connect_timeout(&target, patience).is_ok())
    });
    connected.unwrap()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn ports_of_each_protocol_and_family_lead_to_the_container_while_it_lives() {
    lab::run(|lab| {
        let (beyond, world, container) = build(lab);
        let mappings = json!([
            { "hostPort": 8080, "containerPort": ECHO_PORT, "protocol": "udp" },
            { "hostPort": 8080, "containerPort": STREAM_PORT, "protocol": "tcp" },
            { "hostPort": 8081, "containerPort": ECHO_PORT, "protocol": "udp", "hostIP": HOST_IPV6 },
        ]);
        let mut config = runtime_config("portMappings", mappings);
        config["prevResult"] = world.run("ADD", "c1", &config).unwrap();
        let _receiver = container
            .inside(|| {
                serve_udp(ECHO_PORT, |packet, _| packet.to_vec())?;
                Receiver::listen(STREAM_PORT)
            })
            .unwrap();
        assert!(is_echoed(&beyond, HOST_IPV4, 8080));
        assert!(is_echoed(&beyond, HOST_IPV6, 8080));
        assert!(is_accepted(&beyond, HOST_IPV4, 8080));
        assert!(is_accepted(&beyond, HOST_IPV6, 8080));
        assert!(is_echoed(&beyond, HOST_IPV6, 8081));
        assert!(!is_echoed(&beyond, HOST_IPV4, 8081), "of one address alone");
        assert_eq!(world.run("CHECK", "c1", &config), Ok(Value::Null));
        assert_eq!(world.run("DEL", "c1", &config), Ok(Value::Null));
        assert!(!is_echoed(&beyond, HOST_IPV4, 8080));
        assert!(!is_accepted(&beyond, HOST_IPV6, 8080));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn ranges_of_other_addresses_than_the_pool_has_are_refused_before_a_slot_is_taken() {
    lab::run(|lab| {
        let (_beyond, world, _container) = build(lab);
        let before = lab.snapshot();
        let ipv4 = |subnet: &str| json!([{ "subnet": subnet }]);
        for ranges in [
            json!([ipv4("10.99.0.0/24")]),
            json!([ipv4("10.64.0.0/24"), [{ "subnet": "fd00:99::/112" }]]),
            json!([[{ "subnet": "10.64.0.0/24", "rangeStart": "10.64.0.100" }]]),
        ] {
            let refused = world.run("ADD", "c1", &runtime_config("ipRanges", ranges.clone()));
            let told = refused.unwrap_err();
            assert_eq!(told["code"], 7, "{ranges}: {told}");
            assert_eq!(world.leases(), 0, "{ranges}");
        }
        before.wait_unchanged(PATIENCE).unwrap();
        let ranges = json!([ipv4("10.64.0.0/16"), [{ "subnet": "fd00:c10e::/112" }]]);
        let result = world.run("ADD", "c1", &runtime_config("ipRanges", ranges));
        let ips = result.unwrap()["ips"].as_array().unwrap().len();
        assert_eq!(ips, 2);
    });
}

/// Each way for itself: to a container, and out of it.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_stream_takes_as_long_as_the_bandwidth_has_it_take() {
    /// Bits per second.
    const RATE: u64 = 20_000_000;
    const BLOCKS: u64 = 40;
    lab::run(|lab| {
        let (beyond, world, container) = build(lab);
        let bandwidth = json!({
            "ingressRate": RATE, "ingressBurst": 800_000, "egressRate": RATE, "egressBurst": 800_000,
        });
        let mut config = runtime_config("bandwidth", bandwidth);
        let port =
            json!([{ "hostPort": STREAM_PORT, "containerPort": STREAM_PORT, "protocol": "tcp" }]);
        config["runtimeConfig"]["portMappings"] = port;
        world.run("ADD", "c1", &config).unwrap();
        let into = container.inside(|| Receiver::listen(STREAM_PORT)).unwrap();
        let out = beyond.inside(|| Receiver::listen(STREAM_PORT)).unwrap();
        // What isn't the burst goes at the rate; headers come on top of what is counted here.
        let bits = BLOCKS * BLOCK as u64 * 8 - 800_000;
        let least = Duration::from_millis(bits * 1000 / RATE);
        let takes = |receiver: Receiver, send: &(dyn Fn() -> traffic::Stream + Sync)| {
            let start = Instant::now();
            let receiving = thread::spawn(move || receiver.receive().unwrap());
            let sent = send();
            assert_eq!(receiving.join().unwrap(), sent);
            start.elapsed()
        };
        let took = takes(out, &|| {
            let target = SocketAddr::new(BEYOND_IPV4.into(), STREAM_PORT);
            container.inside(|| traffic::send(target, BLOCKS)).unwrap()
        });
        assert!(took >= least, "out: {took:?} instead of {least:?}");
        let took = takes(into, &|| {
            let target = SocketAddr::new(HOST_IPV4.into(), STREAM_PORT);
            beyond.inside(|| traffic::send(target, BLOCKS)).unwrap()
        });
        assert!(took >= least, "in: {took:?} instead of {least:?}");
    });
}

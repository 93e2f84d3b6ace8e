//! Published ports of slots with the nft data path: who is led to the guest, and who isn't.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    time::Duration,
};

use sandwire_api::published_port::{Protocol, PublishPort};
use sandwire_slot::network::Network;
use sandwire_testlab::{
    host::{Beyond, HOST_IPV4, HOST_IPV6},
    lab,
};

use crate::fixture::{
    pool, prepare,
    sandbox::Sandbox,
    talk::{IN_VAIN, PATIENCE, http_get, http_get_once, udp_echo},
    tear_down,
};

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn published_ports_lead_to_the_guest_until_they_are_withdrawn() {
    lab::run(|_| {
        let beyond = Beyond::attach().unwrap();
        let plan = pool("web", "{}");
        let network = prepare(&plan);
        let sandbox = Sandbox::start(&network, &plan, 0);
        let publish = |protocol, host_port, clone_port, host_address| PublishPort {
            protocol,
            host_address,
            host_port,
            clone_port,
            nic: 0,
        };
        let clone_addresses = sandbox.clone_addresses().to_vec();
        let ports = [
            (
                publish(Protocol::Tcp, 8080, 80, None),
                clone_addresses.clone(),
            ),
            (
                publish(Protocol::Udp, 8007, 7, None),
                clone_addresses.clone(),
            ),
            (
                publish(Protocol::Tcp, 8081, 80, Some(HOST_IPV4.into())),
                clone_addresses.clone(),
            ),
            (
                publish(Protocol::Tcp, 8082, 80, Some(HOST_IPV6.into())),
                clone_addresses,
            ),
        ];
        let both = [IpAddr::from(HOST_IPV4), HOST_IPV6.into()];
        let check = |is_open: bool| {
            let http = if is_open { http_get } else { http_get_once };
            for host in both {
                let tcp = http(SocketAddr::new(host, 8080));
                assert_eq!(tcp.is_ok(), is_open, "{host} from the host: {tcp:?}");
                let udp = udp_echo(
                    SocketAddr::new(host, 8007),
                    if is_open { PATIENCE } else { IN_VAIN },
                );
                assert_eq!(udp.is_ok(), is_open, "{host} from the host: {udp:?}");
                beyond
                    .inside(|| {
                        let tcp = http(SocketAddr::new(host, 8080));
                        assert_eq!(tcp.is_ok(), is_open, "{host} from beyond: {tcp:?}");
                        let patience = if is_open { PATIENCE } else { IN_VAIN };
                        let udp = udp_echo(SocketAddr::new(host, 8007), patience);
                        assert_eq!(udp.is_ok(), is_open, "{host} from beyond: {udp:?}");
                        for (port, only) in [(8081, both[0]), (8082, both[1])] {
                            let one = http_get_once(SocketAddr::new(host, port));
                            assert_eq!(one.is_ok(), is_open && host == only, "{host}:{port}");
                        }
                        Ok(())
                    })
                    .unwrap();
            }
        };
        check(false);
        network.set_published_ports(&ports).unwrap();
        check(true);
        // Twice the same, and the loopback is nobody's.
        network.set_published_ports(&ports).unwrap();
        http_get_once("127.0.0.1:8080".parse().unwrap()).unwrap_err();
        check(true);
        network.set_published_ports(&[]).unwrap();
        check(false);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn published_ports_leave_spared_addresses_alone() {
    lab::run(|lab| {
        let beyond = Beyond::attach().unwrap();
        let plan = pool("web", "{}");
        let network = prepare(&plan);
        let sandbox = Sandbox::start(&network, &plan, 0);
        let others = ["10.77.0.5", "fd77::5"].map(|other| other.parse::<IpAddr>().unwrap());
        for other in others {
            lab.run(&format!("ip address add {other} dev lo"));
            beyond.route_through_host(&other.to_string()).unwrap();
        }
        let port = PublishPort {
            protocol: Protocol::Tcp,
            host_address: None,
            host_port: 8080,
            clone_port: 80,
            nic: 0,
        };
        let ports = [(port, sandbox.clone_addresses().to_vec())];
        network.set_published_ports(&ports).unwrap();
        let assert_led = |addresses: [IpAddr; 2], expected: bool| {
            for address in addresses {
                let target = SocketAddr::new(address, 8080);
                let own = http_get_once(target);
                assert_eq!(own.is_ok(), expected, "{address} from the host: {own:?}");
                let remote = beyond.inside(|| Ok(http_get_once(target).is_ok())).unwrap();
                assert_eq!(remote, expected, "{address} from beyond");
            }
        };
        let both = [IpAddr::from(HOST_IPV4), HOST_IPV6.into()];
        for is_spared in [false, true] {
            let spared: BTreeSet<_> = others.into_iter().filter(|_| is_spared).collect();
            network.spare_addresses(&spared).unwrap();
            assert_led(both, true);
            assert_led(others, !is_spared);
        }
        // A table that is made anew knows them.
        lab.run("nft delete table inet sandwire-test");
        network.inspect_host(std::slice::from_ref(&plan.spec.name));
        assert_led(both, true);
        assert_led(others, false);
    });
}

/// A socket beyond that calls from one port all the time.
fn caller(beyond: &Beyond, host: IpAddr) -> UdpSocket {
    let any: IpAddr = if host.is_ipv4() {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        Ipv6Addr::UNSPECIFIED.into()
    };
    let bound = beyond.inside(|| Ok(UdpSocket::bind((any, 0))?)).unwrap();
    let interval = Duration::from_millis(100);
    bound.set_read_timeout(Some(interval)).unwrap();
    bound
}

/// Whether it hears anything within a second in which it calls ten times.
fn is_answered(caller: &UdpSocket, target: SocketAddr) -> bool {
    // What is late from before.
    while caller.recv_from(&mut [0; 64]).is_ok() {}
    (0..10).any(|_| {
        caller.send_to(b"ping", target).unwrap();
        caller.recv_from(&mut [0; 64]).is_ok()
    })
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn who_goes_on_calling_a_udp_port_is_led_to_the_guest_once_it_is_published() {
    lab::run(|_| {
        let beyond = Beyond::attach().unwrap();
        let plan = pool("web", "{}");
        let network = prepare(&plan);
        let callers = [IpAddr::from(HOST_IPV4), HOST_IPV6.into()]
            .map(|host| (caller(&beyond, host), SocketAddr::new(host, 5140)));
        let assert_answered = |expected: bool| {
            for (caller, target) in &callers {
                assert_eq!(is_answered(caller, *target), expected, "{target}");
            }
        };
        for number in 0..2 {
            assert_answered(false);
            let sandbox = Sandbox::start(&network, &plan, number);
            let port = PublishPort {
                protocol: Protocol::Udp,
                host_address: None,
                host_port: 5140,
                clone_port: 7,
                nic: 0,
            };
            let clone_addresses = sandbox.clone_addresses().to_vec();
            network
                .set_published_ports(&[(port, clone_addresses)])
                .unwrap();
            assert_answered(true);
            network.set_published_ports(&[]).unwrap();
            drop(sandbox.guest);
            tear_down(&network, &[sandbox.slot]);
        }
    });
}

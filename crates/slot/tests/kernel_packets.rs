//! What a sandbox can reach, and who can reach it. Guests are fake, the rest is the kernel: routing,
//! rules, sockets, and a world beyond the uplink that knows no route to clone addresses.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod fixture;

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    time::Duration,
};

use fixture::{
    pool, pool_of, prepare,
    sandbox::{GATEWAY_MAC, Sandbox},
    talk::{IN_VAIN, PATIENCE, http_get, http_get_once, serve_on_host, udp_echo},
    tear_down,
};
use sandwire_api::published_port::{Protocol, PublishPort};
use sandwire_slot::{
    network::Network,
    plan::{Plan, SlotNumber},
};
use sandwire_testlab::{
    fake_guest::{FakeGuest, GuestNetwork, frame},
    host::{
        BEYOND_IPV4, BEYOND_IPV6, Beyond, ECHO_PORT, HOST_IPV4, HOST_IPV6, HTTP_PORT, WHO_AM_I_PORT,
    },
    lab::{self, Lab},
    namespace,
};

/// Packets that a rule of the slot's table has counted.
fn counted(sandbox: &Sandbox, comment: &str) -> u64 {
    let line = "nft list table inet sandwire";
    let table = namespace::run_in(sandbox.slot.netns_path().as_ref(), line).unwrap();
    counter(&table, comment)
}

/// Packets that the rules with this comment have counted.
fn counter(table: &str, comment: &str) -> u64 {
    table
        .lines()
        .filter(|line| line.contains(&format!("comment \"{comment}\"")))
        .map(|line| {
            let (_, rest) = line.split_once("packets ").expect("the rule counts");
            rest.split_whitespace()
                .next()
                .unwrap()
                .parse::<u64>()
                .unwrap()
        })
        .sum()
}

fn host_counter(lab: &Lab, comment: &str) -> u64 {
    counter(&lab.run("nft list table inet sandwire-test"), comment)
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn the_host_reaches_each_of_two_identical_guests() {
    lab::run(|lab| {
        let plan = pool("web", "{}");
        let network = prepare(&plan);
        let sandboxes = [0, 1].map(|number| Sandbox::start(&network, &plan, number));
        for (number, sandbox) in sandboxes.iter().enumerate() {
            for address in sandbox.clone_addresses() {
                // One packet, answered: nothing was lost to ARP or neighbour discovery.
                lab.run(&format!("ping -c 1 -W 2 {address}"));
                let answer = http_get(SocketAddr::new(address, 80)).unwrap();
                assert!(answer.starts_with("HTTP/1"), "{answer}");
                let echo = udp_echo(SocketAddr::new(address, 7), PATIENCE).unwrap();
                assert_eq!(echo, b"ping");
            }
            let status = &network.inspect(&sandbox.slot).taps[0];
            assert!(status.egress.packets > 4, "guest {number}: {status:?}");
            assert!(status.ingress.packets > 4, "guest {number}: {status:?}");
        }
        // The guest's own address means nothing on the host.
        let guest = sandboxes[0].guest.network().ipv4.0;
        assert!(
            namespace::run_in(
                "/proc/self/ns/net".as_ref(),
                &format!("ping -c 1 -W 1 {guest}")
            )
            .is_err()
        );
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_guest_reaches_the_world_behind_the_host_s_address() {
    lab::run(|_| {
        let beyond = Beyond::attach().unwrap();
        let plan = pool("web", "{}");
        let network = prepare(&plan);
        let sandbox = Sandbox::start(&network, &plan, 0);
        let guest = &sandbox.guest;
        for (server, host) in [
            (IpAddr::from(BEYOND_IPV4), IpAddr::from(HOST_IPV4)),
            (BEYOND_IPV6.into(), HOST_IPV6.into()),
        ] {
            guest.ping(server, PATIENCE).unwrap();
            let page = guest
                .fetch(SocketAddr::new(server, HTTP_PORT), PATIENCE)
                .unwrap();
            assert!(page.contains(&host.to_string()), "{page}");
            let who = SocketAddr::new(server, WHO_AM_I_PORT);
            let caller = guest.exchange_udp(who, b"?", PATIENCE).unwrap();
            let caller = String::from_utf8(caller).unwrap();
            assert!(caller.contains(&host.to_string()), "{caller}");
        }
        // The way in needs a route; then the clone is reached under its own address.
        beyond.route_through_host(fixture::IPV4).unwrap();
        beyond.route_through_host(fixture::IPV6).unwrap();
        for address in sandbox.clone_addresses() {
            beyond.run(&format!("ping -c 1 -W 2 {address}")).unwrap();
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn uplink_policies_route_and_deny() {
    lab::run(|lab| {
        let beyond = Beyond::attach().unwrap();
        let routed = pool_of(
            "routed",
            r#"{"uplink":"route"}"#,
            "{}",
            "10.1.0.0/24",
            "fd00:1::/64",
        );
        let denied = pool_of(
            "denied",
            r#"{"uplink":"deny"}"#,
            "{}",
            "10.2.0.0/24",
            "fd00:2::/64",
        );
        let network = prepare(&routed);
        network.add_pool(&denied).unwrap();
        for prefix in ["10.1.0.0/24", "fd00:1::/64", "10.2.0.0/24", "fd00:2::/64"] {
            beyond.route_through_host(prefix).unwrap();
        }
        let router = Sandbox::start(&network, &routed, 0);
        let prisoner = Sandbox::start(&network, &denied, 0);
        let servers = [IpAddr::from(BEYOND_IPV4), BEYOND_IPV6.into()];
        for (server, own) in servers.into_iter().zip(router.clone_addresses()) {
            let page = router
                .guest
                .fetch(SocketAddr::new(server, HTTP_PORT), PATIENCE)
                .unwrap();
            assert!(page.contains(&own.to_string()), "{page}");
        }
        for (server, own) in servers.into_iter().zip(prisoner.clone_addresses()) {
            let before = host_counter(lab, "uplink denied");
            prisoner.guest.ping(server, IN_VAIN).unwrap_err();
            assert!(host_counter(lab, "uplink denied") > before);
            // Answers to what came from outside still pass.
            beyond.run(&format!("ping -c 1 -W 2 {own}")).unwrap();
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_packet_with_a_foreign_source_ends_in_the_slot() {
    lab::run(|_| {
        let beyond = Beyond::attach().unwrap();
        let plan = pool("web", r#"{"host_services":["all"]}"#);
        let network = prepare(&plan);
        let sandbox = Sandbox::start(&network, &plan, 0);
        let known = sandbox.guest.network();
        let other_clone = plan
            .slot(SlotNumber(5))
            .clone_addresses()
            .collect::<Vec<_>>();
        beyond.route_through_host(fixture::IPV4).unwrap();
        let foreign = [
            (IpAddr::from([198, 51, 100, 7]), IpAddr::from(BEYOND_IPV4)),
            (other_clone[0], BEYOND_IPV4.into()),
            ("2001:db8:99::1".parse().unwrap(), BEYOND_IPV6.into()),
            (sandbox.clone_addresses()[1], BEYOND_IPV6.into()),
            (other_clone[1], BEYOND_IPV6.into()),
        ];
        for (number, (source, target)) in (1..).zip(foreign) {
            let source = SocketAddr::new(source, 1234);
            let target = SocketAddr::new(target, ECHO_PORT);
            let forged = frame::udp(known.mac, GATEWAY_MAC, source, target, b"forged");
            sandbox.guest.send_frame(&forged).unwrap();
            // A frame behind it, so that it has been handled.
            sandbox
                .guest
                .ping(known.ipv4_gateway.into(), PATIENCE)
                .unwrap();
            assert_eq!(counted(&sandbox, "foreign source"), number, "{source}");
        }
        // Its own clone address is one of the slot, which routing refuses before the rules.
        let own = SocketAddr::new(sandbox.clone_addresses()[0], 1234);
        let target = SocketAddr::new(BEYOND_IPV4.into(), ECHO_PORT);
        let forged = frame::udp(known.mac, GATEWAY_MAC, own, target, b"forged");
        sandbox.guest.send_frame(&forged).unwrap();
        sandbox
            .guest
            .ping(known.ipv4_gateway.into(), PATIENCE)
            .unwrap();
        let seen = beyond
            .run("nstat -az UdpInDatagrams Udp6InDatagrams")
            .unwrap();
        let counts: Vec<_> = seen
            .lines()
            .filter(|line| line.starts_with("Udp"))
            .collect();
        assert!(counts.len() == 2, "{seen}");
        let is_zero = |line: &&str| line.split_whitespace().nth(1) == Some("0");
        assert!(counts.iter().all(is_zero), "{seen}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn the_host_doubts_what_a_slot_itself_sends() {
    lab::run(|lab| {
        let plan = pool("web", r#"{"host_services":["all"]}"#);
        let network = prepare(&plan);
        serve_on_host();
        let sandbox = Sandbox::start(&network, &plan, 0);
        let host = plan.host_ipv4.unwrap();
        let inside = |line: &str| namespace::run_in(sandbox.slot.netns_path().as_ref(), line);
        inside(&format!("ping -c 1 -W 2 {host}")).unwrap();
        // Root in the slot's namespace takes the address of another clone, and then the host's.
        for stolen in [
            plan.slot(SlotNumber(5)).nics[0].ipv4.unwrap().clone_address,
            host,
        ] {
            let before = host_counter(lab, "foreign source");
            inside(&format!("ip address add {stolen}/32 dev uplink0")).unwrap();
            let target = if stolen == host {
                "203.0.113.9".parse().unwrap()
            } else {
                host
            };
            inside(&format!("ping -c 1 -W 1 -I {stolen} {target}")).unwrap_err();
            assert!(host_counter(lab, "foreign source") > before, "{stolen}");
            inside(&format!("ip address delete {stolen}/32 dev uplink0")).unwrap();
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn the_host_s_services_are_closed_but_for_those_allowed() {
    lab::run(|lab| {
        let closed = pool_of("closed", "{}", "{}", "10.1.0.0/24", "fd00:1::/64");
        let policy = r#"{"host_services":["tcp/6990-7000","icmp"]}"#;
        let open = pool_of("open", policy, "{}", "10.2.0.0/24", "fd00:2::/64");
        let network = prepare(&closed);
        network.add_pool(&open).unwrap();
        serve_on_host();
        let outcast = Sandbox::start(&network, &closed, 0);
        let friend = Sandbox::start(&network, &open, 0);
        let hosts = |plan: &Plan| {
            [
                IpAddr::from(plan.host_ipv4.unwrap()),
                plan.host_ipv6.unwrap().into(),
            ]
        };
        for host in hosts(&closed) {
            let before = host_counter(lab, "service of the host");
            let service = SocketAddr::new(host, 7000);
            outcast
                .guest
                .exchange_tcp(service, b"", IN_VAIN)
                .unwrap_err();
            outcast
                .guest
                .exchange_udp(service, b"?", IN_VAIN)
                .unwrap_err();
            outcast.guest.ping(host, IN_VAIN).unwrap_err();
            assert!(host_counter(lab, "service of the host") >= before + 3);
        }
        for host in hosts(&open) {
            let service = SocketAddr::new(host, 7000);
            assert_eq!(
                friend.guest.exchange_tcp(service, b"", PATIENCE).unwrap(),
                b"host"
            );
            friend.guest.ping(host, PATIENCE).unwrap();
            friend
                .guest
                .exchange_udp(service, b"?", IN_VAIN)
                .unwrap_err();
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn sandboxes_reach_each_other_only_where_the_pool_says_so() {
    lab::run(|lab| {
        let apart = pool_of("apart", "{}", "{}", "10.1.0.0/24", "fd00:1::/64");
        let policy = r#"{"clone_to_clone":true}"#;
        let together = pool_of("together", policy, "{}", "10.2.0.0/24", "fd00:2::/64");
        let network = prepare(&apart);
        network.add_pool(&together).unwrap();
        let strangers = [0, 1].map(|number| Sandbox::start(&network, &apart, number));
        let friends = [0, 1].map(|number| Sandbox::start(&network, &together, number));
        for (from, to) in [
            (&strangers[0], &strangers[1]),
            (&strangers[0], &friends[0]),
            (&friends[0], &strangers[0]),
        ] {
            for address in to.clone_addresses() {
                let before = host_counter(lab, "other sandbox");
                from.guest.ping(address, IN_VAIN).unwrap_err();
                assert!(host_counter(lab, "other sandbox") > before, "{address}");
            }
        }
        for address in friends[1].clone_addresses() {
            friends[0].guest.ping(address, PATIENCE).unwrap();
            let echo = SocketAddr::new(address, 7);
            assert_eq!(
                friends[0]
                    .guest
                    .exchange_tcp(echo, b"friend", PATIENCE)
                    .unwrap(),
                b"friend"
            );
        }
        // Neither kind of traffic made an entry in the host's table of connections.
        let tracked = lab.run("conntrack -L -f ipv4") + &lab.run("conntrack -L -f ipv6");
        for sandbox in strangers.iter().chain(&friends) {
            for address in sandbox.clone_addresses() {
                assert!(!tracked.contains(&format!("={address} ")), "{tracked}");
            }
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn cloud_metadata_is_closed_unless_the_pool_opens_it() {
    lab::run(|lab| {
        let beyond = Beyond::attach().unwrap();
        beyond
            .run("ip address add 169.254.169.254/32 dev eth0")
            .unwrap();
        beyond
            .run("ip address add fd00:ec2::254/128 dev eth0 nodad")
            .unwrap();
        // Other clouds', and what else the same one has.
        beyond
            .run("ip address add 169.254.170.2/32 dev eth0")
            .unwrap();
        beyond
            .run("ip address add fd20:ce::254/128 dev eth0 nodad")
            .unwrap();
        let closed = pool_of("closed", "{}", "{}", "10.1.0.0/24", "fd00:1::/64");
        let policy = r#"{"cloud_metadata":true}"#;
        let open = pool_of("open", policy, "{}", "10.2.0.0/24", "fd00:2::/64");
        let network = prepare(&closed);
        network.add_pool(&open).unwrap();
        let outcast = Sandbox::start(&network, &closed, 0);
        let friend = Sandbox::start(&network, &open, 0);
        let servers = [
            "169.254.169.254:80",
            "[fd00:ec2::254]:80",
            "169.254.170.2:80",
            "[fd20:ce::254]:80",
        ];
        for server in servers {
            let server: SocketAddr = server.parse().unwrap();
            let before = host_counter(lab, "cloud metadata");
            outcast.guest.fetch(server, IN_VAIN).unwrap_err();
            assert!(host_counter(lab, "cloud metadata") > before, "{server}");
            assert!(
                friend
                    .guest
                    .fetch(server, PATIENCE)
                    .unwrap()
                    .contains("hello")
            );
        }
        // The same where the host itself has the address.
        lab.run("ip address add 169.254.169.254/32 dev lo");
        serve_on_host();
        let before = host_counter(lab, "cloud metadata");
        let local: SocketAddr = "169.254.169.254:7000".parse().unwrap();
        outcast.guest.exchange_tcp(local, b"", IN_VAIN).unwrap_err();
        assert!(host_counter(lab, "cloud metadata") > before);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_flooding_guest_meets_its_cap_and_its_neighbour_does_not_notice() {
    lab::run(|lab| {
        let _beyond = Beyond::attach().unwrap();
        let plan = pool("web", r#"{"connections_max":50}"#);
        let network = prepare(&plan);
        let flooder = Sandbox::start(&network, &plan, 0);
        let neighbour = Sandbox::start(&network, &plan, 1);
        let known = flooder.guest.network();
        for port in 1..=1000 {
            let source = SocketAddr::new(known.ipv4.0.into(), 10_000 + port);
            let target = SocketAddr::new(BEYOND_IPV4.into(), 20_000 + port);
            let udp = frame::udp(known.mac, GATEWAY_MAC, source, target, b"flood");
            flooder.guest.send_frame(&udp).unwrap();
        }
        flooder
            .guest
            .ping(known.ipv4_gateway.into(), IN_VAIN)
            .unwrap_err();
        assert!(counted(&flooder, "too many connections") >= 900);
        let tracked = lab.run("conntrack -L -s 10.64.0.2");
        let entries = tracked
            .lines()
            .filter(|line| line.contains("src=10.64.0.2"))
            .count();
        assert!((1..=50).contains(&entries), "{entries} entries on the host");
        let connections = network.inspect(&flooder.slot).connections.unwrap();
        assert!(connections <= 52, "{connections} entries in the slot");
        for server in [IpAddr::from(BEYOND_IPV4), BEYOND_IPV6.into()] {
            neighbour
                .guest
                .fetch(SocketAddr::new(server, HTTP_PORT), PATIENCE)
                .unwrap();
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn whatever_addresses_a_guest_makes_up_the_kernel_remembers_few_of_them() {
    type Way<'a> = (&'a str, &'a dyn Fn(u8) -> Vec<u8>);
    const COUNT: u8 = 100;
    lab::run(|_| {
        let plan = fixture::plan(
            r#"{"name":"web","guest":{"ipv4":"172.20.0.2/16"},
                "addresses":{"plan":"prefix","ipv4":"10.64.0.0/24","ipv6":"fd00:c10e::/64"}}"#,
        );
        let network = prepare(&plan);
        let slot = plan.slot(SlotNumber(0));
        network.build(&slot).unwrap();
        let known = GuestNetwork {
            ipv4: ("172.20.0.2".parse().unwrap(), 16),
            ipv4_gateway: "172.20.0.1".parse().unwrap(),
            ..GuestNetwork::default()
        };
        let guest =
            FakeGuest::attach_as(slot.netns_path().as_ref(), &slot.nics[0].tap, known).unwrap();
        let gateways = [IpAddr::from(known.ipv4_gateway), known.ipv6_gateway.into()];
        let wait = || gateways.map(|gateway| guest.ping(gateway, PATIENCE).unwrap());
        wait();
        let mac = known.mac;
        let udp = |source: IpAddr, target: IpAddr| {
            let (source, target) = (SocketAddr::new(source, 1), SocketAddr::new(target, 2));
            frame::udp(mac, GATEWAY_MAC, source, target, b"")
        };
        // Whoever tells of it looks for the sender, before any rule has seen the packet.
        let last_hop = |source| {
            let mut udp = udp(source, BEYOND_IPV6.into());
            udp[14 + 7] = 1;
            udp
        };
        let ipv4 = |kind, number| Ipv4Addr::new(172, 20, kind, number);
        let ipv6 =
            |kind, number| Ipv6Addr::new(0xfd00, 0x5eed, 0, 0, 0, 0, kind, u16::from(number));
        let local = |kind, number| Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, kind, u16::from(number));
        let ways: [Way<'_>; 8] = [
            ("ARP of others", &|number| {
                frame::arp_request(mac, ipv4(1, number), known.ipv4_gateway)
            }),
            ("packets to others", &|number| {
                udp(known.ipv4.0.into(), ipv4(2, number).into())
            }),
            ("solicitations of others", &|number| {
                frame::neighbour_solicitation(mac, ipv6(1, number), known.ipv6_gateway)
            }),
            ("solicitations of link-local others", &|number| {
                frame::neighbour_solicitation(mac, local(1, number), known.ipv6_gateway)
            }),
            ("IPv6 packets to others", &|number| {
                udp(known.ipv6.0.into(), ipv6(2, number).into())
            }),
            ("IPv6 packets to link-local others", &|number| {
                udp(known.ipv6.0.into(), local(2, number).into())
            }),
            ("errors to others", &|number| {
                last_hop(ipv6(3, number).into())
            }),
            ("errors to link-local others", &|number| {
                last_hop(local(3, number).into())
            }),
        ];
        for (what, frame) in ways {
            for number in 1..=COUNT {
                guest.send_frame(&frame(number)).unwrap();
            }
            wait();
            let listed =
                namespace::run_in(slot.netns_path().as_ref(), "ip neigh show nud all").unwrap();
            let remembered: Vec<_> = listed
                .lines()
                .filter(|line| !line.contains("PERMANENT") && !line.contains("NOARP"))
                .collect();
            assert!(remembered.len() <= 40, "{what}: {remembered:#?}");
        }
    });
}

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
        network.inspect_host(std::slice::from_ref(&plan.spec));
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

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn errors_about_a_connection_reach_the_guest_under_its_own_address() {
    lab::run(|_| {
        let _beyond = Beyond::attach().unwrap();
        let plan = pool("web", "{}");
        let network = prepare(&plan);
        let sandbox = Sandbox::start(&network, &plan, 0);
        let known = sandbox.guest.network();
        let closed = SocketAddr::new(BEYOND_IPV4.into(), 4444);
        let source = SocketAddr::new(known.ipv4.0.into(), 5555);
        sandbox.guest.received_frames().unwrap();
        let udp = frame::udp(known.mac, GATEWAY_MAC, source, closed, b"anybody?");
        sandbox.guest.send_frame(&udp).unwrap();
        sandbox.guest.ping(BEYOND_IPV4.into(), PATIENCE).unwrap();
        let errors: Vec<_> = sandbox
            .guest
            .received_frames()
            .unwrap()
            .into_iter()
            .filter(|frame| frame[12..14] == [8, 0] && frame[23] == 1 && frame[34] == 3)
            .collect();
        assert_eq!(errors.len(), 1, "one ICMP destination unreachable");
        let guest = known.ipv4.0.octets();
        assert_eq!(
            errors[0][30..34],
            guest,
            "it goes to the guest's own address"
        );
        let inner = &errors[0][42..];
        assert_eq!(
            inner[12..16],
            guest,
            "and tells of a packet from that address"
        );
        assert_eq!(inner[16..20], BEYOND_IPV4.octets());
        assert_eq!(inner[20..22], 5555_u16.to_be_bytes());
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn both_interfaces_of_a_sandbox_are_fully_connected() {
    lab::run(|lab| {
        let _beyond = Beyond::attach().unwrap();
        let plan = fixture::plan(
            r#"{"name":"two","nics":2,"addresses":
                {"plan":"prefix","ipv4":"10.64.0.0/24","ipv6":"fd00:c10e::/64"}}"#,
        );
        let network = prepare(&plan);
        let slot = plan.slot(SlotNumber(0));
        network.build(&slot).unwrap();
        let guests: Vec<_> = slot
            .nics
            .iter()
            .map(|nic| {
                let (ipv4, ipv6) = (nic.ipv4.unwrap(), nic.ipv6.unwrap());
                let known = GuestNetwork {
                    mac: nic.guest_mac.0,
                    ipv4: (ipv4.guest.addr(), ipv4.guest.prefix_len()),
                    ipv4_gateway: ipv4.gateway,
                    ipv6: (ipv6.guest.addr(), ipv6.guest.prefix_len()),
                    ipv6_gateway: ipv6.gateway,
                };
                FakeGuest::attach_as(slot.netns_path().as_ref(), &nic.tap, known).unwrap()
            })
            .collect();
        for (guest, nic) in guests.iter().zip(&slot.nics) {
            for server in [IpAddr::from(BEYOND_IPV4), BEYOND_IPV6.into()] {
                guest.ping(server, PATIENCE).unwrap();
            }
            lab.run(&format!(
                "ping -c 1 -W 2 {}",
                nic.ipv4.unwrap().clone_address
            ));
            lab.run(&format!(
                "ping -c 1 -W 2 {}",
                nic.ipv6.unwrap().clone_address
            ));
        }
        assert_eq!(network.inspect(&slot).defects, []);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn nothing_of_the_old_tenant_is_left_when_a_number_comes_back() {
    lab::run(|lab| {
        let _beyond = Beyond::attach().unwrap();
        let plan = pool("web", "{}");
        let network = prepare(&plan);
        let sandbox = Sandbox::start(&network, &plan, 0);
        for server in [IpAddr::from(BEYOND_IPV4), BEYOND_IPV6.into()] {
            let echo = SocketAddr::new(server, ECHO_PORT);
            sandbox.guest.exchange_udp(echo, b"old", PATIENCE).unwrap();
        }
        let tracked = || {
            let both = lab.run("conntrack -L -f ipv4") + &lab.run("conntrack -L -f ipv6");
            both.matches("src=10.64.0.2 ").count() + both.matches("src=fd00:c10e::2 ").count()
        };
        assert!(tracked() >= 2);
        sandbox.guest.detach().unwrap();
        let slots = [sandbox.slot];
        network.tear_down(&slots).remove(0).unwrap();
        assert_eq!(tracked(), 0);
        let fresh = Sandbox::start(&network, &plan, 0);
        let status = &network.inspect(&fresh.slot).taps[0];
        assert!(status.egress.packets < 10, "{status:?}");
        fresh.guest.ping(BEYOND_IPV4.into(), PATIENCE).unwrap();
    });
}

//! What a sandbox can reach, and who can reach it. Guests are fake, the rest is the kernel: routing,
//! rules, sockets, and a world beyond the uplink that knows no route to clone addresses. Slots have the nft data path.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

#[path = "../fixture/mod.rs"]
mod fixture;
mod floods;
mod published;

use std::net::{IpAddr, SocketAddr};

use fixture::{
    pool, pool_of, prepare,
    sandbox::{GATEWAY_MAC, Sandbox},
    talk::{IN_VAIN, PATIENCE, http_get, serve_on_host, udp_echo},
};
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

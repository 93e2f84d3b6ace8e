//! What a guest that floods can use up: its own share.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use sandwire_slot::{network::Network, plan::SlotNumber};
use sandwire_testlab::{
    fake_guest::{FakeGuest, GuestNetwork, frame},
    host::{BEYOND_IPV4, BEYOND_IPV6, Beyond, HTTP_PORT},
    lab, namespace,
};

use crate::{
    counted,
    fixture::{
        self, pool, prepare,
        sandbox::{GATEWAY_MAC, Sandbox},
        talk::{IN_VAIN, PATIENCE},
    },
};

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

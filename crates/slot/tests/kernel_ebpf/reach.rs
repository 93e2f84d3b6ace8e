//! What a sandbox can reach, and who can reach it: the host, the world beyond the uplink, each other.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use sandwire_api::drop_reason::DropReason;
use sandwire_slot::{
    network::Network,
    plan::{Plan, SlotNumber},
};
use sandwire_testlab::{
    fake_guest::frame,
    host::{
        BEYOND_IPV4, BEYOND_IPV6, Beyond, ECHO_PORT, HOST_IPV4, HOST_IPV6, HTTP_PORT, WHO_AM_I_PORT,
    },
    lab::{self, Lab},
    namespace::{self, Namespace},
};

use crate::fixture::{
    EBPF_KINDS, ebpf_pool, plan, prepare,
    sandbox::{GATEWAY_MAC, Sandbox, tenancy},
    talk::{IN_VAIN, PATIENCE, http_get, http_get_once, serve_on_host, udp_echo},
    tear_down, web,
};

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn the_host_reaches_each_of_two_identical_guests() {
    lab::run(|lab| {
        for (kind, third) in EBPF_KINDS.into_iter().zip(1..) {
            let (ipv4, ipv6) = (format!("10.{third}.0.0/24"), format!("fd00:{third}::/64"));
            let plan = ebpf_pool(kind, kind, "{}", &ipv4, &ipv6);
            let network = prepare(&plan);
            let sandboxes = [0, 1].map(|number| Sandbox::start(&network, &plan, number));
            for sandbox in &sandboxes {
                for address in sandbox.clone_addresses() {
                    let pinged = namespace::run_in(
                        "/proc/self/ns/net".as_ref(),
                        &format!("ping -c 1 -W 2 {address}"),
                    );
                    if pinged.is_err() {
                        println!("{:?}", network.traffic(&sandbox.slot));
                        println!("{}", lab.run("ip route"));
                        println!("{}", lab.run(&format!("ip route get {address}")));
                        println!("{}", lab.run("ip -s -d link"));
                        println!("{}", lab.run("nft list ruleset"));
                        println!("{}", lab.run("ip neigh"));
                    }
                    pinged.unwrap();
                    let answer = http_get(SocketAddr::new(address, 80)).unwrap();
                    assert!(answer.starts_with("HTTP/1"), "{answer}");
                    let echo = udp_echo(SocketAddr::new(address, 7), PATIENCE).unwrap();
                    assert_eq!(echo, b"ping");
                }
                let traffic = network.traffic(&sandbox.slot).unwrap();
                assert!(traffic.egress.packets > 4, "{traffic:?}");
                assert!(traffic.ingress.packets > 4, "{traffic:?}");
            }
            let neighbours = lab.run("ip neighbour show");
            assert!(
                !neighbours.contains(&format!("10.{third}.0.")),
                "{neighbours}"
            );
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_the_namespace_says_on_its_link_is_not_taken_for_the_sandbox() {
    lab::run(|_| {
        let plan = web("netns", "{}");
        let network = prepare(&plan);
        let sandbox = Sandbox::start(&network, &plan, 0);
        let inside = sandbox.slot.netns_path();
        // The namespace's own stack sends by the veth, as it does for its multicast groups now and then.
        // Nobody answers.
        let line = "ping -c 1 -W 1 -I uplink0 ff02::2";
        namespace::run_in(inside.as_ref(), line).unwrap_err();
        let chatter = sandbox.dropped(&network, DropReason::LinkChatter)
            + sandbox.dropped(&network, DropReason::SourceAddress)
            + sandbox.dropped(&network, DropReason::Multicast);
        assert!(chatter > 0, "{:?}", network.traffic(&sandbox.slot));
        for address in sandbox.clone_addresses() {
            let answer = http_get_once(SocketAddr::new(address, 80)).unwrap();
            assert!(answer.starts_with("HTTP/1"), "{answer}");
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_guest_reaches_the_world_behind_the_host_s_address() {
    lab::run(|lab| {
        let beyond = Beyond::attach().unwrap();
        // A router that forwards by chosen interfaces alone.
        lab.run("sysctl -w net.ipv4.ip_forward=1");
        lab.run("sysctl -w net.ipv4.conf.default.forwarding=0");
        for (kind, third) in EBPF_KINDS.into_iter().zip(1..) {
            let (ipv4, ipv6) = (format!("10.{third}.0.0/24"), format!("fd00:{third}::/64"));
            let plan = ebpf_pool(kind, kind, "{}", &ipv4, &ipv6);
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
            beyond.route_through_host(&ipv4).unwrap();
            beyond.route_through_host(&ipv6).unwrap();
            for address in sandbox.clone_addresses() {
                beyond.run(&format!("ping -c 1 -W 2 {address}")).unwrap();
                let target = SocketAddr::new(address, 80);
                let page = beyond.inside(|| Ok(http_get(target)?)).unwrap();
                assert!(page.starts_with("HTTP/1"), "{page}");
            }
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn uplink_policies_route_and_deny() {
    lab::run(|_| {
        let beyond = Beyond::attach().unwrap();
        for kind in EBPF_KINDS {
            let (routed, denied) = (
                ebpf_pool(
                    "routed",
                    kind,
                    r#"{"uplink":"route"}"#,
                    "10.1.0.0/24",
                    "fd00:1::/64",
                ),
                ebpf_pool(
                    "denied",
                    kind,
                    r#"{"uplink":"deny"}"#,
                    "10.2.0.0/24",
                    "fd00:2::/64",
                ),
            );
            let network = prepare(&routed);
            network.add_pool(&denied).unwrap();
            for prefix in ["10.1.0.0/24", "fd00:1::/64", "10.2.0.0/24", "fd00:2::/64"] {
                // There already in the second round.
                let _ = beyond.route_through_host(prefix);
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
                let before = prisoner.dropped(&network, DropReason::UplinkDenied);
                prisoner.guest.ping(server, IN_VAIN).unwrap_err();
                assert!(prisoner.dropped(&network, DropReason::UplinkDenied) > before);
                // Answers to what came from outside still pass.
                beyond.run(&format!("ping -c 1 -W 2 {own}")).unwrap();
                let target = SocketAddr::new(own, 80);
                let page = beyond.inside(|| Ok(http_get(target)?)).unwrap();
                assert!(page.starts_with("HTTP/1"), "{page}");
            }
            let slots = [router.slot, prisoner.slot];
            drop((router.guest, prisoner.guest));
            tear_down(&network, &slots);
            for plan in [&routed, &denied] {
                network.remove_pool(plan).unwrap();
            }
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_packet_with_a_foreign_source_is_dropped_and_counted() {
    lab::run(|_| {
        let beyond = Beyond::attach().unwrap();
        for kind in EBPF_KINDS {
            let plan = web(kind, r#"{"host_services":["all"]}"#);
            let network = prepare(&plan);
            let sandbox = Sandbox::start(&network, &plan, 0);
            let known = sandbox.guest.network();
            let others: Vec<_> = plan.slot(SlotNumber(5)).clone_addresses().collect();
            let own = sandbox.clone_addresses();
            let foreign = [
                (IpAddr::from([198, 51, 100, 7]), IpAddr::from(BEYOND_IPV4)),
                (others[0], BEYOND_IPV4.into()),
                (own[0], BEYOND_IPV4.into()),
                ("2001:db8:99::1".parse().unwrap(), BEYOND_IPV6.into()),
                (others[1], BEYOND_IPV6.into()),
                (own[1], BEYOND_IPV6.into()),
            ];
            for (number, (source, target)) in (1..).zip(foreign) {
                let source = SocketAddr::new(source, 1234);
                let target = SocketAddr::new(target, ECHO_PORT);
                let forged = frame::udp(known.mac, GATEWAY_MAC, source, target, b"forged");
                sandbox.guest.send_frame(&forged).unwrap();
                // A frame behind it, so that it has been handled.
                let gateway = known.ipv4_gateway.into();
                sandbox.guest.ping(gateway, PATIENCE).unwrap();
                let counted = sandbox.dropped(&network, DropReason::SourceAddress);
                assert_eq!(counted, number, "{source} in a {kind} slot");
            }
            let target = SocketAddr::new(BEYOND_IPV4.into(), ECHO_PORT);
            let source = SocketAddr::new(known.ipv4.0.into(), 1234);
            let forged = frame::udp([2, 0, 0, 0, 0, 9], GATEWAY_MAC, source, target, b"forged");
            sandbox.guest.send_frame(&forged).unwrap();
            sandbox
                .guest
                .ping(known.ipv4_gateway.into(), PATIENCE)
                .unwrap();
            assert_eq!(sandbox.dropped(&network, DropReason::SourceMac), 1);
            drop(sandbox.guest);
            tear_down(&network, &[sandbox.slot]);
            network.remove_pool(&plan).unwrap();
        }
        let seen = beyond
            .run("nstat -az UdpInDatagrams Udp6InDatagrams")
            .unwrap();
        let is_zero = |line: &str| line.split_whitespace().nth(1) == Some("0");
        let mut counts = seen.lines().filter(|line| line.starts_with("Udp"));
        assert!(counts.all(is_zero), "{seen}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn the_host_s_services_and_metadata_are_closed_but_for_those_allowed() {
    lab::run(|lab| {
        let _beyond = Beyond::attach().unwrap();
        // The cloud's metadata service, played by the host itself.
        lab.run("ip address add 169.254.169.254/32 dev lo");
        lab.run("ip address add 169.254.170.2/32 dev lo");
        serve_on_host();
        for kind in EBPF_KINDS {
            let closed = ebpf_pool("closed", kind, "{}", "10.1.0.0/24", "fd00:1::/64");
            let policy = r#"{"host_services":["tcp/6990-7000","icmp"],"cloud_metadata":true}"#;
            let open = ebpf_pool("open", kind, policy, "10.2.0.0/24", "fd00:2::/64");
            let network = prepare(&closed);
            network.add_pool(&open).unwrap();
            let outcast = Sandbox::start(&network, &closed, 0);
            let friend = Sandbox::start(&network, &open, 0);
            let hosts = |plan: &Plan| {
                let ipv4 = IpAddr::from(plan.host_ipv4.unwrap());
                [ipv4, plan.host_ipv6.unwrap().into(), HOST_IPV4.into()]
            };
            for host in hosts(&closed) {
                let before = outcast.dropped(&network, DropReason::HostService);
                let service = SocketAddr::new(host, 7000);
                let guest = &outcast.guest;
                guest.exchange_tcp(service, b"", IN_VAIN).unwrap_err();
                guest.exchange_udp(service, b"?", IN_VAIN).unwrap_err();
                guest.ping(host, IN_VAIN).unwrap_err();
                let dropped = outcast.dropped(&network, DropReason::HostService);
                assert!(dropped >= before + 3, "{dropped}");
            }
            for host in hosts(&open) {
                let service = SocketAddr::new(host, 7000);
                let guest = &friend.guest;
                assert_eq!(guest.exchange_tcp(service, b"", PATIENCE).unwrap(), b"host");
                guest.ping(host, PATIENCE).unwrap();
                guest.exchange_udp(service, b"?", IN_VAIN).unwrap_err();
            }
            for address in [[169, 254, 169, 254], [169, 254, 170, 2]] {
                let metadata = SocketAddr::new(address.into(), 7000);
                let before = outcast.dropped(&network, DropReason::Metadata);
                let guest = &outcast.guest;
                guest.exchange_tcp(metadata, b"", IN_VAIN).unwrap_err();
                assert!(outcast.dropped(&network, DropReason::Metadata) > before);
                let answer = friend.guest.exchange_tcp(metadata, b"", PATIENCE).unwrap();
                assert_eq!(answer, b"host");
            }
            let slots = [outcast.slot, friend.slot];
            drop((outcast.guest, friend.guest));
            tear_down(&network, &slots);
            for plan in [&closed, &open] {
                network.remove_pool(plan).unwrap();
            }
        }
    });
}

/// As kube-proxy leads services' addresses to what the host itself serves.
const SERVICES: &str = "
    table inet kube {
        chain services {
            type nat hook prerouting priority dstnat;
            ip daddr 10.96.0.1 tcp dport 443 dnat ip to 203.0.113.1:7000
            ip6 daddr fd00:96::1 tcp dport 443 dnat ip6 to [2001:db8:1::1]:7000
            ip daddr 10.96.0.2 tcp dport 80 dnat ip to 169.254.169.254:7000
        }
    }
";

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_others_translate_to_the_host_is_judged_as_a_call_of_the_host() {
    lab::run(|lab| {
        let _beyond = Beyond::attach().unwrap();
        lab.run("ip address add 169.254.169.254/32 dev lo");
        lab.shell(&format!("nft '{SERVICES}'"));
        serve_on_host();
        let by = |address: &str| address.parse::<SocketAddr>().unwrap();
        let [ipv4, ipv6] = [by("10.96.0.1:443"), by("[fd00:96::1]:443")];
        let metadata = by("10.96.0.2:80");
        for kind in EBPF_KINDS {
            let closed = ebpf_pool("closed", kind, "{}", "10.1.0.0/24", "fd00:1::/64");
            let some = r#"{"host_services":["tcp/6990-7000"],"cloud_metadata":true}"#;
            let some = ebpf_pool("some", kind, some, "10.2.0.0/24", "fd00:2::/64");
            let all = r#"{"host_services":["all"]}"#;
            let all = ebpf_pool("all", kind, all, "10.3.0.0/24", "fd00:3::/64");
            let network = prepare(&closed);
            for (plan, open, shut) in [
                (&closed, &[][..], &[ipv4, ipv6, metadata][..]),
                (&some, &[ipv4, ipv6, metadata], &[]),
                (&all, &[ipv4, ipv6], &[metadata]),
            ] {
                network.add_pool(plan).unwrap();
                let Sandbox { guest, slot, .. } = Sandbox::start(&network, plan, 0);
                for service in open {
                    let answer = guest.exchange_tcp(*service, b"", PATIENCE);
                    assert_eq!(answer.unwrap(), b"host", "{service} of {}", plan.spec.name);
                }
                for service in shut {
                    guest.exchange_tcp(*service, b"", IN_VAIN).unwrap_err();
                }
                drop(guest);
                tear_down(&network, &[slot]);
                network.remove_pool(plan).unwrap();
            }
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn sandboxes_reach_each_other_only_in_their_group() {
    lab::run(|_| {
        let together = r#"{"clone_to_clone":true,"group":"team"}"#;
        // One kind talks to the other as it does to its own.
        let pools = [
            ebpf_pool("a", "netns", together, "10.1.0.0/24", "fd00:1::/64"),
            ebpf_pool("b", "host", together, "10.2.0.0/24", "fd00:2::/64"),
            ebpf_pool("c", "host", "{}", "10.3.0.0/24", "fd00:3::/64"),
        ];
        let network = prepare(&pools[0]);
        for plan in &pools[1..] {
            network.add_pool(plan).unwrap();
        }
        let start = |plan, number| Sandbox::start(&network, plan, number);
        let friends = [
            start(&pools[0], 0),
            start(&pools[0], 1),
            start(&pools[1], 0),
            start(&pools[1], 1),
        ];
        let strangers = [start(&pools[2], 0), start(&pools[2], 1)];
        for from in &friends {
            for to in friends.iter().filter(|to| to.slot != from.slot) {
                for address in to.clone_addresses() {
                    from.guest.ping(address, PATIENCE).unwrap();
                    let page = from.guest.fetch(SocketAddr::new(address, 80), PATIENCE);
                    page.unwrap();
                }
            }
        }
        for (from, to) in [
            (&strangers[0], &strangers[1]),
            (&strangers[0], &friends[0]),
            (&friends[0], &strangers[0]),
        ] {
            for address in to.clone_addresses() {
                let before = from.dropped(&network, DropReason::OtherSandbox);
                from.guest.ping(address, IN_VAIN).unwrap_err();
                assert!(from.dropped(&network, DropReason::OtherSandbox) > before);
            }
        }
        // They join the others, and leave again.
        let [inside, outside] = [&pools[1], &pools[2]].map(|plan| {
            let tenancy = tenancy(&network, plan);
            strangers.each_ref().map(|one| (one.slot.clone(), tenancy))
        });
        let set = |changes| {
            network
                .set_policies(changes)
                .into_iter()
                .for_each(Result::unwrap)
        };
        set(&inside);
        for (from, to) in [(&strangers[0], &strangers[1]), (&friends[0], &strangers[0])] {
            for address in to.clone_addresses() {
                from.guest.ping(address, PATIENCE).unwrap();
            }
        }
        set(&outside);
        for (from, to) in [(&strangers[0], &strangers[1]), (&friends[0], &strangers[0])] {
            for address in to.clone_addresses() {
                from.guest.ping(address, IN_VAIN).unwrap_err();
            }
        }
        // A clone address that nobody has is nowhere else either.
        let nobody = IpAddr::from([10, 1, 0, 99]);
        friends[0].guest.ping(nobody, IN_VAIN).unwrap_err();
        assert!(friends[0].dropped(&network, DropReason::NoSuchSandbox) > 0);
    });
}

/// A namespace behind an interface that is no uplink, as somebody else's containers are.
fn attach_others(lab: &Lab) -> Namespace {
    let others = lab.namespace("others");
    lab.shell(
        "sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0
         ip link add others0 type veth peer name eth0 netns others
         ip address add 172.31.0.1/24 dev others0
         ip address add fd00:31::1/64 dev others0 nodad
         ip link set others0 up
         ip -n others address add 172.31.0.2/24 dev eth0
         ip -n others address add fd00:31::2/64 dev eth0 nodad
         ip -n others link set eth0 up
         ip -n others route add default via 172.31.0.1
         ip -n others -6 route add default via fd00:31::1",
    );
    others
}

#[track_caller]
fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn nobody_else_on_the_host_passes_for_a_sandbox() {
    lab::run(|lab| {
        let _beyond = Beyond::attach().unwrap();
        let others = attach_others(lab);
        for kind in EBPF_KINDS {
            let team = r#"{"clone_to_clone":true,"group":"team"}"#;
            let wide = ebpf_pool("wide", kind, team, "10.1.0.0/24", "fd00:1::/64");
            // What is too long for it is cut by the host's stack.
            let narrow = plan(&format!(
                r#"{{"name":"narrow","kind":"{kind}","data_path":"ebpf","policy":{team},
                    "tap":{{"mtu":1280}},
                    "addresses":{{"plan":"prefix","ipv4":"10.2.0.0/24","ipv6":"fd00:2::/64"}}}}"#
            ));
            let network = prepare(&wide);
            network.add_pool(&narrow).unwrap();
            let sender = Sandbox::start(&network, &wide, 0);
            let receiver = Sandbox::start(&network, &narrow, 0);
            let refused = || receiver.dropped(&network, DropReason::SourceAddress);
            let received = || network.traffic(&receiver.slot).unwrap().ingress.packets;

            let before = received();
            let known = sender.guest.network();
            let target = SocketAddr::new(receiver.clone_addresses()[0], 9);
            let source = SocketAddr::new(known.ipv4.0.into(), 1234);
            let mut long = frame::udp(known.mac, GATEWAY_MAC, source, target, &[7; 1400]);
            may_be_cut(&mut long);
            sender.guest.send_frame(&long).unwrap();
            wait_until("the parts don't come", || received() == before + 2);
            assert_eq!(refused(), 0);

            let addresses = sender.clone_addresses();
            for (address, target) in addresses.into_iter().zip(receiver.clone_addresses()) {
                let target = SocketAddr::new(target, 9);
                others
                    .run(&format!("ping -n -c 1 -W 20 {}", target.ip()))
                    .unwrap();
                let length = if address.is_ipv4() { 32 } else { 128 };
                let claim = |verb: &str, rest: &str| {
                    let line = format!("ip address {verb} {address}/{length} dev eth0 {rest}");
                    others.run(&line).unwrap();
                };
                claim("add", if address.is_ipv4() { "" } else { "nodad" });
                let (before, refused_before) = (received(), refused());
                let send = || {
                    let socket = UdpSocket::bind((address, 1234))?;
                    Ok(socket.send_to(b"forged", target)?)
                };
                wait_until("it isn't refused", || {
                    others.inside(send).unwrap();
                    refused() > refused_before
                });
                assert_eq!(received(), before, "{address}");
                claim("delete", "");
                sender.guest.ping(target.ip(), PATIENCE).unwrap();
            }
            let slots = [sender.slot, receiver.slot];
            drop((sender.guest, receiver.guest));
            tear_down(&network, &slots);
            for plan in [&wide, &narrow] {
                network.remove_pool(plan).unwrap();
            }
        }
    });
}

/// Takes "don't fragment" off an IPv4 packet in a frame.
fn may_be_cut(frame: &mut [u8]) {
    let word = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
    assert_eq!(word(20), 0x4000);
    let (sum, carry) = word(24).overflowing_add(0x4000);
    let sum = sum + u16::from(carry);
    frame[20..22].fill(0);
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
}

//! Slots of the eBPF data path in a real kernel: netns slots and host slots alike. Guests are fake, the
//! rest is the kernel; the judges are `ip`, `tc`, sockets and a world beyond the uplink.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod fixture;

use std::{
    collections::BTreeSet,
    io::{self, Read, Seek, Write},
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    sync::Arc,
    time::{Duration, Instant},
};

use fixture::{EBPF_KINDS, INSTANCE, IPV4, IPV6, ebpf_pool};
use sandwire_api::{
    drop_reason::DropReason,
    published_port::{Protocol, PublishPort},
    slot::TapUse,
};
use sandwire_slot::{
    kernel::{BuildStep, KernelNetwork, Settings, Steps},
    network::{Network, Tenancy, Withdrawal},
    plan::{Plan, SlotNumber, SlotPlan},
};
use sandwire_testlab::{
    command,
    fake_guest::{FakeGuest, frame},
    host::{
        BEYOND_IPV4, BEYOND_IPV6, Beyond, ECHO_PORT, HOST_IPV4, HOST_IPV6, HTTP_PORT,
        WHO_AM_I_PORT, serve_tcp, serve_udp,
    },
    lab::{self, Lab},
    namespace,
};

const PATIENCE: Duration = Duration::from_secs(5);
/// For what must not arrive.
const IN_VAIN: Duration = Duration::from_millis(700);
const GATEWAY_MAC: [u8; 6] = [0x02, 0x73, 0x77, 0x00, 0x00, 0x01];

/// A leased slot with a guest in it.
struct Sandbox {
    slot: SlotPlan,
    guest: FakeGuest,
}

fn tenancy(network: &KernelNetwork, plan: &Plan) -> Tenancy {
    let policy = &plan.spec.policy;
    Tenancy {
        policy: network.add_policy(policy).unwrap(),
        group: sandwire_datapath::group_number(plan.group_of(policy).as_str()),
        is_process: false,
    }
}

fn attach(slot: &SlotPlan) -> FakeGuest {
    let netns = match slot.has_netns() {
        true => slot.netns_path(),
        false => "/proc/self/ns/net".to_owned(),
    };
    FakeGuest::attach(netns.as_ref(), &slot.nics[0].tap).unwrap()
}

impl Sandbox {
    fn start(network: &KernelNetwork, plan: &Plan, number: u32) -> Self {
        let slot = plan.slot(SlotNumber(number));
        network.build(&slot).unwrap();
        network.activate(&slot, &tenancy(network, plan)).unwrap();
        let guest = attach(&slot);
        let known = guest.network();
        for gateway in [IpAddr::from(known.ipv4_gateway), known.ipv6_gateway.into()] {
            guest.ping(gateway, PATIENCE).unwrap();
        }
        Self { slot, guest }
    }

    fn clone_addresses(&self) -> [IpAddr; 2] {
        let addresses: Vec<_> = self.slot.clone_addresses().collect();
        addresses.try_into().expect("one of each family")
    }

    fn dropped(&self, network: &KernelNetwork, reason: DropReason) -> u64 {
        let traffic = network.traffic(&self.slot).unwrap();
        traffic.drops.get(&reason).copied().unwrap_or(0)
    }
}

fn prepare(plan: &Plan) -> KernelNetwork {
    let network = KernelNetwork::open(INSTANCE).unwrap();
    network.add_pool(plan).unwrap();
    network
}

fn web(kind: &str, policy: &str) -> Plan {
    ebpf_pool("web", kind, policy, IPV4, IPV6)
}

fn serve_on_host() {
    serve_tcp(7000, |mut stream| stream.write_all(b"host")).unwrap();
    serve_udp(7000, |_, _| b"host".to_vec()).unwrap();
}

fn connect(target: SocketAddr, patience: Duration) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&target, patience)?;
    stream.set_read_timeout(Some(patience))?;
    Ok(stream)
}

/// The fake guest's one web server refuses for as long as it ends the connection before.
fn http_get(target: SocketAddr) -> io::Result<String> {
    let mut connected = connect(target, PATIENCE);
    for _ in 0..100 {
        let refused = |error: &io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
        if !connected.as_ref().is_err_and(refused) {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
        connected = connect(target, PATIENCE);
    }
    let mut stream = connected?;
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

fn udp_echo(target: SocketAddr, patience: Duration) -> io::Result<Vec<u8>> {
    let any = if target.is_ipv4() {
        "0.0.0.0:0"
    } else {
        "[::]:0"
    };
    let socket = UdpSocket::bind(any)?;
    socket.set_read_timeout(Some(patience))?;
    socket.send_to(b"ping", target)?;
    let mut answer = [0; 64];
    let (length, from) = socket.recv_from(&mut answer)?;
    assert_eq!(from, target, "the answer has the address that was asked");
    Ok(answer[..length].to_vec())
}

fn tear_down(network: &KernelNetwork, slots: &[SlotPlan]) {
    for result in network.tear_down(slots) {
        result.unwrap();
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_slot_comes_and_goes_without_trace() {
    lab::run(|lab| {
        // Mounted and opened once, so that it is no difference.
        let network = prepare(&web("host", "{}"));
        network.remove_pool(&web("host", "{}")).unwrap();
        for kind in EBPF_KINDS {
            let before = lab.snapshot();
            let plan = web(kind, "{}");
            network.add_pool(&plan).unwrap();
            let slots: Vec<_> = (0..3).map(|number| plan.slot(SlotNumber(number))).collect();
            for slot in &slots {
                network.build(slot).unwrap();
                let inspection = network.inspect(slot);
                assert_eq!(inspection.defects, [], "{}", slot.netns_name);
                assert_eq!(inspection.taps[0].used, TapUse::Unused);
                let host_end = lab.run(&format!("ip -d -o link show {}", slot.host_interface));
                assert!(host_end.contains(&slot.host_alias), "{host_end}");
                let filter = lab.run(&format!(
                    "tc filter show dev {} ingress",
                    slot.host_interface
                ));
                assert!(filter.contains("from_guest"), "{filter}");
            }
            assert_eq!(network.inspect_host(std::slice::from_ref(&plan.spec)), []);
            let routes = lab.run("ip route");
            assert!(!routes.contains("10.64.0.2"), "no route per slot: {routes}");
            tear_down(&network, &slots);
            network.remove_pool(&plan).unwrap();
            lab.assert_unchanged(&before);
        }
    });
}

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
fn a_guest_reaches_the_world_behind_the_host_s_address() {
    lab::run(|_| {
        let beyond = Beyond::attach().unwrap();
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
            let metadata = SocketAddr::new([169, 254, 169, 254].into(), 7000);
            outcast
                .guest
                .exchange_tcp(metadata, b"", IN_VAIN)
                .unwrap_err();
            assert!(outcast.dropped(&network, DropReason::Metadata) > 0);
            let answer = friend.guest.exchange_tcp(metadata, b"", PATIENCE).unwrap();
            assert_eq!(answer, b"host");
            let slots = [outcast.slot, friend.slot];
            drop((outcast.guest, friend.guest));
            tear_down(&network, &slots);
            for plan in [&closed, &open] {
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
        // A clone address that nobody has is nowhere else either.
        let nobody = IpAddr::from([10, 1, 0, 99]);
        friends[0].guest.ping(nobody, IN_VAIN).unwrap_err();
        assert!(friends[0].dropped(&network, DropReason::NoSuchSandbox) > 0);
    });
}

/// Host ports that lead to a sandbox: its web page, its echo, and UDP where nobody listens.
fn published(sandbox: &Sandbox) -> [(PublishPort, Vec<IpAddr>); 4] {
    let ports = [
        (Protocol::Tcp, 8080, 80),
        (Protocol::Tcp, 8007, 7),
        (Protocol::Udp, 8007, 7),
        (Protocol::Udp, 8999, 9999),
    ];
    ports.map(|(protocol, host_port, clone_port)| {
        let port = PublishPort {
            protocol,
            host_address: None,
            host_port,
            clone_port,
            nic: 0,
        };
        (port, sandbox.clone_addresses().to_vec())
    })
}

/// The guest says that nobody listens there, by an ICMP error that names the port as it was called.
fn is_refused(target: SocketAddr) -> bool {
    let any = if target.is_ipv4() {
        "0.0.0.0:0"
    } else {
        "[::]:0"
    };
    let socket = UdpSocket::bind(any).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket.connect(target).unwrap();
    socket.send(b"?").unwrap();
    let answer = socket.recv(&mut [0; 16]);
    answer.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

/// Calls the ports of [`published`] on the host, from wherever the thread is.
#[track_caller]
fn assert_published(host: IpAddr, is_open: bool) {
    let (page, echo) = (SocketAddr::new(host, 8080), SocketAddr::new(host, 8007));
    if is_open {
        http_get(page).unwrap();
        udp_echo(echo, PATIENCE).unwrap();
        assert!(is_refused(SocketAddr::new(host, 8999)), "{host}");
    } else {
        connect(page, PATIENCE).unwrap_err();
        udp_echo(echo, IN_VAIN).unwrap_err();
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn published_ports_lead_to_the_guest_until_they_are_withdrawn() {
    lab::run(|_| {
        let beyond = Beyond::attach().unwrap();
        // So an answer with the clone address as its source would arrive, and be seen as wrong.
        for prefix in [IPV4, IPV6] {
            beyond.route_through_host(prefix).unwrap();
        }
        let cases = EBPF_KINDS.map(|kind| ["{}", ROUTED].map(|policy| (kind, policy)));
        for (kind, policy) in cases.into_iter().flatten() {
            let plan = web(kind, policy);
            let network = prepare(&plan);
            let sandbox = Sandbox::start(&network, &plan, 0);
            let ports = published(&sandbox);
            for is_open in [false, true, false] {
                let published = if is_open { &ports[..] } else { &[] };
                network.set_published_ports(published).unwrap();
                for host in [IpAddr::from(HOST_IPV4), HOST_IPV6.into()] {
                    assert_published(host, is_open);
                    let remote = || {
                        assert_published(host, is_open);
                        Ok(())
                    };
                    beyond.inside(remote).unwrap();
                }
                if policy == ROUTED {
                    assert_goes_past_the_stack(&sandbox, &beyond);
                }
            }
            drop(sandbox.guest);
            tear_down(&network, &[sandbox.slot]);
            network.remove_pool(&plan).unwrap();
        }
    });
}

const ROUTED: &str = r#"{"uplink":"route"}"#;

/// What the guest begins itself, and its answers to those who call its own address, have that address.
#[track_caller]
fn assert_goes_past_the_stack(sandbox: &Sandbox, beyond: &Beyond) {
    let servers = [IpAddr::from(BEYOND_IPV4), BEYOND_IPV6.into()];
    for (server, own) in servers.into_iter().zip(sandbox.clone_addresses()) {
        let target = SocketAddr::new(server, HTTP_PORT);
        let page = sandbox.guest.fetch(target, PATIENCE).unwrap();
        assert!(page.contains(&own.to_string()), "{page}");
        let call = || {
            http_get(SocketAddr::new(own, 80))?;
            Ok(udp_echo(SocketAddr::new(own, 7), PATIENCE)?)
        };
        beyond.inside(call).unwrap();
    }
}

/// Has the guest echo a word over an open connection.
#[track_caller]
fn say(stream: &mut TcpStream, word: &[u8]) {
    stream.write_all(word).unwrap();
    let mut answer = vec![0; word.len()];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer, word);
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn published_ports_of_routed_sandboxes_outlive_the_daemon() {
    lab::run(|_| {
        let beyond = Beyond::attach().unwrap();
        let host = IpAddr::from(HOST_IPV4);
        let echo = SocketAddr::new(host, 8007);
        for kind in EBPF_KINDS {
            let plan = web(kind, ROUTED);
            let network = prepare(&plan);
            let sandbox = Sandbox::start(&network, &plan, 0);
            let ports = published(&sandbox);
            network.set_published_ports(&ports).unwrap();
            let mut inward = beyond.inside(|| Ok(connect(echo, PATIENCE)?)).unwrap();
            say(&mut inward, b"before");
            // As SIGKILL does: nothing is taken back.
            let after = KernelNetwork::open(INSTANCE).unwrap();
            after.add_pool(&plan).unwrap();
            let tenancy = tenancy(&after, &plan);
            after.adopt(&sandbox.slot, Some(&tenancy)).unwrap();
            say(&mut inward, b"before it knows of ports");
            beyond.inside(|| Ok(udp_echo(echo, PATIENCE)?)).unwrap();
            after.set_published_ports(&ports).unwrap();
            // Entries that were lost are made anew.
            after.deactivate(&sandbox.slot).unwrap();
            after.adopt(&sandbox.slot, Some(&tenancy)).unwrap();
            say(&mut inward, b"after");
            let remote = || {
                assert_published(host, true);
                Ok(())
            };
            beyond.inside(remote).unwrap();
            assert_eq!(after.inspect(&sandbox.slot).defects, []);
            after.set_published_ports(&[]).unwrap();
            drop(sandbox.guest);
            tear_down(&after, &[sandbox.slot]);
            after.remove_pool(&plan).unwrap();
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn published_ports_of_a_routed_slot_that_moves_to_ebpf_and_back_answer_all_the_time() {
    lab::run(|_| {
        let beyond = Beyond::attach().unwrap();
        let host = IpAddr::from(HOST_IPV4);
        let nft = fixture::pool("web", ROUTED);
        let ebpf = nft
            .with_data_path(sandwire_api::slot::DataPath::Ebpf)
            .unwrap();
        let network = prepare(&nft);
        let slot = nft.slot(SlotNumber(0));
        network.build(&slot).unwrap();
        let guest = attach(&slot);
        let sandbox = Sandbox { slot, guest };
        network.set_published_ports(&published(&sandbox)).unwrap();
        let remote = || {
            assert_published(host, true);
            Ok(())
        };
        // The guest's gateway must be known to it.
        sandbox.guest.ping(HOST_IPV4.into(), IN_VAIN).ok();
        beyond.inside(remote).unwrap();
        let echo = SocketAddr::new(host, 8007);
        let mut inward = beyond.inside(|| Ok(connect(echo, PATIENCE)?)).unwrap();
        for (plan, from) in [(&ebpf, &nft), (&nft, &ebpf)] {
            let moved = plan.slot(SlotNumber(0));
            let from = Some(from.spec.data_path);
            network.change_pool(plan, from).unwrap();
            let tenancy = moved.is_ebpf().then(|| tenancy(&network, plan));
            network.move_slot(&moved, tenancy.as_ref()).unwrap();
            network.change_pool(plan, None).unwrap();
            say(&mut inward, b"moved");
            beyond.inside(remote).unwrap();
        }
        network.set_published_ports(&[]).unwrap();
        drop(sandbox.guest);
        tear_down(&network, &[sandbox.slot]);
        network.remove_pool(&nft).unwrap();
    });
}

/// Fails one step.
struct FailingAt(BuildStep);

impl Steps for FailingAt {
    fn before(&self, step: BuildStep) -> io::Result<()> {
        if step == self.0 {
            return Err(io::ErrorKind::StorageFull.into());
        }
        Ok(())
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_build_that_fails_at_any_step_leaves_nothing() {
    lab::run(|lab| {
        for (kind, steps) in [
            ("netns", &BuildStep::EBPF[..]),
            ("host", &BuildStep::HOST[..]),
        ] {
            let plan = web(kind, "{}");
            let slot = plan.slot(SlotNumber(0));
            let sound = prepare(&plan);
            let before = lab.snapshot();
            for step in steps {
                let settings = Settings::new(INSTANCE);
                let network =
                    KernelNetwork::with_steps(settings, Arc::new(FailingAt(*step))).unwrap();
                network.add_pool(&plan).unwrap();
                let error = network.build(&slot).unwrap_err().to_string();
                assert!(error.contains("no storage space"), "{error}");
                lab.assert_unchanged(&before);
                assert_eq!(network.traffic(&slot), None, "no entry is left");
            }
            sound.build(&slot).unwrap();
            assert_eq!(sound.inspect(&slot).defects, []);
            tear_down(&sound, &[slot]);
            sound.remove_pool(&plan).unwrap();
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_tap_in_use_keeps_its_slot() {
    lab::run(|lab| {
        for kind in EBPF_KINDS {
            let plan = web(kind, "{}");
            let network = prepare(&plan);
            let sandbox = Sandbox::start(&network, &plan, 0);
            let slot = &sandbox.slot;
            let withdrawn = network.withdraw_taps(slot).unwrap();
            let Withdrawal::Held(holders) = withdrawn else {
                panic!("{withdrawn:?}");
            };
            // In a namespace only processes that are in it are told, and here it is a thread.
            if !slot.has_netns() {
                assert_eq!(holders.len(), 1, "{holders:?}");
                assert_eq!(holders[0].pid, std::process::id());
            }
            assert_eq!(network.inspect(slot).taps[0].used, TapUse::Attached);
            lab.run(&format!("ping -c 1 -W 2 {}", sandbox.clone_addresses()[0]));
            let Sandbox { slot, guest } = sandbox;
            guest.detach().unwrap();
            assert_eq!(network.withdraw_taps(&slot).unwrap(), Withdrawal::Free);
            // Again after a crash in between, and nobody finds a TAP.
            assert_eq!(network.withdraw_taps(&slot).unwrap(), Withdrawal::Free);
            assert!(network.open_taps(&slot).is_err());
            tear_down(&network, &[slot.clone(), slot]);
            assert_eq!(network.inventory().unwrap(), Default::default());
            network.remove_pool(&plan).unwrap();
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_slot_s_open_taps_can_be_handed_on() {
    lab::run(|_| {
        for kind in EBPF_KINDS {
            let plan = web(kind, "{}");
            let network = prepare(&plan);
            let slot = plan.slot(SlotNumber(0));
            network.build(&slot).unwrap();
            let opened = network.open_taps(&slot).unwrap();
            assert_eq!(opened.len(), 1);
            assert!(network.open_taps(&slot).is_err(), "it is in use");
            let held = network.withdraw_taps(&slot).unwrap();
            assert!(matches!(held, Withdrawal::Held(_)), "{held:?}");
            drop(opened);
            assert_eq!(network.withdraw_taps(&slot).unwrap(), Withdrawal::Free);
            tear_down(&network, &[slot]);
            network.remove_pool(&plan).unwrap();
        }
    });
}

fn filters_of(lab: &Lab, slot: &SlotPlan) -> String {
    lab.run(&format!(
        "tc filter show dev {} ingress",
        slot.host_interface
    ))
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_somebody_took_away_is_seen_and_repaired() {
    lab::run(|lab| {
        for kind in EBPF_KINDS {
            let plan = web(kind, "{}");
            let network = prepare(&plan);
            let sandbox = Sandbox::start(&network, &plan, 0);
            let slot = &sandbox.slot;
            let spec = std::slice::from_ref(&plan.spec);
            let shared = lab.run("ip -o link show type bridge");
            let shared = shared.split(": ").nth(1).unwrap();
            let mut damages = vec![
                format!("tc filter delete dev {} ingress", slot.host_interface),
                format!("tc qdisc delete dev {} ingress", slot.host_interface),
            ];
            if slot.has_netns() {
                let inside = format!("ip netns exec {}", slot.netns_name);
                damages.push(format!("{inside} tc qdisc delete dev uplink0 ingress"));
                damages.push(format!("{inside} tc qdisc delete dev vmtap0 ingress"));
            }
            for damage in damages {
                lab.run(&damage);
                assert_eq!(network.inspect(slot).defects.len(), 1, "{damage}");
                let defects = network.repair(slot);
                assert_eq!(defects.len(), 1, "{damage}: {defects:?}");
                assert_eq!(defects[0].action, "repaired", "{damage}: {defects:?}");
                assert_eq!(network.inspect(slot).defects, [], "{damage}");
                lab.run(&format!("ping -c 1 -W 2 {}", sandbox.clone_addresses()[0]));
            }
            for damage in [
                format!("ip link set {shared} down"),
                format!("ip link delete {shared}"),
                format!("ip route delete {IPV4}"),
            ] {
                lab.run(&damage);
                let defects = network.inspect_host(spec);
                assert!(!defects.is_empty(), "{damage}");
                let all_repaired = defects.iter().all(|defect| defect.action == "repaired");
                assert!(all_repaired, "{damage}: {defects:?}");
                assert_eq!(network.inspect_host(spec), [], "{damage}");
                let begun = Instant::now();
                let address = sandbox.clone_addresses()[0];
                // Decisions of the time before hold for a moment.
                while udp_echo(SocketAddr::new(address, 7), IN_VAIN).is_err() {
                    assert!(begun.elapsed() < PATIENCE, "{damage}");
                }
            }
            // A user's own programs before and behind ours stay where they are.
            for priority in [100, 60_000] {
                // Classic BPF that matches nothing.
                let place = format!("dev {} ingress pref {priority}", slot.host_interface);
                command::shell(&format!("tc filter add {place} bpf bytecode '1,6 0 0 0,'"))
                    .unwrap();
            }
            assert_eq!(network.inspect(slot).defects, []);
            let filters = filters_of(lab, slot);
            assert!(filters.contains("pref 100 ") && filters.contains("pref 60000 "));
            drop(sandbox.guest);
            tear_down(&network, &[sandbox.slot]);
            network.remove_pool(&plan).unwrap();
        }
    });
}

/// Pings every few milliseconds until it is told to stop.
struct Pinger {
    child: std::process::Child,
    /// A file, which is never full.
    output: std::fs::File,
}

impl Pinger {
    /// Packets of the last 25 ms.
    const UNDER_WAY: u32 = 5;

    fn start(address: IpAddr) -> Self {
        let output = tempfile::tempfile().unwrap();
        let child = std::process::Command::new("ping")
            .args(["-i", "0.005", "-W", "1", &address.to_string()])
            .stdout(output.try_clone().unwrap())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(100));
        Self { child, output }
    }

    /// Packets sent, and those that were not answered; the last few may be under way.
    fn stop(mut self) -> (u32, u32) {
        std::thread::sleep(Duration::from_millis(100));
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        self.child.wait().unwrap();
        self.output.rewind().unwrap();
        let text = io::read_to_string(self.output).unwrap();
        let line = text
            .lines()
            .find(|line| line.contains("packets transmitted"))
            .unwrap_or_else(|| panic!("{text}"));
        let sent: u32 = line.split_whitespace().next().unwrap().parse().unwrap();
        let answered: BTreeSet<u32> = text
            .lines()
            .filter(|line| line.contains(" bytes from "))
            .filter_map(|line| line.split_once("icmp_seq=")?.1.split(' ').next())
            .map(|number| number.parse().unwrap())
            .collect();
        let settled = sent.saturating_sub(Self::UNDER_WAY);
        let lost = (1..=settled).filter(|number| !answered.contains(number));
        (settled, u32::try_from(lost.count()).unwrap())
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_slot_moves_to_ebpf_and_back_without_losing_a_packet() {
    lab::run(|lab| {
        let beyond = Beyond::attach().unwrap();
        let nft = fixture::pool("web", "{}");
        let ebpf = nft
            .with_data_path(sandwire_api::slot::DataPath::Ebpf)
            .unwrap();
        let network = prepare(&nft);
        beyond.route_through_host(IPV4).unwrap();
        beyond.route_through_host(IPV6).unwrap();
        let slot = nft.slot(SlotNumber(0));
        network.build(&slot).unwrap();
        let guest = attach(&slot);
        let addresses: Vec<IpAddr> = slot.clone_addresses().collect();
        for address in &addresses {
            while udp_echo(SocketAddr::new(*address, 7), IN_VAIN).is_err() {}
        }
        // A connection that is open all the time, with something to say in every state.
        let server = SocketAddr::new(addresses[0], 7);
        let mut inward = beyond.inside(|| Ok(connect(server, PATIENCE)?)).unwrap();
        let mut say = |word: &[u8]| {
            inward.write_all(word).unwrap();
            let mut answer = vec![0; word.len()];
            inward.read_exact(&mut answer).unwrap();
            assert_eq!(answer, word);
        };
        say(b"nft");
        for round in 0..3 {
            for plan in [&ebpf, &nft] {
                let from = match plan.spec.data_path {
                    sandwire_api::slot::DataPath::Nft => ebpf.spec.data_path,
                    _ => nft.spec.data_path,
                };
                let moved = plan.slot(SlotNumber(0));
                let pingers: Vec<_> = addresses.iter().map(|one| Pinger::start(*one)).collect();
                network.change_pool(plan, Some(from)).unwrap();
                let tenancy = moved.is_ebpf().then(|| tenancy(&network, plan));
                network.move_slot(&moved, tenancy.as_ref()).unwrap();
                say(b"just now");
                // Once more, as after a crash.
                network.move_slot(&moved, tenancy.as_ref()).unwrap();
                network.change_pool(plan, None).unwrap();
                for pinger in pingers {
                    let (sent, lost) = pinger.stop();
                    let path = plan.spec.data_path;
                    assert!(
                        sent > 30 && lost == 0,
                        "{lost} of {sent} to {path:?}, {round}"
                    );
                }
                say(b"moved");
                assert_eq!(network.inspect(&moved).defects, []);
                assert_eq!(network.inspect_host(std::slice::from_ref(&plan.spec)), []);
                guest.ping(BEYOND_IPV4.into(), PATIENCE).unwrap();
                guest.ping(BEYOND_IPV6.into(), PATIENCE).unwrap();
                let page = guest.fetch(SocketAddr::new(BEYOND_IPV4.into(), HTTP_PORT), PATIENCE);
                assert!(page.unwrap().contains(&HOST_IPV4.to_string()));
            }
        }
        // Slots of an older version have no qdiscs, which is no damage, and get them.
        let inside = format!("ip netns exec {} ", slot.netns_name);
        for (prefix, interface) in [
            ("", &*slot.host_interface),
            (&inside, "uplink0"),
            (&inside, "vmtap0"),
        ] {
            lab.run(&format!("{prefix}tc qdisc delete dev {interface} ingress"));
        }
        assert_eq!(network.inspect(&slot).defects, []);
        network
            .change_pool(&ebpf, Some(nft.spec.data_path))
            .unwrap();
        let moved = ebpf.slot(SlotNumber(0));
        let tenancy = tenancy(&network, &ebpf);
        network.move_slot(&moved, Some(&tenancy)).unwrap();
        network.change_pool(&ebpf, None).unwrap();
        assert_eq!(network.inspect(&moved).defects, []);
        guest.ping(BEYOND_IPV4.into(), PATIENCE).unwrap();
        drop(guest);
        tear_down(&network, &[moved]);
        network.remove_pool(&ebpf).unwrap();
        assert!(!lab.run("ip -o link").contains("sw"), "nothing is left");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_policy_changes_under_traffic() {
    lab::run(|_| {
        let _beyond = Beyond::attach().unwrap();
        for kind in EBPF_KINDS {
            let plan = web(kind, "{}");
            let network = prepare(&plan);
            let sandbox = Sandbox::start(&network, &plan, 0);
            let who = SocketAddr::new(BEYOND_IPV4.into(), ECHO_PORT);
            let speak = |patience| sandbox.guest.exchange_udp(who, b"ping", patience);
            let open = tenancy(&network, &plan);
            let text = r#"{"egress":{"rules":[{"action":"deny","prefixes":["203.0.113.0/24"],
                "ports":["udp/7"]}]}}"#;
            let closed = Tenancy {
                policy: network
                    .add_policy(&serde_json::from_str(text).unwrap())
                    .unwrap(),
                ..open
            };
            for _ in 0..3 {
                speak(PATIENCE).unwrap();
                network.set_policy(&sandbox.slot, &closed).unwrap();
                let before = sandbox.dropped(&network, DropReason::Policy);
                speak(Duration::from_millis(200)).unwrap_err();
                assert!(sandbox.dropped(&network, DropReason::Policy) > before);
                sandbox.guest.ping(BEYOND_IPV4.into(), PATIENCE).unwrap();
                network.set_policy(&sandbox.slot, &open).unwrap();
            }
            assert_eq!(network.inspect_tenancy(&sandbox.slot, Some(&open)), []);
            assert_eq!(
                network.inspect_tenancy(&sandbox.slot, Some(&closed)).len(),
                1
            );
            network.remove_policy(closed.policy);
            drop(sandbox.guest);
            tear_down(&network, &[sandbox.slot]);
            network.remove_pool(&plan).unwrap();
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn traffic_goes_on_while_nobody_is_there_and_when_somebody_comes_back() {
    lab::run(|_| {
        let _beyond = Beyond::attach().unwrap();
        for kind in EBPF_KINDS {
            let plan = web(kind, "{}");
            let network = prepare(&plan);
            let sandbox = Sandbox::start(&network, &plan, 0);
            let spare = plan.slot(SlotNumber(1));
            network.build(&spare).unwrap();
            let addresses = sandbox.clone_addresses();
            let pingers = addresses.map(Pinger::start);
            for _ in 0..3 {
                // As SIGKILL does: nothing is taken back.
                let after = KernelNetwork::open(INSTANCE).unwrap();
                after.add_pool(&plan).unwrap();
                let found = after.inventory().unwrap();
                assert_eq!(found.slots, [("web".to_owned(), 0), ("web".to_owned(), 1)]);
                let tenancy = tenancy(&after, &plan);
                after.adopt(&sandbox.slot, Some(&tenancy)).unwrap();
                after.adopt(&spare, None).unwrap();
                std::thread::sleep(Duration::from_millis(50));
                after.finish_adoption(&[tenancy.policy].into());
                assert_eq!(after.inspect_tenancy(&sandbox.slot, Some(&tenancy)), []);
                assert_eq!(after.inspect_tenancy(&spare, None), []);
                let wrong = after.repair(&sandbox.slot);
                assert!(
                    wrong.iter().all(|found| found.action == "repaired"),
                    "{wrong:?}"
                );
                assert_eq!(after.inspect(&sandbox.slot).defects, []);
                sandbox.guest.ping(BEYOND_IPV4.into(), PATIENCE).unwrap();
            }
            for pinger in pingers {
                let (sent, lost) = pinger.stop();
                assert!(sent > 30 && lost == 0, "{lost} of {sent} in a {kind} slot");
            }
            let slots = [sandbox.slot, spare];
            drop(sandbox.guest);
            tear_down(&network, &slots);
            network.remove_pool(&plan).unwrap();
        }
    });
}

/// A pool of the `xdp` data path.
fn xdp_pool() -> Plan {
    let mut spec = web("host", r#"{"uplink":"route"}"#).spec;
    spec.data_path = sandwire_api::slot::DataPath::Xdp;
    Plan::new(&INSTANCE.parse().unwrap(), &spec).unwrap()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn xdp_is_used_where_the_tap_is_proven_and_said_why_not_elsewhere() {
    lab::run(|lab| {
        let beyond = Beyond::attach().unwrap();
        let plan = xdp_pool();
        let network = prepare(&plan);
        beyond.route_through_host(IPV4).unwrap();
        let slot = plan.slot(SlotNumber(0));
        network.build(&slot).unwrap();
        let attached = lab.run(&format!("ip -d link show {}", slot.host_interface));
        assert!(attached.contains("prog/xdp"), "{attached}");
        let note = || network.inspect(&slot).data_path_note.unwrap_or_default();
        assert!(note().contains("nobody has the TAP open"), "{}", note());
        network.activate(&slot, &tenancy(&network, &plan)).unwrap();
        // As a VMM does that wants offloads.
        let opened = network.open_taps(&slot).unwrap();
        assert!(note().contains("virtio-net headers"), "{}", note());
        drop(opened);
        let guest = attach(&slot);
        // The lab's uplink is a veth, whose other end takes no frames from XDP.
        assert!(note().contains("uplink up0"), "{}", note());
        // As its entry says.
        let dump = "bpftool -j map dump pinned $(find /sys/fs/bpf/sandwire -name xdp_nics)";
        let known = command::shell(dump).unwrap();
        assert!(known.contains("key"), "{known}");
        for server in [IpAddr::from(BEYOND_IPV4)] {
            for _ in 0..5 {
                guest.ping(server, PATIENCE).unwrap();
            }
            let page = guest.fetch(SocketAddr::new(server, HTTP_PORT), PATIENCE);
            assert!(page.unwrap().contains("10.64.0.2"));
        }
        assert_eq!(network.inspect(&slot).defects, []);
        lab.run(&format!("ip link set dev {} xdp off", slot.host_interface));
        assert_eq!(network.inspect(&slot).defects.len(), 1);
        assert_eq!(network.repair(&slot)[0].action, "repaired");
        assert_eq!(network.inspect(&slot).defects, []);
        drop(guest);
        tear_down(&network, &[slot]);
        network.remove_pool(&plan).unwrap();
        let left = lab.run("ip -d link");
        assert!(!left.contains("xdp"), "{left}");
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

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_tap_s_name_that_is_taken_is_refused_and_left_alone() {
    lab::run(|lab| {
        let plan = web("host", "{}");
        let network = prepare(&plan);
        let slot = plan.slot(SlotNumber(0));
        for kind in ["bridge", "tap"] {
            let tap = &slot.host_interface;
            match kind {
                "tap" => lab.run(&format!("ip tuntap add {tap} mode tap vnet_hdr")),
                _ => lab.run(&format!("ip link add {tap} type bridge")),
            };
            let before = lab.snapshot();
            network.build(&slot).unwrap_err();
            lab.assert_unchanged(&before);
            lab.run(&format!("ip link delete {tap}"));
        }
        network.build(&slot).unwrap();
        assert_eq!(network.inspect(&slot).defects, []);
    });
}

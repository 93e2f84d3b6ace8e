//! Slots of the eBPF data path in a real kernel: netns slots and host slots alike. Guests are fake, the
//! rest is the kernel; the judges are `ip`, `tc`, sockets and a world beyond the uplink.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod fixture;

use std::{
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    path::Path,
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

fn http_get(target: SocketAddr) -> io::Result<String> {
    let mut stream = connect(target, PATIENCE)?;
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

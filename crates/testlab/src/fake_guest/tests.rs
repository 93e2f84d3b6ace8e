use std::net::IpAddr;

use super::*;
use crate::{host, http, lab, lab::Lab};

const SECOND: Duration = Duration::from_secs(1);

/// A TAP in the lab with the gateway's addresses, and a guest on it.
fn guest_on_a_tap(lab: &Lab) -> FakeGuest {
    lab.run("ip tuntap add vmtap0 mode tap vnet_hdr");
    lab.run("ip address add 192.168.241.1/29 dev vmtap0");
    lab.run("ip address add fd00:5eed::1/64 dev vmtap0 nodad");
    lab.run("ip link set vmtap0 up");
    let own = Path::new("/proc/self/ns/net");
    let guest = FakeGuest::attach(own, "vmtap0").unwrap();
    let server = SocketAddr::new(guest.network().ipv6.0.into(), 80);
    host::wait_for_server(server, 5 * SECOND).unwrap();
    guest
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_fake_guest_answers_like_a_real_one() {
    lab::run(|lab| {
        let guest = guest_on_a_tap(lab);
        for address in ["192.168.241.2", "fd00:5eed::2"] {
            lab.run(&format!("ping -c 3 -i 0.01 -W 1 {address}"));
            let ip: IpAddr = address.parse().unwrap();
            let stored = http::request(ip, 80, "PUT", "/", Some(address), SECOND).unwrap();
            assert_eq!(stored.status, 200);
            let read = http::request(ip, 80, "GET", "/", None, SECOND).unwrap();
            assert_eq!(read.body, address);
        }
        guest.detach().unwrap();
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_fake_guest_calls_out() {
    lab::run(|lab| {
        let guest = guest_on_a_tap(lab);
        let network = guest.network();
        host::serve_tcp(80, host::answer_http).unwrap();
        host::serve_udp(7, |packet, _| packet.to_vec()).unwrap();
        for (gateway, own) in [
            (
                IpAddr::from(network.ipv4_gateway),
                IpAddr::from(network.ipv4.0),
            ),
            (network.ipv6_gateway.into(), network.ipv6.0.into()),
        ] {
            guest.ping(gateway, SECOND).unwrap();
            let at = |port| SocketAddr::new(gateway, port);
            assert_eq!(guest.exchange_udp(at(7), b"abc", SECOND).unwrap(), b"abc");
            let page = guest.fetch(at(80), SECOND).unwrap();
            assert_eq!(page, format!("beyond: hello {own}\n"));
            let refused = guest.fetch(at(81), SECOND).unwrap_err().to_string();
            assert!(refused.contains("refused"), "{refused}");
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_answer_from_another_address_is_none() {
    lab::run(|lab| {
        let guest = guest_on_a_tap(lab);
        lab.run("ip address add 192.168.241.3/29 dev vmtap0");
        let [called, other] = ["192.168.241.1:9", "192.168.241.3:9"]
            .map(|address| std::net::UdpSocket::bind(address).unwrap());
        let target = called.local_addr().unwrap();
        std::thread::spawn(move || {
            let (_, caller) = called.recv_from(&mut [0; 16]).unwrap();
            other.send_to(b"it was me", caller).unwrap();
        });
        let ask = || guest.exchange_udp(target, b"?", 10 * SECOND);
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(ask)).unwrap_err();
        let said = panic.downcast::<String>().unwrap();
        assert!(said.contains("who answers isn't who was called"), "{said}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_forged_frame_arrives_as_it_was_made() {
    lab::run(|lab| {
        let guest = guest_on_a_tap(lab);
        lab.run("sysctl -q -w net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.vmtap0.rp_filter=0");
        let socket = std::net::UdpSocket::bind("192.168.241.1:9000").unwrap();
        socket.set_read_timeout(Some(SECOND)).unwrap();
        let link: serde_json::Value =
            serde_json::from_str(&lab.run("ip -j link show vmtap0")).unwrap();
        let gateway = link[0]["address"].as_str().unwrap();
        let mut mac = [0; 6];
        for (byte, pair) in mac.iter_mut().zip(gateway.split(':')) {
            *byte = u8::from_str_radix(pair, 16).unwrap();
        }
        let forged: SocketAddr = "192.168.241.5:1234".parse().unwrap();
        let target = socket.local_addr().unwrap();
        let frame = frame::udp(guest.network().mac, mac, forged, target, b"not me");
        guest.send_frame(&frame).unwrap();
        let mut packet = [0; 100];
        let (length, from) = socket.recv_from(&mut packet).unwrap();
        assert_eq!((&packet[..length], from), (&b"not me"[..], forged));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_fake_guest_whose_tap_is_deleted_says_so() {
    lab::run(|lab| {
        let guest = guest_on_a_tap(lab);
        lab.run("ip link delete vmtap0");
        let gateway = guest.network().ipv4_gateway.into();
        guest.ping(gateway, SECOND).unwrap_err();
        guest.detach().unwrap_err();
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_missing_tap_is_not_created() {
    lab::run(|lab| {
        FakeGuest::attach(Path::new("/proc/self/ns/net"), "vmtap0").unwrap_err();
        assert!(!lab.run("ip -o link").contains("vmtap0"));
    });
}

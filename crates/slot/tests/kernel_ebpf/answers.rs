//! Whom sandboxes may answer though they may not send there by themselves, while others take what they can of the room
//! for that.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream, UdpSocket},
};

use sandwire_slot::{
    kernel::{KernelNetwork, Settings},
    network::Network,
    plan::Plan,
};
use sandwire_testlab::{
    fake_guest::frame,
    host::{BEYOND_IPV4, Beyond, ECHO_PORT},
    lab,
};

use crate::fixture::{
    INSTANCE, ebpf_pool,
    sandbox::{GATEWAY_MAC, Sandbox},
    talk::{IN_VAIN, PATIENCE},
};

/// A network with room for few answers.
fn with_few_answers(plan: &Plan) -> KernelNetwork {
    let mut settings = Settings::new(INSTANCE);
    settings.ebpf.answers_max = 1024;
    let network = KernelNetwork::open_with(settings).unwrap();
    network.add_pool(plan).unwrap();
    network
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn nobody_has_others_forget_whom_they_answer() {
    lab::run(|_| {
        let beyond = Beyond::attach().unwrap();
        beyond.route_through_host("10.1.0.0/24").unwrap();
        beyond.route_through_host("10.2.0.0/24").unwrap();
        let policy = r#"{"uplink":"route","egress":{"default":"deny"}}"#;
        let closed = ebpf_pool("closed", "host", policy, "10.1.0.0/24", "fd00:1::/64");
        let policy = r#"{"uplink":"route","egress":{"rules":[{"action":"deny","prefixes":["192.0.2.0/24"]}]}}"#;
        let open = ebpf_pool("open", "host", policy, "10.2.0.0/24", "fd00:2::/64");
        let network = with_few_answers(&closed);
        network.add_pool(&open).unwrap();
        let victim = Sandbox::start(&network, &closed, 0);
        let called = Sandbox::start(&network, &closed, 1);
        let asking = Sandbox::start(&network, &open, 0);
        let echo = |sandbox: &Sandbox| SocketAddr::new(sandbox.clone_addresses()[0], 7);
        let [at_victim, at_called] = [&victim, &called].map(echo);
        let mut caller = beyond
            .inside(move || Ok(TcpStream::connect(at_victim)?))
            .unwrap();
        caller.set_read_timeout(Some(IN_VAIN * 4)).unwrap();
        let mut is_answered = || {
            caller.write_all(b"ping").unwrap();
            caller.read_exact(&mut [0; 4])
        };
        is_answered().unwrap();
        // Very many call one sandbox.
        let answered = beyond.inside(move || {
            let mut answered = 0;
            for port in 10_000..15_000 {
                let socket = UdpSocket::bind(("0.0.0.0", port))?;
                socket.set_read_timeout(Some(IN_VAIN))?;
                socket.send_to(b"call", at_called)?;
                // All of them have their answers, those of the last as well.
                answered += u32::from(socket.recv(&mut [0; 4]).is_ok());
            }
            Ok(answered)
        });
        assert_eq!(answered.unwrap(), 5000);
        is_answered().unwrap();
        // Another one asks very many, who answer.
        let known = asking.guest.network();
        for port in 10_000..15_000 {
            let source = SocketAddr::new(known.ipv4.0.into(), port);
            let target = SocketAddr::new(BEYOND_IPV4.into(), ECHO_PORT);
            let udp = frame::udp(known.mac, GATEWAY_MAC, source, target, b"ask");
            asking.guest.send_frame(&udp).unwrap();
        }
        let beyond_echo = SocketAddr::new(BEYOND_IPV4.into(), ECHO_PORT);
        asking
            .guest
            .exchange_udp(beyond_echo, b"last", PATIENCE)
            .unwrap();
        is_answered().unwrap();
    });
}

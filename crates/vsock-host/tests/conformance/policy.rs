//! What a guest may reach, and that it changes while it runs.

use std::{
    io::{Read, Write},
    net::TcpListener,
    os::unix::net::UnixListener,
    time::Duration,
};

use sandwire_api::vsock::{PortRange, VsockDestination, VsockPolicy, VsockRefusal, VsockRule};
use sandwire_vsock_guest::{GuestError, socket::State};
use sandwire_vsock_host::limits::Limits;

use crate::host::{
    Host, PORT, accept, clean, connected, eventually, policy, read_exact, read_line, rule, to_host,
    works,
};

#[test]
fn without_rules_nothing_is_reached() {
    let mut host = Host::new(1);
    let vm = host.vm_with(Limits::default(), VsockPolicy::default());
    let mut guest = vm.boot();
    let _listener = vm.service(PORT);
    for port in [0, 1, 22, PORT, 65_535, u32::MAX - 1] {
        let refused = guest.open_stream(port);
        assert!(matches!(refused, Err(GuestError::Reset)), "{refused:?}");
    }
    assert_eq!(vm.refused(VsockRefusal::Policy), 6);
    clean(&guest);
}

#[test]
fn a_rule_that_goes_resets_what_it_allowed_and_one_that_comes_allows() {
    let mut host = Host::new(1);
    let vm = host.vm_with(Limits::default(), to_host(&[PORT, PORT + 1]));
    let mut guest = vm.boot();
    let (going, mut going_peer) = connected(&vm, &mut guest);
    let listener = vm.service(PORT + 1);
    let staying = guest.open_stream(PORT + 1).expect("connecting");
    let mut staying_peer = accept(&listener);

    host.set_policy(&vm, to_host(&[PORT + 1, PORT + 2]));
    guest
        .wait_until("RST", |guest| guest.socket(going).state == State::Reset)
        .expect("RST");
    assert!(matches!(going_peer.read(&mut [0; 8]), Ok(0) | Err(_)));
    let refused = guest.open_stream(PORT);
    assert!(matches!(refused, Err(GuestError::Reset)), "{refused:?}");

    guest.send(staying, b"still").expect("sending");
    assert_eq!(read_exact(&mut staying_peer, 5), b"still");
    let listener = vm.service(PORT + 2);
    guest.open_stream(PORT + 2).expect("the new rule");
    accept(&listener);
    clean(&guest);
}

#[test]
fn what_the_host_opened_stays_whatever_the_policy() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    guest.listen(sandwire_vsock_guest::Kind::Stream, 5000);
    let mut client = vm.dial(5000);
    let socket = guest
        .accept(sandwire_vsock_guest::Kind::Stream, 5000)
        .expect("accepting");
    read_line(&mut client);
    host.set_policy(&vm, VsockPolicy::default());
    guest.run_for(Duration::from_millis(100)).expect("running");
    guest.send(socket, b"still").expect("sending");
    assert_eq!(read_exact(&mut client, 5), b"still");
    clean(&guest);
}

#[test]
fn a_destination_may_be_told_who_calls() {
    let mut host = Host::new(1);
    let rule = VsockRule {
        identity: true,
        ..rule(PORT, VsockDestination::Host)
    };
    let vm = host.vm_with(Limits::default(), policy([rule]));
    let mut guest = vm.boot();
    let listener = vm.service(PORT);
    let socket = guest.open_stream(PORT).expect("connecting");
    guest
        .send(socket, b"SANDWIRE/1 tenant=0\n")
        .expect("sending");
    let mut peer = accept(&listener);
    let expected = format!(
        "SANDWIRE/1 tenant=1000 lease={} cid=3 port={PORT}\n",
        vm.key.lease
    );
    assert_eq!(read_line(&mut peer), expected);
    assert_eq!(read_line(&mut peer), "SANDWIRE/1 tenant=0\n");
    clean(&guest);
}

#[test]
fn a_range_leads_each_port_to_its_own_socket() {
    let mut host = Host::new(1);
    let range = VsockRule {
        port: PortRange::new(5000, 5009).expect("a range"),
        to: VsockDestination::Host,
        identity: false,
    };
    let vm = host.vm_with(Limits::default(), policy([range]));
    let mut guest = vm.boot();
    for port in [5000, 5005, 5009] {
        let listener = vm.service(port);
        let socket = guest.open_stream(port).expect("connecting");
        let mut peer = accept(&listener);
        guest.send(socket, &port.to_le_bytes()).expect("sending");
        assert_eq!(read_exact(&mut peer, 4), port.to_le_bytes());
    }
    for port in [4999, 5010] {
        let refused = guest.open_stream(port);
        assert!(matches!(refused, Err(GuestError::Reset)), "{refused:?}");
    }
    clean(&guest);
}

#[test]
fn a_service_may_be_a_unix_socket_anywhere() {
    let mut host = Host::new(1);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("metrics.sock");
    let destination = VsockDestination::Unix {
        path: path.to_str().expect("text").to_owned(),
    };
    let vm = host.vm_with(Limits::default(), policy([rule(9100, destination)]));
    let mut guest = vm.boot();
    let listener = UnixListener::bind(&path).expect("listening");
    let socket = guest.open_stream(9100).expect("connecting");
    let mut peer = accept(&listener);
    guest.send(socket, b"metrics").expect("sending");
    assert_eq!(read_exact(&mut peer, 7), b"metrics");
    clean(&guest);
}

#[test]
fn a_service_may_be_reached_by_tcp() {
    let mut host = Host::new(1);
    let listener = TcpListener::bind("127.0.0.1:0").expect("listening");
    let destination = VsockDestination::Tcp {
        address: listener.local_addr().expect("an address"),
    };
    let vm = host.vm_with(Limits::default(), policy([rule(80, destination)]));
    let mut guest = vm.boot();
    let socket = guest.open_stream(80).expect("connecting");
    let (mut peer, _) = listener.accept().expect("accepting");
    guest.send(socket, b"GET").expect("sending");
    let mut got = [0; 3];
    peer.read_exact(&mut got).expect("reading");
    assert_eq!(&got, b"GET");
    peer.write_all(b"200").expect("writing");
    drop(peer);
    assert_eq!(guest.receive_to_end(socket).expect("the answer"), b"200");
    clean(&guest);
}

#[test]
fn a_service_that_accepts_nobody_is_given_up_in_time() {
    let mut host = Host::new(1);
    let limits = Limits {
        connect_timeout: Duration::from_millis(300),
        ..Limits::default()
    };
    let vm = host.vm_with(limits, to_host(&[PORT]));
    let mut guest = vm.boot();
    // A backlog of one, filled by ourselves.
    let listener = crate::host::short_listener(&vm.port_socket(PORT));
    let mut filling = Vec::new();
    while let Some(client) = crate::host::connect_now(&vm.port_socket(PORT)) {
        filling.push(client);
        assert!(filling.len() < 100, "the backlog has no end");
    }
    let refused = guest.open_stream(PORT);
    assert!(matches!(refused, Err(GuestError::Reset)), "{refused:?}");
    eventually("it to be counted", || {
        vm.refused(VsockRefusal::TimedOut) + vm.refused(VsockRefusal::Unreachable) == 1
    });
    vm.wait_for_connections(0);
    drop(listener);
    drop(filling);
    works(&vm, &mut guest);
    clean(&guest);
}

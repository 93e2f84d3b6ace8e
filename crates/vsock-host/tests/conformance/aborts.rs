//! A TCP service is told of a connection that was broken off by a reset, and of an end by an end, before which all arrives.

use std::{
    io::{ErrorKind, Read},
    net::{TcpListener, TcpStream},
    time::Duration,
};

use sandwire_api::vsock::{VsockDestination, VsockPolicy};
use sandwire_vsock_guest::{Content, Guest, Socket, packet::SHUTDOWN_SEND, socket::State};
use sandwire_vsock_host::limits::Limits;

use crate::host::{Host, PATIENCE, PORT, Vm, clean, eventually, policy, rule};

/// More than a TCP socket takes at once.
const MUCH: usize = 16 << 20;

struct World {
    host: Host,
    vm: Vm,
    listener: TcpListener,
}

impl World {
    fn new(limits: Limits) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a TCP service");
        let address = listener.local_addr().expect("its address");
        let mut host = Host::new(1);
        let rules = policy([rule(PORT, VsockDestination::Tcp { address })]);
        let vm = host.vm_with(limits, rules);
        Self { host, vm, listener }
    }

    fn open(&self, guest: &mut Guest) -> (Socket, TcpStream) {
        let socket = guest.open_stream(PORT).expect("connecting");
        let (stream, _) = self.listener.accept().expect("its other side");
        stream.set_read_timeout(Some(PATIENCE)).expect("a time-out");
        (socket, stream)
    }

    /// A connection on which the service has read all that was sent.
    fn begun(&self, guest: &mut Guest) -> (Socket, TcpStream) {
        let (socket, mut stream) = self.open(guest);
        guest.send(socket, b"half of it").expect("sending");
        stream.read_exact(&mut [0; 10]).expect("reading");
        (socket, stream)
    }
}

fn assert_reset(mut stream: TcpStream) {
    let heard = stream.read(&mut [0; 8]).map_err(|error| error.kind());
    assert_eq!(heard, Err(ErrorKind::ConnectionReset));
}

#[test]
fn a_guests_rst_is_a_reset() {
    let world = World::new(Limits::default());
    let mut guest = world.vm.boot();
    let (socket, stream) = world.begun(&mut guest);
    guest.reset(socket);
    assert_reset(stream);
    world.vm.wait_for_connections(0);
    clean(&guest);
}

#[test]
fn a_rule_that_goes_is_a_reset() {
    let world = World::new(Limits::default());
    let mut guest = world.vm.boot();
    let (socket, stream) = world.begun(&mut guest);
    world.host.set_policy(&world.vm, VsockPolicy::default());
    guest
        .wait_until("RST", |guest| guest.socket(socket).state == State::Reset)
        .expect("RST");
    assert_reset(stream);
    clean(&guest);
}

#[test]
fn a_vmm_that_ends_is_a_reset() {
    let world = World::new(Limits::default());
    let mut guest = world.vm.boot();
    let (_, stream) = world.begun(&mut guest);
    drop(guest);
    assert_reset(stream);
    world.vm.wait_for_connections(0);
}

#[test]
fn a_guest_that_is_removed_is_a_reset() {
    let world = World::new(Limits::default());
    let mut guest = world.vm.boot();
    let (_, stream) = world.begun(&mut guest);
    world.host.remove(&world.vm);
    assert_reset(stream);
}

/// The guest has ended its side, and a withdrawn rule takes away what of it still waits.
#[test]
fn what_is_taken_away_behind_an_end_is_a_reset() {
    let limits = Limits {
        connection_bytes: 64 << 20,
        guest_bytes: 256 << 20,
        ..Limits::default()
    };
    let world = World::new(limits);
    let mut guest = world.vm.boot();
    let (socket, mut stream) = world.open(&mut guest);
    let block = vec![7; 64 * 1024];
    while world.vm.traffic().buffered_bytes == 0 {
        guest.try_send(socket, &block).expect("sending");
        guest.run_for(Duration::from_millis(1)).expect("running");
    }
    guest.shut_down(socket, SHUTDOWN_SEND);
    guest.run_for(Duration::from_millis(10)).expect("running");
    world.host.set_policy(&world.vm, VsockPolicy::default());
    guest
        .wait_until("RST", |guest| guest.socket(socket).state == State::Reset)
        .expect("RST");
    let read = stream.read_to_end(&mut Vec::new());
    let heard = read.map_err(|error| error.kind());
    assert_eq!(heard, Err(ErrorKind::ConnectionReset));
    clean(&guest);
}

#[test]
fn before_an_end_all_arrives_however_late_it_is_read_and_whatever_comes_after_it() {
    let world = World::new(Limits::default());
    let content = Content::new(3);
    let all = content.take(MUCH);
    for ends in 0..4 {
        let mut guest = world.vm.boot();
        let (socket, mut stream) = world.open(&mut guest);
        let reader = std::thread::spawn(move || {
            // Late, so that much is in the kernel and the service when the guest ends.
            std::thread::sleep(Duration::from_millis(50));
            let mut got = Vec::new();
            stream.read_to_end(&mut got).map(|_| got)
        });
        guest.send(socket, &all).expect("sending");
        guest.shut_down(socket, SHUTDOWN_SEND);
        eventually("the device to take it all", || {
            guest.poll();
            guest.transport().in_flight() == 0
        });
        match ends {
            0 => {}
            1 => guest.close(socket).expect("closing"),
            2 => guest.reset(socket),
            _ => drop(guest),
        }
        let got = reader.join().expect("the reader").expect("an end");
        assert_eq!((got.len(), content.wrong(0, &got)), (MUCH, None), "{ends}");
    }
}

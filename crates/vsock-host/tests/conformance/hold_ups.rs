//! VMMs that hand over descriptors at which somebody could wait for ever.
//!
//! One worker serves the hostile guest and its neighbour, who must not notice.

use std::{
    net::{TcpListener, TcpStream},
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::Path,
    time::Duration,
};

use rustix::{
    event::epoll,
    fs::{OFlags, fcntl_setfl},
    net::sockopt::set_socket_linger,
};
use sandwire_vsock_guest::{
    Guest,
    wire::{Message, Region, Wire, event, request, session},
};
use sandwire_vsock_host::{limits::Limits, listener::refuse_descriptors, worker::VmError};

use crate::host::{Host, PATIENCE, PORT, Vm, accept, eventually, works};

/// SET_VRING_ERR, whose descriptor nobody has a use for.
const SET_VRING_ERR: u32 = 14;
/// The ring of packets from the guest.
const TRANSMIT: u64 = 1;

struct Scene {
    host: Host,
    hostile: Vm,
    neighbour: Vm,
    guest: Guest,
    region: Region,
}

impl Scene {
    fn new() -> Self {
        let mut host = Host::new(1);
        let (hostile, neighbour) = (host.vm(), host.vm());
        let guest = neighbour.boot();
        let region = Region::new(0, 1 << 20).expect("memory");
        Self {
            host,
            hostile,
            neighbour,
            guest,
            region,
        }
    }

    fn wire(&self) -> Wire {
        Wire::connect(&self.hostile.vhost_socket(), PATIENCE).expect("connecting")
    }

    fn neighbour_works(&mut self) {
        for _ in 0..3 {
            works(&self.neighbour, &mut self.guest);
        }
    }
}

#[test]
fn an_interrupt_that_is_full_and_blocks() {
    let mut scene = Scene::new();
    let mut wire = scene.wire();
    let messages = session(&scene.region, 256).expect("messages");
    for message in &messages[..messages.len() - 4] {
        wire.say(message).expect("the back end goes along");
    }
    wire.say(&Message::new(request::GET_QUEUE_NUM, &[]))
        .expect("all of it is served");
    let of = |number: u32| {
        let of_ring = |message: &&Message| {
            message.bytes[..4] == number.to_le_bytes()
                && message.bytes[12..20] == TRANSMIT.to_le_bytes()
        };
        &messages.iter().find(of_ring).expect("there is one").fds[0]
    };
    let (call, kick) = (of(request::SET_VRING_CALL), of(request::SET_VRING_KICK));
    rustix::io::read(call, &mut [0; 8]).expect("it was rung when it was handed over");
    fcntl_setfl(call, OFlags::empty()).expect("making it block");
    rustix::io::write(call, &(u64::MAX - 1).to_ne_bytes()).expect("filling it");
    // A chain of one empty descriptor, the first: it is given back, and the guest told so.
    let (available, used) = (0x1_8000, 0x1_c000);
    rustix::io::pwrite(&scene.region.file, &1_u16.to_le_bytes(), available + 2).expect("a chain");
    rustix::io::write(kick, &1_u64.to_ne_bytes()).expect("a kick");
    eventually("the chain to be given back", || {
        let mut index = [0; 2];
        rustix::io::pread(&scene.region.file, &mut index, used + 2).expect("reading");
        u16::from_le_bytes(index) == 1
    });
    scene.neighbour_works();
    // Else what waits there waits for ever, and the test with it.
    rustix::io::read(call, &mut [0; 8]).expect("emptying it");
}

/// A connection whose end takes as long as the other side likes: it has bytes to send, and lingers.
fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("listening");
    let address = listener.local_addr().expect("its address");
    let stream = TcpStream::connect(address).expect("connecting");
    let (peer, _) = listener.accept().expect("a connection");
    stream.set_nonblocking(true).expect("not waiting here");
    while std::io::Write::write(&mut &stream, &[0; 1 << 16]).is_ok() {}
    stream.set_nonblocking(false).expect("waiting");
    set_socket_linger(&stream, Some(Duration::from_secs(60))).expect("lingering");
    (stream.into(), peer)
}

#[test]
fn a_descriptor_whose_close_waits() {
    let mut scene = Scene::new();
    let served = [
        request::SET_VRING_CALL,
        SET_VRING_ERR,
        request::SET_VRING_KICK,
    ];
    let mut peers = Vec::new();
    for (number, part) in served
        .into_iter()
        .map(|number| (number, 20))
        .chain([(SET_VRING_ERR, 5), (SET_VRING_ERR, 13)])
    {
        let (fd, peer) = lingering();
        peers.push(peer);
        let mut wire = scene.wire();
        let message = Message::words(number, &[0]).with(fd);
        wire.write(&message, part).expect("saying it");
        forget(message);
        drop(wire);
        scene.neighbour_works();
    }
    // Somebody who connects while another VMM is there is turned away, with what it sent.
    let third = scene.host.vm();
    let _vmm = third.boot();
    let (fd, peer) = lingering();
    let mut wire = Wire::connect(&third.vhost_socket(), PATIENCE).expect("connecting");
    let message = Message::words(SET_VRING_ERR, &[0]).with(fd);
    // It may have been turned away already.
    let _ = wire.write(&message, 20);
    forget(message);
    drop(wire);
    scene.neighbour_works();
    // A guest whose VMM did such a thing waits until all of it is closed.
    drop((peers, peer));
    works(&scene.hostile, &mut scene.hostile.boot());
}

/// Connects, says something with a descriptor whose close waits, and leaves it at that.
fn leave(socket: &Path) -> (Wire, TcpStream) {
    let (fd, peer) = lingering();
    let mut wire = Wire::connect(socket, PATIENCE).expect("connecting");
    let message = Message::words(SET_VRING_ERR, &[0]).with(fd);
    wire.write(&message, 20).expect("saying it");
    forget(message);
    (wire, peer)
}

/// Drops what was said in a thread that may wait: the other side may have closed its descriptor already.
fn forget(message: Message) {
    std::thread::spawn(move || drop(message));
}

#[test]
fn a_guest_that_is_removed_while_somebody_waits_to_be_accepted() {
    let mut scene = Scene::new();
    let socket = scene.hostile.vhost_socket();
    let (mut first, peer) = leave(&socket);
    assert!(first.hung_up(), "it is let go");
    // As long as what that one left isn't closed, nobody else is accepted.
    let waiting: Vec<_> = (0..3).map(|_| leave(&socket)).collect();
    scene.host.remove(&scene.hostile);
    scene.neighbour_works();
    drop((peer, waiting));
}

#[test]
fn a_guest_that_no_worker_takes_while_somebody_waits_to_be_accepted() {
    let mut scene = Scene::new();
    let folder = scene.hostile.folder.join("another");
    std::fs::create_dir(&folder).expect("a folder");
    let twin = Vm {
        key: scene.hostile.key.clone(),
        folder,
        counters: scene.hostile.counters.clone(),
        worker: scene.hostile.worker.clone(),
    };
    let setup = twin.setup(Limits::default());
    let waiting = leave(&twin.vhost_socket());
    let refused = twin.ask_to_serve(setup).expect_err("it is served already");
    assert!(matches!(refused, VmError::Exists { .. }), "{refused}");
    scene.neighbour_works();
    drop(waiting);
}

#[test]
fn a_descriptor_from_a_client_or_a_service_of_the_host() {
    let mut scene = Scene::new();
    let mut guest = scene.hostile.boot();
    let call = Message {
        bytes: b"CONNECT 5\n".to_vec(),
        fds: Vec::new(),
        answered: false,
    };
    // What can only be refused by the kernel.
    let (one, _other) = UnixStream::pair().expect("a pair");
    let can_refuse = refuse_descriptors(&one);
    let mut client = UnixStream::connect(scene.hostile.stream_socket()).expect("connecting");
    let (fd, peer) = if can_refuse {
        let (fd, peer) = lingering();
        (fd, Some(peer))
    } else {
        (event().expect("an eventfd"), None)
    };
    let call = call.with(fd);
    let mut wire = Wire::from(client.try_clone().expect("a descriptor"));
    let refused = wire.write(&call, call.bytes.len()).is_err();
    // The last one to close it isn't to be this thread.
    drop(peer);
    assert_eq!(refused, can_refuse);
    if refused {
        std::io::Write::write_all(&mut client, &call.bytes).expect("without it");
    }
    scene.neighbour_works();
    works(&scene.hostile, &mut guest);
    // The service that the guest reaches says something.
    std::fs::remove_file(scene.hostile.port_socket(PORT)).expect("removing what is left");
    let listener = scene.hostile.service(PORT);
    let socket = guest.open_stream(PORT).expect("connecting");
    let said = Message {
        bytes: b"x".to_vec(),
        fds: vec![event().expect("an eventfd")],
        answered: false,
    };
    let written = Wire::from(accept(&listener)).write(&said, 1);
    assert_eq!(written.is_err(), can_refuse);
    guest.close(socket).expect("closing");
}

#[test]
fn memory_where_an_eventfd_belongs() {
    let mut scene = Scene::new();
    for number in [
        request::SET_VRING_CALL,
        request::SET_VRING_KICK,
        SET_VRING_ERR,
    ] {
        let mut wire = scene.wire();
        // All that comes before is right.
        let messages = session(&scene.region, 256).expect("messages");
        for message in &messages[..messages.len() - 4] {
            wire.say(message).expect("the back end goes along");
        }
        wire.say(&Message::new(request::GET_QUEUE_NUM, &[]))
            .expect("all of it is served");
        let memory = Region::new(0, 1 << 20).expect("memory").file;
        let message = Message::words(number, &[TRANSMIT]).with(memory);
        wire.write(&message, 20).expect("saying it");
        assert!(wire.hung_up(), "it is taken");
        scene.neighbour_works();
    }
    works(&scene.hostile, &mut scene.hostile.boot());
}

#[test]
fn descriptors_that_no_vmm_has_a_reason_for() {
    let mut scene = Scene::new();
    let (reader, _writer) = rustix::pipe::pipe().expect("a pipe");
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).expect("an epoll instance");
    let null = std::fs::File::open("/dev/null").expect("opening it");
    for fd in [reader, epoll, null.into()] {
        let mut wire = scene.wire();
        let message = Message::words(request::SET_VRING_CALL, &[0]).with(fd);
        wire.write(&message, 20).expect("saying it");
        assert!(wire.hung_up(), "it is taken");
        scene.neighbour_works();
    }
    works(&scene.hostile, &mut scene.hostile.boot());
}

//! Guests that no worker serves: the test does, round by round, and looks in between.

use std::{
    net::{TcpListener, TcpStream},
    os::fd::AsRawFd,
};

use sandwire_vsock_guest::{Socket, transport::RECEIVE};

use super::*;

#[test]
fn connections_that_come_and_go_unheard_leave_nothing_in_the_queues() {
    let lab = Lab::new();
    let (_machine, setup) = lab.prepare("web", vec![to_host(SERVICE)], Limits::default());
    let mut context = lab.context();
    let mut vm = Vm::new(setup, 0, &context).expect("a guest");
    let transport = Transport::new(3);
    // Nobody listens there: RST is due for each, and the guest offers no buffer for it.
    let open = |vm: &mut Vm, context: &mut Context, guest_port| {
        let key = Key {
            guest_port,
            peer_cid: HOST_CID,
            peer_port: SERVICE,
            kind: VsockType::Stream,
        };
        vm.open_from_guest(&Header::default(), key, &transport, context);
        vm.by_key.get(&key).copied().expect("it waits")
    };
    open(&mut vm, &mut context, 1);
    for guest_port in 2..1000 {
        let number = open(&mut vm, &mut context, guest_port);
        let flow = vm.flows.get_mut(number).expect("it waits");
        flow.connection.from_guest(Operation::Reset, 0, 0);
        vm.settle(number, &mut context);
    }
    assert_eq!((vm.flows.len(), vm.control.len()), (1, 1));
    vm.close(&mut context);
}

#[test]
fn connections_that_are_left_all_at_once_leave_the_queues_and_the_others_keep_their_places() {
    const EACH: u32 = 200;
    let lab = Lab::new();
    let (machine, setup) = lab.prepare("web", vec![to_host(1), to_host(2)], Limits::default());
    let _listener = machine.service(1);
    let mut context = lab.context();
    let mut vm = Vm::new(setup, 0, &context).expect("a guest");
    let transport = Transport::new(3);
    // The guest offers no buffer to be told: of each to port 1 that it goes on, of each to port 2 that it is refused.
    for guest_port in 0..EACH {
        for peer_port in [1, 2] {
            let key = Key {
                guest_port,
                peer_cid: HOST_CID,
                peer_port,
                kind: VsockType::Stream,
            };
            vm.open_from_guest(&Header::default(), key, &transport, &mut context);
        }
    }
    assert_eq!((vm.flows.len(), vm.control.len()), (400, 400));
    vm.guest_left(Connection::is_established, &mut context);
    let left: Vec<(u32, u32)> = vm
        .control
        .iter()
        .filter_map(|number| vm.flows.get(*number))
        .map(|flow| (flow.key.guest_port, flow.key.peer_port))
        .collect();
    assert!(left.into_iter().eq((0..EACH).map(|port| (port, 2))));
    assert_eq!((vm.flows.len(), vm.by_key.len()), (200, 200));
    vm.guest_left(|_| true, &mut context);
    assert!(vm.flows.is_empty() && vm.control.is_empty() && vm.by_key.is_empty());
    vm.close(&mut context);
}

/// Serves a guest until it has done something, as a worker would.
fn serve<T>(vm: &mut Vm, context: &mut Context, guest: thread::JoinHandle<T>) -> T {
    let mut events: Vec<epoll::Event> = Vec::with_capacity(64);
    while !guest.is_finished() {
        events.clear();
        let soon = crate::readiness::timespec(Duration::from_millis(10));
        let room = rustix::buffer::spare_capacity(&mut events);
        epoll::wait(&context.epoll, room, Some(&soon)).expect("events");
        context.round += 1;
        for event in &events {
            match Token::unpack(event.data.u64()).expect("a token") {
                Token::VmmListener(_) => vm.accept_vmm(context),
                Token::FrontEnd(_) => vm.vmm_is_ready(context),
                Token::Kick(_, 0) => vm.kicked_to_guest(context),
                Token::Kick(..) => vm.serve_from_guest(context),
                Token::Flow(_, number) => vm.flow_is_ready(number, event.flags, context),
                token => panic!("{token:?}"),
            }
        }
    }
    guest.join().expect("the guest")
}

/// What the kernel has received of that TCP connection, in packets with data.
fn segments(stream: &TcpStream) -> u32 {
    /// Where `tcpi_data_segs_in` is in `struct tcp_info`.
    const PLACE: usize = 152;
    let mut info = [0_u8; 256];
    let mut length = libc::socklen_t::try_from(info.len()).expect("short");
    // SAFETY: the kernel writes no more than `length` bytes, for which there is room.
    let done = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    assert!(done == 0 && length as usize >= PLACE + 4);
    u32::from_ne_bytes(info[PLACE..PLACE + 4].try_into().expect("four bytes"))
}

/// How often this thread has read.
fn reads() -> u64 {
    let counters = fs::read_to_string("/proc/thread-self/io").expect("the kernel's account");
    let mut lines = counters.lines();
    let reads = lines.find_map(|line| line.strip_prefix("syscr: "));
    reads
        .and_then(|reads| reads.parse().ok())
        .expect("a number")
}

/// TCP makes a packet of each write, as it isn't to wait for more.
#[test]
fn small_packets_that_came_together_are_written_in_one_call_and_many_are_filled_by_one() {
    let lab = Lab::new();
    let service = TcpListener::bind("127.0.0.1:0").expect("a service");
    let address = service.local_addr().expect("its address");
    let rule = VsockRule {
        to: VsockDestination::Tcp { address },
        ..to_host(SERVICE)
    };
    let (machine, setup) = lab.prepare("web", vec![rule], Limits::default());
    let mut context = lab.context();
    let mut vm = Vm::new(setup, 0, &context).expect("a guest");
    let path = machine.folder.join("vhost.sock");
    let guest = thread::spawn(move || {
        let mut guest = Guest::connect(&Settings::default(), &path).expect("a guest");
        let socket = guest.open_stream(SERVICE).expect("connecting");
        (guest, socket)
    });
    let (mut guest, socket) = serve(&mut vm, &mut context, guest);
    let (mut called, _) = service.accept().expect("a connection");
    let mut sent = 0;
    while let length @ 1.. = guest.try_send(socket, &[7; 100]).expect("sending") {
        sent += length;
    }
    assert!(sent >= 16 * 100, "{sent} bytes in packets of 100");
    vm.serve_from_guest(&mut context);
    let mut got = vec![0; sent];
    called.read_exact(&mut got).expect("all of it");
    assert_eq!(segments(&called), 1, "for {sent} bytes in packets of 100");

    called.write_all(&vec![7; 64 * 1024]).expect("writing");
    let number = vm.flows.numbers()[0];
    let traffic = || machine.counters.snapshot();
    let (packets, bytes) = (traffic().ingress_packets, traffic().ingress_bytes);
    let before = reads();
    vm.flow_is_ready(number, EventFlags::IN, &mut context);
    let reads = reads() - before;
    let traffic = traffic();
    assert_eq!(traffic.ingress_bytes - bytes, 64 * 1024);
    let packets = traffic.ingress_packets - packets;
    assert!(packets >= 16, "{packets} packets");
    assert!(reads <= 8, "{reads} reads for {packets} packets");
    vm.close(&mut context);
}

#[test]
fn connections_that_are_ready_at_once_share_one_turn_of_their_guest() {
    const CONNECTIONS: usize = 24;
    let lab = Lab::new();
    let (machine, setup) = lab.prepare("web", vec![to_host(SERVICE)], Limits::default());
    let listener = machine.service(SERVICE);
    let mut context = lab.context();
    let mut vm = Vm::new(setup, 0, &context).expect("a guest");
    let path = machine.folder.join("vhost.sock");
    let guest = thread::spawn(move || {
        let settings = Settings {
            memory: vec![(0, 64 << 20)],
            receive_bytes: 32 * 1024,
            ..Settings::default()
        };
        let mut guest = Guest::connect(&settings, &path).expect("a guest");
        for _ in 0..CONNECTIONS {
            guest.open_stream(SERVICE).expect("connecting");
        }
        guest
    });
    let _guest = serve(&mut vm, &mut context, guest);
    let mut written = 0;
    let _services: Vec<_> = (0..CONNECTIONS)
        .map(|_| {
            let (mut service, _) = listener.accept().expect("a connection");
            service.set_nonblocking(true).expect("not waiting here");
            while let Ok(bytes) = service.write(&[7; 4096]) {
                written += bytes as u64;
            }
            service
        })
        .collect();
    assert!(written > 3 << 20, "{written} bytes are little");
    let (mut before, mut rounds) = (0, 0);
    while before < written {
        context.round += 1;
        if rounds == 0 {
            for number in vm.flows.numbers() {
                vm.flow_is_ready(number, EventFlags::IN, &mut context);
            }
        } else if !std::mem::take(&mut context.again).is_empty() {
            vm.serve_from_guest(&mut context);
        }
        let after = machine.counters.snapshot().ingress_bytes;
        // A connection that has begun goes on.
        assert!(after - before <= 5 << 18, "{} bytes in one", after - before);
        assert!(after != before, "{after} of {written} bytes");
        (before, rounds) = (after, rounds + 1);
    }
    vm.close(&mut context);
}

/// A guest with a stream to a service of the host.
struct Streaming {
    machine: Machine,
    context: Context,
    vm: Vm,
    guest: Guest,
    socket: Socket,
    service: UnixStream,
}

impl Streaming {
    fn new(lab: &Lab) -> Self {
        let (machine, setup) = lab.prepare("web", vec![to_host(SERVICE)], Limits::default());
        let listener = machine.service(SERVICE);
        let mut context = lab.context();
        let mut vm = Vm::new(setup, 0, &context).expect("a guest");
        let path = machine.folder.join("vhost.sock");
        let guest = thread::spawn(move || {
            let mut guest = Guest::connect(&Settings::default(), &path).expect("a guest");
            let socket = guest.open_stream(SERVICE).expect("connecting");
            (guest, socket)
        });
        let (guest, socket) = serve(&mut vm, &mut context, guest);
        let (service, _) = listener.accept().expect("a connection");
        Self {
            machine,
            context,
            vm,
            guest,
            socket,
            service,
        }
    }
}

#[test]
fn what_waits_when_a_stream_is_promised_more_goes_into_the_room_that_its_socket_has_then() {
    const FIRST: usize = 64 * 1024;
    let lab = Lab::new();
    let Streaming {
        machine,
        mut context,
        mut vm,
        mut guest,
        socket,
        service: _unread,
    } = Streaming::new(&lab);
    let mut sends = |vm: &mut Vm, bytes: usize| {
        guest.poll();
        let sent = guest.try_send(socket, &vec![7; bytes]);
        assert_eq!(sent.expect("sending"), bytes);
        vm.serve_from_guest(&mut context);
        let number = vm.flows.numbers()[0];
        let promise = vm.flows.get(number).expect("the stream").promise as usize;
        (promise, machine.counters.snapshot().buffered_bytes)
    };
    // Never at the end of what it may send, it is promised no more; and the socket fills.
    for _ in 0..3 {
        assert_eq!(sends(&mut vm, FIRST / 2), (FIRST, 0));
    }
    // Neither the socket as it was takes all of this, nor is it the last time that more is promised.
    let (promise, waiting) = sends(&mut vm, FIRST);
    assert!(promise > FIRST, "{promise}");
    assert_eq!(waiting, 0);
    vm.close(&mut context);
}

#[test]
fn packets_of_a_guest_that_can_t_be_answered_keep_no_worker_awake() {
    let lab = Lab::new();
    let Streaming {
        machine: _machine,
        mut context,
        mut vm,
        mut guest,
        socket,
        mut service,
    } = Streaming::new(&lab);
    let (ring, memory) = guest.transport().ring(RECEIVE);
    let index = ring.next_available();
    ring.set_available_index(memory, index.wrapping_add(5000));
    // It is looked at only for what is to go there.
    service.write_all(b"x").expect("sending");
    let number = vm.flows.numbers()[0];
    vm.flow_is_ready(number, epoll::EventFlags::IN, &mut context);
    assert!(lock(&vm.transport).is_lost());
    assert_eq!(guest.try_send(socket, b"x").expect("sending"), 1);
    guest.kick();
    assert!(!vm.has_packets(), "they would be looked at for good");
    vm.close(&mut context);
}

#[test]
fn a_guest_in_full_flow_needn_t_kick_until_its_worker_sleeps() {
    const MUCH: usize = 64 * 1024;
    let lab = Lab::new();
    let Streaming {
        machine: _machine,
        mut context,
        mut vm,
        mut guest,
        socket,
        mut service,
    } = Streaming::new(&lab);
    let mut received = vec![0; MUCH];
    // Sends so much; how often the guest has kicked for that.
    let mut sends = |bytes: usize| {
        guest.poll();
        let before = guest.transport().kicks_sent();
        assert_eq!(
            guest.try_send(socket, &vec![7; bytes]).expect("sending"),
            bytes
        );
        guest.kick();
        guest.transport().kicks_sent() - before
    };
    let mut arrives = |bytes: usize| {
        service
            .read_exact(&mut received[..bytes])
            .expect("all of it");
    };
    assert_eq!(sends(MUCH), 1, "the worker sleeps");
    vm.serve_from_guest(&mut context);
    arrives(MUCH);
    assert!(context.awake.contains(0));
    assert_eq!(sends(1), 0);
    assert!(vm.has_packets(), "that is seen without a kick");
    assert!(vm.ask_for_kicks(), "and in time before the worker sleeps");
    vm.serve_from_guest(&mut context);
    assert_eq!(context.awake.take_beyond(0), Some(0));
    assert!(!vm.ask_for_kicks());
    assert_eq!(sends(1), 1);
    vm.serve_from_guest(&mut context);
    assert_eq!(sends(1), 1, "so little is nothing to stay awake for");
    vm.serve_from_guest(&mut context);
    arrives(3);
    vm.close(&mut context);
}

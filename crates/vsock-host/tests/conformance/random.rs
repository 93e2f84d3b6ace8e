//! Guests that do anything in any order. Whatever they do: the worker neither hangs nor panics, what is promised
//! is given back, and a neighbour on the same worker goes on.

use std::{
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    time::Duration,
};

use proptest::prelude::*;
use sandwire_vsock_guest::{
    Guest, Header, Kind, Operation, Settings, Socket, TransmitLayout,
    packet::{HOST_CID, PAYLOAD_BYTES_MAX},
    ring::Descriptor,
    transport::{RECEIVE, TRANSMIT},
};
use sandwire_vsock_host::limits::Limits;

use crate::host::{Host, PORT, Vm, clean, eventually, to_host, works};

/// One thing that a guest or somebody of the host does.
#[derive(Clone, Debug)]
enum Step {
    Open(Kind, u32),
    Send(usize, usize),
    SendMessage(usize, usize, bool),
    Receive(usize, usize),
    ShutDown(usize, u32),
    Reset(usize),
    Close(usize),
    Credit(usize, u32),
    /// Any header, with so much payload.
    Packet(Box<Header>, usize),
    /// A header of a connection that there is, with another operation, flags, length and credit.
    Twisted(usize, u16, u32, u32, u32),
    Accept,
    HostWrite(usize, usize),
    HostRead(usize),
    HostHalfClose(usize, bool),
    HostClose(usize),
    Dial(u32, Vec<u8>),
    Policy(bool),
    Wait(u64),
    StopAndGo,
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![Just(Kind::Stream), Just(Kind::Seqpacket)]
}

fn header() -> impl Strategy<Value = Box<Header>> {
    let odd_cid = prop_oneof![Just(0), Just(1), Just(2), Just(3), Just(4), any::<u64>()];
    let port = prop_oneof![Just(PORT), Just(0x4000_0000), Just(5000), any::<u32>()];
    (
        prop_oneof![4 => Just(3), 1 => odd_cid.clone()],
        prop_oneof![4 => Just(HOST_CID), 1 => odd_cid],
        port.clone(),
        port,
        prop_oneof![Just(0), 0..70_000u32, any::<u32>()],
        prop_oneof![4 => 1..3u16, 1 => any::<u16>()],
        prop_oneof![4 => 0..9u16, 1 => any::<u16>()],
        prop_oneof![4 => 0..4u32, 1 => any::<u32>()],
        any::<u32>(),
        any::<u32>(),
    )
        .prop_map(
            |(src_cid, dst_cid, src_port, dst_port, len, kind, op, flags, buf_alloc, fwd_cnt)| {
                Box::new(Header {
                    src_cid,
                    dst_cid,
                    src_port,
                    dst_port,
                    len,
                    kind,
                    op,
                    flags,
                    buf_alloc,
                    fwd_cnt,
                })
            },
        )
}

fn step() -> impl Strategy<Value = Step> {
    let which = 0..8usize;
    let length = prop_oneof![Just(0usize), 1..5000usize, 1..PAYLOAD_BYTES_MAX * 3];
    let number = prop_oneof![Just(0u32), Just(1), any::<u32>()];
    prop_oneof![
        4 => (kind(), prop_oneof![Just(PORT), PORT..PORT + 3]).prop_map(|(kind, port)| Step::Open(kind, port)),
        6 => (which.clone(), length.clone()).prop_map(|(which, length)| Step::Send(which, length)),
        3 => (which.clone(), length.clone(), any::<bool>())
            .prop_map(|(which, length, record)| Step::SendMessage(which, length, record)),
        6 => (which.clone(), length.clone()).prop_map(|(which, length)| Step::Receive(which, length)),
        2 => (which.clone(), 0..4u32).prop_map(|(which, flags)| Step::ShutDown(which, flags)),
        1 => which.clone().prop_map(Step::Reset),
        2 => which.clone().prop_map(Step::Close),
        2 => (which.clone(), number.clone()).prop_map(|(which, bytes)| Step::Credit(which, bytes)),
        4 => (header(), 0..5000usize).prop_map(|(header, length)| Step::Packet(header, length)),
        4 => (which.clone(), 0..9u16, number.clone(), number.clone(), number)
            .prop_map(|(which, op, flags, len, credit)| Step::Twisted(which, op, flags, len, credit)),
        4 => Just(Step::Accept),
        5 => (which.clone(), length).prop_map(|(which, length)| Step::HostWrite(which, length)),
        5 => which.clone().prop_map(Step::HostRead),
        2 => (which.clone(), any::<bool>()).prop_map(|(which, write)| Step::HostHalfClose(which, write)),
        2 => which.prop_map(Step::HostClose),
        2 => (prop_oneof![Just(5000u32), any::<u32>()], prop::collection::vec(any::<u8>(), 0..50))
            .prop_map(|(port, more)| Step::Dial(port, more)),
        1 => any::<bool>().prop_map(Step::Policy),
        1 => (0..5u64).prop_map(Step::Wait),
        1 => Just(Step::StopAndGo),
    ]
}

/// A guest, those whom it speaks with, and what they have open.
struct Stage {
    host: Host,
    vm: Vm,
    guest: Guest,
    listener: UnixListener,
    sockets: Vec<Socket>,
    peers: Vec<UnixStream>,
}

impl Stage {
    fn new(host: Host, vm: Vm, settings: &Settings) -> Self {
        let mut guest = vm.boot_with(settings);
        let listener = vm.service(PORT);
        listener.set_nonblocking(true).expect("not to block");
        guest.listen(Kind::Stream, 5000);
        guest.listen(Kind::Seqpacket, 5000);
        Self {
            host,
            vm,
            guest,
            listener,
            sockets: Vec::new(),
            peers: Vec::new(),
        }
    }

    fn socket(&self, which: usize) -> Option<Socket> {
        (!self.sockets.is_empty()).then(|| self.sockets[which % self.sockets.len()])
    }

    fn peer(&mut self, which: usize) -> Option<&mut UnixStream> {
        let count = self.peers.len();
        (count > 0).then(|| &mut self.peers[which % count])
    }

    fn keep(&mut self, peer: UnixStream) {
        peer.set_nonblocking(true).expect("not to block");
        self.peers.push(peer);
    }

    /// What fails, fails: only the device is on trial.
    fn act(&mut self, step: &Step) {
        match step {
            Step::Open(kind, port) => {
                let socket = self.guest.start_open(*kind, HOST_CID, *port);
                self.sockets.push(socket);
            }
            Step::Accept => self.accept(),
            Step::Dial(port, more) => {
                let mut client = self.vm.dial(*port);
                drop(client.write_all(more));
                self.keep(client);
            }
            Step::Policy(open) => {
                let ports: &[u32] = if *open {
                    &[PORT, PORT + 1]
                } else {
                    &[PORT + 1]
                };
                self.host.set_policy(&self.vm, to_host(ports));
            }
            Step::Wait(milliseconds) => {
                drop(self.guest.run_for(Duration::from_millis(*milliseconds)));
            }
            Step::StopAndGo => {
                let snapshot = self.guest.snapshot().expect("the back end answers");
                self.guest.resume(&snapshot).expect("it goes on");
            }
            Step::Packet(header, length) => {
                self.guest.transport().send(header, &vec![3; *length]);
            }
            Step::HostWrite(which, _)
            | Step::HostRead(which)
            | Step::HostHalfClose(which, _)
            | Step::HostClose(which) => self.act_on_host(*which, step),
            _ => self.act_on_socket(step),
        }
        self.guest.poll();
    }

    fn accept(&mut self) {
        if let Ok((peer, _)) = self.listener.accept() {
            self.keep(peer);
        }
        for kind in [Kind::Stream, Kind::Seqpacket] {
            let accepted = self.guest.try_accept(kind, 5000);
            self.sockets.extend(accepted);
        }
    }

    fn act_on_host(&mut self, which: usize, step: &Step) {
        let Some(peer) = self.peer(which) else {
            return;
        };
        match step {
            Step::HostWrite(_, length) => drop(peer.write(&vec![4; *length])),
            Step::HostRead(_) => drop(peer.read(&mut vec![0; 100_000])),
            Step::HostHalfClose(_, write) => drop(peer.shutdown(if *write {
                std::net::Shutdown::Write
            } else {
                std::net::Shutdown::Read
            })),
            _ => {
                let count = self.peers.len();
                self.peers.swap_remove(which % count);
            }
        }
    }

    fn act_on_socket(&mut self, step: &Step) {
        let which = match step {
            Step::Send(which, _)
            | Step::SendMessage(which, _, _)
            | Step::Receive(which, _)
            | Step::ShutDown(which, _)
            | Step::Reset(which)
            | Step::Close(which)
            | Step::Credit(which, _)
            | Step::Twisted(which, ..) => *which,
            _ => return,
        };
        let Some(socket) = self.socket(which) else {
            return;
        };
        let guest = &mut self.guest;
        match step {
            Step::Send(_, length) => drop(guest.try_send(socket, &vec![1; *length])),
            Step::SendMessage(_, length, record) => {
                let most = guest.socket(socket).credit() as usize;
                let message = vec![2; (*length).min(most)];
                if guest.transport().has_slot() && !message.is_empty() {
                    drop(guest.send_message(socket, &message, *record));
                }
            }
            Step::Receive(_, length) => drop(guest.try_receive(socket, &mut vec![0; *length])),
            Step::ShutDown(_, flags) => guest.shut_down(socket, *flags),
            Step::Reset(_) => guest.reset(socket),
            Step::Credit(_, bytes) => guest.socket_mut(socket).buf_alloc = *bytes,
            Step::Twisted(_, op, flags, len, credit) => {
                let mut header = guest.header(socket, Operation::CreditUpdate);
                header.op = *op;
                header.flags = *flags;
                header.len = *len;
                header.fwd_cnt = header.fwd_cnt.wrapping_add(*credit);
                guest.transport().send(&header, &[]);
            }
            // Without waiting for the answer.
            _ => guest.shut_down(socket, 3),
        }
    }

    /// Everybody goes. What was promised and kept is given back.
    fn end(self) -> (Host, Vm) {
        drop(self.guest);
        drop(self.peers);
        drop(self.listener);
        let (host, vm) = (self.host, self.vm);
        vm.wait_for_connections(0);
        eventually("nothing to be buffered", || {
            vm.traffic().buffered_bytes == 0
        });
        eventually("nothing to be promised", || host.budget.promised() == 0);
        (host, vm)
    }
}

fn settings() -> impl Strategy<Value = Settings> {
    (
        prop_oneof![
            Just(TransmitLayout::Whole),
            Just(TransmitLayout::Split),
            Just(TransmitLayout::Pieces(1000))
        ],
        prop_oneof![Just(1u16), Just(16), Just(256)],
        any::<bool>(),
        any::<bool>(),
        prop_oneof![Just(0u64), Just(1 << 29), Just(1 << 29 | 1 << 28)],
    )
        .prop_map(
            |(transmit_layout, receive_buffers, event_queue, indirect, features)| Settings {
                transmit_layout,
                receive_buffers,
                event_queue,
                indirect: indirect && features & 1 << 28 != 0,
                features: features | 3,
                timeout: Duration::from_millis(200),
                ..Settings::default()
            },
        )
}

fn configuration() -> ProptestConfig {
    ProptestConfig {
        cases: 40,
        max_shrink_iters: 60,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(configuration())]

    #[test]
    fn anything_in_any_order_harms_nobody_else(
        settings in settings(),
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let mut host = Host::new(1);
        let limits = Limits {
            connections: 16,
            guest_bytes: 1 << 20,
            connection_bytes: 64 * 1024,
            ..Limits::default()
        };
        let vm = host.vm_with(limits, to_host(&[PORT]));
        let neighbour = host.vm();
        let mut other = neighbour.boot();
        works(&neighbour, &mut other);
        let mut stage = Stage::new(host, vm, &settings);
        for step in &steps {
            stage.act(step);
        }
        let traffic = stage.vm.traffic();
        prop_assert!(traffic.connections <= 16);
        prop_assert!(traffic.buffered_bytes <= 1 << 20);
        works(&neighbour, &mut other);
        clean(&other);
        drop(other);
        let (_host, vm) = stage.end();
        // Its policy may have been changed.
        _host.set_policy(&vm, to_host(&[PORT]));
        drop(std::fs::remove_file(vm.port_socket(PORT)));
        works(&vm, &mut vm.boot());
    }

    #[test]
    fn any_descriptors_in_any_ring_harm_nobody_else(
        chains in prop::collection::vec(
            (
                any::<bool>(),
                prop::collection::vec(
                    (
                        prop_oneof![0..1u64 << 20, (1u64 << 32)..(1 << 32) + (7 << 20), any::<u64>()],
                        prop_oneof![0..100u32, 0..100_000u32, any::<u32>()],
                        0..8u16,
                        prop_oneof![0..8u16, any::<u16>()],
                    ),
                    1..8,
                ),
                prop_oneof![0..8u16, any::<u16>()],
            ),
            1..20,
        ),
    ) {
        let mut host = Host::new(1);
        let vm = host.vm();
        let neighbour = host.vm();
        let mut other = neighbour.boot();
        let mut guest = vm.boot();
        works(&vm, &mut guest);
        for (transmit, descriptors, head) in chains {
            let descriptors: Vec<Descriptor> = descriptors
                .into_iter()
                .map(|(address, length, flags, next)| Descriptor { address, length, flags, next })
                .collect();
            let queue = if transmit { TRANSMIT } else { RECEIVE };
            guest.transport().publish_raw(queue, &descriptors, head);
            if !transmit {
                drop(vm.dial(5000));
            }
        }
        works(&neighbour, &mut other);
        clean(&other);
        drop(guest);
        vm.wait_for_connections(0);
        works(&vm, &mut vm.boot());
    }
}

//! Ends that a guest doesn't confirm are given up in time; ends behind data that the host hasn't read wait for it.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

use sandwire_api::vsock::{VsockRefusal, VsockState};
use sandwire_vsock_guest::{
    Guest, Header, Kind, Operation, Settings, Socket,
    packet::{SHUTDOWN_RECEIVE, SHUTDOWN_SEND},
    socket::State,
};
use sandwire_vsock_host::limits::Limits;
use vhost::vhost_user::VhostUserFrontend;

use crate::host::{
    Host, MUCH_MEMORY, PORT, Vm, accept, clean, connected, eventually, policy, read_exact,
    read_line, to_host, use_until, works,
};

const SHUTDOWN_BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;
const LIMIT: Duration = Duration::from_millis(300);

/// Far less time for an end than for a beginning.
fn limits() -> Limits {
    Limits {
        connect_timeout: Duration::from_secs(600),
        shutdown_timeout: LIMIT,
        ..Limits::default()
    }
}

/// Room for a few times what a socket of the host takes at once, which is 8 MiB with a `wmem_max` of 4 MiB.
const DEEP: u32 = 32 << 20;

fn deep(limits: Limits) -> Limits {
    Limits {
        connection_bytes: DEEP,
        guest_bytes: u64::from(DEEP) * 4,
        ..limits
    }
}

fn boot_deep(vm: &Vm) -> Guest {
    vm.boot_with(&Settings {
        buffer_bytes: DEEP,
        ..Settings::default()
    })
}

/// Sends until the host's socket takes nothing more and so much waits in the device; how much was sent in all.
fn fill(host: &Host, vm: &Vm, guest: &mut Guest, socket: Socket, least: u64) -> usize {
    let block = vec![7; 64 * 1024];
    let mut sent = 0;
    eventually("bytes to wait in the device", || {
        while guest.socket(socket).credit() != 0 {
            sent += guest.try_send(socket, &block).expect("sending");
            guest.poll();
        }
        // What a worker has in its hands isn't waiting: it answers when it has put all of it somewhere.
        let waiting = [(); 2].map(|()| {
            host.list();
            guest.poll();
            vm.traffic().buffered_bytes
        });
        guest.socket(socket).credit() == 0 && waiting[0] == waiting[1] && waiting[1] >= least
    });
    sent
}

/// A connection that the guest has ended before the host has read all: the host's end, and how much was sent.
fn ended_by_guest(host: &Host, vm: &Vm, guest: &mut Guest) -> (UnixStream, usize) {
    let (socket, peer) = connected(vm, guest);
    let sent = fill(host, vm, guest, socket, 1);
    guest.shut_down(socket, SHUTDOWN_SEND);
    eventually("the end to be heard", || {
        guest.poll();
        let found = host.list();
        found.iter().any(|one| one.state == VsockState::GuestClosed)
    });
    (peer, sent)
}

/// Nothing is left of any connection, neither buffered nor promised.
#[track_caller]
fn assert_freed(host: &Host, vm: &Vm) {
    vm.wait_for_connections(0);
    eventually("nothing to be buffered", || {
        vm.traffic().buffered_bytes == 0
    });
    eventually("nothing to be promised", || host.budget.promised() == 0);
}

#[test]
fn a_guest_that_never_confirms_the_end_is_reset_in_time() {
    let mut host = Host::new(1);
    let vm = host.vm_with(limits(), to_host(&[PORT]));
    let mut guest = vm.boot();
    guest.listen(Kind::Stream, 5000);
    for opened_by_guest in [true, false] {
        let (socket, mut peer) = if opened_by_guest {
            connected(&vm, &mut guest)
        } else {
            let mut client = vm.dial(5000);
            let socket = guest.accept(Kind::Stream, 5000).expect("accepting");
            read_line(&mut client);
            (socket, client)
        };
        guest.keep_log();
        guest.take_log();
        let asked = Instant::now();
        peer.write_all(b"unread").expect("writing");
        drop(peer);
        // Its kernel confirms when its user has read all, which never happens.
        guest
            .wait_until("RST", |guest| guest.socket(socket).state == State::Reset)
            .expect("RST");
        assert!(asked.elapsed() >= LIMIT / 2, "{:?}", asked.elapsed());
        let heard: Vec<(u16, u32)> = guest
            .take_log()
            .iter()
            .map(|(header, _)| (header.op, header.flags))
            .collect();
        let told = (Operation::Shutdown as u16, SHUTDOWN_BOTH);
        assert!(
            heard.ends_with(&[told, (Operation::Reset as u16, 0)]),
            "{heard:?}"
        );
        assert_freed(&host, &vm);
        assert_eq!(guest.receive_exact(socket, 6).expect("reading"), b"unread");
    }
    works(&vm, &mut guest);
    clean(&guest);
}

#[test]
fn what_a_reader_leaves_is_freed_though_the_guest_has_no_room_to_be_told() {
    let mut host = Host::new(1);
    let vm = host.vm_with(limits(), to_host(&[PORT]));
    let mut guest = vm.boot_with(&Settings {
        receive_buffers: 1,
        ..Settings::default()
    });
    let (socket, mut peer) = connected(&vm, &mut guest);
    fill(&host, &vm, &mut guest, socket, 1);
    guest.run_for(Duration::from_millis(50)).expect("running");
    // Its only buffer is taken, and from here on it looks at nothing that comes.
    let before = vm.traffic().ingress_packets;
    peer.write_all(b"x").expect("writing");
    eventually("the buffer to be used", || {
        vm.traffic().ingress_packets > before
    });
    guest.shut_down(socket, SHUTDOWN_BOTH);
    drop(peer);
    eventually("the bytes to be given up", || {
        vm.traffic().buffered_bytes == 0
    });
    assert_eq!(vm.traffic().connections, 1, "the guest is still to be told");
    guest
        .wait_until("RST", |guest| guest.socket(socket).state == State::Closed)
        .expect("RST");
    assert_freed(&host, &vm);
    works(&vm, &mut guest);
    clean(&guest);
}

#[test]
fn a_host_that_reads_late_and_slowly_gets_all_that_came_before_the_end() {
    let _much = MUCH_MEMORY.lock();
    let mut host = Host::new(1);
    let vm = host.vm_with(deep(limits()), to_host(&[PORT]));
    let mut guest = boot_deep(&vm);
    let (socket, mut peer) = connected(&vm, &mut guest);
    use_until(DEEP, &mut guest, socket, &mut peer);
    let sent = fill(&host, &vm, &mut guest, socket, u64::from(DEEP) / 4 * 3);
    guest.shut_down(socket, SHUTDOWN_BOTH);
    let mut got = Vec::new();
    for _ in 0..3 {
        // Longer than the guest would have.
        std::thread::sleep(LIMIT * 2);
        got.extend(read_exact(&mut peer, sent / 4));
    }
    peer.read_to_end(&mut got).expect("the rest");
    assert_eq!(got.len(), sent);
    guest
        .wait_until("RST", |guest| guest.socket(socket).state == State::Closed)
        .expect("RST");
    assert_freed(&host, &vm);
    clean(&guest);
}

#[test]
fn what_a_guest_sent_before_it_left_is_kept_until_it_is_read_or_its_reader_leaves() {
    let mut host = Host::new(1);
    let vm = host.vm_with(limits(), to_host(&[PORT]));
    let mut guest = vm.boot();
    for is_read in [true, false] {
        let (socket, mut peer) = connected(&vm, &mut guest);
        let sent = fill(&host, &vm, &mut guest, socket, 1);
        guest.shut_down(socket, SHUTDOWN_SEND);
        guest.reset(socket);
        std::thread::sleep(LIMIT * 2);
        let traffic = vm.traffic();
        assert!(
            traffic.connections == 1 && traffic.buffered_bytes > 0,
            "{traffic:?} of {sent} (read: {is_read})"
        );
        if is_read {
            let mut got = Vec::new();
            peer.read_to_end(&mut got).expect("reading to the end");
            assert_eq!(got.len(), sent);
        }
        drop(peer);
        assert_freed(&host, &vm);
    }
    works(&vm, &mut guest);
    clean(&guest);
}

#[test]
fn a_guest_may_use_its_ports_again_while_what_it_sent_before_is_still_passed_on() {
    let _much = MUCH_MEMORY.lock();
    let mut host = Host::new(1);
    let vm = host.vm_with(deep(Limits::default()), to_host(&[PORT]));
    let mut guest = boot_deep(&vm);
    let listener = vm.service(PORT);
    let socket = guest.open_stream(PORT).expect("connecting");
    let mut first = accept(&listener);
    use_until(DEEP, &mut guest, socket, &mut first);
    let sent = fill(&host, &vm, &mut guest, socket, u64::from(DEEP) / 4 * 3);
    guest.shut_down(socket, SHUTDOWN_SEND);
    let request = guest.header(socket, Operation::Request);
    guest.reset(socket);
    guest.transport().send(&request, &[]);
    guest.kick();
    let mut second = accept(&listener);
    eventually("RESPONSE", || {
        let packet = guest.transport().receive();
        packet.is_some_and(|(header, _)| header.op == Operation::Response as u16)
    });
    let mut got = Vec::new();
    first.read_to_end(&mut got).expect("reading to the end");
    assert_eq!(got.len(), sent);
    vm.wait_for_connections(1);
    let data = Header {
        op: Operation::ReadWrite as u16,
        len: 6,
        ..request
    };
    guest.transport().send(&data, b"second");
    guest.kick();
    assert_eq!(read_exact(&mut second, 6), b"second");
    assert!(vm.traffic().refusals.is_empty());
}

#[test]
fn what_a_guest_sent_before_it_ended_a_connection_outlives_the_guest() {
    for is_reset_first in [true, false] {
        let mut host = Host::new(1);
        let vm = host.vm();
        let mut guest = vm.boot();
        let (mut peer, sent) = ended_by_guest(&host, &vm, &mut guest);
        let (_not_ended, mut cut) = connected(&vm, &mut guest);
        vm.wait_for_connections(2);
        if is_reset_first {
            let session = guest.transport().front_end().session();
            session.reset_device().expect("a reset");
            vm.wait_for_connections(1);
        }
        drop(guest);
        assert_eq!(cut.read(&mut [0]).expect("its end"), 0);
        vm.wait_for_connections(1);
        assert!(host.budget.promised() > 0, "it counts as it did");

        let mut next = vm.boot();
        works(&vm, &mut next);
        vm.wait_for_connections(1);
        let mut got = Vec::new();
        peer.read_to_end(&mut got).expect("reading to the end");
        assert_eq!(got.len(), sent);
        assert_freed(&host, &vm);
        works(&vm, &mut next);
        clean(&next);
    }
}

#[test]
fn what_nobody_has_read_goes_with_the_rule_and_each_end_is_counted_once() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot_with(&Settings {
        receive_buffers: 1,
        ..Settings::default()
    });
    let (left, mut peer) = connected(&vm, &mut guest);
    let sent = fill(&host, &vm, &mut guest, left, 1);
    guest.shut_down(left, SHUTDOWN_SEND);
    guest.reset(left);
    let (reset, mut other) = connected(&vm, &mut guest);
    vm.wait_for_connections(2);
    // Its only buffer is taken, so that it can't be told of what happens.
    let before = vm.traffic().ingress_packets;
    other.write_all(b"x").expect("writing");
    eventually("the buffer to be used", || {
        vm.traffic().ingress_packets > before
    });
    for _ in 0..3 {
        host.set_policy(&vm, policy([]));
    }
    assert_eq!(host.list().len(), 1, "the guest is to be told of one");
    assert_eq!(vm.refused(VsockRefusal::Policy), 2);
    let mut got = Vec::new();
    peer.read_to_end(&mut got).expect("what its socket has");
    assert!(got.len() < sent);
    guest
        .wait_until("RST", |guest| guest.socket(reset).state == State::Reset)
        .expect("RST");
    assert_freed(&host, &vm);
    clean(&guest);
}

#[test]
fn what_nobody_has_read_goes_with_the_lease() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let (mut peer, sent) = ended_by_guest(&host, &vm, &mut guest);
    drop(guest);
    std::thread::sleep(LIMIT);
    vm.wait_for_connections(1);
    host.remove(&vm);
    assert_freed(&host, &vm);
    let mut got = Vec::new();
    peer.read_to_end(&mut got).expect("what its socket has");
    assert!(got.len() < sent);
}

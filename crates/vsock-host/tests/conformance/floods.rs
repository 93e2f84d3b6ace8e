//! Guests that ask for too much. They hurt themselves; a neighbour on the same worker goes on.

use std::{
    io::{ErrorKind, Write},
    os::unix::net::UnixStream,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use sandwire_api::vsock::VsockRefusal;
use sandwire_vsock_guest::{
    Guest, GuestError, Header, Kind, Operation, Settings,
    packet::HOST_CID,
    ring::{Descriptor, WRITE},
    transport::RECEIVE,
    wire::{Message, request},
};
use sandwire_vsock_host::limits::Limits;

use crate::host::{
    Host, MUCH_MEMORY, PORT, Vm, accept, clean, connect_now, connected, eventually, to_host,
    use_until, works,
};

/// Fewer packets than that are no flood. A tenth of what a slow machine sends while its neighbour transfers.
const FLOOD: u64 = 1000;

/// Private memory of this process in bytes; the guests' is shared, and isn't in it.
fn private_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("reading /proc");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))
        .expect("the kernel counts it");
    let kib: u64 = line
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .expect("a number");
    kib * 1024
}

/// How long a guest needs to send so much to the host.
fn transfer(vm: &Vm, guest: &mut Guest, bytes: usize) -> Duration {
    let (socket, peer) = connected(vm, guest);
    let reader = std::thread::spawn(move || {
        let mut peer = peer;
        std::io::copy(&mut peer, &mut std::io::sink()).expect("reading")
    });
    let start = Instant::now();
    let block = vec![1; 64 * 1024];
    for _ in 0..bytes / block.len() {
        guest.send(socket, &block).expect("sending");
    }
    guest.close(socket).expect("closing");
    reader.join().expect("the reader");
    start.elapsed()
}

/// Ends what is hostile when it is dropped.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs something hostile beside a neighbour that transfers 32 MiB, and compares with the same alone.
fn beside_a_neighbour(
    what: &str,
    limits: Limits,
    hostile: impl Fn(&Vm, &AtomicBool) + Send + Sync,
) {
    let mut host = Host::new(1);
    let vm = host.vm_with(limits, to_host(&[PORT]));
    let neighbour = host.vm();
    let mut guest = neighbour.boot();
    let bytes = 32 << 20;
    let _much = MUCH_MEMORY.lock();
    transfer(&neighbour, &mut guest, bytes);
    let alone = transfer(&neighbour, &mut guest, bytes);
    let before = private_memory();
    let over = AtomicBool::new(false);
    let (beside, after) = std::thread::scope(|threads| {
        threads.spawn(|| hostile(&vm, &over));
        // Also if the neighbour is starved: the test should fail then, and not go on without end.
        let _ends = Ends(&over);
        std::thread::sleep(Duration::from_millis(300));
        let beside = transfer(&neighbour, &mut guest, bytes);
        (beside, private_memory())
    });
    // Half of the worker is fair, and the hostile guest's own thread takes a processor from the driver's, which
    // other tests take as well. A neighbour that is starved doesn't come to an end at all.
    let most = alone * 10 + Duration::from_secs(3);
    assert!(beside < most, "{what}: {beside:?}, alone {alone:?}");
    let grown = after.saturating_sub(before);
    assert!(grown < 256 << 20, "{what}: {grown} bytes more");
    assert!(neighbour.traffic().refusals.is_empty());
    clean(&guest);
    // A flood of connects has used up those of its second; more come 2000 times in one.
    std::thread::sleep(Duration::from_millis(20));
    works(&vm, &mut vm.boot());
}

/// Asks for some connections, unless earlier ones still wait for a slot: the driver would remember them without end.
fn ask(guest: &mut Guest, port: u32) -> u64 {
    const AT_ONCE: u64 = 64;
    if guest.waiting_packets() > 0 {
        return 0;
    }
    for _ in 0..AT_ONCE {
        guest.start_open(Kind::Stream, HOST_CID, port);
    }
    AT_ONCE
}

#[test]
fn a_flood_of_connects_hurts_only_who_makes_it() {
    let limits = Limits {
        connects_per_second: 200,
        ..Limits::default()
    };
    beside_a_neighbour("connects", limits, |vm, over| {
        let mut guest = vm.boot();
        let _listener = vm.service(PORT);
        let mut asked = 0u64;
        while !over.load(Ordering::Relaxed) {
            asked += ask(&mut guest, PORT);
            guest.poll();
        }
        guest.run_for(Duration::from_millis(100)).expect("running");
        assert!(asked > FLOOD, "only {asked} connects: no flood");
        assert!(vm.refused(VsockRefusal::TooFast) > 0);
        assert!(vm.traffic().connections <= 4096);
    });
}

#[test]
fn a_flood_of_refused_connects_hurts_only_who_makes_it() {
    beside_a_neighbour("refused connects", Limits::default(), |vm, over| {
        let mut guest = vm.boot();
        let mut asked = 0u64;
        while !over.load(Ordering::Relaxed) {
            asked += ask(&mut guest, PORT + 1);
            guest.poll();
        }
        // No rule covers the port; beyond 2000 per second, none is looked for.
        assert!(asked > FLOOD, "only {asked} connects: no flood");
        eventually("the flood to be refused", || {
            guest.poll();
            vm.refused(VsockRefusal::Policy) + vm.refused(VsockRefusal::TooFast) > FLOOD
        });
        assert!(vm.refused(VsockRefusal::Policy) > 0);
        assert_eq!(vm.traffic().connections, 0);
    });
}

#[test]
fn a_flood_of_nonsense_hurts_only_who_makes_it() {
    beside_a_neighbour("nonsense", Limits::default(), |vm, over| {
        let mut guest = vm.boot();
        let (mut number, mut sent) = (0u32, 0);
        while !over.load(Ordering::Relaxed) {
            for _ in 0..64 {
                number = number.wrapping_mul(0x9e37_79b9).wrapping_add(1);
                let header = Header {
                    src_cid: 3,
                    dst_cid: HOST_CID,
                    src_port: number,
                    dst_port: PORT,
                    len: number >> 20,
                    kind: (number >> 8 & 3) as u16,
                    op: (number >> 4 & 15) as u16,
                    ..Header::default()
                };
                sent += u64::from(guest.transport().send(&header, &[]));
            }
            guest.poll();
        }
        assert!(sent > FLOOD, "only {sent} packets: no flood");
        // Nearly all of them claim bytes that aren't there.
        eventually("the flood to be refused", || {
            guest.poll();
            vm.refused(VsockRefusal::Malformed) > FLOOD
        });
        assert_eq!(vm.refused(VsockRefusal::BadDescriptors), 0);
    });
}

#[test]
fn a_huge_buffer_that_is_never_read_holds_little() {
    let taken = AtomicU64::new(0);
    beside_a_neighbour("a huge buffer", Limits::default(), |vm, over| {
        let mut guest = vm.boot_with(&Settings {
            buffer_bytes: u32::MAX,
            receive_buffers: 4,
            ..Settings::default()
        });
        let (_socket, mut peer) = connected(vm, &mut guest);
        peer.set_nonblocking(true).expect("not to block");
        let block = vec![1; 1 << 20];
        // The host wants to give it gigabytes; the guest neither reads nor gives any buffer back.
        while !over.load(Ordering::Relaxed) {
            match peer.write(&block) {
                Ok(count) => {
                    taken.fetch_add(count as u64, Ordering::Relaxed);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => panic!("writing: {error}"),
            }
        }
        assert!(vm.traffic().buffered_bytes <= 64 << 20);
    });
    let taken = taken.load(Ordering::Relaxed);
    assert!(taken < 16 << 20, "{taken} bytes were taken for nobody");
}

#[test]
fn credit_requests_without_end_hurt_only_who_makes_them() {
    beside_a_neighbour("credit requests", Limits::default(), |vm, over| {
        let mut guest = vm.boot();
        let (socket, _peer) = connected(vm, &mut guest);
        let header = guest.header(socket, Operation::CreditRequest);
        while !over.load(Ordering::Relaxed) {
            for _ in 0..64 {
                guest.transport().send(&header, &[]);
            }
            guest.poll();
        }
        let taken = vm.traffic().egress_packets;
        assert!(taken > FLOOD, "only {taken} packets: no flood");
        assert!(vm.traffic().refusals.is_empty());
    });
}

#[test]
fn buffers_of_no_use_without_end_hurt_only_who_offers_them() {
    const SIZE: u16 = 256;
    const AT_ONCE: u16 = 32;
    const MARK: [u8; 8] = [0xff; 8];
    beside_a_neighbour("buffers of no use", Limits::default(), |vm, over| {
        let mut guest = vm.boot_with(&Settings {
            queue_size: SIZE,
            receive_buffers: 0,
            ..Settings::default()
        });
        let transport = guest.transport();
        let (ring, memory) = transport.ring(RECEIVE);
        // It can't even hold a header, and is offered again as soon as it has come back.
        let useless = Descriptor {
            address: memory.table()[0].guest_phys_addr,
            length: 1,
            flags: WRITE,
            next: 0,
        };
        ring.set_descriptor(memory, 0, useless);
        let [_, available, used] = ring.addresses();
        let place = |index: u16| used + 4 + 8 * u64::from(index % SIZE);
        for index in 0..SIZE {
            memory.store(available + 4 + 2 * u64::from(index), 0);
            memory.write(place(index), &MARK);
        }
        let mut back = 0u16;
        ring.set_available_index(memory, SIZE);
        transport.kick_queue(RECEIVE);
        // Something to tell, for which a buffer is looked for.
        guest.start_open(Kind::Stream, HOST_CID, PORT + 1);
        let mut rounds = 0;
        while !over.load(Ordering::Relaxed) {
            let transport = guest.transport();
            let (ring, memory) = transport.ring(RECEIVE);
            let mut last = MARK;
            memory.read(place(back.wrapping_add(AT_ONCE - 1)), &mut last);
            if last == MARK {
                transport.kick();
                std::hint::spin_loop();
                continue;
            }
            for index in 0..AT_ONCE {
                memory.write(place(back.wrapping_add(index)), &MARK);
            }
            back = back.wrapping_add(AT_ONCE);
            ring.set_available_index(memory, back.wrapping_add(SIZE));
            rounds += 1;
        }
        assert!(rounds > FLOOD, "only {rounds} rounds: no flood");
    });
}

#[test]
fn messages_of_a_vmm_without_end_hurt_only_its_guest() {
    beside_a_neighbour("messages of a VMM", Limits::default(), |vm, over| {
        let one = Message::new(request::SET_OWNER, &[]).bytes;
        let many = one.repeat(4096);
        let mut stream = UnixStream::connect(vm.vhost_socket()).expect("connecting");
        let mut said = 0;
        while !over.load(Ordering::Relaxed) {
            stream.write_all(&many).expect("they make sense");
            said += 4096;
        }
        assert!(said > FLOOD, "only {said} messages: no flood");
        drop(stream);
        eventually("the VMM to be let go", || !vm.traffic().attached);
    });
}

#[test]
fn vmms_without_end_hurt_only_their_guest() {
    beside_a_neighbour("VMMs", Limits::default(), |vm, over| {
        let _guest = vm.boot();
        std::thread::scope(|threads| {
            for _ in 0..2 {
                threads.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        // A full backlog is as good.
                        drop(connect_now(&vm.vhost_socket()));
                    }
                });
            }
        });
    });
}

#[test]
fn the_limit_of_connections_is_the_limit_and_the_next_is_refused() {
    let mut host = Host::new(1);
    let limits = Limits {
        connections: 20,
        ..Limits::default()
    };
    let vm = host.vm_with(limits, to_host(&[PORT]));
    let mut guest = vm.boot();
    let _listener = vm.service(PORT);
    let sockets: Vec<_> = (0..20)
        .map(|_| guest.open_stream(PORT).expect("connecting"))
        .collect();
    for count in 1..4 {
        let refused = guest.open_stream(PORT);
        assert!(matches!(refused, Err(GuestError::Reset)), "{refused:?}");
        assert_eq!(vm.refused(VsockRefusal::TooManyConnections), count);
    }
    // From the host it is the same limit.
    guest.listen(Kind::Stream, 5);
    let mut client = vm.dial(5);
    assert!(matches!(
        std::io::Read::read(&mut client, &mut [0; 8]),
        Ok(0) | Err(_)
    ));
    for socket in sockets {
        guest.close(socket).expect("closing");
    }
    vm.wait_for_connections(0);
    drop(_listener);
    works(&vm, &mut guest);
    clean(&guest);
}

#[test]
fn connects_per_second_are_limited_and_come_back() {
    let mut host = Host::new(1);
    let limits = Limits {
        connects_per_second: 10,
        ..Limits::default()
    };
    let vm = host.vm_with(limits, to_host(&[PORT]));
    let mut guest = vm.boot();
    let _listener = vm.service(PORT);
    let mut granted = 0;
    while guest.open_stream(PORT).is_ok() {
        granted += 1;
        assert!(granted < 100, "no limit");
    }
    assert!((10..40).contains(&granted), "{granted} at once");
    assert_eq!(vm.refused(VsockRefusal::TooFast), 1);
    std::thread::sleep(Duration::from_millis(1100));
    for _ in 0..5 {
        guest.open_stream(PORT).expect("a second later");
    }
    clean(&guest);
}

const SENDERS: usize = 24;
const EACH: usize = 1 << 20;

#[test]
fn a_neighbour_gets_its_turn_before_a_full_ring_is_emptied() {
    // Where this thread has to wait between the two kicks, the ring is empty before the neighbour asks.
    let before_it: Vec<u64> = (0..10).map(|_| bytes_before_a_neighbour()).collect();
    let least = before_it.iter().min().expect("ten");
    assert!(
        *least <= (SENDERS * EACH) as u64 / 2,
        "{before_it:?} bytes were before it"
    );
}

/// What a guest with a full ring gets through before one that asks right after it is answered.
fn bytes_before_a_neighbour() -> u64 {
    let mut host = Host::new(1);
    let limits = Limits {
        guest_bytes: 128 << 20,
        ..Limits::default()
    };
    let vm = host.vm_with(limits, to_host(&[PORT]));
    let neighbour = host.vm();
    let mut other = neighbour.boot();
    let (waiting, _peer) = connected(&neighbour, &mut other);
    let mut guest = vm.boot_with(&Settings {
        queue_size: 1024,
        memory: vec![(0, 64 << 20)],
        transmit_slots: 512,
        buffer_bytes: u32::try_from(EACH).expect("1 MiB"),
        ..Settings::default()
    });
    let listener = vm.service(PORT);
    let sockets: Vec<_> = (0..SENDERS)
        .map(|_| {
            let socket = guest.open_stream(PORT).expect("connecting");
            let mut peer = accept(&listener);
            let each = u32::try_from(EACH).expect("1 MiB");
            use_until(each, &mut guest, socket, &mut peer);
            (socket, peer)
        })
        .collect();
    let before = vm.traffic().egress_bytes;
    let block = vec![1; EACH];
    for (socket, _) in &sockets {
        assert_eq!(guest.try_send(*socket, &block).expect("sending"), EACH);
    }
    let header = other.header(waiting, Operation::CreditRequest);
    other.keep_log();
    guest.kick();
    other.put(header);
    other.kick();
    other
        .wait_until("an answer", |other| !other.take_log().is_empty())
        .expect("it is served");
    vm.traffic().egress_bytes - before
}

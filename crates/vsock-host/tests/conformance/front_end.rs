//! Front ends that speak vhost-user wrongly or disappear. What they get is a closed socket, at most; the
//! neighbour notices nothing, and the next front end of the same guest is served.

use std::{
    io::Write,
    os::unix::net::UnixStream,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use sandwire_vsock_guest::{
    Guest,
    memory::USER_OFFSET,
    transport::RECEIVE,
    wire::{Message, Region, Wire, configuration, event, request, session},
};

use vhost::VhostBackend as _;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::host::{Host, Vm, clean, connected, eventually, works};

const PATIENCE: Duration = Duration::from_secs(60);
const REGION: u64 = 1 << 20;

struct Scene {
    _host: Host,
    vm: Vm,
    other: Vm,
    other_guest: Guest,
    region: Region,
}

impl Scene {
    fn new() -> Self {
        let mut host = Host::new(1);
        let vm = host.vm();
        let other = host.vm();
        let other_guest = other.boot();
        Self {
            _host: host,
            vm,
            other,
            other_guest,
            region: Region::new(0, REGION).expect("memory"),
        }
    }

    fn wire(&self) -> Wire {
        Wire::connect(&self.vm.vhost_socket(), PATIENCE).expect("connecting")
    }

    fn session(&self) -> Vec<Message> {
        session(&self.region, 256).expect("messages")
    }

    fn neighbour_works(&mut self) {
        works(&self.other, &mut self.other_guest);
    }

    fn next_front_end_works(&mut self) {
        works(&self.vm, &mut self.vm.boot());
        self.neighbour_works();
    }

    /// Says the whole session, but something else instead of the message at `place`, and goes on as long as
    /// the back end lets it.
    fn instead(&mut self, place: usize, message: &Message) {
        let mut wire = self.wire();
        for (index, usual) in self.session().iter().enumerate() {
            let message = if index == place { message } else { usual };
            if wire.say(message).is_err() {
                break;
            }
        }
        drop(wire);
        self.neighbour_works();
    }

    /// Place of the first message of this kind in a session.
    fn place(&self, request: u32) -> usize {
        self.session()
            .iter()
            .position(|message| message.bytes[..4] == request.to_le_bytes())
            .expect("it is part of a session")
    }
}

#[test]
fn the_whole_session_is_understood() {
    let scene = Scene::new();
    let mut wire = scene.wire();
    for message in scene.session() {
        let answer = wire.say(&message).expect("an answer");
        assert_eq!(!answer.is_empty(), message.answered, "{message:?}");
        if message.bytes[..4] == request::GET_CONFIG.to_le_bytes() {
            assert_eq!(answer[12..20], 3u64.to_le_bytes(), "the CID");
        }
    }
}

#[test]
fn a_front_end_may_disappear_after_any_message() {
    let mut scene = Scene::new();
    let count = scene.session().len();
    for length in 0..=count {
        let mut wire = scene.wire();
        for message in &scene.session()[..length] {
            wire.say(message).expect("the back end goes along");
        }
        drop(wire);
        scene.neighbour_works();
    }
    scene.next_front_end_works();
}

#[test]
fn a_front_end_may_disappear_in_the_middle_of_any_message() {
    let mut scene = Scene::new();
    let count = scene.session().len();
    for place in 0..count {
        let length = scene.session()[place].bytes.len();
        for cut in [1, 4, 11, 12, 13, length - 1] {
            if cut >= length {
                continue;
            }
            let messages = scene.session();
            let mut wire = scene.wire();
            for message in &messages[..place] {
                wire.say(message).expect("the back end goes along");
            }
            wire.write(&messages[place], cut).expect("writing a part");
            // The part hangs there: nobody waits for the rest of it but this front end.
            scene.neighbour_works();
        }
    }
    scene.next_front_end_works();
}

#[test]
fn a_message_may_come_in_pieces() {
    let mut scene = Scene::new();
    let mut wire = scene.wire();
    for message in scene.session() {
        // Descriptors go with the header: no VMM writes less than that at once where it has some.
        let first = if message.fds.is_empty() { 1 } else { 12 };
        wire.write(&message, first).expect("the first piece");
        for at in first..message.bytes.len() {
            let byte = Message {
                bytes: vec![message.bytes[at]],
                fds: Vec::new(),
                answered: false,
            };
            wire.write(&byte, 1).expect("a further byte");
        }
        if message.answered {
            wire.answer().expect("an answer");
        }
    }
    drop(wire);
    scene.next_front_end_works();
}

#[test]
fn an_unanswered_front_end_does_not_stop_the_worker() {
    let mut scene = Scene::new();
    // It asks and asks and never reads an answer.
    let mut stream = UnixStream::connect(scene.vm.vhost_socket()).expect("connecting");
    stream
        .set_write_timeout(Some(Duration::from_millis(200)))
        .expect("a time-out");
    let question = Message::new(request::GET_FEATURES, &[]).bytes;
    for _ in 0..100_000 {
        if stream.write_all(&question).is_err() {
            break;
        }
    }
    scene.neighbour_works();
    drop(stream);
    scene.next_front_end_works();
}

#[test]
fn requests_that_do_not_exist_and_headers_that_lie() {
    let mut scene = Scene::new();
    let last = scene.session().len() - 4;
    for (number, flags, size) in [
        (0, 1, 0),
        (45, 1, 0),
        (255, 1, 8),
        (u32::MAX, 1, 0),
        (1, 0, 0),
        (1, 2, 0),
        (1, 3, 0),
        (1, 1 | 4, 0),
        (1, 0xffff_fff1, 0),
        (1, 1, 8),
        (5, 1, 8),
        (5, 1, 0),
        (8, 1, 4),
        (1, 1, u32::MAX),
        (9, 1, 0x1001),
        (24, 1, 12),
    ] {
        for place in [0, 4, last] {
            let payload = vec![0; size.min(5000) as usize];
            let message = Message::with_header(number, flags, size, &payload);
            scene.instead(place, &message);
        }
    }
    scene.next_front_end_works();
}

#[test]
fn noise_instead_of_messages() {
    let mut scene = Scene::new();
    for seed in 0..20 {
        let mut stream = UnixStream::connect(scene.vm.vhost_socket()).expect("connecting");
        let noise = sandwire_vsock_guest::Content::new(seed).take(20_000);
        drop(stream.set_write_timeout(Some(Duration::from_millis(100))));
        drop(stream.write_all(&noise));
        scene.neighbour_works();
    }
    scene.next_front_end_works();
}

#[test]
fn queues_that_cannot_be() {
    let mut scene = Scene::new();
    let place = scene.place(request::SET_VRING_NUM);
    for (index, size) in [
        (0, 0),
        (0, 3),
        (0, 65_536),
        (0, 32_768),
        (0, u32::MAX),
        (3, 256),
        (255, 256),
        (u32::MAX, 256),
    ] {
        scene.instead(place, &Message::queue(request::SET_VRING_NUM, index, size));
        scene.instead(
            place + 1,
            &Message::queue(request::SET_VRING_BASE, index, size),
        );
        scene.instead(
            place + 5,
            &Message::queue(request::SET_VRING_ENABLE, index, size),
        );
        scene.instead(
            scene.session().len() - 4,
            &Message::queue(request::GET_VRING_BASE, index, size),
        );
    }
    scene.next_front_end_works();
}

#[test]
fn rings_outside_of_memory_or_askew() {
    let mut scene = Scene::new();
    let place = scene.place(request::SET_VRING_ADDR);
    let good = USER_OFFSET;
    for bad in [
        0,
        1,
        good + 1,
        good + 8,
        good + REGION - 16,
        good + REGION,
        good - 1,
        u64::MAX,
        u64::MAX - 15,
    ] {
        for which in 0..3 {
            let mut words = [0, good, good + 0xc000, good + 0x8000, 0];
            words[1 + which] = bad;
            scene.instead(place, &Message::words(request::SET_VRING_ADDR, &words));
        }
    }
    for index in [3, 99, 0xffff_ffff] {
        let words = [index, good, good + 0xc000, good + 0x8000, 0];
        scene.instead(place, &Message::words(request::SET_VRING_ADDR, &words));
    }
    scene.next_front_end_works();
}

fn table(regions: &[[u64; 4]], count: u32) -> Message {
    let mut payload = Vec::from(count.to_le_bytes());
    payload.extend([0; 4]);
    for region in regions {
        payload.extend(region.iter().flat_map(|word| word.to_le_bytes()));
    }
    Message::new(request::SET_MEM_TABLE, &payload)
}

#[test]
fn memory_that_cannot_be() {
    let mut scene = Scene::new();
    let place = scene.place(request::SET_MEM_TABLE);
    let user = USER_OFFSET;
    let file = || Region::new(0, REGION).expect("memory").file;
    let bad: Vec<Message> = vec![
        table(&[], 0),
        table(&[], 1).with(file()),
        table(&[[0, REGION, user, 0]], 1),
        table(&[[0, REGION, user, 0]], 2).with(file()),
        table(&[[0, REGION, user, 0]], u32::MAX).with(file()),
        table(&[[0, REGION, user, 0]], 1).with(file()).with(file()),
        table(&[[0, 0, user, 0]], 1).with(file()),
        table(&[[0, REGION, user, 1]], 1).with(file()),
        table(&[[0, REGION, user, u64::MAX]], 1).with(file()),
        table(&[[0, u64::MAX, user, 0]], 1).with(file()),
        table(&[[0, 1 << 47, user, 0]], 1).with(file()),
        table(&[[u64::MAX, REGION, user, 0]], 1).with(file()),
        table(&[[0, REGION, u64::MAX, 0]], 1).with(file()),
        table(&[[0, REGION, user, 0], [0x1000, REGION, user, 0]], 2)
            .with(file())
            .with(file()),
        // Beyond the end of the file.
        table(&[[0, 2 * REGION, user, 0]], 1).with(file()),
        // Not a file with content.
        table(&[[0, REGION, user, 0]], 1).with(event().expect("an eventfd")),
    ];
    for message in &bad {
        scene.instead(place, message);
    }
    scene.next_front_end_works();
}

#[test]
fn configuration_beyond_what_there_is() {
    let mut scene = Scene::new();
    let place = scene.place(request::GET_CONFIG);
    for (offset, size) in [
        (0, 0),
        (0, 4),
        (4, 8),
        (8, 8),
        (0, 256),
        (u32::MAX, 8),
        (0, 4000),
    ] {
        scene.instead(place, &configuration(offset, size));
    }
    scene.next_front_end_works();
}

#[test]
fn descriptors_where_none_belong_and_none_where_they_do() {
    let mut scene = Scene::new();
    let session_length = scene.session().len();
    for place in 0..session_length {
        let mut messages = scene.session();
        let mut message = messages.swap_remove(place);
        if message.fds.is_empty() {
            for _ in 0..30 {
                message = message.with(event().expect("an eventfd"));
            }
        } else {
            message.fds.clear();
        }
        scene.instead(place, &message);
    }
    let place = scene.place(request::SET_VRING_KICK);
    for fd in [
        std::fs::File::open("/dev/null").expect("/dev/null").into(),
        std::fs::File::open("/proc/self/status")
            .expect("a file")
            .into(),
        UnixStream::pair().expect("a pair").0.into(),
    ] {
        let message = Message::words(request::SET_VRING_KICK, &[0]).with(fd);
        scene.instead(place, &message);
    }
    scene.next_front_end_works();
}

#[test]
fn messages_in_any_order() {
    let mut scene = Scene::new();
    let count = scene.session().len();
    for seed in 0..40 {
        let mut wire = scene.wire();
        let messages = scene.session();
        let order = sandwire_vsock_guest::Content::new(seed).take(60);
        for pick in order {
            if wire.say(&messages[usize::from(pick) % count]).is_err() {
                break;
            }
        }
        drop(wire);
        scene.neighbour_works();
    }
    scene.next_front_end_works();
}

#[test]
fn many_front_ends_at_once_for_one_guest() {
    let mut scene = Scene::new();
    let idle: Vec<UnixStream> = (0..200)
        .map(|_| UnixStream::connect(scene.vm.vhost_socket()).expect("connecting"))
        .collect();
    scene.neighbour_works();
    drop(idle);
    scene.next_front_end_works();
}

#[test]
fn front_ends_that_come_and_go_while_a_neighbour_is_busy() {
    let mut scene = Scene::new();
    let over = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let mut wire =
                    Wire::connect(&scene.vm.vhost_socket(), PATIENCE).expect("connecting");
                let messages = session(&scene.region, 256).expect("messages");
                let length = messages.len() - 4;
                for message in &messages[..length] {
                    if wire.say(message).is_err() {
                        break;
                    }
                }
            }
        });
        for _ in 0..100 {
            works(&scene.other, &mut scene.other_guest);
        }
        over.store(true, Ordering::Relaxed);
    });
    scene.next_front_end_works();
}

#[test]
fn a_call_that_replaces_another_is_rung_for_what_was_published_before() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let (socket, mut peer) = connected(&vm, &mut guest);
    let (ring, memory) = guest.transport().ring(RECEIVE);
    let before = ring.used_index(memory);
    peer.write_all(b"hello").expect("writing");
    eventually("it to be published", || {
        let (ring, memory) = guest.transport().ring(RECEIVE);
        ring.used_index(memory) != before
    });
    let call = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).expect("an eventfd");
    let session = guest.transport().front_end().session();
    session.set_vring_call(RECEIVE, &call).expect("a new call");
    eventually("the guest to be interrupted by it", || call.read().is_ok());
    assert_eq!(guest.receive_exact(socket, 5).expect("receiving"), b"hello");
    clean(&guest);
}

//! What a relay's bytes cost its thread, by splice and by copying.

use std::{
    io::{Read, Write},
    net::Shutdown,
    os::{fd::OwnedFd, unix::net::UnixStream},
    thread,
    time::Duration,
};

use rustix::time::{ClockId, clock_gettime};
use sandwire_vsock_host::{
    hybrid::{
        pipe::PipePool,
        relay::{COPY_BYTES, Carrier, Direction, Relay, Turn},
    },
    readiness::Poller,
};

/// Bytes of one run.
const BYTES: usize = 128 * 1024 * 1024;

struct Bare {
    pipes: PipePool,
    room: Option<Vec<u8>>,
}

impl Carrier for Bare {
    fn pipes(&mut self) -> &mut PipePool {
        &mut self.pipes
    }

    fn copy_room(&mut self) -> Option<&mut [u8]> {
        self.room.as_deref_mut()
    }

    fn see(&mut self, _: Direction, _: &[u8]) {}
    fn buffered(&mut self, _: i64) {}
    fn moved(&mut self, _: Direction, _: usize) {}
    fn ended(&mut self, _: Direction) {}

    fn room(&self) -> usize {
        256 * 1024
    }
}

/// Processor time of the relay's thread for one run with writes of `size` bytes.
fn run(copy: bool, size: usize) -> Duration {
    let (mut writer, guest) = UnixStream::pair().expect("a pair of sockets");
    let (peer, mut reader) = UnixStream::pair().expect("a pair of sockets");
    for socket in [&guest, &peer] {
        socket.set_nonblocking(true).expect("not to block");
    }
    let writing = thread::spawn(move || {
        let piece = vec![1; size];
        for _ in 0..BYTES / size {
            writer.write_all(&piece).expect("writing");
        }
        writer.shutdown(Shutdown::Write).expect("an end");
        writer.read_to_end(&mut Vec::new()).expect("the other end");
    });
    let reading = thread::spawn(move || {
        let mut piece = vec![0; 256 * 1024];
        let mut read = 0;
        while let Ok(length @ 1..) = reader.read(&mut piece) {
            read += length;
        }
        read
    });
    let mut relay = Relay::new(OwnedFd::from(guest), OwnedFd::from(peer));
    let mut poller = Poller::new().expect("an epoll instance");
    for (number, socket) in relay.sockets().into_iter().enumerate() {
        poller.add_edge(socket, number as u64).expect("watching");
    }
    let mut carrier = Bare {
        pipes: PipePool::default(),
        room: copy.then(|| vec![0; COPY_BYTES]),
    };
    let begun = cpu();
    loop {
        match relay.turn(&mut carrier) {
            Turn::Over => break,
            Turn::More => continue,
            Turn::Idle | Turn::Starved => {}
        }
        for ready in poller.wait(None).expect("waiting") {
            relay.ready(usize::from(ready.token == 1), *ready);
        }
    }
    let spent = cpu() - begun;
    drop(relay);
    writing.join().expect("the writer");
    assert_eq!(reading.join().expect("the reader"), BYTES);
    spent
}

fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(
        time.tv_sec.unsigned_abs(),
        u32::try_from(time.tv_nsec).expect("nanoseconds"),
    )
}

#[test]
fn splicing_costs_at_most_six_tenths_of_copying() {
    for size in [4 * 1024, 64 * 1024, 256 * 1024] {
        let mut ratios: Vec<u128> = (0..3)
            .map(|_| run(false, size).as_nanos() * 100 / run(true, size).as_nanos())
            .collect();
        ratios.sort_unstable();
        assert!(
            ratios[1] <= 60,
            "by writes of {size} bytes splicing costs {ratios:?} hundredths of copying"
        );
    }
}

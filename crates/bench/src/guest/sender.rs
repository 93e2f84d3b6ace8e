//! A fake guest that sends a stream by TCP: real segments, of a payload that the caller chooses, each
//! in a frame of its own, to a real TCP receiver.
//!
//! Several connections share one TAP and one thread, as they share one queue of a VM. The sender stays
//! within the receiver's window and goes back to the last acknowledged byte after three equal
//! acknowledgements or a timeout, but has no congestion control: what is lost is lost to the path, and
//! shows as retransmissions in the result. The payload is zeros.

use std::{
    fs,
    net::SocketAddrV4,
    sync::atomic::{AtomicBool, AtomicU16, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use sandwire_kernel_net::tap::Opened;

use super::{FRAME_MAX, read, wait, write};
use crate::{
    cpu,
    packet::{
        ACK, Checksum, ETHERNET, Flow, IPV4, PSH, RST, SEGMENT, SYN, Seen, TcpFields, VirtioHeader,
    },
    way::Sandbox,
};

/// Ports of the connections begin here; each run takes others, because the receiver may remember the
/// connections of the last.
const FIRST_PORT: u16 = 20_000;
const PORTS: u16 = 40_000;
static NEXT_PORT: AtomicU16 = AtomicU16::new(0);
/// Segments that a connection sends before the next one has its turn.
const BURST: u32 = 16;
/// What is on its way unacknowledged of a connection, at most, in bytes and, as a congestion window counts,
/// in packets. Far more than this path's delay needs.
const FLIGHT_MAX: u32 = 512 * 1024;
/// See [`FLIGHT_MAX`]; also known to whoever makes queues on the path.
pub(crate) const PACKETS_MAX: u32 = 1024;
/// An acknowledgement that hasn't come after this time never comes.
const TIMEOUT: Duration = Duration::from_millis(200);
/// How long a connection may take to open.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);
/// Options of the first packet: segments of 1460 bytes, windows scaled by 2^7.
const OPTIONS: [u8; 8] = [2, 4, 5, 0xb4, 1, 3, 3, 7];

/// What a sender did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Sent {
    /// Bytes that the receiver has acknowledged.
    pub(crate) bytes: u64,
    /// Frames written, repetitions included.
    pub(crate) frames: u64,
    /// Times that it had to go back.
    pub(crate) setbacks: u64,
    /// Processor time of the guest itself, without the system calls by which it sends.
    pub(crate) guest: Duration,
    /// Time in which it could send nothing, because the receiver had not yet acknowledged enough.
    pub(crate) stalled: Duration,
    /// Time from the first to the last byte.
    pub(crate) elapsed: Duration,
}

/// How a sender sends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream {
    /// To whom.
    pub(crate) target: SocketAddrV4,
    /// How many connections.
    pub(crate) connections: u16,
    /// Bytes of payload that the guest's program writes at once.
    pub(crate) payload: u32,
}

/// Sends until told to stop. Says when its connections are open.
pub(crate) fn send(
    sandbox: &Sandbox,
    tap: &Opened,
    stream: &Stream,
    is_open: &AtomicBool,
    stop: &AtomicBool,
) -> Result<Sent> {
    let mut sender = Sender::new(sandbox, tap, stream);
    sender.open_all()?;
    is_open.store(true, Ordering::Relaxed);
    let started = Instant::now();
    let user_before = user_time()?;
    while !stop.load(Ordering::Relaxed) {
        sender.turn()?;
    }
    let mut sent = Sent {
        guest: user_time()?.saturating_sub(user_before),
        elapsed: started.elapsed(),
        frames: sender.frames,
        stalled: sender.stalled,
        ..Sent::default()
    };
    for connection in &sender.connections {
        sent.bytes += connection.acknowledged_bytes;
        sent.setbacks += connection.setbacks;
    }
    sender.reset_all()?;
    Ok(sent)
}

struct Sender<'a> {
    tap: &'a Opened,
    has_offloads: bool,
    connections: Vec<Connection>,
    frames: u64,
    stalled: Duration,
    buffer: Vec<u8>,
}

/// One connection. Sequence numbers are TCP's, modulo 2^32.
#[derive(Debug)]
struct Connection {
    flow: Flow,
    /// Frames that make up one write of the guest's program.
    templates: Vec<Template>,
    /// Which of them comes next.
    next_template: usize,
    unacknowledged: u32,
    next: u32,
    /// What comes after all that was ever sent.
    highest: u32,
    /// After a setback, what had been sent before it: acknowledgements that repeat themselves mean nothing
    /// until that has arrived, because the receiver answers everything that comes twice by one.
    recovered_at: Option<u32>,
    window: u32,
    /// What may be on its way by our own limits.
    flight: u32,
    scale: u8,
    expected: u32,
    is_open: bool,
    repeated: u32,
    last_progress: Instant,
    acknowledged_bytes: u64,
    setbacks: u64,
}

/// A frame whose sequence number is still to be filled in.
#[derive(Debug)]
struct Template {
    bytes: Vec<u8>,
    payload: u32,
    /// Sum over everything but the sequence number, if the checksum is to be complete.
    sum: Option<u64>,
}

const SEQUENCE_AT: usize = VirtioHeader::LENGTH + ETHERNET + IPV4 + 4;
const CHECKSUM_AT: usize = VirtioHeader::LENGTH + ETHERNET + IPV4 + 16;

impl<'a> Sender<'a> {
    fn new(sandbox: &Sandbox, tap: &'a Opened, stream: &Stream) -> Self {
        let sizes = split(stream.payload, sandbox.has_offloads);
        let taken = NEXT_PORT.fetch_add(stream.connections, Ordering::Relaxed);
        let first = FIRST_PORT + taken % (PORTS - stream.connections);
        let connections = (0..stream.connections)
            .map(|index| Connection::new(sandbox.flow(first + index, stream.target), &sizes))
            .collect();
        Self {
            tap,
            has_offloads: sandbox.has_offloads,
            connections,
            frames: 0,
            stalled: Duration::ZERO,
            buffer: vec![0; FRAME_MAX],
        }
    }

    fn open_all(&mut self) -> Result<()> {
        let deadline = Instant::now() + OPEN_TIMEOUT;
        let sizes: Vec<Vec<u32>> = self
            .connections
            .iter()
            .map(|connection| connection.templates.iter().map(|one| one.payload).collect())
            .collect();
        while self
            .connections
            .iter()
            .any(|connection| !connection.is_open)
        {
            if Instant::now() > deadline {
                bail!("the receiver does not answer");
            }
            for index in 0..self.connections.len() {
                if !self.connections[index].is_open {
                    let fields = TcpFields {
                        flags: SYN,
                        window: 0xffff,
                        ..TcpFields::default()
                    };
                    self.control(index, &fields, &OPTIONS)?;
                }
            }
            wait(self.tap, TIMEOUT)?;
            self.receive()?;
        }
        let has_offloads = self.has_offloads;
        for (index, sizes) in sizes.iter().enumerate() {
            let connection = &mut self.connections[index];
            connection.prepare(sizes, has_offloads);
            let fields = TcpFields {
                sequence: 1,
                acknowledged: connection.expected,
                flags: ACK,
                window: 0xffff,
            };
            self.control(index, &fields, &[])?;
        }
        Ok(())
    }

    /// Every connection sends what it may; then all acknowledgements are read.
    fn turn(&mut self) -> Result<()> {
        let mut is_idle = true;
        for connection in &mut self.connections {
            for _ in 0..BURST {
                let Some(bytes) = connection.next_frame() else {
                    break;
                };
                let start = if self.has_offloads {
                    0
                } else {
                    VirtioHeader::LENGTH
                };
                write(self.tap, &bytes[start..])?;
                self.frames += 1;
                is_idle = false;
            }
        }
        let came = self.receive()?;
        if is_idle && !came {
            let started = Instant::now();
            wait(self.tap, Duration::from_millis(10))?;
            let now = Instant::now();
            self.stalled += now - started;
            for connection in &mut self.connections {
                connection.check_timeout(now);
            }
        }
        Ok(())
    }

    fn receive(&mut self) -> Result<bool> {
        let mut came = false;
        let start = if self.has_offloads {
            VirtioHeader::LENGTH
        } else {
            0
        };
        while let Some(frame) = read(self.tap, &mut self.buffer)? {
            came = true;
            let Some(tcp) = frame
                .get(start..)
                .and_then(Seen::parse)
                .and_then(|seen| seen.tcp())
            else {
                continue;
            };
            let ours =
                |connection: &&mut Connection| connection.flow.source.port() == tcp.target_port;
            if let Some(connection) = self.connections.iter_mut().find(ours) {
                connection.take(&tcp.fields, tcp.window_scale)?;
            }
        }
        Ok(came)
    }

    fn reset_all(&mut self) -> Result<()> {
        for index in 0..self.connections.len() {
            let connection = &self.connections[index];
            let fields = TcpFields {
                sequence: connection.next,
                acknowledged: connection.expected,
                flags: RST | ACK,
                window: 0,
            };
            self.control(index, &fields, &[])?;
        }
        Ok(())
    }

    fn control(&self, index: usize, fields: &TcpFields, options: &[u8]) -> Result<()> {
        let flow = self.connections[index].flow;
        let frame = flow.tcp(Checksum::Complete, fields, options, 0);
        let bytes = if self.has_offloads {
            frame.with_header()
        } else {
            frame.plain()
        };
        write(self.tap, bytes)
    }
}

impl Connection {
    fn new(flow: Flow, sizes: &[u32]) -> Self {
        let empty = |payload: &u32| Template {
            bytes: Vec::new(),
            payload: *payload,
            sum: None,
        };
        let largest = sizes.iter().max().copied().unwrap_or(1);
        Self {
            flow,
            templates: sizes.iter().map(empty).collect(),
            next_template: 0,
            unacknowledged: 1,
            next: 1,
            highest: 1,
            recovered_at: None,
            window: 0,
            flight: largest.saturating_mul(PACKETS_MAX).min(FLIGHT_MAX),
            scale: 0,
            expected: 0,
            is_open: false,
            repeated: 0,
            last_progress: Instant::now(),
            acknowledged_bytes: 0,
            setbacks: 0,
        }
    }

    /// Makes the frames, once it is known which byte of the receiver's is acknowledged in each.
    fn prepare(&mut self, sizes: &[u32], has_offloads: bool) {
        let (flow, acknowledged) = (self.flow, self.expected);
        self.templates = sizes
            .iter()
            .map(|payload| Template::new(&flow, acknowledged, *payload, has_offloads))
            .collect();
    }

    /// The next frame that the window has room for.
    fn next_frame(&mut self) -> Option<&[u8]> {
        let template = &mut self.templates[self.next_template];
        let in_flight = self.next.wrapping_sub(self.unacknowledged);
        if in_flight + template.payload > self.window.min(self.flight) {
            return None;
        }
        if in_flight == 0 {
            self.last_progress = Instant::now();
        }
        template.number(self.next);
        self.next = self.next.wrapping_add(template.payload);
        if self.next.wrapping_sub(self.highest) <= template.payload {
            self.highest = self.next;
        }
        let place = self.next_template;
        self.next_template = (place + 1) % self.templates.len();
        Some(&self.templates[place].bytes)
    }

    fn take(&mut self, fields: &TcpFields, scale: Option<u8>) -> Result<()> {
        if fields.flags & RST != 0 {
            bail!("the receiver has reset the connection");
        }
        if fields.flags & SYN != 0 {
            self.is_open = true;
            self.scale = scale.unwrap_or(0);
            self.expected = fields.sequence.wrapping_add(1);
            self.window = u32::from(fields.window);
            return Ok(());
        }
        let window = u32::from(fields.window) << self.scale;
        let new = fields.acknowledged.wrapping_sub(self.unacknowledged);
        let in_flight = self.next.wrapping_sub(self.unacknowledged);
        if new > 0 && new <= self.highest.wrapping_sub(self.unacknowledged) {
            if new > in_flight {
                self.next = fields.acknowledged;
                self.next_template = 0;
            }
            let before = self.unacknowledged;
            let is_to_come = |number: &u32| number.wrapping_sub(before) > new;
            self.recovered_at = self.recovered_at.filter(is_to_come);
            self.unacknowledged = fields.acknowledged;
            self.acknowledged_bytes += u64::from(new);
            self.repeated = 0;
            self.last_progress = Instant::now();
        } else if new == 0 && in_flight > 0 && window == self.window && self.recovered_at.is_none()
        {
            self.repeated += 1;
            if self.repeated == 3 {
                self.go_back();
            }
        }
        self.window = window;
        Ok(())
    }

    fn check_timeout(&mut self, now: Instant) {
        let is_waiting = self.next != self.unacknowledged;
        if is_waiting && now.duration_since(self.last_progress) > TIMEOUT {
            self.go_back();
            self.last_progress = now;
        }
    }

    /// Starts again from the first byte that is not acknowledged. Which write that byte belonged to
    /// doesn't matter: it is a stream of zeros.
    fn go_back(&mut self) {
        self.recovered_at = Some(self.highest);
        self.next = self.unacknowledged;
        self.next_template = 0;
        self.repeated = 0;
        self.setbacks += 1;
    }
}

impl Template {
    fn new(flow: &Flow, acknowledged: u32, payload: u32, has_offloads: bool) -> Self {
        let checksum = if has_offloads {
            Checksum::Partial
        } else {
            Checksum::Complete
        };
        let fields = TcpFields {
            sequence: 0,
            acknowledged,
            flags: ACK | PSH,
            window: 0xffff,
        };
        let frame = flow.tcp(checksum, &fields, &[], payload as usize);
        let bytes = frame.with_header().to_vec();
        let complete = u16::from_be_bytes([bytes[CHECKSUM_AT], bytes[CHECKSUM_AT + 1]]);
        Self {
            sum: (!has_offloads).then(|| u64::from(!complete)),
            bytes,
            payload,
        }
    }

    fn number(&mut self, sequence: u32) {
        self.bytes[SEQUENCE_AT..SEQUENCE_AT + 4].copy_from_slice(&sequence.to_be_bytes());
        if let Some(sum) = self.sum {
            let mut sum = sum + u64::from(sequence >> 16) + u64::from(sequence & 0xffff);
            while sum > 0xffff {
                sum = (sum & 0xffff) + (sum >> 16);
            }
            let checksum = !u16::try_from(sum).unwrap_or(0);
            self.bytes[CHECKSUM_AT..CHECKSUM_AT + 2].copy_from_slice(&checksum.to_be_bytes());
        }
    }
}

/// Payloads of the frames that a write is sent as.
fn split(payload: u32, has_offloads: bool) -> Vec<u32> {
    let segment = u32::try_from(SEGMENT).unwrap_or(u32::MAX);
    let mut sizes = Vec::new();
    let mut left = payload;
    while left > 0 {
        let size = if has_offloads {
            left
        } else {
            left.min(segment)
        };
        sizes.push(size);
        left -= size;
    }
    sizes
}

/// Processor time of the calling thread outside system calls.
fn user_time() -> Result<Duration> {
    let text = fs::read_to_string("/proc/thread-self/stat").context("cannot read /proc")?;
    let (user, _) = cpu::of_thread(&text).context("/proc has another form")?;
    Ok(user)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    const FLOW: Flow = Flow {
        source_mac: [2; 6],
        target_mac: [4; 6],
        source: SocketAddrV4::new(Ipv4Addr::new(192, 168, 241, 2), 20_000),
        target: SocketAddrV4::new(Ipv4Addr::new(198, 18, 0, 2), 5001),
    };

    fn opened(sizes: &[u32], window: u16) -> Connection {
        let mut connection = Connection::new(FLOW, sizes);
        let fields = TcpFields {
            sequence: 999,
            flags: SYN | ACK,
            window,
            ..TcpFields::default()
        };
        connection.take(&fields, Some(0)).unwrap();
        connection.prepare(sizes, false);
        connection
    }

    fn acknowledge(connection: &mut Connection, number: u32, window: u16) {
        let fields = TcpFields {
            acknowledged: number,
            flags: ACK,
            window,
            ..TcpFields::default()
        };
        connection.take(&fields, None).unwrap();
    }

    #[test]
    fn without_offloads_a_write_becomes_full_segments() {
        assert_eq!(split(64, false), [64]);
        assert_eq!(split(3000, false), [1460, 1460, 80]);
        assert_eq!(split(16_384, true), [16_384]);
    }

    #[test]
    fn numbered_frames_have_right_checksums() {
        for has_offloads in [false, true] {
            let mut template = Template::new(&FLOW, 1000, 64, has_offloads);
            for sequence in [1, 65, 0xffff, 0x1_0000, 0xffff_ffff] {
                template.number(sequence);
                let header = VirtioHeader::parse(&template.bytes);
                let seen = Seen::parse(&template.bytes[VirtioHeader::LENGTH..]).unwrap();
                assert!(seen.checksums_hold(header), "{sequence}");
                assert_eq!(seen.tcp().unwrap().fields.sequence, sequence);
            }
        }
    }

    #[test]
    fn a_sender_stays_within_the_window() {
        let mut connection = opened(&[64], 200);
        assert_eq!(connection.expected, 1000);
        for _ in 0..3 {
            assert!(connection.next_frame().is_some());
        }
        assert!(connection.next_frame().is_none());
        acknowledge(&mut connection, 65, 200);
        assert!(connection.next_frame().is_some());
        assert!(connection.next_frame().is_none());
        assert_eq!(connection.acknowledged_bytes, 64);
    }

    #[test]
    fn a_sender_of_small_packets_counts_them_as_a_congestion_window_does() {
        let mut connection = opened(&[64], 0xffff);
        connection.window = u32::MAX;
        let sent = (0..)
            .take_while(|_| connection.next_frame().is_some())
            .count();
        assert_eq!(sent, PACKETS_MAX as usize);
    }

    #[test]
    fn three_equal_acknowledgements_send_it_back() {
        let mut connection = opened(&[64], 1000);
        while connection.next_frame().is_some() {}
        acknowledge(&mut connection, 65, 1000);
        for _ in 0..3 {
            acknowledge(&mut connection, 65, 1000);
        }
        assert_eq!((connection.next, connection.setbacks), (65, 1));
    }

    #[test]
    fn what_comes_twice_is_no_second_loss() {
        let mut connection = opened(&[64], 256);
        while connection.next_frame().is_some() {}
        for _ in 0..4 {
            acknowledge(&mut connection, 1, 256);
        }
        assert_eq!((connection.next, connection.setbacks), (1, 1));
        while connection.next_frame().is_some() {}
        for _ in 0..9 {
            acknowledge(&mut connection, 129, 256);
        }
        assert_eq!((connection.unacknowledged, connection.setbacks), (129, 1));
        acknowledge(&mut connection, 257, 256);
        while connection.next_frame().is_some() {}
        for _ in 0..3 {
            acknowledge(&mut connection, 257, 256);
        }
        assert_eq!((connection.next, connection.setbacks), (257, 2));
    }

    #[test]
    fn what_arrived_before_a_setback_is_not_sent_again() {
        let mut connection = opened(&[64], 256);
        while connection.next_frame().is_some() {}
        connection.go_back();
        acknowledge(&mut connection, 193, 256);
        assert_eq!((connection.unacknowledged, connection.next), (193, 193));
        assert_eq!(connection.acknowledged_bytes, 192);
    }

    #[test]
    fn a_window_that_opens_is_no_loss() {
        let mut connection = opened(&[64], 300);
        while connection.next_frame().is_some() {}
        for window in [310, 320, 330, 340] {
            acknowledge(&mut connection, 1, window);
        }
        assert_eq!(connection.setbacks, 0);
    }
}

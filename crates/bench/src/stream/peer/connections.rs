//! What a receiver of TCP does that cares for nothing but order and checksums. Pure.
//!
//! It acknowledges as Linux does: when more has come than one segment of the size that the sender uses,
//! as far as that can be told (small ones count as 536 bytes), and at once if a byte is missing or
//! comes twice. So writes of 64 bytes are acknowledged nine at a time, full segments two at a time, and
//! what network cards hand over as one packet each time. Its window is constant: nobody reads slowly.

use std::net::{Ipv4Addr, SocketAddrV4};

use crate::packet::{
    ACK, Checksum, Flow, Frame, RST, SEGMENT, SYN, Seen, SeenTcp, TcpFields, VirtioHeader,
};

/// Half a megabyte, as Linux settles at on such a path.
const WINDOW: u16 = 0xffff;
const SCALE: u8 = 3;
/// Segments of 1460 bytes, scaled windows.
const OPTIONS: [u8; 8] = [2, 4, 5, 0xb4, 1, 3, 3, SCALE];
/// A peer's own numbers begin here.
const FIRST: u32 = 1000;
/// The size of a segment while nothing better is known (RFC 9293, 3.7.1).
const SEGMENT_DEFAULT: u32 = 536;
/// One of so many frames has its checksums looked at, and each that opens a connection. A prime, so
/// that no pattern of frames escapes.
const CHECK_EVERY: u64 = 61;

/// The streams of one sandbox.
pub(super) struct Connections {
    source: Ipv4Addr,
    open: Vec<Connection>,
    frames: u64,
    bytes: u64,
    wrong: u64,
    last_wrong: Option<String>,
}

/// One stream. Numbers are TCP's, modulo 2^32.
struct Connection {
    flow: Flow,
    expected: u32,
    unacknowledged: u32,
    segment: u32,
}

impl Connections {
    /// None yet; all that come must have this source.
    pub(super) fn from(source: Ipv4Addr) -> Self {
        Self {
            source,
            open: Vec::new(),
            frames: 0,
            bytes: 0,
            wrong: 0,
            last_wrong: None,
        }
    }

    /// Payload that has come in order.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Frames with another source, or with wrong checksums.
    pub(super) fn wrong(&self) -> u64 {
        self.wrong
    }

    /// The last of these, described.
    pub(super) fn last_wrong(&self) -> Option<&str> {
        self.last_wrong.as_deref()
    }

    /// Takes a frame with its virtio header, and returns the answer if one is due.
    pub(super) fn take(&mut self, bytes: &[u8]) -> Option<Frame> {
        let header = VirtioHeader::parse(bytes);
        let frame = bytes.get(VirtioHeader::LENGTH..)?;
        let seen = Seen::parse(frame)?;
        let tcp = seen.tcp()?;
        self.frames += 1;
        // The end of a run tells nothing: conntrack lets a reset pass untranslated that comes before
        // what was sent last is acknowledged.
        if tcp.fields.flags & RST != 0 {
            return None;
        }
        let is_sample = self.frames.is_multiple_of(CHECK_EVERY) || tcp.fields.flags & SYN != 0;
        if seen.source != self.source || is_sample && !seen.checksums_hold(header) {
            self.wrong += 1;
            self.last_wrong = Some(format!("{} {:?}", seen.source, tcp));
            return None;
        }
        let flow = Flow {
            source_mac: *frame.first_chunk()?,
            target_mac: seen.source_mac,
            source: SocketAddrV4::new(seen.target, tcp.target_port),
            target: SocketAddrV4::new(seen.source, tcp.source_port),
        };
        let found = self.open.iter_mut().find(|open| open.flow == flow);
        if tcp.fields.flags & SYN == 0 {
            let connection = found?;
            let (bytes, is_due) = connection.take(&tcp);
            self.bytes += u64::from(bytes);
            return is_due.then(|| connection.acknowledge());
        }
        if let Some(connection) = found {
            return Some(connection.open());
        }
        let connection = Connection::new(flow, &tcp);
        let answer = connection.open();
        self.open.push(connection);
        Some(answer)
    }

    /// Acknowledgements of what has none yet.
    pub(super) fn rest(&mut self) -> Vec<Frame> {
        let open = self.open.iter_mut();
        open.filter(|connection| connection.unacknowledged > 0)
            .map(Connection::acknowledge)
            .collect()
    }
}

impl Connection {
    fn new(flow: Flow, tcp: &SeenTcp) -> Self {
        Self {
            flow,
            expected: tcp.fields.sequence.wrapping_add(1),
            unacknowledged: 0,
            segment: SEGMENT_DEFAULT,
        }
    }

    /// Returns how many bytes are new, and whether to acknowledge now.
    fn take(&mut self, tcp: &SeenTcp) -> (u32, bool) {
        if tcp.payload == 0 {
            return (0, false);
        }
        if tcp.fields.sequence != self.expected {
            return (0, true);
        }
        let full = u32::try_from(SEGMENT).unwrap_or(u32::MAX);
        self.segment = self.segment.max(tcp.payload.min(full));
        self.expected = self.expected.wrapping_add(tcp.payload);
        self.unacknowledged += tcp.payload;
        (tcp.payload, self.unacknowledged > self.segment)
    }

    fn open(&self) -> Frame {
        self.answer(FIRST, SYN | ACK, &OPTIONS)
    }

    fn acknowledge(&mut self) -> Frame {
        self.unacknowledged = 0;
        self.answer(FIRST + 1, ACK, &[])
    }

    fn answer(&self, sequence: u32, flags: u8, options: &[u8]) -> Frame {
        let fields = TcpFields {
            sequence,
            acknowledged: self.expected,
            flags,
            window: WINDOW,
        };
        self.flow.tcp(Checksum::Complete, &fields, options, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::PSH;

    const FLOW: Flow = Flow {
        source_mac: [2; 6],
        target_mac: [4; 6],
        source: SocketAddrV4::new(Ipv4Addr::new(10, 64, 0, 2), 20_000),
        target: SocketAddrV4::new(Ipv4Addr::new(198, 19, 0, 2), 5001),
    };

    fn opened() -> Connections {
        let mut connections = Connections::from(*FLOW.source.ip());
        let fields = TcpFields {
            sequence: 0,
            flags: SYN,
            ..TcpFields::default()
        };
        let syn = FLOW.tcp(Checksum::Complete, &fields, &[], 0);
        let answer = connections.take(syn.with_header()).unwrap();
        let seen = Seen::parse(answer.plain()).unwrap();
        assert!(seen.checksums_hold(None));
        assert_eq!(
            (seen.source_mac, &answer.plain()[..6]),
            ([4; 6], &[2; 6][..])
        );
        let tcp = seen.tcp().unwrap();
        assert_eq!((tcp.fields.flags, tcp.fields.acknowledged), (SYN | ACK, 1));
        assert_eq!(tcp.window_scale, Some(SCALE));
        connections
    }

    fn data(sequence: u32, payload: usize) -> Frame {
        let fields = TcpFields {
            sequence,
            flags: ACK | PSH,
            ..TcpFields::default()
        };
        FLOW.tcp(Checksum::Partial, &fields, &[], payload)
    }

    fn acknowledged(answer: &Frame) -> u32 {
        let tcp = Seen::parse(answer.plain()).unwrap().tcp().unwrap();
        tcp.fields.acknowledged
    }

    /// After how many writes of a size in a row an acknowledgement comes.
    fn writes_per_answer(payload: usize) -> usize {
        let mut connections = opened();
        let mut sequence = 1;
        let mut writes = 0;
        loop {
            let answer = connections.take(data(sequence, payload).with_header());
            sequence += u32::try_from(payload).unwrap();
            writes += 1;
            if let Some(answer) = answer {
                assert_eq!(acknowledged(&answer), sequence);
                assert_eq!(connections.bytes(), u64::from(sequence - 1));
                return writes;
            }
        }
    }

    #[test]
    fn it_acknowledges_as_often_as_linux() {
        assert_eq!(writes_per_answer(64), 9);
        assert_eq!(writes_per_answer(1460), 2);
        assert_eq!(writes_per_answer(16_384), 1);
    }

    #[test]
    fn what_is_missing_is_asked_for_at_once_and_not_counted() {
        let mut connections = opened();
        assert!(connections.take(data(1, 64).with_header()).is_none());
        let answer = connections.take(data(129, 64).with_header()).unwrap();
        assert_eq!((acknowledged(&answer), connections.bytes()), (65, 64));
        let again = connections.take(data(1, 64).with_header()).unwrap();
        assert_eq!((acknowledged(&again), connections.bytes()), (65, 64));
        assert_eq!(connections.wrong(), 0);
    }

    #[test]
    fn the_rest_is_acknowledged_when_nothing_more_comes() {
        let mut connections = opened();
        assert!(connections.take(data(1, 64).with_header()).is_none());
        let rest = connections.rest();
        assert_eq!(rest.iter().map(acknowledged).collect::<Vec<_>>(), [65]);
        assert!(connections.rest().is_empty());
    }

    #[test]
    fn another_source_is_noticed_on_every_frame() {
        let mut connections = opened();
        let source = SocketAddrV4::new(Ipv4Addr::new(192, 168, 241, 2), 20_000);
        let stray = Flow { source, ..FLOW }.tcp(Checksum::Partial, &TcpFields::default(), &[], 64);
        assert!(connections.take(stray.with_header()).is_none());
        assert_eq!((connections.wrong(), connections.bytes()), (1, 0));
    }

    #[test]
    fn wrong_checksums_are_noticed_sooner_or_later() {
        let mut connections = opened();
        let mut sequence = 1;
        for _ in 0..CHECK_EVERY {
            let mut bytes = data(sequence, 64).with_header().to_vec();
            *bytes.get_mut(VirtioHeader::LENGTH + 14 + 20 + 16).unwrap() ^= 1;
            connections.take(&bytes);
            sequence += 64;
        }
        assert_eq!(connections.wrong(), 1);
    }

    #[test]
    fn a_repeated_opening_changes_nothing() {
        let mut connections = opened();
        assert!(connections.take(data(1, 64).with_header()).is_none());
        let fields = TcpFields {
            flags: SYN,
            ..TcpFields::default()
        };
        let again = FLOW.tcp(Checksum::Complete, &fields, &[], 0);
        assert!(connections.take(again.with_header()).is_some());
        assert!(connections.take(data(65, 64).with_header()).is_none());
        assert_eq!(connections.bytes(), 128);
    }
}

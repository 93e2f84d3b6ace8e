//! The header of a vsock packet (virtio specification, §5.10.6).
//!
//! 44 bytes, little-endian. A header is copied out of guest memory once and only then looked at; nothing
//! here sees guest memory.

use sandwire_api::vsock::VsockType;

/// Length of a header in bytes.
pub const HEADER_BYTES: usize = 44;

/// What the guest may put in one packet: 64 KiB, as Linux does.
pub const LARGEST_PAYLOAD: u32 = 64 * 1024;

/// Bits of [`Header::flags`].
pub mod flags {
    /// SHUTDOWN: the sender will receive nothing more.
    pub const SHUTDOWN_RECEIVE: u32 = 1;
    /// SHUTDOWN: the sender will send nothing more.
    pub const SHUTDOWN_SEND: u32 = 2;
    /// SHUTDOWN: both.
    pub const SHUTDOWN_BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;
    /// RW of SEQPACKET: a message ends here.
    pub const END_OF_MESSAGE: u32 = 1;
    /// RW of SEQPACKET: the sender marked this message as the end of a record.
    pub const END_OF_RECORD: u32 = 2;
}

/// What a packet does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Operation {
    /// Asks for a connection.
    Request = 1,
    /// Accepts one.
    Response = 2,
    /// Ends one at once, or says that there is none.
    Reset = 3,
    /// Says that the sender won't receive or send any more.
    Shutdown = 4,
    /// Carries data.
    ReadWrite = 5,
    /// Says how much may be sent.
    CreditUpdate = 6,
    /// Asks for a credit update.
    CreditRequest = 7,
}

impl Operation {
    /// The operation of that number; None for 0 and unknown ones.
    #[must_use]
    pub fn from_number(number: u16) -> Option<Self> {
        Some(match number {
            1 => Self::Request,
            2 => Self::Response,
            3 => Self::Reset,
            4 => Self::Shutdown,
            5 => Self::ReadWrite,
            6 => Self::CreditUpdate,
            7 => Self::CreditRequest,
            _ => return None,
        })
    }
}

/// The number of a socket type in a header.
#[must_use]
pub fn type_number(kind: VsockType) -> u16 {
    match kind {
        VsockType::Stream => 1,
        VsockType::Seqpacket => 2,
    }
}

/// The socket type of that number.
#[must_use]
pub fn type_from_number(number: u16) -> Option<VsockType> {
    match number {
        1 => Some(VsockType::Stream),
        2 => Some(VsockType::Seqpacket),
        _ => None,
    }
}

/// A header, as the words of the specification. Nothing in it has been judged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// CID of the sender.
    pub src_cid: u64,
    /// CID of the receiver.
    pub dst_cid: u64,
    /// Port of the sender.
    pub src_port: u32,
    /// Port of the receiver.
    pub dst_port: u32,
    /// Bytes of payload.
    pub len: u32,
    /// Socket type: 1 stream, 2 messages.
    pub kind: u16,
    /// Number of the operation.
    pub op: u16,
    /// Meaning depends on the operation: [`flags`].
    pub flags: u32,
    /// Bytes that the sender takes for this connection without reading any.
    pub buf_alloc: u32,
    /// Bytes of this connection that the sender has taken out of that, modulo 2^32.
    pub fwd_cnt: u32,
}

impl Header {
    /// From its bytes.
    #[must_use]
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Self {
        Self {
            src_cid: u64::from_le_bytes(field(bytes, 0)),
            dst_cid: u64::from_le_bytes(field(bytes, 8)),
            src_port: u32::from_le_bytes(field(bytes, 16)),
            dst_port: u32::from_le_bytes(field(bytes, 20)),
            len: u32::from_le_bytes(field(bytes, 24)),
            kind: u16::from_le_bytes(field(bytes, 28)),
            op: u16::from_le_bytes(field(bytes, 30)),
            flags: u32::from_le_bytes(field(bytes, 32)),
            buf_alloc: u32::from_le_bytes(field(bytes, 36)),
            fwd_cnt: u32::from_le_bytes(field(bytes, 40)),
        }
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..8].copy_from_slice(&self.src_cid.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.dst_cid.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.src_port.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.dst_port.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.len.to_le_bytes());
        bytes[28..30].copy_from_slice(&self.kind.to_le_bytes());
        bytes[30..32].copy_from_slice(&self.op.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.flags.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.buf_alloc.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.fwd_cnt.to_le_bytes());
        bytes
    }

    /// The RST that answers this packet: addresses turned round, no credit.
    #[must_use]
    pub fn reset(&self) -> Self {
        Self {
            src_cid: self.dst_cid,
            dst_cid: self.src_cid,
            src_port: self.dst_port,
            dst_port: self.src_port,
            kind: self.kind,
            op: Operation::Reset as u16,
            ..Self::default()
        }
    }
}

fn field<const N: usize>(bytes: &[u8; HEADER_BYTES], offset: usize) -> [u8; N] {
    std::array::from_fn(|index| bytes[offset + index])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A packet as Linux 6.12 sends it: REQUEST of a stream from CID 3, port 1234 to CID 2, port 1024.
    const REQUEST: [u8; HEADER_BYTES] = [
        3, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0xd2, 4, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 1,
        0, 1, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0,
    ];

    #[test]
    fn fields_are_where_the_specification_puts_them() {
        let header = Header::parse(&REQUEST);
        assert_eq!(
            header,
            Header {
                src_cid: 3,
                dst_cid: 2,
                src_port: 1234,
                dst_port: 1024,
                len: 0,
                kind: type_number(VsockType::Stream),
                op: Operation::Request as u16,
                flags: 0,
                buf_alloc: 256 * 1024,
                fwd_cnt: 0,
            }
        );
        assert_eq!(header.bytes(), REQUEST);
    }

    #[test]
    fn a_reset_goes_back_where_the_packet_came_from() {
        let reset = Header::parse(&REQUEST).reset();
        assert_eq!((reset.src_cid, reset.src_port), (2, 1024));
        assert_eq!((reset.dst_cid, reset.dst_port), (3, 1234));
        assert_eq!((reset.op, reset.kind), (3, 1));
        assert_eq!((reset.len, reset.buf_alloc, reset.fwd_cnt), (0, 0, 0));
    }

    #[test]
    fn numbers_of_operations_are_the_specifications() {
        let known: Vec<u16> = (0..=u16::MAX)
            .filter(|&number| {
                Operation::from_number(number).is_some_and(|operation| operation as u16 == number)
            })
            .collect();
        assert_eq!(known, [1, 2, 3, 4, 5, 6, 7]);
    }

    proptest! {
        #[test]
        fn any_44_bytes_are_a_header_and_come_back_unchanged(bytes in proptest::array::uniform32(any::<u8>()),
            rest in proptest::array::uniform12(any::<u8>())) {
            let mut all = [0; HEADER_BYTES];
            all[..32].copy_from_slice(&bytes);
            all[32..].copy_from_slice(&rest);
            prop_assert_eq!(Header::parse(&all).bytes(), all);
        }
    }
}

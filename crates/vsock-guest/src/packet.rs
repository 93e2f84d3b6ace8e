//! The header of a virtio-vsock packet (virtio 1.3, §5.10.6), built by hand.

/// Bytes of a header.
pub const HEADER_BYTES: usize = 44;
/// Linux puts at most this much into one packet.
pub const PAYLOAD_BYTES_MAX: usize = 64 * 1024;
/// Flag of SHUTDOWN: the sender will receive no more.
pub const SHUTDOWN_RECEIVE: u32 = 1;
/// Flag of SHUTDOWN: the sender will send no more.
pub const SHUTDOWN_SEND: u32 = 2;
/// Flag of RW with SEQPACKET: last packet of a message.
pub const END_OF_MESSAGE: u32 = 1;
/// Flag of RW with SEQPACKET: last packet of a record (`MSG_EOR`).
pub const END_OF_RECORD: u32 = 2;
/// The host's CID.
pub const HOST_CID: u64 = 2;

/// Type of a socket, as in a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u16)]
pub enum Kind {
    /// Bytes.
    Stream = 1,
    /// Messages.
    Seqpacket = 2,
}

/// Operation of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Operation {
    /// Asks for a connection.
    Request = 1,
    /// Agrees.
    Response = 2,
    /// Refuses, or ends at once.
    Reset = 3,
    /// Says what will no longer be done.
    Shutdown = 4,
    /// Payload.
    ReadWrite = 5,
    /// Tells the credit.
    CreditUpdate = 6,
    /// Asks for the credit.
    CreditRequest = 7,
}

impl Operation {
    /// The operation of this number.
    #[must_use]
    pub fn of(number: u16) -> Option<Self> {
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

/// A header; any values, also those that nobody may send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Source CID.
    pub src_cid: u64,
    /// Destination CID.
    pub dst_cid: u64,
    /// Source port.
    pub src_port: u32,
    /// Destination port.
    pub dst_port: u32,
    /// Bytes of payload.
    pub len: u32,
    /// Type of the socket: see [`Kind`].
    pub kind: u16,
    /// See [`Operation`].
    pub op: u16,
    /// Flags of the operation.
    pub flags: u32,
    /// Bytes that the sender can buffer for this connection.
    pub buf_alloc: u32,
    /// Bytes that the sender has handed on so far, modulo 2³².
    pub fwd_cnt: u32,
}

impl Header {
    /// As it stands in memory.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
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

    /// From memory.
    #[must_use]
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Self {
        fn part<const N: usize>(bytes: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
            let mut part = [0; N];
            part.copy_from_slice(&bytes[at..at + N]);
            part
        }
        Self {
            src_cid: u64::from_le_bytes(part(bytes, 0)),
            dst_cid: u64::from_le_bytes(part(bytes, 8)),
            src_port: u32::from_le_bytes(part(bytes, 16)),
            dst_port: u32::from_le_bytes(part(bytes, 20)),
            len: u32::from_le_bytes(part(bytes, 24)),
            kind: u16::from_le_bytes(part(bytes, 28)),
            op: u16::from_le_bytes(part(bytes, 30)),
            flags: u32::from_le_bytes(part(bytes, 32)),
            buf_alloc: u32::from_le_bytes(part(bytes, 36)),
            fwd_cnt: u32::from_le_bytes(part(bytes, 40)),
        }
    }

    /// The operation, if it is one.
    #[must_use]
    pub fn operation(&self) -> Option<Operation> {
        Operation::of(self.op)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_44_bytes_in_the_order_of_the_specification() {
        let header = Header {
            src_cid: 0x0102_0304_0506_0708,
            dst_cid: 2,
            src_port: 0x1112_1314,
            dst_port: 0x2122_2324,
            len: 0x3132_3334,
            kind: 0x4142,
            op: 0x5152,
            flags: 0x6162_6364,
            buf_alloc: 0x7172_7374,
            fwd_cnt: 0x8182_8384,
        };
        let bytes = header.encode();
        assert_eq!(bytes[..9], [8, 7, 6, 5, 4, 3, 2, 1, 2]);
        assert_eq!(bytes[16..20], [0x14, 0x13, 0x12, 0x11]);
        assert_eq!(bytes[28..32], [0x42, 0x41, 0x52, 0x51]);
        assert_eq!(bytes[40..], [0x84, 0x83, 0x82, 0x81]);
        assert_eq!(Header::decode(&bytes), header);
    }
}

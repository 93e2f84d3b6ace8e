//! Packets as a capture shows them, made up for a connection whose real ones only its VMM sees.
//!
//! Addresses, order, lengths and payload are those of the connection; the guest's port is a number of our
//! own, and credit is what the relay would give.

use sandwire_api::vsock::HOST_CID;

use super::relay::Direction;
use crate::capture::{Sink, VIRTIO_HEADER};

/// Operations of a virtio vsock packet, as far as a relay has them (virtio 1.3, §5.10.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// The guest asks for a connection.
    Request,
    /// It has one.
    Response,
    /// It is over, or there is none.
    Reset,
    /// One side sends no more.
    Shutdown,
    /// Payload.
    Data,
}

/// A connection's addresses and what has gone over it.
#[derive(Clone, Debug)]
pub struct Packets {
    guest_cid: u32,
    guest_port: u32,
    host_port: u32,
    buffer: u32,
    egress: u32,
    ingress: u32,
}

impl Packets {
    /// For a connection to `host_port` of CID 2.
    #[must_use]
    pub fn new(guest_cid: u32, guest_port: u32, host_port: u32, buffer: u32) -> Self {
        Self {
            guest_cid,
            guest_port,
            host_port,
            buffer,
            egress: 0,
            ingress: 0,
        }
    }

    /// The port that the guest called.
    #[must_use]
    pub fn host_port(&self) -> u32 {
        self.host_port
    }

    /// Records a packet.
    pub fn record(
        &mut self,
        sink: &Sink,
        direction: Direction,
        operation: Operation,
        payload: &[u8],
    ) {
        /// The sender sends no more.
        const SHUTDOWN_SEND: u32 = 2;
        const TYPE_STREAM: u16 = 1;
        let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        let (operation, flags): (u16, u32) = match operation {
            Operation::Request => (1, 0),
            Operation::Response => (2, 0),
            Operation::Reset => (3, 0),
            Operation::Shutdown => (4, SHUTDOWN_SEND),
            Operation::Data => (5, 0),
        };
        let guest = (self.guest_cid, self.guest_port);
        let host = (HOST_CID, self.host_port);
        let (from, to, taken) = match direction {
            Direction::Egress => (guest, host, self.ingress),
            Direction::Ingress => (host, guest, self.egress),
        };
        let mut header = [0; VIRTIO_HEADER];
        header[0..8].copy_from_slice(&u64::from(from.0).to_le_bytes());
        header[8..16].copy_from_slice(&u64::from(to.0).to_le_bytes());
        header[16..20].copy_from_slice(&from.1.to_le_bytes());
        header[20..24].copy_from_slice(&to.1.to_le_bytes());
        header[24..28].copy_from_slice(&length.to_le_bytes());
        header[28..30].copy_from_slice(&TYPE_STREAM.to_le_bytes());
        header[30..32].copy_from_slice(&operation.to_le_bytes());
        header[32..36].copy_from_slice(&flags.to_le_bytes());
        header[36..40].copy_from_slice(&self.buffer.to_le_bytes());
        header[40..44].copy_from_slice(&taken.to_le_bytes());
        sink.record(&header, &[payload]);
        let count = match direction {
            Direction::Egress => &mut self.egress,
            Direction::Ingress => &mut self.ingress,
        };
        *count = count.wrapping_add(length);
    }
}

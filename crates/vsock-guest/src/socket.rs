//! One connection of a guest: its states and its credit, as Linux keeps them.

use std::collections::VecDeque;

use crate::packet::{END_OF_MESSAGE, END_OF_RECORD, Header, Kind, Operation, SHUTDOWN_SEND};

/// A socket of a guest. Numbers aren't used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Socket(pub(crate) usize);

/// What a packet's addresses say about the connection that it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// Type.
    pub kind: Kind,
    /// The guest's port.
    pub local_port: u32,
    /// The peer's CID.
    pub peer_cid: u64,
    /// The peer's port.
    pub peer_port: u32,
}

/// State of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Asked, not answered.
    Connecting,
    /// Both have agreed; see [`Connection::peer_shutdown`] for how much of it is left.
    Established,
    /// Over, by agreement: the peer answered the shutdown with RST, or the reverse.
    Closed,
    /// Over, by RST in the middle or instead of an answer.
    Reset,
}

/// What has become of a socket.
#[derive(Clone, Debug)]
pub struct Connection {
    /// Its addresses.
    pub address: Address,
    /// Its state.
    pub state: State,
    /// Flags of the peer's SHUTDOWN so far.
    pub peer_shutdown: u32,
    /// Flags of ours.
    pub own_shutdown: u32,
    /// Bytes that the peer can buffer, as it last said.
    pub peer_buf_alloc: u32,
    /// Bytes that it has handed on, as it last said.
    pub peer_fwd_cnt: u32,
    /// Bytes sent, modulo 2³².
    pub tx_cnt: u32,
    /// Bytes received, modulo 2³².
    pub rx_cnt: u32,
    /// Bytes that the user of the socket has taken, modulo 2³².
    pub fwd_cnt: u32,
    /// That number as last told to the peer.
    pub told_fwd_cnt: u32,
    /// What we can buffer.
    pub buf_alloc: u32,
    /// Bytes received in all.
    pub received: u64,
    /// Packets with payload received in all.
    pub received_packets: u64,
    /// Whether payload is copied to a private buffer and forgotten.
    pub drain: bool,
    pub(crate) bytes: VecDeque<u8>,
    /// Messages that are whole, and whether each ends a record.
    pub(crate) messages: VecDeque<(Vec<u8>, bool)>,
    pub(crate) partial: Vec<u8>,
}

impl Connection {
    pub(crate) fn new(address: Address, state: State, buf_alloc: u32) -> Self {
        Self {
            address,
            state,
            peer_shutdown: 0,
            own_shutdown: 0,
            peer_buf_alloc: 0,
            peer_fwd_cnt: 0,
            tx_cnt: 0,
            rx_cnt: 0,
            fwd_cnt: 0,
            told_fwd_cnt: 0,
            buf_alloc,
            received: 0,
            received_packets: 0,
            drain: false,
            bytes: VecDeque::new(),
            messages: VecDeque::new(),
            partial: Vec::new(),
        }
    }

    /// Bytes that may be sent now. As in Linux since 6.19 and its stable kernels of 2026, no more is on its way
    /// than this side takes itself.
    #[must_use]
    pub fn credit(&self) -> u32 {
        self.peer_buf_alloc
            .min(self.buf_alloc)
            .saturating_sub(self.tx_cnt.wrapping_sub(self.peer_fwd_cnt))
    }

    /// Whether something can be received, or is known never to come.
    #[must_use]
    pub fn readable(&self) -> bool {
        !self.bytes.is_empty() || !self.messages.is_empty() || self.at_end()
    }

    /// Whether nothing more will come.
    #[must_use]
    pub fn at_end(&self) -> bool {
        self.state != State::Established || self.peer_shutdown & SHUTDOWN_SEND != 0
    }

    /// A header of this connection; what it says of credit is remembered as told.
    pub fn header(&mut self, cid: u64, operation: Operation) -> Header {
        self.told_fwd_cnt = self.fwd_cnt;
        Header {
            src_cid: cid,
            dst_cid: self.address.peer_cid,
            src_port: self.address.local_port,
            dst_port: self.address.peer_port,
            len: 0,
            kind: self.address.kind as u16,
            op: operation as u16,
            flags: 0,
            buf_alloc: self.buf_alloc,
            fwd_cnt: self.fwd_cnt,
        }
    }

    /// Takes what a header says of the peer's credit. A peer can't have handed on what it wasn't sent.
    pub(crate) fn take_credit(&mut self, header: &Header) -> Result<(), String> {
        let outstanding = self.tx_cnt.wrapping_sub(header.fwd_cnt);
        let known = self.tx_cnt.wrapping_sub(self.peer_fwd_cnt);
        self.peer_buf_alloc = header.buf_alloc;
        if outstanding > known {
            return Err(format!(
                "fwd_cnt {} of {:?}, with {} sent and {} told before",
                header.fwd_cnt, self.address, self.tx_cnt, self.peer_fwd_cnt
            ));
        }
        self.peer_fwd_cnt = header.fwd_cnt;
        Ok(())
    }

    /// Takes a packet's payload. It may not be more than the credit that the peer was given.
    pub(crate) fn take_payload(&mut self, header: &Header, payload: &[u8]) -> Result<(), String> {
        self.rx_cnt = self.rx_cnt.wrapping_add(header.len);
        self.received += payload.len() as u64;
        self.received_packets += 1;
        let waiting = self.rx_cnt.wrapping_sub(self.told_fwd_cnt);
        if self.drain {
            self.fwd_cnt = self.rx_cnt;
        } else if self.address.kind == Kind::Stream {
            self.bytes.extend(payload);
        } else {
            self.partial.extend_from_slice(payload);
            if header.flags & END_OF_MESSAGE != 0 {
                let record = header.flags & END_OF_RECORD != 0;
                self.messages
                    .push_back((std::mem::take(&mut self.partial), record));
            }
        }
        if waiting > self.buf_alloc {
            return Err(format!(
                "{waiting} bytes sent against a credit of {} on {:?}",
                self.buf_alloc, self.address
            ));
        }
        Ok(())
    }

    /// Whether the peer doesn't know of everything that the user has taken.
    pub(crate) fn is_news(&self) -> bool {
        self.state == State::Established && self.fwd_cnt != self.told_fwd_cnt
    }

    /// Whether the peer should be told of credit now: Linux does so when it believes that less than a packet
    /// of 64 KiB fits.
    pub(crate) fn update_due(&self) -> bool {
        let unknown = self.fwd_cnt.wrapping_sub(self.told_fwd_cnt);
        let believed = self.buf_alloc.saturating_sub(unknown);
        self.state == State::Established
            && unknown > 0
            && believed < (64 * 1024).min(self.buf_alloc / 2 + 1)
    }
}

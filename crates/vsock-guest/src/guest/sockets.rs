//! What a guest's kernel knows of its sockets, and what it answers by itself: pure, without queues.

use std::collections::{HashMap, VecDeque};

use super::{FIRST_PORT, SHUTDOWN_BOTH};
use crate::{
    packet::{Header, Kind, Operation, SHUTDOWN_SEND},
    socket::{Address, Connection, Socket, State},
};

/// All that the guest's kernel knows of its sockets.
#[derive(Clone, Debug)]
pub(super) struct Sockets {
    pub(super) connections: Vec<Connection>,
    pub(super) by_address: HashMap<Address, usize>,
    pub(super) listeners: HashMap<(Kind, u32), VecDeque<Socket>>,
    /// Sockets that drain and have taken something since [`Self::tell_drained`].
    drained: Vec<usize>,
    /// Packets that found no slot.
    pub(super) outbox: VecDeque<Header>,
    pub(super) next_port: u32,
    pub(super) transport_resets: u64,
    /// `buf_alloc` of new ones.
    pub(super) buffer_bytes: u32,
    /// The packets that came, if they are kept.
    pub(super) log: Option<Vec<(Header, Vec<u8>)>>,
}

impl super::Guest {
    /// Packets that found no slot in the ring yet.
    #[must_use]
    pub fn waiting_packets(&self) -> usize {
        self.sockets.outbox.len()
    }
}

impl Sockets {
    pub(super) fn new(buffer_bytes: u32) -> Self {
        Self {
            connections: Vec::new(),
            by_address: HashMap::new(),
            listeners: HashMap::new(),
            drained: Vec::new(),
            outbox: VecDeque::new(),
            next_port: FIRST_PORT,
            transport_resets: 0,
            buffer_bytes,
            log: None,
        }
    }

    pub(super) fn add(&mut self, address: Address, state: State) -> Socket {
        let socket = self.connections.len();
        self.connections
            .push(Connection::new(address, state, self.buffer_bytes));
        self.by_address.insert(address, socket);
        Socket(socket)
    }

    /// Ends a connection, unless it has ended.
    pub(super) fn finish(&mut self, index: usize, state: State) {
        let connection = &mut self.connections[index];
        if matches!(connection.state, State::Connecting | State::Established) {
            connection.state = state;
            self.by_address.remove(&connection.address);
        }
    }

    /// Tells peers of credit where the user has taken all that came: Linux does so since 6.8, whenever less is
    /// left than wakes a reader.
    pub(super) fn tell_drained(&mut self, cid: u64) {
        let mut drained = std::mem::take(&mut self.drained);
        for index in drained.drain(..) {
            if self.connections[index].is_news() {
                self.reply(index, cid, Operation::CreditUpdate);
            }
        }
        self.drained = drained;
    }

    fn reply(&mut self, index: usize, cid: u64, operation: Operation) {
        let header = self.connections[index].header(cid, operation);
        self.outbox.push_back(header);
    }

    /// Takes a packet as Linux does. An error is what the device did wrong.
    pub(super) fn take(&mut self, cid: u64, header: &Header, payload: &[u8]) -> Result<(), String> {
        if let Some(log) = &mut self.log {
            log.push((*header, payload.to_vec()));
        }
        let kind = match header.kind {
            1 => Kind::Stream,
            2 => Kind::Seqpacket,
            _ => return Err(format!("unknown type: {header:?}")),
        };
        if header.dst_cid != cid {
            return Err(format!("for somebody else than {cid}: {header:?}"));
        }
        let Some(operation) = header.operation() else {
            return Err(format!("unknown operation: {header:?}"));
        };
        if !payload.is_empty() && operation != Operation::ReadWrite {
            return Err(format!("payload with {operation:?}: {header:?}"));
        }
        let address = Address {
            kind,
            local_port: header.dst_port,
            peer_cid: header.src_cid,
            peer_port: header.src_port,
        };
        match self.by_address.get(&address) {
            Some(index) => self.take_known(*index, cid, header, payload, operation),
            None => {
                self.take_unknown(address, cid, header, operation);
                Ok(())
            }
        }
    }

    fn take_unknown(&mut self, address: Address, cid: u64, header: &Header, operation: Operation) {
        if operation == Operation::Reset {
            return;
        }
        let listener = (address.kind, address.local_port);
        if operation == Operation::Request && self.listeners.contains_key(&listener) {
            let socket = self.add(address, State::Established);
            let connection = &mut self.connections[socket.0];
            connection.peer_buf_alloc = header.buf_alloc;
            connection.peer_fwd_cnt = header.fwd_cnt;
            self.reply(socket.0, cid, Operation::Response);
            if let Some(backlog) = self.listeners.get_mut(&listener) {
                backlog.push_back(socket);
            }
            return;
        }
        self.outbox.push_back(Header {
            src_cid: cid,
            dst_cid: header.src_cid,
            src_port: header.dst_port,
            dst_port: header.src_port,
            kind: header.kind,
            op: Operation::Reset as u16,
            ..Header::default()
        });
    }

    fn take_known(
        &mut self,
        index: usize,
        cid: u64,
        header: &Header,
        payload: &[u8],
        operation: Operation,
    ) -> Result<(), String> {
        let connection = &mut self.connections[index];
        let mut verdict = Ok(());
        if operation != Operation::Reset {
            verdict = connection.take_credit(header);
        }
        match (connection.state, operation) {
            (State::Connecting, Operation::Response) => connection.state = State::Established,
            (State::Connecting, Operation::Reset) => self.finish(index, State::Reset),
            (State::Established, Operation::Reset) => {
                // An answer to our full shutdown, or the end in the middle.
                let agreed = connection.own_shutdown == SHUTDOWN_BOTH;
                self.finish(index, if agreed { State::Closed } else { State::Reset });
            }
            (State::Established, Operation::ReadWrite) => {
                if connection.peer_shutdown & SHUTDOWN_SEND != 0 {
                    return Err(format!("payload after SHUTDOWN: {header:?}"));
                }
                verdict = verdict.and(connection.take_payload(header, payload));
                if connection.drain {
                    if connection.update_due() {
                        self.reply(index, cid, Operation::CreditUpdate);
                    }
                    if self.drained.last() != Some(&index) {
                        self.drained.push(index);
                    }
                }
            }
            (State::Established, Operation::CreditUpdate) => {}
            (State::Established, Operation::CreditRequest) => {
                self.reply(index, cid, Operation::CreditUpdate);
            }
            (State::Established, Operation::Shutdown) => {
                connection.peer_shutdown |= header.flags;
                let over = connection.peer_shutdown & SHUTDOWN_BOTH == SHUTDOWN_BOTH;
                if over && connection.bytes.is_empty() && connection.messages.is_empty() {
                    self.reply(index, cid, Operation::Reset);
                    self.finish(index, State::Closed);
                }
            }
            (state, _) => return Err(format!("{operation:?} while {state:?}: {header:?}")),
        }
        verdict
    }
}

//! Sockets of a guest: connect, listen, accept, send, receive, shut down, with what Linux answers by itself.
//!
//! Nothing happens behind the caller's back: packets are processed in [`Guest::poll`], which every blocking
//! call does while it waits. So a guest is one value in one thread, and many of them can take turns.

mod sockets;

use std::{
    path::Path,
    time::{Duration, Instant},
};

use self::sockets::Sockets;
use crate::{
    GuestError, Result, Settings, Transport,
    memory::Memory,
    packet::{
        END_OF_MESSAGE, END_OF_RECORD, HOST_CID, Header, Kind, Operation, SHUTDOWN_RECEIVE,
        SHUTDOWN_SEND,
    },
    socket::{Address, Connection, Socket, State},
    transport::{Queues, TRANSPORT_RESET},
};

const SHUTDOWN_BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;
const FIRST_PORT: u32 = 0x4000_0000;

/// A guest with sockets.
#[derive(Debug)]
pub struct Guest {
    transport: Transport,
    sockets: Sockets,
}

/// A guest that was stopped: its memory, its queues' state and what its kernel knew. Any number of clones can
/// be made of it.
#[derive(Debug)]
pub struct Snapshot {
    settings: Settings,
    memory: Memory,
    queues: Queues,
    bases: [u16; 3],
    sockets: Sockets,
}

impl Guest {
    /// Boots: connects to the back end at `path` and starts the queues.
    ///
    /// # Errors
    /// The back end can't be reached or refuses.
    pub fn connect(settings: &Settings, path: &Path) -> Result<Self> {
        Ok(Self {
            transport: Transport::connect(settings, path)?,
            sockets: Sockets::new(settings.buffer_bytes),
        })
    }

    /// The guest's CID.
    #[must_use]
    pub fn cid(&self) -> u64 {
        self.transport.cid()
    }

    /// The queues, for those who want to lie.
    pub fn transport(&mut self) -> &mut Transport {
        &mut self.transport
    }

    /// What the device has done that it may not do: used what it wasn't given, sent against credit or to others.
    #[must_use]
    pub fn violations(&self) -> &[String] {
        self.transport.violations()
    }

    /// How often the device has said that all connections are gone.
    #[must_use]
    pub fn transport_resets(&self) -> u64 {
        self.sockets.transport_resets
    }

    /// Keeps every packet that comes from now on, for [`take_log`](Self::take_log).
    pub fn keep_log(&mut self) {
        self.sockets.log.get_or_insert_default();
    }

    /// The packets that were kept.
    pub fn take_log(&mut self) -> Vec<(Header, Vec<u8>)> {
        self.sockets
            .log
            .as_mut()
            .map(std::mem::take)
            .unwrap_or_default()
    }

    /// What is known of a socket.
    ///
    /// # Panics
    /// The socket is another guest's.
    #[must_use]
    pub fn socket(&self, socket: Socket) -> &Connection {
        &self.sockets.connections[socket.0]
    }

    /// The same to be changed: its buffer, whether it drains, what it tells of credit.
    ///
    /// # Panics
    /// The socket is another guest's.
    pub fn socket_mut(&mut self, socket: Socket) -> &mut Connection {
        &mut self.sockets.connections[socket.0]
    }

    // Opening.

    /// Connects and waits for the answer.
    ///
    /// # Errors
    /// RST was answered, or nothing in time.
    pub fn open(&mut self, kind: Kind, cid: u64, port: u32) -> Result<Socket> {
        let socket = self.start_open(kind, cid, port);
        self.wait_until("connect", |guest| {
            guest.socket(socket).state != State::Connecting
        })?;
        match self.socket(socket).state {
            State::Reset => Err(GuestError::Reset),
            _ => Ok(socket),
        }
    }

    /// A stream to a port of the host.
    ///
    /// # Errors
    /// RST was answered, or nothing in time.
    pub fn open_stream(&mut self, port: u32) -> Result<Socket> {
        self.open(Kind::Stream, HOST_CID, port)
    }

    /// Asks for a connection and doesn't wait.
    pub fn start_open(&mut self, kind: Kind, cid: u64, port: u32) -> Socket {
        let address = Address {
            kind,
            local_port: self.sockets.next_port,
            peer_cid: cid,
            peer_port: port,
        };
        self.sockets.next_port += 1;
        let socket = self.sockets.add(address, State::Connecting);
        self.control(socket, Operation::Request, 0);
        self.transport.kick();
        socket
    }

    /// Accepts connections to a port from now on.
    pub fn listen(&mut self, kind: Kind, port: u32) {
        self.sockets.listeners.entry((kind, port)).or_default();
    }

    /// Refuses connections to a port from now on.
    pub fn stop_listening(&mut self, kind: Kind, port: u32) {
        self.sockets.listeners.remove(&(kind, port));
    }

    /// Waits for the next connection to a port.
    ///
    /// # Errors
    /// None came in time.
    pub fn accept(&mut self, kind: Kind, port: u32) -> Result<Socket> {
        let mut accepted = None;
        self.wait_until("accept", |guest| {
            accepted = guest.try_accept(kind, port);
            accepted.is_some()
        })?;
        accepted.ok_or(GuestError::NotConnected)
    }

    /// The next connection to a port, if one is there.
    pub fn try_accept(&mut self, kind: Kind, port: u32) -> Option<Socket> {
        self.sockets.listeners.get_mut(&(kind, port))?.pop_front()
    }

    // Sending.

    /// Puts as much into packets as credit and slots allow; gives how much that was. The device isn't kicked
    /// before the next [`poll`](Self::poll) or [`kick`](Self::kick).
    ///
    /// # Errors
    /// The socket can't send any more.
    pub fn try_send(&mut self, socket: Socket, bytes: &[u8]) -> Result<usize> {
        self.try_send_flagged(socket, bytes, 0)
    }

    fn try_send_flagged(&mut self, socket: Socket, bytes: &[u8], flags: u32) -> Result<usize> {
        let cid = self.transport.cid();
        let most = self.transport.settings.transmit_bytes as usize;
        let connection = &mut self.sockets.connections[socket.0];
        match connection.state {
            State::Established => {}
            State::Reset => return Err(GuestError::Reset),
            State::Connecting | State::Closed => return Err(GuestError::NotConnected),
        }
        if connection.own_shutdown & SHUTDOWN_SEND != 0
            || connection.peer_shutdown & SHUTDOWN_RECEIVE != 0
        {
            return Err(GuestError::ShutDown);
        }
        let mut sent = 0;
        loop {
            let left = bytes.len() - sent;
            let length = left.min(most).min(connection.credit() as usize);
            // An empty message is a packet; an empty write to a stream is nothing.
            if (length == 0 && (flags == 0 || left > 0)) || !self.transport.has_slot() {
                return Ok(sent);
            }
            let mut header = connection.header(cid, Operation::ReadWrite);
            header.len = u32::try_from(length).expect("a packet is smaller than 4 GiB");
            if length == left {
                header.flags = flags;
            }
            if !self.transport.send(&header, &bytes[sent..sent + length]) {
                return Ok(sent);
            }
            connection.tx_cnt = connection.tx_cnt.wrapping_add(header.len);
            sent += length;
            if sent == bytes.len() {
                return Ok(sent);
            }
        }
    }

    /// Sends all of it, waiting for credit.
    ///
    /// # Errors
    /// The socket can't send any more, or the peer gives no credit in time.
    pub fn send(&mut self, socket: Socket, bytes: &[u8]) -> Result<()> {
        self.send_flagged(socket, bytes, 0)
    }

    /// Sends a message, waiting for credit; `record` sets the flag for `MSG_EOR`.
    ///
    /// # Errors
    /// The socket can't send any more, the message is longer than the peer's buffer, or the peer gives no credit
    /// in time.
    pub fn send_message(&mut self, socket: Socket, bytes: &[u8], record: bool) -> Result<()> {
        let buffer = self.socket(socket).peer_buf_alloc;
        if bytes.len() > buffer as usize {
            return Err(GuestError::MessageTooLong {
                length: bytes.len(),
                buffer,
            });
        }
        let flags = END_OF_MESSAGE | if record { END_OF_RECORD } else { 0 };
        if bytes.is_empty() {
            let mut header = self.header(socket, Operation::ReadWrite);
            header.flags = flags;
            self.put(header);
            self.poll();
            return Ok(());
        }
        self.send_flagged(socket, bytes, flags)
    }

    fn send_flagged(&mut self, socket: Socket, bytes: &[u8], flags: u32) -> Result<()> {
        let mut sent = 0;
        let mut deadline = self.deadline();
        while sent < bytes.len() {
            let count = self.try_send_flagged(socket, &bytes[sent..], flags)?;
            self.poll();
            sent += count;
            if count > 0 {
                deadline = self.deadline();
            } else if !self.may_send(socket) {
                self.transport.wait(deadline, "send")?;
                self.poll();
            }
        }
        Ok(())
    }

    /// Whether sending wouldn't have to wait, or would fail at once.
    pub fn may_send(&mut self, socket: Socket) -> bool {
        let connection = self.socket(socket);
        let over = connection.state != State::Established
            || connection.peer_shutdown & SHUTDOWN_RECEIVE != 0;
        over || connection.credit() > 0 && self.transport.has_slot()
    }

    // Receiving.

    /// Receives what is there, at most `bytes.len()`; waits if nothing is. 0 at the peer's end.
    ///
    /// # Errors
    /// The connection was reset, or nothing came in time.
    pub fn receive(&mut self, socket: Socket, bytes: &mut [u8]) -> Result<usize> {
        self.wait_until("receive", |guest| guest.socket(socket).readable())?;
        self.try_receive(socket, bytes)
    }

    /// Receives what is there, at most `bytes.len()`; 0 if nothing is.
    ///
    /// # Errors
    /// The connection was reset and nothing is left.
    pub fn try_receive(&mut self, socket: Socket, bytes: &mut [u8]) -> Result<usize> {
        let connection = &mut self.sockets.connections[socket.0];
        let (first, second) = connection.bytes.as_slices();
        let from_first = first.len().min(bytes.len());
        let from_second = second.len().min(bytes.len() - from_first);
        let count = from_first + from_second;
        bytes[..from_first].copy_from_slice(&first[..from_first]);
        bytes[from_first..count].copy_from_slice(&second[..from_second]);
        if count == 0
            && connection.state == State::Reset
            && connection.peer_shutdown & SHUTDOWN_SEND == 0
        {
            return Err(GuestError::Reset);
        }
        connection.bytes.drain(..count);
        self.taken(socket, count);
        Ok(count)
    }

    /// Receives exactly so many bytes.
    ///
    /// # Errors
    /// The connection ended before, or nothing came in time.
    pub fn receive_exact(&mut self, socket: Socket, count: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; count];
        let mut done = 0;
        while done < count {
            match self.receive(socket, &mut bytes[done..])? {
                0 => return Err(GuestError::NotConnected),
                more => done += more,
            }
        }
        Ok(bytes)
    }

    /// Receives until the peer's end.
    ///
    /// # Errors
    /// The connection was reset, or nothing came in time.
    pub fn receive_to_end(&mut self, socket: Socket) -> Result<Vec<u8>> {
        let mut all = Vec::new();
        let mut bytes = vec![0; 64 * 1024];
        loop {
            match self.receive(socket, &mut bytes)? {
                0 => return Ok(all),
                count => all.extend_from_slice(&bytes[..count]),
            }
        }
    }

    /// Receives a message and whether it ends a record; nothing at the peer's end.
    ///
    /// # Errors
    /// The connection was reset, or nothing came in time.
    pub fn receive_message(&mut self, socket: Socket) -> Result<Option<(Vec<u8>, bool)>> {
        self.wait_until("receive a message", |guest| guest.socket(socket).readable())?;
        let connection = &mut self.sockets.connections[socket.0];
        let Some((message, record)) = connection.messages.pop_front() else {
            return match connection.state {
                State::Reset if connection.peer_shutdown & SHUTDOWN_SEND == 0 => {
                    Err(GuestError::Reset)
                }
                _ => Ok(None),
            };
        };
        self.taken(socket, message.len());
        Ok(Some((message, record)))
    }

    /// Counts bytes as handed on, and tells the peer when it is time.
    fn taken(&mut self, socket: Socket, count: usize) {
        let connection = &mut self.sockets.connections[socket.0];
        let count = u32::try_from(count).expect("no more than was buffered");
        connection.fwd_cnt = connection.fwd_cnt.wrapping_add(count);
        let emptied = connection.bytes.is_empty() && connection.messages.is_empty();
        if connection.update_due() || emptied && connection.is_news() {
            self.control(socket, Operation::CreditUpdate, 0);
            self.transport.kick();
        }
    }

    // Ending.

    /// Tells the peer what won't be done any more: [`SHUTDOWN_SEND`], [`SHUTDOWN_RECEIVE`].
    pub fn shut_down(&mut self, socket: Socket, flags: u32) {
        let connection = self.socket_mut(socket);
        connection.own_shutdown |= flags;
        let all = connection.own_shutdown;
        self.control(socket, Operation::Shutdown, all);
        self.transport.kick();
    }

    /// Closes as Linux does: shutdown of both, then the peer's RST is waited for; or RST if the peer has said
    /// the same before.
    ///
    /// # Errors
    /// The peer doesn't answer in time.
    pub fn close(&mut self, socket: Socket) -> Result<()> {
        let connection = self.socket_mut(socket);
        match connection.state {
            State::Closed | State::Reset => return Ok(()),
            State::Established if connection.peer_shutdown & SHUTDOWN_BOTH != SHUTDOWN_BOTH => {
                self.shut_down(socket, SHUTDOWN_BOTH);
            }
            State::Established | State::Connecting => {
                self.reset(socket);
                return Ok(());
            }
        }
        self.wait_until("close", |guest| {
            guest.socket(socket).state != State::Established
        })
    }

    /// Ends a connection at once, by RST.
    pub fn reset(&mut self, socket: Socket) {
        self.control(socket, Operation::Reset, 0);
        self.sockets.finish(socket.0, State::Closed);
        self.transport.kick();
    }

    // Progress.

    /// Does what is to be done and doesn't wait; gives the number of packets that came.
    pub fn poll(&mut self) -> usize {
        let mut count = 0;
        while let Some(event) = self.transport.event() {
            if event == TRANSPORT_RESET {
                self.transport_reset();
            } else {
                self.transport.accuse(format!("event {event}"));
            }
        }
        let cid = self.transport.cid();
        while let Some((header, payload)) = self.transport.receive() {
            count += 1;
            if let Err(violation) = self.sockets.take(cid, &header, payload) {
                self.transport.accuse(violation);
            }
        }
        self.sockets.tell_drained(cid);
        while let Some(header) = self.sockets.outbox.pop_front() {
            if !self.transport.send(&header, &[]) {
                self.sockets.outbox.push_front(header);
                break;
            }
        }
        self.transport.kick();
        count
    }

    /// Kicks the device for what was sent.
    pub fn kick(&mut self) {
        self.transport.kick();
    }

    /// Sleeps until the device calls, then does what is to be done.
    ///
    /// # Errors
    /// The back end is gone, or nothing happened in time.
    pub fn wait(&mut self, timeout: Duration) -> Result<usize> {
        self.transport
            .wait(Instant::now() + timeout, "waiting for the device")?;
        Ok(self.poll())
    }

    /// Does what is to be done for so long, whatever it is.
    ///
    /// # Errors
    /// The back end is gone.
    pub fn run_for(&mut self, time: Duration) -> Result<()> {
        let deadline = Instant::now() + time;
        self.poll();
        while Instant::now() < deadline {
            match self.transport.wait(deadline, "running") {
                Ok(()) | Err(GuestError::TimedOut { .. }) => self.poll(),
                Err(error) => return Err(error),
            };
        }
        Ok(())
    }

    /// Does what is to be done until the condition holds, at most as long as the settings say.
    ///
    /// # Errors
    /// The back end is gone, or it didn't come to hold in time.
    pub fn wait_until(
        &mut self,
        operation: &'static str,
        mut condition: impl FnMut(&mut Self) -> bool,
    ) -> Result<()> {
        let deadline = self.deadline();
        loop {
            self.poll();
            if condition(self) {
                return Ok(());
            }
            self.transport.wait(deadline, operation)?;
        }
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.transport.settings.timeout
    }

    /// A header of a socket, with its credit, to be changed and sent by [`put`](Self::put).
    ///
    /// # Panics
    /// The socket is another guest's.
    pub fn header(&mut self, socket: Socket, operation: Operation) -> Header {
        let cid = self.transport.cid();
        self.sockets.connections[socket.0].header(cid, operation)
    }

    /// Sends a packet without payload, behind those that wait for a slot.
    pub fn put(&mut self, header: Header) {
        if !self.sockets.outbox.is_empty() || !self.transport.send(&header, &[]) {
            self.sockets.outbox.push_back(header);
        }
    }

    fn control(&mut self, socket: Socket, operation: Operation, flags: u32) {
        let mut header = self.header(socket, operation);
        header.flags = flags;
        self.put(header);
    }

    fn transport_reset(&mut self) {
        self.sockets.transport_resets += 1;
        for index in 0..self.sockets.connections.len() {
            self.sockets.finish(index, State::Reset);
        }
        if let Err(error) = self.transport.read_cid() {
            self.transport
                .accuse(format!("no CID after a transport reset: {error}"));
        }
    }

    // Another back end, another guest.

    /// Connects to a back end that was started anew.
    ///
    /// # Errors
    /// The back end can't be reached or refuses.
    pub fn reconnect(&mut self, path: &Path) -> Result<()> {
        self.transport.reconnect(path)
    }

    /// Stops the queues and copies all that a clone needs. The guest is still stopped:
    /// [`resume`](Self::resume).
    ///
    /// # Errors
    /// The back end doesn't answer, or memory is short.
    pub fn snapshot(&mut self) -> Result<Snapshot> {
        self.transport.kick();
        let bases = self.transport.stop()?;
        Ok(Snapshot {
            settings: self.transport.settings.clone(),
            memory: self
                .transport
                .memory
                .duplicate()
                .map_err(GuestError::system("copy of the memory"))?,
            queues: self.transport.queues.clone(),
            bases,
            sockets: self.sockets.clone(),
        })
    }

    /// Goes on after a [`snapshot`](Self::snapshot), by the same connection to the back end.
    ///
    /// # Errors
    /// The back end refuses.
    pub fn resume(&mut self, snapshot: &Snapshot) -> Result<()> {
        self.transport.start_again(snapshot.bases)
    }

    /// A clone: memory of its own with the same content, and the rings go on where they stood.
    ///
    /// # Errors
    /// The back end at `path` can't be reached or refuses.
    pub fn restore(snapshot: &Snapshot, path: &Path) -> Result<Self> {
        let memory = snapshot
            .memory
            .duplicate()
            .map_err(GuestError::system("copy of the memory"))?;
        Ok(Self {
            transport: Transport::resume(
                snapshot.settings.clone(),
                memory,
                snapshot.queues.clone(),
                snapshot.bases,
                path,
            )?,
            sockets: snapshot.sockets.clone(),
        })
    }
}

//! A small synchronous netlink socket.
//!
//! A [`Request`] holds many messages, sent by one system call. Only the last asks for an
//! acknowledgement: the kernel handles the messages of one send in order and reports every failure
//! unasked, so the acknowledgement of the last one ends the answer. Each message carries the name of
//! its object, which the error repeats together with the kernel's own text (`NETLINK_EXT_ACK`).
//!
//! A socket belongs to the network namespace that its creator was in, wherever it is used from.
//! Sockets are not shared between threads: an answer goes to whoever asked last.

pub mod attribute;

use std::{collections::BTreeMap, io, mem};

use attribute::{Attributes, Writer};
use netlink_sys::{Socket as RawSocket, SocketAddr};

use crate::{Error, number::narrow};

const HEADER: usize = 16;
const RECEIVE_BUFFER: usize = 64 * 1024;
const SOCKET_BUFFER: usize = 4 * 1024 * 1024;
/// A dump that the kernel says was disturbed is done again this often.
const DUMP_ATTEMPTS: usize = 8;

const NLM_F_DUMP_INTR: u16 = 0x10;
const NLM_F_CAPPED: u16 = 0x100;
const NLM_F_ACK_TLVS: u16 = 0x200;
const NLMSGERR_ATTR_MSG: u16 = 1;

/// Flags of a message that creates an object that must not exist yet.
pub const CREATE: u16 = narrow(libc::NLM_F_CREATE | libc::NLM_F_EXCL);
/// Flags of a message that creates an object or replaces it.
pub const REPLACE: u16 = narrow(libc::NLM_F_CREATE | libc::NLM_F_REPLACE);
/// Flags of a message that changes or deletes an object.
pub const CHANGE: u16 = 0;

/// Messages to be sent together.
#[derive(Debug, Default)]
pub struct Request {
    bytes: Vec<u8>,
    messages: Vec<Label>,
}

/// What one message of a request does, for its error.
#[derive(Debug)]
struct Label {
    start: usize,
    operation: &'static str,
    object: String,
}

impl Request {
    /// An empty request.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether there is nothing to send.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Number of messages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.messages.len()
    }

    /// Appends a message. `operation` and `object` name it in errors.
    pub fn message(
        &mut self,
        (kind, flags): (u16, u16),
        operation: &'static str,
        object: impl Into<String>,
        fill: impl FnOnce(&mut Writer<'_>),
    ) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; HEADER]);
        fill(&mut Writer::new(&mut self.bytes));
        let length = u32::try_from(self.bytes.len() - start).expect("messages are small");
        let flags = flags | narrow(libc::NLM_F_REQUEST);
        self.bytes[start..start + 4].copy_from_slice(&length.to_ne_bytes());
        self.bytes[start + 4..start + 6].copy_from_slice(&kind.to_ne_bytes());
        self.bytes[start + 6..start + 8].copy_from_slice(&flags.to_ne_bytes());
        self.messages.push(Label {
            start,
            operation,
            object: object.into(),
        });
    }

    fn number(&mut self, first: u32) {
        for (label, sequence) in self.messages.iter().zip(first..) {
            let at = label.start + 8;
            self.bytes[at..at + 4].copy_from_slice(&sequence.to_ne_bytes());
        }
    }

    fn acknowledge(&mut self, message: usize) {
        let at = self.messages[message].start + 6;
        let flags = u16::from_ne_bytes([self.bytes[at], self.bytes[at + 1]]);
        let flags = flags | narrow(libc::NLM_F_ACK);
        self.bytes[at..at + 2].copy_from_slice(&flags.to_ne_bytes());
    }
}

/// A netlink socket.
#[derive(Debug)]
pub struct Socket {
    socket: RawSocket,
    sequence: u32,
    buffer: Vec<u8>,
}

/// A message as the kernel sent it.
#[derive(Clone, Copy, Debug)]
pub struct Reply<'a> {
    /// Type of the message.
    pub kind: u16,
    /// What follows the netlink header: the family's header and its attributes.
    pub payload: &'a [u8],
    sequence: u32,
    flags: u16,
}

impl Socket {
    /// Opens an rtnetlink socket in the network namespace that the thread is in.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn route() -> Result<Self, Error> {
        Self::open(libc::NETLINK_ROUTE, "rtnetlink socket")
    }

    /// Opens an nfnetlink socket in the network namespace that the thread is in.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn netfilter() -> Result<Self, Error> {
        Self::open(libc::NETLINK_NETFILTER, "nfnetlink socket")
    }

    /// Opens a generic netlink socket in the network namespace that the thread is in.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn generic() -> Result<Self, Error> {
        Self::open(libc::NETLINK_GENERIC, "generic netlink socket")
    }

    /// Opens a socket that asks about the sockets of the network namespace that the thread is in.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn diagnosis() -> Result<Self, Error> {
        Self::open(libc::NETLINK_INET_DIAG, "sock_diag socket")
    }

    /// Has the kernel tell this socket, unasked, of what happens to the objects of a group.
    pub(crate) fn join(&mut self, group: u32) -> io::Result<()> {
        self.socket.add_membership(group)
    }

    /// Has the kernel list only what fits all that a question says.
    pub(crate) fn filter_dumps(&mut self) -> io::Result<()> {
        self.socket.set_netlink_get_strict_chk(true)
    }

    /// What the kernel told unasked, waiting at most this long.
    pub(crate) fn listen<T>(
        &mut self,
        at_most: std::time::Duration,
        mut read: impl FnMut(Reply<'_>) -> Option<T>,
    ) -> io::Result<Vec<T>> {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let timeout = Timespec::try_from(at_most).map_err(io::Error::other)?;
        let mut waited = [PollFd::new(&self.socket, PollFlags::IN)];
        match poll(&mut waited, Some(&timeout)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(Vec::new()),
            other => drop(other?),
        }
        let received = self.receive()?;
        Ok(Replies(&received).filter_map(&mut read).collect())
    }

    fn open(protocol: i32, object: &'static str) -> Result<Self, Error> {
        let protocol = isize::try_from(protocol).expect("protocol numbers are small");
        let open = || -> io::Result<RawSocket> {
            let mut socket = RawSocket::new(protocol)?;
            socket.bind_auto()?;
            socket.connect(&SocketAddr::new(0, 0))?;
            socket.set_ext_ack(true)?;
            socket.set_cap_ack(true)?;
            Ok(socket)
        };
        Ok(Self {
            socket: open().map_err(|source| Error::system("open", object, source))?,
            sequence: 1,
            buffer: Vec::with_capacity(RECEIVE_BUFFER),
        })
    }

    /// Makes room for the answers to large requests. Without the right to it, the default stays.
    pub fn grow_buffers(&self) {
        use rustix::net::sockopt::{
            set_socket_recv_buffer_size_force, set_socket_send_buffer_size_force,
        };
        // A refusal only means smaller batches fit; a batch that doesn't reports that itself.
        let _ = set_socket_recv_buffer_size_force(&self.socket, SOCKET_BUFFER);
        let _ = set_socket_send_buffer_size_force(&self.socket, SOCKET_BUFFER);
    }

    /// Sends all messages and waits for their end.
    ///
    /// # Errors
    /// The first failure. The other messages have been carried out where that was possible.
    pub fn execute(&mut self, request: Request) -> Result<(), Error> {
        self.execute_all(request)
            .into_iter()
            .next()
            .map_or(Ok(()), |(_, error)| Err(error))
    }

    /// Sends all messages and returns every failure with the position of its message.
    #[must_use]
    pub fn execute_all(&mut self, mut request: Request) -> Vec<(usize, Error)> {
        if request.is_empty() {
            return Vec::new();
        }
        let last = request.messages.len() - 1;
        request.acknowledge(last);
        self.transact(request, last, false)
    }

    /// Sends all messages of a transaction that is carried out as a whole or not at all.
    /// `acknowledged` is the position of the message whose acknowledgement ends the answer.
    pub(crate) fn execute_transaction(
        &mut self,
        mut request: Request,
        acknowledged: usize,
    ) -> Result<(), Error> {
        request.acknowledge(acknowledged);
        self.transact(request, acknowledged, true)
            .into_iter()
            .next()
            .map_or(Ok(()), |(_, error)| Err(error))
    }

    fn transact(
        &mut self,
        mut request: Request,
        acknowledged: usize,
        stop_at_error: bool,
    ) -> Vec<(usize, Error)> {
        let first = self.take_sequences(request.messages.len());
        request.number(first);
        let mut failures = Vec::new();
        if let Err(source) = self.send(&request.bytes) {
            let label = &request.messages[0];
            failures.push((0, label.error(source, None)));
            return failures;
        }
        loop {
            let received = match self.receive() {
                Ok(received) => received,
                Err(source) => {
                    failures.push((
                        acknowledged,
                        request.messages[acknowledged].error(source, None),
                    ));
                    return failures;
                }
            };
            for reply in Replies(&received) {
                let position = reply.sequence.wrapping_sub(first) as usize;
                if reply.kind != narrow(libc::NLMSG_ERROR) || position >= request.messages.len() {
                    continue;
                }
                let label = &request.messages[position];
                if let Err((source, explanation)) = reply.outcome() {
                    failures.push((position, label.error(source, explanation)));
                    if stop_at_error {
                        return failures;
                    }
                }
                if position == acknowledged {
                    return failures;
                }
            }
        }
    }

    /// Asks for a list or for one object, and gives each message of the answer to `read`.
    /// A list that changed while it was read is asked for again, eight times at most: the last answer may then have
    /// something twice, or lack it though it was there all the time. Where that matters use [`Socket::list`].
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn query<T>(
        &mut self,
        kind: u16,
        dump: bool,
        label: (&'static str, &str),
        fill: impl Fn(&mut Writer<'_>),
        mut read: impl FnMut(Reply<'_>) -> Option<T>,
    ) -> Result<Vec<T>, Error> {
        let mut attempts = 1;
        loop {
            let (found, disturbed) = self.ask((kind, dump), label, &fill, &mut read)?;
            if !disturbed || attempts == DUMP_ATTEMPTS {
                return Ok(found);
            }
            attempts += 1;
        }
    }

    /// Asks for a list as [`Socket::query`] does. Of one that never holds still the answer is what was seen in any attempt,
    /// by `key`, as it was seen last: so nothing is missing that was there all the time, and something may be there
    /// that is gone by now.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn list<T, K: Ord>(
        &mut self,
        kind: u16,
        label: (&'static str, &str),
        fill: impl Fn(&mut Writer<'_>),
        mut read: impl FnMut(Reply<'_>) -> Option<T>,
        key: impl Fn(&T) -> K,
    ) -> Result<Vec<T>, Error> {
        let mut seen = BTreeMap::new();
        for _ in 0..DUMP_ATTEMPTS {
            let (found, disturbed) = self.ask((kind, true), label, &fill, &mut read)?;
            if !disturbed {
                return Ok(found);
            }
            seen.extend(found.into_iter().map(|each| (key(&each), each)));
        }
        Ok(seen.into_values().collect())
    }

    /// Asks once. The second is whether the list changed while it was read.
    fn ask<T>(
        &mut self,
        (kind, dump): (u16, bool),
        (operation, object): (&'static str, &str),
        fill: &impl Fn(&mut Writer<'_>),
        read: &mut impl FnMut(Reply<'_>) -> Option<T>,
    ) -> Result<(Vec<T>, bool), Error> {
        let flags = if dump {
            libc::NLM_F_DUMP
        } else {
            // The kernel answers about a qdisc by a notification, which is for others without an echo.
            libc::NLM_F_ACK | libc::NLM_F_ECHO
        };
        let mut request = Request::new();
        request.message((kind, narrow(flags)), operation, object, fill);
        let first = self.take_sequences(1);
        request.number(first);
        let label = &request.messages[0];
        let failed = |source| label.error(source, None);
        self.send(&request.bytes).map_err(failed)?;
        let (mut found, mut disturbed) = (Vec::new(), false);
        loop {
            let received = self.receive().map_err(failed)?;
            for reply in Replies(&received) {
                if reply.sequence != first {
                    continue;
                }
                disturbed |= reply.flags & NLM_F_DUMP_INTR != 0;
                let ended = reply.kind == narrow(libc::NLMSG_DONE)
                    || reply.kind == narrow(libc::NLMSG_ERROR);
                if !ended {
                    found.extend(read(reply));
                    continue;
                }
                reply
                    .outcome()
                    .map_err(|(source, explanation)| label.error(source, explanation))?;
                return Ok((found, disturbed));
            }
        }
    }

    fn take_sequences(&mut self, count: usize) -> u32 {
        let first = self.sequence;
        let count = u32::try_from(count).expect("a request has fewer than 2^32 messages");
        self.sequence = self.sequence.wrapping_add(count);
        first
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        loop {
            match self.socket.send(bytes, 0) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => return other.map(drop),
            }
        }
    }

    fn receive(&mut self) -> io::Result<Vec<u8>> {
        let mut buffer = mem::take(&mut self.buffer);
        buffer.clear();
        buffer.reserve(RECEIVE_BUFFER);
        loop {
            match self.socket.recv(&mut buffer, 0) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other.map(drop)?,
            }
        }
        Ok(buffer)
    }
}

impl Label {
    fn error(&self, source: io::Error, explanation: Option<String>) -> Error {
        let (operation, object) = (self.operation, self.object.clone());
        match explanation {
            None => Error::System {
                operation,
                object,
                source,
            },
            Some(explanation) => Error::Refused {
                operation,
                object,
                source,
                explanation,
            },
        }
    }
}

impl<'a> Reply<'a> {
    /// The attributes behind a family header of the given length.
    #[must_use]
    pub fn attributes(&self, header: usize) -> Attributes<'a> {
        Attributes::new(self.payload.get(header..).unwrap_or_default())
    }

    /// What a message that ends an answer says.
    fn outcome(&self) -> Result<(), (io::Error, Option<String>)> {
        let code = self
            .payload
            .first_chunk()
            .map_or(0, |code| i32::from_ne_bytes(*code));
        if code == 0 {
            return Ok(());
        }
        let attributes = if self.flags & NLM_F_ACK_TLVS == 0 {
            Attributes::new(&[])
        } else if self.kind == narrow(libc::NLMSG_DONE) {
            self.attributes(4)
        } else {
            // The answer repeats the header of the failed message, and its body unless capped.
            let body = self
                .payload
                .get(4..8)
                .and_then(attribute::u32_of)
                .unwrap_or(0) as usize;
            let capped = self.flags & NLM_F_CAPPED != 0;
            self.attributes(
                4 + if capped {
                    HEADER
                } else {
                    body.next_multiple_of(4)
                },
            )
        };
        let explanation = attributes.find(NLMSGERR_ATTR_MSG).map(attribute::text_of);
        Err((
            io::Error::from_raw_os_error(code.saturating_neg()),
            explanation,
        ))
    }
}

/// The messages in one datagram.
struct Replies<'a>(&'a [u8]);

impl<'a> Iterator for Replies<'a> {
    type Item = Reply<'a>;

    fn next(&mut self) -> Option<Reply<'a>> {
        let header = self.0.first_chunk::<HEADER>()?;
        let length = attribute::u32_of(&header[0..4])? as usize;
        let payload = self.0.get(HEADER..length)?;
        let reply = Reply {
            kind: u16::from_ne_bytes([header[4], header[5]]),
            flags: u16::from_ne_bytes([header[6], header[7]]),
            sequence: attribute::u32_of(&header[8..12])?,
            payload,
        };
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(reply)
    }
}

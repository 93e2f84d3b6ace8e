//! The host's end of a connection: a non-blocking descriptor, and what it didn't take yet.
//!
//! Data goes straight between the descriptor and the guest's memory. Only what the descriptor doesn't take
//! is copied, into a backlog that exists while it is needed; credit bounds it, and for messages of no bytes,
//! which cost no credit, [`waiting::MOST_EMPTY`] does.
//!
//! Messages (SEQPACKET) are put together before they are sent, and read whole before they go to the guest.
//! On the host's sockets, each message is one of AF_UNIX or AF_VSOCK. The former have no end-of-record mark, so MSG_EOR of
//! a guest ends there; the latter have. Between siblings both ends are ours: a byte in front of each message carries the marks.

mod receive;
pub mod spare;
pub mod waiting;

use std::{
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    ptr,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, epoll::EventFlags},
    io::{Errno, ioctl_fionread},
    net::{AddressFamily, RecvFlags, Shutdown, recv, sockopt},
};

use self::{receive::receive, spare::Spare, waiting::Waiting};
use crate::{packet::flags, tcp};

/// How often a descriptor may become writable for nothing until that isn't waited for any more.
const IDLE_WRITABLE: u8 = 8;

/// How data lies on the descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// Bytes.
    Stream,
    /// One message each.
    Message,
    /// The same, each after a byte with the marks of the specification.
    MarkedMessage,
}

/// A message on its way to the guest.
#[derive(Debug)]
pub struct Outgoing {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// How many of them the guest has.
    pub sent: usize,
    /// Marks for the last packet of it.
    pub marks: u32,
}

/// What came of reading.
#[derive(Debug, PartialEq, Eq)]
pub enum Read {
    /// So many bytes; never 0 for a stream.
    Bytes(usize),
    /// A message, now in [`Peer::outgoing`].
    Message,
    /// A message above the limit; it is gone.
    TooLong,
    /// A message of that many bytes, or of as many at most, and there is room for fewer; it is still there.
    NoRoom(usize),
    /// There is nothing now.
    Nothing,
    /// There will be nothing more.
    End,
    /// The connection broke.
    Broken,
    /// The guest's memory isn't there.
    Fault,
}

/// What came of writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrote {
    /// So many bytes of payload were passed on; the rest, if any, waits in the backlog.
    Bytes(u32),
    /// The peer takes nothing more.
    Closed,
    /// The guest's memory isn't there.
    Fault,
    /// Too many messages of no bytes wait.
    TooMany,
    /// A message is longer than the descriptor ever takes.
    TooLong,
}

/// The host's end of a connection.
#[derive(Debug)]
pub struct Peer {
    fd: OwnedFd,
    framing: Framing,
    /// Whether the length of the next message can be asked for.
    tells_length: bool,
    /// Whether messages are of AF_VSOCK, which has a mark for the end of a record.
    has_records: bool,
    /// Bytes of a stream that the descriptor didn't take, from `backlog_start` on.
    backlog: Vec<u8>,
    backlog_start: usize,
    /// Messages that it didn't take, with their mark where there is one.
    messages: Waiting,
    /// Payload in `messages`.
    message_bytes: usize,
    /// The message that the guest is sending.
    assembling: Vec<u8>,
    /// The message that is being sent to the guest.
    pub outgoing: Option<Outgoing>,
    /// Whether becoming writable is waited for.
    pub waits_for_room: bool,
    /// Whether what waits does so since the descriptor is full: only then it becomes writable.
    pub is_full: bool,
    /// Whether it does so since it is others' turn.
    pub is_out_of_turn: bool,
    idle_writable: u8,
    shut: (bool, bool),
    /// Whether the other side has closed with messages of ours unread; told in place of the end. See [`Self::ask`].
    was_reset: bool,
}

impl Peer {
    /// For a connected, non-blocking descriptor.
    #[must_use]
    pub fn new(fd: OwnedFd, framing: Framing) -> Self {
        // AF_VSOCK answers a read of no bytes without a look, and Linux 6.1 doesn't let anybody peek there.
        let has_records =
            framing == Framing::Message && sockopt::socket_domain(&fd) == Ok(AddressFamily::VSOCK);
        Self {
            fd,
            framing,
            tells_length: !has_records,
            has_records,
            backlog: Vec::new(),
            backlog_start: 0,
            messages: Waiting::default(),
            message_bytes: 0,
            assembling: Vec::new(),
            outgoing: None,
            waits_for_room: false,
            is_full: false,
            is_out_of_turn: false,
            idle_writable: 0,
            shut: (false, false),
            was_reset: false,
        }
    }

    /// The descriptor.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// How data lies on it.
    #[must_use]
    pub fn framing(&self) -> Framing {
        self.framing
    }

    /// Payload that waits for the descriptor, in bytes.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.backlog.len() - self.backlog_start + self.message_bytes
    }

    /// Bytes that wait for the guest, if the kernel tells: in the descriptor, and of the message that is being sent.
    #[must_use]
    pub fn waiting_for_guest(&self) -> Option<u64> {
        let message = self.outgoing.as_ref();
        let message = message.map_or(0, |message| message.bytes.len() - message.sent);
        Some(ioctl_fionread(&self.fd).ok()? + message as u64)
    }

    /// Whether something waits for the descriptor.
    #[must_use]
    pub fn has_backlog(&self) -> bool {
        self.backlog.len() != self.backlog_start || !self.messages.is_empty()
    }

    /// Bytes in memory on behalf of this connection: payload, and what messages that wait have with it.
    #[must_use]
    pub fn buffered(&self) -> usize {
        let outgoing = self
            .outgoing
            .as_ref()
            .map_or(0, |message| message.bytes.len());
        let backlog = self.backlog.len() - self.backlog_start;
        backlog + self.messages.bytes() + self.assembling.len() + outgoing
    }

    /// Makes sure that a message of that many bytes, and a mark, can be sent at once; and that an end can be
    /// told from a message of no bytes, by the credentials that come with each message.
    ///
    /// # Errors
    /// Of `setsockopt`.
    pub fn prepare_messages(&self, bytes: usize) -> io::Result<()> {
        sockopt::set_socket_send_buffer_size(&self.fd, bytes + 1024)?;
        if self.framing == Framing::Message {
            sockopt::set_socket_passcred(&self.fd, true)?;
        }
        Ok(())
    }

    /// Lets a Unix socket take about as much at once as may wait in all, and TCP as much that it can't send. What it
    /// doesn't take has to be copied once more.
    ///
    /// # Errors
    /// Of `getsockopt` or `setsockopt`.
    pub fn prepare_stream(&self, bytes: usize) -> io::Result<()> {
        match sockopt::socket_domain(&self.fd)? {
            AddressFamily::UNIX => Ok(sockopt::set_socket_send_buffer_size(&self.fd, bytes)?),
            // TCP sizes its buffers better by itself, as long as nobody does.
            AddressFamily::INET | AddressFamily::INET6 => {
                tcp::bound_unsent(&self.fd, u32::try_from(bytes).unwrap_or(u32::MAX))
            }
            _ => Ok(()),
        }
    }

    /// Passes bytes of a stream on, straight from the guest's memory; the rest is copied.
    pub fn write(&mut self, pieces: &[libc::iovec], spare: &mut Spare) -> Wrote {
        if self.has_backlog() {
            self.keep(pieces, 0, spare);
            return Wrote::Bytes(0);
        }
        let total = length(pieces);
        self.is_full = false;
        let written = match send(self.fd.as_fd(), pieces) {
            Ok(written) => written,
            Err(error) if self.waits(error) => 0,
            Err(Errno::FAULT) => return Wrote::Fault,
            Err(_) => return Wrote::Closed,
        };
        if written < total {
            self.keep(pieces, written, spare);
        }
        Wrote::Bytes(u32::try_from(written).expect("a batch is far smaller"))
    }

    /// Copies what is beyond `skip` bytes of the pieces into the backlog.
    fn keep(&mut self, pieces: &[libc::iovec], mut skip: usize, spare: &mut Spare) {
        if self.backlog.capacity() == 0 {
            self.backlog = spare.take();
        }
        if self.backlog_start > self.backlog.len() / 2 {
            self.backlog.drain(..self.backlog_start);
            self.backlog_start = 0;
        }
        for piece in pieces {
            let from = skip.min(piece.iov_len);
            skip -= from;
            append(&mut self.backlog, piece, from);
        }
    }

    /// Adds a piece of a message, and sends it if it is whole. `bits` are the packet's.
    pub fn write_message(&mut self, pieces: &[libc::iovec], bits: u32) -> Wrote {
        if self.assembling.is_empty() {
            self.assembling.resize(self.mark_bytes(), 0);
        }
        for piece in pieces {
            append(&mut self.assembling, piece, 0);
        }
        if bits & flags::END_OF_MESSAGE == 0 {
            return Wrote::Bytes(0);
        }
        let mut message = std::mem::take(&mut self.assembling);
        if let Some(mark) = message[..self.mark_bytes()].first_mut() {
            let marks = flags::END_OF_MESSAGE | flags::END_OF_RECORD;
            *mark = u8::try_from(bits & marks).expect("two bits");
        }
        if !self.messages.is_empty() {
            return self.keep_message(&message);
        }
        match self.send_message(&message) {
            Ok(sent) => Wrote::Bytes(sent),
            Err(error) if self.waits(error) => self.keep_message(&message),
            Err(error) => self.ended(error),
        }
    }

    /// Payload of the message that the guest is sending, so far.
    #[must_use]
    pub fn assembled(&self) -> usize {
        self.assembling.len().saturating_sub(self.mark_bytes())
    }

    /// Bytes in front of a message that is to be sent.
    fn mark_bytes(&self) -> usize {
        usize::from(self.framing == Framing::MarkedMessage || self.has_records)
    }

    /// Those of them that are sent.
    fn sent_mark_bytes(&self) -> usize {
        usize::from(self.framing == Framing::MarkedMessage)
    }

    fn keep_message(&mut self, message: &[u8]) -> Wrote {
        let payload = message.len() - self.mark_bytes();
        if !self.messages.push(message, payload) {
            return Wrote::TooMany;
        }
        self.message_bytes += payload;
        Wrote::Bytes(0)
    }

    /// Sends a message; its payload.
    fn send_message(&self, message: &[u8]) -> Result<u32, Errno> {
        let kept = self.mark_bytes() - self.sent_mark_bytes();
        let ends_record = message[..kept]
            .iter()
            .any(|mark| u32::from(*mark) & flags::END_OF_RECORD != 0);
        let message = &message[kept..];
        let piece = libc::iovec {
            iov_base: message.as_ptr().cast_mut().cast(),
            iov_len: message.len(),
        };
        let bits = if ends_record { libc::MSG_EOR } else { 0 };
        let sent = send_with(self.fd.as_fd(), &[piece], bits)?;
        Ok(u32::try_from(sent - self.sent_mark_bytes()).expect("a message is far smaller"))
    }

    /// Passes on what waits, as far as the descriptor takes it, and `turn`, in messages: a reader that is as quick as we are would
    /// have us pass on a million of one byte.
    pub fn flush(&mut self, turn: &mut u32, spare: &mut Spare) -> Wrote {
        let mut passed = 0;
        (self.is_full, self.is_out_of_turn) = (false, false);
        while let Some(message) = self.messages.first() {
            self.is_out_of_turn = *turn == 0;
            if self.is_out_of_turn {
                break;
            }
            *turn -= 1;
            match self.send_message(message) {
                Ok(sent) => {
                    passed += sent;
                    self.message_bytes -= sent as usize;
                    self.messages.pop(sent as usize);
                }
                Err(error) if self.waits(error) => break,
                Err(error) => return self.ended(error),
            }
        }
        if self.backlog_start < self.backlog.len() {
            let left = &self.backlog[self.backlog_start..];
            let piece = libc::iovec {
                iov_base: left.as_ptr().cast_mut().cast(),
                iov_len: left.len(),
            };
            match send(self.fd.as_fd(), &[piece]) {
                Ok(sent) => {
                    self.backlog_start += sent;
                    passed += u32::try_from(sent).expect("credit bounds it");
                }
                Err(error) if self.waits(error) => {}
                Err(_) => return Wrote::Closed,
            }
            if self.backlog_start == self.backlog.len() {
                spare.give(std::mem::take(&mut self.backlog));
                self.backlog_start = 0;
            }
        }
        Wrote::Bytes(passed)
    }

    /// Forgets what waits.
    pub fn discard(&mut self) {
        self.backlog = Vec::new();
        self.backlog_start = 0;
        self.messages = Waiting::default();
        self.message_bytes = 0;
        self.assembling = Vec::new();
    }

    /// Reads bytes of a stream straight into the guest's memory.
    pub fn read(&mut self, pieces: &[libc::iovec]) -> Read {
        // SAFETY: the pieces were looked up in the guest's memory, which stays mapped while the transport is
        // locked, and the kernel checks them again.
        let read =
            unsafe { libc::readv(self.fd.as_raw_fd(), pieces.as_ptr(), iovec_count(pieces)) };
        match usize::try_from(read) {
            Ok(0) => Read::End,
            Ok(read) => Read::Bytes(read),
            Err(_) => failed_read(last_error()),
        }
    }

    /// Whether what wasn't sent waits for the descriptor, or for memory of the kernel.
    fn waits(&mut self, error: Errno) -> bool {
        self.is_full = error == Errno::AGAIN;
        self.is_full || matches!(error, Errno::INTR | Errno::NOBUFS | Errno::NOMEM)
    }

    /// What a message that wasn't sent says of the descriptor.
    fn ended(&mut self, error: Errno) -> Wrote {
        self.was_reset |= error == Errno::CONNRESET;
        match error {
            Errno::MSGSIZE => Wrote::TooLong,
            _ => Wrote::Closed,
        }
    }

    /// Asks the descriptor for a message. If the other side has closed with messages of ours unread, the kernel says
    /// that once, before what it had sent (of a stream: after it). So it is asked again, and the reset comes last.
    fn ask<T>(
        &mut self,
        mut ask: impl FnMut(BorrowedFd<'_>) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        match ask(self.fd.as_fd()) {
            Err(Errno::CONNRESET) if !self.was_reset => {
                self.was_reset = true;
                ask(self.fd.as_fd())
            }
            answer => answer,
        }
    }

    /// What comes after the last message.
    fn end_of_messages(&self) -> Read {
        match self.was_reset {
            true => Read::Broken,
            false => Read::End,
        }
    }

    /// Payload of the message that comes next; 0 at the end too. If that can't be asked for: `most`, at the end too.
    fn next_message(&mut self, most: usize) -> Result<usize, Errno> {
        if !self.tells_length {
            let mut now = [PollFd::new(&self.fd, PollFlags::IN)];
            return match rustix::event::poll(&mut now, Some(&Timespec::default()))? {
                0 => Err(Errno::AGAIN),
                _ => Ok(most),
            };
        }
        let flags = RecvFlags::PEEK | RecvFlags::TRUNC | RecvFlags::DONTWAIT;
        let (_, length) = self.ask(|fd| recv(fd, &mut [0; 0], flags))?;
        Ok(length.saturating_sub(self.sent_mark_bytes()))
    }

    /// Reads a message of at most `most` bytes into [`Self::outgoing`], if it is no longer than `room`.
    pub fn read_message(&mut self, scratch: &mut Vec<u8>, most: usize, room: usize) -> Read {
        if room < most {
            match self.next_message(most) {
                Ok(length) if room < length && length <= most => return Read::NoRoom(length),
                Ok(_) => {}
                Err(error) => return failed_read(error),
            }
        }
        let room = most + self.sent_mark_bytes();
        scratch.clear();
        scratch.reserve(room);
        let received = match self.ask(|fd| receive(fd, scratch, room)) {
            Ok(received) => received,
            Err(error) => return failed_read(error),
        };
        if received.is_truncated {
            return Read::TooLong;
        }
        let is_nothing = scratch.is_empty();
        let marks = match self.framing {
            Framing::MarkedMessage if is_nothing => return self.end_of_messages(),
            Framing::MarkedMessage => u32::from(scratch[0]),
            _ if is_nothing && !received.has_credentials => return self.end_of_messages(),
            _ if received.ends_record => flags::END_OF_RECORD,
            _ => 0,
        };
        self.outgoing = Some(Outgoing {
            bytes: scratch[self.sent_mark_bytes()..].to_vec(),
            sent: 0,
            marks: flags::END_OF_MESSAGE | marks & flags::END_OF_RECORD,
        });
        Read::Message
    }

    /// Shuts directions that aren't shut yet: reading, writing. The latter is a proper end; without it, a close breaks off.
    pub fn shut(&mut self, (read, write): (bool, bool)) {
        let directions = [
            (read && !self.shut.0, Shutdown::Read),
            (write && !self.shut.1, Shutdown::Write),
        ];
        for (wanted, direction) in directions {
            if wanted {
                // Fails only when the other side has closed, and then there is nothing to shut.
                let _ = rustix::net::shutdown(&self.fd, direction);
            }
        }
        if write && !self.shut.1 {
            tcp::end_when_closed(&self.fd);
        }
        self.shut = (self.shut.0 || read, self.shut.1 || write);
    }

    /// What is true of events that the loop has brought. A descriptor's end may have been met by one of the
    /// same turn that closed it, and another connection may have its number by now: so an end is asked for
    /// once more. The rest does no harm if it isn't so.
    pub fn confirm(&self, events: EventFlags) -> EventFlags {
        let ends = EventFlags::HUP | EventFlags::ERR | EventFlags::RDHUP;
        if !events.intersects(ends) {
            return events;
        }
        let mut now = [PollFd::new(&self.fd, PollFlags::RDHUP)];
        match rustix::event::poll(&mut now, Some(&Timespec::default())) {
            // The bits of both are the same, see poll(2) and epoll_ctl(2).
            Ok(_) => {
                let revents = EventFlags::from_bits_truncate(now[0].revents().bits().into());
                events.difference(ends).union(revents)
            }
            Err(_) => events,
        }
    }

    /// It has become writable, and `passed` says if that was of use. Whether to wait for it any longer: a
    /// descriptor whose reader is quick would wake us for nothing.
    pub fn became_writable(&mut self, passed: bool) -> bool {
        self.idle_writable = if passed {
            0
        } else {
            self.idle_writable.saturating_add(1)
        };
        self.has_backlog() || self.idle_writable < IDLE_WRITABLE
    }
}

/// Bytes in all pieces.
#[must_use]
pub fn length(pieces: &[libc::iovec]) -> usize {
    pieces.iter().map(|piece| piece.iov_len).sum()
}

fn failed_read(error: Errno) -> Read {
    match error {
        Errno::AGAIN | Errno::INTR => Read::Nothing,
        Errno::FAULT => Read::Fault,
        _ => Read::Broken,
    }
}

fn last_error() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}

fn iovec_count(pieces: &[libc::iovec]) -> libc::c_int {
    libc::c_int::try_from(pieces.len()).expect("a batch has at most IOV_MAX pieces")
}

/// Sends, without a signal if nobody receives.
fn send(fd: BorrowedFd<'_>, pieces: &[libc::iovec]) -> Result<usize, Errno> {
    send_with(fd, pieces, 0)
}

/// The same, with further flags.
fn send_with(
    fd: BorrowedFd<'_>,
    pieces: &[libc::iovec],
    bits: libc::c_int,
) -> Result<usize, Errno> {
    // SAFETY: all zeros are a valid message header, without a name, pieces or control data.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    message.msg_iov = pieces.as_ptr().cast_mut();
    message.msg_iovlen = pieces.len();
    // SAFETY: the pieces lie in the guest's memory, which stays mapped while the transport is locked, or in
    // a buffer of ours; the kernel only reads them.
    let sent = unsafe {
        libc::sendmsg(
            fd.as_raw_fd(),
            &raw const message,
            libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT | bits,
        )
    };
    usize::try_from(sent).map_err(|_| last_error())
}

/// Copies a piece of the guest's memory, from `skip` bytes on, behind what is in `buffer`.
pub(crate) fn append(buffer: &mut Vec<u8>, piece: &libc::iovec, skip: usize) {
    let bytes = piece.iov_len - skip;
    buffer.reserve(bytes);
    // SAFETY: the piece is mapped guest memory (looked up while the transport is locked) and `buffer` has
    // room for as much behind its end; they don't overlap. The guest may write at the same time: then what
    // is copied is any mix of its bytes, all of them are initialised, and nothing is decided by them.
    unsafe {
        let from = piece.iov_base.cast::<u8>().add(skip);
        ptr::copy_nonoverlapping(from, buffer.as_mut_ptr().add(buffer.len()), bytes);
        buffer.set_len(buffer.len() + bytes);
    }
}

#[cfg(test)]
mod tests;

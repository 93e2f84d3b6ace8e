//! vhost-user messages as bytes, for front ends that speak it wrongly or disappear in the middle.

use std::{
    io::{self, IoSlice, Read},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    time::Duration,
};

use rustix::{
    event::{EventfdFlags, eventfd},
    fs::{MemfdFlags, ftruncate, memfd_create},
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
};

use crate::memory::USER_OFFSET;

/// Numbers of the requests that are sent here.
pub mod request {
    /// Which features the back end has.
    pub const GET_FEATURES: u32 = 1;
    /// Which were agreed.
    pub const SET_FEATURES: u32 = 2;
    /// A session begins.
    pub const SET_OWNER: u32 = 3;
    /// All memory at once.
    pub const SET_MEM_TABLE: u32 = 5;
    /// Size of a queue.
    pub const SET_VRING_NUM: u32 = 8;
    /// Where it is.
    pub const SET_VRING_ADDR: u32 = 9;
    /// Where to begin.
    pub const SET_VRING_BASE: u32 = 10;
    /// Stop it, and say where.
    pub const GET_VRING_BASE: u32 = 11;
    /// Eventfd to the device.
    pub const SET_VRING_KICK: u32 = 12;
    /// Eventfd from the device.
    pub const SET_VRING_CALL: u32 = 13;
    /// Features of the protocol.
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    /// Which were agreed.
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    /// How many queues.
    pub const GET_QUEUE_NUM: u32 = 17;
    /// Go.
    pub const SET_VRING_ENABLE: u32 = 18;
    /// Read the device's configuration.
    pub const GET_CONFIG: u32 = 24;
    /// Write it.
    pub const SET_CONFIG: u32 = 25;
    /// Back to the beginning.
    pub const RESET_DEVICE: u32 = 34;
    /// How many regions of memory.
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    /// One more region.
    pub const ADD_MEM_REG: u32 = 37;
    /// One fewer.
    pub const REM_MEM_REG: u32 = 38;
}

const HEADER_BYTES: usize = 12;
const VERSION: u32 = 1;

/// A message with its descriptors.
#[derive(Debug)]
pub struct Message {
    /// As they are written.
    pub bytes: Vec<u8>,
    /// What goes with the first of them.
    pub fds: Vec<OwnedFd>,
    /// Whether the back end answers.
    pub answered: bool,
}

impl Message {
    /// A request with this payload.
    #[must_use]
    pub fn new(request: u32, payload: &[u8]) -> Self {
        let size = u32::try_from(payload.len()).expect("a message is small");
        Self::with_header(request, VERSION, size, payload)
    }

    /// Whatever the header says.
    #[must_use]
    pub fn with_header(request: u32, flags: u32, size: u32, payload: &[u8]) -> Self {
        let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
        for field in [request, flags, size] {
            bytes.extend(field.to_le_bytes());
        }
        bytes.extend(payload);
        let answered = matches!(
            request,
            request::GET_FEATURES
                | request::GET_PROTOCOL_FEATURES
                | request::GET_QUEUE_NUM
                | request::GET_CONFIG
                | request::GET_VRING_BASE
                | request::GET_MAX_MEM_SLOTS
        );
        Self {
            bytes,
            fds: Vec::new(),
            answered,
        }
    }

    /// With 64-bit numbers as payload.
    #[must_use]
    pub fn words(request: u32, words: &[u64]) -> Self {
        let payload: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        Self::new(request, &payload)
    }

    /// With 32-bit numbers as payload: the index of a queue and something about it.
    #[must_use]
    pub fn queue(request: u32, index: u32, value: u32) -> Self {
        Self::words(request, &[u64::from(index) | u64::from(value) << 32])
    }

    /// The same with a descriptor more.
    #[must_use]
    pub fn with(mut self, fd: OwnedFd) -> Self {
        self.fds.push(fd);
        self
    }
}

/// A vhost-user socket with no idea of the protocol.
#[derive(Debug)]
pub struct Wire {
    stream: UnixStream,
}

impl From<UnixStream> for Wire {
    fn from(stream: UnixStream) -> Self {
        Self { stream }
    }
}

impl Wire {
    /// Connects.
    ///
    /// # Errors
    /// Nobody listens there.
    pub fn connect(path: &Path, timeout: Duration) -> io::Result<Self> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        Ok(Self { stream })
    }

    /// Sends a whole message and reads its answer, if there is one.
    ///
    /// # Errors
    /// The back end has hung up, or doesn't answer.
    pub fn say(&mut self, message: &Message) -> io::Result<Vec<u8>> {
        self.write(message, message.bytes.len())?;
        if message.answered {
            self.answer()
        } else {
            Ok(Vec::new())
        }
    }

    /// Sends the first `count` bytes of a message, with its descriptors.
    ///
    /// # Errors
    /// The back end has hung up.
    pub fn write(&mut self, message: &Message, count: usize) -> io::Result<()> {
        let borrowed: Vec<BorrowedFd<'_>> = message.fds.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !borrowed.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&borrowed));
        }
        let mut rest = &message.bytes[..count];
        while !rest.is_empty() {
            let sent = sendmsg(
                &self.stream,
                &[IoSlice::new(rest)],
                &mut control,
                SendFlags::NOSIGNAL,
            )?;
            control.clear();
            rest = &rest[sent..];
        }
        Ok(())
    }

    /// Reads an answer: its payload.
    ///
    /// # Errors
    /// The back end has hung up, or doesn't answer.
    pub fn answer(&mut self) -> io::Result<Vec<u8>> {
        let mut header = [0; HEADER_BYTES];
        self.stream.read_exact(&mut header)?;
        let [_, _, _, _, _, _, _, _, a, b, c, d] = header;
        let size = u32::from_le_bytes([a, b, c, d]) as usize;
        let mut payload = vec![0; size.min(1 << 20)];
        self.stream.read_exact(&mut payload)?;
        Ok(payload)
    }

    /// Whether the back end has hung up, after at most the time-out.
    pub fn hung_up(&mut self) -> bool {
        let mut byte = [0];
        loop {
            match self.stream.read(&mut byte) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => return error.kind() == io::ErrorKind::ConnectionReset,
            }
        }
    }
}

/// A guest's memory as its front end sees it, without any guest.
#[derive(Debug)]
pub struct Region {
    /// The memfd.
    pub file: OwnedFd,
    /// Guest-physical base.
    pub base: u64,
    /// Bytes.
    pub size: u64,
}

impl Region {
    /// A new one.
    ///
    /// # Errors
    /// No memfd can be had.
    pub fn new(base: u64, size: u64) -> io::Result<Self> {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, size)?;
        Ok(Self { file, base, size })
    }

    /// The message that tells of it alone.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn table(&self) -> io::Result<Message> {
        let mut payload = vec![1, 0, 0, 0, 0, 0, 0, 0];
        for word in [self.base, self.size, self.base + USER_OFFSET, 0] {
            payload.extend(word.to_le_bytes());
        }
        Ok(Message::new(request::SET_MEM_TABLE, &payload).with(self.file.try_clone()?))
    }
}

/// All that a VMM says from the first to the last message, in order: three queues of `size`, started, asked for
/// their state and reset. The queues are empty.
///
/// # Errors
/// Out of descriptors.
pub fn session(region: &Region, size: u32) -> io::Result<Vec<Message>> {
    let mut messages = vec![
        Message::new(request::GET_FEATURES, &[]),
        Message::new(request::GET_PROTOCOL_FEATURES, &[]),
        // MQ, CONFIG, RESET_DEVICE.
        Message::words(request::SET_PROTOCOL_FEATURES, &[1 | 1 << 9 | 1 << 13]),
        Message::new(request::GET_QUEUE_NUM, &[]),
        Message::new(request::SET_OWNER, &[]),
        configuration(0, 8),
        // VERSION_1, EVENT_IDX, PROTOCOL_FEATURES, streams.
        Message::words(request::SET_FEATURES, &[1 << 32 | 1 << 29 | 1 << 30 | 1]),
        region.table()?,
    ];
    for index in 0..3 {
        let start = region.base + USER_OFFSET + u64::from(index) * 0x1_0000;
        messages.push(Message::queue(request::SET_VRING_NUM, index, size));
        messages.push(Message::queue(request::SET_VRING_BASE, index, 0));
        messages.push(Message::words(
            request::SET_VRING_ADDR,
            &[u64::from(index), start, start + 0xc000, start + 0x8000, 0],
        ));
        for request in [request::SET_VRING_CALL, request::SET_VRING_KICK] {
            messages.push(Message::words(request, &[index.into()]).with(event()?));
        }
        messages.push(Message::queue(request::SET_VRING_ENABLE, index, 1));
    }
    for index in 0..3 {
        messages.push(Message::queue(request::GET_VRING_BASE, index, 0));
    }
    messages.push(Message::new(request::RESET_DEVICE, &[]));
    Ok(messages)
}

/// Asks for `size` bytes of configuration from `offset` on.
#[must_use]
pub fn configuration(offset: u32, size: u32) -> Message {
    let mut payload = Vec::new();
    for field in [offset, size, 0] {
        payload.extend(field.to_le_bytes());
    }
    payload.resize(payload.len() + (size as usize).min(4000), 0);
    Message::new(request::GET_CONFIG, &payload)
}

/// An eventfd.
///
/// # Errors
/// Out of descriptors.
pub fn event() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

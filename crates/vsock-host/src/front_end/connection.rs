//! A VMM's connection: messages are let through to the crate `vhost` only when they are whole.

use std::{
    io::{self, IoSliceMut},
    mem::{MaybeUninit, size_of},
    net::Shutdown,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{Arc, Mutex},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::{Errno, retry_on_intr},
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recv, recvmsg},
};
use vhost::vhost_user::{BackendReqHandler, Error, Result};

use super::{SharedTransport, Transport, lock};
use crate::disposal::{Disposal, is_known};

/// Length of a message's header, and where in it the length of the rest is.
const MESSAGE_HEADER: usize = 12;
/// Longest rest of a message that is served.
const LONGEST_MESSAGE: usize = 4096;
/// Most descriptors of a message: the crate takes no more, and none has a reason for that many.
const DESCRIPTORS: usize = 32;
/// Most looks at what is left in a connection that ends.
const LAST_READS: usize = 16;
/// Most that the kernel passes on at once: SCM_MAX_FD.
const MOST_DESCRIPTORS: usize = 253;

/// A VMM's connection.
pub struct FrontEnd {
    /// Both are there until it is dropped.
    socket: Option<UnixStream>,
    handler: Option<BackendReqHandler<Mutex<Transport>>>,
    vm: String,
    disposal: Disposal,
}

impl std::fmt::Debug for FrontEnd {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("FrontEnd")
            .field("socket", &self.socket)
            .finish_non_exhaustive()
    }
}

/// What became of an attempt to serve a message.
#[derive(Debug)]
pub enum Served {
    /// One was served; there may be more.
    One,
    /// None is whole yet.
    Nothing,
    /// The VMM has gone, or says what makes no sense.
    Over(Error),
}

impl FrontEnd {
    /// For an accepted connection.
    ///
    /// # Errors
    /// When the socket can't be set up.
    pub fn new(socket: UnixStream, transport: &SharedTransport) -> io::Result<Self> {
        let (vm, disposal) = {
            let transport = lock(transport);
            (transport.vm.clone(), transport.disposal.clone())
        };
        let mut front_end = Self {
            socket: Some(socket),
            handler: None,
            vm,
            disposal,
        };
        let socket = front_end.socket();
        // The crate expects it so; it never waits, see above.
        socket.set_nonblocking(false)?;
        let handler = BackendReqHandler::from_stream(socket.try_clone()?, Arc::clone(transport));
        front_end.handler = Some(handler);
        Ok(front_end)
    }

    /// The socket, to wait until it is readable.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket().as_fd()
    }

    fn socket(&self) -> &UnixStream {
        self.socket.as_ref().expect("it is there until the end")
    }

    /// Serves a message if a whole one is there.
    pub fn serve(&mut self) -> Served {
        if self.disposal.is_full() {
            tracing::warn!(vm = %self.vm, "a VMM hands over memory faster than it can be freed; it is let go");
            return Served::Over(Error::InvalidParam);
        }
        match self.message_is_there() {
            Ok(Some(descriptors)) => {
                let handler = self.handler.as_mut();
                let handled = handler.expect("it is there until the end").handle_request();
                // After it, so that what it closes is never the last of its kind.
                self.disposal.close(descriptors);
                match handled {
                    Ok(()) => Served::One,
                    Err(error) => Served::Over(error),
                }
            }
            Ok(None) => Served::Nothing,
            Err(error) => Served::Over(error),
        }
    }

    /// If the whole of a message is there, the descriptors that come with it.
    fn message_is_there(&self) -> Result<Option<Vec<OwnedFd>>> {
        let broken = |error: Errno| Error::SocketBroken(error.into());
        let Some(header) = self.peek_header()? else {
            return self.wait_for_more();
        };
        let rest = header[MESSAGE_HEADER - size_of::<u32>()..]
            .first_chunk()
            .expect("four bytes are left");
        let rest = usize::try_from(u32::from_ne_bytes(*rest)).unwrap_or(usize::MAX);
        if rest > LONGEST_MESSAGE {
            return Err(Error::OversizedMsg);
        }
        let there = rustix::io::ioctl_fionread(self.socket()).map_err(broken)?;
        if there < (MESSAGE_HEADER + rest) as u64 {
            return self.wait_for_more();
        }
        self.room_for_answer()?;
        self.peek_descriptors(MESSAGE_HEADER + rest).map(Some)
    }

    /// Looks at the header of the next message, if all of it is there. Looking stops at descriptors, and
    /// those come with whatever byte the VMM attached them to; so it goes on from where it stopped.
    fn peek_header(&self) -> Result<Option<[u8; MESSAGE_HEADER]>> {
        let broken = |error: Errno| Error::SocketBroken(error.into());
        let mut header = [0_u8; MESSAGE_HEADER];
        let mut seen = 0;
        set_peek_offset(self.socket(), 0).map_err(broken)?;
        let result = loop {
            match recv(
                self.socket(),
                &mut header[seen..],
                RecvFlags::PEEK | RecvFlags::DONTWAIT,
            ) {
                Ok((_, 0)) if seen == 0 => break Err(Error::Disconnected),
                Ok((_, 0)) | Err(Errno::AGAIN) => break Ok(None),
                Ok((_, read)) => seen += read,
                Err(Errno::INTR) => {}
                Err(error) => break Err(broken(error)),
            }
            if seen == MESSAGE_HEADER {
                break Ok(Some(header));
            }
        };
        set_peek_offset(self.socket(), -1).map_err(broken)?;
        result
    }

    /// The descriptors of a message of that length, all of it there, if all are of kinds that VMMs hand over.
    fn peek_descriptors(&self, length: usize) -> Result<Vec<OwnedFd>> {
        let broken = |error: Errno| Error::SocketBroken(error.into());
        let mut descriptors = Vec::new();
        set_peek_offset(self.socket(), 0).map_err(broken)?;
        let mut seen = 0;
        let looked = loop {
            if seen == length || descriptors.len() > DESCRIPTORS {
                break Ok(());
            }
            match receive(self.socket(), length - seen, RecvFlags::PEEK) {
                Ok(Received { bytes: 0, .. }) => break Err(Error::Disconnected),
                Ok(more) => {
                    seen += more.bytes;
                    descriptors.extend(more.descriptors);
                    if !more.has_all {
                        // What isn't seen can't be judged.
                        break Err(broken(Errno::MFILE));
                    }
                }
                Err(error) => break Err(broken(error)),
            }
        };
        let looked = looked.and_then(|()| set_peek_offset(self.socket(), -1).map_err(broken));
        let known =
            descriptors.len() <= DESCRIPTORS && descriptors.iter().all(|fd| is_known(fd.as_fd()));
        if known && looked.is_ok() {
            return Ok(descriptors);
        }
        self.disposal.close(descriptors);
        looked?;
        tracing::warn!(
            vm = %self.vm,
            "a VMM hands over a descriptor that is neither an eventfd nor memory (memfd, tmpfs, hugetlbfs or a file of a \
             local file system, as ext4, XFS, Btrfs); it is let go"
        );
        Err(Error::InvalidParam)
    }

    /// Part of a message is there; the rest will come only if somebody is there to send it.
    fn wait_for_more<T>(&self) -> Result<Option<T>> {
        let mut fds = [PollFd::new(self.socket(), PollFlags::RDHUP)];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        match poll(&mut fds, Some(&now)) {
            Ok(0) => Ok(None),
            _ => Err(Error::Disconnected),
        }
    }

    /// A Unix socket is writable while less than a quarter of its buffer is in use, and no answer needs more
    /// than another quarter. Who doesn't read so many answers is no VMM.
    fn room_for_answer(&self) -> Result<()> {
        let mut fds = [PollFd::new(self.socket(), PollFlags::OUT)];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        match poll(&mut fds, Some(&now)) {
            Ok(1..) => Ok(()),
            _ => Err(Error::InvalidOperation(
                "the front end doesn't read the answers",
            )),
        }
    }
}

impl Drop for FrontEnd {
    fn drop(&mut self) {
        // It holds the socket too: whoever closes that last closes what is in it.
        self.handler = None;
        if let Some(socket) = self.socket.take() {
            hang_up(socket, &self.disposal);
        }
    }
}

/// Ends a connection, whose socket nobody else holds or waits for. Closing it closes the descriptors that wait in it
/// unread too. What a VMM that means well may have under way is taken out here, so that it waits for nobody; where there
/// is more or other, the socket is given away.
pub(super) fn hang_up(socket: UnixStream, disposal: &Disposal) {
    // Nothing is put in any more.
    let _ = socket.shutdown(Shutdown::Both);
    let reads = match set_peek_offset(&socket, -1) {
        Ok(()) => LAST_READS,
        Err(_) => 0,
    };
    let mut taken = 0;
    for _ in 0..reads {
        // Looked at first: taking closes here those for which there is no room in our table.
        let looked = match receive(&socket, LONGEST_MESSAGE, RecvFlags::PEEK) {
            Ok(Received { bytes: 0, .. }) | Err(Errno::AGAIN) => return,
            Ok(looked) => looked,
            Err(_) => break,
        };
        taken += looked.descriptors.len();
        let known = looked.descriptors.iter().all(|fd| is_known(fd.as_fd()));
        let is_usual = looked.has_all && known && taken <= DESCRIPTORS;
        if is_usual {
            drop(receive(&socket, looked.bytes, RecvFlags::empty()));
        }
        disposal.close(looked.descriptors);
        if !is_usual {
            break;
        }
    }
    disposal.close_strange(vec![socket.into()]);
}

/// What came out of a socket.
struct Received {
    bytes: usize,
    /// What came along.
    descriptors: Vec<OwnedFd>,
    /// Whether there was room in our table for all that came along.
    has_all: bool,
}

/// Takes up to that many bytes out of a socket, or looks at them.
fn receive(
    socket: &UnixStream,
    most: usize,
    flags: RecvFlags,
) -> std::result::Result<Received, Errno> {
    let mut bytes = [0; LONGEST_MESSAGE];
    let most = most.min(bytes.len());
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut along = RecvAncillaryBuffer::new(&mut space);
    let mut pieces = [IoSliceMut::new(&mut bytes[..most])];
    let flags = flags | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = retry_on_intr(|| recvmsg(socket, &mut pieces, &mut along, flags))?;
    let mut descriptors = Vec::new();
    for message in along.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            descriptors.extend(fds);
        }
    }
    Ok(Received {
        bytes: received.bytes,
        descriptors,
        has_all: !received.flags.contains(ReturnFlags::CTRUNC),
    })
}

/// From where looking at a socket begins; -1 for its beginning, each time.
fn set_peek_offset(socket: &UnixStream, offset: libc::c_int) -> std::result::Result<(), Errno> {
    // SAFETY: the option takes an int, which lives through the call.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEEK_OFF,
            (&raw const offset).cast(),
            libc::socklen_t::try_from(size_of::<libc::c_int>()).expect("four"),
        )
    };
    match done {
        0 => Ok(()),
        _ => Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}

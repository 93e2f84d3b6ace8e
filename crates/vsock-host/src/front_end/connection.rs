//! A VMM's connection: messages are let through to the crate `vhost` only when they are whole.

use std::{
    io,
    mem::size_of,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd},
        unix::net::UnixStream,
    },
    sync::{Arc, Mutex},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{RecvFlags, recv},
};
use vhost::vhost_user::{BackendReqHandler, Error, Result};

use super::{SharedTransport, Transport};

/// Length of a message's header, and where in it the length of the rest is.
const MESSAGE_HEADER: usize = 12;
/// Longest rest of a message that is served.
const LONGEST_MESSAGE: usize = 4096;

/// A VMM's connection.
pub struct FrontEnd {
    socket: UnixStream,
    handler: BackendReqHandler<Mutex<Transport>>,
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
        // The crate expects it so; it never waits, see above.
        socket.set_nonblocking(false)?;
        let handler = BackendReqHandler::from_stream(socket.try_clone()?, Arc::clone(transport));
        Ok(Self { socket, handler })
    }

    /// The socket, to wait until it is readable.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Serves a message if a whole one is there.
    pub fn serve(&mut self) -> Served {
        match self.message_is_there() {
            Ok(true) => match self.handler.handle_request() {
                Ok(()) => Served::One,
                Err(error) => Served::Over(error),
            },
            Ok(false) => Served::Nothing,
            Err(error) => Served::Over(error),
        }
    }

    fn message_is_there(&self) -> Result<bool> {
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
        let there = rustix::io::ioctl_fionread(&self.socket).map_err(broken)?;
        if there < (MESSAGE_HEADER + rest) as u64 {
            return self.wait_for_more();
        }
        self.room_for_answer().map(|()| true)
    }

    /// Looks at the header of the next message, if all of it is there. Looking stops at descriptors, and
    /// those come with whatever byte the VMM attached them to; so it goes on from where it stopped.
    fn peek_header(&self) -> Result<Option<[u8; MESSAGE_HEADER]>> {
        let broken = |error: Errno| Error::SocketBroken(error.into());
        let mut header = [0_u8; MESSAGE_HEADER];
        let mut seen = 0;
        set_peek_offset(&self.socket, 0).map_err(broken)?;
        let result = loop {
            match recv(
                &self.socket,
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
        set_peek_offset(&self.socket, -1).map_err(broken)?;
        result
    }

    /// Part of a message is there; the rest will come only if somebody is there to send it.
    fn wait_for_more(&self) -> Result<bool> {
        let mut fds = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        match poll(&mut fds, Some(&now)) {
            Ok(0) => Ok(false),
            _ => Err(Error::Disconnected),
        }
    }

    /// A Unix socket is writable while less than a quarter of its buffer is in use, and no answer needs more
    /// than another quarter. Who doesn't read so many answers is no VMM.
    fn room_for_answer(&self) -> Result<()> {
        let mut fds = [PollFd::new(&self.socket, PollFlags::OUT)];
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

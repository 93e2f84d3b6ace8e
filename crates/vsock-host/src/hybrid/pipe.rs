//! Pipes through which bytes travel between two sockets without being copied.

use std::{io, os::fd::OwnedFd};

use rustix::{
    io::Errno,
    pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice},
};

use crate::descriptors;

/// Bytes that a pipe is asked to hold: sixteen pages are what the kernel gives a socket at once.
pub const PIPE_BYTES: usize = 256 * 1024;
/// Pipes that wait for use; further ones are closed.
const SPARE_MAX: usize = 64;

/// One pipe.
#[derive(Debug)]
pub struct Pipe {
    out: OwnedFd,
    into: OwnedFd,
}

impl Pipe {
    /// Moves up to `length` bytes from a socket into the pipe, which has to be empty: only then does `EAGAIN`
    /// tell of the socket. 0 is the end.
    ///
    /// # Errors
    /// Of `splice`.
    pub fn fill(&self, from: &OwnedFd, length: usize) -> rustix::io::Result<usize> {
        splice(from, None, &self.into, None, length, FLAGS)
    }

    /// Moves up to `length` bytes, which have to be in it, on to a socket.
    ///
    /// # Errors
    /// Of `splice`.
    pub fn drain(&self, to: &OwnedFd, length: usize) -> rustix::io::Result<usize> {
        splice(&self.out, None, to, None, length, FLAGS)
    }
}

const FLAGS: SpliceFlags = SpliceFlags::NONBLOCK.union(SpliceFlags::MOVE);

/// Empty pipes. A connection has one only while bytes are in it, so idle ones cost no descriptors for it.
#[derive(Debug, Default)]
pub struct PipePool {
    spare: Vec<Pipe>,
}

impl PipePool {
    /// An empty pipe.
    ///
    /// # Errors
    /// Of `pipe2`: no descriptors are left for guests.
    pub fn take(&mut self) -> io::Result<Pipe> {
        if let Some(pipe) = self.spare.pop() {
            return Ok(pipe);
        }
        let (out, into) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        if descriptors::is_reserved(&into) {
            return Err(Errno::MFILE.into());
        }
        // Refused beyond the user's share of pipe memory; a smaller pipe does as well.
        let _ = fcntl_setpipe_size(&into, PIPE_BYTES);
        Ok(Pipe { out, into })
    }

    /// Gives an empty pipe back.
    pub fn give(&mut self, pipe: Pipe) {
        if self.spare.len() < SPARE_MAX {
            self.spare.push(pipe);
        }
    }
}

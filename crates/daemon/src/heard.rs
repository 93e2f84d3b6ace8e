//! A connection that tells whether its caller has heard all that was said.
//!
//! When the other end of a Unix socket is closed with bytes in it that nobody has read, the kernel resets this end; a write to
//! one that is closed already is refused. The HTTP server takes the first, between two requests, for an end like any other.

use std::{
    io::{self, ErrorKind, IoSlice},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::UnixStream,
};

/// The connection.
#[derive(Debug)]
pub(crate) struct Heard {
    stream: UnixStream,
    is_lost: Arc<AtomicBool>,
}

impl Heard {
    /// The second becomes true when the caller has gone before it had read all.
    pub(crate) fn new(stream: UnixStream) -> (Self, Arc<AtomicBool>) {
        let is_lost = Arc::new(AtomicBool::new(false));
        let heard = Self {
            stream,
            is_lost: Arc::clone(&is_lost),
        };
        (heard, is_lost)
    }

    /// The socket alone.
    pub(crate) fn into_inner(self) -> UnixStream {
        self.stream
    }

    fn note<T>(&self, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        let lost = [ErrorKind::ConnectionReset, ErrorKind::BrokenPipe];
        if matches!(&result, Poll::Ready(Err(error)) if lost.contains(&error.kind())) {
            self.is_lost.store(true, Ordering::Relaxed);
        }
        result
    }
}

impl AsyncRead for Heard {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_read(context, buffer);
        self.note(result)
    }
}

impl AsyncWrite for Heard {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.note(result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(context, pieces);
        self.note(result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

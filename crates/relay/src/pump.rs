//! Carries the bytes of a connection both ways: as fast as the slower side takes them, each direction until it ends.
//!
//! An end is passed on as an end of that direction, anything else as a reset: nobody takes a part for the whole. That
//! holds for the end of this process too, so a connection in the clear is to be reset from its first moment on, until
//! both directions have ended.

use std::{
    io,
    pin::Pin,
    sync::atomic::{AtomicU64, Ordering},
    task::{Context, Poll},
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf},
    net::{
        TcpStream,
        tcp::{ReadHalf as PlainReader, WriteHalf as PlainWriter},
    },
    time::sleep,
};

use crate::{config::Limits, credentials::Life, transport::SecureTcp};

/// The side that is in TLS.
pub(crate) struct Secure {
    pub(crate) reader: SecureReader,
    pub(crate) writer: SecureWriter,
    pub(crate) life: Life,
}

pub(crate) enum SecureReader {
    Tls(ReadHalf<SecureTcp>),
    Quic(quinn::RecvStream),
}

pub(crate) enum SecureWriter {
    Tls(WriteHalf<SecureTcp>),
    Quic(quinn::SendStream),
}

impl AsyncRead for SecureReader {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut tokio::io::ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tls(reader) => Pin::new(reader).poll_read(context, buffer),
            Self::Quic(reader) => AsyncRead::poll_read(Pin::new(reader), context, buffer),
        }
    }
}

impl AsyncWrite for SecureWriter {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tls(writer) => Pin::new(writer).poll_write(context, bytes),
            Self::Quic(writer) => AsyncWrite::poll_write(Pin::new(writer), context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tls(writer) => Pin::new(writer).poll_flush(context),
            Self::Quic(writer) => AsyncWrite::poll_flush(Pin::new(writer), context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tls(writer) => Pin::new(writer).poll_shutdown(context),
            Self::Quic(writer) => AsyncWrite::poll_shutdown(Pin::new(writer), context),
        }
    }
}

impl Secure {
    /// Ends it so that the other side sees no proper end.
    fn cut(self) {
        match (self.reader, self.writer) {
            (SecureReader::Tls(reader), SecureWriter::Tls(writer)) => {
                // Without the notice of TLS, and with a reset of TCP.
                reset(reader.unsplit(writer).get_ref().0.get_ref());
            }
            (SecureReader::Quic(_), SecureWriter::Quic(mut writer)) => {
                // It was reset before, at worst.
                let _ = writer.reset(quinn::VarInt::from_u32(1));
            }
            _ => {}
        }
    }
}

/// Has TCP say that the connection was cut when it is closed, whoever closes it.
pub(crate) fn reset(stream: &TcpStream) {
    // Worst case, the other side sees an end.
    let _ = rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO));
}

/// Has what was sent arrive, and then the end.
fn finish(stream: &TcpStream) {
    // Worst case, the other side sees a cut.
    let _ = rustix::net::sockopt::set_socket_linger(stream, None);
}

/// When something last happened, and how much has.
pub(crate) struct Progress {
    since: Instant,
    milliseconds: AtomicU64,
    from_plain: AtomicU64,
    to_plain: AtomicU64,
}

impl Progress {
    pub(crate) fn new() -> Self {
        Self {
            since: Instant::now(),
            milliseconds: AtomicU64::new(0),
            from_plain: AtomicU64::new(0),
            to_plain: AtomicU64::new(0),
        }
    }

    /// Bytes from the plain side, and to it.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        (
            self.from_plain.load(Ordering::Relaxed),
            self.to_plain.load(Ordering::Relaxed),
        )
    }

    fn note(&self, bytes: &AtomicU64, count: usize) {
        bytes.fetch_add(count as u64, Ordering::Relaxed);
        let now = u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.milliseconds.store(now, Ordering::Relaxed);
    }

    /// Waits until nothing has happened for so long.
    async fn idle(&self, at_most: Duration) {
        loop {
            let last = Duration::from_millis(self.milliseconds.load(Ordering::Relaxed));
            let silent = self.since.elapsed().saturating_sub(last);
            if silent >= at_most {
                return;
            }
            sleep(at_most.saturating_sub(silent)).await;
        }
    }
}

/// Carries bytes until both directions have ended, or it has to be cut; also where there is a reason from outside.
///
/// # Errors
/// Why it was cut.
pub(crate) async fn carry(
    mut plain: TcpStream,
    mut secure: Secure,
    limits: &Limits,
    progress: &Progress,
    reason: impl Future<Output = String>,
) -> Result<(), String> {
    let buffer_bytes = limits.buffer_bytes;
    let life = secure.life.clone();
    let outcome = {
        let (plain_reader, plain_writer) = plain.split();
        let both = async {
            tokio::try_join!(
                seal(plain_reader, &mut secure.writer, buffer_bytes, progress),
                open(&mut secure.reader, plain_writer, buffer_bytes, progress),
            )
        };
        tokio::select! {
            outcome = both => outcome.map(drop).map_err(|error| error.to_string()),
            reason = life.end() => Err(reason),
            reason = reason => Err(reason),
            () = progress.idle(limits.tcp_idle) => Err("it was silent for too long".to_owned()),
        }
    };
    if outcome.is_ok() {
        finish(&plain);
    } else {
        secure.cut();
    }
    outcome
}

async fn seal(
    mut from: PlainReader<'_>,
    to: &mut SecureWriter,
    buffer_bytes: usize,
    progress: &Progress,
) -> io::Result<()> {
    let mut buffer = vec![0; buffer_bytes];
    loop {
        let count = from.read(&mut buffer).await?;
        if count == 0 {
            return to.shutdown().await;
        }
        to.write_all(&buffer[..count]).await?;
        to.flush().await?;
        progress.note(&progress.from_plain, count);
    }
}

async fn open(
    from: &mut SecureReader,
    to: PlainWriter<'_>,
    buffer_bytes: usize,
    progress: &Progress,
) -> io::Result<()> {
    let mut buffer = vec![0; buffer_bytes];
    let mut to = to;
    loop {
        let count = from.read(&mut buffer).await?;
        if count == 0 {
            let socket = rustix::net::shutdown(to.as_ref(), rustix::net::Shutdown::Write);
            return socket.map_err(Into::into);
        }
        to.write_all(&buffer[..count]).await?;
        progress.note(&progress.to_plain, count);
    }
}

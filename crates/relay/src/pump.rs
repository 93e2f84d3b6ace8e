//! Carries the bytes of a connection both ways: as fast as the slower side takes them, each direction until it ends.
//!
//! An end is passed on as an end of that direction, anything else as a reset: nobody takes a part for the whole. That
//! holds for the end of this process too, so a connection in the clear is to be reset from its first moment on, until
//! both directions have ended.

use std::{
    fmt,
    future::{pending, ready},
    io,
    os::fd::OwnedFd,
    pin::Pin,
    sync::atomic::{AtomicU64, Ordering},
    task::{Context, Poll},
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, Interest, ReadHalf, WriteHalf},
    net::TcpStream,
    time::sleep,
};

use crate::{
    config::Limits,
    credentials::Life,
    liveness::unanswered,
    transport::SecureTcp,
    unread::{NoPart, Waiting},
};

/// The side that is in TLS.
pub(crate) struct Secure {
    pub(crate) reader: SecureReader,
    pub(crate) writer: SecureWriter,
    /// How long it may be used, of one in TLS. A stream of QUIC ends with its channel, and that has a life.
    pub(crate) life: Option<Life>,
    /// The connection of TCP below it, if there is one, to be asked what it has heard.
    pub(crate) tcp: Option<OwnedFd>,
    /// The connection of QUIC that it is a stream of, if it is one.
    pub(crate) quic: Option<quinn::Connection>,
}

pub(crate) enum SecureReader {
    Tls(ReadHalf<SecureTcp>),
    Quic(quinn::RecvStream),
}

pub(crate) enum SecureWriter {
    Tls(WriteHalf<SecureTcp>),
    Quic(quinn::SendStream),
}

impl SecureReader {
    /// Throws away what has come and wasn't read, and what still comes of QUIC.
    pub(crate) fn stop(&mut self) {
        if let Self::Quic(reader) = self {
            // It has ended before, at worst.
            let _ = reader.stop(quinn::VarInt::from_u32(0));
        }
    }
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
    pub(crate) fn cut(self) {
        // The reset comes when the last one is closed.
        drop(self.tcp);
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

/// Makes a new connection in the clear one that is carried: it is reset unless it ends properly, and a byte that its other end
/// sends as urgent stays where it is among the others, which the kernel would take out of them. To TLS it is one like any other.
pub(crate) fn prepare(stream: &TcpStream) {
    reset(stream);
    // No socket of TCP refuses.
    let _ = rustix::net::sockopt::set_socket_oobinline(stream, true);
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

/// Why a connection was cut.
#[derive(Debug)]
pub(crate) enum Cut {
    /// This end has not answered for so long what was sent to it.
    Unanswered(&'static str, Duration),
    /// Its end in the clear doesn't read, and there is no part for it of what is held for such.
    Unread,
    /// Anything else.
    Other(String),
}

impl fmt::Display for Cut {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unanswered(end, time) => {
                let seconds = time.as_secs();
                write!(
                    formatter,
                    "{end} has not acknowledged what was sent to it for {seconds} s"
                )
            }
            Self::Unread => formatter.write_str(
                "its end in the clear doesn't read what waits for it, and all that `limits.unread_bytes` has for such connections \
                 is taken: its sender or host has most of them, or nobody has more; or there is none in its host's channel",
            ),
            Self::Other(reason) => formatter.write_str(reason),
        }
    }
}

impl From<io::Error> for Cut {
    fn from(error: io::Error) -> Self {
        Self::Other(error.to_string())
    }
}

impl From<NoPart> for Cut {
    fn from(_: NoPart) -> Self {
        Self::Unread
    }
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
    (plain, mut secure): (TcpStream, Secure),
    mut waiting: Waiting<'_>,
    limits: &Limits,
    progress: &Progress,
    reason: impl Future<Output = String>,
) -> Result<(), Cut> {
    let buffer_bytes = limits.buffer_bytes;
    let life = secure.life.take();
    let at_most = limits.tcp_unanswered;
    // What this relay holds in TLS doesn't depend on who reads.
    let waiting = matches!(secure.reader, SecureReader::Quic(_)).then_some(&mut waiting);
    let outcome = {
        let both = async {
            tokio::try_join!(
                seal(&plain, &mut secure.writer, buffer_bytes, progress),
                open(
                    &mut secure.reader,
                    (&plain, waiting),
                    buffer_bytes,
                    progress
                ),
            )
        };
        tokio::select! {
            outcome = both => outcome.map(drop),
            reason = ended(life) => Err(Cut::Other(reason)),
            reason = reason => Err(Cut::Other(reason)),
            () = progress.idle(limits.tcp_idle) => {
                Err(Cut::Other("it was silent for too long".to_owned()))
            }
            () = unanswered(&plain, at_most) => Err(Cut::Unanswered("its end in the clear", at_most)),
            () = of_relay_unanswered(secure.tcp.as_ref(), at_most) => {
                Err(Cut::Unanswered("the other relay", at_most))
            }
            () = closed(secure.quic.as_ref()) => {
                Err(Cut::Other("the channel to the other relay has ended".to_owned()))
            }
            () = broken(&plain, progress, at_most) => Err(Cut::Other(
                "its end in the clear has broken it, and the other side doesn't read what came before".to_owned(),
            )),
        }
    };
    if outcome.is_ok() {
        finish(&plain);
    } else {
        secure.cut();
    }
    outcome
}

async fn of_relay_unanswered(tcp: Option<&OwnedFd>, at_most: Duration) {
    match tcp {
        Some(tcp) => unanswered(tcp, at_most).await,
        // QUIC has a patience of its own.
        None => pending().await,
    }
}

async fn ended(life: Option<Life>) -> String {
    match life {
        Some(life) => life.end().await,
        None => pending().await,
    }
}

/// Waits until the connection of QUIC has ended. While nobody takes what came by a stream, that isn't noticed there, and the
/// stream keeps all that the connection holds.
async fn closed(quic: Option<&quinn::Connection>) {
    match quic {
        Some(quic) => drop(quic.closed().await),
        None => pending().await,
    }
}

/// Waits until the connection in the clear is broken, and then until nothing of what came before was passed on for so long.
/// Whoever passes it on notices neither while the other side doesn't read.
async fn broken(plain: &TcpStream, progress: &Progress, at_most: Duration) {
    if plain.ready(Interest::ERROR).await.is_err() {
        // One that can't be waited for is none for whoever reads and writes there, either.
        return pending().await;
    }
    // It may have been silent for long before.
    sleep(at_most).await;
    progress.idle(at_most).await;
}

async fn seal(
    from: &TcpStream,
    to: &mut SecureWriter,
    buffer_bytes: usize,
    progress: &Progress,
) -> Result<(), Cut> {
    let mut buffer = vec![0; buffer_bytes];
    loop {
        let count = read(from, &mut buffer).await?;
        if count == 0 {
            return Ok(to.shutdown().await?);
        }
        let mut rest = &buffer[..count];
        while !rest.is_empty() {
            let written = to.write(rest).await?;
            if written == 0 {
                return Err(io::Error::from(io::ErrorKind::WriteZero).into());
            }
            // Each time: of a whole buffer, who reads slowly may take a part in the time that silence may last.
            progress.note(&progress.from_plain, written);
            rest = &rest[written..];
        }
        to.flush().await?;
    }
}

async fn open(
    from: &mut (impl AsyncRead + Unpin),
    (to, mut waiting): (&TcpStream, Option<&mut Waiting<'_>>),
    buffer_bytes: usize,
    progress: &Progress,
) -> Result<(), Cut> {
    let mut buffer = vec![0; buffer_bytes];
    loop {
        let read = tokio::select! {
            biased;
            count = from.read(&mut buffer) => Some(count?),
            // Nothing has come, so all is taken.
            () = ready(()) => None,
        };
        let is_all = matches!(read, None | Some(0));
        if let Some(waiting) = waiting.as_mut().filter(|_| is_all) {
            waiting.is_read();
        }
        let count = match read {
            Some(count) => count,
            None => from.read(&mut buffer).await?,
        };
        if count == 0 {
            let socket = rustix::net::shutdown(to, rustix::net::Shutdown::Write);
            return Ok(socket.map_err(io::Error::from)?);
        }
        write_all(to, &buffer[..count], waiting.as_deref_mut(), progress).await?;
    }
}

/// Reads from a stream that others use, too.
async fn read(from: &TcpStream, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match from.try_read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => from.readable().await?,
            outcome => return outcome,
        }
    }
}

/// Writes to a stream in the clear that others use, too, and notes what it has taken as it does.
async fn write_all(
    to: &TcpStream,
    mut bytes: &[u8],
    mut waiting: Option<&mut Waiting<'_>>,
    progress: &Progress,
) -> Result<(), Cut> {
    while !bytes.is_empty() {
        match to.try_write(bytes) {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
            Ok(count) => {
                progress.note(&progress.to_plain, count);
                bytes = &bytes[count..];
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => match &mut waiting {
                Some(waiting) => waiting.until(to.writable()).await??,
                None => to.writable().await?,
            },
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustix::net::{SendFlags, send};
    use tokio::{net::TcpListener, time::timeout};

    use super::*;
    use crate::{
        fair::{Bounds, Fair},
        metrics::Metrics,
        room::Rooms,
        unread::Unread,
    };

    const SHORT: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_millis(500);
    const PATIENCE: Duration = Duration::from_secs(30);

    /// A connection: our end, and that of somebody else.
    async fn connection() -> [TcpStream; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let other = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        [listener.accept().await.unwrap().0, other]
    }

    async fn move_on(progress: &Progress) {
        loop {
            progress.note(&progress.from_plain, 1);
            sleep(SHORT).await;
        }
    }

    #[tokio::test]
    async fn a_byte_that_is_urgent_stays_in_the_stream() {
        let [plain, mut other] = connection().await;
        prepare(&plain);
        other.write_all(b"be").await.unwrap();
        send(&other, b"f", SendFlags::OOB).unwrap();
        other.write_all(b"ore").await.unwrap();
        drop(other);
        let (mut all, mut buffer) = (Vec::new(), [0; 64]);
        loop {
            match read(&plain, &mut buffer).await.unwrap() {
                0 => break,
                count => all.extend_from_slice(&buffer[..count]),
            }
        }
        assert_eq!(all, b"before");
    }

    #[tokio::test]
    async fn what_was_taken_of_a_buffer_is_noted_before_the_rest_is() {
        let [plain, mut reader] = connection().await;
        let progress = Progress::new();
        // More than the kernel keeps for who doesn't read.
        let bytes = vec![7; 64 << 20];
        let mut writing = Box::pin(write_all(&plain, &bytes, None, &progress));
        timeout(LONG, &mut writing).await.unwrap_err();
        let (_, first) = progress.bytes();
        assert!(first > 0 && first < bytes.len() as u64, "{first}");
        let mut read = vec![0; 16 << 20];
        tokio::select! {
            outcome = &mut writing => panic!("all is written: {outcome:?}"),
            taken = reader.read_exact(&mut read) => assert_eq!(taken.unwrap(), 16 << 20),
        }
        assert!(progress.bytes().1 >= read.len() as u64);
    }

    #[tokio::test]
    async fn who_has_read_all_up_to_the_end_has_no_part() {
        let [plain, mut reader] = connection().await;
        let rooms: Rooms = Fair::new(Bounds {
            per_sender: 1,
            per_host: 1,
            all: 1,
        });
        let (metrics, name) = (Metrics::default(), Arc::<str>::from("a"));
        let unread = Unread {
            of: &rooms,
            metrics: &metrics,
            is_wide: None,
        };
        let mut waiting = unread.of(&name, &name);
        // More than both kernels keep, and right after it the end.
        let bytes = vec![7; 64 << 20];
        let progress = Progress::new();
        let mut from = &bytes[..];
        let mut carrying = Box::pin(open(
            &mut from,
            (&plain, Some(&mut waiting)),
            65_536,
            &progress,
        ));
        timeout(LONG, &mut carrying).await.unwrap_err();
        assert_eq!(metrics.connections_unread.get(), 1);
        let mut all = vec![0; 64 << 20];
        let (carried, read) = tokio::join!(carrying, reader.read_exact(&mut all));
        carried.unwrap();
        read.unwrap();
        assert_eq!(metrics.connections_unread.get(), 0);
    }

    #[tokio::test]
    async fn a_reset_that_nobody_reads_ends_it_once_nothing_moves() {
        let [plain, mut other] = connection().await;
        let progress = Progress::new();
        other.write_all(b"what came before").await.unwrap();
        let healthy = timeout(LONG, broken(&plain, &progress, SHORT)).await;
        healthy.expect_err("nothing is wrong");
        reset(&other);
        drop(other);
        // As long as something moves, it is waited for.
        let second = Duration::from_secs(1);
        tokio::select! {
            () = broken(&plain, &progress, second) => panic!("it moves"),
            () = move_on(&progress) => {}
            () = sleep(3 * second) => {}
        }
        let ended = timeout(PATIENCE, broken(&plain, &progress, SHORT)).await;
        ended.unwrap();
        let mut buffer = [0; 64];
        let count = read(&plain, &mut buffer).await.unwrap();
        assert_eq!(&buffer[..count], b"what came before");
    }
}

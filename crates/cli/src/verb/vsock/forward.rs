//! `sandwire vsock forward`: a TCP port or Unix socket of the host joined to a port of a guest.

use std::{fmt::Display, io, net::SocketAddr, path::PathBuf, str::FromStr, time::Duration};

use clap::Args;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy, sink, split},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::Notify,
    time::sleep,
};

use super::{
    Which, guest,
    listen::{PortSocket, bind, note_policy, pause},
};
use crate::{
    Context,
    failure::{Failure, Outcome},
    interruption::Ends,
    output::note,
};

/// Bytes moved at a time.
const BUFFER_BYTES: usize = 32 * 1024;
/// How long a side that is still sent from, for nobody, is read after all else is over. A TCP socket that is closed with
/// bytes unread takes back what it hasn't delivered yet.
const LINGER: Duration = Duration::from_secs(2);

/// Command line of `sandwire vsock forward`.
#[derive(Debug, Args)]
#[command(
    after_help = "Example: sandwire vsock forward web-1 127.0.0.1:8080 80 lets the host's port 8080 lead to port \
    80 of the guest; with --from-guest the guest's connections to port 80 of its host lead to 127.0.0.1:8080. \
    The end of each direction is passed on. Interrupting it ends it in order."
)]
pub(crate) struct Arguments {
    #[command(flatten)]
    which: Which,

    /// On the host: a TCP address and port, or the absolute path of a Unix socket.
    #[arg(value_name = "ADDRESS:PORT|PATH")]
    host: HostEnd,

    /// Port in the guest; with --from-guest, of its host as the guest sees it.
    port: u32,

    /// The guest connects, and the host's service answers, instead of the other way round.
    #[arg(long)]
    from_guest: bool,
}

/// Where connections come from or go to on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
enum HostEnd {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl FromStr for HostEnd {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with('/') {
            return Ok(Self::Unix(PathBuf::from(text)));
        }
        text.parse().map(Self::Tcp).map_err(|_| {
            format!("'{text}' is neither a TCP address with a port, as 127.0.0.1:8080 or [::1]:80, nor an absolute path")
        })
    }
}

pub(crate) fn run(context: &Context, arguments: &Arguments) -> Outcome {
    let Arguments {
        which,
        host,
        port,
        from_guest,
    } = arguments;
    let operation = format!("forward vsock port {port} of lease {}", which.name);
    let channel = guest::channel(context, which, &operation)?;
    let failed = |error: io::Error| Failure::failed(format!("cannot {operation}: {error}"));
    if *from_guest {
        note_policy(context, which, channel.kind, *port);
    }
    let socket = PathBuf::from(&channel.socket);
    let work = async {
        let mut ends = Ends::new().map_err(failed)?;
        let work = async {
            match (from_guest, host) {
                (true, host) => to_host(PortSocket::bind(&channel, *port)?, host).await,
                (false, HostEnd::Tcp(address)) => {
                    let listener = TcpListener::bind(address).await;
                    let listener = listener.map_err(at("listen on", address))?;
                    from_tcp(&listener, &socket, *port).await
                }
                (false, HostEnd::Unix(path)) => {
                    let bound = Bound {
                        listener: bind(path)?,
                        path,
                    };
                    from_unix(&bound.listener, &socket, *port).await
                }
            }
        };
        tokio::select! {
            outcome = work => outcome.map_err(failed),
            () = ends.wait() => Ok(()),
        }
    };
    guest::serve(&operation, work)
}

/// A Unix socket of ours, gone when dropped.
struct Bound<'a> {
    listener: UnixListener,
    path: &'a PathBuf,
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        // Somebody may have removed it before.
        let _ = std::fs::remove_file(self.path);
    }
}

/// The guest's connections to the host's service.
async fn to_host(socket: PortSocket, host: &HostEnd) -> io::Result<()> {
    loop {
        match socket.listener.accept().await {
            Ok((guest, _)) => {
                let host = host.clone();
                tokio::spawn(async move {
                    told(match host {
                        HostEnd::Tcp(address) => {
                            let service = connect_tcp(address).await;
                            join(guest, service.map_err(at("connect to", address))).await
                        }
                        HostEnd::Unix(path) => {
                            let service = UnixStream::connect(&path).await;
                            join(guest, service.map_err(at("connect to", path.display()))).await
                        }
                    });
                });
            }
            Err(error) => pause(&error).await,
        }
    }
}

async fn from_tcp(listener: &TcpListener, socket: &std::path::Path, port: u32) -> io::Result<()> {
    loop {
        match accept_tcp(listener).await {
            Ok(client) => spawn_to_guest(client, socket, port),
            Err(error) => pause(&error).await,
        }
    }
}

async fn accept_tcp(listener: &TcpListener) -> io::Result<TcpStream> {
    listener.accept().await.map(|(client, _)| prompt(client))
}

async fn connect_tcp(address: SocketAddr) -> io::Result<TcpStream> {
    TcpStream::connect(address).await.map(prompt)
}

/// What the other side has sent is complete for it; waiting for more would only delay it.
fn prompt(stream: TcpStream) -> TcpStream {
    // It works all the same.
    let _ = stream.set_nodelay(true);
    stream
}

async fn from_unix(listener: &UnixListener, socket: &std::path::Path, port: u32) -> io::Result<()> {
    loop {
        match listener.accept().await {
            Ok((client, _)) => spawn_to_guest(client, socket, port),
            Err(error) => pause(&error).await,
        }
    }
}

fn spawn_to_guest(
    client: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    socket: &std::path::Path,
    port: u32,
) {
    let socket = socket.to_owned();
    tokio::spawn(async move {
        let dialled = tokio::task::spawn_blocking(move || guest::dial(&socket, port, false)).await;
        let guest = dialled
            .map_err(io::Error::other)
            .and_then(|dialled| dialled)
            .and_then(|guest| {
                let guest = std::os::unix::net::UnixStream::from(guest);
                guest.set_nonblocking(true)?;
                UnixStream::from_std(guest)
            });
        told(join(client, guest).await);
    });
}

/// Joins two ends. Each direction ends by itself, also if its receiver is gone: that one may have said something before,
/// as a server does that refuses what it is sent.
async fn join(
    from: impl AsyncRead + AsyncWrite,
    to: io::Result<impl AsyncRead + AsyncWrite>,
) -> io::Result<()> {
    let (from_reads, from_writes) = split(from);
    let (to_reads, to_writes) = split(to?);
    let (there_is_over, back_is_over) = (Notify::new(), Notify::new());
    let (there, back) = tokio::join!(
        pass(from_reads, to_writes, &there_is_over, &back_is_over),
        pass(to_reads, from_writes, &back_is_over, &there_is_over),
    );
    there.and(back)
}

/// One direction, to its end, which is passed on and told to `over`. If it has broken, what still comes is read for nothing
/// while the other one goes on: whoever sends it may not read before it is sent.
async fn pass(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    over: &Notify,
    other_is_over: &Notify,
) -> io::Result<()> {
    let copied = copy_whole(&mut from, &mut to).await;
    // Fails only if there is nobody any more.
    let _ = to.shutdown().await;
    over.notify_one();
    if copied.is_err() {
        let enough = async {
            other_is_over.notified().await;
            sleep(LINGER).await;
        };
        let mut nowhere = sink();
        tokio::select! {
            _ = copy(&mut from, &mut nowhere) => {}
            () = enough => {}
        }
    }
    copied
}

/// Copies to the end. What came before an error is written all the same; tokio's `copy` may drop the last of it.
async fn copy_whole(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let length = from.read(&mut buffer).await?;
        if length == 0 {
            return Ok(());
        }
        to.write_all(&buffer[..length]).await?;
    }
}

/// Says what failed, and where.
fn at(what: &str, place: impl Display) -> impl FnOnce(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{what} {place}: {error}"))
}

/// Says what is wrong. That one side has gone before the other isn't.
fn told(outcome: io::Result<()>) {
    let Err(error) = outcome else {
        return;
    };
    let kinds = [io::ErrorKind::ConnectionReset, io::ErrorKind::BrokenPipe];
    if !kinds.contains(&error.kind()) {
        note(&format!("a connection was not forwarded: {error}"));
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn an_answer_arrives_from_who_closes_without_reading_the_rest() {
        const UPLOAD_BYTES: usize = 4 << 20;
        let (client, from) = UnixStream::pair().unwrap();
        let (to, mut server) = UnixStream::pair().unwrap();
        let joined = tokio::spawn(join(from, Ok(to)));
        let (mut reads, mut writes) = client.into_split();
        let upload = tokio::spawn(async move { writes.write_all(&vec![7; UPLOAD_BYTES]).await });
        server.read_exact(&mut [0]).await.unwrap();
        server.write_all(b"refused").await.unwrap();
        drop(server);
        let mut answer = Vec::new();
        reads.read_to_end(&mut answer).await.unwrap();
        assert_eq!(answer, b"refused");
        upload.await.unwrap().unwrap();
        assert!(joined.await.unwrap().is_err());
    }

    #[tokio::test]
    async fn all_of_a_client_that_is_gone_arrives_at_who_reads_only_while_it_can_answer() {
        const WHILE: Duration = Duration::from_millis(200);
        let (mut client, from) = UnixStream::pair().unwrap();
        let (to, server) = UnixStream::pair().unwrap();
        let joined = tokio::spawn(join(from, Ok(to)));
        let echo = tokio::spawn(async move {
            let (mut reads, mut writes) = server.into_split();
            copy(&mut reads, &mut writes).await
        });
        // Until nothing on the way takes any more, as the client doesn't read.
        let mut sent = 0;
        while let Ok(written) = timeout(WHILE, client.write(&[7; 4096])).await {
            sent += written.unwrap() as u64;
        }
        drop(client);
        assert_eq!(echo.await.unwrap().unwrap(), sent);
        assert!(joined.await.unwrap().is_err());
    }

    #[tokio::test]
    async fn who_cannot_be_reached_is_named() {
        let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = taken.local_addr().unwrap();
        let error = TcpListener::bind(address).await.unwrap_err();
        let error = at("listen on", address)(error);
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        let expected = format!("listen on {address}: ");
        assert!(error.to_string().starts_with(&expected), "{error}");
    }

    #[tokio::test]
    async fn small_writes_do_not_wait_for_acknowledgements() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let connected = connect_tcp(listener.local_addr().unwrap()).await.unwrap();
        let accepted = accept_tcp(&listener).await.unwrap();
        assert!(connected.nodelay().unwrap() && accepted.nodelay().unwrap());
    }

    #[test]
    fn an_end_on_the_host_is_an_address_or_a_path() {
        let tcp = |text: &str| HostEnd::Tcp(text.parse().unwrap());
        assert_eq!("127.0.0.1:80".parse(), Ok(tcp("127.0.0.1:80")));
        assert_eq!("[::1]:80".parse(), Ok(tcp("[::1]:80")));
        assert_eq!("/run/x".parse(), Ok(HostEnd::Unix("/run/x".into())));
        for text in ["80", "localhost:80", "x.sock", ""] {
            assert!(text.parse::<HostEnd>().is_err(), "{text}");
        }
    }
}

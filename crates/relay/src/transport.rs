//! Connections between two relays: TLS over TCP, one for each TCP connection that is carried, and QUIC.

pub(crate) mod channel;
pub(crate) mod peer;
pub(crate) mod socket;

use std::{
    io,
    net::SocketAddr,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use quinn::{TransportConfig, VarInt, congestion};
use rustls::pki_types::CertificateDer;
use tokio::{
    io::{AsyncRead, AsyncReadExt, BufReader},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use crate::{
    config::{Limits, Peer},
    credentials::{CredentialsError, Life, Store},
    liveness::end_when_gone,
    unread,
    wire::{Malformed, OPENING_BYTES_MAX, Opening},
};

/// TLS over TCP. What comes is read in large pieces: TLS itself asks for 4 KiB at a time.
pub(crate) type SecureTcp = TlsStream<BufReader<TcpStream>>;

/// How long a QUIC connection may be silent, and how often it isn't.
const QUIC_IDLE: Duration = Duration::from_secs(15);
const QUIC_KEEP_ALIVE: Duration = Duration::from_secs(4);
/// How long a channel in TLS may be without an answer, and how often it is asked when nothing is sent.
const TLS_SILENCE: Duration = Duration::from_secs(15);
const TLS_PROBE: Duration = Duration::from_secs(4);
/// How long QUIC may take to be connected before it is given up.
const QUIC_CONNECT: Duration = Duration::from_secs(3);
/// Streams, each a TCP connection, that a QUIC connection may have at most: it has memory for each from the beginning.
const QUIC_STREAMS_MAX: usize = 65_536;

/// Why there is no connection to another relay.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TransportError {
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    #[error("{operation} {address}: {source}")]
    Io {
        operation: &'static str,
        address: SocketAddr,
        source: io::Error,
    },
    #[error("{operation} {address}: {reason}")]
    Quic {
        operation: &'static str,
        address: SocketAddr,
        reason: String,
    },
    #[error("no channel to {address} in time: {reason}")]
    Away {
        address: SocketAddr,
        reason: Arc<str>,
    },
    #[error("no answer from {0} in time")]
    TimedOut(SocketAddr),
    #[error("it had not begun when there were too many such; newer ones come first")]
    Displaced,
    #[error("{host} has {most} channels already")]
    TooMany { host: Arc<str>, most: usize },
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

fn io_error(
    operation: &'static str,
    address: SocketAddr,
) -> impl FnOnce(io::Error) -> TransportError {
    move |source| TransportError::Io {
        operation,
        address,
        source,
    }
}

fn quic_error<E: ToString>(
    operation: &'static str,
    address: SocketAddr,
) -> impl FnOnce(E) -> TransportError {
    move |error| TransportError::Quic {
        operation,
        address,
        reason: error.to_string(),
    }
}

/// Makes a TLS connection to a peer.
pub(crate) async fn connect_tls(
    peer: &Peer,
    store: &Store,
    limits: &Limits,
) -> Result<(SecureTcp, Life), TransportError> {
    let credentials = store.current()?;
    let address = peer.address;
    let connect = async {
        let tcp = TcpStream::connect(address)
            .await
            .map_err(io_error("connect to", address))?;
        tcp.set_nodelay(true)
            .and_then(|()| end_when_gone(&tcp))
            .map_err(io_error("set up", address))?;
        let buffered = BufReader::with_capacity(limits.buffer_bytes, tcp);
        TlsConnector::from(credentials.tls_client.clone())
            .connect(peer.server_name.clone(), buffered)
            .await
            .map_err(io_error("make a TLS connection to", address))
    };
    let stream = timeout(limits.connect, connect)
        .await
        .map_err(|_| TransportError::TimedOut(address))??;
    let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
    let life = Life::of_server(store, &credentials, chain, &peer.server_name);
    Ok((stream.into(), life))
}

/// Has TCP end a connection whose other machine is gone without a word, also while something is on its way. Not for
/// those of which the other side may leave bytes unread: they would end too.
pub(crate) fn end_when_silent(
    stream: &SecureTcp,
    address: SocketAddr,
) -> Result<(), TransportError> {
    use rustix::net::sockopt as option;
    let tcp = stream.get_ref().0.get_ref();
    let silence = u32::try_from(TLS_SILENCE.as_millis()).unwrap_or(u32::MAX);
    let set = || -> rustix::io::Result<()> {
        option::set_socket_keepalive(tcp, true)?;
        option::set_tcp_keepidle(tcp, TLS_PROBE)?;
        option::set_tcp_keepintvl(tcp, TLS_PROBE)?;
        option::set_tcp_user_timeout(tcp, silence)
    };
    set().map_err(|error| io_error("set up", address)(error.into()))
}

/// The connection of TCP below one in TLS, to be asked about; none if there are no more descriptors.
pub(crate) fn socket_of(stream: &SecureTcp) -> Option<OwnedFd> {
    let tcp = stream.get_ref().0.get_ref();
    tcp.as_fd().try_clone_to_owned().ok()
}

/// Takes a TLS connection from a host.
pub(crate) async fn accept_tls(
    tcp: TcpStream,
    from: SocketAddr,
    store: &Store,
    limits: &Limits,
) -> Result<(SecureTcp, Life, Vec<CertificateDer<'static>>), TransportError> {
    let credentials = store.current()?;
    tcp.set_nodelay(true)
        .and_then(|()| end_when_gone(&tcp))
        .map_err(io_error("set up", from))?;
    let buffered = BufReader::with_capacity(limits.buffer_bytes, tcp);
    let acceptor = TlsAcceptor::from(credentials.tls_server.clone());
    let stream = timeout(limits.connect, acceptor.accept(buffered))
        .await
        .map_err(|_| TransportError::TimedOut(from))?
        .map_err(io_error("take a TLS connection from", from))?;
    let chain = stream
        .get_ref()
        .1
        .peer_certificates()
        .unwrap_or_default()
        .to_vec();
    let life = Life::of_client(store, &credentials, &chain);
    Ok((stream.into(), life, chain))
}

/// Makes a QUIC connection to a peer.
pub(crate) async fn connect_quic(
    endpoint: &quinn::Endpoint,
    peer: &Peer,
    store: &Store,
    limits: &Limits,
) -> Result<(quinn::Connection, Life), TransportError> {
    let credentials = store.current()?;
    let address = peer.address;
    let mut config = quinn::ClientConfig::new(credentials.quic_client.clone());
    // Nothing here takes streams of a peer, and nobody else has a part of what is held.
    let transport = quic_transport(limits, 0, unread::parts(limits));
    config.transport_config(Arc::new(transport));
    let connecting = endpoint
        .connect_with(config, address, &peer.server_name.to_str())
        .map_err(quic_error("make a QUIC connection to", address))?;
    let connection = timeout(limits.connect.min(QUIC_CONNECT), connecting)
        .await
        .map_err(|_| TransportError::TimedOut(address))?
        .map_err(quic_error("make a QUIC connection to", address))?;
    let chain = quic_chain(&connection);
    let life = Life::of_server(store, &credentials, &chain, &peer.server_name);
    Ok((connection, life))
}

/// The certificates of the other side.
pub(crate) fn quic_chain(connection: &quinn::Connection) -> Vec<CertificateDer<'static>> {
    connection
        .peer_identity()
        .and_then(|identity| identity.downcast::<Vec<CertificateDer<'static>>>().ok())
        .map_or_else(Vec::new, |chain| *chain)
}

/// How QUIC behaves on both sides. The other one may have so many streams at once, of which so many have a part of what is held
/// for who doesn't read.
pub(crate) fn quic_transport(limits: &Limits, streams: usize, parts: usize) -> TransportConfig {
    let mut transport = TransportConfig::default();
    let streams = u32::try_from(streams.min(QUIC_STREAMS_MAX)).unwrap_or(u32::MAX);
    let window = unread::stream_window(limits);
    transport
        .max_idle_timeout(QUIC_IDLE.try_into().ok())
        .keep_alive_interval(Some(QUIC_KEEP_ALIVE))
        .max_concurrent_bidi_streams(VarInt::from_u32(streams))
        .max_concurrent_uni_streams(VarInt::from_u32(0))
        .stream_receive_window(window)
        // All senders share one connection: who doesn't read may hold up nobody but itself.
        .receive_window(unread::connection_window(limits, parts))
        .send_window(window.into_inner() * unread::MOVING as u64)
        .datagram_receive_buffer_size(Some(limits.datagram_queue_bytes))
        .datagram_send_buffer_size(limits.datagram_queue_bytes)
        .congestion_controller_factory(Arc::new(congestion::CubicConfig::default()));
    transport
}

/// A socket for QUIC that has room for bursts then.
pub(crate) fn with_room(socket: std::net::UdpSocket) -> std::net::UdpSocket {
    const BUFFER: usize = 4 << 20;
    use rustix::net::sockopt as option;
    // Without the right to more, what is allowed has to do.
    if option::set_socket_recv_buffer_size_force(&socket, BUFFER).is_err() {
        let _ = option::set_socket_recv_buffer_size(&socket, BUFFER);
    }
    if option::set_socket_send_buffer_size_force(&socket, BUFFER).is_err() {
        let _ = option::set_socket_send_buffer_size(&socket, BUFFER);
    }
    socket
}

/// Reads how a stream begins, which has to be soon.
pub(crate) async fn read_opening(
    reader: &mut (impl AsyncRead + Unpin),
    from: SocketAddr,
    limits: &Limits,
) -> Result<Opening, TransportError> {
    timeout(limits.connect, read_beginning(reader, from))
        .await
        .map_err(|_| TransportError::TimedOut(from))?
}

async fn read_beginning(
    reader: &mut (impl AsyncRead + Unpin),
    from: SocketAddr,
) -> Result<Opening, TransportError> {
    let failed = || io_error("read from", from);
    let length = usize::from(reader.read_u16().await.map_err(failed())?);
    if length > OPENING_BYTES_MAX {
        return Err(io_error("read from", from)(
            io::ErrorKind::InvalidData.into(),
        ));
    }
    let mut bytes = vec![0; length];
    reader.read_exact(&mut bytes).await.map_err(failed())?;
    Ok(Opening::decode(&bytes)?)
}

//! A peer as the host's side sees it: a channel for datagrams that is made again when it is gone, and streams.

use std::{
    collections::hash_map::DefaultHasher,
    hash::Hasher,
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    sync::watch,
    time::{sleep, timeout},
};

use super::{
    TransportError,
    channel::{self, Incoming, Outgoing},
    connect_quic, connect_tls, end_when_silent, io_error, quic_error, socket_of,
};
use crate::{
    config::{Limits, Peer, Transport},
    credentials::{Life, Store},
    metrics::Metrics,
    pump::{Secure, SecureReader, SecureWriter},
    wire::{Answer, Opening},
};

const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// How often QUIC is tried again while TLS does its work.
const QUIC_RETRY: Duration = Duration::from_secs(60);

/// A peer.
pub(crate) struct Link {
    pub(crate) peer: Peer,
    endpoint: quinn::Endpoint,
    store: Store,
    limits: Limits,
    metrics: Arc<Metrics>,
    /// The channel, or why there is none.
    current: watch::Sender<Result<Outgoing, Arc<str>>>,
}

/// A channel that has just been made.
type Made = (Outgoing, Incoming, Life);

impl Link {
    pub(crate) fn new(
        peer: Peer,
        endpoint: quinn::Endpoint,
        store: Store,
        limits: Limits,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            peer,
            endpoint,
            store,
            limits,
            metrics,
            current: watch::Sender::new(Err("it is being made".into())),
        }
    }

    /// Where datagrams go now, if the peer is there.
    pub(crate) fn outgoing(&self) -> Option<Outgoing> {
        self.current.borrow().as_ref().ok().cloned()
    }

    fn is_now(&self, channel: Result<Outgoing, Arc<str>>) {
        drop(self.current.send_replace(channel));
    }

    /// Keeps a channel for datagrams, for ever. `receive` is called with each new one and returns when it is gone.
    pub(crate) async fn keep<F: Future<Output = String>>(
        &self,
        seed: u64,
        receive: impl Fn(Incoming) -> F,
    ) {
        let mut random = Random::new(seed, &self.peer.name);
        let mut pause = PAUSE_MIN;
        let mut made = None;
        loop {
            let attempt = match made.take() {
                Some(made) => Ok(made),
                None => self.make().await,
            };
            match attempt {
                Ok((outgoing, incoming, life)) => {
                    let since = Instant::now();
                    self.metrics.sessions.add(1);
                    let kind = outgoing.kind();
                    tracing::info!(peer = %self.peer.name, kind, "the peer is there");
                    let is_fallback = kind == "TLS" && self.peer.transport == Transport::Auto;
                    self.is_now(Ok(outgoing.clone()));
                    let reason = tokio::select! {
                        reason = receive(incoming) => reason,
                        reason = life.end() => reason,
                        better = self.wait_for_quic(), if is_fallback => {
                            made = Some(better);
                            "QUIC gets through now".to_owned()
                        }
                    };
                    self.is_now(Err(reason.as_str().into()));
                    outgoing.close();
                    // A peer that refuses us says so only after it was connected.
                    if since.elapsed() > PAUSE_MAX {
                        pause = PAUSE_MIN;
                    }
                    tracing::warn!(peer = %self.peer.name, %reason, "the channel to the peer has ended");
                }
                Err(error) => {
                    self.metrics.sessions_failed.add(1);
                    tracing::warn!(peer = %self.peer.name, %error, "the peer can't be reached");
                    self.is_now(Err(error.to_string().into()));
                }
            }
            if made.is_none() {
                sleep(pause.mul_f64(random.between_half_and_one())).await;
                pause = (pause * 2).min(PAUSE_MAX);
            }
        }
    }

    async fn make(&self) -> Result<Made, TransportError> {
        if self.peer.transport != Transport::Tls {
            match self.make_quic().await {
                Err(error) if self.peer.transport == Transport::Auto => {
                    tracing::info!(peer = %self.peer.name, %error, "no QUIC; TLS is tried");
                }
                other => return other,
            }
        }
        let (mut stream, life) = connect_tls(&self.peer, &self.store, &self.limits).await?;
        let address = self.peer.address;
        stream
            .write_all(&Opening::Datagrams.encode())
            .await
            .map_err(io_error("write to", address))?;
        stream
            .flush()
            .await
            .map_err(io_error("write to", address))?;
        // Only now is it known that the peer takes our certificate.
        let answer = timeout(self.limits.connect, stream.read_u8())
            .await
            .map_err(|_| TransportError::TimedOut(address))?
            .map_err(io_error("read from", address))?;
        Answer::decode(answer)?;
        end_when_silent(&stream, address)?;
        let (outgoing, incoming) = channel::over_tls(stream, self.limits.datagram_queue_bytes);
        Ok((outgoing, incoming, life))
    }

    async fn make_quic(&self) -> Result<Made, TransportError> {
        let (connection, life) =
            connect_quic(&self.endpoint, &self.peer, &self.store, &self.limits).await?;
        let incoming = Incoming::Quic(connection.clone());
        Ok((Outgoing::Quic(connection), incoming, life))
    }

    async fn wait_for_quic(&self) -> Made {
        loop {
            sleep(QUIC_RETRY).await;
            if let Ok(made) = self.make_quic().await {
                return made;
            }
        }
    }

    /// Opens a stream for a TCP connection, up to the peer's answer.
    pub(crate) async fn open(&self, opening: &Opening) -> Result<(Secure, Answer), TransportError> {
        let address = self.peer.address;
        let secure = if self.peer.transport == Transport::Quic {
            self.open_quic().await?
        } else {
            let made = connect_tls(&self.peer, &self.store, &self.limits).await;
            let (stream, life) = made.inspect_err(|_| self.metrics.sessions_failed.add(1))?;
            self.metrics.sessions.add(1);
            let tcp = socket_of(&stream);
            let (reader, writer) = tokio::io::split(stream);
            Secure {
                reader: SecureReader::Tls(reader),
                writer: SecureWriter::Tls(writer),
                life: Some(life),
                tcp,
                quic: None,
            }
        };
        // The peer itself may wait for the destination.
        let asked = timeout(self.limits.connect * 2, Begun(Some(secure)).ask(opening));
        let (secure, answer) = asked
            .await
            .map_err(|_| TransportError::TimedOut(address))?
            .map_err(io_error("open a stream to", address))?;
        Ok((secure, Answer::decode(answer)?))
    }

    /// Why a peer didn't answer in time.
    fn absence(&self) -> TransportError {
        let address = self.peer.address;
        match &*self.current.borrow() {
            Ok(_) => TransportError::TimedOut(address),
            Err(reason) => TransportError::Away {
                address,
                reason: Arc::clone(reason),
            },
        }
    }

    async fn open_quic(&self) -> Result<Secure, TransportError> {
        let address = self.peer.address;
        let failed = || quic_error("open a stream to", address);
        let mut changes = self.current.subscribe();
        let open = async {
            let is_there = changes.wait_for(Result::is_ok).await;
            let found = is_there
                .map_err(|error| failed()(error.to_string()))?
                .clone();
            let Ok(Outgoing::Quic(connection)) = found else {
                return Err(TransportError::TimedOut(address));
            };
            // It waits for the peer to grant one.
            let stream = connection.open_bi().await;
            let stream = stream.map_err(|error| failed()(error.to_string()))?;
            Ok((connection, stream))
        };
        let opened = timeout(self.limits.connect, open).await;
        let (connection, (writer, reader)) = opened.map_err(|_| self.absence())??;
        // Without any, the channel is about to end.
        self.store.current()?;
        Ok(Secure {
            reader: SecureReader::Quic(reader),
            writer: SecureWriter::Quic(writer),
            life: None,
            tcp: None,
            quic: Some(connection),
        })
    }
}

/// What was begun. Until it is answered, who gives it up resets it: a stream of QUIC would end properly by itself.
struct Begun(Option<Secure>);

impl Begun {
    async fn ask(mut self, opening: &Opening) -> io::Result<(Secure, u8)> {
        let secure = self.0.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        secure.writer.write_all(&opening.encode()).await?;
        secure.writer.flush().await?;
        let answer = secure.reader.read_u8().await?;
        let secure = self.0.take().ok_or(io::ErrorKind::NotConnected)?;
        Ok((secure, answer))
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        if let Some(secure) = self.0.take() {
            secure.cut();
        }
    }
}

impl Outgoing {
    fn kind(&self) -> &'static str {
        match self {
            Self::Quic(_) => "QUIC",
            Self::Tls(_) => "TLS",
        }
    }

    fn close(&self) {
        if let Self::Quic(connection) = self {
            connection.close(quinn::VarInt::from_u32(0), b"");
        }
    }
}

/// Numbers for pauses, the same for the same seed and name.
struct Random(u64);

impl Random {
    fn new(seed: u64, name: &str) -> Self {
        let mut hasher = DefaultHasher::new();
        hasher.write(name.as_bytes());
        Self(seed ^ hasher.finish())
    }

    /// SplitMix64's next number, as a factor.
    fn between_half_and_one(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let upper = u32::try_from((mixed ^ (mixed >> 31)) >> 32).unwrap_or(u32::MAX);
        0.5 + f64::from(upper) / f64::from(u32::MAX) / 2.0
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, future::pending, path::Path};

    use tokio::{sync::Notify, task::JoinSet};

    use super::*;
    use crate::{
        config::{Config, TlsFiles},
        keys::Authority,
    };

    const NAME: &str = "relay.example";
    const LONG: Duration = Duration::from_millis(500);
    const PATIENCE: Duration = Duration::from_secs(60);

    fn store(folder: &Path) -> Store {
        let authority = Authority::new("tests").unwrap();
        let made = authority.certify(NAME, PATIENCE * 60).unwrap();
        let path = |name: &str| folder.join(name);
        fs::write(path("authorities"), authority.certificate()).unwrap();
        fs::write(path("pem"), made.certificate).unwrap();
        fs::write(path("key"), made.key).unwrap();
        let files = TlsFiles {
            certificate: path("pem"),
            key: path("key"),
            authorities: path("authorities"),
        };
        let names = [NAME.try_into().unwrap()];
        Store::open(&files, watch::Sender::new(names.into()).subscribe()).unwrap()
    }

    fn limits() -> Limits {
        let text = "[tls]\ncertificate = \"a\"\nkey = \"b\"\nauthorities = \"c\"\n[limits]\nconnect_seconds = 2\n\
             [deliver]\nlisten = [\"127.0.0.1:1\"]\nclients = [\"relay.example\"]\nallow = [\"0.0.0.0/0\"]\n";
        Config::parse(Path::new("relay.toml"), text).unwrap().limits
    }

    /// A peer that grants no stream, and whether it has got one itself.
    fn miser(store: &Store) -> (quinn::Endpoint, watch::Receiver<bool>) {
        let mut config =
            quinn::ServerConfig::with_crypto(store.current().unwrap().quic_server.clone());
        let transport = crate::transport::quic_transport(&limits(), 0, 0);
        config.transport_config(Arc::new(transport));
        let endpoint = quinn::Endpoint::server(config, "127.0.0.1:0".parse().unwrap()).unwrap();
        let (has_opened, opened) = watch::channel(false);
        let taking = endpoint.clone();
        tokio::spawn(async move {
            let connection = taking.accept().await.unwrap().await.unwrap();
            let stream = timeout(LONG, connection.open_bi()).await;
            has_opened.send_replace(stream.is_ok());
            pending::<()>().await;
        });
        (endpoint, opened)
    }

    #[tokio::test]
    async fn a_peer_that_grants_no_stream_holds_nobody_up_and_gets_none() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path());
        let (miser, mut has_opened) = miser(&store);
        let peer = Peer {
            name: "miser".to_owned(),
            address: miser.local_addr().unwrap(),
            server_name: NAME.try_into().unwrap(),
            transport: Transport::Quic,
        };
        let endpoint = quinn::Endpoint::client("127.0.0.1:0".parse().unwrap()).unwrap();
        let link = Arc::new(Link::new(peer, endpoint, store, limits(), Arc::default()));
        let (mut tasks, keeping) = (JoinSet::new(), link.clone());
        tasks.spawn(async move { keeping.keep(1, |_| pending()).await });
        has_opened.changed().await.unwrap();
        assert!(!*has_opened.borrow(), "the peer has a stream");
        let opened = timeout(PATIENCE, link.open(&opening())).await;
        let refused = opened.expect("it waits for ever").err();
        assert!(matches!(refused, Some(TransportError::TimedOut(_))));
    }

    /// A peer that answers nobody. How the first stream that it is asked for ends.
    fn mute(store: &Store) -> (quinn::Endpoint, JoinSet<String>, Arc<Notify>) {
        let mut config =
            quinn::ServerConfig::with_crypto(store.current().unwrap().quic_server.clone());
        let transport = crate::transport::quic_transport(&limits(), 8, 0);
        config.transport_config(Arc::new(transport));
        let endpoint = quinn::Endpoint::server(config, "127.0.0.1:0".parse().unwrap()).unwrap();
        let (taking, mut ends, asked) =
            (endpoint.clone(), JoinSet::new(), Arc::<Notify>::default());
        let has_asked = asked.clone();
        ends.spawn(async move {
            let connection = taking.accept().await.unwrap().await.unwrap();
            let (_writer, mut reader) = connection.accept_bi().await.unwrap();
            reader.read_u16().await.unwrap();
            has_asked.notify_one();
            match reader.read_to_end(1 << 20).await {
                Ok(_) => "a proper end".to_owned(),
                Err(error) => error.to_string(),
            }
        });
        (endpoint, ends, asked)
    }

    #[tokio::test]
    async fn who_gives_up_before_it_is_answered_resets_its_stream() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path());
        let (mute, mut ends, asked) = mute(&store);
        let peer = Peer {
            name: "mute".to_owned(),
            address: mute.local_addr().unwrap(),
            server_name: NAME.try_into().unwrap(),
            transport: Transport::Quic,
        };
        let endpoint = quinn::Endpoint::client("127.0.0.1:0".parse().unwrap()).unwrap();
        let mut patient = limits();
        patient.connect = PATIENCE;
        let link = Arc::new(Link::new(peer, endpoint, store, patient, Arc::default()));
        let (mut tasks, keeping) = (JoinSet::new(), link.clone());
        tasks.spawn(async move { keeping.keep(1, |_| pending()).await });
        let opening = opening();
        tokio::select! {
            _ = link.open(&opening) => panic!("it was answered"),
            () = asked.notified() => {}
        }
        let end = timeout(PATIENCE, ends.join_next()).await;
        let end = end.expect("it is open").unwrap().unwrap();
        assert!(end.contains("reset"), "{end}");
    }

    fn opening() -> Opening {
        Opening::Tcp {
            sender: "web".to_owned(),
            source: "10.0.0.1:1000".parse().unwrap(),
            destination: "198.51.100.7:80".parse().unwrap(),
        }
    }

    #[test]
    fn pauses_differ_and_are_the_same_for_a_seed() {
        let draw = |seed, name| {
            let mut random = Random::new(seed, name);
            [(); 8].map(|()| random.between_half_and_one())
        };
        let first = draw(1, "paris");
        assert!(first.iter().all(|factor| (0.5..=1.0).contains(factor)));
        assert!(first.windows(2).all(|pair| pair[0] != pair[1]));
        assert_eq!(first, draw(1, "paris"));
        assert_ne!(first, draw(2, "paris"));
        assert_ne!(first, draw(1, "rome"));
    }
}

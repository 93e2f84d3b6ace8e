//! Certificates: read from files, read again when these change, and looked at for as long as they are used.
//!
//! Files are looked at each second, and at once upon SIGHUP. Until new ones are whole, the ones before stay in use,
//! for ten seconds at most: a certificate and its key are two files. After that, and when our own certificate has
//! expired, there are none: no connection is made or taken, and those that there are end. A connection ends, within
//! two seconds, when a certificate of either side expires, or when the other side's isn't signed by our authorities
//! any more.

use std::{
    collections::HashSet,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustix::io::Errno;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, RootCertStore,
    ServerConfig, SignatureScheme,
    client::{
        Resumption, WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerifier},
        verify_server_name,
    },
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject},
    server::{
        ParsedCertificate, WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};
use tokio::{sync::watch, time::sleep};

use crate::{config::TlsFiles, wire::PROTOCOL};

/// How often files and the clock are looked at.
const LOOK: Duration = Duration::from_secs(1);
/// How long what was read before stays in use while the files don't go together.
const GRACE: Duration = Duration::from_secs(10);

/// Why there are no credentials.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CredentialsError {
    /// A file can't be read.
    #[error("cannot read the {kind} {path}: {source}")]
    Read {
        /// What should be in it.
        kind: &'static str,
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: Errno,
    },
    /// A file holds nothing of that kind.
    #[error("cannot read the {kind} {path}: {reason}")]
    File {
        /// What should be in it.
        kind: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// Certificate and key don't go together, or aren't of a kind that TLS 1.3 knows.
    #[error("cannot use the certificate {path} with its key: {reason}")]
    Unusable {
        /// The certificate's file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The time is over.
    #[error("the certificate {path} has expired; put a new one into its place")]
    Expired {
        /// The certificate's file.
        path: PathBuf,
    },
}

/// What was read from the files, as it is used.
pub struct Credentials {
    /// Each that was read has another number.
    number: u64,
    not_after: SystemTime,
    client_verifier: Arc<dyn ClientCertVerifier>,
    server_verifier: Arc<WebPkiServerVerifier>,
    /// Whose certificates they have been found good for already: upon a renewal, all connections ask for the same few. What lies
    /// between these and an authority isn't kept: who has a good one could send any number of such.
    verified: Mutex<HashSet<(CertificateDer<'static>, Other)>>,
    /// For TLS connections that we make.
    pub(crate) tls_client: Arc<ClientConfig>,
    /// For TLS connections that we take.
    pub(crate) tls_server: Arc<ServerConfig>,
    /// The same for QUIC.
    pub(crate) quic_client: Arc<QuicClientConfig>,
    /// The same for QUIC.
    pub(crate) quic_server: Arc<QuicServerConfig>,
}

impl Credentials {
    /// Says whether a certificate is signed by these authorities, for who has it. How long, each connection looks at itself.
    fn verify(&self, chain: &[CertificateDer<'static>], other: &Other) -> Result<(), String> {
        let (leaf, rest) = chain.split_first().ok_or("it has no certificate")?;
        let found = (leaf.clone(), other.clone());
        let verified = || self.verified.lock().unwrap_or_else(PoisonError::into_inner);
        if verified().contains(&found) {
            return Ok(());
        }
        let now = UnixTime::now();
        let outcome = match other {
            Other::Client => self
                .client_verifier
                .verify_client_cert(leaf, rest, now)
                .map(drop),
            Other::Server(name) => self
                .server_verifier
                .verify_server_cert(leaf, rest, name, &[], now)
                .map(drop),
        };
        outcome.map_err(|error| format!("the other relay's certificate: {error}"))?;
        verified().insert(found);
        Ok(())
    }
}

/// Says whether certificates and key in these files can be used now, as a relay with these callers would use them.
///
/// # Errors
/// They can't.
pub fn check(files: &TlsFiles, clients: Clients) -> Result<(), CredentialsError> {
    let (_told, clients) = watch::channel(clients);
    let source = Source {
        files: files.clone(),
        clients,
    };
    source.load(0).map(drop)
}

/// Names of which a caller must have one.
pub type Clients = Arc<[ServerName<'static>]>;

type State = Result<Arc<Credentials>, CredentialsError>;

/// The credentials of now.
#[derive(Clone)]
pub struct Store {
    state: watch::Receiver<State>,
}

impl Store {
    /// Reads the files and goes on looking at them, in a task of its own, and at once when `clients` are told.
    ///
    /// # Errors
    /// What is in the files can't be used now.
    pub fn open(
        files: &TlsFiles,
        clients: watch::Receiver<Clients>,
    ) -> Result<Self, CredentialsError> {
        let source = Source {
            files: files.clone(),
            clients,
        };
        // Before they are read: what changes meanwhile is read again.
        let seen = source.stamps();
        let first = Arc::new(source.load(0)?);
        let (sender, state) = watch::channel(Ok(first.clone()));
        tokio::spawn(source.keep(first, seen, sender));
        Ok(Self { state })
    }

    /// The credentials, or why there are none.
    ///
    /// # Errors
    /// They have expired, or the files can't be used.
    pub fn current(&self) -> Result<Arc<Credentials>, CredentialsError> {
        self.state.borrow().clone()
    }

    /// Tells of changes.
    pub(crate) fn changes(&self) -> watch::Receiver<State> {
        self.state.clone()
    }
}

/// When each file was last changed.
type Stamps = Vec<Option<SystemTime>>;

struct Source {
    files: TlsFiles,
    clients: watch::Receiver<Clients>,
}

impl Source {
    async fn keep(
        mut self,
        mut current: Arc<Credentials>,
        mut seen: Stamps,
        sender: watch::Sender<State>,
    ) {
        let mut number = 0;
        let mut failing_since: Option<SystemTime> = None;
        loop {
            tokio::select! {
                () = sleep(LOOK) => {}
                changed = self.clients.changed() => if changed.is_ok() { seen.clear() },
                () = sender.closed() => return,
            }
            let now = SystemTime::now();
            let stamps = self.stamps();
            // Those that had expired hold again once a clock that was wrong is right.
            let is_without = sender.borrow().is_err();
            let is_changed = stamps != seen;
            if is_changed || failing_since.is_some() || is_without {
                seen = stamps;
                number += 1;
                match self.load(number) {
                    Ok(loaded) => {
                        tracing::info!(certificate = %self.files.certificate.display(), "certificates are read");
                        failing_since = None;
                        current = Arc::new(loaded);
                        sender.send_modify(|state| *state = Ok(current.clone()));
                    }
                    Err(error) if is_without => {
                        if is_changed {
                            tracing::error!(%error, "new certificates can't be used either");
                            sender.send_modify(|state| *state = Err(error));
                        }
                    }
                    Err(error) => {
                        let since = *failing_since.get_or_insert(now);
                        if since == now {
                            tracing::error!(%error, "new certificates can't be used; those before stay for ten seconds");
                        }
                        let is_over = now.duration_since(since).unwrap_or(GRACE) >= GRACE;
                        if is_over && sender.borrow().is_ok() {
                            tracing::error!(%error, "without certificates: all connections end");
                            sender.send_modify(|state| *state = Err(error));
                        }
                    }
                }
            }
            if now >= current.not_after && sender.borrow().is_ok() {
                let error = self.expired();
                tracing::error!(%error, "without certificates: all connections end");
                sender.send_modify(|state| *state = Err(error));
            }
        }
    }

    fn stamps(&self) -> Stamps {
        let files = [
            &self.files.certificate,
            &self.files.key,
            &self.files.authorities,
        ];
        let stamp = |path: &PathBuf| fs::metadata(path).and_then(|found| found.modified()).ok();
        files.into_iter().map(stamp).collect()
    }

    fn expired(&self) -> CredentialsError {
        CredentialsError::Expired {
            path: self.files.certificate.clone(),
        }
    }

    fn load(&self, number: u64) -> Result<Credentials, CredentialsError> {
        let chain = certificates("certificate", &self.files.certificate)?;
        let authorities = certificates("authorities", &self.files.authorities)?;
        let key = private_key(&self.files.key)?;
        let unusable = |reason: String| CredentialsError::Unusable {
            path: self.files.certificate.clone(),
            reason,
        };
        let not_after = end_of(&chain).ok_or_else(|| unusable("it can't be parsed".to_owned()))?;
        if not_after <= SystemTime::now() {
            return Err(self.expired());
        }
        let mut roots = RootCertStore::empty();
        for authority in authorities {
            roots
                .add(authority)
                .map_err(|error| CredentialsError::File {
                    kind: "authorities",
                    path: self.files.authorities.clone(),
                    reason: error.to_string(),
                })?;
        }
        self.configure(number, not_after, chain, key, Arc::new(roots))
            .map_err(unusable)
    }

    fn configure(
        &self,
        number: u64,
        not_after: SystemTime,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
        roots: Arc<RootCertStore>,
    ) -> Result<Credentials, String> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let text = |error: rustls::Error| error.to_string();
        let server_verifier =
            WebPkiServerVerifier::builder_with_provider(roots.clone(), provider.clone())
                .build()
                .map_err(|error| error.to_string())?;
        let by_chain = WebPkiClientVerifier::builder_with_provider(roots, provider.clone())
            .build()
            .map_err(|error| error.to_string())?;
        let client_verifier: Arc<dyn ClientCertVerifier> = Arc::new(NamedClients {
            by_chain,
            names: self.clients.borrow().clone(),
        });
        let mut client = client_builder(&provider)
            .map_err(text)?
            .dangerous()
            .with_custom_certificate_verifier(server_verifier.clone())
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(text)?;
        client.alpn_protocols = vec![PROTOCOL.to_vec()];
        // A connection that is resumed would not be judged by the certificates of today.
        client.resumption = Resumption::disabled();
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(text)?
            .with_client_cert_verifier(client_verifier.clone())
            .with_single_cert(chain, key)
            .map_err(text)?;
        server.alpn_protocols = vec![PROTOCOL.to_vec()];
        server.send_tls13_tickets = 0;
        let (client, server) = (Arc::new(client), Arc::new(server));
        let quic = |error: quinn::crypto::rustls::NoInitialCipherSuite| error.to_string();
        Ok(Credentials {
            number,
            not_after,
            client_verifier,
            server_verifier,
            verified: Mutex::default(),
            quic_client: Arc::new(QuicClientConfig::try_from(client.clone()).map_err(quic)?),
            quic_server: Arc::new(QuicServerConfig::try_from(server.clone()).map_err(quic)?),
            tls_client: client,
            tls_server: server,
        })
    }
}

type ClientBuilder = rustls::ConfigBuilder<ClientConfig, rustls::WantsVerifier>;

fn client_builder(provider: &Arc<CryptoProvider>) -> Result<ClientBuilder, rustls::Error> {
    ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])
}

fn read(kind: &'static str, path: &Path) -> Result<Vec<u8>, CredentialsError> {
    fs::read(path).map_err(|error| CredentialsError::Read {
        kind,
        path: path.to_owned(),
        // It has a number but where there is no memory.
        source: Errno::from_io_error(&error).unwrap_or(Errno::NOMEM),
    })
}

fn certificates(
    kind: &'static str,
    path: &Path,
) -> Result<Vec<CertificateDer<'static>>, CredentialsError> {
    let failed = |reason: String| CredentialsError::File {
        kind,
        path: path.to_owned(),
        reason,
    };
    let bytes = read(kind, path)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let found = found.map_err(|error| failed(error.to_string()))?;
    if found.is_empty() {
        return Err(failed("there is no certificate in it".to_owned()));
    }
    Ok(found)
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, CredentialsError> {
    let bytes = read("private key", path)?;
    PrivateKeyDer::from_pem_slice(&bytes).map_err(|error| CredentialsError::File {
        kind: "private key",
        path: path.to_owned(),
        reason: error.to_string(),
    })
}

/// When the first certificate of a chain expires.
fn end_of(chain: &[CertificateDer<'_>]) -> Option<SystemTime> {
    chain
        .iter()
        .map(|certificate| {
            let (_, parsed) = x509_parser::parse_x509_certificate(certificate).ok()?;
            let seconds = u64::try_from(parsed.validity().not_after.timestamp()).ok()?;
            SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
        })
        .min()?
}

/// The name by which a certificate's owner is reported: the first of these that it has. It may have others, in common
/// with somebody else.
pub(crate) fn name_of(chain: &[CertificateDer<'_>], names: &[ServerName<'static>]) -> String {
    let parsed = chain
        .first()
        .and_then(|certificate| ParsedCertificate::try_from(certificate).ok());
    let name = parsed.and_then(|parsed| names.iter().find(|name| has_name(&parsed, name)));
    name.map_or_else(|| "unnamed".to_owned(), |name| name.to_str().into_owned())
}

fn has_name(certificate: &ParsedCertificate<'_>, name: &ServerName<'_>) -> bool {
    verify_server_name(certificate, name).is_ok()
}

/// Callers with a certificate of our authorities and one of these names.
#[derive(Debug)]
struct NamedClients {
    by_chain: Arc<dyn ClientCertVerifier>,
    names: Clients,
}

impl ClientCertVerifier for NamedClients {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.by_chain.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self
            .by_chain
            .verify_client_cert(end_entity, intermediates, now)?;
        let parsed = ParsedCertificate::try_from(end_entity)?;
        if self.names.iter().any(|name| has_name(&parsed, name)) {
            return Ok(verified);
        }
        Err(CertificateError::NotValidForName.into())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.by_chain
            .verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.by_chain
            .verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.by_chain.supported_verify_schemes()
    }
}

/// Who is at the other end.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Other {
    Client,
    Server(ServerName<'static>),
}

/// How long a connection may be used.
#[derive(Clone)]
pub(crate) struct Life {
    store: Store,
    /// The other end's certificate, and those between it and an authority.
    chain: Arc<[CertificateDer<'static>]>,
    other: Other,
    number: u64,
    not_after: SystemTime,
}

impl Life {
    /// Of a connection to a server of that name.
    pub(crate) fn of_server(
        store: &Store,
        credentials: &Credentials,
        chain: &[CertificateDer<'static>],
        name: &ServerName<'static>,
    ) -> Self {
        Self::new(store, credentials, chain, Other::Server(name.clone()))
    }

    /// Of a connection from a client.
    pub(crate) fn of_client(
        store: &Store,
        credentials: &Credentials,
        chain: &[CertificateDer<'static>],
    ) -> Self {
        Self::new(store, credentials, chain, Other::Client)
    }

    fn new(
        store: &Store,
        credentials: &Credentials,
        chain: &[CertificateDer<'static>],
        other: Other,
    ) -> Self {
        Self {
            store: store.clone(),
            not_after: end_of(chain).unwrap_or(SystemTime::UNIX_EPOCH),
            chain: chain.into(),
            other,
            number: credentials.number,
        }
    }

    /// Waits until the connection has to end, and says why.
    pub(crate) async fn end(mut self) -> String {
        let mut changes = self.store.changes();
        loop {
            if let Err(reason) = self.judge(&changes.borrow_and_update().clone()) {
                return reason;
            }
            tokio::select! {
                () = sleep(LOOK) => {}
                changed = changes.changed() => if changed.is_err() {
                    return "the relay ends".to_owned();
                },
            }
        }
    }

    fn judge(&mut self, state: &State) -> Result<(), String> {
        let credentials = state.as_ref().map_err(ToString::to_string)?;
        if SystemTime::now() >= self.not_after {
            return Err("the other relay's certificate has expired".to_owned());
        }
        if credentials.number == self.number {
            return Ok(());
        }
        credentials.verify(&self.chain, &self.other)?;
        self.number = credentials.number;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::Authority;

    /// Writes an authority's certificate, and what it certifies.
    fn made_files(folder: &Path) -> TlsFiles {
        let authority = Authority::new("tests").unwrap();
        let made = authority
            .certify("host.example", Duration::from_secs(3600))
            .unwrap();
        let [certificate, key, authorities] =
            ["pem", "key", "authorities"].map(|name| folder.join(name));
        fs::write(&certificate, made.certificate).unwrap();
        fs::write(&key, made.key).unwrap();
        fs::write(&authorities, authority.certificate()).unwrap();
        TlsFiles {
            certificate,
            key,
            authorities,
        }
    }

    #[tokio::test]
    async fn files_that_change_while_they_are_first_read_are_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let files = made_files(folder.path());
        let clients = watch::Sender::new(Clients::default());
        let store = Store::open(&files, clients.subscribe()).unwrap();
        // The kernel's clock for files is coarse; nothing else runs until we wait.
        std::thread::sleep(Duration::from_millis(50));
        made_files(folder.path());
        sleep(3 * LOOK).await;
        assert_ne!(store.current().unwrap().number, 0);
    }

    #[test]
    fn a_certificate_is_verified_once_by_each_set_of_credentials_and_only_what_holds_is_remembered()
    {
        let folder = tempfile::tempdir().unwrap();
        let files = made_files(folder.path());
        let chain = certificates("certificate", &files.certificate).unwrap();
        let clients = |name: &'static str| {
            let names: Clients = Arc::new([ServerName::try_from(name).unwrap()]);
            watch::Sender::new(names).subscribe()
        };
        let source = |name| Source {
            files: files.clone(),
            clients: clients(name),
        };
        let good = source("host.example").load(1).unwrap();
        let name = ServerName::try_from("host.example").unwrap();
        let others = [Other::Client, Other::Server(name)];
        for _ in 0..2 {
            for other in &others {
                good.verify(&chain, other).unwrap();
            }
            assert_eq!(good.verified.lock().unwrap().len(), 2);
        }
        let longer = [&chain[..], &chain[..]].concat();
        good.verify(&longer, &Other::Client).unwrap();
        assert_eq!(good.verified.lock().unwrap().len(), 2);
        let of_another_name = source("other.example").load(2).unwrap();
        made_files(folder.path());
        let of_another_authority = source("host.example").load(3).unwrap();
        for other in &others {
            of_another_authority.verify(&chain, other).unwrap_err();
        }
        of_another_name.verify(&chain, &others[0]).unwrap_err();
        for credentials in [of_another_name, of_another_authority] {
            assert!(credentials.verified.lock().unwrap().is_empty());
        }
    }

    /// Nothing tells of a clock that was put right but the clock.
    #[tokio::test]
    async fn certificates_that_had_expired_are_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let files = made_files(folder.path());
        let clients = watch::Sender::new(Clients::default());
        let source = Source {
            files,
            clients: clients.subscribe(),
        };
        let mut loaded = source.load(0).unwrap();
        loaded.not_after = SystemTime::UNIX_EPOCH;
        let (loaded, seen) = (Arc::new(loaded), source.stamps());
        let (sender, mut state) = watch::channel(Ok(loaded.clone()));
        tokio::spawn(source.keep(loaded, seen, sender));
        state.wait_for(Result::is_err).await.unwrap();
        state.wait_for(Result::is_ok).await.unwrap();
    }

    #[test]
    fn a_host_is_called_by_the_name_that_it_is_known_by() {
        let names = ["fleet.example", "host-a.example", "192.0.2.7"].map(str::to_owned);
        let key = rcgen::KeyPair::generate().unwrap();
        let parameters = rcgen::CertificateParams::new(names).unwrap();
        let chain = [parameters.self_signed(&key).unwrap().der().clone()];
        let [host, other, address] = ["host-a.example", "host-b.example", "192.0.2.7"]
            .map(|name| ServerName::try_from(name).unwrap());
        assert_eq!(name_of(&chain, &[other.clone(), host]), "host-a.example");
        assert_eq!(name_of(&chain, &[other.clone(), address]), "192.0.2.7");
        assert_eq!(name_of(&chain, &[other]), "unnamed");
        assert_eq!(name_of(&[], &[]), "unnamed");
    }
}

//! Hosts that the peer doesn't know, by TLS and by QUIC: nothing of theirs is delivered, and it is told.

use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
    sync::Arc,
    thread,
    time::Duration,
};

use quinn::crypto::rustls::QuicClientConfig;
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    version::TLS13,
};
use sandwire_relay::{
    keys::{Authority, Certified},
    wire::{Opening, PROTOCOL},
};
use sandwire_testlab::{command, lab};
use tokio::runtime::Runtime;

use super::{DEADLINE, PATIENCE, counted};
use crate::stage::{DESTINATIONS, MARKER, Stage, wait_for};

const PEER: &str = "203.0.113.9:4433";
pub(super) const LIFE: Duration = Duration::from_secs(3600);
const REQUEST: &[u8] = b"GET /page HTTP/1.0\r\n\r\n";

/// Who has which certificate, and what is said of who is refused.
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) certified: Option<Certified>,
    pub(super) refused: Option<&'static str>,
}

/// Certificates of either side; the right one is the last. `misnamed` is how that side is told of another name.
pub(super) fn cases(authority: &Authority, right_name: &str, misnamed: &'static str) -> Vec<Case> {
    let [other, namesake] = ["others", "tests"].map(|name| Authority::new(name).unwrap());
    let all = [
        (
            "misnamed",
            authority,
            "stranger.example",
            LIFE,
            Some(misnamed),
        ),
        (
            "another authority's",
            &other,
            right_name,
            LIFE,
            Some("UnknownIssuer"),
        ),
        (
            "a namesake authority's",
            &namesake,
            right_name,
            LIFE,
            Some("BadSignature"),
        ),
        (
            "expired",
            authority,
            right_name,
            Duration::ZERO,
            Some("certificate expired"),
        ),
        ("right", authority, right_name, LIFE, None),
    ];
    let cases = all.map(|(name, authority, subject, life, refused)| Case {
        name,
        certified: Some(authority.certify(subject, life).unwrap()),
        refused,
    });
    // A certificate's times are whole seconds, and it is valid in its last one.
    thread::sleep(Duration::from_secs(1));
    cases.into()
}

pub(super) fn chain_of(
    certified: &Certified,
) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    let certificate = CertificateDer::from_pem_slice(certified.certificate.as_bytes()).unwrap();
    let key = PrivateKeyDer::from_pem_slice(certified.key.as_bytes()).unwrap();
    (vec![certificate], key)
}

pub(super) fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

fn runtime() -> Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().unwrap()
}

/// How a connection of TCP to a destination begins, and what is asked there.
fn question() -> Vec<u8> {
    let opening = Opening::Tcp {
        sender: "lab".to_owned(),
        source: "10.64.0.2:1000".parse().unwrap(),
        destination: SocketAddr::new(DESTINATIONS[0].parse().unwrap(), 8080),
    };
    [&opening.encode(), REQUEST].concat()
}

fn client(stage: &Stage, certified: Option<&Certified>) -> Arc<ClientConfig> {
    let authority = stage.authority().certificate();
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_slice(authority.as_bytes()).unwrap())
        .unwrap();
    let builder = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .unwrap()
        .with_root_certificates(roots);
    let mut config = match certified.map(chain_of) {
        Some((chain, key)) => builder.with_client_auth_cert(chain, key).unwrap(),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    Arc::new(config)
}

/// Asks by TLS; what comes back until it ends. Who is refused learns of it only when it reads.
fn ask_by_tls(config: Arc<ClientConfig>) -> Vec<u8> {
    let name = ServerName::try_from("peer.example").unwrap();
    let tcp = TcpStream::connect(PEER).unwrap();
    tcp.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut stream = StreamOwned::new(ClientConnection::new(config, name).unwrap(), tcp);
    let mut answer = Vec::new();
    if stream.write_all(&question()).is_ok() {
        let ended = stream.read_to_end(&mut answer);
        let in_time = ended.map_err(|error| error.kind());
        assert_ne!(in_time.err(), Some(ErrorKind::WouldBlock), "no end");
    }
    answer
}

/// The same by QUIC.
fn ask_by_quic(config: Arc<ClientConfig>) -> Vec<u8> {
    let ask = async {
        let endpoint = quinn::Endpoint::client("0.0.0.0:0".parse().unwrap()).unwrap();
        let config = QuicClientConfig::try_from(config).unwrap();
        let config = quinn::ClientConfig::new(Arc::new(config));
        let address = PEER.parse().unwrap();
        let connecting = endpoint
            .connect_with(config, address, "peer.example")
            .unwrap();
        let connection = connecting.await.ok()?;
        let (mut writer, mut reader) = connection.open_bi().await.ok()?;
        writer.write_all(&question()).await.ok()?;
        writer.finish().ok()?;
        reader.read_to_end(1 << 20).await.ok()
    };
    let patient = async { tokio::time::timeout(PATIENCE, ask).await.expect("no end") };
    runtime().block_on(patient).unwrap_or_default()
}

/// The same by another implementation, of this version at most.
fn ask_by_python(stage: &Stage, version: &str) -> Result<String, String> {
    let certified = stage.authority().certify("host.example", LIFE).unwrap();
    let question: Vec<String> = question()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let script = format!(
        "import socket, ssl\n\
         context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)\n\
         context.maximum_version = ssl.TLSVersion.{version}\n\
         context.load_verify_locations(\"{authority}\")\n\
         context.load_cert_chain(\"{certificate}\", \"{key}\")\n\
         context.set_alpn_protocols([\"{protocol}\"])\n\
         plain = socket.create_connection((\"203.0.113.9\", 4433), 60)\n\
         stream = context.wrap_socket(plain, server_hostname=\"peer.example\")\n\
         stream.sendall(bytes.fromhex(\"{question}\"))\n\
         print(stream.makefile(\"rb\").read())\n",
        authority = stage
            .write("ours.pem", &stage.authority().certificate())
            .display(),
        certificate = stage.write("own.pem", &certified.certificate).display(),
        key = stage.write("own.key", &certified.key).display(),
        protocol = String::from_utf8_lossy(PROTOCOL),
        question = question.concat(),
    );
    let path = stage.write("client.py", &script);
    command::run(&format!("python3 {}", path.display())).map_err(|error| format!("{error:#}"))
}

/// What a relay has counted.
fn figure(stage: &Stage, relay: &str, name: &str) -> u64 {
    let metrics = stage.metrics(relay);
    let mut values = metrics
        .lines()
        .filter_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    values.next().unwrap().parse().unwrap()
}

fn failed(stage: &Stage, relay: &str) -> u64 {
    figure(stage, relay, "sandwire_relay_sessions_failed_total")
}

/// Lines that a relay has written since its log was so long.
pub(super) fn lines_since(log: &str, length: usize, words: [&str; 2]) -> bool {
    let mut lines = log[length..].lines();
    lines.any(|line| words.iter().all(|word| line.contains(word)))
}

/// Asks the peer for something, and gives what it answers.
type Ask = fn(Arc<ClientConfig>) -> Vec<u8>;

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_host_that_the_peer_does_not_know_has_nothing_delivered() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("auto");
        count_what_is_delivered(&stage);
        stage.start_peer();
        let mut cases = cases(stage.authority(), "host.example", "NotValidForName");
        cases.insert(
            0,
            Case {
                name: "without",
                certified: None,
                refused: Some("peer sent no certificates"),
            },
        );
        let ways = [
            ("take a TLS connection", ask_by_tls as Ask),
            ("take a QUIC connection", ask_by_quic),
        ];
        for case in &cases {
            for (operation, ask) in ways {
                let (log, failures) = (stage.peer_log().len(), failed(&stage, "peer"));
                let answer = ask(client(&stage, case.certified.as_ref()));
                let what = format!("{}: {operation}: {answer:?}", case.name);
                let Some(reason) = case.refused else {
                    assert!(holds(&answer, MARKER.as_bytes()), "{what}");
                    continue;
                };
                assert!(answer.is_empty(), "{what}");
                wait_for(&format!("{what}: it is told"), || {
                    lines_since(&stage.peer_log(), log, [operation, reason])
                });
                assert_eq!(failed(&stage, "peer"), failures + 1, "{what}");
                assert_eq!(counted(&stage, "output"), 0, "{what}");
            }
        }
        assert!(
            counted(&stage, "output") > 0,
            "what is delivered isn't counted"
        );
    });
}

/// What the relay knows of TLS has 1.3 alone.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn nobody_is_spoken_with_by_tls_1_2() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("tls");
        count_what_is_delivered(&stage);
        stage.start_peer();
        let (log, failures) = (stage.peer_log().len(), failed(&stage, "peer"));
        let refused = ask_by_python(&stage, "TLSv1_2").unwrap_err();
        assert!(refused.contains("alert protocol version"), "{refused}");
        wait_for("the peer tells of it", || {
            let words = ["take a TLS connection", "peer is incompatible"];
            lines_since(&stage.peer_log(), log, words)
        });
        assert_eq!(failed(&stage, "peer"), failures + 1);
        assert_eq!(counted(&stage, "output"), 0);
        let answer = ask_by_python(&stage, "TLSv1_3").unwrap();
        assert!(answer.contains(MARKER), "{answer}");
    });
}

/// Counts what goes from the peer's machine to the destination.
fn count_what_is_delivered(stage: &Stage) {
    for line in [
        "nft add table inet wall",
        "nft add chain inet wall output { type filter hook output priority 0 ; }",
        "nft add rule inet wall output oifname far0 meta l4proto { tcp, udp } counter",
    ] {
        stage.in_peer(line);
    }
}

fn holds(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

//! Peers that aren't who they say, by TLS and by QUIC: a host tells them nothing, and says why.

use std::{
    fs,
    path::PathBuf,
    process::Stdio,
    sync::{Arc, Mutex},
};

use quinn::crypto::rustls::QuicServerConfig;
use rustls::{ServerConfig, version::TLS13};
use sandwire_relay::{keys::Certified, wire::PROTOCOL};
use sandwire_testlab::{command::Process, lab, namespace::command_in};
use tokio::runtime::Runtime;

use super::{
    DEADLINE,
    strangers::{LIFE, cases, chain_of, lines_since, provider},
};
use crate::stage::{DESTINATIONS, Stage, wait_for};

const ADDRESS: &str = "203.0.113.9:4433";
const MISNAMED: &str = "certificate not valid for name \"peer.example\"";

/// In the peer's place, while it lives.
trait Impostor {
    /// All that it was told behind a handshake.
    fn heard(&self) -> String;
}

/// By another implementation.
struct ByTls {
    log: PathBuf,
    _server: Process,
}

impl ByTls {
    /// With TLS of this version at most.
    fn start(stage: &Stage, certified: &Certified, version: &str) -> Self {
        let script = format!(
            "import socket, ssl\n\
             context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)\n\
             context.maximum_version = ssl.TLSVersion.{version}\n\
             context.load_cert_chain(\"{certificate}\", \"{key}\")\n\
             context.load_verify_locations(\"{authority}\")\n\
             context.verify_mode = ssl.CERT_REQUIRED\n\
             context.set_alpn_protocols([\"{protocol}\"])\n\
             server = socket.create_server((\"203.0.113.9\", 4433))\n\
             print(\"ready\", flush=True)\n\
             while True:\n\
             \x20   plain, _ = server.accept()\n\
             \x20   try:\n\
             \x20       with context.wrap_socket(plain, server_side=True) as stream:\n\
             \x20           print(\"heard\", stream.recv(65536), flush=True)\n\
             \x20   except OSError as error:\n\
             \x20       print(\"refused\", error, flush=True)\n",
            certificate = stage.write("false.pem", &certified.certificate).display(),
            key = stage.write("false.key", &certified.key).display(),
            authority = stage
                .write("ours.pem", &stage.authority().certificate())
                .display(),
            protocol = String::from_utf8_lossy(PROTOCOL),
        );
        let path = stage.write("impostor.py", &script);
        let log = stage.write("impostor.log", "");
        let mut command = command_in(&stage.peer_path(), "python3");
        command
            .arg(path)
            .stdout(fs::File::create(&log).unwrap())
            .stderr(Stdio::inherit());
        let server = Process(command.spawn().unwrap());
        wait_for("the impostor is ready", || {
            fs::read_to_string(&log).unwrap().contains("ready")
        });
        Self {
            log,
            _server: server,
        }
    }
}

impl Impostor for ByTls {
    fn heard(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap();
        let lines = log.lines().filter(|line| line.starts_with("heard"));
        lines.collect()
    }
}

struct ByQuic {
    heard: Arc<Mutex<String>>,
    _runtime: Runtime,
}

impl ByQuic {
    fn start(stage: &Stage, certified: &Certified) -> Self {
        let (chain, key) = chain_of(certified);
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .unwrap();
        config.alpn_protocols = vec![PROTOCOL.to_vec()];
        let config = Arc::new(QuicServerConfig::try_from(config).unwrap());
        let socket = stage.inside_peer(|| std::net::UdpSocket::bind(ADDRESS).unwrap());
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let heard = Arc::new(Mutex::new(String::new()));
        let endpoint = {
            let _within = runtime.enter();
            quinn::Endpoint::new(
                quinn::EndpointConfig::default(),
                Some(quinn::ServerConfig::with_crypto(config)),
                socket,
                Arc::new(quinn::TokioRuntime),
            )
            .unwrap()
        };
        let hears = Arc::clone(&heard);
        runtime.spawn(async move {
            while let Some(incoming) = endpoint.accept().await {
                let Ok(connection) = incoming.await else {
                    continue;
                };
                let hears = Arc::clone(&hears);
                tokio::spawn(async move {
                    while let Ok((_writer, mut reader)) = connection.accept_bi().await {
                        let mut bytes = [0; 4096];
                        while let Ok(Some(length)) = reader.read(&mut bytes).await {
                            let text = String::from_utf8_lossy(&bytes[..length]);
                            hears.lock().unwrap().push_str(&text);
                        }
                    }
                });
            }
        });
        Self {
            heard,
            _runtime: runtime,
        }
    }
}

impl Impostor for ByQuic {
    fn heard(&self) -> String {
        self.heard.lock().unwrap().clone()
    }
}

fn call(stage: &Stage) -> Result<String, String> {
    let address = DESTINATIONS[0];
    stage.in_box(&format!("curl -sS --max-time 5 http://{address}:8080/page"))
}

/// The box's call fails, and the impostor learns neither of it nor of the one who calls.
fn is_refused(stage: &Stage, impostor: &dyn Impostor, log: usize, what: &str, reason: &str) {
    wait_for(&format!("{what}: the host says why: {reason}"), || {
        assert!(call(stage).is_err(), "{what}");
        lines_since(
            &stage.host_log(),
            log,
            ["a connection can't be relayed", reason],
        )
    });
    assert_eq!(impostor.heard(), "", "{what}");
}

/// Who has the right certificate is told who calls.
fn is_told(stage: &Stage, impostor: &dyn Impostor, what: &str) {
    wait_for(&format!("{what}: it is told"), || {
        let _ = call(stage);
        impostor.heard().contains("lab")
    });
}

fn hosts_refuse(transport: &str, start: impl Fn(&Stage, &Certified) -> Box<dyn Impostor>) {
    let mut stage = Stage::build(transport);
    stage.start_host();
    let capture = stage.capture();
    for case in cases(stage.authority(), "peer.example", MISNAMED) {
        let log = stage.host_log().len();
        let impostor = start(&stage, &case.certified.unwrap());
        match case.refused {
            Some(reason) => is_refused(&stage, &*impostor, log, case.name, reason),
            None => is_told(&stage, &*impostor, case.name),
        }
    }
    capture.has_nothing_in_the_clear(true);
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_host_tells_a_false_peer_nothing_by_tls() {
    lab::run_within(DEADLINE, |_| {
        hosts_refuse("tls", |stage, certified| {
            Box::new(ByTls::start(stage, certified, "TLSv1_3"))
        });
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_host_tells_a_false_peer_nothing_by_quic() {
    lab::run_within(DEADLINE, |_| {
        hosts_refuse("quic", |stage, certified| {
            Box::new(ByQuic::start(stage, certified))
        });
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_host_does_not_speak_with_its_peer_by_tls_1_2() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("tls");
        stage.start_host();
        let log = stage.host_log().len();
        let right = stage.authority().certify("peer.example", LIFE).unwrap();
        let impostor = ByTls::start(&stage, &right, "TLSv1_2");
        let reason = "received fatal alert: ProtocolVersion";
        is_refused(&stage, &impostor, log, "TLS 1.2", reason);
    });
}

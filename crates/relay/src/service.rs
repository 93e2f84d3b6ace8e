//! The relay as a process: from its start to its end.
//!
//! Start: configuration, then the kernel is told what to steer here, so that nothing leaves in the clear whatever fails
//! after that; folder, sockets, then all privileges away that aren't needed, certificates, peers. SIGHUP has
//! certificates and configuration read again; SIGTERM and SIGINT end it. What the kernel was told stays until the next start;
//! [`crate::steering::clear`] takes it away.

mod listen;
mod reload;

use std::{
    fs::DirBuilder,
    future::pending,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, UdpSocket},
    os::unix::fs::DirBuilderExt,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::io::Errno;
use sandwire_kernel_net::{
    privileges::{keep_only, raise_descriptor_limit},
    transparent::{BoundTcp, udp_listener},
};
use tokio::{
    net::UnixListener,
    signal::unix::{Signal, SignalKind, signal},
    sync::{mpsc, watch},
    task::JoinSet,
    time::sleep,
};

use self::reload::{Live, LiveHost};
use crate::{
    children::{self, NamedChild},
    config::{Config, Deliver, Egress, Limits},
    credentials::{self, CredentialsError, Store},
    deliver::{self, Destination, Ports},
    egress::{self, Host, udp, udp::Flows},
    fair::Fair,
    metrics::{self, Metrics},
    openings::Openings,
    privileges,
    report::{Output, Report, lines_max},
    senders::Quota,
    steering::{self, Claim, Entrance, SteeringError, Told},
    transport::{self, peer::Link, with_room},
    unread::{self, WIDE_CHANNELS},
};

/// How long it may take to tell others by QUIC that we end. Who doesn't hear it notices by our silence, later.
const LEAVE: Duration = Duration::from_millis(500);
/// How long the report's last lines may take. A disk that takes none holds nobody up for ever.
const LAST_LINES: Duration = Duration::from_secs(5);
/// How long somebody may take who steers ahead of us, and how often it is looked whether that is over.
const AHEAD: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(10);
/// What a kernel without IPv6 says of a socket.
const NO_VERSION: i32 = Errno::AFNOSUPPORT.raw_os_error();

/// Why the relay doesn't run.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The kernel or the disk refuses something.
    #[error("{operation}: {source}")]
    Start {
        /// What was tried.
        operation: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// Sockets for others' addresses can't be had.
    #[error(transparent)]
    Kernel(#[from] sandwire_kernel_net::Error),
    /// The kernel isn't told what to steer here.
    #[error(transparent)]
    Steering(#[from] SteeringError),
    /// A redirect is meant for sandboxes whose packets can't be taken.
    #[error(transparent)]
    Child(#[from] NamedChild),
    /// Certificates can't be used.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// A part that runs as long as the relay does has failed.
    #[error("a part of the relay has failed, which ends it: {0}")]
    Part(String),
}

fn failed(operation: impl Into<String>) -> impl FnOnce(io::Error) -> ServiceError {
    let operation = operation.into();
    move |source| ServiceError::Start { operation, source }
}

/// An entrance's sockets of one IP version, by its place.
type EntranceSockets = (u16, TcpListener, UdpSocket);

/// Sockets that are opened while there are all privileges.
struct Sockets {
    metrics: std::os::unix::net::UnixListener,
    peers: Vec<(TcpListener, UdpSocket)>,
}

/// What is steered here: the sockets that it comes to, and what the kernel was told.
struct Steered {
    entrances: Vec<EntranceSockets>,
    told: Told,
    claim: Claim,
}

/// Says whether the certificates and the key of a configuration can be used now.
///
/// # Errors
/// They can't.
pub fn check_credentials(config: &Config) -> Result<(), CredentialsError> {
    credentials::check(&config.tls, reload::clients(config))
}

/// Runs the relay in this process until it is told to end by SIGTERM or SIGINT. Its capabilities are the relay's
/// from then on. The configuration is of that file, which SIGHUP has read again.
///
/// # Errors
/// See [`ServiceError`]; once it is ready, only when a part of it has failed.
pub fn run(config: &Config, path: &Path) -> Result<(), ServiceError> {
    raise_descriptor_limit(privileges::DESCRIPTORS);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(failed("start"))?;
    let steered = config
        .egress
        .as_ref()
        .map(|egress| runtime.block_on(steer(egress, config)));
    let is_host = steered.is_some();
    let outcome = steered
        .transpose()
        .and_then(|steered| run_steered((config, path), &runtime, steered));
    // What another relay takes is that one's to tell of.
    let is_taken = matches!(outcome, Err(ServiceError::Steering(SteeringError::Taken)));
    if outcome.is_err() && is_host && !is_taken {
        say_what_becomes_of_it();
    }
    outcome
}

/// Says whether what is to be redirected leaves, as no relay takes it.
fn say_what_becomes_of_it() {
    match steering::has_table() {
        Ok(true) => tracing::error!(
            "what is redirected is dropped until the relay runs, or until `sandwire relay clear`"
        ),
        Ok(false) => tracing::error!(
            "the kernel isn't told what is to be redirected: it leaves in the clear until the relay runs"
        ),
        Err(error) => tracing::error!(
            %error,
            "it can't be seen whether what is to be redirected leaves in the clear"
        ),
    }
}

fn run_steered(
    (config, path): (&Config, &Path),
    runtime_of_socket: &tokio::runtime::Runtime,
    steered: Option<Steered>,
) -> Result<(), ServiceError> {
    make_folder(&config.folder).map_err(failed(format!(
        "make the folder {}",
        config.folder.display()
    )))?;
    let sockets = runtime_of_socket.block_on(async { open_sockets(config) })?;
    let output = Output::open(config.report.as_deref()).map_err(failed("open the report"))?;
    let kept = config.egress.as_ref().map_or(&[][..], |_| privileges::KEPT);
    keep_only(kept).map_err(failed("give up capabilities"))?;
    // Only now: a thread that is there already would keep all.
    let metrics = Arc::new(Metrics::default());
    let (report, writer) = Report::start(output, lines_max(&config.limits), metrics.clone())
        .map_err(failed("start threads"))?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(failed("start threads"))?;
    warn_of_descriptors(config);
    let outcome = runtime.block_on(serve((config, path), sockets, steered, metrics, report));
    // Whatever is still open is reset, and reported as cut.
    runtime.shutdown_timeout(Duration::from_secs(1));
    writer.finish(LAST_LINES);
    outcome
}

/// Says so if the host's side may want more descriptors than there are.
fn warn_of_descriptors(config: &Config) {
    let there_are = privileges::descriptors();
    let for_peer = match config.deliver {
        Some(_) => privileges::least_beside(there_are),
        None => 0,
    };
    let wanted = egress::descriptors(&config.limits);
    if config.egress.is_some() && wanted > there_are - for_peer {
        tracing::warn!(
            wanted,
            there_are,
            for_peer,
            "there are fewer descriptors than connections may take: those beyond wait to be taken, whoever's they are; \
             lower `limits.connections`, or raise the process's limit (`LimitNOFILE=`)"
        );
    }
}

/// Has what is redirected come here, before anything can fail that has to do with the relay's other work.
async fn steer(egress: &Egress, config: &Config) -> Result<Steered, ServiceError> {
    if let Some(daemon) = &egress.daemon
        && let Ok(found) = children::ask(egress, daemon).await
    {
        children::check(found)?;
    }
    let claim = claim().await?;
    let entrances = match bind_entrances(steering::entrances(egress)) {
        // Where another relay has the ports, what the kernel was told is that one's.
        Err(error) if steering::is_told()? => return Err(error),
        entrances => entrances,
    };
    let told = steering::apply(egress)?;
    for path in steering::missing(egress) {
        tracing::warn!(
            cgroup = %path.display(),
            "a cgroup isn't there: once it is made, what is sent in it leaves in the clear until that is seen, some milliseconds later; \
             `sandwire relay steer` waits for that"
        );
    }
    let entrances = open_entrances(entrances?, config.limits.datagram_queue_bytes)?;
    Ok(Steered {
        entrances,
        told,
        claim,
    })
}

/// Wants to be the only one who steers. Who steers ahead of a relay is waited for: that takes some milliseconds.
async fn claim() -> Result<Claim, SteeringError> {
    let begun = Instant::now();
    loop {
        if let Some(claim) = Claim::take() {
            return Ok(claim);
        }
        if begun.elapsed() >= AHEAD {
            return Err(SteeringError::Taken);
        }
        sleep(PAUSE).await;
    }
}

/// Takes entrances' ports, to which nothing comes yet: a former relay's rules may be there still, by which a place is
/// another cgroup's.
fn bind_entrances(
    entrances: impl IntoIterator<Item = Entrance>,
) -> Result<Vec<(u16, BoundTcp)>, ServiceError> {
    let mut bound = Vec::new();
    for entrance in entrances {
        for address in entrance.addresses() {
            let tcp = match BoundTcp::new(address, entrance.answers_mark()) {
                // A kernel without IPv6 refuses its routes, too; whether that matters is said there.
                Err(error) if address.is_ipv6() && error.errno() == Some(NO_VERSION) => continue,
                tcp => tcp?,
            };
            bound.push((entrance.place, tcp));
        }
    }
    Ok(bound)
}

/// Opens what comes to entrances, whose rules are the configuration's.
fn open_entrances(
    bound: Vec<(u16, BoundTcp)>,
    buffer_bytes: usize,
) -> Result<Vec<EntranceSockets>, ServiceError> {
    let mut sockets = Vec::new();
    for (place, tcp) in bound {
        let udp = udp_listener(tcp.address())?;
        // Bursts wait here. Without the right to more, the usual has to do.
        let _ = rustix::net::sockopt::set_socket_recv_buffer_size_force(&udp, buffer_bytes);
        sockets.push((place, tcp.listen()?, udp));
    }
    Ok(sockets)
}

fn make_folder(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o755).create(folder)
}

fn open_sockets(config: &Config) -> Result<Sockets, ServiceError> {
    let socket = metrics::socket(&config.folder);
    let metrics = metrics::listen(&config.folder)
        .and_then(UnixListener::into_std)
        .map_err(failed(format!("listen at {}", socket.display())))?;
    let deliver = config.deliver.as_ref();
    let peers = listen::open_all(deliver.map_or(&[][..], |deliver| &deliver.listen))?;
    Ok(Sockets { metrics, peers })
}

async fn serve(
    (config, path): (&Config, &Path),
    sockets: Sockets,
    steered: Option<Steered>,
    metrics: Arc<Metrics>,
    report: Report,
) -> Result<(), ServiceError> {
    let catch = |kind| signal(kind).map_err(failed("catch signals"));
    let mut ends = [
        catch(SignalKind::terminate())?,
        catch(SignalKind::interrupt())?,
    ];
    let mut hangup = catch(SignalKind::hangup())?;
    let clients = watch::Sender::new(reload::clients(config));
    let store = Store::open(&config.tls, clients.subscribe())?;
    let listener = UnixListener::from_std(sockets.metrics).map_err(failed("serve metrics"))?;
    let mut running = Running::default();
    running.spawn(metrics::serve(listener, metrics.clone()));
    let base = Base {
        config,
        store,
        metrics,
        report,
    };
    let mut live = Live::new(path, config, clients, base.report.clone());
    if let Some(deliver) = &config.deliver {
        live.destination = Some(base.start_deliver(deliver, sockets.peers, &mut running)?);
    }
    if let (Some(egress), Some(steered)) = (&config.egress, steered) {
        live.host = Some(base.start_egress(egress, steered, &mut running)?);
    }
    tracing::info!(
        host = config.egress.is_some(),
        peer = config.deliver.is_some(),
        "the relay is ready"
    );
    notify(sd_notify::NotifyState::Ready);
    let outcome = loop {
        tokio::select! {
            () = told_to_end(&mut ends) => break Ok(()),
            error = running.failed() => break Err(error),
            _ = hangup.recv() => {}
        }
        tokio::select! {
            () = told_to_end(&mut ends) => break Ok(()),
            () = live.reload(&mut running) => {}
        }
    };
    tracing::info!("the relay ends; what is steered to it is dropped until it comes back");
    notify(sd_notify::NotifyState::Stopping);
    running.leave().await;
    let socket = metrics::socket(&config.folder);
    if let Err(error) = std::fs::remove_file(&socket) {
        tracing::warn!(%error, "removing the socket for metrics failed");
    }
    outcome
}

async fn told_to_end([terminate, interrupt]: &mut [Signal; 2]) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

/// What runs as long as the relay does.
#[derive(Default)]
struct Running {
    /// None of them ends by itself.
    tasks: JoinSet<()>,
    endpoints: Vec<quinn::Endpoint>,
}

impl Running {
    fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(task);
    }

    /// Waits until a part has failed: whoever looks after the process starts it anew, with all parts.
    async fn failed(&mut self) -> ServiceError {
        match self.tasks.join_next().await {
            Some(Err(error)) => ServiceError::Part(error.to_string()),
            Some(Ok(())) => ServiceError::Part("it has ended".to_owned()),
            None => pending().await,
        }
    }

    /// Ends all, and the QUIC connections so that the other sides know: they would wait for us otherwise.
    async fn leave(mut self) {
        // Also waits for them: one that is at work at this moment would otherwise still warn of what we do next.
        self.tasks.shutdown().await;
        for endpoint in &self.endpoints {
            endpoint.close(quinn::VarInt::from_u32(0), b"the relay ends");
        }
        let all_know = async {
            for endpoint in &self.endpoints {
                endpoint.wait_idle().await;
            }
        };
        let _ = tokio::time::timeout(LEAVE, all_know).await;
    }
}

/// What both roles have.
struct Base<'a> {
    config: &'a Config,
    store: Store,
    metrics: Arc<Metrics>,
    report: Report,
}

impl Base<'_> {
    /// Limits of one side: a relay that is a host and a peer has half for each of what is held for who doesn't read.
    fn limits(&self) -> Limits {
        let has_both = self.config.egress.is_some() && self.config.deliver.is_some();
        unread::of_side(self.config.limits.clone(), if has_both { 2 } else { 1 })
    }

    /// Descriptors for the peer's side.
    fn descriptors(&self) -> usize {
        let there_are = privileges::descriptors();
        let has_host = self.config.egress.is_some();
        let of_host = has_host.then(|| egress::descriptors(&self.config.limits));
        privileges::beside(there_are, of_host.unwrap_or(0))
    }

    fn start_deliver(
        &self,
        deliver: &Deliver,
        sockets: Vec<(TcpListener, UdpSocket)>,
        running: &mut Running,
    ) -> Result<Arc<Destination>, ServiceError> {
        let limits = self.limits();
        let destination = Arc::new(Destination {
            deliver: watch::Sender::new(Arc::new(deliver.clone())),
            connections: Fair::new(deliver::connections(&limits, self.descriptors())),
            flows: Fair::new(deliver::flows(&limits)),
            channels: Quota::new(deliver::CHANNELS_MAX),
            streams: Quota::new(deliver::streams_max(&limits)),
            unread: Fair::new(deliver::unread(&limits)),
            wide: Quota::new(WIDE_CHANNELS),
            ports: Ports::of_machine(),
            openings: Openings::new(limits.openings, self.metrics.clone()),
            limits,
            store: self.store.clone(),
            metrics: self.metrics.clone(),
            report: self.report.clone(),
        });
        for (tcp, udp) in sockets {
            let listener = tokio::net::TcpListener::from_std(tcp).map_err(failed("listen"))?;
            running.spawn(deliver::serve_tls(destination.clone(), listener));
            let credentials = self.store.current()?;
            let server = quinn::ServerConfig::with_crypto(credentials.quic_server.clone());
            let endpoint = endpoint(udp, Some(server))?;
            running.endpoints.push(endpoint.clone());
            running.spawn(deliver::serve_quic(destination.clone(), endpoint));
        }
        Ok(destination)
    }

    fn start_egress(
        &self,
        egress: &Egress,
        steered: Steered,
        running: &mut Running,
    ) -> Result<LiveHost, ServiceError> {
        let limits = self.limits();
        let mut links = Vec::new();
        for peer in &egress.peers {
            let any: IpAddr = if peer.address.is_ipv4() {
                Ipv4Addr::UNSPECIFIED.into()
            } else {
                Ipv6Addr::UNSPECIFIED.into()
            };
            let socket = UdpSocket::bind((any, 0)).map_err(failed("open a socket"))?;
            let endpoint = endpoint(with_room(socket), None)?;
            running.endpoints.push(endpoint.clone());
            links.push(Arc::new(Link::new(
                peer.clone(),
                endpoint,
                self.store.clone(),
                limits.clone(),
                self.metrics.clone(),
            )));
        }
        let (metrics, report) = (self.metrics.clone(), self.report.clone());
        let host = Arc::new(Host::new(egress.clone(), links, limits, metrics, report));
        let flows = Arc::new(Flows::new());
        for (via, link) in host.links.iter().enumerate() {
            let (link, host, flows) = (link.clone(), host.clone(), flows.clone());
            let seed = egress.seed;
            running.spawn(async move {
                link.keep(seed, |incoming| {
                    udp::answer(host.clone(), flows.clone(), via, incoming)
                })
                .await;
            });
        }
        if let Some(daemon) = egress.daemon.clone() {
            let (host, metrics) = (host.clone(), self.metrics.clone());
            let changes = host.changes();
            running.spawn(children::keep(changes, daemon.clone().into(), metrics));
            running.spawn(async move { host.senders.keep(&daemon).await });
        }
        let (steering, changes) = mpsc::channel(1);
        let keep = steering::upkeep::keep(host.now(), steered.told, changes, host.metrics.clone());
        running.spawn(keep);
        {
            let (host, flows) = (host.clone(), flows.clone());
            running.spawn(async move { flows.keep(&host).await });
        }
        let mut live = LiveHost::new(host, flows, steering, steered.claim);
        live.take_entrances(steered.entrances, running);
        Ok(live)
    }
}

fn endpoint(
    socket: UdpSocket,
    server: Option<quinn::ServerConfig>,
) -> Result<quinn::Endpoint, ServiceError> {
    transport::socket::endpoint(socket, server).map_err(failed("start QUIC"))
}

/// Tells systemd, if it asked.
fn notify(state: sd_notify::NotifyState) {
    if let Err(error) = sd_notify::notify(false, &[state]) {
        tracing::warn!(%error, "systemd couldn't be told how the relay is");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_part_that_fails_is_told_and_one_that_runs_is_ended() {
        let mut running = Running::default();
        let (sender, receiver) = tokio::sync::oneshot::channel::<()>();
        running.spawn(async move {
            let _kept = sender;
            pending().await
        });
        running.spawn(async { panic!("a test says so") });
        let error = running.failed().await.to_string();
        assert!(
            error.contains("which ends it") && error.contains("a test says so"),
            "{error}"
        );
        running.leave().await;
        assert!(receiver.await.is_err(), "it still runs");
    }
}

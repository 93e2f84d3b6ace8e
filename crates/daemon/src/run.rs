//! The life of the daemon: start, serve, reload, stop.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sandwire_api::{health::Problem, pool::PoolSpec};
use sandwire_kernel_net::{interface, netlink::Socket};
use sandwire_slot::{
    channel::{Channels, NoChannels},
    clock::SystemClock,
    error::{JournalError, NetworkError, ServiceError},
    journal::Journal,
    kernel::{self, KernelNetwork},
    service::{Settings, Slots},
};
use sd_notify::NotifyState;
use tokio::{
    net::UnixListener,
    runtime,
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
    time::{interval, timeout},
};

use crate::{
    config::{Config, ConfigError, VsockConfig},
    http::{self, App},
    identities::{self, HostIdentities},
    impair::{self, Impairments},
    instance::{InstanceError, InstanceLock},
    places::CONNECTIONS_MAX,
    receivers::Receivers,
    server,
    socket::{self, SocketError},
    vsock::VsockServices,
};

/// After so long systemd is told that the daemon serves even if not everything is well.
const READY_PATIENCE: Duration = Duration::from_secs(30);
/// How often to look whether everything is well, until it is.
const READY_POLL: Duration = Duration::from_millis(20);
/// After so long the start and a reload go on without those who have locked the identities.
const IDENTITIES_PATIENCE: Duration = Duration::from_secs(10);
/// Most threads for what waits for the kernel: one for each connection, so that nobody's request waits for those of
/// others, and some for traces and for what the daemon does by itself. `TasksMax=` of the unit has room for them.
const BLOCKING_THREADS_MAX: usize = CONNECTIONS_MAX as usize + 64;

/// Why the daemon didn't start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The socket can't be had.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// Another daemon has that name.
    #[error(transparent)]
    Instance(#[from] InstanceError),
    /// The slot service can't start: another daemon on the state folder, or the folder is unusable.
    #[error(transparent)]
    Slots(#[from] ServiceError),
    /// The kernel can't be worked with.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// The system refused something that every daemon needs.
    #[error("cannot {operation}: {source}")]
    System {
        /// What was tried.
        operation: &'static str,
        /// The system's reason.
        source: io::Error,
    },
}

impl DaemonError {
    /// Whether the daemon was refused before anything changed, as opposed to having failed.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::Config(_) | Self::Instance(_) => true,
            Self::Socket(error) => error.is_refusal(),
            Self::Slots(ServiceError::Journal(JournalError::Locked { .. })) => true,
            Self::Slots(error) => error.code().is_refusal(),
            Self::Network(_) | Self::System { .. } => false,
        }
    }

    fn system(operation: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { operation, source }
    }
}

/// Runs the daemon until SIGTERM or SIGINT. `config` is a file; the default one may be missing. Logs by `tracing`, which the
/// caller has set up; lines about what a user did have a field `uid`.
///
/// # Errors
/// It couldn't start. Once it serves, it goes on until it is told to stop.
pub fn run(config: Option<&Path>) -> Result<(), DaemonError> {
    let file = config.map(Path::to_owned);
    let config = Config::load(config)?;
    raise_descriptor_limit();
    let runtime = runtime::Builder::new_multi_thread()
        .thread_name("sandwire")
        .max_blocking_threads(BLOCKING_THREADS_MAX)
        .on_thread_start(answer_promptly)
        .enable_all()
        .build()
        .map_err(DaemonError::system("start threads"))?;
    let outcome = runtime.block_on(live(config, file));
    // What still waits for another process is of no use to anybody.
    runtime.shutdown_background();
    outcome
}

/// Best effort: it only matters on a busy host.
fn answer_promptly() {
    if let Err(error) = sandwire_kernel_net::thread::answer_promptly() {
        tracing::debug!(%error, "requests may wait for the slices of other threads");
    }
}

async fn live(config: Config, file: Option<PathBuf>) -> Result<(), DaemonError> {
    // Before anything else, so that a signal that comes early ends the daemon in order.
    let mut signals = Signals::new().map_err(DaemonError::system("receive signals"))?;
    socket::prepare(&config.socket)?;
    let _lock = InstanceLock::take(&config.instance)?;
    let app = start(&config).await?;
    if apply(&app, &config, &mut signals).await == Told::GoOn {
        serve(&app, &config, file.as_deref(), &mut signals).await?;
    }
    tracing::info!("stopping; slots and leases stay as they are");
    let slots = Arc::clone(&app.slots);
    if let Err(error) = tokio::task::spawn_blocking(move || slots.shutdown()).await {
        tracing::error!(%error, "the slot service ended early");
    }
    Ok(())
}

/// Answers requests until the daemon is told to stop, and then those that run.
async fn serve(
    app: &Arc<App>,
    config: &Config,
    file: Option<&Path>,
    signals: &mut Signals,
) -> Result<(), DaemonError> {
    let listener = socket::bind(&config.socket)?;
    let listener = listener
        .set_nonblocking(true)
        .and_then(|()| UnixListener::from_std(listener))
        .map_err(DaemonError::system("listen"))?;
    tracing::info!(socket = %config.socket.path.display(), instance = %config.instance, "serving");

    let (stop, stopped) = watch::channel(false);
    let router = http::router(Arc::clone(app));
    let server = tokio::spawn(server::serve(listener, router, stopped));
    let announcer = tokio::spawn(announce(Arc::clone(app)));
    let sweeper = impair::sweep(Arc::clone(&app.impairments), Arc::clone(&app.slots));
    let sweeper = tokio::spawn(sweeper);
    let receivers = Receivers::serve(app.identities.of_host());
    let receivers = receivers.map_err(DaemonError::system("start a thread"))?;
    let (identities, slots) = (Arc::clone(&app.identities), Arc::clone(&app.slots));
    let looker = tokio::spawn(identities::sweep(identities, slots, receivers));
    loop {
        let told = match signals.next().await {
            Signalled::Stop => Told::Stop,
            Signalled::Reload => reload(app, file, signals).await,
        };
        if told == Told::Stop {
            break;
        }
    }
    app.identities.stop();
    announcer.abort();
    sweeper.abort();
    looker.abort();
    notify(&[NotifyState::Stopping]);
    app.traces.stop();
    app.slots.begin_shutdown();
    stop.send_replace(true);
    if let Err(error) = server.await {
        tracing::error!(%error, "the server ended early");
    }
    socket::remove(&config.socket);
    Ok(())
}

/// Opens the slot service, which adopts what is there.
async fn start(config: &Config) -> Result<Arc<App>, DaemonError> {
    let config = config.clone();
    let started = tokio::task::spawn_blocking(move || {
        // Services for vsock are started and ended before the folder is locked for good.
        Journal::check_free(&config.state_dir).map_err(ServiceError::from)?;
        let network = KernelNetwork::open_with(kernel_settings(&config))?;
        warn_of_missing_uplinks(&config);
        let settings = Settings {
            instance: config.instance.clone(),
            state_dir: config.state_dir,
            builders: config.builders,
            audit_interval: config.audit_interval,
        };
        let channels = channels(config.vsock.as_ref())?;
        let network = Arc::new(network);
        let slots = Slots::open_with_channels(settings, network, channels, Arc::new(SystemClock))?;
        // Under systemd it has a unit of its own.
        let starts = std::env::var_os("NOTIFY_SOCKET").is_none();
        let impairments = Impairments::new(config.impair_folder, starts, &config.instance);
        let identities = HostIdentities::new(&config.identity_folder, config.instance);
        Ok(App::with_services(
            slots,
            config.metrics_per_lease,
            impairments,
            identities,
        ))
    });
    match started.await {
        Ok(result) => result,
        Err(error) => Err(DaemonError::system("start the slot service")(
            io::Error::other(error),
        )),
    }
}

/// One may come later, and is taken then: but it may as well be a slip of the pen, with packets on another way for good.
fn warn_of_missing_uplinks(config: &Config) {
    // Who needs the uplinks tells why the kernel can't be asked.
    let Ok(mut route) = Socket::route() else {
        return;
    };
    for name in config.datapath.uplinks.iter().flatten() {
        if matches!(interface::find(&mut route, name), Ok(None)) {
            tracing::warn!(
                uplink = name,
                "there is no interface of this name, which `uplinks` of the configuration has: it is an uplink once it \
                 is there, and until then packets take the way through the host's own stack; correct the name if it is wrong"
            );
        }
    }
}

/// The services for vsock, if they are enabled.
fn channels(config: Option<&VsockConfig>) -> Result<Arc<dyn Channels>, DaemonError> {
    let Some(config) = config else {
        return Ok(Arc::new(NoChannels));
    };
    let services = VsockServices::start(config)
        .map_err(DaemonError::system("use the folder of vsock channels"))?;
    Ok(Arc::new(services))
}

fn kernel_settings(config: &Config) -> kernel::Settings {
    let defaults = kernel::Settings::new(config.instance.as_str());
    let datapath = &config.datapath;
    kernel::Settings {
        ebpf: sandwire_datapath::Settings {
            folder: datapath.folder.clone(),
            nics_max: datapath.nics_max,
            answers_max: datapath.answers_max,
            order: datapath.uplink_order,
            ..defaults.ebpf
        },
        uplinks: datapath.uplinks.clone(),
        ..defaults
    }
}

/// Reads the configuration again and makes its pools and identities. Pools that it no longer has stay: deleting
/// one takes an explicit request. Other settings need a restart.
async fn reload(app: &Arc<App>, file: Option<&Path>, signals: &mut Signals) -> Told {
    notify(&[NotifyState::Status("reloading the configuration")]);
    let told = match Config::load(file) {
        Ok(config) => {
            let told = apply(app, &config, signals).await;
            if told == Told::GoOn {
                tracing::info!("read the pools and identities of the configuration again");
            }
            told
        }
        Err(error) => {
            tracing::error!(%error, "kept the old configuration");
            Told::GoOn
        }
    };
    notify(&[NotifyState::Status("serving")]);
    told
}

/// Makes the pools and identities of a configuration. Some pools may have to be deleted first, which can take minutes: who
/// is told to stop doesn't wait for that. The next start finds such a pool half torn down, and goes on with it.
async fn apply(app: &Arc<App>, config: &Config, signals: &mut Signals) -> Told {
    let (ours, specs) = (Arc::clone(app), config.pools.clone());
    let mut making = tokio::task::spawn_blocking(move || ensure_pools(&ours, &specs));
    let (told, made) = tokio::select! {
        (made, ()) = async { tokio::join!(&mut making, declare(app, config)) } => (Told::GoOn, made),
        () = signals.stop() => {
            app.identities.stop();
            app.slots.begin_shutdown();
            (Told::Stop, making.await)
        }
    };
    if let Err(error) = made {
        tracing::error!(%error, "making what the configuration says ended early");
    }
    told
}

/// Has identities be as the configuration says, which takes milliseconds. Leases don't wait for longer.
async fn declare(app: &Arc<App>, config: &Config) {
    let ours = Arc::clone(app);
    ours.identities.declare(config.identities.clone());
    let looking = async move {
        let turn = ours.identities.turn().await;
        let look = move || {
            ours.identities.look_at_declared();
            drop(turn);
        };
        tokio::task::spawn_blocking(look).await
    };
    match timeout(IDENTITIES_PATIENCE, looking).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::error!(%error, "a look at declared identities ended early"),
        Err(_) => tracing::warn!(
            "identities of the configuration take long, as where a command that has locked them is stopped; they follow when they can"
        ),
    }
}

/// Makes each pool be as the configuration says. What can't be done becomes a problem that
/// `/healthz` lists; the other pools are served all the same.
pub(crate) fn ensure_pools(app: &App, specs: &[PoolSpec]) {
    let mut problems = Vec::new();
    for spec in specs {
        match app.slots.ensure_pool(spec) {
            Ok(_) => {}
            Err(ServiceError::Stopping) => return,
            Err(error) => {
                tracing::error!(pool = %spec.name, %error, "the configured pool can't be made");
                problems.push(Problem {
                    subject: format!("pool {}", spec.name),
                    message: format!("not as the configuration says: {error}"),
                    // A pool that exists goes on with its old settings.
                    blocking: app.slots.pool_view(&spec.name).is_err(),
                });
            }
        }
    }
    app.set_problems(problems);
}

/// A thousand connections need more descriptors than the usual soft limit gives.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
}

/// Tells systemd that the daemon is ready when it is: slots adopted, data path checked.
async fn announce(app: Arc<App>) {
    let mut poll = interval(READY_POLL);
    let wait = async {
        loop {
            poll.tick().await;
            if app.health().ready {
                break;
            }
        }
    };
    if timeout(READY_PATIENCE, wait).await.is_ok() {
        notify(&[NotifyState::Ready, NotifyState::Status("serving")]);
    } else {
        for problem in app.health().problems {
            tracing::error!(subject = problem.subject, "{}", problem.message);
        }
        let status = "serving, but not all is well: see /healthz";
        notify(&[NotifyState::Ready, NotifyState::Status(status)]);
    }
}

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(false, states) {
        tracing::debug!(%error, "cannot tell the service manager");
    }
}

/// What a signal asks for.
enum Signalled {
    Reload,
    Stop,
}

/// Whether the daemon was told to stop meanwhile.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Told {
    GoOn,
    Stop,
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> Signalled {
        tokio::select! {
            _ = self.terminate.recv() => Signalled::Stop,
            _ = self.interrupt.recv() => Signalled::Stop,
            _ = self.hang_up.recv() => Signalled::Reload,
        }
    }

    /// Waits for the end. A reload that is asked for meanwhile is kept for [`Signals::next`].
    async fn stop(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model;

    #[test]
    fn a_second_daemon_on_a_state_folder_is_refused_and_the_first_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let (first, _) = model::open(folder.path());
        let settings = Settings {
            instance: "test".parse().unwrap(),
            state_dir: folder.path().to_owned(),
            builders: 1,
            audit_interval: Duration::from_secs(3600),
        };
        let network = Arc::new(model::ModelNetwork::default());
        let Err(error) = Slots::open(settings, network, Arc::new(SystemClock)) else {
            panic!("two daemons share a state folder");
        };
        let error = DaemonError::from(error);
        assert!(error.is_refusal(), "{error}");
        assert!(error.to_string().contains("another daemon"), "{error}");
        model::fill(&first, &model::pool("web", 1));
    }

    #[tokio::test(start_paused = true)]
    async fn reloads_take_no_more_threads_while_one_waits_for_the_identities() {
        let folder = tempfile::tempdir().unwrap();
        let (slots, _) = model::open(folder.path());
        let app = App::new(slots, false);
        let config = Config::parse("", Path::new("s.toml")).unwrap();
        let turn = app.identities.turn().await;
        for _ in 0..3 {
            declare(&app, &config).await;
            assert_eq!(Arc::strong_count(&app), 1);
        }
        drop(turn);
        declare(&app, &config).await;
        let _free = app.identities.turn().await;
    }

    #[test]
    fn what_the_configuration_says_of_pools_is_done_and_what_cannot_be_is_listed() {
        let folder = tempfile::tempdir().unwrap();
        let (slots, _) = model::open(folder.path());
        let app = App::new(slots, false);
        let mut web = model::pool("web", 1);
        ensure_pools(&app, &[web.clone()]);
        assert_eq!(app.problems(), []);
        web.size = 2;
        // Its clone addresses are those of `web`.
        let other = model::pool("other", 1);
        ensure_pools(&app, &[web.clone(), other]);
        assert_eq!(app.slots.pool(&web.name).unwrap().spec.size, 2);
        let problems = app.problems();
        assert_eq!(problems.len(), 1);
        assert_eq!(problems[0].subject, "pool other");
        assert!(problems[0].blocking && !app.health().ready);
        ensure_pools(&app, &[web]);
        assert_eq!(app.problems(), []);
    }
}

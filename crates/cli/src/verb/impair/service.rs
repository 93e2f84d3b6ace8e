//! Reaching the impairment service, or starting it.

use std::{
    fs,
    os::unix::fs::DirBuilderExt,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use sandwire_api::error::ErrorCode;
use sandwire_impair_host::control::{Client, ClientError, RefusalCode, TARGETS, control_socket};
use sandwire_kernel_net::process::unblock_signals;

use crate::{failure::Failure, output::note, render};

/// This program, whatever has become of its file.
const OURSELVES: &str = "/proc/self/exe";
/// What a service that was started by a verb says.
const LOG: &str = "service.log";
/// How long a service may take until it listens.
const PATIENCE: Duration = Duration::from_secs(20);

/// Connects to the service of that folder. None if there is none, and none has left anything.
pub(super) fn connect(folder: &Path) -> Result<Option<Client>, Failure> {
    match Client::connect(&control_socket(folder)) {
        Ok(client) => Ok(Some(client)),
        Err(_) if left_targets(folder) == 0 => Ok(None),
        Err(error) => {
            let left = render::count(left_targets(folder), "interface");
            Err(Failure::failed(format!(
                "cannot {error} It has left {left} impaired, closed or open as was said: `sandwire impair serve` takes \
                 them up again, `sandwire impair clear --all` ends that"
            )))
        }
    }
}

/// The same; what a service has left that has died, another takes up first.
pub(crate) fn connect_to_clear(folder: &Path) -> Result<Option<Client>, Failure> {
    if Client::connect(&control_socket(folder)).is_err() && left_targets(folder) > 0 {
        return connect_or_start(folder).map(|(client, _)| Some(client));
    }
    connect(folder)
}

fn left_targets(folder: &Path) -> usize {
    let is_target = |entry: &fs::DirEntry| entry.path().extension().is_some_and(|it| it == "json");
    let entries = fs::read_dir(folder.join(TARGETS)).into_iter().flatten();
    entries.flatten().filter(is_target).count()
}

/// The same; if nobody listens, a service is started first, which is then said. Whether one was.
pub(crate) fn connect_or_start(folder: &Path) -> Result<(Client, bool), Failure> {
    let socket = control_socket(folder);
    if let Ok(client) = Client::connect(&socket) {
        return Ok((client, false));
    }
    let failed = |problem: String| {
        Failure::failed(format!("cannot start the impairment service: {problem}"))
    };
    if !rustix::process::geteuid().is_root() {
        return Err(Failure::refused(
            "cannot start the impairment service: only root can divert packets; run this as root",
        ));
    }
    let log = folder.join(LOG);
    let open_log = || {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)?;
        fs::OpenOptions::new().create(true).append(true).open(&log)
    };
    let output = open_log().map_err(|error| failed(format!("open {}: {error}", log.display())))?;
    let mut command = Command::new(OURSELVES);
    command
        .args(["impair", "serve", "--detach", "--folder"])
        .arg(folder)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(output);
    unblock_signals(&mut command);
    let mut child = command.spawn().map_err(|error| failed(error.to_string()))?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Ok(client) = Client::connect(&socket) {
            let pid = child.id();
            note(&format!(
                "started the impairment service (process {pid}, log {}); SIGTERM ends it and every impairment",
                log.display()
            ));
            return Ok((client, true));
        }
        if let Ok(Some(status)) = child.try_wait() {
            let said = fs::read_to_string(&log).unwrap_or_default();
            let last = said.lines().last().unwrap_or("it said nothing").to_owned();
            return Err(failed(format!("it ended with {status}: {last}")));
        }
        if Instant::now() >= deadline {
            let text = format!(
                "it doesn't listen after {PATIENCE:?}; see {}",
                log.display()
            );
            return Err(failed(text));
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// What the service, or its absence, means for the verb.
pub(super) fn failure(error: ClientError) -> Failure {
    let code = match &error {
        ClientError::Refused { code, .. } => match code {
            RefusalCode::Invalid | RefusalCode::DefaultRoute => ErrorCode::InvalidRequest,
            RefusalCode::InUse | RefusalCode::Full => ErrorCode::Conflict,
            RefusalCode::NotFound => ErrorCode::NotFound,
            RefusalCode::Failed => ErrorCode::Internal,
        },
        _ => ErrorCode::Internal,
    };
    Failure::new(code, format!("cannot {error}"))
}

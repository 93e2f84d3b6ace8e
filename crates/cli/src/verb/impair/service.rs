//! Reaching the impairment service, or starting it.

use std::{io::ErrorKind, path::Path};

use sandwire_api::error::ErrorCode;
use sandwire_impair_host::{
    control::{Client, ClientError, RefusalCode, control_socket},
    launch::{self, Home, LaunchError, Launched},
};

use crate::{failure::Failure, output::note, render};

/// Connects to the service of that folder. None if there is none, and none has left anything.
pub(super) fn connect(folder: &Path) -> Result<Option<Client>, Failure> {
    found(folder, Client::connect(&control_socket(folder)))
}

/// The service, if there is one.
fn found(folder: &Path, connected: Result<Client, ClientError>) -> Result<Option<Client>, Failure> {
    match connected {
        Ok(client) => Ok(Some(client)),
        Err(error) if error.is_late() => Err(failure(error)),
        Err(ClientError::Connect { path, source })
            if source.kind() == ErrorKind::PermissionDenied =>
        {
            Err(Failure::refused(format!(
                "cannot connect to the impairment service at {}: {source}; only root sees and changes what it impairs",
                path.display()
            )))
        }
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
    let connected = Client::connect(&control_socket(folder));
    let is_gone = connected.as_ref().is_err_and(|error| !error.is_late());
    if is_gone && left_targets(folder) > 0 {
        return connect_or_start(folder).map(|(client, _)| Some(client));
    }
    found(folder, connected)
}

/// How many a service of that folder has left that has died. One that was told to end leaves none.
pub(super) fn left_targets(folder: &Path) -> usize {
    launch::left(folder).targets
}

/// The same; if nobody listens, a service is started first, which is then said. Whether one was.
pub(crate) fn connect_or_start(folder: &Path) -> Result<(Client, bool), Failure> {
    let failed = |error: LaunchError| {
        let message = format!("cannot start the impairment service: {error}");
        match error {
            LaunchError::Busy(error) => failure(error),
            LaunchError::NotRoot => Failure::refused(message),
            _ => Failure::failed(message),
        }
    };
    let (client, launched) = launch::connect_or_start(folder, Home::Machine).map_err(failed)?;
    if let Some(Launched { child, log }) = &launched {
        let (pid, log) = (child.id(), log.display());
        note(&format!(
            "started the impairment service (process {pid}, log {log}); SIGTERM ends it and every impairment"
        ));
    }
    Ok((client, launched.is_some()))
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

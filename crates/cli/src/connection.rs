//! The way to the daemon: its client, with errors that say what to do.

use std::io;

use sandwire_api::{
    client::{Blocking, ClientError},
    error::ErrorCode,
};

use crate::{Context, failure::Failure};

impl Context {
    /// A client of the daemon at `--socket`. Connects at the first request.
    pub(crate) fn client(&self) -> Blocking {
        Blocking::new(&self.socket)
    }
}

/// Turns a client's error into a [`Failure`] that names the operation.
pub(crate) fn cannot(operation: impl Into<String>) -> impl FnOnce(ClientError) -> Failure {
    let operation = operation.into();
    move |error| match error {
        ClientError::Api(answer) => Failure::of_answer(&operation, answer),
        ClientError::Connect { ref source, .. } => Failure::new(
            code_without_connection(source.kind()),
            format!("cannot {operation}: {error}"),
        ),
        other => Failure::failed(format!("cannot {operation}: {other}")),
    }
}

/// What the daemon would say if it could: nothing was asked of it yet.
fn code_without_connection(kind: io::ErrorKind) -> ErrorCode {
    match kind {
        // It isn't there, or not yet.
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => ErrorCode::Unavailable,
        io::ErrorKind::PermissionDenied => ErrorCode::Forbidden,
        _ => ErrorCode::Internal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_that_cannot_be_asked_is_told_by_a_word_of_the_api() {
        let failure = |kind: io::ErrorKind| {
            let path = "/run/sandwire/sandwire.sock".into();
            let source = kind.into();
            cannot("list leases")(ClientError::Connect { path, source })
        };
        for (kind, code, exit_status) in [
            (io::ErrorKind::NotFound, ErrorCode::Unavailable, 2),
            (io::ErrorKind::ConnectionRefused, ErrorCode::Unavailable, 2),
            (io::ErrorKind::PermissionDenied, ErrorCode::Forbidden, 1),
            (io::ErrorKind::OutOfMemory, ErrorCode::Internal, 2),
        ] {
            let failure = failure(kind);
            assert_eq!((failure.code, failure.exit_status), (code, exit_status));
            assert!(
                failure
                    .message
                    .starts_with("cannot list leases: cannot connect")
            );
        }
    }
}

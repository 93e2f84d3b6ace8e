//! The way to the daemon: its client, with errors that say what to do.

use sandwire_api::client::{Blocking, ClientError};

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
        other => Failure::failed(format!("cannot {operation}: {other}")),
    }
}

//! Where the services log: standard error, which systemd keeps.

use std::io::{self, IsTerminal};

use tracing_subscriber::EnvFilter;

/// Logs to standard error from now on, as much as `SANDWIRE_LOG` says.
pub(crate) fn to_standard_error() {
    let filter = EnvFilter::try_from_env("SANDWIRE_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let set = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .try_init();
    if let Err(error) = set {
        tracing::debug!(error, "logging was set up before");
    }
}

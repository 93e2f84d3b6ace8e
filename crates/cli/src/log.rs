//! Where the services log: standard error, which systemd keeps. Of a service nobody has more than its
//! [share](shares).

mod shares;

use std::{
    env,
    io::{self, IsTerminal, Write},
};

use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat, ftruncate};
use tracing_subscriber::{EnvFilter, fmt::MakeWriter};

use self::shares::FairFormat;

/// Bytes of a file that nobody else looks after; beyond that it begins anew.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Logs to standard error from now on, as much as `SANDWIRE_LOG` says. One that is detached has a file of its own there, if any,
/// which mustn't grow for ever.
pub(crate) fn of_service(is_detached: bool) {
    if is_detached {
        fairly_to(|| OwnFile(io::stderr()));
    } else {
        fairly_to(io::stderr);
    }
}

fn fairly_to(writer: impl for<'writer> MakeWriter<'writer> + Send + Sync + 'static) {
    let lines = tracing_subscriber::fmt()
        .with_ansi(io::stderr().is_terminal())
        .with_env_filter(filter())
        .with_writer(writer);
    // The journal has times of its own.
    if env::var_os("JOURNAL_STREAM").is_some() {
        told(lines.event_format(FairFormat::without_time()).try_init());
    } else {
        told(lines.event_format(FairFormat::with_time()).try_init());
    }
}

fn filter() -> EnvFilter {
    EnvFilter::try_from_env("SANDWIRE_LOG").unwrap_or_else(|_| EnvFilter::new("info"))
}

fn told(set: Result<(), impl std::fmt::Display>) {
    if let Err(error) = set {
        tracing::debug!(%error, "logging was set up before");
    }
}

/// Standard error, begun anew where it is a file that has become long.
struct OwnFile(io::Stderr);

impl OwnFile {
    fn is_long(&self) -> io::Result<bool> {
        let found = fstat(&self.0)?;
        // Without `O_APPEND` the next line would be written where it would have been, behind a hole.
        Ok(
            FileType::from_raw_mode(found.st_mode) == FileType::RegularFile
                && u64::try_from(found.st_size).is_ok_and(|bytes| bytes > FILE_BYTES_MAX)
                && fcntl_getfl(&self.0)?.contains(OFlags::APPEND),
        )
    }
}

impl Write for OwnFile {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.is_long().unwrap_or(false) {
            ftruncate(&self.0, 0)?;
        }
        self.0.write(line)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

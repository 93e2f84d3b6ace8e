//! The CNI plugin: what a container runtime asks, said to the daemon.
//!
//! A runtime starts the executable once per operation, with the operation in environment variables
//! ([`Environment`]) and a network configuration on standard input; one JSON document comes back
//! ([docs/cni.md](../../../docs/cni.md)). A file per verb under `verb/`; `network` says which network is meant,
//! `wish` all that an `ADD` asks for, `answer` writes results in the version asked for, `lease_name` says which lease
//! is whose. Nothing here touches an interface: the daemon does, and remembers. There is one process per
//! container, so nothing is loaded or started that an operation doesn't need.

#![forbid(unsafe_code)]

mod answer;
mod environment;
mod error;
mod install;
mod lease_name;
mod network;
mod section;
mod verb;
mod version;
mod wish;

use std::{
    ffi::OsStr,
    io::{Read, Write},
    path::Path,
};

use serde_json::json;

pub use environment::Environment;
pub use error::{Error, InstallError};
pub use install::{Install, Installed, Placed, install};

use environment::Operation;
use network::Network;
use version::Version;

/// The name under which runtimes start the plugin: the `type` of a network configuration.
pub const PLUGIN_NAME: &str = "sandwire-cni";

/// Largest network configuration that is read. Those of a runtime have a few kilobytes; the list of valid
/// attachments of a `GC` has a hundred bytes for each container.
pub const INPUT_BYTES_MAX: u64 = 4 << 20;

/// Whether the executable was started under the plugin's name.
#[must_use]
pub fn is_plugin(argument_0: &OsStr) -> bool {
    Path::new(argument_0).file_name() == Some(OsStr::new(PLUGIN_NAME))
}

/// Carries out one operation and writes its answer. True if it succeeded: the exit status is 0 then, else 1.
pub fn run(environment: &Environment, input: impl Read, mut output: impl Write) -> bool {
    let mut version = Version::NEWEST;
    let (text, is_success) = match answer(environment, input, &mut version) {
        Ok(text) => (text, true),
        Err(error) => (error_document(&error, version), false),
    };
    // A runtime that doesn't get the answer will take the operation back.
    let written = output
        .write_all(text.as_bytes())
        .and_then(|()| output.flush());
    is_success && written.is_ok()
}

/// Understands an operation without carrying it out: what a fuzzer may do without a daemon.
///
/// # Errors
/// What [`run`] would answer before it asks the daemon.
pub fn understand(environment: &Environment, input: impl Read) -> Result<(), Error> {
    let operation = environment.operation()?;
    let text = read(input)?;
    if operation == Operation::Version {
        return verb::version::answer(&text).map(drop);
    }
    let network = Network::parse(&text)?;
    network.version.check(operation)?;
    match operation {
        Operation::Add => verb::add::wish(&network, &environment.attachment()?).map(drop),
        Operation::Check => {
            verb::check::expectation(&network, &environment.attachment()?).map(drop)
        }
        Operation::Del => environment.container().map(drop),
        Operation::Gc => verb::gc::valid_leases(&network).map(drop),
        Operation::Status | Operation::Version => Ok(()),
    }
}

fn answer(
    environment: &Environment,
    input: impl Read,
    version: &mut Version,
) -> Result<String, Error> {
    let operation = environment.operation()?;
    let text = read(input)?;
    if operation == Operation::Version {
        return verb::version::answer(&text);
    }
    let network = Network::parse(&text)?;
    *version = network.version;
    network.version.check(operation)?;
    match operation {
        Operation::Add => verb::add::run(&network, &environment.attachment()?),
        Operation::Del => verb::del::run(&network, &environment.container()?),
        Operation::Check => verb::check::run(&network, &environment.attachment()?),
        Operation::Gc => verb::gc::run(&network),
        Operation::Status | Operation::Version => verb::status::run(&network),
    }
}

fn read(input: impl Read) -> Result<Vec<u8>, Error> {
    let mut text = Vec::new();
    input
        .take(INPUT_BYTES_MAX + 1)
        .read_to_end(&mut text)
        .map_err(|source| Error::Input { source })?;
    if text.len() as u64 > INPUT_BYTES_MAX {
        return Err(Error::TooLong);
    }
    Ok(text)
}

fn error_document(error: &Error, version: Version) -> String {
    let document = json!({
        "cniVersion": version.as_str(),
        "code": error.code(),
        "msg": error.title(),
        "details": error.to_string(),
    });
    format!("{document:#}\n")
}

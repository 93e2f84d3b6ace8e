//! `sandwire lab exec`: this process becomes a command in a host of a lab.

use std::{
    ffi::OsString,
    fs::{self, OpenOptions},
    io::{self, Write},
    os::unix::{fs::OpenOptionsExt, process::CommandExt},
    path::Path,
    process::Command,
};

use clap::Args;
use sandwire_api::name::Name;
use sandwire_impair_host::lab::{self, Found, namespace_path};

use super::{failure, only};
use crate::{
    failure::{Failure, Outcome},
    output::note,
    verb::run::enter,
};

const HOSTS: &str = "/etc/hosts";

/// Command line of `sandwire lab exec`.
#[derive(Debug, Args)]
#[command(
    after_help = "The command finds the other hosts of the lab by their names, in an /etc/hosts of its own. Its exit \
    status is ours: sandwire lab exec client -- ping server"
)]
pub(crate) struct Arguments {
    /// Name of the host.
    host: Name,

    /// Name of the lab, if several are up.
    #[arg(long, value_name = "NAME")]
    lab: Option<Name>,

    /// Command and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

pub(super) fn run(arguments: &Arguments) -> Outcome {
    let (program, rest) = arguments
        .command
        .split_first()
        .ok_or_else(|| Failure::refused("cannot exec: no command is given"))?;
    let lab = find(arguments)?;
    let host = &arguments.host;
    let path = namespace_path(&lab.name, host);
    let shown = program.to_string_lossy();
    super::require_privilege(&format!("run {shown} in host {host} of lab {}", lab.name))?;
    enter::enter(&path.to_string_lossy()).map_err(|error| {
        let message = format!(
            "cannot run {shown} in host {host} of lab {}: {error}",
            lab.name
        );
        Failure::failed(message)
    })?;
    if let Err(error) = add_names(&lab.hosts_text(host)) {
        note(&format!(
            "cannot add the hosts of the lab to {HOSTS}: {error}; use addresses"
        ));
    }
    // Returns only if it failed.
    let error = Command::new(program).args(rest).exec();
    Err(Failure {
        exit_status: if error.kind() == io::ErrorKind::NotFound {
            127
        } else {
            126
        },
        ..Failure::failed(format!("cannot run {shown}: {error}"))
    })
}

/// The lab that has the host.
fn find(arguments: &Arguments) -> Result<Found, Failure> {
    let labs = lab::list().map_err(failure)?;
    let lab = match &arguments.lab {
        Some(name) => {
            let found = labs.into_iter().find(|lab| lab.name == *name);
            let lab = name.clone();
            found.ok_or_else(|| failure(lab::LabError::Missing { lab }))?
        }
        None => only(labs)?,
    };
    if lab.hosts.iter().any(|host| host.name == arguments.host) {
        return Ok(lab);
    }
    let known: Vec<&str> = lab.hosts.iter().map(|host| host.name.as_str()).collect();
    Err(Failure::refused(format!(
        "lab {} has no host '{}'; it has {}",
        lab.name,
        arguments.host,
        known.join(", ")
    )))
}

/// Mounts a copy of the hosts file with the lab's names at its end, in the mount namespace that we have entered.
fn add_names(names: &str) -> io::Result<()> {
    let path = format!("/run/sandwire-lab-hosts.{}", std::process::id());
    let text = format!("{}\n{names}", fs::read_to_string(HOSTS)?);
    // Of a process of our number that has been killed.
    let _ = fs::remove_file(&path);
    let mounted = write_new(Path::new(&path), &text)
        .and_then(|()| rustix::mount::mount_bind(&*path, HOSTS).map_err(io::Error::from));
    // The mount keeps the file.
    let _ = fs::remove_file(&path);
    mounted
}

fn write_new(path: &Path, text: &str) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o644)
        .open(path)?;
    file.write_all(text.as_bytes())
}

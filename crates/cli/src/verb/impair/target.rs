//! Which interface is meant.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use sandwire_impair_host::{
    control::{Client, Side, Target},
    interfaces_of, own_namespace,
};

use super::service;
use crate::{failure::Failure, privilege};

/// Which interface.
#[derive(Clone, Debug, Args)]
#[group(id = "which")]
pub(crate) struct Which {
    /// In the network namespace of this process, as of a container.
    #[arg(long, value_name = "PID", conflicts_with = "netns")]
    pid: Option<u32>,

    /// In this network namespace: a file, or a name that `ip netns` knows.
    #[arg(long, value_name = "PATH")]
    netns: Option<PathBuf>,

    /// Name of the interface; with --pid or --netns, without it, the only one there is beside the loopback.
    #[arg(long, value_name = "NAME")]
    interface: Option<String>,

    /// Whose end it is, which says what egress and ingress are [default: the sandbox's with --pid or --netns, else the host's].
    #[arg(long, value_enum, value_name = "WHOSE")]
    side: Option<SideArgument>,
}

/// Whose end an interface is.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum SideArgument {
    /// The sandbox's own: it sends what leaves the sandbox.
    Sandbox,
    /// The one that leads to the sandbox: it receives what leaves the sandbox.
    Host,
}

impl Which {
    /// Whether anything is named.
    pub(super) fn is_given(&self) -> bool {
        self.pid.is_some() || self.netns.is_some() || self.interface.is_some()
    }

    /// The interface that is meant, as the service is to be told of it.
    pub(super) fn target_for(&self, client: &mut Client) -> Result<Target, Failure> {
        let mut target = self.target()?;
        if target.netns.is_none() {
            let of_service = client.hello().map_err(service::failure)?.netns_inode;
            let cannot = |error| Failure::refused(format!("cannot {error}"));
            target.netns = own_namespace(of_service).map_err(cannot)?;
        }
        Ok(target)
    }

    /// The interface that is meant; without a namespace in that of this process.
    pub(super) fn target(&self) -> Result<Target, Failure> {
        let netns = namespace_of(self.pid, self.netns.as_deref());
        let interface = match (&self.interface, &netns) {
            (Some(name), _) => name.clone(),
            (None, Some(netns)) => only_interface(netns)?,
            (None, None) => {
                let message = "say which interface: --interface NAME, --pid PID or --netns PATH";
                return Err(Failure::refused(message));
            }
        };
        let side = match self.side {
            Some(SideArgument::Sandbox) => Side::Sandbox,
            Some(SideArgument::Host) => Side::Host,
            None if netns.is_some() => Side::Sandbox,
            None => Side::Host,
        };
        Ok(Target {
            netns,
            interface,
            side,
        })
    }
}

/// File of the network namespace that is meant; none for that of this process.
pub(super) fn namespace_of(pid: Option<u32>, netns: Option<&Path>) -> Option<PathBuf> {
    if let Some(pid) = pid {
        return Some(PathBuf::from(format!("/proc/{pid}/ns/net")));
    }
    let netns = netns?;
    // A name, as `ip netns` has it, is no path.
    let is_name = netns.components().count() == 1 && !netns.exists();
    Some(if is_name {
        Path::new("/run/netns").join(netns)
    } else {
        std::path::absolute(netns).unwrap_or_else(|_| netns.to_owned())
    })
}

fn only_interface(netns: &Path) -> Result<String, Failure> {
    let cannot = |error: sandwire_impair_host::Error| {
        let message = format!("cannot find the interface: {error}");
        Failure::refused(privilege::advise(message, &error))
    };
    let mut names = interfaces_of(netns).map_err(cannot)?;
    if names.len() == 1 {
        return Ok(names.remove(0));
    }
    let known = if names.is_empty() {
        "none beside the loopback".to_owned()
    } else {
        names.join(", ")
    };
    let place = netns.display();
    Err(Failure::refused(format!(
        "cannot tell which interface of {place} is meant: there are {known}; name one with --interface"
    )))
}

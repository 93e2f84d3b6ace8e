//! What can go wrong between the data path and the kernel.

use std::{io, path::PathBuf};

/// Why something of the data path failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// eBPF is missing on this host, or forbidden to this process.
    #[error("eBPF can't be used here: {reason}; {remedy}")]
    Unsupported {
        /// What is missing.
        reason: String,
        /// What to do.
        remedy: &'static str,
    },
    /// There is no bpffs where pins would live.
    #[error("{folder} is not on a bpffs; {remedy}", folder = .folder.display())]
    NoBpffs {
        /// Where it should have been.
        folder: PathBuf,
        /// What to do.
        remedy: &'static str,
    },
    /// A setting out of range.
    #[error("{name} is {value}; possible is {least} to {most}")]
    Setting {
        /// Which one.
        name: &'static str,
        /// What it said.
        value: u32,
        /// The least that is possible.
        least: u32,
        /// The most that is possible.
        most: u32,
    },
    /// The programs don't load.
    #[error("cannot load {object}: {source}")]
    Load {
        /// Which of the compiled objects.
        object: &'static str,
        /// Why, with what the verifier says.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A system call failed.
    #[error("cannot {operation} {object}: {source}")]
    System {
        /// What was tried.
        operation: &'static str,
        /// On what.
        object: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Netlink refused.
    #[error(transparent)]
    Kernel(#[from] sandwire_kernel_net::Error),
    /// A clone address is in use already.
    #[error("{address} is the clone address of {owner} already")]
    AddressTaken {
        /// The address.
        address: std::net::IpAddr,
        /// Whose it is.
        owner: crate::NicIndex,
    },
    /// An uplink where XDP would send frames into nothing.
    #[error(
        "uplink {interface}: its driver takes no frames from XDP, not even with a program of its own in place; of a veth, \
         its other end needs a program too, or GRO (ethtool -K PEER gro on)"
    )]
    TakesNoFrames {
        /// The uplink's name.
        interface: String,
    },
    /// No room in a map whose size was set at the start.
    #[error("the map {map} is full ({entries} entries): {}", advice(map))]
    Full {
        /// Which map.
        map: &'static str,
        /// Its size.
        entries: u32,
    },
}

/// What to do when a map is full. Those that no word is said of have room for as many as there are interfaces.
fn advice(map: &str) -> &'static str {
    match map {
        "policies" => {
            "have leases and pools share policies, which are kept once, or raise nics_max, to which this map's size is in \
             proportion, and restart the daemon"
        }
        "prefixes" => {
            "take prefixes out of policies, or have leases and pools share policies, which are kept once"
        }
        "rule_lists" => {
            "take prefixes with rules of their own out of policies, or have leases and pools share policies, which are kept once"
        }
        "group_pairs" => {
            "have sandboxes that may all talk to each other share a group, with clone_to_clone, or take groups out of talks_to"
        }
        "uplinks" => "name fewer interfaces in the daemon's setting uplinks",
        _ => {
            "raise nics_max in the daemon's configuration and restart it, or make pools smaller and release leases"
        }
    }
}

impl Error {
    /// Whether somebody else has the place, and may leave it.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        // The second is said of another mode of XDP.
        let busy = [libc::EBUSY, libc::EEXIST];
        let code = match self {
            Self::System { source, .. } => source.raw_os_error(),
            _ => None,
        };
        code.is_some_and(|code| busy.contains(&code))
    }

    pub(crate) fn system(
        operation: &'static str,
        object: impl Into<String>,
        source: io::Error,
    ) -> Self {
        Self::System {
            operation,
            object: object.into(),
            source,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pins::MAPS;

    #[test]
    fn a_full_map_is_told_with_what_to_do() {
        let text = |map| Error::Full { map, entries: 64 }.to_string();
        assert_eq!(
            text("nics"),
            "the map nics is full (64 entries): raise nics_max in the daemon's configuration and restart it, or make pools \
             smaller and release leases"
        );
        for map in [
            "policies",
            "prefixes",
            "rule_lists",
            "group_pairs",
            "uplinks",
        ] {
            let is_one = MAPS.iter().any(|(known, _, _)| *known == map);
            assert!(is_one, "there is no map {map}");
            let text = text(map);
            assert!(!text.ends_with(advice("nics")), "{text}");
        }
    }
}

//! Why a target is not impaired, or not any more.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::control::{Owner, RefusalCode, Target};

/// What can go wrong with a target.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Its namespace can't be had.
    #[error("open the network namespace {path}: {}", reason(path, source))]
    Namespace {
        /// Its file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Nor entered.
    #[error(
        "enter the target's network namespace: {source}; the service needs CAP_SYS_ADMIN for that"
    )]
    Enter {
        /// What the kernel said.
        source: io::Error,
    },
    /// The caller's own namespace can't be named to the service.
    #[error(
        "name the network namespace of this process to the impairment service, which runs in another: it has no name under \
         /run/netns; say which one is meant by --pid PID, of a process that stays in it, or by --netns PATH"
    )]
    Nameless,
    /// There is no such interface.
    #[error("impair {target}: there is no such interface; `ip link` lists them")]
    NoInterface {
        /// Which.
        target: Target,
    },
    /// It is of a kind that can't be impaired.
    #[error("impair {target}: {reason}")]
    Unfit {
        /// Which.
        target: Target,
        /// Why not.
        reason: String,
    },
    /// Its default route is that of the machine.
    #[error(
        "impair {target}: the machine's own default route leads through it{through}, so the machine would lose its \
         connection with it; name the interface of a sandbox, or insist with --force"
    )]
    DefaultRoute {
        /// Which.
        target: Target,
        /// By way of which other interface, if by one.
        through: String,
    },
    /// Another process diverts it.
    #[error(
        "impair {target}: another process diverts its packets already (it has {tap}); end that first"
    )]
    Diverted {
        /// Which.
        target: Target,
        /// The interface by which that is seen.
        tap: String,
    },
    /// Somebody else impairs it.
    #[error("impair {target}: {owner} impairs it; have that cleared first, or insist with --force")]
    Owned {
        /// Which.
        target: Target,
        /// Who.
        owner: Owner,
    },
    /// It is about to end.
    #[error(
        "impair {target}: an earlier impairment is ending and its packets are still under way; try again"
    )]
    Draining {
        /// Which.
        target: Target,
    },
    /// All are.
    #[error("impair {target}: the service is ending; try again")]
    Ending {
        /// Which.
        target: Target,
    },
    /// Nobody waits for the answer any more.
    #[error(
        "change what happens to {target}: whoever asked for it has given up; nothing has changed"
    )]
    Left {
        /// Which.
        target: Target,
    },
    /// Too many wait for packets under way.
    #[error(
        "wait for the packets of {target}: those of as many others as possible are waited for, of user {} or of all; \
         try again, or have them dropped with --flush", owner.uid()
    )]
    Waiting {
        /// Which.
        target: Target,
        /// On whose behalf it is impaired.
        owner: Owner,
    },
    /// Frames of it don't fit.
    #[error(
        "impair {target}: its MTU is {mtu}, and the engine takes frames of at most {frame_bytes_max} bytes; start the \
         service with a larger --frame-bytes-max"
    )]
    Mtu {
        /// Which.
        target: Target,
        /// Its MTU.
        mtu: u32,
        /// What the engine takes.
        frame_bytes_max: u16,
    },
    /// There are too many.
    #[error(
        "impair {target}: there are {count} targets already, as many as the service may have (--targets-max)"
    )]
    Full {
        /// Which.
        target: Target,
        /// How many there are.
        count: usize,
    },
    /// Impairments that aren't root's take too much.
    #[error(
        "impair {target}: with it the impairments of {whose} would take {bytes} bytes, as JSON and of each interface for itself, and \
         these may take {max}; clear others, or send shorter traces and lists"
    )]
    Room {
        /// Which.
        target: Target,
        /// Of one user, or of all of them.
        whose: String,
        /// What they would take.
        bytes: usize,
        /// What they may.
        max: usize,
    },
    /// The impairment can't be carried out.
    #[error("impair {target}: {reason}")]
    Impairment {
        /// Which.
        target: Target,
        /// Why not.
        reason: String,
    },
    /// The engine's thread has ended.
    #[error("an engine of the service has failed and is being started anew; try again")]
    EngineGone,
    /// The kernel refused.
    #[error(transparent)]
    Kernel(#[from] sandwire_kernel_net::Error),
    /// eBPF can't be used.
    #[error(transparent)]
    Datapath(#[from] sandwire_datapath::Error),
    /// The target can't be remembered.
    #[error("{operation} {path}: {source}")]
    State {
        /// What was tried.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

/// What is wrong with the file of a namespace, in the words of who named a process or a namespace.
fn reason(path: &Path, source: &io::Error) -> String {
    if source.kind() != io::ErrorKind::NotFound {
        return source.to_string();
    }
    let process = path.strip_prefix("/proc").ok();
    let process = process.and_then(|rest| rest.components().next());
    match process {
        Some(process) => {
            let number = process.as_os_str().display();
            format!("there is no process {number}; `ps` lists them")
        }
        None if path.starts_with("/run/netns") => {
            "there is none of that name; `ip netns` lists them".to_owned()
        }
        None => source.to_string(),
    }
}

/// An error with all its causes.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}

impl Error {
    /// What the one who asked is told.
    pub(crate) fn code(&self) -> RefusalCode {
        match self {
            Self::Namespace { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                RefusalCode::NotFound
            }
            Self::Namespace { source, .. } if source.kind() == io::ErrorKind::InvalidInput => {
                RefusalCode::Invalid
            }
            Self::NoInterface { .. } => RefusalCode::NotFound,
            Self::Unfit { .. } | Self::Mtu { .. } | Self::Impairment { .. } | Self::Nameless => {
                RefusalCode::Invalid
            }
            Self::DefaultRoute { .. } => RefusalCode::DefaultRoute,
            Self::Diverted { .. } | Self::Owned { .. } | Self::Draining { .. } => {
                RefusalCode::InUse
            }
            Self::Full { .. } | Self::Waiting { .. } | Self::Room { .. } => RefusalCode::Full,
            Self::Namespace { .. }
            | Self::Enter { .. }
            | Self::EngineGone
            | Self::Ending { .. }
            | Self::Left { .. }
            | Self::Kernel(_)
            | Self::Datapath(_)
            | Self::State { .. } => RefusalCode::Failed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_or_namespace_that_is_missing_is_named_as_such() {
        let said = |path: &str| {
            let error = Error::Namespace {
                path: PathBuf::from(path),
                source: io::ErrorKind::NotFound.into(),
            };
            error.to_string()
        };
        assert!(said("/proc/4711/ns/net").ends_with("there is no process 4711; `ps` lists them"));
        assert!(said("/run/netns/zzz").ends_with("`ip netns` lists them"));
        assert!(said("/tmp/zzz").starts_with("open the network namespace /tmp/zzz: "));
    }
}

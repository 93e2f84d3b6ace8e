//! The service as a process: what it is told at its start.

use std::{path::PathBuf, time::Duration};

use crate::limits::Limits;

/// What the service is told at its start.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where its control socket and its memory are; made if it isn't there.
    pub folder: PathBuf,
    /// Threads that serve vhost-user guests; as many as processors, up to four, without.
    pub threads: Option<usize>,
    /// User and group to become after the start. Without, it stays who it is.
    pub user: Option<(u32, u32)>,
    /// How long a worker looks for work before it sleeps.
    pub busy_poll: Duration,
    /// Bytes that all guests may have buffered together.
    pub total_bytes: u64,
    /// Which system calls are refused once everything is open.
    pub seccomp: Seccomp,
}

/// What happens upon a system call that the service has no use for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Seccomp {
    /// All are allowed.
    Off,
    /// It fails with EPERM.
    #[default]
    Refuse,
    /// The process is killed.
    Kill,
}

impl Settings {
    /// What is usual, in that folder.
    #[must_use]
    pub fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            threads: None,
            user: None,
            busy_poll: Duration::ZERO,
            total_bytes: Limits::default().total_bytes,
            seccomp: Seccomp::default(),
        }
    }
}

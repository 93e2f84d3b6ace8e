//! What can go wrong between us and the kernel.

use std::io;

/// A kernel operation on a named object that failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed, or netlink refused without saying why.
    #[error("cannot {operation} {object}: {source}")]
    System {
        /// What was tried: `create`, `mount`.
        operation: &'static str,
        /// Kind and name of the object: `interface uplink0`.
        object: String,
        /// The kernel's error number.
        source: io::Error,
    },
    /// Netlink refused and said why.
    #[error("cannot {operation} {object}: {source} ({explanation})")]
    Refused {
        /// What was tried.
        operation: &'static str,
        /// Kind and name of the object.
        object: String,
        /// The kernel's error number.
        source: io::Error,
        /// The kernel's own words, from its extended acknowledgement.
        explanation: String,
    },
    /// The kernel's answer could not be understood.
    #[error("cannot {operation} {object}: the kernel's answer is malformed")]
    Malformed {
        /// What was tried.
        operation: &'static str,
        /// Kind and name of the object.
        object: String,
    },
}

impl Error {
    pub(crate) fn system(
        operation: &'static str,
        object: impl Into<String>,
        source: impl Into<io::Error>,
    ) -> Self {
        Self::System {
            operation,
            object: object.into(),
            source: source.into(),
        }
    }

    /// An interface that should have been there.
    #[must_use]
    pub fn missing_interface(name: &str) -> Self {
        let missing = io::Error::from_raw_os_error(libc::ENODEV);
        Self::system("find", format!("interface {name}"), missing)
    }

    /// What was tried, and on what.
    #[must_use]
    pub fn subject(&self) -> (&'static str, &str) {
        match self {
            Self::System {
                operation, object, ..
            }
            | Self::Refused {
                operation, object, ..
            }
            | Self::Malformed { operation, object } => (operation, object),
        }
    }

    /// The error without operation and object, for callers that name these themselves.
    #[must_use]
    pub fn into_cause(self) -> Cause {
        match self {
            Self::System { source, .. } => Cause {
                source,
                explanation: None,
            },
            Self::Refused {
                source,
                explanation,
                ..
            } => Cause {
                source,
                explanation: Some(explanation),
            },
            Self::Malformed { .. } => Cause {
                source: io::Error::other("the kernel's answer is malformed"),
                explanation: None,
            },
        }
    }

    /// The kernel's error number, if it gave one.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::System { source, .. } | Self::Refused { source, .. } => source.raw_os_error(),
            Self::Malformed { .. } => None,
        }
    }

    /// Whether the object that was named does not exist.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        matches!(
            self.errno(),
            Some(libc::ENOENT | libc::ENODEV | libc::ESRCH | libc::EADDRNOTAVAIL | libc::ENXIO)
        )
    }

    /// Whether the object exists already.
    #[must_use]
    pub fn is_existing(&self) -> bool {
        self.errno() == Some(libc::EEXIST)
    }

    /// Whether a key of a map of nftables leads elsewhere already, by what kernels say of it.
    #[must_use]
    pub fn is_clash(&self) -> bool {
        matches!(self.errno(), Some(libc::EEXIST | libc::EBUSY))
    }
}

/// The kernel's reason alone.
#[derive(Debug, thiserror::Error)]
#[error("{source}{}", .explanation.as_ref().map(|text| format!(" ({text})")).unwrap_or_default())]
pub struct Cause {
    source: io::Error,
    explanation: Option<String>,
}

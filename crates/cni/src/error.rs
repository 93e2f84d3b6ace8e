//! Why an operation was not done, with the specification's code for it.

use std::{io, path::PathBuf};

use sandwire_api::{client::ClientError, error::ErrorCode, name::Name};

/// Why an operation was not done. The text is for people and names what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration is of a version that the plugin doesn't speak, or that lacks the operation.
    #[error("{reason}")]
    IncompatibleVersion {
        /// Which, and which would do.
        reason: String,
    },
    /// A key that the plugin doesn't know, or can't do what it asks for.
    #[error("{key} = {value}: {reason}")]
    UnsupportedField {
        /// Its place in the configuration.
        key: String,
        /// Its value as JSON, cut to a printable length.
        value: String,
        /// Why, and what to do instead.
        reason: String,
    },
    /// The container, or its namespace, is not there.
    #[error("{reason}")]
    UnknownContainer {
        /// What is missing.
        reason: String,
    },
    /// An environment variable is missing or wrong.
    #[error("{variable}: {reason}")]
    InvalidEnvironment {
        /// Its name.
        variable: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// Standard input can't be read.
    #[error("cannot read the network configuration from standard input: {source}")]
    Input {
        /// The system's reason.
        source: io::Error,
    },
    /// The configuration is no JSON object.
    #[error("cannot decode the network configuration: {reason}")]
    Undecodable {
        /// Where and why.
        reason: String,
    },
    /// The configuration is longer than [`INPUT_BYTES_MAX`](crate::INPUT_BYTES_MAX).
    #[error(
        "cannot decode the network configuration: it is longer than {} bytes",
        crate::INPUT_BYTES_MAX
    )]
    TooLong,
    /// A key of the configuration is missing or wrong.
    #[error("{key}: {reason}")]
    InvalidConfig {
        /// Its place in the configuration.
        key: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The daemon can't do what the configuration asks for.
    #[error("cannot {operation}: {source}")]
    Unfit {
        /// What was asked of it.
        operation: String,
        /// What came back.
        source: ClientError,
    },
    /// The daemon is not there, or not able right now.
    #[error("cannot {operation}: {source}")]
    TryAgain {
        /// What was asked of it.
        operation: String,
        /// What came back.
        source: ClientError,
    },
    /// `STATUS`: nothing can be added.
    #[error("{reason}")]
    Unavailable {
        /// Why.
        reason: String,
    },
    /// `STATUS`: nothing can be added, and what was added may lack its network.
    #[error("{reason}")]
    Impaired {
        /// Why.
        reason: String,
    },
    /// The daemon refused.
    #[error("cannot {operation}: {source}")]
    Refused {
        /// What was asked of it.
        operation: String,
        /// What came back.
        source: ClientError,
    },
    /// The daemon failed, or its answer was not understood.
    #[error("cannot {operation}: {source}")]
    Failed {
        /// What was asked of it.
        operation: String,
        /// What came back.
        source: ClientError,
    },
    /// `ADD` of what has been added.
    #[error(
        "interface {interface} of container {container} was added already, as lease {lease}: a DEL has \
         to come first"
    )]
    AddedAlready {
        /// Id of the container.
        container: String,
        /// Name of the interface.
        interface: String,
        /// The lease that holds its slot.
        lease: Name,
    },
    /// `CHECK`: something is not as `ADD` left it.
    #[error("{}", .differences.join("; "))]
    Differs {
        /// What, one by one.
        differences: Vec<String>,
    },
    /// Several leases could not be released.
    #[error("{}", .problems.join("; "))]
    Incomplete {
        /// Which, and why.
        problems: Vec<String>,
    },
}

/// Why the plugin was not installed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {operation} {}: {source}", path.display())]
pub struct InstallError {
    /// What was being done.
    pub operation: &'static str,
    /// To what.
    pub path: PathBuf,
    /// The system's reason.
    pub source: io::Error,
}

impl Error {
    /// The specification's code; from 100 on our own.
    #[must_use]
    pub fn code(&self) -> u32 {
        match self {
            Self::IncompatibleVersion { .. } => 1,
            Self::UnsupportedField { .. } => 2,
            Self::UnknownContainer { .. } => 3,
            Self::InvalidEnvironment { .. } => 4,
            Self::Input { .. } => 5,
            Self::Undecodable { .. } | Self::TooLong => 6,
            Self::InvalidConfig { .. } | Self::Unfit { .. } => 7,
            Self::TryAgain { .. } => 11,
            Self::Unavailable { .. } => 50,
            Self::Impaired { .. } => 51,
            Self::Refused { .. } => 100,
            Self::Failed { .. } => 101,
            Self::AddedAlready { .. } => 102,
            Self::Differs { .. } => 103,
            Self::Incomplete { .. } => 104,
        }
    }

    /// The code in words.
    #[must_use]
    pub fn title(&self) -> &'static str {
        match self {
            Self::IncompatibleVersion { .. } => "incompatible CNI version",
            Self::UnsupportedField { .. } => "unsupported field in the network configuration",
            Self::UnknownContainer { .. } => "unknown container",
            Self::InvalidEnvironment { .. } => "invalid environment variable",
            Self::Input { .. } => "I/O failure",
            Self::Undecodable { .. } | Self::TooLong => "undecodable network configuration",
            Self::InvalidConfig { .. } | Self::Unfit { .. } => "invalid network configuration",
            Self::TryAgain { .. } => "try again later",
            Self::Unavailable { .. } => "the plugin is not available",
            Self::Impaired { .. } => {
                "the plugin is not available, and containers may have limited connectivity"
            }
            Self::Refused { .. } => "the daemon refused",
            Self::Failed { .. } => "the daemon failed",
            Self::AddedAlready { .. } => "added already",
            Self::Differs { .. } => "not as it was added",
            Self::Incomplete { .. } => "not all stale leases are released",
        }
    }

    /// What a failed request comes to.
    pub(crate) fn of_client(operation: impl Into<String>, source: ClientError) -> Self {
        let operation = operation.into();
        let is_transient = match &source {
            ClientError::Connect { source, .. } => source.kind() != io::ErrorKind::PermissionDenied,
            ClientError::Transport { .. } => true,
            ClientError::Api(error) => {
                matches!(error.code, ErrorCode::Unavailable | ErrorCode::PoolEmpty)
            }
            ClientError::Decode { .. } => false,
        };
        if is_transient {
            return Self::TryAgain { operation, source };
        }
        match source.code() {
            Some(ErrorCode::Internal) => Self::Failed { operation, source },
            None if matches!(source, ClientError::Decode { .. }) => {
                Self::Failed { operation, source }
            }
            _ => Self::Refused { operation, source },
        }
    }
}

//! What the daemon answers when it doesn't do what it was asked.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of every answer with a status of 400 or more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// Stable word for programs.
    pub code: ErrorCode,
    /// A sentence for people: operation, object, cause, and what to do.
    pub message: String,
    /// Field of the request whose value is refused, if a single one is to blame. The message has it as `FIELD = VALUE`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "attach.netns")]
    pub field: Option<String>,
    /// Number of the request, as in the daemon's log.
    pub request_id: String,
}

/// Stable words for what went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The request is malformed or names impossible values. Nothing changed.
    InvalidRequest,
    /// The caller may not do that. Nothing changed.
    Forbidden,
    /// There is no such pool, lease or published port for this caller.
    NotFound,
    /// The name, address or port is taken, or there is no room left for what is asked. Nothing changed.
    Conflict,
    /// The pool has no ready slot right now; it is being filled: try again.
    PoolEmpty,
    /// The pool's address plan has no number left: release leases, or enlarge the prefix.
    PoolExhausted,
    /// This version, or this host, can't do that.
    Unsupported,
    /// The kernel or the state folder failed. The message says how.
    Internal,
    /// The daemon is starting or stopping: try again.
    Unavailable,
}

impl ErrorCode {
    /// Every code.
    pub const ALL: [Self; 9] = [
        Self::InvalidRequest,
        Self::Forbidden,
        Self::NotFound,
        Self::Conflict,
        Self::PoolEmpty,
        Self::PoolExhausted,
        Self::Unsupported,
        Self::Internal,
        Self::Unavailable,
    ];

    /// The word, as in the JSON.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request",
            Self::Forbidden => "forbidden",
            Self::NotFound => "not_found",
            Self::Conflict => "conflict",
            Self::PoolEmpty => "pool_empty",
            Self::PoolExhausted => "pool_exhausted",
            Self::Unsupported => "unsupported",
            Self::Internal => "internal",
            Self::Unavailable => "unavailable",
        }
    }

    /// Whether the request was refused before anything changed, as opposed to having failed.
    #[must_use]
    pub fn is_refusal(self) -> bool {
        !matches!(self, Self::Internal | Self::Unavailable | Self::PoolEmpty)
    }
}

/// Why a text is not an Ethernet address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is not an Ethernet address: write six hexadecimal pairs, as 06:00:ac:10:00:02")]
pub struct ParseMacError {
    /// What was given, cut to a printable length.
    pub text: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_of_a_code_is_the_one_in_the_json() {
        for code in ErrorCode::ALL {
            let json = serde_json::to_value(code).unwrap();
            assert_eq!(json.as_str(), Some(code.as_str()));
        }
    }
}

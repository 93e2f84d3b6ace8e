//! What a daemon and a client of different versions don't know of each other is told as that.

use super::{Client, ClientError};
use crate::{
    error::{ApiError, ErrorCode},
    health::Health,
};

pub(super) const OWN_VERSION: &str = env!("CARGO_PKG_VERSION");
/// What the daemon says of keys, words, paths and methods that it doesn't know.
const UNKNOWN: [&str; 5] = [
    "unknown field",
    "missing field",
    "unknown variant",
    "there is no path",
    "has no method",
];

impl Client {
    /// The error with the versions of both sides, if they differ and that may be its cause.
    pub(super) async fn with_versions(&self, mut error: ClientError) -> ClientError {
        if !is_misunderstanding(&error) {
            return error;
        }
        let Ok(Health { version, .. }) = self.health().await else {
            return error;
        };
        if version != OWN_VERSION
            && let ClientError::Api(ApiError { message: text, .. })
            | ClientError::Decode { reason: text, .. } = &mut error
        {
            text.push_str(&format!(
                "; the daemon is of version {version} and this program of {OWN_VERSION}: install the same, and restart \
                 the daemon"
            ));
        }
        error
    }
}

/// Whether one side doesn't know what the other said.
fn is_misunderstanding(error: &ClientError) -> bool {
    match error {
        ClientError::Api(error) => {
            let message = &error.message;
            matches!(error.code, ErrorCode::InvalidRequest | ErrorCode::NotFound)
                && UNKNOWN.iter().any(|words| message.contains(words))
        }
        ClientError::Decode { .. } => true,
        ClientError::Connect { .. } | ClientError::Transport { .. } => false,
    }
}

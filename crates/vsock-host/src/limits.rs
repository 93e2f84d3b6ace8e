//! What bounds a guest, whatever it advertises or sends.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Bounds of one guest, and of all together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Connections of one guest, both directions together, those being opened included.
    pub connections: u32,
    /// Connections that a guest may open per second; as many again at once.
    pub connects_per_second: u32,
    /// Bytes that may wait in one connection for the side that doesn't take them; the most `buf_alloc` that
    /// the guest is told.
    pub connection_bytes: u32,
    /// The same for all connections of a guest. When half of it is promised, new connections get less each.
    pub guest_bytes: u64,
    /// The same for all guests.
    pub total_bytes: u64,
    /// Longest SEQPACKET message.
    pub message_bytes: u32,
    /// How long a connection may take to be opened.
    pub connect_timeout: Duration,
    /// How long the guest may take to confirm a shutdown.
    pub shutdown_timeout: Duration,
    /// How long a client of the host may take to say `CONNECT PORT\n`.
    pub handshake_timeout: Duration,
    /// Clients of the host that are in their handshake at once, per guest.
    pub handshakes: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 4096,
            connects_per_second: 2000,
            connection_bytes: 1024 * 1024,
            guest_bytes: 64 * 1024 * 1024,
            total_bytes: 2 * 1024 * 1024 * 1024,
            message_bytes: 256 * 1024,
            connect_timeout: Duration::from_secs(5),
            shutdown_timeout: Duration::from_secs(8),
            handshake_timeout: Duration::from_secs(2),
            handshakes: 64,
        }
    }
}

/// Why limits aren't taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{limit} is {value}, and has to be {least} at least")]
pub struct LimitsError {
    limit: &'static str,
    value: u64,
    least: u64,
}

impl Limits {
    /// Whether a guest could do anything within them.
    ///
    /// # Errors
    /// The first that is too low.
    pub fn check(&self) -> Result<(), LimitsError> {
        let milliseconds =
            |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        for (limit, value, least) in [
            ("connections", self.connections.into(), 1),
            ("connects_per_second", self.connects_per_second.into(), 1),
            ("connection_bytes", self.connection_bytes.into(), 4096),
            (
                "guest_bytes",
                self.guest_bytes,
                self.connection_bytes.into(),
            ),
            ("message_bytes", self.message_bytes.into(), 1),
            (
                "connect_timeout in milliseconds",
                milliseconds(self.connect_timeout),
                1,
            ),
            (
                "shutdown_timeout in milliseconds",
                milliseconds(self.shutdown_timeout),
                1,
            ),
            (
                "handshake_timeout in milliseconds",
                milliseconds(self.handshake_timeout),
                1,
            ),
            ("handshakes", self.handshakes.into(), 1),
        ] {
            if value < least {
                return Err(LimitsError {
                    limit,
                    value,
                    least,
                });
            }
        }
        Ok(())
    }
}

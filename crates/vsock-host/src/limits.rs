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
    /// The same for all guests. What counts is the service's own setting (`--total-bytes`), which the daemon
    /// gives it from here.
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

impl LimitsError {
    /// The limit that is too low, as it is written in the daemon's configuration.
    #[must_use]
    pub const fn limit(&self) -> &'static str {
        self.limit
    }
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
            ("total_bytes", self.total_bytes, self.guest_bytes),
            ("message_bytes", self.message_bytes.into(), 1),
            ("connect_timeout_ms", milliseconds(self.connect_timeout), 1),
            (
                "shutdown_timeout_ms",
                milliseconds(self.shutdown_timeout),
                1,
            ),
            (
                "handshake_timeout_ms",
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

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(limits: &Limits) -> (&'static str, String) {
        let error = limits.check().unwrap_err();
        (error.limit(), error.to_string())
    }

    #[test]
    fn the_usual_limits_are_good() {
        assert_eq!(Limits::default().check(), Ok(()));
    }

    #[test]
    fn each_sum_holds_what_it_is_the_sum_of() {
        let usual = Limits::default;
        let guest = Limits {
            guest_bytes: 1024 * 1024 - 1,
            ..usual()
        };
        let all = Limits {
            total_bytes: 64 * 1024 * 1024 - 1,
            ..usual()
        };
        let time = Limits {
            connect_timeout: Duration::from_micros(999),
            ..usual()
        };
        let reason = "guest_bytes is 1048575, and has to be 1048576 at least";
        assert_eq!(refused(&guest), ("guest_bytes", reason.to_owned()));
        let reason = "total_bytes is 67108863, and has to be 67108864 at least";
        assert_eq!(refused(&all), ("total_bytes", reason.to_owned()));
        let reason = "connect_timeout_ms is 0, and has to be 1 at least";
        assert_eq!(refused(&time), ("connect_timeout_ms", reason.to_owned()));
    }
}

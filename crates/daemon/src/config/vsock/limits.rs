//! The section `[vsock.limits]`: a key per limit of the service, each with its unit in its name.

use std::time::Duration;

use sandwire_vsock_host::limits::Limits;
use serde::Deserialize;
use toml::Spanned;

use super::super::{ConfigError, Source};

/// What the section may hold. What is missing is as [`Limits::default`] has it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Section {
    connections: Option<Spanned<u32>>,
    connects_per_second: Option<Spanned<u32>>,
    connection_bytes: Option<Spanned<u32>>,
    guest_bytes: Option<Spanned<u64>>,
    total_bytes: Option<Spanned<u64>>,
    message_bytes: Option<Spanned<u32>>,
    connect_timeout_ms: Option<Spanned<u32>>,
    shutdown_timeout_ms: Option<Spanned<u32>>,
    handshake_timeout_ms: Option<Spanned<u32>>,
    handshakes: Option<Spanned<u32>>,
}

impl Section {
    fn limits(&self) -> Limits {
        let usual = Limits::default();
        Limits {
            connections: value(&self.connections, usual.connections),
            connects_per_second: value(&self.connects_per_second, usual.connects_per_second),
            connection_bytes: value(&self.connection_bytes, usual.connection_bytes),
            guest_bytes: value(&self.guest_bytes, usual.guest_bytes),
            total_bytes: value(&self.total_bytes, usual.total_bytes),
            message_bytes: value(&self.message_bytes, usual.message_bytes),
            connect_timeout: time(&self.connect_timeout_ms, usual.connect_timeout),
            shutdown_timeout: time(&self.shutdown_timeout_ms, usual.shutdown_timeout),
            handshake_timeout: time(&self.handshake_timeout_ms, usual.handshake_timeout),
            handshakes: value(&self.handshakes, usual.handshakes),
        }
    }

    /// Where a limit stands, if it does.
    fn place(&self, limit: &str) -> Option<std::ops::Range<usize>> {
        match limit {
            "connections" => span(&self.connections),
            "connects_per_second" => span(&self.connects_per_second),
            "connection_bytes" => span(&self.connection_bytes),
            "guest_bytes" => span(&self.guest_bytes),
            "total_bytes" => span(&self.total_bytes),
            "message_bytes" => span(&self.message_bytes),
            "connect_timeout_ms" => span(&self.connect_timeout_ms),
            "shutdown_timeout_ms" => span(&self.shutdown_timeout_ms),
            "handshake_timeout_ms" => span(&self.handshake_timeout_ms),
            "handshakes" => span(&self.handshakes),
            _ => None,
        }
    }
}

fn value<T: Copy>(key: &Option<Spanned<T>>, usual: T) -> T {
    key.as_ref().map_or(usual, |value| *value.get_ref())
}

fn time(milliseconds: &Option<Spanned<u32>>, usual: Duration) -> Duration {
    let told = milliseconds.as_ref();
    told.map_or(usual, |told| {
        Duration::from_millis((*told.get_ref()).into())
    })
}

fn span<T>(key: &Option<Spanned<T>>) -> Option<std::ops::Range<usize>> {
    key.as_ref().map(Spanned::span)
}

impl Source<'_> {
    /// The limits, if a guest could do anything within them.
    pub(super) fn vsock_limits(
        &self,
        section: Option<Spanned<Section>>,
    ) -> Result<Limits, ConfigError> {
        let Some(section) = section else {
            return Ok(Limits::default());
        };
        let limits = section.get_ref().limits();
        limits.check().map_err(|error| {
            // A limit that isn't there is too low for another that is: the section has both.
            let place = section.get_ref().place(error.limit());
            let reason = format!("vsock.limits.{error}");
            self.invalid(place.unwrap_or_else(|| section.span()), &reason)
        })?;
        Ok(limits)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::Config;

    fn parse(keys: &str) -> Result<Limits, String> {
        let text = format!("[vsock]\nenabled = true\n[vsock.limits]\n{keys}\n");
        Config::parse(&text, Path::new("s.toml"))
            .map(|config| config.vsock.unwrap().service.limits)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn each_limit_has_a_key() {
        let text = "connections = 1\nconnects_per_second = 2\nconnection_bytes = 5000\nguest_bytes = 6000\n\
            total_bytes = 7000\nmessage_bytes = 8\nconnect_timeout_ms = 9\nshutdown_timeout_ms = 10\n\
            handshake_timeout_ms = 11\nhandshakes = 12";
        let limits = Limits {
            connections: 1,
            connects_per_second: 2,
            connection_bytes: 5000,
            guest_bytes: 6000,
            total_bytes: 7000,
            message_bytes: 8,
            connect_timeout: Duration::from_millis(9),
            shutdown_timeout: Duration::from_millis(10),
            handshake_timeout: Duration::from_millis(11),
            handshakes: 12,
        };
        assert_eq!(parse(text), Ok(limits));
        assert_eq!(parse(""), Ok(Limits::default()));
    }

    #[test]
    fn each_key_that_is_too_low_is_refused_with_its_place() {
        for (key, value, least) in [
            ("connections", 0, 1),
            ("connects_per_second", 0, 1),
            ("connection_bytes", 4095, 4096),
            ("guest_bytes", 4096, 1_048_576),
            ("total_bytes", 4096, 67_108_864),
            ("message_bytes", 0, 1),
            ("connect_timeout_ms", 0, 1),
            ("shutdown_timeout_ms", 0, 1),
            ("handshake_timeout_ms", 0, 1),
            ("handshakes", 0, 1),
        ] {
            let error = parse(&format!("{key} = {value}")).unwrap_err();
            let column = key.len() + 4;
            let reason = format!(
                "s.toml:4:{column}: vsock.limits.{key} is {value}, and has to be {least} at least"
            );
            assert!(error.contains(&reason), "{error}, not {reason}");
        }
    }

    #[test]
    fn a_limit_that_is_not_there_can_be_too_low_for_another() {
        let error = parse("connection_bytes = 100_000_000").unwrap_err();
        let reason = "vsock.limits.guest_bytes is 67108864, and has to be 100000000 at least";
        assert!(error.contains(reason), "{error}");
        for wrong in [
            "connections = -1",
            "connection_bytes = 4294967296",
            "bytes = 1",
        ] {
            let error = parse(wrong).unwrap_err();
            assert!(error.contains("s.toml:4:"), "{wrong}: {error}");
        }
    }
}

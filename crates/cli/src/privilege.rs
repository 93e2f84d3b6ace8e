//! Refuses early what would fail late, or halfway, for want of rights.

use sandwire_api::error::ErrorCode;

use crate::failure::Failure;

/// A right that root has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Capability {
    /// To change networks.
    NetAdmin = 12,
    /// To make and enter namespaces, and to mount.
    SysAdmin = 21,
}

impl Capability {
    fn name(self) -> &'static str {
        match self {
            Self::NetAdmin => "CAP_NET_ADMIN",
            Self::SysAdmin => "CAP_SYS_ADMIN",
        }
    }

    fn is_held(self) -> bool {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        effective_capabilities(&status) & (1 << self as u32) != 0
    }
}

/// Refuses an operation unless this process has the right that `what` takes.
pub(crate) fn require(capability: Capability, operation: &str, what: &str) -> Result<(), Failure> {
    if capability.is_held() {
        return Ok(());
    }
    let (name, uid) = (capability.name(), rustix::process::geteuid().as_raw());
    Err(Failure::new(
        ErrorCode::Forbidden,
        format!(
            "cannot {operation}: {what} needs root ({name}), and this is uid {uid}; run it as root, for instance by sudo"
        ),
    ))
}

/// Adds to a failure's message what to do, if the kernel refused for want of rights.
pub(crate) fn advise(message: String) -> String {
    let is_refused = ["(os error 1)", "(os error 13)"].map(|code| message.contains(code));
    if is_refused == [false; 2] || Capability::SysAdmin.is_held() {
        return message;
    }
    let uid = rustix::process::geteuid().as_raw();
    format!(
        "{message}; this needs root, and this is uid {uid}: run it as root, for instance by sudo"
    )
}

/// The effective capabilities in the text of `/proc/PID/status`.
pub(crate) fn effective_capabilities(status: &str) -> u64 {
    status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effective_capabilities_are_read_from_the_status_file() {
        let status = "Name:\tx\nCapPrm:\t00000000000000ff\nCapEff:\t0000000000200001\n";
        assert_eq!(effective_capabilities(status), (1 << 21) | 1);
        assert_eq!(effective_capabilities("Name:\tx\n"), 0);
    }
}

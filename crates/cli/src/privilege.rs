//! Refuses early what would fail late, or halfway, for want of rights.

use std::{error::Error, io};

use rustix::io::Errno;
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

/// A failure's message, with what to do if the kernel refused for want of rights. `error` is what the message tells of, with its
/// causes: a text that speaks of a refusal needn't be this process's.
pub(crate) fn advise(message: String, error: &(dyn Error + 'static)) -> String {
    let uid = rustix::process::geteuid().as_raw();
    // To be root helps no root who is without rights: its unit took them, or it gave them up, as the relay does.
    if !is_refusal(error) || uid == 0 || Capability::SysAdmin.is_held() {
        return message;
    }
    format!(
        "{message}; this needs root, and this is uid {uid}: run it as root, for instance by sudo"
    )
}

/// Whether it comes of the kernel's EPERM or EACCES.
fn is_refusal(error: &(dyn Error + 'static)) -> bool {
    let mut current = Some(error);
    while let Some(error) = current {
        let system = error.downcast_ref::<io::Error>();
        let number = error.downcast_ref::<Errno>();
        if system.is_some_and(|system| system.kind() == io::ErrorKind::PermissionDenied)
            || number.is_some_and(|number| [Errno::PERM, Errno::ACCESS].contains(number))
        {
            return true;
        }
        current = error.source();
    }
    false
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

    /// As errors of libraries are: what the kernel said is a cause of it.
    #[derive(Debug, thiserror::Error)]
    #[error("cannot do it")]
    struct Wrapped(#[source] Box<dyn Error + Send + Sync>);

    #[test]
    fn a_refusal_of_the_kernel_is_known_by_its_number_however_deep_and_not_by_its_text() {
        let of = |code| {
            Wrapped(Box::new(Wrapped(Box::new(io::Error::from_raw_os_error(
                code,
            )))))
        };
        for code in [Errno::PERM, Errno::ACCESS] {
            assert!(is_refusal(&of(code.raw_os_error())), "{code}");
            assert!(is_refusal(&Wrapped(Box::new(code))), "{code}");
        }
        for code in [Errno::NOENT, Errno::NXIO, Errno::SRCH] {
            assert!(!is_refusal(&of(code.raw_os_error())), "{code}");
        }
        let text = "the guest said: Permission denied (os error 13)";
        assert!(!is_refusal(&Wrapped(text.into())));
        assert!(!is_refusal(&io::Error::other(text)));
    }

    #[test]
    fn effective_capabilities_are_read_from_the_status_file() {
        let status = "Name:\tx\nCapPrm:\t00000000000000ff\nCapEff:\t0000000000200001\n";
        assert_eq!(effective_capabilities(status), (1 << 21) | 1);
        assert_eq!(effective_capabilities("Name:\tx\n"), 0);
    }
}

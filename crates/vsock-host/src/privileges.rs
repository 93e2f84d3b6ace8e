//! Giving up what the service doesn't need.
//!
//! Once its folder and its control socket are there, it needs no right but to reach the sockets that policies
//! name: those of a user of its own, or, where it stays root, the one that stands above files' modes. Descriptors
//! are what bounds the number of connections, so that limit is raised first.

use std::{fs, io};

use rustix::{
    process::{Resource, Rlimit, getrlimit, setrlimit},
    thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_no_new_privs},
};

/// Why privileges aren't as they should be.
#[derive(Debug, thiserror::Error)]
#[error("{operation}: {source}")]
pub struct PrivilegeError {
    operation: String,
    source: io::Error,
}

/// Raises the limit of open descriptors as far as is allowed, and says how far that is.
pub fn raise_descriptor_limit() -> u64 {
    /// The kernel's own bound where nobody has changed it.
    const NR_OPEN: u64 = 1024 * 1024;
    let nr_open = fs::read_to_string("/proc/sys/fs/nr_open")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(NR_OPEN);
    let now = getrlimit(Resource::Nofile);
    let highest = now.maximum.unwrap_or(nr_open).min(nr_open);
    // Only root may raise the hard limit; others get as far as that.
    for wanted in [nr_open, highest] {
        let limit = Rlimit {
            current: Some(wanted),
            maximum: Some(wanted.max(highest)),
        };
        if setrlimit(Resource::Nofile, limit).is_ok() {
            break;
        }
    }
    getrlimit(Resource::Nofile).current.unwrap_or(nr_open)
}

/// Becomes that user and group, for good, without any other group or capability.
///
/// # Errors
/// When this process isn't root, or the kernel refuses. The process has to end then: it may be half way.
pub fn become_user(user: u32, group: u32) -> Result<(), PrivilegeError> {
    drop_bounding_set()?;
    // Through the C library, since only that changes all threads.
    // SAFETY: no memory is passed: zero groups are read from a null pointer.
    call("drop all groups", || unsafe {
        libc::setgroups(0, std::ptr::null())
    })?;
    // SAFETY: only numbers are passed.
    call(&format!("become group {group}"), || unsafe {
        libc::setresgid(group, group, group)
    })?;
    // Leaving user 0 clears permitted, effective and ambient capabilities (capabilities(7)).
    // SAFETY: only numbers are passed.
    call(&format!("become user {user}"), || unsafe {
        libc::setresuid(user, user, user)
    })?;
    Ok(())
}

/// Gives up every capability but the one by which root reaches sockets of other users' services and VMMs, for good. Whoever
/// hasn't that one keeps none. To be called before threads are started, since it is the calling thread's.
///
/// # Errors
/// The kernel refuses.
pub fn keep_only_access() -> Result<(), PrivilegeError> {
    let refused = |operation: &str| {
        let operation = operation.to_owned();
        move |error: rustix::io::Errno| PrivilegeError {
            operation,
            source: error.into(),
        }
    };
    let now = capabilities(None).map_err(refused("read the capabilities"))?;
    // Nobody else may, nor gets any by executing something.
    if now.effective.contains(CapabilitySet::SETPCAP) {
        drop_bounding_set()?;
    }
    let kept = now.permitted & CapabilitySet::DAC_OVERRIDE;
    let sets = CapabilitySets {
        effective: kept,
        permitted: kept,
        // Ambient ones go with these.
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets).map_err(refused("drop capabilities"))
}

/// No program that is executed, now or by mistake later, gets more rights than this one has.
///
/// # Errors
/// Never on a kernel that we run on.
pub fn renounce_new_privileges() -> Result<(), PrivilegeError> {
    set_no_new_privs(true).map_err(|error| PrivilegeError {
        operation: "set no_new_privs".to_owned(),
        source: error.into(),
    })
}

/// Empties the bounding set. Done first, as it takes a capability.
fn drop_bounding_set() -> Result<(), PrivilegeError> {
    for capability in 0..64 {
        // SAFETY: only numbers are passed.
        let outcome = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
        if outcome == 0 {
            continue;
        }
        let source = io::Error::last_os_error();
        // Past the last one that this kernel has.
        if source.raw_os_error() == Some(libc::EINVAL) {
            return Ok(());
        }
        return Err(PrivilegeError {
            operation: format!("drop capability {capability} from the bounding set"),
            source,
        });
    }
    Ok(())
}

fn call(operation: &str, action: impl FnOnce() -> libc::c_int) -> Result<(), PrivilegeError> {
    if action() == 0 {
        return Ok(());
    }
    Err(PrivilegeError {
        operation: operation.to_owned(),
        source: io::Error::last_os_error(),
    })
}

//! What a new process starts with.

use std::{
    io,
    mem::MaybeUninit,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::process::CommandExt,
    },
    process::Command,
};

/// Lets the process receive all signals, although the thread that starts it has some blocked.
pub fn unblock_signals(command: &mut Command) {
    let unblock = || {
        let mut none = MaybeUninit::uninit();
        // SAFETY: sigemptyset initialises the set that sigprocmask reads; both outlive the calls.
        let answer = unsafe {
            libc::sigemptyset(none.as_mut_ptr());
            libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut())
        };
        if answer == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    };
    // SAFETY: between fork and exec only async-signal-safe functions are called, and nothing is allocated.
    unsafe { command.pre_exec(unblock) };
}

/// Puts the process into a cgroup before its program begins. `entrance` is the cgroup's file `cgroup.procs`, open for
/// writing.
pub fn join_cgroup(command: &mut Command, entrance: OwnedFd) {
    let join = move || {
        let own = b"0";
        // SAFETY: the buffer is one byte long, and the descriptor is open for as long as the closure is.
        let written = unsafe { libc::write(entrance.as_raw_fd(), own.as_ptr().cast(), own.len()) };
        if written == 1 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    };
    // SAFETY: between fork and exec only async-signal-safe functions are called, and nothing is allocated.
    unsafe { command.pre_exec(join) };
}

//! What a new process starts with, and what a process is called.

use std::{
    fs, io,
    mem::MaybeUninit,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::Path,
    process::Command,
};

/// What a process calls itself, by its folder in `/proc`; empty if it has ended. It may have chosen anything, so what a
/// terminal would obey is told as U+FFFD.
#[must_use]
pub fn name(folder: &Path) -> String {
    let name = fs::read(folder.join("comm")).unwrap_or_default();
    let name = name.strip_suffix(b"\n").unwrap_or(&name);
    let shown = |character: char| match character.is_control() {
        true => char::REPLACEMENT_CHARACTER,
        false => character,
    };
    String::from_utf8_lossy(name).chars().map(shown).collect()
}

/// Has the kernel tell this process when a child of it ends, and keep how. Whoever started it may have ignored SIGCHLD,
/// which survives exec: the kernel then forgets children as they end, and says nothing. What this process starts is told of
/// its own children as well.
pub fn hear_of_children() {
    // SAFETY: no handler is installed: the default action is restored.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_nothing_to_a_terminal() {
        for (own, told) in [
            (&b"qemu-system-x86"[..], "qemu-system-x86"),
            (b"\x1b[2Jx\ny", "\u{fffd}[2Jx\u{fffd}y"),
            (b"a\xffb\xc2\x9b", "a\u{fffd}b\u{fffd}"),
        ] {
            let folder = Path::new("/proc/thread-self");
            fs::write(folder.join("comm"), own).unwrap();
            assert_eq!(name(folder), told);
        }
        assert_eq!(name(Path::new("/proc/0")), "");
    }
}

//! `sandwire exec`: runs a command with the lease's TAPs open, for VMMs that take descriptors.
//!
//! The daemon opens the TAPs and passes them on; this process then becomes the command. So the command
//! needs no rights on the TAPs and need not enter their namespace, and its exit status is ours.

use std::{
    ffi::{OsStr, OsString},
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{
            ffi::{OsStrExt, OsStringExt},
            process::CommandExt,
        },
    },
    process::Command,
};

use clap::Args;
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use sandwire_api::name::Name;

use crate::{
    Context,
    connection::cannot,
    failure::{Failure, Outcome},
};

/// Standard input, output and error are below.
const FIRST_DESCRIPTOR: i32 = 3;

/// Command line of `sandwire exec`.
#[derive(Debug, Args)]
#[command(
    after_help = "The TAPs are open from descriptor 3 on, or from the first that is free after it. The command finds \
    the numbers in SANDWIRE_TAP_FD0, SANDWIRE_TAP_FD1 and so on, and in place of {fd0}, {fd1} in its arguments: \
    sandwire exec a7 -- qemu-system-x86_64 -netdev tap,id=n0,fd={fd0} …"
)]
pub(crate) struct Arguments {
    /// Name of the lease.
    name: Name,

    /// Numeric user that holds it, if not you; for root.
    #[arg(long, value_name = "UID")]
    owner_uid: Option<u32>,

    /// Command and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

pub(crate) fn run(context: &Context, arguments: &Arguments) -> Outcome {
    let name = &arguments.name;
    let (program, rest) = arguments
        .command
        .split_first()
        .ok_or_else(|| Failure::refused("cannot exec: no command is given"))?;
    let operation = format!("open the TAPs of lease {name}");
    let client = context.client();
    let received = client
        .taps(name, arguments.owner_uid)
        .map_err(cannot(&operation))?;
    // Its connection and event queue give the low numbers back.
    drop(client);
    let taps = settle(received)
        .map_err(|error| Failure::failed(format!("cannot {operation}: {error}")))?;
    let numbers: Vec<i32> = taps.iter().map(AsRawFd::as_raw_fd).collect();

    let mut command = Command::new(filled(program, &numbers));
    command.args(rest.iter().map(|argument| filled(argument, &numbers)));
    for (index, number) in numbers.iter().enumerate() {
        command.env(format!("SANDWIRE_TAP_FD{index}"), number.to_string());
    }
    // Returns only if it failed.
    let error = command.exec();
    let shown = program.to_string_lossy();
    let message = format!("cannot run {shown}: {error}");
    Err(Failure {
        exit_status: if error.kind() == io::ErrorKind::NotFound {
            127
        } else {
            126
        },
        ..Failure::failed(message)
    })
}

/// Gives the descriptors the lowest numbers there are from 3 on, and lets a new program keep them.
fn settle(received: Vec<OwnedFd>) -> io::Result<Vec<OwnedFd>> {
    // First above all that were received, so that these give their numbers back.
    let above = received.iter().map(AsRawFd::as_raw_fd).max().unwrap_or(0) + 1;
    let moved: Result<Vec<OwnedFd>, _> = received
        .iter()
        .map(|tap| fcntl_dupfd_cloexec(tap, above))
        .collect();
    let moved = moved?;
    drop(received);
    let settled: Result<Vec<OwnedFd>, _> = moved
        .iter()
        .map(|tap| fcntl_dupfd_cloexec(tap, FIRST_DESCRIPTOR))
        .collect();
    let settled = settled?;
    for tap in &settled {
        fcntl_setfd(tap, FdFlags::empty())?;
    }
    Ok(settled)
}

/// An argument with each `{fdN}` replaced by the number of that TAP's descriptor.
fn filled(argument: &OsStr, numbers: &[i32]) -> OsString {
    let mut filled = Vec::new();
    let mut rest = argument.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let found = numbers.iter().enumerate().find_map(|(index, number)| {
            let after = rest.strip_prefix(format!("{{fd{index}}}").as_bytes())?;
            Some((number, after))
        });
        match found {
            Some((number, after)) => {
                filled.extend_from_slice(number.to_string().as_bytes());
                rest = after;
            }
            None => {
                filled.push(*first);
                rest = after;
            }
        }
    }
    OsString::from_vec(filled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_descriptors_are_filled_and_nothing_else() {
        let fill = |text: &str| filled(OsStr::new(text), &[3, 14]).into_string().unwrap();
        assert_eq!(fill("tap,id=n0,fd={fd0}"), "tap,id=n0,fd=3");
        assert_eq!(fill("{fd0}{fd1}{fd2}"), "314{fd2}");
        assert_eq!(fill("{fd}{{fd1}"), "{fd}{14");
        assert_eq!(fill(""), "");
        let raw = OsStr::from_bytes(b"\xff{fd0}");
        assert_eq!(filled(raw, &[3]).as_bytes(), b"\xff3");
    }

    #[test]
    fn descriptors_keep_their_order_and_survive_a_new_program() {
        let opened = |path: &str| OwnedFd::from(std::fs::File::open(path).unwrap());
        let settled = settle(vec![opened("/dev/zero"), opened("/dev/null")]).unwrap();
        assert!(
            settled
                .iter()
                .all(|tap| tap.as_raw_fd() >= FIRST_DESCRIPTOR)
        );
        let seen: Vec<String> = settled
            .iter()
            .map(|tap| {
                let path = format!("/proc/self/fd/{}", tap.as_raw_fd());
                std::fs::read_link(path).unwrap().display().to_string()
            })
            .collect();
        assert_eq!(seen, ["/dev/zero", "/dev/null"]);
        for tap in &settled {
            assert!(rustix::io::fcntl_getfd(tap).unwrap().is_empty());
        }
    }
}

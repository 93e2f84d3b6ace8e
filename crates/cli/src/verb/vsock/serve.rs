//! `sandwire vsock serve`: the service for vsock, a process of its own.

use std::{path::PathBuf, process::ExitCode, str::FromStr, time::Duration};

use clap::{Args, ValueEnum};
use sandwire_vsock_host::service::{self, Seccomp, Settings};

use crate::{
    detached,
    failure::{Failure, Outcome},
    log, privilege,
};

/// Command line of `sandwire vsock serve`.
#[derive(Debug, Args)]
#[command(
    after_help = "Logs go to standard error; the environment variable SANDWIRE_LOG says how much. It remembers its \
    channels in the folder, and serves them again when it is started anew."
)]
pub(crate) struct Arguments {
    /// Folder of its control socket and of what it remembers.
    #[arg(long, default_value = "/run/sandwire/vsock", value_name = "FOLDER")]
    folder: PathBuf,

    /// Worker threads [default: as many as processors, up to 4].
    #[arg(long, value_name = "NUMBER")]
    threads: Option<usize>,

    /// User to become after the start: its name, or numeric user and group, as 990:990. Without it, it stays who it
    /// is, and root keeps of its capabilities CAP_DAC_OVERRIDE alone, to reach sockets of others.
    #[arg(long, value_name = "USER")]
    user: Option<User>,

    /// Microseconds that a worker looks for work before it sleeps: less latency for a busy processor.
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 0)]
    busy_poll_us: u64,

    /// Bytes that may be buffered for all guests together [default: 2 GiB].
    #[arg(long, value_name = "BYTES")]
    total_bytes: Option<u64>,

    /// What becomes of system calls that it has no use for.
    #[arg(long, value_enum, default_value_t = Filter::Refuse)]
    seccomp: Filter,

    /// Leave the session of whoever starts it. A file that its log is appended to begins anew at 4 MiB.
    #[arg(long)]
    detach: bool,
}

/// [`Seccomp`], as it is written.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Filter {
    /// They are allowed.
    Off,
    /// They fail.
    Refuse,
    /// They end the process.
    Kill,
}

pub(crate) fn run(arguments: &Arguments) -> Outcome {
    log::of_service(arguments.detach);
    let failed = |reason: String| Failure::failed(format!("cannot serve vsock: {reason}"));
    if arguments.detach {
        detached::begin().map_err(|error| failed(format!("new session: {error}")))?;
    }
    let user = arguments.user.as_ref().map(User::numbers);
    let user = user.transpose().map_err(failed)?;
    let usual = Settings::new(arguments.folder.clone());
    let settings = Settings {
        threads: arguments.threads,
        user,
        busy_poll: Duration::from_micros(arguments.busy_poll_us),
        total_bytes: arguments.total_bytes.unwrap_or(usual.total_bytes),
        seccomp: match arguments.seccomp {
            Filter::Off => Seccomp::Off,
            Filter::Refuse => Seccomp::Refuse,
            Filter::Kill => Seccomp::Kill,
        },
        ..usual
    };
    service::run(&settings)
        .map_err(|error| failed(privilege::advise(error.to_string(), &error)))?;
    Ok(ExitCode::SUCCESS)
}

/// Who the service is to become, as it is written.
#[derive(Clone, Debug, PartialEq, Eq)]
enum User {
    /// User and group.
    Numbers(u32, u32),
    /// A user's name.
    Name(String),
}

impl FromStr for User {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse().ok();
        let numbers = text.split_once(':');
        let numbers = numbers.map(|(user, group)| number(user).zip(number(group)));
        match numbers {
            Some(Some((user, group))) => Ok(Self::Numbers(user, group)),
            None if !text.is_empty() && number(text).is_none() => Ok(Self::Name(text.to_owned())),
            _ => Err("write a user's name, or numeric user and group as 990:990".to_owned()),
        }
    }
}

impl User {
    /// User and group, by numbers. A name is looked up.
    fn numbers(&self) -> Result<(u32, u32), String> {
        let name = match self {
            Self::Numbers(user, group) => return Ok((*user, *group)),
            Self::Name(name) => name,
        };
        let found = nix::unistd::User::from_name(name)
            .map_err(|error| format!("look up user {name}: {error}"))?;
        found
            .map(|user| (user.uid.as_raw(), user.gid.as_raw()))
            .ok_or_else(|| {
                format!("become user {name}: there is none; `useradd --system --user-group {name}` makes it")
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_named_or_numeric() {
        assert_eq!("990:991".parse(), Ok(User::Numbers(990, 991)));
        let named: User = "sandwire-vsock".parse().unwrap();
        assert_eq!(named, User::Name("sandwire-vsock".to_owned()));
        for wrong in ["", "990", "990:", ":990", "root:root"] {
            wrong.parse::<User>().unwrap_err();
        }
    }

    #[test]
    fn a_name_is_looked_up_among_system_users() {
        assert_eq!(User::Name("root".to_owned()).numbers(), Ok((0, 0)));
        let nobody = User::Name("no such user".to_owned()).numbers();
        assert!(
            nobody
                .unwrap_err()
                .contains("useradd --system --user-group no such user")
        );
    }
}

//! `sandwire run`: a command inside a slot's network namespace, from acquire to release.
//!
//! The command stays in our process group, so that a terminal's keys reach it as if it had been
//! started by the shell; signals that were sent to us alone are passed on. The lease is released
//! however the command ends (`release.rs`). While it runs, a thread watches whether the sandbox really sits on the
//! slot's TAP. With `--no-netns` there is no slot, but a cgroup with an identity (`identity.rs`).

pub(crate) mod enter;
mod identity;
mod release;
mod supervise;
mod watch;

use std::{
    ffi::OsString,
    io::{self, ErrorKind},
    os::fd::AsFd,
    pin::pin,
    process::{Command, ExitCode, Stdio},
    time::Duration,
};

use clap::Args;
use nix::sys::signal::Signal;
use sandwire_api::{
    client::{Acquired, Client, ClientError},
    error::ErrorCode,
    lease::{AcquireLease, Lease, ReleaseOutcome, Released},
    name::Name,
};
use serde_json::json;
use tokio::{
    runtime::{self, Runtime},
    time::timeout,
};

use self::watch::Watch;
pub(crate) use self::watch::tap_of_fdinfo;
use crate::{
    Context,
    connection::cannot,
    failure::{Failure, Outcome},
    output::note,
    privilege::{self, Capability},
    verb::release::released_text,
};

/// How long an answer is waited for by who was asked to end meanwhile.
const ANSWER_MAX: Duration = Duration::from_secs(1);

/// Command line of `sandwire run`.
#[derive(Debug, Args)]
#[command(
    after_help = "The command finds SANDWIRE_LEASE, SANDWIRE_NETNS, SANDWIRE_TAP, SANDWIRE_MTU, \
    SANDWIRE_GUEST_MAC, SANDWIRE_GATEWAY_MAC and SANDWIRE_{GUEST,GATEWAY,CLONE}_{IPV4,IPV6} in its \
    environment; further interfaces have a number at the end, as SANDWIRE_TAP_1. With --no-netns these are \
    SANDWIRE_IDENTITY, SANDWIRE_CGROUP and SANDWIRE_ADDRESSES. With --json its standard \
    output goes to standard error, and a report to standard output. Its exit status is ours. If the daemon is away when \
    it ends, the release of its lease is tried for a minute; where that fails, a status of 0 becomes 2."
)]
pub(crate) struct Arguments {
    /// Pool to take the slot from. May be left out if there is one pool only.
    #[arg(long)]
    pool: Option<Name>,

    /// Name for the lease or the identity. Without one, it is made up.
    #[arg(long)]
    name: Option<Name>,

    /// Don't watch whether the sandbox sits on the slot's TAP.
    #[arg(long)]
    no_check: bool,

    /// Run it in the host's network namespace, in a cgroup with an identity of its own; see docs/identity.md. No
    /// daemon takes part. All that the command has started ends with it.
    #[arg(long, conflicts_with_all = ["pool", "no_check"])]
    no_netns: bool,

    #[command(flatten)]
    identity: identity::WithoutNamespace,

    /// Command and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

pub(crate) fn run(context: &Context, arguments: &Arguments) -> Outcome {
    let (program, rest) = arguments
        .command
        .split_first()
        .ok_or_else(|| Failure::refused("cannot run: no command is given"))?;
    let shown = program.to_string_lossy().into_owned();
    if arguments.no_netns {
        let command = identity::Command {
            program,
            rest,
            shown: &shown,
        };
        return identity::run(
            context,
            &arguments.identity,
            arguments.name.as_ref(),
            &command,
        );
    }
    if !arguments.identity.is_empty() {
        return Err(Failure::refused(format!(
            "cannot run {shown}: addresses and what else an identity has are for --no-netns"
        )));
    }
    require_privilege(&shown)?;
    // Before anything else starts a thread: all threads must have the signals blocked.
    let signals = supervise::Signals::block().map_err(|error| {
        Failure::failed(format!("cannot run {shown}: cannot catch signals: {error}"))
    })?;
    let held = HeldLease::acquire(context, arguments, &shown)?;

    let mut command = Command::new(program);
    command.args(rest).envs(environment(&held.lease));
    if context.output.json {
        let stderr = std::io::stderr().as_fd().try_clone_to_owned();
        command.stdout(stderr.map_or_else(|_| Stdio::null(), Stdio::from));
    }
    let Some(netns) = held.lease.netns.as_deref() else {
        return Err(no_namespace(&held.lease, &shown));
    };
    let child =
        enter::spawn(netns, command).map_err(|error| cannot_start(&shown, &held.lease, error))?;
    let watch = (!arguments.no_check).then(|| Watch::start(context, &held.lease, child));
    let end = supervise::wait(&signals, child);
    let warnings = watch.map(Watch::stop).unwrap_or_default();
    let lease = held.lease.clone();
    let released = held.release();

    let end = end.map_err(|error| Failure::failed(format!("cannot wait for {shown}: {error}")))?;
    match &released {
        Ok(released) if released.outcome == ReleaseOutcome::Held => {
            note(released_text(released).trim_end())
        }
        Ok(_) => {}
        Err(failure) => note(&failure.message),
    }
    if context.output.json {
        let report = json!({
            "lease": lease,
            "exit_status": end.exit_status(),
            "signal": end.signal(),
            "warnings": warnings,
            "released": released.as_ref().ok(),
            "release_failure": released.as_ref().err(),
        });
        context.output.answer(&report, |_| String::new())?;
    }
    let status = release::exit_status(end.exit_status(), &released);
    Ok(ExitCode::from(status))
}

fn require_privilege(shown: &str) -> Result<(), Failure> {
    let what = "to enter a slot's network namespace";
    privilege::require(Capability::SysAdmin, &format!("run {shown}"), what)
}

fn cannot_start(shown: &str, lease: &Lease, error: enter::EnterError) -> Failure {
    match error {
        enter::EnterError::Start(source) => Failure {
            // As env, nohup and timeout do, so that a script can tell it from the command's own end.
            exit_status: if source.kind() == ErrorKind::NotFound {
                127
            } else {
                126
            },
            ..Failure::refused(format!("cannot run {shown}: {source}"))
        },
        other => {
            let place = lease.netns.as_deref().unwrap_or("the slot");
            Failure::failed(format!("cannot run {shown} in {place}: {other}"))
        }
    }
}

/// A lease that ends with this value, whatever happens.
struct HeldLease {
    runtime: Runtime,
    client: Client,
    lease: Lease,
    released: bool,
}

impl HeldLease {
    /// The signals must be blocked: who is asked to end meanwhile does so at once, and leaves no lease.
    fn acquire(context: &Context, arguments: &Arguments, shown: &str) -> Result<Self, Failure> {
        let failed = |error: io::Error| Failure::failed(format!("cannot run {shown}: {error}"));
        let runtime = runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(failed)?;
        let client = Client::new(&context.socket);
        let acquired = runtime.block_on(async {
            let ending = supervise::Ending::new().map_err(failed)?;
            acquire(&client, arguments, &ending, shown).await
        })?;
        if !acquired.new {
            return Err(Failure::new(
                ErrorCode::Conflict,
                format!(
                    "cannot run {shown}: you hold a lease by the name {} already, and it would be released at \
                     the end; choose another --name",
                    acquired.lease.name
                ),
            ));
        }
        Ok(Self {
            runtime,
            client,
            lease: acquired.lease,
            released: false,
        })
    }

    fn release(mut self) -> Result<Released, Failure> {
        self.released = true;
        self.give_up()
    }

    /// Whoever has us end meanwhile doesn't want to wait for the daemon.
    fn give_up(&self) -> Result<Released, Failure> {
        self.runtime.block_on(async {
            let stop = supervise::ending_from_now();
            release::release(&self.client, &self.lease, release::PATIENCE, stop).await
        })
    }
}

impl Drop for HeldLease {
    fn drop(&mut self) {
        if !self.released
            && let Err(failure) = self.give_up()
        {
            note(&failure.message);
        }
    }
}

/// Asks for a lease until there is an answer, or a signal.
async fn acquire(
    client: &Client,
    arguments: &Arguments,
    ending: &supervise::Ending,
    shown: &str,
) -> Result<Acquired, Failure> {
    let pool = match &arguments.pool {
        Some(pool) => pool.clone(),
        None => tokio::select! {
            pool = only_pool(client, shown) => pool?,
            signal = ending.next() => return Err(interrupted(shown, signal, "")),
        },
    };
    let request = AcquireLease {
        pool: pool.clone(),
        name: arguments.name.clone(),
        clone_address: None,
        ttl_seconds: None,
        policy: None,
        process: true,
        vsock: None,
        attach: None,
    };
    let mut acquiring = pin!(client.acquire(&request));
    let signal = tokio::select! {
        acquired = &mut acquiring => {
            return acquired.map_err(|error| no_slot(shown, &pool, error));
        }
        signal = ending.next() => signal,
    };
    // An answer that is on its way says what to give back.
    let left = match timeout(ANSWER_MAX, acquiring).await {
        Ok(Ok(acquired)) if acquired.new => give_back(client, &acquired.lease).await,
        Ok(_) => String::new(),
        Err(_) => "; the daemon didn't answer, and takes back what it hands out to who has gone"
            .to_owned(),
    };
    Err(interrupted(shown, signal, &left))
}

/// The daemon speaks of a request's fields, which this verb has no options for.
fn no_slot(shown: &str, pool: &Name, error: ClientError) -> Failure {
    let failure = cannot(format!("run {shown}: no slot of pool {pool}"))(error);
    let message = match failure.field.as_deref() {
        Some("attach.netns") => format!(
            "cannot run {shown}: the slots of pool '{pool}' are interfaces for containers' namespaces; make one and give it to \
             'sandwire acquire' by --netns or --pid, or use a pool of kind netns"
        ),
        Some("process") => failure.message.replacen("process = true: ", "", 1),
        _ => return failure,
    };
    Failure { message, ..failure }
}

/// Releases a lease that nobody waits for any more; what there is to say if that fails.
async fn give_back(client: &Client, lease: &Lease) -> String {
    let name = &lease.name;
    match timeout(ANSWER_MAX, client.release(name, None)).await {
        Ok(Ok(_)) => String::new(),
        Ok(Err(error)) => format!(
            "; {}",
            cannot(format!("release lease {name}"))(error).message
        ),
        Err(_) => format!(
            "; the daemon didn't say whether it has released lease {name}: 'sandwire release {name}' does"
        ),
    }
}

/// The failure of a command that was not started: as a shell's status for one that the signal ended.
fn interrupted(shown: &str, signal: io::Result<Signal>, left: &str) -> Failure {
    match signal {
        Ok(signal) => Failure {
            exit_status: supervise::End::Killed(signal as i32).exit_status(),
            ..Failure::failed(format!(
                "cannot run {shown}: ended by {signal} before a slot was there{left}"
            ))
        },
        Err(error) => Failure::failed(format!(
            "cannot run {shown}: cannot take signals: {error}{left}"
        )),
    }
}

/// The pool, if there is no choice.
async fn only_pool(client: &Client, shown: &str) -> Result<Name, Failure> {
    let pools = client
        .pools()
        .await
        .map_err(cannot(format!("run {shown}")))?;
    let names: Vec<&str> = pools.iter().map(|pool| pool.spec.name.as_str()).collect();
    match pools.as_slice() {
        [pool] => Ok(pool.spec.name.clone()),
        [] => Err(Failure::refused(format!(
            "cannot run {shown}: there is no pool; create one by 'sandwire pool create'"
        ))),
        _ => Err(Failure::refused(format!(
            "cannot run {shown}: there are several pools; choose one by --pool: {}",
            names.join(", ")
        ))),
    }
}

fn no_namespace(lease: &Lease, shown: &str) -> Failure {
    Failure::refused(format!(
        "cannot run {shown}: the slots of pool '{}' are host slots, without a namespace to run it in; \
         acquire one and give its TAP to the program, by name or by 'sandwire exec', or use a pool of kind netns",
        lease.pool
    ))
}

/// What the command is told of its slot.
fn environment(lease: &Lease) -> Vec<(String, String)> {
    let mut variables = vec![
        ("SANDWIRE_LEASE".to_owned(), lease.name.to_string()),
        ("SANDWIRE_POOL".to_owned(), lease.pool.to_string()),
        ("SANDWIRE_SLOT".to_owned(), lease.slot.to_string()),
    ];
    for (variable, value) in [
        ("SANDWIRE_NETNS", &lease.netns),
        ("SANDWIRE_NETNS_NAME", &lease.netns_name),
    ] {
        variables.extend(value.clone().map(|value| (variable.to_owned(), value)));
    }
    for (index, nic) in lease.nics.iter().enumerate() {
        let suffix = if index == 0 {
            String::new()
        } else {
            format!("_{index}")
        };
        let mut set =
            |name: &str, value: String| variables.push((format!("SANDWIRE_{name}{suffix}"), value));
        set("TAP", nic.tap.clone());
        set("MTU", nic.mtu.to_string());
        set("GUEST_MAC", nic.guest_mac.to_string());
        set("GATEWAY_MAC", nic.gateway_mac.to_string());
        if let Some(ipv4) = &nic.ipv4 {
            set("GUEST_IPV4", ipv4.guest.to_string());
            set("GATEWAY_IPV4", ipv4.gateway.to_string());
            set("CLONE_IPV4", ipv4.clone_address.to_string());
        }
        if let Some(ipv6) = &nic.ipv6 {
            set("GUEST_IPV6", ipv6.guest.to_string());
            set("GATEWAY_IPV6", ipv6.gateway.to_string());
            set("CLONE_IPV6", ipv6.clone_address.to_string());
        }
    }
    variables
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verb::show::tests::lease;

    #[test]
    fn the_command_is_told_of_every_interface() {
        let mut lease = lease();
        let mut second = lease.nics[0].clone();
        second.tap = "vmtap1".to_owned();
        second.ipv6 = None;
        lease.nics.push(second);
        let variables = environment(&lease);
        let value = |name: &str| {
            let found = variables.iter().find(|(key, _)| key == name);
            found.map(|(_, value)| value.as_str())
        };
        assert_eq!(
            value("SANDWIRE_NETNS"),
            Some("/run/netns/sandwire.default.web.17")
        );
        assert_eq!(value("SANDWIRE_TAP"), Some("vmtap0"));
        assert_eq!(value("SANDWIRE_GUEST_IPV4"), Some("192.168.241.2/29"));
        assert_eq!(value("SANDWIRE_CLONE_IPV6"), Some("fd00:c10e::13"));
        assert_eq!(value("SANDWIRE_TAP_1"), Some("vmtap1"));
        assert_eq!(value("SANDWIRE_CLONE_IPV6_1"), None);
    }
}

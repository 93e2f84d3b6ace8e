//! `sandwire vsock policy`: what a guest may reach by vsock, changed while it runs.

use std::{net::SocketAddr, path::PathBuf, str::FromStr};

use clap::{Args, Subcommand};
use sandwire_api::{
    name::Name,
    vsock::{LeaseVsockPolicy, PortRange, VsockDestination, VsockRule},
};

use super::Which;
use crate::{
    Context,
    connection::cannot,
    failure::Outcome,
    verb::policy::{policy_text, read_policy},
};

/// What to do with a guest's policy.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Print what a guest may reach, in the form that `set` takes.
    Show(Which),
    /// Give a guest the policy of a file, at once.
    Set(SetArguments),
    /// Give a guest its pool's policy again, at once.
    Reset(Which),
    /// Let a port lead somewhere, beside what the guest may reach already.
    Allow(AllowArguments),
}

/// Command line of `sandwire vsock policy set`.
#[derive(Debug, Args)]
pub(crate) struct SetArguments {
    #[command(flatten)]
    which: Which,

    /// The whole policy, TOML or JSON; `-` reads standard input.
    file: PathBuf,
}

/// Command line of `sandwire vsock policy allow`.
#[derive(Debug, Args)]
#[command(
    after_help = "Destinations: host (the socket vsock.sock_PORT beside the lease's own: sandwire vsock listen), \
    sandbox:LEASE:PORT or sandbox:UID/LEASE:PORT, unix:PATH, tcp:ADDRESS:PORT, vsock:CID:PORT. All but host and \
    your own sandboxes take the right to manage the pool."
)]
pub(crate) struct AllowArguments {
    #[command(flatten)]
    which: Which,

    /// Port on CID 2 that the guest connects to, or a range of them, as 5000-5009.
    port: PortRange,

    /// Where it leads.
    destination: Destination,

    /// Tell the destination first, in a line of its own, who calls.
    #[arg(long)]
    identity: bool,
}

/// [`VsockDestination`], as it is written here.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Destination(VsockDestination);

impl FromStr for Destination {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        destination(text).map(Self).ok_or_else(|| {
            format!(
                "'{text}' is no destination: write host, sandbox:LEASE:PORT, sandbox:UID/LEASE:PORT, unix:PATH, \
                 tcp:ADDRESS:PORT or vsock:CID:PORT"
            )
        })
    }
}

fn destination(text: &str) -> Option<VsockDestination> {
    if text == "host" {
        return Some(VsockDestination::Host);
    }
    let (kind, rest) = text.split_once(':')?;
    match kind {
        "unix" => Some(VsockDestination::Unix {
            path: rest.to_owned(),
        }),
        "tcp" => Some(VsockDestination::Tcp {
            address: rest.parse::<SocketAddr>().ok()?,
        }),
        "vsock" => {
            let (cid, port) = rest.split_once(':')?;
            Some(VsockDestination::Vsock {
                cid: cid.parse().ok()?,
                port: port.parse().ok()?,
            })
        }
        "sandbox" => {
            let (lease, port) = rest.rsplit_once(':')?;
            let (owner_uid, lease) = match lease.split_once('/') {
                Some((uid, lease)) => (Some(uid.parse().ok()?), lease),
                None => (None, lease),
            };
            Some(VsockDestination::Sandbox {
                lease: lease.parse().ok()?,
                owner_uid,
                port: port.parse().ok()?,
            })
        }
        _ => None,
    }
}

pub(crate) fn run(context: &Context, verb: Verb) -> Outcome {
    let client = context.client();
    match verb {
        Verb::Show(Which { name, owner_uid }) => {
            let policy = client
                .vsock_policy(&name, owner_uid)
                .map_err(cannot(format!("show the vsock policy of lease {name}")))?;
            let text = |policy: &LeaseVsockPolicy| policy_text(&policy.policy, policy.own);
            context.output.answer(&policy, text)
        }
        Verb::Reset(Which { name, owner_uid }) => {
            let policy = client
                .reset_vsock_policy(&name, owner_uid)
                .map_err(cannot(format!("reset the vsock policy of lease {name}")))?;
            answer(context, &name, &policy)
        }
        Verb::Set(SetArguments { which, file }) => {
            let Which { name, owner_uid } = which;
            let operation = format!("set the vsock policy of lease {name}");
            let policy = read_policy(&file, &operation)?;
            let policy = client
                .set_vsock_policy(&name, owner_uid, &policy)
                .map_err(cannot(operation))?;
            answer(context, &name, &policy)
        }
        Verb::Allow(arguments) => {
            let Which { name, owner_uid } = arguments.which;
            let operation = format!("change the vsock policy of lease {name}");
            let rule = VsockRule {
                port: arguments.port,
                to: arguments.destination.0,
                identity: arguments.identity,
            };
            let policy = client
                .add_vsock_rule(&name, owner_uid, &rule)
                .map_err(cannot(operation))?;
            answer(context, &name, &policy)
        }
    }
}

fn answer(context: &Context, name: &Name, policy: &LeaseVsockPolicy) -> Outcome {
    context
        .output
        .answer(policy, |policy| summary(name, policy))
}

/// Whose policy a guest has now, and a line for each rule.
fn summary(name: &Name, policy: &LeaseVsockPolicy) -> String {
    let whose = if policy.own { "its own" } else { "its pool's" };
    let mut text = format!("lease {name}, with {whose} vsock policy\n");
    if policy.policy.rules.is_empty() {
        text.push_str("  nothing may be reached\n");
    }
    for rule in &policy.policy.rules {
        text.push_str(&format!("  {}\n", rule_text(rule)));
    }
    text
}

/// A rule in a line.
pub(crate) fn rule_text(rule: &VsockRule) -> String {
    let to = match &rule.to {
        VsockDestination::Host => "host".to_owned(),
        VsockDestination::Unix { path } => format!("unix:{path}"),
        VsockDestination::Tcp { address } => format!("tcp:{address}"),
        VsockDestination::Vsock { cid, port } => format!("vsock:{cid}:{port}"),
        VsockDestination::Sandbox {
            lease,
            owner_uid: Some(uid),
            port,
        } => format!("sandbox:{uid}/{lease}:{port}"),
        VsockDestination::Sandbox {
            lease,
            owner_uid: None,
            port,
        } => format!("sandbox:{lease}:{port}"),
    };
    let identity = if rule.identity {
        ", told who calls"
    } else {
        ""
    };
    format!("port {} -> {to}{identity}", rule.port)
}

#[cfg(test)]
mod tests {
    use sandwire_api::vsock::VsockPolicy;

    use super::*;
    use crate::verb::policy::file::parse_policy;

    const DESTINATIONS: [&str; 6] = [
        "host",
        "unix:/run/log.sock",
        "tcp:[::1]:80",
        "vsock:1:5",
        "sandbox:db:7000",
        "sandbox:1001/db:7000",
    ];

    fn rules() -> Vec<VsockRule> {
        let rule = |(place, text): (usize, &&str)| VsockRule {
            port: PortRange::single(u32::try_from(place).unwrap()).unwrap(),
            to: text.parse::<Destination>().unwrap().0,
            identity: place == 1,
        };
        DESTINATIONS.iter().enumerate().map(rule).collect()
    }

    #[test]
    fn destinations_are_shown_as_they_are_written() {
        for (rule, text) in rules().iter().zip(DESTINATIONS) {
            assert!(rule_text(rule).contains(&format!("-> {text}")), "{text}");
        }
        for text in [
            "",
            "hosts",
            "tcp:80",
            "vsock:1",
            "sandbox:db",
            "sandbox:A:1",
            "unix",
        ] {
            assert!(text.parse::<Destination>().is_err(), "{text} was taken");
        }
    }

    #[test]
    fn what_is_shown_can_be_set_again() {
        for rules in [rules(), Vec::new()] {
            let policy = VsockPolicy { rules };
            let shown = policy_text(&policy, true);
            assert_eq!(parse_policy(&shown).as_ref(), Ok(&policy), "{shown}");
            let json = serde_json::to_string(&policy).unwrap();
            assert_eq!(parse_policy(&json), Ok(policy));
        }
    }

    #[test]
    fn a_policy_without_rules_says_that_nothing_may_be_reached() {
        let policy = LeaseVsockPolicy {
            own: false,
            policy: VsockPolicy::default(),
        };
        let text = summary(&"a7".parse().unwrap(), &policy);
        assert_eq!(
            text,
            "lease a7, with its pool's vsock policy\n  nothing may be reached\n"
        );
    }
}

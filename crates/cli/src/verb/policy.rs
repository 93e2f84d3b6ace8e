//! `sandwire policy`: what a lease may reach, changed while it runs.

pub(crate) mod file;
pub(crate) mod flags;
mod limit;
mod rule;
mod text;

use std::path::PathBuf;

use clap::{Args, Subcommand};
use sandwire_api::{lease::LeasePolicy, name::Name};

pub(crate) use self::{
    file::{policy_text, read_policy},
    flags::PolicyFlags,
    text::{limits_text, policy_rows},
};
use crate::{
    Context,
    connection::cannot,
    failure::{Failure, Outcome},
    render,
};

/// What to do with a lease's policy.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Print what a lease may reach, in the form that `set --file` takes.
    Show(Which),
    /// Give a lease a policy of its own, at once: the one it has, with these flags applied, or a file.
    Set(Box<SetArguments>),
    /// Give a lease its pool's policy again, at once.
    Reset(Which),
}

/// Which lease.
#[derive(Debug, Args)]
pub(crate) struct Which {
    /// Name of the lease.
    name: Name,

    /// Numeric user that holds it, if not you; for root.
    #[arg(long, value_name = "UID")]
    owner_uid: Option<u32>,
}

/// Command line of `sandwire policy set`.
#[derive(Debug, Args)]
pub(crate) struct SetArguments {
    #[command(flatten)]
    which: Which,

    /// Take the whole policy from this file, TOML or JSON; `-` reads standard input.
    #[arg(long, value_name = "FILE", conflicts_with = flags::GROUP)]
    file: Option<PathBuf>,

    #[command(flatten)]
    flags: PolicyFlags,
}

pub(crate) fn run(context: &Context, verb: Verb) -> Outcome {
    let client = context.client();
    match verb {
        Verb::Show(Which { name, owner_uid }) => {
            let policy = client
                .policy(&name, owner_uid)
                .map_err(cannot(format!("show the policy of lease {name}")))?;
            let text = |policy: &LeasePolicy| policy_text(&policy.policy, policy.own);
            context.output.answer(&policy, text)
        }
        Verb::Reset(Which { name, owner_uid }) => {
            let policy = client
                .reset_policy(&name, owner_uid)
                .map_err(cannot(format!("reset the policy of lease {name}")))?;
            context
                .output
                .answer(&policy, |policy| summary(&name, policy))
        }
        Verb::Set(arguments) => {
            let Which { name, owner_uid } = arguments.which;
            let operation = format!("set the policy of lease {name}");
            let policy = match &arguments.file {
                Some(file) => read_policy(file, &operation)?,
                None if arguments.flags.is_empty() => {
                    let action = "give what is to be other, as --uplink deny, or all of it by --file; see --help";
                    return Err(Failure::refused(format!("cannot {operation}: {action}")));
                }
                None => {
                    let now = client
                        .policy(&name, owner_uid)
                        .map_err(cannot(&operation))?;
                    arguments.flags.apply(now.policy)
                }
            };
            let policy = client
                .set_policy(&name, owner_uid, &policy)
                .map_err(cannot(operation))?;
            context
                .output
                .answer(&policy, |policy| summary(&name, policy))
        }
    }
}

/// Whose policy a lease has now, and what it says.
fn summary(name: &Name, policy: &LeasePolicy) -> String {
    let whose = if policy.own { "its own" } else { "its pool's" };
    let mut rows = vec![("lease", format!("{name}, with {whose} policy"))];
    rows.extend(policy_rows(&policy.policy));
    render::pairs(&rows)
}

#[cfg(test)]
mod tests {
    use sandwire_api::pool::PolicySpec;

    use super::{file::parse_policy, *};

    #[test]
    fn what_is_shown_can_be_set_again() {
        let policy: PolicySpec = serde_json::from_value(serde_json::json!({
            "group": "a",
            "talks_to": ["b"],
            "host_services": ["tcp/53"],
            "egress": {
                "default": "deny",
                "rules": [
                    {"action": "allow", "prefixes": ["10.1.0.0/16", "fd00::/8"], "ports": ["tcp/443"]},
                    {"action": "deny", "prefixes": ["10.0.0.0/8"]},
                ],
            },
            "limits": {"egress": {"bits_per_second": 100_000_000}},
            "route_mark": 7,
        }))
        .unwrap();
        for policy in [policy, PolicySpec::default()] {
            let text = policy_text(&policy, true);
            assert_eq!(parse_policy(&text).as_ref(), Ok(&policy), "{text}");
            let json = serde_json::to_string(&policy).unwrap();
            assert_eq!(parse_policy(&json), Ok(policy));
        }
    }

    #[test]
    fn an_unknown_key_is_refused_with_its_line() {
        let error = parse_policy::<PolicySpec>("uplink = \"deny\"\nuplinks = 3\n").unwrap_err();
        assert!(
            error.contains("line 2") && error.contains("uplinks"),
            "{error}"
        );
    }
}

//! `sandwire identity policy`: what an identity may reach, changed while it runs.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use sandwire_api::identity::IdentityPolicy;

use super::{OneArguments, failure};
use crate::{Context, failure::Outcome, verb::policy::read_policy};

/// What to do with an identity's policy.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Print what an identity may reach, in the form that `set --file` takes.
    Show(OneArguments),
    /// Say what an identity may reach, at once.
    Set(SetArguments),
    /// Let an identity reach what it may by default: all but other identities, services of the host, and cloud
    /// metadata.
    Reset(OneArguments),
}

/// Command line of `sandwire identity policy set`.
#[derive(Debug, Args)]
pub(crate) struct SetArguments {
    #[command(flatten)]
    which: OneArguments,

    /// The whole policy, TOML or JSON; `-` reads standard input.
    #[arg(long, value_name = "FILE")]
    file: PathBuf,
}

pub(crate) fn run(context: &Context, verb: Verb) -> Outcome {
    match verb {
        Verb::Show(which) => {
            let operation = format!("show the policy of identity {}", which.name);
            let identities = which.folder.open(&operation)?;
            let policy = identities
                .policy(&which.name)
                .map_err(failure(&operation))?;
            context
                .output
                .answer(&policy, |policy| text(&which.name, policy))
        }
        Verb::Set(arguments) => {
            let operation = format!("set the policy of identity {}", arguments.which.name);
            let policy = read_policy(&arguments.file, &operation)?;
            set(context, &arguments.which, &policy, &operation)
        }
        Verb::Reset(which) => {
            let operation = format!("reset the policy of identity {}", which.name);
            set(context, &which, &IdentityPolicy::default(), &operation)
        }
    }
}

fn set(
    context: &Context,
    which: &OneArguments,
    policy: &IdentityPolicy,
    operation: &str,
) -> Outcome {
    let identities = which.folder.open(operation)?;
    identities
        .set_policy(&which.name, policy)
        .map_err(failure(operation))?;
    context
        .output
        .answer(policy, |policy| text(&which.name, policy))
}

/// The policy as a file would have it.
fn text(name: &str, policy: &IdentityPolicy) -> String {
    match toml::to_string(policy) {
        Ok(text) => format!("# What identity {name} may reach.\n{text}"),
        Err(error) => format!("# cannot be written as TOML: {error}; use --json\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verb::policy::file::parse_policy;

    #[test]
    fn what_is_shown_can_be_set_again() {
        let policy: IdentityPolicy = serde_json::from_value(serde_json::json!({
            "group": "a",
            "talks_to": ["b"],
            "host_services": ["tcp/53"],
            "egress": { "default": "deny", "rules": [
                {"action": "allow", "prefixes": ["10.1.0.0/16"], "ports": ["tcp/443"]},
            ]},
        }))
        .unwrap();
        for policy in [policy, IdentityPolicy::default()] {
            let text = text("web", &policy);
            assert_eq!(parse_policy(&text).as_ref(), Ok(&policy), "{text}");
        }
    }
}

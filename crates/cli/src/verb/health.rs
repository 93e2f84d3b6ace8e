//! `sandwire health`: whether the daemon and its data path work, as `/healthz` says.

use std::process::ExitCode;

use clap::Args;
use sandwire_api::health::Health;

use crate::{Context, connection::cannot, failure::Outcome};

/// Command line of `sandwire health`.
#[derive(Debug, Args)]
#[command(
    after_help = "Exit status: 0 if it is ready, 2 if it is not or doesn't answer. Warnings leave it ready."
)]
pub(crate) struct Arguments {}

pub(crate) fn run(context: &Context, _: &Arguments) -> Outcome {
    let health = context
        .client()
        .health()
        .map_err(cannot("ask whether the daemon is ready"))?;
    context.output.answer(&health, health_text)?;
    Ok(ExitCode::from(if health.ready { 0 } else { 2 }))
}

/// A line, and one for each problem: those that it isn't ready for first.
fn health_text(health: &Health) -> String {
    let state = if health.ready { "ready" } else { "not ready" };
    let mut text = format!(
        "{state} (instance {}, version {})\n",
        health.instance, health.version
    );
    let (blocking, other): (Vec<_>, Vec<_>) =
        health.problems.iter().partition(|problem| problem.blocking);
    for (kind, problems) in [("error", blocking), ("warning", other)] {
        for problem in problems {
            text += &format!("{kind}: {}: {}\n", problem.subject, problem.message);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use sandwire_api::health::Problem;

    use super::*;

    #[test]
    fn each_problem_is_a_line_and_what_keeps_it_from_being_ready_comes_first() {
        let problem = |subject: &str, blocking| Problem {
            subject: subject.to_owned(),
            message: "why".to_owned(),
            blocking,
        };
        let mut health = Health {
            ready: true,
            version: "0.1.0".to_owned(),
            instance: "default".to_owned(),
            problems: Vec::new(),
        };
        let line = "ready (instance default, version 0.1.0)\n";
        assert_eq!(health_text(&health), line);
        health.problems = vec![problem("vsock service", false), problem("pool web", true)];
        health.ready = false;
        let expected = format!("not {line}error: pool web: why\nwarning: vsock service: why\n");
        assert_eq!(health_text(&health), expected);
    }
}

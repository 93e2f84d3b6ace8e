//! `sandwire release`: gives slots back.

use std::process::ExitCode;

use clap::Args;
use sandwire_api::{
    lease::{ReleaseOutcome, Released},
    name::Name,
};
use serde::Serialize;

use crate::{
    Context,
    connection::cannot,
    failure::{Failure, Outcome},
    output::note,
    progress,
};

/// Command line of `sandwire release`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Names of the leases.
    #[arg(required = true)]
    names: Vec<Name>,

    /// Numeric user that holds them, if not you; for root.
    #[arg(long, value_name = "UID")]
    owner_uid: Option<u32>,
}

/// What came of it.
#[derive(Debug, Serialize)]
struct Report {
    released: Vec<Released>,
    failures: Vec<Failure>,
}

/// Fewer releases than this are over before a bar could be read.
const RELEASES_WORTH_A_BAR: usize = 8;

pub(crate) fn run(context: &Context, arguments: &Arguments) -> Outcome {
    let client = context.client();
    let mut report = Report {
        released: Vec::new(),
        failures: Vec::new(),
    };
    let bar = (arguments.names.len() >= RELEASES_WORTH_A_BAR)
        .then(|| progress::bar(arguments.names.len() as u64, "releasing"));
    for name in &arguments.names {
        match client.release(name, arguments.owner_uid) {
            Ok(released) => report.released.push(released),
            Err(error) => {
                let failure = cannot(format!("release lease {name}"))(error);
                report.failures.push(failure);
            }
        }
        if let Some(bar) = &bar {
            bar.inc(1);
        }
    }
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    // One lease that fails alone is an ordinary failure.
    if report.released.is_empty() && report.failures.len() == 1 {
        return Err(report.failures.remove(0));
    }
    context.output.answer(&report, |report| {
        report.released.iter().map(released_text).collect()
    })?;
    for failure in &report.failures {
        note(&failure.message);
    }
    let status = report
        .failures
        .iter()
        .map(|failure| failure.exit_status)
        .max();
    Ok(ExitCode::from(status.unwrap_or(0)))
}

/// One line on a released lease.
pub(crate) fn released_text(released: &Released) -> String {
    let name = &released.name;
    match released.outcome {
        ReleaseOutcome::Released => format!("{name} released\n"),
        ReleaseOutcome::Held => {
            let holders: Vec<String> = released
                .held_by
                .iter()
                .map(|holder| format!("{} (pid {})", holder.command, holder.pid))
                .collect();
            let holders = if holders.is_empty() {
                "a process that can't be seen from here".to_owned()
            } else {
                holders.join(", ")
            };
            format!("{name} is still held by {holders}; its slot goes when that ends\n")
        }
    }
}

#[cfg(test)]
mod tests {
    use sandwire_api::lease::TapHolder;

    use super::*;

    #[test]
    fn a_held_slot_is_reported_with_its_holders() {
        let holder = TapHolder {
            pid: 42,
            command: "firecracker".to_owned(),
        };
        let mut released = Released {
            name: "a7".parse().unwrap(),
            pool: "web".parse().unwrap(),
            slot: 3,
            outcome: ReleaseOutcome::Held,
            held_by: vec![holder],
        };
        assert!(released_text(&released).contains("still held by firecracker (pid 42)"));
        released.held_by.clear();
        assert!(released_text(&released).contains("can't be seen"));
    }
}

//! Runs the tests, tier by tier, and says at the end which tier could not run and why.
//!
//! A test that needs more than an ordinary user has is `#[ignore]`d with a reason that ends in the
//! command that runs it: `#[ignore = "needs root: cargo xtask test netns"]`. That reason is the only
//! place that says which tier a test belongs to; plain `cargo test` shows it. Nothing is ever
//! counted as passed that did not run.

mod arm;
mod fuzz;
mod harness;
mod host_state;
mod interrupt;
mod results;
mod summary;
mod tier;

use std::{process::ExitCode, time::Instant};

use anyhow::Result;

use self::{
    summary::{Outcome, Summary, Tally},
    tier::Tier,
};
use crate::packages;

/// Runs the tests, tier by tier, and says which could not run.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Tiers to run. Default: every one that this machine can run, but for `arm`.
    tiers: Vec<Tier>,
    /// Fail if a tier cannot run here. A tier that is named must run in any case.
    #[arg(long)]
    require: bool,
    /// Install nothing.
    #[arg(long)]
    no_setup: bool,
    /// Only tests whose name contains one of these. It is a failure if there is none in any tier.
    #[arg(last = true)]
    filters: Vec<String>,
}

/// Ends a reason of `#[ignore]`, before the tier's name.
pub(crate) const REASON_ENDING: &str = "cargo xtask test ";

/// The tier that a reason of `#[ignore]` names.
pub(crate) fn tier_of_reason(reason: &str) -> Option<Tier> {
    let (_, name) = reason.rsplit_once(REASON_ENDING)?;
    Tier::ALL.into_iter().find(|tier| tier.name() == name)
}

/// Runs `cargo xtask test`.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let tiers = if arguments.tiers.is_empty() {
        Tier::ALL.to_vec()
    } else {
        let named = |tier: &Tier| arguments.tiers.contains(tier);
        Tier::ALL.into_iter().filter(named).collect()
    };
    interrupt::watch()?;
    if !arguments.no_setup {
        // What is missing decides below which tiers can run; unit tests need little.
        packages::try_ensure();
    }
    let mut summary = Summary::default();
    let mut targets = None;
    for tier in &tiers {
        let tier = *tier;
        if tier == Tier::Netns && tiers.contains(&Tier::Fuzz) && Tier::Fuzz.obstacle().is_none() {
            // Its tests wait most of the time.
            targets = Some(fuzz::Targets::begin());
        }
        eprintln!("\n==== {} ====", tier.name());
        let outcome = if tier.only_by_name() && !arguments.tiers.contains(&tier) {
            Outcome::NotRun(format!("only by name: cargo xtask test {}", tier.name()))
        } else {
            outcome_of(tier, &arguments.filters, &mut targets)
        };
        summary.add(tier, outcome);
    }
    print!("{summary}");
    Ok(if is_good(&summary, arguments) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Whether what was asked for ran, and nothing failed.
fn is_good(summary: &Summary, arguments: &Arguments) -> bool {
    let filters = &arguments.filters;
    if !filters.is_empty() && !summary.has_run_any() {
        // Most likely a name that is written otherwise.
        eprintln!("error: no test ran for the names: {}", filters.join(" "));
        return false;
    }
    summary.is_good(|tier| {
        let required = arguments.require && tier.is_for_all();
        !required && !arguments.tiers.contains(&tier)
    })
}

/// `targets`: those of the fuzz tier, if they are being built already.
fn outcome_of(tier: Tier, filters: &[String], targets: &mut Option<fuzz::Targets>) -> Outcome {
    if let Some(obstacle) = tier.obstacle() {
        return Outcome::NotRun(obstacle);
    }
    let start = Instant::now();
    let tally = run_tier(tier, filters, targets).unwrap_or_else(|error| {
        let mut tally = Tally::default();
        tally.fail(format!("{}: {error:#}", tier.name()));
        tally
    });
    Outcome::Ran(tally, start.elapsed())
}

fn run_tier(tier: Tier, filters: &[String], targets: &mut Option<fuzz::Targets>) -> Result<Tally> {
    if tier == Tier::Unit {
        return harness::run_cargo_test(filters, tier.deadline());
    }
    if tier == Tier::Fuzz {
        let targets = targets.take().unwrap_or_else(fuzz::Targets::begin);
        return fuzz::run(filters, targets);
    }
    if tier == Tier::Arm {
        return arm::run(filters);
    }
    let before = host_state::HostState::read()?;
    let mut tally = harness::run_ignored(tier, filters)?;
    for difference in before.differences(&host_state::HostState::read()?) {
        tally.fail(format!("{difference} after the {} tests", tier.name()));
    }
    if tally.passed + tally.failed == 0 && filters.is_empty() {
        tally.fail(format!("no test of the {} tier was found", tier.name()));
    }
    Ok(tally)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn names_that_are_no_tests_are_a_failure() {
        let arguments = Arguments {
            tiers: vec![Tier::Unit, Tier::Netns],
            require: false,
            no_setup: true,
            filters: vec!["a_name".to_owned()],
        };
        let mut summary = Summary::default();
        summary.add(Tier::Unit, Outcome::Ran(Tally::default(), Duration::ZERO));
        assert!(!is_good(&summary, &arguments));
        let found = Tally {
            passed: 1,
            ..Tally::default()
        };
        summary.add(Tier::Netns, Outcome::Ran(found, Duration::ZERO));
        assert!(is_good(&summary, &arguments), "one tier has such a test");
    }

    #[test]
    fn the_end_of_a_reason_names_the_tier() {
        let tier = tier_of_reason("needs root: cargo xtask test netns");
        assert_eq!(tier, Some(Tier::Netns));
    }

    #[test]
    fn a_reason_that_names_no_tier_has_none() {
        for reason in [
            "",
            "slow",
            "needs root: cargo xtask test",
            "needs: cargo xtask test netns now",
        ] {
            assert_eq!(tier_of_reason(reason), None, "{reason:?}");
        }
    }
}

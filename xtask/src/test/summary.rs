//! Counts of tests, and the closing lines of a run.

use std::{fmt, ops::AddAssign, time::Duration};

use super::tier::Tier;

/// How many tests passed and failed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Tests that ran and passed.
    pub(crate) passed: u32,
    /// Tests that ran and failed, and test programs that crashed.
    pub(crate) failed: u32,
    /// What is known of those that failed: a line each, and further ones that say why.
    pub(crate) failures: Vec<String>,
}

impl Tally {
    /// Counts a failure.
    pub(crate) fn fail(&mut self, what: String) {
        self.failed += 1;
        self.failures.push(what);
    }

    /// Says why something failed that is among the failures.
    pub(crate) fn explain(&mut self, what: &str, why: &str) {
        if let Some(failure) = self.failures.iter_mut().find(|failure| *failure == what) {
            for line in why.lines() {
                failure.push_str("\n    ");
                failure.push_str(line);
            }
        }
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.failures.extend(other.failures);
    }
}

/// What came of a tier.
pub(crate) enum Outcome {
    /// It ran, for so long.
    Ran(Tally, Duration),
    /// It could not run, for this reason.
    NotRun(String),
}

/// What came of every tier.
#[derive(Default)]
pub(crate) struct Summary {
    tiers: Vec<(Tier, Outcome)>,
}

impl Summary {
    /// Adds what came of a tier.
    pub(crate) fn add(&mut self, tier: Tier, outcome: Outcome) {
        self.tiers.push((tier, outcome));
    }

    /// Whether any tier had a test to run.
    pub(crate) fn has_run_any(&self) -> bool {
        self.tiers.iter().any(|(_, outcome)| match outcome {
            Outcome::Ran(tally, _) => tally.passed + tally.failed > 0,
            Outcome::NotRun(_) => false,
        })
    }

    /// Whether nothing failed, and nothing is missing that may not be.
    pub(crate) fn is_good(&self, may_be_missing: impl Fn(Tier) -> bool) -> bool {
        self.tiers.iter().all(|(tier, outcome)| match outcome {
            Outcome::Ran(tally, _) => tally.failed == 0,
            Outcome::NotRun(_) => may_be_missing(*tier),
        })
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut total = Tally::default();
        writeln!(formatter)?;
        for (tier, outcome) in &self.tiers {
            match outcome {
                Outcome::Ran(tally, took) => {
                    total += tally.clone();
                    for failure in &tally.failures {
                        writeln!(formatter, "failed: {failure}")?;
                    }
                    let (name, passed, failed) = (tier.name(), tally.passed, tally.failed);
                    let minutes = |time: Duration| time.as_secs_f64() / 60.0;
                    let (took, allowed) = (minutes(*took), minutes(tier.deadline()));
                    writeln!(
                        formatter,
                        "{name}: {passed} passed, {failed} failed, in {took:.1} of {allowed:.0} min"
                    )?;
                }
                Outcome::NotRun(reason) => {
                    writeln!(formatter, "not run: {} ({reason})", tier.name())?;
                }
            }
        }
        writeln!(
            formatter,
            "{} passed, {} failed",
            total.passed, total.failed
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(passed: u32, failed: u32) -> Tally {
        Tally {
            passed,
            failed,
            failures: Vec::new(),
        }
    }

    #[test]
    fn the_last_line_is_the_total_alone() {
        let mut summary = Summary::default();
        let took = Duration::from_secs(90);
        summary.add(Tier::Unit, Outcome::Ran(tally(7, 0), took));
        summary.add(Tier::Netns, Outcome::Ran(tally(2, 1), took));
        summary.add(Tier::Guest, Outcome::NotRun("no cpio".to_owned()));
        let mut broken = Tally::default();
        broken.fail("tests/netns_crash.rs: a_crash".to_owned());
        broken.explain("tests/netns_crash.rs: a_crash", "at 1\nits words");
        summary.add(Tier::Netns, Outcome::Ran(broken, took));
        let text = summary.to_string();
        assert!(
            text.contains("failed: tests/netns_crash.rs: a_crash\n    at 1\n    its words\n"),
            "{text}"
        );
        assert!(text.contains("7 passed, 0 failed, in 1.5 of "), "{text}");
        assert_eq!(text.lines().last(), Some("9 passed, 2 failed"));
        assert!(text.contains("not run: guest (no cpio)"), "{text}");
        assert!(!summary.is_good(|_| true));
    }

    #[test]
    fn an_absent_tier_fails_only_where_it_is_required() {
        let mut summary = Summary::default();
        summary.add(Tier::Guest, Outcome::NotRun("needs root".to_owned()));
        assert!(summary.is_good(|tier| tier == Tier::Guest));
        assert!(!summary.is_good(|tier| tier != Tier::Guest));
    }
}

//! Counts of tests, and the closing lines of a run.

use std::{fmt, ops::AddAssign};

use super::tier::Tier;

/// How many tests passed and failed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Tests that ran and passed.
    pub(crate) passed: u32,
    /// Tests that ran and failed, and test programs that crashed.
    pub(crate) failed: u32,
    /// What is known of those that failed, one line each.
    pub(crate) failures: Vec<String>,
}

impl Tally {
    /// Counts a failure.
    pub(crate) fn fail(&mut self, what: String) {
        self.failed += 1;
        self.failures.push(what);
    }

    /// Reads a line such as `test result: ok. 3 passed; 0 failed; 1 ignored; …`.
    pub(crate) fn from_line(line: &str) -> Option<Self> {
        let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
        let count = |what: &str| {
            counts
                .split("; ")
                .find_map(|part| part.strip_suffix(what)?.trim_end().parse().ok())
        };
        Some(Self {
            passed: count("passed")?,
            failed: count("failed")?,
            failures: Vec::new(),
        })
    }

    /// Reads the name of a failed test from a line such as `test a::b ... FAILED`.
    pub(crate) fn failed_test(line: &str) -> Option<&str> {
        line.strip_prefix("test ")?.strip_suffix(" ... FAILED")
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
    /// It ran.
    Ran(Tally),
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

    /// Whether nothing failed, and nothing is missing that may not be.
    pub(crate) fn is_good(&self, may_be_missing: impl Fn(Tier) -> bool) -> bool {
        self.tiers.iter().all(|(tier, outcome)| match outcome {
            Outcome::Ran(tally) => tally.failed == 0,
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
                Outcome::Ran(tally) => {
                    total += tally.clone();
                    for failure in &tally.failures {
                        writeln!(formatter, "failed: {failure}")?;
                    }
                    let (name, passed, failed) = (tier.name(), tally.passed, tally.failed);
                    writeln!(formatter, "{name}: {passed} passed, {failed} failed")?;
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
    fn a_result_line_is_read() {
        let line = "test result: FAILED. 12 passed; 3 failed; 4 ignored; 0 measured; 5 filtered out; finished in 0.10s";
        assert_eq!(Tally::from_line(line), Some(tally(12, 3)));
    }

    #[test]
    fn other_lines_are_not_results() {
        for line in [
            "",
            "test result of a test ... ok",
            "running 3 tests",
            "test result: ok. passed",
        ] {
            assert_eq!(Tally::from_line(line), None, "{line:?}");
        }
    }

    #[test]
    fn a_failed_test_is_told_by_name() {
        let name = Tally::failed_test("test pool::tests::a_pool_fills ... FAILED");
        assert_eq!(name, Some("pool::tests::a_pool_fills"));
        for line in [
            "test a ... ok",
            "FAILED",
            "test result: FAILED. 1 passed; 2 failed",
        ] {
            assert_eq!(Tally::failed_test(line), None, "{line:?}");
        }
    }

    #[test]
    fn the_last_line_is_the_total_alone() {
        let mut summary = Summary::default();
        summary.add(Tier::Unit, Outcome::Ran(tally(7, 0)));
        summary.add(Tier::Netns, Outcome::Ran(tally(2, 1)));
        summary.add(Tier::Guest, Outcome::NotRun("no cpio".to_owned()));
        let mut broken = Tally::default();
        broken.fail("tests/netns_crash.rs: a_crash".to_owned());
        summary.add(Tier::Netns, Outcome::Ran(broken));
        let text = summary.to_string();
        assert!(
            text.contains("failed: tests/netns_crash.rs: a_crash\n"),
            "{text}"
        );
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

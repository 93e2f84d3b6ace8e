//! What a test runner writes, read line by line.
//!
//! A test that fails has what it wrote shown: that of a lab test is all that a runner of its own wrote in the lab, the
//! line of its failure and the counts among it. So lines count only where the outer runner writes them.

use super::summary::Tally;

/// Reads the output of one test command, which may run several test programs one after another.
#[derive(Debug, Default)]
pub(super) struct Results {
    running: Option<Running>,
}

/// A test program that has said how many tests it runs, and no result yet.
#[derive(Debug)]
struct Running {
    tests: u32,
    failed: u32,
    /// From here on it shows what tests wrote that have failed.
    shows_output: bool,
}

/// What a line says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// That the test of this name has failed.
    Failed(String),
    /// How many tests of a program passed and failed.
    Result(Tally),
}

impl Results {
    /// Takes the next line.
    pub(super) fn read(&mut self, line: &str) -> Option<Said> {
        let Some(running) = &mut self.running else {
            self.running = tests_of(line).map(|tests| Running {
                tests,
                failed: 0,
                shows_output: false,
            });
            return None;
        };
        if let Some(counts) = Counts::of(line)
            && counts.ends(running)
        {
            self.running = None;
            return Some(Said::Result(Tally {
                passed: counts.passed,
                failed: counts.failed,
                failures: Vec::new(),
            }));
        }
        if running.shows_output {
            return None;
        }
        if line == "failures:" {
            running.shows_output = true;
            return None;
        }
        let name = line.strip_prefix("test ")?.strip_suffix(" ... FAILED")?;
        running.failed += 1;
        Some(Said::Failed(name.to_owned()))
    }

    /// Whether a program has begun its tests, and no result has come.
    pub(super) fn are_awaited(&self) -> bool {
        self.running.is_some()
    }
}

/// Reads a line such as `running 3 tests`.
fn tests_of(line: &str) -> Option<u32> {
    let (count, what) = line.strip_prefix("running ")?.split_once(' ')?;
    ["test", "tests"]
        .contains(&what)
        .then(|| count.parse().ok())?
}

/// A line such as `test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; …`.
struct Counts {
    passed: u32,
    failed: u32,
    others: u32,
}

impl Counts {
    fn of(line: &str) -> Option<Self> {
        let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
        let count = |what: &str| -> Option<u32> {
            counts
                .split("; ")
                .find_map(|part| part.strip_suffix(what)?.trim_end().parse().ok())
        };
        Some(Self {
            passed: count("passed")?,
            failed: count("failed")?,
            others: count("ignored")? + count("measured")?,
        })
    }

    /// Whether these are the counts of all that is running. Those of the only test's own runner may be as well, and
    /// say the same then.
    fn ends(&self, running: &Running) -> bool {
        self.passed + self.failed + self.others == running.tests && self.failed >= running.failed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Passed, failed, and the names of those that failed.
    fn read(text: &str) -> (u32, u32, Vec<String>) {
        let mut results = Results::default();
        let (mut tally, mut names) = (Tally::default(), Vec::new());
        for said in text
            .lines()
            .filter_map(|line| results.read(line.trim_start()))
        {
            match said {
                Said::Failed(name) => names.push(name),
                Said::Result(counts) => tally += counts,
            }
        }
        (tally.passed, tally.failed, names)
    }

    #[test]
    fn results_of_several_programs_add_up() {
        let text = "running 3 tests
            test a ... ok
            test b::c ... FAILED
            test d ... ignored, needs root
            failures:
            ---- b::c stdout ----
            failures:
                b::c
            test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 5 filtered out; finished in 0.10s
            running 1 test
            test e ... ok
            test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.10s
            running 0 tests
            test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.10s";
        assert_eq!(read(text), (2, 1, vec!["b::c".to_owned()]));
    }

    /// What a lab test leaves that failed, as the only one or among others; cut off by its deadline or not.
    #[test]
    fn a_test_that_fails_in_its_lab_counts_once() {
        let inside = "running 1 test
            test a ... FAILED
            failures:
            ---- a stdout ----
            failures:
                a
            test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 9 filtered out; finished in 0.10s\n";
        for (inside, others) in [inside, "running 1 test\n"]
            .into_iter()
            .flat_map(|inside| [(inside, 0), (inside, 1), (inside, 2)])
        {
            let tests = if others == 0 { "test" } else { "tests" };
            let passed = "test b ... ok\n".repeat(others);
            let text = format!(
                "running {} {tests}
                test a ... FAILED
                {passed}
                failures:
                ---- a stdout ----
                a failed in its lab (exit status: 101)
                --- output of the lab ---
                {inside}
                failures:
                    a
                test result: FAILED. {others} passed; 1 failed; 0 ignored; 0 measured; 9 filtered out; finished in 0.10s",
                others + 1
            );
            let passed = u32::try_from(others).unwrap();
            assert_eq!(read(&text), (passed, 1, vec!["a".to_owned()]), "{text}");
        }
    }

    /// The lab was left in disorder, so that the test failed although all was well inside.
    #[test]
    fn a_success_inside_a_failed_test_does_not_count() {
        let text = "running 1 test
            test a ... FAILED
            failures:
            running 1 test
            test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 9 filtered out; finished in 0.10s
            failures:
            test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 9 filtered out; finished in 0.10s";
        assert_eq!(read(text), (0, 1, vec!["a".to_owned()]));
    }

    #[test]
    fn a_program_that_ends_without_a_result_is_told() {
        let mut results = Results::default();
        assert!(!results.are_awaited());
        results.read("running 1 test");
        results.read("test a ... ok");
        assert!(results.are_awaited());
        results.read("test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out");
        assert!(!results.are_awaited());
    }

    #[test]
    fn other_lines_say_nothing() {
        for line in [
            "",
            "test a ... ok",
            "test a ... FAILED",
            "running tests",
            "test result of a test ... ok",
            "test result: ok. passed",
            "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured",
        ] {
            assert_eq!(Results::default().read(line), None, "{line:?}");
        }
    }
}

//! What a test runner writes, read line by line.
//!
//! A test that fails has what it wrote shown: that of a lab test is all that a runner of its own wrote in the lab, the
//! line of its failure and the counts among it. So lines count only where the outer runner writes them. Why a test failed is
//! taken from what is shown of it.

use super::summary::Tally;

/// What is kept of a panic's message: the rest is further up.
const LINES_OF_MESSAGE: usize = 6;
const LETTERS_OF_LINE: usize = 300;
/// What a panic says of a test that ran elsewhere, in a lab or on a guest: why it failed is in what that wrote.
const OF_WHO_WAITED: [&str; 2] = [" failed in its lab (", " failed on Linux "];

/// Reads the output of one test command, which may run several test programs one after another.
#[derive(Debug, Default)]
pub(super) struct Results {
    running: Option<Running>,
}

/// A test program that has said how many tests it runs, and no result yet.
#[derive(Debug)]
struct Running {
    tests: u32,
    failed: Vec<String>,
    /// From here on it shows what tests wrote that have failed.
    shows_output: bool,
    /// Whose output is shown, if nothing has been said yet of why it failed.
    shown: Option<String>,
    /// The message of a panic, while it is read.
    message: Vec<String>,
}

/// What a line says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// That the test of this name has failed.
    Failed(String),
    /// Why the test of this name has failed: where it panicked, and the message, in lines.
    Why(String, String),
    /// How many tests of a program passed and failed.
    Result(Tally),
}

impl Results {
    /// Takes the next line.
    pub(super) fn read(&mut self, line: &str) -> Option<Said> {
        let Some(running) = &mut self.running else {
            self.running = tests_of(line).map(|tests| Running {
                tests,
                failed: Vec::new(),
                shows_output: false,
                shown: None,
                message: Vec::new(),
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
            return running.read_output(line);
        }
        if line == "failures:" {
            running.shows_output = true;
            return None;
        }
        let name = line.strip_prefix("test ")?.strip_suffix(" ... FAILED")?;
        running.failed.push(name.to_owned());
        Some(Said::Failed(name.to_owned()))
    }

    /// Whether a program has begun its tests, and no result has come.
    pub(super) fn are_awaited(&self) -> bool {
        self.running.is_some()
    }
}

impl Running {
    /// Takes the next line of what a failed test wrote. Its first panic counts, but for that of who waited for it.
    fn read_output(&mut self, line: &str) -> Option<Said> {
        let header = line.strip_prefix("---- ");
        if let Some(name) = header.and_then(|rest| rest.strip_suffix(" stdout ----"))
            && self.failed.iter().any(|failed| failed == name)
        {
            self.shown = Some(name.to_owned());
            self.message.clear();
        } else if let Some(place) = place_of_panic(line) {
            self.message = vec![place.to_owned()];
        } else if self.message.is_empty() {
            return None;
        } else if is_end_of_message(line) {
            return self.end_message();
        } else if self.message.len() <= LINES_OF_MESSAGE {
            self.message
                .push(line.chars().take(LETTERS_OF_LINE).collect());
        }
        None
    }

    fn end_message(&mut self) -> Option<Said> {
        let message = std::mem::take(&mut self.message).join("\n");
        if OF_WHO_WAITED.iter().any(|words| message.contains(words)) {
            return None;
        }
        Some(Said::Why(self.shown.take()?, message))
    }
}

/// Reads a line such as `thread 'a' (2) panicked at src/a.rs:1:2:`.
fn place_of_panic(line: &str) -> Option<&str> {
    let (_, place) = line.strip_prefix("thread '")?.split_once(" panicked at ")?;
    place.strip_suffix(':')
}

fn is_end_of_message(line: &str) -> bool {
    line.is_empty() || line == "stack backtrace:" || line.starts_with("note: ")
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
        let failed = u32::try_from(running.failed.len()).unwrap_or(u32::MAX);
        self.passed + self.failed + self.others == running.tests && self.failed >= failed
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
                Said::Why(name, why) => names.push(format!("{name}: {why}")),
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

    #[test]
    fn it_is_told_why_a_test_failed() {
        let text = "running 3 tests
            test a ... FAILED
            test b ... FAILED
            test c ... FAILED
            failures:
            ---- a stdout ----
            thread 'a' (3) panicked at src/lab.rs:83:9:
            a failed in its lab (exit status: 101)
            --- output of the lab ---
            running 1 test
            test a ... FAILED

            thread 'x' (2) panicked at tests/a.rs:1:2:
            assertion `left == right` failed: it has none
              left: 1
            stack backtrace:
               0: somewhere

            thread 'a' (2) panicked at tests/a.rs:9:9:
            a scoped thread panicked

            ---- b stdout ----
            thread 'b' (5) panicked at src/lab.rs:177:9:
            b failed on Linux 6.1.0-56-cloud-amd64
            --- console of the guest ---

            test b ...
            thread 'b' (2) panicked at tests/b.rs:7:8:
            no answer

            ---- c stdout ----
            thread 'c' (4) panicked at tests/c.rs:3:4:
            nothing came
            note: run with `RUST_BACKTRACE=1`
            failures:
            test result: FAILED. 0 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.10s";
        let a = "a: tests/a.rs:1:2\nassertion `left == right` failed: it has none\nleft: 1";
        let others = [
            "b: tests/b.rs:7:8\nno answer",
            "c: tests/c.rs:3:4\nnothing came",
        ];
        let expected = ["a", "b", "c", a, others[0], others[1]];
        assert_eq!(read(text), (0, 3, expected.map(str::to_owned).to_vec()));
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

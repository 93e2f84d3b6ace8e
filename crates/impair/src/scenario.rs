//! Scenarios: what becomes of a network in the course of time, from a file.
//!
//! A file is read and checked as a whole before anything changes; what is wrong is said with its line. What then comes out
//! is a list of moments, each with the whole impairment that a target has from then on. Nothing here has a clock: who
//! runs a scenario takes [`Change`] after [`Change`] and waits for their moments. The format is described in
//! `docs/impair-format.md`.

mod changes;
mod file;
pub mod record;

use sandwire_api::impairment::{Direction, Impairment, TimeSpan};

use crate::{
    Nanoseconds,
    compile::{CompileError, compile},
    random,
};

pub use changes::Changes;

/// A scenario that was read and checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    targets: Vec<String>,
    /// What holds at the start of each repetition.
    initial: Impairment,
    /// In the order of their moments.
    steps: Vec<Step>,
    /// Of one repetition.
    length: Nanoseconds,
    repeat: Repeat,
    granularity: Nanoseconds,
}

/// How often a scenario runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeat {
    /// That often.
    Times(u32),
    /// Until somebody stops it.
    Forever,
}

/// What a target has from a moment on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The moment, from the start of the scenario.
    pub at: Nanoseconds,
    /// The target.
    pub target: String,
    /// All that happens to its packets.
    pub impairment: Impairment,
}

/// What is wrong with a scenario's file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct ScenarioError {
    /// Where, from 1.
    pub line: usize,
    /// What is wrong, and what to do.
    pub problem: String,
}

/// Steps that a file may have.
pub const STEPS_MAX: usize = 10_000;
/// Moments of one repetition, the steps of ramps and both ends of each flap among them.
pub const EVENTS_MAX: u64 = 200_000;
/// The longest scenario, and the latest moment: 30 days.
pub const LENGTH_MAX: TimeSpan = TimeSpan::milliseconds(30 * 24 * 3_600_000);
/// How fine ramps may be, and how short a flap.
pub const GRANULARITY_MIN: TimeSpan = TimeSpan::milliseconds(1);
/// How fine ramps are unless the file says otherwise.
pub const GRANULARITY: TimeSpan = TimeSpan::milliseconds(100);
/// Name of the rule that a partition puts before all others.
pub const PARTITION_RULE: &str = "scenario-partition";

/// One step of a file.
#[derive(Clone, Debug, PartialEq)]
struct Step {
    at: Nanoseconds,
    /// Index of its target; none for all.
    target: Option<usize>,
    action: Action,
    /// Where it stands, for errors.
    line: usize,
}

/// What a step does.
#[derive(Clone, Debug, PartialEq)]
enum Action {
    /// These rules take the place of all.
    Set(Impairment),
    /// Some numbers of a rule go evenly to others.
    Ramp {
        /// The rule; none for the only one.
        rule: Option<String>,
        to: Values,
        over: Nanoseconds,
    },
    /// Nothing passes, for a while or until healed.
    Partition {
        ways: Direction,
        lasts: Option<Nanoseconds>,
    },
    /// Partitions and flaps end.
    Heal { ways: Direction },
    /// Partitions come and go.
    Flap {
        ways: Direction,
        up: Nanoseconds,
        down: Nanoseconds,
        after: Nanoseconds,
        lasts: Nanoseconds,
    },
    /// Nothing happens any more.
    Clear,
}

/// Numbers that a ramp goes to.
type Values = file::Values;

impl Scenario {
    /// Reads and checks a file. `targets` are the names that its steps may use.
    ///
    /// # Errors
    /// The first thing that is wrong, with its line.
    pub fn parse(text: &str, targets: &[&str]) -> Result<Self, ScenarioError> {
        let scenario = file::read(text, targets)?;
        scenario.check()?;
        Ok(scenario)
    }

    /// How long it runs; none if forever.
    #[must_use]
    pub fn length(&self) -> Option<Nanoseconds> {
        match self.repeat {
            Repeat::Times(times) => Some(self.length.saturating_mul(u64::from(times))),
            Repeat::Forever => None,
        }
    }

    /// Of all its random decisions; every change has the same.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.initial.seed
    }

    /// How often it runs.
    #[must_use]
    pub fn repeat(&self) -> Repeat {
        self.repeat
    }

    /// All changes, in the order of their moments; first what each target has at the start.
    #[must_use]
    pub fn changes(&self) -> Changes<'_> {
        Changes::new(self)
    }

    /// What is set by it: first what holds at the start.
    pub fn impairments(&self) -> impl Iterator<Item = &Impairment> {
        let set = self.steps.iter().filter_map(|step| match &step.action {
            Action::Set(impairment) => Some(impairment),
            _ => None,
        });
        std::iter::once(&self.initial).chain(set)
    }

    /// Reads the files of traces with `read`, which gets their paths as they were written, and checks what is in them.
    ///
    /// # Errors
    /// What `read` says, or why a trace isn't one, with the line of the step.
    pub fn read_files<E: std::fmt::Display>(
        &mut self,
        mut read: impl FnMut(&str) -> Result<String, E>,
    ) -> Result<(), ScenarioError> {
        let steps = self
            .steps
            .iter_mut()
            .filter_map(|step| match &mut step.action {
                Action::Set(impairment) => Some((step.line, impairment)),
                _ => None,
            });
        for (line, impairment) in std::iter::once((1, &mut self.initial)).chain(steps) {
            let refuse = |problem| ScenarioError { line, problem };
            let files = impairment.read_files(&mut read);
            files.map_err(|error| refuse(error.to_string()))?;
            for direction in [random::Direction::Egress, random::Direction::Ingress] {
                let compiled = compile(impairment, direction);
                compiled.map_err(|error: CompileError| refuse(error.to_string()))?;
            }
        }
        Ok(())
    }

    /// Runs it once, without a clock, and looks at every impairment that it comes to.
    fn check(&self) -> Result<(), ScenarioError> {
        let once = Self {
            repeat: Repeat::Times(1),
            ..self.clone()
        };
        once.changes().check()
    }
}

#[cfg(test)]
mod tests;

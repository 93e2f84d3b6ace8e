//! How much of a suite is run: which parts, how often, and for how long.
//!
//! Suites whose measurements take turns in rounds have it as a part of their command line.

use std::time::Duration;

use clap::{
    Args, ValueEnum,
    builder::{EnumValueParser, RangedI64ValueParser},
    value_parser,
};

/// Reads numbers of rounds, seconds and the like: of none of them there would be no figures.
pub(crate) fn at_least_one() -> RangedI64ValueParser<u32> {
    value_parser!(u32).range(1..)
}

/// Parts of a suite, and what they take unless told otherwise.
pub(crate) trait Part: ValueEnum + PartialEq + Send + Sync + 'static {
    /// For a first impression.
    const QUICK: Pace;
    /// For comparisons.
    const FULL: Pace;
}

/// How often, and for how long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// Rounds in which all take turns.
    pub(crate) rounds: u32,
    /// Milliseconds of each measurement that goes by the clock.
    pub(crate) milliseconds: u32,
}

/// What is asked for of a suite.
#[derive(Clone, Debug, Args)]
pub(crate) struct Extent<P: Part> {
    /// Few and short runs: a first impression, no basis for comparisons.
    #[arg(long)]
    quick: bool,
    /// Run only these parts.
    #[arg(long, value_name = "PART", value_parser = EnumValueParser::<P>::new())]
    only: Vec<P>,
    #[arg(
        long,
        value_name = "NUMBER",
        value_parser = at_least_one(),
        help = format!("Rounds in which all take turns. Default: {}", P::FULL.rounds)
    )]
    rounds: Option<u32>,
    #[arg(
        long,
        value_name = "NUMBER",
        value_parser = at_least_one(),
        help = format!(
            "Milliseconds of each measurement that goes by the clock. Default: {}",
            P::FULL.milliseconds
        )
    )]
    milliseconds: Option<u32>,
}

impl<P: Part> Extent<P> {
    /// Whether a first impression is enough.
    pub(crate) fn is_quick(&self) -> bool {
        self.quick
    }

    /// Whether this part is to be run.
    #[expect(clippy::needless_pass_by_value, reason = "a part is a name")]
    pub(crate) fn has(&self, part: P) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }

    /// Rounds in which all take turns.
    pub(crate) fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(self.pace().rounds)
    }

    /// Milliseconds of each measurement that goes by the clock.
    pub(crate) fn milliseconds(&self) -> u32 {
        self.milliseconds.unwrap_or(self.pace().milliseconds)
    }

    /// The same as a duration.
    pub(crate) fn time(&self) -> Duration {
        Duration::from_millis(self.milliseconds().into())
    }

    fn pace(&self) -> Pace {
        if self.quick { P::QUICK } else { P::FULL }
    }
}

//! `sandwire bench`: measures this machine, or makes a report of measurements.

use sandwire_bench::command::{self, BenchCommand};

use crate::{
    Context,
    failure::{Failure, Outcome},
};

pub(crate) fn run(context: &Context, command: &BenchCommand) -> Outcome {
    command::run(command, context.output.json)
        .map_err(|error| Failure::failed(format!("cannot finish the benchmark: {error:#}")))
}

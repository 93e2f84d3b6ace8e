//! `sandwire bench`: measures this machine, or makes a report of measurements.

use sandwire_api::error::ErrorCode;
use sandwire_bench::command::{self, BenchCommand};

use crate::{
    Context,
    failure::{Failure, Outcome},
};

pub(crate) fn run(context: &Context, command: &BenchCommand) -> Outcome {
    if command.needs_root() && !rustix::process::geteuid().is_root() {
        return Err(Failure::new(
            ErrorCode::Forbidden,
            "cannot run the benchmark: it makes network namespaces, which needs root; run it by sudo",
        ));
    }
    command::run(command, context.output.json)
        .map_err(|error| Failure::failed(format!("cannot finish the benchmark: {error:#}")))
}

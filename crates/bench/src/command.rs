//! The verb `bench` of the command line.

use std::{
    fs,
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::{Context, Result};
use clap::{Args, Subcommand};

use crate::{
    private_host,
    record::Record,
    report,
    slots::{self, Case, Sizes},
};

/// Measures this machine, in namespaces of its own, and makes reports of measurements.
#[derive(Clone, Debug, Args)]
pub struct BenchCommand {
    #[command(subcommand)]
    suite: Suite,
}

#[derive(Clone, Debug, Subcommand)]
enum Suite {
    /// How fast slots are built, handed out, torn down and adopted. Needs root.
    Slots(SlotsArguments),
    /// Makes an HTML page with plots from records that `--json` wrote.
    Report(ReportArguments),
}

#[derive(Clone, Debug, Args)]
struct SlotsArguments {
    /// Fewer slots and one round: a first impression within a minute, no basis for comparisons.
    #[arg(long)]
    quick: bool,
    /// Run only these cases.
    #[arg(long, value_name = "CASE")]
    only: Vec<Case>,
    /// We are inside the namespaces already.
    #[arg(long, hide = true)]
    in_private_host: bool,
}

#[derive(Clone, Debug, Args)]
struct ReportArguments {
    /// Records to report on.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Where to write the page. Default: standard output.
    #[arg(long, value_name = "FILE.html")]
    out: Option<PathBuf>,
}

impl BenchCommand {
    /// Whether it makes network namespaces, which only root may.
    #[must_use]
    pub fn needs_root(&self) -> bool {
        matches!(self.suite, Suite::Slots(_))
    }
}

/// Runs the verb. With `json`, a suite prints its record as one JSON document.
///
/// # Errors
/// If a measurement fails, or a file can't be read or written.
pub fn run(command: &BenchCommand, json: bool) -> Result<ExitCode> {
    match &command.suite {
        Suite::Slots(arguments) if !arguments.in_private_host => {
            private_host::enter("--in-private-host")
        }
        Suite::Slots(arguments) => run_slots(arguments, json),
        Suite::Report(arguments) => run_report(arguments),
    }
}

fn run_slots(arguments: &SlotsArguments, json: bool) -> Result<ExitCode> {
    private_host::furnish()?;
    let sizes = if arguments.quick {
        Sizes::QUICK
    } else {
        Sizes::FULL
    };
    let record = slots::run(sizes, &arguments.only)?;
    let text = if json {
        serde_json::to_string(&record).context("cannot write the record as JSON")?
    } else {
        report::as_text(&record)
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn run_report(arguments: &ReportArguments) -> Result<ExitCode> {
    let records: Vec<Record> = arguments
        .files
        .iter()
        .map(|file| Record::read(file))
        .collect::<Result<_>>()?;
    let page = report::as_page(&records)?;
    match &arguments.out {
        Some(path) => fs::write(path, page)
            .with_context(|| format!("cannot write the report {}", path.display()))?,
        None => print(&page)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints to a reader who may have gone away, which is no error.
fn print(text: &str) -> Result<()> {
    let mut output = io::stdout().lock();
    match writeln!(output, "{}", text.trim_end()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other.context("cannot write to standard output"),
    }
}

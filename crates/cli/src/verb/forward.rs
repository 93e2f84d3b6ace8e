//! `sandwire forward`: what comes in at one interface goes out at the other, impaired or not.

mod report;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::{Args, ValueEnum};
use sandwire_impair::scenario::Scenario;
use sandwire_impair_host::{
    forward::{Edge, ForwardError, Forwarder, Settings},
    ways::Ways,
};

use crate::{
    Context,
    failure::{Failure, Outcome},
    interruption::Interruption,
    output::note,
};

/// Command line of `sandwire forward`.
#[derive(Debug, Args)]
#[command(
    after_help = "It runs in the foreground, in the network namespace that it is started in, until SIGINT or SIGTERM. \
    Packets under way are then let go in order; a second signal drops them. With --json it prints a document a line: \
    sandwire forward veth1 veth2 --ab 'delay 50ms 10ms loss 1%' --ba 'rate 10mbit'"
)]
pub(crate) struct Arguments {
    /// One interface.
    #[arg(value_name = "IF1")]
    first: String,

    /// The other.
    #[arg(value_name = "IF2")]
    second: String,

    /// What happens to packets from IF1 to IF2, as 'delay 50ms loss 1%'.
    #[arg(long, value_name = "TEXT")]
    ab: Option<String>,

    /// What happens to packets from IF2 to IF1.
    #[arg(long, value_name = "TEXT")]
    ba: Option<String>,

    /// What happens to packets both ways that no rule of --ab and --ba matches, as 'preset lte'.
    #[arg(long, value_name = "TEXT")]
    both: Option<String>,

    /// What happens to packets in the course of time, from a file; when it is over, what it came to stays.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["ab", "ba", "both", "seed", "record"])]
    scenario: Option<PathBuf>,

    /// Seed of all random decisions, if the texts give none.
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,

    /// How packets are fetched from the interfaces.
    #[arg(long, value_enum, default_value_t = EdgeWord::Auto)]
    edge: EdgeWord,

    /// Never sleep: less latency for a whole processor.
    #[arg(long)]
    polling: bool,

    /// Record what comes, what is decided on each packet and what leaves, in a new folder.
    #[arg(long, value_name = "FOLDER")]
    record: Option<PathBuf>,

    /// End after so many seconds.
    #[arg(long, value_name = "NUMBER")]
    seconds: Option<u64>,

    /// At the end, drop packets under way instead of letting them go.
    #[arg(long)]
    flush: bool,
}

/// [`Edge`], as it is written.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum EdgeWord {
    /// Rings: the fastest that leaves everything on the host as it is.
    Auto,
    /// Raw sockets, a system call for each packet.
    Raw,
    /// AF_PACKET rings.
    Ring,
    /// AF_XDP; turns off the offloads of whoever sends to the interfaces while it runs.
    Xdp,
}

/// What steps of a scenario may call the only link that there is.
const LINK: &str = "link";
/// Between two reports.
const INTERVAL: Duration = Duration::from_secs(1);

pub(crate) fn run(context: &Context, arguments: &Arguments) -> Outcome {
    let scenario = arguments
        .scenario
        .as_deref()
        .map(read_scenario)
        .transpose()?;
    let settings = settings(arguments, scenario.as_ref())?;
    let interruption = Interruption::catch()?;
    let mut forwarder = Forwarder::start(settings).map_err(failure)?;
    forwarder.interrupt_by(&interruption).map_err(failure)?;
    announce(context, &forwarder);
    let printer = report::Printer::start(context.output);
    let start = forwarder.now();
    let mut changes = scenario
        .as_ref()
        .map(|scenario| scenario.changes().peekable());
    let mut left = arguments.seconds;
    while left != Some(0) {
        let end = forwarder.now() + INTERVAL;
        let is_interrupted = match &mut changes {
            Some(changes) => forwarder.play(end, start, changes),
            None => forwarder.run(end),
        };
        if is_interrupted.map_err(failure)? && interruption.has_come() {
            break;
        }
        left = left.map(|left| left - 1);
        printer.report(&mut forwarder);
    }
    let ended = forwarder.end(arguments.flush).map_err(failure)?;
    printer.end(&mut forwarder, ended)?;
    Ok(ExitCode::SUCCESS)
}

/// What the forwarder is started with; of a scenario the seed alone, since its first change comes right afterwards.
fn settings(arguments: &Arguments, scenario: Option<&Scenario>) -> Result<Settings, Failure> {
    let cannot = |reason: String| {
        let Arguments { first, second, .. } = arguments;
        Failure::refused(format!(
            "cannot forward between {first} and {second}: {reason}"
        ))
    };
    let ways = Ways {
        ab: arguments.ab.as_deref(),
        ba: arguments.ba.as_deref(),
        both: arguments.both.as_deref(),
    };
    let mut impairment = ways.combine().map_err(|error| cannot(error.to_string()))?;
    if let Some(seed) = arguments.seed {
        if impairment.seed != 0 && impairment.seed != seed {
            return Err(cannot(
                "--seed and the texts give different seeds; give one".to_owned(),
            ));
        }
        impairment.seed = seed;
    }
    if let Some(scenario) = scenario {
        // The NAT draws its ports by the seed of the start, whatever changes later.
        impairment.seed = scenario.seed();
    }
    impairment
        .read_files(|path: &str| std::fs::read_to_string(path))
        .and_then(|()| impairment.check())
        .map_err(|error| cannot(error.to_string()))?;
    Ok(Settings {
        interfaces: [arguments.first.clone(), arguments.second.clone()],
        edge: match arguments.edge {
            EdgeWord::Auto => Edge::Auto,
            EdgeWord::Raw => Edge::Raw,
            EdgeWord::Ring => Edge::Ring,
            EdgeWord::Xdp => Edge::Xdp,
        },
        polling: arguments.polling,
        impairment,
        later: scenario
            .into_iter()
            .flat_map(|scenario| scenario.impairments().cloned())
            .collect(),
        record: arguments.record.clone(),
    })
}

/// A scenario, and the traces that it names.
fn read_scenario(path: &Path) -> Result<Scenario, Failure> {
    let refused = |reason: String| Failure::refused(format!("{}: {reason}", path.display()));
    let text = std::fs::read_to_string(path)
        .map_err(|error| refused(format!("cannot read the scenario: {error}")))?;
    let mut scenario =
        Scenario::parse(&text, &[LINK]).map_err(|error| refused(error.to_string()))?;
    let folder = path.parent().unwrap_or(Path::new(""));
    let read = |file: &str| std::fs::read_to_string(folder.join(file));
    scenario
        .read_files(read)
        .map_err(|error| refused(error.to_string()))?;
    Ok(scenario)
}

/// Says on standard error what `if1`, `if2` and the ways between are.
fn announce(context: &Context, forwarder: &Forwarder) {
    if context.output.json {
        return;
    }
    let [first, second] = forwarder.interfaces();
    note(&format!(
        "forwarding between {} (if1) and {} (if2) by {}; end it by Ctrl-C",
        first.name,
        second.name,
        forwarder.edge()
    ));
    if first.mtu != second.mtu {
        note(&format!(
            "{} has an MTU of {}, {} one of {}: packets too long for the other are dropped",
            first.name, first.mtu, second.name, second.mtu
        ));
    }
}

fn failure(error: ForwardError) -> Failure {
    if error.is_refusal() {
        Failure::refused(error.to_string())
    } else {
        Failure::failed(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    #[test]
    fn a_scenario_gives_the_start_its_seed() {
        let line = ["forward", "va", "vb", "--scenario", "course.toml"];
        let line = Line::try_parse_from(line).unwrap();
        let text = "seed = 7\n[[rule]]\nnat_rebind = \"30s\"\n";
        let scenario = Scenario::parse(text, &[LINK]).unwrap();
        let settings = settings(&line.arguments, Some(&scenario)).unwrap();
        assert_eq!(settings.impairment.seed, 7);
        assert!(settings.impairment.rules.is_empty());
        assert_eq!(settings.later[0].rules.len(), 1);
    }
}

//! The verb `bench` of the command line.

use std::{
    ffi::OsString,
    fs,
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::{Context, Result, ensure};
use clap::{Args, Subcommand};

use crate::{
    clones, cni, engine, extent, forward, impair, private_host,
    record::Record,
    relay, report, rr,
    slots::{self, Case, Sizes},
    stream, tcp, vsock,
    way::Way,
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
    /// What a packet costs on its way from a guest to the uplink, by every way there is. Needs root.
    Forward(ForwardArguments),
    /// Pings and throughput of many clones at once, by every way there is. Needs root.
    Clones(ClonesArguments),
    /// What arrives of small and of large writes by TCP, and what that costs the host. Needs root.
    Stream(StreamArguments),
    /// How fast bytes and messages pass the service for vsock, and what they cost. Needs root.
    Vsock(VsockArguments),
    /// How fast the packet engine is, in memory and between two interfaces. Needs root.
    Engine(EngineArguments),
    /// Whether impaired packets leave when they should, and what they take of memory. Needs root.
    Impair(ImpairArguments),
    /// How long a container runtime waits for the CNI plugin, one container at a time and thirty at once. Needs root.
    Cni(CniArguments),
    /// Small requests and answers: in the host's namespace, by identities, veth, macvlan and others. Needs root.
    Rr(RrArguments),
    /// How much passes the relay in one TCP stream and in small datagrams, beside stunnel. Needs root.
    Relay(RelayArguments),
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
struct ForwardArguments {
    /// Fewer and shorter samples: a first impression, no basis for comparisons.
    #[arg(long)]
    quick: bool,
    /// Run only these ways.
    #[arg(long, value_name = "WAY")]
    only: Vec<Way>,
    /// Rounds in which all ways take turns.
    #[arg(long, value_name = "NUMBER", value_parser = extent::at_least_one())]
    rounds: Option<u32>,
    /// We are inside the namespaces already.
    #[arg(long, hide = true)]
    in_private_host: bool,
}

#[derive(Clone, Debug, Args)]
struct ClonesArguments {
    /// Few slots and short runs: a first impression, no basis for comparisons.
    #[arg(long)]
    quick: bool,
    /// Run only these ways.
    #[arg(long, value_name = "WAY")]
    only: Vec<Way>,
    /// Slots of each way. Default: 3000.
    #[arg(long, value_name = "NUMBER")]
    slots: Option<u32>,
    /// Guests that run. Default: 1000.
    #[arg(long, value_name = "NUMBER")]
    endpoints: Option<u32>,
    /// Guests that have traffic; may be given more than once. Default: 100 and 1000.
    #[arg(long, value_name = "NUMBER")]
    active: Vec<u32>,
    /// Up to so many active guests are real ones too. Default: 100.
    #[arg(long, value_name = "NUMBER")]
    linux_max: Option<u32>,
    /// Seconds of pings; 0 for none. Default: 30.
    #[arg(long, value_name = "NUMBER")]
    ping_seconds: Option<u32>,
    /// Seconds of sending. Default: 40.
    #[arg(long, value_name = "NUMBER", value_parser = extent::at_least_one())]
    throughput_seconds: Option<u32>,
    /// Times that the ways of the promises take turns. Default: 5.
    #[arg(long, value_name = "NUMBER")]
    rounds: Option<u32>,
    /// Probes of the round trip for each way; 0 for none. Default: 10,000.
    #[arg(long, value_name = "NUMBER")]
    probes: Option<u32>,
    /// Measure only from there. Default: both.
    #[arg(long, value_name = "WHERE")]
    client: Option<clones::Client>,
    /// How the clients' TCP controls congestion.
    #[arg(long, value_name = "NAME", default_value = tcp::CUBIC)]
    congestion: String,
    /// We are inside the namespaces already.
    #[arg(long, hide = true)]
    in_private_host: bool,
}

#[derive(Clone, Debug, Args)]
struct StreamArguments {
    /// One short run of each: a first impression, no basis for comparisons.
    #[arg(long)]
    quick: bool,
    /// Run only these ways.
    #[arg(long, value_name = "WAY")]
    only: Vec<Way>,
    /// Seconds that each run takes. Default: 55, as in the experiment that is repeated.
    #[arg(long, value_name = "NUMBER", value_parser = extent::at_least_one())]
    seconds: Option<u32>,
    /// How often each run is repeated. Default: 3.
    #[arg(long, value_name = "NUMBER", value_parser = extent::at_least_one())]
    runs: Option<u32>,
    /// Leave the real guests out.
    #[arg(long)]
    fake_only: bool,
    /// Let fake guests send to these only. Default: all.
    #[arg(long, value_name = "RECEIVER")]
    receiver: Vec<stream::Receiver>,
    /// We are inside the namespaces already.
    #[arg(long, hide = true)]
    in_private_host: bool,
}

/// Command line of the suite `vsock`.
#[derive(Clone, Debug, Args)]
pub struct VsockArguments {
    #[command(flatten)]
    extent: extent::Extent<vsock::Part>,
    /// The executable of vhost-device-vsock 0.3.0 to compare with. Default: cargo installs it for this run.
    #[arg(long, value_name = "PATH")]
    peer: Option<PathBuf>,
    /// Why there is none.
    #[arg(long, hide = true)]
    peer_missing: Option<String>,
    /// We are inside the namespaces but for the network's, and are to install it into this folder.
    #[arg(long, hide = true, value_name = "FOLDER")]
    fetch_into: Option<PathBuf>,
    /// Be a process that the suite starts.
    #[arg(long, hide = true)]
    stand_in: Option<String>,
    /// We are inside the namespaces already.
    #[arg(long, hide = true)]
    in_private_host: bool,
}

#[derive(Clone, Debug, Args)]
struct EngineArguments {
    #[command(flatten)]
    extent: extent::Extent<engine::Part>,
    /// Be the process whose instructions are counted.
    #[arg(long, hide = true, value_name = "LOAD:BREATHS")]
    stand_in: Option<engine::Counted>,
    /// We are inside the namespaces already.
    #[arg(long, hide = true)]
    in_private_host: bool,
}

#[derive(Clone, Debug, Args)]
struct ImpairArguments {
    #[command(flatten)]
    extent: extent::Extent<impair::Part>,
    /// Be a process that the suite starts.
    #[arg(long, hide = true)]
    stand_in: Option<String>,
    /// We are inside the namespaces already.
    #[arg(long, hide = true)]
    in_private_host: bool,
}

#[derive(Clone, Debug, Args)]
struct CniArguments {
    /// Few containers: a first impression, no basis for comparisons.
    #[arg(long)]
    quick: bool,
    /// Containers that come one by one. Default: 100.
    #[arg(long, value_name = "NUMBER")]
    containers: Option<u32>,
    /// Rounds of thirty containers at once. Default: 10.
    #[arg(long, value_name = "NUMBER")]
    rounds: Option<u32>,
    /// We are inside the namespaces already.
    #[arg(long, hide = true)]
    in_private_host: bool,
}

#[derive(Clone, Debug, Args)]
struct RrArguments {
    #[command(flatten)]
    extent: extent::Extent<rr::Part>,
    /// Run only these rows.
    #[arg(long, value_name = "ROW")]
    row: Vec<rr::Case>,
    /// Be a process that the suite starts.
    #[arg(long, hide = true)]
    stand_in: Option<String>,
    /// We are inside the namespaces already.
    #[arg(long, hide = true)]
    in_private_host: bool,
}

#[derive(Clone, Debug, Args)]
struct RelayArguments {
    #[command(flatten)]
    extent: extent::Extent<relay::Part>,
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
    /// The suite `vsock`, which has another name besides: `sandwire vsock bench`.
    #[must_use]
    pub fn vsock(arguments: VsockArguments) -> Self {
        Self {
            suite: Suite::Vsock(arguments),
        }
    }

    /// Whether it makes network namespaces, which only root may.
    #[must_use]
    pub fn needs_root(&self) -> bool {
        !matches!(self.suite, Suite::Report(_))
    }
}

/// Runs the verb. With `json`, a suite prints its record as one JSON document.
///
/// # Errors
/// If a measurement fails, or a file can't be read or written.
pub fn run(command: &BenchCommand, json: bool) -> Result<ExitCode> {
    let is_inside = match &command.suite {
        Suite::Slots(arguments) => arguments.in_private_host,
        Suite::Forward(arguments) => arguments.in_private_host,
        Suite::Clones(arguments) => arguments.in_private_host,
        Suite::Stream(arguments) => arguments.in_private_host,
        Suite::Vsock(VsockArguments {
            stand_in: Some(name),
            ..
        }) => {
            vsock::stand_in(name)?;
            return Ok(ExitCode::SUCCESS);
        }
        Suite::Vsock(arguments) if !arguments.in_private_host => return enter_vsock(arguments),
        Suite::Vsock(_) => true,
        Suite::Engine(EngineArguments {
            stand_in: Some(counted),
            ..
        }) => {
            engine::stand_in(counted)?;
            return Ok(ExitCode::SUCCESS);
        }
        Suite::Engine(arguments) => arguments.in_private_host,
        Suite::Impair(ImpairArguments {
            stand_in: Some(name),
            ..
        }) => {
            impair::stand_in(name)?;
            return Ok(ExitCode::SUCCESS);
        }
        Suite::Impair(arguments) => arguments.in_private_host,
        Suite::Cni(arguments) => arguments.in_private_host,
        Suite::Rr(RrArguments {
            stand_in: Some(words),
            ..
        }) => {
            rr::stand_in(words)?;
            return Ok(ExitCode::SUCCESS);
        }
        Suite::Rr(arguments) => arguments.in_private_host,
        Suite::Relay(arguments) => arguments.in_private_host,
        Suite::Report(arguments) => return run_report(arguments),
    };
    if !is_inside {
        return private_host::enter("--in-private-host");
    }
    if let Suite::Vsock(VsockArguments {
        fetch_into: Some(folder),
        ..
    }) = &command.suite
    {
        private_host::remove_folder_if_interrupted(folder);
    }
    private_host::end_with_parent();
    private_host::furnish()?;
    let record = measure(&command.suite)?;
    let text = if json {
        serde_json::to_string(&record).context("cannot write the record as JSON")?
    } else {
        report::as_text(&record)
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// Runs a suite. To be called inside a private host.
fn measure(suite: &Suite) -> Result<Record> {
    match suite {
        Suite::Slots(arguments) => run_slots(arguments),
        Suite::Forward(arguments) => forward::run(&arguments.sizes()),
        Suite::Clones(arguments) => clones::run(&arguments.sizes()?),
        Suite::Stream(arguments) => stream::run(&arguments.sizes()),
        Suite::Vsock(arguments) => vsock::run(&arguments.extent, &arguments.peer()?),
        Suite::Engine(arguments) => engine::run(&arguments.extent),
        Suite::Impair(arguments) => impair::run(&arguments.extent),
        Suite::Cni(arguments) => cni::run(arguments.sizes()),
        Suite::Rr(arguments) => rr::run(&arguments.extent, &arguments.row),
        Suite::Relay(arguments) => relay::run(&arguments.extent),
        Suite::Report(_) => unreachable!("reports need no host"),
    }
}

fn run_slots(arguments: &SlotsArguments) -> Result<Record> {
    let sizes = if arguments.quick {
        Sizes::QUICK
    } else {
        Sizes::FULL
    };
    slots::run(sizes, &arguments.only)
}

impl ForwardArguments {
    fn sizes(&self) -> forward::Sizes {
        let (rounds, sample_us) = if self.quick { (3, 2_000) } else { (15, 25_000) };
        forward::Sizes {
            rounds: self.rounds.unwrap_or(rounds),
            sample_us,
            only: self.only.clone(),
        }
    }
}

impl ClonesArguments {
    fn sizes(&self) -> Result<clones::Sizes> {
        let defaults = if self.quick {
            clones::Sizes::quick()
        } else {
            clones::Sizes::full()
        };
        let or = |given: Option<u32>, default| given.unwrap_or(default);
        let active = if self.active.is_empty() {
            defaults.active
        } else {
            self.active.clone()
        };
        let sizes = clones::Sizes {
            slots: or(self.slots, defaults.slots),
            endpoints: or(self.endpoints, defaults.endpoints),
            active,
            linux_max: or(self.linux_max, defaults.linux_max),
            ping_seconds: or(self.ping_seconds, defaults.ping_seconds),
            throughput_seconds: or(self.throughput_seconds, defaults.throughput_seconds),
            rounds: or(self.rounds, defaults.rounds),
            probes: or(self.probes, defaults.probes),
            only: self.only.clone(),
            clients: self.client.map_or(defaults.clients, |client| vec![client]),
            congestion: self.congestion.clone(),
        };
        let most = sizes.active.iter().max().copied().unwrap_or(0);
        ensure!(
            most <= sizes.endpoints && sizes.endpoints <= sizes.slots,
            "there can't be more active guests than endpoints, nor more endpoints than slots"
        );
        Ok(sizes)
    }
}

impl CniArguments {
    fn sizes(&self) -> cni::Sizes {
        let defaults = if self.quick {
            cni::Sizes::QUICK
        } else {
            cni::Sizes::FULL
        };
        cni::Sizes {
            containers: self.containers.unwrap_or(defaults.containers),
            rounds: self.rounds.unwrap_or(defaults.rounds),
        }
    }
}

impl StreamArguments {
    fn sizes(&self) -> stream::Sizes {
        let (seconds, runs) = if self.quick { (3, 1) } else { (55, 3) };
        stream::Sizes {
            seconds: self.seconds.unwrap_or(seconds),
            runs: self.runs.unwrap_or(runs),
            linux: !self.fake_only,
            only: self.only.clone(),
            receivers: self.receiver.clone(),
        }
    }
}

/// Enters the namespaces, by way of the machine's network where the program to compare with is to be fetched.
fn enter_vsock(arguments: &VsockArguments) -> Result<ExitCode> {
    if let Some(folder) = &arguments.fetch_into {
        private_host::remove_folder_if_interrupted(folder);
        private_host::end_with_parent();
        let (option, value) = match vsock::install_peer(folder) {
            Ok(path) => ("--peer", path.into()),
            Err(reason) => ("--peer-missing", reason.into()),
        };
        return private_host::leave_network(&["--in-private-host".into(), option.into(), value]);
    }
    if let Some(path) = &arguments.peer {
        vsock::check_peer(path)?;
        return private_host::enter("--in-private-host");
    }
    if !arguments.extent.has(vsock::Part::Peer) {
        let more = ["--in-private-host", "--peer-missing", "left out"];
        return private_host::enter_with(&more.map(OsString::from));
    }
    let scratch = tempfile::tempdir().context("cannot make a folder")?;
    let code = private_host::enter_but_network(&["--fetch-into".into(), scratch.path().into()])?;
    let path = scratch.path().to_owned();
    scratch
        .close()
        .with_context(|| format!("cannot remove {}", path.display()))?;
    Ok(code)
}

impl VsockArguments {
    fn peer(&self) -> Result<vsock::Peer> {
        if let Some(path) = &self.peer {
            return Ok(vsock::Peer::At(path.clone()));
        }
        let reason = self.peer_missing.clone();
        let reason = reason.context("the arguments lack --peer-missing")?;
        Ok(vsock::Peer::Missing(reason))
    }
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

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        bench: BenchCommand,
    }

    #[test]
    fn sizes_that_would_leave_nothing_to_tell_are_refused() {
        for line in [
            "rr --rounds 0",
            "relay --milliseconds 0",
            "forward --rounds 0",
            "clones --throughput-seconds 0",
            "stream --seconds 0",
            "stream --runs 0",
        ] {
            let words = || ["bench"].into_iter().chain(line.split(' '));
            let error = Line::try_parse_from(words()).unwrap_err().to_string();
            assert!(error.contains("0 is not in 1.."), "{line}: {error}");
            let one = words().map(|word| if word == "0" { "1" } else { word });
            Line::try_parse_from(one).unwrap();
        }
        Line::try_parse_from(["bench", "clones", "--ping-seconds", "0"]).unwrap();
    }
}

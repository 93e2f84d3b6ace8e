//! `sandwire impair record`: measures a live link, and writes a scenario that does the same.

mod prober;
mod progress;

use std::{
    fs::{self, File},
    io::{self, Write},
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::ExitCode,
    thread,
    time::Duration,
};

use clap::Args;
use rustix::{
    io::Errno,
    thread::{LinkNameSpaceType, move_into_link_name_space},
};
use sandwire_api::impairment::TimeSpan;
use sandwire_impair::scenario::{
    STEPS_MAX,
    record::{Recording, Summary},
};
use serde::Serialize;

use self::{
    prober::{Echo, PATIENCE, Plan, Prober, read_counters},
    progress::Progress,
};
use super::target::namespace_of;
use crate::{
    Context,
    failure::{Failure, Outcome},
    interruption::Interruption,
    output::{Output, note},
    render,
};

/// Command line of `sandwire impair record`.
#[derive(Debug, Args)]
#[command(
    after_help = "The scenario is for `sandwire impair run` and `sandwire forward --scenario`. Ctrl-C ends the measuring and \
    writes what there is. One end sees round trips only: each direction gets half the delay, and the loss that makes the \
    measured share of both."
)]
pub(crate) struct Arguments {
    /// The far side: an address or a name.
    #[arg(value_name = "PEER")]
    peer: String,

    /// Ask an echo server on this UDP port instead of by ICMP.
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    udp: Option<u16>,

    /// Probe from the network namespace of this process, as of a container.
    #[arg(long, value_name = "PID", conflicts_with = "netns")]
    pid: Option<u32>,

    /// Probe from this network namespace: a file, or a name that `ip netns` knows.
    #[arg(long, value_name = "PATH")]
    netns: Option<PathBuf>,

    /// Probe through this interface, whatever the routes say.
    #[arg(long, value_name = "NAME")]
    interface: Option<String>,

    /// Write also the rate that passed the interface, the least that the link can; load it meanwhile.
    #[arg(long, requires = "interface")]
    rate: bool,

    /// Write also the jitter within steps, with packets that overtake each other; shorter steps keep the order.
    #[arg(long, conflicts_with = "rate")]
    jitter: bool,

    /// How long.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,

    /// Time from one probe to the next, 5ms to 10s.
    #[arg(long, value_name = "TIME", default_value = "100ms")]
    interval: TimeSpan,

    /// Length of the scenario's steps, at least an interval.
    #[arg(long, value_name = "TIME", default_value = "1s")]
    step: TimeSpan,

    /// The file of the scenario, which must not be there yet [default: standard output].
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Bounds of `--interval`.
const INTERVALS: std::ops::RangeInclusive<TimeSpan> =
    TimeSpan::milliseconds(5)..=TimeSpan::milliseconds(10_000);
/// All of them are in memory until the end.
const PROBES_MAX: u128 = 1_000_000;

/// What was measured.
#[derive(Debug, Serialize)]
struct Answer {
    peer: String,
    /// The one of its addresses that was probed.
    address: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<PathBuf>,
    /// If there is no file.
    #[serde(skip_serializing_if = "Option::is_none")]
    scenario: Option<String>,
    sent: usize,
    answered: usize,
    round_trip_nanoseconds: RoundTrip,
    /// Whether it ran as long as it should.
    completed: bool,
}

#[derive(Debug, Serialize)]
struct RoundTrip {
    least: u64,
    median: u64,
    most: u64,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> Outcome {
    let plan = arguments.plan()?;
    let signals = Interruption::catch()?;
    let netns = namespace_of(arguments.pid, arguments.netns.as_deref());
    let out = arguments.out.as_deref();
    let file = match out {
        Some(path) => Some(File::create_new(path).map_err(|error| {
            let hint = match error.kind() {
                io::ErrorKind::AlreadyExists => "; name a file that isn't there yet",
                _ => "",
            };
            Failure::refused(format!("cannot create {}: {error}{hint}", path.display()))
        })?),
        None => None,
    };
    let output = context.output;
    let measured = measure_within(netns.as_deref(), || {
        arguments.measure(plan, &signals, output)
    });
    let answer =
        measured.and_then(|measured| arguments.write(plan, netns.as_deref(), measured, file));
    if answer.is_err()
        && let Some(path) = out
    {
        // It is empty, or not all of it.
        let _ = fs::remove_file(path);
    }
    answer.and_then(|answer| say(context, &answer))
}

/// What came of measuring.
struct Measured {
    address: String,
    recording: Recording,
    completed: bool,
}

impl Arguments {
    fn plan(&self) -> Result<Plan, Failure> {
        let refuse = |problem: String| Err(Failure::refused(problem));
        let (interval, step) = (self.interval, self.step);
        if !INTERVALS.contains(&interval) {
            let (least, most) = (INTERVALS.start(), INTERVALS.end());
            return refuse(format!(
                "--interval {interval}: it must be between {least} and {most}"
            ));
        }
        if step < interval {
            return refuse(format!(
                "--step {step}: it must be at least the interval, {interval}, so that each step has a probe"
            ));
        }
        let plan = Plan {
            length: Duration::from_secs(self.seconds),
            interval: Duration::from_nanos(interval.as_nanoseconds()),
            step: Duration::from_nanos(step.as_nanoseconds()),
        };
        let length = plan.length.as_nanos();
        if length / plan.interval.as_nanos() > PROBES_MAX {
            return refuse(format!(
                "more than {PROBES_MAX} probes: make --seconds shorter or --interval longer"
            ));
        }
        let steps = length / plan.step.as_nanos();
        if steps > u128::try_from(STEPS_MAX).unwrap_or(u128::MAX) {
            return refuse(format!(
                "{steps} steps, of which a scenario has at most {STEPS_MAX}: make --step longer"
            ));
        }
        Ok(plan)
    }

    /// Probes, in the namespace of this thread.
    fn measure(
        &self,
        plan: Plan,
        signals: &Interruption,
        output: Output,
    ) -> Result<Measured, Failure> {
        let interface = self.interface.as_deref();
        if let Some(interface) = interface {
            read_counters(interface, Duration::ZERO)?;
        }
        let echo = self.udp.map_or(Echo::Icmp, Echo::Udp);
        let prober = Prober::open(&self.peer, echo, interface)?;
        let address = prober.address.ip().to_string();
        note(&format!(
            "probing {address} every {} for {} s; Ctrl-C ends it and writes what there is",
            self.interval, self.seconds
        ));
        let mut progress = Progress::new(output, plan.length);
        let counted = interface.filter(|_| self.rate);
        let (recording, completed) = prober.record(plan, counted, signals, &mut progress)?;
        Ok(Measured {
            address,
            recording,
            completed,
        })
    }

    fn write(
        &self,
        plan: Plan,
        netns: Option<&Path>,
        measured: Measured,
        file: Option<File>,
    ) -> Result<Answer, Failure> {
        let Measured {
            address,
            recording,
            completed,
        } = measured;
        let nothing = |error: sandwire_impair::scenario::record::RecordError| {
            Failure::failed(format!(
                "cannot make a scenario of what {address} answered within {} s each: {error}; look whether it answers \
                 echoes at all",
                PATIENCE.as_secs()
            ))
        };
        let step = u64::try_from(plan.step.as_nanos()).unwrap_or(u64::MAX);
        let summary = recording.summary().map_err(nothing)?;
        let origin = self.origin(netns, &address, recording.length);
        let scenario = recording
            .scenario(step, self.jitter, &origin)
            .map_err(nothing)?;
        let scenario = match (file, &self.out) {
            (Some(mut file), Some(path)) => {
                file.write_all(scenario.as_bytes()).map_err(|error| {
                    Failure::failed(format!("cannot write {}: {error}", path.display()))
                })?;
                None
            }
            _ => Some(scenario),
        };
        let Summary {
            sent,
            answered,
            least,
            median,
            most,
        } = summary;
        Ok(Answer {
            peer: self.peer.clone(),
            address,
            file: self.out.clone(),
            scenario,
            sent,
            answered,
            round_trip_nanoseconds: RoundTrip {
                least,
                median,
                most,
            },
            completed,
        })
    }

    /// How it was measured, and when.
    fn origin(&self, netns: Option<&Path>, address: &str, length: u64) -> String {
        let place = netns.map_or_else(
            || "this host".to_owned(),
            |netns| netns.display().to_string(),
        );
        let interface = self.interface.as_ref();
        let through = interface.map_or_else(String::new, |name| format!(" through {name}"));
        let how = match self.udp {
            None => "ICMP echo".to_owned(),
            Some(port) => format!("UDP echo, port {port}"),
        };
        format!(
            "Recorded by `sandwire impair record` until {}.\nFrom {place}{through} (egress) to {} ({address}) by {how}, every {} for {:.3} s.",
            calendar(render::now()),
            self.peer,
            self.interval,
            Duration::from_nanos(length).as_secs_f64(),
        )
    }
}

/// Does that on a thread in the network namespace.
fn measure_within<T: Send>(
    netns: Option<&Path>,
    work: impl FnOnce() -> Result<T, Failure> + Send,
) -> Result<T, Failure> {
    let Some(netns) = netns else { return work() };
    let place = netns.display();
    let namespace = File::open(netns).map_err(|source| {
        let path = netns.to_owned();
        let error = sandwire_impair_host::Error::Namespace { path, source };
        Failure::refused(format!("cannot {error}"))
    })?;
    let inside = || {
        let entered =
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network));
        entered.map_err(|errno| {
            let hint = match errno {
                Errno::PERM => "; run it as root",
                Errno::INVAL => "; that is no file of a network namespace",
                _ => "",
            };
            Failure::refused(format!(
                "cannot enter the network namespace {place}: {errno}{hint}"
            ))
        })?;
        work()
    };
    thread::scope(|scope| scope.spawn(inside).join())
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn say(context: &Context, answer: &Answer) -> Outcome {
    let figures = figures(answer);
    if let (Some(scenario), false) = (&answer.scenario, context.output.json) {
        let code: ExitCode = context.output.write(scenario)?;
        note(&figures);
        return Ok(code);
    }
    context.output.answer(answer, |_| figures)
}

fn figures(answer: &Answer) -> String {
    let span = |nanoseconds: u64| TimeSpan {
        nanoseconds: i64::try_from(nanoseconds / 1_000 * 1_000).unwrap_or(i64::MAX),
    };
    let RoundTrip {
        least,
        median,
        most,
    } = answer.round_trip_nanoseconds;
    let file = answer.file.as_ref();
    let file = file.map_or_else(String::new, |file| format!("{}: ", file.display()));
    format!(
        "{file}{} of {} probes were answered by {}, the round trip at least {}, half within {}, at most {}",
        answer.answered,
        answer.sent,
        answer.address,
        span(least),
        span(median),
        span(most)
    )
}

/// Date and time of so many seconds since 1970, in UTC. Years begin in March here, so that a leap day ends one.
fn calendar(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, date) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_399, "2000-02-28 23:59:59 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (951_868_800, "2000-03-01 00:00:00 UTC"),
            (1_735_689_599, "2024-12-31 23:59:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
        ] {
            assert_eq!(calendar(seconds), date);
        }
    }
}

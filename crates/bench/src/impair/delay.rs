//! How late packets leave that are to be delayed by 50 ms, 10,000 of them a second.

use std::{num::NonZeroU64, thread, time::Duration};

use anyhow::{Context, Result, anyhow, ensure};
use rustix::{
    thread::{clock_nanosleep_absolute, set_current_timer_slack},
    time::{ClockId, Timespec, clock_gettime},
};
use sandwire_engine::{Graph, io::Ring, run::Clock};

use super::{
    Extent,
    capture::{Capture, Captured},
    metronome::{Arrivals, Metronome},
};
use crate::{
    cpu,
    progress::Step,
    record::Record,
    rig::{Edge, EngineThread, OUTER, Pace, Post, Rig, figure, impaired, real},
    statistics::percentile,
};

const DELAY: Duration = Duration::from_millis(50);
/// Between packets, and between the moments that the bare sleeper waits for.
pub(super) const PERIOD: Duration = Duration::from_micros(100);
/// Packets and sleeps before anything counts.
const WARM_UP: Duration = Duration::from_millis(200);
const FLOOR: &str = "bare_sleeper";
const CAPTURED: &str = "delay_captured";
const EARLY: &str = "early_max";

/// Measures the floor and all others in turn.
pub(super) fn measure(extent: &Extent, record: &mut Record) -> Result<()> {
    let rig = Rig::build("delay")?;
    let step = Step::begin("delay of 50 ms", extent.rounds());
    for round in 0..extent.rounds() {
        add(record, FLOOR, &sleeper(extent.time())?)?;
        for pace in Pace::ALL {
            let case = format!("delay_{}", pace.name());
            let figures = behind_the_line(&rig, pace, extent.time())?;
            for (metric, value) in figures {
                record.add(&case, metric, "us", &[value]);
            }
        }
        match captured(&rig, extent.time()) {
            Ok(samples) => add(record, CAPTURED, &samples)?,
            Err(error) => record.not_run(CAPTURED, &format!("{error:#}")),
        }
        step.at(round + 1);
    }
    add_ratios(record);
    Ok(())
}

/// Adds how late they are, and how early one is at most; those that are early are negative.
fn add(record: &mut Record, case: &str, samples: &[f64]) -> Result<()> {
    for (name, percent) in [("p50", 50), ("p99", 99), ("max", 100)] {
        let value = percentile(samples, percent).context("nothing was measured")?;
        record.add(case, &format!("late_{name}"), "us", &[value.max(0.0)]);
    }
    let early = samples.iter().fold(0.0_f64, |early, late| early.max(-late));
    record.add(case, EARLY, "us", &[early]);
    Ok(())
}

/// How wrong a case is beyond the floor. That excuses what is late, and nothing that is early.
fn error(record: &Record, case: &str, floor: f64) -> Option<f64> {
    let late = record.row(case, "late_p99")?.median - floor;
    let early = record.row(case, EARLY).map_or(0.0, |row| row.max);
    Some(if early > 0.0 { late.max(early) } else { late })
}

fn add_ratios(record: &mut Record) {
    if let Some(floor) = record.row(FLOOR, "late_p99").map(|row| row.median) {
        for (name, case) in [
            ("delay_error_over_floor_us", "delay_sleeping"),
            ("delay_error_over_floor_us_captured", CAPTURED),
        ] {
            if let Some(error) = error(record, case, floor) {
                record.insert_ratio(name, error);
                record.note(name, &format!("the floor is {floor:.1} us"));
            }
        }
    }
    if let Some(error) = error(record, "delay_polling", 0.0) {
        record.insert_ratio("delay_error_p99_us_polling", error);
    }
}

/// How late a thread wakes that sleeps until each of a row of moments, in microseconds.
pub(super) fn sleeper(time: Duration) -> Result<Vec<f64>> {
    thread::scope(|scope| {
        let thread = scope.spawn(|| -> Result<Vec<f64>> {
            cpu::pin(0)?;
            set_current_timer_slack(Some(NonZeroU64::MIN)).context("cannot set the timer slack")?;
            let now = || nanos(clock_gettime(ClockId::Monotonic));
            let period = u64::try_from(PERIOD.as_nanos())?;
            let start = now() + period;
            let end = start + u64::try_from((WARM_UP + time).as_nanos())?;
            let mut late = Vec::new();
            let mut due = start;
            while due < end {
                let until = Timespec {
                    tv_sec: i64::try_from(due / 1_000_000_000)?,
                    tv_nsec: i64::try_from(due % 1_000_000_000)?,
                };
                clock_nanosleep_absolute(ClockId::Monotonic, &until).context("cannot sleep")?;
                let lateness = now().saturating_sub(due);
                if due - start >= u64::try_from(WARM_UP.as_nanos())? {
                    late.push(real(lateness) / 1e3);
                }
                due += period;
            }
            Ok(late)
        });
        thread.join().map_err(|_| anyhow!("the sleeper panicked"))?
    })
}

fn nanos(time: Timespec) -> u64 {
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// Metrics in microseconds, by an app behind the line in the same engine.
fn behind_the_line(rig: &Rig, pace: Pace, time: Duration) -> Result<Vec<(&'static str, f64)>> {
    let post = Post {
        namespace: &rig.middle,
        processor: 0,
        pace,
    };
    let engine = EngineThread::start(post, |clock: Clock| {
        let metronome = Metronome {
            frame_bytes: 60,
            period: PERIOD,
        };
        let arrivals = Arrivals {
            clock,
            delay: DELAY,
            period: PERIOD,
        };
        let mut graph = Graph::new();
        graph.app("beat", metronome)?;
        graph.app("line", impaired("delay 50ms")?)?;
        graph.app("arrivals", arrivals)?;
        graph.links("beat.output -> line.input\nline.output -> arrivals.input")?;
        Ok(graph)
    })?;
    thread::sleep(WARM_UP + DELAY + time);
    let reports = engine.end()?;
    let of = |name| figure(&reports, "arrivals", name);
    let expected = time.as_secs_f64() / PERIOD.as_secs_f64();
    let packets = real(of("packets")?);
    ensure!(
        packets >= 0.9 * expected,
        "{packets} packets came out of the line, not {expected}"
    );
    [
        ("late_p50", "p50"),
        ("late_p99", "p99"),
        ("late_max", "max"),
        (EARLY, "early"),
    ]
    .into_iter()
    .map(|(metric, name)| Ok((metric, real(of(name)?) / 1e3)))
    .collect()
}

/// How much longer than the delay packets took from cable to cable, in microseconds; below zero if they took less.
fn captured(rig: &Rig, time: Duration) -> Result<Vec<f64>> {
    let before = Capture::start(&rig.left, OUTER)?;
    let after = Capture::start(&rig.right, OUTER)?;
    let forwarder = through(rig, "delay 50ms", Pace::Sleeping)?;
    let metronome = Metronome {
        frame_bytes: 60,
        period: PERIOD,
    };
    let sender = send(rig, metronome)?;
    thread::sleep(WARM_UP + time);
    sender.end()?;
    thread::sleep(2 * DELAY);
    forwarder.end()?;
    compare(&before.end()?, &after.end()?)
}

/// Starts a forwarder that impairs what goes from left to right.
pub(super) fn through(rig: &Rig, impairment: &str, pace: Pace) -> Result<EngineThread> {
    let impairment = impairment.to_owned();
    let post = Post {
        namespace: &rig.middle,
        processor: 0,
        pace,
    };
    EngineThread::start(post, move |_| {
        let mut graph = Graph::new();
        for interface in crate::rig::INTERFACES {
            Edge::Ring.add(&mut graph, interface)?;
        }
        graph.app("line", impaired(&impairment)?)?;
        graph
            .links("if1.output -> line.input\nline.output -> if2.input\nif2.output -> if1.input")?;
        Ok(graph)
    })
}

/// Starts a sender on the left host.
pub(super) fn send(rig: &Rig, metronome: Metronome) -> Result<EngineThread> {
    let post = Post {
        namespace: &rig.left,
        processor: 1,
        pace: Pace::Sleeping,
    };
    EngineThread::start(post, move |_| {
        let mut graph = Graph::new();
        graph.app("beat", metronome)?;
        // By way of the queueing discipline, where captures listen.
        graph.app("out", Ring::interface(OUTER))?;
        graph.link("beat.output -> out.input")?;
        Ok(graph)
    })
}

fn compare(before: &[Captured], after: &[Captured]) -> Result<Vec<f64>> {
    let first = before.first().context("nothing was sent")?;
    let warm = first.nanos + u64::try_from(WARM_UP.as_nanos())?;
    let delay = u64::try_from(DELAY.as_nanos())?;
    let sent: std::collections::HashMap<u64, u64> = before
        .iter()
        .filter(|frame| frame.nanos >= warm)
        .map(|frame| (frame.number, frame.nanos))
        .collect();
    let late: Vec<f64> = after
        .iter()
        .filter_map(|frame| Some((frame.nanos, sent.get(&frame.number)? + delay)))
        .map(|(left, due)| (real(left.saturating_sub(due)) - real(due.saturating_sub(left))) / 1e3)
        .collect();
    ensure!(
        late.len() * 100 >= sent.len() * 99,
        "of {} frames {} arrived",
        sent.len(),
        late.len()
    );
    Ok(late)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::HostFacts;

    #[test]
    fn lateness_is_what_a_frame_took_beyond_the_delay() {
        let frame = |number: u64, nanos: u64| Captured {
            nanos,
            bytes: 60,
            number,
        };
        let before = [frame(1, 0), frame(2, 200_000_000), frame(3, 300_000_000)];
        let after = [
            frame(1, 60_000_000),
            frame(2, 250_007_000),
            frame(3, 349_998_000),
        ];
        assert_eq!(compare(&before, &after).unwrap(), [7.0, -2.0]);
        assert!(compare(&before, &after[..2]).is_err(), "one is missing");
    }

    #[test]
    fn what_is_early_is_wrong_however_late_the_machine_is() {
        let mut record = Record::new("impair", HostFacts::default(), [].into());
        add(&mut record, FLOOR, &[2600.0; 3]).unwrap();
        add(&mut record, CAPTURED, &[2800.0; 3]).unwrap();
        add(&mut record, "delay_sleeping", &[2400.0; 3]).unwrap();
        add(&mut record, "delay_polling", &[3.0; 3]).unwrap();
        add_ratios(&mut record);
        let ratios = |record: &Record| record.ratios.values().copied().collect::<Vec<_>>();
        assert_eq!(ratios(&record), [-200.0, 200.0, 3.0]);
        for case in ["delay_sleeping", "delay_polling"] {
            add(&mut record, case, &[1.0, -1000.0, 2.0]).unwrap();
        }
        add_ratios(&mut record);
        assert_eq!(ratios(&record), [1000.0, 200.0, 1000.0]);
        let late = record.row("delay_polling", "late_p50").unwrap();
        assert_eq!(late.samples, [3.0, 1.0]);
    }
}

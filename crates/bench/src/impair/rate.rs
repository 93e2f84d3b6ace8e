//! The rate at which packets arrive beyond a line with a rate, within each tenth of a second.
//!
//! The sender offers a fifth more than the line takes. Times are the kernel's, of the receiver's cable. Windows
//! begin and end with a packet, so that what counts is the rate and not how many packets happen to lie within a window:
//! a window is wrong by as much as its two packets are early or late, a millisecond being one percent. What this machine
//! can do at best is what a thread shows that only sleeps until each packet of a perfect line is due; it takes turns.

use std::{thread, time::Duration};

use anyhow::{Result, ensure};

use super::{
    Extent,
    capture::{Capture, Captured},
    delay::{PERIOD, send, sleeper, through},
    metronome::Metronome,
};
use crate::{
    progress::Step,
    record::Record,
    rig::{OUTER, Pace, Rig, real},
    statistics::percentile,
};

/// Rates, in bits per second, and the frames that go over them: at the slowest small ones, of which some lie within a
/// window.
const RATES: [(&str, u64, usize); 5] = [
    ("100kbit", 100_000, 60),
    ("1mbit", 1_000_000, 1514),
    ("10mbit", 10_000_000, 1514),
    ("100mbit", 100_000_000, 1514),
    ("1gbit", 1_000_000_000, 1514),
];
const WINDOW: u64 = 100_000_000;
/// Of what is offered, in fifths of the rate.
const OFFERED_FIFTHS: u64 = 6;
/// Case of the bare sleeper.
const FLOOR: &str = "rate_floor";
const SLEEPER_BYTES: u32 = 125;
/// Packets that don't count: the first finds an idle line.
const SKIPPED: usize = 10;

/// Measures all rates in turn.
pub(super) fn measure(extent: &Extent, record: &mut Record) -> Result<()> {
    let rig = Rig::build("rate")?;
    let step = Step::begin("rates", extent.rounds());
    for round in 0..extent.rounds() {
        add(record, FLOOR, floor(extent.time()));
        for (name, rate, frame_bytes) in RATES {
            let errors = errors(&rig, name, rate, frame_bytes, extent.time());
            add(record, &format!("rate_{name}"), errors);
        }
        step.at(round + 1);
    }
    add_ratios(record);
    Ok(())
}

fn add(record: &mut Record, case: &str, errors: Result<Vec<f64>>) {
    match errors {
        Ok(errors) => {
            for (metric, percent) in [("error_p50", 50), ("error_max", 100)] {
                let value = percentile(&errors, percent).unwrap_or(f64::NAN);
                record.add(case, metric, "%", &[value]);
            }
        }
        Err(error) => record.not_run(case, &format!("{error:#}")),
    }
}

fn add_ratios(record: &mut Record) {
    let worst = RATES
        .iter()
        .filter_map(|(name, ..)| {
            Some((
                *name,
                record.row(&format!("rate_{name}"), "error_max")?.median,
            ))
        })
        .max_by(|one, other| one.1.total_cmp(&other.1));
    let floor = record.row(FLOOR, "error_max").map(|row| row.median);
    if let Some((name, worst)) = worst {
        record.insert_ratio("rate_error_percent", worst);
        let floor = floor.map_or(String::new(), |floor| {
            format!(", where that of a bare sleeper is {floor:.2} %")
        });
        record.note(
            "rate_error_percent",
            &format!("the worst window of {name}{floor}"),
        );
    }
}

/// Errors of all windows, in percent, of a line whose packets leave whenever a thread wakes that only sleeps.
fn floor(time: Duration) -> Result<Vec<f64>> {
    let late = sleeper(time)?;
    ensure!(!late.is_empty(), "nothing was measured");
    Ok(windows(
        &sent_by_sleeper(&late),
        f64::from(SLEEPER_BYTES) * 8e9 / real(nanos_of(PERIOD)),
    ))
}

/// A packet at each beat, as many microseconds late.
fn sent_by_sleeper(late: &[f64]) -> Vec<Captured> {
    let frames = late.iter().zip(0..).map(|(late, number)| Captured {
        nanos: number * nanos_of(PERIOD) + nanos_of(Duration::from_secs_f64(late / 1e6)),
        bytes: SLEEPER_BYTES,
        number,
    });
    frames.collect()
}

fn nanos_of(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Errors of all windows, in percent.
fn errors(
    rig: &Rig,
    name: &str,
    rate: u64,
    frame_bytes: usize,
    time: Duration,
) -> Result<Vec<f64>> {
    let receiver = Capture::start(&rig.right, OUTER)?;
    let forwarder = through(rig, &format!("rate {name}"), Pace::Sleeping)?;
    let bits = frame_bytes as u64 * 8;
    let metronome = Metronome {
        frame_bytes,
        period: Duration::from_nanos(bits * 1_000_000_000 * 5 / (rate * OFFERED_FIFTHS)),
    };
    let sender = send(rig, metronome)?;
    thread::sleep(time);
    sender.end()?;
    forwarder.end()?;
    let frames = receiver.end()?;
    let errors = windows(&frames, real(rate));
    ensure!(!errors.is_empty(), "only {} frames arrived", frames.len());
    Ok(errors)
}

fn windows(frames: &[Captured], rate: f64) -> Vec<f64> {
    let mut errors = Vec::new();
    let mut frames = frames.iter().skip(SKIPPED);
    let Some(mut first) = frames.next() else {
        return errors;
    };
    let mut bits = 0;
    for frame in frames {
        bits += u64::from(frame.bytes) * 8;
        let nanos = frame.nanos.saturating_sub(first.nanos);
        if nanos >= WINDOW {
            let achieved = real(bits) * 1e9 / real(nanos);
            errors.push((achieved / rate - 1.0).abs() * 100.0);
            (first, bits) = (frame, 0);
        }
    }
    errors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_of_the_sleeper_is_as_wrong_as_it_is_late() {
        let mut late = vec![0.0; 3100];
        // The last packet of the first window, of 100 ms, comes one percent late.
        late[SKIPPED + 1000] = 1000.0;
        let frames = sent_by_sleeper(&late);
        let errors = windows(&frames, 1e7);
        assert!((errors[0] - 0.990_099).abs() < 1e-3, "{errors:?}");
        assert!(errors[2..].iter().all(|error| *error < 1e-9), "{errors:?}");
    }

    #[test]
    fn a_window_is_as_wrong_as_its_packets() {
        // Each 10 ms a frame of 125 bytes: 100 kbit/s; from the second window on each 20 ms.
        let mut nanos = 0;
        let frames: Vec<Captured> = (0..31)
            .map(|number| {
                nanos += if number > 20 { 20_000_000 } else { 10_000_000 };
                Captured {
                    nanos,
                    bytes: 125,
                    number,
                }
            })
            .collect();
        let errors = windows(&frames, 100_000.0);
        assert_eq!(errors.len(), 3);
        assert!(errors[0].abs() < 1e-9, "{errors:?}");
        assert!((errors[2] - 50.0).abs() < 1e-9, "{errors:?}");
    }
}

//! Memory of one impaired link: 1 Gbit/s and 200 ms, full of packets, in a process of its own.

use std::{env, process::Command, time::Duration};

use anyhow::{Context, Result, ensure};
use sandwire_engine::{Engine, Graph, Time, apps::Sink};

use super::metronome::Metronome;
use crate::{
    host::resident_kibibytes,
    progress::Step,
    record::Record,
    rig::{impaired, real},
};

pub(super) const STAND_IN: &str = "link-memory";
const FRAME_BYTES: usize = 1514;
/// A frame at 1 Gbit/s.
const PERIOD: Duration = Duration::from_nanos(12_112);
const BREATH_NANOS: u64 = 100_000;
/// Half a second: all is in its steady state.
const BREATHS: u64 = 5000;

/// Starts the process and takes its word.
pub(super) fn measure(record: &mut Record) {
    let _step = Step::begin("memory of a link", 1);
    match figures() {
        Ok((in_flight, resident)) => {
            record.add("link", "in_flight", "MiB", &[in_flight / 1024.0]);
            record.add("link", "memory", "MiB", &[resident / 1024.0]);
            record.insert_ratio("link_memory_vs_in_flight", resident / in_flight);
        }
        Err(error) => record.not_run("link", &format!("{error:#}")),
    }
}

/// KiB in flight, and those that the process got for it.
fn figures() -> Result<(f64, f64)> {
    let executable = env::current_exe().context("cannot find this executable")?;
    let output = Command::new(executable)
        .args(["bench", "impair", "--stand-in", STAND_IN])
        .output()
        .context("cannot start this executable")?;
    let said = String::from_utf8_lossy(&output.stdout);
    let problem = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "the process failed: {problem}");
    let figures = said.trim().split_once(' ');
    let (in_flight, resident) = figures.context("it said something else")?;
    Ok((in_flight.parse()?, resident.parse()?))
}

/// Fills a link in virtual time; KiB in flight and KiB that became resident meanwhile.
pub(super) fn stand_in() -> Result<String> {
    let mut graph = Graph::new();
    let metronome = Metronome {
        frame_bytes: FRAME_BYTES,
        period: PERIOD,
    };
    graph.app("beat", metronome)?;
    graph.app("line", impaired("delay 200ms rate 1gbit")?)?;
    graph.app("sink", Sink)?;
    graph.links("beat.output -> line.input\nline.output -> sink.input")?;
    let mut engine = Engine::new();
    let before = resident_kibibytes(std::process::id())?;
    engine.configure(&graph)?;
    for breath in 1..=BREATHS {
        engine.breathe(Time::from_nanos(breath * BREATH_NANOS));
    }
    let after = resident_kibibytes(std::process::id())?;
    let packets = |app| engine.figure(app, "packets").unwrap_or(0);
    let in_flight = (packets("beat") - packets("sink")) * FRAME_BYTES as u64;
    Ok(format!("{} {}", real(in_flight) / 1024.0, after - before))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_link_is_full_of_what_its_rate_and_delay_say() {
        let said = stand_in().unwrap();
        let (in_flight, _) = said.split_once(' ').unwrap();
        let kibibytes: f64 = in_flight.parse().unwrap();
        let expected = 1e9 / 8.0 * 0.2 / 1024.0;
        assert!((kibibytes / expected - 1.0).abs() < 0.02, "{kibibytes} KiB");
    }
}

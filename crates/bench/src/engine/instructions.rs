//! Instructions per packet, counted by valgrind: unlike times they are the same on a busy machine.
//!
//! Each load runs twice in a process of its own, with few breaths and with many. What differs between the two is
//! the packets' alone; starting up and reading arguments are in both.

use std::{env, process::Command, str::FromStr};

use anyhow::{Context, Result, anyhow, ensure};

use super::memory::Load;
use crate::{progress::Step, record::Record};

const LOADS: [Load; 3] = [Load::Basic1, Load::LikeSeed, Load::CopyFloor];
const FEW: u32 = 500;
const MANY: u32 = 3500;

/// A load to be run under valgrind, as the hidden argument `--stand-in LOAD:BREATHS` names it.
#[derive(Clone, Debug)]
pub(crate) struct Counted {
    load: Load,
    breaths: u32,
}

impl FromStr for Counted {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (name, breaths) = text.split_once(':').context("no ':'")?;
        let load = LOADS.into_iter().find(|load| load.name() == name);
        Ok(Self {
            load: load.with_context(|| format!("there is no load '{name}'"))?,
            breaths: breaths.parse().context("not a number of breaths")?,
        })
    }
}

impl Counted {
    /// Runs it; how many packets it made.
    pub(super) fn run(&self) -> Result<u64> {
        let mut running = self.load.start()?;
        running.breathe(self.breaths);
        Ok(running.packets())
    }
}

/// Counts the instructions of each load; says why where that can't be.
pub(super) fn measure(record: &mut Record) {
    let step = Step::begin("instructions per packet", 3);
    for (load, done) in LOADS.into_iter().zip(1..) {
        match per_packet(load) {
            Ok(instructions) => {
                record.add(load.name(), "instructions", "per packet", &[instructions]);
            }
            Err(error) => {
                let case = format!("instructions of {}", load.name());
                record.not_run(&case, &format!("{error:#}"));
            }
        }
        step.at(done);
    }
}

fn per_packet(load: Load) -> Result<f64> {
    let few = count(load, FEW)?;
    let many = count(load, MANY)?;
    ensure!(
        many.packets > few.packets,
        "{} made no packets",
        load.name()
    );
    Ok((many.instructions - few.instructions) / (many.packets - few.packets))
}

struct Counts {
    instructions: f64,
    packets: f64,
}

fn count(load: Load, breaths: u32) -> Result<Counts> {
    let executable = env::current_exe().context("cannot find this executable")?;
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(executable)
        .args(["bench", "engine", "--stand-in"])
        .arg(format!("{}:{breaths}", load.name()))
        .output()
        .context("cannot start valgrind; install the package of that name")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "valgrind ended with {}: {}",
        output.status,
        said.lines().last().unwrap_or_default()
    );
    let packets = String::from_utf8_lossy(&output.stdout);
    Ok(Counts {
        instructions: collected(&said)
            .ok_or_else(|| anyhow!("valgrind did not say how many instructions there were"))?,
        packets: packets.trim().parse().context("no number of packets")?,
    })
}

/// The number in callgrind's line `==PID== Collected : NUMBER`.
fn collected(text: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.contains("Collected :"))?;
    line.rsplit_once(':')?.1.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callgrinds_total_is_found() {
        let text = "==7== Events    : Ir\n==7== Collected : 123456789\n==7== \n";
        assert_eq!(collected(text), Some(123_456_789.0));
        assert_eq!(collected("==7== Events : Ir"), None);
    }

    #[test]
    fn a_load_is_named_with_its_breaths() {
        let counted: Counted = "copy_floor:3".parse().unwrap();
        assert_eq!(counted.run().unwrap(), 3 * 102);
        for wrong in ["copy_floor", "copy_floor:x", "nothing:3"] {
            assert!(Counted::from_str(wrong).is_err(), "{wrong}");
        }
    }
}

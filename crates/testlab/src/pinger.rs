//! `ping` at a steady rate until it is told to stop: shows what a change under traffic costs, however
//! long the change takes.

use std::{
    collections::BTreeSet,
    fs::File,
    io::{self, Seek},
    net::IpAddr,
    path::Path,
    process::Child,
    time::Duration,
};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};

use crate::namespace;

/// A running `ping`.
#[derive(Debug)]
pub struct Pinger {
    child: Child,
    /// A file, which is never full.
    output: File,
}

/// What became of the packets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pinged {
    /// How many were sent.
    pub sent: u32,
    /// The last one that was answered. Those behind it may be under way.
    pub settled: u32,
    /// Those before that one without an answer.
    pub lost: Vec<u32>,
}

impl Pinger {
    /// Begins to ping an address from a network namespace.
    ///
    /// # Errors
    /// If ping can't be started.
    pub fn start(netns: &Path, address: IpAddr, interval: Duration) -> Result<Self> {
        let output = tempfile::tempfile().context("make a file for what ping says")?;
        let child = namespace::command_in(netns, "ping")
            .args(["-n", "-i", &interval.as_secs_f64().to_string()])
            .arg(address.to_string())
            .stdout(output.try_clone()?)
            .spawn()
            .context("start ping")?;
        Ok(Self { child, output })
    }

    /// Ends it as Ctrl-C does.
    ///
    /// # Errors
    /// If it can't be ended, or what it said can't be read.
    pub fn stop(mut self) -> Result<Pinged> {
        kill_process(Pid::from_child(&self.child), Signal::INT).context("end ping")?;
        self.child.wait().context("wait for ping")?;
        self.output.rewind()?;
        Ok(Pinged::read(&io::read_to_string(self.output)?))
    }
}

impl Pinged {
    fn read(text: &str) -> Self {
        let answered: BTreeSet<u32> = text
            .lines()
            .filter(|line| line.contains(" bytes from "))
            .filter_map(|line| line.split_once("icmp_seq=")?.1.split(' ').next())
            .filter_map(|number| number.parse().ok())
            .collect();
        let settled = answered.last().copied().unwrap_or(0);
        let lost = (1..=settled).filter(|number| !answered.contains(number));
        let summary = text.split(" packets transmitted").next();
        let sent = summary.and_then(|head| head.lines().last()?.parse().ok());
        Self {
            sent: sent.unwrap_or(settled),
            settled,
            lost: lost.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_before_the_last_answer_is_lost() {
        let text = "PING 10.0.0.1 (10.0.0.1) 56(84) bytes of data.\n\
                    64 bytes from 10.0.0.1: icmp_seq=1 ttl=64 time=0.1 ms\n\
                    64 bytes from 10.0.0.1: icmp_seq=4 ttl=64 time=0.1 ms\n\
                    64 bytes from 10.0.0.1: icmp_seq=3 ttl=64 time=0.1 ms\n\
                    \n6 packets transmitted, 3 received, 50% packet loss, time 5ms\n";
        let pinged = Pinged::read(text);
        assert_eq!((pinged.sent, pinged.settled), (6, 4));
        assert_eq!(pinged.lost, [2]);
        assert_eq!(Pinged::read("").settled, 0);
    }
}

//! What was on a cable and when, by tcpdump and the kernel's own stamps: a witness that isn't ours.

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    process::{Child, ChildStderr, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, anyhow, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::NamedTempFile;

use super::metronome::NUMBER;
use crate::{cpu, world::command_in};

/// The kernel hands tcpdump whole blocks, the last one a second after it was begun; interrupted before, tcpdump
/// leaves it unread.
const BLOCK_TIMEOUT: Duration = Duration::from_millis(1200);

/// A running tcpdump. Ends with it.
pub(super) struct Capture {
    child: Child,
    said: BufReader<ChildStderr>,
    file: NamedTempFile,
}

/// A captured frame of a metronome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Captured {
    /// Nanoseconds since 1970.
    pub(super) nanos: u64,
    /// Of the whole frame.
    pub(super) bytes: u32,
    pub(super) number: u64,
}

impl Capture {
    /// Begins to capture datagrams on an interface, not on the last processor: that is the engine's.
    pub(super) fn start(namespace: &str, interface: &str) -> Result<Self> {
        let file = NamedTempFile::new_in("/run").context("cannot make a file for a capture")?;
        let mut command = command_in(namespace, "tcpdump");
        command
            .args(["-i", interface, "-n", "-Z", "root", "-s", "64"])
            .args(["-B", "65536", "--time-stamp-precision=nano", "-w"])
            .arg(file.path())
            .arg("udp")
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let child = thread::scope(|scope| {
            let starter = scope.spawn(|| -> Result<Child> {
                cpu::pin(1)?;
                command.spawn().context("cannot start tcpdump")
            });
            starter.join().map_err(|_| anyhow!("a thread panicked"))?
        });
        let mut child = child?;
        let said = child.stderr.take().context("a pipe was asked for")?;
        let mut capture = Self {
            child,
            said: BufReader::new(said),
            file,
        };
        let mut line = String::new();
        while !line.contains("listening on") {
            line.clear();
            let read = capture.said.read_line(&mut line);
            ensure!(
                read.context("cannot read from tcpdump")? > 0,
                "tcpdump does not listen"
            );
        }
        Ok(capture)
    }

    /// Ends it; what it has seen. To be called when nothing is sent any more.
    pub(super) fn end(mut self) -> Result<Vec<Captured>> {
        thread::sleep(BLOCK_TIMEOUT);
        let pid = Pid::from_child(&self.child);
        kill_process(pid, Signal::INT).context("cannot end tcpdump")?;
        let mut said = String::new();
        self.said
            .read_to_string(&mut said)
            .context("cannot read from tcpdump")?;
        self.child.wait().context("cannot wait for tcpdump")?;
        let has_all = said
            .lines()
            .any(|line| line.starts_with("0 packets dropped by kernel"));
        ensure!(has_all, "tcpdump missed packets: {}", said.trim());
        let bytes = fs::read(self.file.path()).context("cannot read a capture")?;
        parse(&bytes).context("tcpdump wrote another format")
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        // It may have ended; then there is nothing to do.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The frames of a pcap file with nanoseconds, in this machine's byte order.
fn parse(file: &[u8]) -> Option<Vec<Captured>> {
    const MAGIC: u32 = 0xa1b2_3c4d;
    let word = |at: usize| {
        let bytes = file.get(at..at + 4)?;
        Some(u32::from_ne_bytes(bytes.try_into().ok()?))
    };
    if word(0)? != MAGIC {
        return None;
    }
    let mut at = 24;
    let mut frames = Vec::new();
    while at < file.len() {
        let length = word(at + 8)? as usize;
        let frame = file.get(at + 16..at + 16 + length)?;
        if let Some(number) = frame.get(NUMBER..NUMBER + 8) {
            frames.push(Captured {
                nanos: u64::from(word(at)?) * 1_000_000_000 + u64::from(word(at + 4)?),
                bytes: word(at + 12)?,
                number: u64::from_be_bytes(number.try_into().ok()?),
            });
        }
        at += 16 + length;
    }
    Some(frames)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capture_is_read_to_its_last_frame() {
        let mut file = 0xa1b2_3c4d_u32.to_ne_bytes().to_vec();
        file.resize(24, 0);
        for number in [7_u64, 8] {
            for word in [3_u32, 5, 64, 1514] {
                file.extend(word.to_ne_bytes());
            }
            let mut frame = vec![0; 64];
            frame[NUMBER..NUMBER + 8].copy_from_slice(&number.to_be_bytes());
            file.extend(frame);
        }
        let expected = |number| Captured {
            nanos: 3_000_000_005,
            bytes: 1514,
            number,
        };
        assert_eq!(parse(&file), Some(vec![expected(7), expected(8)]));
        assert_eq!(parse(&file[..file.len() - 1]), None);
        assert_eq!(parse(&[0; 24]), None);
    }
}

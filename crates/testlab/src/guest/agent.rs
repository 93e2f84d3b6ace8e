//! The other end of `lab-vsock`: tells a guest what to do, over its second serial line.
//!
//! That line works before, beside and after whatever a test does to the guest's vsock.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, ErrorKind, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};

/// The program in a guest.
#[derive(Debug)]
pub struct Agent {
    reader: BufReader<UnixStream>,
    partial: String,
    answers: BTreeMap<u64, Result<String, String>>,
    commands: u64,
}

/// A command that runs in the guest.
#[derive(Debug)]
#[must_use = "what the command did is only known by waiting for it"]
pub struct Running(u64);

impl Agent {
    /// Connects to the serial line at once: what is said while nobody listens is lost.
    ///
    /// # Errors
    /// If the VMM doesn't listen.
    pub fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket)
            .with_context(|| format!("connect to the serial line {}", socket.display()))?;
        Ok(Self {
            reader: BufReader::new(stream),
            partial: String::new(),
            answers: BTreeMap::new(),
            commands: 0,
        })
    }

    /// Waits until it serves its ports and listens to commands: once after a boot.
    ///
    /// # Errors
    /// If it doesn't in time.
    pub fn wait_ready(&mut self, patience: Duration) -> Result<()> {
        self.wait(&Running(READY), patience).map(drop)
    }

    /// Has a command run to its end and returns what it says.
    ///
    /// # Errors
    /// If it fails, or doesn't end within two minutes.
    pub fn run(&mut self, command: &str) -> Result<String> {
        let running = self.begin(command)?;
        self.wait(&running, PATIENCE)
    }

    /// Begins a command.
    ///
    /// # Errors
    /// If the guest can't be told.
    pub fn begin(&mut self, command: &str) -> Result<Running> {
        self.commands += 1;
        let line = format!("{} {command}\n", self.commands);
        self.reader
            .get_mut()
            .write_all(line.as_bytes())
            .with_context(|| format!("tell the guest '{command}'"))?;
        Ok(Running(self.commands))
    }

    /// Waits until a command ends and returns what it says.
    ///
    /// # Errors
    /// If it fails or doesn't end in time.
    pub fn wait(&mut self, running: &Running, patience: Duration) -> Result<String> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(answer) = self.answers.remove(&running.0) {
                return answer.map_err(|error| anyhow!("the guest says: {error}"));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("the guest hasn't answered after {patience:?}");
            }
            self.reader.get_ref().set_read_timeout(Some(left))?;
            match self.reader.read_line(&mut self.partial) {
                Ok(0) => bail!("the guest's serial line has ended"),
                Ok(_) if self.partial.ends_with('\n') => self.take_line(),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error).context("hear from the guest"),
            }
        }
    }

    fn take_line(&mut self) {
        let line = std::mem::take(&mut self.partial);
        let mut parts = line.trim_end().splitn(3, ' ');
        let number = parts.next().and_then(|number| number.parse().ok());
        // What isn't an answer is a stray line of a boot.
        if let (Some(number), Some(verdict)) = (number, parts.next()) {
            let text = parts.next().unwrap_or_default().to_owned();
            let answer = if verdict == "ok" { Ok(text) } else { Err(text) };
            self.answers.insert(number, answer);
        }
    }
}

/// What the agent says by itself once it is ready bears this number.
const READY: u64 = 0;
const PATIENCE: Duration = Duration::from_secs(120);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_come_in_any_order_and_errors_are_told() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut agent = Agent {
            reader: BufReader::new(ours),
            partial: String::new(),
            answers: BTreeMap::new(),
            commands: 0,
        };
        let first = agent.begin("one").unwrap();
        let second = agent.begin("two").unwrap();
        theirs
            .write_all(b"noise\n2 error no such thing\n1 ok it is done\n")
            .unwrap();
        assert_eq!(agent.wait(&first, PATIENCE).unwrap(), "it is done");
        let error = agent.wait(&second, PATIENCE).unwrap_err().to_string();
        assert!(error.contains("no such thing"), "{error}");
        let third = agent.begin("three").unwrap();
        agent.wait(&third, Duration::from_millis(1)).unwrap_err();
    }
}

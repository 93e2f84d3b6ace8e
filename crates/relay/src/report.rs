//! The report: one line of JSON for each connection and each flow of datagrams, when it ends.

use std::{
    fs::OpenOptions,
    io::{self, Write},
    net::SocketAddr,
    path::Path,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant, SystemTime},
};

use serde::Serialize;

use crate::{config::Protocol, metrics::Metrics};

/// Lines that may wait to be written.
const WAITING_MAX: usize = 4096;

/// Where lines go. They are written by a thread of its own, so that a slow disk holds nobody up.
#[derive(Clone)]
pub(crate) struct Report {
    queue: mpsc::SyncSender<Line>,
    metrics: Arc<Metrics>,
}

/// The file that they are to go to, or standard output.
pub(crate) struct Output(Box<dyn Write + Send>);

/// Who writes them.
pub(crate) struct Writer {
    /// Somebody has the other end for as long as lines are written.
    done: mpsc::Receiver<()>,
}

/// A line of the report.
#[derive(Debug, Serialize)]
struct Line {
    /// When it began, in seconds since 1970-01-01 UTC.
    started_at: u64,
    seconds: f64,
    protocol: &'static str,
    /// The relay that sent it here, by its certificate.
    host: Arc<str>,
    sender: Arc<str>,
    source: SocketAddr,
    destination: SocketAddr,
    outcome: &'static str,
    to_destination_bytes: u64,
    from_destination_bytes: u64,
}

/// What a line will be about.
#[derive(Clone, Debug)]
pub(crate) struct Subject {
    pub(crate) protocol: Protocol,
    pub(crate) host: Arc<str>,
    pub(crate) sender: Arc<str>,
    pub(crate) source: SocketAddr,
    pub(crate) destination: SocketAddr,
    pub(crate) started: Instant,
}

impl Output {
    pub(crate) fn open(path: Option<&Path>) -> io::Result<Self> {
        Ok(Self(match path {
            Some(path) => Box::new(OpenOptions::new().create(true).append(true).open(path)?),
            None => Box::new(io::stdout()),
        }))
    }
}

impl Report {
    /// Starts the thread that writes, which has the privileges that the caller has left.
    pub(crate) fn start(output: Output, metrics: Arc<Metrics>) -> io::Result<(Self, Writer)> {
        let Output(mut output) = output;
        let (queue, lines) = mpsc::sync_channel::<Line>(WAITING_MAX);
        let lost = metrics.clone();
        let (writing, done) = mpsc::channel();
        thread::Builder::new()
            .name("report".to_owned())
            .spawn(move || {
                let _writing: mpsc::Sender<()> = writing;
                let mut written = Lines::default();
                for line in lines {
                    if !written.write(&mut *output, &line) {
                        lost.reports_lost.add(1);
                    }
                }
            })?;
        Ok((Self { queue, metrics }, Writer { done }))
    }

    pub(crate) fn add(&self, subject: &Subject, outcome: &'static str, (out, back): (u64, u64)) {
        let lasted = subject.started.elapsed();
        let started = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or(Duration::ZERO)
            .saturating_sub(lasted);
        let line = Line {
            started_at: started.as_secs(),
            seconds: lasted.as_secs_f64(),
            protocol: subject.protocol.name(),
            host: subject.host.clone(),
            sender: subject.sender.clone(),
            source: subject.source,
            destination: subject.destination,
            outcome,
            to_destination_bytes: out,
            from_destination_bytes: back,
        };
        if self.queue.try_send(line).is_err() {
            self.metrics.reports_lost.add(1);
        }
    }
}

/// What is written line by line.
#[derive(Default)]
struct Lines {
    is_failing: bool,
    /// A line is there without its end.
    has_part: bool,
}

impl Lines {
    /// Writes a line; false if it couldn't be, or not as a whole.
    fn write(&mut self, output: &mut dyn Write, line: &Line) -> bool {
        let written = serde_json::to_string(line)
            .map_err(io::Error::from)
            .and_then(|text| self.put(output, &text));
        if let Err(error) = &written
            && !self.is_failing
        {
            tracing::error!(%error, "the report can't be written: its lines are lost until it can");
        }
        self.is_failing = written.is_err();
        written.is_ok()
    }

    /// On a line of its own.
    fn put(&mut self, output: &mut dyn Write, text: &str) -> io::Result<()> {
        let start = if self.has_part { "\n" } else { "" };
        let text = format!("{start}{text}\n");
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            match output.write(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => rest = &rest[count..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            self.has_part = !rest.is_empty();
        }
        output.flush()
    }
}

impl Writer {
    /// Waits until all lines are written, of which there are no more once every [`Report`] is gone.
    pub(crate) fn finish(self, at_most: Duration) {
        // Nobody says anything: it ends by the other end's going.
        let _ = self.done.recv_timeout(at_most);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk with room for so many bytes.
    struct Disk {
        text: Vec<u8>,
        room: usize,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let count = bytes.len().min(self.room);
            if count == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.text.extend(&bytes[..count]);
            self.room -= count;
            Ok(count)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_line_that_was_cut_short_spoils_no_other() {
        let address = SocketAddr::from(([192, 0, 2, 1], 80));
        let line = Line {
            started_at: 0,
            seconds: 1.5,
            protocol: "tcp",
            host: "a".into(),
            sender: "b".into(),
            source: address,
            destination: address,
            outcome: "done",
            to_destination_bytes: 1,
            from_destination_bytes: 2,
        };
        let whole = serde_json::to_string(&line).unwrap();
        let (text, room) = (Vec::new(), whole.len() + 11);
        let mut disk = Disk { text, room };
        let mut lines = Lines::default();
        let mut write = |disk: &mut Disk| lines.write(disk, &line);
        assert!(write(&mut disk));
        assert!(!write(&mut disk) && !write(&mut disk));
        disk.room = usize::MAX;
        assert!(write(&mut disk) && write(&mut disk));
        let text = String::from_utf8(disk.text).unwrap();
        let part = &whole[..10];
        assert_eq!(text, format!("{whole}\n{part}\n{whole}\n{whole}\n"));
    }
}

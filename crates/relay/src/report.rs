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
                for line in lines {
                    let written =
                        serde_json::to_vec(&line)
                            .map_err(io::Error::from)
                            .and_then(|mut text| {
                                text.push(b'\n');
                                output.write_all(&text)?;
                                output.flush()
                            });
                    if written.is_err() {
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

impl Writer {
    /// Waits until all lines are written, of which there are no more once every [`Report`] is gone.
    pub(crate) fn finish(self, at_most: Duration) {
        // Nobody says anything: it ends by the other end's going.
        let _ = self.done.recv_timeout(at_most);
    }
}

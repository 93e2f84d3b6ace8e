//! The report: one line of JSON for each connection and each flow of datagrams, when it ends; of many refused ones, for some.
//!
//! Its file may be moved away by whoever rotates logs, and is then opened again by its name.

mod refusals;

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    net::SocketAddr,
    num::NonZero,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use serde::Serialize;

use self::refusals::Refusals;
use crate::{
    config::{Limits, Protocol},
    metrics::Metrics,
};

/// Where lines go. They are written by a thread of its own, so that a slow disk holds nobody up.
#[derive(Clone)]
pub(crate) struct Report {
    queue: mpsc::Sender<Work>,
    /// Lines in the queue, and how many these may be.
    waiting: Arc<AtomicUsize>,
    waiting_max: usize,
    refusals: Arc<Mutex<Refusals>>,
    /// The file is to be opened again, whatever waits in the queue.
    is_moved: Arc<AtomicBool>,
    metrics: Arc<Metrics>,
}

/// The file that they are to go to, or standard output.
pub(crate) enum Output {
    File(PathBuf, File),
    Standard(io::Stdout),
}

/// What the writer is woken for.
enum Work {
    Line(Line),
    /// To look at [`Report::is_moved`].
    Look,
}

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
    /// Connections that were refused before this one and have no line.
    #[serde(skip_serializing_if = "Option::is_none")]
    left_out: Option<NonZero<u64>>,
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
        match path {
            Some(path) => Ok(Self::File(path.to_owned(), open(path)?)),
            None => Ok(Self::Standard(io::stdout())),
        }
    }

    fn writer(&mut self) -> &mut dyn Write {
        match self {
            Self::File(_, file) => file,
            Self::Standard(output) => output,
        }
    }

    /// Opens the file of that name, which may be another one by now; true if it has nothing in it yet. The former one stays
    /// if that fails.
    fn open_again(&mut self) -> io::Result<bool> {
        let Self::File(path, file) = self else {
            return Ok(false);
        };
        *file = open(path)?;
        Ok(file.metadata()?.len() == 0)
    }
}

/// Who sent what to where isn't everybody's to read.
fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.create(true).append(true).mode(0o640).open(path)
}

/// Lines of all that may end at the same moment: a new configuration, a host that goes or the end of this relay ends all
/// that there is. The writer needs longer for them.
pub(crate) fn lines_max(limits: &Limits) -> usize {
    [
        limits.connections,
        limits.flows,
        limits.connections_per_host,
        limits.flows_per_host,
    ]
    .into_iter()
    .fold(0, usize::saturating_add)
}

impl Report {
    /// Starts the thread that writes, which has the privileges that the caller has left. So many lines may wait for it.
    pub(crate) fn start(
        output: Output,
        waiting_max: usize,
        metrics: Arc<Metrics>,
    ) -> io::Result<(Self, Writer)> {
        let (queue, work) = mpsc::channel();
        let (waiting, is_moved) = (Arc::<AtomicUsize>::default(), Arc::<AtomicBool>::default());
        let taken = waiting.clone();
        let work = work.into_iter().inspect(move |work| {
            let lines = usize::from(matches!(work, Work::Line(_)));
            taken.fetch_sub(lines, Ordering::Relaxed);
        });
        let (asked, counted) = (is_moved.clone(), metrics.clone());
        let (writing, done) = mpsc::channel();
        thread::Builder::new()
            .name("report".to_owned())
            .spawn(move || {
                let _writing: mpsc::Sender<()> = writing;
                write_all(output, work, &asked, &counted);
            })?;
        let report = Self {
            queue,
            waiting,
            waiting_max,
            refusals: Arc::default(),
            is_moved,
            metrics,
        };
        Ok((report, Writer { done }))
    }

    /// Has the file opened again, before whatever is written next.
    pub(crate) fn open_again(&self) {
        self.is_moved.store(true, Ordering::Release);
        // The writer is there as long as this is.
        let _ = self.queue.send(Work::Look);
    }

    pub(crate) fn add(&self, subject: &Subject, outcome: &'static str, bytes: (u64, u64)) {
        self.add_line(subject, outcome, bytes, 0);
    }

    /// For a connection that was never carried: a line, unless its sender or host has had many such lately.
    pub(crate) fn add_refused(&self, subject: &Subject, outcome: &'static str) {
        let admitted = {
            let refusals = self.refusals.lock();
            let mut refusals = refusals.unwrap_or_else(PoisonError::into_inner);
            refusals.admit(&subject.host, &subject.sender, Instant::now())
        };
        match admitted {
            Some(left_out) => self.add_line(subject, outcome, (0, 0), left_out),
            None => self.metrics.reports_left_out.add(1),
        }
    }

    fn add_line(
        &self,
        subject: &Subject,
        outcome: &'static str,
        (out, back): (u64, u64),
        left_out: u64,
    ) {
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
            left_out: NonZero::new(left_out),
        };
        if !self.has_taken_room() || self.queue.send(Work::Line(line)).is_err() {
            self.metrics.reports_lost.add(1);
        }
    }

    fn has_taken_room(&self) -> bool {
        let one_more = |waiting| (waiting < self.waiting_max).then_some(waiting + 1);
        self.waiting
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more)
            .is_ok()
    }
}

/// Writes until every [`Report`] is gone.
fn write_all(
    mut output: Output,
    work: impl Iterator<Item = Work>,
    is_moved: &AtomicBool,
    metrics: &Metrics,
) {
    let mut lines = Lines::default();
    for work in work {
        if is_moved.swap(false, Ordering::Acquire) {
            match output.open_again() {
                Ok(is_empty) => lines.has_part &= !is_empty,
                Err(error) => tracing::error!(
                    %error,
                    "the report can't be opened again: it goes on in the file that was open"
                ),
            }
        }
        if let Work::Line(line) = work
            && !lines.write(output.writer(), &line)
        {
            metrics.reports_lost.add(1);
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
    use std::{
        io::{BufRead, BufReader},
        os::{fd::OwnedFd, unix::net::UnixStream},
    };

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
    fn a_file_that_was_moved_is_left_and_one_of_its_name_is_made_for_few() {
        let folder = tempfile::tempdir().unwrap();
        let [path, moved] = ["report", "report.1"].map(|name| folder.path().join(name));
        let output = Output::open(Some(&path)).unwrap();
        let (report, writer) = Report::start(output, 8, Arc::new(Metrics::default())).unwrap();
        report.add(&subject("before"), "closed", (1, 2));
        wait_until(|| std::fs::read(&path).is_ok_and(|text| text.ends_with(b"\n")));
        std::fs::rename(&path, &moved).unwrap();
        report.open_again();
        // Also while nothing is to be written: whoever rotates may want to have the former one for itself.
        wait_until(|| path.exists());
        report.add(&subject("after"), "closed", (1, 2));
        drop(report);
        writer.finish(Duration::from_secs(60));
        let senders = [&moved, &path].map(|path| {
            let text = std::fs::read_to_string(path).unwrap();
            let lines = text.lines().map(|line| {
                let line: serde_json::Value = serde_json::from_str(line).unwrap();
                line["sender"].as_str().unwrap().to_owned()
            });
            lines.collect::<Vec<_>>()
        });
        assert_eq!(senders, [["before"], ["after"]]);
        let mode = std::os::unix::fs::PermissionsExt::mode(&path.metadata().unwrap().permissions());
        assert_eq!(mode & 0o137, 0, "{mode:o}");
    }

    fn subject(sender: &str) -> Subject {
        Subject {
            protocol: Protocol::Tcp,
            host: "a".into(),
            sender: sender.into(),
            source: ([192, 0, 2, 1], 80).into(),
            destination: ([192, 0, 2, 2], 80).into(),
            started: Instant::now(),
        }
    }

    /// Lines that come of so many at once while nobody takes them, and how many are counted as lost.
    fn come_of(lines: usize, waiting_max: usize) -> (usize, u64) {
        let (reader, writer) = UnixStream::pair().unwrap();
        let output = Output::File("nowhere".into(), File::from(OwnedFd::from(writer)));
        let metrics = Arc::new(Metrics::default());
        let (report, _writer) = Report::start(output, waiting_max, metrics.clone()).unwrap();
        for _ in 0..lines {
            report.add(&subject("a"), "cut", (0, 0));
        }
        drop(report);
        let come = BufReader::new(reader).lines().map(Result::unwrap).count();
        (come, metrics.reports_lost.get())
    }

    #[test]
    fn what_ends_at_once_is_written_and_what_is_more_than_may_wait_is_counted() {
        const MANY: usize = 40_000;
        assert_eq!(come_of(MANY, MANY), (MANY, 0));
        let (come, lost) = come_of(MANY, 100);
        assert_eq!(come + usize::try_from(lost).unwrap(), MANY);
        assert!(lost > 0, "the kernel keeps more than {MANY} lines");
    }

    #[test]
    fn of_many_refused_connections_some_have_a_line_and_one_tells_of_the_others() {
        const MANY: usize = 5000;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("report");
        let output = Output::open(Some(&path)).unwrap();
        let metrics = Arc::new(Metrics::default());
        let (report, writer) = Report::start(output, MANY, metrics.clone()).unwrap();
        for _ in 0..MANY {
            report.add_refused(&subject("loud"), "denied");
        }
        report.add(&subject("loud"), "closed", (1, 2));
        report.add_line(&subject("loud"), "denied", (0, 0), 7);
        drop(report);
        writer.finish(Duration::from_secs(60));
        let text = std::fs::read_to_string(&path).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
        let lines: Vec<serde_json::Value> = lines.collect();
        let (refused, [carried, telling]) = lines.split_last_chunk().unwrap();
        let left_out = usize::try_from(metrics.reports_left_out.get()).unwrap();
        assert_eq!(refused.len() + left_out, MANY);
        assert!(left_out > 0, "each has a line");
        assert_eq!(
            (&carried["outcome"], carried.get("left_out")),
            (&"closed".into(), None)
        );
        assert_eq!(telling["left_out"], 7);
    }

    fn wait_until(is_so: impl Fn() -> bool) {
        let begun = Instant::now();
        while !is_so() {
            assert!(begun.elapsed() < Duration::from_secs(60));
            thread::sleep(Duration::from_millis(1));
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
            left_out: None,
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

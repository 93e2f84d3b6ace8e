//! Records of a run: what came, what was decided on each packet, and what left.
//!
//! | file | what it holds |
//! |---|---|
//! | `run.json` | the impairment, and when the run began and ended |
//! | `before.pcapng` | frames before anything happens to them; interface 0 is `ab`, 1 is `ba` |
//! | `decisions.jsonl` | a line for each packet that a rule matched, once its fate is known |
//! | `after.pcapng` | frames as they left; what was dropped is on interfaces 2 and 3; the verdict is the comment |
//!
//! Moments in `run.json` and `decisions.jsonl` are nanoseconds of the engine's time, those in captures the calendar's, which
//! is `calendar_start` later. [`replay`] runs the first file through the same impairment in virtual time.

mod replay;

use std::{
    cell::RefCell,
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
    rc::Rc,
    time::SystemTime,
};

use sandwire_api::impairment::Impairment;
use sandwire_engine::{
    App, BuildError, Clock, Config, PortList, Ports, Time,
    io::pcap::{Format, Writer},
};
use sandwire_impair::{
    app::{Direction, Observation, Observer},
    decision::{Decision, Verdict},
};
use serde::{Deserialize, Serialize};

pub use replay::{Difference, ReplayError, Replayed, replay};

const RUN: &str = "run.json";
const BEFORE: &str = "before.pcapng";
const AFTER: &str = "after.pcapng";
const DECISIONS: &str = "decisions.jsonl";

/// What a run was.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Run {
    /// Of this layout.
    version: u32,
    /// What the calendar said at the start of the engine's time, in nanoseconds since 1970.
    calendar_start: u64,
    /// The first breath.
    began: u64,
    /// The last, before anything was flushed. Absent if the run was cut off.
    ended: Option<u64>,
    /// What happened to packets; egress is `ab`.
    impairment: Impairment,
}

/// The only layout that there has been.
const VERSION: u32 = 1;

/// One line of the decisions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Entry {
    way: Way,
    rule: String,
    came: u64,
    #[serde(flatten)]
    decision: Decision,
}

/// Which way a packet went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// From the first interface to the second.
    Ab,
    /// Back.
    Ba,
}

impl Way {
    fn of(direction: Direction) -> Self {
        match direction {
            Direction::Egress => Self::Ab,
            Direction::Ingress => Self::Ba,
        }
    }

    fn interface(self) -> u32 {
        match self {
            Self::Ab => 0,
            Self::Ba => 1,
        }
    }
}

/// Why nothing, or not all, was recorded.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// There is something already.
    #[error("cannot record to {}: it isn't empty; name a folder that doesn't exist or has nothing in it", folder.display())]
    NotEmpty {
        /// The folder.
        folder: PathBuf,
    },
    /// The disk refuses.
    #[error("cannot {operation} {}: {source}", path.display())]
    Disk {
        /// What was tried.
        operation: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

fn failed(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> RecordError {
    let path = path.to_owned();
    move |source| RecordError::Disk {
        operation,
        path,
        source,
    }
}

/// A run that is being recorded.
#[derive(Debug)]
pub struct Recording {
    folder: PathBuf,
    run: Run,
    files: Rc<RefCell<Files>>,
}

#[derive(Debug)]
struct Files {
    calendar_start: u64,
    before: Writer<BufWriter<File>>,
    after: Writer<BufWriter<File>>,
    decisions: BufWriter<File>,
    /// The first failure: nothing is written after it.
    failure: Option<io::Error>,
}

impl Recording {
    /// Begins a recording in a new or empty folder.
    ///
    /// # Errors
    /// There is something in it, or the disk refuses.
    pub fn create(
        folder: &Path,
        impairment: &Impairment,
        clock: &Clock,
    ) -> Result<Self, RecordError> {
        fs::create_dir_all(folder).map_err(failed("create", folder))?;
        let mut entries = fs::read_dir(folder).map_err(failed("read", folder))?;
        if entries.next().is_some() {
            let folder = folder.to_owned();
            return Err(RecordError::NotEmpty { folder });
        }
        let since_1970 = clock
            .calendar_start()
            .duration_since(SystemTime::UNIX_EPOCH);
        let calendar_start = since_1970.unwrap_or_default().as_nanos();
        let calendar_start = u64::try_from(calendar_start).unwrap_or(u64::MAX);
        let open = |name: &str| {
            let path = folder.join(name);
            let file = File::create_new(&path).map_err(failed("create", &path))?;
            Ok::<_, RecordError>(BufWriter::new(file))
        };
        let capture = |name: &str, interfaces: &[&str]| {
            Writer::new(open(name)?, Format::Pcapng, interfaces)
                .map_err(failed("write", &folder.join(name)))
        };
        let files = Files {
            calendar_start,
            before: capture(BEFORE, &["ab", "ba"])?,
            after: capture(AFTER, &["ab", "ba", "ab dropped", "ba dropped"])?,
            decisions: open(DECISIONS)?,
            failure: None,
        };
        Ok(Self {
            folder: folder.to_owned(),
            run: Run {
                version: VERSION,
                calendar_start,
                began: 0,
                ended: None,
                impairment: impairment.clone(),
            },
            files: Rc::new(RefCell::new(files)),
        })
    }

    /// Says when the engine breathed first; rules are in place from then on.
    ///
    /// # Errors
    /// The disk refuses.
    pub fn begin(&mut self, first_breath: Time) -> Result<(), RecordError> {
        self.run.began = first_breath.as_nanos();
        self.write_run()
    }

    /// An app that records what passes through it, to stand before a line.
    #[must_use]
    pub fn tap(&self, way: Way) -> Tap {
        Tap {
            way,
            files: Rc::clone(&self.files),
        }
    }

    /// Records what a line decides.
    #[must_use]
    pub fn observer(&self) -> Observer {
        let files = Rc::clone(&self.files);
        Box::new(move |observation| files.borrow_mut().decided(observation))
    }

    /// Ends the recording; what is decided after `last_breath` isn't part of it.
    ///
    /// # Errors
    /// Not all could be written.
    pub fn end(&mut self, last_breath: Time) -> Result<(), RecordError> {
        self.run.ended = Some(last_breath.as_nanos());
        let finished = self.files.borrow_mut().finish();
        finished.map_err(failed("write the records in", &self.folder))?;
        self.write_run()
    }

    /// Why nothing is written any more, if that is so.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        let files = self.files.borrow();
        let folder = self.folder.display();
        files.failure.as_ref().map(|error| {
            format!(
                "cannot write the records in {folder}: {error}; what comes now isn't recorded any more"
            )
        })
    }

    /// What there was before stays until all of it is written.
    fn write_run(&self) -> Result<(), RecordError> {
        let path = self.folder.join(RUN);
        let beside = path.with_extension("new");
        let write = || {
            fs::write(&beside, serde_json::to_vec_pretty(&self.run)?)?;
            fs::rename(&beside, &path)
        };
        write().map_err(|error| {
            // It may be cut short.
            let _ = fs::remove_file(&beside);
            failed("write", &path)(error)
        })
    }
}

impl Files {
    /// Writes unless something has failed already.
    fn attempt(&mut self, write: impl FnOnce(&mut Self) -> io::Result<()>) {
        if self.failure.is_none() {
            self.failure = write(self).err();
        }
    }

    fn came(&mut self, way: Way, now: u64, frame: &[u8]) {
        let time = self.calendar_start.saturating_add(now);
        self.attempt(|files| files.before.write(way.interface(), time, frame, None));
    }

    fn decided(&mut self, observation: &Observation<'_>) {
        let way = Way::of(observation.direction);
        let entry = Entry {
            way,
            rule: observation.rule.to_owned(),
            came: observation.came,
            decision: observation.decision.clone(),
        };
        let (at, interface, comment) = told(&entry);
        let time = self.calendar_start.saturating_add(at);
        self.attempt(|files| {
            serde_json::to_writer(&mut files.decisions, &entry)?;
            files.decisions.write_all(b"\n")?;
            let frame = observation.frame;
            files.after.write(interface, time, frame, Some(&comment))
        });
    }

    fn finish(&mut self) -> io::Result<()> {
        self.attempt(|files| {
            files.before.flush()?;
            files.after.flush()?;
            files.decisions.flush()
        });
        self.failure.take().map_or(Ok(()), Err)
    }
}

/// When, on which interface of the capture, and with which words.
fn told(entry: &Entry) -> (u64, u32, String) {
    let Entry { rule, decision, .. } = entry;
    let interface = entry.way.interface();
    let number = decision.number;
    match &decision.verdict {
        Verdict::Released {
            planned, actual, ..
        } => {
            let at = actual.unwrap_or(*planned);
            let late = at.saturating_sub(*planned) / 1000;
            let after = planned.saturating_sub(entry.came) / 1000;
            let comment =
                format!("{rule} #{number}: released after {after} µs as planned, {late} µs late");
            (at, interface, comment)
        }
        Verdict::Dropped { at, cause } => {
            let comment = format!("{rule} #{number}: dropped: {}", cause.name());
            (*at, interface + 2, comment)
        }
    }
}

/// Records what passes through it.
#[derive(Clone, Debug)]
pub struct Tap {
    way: Way,
    files: Rc<RefCell<Files>>,
}

impl PartialEq for Tap {
    fn eq(&self, other: &Self) -> bool {
        self.way == other.way && Rc::ptr_eq(&self.files, &other.files)
    }
}

impl Config for Tap {
    type App = TapApp;

    fn inputs(&self) -> PortList {
        PortList::named(["input"])
    }

    fn outputs(&self) -> PortList {
        PortList::named(["output"])
    }

    fn build(&self) -> Result<TapApp, BuildError> {
        Ok(TapApp(self.clone()))
    }
}

/// The running [`Tap`].
#[derive(Debug)]
pub struct TapApp(Tap);

impl App for TapApp {
    fn push(&mut self, now: Time, ports: &mut Ports<'_>) {
        // Only what the line will take in this very breath is recorded.
        while ports.space(0) > 0
            && let Some(packet) = ports.receive(0)
        {
            let mut files = self.0.files.borrow_mut();
            files.came(self.0.way, now.as_nanos(), packet.bytes());
            drop(files);
            ports.transmit(0, packet);
        }
    }
}

#[cfg(test)]
mod tests;

//! Captures as apps: frames from a file, as fast as they go or when they came, and a file of the frames that pass.

mod read;
mod write;

use std::fs::File;
use std::io::{BufReader, BufWriter};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

pub use read::{CaptureError, Captured, Reader};
use thiserror::Error;
pub use write::{Format, Writer};

use crate::app::{App, BuildError, Config, Figure, PortList, Wake};
use crate::packet::Packet;
use crate::ports::{BATCH_PACKETS, Ports};
use crate::time::Time;

/// Sends the frames of a pcap or pcapng file to `output`: as fast as there is room, or at the recorded times.
///
/// Reports `packets` and `bytes`; what it left out: `cut_short`, frames of which the file has only a part, `too_long`
/// for the engine's packets, `other_link_types`; `late_max_ns`, by which the latest frame was late; `ended`, which is 1
/// when the file is through, and `broken`, which is 1 if it couldn't be read to its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PcapReader {
    path: PathBuf,
    paced: bool,
}

/// The running [`PcapReader`].
#[derive(Debug)]
pub struct PcapReaderApp {
    reader: Option<Reader<BufReader<File>>>,
    paced: bool,
    /// When the first frame was sent, and its recorded time.
    first: Option<(Time, u64)>,
    /// When the frame before was due.
    previous: Time,
    next: Option<Next>,
    counters: ReaderCounters,
}

/// A frame that waits for its time.
#[derive(Debug)]
struct Next {
    packet: Packet,
    due: Time,
}

#[derive(Debug, Default)]
struct ReaderCounters {
    packets: u64,
    bytes: u64,
    cut_short: u64,
    too_long: u64,
    other_link_types: u64,
    late_max: Duration,
    broken: bool,
}

/// Writes the frames that come to `input` to a file, each with the time of its breath, and passes them on to `output`.
///
/// Frames are with the system at the latest when nothing more comes. Reports `packets`, and `failed`: after the first
/// error nothing is written any more, and frames only pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PcapWriter {
    path: PathBuf,
    format: Format,
    calendar_start: SystemTime,
}

/// The running [`PcapWriter`].
#[derive(Debug)]
pub struct PcapWriterApp {
    /// Missing after an error.
    writer: Option<Writer<BufWriter<File>>>,
    calendar_start: u64,
    is_flushed: bool,
    packets: u64,
    failed: u64,
}

/// A file that can't be opened or isn't a capture.
#[derive(Debug, Error)]
#[error("{operation} capture {}: {source}", path.display())]
pub struct PcapError {
    operation: &'static str,
    path: PathBuf,
    source: BuildError,
}

impl PcapError {
    fn when<E: Into<BuildError>>(operation: &'static str, path: &Path) -> impl FnOnce(E) -> Self {
        let path = path.to_owned();
        move |source| Self {
            operation,
            path,
            source: source.into(),
        }
    }
}

impl PcapReader {
    /// All frames of this file, as fast as there is room for them.
    #[must_use]
    pub fn file(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            paced: false,
        }
    }

    /// The same at the recorded times: the first frame at once, each other as long after it as it was recorded. Frames
    /// that were recorded out of order, or without a time, come right after the one before.
    #[must_use]
    pub fn at_recorded_times(mut self) -> Self {
        self.paced = true;
        self
    }
}

impl Config for PcapReader {
    type App = PcapReaderApp;

    fn inputs(&self) -> PortList {
        PortList::none()
    }

    fn outputs(&self) -> PortList {
        PortList::named(["output"])
    }

    fn build(&self) -> Result<PcapReaderApp, BuildError> {
        let file = File::open(&self.path).map_err(PcapError::when("open", &self.path))?;
        let reader =
            Reader::new(BufReader::new(file)).map_err(PcapError::when("open", &self.path))?;
        Ok(PcapReaderApp {
            reader: Some(reader),
            paced: self.paced,
            first: None,
            previous: Time::START,
            next: None,
            counters: ReaderCounters::default(),
        })
    }
}

impl App for PcapReaderApp {
    fn pull(&mut self, now: Time, ports: &mut Ports<'_>) {
        for _ in 0..BATCH_PACKETS.min(ports.space(0)) {
            if self.next.is_none() {
                self.next = self.read(now, ports);
            }
            let Some(next) = self.next.take_if(|next| next.due <= now) else {
                return;
            };
            self.counters.packets += 1;
            self.counters.bytes += next.packet.length() as u64;
            if self.paced {
                let late = now.since(next.due);
                self.counters.late_max = self.counters.late_max.max(late);
            }
            ports.transmit(0, next.packet);
        }
    }

    fn wake(&self) -> Wake {
        self.next
            .as_ref()
            .map_or(Wake::default(), |next| Wake::at(next.due))
    }

    fn report(&self) -> Vec<Figure> {
        let counters = &self.counters;
        let late_max = u64::try_from(counters.late_max.as_nanos()).unwrap_or(u64::MAX);
        vec![
            Figure::new("packets", counters.packets),
            Figure::new("bytes", counters.bytes),
            Figure::new("cut_short", counters.cut_short),
            Figure::new("too_long", counters.too_long),
            Figure::new("other_link_types", counters.other_link_types),
            Figure::new("late_max_ns", late_max),
            Figure::new(
                "ended",
                u64::from(self.reader.is_none() && self.next.is_none()),
            ),
            Figure::new("broken", u64::from(counters.broken)),
        ]
    }
}

impl PcapReaderApp {
    /// The next frame that can be sent. `None` at the end of the file, and while the pool has no packet.
    fn read(&mut self, now: Time, ports: &Ports<'_>) -> Option<Next> {
        let reader = self.reader.as_mut()?;
        let mut packet = ports.pool().take()?;
        let recorded = loop {
            let captured = match reader.read() {
                Ok(Some(captured)) => captured,
                ended => {
                    self.counters.broken = ended.is_err();
                    self.counters.other_link_types = reader.other_link_types();
                    self.reader = None;
                    return None;
                }
            };
            if captured.frame.len() as u64 != u64::from(captured.length) {
                self.counters.cut_short += 1;
            } else if packet.set_bytes(captured.frame) {
                break captured.time;
            } else {
                self.counters.too_long += 1;
            }
        };
        self.counters.other_link_types = reader.other_link_types();
        let due = self.due(now, recorded);
        Some(Next { packet, due })
    }

    /// When a frame is to be sent.
    fn due(&mut self, now: Time, recorded: Option<u64>) -> Time {
        if !self.paced {
            return now;
        }
        let due = match (self.first, recorded) {
            (Some((start, first)), Some(recorded)) => {
                start + Duration::from_nanos(recorded.saturating_sub(first))
            }
            (None, Some(recorded)) => {
                self.first = Some((now, recorded));
                now
            }
            (Some(_), None) => self.previous,
            (None, None) => now,
        };
        self.previous = self.previous.max(due);
        self.previous
    }
}

impl PcapWriter {
    /// A new file in place of what is there. `calendar_start` is what the calendar says at [`Time::START`]:
    /// [`Clock::calendar_start`](crate::Clock::calendar_start), or `UNIX_EPOCH` for a time of one's own.
    #[must_use]
    pub fn file(path: &Path, format: Format, calendar_start: SystemTime) -> Self {
        Self {
            path: path.to_owned(),
            format,
            calendar_start,
        }
    }
}

impl Config for PcapWriter {
    type App = PcapWriterApp;

    fn inputs(&self) -> PortList {
        PortList::named(["input"])
    }

    fn outputs(&self) -> PortList {
        PortList::named(["output"])
    }

    fn build(&self) -> Result<PcapWriterApp, BuildError> {
        let file = File::create(&self.path).map_err(PcapError::when("create", &self.path))?;
        let writer = Writer::new(BufWriter::new(file), self.format, &["engine"])
            .map_err(PcapError::when("write", &self.path))?;
        let since_1970 = self.calendar_start.duration_since(SystemTime::UNIX_EPOCH);
        let nanos = since_1970.unwrap_or_default().as_nanos();
        Ok(PcapWriterApp {
            writer: Some(writer),
            calendar_start: u64::try_from(nanos).unwrap_or(u64::MAX),
            is_flushed: false,
            packets: 0,
            failed: 0,
        })
    }
}

impl App for PcapWriterApp {
    fn push(&mut self, now: Time, ports: &mut Ports<'_>) {
        let time = self.calendar_start.saturating_add(now.as_nanos());
        if ports.queued(0) == 0 {
            self.flush();
        }
        while let Some(packet) = ports.receive(0) {
            self.write(time, packet.bytes());
            ports.transmit(0, packet);
        }
    }

    fn report(&self) -> Vec<Figure> {
        vec![
            Figure::new("packets", self.packets),
            Figure::new("failed", self.failed),
        ]
    }
}

impl PcapWriterApp {
    fn write(&mut self, time: u64, frame: &[u8]) {
        let written = self
            .writer
            .as_mut()
            .is_some_and(|writer| writer.write(0, time, frame, None).is_ok());
        if written {
            self.packets += 1;
            self.is_flushed = false;
        } else {
            self.writer = None;
            self.failed += 1;
        }
    }

    fn flush(&mut self) {
        if self.is_flushed {
            return;
        }
        self.is_flushed = true;
        if self
            .writer
            .as_mut()
            .is_some_and(|writer| writer.flush().is_err())
        {
            self.writer = None;
            self.failed += 1;
        }
    }
}

//! The same run again, in virtual time: do the same packets have the same fate?
//!
//! A recording that was cut off, as by SIGKILL, has no end: its files end anywhere, each for itself. Its last line and its
//! last frame may be torn, and are left out. So are decisions that frames may have had a part in which aren't there, and
//! nothing is made of decisions that lack.

use std::{
    cell::RefCell,
    collections::{BTreeSet, HashMap, VecDeque},
    fs::{self, File},
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    rc::Rc,
};

use sandwire_engine::{
    App, BuildError, Config, ConfigureError, Engine, Graph, GraphError, PoolError, PoolLimits,
    PortList, Ports, Time, Wake,
    apps::Sink,
    io::pcap::{CaptureError, Captured, Reader},
};
use sandwire_impair::{
    DropCause,
    app::{Line, LineApp},
    compile::CompileError,
    decision::{Decision, Verdict},
};
use serde::Serialize;

use super::{BEFORE, DECISIONS, Entry, RUN, Run, VERSION, Way};
use crate::forward::LINK;

/// Differences that are told; more are only counted.
const TOLD_MAX: usize = 20;

/// What came out.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Replayed {
    /// Frames of the recording.
    pub frames: u64,
    /// Decisions of the recording.
    pub decisions: u64,
    /// Those that depend on who fetched packets, and that no replay can repeat.
    pub unrepeatable: u64,
    /// Whether the recording has no end: what its last frame or later ones had a part in isn't compared.
    pub is_cut_off: bool,
    /// Whether all others are the same.
    pub is_same: bool,
    /// How many are not.
    pub different: u64,
    /// The first of them.
    pub differences: Vec<Difference>,
}

/// A packet with two fates.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// Which way.
    pub way: Way,
    /// Which rule.
    pub rule: String,
    /// Its number within the rule.
    pub number: u64,
    /// In the recording; absent if nothing was decided there.
    pub recorded: Option<Decision>,
    /// Now; absent if nothing was.
    pub replayed: Option<Decision>,
}

/// Why a recording can't be replayed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// A file can't be read.
    #[error("cannot replay: {}: {reason}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The impairment can't be carried out.
    #[error("cannot replay: {0}")]
    Impairment(#[from] CompileError),
    /// There is no engine for it.
    #[error("cannot replay: {0}")]
    Pool(#[from] PoolError),
    /// There is no graph for it.
    #[error("cannot replay: {0}")]
    Graph(#[from] GraphError),
    /// The engine doesn't take the graph.
    #[error("cannot replay: {0}")]
    Configure(#[from] ConfigureError),
}

/// What an engine's packets can hold at most.
const FRAME_BYTES_MAX: u16 = 65_000;
/// The latest moment of a frame, in nanoseconds: engines take the last one that there is for never.
const LATEST: u64 = 100 * 365 * 86_400 * 1_000_000_000;

/// A packet within a run.
type Key = (Way, String, u64, u32, bool);
type Fates = HashMap<Key, Decision>;

fn key(entry: &Entry) -> Key {
    let Decision {
        number,
        part,
        is_copy,
        ..
    } = entry.decision;
    (entry.way, entry.rule.clone(), number, part, is_copy)
}

fn unreadable(path: &Path, reason: impl ToString) -> ReplayError {
    ReplayError::File {
        path: path.to_owned(),
        reason: reason.to_string(),
    }
}

/// Runs a recording again and compares verdicts and planned releases.
///
/// # Errors
/// It can't be read, or isn't one.
pub fn replay(folder: &Path) -> Result<Replayed, ReplayError> {
    let path = folder.join(RUN);
    let text = fs::read(&path).map_err(|error| unreadable(&path, error))?;
    let run: Run = serde_json::from_slice(&text).map_err(|error| unreadable(&path, error))?;
    if run.version != VERSION {
        let reason = format!(
            "it has version {}, and only {VERSION} is known",
            run.version
        );
        return Err(unreadable(&path, reason));
    }
    let is_cut_off = run.ended.is_none();
    let (mut recorded, consumers) = read_decisions(&folder.join(DECISIONS), is_cut_off)?;
    let before = folder.join(BEFORE);
    let mut bench = Bench::new(&run, longest_frame(&run, &before)?)?;
    let frames = bench.run(&run, &before)?;
    if is_cut_off {
        recorded.retain(|_, decision| moment(decision) < bench.last);
    }
    let unrepeatable = consumers.len() as u64;
    let mut replayed = Replayed {
        frames,
        decisions: recorded.len() as u64 + unrepeatable,
        unrepeatable,
        is_cut_off,
        ..Replayed::default()
    };
    let fates = bench.fates.borrow();
    compare(&run, (recorded, &consumers), &fates, &mut replayed);
    drop(fates);
    Ok(replayed)
}

/// What was decided, and the packets of which the impairment didn't decide, but who took them.
fn read_decisions(path: &Path, is_cut_off: bool) -> Result<(Fates, BTreeSet<Key>), ReplayError> {
    let file = File::open(path).map_err(|error| unreadable(path, error))?;
    let mut lines = BufReader::new(file);
    let (mut fates, mut consumers) = (Fates::new(), BTreeSet::new());
    let mut line = Vec::new();
    for number in 1u64.. {
        let wrong = |error: &dyn ToString| {
            unreadable(path, format!("line {number}: {}", error.to_string()))
        };
        line.clear();
        let read = lines.read_until(b'\n', &mut line);
        if read.map_err(|error| wrong(&error))? == 0 {
            break;
        }
        let entry: Entry = match serde_json::from_slice(&line) {
            Ok(entry) => entry,
            Err(_) if is_cut_off && !line.ends_with(b"\n") => break,
            Err(error) => return Err(wrong(&error)),
        };
        if depends_on_consumer(&entry.decision) {
            consumers.insert(key(&entry));
        } else {
            fates.insert(key(&entry), entry.decision.planned());
        }
    }
    Ok((fates, consumers))
}

fn depends_on_consumer(decision: &Decision) -> bool {
    let cause = match decision.verdict {
        Verdict::Dropped { cause, .. } => Some(cause),
        Verdict::Released { .. } => None,
    };
    matches!(cause, Some(DropCause::Unread | DropCause::Flushed))
}

fn compare(
    run: &Run,
    (mut recorded, consumers): (Fates, &BTreeSet<Key>),
    replayed: &Fates,
    outcome: &mut Replayed,
) {
    let mut different = |key: &Key, recorded: Option<Decision>, replayed: Option<Decision>| {
        outcome.different += 1;
        if outcome.differences.len() < TOLD_MAX {
            let (way, rule, number, ..) = key.clone();
            outcome.differences.push(Difference {
                way,
                rule,
                number,
                recorded,
                replayed,
            });
        }
    };
    let mut keys: Vec<&Key> = replayed.keys().collect();
    keys.sort();
    for key in keys {
        let now = &replayed[key];
        match recorded.remove(key) {
            Some(then) if then == *now => {}
            Some(then) => different(key, Some(then), Some(now.clone())),
            // What was under way at the end has no fate in the recording.
            None if is_after(run, now) || consumers.contains(key) => {}
            None => different(key, None, Some(now.clone())),
        }
    }
    let mut left: Vec<(Key, Decision)> = recorded.into_iter().collect();
    left.sort_by(|one, other| one.0.cmp(&other.0));
    for (key, then) in left {
        different(&key, Some(then), None);
    }
    outcome.is_same = outcome.different == 0;
}

fn is_after(run: &Run, decision: &Decision) -> bool {
    // One that was due just before the last breath may have been left where it was, if it was flushed then.
    run.ended.is_none_or(|ended| moment(decision) >= ended)
}

/// When a packet was to be released, or was dropped.
fn moment(decision: &Decision) -> u64 {
    match decision.verdict {
        Verdict::Released { planned, .. } => planned,
        Verdict::Dropped { at, .. } => at,
    }
}

/// Bytes of the longest frame that there is.
fn longest_frame(run: &Run, path: &Path) -> Result<u16, ReplayError> {
    let mut frames = Frames::open(run, path)?;
    let mut longest = 0;
    while let Some(captured) = frames.read()? {
        longest = longest.max(captured.frame.len());
    }
    Ok(u16::try_from(longest).unwrap_or(u16::MAX))
}

/// The frames of a recording, in the order in which they came.
struct Frames<'a> {
    path: &'a Path,
    reader: Reader<BufReader<File>>,
    is_cut_off: bool,
}

impl<'a> Frames<'a> {
    fn open(run: &Run, path: &'a Path) -> Result<Self, ReplayError> {
        let file = File::open(path).map_err(|error| unreadable(path, error))?;
        let reader = Reader::new(BufReader::new(file)).map_err(|error| unreadable(path, error))?;
        Ok(Self {
            path,
            reader,
            is_cut_off: run.ended.is_none(),
        })
    }

    fn read(&mut self) -> Result<Option<Captured<'_>>, ReplayError> {
        match self.reader.read() {
            Ok(captured) => Ok(captured),
            Err(CaptureError::CutShort) if self.is_cut_off => Ok(None),
            Err(error) => Err(unreadable(self.path, error)),
        }
    }
}

/// Two lines between frames of a recording and nowhere.
struct Bench {
    engine: Engine,
    feeds: [Feed; 2],
    fates: Rc<RefCell<Fates>>,
    now: Time,
    /// When the last frame came, in nanoseconds.
    last: u64,
}

impl Bench {
    /// For frames of up to so many bytes: a buffer has room for the longest, and all may be under way at once.
    fn new(run: &Run, longest: u16) -> Result<Self, ReplayError> {
        let usual = PoolLimits::default().frame_bytes_max;
        let limits = PoolLimits {
            frame_bytes_max: longest.clamp(usual, FRAME_BYTES_MAX),
            packets_max: 1 << 24,
        };
        let mut engine = Engine::with_limits(limits)?;
        let (ab, ba) = Line::pair(&run.impairment, LINK)?;
        let feeds = [Feed::default(), Feed::default()];
        let mut graph = Graph::new();
        for ((way, line), feed) in [("ab", ab), ("ba", ba)].into_iter().zip(&feeds) {
            graph.app(&format!("from-{way}"), feed.clone())?;
            graph.app(way, line)?;
            graph.app(&format!("to-{way}"), Sink)?;
            graph.link(&format!("from-{way}.output -> {way}.input"))?;
            graph.link(&format!("{way}.output -> to-{way}.input"))?;
        }
        engine.configure(&graph)?;
        let fates = Rc::new(RefCell::new(Fates::new()));
        for way in ["ab", "ba"] {
            let fates = Rc::clone(&fates);
            if let Some(line) = engine.app_mut::<LineApp>(way) {
                line.observe(Some(Box::new(move |observation| {
                    let entry = Entry {
                        way: Way::of(observation.direction),
                        rule: observation.rule.to_owned(),
                        came: observation.came,
                        decision: observation.decision.clone(),
                    };
                    fates
                        .borrow_mut()
                        .insert(key(&entry), entry.decision.planned());
                })));
            }
        }
        Ok(Self {
            engine,
            feeds,
            fates,
            now: Time::START,
            last: 0,
        })
    }

    /// Feeds all frames, each at its time; how many there were.
    fn run(&mut self, run: &Run, path: &Path) -> Result<u64, ReplayError> {
        let mut recorded = Frames::open(run, path)?;
        // Rules are in place from the first breath on, and some of them count their time from then.
        self.now = Time::from_nanos(run.began);
        self.engine.breathe(self.now);
        let mut frames = 0;
        while let Some(captured) = recorded.read()? {
            let feed = usize::try_from(captured.interface)
                .ok()
                .filter(|feed| *feed < self.feeds.len())
                .ok_or_else(|| unreadable(path, "a frame is of an interface that isn't ours"))?;
            let time = captured
                .time
                .unwrap_or(0)
                .saturating_sub(run.calendar_start);
            if time > LATEST {
                return Err(unreadable(
                    path,
                    "a frame came a century after its machine's start",
                ));
            }
            self.last = time;
            let time = Time::from_nanos(time);
            if time > self.now {
                // Those that came together are taken together, as they were.
                self.breathe_until(Some(time));
                self.now = time;
            }
            self.feeds[feed]
                .0
                .borrow_mut()
                .push_back(captured.frame.to_vec());
            frames += 1;
        }
        self.breathe_until(None);
        Ok(frames)
    }

    /// Breathes now, and whenever something is due before `time`, or until nothing is left.
    fn breathe_until(&mut self, time: Option<Time>) {
        loop {
            let breath = self.engine.breathe(self.now);
            if breath.moved > 0 {
                continue;
            }
            let is_empty = self.engine.pool_counters().in_use() == 0;
            match breath.wake.at {
                Some(at) if !is_empty && at > self.now && time.is_none_or(|time| at < time) => {
                    self.now = at;
                }
                _ => break,
            }
        }
    }
}

/// Sends the frames that wait in it.
#[derive(Clone, Debug, Default)]
pub(super) struct Feed(pub(super) Rc<RefCell<VecDeque<Vec<u8>>>>);

impl PartialEq for Feed {
    fn eq(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }
}

impl Config for Feed {
    type App = FeedApp;

    fn inputs(&self) -> PortList {
        PortList::none()
    }

    fn outputs(&self) -> PortList {
        PortList::named(["output"])
    }

    fn build(&self) -> Result<FeedApp, BuildError> {
        Ok(FeedApp(self.clone()))
    }
}

pub(super) struct FeedApp(Feed);

impl App for FeedApp {
    fn pull(&mut self, _now: Time, ports: &mut Ports<'_>) {
        let mut frames = self.0.0.borrow_mut();
        while ports.space(0) > 0
            && let Some(frame) = frames.pop_front()
        {
            // The pool is as large as a recording can ask for.
            if let Some(mut packet) = ports.pool().take()
                && packet.set_bytes(&frame)
            {
                ports.transmit(0, packet);
            }
        }
    }

    /// Frames are put in from outside, between breaths.
    fn wake(&self) -> Wake {
        Wake::polling()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decision(verdict: Verdict) -> Decision {
        Decision {
            number: 0,
            part: 0,
            is_copy: false,
            verdict,
        }
    }

    #[test]
    fn what_nobody_took_in_the_recording_is_no_difference_in_the_replay() {
        let run = Run {
            version: VERSION,
            calendar_start: 0,
            began: 0,
            ended: Some(100),
            impairment: sandwire_api::impairment::Impairment::default(),
        };
        let released = decision(Verdict::Released {
            planned: 10,
            actual: None,
            bit_flips: Vec::new(),
        });
        let packet = |number| (Way::Ab, "loss".to_owned(), number, 0, false);
        let replayed = Fates::from([(packet(1), released.clone()), (packet(2), released.clone())]);
        let different = |unread: &[u64]| {
            let unread = unread.iter().map(|number| packet(*number)).collect();
            let recorded = Fates::from([(packet(1), released.clone())]);
            let mut outcome = Replayed::default();
            compare(&run, (recorded, &unread), &replayed, &mut outcome);
            outcome.different
        };
        assert_eq!((different(&[2]), different(&[])), (0, 1));
    }
}

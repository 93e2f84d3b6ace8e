//! Graphs that need nothing but packets: a source, a tee and two sinks, chains of apps, and a loop without any
//! engine that copies as much.

use std::{hint::black_box, time::Instant};

use anyhow::{Result, ensure};
use sandwire_engine::{
    App, BATCH_PACKETS, BuildError, Config, Engine, Graph, PortList, Ports, Time,
    apps::{Filter, Pass, Sink, Source, Tee},
};

/// Bytes of every frame.
const FRAME: u16 = 60;
/// Breaths before anything is measured: all buffers are made by then, and in the cache.
const WARM_UP: u32 = 2000;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Load {
    /// Source, tee, two sinks; the tee makes one copy and passes the original on.
    Basic1,
    /// The same with a tee that makes two copies and frees the original.
    LikeSeed,
    /// Writes, copies and lengths of `Basic1` in a loop over two rows of buffers.
    CopyFloor,
    /// A chain of so many apps that do nothing.
    Passes(u32),
    /// A chain of so many apps that look at each packet.
    Filters(u32),
}

impl Load {
    /// Its name in a record; that of its kind for chains.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Basic1 => "basic1",
            Self::LikeSeed => "basic1_like_seed",
            Self::CopyFloor => "copy_floor",
            Self::Passes(_) => "pass",
            Self::Filters(_) => "filter",
        }
    }

    /// Time per packet of the source, over so many breaths.
    pub(super) fn nanos_per_packet(self, breaths: u32) -> Result<f64> {
        let mut running = self.start()?;
        running.breathe(WARM_UP);
        let before = running.packets();
        let start = Instant::now();
        running.breathe(breaths);
        let nanos = start.elapsed().as_secs_f64() * 1e9;
        let packets = running.packets() - before;
        ensure!(packets > 0, "{}: the source sent nothing", self.name());
        Ok(nanos / real(packets))
    }

    /// Gets ready to run.
    pub(super) fn start(self) -> Result<Running> {
        let graph = match self {
            Self::Basic1 => basic1(Tee)?,
            Self::LikeSeed => basic1(CopyingTee)?,
            Self::Passes(apps) => chain(apps, || Pass)?,
            Self::Filters(apps) => chain(apps, || Filter::new(|packet| packet.length() > 0))?,
            Self::CopyFloor => return Ok(Running::Floor(Floor::new())),
        };
        let mut engine = Engine::new();
        engine.configure(&graph)?;
        Ok(Running::Engine(engine))
    }
}

/// A load under way.
pub(super) enum Running {
    Engine(Engine),
    Floor(Floor),
}

impl Running {
    /// Moves a batch of packets through, so many times.
    pub(super) fn breathe(&mut self, breaths: u32) {
        for _ in 0..breaths {
            match self {
                Self::Engine(engine) => _ = engine.breathe(Time::START),
                Self::Floor(floor) => floor.breathe(),
            }
        }
    }

    /// Packets that the source has made.
    pub(super) fn packets(&self) -> u64 {
        match self {
            Self::Engine(engine) => engine.figure("source", "packets").unwrap_or(0),
            Self::Floor(floor) => floor.packets,
        }
    }
}

fn basic1(tee: impl Config) -> Result<Graph> {
    let mut graph = Graph::new();
    graph.app("source", Source::sizes(&[FRAME]))?;
    graph.app("tee", tee)?;
    graph.app("sink1", Sink)?.app("sink2", Sink)?;
    graph.link("source.output -> tee.input")?;
    graph.link("tee.output1 -> sink1.input")?;
    graph.link("tee.output2 -> sink2.input")?;
    Ok(graph)
}

fn chain<C: Config>(apps: u32, config: impl Fn() -> C) -> Result<Graph> {
    let mut graph = Graph::new();
    graph.app("source", Source::sizes(&[FRAME]))?;
    graph.app("sink", Sink)?;
    let mut from = "source".to_owned();
    for index in 0..apps {
        let name = format!("app{index:02}");
        graph.app(&name, config())?;
        graph.connect((&from, "output"), (&name, "input"))?;
        from = name;
    }
    graph.connect((&from, "output"), ("sink", "input"))?;
    Ok(graph)
}

/// A tee that keeps nothing: every output gets a copy.
#[derive(Debug, PartialEq)]
struct CopyingTee;

impl Config for CopyingTee {
    type App = Self;

    fn inputs(&self) -> PortList {
        PortList::named(["input"])
    }

    fn outputs(&self) -> PortList {
        PortList::Any
    }

    fn build(&self) -> Result<Self, BuildError> {
        Ok(Self)
    }
}

impl App for CopyingTee {
    fn push(&mut self, _now: Time, ports: &mut Ports<'_>) {
        for output in 0..ports.outputs() {
            ports.copy(0, output);
        }
        ports.discard(0);
    }
}

/// The copies of `Basic1` and nothing else: a frame is written into each buffer of one row, each of these is copied
/// into the other row, and all lengths are read. The rows lie as favourably in the cache as memory can.
pub(super) struct Floor {
    frame: [u8; FRAME as usize],
    originals: Vec<Buffer>,
    copies: Vec<Buffer>,
    packets: u64,
    bytes: u64,
}

#[derive(Clone)]
#[repr(align(64))]
struct Buffer {
    bytes: [u8; FRAME as usize],
    length: u16,
}

impl Floor {
    fn new() -> Self {
        let empty = Buffer {
            bytes: [0; FRAME as usize],
            length: 0,
        };
        Self {
            frame: black_box([0x5a; FRAME as usize]),
            originals: vec![empty.clone(); BATCH_PACKETS],
            copies: vec![empty; BATCH_PACKETS],
            packets: 0,
            bytes: 0,
        }
    }

    fn breathe(&mut self) {
        for original in &mut self.originals {
            original.bytes = self.frame;
            original.length = FRAME;
        }
        // What was written must be in memory, or the compiler would copy the frame twice instead.
        let originals = black_box(&self.originals);
        for (copy, original) in self.copies.iter_mut().zip(originals) {
            copy.bytes = original.bytes;
            copy.length = original.length;
        }
        let copies = black_box(&self.copies);
        let lengths = originals.iter().chain(copies).map(|buffer| buffer.length);
        self.bytes += lengths.map(u64::from).sum::<u64>();
        self.packets += BATCH_PACKETS as u64;
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
fn real(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_load_moves_a_batch_per_breath() {
        let loads = [
            Load::Basic1,
            Load::LikeSeed,
            Load::CopyFloor,
            Load::Passes(1),
            Load::Filters(16),
        ];
        for load in loads {
            let mut running = load.start().unwrap();
            running.breathe(3);
            assert_eq!(running.packets(), 3 * BATCH_PACKETS as u64, "{load:?}");
        }
    }

    #[test]
    fn both_sinks_get_every_packet_whichever_tee() {
        for load in [Load::Basic1, Load::LikeSeed] {
            let Running::Engine(mut engine) = load.start().unwrap() else {
                panic!("{load:?} is a graph");
            };
            engine.breathe(Time::START);
            for sink in ["sink1", "sink2"] {
                let packets = engine.figure(sink, "packets");
                assert_eq!(packets, Some(BATCH_PACKETS as u64), "{load:?} {sink}");
                let bytes = engine.figure(sink, "bytes");
                assert_eq!(bytes, packets.map(|packets| packets * u64::from(FRAME)));
            }
        }
    }

    #[test]
    fn the_floor_copies_what_the_graph_does() {
        let mut floor = Floor::new();
        floor.breathe();
        assert!(floor.copies.iter().all(|copy| copy.bytes == floor.frame));
        assert_eq!(floor.bytes, 2 * u64::from(FRAME) * floor.packets);
    }
}

//! An app that sends a packet at each beat, and one that looks how late or early they come out of a line.

use std::{net::SocketAddrV4, time::Duration};

use sandwire_engine::{App, BuildError, Config, Figure, PortList, Ports, Time, Wake, run::Clock};

use crate::{
    packet::{Checksum, ETHERNET, Flow, IPV4, UDP},
    rig::{LEFT, LEFT_MAC, RIGHT},
};

/// Where in a frame its number is; what follows is when it was sent.
pub(super) const NUMBER: usize = ETHERNET + IPV4 + UDP;
const SENT: usize = NUMBER + 8;

/// Sends numbered frames to `output`, one each `period`, from when it first runs. Beats that were missed are made up for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Metronome {
    pub(super) frame_bytes: usize,
    pub(super) period: Duration,
}

pub(super) struct MetronomeApp {
    frame: Vec<u8>,
    period: Duration,
    next: Option<Time>,
    packets: u64,
}

impl Config for Metronome {
    type App = MetronomeApp;

    fn inputs(&self) -> PortList {
        PortList::none()
    }

    fn outputs(&self) -> PortList {
        PortList::named(["output"])
    }

    fn build(&self) -> Result<MetronomeApp, BuildError> {
        Ok(MetronomeApp {
            frame: frame(self.frame_bytes),
            period: self.period,
            next: None,
            packets: 0,
        })
    }
}

impl App for MetronomeApp {
    fn pull(&mut self, now: Time, ports: &mut Ports<'_>) {
        let mut next = self.next.unwrap_or(now);
        while next <= now && ports.space(0) > 0 {
            self.frame[NUMBER..SENT].copy_from_slice(&self.packets.to_be_bytes());
            self.frame[SENT..SENT + 8].copy_from_slice(&now.as_nanos().to_be_bytes());
            if ports.fill(0, 1, |packet| _ = packet.set_bytes(&self.frame)) == 0 {
                break;
            }
            self.packets += 1;
            next = next + self.period;
        }
        self.next = Some(next);
    }

    fn wake(&self) -> Wake {
        Wake::at(self.next.unwrap_or(Time::START))
    }

    fn report(&self) -> Vec<Figure> {
        vec![Figure::new("packets", self.packets)]
    }
}

/// A datagram without a UDP checksum, which its number would change, for nobody's Ethernet address.
fn frame(bytes: usize) -> Vec<u8> {
    let flow = Flow {
        source_mac: LEFT_MAC,
        target_mac: [0x02, 0xbe, 0x20, 0xff, 0, 0],
        source: SocketAddrV4::new(LEFT, 1000),
        target: SocketAddrV4::new(RIGHT, 9),
    };
    let frame = flow.udp(Checksum::Complete, bytes - NUMBER);
    let mut frame = frame.plain().to_vec();
    frame[NUMBER - 2..NUMBER].fill(0);
    frame
}

/// Takes what a [`Metronome`] sent and a line delayed, and compares the clock with when it was due. Reports
/// `packets`, and in nanoseconds `p50`, `p99` and `max` of how late they are, and how `early` one is at most, without the
/// first tenth of a second.
#[derive(Clone, Debug)]
pub(super) struct Arrivals {
    pub(super) clock: Clock,
    pub(super) delay: Duration,
    pub(super) period: Duration,
}

pub(super) struct ArrivalsApp {
    clock: Clock,
    delay: Duration,
    skipped: u64,
    lateness: Vec<u64>,
    early_max: u64,
}

impl PartialEq for Arrivals {
    fn eq(&self, other: &Self) -> bool {
        (self.delay, self.period) == (other.delay, other.period)
    }
}

impl Config for Arrivals {
    type App = ArrivalsApp;

    fn inputs(&self) -> PortList {
        PortList::named(["input"])
    }

    fn outputs(&self) -> PortList {
        PortList::none()
    }

    fn build(&self) -> Result<ArrivalsApp, BuildError> {
        let skipped = Duration::from_millis(100).as_nanos() / self.period.as_nanos().max(1);
        Ok(ArrivalsApp {
            clock: self.clock,
            delay: self.delay,
            skipped: u64::try_from(skipped)?,
            lateness: Vec::with_capacity(1 << 17),
            early_max: 0,
        })
    }
}

impl App for ArrivalsApp {
    fn push(&mut self, _now: Time, ports: &mut Ports<'_>) {
        while let Some(packet) = ports.receive(0) {
            let field = |at: usize| {
                let bytes = packet.bytes().get(at..at + 8)?;
                Some(u64::from_be_bytes(bytes.try_into().ok()?))
            };
            let Some((number, sent)) = field(NUMBER).zip(field(SENT)) else {
                continue;
            };
            if number >= self.skipped {
                let due = Time::from_nanos(sent) + self.delay;
                let now = self.clock.now();
                let (now, due) = (now.as_nanos(), due.as_nanos());
                self.lateness.push(now.saturating_sub(due));
                self.early_max = self.early_max.max(due.saturating_sub(now));
            }
        }
    }

    fn report(&self) -> Vec<Figure> {
        let mut sorted = self.lateness.clone();
        sorted.sort_unstable();
        let rank = |percent: usize| {
            let rank = (sorted.len() * percent).div_ceil(100).max(1);
            sorted.get(rank - 1).copied().unwrap_or(0)
        };
        vec![
            Figure::new("packets", sorted.len() as u64),
            Figure::new("p50", rank(50)),
            Figure::new("p99", rank(99)),
            Figure::new("max", rank(100)),
            Figure::new("early", self.early_max),
        ]
    }
}

#[cfg(test)]
mod tests {
    use sandwire_engine::{Engine, Graph, apps::Sink};

    use super::*;

    #[test]
    fn beats_that_were_missed_are_made_up_for() {
        let mut graph = Graph::new();
        let metronome = Metronome {
            frame_bytes: 60,
            period: Duration::from_micros(100),
        };
        graph.app("beat", metronome).unwrap();
        graph.app("sink", Sink).unwrap();
        graph.link("beat.output -> sink.input").unwrap();
        let mut engine = Engine::new();
        engine.configure(&graph).unwrap();
        for (micros, packets) in [(7, 1), (106, 1), (107, 2), (1000, 10)] {
            engine.breathe(Time::from_nanos(micros * 1000));
            assert_eq!(engine.figure("sink", "packets"), Some(packets), "{micros}");
        }
        assert_eq!(engine.figure("sink", "bytes"), Some(600));
        let idle = engine.breathe(Time::from_nanos(1_000_001));
        assert_eq!(idle.wake, Wake::at(Time::from_nanos(1_007_000)));
    }

    #[test]
    fn a_packet_that_comes_too_early_is_not_on_time() {
        const HOUR: u64 = 3600 * 1_000_000_000;
        let period = Duration::from_millis(100);
        let mut graph = Graph::new();
        let metronome = Metronome {
            frame_bytes: 60,
            period,
        };
        // With no line between, each comes hours before it is due.
        let arrivals = Arrivals {
            clock: Clock::new(),
            delay: Duration::from_hours(2),
            period,
        };
        graph.app("beat", metronome).unwrap();
        graph.app("arrivals", arrivals).unwrap();
        graph.link("beat.output -> arrivals.input").unwrap();
        let mut engine = Engine::new();
        engine.configure(&graph).unwrap();
        engine.breathe(Time::START);
        engine.breathe(Time::from_nanos(HOUR));
        assert!(engine.figure("arrivals", "packets").unwrap() > 0);
        assert_eq!(engine.figure("arrivals", "max"), Some(0));
        assert!(engine.figure("arrivals", "early").unwrap() > HOUR);
    }
}

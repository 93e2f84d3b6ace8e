//! Packets per second between two veths, each end in a namespace of its own.
//!
//! A generator on one processor sends frames as fast as it can, an engine on another one forwards. Counted is what the
//! receiving interface got, beyond the forwarder. Without a forwarder the same generator shows its own ceiling; beside
//! one its processor also does the kernel's share of receiving, and what it still offers is a ceiling too.

use std::{
    net::SocketAddrV4,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use sandwire_engine::{
    Graph,
    apps::{Filter, Sink, Source},
    io::Ring,
};

use super::{
    Extent,
    generator::{self, Generator},
};
use crate::{
    packet::{Checksum, ETHERNET, Flow, IPV4, UDP},
    progress::Step,
    record::Record,
    rig::{Edge, EngineThread, LEFT, LEFT_MAC, OUTER, Pace, Post, RIGHT, Rig, figure},
};

/// Case of the generator without a forwarder.
const CEILING: &str = "generator";
/// Sizes of frames, and what they are called.
const FRAMES: [(&str, usize); 2] = [("60", 60), ("1514", 1514)];
const WARM_UP: Duration = Duration::from_millis(150);
/// A figure within this share of a ceiling may be the generator's own.
const BOUND: f64 = 0.9;
const TRIAL_FRAMES: u64 = 100;
const PATIENCE: Duration = Duration::from_secs(3);

/// Measures each edge app that this machine can have.
pub(super) fn measure(extent: &Extent, record: &mut Record) -> Result<()> {
    let rig = Rig::build("forward")?;
    generator::prepare(&rig)?;
    let mut edges = Vec::new();
    for edge in Edge::ALL {
        match examine(&rig, edge) {
            Ok(()) => edges.push(edge),
            Err(error) => record.not_run(
                &format!("forward by {}", edge.name()),
                &format!("{error:#}"),
            ),
        }
    }
    let step = Step::begin("forwarding between two veths", extent.rounds());
    for round in 0..extent.rounds() {
        for (name, bytes) in FRAMES {
            let frame = frame(bytes, 0);
            let ceiling = sample(&rig, &frame, None, extent.time())?;
            add(record, CEILING, name, &ceiling.at_middle);
            for edge in &edges {
                let case = format!("forward_{}", edge.name());
                let sample = sample(&rig, &frame, Some(*edge), extent.time())
                    .with_context(|| format!("cannot measure {case}"))?;
                add(record, &case, name, &sample.at_receiver);
                let offered = sample.at_middle.packets_per_second;
                record.add(&case, &format!("offered_{name}"), "Mpps", &[offered / 1e6]);
                let lost = 1.0 - sample.at_receiver.packets_per_second / offered;
                record.add(&case, &format!("dropped_{name}"), "%", &[lost * 100.0]);
            }
        }
        step.at(round + 1);
    }
    add_ratios(record);
    Ok(())
}

/// What an interface received.
struct Rate {
    packets_per_second: f64,
    bytes_per_second: f64,
}

struct Sample {
    /// At the interface that the generator's cable leads to.
    at_middle: Rate,
    at_receiver: Rate,
}

fn add(record: &mut Record, case: &str, name: &str, rate: &Rate) {
    let mpps = rate.packets_per_second / 1e6;
    let gbps = rate.bytes_per_second * 8.0 / 1e9;
    record.add(case, &format!("mpps_{name}"), "Mpps", &[mpps]);
    record.add(case, &format!("gbps_{name}"), "Gbit/s", &[gbps]);
}

fn sample(rig: &Rig, frame: &[u8], edge: Option<Edge>, time: Duration) -> Result<Sample> {
    let forwarder = edge.map(|edge| forward(rig, edge, Pace::Sleeping));
    let forwarder = forwarder.transpose()?;
    let generator = Generator::start(rig, frame.to_vec())?;
    thread::sleep(WARM_UP);
    let before = rig.received()?;
    thread::sleep(time);
    let after = rig.received()?;
    generator.end()?;
    if let Some(forwarder) = forwarder {
        forwarder.end()?;
    }
    let rate = |place: usize| {
        let (packets_per_second, bytes_per_second) = after[place].rate_since(&before[place]);
        Rate {
            packets_per_second,
            bytes_per_second,
        }
    };
    Ok(Sample {
        at_middle: rate(0),
        at_receiver: rate(1),
    })
}

/// Starts a forwarder on the last processor.
pub(super) fn forward(rig: &Rig, edge: Edge, pace: Pace) -> Result<EngineThread> {
    let post = Post {
        namespace: &rig.middle,
        processor: 0,
        pace,
    };
    EngineThread::start(post, move |_| edge.forwarder())
}

/// Starts a sender of so many of these frames in turn on the processor before.
fn send(rig: &Rig, frames: Vec<Vec<u8>>, limit: u64) -> Result<EngineThread> {
    let post = Post {
        namespace: &rig.left,
        processor: 1,
        pace: Pace::Sleeping,
    };
    EngineThread::start(post, move |_| {
        let mut graph = Graph::new();
        graph.app("source", Source::of(frames).limit(limit))?;
        graph.app("out", Ring::interface(OUTER).bypass_qdisc())?;
        graph.link("source.output -> out.input")?;
        Ok(graph)
    })
}

/// Whether every frame arrives as it was sent.
fn examine(rig: &Rig, edge: Edge) -> Result<()> {
    let _step = Step::begin(&format!("examine {}", edge.name()), 1);
    let frames: Vec<Vec<u8>> = FRAMES
        .iter()
        .flat_map(|(_, bytes)| (0..10).map(|number| frame(*bytes, number)))
        .collect();
    let before = rig.received()?[1].packets;
    let forwarder = forward(rig, edge, Pace::Sleeping)?;
    let receiver = receive(rig, frames.clone())?;
    let sender = send(rig, frames, TRIAL_FRAMES)?;
    let deadline = Instant::now() + PATIENCE;
    while rig.received()?[1].packets < before + TRIAL_FRAMES && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(10));
    }
    // The last ones may be on their way from the interface to the app.
    thread::sleep(Duration::from_millis(50));
    sender.end()?;
    forwarder.end()?;
    let intact = figure(&receiver.end()?, "sink", "packets")?;
    ensure!(
        intact == TRIAL_FRAMES,
        "of {TRIAL_FRAMES} frames {intact} arrived as they were sent"
    );
    Ok(())
}

/// Starts an engine on the right host whose sink gets what equals one of these frames.
fn receive(rig: &Rig, frames: Vec<Vec<u8>>) -> Result<EngineThread> {
    let post = Post {
        namespace: &rig.right,
        processor: 1,
        pace: Pace::Sleeping,
    };
    EngineThread::start(post, move |_| {
        let is_one = Filter::new(move |packet| frames.iter().any(|frame| frame == packet.bytes()));
        let mut graph = Graph::new();
        graph.app("in", Ring::interface(OUTER))?;
        graph.app("check", is_one)?.app("sink", Sink)?;
        graph.links("in.output -> check.input\ncheck.output -> sink.input")?;
        Ok(graph)
    })
}

/// A datagram of that many bytes with its Ethernet header. It is for nobody's Ethernet address, so that the receiver's
/// stack counts it and has no more to do with it.
fn frame(bytes: usize, number: u16) -> Vec<u8> {
    let flow = Flow {
        source_mac: LEFT_MAC,
        target_mac: [0x02, 0xbe, 0x20, 0xff, 0, 0],
        source: SocketAddrV4::new(LEFT, 1000 + number),
        target: SocketAddrV4::new(RIGHT, 9),
    };
    let payload = bytes - ETHERNET - IPV4 - UDP;
    flow.udp(Checksum::Complete, payload).plain().to_vec()
}

fn add_ratios(record: &mut Record) {
    let median =
        |record: &Record, case: &str, metric: &str| record.row(case, metric).map(|row| row.median);
    for (name, size, metric) in [
        ("forward_mpps", "60", "mpps_60"),
        ("forward_gbps", "1514", "gbps_1514"),
    ] {
        let best = Edge::ALL
            .into_iter()
            .filter_map(|edge| {
                let case = format!("forward_{}", edge.name());
                Some((edge, median(record, &case, metric)?))
            })
            .max_by(|one, other| one.1.total_cmp(&other.1));
        let Some((edge, best)) = best else {
            continue;
        };
        record.insert_ratio(name, best);
        if let Some(ceiling) = median(record, CEILING, metric) {
            let case = format!("forward_{}", edge.name());
            let forwarded = median(record, &case, &format!("mpps_{size}"));
            let offered = median(record, &case, &format!("offered_{size}"));
            let takes_all = forwarded
                .zip(offered)
                .is_some_and(|(forwarded, offered)| forwarded >= BOUND * offered);
            let is_bound = takes_all || best >= BOUND * ceiling;
            let mark = if is_bound { "generator-bound; " } else { "" };
            let beside = offered.map_or_else(String::new, |offered| {
                format!(", beside it {offered:.2} Mpps")
            });
            let note = format!(
                "{mark}by {}, the generator's ceiling is {ceiling:.2}{beside}",
                edge.name()
            );
            record.note(name, &note);
        }
        if metric == "mpps_60"
            && let Some(raw) = median(record, "forward_raw", metric)
        {
            record.insert_ratio("forward_vs_raw", best / raw);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::HostFacts;

    #[test]
    fn frames_have_the_size_that_is_asked_for() {
        for (_, bytes) in FRAMES {
            assert_eq!(frame(bytes, 3).len(), bytes);
        }
        assert_ne!(frame(60, 1), frame(60, 2));
    }

    #[test]
    fn the_best_edge_counts_and_the_generators_ceiling_is_said() {
        let mut record = Record::new("engine", HostFacts::default(), [].into());
        for (case, value) in [
            ("generator", 1.0),
            ("forward_raw", 0.3),
            ("forward_ring", 0.92),
        ] {
            record.add(case, "mpps_60", "Mpps", &[value]);
        }
        add_ratios(&mut record);
        assert_eq!(record.ratios["forward_mpps"], 0.92);
        assert!(record.ratios["forward_vs_raw"] > 3.0);
        let note = &record.notes["forward_mpps"];
        assert_eq!(
            note,
            "generator-bound; by ring, the generator's ceiling is 1.00"
        );
        record.add("generator", "mpps_60", "Mpps", &[2.0, 2.0]);
        add_ratios(&mut record);
        assert!(!record.notes["forward_mpps"].contains("bound"));
        record.add("forward_ring", "offered_60", "Mpps", &[1.0]);
        add_ratios(&mut record);
        let note = &record.notes["forward_mpps"];
        assert!(note.starts_with("generator-bound; "), "{note}");
        assert!(note.ends_with(", beside it 1.00 Mpps"), "{note}");
        record.add("forward_ring", "offered_60", "Mpps", &[1.5, 1.5]);
        add_ratios(&mut record);
        assert!(!record.notes["forward_mpps"].contains("bound"));
    }
}

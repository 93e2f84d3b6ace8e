//! Two engines, mostly in one thread: what one breath of each does is then certain.

use std::collections::VecDeque;
use std::thread;

use super::ring::{Received, Sent, ring};
use super::{Receiver, Transmitter, interlink};
use crate::apps::{Filter, Sink, Source};
use crate::{App, BuildError, Config, Engine, Graph, PoolLimits, PortList, Ports, Time};

fn sending(source: impl Config, transmitter: Transmitter) -> Graph {
    let mut graph = Graph::new();
    graph.app("source", source).unwrap();
    graph.app("there", transmitter).unwrap();
    graph.link("source.output -> there.input").unwrap();
    graph
}

fn receiving(receiver: Receiver) -> Graph {
    let mut graph = Graph::new();
    graph.app("from", receiver).unwrap();
    graph.app("sink", Sink).unwrap();
    graph.link("from.output -> sink.input").unwrap();
    graph
}

fn engine(graph: &Graph, limits: PoolLimits) -> Engine {
    let mut engine = Engine::with_limits(limits).unwrap();
    engine.configure(graph).unwrap();
    engine
}

fn pair(source: Source) -> (Engine, Engine) {
    let (transmitter, receiver) = interlink();
    let limits = PoolLimits::default();
    (
        engine(&sending(source, transmitter), limits),
        engine(&receiving(receiver), limits),
    )
}

fn figure(engine: &Engine, app: &str, name: &str) -> u64 {
    engine.figure(app, name).unwrap()
}

fn breathe(engine: &mut Engine, breaths: usize) {
    for _ in 0..breaths {
        engine.breathe(Time::START);
    }
}

#[test]
fn packets_cross_with_their_bytes_and_marks_and_buffers_come_back() {
    let (transmitter, receiver) = interlink();
    let mut graph = Graph::new();
    let frames = (0..=255).map(|number| vec![number; 60]).collect();
    graph.app("source", Source::of(frames).limit(2560)).unwrap();
    let mark = Filter::new(|packet| {
        packet.set_mark(packet.bytes()[0].into());
        packet.strip(4) && packet.prepend(b"head")
    });
    graph.app("mark", mark).unwrap();
    graph.app("there", transmitter).unwrap();
    graph
        .links("source.output -> mark.input\nmark.output -> there.input")
        .unwrap();
    let mut here = engine(&graph, PoolLimits::default());
    let mut expected = 0_u8;
    let check = Filter::new(move |packet| {
        let is_right = packet.mark() == u32::from(expected)
            && packet.bytes().starts_with(b"head")
            && packet.bytes()[4..] == [expected; 56];
        expected = expected.wrapping_add(1);
        is_right
    });
    let mut graph = receiving(receiver);
    graph.app("check", check).unwrap();
    graph.unlink("from.output -> sink.input").unwrap();
    graph
        .links("from.output -> check.input\ncheck.output -> sink.input")
        .unwrap();
    let mut there = engine(&graph, PoolLimits::default());
    for _ in 0..40 {
        breathe(&mut here, 1);
        breathe(&mut there, 1);
    }
    breathe(&mut here, 1);
    assert_eq!(figure(&there, "sink", "packets"), 2560);
    for engine in [&here, &there] {
        let counters = engine.pool_counters();
        assert_eq!(counters.in_use(), 0);
        assert!(counters.buffers <= 3 * 102, "{counters:?}");
    }
}

#[test]
fn nothing_is_made_once_packets_flow() {
    let (mut here, mut there) = pair(Source::sizes(&[60]));
    let mut buffers = Vec::new();
    // Half of it is enough to see that the other half needs no more.
    const ROUNDS: u64 = if cfg!(miri) { 22 } else { 1000 };
    for round in 0..ROUNDS {
        breathe(&mut here, 1);
        breathe(&mut there, 1);
        if round % (ROUNDS / 2) == 10 {
            buffers.push((here.pool_counters().buffers, there.pool_counters().buffers));
        }
    }
    assert_eq!(buffers[0], buffers[1]);
    assert_eq!(figure(&there, "sink", "packets"), ROUNDS * 102);
}

#[test]
fn who_does_not_read_costs_a_bounded_number_of_packets_and_none_is_lost_unseen() {
    const PACKETS: u64 = if cfg!(miri) { 4000 } else { 50_000 };
    let (mut here, mut there) = pair(Source::sizes(&[60]).limit(PACKETS));
    breathe(&mut here, 100);
    let sent = figure(&here, "there", "packets");
    assert!(sent <= 2048, "{sent}");
    assert!(here.breathe(Time::START).wake.polls, "it waits for room");
    let links = here.report_links().0;
    assert_eq!(links[0].counters.queued(), 1024, "the link is full");
    for _ in 0..PACKETS / 50 {
        breathe(&mut there, 1);
        breathe(&mut here, 1);
    }
    let made = figure(&here, "source", "packets");
    assert_eq!(made, PACKETS, "a source waits where it finds no room");
    assert_eq!(figure(&there, "sink", "packets"), made);
    assert_eq!(here.pool_counters().in_use(), 0);
    assert!(!here.breathe(Time::START).wake.polls, "all is back");
}

#[test]
fn a_receiver_without_packets_left_waits_and_loses_none() {
    // Seven at a time; Miri has time for a few.
    const PACKETS: u64 = if cfg!(miri) { 60 } else { 1000 };
    let (transmitter, receiver) = interlink();
    let source = Source::sizes(&[60]).limit(PACKETS);
    let mut here = engine(&sending(source, transmitter), PoolLimits::default());
    let limits = PoolLimits {
        packets_max: 7,
        ..PoolLimits::default()
    };
    let mut there = engine(&receiving(receiver), limits);
    for _ in 0..PACKETS {
        breathe(&mut here, 1);
        breathe(&mut there, 1);
    }
    assert_eq!(figure(&there, "sink", "packets"), PACKETS);
    assert_eq!(there.pool_counters().buffers, 7);
}

#[test]
fn pools_of_other_sizes_get_copies_and_what_is_too_long_is_counted() {
    for (frame_bytes_max, arrived) in [(65_000, 400), (1000, 200), (2040, 400)] {
        let (transmitter, receiver) = interlink();
        let source = Source::sizes(&[60, 1514]).limit(400);
        let mut here = engine(&sending(source, transmitter), PoolLimits::default());
        let limits = PoolLimits {
            frame_bytes_max,
            packets_max: 1000,
        };
        let mut there = engine(&receiving(receiver), limits);
        for _ in 0..20 {
            breathe(&mut here, 1);
            breathe(&mut there, 1);
        }
        assert_eq!(figure(&there, "sink", "packets"), arrived);
        assert_eq!(figure(&there, "from", "too_long"), 400 - arrived);
        assert_eq!(here.pool_counters().in_use(), 0);
        assert_eq!(there.pool_counters().in_use(), 0);
    }
}

#[test]
fn a_receiver_that_goes_is_noticed_and_its_packets_are_written_off() {
    let (mut here, mut there) = pair(Source::sizes(&[60]));
    breathe(&mut here, 5);
    breathe(&mut there, 1);
    drop(there);
    breathe(&mut here, 10);
    assert!(figure(&here, "there", "gone") > 0);
    let counters = here.pool_counters();
    assert_eq!(counters.in_use(), 0);
    assert!(counters.buffers < 2048);
    let before = figure(&here, "source", "packets");
    breathe(&mut here, 10);
    assert_eq!(
        figure(&here, "source", "packets"),
        before + 1020,
        "the rest of the graph goes on"
    );
}

#[test]
fn a_transmitter_that_goes_is_noticed_after_its_last_packet() {
    let (mut here, mut there) = pair(Source::sizes(&[60]).limit(300));
    breathe(&mut here, 5);
    drop(here);
    assert!(there.breathe(Time::START).moved > 0);
    breathe(&mut there, 5);
    assert_eq!(figure(&there, "sink", "packets"), 300);
    assert_eq!(figure(&there, "from", "ended"), 1);
    assert_eq!(there.breathe(Time::START).wake, crate::Wake::default());
}

#[test]
fn an_end_is_one_apps_and_a_graph_that_fails_does_not_take_it() {
    #[derive(Debug, PartialEq)]
    struct Broken;
    impl Config for Broken {
        type App = Self;
        fn inputs(&self) -> PortList {
            PortList::none()
        }
        fn outputs(&self) -> PortList {
            PortList::none()
        }
        fn build(&self) -> Result<Self, BuildError> {
            Err("broken".into())
        }
    }
    impl App for Broken {
        fn pull(&mut self, _now: Time, _ports: &mut Ports<'_>) {}
    }

    let (transmitter, receiver) = interlink();
    let mut there = engine(&receiving(receiver), PoolLimits::default());
    breathe(&mut there, 1);
    let mut graph = sending(Source::sizes(&[60]).limit(10), transmitter);
    let good = graph.clone();
    graph.app("zzz", Broken).unwrap();
    let mut here = Engine::new();
    assert!(here.configure(&graph).is_err());
    breathe(&mut there, 1);
    assert_eq!(figure(&there, "from", "ended"), 0);

    here.configure(&good).unwrap();
    breathe(&mut here, 1);
    breathe(&mut there, 1);
    assert_eq!(figure(&there, "sink", "packets"), 10);
    let error = Engine::new().configure(&good).unwrap_err();
    let cause = std::error::Error::source(&error).map(ToString::to_string);
    assert!(cause.is_some_and(|cause| cause.contains("in use by another app")));
}

#[test]
fn threads_of_three_engines_lose_nothing() {
    let (first, middle_in) = interlink();
    let (middle_out, last) = interlink();
    let packets = 200_000;
    let relay = thread::spawn(move || {
        let mut graph = Graph::new();
        graph.app("in", middle_in).unwrap();
        graph.app("out", middle_out).unwrap();
        graph.link("in.output -> out.input").unwrap();
        let mut engine = Engine::new();
        engine.configure(&graph).unwrap();
        while figure(&engine, "out", "packets") < packets {
            if engine.breathe(Time::START).moved == 0 {
                thread::yield_now();
            }
        }
        engine.report_links().0[0].counters.dropped
    });
    let sink = thread::spawn(move || {
        let mut engine = engine(&receiving(last), PoolLimits::default());
        while figure(&engine, "from", "ended") == 0 {
            if engine.breathe(Time::START).moved == 0 {
                thread::yield_now();
            }
        }
        (
            figure(&engine, "sink", "packets"),
            figure(&engine, "sink", "bytes"),
        )
    });
    let source = Source::sizes(&[60, 1514]).limit(packets);
    let mut engine = engine(&sending(source, first), PoolLimits::default());
    while figure(&engine, "there", "packets") < packets || engine.pool_counters().in_use() > 0 {
        if engine.breathe(Time::START).moved == 0 {
            thread::yield_now();
        }
    }
    assert_eq!(relay.join().unwrap(), 0);
    assert_eq!(sink.join().unwrap(), (packets, packets / 2 * (60 + 1514)));
}

#[test]
fn a_full_ring_takes_no_more_until_somebody_reads() {
    let (mut writer, mut reader) = ring(2);
    for number in [1, 2] {
        assert_eq!(writer.send(&mut VecDeque::from([number])), Sent::Done);
    }
    let mut third = VecDeque::from([3]);
    assert_eq!(writer.send(&mut third), Sent::Full);
    assert_eq!(third, [3]);
    let mut batch = VecDeque::new();
    assert_eq!(reader.receive(&mut batch), Received::Batch);
    assert_eq!(batch, [1]);
    assert_eq!(writer.send(&mut third), Sent::Done);
}

#[test]
fn what_was_sent_before_the_writer_went_is_read() {
    let (mut writer, mut reader) = ring(2);
    assert_eq!(writer.send(&mut VecDeque::from([1])), Sent::Done);
    drop(writer);
    let mut batch = VecDeque::new();
    assert_eq!(reader.receive(&mut batch), Received::Batch);
    batch.clear();
    assert_eq!(reader.receive(&mut batch), Received::Ended);
}

#[test]
fn batches_are_swapped_and_not_made() {
    let (mut writer, mut reader) = ring(1);
    let mut mine = VecDeque::with_capacity(64);
    let mut theirs = VecDeque::with_capacity(64);
    for round in 0..10 {
        mine.push_back(round);
        assert_eq!(writer.send(&mut mine), Sent::Done);
        assert_eq!(reader.receive(&mut theirs), Received::Batch);
        assert_eq!(theirs.pop_front(), Some(round));
    }
    // Three batches go round; the one that the ring began with is the only one that grew.
    assert!(mine.capacity() >= 1 && theirs.capacity() >= 1);
    assert!(mine.capacity().max(theirs.capacity()) >= 64);
}

#[test]
fn many_numbers_cross_threads_in_order() {
    let (mut writer, mut reader) = ring(4);
    let numbers: u32 = if cfg!(miri) { 500 } else { 100_000 };
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut batch = VecDeque::new();
            let mut next = 0;
            while next < numbers || !batch.is_empty() {
                let size = (next % 61 + 1).min(numbers - next);
                if batch.is_empty() {
                    batch.extend(next..next + size);
                    next += size;
                }
                if writer.send(&mut batch) == Sent::Full {
                    thread::yield_now();
                }
            }
        });
        let mut batch = VecDeque::new();
        let mut expected = 0;
        loop {
            match reader.receive(&mut batch) {
                Received::Batch => {
                    for number in batch.drain(..) {
                        assert_eq!(number, expected);
                        expected += 1;
                    }
                }
                Received::Nothing => thread::yield_now(),
                Received::Ended => break,
            }
        }
        assert_eq!(expected, numbers);
    });
}

//! Whole graphs: conservation, order, and changes while packets are on their way.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use proptest::prelude::*;
use sandwire_engine::apps::{Filter, Join, Pass, Sink, Source, Tee};
use sandwire_engine::{
    App, BuildError, Changes, Config, ConfigureError, Engine, Graph, PoolLimits, PortList, Ports,
    Time,
};

/// Holds what it gets until it is asked for a number of packets in each breath.
#[derive(Debug, Clone, PartialEq)]
struct Gate {
    per_breath: usize,
}

struct GateApp {
    per_breath: usize,
}

impl Config for Gate {
    type App = GateApp;

    fn inputs(&self) -> PortList {
        PortList::named(["input"])
    }

    fn outputs(&self) -> PortList {
        PortList::named(["output"])
    }

    fn build(&self) -> Result<GateApp, BuildError> {
        Ok(GateApp {
            per_breath: self.per_breath,
        })
    }

    fn keeps_state_of(&self, _running: &Self) -> bool {
        true
    }

    fn apply(&self, app: &mut GateApp) {
        app.per_breath = self.per_breath;
    }
}

impl App for GateApp {
    fn push(&mut self, _now: Time, ports: &mut Ports<'_>) {
        for _ in 0..self.per_breath {
            if let Some(packet) = ports.receive(0) {
                ports.transmit(0, packet);
            }
        }
    }
}

/// An app for an interface: sends by itself, and takes what it is given.
#[derive(Debug, PartialEq)]
struct Edge;

impl Config for Edge {
    type App = Self;

    fn inputs(&self) -> PortList {
        PortList::named(["input"])
    }

    fn outputs(&self) -> PortList {
        PortList::named(["output"])
    }

    fn is_edge(&self) -> bool {
        true
    }

    fn build(&self) -> Result<Self, BuildError> {
        Ok(Self)
    }
}

impl App for Edge {
    fn pull(&mut self, _now: Time, ports: &mut Ports<'_>) {
        ports.fill(0, 1, |packet| _ = packet.set_bytes(b"from outside"));
    }

    fn push(&mut self, _now: Time, ports: &mut Ports<'_>) {
        ports.discard(0);
    }
}

/// Does not start.
#[derive(Debug, PartialEq)]
struct Broken;

impl Config for Broken {
    type App = GateApp;

    fn inputs(&self) -> PortList {
        PortList::none()
    }

    fn outputs(&self) -> PortList {
        PortList::none()
    }

    fn build(&self) -> Result<GateApp, BuildError> {
        Err("no such interface".into())
    }
}

fn breathe(engine: &mut Engine, breaths: usize) {
    for _ in 0..breaths {
        engine.breathe(Time::START);
    }
}

fn gated(per_breath: usize) -> Graph {
    let mut graph = Graph::new();
    graph.app("source", Source::sizes(&[60])).unwrap();
    graph.app("gate", Gate { per_breath }).unwrap();
    graph.app("sink", Sink).unwrap();
    let lines = "source.output -> gate.input\ngate.output -> sink.input";
    graph.links(lines).unwrap();
    graph
}

fn queued(engine: &Engine) -> u64 {
    let links = engine.report_links().0;
    links.iter().map(|link| link.counters.queued()).sum()
}

fn lost_on_links(engine: &Engine) -> u64 {
    let links = engine.report_links().0;
    links.iter().map(|link| link.counters.dropped).sum()
}

/// Breaths of a case; under Miri each takes seconds.
const BREATHS_MAX: usize = if cfg!(miri) { 5 } else { 60 };

proptest! {
    #[test]
    fn nothing_appears_or_vanishes(
        sizes in prop::collection::vec(0_u16..2048, 1..8),
        per_breath in 0_usize..300,
        packets_max in 1_u32..5000,
        breaths in 1..BREATHS_MAX,
        limit in 0_u64..9000,
    ) {
        let limits = PoolLimits { packets_max, ..PoolLimits::default() };
        let mut engine = Engine::with_limits(limits).unwrap();
        let mut graph = Graph::new();
        graph.app("source", Source::sizes(&sizes).limit(limit)).unwrap();
        graph.app("tee", Tee).unwrap();
        graph.app("gate", Gate { per_breath }).unwrap();
        graph.app("even", Filter::new(|packet| packet.length() % 2 == 0)).unwrap();
        graph.app("join", Join).unwrap();
        graph.app("sink", Sink).unwrap();
        graph.links(
            "source.output -> tee.input
             tee.a -> gate.input
             tee.b -> even.input
             tee.c -> join.c
             gate.output -> join.a
             even.output -> join.b
             join.output -> sink.input",
        ).unwrap();
        engine.configure(&graph).unwrap();
        breathe(&mut engine, breaths);

        let figure = |app, name| engine.figure(app, name).unwrap();
        let entered = figure("source", "packets") + figure("tee", "copies");
        let left = figure("sink", "packets") + figure("even", "dropped") + lost_on_links(&engine);
        prop_assert_eq!(entered, left + queued(&engine));
        prop_assert_eq!(engine.pool_counters().in_use(), queued(&engine));
        prop_assert!(engine.pool_counters().buffers <= packets_max);
        prop_assert!(figure("source", "packets") <= limit);
        for link in engine.report_links().0 {
            prop_assert!(link.counters.queued() <= 1024);
            prop_assert!(link.counters.bytes_out <= link.counters.bytes_in);
        }
    }
}

#[test]
fn bytes_are_counted_wherever_packets_go() {
    let mut engine = Engine::new();
    let mut graph = Graph::new();
    graph
        .app("source", Source::sizes(&[60, 61, 1514]).limit(300))
        .unwrap();
    let cut = Filter::new(|packet| {
        packet.truncate(1000);
        packet.length() != 61
    });
    graph.app("cut", cut).unwrap().app("sink", Sink).unwrap();
    graph
        .links("source.output -> cut.input\ncut.output -> sink.input")
        .unwrap();
    engine.configure(&graph).unwrap();
    breathe(&mut engine, 10);
    let links = engine.report_links().0;
    let [cut, source] = &links[..] else {
        panic!("two links: {links:?}");
    };
    assert_eq!(source.counters.bytes_in, 100 * (60 + 61 + 1514));
    assert_eq!(source.counters.bytes_out, source.counters.bytes_in);
    assert_eq!(
        (cut.counters.packets_in, cut.counters.bytes_in),
        (200, 100 * 1060)
    );
    assert_eq!(cut.counters.bytes_out, cut.counters.bytes_in);
    assert_eq!(engine.figure("sink", "bytes"), Some(100 * 1060));
    assert_eq!(engine.figure("cut", "dropped"), Some(100));
}

#[test]
fn order_is_kept_and_filters_of_nothing_keep_all() {
    let mut engine = Engine::new();
    let mut graph = Graph::new();
    let frames = (0..=255).map(|number| vec![number]).collect();
    graph.app("source", Source::of(frames).limit(2560)).unwrap();
    let mut expected = 0_u8;
    let check = Filter::new(move |packet| {
        let in_order = packet.bytes() == [expected];
        expected = expected.wrapping_add(1);
        in_order
    });
    graph.app("check", check).unwrap();
    graph
        .app("pass", Pass)
        .unwrap()
        .app("gate", Gate { per_breath: 77 })
        .unwrap();
    graph
        .links("source.output -> pass.input\npass.output -> gate.input\ngate.output -> check.input")
        .unwrap();
    engine.configure(&graph).unwrap();
    breathe(&mut engine, 100);
    assert_eq!(
        engine.figure("check", "dropped"),
        Some(lost_on_links(&engine))
    );
    assert_eq!(lost_on_links(&engine), 0);
}

#[test]
fn apps_push_in_the_order_of_packets_then_of_names() {
    let mut graph = Graph::new();
    for edge in ["if1", "if2"] {
        graph.app(edge, Edge).unwrap();
    }
    for app in ["a", "b", "c", "d"] {
        graph.app(app, Pass).unwrap();
    }
    let lines = "if1.output -> d.input\nd.output -> b.input\nb.output -> if2.input
                 if2.output -> c.input\nc.output -> a.input\na.output -> if1.input";
    graph.links(lines).unwrap();
    let mut engine = Engine::new();
    engine.configure(&graph).unwrap();
    assert_eq!(engine.push_order(), ["c", "a", "d", "b", "if1", "if2"]);
    breathe(&mut engine, 1);
    assert_eq!(
        queued(&engine),
        0,
        "one breath takes a packet through the graph"
    );
}

#[test]
fn packets_in_a_circle_are_bounded_and_counted() {
    let mut graph = Graph::new();
    graph.app("source", Source::sizes(&[60])).unwrap();
    graph.app("join", Join).unwrap().app("tee", Tee).unwrap();
    let lines =
        "source.output -> join.new\njoin.output -> tee.input\ntee.a -> join.a\ntee.b -> join.b";
    graph.links(lines).unwrap();
    let mut engine = Engine::new();
    engine.configure(&graph).unwrap();
    breathe(&mut engine, if cfg!(miri) { 8 } else { 1000 });
    assert!(lost_on_links(&engine) > 0);
    assert_eq!(engine.pool_counters().in_use(), queued(&engine));
    assert!(queued(&engine) <= 4 * 1024);
}

#[test]
fn what_did_not_change_goes_on_with_its_packets() {
    let mut engine = Engine::new();
    engine.configure(&gated(0)).unwrap();
    breathe(&mut engine, 3);
    assert_eq!(queued(&engine), 306);

    assert_eq!(engine.configure(&gated(0)).unwrap(), Changes::default());
    assert_eq!(queued(&engine), 306);

    let changes = engine.configure(&gated(1000)).unwrap();
    assert_eq!(changes.changed, ["gate"]);
    assert!(changes.started.is_empty() && changes.stopped.is_empty());
    breathe(&mut engine, 1);
    assert_eq!(engine.figure("source", "packets"), Some(408));
    assert_eq!(engine.figure("sink", "packets"), Some(408));
}

#[test]
fn a_link_survives_its_apps_and_a_removed_link_gives_its_packets_back() {
    let mut engine = Engine::new();
    engine.configure(&gated(0)).unwrap();
    breathe(&mut engine, 2);
    let mut graph = gated(0);
    graph.replace("gate", Pass).unwrap();
    graph
        .replace("source", Source::sizes(&[60]).limit(204))
        .unwrap();
    let changes = engine.configure(&graph).unwrap();
    assert_eq!(changes.started, ["gate"]);
    assert_eq!(changes.stopped, ["gate"]);
    assert_eq!(changes.changed, ["source"]);
    breathe(&mut engine, 1);
    assert_eq!(engine.figure("sink", "packets"), Some(204));

    engine.configure(&gated(0)).unwrap();
    breathe(&mut engine, 1);
    let mut graph = gated(0);
    graph.unlink("source.output -> gate.input").unwrap();
    assert_eq!(engine.configure(&graph).unwrap().flushed, 102);
    assert_eq!(engine.pool_counters().in_use(), 0);
    breathe(&mut engine, 10);
    assert_eq!(engine.pool_counters().in_use(), 0);
}

#[test]
fn a_graph_that_does_not_fit_changes_nothing() {
    let wrong_links = [
        ("source.output -> nobody.input", "there is no app nobody"),
        ("nobody.output -> other.input", "there is no app nobody"),
        (
            "gate.odd -> other.input",
            "no output port odd; it has output",
        ),
        ("source.other -> other.in", "no output port other"),
        ("other.output -> gate.input", "share port gate.input"),
        ("gate.output -> other.input", "share port gate.output"),
        (
            "sink.output -> other.input",
            "no output port output; it has none",
        ),
        ("other.output -> other.input", "from an app to itself"),
    ];
    let mut engine = Engine::new();
    engine.configure(&gated(0)).unwrap();
    breathe(&mut engine, 1);
    let before = engine.report_links();
    for (link, expected) in wrong_links {
        let mut graph = gated(5);
        graph.app("other", Pass).unwrap().link(link).unwrap();
        let error = engine.configure(&graph).unwrap_err().to_string();
        assert!(error.contains(expected), "{link}: {error}");
    }
    let mut graph = gated(5);
    graph.app("broken", Broken).unwrap();
    let error = engine.configure(&graph).unwrap_err();
    assert!(matches!(error, ConfigureError::Build { ref app, .. } if app == "broken"));
    assert_eq!(engine.report_links(), before);
    breathe(&mut engine, 1);
    assert_eq!(
        engine.figure("sink", "packets"),
        Some(0),
        "the gate is still shut"
    );
}

#[test]
fn two_engines_share_nothing() {
    let mut engines = [Engine::new(), Engine::new()];
    for engine in &mut engines {
        engine.configure(&gated(0)).unwrap();
    }
    breathe(&mut engines[0], 5);
    assert_eq!(engines[1].pool_counters().taken, 0);
    assert_eq!(queued(&engines[0]), 510);
}

#[test]
fn an_app_without_links_runs_and_what_it_sends_is_counted() {
    let mut graph = Graph::new();
    graph.app("source", Source::sizes(&[60]).limit(10)).unwrap();
    graph.app("pass", Pass).unwrap();
    graph.link("source.output -> pass.input").unwrap();
    let mut engine = Engine::new();
    engine.configure(&graph).unwrap();
    breathe(&mut engine, 2);
    let nowhere: u64 = engine
        .report_apps()
        .iter()
        .map(|app| app.sent_nowhere)
        .sum();
    assert_eq!(nowhere, 10);
    assert_eq!(engine.pool_counters().in_use(), 0);
}

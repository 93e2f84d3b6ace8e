//! That parts which rest are missed by nobody: the same packets at the same breaths as if all were called.

use std::cell::RefCell;
use std::collections::{BTreeSet, VecDeque};
use std::fs::File;
use std::os::fd::AsFd;

use proptest::prelude::*;

use super::*;
use crate::apps::{Join, JoinApp, Pass, Source, Tee};
use crate::{BuildError, Config, Packet, PortList, Readiness};

/// What an engine's outside has and sees.
#[derive(Debug, Default)]
struct World {
    /// Packets that came out: when, where, and what.
    seen: Vec<(Time, usize, Vec<u8>)>,
    /// Packets that are to come in, by app.
    coming: Vec<u8>,
    readiness: Vec<Readiness>,
    calls: u64,
}

/// An app of a random graph.
#[derive(Debug, Clone)]
struct Odd {
    kind: Kind,
    number: usize,
    world: Rc<RefCell<World>>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Source(u64),
    Pass,
    Tee,
    Join,
    /// Sends on what came so many nanoseconds ago, and holds 40 packets.
    Delay(u64),
    /// The same, but doesn't say when.
    Secret(u64),
    /// Sends on nothing until told.
    Valve,
    /// Brings in what comes, when it is ready.
    Edge,
    /// Sends on some in each breath.
    Gate(usize),
    End,
}

struct OddApp {
    odd: Odd,
    held: VecDeque<(Time, Packet)>,
    is_open: bool,
    readiness: Readiness,
    descriptor: File,
}

impl PartialEq for Odd {
    fn eq(&self, other: &Self) -> bool {
        self.kind == other.kind
    }
}

impl Config for Odd {
    type App = OddApp;

    fn inputs(&self) -> PortList {
        PortList::named(["input"])
    }

    fn outputs(&self) -> PortList {
        PortList::named(["output"])
    }

    fn is_edge(&self) -> bool {
        self.kind == Kind::Edge
    }

    fn build(&self) -> Result<OddApp, BuildError> {
        Ok(OddApp {
            odd: self.clone(),
            held: VecDeque::new(),
            is_open: false,
            readiness: self.world.borrow().readiness[self.number].clone(),
            descriptor: File::open("/dev/null")?,
        })
    }
}

impl App for OddApp {
    fn pull(&mut self, now: Time, ports: &mut Ports<'_>) {
        let mut world = self.odd.world.borrow_mut();
        world.calls += 1;
        match self.odd.kind {
            Kind::Valve if !self.is_open => {}
            Kind::Delay(_) | Kind::Secret(_) | Kind::Valve => {
                while ports.space(0) > 0
                    && let Some((_, packet)) = self.held.pop_front_if(|held| held.0 <= now)
                {
                    ports.transmit(0, packet);
                }
            }
            Kind::Edge if self.readiness.is_ready() => {
                let coming = &mut world.coming[self.odd.number];
                for _ in 0..4 {
                    if *coming == 0 {
                        self.readiness.drained();
                        break;
                    }
                    let frame = [*coming; 20];
                    let sent = ports.fill(0, 1, |packet| _ = packet.set_bytes(&frame));
                    *coming -= u8::from(sent > 0);
                }
            }
            _ => {}
        }
    }

    fn push(&mut self, now: Time, ports: &mut Ports<'_>) {
        let mut world = self.odd.world.borrow_mut();
        let (delay, room) = match self.odd.kind {
            Kind::Delay(nanos) | Kind::Secret(nanos) => (nanos, 40),
            Kind::Valve => (0, usize::MAX),
            Kind::Gate(count) => {
                for _ in 0..count {
                    if let Some(packet) = ports.receive(0) {
                        ports.transmit(0, packet);
                    }
                }
                return;
            }
            _ => {
                while let Some(packet) = ports.receive(0) {
                    let seen = (now, self.odd.number, packet.bytes().to_vec());
                    world.seen.push(seen);
                }
                return;
            }
        };
        while self.held.len() < room
            && let Some(packet) = ports.receive(0)
        {
            let due = now + std::time::Duration::from_nanos(delay);
            self.held.push_back((due, packet));
        }
    }

    fn wake(&self) -> Wake {
        match self.odd.kind {
            Kind::Edge => self.readiness.wake(),
            Kind::Delay(_) => {
                let due = self.held.front().map(|held| held.0);
                Wake {
                    at: due,
                    polls: false,
                }
            }
            _ => Wake::default(),
        }
    }

    fn watch(&self) -> Option<Watch<'_>> {
        (self.odd.kind == Kind::Edge).then(|| Watch {
            descriptor: self.descriptor.as_fd(),
            readiness: &self.readiness,
        })
    }
}

fn app_name(number: usize) -> String {
    format!("app{number:02}")
}

/// An engine in a world of its own. Links that there can't be are left out.
fn build(
    kinds: &[Kind],
    links: &[(usize, usize)],
    packets_max: u32,
) -> (Engine, Rc<RefCell<World>>) {
    let world = World {
        coming: vec![0; kinds.len()],
        readiness: kinds.iter().map(|_| Readiness::new()).collect(),
        ..World::default()
    };
    let world = Rc::new(RefCell::new(world));
    let mut graph = Graph::new();
    for (number, &kind) in kinds.iter().enumerate() {
        let name = &app_name(number);
        let odd = Odd {
            kind,
            number,
            world: Rc::clone(&world),
        };
        match kind {
            Kind::Source(limit) => graph.app(name, Source::sizes(&[60, 61]).limit(limit)),
            Kind::Pass => graph.app(name, Pass),
            Kind::Tee => graph.app(name, Tee),
            Kind::Join => graph.app(name, Join),
            _ => graph.app(name, odd),
        }
        .unwrap();
    }
    let mut taken = BTreeSet::new();
    for (number, &(from, to)) in links.iter().enumerate() {
        let (from, to) = (from % kinds.len(), to % kinds.len());
        let output = match kinds[from] {
            Kind::Tee => format!("o{number:02}"),
            _ => "output".to_owned(),
        };
        let input = match kinds[to] {
            Kind::Join => format!("i{number:02}"),
            _ => "input".to_owned(),
        };
        let ends = [(false, from, output.clone()), (true, to, input.clone())];
        let is_possible = from != to
            && !matches!(kinds[to], Kind::Source(_))
            && ends.iter().all(|end| !taken.contains(end));
        if is_possible {
            let (from, to) = (app_name(from), app_name(to));
            graph.connect((&from, &output), (&to, &input)).unwrap();
            taken.extend(ends);
        }
    }
    let limits = PoolLimits {
        packets_max,
        ..PoolLimits::default()
    };
    let mut engine = Engine::with_limits(limits).unwrap();
    engine.configure(&graph).unwrap();
    (engine, world)
}

/// What happens between two breaths.
#[derive(Debug, Clone, Copy)]
enum Event {
    Nothing,
    Comes(usize, u8),
    Turns(usize, bool),
    Unwatched(usize),
}

fn happen(event: Event, engine: &mut Engine, world: &RefCell<World>) {
    let mut world = world.borrow_mut();
    let count = world.coming.len();
    match event {
        Event::Nothing => {}
        Event::Comes(app, packets) => {
            let coming = &mut world.coming[app % count];
            *coming = coming.saturating_add(packets);
            world.readiness[app % count].set_ready();
        }
        Event::Turns(app, is_open) => {
            if let Some(app) = engine.app_mut::<OddApp>(&app_name(app % count)) {
                app.is_open = is_open;
            }
        }
        Event::Unwatched(app) => world.readiness[app % count].set_unwatched(),
    }
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![
        (0_u64..400).prop_map(Kind::Source),
        Just(Kind::Pass),
        Just(Kind::Tee),
        Just(Kind::Join),
        (0_u64..60).prop_map(Kind::Delay),
        Just(Kind::Valve),
        Just(Kind::Edge),
        Just(Kind::Edge),
        (0_usize..4).prop_map(Kind::Gate),
        Just(Kind::End),
    ]
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        5 => Just(Event::Nothing),
        3 => (0_usize..90, 0_u8..9).prop_map(|(app, packets)| Event::Comes(app, packets)),
        2 => (0_usize..90, any::<bool>()).prop_map(|(app, is_open)| Event::Turns(app, is_open)),
        1 => (0_usize..90).prop_map(Event::Unwatched),
    ]
}

proptest! {
    #[test]
    fn what_rests_is_missed_by_nobody(
        kinds in prop::collection::vec(kind(), 2..90),
        links in prop::collection::vec((0_usize..90, 0_usize..90), 0..120),
        packets_max in 1_u32..600,
        steps in prop::collection::vec((event(), 0_u64..20), 1..150),
    ) {
        let (mut resting, seen) = build(&kinds, &links, packets_max);
        let (mut restless, expected) = build(&kinds, &links, packets_max);
        let mut now = Time::START;
        for (event, pause) in steps {
            now = now + std::time::Duration::from_nanos(pause);
            happen(event, &mut resting, &seen);
            happen(event, &mut restless, &expected);
            restless.parts.wake_all();
            prop_assert_eq!(resting.breathe(now), restless.breathe(now));
            prop_assert_eq!(&seen.borrow().seen, &expected.borrow().seen);
            prop_assert_eq!(resting.report_links(), restless.report_links());
            prop_assert_eq!(resting.pool_counters(), restless.pool_counters());
        }
        prop_assert_eq!(
            format!("{:?}", resting.report_apps()),
            format!("{:?}", restless.report_apps())
        );
        prop_assert!(seen.borrow().calls <= expected.borrow().calls);
    }
}

#[test]
fn who_rests_is_called_when_there_is_something_for_its_part_and_only_then() {
    let kinds = [Kind::Edge, Kind::Delay(50), Kind::End];
    let (mut engine, world) = build(&kinds, &[(0, 1), (1, 2)], 100);
    let calls_at = |engine: &mut Engine, nanos| {
        let before = world.borrow().calls;
        let wake = engine.breathe(Time::from_nanos(nanos)).wake;
        (world.borrow().calls - before, wake)
    };
    happen(Event::Comes(0, 0), &mut engine, &world);
    assert_eq!(calls_at(&mut engine, 0), (3, Wake::default()));
    assert_eq!(calls_at(&mut engine, 1), (0, Wake::default()));

    happen(Event::Comes(0, 1), &mut engine, &world);
    assert_eq!(calls_at(&mut engine, 2).0, 3);
    let delayed = Wake::at(Time::from_nanos(52));
    assert_eq!(calls_at(&mut engine, 3), (3, delayed), "it looks again");
    assert_eq!(calls_at(&mut engine, 51), (0, delayed));
    assert_eq!(calls_at(&mut engine, 52).0, 3);
    assert_eq!(world.borrow().seen.len(), 1);

    assert_eq!(calls_at(&mut engine, 53), (3, Wake::default()));
    assert_eq!(calls_at(&mut engine, 54), (0, Wake::default()));
    assert!(engine.app_mut::<OddApp>("app01").is_some());
    assert_eq!(calls_at(&mut engine, 55), (3, Wake::default()));
    happen(Event::Unwatched(0), &mut engine, &world);
    assert_eq!(calls_at(&mut engine, 56), (3, Wake::polling()));
    assert_eq!(calls_at(&mut engine, 57), (3, Wake::polling()));
}

#[test]
fn a_busy_part_does_not_call_those_that_rest() {
    let kinds = [Kind::Source(u64::MAX), Kind::End, Kind::Delay(9), Kind::End];
    let (mut engine, world) = build(&kinds, &[(0, 1), (2, 3)], 1000);
    engine.breathe(Time::START);
    assert_eq!(world.borrow().calls, 3);
    for _ in 0..10 {
        assert!(engine.breathe(Time::START).moved > 0);
    }
    assert_eq!(world.borrow().calls, 3 + 10);
}

#[test]
fn another_graph_has_all_parts_called() {
    let kinds = [Kind::Delay(9), Kind::End];
    let (mut engine, world) = build(&kinds, &[(0, 1)], 1000);
    let mut graph = Graph::new();
    for (number, &kind) in kinds.iter().enumerate() {
        let world = Rc::clone(&world);
        let odd = Odd {
            kind,
            number,
            world,
        };
        graph.app(&app_name(number), odd).unwrap();
    }
    let calls = |engine: &mut Engine| {
        engine.breathe(Time::START);
        world.replace_with(|world| World {
            readiness: world.readiness.clone(),
            ..World::default()
        });
    };
    calls(&mut engine);
    engine.breathe(Time::START);
    assert_eq!(world.borrow().calls, 0);
    engine.configure(&graph).unwrap();
    engine.breathe(Time::START);
    assert_eq!(world.borrow().calls, 2);
}

#[test]
fn who_breathes_when_told_loses_nothing_and_meets_every_deadline() {
    // The first holds 40, so its link fills up and empties again.
    let kinds = [
        Kind::Source(2000),
        Kind::Delay(70),
        Kind::Delay(30),
        Kind::End,
    ];
    let (mut engine, world) = build(&kinds, &[(0, 1), (1, 2), (2, 3)], 5000);
    let mut now = Time::START;
    for _ in 0..100_000 {
        let breath = engine.breathe(now);
        if breath.moved == 0 {
            let Some(at) = breath.wake.at else {
                break;
            };
            assert!(at > now, "it breathes again at once for nothing");
            now = at;
        }
    }
    let seen = &world.borrow().seen;
    assert_eq!(seen.len(), 2000);
    let links = engine.report_links().0;
    assert!(links.iter().all(|link| link.counters.dropped == 0));
    // 40 packets each 70 ns, and 30 later.
    let late = |(number, seen): (usize, &(Time, usize, Vec<u8>))| {
        seen.0.as_nanos() != 70 * (1 + number as u64 / 40) + 30
    };
    assert!(!seen.iter().enumerate().any(late));
}

#[test]
fn who_found_the_pool_empty_goes_on_when_another_part_gives_back() {
    let kinds = [
        Kind::Source(10),
        Kind::Valve,
        Kind::End,
        Kind::Source(7),
        Kind::End,
    ];
    let (mut engine, world) = build(&kinds, &[(0, 1), (1, 2), (3, 4)], 10);
    for _ in 0..5 {
        engine.breathe(Time::START);
    }
    assert!(world.borrow().seen.is_empty(), "all are behind the valve");
    happen(Event::Turns(1, true), &mut engine, &world);
    let wake = engine.breathe(Time::START).wake;
    assert_eq!(wake, Wake::at(Time::START));
    engine.breathe(Time::START);
    assert_eq!(world.borrow().seen.len(), 17);
}

#[test]
fn what_a_wrong_wake_keeps_back_comes_with_the_next_call() {
    let kinds = [Kind::Edge, Kind::Secret(50), Kind::End];
    let (mut engine, world) = build(&kinds, &[(0, 1), (1, 2)], 100);
    for nanos in [0, 1, 60, 70, 100] {
        if nanos == 0 || nanos == 70 {
            happen(Event::Comes(0, 1), &mut engine, &world);
        }
        let seen_at_last = match nanos {
            70.. => vec![Time::from_nanos(70)],
            _ => Vec::new(),
        };
        engine.breathe(Time::from_nanos(nanos));
        engine.breathe(Time::from_nanos(nanos));
        let seen: Vec<Time> = world.borrow().seen.iter().map(|seen| seen.0).collect();
        assert_eq!(seen, seen_at_last, "{nanos}");
    }
    assert!(engine.app_mut::<OddApp>("app01").is_some());
    engine.breathe(Time::from_nanos(121));
    assert_eq!(world.borrow().seen.len(), 2);
    assert_eq!(engine.pool_counters().in_use(), 0);
}

#[test]
fn packets_are_dealt_with_in_the_time_when_they_had_come() {
    let kinds = [Kind::Edge, Kind::End, Kind::Edge, Kind::End];
    let (mut engine, world) = build(&kinds, &[(0, 1), (2, 3)], 100);
    let mut nanos = 0;
    let mut breathe = |engine: &mut Engine| {
        let start = nanos;
        engine.breathe_by(|| {
            nanos += 1;
            Time::from_nanos(nanos)
        });
        nanos - start
    };
    for edge in [0, 2] {
        happen(Event::Comes(edge, 1), &mut engine, &world);
    }
    // Each part begins, and packets come.
    assert_eq!(breathe(&mut engine), 4);
    let seen: Vec<u64> = world
        .borrow()
        .seen
        .iter()
        .map(|seen| seen.0.as_nanos())
        .collect();
    assert_eq!(seen, [2, 4]);
    assert_eq!(engine.now(), Time::from_nanos(4));
    assert_eq!(breathe(&mut engine), 2, "both look again");
    assert_eq!(breathe(&mut engine), 1, "both rest");
}

#[test]
fn apps_are_found_by_their_names_in_whatever_order_they_came() {
    let mut engine = Engine::new();
    for numbers in [&[9, 10, 1, 100, 2][..], &[100, 11, 9, 30], &[7]] {
        let mut graph = Graph::new();
        for number in numbers {
            graph.app(&app_name(*number), Join).unwrap();
        }
        engine.configure(&graph).unwrap();
        for number in 0..=101 {
            let name = app_name(number);
            let is_there = numbers.contains(&number);
            assert_eq!(engine.app::<JoinApp>(&name).is_some(), is_there, "{name}");
            assert_eq!(engine.app_mut::<JoinApp>(&name).is_some(), is_there);
        }
    }
}

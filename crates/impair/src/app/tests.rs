use std::{cell::RefCell, rc::Rc};

use proptest::prelude::*;
use sandwire_engine::{Engine, Graph};

use super::*;
use crate::decision::Verdict;

const MS: u64 = 1_000_000;

/// A UDP packet from 10.0.0.1:1000 to 10.0.0.2, with checksums, of this length.
pub(super) fn udp(to_port: u16, bytes: usize) -> Vec<u8> {
    let mut frame = vec![0; 14];
    frame[12] = 8;
    let total = u16::try_from(bytes - 14).unwrap();
    let mut ip = vec![0x45, 0];
    ip.extend(total.to_be_bytes());
    ip.extend([0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    frame.extend(ip);
    frame.extend(1000u16.to_be_bytes());
    frame.extend(to_port.to_be_bytes());
    frame.extend((total - 20).to_be_bytes());
    frame.extend([0, 1]);
    frame.resize(bytes, 0x55);
    frame::repair_checksums(&mut frame);
    frame
}

/// What a [`Wire`] brings in, and what it took off.
#[derive(Debug, Default)]
struct Ends {
    in_frames: VecDeque<Vec<u8>>,
    out_frames: Vec<(u64, Vec<u8>)>,
    back_frames: Vec<Vec<u8>>,
    room: usize,
}

/// Brings frames in as an interface does, and takes as many off as there is room for.
#[derive(Debug, Clone)]
struct Wire(Rc<RefCell<Ends>>);

impl PartialEq for Wire {
    fn eq(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }
}

impl Config for Wire {
    type App = Wire;

    fn inputs(&self) -> PortList {
        PortList::named(["input", "back"])
    }

    fn outputs(&self) -> PortList {
        PortList::named(["output"])
    }

    fn is_edge(&self) -> bool {
        true
    }

    fn build(&self) -> Result<Wire, BuildError> {
        Ok(self.clone())
    }
}

impl App for Wire {
    fn pull(&mut self, _: Time, ports: &mut Ports<'_>) {
        for frame in self.0.borrow_mut().in_frames.drain(..) {
            let mut packet = ports.pool().take().unwrap();
            assert!(packet.set_bytes(&frame));
            ports.transmit(0, packet);
        }
    }

    fn push(&mut self, now: Time, ports: &mut Ports<'_>) {
        let mut ends = self.0.borrow_mut();
        while ends.room > 0
            && let Some(packet) = ports.receive(0)
        {
            ends.room -= 1;
            ends.out_frames
                .push((now.as_nanos(), packet.bytes().to_vec()));
        }
        while let Some(packet) = ports.receive(1) {
            ends.back_frames.push(packet.bytes().to_vec());
        }
    }

    /// Frames are put in from outside, between breaths.
    fn wake(&self) -> Wake {
        Wake::polling()
    }
}

/// An engine with a line, in a time of its own.
struct Lab {
    engine: Engine,
    ends: Rc<RefCell<Ends>>,
    now: u64,
}

impl Lab {
    fn new(text: &str) -> Self {
        let ends = Rc::new(RefCell::new(Ends {
            room: usize::MAX,
            ..Ends::default()
        }));
        let mut lab = Self {
            engine: Engine::new(),
            ends,
            now: 0,
        };
        lab.set(text);
        lab
    }

    fn set(&mut self, text: &str) {
        let line = Line::new(&text.parse().unwrap(), Direction::Egress, 7).unwrap();
        let mut graph = Graph::new();
        graph.app("wire", Wire(Rc::clone(&self.ends))).unwrap();
        graph.app("line", line).unwrap();
        graph
            .links(
                "wire.output -> line.input \n line.output -> wire.input \n line.back -> wire.back",
            )
            .unwrap();
        self.engine.configure(&graph).unwrap();
    }

    fn send(&mut self, frame: Vec<u8>) {
        self.ends.borrow_mut().in_frames.push_back(frame);
    }

    /// Breathes when somebody wants to, until then, as a runner that is never late.
    fn run_until(&mut self, end: u64) {
        loop {
            let breath = self.engine.breathe(Time::from_nanos(self.now));
            if breath.moved > 0 {
                continue;
            }
            let wake = breath.wake.at.map_or(end, Time::as_nanos);
            if wake >= end {
                break;
            }
            self.now = self.now.max(wake);
        }
        self.now = end;
    }

    fn out(&self) -> Vec<(u64, u16)> {
        let port = |frame: &[u8]| u16::from_be_bytes([frame[36], frame[37]]);
        let ends = self.ends.borrow();
        let frames = ends.out_frames.iter();
        frames.map(|(at, frame)| (*at, port(frame))).collect()
    }

    fn app(&self) -> &LineApp {
        self.engine.app("line").unwrap()
    }

    fn report(&self) -> LineReport {
        self.app().line_report(Time::from_nanos(self.now))
    }

    fn check_conservation(&self) {
        let report = self.report();
        let mut all = report.gone.clone();
        report.rules.iter().for_each(|rule| all.add(&rule.packets));
        let inside = report.inside - self.app().waiting.len() as u64;
        assert_eq!(
            all.offered + all.copies + all.made,
            all.released + all.dropped_in_all() + inside
        );
    }
}

#[test]
fn each_packet_meets_the_first_rule_that_matches_it_and_leaves_in_the_order_of_deadlines() {
    let mut lab = Lab::new(
        "match peer_port=1 delay 30ms; match peer_port=1-2 delay 10ms; match peer_port=3 delay 20ms",
    );
    lab.run_until(5 * MS);
    for port in [1, 2, 3, 4] {
        lab.send(udp(port, 100));
    }
    lab.run_until(100 * MS);
    assert_eq!(
        lab.out(),
        [(5 * MS, 4), (15 * MS, 2), (25 * MS, 3), (35 * MS, 1)]
    );
    let report = lab.report();
    assert_eq!((report.passed, report.inside, report.valid), (1, 0, true));
    assert_eq!(report.rules[0].timing.max_nanoseconds, 0);
    lab.check_conservation();
}

#[test]
fn an_idle_line_asks_for_nothing() {
    let mut lab = Lab::new("delay 10ms");
    lab.run_until(MS);
    let breath = lab.engine.breathe(Time::from_nanos(lab.now));
    assert_eq!((breath.moved, breath.wake.at), (0, None));
    lab.send(udp(1, 100));
    lab.engine.breathe(Time::from_nanos(lab.now));
    let breath = lab.engine.breathe(Time::from_nanos(lab.now));
    assert_eq!(breath.wake.at, Some(Time::from_nanos(11 * MS)));
}

#[test]
fn a_change_of_one_rule_leaves_the_others_alone() {
    let run = |changes: &[(u64, &str)]| {
        let mut lab = Lab::new(
            "name a match peer_port=1 loss 30%; name b match peer_port=2 loss 30% delay 1ms",
        );
        for number in 0..1000 {
            for (_, text) in changes.iter().filter(|change| change.0 == number) {
                lab.set(text);
            }
            for port in [1, 2] {
                lab.send(udp(port, 100));
            }
            lab.run_until((number + 1) * MS);
        }
        lab.run_until(2000 * MS);
        lab.check_conservation();
        let b = lab.out().into_iter().filter(|(_, port)| *port == 2);
        b.collect::<Vec<_>>()
    };
    let undisturbed = run(&[]);
    let b = "name b match peer_port=2 loss 30% delay 1ms";
    let other = format!("name a match peer_port=1 loss 90% delay 7ms; {b}");
    let before = format!("name new match peer_port=9 loss 1%; {b}");
    assert_eq!(
        undisturbed,
        run(&[(100, &other), (300, &before), (301, b), (500, &other)])
    );
    assert!(undisturbed.len() > 600 && undisturbed.len() < 800);
}

#[test]
fn a_rule_that_goes_lets_out_what_it_holds_in_order_and_then_stands_aside() {
    let mut lab = Lab::new("delay 50ms");
    lab.run_until(MS);
    lab.send(udp(1, 100));
    lab.run_until(10 * MS);
    lab.set("");
    lab.send(udp(2, 100));
    lab.run_until(20 * MS);
    lab.send(udp(3, 100));
    lab.run_until(21 * MS);
    assert!(!lab.app().is_idle());
    assert!(lab.report().rules[0].draining);
    lab.run_until(60 * MS);
    assert_eq!(lab.out(), [(51 * MS, 1), (51 * MS, 2), (51 * MS, 3)]);
    assert!(lab.app().is_idle());
    lab.send(udp(4, 100));
    lab.run_until(70 * MS);
    assert_eq!(lab.out().last(), Some(&(60 * MS, 4)));
    assert_eq!(lab.report().gone.released, 3);
    lab.check_conservation();
}

#[test]
fn a_rule_that_comes_back_while_it_drains_goes_on() {
    let mut lab = Lab::new("name a delay 50ms");
    lab.send(udp(1, 100));
    lab.run_until(10 * MS);
    lab.set("");
    lab.run_until(20 * MS);
    lab.set("name a delay 50ms");
    lab.send(udp(2, 100));
    lab.run_until(100 * MS);
    assert_eq!(lab.out(), [(50 * MS, 1), (70 * MS, 2)]);
    assert_eq!(lab.report().rules[0].packets.offered, 2);
}

#[test]
fn a_flush_drops_and_counts() {
    let mut lab = Lab::new("delay 50ms; ");
    for port in 1..=5 {
        lab.send(udp(port, 100));
    }
    lab.run_until(10 * MS);
    assert_eq!(lab.engine.app_mut::<LineApp>("line").unwrap().flush(), 5);
    assert!(lab.app().is_idle());
    assert_eq!(lab.report().gone.dropped["flushed"], 5);
    lab.send(udp(6, 100));
    lab.run_until(11 * MS);
    assert_eq!(lab.out(), [(10 * MS, 6)]);
    lab.check_conservation();
}

#[test]
fn who_stops_reading_loses_nothing_until_too_much_waits() {
    let mut lab = Lab::new("match peer_port=1 delay 1ms");
    lab.ends.borrow_mut().room = 0;
    for _ in 0..30 {
        for _ in 0..100 {
            lab.send(udp(1, 60));
        }
        lab.run_until(lab.now + MS);
    }
    let inside = lab.report().inside;
    assert_eq!(inside + LINK_PACKETS_MAX as u64, 3000);
    lab.ends.borrow_mut().room = usize::MAX;
    lab.run_until(lab.now + 10 * MS);
    assert_eq!(lab.out().len(), 3000);
    let report = lab.report();
    assert_eq!((report.inside, report.valid), (0, false));
    assert!(report.rules[0].timing.max_nanoseconds > 10 * MS);
    lab.check_conservation();
}

/// Sends a packet through a delay, and looks so late for it.
fn released_late(lab: &mut Lab, delay: u64, late: u64) {
    lab.send(udp(1, 60));
    lab.run_until(lab.now + MS);
    lab.now += delay - MS + late;
    lab.run_until(lab.now + MS);
}

/// A ramp of delays changes it all the time.
#[test]
fn a_packet_is_late_by_the_budget_that_there_was_when_it_left() {
    let mut lab = Lab::new("delay 10ms");
    released_late(&mut lab, 10 * MS, 3 * MS);
    assert!(!lab.report().valid);
    lab.set("delay 500ms");
    lab.run_until(lab.now + MS);
    let report = lab.report();
    assert_eq!(report.rules[0].timing.budget_nanoseconds, 5 * MS);
    assert!(!report.valid, "{report:?}");

    let mut lab = Lab::new("delay 500ms");
    released_late(&mut lab, 500 * MS, 3 * MS);
    assert!(lab.report().valid);
    lab.set("delay 10ms");
    lab.run_until(lab.now + MS);
    assert!(lab.report().valid);
    // One of a hundred may be.
    for _ in 0..99 {
        released_late(&mut lab, 10 * MS, 0);
    }
    released_late(&mut lab, 10 * MS, 3 * MS);
    assert!(lab.report().valid);
    released_late(&mut lab, 10 * MS, 3 * MS);
    assert!(!lab.report().valid);
}

#[test]
fn what_was_invalid_stays_so_when_the_rule_is_gone() {
    for flush in [false, true] {
        let mut lab = Lab::new("name a delay 10ms");
        released_late(&mut lab, 10 * MS, 0);
        lab.set("name b delay 10ms");
        lab.run_until(lab.now + MS);
        assert!(lab.report().valid);
        released_late(&mut lab, 10 * MS, 3 * MS);
        if flush {
            lab.engine.app_mut::<LineApp>("line").unwrap().flush();
        } else {
            lab.set("");
        }
        lab.run_until(lab.now + MS);
        let report = lab.report();
        assert_eq!((report.rules.len(), report.gone.released), (0, 2));
        assert!(!report.valid, "{report:?}");
    }
}

#[test]
fn packets_without_a_rule_wait_for_room_too_and_no_more_than_a_link_holds() {
    let mut lab = Lab::new("match peer_port=1 delay 1ms");
    lab.ends.borrow_mut().room = 0;
    for _ in 0..30 {
        for _ in 0..100 {
            lab.send(udp(2, 60));
        }
        lab.run_until(lab.now + MS);
    }
    let report = lab.report();
    let held = 2 * LINK_PACKETS_MAX as u64;
    assert_eq!(report.passed_dropped + held, 3000);
}

#[test]
fn icmp_of_a_clamped_mtu_goes_back() {
    let mut lab = Lab::new("mtu 1000");
    let mut frame = udp(1, 1400);
    frame[20] = 0x40;
    frame::repair_checksums(&mut frame);
    lab.send(frame);
    lab.run_until(MS);
    let ends = lab.ends.borrow();
    assert!(ends.out_frames.is_empty());
    let answer = &ends.back_frames[0];
    assert_eq!((answer[23], answer[34], answer[35]), (1, 3, 4));
    assert_eq!(&answer[30..34], &[10, 0, 0, 1]);
    drop(ends);
    assert_eq!(lab.report().rules[0].packets.answers, 1);
}

#[test]
fn corrupted_frames_differ_and_repaired_ones_have_right_checksums() {
    let run = |text: &str| {
        let mut lab = Lab::new(text);
        lab.send(udp(1, 500));
        lab.run_until(MS);
        let ends = lab.ends.borrow();
        ends.out_frames[0].1.clone()
    };
    let original = udp(1, 500);
    let bits = |frame: &[u8]| -> u32 {
        let pairs = frame.iter().zip(&original);
        pairs.map(|(one, two)| (one ^ two).count_ones()).sum()
    };
    let broken = run("corrupt 100% bits 5");
    assert_eq!(bits(&broken), 5);
    let repaired = run("corrupt 100% bits 5 repaired");
    let mut again = repaired.clone();
    frame::repair_checksums(&mut again);
    assert_eq!(again, repaired);
    assert!(bits(&repaired) > 5);
}

#[test]
fn copies_are_bounded_by_the_pool_and_counted() {
    let mut lab = Lab::new("duplicate 100%");
    lab.send(udp(1, 100));
    lab.run_until(MS);
    assert_eq!(lab.out().len(), 2);
    assert_eq!(lab.report().rules[0].packets.copies, 1);
    lab.check_conservation();
}

#[test]
fn achieved_rate_and_delay_are_those_of_the_last_whole_second() {
    let mut lab = Lab::new("rate 1mbit delay 20ms");
    for _ in 0..300 {
        lab.send(udp(1, 1250));
        lab.run_until(lab.now + 10 * MS);
    }
    let rule = &lab.report().rules[0];
    assert_eq!(rule.achieved_bits_per_second, 1_000_000);
    // 10 ms of serialisation.
    assert_eq!(rule.achieved_delay_nanoseconds, Some(30 * MS));
    lab.run_until(lab.now + 5000 * MS);
    let report = lab.report();
    assert_eq!(report.rules[0].achieved_bits_per_second, 0);
    assert_eq!(report.rules[0].achieved_delay_nanoseconds, None);
}

#[test]
fn a_flap_goes_on_when_something_else_changes() {
    let mut lab = Lab::new("flap up 10ms down 10ms");
    lab.run_until(15 * MS);
    lab.set("flap up 10ms down 10ms delay 1ms");
    lab.send(udp(1, 100));
    lab.run_until(25 * MS);
    lab.send(udp(2, 100));
    lab.run_until(40 * MS);
    assert_eq!(lab.out(), [(26 * MS, 2)]);
    assert_eq!(lab.report().rules[0].packets.dropped["flap"], 1);
}

#[test]
fn a_nat_rebinds_and_both_lines_know() {
    let impairment: Impairment = "nat-rebind after 10ms".parse().unwrap();
    let (egress, ingress) = Line::pair(&impairment, 1).unwrap();
    let ends: Vec<_> = (0..2)
        .map(|_| {
            Rc::new(RefCell::new(Ends {
                room: usize::MAX,
                ..Ends::default()
            }))
        })
        .collect();
    let mut graph = Graph::new();
    graph.app("inside", Wire(Rc::clone(&ends[0]))).unwrap();
    graph.app("outside", Wire(Rc::clone(&ends[1]))).unwrap();
    graph.app("egress", egress).unwrap();
    graph.app("ingress", ingress).unwrap();
    graph
        .links("inside.output -> egress.input \n egress.output -> outside.input \n outside.output -> ingress.input \n ingress.output -> inside.input")
        .unwrap();
    let mut engine = Engine::new();
    engine.configure(&graph).unwrap();
    let mut exchange = |at: u64| {
        ends[0].borrow_mut().in_frames.push_back(udp(53, 100));
        engine.breathe(Time::from_nanos(at));
        let out = ends[1].borrow_mut().out_frames.pop().unwrap().1;
        let mut answer = out.clone();
        answer[26..30].copy_from_slice(&out[30..34]);
        answer[30..34].copy_from_slice(&out[26..30]);
        answer[34..36].copy_from_slice(&out[36..38]);
        answer[36..38].copy_from_slice(&out[34..36]);
        ends[1].borrow_mut().in_frames.push_back(answer);
        engine.breathe(Time::from_nanos(at + MS));
        let back = ends[0].borrow_mut().out_frames.pop().unwrap().1;
        assert_eq!(&back[36..38], &1000u16.to_be_bytes());
        u16::from_be_bytes([out[34], out[35]])
    };
    assert_eq!(exchange(MS), 1000);
    assert_ne!(exchange(20 * MS), 1000);
}

/// What the sandbox is told is about the port that it sent from, not the one that the far side sees.
#[test]
fn icmp_about_a_rebound_flow_names_the_sandboxs_own_port() {
    let mut lab = Lab::new("nat-rebind after 10ms mtu 1000");
    lab.send(udp(1, 100));
    lab.run_until(20 * MS);
    let mut large = udp(1, 1100);
    large[20] = 0x40;
    frame::repair_checksums(&mut large);
    lab.send(large);
    lab.send(udp(1, 100));
    lab.run_until(30 * MS);
    let ends = lab.ends.borrow();
    let last = &ends.out_frames.last().unwrap().1;
    assert_ne!(last[34..36], 1000u16.to_be_bytes());
    let answer = &ends.back_frames[0];
    assert_eq!(answer[34..36], [3, 4]);
    assert_eq!(answer[62..64], 1000u16.to_be_bytes());
}

#[test]
fn an_observer_is_told_of_every_fate() {
    let mut lab = Lab::new("name x loss packets 1,3 delay 5ms");
    let seen = Rc::new(RefCell::new(Vec::new()));
    let told = Rc::clone(&seen);
    let app = lab.engine.app_mut::<LineApp>("line").unwrap();
    app.observe(Some(Box::new(move |observation| {
        let planned = match observation.decision.verdict {
            Verdict::Released { planned, .. } => Some(planned),
            Verdict::Dropped { .. } => None,
        };
        let number = observation.decision.number;
        told.borrow_mut()
            .push((number, observation.came, planned, observation.frame.len()));
    })));
    for _ in 0..4 {
        lab.send(udp(1, 100));
    }
    lab.run_until(10 * MS);
    let mut seen = seen.borrow_mut();
    seen.sort_unstable();
    let due = Some(5 * MS);
    assert_eq!(
        *seen,
        [
            (0, 0, due, 100),
            (1, 0, None, 100),
            (2, 0, due, 100),
            (3, 0, None, 100)
        ]
    );
}

#[test]
fn another_direction_or_link_has_other_numbers_and_a_rule_keeps_its_own() {
    let lost = |text: &str, direction, link| {
        let line = Line::new(&text.parse().unwrap(), direction, link).unwrap();
        let mut lab = Lab::new("");
        let mut graph = Graph::new();
        graph.app("wire", Wire(Rc::clone(&lab.ends))).unwrap();
        graph.app("line", line).unwrap();
        graph
            .links("wire.output -> line.input \n line.output -> wire.input")
            .unwrap();
        lab.engine.configure(&graph).unwrap();
        for number in 0..200 {
            lab.send(udp(number, 100));
        }
        lab.run_until(MS);
        lab.out()
    };
    let one = lost("name a loss 20%", Direction::Egress, 1);
    assert_eq!(
        one,
        lost(
            "pass match vlan=7; name a loss 20% duplicate 0%",
            Direction::Egress,
            1
        )
    );
    assert_ne!(one, lost("name a loss 20%", Direction::Ingress, 1));
    assert_ne!(one, lost("name a loss 20%", Direction::Egress, 2));
    assert_ne!(one, lost("name b loss 20%", Direction::Egress, 1));
    assert_ne!(one, lost("seed 1; name a loss 20%", Direction::Egress, 1));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn packets_in_and_copies_are_those_out_dropped_and_inside(
        steps in prop::collection::vec((0u64..3 * MS, 1u16..5, 60usize..1400, 0usize..12), 1..150),
    ) {
        let texts = [
            "name a match peer_port=1 loss 20% delay 3ms 2ms normal order any; name b rate 1mbit limit 5 packets duplicate 30%",
            "name b match peer_port=2-3 rate 2mbit fq-codel delay 1ms reorder 20% distance 2 corrupt 20%; name a delay 2ms",
            "name c match protocol=udp peer_port=1-2 mtu 600 flap up 2ms down 1ms",
            "",
        ];
        let mut lab = Lab::new(texts[0]);
        for (later, port, bytes, change) in steps {
            if let Some(text) = texts.get(change) {
                lab.set(text);
            }
            lab.send(udp(port, bytes));
            lab.run_until(lab.now + later);
            lab.check_conservation();
        }
        lab.set("");
        lab.run_until(lab.now + 20_000 * MS);
        lab.check_conservation();
        prop_assert!(lab.app().is_idle());
        prop_assert_eq!(lab.engine.pool_counters().in_use(), 0);
    }
}

/// Else one could have all packets of the engine, and nobody else any.
#[test]
fn a_line_that_holds_nearly_all_packets_leaves_others_some() {
    let limits = sandwire_engine::PoolLimits {
        packets_max: 900,
        ..sandwire_engine::PoolLimits::default()
    };
    let mut engine = Engine::with_limits(limits).unwrap();
    let ends = [0, 1].map(|_| {
        Rc::new(RefCell::new(Ends {
            room: usize::MAX,
            ..Ends::default()
        }))
    });
    let mut graph = Graph::new();
    for (number, ends) in ends.iter().enumerate() {
        let line = Line::new(&"delay 1h".parse().unwrap(), Direction::Egress, 0).unwrap();
        let (wire, name) = (format!("wire{number}"), format!("line{number}"));
        graph.app(&wire, Wire(Rc::clone(ends))).unwrap();
        graph.app(&name, line.sharing()).unwrap();
        graph.connect((&wire, "output"), (&name, "input")).unwrap();
        graph.connect((&name, "output"), (&wire, "input")).unwrap();
    }
    engine.configure(&graph).unwrap();
    let mut send = |number: usize, count: usize| {
        // A few at a time, as an interface brings them.
        for round in 0..count {
            ends[number].borrow_mut().in_frames.push_back(udp(53, 100));
            engine.breathe(Time::from_nanos(round as u64));
        }
        let line = engine.app::<LineApp>(&format!("line{number}")).unwrap();
        (line.inside(), line.packets().dropped.get("share").copied())
    };
    // Of 900 that is eight times what is left.
    assert_eq!(send(0, 2000), (800, Some(1200)));
    assert_eq!(send(1, 50), (50, None));
}

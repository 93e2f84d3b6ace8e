//! What an engine must outlive: interfaces that go down, away, or by another name, and peers that take nothing.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use sandwire_engine::apps::{Filter, Sink, Source};
use sandwire_engine::io::{Raw, Ring};
use sandwire_engine::{Engine, Graph, Packet, PoolLimits, Runner};
use sandwire_testlab::lab;

use crate::offloads;
use crate::world::{EDGES, Edge, Forwarder, LEFT, RIGHT, World, run};

fn on_sockets() -> impl Iterator<Item = &'static Edge> {
    EDGES.iter().filter(|edge| edge.sees_offloads)
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_interface_that_was_down_or_renamed_goes_on() {
    lab::run(|_lab| {
        for edge in on_sockets() {
            let world = World::new(edge, edge);
            let forwarder = Forwarder::between(edge, edge);
            let reaches = |count: u32| {
                let line = format!("ping -c {count} -i 0.05 -W 1 {}", RIGHT.four);
                world.left.run(&line).is_ok()
            };
            assert!(reaches(1));
            run("ip link set right0 down");
            assert!(!reaches(3));
            run("ip link set right0 up");
            assert!(reaches(5), "up again, {}", edge.name);
            run("ip link set right0 down");
            run("ip link set right0 name moved up");
            assert!(reaches(5), "renamed, {}", edge.name);
            run("ip link set moved down");
            run("ip link set moved name right0");
            let reports = forwarder.stop();
            assert_eq!(reports.figure("right", "interface_went_down"), 3);
            let dropped = reports.figure("right", "send_drop_interface_down");
            assert!(dropped >= 1, "{}", edge.name);
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_interface_that_is_deleted_costs_only_its_own_packets() {
    lab::run(|_lab| {
        for edge in on_sockets() {
            let world = World::new(edge, edge);
            let forwarder = Forwarder::between(edge, edge);
            let ping = format!("ping -c 3 -i 0.05 -W 1 {}", RIGHT.four);
            world.left.run(&ping).unwrap();
            run("ip link delete right0");
            assert!(world.left.run(&ping).is_err());
            let reports = forwarder.stop();
            assert_eq!(reports.figure("right", "interface_went_down"), 1);
            assert!(reports.figure("right", "send_drop_interface_gone") >= 1);
            assert!(reports.figure("left", "received") >= 6, "the other goes on");
        }
    });
}

/// A super-packet comes by the socket, which says first that its interface went down.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_super_packet_that_waits_while_the_interface_goes_down_is_not_taken_for_the_next() {
    lab::run(|_lab| {
        let edge = on_sockets().find(|edge| edge.name == "ring").unwrap();
        let world = World::new(edge, edge);
        let seen = Rc::new(RefCell::new(Vec::new()));
        let marks = Rc::clone(&seen);
        let mut graph = Graph::new();
        (edge.add)(&LEFT, &mut graph).unwrap();
        let look = move |packet: &mut Packet| {
            let bytes = packet.bytes();
            if bytes.len() > 1000 {
                marks.borrow_mut().push(bytes[1000]);
            }
            true
        };
        graph.app("look", Filter::new(look)).unwrap();
        graph.app("sink", Sink).unwrap();
        graph.link("left.output -> look.input").unwrap();
        graph.link("look.output -> sink.input").unwrap();
        let mut engine = Engine::new();
        engine.configure(&graph).unwrap();
        let socket = world
            .left
            .inside(|| Ok(std::net::UdpSocket::bind("0.0.0.0:0")?))
            .unwrap();
        socket.set_broadcast(true).unwrap();
        offloads::segment_datagrams(&socket, 1000).unwrap();
        let mut runner = Runner::new();
        for mark in 1..=3 {
            socket.send_to(&[mark; 4000], "10.9.0.255:9").unwrap();
            if mark == 1 {
                run("ip link set left0 down");
            }
            runner.run_for(&mut engine, Duration::from_millis(100));
            run("ip link set left0 up");
        }
        assert_eq!(*seen.borrow(), [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]);
        assert_eq!(engine.figure("left", "interface_went_down"), Some(1));
        assert_eq!(engine.figure("left", "receive_drop_too_long"), Some(0));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_mtu_that_shrinks_costs_only_what_is_too_long_now() {
    lab::run(|_lab| {
        let _world = World::of_veths();
        for is_ring in [false, true] {
            run("ip link set left0 mtu 1500");
            let mut graph = Graph::new();
            graph
                .app("source", Source::sizes(&[100, 1514, 200]).limit(999))
                .unwrap();
            if is_ring {
                graph.app("left", Ring::interface(LEFT.outer)).unwrap();
            } else {
                graph.app("left", Raw::interface(LEFT.outer)).unwrap();
            }
            graph.link("source.output -> left.input").unwrap();
            let mut engine = Engine::new();
            engine.configure(&graph).unwrap();
            run("ip link set left0 mtu 1000");
            Runner::new().run_for(&mut engine, Duration::from_millis(200));
            assert_eq!(engine.figure("left", "sent"), Some(666), "ring: {is_ring}");
            assert_eq!(engine.figure("left", "send_drop_too_long"), Some(333));
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_can_not_be_opened_is_refused_with_its_reason() {
    lab::run(|_lab| {
        let _world = World::of_veths();
        run("ip tuntap add name flat mode tun");
        run("ip link set left0 mtu 9000");
        let refusal = |graph: &Graph| {
            let mut engine = Engine::new();
            let error = engine.configure(graph).unwrap_err();
            format!("{error}: {}", std::error::Error::source(&error).unwrap())
        };
        for (name, reason) in [
            ("nowhere", "none of that name"),
            ("flat", "no Ethernet frames"),
            ("left0", "MTU of 9000 makes frames of up to 9018 bytes"),
            ("a-name-that-is-too-long-for-one", "none of that name"),
            ("", "none of that name"),
        ] {
            let mut graph = Graph::new();
            graph.app("it", Raw::interface(name)).unwrap();
            let message = refusal(&graph);
            assert!(
                message.contains(reason) && message.contains(name),
                "{message}"
            );
            let mut graph = Graph::new();
            graph.app("it", Ring::interface(name)).unwrap();
            let message = refusal(&graph);
            assert!(
                message.contains(reason) && message.contains(name),
                "{message}"
            );
        }
        let mut graph = Graph::new();
        graph.app("it", Ring::interface("left0")).unwrap();
        let limits = PoolLimits {
            frame_bytes_max: 9018,
            ..PoolLimits::default()
        };
        Engine::with_limits(limits)
            .unwrap()
            .configure(&graph)
            .unwrap();
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_reader_that_stops_costs_counted_packets_and_no_memory() {
    lab::run(|_lab| {
        for edge in on_sockets() {
            let world = World::new(edge, edge);
            let mut graph = Graph::new();
            // Nothing is linked to its output, so it reads nothing.
            (edge.add)(&LEFT, &mut graph).unwrap();
            graph.app("sink", Sink).unwrap();
            let mut engine = Engine::new();
            engine.configure(&graph).unwrap();
            let socket = world
                .left
                .inside(|| Ok(std::net::UdpSocket::bind("0.0.0.0:0")?))
                .unwrap();
            socket.set_broadcast(true).unwrap();
            for _ in 0..60_000 {
                socket.send_to(&[0; 900], "10.9.0.255:9").unwrap();
            }
            let mut runner = Runner::new();
            runner.run_for(&mut engine, Duration::from_millis(20));
            let figure = |engine: &Engine, name| engine.figure("left", name).unwrap();
            assert_eq!(figure(&engine, "received"), 0);
            assert!(figure(&engine, "kernel_drops") > 5_000, "{}", edge.name);
            graph.link("left.output -> sink.input").unwrap();
            engine.configure(&graph).unwrap();
            let mut received = u64::MAX;
            while received != figure(&engine, "received") {
                received = figure(&engine, "received");
                runner.run_for(&mut engine, Duration::from_millis(200));
            }
            let all = received + figure(&engine, "kernel_drops");
            let counter = "/sys/class/net/left0/statistics/rx_packets";
            let arrived: u64 = std::fs::read_to_string(counter)
                .unwrap()
                .trim()
                .parse()
                .unwrap();
            // A few came before the socket was there.
            assert!(
                received > 100 && (arrived - 100..=arrived).contains(&all),
                "{}: {received}, {all} of {arrived}",
                edge.name
            );
        }
    });
}

//! Edge apps between real kernels: what kernel sockets send arrives intact, and the kernels find nothing wrong.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests")]

#[path = "../built/mod.rs"]
mod built;
mod faults;
mod offloads;
mod streams;
mod world;

use std::fs::{self, File};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use sandwire_engine::apps::Source;
use sandwire_engine::io::{Raw, Ring};
use sandwire_engine::{Engine, Graph, Runner};
use sandwire_testlab::iperf3;
use sandwire_testlab::lab;
use sandwire_testlab::namespace;

use world::{EDGES, Edge, Forwarder, LEFT, RIGHT, World};

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn every_pair_of_edge_apps_carries_what_kernels_send() {
    // 72 worlds: a minute on a quiet machine, many on one that has no time.
    lab::run_within(Duration::from_secs(1800), |_lab| {
        for left in EDGES {
            for right in EDGES {
                for offloads in [true, false] {
                    carry(left, right, offloads);
                }
            }
        }
    });
}

/// Streams and datagrams both ways, IPv4 and IPv6.
fn carry(left: &Edge, right: &Edge, offloads: bool) {
    println!("{} - {}, offloads: {offloads}", left.name, right.name);
    let world = World::new(left, right);
    world.set_offloads(offloads);
    let forwarder = Forwarder::between(left, right);
    for (from, to, address) in [
        (&world.left, &world.right, [RIGHT.four, RIGHT.six]),
        (&world.right, &world.left, [LEFT.four, LEFT.six]),
    ] {
        for address in address {
            streams::datagrams(from, to, address);
            streams::stream(from, to, address);
        }
    }
    assert_eq!(world.receive_errors(), Vec::<String>::new());
    let reports = forwarder.stop();
    assert_eq!(reports.drops(), Vec::<String>::new());
    for (side, edge) in [(LEFT, left), (RIGHT, right)] {
        if edge.sees_offloads {
            let cut = reports.figure(side.name, "cut");
            let completed = reports.figure(side.name, "checksums_completed");
            assert_eq!(
                (cut > 0, completed > 0),
                (offloads, offloads),
                "{cut} {completed}"
            );
        }
    }
}

/// The seed's test of its engine: two veth pairs, two namespaces.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn hosts_reach_each_other_only_while_the_forwarder_runs() {
    lab::run(|_lab| {
        let edges: Vec<&Edge> = EDGES.iter().filter(|edge| edge.sees_offloads).collect();
        for edge in edges {
            let world = World::new(edge, edge);
            let reaches = || {
                ["10.9.0.2", "fd09::2"].map(|address| {
                    let line = format!("ping -c 2 -i 0.2 -W 1 {address}");
                    world.left.run(&line).is_ok()
                })
            };
            assert_eq!(reaches(), [false, false], "before, {}", edge.name);
            let forwarder = Forwarder::between(edge, edge);
            // A kernel that found no neighbour asks again after a second.
            wait_until(|| reaches() == [true, true]);
            measure_datagrams(&world);
            forwarder.stop();
            assert_eq!(reaches(), [false, false], "after, {}", edge.name);
        }
    });
}

/// UDP by iperf3: 20 Mbit/s for a second. Most of it must arrive even where other tests have the processors; how much
/// is lost on a quiet host is a benchmark's question.
fn measure_datagrams(world: &World) {
    let _server = iperf3::Server::start(Some(&world.right.path())).unwrap();
    let client = "--client 10.9.0.2 --udp --bitrate 20M --time 1";
    let report = iperf3::report(Some(&world.left.path()), client).unwrap();
    let received = &report["end"]["sum_received"];
    let packets = received["packets"].as_f64().unwrap();
    let lost = received["lost_percent"].as_f64().unwrap();
    assert!(
        packets > 1_000.0 && lost < 50.0,
        "{packets} packets, {lost} % lost"
    );
}

/// The kernel takes the outer tag out of what it receives, as tcpdump on the way sees it again.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn vlan_tags_that_the_kernel_took_out_are_put_back() {
    lab::run(|lab| {
        for edge in EDGES.iter().filter(|edge| edge.sees_offloads) {
            let world = World::new(edge, edge);
            let forwarder = Forwarder::between(edge, edge);
            let seen = lab.folder().join("seen");
            let messages = lab.folder().join("messages");
            let mut capture = namespace::command_in(&world.right.path(), "tcpdump")
                .args(["-i", "eth0", "-nn", "-e", "-c", "2", "-l", "vlan"])
                .stdout(File::create(&seen).unwrap())
                .stderr(File::create(&messages).unwrap())
                .spawn()
                .unwrap();
            wait_until(|| {
                fs::read_to_string(&messages)
                    .unwrap()
                    .contains("listening on")
            });
            world.left.inside(send_tagged).unwrap();
            wait_until(|| capture.try_wait().unwrap().is_some());
            let seen = fs::read_to_string(&seen).unwrap();
            for line in [
                "802.1Q (0x8100), length 104: vlan 100, p 3,",
                "802.1Q-QinQ (0x88a8), length 1514: vlan 5, p 0,",
            ] {
                assert!(seen.contains(line), "{}: {seen}", edge.name);
            }
            assert_eq!(forwarder.stop().drops(), Vec::<String>::new());
        }
    });
}

/// A frame with a tag, and one of full size with two.
fn send_tagged() -> anyhow::Result<()> {
    let frame = |tags: &[u8], length| {
        let mut frame = [&[0x02; 12], tags, &[0x88, 0xb5]].concat();
        frame.resize(length, 0x55);
        frame
    };
    let one = frame(&[0x81, 0, 0x60, 100], 104);
    let two = frame(&[0x88, 0xa8, 0, 5, 0x81, 0, 0, 100], 1514);
    let mut graph = Graph::new();
    graph.app("source", Source::of(vec![one, two]).limit(2))?;
    graph.app("wire", Raw::interface("eth0"))?;
    graph.link("source.output -> wire.input")?;
    let mut engine = Engine::new();
    engine.configure(&graph)?;
    Runner::new().run_for(&mut engine, Duration::from_millis(200));
    assert_eq!(engine.figure("wire", "sent"), Some(2));
    Ok(())
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn the_forwarding_example_drops_frames_of_odd_size() {
    lab::run_within(Duration::from_secs(600), |_lab| {
        let example = built::example("forward").unwrap();
        let world = World::of_veths();
        let output = Command::new(example)
            .args([LEFT.outer, RIGHT.outer, "6"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // 42 bytes of headers in front.
        let ping = |payload| {
            world
                .left
                .run(&format!("ping -c 3 -i 0.1 -W 1 -s {payload} 10.9.0.2"))
        };
        wait_until(|| ping(56).is_ok());
        assert!(ping(57).is_err());
        assert!(ping(58).is_ok());
        let output = output.wait_with_output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{text}");
        assert_eq!(text.matches("load: time: ").count(), 6, "{text}");
    });
}

/// Looks until it is so.
#[track_caller]
#[expect(
    clippy::disallowed_methods,
    reason = "what is waited for is another process"
)]
fn wait_until(mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !is_so() {
        assert!(Instant::now() < deadline, "not within two minutes");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn rings_of_one_fanout_group_share_the_flows_and_lose_none() {
    lab::run(|_lab| {
        let world = World::of_veths();
        let forwarder = Forwarder::start(|graph| {
            graph.app("left", Ring::interface(LEFT.outer).fanout(7))?;
            graph.app("left-too", Ring::interface(LEFT.outer).fanout(7))?;
            graph.app("join", sandwire_engine::apps::Join)?;
            graph.app("right", Raw::interface(RIGHT.outer))?;
            graph.link("left.output -> join.one")?;
            graph.link("left-too.output -> join.two")?;
            graph.link("join.output -> right.input")?;
            graph.link("right.output -> left.input")?;
            Ok(())
        });
        // Each begins with a socket, and so a flow, of its own.
        for _ in 0..12 {
            streams::whole_datagrams(&world.left, &world.right, RIGHT.four);
        }
        streams::stream(&world.left, &world.right, RIGHT.four);
        assert_eq!(world.receive_errors(), Vec::<String>::new());
        let reports = forwarder.stop();
        let received = ["left", "left-too"].map(|app| reports.figure(app, "received"));
        assert!(
            received.iter().all(|&received| received > 50),
            "{received:?}"
        );
        let packets = ["left", "left-too"].map(|app| reports.figure(app, "received_packets"));
        // What one ring sends, the other must not take for received.
        assert_eq!(packets.iter().sum::<u64>(), reports.figure("right", "sent"));
    });
}

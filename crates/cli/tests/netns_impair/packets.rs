//! What becomes of packets: delayed, lost by flow, kept through every change.

use std::{
    net::UdpSocket,
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use rustix::net::sockopt::set_socket_recv_buffer_size_force;
use sandwire_testlab::{
    iperf3::Server,
    lab::{self, Lab},
    namespace,
    pinger::Pinger,
};

use crate::lab::{
    Service, full_sockets, interfaces, iperf3_from_far, round_trip, wait_until, wrong_checksums,
};

/// For what has to come.
const PATIENCE: Duration = Duration::from_secs(60);
/// For what must not.
const IN_VAIN: Duration = Duration::from_millis(300);

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn each_direction_has_its_delay() {
    lab::run(|lab| {
        interfaces(lab);
        let service = Service::start(lab);
        let before = lab.snapshot();
        service.run("--netns far --egress 'delay 20ms' --ingress 'delay 30ms'");
        let (least, _) = round_trip(lab);
        assert!((50.0..70.0).contains(&least), "{least}");

        let shown = service.shown();
        for (way, delay) in [("egress", 20_000_000), ("ingress", 30_000_000)] {
            let rule = &shown[way]["line"]["rules"][0];
            assert!(rule["offered"].as_u64() >= Some(20), "{shown:#}");
            let number = |name| rule[name].as_u64().unwrap();
            let inside = shown[way]["line"]["inside"].as_u64().unwrap();
            assert_eq!(number("offered"), number("released") + inside, "{shown:#}");
            let achieved = rule["achieved_delay_nanoseconds"].as_u64();
            assert!(
                achieved.is_none_or(|achieved| achieved >= delay),
                "{shown:#}"
            );
            assert!(number("released") >= 20, "{shown:#}");
        }
        assert!(service.run("show").contains("far0"));

        // From the other end of the same wire the directions have the same names.
        service.run("clear --all");
        service.run("--interface near0 --egress 'delay 20ms' --ingress 'delay 5ms'");
        let shown = service.shown();
        assert_eq!(shown["target"]["side"], "host");
        let (least, _) = round_trip(lab);
        assert!((25.0..45.0).contains(&least), "{least}");
        service.run("clear --interface near0");
        lab.assert_unchanged(&before);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn only_the_flow_that_is_meant_loses_packets() {
    lab::run(|lab| {
        interfaces(lab);
        let service = Service::start(lab);
        service.run("--netns far --egress 'match protocol=udp peer_port=7001 loss 50%' --seed 7");
        let receivers =
            ["10.9.0.1:7001", "10.9.0.1:7002"].map(|address| UdpSocket::bind(address).unwrap());
        let sender = far_socket();
        for number in 0..200_u32 {
            for port in [7001, 7002] {
                sender
                    .send_to(&number.to_be_bytes(), ("10.9.0.1", port))
                    .unwrap();
            }
            thread::sleep(Duration::from_micros(100));
        }
        // What isn't meant comes last, so when all of that is here the rest has been decided.
        assert_eq!(received(&receivers[1], 200).len(), 200);
        let shown = service.shown();
        let dropped = &shown["egress"]["line"]["rules"][0]["dropped"];
        let lost = dropped["loss"].as_u64().unwrap();
        assert!((60..140).contains(&lost), "{shown:#}");
        let left = usize::try_from(200 - lost).unwrap();
        assert_eq!(received(&receivers[0], left).len(), left);
    });
}

/// A socket of the far host.
fn far_socket() -> UdpSocket {
    let far = namespace::path_of("far");
    namespace::inside(&far, || Ok(UdpSocket::bind("10.9.0.2:0")?)).unwrap()
}

/// So many numbers, in the order in which they come; and what comes in a moment after them.
fn received(socket: &UdpSocket, expected: usize) -> Vec<u32> {
    let mut numbers = Vec::new();
    let mut bytes = [0; 4];
    loop {
        let patience = if numbers.len() < expected {
            PATIENCE
        } else {
            IN_VAIN
        };
        socket.set_read_timeout(Some(patience)).unwrap();
        if socket.recv(&mut bytes).is_err() {
            return numbers;
        }
        numbers.push(u32::from_be_bytes(bytes));
    }
}

/// Sends numbers from the far host while `work` is done, and a moment longer. How many.
fn sending_while(work: impl FnOnce() + Send) -> u32 {
    let sender = far_socket();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            work();
            thread::sleep(Duration::from_millis(100));
            done.store(true, Ordering::Relaxed);
        });
        let mut number = 0;
        while !done.load(Ordering::Relaxed) {
            sender
                .send_to(&u32::to_be_bytes(number), ("10.9.0.1", 7000))
                .unwrap();
            number += 1;
            // Nothing is made up for: a busy machine sends fewer, and no bursts that a buffer has no room for.
            thread::sleep(Duration::from_micros(500));
        }
        number
    })
}

/// Begins, changes and ends an impairment again and again under a stream of numbers: each arrives once, in order.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn beginning_changing_and_ending_loses_nothing_and_keeps_the_order() {
    lab::run(|lab| {
        interfaces(lab);
        let service = Service::start(lab);
        let receiver = UdpSocket::bind("10.9.0.1:7000").unwrap();
        // All of them have room, so nobody has to read while they come.
        set_socket_recv_buffer_size_force(&receiver, 64 << 20).unwrap();
        let sent = sending_while(|| {
            for _ in 0..5 {
                service.run("--netns far --both 'delay 30ms'");
                thread::sleep(Duration::from_millis(100));
                service.run("--netns far --both 'delay 60ms rate 100mbit'");
                thread::sleep(Duration::from_millis(100));
                service.run("clear --netns far");
            }
        });
        let numbers = received(&receiver, sent as usize);
        let expected: Vec<u32> = (0..sent).collect();
        assert_eq!(numbers.len(), expected.len(), "some were lost or doubled");
        let swapped = numbers
            .iter()
            .zip(&expected)
            .filter(|(one, other)| one != other);
        assert_eq!(swapped.count(), 0, "some overtook others");
        assert!(sent > 200, "{sent}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_ping_misses_nothing_while_the_impairment_changes() {
    lab::run(|lab| {
        interfaces(lab);
        let service = Service::start(lab);
        let far = namespace::path_of("far");
        let pinger = Pinger::start(&far, [10, 9, 0, 1].into(), Duration::from_millis(5)).unwrap();
        for delay in [10, 40, 5, 20] {
            service.run(&format!("--netns far --both 'delay {delay}ms'"));
            thread::sleep(Duration::from_millis(200));
        }
        service.run("clear --netns far");
        thread::sleep(Duration::from_millis(200));
        let pinged = pinger.stop().unwrap();
        assert!(pinged.lost.is_empty(), "{pinged:?}");
        assert!(pinged.sent > 20, "{pinged:?}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_is_under_way_is_let_go_or_flushed_and_counted() {
    lab::run(|lab| {
        interfaces(lab);
        let service = Service::start(lab);
        let receiver = UdpSocket::bind("10.9.0.1:7000").unwrap();
        let sender = far_socket();
        let send = || {
            for number in 0..100_u32 {
                sender
                    .send_to(&number.to_be_bytes(), "10.9.0.1:7000")
                    .unwrap();
            }
        };
        service.run("--netns far --egress 'match protocol=udp delay 8s'");
        let start = Instant::now();
        send();
        let cleared: serde_json::Value =
            serde_json::from_str(&service.run("clear --netns far --json")).unwrap();
        assert!(start.elapsed() >= Duration::from_secs(8));
        assert_eq!(cleared[0]["released"], 100, "{cleared}");
        assert_eq!(received(&receiver, 100), (0..100).collect::<Vec<u32>>());

        // Longer than the test may take.
        service.run("--netns far --egress 'match protocol=udp delay 600s'");
        send();
        wait_until("all of them are inside", || {
            service.shown()["egress"]["line"]["inside"] == 100
        });
        let cleared: serde_json::Value =
            serde_json::from_str(&service.run("clear --netns far --flush --json")).unwrap();
        assert_eq!(cleared[0]["flushed"], 100, "{cleared}");
        assert_eq!(received(&receiver, 0), [] as [u32; 0]);
        round_trip(lab);
    });
}

/// Both kernels judge every checksum, and iperf3 every byte that it counts.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn streams_and_datagrams_arrive_whole_both_ways() {
    lab::run(|lab| {
        interfaces(lab);
        let service = Service::start(lab);
        service.run("--netns far --both 'delay 2ms'");
        let _server = Server::start(None).unwrap();
        let mut lost = 0;
        for address in ["10.9.0.1", "fd09::1"] {
            for direction in ["", "-R"] {
                let report = iperf3_from_far(&format!("{address} -t 2 {direction}"));
                let bits = report["end"]["sum_received"]["bits_per_second"]
                    .as_f64()
                    .unwrap();
                // However slow the machine: what gets stuck moves next to nothing.
                assert!(bits > 1e6, "{address} {direction}: {bits}");
                let report =
                    iperf3_from_far(&format!("{address} -u -b 5M -l 1200 -t 2 {direction}"));
                let end = &report["end"]["sum"];
                assert!(end["packets"].as_u64() > Some(700), "{end}");
                lost += end["lost_packets"].as_u64().unwrap();
            }
        }
        assert_eq!(wrong_checksums(lab), [] as [String; 0]);
        let shown = service.shown();
        let mut counted = full_sockets(lab);
        for way in ["egress", "ingress"] {
            assert_eq!(shown[way]["refused"], 0, "{shown:#}");
            counted += shown[way]["unread"].as_u64().unwrap();
        }
        // On a busy machine a reader may come too late, iperf3 or the engine; that is counted then.
        assert!(lost <= counted, "{lost} lost, {counted} counted");
    });
}

/// The process of a namespace without a name stands for it.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_process_stands_for_its_namespace() {
    lab::run(|lab: &Lab| {
        interfaces(lab);
        let service = Service::start(lab);
        let mut container = Command::new("ip")
            .args(["netns", "exec", "far", "sleep", "1000"])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let pid = container.id();
        crate::lab::wait_until("the process is inside", || {
            let own = std::fs::read_link("/proc/self/ns/net").unwrap();
            std::fs::read_link(format!("/proc/{pid}/ns/net")).unwrap() != own
        });
        service.run(&format!("--pid {pid} --both 'delay 10ms'"));
        let (least, _) = round_trip(lab);
        assert!(least >= 20.0, "{least}");
        // The same interface by another name of its namespace.
        service.run("--netns far --both 'delay 20ms'");
        let (least, _) = round_trip(lab);
        assert!(least >= 40.0, "{least}");
        assert_eq!(service.shown()["target"]["interface"], "far0");
        service.run("clear --netns far");
        let (least, _) = round_trip(lab);
        assert!(least < 5.0, "{least}");
        container.kill().unwrap();
        container.wait().unwrap();
    });
}

//! What becomes of packets: delayed, lost by flow, kept through every change.

use std::{
    net::UdpSocket,
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use sandwire_testlab::{
    lab::{self, Lab},
    namespace,
    pinger::Pinger,
};

use crate::lab::{Server, Service, interfaces, iperf3, round_trip, wrong_checksums};

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
            assert_eq!(rule["offered"], rule["released"], "{shown:#}");
            let achieved = rule["achieved_delay_nanoseconds"].as_u64();
            assert!(
                achieved.is_none_or(|achieved| achieved >= delay),
                "{shown:#}"
            );
            assert!(rule["timing"]["packets"].as_u64() >= Some(20), "{shown:#}");
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
        let receivers = ["10.9.0.1:7001", "10.9.0.1:7002"].map(|address| {
            let socket = UdpSocket::bind(address).unwrap();
            socket
                .set_read_timeout(Some(Duration::from_millis(300)))
                .unwrap();
            socket
        });
        let sender = far_socket();
        for number in 0..200_u32 {
            for port in [7001, 7002] {
                sender
                    .send_to(&number.to_be_bytes(), ("10.9.0.1", port))
                    .unwrap();
            }
            thread::sleep(Duration::from_micros(100));
        }
        let counts = receivers.map(|socket| received(&socket).len());
        assert!((60..140).contains(&counts[0]), "{counts:?}");
        assert_eq!(counts[1], 200);
        let shown = service.shown();
        let dropped = &shown["egress"]["line"]["rules"][0]["dropped"];
        assert_eq!(dropped["loss"], 200 - counts[0] as u64, "{shown:#}");
    });
}

/// A socket of the far host.
fn far_socket() -> UdpSocket {
    let far = namespace::path_of("far");
    namespace::inside(&far, || Ok(UdpSocket::bind("10.9.0.2:0")?)).unwrap()
}

/// The numbers that have come, in their order, until none comes any more.
fn received(socket: &UdpSocket) -> Vec<u32> {
    let mut numbers = Vec::new();
    let mut bytes = [0; 4];
    while socket.recv(&mut bytes).is_ok() {
        numbers.push(u32::from_be_bytes(bytes));
    }
    numbers
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
        let (mut number, start) = (0, Instant::now());
        while !done.load(Ordering::Relaxed) {
            sender
                .send_to(&u32::to_be_bytes(number), ("10.9.0.1", 7000))
                .unwrap();
            number += 1;
            let due = Duration::from_micros(500) * number;
            thread::sleep(due.saturating_sub(start.elapsed()));
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
        receiver
            .set_read_timeout(Some(Duration::from_millis(500)))
            .unwrap();
        let reader = thread::spawn(move || {
            receiver
                .set_read_timeout(Some(Duration::from_secs(3)))
                .unwrap();
            received(&receiver)
        });
        let sent = sending_while(|| {
            for _ in 0..5 {
                service.run("--netns far --both 'delay 30ms'");
                thread::sleep(Duration::from_millis(100));
                service.run("--netns far --both 'delay 60ms rate 100mbit'");
                thread::sleep(Duration::from_millis(100));
                service.run("clear --netns far");
            }
        });
        let numbers = reader.join().unwrap();
        let expected: Vec<u32> = (0..sent).collect();
        assert_eq!(numbers.len(), expected.len(), "some were lost or doubled");
        let swapped = numbers
            .iter()
            .zip(&expected)
            .filter(|(one, other)| one != other);
        assert_eq!(swapped.count(), 0, "some overtook others");
        assert!(sent > 2000, "{sent}");
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
        assert_eq!(pinged.lost, [] as [u32; 0], "{pinged:?}");
        assert!(pinged.settled > 50, "{pinged:?}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_is_under_way_is_let_go_or_flushed_and_counted() {
    lab::run(|lab| {
        interfaces(lab);
        let service = Service::start(lab);
        let receiver = UdpSocket::bind("10.9.0.1:7000").unwrap();
        receiver
            .set_read_timeout(Some(Duration::from_millis(300)))
            .unwrap();
        let sender = far_socket();
        let send = || {
            for number in 0..100_u32 {
                sender
                    .send_to(&number.to_be_bytes(), "10.9.0.1:7000")
                    .unwrap();
            }
        };
        service.run("--netns far --egress 'match protocol=udp delay 1s'");
        send();
        let start = Instant::now();
        let cleared: serde_json::Value =
            serde_json::from_str(&service.run("clear --netns far --json")).unwrap();
        assert!(start.elapsed() > Duration::from_millis(700));
        assert_eq!(cleared[0]["released"], 100, "{cleared}");
        assert_eq!(received(&receiver), (0..100).collect::<Vec<u32>>());

        service.run("--netns far --egress 'match protocol=udp delay 10s'");
        send();
        thread::sleep(Duration::from_millis(50));
        let start = Instant::now();
        let cleared: serde_json::Value =
            serde_json::from_str(&service.run("clear --netns far --flush --json")).unwrap();
        assert!(start.elapsed() < Duration::from_secs(3));
        assert_eq!(cleared[0]["flushed"], 100, "{cleared}");
        assert_eq!(received(&receiver), [] as [u32; 0]);
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
        let _server = Server::start(lab);
        for address in ["10.9.0.1", "fd09::1"] {
            for direction in ["", "-R"] {
                let report = iperf3(lab, &format!("{address} -t 2 {direction}"));
                let bits = report["end"]["sum_received"]["bits_per_second"]
                    .as_f64()
                    .unwrap();
                assert!(bits > 20e6, "{address} {direction}: {bits}");
                let report = iperf3(
                    lab,
                    &format!("{address} -u -b 20M -l 1200 -t 2 {direction}"),
                );
                let end = &report["end"]["sum"];
                let (lost, packets) = (&end["lost_packets"], &end["packets"]);
                assert_eq!(lost.as_u64(), Some(0), "{address} {direction}: {end}");
                assert!(packets.as_u64() > Some(3000), "{end}");
            }
        }
        assert_eq!(wrong_checksums(lab), [] as [String; 0]);
        let shown = service.shown();
        for way in ["egress", "ingress"] {
            assert_eq!(shown[way]["refused"], 0, "{shown:#}");
        }
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

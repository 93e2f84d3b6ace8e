//! TAPs in a lab, with the kernel and ping on the other side.

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use rustix::time::{ClockId, clock_gettime};
use sandwire_engine::apps::{Filter, Sink};
use sandwire_engine::classify;
use sandwire_engine::io::tap::{Options, open};
use sandwire_engine::io::{Stop, Tap, Waiter, Waker};
use sandwire_engine::{Engine, Graph, Packet, Time};
use sandwire_testlab::lab::{self, Lab};
use sandwire_testlab::namespace::{Namespace, wait_until_up};
use sandwire_testlab::traffic;

/// The network namespace of a lab itself.
const HERE: &str = "/proc/self/ns/net";

const PATIENCE: Duration = Duration::from_secs(5);

/// Turns a ping into its answer. Exchanged addresses leave checksums as they are, and 8 less in the type is 8 more in
/// the sum.
fn answer(packet: &mut Packet) -> bool {
    let Some(ip) = classify::parse(packet.bytes()).ip else {
        return false;
    };
    if ip.icmp != Some((8, 0)) {
        return false;
    }
    let frame = packet.bytes_mut();
    let (destination, source) = frame[..12].split_at_mut(6);
    destination.swap_with_slice(source);
    let (source, destination) = frame[ip.offset + 12..ip.offset + 20].split_at_mut(4);
    source.swap_with_slice(destination);
    let icmp = &mut frame[ip.payload_offset..];
    icmp[0] = 0;
    let sum = u16::from_be_bytes([icmp[2], icmp[3]]);
    let (more, carry) = sum.overflowing_add(0x0800);
    icmp[2..4].copy_from_slice(&(more + u16::from(carry)).to_be_bytes());
    true
}

/// An engine in a thread of its own.
struct Running {
    waker: Waker,
    thread: thread::JoinHandle<Result<Figures>>,
}

/// By app and name.
type Figures = BTreeMap<(String, &'static str), u64>;

impl Running {
    /// Runs the graph that `build` makes.
    fn start(build: impl FnOnce() -> Result<Graph> + Send + 'static) -> Result<Self> {
        let (sender, receiver) = mpsc::channel();
        let thread = thread::spawn(move || {
            let mut engine = Engine::new();
            engine.configure(&build()?)?;
            let mut waiter = Waiter::new()?;
            sender.send(waiter.waker())?;
            let stop = waiter.run(&mut engine, None, |_| false)?;
            ensure!(stop == Stop::Woken, "the engine ended: {stop:?}");
            let reports = engine.report_apps();
            let figures = reports.iter().flat_map(|report| {
                let figures = report.figures.iter();
                figures.map(|figure| ((report.app.clone(), figure.name), figure.value))
            });
            Ok(figures.collect())
        });
        match receiver.recv() {
            Ok(waker) => Ok(Self { waker, thread }),
            Err(_) => bail!("the engine ended: {:?}", thread.join()),
        }
    }

    /// Ends the engine; a look at its figures.
    fn stop(self) -> Result<impl Fn(&str, &'static str) -> u64> {
        self.waker.wake();
        let figures = self.thread.join().expect("the engine doesn't panic")?;
        Ok(move |app: &str, figure| figures[&(app.to_owned(), figure)])
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_engine_answers_pings_of_the_kernel() {
    lab::run(|lab| {
        lab.run("ip tuntap add tap0 mode tap");
        lab.run("ip address add 10.9.0.1/24 dev tap0");
        lab.run("ip link set tap0 up");
        lab.run("ip neighbour add 10.9.0.2 lladdr 02:00:00:00:00:02 dev tap0");
        let running = Running::start(|| {
            let mut graph = Graph::new();
            graph.app("tap", Tap::interface("tap0"))?;
            graph.app("answer", Filter::new(answer))?;
            graph.links("tap.output -> answer.input \n answer.output -> tap.input")?;
            Ok(graph)
        })?;
        ensure!(
            wait_until_up(HERE.as_ref(), "tap0", PATIENCE)?,
            "tap0 is down"
        );
        lab.run("ping -n -q -c 20 -i 0.01 -W 5 10.9.0.2");
        lab.run("ping -n -q -c 3 -i 0.01 -s 1472 -W 5 10.9.0.2");
        let figure = running.stop()?;
        assert_eq!(figure("tap", "sent"), 23);
        assert_eq!(figure("tap", "send_drop_refused"), 0);
        anyhow::Ok(())
    });
}

/// Two namespaces, each with a TAP called `wire`, and an engine between.
fn join(
    lab: &Lab,
    options: Options,
    large_packets: bool,
) -> Result<(Namespace, Namespace, Running)> {
    let (left, right) = (lab.namespace("left"), lab.namespace("right"));
    let one = left.inside(|| Ok(open("wire", options)?))?;
    let two = right.inside(|| Ok(open("wire", options)?))?;
    for (namespace, number) in [(&left, 1), (&right, 2)] {
        namespace.run("ip link set wire up")?;
        namespace.run(&format!("ip address add 10.9.0.{number}/24 dev wire"))?;
        namespace.run(&format!("ip address add fd09::{number}/64 dev wire nodad"))?;
    }
    let running = Running::start(move || {
        let mut graph = Graph::new();
        for (app, descriptor) in [("one", one), ("two", two)] {
            let tap = Tap::from_descriptor(descriptor, "wire");
            graph.app(
                app,
                if large_packets {
                    tap.large_packets()
                } else {
                    tap
                },
            )?;
        }
        graph.links("one.output -> two.input \n two.output -> one.input")?;
        Ok(graph)
    })?;
    Ok((left, right, running))
}

/// What the receiving kernel found wrong.
fn checksum_errors(namespace: &Namespace) -> Result<u64> {
    let counters = namespace.run("nstat -az")?;
    let errors = counters.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let is_error = words.next()?.contains("Csum") || line.contains("InErrors");
        is_error
            .then(|| words.next()?.parse::<u64>().ok())
            .flatten()
    });
    Ok(errors.sum())
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn streams_and_datagrams_of_kernel_sockets_cross_whole() {
    lab::run(|lab| {
        for (vnet_header, large_packets) in [(false, false), (true, false), (true, true)] {
            let options = Options {
                vnet_header,
                ..Options::default()
            };
            let (left, right, running) = join(lab, options, large_packets)?;
            left.run("ping -n -q -c 5 -i 0.01 -W 5 10.9.0.2")?;
            left.run("ping -n -q -c 5 -i 0.01 -W 5 fd09::2")?;
            let receiver = right.inside(|| traffic::Receiver::listen(7001))?;
            for address in ["10.9.0.2:7001", "[fd09::2]:7001"] {
                let target = address.parse()?;
                let (sent, received) = thread::scope(|scope| {
                    let sender = scope.spawn(|| left.inside(|| traffic::send(target, 100)));
                    let received = receiver.receive();
                    (sender.join().unwrap(), received)
                });
                assert_eq!(sent?, received?, "{address}");
            }
            assert_eq!(checksum_errors(&left)? + checksum_errors(&right)?, 0);
            let figure = running.stop()?;
            for tap in ["one", "two"] {
                for cause in [
                    "receive_drop_too_long",
                    "receive_drop_malformed",
                    "receive_drop_no_room",
                    "send_drop_refused",
                    "gone",
                ] {
                    assert_eq!(figure(tap, cause), 0, "{cause} at {tap}");
                }
            }
            assert_eq!(figure("one", "cut") > 0, large_packets);
            assert_eq!(figure("two", "checksums_completed") > 0, large_packets);
        }
        anyhow::Ok(())
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_tap_that_is_down_or_deleted_ends_nobody_else() {
    lab::run(|lab| {
        let (left, right, running) = join(lab, Options::default(), false)?;
        left.run("ping -n -q -c 1 -W 5 10.9.0.2")?;
        right.run("ip link set wire down")?;
        assert!(left.run("ping -n -q -c 3 -i 0.01 -W 0.1 10.9.0.2").is_err());
        right.run("ip link set wire up")?;
        left.run("ping -n -q -c 1 -W 5 10.9.0.2")?;
        right.run("ip link set wire down")?;
        right.run("ip link set wire name cable")?;
        right.run("ip link set cable up")?;
        left.run("ping -n -q -c 1 -W 5 10.9.0.2")?;
        right.run("ip link delete cable")?;
        assert!(left.run("ping -n -q -c 3 -i 0.01 -W 0.1 10.9.0.2").is_err());
        let figure = running.stop()?;
        assert_eq!(figure("two", "gone"), 1);
        assert_eq!(figure("one", "gone"), 0);
        assert!(figure("two", "send_drop_interface_down") >= 1);
        assert!(figure("two", "send_drop_interface_gone") >= 1);
        anyhow::Ok(())
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_does_not_fit_is_dropped_and_counted_and_what_does_goes_on() {
    lab::run(|lab| {
        let (left, right, running) = join(lab, Options::default(), false)?;
        left.run("ip link set wire mtu 9000")?;
        right.run("ip link set wire mtu 9000")?;
        // 2048 bytes is the longest frame of the pool: 14 of Ethernet, 20 of IPv4, 8 of ICMP, and the rest.
        assert!(
            left.run("ping -n -q -M do -c 2 -i 0.01 -W 0.2 -s 2007 10.9.0.2")
                .is_err()
        );
        left.run("ping -n -q -M do -c 2 -i 0.01 -W 5 -s 2006 10.9.0.2")?;
        let figure = running.stop()?;
        assert_eq!(figure("one", "receive_drop_too_long"), 2);
        anyhow::Ok(())
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn several_queues_are_several_apps() {
    lab::run(|lab| {
        lab.run("ip tuntap add tap0 mode tap multi_queue");
        lab.run("ip address add 10.9.0.1/24 dev tap0");
        lab.run("ip link set tap0 up");
        lab.run("ip neighbour add 10.9.0.2 lladdr 02:00:00:00:00:02 dev tap0");
        let running = Running::start(|| {
            let mut graph = Graph::new();
            for queue in ["first", "second"] {
                graph.app(queue, Tap::interface("tap0").multi_queue())?;
                graph.app(&format!("{queue}_sink"), Sink)?;
                graph.link(&format!("{queue}.output -> {queue}_sink.input"))?;
            }
            Ok(graph)
        })?;
        // What is sent before the kernel has set the queues going is lost.
        ensure!(
            wait_until_up(HERE.as_ref(), "tap0", PATIENCE)?,
            "tap0 is down"
        );
        for port in 5000..5064 {
            let socket = std::net::UdpSocket::bind(("10.9.0.1", port))?;
            socket.send_to(b"x", "10.9.0.2:9")?;
        }
        lab.run("sleep 0.2");
        let figure = running.stop()?;
        let counts = ["first", "second"].map(|queue| figure(queue, "received"));
        ensure!(counts.iter().all(|&count| count > 5), "{counts:?}");
        ensure!(counts.iter().sum::<u64>() >= 64, "{counts:?}");
        anyhow::Ok(())
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_is_no_queue_of_a_tap_is_refused_with_the_reason() {
    lab::run(|lab| {
        let refusal = |tap: Tap| {
            let mut graph = Graph::new();
            graph.app("tap", tap).unwrap();
            let error = Engine::new().configure(&graph).unwrap_err();
            format!("{:#}", anyhow::Error::from(error))
        };
        lab.run("ip tuntap add tun0 mode tun");
        let text = refusal(Tap::interface("tun0"));
        assert!(text.contains("open tap tun0: Invalid argument"), "{text}");
        let file = std::fs::File::open("/dev/null")?;
        let text = refusal(Tap::from_descriptor(file.into(), "null"));
        assert!(text.contains("ask about tap null"), "{text}");
        let plain = open("tap0", Options::default())?;
        let text = refusal(Tap::from_descriptor(plain, "tap0").large_packets());
        assert!(text.contains("open it with IFF_VNET_HDR"), "{text}");
        let text = refusal(Tap::interface("a-name-that-is-too-long"));
        assert!(text.contains("1 to 15 bytes"), "{text}");
        let text = refusal(Tap::interface("lo"));
        assert!(text.contains("open tap lo"), "{text}");
        anyhow::Ok(())
    });
}

/// Processor time of this thread.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn idle_taps_are_not_looked_at() {
    lab::run(|lab| {
        const TAPS: usize = 400;
        // Nobody asks for routers here, so the interfaces are quiet.
        lab.shell("echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6");
        let mut graph = Graph::new();
        for number in 0..TAPS {
            let name = format!("tap{number}");
            graph.app(&name, Tap::interface(&name))?;
        }
        graph.app("answer", Filter::new(answer))?;
        graph.links("tap7.output -> answer.input \n answer.output -> tap7.input")?;
        let mut engine = Engine::new();
        engine.configure(&graph)?;
        let names: Vec<String> = (0..TAPS).map(|number| format!("tap{number}")).collect();
        lab.shell(&format!(
            "for name in {}; do echo link set $name up; done | ip -batch -",
            names.join(" ")
        ));
        let mut waiter = Waiter::new()?;
        waiter.run_for(&mut engine, Duration::from_millis(100))?;
        let before = processor_time();
        let load = waiter.run_for(&mut engine, Duration::from_secs(2))?;
        let idle = processor_time() - before;
        println!(
            "{TAPS} idle TAPs for 2 s: {idle:?} of processor time, {} breaths",
            load.breaths
        );
        // What time that takes is a benchmark's question (`idle_breath_ns`).
        ensure!(load.breaths < 20, "{} breaths while idle", load.breaths);

        lab.run("ip address add 10.9.0.1/24 dev tap7");
        lab.run("ip neighbour add 10.9.0.2 lladdr 02:00:00:00:00:02 dev tap7");
        let waker = waiter.waker();
        let pinger = thread::spawn(move || {
            let result = sandwire_testlab::command::run("ping -n -q -c 500 -i 0.002 -W 5 10.9.0.2");
            waker.wake();
            result
        });
        let (began, before) = (waiter.clock().now(), processor_time());
        let stop = waiter.run(&mut engine, Some(Time::from_nanos(u64::MAX)), |_| false)?;
        assert_eq!(stop, Stop::Woken);
        let (took, busy) = (waiter.clock().now().since(began), processor_time() - before);
        println!("{}", pinger.join().unwrap()?);
        let load = waiter.report_load(&mut engine);
        println!(
            "500 pings in {took:?}: {busy:?} of processor time, {} breaths",
            load.breaths
        );
        assert_eq!(engine.figure("tap7", "sent"), Some(500));
        // For each ping one that answers, and one that finds no more.
        ensure!(load.breaths < 1_100, "{} for 500 pings", load.breaths);
        anyhow::Ok(())
    });
}

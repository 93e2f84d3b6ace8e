//! AF_XDP apps between kernel stacks: what comes through, what they turn off at whoever sends, and what they refuse.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::error::Error;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use sandwire_engine::apps::{Join, Sink, Source};
use sandwire_engine::io::xdp::{Xdp, XdpError, XdpMode};
use sandwire_engine::io::{Tap, Waiter};
use sandwire_engine::{ConfigureError, Engine, Graph, PoolLimits, Runner};
use sandwire_testlab::lab::{self, Lab};
use sandwire_testlab::namespace::Namespace;
use sandwire_testlab::traffic;

/// Two hosts, each with an `eth0` that leads to an interface of ours: `if1` and `if2`.
struct Hosts {
    left: Namespace,
    right: Namespace,
}

impl Hosts {
    fn new(lab: &Lab) -> Self {
        let hosts = Self {
            left: lab.namespace("left"),
            right: lab.namespace("right"),
        };
        for (number, host) in [(1, &hosts.left), (2, &hosts.right)] {
            let name = host.name();
            lab.run(&format!(
                "ip link add if{number} type veth peer name eth0 netns {name}"
            ));
            host.run(&format!("ip address add 10.9.0.{number}/24 dev eth0"))
                .unwrap();
            host.run(&format!("ip address add fd09::{number}/64 dev eth0 nodad"))
                .unwrap();
            lab.run(&format!("ip link set if{number} up"));
            host.run("ip link set eth0 up").unwrap();
        }
        hosts
    }

    fn offloads(&self) -> [String; 2] {
        [&self.left, &self.right].map(|host| host.run("ethtool -k eth0").unwrap())
    }

    /// Packets that the kernels found to have a wrong checksum.
    fn checksum_errors(&self) -> u64 {
        let counts = [&self.left, &self.right].map(|host| {
            let all = host.run("nstat -a -s -z").unwrap();
            let errors = all.lines().filter(|line| line.contains("InCsumErrors"));
            let counts = errors.map(|line| {
                line.split_whitespace()
                    .nth(1)
                    .unwrap()
                    .parse::<u64>()
                    .unwrap()
            });
            counts.sum::<u64>()
        });
        counts.into_iter().sum()
    }
}

/// Figures of both apps after they have run.
type Figures = Vec<(String, u64)>;

/// Forwards between two interfaces while `work` is done.
fn forwarding<T: Send>(one: &Xdp, two: &Xdp, work: impl FnOnce() -> T + Send) -> (T, Figures) {
    forwarding_with(one, two, PoolLimits::default(), work)
}

fn forwarding_with<T: Send>(
    one: &Xdp,
    two: &Xdp,
    limits: PoolLimits,
    work: impl FnOnce() -> T + Send,
) -> (T, Figures) {
    let mut graph = Graph::new();
    graph.app("one", one.clone()).unwrap();
    graph.app("two", two.clone()).unwrap();
    graph
        .links("one.output -> two.input\n two.output -> one.input")
        .unwrap();
    let mut engine = Engine::with_limits(limits).unwrap();
    engine.configure(&graph).unwrap();
    let done = AtomicBool::new(false);
    let result = thread::scope(|scope| {
        let worker = scope.spawn(|| {
            // Also when the work panics.
            struct Done<'a>(&'a AtomicBool);
            impl Drop for Done<'_> {
                fn drop(&mut self) {
                    self.0.store(true, Ordering::Relaxed);
                }
            }
            let _done = Done(&done);
            work()
        });
        Runner::new().run_until(&mut engine, |_| done.load(Ordering::Relaxed));
        worker.join().unwrap()
    });
    let reports = engine.report_apps();
    let figures = reports.iter().flat_map(|report| {
        let name = |figure: &str| format!("{}.{figure}", report.app);
        report
            .figures
            .iter()
            .map(move |figure| (name(figure.name), figure.value))
    });
    (result, figures.collect())
}

#[track_caller]
fn figure(figures: &Figures, name: &str) -> u64 {
    let found = figures.iter().find(|(known, _)| known == name);
    found.unwrap_or_else(|| panic!("no figure {name}")).1
}

/// What an app says that can't start.
#[track_caller]
fn refusal(xdp: &Xdp) -> XdpError {
    let mut graph = Graph::new();
    graph.app("one", xdp.clone()).unwrap();
    let Err(ConfigureError::Build { source, .. }) = Engine::new().configure(&graph) else {
        panic!("it started");
    };
    *source.downcast::<XdpError>().unwrap()
}

/// The whole text of an error.
fn text(error: &XdpError) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text += &format!(": {error}");
        source = error.source();
    }
    text
}

/// Streams and datagrams from kernel sockets to kernel sockets, by both versions of IP.
fn exchange(hosts: &Hosts) {
    let addresses = [
        Ipv4Addr::new(10, 9, 0, 2).into(),
        Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, 2).into(),
    ];
    for address in addresses {
        let stream = SocketAddr::new(address, 5000);
        let receiver = hosts
            .right
            .inside(|| traffic::Receiver::listen(5000))
            .unwrap();
        thread::scope(|scope| {
            let receiving = scope.spawn(|| receiver.receive().unwrap());
            let sent = hosts.left.inside(|| traffic::send(stream, 160)).unwrap();
            assert_eq!(receiving.join().unwrap(), sent);
        });
        let datagrams = SocketAddr::new(address, 5001);
        let receiver = hosts
            .right
            .inside(|| Ok(UdpSocket::bind(("::", 5001))?))
            .unwrap();
        receiver
            .set_read_timeout(Some(Duration::from_secs(5)))
            .unwrap();
        let unspecified = if address.is_ipv4() {
            "0.0.0.0:0"
        } else {
            "[::]:0"
        };
        let sender = hosts
            .left
            .inside(|| Ok(UdpSocket::bind(unspecified)?))
            .unwrap();
        let mut buffer = [0; 65_536];
        // The last ones are cut into fragments.
        for length in (0..1400_usize).step_by(7).chain([2000, 9000, 60_000]) {
            let sent: Vec<u8> = (0..=u8::MAX)
                .cycle()
                .skip(length % 256)
                .take(length)
                .collect();
            sender.send_to(&sent, datagrams).unwrap();
            let received = receiver.recv(&mut buffer).unwrap();
            assert_eq!(
                &buffer[..received],
                &sent[..],
                "{length} bytes to {address}"
            );
        }
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn streams_and_datagrams_of_kernel_sockets_come_through_whole() {
    lab::run(|lab| {
        let hosts = Hosts::new(lab);
        for mode in [XdpMode::Native, XdpMode::Generic] {
            let before = hosts.offloads();
            let [one, two] = ["if1", "if2"].map(|name| Xdp::interface(name).mode(mode));
            let ((), figures) = forwarding(&one, &two, || exchange(&hosts));
            assert_eq!(hosts.checksum_errors(), 0, "{mode:?}");
            assert!(figure(&figures, "one.received") > 1000, "{figures:?}");
            for app in ["one", "two"] {
                let is_native = u64::from(mode == XdpMode::Native);
                assert_eq!(figure(&figures, &format!("{app}.is_native")), is_native);
                assert_eq!(figure(&figures, &format!("{app}.is_zero_copy")), 0);
                assert_ne!(figure(&figures, &format!("{app}.offloads_off")), 0);
                for lost in [
                    "send_drop_refused",
                    "invalid_descriptors",
                    "receive_drop_too_long",
                    "send_drop_interface_down",
                ] {
                    assert_eq!(
                        figure(&figures, &format!("{app}.{lost}")),
                        0,
                        "{app}.{lost}"
                    );
                }
            }
            assert_eq!(hosts.offloads(), before, "{mode:?}");
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_sender_that_is_trusted_and_lies_is_found_out_by_the_receiver() {
    lab::run(|lab| {
        let hosts = Hosts::new(lab);
        let [one, two] = ["if1", "if2"].map(|name| Xdp::interface(name).trust_sender());
        let (answer, _) = forwarding(&one, &two, || {
            let receiver = hosts
                .right
                .inside(|| Ok(UdpSocket::bind("10.9.0.2:5001")?))
                .unwrap();
            receiver
                .set_read_timeout(Some(Duration::from_secs(1)))
                .unwrap();
            let sender = hosts
                .left
                .inside(|| Ok(UdpSocket::bind("10.9.0.1:0")?))
                .unwrap();
            for _ in 0..10 {
                sender
                    .send_to(b"of a partial checksum", "10.9.0.2:5001")
                    .unwrap();
            }
            receiver.recv(&mut [0; 100])
        });
        // This is what turning offloads off is for: were it needless, this test would say so.
        assert!(answer.is_err());
        assert!(hosts.checksum_errors() > 0);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn offloads_are_off_as_long_as_the_app_runs_and_as_they_were_after() {
    lab::run(|lab| {
        let hosts = Hosts::new(lab);
        // One that was off before stays off after.
        hosts
            .left
            .run("ethtool -K eth0 tx-udp-segmentation off")
            .unwrap();
        let before = hosts.offloads();
        let mut graph = Graph::new();
        graph.app("one", Xdp::interface("if1")).unwrap();
        let mut engine = Engine::new();
        engine.configure(&graph).unwrap();
        let [left, right] = hosts.offloads();
        for name in [
            "tx-checksum-ip-generic",
            "tx-checksum-sctp",
            "tx-tcp-segmentation",
            "tx-tcp6-segmentation",
            "tx-udp-segmentation",
            "tx-vlan-offload",
            "tx-vlan-stag-hw-insert",
            "tx-gso-list",
        ] {
            let line = left
                .lines()
                .find(|line| line.trim_start().starts_with(&format!("{name}:")));
            assert!(
                line.is_some_and(|line| line.contains(": off")),
                "{name}: {left}"
            );
        }
        assert_eq!(right, before[1]);
        assert!(lab.run("ip -d link show if1").contains("xdp"));
        engine.configure(&Graph::new()).unwrap();
        assert_eq!(hosts.offloads(), before);
        assert!(!lab.run("ip -d link show if1").contains("xdp"));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_peer_that_moved_or_is_beside_us_gets_its_offloads_back() {
    lab::run(|lab| {
        let elsewhere = lab.namespace("elsewhere");
        lab.run("ip link add if1 type veth peer name peer");
        lab.run("ip link set if1 up");
        lab.run("ip link set peer up");
        let before = lab.run("ethtool -k peer");
        let mut graph = Graph::new();
        graph.app("one", Xdp::interface("if1")).unwrap();
        let mut engine = Engine::new();
        engine.configure(&graph).unwrap();
        assert!(lab.run("ethtool -k peer").contains("tx-checksumming: off"));
        drop(engine);
        assert_eq!(lab.run("ethtool -k peer"), before);
        let mut engine = Engine::new();
        engine.configure(&graph).unwrap();
        lab.run("ip link set peer netns elsewhere");
        assert!(
            elsewhere
                .run("ethtool -k peer")
                .unwrap()
                .contains("tx-checksumming: off")
        );
        drop(engine);
        assert_eq!(elsewhere.run("ethtool -k peer").unwrap(), before);
    });
}

/// The kernel is not done with a queue when its socket is closed.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_queue_can_be_taken_again_at_once() {
    lab::run(|lab| {
        lab.run("ip link add if1 type veth peer name peer");
        lab.run("ip link set if1 up");
        lab.run("ip link set peer up");
        let mut graph = Graph::new();
        graph.app("one", Xdp::interface("if1")).unwrap();
        for _ in 0..100 {
            Engine::new().configure(&graph).unwrap();
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_cannot_be_made_sure_of_is_refused_and_nothing_changes() {
    lab::run(|lab| {
        let hosts = Hosts::new(lab);
        let before = (lab.snapshot(), hosts.offloads());
        let refused = |xdp: Xdp, part: &str| {
            let text = text(&refusal(&xdp));
            assert!(text.contains(part), "{text}");
        };
        refused(Xdp::interface("nowhere"), "nowhere");
        let trusting = Xdp::interface("if1").trust_sender();
        refused(
            trusting.mode(XdpMode::Generic),
            "may not send super-packets",
        );
        refused(Xdp::interface("if1").queue(1), "no queue 1");
        refused(Xdp::interface("if1").ring_packets(100), "power of two");
        refused(Xdp::interface("if1").buffer_bytes(1024), "2048 or 4096");
        refused(Xdp::interface("lo"), "MTU");
        assert_eq!(hosts.offloads(), before.1);
        lab.assert_unchanged(&before.0);

        lab.run("ip link add two numrxqueues 2 numtxqueues 2 type veth peer name two-peer");
        lab.run("ip link set two up");
        lab.run("ip link set two-peer up");
        refused(Xdp::interface("two"), "2 receive queues, and apps for 1");
        lab.run("ip link set two mtu 1771");
        refused(Xdp::interface("two"), "at most");
        lab.run("ip link set two mtu 1500");
        lab.run("ip link set two down");
        refused(Xdp::interface("two"), "it is down");

        lab.run("ip link add bridge type bridge");
        lab.run("ip link set bridge up");
        refused(Xdp::interface("bridge"), "kind bridge");
        lab.run("ip tuntap add plain mode tap");
        lab.run("ip tuntap add header mode tap vnet_hdr");
        lab.run("ip link set plain up");
        lab.run("ip link set header up");
        refused(Xdp::interface("header"), "virtio-net headers");
        lab.run("ip tuntap add packets mode tun");
        lab.run("ip link set packets up");
        refused(Xdp::interface("packets"), "no Ethernet");
        let mut graph = Graph::new();
        graph.app("plain", Xdp::interface("plain")).unwrap();
        Engine::new().configure(&graph).unwrap();
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn frames_pass_both_ways_on_a_tap() {
    lab::run(|lab| {
        lab.run("ip tuntap add tap mode tap");
        lab.run("ip link set tap addrgenmode none up");
        let mut graph = Graph::new();
        // The process at the TAP's descriptor is this engine too.
        graph.app("process", Tap::interface("tap")).unwrap();
        graph.app("xdp", Xdp::interface("tap")).unwrap();
        for (number, app, other) in [(1, "process", "xdp"), (2, "xdp", "process")] {
            let source = format!("source{number}");
            graph
                .app(&source, Source::sizes(&[60, 1514]).limit(200))
                .unwrap();
            let sink = format!("sink{number}");
            graph.app(&sink, Sink).unwrap();
            graph
                .link(&format!("{source}.output -> {app}.input"))
                .unwrap();
            graph
                .link(&format!("{other}.output -> {sink}.input"))
                .unwrap();
        }
        let mut engine = Engine::new();
        engine.configure(&graph).unwrap();
        Runner::new().run_for(&mut engine, Duration::from_millis(500));
        let figures = ["sink1", "sink2"]
            .map(|sink| ["packets", "bytes"].map(|name| engine.figure(sink, name).unwrap()));
        assert_eq!(figures, [[200, 100 * (60 + 1514)]; 2]);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_idle_app_is_waited_for_and_not_polled() {
    lab::run(|lab| {
        let hosts = Hosts::new(lab);
        let mut graph = Graph::new();
        for (app, interface) in [("one", "if1"), ("two", "if2")] {
            graph.app(app, Xdp::interface(interface)).unwrap();
        }
        graph
            .links("one.output -> two.input\n two.output -> one.input")
            .unwrap();
        let mut engine = Engine::new();
        engine.configure(&graph).unwrap();
        let mut waiter = Waiter::new().unwrap();
        let mut breaths = 0;
        let quiet = |engine: &mut Engine, waiter: &mut Waiter, breaths: &mut u32| {
            let end = waiter.clock().now() + Duration::from_millis(300);
            waiter.run(engine, Some(end), |_| {
                *breaths += 1;
                false
            })
        };
        quiet(&mut engine, &mut waiter, &mut breaths).unwrap();
        assert!(breaths < 100, "{breaths} breaths without a packet");
        // Woken by each packet, and none waits for the next.
        let waker = waiter.waker();
        thread::scope(|scope| {
            let pinging = scope.spawn(|| {
                let answer = hosts.left.run("ping -c 5 -i 0.1 -W 1 10.9.0.2");
                waker.wake();
                answer.unwrap()
            });
            waiter.run(&mut engine, None, |_| false).unwrap();
            assert!(pinging.join().unwrap().contains(" 0% packet loss"));
        });
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_peer_out_of_reach_is_refused() {
    lab::run(|lab| {
        // A namespace that nothing but a socket holds: no process is in it, and no file leads to it.
        let hidden = lab.namespace("hidden");
        let held = hidden.inside(|| Ok(UdpSocket::bind("0.0.0.0:0")?)).unwrap();
        lab.run("ip link add if1 type veth peer name eth0 netns hidden");
        lab.run("ip link set if1 up");
        drop(hidden);
        let peer = lab.run("ip -d link show if1");
        assert!(peer.contains("link-netns"), "the namespace is gone: {peer}");
        let text = text(&refusal(&Xdp::interface("if1")));
        assert!(text.contains("no process and no mount"), "{text}");
        assert!(text.contains("trust_sender"), "{text}");
        let generic = Xdp::interface("if1").mode(XdpMode::Generic);
        assert!(matches!(refusal(&generic), XdpError::Sender { .. }));
        drop(held);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_is_occupied_is_refused_and_left_as_it_is() {
    lab::run(|lab| {
        let hosts = Hosts::new(lab);
        let mut graph = Graph::new();
        graph.app("one", Xdp::interface("if1")).unwrap();
        let mut engine = Engine::new();
        engine.configure(&graph).unwrap();
        let running = (hosts.offloads(), lab.run("ip -d link show if1"));
        assert!(matches!(
            refusal(&Xdp::interface("if1")),
            XdpError::Occupied { .. }
        ));
        assert_eq!((hosts.offloads(), lab.run("ip -d link show if1")), running);
        drop(engine);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_interface_that_is_down_or_gone_stops_nobody() {
    lab::run(|lab| {
        let hosts = Hosts::new(lab);
        let [one, two] = ["if1", "if2"].map(Xdp::interface);
        let ping = || hosts.left.run("ping -c 3 -i 0.1 -W 1 10.9.0.2").is_ok();
        let ((), figures) = forwarding(&one, &two, || {
            assert!(ping());
            // So that what is sent doesn't depend on answers.
            hosts
                .left
                .run("ip neighbour change 10.9.0.2 dev eth0 nud permanent")
                .unwrap();
            lab.run("ip link set if2 down");
            assert!(!ping());
            lab.run("ip link set if2 up");
            assert!(ping());
            lab.run("ip link set if2 name renamed");
            assert!(ping());
            lab.run("ip link delete renamed");
            assert!(!ping());
        });
        assert!(
            figure(&figures, "two.send_drop_interface_down") >= 3,
            "{figures:?}"
        );
        assert!(
            figure(&figures, "two.send_drop_interface_gone") >= 3,
            "{figures:?}"
        );
        assert_eq!(figure(&figures, "two.is_gone"), 1);
        assert_eq!(figure(&figures, "one.is_gone"), 0);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn frames_that_packets_have_no_room_for_are_counted() {
    lab::run(|lab| {
        let hosts = Hosts::new(lab);
        let limits = PoolLimits {
            frame_bytes_max: 500,
            ..PoolLimits::default()
        };
        let mut graph = Graph::new();
        graph.app("one", Xdp::interface("if1")).unwrap();
        let mut engine = Engine::with_limits(limits).unwrap();
        let error = engine.configure(&graph).unwrap_err();
        assert!(format!("{:?}", error).contains("Packets"), "{error:?}");

        // A kernel lets anybody change an MTU at any time.
        let set_mtu = |mtu: u32| {
            for number in [1, 2] {
                lab.run(&format!("ip link set if{number} mtu {mtu}"));
            }
        };
        set_mtu(400);
        let [one, two] = ["if1", "if2"].map(Xdp::interface);
        let ((), figures) = forwarding_with(&one, &two, limits, || {
            set_mtu(1500);
            hosts.left.run("ping -c 1 10.9.0.2").unwrap();
            hosts
                .left
                .run("ping -c 3 -i 0.1 -W 1 -s 1000 10.9.0.2")
                .unwrap_err();
        });
        assert_eq!(figure(&figures, "one.receive_drop_too_long"), 3);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn apps_of_two_queues_share_one_interface() {
    lab::run(|lab| {
        let right = lab.namespace("right");
        lab.run("ip link add if1 numrxqueues 2 numtxqueues 2 type veth peer name eth0 netns right numrxqueues 2 numtxqueues 2");
        lab.run("ip link set if1 up");
        right.run("ip address add 10.9.0.1/24 dev eth0").unwrap();
        right.run("ip link set eth0 up").unwrap();
        let before = right.run("ethtool -k eth0").unwrap();
        let interface = Xdp::interface("if1");
        let mut graph = Graph::new();
        graph.app("zero", interface.queue(0)).unwrap();
        graph.app("one", interface.queue(1)).unwrap();
        let mut engine = Engine::new();
        engine.configure(&graph).unwrap();
        assert_eq!(engine.figure("zero", "queues_left"), Some(0));
        // Flows are spread over the queues by their hash.
        right
            .run("ip neighbour add 10.9.0.2 lladdr 02:00:00:00:00:02 dev eth0")
            .unwrap();
        right
            .inside(|| {
                for _ in 0..64 {
                    UdpSocket::bind("10.9.0.1:0")?.send_to(b"hello", "10.9.0.2:9")?;
                }
                Ok(())
            })
            .unwrap();
        let mut sink = Graph::new();
        sink.app("zero", interface.queue(0)).unwrap();
        sink.app("one", interface.queue(1)).unwrap();
        sink.app("sink", Sink).unwrap();
        sink.app("join", Join).unwrap();
        sink.links("zero.output -> join.zero\n one.output -> join.one\n join.output -> sink.input")
            .unwrap();
        engine.configure(&sink).unwrap();
        Runner::new().run_for(&mut engine, Duration::from_millis(300));
        let received = ["zero", "one"].map(|app| engine.figure(app, "received").unwrap());
        assert!(received.iter().all(|count| *count > 5), "{received:?}");
        drop(engine);
        assert_eq!(right.run("ethtool -k eth0").unwrap(), before);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_reader_that_stops_costs_counted_packets_alone() {
    lab::run(|lab| {
        let hosts = Hosts::new(lab);
        let mut graph = Graph::new();
        graph
            .app("one", Xdp::interface("if1").ring_packets(64))
            .unwrap();
        let mut engine = Engine::new();
        engine.configure(&graph).unwrap();
        hosts
            .left
            .run("ip neighbour add 10.9.0.2 lladdr 02:00:00:00:00:02 dev eth0")
            .unwrap();
        let sender = hosts
            .left
            .inside(|| Ok(UdpSocket::bind("10.9.0.1:0")?))
            .unwrap();
        for _ in 0..1000 {
            sender.send_to(b"too many", "10.9.0.2:9").unwrap();
        }
        Runner::new().run_for(&mut engine, Duration::from_millis(100));
        let figure = |name| engine.figure("one", name).unwrap();
        let lost = figure("kernel_drops");
        assert!((900..=1000).contains(&lost), "{lost}");
        assert_eq!(figure("received"), 0);
    });
}

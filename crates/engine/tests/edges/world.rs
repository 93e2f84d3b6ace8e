//! Two hosts, each a network namespace, and between them nothing but an engine.
//!
//! ```text
//!  namespace left            lab              namespace right
//!   eth0 ---------- left0 [ engine ] right0 ---------- eth0
//!   10.9.0.1, fd09::1                   10.9.0.2, fd09::2
//! ```

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};

use sandwire_engine::io::xdp::XdpMode;
use sandwire_engine::io::{Raw, Ring, Tap, Waiter, Waker, Xdp, tap};
use sandwire_engine::{AppReport, Engine, Graph, GraphError};
use sandwire_testlab::command;
use sandwire_testlab::namespace::{self, Namespace};

use crate::offloads;

/// A kind of edge app, and the interface that it sits on.
#[derive(Clone, Copy)]
pub(crate) struct Edge {
    pub(crate) name: &'static str,
    /// Whether the sender's offloads reach the app, which then has to do their work.
    pub(crate) sees_offloads: bool,
    /// Makes `eth0` in the namespace of that side, and in the lab the interface of the app.
    pub(crate) connect: fn(&Side),
    /// Adds the app, by the side's name, to a graph.
    pub(crate) add: Add,
}

/// All edge apps that there are: a line each.
pub(crate) const EDGES: &[Edge] = &[
    on_veth("raw", |side, graph| {
        graph.app(side.name, Raw::interface(side.outer))
    }),
    on_veth("ring", |side, graph| {
        graph.app(side.name, Ring::interface(side.outer))
    }),
    on_veth("ring past the qdisc", |side, graph| {
        graph.app(side.name, Ring::interface(side.outer).bypass_qdisc())
    }),
    Edge {
        name: "tap",
        sees_offloads: false,
        connect: Side::connect_by_tap,
        add: |side, graph| graph.app(side.name, side.tap()),
    },
    Edge {
        sees_offloads: false,
        ..on_veth("xdp", |side, graph| {
            graph.app(side.name, Xdp::interface(side.outer))
        })
    },
    Edge {
        sees_offloads: false,
        ..on_veth("xdp, generic", |side, graph| {
            let xdp = Xdp::interface(side.outer).mode(XdpMode::Generic);
            graph.app(side.name, xdp)
        })
    },
];

type Add = for<'a> fn(&Side, &'a mut Graph) -> Result<&'a mut Graph, GraphError>;

/// An app on one end of a veth, to whom the other end's offloads come.
const fn on_veth(name: &'static str, add: Add) -> Edge {
    Edge {
        name,
        sees_offloads: true,
        connect: Side::connect_by_veth,
        add,
    }
}

/// One of the two hosts.
#[derive(Clone, Copy)]
pub(crate) struct Side {
    /// Of the namespace, and of the app.
    pub(crate) name: &'static str,
    /// The engine's interface.
    pub(crate) outer: &'static str,
    pub(crate) four: IpAddr,
    pub(crate) six: IpAddr,
}

pub(crate) const LEFT: Side = side("left", "left0", 1);
pub(crate) const RIGHT: Side = side("right", "right0", 2);

const fn side(name: &'static str, outer: &'static str, number: u8) -> Side {
    Side {
        name,
        outer,
        four: IpAddr::V4(Ipv4Addr::new(10, 9, 0, number)),
        six: IpAddr::V6(Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, number as u16)),
    }
}

impl Side {
    /// The wire's other end is in the namespace itself.
    fn connect_by_tap(&self) {
        let path = namespace::path_of(self.name);
        namespace::run_in(&path, "ip tuntap add name eth0 mode tap").unwrap();
    }

    /// That end's TAP.
    fn tap(&self) -> Tap {
        let path = namespace::path_of(self.name);
        let open = || Ok(tap::open("eth0", tap::Options::default())?);
        Tap::from_descriptor(namespace::inside(&path, open).unwrap(), self.name)
    }

    pub(crate) fn connect_by_veth(&self) {
        let Self { name, outer, .. } = self;
        run(&format!(
            "ip link add {outer} type veth peer name eth0 netns {name}"
        ));
        run(&format!("ip link set {outer} addrgenmode none up"));
    }
}

/// Both hosts.
pub(crate) struct World {
    pub(crate) left: Namespace,
    pub(crate) right: Namespace,
}

impl World {
    /// Both hosts, with their sides of these two edges.
    pub(crate) fn new(left: &Edge, right: &Edge) -> Self {
        let world = Self {
            left: Namespace::create(LEFT.name).unwrap(),
            right: Namespace::create(RIGHT.name).unwrap(),
        };
        for (edge, side, namespace) in [(left, LEFT, &world.left), (right, RIGHT, &world.right)] {
            (edge.connect)(&side);
            namespace.run("ip link set eth0 up").unwrap();
            for line in [
                format!("ip address add {}/24 dev eth0", side.four),
                format!("ip address add {}/64 dev eth0 nodad", side.six),
            ] {
                namespace.run(&line).unwrap();
            }
            namespace.inside(ask_for_neighbours_for_long).unwrap();
        }
        world
    }

    /// Two veth pairs with raw sockets.
    pub(crate) fn of_veths() -> Self {
        Self::new(&EDGES[0], &EDGES[0])
    }

    /// Turns checksum and segmentation offload of both hosts on or off.
    pub(crate) fn set_offloads(&self, on: bool) {
        for namespace in [&self.left, &self.right] {
            offloads::set(namespace, "eth0", on).unwrap();
        }
    }

    /// What the kernels of the hosts have found wrong with what they received.
    pub(crate) fn receive_errors(&self) -> Vec<String> {
        let mut errors = Vec::new();
        for namespace in [&self.left, &self.right] {
            let four = namespace.run("cat /proc/self/net/snmp").unwrap();
            let six = namespace.run("cat /proc/self/net/snmp6").unwrap();
            let counters = counters_of_four(&four)
                .into_iter()
                .chain(six.lines().filter_map(|line| {
                    let (name, value) = line.split_once(char::is_whitespace)?;
                    Some((name.to_owned(), value.trim().parse().ok()?))
                }));
            let wrong = counters.filter(|(name, value): &(String, u64)| {
                let is_error = name.ends_with("CsumErrors")
                    || name.ends_with("InHdrErrors")
                    || name.ends_with("InTruncatedPkts");
                is_error && *value > 0
            });
            errors
                .extend(wrong.map(|(name, value)| format!("{}: {name} {value}", namespace.name())));
        }
        errors
    }
}

/// A kernel gives a neighbour up, and drops all that waits for it, when three questions, a second apart, find no
/// answer: on a machine that has no time for the engine that is too soon.
fn ask_for_neighbours_for_long() -> anyhow::Result<()> {
    for family in ["ipv4", "ipv6"] {
        for questions in ["mcast_solicit", "ucast_solicit"] {
            let path = format!("/proc/sys/net/{family}/neigh/eth0/{questions}");
            fs::write(path, "120")?;
        }
    }
    Ok(())
}

impl Drop for World {
    fn drop(&mut self) {
        // A namespace's interfaces go some time after it; the next world wants their names.
        for side in [LEFT, RIGHT] {
            let _ = command::run(&format!("ip link delete {}", side.outer));
        }
    }
}

/// Lines of names, each followed by a line of values.
fn counters_of_four(text: &str) -> Vec<(String, u64)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut counters = Vec::new();
    for pair in lines.chunks_exact(2) {
        let names = pair[0].split_whitespace();
        for (name, value) in names.zip(pair[1].split_whitespace()).skip(1) {
            if let Ok(value) = value.parse() {
                counters.push((name.to_owned(), value));
            }
        }
    }
    assert!(counters.iter().any(|(name, _)| name == "InCsumErrors"));
    counters
}

/// An engine that runs on a thread of its own.
pub(crate) struct Forwarder {
    waker: Waker,
    thread: JoinHandle<Vec<AppReport>>,
}

impl Forwarder {
    /// Forwards both ways between two apps.
    pub(crate) fn between(left: &Edge, right: &Edge) -> Self {
        let (left, right) = (*left, *right);
        Self::start(move |graph| {
            (left.add)(&LEFT, graph)?;
            (right.add)(&RIGHT, graph)?;
            graph.link("left.output -> right.input")?;
            graph.link("right.output -> left.input")?;
            Ok(())
        })
    }

    /// Runs what `build` describes; returns when it runs.
    pub(crate) fn start(
        build: impl FnOnce(&mut Graph) -> Result<(), GraphError> + Send + 'static,
    ) -> Self {
        let (ready, is_ready) = mpsc::channel();
        let thread = thread::spawn(move || {
            let mut graph = Graph::new();
            build(&mut graph).unwrap();
            let mut engine = Engine::new();
            engine.configure(&graph).unwrap();
            let mut waiter = Waiter::new().unwrap();
            ready.send(waiter.waker()).unwrap();
            waiter.run(&mut engine, None, |_| false).unwrap();
            engine.report_apps()
        });
        match is_ready.recv() {
            Ok(waker) => Self { waker, thread },
            Err(_) => std::panic::resume_unwind(thread.join().unwrap_err()),
        }
    }

    /// Ends it; what its apps have counted.
    pub(crate) fn stop(self) -> Reports {
        self.waker.wake();
        Reports(self.thread.join().unwrap())
    }
}

/// What apps have counted.
pub(crate) struct Reports(pub(crate) Vec<AppReport>);

impl Reports {
    #[track_caller]
    pub(crate) fn figure(&self, app: &str, name: &str) -> u64 {
        let report = self.0.iter().find(|report| report.app == app).unwrap();
        let figure = report.figures.iter().find(|figure| figure.name == name);
        figure
            .unwrap_or_else(|| panic!("{app} has no figure {name}"))
            .value
    }

    /// The figures of causes for which the app dropped a packet. What the kernel dropped while the machine had no time
    /// for the engine is none of them.
    pub(crate) fn drops(&self) -> Vec<String> {
        let mut drops = Vec::new();
        for report in &self.0 {
            let dropping = report
                .figures
                .iter()
                .filter(|figure| figure.name.contains("_drop_"));
            let some = dropping.filter(|figure| figure.value > 0);
            drops.extend(
                some.map(|figure| format!("{}: {} {}", report.app, figure.name, figure.value)),
            );
        }
        drops
    }
}

#[track_caller]
pub(crate) fn run(line: &str) -> String {
    command::run(line).unwrap_or_else(|error| panic!("{error:#}"))
}

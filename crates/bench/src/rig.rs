//! Two hosts, and a third between them where an engine forwards; and a cable that joins the two directly.
//!
//! ```text
//!   left                 middle                 right
//!   eth0 ------------- if1   if2 ------------- eth0      198.18.0.0/24
//!   eth1 -------------------------------------- eth1     198.19.0.0/24
//! ```
//!
//! All are veths. The hosts' neighbours are permanent and IPv6 is off, so nothing is on the wires but what somebody
//! sends.

use std::{
    fs,
    net::Ipv4Addr,
    sync::mpsc,
    thread::{self, JoinHandle},
    time::Instant,
};

use anyhow::{Context, Result, anyhow, ensure};
use sandwire_engine::{
    AppReport, Engine, Graph,
    io::{Raw, Ring, Waiter, Waker, xdp::Xdp},
    run::Clock,
};
use sandwire_impair::app::{Direction, Line};
use sandwire_kernel_net::netns::Home;

use crate::{
    cpu,
    packet::Mac,
    world::{batch, inside, run_line, set},
};

/// The right host, by way of the middle.
pub(crate) const RIGHT: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 2);
/// The left host.
pub(crate) const LEFT: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
/// The right host, by the direct cable.
pub(crate) const RIGHT_DIRECT: Ipv4Addr = Ipv4Addr::new(198, 19, 0, 2);
/// Interfaces of the middle, from left to right.
pub(crate) const INTERFACES: [&str; 2] = ["if1", "if2"];
/// The interface of left and right that leads to the middle.
pub(crate) const OUTER: &str = "eth0";
/// The address of the left host's interface.
pub(crate) const LEFT_MAC: Mac = [0x02, 0xbe, 0x20, 0, 0, 0x01];

/// The three namespaces. They go with it.
pub(crate) struct Rig {
    pub(crate) left: String,
    pub(crate) middle: String,
    pub(crate) right: String,
}

impl Rig {
    /// Builds the namespaces under that name.
    pub(crate) fn build(name: &str) -> Result<Self> {
        let namespace = |part: &str| format!("{name}-{part}");
        let rig = Self {
            left: namespace("left"),
            middle: namespace("middle"),
            right: namespace("right"),
        };
        let Self {
            left,
            middle,
            right,
        } = &rig;
        for namespace in [left, middle, right] {
            run_line(&format!("ip netns add {namespace}"))?;
        }
        batch(
            middle,
            &format!(
                "link add if1 type veth peer name eth0 address 02:be:20:00:00:01 netns {left}
                link add if2 type veth peer name eth0 address 02:be:20:00:00:02 netns {right}"
            ),
        )?;
        batch(
            left,
            &format!(
                "link add eth1 address 02:be:20:00:00:11 type veth peer name eth1 address 02:be:20:00:00:12 netns {right}"
            ),
        )?;
        let interfaces: [(&String, [&str; 2]); 3] = [
            (left, ["eth0", "eth1"]),
            (middle, INTERFACES),
            (right, ["eth0", "eth1"]),
        ];
        for (namespace, names) in interfaces {
            inside(namespace, || {
                let mut names = names.into_iter();
                names.try_for_each(|name| set(&format!("ipv6/conf/{name}/disable_ipv6"), "1"))
            })?;
            let up = names.map(|name| format!("link set {name} up"));
            batch(namespace, &format!("link set lo up\n{}", up.join("\n")))?;
        }
        address(left, 1, 2)?;
        address(right, 2, 1)?;
        Ok(rig)
    }

    /// What the interfaces `if1` (of the middle) and `eth0` (of the right host) have received.
    pub(crate) fn received(&self) -> Result<[Received; 2]> {
        Ok([
            Received::of(&self.middle, INTERFACES[0])?,
            Received::of(&self.right, OUTER)?,
        ])
    }
}

/// Addresses and neighbours of one of the hosts.
fn address(namespace: &str, own: u8, other: u8) -> Result<()> {
    batch(
        namespace,
        &format!(
            "address add 198.18.0.{own}/24 dev eth0
            address add 198.19.0.{own}/24 dev eth1
            neighbour add 198.18.0.{other} lladdr 02:be:20:00:00:0{other} dev eth0 nud permanent
            neighbour add 198.19.0.{other} lladdr 02:be:20:00:00:1{other} dev eth1 nud permanent"
        ),
    )
}

impl Drop for Rig {
    fn drop(&mut self) {
        // Whatever this leaves ends with the namespaces of the benchmark.
        for namespace in [&self.left, &self.middle, &self.right] {
            let _ = run_line(&format!("ip netns delete {namespace}"));
        }
    }
}

/// What an interface had received at some time, by its own counters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Received {
    pub(crate) at: Instant,
    pub(crate) bytes: u64,
    pub(crate) packets: u64,
}

impl Received {
    fn of(namespace: &str, interface: &str) -> Result<Self> {
        let (at, text) = inside(namespace, || {
            let text = fs::read_to_string("/proc/thread-self/net/dev");
            Ok((Instant::now(), text.context("cannot read net/dev")?))
        })?;
        let (bytes, packets) = counters_of(&text, interface)
            .with_context(|| format!("no counters of {interface} in {namespace}"))?;
        Ok(Self { at, bytes, packets })
    }

    /// Packets and bytes per second since `before`.
    pub(crate) fn rate_since(&self, before: &Self) -> (f64, f64) {
        let seconds = self.at.duration_since(before.at).as_secs_f64();
        let per_second = |now: u64, before: u64| real(now - before) / seconds;
        (
            per_second(self.packets, before.packets),
            per_second(self.bytes, before.bytes),
        )
    }
}

/// Bytes and packets received, by the text of `/proc/net/dev`.
fn counters_of(text: &str, interface: &str) -> Option<(u64, u64)> {
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    let (_, figures) = lines.find(|(name, _)| name.trim() == interface)?;
    let mut figures = figures.split_whitespace();
    let mut next = || figures.next()?.parse().ok();
    Some((next()?, next()?))
}

/// An app for an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Edge {
    Raw,
    Ring,
    Xdp,
}

impl Edge {
    pub(crate) const ALL: [Self; 3] = [Self::Raw, Self::Ring, Self::Xdp];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Ring => "ring",
            Self::Xdp => "xdp",
        }
    }

    /// Adds an app of this kind, by the name of its interface.
    pub(crate) fn add(self, graph: &mut Graph, interface: &str) -> Result<()> {
        match self {
            Self::Raw => graph.app(interface, Raw::interface(interface))?,
            Self::Ring => graph.app(interface, Ring::interface(interface))?,
            Self::Xdp => graph.app(interface, Xdp::interface(interface))?,
        };
        Ok(())
    }

    /// A graph that hands on what comes between the interfaces of the middle, both ways.
    pub(crate) fn forwarder(self) -> Result<Graph> {
        let mut graph = Graph::new();
        for interface in INTERFACES {
            self.add(&mut graph, interface)?;
        }
        graph.links("if1.output -> if2.input\nif2.output -> if1.input")?;
        Ok(graph)
    }
}

/// How an engine waits when it has nothing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    Sleeping,
    Polling,
}

impl Pace {
    pub(crate) const ALL: [Self; 2] = [Self::Sleeping, Self::Polling];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Sleeping => "sleeping",
            Self::Polling => "polling",
        }
    }
}

/// An engine that runs in a thread of its own, in a namespace, on one processor.
pub(crate) struct EngineThread {
    waker: Waker,
    thread: Option<JoinHandle<Result<Vec<AppReport>>>>,
}

/// Where and how an engine runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Post<'a> {
    /// The namespace.
    pub(crate) namespace: &'a str,
    /// The processor, counted from the last.
    pub(crate) processor: usize,
    pub(crate) pace: Pace,
}

impl EngineThread {
    /// Starts an engine with the graph that `graph` makes in its thread; returns when it is about to run.
    pub(crate) fn start(
        post: Post<'_>,
        graph: impl FnOnce(Clock) -> Result<Graph> + Send + 'static,
    ) -> Result<Self> {
        let Post {
            processor, pace, ..
        } = post;
        let namespace = post.namespace.to_owned();
        let (ready, when_ready) = mpsc::channel();
        let thread = thread::spawn(move || {
            let _inside = Home::here()?.enter(&namespace)?;
            cpu::pin(processor)?;
            let mut waiter = Waiter::new()?.polling(pace == Pace::Polling);
            let mut engine = Engine::new();
            engine.configure(&graph(waiter.clock())?)?;
            // Whoever started this waits for it.
            let _ = ready.send(waiter.waker());
            drop(ready);
            waiter.run(&mut engine, None, |_| false)?;
            Ok(engine.report_apps())
        });
        match when_ready.recv() {
            Ok(waker) => Ok(Self {
                waker,
                thread: Some(thread),
            }),
            Err(_) => {
                let outcome = thread.join();
                let outcome = outcome.map_err(|_| anyhow!("an engine's thread panicked"))?;
                outcome?;
                Err(anyhow!("an engine ended before it began"))
            }
        }
    }

    /// Stops it; what its apps have counted.
    pub(crate) fn end(mut self) -> Result<Vec<AppReport>> {
        self.stop().context("an engine ended in mid-run")
    }

    fn stop(&mut self) -> Result<Vec<AppReport>> {
        self.waker.wake();
        let thread = self.thread.take().context("it has ended before")?;
        let outcome = thread.join();
        outcome.map_err(|_| anyhow!("an engine's thread panicked"))?
    }
}

impl Drop for EngineThread {
    fn drop(&mut self) {
        if self.thread.is_some() {
            // The error that led here says more.
            let _ = self.stop();
        }
    }
}

/// The app that does what a text says to packets from left to right.
pub(crate) fn impaired(text: &str) -> Result<Line> {
    let impairment = text
        .parse()
        .with_context(|| format!("`{text}` is no impairment"))?;
    Ok(Line::new(&impairment, Direction::Egress, 0)?)
}

/// One number of an app's report.
pub(crate) fn figure(reports: &[AppReport], app: &str, name: &str) -> Result<u64> {
    let report = reports.iter().find(|report| report.app == app);
    let figures = &report.with_context(|| format!("no app {app}"))?.figures;
    let found = figures.iter().find(|figure| figure.name == name);
    ensure!(found.is_some(), "app {app} does not report {name}");
    Ok(found.map_or(0, |figure| figure.value))
}

#[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
pub(crate) fn real(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interfaces_counters_are_found_by_its_name() {
        let text = "Inter-|   Receive\n face |bytes    packets errs\n    lo:     0       0    0\n\
                    eth0: 6000 100 0 0 0 0 0 0 1 2\n eth01: 5 6 0\n";
        assert_eq!(counters_of(text, "eth0"), Some((6000, 100)));
        assert_eq!(counters_of(text, "eth01"), Some((5, 6)));
        assert_eq!(counters_of(text, "eth"), None);
    }

    #[test]
    fn a_rate_is_of_the_time_between() {
        let before = Received {
            at: Instant::now(),
            bytes: 100,
            packets: 10,
        };
        let after = Received {
            at: before.at + std::time::Duration::from_millis(500),
            bytes: 700,
            packets: 20,
        };
        assert_eq!(after.rate_since(&before), (20.0, 1200.0));
    }
}

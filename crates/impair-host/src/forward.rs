//! A forwarder between two interfaces: what comes in at one goes out at the other, impaired each way or not.
//!
//! ```text
//!  interface A ══ if1 ──► ab ──► if2 ══ interface B
//!                  ▲              │
//!                  └───── ba ◄────┘
//! ```
//!
//! The graph is configured anew for every change, and what is the same goes on with its packets. To end without losing
//! what is under way, the ways in are taken out of the graph and the engine runs until nothing is left.

mod edge;
mod room;

use std::{iter::Peekable, os::fd::AsFd, path::PathBuf, time::Duration};

use sandwire_api::impairment::{Impairment, LineReport};
use sandwire_engine::{
    AppReport, ConfigureError, Engine, Graph, GraphError, LinkReport, Links, Load, PoolError,
    PoolLimits, Time,
    apps::Join,
    io::{Stop, Waiter, wait::WaitError},
};
use sandwire_impair::{
    app::{Line, LineApp},
    compile::{CompileError, Compiled},
    scenario::{Change, Changes},
};
use sandwire_kernel_net::{
    Error as KernelError,
    interface::{self, Interface, InterfaceIndex},
    netlink::Socket,
};

pub use self::edge::Edge;
use self::edge::EdgeApp;
use crate::{
    error::chain,
    record::{RecordError, Recording, Way},
};

/// The only link of the only engine: what tells its random numbers from others'.
pub(crate) const LINK: u64 = 0;
/// Names of the two ways, as of their apps.
const WAYS: [&str; 2] = ["ab", "ba"];
/// How long the end may wait for packets that are under way.
pub const DRAIN_MAX: Duration = Duration::from_secs(10);
/// How long packets are carried between two changes of a scenario at least, and signals heard.
const CHANGE_PACE: Duration = Duration::from_millis(1);
/// How many changes of a scenario that are due are looked at in one go.
const CHANGES_AT_ONCE: u32 = 1000;

/// What is to be forwarded, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Names of the two interfaces.
    pub interfaces: [String; 2],
    /// How packets are fetched from them.
    pub edge: Edge,
    /// Whether to look for packets all the time, for less latency and a whole processor.
    pub polling: bool,
    /// What happens to packets; egress is from the first to the second.
    pub impairment: Impairment,
    /// What may take its place by [`Forwarder::change`]: there is room for the queues of each. It can't change if there is
    /// none.
    pub later: Vec<Impairment>,
    /// Folder to record the run in, if it is to be; such a run can't change.
    pub record: Option<PathBuf>,
}

impl Settings {
    fn may_change(&self) -> bool {
        !self.later.is_empty()
    }
}

/// Why nothing is forwarded.
#[derive(Debug, thiserror::Error)]
pub enum ForwardError {
    /// Both are the same.
    #[error("cannot forward between {first} and {second}: they are the same interface; name two")]
    Same {
        /// One.
        first: String,
        /// The other.
        second: String,
    },
    /// There is none of that name.
    #[error(
        "cannot forward by {interface}: there is no such interface in this network namespace; those that there are: {known}"
    )]
    Missing {
        /// Its name.
        interface: String,
        /// All names, but for the loopback interface's.
        known: String,
    },
    /// It is down.
    #[error("cannot forward by {interface}: it is down; raise it: ip link set {interface} up")]
    Down {
        /// Its name.
        interface: String,
    },
    /// No Ethernet, or the host's own.
    #[error("cannot forward by {interface}: {reason}")]
    Kind {
        /// Its name.
        interface: String,
        /// Why it can't be.
        reason: &'static str,
    },
    /// Its packets are too long.
    #[error(
        "cannot forward by {interface}: its MTU is {mtu}, and a packet here holds at most {mtu_max}; lower it: ip link \
         set {interface} mtu {mtu_max}{}", if *is_xdp { "; or take --edge ring" } else { "" }
    )]
    Mtu {
        /// Its name.
        interface: String,
        /// What it has.
        mtu: u32,
        /// What it may have.
        mtu_max: u32,
        /// Whether it may have more by another edge.
        is_xdp: bool,
    },
    /// The kernel doesn't say what there is.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The engine didn't take the graph.
    #[error("cannot forward: {}", chain(.0))]
    Configure(#[from] ConfigureError),
    /// The graph can't be written.
    #[error("cannot forward: {0}")]
    Graph(#[from] GraphError),
    /// The impairment can't be carried out.
    #[error("cannot forward: {0}")]
    Impairment(#[from] CompileError),
    /// A change of what can't change.
    #[error("cannot change what is forwarded: it wasn't said at the start that it may change")]
    Fixed,
    /// The run can't be recorded.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The system lets nobody wait for packets.
    #[error("cannot forward: {}", chain(.0))]
    Wait(#[from] WaitError),
    /// There can't be packets of that length.
    #[error("cannot forward: {0}")]
    Pool(#[from] PoolError),
}

impl ForwardError {
    /// Whether what was asked for can't be, so that nothing was tried.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        !matches!(
            self,
            Self::Kernel(_)
                | Self::Configure(_)
                | Self::Wait(_)
                | Self::Pool(_)
                | Self::Record(RecordError::Disk { .. })
        )
    }
}

/// A running forwarder.
pub struct Forwarder {
    settings: Settings,
    interfaces: [Interface; 2],
    edges: [EdgeApp; 2],
    /// What happens to packets from the first to the second and back, if anything does.
    lines: Option<[Line; 2]>,
    /// What these have.
    compiled: Compiled,
    recording: Option<Recording>,
    /// Links of the ways in as they were when these were taken out.
    closed: Vec<LinkReport>,
    engine: Engine,
    waiter: Waiter,
    socket: Socket,
}

/// What a forwarder has done.
#[derive(Debug)]
pub struct Report {
    /// Since the last report.
    pub load: Load,
    /// Since the start.
    pub links: Links,
    /// Since the start.
    pub apps: Vec<AppReport>,
    /// What happened to packets, `ab` and `ba`; empty if nothing was to.
    pub lines: Vec<(&'static str, LineReport)>,
    /// What is the matter with the interfaces, and with the recording.
    pub troubles: Vec<String>,
}

impl Report {
    /// Whether all packets were released in time. If not, nothing that was measured meanwhile is worth much.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.lines.iter().all(|(_, line)| line.valid)
    }
}

/// How a forwarder has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// Packets that were under way and have been released.
    pub released: u64,
    /// Packets that were under way and have been dropped.
    pub flushed: u64,
}

impl Forwarder {
    /// Starts between the two interfaces, in the network namespace of the calling thread. Nothing is forwarded
    /// before [`Forwarder::run`].
    ///
    /// # Errors
    /// What keeps it from that; nothing has changed.
    pub fn start(settings: Settings) -> Result<Self, ForwardError> {
        let mut socket = Socket::route()?;
        let [first, second] = &settings.interfaces;
        let edge = settings.edge;
        let interfaces = [
            find(&mut socket, first, edge)?,
            find(&mut socket, second, edge)?,
        ];
        if interfaces[0].index == interfaces[1].index {
            let (first, second) = (first.clone(), second.clone());
            return Err(ForwardError::Same { first, second });
        }
        let mtu = interfaces[0].mtu.max(interfaces[1].mtu);
        let usual = PoolLimits::default();
        let frame_bytes = u16::try_from(mtu + edge.header_bytes()).unwrap_or(u16::MAX);
        let limits = PoolLimits {
            packets_max: room::packets_max(settings.later.iter().chain([&settings.impairment])),
            frame_bytes_max: frame_bytes.max(usual.frame_bytes_max),
        };
        let is_line_needed =
            settings.may_change() || settings.record.is_some() || !settings.impairment.is_nothing();
        let compiled = match is_line_needed {
            true => Compiled::new(&settings.impairment)?,
            false => Compiled::default(),
        };
        let lines = is_line_needed.then(|| <[Line; 2]>::from(Line::pair_of(&compiled, LINK)));
        let mut forwarder = Self {
            lines,
            compiled,
            engine: Engine::with_limits(limits)?,
            waiter: Waiter::new()?.polling(settings.polling),
            edges: interfaces
                .each_ref()
                .map(|interface| EdgeApp::new(edge, &interface.name, interface.mtu)),
            settings,
            interfaces,
            socket,
            recording: None,
            closed: Vec::new(),
        };
        forwarder.configure(true)?;
        if let Some(folder) = &forwarder.settings.record {
            let impairment = &forwarder.settings.impairment;
            let recording = Recording::create(folder, impairment, &forwarder.waiter.clock())?;
            forwarder.record(recording)?;
        }
        Ok(forwarder)
    }

    /// Puts what records into the graph, and takes the first breath.
    fn record(&mut self, mut recording: Recording) -> Result<(), ForwardError> {
        for way in WAYS {
            if let Some(line) = self.engine.app_mut::<LineApp>(way) {
                line.observe(Some(recording.observer()));
            }
        }
        let now = self.waiter.clock().now();
        recording.begin(now)?;
        self.recording = Some(recording);
        self.configure(true)?;
        self.engine.breathe(now);
        Ok(())
    }

    /// Lets something else happen to packets from the next breath on. None is lost by it.
    ///
    /// # Errors
    /// It can't be carried out, or it wasn't said at the start that there would be changes; nothing has changed.
    pub fn change(&mut self, impairment: &Impairment) -> Result<(), ForwardError> {
        let Some([ab, ba]) = self.lines.as_ref().filter(|_| self.settings.may_change()) else {
            return Err(ForwardError::Fixed);
        };
        let compiled = Compiled::after(impairment, &self.settings.impairment, &self.compiled)?;
        let lines = [ab.changed_to(&compiled), ba.changed_to(&compiled)];
        let before = self.lines.replace(lines);
        if let Err(error) = self.configure(true) {
            // The engine goes on with them, and a later graph is to have what it has.
            self.lines = before;
            return Err(error);
        }
        self.compiled = compiled;
        self.settings.impairment = impairment.clone();
        Ok(())
    }

    /// The engine's time.
    #[must_use]
    pub fn now(&self) -> Time {
        self.waiter.clock().now()
    }

    /// The two interfaces as they were at the start.
    #[must_use]
    pub fn interfaces(&self) -> &[Interface; 2] {
        &self.interfaces
    }

    /// What has been set.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Ends [`Forwarder::run`] and the wait of [`Forwarder::end`] when this descriptor has something to read.
    ///
    /// # Errors
    /// There are no more descriptors.
    pub fn interrupt_by(&mut self, descriptor: impl AsFd) -> Result<(), ForwardError> {
        self.waiter.watch(descriptor)?;
        Ok(())
    }

    /// Forwards until then; true if it was interrupted before.
    ///
    /// # Errors
    /// The system lets nobody wait.
    pub fn run(&mut self, end: Time) -> Result<bool, ForwardError> {
        let stop = self.waiter.run(&mut self.engine, Some(end), |_| false)?;
        Ok(matches!(stop, Stop::Descriptor(_) | Stop::Woken))
    }

    /// Forwards until then, and meanwhile does what a scenario says, whose moments count from `start`; true if it was
    /// interrupted before. Of changes that are due together only the last is made, and packets go on between any two:
    /// a scenario may have more of them than can be made in time.
    ///
    /// # Errors
    /// The system lets nobody wait, or a change can't be made.
    pub fn play(
        &mut self,
        end: Time,
        start: Time,
        changes: &mut Peekable<Changes<'_>>,
    ) -> Result<bool, ForwardError> {
        loop {
            if let Some(change) = last_due(changes, start, self.now()) {
                self.change(&change.impairment)?;
            }
            let next = changes.peek().map(|change| moment_of(change, start));
            let soonest = self.now() + CHANGE_PACE;
            let until = next.map_or(end, |next| next.max(soonest).min(end));
            if self.run(until)? {
                return Ok(true);
            }
            if until == end {
                return Ok(false);
            }
        }
    }

    /// How packets are fetched.
    #[must_use]
    pub fn edge(&self) -> Edge {
        match &self.edges[0] {
            EdgeApp::Raw(_) => Edge::Raw,
            EdgeApp::Ring(_) => Edge::Ring,
            EdgeApp::Xdp(_) => Edge::Xdp,
        }
    }

    /// Ends it: takes no more packets in, and lets go those that are under way, each when it is due, until none is
    /// left, it is interrupted, or it has taken [`DRAIN_MAX`]; the rest is dropped. With `flush` all are.
    ///
    /// # Errors
    /// The engine doesn't take the graph without ways in, or the system lets nobody wait.
    pub fn end(&mut self, flush: bool) -> Result<Ended, ForwardError> {
        self.closed = self.engine.report_links().0;
        // What waits on these for room at the way out goes with them.
        let lost = self.configure(false)?;
        let before = self.under_way();
        if !flush && before > 0 {
            let end = self.waiter.clock().now() + DRAIN_MAX;
            let is_empty = |engine: &Engine| engine.pool_counters().in_use() == 0;
            self.waiter.run(&mut self.engine, Some(end), is_empty)?;
        }
        if let Some(recording) = &mut self.recording {
            recording.end(self.engine.now())?;
        }
        let flushed = self.under_way();
        Ok(Ended {
            released: before.saturating_sub(flushed),
            flushed: flushed + lost,
        })
    }

    fn under_way(&self) -> u64 {
        self.engine.pool_counters().in_use()
    }

    /// What it has done.
    pub fn report(&mut self) -> Report {
        let load = self.waiter.report_load(&mut self.engine);
        let recording = self.recording.as_ref().and_then(Recording::trouble);
        let troubles = [0, 1].into_iter().filter_map(|which| self.trouble(which));
        Report {
            troubles: troubles.chain(recording).collect(),
            load,
            links: self.report_links(),
            apps: self.engine.report_apps(),
            lines: self.report_lines(),
        }
    }

    /// What is the matter with an interface.
    fn trouble(&mut self, which: usize) -> Option<String> {
        let InterfaceIndex(index) = self.interfaces[which].index;
        let name = self.interfaces[which].name.clone();
        match interface::find_by_index(&mut self.socket, InterfaceIndex(index)) {
            Ok(None) => Some(format!("{name} is gone")),
            Ok(Some(now)) if !now.is_up => Some(format!("{name} is down")),
            Ok(Some(now)) if now.name != name => Some(format!("{name} is called {} now", now.name)),
            Ok(Some(now)) if now.mtu > self.interfaces[which].mtu => Some(format!(
                "the MTU of {name} was raised to {}; longer packets than before are dropped",
                now.mtu
            )),
            Ok(Some(_)) => None,
            Err(error) => Some(error.to_string()),
        }
    }

    fn report_links(&self) -> Links {
        let mut links = self.engine.report_links().0;
        for closed in &self.closed {
            if links.iter().all(|known| known.link != closed.link) {
                links.push(closed.clone());
            }
        }
        links.sort_by(|one, other| one.link.cmp(&other.link));
        Links(links)
    }

    fn report_lines(&self) -> Vec<(&'static str, LineReport)> {
        let now = self.engine.now();
        let lines = WAYS.into_iter().filter_map(|way| {
            let line = self.engine.app::<LineApp>(way)?;
            Some((way, line.line_report(now)))
        });
        lines.collect()
    }

    /// Puts the graph together, with ways in or without; how many packets were on links that are gone.
    fn configure(&mut self, is_open: bool) -> Result<u64, ForwardError> {
        let mut graph = Graph::new();
        for (name, edge) in ["if1", "if2"].into_iter().zip(&self.edges) {
            edge.add_to(&mut graph, name)?;
        }
        match &self.lines {
            None if is_open => {
                graph.links("if1.output -> if2.input \n if2.output -> if1.input")?;
            }
            None => {}
            Some(lines) => {
                for (way, line) in WAYS.into_iter().zip(lines) {
                    graph.app(way, line.clone())?;
                }
                if self.answers() {
                    graph.app("to1", Join)?.app("to2", Join)?;
                    graph.links(
                        "ab.output -> to2.packets \n ba.back -> to2.answers \n to2.output -> if2.input \n\
                         ba.output -> to1.packets \n ab.back -> to1.answers \n to1.output -> if1.input",
                    )?;
                } else {
                    graph.links("ab.output -> if2.input \n ba.output -> if1.input")?;
                }
                if let Some(recording) = &self.recording {
                    graph
                        .app("record-ab", recording.tap(Way::Ab))?
                        .app("record-ba", recording.tap(Way::Ba))?;
                    graph.links("record-ab.output -> ab.input \n record-ba.output -> ba.input")?;
                }
                if is_open {
                    let ways_in = if self.recording.is_some() {
                        "if1.output -> record-ab.input \n if2.output -> record-ba.input"
                    } else {
                        "if1.output -> ab.input \n if2.output -> ba.input"
                    };
                    graph.links(ways_in)?;
                }
            }
        }
        Ok(self.engine.configure(&graph)?.flushed)
    }

    /// Whether packets that are too long may be answered.
    fn answers(&self) -> bool {
        let rules = &self.settings.impairment.rules;
        self.settings.may_change() || rules.iter().any(|rule| rule.mtu.is_some())
    }
}

/// When a change of a scenario that began at `start` is due.
fn moment_of(change: &Change, start: Time) -> Time {
    start + Duration::from_nanos(change.at)
}

/// The last of the changes that are due, of so many that packets don't wait for the looking.
fn last_due(
    changes: &mut Peekable<impl Iterator<Item = Change>>,
    start: Time,
    now: Time,
) -> Option<Change> {
    let due = |_| changes.next_if(|change| moment_of(change, start) <= now);
    (0..CHANGES_AT_ONCE).map_while(due).last()
}

/// The interface of that name, if packets can be forwarded by it.
fn find(socket: &mut Socket, name: &str, edge: Edge) -> Result<Interface, ForwardError> {
    let Some(found) = interface::find(socket, name)? else {
        let all = interface::list(socket)?;
        let known = all.iter().filter(|it| it.index != InterfaceIndex::LOOPBACK);
        let known: Vec<&str> = known.map(|interface| interface.name.as_str()).collect();
        return Err(ForwardError::Missing {
            interface: name.to_owned(),
            known: if known.is_empty() {
                "none".to_owned()
            } else {
                known.join(", ")
            },
        });
    };
    let interface = name.to_owned();
    if found.index == InterfaceIndex::LOOPBACK {
        let reason = "it is the host's loopback interface; use a veth pair or a TAP";
        return Err(ForwardError::Kind { interface, reason });
    }
    if found.mac.is_none() {
        let reason = "it carries no Ethernet frames; use a veth pair, a TAP or a network card";
        return Err(ForwardError::Kind { interface, reason });
    }
    if !found.is_up {
        return Err(ForwardError::Down { interface });
    }
    if found.mtu > edge.mtu_max() {
        return Err(ForwardError::Mtu {
            interface,
            mtu: found.mtu,
            mtu_max: edge.mtu_max(),
            is_xdp: edge == Edge::Xdp,
        });
    }
    Ok(found)
}

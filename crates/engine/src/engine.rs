//! The engine: the apps and links of one graph, breathing.
//!
//! A breath has two halves. All apps `pull`, which brings packets in; then all apps with inputs `push`, each after
//! those that feed it, so that what came in is dealt with while it is in the cache. One thread runs an engine;
//! a process may have as many engines as it likes, which share nothing.
//!
//! The engine reads no clock and never sleeps: [`Engine::breathe`] gets the time, and says when it wants to breathe
//! again. [`run`](crate::run) is the loop that has a clock.

#![forbid(unsafe_code)]

mod configure;

use std::any::Any;
use std::rc::Rc;

use crate::app::{App, Figure, SharedConfig, Wake};
use crate::error::{ConfigureError, PoolError};
use crate::graph::{Graph, LinkName};
use crate::link::Link;
use crate::pool::{Pool, PoolCounters, PoolLimits};
use crate::ports::{Activity, Ports};
use crate::report::{AppReport, LinkReport, Links, Load, Mark};
use crate::time::Time;
use crate::watch::Watch;

/// Apps, links and packets.
pub struct Engine {
    /// By name.
    apps: Vec<Node>,
    links: Vec<Link>,
    /// As `links`.
    link_names: Vec<LinkName>,
    /// Apps with inputs, in the order of `push`.
    push_order: Vec<u32>,
    pool: Pool,
    breaths: u64,
    now: Time,
    mark: Mark,
    /// Another with every graph, and with every engine.
    configuration: Rc<()>,
}

/// An app in its place.
struct Node {
    name: String,
    config: SharedConfig,
    app: Box<dyn App>,
    /// Indices of links by input port.
    inputs: Vec<u32>,
    /// Indices of links by output port.
    outputs: Vec<u32>,
    sent_nowhere: u64,
}

/// What a breath did, and when the next is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Breath {
    /// Packets that were sent, moved or freed, each time that they were. After a breath with none nothing will change
    /// until `wake`.
    pub moved: u64,
    /// When to breathe again if nothing moved.
    pub wake: Wake,
}

/// What [`Engine::configure`] did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Changes {
    /// Apps that are new, or were built anew.
    pub started: Vec<String>,
    /// Apps that run on with another description.
    pub changed: Vec<String>,
    /// Apps that are gone, or were built anew.
    pub stopped: Vec<String>,
    /// Packets on links that are gone; they went back to the pool.
    pub flushed: u64,
}

impl Engine {
    /// An engine without apps, with a pool of the default limits.
    #[must_use]
    pub fn new() -> Self {
        Self::with_pool(Pool::default())
    }

    /// An engine without apps, whose pool has these limits.
    ///
    /// # Errors
    ///
    /// If there can be no such pool.
    pub fn with_limits(limits: PoolLimits) -> Result<Self, PoolError> {
        Ok(Self::with_pool(Pool::new(limits)?))
    }

    fn with_pool(pool: Pool) -> Self {
        Self {
            apps: Vec::new(),
            links: Vec::new(),
            link_names: Vec::new(),
            push_order: Vec::new(),
            pool,
            breaths: 0,
            now: Time::START,
            mark: Mark::default(),
            configuration: Rc::default(),
        }
    }

    /// Makes the engine follow `graph`. Apps whose description is the same, and links between the same ports, stay as
    /// they are, with all packets; so do links whose apps change.
    ///
    /// # Errors
    ///
    /// If the graph doesn't fit together or an app doesn't start. Nothing has changed then.
    pub fn configure(&mut self, graph: &Graph) -> Result<Changes, ConfigureError> {
        let changes = configure::configure(self, graph)?;
        self.configuration = Rc::default();
        Ok(changes)
    }

    /// Tells one graph of one engine from any other, for as long as somebody has it.
    pub(crate) fn configuration(&self) -> &Rc<()> {
        &self.configuration
    }

    /// The descriptors that packets come in by.
    pub fn watches(&self) -> impl Iterator<Item = Watch<'_>> {
        self.apps.iter().filter_map(|node| node.app.watch())
    }

    /// Lets every app do its part once. `now` must not go backwards.
    pub fn breathe(&mut self, now: Time) -> Breath {
        self.now = now;
        self.breaths += 1;
        let mut moved = 0;
        for node in &mut self.apps {
            moved += node.call(&mut self.links, &self.pool, |app, ports| {
                app.pull(now, ports);
            });
        }
        for &index in &self.push_order {
            let node = &mut self.apps[index as usize];
            moved += node.call(&mut self.links, &self.pool, |app, ports| {
                app.push(now, ports);
            });
        }
        let wake = if moved == 0 {
            self.wake()
        } else {
            Wake::at(now)
        };
        Breath { moved, wake }
    }

    /// When any of the apps wants to be called although no packet moves.
    fn wake(&self) -> Wake {
        let wakes = self.apps.iter().map(|node| node.app.wake());
        wakes.fold(Wake::default(), Wake::or)
    }

    /// The time of the last breath.
    #[must_use]
    pub fn now(&self) -> Time {
        self.now
    }

    /// What the pool has counted.
    #[must_use]
    pub fn pool_counters(&self) -> PoolCounters {
        self.pool.counters()
    }

    /// The load since the last call of this, or since the start. `sleep` is what the runner slept last, which the
    /// engine can't know; [`Runner`](crate::Runner) fills it in.
    pub fn report_load(&mut self) -> Load {
        let mark = Mark {
            time: self.now,
            breaths: self.breaths,
            pool: self.pool.counters(),
        };
        let load = Load::between(&self.mark, &mark);
        self.mark = mark;
        load
    }

    /// What links have carried since each was made, in the order of their names.
    #[must_use]
    pub fn report_links(&self) -> Links {
        let report = self.link_names.iter().zip(&self.links);
        Links(
            report
                .map(|(name, link)| LinkReport {
                    link: name.clone(),
                    counters: link.counters,
                })
                .collect(),
        )
    }

    /// What apps have counted, in the order of their names.
    #[must_use]
    pub fn report_apps(&self) -> Vec<AppReport> {
        let reports = self.apps.iter().map(|node| AppReport {
            app: node.name.clone(),
            sent_nowhere: node.sent_nowhere,
            figures: node.app.report(),
        });
        reports.collect()
    }

    /// The running app of that name, if it is an `A`.
    #[must_use]
    pub fn app<A: App>(&self, name: &str) -> Option<&A> {
        let node = self.apps.iter().find(|node| node.name == name)?;
        let app: &dyn Any = &*node.app;
        app.downcast_ref()
    }

    /// The running app of that name, if it is an `A`, to be changed between breaths.
    pub fn app_mut<A: App>(&mut self, name: &str) -> Option<&mut A> {
        let node = self.apps.iter_mut().find(|node| node.name == name)?;
        let app: &mut dyn Any = &mut *node.app;
        app.downcast_mut()
    }

    /// One number of an app's report.
    #[must_use]
    pub fn figure(&self, app: &str, figure: &str) -> Option<u64> {
        let node = self.apps.iter().find(|node| node.name == app)?;
        let mut figures = node.app.report().into_iter();
        figures
            .find(|Figure { name, .. }| *name == figure)
            .map(|figure| figure.value)
    }

    /// The names of apps in the order in which they push, after all have pulled.
    #[must_use]
    pub fn push_order(&self) -> Vec<&str> {
        let order = self.push_order.iter();
        order
            .map(|&index| self.apps[index as usize].name.as_str())
            .collect()
    }
}

impl Default for Engine {
    fn default() -> Self {
        Self::new()
    }
}

impl Node {
    /// Calls the app; how many packets it moved.
    #[inline]
    fn call(
        &mut self,
        links: &mut [Link],
        pool: &Pool,
        call: impl FnOnce(&mut dyn App, &mut Ports<'_>),
    ) -> u64 {
        let mut ports = Ports {
            links,
            inputs: &self.inputs,
            outputs: &self.outputs,
            pool,
            activity: Activity::default(),
        };
        call(&mut *self.app, &mut ports);
        self.sent_nowhere += ports.activity.nowhere;
        ports.activity.moved
    }
}

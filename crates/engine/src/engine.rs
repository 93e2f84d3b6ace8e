//! The engine: the apps and links of one graph, breathing.
//!
//! A graph falls into parts, within each of which links connect all apps. A breath goes through the parts that have
//! something to do, and each breathes in two halves. All its apps `pull`, which brings packets in; then all with inputs
//! `push`, each after those that feed it, so that what came in is dealt with while it is in the cache. A part that has
//! nothing to do rests, so hundreds of idle ones cost nothing. One thread runs an engine; a process may have as many
//! engines as it likes, which share nothing.
//!
//! The engine has no clock and never sleeps: [`Engine::breathe`] gets the time, or [`Engine::breathe_by`] a clock, and
//! says when it wants to breathe again. [`run`](crate::run) is the loop that has a clock.

#![forbid(unsafe_code)]

mod configure;
mod parts;

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

use parts::Parts;

/// Apps, links and packets.
pub struct Engine {
    /// By name.
    apps: Vec<Node>,
    links: Vec<Link>,
    /// As `links`.
    link_names: Vec<LinkName>,
    /// Apps in the order of `pull`: by part, then by name.
    pull_order: Vec<u32>,
    /// Apps with inputs in the order of `push`: by part, then each after those that feed it.
    push_order: Vec<u32>,
    parts: Parts,
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
    is_edge: bool,
    /// The part that it is in.
    part: usize,
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
            pull_order: Vec::new(),
            push_order: Vec::new(),
            parts: Parts::default(),
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

    /// Lets every app that has something to do, do its work once. `now` must not go backwards.
    pub fn breathe(&mut self, now: Time) -> Breath {
        self.breathe_by(|| now)
    }

    /// The same by a clock, so that packets that an edge app brings in are dealt with in the time when they had come, and
    /// not in that when the breath began: it is asked at the beginning of each part of the graph, and once more where
    /// edge apps brought packets in. A breath that finds nothing to do asks once.
    pub fn breathe_by(&mut self, mut clock: impl FnMut() -> Time) -> Breath {
        self.now = clock();
        self.breaths += 1;
        self.parts.wake_due(self.now);
        let mut moved = 0;
        let mut wake = Wake::default();
        let mut next = self.parts.next_awake(0);
        while let Some(part) = next {
            let refused = self.pool.refused();
            let moved_here = self.breathe_part(part, &mut clock);
            moved += moved_here;
            if moved_here == 0 {
                wake = wake.or(self.settle(part, refused));
            }
            next = self.parts.next_awake(part + 1);
            if next.is_some() {
                self.now = clock();
            }
        }
        let wake = if moved > 0 {
            Wake::at(self.now)
        } else {
            // Every part that is awake has been asked just now.
            let at = self.parts.deadline();
            wake.or(Wake { at, polls: false })
        };
        Breath { moved, wake }
    }

    /// Lets the apps of a part pull, then push; how many packets they moved.
    #[inline]
    fn breathe_part(&mut self, part: usize, clock: &mut impl FnMut() -> Time) -> u64 {
        let part = self.parts.get(part);
        let mut now = self.now;
        let mut moved = 0;
        let mut came = false;
        for &index in &self.pull_order[part.pulls.clone()] {
            let node = &mut self.apps[index as usize];
            let pulled = node.call(&mut self.links, &self.pool, |app, ports| {
                app.pull(now, ports);
            });
            came |= pulled > 0 && node.is_edge;
            moved += pulled;
        }
        if came {
            now = clock();
            self.now = now;
        }
        for &index in &self.push_order[part.pushes.clone()] {
            let node = &mut self.apps[index as usize];
            moved += node.call(&mut self.links, &self.pool, |app, ports| {
                app.push(now, ports);
            });
        }
        moved
    }

    /// Lets a part rest in which nothing moved, unless one of its apps could go on as soon as somebody else lets it: a
    /// packet waits on one of its links, a descriptor has more to read, or the pool, which had refused so many packets
    /// before, refused one. When its apps want to be called.
    #[inline(never)]
    fn settle(&mut self, part: usize, refused: u64) -> Wake {
        let mut wake = Wake::default();
        let mut goes_on = self.pool.refused() != refused;
        for &index in &self.pull_order[self.parts.get(part).pulls.clone()] {
            let node = &self.apps[index as usize];
            wake = wake.or(node.app.wake());
            goes_on = goes_on || node.has_packets(&self.links) || node.has_more_to_read();
        }
        if goes_on || wake.polls || wake.at.is_some_and(|at| at <= self.now) {
            self.parts.stay(part);
        } else {
            self.parts.rest(part, wake.at);
        }
        wake
    }

    /// The latest time that the apps have been told.
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

    /// Where the app of that name is among all, which may be thousands while packets wait.
    fn place_of(&self, name: &str) -> Option<usize> {
        let by_name = self
            .apps
            .binary_search_by(|node| node.name.as_str().cmp(name));
        by_name.ok()
    }

    /// The running app of that name, if it is an `A`.
    #[must_use]
    pub fn app<A: App>(&self, name: &str) -> Option<&A> {
        let node = &self.apps[self.place_of(name)?];
        let app: &dyn Any = &*node.app;
        app.downcast_ref()
    }

    /// The running app of that name, if it is an `A`, to be changed between breaths. The next breath calls it.
    pub fn app_mut<A: App>(&mut self, name: &str) -> Option<&mut A> {
        let place = self.place_of(name)?;
        let node = &mut self.apps[place];
        self.parts.wake(node.part);
        let app: &mut dyn Any = &mut *node.app;
        app.downcast_mut()
    }

    /// One number of an app's report.
    #[must_use]
    pub fn figure(&self, app: &str, figure: &str) -> Option<u64> {
        let node = &self.apps[self.place_of(app)?];
        let mut figures = node.app.report().into_iter();
        figures
            .find(|Figure { name, .. }| *name == figure)
            .map(|figure| figure.value)
    }

    /// The names of apps in the order in which they push, each after all of its part have pulled.
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

    /// Whether packets wait at an input.
    fn has_packets(&self, links: &[Link]) -> bool {
        let mut inputs = self.inputs.iter();
        inputs.any(|&input| {
            let link = links.get(input as usize);
            link.is_some_and(|link| link.queued() > 0)
        })
    }

    /// Whether it left something at its descriptor.
    fn has_more_to_read(&self) -> bool {
        let watch = self.app.watch();
        watch.is_some_and(|watch| watch.readiness.is_ready())
    }
}

#[cfg(test)]
mod tests;

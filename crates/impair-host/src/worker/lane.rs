//! One direction of a target: its TAP, its line, and its way out.

use std::{os::fd::OwnedFd, sync::Arc, time::Duration};

use sandwire_datapath::divert::{Diversion, Way};
use sandwire_engine::{
    App, Engine, Graph, GraphError, Time,
    apps::Join,
    io::{Tap, TapApp},
};
use sandwire_impair::app::{Line, LineApp};
use sandwire_kernel_net::{interface::InterfaceIndex, tc::Hook};

use super::{Id, LaneReport, LaneWay};
use crate::diversion::DivertedTap;

/// How long it is watched how many packets are outstanding when none is under way.
const WATCH: Duration = Duration::from_millis(10);
/// How long a moment is waited for at which none is.
const PATIENCE: Duration = Duration::from_millis(50);
/// How long the TAP is still read after the last packet can have been sent to it.
const LINGER: Duration = Duration::from_millis(10);

/// How far a lane is on its way out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// It carries packets.
    Carrying,
    /// Packets under way are let go, those that come queue behind them.
    Draining,
    /// There are none inside any more; it is found out how many are outstanding for ever.
    Watching { until: Time, least: u64 },
    /// Packets pass from the first moment on when none is under way.
    Settling { until: Time },
    /// Packets pass; what has been sent to the TAP before is read.
    Lingering { until: Time },
    /// Nothing comes any more.
    Passing,
}

/// One direction of a target.
#[derive(Debug)]
pub(super) struct Lane {
    tap: String,
    line: String,
    join: String,
    hook: Hook,
    index: InterfaceIndex,
    diversion: Arc<Diversion>,
    /// What its packets meet.
    config: Line,
    pub(super) phase: Phase,
}

/// What the TAP's app calls frames that don't fit.
const TOO_LONG: &str = "receive_drop_too_long";

impl Lane {
    pub(super) fn new(id: Id, way: &LaneWay, config: Line, diversion: Arc<Diversion>) -> Self {
        let name = match way.hook {
            Hook::Ingress => "ingress",
            Hook::Egress => "egress",
        };
        Self {
            tap: format!("{id}-{name}-tap"),
            line: format!("{id}-{name}-line"),
            join: format!("{id}-{name}-join"),
            hook: way.hook,
            index: way.tap.index,
            diversion,
            config,
            phase: Phase::Carrying,
        }
    }

    /// Adds its apps, and its way from the TAP through the line and back.
    pub(super) fn add(&self, graph: &mut Graph, tap: DivertedTap) -> Result<(), GraphError> {
        graph.app(&self.tap, Tap::from_descriptor(tap.descriptor, &tap.name))?;
        graph.app(&self.line, self.config.clone())?;
        graph.app(&self.join, Join)?;
        graph.connect((&self.tap, "output"), (&self.line, "input"))?;
        graph.connect((&self.line, "output"), (&self.join, "line"))?;
        graph.connect((&self.join, "output"), (&self.tap, "input"))?;
        Ok(())
    }

    /// Has what the line answers go the other way.
    pub(super) fn answer_by(&self, graph: &mut Graph, other: &Self) -> Result<(), GraphError> {
        graph.connect((&self.line, "back"), (&other.join, "answers"))?;
        Ok(())
    }

    /// Exchanges what its packets meet. The engine isn't configured anew, for which the packets of all targets would wait: the longer, the
    /// more there are.
    pub(super) fn change(
        &mut self,
        graph: &mut Graph,
        engine: &mut Engine,
        config: Line,
    ) -> Result<(), GraphError> {
        graph.replace(&self.line, config.clone())?;
        if let Some(line) = engine.app_mut::<LineApp>(&self.line) {
            line.change(&config);
        }
        self.config = config;
        Ok(())
    }

    pub(super) fn config(&self) -> &Line {
        &self.config
    }

    /// Its TAP, which is closed with this and the engine's. None if it is gone, or where no descriptor is left.
    pub(super) fn tap(&self, engine: &Engine) -> Option<OwnedFd> {
        let watch = engine.app::<TapApp>(&self.tap)?.watch()?;
        watch.descriptor.try_clone_to_owned().ok()
    }

    pub(super) fn remove(&self, graph: &mut Graph) {
        for app in [&self.tap, &self.line, &self.join] {
            graph.remove(app);
        }
    }

    /// Begins to let go what is inside, its rules having been taken away, or drops it; how many packets that is.
    pub(super) fn drain(&mut self, engine: &mut Engine, flush: bool) -> u64 {
        if self.phase == Phase::Carrying {
            self.phase = Phase::Draining;
        }
        let Some(line) = engine.app_mut::<LineApp>(&self.line) else {
            return 0;
        };
        if flush { line.flush() } else { line.inside() }
    }

    fn is_empty(&self, engine: &Engine) -> bool {
        let line = engine.app::<LineApp>(&self.line);
        line.is_none_or(LineApp::is_idle)
    }

    /// Goes on with what has begun.
    pub(super) fn advance(&mut self, engine: &Engine, now: Time) {
        self.phase = match self.phase {
            Phase::Draining if self.is_empty(engine) => Phase::Watching {
                until: now + WATCH,
                least: self.diversion.outstanding(self.hook),
            },
            Phase::Watching { until, least } if now < until => Phase::Watching {
                until,
                least: self.fewest(least),
            },
            Phase::Watching { least, .. } => {
                let lost = self.fewest(least);
                self.diversion.pass_when_empty(self.hook, self.index, lost);
                Phase::Settling {
                    until: now + PATIENCE,
                }
            }
            // Where it never is empty, or something was lost meanwhile, a packet may overtake another after all.
            Phase::Settling { until } if now >= until => {
                self.diversion.set_way(self.hook, Way::Pass);
                Phase::Lingering {
                    until: now + LINGER,
                }
            }
            Phase::Lingering { until } if now >= until => Phase::Passing,
            other => other,
        };
    }

    /// Packets can be under way, so the fewest outstanding are the best guess of those that never come back. They are
    /// compared as signed: a wrapped number is less than nothing.
    fn fewest(&self, least: u64) -> u64 {
        let now = self.diversion.outstanding(self.hook);
        if (now.wrapping_sub(least)).cast_signed() < 0 {
            now
        } else {
            least
        }
    }

    pub(super) fn report(&self, engine: &Engine, now: Time) -> LaneReport {
        let tap = engine.app::<TapApp>(&self.tap);
        let figures = tap.map(App::report).unwrap_or_default();
        let sum = |start: &str| -> u64 {
            let meant = figures
                .iter()
                .filter(|figure| figure.name.starts_with(start));
            meant.map(|figure| figure.value).sum()
        };
        let line = engine.app::<LineApp>(&self.line);
        LaneReport {
            unread: sum("receive_drop_") - sum(TOO_LONG),
            too_long: sum(TOO_LONG),
            refused: sum("send_drop_"),
            line: line.map(|line| line.line_report(now)).unwrap_or_default(),
        }
    }
}

//! What an app is, and what the engine must know to make one.
//!
//! A [`Config`] is a description: it is compared when a graph is configured anew, so an app whose description stayed
//! the same goes on with all that it has. An [`App`] is what runs.

#![forbid(unsafe_code)]

use std::any::Any;
use std::error::Error;
use std::fmt;
use std::rc::Rc;

use crate::pool::PoolLimits;
use crate::ports::Ports;
use crate::time::Time;
use crate::watch::Watch;

/// A running network function.
///
/// Both calls come once per breath, `pull` for all apps of its part of the graph first; a part is all that links connect,
/// however far. An app must return soon: while it runs, nobody else does. Whatever a port holds may stay there for the
/// next breath.
///
/// Breaths leave a part out in which nothing moved in the last one, and which has nothing to do: no packet on its links,
/// nothing left to read at a descriptor that somebody watches, no packet that the pool refused in that breath, and no app
/// whose [`wake`](App::wake) says now or again and again. They call the part again, with all its apps,
///
/// - when the first [`Wake::at`] has come that its apps answered,
/// - when the descriptor of a [`watch`](App::watch) of its apps has something, or is watched no more,
/// - after [`Engine::configure`], and after [`Engine::app_mut`] of one of its apps.
///
/// So a `wake` that promises too little loses nothing: what an app left on a link has it called again, and what it keeps
/// to itself waits until its part is called for another reason. One that asks for too much costs calls.
///
/// [`Engine::configure`]: crate::Engine::configure
/// [`Engine::app_mut`]: crate::Engine::app_mut
pub trait App: Any {
    /// Brings packets in from outside, or releases what is due.
    fn pull(&mut self, _now: Time, _ports: &mut Ports<'_>) {}

    /// Deals with the packets on the inputs. An app that has an input is called in every breath of its part, packets or
    /// not.
    fn push(&mut self, _now: Time, _ports: &mut Ports<'_>) {}

    /// When the app has something to do although no packet comes to its inputs and its [`watch`](App::watch) says
    /// nothing. Asked after a breath in which nothing moved in its part. An app that hears of things in other ways, by what
    /// it shares with others or by looking outside, answers [`Wake::polling`].
    fn wake(&self) -> Wake {
        Wake::default()
    }

    /// The descriptor that packets come in by, if there is one, so that somebody can wait for them.
    fn watch(&self) -> Option<Watch<'_>> {
        None
    }

    /// The app's own counters, for reports.
    fn report(&self) -> Vec<Figure> {
        Vec::new()
    }
}

/// What can become an app, and in which way a running one differs from it.
pub trait Config: PartialEq + fmt::Debug + 'static {
    /// What is built.
    type App: App;

    /// Input ports, in the order of their indices.
    fn inputs(&self) -> PortList;

    /// Output ports, in the order of their indices.
    fn outputs(&self) -> PortList;

    /// Whether what the app sends never depends on what it was given in the same breath, as with an app for a
    /// network interface: it sends in `pull` what came from outside, and takes outside in `push` what it is given.
    /// The order of apps depends on this; and packets that such an app brings in have come when it has read them, not when
    /// the breath began ([`Engine::breathe_by`](crate::Engine::breathe_by)).
    fn is_edge(&self) -> bool {
        false
    }

    /// Whether an engine whose pool has these limits can run the app; asked before it is built.
    ///
    /// # Errors
    ///
    /// If it can't, as when the frames of an interface are longer than the engine's packets.
    fn check(&self, _limits: PoolLimits) -> Result<(), BuildError> {
        Ok(())
    }

    /// Makes the app.
    ///
    /// # Errors
    ///
    /// Whatever keeps it from starting; the engine then changes nothing.
    fn build(&self) -> Result<Self::App, BuildError>;

    /// Whether an app built from `running` can take over this description by [`Config::apply`] and keep its state.
    /// Otherwise it is built anew. Its ports stay the same either way.
    fn keeps_state_of(&self, _running: &Self) -> bool {
        false
    }

    /// Makes a running app follow this description.
    fn apply(&self, _app: &mut Self::App) {}
}

/// Why an app could not be built.
pub type BuildError = Box<dyn Error + Send + Sync>;

/// The ports that an app has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PortList {
    /// Exactly these.
    Named(Vec<String>),
    /// Whatever ports the graph's lines name, sorted by name.
    Any,
}

impl PortList {
    /// No ports.
    #[must_use]
    pub fn none() -> Self {
        Self::Named(Vec::new())
    }

    /// Exactly these ports.
    #[must_use]
    pub fn named<const N: usize>(names: [&str; N]) -> Self {
        Self::Named(names.map(str::to_owned).to_vec())
    }
}

/// When somebody must act although no packet moves. The default is never: not before a packet comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Wake {
    /// No later than then.
    pub at: Option<Time>,
    /// Something outside may have packets at any time, so it is worth while to look again soon.
    pub polls: bool,
}

impl Wake {
    /// At that time.
    #[must_use]
    pub fn at(time: Time) -> Self {
        Self {
            at: Some(time),
            polls: false,
        }
    }

    /// Again and again.
    #[must_use]
    pub fn polling() -> Self {
        Self {
            at: None,
            polls: true,
        }
    }

    /// What satisfies both.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        let at = match (self.at, other.at) {
            (Some(one), Some(two)) => Some(one.min(two)),
            (one, two) => one.or(two),
        };
        Self {
            at,
            polls: self.polls || other.polls,
        }
    }
}

/// One number of an app's report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Figure {
    /// What it counts.
    pub name: &'static str,
    /// The count.
    pub value: u64,
}

impl Figure {
    /// A number by that name.
    #[must_use]
    pub fn new(name: &'static str, value: u64) -> Self {
        Self { name, value }
    }
}

/// A [`Config`] of a type that only it knows.
pub(crate) trait AnyConfig: fmt::Debug {
    fn inputs(&self) -> PortList;
    fn outputs(&self) -> PortList;
    fn is_edge(&self) -> bool;
    fn build(&self, limits: PoolLimits) -> Result<Box<dyn App>, BuildError>;
    fn relation(&self, running: &dyn AnyConfig) -> Relation;
    fn apply(&self, app: &mut dyn App);
    fn as_any(&self) -> &dyn Any;
}

/// A description that graphs and engines share.
pub(crate) type SharedConfig = Rc<dyn AnyConfig>;

/// How a description relates to that of the running app of the same name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Relation {
    Same,
    Applicable,
    Different,
}

impl<C: Config> AnyConfig for C {
    fn inputs(&self) -> PortList {
        Config::inputs(self)
    }

    fn outputs(&self) -> PortList {
        Config::outputs(self)
    }

    fn is_edge(&self) -> bool {
        Config::is_edge(self)
    }

    fn build(&self, limits: PoolLimits) -> Result<Box<dyn App>, BuildError> {
        Config::check(self, limits)?;
        Ok(Box::new(Config::build(self)?))
    }

    fn relation(&self, running: &dyn AnyConfig) -> Relation {
        match running.as_any().downcast_ref::<C>() {
            Some(running) if running == self => Relation::Same,
            Some(running) if self.keeps_state_of(running) => Relation::Applicable,
            _ => Relation::Different,
        }
    }

    fn apply(&self, app: &mut dyn App) {
        let app: &mut dyn Any = app;
        if let Some(app) = app.downcast_mut::<C::App>() {
            Config::apply(self, app);
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

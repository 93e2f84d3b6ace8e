//! A function as an app: it sees each packet, may change it, and says whether it goes on.

use std::any;
use std::fmt;
use std::rc::Rc;

use crate::app::{App, BuildError, Config, Figure, PortList};
use crate::packet::Packet;
use crate::ports::Ports;
use crate::time::Time;

/// From `input` to `output`, what the function says true to. Reports `dropped`.
///
/// ```
/// # use sandwire_engine::{Graph, apps::Filter};
/// # let mut graph = Graph::new();
/// graph.app("even", Filter::new(|packet| packet.length() % 2 == 0))?;
/// # Ok::<(), sandwire_engine::GraphError>(())
/// ```
///
/// Functions can't be compared. Two filters are the same if they are clones of one, or if their function is the same
/// place in the source and has captured nothing. A function with captures begins with a clone of them.
pub struct Filter<F> {
    pass: Rc<F>,
}

/// The running [`Filter`].
pub struct FilterApp<F> {
    pass: F,
    dropped: u64,
}

impl<F: FnMut(&mut Packet) -> bool + Clone + 'static> Filter<F> {
    /// A filter that lets through what `pass` says true to.
    #[must_use]
    pub fn new(pass: F) -> Self {
        Self {
            pass: Rc::new(pass),
        }
    }
}

impl<F> Clone for Filter<F> {
    fn clone(&self) -> Self {
        Self {
            pass: Rc::clone(&self.pass),
        }
    }
}

impl<F> PartialEq for Filter<F> {
    fn eq(&self, other: &Self) -> bool {
        size_of::<F>() == 0 || Rc::ptr_eq(&self.pass, &other.pass)
    }
}

impl<F> fmt::Debug for Filter<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Filter({})", any::type_name::<F>())
    }
}

impl<F: FnMut(&mut Packet) -> bool + Clone + 'static> Config for Filter<F> {
    type App = FilterApp<F>;

    fn inputs(&self) -> PortList {
        PortList::named(["input"])
    }

    fn outputs(&self) -> PortList {
        PortList::named(["output"])
    }

    fn build(&self) -> Result<FilterApp<F>, BuildError> {
        Ok(FilterApp {
            pass: F::clone(&self.pass),
            dropped: 0,
        })
    }
}

impl<F: FnMut(&mut Packet) -> bool + 'static> App for FilterApp<F> {
    fn push(&mut self, _now: Time, ports: &mut Ports<'_>) {
        self.dropped += ports.filter(0, 0, &mut self.pass);
    }

    fn report(&self) -> Vec<Figure> {
        vec![Figure::new("dropped", self.dropped)]
    }
}

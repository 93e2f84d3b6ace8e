//! Sends each packet to all outputs: the packet itself to the first, real copies to the others.

use crate::app::{App, BuildError, Config, Figure, PortList};
use crate::ports::Ports;
use crate::time::Time;

/// From `input` to any number of outputs, whatever they are called. The first by name gets the original.
///
/// Reports `copies`, those that were made or had no room on their link, and `refused`, those for which the pool had
/// no packet left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tee;

/// The running [`Tee`].
#[derive(Debug)]
pub struct TeeApp {
    copies: u64,
    refused: u64,
}

impl Config for Tee {
    type App = TeeApp;

    fn inputs(&self) -> PortList {
        PortList::named(["input"])
    }

    fn outputs(&self) -> PortList {
        PortList::Any
    }

    fn build(&self) -> Result<TeeApp, BuildError> {
        Ok(TeeApp {
            copies: 0,
            refused: 0,
        })
    }
}

impl App for TeeApp {
    fn push(&mut self, _now: Time, ports: &mut Ports<'_>) {
        for output in 1..ports.outputs() {
            let copied = ports.copy(0, output);
            self.copies += copied.made + copied.overflow;
            self.refused += copied.refused;
        }
        ports.forward(0, 0);
    }

    fn report(&self) -> Vec<Figure> {
        vec![
            Figure::new("copies", self.copies),
            Figure::new("refused", self.refused),
        ]
    }
}

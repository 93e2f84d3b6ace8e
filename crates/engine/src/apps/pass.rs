//! Passes packets on as they are: a place holder, and the measure of what an app costs.

use crate::app::{App, BuildError, Config, PortList};
use crate::ports::Ports;
use crate::time::Time;

/// From `input` to `output`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass;

/// The running [`Pass`].
#[derive(Debug)]
pub struct PassApp(());

impl Config for Pass {
    type App = PassApp;

    fn inputs(&self) -> PortList {
        PortList::named(["input"])
    }

    fn outputs(&self) -> PortList {
        PortList::named(["output"])
    }

    fn build(&self) -> Result<PassApp, BuildError> {
        Ok(PassApp(()))
    }
}

impl App for PassApp {
    fn push(&mut self, _now: Time, ports: &mut Ports<'_>) {
        ports.forward(0, 0);
    }
}

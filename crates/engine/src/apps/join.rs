//! Brings packets of many links together on one.

use crate::app::{App, BuildError, Config, PortList};
use crate::ports::Ports;
use crate::time::Time;

/// From any number of inputs, whatever they are called, to `output`.
///
/// Where the output has not enough room for all, packets wait on their inputs, and the inputs take turns at who is
/// first, so none starves another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Join;

/// The running [`Join`].
#[derive(Debug)]
pub struct JoinApp {
    first: usize,
}

impl Config for Join {
    type App = JoinApp;

    fn inputs(&self) -> PortList {
        PortList::Any
    }

    fn outputs(&self) -> PortList {
        PortList::named(["output"])
    }

    fn build(&self) -> Result<JoinApp, BuildError> {
        Ok(JoinApp { first: 0 })
    }
}

impl App for JoinApp {
    fn push(&mut self, _now: Time, ports: &mut Ports<'_>) {
        let inputs = ports.inputs();
        for turn in 0..inputs {
            let input = (self.first + turn) % inputs;
            if ports.queued(input) <= ports.space(0) {
                ports.forward(input, 0);
                continue;
            }
            for _ in 0..ports.space(0) {
                if let Some(packet) = ports.receive(input) {
                    ports.transmit(0, packet);
                }
            }
        }
        self.first = (self.first + 1) % inputs.max(1);
    }
}

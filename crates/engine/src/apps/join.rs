//! Brings packets of many links together on one.

use crate::app::{App, BuildError, Config, PortList};
use crate::ports::Ports;
use crate::time::Time;

/// From any number of inputs, whatever they are called, to `output`.
///
/// Where the output has not enough room for all, packets wait on their inputs, and the inputs take turns at who is
/// first when there are packets, so none starves another.
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
        let mut has_packets = false;
        for turn in 0..inputs {
            let input = (self.first + turn) % inputs;
            has_packets |= ports.queued(input) > 0;
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
        if has_packets {
            self.first = (self.first + 1) % inputs;
        }
    }
}

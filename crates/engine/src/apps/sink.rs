//! Takes packets, counts them and their bytes, and lets them go.

use crate::app::{App, BuildError, Config, Figure, PortList};
use crate::ports::Ports;
use crate::time::Time;

/// Whatever comes to `input` ends here. Reports `packets` and `bytes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sink;

/// The running [`Sink`].
#[derive(Debug)]
pub struct SinkApp {
    packets: u64,
    bytes: u64,
}

impl Config for Sink {
    type App = SinkApp;

    fn inputs(&self) -> PortList {
        PortList::named(["input"])
    }

    fn outputs(&self) -> PortList {
        PortList::none()
    }

    fn build(&self) -> Result<SinkApp, BuildError> {
        Ok(SinkApp {
            packets: 0,
            bytes: 0,
        })
    }
}

impl App for SinkApp {
    fn push(&mut self, _now: Time, ports: &mut Ports<'_>) {
        let (packets, bytes) = ports.discard(0);
        self.packets += packets;
        self.bytes += bytes;
    }

    fn report(&self) -> Vec<Figure> {
        vec![
            Figure::new("packets", self.packets),
            Figure::new("bytes", self.bytes),
        ]
    }
}

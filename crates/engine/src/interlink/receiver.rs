//! The end of an interlink that packets come out of.

use std::collections::VecDeque;

use super::ring::{Reader, Received, Writer};
use super::{BATCH_PACKETS_MAX, Home, Parcel, Return};
use crate::app::{App, BuildError, Config, Figure, PortList, Wake};
use crate::ports::Ports;
use crate::time::Time;

/// Sends to `output` what the engine that has the [`Transmitter`](super::Transmitter) gave it, as many as the link
/// and the pool have room for; the others wait.
///
/// Reports `packets`; `too_long`, frames that this engine's packets have no room for; and `ended`, 1 when the other
/// side is gone and all that it sent has come.
#[derive(Debug, PartialEq)]
pub struct Receiver(pub(super) Home<ReceivingEnd>);

/// The running [`Receiver`].
#[derive(Debug)]
pub struct ReceiverApp {
    home: Home<ReceivingEnd>,
    end: Option<ReceivingEnd>,
    has_run: bool,
    packets: u64,
    too_long: u64,
}

/// What it receives from.
#[derive(Debug)]
pub(super) struct ReceivingEnd {
    packets: Reader<Parcel>,
    returns: Writer<Return>,
    /// Of a batch that has come.
    waiting: VecDeque<Parcel>,
    /// Buffers on their way back.
    empties: VecDeque<Return>,
    ended: bool,
}

impl Config for Receiver {
    type App = ReceiverApp;

    fn inputs(&self) -> PortList {
        PortList::none()
    }

    fn outputs(&self) -> PortList {
        PortList::named(["output"])
    }

    fn is_edge(&self) -> bool {
        true
    }

    fn build(&self) -> Result<ReceiverApp, BuildError> {
        Ok(ReceiverApp {
            home: self.0.share()?,
            end: None,
            has_run: false,
            packets: 0,
            too_long: 0,
        })
    }
}

impl App for ReceiverApp {
    fn pull(&mut self, _now: Time, ports: &mut Ports<'_>) {
        if !self.has_run {
            self.has_run = true;
            self.end = self.home.take();
        }
        let Some(end) = &mut self.end else {
            return;
        };
        while ports.space(0) > 0 && end.has_waiting() {
            let Some(mut packet) = ports.pool().take() else {
                break;
            };
            let Some(parcel) = end.waiting.pop_front() else {
                break;
            };
            let length = parcel.length;
            let (bytes, fits) = packet.exchange(parcel);
            end.empties.push_back(Return { bytes, length });
            if fits {
                self.packets += 1;
                ports.transmit(0, packet);
            } else {
                self.too_long += 1;
            }
        }
        if !end.empties.is_empty() {
            // Where there is no room they wait for the next breath; where nobody wants them they are freed with
            // the ring.
            end.returns.send(&mut end.empties);
        }
    }

    fn wake(&self) -> Wake {
        let Some(end) = &self.end else {
            return Wake {
                at: None,
                polls: !self.has_run,
            };
        };
        if end.ended && end.waiting.is_empty() {
            Wake::default()
        } else {
            Wake::polling()
        }
    }

    fn report(&self) -> Vec<Figure> {
        let ended = match &self.end {
            Some(end) => end.ended && end.waiting.is_empty(),
            None => self.has_run,
        };
        vec![
            Figure::new("packets", self.packets),
            Figure::new("too_long", self.too_long),
            Figure::new("ended", ended.into()),
        ]
    }
}

impl ReceivingEnd {
    pub(super) fn new(packets: Reader<Parcel>, returns: Writer<Return>) -> Self {
        Self {
            packets,
            returns,
            waiting: VecDeque::with_capacity(BATCH_PACKETS_MAX),
            empties: VecDeque::with_capacity(BATCH_PACKETS_MAX),
            ended: false,
        }
    }

    /// Looks for a batch if none is left of the last.
    fn has_waiting(&mut self) -> bool {
        if self.waiting.is_empty() {
            self.ended = self.packets.receive(&mut self.waiting) == Received::Ended;
        }
        !self.waiting.is_empty()
    }
}

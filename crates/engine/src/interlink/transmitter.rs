//! The end of an interlink that packets go into.

use std::collections::VecDeque;

use super::ring::{Reader, Received, Sent, Writer};
use super::{BATCH_PACKETS_MAX, Home, Parcel, Return};
use crate::app::{App, BuildError, Config, Figure, PortList, Wake};
use crate::packet::Packet;
use crate::pool::Pool;
use crate::ports::Ports;
use crate::time::Time;

/// Sends what comes to `input` to the engine that has the [`Receiver`](super::Receiver).
///
/// Reports `packets`; `gone`, packets that were dropped because the other side is gone; and `refused`, packets of
/// another engine's pool that were to be copied when this pool was at its limit.
#[derive(Debug, PartialEq)]
pub struct Transmitter(pub(super) Home<TransmittingEnd>);

/// The running [`Transmitter`].
#[derive(Debug)]
pub struct TransmitterApp {
    home: Home<TransmittingEnd>,
    end: Option<TransmittingEnd>,
    has_run: bool,
    packets: u64,
    gone: u64,
    refused: u64,
}

/// What it sends into.
#[derive(Debug)]
pub(super) struct TransmittingEnd {
    packets: Writer<Parcel>,
    returns: Reader<Return>,
    batch: VecDeque<Parcel>,
    returned: VecDeque<Return>,
    /// Buffers that have not come back.
    out: u64,
}

impl Config for Transmitter {
    type App = TransmitterApp;

    fn inputs(&self) -> PortList {
        PortList::named(["input"])
    }

    fn outputs(&self) -> PortList {
        PortList::none()
    }

    fn build(&self) -> Result<TransmitterApp, BuildError> {
        Ok(TransmitterApp {
            home: self.0.share()?,
            end: None,
            has_run: false,
            packets: 0,
            gone: 0,
            refused: 0,
        })
    }
}

impl App for TransmitterApp {
    fn push(&mut self, _now: Time, ports: &mut Ports<'_>) {
        if !self.has_run {
            self.has_run = true;
            self.end = self.home.take();
        }
        let Some(end) = &mut self.end else {
            self.gone += ports.discard(0).0;
            return;
        };
        let outlook = end.packets.outlook();
        // After that look: all that came back before the other side went is taken now.
        end.take_returns(ports.pool());
        match outlook {
            Sent::Done => {
                let (packets, refused) = end.send(ports);
                self.packets += packets;
                self.refused += refused;
            }
            Sent::Full => {}
            Sent::ReaderGone => {
                // It may have gone between a look and the sending.
                let unsent = end.batch.len() as u64;
                ports.pool().write_off(end.out + unsent);
                self.end = None;
                self.gone += unsent + ports.discard(0).0;
            }
        }
    }

    /// While buffers are out they may come back, and what waits for room may have some. What couldn't be sent is looked at
    /// once more.
    fn wake(&self) -> Wake {
        let is_out = |end: &TransmittingEnd| end.out > 0 || !end.batch.is_empty();
        let is_out = self.end.as_ref().is_some_and(is_out);
        Wake {
            at: None,
            polls: is_out,
        }
    }

    fn report(&self) -> Vec<Figure> {
        vec![
            Figure::new("packets", self.packets),
            Figure::new("gone", self.gone),
            Figure::new("refused", self.refused),
        ]
    }
}

impl TransmittingEnd {
    pub(super) fn new(packets: Writer<Parcel>, returns: Reader<Return>) -> Self {
        Self {
            packets,
            returns,
            batch: VecDeque::with_capacity(BATCH_PACKETS_MAX),
            returned: VecDeque::with_capacity(BATCH_PACKETS_MAX),
            out: 0,
        }
    }

    fn take_returns(&mut self, pool: &Pool) {
        while self.returns.receive(&mut self.returned) == Received::Batch {
            self.out -= self.returned.len() as u64;
            for Return { bytes, length } in self.returned.drain(..) {
                pool.take_back(bytes, length);
            }
        }
    }

    /// Sends a batch of what is at the input; how many packets, and how many were refused a copy.
    fn send(&mut self, ports: &mut Ports<'_>) -> (u64, u64) {
        let mut refused = 0;
        while self.batch.len() < BATCH_PACKETS_MAX
            && let Some(packet) = ports.receive(0)
        {
            match own(packet, ports.pool()) {
                Some(packet) => self.batch.push_back(packet.into_parcel()),
                None => refused += 1,
            }
        }
        let packets = self.batch.len() as u64;
        // There was room, and only this side could have used it.
        if packets == 0 || self.packets.send(&mut self.batch) != Sent::Done {
            return (0, refused);
        }
        self.out += packets;
        (packets, refused)
    }
}

/// The packet itself if its buffer is of this pool, since that is where buffers come back to; else a copy.
fn own(packet: Packet, pool: &Pool) -> Option<Packet> {
    if pool.owns(&packet) {
        return Some(packet);
    }
    let mut copy = pool.take()?;
    copy.set_mark(packet.mark());
    copy.set_bytes(packet.bytes()).then_some(copy)
}

#[cfg(test)]
mod tests {
    use super::super::ring::ring;
    use super::*;
    use crate::ports::Activity;

    #[test]
    fn what_was_to_be_sent_when_the_receiver_went_is_written_off_and_counted() {
        let pool = Pool::default();
        let mut ports = Ports {
            links: &mut [],
            inputs: &[],
            outputs: &[],
            pool: &pool,
            activity: Activity::default(),
        };
        let (packets, parcels) = ring(1);
        let (_empties, returns) = ring(1);
        let mut end = TransmittingEnd::new(packets, returns);
        let taken = || pool.take().expect("a packet").into_parcel();
        end.batch.extend([taken(), taken(), taken()]);
        assert_eq!(end.packets.outlook(), Sent::Done);
        drop(parcels);
        assert_eq!(end.send(&mut ports), (0, 0));
        let mut app = TransmitterApp {
            home: Home::of(TransmittingEnd::new(ring(1).0, ring(1).1)),
            end: Some(end),
            has_run: true,
            packets: 0,
            gone: 0,
            refused: 0,
        };
        assert!(app.wake().polls, "nothing else may come");
        app.push(Time::START, &mut ports);
        let counters = pool.counters();
        assert_eq!((counters.in_use(), counters.buffers), (0, 0));
        assert_eq!((app.packets, app.gone), (0, 3));
        assert!(!app.wake().polls);
    }
}

//! What an app sees of the engine while it is called: its ports, by index, and the pool.
//!
//! Names became indices when the graph was configured, in the order of the app's [`PortList`]. An input that no
//! link leads to is always empty. An output without a link has no room; what is sent there is dropped and counted
//! by the engine as sent nowhere.
//!
//! Operations on all of a port's packets cost far less than one by one, and no app needs to know how many there
//! are.
//!
//! [`PortList`]: crate::PortList

#![forbid(unsafe_code)]

use crate::link::{Copied, Link};
use crate::packet::Packet;
use crate::pool::Pool;

/// Packets that a source should make per breath: few enough for them and their links to stay in the first cache.
pub const BATCH_PACKETS: usize = 102;

/// The index of an app's port in the engine's links, for a port that has none.
pub(crate) const NO_LINK: u32 = u32::MAX;

/// An app's ports, during one call.
#[derive(Debug)]
pub struct Ports<'a> {
    pub(crate) links: &'a mut [Link],
    pub(crate) inputs: &'a [u32],
    pub(crate) outputs: &'a [u32],
    pub(crate) pool: &'a Pool,
    pub(crate) activity: Activity,
}

/// What an app did with its ports in a call.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Activity {
    /// Packets taken, sent, moved or freed.
    pub(crate) moved: u64,
    /// Packets sent to an output that has no link.
    pub(crate) nowhere: u64,
}

impl Ports<'_> {
    /// Input ports of this app, linked or not.
    #[must_use]
    pub fn inputs(&self) -> usize {
        self.inputs.len()
    }

    /// Output ports of this app, linked or not.
    #[must_use]
    pub fn outputs(&self) -> usize {
        self.outputs.len()
    }

    /// The pool of this engine.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        self.pool
    }

    /// Packets that wait at an input.
    #[inline]
    #[must_use]
    pub fn queued(&self, input: usize) -> usize {
        self.link(self.inputs, input).map_or(0, Link::queued)
    }

    /// Packets that an output has room for; none where there is no link.
    #[inline]
    #[must_use]
    pub fn space(&self, output: usize) -> usize {
        self.link(self.outputs, output).map_or(0, Link::space)
    }

    /// The oldest packet of an input.
    #[inline]
    pub fn receive(&mut self, input: usize) -> Option<Packet> {
        let packet = self.links.get_mut(place(self.inputs, input))?.receive()?;
        self.activity.moved += 1;
        Some(packet)
    }

    /// Sends a packet; where there is no room it is dropped and counted.
    #[inline]
    pub fn transmit(&mut self, output: usize, packet: Packet) {
        self.activity.moved += 1;
        match self.links.get_mut(place(self.outputs, output)) {
            Some(link) => link.transmit(packet),
            None => self.activity.nowhere += 1,
        }
    }

    /// Sends up to `count` new packets that `write` fills, as many as link and pool have room for; how many.
    pub fn fill(&mut self, output: usize, count: usize, write: impl FnMut(&mut Packet)) -> usize {
        let Some(link) = self.links.get_mut(place(self.outputs, output)) else {
            return 0;
        };
        let made = link.fill(self.pool, count, write);
        self.activity.moved += made as u64;
        made
    }

    /// Moves all packets of an input to an output; how many. What the output has no room for is dropped.
    pub fn forward(&mut self, input: usize, output: usize) -> usize {
        let count = self.queued(input);
        match self.pair(input, output) {
            Some([from, to]) => from.forward(to),
            None => self.discard_to_nowhere(input),
        }
        self.activity.moved += count as u64;
        count
    }

    /// Moves those packets of an input to an output for which `pass` says true, and drops the others; their number.
    /// It may change packets.
    pub fn filter(
        &mut self,
        input: usize,
        output: usize,
        mut pass: impl FnMut(&mut Packet) -> bool,
    ) -> u64 {
        self.activity.moved += self.queued(input) as u64;
        if let Some([from, to]) = self.pair(input, output) {
            return from.filter(to, pass);
        }
        let mut dropped = 0;
        while let Some(mut packet) = self.receive(input) {
            if pass(&mut packet) {
                self.activity.nowhere += 1;
            } else {
                dropped += 1;
            }
        }
        dropped
    }

    /// Sends copies of all packets of an input, which stay where they are, to an output.
    pub fn copy(&mut self, input: usize, output: usize) -> Copied {
        let pool = self.pool;
        let Some([from, to]) = self.pair(input, output) else {
            return Copied::default();
        };
        let copied = from.copy(to, pool);
        self.activity.moved += copied.made;
        copied
    }

    /// Gives all packets of an input back to the pool; how many packets and bytes.
    pub fn discard(&mut self, input: usize) -> (u64, u64) {
        let Some(link) = self.links.get_mut(place(self.inputs, input)) else {
            return (0, 0);
        };
        let discarded = link.discard(self.pool);
        self.activity.moved += discarded.0;
        discarded
    }

    fn discard_to_nowhere(&mut self, input: usize) {
        let (packets, _) = self.discard(input);
        self.activity.nowhere += packets;
    }

    fn link(&self, ports: &[u32], port: usize) -> Option<&Link> {
        self.links.get(place(ports, port))
    }

    /// Both links, if there are both. They differ: no graph has a link from an app to itself.
    fn pair(&mut self, input: usize, output: usize) -> Option<[&mut Link; 2]> {
        let indices = [place(self.inputs, input), place(self.outputs, output)];
        self.links.get_disjoint_mut(indices).ok()
    }
}

/// Where a port's link is among the engine's links; past their end if the port has none.
#[inline]
fn place(ports: &[u32], port: usize) -> usize {
    ports.get(port).copied().unwrap_or(NO_LINK) as usize
}

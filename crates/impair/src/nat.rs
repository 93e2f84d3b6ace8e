//! A NAT that forgets: at stated moments the port, or also the address, that the far side sees of a flow changes.
//!
//! One [`Nat`] stands at the sandbox's end of one link and sees both directions. What the sandbox sends passes it
//! behind the classifier and before the pipeline, what comes to the sandbox passes it after the wire and before the
//! classifier; so rules always see the sandbox's own addresses and ports.
//!
//! A mapping is of a protocol (TCP or UDP), an address and a port of the sandbox, whatever the far side's
//! (RFC 4787 REQ-1, RFC 5382 REQ-1). It is made by the first packet that leaves, and changes nothing yet. At each
//! moment that the model names all mappings made before are forgotten:
//!
//! - From then on what comes back to the old port is dropped, and makes no answer.
//! - UDP: the next packet that leaves gets a new port and, if the model names addresses, the next of them.
//! - TCP: what leaves is dropped, and makes no reset, until a `SYN` begins a new connection, which gets a new port.
//!
//! New ports are drawn from 1024 to 65535 by the sandbox's own address and port and by how many changes there were,
//! so other flows don't matter, unless a port is in use. Checksums are brought up to date (RFC 1624). ICMP errors
//! about a mapping's packets are translated both ways, with the packet that they quote (RFC 5508 REQ-4, REQ-5); other ICMP,
//! later fragments and other protocols pass as they are. A pipeline's answers are such errors; see [`Nat::answer`].
//!
//! At most [`MAPPINGS_MAX`] mappings are kept; then one that wasn't used lately makes room, and its
//! flow begins anew with its own port.

mod rewrite;
mod table;

use std::net::IpAddr;

use rewrite::{End, Frame, IcmpError};
use table::{Endpoint, Mapping, Table};

pub use table::{MAPPINGS_MAX, OLD_PORTS_MAX};

use crate::{
    Nanoseconds,
    random::{Direction, Flow, Impairment, Stream},
};

/// When mappings change, and to what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NatModel {
    /// The moment of the first change.
    pub first: Nanoseconds,
    /// Nanoseconds between it and those that follow; none if it is the only one.
    pub every: Option<Nanoseconds>,
    /// Addresses that flows have behind the first change, the second, and so on, and then from the start; those of the packet's
    /// version of IP count. If there is none, only the port changes. Packets to them must come back this way.
    pub addresses: Vec<IpAddr>,
}

/// What a [`Nat`] did with a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Translation {
    /// Nothing.
    Untouched,
    /// Its addresses or ports are others now.
    Rewritten,
    /// Its mapping is forgotten: the caller drops it as [`DropCause::Nat`](crate::DropCause::Nat), by
    /// [`Pipeline::refuse`](crate::pipeline::Pipeline::refuse). It has the sandbox's own address and port.
    Dead,
}

/// The translation of one link, both ways.
#[derive(Debug)]
pub struct Nat {
    ports: Stream,
    table: Table,
}

impl NatModel {
    /// How many changes there were until now.
    #[must_use]
    pub fn changes(&self, now: Nanoseconds) -> u64 {
        match (now.checked_sub(self.first), self.every) {
            (None, _) => 0,
            (Some(_), None | Some(0)) => 1,
            (Some(since), Some(every)) => 1 + since / every,
        }
    }

    /// The moment of the first change after now; the end of time if there is none.
    #[must_use]
    pub fn next_change(&self, now: Nanoseconds) -> Nanoseconds {
        match (self.changes(now), self.every) {
            (0, _) => self.first,
            (_, None | Some(0)) => Nanoseconds::MAX,
            (changes, Some(every)) => self.first.saturating_add(changes.saturating_mul(every)),
        }
    }

    /// The address that flows from this one have now.
    fn address(&self, now: Nanoseconds, own: IpAddr) -> IpAddr {
        let usable = || {
            let addresses = self.addresses.iter();
            addresses.filter(|address| address.is_ipv4() == own.is_ipv4())
        };
        let Some(last) = self.changes(now).checked_sub(1) else {
            return own;
        };
        let index = last.checked_rem(usable().count() as u64);
        index
            .and_then(|index| usable().nth(usize::try_from(index).ok()?))
            .map_or(own, |address| *address)
    }
}

impl Nat {
    /// A translation without mappings, for the link of this number.
    #[must_use]
    pub fn new(seed: u64, link: u32) -> Self {
        let flow = Flow {
            seed,
            link,
            direction: Direction::Egress,
            rule: 0,
        };
        Self {
            ports: Stream::new(flow, Impairment::Nat),
            table: Table::default(),
        }
    }

    /// Mappings there are, forgotten ones too.
    #[must_use]
    pub fn mappings(&self) -> usize {
        self.table.len()
    }

    /// Translates what leaves the sandbox. Without a model, as under a rule that has none, mappings that there are stay
    /// as they are and no others are made.
    pub fn leave(
        &mut self,
        now: Nanoseconds,
        model: Option<&NatModel>,
        frame: &mut [u8],
    ) -> Translation {
        if model.is_none() && self.table.len() == 0 {
            return Translation::Untouched;
        }
        let Some(mut frame) = Frame::of(frame) else {
            return self.send_error(now, frame);
        };
        let inside = frame.endpoint(End::Source);
        let known = self.table.mapping(inside);
        let is_over = known.is_some_and(|mapping| match model {
            Some(_) => mapping.is_due(now),
            None => mapping.is_forgotten(now),
        });
        if is_over && frame.is_tcp() && !frame.begins_connection() {
            return Translation::Dead;
        }
        let mapping = match (known, model) {
            (None, None) => return Translation::Untouched,
            (Some(mapping), Some(model)) if !is_over => Mapping {
                lasts_until: model.next_change(now),
                is_kept: false,
                ..mapping
            },
            (Some(mapping), None) if !is_over => Mapping {
                is_kept: true,
                ..mapping
            },
            _ => self.new_mapping(now, model, inside, known),
        };
        self.table.put(inside, mapping);
        frame.set(End::Source, mapping.outside)
    }

    /// Translates what comes to the sandbox.
    pub fn arrive(&mut self, now: Nanoseconds, frame: &mut [u8]) -> Translation {
        if self.table.len() == 0 {
            return Translation::Untouched;
        }
        if let Some(mut frame) = Frame::of(frame) {
            let outside = frame.endpoint(End::Destination);
            return self.bring_back(now, outside, |inside| frame.set(End::Destination, inside));
        }
        let Some(mut error) = IcmpError::of(frame, End::Source) else {
            return Translation::Untouched;
        };
        self.bring_back(now, error.quoted_endpoint(), |inside| error.set(inside))
    }

    /// Translates what a pipeline of this direction answers ([`Dropped::answer`](crate::pipeline::Dropped::answer)).
    pub fn answer(
        &mut self,
        now: Nanoseconds,
        direction: Direction,
        frame: &mut [u8],
    ) -> Translation {
        match direction {
            Direction::Egress => self.arrive(now, frame),
            Direction::Ingress => self.leave(now, None, frame),
        }
    }

    /// Translates an ICMP error that the sandbox sends about what came to it.
    fn send_error(&mut self, now: Nanoseconds, frame: &mut [u8]) -> Translation {
        let Some(mut error) = IcmpError::of(frame, End::Destination) else {
            return Translation::Untouched;
        };
        match self.table.mapping(error.quoted_endpoint()) {
            None => Translation::Untouched,
            Some(mapping) if mapping.is_forgotten(now) => Translation::Dead,
            Some(mapping) => error.set(mapping.outside),
        }
    }

    fn bring_back(
        &mut self,
        now: Nanoseconds,
        outside: Endpoint,
        mut set: impl FnMut(Endpoint) -> Translation,
    ) -> Translation {
        let Some((inside, mapping)) = self.table.behind(outside) else {
            return Translation::Untouched;
        };
        let translation = set(inside);
        if mapping.outside == outside && !mapping.is_forgotten(now) {
            translation
        } else {
            Translation::Dead
        }
    }

    /// What this endpoint is mapped to from now on.
    fn new_mapping(
        &self,
        now: Nanoseconds,
        model: Option<&NatModel>,
        inside: Endpoint,
        known: Option<Mapping>,
    ) -> Mapping {
        let own = known.map_or(inside.address, |mapping| mapping.outside.address);
        let address = model.map_or(own, |model| model.address(now, inside.address));
        let generation = known.map_or(0, |mapping| mapping.generation.wrapping_add(1));
        let at = |port| Endpoint {
            address,
            port,
            ..inside
        };
        let mut draw = self.ports.draw_copy(inside.number(), generation);
        let drawn = (0..DRAWS).map(|_| {
            let port = u64::from(PORT_MIN) + draw.below(u64::from(u16::MAX - PORT_MIN) + 1);
            u16::try_from(port).unwrap_or(u16::MAX)
        });
        let own_port = known.is_none().then_some(inside.port);
        let outside = own_port
            .into_iter()
            .chain(drawn)
            .chain(PORT_MIN..=u16::MAX)
            .map(at)
            .find(|outside| self.table.is_free(inside, *outside))
            .unwrap_or_else(|| at(inside.port));
        Mapping {
            outside,
            generation,
            lasts_until: model.map_or(Nanoseconds::MAX, |model| model.next_change(now)),
            is_kept: model.is_none(),
        }
    }
}

/// The first port that is given to a flow.
const PORT_MIN: u16 = 1024;
/// How often a port is drawn before all are tried in order.
const DRAWS: u32 = 64;

#[cfg(test)]
mod tests;

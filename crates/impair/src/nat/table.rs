//! Which endpoints of the sandbox are what outside.

use std::{
    collections::{HashMap, VecDeque},
    net::IpAddr,
};

use crate::Nanoseconds;

/// Mappings of one link, at most.
pub const MAPPINGS_MAX: usize = 8192;
/// Earlier ports of a mapping that are remembered as forgotten; what comes to still earlier ones passes as it is.
pub const OLD_PORTS_MAX: usize = 4;

/// One end of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Endpoint {
    pub(super) protocol: u8,
    pub(super) address: IpAddr,
    pub(super) port: u16,
}

/// What an endpoint of the sandbox is outside.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mapping {
    pub(super) outside: Endpoint,
    /// How many mappings it had before.
    pub(super) generation: u32,
    /// When it is forgotten.
    pub(super) lasts_until: Nanoseconds,
    /// Its endpoint has sent without a model meanwhile: only a packet with one ends it.
    pub(super) is_kept: bool,
}

#[derive(Debug, Default)]
pub(super) struct Table {
    inside: HashMap<Endpoint, Entry>,
    /// The endpoint behind each outer one, present and earlier ones.
    outside: HashMap<Endpoint, Endpoint>,
    /// All endpoints, by when they are looked at for one that makes room.
    order: VecDeque<Endpoint>,
}

#[derive(Debug)]
struct Entry {
    mapping: Mapping,
    earlier: VecDeque<Endpoint>,
    was_used: bool,
}

impl Endpoint {
    /// A number of its own for the random stream. Part of every recorded run: never change it.
    pub(super) fn number(&self) -> u64 {
        let address = match self.address {
            IpAddr::V4(address) => u128::from(address.to_bits()),
            IpAddr::V6(address) => address.to_bits(),
        };
        // FNV-1a, 64 bits.
        let port = self.port.to_be_bytes();
        let bytes = address.to_be_bytes().into_iter().chain(port);
        bytes
            .chain([self.protocol])
            .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
            })
    }
}

impl Mapping {
    /// For whoever has a model; for others it may be kept.
    pub(super) fn is_due(&self, now: Nanoseconds) -> bool {
        now >= self.lasts_until
    }

    pub(super) fn is_forgotten(&self, now: Nanoseconds) -> bool {
        !self.is_kept && self.is_due(now)
    }
}

impl Table {
    pub(super) fn len(&self) -> usize {
        self.inside.len()
    }

    /// What this endpoint of the sandbox is mapped to; that counts as use.
    pub(super) fn mapping(&mut self, inside: Endpoint) -> Option<Mapping> {
        let entry = self.inside.get_mut(&inside)?;
        entry.was_used = true;
        Some(entry.mapping)
    }

    /// The endpoint that is or was this one outside, and its mapping now.
    pub(super) fn behind(&mut self, outside: Endpoint) -> Option<(Endpoint, Mapping)> {
        let inside = *self.outside.get(&outside).unwrap_or(&outside);
        let mapping = self.mapping(inside)?;
        Some((inside, mapping))
    }

    /// Whether nobody but this endpoint itself is this one outside.
    pub(super) fn is_free(&self, inside: Endpoint, outside: Endpoint) -> bool {
        let is_other = |other: Option<&Endpoint>| other.is_some_and(|other| *other != inside);
        let is_own = outside == inside || !self.inside.contains_key(&outside);
        let is_earlier = self.inside.get(&inside).is_some_and(|entry| {
            entry.mapping.outside == outside || entry.earlier.contains(&outside)
        });
        is_own && !is_earlier && !is_other(self.outside.get(&outside))
    }

    /// Maps an endpoint; another may have to make room.
    pub(super) fn put(&mut self, inside: Endpoint, mapping: Mapping) {
        if let Some(entry) = self.inside.get_mut(&inside) {
            let before = std::mem::replace(&mut entry.mapping, mapping).outside;
            if before == mapping.outside {
                return;
            }
            entry.earlier.push_back(before);
            if entry.earlier.len() > OLD_PORTS_MAX
                && let Some(oldest) = entry.earlier.pop_front()
            {
                self.outside.remove(&oldest);
            }
        } else {
            if self.inside.len() >= MAPPINGS_MAX {
                self.make_room();
            }
            self.order.push_back(inside);
            let entry = Entry {
                mapping,
                earlier: VecDeque::new(),
                was_used: false,
            };
            self.inside.insert(inside, entry);
        }
        self.outside.insert(mapping.outside, inside);
    }

    /// Removes the first that wasn't used since it was looked at last.
    fn make_room(&mut self) {
        while let Some(candidate) = self.order.pop_front() {
            let Some(entry) = self.inside.get_mut(&candidate) else {
                continue;
            };
            if std::mem::take(&mut entry.was_used) {
                self.order.push_back(candidate);
                continue;
            }
            if let Some(entry) = self.inside.remove(&candidate) {
                self.outside.remove(&entry.mapping.outside);
                for outside in entry.earlier {
                    self.outside.remove(&outside);
                }
            }
            return;
        }
    }
}

#[cfg(test)]
impl Table {
    /// Whether both ways lead to the same, and nothing is left of what made room.
    pub(super) fn is_consistent(&self) -> bool {
        let outer = |entry: &Entry| 1 + entry.earlier.len();
        self.order.len() == self.inside.len()
            && self.outside.len() == self.inside.values().map(outer).sum::<usize>()
            && self.outside.iter().all(|(outside, inside)| {
                self.inside.get(inside).is_some_and(|entry| {
                    entry.mapping.outside == *outside || entry.earlier.contains(outside)
                })
            })
    }
}

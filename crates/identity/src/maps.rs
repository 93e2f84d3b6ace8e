//! The pinned maps, as the command line reads and writes them.

use std::path::Path;

use aya::maps::{HashMap, Map, MapData, MapError, PerCpuHashMap, PerCpuValues};
use serde::Serialize;

use crate::{
    Error,
    abi::{CountersValue, IdentityValue, Owner, Place, REFUSALS_MAX, Record},
};

/// All maps of the object, by name.
pub(crate) const NAMES: [&str; 7] = [
    "identities",
    "counters",
    "records",
    "addresses",
    "listeners",
    "sockets",
    "known",
];

/// Where the map of records has the number that was given out last: no cgroup has this one.
const LAST_NUMBER: u64 = 0;
const RECORD: usize = size_of::<Record>();
const IDENTITY: usize = size_of::<IdentityValue>();
const OWNER: usize = size_of::<Owner>();
const COUNTERS: usize = size_of::<CountersValue>();

/// Maps that the command line uses.
pub(crate) struct Maps {
    records: HashMap<MapData, u64, [u8; RECORD]>,
    addresses: HashMap<MapData, [u8; 16], [u8; OWNER]>,
    identities: HashMap<MapData, u64, [u8; IDENTITY]>,
    counters: PerCpuHashMap<MapData, u64, [u8; COUNTERS]>,
}

impl Maps {
    /// Opens the maps in a folder of pins; `None` if they aren't there.
    pub(crate) fn open(folder: &Path) -> Result<Option<Self>, Error> {
        if NAMES.iter().any(|name| !folder.join(name).exists()) {
            return Ok(None);
        }
        let open =
            |name: &'static str| MapData::from_pin(folder.join(name)).map_err(failed("open", name));
        // The kernel's storage of a cgroup is read and written by key, as a hash is.
        let hash = |name: &'static str| Ok::<_, Error>(Map::HashMap(open(name)?));
        Ok(Some(Self {
            records: HashMap::try_from(hash("records")?).map_err(failed("open", "records"))?,
            addresses: HashMap::try_from(hash("addresses")?)
                .map_err(failed("open", "addresses"))?,
            identities: HashMap::try_from(hash("identities")?)
                .map_err(failed("open", "identities"))?,
            counters: PerCpuHashMap::try_from(Map::PerCpuHashMap(open("counters")?))
                .map_err(failed("open", "counters"))?,
        }))
    }

    /// All records with their cgroups' numbers, by number of the identity.
    pub(crate) fn records(&self) -> Result<Vec<(u64, Record)>, Error> {
        let found: Result<Vec<_>, MapError> = self.records.iter().collect();
        let found = found.map_err(failed("read", "records"))?;
        let mut records: Vec<(u64, Record)> = found
            .into_iter()
            .filter(|(cgroup, _)| *cgroup != LAST_NUMBER)
            .map(|(cgroup, bytes)| (cgroup, Record(bytes)))
            .collect();
        records.sort_by_key(|(_, record)| record.word(Record::number()));
        Ok(records)
    }

    pub(crate) fn set_record(&mut self, cgroup: u64, record: &Record) -> Result<(), Error> {
        let written = self.records.insert(cgroup, record.0, 0);
        written.map_err(failed("write", "records"))
    }

    /// The number that was given out last; 0 if none was.
    pub(crate) fn last_number(&self) -> Result<u32, Error> {
        match self.records.get(&LAST_NUMBER, 0) {
            Ok(record) => Ok(Record(record).word(Record::number())),
            Err(MapError::KeyNotFound) => Ok(0),
            Err(error) => Err(failed("read", "records")(error)),
        }
    }

    pub(crate) fn set_last_number(&mut self, number: u32) -> Result<(), Error> {
        let mut record = Record::default();
        record.set_word(Record::number(), number);
        self.set_record(LAST_NUMBER, &record)
    }

    pub(crate) fn delete_record(&mut self, cgroup: u64) -> Result<(), Error> {
        absent_is_fine(self.records.remove(&cgroup)).map_err(failed("write", "records"))
    }

    pub(crate) fn set_owner(&mut self, address: [u8; 16], owner: Owner) -> Result<(), Error> {
        let written = self.addresses.insert(address, owner.0, 0);
        written.map_err(failed("write", "addresses"))
    }

    /// Deletes all addresses of an identity.
    pub(crate) fn delete_owned(&mut self, number: u32) -> Result<(), Error> {
        let keys: Result<Vec<_>, MapError> = self
            .addresses
            .iter()
            .filter(|entry| {
                entry.as_ref().map_or(true, |(_, owner)| {
                    Owner(*owner).word(Owner::number()) == number
                })
            })
            .map(|entry| entry.map(|(key, _)| key))
            .collect();
        for key in keys.map_err(failed("read", "addresses"))? {
            absent_is_fine(self.addresses.remove(&key)).map_err(failed("write", "addresses"))?;
        }
        Ok(())
    }

    /// Whether programs have been attached to the cgroup, and it, or a socket of it, still is.
    pub(crate) fn is_alive(&self, cgroup: u64) -> Result<bool, Error> {
        match self.identities.get(&cgroup, 0) {
            Ok(_) => Ok(true),
            Err(MapError::KeyNotFound) => Ok(false),
            Err(error) => Err(failed("read", "identities")(error)),
        }
    }

    /// Writes what the programs of a cgroup go by: from the next call on, all of it.
    pub(crate) fn set_identity(
        &mut self,
        cgroup: u64,
        identity: &IdentityValue,
    ) -> Result<(), Error> {
        let written = self.identities.insert(cgroup, identity.0, 0);
        written.map_err(failed("write", "identities"))
    }

    /// Has the programs of a cgroup do nothing. One that is gone has none.
    pub(crate) fn clear_identity(&mut self, cgroup: u64) -> Result<(), Error> {
        if self.is_alive(cgroup)? {
            self.set_identity(cgroup, &IdentityValue::default())?;
        }
        Ok(())
    }

    /// What was counted, over all CPUs. Of a cgroup that is gone, nothing.
    pub(crate) fn counters(&self, cgroup: u64) -> Result<Counters, Error> {
        let mut total = Counters::default();
        match self.counters.get(&cgroup, 0) {
            Ok(values) => values
                .iter()
                .for_each(|value| total.add(&CountersValue(*value))),
            Err(MapError::KeyNotFound) => {}
            Err(error) => return Err(failed("read", "counters")(error)),
        }
        Ok(total)
    }

    pub(crate) fn clear_counters(&mut self, cgroup: u64) -> Result<(), Error> {
        let count = aya::util::nr_cpus()
            .map_err(|(_, source)| Error::system("count", "the CPUs", source))?;
        let zeros = PerCpuValues::try_from(vec![[0; COUNTERS]; count]);
        let zeros = zeros.map_err(|source| Error::system("count", "the CPUs", source))?;
        let written = self.counters.insert(cgroup, zeros, 0);
        written.map_err(failed("write", "counters"))
    }
}

fn failed(operation: &'static str, map: &'static str) -> impl Fn(MapError) -> Error {
    move |error| Error::Map {
        operation,
        map,
        source: error.into(),
    }
}

fn absent_is_fine(result: Result<(), MapError>) -> Result<(), MapError> {
    match result {
        Err(MapError::SyscallError(error))
            if error.io_error.raw_os_error() == Some(libc::ENOENT) =>
        {
            Ok(())
        }
        Err(MapError::KeyNotFound) => Ok(()),
        other => other,
    }
}

/// Why something was refused: as `enum refusal`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Refusal {
    /// bind to an address that isn't the identity's.
    BindAddress,
    /// bind to the wildcard of a family in which the identity has no address.
    BindFamily,
    /// connect or send to the loopback of others, or to a service of the host on the own loopback.
    ConnectLoopback,
    /// connect or send to a family in which the identity has no address.
    ConnectFamily,
    /// connect or send from an address that isn't the identity's, or that can't be had any more.
    Source,
    /// A socket of a kind that can't be confined.
    Protocol,
    /// A packet to a socket of the identity, but to the address of somebody else.
    IngressAddress,
    /// A packet of somebody else to the identity's loopback.
    IngressLoopback,
    /// A packet from an address that isn't the identity's.
    EgressSource,
}

impl Refusal {
    /// All, in the order of their numbers.
    pub const ALL: [Self; 9] = [
        Self::BindAddress,
        Self::BindFamily,
        Self::ConnectLoopback,
        Self::ConnectFamily,
        Self::Source,
        Self::Protocol,
        Self::IngressAddress,
        Self::IngressLoopback,
        Self::EgressSource,
    ];

    /// Its name in answers.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::BindAddress => "bind_address",
            Self::BindFamily => "bind_family",
            Self::ConnectLoopback => "connect_loopback",
            Self::ConnectFamily => "connect_family",
            Self::Source => "source",
            Self::Protocol => "protocol",
            Self::IngressAddress => "ingress_address",
            Self::IngressLoopback => "ingress_loopback",
            Self::EgressSource => "egress_source",
        }
    }
}

/// Traffic in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Traffic {
    /// Packets as they are on the wire: a super-packet counts as those that it will be cut into.
    pub packets: u64,
    /// Bytes of IP packets; of a super-packet, with one header.
    pub bytes: u64,
}

/// What an identity's sockets did since it was added.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// What they sent.
    pub egress: Traffic,
    /// What they received.
    pub ingress: Traffic,
    /// What was refused, by reason; reasons that never occurred are left out.
    pub refused: std::collections::BTreeMap<Refusal, u64>,
}

impl Counters {
    fn add(&mut self, value: &CountersValue) {
        let long = |place: Place, index: usize| {
            value.long(Place {
                offset: place.offset + index * 8,
                size: 8,
            })
        };
        let (egress, ingress) = (CountersValue::egress(), CountersValue::ingress());
        self.egress.packets += long(egress, 0);
        self.egress.bytes += long(egress, 1);
        self.ingress.packets += long(ingress, 0);
        self.ingress.bytes += long(ingress, 1);
        for (index, refusal) in Refusal::ALL.into_iter().enumerate() {
            debug_assert!(index < REFUSALS_MAX);
            let count = long(CountersValue::refusals(), index);
            if count > 0 {
                *self.refused.entry(refusal).or_default() += count;
            }
        }
    }
}

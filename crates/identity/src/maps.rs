//! The pinned maps, as the command line reads and writes them.

use std::{collections::BTreeSet, os::fd::AsFd, path::Path};

use aya::{
    Pod,
    maps::{Array, HashMap, IterableMap, Map, MapData, MapError, PerCpuHashMap, PerCpuValues},
};
use sandwire_api::identity::{Counters, Refusal};
use sandwire_kernel_net::bpf;

use crate::{
    Error,
    abi::{
        CountersValue, DIALER_KEY, Dialer, IdentityValue, LISTENER_KEY, LISTENER_KEY_NUMBER, Owner,
        Place, REFUSALS_MAX, Record, Tally, TcpTally,
    },
    policies::Policies,
    record::Facts,
};

/// All maps of the object, by name.
pub(crate) const NAMES: [&str; 12] = [
    "identities",
    "counters",
    "records",
    "addresses",
    "listeners",
    "sockets",
    "called",
    "policies",
    "prefixes",
    "rule_lists",
    "texts",
    "tallies",
];

/// Maps that came later: the folder of a former version may lack them, and gets them with the programs.
pub(crate) const ADDED: [&str; 9] = [
    "dialers",
    "dialed",
    "tcp_tallies",
    "counted",
    "receivers",
    "receiving",
    BOUND,
    "asked",
    HAS_RECEIVERS,
];
/// Where programs tell of sockets that are to be put among the receivers.
pub(crate) const BOUND: &str = "bound";

const HAS_RECEIVERS: &str = "has_receivers";

/// Where the map of records has the number that was given out last: no cgroup has this one.
const LAST_NUMBER: u64 = 0;
/// Maps of sockets by a listener's key, with their room.
const SOCKETS: [&str; 2] = ["listeners", "receivers"];
const SOCKETS_MAX: usize = 262_144;
const RECORD: usize = size_of::<Record>();
const IDENTITY: usize = size_of::<IdentityValue>();
const OWNER: usize = size_of::<Owner>();
const COUNTERS: usize = size_of::<CountersValue>();
const TALLY: usize = size_of::<Tally>();
const DIALER: usize = size_of::<Dialer>();
const TCP_TALLY: usize = size_of::<TcpTally>();

/// Maps that the command line uses.
pub(crate) struct Maps {
    records: HashMap<MapData, u64, [u8; RECORD]>,
    addresses: HashMap<MapData, [u8; 16], [u8; OWNER]>,
    identities: HashMap<MapData, u64, [u8; IDENTITY]>,
    counters: PerCpuHashMap<MapData, u64, [u8; COUNTERS]>,
    tallies: HashMap<MapData, u32, [u8; TALLY]>,
    pub(crate) policies: Policies,
    /// Only once the programs of this version were loaded.
    tcp: Option<TcpMaps>,
    /// As before.
    has_receivers: Option<Array<MapData, u32>>,
}

/// What is known of connections of identities that have TCP only.
struct TcpMaps {
    dialers: HashMap<MapData, [u8; DIALER_KEY], [u8; DIALER]>,
    tallies: HashMap<MapData, u32, [u8; TCP_TALLY]>,
}

impl Maps {
    /// Opens the maps in a folder of pins; `None` if they aren't there.
    pub(crate) fn open(folder: &Path) -> Result<Option<Self>, Error> {
        if NAMES.iter().any(|name| !folder.join(name).exists()) {
            return Ok(None);
        }
        // The kernel's storage of a cgroup is read and written by key, as a hash is.
        let hash = |name: &'static str| Ok::<_, Error>(Map::HashMap(open_map(folder, name)?));
        let counters = Map::PerCpuHashMap(open_map(folder, "counters")?);
        Ok(Some(Self {
            records: HashMap::try_from(hash("records")?).map_err(failed("open", "records"))?,
            addresses: HashMap::try_from(hash("addresses")?)
                .map_err(failed("open", "addresses"))?,
            identities: HashMap::try_from(hash("identities")?)
                .map_err(failed("open", "identities"))?,
            counters: PerCpuHashMap::try_from(counters).map_err(failed("open", "counters"))?,
            tallies: HashMap::try_from(hash("tallies")?).map_err(failed("open", "tallies"))?,
            policies: Policies::open(folder)?,
            tcp: TcpMaps::open(folder)?,
            has_receivers: open_has_receivers(folder)?,
        }))
    }

    /// All records with their cgroups' numbers, by number of the identity.
    pub(crate) fn records(&self) -> Result<Vec<(u64, Record)>, Error> {
        let mut records: Vec<(u64, Record)> = entries(&self.records, "records")?
            .into_iter()
            .map(|(cgroup, bytes)| (u64::from_ne_bytes(cgroup), Record(bytes)))
            .filter(|(cgroup, _)| *cgroup != LAST_NUMBER)
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

    /// Says whether any identity may have UDP sockets that receive at addresses which they aren't bound to.
    pub(crate) fn set_has_receivers(&mut self, is_so: bool) -> Result<(), Error> {
        let Some(map) = &mut self.has_receivers else {
            return Ok(());
        };
        let written = map.set(0, u32::from(is_so), 0);
        written.map_err(failed("write", HAS_RECEIVERS))
    }

    /// Deletes the addresses of an identity; those that are another's stay.
    pub(crate) fn delete_owned(
        &mut self,
        number: u32,
        addresses: impl IntoIterator<Item = [u8; 16]>,
    ) -> Result<(), Error> {
        for address in addresses {
            let owner = match self.addresses.get(&address, 0) {
                Ok(owner) => Owner(owner),
                Err(MapError::KeyNotFound) => continue,
                Err(error) => return Err(failed("read", "addresses")(error)),
            };
            if owner.word(Owner::number()) == number {
                absent_is_fine(self.addresses.remove(&address))
                    .map_err(failed("write", "addresses"))?;
            }
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

    /// What was counted, over all CPUs, and how many sockets listen. Of a cgroup that is gone, less.
    pub(crate) fn counters(&self, cgroup: u64, facts: &Facts) -> Result<(Counters, u64), Error> {
        let number = facts.number;
        let mut total = Counters::default();
        let tally = match self.tallies.get(&number, 0) {
            Ok(bytes) => Tally(bytes),
            Err(MapError::KeyNotFound) => Tally::default(),
            Err(error) => return Err(failed("read", "tallies")(error)),
        };
        match self.counters.get(&cgroup, 0) {
            Ok(values) => values
                .iter()
                .for_each(|value| add(&mut total, &CountersValue(*value))),
            Err(MapError::KeyNotFound) => {}
            Err(error) => return Err(failed("read", "counters")(error)),
        }
        count(
            &mut total,
            Refusal::HostService,
            tally.long(Tally::host_service()),
        );
        // A former version made entries of all, and what is counted in them was counted by packets already.
        if let Some(maps) = self.tcp.as_ref().filter(|_| facts.tcp_only) {
            maps.add(&mut total, number)?;
        }
        Ok((total, tally.long(Tally::listeners())))
    }

    /// Makes an identity's entry that programs count in.
    pub(crate) fn start_tally(&mut self, facts: &Facts) -> Result<(), Error> {
        let number = facts.number;
        let written = self.tallies.insert(number, [0; TALLY], 0);
        written.map_err(failed("write", "tallies"))?;
        let Some(maps) = self.tcp.as_mut().filter(|_| facts.tcp_only) else {
            return Ok(());
        };
        let written = maps.tallies.insert(number, [0; TCP_TALLY], 0);
        written.map_err(failed("write", "tcp_tallies"))
    }

    /// Deletes the entry of an identity that programs counted in.
    pub(crate) fn end_tally(&mut self, number: u32) -> Result<(), Error> {
        absent_is_fine(self.tallies.remove(&number)).map_err(failed("write", "tallies"))?;
        let Some(maps) = &mut self.tcp else {
            return Ok(());
        };
        absent_is_fine(maps.tallies.remove(&number)).map_err(failed("write", "tcp_tallies"))
    }

    /// Whether sockets of an identity that are open still may be among those that listen and receive.
    pub(crate) fn may_listen(&self, number: u32) -> Result<bool, Error> {
        match self.tallies.get(&number, 0) {
            Ok(bytes) => Ok(Tally(bytes).long(Tally::listeners()) > 0),
            // An earlier attempt to remove it came so far.
            Err(MapError::KeyNotFound) => Ok(true),
            Err(error) => Err(failed("read", "tallies")(error)),
        }
    }

    /// Deletes what connections of identities have left that had TCP only: once their programs are gone, nobody else
    /// does.
    pub(crate) fn forget_dialers(&mut self, numbers: &BTreeSet<u32>) -> Result<(), Error> {
        match &mut self.tcp {
            Some(maps) if !numbers.is_empty() => maps.forget_dialers(numbers),
            _ => Ok(()),
        }
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

/// Takes sockets of identities out of those that listen and receive. They may be open for as long as they like; another
/// identity that has the number one day is none of theirs.
pub(crate) fn forget_sockets(folder: &Path, numbers: &BTreeSet<u32>) -> Result<(), Error> {
    for name in SOCKETS
        .into_iter()
        .filter(|name| folder.join(name).exists())
    {
        // Written and read by key, as a hash is.
        let map = Map::HashMap(open_map(folder, name)?);
        let mut map: HashMap<MapData, [u8; LISTENER_KEY], [u8; 8]> =
            HashMap::try_from(map).map_err(failed("open", name))?;
        let mut leaving = BTreeSet::new();
        // Where one goes meanwhile, the kernel begins anew.
        for key in map.keys().take(4 * SOCKETS_MAX) {
            let key = key.map_err(failed("read", name))?;
            if numbers.contains(&number_of(&key)) {
                leaving.insert(key);
            }
        }
        for key in leaving {
            absent_is_fine(map.remove(&key)).map_err(failed("write", name))?;
        }
    }
    Ok(())
}

fn number_of(key: &[u8; LISTENER_KEY]) -> u32 {
    let number = key[LISTENER_KEY_NUMBER..].first_chunk();
    u32::from_ne_bytes(number.copied().unwrap_or_default())
}

impl TcpMaps {
    fn open(folder: &Path) -> Result<Option<Self>, Error> {
        let needed = ["dialers", "tcp_tallies"];
        if needed.iter().any(|name| !folder.join(name).exists()) {
            return Ok(None);
        }
        let hash = |name: &'static str| Ok::<_, Error>(Map::HashMap(open_map(folder, name)?));
        let (dialers, tallies) = (hash("dialers")?, hash("tcp_tallies")?);
        Ok(Some(Self {
            dialers: HashMap::try_from(dialers).map_err(failed("open", "dialers"))?,
            tallies: HashMap::try_from(tallies).map_err(failed("open", "tcp_tallies"))?,
        }))
    }

    /// Adds what connections have done, as far as it has been counted.
    fn add(&self, total: &mut Counters, number: u32) -> Result<(), Error> {
        let tally = match self.tallies.get(&number, 0) {
            Ok(bytes) => TcpTally(bytes),
            Err(MapError::KeyNotFound) => return Ok(()),
            Err(error) => return Err(failed("read", "tcp_tallies")(error)),
        };
        let figure = |index: usize| {
            tally.long(Place {
                offset: TcpTally::traffic().offset + index * 8,
                size: 8,
            })
        };
        total.egress.packets += figure(0);
        total.egress.bytes += figure(1);
        total.ingress.packets += figure(2);
        total.ingress.bytes += figure(3);
        let refused = tally.long(TcpTally::ingress_loopback());
        count(total, Refusal::IngressLoopback, refused);
        Ok(())
    }

    fn forget_dialers(&mut self, numbers: &BTreeSet<u32>) -> Result<(), Error> {
        for (key, dialer) in entries(&self.dialers, "dialers")? {
            if numbers.contains(&Dialer(dialer).word(Dialer::number())) {
                absent_is_fine(self.dialers.remove(&key)).map_err(failed("write", "dialers"))?;
            }
        }
        Ok(())
    }
}

fn open_has_receivers(folder: &Path) -> Result<Option<Array<MapData, u32>>, Error> {
    if !folder.join(HAS_RECEIVERS).exists() {
        return Ok(None);
    }
    let map = Map::Array(open_map(folder, HAS_RECEIVERS)?);
    let map = Array::try_from(map).map_err(failed("open", HAS_RECEIVERS))?;
    Ok(Some(map))
}

/// A map by its pin.
pub(crate) fn open_map(folder: &Path, name: &'static str) -> Result<MapData, Error> {
    MapData::from_pin(folder.join(name)).map_err(failed("open", name))
}

type Entries<const KEY: usize, const VALUE: usize> = Vec<([u8; KEY], [u8; VALUE])>;

/// All entries of a map.
pub(crate) fn entries<K: Pod, const KEY: usize, const VALUE: usize>(
    map: &impl IterableMap<K, [u8; VALUE]>,
    name: &'static str,
) -> Result<Entries<KEY, VALUE>, Error> {
    let found = bpf::entries_as_bytes(map.map().fd().as_fd());
    found.map_err(|source| Error::system("read", format!("the map {name}"), source))
}

pub(crate) fn failed(operation: &'static str, map: &'static str) -> impl Fn(MapError) -> Error {
    move |error| Error::Map {
        operation,
        map,
        source: error.into(),
    }
}

pub(crate) fn absent_is_fine(result: Result<(), MapError>) -> Result<(), MapError> {
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

/// Adds what one CPU has counted.
fn add(total: &mut Counters, value: &CountersValue) {
    let long = |place: Place, index: usize| {
        value.long(Place {
            offset: place.offset + index * 8,
            size: 8,
        })
    };
    let (egress, ingress) = (CountersValue::egress(), CountersValue::ingress());
    total.egress.packets += long(egress, 0);
    total.egress.bytes += long(egress, 1);
    total.ingress.packets += long(ingress, 0);
    total.ingress.bytes += long(ingress, 1);
    for (index, refusal) in Refusal::ALL.into_iter().enumerate() {
        debug_assert!(index < REFUSALS_MAX);
        count(total, refusal, long(CountersValue::refusals(), index));
    }
}

fn count(total: &mut Counters, refusal: Refusal, count: u64) {
    if count > 0 {
        *total.refused.entry(refusal).or_default() += count;
    }
}

//! What is asked for, what is remembered, and what is answered.

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
};

use ipnet::IpNet;
use sandwire_api::{
    identity::{Allowed, Counters, Identity, IdentityPolicy, State},
    name::Name,
};
use sandwire_datapath::group_number;

use crate::{
    Error,
    abi::{
        self, IdentityValue, Owner, Place, RECORD_PATH_MAX, Record, identity_flag, owner_flag,
        record_flag, record_state,
    },
    numbers,
    programs::Needs,
};

/// An identity to be added.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewIdentity {
    /// Folder of the cgroup.
    pub cgroup: PathBuf,
    /// Its name; by default that of the cgroup.
    pub name: Option<Name>,
    /// Its addresses; the first of each family is what sockets get that choose none.
    pub addresses: Vec<IpAddr>,
    /// The interface that the addresses are put on.
    pub interface: String,
    /// Whether addresses may be on an interface already. Those stay when the identity goes.
    pub existing: bool,
    /// What it may do.
    pub allowed: Allowed,
    /// Whether it makes no sockets but TCP's. Then nothing is done per packet.
    pub tcp_only: bool,
    /// What it may reach.
    pub policy: IdentityPolicy,
    /// Prefixes of which one free address each is taken, after `addresses`.
    pub prefixes: Vec<IpNet>,
    /// Whether the cgroup was made for it: it is removed with the identity, and the identity with it, once nobody is in
    /// it and nobody holds a lock on its folder.
    pub own_cgroup: bool,
    /// The daemon's instance whose configuration has it.
    pub declared_by: Option<Name>,
}

/// No identity's.
const NO_NUMBER: u32 = 0;

/// The number of a daemon's instance in records; 0 is nobody's.
#[must_use]
pub fn instance_number(instance: &Name) -> u32 {
    group_number(instance.as_str()).max(1)
}

fn flags_of(allowed: Allowed) -> u32 {
    let flags = [
        (allowed.other_protocols, identity_flag::ALLOW_OTHER),
        (allowed.loopback, identity_flag::ALLOW_LOOPBACK),
        (allowed.host_services, identity_flag::ALLOW_HOST),
    ];
    let set = flags.into_iter().filter(|(is_set, _)| *is_set);
    set.fold(0, |flags, (_, flag)| flags | flag)
}

fn allowed_of(flags: u32) -> Allowed {
    Allowed {
        other_protocols: flags & identity_flag::ALLOW_OTHER != 0,
        loopback: flags & identity_flag::ALLOW_LOOPBACK != 0,
        host_services: flags & identity_flag::ALLOW_HOST != 0,
    }
}

/// The fixed facts of an identity, as its record has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    pub(crate) netns: u64,
    pub(crate) number: u32,
    pub(crate) name: Name,
    pub(crate) path: PathBuf,
    pub(crate) addresses: Vec<IpAddr>,
    /// Whether each address was put on the interface by us.
    pub(crate) ours: Vec<bool>,
    pub(crate) has_loopback6: bool,
    pub(crate) has_own_cgroup: bool,
    pub(crate) interface: u32,
    pub(crate) allowed: Allowed,
    pub(crate) tcp_only: bool,
    /// Number of the instance whose configuration has it, or 0.
    pub(crate) declared_by: u32,
    /// Whether sockets of IPv6 are closed to IPv4 unless told otherwise.
    pub(crate) v6only: bool,
}

impl Facts {
    /// `enum identity_flag`, but for whether it is active.
    fn flags(&self) -> u32 {
        let mut flags = flags_of(self.allowed);
        if self.tcp_only {
            flags |= identity_flag::TCP_ONLY;
        }
        if self.v6only {
            flags |= identity_flag::V6ONLY;
        }
        if self.has_receivers() {
            flags |= identity_flag::SEVERAL;
        }
        flags
    }

    /// Whether it may have UDP sockets that receive at addresses which they aren't bound to.
    pub(crate) fn has_receivers(&self) -> bool {
        self.addresses.len() > 1 && !self.tcp_only
    }

    /// The programs that it needs.
    pub(crate) fn needs(&self) -> Needs {
        Needs {
            packets: !self.tcp_only,
            receivers: self.has_receivers(),
        }
    }

    /// Whether addresses, policy and listeners are its own: not of a cgroup that the identity isn't of yet, or any more, which has what it
    /// has by the number in its storage.
    pub(crate) fn has_number(&self) -> bool {
        self.number != NO_NUMBER
    }

    /// The same without what is there once for all cgroups of an identity.
    pub(crate) fn without_number(&self) -> Self {
        Self {
            number: NO_NUMBER,
            ours: vec![false; self.addresses.len()],
            has_loopback6: false,
            ..self.clone()
        }
    }

    /// As a record.
    pub(crate) fn record(&self, state: u32) -> Result<Record, Error> {
        let mut record = Record::default();
        record.set_long(Record::netns(), self.netns);
        record.set_word(Record::state(), state);
        record.set_word(Record::number(), self.number);
        record.set_word(Record::identity_flags(), self.flags());
        let flags = [
            (self.has_loopback6, record_flag::LOOPBACK6),
            (self.has_own_cgroup, record_flag::OWN_CGROUP),
        ];
        let set = flags.into_iter().filter(|(is_set, _)| *is_set);
        let flags = set.fold(0, |flags, (_, flag)| flags | flag);
        record.set_word(Record::flags(), flags);
        record.set_word(Record::interface(), self.interface);
        record.set_word(Record::declared_by(), self.declared_by);
        let count = self.addresses.len();
        if count == 0 || count > abi::RECORD_ADDRESSES_MAX {
            return Err(Error::AddressCount { count });
        }
        let places = record.get_mut(Record::addresses()).chunks_exact_mut(16);
        for (place, address) in places.zip(&self.addresses) {
            place.copy_from_slice(&abi::address_bytes(*address));
        }
        let words = (0_u32..).zip(&self.ours).filter(|(_, is_ours)| **is_ours);
        let ours = words.fold(0, |bits, (index, _)| bits | 1 << index);
        record.set_word(Record::ours(), ours);
        let count = u32::try_from(count).expect("at most 16");
        record.set_word(Record::address_count(), count);
        put_text(&mut record, Record::name(), self.name.as_str().as_bytes());
        let path = self.path.to_str().ok_or_else(|| Error::PathBytes {
            path: self.path.clone(),
        })?;
        if path.len() > RECORD_PATH_MAX {
            return Err(Error::LongPath {
                path: self.path.clone(),
            });
        }
        put_text(&mut record, Record::path(), path.as_bytes());
        Ok(record)
    }

    /// From a record; `None` if it isn't one of ours.
    pub(crate) fn read(record: &Record) -> Option<Self> {
        let count = record.word(Record::address_count()) as usize;
        let (addresses, _) = record.get(Record::addresses()).as_chunks::<16>();
        let addresses = addresses.get(..count)?.iter().copied();
        let ours = record.word(Record::ours());
        Some(Self {
            netns: record.long(Record::netns()),
            number: record.word(Record::number()),
            name: text(record, Record::name())?.parse().ok()?,
            path: PathBuf::from(text(record, Record::path())?),
            addresses: addresses.map(abi::address_of).collect(),
            ours: (0..count).map(|index| ours & 1 << index != 0).collect(),
            has_loopback6: record.word(Record::flags()) & record_flag::LOOPBACK6 != 0,
            has_own_cgroup: record.word(Record::flags()) & record_flag::OWN_CGROUP != 0,
            interface: record.word(Record::interface()),
            declared_by: record.word(Record::declared_by()),
            allowed: allowed_of(record.word(Record::identity_flags())),
            tcp_only: record.word(Record::identity_flags()) & identity_flag::TCP_ONLY != 0,
            v6only: record.word(Record::identity_flags()) & identity_flag::V6ONLY != 0,
        })
    }

    /// What the programs of the cgroup go by.
    pub(crate) fn value(&self) -> IdentityValue {
        let mut value = IdentityValue::default();
        value.set_long(IdentityValue::netns(), self.netns);
        value.set_word(IdentityValue::number(), self.number);
        value.set_word(IdentityValue::flags(), self.flags() | identity_flag::ACTIVE);
        for address in self.addresses.iter().rev() {
            match address {
                IpAddr::V4(address) => value.set_ipv4(IdentityValue::ipv4(), *address),
                IpAddr::V6(address) => value.set_ipv6(IdentityValue::ipv6(), *address),
            }
        }
        value.set_ipv4(IdentityValue::loopback4(), numbers::loopback4(self.number));
        value.set_ipv6(IdentityValue::loopback6(), numbers::loopback6(self.number));
        value
    }

    /// Entries of the map `addresses`.
    pub(crate) fn owners(&self) -> Vec<([u8; 16], Owner)> {
        let mut flags = 0;
        if self.allowed.host_services {
            flags |= owner_flag::ALLOW_HOST;
        }
        if self.has_receivers() {
            flags |= owner_flag::SEVERAL;
        }
        let entry = |address, flags| {
            let mut owner = Owner::default();
            owner.set_word(Owner::number(), self.number);
            owner.set_word(Owner::flags(), flags);
            (abi::address_bytes(address), owner)
        };
        let loopback = [
            IpAddr::V4(numbers::loopback4(self.number)),
            IpAddr::V6(numbers::loopback6(self.number)),
        ];
        let addresses = self.addresses.iter().map(|address| entry(*address, flags));
        // A service of the host on the wildcard is never at the loopback of an identity.
        let mut of_loopback = owner_flag::LOOPBACK;
        if self.tcp_only {
            of_loopback |= owner_flag::TCP_ONLY;
        }
        if self.allowed.loopback {
            of_loopback |= owner_flag::ALLOW_LOOPBACK;
        }
        let loopback = loopback.map(|address| entry(address, of_loopback));
        addresses.chain(loopback).collect()
    }

    /// As it is answered.
    pub(crate) fn answer(
        &self,
        cgroup_id: u64,
        state: State,
        interface: String,
        (counters, listeners): (Counters, u64),
    ) -> Identity {
        let first = numbers::loopback4(self.number).to_bits() | 1;
        Identity {
            name: self.name.clone(),
            number: self.number,
            state,
            cgroup: self.path.clone(),
            cgroup_id,
            addresses: self.addresses.clone(),
            loopback: [
                IpAddr::V4(first.into()),
                IpAddr::V6(numbers::loopback6(self.number)),
            ],
            interface,
            allowed: self.allowed,
            tcp_only: self.tcp_only,
            declared: self.declared_by != 0,
            listeners,
            counters,
        }
    }
}

/// Whether a record is of an identity in use, not of one that is being added or removed.
pub(crate) fn is_complete(record: &Record) -> bool {
    record.word(Record::state()) == record_state::COMPLETE
}

/// Whether a record is of a cgroup that an identity had before, and of which sockets are open.
pub(crate) fn is_former(record: &Record) -> bool {
    record.word(Record::state()) == record_state::FORMER
}

/// A name for the identity of a cgroup: that of its folder, without what systemd adds.
pub(crate) fn name_of(cgroup: &Path) -> Result<Name, Error> {
    let text = cgroup.file_name().unwrap_or_default().to_string_lossy();
    let stem = [".scope", ".service", ".slice"]
        .iter()
        .find_map(|ending| text.strip_suffix(ending));
    let parsed = stem.unwrap_or(&text).parse::<Name>();
    parsed.map_err(|error| Error::BadName {
        text: text.clone().into_owned(),
        reason: error.to_string(),
    })
}

fn put_text(record: &mut Record, place: Place, text: &[u8]) {
    let bytes = record.get_mut(place);
    bytes[..text.len()].copy_from_slice(text);
}

fn text(record: &Record, place: Place) -> Option<String> {
    let bytes = record.get(place);
    let end = bytes.iter().position(|byte| *byte == 0);
    let bytes = &bytes[..end.unwrap_or(bytes.len())];
    Some(std::str::from_utf8(bytes).ok()?.to_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that can't go on fails")]
mod tests {
    use std::{ffi::OsString, os::unix::ffi::OsStringExt};

    use super::*;

    fn facts() -> Facts {
        Facts {
            netns: 7,
            number: 258,
            name: "web".parse().unwrap(),
            path: PathBuf::from("/sys/fs/cgroup/web"),
            addresses: vec![
                "192.0.2.1".parse().unwrap(),
                "2001:db8::1".parse().unwrap(),
                "192.0.2.2".parse().unwrap(),
            ],
            ours: vec![true, false, true],
            has_loopback6: true,
            has_own_cgroup: true,
            interface: 3,
            allowed: Allowed {
                loopback: true,
                ..Allowed::default()
            },
            tcp_only: true,
            declared_by: 9,
            v6only: true,
        }
    }

    #[test]
    fn a_record_says_all_that_was_written() {
        let record = facts().record(record_state::COMPLETE).unwrap();
        assert!(is_complete(&record));
        assert_eq!(Facts::read(&record), Some(facts()));
    }

    #[test]
    fn the_first_address_of_each_family_is_the_default() {
        let value = facts().value();
        assert_eq!(value.get(IdentityValue::ipv4()), [192, 0, 2, 1]);
        let ipv6: std::net::Ipv6Addr = "2001:db8::1".parse().unwrap();
        assert_eq!(value.get(IdentityValue::ipv6()), ipv6.octets());
        assert_eq!(value.get(IdentityValue::loopback4()), [127, 1, 2, 0]);
        assert_eq!(facts().owners().len(), 5);
    }

    #[test]
    fn of_several_addresses_without_a_loopback_udp_may_receive_at_all() {
        let mut facts = facts();
        facts.tcp_only = false;
        let is_several = |owner: Owner| owner.word(Owner::flags()) & owner_flag::SEVERAL != 0;
        let count = |facts: &Facts| {
            let owners = facts.owners().into_iter();
            owners.filter(|(_, owner)| is_several(*owner)).count()
        };
        assert_eq!((facts.has_receivers(), count(&facts)), (true, 3));
        facts.addresses.truncate(1);
        assert_eq!((facts.has_receivers(), count(&facts)), (false, 0));
    }

    #[test]
    fn a_former_cgroup_has_nothing_that_is_to_be_taken_away() {
        let former = facts().without_number();
        assert!(facts().has_number() && !former.has_number());
        assert!(!former.has_loopback6 && !former.ours.contains(&true));
        assert_eq!((former.name, former.path), (facts().name, facts().path));
        let record = facts().without_number().record(record_state::FORMER);
        assert!(is_former(&record.unwrap()));
    }

    #[test]
    fn what_a_record_cannot_hold_is_refused() {
        let mut long = facts();
        long.path = PathBuf::from("/".repeat(RECORD_PATH_MAX + 1));
        assert!(long.record(1).unwrap_err().to_string().contains("512"));
        let mut strange = facts();
        strange.path = PathBuf::from(OsString::from_vec(b"/sys/fs/cgroup/\xff".to_vec()));
        assert!(strange.record(1).unwrap_err().is_refusal());
        let mut many = facts();
        many.addresses = vec!["192.0.2.1".parse().unwrap(); 17];
        assert!(many.record(1).unwrap_err().is_refusal());
    }

    #[test]
    fn a_cgroup_gives_its_name() {
        let name = name_of(Path::new("/sys/fs/cgroup/system.slice/web.service"));
        assert_eq!(name.unwrap().as_str(), "web");
        let error = name_of(Path::new("/sys/fs/cgroup/Über")).unwrap_err();
        assert!(error.to_string().contains("--name"), "{error}");
    }
}

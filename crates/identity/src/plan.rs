//! From what was asked for to the facts of an identity: what stands against it, which addresses, which number.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::IpAddr,
};

use ipnet::IpNet;
use sandwire_api::{identity::IdentityPolicy, name::Name};
use sandwire_datapath::group_number;
use sandwire_kernel_net::ipv6;

use crate::{
    ADDRESSES_MAX, Cgroup, Error, NewIdentity,
    abi::{RECORD_PATH_MAX, Record},
    interface,
    maps::Maps,
    numbers, policies,
    record::{Facts, instance_number, name_of},
    takeover,
};

/// Addresses that are looked at beyond as many as are taken.
const CANDIDATES: usize = 1024;
/// Bytes of an interface's name (`IFNAMSIZ` without its final zero).
const INTERFACE_NAME_MAX: usize = 15;

/// What is to be built.
pub(crate) struct Planned {
    pub(crate) facts: Facts,
    /// The cgroup, gone, that the identity was of until now; none of one that is new.
    pub(crate) former: Option<u64>,
}

/// Checks what was asked for against what is there, and chooses a number.
pub(crate) fn plan(
    maps: &Maps,
    new: &NewIdentity,
    cgroup: &Cgroup,
    netns: u64,
) -> Result<Planned, Error> {
    let records = maps.records()?;
    let name = match &new.name {
        Some(name) => name.clone(),
        None => name_of(&cgroup.path)?,
    };
    let interface = interface::find(&new.interface).map(|index| index.0);
    let found = interface
        .as_ref()
        .ok()
        .and_then(|index| takeover::candidate(&records, new, &name, cgroup, *index));
    let former = found.as_ref().map(|(id, _)| *id);
    let others: Vec<(u64, Facts)> = records
        .iter()
        .filter_map(|(cgroup, record)| Some((*cgroup, Facts::read(record)?)))
        .filter(|(id, facts)| facts.has_number() && Some(*id) != former)
        .collect();
    check_others(&others, cgroup, name.as_str(), &new.addresses)?;
    if let Some((_, mut facts)) = found {
        facts.v6only = is_v6only();
        return Ok(Planned { facts, former });
    }
    let held = interface::addresses()?;
    let mut addresses = new.addresses.clone();
    choose(&mut addresses, &new.prefixes, &others, &held)?;
    let mut ours = Vec::new();
    for address in &addresses {
        let holder = held.get(address);
        if let Some(interface) = holder
            && !new.existing
        {
            return Err(Error::AddressOnHost {
                address: *address,
                interface: interface::name(*interface)?,
            });
        }
        ours.push(holder.is_none());
    }
    let used: BTreeSet<u32> = records
        .iter()
        .map(|(_, record)| record.word(Record::number()))
        .collect();
    let number = numbers::next(&used, maps.last_number()?).ok_or(Error::Full(used.len()))?;
    let facts = Facts {
        netns,
        number,
        name,
        path: cgroup.path.clone(),
        addresses,
        ours,
        has_loopback6: has_ipv6(),
        has_own_cgroup: new.own_cgroup,
        declared_by: new.declared_by.as_ref().map_or(0, instance_number),
        interface: interface?,
        allowed: new.allowed,
        tcp_only: new.tcp_only,
        v6only: is_v6only(),
    };
    Ok(Planned { facts, former })
}

/// Adds a free address of each prefix: one that neither an identity nor an interface of the host has.
fn choose(
    addresses: &mut Vec<IpAddr>,
    prefixes: &[IpNet],
    others: &[(u64, Facts)],
    held: &BTreeMap<IpAddr, u32>,
) -> Result<(), Error> {
    if prefixes.is_empty() {
        return Ok(());
    }
    let mut taken: BTreeSet<IpAddr> = held.keys().copied().collect();
    taken.extend(others.iter().flat_map(|(_, other)| &other.addresses));
    for prefix in prefixes {
        taken.extend(addresses.iter());
        let chosen = first_free(*prefix, &taken);
        addresses.push(chosen.ok_or(Error::PrefixFull { prefix: *prefix })?);
    }
    Ok(())
}

/// The first address of a prefix that is free, without the one that stands for the prefix.
fn first_free(prefix: IpNet, taken: &BTreeSet<IpAddr>) -> Option<IpAddr> {
    let is_free = |address: &IpAddr| {
        numbers::objection(*address).is_none()
            && !taken.contains(address)
            && (prefix.prefix_len() == prefix.max_prefix_len() || *address != prefix.network())
    };
    // Among more addresses than are taken one is free, but for those that mean something else.
    prefix.hosts().take(taken.len() + CANDIDATES).find(is_free)
}

/// Refuses a group that the kernel couldn't tell from another one.
pub(crate) fn check_groups(
    maps: &Maps,
    number: u32,
    name: &Name,
    policy: &IdentityPolicy,
) -> Result<(), Error> {
    let clash = |group: &Name, other: &Name| Error::GroupClash {
        group: group.to_string(),
        other: other.to_string(),
    };
    let mut named = BTreeMap::new();
    for group in policy.group.iter().chain(&policy.talks_to).chain([name]) {
        let other = named.insert(group_number(group.as_str()), group);
        if let Some(other) = other.filter(|other| *other != group) {
            return Err(clash(group, other));
        }
    }
    let mut others = maps
        .policies
        .groups_of_others(number, &named.keys().copied().collect())?;
    let records = maps.records()?;
    let known = records.iter().filter_map(|(_, record)| Facts::read(record));
    others.extend(known.map(|facts| facts.name));
    for other in others {
        let group = named.get(&group_number(other.as_str()));
        if let Some(group) = group.filter(|group| ***group != other) {
            return Err(clash(group, &other));
        }
    }
    Ok(())
}

fn check_others(
    others: &[(u64, Facts)],
    cgroup: &Cgroup,
    name: &str,
    addresses: &[IpAddr],
) -> Result<(), Error> {
    for (id, other) in others {
        let other_name = other.name.to_string();
        if *id == cgroup.id {
            return Err(Error::CgroupTaken {
                path: cgroup.path.clone(),
                name: other_name,
            });
        }
        let taken = addresses.iter().find(|one| other.addresses.contains(one));
        let is_nested =
            cgroup.path.starts_with(&other.path) || other.path.starts_with(&cgroup.path);
        let is_same = cgroup.path == other.path || other_name == name;
        if !(is_nested || is_same || taken.is_some()) {
            continue;
        }
        if !Cgroup::is_there(&other.path, *id) {
            if is_same || taken.is_some() {
                return Err(Error::Dying {
                    name: other_name,
                    path: other.path.clone(),
                });
            }
            continue;
        }
        if is_nested {
            return Err(Error::Nested {
                path: cgroup.path.clone(),
                other: other.path.clone(),
                name: other_name,
            });
        }
        if other_name == name {
            return Err(Error::NameTaken {
                name: other_name,
                path: other.path.clone(),
            });
        }
        if let Some(address) = taken {
            return Err(Error::AddressTaken {
                address: *address,
                name: other_name,
            });
        }
    }
    Ok(())
}

impl NewIdentity {
    /// Checks what needs to know neither this host nor other identities.
    ///
    /// # Errors
    /// No host could have such an identity.
    pub fn check(&self) -> Result<(), Error> {
        check_addresses(&self.addresses, &self.prefixes)?;
        if self.tcp_only && self.allowed.other_protocols {
            return Err(Error::TcpOnly);
        }
        if !(1..=INTERFACE_NAME_MAX).contains(&self.interface.len()) {
            return Err(Error::NoInterface {
                name: self.interface.clone(),
            });
        }
        if self.cgroup.as_os_str().len() > RECORD_PATH_MAX {
            return Err(Error::LongPath {
                path: self.cgroup.clone(),
            });
        }
        policies::compiled(&self.policy).map(drop)
    }
}

/// Refuses addresses of IPv6 where the kernel has none.
pub(crate) fn check_families(addresses: &[IpAddr], prefixes: &[IpNet]) -> Result<(), Error> {
    let firsts = prefixes.iter().map(IpNet::addr);
    let mut all = addresses.iter().copied().chain(firsts);
    match all.find(|address| address.is_ipv6() && !ipv6::is_known()) {
        Some(address) => Err(Error::BadAddress {
            address,
            reason: "the kernel was booted with ipv6.disable=1, or built without IPv6",
        }),
        None => Ok(()),
    }
}

fn check_addresses(addresses: &[IpAddr], prefixes: &[IpNet]) -> Result<(), Error> {
    let count = addresses.len() + prefixes.len();
    if count == 0 || count > ADDRESSES_MAX {
        return Err(Error::AddressCount { count });
    }
    let mut seen = BTreeSet::new();
    for address in addresses {
        let reason = numbers::objection(*address);
        let reason = reason.or((!seen.insert(address)).then_some("it is given twice"));
        if let Some(reason) = reason {
            return Err(Error::BadAddress {
                address: *address,
                reason,
            });
        }
    }
    Ok(())
}

/// Whether the loopback interface has IPv6; without, nobody can use `::1` anyway.
fn has_ipv6() -> bool {
    let setting = fs::read_to_string("/proc/sys/net/ipv6/conf/lo/disable_ipv6");
    setting.is_ok_and(|text| text.trim() == "0")
}

/// What `IPV6_V6ONLY` is at first.
fn is_v6only() -> bool {
    let setting = fs::read_to_string("/proc/sys/net/ipv6/bindv6only");
    setting.is_ok_and(|text| text.trim() != "0")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that can't go on fails")]
mod tests {
    use sandwire_api::identity::Allowed;

    use super::*;

    type Change = fn(&mut NewIdentity);

    #[test]
    fn what_no_host_could_have_is_refused_without_asking_it() {
        let new = |change: Change| {
            let mut new = NewIdentity {
                // Its last part gives no name, which nobody needs yet.
                cgroup: ".".into(),
                name: None,
                addresses: vec!["2001:db8::1".parse().unwrap()],
                interface: "absent".to_owned(),
                existing: false,
                allowed: Allowed::default(),
                tcp_only: false,
                policy: IdentityPolicy::default(),
                prefixes: Vec::new(),
                own_cgroup: false,
                declared_by: None,
            };
            change(&mut new);
            new.check().map_err(|error| error.to_string())
        };
        assert_eq!(new(|_| ()), Ok(()));
        let refused: [(Change, &str); 6] = [
            (|new| new.addresses.clear(), "1 to 16 addresses"),
            (
                |new| new.addresses.push(new.addresses[0]),
                "it is given twice",
            ),
            (
                |new| new.addresses.push("127.0.0.1".parse().unwrap()),
                "loopback",
            ),
            (
                |new| {
                    new.tcp_only = true;
                    new.allowed.other_protocols = true;
                },
                "TCP alone",
            ),
            (|new| new.cgroup = "/".repeat(600).into(), "512 bytes"),
            (
                |new| new.policy.talks_to = vec!["a".parse().unwrap(); 17],
                "17 groups",
            ),
        ];
        for (change, words) in refused {
            let error = new(change).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn the_first_free_address_of_a_prefix_is_taken() {
        let free = |prefix: &str, taken: &[&str]| {
            let taken = taken.iter().map(|text| text.parse().unwrap()).collect();
            let found = first_free(prefix.parse().unwrap(), &taken);
            found.map(|found| found.to_string())
        };
        assert_eq!(free("10.0.0.0/30", &[]).as_deref(), Some("10.0.0.1"));
        let taken = ["10.0.0.1", "192.0.2.1"];
        assert_eq!(free("10.0.0.0/30", &taken).as_deref(), Some("10.0.0.2"));
        let taken = ["10.0.0.1", "10.0.0.2"];
        assert_eq!(free("10.0.0.0/30", &taken), None);
        assert_eq!(free("10.0.0.7/32", &[]).as_deref(), Some("10.0.0.7"));
        assert_eq!(free("fd77::/64", &[]).as_deref(), Some("fd77::1"));
        assert_eq!(free("127.0.0.0/8", &[]), None);
    }
}

//! An identity that goes on in a new cgroup at the same path, as that of a service which is started anew, while sockets of the one
//! before are still open.
//!
//! Both cgroups have the identity's number, so that addresses, policy and listeners are those of old and new sockets alike.
//! Nothing of that is made or taken away. The record of the former cgroup stays, without the number, until the kernel lets go of
//! its last socket, and goes with the identity if that is removed sooner. The policy is the sockets' of before, too, so it is changed
//! only once the kernel has taken the programs. The steps:
//!
//! ```text
//! record (building, without number), namespace, programs (idle), policy, entry (active), record (complete), former record (former)
//! ```

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;
use sandwire_api::name::Name;

use crate::{
    Cgroup, Error, Identities, NewIdentity,
    abi::{Record, record_state},
    identities::Open,
    loading::Programs,
    maps::Maps,
    policies::Prepared,
    record::{Facts, instance_number, is_complete, is_former},
};

/// Former cgroups of one identity. A service that leaves sockets open and is started anew without end has no more.
const FORMERS_MAX: usize = 16;

/// The identity that goes on in a new cgroup, if what is asked for is just that one; its interface is known by number.
pub(crate) fn candidate(
    records: &[(u64, Record)],
    new: &NewIdentity,
    name: &Name,
    cgroup: &Cgroup,
    interface: u32,
) -> Option<(u64, Facts)> {
    let read = |wanted: fn(&Record) -> bool| {
        let wanted = records.iter().filter(move |(_, record)| wanted(record));
        let read = wanted.filter_map(|(id, record)| Some((*id, Facts::read(record)?)));
        read.filter(|(_, facts)| facts.name == *name)
    };
    let (id, facts) = read(is_complete).next()?;
    let declared_by = new.declared_by.as_ref().map_or(0, instance_number);
    let is_same = facts.path == cgroup.path
        && facts.interface == interface
        && facts.allowed == new.allowed
        && facts.tcp_only == new.tcp_only
        && facts.declared_by == declared_by
        && !(facts.has_own_cgroup || new.own_cgroup)
        && has_addresses(&facts.addresses, &new.addresses, &new.prefixes);
    let is_gone = id != cgroup.id && !Cgroup::is_there(&facts.path, id);
    (is_same && is_gone && read(is_former).count() < FORMERS_MAX).then_some((id, facts))
}

/// Whether addresses are these, and one of each prefix.
fn has_addresses(found: &[IpAddr], addresses: &[IpAddr], prefixes: &[IpNet]) -> bool {
    let Some(rest) = found.strip_prefix(addresses) else {
        return false;
    };
    let mut of_prefixes = prefixes.iter().zip(rest);
    rest.len() == prefixes.len() && of_prefixes.all(|(prefix, address)| prefix.contains(address))
}

/// Records of former cgroups of identities that are on their way out.
pub(crate) fn formers_of(
    maps: &Maps,
    leaving: &[(u64, Facts)],
) -> Result<Vec<(u64, Facts)>, Error> {
    let ids: BTreeSet<u64> = leaving.iter().map(|(id, _)| *id).collect();
    let numbered = leaving.iter().filter(|(_, facts)| facts.has_number());
    let names: BTreeSet<&Name> = numbered.map(|(_, facts)| &facts.name).collect();
    let records = maps.records()?.into_iter();
    let formers = records.filter(|(id, record)| is_former(record) && !ids.contains(id));
    let formers = formers.filter_map(|(id, record)| Some((id, Facts::read(&record)?)));
    Ok(formers
        .filter(|(_, facts)| names.contains(&facts.name))
        .collect())
}

/// Finishes what was cut off between the last two steps: of two cgroups of one identity the younger has the higher number.
pub(crate) fn finish(maps: &mut Maps, records: &[(u64, Record)]) -> Result<(), Error> {
    let complete = records.iter().filter(|(_, record)| is_complete(record));
    let mut complete: Vec<(u64, Facts)> = complete
        .filter_map(|(id, record)| Some((*id, Facts::read(record)?)))
        .filter(|(_, facts)| facts.has_number())
        .collect();
    complete.sort_by_key(|(id, facts)| (facts.number, *id));
    for pair in complete.windows(2) {
        if let [(id, facts), (_, younger)] = pair
            && facts.number == younger.number
        {
            set_former(maps, *id, facts)?;
        }
    }
    Ok(())
}

fn set_former(maps: &mut Maps, id: u64, facts: &Facts) -> Result<(), Error> {
    let record = facts.without_number().record(record_state::FORMER)?;
    maps.set_record(id, &record)
}

impl Identities {
    /// Has an identity go on in a new cgroup.
    pub(crate) fn take_over(
        &self,
        open: &mut Open,
        programs: &Programs,
        cgroup: &Cgroup,
        (facts, former): (&Facts, u64),
        policy: Option<&Prepared>,
        watch: &mut dyn FnMut(&'static str),
    ) -> Result<(), Error> {
        watch("record");
        let building = facts.without_number().record(record_state::BUILDING)?;
        open.maps.set_record(cgroup.id, &building)?;
        self.activate(open, programs, cgroup, facts, policy, watch)?;
        watch("complete");
        let complete = facts.record(record_state::COMPLETE)?;
        open.maps.set_record(cgroup.id, &complete)?;
        watch("former");
        set_former(&mut open.maps, former, facts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_the_same_if_those_of_prefixes_are_in_them() {
        let parse = |texts: &[&str]| -> Vec<IpAddr> {
            texts.iter().map(|text| text.parse().unwrap()).collect()
        };
        let prefixes = ["fd77::/64".parse().unwrap()];
        let found = parse(&["10.0.0.1", "fd77::1"]);
        assert!(has_addresses(&found, &parse(&["10.0.0.1"]), &prefixes));
        assert!(has_addresses(&found, &found, &[]));
        for (addresses, prefixes) in [
            (&["10.0.0.2"][..], &prefixes[..]),
            (&["10.0.0.1"], &[]),
            (&["10.0.0.1"], &["fd78::/64".parse().unwrap()]),
            (&["10.0.0.1", "fd77::1"], &prefixes),
        ] {
            assert!(!has_addresses(&found, &parse(addresses), prefixes));
        }
    }
}

//! Identities as they are at this moment, for who only reads.
//!
//! Nothing is repaired and nobody is waited for: a command holds the lock for as long as it takes, and may be stopped meanwhile.

use std::collections::BTreeMap;

use sandwire_kernel_net::netns;

use crate::{
    Cgroup, Error, Identities, Identity, connections,
    identities::is_meant,
    maps::Maps,
    record::{Facts, is_complete},
};

/// The maps, and what is known of those in use, with the numbers of their cgroups.
type Seen = (Maps, Vec<(u64, Facts)>);

impl Identities {
    /// All identities. One that has ended is among them until somebody has taken it away, as [`Identities::list`] does.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn snapshot(&self) -> Result<Vec<Identity>, Error> {
        let Some((maps, known)) = self.seen()? else {
            return Ok(Vec::new());
        };
        if known.iter().any(|(_, facts)| facts.tcp_only) {
            connections::LOOKER.run_if_pinned(&self.maps_folder())?;
        }
        let described = known.iter();
        described
            .map(|(cgroup, facts)| self.describe(&maps, *cgroup, facts))
            .collect()
    }

    /// Whether there is such an identity, by name or by the path of its cgroup, and its cgroup is there.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn is_active(&self, wanted: &str) -> Result<bool, Error> {
        let known = self.seen()?.map_or_else(Vec::new, |(_, known)| known);
        Ok(known.iter().any(|(cgroup, facts)| {
            let is_wanted = is_meant(facts.name.as_str(), &facts.path, wanted);
            is_wanted && Cgroup::is_there(&facts.path, *cgroup)
        }))
    }

    /// Those in use, by number.
    fn seen(&self) -> Result<Option<Seen>, Error> {
        let Some(maps) = Maps::open(&self.maps_folder())? else {
            return Ok(None);
        };
        let here = netns::cookie()?;
        let mut known = BTreeMap::new();
        for (cgroup, record) in maps.records()? {
            let facts = Facts::read(&record).filter(|_| is_complete(&record));
            let Some(facts) = facts else {
                continue;
            };
            if facts.netns != here {
                return Err(self.other_namespace());
            }
            // For a moment of a takeover there are two; the younger cgroup has the higher number.
            let other: Option<&(u64, Facts)> = known.get(&facts.number);
            if other.is_none_or(|(other, _)| *other < cgroup) {
                known.insert(facts.number, (cgroup, facts));
            }
        }
        Ok(Some((maps, known.into_values().collect())))
    }
}

//! What an upgrade does: identities that are there run the programs of this build.

use crate::{
    Cgroup, Error, Identities, connections,
    loading::Programs,
    maps::Maps,
    receivers,
    record::{Facts, is_complete, is_former},
};

impl Identities {
    /// Has all identities run the programs of this build, as after an upgrade. Sockets, counters and policies stay, and
    /// every call and packet goes by the old program or by the new one. Returns how many identities there are.
    ///
    /// # Errors
    /// The kernel refuses; then some run the old programs, and every other was tried.
    pub fn renew(&self) -> Result<usize, Error> {
        let Some(mut open) = self.open()? else {
            return Ok(0);
        };
        self.repair_open(&mut open)?;
        let mut records = open.maps.records()?;
        records.retain(|(_, record)| is_complete(record) || is_former(record));
        if records.is_empty() {
            return Ok(0);
        }
        let programs = Programs::load(&self.maps_folder())?;
        // A former version lacked some.
        open.maps = Maps::open(&self.maps_folder())?.ok_or_else(|| self.vanished())?;
        let has_receivers = receivers::may_be(&records);
        let mut outcome = open.maps.set_has_receivers(has_receivers);
        outcome = outcome.and(programs.renew_on_namespace(&self.maps_folder()));
        let known: Vec<Facts> = records
            .iter()
            .filter_map(|(_, record)| Facts::read(record))
            .collect();
        outcome = outcome.and(receivers::LOOKER.forget(&self.maps_folder()));
        if known.iter().any(|facts| facts.tcp_only) {
            outcome = outcome.and(connections::LOOKER.renew(&self.maps_folder()));
        }
        for (id, record) in &records {
            let Some(facts) = Facts::read(record) else {
                continue;
            };
            let found = Cgroup::open(&facts.path).ok();
            let cgroup = found.filter(|cgroup| cgroup.id == *id);
            let folder = self.links_folder(*id);
            let renewed = programs.renew(&folder, cgroup.as_ref(), facts.needs());
            let renewed = renewed.and_then(|()| renew_flags(&mut open.maps, *id, &facts));
            outcome = outcome.and(renewed);
        }
        let identities = known.iter().filter(|facts| facts.has_number());
        outcome.map(|()| identities.count())
    }
}

/// A former version didn't say of an identity that it has several addresses.
fn renew_flags(maps: &mut Maps, cgroup: u64, facts: &Facts) -> Result<(), Error> {
    if !facts.has_number() || !facts.has_receivers() || !maps.is_alive(cgroup)? {
        return Ok(());
    }
    for (address, owner) in facts.owners() {
        maps.set_owner(address, owner)?;
    }
    maps.set_identity(cgroup, &facts.value())
}

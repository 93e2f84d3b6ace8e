//! Identities as somebody finds them who has declared some, as a daemon's configuration does: what each is, and whose.
//!
//! Who has declared an identity stands in its record, so it is known as long as the identity is there, and a crash can't
//! come between the two. What is done to a declared one here is done only while it is still that one.

use std::net::IpAddr;
use std::path::PathBuf;

use sandwire_api::{
    identity::{Allowed, IdentityPolicy, State},
    name::Name,
};

use crate::{
    Cgroup, Error, Identities, Identity, interface,
    record::{Facts, instance_number, is_complete},
};

/// An identity that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Its name.
    pub name: Name,
    /// Folder of its cgroup, without symbolic links.
    pub cgroup: PathBuf,
    /// Number of its cgroup.
    pub cgroup_id: u64,
    /// Whether its cgroup is still there.
    pub state: State,
    /// Its addresses, in order.
    pub addresses: Vec<IpAddr>,
    /// The interface that the addresses were put on.
    pub interface: String,
    /// What it may do.
    pub allowed: Allowed,
    /// Whether it makes no sockets but TCP's.
    pub tcp_only: bool,
    /// What it may reach, if that can be read.
    pub policy: Option<IdentityPolicy>,
    /// Number of the instance that has declared it ([`instance_number`]); 0 if it was added by a command.
    pub declared_by: u32,
}

impl Standing {
    /// Whether this instance of the daemon has declared it.
    #[must_use]
    pub fn is_declared_by(&self, instance: &Name) -> bool {
        self.declared_by == instance_number(instance)
    }

    fn is_still(&self, cgroup: u64, facts: &Facts) -> bool {
        let is_same = cgroup == self.cgroup_id && facts.name == self.name;
        is_same && facts.declared_by == self.declared_by
    }
}

impl Identities {
    /// All identities, once what has ended is taken away.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn standing(&self) -> Result<Vec<Standing>, Error> {
        let Some(mut open) = self.open()? else {
            return Ok(Vec::new());
        };
        self.repair_open(&mut open)?;
        self.forget_unused(&open.maps)?;
        let mut standing = Vec::new();
        for (cgroup_id, record) in open.maps.records()? {
            let facts = Facts::read(&record).filter(|_| is_complete(&record));
            let Some(facts) = facts else {
                continue;
            };
            let policy = match open.maps.policies.get(facts.number) {
                Err(Error::PolicyText { .. }) => None,
                read => read?,
            };
            let state = match Cgroup::is_there(&facts.path, cgroup_id) {
                true => State::Active,
                false => State::Dying,
            };
            standing.push(Standing {
                cgroup_id,
                state,
                interface: interface::name(facts.interface)?,
                policy,
                name: facts.name,
                cgroup: facts.path,
                addresses: facts.addresses,
                allowed: facts.allowed,
                tcp_only: facts.tcp_only,
                declared_by: facts.declared_by,
            });
        }
        Ok(standing)
    }

    /// Removes an identity, if it is still that one: as [`Identities::remove`].
    ///
    /// # Errors
    /// As of [`Identities::remove`].
    pub fn remove_standing(&self, standing: &Standing) -> Result<Identity, Error> {
        let is_wanted = |cgroup, facts: &Facts| standing.is_still(cgroup, facts);
        self.remove_where(standing.name.as_str(), is_wanted, &mut |_| ())
    }

    /// Says what an identity may reach, if it is still that one: as [`Identities::set_policy`].
    ///
    /// # Errors
    /// As of [`Identities::set_policy`].
    pub fn set_policy_of_standing(
        &self,
        standing: &Standing,
        policy: &IdentityPolicy,
    ) -> Result<(), Error> {
        let is_wanted = |cgroup, facts: &Facts| standing.is_still(cgroup, facts);
        self.set_policy_where(standing.name.as_str(), is_wanted, policy, &mut |_| ())
    }
}

//! Who may do what, by the credentials of the caller's socket.

use sandwire_api::{
    name::Name,
    pool::{AccessVerb, PoolSpec},
};

use crate::{error::ServiceError, lease::LeaseKey};

/// Who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Numeric user.
    pub uid: u32,
    /// Numeric primary group.
    pub gid: u32,
    /// Root, or the daemon's own user: may do everything.
    pub privileged: bool,
}

impl Caller {
    /// The daemon itself, which does what its configuration says.
    pub(super) const DAEMON: Self = Self {
        uid: 0,
        gid: 0,
        privileged: true,
    };

    /// Whether the pool's settings grant a verb to this caller.
    #[must_use]
    pub fn may(self, verb: AccessVerb, spec: &PoolSpec) -> bool {
        self.privileged
            || spec.access.iter().any(|rule| {
                rule.verbs.contains(&verb)
                    && (rule.uids.contains(&self.uid) || rule.gids.contains(&self.gid))
            })
    }

    /// The lease that this caller means by a name: its own, unless it names another owner.
    #[must_use]
    pub fn lease_key(self, owner_uid: Option<u32>, name: &Name) -> LeaseKey {
        LeaseKey {
            owner_uid: owner_uid.unwrap_or(self.uid),
            name: name.clone(),
        }
    }

    /// Whether this caller may see and release a lease of the pool.
    pub(super) fn may_see(self, lease: &LeaseKey, spec: &PoolSpec) -> bool {
        self.uid == lease.owner_uid || self.may(AccessVerb::Manage, spec)
    }

    pub(super) fn demand(
        self,
        verb: AccessVerb,
        operation: &'static str,
        spec: &PoolSpec,
    ) -> Result<(), ServiceError> {
        if self.may(verb, spec) {
            return Ok(());
        }
        Err(ServiceError::Forbidden {
            uid: self.uid,
            operation,
            object: format!("pool '{}'", spec.name),
        })
    }
}

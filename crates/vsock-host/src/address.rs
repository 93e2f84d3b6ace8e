//! Who a guest is.

use std::fmt;

use sandwire_api::name::Name;
use serde::{Deserialize, Serialize};

/// A guest, by the lease that it belongs to. The owner is the tenant: CIDs, and what a rule may name without
/// further rights, are scoped by it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct VmKey {
    /// Numeric user that owns the lease.
    pub tenant: u32,
    /// The lease.
    pub lease: Name,
}

impl fmt::Display for VmKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} of user {}", self.lease, self.tenant)
    }
}

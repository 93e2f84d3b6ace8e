//! Entries of sandbox interfaces: life, policy, counters.

use std::{collections::BTreeSet, fmt};

use crate::{
    Datapath, Error,
    abi::{self, NicFlag},
    policy::Compiled,
};

/// Index of a NIC; the class id of the filter on its host end. Never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NicIndex(pub u32);

impl fmt::Display for NicIndex {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "NIC {}", self.0)
    }
}

/// Index of a policy. Policy 0 denies everything and is always there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PolicyIndex(pub u32);

impl Datapath {
    /// Reserves `count` neighbouring entries and returns the first.
    ///
    /// # Errors
    /// There are none.
    pub fn allocate(&self, count: u8) -> Result<NicIndex, Error> {
        todo!("{count}")
    }

    /// Gives entries back. What is in them becomes absent.
    pub fn free(&self, first: NicIndex, count: u8) {
        todo!("{first} {count}")
    }

    /// Writes an entry. Of an active one, whatever isn't changed by [`Self::set_policy`] and
    /// [`Self::set_flag`] must stay as it is.
    pub fn write_nic(&self, index: NicIndex, nic: &abi::Nic) {
        todo!("{index} {nic:?}")
    }

    /// Reads an entry.
    #[must_use]
    pub fn nic(&self, index: NicIndex) -> abi::Nic {
        todo!("{index}")
    }

    /// All entries that aren't absent.
    #[must_use]
    pub fn used(&self) -> Vec<(NicIndex, abi::Nic)> {
        todo!()
    }

    /// Lets packets pass: zeroes counters and meters, enters the clone addresses, and at last says that
    /// the NIC is active. `process`: the sandbox is a process in the slot's namespace.
    ///
    /// # Errors
    /// The map of clone addresses is full, or one of the addresses is somebody else's. The entry is then ready as before.
    pub fn activate(
        &self,
        index: NicIndex,
        policy: PolicyIndex,
        process: bool,
    ) -> Result<(), Error> {
        todo!("{index} {policy:?} {process}")
    }

    /// Ends what [`Self::activate`] began: the entry is ready again.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn deactivate(&self, index: NicIndex) -> Result<(), Error> {
        todo!("{index}")
    }

    /// Gives a NIC another policy, at once and as a whole.
    pub fn set_policy(&self, index: NicIndex, policy: PolicyIndex) {
        todo!("{index} {policy:?}")
    }

    /// Sets or clears a flag.
    pub fn set_flag(&self, index: NicIndex, flag: NicFlag, value: bool) {
        todo!("{index} {flag:?} {value}")
    }

    /// Adds a policy: all of it, or nothing.
    ///
    /// # Errors
    /// A map is full, or the kernel refuses.
    pub fn add_policy(&self, policy: &Compiled) -> Result<PolicyIndex, Error> {
        todo!("{policy:?}")
    }

    /// Removes a policy that no NIC names any more. Packets that are under way may still look at it for
    /// a moment: wait a second after the last [`Self::set_policy`].
    pub fn remove_policy(&self, policy: PolicyIndex) {
        todo!("{policy:?}")
    }

    /// All policies that are there, for removing those that nobody names.
    #[must_use]
    pub fn policies(&self) -> Vec<PolicyIndex> {
        todo!()
    }

    /// Counters since the NIC was activated.
    #[must_use]
    pub fn counters(&self, index: NicIndex) -> abi::Counters {
        todo!("{index}")
    }

    /// Says which groups may talk to which others: exactly these. Cached decisions of all active NICs are made anew.
    ///
    /// # Errors
    /// The map is full, or the kernel refuses.
    pub fn set_group_pairs(&self, pairs: &BTreeSet<(u32, u32)>) -> Result<(), Error> {
        todo!("{pairs:?}")
    }
}

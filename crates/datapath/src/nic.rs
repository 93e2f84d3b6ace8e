//! Entries of sandbox interfaces: life, policy, counters.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    mem::offset_of,
    sync::{
        MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use sandwire_kernel_net::interface::InterfaceIndex;

use crate::{
    Datapath, Error,
    abi::{
        self, Address, CloneValue, GroupPair, Meter, Meters, NeighbourShare, Nic, NicFlag,
        NicState, Traffic,
    },
    former::SlotKey,
    policies::next_free,
    policy::{Compiled, Redirect},
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

/// Which entries are somebody's.
#[derive(Debug)]
pub(crate) struct Allocation {
    taken: Vec<bool>,
    next: u32,
    /// Places of slots in the maps of before, for them alone. They are taken.
    kept: BTreeMap<SlotKey, (NicIndex, u8)>,
}

impl Allocation {
    /// Takes what the entries say of themselves. `kept` are places that slots had before.
    pub(crate) fn new(
        states: impl Iterator<Item = u32>,
        mut kept: BTreeMap<SlotKey, (NicIndex, u8)>,
    ) -> Self {
        let mut taken: Vec<bool> = states
            .map(|state| state != NicState::Absent.number())
            .collect();
        taken[0] = true;
        kept.retain(|_, (first, count)| {
            let start = first.0 as usize;
            let place = taken.get_mut(start..start + usize::from(*count));
            // Of a migration that was cut off, two kinds of maps may tell of two slots in one entry.
            let free = place.filter(|place| !place.is_empty() && place.iter().all(|taken| !taken));
            free.map(|place| place.fill(true)).is_some()
        });
        Self {
            taken,
            next: 1,
            kept,
        }
    }

    fn take(&mut self, count: u8) -> Option<NicIndex> {
        if let Some(first) = next_free(&self.taken, self.next, count.into()) {
            self.next = first + u32::from(count);
            self.set(NicIndex(first), count, true);
            return Some(NicIndex(first));
        }
        // Rather than none at all, somebody gets what was kept for slots that haven't come.
        let had_kept = !self.kept.is_empty();
        self.end_keeping();
        had_kept.then(|| self.take(count)).flatten()
    }

    /// The place that a slot had before, if it is as large.
    fn take_kept(&mut self, slot: SlotKey, count: u8) -> Option<NicIndex> {
        let (first, had) = self.kept.remove(&slot)?;
        if had == count {
            return Some(first);
        }
        self.set(first, had, false);
        None
    }

    fn end_keeping(&mut self) {
        for (first, count) in std::mem::take(&mut self.kept).into_values() {
            self.set(first, count, false);
        }
    }

    fn set(&mut self, first: NicIndex, count: u8, is_taken: bool) {
        let start = first.0 as usize;
        self.taken[start..start + usize::from(count)].fill(is_taken);
    }
}

/// Flags that end with a lease.
const LEASE_FLAGS: u32 = NicFlag::Process.number()
    | NicFlag::Trace.number()
    | NicFlag::Learn.number()
    | NicFlag::Published.number()
    | NicFlag::Impaired.number();

impl Datapath {
    fn allocation(&self) -> MutexGuard<'_, Allocation> {
        // A panic under the lock comes before anything is changed.
        self.allocation
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn field(&self, index: NicIndex, offset: usize) -> &AtomicU32 {
        self.nics.field(index.0, offset)
    }

    /// Reserves `count` neighbouring entries and returns the first.
    ///
    /// # Errors
    /// There are none.
    pub fn allocate(&self, count: u8) -> Result<NicIndex, Error> {
        self.allocation().take(count).ok_or(Error::Full {
            map: "nics",
            entries: self.nics.entries(),
        })
    }

    /// Reserves for a slot the entries that it had in maps of before, if it was leased and answers are remembered by
    /// them: then [`Self::resume`] it. `None`: it has none, or another number of them.
    pub fn allocate_former(&self, pool: u32, slot: u32, count: u8) -> Option<NicIndex> {
        self.allocation().take_kept((pool, slot), count)
    }

    /// Lets others have what [`Self::allocate_former`] was not asked for.
    pub(crate) fn forget_former(&self) {
        self.allocation().end_keeping();
    }

    /// Gives entries back. What is in them becomes absent.
    pub fn free(&self, first: NicIndex, count: u8) {
        for index in (first.0..).take(count.into()) {
            self.field(NicIndex(index), offset_of!(Nic, state))
                .store(NicState::Absent.number(), Ordering::Release);
            let before = self.nics.read(index);
            let absent = Nic {
                generation: before.generation.wrapping_add(1),
                lease: before.lease,
                ..Nic::default()
            };
            self.nics.write(index, &absent);
        }
        self.allocation().set(first, count, false);
    }

    /// Writes an entry, field by field: one that is active is seen with old and new fields meanwhile, so only
    /// interfaces, MACs and MTU of one may become others. The generation is kept and counted up, the number of the
    /// lease is kept; what somebody else changes meanwhile may be undone.
    pub fn write_nic(&self, index: NicIndex, nic: &Nic) {
        let before = self.nic(index);
        let entry = Nic {
            generation: before.generation,
            lease: before.lease,
            ..*nic
        };
        self.nics.write(index.0, &entry);
        // Not before: who decides meanwhile would keep what it saw of the old fields under the new number.
        self.forget_decisions(index);
    }

    /// Reads an entry.
    #[must_use]
    pub fn nic(&self, index: NicIndex) -> Nic {
        self.nics.read(index.0)
    }

    /// All entries that aren't absent.
    #[must_use]
    pub fn used(&self) -> Vec<(NicIndex, Nic)> {
        let indexes = (1..self.nics.entries()).map(NicIndex);
        indexes
            .filter(|index| self.is_used(*index))
            .map(|index| (index, self.nic(index)))
            .collect()
    }

    fn is_used(&self, index: NicIndex) -> bool {
        let state = self.field(index, offset_of!(Nic, state));
        state.load(Ordering::Acquire) != NicState::Absent.number()
    }

    /// Lets packets pass: zeroes counters, meters and the share of neighbours, closes what an earlier lease has opened for
    /// answers, says that the NIC is active, and at last enters the clone addresses. `process`: the sandbox is a process in
    /// the slot's namespace.
    ///
    /// # Errors
    /// The map of clone addresses is full, or one of the addresses is another active NIC's. The entry is
    /// then ready as before.
    pub fn activate(
        &self,
        index: NicIndex,
        policy: PolicyIndex,
        process: bool,
    ) -> Result<(), Error> {
        self.field(index, offset_of!(Nic, lease))
            .fetch_add(1, Ordering::Relaxed);
        self.resume(index, policy, process)
    }

    /// As [`Self::activate`], of the lease that maps of before had at this entry: what it may answer stays so.
    ///
    /// # Errors
    /// As of [`Self::activate`].
    pub fn resume(&self, index: NicIndex, policy: PolicyIndex, process: bool) -> Result<(), Error> {
        let nic = self.nic(index);
        self.ledgers.begin(index.0, nic.lease);
        self.counters.clear(index.0);
        self.meters.set(&index.0, &Meters::default())?;
        self.neighbour_shares
            .set(&index.0, &NeighbourShare::default())?;
        self.field(index, offset_of!(Nic, policy))
            .store(policy.0, Ordering::Relaxed);
        self.set_flag(index, NicFlag::Process, process);
        self.forget_decisions(index);
        // Active before its addresses are known: packets towards a slot that moves to eBPF under traffic
        // go by the host's routes until then, and by the NIC as soon as it is found.
        let state = self.field(index, offset_of!(Nic, state));
        state.store(NicState::Active.number(), Ordering::Release);
        for address in clone_addresses(&nic) {
            if let Err(error) = self.enter_clone(index, address) {
                state.store(NicState::Ready.number(), Ordering::Release);
                self.withdraw_clones(index, &nic)?;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Leaves packets towards an active NIC to the host's routes; what it sends goes on as before.
    ///
    /// # Errors
    /// The kernel refuses to remove the clone addresses.
    pub fn leave_to_host(&self, index: NicIndex) -> Result<(), Error> {
        self.withdraw_clones(index, &self.nic(index))
    }

    fn enter_clone(&self, index: NicIndex, address: Address) -> Result<(), Error> {
        let value = CloneValue { nic: index.0 };
        if self.clones.add(&address, &value)? {
            return Ok(());
        }
        let owner = self.clones.get(&address)?.map(|owner| NicIndex(owner.nic));
        if let Some(owner) = owner.filter(|owner| *owner != index) {
            let other = self.nic(owner);
            let is_owner = clone_addresses(&other).any(|theirs| theirs == address);
            if is_owner && other.state == NicState::Active.number() {
                return Err(Error::AddressTaken {
                    address: address.into(),
                    owner,
                });
            }
        }
        // What a crash left behind.
        self.clones.set(&address, &value)
    }

    fn withdraw_clones(&self, index: NicIndex, nic: &Nic) -> Result<(), Error> {
        for address in clone_addresses(nic) {
            if self.clones.get(&address)? == Some(CloneValue { nic: index.0 }) {
                self.clones.remove(&address)?;
            }
        }
        Ok(())
    }

    /// Ends what [`Self::activate`] began: the entry is ready again.
    ///
    /// # Errors
    /// The kernel refuses to remove the clone addresses; packets are dropped all the same.
    pub fn deactivate(&self, index: NicIndex) -> Result<(), Error> {
        self.field(index, offset_of!(Nic, state))
            .store(NicState::Ready.number(), Ordering::Release);
        self.field(index, offset_of!(Nic, flags))
            .fetch_and(!LEASE_FLAGS, Ordering::Relaxed);
        self.field(index, offset_of!(Nic, policy))
            .store(0, Ordering::Relaxed);
        self.forget_decisions(index);
        self.withdraw_clones(index, &self.nic(index))
    }

    fn forget_decisions(&self, index: NicIndex) {
        self.field(index, offset_of!(Nic, generation))
            .fetch_add(1, Ordering::Release);
    }

    /// Gives a NIC another policy, at once and as a whole. Of a direction whose limit is another, what was sent before is
    /// forgiven: by a slow rate it may have to be paid for hours, in which a fast one would let nothing pass.
    pub fn set_policy(&self, index: NicIndex, policy: PolicyIndex) {
        let before = self
            .field(index, offset_of!(Nic, policy))
            .swap(policy.0, Ordering::AcqRel);
        self.forget_decisions(index);
        if let Err(error) = self.forgive(index, PolicyIndex(before), policy) {
            tracing::warn!(nic = index.0, %error, "what was sent by a former limit counts for the new one");
        }
    }

    fn forgive(&self, index: NicIndex, before: PolicyIndex, now: PolicyIndex) -> Result<(), Error> {
        let limits = |policy| self.policies.find(policy).unwrap_or_default();
        let (before, now) = (limits(before), limits(now));
        let (egress, ingress) = (before.egress != now.egress, before.ingress != now.ingress);
        if !egress && !ingress {
            return Ok(());
        }
        let mut meters = self.meters.get(&index.0)?.unwrap_or_default();
        if egress {
            meters.egress = Meter::default();
        }
        if ingress {
            meters.ingress = Meter::default();
        }
        self.meters.set(&index.0, &meters)
    }

    /// Puts a NIC into a group, and returns whether it was in another. The [`Self::set_policy`] that is to follow at once has
    /// it hold for what the NIC sends, and for whom it may be reached by no more. Whom it was refused and is allowed now
    /// still waits for [`Self::forget_all_decisions`].
    pub fn set_group(&self, index: NicIndex, group: u32) -> bool {
        let field = self.field(index, offset_of!(Nic, group));
        field.swap(group, Ordering::Release) != group
    }

    /// Says by which interface the host's own stack sees sandboxes now. What somebody else changes of their entries
    /// meanwhile stays so.
    pub fn set_shared(&self, shared: InterfaceIndex) {
        for (index, _) in self.used() {
            let field = self.field(index, offset_of!(Nic, shared_ifindex));
            if field.swap(shared.0, Ordering::Release) != shared.0 {
                self.forget_decisions(index);
            }
        }
    }

    /// Sets or clears a flag.
    pub fn set_flag(&self, index: NicIndex, flag: NicFlag, value: bool) {
        let flags = self.field(index, offset_of!(Nic, flags));
        if value {
            flags.fetch_or(flag.number(), Ordering::Release);
        } else {
            flags.fetch_and(!flag.number(), Ordering::Release);
        }
    }

    /// Says by which NIC the XDP program of a host end goes, which has no class id; `None`: by none.
    ///
    /// # Errors
    /// The map is full, or the kernel refuses.
    pub fn set_xdp_nic(&self, ifindex: u32, index: Option<NicIndex>) -> Result<(), Error> {
        match index {
            Some(index) => self.xdp_nics.set(&ifindex, &index.0),
            None => self.xdp_nics.remove(&ifindex).map(drop),
        }
    }

    /// Adds a policy: all of it, or nothing.
    ///
    /// # Errors
    /// A map is full, or the kernel refuses.
    pub fn add_policy(&self, policy: &Compiled) -> Result<PolicyIndex, Error> {
        self.policies.add(policy)
    }

    /// Removes a policy that no NIC names any more. Packets that are under way may still look at it for
    /// a moment: wait a second after the last [`Self::set_policy`]. What can't be removed is logged, and
    /// tried again with the next policy or at the next start.
    pub fn remove_policy(&self, policy: PolicyIndex) {
        if let Err(error) = self.policies.remove(policy) {
            tracing::warn!(policy = policy.0, %error, "a policy could not be removed");
        }
    }

    /// All policies that are there, for removing those that nobody names.
    #[must_use]
    pub fn policies(&self) -> Vec<PolicyIndex> {
        self.policies.all()
    }

    /// The fixed part of a policy.
    #[must_use]
    pub fn policy(&self, policy: PolicyIndex) -> abi::Policy {
        self.policies.read(policy)
    }

    /// Says what children of the host's interfaces may reach only by the relay, and so not at all: exactly this. Of
    /// what was said before and is now, no packet leaves meanwhile.
    ///
    /// # Errors
    /// A map is full, or the kernel refuses. What was said before still holds, or both.
    pub fn set_redirects(&self, redirects: &[Redirect]) -> Result<(), Error> {
        self.policies.set_redirects(redirects)
    }

    /// Counters since the NIC was activated.
    #[must_use]
    pub fn counters(&self, index: NicIndex) -> abi::Counters {
        let mut counted = self.counters.read(index.0);
        let let_through = self.ledgers.read(index.0);
        add(&mut counted.egress, let_through.egress);
        add(&mut counted.ingress, let_through.ingress);
        counted
    }

    /// Zeroes the ledgers of leases that began by a daemon of before them, whose programs didn't count there: what is in
    /// them is an earlier lease's.
    pub(crate) fn begin_overlooked_ledgers(&self) {
        for (index, nic) in self.used() {
            if self.ledgers.lease(index.0) != u64::from(nic.lease) {
                self.ledgers.begin(index.0, nic.lease);
            }
        }
    }

    /// Says which groups may talk to which others: exactly these.
    ///
    /// # Errors
    /// There are more than the map has room for: then as many as fit are added; or the kernel refuses. What isn't among them
    /// stops all the same, and pairs that are in both the old and the new set never do.
    pub fn set_group_pairs(&self, pairs: &BTreeSet<(u32, u32)>) -> Result<(), Error> {
        let mut known = BTreeSet::new();
        for (pair, _) in self.group_pairs.entries()? {
            if pairs.contains(&(pair.from, pair.to)) {
                known.insert((pair.from, pair.to));
            } else {
                self.group_pairs.remove(&pair)?;
            }
        }
        let added = self.add_group_pairs(pairs, known);
        self.forget_all_decisions();
        added
    }

    /// Adds those that aren't known yet: both directions between two groups, or none.
    fn add_group_pairs(
        &self,
        pairs: &BTreeSet<(u32, u32)>,
        mut known: BTreeSet<(u32, u32)>,
    ) -> Result<(), Error> {
        for (from, to) in pairs.iter().copied() {
            let mut missing = BTreeSet::from([(from, to), (to, from)]);
            missing.retain(|pair| pairs.contains(pair) && !known.contains(pair));
            if let Some(error) = self.group_pairs.refuse(known.len() + missing.len()) {
                return Err(error);
            }
            for (from, to) in missing {
                self.group_pairs.set(&GroupPair { from, to }, &1)?;
                known.insert((from, to));
            }
        }
        Ok(())
    }

    /// Has what all NICs send be decided anew.
    pub fn forget_all_decisions(&self) {
        for index in (1..self.nics.entries()).map(NicIndex) {
            if self.is_used(index) {
                self.forget_decisions(index);
            }
        }
    }
}

fn add(to: &mut Traffic, more: Traffic) {
    to.packets = to.packets.wrapping_add(more.packets);
    to.bytes = to.bytes.wrapping_add(more.bytes);
    to.segments = to.segments.wrapping_add(more.segments);
}

fn clone_addresses(nic: &Nic) -> impl Iterator<Item = Address> + use<> {
    let ipv4 = abi::ipv4_of(nic.clone4).map(Address::from);
    let ipv6 = Some(nic.clone6).filter(|address| *address != Address::default());
    ipv4.into_iter().chain(ipv6)
}

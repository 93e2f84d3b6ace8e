//! What the eBPF data path knows of slots: entries of `nics`, by the slot's place in its pool.
//!
//! A slot's interfaces are neighbours in that array; the first one's index is the class id of the
//! filter on the slot's host end. Which entries are whose is read from the array itself at the start.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    net::IpAddr,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use sandwire_api::pool::{HostService, PolicySpec, UplinkPolicy};
use sandwire_datapath::{
    Datapath, Error as DatapathError, NicIndex, PolicyIndex, Program, Settings, Uplink,
    abi::{NicFlag, NicState},
};
use sandwire_kernel_net::interface::InterfaceIndex;

use super::{
    Worker,
    entry::{BY_KIND, entry_of},
    filters::{KnownAs, known_as},
    learning, lock, published,
    switch::{self, Switch},
    uplinks, xdp,
};
use crate::{error::NetworkError, network::Tenancy, plan::SlotPlan};

/// Lets the packets of an entry pass.
type Enter = fn(&Datapath, NicIndex, PolicyIndex, bool) -> Result<(), DatapathError>;

/// Programs on slots' interfaces.
const PROGRAMS: [Program; 7] = [
    Program::FromGuest,
    Program::TapToHostEnd,
    Program::UplinkToTap,
    Program::CrossOver,
    Program::FromChild,
    Program::ToChild,
    Program::FromGuestXdp,
];

/// The opened data path of an instance.
pub(super) struct Ebpf {
    pub(super) datapath: Datapath,
    /// Maps were made anew, because those that were there have another layout.
    pub(super) is_migrating: AtomicBool,
    /// What goes by the old maps until the new ones know every slot.
    pub(super) switch: Switch,
    /// The programs of [`PROGRAMS`].
    programs: [KnownAs; PROGRAMS.len()],
    /// First entry of each slot, and how many it has.
    pub(super) slots: Mutex<HashMap<Place, (NicIndex, u8)>>,
    /// Slots that somebody has taken over or built since the start, until the others of before are removed.
    adopted: Mutex<Option<BTreeSet<Place>>>,
    /// Slots that have the tenant whom they had before the start, so that what was counted then is theirs.
    pub(super) continued: Mutex<BTreeSet<Place>>,
    /// Slots whose entries are where old maps had them, as the answers that are remembered have it.
    resumed: Mutex<BTreeSet<Place>>,
    /// Slots that are impaired by old maps, until somebody has taken them over.
    impaired: Mutex<BTreeSet<Place>>,
    /// Policies of slots that move.
    transit: Mutex<HashMap<bool, PolicyIndex>>,
    /// Shared interface and uplinks that have programs.
    attached: Mutex<(Option<InterfaceIndex>, Option<Vec<Uplink>>)>,
    /// TAPs with an XDP program.
    pub(super) xdp: Mutex<xdp::Taps>,
    /// Somebody follows the TAPs as they are opened and closed.
    pub(super) is_watched: AtomicBool,
    /// Somebody follows the host's routing rules, for what may leave only by the relay.
    pub(super) follows_rules: AtomicBool,
    /// Whoever tells the data path what these rules say.
    pub(super) tells_rules: Mutex<()>,
    /// Why packets don't leave by uplinks as they might.
    pub(super) refusals: Mutex<uplinks::Refusals>,
    /// Of which uplinks the kernel refused XDP after all, and why.
    pub(super) xdp_failures: Mutex<Vec<String>>,
    /// Whether that is of one whose place somebody else had.
    is_xdp_busy: AtomicBool,
    /// Entries that learn, and until when.
    pub(super) learning: Mutex<Vec<(Instant, Place)>>,
    /// Clone addresses that published ports lead to.
    pub(super) published: Mutex<HashSet<IpAddr>>,
}

/// Pool number and slot number.
pub(super) type Place = (u32, u32);

pub(super) fn place_of(slot: &SlotPlan) -> Place {
    (slot.pool_number, slot.number.0)
}

impl Ebpf {
    /// With `waits`, maps that were made anew get no packets before the [`Switch`].
    pub(super) fn open(settings: &Settings, waits: bool) -> Result<Self, NetworkError> {
        let opened = Datapath::open(settings)?;
        if !waits {
            opened.datapath.take_into_use()?;
        }
        let used = opened.datapath.used();
        let firsts = used.iter().filter(|(_, nic)| nic.position == 0);
        let slots = firsts.map(|(index, nic)| ((nic.pool, nic.slot), (*index, nic.count)));
        let former = switch::former_nics(&opened.datapath);
        // Who watched an earlier daemon's does so no longer.
        for (index, _) in &used {
            opened.datapath.set_flag(*index, NicFlag::Trace, false);
        }
        Ok(Self {
            slots: Mutex::new(slots.collect()),
            learning: Mutex::new(learning::of_before(&used)),
            adopted: Mutex::new(Some(BTreeSet::new())),
            continued: Mutex::default(),
            resumed: Mutex::default(),
            impaired: Mutex::new(switch::impaired(&former)),
            transit: Mutex::default(),
            xdp: Mutex::default(),
            is_watched: AtomicBool::new(false),
            follows_rules: AtomicBool::new(false),
            tells_rules: Mutex::default(),
            refusals: Mutex::default(),
            xdp_failures: Mutex::default(),
            is_xdp_busy: AtomicBool::new(false),
            attached: Mutex::default(),
            published: Mutex::new(published::of_before(&former)),
            is_migrating: AtomicBool::new(opened.migrated_from.is_some()),
            switch: Switch::new(waits && opened.migrated_from.is_some()),
            programs: PROGRAMS.map(|program| known_as(opened.datapath.program(program))),
            datapath: opened.datapath,
        })
    }

    /// The kernel's number of a loaded program, and the hash of its instructions.
    pub(super) fn program_known_as(&self, program: Program) -> KnownAs {
        let place = PROGRAMS.iter().position(|known| *known == program);
        place.map_or((None, None), |place| self.programs[place])
    }

    /// The first entry of a slot.
    pub(super) fn find(&self, slot: &SlotPlan) -> Option<NicIndex> {
        lock(&self.slots)
            .get(&place_of(slot))
            .map(|(first, _)| *first)
    }

    /// How many entries a slot has.
    pub(super) fn count(&self, pool: u32, number: u32) -> Option<u8> {
        lock(&self.slots)
            .get(&(pool, number))
            .map(|(_, count)| *count)
    }

    pub(super) fn entries(&self, slot: &SlotPlan) -> Result<Vec<NicIndex>, NetworkError> {
        let first = self.find(slot).ok_or_else(|| NetworkError::Conflict {
            object: format!("slot {}", slot.netns_name),
            with: "the eBPF data path, which has no entry for it".to_owned(),
            advice: "it is repaired by the next inspection".to_owned(),
        })?;
        let numbers = (first.0..).zip(&slot.nics);
        Ok(numbers.map(|(number, _)| NicIndex(number)).collect())
    }

    /// Reserves the entries of a slot, or finds those that it has.
    pub(super) fn reserve(&self, slot: &SlotPlan) -> Result<NicIndex, NetworkError> {
        let mut slots = lock(&self.slots);
        self.note_adopted(slot);
        let count = u8::try_from(slot.nics.len()).expect("a slot has at most 8 interfaces");
        if let Some((first, had)) = slots.get(&place_of(slot)) {
            if *had == count {
                return Ok(*first);
            }
            self.datapath.free(*first, *had);
        }
        let (pool, number) = place_of(slot);
        let first = match self.datapath.allocate_former(pool, number, count) {
            Some(former) => {
                lock(&self.resumed).insert(place_of(slot));
                former
            }
            None => self.datapath.allocate(count)?,
        };
        slots.insert(place_of(slot), (first, count));
        Ok(first)
    }

    /// Gives the entries of a slot back, with whatever is in them.
    pub(super) fn free(&self, slot: &SlotPlan) {
        self.switch.catch_up(slot);
        lock(&self.continued).remove(&place_of(slot));
        self.forget_former(slot);
        if let Some((first, count)) = lock(&self.slots).remove(&place_of(slot)) {
            for number in first.0..first.0 + u32::from(count) {
                self.forget_xdp(NicIndex(number));
                if let Err(error) = self.datapath.deactivate(NicIndex(number)) {
                    tracing::warn!(slot = %slot.netns_name, %error, "an entry can't be deactivated");
                }
            }
            self.datapath.free(first, count);
        }
    }

    /// Has the XDP program of a TAP know its entry.
    pub(super) fn know_xdp(
        &self,
        tap: InterfaceIndex,
        index: NicIndex,
    ) -> Result<(), NetworkError> {
        self.datapath.set_xdp_nic(tap.0, Some(index))?;
        lock(&self.xdp).know(tap, index);
        Ok(())
    }

    fn forget_xdp(&self, index: NicIndex) {
        let taps = lock(&self.xdp).forget(index);
        for tap in taps {
            if let Err(error) = self.datapath.set_xdp_nic(tap.0, None) {
                tracing::warn!(%tap, %error, "a TAP stays known to XDP");
            }
        }
    }

    /// Writes the entries of a slot that is ready. `host_ends` are the interfaces on the host, one per
    /// entry or one for all.
    pub(super) fn write(
        &self,
        slot: &SlotPlan,
        host_ends: &[InterfaceIndex],
        shared: InterfaceIndex,
    ) -> Result<(), NetworkError> {
        for (nic, index) in self.entries(slot)?.into_iter().enumerate() {
            let Some(host_end) = host_ends.get(nic).or(host_ends.last()) else {
                continue;
            };
            let mut entry = entry_of(slot, nic, *host_end, shared);
            let before = self.datapath.nic(index);
            if before.state == NicState::Active.number() {
                entry.flags |= before.flags & !BY_KIND;
                (entry.state, entry.policy) = (before.state, before.policy);
                entry.group = before.group;
            }
            self.datapath.write_nic(index, &entry);
        }
        Ok(())
    }

    /// Whether a slot's entries say what they should, apart from its tenant.
    pub(super) fn is_written(
        &self,
        slot: &SlotPlan,
        host_ends: &[InterfaceIndex],
        shared: InterfaceIndex,
    ) -> bool {
        let Ok(entries) = self.entries(slot) else {
            return false;
        };
        entries.into_iter().enumerate().all(|(nic, index)| {
            let host_end = host_ends.get(nic).or(host_ends.last());
            let found = self.datapath.nic(index);
            host_end.is_some_and(|host_end| {
                let mut wanted = entry_of(slot, nic, *host_end, shared);
                wanted.flags = wanted.flags & BY_KIND | found.flags & !BY_KIND;
                (wanted.state, wanted.policy) = (found.state, found.policy);
                (wanted.group, wanted.generation) = (found.group, found.generation);
                wanted.lease = found.lease;
                found == wanted && found.state != NicState::Absent.number()
            })
        })
    }

    pub(super) fn activate(&self, slot: &SlotPlan, tenancy: &Tenancy) -> Result<(), NetworkError> {
        self.forget_former(slot);
        self.enter_lease(slot, tenancy, Datapath::activate)
    }

    /// Nothing goes on of what a slot is by old maps.
    fn forget_former(&self, slot: &SlotPlan) {
        lock(&self.resumed).remove(&place_of(slot));
        lock(&self.impaired).remove(&place_of(slot));
    }

    fn enter_lease(
        &self,
        slot: &SlotPlan,
        tenancy: &Tenancy,
        enter: Enter,
    ) -> Result<(), NetworkError> {
        let entries = self.entries(slot)?;
        for (done, index) in entries.iter().enumerate() {
            let mut entry = self.datapath.nic(*index);
            // While it isn't active nobody has decided anything by its group.
            if entry.group != tenancy.group {
                entry.group = tenancy.group;
                self.datapath.write_nic(*index, &entry);
            }
            self.mark_published(*index);
            let entered = enter(&self.datapath, *index, tenancy.policy, tenancy.is_process);
            if let Err(error) = entered {
                for index in &entries[..done] {
                    self.datapath.deactivate(*index)?;
                }
                return Err(error.into());
            }
        }
        Ok(())
    }

    pub(super) fn deactivate(&self, slot: &SlotPlan) -> Result<(), NetworkError> {
        if self.find(slot).is_none() {
            return Ok(());
        }
        lock(&self.continued).remove(&place_of(slot));
        for index in self.entries(slot)? {
            self.datapath.deactivate(index)?;
        }
        Ok(())
    }

    /// Leaves packets towards a slot to the host's routes. What its guest sends goes on as before.
    /// Returns whether any have come by eBPF.
    pub(super) fn leave_to_host(&self, slot: &SlotPlan) -> Result<bool, NetworkError> {
        if self.find(slot).is_none() || !self.is_active(slot)? {
            return Ok(false);
        }
        for index in self.entries(slot)? {
            self.datapath.leave_to_host(index)?;
        }
        Ok(true)
    }

    pub(super) fn set_policy(
        &self,
        slot: &SlotPlan,
        tenancy: &Tenancy,
    ) -> Result<(), NetworkError> {
        if self.change_policy(slot, tenancy)? {
            self.datapath.forget_all_decisions();
        }
        Ok(())
    }

    /// The same, but for whom others were refused until now. Returns whether there are such: its group has changed.
    pub(super) fn change_policy(
        &self,
        slot: &SlotPlan,
        tenancy: &Tenancy,
    ) -> Result<bool, NetworkError> {
        let mut has_joined = false;
        for index in self.entries(slot)? {
            has_joined |= self.datapath.set_group(index, tenancy.group);
            self.datapath.set_policy(index, tenancy.policy);
        }
        Ok(has_joined)
    }

    /// Changes the policy of a slot that may have no entries any more.
    pub(super) fn set_policy_only(&self, slot: &SlotPlan, policy: PolicyIndex) {
        for index in self.entries(slot).unwrap_or_default() {
            self.datapath.set_policy(index, policy);
        }
    }

    /// Makes a slot active for its tenant, or ready without one; of one that is active only what
    /// differs changes, so that no packet is lost.
    pub(super) fn adopt(
        &self,
        slot: &SlotPlan,
        tenancy: Option<&Tenancy>,
    ) -> Result<(), NetworkError> {
        self.note_adopted(slot);
        let is_resumed = lock(&self.resumed).remove(&place_of(slot));
        let is_impaired = lock(&self.impaired).remove(&place_of(slot));
        let Some(tenancy) = tenancy else {
            return self.deactivate(slot);
        };
        if self.is_active(slot)? {
            self.set_policy(slot, tenancy)
        } else {
            self.deactivate(slot)?;
            let enter = match is_resumed {
                true => Datapath::resume,
                false => Datapath::activate,
            };
            self.enter_lease(slot, tenancy, enter)?;
            if is_impaired {
                self.set_flag(slot, NicFlag::Impaired, true)?;
            }
            lock(&self.continued).insert(place_of(slot));
            // Activation closes what was open for answers, and this is the same lease still.
            if is_resumed { Ok(()) } else { self.learn(slot) }
        }
    }

    fn is_active(&self, slot: &SlotPlan) -> Result<bool, NetworkError> {
        let is_active =
            |index: &NicIndex| self.datapath.nic(*index).state == NicState::Active.number();
        Ok(self.entries(slot)?.iter().all(is_active))
    }

    /// What the entries say of the tenant that they should not.
    pub(super) fn tenancy_problem(
        &self,
        slot: &SlotPlan,
        tenancy: Option<&Tenancy>,
    ) -> Option<&'static str> {
        let entries = self.entries(slot).ok()?;
        entries.into_iter().find_map(|index| {
            let found = self.datapath.nic(index);
            let is_active = found.state == NicState::Active.number();
            match tenancy {
                None => is_active.then_some("its packets pass, though nobody leases it"),
                Some(_) if !is_active => Some("its packets don't pass, though it is leased"),
                Some(tenancy) => {
                    let is_right = (found.policy, found.group) == (tenancy.policy.0, tenancy.group);
                    (!is_right).then_some("it has another policy or group than it should have")
                }
            }
        })
    }

    pub(super) fn set_flag(
        &self,
        slot: &SlotPlan,
        flag: NicFlag,
        value: bool,
    ) -> Result<(), NetworkError> {
        for index in self.entries(slot)? {
            self.datapath.set_flag(index, flag, value);
        }
        Ok(())
    }

    /// Notes that a slot's packets are left to who diverts them, or not any more.
    pub(super) fn set_impaired(&self, slot: &SlotPlan, value: bool) -> Result<(), NetworkError> {
        if !value {
            // Nor is it by old maps.
            lock(&self.impaired).remove(&place_of(slot));
            if self.find(slot).is_none() {
                return Ok(());
            }
        }
        self.set_flag(slot, NicFlag::Impaired, value)
    }

    fn note_adopted(&self, slot: &SlotPlan) {
        if let Some(adopted) = &mut *lock(&self.adopted) {
            adopted.insert(place_of(slot));
        }
    }

    /// Removes what nobody has taken over since the start, but for slots of which there may be more than entries.
    pub(super) fn finish_adoption(
        &self,
        policies: &BTreeSet<PolicyIndex>,
        present: &BTreeSet<Place>,
    ) {
        let mut slots = lock(&self.slots);
        // Nobody reserves any meanwhile.
        let adopted = lock(&self.adopted).take().unwrap_or_default();
        slots.retain(|place, (first, count)| {
            let stays = present.contains(place) || adopted.contains(place);
            if !stays {
                for number in first.0..first.0 + u32::from(*count) {
                    // A leftover: best effort, it is freed next.
                    drop(self.datapath.deactivate(NicIndex(number)));
                }
                self.datapath.free(*first, *count);
            }
            stays
        });
        drop(slots);
        // Held, since one may be added at any time.
        let transit = lock(&self.transit);
        for policy in self.datapath.policies() {
            let is_used =
                policies.contains(&policy) || transit.values().any(|used| *used == policy);
            if policy.0 != 0 && !is_used {
                self.datapath.remove_policy(policy);
            }
        }
    }

    /// The policy of a slot while it moves: the host's own rules judge its packets as they did in nft.
    /// Made once for each answer to whether sandboxes of the pool may talk to each other.
    pub(super) fn transit_policy(&self, clone_to_clone: bool) -> Result<PolicyIndex, NetworkError> {
        let mut known = lock(&self.transit);
        if let Some(index) = known.get(&clone_to_clone) {
            return Ok(*index);
        }
        let policy = PolicySpec {
            uplink: UplinkPolicy::Masquerade,
            clone_to_clone,
            host_services: vec![HostService::All],
            cloud_metadata: true,
            ..PolicySpec::default()
        };
        let compiled = sandwire_datapath::policy::compile(&policy, &[])?;
        let index = self.datapath.add_policy(&compiled)?;
        known.insert(clone_to_clone, index);
        Ok(index)
    }

    /// Of all interfaces of a slot.
    pub(super) fn trace_lost(&self, slot: &SlotPlan) -> u64 {
        let entries = self.entries(slot).unwrap_or_default();
        let lost = entries.iter().map(|index| self.datapath.trace_lost(*index));
        lost.sum()
    }

    /// Which slot an entry belongs to, and which of its interfaces it is.
    pub(super) fn owner(&self, index: NicIndex) -> (u32, u32, u8) {
        let nic = self.datapath.nic(index);
        (nic.pool, nic.slot, nic.position)
    }

    /// Puts the programs on the shared interface and the uplinks, if these are others than before.
    pub(super) fn attach(
        &self,
        shared: InterfaceIndex,
        uplinks: &[Uplink],
    ) -> Result<(), NetworkError> {
        if self.switch.keeps_host(shared, uplinks) {
            return Ok(());
        }
        let done = self.attach_now(shared, uplinks);
        self.switch.note_host(done.is_ok());
        done
    }

    fn attach_now(&self, shared: InterfaceIndex, uplinks: &[Uplink]) -> Result<(), NetworkError> {
        let mut attached = lock(&self.attached);
        if attached.0 != Some(shared) {
            self.datapath.set_shared(shared);
            self.datapath.attach_shared(shared)?;
            attached.0 = Some(shared);
        }
        if attached.1.as_deref() != Some(uplinks) {
            self.set_uplinks(uplinks)?;
            attached.1 = Some(uplinks.to_vec());
        }
        Ok(())
    }

    fn set_uplinks(&self, uplinks: &[Uplink]) -> Result<(), NetworkError> {
        let refusals = self.datapath.set_uplinks(uplinks)?;
        let is_busy = refusals.iter().any(DatapathError::is_busy);
        self.is_xdp_busy.store(is_busy, Ordering::Relaxed);
        let refusals = refusals.iter().map(ToString::to_string);
        *lock(&self.xdp_failures) = refusals.collect();
        Ok(())
    }

    /// Tries XDP again where somebody else has had the place, and may have left it, or an uplink takes frames from it that
    /// took none; takes it off one that takes none any more. This puts right whatever is missing there, so it is to be
    /// looked for before.
    pub(super) fn retry_xdp(&self) -> Result<(), NetworkError> {
        let attached = lock(&self.attached);
        match &attached.1 {
            Some(uplinks)
                if self.is_xdp_busy.load(Ordering::Relaxed)
                    || self.datapath.takes_frames_otherwise() =>
            {
                self.set_uplinks(uplinks)
            }
            _ => Ok(()),
        }
    }

    /// The uplinks as they are now.
    pub(super) fn find_uplinks(
        &self,
        worker: &mut Worker,
        instance: &str,
        wanted: Option<&[String]>,
        wants_xdp: bool,
    ) -> Result<Vec<Uplink>, NetworkError> {
        let (uplinks, refusals) =
            uplinks::find(worker, instance, wanted, wants_xdp, self.datapath.order())?;
        *lock(&self.refusals) = refusals;
        Ok(uplinks)
    }

    /// Takes the programs off the uplinks, when no pool needs them. The shared interface goes by itself.
    pub(super) fn detach(&self) -> Result<(), NetworkError> {
        let mut attached = lock(&self.attached);
        *attached = (None, None);
        self.switch.note_host(true);
        self.datapath.set_uplinks(&[])?;
        Ok(())
    }
}

//! The life of a pool's slot numbers: which to build, which to hand out, which to let rest.
//!
//! Pure: no I/O, no clock (`now` is the time since boot, given by the caller). Every number is in
//! exactly one state; each method is one step of a number's life:
//!
//! ```text
//! unused ─► building ─► ready ─► leased ─► held ─► tearing down ─► resting ─► free ─► building …
//!               └► reserved ─────┘              (ready ─► tearing down ─► free)
//! ```
//!
//! Who had a resting number may have it built anew at once. If nothing comes of that, the number rests
//! on as if nobody had asked.
//!
//! Numbers that were never used are built first, then free ones in the order of their release: an
//! old clone address stays out of use for as long as possible.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

use sandwire_api::pool::SlotCounts;

use crate::{lease::LeaseKey, plan::SlotNumber};

/// Slot numbers of one pool and their states.
#[derive(Debug)]
pub struct Pool {
    size: u32,
    slots_max: u32,
    /// Numbers from here on were never used, except those that have a state.
    unused_from: u32,
    states: BTreeMap<SlotNumber, SlotState>,
    counts: SlotCounts,
    /// Numbers in state `Free`, longest out of use first.
    free: VecDeque<SlotNumber>,
    /// Numbers in state `Ready`, oldest first.
    ready: VecDeque<SlotNumber>,
    /// Numbers in state `Wanted`, longest wanted first.
    wanted: VecDeque<SlotNumber>,
    /// Numbers in state `Resting`, by the end of their rest.
    resting: BTreeSet<(Duration, SlotNumber)>,
    /// Rests that their tenants have interrupted, until these leases end.
    interrupted: BTreeMap<SlotNumber, Rest>,
    failures_in_a_row: u32,
    retry_at: Duration,
    last_error: Option<String>,
}

/// Where a slot number is in its life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SlotState {
    /// Was used before; nothing of it is in the kernel.
    Free,
    /// Somebody waits for just this number; no builder has taken it up yet.
    Wanted,
    /// A builder works on it; `reserved` if somebody waits for just this number.
    Building {
        /// Whether it goes to who waits, and not to the ready ones.
        reserved: bool,
    },
    /// Built for somebody who is about to take it.
    Reserved,
    /// Built, and free to be handed out.
    Ready,
    /// Held by a lease.
    Leased,
    /// Its lease is released, but the sandbox may still run.
    Held,
    /// Being torn down.
    TearingDown(Option<Rest>),
    /// Torn down; the clone address rests.
    Resting(Rest),
}

impl SlotState {
    /// Whether the kernel may have something of the slot.
    #[must_use]
    pub fn is_present(&self) -> bool {
        match self {
            Self::Building { .. }
            | Self::Reserved
            | Self::Ready
            | Self::Leased
            | Self::Held
            | Self::TearingDown(_) => true,
            Self::Free | Self::Wanted | Self::Resting(_) => false,
        }
    }
}

/// How long a clone address rests after its release, and who may have it back at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rest {
    /// Whose it was.
    pub tenant: LeaseKey,
    /// When anybody may have it, in time since boot.
    pub until: Duration,
}

/// Answer to a request for a certain number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// It was ready and is leased now.
    Taken,
    /// It is being built for the caller: see [`Pool::take_reserved`] and [`Pool::unreserve`].
    Building,
    /// The caller may have it when its tear-down is done: ask again.
    Wait,
    /// It is being built for another request.
    OfAnother,
    /// Somebody else has it.
    InUse,
}

/// Where the caller's reserved number is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reserved {
    /// It was built and is leased now.
    Taken,
    /// It is still being built.
    Building,
    /// It could not be built.
    Failed,
}

const BACKOFF_FIRST: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(10);

impl Pool {
    /// A pool of which nothing is built.
    #[must_use]
    pub fn new(size: u32, slots_max: u32) -> Self {
        Self {
            size,
            slots_max,
            unused_from: 0,
            states: BTreeMap::new(),
            counts: SlotCounts::default(),
            free: VecDeque::new(),
            ready: VecDeque::new(),
            wanted: VecDeque::new(),
            resting: BTreeSet::new(),
            interrupted: BTreeMap::new(),
            failures_in_a_row: 0,
            retry_at: Duration::ZERO,
            last_error: None,
        }
    }

    /// How many slots are to be ready.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Changes how many slots are to be ready; see [`Pool::trim`].
    pub fn resize(&mut self, size: u32) {
        self.size = size;
    }

    /// How many numbers are in which state.
    #[must_use]
    pub fn counts(&self) -> SlotCounts {
        self.counts
    }

    /// State of a number; none if it was never used.
    #[must_use]
    pub fn state(&self, number: SlotNumber) -> Option<&SlotState> {
        self.states.get(&number)
    }

    /// All numbers that were ever used, with their states.
    pub fn states(&self) -> impl Iterator<Item = (SlotNumber, &SlotState)> {
        self.states.iter().map(|(number, state)| (*number, state))
    }

    /// Numbers whose clone addresses rest.
    pub fn rests(&self) -> impl Iterator<Item = (SlotNumber, &Rest)> {
        self.resting.iter().filter_map(|(_, number)| {
            let state = self.states.get(number);
            match state {
                Some(SlotState::Resting(rest)) => Some((*number, rest)),
                _ => None,
            }
        })
    }

    /// Why the last build failed, until one succeeds.
    #[must_use]
    pub fn last_error(&self) -> Option<&str> {
        self.last_error.as_deref()
    }

    /// Whether no number can become ready before a lease is released.
    #[must_use]
    pub fn is_exhausted(&self) -> bool {
        let SlotCounts { leased, held, .. } = self.counts;
        leased + held >= self.slots_max
    }

    /// When building goes on after failures, if that is what it waits for.
    #[must_use]
    pub fn next_retry(&self, now: Duration) -> Option<Duration> {
        (self.lacks_slots() && now < self.retry_at).then_some(self.retry_at)
    }

    /// When [`Pool::end_rests`] has something to do next.
    #[must_use]
    pub fn next_rest_end(&self) -> Option<Duration> {
        self.resting.first().map(|(until, _)| *until)
    }

    /// Puts a number that was found in the kernel or in the journal into its state.
    pub fn adopt(&mut self, number: SlotNumber, state: SlotState) {
        self.leave(number);
        self.enter(number, state);
    }

    /// The next number to build, if one is lacking.
    pub fn next_build(&mut self, now: Duration) -> Option<SlotNumber> {
        if let Some(&number) = self.wanted.front() {
            self.change(number, SlotState::Building { reserved: true });
            return Some(number);
        }
        self.next_lacking(now)
    }

    /// The next number to build for nobody in particular, if one is lacking.
    pub fn next_lacking(&mut self, now: Duration) -> Option<SlotNumber> {
        if !self.lacks_slots() || now < self.retry_at {
            return None;
        }
        let number = self.next_number()?;
        self.change(number, SlotState::Building { reserved: false });
        Some(number)
    }

    /// Whether [`Pool::next_build`] has a number that somebody waits for.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        !self.wanted.is_empty()
    }

    /// A build succeeded. Returns whether the slot is to be torn down: nobody waits for it any more, and
    /// its address rests.
    pub fn built(&mut self, number: SlotNumber) -> bool {
        self.failures_in_a_row = 0;
        self.retry_at = Duration::ZERO;
        self.last_error = None;
        match self.states.get(&number) {
            Some(SlotState::Building { reserved: true }) => {
                self.change(number, SlotState::Reserved);
                false
            }
            Some(SlotState::Building { reserved: false }) => self.offer(number),
            other => unreachable!("slot {number} was built in state {other:?}"),
        }
    }

    /// A build failed and left nothing. Further builds wait, longer with each failure in a row;
    /// this number waits until all others were tried.
    pub fn build_failed(&mut self, number: SlotNumber, error: String, now: Duration) {
        let doublings = self.failures_in_a_row.min(10);
        self.failures_in_a_row += 1;
        self.retry_at = now + (BACKOFF_FIRST * (1 << doublings)).min(BACKOFF_MAX);
        self.last_error = Some(error);
        self.lay_aside(number);
    }

    /// Hands out the slot that was ready for longest.
    pub fn take_ready(&mut self) -> Option<SlotNumber> {
        let number = *self.ready.front()?;
        self.change(number, SlotState::Leased);
        Some(number)
    }

    /// Undoes a hand-out that was not journaled: the slot is the next to go out again. Returns whether
    /// it is to be torn down instead, because its address rests.
    pub fn put_back(&mut self, number: SlotNumber) -> bool {
        let rests = self.offer(number);
        if !rests {
            // It was never seen by its user, so that its place is the front.
            self.ready.retain(|other| *other != number);
            self.ready.push_front(number);
        }
        rests
    }

    /// Undoes a hand-out of a slot that may have been used. It is to be torn down.
    pub fn take_back(&mut self, number: SlotNumber) {
        let rest = self.interrupted.remove(&number);
        self.change(number, SlotState::TearingDown(rest));
    }

    /// Asks for a certain number. `tenant` is the lease that it is for; one that had the number
    /// before needn't wait for the end of its rest.
    pub fn claim(&mut self, number: SlotNumber, tenant: Option<&LeaseKey>) -> Claim {
        let interrupted = self.interrupted.get(&number);
        if interrupted.is_some_and(|rest| Some(&rest.tenant) != tenant) {
            return Claim::InUse;
        }
        let was = self.states.get(&number);
        let (next, claim) = match was {
            Some(SlotState::Ready) => (SlotState::Leased, Claim::Taken),
            None | Some(SlotState::Free) => (SlotState::Wanted, Claim::Building),
            Some(SlotState::Building { reserved: false }) => {
                (SlotState::Building { reserved: true }, Claim::Building)
            }
            Some(SlotState::Resting(rest)) if Some(&rest.tenant) == tenant => {
                self.interrupted.insert(number, rest.clone());
                (SlotState::Wanted, Claim::Building)
            }
            Some(SlotState::TearingDown(rest)) => {
                let other = rest
                    .as_ref()
                    .is_some_and(|rest| Some(&rest.tenant) != tenant);
                return if other { Claim::InUse } else { Claim::Wait };
            }
            Some(
                SlotState::Wanted | SlotState::Building { reserved: true } | SlotState::Reserved,
            ) => return Claim::OfAnother,
            Some(SlotState::Leased | SlotState::Held | SlotState::Resting(_)) => {
                return Claim::InUse;
            }
        };
        self.change(number, next);
        claim
    }

    /// Takes the number that was claimed, if it is built by now.
    pub fn take_reserved(&mut self, number: SlotNumber) -> Reserved {
        match self.states.get(&number) {
            Some(SlotState::Reserved) => {
                self.change(number, SlotState::Leased);
                Reserved::Taken
            }
            Some(SlotState::Wanted | SlotState::Building { reserved: true }) => Reserved::Building,
            _ => Reserved::Failed,
        }
    }

    /// The caller waits no longer for the number that it claimed. Returns whether its slot is to be torn
    /// down, because its address rests.
    pub fn unreserve(&mut self, number: SlotNumber) -> bool {
        match self.states.get(&number) {
            Some(SlotState::Wanted) => self.lay_aside(number),
            Some(SlotState::Building { reserved: true }) => {
                self.change(number, SlotState::Building { reserved: false });
            }
            Some(SlotState::Reserved) => return self.offer(number),
            _ => {}
        }
        false
    }

    /// A lease is being released; its sandbox may still run.
    pub fn hold(&mut self, number: SlotNumber) {
        self.interrupted.remove(&number);
        self.change(number, SlotState::Held);
    }

    /// A held slot is free of its user and to be torn down.
    pub fn release(&mut self, number: SlotNumber, rest: Rest) {
        self.change(number, SlotState::TearingDown(Some(rest)));
    }

    /// Takes a ready slot out of use, if it still is ready. It is to be torn down.
    pub fn retire(&mut self, number: SlotNumber) -> bool {
        let is_ready = self.states.get(&number) == Some(&SlotState::Ready);
        if is_ready {
            self.change(number, SlotState::TearingDown(None));
        }
        is_ready
    }

    /// Takes a slot out of use that was built and that no lease has, for who waits for it as well. It is to be torn
    /// down.
    pub fn discard(&mut self, number: SlotNumber) -> bool {
        let is_built = matches!(
            self.states.get(&number),
            Some(SlotState::Ready | SlotState::Reserved)
        );
        if is_built {
            let rest = self.interrupted.remove(&number);
            self.change(number, SlotState::TearingDown(rest));
        }
        is_built
    }

    /// Does so with all such slots, and returns them.
    pub fn discard_all(&mut self) -> Vec<SlotNumber> {
        // In the order of their queue, which each then leaves at the front: a pool may have thousands of them.
        let mut discarded: Vec<_> = self.ready.iter().copied().collect();
        let is_reserved = |state: &SlotState| *state == SlotState::Reserved;
        let reserved = self.states().filter(|(_, state)| is_reserved(state));
        discarded.extend(reserved.map(|(number, _)| number));
        discarded.retain(|number| self.discard(*number));
        discarded
    }

    /// Takes ready slots beyond the size out of use, oldest first. They are to be torn down.
    pub fn trim(&mut self) -> Vec<SlotNumber> {
        let mut trimmed = Vec::new();
        while self.counts.ready > self.size
            && let Some(&number) = self.ready.front()
        {
            self.change(number, SlotState::TearingDown(None));
            trimmed.push(number);
        }
        trimmed
    }

    /// A tear-down succeeded. Returns whether the clone address rests.
    pub fn torn_down(&mut self, number: SlotNumber, now: Duration) -> bool {
        let rest = match self.states.get(&number) {
            Some(SlotState::TearingDown(rest)) => rest.clone(),
            other => unreachable!("slot {number} was torn down in state {other:?}"),
        };
        match rest {
            Some(rest) if now < rest.until => {
                self.change(number, SlotState::Resting(rest));
                true
            }
            _ => {
                self.change(number, SlotState::Free);
                false
            }
        }
    }

    /// Frees the numbers whose rest is over, and returns them.
    pub fn end_rests(&mut self, now: Duration) -> Vec<SlotNumber> {
        let mut ended = Vec::new();
        while let Some(&(until, number)) = self.resting.first()
            && until <= now
        {
            self.change(number, SlotState::Free);
            ended.push(number);
        }
        ended
    }

    /// Makes a built slot ready for all, unless its address rests. Returns whether it does.
    fn offer(&mut self, number: SlotNumber) -> bool {
        let rest = self.interrupted.remove(&number);
        let rests = rest.is_some();
        let next = match rests {
            true => SlotState::TearingDown(rest),
            false => SlotState::Ready,
        };
        self.change(number, next);
        rests
    }

    /// Puts a number away of which nothing is in the kernel.
    fn lay_aside(&mut self, number: SlotNumber) {
        let rest = self.interrupted.remove(&number);
        self.change(number, rest.map_or(SlotState::Free, SlotState::Resting));
    }

    fn lacks_slots(&self) -> bool {
        self.counts.ready + self.counts.building < self.size
    }

    fn next_number(&mut self) -> Option<SlotNumber> {
        while self.unused_from < self.slots_max {
            let number = SlotNumber(self.unused_from);
            self.unused_from += 1;
            if !self.states.contains_key(&number) {
                return Some(number);
            }
        }
        self.free.front().copied()
    }

    fn change(&mut self, number: SlotNumber, next: SlotState) {
        self.leave(number);
        self.enter(number, next);
    }

    /// Takes a number out of the count and queue of its state.
    fn leave(&mut self, number: SlotNumber) {
        let Some(state) = self.states.remove(&number) else {
            return;
        };
        if let Some(count) = self.count_of(&state) {
            *count -= 1;
        }
        match state {
            SlotState::Free => remove(&mut self.free, number),
            SlotState::Ready => remove(&mut self.ready, number),
            SlotState::Wanted => remove(&mut self.wanted, number),
            SlotState::Resting(rest) => {
                self.resting.remove(&(rest.until, number));
            }
            _ => {}
        }
    }

    fn enter(&mut self, number: SlotNumber, state: SlotState) {
        if let Some(count) = self.count_of(&state) {
            *count += 1;
        }
        match &state {
            SlotState::Free => self.free.push_back(number),
            SlotState::Ready => self.ready.push_back(number),
            SlotState::Wanted => self.wanted.push_back(number),
            SlotState::Resting(rest) => {
                self.resting.insert((rest.until, number));
            }
            _ => {}
        }
        self.states.insert(number, state);
    }

    fn count_of(&mut self, state: &SlotState) -> Option<&mut u32> {
        let counts = &mut self.counts;
        match state {
            SlotState::Free => None,
            SlotState::Wanted | SlotState::Building { .. } | SlotState::Reserved => {
                Some(&mut counts.building)
            }
            SlotState::Ready => Some(&mut counts.ready),
            SlotState::Leased => Some(&mut counts.leased),
            SlotState::Held => Some(&mut counts.held),
            SlotState::TearingDown(_) => Some(&mut counts.tearing_down),
            SlotState::Resting(_) => Some(&mut counts.quarantined),
        }
    }
}

/// Constant time for the front, which is where almost all numbers leave.
fn remove(queue: &mut VecDeque<SlotNumber>, number: SlotNumber) {
    if queue.front() == Some(&number) {
        queue.pop_front();
    } else {
        queue.retain(|other| *other != number);
    }
}

#[cfg(test)]
mod tests;

//! Threads that build slots and tear them down.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use sandwire_api::name::Name;

use super::{PoolEntry, Shared, State};
use crate::{
    error::NetworkError,
    plan::{Plan, SlotNumber, SlotPlan},
};

/// Slots that the network is given at a time. It takes them down in smaller batches, one overlapping
/// the next, so that a long row costs less per slot; but it is also the time that a stop has to wait,
/// about 0.8 s.
const TEAR_DOWN_BATCH: usize = 512;
const TEAR_DOWN_RETRY: Duration = Duration::from_secs(1);
/// Hand-outs must not wait for a processor that builds the next slot.
const NICENESS: i32 = 5;

/// A step of a worker: something to do, or until when there is nothing.
enum Next<Job> {
    Do(Job),
    Wait(Option<Duration>),
}

impl Shared {
    /// Builds what pools lack until the service stops.
    pub(super) fn build_until_stopped(&self) {
        lower_priority();
        let mut state = self.lock();
        while !state.stopping {
            let now = self.now();
            match state.next_build(now) {
                Next::Do((plan, number)) => {
                    drop(state);
                    let slot = plan.slot(number);
                    let begun = Instant::now();
                    let built = self.network.build(&slot);
                    let took = begun.elapsed();
                    state = self.lock();
                    let has_surplus = state.built(&slot, &plan, built, took, self.now());
                    if has_surplus {
                        self.tear_down_work.notify_one();
                    }
                    self.changed.notify_all();
                }
                Next::Wait(until) => {
                    let timeout = until.map(|until| until.saturating_sub(now));
                    state = self.wait(&self.build_work, state, timeout);
                }
            }
        }
    }

    /// Tears down what is out of use until the service stops.
    pub(super) fn tear_down_until_stopped(&self) {
        lower_priority();
        let mut state = self.lock();
        while !state.stopping {
            let now = self.now();
            match state.next_tear_down(now) {
                Next::Do(batch) => {
                    drop(state);
                    let slots: Vec<SlotPlan> = batch
                        .iter()
                        .map(|(plan, number)| plan.slot(*number))
                        .collect();
                    let begun = Instant::now();
                    let results = self.network.tear_down(&slots);
                    let took = begun.elapsed();
                    state = self.lock();
                    state.counters.tear_down_batch_seconds.observe(took);
                    state.torn_down(&batch, results, self.now());
                    // A freed number may be the one that a full pool waits for.
                    self.build_work.notify_all();
                    self.audit_work.notify_one();
                    self.changed.notify_all();
                }
                Next::Wait(until) => {
                    let timeout = until.map(|until| until.saturating_sub(now));
                    state = self.wait(&self.tear_down_work, state, timeout);
                }
            }
        }
    }
}

impl State {
    fn next_build(&mut self, now: Duration) -> Next<(Arc<Plan>, SlotNumber)> {
        let is_turn_of_lacking = std::mem::take(&mut self.has_built_wanted);
        let (next, is_wanted) = next_build(&mut self.pools, is_turn_of_lacking, now);
        self.has_built_wanted = is_wanted;
        next
    }

    /// Notes the outcome of a build. Returns whether there are slots to tear down now.
    fn built(
        &mut self,
        slot: &SlotPlan,
        plan: &Plan,
        built: Result<(), NetworkError>,
        took: Duration,
        now: Duration,
    ) -> bool {
        let pool = &plan.spec.name;
        let Some(entry) = self.pools.get_mut(pool) else {
            return false;
        };
        match built {
            Ok(()) => {
                self.counters.builds += 1;
                self.counters.build_seconds.observe(took);
                let rests = entry.pool.built(slot.number);
                // Its pool has moved to another data path meanwhile.
                let has_moved = slot.data_path != entry.plan.spec.data_path;
                if rests || has_moved && entry.pool.discard(slot.number) {
                    entry.tear_down.push_back(slot.number);
                }
            }
            Err(error) => {
                self.counters.builds_failed += 1;
                if entry.pool.last_error().is_none() {
                    tracing::error!(%pool, slot = %slot.number, %error, "cannot build a slot");
                } else {
                    tracing::debug!(%pool, slot = %slot.number, %error, "cannot build a slot");
                }
                let error = error.to_string();
                entry.pool.build_failed(slot.number, error, now);
                entry.leaves_former_path(slot.number);
            }
        }
        entry.trim();
        !entry.tear_down.is_empty()
    }

    fn next_tear_down(&mut self, now: Duration) -> Next<Vec<(Arc<Plan>, SlotNumber)>> {
        let mut batch = Vec::new();
        let mut until = None;
        for entry in self.pools.values_mut() {
            while let Some(&(at, number)) = entry.tear_down_again.front() {
                if at > now {
                    until = until.into_iter().chain([at]).min();
                    break;
                }
                entry.tear_down_again.pop_front();
                entry.tear_down.push_back(number);
            }
            let room = TEAR_DOWN_BATCH - batch.len();
            let some = entry.tear_down.len().min(room);
            let numbers = entry.tear_down.drain(..some);
            batch.extend(numbers.map(|number| (Arc::clone(&entry.plan), number)));
        }
        if batch.is_empty() {
            Next::Wait(until)
        } else {
            Next::Do(batch)
        }
    }

    fn torn_down(
        &mut self,
        batch: &[(Arc<Plan>, SlotNumber)],
        results: Vec<Result<(), NetworkError>>,
        now: Duration,
    ) {
        let mut gone: Vec<(Name, SlotNumber, bool)> = Vec::new();
        // A missing result counts as a failure: the slot is looked at again.
        let results = results
            .into_iter()
            .map(Some)
            .chain(std::iter::repeat_with(|| None));
        for ((plan, number), result) in batch.iter().zip(results) {
            let pool = &plan.spec.name;
            let Some(entry) = self.pools.get_mut(pool) else {
                continue;
            };
            match result {
                Some(Ok(())) => {
                    self.counters.tear_downs += 1;
                    entry.tear_down_error = None;
                    let rests = entry.pool.torn_down(*number, now);
                    entry.leaves_former_path(*number);
                    gone.push((pool.clone(), *number, rests));
                }
                failed => {
                    self.counters.tear_downs_failed += 1;
                    let error = match failed {
                        Some(Err(error)) => error.to_string(),
                        _ => "no outcome was told".to_owned(),
                    };
                    if entry.tear_down_error.is_none() {
                        tracing::error!(%pool, slot = %number, %error, "cannot tear a slot down");
                    }
                    entry.tear_down_error = Some(error);
                    entry
                        .tear_down_again
                        .push_back((now + TEAR_DOWN_RETRY, *number));
                }
            }
        }
        if let Err(error) = self.journal.torn_down(&gone) {
            // The rows stay: after a restart these slots are torn down once more, unless leased.
            self.journal_failed();
            tracing::warn!(%error, "tear-downs are not journaled");
        }
    }
}

/// First what somebody waits for, then the pool that lacks the largest part of its size. By turns, if there is both: who asks
/// for certain addresses again and again must not keep all other pools empty. The second is whether somebody waits for it.
fn next_build(
    pools: &mut BTreeMap<Name, PoolEntry>,
    is_turn_of_lacking: bool,
    now: Duration,
) -> (Next<(Arc<Plan>, SlotNumber)>, bool) {
    let mut until = None;
    let mut pools: Vec<&mut PoolEntry> = pools
        .values_mut()
        .filter(|entry| entry.not_added.is_none())
        .collect();
    if is_turn_of_lacking {
        pools.sort_by_key(|entry| entry.fill_permille());
        for entry in &mut pools {
            if let Some(number) = entry.pool.next_lacking(now) {
                return (Next::Do((Arc::clone(&entry.plan), number)), false);
            }
        }
    }
    pools.sort_by_key(|entry| (!entry.pool.is_wanted(), entry.fill_permille()));
    for entry in pools {
        let is_wanted = entry.pool.is_wanted();
        if let Some(number) = entry.pool.next_build(now) {
            return (Next::Do((Arc::clone(&entry.plan), number)), is_wanted);
        }
        until = until.into_iter().chain(entry.pool.next_retry(now)).min();
    }
    (Next::Wait(until), false)
}

impl PoolEntry {
    fn fill_permille(&self) -> u64 {
        let counts = self.pool.counts();
        let filled = u64::from(counts.ready) + u64::from(counts.building);
        filled * 1000 / u64::from(self.pool.size()).max(1)
    }
}

/// Best effort: it only matters on a busy host.
pub(super) fn lower_priority() {
    if let Err(error) = sandwire_kernel_net::thread::work_in_background(NICENESS) {
        tracing::debug!(%error, "background threads keep the priority of the others");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(pool: &str, size: u32, prefix: u8) -> PoolEntry {
        let text = format!(
            r#"{{"name": "{pool}", "size": {size}, "data_path": "nft", "addresses":
                 {{"plan": "prefix", "ipv4": "10.{prefix}.0.0/24", "ipv6": "fd00:{prefix}::/64"}}}}"#
        );
        let spec = serde_json::from_str(&text).unwrap();
        PoolEntry::new(Plan::new(&"test".parse().unwrap(), &spec).unwrap())
    }

    #[test]
    fn who_waits_for_certain_addresses_keeps_no_other_pool_empty() {
        let [busy, empty] = ["busy", "empty"].map(|name| name.parse::<Name>().unwrap());
        let mut pools = BTreeMap::from([
            (busy.clone(), entry("busy", 0, 1)),
            (empty.clone(), entry("empty", 50, 2)),
        ]);
        let mut is_turn_of_lacking = false;
        let mut next = |pools: &mut BTreeMap<Name, PoolEntry>, claimed: u32| {
            let pool = &mut pools.get_mut(&busy).unwrap().pool;
            pool.claim(SlotNumber(claimed), None);
            let (next, is_wanted) = next_build(pools, is_turn_of_lacking, Duration::ZERO);
            is_turn_of_lacking = is_wanted;
            match next {
                Next::Do((plan, _)) => plan.spec.name.to_string(),
                Next::Wait(_) => "nobody".to_owned(),
            }
        };
        let built: Vec<String> = (0..6).map(|claimed| next(&mut pools, claimed)).collect();
        assert_eq!(built, ["busy", "empty"].repeat(3));
        // Three of them are left, and nobody else lacks anything.
        pools.get_mut(&empty).unwrap().pool.resize(0);
        let built: Vec<String> = (0..4).map(|_| next(&mut pools, 5)).collect();
        assert_eq!(built, ["busy", "busy", "busy", "nobody"]);
    }
}

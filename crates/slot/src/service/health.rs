//! What an operator should know.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use sandwire_api::{
    health::{Health, Problem},
    slot::Defect,
};

use super::{Caller, PoolEntry, Slots, State};
use crate::{lease::LeaseKey, reclaim::SlotKey};

/// What was found wrong with kernel objects.
#[derive(Debug, Default)]
pub(super) struct Defects {
    /// Of leased slots, as of their last inspection.
    slots: BTreeMap<SlotKey, Vec<Defect>>,
    /// Of the host's side, as of its last inspection; none before the first.
    host: Option<Vec<Defect>>,
    /// What was repaired lately: when, what it was about, and what was wrong.
    recent: VecDeque<(Duration, Subject, Defect)>,
    /// Why objects that belong to no pool are still there.
    leftovers: Vec<String>,
}

/// What a defect was of.
#[derive(Clone, Debug)]
pub(super) enum Subject {
    Host,
    /// A slot, and whose it was.
    Slot(SlotKey, Option<LeaseKey>),
}

/// [`Defect::action`] of what is in order again.
pub(super) const REPAIRED: &str = "repaired";
/// [`Defect::action`] of a slot that is torn down and built anew.
pub(super) const RETIRED: &str = "slot retired";

/// [`Defect::action`] of what the operator has to see to.
pub(super) const REPORTED: &str = "reported";

const RECENT_MAX: usize = 100;
const RECENT_FOR: Duration = Duration::from_secs(600);

impl Slots {
    /// Whether leases can be handed out and their packets pass, and what is or was wrong.
    #[must_use]
    pub fn health(&self) -> Health {
        self.health_seen_by(None)
    }

    /// The same, without the names of leases that the caller may not see.
    #[must_use]
    pub fn health_for(&self, caller: Caller) -> Health {
        self.health_seen_by(Some(caller))
    }

    fn health_seen_by(&self, caller: Option<Caller>) -> Health {
        let now = self.shared.now();
        let state = self.shared.lock();
        let mut problems = state.problems(caller, now);
        drop(state);
        let of_channels = self.shared.channels.problems().into_iter();
        problems.extend(of_channels.map(|(subject, message)| problem(&subject, message, false)));
        Health {
            ready: !problems.iter().any(|problem| problem.blocking),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            instance: self.shared.settings.instance.to_string(),
            problems,
        }
    }
}

impl State {
    fn problems(&self, caller: Option<Caller>, now: Duration) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.stopping {
            problems.push(problem("daemon", "it is stopping".to_owned(), true));
        }
        if let Some(error) = self.journal.failure() {
            let message = format!("no lease can be acquired or released, trying again: {error}");
            problems.push(problem("journal", message, true));
        }
        for entry in self.pools.values() {
            problems.extend(entry.problems());
        }
        if let Some(error) = &self.ports_dirty {
            let message = format!("the kernel has others than wanted, trying again: {error}");
            problems.push(problem("published ports", message, false));
        }
        if let Some(error) = self.channels.difference() {
            // It may name a lease.
            let reason = match caller {
                Some(caller) if !caller.privileged => "only root is told why",
                _ => error,
            };
            let message = format!("they are not as the leases say, trying again: {reason}");
            problems.push(problem("vsock channels", message, false));
        }
        problems.extend(self.defects.problems(self, caller, now));
        problems
    }

    /// What a defect was of, as this caller may know it; without one, as it is.
    fn describe_subject(&self, caller: Option<Caller>, subject: &Subject) -> String {
        let Subject::Slot(slot, lease) = subject else {
            return "host".to_owned();
        };
        let (pool, number) = slot;
        let may_see = |lease: &LeaseKey| {
            caller.is_none_or(|caller| match self.pools.get(pool) {
                Some(entry) => caller.may_see(lease, &entry.plan.spec),
                None => caller.privileged,
            })
        };
        match lease.as_ref().filter(|lease| may_see(lease)) {
            Some(lease) => format!("lease {lease} (slot {number} of pool {pool})"),
            None => format!("slot {number} of pool {pool}"),
        }
    }
}

impl PoolEntry {
    fn problems(&self) -> Vec<Problem> {
        let subject = format!("pool {}", self.plan.spec.name);
        let mut problems = Vec::new();
        if let Some(error) = &self.not_added {
            let message = format!("the host is not prepared for it, trying again: {error}");
            problems.push(problem(&subject, message, true));
        }
        if let Some(error) = self.pool.last_error() {
            let has_none = self.pool.counts().ready == 0 && self.pool.size() > 0;
            let message = format!("slots can't be built, trying again: {error}");
            problems.push(problem(&subject, message, has_none));
        }
        if let Some(error) = &self.tear_down_error {
            let message = format!("slots can't be torn down, trying again: {error}");
            problems.push(problem(&subject, message, false));
        }
        problems
    }
}

impl Defects {
    /// Notes what the last inspection of a leased slot found. Returns whether that is news.
    pub(super) fn of_slot(&mut self, slot: &SlotKey, found: &[Defect]) -> bool {
        if found.is_empty() {
            self.slots.remove(slot);
            return false;
        }
        self.slots.insert(slot.clone(), found.to_vec()).as_deref() != Some(found)
    }

    /// Notes what the last inspection of the host found. Returns whether that is news.
    pub(super) fn of_host(&mut self, found: Vec<Defect>) -> bool {
        let is_news = !found.is_empty() && self.host.as_ref() != Some(&found);
        self.host = Some(found);
        is_news
    }

    /// Notes something that is in order again.
    pub(super) fn repaired(&mut self, now: Duration, subject: Subject, defect: Defect) {
        if self.recent.len() == RECENT_MAX {
            self.recent.pop_front();
        }
        self.recent.push_back((now, subject, defect));
    }

    /// Notes an object of no pool that could not be removed.
    pub(super) fn left_over(&mut self, error: String) {
        self.leftovers.push(error);
    }

    /// The lease of the slot has ended.
    pub(super) fn forget(&mut self, slot: &SlotKey) {
        self.slots.remove(slot);
    }

    fn problems(&self, state: &State, caller: Option<Caller>, now: Duration) -> Vec<Problem> {
        let mut problems = Vec::new();
        match &self.host {
            None => {
                let message = "not looked at yet".to_owned();
                problems.push(problem("host", message, true));
            }
            Some(found) => problems.extend(found.iter().map(|defect| {
                let blocking = defect.action != REPAIRED;
                problem("host", describe(defect), blocking)
            })),
        }
        for (slot, found) in &self.slots {
            let subject = Subject::Slot(slot.clone(), state.tenants.get(slot).cloned());
            let subject = state.describe_subject(caller, &subject);
            problems.extend(
                found
                    .iter()
                    .map(|defect| problem(&subject, describe(defect), false)),
            );
        }
        let recent = self.recent.iter();
        problems.extend(
            recent
                .filter(|(at, ..)| now.saturating_sub(*at) < RECENT_FOR)
                .map(|(_, subject, defect)| {
                    let subject = state.describe_subject(caller, subject);
                    problem(&subject, describe(defect), false)
                }),
        );
        problems.extend(self.leftovers.iter().map(|error| {
            let message = format!("{error}; run 'sandwire cleanup' when the daemon is stopped");
            problem("leftovers", message, false)
        }));
        problems
    }
}

fn describe(defect: &Defect) -> String {
    format!("{}: {} ({})", defect.object, defect.problem, defect.action)
}

fn problem(subject: &str, message: String, blocking: bool) -> Problem {
    Problem {
        subject: subject.to_owned(),
        message,
        blocking,
    }
}

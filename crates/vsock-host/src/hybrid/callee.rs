//! What siblings may have of a guest whose VMM owns its device.
//!
//! Of a device of ours the worker knows every connection, and who called. Such a VMM knows nobody, has few connections for
//! all, and is called past us by the host and by its guest. So what siblings have of it is counted here, where their calls
//! begin, by the same rule ([`Callers`]): of its connections, and of the calls of a second. It counts for as long as the
//! caller's side of the connection lasts; how long the VMM remembers it beyond that isn't known.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use sandwire_api::vsock::VsockRefusal;

use crate::{address::VmKey, callers::Callers, limits::Limits, statistics::VmCounters};

/// Connections that the devices of Firecracker and Cloud Hypervisor have in all, whoever asks (`MAX_CONNECTIONS`).
const MOST_CONNECTIONS: u32 = 1023;
/// For how long calls are counted.
const WINDOW: Duration = Duration::from_secs(1);

/// A guest that siblings call, for all threads that do so for them.
#[derive(Debug)]
pub struct Callee {
    connections: u32,
    connects_per_second: u32,
    counters: Arc<VmCounters>,
    accounts: Mutex<Accounts>,
}

#[derive(Debug)]
struct Accounts {
    connections: Callers,
    connects: Callers,
    /// Since when the latter are counted.
    since: Instant,
}

/// One of its connections, for the sibling that called; given back when this is dropped.
#[derive(Debug)]
pub struct Seat {
    callee: Arc<Callee>,
    caller: VmKey,
}

impl Callee {
    /// Nobody has called yet. What is refused counts among what is refused to this guest.
    #[must_use]
    pub fn new(limits: &Limits, counters: Arc<VmCounters>) -> Self {
        Self {
            connections: limits.connections.min(MOST_CONNECTIONS),
            connects_per_second: limits.connects_per_second,
            counters,
            accounts: Mutex::new(Accounts {
                connections: Callers::default(),
                connects: Callers::default(),
                since: Instant::now(),
            }),
        }
    }

    /// Lets that sibling have one more connection, if it leaves enough to others.
    ///
    /// # Errors
    /// [`VsockRefusal::Unreachable`], as where the called guest's device is ours; why is counted there.
    pub fn admit(self: &Arc<Self>, caller: &VmKey, now: Instant) -> Result<Seat, VsockRefusal> {
        let mut accounts = self.accounts();
        if !accounts.connections.admits(caller, self.connections) {
            return Err(self.refuse(VsockRefusal::TooManyConnections));
        }
        self.count_connect(&mut accounts, caller, now)?;
        accounts.connections.enter(caller);
        Ok(Seat {
            callee: Arc::clone(self),
            caller: caller.clone(),
        })
    }

    /// Lets it ask for the same connection once more.
    ///
    /// # Errors
    /// The same.
    pub fn admit_again(&self, caller: &VmKey, now: Instant) -> Result<(), VsockRefusal> {
        self.count_connect(&mut self.accounts(), caller, now)
    }

    fn count_connect(
        &self,
        accounts: &mut Accounts,
        caller: &VmKey,
        now: Instant,
    ) -> Result<(), VsockRefusal> {
        if now.saturating_duration_since(accounts.since) >= WINDOW {
            accounts.connects = Callers::default();
            accounts.since = now;
        }
        if !accounts.connects.admits(caller, self.connects_per_second) {
            return Err(self.refuse(VsockRefusal::TooFast));
        }
        accounts.connects.enter(caller);
        Ok(())
    }

    fn refuse(&self, reason: VsockRefusal) -> VsockRefusal {
        self.counters.refuse(reason);
        VsockRefusal::Unreachable
    }

    fn accounts(&self) -> MutexGuard<'_, Accounts> {
        // A panic ends the service; and no sum is half done.
        self.accounts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.callee.accounts().connections.leave(&self.caller);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(number: u32) -> VmKey {
        VmKey {
            tenant: number,
            lease: "a".parse().expect("a name"),
        }
    }

    fn callee(limits: &Limits) -> (Arc<Callee>, Arc<VmCounters>) {
        let counters = Arc::new(VmCounters::default());
        (Arc::new(Callee::new(limits, counters.clone())), counters)
    }

    /// Has it call until it is refused, each connection lasting.
    fn flood(callee: &Arc<Callee>, number: u32, now: Instant) -> Vec<Seat> {
        let call = || callee.admit(&caller(number), now).ok();
        std::iter::from_fn(call).collect()
    }

    #[test]
    fn callers_leave_a_vmm_a_quarter_of_the_few_connections_that_it_has_and_each_other_room() {
        let (callee, counters) = callee(&Limits::default());
        let now = Instant::now();
        let first = flood(&callee, 1, now);
        assert_eq!(first.len(), 384, "half of three quarters of 1023");
        assert_eq!(flood(&callee, 2, now).len(), 192);
        let all: Vec<Vec<Seat>> = (3..1000)
            .map(|number| flood(&callee, number, now))
            .collect();
        assert!(!all[0].is_empty());
        let held = first.len() + all.iter().map(Vec::len).sum::<usize>();
        assert!(held <= 768, "{held}");
        assert!(counters.refused(VsockRefusal::TooManyConnections) >= 999);
        drop((first, all));
        let later = now + WINDOW;
        assert_eq!(flood(&callee, 7, later).len(), 384, "all are given back");
    }

    #[test]
    fn calls_that_end_at_once_are_bounded_by_the_second_and_leave_room_too() {
        let limits = Limits {
            connects_per_second: 100,
            ..Limits::default()
        };
        let (callee, counters) = callee(&limits);
        let start = Instant::now();
        let calls = |number, now| {
            let call = |_: &u32| callee.admit(&caller(number), now).is_ok();
            (0..1000).filter(call).count()
        };
        assert_eq!(calls(1, start), 38);
        assert_eq!(calls(2, start), 19);
        assert_eq!(
            callee.admit_again(&caller(1), start),
            Err(VsockRefusal::Unreachable),
            "asking again is a call as well"
        );
        assert_eq!(callee.admit_again(&caller(3), start), Ok(()));
        assert!(counters.refused(VsockRefusal::TooFast) > 1900);
        assert_eq!(calls(1, start + WINDOW), 38);
    }
}

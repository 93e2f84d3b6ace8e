//! How many connections of a guest are of each sibling that calls it; or how many it has been asked for lately.
//!
//! Siblings leave a part to the host's clients and to the guest itself, and each may have no more than it leaves to
//! the others: however many connections one holds, another can still call.

use std::collections::HashMap;

use crate::address::VmKey;

/// Of a guest's connections, and of the bytes that may wait for it, this part isn't for siblings that call it.
const KEPT: u64 = 4;

/// Connections by who called.
#[derive(Debug, Default)]
pub(crate) struct Callers {
    connections: HashMap<VmKey, u32>,
    all: u32,
}

/// What callers may have of that much.
pub(crate) fn share(all: u64) -> u64 {
    all - all / KEPT
}

impl Callers {
    /// Whether that one may have another connection, of `most` that the guest may have in all.
    pub(crate) fn admits(&self, caller: &VmKey, most: u32) -> bool {
        let held = self.connections.get(caller).copied().unwrap_or(0);
        u64::from(held) + u64::from(self.all) < share(most.into())
    }

    /// It has one more.
    pub(crate) fn enter(&mut self, caller: &VmKey) {
        *self.connections.entry(caller.clone()).or_default() += 1;
        self.all += 1;
    }

    /// It has one less.
    pub(crate) fn leave(&mut self, caller: &VmKey) {
        self.all -= 1;
        if let Some(held) = self.connections.get_mut(caller) {
            *held -= 1;
            if *held == 0 {
                self.connections.remove(caller);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: u32 = 4096;

    fn caller(number: u32) -> VmKey {
        VmKey {
            tenant: number,
            lease: "a".parse().expect("a name"),
        }
    }

    /// Has it call until it is refused; how many connections it has got.
    fn flood(callers: &mut Callers, number: u32) -> u32 {
        let caller = caller(number);
        let mut held = 0;
        while callers.admits(&caller, MOST) {
            callers.enter(&caller);
            held += 1;
        }
        held
    }

    #[test]
    fn each_caller_leaves_as_much_as_it_takes_and_all_leave_a_quarter() {
        let mut callers = Callers::default();
        assert_eq!(flood(&mut callers, 1), 1536);
        assert_eq!(flood(&mut callers, 2), 768);
        for number in 3..1000 {
            flood(&mut callers, number);
        }
        assert!(callers.all <= MOST - MOST / 4, "{}", callers.all);
        for _ in 0..1536 {
            callers.leave(&caller(1));
        }
        assert!(callers.admits(&caller(1), MOST));
        assert!(!callers.connections.contains_key(&caller(1)));
    }

    #[test]
    fn a_guest_that_may_have_few_connections_can_be_called() {
        for most in 1..5 {
            assert!(Callers::default().admits(&caller(1), most));
        }
    }
}

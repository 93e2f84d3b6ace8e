//! What each of many has had lately of something that may happen so often.

use std::{
    collections::HashMap,
    hash::Hash,
    time::{Duration, Instant},
};

use crate::{Allowance, Share};

/// Accounts beyond which those that nothing depends on are looked for and closed.
const ACCOUNTS_MIN: usize = 1024;

/// What everybody has had lately, by name.
#[derive(Debug)]
pub struct Accounts<N> {
    by_name: HashMap<N, Account>,
    /// How long it is kept of who comes no more how many were left out.
    kept: Duration,
    /// Accounts beyond which they are looked through.
    looked_through_at: usize,
}

#[derive(Debug)]
struct Account {
    allowance: Allowance,
    left_out: u64,
}

impl<N: Clone + Eq + Hash> Accounts<N> {
    /// None yet. How many were left out of who comes no more is forgotten after `kept`, once there are many.
    #[must_use]
    pub fn new(kept: Duration) -> Self {
        Self {
            by_name: HashMap::new(),
            kept,
            looked_through_at: ACCOUNTS_MIN,
        }
    }

    /// Whether each party has one left of its share, so that one more may happen. If one of them has none, it is one more that
    /// was left out of that party.
    pub fn admits(&mut self, parties: &[(N, Share)], now: Instant) -> bool {
        self.close(now);
        for (name, _) in parties {
            if let Some(account) = self.by_name.get_mut(name)
                && !account.allowance.has_one(now)
            {
                account.left_out += 1;
                return false;
            }
        }
        true
    }

    /// One more happens: takes one of each party's share.
    pub fn take(&mut self, parties: &[(N, Share)], now: Instant) {
        for (name, share) in parties {
            let account = self.by_name.entry(name.clone()).or_insert_with(|| Account {
                allowance: Allowance::new(*share, now),
                left_out: 0,
            });
            account.allowance.take(now);
        }
    }

    /// How many were left out of that one since it was asked last.
    pub fn left_out_of(&mut self, name: &N) -> u64 {
        let account = self.by_name.get_mut(name);
        account.map_or(0, |account| std::mem::take(&mut account.left_out))
    }

    /// Who has room again, and how many were left out of each of these since it was asked last.
    pub fn left_out(&mut self, now: Instant) -> Vec<(N, u64)> {
        self.by_name
            .iter_mut()
            .filter(|(_, account)| account.left_out > 0 && account.allowance.has_one(now))
            .map(|(name, account)| (name.clone(), std::mem::take(&mut account.left_out)))
            .collect()
    }

    /// Closes what nothing depends on, once there are many.
    fn close(&mut self, now: Instant) {
        if self.by_name.len() <= self.looked_through_at {
            return;
        }
        let kept = self.kept;
        self.by_name.retain(|_, account| account.is_open(kept, now));
        self.looked_through_at = ACCOUNTS_MIN.max(2 * self.by_name.len());
    }
}

impl Account {
    /// Whether something depends on it.
    fn is_open(&self, kept: Duration, now: Instant) -> bool {
        self.allowance
            .whole_for(now)
            .is_none_or(|rested| self.left_out > 0 && rested < kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Share = Share {
        at_once: 100,
        each: Duration::from_secs(1),
    };
    const ALL: Share = Share {
        at_once: 10_000,
        each: Duration::from_millis(10),
    };
    const HOUR: Duration = Duration::from_secs(3600);

    fn admit<N: Clone + Eq + Hash>(
        accounts: &mut Accounts<N>,
        parties: &[(N, Share)],
        now: Instant,
    ) -> bool {
        let is_admitted = accounts.admits(parties, now);
        if is_admitted {
            accounts.take(parties, now);
        }
        is_admitted
    }

    fn parties(name: &str, of: &str) -> [(String, Share); 2] {
        [(name.to_owned(), ONE), (of.to_owned(), ALL)]
    }

    #[test]
    fn who_has_had_its_share_leaves_others_theirs_and_it_is_known_how_many_were_left_out() {
        let (mut accounts, start) = (Accounts::new(HOUR), Instant::now());
        let (loud, quiet) = (parties("loud", "all"), parties("quiet", "all"));
        let admitted = (0..5000).filter(|_| admit(&mut accounts, &loud, start));
        assert_eq!(admitted.count(), 100);
        assert!(admit(&mut accounts, &quiet, start));
        assert_eq!(accounts.left_out(start), Vec::new());
        let later = start + ONE.each;
        assert_eq!(accounts.left_out(later), [("loud".to_owned(), 4900)]);
        assert_eq!(accounts.left_out(later), Vec::new());
        assert!(admit(&mut accounts, &loud, later) && !admit(&mut accounts, &loud, later));
        assert_eq!(accounts.left_out_of(&loud[0].0), 1);
        assert_eq!(accounts.left_out_of(&loud[0].0), 0);
    }

    #[test]
    fn what_one_party_has_no_room_for_takes_nothing_of_the_others() {
        let (mut accounts, start) = (Accounts::new(HOUR), Instant::now());
        let loud = parties("loud", "all");
        for _ in 0..50_000 {
            admit(&mut accounts, &loud, start);
        }
        let others = (0..20_000).filter(|number| {
            let other = parties(&format!("other {number}"), "all");
            admit(&mut accounts, &other, start)
        });
        assert_eq!(others.count(), 9900);
        assert_eq!(accounts.left_out_of(&"all".to_owned()), 10_100);
    }

    #[test]
    fn accounts_that_nothing_depends_on_are_closed() {
        let (mut accounts, start) = (Accounts::new(Duration::MAX), Instant::now());
        for number in 0..5000_u32 {
            let now = start + number * ONE.each / 10;
            assert!(admit(&mut accounts, &[(number, ONE)], now));
        }
        assert!(accounts.by_name.len() <= ACCOUNTS_MIN + 1);
    }

    /// As leases, each of which is too loud for a moment and ends.
    #[test]
    fn who_comes_no_more_takes_no_room_for_ever_though_something_of_it_was_left_out() {
        let (mut accounts, start) = (Accounts::new(HOUR), Instant::now());
        for number in 0..10_000_u32 {
            let now = start + number * ONE.each;
            let admitted = (0..101).filter(|_| admit(&mut accounts, &[(number, ONE)], now));
            assert_eq!(admitted.count(), 100);
        }
        assert!(accounts.by_name.len() < 8000, "{}", accounts.by_name.len());
    }
}

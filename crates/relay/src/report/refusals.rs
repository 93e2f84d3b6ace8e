//! Which refused connections have a line of the report. Pure.
//!
//! A refused connection costs who makes it next to nothing, so lines about them are bounded for each sender, and for all
//! senders that one host names: nobody fills a disk with them. How many were left out is told with the next one.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

/// So many lines at once, and then one each.
#[derive(Clone, Copy)]
struct Share {
    at_once: u32,
    each: Duration,
}

/// By these alone, 25 MB a day.
const SENDER: Share = Share {
    at_once: 100,
    each: Duration::from_secs(1),
};
const HOST: Share = Share {
    at_once: 10_000,
    each: Duration::from_millis(10),
};
/// How long it is kept of who comes no more how many were left out.
const KEPT: Duration = Duration::from_secs(3600);
/// Accounts beyond which those that nothing depends on are looked for and closed.
const ACCOUNTS_MIN: usize = 1024;

/// What everybody has had lately.
pub(super) struct Refusals {
    by_name: HashMap<Name, Account>,
    /// Accounts beyond which they are looked through.
    accounts_max: usize,
}

/// A host, and which of its senders; none are all of them.
type Name = (Arc<str>, Option<Arc<str>>);

struct Account {
    /// When it will have its whole share again.
    whole: Instant,
    left_out: u64,
}

impl Share {
    /// When there would be the whole of it again after one line more now, if that may be.
    fn after_one(self, whole: Instant, now: Instant) -> Option<Instant> {
        let after = whole.max(now) + self.each;
        (after.saturating_duration_since(now) <= self.each * self.at_once).then_some(after)
    }
}

impl Account {
    /// Whether something depends on it.
    fn is_open(&self, now: Instant) -> bool {
        let kept = match self.left_out {
            0 => Duration::ZERO,
            _ => KEPT,
        };
        now < self.whole + kept
    }
}

impl Default for Refusals {
    fn default() -> Self {
        Self {
            by_name: HashMap::new(),
            accounts_max: ACCOUNTS_MIN,
        }
    }
}

impl Refusals {
    /// Whether one more has a line, and how many of that sender, and of the host's, had none before it.
    pub(super) fn admit(
        &mut self,
        host: &Arc<str>,
        sender: &Arc<str>,
        now: Instant,
    ) -> Option<u64> {
        if self.by_name.len() > self.accounts_max {
            self.by_name.retain(|_, account| account.is_open(now));
            self.accounts_max = ACCOUNTS_MIN.max(2 * self.by_name.len());
        }
        let parties = [
            ((host.clone(), Some(sender.clone())), SENDER),
            ((host.clone(), None), HOST),
        ];
        for (name, share) in &parties {
            if let Some(account) = self.by_name.get_mut(name)
                && share.after_one(account.whole, now).is_none()
            {
                account.left_out += 1;
                return None;
            }
        }
        let mut left_out = 0;
        for (name, share) in parties {
            let new = Account {
                whole: now,
                left_out: 0,
            };
            let account = self.by_name.entry(name).or_insert(new);
            account.whole = share.after_one(account.whole, now).unwrap_or(account.whole);
            left_out += std::mem::take(&mut account.left_out);
        }
        Some(left_out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admit(refusals: &mut Refusals, host: &str, sender: &str, now: Instant) -> Option<u64> {
        refusals.admit(&host.into(), &sender.into(), now)
    }

    #[test]
    fn who_has_had_its_share_leaves_others_theirs_and_is_told_of_with_its_next_line() {
        let (mut refusals, start) = (Refusals::default(), Instant::now());
        let written = (0..5000).filter(|_| admit(&mut refusals, "a", "loud", start).is_some());
        assert_eq!(written.count(), 100);
        assert_eq!(admit(&mut refusals, "a", "quiet", start), Some(0));
        let later = start + Duration::from_secs(3);
        let admitted = [(); 4].map(|()| admit(&mut refusals, "a", "loud", later));
        assert_eq!(admitted, [Some(4900), Some(0), Some(0), None]);
    }

    #[test]
    fn a_host_that_names_ever_new_senders_leaves_other_hosts_theirs_and_takes_no_room_for_ever() {
        let (mut refusals, start) = (Refusals::default(), Instant::now());
        let mut admitted = |host: &str, senders: usize, now| {
            let names = (0..senders).map(|number| format!("{now:?} {number}"));
            let lines = names.filter_map(|name| admit(&mut refusals, host, &name, now));
            let (count, left_out) = lines.fold((0, 0), |sum, line| (sum.0 + 1, sum.1 + line));
            (count, left_out, refusals.by_name.len())
        };
        let (count, left_out, accounts) = admitted("a", 50_000, start);
        assert_eq!((count, left_out), (10_000, 0));
        assert!(accounts <= 10_001, "{accounts}");
        assert_eq!(admitted("b", 10, start).0, 10);
        let later = start + Duration::from_secs(60);
        let (count, left_out, _) = admitted("a", 20_000, later);
        assert_eq!((count, left_out), (6000, 40_000));
        let last = later + Duration::from_secs(600);
        let (.., accounts) = admitted("c", 30_000, last);
        assert!(accounts <= 20_000, "{accounts}");
    }

    /// As leases, each of which is too loud for a moment and ends.
    #[test]
    fn senders_that_come_no_more_take_no_room_for_ever_though_some_of_theirs_were_left_out() {
        let (mut refusals, start) = (Refusals::default(), Instant::now());
        for number in 0..10_000_u32 {
            let now = start + number * Duration::from_secs(1);
            let sender = format!("sender {number}");
            let written = (0..101).filter(|_| admit(&mut refusals, "a", &sender, now).is_some());
            assert_eq!(written.count(), 100);
        }
        let accounts = refusals.by_name.len();
        assert!(accounts < 8000, "{accounts}");
    }
}

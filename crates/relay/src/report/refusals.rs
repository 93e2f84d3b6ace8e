//! Which refused connections have a line of the report. Pure.
//!
//! A refused connection costs who makes it next to nothing, so lines about them are bounded for each sender, and for all
//! senders that one host names: nobody fills a disk with them. How many were left out is told with the next one.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use sandwire_rate::{Accounts, Share};

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

/// What everybody has had lately.
pub(super) struct Refusals(Accounts<Name>);

/// A host, and which of its senders; none are all of them.
type Name = (Arc<str>, Option<Arc<str>>);

impl Default for Refusals {
    fn default() -> Self {
        Self(Accounts::new(KEPT))
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
        let parties = [
            ((host.clone(), Some(sender.clone())), SENDER),
            ((host.clone(), None), HOST),
        ];
        if !self.0.admits(&parties, now) {
            return None;
        }
        self.0.take(&parties, now);
        let left_out = parties.iter().map(|(name, _)| self.0.left_out_of(name));
        Some(left_out.sum())
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
    fn a_host_that_names_ever_new_senders_leaves_other_hosts_theirs() {
        let (mut refusals, start) = (Refusals::default(), Instant::now());
        let mut admitted = |host: &str, senders: usize, now| {
            let names = (0..senders).map(|number| format!("{now:?} {number}"));
            let lines = names.filter_map(|name| admit(&mut refusals, host, &name, now));
            lines.fold((0, 0), |sum, line| (sum.0 + 1, sum.1 + line))
        };
        assert_eq!(admitted("a", 50_000, start), (10_000, 0));
        assert_eq!(admitted("b", 10, start), (10, 0));
        let later = start + Duration::from_secs(60);
        assert_eq!(admitted("a", 20_000, later), (6000, 40_000));
    }
}

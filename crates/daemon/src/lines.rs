//! How many lines of the log a user may provoke.
//!
//! Whoever may connect can be refused as often as it likes, and what keeps the log has bounds of its own: systemd-journald drops
//! what a service says beyond 10,000 lines in 30 s, and then what root should know is lost with the rest. So each user who isn't
//! root has so many lines in a while, and how many were left out is said with the next one.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use sandwire_slot::service::Caller;

/// Lines of one user in [`INTERVAL`].
const LINES_MAX: u32 = 10;
const INTERVAL: Duration = Duration::from_secs(1);
/// Users of whom lines are counted at a time: those whose time is over are forgotten when there are more.
const USERS_MAX: usize = 1024;
/// Characters of what a user has a say in.
const CHARACTERS_MAX: usize = 400;

/// What was said of each user.
#[derive(Debug, Default)]
pub(crate) struct Lines(Mutex<HashMap<u32, Said>>);

#[derive(Debug)]
struct Said {
    since: Instant,
    lines: u32,
    left_out: u64,
}

impl Lines {
    /// How many lines of this caller were left out before this one. None if this one is, too.
    pub(crate) fn allow(&self, caller: Caller, now: Instant) -> Option<u64> {
        if caller.privileged {
            return Some(0);
        }
        let mut users = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_over = |said: &Said| now.saturating_duration_since(said.since) >= INTERVAL;
        if users.len() >= USERS_MAX && !users.contains_key(&caller.uid) {
            users.retain(|_, said| !is_over(said));
        }
        let said = users.entry(caller.uid).or_insert(Said {
            since: now,
            lines: 0,
            left_out: 0,
        });
        if is_over(said) {
            (said.since, said.lines) = (now, 0);
        }
        if said.lines == LINES_MAX {
            said.left_out += 1;
            return None;
        }
        said.lines += 1;
        Some(std::mem::take(&mut said.left_out))
    }
}

/// The beginning of a text that a caller has a say in: a line as long as a request would be as bad as many.
pub(crate) fn beginning(text: &str) -> &str {
    let end = text.char_indices().nth(CHARACTERS_MAX);
    end.map_or(text, |(end, _)| &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(uid: u32) -> Caller {
        Caller {
            uid,
            gid: uid,
            privileged: uid == 0,
        }
    }

    #[test]
    fn a_user_has_so_many_lines_and_keeps_nobody_else_from_his() {
        let lines = Lines::default();
        let begun = Instant::now();
        let at = |millis: u64| begun + Duration::from_millis(millis);
        for millis in 0..500 {
            let allowed = lines.allow(user(1000), at(millis));
            assert_eq!(allowed, (millis < 10).then_some(0), "{millis}");
            assert_eq!(lines.allow(user(0), at(millis)), Some(0));
        }
        assert_eq!(lines.allow(user(1001), at(500)), Some(0));
        assert_eq!(lines.allow(user(1000), at(999)), None);
        assert_eq!(lines.allow(user(1000), at(1000)), Some(491));
        assert_eq!(lines.allow(user(1000), at(1001)), Some(0));
    }

    #[test]
    fn any_number_of_users_takes_no_more_room_than_those_of_one_while() {
        let lines = Lines::default();
        let begun = Instant::now();
        for uid in 0..10_000 {
            let now = begun + INTERVAL / 100 * uid;
            assert_eq!(lines.allow(user(1 + uid), now), Some(0));
        }
        assert!(lines.0.lock().unwrap().len() <= USERS_MAX);
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        assert_eq!(beginning("short"), "short");
        let long = "ä".repeat(CHARACTERS_MAX + 1);
        assert_eq!(beginning(&long), &long[..2 * CHARACTERS_MAX]);
    }
}

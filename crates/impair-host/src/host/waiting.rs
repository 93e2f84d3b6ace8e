//! Whose last packets may be waited for, so that one user leaves others their part.

use super::{Host, Key};
use crate::control::State;

/// Targets whose last packets are waited for at once: each takes a control connection, and so do other questions.
const ALL_MAX: usize = 48;
/// Of these, those of one user who isn't root.
const PER_USER_MAX: usize = 12;
/// Those of all users who aren't root: they leave some to root.
const OF_USERS_MAX: usize = ALL_MAX - PER_USER_MAX;

impl Host {
    /// Whether a target's last packets may be waited for, besides those that are.
    pub(super) fn may_wait(&self, key: &Key) -> bool {
        let uid = self.entries[key].remembered.owner.uid();
        let (mut of_all, mut of_users, mut of_user) = (0, 0, 0);
        for entry in self.entries.values() {
            let other = entry.remembered.owner.uid();
            let waits = entry.state == State::Draining && !entry.is_parting;
            let count = usize::from(waits);
            of_all += count;
            of_users += if other == 0 { 0 } else { count };
            of_user += if other == uid { count } else { 0 };
        }
        let is_within = of_users < OF_USERS_MAX && of_user < PER_USER_MAX;
        of_all < ALL_MAX && (uid == 0 || is_within)
    }
}

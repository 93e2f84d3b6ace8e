//! How much impairments may take: of each the service keeps its text, traces and lists with it, in memory and among what
//! it remembers, which is in `/run` beside what the daemon has there.

use super::{Host, Key};
use crate::{error::Error, state::Remembered};

/// Bytes, as JSON, of the impairments of one user who isn't root.
pub(super) const OF_USER_MAX: usize = 16 * 1024 * 1024;
/// Of those of all users who aren't root.
const OF_USERS_MAX: usize = 3 * OF_USER_MAX;

impl Host {
    /// Whether there is room for what is to be remembered of a target, in place of what is.
    pub(super) fn check_room(&self, key: Key, remembered: &Remembered) -> Result<(), Error> {
        let uid = remembered.owner.uid();
        if uid == 0 {
            return Ok(());
        }
        let own = bytes_of(remembered);
        let (mut of_users, mut of_user) = (own, own);
        for (other, entry) in &self.entries {
            let owner = entry.remembered.owner.uid();
            if *other == key || owner == 0 || entry.is_parting {
                continue;
            }
            of_users += entry.bytes;
            of_user += if owner == uid { entry.bytes } else { 0 };
        }
        let refused = |whose, bytes, max| Error::Room {
            target: remembered.target.clone(),
            whose,
            bytes,
            max,
        };
        if of_user > OF_USER_MAX {
            return Err(refused(format!("user {uid}"), of_user, OF_USER_MAX));
        }
        if of_users > OF_USERS_MAX {
            let whose = "all users but root".to_owned();
            return Err(refused(whose, of_users, OF_USERS_MAX));
        }
        Ok(())
    }
}

/// What an impairment takes.
pub(super) fn bytes_of(remembered: &Remembered) -> usize {
    serde_json::to_vec(&remembered.impairment).map_or(0, |text| text.len())
}

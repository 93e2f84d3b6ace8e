//! Places of connections, and whose they are: what keeps one caller from having the daemon work for nobody else.
//!
//! A user other than root has at most [`CONNECTIONS_PER_USER_MAX`] of them, so that one tenant can't lock the others out, and all
//! of these together have at most [`CONNECTIONS_OF_USERS_MAX`], so that they can't lock root out. What was asked for by a
//! connection has its place too, and may outlast it: a caller who goes away at once makes no room for the next.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::sync::OwnedSemaphorePermit;

/// Most connections at a time.
pub(crate) const CONNECTIONS_MAX: u32 = 1024;
/// Most connections at a time of one user who isn't root.
pub(crate) const CONNECTIONS_PER_USER_MAX: u32 = 128;
/// Most connections at a time of all users who aren't root.
pub(crate) const CONNECTIONS_OF_USERS_MAX: u32 = CONNECTIONS_MAX - CONNECTIONS_PER_USER_MAX;

tokio::task_local! {
    /// The place of the connection by which the request came that the task carries out.
    static PLACE: Place;
}

/// A connection's place. Free when nobody has it any more: neither the connection nor work that was begun for it.
#[derive(Clone)]
pub(crate) struct Place {
    _held: Arc<(OwnedSemaphorePermit, Option<Admission>)>,
}

impl Place {
    /// One of all there are, and one of a user's; root has none of those.
    pub(crate) fn new(permit: OwnedSemaphorePermit, admission: Option<Admission>) -> Self {
        Self {
            _held: Arc::new((permit, admission)),
        }
    }

    /// Work that a request by the connection is.
    pub(crate) fn of<F: Future>(&self, request: F) -> impl Future<Output = F::Output> + use<F> {
        PLACE.scope(self.clone(), request)
    }

    /// The place of the connection whose request this task carries out, for work that may outlast the connection. None
    /// if it carries out none.
    pub(crate) fn of_request() -> Option<Self> {
        PLACE.try_with(Self::clone).ok()
    }
}

/// How many connections each user has.
#[derive(Default)]
pub(crate) struct Users(Mutex<HashMap<u32, u32>>);

/// One connection of a user; ends when dropped.
pub(crate) struct Admission {
    users: Arc<Users>,
    uid: u32,
}

impl Users {
    /// Connections of all of them.
    #[cfg(test)]
    pub(crate) fn connections(&self) -> u32 {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counts.values().sum()
    }

    /// One more connection of a user, unless that one has enough, or all together.
    pub(crate) fn admit(users: &Arc<Self>, uid: u32) -> Option<Admission> {
        let mut counts = users.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of_user = counts.get(&uid).copied().unwrap_or(0);
        let of_all: u32 = counts.values().sum();
        if of_user >= CONNECTIONS_PER_USER_MAX || of_all >= CONNECTIONS_OF_USERS_MAX {
            return None;
        }
        counts.insert(uid, of_user + 1);
        let users = Arc::clone(users);
        Some(Admission { users, uid })
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        let mut counts = self.users.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.uid) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_has_so_many_connections_and_no_more() {
        let users = Arc::new(Users::default());
        let mut held: Vec<Admission> = (0..CONNECTIONS_PER_USER_MAX)
            .map(|_| Users::admit(&users, 1000).unwrap())
            .collect();
        assert!(Users::admit(&users, 1000).is_none());
        assert!(Users::admit(&users, 1001).is_some());
        held.pop();
        assert!(Users::admit(&users, 1000).is_some());
        drop(held);
        assert!(users.0.lock().unwrap().is_empty());
    }

    #[test]
    fn users_together_leave_connections_to_root() {
        let users = Arc::new(Users::default());
        let user = |number: u32| 1000 + number / CONNECTIONS_PER_USER_MAX;
        let held: Vec<Admission> = (0..CONNECTIONS_MAX)
            .filter_map(|number| Users::admit(&users, user(number)))
            .collect();
        let left = CONNECTIONS_MAX as usize - held.len();
        assert!(left >= 100, "{left}");
    }
}

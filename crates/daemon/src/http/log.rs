//! What the log is told of failures.
//!
//! While many wait for slots of an empty pool, they ask many times a second in all. The log is told so once a second
//! for each pool, and how often in between; the metrics count every refusal. Other lines about what a user did have a field
//! `uid`, by which whoever writes the log has them take that user's share of it, but for errors, which root should know.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use sandwire_api::{error::ErrorCode, name::Name};
use sandwire_slot::service::Caller;

use super::failure::Failure;

const INTERVAL: Duration = Duration::from_secs(1);
/// Pools of which more than the last second is remembered.
const POOLS_MAX: usize = 1000;
/// Characters of what a user has a say in.
const CHARACTERS_MAX: usize = 400;

/// What was told of each pool that had no slot to give.
#[derive(Debug, Default)]
pub(super) struct EmptyPools {
    told: Mutex<BTreeMap<Name, Told>>,
}

#[derive(Debug)]
struct Told {
    at: Instant,
    /// Refusals since.
    left_out: u64,
}

impl EmptyPools {
    /// How many refusals were left out before this one. None if this one is, too.
    fn tell(&self, pool: &Name, now: Instant) -> Option<u64> {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let before = told.get_mut(pool);
        if let Some(before) = before
            && now.saturating_duration_since(before.at) < INTERVAL
        {
            before.left_out += 1;
            return None;
        }
        if told.len() >= POOLS_MAX {
            // Mostly of pools that are deleted.
            told.retain(|_, before| now.saturating_duration_since(before.at) < INTERVAL);
        }
        let now = Told {
            at: now,
            left_out: 0,
        };
        let before = told.insert(pool.clone(), now);
        Some(before.map_or(0, |before| before.left_out))
    }
}

/// Tells the log of a failure, unless it has heard enough of its pool.
pub(super) fn log(failure: &Failure, caller: Option<Caller>, empty_pools: &EmptyPools) {
    let code = failure.code.as_str();
    let message = beginning(&failure.message);
    if let Some(pool) = &failure.empty_pool {
        if let Some(left_out) = empty_pools.tell(pool, Instant::now()) {
            tracing::warn!(code, left_out, "{message}");
        }
        return;
    }
    let uid = caller.and_then(user_of);
    match failure.code {
        ErrorCode::Internal => tracing::error!(code, uid, "{message}"),
        ErrorCode::PoolEmpty | ErrorCode::Unavailable => {
            tracing::warn!(code, uid, "{message}");
        }
        _ => tracing::info!(code, uid, "{message}"),
    }
}

/// The user whose share of the log a line about a caller takes. What root does is always told.
pub(crate) fn user_of(caller: Caller) -> Option<u32> {
    (!caller.privileged).then_some(caller.uid)
}

/// The beginning of a text that a caller has a say in: a line as long as a request would be as bad as many.
pub(super) fn beginning(text: &str) -> &str {
    let end = text.char_indices().nth(CHARACTERS_MAX);
    end.map_or(text, |(end, _)| &text[..end])
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use sandwire_slot::error::ServiceError;

    use super::*;

    #[test]
    fn an_empty_pool_is_told_of_once_a_second() {
        let pools = EmptyPools::default();
        let [web, db]: [Name; 2] = ["web", "db"].map(|name| name.parse().unwrap());
        let begun = Instant::now();
        let at = |millis: u64| begun + Duration::from_millis(millis);
        assert_eq!(pools.tell(&web, at(0)), Some(0));
        for millis in 1..1000 {
            assert_eq!(pools.tell(&web, at(millis)), None);
        }
        assert_eq!(pools.tell(&db, at(999)), Some(0));
        assert_eq!(pools.tell(&web, at(1000)), Some(999));
        assert_eq!(pools.tell(&web, at(1999)), None);
    }

    #[test]
    fn only_a_refusal_for_want_of_a_slot_names_an_empty_pool() {
        let pool: Name = "web".parse().unwrap();
        let empty = ServiceError::PoolEmpty {
            pool: pool.clone(),
            building: 1,
            hint: String::new(),
        };
        assert_eq!(Failure::from(empty).empty_pool, Some(pool));
        assert_eq!(Failure::from(ServiceError::Stopping).empty_pool, None);
    }

    /// What the log is told.
    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_line_says_whose_it_is_and_is_no_longer_than_it_needs_to_be() {
        let told = |privileged| {
            let written = Written::default();
            let to = written.clone();
            let subscriber = tracing_subscriber::fmt()
                .with_ansi(false)
                .with_writer(move || to.clone())
                .finish();
            let caller = Caller {
                uid: 1000,
                gid: 1000,
                privileged,
            };
            tracing::subscriber::with_default(subscriber, || {
                let failure = Failure::new(ErrorCode::NotFound, "x".repeat(10_000));
                log(&failure, Some(caller), &EmptyPools::default());
            });
            let text = written.0.lock().unwrap().clone();
            String::from_utf8(text).unwrap()
        };
        let (of_user, of_root) = (told(false), told(true));
        assert!(of_user.contains("uid=1000"), "{of_user}");
        assert!(!of_root.contains("uid="), "{of_root}");
        assert!(of_user.len() < 1000, "{}", of_user.len());
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        assert_eq!(beginning("short"), "short");
        let long = "ä".repeat(CHARACTERS_MAX + 1);
        assert_eq!(beginning(&long), &long[..2 * CHARACTERS_MAX]);
    }
}

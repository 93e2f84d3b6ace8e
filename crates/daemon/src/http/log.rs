//! What the log is told of failures.
//!
//! While many wait for slots of an empty pool, they ask many times a second in all. The log is told so once a second
//! for each pool, and how often in between; the metrics count every refusal.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use sandwire_api::{error::ErrorCode, name::Name};

use super::failure::Failure;

const INTERVAL: Duration = Duration::from_secs(1);

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
        let now = Told {
            at: now,
            left_out: 0,
        };
        let before = told.insert(pool.clone(), now);
        Some(before.map_or(0, |before| before.left_out))
    }
}

pub(super) fn log(failure: &Failure, empty_pools: &EmptyPools) {
    let code = failure.code.as_str();
    if let Some(pool) = &failure.empty_pool {
        if let Some(left_out) = empty_pools.tell(pool, Instant::now()) {
            tracing::warn!(code, left_out, "{}", failure.message);
        }
        return;
    }
    match failure.code {
        ErrorCode::Internal => tracing::error!(code, "{}", failure.message),
        ErrorCode::PoolEmpty | ErrorCode::Unavailable => {
            tracing::warn!(code, "{}", failure.message);
        }
        _ => tracing::info!(code, "{}", failure.message),
    }
}

#[cfg(test)]
mod tests {
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
}

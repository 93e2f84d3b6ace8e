//! What the log is told of failures.
//!
//! While many wait for slots of an empty pool, they ask many times a second in all. The log is told so once a second
//! for each pool, and how often in between; the metrics count every refusal. Of other failures each user has so many lines
//! ([`lines`]), and as many of internal ones, which root should know.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use sandwire_api::{error::ErrorCode, name::Name};
use sandwire_slot::service::Caller;

use super::{App, failure::Failure};
use crate::lines;

const INTERVAL: Duration = Duration::from_secs(1);
/// Pools of which more than the last second is remembered.
const POOLS_MAX: usize = 1000;

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

/// Tells the log of a failure, unless it has heard enough of its pool or its caller.
pub(super) fn log(failure: &Failure, caller: Option<Caller>, app: &App) {
    let now = Instant::now();
    let code = failure.code.as_str();
    let message = lines::beginning(&failure.message);
    if let Some(pool) = &failure.empty_pool {
        if let Some(left_out) = app.empty_pools.tell(pool, now) {
            tracing::warn!(code, left_out, "{message}");
        }
        return;
    }
    let lines = match failure.code {
        ErrorCode::Internal => &app.lines_of_internal,
        _ => &app.lines,
    };
    let allowed = caller.map_or(Some(0), |caller| lines.allow(caller, now));
    let Some(left_out) = allowed else { return };
    if left_out > 0 {
        tracing::info!(
            left_out,
            "failures of this user's requests were not told of"
        );
    }
    match failure.code {
        ErrorCode::Internal => tracing::error!(code, "{message}"),
        ErrorCode::PoolEmpty | ErrorCode::Unavailable => {
            tracing::warn!(code, "{message}");
        }
        _ => tracing::info!(code, "{message}"),
    }
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
    fn a_user_that_asks_for_what_is_not_there_does_not_fill_the_log() {
        let folder = tempfile::tempdir().unwrap();
        let (slots, _) = crate::model::open(folder.path());
        let app = App::new(slots, false);
        let caller = Caller {
            uid: 1000,
            gid: 1000,
            privileged: false,
        };
        let written = Written::default();
        let to = written.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || to.clone())
            .finish();
        let begun = Instant::now();
        tracing::subscriber::with_default(subscriber, || {
            for _ in 0..2000 {
                let failure = Failure::new(ErrorCode::NotFound, "x".repeat(10_000));
                log(&failure, Some(caller), &app);
            }
            let failure = Failure::new(ErrorCode::Internal, "the disk is full");
            log(&failure, Some(caller), &app);
        });
        // On a machine that is held up they take longer than a second.
        let seconds = usize::try_from(begun.elapsed().as_secs()).unwrap();
        let text = written.0.lock().unwrap().clone();
        assert!(String::from_utf8_lossy(&text).contains("the disk is full"));
        let lines = text.iter().filter(|byte| **byte == b'\n').count();
        assert!((10..=22 * (seconds + 2)).contains(&lines), "{lines}");
        assert!(text.len() < 1000 * lines, "{}", text.len());
    }
}

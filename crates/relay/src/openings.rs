//! Connections that have been taken and haven't begun: not yet in TLS, or without the first bytes that say what they
//! are for.
//!
//! Anybody may open one, without a certificate, so there are at most so many. For one more the oldest is given up: who
//! goes on is through after a moment, and what is left of the others is what somebody only takes up room with.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::oneshot;

use crate::{metrics::Metrics, transport::TransportError};

/// Room for those that haven't begun.
pub(crate) struct Openings {
    most: usize,
    waiting: Mutex<Waiting>,
    metrics: Arc<Metrics>,
}

#[derive(Default)]
struct Waiting {
    taken: u64,
    /// By age; who lets go of a value gives that one up.
    places: BTreeMap<u64, oneshot::Sender<()>>,
}

/// One of them; its place is free again when this is dropped.
pub(crate) struct Place {
    room: Arc<Openings>,
    number: u64,
    given_up: oneshot::Receiver<()>,
}

impl Openings {
    pub(crate) fn new(most: usize, metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self {
            most,
            waiting: Mutex::default(),
            metrics,
        })
    }

    /// Takes a place, if need be that of the oldest.
    pub(crate) fn take(self: &Arc<Self>) -> Place {
        let (held, given_up) = oneshot::channel();
        let mut waiting = self.lock();
        let number = waiting.taken;
        waiting.taken += 1;
        waiting.places.insert(number, held);
        if waiting.places.len() > self.most {
            waiting.places.pop_first();
            self.metrics.openings_displaced.add(1);
        }
        drop(waiting);
        Place {
            room: self.clone(),
            number,
            given_up,
        }
    }

    /// Whether half of the room is taken.
    pub(crate) fn is_busy(&self) -> bool {
        self.lock().places.len() >= self.most.div_ceil(2)
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// What comes of a beginning, unless it is given up for a newer one.
    pub(crate) async fn hold<T>(
        mut self,
        beginning: impl Future<Output = Result<T, TransportError>>,
    ) -> Result<T, TransportError> {
        tokio::select! {
            begun = beginning => begun,
            _ = &mut self.given_up => Err(TransportError::Displaced),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.room.lock().places.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    #[tokio::test]
    async fn the_oldest_gives_way_and_who_is_through_takes_no_room() {
        let metrics = Arc::new(Metrics::default());
        let room = Openings::new(2, metrics.clone());
        let waiting = |place: Place| tokio::spawn(place.hold(pending::<Result<(), _>>()));
        let oldest = waiting(room.take());
        let newer = waiting(room.take());
        assert!(room.is_busy());
        assert!(room.take().hold(ready(Ok(()))).await.is_ok());
        let given_up = oldest.await.unwrap();
        assert!(matches!(given_up, Err(TransportError::Displaced)));
        assert!(room.take().hold(ready(Ok(()))).await.is_ok());
        assert!(!newer.is_finished());
        assert_eq!(room.lock().places.len(), 1);
        assert!(metrics.text().contains("openings_displaced_total 1\n"));
    }
}

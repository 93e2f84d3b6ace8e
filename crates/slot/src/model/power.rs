//! Power that fails after a number of steps.

use std::sync::{
    Arc,
    atomic::{AtomicI64, Ordering},
};

/// A number of steps after which nothing works any more.
#[derive(Clone, Debug)]
pub(crate) struct Power(Arc<AtomicI64>);

impl Power {
    pub(crate) fn for_steps(steps: i64) -> Self {
        Self(Arc::new(AtomicI64::new(steps)))
    }

    pub(crate) fn unlimited() -> Self {
        Self::for_steps(i64::MAX)
    }

    /// Takes a step. Returns whether there was power for it.
    pub(crate) fn step(&self) -> bool {
        self.0.fetch_sub(1, Ordering::SeqCst) > 0
    }

    pub(crate) fn is_off(&self) -> bool {
        self.0.load(Ordering::SeqCst) <= 0
    }

    /// Leaves power for this many steps.
    pub(crate) fn set(&self, steps: i64) {
        self.0.store(steps, Ordering::SeqCst);
    }

    pub(crate) fn cut(&self) {
        self.0.store(0, Ordering::SeqCst);
    }
}

//! What somebody else does between two steps of a caller: with no lock held, in the caller's thread, once.

use std::fmt;

use super::Kernel;

pub(crate) struct Interlude(Box<dyn FnOnce() + Send>);

impl Interlude {
    pub(crate) fn new(act: impl FnOnce() + Send + 'static) -> Self {
        Self(Box::new(act))
    }
}

impl fmt::Debug for Interlude {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Interlude")
    }
}

impl Kernel {
    pub(super) fn play_interlude(&self) {
        let interlude = self.lock().interlude.take();
        if let Some(Interlude(act)) = interlude {
            act();
        }
    }
}

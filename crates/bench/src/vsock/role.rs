//! Which thread runs where. Every measurement places its threads the same way, whoever it measures.

use std::{io, num::NonZeroUsize, thread};

use anyhow::{Context, Result};

use crate::cpu;

/// What a thread or process is in a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// The guest's driver: the last processor.
    Guest,
    /// The service under test, or what stands for it: the processor before.
    Service,
    /// Programs of the host: the processor before that, or the guest's if there are only two.
    Host,
    /// The driver of guests that do harm: a processor of its own, or the guest's if there are fewer than four.
    Hostile,
}

impl Role {
    /// Keeps the calling thread on its processor. To be called once, first thing in a thread: what a thread
    /// starts stays there too.
    pub(super) fn pin(self) -> Result<()> {
        let processors = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        cpu::pin(self.place(processors))
    }

    fn place(self, processors: usize) -> usize {
        match self {
            Self::Guest => 0,
            Self::Service => 1,
            Self::Host if processors > 2 => 2,
            Self::Hostile if processors > 3 => 3,
            Self::Host | Self::Hostile => 0,
        }
    }

    /// Does something in a thread of its own on its processor, and waits for it.
    pub(super) fn run<T: Send>(self, job: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        thread::scope(|scope| {
            let thread = scope.spawn(|| {
                self.pin()?;
                job()
            });
            join(thread)
        })
    }
}

/// What a thread came to.
pub(super) fn join<T>(thread: thread::ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread
        .join()
        .map_err(|_| io::Error::other("a thread panicked"))
        .context("a measurement's thread ended")?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_and_service_never_share_a_processor_if_there_are_two() {
        for processors in 2..6 {
            let places = [Role::Guest, Role::Service, Role::Host, Role::Hostile];
            let [guest, service, host, hostile] = places.map(|role| role.place(processors));
            assert!(guest != service && service != host, "{processors}");
            assert_eq!(guest == host, processors == 2);
            assert!(hostile != service, "{processors}");
            assert_eq!(guest == hostile, processors < 4);
        }
    }
}

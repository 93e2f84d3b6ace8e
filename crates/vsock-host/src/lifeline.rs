//! Has the service end when one of its threads fails: the guests that the thread served would be without a channel for good,
//! and whoever looks after the service starts it anew, with all of them.

use std::sync::Arc;

use crate::readiness::Waker;

/// A thread's, which wakes the service when it is dropped, by a panic too, unless the thread was told to end.
#[derive(Debug, Default)]
pub struct Lifeline(Option<Arc<Waker>>);

impl Lifeline {
    /// One of that service. The default is nobody's.
    #[must_use]
    pub fn of(service: Arc<Waker>) -> Self {
        Self(Some(service))
    }

    /// The thread was told to end.
    pub(crate) fn let_go(mut self) {
        self.0 = None;
    }
}

impl Drop for Lifeline {
    fn drop(&mut self) {
        if let Some(service) = &self.0 {
            service.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{os::fd::AsFd, time::Duration};

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;
    use crate::{
        budget::Budget,
        directory::Directory,
        hybrid::router::{self, RouterCommand},
        worker::{self, Command, WorkerSettings},
    };

    fn is_woken(service: &Waker) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(service.as_fd(), PollFlags::IN)];
        let now = Timespec::try_from(Duration::ZERO).expect("a short time");
        poll(&mut fds, Some(&now)).expect("poll") == 1
    }

    #[test]
    fn a_thread_that_fails_wakes_the_service_and_one_that_is_told_to_end_does_not() {
        for fails in [true, false] {
            let service = Arc::new(Waker::new().expect("an eventfd"));
            let lifeline = || Lifeline::of(service.clone());
            let directory = Arc::new(Directory::new());
            let (budget, settings) = (Arc::new(Budget::new(1 << 20)), WorkerSettings::default());
            let worker = worker::spawn(0, directory.clone(), budget.clone(), settings, lifeline());
            let (worker, thread) = worker.expect("a worker");
            worker.send(if fails { Command::Panic } else { Command::Stop });
            assert_eq!(thread.join().is_err(), fails);
            assert_eq!(is_woken(&service), fails);

            service.clear();
            let (router, thread) = router::spawn(directory, budget, lifeline()).expect("a router");
            router.send(if fails {
                RouterCommand::Panic
            } else {
                RouterCommand::Stop
            });
            assert_eq!(thread.join().is_err(), fails);
            assert_eq!(is_woken(&service), fails);
        }
    }
}

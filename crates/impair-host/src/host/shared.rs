//! All targets, for all threads: who has the lock is in and out, and what the kernel takes its time for is done without.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
};

use super::{Host, Leaving, key_of, parting::Parting};
use crate::{control::Target, error::Error};

/// Targets whose ends are carried out at a time by one thread's request: the kernel has each wait for other processors.
const TOGETHER: usize = 16;

/// All targets.
#[derive(Clone, Debug)]
pub(crate) struct SharedHost(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    host: Mutex<Host>,
    /// Told when the end of a target has been carried out.
    parted: Condvar,
}

impl SharedHost {
    pub(crate) fn new(host: Host) -> Self {
        Self(Arc::new(Shared {
            host: Mutex::new(host),
            parted: Condvar::new(),
        }))
    }

    /// The targets, whoever panicked while they had them: each step leaves them whole.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Host> {
        let locked = self.0.host.lock();
        locked.unwrap_or_else(PoisonError::into_inner)
    }

    /// With the lock, once that isn't so any more: asked again whenever an end has been carried out.
    fn lock_when_not(&self, is_so: impl Fn(&Host) -> bool) -> MutexGuard<'_, Host> {
        let waited = self.0.parted.wait_while(self.lock(), |host| is_so(host));
        waited.unwrap_or_else(PoisonError::into_inner)
    }

    /// Does work on a target once no end of it is being carried out; then carries out what ends by that.
    pub(crate) fn with<T>(&self, target: &Target, work: impl FnOnce(&mut Host) -> T) -> T {
        let mut host = self.lock();
        if host.is_any_parting() {
            drop(host);
            // Which target that is the kernel may be slow to say while many end.
            let key = key_of(target).ok().flatten();
            host = self.lock_when_not(|host| host.is_parting(target, key));
        }
        let done = work(&mut host);
        let partings = host.take_partings();
        drop(host);
        self.carry_out_all(partings);
        done
    }

    /// Takes the diversion away whose packets have gone. If somebody else is at it, that one is told what failed.
    pub(crate) fn finish_clear(&self, leaving: &Leaving) -> Result<(), Error> {
        let parting = self.lock().finish_clear(leaving);
        if let Some(parting) = parting {
            return self.carry_out(&parting);
        }
        drop(self.lock_when_not(|host| host.is_parting_with(leaving)));
        Ok(())
    }

    /// Looks once, and has end what is gone; whether there was any.
    pub(crate) fn look(&self) -> bool {
        let mut host = self.lock();
        host.look();
        let partings = host.take_partings();
        drop(host);
        let is_any = !partings.is_empty();
        self.carry_out_all(partings);
        is_any
    }

    /// Begins to end all; with those that can't, goes on. What somebody else asks for from then on is refused.
    pub(crate) fn begin_clear_all(&self) -> Vec<Leaving> {
        let mut host = self.lock();
        let begun = host.begin_clear_all();
        let partings = host.take_partings();
        drop(host);
        self.carry_out_all(partings);
        begun
    }

    /// Takes the diversions of all away as their packets have gone.
    pub(crate) fn finish_clear_all(&self, leaving: Vec<Leaving>) {
        let finish = |one: &Leaving| {
            let outcome = one.wait().and_then(|_| self.finish_clear(one));
            if let Err(error) = outcome {
                tracing::error!(%error, "a diversion can't be taken away");
            }
        };
        together(leaving, finish);
    }

    /// Takes away what is still there, with its packets.
    pub(crate) fn flush_all(&self) {
        let leaving = self.lock().begin_flush_all();
        for one in leaving {
            let _ = one.wait();
        }
        // Also where the engine is gone: without its TAPs the diversion would leave the interface without network.
        let partings = self.lock().part_all();
        self.carry_out_all(partings);
        // The process ends next, and others may be at it.
        drop(self.lock_when_not(Host::is_any_parting));
    }

    fn carry_out_all(&self, partings: Vec<Parting>) {
        together(partings, |parting| {
            if let Err(error) = self.carry_out(parting) {
                let target = parting.target();
                tracing::error!(%target, %error, "what is left of it can't be removed");
            }
        });
    }

    pub(super) fn carry_out(&self, parting: &Parting) -> Result<(), Error> {
        /// Also upon a panic: others wait for it.
        struct Noted<'a>(&'a SharedHost, &'a Parting);
        impl Drop for Noted<'_> {
            fn drop(&mut self) {
                self.0.lock().parted(self.1);
                self.0.0.parted.notify_all();
            }
        }
        let _noted = Noted(self, parting);
        parting.carry_out()
    }
}

/// Does that for each, on some threads.
fn together<T: Send>(all: Vec<T>, work: impl Fn(&T) + Sync) {
    let others = all.len().min(TOGETHER).saturating_sub(1);
    let all = Mutex::new(all.into_iter());
    let next = || all.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work_on = || {
        while let Some(one) = next() {
            work(&one);
        }
    };
    thread::scope(|scope| {
        for _ in 0..others {
            // Where there can't be one more, those that there are do it.
            if thread::Builder::new().spawn_scoped(scope, work_on).is_err() {
                break;
            }
        }
        work_on();
    });
}

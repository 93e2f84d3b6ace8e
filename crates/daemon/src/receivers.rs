//! UDP sockets of identities with several addresses: as one is bound, it is given what comes to all of them.
//!
//! What was given stays so without a daemon; sockets that are bound while none runs receive at one address until one does.

use std::{
    io,
    thread::{self, Thread},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sandwire_identity::{Bound, Error, Identities};

/// How long it waits to be told. Then it looks anyway, and at the maps anew, which may be others.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two looks. The second one finds the place of a socket free that was being closed at the first.
const PAUSE: Duration = Duration::from_millis(10);
/// A look goes through all UDP sockets of the host, and who binds all the time has it looked all the time: it rests so many
/// times as long as it looked.
const REST: u32 = 19;

/// Who does so until the process ends: a thread that waits for the kernel's word.
#[derive(Clone)]
pub(crate) struct Receivers(Thread);

impl Receivers {
    /// # Errors
    /// There can't be another thread.
    pub(crate) fn serve(identities: Identities) -> io::Result<Self> {
        let thread = thread::Builder::new().name("receivers".to_owned());
        let serving = thread.spawn(move || serve_for_ever(&identities))?;
        Ok(Self(serving.thread().clone()))
    }

    /// Tells it that there may be another identity: of one that needs it, it had better know before a socket is bound.
    pub(crate) fn look_for_identities(&self) {
        self.0.unpark();
    }
}

fn serve_for_ever(identities: &Identities) {
    let mut complaint = None;
    loop {
        let error = serve_a_while(identities)
            .err()
            .map(|error| error.to_string());
        if let Some(error) = &error {
            // A kernel that can't do it can't do it each time.
            if complaint.as_ref() != Some(error) {
                tracing::warn!(error, "UDP sockets of identities receive at one address");
            }
            thread::sleep(PATIENCE);
        }
        complaint = error;
    }
}

fn serve_a_while(identities: &Identities) -> Result<(), Error> {
    let bound = identities.bound()?;
    let is_needed = bound.is_some() && identities.prepare_receivers()?;
    let Some(mut bound) = bound.filter(|_| is_needed) else {
        thread::park_timeout(PATIENCE);
        return Ok(());
    };
    let begun = Instant::now();
    // What nobody was there to be told of.
    look(identities)?;
    while let Some(left) = PATIENCE.checked_sub(begun.elapsed()) {
        if is_told(&mut bound, left)? {
            look(identities)?;
            look(identities)?;
        }
    }
    Ok(())
}

/// Whether there was anything to be told within this time.
fn is_told(bound: &mut Bound, within: Duration) -> Result<bool, Error> {
    let within = Timespec::try_from(within).expect("some seconds");
    let mut waited = [PollFd::new(bound, PollFlags::IN)];
    match poll(&mut waited, Some(&within)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(bound.take()),
        Err(error) => Err(Error::System {
            operation: "wait for",
            object: "bound UDP sockets".to_owned(),
            source: error.into(),
        }),
    }
}

fn look(identities: &Identities) -> Result<(), Error> {
    // Takes as long as many looks, once, and is nothing to rest from.
    identities.prepare_receivers()?;
    let begun = Instant::now();
    identities.enter_receivers()?;
    thread::sleep(PAUSE.max(begun.elapsed() * REST));
    Ok(())
}

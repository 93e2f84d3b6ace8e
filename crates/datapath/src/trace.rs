//! What the programs say of the packets of traced NICs.

use std::{
    os::fd::{AsFd, BorrowedFd},
    time::Duration,
};

use crate::{Datapath, Error, abi::TraceEvent};

/// Reads events. There is one stream for all NICs, and each event is read once: one reader at a time.
#[derive(Debug)]
pub struct TraceReader {}

impl TraceReader {
    /// The next event, or `None` if there is none now.
    pub fn next_event(&mut self) -> Option<TraceEvent> {
        todo!()
    }

    /// Waits for an event. Whether there is one.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn wait(&self, at_most: Duration) -> Result<bool, Error> {
        todo!("{at_most:?}")
    }
}

impl AsFd for TraceReader {
    fn as_fd(&self) -> BorrowedFd<'_> {
        todo!()
    }
}

impl Datapath {
    /// Opens the stream of events.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn trace_events(&self) -> Result<TraceReader, Error> {
        todo!()
    }
}

//! What the programs say of the packets of traced NICs.

use std::{
    fmt, io,
    os::fd::{AsFd, BorrowedFd},
    sync::atomic::Ordering,
    time::Duration,
};

use aya::maps::{Map, MapData, RingBuf};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{
    Datapath, Error, NicIndex,
    abi::{Plain, TraceEvent},
    pins::map_path,
};

const MAP: &str = "trace";

/// Reads events. There is one stream for all NICs, and each event is read once: one reader at a time.
/// What nobody reads in time is lost, as [`Datapath::trace_lost`] tells; the programs never wait.
pub struct TraceReader {
    ring: RingBuf<MapData>,
}

impl fmt::Debug for TraceReader {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("TraceReader")
    }
}

impl TraceReader {
    /// The next event, or `None` if there is none now.
    pub fn next_event(&mut self) -> Option<TraceEvent> {
        TraceEvent::read(&self.ring.next()?)
    }

    /// Waits for an event. Whether there is one.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn wait(&self, at_most: Duration) -> Result<bool, Error> {
        let timeout = Timespec::try_from(at_most)
            .map_err(|error| Error::system("wait for", "trace events", io::Error::other(error)))?;
        let mut waited = [PollFd::new(self, PollFlags::IN)];
        match poll(&mut waited, Some(&timeout)) {
            Ok(ready) => Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(error) => Err(Error::system("wait for", "trace events", error.into())),
        }
    }
}

impl AsFd for TraceReader {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }
}

impl Datapath {
    /// Events of a NIC that the stream had no room for, since the maps were made.
    #[must_use]
    pub fn trace_lost(&self, index: NicIndex) -> u64 {
        let [lost] = self.trace_lost.of(index.0) else {
            return 0;
        };
        lost.load(Ordering::Relaxed)
    }

    /// Opens the stream of events.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn trace_events(&self) -> Result<TraceReader, Error> {
        let failed = |error| Error::system("open", "the map trace", io::Error::other(error));
        let ring = MapData::from_pin(map_path(&self.folder, MAP))
            .and_then(Map::from_map_data)
            .and_then(RingBuf::try_from)
            .map_err(failed)?;
        Ok(TraceReader { ring })
    }
}

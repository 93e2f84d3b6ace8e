//! The stream of traced packets, of which the model has none.

use std::time::Duration;

use crate::{
    error::NetworkError,
    network::{TraceSource, TracedPacket},
};

/// Never tells of a packet.
pub(super) struct NoTraces;

impl TraceSource for NoTraces {
    fn next_event(&mut self, at_most: Duration) -> Result<Option<TracedPacket>, NetworkError> {
        std::thread::sleep(at_most);
        Ok(None)
    }
}

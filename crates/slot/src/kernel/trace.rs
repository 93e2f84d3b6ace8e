//! The data path's stream of traced packets, in the words of the API.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rustix::time::{ClockId, clock_gettime};
use sandwire_api::{
    drop_reason::DropReason,
    trace::{Direction, Frame, Stage, TracePacket, Verdict},
};
use sandwire_datapath::{NicIndex, TraceReader, abi::TraceEvent};
use sandwire_kernel_net::{
    interface::{self, InterfaceIndex},
    netlink::Socket,
};

use super::ebpf::Ebpf;
use crate::{
    error::NetworkError,
    network::{TraceSource, TracedPacket},
};

/// The stream, with what it takes to tell of it.
pub(super) struct Events {
    ebpf: Arc<Ebpf>,
    reader: TraceReader,
    route: Socket,
    names: HashMap<u32, String>,
    /// When it was opened, by the kernel's clock in nanoseconds. What is older was for others, and nobody has read it;
    /// its interface may be another slot's by now.
    opened: u64,
    /// From the kernel's clock to that of people, in nanoseconds.
    since_epoch: u64,
}

impl Events {
    /// To be opened by a thread in the host's namespace.
    pub(super) fn open(ebpf: Arc<Ebpf>) -> Result<Self, NetworkError> {
        let reader = ebpf.datapath.trace_events()?;
        let monotonic = clock_gettime(ClockId::Monotonic);
        let seconds = u64::try_from(monotonic.tv_sec).unwrap_or_default();
        let nanoseconds = u64::try_from(monotonic.tv_nsec).unwrap_or_default();
        let opened = seconds * 1_000_000_000 + nanoseconds;
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let now = u64::try_from(now.as_nanos()).unwrap_or_default();
        Ok(Self {
            ebpf,
            reader,
            route: Socket::route()?,
            names: HashMap::new(),
            opened,
            since_epoch: now.saturating_sub(opened),
        })
    }

    fn describe(&mut self, event: &TraceEvent) -> Option<TracedPacket> {
        if event.time < self.opened {
            return None;
        }
        let (pool, slot, nic) = self.ebpf.owner(NicIndex(event.nic));
        let captured = usize::try_from(event.captured).unwrap_or(usize::MAX);
        let frame = &event.frame[..captured.min(event.frame.len())];
        let packet = TracePacket {
            time: event.time.saturating_add(self.since_epoch),
            nic,
            direction: Direction::from_number(event.direction)?,
            verdict: Verdict::from_number(event.verdict)?,
            stage: Stage::from_number(event.stage)?,
            reason: DropReason::from_number(event.reason),
            target: (event.target != 0).then(|| self.name(event.target)),
            length: event.length,
            segments: event.segments,
            frame: Frame(frame.to_vec()),
        };
        Some(TracedPacket { pool, slot, packet })
    }

    fn name(&mut self, index: u32) -> String {
        if let Some(name) = self.names.get(&index) {
            return name.clone();
        }
        let found = interface::find_by_index(&mut self.route, InterfaceIndex(index));
        match found {
            Ok(Some(found)) => {
                self.names.insert(index, found.name.clone());
                found.name
            }
            _ => format!("#{index}"),
        }
    }
}

impl TraceSource for Events {
    fn next_event(&mut self, at_most: Duration) -> Result<Option<TracedPacket>, NetworkError> {
        if let Some(event) = self.reader.next_event() {
            return Ok(self.describe(&event));
        }
        if !self.reader.wait(at_most)? {
            return Ok(None);
        }
        let event = self.reader.next_event();
        Ok(event.and_then(|event| self.describe(&event)))
    }
}

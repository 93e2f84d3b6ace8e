//! The three queues of a guest, with packets in and out, and no idea of a connection.
//!
//! Packets out go through slots of memory that are filled by copying, as a kernel copies from its user;
//! packets in are copied out into a private buffer, and their descriptors are posted again, all at once, when
//! less than half of them is with the device and nothing more is to be taken: as Linux does.
//!
//! Slots and buffers begin at a page, with the header in front, as Linux's allocator places them. That matters:
//! some processors copy ten times slower when both addresses lie badly to each other within a page.

mod queues;
pub mod settings;

use std::{
    io,
    os::fd::{AsRawFd, RawFd},
    path::Path,
    time::Instant,
};

use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd},
};

pub(crate) use self::queues::Queues;
use self::settings::PIECES_MAX;
pub use self::settings::{ReceiveLayout, Settings, TransmitLayout};
use crate::{
    GuestError, Result,
    front_end::{EVENT_IDX, FrontEnd, Queue},
    memory::Memory,
    packet::{HEADER_BYTES, Header},
    ring::{Descriptor, Ring},
};

/// Index of the queue of packets to the guest.
pub const RECEIVE: usize = 0;
/// Index of the queue of packets from the guest.
pub const TRANSMIT: usize = 1;
/// Index of the queue of events.
pub const EVENT: usize = 2;

/// Event: all connections are gone and the CID may be another one.
pub const TRANSPORT_RESET: u32 = 0;

/// What epoll says of the eventfds.
const CALLED: u64 = 0;
/// What epoll says of the vhost-user socket.
const GONE: u64 = 1;

const PAGE: u64 = 4096;

const EVENT_BUFFERS: usize = 8;
const EVENT_BYTES: u32 = 4;

/// Queues that a back end works on.
#[derive(Debug)]
pub struct Transport {
    pub(crate) settings: Settings,
    pub(crate) memory: Memory,
    pub(crate) queues: Queues,
    front_end: FrontEnd,
    kicks: [EventFd; 3],
    calls: [EventFd; 3],
    epoll: Epoll,
    cid: u64,
    scratch: Vec<u8>,
    violations: Vec<String>,
    kicks_sent: u64,
    /// Whether somebody has found no slot and not been told of one since.
    refused: bool,
}

impl Transport {
    /// Connects to the back end at `path` and starts the queues, buffers posted.
    ///
    /// # Errors
    /// The back end can't be reached or refuses.
    pub fn connect(settings: &Settings, path: &Path) -> Result<Self> {
        let front_end = FrontEnd::connect(path, settings.features, settings.timeout)?;
        let mut memory = Memory::new(&settings.memory).map_err(GuestError::system("memory"))?;
        let event_idx = front_end.agreed() & EVENT_IDX != 0;
        let queues = Queues::new(settings, &mut memory, event_idx);
        let mut transport = Self::assemble(settings.clone(), memory, queues, front_end)?;
        transport.start([0; 3])?;
        transport.post_all();
        Ok(transport)
    }

    /// Goes on with queues that a back end has worked on before.
    pub(crate) fn resume(
        settings: Settings,
        memory: Memory,
        queues: Queues,
        bases: [u16; 3],
        path: &Path,
    ) -> Result<Self> {
        let front_end = FrontEnd::connect(path, settings.features, settings.timeout)?;
        let mut transport = Self::assemble(settings, memory, queues, front_end)?;
        transport.start(bases)?;
        transport.kick_all();
        Ok(transport)
    }

    fn assemble(
        settings: Settings,
        memory: Memory,
        queues: Queues,
        mut front_end: FrontEnd,
    ) -> Result<Self> {
        let event =
            || EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map_err(GuestError::system("eventfd"));
        let cid = front_end.cid()?.unwrap_or(settings.fallback_cid);
        let scratch = vec![0; settings.receive_bytes as usize];
        let mut transport = Self {
            settings,
            memory,
            queues,
            front_end,
            kicks: [event()?, event()?, event()?],
            calls: [event()?, event()?, event()?],
            epoll: Epoll::new().map_err(GuestError::system("epoll"))?,
            cid,
            scratch,
            violations: Vec::new(),
            kicks_sent: 0,
            refused: false,
        };
        for index in 0..transport.queue_count() {
            transport.watch(transport.call(index), CALLED)?;
        }
        transport.watch(transport.front_end.socket(), GONE)?;
        Ok(transport)
    }

    /// Adds a descriptor to what is waited for; edge-triggered, so that nobody has to read it.
    fn watch(&mut self, fd: RawFd, data: u64) -> Result<()> {
        let interest = match data {
            GONE => EventSet::READ_HANG_UP,
            _ => EventSet::IN | EventSet::EDGE_TRIGGERED,
        };
        self.epoll
            .ctl(ControlOperation::Add, fd, EpollEvent::new(interest, data))
            .map_err(GuestError::system("epoll"))
    }

    fn start(&mut self, bases: [u16; 3]) -> Result<()> {
        self.front_end
            .set_up(&self.memory, self.settings.memory_slots)?;
        let count = self.queue_count();
        for (index, base) in bases.into_iter().enumerate().take(count) {
            self.front_end.start(&Queue {
                index,
                ring: &self.queues.rings[index],
                base,
                kick: &self.kicks[index],
                call: &self.calls[index],
            })?;
        }
        Ok(())
    }

    /// Connects anew after the back end has gone, as QEMU does with `reconnect`: the queues go on where the
    /// used rings end.
    ///
    /// # Errors
    /// The back end can't be reached or refuses.
    pub fn reconnect(&mut self, path: &Path) -> Result<()> {
        // The closed socket leaves the epoll by itself.
        self.front_end = FrontEnd::connect(path, self.settings.features, self.settings.timeout)?;
        self.watch(self.front_end.socket(), GONE)?;
        let bases = [RECEIVE, TRANSMIT, EVENT]
            .map(|index| self.queues.rings[index].used_index(&self.memory));
        self.cid = self.front_end.cid()?.unwrap_or(self.settings.fallback_cid);
        self.start(bases)?;
        self.kick_all();
        Ok(())
    }

    /// Stops the queues; gives the index up to which each has been worked on.
    ///
    /// # Errors
    /// The back end doesn't answer.
    pub fn stop(&mut self) -> Result<[u16; 3]> {
        let mut bases = [RECEIVE, TRANSMIT, EVENT]
            .map(|index| self.queues.rings[index].used_index(&self.memory));
        for (index, base) in bases.iter_mut().enumerate().take(self.queue_count()) {
            *base = self.front_end.stop(index)?;
        }
        Ok(bases)
    }

    /// Starts the queues again at these indices, by the same connection to the back end.
    ///
    /// # Errors
    /// The back end refuses.
    pub fn start_again(&mut self, bases: [u16; 3]) -> Result<()> {
        self.start(bases)?;
        self.kick_all();
        Ok(())
    }

    /// The guest's CID.
    #[must_use]
    pub fn cid(&self) -> u64 {
        self.cid
    }

    /// Reads the CID anew, as a guest does after a transport reset.
    ///
    /// # Errors
    /// The back end doesn't answer.
    pub fn read_cid(&mut self) -> Result<u64> {
        if let Some(cid) = self.front_end.cid()? {
            self.cid = cid;
        }
        Ok(self.cid)
    }

    /// The connection to the back end.
    pub fn front_end(&mut self) -> &mut FrontEnd {
        &mut self.front_end
    }

    /// The guest's memory.
    pub fn memory(&mut self) -> &mut Memory {
        &mut self.memory
    }

    /// What the device has done that it may not do.
    #[must_use]
    pub fn violations(&self) -> &[String] {
        &self.violations
    }

    pub(crate) fn accuse(&mut self, violation: String) {
        // A device that is wrong once is wrong a million times: the first ones say it.
        if self.violations.len() < 100 {
            self.violations.push(violation);
        }
    }

    /// How often the device was kicked.
    #[must_use]
    pub fn kicks_sent(&self) -> u64 {
        self.kicks_sent
    }

    /// The eventfd of a queue by which the device calls; for an epoll of many guests, edge-triggered.
    ///
    /// # Panics
    /// There are three queues.
    #[must_use]
    pub fn call(&self, queue: usize) -> RawFd {
        self.calls[queue].as_raw_fd()
    }

    /// How often the device has called since this was last asked.
    ///
    /// # Panics
    /// There are three queues.
    #[must_use]
    pub fn take_calls(&self, queue: usize) -> u64 {
        // There is nothing to read while it hasn't called.
        self.calls[queue].read().unwrap_or(0)
    }

    fn queue_count(&self) -> usize {
        if self.settings.event_queue { 3 } else { 2 }
    }

    // Packets out.

    /// Puts a packet into a slot and publishes it; false if no slot is free. The device isn't kicked.
    pub fn send(&mut self, header: &Header, payload: &[u8]) -> bool {
        if !self.has_slot() {
            return false;
        }
        let Some(slot) = self.queues.free_slots.pop() else {
            return false;
        };
        let address = self.queues.slots[usize::from(slot)];
        self.memory.write(address, &header.encode());
        self.memory.write(address + HEADER_BYTES as u64, payload);
        let published = self.publish_slot(slot, HEADER_BYTES + payload.len());
        if !published {
            self.queues.free_slots.push(slot);
        }
        published
    }

    fn publish_slot(&mut self, slot: u16, bytes: usize) -> bool {
        let address = self.queues.slots[usize::from(slot)];
        let table = self.queues.tables[usize::from(slot)];
        let mut parts = [(0, 0, false); PIECES_MAX];
        let count = self
            .settings
            .transmit_layout
            .split(address, bytes, &mut parts);
        let ring = &mut self.queues.rings[TRANSMIT];
        let head = if self.settings.indirect {
            ring.add_indirect(&self.memory, table, &parts[..count])
        } else {
            ring.add(&self.memory, &parts[..count])
        };
        let Some(head) = head else {
            return false;
        };
        self.queues.slot_of[usize::from(head)] = Some(slot);
        ring.publish(&self.memory, head);
        true
    }

    /// Takes back what the device has sent.
    pub fn reclaim(&mut self) {
        while let Some(used) = self.queues.rings[TRANSMIT].pop(&self.memory) {
            let Some(head) = self.queues.rings[TRANSMIT].take_back(used) else {
                self.accuse(format!(
                    "transmit queue: used {used:?}, which it didn't have"
                ));
                continue;
            };
            if used.length != 0 {
                self.accuse(format!("transmit queue: {used:?} claims to have written"));
            }
            // A chain of a test's own making has no slot, and its descriptors are the test's.
            if let Some(slot) = self.queues.slot_of[usize::from(head)].take() {
                self.queues.free_slots.push(slot);
                self.queues.rings[TRANSMIT].release(head);
            }
        }
    }

    /// Whether another packet could be sent.
    #[must_use]
    pub fn has_slot(&mut self) -> bool {
        if !self.room() {
            self.reclaim();
        }
        self.refused = !self.room();
        !self.refused
    }

    /// Whether there are a slot and as many descriptors as the longest packet needs.
    fn room(&self) -> bool {
        let needed = if self.settings.indirect {
            1
        } else {
            self.settings.transmit_layout.descriptors(&self.settings)
        };
        !self.queues.free_slots.is_empty() && self.queues.rings[TRANSMIT].free() >= needed
    }

    /// Packets that are with the device.
    #[must_use]
    pub fn in_flight(&mut self) -> usize {
        self.reclaim();
        self.queues.rings[TRANSMIT].outstanding()
    }

    // Packets in.

    /// The next packet for the guest, with its payload in a private buffer. Its descriptors are posted again
    /// when there are no more packets, if the device has less than half of them.
    /// One that makes no sense is a violation, and skipped.
    pub fn receive(&mut self) -> Option<(Header, &[u8])> {
        loop {
            let Some(used) = self.queues.rings[RECEIVE].pop(&self.memory) else {
                self.post_again();
                return None;
            };
            let Some(head) = self.queues.rings[RECEIVE].take_back(used) else {
                self.accuse(format!(
                    "receive queue: used {used:?}, which it didn't have"
                ));
                continue;
            };
            let decoded = self.decode(head, used.length);
            self.queues.taken.push(head);
            match decoded {
                Ok(header) => return Some((header, &self.scratch[..header.len as usize])),
                Err(violation) => self.accuse(violation),
            }
        }
    }

    /// Posts what was taken, if the device has less than half of all.
    fn post_again(&mut self) {
        let posted = self.queues.rings[RECEIVE].outstanding();
        let all = posted + self.queues.taken.len();
        if posted < all.div_ceil(2) {
            for head in self.queues.taken.drain(..) {
                self.queues.rings[RECEIVE].publish(&self.memory, head);
            }
        }
    }

    fn decode(&mut self, head: u16, length: u32) -> Result<Header, String> {
        let address = self.queues.receive_buffers[usize::from(head)];
        let room = HEADER_BYTES + self.settings.receive_bytes as usize;
        let length = length as usize;
        if length < HEADER_BYTES || length > room {
            return Err(format!("receive queue: {length} bytes used of {room}"));
        }
        let mut header = [0; HEADER_BYTES];
        self.memory.read(address, &mut header);
        let header = Header::decode(&header);
        if header.len as usize != length - HEADER_BYTES {
            return Err(format!("receive queue: {length} bytes used for {header:?}"));
        }
        let payload = &mut self.scratch[..header.len as usize];
        if !payload.is_empty() {
            self.memory.read(address + HEADER_BYTES as u64, payload);
        }
        Ok(header)
    }

    /// Posts more buffers than [`Settings::receive_buffers`] said, as far as the queue has room. Gives how many
    /// are posted in all.
    pub fn post(&mut self, buffers: u16) -> usize {
        let bytes = HEADER_BYTES + self.settings.receive_bytes as usize;
        for _ in 0..buffers {
            let mut parts = [(0, 0, false); PIECES_MAX];
            let count = self.settings.receive_layout.split(0, bytes, &mut parts);
            if self.queues.rings[RECEIVE].free() < count {
                break;
            }
            let address = self.memory.allocate(bytes, PAGE);
            for part in &mut parts[..count] {
                part.0 += address;
            }
            let head = self.queues.rings[RECEIVE]
                .add(&self.memory, &parts[..count])
                .expect("there are as many descriptors");
            self.queues.receive_buffers[usize::from(head)] = address;
            self.queues.rings[RECEIVE].publish(&self.memory, head);
        }
        self.kick();
        self.queues.rings[RECEIVE].outstanding()
    }

    fn post_all(&mut self) {
        self.post(self.settings.receive_buffers);
        for _ in 0..EVENT_BUFFERS {
            let address = self.memory.allocate(EVENT_BYTES as usize, 4);
            let ring = &mut self.queues.rings[EVENT];
            if let Some(head) = ring.add(&self.memory, &[(address, EVENT_BYTES, true)]) {
                self.queues.event_buffers[usize::from(head)] = address;
                ring.publish(&self.memory, head);
            }
        }
        self.kick_all();
    }

    /// The next event's number.
    pub fn event(&mut self) -> Option<u32> {
        loop {
            let used = self.queues.rings[EVENT].pop(&self.memory)?;
            let Some(head) = self.queues.rings[EVENT].take_back(used) else {
                self.accuse(format!("event queue: used {used:?}, which it didn't have"));
                continue;
            };
            let mut number = [0; EVENT_BYTES as usize];
            self.memory
                .read(self.queues.event_buffers[usize::from(head)], &mut number);
            self.queues.rings[EVENT].publish(&self.memory, head);
            if used.length == EVENT_BYTES {
                return Some(u32::from_le_bytes(number));
            }
            self.accuse(format!("event queue: {} bytes written", used.length));
        }
    }

    // Notifications.

    /// Kicks the device for what was published, if it wants to know.
    pub fn kick(&mut self) {
        for index in 0..self.queue_count() {
            if self.queues.rings[index].kick_needed(&self.memory) {
                self.kick_queue(index);
            }
        }
    }

    /// Kicks one queue, whether the device wants it or not.
    ///
    /// # Panics
    /// There are three queues.
    pub fn kick_queue(&mut self, index: usize) {
        self.kicks_sent += 1;
        // Only a counter at its end can refuse, and then the device has enough to wake for.
        drop(self.kicks[index].write(1));
    }

    fn kick_all(&mut self) {
        for index in 0..self.queue_count() {
            self.kick_queue(index);
        }
    }

    /// Asks to be called for packets, for events, and for room if there is no slot left; true if there is
    /// something to do already: also if there is a slot now for who found none.
    pub fn arm(&mut self) -> bool {
        self.reclaim();
        let starved = !self.room();
        if std::mem::replace(&mut self.refused, starved) && !starved {
            return true;
        }
        let rings = &self.queues.rings;
        let mut pending = rings[RECEIVE].arm(&self.memory, 0) | rings[EVENT].arm(&self.memory, 0);
        if starved {
            // Half of what is out, so that there is something to do when it wakes.
            let half = u16::try_from(rings[TRANSMIT].outstanding() / 2).unwrap_or(0);
            pending |= rings[TRANSMIT].arm(&self.memory, half);
        } else {
            rings[TRANSMIT].disarm(&self.memory);
        }
        pending
    }

    /// Sleeps until the device calls or the deadline has come.
    ///
    /// # Errors
    /// The back end has closed its socket, or the deadline has come.
    pub fn wait(&mut self, deadline: Instant, operation: &'static str) -> Result<()> {
        self.kick();
        if self.arm() {
            return Ok(());
        }
        let mut events = [EpollEvent::default(); 4];
        let left = deadline.saturating_duration_since(Instant::now());
        let milliseconds = i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX);
        let count = match self.epoll.wait(milliseconds, &mut events) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
            Err(source) => {
                return Err(GuestError::System {
                    operation: "epoll_wait",
                    source,
                });
            }
        };
        if events[..count].iter().any(|event| event.data() == GONE) {
            return Err(GuestError::BackEndGone);
        }
        if count == 0 && Instant::now() >= deadline {
            return Err(GuestError::TimedOut {
                operation,
                waited: self.settings.timeout,
            });
        }
        Ok(())
    }

    // Lies.

    /// Writes these descriptors into the table of a queue, from its first one on, and publishes the first. The
    /// queue must be one that nothing else is sent by, or has been used up before.
    ///
    /// # Panics
    /// There are three queues.
    pub fn publish_raw(&mut self, queue: usize, descriptors: &[Descriptor], head: u16) {
        let ring = &mut self.queues.rings[queue];
        for (index, descriptor) in (0u16..).zip(descriptors) {
            ring.set_descriptor(&self.memory, index, *descriptor);
        }
        ring.publish(&self.memory, head);
        self.kick_queue(queue);
    }

    /// A queue, for what not even that can say.
    ///
    /// # Panics
    /// There are three queues.
    pub fn ring(&mut self, queue: usize) -> (&mut Ring, &Memory) {
        (&mut self.queues.rings[queue], &self.memory)
    }
}

//! What a VMM says by vhost-user, and the connection it says it over.
//!
//! [`Transport`] is what has been agreed: memory, rings, features. The messages themselves are the crate
//! `vhost`'s. That crate reads and writes blockingly, and a VMM may stop anywhere; so [`FrontEnd::serve`]
//! lets it have a message only when the whole of it has arrived and there is room for the answer.
//!
//! Not offered: dirty-page logging (QEMU marks this device unmigratable anyway), in-flight descriptors (a
//! packet is either wholly handled and given back, or still in the ring), postcopy.

use std::{
    collections::VecDeque,
    fs::File,
    os::{fd::AsFd, unix::net::UnixStream},
    rc::Rc,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use vhost::{
    VhostUserMemoryRegionBase,
    vhost_user::{
        Error, GpuBackend, Result, VhostUserBackendReqHandlerMut,
        message::{
            VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags,
            VhostUserInflight, VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures,
            VhostUserShMemConfig, VhostUserSharedMsg, VhostUserSingleMemoryRegion,
            VhostUserVirtioFeatures, VhostUserVringAddrFlags, VhostUserVringState,
        },
    },
};

use crate::{
    address::VmKey,
    bell::{Bell, Call},
    disposal::{Disposal, is_eventfd},
    memory::{MOST_REGIONS, Memory, MemoryError, Placing},
    queue::{Addresses, Ring},
};

mod connection;

use connection::hang_up;
pub use connection::{FrontEnd, Served};

/// Number of the ring that carries packets to the guest.
pub const TO_GUEST: usize = 0;
/// Number of the ring that carries packets from the guest.
pub const FROM_GUEST: usize = 1;
/// Number of the ring for events. Some VMMs, QEMU for one, keep it.
pub const EVENTS: usize = 2;
/// How many rings the device has.
pub const RINGS: usize = 3;

/// VIRTIO_VSOCK_F_STREAM.
const STREAM: u64 = 1 << 0;
/// VIRTIO_VSOCK_F_SEQPACKET.
const SEQPACKET: u64 = 1 << 1;
const RING_INDIRECT: u64 = 1 << 28;
const RING_EVENT_IDX: u64 = 1 << 29;
const VERSION_1: u64 = 1 << 32;

/// What a driver may choose from.
const FEATURES: u64 = STREAM | SEQPACKET | RING_INDIRECT | RING_EVENT_IDX | VERSION_1;

/// What changed by a message, for whoever waits on descriptors and has chains in hand.
#[derive(Debug)]
pub enum Change {
    /// This descriptor is no longer a kick; to be taken out of the wait and closed.
    Unwatch(File),
    /// The ring's kick is to be waited on, and the ring looked at.
    Watch(usize),
    /// The ring is to be looked at.
    Look(usize),
    /// The ring is started; from the position given by the VMM.
    Started(usize),
    /// The device is as new: nothing that was before counts.
    Reset,
}

/// What has been agreed with a VMM.
#[derive(Debug)]
pub struct Transport {
    cid: u32,
    /// Whose it is, for the log.
    vm: String,
    features: u64,
    /// The guest's memory.
    pub memory: Memory,
    /// Its rings.
    pub rings: [Ring; RINGS],
    /// Chains of [`TO_GUEST`] that were taken ahead and are not given back; a stop goes back by them.
    pub ahead: VecDeque<Ahead>,
    /// The pieces of the chain that is being taken; only its memory outlives that.
    pub taking: Vec<libc::iovec>,
    /// Chains of [`TO_GUEST`] that may still be taken in this turn.
    pub left: u32,
    changes: Vec<Change>,
    bell: Rc<Bell>,
    disposal: Disposal,
}

/// A chain for a packet to the guest, taken ahead.
#[derive(Clone, Debug)]
pub struct Ahead {
    /// Its number.
    pub head: u16,
    /// Bytes it holds.
    pub bytes: u32,
    /// Its pieces; most chains have one.
    pub first: libc::iovec,
    /// The others.
    pub rest: Vec<libc::iovec>,
}

impl Transport {
    /// Nothing agreed yet. `cid` is what the driver will read.
    #[must_use]
    pub fn new(cid: u32) -> Self {
        Self {
            cid,
            vm: String::new(),
            features: 0,
            memory: Memory::default(),
            rings: Default::default(),
            ahead: VecDeque::new(),
            taking: Vec::new(),
            left: 0,
            changes: Vec::new(),
            bell: Rc::default(),
            disposal: Disposal::default(),
        }
    }

    /// The same, of a guest that the log is to name; interrupted by that bell, and with what its VMMs leave ending there.
    #[must_use]
    pub fn of(vm: &VmKey, cid: u32, bell: &Rc<Bell>, disposal: Disposal) -> Self {
        Self {
            vm: vm.to_string(),
            bell: Rc::clone(bell),
            memory: Memory::new(disposal.clone()),
            disposal,
            ..Self::new(cid)
        }
    }

    /// What has changed since this was last asked.
    pub fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// Whether the driver speaks SEQPACKET.
    #[must_use]
    pub fn has_seqpacket(&self) -> bool {
        self.features & SEQPACKET != 0
    }

    /// Whether what a former VMM left isn't closed yet, so that there can't be another one.
    #[must_use]
    pub fn is_held_up(&self) -> bool {
        self.disposal.is_held_up()
    }

    /// Ends a connection that isn't served.
    pub fn turn_away(&self, socket: UnixStream) {
        hang_up(socket, &self.disposal);
    }

    /// Whether packets flow both ways.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        self.rings[TO_GUEST].is_serving() && self.rings[FROM_GUEST].is_serving()
    }

    /// Whether a ring that was started makes no sense any more, so that nothing flows before it is started again.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.rings.iter().any(Ring::is_lost)
    }

    /// Chains taken ahead go back into the ring, as if never taken.
    pub fn forget_ahead(&mut self) {
        self.rings[TO_GUEST].rewind(self.ahead.len());
        self.ahead.clear();
    }

    /// The VMM is gone: everything is as in the beginning.
    pub fn disconnect(&mut self) {
        self.reset_rings();
        self.features = 0;
        self.memory.clear();
    }

    fn reset_rings(&mut self) {
        self.ahead.clear();
        for ring in &mut self.rings {
            let old = std::mem::take(ring);
            self.changes.extend(old.kick.map(Change::Unwatch));
        }
        self.changes.push(Change::Reset);
    }

    fn index(index: u32) -> Result<usize> {
        usize::try_from(index)
            .ok()
            .filter(|&index| index < RINGS)
            .ok_or(Error::InvalidParam)
    }

    /// What a ring is told by, or tells by, if it is an eventfd. Memory would be freed by whoever lets go of it last,
    /// which is who serves guests if a ring has it.
    fn eventfd(&self, file: File) -> Result<File> {
        if is_eventfd(file.as_fd()) {
            return Ok(file);
        }
        tracing::warn!(vm = %self.vm, "a VMM hands over something else where an eventfd belongs; it is let go");
        Err(Error::InvalidParam)
    }

    /// Starts a ring that has all it needs.
    fn start(&mut self, index: usize) -> Result<()> {
        let event_idx = self.features & RING_EVENT_IDX != 0;
        let ring = &mut self.rings[index];
        if !ring.start(&self.memory, event_idx) {
            tracing::warn!(
                vm = %self.vm,
                ring = index,
                "a guest's ring isn't in its memory, and isn't served"
            );
            return Err(Error::InvalidParam);
        }
        // Without this feature there is no message to enable a ring.
        if self.features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() == 0 {
            ring.enabled = true;
        }
        self.changes.push(Change::Started(index));
        Ok(())
    }

    fn refused(&self, error: &MemoryError) -> Error {
        tracing::warn!(vm = %self.vm, %error, "a VMM's memory isn't taken");
        Error::InvalidParam
    }

    /// After the memory has changed: running rings are looked up anew.
    fn relocate(&mut self) {
        self.forget_ahead();
        for index in 0..RINGS {
            self.look_up(index);
        }
    }

    /// Looks up anew a ring that runs, or would if its memory hadn't been taken away. One that runs again is looked at,
    /// since what the guest put into it meanwhile had its kick then.
    fn look_up(&mut self, index: usize) {
        let event_idx = self.features & RING_EVENT_IDX != 0;
        let ring = &mut self.rings[index];
        let ran = ring.is_running();
        if !ran && !ring.is_displaced() {
            return;
        }
        let runs = ring.relocate(&self.memory, event_idx);
        if ran && !runs {
            tracing::warn!(
                vm = %self.vm,
                ring = index,
                "a ring isn't in the guest's memory any more; it waits until it is again"
            );
        }
        if runs && !ran {
            self.changes.push(Change::Look(index));
        }
    }
}

fn placing(region: &VhostUserMemoryRegion) -> Placing {
    Placing {
        guest: region.guest_phys_addr,
        user: region.user_addr,
        size: region.memory_size,
        offset: region.mmap_offset,
    }
}

impl VhostUserBackendReqHandlerMut for Transport {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset_device()
    }

    fn reset_device(&mut self) -> Result<()> {
        self.reset_rings();
        self.features = 0;
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(FEATURES | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        let offered = self.get_features()?;
        if features & !offered != 0 {
            return Err(Error::InvalidParam);
        }
        self.features = features;
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        let regions = regions.iter().map(placing).zip(files).collect();
        let replaced = self.memory.replace(regions);
        replaced.map_err(|error| self.refused(&error))?;
        self.relocate();
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let ring = &mut self.rings[Self::index(index)?];
        let size = u16::try_from(num).map_err(|_| Error::InvalidParam)?;
        if ring.is_running() || !ring.set_size(size) {
            return Err(Error::InvalidParam);
        }
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptors: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        let index = Self::index(index)?;
        self.rings[index].addresses = Some(Addresses {
            descriptors,
            available,
            used,
        });
        if self.rings[index].is_running() {
            if index == TO_GUEST {
                self.forget_ahead();
            }
            self.start(index)?;
        } else {
            self.look_up(index);
        }
        Ok(())
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let ring = &mut self.rings[Self::index(index)?];
        let base = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        if ring.is_running() {
            return Err(Error::InvalidParam);
        }
        ring.set_base(base);
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let position = Self::index(index)?;
        if position == TO_GUEST {
            self.forget_ahead();
        }
        let ring = &mut self.rings[position];
        ring.stop();
        ring.call = None;
        self.changes.extend(ring.kick.take().map(Change::Unwatch));
        Ok(VhostUserVringState::new(index, u32::from(ring.base())))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let index = Self::index(u32::from(index))?;
        // A ring without a kick would have to be polled; nobody asks for that.
        let kick = self.eventfd(fd.ok_or(Error::InvalidParam)?)?;
        let old = self.rings[index].kick.replace(kick);
        self.changes.extend(old.map(Change::Unwatch));
        self.changes.push(Change::Watch(index));
        if self.rings[index].is_running() {
            Ok(())
        } else {
            self.start(index)
        }
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let fd = fd.map(|file| self.eventfd(file)).transpose()?;
        let call = fd.map(|file| Call::new(file, &self.bell));
        if let Some(call) = &call {
            // For what was published meanwhile only the former one was rung, if any. One interrupt more does no harm.
            call.ring();
        }
        self.rings[Self::index(u32::from(index))?].call = call;
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        Self::index(u32::from(index))?;
        fd.map(|file| self.eventfd(file)).transpose().map(|_| ())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)
    }

    fn set_protocol_features(&mut self, _features: u64) -> Result<()> {
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(RINGS as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let index = Self::index(index)?;
        self.rings[index].enabled = enable;
        if enable {
            self.changes.push(Change::Look(index));
        }
        Ok(())
    }

    /// The guest's CID, and zeros beyond: a read of any length must not fail (Cloud Hypervisor panics).
    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        let cid = u64::from(self.cid).to_le_bytes();
        let byte = |at: u32| {
            usize::try_from(at)
                .ok()
                .and_then(|at| cid.get(at).copied())
                .unwrap_or(0)
        };
        Ok((offset..offset.saturating_add(size)).map(byte).collect())
    }

    fn set_config(
        &mut self,
        _offset: u32,
        _buf: &[u8],
        _flags: VhostUserConfigFlags,
    ) -> Result<()> {
        Err(Error::InvalidOperation(
            "the configuration of this device is read-only",
        ))
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MOST_REGIONS as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        fd: File,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        let added = self.memory.add(placing(region), &fd);
        added.map_err(|error| self.refused(&error))?;
        self.relocate();
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let (guest, size) = (region.guest_phys_addr, region.memory_size);
        // Chains taken ahead may point into it.
        self.forget_ahead();
        let removed = self.memory.remove(guest, size);
        removed.map_err(|error| self.refused(&error))?;
        self.relocate();
        Ok(())
    }

    fn set_gpu_socket(&mut self, _gpu_backend: GpuBackend) -> Result<()> {
        Err(NOT_OFFERED)
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        Err(NOT_OFFERED)
    }

    fn get_inflight_fd(
        &mut self,
        _inflight: &VhostUserInflight,
    ) -> Result<(VhostUserInflight, File)> {
        Err(NOT_OFFERED)
    }

    fn set_inflight_fd(&mut self, _inflight: &VhostUserInflight, _file: File) -> Result<()> {
        Err(NOT_OFFERED)
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _fd: File,
    ) -> Result<Option<File>> {
        Err(NOT_OFFERED)
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(NOT_OFFERED)
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(NOT_OFFERED)
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> Result<()> {
        Err(NOT_OFFERED)
    }
}

const NOT_OFFERED: Error = Error::InvalidOperation("this device doesn't offer that");

/// A transport that the code of messages and the code of packets share; both run in one thread.
pub type SharedTransport = Arc<Mutex<Transport>>;

/// Makes it shared. It holds pointers into guest memory, so it can't leave its thread, and needn't.
#[must_use]
#[allow(
    clippy::arc_with_non_send_sync,
    reason = "the crate vhost wants an Arc of a Mutex"
)]
pub fn share(transport: Transport) -> SharedTransport {
    Arc::new(Mutex::new(transport))
}

/// The transport, for as long as an event is handled.
pub fn lock(transport: &SharedTransport) -> MutexGuard<'_, Transport> {
    transport.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;

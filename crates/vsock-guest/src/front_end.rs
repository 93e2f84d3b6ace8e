//! What a VMM says to the back end over the vhost-user socket.

use std::{
    os::{
        fd::{AsRawFd, RawFd},
        unix::net::UnixStream,
    },
    path::Path,
    time::Duration,
};

use vhost::{
    VhostBackend, VringConfigData,
    vhost_user::{
        Frontend, VhostUserFrontend,
        message::{
            VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures,
            VhostUserVirtioFeatures,
        },
    },
};
use vmm_sys_util::eventfd::EventFd;

use crate::{
    GuestError, Result,
    memory::{Memory, USER_OFFSET},
    ring::Ring,
};

/// Feature: a chain may be a table elsewhere.
pub const INDIRECT_DESC: u64 = 1 << 28;
/// Feature: notifications at an index.
pub const EVENT_IDX: u64 = 1 << 29;
/// Feature: not the legacy interface.
pub const VERSION_1: u64 = 1 << 32;
/// Feature: streams.
pub const FEATURE_STREAM: u64 = 1 << 0;
/// Feature: messages.
pub const FEATURE_SEQPACKET: u64 = 1 << 1;

/// A connection to the back end, with what was agreed.
#[derive(Debug)]
pub struct FrontEnd {
    front: Session,
    offered: u64,
    agreed: u64,
    protocol: VhostUserProtocolFeatures,
}

/// The protocol's own connection, which has no `Debug`.
struct Session(Frontend);

impl std::fmt::Debug for Session {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Session")
    }
}

/// One queue as the back end is told it.
pub(crate) struct Queue<'a> {
    pub(crate) index: usize,
    pub(crate) ring: &'a Ring,
    pub(crate) base: u16,
    pub(crate) kick: &'a EventFd,
    pub(crate) call: &'a EventFd,
}

impl FrontEnd {
    /// Connects and agrees on features: those in `wanted` that are offered. `timeout` is how long any answer
    /// may take.
    ///
    /// # Errors
    /// The socket can't be reached, or an answer is missing or wrong.
    pub fn connect(path: &Path, wanted: u64, timeout: Duration) -> Result<Self> {
        let stream = UnixStream::connect(path).map_err(GuestError::system("connect"))?;
        let system = || GuestError::system("vhost-user socket");
        stream.set_read_timeout(Some(timeout)).map_err(system())?;
        stream.set_write_timeout(Some(timeout)).map_err(system())?;
        let mut front = Frontend::from_stream(stream, 3);

        let offered = front
            .get_features()
            .map_err(GuestError::vhost("GET_FEATURES"))?;
        let mut protocol = VhostUserProtocolFeatures::empty();
        if offered & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() != 0 {
            protocol = front
                .get_protocol_features()
                .map_err(GuestError::vhost("GET_PROTOCOL_FEATURES"))?
                & (VhostUserProtocolFeatures::MQ
                    | VhostUserProtocolFeatures::REPLY_ACK
                    | VhostUserProtocolFeatures::CONFIG
                    | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
                    | VhostUserProtocolFeatures::RESET_DEVICE);
            front
                .set_protocol_features(protocol)
                .map_err(GuestError::vhost("SET_PROTOCOL_FEATURES"))?;
            if protocol.contains(VhostUserProtocolFeatures::REPLY_ACK) {
                front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
            }
        }
        front.set_owner().map_err(GuestError::vhost("SET_OWNER"))?;
        let agreed =
            offered & (wanted | VERSION_1 | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits());
        Ok(Self {
            front: Session(front),
            offered,
            agreed,
            protocol,
        })
    }

    /// All that the back end offers.
    #[must_use]
    pub fn offered(&self) -> u64 {
        self.offered
    }

    /// What was agreed.
    #[must_use]
    pub fn agreed(&self) -> u64 {
        self.agreed
    }

    /// Features of the protocol that were agreed.
    #[must_use]
    pub fn protocol(&self) -> VhostUserProtocolFeatures {
        self.protocol
    }

    /// The socket, which is readable once the back end is gone.
    pub fn socket(&self) -> RawFd {
        self.front.0.as_raw_fd()
    }

    /// The protocol's own calls, for messages that nothing here sends.
    pub fn session(&mut self) -> &mut Frontend {
        &mut self.front.0
    }

    /// The guest's CID, from the device's configuration; nothing if the back end has none to give.
    ///
    /// # Errors
    /// The answer is missing or wrong.
    pub fn cid(&mut self) -> Result<Option<u64>> {
        if !self.protocol.contains(VhostUserProtocolFeatures::CONFIG) {
            return Ok(None);
        }
        let (_, bytes) = self
            .front
            .0
            .get_config(0, 8, VhostUserConfigFlags::WRITABLE, &[0; 8])
            .map_err(GuestError::vhost("GET_CONFIG"))?;
        Ok(bytes.try_into().ok().map(u64::from_le_bytes))
    }

    /// Tells features and memory: all regions in one table, or one by one.
    pub(crate) fn set_up(&mut self, memory: &Memory, one_by_one: bool) -> Result<()> {
        self.front
            .0
            .set_features(self.agreed)
            .map_err(GuestError::vhost("SET_FEATURES"))?;
        let table = memory.table();
        if !one_by_one {
            return self
                .front
                .0
                .set_mem_table(&table)
                .map(drop)
                .map_err(GuestError::vhost("SET_MEM_TABLE"));
        }
        if !self
            .protocol
            .contains(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)
        {
            return Err(GuestError::NotOffered("CONFIGURE_MEM_SLOTS"));
        }
        for region in &table {
            self.front
                .0
                .add_mem_region(region)
                .map_err(GuestError::vhost("ADD_MEM_REG"))?;
        }
        Ok(())
    }

    /// Tells all about a queue and starts it.
    pub(crate) fn start(&mut self, queue: &Queue<'_>) -> Result<()> {
        let [table, available, used] = queue.ring.addresses();
        let front = &mut self.front.0;
        front
            .set_vring_num(queue.index, queue.ring.size())
            .map_err(GuestError::vhost("SET_VRING_NUM"))?;
        front
            .set_vring_base(queue.index, queue.base)
            .map_err(GuestError::vhost("SET_VRING_BASE"))?;
        front
            .set_vring_addr(
                queue.index,
                &VringConfigData {
                    queue_max_size: queue.ring.size(),
                    queue_size: queue.ring.size(),
                    flags: 0,
                    desc_table_addr: table + USER_OFFSET,
                    used_ring_addr: used + USER_OFFSET,
                    avail_ring_addr: available + USER_OFFSET,
                    log_addr: None,
                },
            )
            .map_err(GuestError::vhost("SET_VRING_ADDR"))?;
        front
            .set_vring_call(queue.index, queue.call)
            .map_err(GuestError::vhost("SET_VRING_CALL"))?;
        front
            .set_vring_kick(queue.index, queue.kick)
            .map_err(GuestError::vhost("SET_VRING_KICK"))?;
        if self.agreed & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() != 0 {
            front
                .set_vring_enable(queue.index, true)
                .map_err(GuestError::vhost("SET_VRING_ENABLE"))?;
        }
        Ok(())
    }

    /// Stops a queue; gives the index in its available ring up to which the back end has come.
    ///
    /// # Errors
    /// The answer is missing or wrong.
    pub fn stop(&mut self, index: usize) -> Result<u16> {
        self.front
            .0
            .get_vring_base(index)
            .map(|base| (base & 0xffff) as u16)
            .map_err(GuestError::vhost("GET_VRING_BASE"))
    }
}

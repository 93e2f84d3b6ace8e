//! The sending half: frames are put into slots, and one system call has the kernel send all of them.
//!
//! ```text
//!      first          next
//!        v              v
//!  ...   | r | r | r | r |  free ...      r: requested, not yet taken by the kernel
//! ```
//!
//! The kernel takes slots in order and stops at one that it can't send. If it will be able to soon, the slots stay as
//! they are. If not (the interface is down or gone, a frame is longer than a new MTU), all that it has not taken is
//! taken back and offered frame by frame, so that each has its own answer.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::net::SendFlags;

use super::slots::{Direction, Slots};
use crate::io::interface::EdgeError;
use crate::io::outbound::{Outbound, Verdict};
use crate::io::packet_socket::PacketSocket;
use crate::ports::Ports;
use crate::time::Time;

/// A ring for sending, on a socket of its own: one that has such a ring sends only by it.
#[derive(Debug)]
pub(super) struct Sender {
    socket: PacketSocket,
    slots: Slots,
    /// The first slot that the kernel has not taken.
    first: usize,
    /// The slot to be filled next.
    next: usize,
    /// Slots from `first` to `next`.
    requested: usize,
    /// Bytes of the longest frame without a VLAN tag that goes by the ring.
    frame_bytes_max: usize,
    /// When the MTU was asked for.
    asked_at: Option<Time>,
    /// Packets wait at the input, since all slots are on their way.
    has_no_slot: bool,
    outbound: Outbound,
}

impl Sender {
    pub(super) fn open(
        name: &str,
        frame_bytes: usize,
        bypasses_qdisc: bool,
    ) -> Result<Self, EdgeError> {
        let failed = |step| move |error| EdgeError::of_step(name, step, error);
        let socket = PacketSocket::open(name)?;
        if bypasses_qdisc {
            socket
                .set(libc::PACKET_QDISC_BYPASS, &1)
                .map_err(failed("bypass the queueing discipline"))?;
        }
        let slots = Slots::map(&socket, Direction::Send, SLOTS, frame_bytes)
            .map_err(failed("make a ring for sending"))?;
        socket.bind_to_send()?;
        Ok(Self {
            frame_bytes_max: 0,
            asked_at: None,
            socket,
            slots,
            first: 0,
            next: 0,
            requested: 0,
            has_no_slot: false,
            outbound: Outbound::default(),
        })
    }

    pub(super) fn outbound(&self) -> &Outbound {
        &self.outbound
    }

    /// Whether frames wait for the kernel to have room.
    pub(super) fn is_waiting(&self) -> bool {
        self.requested > 0 || self.has_no_slot
    }

    /// Sends what the input holds, as far as there are slots; frames that no slot is for go by `other`.
    pub(super) fn push(&mut self, now: Time, other: &PacketSocket, ports: &mut Ports<'_>) {
        if ports.queued(0) > 0
            && self
                .asked_at
                .is_none_or(|then| now.since(then) >= MTU_PERIOD)
        {
            self.follow_mtu();
            self.asked_at = Some(now);
        }
        self.has_no_slot = false;
        while ports.queued(0) > 0 {
            let status = self.slots.status(self.next);
            if self.requested == self.slots.count() || status != libc::TP_STATUS_AVAILABLE {
                self.flush(other);
                if self.slots.status(self.next) != libc::TP_STATUS_AVAILABLE {
                    // All slots are on their way: the packets wait on their link.
                    self.outbound.waits += 1;
                    self.has_no_slot = true;
                    return;
                }
            }
            let Some(packet) = ports.receive(0) else {
                break;
            };
            if !self.is_for_slots(packet.bytes()) {
                self.flush(other);
                self.send_alone(other, packet.bytes());
                continue;
            }
            self.slots.write(self.next, packet.bytes());
            self.slots
                .set_status(self.next, libc::TP_STATUS_SEND_REQUEST);
            self.next = self.after(self.next);
            self.requested += 1;
        }
        if self.requested > 0 {
            self.flush(other);
        }
    }

    /// Asks for the MTU: of what comes by a ring with vnet headers the kernel does not check the length.
    fn follow_mtu(&mut self) {
        let frame_bytes = self.socket.frame_bytes();
        self.frame_bytes_max = frame_bytes.min(self.slots.frame_bytes_max() - VLAN_TAG_BYTES);
    }

    #[inline]
    fn is_for_slots(&self, frame: &[u8]) -> bool {
        let excess = frame.len().saturating_sub(self.frame_bytes_max);
        excess == 0 || (excess <= VLAN_TAG_BYTES && frame.get(12..14) == Some(&[0x81, 0]))
    }

    /// Has the kernel send what was requested.
    fn flush(&mut self, other: &PacketSocket) {
        if self.requested == 0 {
            return;
        }
        let outcome = rustix::net::send(self.socket.as_fd(), &[], SendFlags::DONTWAIT);
        self.count_taken();
        if self.requested == 0 {
            return;
        }
        match outcome.map_err(io::Error::from) {
            Err(error) if !is_transient(&error) => self.take_back(other),
            _ if self.slots.status(self.first) == libc::TP_STATUS_WRONG_FORMAT => {
                self.take_back(other);
            }
            _ => self.outbound.waits += 1,
        }
    }

    /// Counts the slots that the kernel has taken as sent.
    fn count_taken(&mut self) {
        while self.requested > 0 {
            let status = self.slots.status(self.first);
            if status == libc::TP_STATUS_SEND_REQUEST || status == libc::TP_STATUS_WRONG_FORMAT {
                return;
            }
            self.first = self.after(self.first);
            self.requested -= 1;
            self.outbound.sent += 1;
        }
    }

    /// Offers all that the kernel has not taken one by one. The kernel looks at `first` next, so that is filled next.
    #[cold]
    fn take_back(&mut self, other: &PacketSocket) {
        let mut slot = self.first;
        for _ in 0..self.requested {
            self.slots.set_status(slot, libc::TP_STATUS_AVAILABLE);
            let outcome = other.send(self.slots.written(slot));
            self.count_alone(outcome);
            slot = self.after(slot);
        }
        self.next = self.first;
        self.requested = 0;
    }

    #[cold]
    fn send_alone(&mut self, other: &PacketSocket, frame: &[u8]) {
        let outcome = other.send(frame);
        self.count_alone(outcome);
    }

    /// What can't wait for room is dropped for want of it.
    fn count_alone(&mut self, outcome: io::Result<usize>) {
        if self.outbound.count(outcome) != Verdict::Done {
            self.outbound.no_buffers += 1;
        }
    }

    #[inline]
    fn after(&self, slot: usize) -> usize {
        if slot + 1 == self.slots.count() {
            0
        } else {
            slot + 1
        }
    }
}

/// The kernel had no room, and left the slot as it was.
fn is_transient(error: &io::Error) -> bool {
    let number = error.raw_os_error().unwrap_or(0);
    [libc::EAGAIN, libc::EINTR, libc::ENOBUFS, libc::ENOMEM].contains(&number)
}

/// How long a change of the MTU may go unnoticed.
const MTU_PERIOD: Duration = Duration::from_millis(10);
const VLAN_TAG_BYTES: usize = 4;
/// As many as a link holds.
const SLOTS: usize = 1024;

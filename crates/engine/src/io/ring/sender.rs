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

use rustix::net::SendFlags;

use super::slots::{Direction, Slots};
use crate::io::interface::EdgeError;
use crate::io::outbound::{Outbound, Verdict};
use crate::io::packet_socket::PacketSocket;
use crate::ports::Ports;

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
    /// Bytes of the longest frame that goes by the ring.
    frame_bytes_max: usize,
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
            frame_bytes_max: frame_bytes.min(slots.frame_bytes_max()),
            socket,
            slots,
            first: 0,
            next: 0,
            requested: 0,
            outbound: Outbound::default(),
        })
    }

    pub(super) fn outbound(&self) -> &Outbound {
        &self.outbound
    }

    /// Whether frames wait for the kernel to have room.
    pub(super) fn is_waiting(&self) -> bool {
        self.requested > 0
    }

    /// Sends what the input holds, as far as there are slots; frames that no slot is for go by `other`.
    pub(super) fn push(&mut self, other: &PacketSocket, ports: &mut Ports<'_>) {
        while ports.queued(0) > 0 {
            let status = self.slots.status(self.next);
            if self.requested == self.slots.count() || status != libc::TP_STATUS_AVAILABLE {
                self.flush(other);
                if self.slots.status(self.next) != libc::TP_STATUS_AVAILABLE {
                    // All slots are on their way: the packets wait on their link.
                    self.outbound.waits += 1;
                    return;
                }
            }
            let Some(packet) = ports.receive(0) else {
                break;
            };
            if packet.length() > self.frame_bytes_max {
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

/// As many as a link holds.
const SLOTS: usize = 1024;

//! A network interface by rings that are shared with the kernel: no system call for what is received, one for all
//! that is sent in a breath.
//!
//! ```text
//!            +------+
//!  input --->| Ring |---> output
//!            +------+
//! ```
//!
//! Both rings are TPACKET_V2. Version 3 would pack frames more densely, but hands them over by whole blocks: a frame
//! in a block that isn't full waits for a timer, a millisecond at least. Slots are for frames of wire size; a
//! super-packet, for which one would have to be 64 kB, comes by the socket, a system call for its dozens of segments.

mod sender;
mod slots;

use std::cell::Cell;
use std::io;
use std::os::fd::AsFd;

use rustix::net::sockopt;

use super::inbound::Inbound;
use super::interface::EdgeError;
use super::offload::VnetHeader;
use super::packet_socket::{Hearing, PacketSocket, SUPER_PACKET_BYTES_MAX};
use super::raw::SEGMENTS_USUAL;
use crate::app::{App, BuildError, Config, Figure, PortList, Wake};
use crate::pool::PoolLimits;
use crate::ports::{BATCH_PACKETS, Ports};
use crate::time::Time;
use crate::watch::{Readiness, Watch};

use sender::Sender;
use slots::{Direction, Slots};

/// Rings on an interface. They hear every frame, whatever its address, unless told otherwise.
///
/// Figures: see [`Inbound`] and [`Outbound`](super::outbound::Outbound); `interface_went_down`, which counts its deletion
/// too; `kernel_drops`, frames for which the ring had no room.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ring {
    hearing: Hearing,
    fanout: Option<u16>,
    bypasses_qdisc: bool,
    slots: usize,
}

impl Ring {
    /// On the interface of that name, in the network namespace of the thread that configures the engine.
    #[must_use]
    pub fn interface(name: &str) -> Self {
        Self {
            hearing: Hearing::all(name),
            fanout: None,
            bypasses_qdisc: false,
            slots: SLOTS,
        }
    }

    /// Whether frames for other addresses are heard too.
    #[must_use]
    pub fn promiscuous(self, is_promiscuous: bool) -> Self {
        Self {
            hearing: self.hearing.promiscuous(is_promiscuous),
            ..self
        }
    }

    /// Shares what the interface receives with all rings of this namespace that have the same number, in this or other
    /// engines: each flow goes to one of them.
    #[must_use]
    pub fn fanout(self, group: u16) -> Self {
        Self {
            fanout: Some(group),
            ..self
        }
    }

    /// Sends straight to the device: past its queueing discipline, programs at its egress, and what listens there.
    #[must_use]
    pub fn bypass_qdisc(self) -> Self {
        Self {
            bypasses_qdisc: true,
            ..self
        }
    }

    /// How many frames wait for the engine at most; 4096 unless told otherwise.
    #[must_use]
    pub fn slots(self, slots: usize) -> Self {
        Self { slots, ..self }
    }
}

impl Config for Ring {
    type App = RingApp;

    fn inputs(&self) -> PortList {
        PortList::named(["input"])
    }

    fn outputs(&self) -> PortList {
        PortList::named(["output"])
    }

    fn is_edge(&self) -> bool {
        true
    }

    fn check(&self, limits: PoolLimits) -> Result<(), BuildError> {
        self.hearing.check(limits)
    }

    fn build(&self) -> Result<RingApp, BuildError> {
        RingApp::open(self).map_err(Into::into)
    }
}

/// The running [`Ring`].
#[derive(Debug)]
pub struct RingApp {
    /// Receives; and sends what a slot is too short for.
    socket: PacketSocket,
    readiness: Readiness,
    slots: Slots,
    /// The slot that is filled next.
    next: usize,
    /// A super-packet.
    buffer: Vec<u8>,
    inbound: Inbound,
    sender: Sender,
    /// Times that the interface went down or away.
    went_down: Cell<u64>,
}

impl RingApp {
    fn open(config: &Ring) -> Result<Self, EdgeError> {
        let name = config.hearing.interface();
        let failed = |step| move |error| EdgeError::of_step(name, step, error);
        let socket = PacketSocket::open(name)?;
        let frame_bytes = socket.interface().frame_bytes();
        socket
            .set(libc::PACKET_COPY_THRESH, &1)
            .map_err(failed("ask for super-packets as a whole"))?;
        let slots = Slots::map(&socket, Direction::Receive, config.slots, frame_bytes)
            .map_err(failed("make a ring for receiving"))?;
        config.hearing.begin(&socket)?;
        if let Some(group) = config.fanout {
            let kind = libc::PACKET_FANOUT_HASH | libc::PACKET_FANOUT_FLAG_IGNORE_OUTGOING;
            socket
                .set(libc::PACKET_FANOUT, &(u32::from(group) | kind << 16))
                .map_err(failed("join the fanout group"))?;
        }
        Ok(Self {
            sender: Sender::open(name, frame_bytes, config.bypasses_qdisc)?,
            socket,
            readiness: Readiness::of_shared_memory(),
            slots,
            next: 0,
            buffer: vec![0; SUPER_PACKET_BYTES_MAX],
            inbound: Inbound::default(),
            went_down: Cell::new(0),
        })
    }

    /// Brings in one frame; false if there is none.
    #[inline]
    fn receive(&mut self, ports: &mut Ports<'_>) -> bool {
        let status = self.slots.status(self.next);
        if status & libc::TP_STATUS_USER == 0 {
            return false;
        }
        match self.slots.filled(self.next, status) {
            Some(filled) if !filled.is_truncated => {
                let header = &filled.header;
                self.inbound
                    .deliver(header, filled.frame, filled.vlan, ports, 0);
            }
            Some(filled) if filled.is_at_socket => self.receive_long(ports),
            Some(_) => self.inbound.refuse_too_long(),
            None => self.inbound.refuse_malformed(),
        }
        self.slots.set_status(self.next, libc::TP_STATUS_KERNEL);
        self.next += 1;
        if self.next == self.slots.count() {
            self.next = 0;
        }
        true
    }

    /// Brings in the frame that was too long for its slot. They wait at the socket in the order of their slots.
    fn receive_long(&mut self, ports: &mut Ports<'_>) {
        let mut received = self.socket.receive(&mut self.buffer);
        if is_down(&received) {
            // The socket says so before it hands over what it holds, and what stays there is taken for the next slot's.
            self.went_down.set(self.went_down.get() + 1);
            received = self.socket.receive(&mut self.buffer);
        }
        let Ok(Some(received)) = received else {
            self.inbound.refuse_too_long();
            return;
        };
        let delivered = &self.buffer[..received.length];
        match delivered.split_first_chunk::<{ VnetHeader::BYTES }>() {
            Some((header, frame)) if !received.is_truncated => {
                let header = VnetHeader::read(*header);
                self.inbound
                    .deliver(&header, frame, received.vlan, ports, 0);
            }
            Some(_) => self.inbound.refuse_too_long(),
            None => self.inbound.refuse_malformed(),
        }
    }

    /// Takes note of an interface that went down. The socket says so once, and has its frames again when the interface
    /// is up again.
    #[cold]
    fn note_errors(&self) {
        if let Ok(Err(_)) = sockopt::socket_error(self.socket.as_fd()) {
            self.went_down.set(self.went_down.get() + 1);
        }
    }
}

fn is_down<T>(received: &io::Result<T>) -> bool {
    let error = received.as_ref().err();
    error.is_some_and(|error| error.raw_os_error() == Some(libc::ENETDOWN))
}

impl App for RingApp {
    fn pull(&mut self, _now: Time, ports: &mut Ports<'_>) {
        if !self.readiness.is_ready() {
            return;
        }
        for received in 0..BATCH_PACKETS {
            if ports.space(0) < SEGMENTS_USUAL {
                return;
            }
            if !self.receive(ports) {
                if received == 0 && self.readiness.is_watched() {
                    self.note_errors();
                }
                self.readiness.drained();
                return;
            }
        }
    }

    fn push(&mut self, now: Time, ports: &mut Ports<'_>) {
        self.sender.push(now, &self.socket, ports);
    }

    fn wake(&self) -> Wake {
        if self.sender.is_waiting() {
            return Wake::polling();
        }
        self.readiness.wake()
    }

    fn watch(&self) -> Option<Watch<'_>> {
        Some(Watch {
            descriptor: self.socket.as_fd(),
            readiness: &self.readiness,
        })
    }

    fn report(&self) -> Vec<Figure> {
        self.note_errors();
        let mut figures = self.inbound.figures();
        figures.extend(self.sender.outbound().figures());
        figures.push(Figure::new("interface_went_down", self.went_down.get()));
        figures.push(Figure::new("kernel_drops", self.socket.kernel_drops()));
        figures
    }
}

/// About as many as arrive in 4 ms at a million a second: what a host that is short of time may be away.
const SLOTS: usize = 4096;

//! The simplest app for an interface: a raw socket, one system call for a packet.
//!
//! ```text
//!            +-----+
//!  input --->| Raw |---> output
//!            +-----+
//! ```
//!
//! What comes to `input` is sent; what arrives at the interface leaves by `output`, complete and of wire size.

use std::io;
use std::os::fd::AsFd;

use super::inbound::Inbound;
use super::interface::EdgeError;
use super::offload::VnetHeader;
use super::outbound::{Outbound, Verdict};
use super::packet_socket::{Hearing, PacketSocket, SUPER_PACKET_BYTES_MAX};
use crate::app::{App, BuildError, Config, Figure, PortList, Wake};
use crate::packet::Packet;
use crate::pool::PoolLimits;
use crate::ports::{BATCH_PACKETS, Ports};
use crate::time::Time;
use crate::watch::{Readiness, Watch};

/// A raw socket on an interface. It hears every frame, whatever its address, unless told otherwise.
///
/// Figures: see [`Inbound`] and [`Outbound`]; `interface_went_down`, which counts its deletion too; `kernel_drops`,
/// frames for which the kernel's buffer had no room.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Raw {
    hearing: Hearing,
}

impl Raw {
    /// On the interface of that name, in the network namespace of the thread that configures the engine.
    #[must_use]
    pub fn interface(name: &str) -> Self {
        Self {
            hearing: Hearing::all(name),
        }
    }

    /// Whether frames for other addresses are heard too.
    #[must_use]
    pub fn promiscuous(self, is_promiscuous: bool) -> Self {
        Self {
            hearing: self.hearing.promiscuous(is_promiscuous),
        }
    }
}

impl Config for Raw {
    type App = RawApp;

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

    fn build(&self) -> Result<RawApp, BuildError> {
        RawApp::open(self).map_err(Into::into)
    }
}

/// The running [`Raw`].
#[derive(Debug)]
pub struct RawApp {
    socket: PacketSocket,
    readiness: Readiness,
    /// One frame as it comes, which may be a super-packet.
    buffer: Vec<u8>,
    inbound: Inbound,
    outbound: Outbound,
    /// Times that the interface went down or away.
    went_down: u64,
    /// For which the kernel had no room.
    waiting: Option<Packet>,
}

impl RawApp {
    fn open(config: &Raw) -> Result<Self, EdgeError> {
        let socket = PacketSocket::open(config.hearing.interface())?;
        config.hearing.begin(&socket)?;
        Ok(Self {
            socket,
            readiness: Readiness::new(),
            buffer: vec![0; SUPER_PACKET_BYTES_MAX],
            inbound: Inbound::default(),
            outbound: Outbound::default(),
            went_down: 0,
            waiting: None,
        })
    }

    /// Brings in one frame; false if there is none. An error counts as something, since there may be a frame behind it.
    fn receive(&mut self, ports: &mut Ports<'_>) -> bool {
        let received = match self.socket.receive(&mut self.buffer) {
            Ok(Some(received)) => received,
            Ok(None) => return false,
            Err(error) => {
                // The socket says so once, and has its frames again when the interface is up again.
                let is_down = error.raw_os_error() == Some(libc::ENETDOWN);
                self.went_down += u64::from(is_down);
                return is_down || error.kind() == io::ErrorKind::Interrupted;
            }
        };
        let delivered = &self.buffer[..received.length];
        let Some((header, frame)) = delivered.split_first_chunk::<{ VnetHeader::BYTES }>() else {
            self.inbound.refuse_malformed();
            return true;
        };
        if received.is_truncated {
            self.inbound.refuse_too_long();
            return true;
        }
        let header = VnetHeader::read(*header);
        self.inbound
            .deliver(&header, frame, received.vlan, ports, 0);
        true
    }
}

impl App for RawApp {
    fn pull(&mut self, _now: Time, ports: &mut Ports<'_>) {
        if !self.readiness.is_ready() {
            return;
        }
        for _ in 0..BATCH_PACKETS {
            if ports.space(0) < SEGMENTS_USUAL {
                return;
            }
            if !self.receive(ports) {
                self.readiness.drained();
                return;
            }
        }
    }

    fn push(&mut self, _now: Time, ports: &mut Ports<'_>) {
        while let Some(packet) = self.waiting.take().or_else(|| ports.receive(0)) {
            let verdict = self.outbound.count(self.socket.send(packet.bytes()));
            if verdict != Verdict::Done {
                self.waiting = Some(packet);
            }
            if verdict == Verdict::Wait {
                return;
            }
        }
    }

    fn wake(&self) -> Wake {
        if self.waiting.is_some() {
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
        let mut figures = self.inbound.figures();
        figures.extend(self.outbound.figures());
        figures.push(Figure::new("interface_went_down", self.went_down));
        figures.push(Figure::new("kernel_drops", self.socket.kernel_drops()));
        figures
    }
}

/// Room that the output must have before a frame is read: for the segments of any super-packet, if they are of the usual
/// 1448 bytes.
pub(super) const SEGMENTS_USUAL: usize = 384;

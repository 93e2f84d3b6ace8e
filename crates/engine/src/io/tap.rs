//! A TAP: the engine is the far end of an interface's wire.
//!
//! What the kernel sends out of the interface leaves on `output`; what comes to `input` the kernel receives from the
//! interface. Unless they are asked for no offloads are set, so the kernel completes checksums and cuts large packets
//! before they are read.
//! One app is one queue of the TAP; a multi-queue TAP may have several.
//!
//! A TAP that is down loses what is sent to it, counted, and works again when it comes up. One that is gone ends this
//! app only, which then reports `gone`.

mod device;

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

pub use device::{Options, open};
use rustix::io::Errno;
use thiserror::Error;

use super::inbound::Inbound;
use super::offload::VnetHeader;
use super::outbound::{Outbound, Verdict};
use crate::app::{App, BuildError, Config, Figure, PortList, Wake};
use crate::packet::Packet;
use crate::ports::{BATCH_PACKETS, Ports};
use crate::time::Time;
use crate::watch::{Readiness, Watch};

/// One queue of a TAP, between `input` and `output`.
///
/// Reports what [`Inbound`] and [`Outbound`] count, and `gone`, which is 1 once the TAP is deleted.
#[derive(Debug, Clone)]
pub struct Tap {
    name: String,
    queue: Queue,
    large_packets: bool,
}

#[derive(Debug, Clone)]
enum Queue {
    Opened(Rc<OwnedFd>),
    Named { options: Options },
}

/// The running [`Tap`].
#[derive(Debug)]
pub struct TapApp {
    descriptor: Rc<OwnedFd>,
    readiness: Readiness,
    /// Bytes before each frame, for a descriptor that was opened with `IFF_VNET_HDR`.
    header_bytes: usize,
    /// What large packets are read into; empty if the kernel cuts them.
    buffer: Vec<u8>,
    /// What the next frame is read into, otherwise.
    spare: Option<Packet>,
    inbound: Inbound,
    outbound: Outbound,
    /// For which the kernel had no room.
    waiting: Option<Packet>,
    gone: bool,
}

/// A TAP that can't be used.
#[derive(Debug, Error)]
pub enum TapError {
    /// The kernel says no.
    #[error("{operation} tap {name}: {source}")]
    System {
        /// What was tried.
        operation: &'static str,
        /// The interface.
        name: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// No interface is called so.
    #[error("open tap {name}: an interface's name has 1 to 15 bytes")]
    Name {
        /// The name.
        name: String,
    },
    /// A descriptor of another kind.
    #[error("use tap {name}: {reason}; open it with {flags}")]
    Kind {
        /// The interface.
        name: String,
        /// What it is instead.
        reason: &'static str,
        /// What it should be.
        flags: &'static str,
    },
}

impl Tap {
    /// An open queue, opened with `IFF_NO_PI`. The name is only for reports and errors. Reads and writes of everybody who shares the open
    /// file no longer block, and offloads that were set on the TAP are turned off.
    ///
    /// The queue stays open for as long as a graph or an engine has it.
    #[must_use]
    pub fn from_descriptor(descriptor: OwnedFd, name: &str) -> Self {
        Self {
            name: name.to_owned(),
            queue: Queue::Opened(Rc::new(descriptor)),
            large_packets: false,
        }
    }

    /// A TAP in this thread's network namespace, opened when the engine is configured. If there is none by that name it is
    /// made, down, and goes with the app.
    #[must_use]
    pub fn interface(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            queue: Queue::Named {
                options: Options::default(),
            },
            large_packets: false,
        }
    }

    /// The same as one of several queues, for [`Tap::interface`]; the kernel spreads flows over those that are open.
    #[must_use]
    pub fn multi_queue(mut self) -> Self {
        if let Queue::Named { options } = &mut self.queue {
            options.multi_queue = true;
        }
        self
    }

    /// The same with offloads: the kernel hands over packets of up to 64 KiB and unfinished checksums, and the engine cuts
    /// and completes them. That is far fewer system calls for streams. An open queue must have been opened with
    /// `IFF_VNET_HDR`.
    #[must_use]
    pub fn large_packets(mut self) -> Self {
        if let Queue::Named { options } = &mut self.queue {
            options.vnet_header = true;
        }
        self.large_packets = true;
        self
    }

    /// The open queue.
    fn open(&self) -> Result<Rc<OwnedFd>, TapError> {
        match &self.queue {
            Queue::Opened(descriptor) => Ok(Rc::clone(descriptor)),
            Queue::Named { options } => open(&self.name, *options).map(Rc::new),
        }
    }
}

impl PartialEq for Tap {
    fn eq(&self, other: &Self) -> bool {
        let same_queue = match (&self.queue, &other.queue) {
            (Queue::Opened(one), Queue::Opened(two)) => Rc::ptr_eq(one, two),
            (Queue::Named { options: one }, Queue::Named { options: two }) => one == two,
            _ => false,
        };
        same_queue && self.name == other.name && self.large_packets == other.large_packets
    }
}

impl Config for Tap {
    type App = TapApp;

    fn inputs(&self) -> PortList {
        PortList::named(["input"])
    }

    fn outputs(&self) -> PortList {
        PortList::named(["output"])
    }

    fn is_edge(&self) -> bool {
        true
    }

    fn build(&self) -> Result<TapApp, BuildError> {
        let descriptor = self.open()?;
        let header_bytes = device::prepare(&descriptor, &self.name, self.large_packets)?;
        let buffer_bytes = if self.large_packets {
            LARGE_PACKET_BYTES_MAX
        } else {
            0
        };
        Ok(TapApp {
            descriptor,
            readiness: Readiness::new(),
            header_bytes,
            buffer: vec![0; buffer_bytes],
            spare: None,
            inbound: Inbound::default(),
            outbound: Outbound::default(),
            waiting: None,
            gone: false,
        })
    }
}

impl App for TapApp {
    fn pull(&mut self, _now: Time, ports: &mut Ports<'_>) {
        if self.gone || !self.readiness.is_ready() {
            return;
        }
        let room = if self.buffer.is_empty() {
            1
        } else {
            SEGMENTS_USUAL
        };
        for _ in 0..BATCH_PACKETS {
            if ports.space(0) < room {
                return;
            }
            let brought = if self.buffer.is_empty() {
                self.receive(ports)
            } else {
                self.receive_large(ports)
            };
            match brought {
                Brought::Some => {}
                Brought::Nothing => {
                    self.readiness.drained();
                    return;
                }
                Brought::NoPacket => return,
            }
        }
    }

    fn push(&mut self, _now: Time, ports: &mut Ports<'_>) {
        while let Some(packet) = self.waiting.take().or_else(|| ports.receive(0)) {
            let verdict = self.send(packet.bytes());
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
        if self.gone {
            return Wake::default();
        }
        self.readiness.wake()
    }

    fn watch(&self) -> Option<Watch<'_>> {
        (!self.gone).then(|| Watch {
            descriptor: self.descriptor.as_fd(),
            readiness: &self.readiness,
        })
    }

    fn report(&self) -> Vec<Figure> {
        let mut figures = self.inbound.figures();
        figures.extend(self.outbound.figures());
        figures.push(Figure::new("gone", u64::from(self.gone)));
        figures
    }
}

/// What a read brought.
enum Brought {
    /// A frame, which was sent on, or dropped and counted; there may be more.
    Some,
    /// Nothing, for now.
    Nothing,
    /// The pool had no packet to read into.
    NoPacket,
}

impl TapApp {
    /// Brings in a frame, straight into a packet.
    fn receive(&mut self, ports: &mut Ports<'_>) -> Brought {
        let Some(mut packet) = self.spare.take().or_else(|| ports.pool().take()) else {
            return Brought::NoPacket;
        };
        let mut header = [0; HEADER_BYTES_MAX];
        // The kernel cuts what doesn't fit, and says nothing; so there is a byte more than fits.
        let mut excess = [0; 1];
        let mut parts = [
            IoSliceMut::new(&mut header[..self.header_bytes]),
            IoSliceMut::new(packet.room_mut()),
            IoSliceMut::new(&mut excess),
        ];
        let read = rustix::io::readv(&self.descriptor, &mut parts);
        let length = match self.length_of(read) {
            Ok(length) => length,
            Err(brought) => {
                self.spare = Some(packet);
                return brought;
            }
        };
        let header = header_of(&header);
        if !packet.set_length(length) {
            self.inbound.refuse_too_long();
            self.spare = Some(packet);
        } else if header.is_super_packet() || header.needs_checksum() {
            self.inbound
                .deliver(&header, packet.bytes(), None, ports, 0);
            self.spare = Some(packet);
        } else {
            self.inbound.received += 1;
            self.inbound.packets += 1;
            ports.transmit(0, packet);
        }
        Brought::Some
    }

    /// Brings in what may be a large packet.
    fn receive_large(&mut self, ports: &mut Ports<'_>) -> Brought {
        let mut header = [0; HEADER_BYTES_MAX];
        let mut parts = [
            IoSliceMut::new(&mut header[..self.header_bytes]),
            IoSliceMut::new(&mut self.buffer),
        ];
        let read = rustix::io::readv(&self.descriptor, &mut parts);
        let length = match self.length_of(read) {
            Ok(length) => length,
            Err(brought) => return brought,
        };
        let frame = &self.buffer[..length.min(self.buffer.len())];
        self.inbound
            .deliver(&header_of(&header), frame, None, ports, 0);
        Brought::Some
    }

    /// Bytes of the frame that was read.
    fn length_of(&mut self, read: Result<usize, Errno>) -> Result<usize, Brought> {
        match read {
            Ok(0) => Err(Brought::Nothing),
            Ok(count) => Ok(count.saturating_sub(self.header_bytes)),
            Err(Errno::INTR) => Err(Brought::Some),
            Err(Errno::BADFD) => {
                self.gone = true;
                Err(Brought::Nothing)
            }
            Err(_) => Err(Brought::Nothing),
        }
    }

    fn send(&mut self, frame: &[u8]) -> Verdict {
        let header = [0; HEADER_BYTES_MAX];
        let parts = [
            IoSlice::new(&header[..self.header_bytes]),
            IoSlice::new(frame),
        ];
        let written = if self.gone {
            Err(Errno::BADFD)
        } else {
            rustix::io::writev(&self.descriptor, &parts)
        };
        self.outbound.count(written.map_err(|errno| match errno {
            // What a TAP says, in the words of sockets.
            Errno::IO => Errno::NETDOWN.into(),
            Errno::BADFD => {
                self.gone = true;
                Errno::NODEV.into()
            }
            errno => io::Error::from(errno),
        }))
    }
}

fn header_of(bytes: &[u8; HEADER_BYTES_MAX]) -> VnetHeader {
    bytes
        .first_chunk()
        .map_or_else(VnetHeader::default, |bytes| VnetHeader::read(*bytes))
}

/// Bytes of the longest virtio-net header that there is for a TAP: `virtio_net_hdr_v1_hash_tunnel`.
const HEADER_BYTES_MAX: usize = 24;

/// Bytes of the longest large packet: the kernel makes no longer ones for a TAP.
const LARGE_PACKET_BYTES_MAX: usize = 68 * 1024;

/// Room that the output must have before a large packet is read: for the segments of any usual one.
const SEGMENTS_USUAL: usize = 128;

//! A TAP: the engine is the far end of an interface's wire.
//!
//! What the kernel sends out of the interface leaves on `output`; what comes to `input` the kernel receives from the
//! interface. No offloads are set, so the kernel completes checksums and cuts large packets before they are read.
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

use crate::app::{App, BuildError, Config, Figure, PortList, Wake};
use crate::packet::Packet;
use crate::ports::{BATCH_PACKETS, Ports};
use crate::time::Time;
use crate::watch::{Readiness, Watch};

/// One queue of a TAP, between `input` and `output`.
///
/// Reports `received`, `received_bytes`, `sent`, `sent_bytes`, and drops by cause: `too_long` for frames that don't fit in the
/// engine's packets, `partial` for frames that somebody had the kernel leave unfinished, `down` while the interface is,
/// `full` for what the kernel had no room for, `refused` for what it takes no time; `gone` is 1 once the TAP is deleted.
#[derive(Debug, Clone)]
pub struct Tap {
    name: String,
    queue: Queue,
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
    /// What the next frame is read into.
    spare: Option<Packet>,
    gone: bool,
    counters: Counters,
}

#[derive(Debug, Default)]
struct Counters {
    received: u64,
    received_bytes: u64,
    sent: u64,
    sent_bytes: u64,
    too_long: u64,
    partial: u64,
    down: u64,
    full: u64,
    refused: u64,
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
    #[error("use tap {name}: {reason}; open it with IFF_TAP and IFF_NO_PI")]
    Kind {
        /// The interface.
        name: String,
        /// What it is instead.
        reason: &'static str,
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
        same_queue && self.name == other.name
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
        let header_bytes = device::prepare(&descriptor, &self.name)?;
        Ok(TapApp {
            descriptor,
            readiness: Readiness::new(),
            header_bytes,
            spare: None,
            gone: false,
            counters: Counters::default(),
        })
    }
}

impl App for TapApp {
    fn pull(&mut self, _now: Time, ports: &mut Ports<'_>) {
        if self.gone || !self.readiness.is_ready() {
            return;
        }
        for _ in 0..BATCH_PACKETS.min(ports.space(0)) {
            let Some(mut packet) = self.spare.take().or_else(|| ports.pool().take()) else {
                return;
            };
            match self.receive(&mut packet) {
                Received::Frame => {
                    self.counters.received += 1;
                    self.counters.received_bytes += packet.length() as u64;
                    ports.transmit(0, packet);
                }
                Received::Unusable => self.spare = Some(packet),
                Received::Nothing => {
                    self.spare = Some(packet);
                    self.readiness.drained();
                    return;
                }
            }
        }
    }

    fn push(&mut self, _now: Time, ports: &mut Ports<'_>) {
        while let Some(packet) = ports.receive(0) {
            self.send(packet.bytes());
        }
    }

    fn wake(&self) -> Wake {
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
        let counters = &self.counters;
        vec![
            Figure::new("received", counters.received),
            Figure::new("received_bytes", counters.received_bytes),
            Figure::new("sent", counters.sent),
            Figure::new("sent_bytes", counters.sent_bytes),
            Figure::new("too_long", counters.too_long),
            Figure::new("partial", counters.partial),
            Figure::new("down", counters.down),
            Figure::new("full", counters.full),
            Figure::new("refused", counters.refused),
            Figure::new("gone", u64::from(self.gone)),
        ]
    }
}

/// What a read brought.
enum Received {
    /// A frame, in the packet.
    Frame,
    /// One that was dropped and counted; there may be more.
    Unusable,
    /// Nothing, for now.
    Nothing,
}

impl TapApp {
    fn receive(&mut self, packet: &mut Packet) -> Received {
        let mut header = [0; HEADER_BYTES_MAX];
        // The kernel cuts what doesn't fit, and says nothing; so there is a byte more than fits.
        let mut excess = [0; 1];
        let mut parts = [
            IoSliceMut::new(&mut header[..self.header_bytes]),
            IoSliceMut::new(packet.room_mut()),
            IoSliceMut::new(&mut excess),
        ];
        let read = rustix::io::readv(&self.descriptor, &mut parts);
        let length = match read {
            Ok(0) => return Received::Nothing,
            Ok(count) => count.saturating_sub(self.header_bytes),
            Err(Errno::INTR) => return Received::Unusable,
            Err(Errno::BADFD) => {
                self.gone = true;
                return Received::Nothing;
            }
            Err(_) => return Received::Nothing,
        };
        if self.header_bytes > 0 && (header[0] & NEEDS_CHECKSUM != 0 || header[1] != NOT_SEGMENTED)
        {
            self.counters.partial += 1;
            return Received::Unusable;
        }
        if !packet.set_length(length) {
            self.counters.too_long += 1;
            return Received::Unusable;
        }
        Received::Frame
    }

    fn send(&mut self, frame: &[u8]) {
        if self.gone {
            self.counters.refused += 1;
            return;
        }
        let header = [0; HEADER_BYTES_MAX];
        let parts = [
            IoSlice::new(&header[..self.header_bytes]),
            IoSlice::new(frame),
        ];
        match rustix::io::writev(&self.descriptor, &parts) {
            Ok(_) => {
                self.counters.sent += 1;
                self.counters.sent_bytes += frame.len() as u64;
            }
            Err(Errno::IO) => self.counters.down += 1,
            Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM | Errno::INTR) => {
                self.counters.full += 1;
            }
            Err(Errno::BADFD) => {
                self.gone = true;
                self.counters.refused += 1;
            }
            Err(_) => self.counters.refused += 1,
        }
    }
}

/// Bytes of the longest virtio-net header that there is for a TAP: `virtio_net_hdr_v1_hash_tunnel`.
const HEADER_BYTES_MAX: usize = 24;

/// `VIRTIO_NET_HDR_F_NEEDS_CSUM` in a virtio-net header's first byte.
const NEEDS_CHECKSUM: u8 = 1;

/// `VIRTIO_NET_HDR_GSO_NONE` in its second.
const NOT_SEGMENTED: u8 = 0;

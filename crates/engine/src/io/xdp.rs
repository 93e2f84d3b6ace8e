//! An interface by AF_XDP: frames come and go by rings that are shared with the kernel, past its stack.
//!
//! A small BPF program on the interface hands every frame of a queue to the app, so the host's own stack no longer
//! sees what comes in there. One app serves one receive queue; apps of several queues are made from one description
//! ([`Xdp::queue`]) and share the program. Program and socket end with the app, or with the process.
//!
//! AF_XDP sees bytes alone: not that a checksum is yet to be completed, that a packet is to be cut, or that a VLAN tag
//! is beside it. So nobody may send such packets here. The other end of a veth is kept from it as long as the app
//! runs (`sender.rs`); where that can't be done, or isn't known, the app does not start.
//!
//! Frames are copied between the socket's memory and the engine's pool, once in each direction.

mod app;
mod error;
mod features;
mod interface;
mod namespace;
mod program;
mod ring;
mod sender;
mod socket;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::app::{BuildError, Config, PortList};
use crate::pool::PoolLimits;

pub use app::{XdpApp, XdpBinding};
pub use error::XdpError;
pub use program::XdpMode;

use interface::Interface;
use program::Program;
use sender::{Doubt, Here, Silenced};
use socket::{RECEIVE_HEADROOM, Sizes, Socket};

/// A queue of an interface, by AF_XDP. What comes in leaves at `output`; what comes to `input` is sent.
///
/// Where the interface takes no more, packets wait at the input. Reports are described at [`XdpApp`].
#[derive(Debug, Clone)]
pub struct Xdp {
    interface: String,
    queue: u32,
    mode: Option<XdpMode>,
    ring_packets: u32,
    buffer_bytes: u32,
    may_zero_copy: bool,
    trusts_sender: bool,
    leaves_queues: bool,
    shared: Arc<Mutex<Shared>>,
}

/// What descriptions made from one another know together.
#[derive(Debug, Default)]
struct Shared {
    /// Queues that there are descriptions of.
    described: BTreeSet<u32>,
    /// What the running apps share.
    attachment: Weak<Attachment>,
}

/// The program on an interface. Dropped in this order: whoever sends may go back to its ways once nobody looks at the
/// bytes alone.
#[derive(Debug)]
struct Attachment {
    program: Program,
    silenced: Option<Silenced>,
    interface: Interface,
    mode: XdpMode,
    queues: u32,
}

impl Xdp {
    /// Bytes that a frame is longer than the MTU: Ethernet and two VLAN tags.
    pub const HEADER_BYTES: u32 = 14 + 8;

    /// The largest MTU that buffers of that many bytes are good for.
    #[must_use]
    pub const fn mtu_max(buffer_bytes: u32) -> u32 {
        buffer_bytes.saturating_sub(RECEIVE_HEADROOM + Self::HEADER_BYTES)
    }

    /// Queue 0 of an interface in the network namespace of the thread that will configure the engine: in the driver if
    /// it can, without copies if it can, with rings of 2048 packets and buffers of 2048 bytes, which are good for an
    /// MTU of up to 1770.
    #[must_use]
    pub fn interface(name: impl Into<String>) -> Self {
        Self {
            interface: name.into(),
            queue: 0,
            mode: None,
            ring_packets: 2048,
            buffer_bytes: 2048,
            may_zero_copy: true,
            trusts_sender: false,
            leaves_queues: false,
            shared: Arc::default(),
        }
    }

    /// The same for another queue, from 0. Apps for several queues of an interface must come from one description.
    #[must_use]
    pub fn queue(&self, queue: u32) -> Self {
        let mut shared = lock(&self.shared);
        shared.described.insert(queue);
        drop(shared);
        Self {
            queue,
            ..self.clone()
        }
    }

    /// The same in this mode alone, where the default is native and, if the driver has none, generic.
    #[must_use]
    pub fn mode(self, mode: XdpMode) -> Self {
        Self {
            mode: Some(mode),
            ..self
        }
    }

    /// The same with rings of that many packets, a power of two from 64 to 16,384.
    #[must_use]
    pub fn ring_packets(self, ring_packets: u32) -> Self {
        Self {
            ring_packets,
            ..self
        }
    }

    /// The same with buffers of that many bytes, 2048 or 4096; a received frame may have 256 less. Frames longer than
    /// the engine's packets are dropped and counted: see [`PoolLimits`].
    #[must_use]
    pub fn buffer_bytes(self, buffer_bytes: u32) -> Self {
        Self {
            buffer_bytes,
            ..self
        }
    }

    /// The same with copies by the kernel, even where the driver could do without.
    #[must_use]
    pub fn copy_mode(self) -> Self {
        Self {
            may_zero_copy: false,
            ..self
        }
    }

    /// The same, taking the user's word that only complete packets of wire size are sent on this interface. Nothing
    /// is turned off then.
    #[must_use]
    pub fn trust_sender(self) -> Self {
        Self {
            trusts_sender: true,
            ..self
        }
    }

    /// The same, leaving packets of queues that have no app to the host's stack.
    #[must_use]
    pub fn leave_other_queues(self) -> Self {
        Self {
            leaves_queues: true,
            ..self
        }
    }

    fn start(&self) -> Result<XdpApp, XdpError> {
        self.check_sizes()?;
        let mut shared = lock(&self.shared);
        shared.described.insert(self.queue);
        let attachment = match shared.attachment.upgrade() {
            Some(attachment) => {
                self.check_queues(&shared, attachment.queues)?;
                attachment
            }
            None => Arc::new(self.attach(&shared)?),
        };
        let sizes = Sizes {
            ring: self.ring_packets,
            buffer_bytes: self.buffer_bytes,
        };
        let may_zero_copy = self.may_zero_copy && attachment.mode == XdpMode::Native;
        let index = attachment.interface.index;
        let socket = Socket::bind(index, self.queue, sizes, may_zero_copy)
            .map_err(|failure| self.failed(failure))?;
        let served = attachment.program.serve(self.queue, socket.descriptor());
        served.map_err(|error| self.failed(("hand the queue's frames to the socket", error)))?;
        shared.attachment = Arc::downgrade(&attachment);
        drop(shared);
        Ok(XdpApp::new(socket, attachment, Arc::clone(&self.shared)))
    }

    fn check_sizes(&self) -> Result<(), XdpError> {
        let refuse = |what, asked, allowed| {
            Err(XdpError::Size {
                interface: self.interface.clone(),
                what,
                asked,
                allowed,
            })
        };
        if !self.ring_packets.is_power_of_two() || !(64..=16_384).contains(&self.ring_packets) {
            let allowed = "a power of two from 64 to 16384";
            return refuse("rings", self.ring_packets, allowed);
        }
        if !matches!(self.buffer_bytes, 2048 | 4096) {
            return refuse("buffers", self.buffer_bytes, "2048 or 4096 bytes");
        }
        Ok(())
    }

    fn check_queues(&self, shared: &Shared, queues: u32) -> Result<(), XdpError> {
        if self.queue >= queues {
            return Err(XdpError::NoQueue {
                interface: self.interface.clone(),
                queue: self.queue,
                queues,
            });
        }
        let served = served(shared, queues);
        if served < queues && !self.leaves_queues {
            return Err(XdpError::Queues {
                interface: self.interface.clone(),
                queues,
                served,
            });
        }
        Ok(())
    }

    /// Puts the program on the interface, in the driver or, if that has no place for it and nobody insists, after it.
    fn attach(&self, shared: &Shared) -> Result<Attachment, XdpError> {
        let (here, interface) = self.find()?;
        self.check_interface(&interface)?;
        let queues = interface::queues(&interface).map_err(|source| self.kernel(source))?;
        self.check_queues(shared, queues)?;
        let native = match self.mode {
            Some(mode) => return self.attach_as(mode, here, interface, queues),
            None => self.attach_as(XdpMode::Native, here, interface, queues),
        };
        match native {
            Err(XdpError::System { source, .. })
                if source.raw_os_error() == Some(libc::EOPNOTSUPP) =>
            {
                let (here, interface) = self.find()?;
                self.attach_as(XdpMode::Generic, here, interface, queues)
            }
            other => other,
        }
    }

    /// Puts the program on the interface after its sender has been seen to.
    fn attach_as(
        &self,
        mode: XdpMode,
        here: Here,
        interface: Interface,
        queues: u32,
    ) -> Result<Attachment, XdpError> {
        let silenced = self.silence(here, &interface, mode)?;
        let program = Program::attach(interface.index, queues, mode);
        let program = program.map_err(|failure| match failure.1.raw_os_error() {
            Some(libc::EBUSY | libc::EEXIST) => XdpError::Occupied {
                interface: self.interface.clone(),
            },
            _ => self.failed(failure),
        })?;
        Ok(Attachment {
            program,
            silenced,
            interface,
            mode,
            queues,
        })
    }

    fn find(&self) -> Result<(Here, Interface), XdpError> {
        let mut here = Here::new().map_err(|source| self.kernel(source))?;
        let found = interface::find(&mut here.route, &self.interface);
        let interface = found.map_err(|source| self.kernel(source))?;
        Ok((here, interface))
    }

    fn check_interface(&self, interface: &Interface) -> Result<(), XdpError> {
        if !interface.is_up {
            return Err(XdpError::Down {
                interface: self.interface.clone(),
            });
        }
        if !interface.is_ethernet {
            return Err(XdpError::NotEthernet {
                interface: self.interface.clone(),
            });
        }
        self.check_mtu(interface)
    }

    fn check_mtu(&self, interface: &Interface) -> Result<(), XdpError> {
        let mtu_max = Self::mtu_max(self.buffer_bytes);
        if interface.mtu > mtu_max {
            return Err(XdpError::Mtu {
                interface: self.interface.clone(),
                mtu: interface.mtu,
                buffer_bytes: self.buffer_bytes,
                mtu_max,
            });
        }
        Ok(())
    }

    fn silence(
        &self,
        here: Here,
        interface: &Interface,
        mode: XdpMode,
    ) -> Result<Option<Silenced>, XdpError> {
        let is_generic = mode == XdpMode::Generic;
        let silenced = if self.trusts_sender {
            sender::trust(here, interface, is_generic).map(|()| None)
        } else {
            sender::silence(here, interface, is_generic)
        };
        silenced.map_err(|doubt| match doubt {
            Doubt::Kernel(source) => self.kernel(source),
            Doubt::Reason(reason) => XdpError::Sender {
                interface: self.interface.clone(),
                reason,
            },
        })
    }

    fn kernel(&self, source: sandwire_kernel_net::Error) -> XdpError {
        XdpError::Kernel {
            interface: self.interface.clone(),
            source,
        }
    }

    fn failed(&self, (operation, source): (&'static str, std::io::Error)) -> XdpError {
        if source.raw_os_error() == Some(libc::EBUSY) || source.raw_os_error() == Some(libc::EEXIST)
        {
            return XdpError::QueueTaken {
                interface: self.interface.clone(),
                queue: self.queue,
            };
        }
        XdpError::System {
            interface: self.interface.clone(),
            operation,
            source,
        }
    }
}

impl PartialEq for Xdp {
    /// Whether both say the same, whatever they share with other descriptions.
    fn eq(&self, other: &Self) -> bool {
        let this = (&self.interface, self.queue, self.mode);
        let sizes = (self.ring_packets, self.buffer_bytes);
        let choices = (self.may_zero_copy, self.trusts_sender, self.leaves_queues);
        this == (&other.interface, other.queue, other.mode)
            && sizes == (other.ring_packets, other.buffer_bytes)
            && choices
                == (
                    other.may_zero_copy,
                    other.trusts_sender,
                    other.leaves_queues,
                )
    }
}

impl Config for Xdp {
    type App = XdpApp;

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
        let mtu_max = u32::from(limits.frame_bytes_max).saturating_sub(Self::HEADER_BYTES);
        let (_, interface) = self.find()?;
        // What longer packets wouldn't mend.
        self.check_mtu(&interface)?;
        if interface.mtu > mtu_max {
            return Err(Box::new(XdpError::Packets {
                interface: self.interface.clone(),
                mtu: interface.mtu,
                frame_bytes_max: limits.frame_bytes_max,
                mtu_max,
            }));
        }
        Ok(())
    }

    fn build(&self) -> Result<XdpApp, BuildError> {
        Ok(self.start()?)
    }
}

/// For how many of an interface's queues there are descriptions.
fn served(shared: &Shared, queues: u32) -> u32 {
    u32::try_from(shared.described.range(..queues).count()).unwrap_or(queues)
}

/// Nothing that can panic happens under the lock, so what it guards is always whole.
fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

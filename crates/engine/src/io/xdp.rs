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
use std::time::Duration;

use super::outbound::Outbound;
use crate::app::{App, BuildError, Config, Figure, PortList, Wake};
use crate::pool::PoolLimits;
use crate::ports::{BATCH_PACKETS, Ports};
use crate::time::Time;
use crate::watch::{Readiness, Watch};

pub use error::XdpError;
pub use program::XdpMode;

use interface::Interface;
use program::Program;
use sender::{Doubt, Here, Silenced};
use socket::{RECEIVE_HEADROOM, Sent, Sizes, Socket};

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

/// The running [`Xdp`].
///
/// Figures: `received`; `receive_drop_too_long` for the engine's packets; `kernel_drops`, what the kernel dropped
/// before it came to us (no buffer was free, which `kernel_fill_ring_empty` counts too, or no place on the ring,
/// `kernel_ring_full`: nobody read in time; or a frame was longer than a buffer); `invalid_descriptors`, which one side
/// did not understand; those of [`Outbound`]. `is_native`, `is_zero_copy`, `is_down`, `is_gone` are 0 or 1,
/// `offloads_off` is the number of the sender's offloads that are turned off, `queues_left` that of the interface's
/// queues that no description serves.
#[derive(Debug)]
pub struct XdpApp {
    socket: Socket,
    attachment: Arc<Attachment>,
    shared: Arc<Mutex<Shared>>,
    readiness: Readiness,
    /// What the last attempt to send came to.
    state: Sent,
    /// When to look again at what waits to be sent.
    retry: Option<Time>,
    received: u64,
    too_long: u64,
    outbound: Outbound,
}

/// How an app came to its packets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct XdpBinding {
    /// Where the program runs.
    pub mode: XdpMode,
    /// Whether the driver writes into our memory itself. Where not, the kernel copies once more.
    pub zero_copy: bool,
    /// Whether the kernel says when it must be woken.
    pub need_wakeup: bool,
    /// The sender's offloads that are off as long as the app runs, by the names that `ethtool -k` has for them.
    pub offloads_off: Vec<String>,
    /// Receive queues of the interface.
    pub queues: u32,
}

impl Xdp {
    /// Queue 0 of an interface in the network namespace of the thread that will configure the engine: in the driver if
    /// it can, without copies if it can, with rings of 1024 packets and buffers of 2048 bytes, which are good for an
    /// MTU of up to 1770.
    #[must_use]
    pub fn interface(name: impl Into<String>) -> Self {
        Self {
            interface: name.into(),
            queue: 0,
            mode: None,
            ring_packets: 1024,
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
    /// the engine's packets are dropped and counted: see [`PoolLimits`](crate::PoolLimits).
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
            Some(attachment) => attachment,
            None => Arc::new(self.attach()?),
        };
        self.check_queues(&shared, attachment.queues)?;
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
        Ok(XdpApp {
            socket,
            attachment,
            shared: Arc::clone(&self.shared),
            readiness: Readiness::new(),
            state: Sent::All,
            retry: None,
            received: 0,
            too_long: 0,
            outbound: Outbound::default(),
        })
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

    /// Puts the program on the interface, after its sender has been seen to.
    fn attach(&self) -> Result<Attachment, XdpError> {
        let (here, interface) = self.find()?;
        self.check_interface(&interface)?;
        let queues = interface::queues(&interface).map_err(|source| self.kernel(source))?;
        let modes = match self.mode {
            Some(mode) => &[mode][..],
            None => &[XdpMode::Native, XdpMode::Generic],
        };
        let mut modes = modes.iter().copied().peekable();
        let first = *modes.peek().unwrap_or(&XdpMode::Native);
        let mut silenced = self.silence(here, &interface, first)?;
        loop {
            let Some(mode) = modes.next() else {
                return Err(self.failed((
                    "attach the XDP program",
                    std::io::Error::from_raw_os_error(libc::EOPNOTSUPP),
                )));
            };
            if mode != first && silenced.is_none() {
                let here = Here::new().map_err(|source| self.kernel(source))?;
                silenced = self.silence(here, &interface, mode)?;
            }
            match Program::attach(interface.index, queues, mode) {
                Ok(program) => {
                    return Ok(Attachment {
                        program,
                        silenced,
                        interface,
                        mode,
                        queues,
                    });
                }
                Err((_, error))
                    if modes.peek().is_some()
                        && matches!(
                            error.raw_os_error(),
                            Some(libc::EOPNOTSUPP | libc::EINVAL | libc::ENOSYS)
                        ) => {}
                Err((_, error))
                    if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EEXIST)) =>
                {
                    return Err(XdpError::Occupied {
                        interface: self.interface.clone(),
                    });
                }
                Err(failure) => return Err(self.failed(failure)),
            }
        }
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
        let mtu_max = self.buffer_bytes - RECEIVE_HEADROOM - HEADERS;
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
        if self.trusts_sender {
            return Ok(None);
        }
        let silenced = sender::silence(here, interface, mode == XdpMode::Generic);
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
        let mtu_max = u32::from(limits.frame_bytes_max).saturating_sub(HEADERS);
        let (_, interface) = self.find()?;
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

impl XdpApp {
    /// How it came to its packets.
    #[must_use]
    pub fn binding(&self) -> XdpBinding {
        let bound = self.socket.bound();
        let silenced = self.attachment.silenced.as_ref();
        XdpBinding {
            mode: self.attachment.mode,
            zero_copy: bound.zero_copy,
            need_wakeup: bound.need_wakeup,
            offloads_off: silenced.map_or_else(Vec::new, |silenced| silenced.names().to_vec()),
            queues: self.attachment.queues,
        }
    }

    /// Brings in up to `count` of the frames that wait, of which some may be longer than packets.
    fn pull_some(&mut self, count: usize, ports: &mut Ports<'_>) -> usize {
        let mut received = 0;
        for _ in 0..count {
            let Some(mut packet) = ports.pool().take() else {
                break;
            };
            let mut fits = false;
            self.socket.read(|frame| fits = packet.set_bytes(frame));
            if fits {
                ports.transmit(0, packet);
                received += 1;
            } else {
                self.too_long += 1;
            }
        }
        received
    }

    /// Sends what has been written.
    fn flush(&mut self) {
        self.state = self.socket.flush();
        self.outbound.waits += u64::from(self.state == Sent::Later);
    }

    /// Drops what can't be sent while the interface is down or gone; false if it is neither any more.
    fn drop_all(&mut self, ports: &mut Ports<'_>) -> bool {
        let counter = match self.state {
            Sent::All | Sent::Later => return false,
            Sent::Down => &mut self.outbound.down,
            Sent::Gone => &mut self.outbound.gone,
        };
        *counter += ports.discard(0).0;
        true
    }

    /// Puts packets on the send ring as long as it has room.
    fn write(&mut self, ports: &mut Ports<'_>) {
        let room = self.socket.reclaim();
        for _ in 0..ports.queued(0).min(room) {
            let Some(packet) = ports.receive(0) else {
                return;
            };
            if self.socket.write(packet.bytes()) {
                self.outbound.sent += 1;
            } else if packet.length() < HEADERS as usize {
                self.outbound.refused += 1;
            } else {
                self.outbound.too_long += 1;
            }
        }
    }
}

impl App for XdpApp {
    fn pull(&mut self, _now: Time, ports: &mut Ports<'_>) {
        // A look costs no system call, so it is worth while even if nobody said that there is something.
        let waiting = self.socket.received();
        if waiting == 0 {
            self.readiness.drained();
            return;
        }
        let count = waiting.min(BATCH_PACKETS).min(ports.space(0));
        if count == 0 {
            return;
        }
        let longest = usize::from(ports.pool().limits().frame_bytes_max);
        let received = if longest >= self.socket.received_bytes_max() {
            let socket = &mut self.socket;
            ports.fill(0, count, |packet| {
                socket.read(|frame| _ = packet.set_bytes(frame));
            })
        } else {
            self.pull_some(count, ports)
        };
        self.received += received as u64;
        self.socket.finish_reading();
    }

    fn push(&mut self, now: Time, ports: &mut Ports<'_>) {
        if ports.queued(0) == 0 && self.socket.unsent() == 0 {
            self.retry = None;
            return;
        }
        if matches!(self.state, Sent::Down | Sent::Gone) {
            // If it goes again, what is on the ring goes first.
            self.flush();
        }
        if !self.drop_all(ports) {
            self.write(ports);
            self.flush();
        }
        let pause = match self.state {
            Sent::Gone => None,
            Sent::Down => Some(PAUSE_DOWN),
            Sent::All | Sent::Later => Some(PAUSE_FULL),
        };
        let waits = ports.queued(0) > 0 || self.socket.unsent() > 0;
        self.retry = pause.filter(|_| waits).map(|pause| now + pause);
    }

    fn wake(&self) -> Wake {
        let wake = self.readiness.wake();
        self.retry.map_or(wake, |retry| wake.or(Wake::at(retry)))
    }

    fn watch(&self) -> Option<Watch<'_>> {
        Some(Watch {
            descriptor: self.socket.descriptor(),
            readiness: &self.readiness,
        })
    }

    fn report(&self) -> Vec<Figure> {
        let kernel = self.socket.statistics();
        let attachment = &self.attachment;
        let silenced = attachment.silenced.as_ref();
        let offloads = silenced.map_or(0, |silenced| silenced.names().len());
        let left = attachment.queues - served(&lock(&self.shared), attachment.queues);
        let is = |fact| u64::from(fact);
        let interface = self.socket.state();
        let invalid = kernel.rx_invalid_descs + kernel.tx_invalid_descs + self.socket.invalid;
        let mut outbound = self.outbound;
        outbound.refused += self.socket.refused;
        outbound.sent -= self.socket.refused;
        let mut figures = vec![
            Figure::new("received", self.received),
            Figure::new("receive_drop_too_long", self.too_long),
            Figure::new("kernel_drops", kernel.rx_dropped + kernel.rx_ring_full),
            Figure::new("kernel_ring_full", kernel.rx_ring_full),
            Figure::new("kernel_fill_ring_empty", kernel.rx_fill_ring_empty_descs),
            Figure::new("invalid_descriptors", invalid),
            Figure::new("is_native", is(attachment.mode == XdpMode::Native)),
            Figure::new("is_zero_copy", is(self.socket.bound().zero_copy)),
            Figure::new("is_down", is(interface == Sent::Down)),
            Figure::new("is_gone", is(interface == Sent::Gone)),
            Figure::new("offloads_off", offloads as u64),
            Figure::new("queues_left", u64::from(left)),
        ];
        figures.extend(outbound.figures());
        figures
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

/// Until what waits to be sent is offered again: to an interface that is busy, or down.
const PAUSE_FULL: Duration = Duration::from_micros(20);
const PAUSE_DOWN: Duration = Duration::from_millis(10);
/// Bytes that a frame is longer than the MTU: Ethernet and two VLAN tags.
const HEADERS: u32 = 14 + 8;

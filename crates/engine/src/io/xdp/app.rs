//! The running app: rings and the engine's links.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::program::XdpMode;
use super::socket::{Sent, Socket};
use super::{Attachment, Shared, Xdp, lock, served};
use crate::app::{App, Figure, Wake};
use crate::io::outbound::Outbound;
use crate::ports::{BATCH_PACKETS, Ports};
use crate::time::Time;
use crate::watch::{Readiness, Watch};

/// The running [`Xdp`](super::Xdp).
///
/// Figures: `received`; `receive_drop_too_long` for the engine's packets; `kernel_drops`, what the kernel dropped
/// before it came to us (no buffer was free, which `kernel_fill_ring_empty` counts too, or no place on the ring,
/// `kernel_ring_full`: nobody read in time; or a frame was longer than a buffer); `invalid_descriptors`, which one side
/// did not understand; those of [`Outbound`], and `send_queued`, which wait for the interface. `is_native`,
/// `is_zero_copy`, `is_down`, `is_gone` are 0 or 1, `offloads_off` is the number of the sender's offloads that are
/// turned off, `queues_left` that of the interface's queues that no description serves.
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

impl XdpApp {
    /// An app of a bound socket.
    pub(super) fn new(
        socket: Socket,
        attachment: Arc<Attachment>,
        shared: Arc<Mutex<Shared>>,
    ) -> Self {
        // Drivers that write into our memory themselves may wait for the wake-up that comes with being watched.
        let readiness = if socket.bound().zero_copy {
            Readiness::new()
        } else {
            Readiness::of_shared_memory()
        };
        Self {
            socket,
            attachment,
            shared,
            readiness,
            state: Sent::All,
            retry: None,
            received: 0,
            too_long: 0,
            outbound: Outbound::default(),
        }
    }

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
            } else if packet.length() < Xdp::HEADER_BYTES as usize {
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
        // What was put on the ring is sent unless it is still there, or was refused since.
        let mut outbound = self.outbound;
        outbound.refused += self.socket.refused;
        let unsent = self.socket.unsent() as u64;
        outbound.sent = outbound.sent.saturating_sub(self.socket.refused + unsent);
        let is_gone = interface == Sent::Gone;
        outbound.gone += if is_gone { unsent } else { 0 };
        let mut figures = vec![
            Figure::new("received", self.received),
            Figure::new("receive_drop_too_long", self.too_long),
            Figure::new("kernel_drops", kernel.rx_dropped + kernel.rx_ring_full),
            Figure::new("kernel_ring_full", kernel.rx_ring_full),
            Figure::new("kernel_fill_ring_empty", kernel.rx_fill_ring_empty_descs),
            Figure::new("invalid_descriptors", invalid),
            Figure::new("send_queued", if is_gone { 0 } else { unsent }),
            Figure::new("is_native", is(attachment.mode == XdpMode::Native)),
            Figure::new("is_zero_copy", is(self.socket.bound().zero_copy)),
            Figure::new("is_down", is(interface == Sent::Down)),
            Figure::new("is_gone", is(is_gone)),
            Figure::new("offloads_off", offloads as u64),
            Figure::new("queues_left", u64::from(left)),
        ];
        figures.extend(outbound.figures());
        figures
    }
}

/// Until what waits to be sent is offered again: to an interface that is busy, or down.
const PAUSE_FULL: Duration = Duration::from_micros(20);
const PAUSE_DOWN: Duration = Duration::from_millis(10);

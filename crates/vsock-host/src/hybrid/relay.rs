//! Two sockets joined: what one side writes, the other reads.
//!
//! Bytes go by `splice` through a pipe, a third of the work of copying them, unless a capture wants to see
//! them. In one direction at most [`PIPE_BYTES`] (or the connection's limit) are on their way, and the next
//! ones are taken only when those are gone: the sockets' own buffers hold back the sender. A socket that
//! is full may hold more, once: its reader is woken less often, and finds more.
//!
//! An end on one side becomes a shutdown of writing on the other, once all before it is delivered, and the
//! other direction goes on. A side that takes no more ends its direction alone too: what it had sent before
//! still arrives. A side that was reset has ended one and takes no more of the other.

use std::os::fd::OwnedFd;

use rustix::{
    io::{Errno, ioctl_fionread},
    net::{AddressFamily, RecvFlags, SendFlags, Shutdown, recv, send, shutdown, sockopt},
};

use super::pipe::{PIPE_BYTES, Pipe, PipePool};
use crate::{readiness::Ready, tcp};

/// Bytes of one direction in one turn; then it is another's.
const TURN_BYTES: usize = 1024 * 1024;
/// Bytes that are copied at once where they have to be.
pub const COPY_BYTES: usize = 64 * 1024;
/// Kernel memory that a full Unix socket may take, where the usual is 208 KiB; and what one of TCP may hold unsent, where that
/// is [`tcp::UNSENT_BYTES`].
pub const WIDE_BYTES: usize = 512 * 1024;

/// One of the two directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the guest.
    Egress,
    /// To the guest.
    Ingress,
}

/// What a relay needs while it moves bytes, and tells meanwhile.
pub trait Carrier {
    /// Empty pipes.
    fn pipes(&mut self) -> &mut PipePool;
    /// Room for bytes that have to be copied; none if they needn't be.
    fn copy_room(&mut self) -> Option<&mut [u8]>;
    /// Copied bytes, before they are delivered.
    fn see(&mut self, direction: Direction, bytes: &[u8]);
    /// Room for up to that many bytes, which count as buffered from then on; 0 if there is none.
    fn reserve(&mut self, most: usize) -> usize;
    /// Bytes that aren't buffered any more.
    fn freed(&mut self, bytes: usize);
    /// Bytes that have been delivered.
    fn moved(&mut self, direction: Direction, bytes: usize);
    /// That direction has ended.
    fn ended(&mut self, direction: Direction);
    /// Whether each of the two sockets may take up to [`WIDE_BYTES`].
    fn may_widen(&self) -> bool;
}

/// What a turn came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Both wait for their sockets.
    Idle,
    /// There is more to do at once; it is another's turn.
    More,
    /// Something waits for memory or descriptors that others have.
    Starved,
    /// Both directions have ended.
    Over,
}

/// Two sockets joined.
#[derive(Debug)]
pub struct Relay {
    guest: Side,
    peer: Side,
    egress: Flow,
    ingress: Flow,
}

#[derive(Debug)]
struct Side {
    socket: OwnedFd,
    /// Whether reading or writing hasn't met `EAGAIN` since the last event.
    readable: bool,
    writable: bool,
    /// Whether it has closed altogether: bytes for it have nowhere to go.
    gone: bool,
    /// Whether its buffer has been made larger, or can't be.
    wide: bool,
}

#[derive(Debug, Default)]
struct Flow {
    pipe: Option<Pipe>,
    /// Bytes in the pipe.
    in_pipe: usize,
    /// Copied bytes that weren't taken, from `delivered` on.
    copied: Vec<u8>,
    delivered: usize,
    /// Nothing more comes.
    end: bool,
    over: bool,
    bytes: u64,
    /// What was taken first in the last turn.
    first: usize,
}

impl Relay {
    /// Joins two connected non-blocking sockets.
    #[must_use]
    pub fn new(guest: OwnedFd, peer: OwnedFd) -> Self {
        let side = |socket| Side {
            socket,
            readable: true,
            writable: true,
            gone: false,
            wide: false,
        };
        Self {
            guest: side(guest),
            peer: side(peer),
            egress: Flow::default(),
            ingress: Flow::default(),
        }
    }

    /// The two sockets: the guest's and the other.
    #[must_use]
    pub fn sockets(&self) -> [&OwnedFd; 2] {
        [&self.guest.socket, &self.peer.socket]
    }

    /// Bytes that have been delivered from the guest and to it.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        (self.egress.bytes, self.ingress.bytes)
    }

    /// Whether that direction has ended.
    #[must_use]
    pub fn is_over(&self, direction: Direction) -> bool {
        match direction {
            Direction::Egress => self.egress.over,
            Direction::Ingress => self.ingress.over,
        }
    }

    /// Bytes on their way.
    #[must_use]
    pub fn buffered(&self) -> usize {
        self.egress.buffered() + self.ingress.buffered()
    }

    /// Those of them that come from the guest.
    #[must_use]
    pub fn queued_egress(&self) -> usize {
        self.egress.buffered()
    }

    /// Bytes that wait for the guest, those in the other's socket with them; none if the kernel doesn't tell of these.
    #[must_use]
    pub fn queued_ingress(&self) -> Option<u64> {
        let unread = ioctl_fionread(&self.peer.socket).ok()?;
        Some(unread + self.ingress.buffered() as u64)
    }

    /// Whether bytes wait for each socket to take more.
    #[must_use]
    pub fn waits_for_room(&self) -> [bool; 2] {
        let waits = |flow: &Flow, to: &Side| flow.buffered() > 0 && !to.writable;
        [
            waits(&self.ingress, &self.guest),
            waits(&self.egress, &self.peer),
        ]
    }

    /// Whether a socket may have something to read.
    #[must_use]
    pub fn may_read(&self, socket: usize) -> bool {
        [&self.guest, &self.peer][socket].readable
    }

    /// Bytes that waited in each socket at the last turn, as far as they fit into a pipe.
    #[must_use]
    pub fn waited(&self) -> [usize; 2] {
        [self.egress.first, self.ingress.first]
    }

    /// Notes that a socket (0 the guest's, 1 the other) has become ready.
    pub fn ready(&mut self, socket: usize, ready: Ready) {
        let side = if socket == 0 {
            &mut self.guest
        } else {
            &mut self.peer
        };
        side.readable |= ready.read;
        side.writable |= ready.write;
        side.gone |= ready.hangup;
    }

    /// Moves what can be moved, up to a bound.
    pub fn turn(&mut self, carrier: &mut impl Carrier) -> Turn {
        let egress = self
            .egress
            .turn(Direction::Egress, &mut self.guest, &mut self.peer, carrier);
        let ingress =
            self.ingress
                .turn(Direction::Ingress, &mut self.peer, &mut self.guest, carrier);
        match (egress, ingress) {
            (Turn::Over, Turn::Over) => Turn::Over,
            (Turn::More, _) | (_, Turn::More) => Turn::More,
            (Turn::Starved, _) | (_, Turn::Starved) => Turn::Starved,
            _ => Turn::Idle,
        }
    }

    /// Takes the bytes that are on their way off the count, when the relay is broken off.
    pub fn forget(&mut self, carrier: &mut impl Carrier) {
        carrier.freed(self.buffered());
    }
}

impl Side {
    /// Gives the socket a larger buffer, if it has none yet. Whether it takes more now.
    fn widen(&mut self) -> bool {
        if std::mem::replace(&mut self.wide, true) {
            return false;
        }
        let socket = &self.socket;
        match sockopt::socket_domain(socket) {
            Ok(AddressFamily::UNIX) => {
                // What is asked for, Linux doubles.
                sockopt::socket_send_buffer_size(socket).is_ok_and(|bytes| bytes < WIDE_BYTES)
                    && sockopt::set_socket_send_buffer_size(socket, WIDE_BYTES / 2).is_ok()
            }
            // TCP sizes its buffers better by itself, as long as nobody does; what it can't send is bounded.
            Ok(AddressFamily::INET | AddressFamily::INET6) => {
                let unsent = u32::try_from(WIDE_BYTES).expect("a fixed number");
                tcp::bound_unsent(socket, unsent).is_ok()
            }
            _ => false,
        }
    }
}

impl Flow {
    fn buffered(&self) -> usize {
        self.in_pipe + self.copied.len() - self.delivered
    }

    fn turn(
        &mut self,
        direction: Direction,
        from: &mut Side,
        to: &mut Side,
        carrier: &mut impl Carrier,
    ) -> Turn {
        let mut left = TURN_BYTES;
        self.first = 0;
        while !self.over {
            if to.gone {
                self.cut(direction, from, to, carrier);
                continue;
            }
            if self.buffered() > 0 {
                if !to.writable {
                    return Turn::Idle;
                }
                match self.deliver(direction, to, carrier) {
                    Ok(bytes) => left = left.saturating_sub(bytes),
                    Err(Errno::AGAIN) => to.writable = carrier.may_widen() && to.widen(),
                    Err(Errno::INTR) => {}
                    Err(_) => self.cut(direction, from, to, carrier),
                }
                continue;
            }
            self.give_back(carrier);
            if self.end {
                let _ = shutdown(&to.socket, Shutdown::Write);
                tcp::end_when_closed(&to.socket);
                self.finish(direction, carrier);
                continue;
            }
            if !from.readable {
                return Turn::Idle;
            }
            if left == 0 {
                return Turn::More;
            }
            match self.take(direction, from, carrier) {
                Ok(0) => self.end = true,
                Ok(bytes) => {
                    if self.first == 0 {
                        self.first = bytes;
                    }
                }
                Err(Errno::AGAIN) => from.readable = false,
                Err(Errno::INTR) => {}
                Err(Errno::NOMEM | Errno::MFILE | Errno::NFILE) => return Turn::Starved,
                // A reset: nothing more will come, and nothing will be taken. A Unix socket tells it after all that was sent, and
                // only because something was unread there: that is an end like any other of such a socket.
                Err(_) => {
                    from.gone = true;
                    self.end = true;
                }
            }
        }
        Turn::Over
    }

    /// Takes bytes from the sending side, as far as there is room for them.
    fn take(
        &mut self,
        direction: Direction,
        from: &Side,
        carrier: &mut impl Carrier,
    ) -> Result<usize, Errno> {
        let most = carrier
            .copy_room()
            .map_or(PIPE_BYTES, |buffer| buffer.len());
        let room = carrier.reserve(most);
        if room == 0 {
            return Err(Errno::NOMEM);
        }
        let taken = self.take_at_most(room, direction, from, carrier);
        carrier.freed(room - taken.unwrap_or(0));
        taken
    }

    /// Into the pipe, or copied and shown.
    fn take_at_most(
        &mut self,
        room: usize,
        direction: Direction,
        from: &Side,
        carrier: &mut impl Carrier,
    ) -> Result<usize, Errno> {
        if let Some(buffer) = carrier.copy_room() {
            let length = buffer.len().min(room);
            let (bytes, _) = recv(&from.socket, &mut buffer[..length], RecvFlags::empty())?;
            self.copied.extend_from_slice(&buffer[..bytes]);
            carrier.see(direction, &self.copied);
            return Ok(bytes);
        }
        let pipe = match self.pipe.take() {
            Some(pipe) => pipe,
            None => carrier.pipes().take().map_err(|_| Errno::MFILE)?,
        };
        let outcome = pipe.fill(&from.socket, room);
        self.pipe = Some(pipe);
        self.in_pipe = *outcome.as_ref().unwrap_or(&0);
        if self.in_pipe == 0 {
            self.give_back(carrier);
        }
        outcome
    }

    fn deliver(
        &mut self,
        direction: Direction,
        to: &Side,
        carrier: &mut impl Carrier,
    ) -> Result<usize, Errno> {
        let bytes = match &self.pipe {
            Some(pipe) if self.in_pipe > 0 => {
                let bytes = pipe.drain(&to.socket, self.in_pipe)?;
                self.in_pipe -= bytes;
                bytes
            }
            _ => {
                let rest = &self.copied[self.delivered..];
                let bytes = send(&to.socket, rest, SendFlags::NOSIGNAL)?;
                self.delivered += bytes;
                if self.delivered == self.copied.len() {
                    self.delivered = 0;
                    // Only who is being captured has this memory, and only while it is in use.
                    self.copied = Vec::new();
                }
                bytes
            }
        };
        self.bytes += bytes as u64;
        carrier.freed(bytes);
        carrier.moved(direction, bytes);
        Ok(bytes)
    }

    /// Ends a direction whose receiver takes no more.
    fn cut(&mut self, direction: Direction, from: &Side, to: &Side, carrier: &mut impl Carrier) {
        carrier.freed(self.buffered());
        // A pipe with bytes in it can't be used again.
        *self = Self {
            bytes: self.bytes,
            end: true,
            ..Self::default()
        };
        let _ = shutdown(&from.socket, Shutdown::Read);
        let _ = shutdown(&to.socket, Shutdown::Write);
        self.finish(direction, carrier);
    }

    fn finish(&mut self, direction: Direction, carrier: &mut impl Carrier) {
        self.over = true;
        carrier.ended(direction);
    }

    fn give_back(&mut self, carrier: &mut impl Carrier) {
        if let Some(pipe) = self.pipe.take() {
            carrier.pipes().give(pipe);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        os::unix::net::UnixStream,
    };

    use super::*;

    /// With as much of everything as is asked for; what was copied, if it is to be.
    #[derive(Default)]
    struct Plenty {
        pipes: PipePool,
        copies: Option<Box<[u8]>>,
        seen: usize,
        reserved: usize,
    }

    impl Carrier for Plenty {
        fn pipes(&mut self) -> &mut PipePool {
            &mut self.pipes
        }

        fn copy_room(&mut self) -> Option<&mut [u8]> {
            self.copies.as_deref_mut()
        }

        fn see(&mut self, _: Direction, bytes: &[u8]) {
            self.seen += bytes.len();
        }

        fn reserve(&mut self, most: usize) -> usize {
            self.reserved += most;
            most
        }

        fn freed(&mut self, bytes: usize) {
            self.reserved -= bytes;
        }

        fn moved(&mut self, _: Direction, _: usize) {}

        fn ended(&mut self, _: Direction) {}

        fn may_widen(&self) -> bool {
            false
        }
    }

    #[test]
    fn bytes_stay_in_the_kernel_unless_somebody_wants_to_see_them() {
        for is_seen in [false, true] {
            let pair = || {
                let (near, far) = UnixStream::pair().expect("a pair");
                for stream in [&near, &far] {
                    stream.set_nonblocking(true).expect("not to block");
                }
                (near, far)
            };
            let ((mut guest, near), (far, mut service)) = (pair(), pair());
            let mut relay = Relay::new(near.into(), far.into());
            let mut carrier = Plenty {
                copies: is_seen.then(|| vec![0; COPY_BYTES].into_boxed_slice()),
                ..Plenty::default()
            };
            let mut sent = 0;
            // Until the service's socket takes nothing more, and what was taken for it waits in the relay.
            while relay.buffered() == 0 {
                sent += guest.write(&[7; 4096]).expect("writing");
                relay.ready(0, READABLE);
                relay.turn(&mut carrier);
            }
            let egress = &relay.egress;
            let copied = egress.copied.len() - egress.delivered;
            assert_eq!((egress.in_pipe == 0, copied != 0), (is_seen, is_seen));
            assert_eq!(carrier.seen, if is_seen { sent } else { 0 });
            assert_eq!(carrier.reserved, relay.buffered());
            let mut got = 0;
            while got < sent {
                got += service.read(&mut [0; 65_536]).expect("reading");
                relay.ready(1, WRITABLE);
                relay.turn(&mut carrier);
            }
            assert_eq!((got, carrier.reserved), (sent, 0));
        }
    }

    const READABLE: Ready = Ready {
        token: 0,
        read: true,
        write: false,
        hangup: false,
    };
    const WRITABLE: Ready = Ready {
        read: false,
        write: true,
        ..READABLE
    };
}

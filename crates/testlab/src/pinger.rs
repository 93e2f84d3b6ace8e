//! Pings at a steady rate until told to stop: shows what a change under traffic costs, however long the
//! change takes.
//!
//! A thread with a raw socket, not the `ping` command: below an interval of 10 ms that one spins on
//! `sched_yield` and takes a whole processor, and four of them on two processors kept the kernel's own
//! workers waiting for up to a minute.

use std::{
    collections::BTreeSet,
    io::{ErrorKind, Read},
    mem,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU16, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};
use smoltcp::{
    phy::ChecksumCapabilities,
    wire::{Icmpv4Message, Icmpv4Packet, Icmpv4Repr, Icmpv6Message, Icmpv6Packet, Icmpv6Repr},
};
use socket2::{Domain, Protocol, Socket, Type};

use crate::namespace;

/// How long an answer may take after the last packet.
const PATIENCE: Duration = Duration::from_secs(2);

/// A running row of pings.
#[derive(Debug)]
pub struct Pinger {
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<Result<Pinged>>,
}

/// What became of the packets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pinged {
    /// How many were sent.
    pub sent: u32,
    /// Those without an answer, counted from 1.
    pub lost: BTreeSet<u32>,
}

impl Pinger {
    /// Begins to ping an address from a network namespace.
    ///
    /// # Errors
    /// If there can be no socket in the namespace.
    pub fn start(netns: &Path, address: IpAddr, interval: Duration) -> Result<Self> {
        let socket = namespace::inside(netns, || Echo::open(address))?;
        let is_over = Arc::new(AtomicBool::new(false));
        let thread = thread::spawn({
            let is_over = Arc::clone(&is_over);
            move || ping(socket, interval, &is_over)
        });
        Ok(Self { is_over, thread })
    }

    /// Sends no more, and waits for the answers that are missing, 2 s at most.
    ///
    /// # Errors
    /// If the kernel refused to send or to receive.
    ///
    /// # Panics
    /// If its thread did.
    pub fn stop(self) -> Result<Pinged> {
        self.is_over.store(true, Ordering::Relaxed);
        self.thread.join().expect("the pinger doesn't panic")
    }
}

fn ping(mut echo: Echo, interval: Duration, is_over: &AtomicBool) -> Result<Pinged> {
    let (mut sent, mut lost) = (0, BTreeSet::new());
    let mut next = Instant::now();
    while !is_over.load(Ordering::Relaxed) {
        sent += 1;
        lost.insert(sent);
        echo.send(sent)?;
        next += interval;
        while let Some(number) = echo.receive(next)? {
            lost.remove(&number);
        }
    }
    let deadline = Instant::now() + PATIENCE;
    while !lost.is_empty()
        && let Some(number) = echo.receive(deadline)?
    {
        lost.remove(&number);
    }
    Ok(Pinged { sent, lost })
}

/// A raw socket that sends echo requests to one address.
struct Echo {
    socket: Socket,
    target: IpAddr,
    /// Tells its answers from those to other pingers of the namespace.
    identifier: u16,
}

impl Echo {
    fn open(target: IpAddr) -> Result<Self> {
        static IDENTIFIERS: AtomicU16 = AtomicU16::new(0x5377);
        let (domain, protocol) = match target {
            IpAddr::V4(_) => (Domain::IPV4, Protocol::ICMPV4),
            IpAddr::V6(_) => (Domain::IPV6, Protocol::ICMPV6),
        };
        let socket = Socket::new(domain, Type::RAW, Some(protocol)).context("open a raw socket")?;
        socket.set_nonblocking(true)?;
        Ok(Self {
            socket,
            target,
            identifier: IDENTIFIERS.fetch_add(1, Ordering::Relaxed),
        })
    }

    fn send(&self, number: u32) -> Result<()> {
        let request = request(self.target, self.identifier, number);
        let target = SocketAddr::new(self.target, 0);
        let sent = self.socket.send_to(&request, &target.into());
        sent.with_context(|| format!("ping {}", self.target))?;
        Ok(())
    }

    /// The number of the next answer, if one comes before the deadline.
    fn receive(&mut self, deadline: Instant) -> Result<Option<u32>> {
        let mut buffer = [0; 2048];
        loop {
            match (&self.socket).read(&mut buffer) {
                Ok(length) => {
                    let number = answer(self.target, self.identifier, &buffer[..length]);
                    if number.is_some() {
                        return Ok(number);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Ok(None);
                    }
                    self.wait(left)?;
                }
                Err(error) => return Err(error).context("receive the answers to pings"),
            }
        }
    }

    /// Not the socket's own timeout: that one is in ticks, longer than an interval.
    fn wait(&self, patience: Duration) -> Result<()> {
        let mut wanted = [PollFd::new(&self.socket, PollFlags::IN)];
        match poll(&mut wanted, Some(&Timespec::try_from(patience)?)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno).context("wait for the answers to pings"),
        }
    }
}

/// The low half of a number is its sequence number on the wire; the payload has all of it.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the low half is what is wanted"
)]
fn request(target: IpAddr, ident: u16, number: u32) -> Vec<u8> {
    let seq_no = number as u16;
    let mut data = [0x2a; 56];
    data[..mem::size_of::<u32>()].copy_from_slice(&number.to_be_bytes());
    let checksums = ChecksumCapabilities::default();
    match target {
        IpAddr::V4(_) => {
            let request = Icmpv4Repr::EchoRequest {
                ident,
                seq_no,
                data: &data,
            };
            let mut bytes = vec![0; request.buffer_len()];
            request.emit(&mut Icmpv4Packet::new_unchecked(&mut bytes), &checksums);
            bytes
        }
        IpAddr::V6(target) => {
            let request = Icmpv6Repr::EchoRequest {
                ident,
                seq_no,
                data: &data,
            };
            let mut bytes = vec![0; request.buffer_len()];
            // The kernel makes the checksum anew, with the source that it chooses (RFC 3542, section 3.1).
            let source = Ipv6Addr::UNSPECIFIED;
            let mut packet = Icmpv6Packet::new_unchecked(&mut bytes);
            request.emit(&source, &target, &mut packet, &checksums);
            bytes
        }
    }
}

/// The number in an echo reply. Raw IPv4 sockets give the IP header too.
fn answer(target: IpAddr, identifier: u16, packet: &[u8]) -> Option<u32> {
    let (is_mine, data) = match target {
        IpAddr::V4(target) => {
            let ip = smoltcp::wire::Ipv4Packet::new_checked(packet).ok()?;
            let icmp = Icmpv4Packet::new_checked(ip.payload()).ok()?;
            let is_reply = icmp.msg_type() == Icmpv4Message::EchoReply;
            let is_from_there = ip.src_addr() == target;
            let is_mine = is_reply && is_from_there && icmp.echo_ident() == identifier;
            (is_mine, icmp.data().first_chunk().copied())
        }
        IpAddr::V6(_) => {
            let icmp = Icmpv6Packet::new_checked(packet).ok()?;
            let is_reply = icmp.msg_type() == Icmpv6Message::EchoReply;
            let is_mine = is_reply && icmp.echo_ident() == identifier;
            (is_mine, icmp.payload().first_chunk().copied())
        }
    };
    data.filter(|_| is_mine).map(u32::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_answer_to_an_own_request_has_its_number() {
        let target = IpAddr::from(Ipv6Addr::LOCALHOST);
        let mut packet = request(target, 7, 70_000);
        assert_eq!(answer(target, 7, &packet), None, "a request");
        packet[0] = 129;
        assert_eq!(answer(target, 7, &packet), Some(70_000));
        assert_eq!(answer(target, 8, &packet), None, "somebody else's");
        assert_eq!(answer(target, 7, &packet[..9]), None, "cut short");
    }
}

//! A socket that asks for echoes, by ICMP or UDP, and the course of asking.

use std::{
    fs,
    io::{self, Read, Write},
    net::{SocketAddr, ToSocketAddrs},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sandwire_impair::{
    Nanoseconds,
    scenario::record::{Probe, Reading, Recording},
};
use socket2::{Domain, Protocol, Socket, Type};

use super::progress::Progress;
use crate::{failure::Failure, interruption::Interruption, output::note};

/// An answer that takes longer is none.
pub(super) const PATIENCE: Duration = Duration::from_secs(3);
/// Answers that are read before it is looked whether something else is due.
const BURST: usize = 256;
/// Header of an ICMP echo.
const HEADER: usize = 8;
/// Of a probe: our token, its number, and as many bytes as `ping` sends.
const CONTENT: usize = 56;

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Echo {
    /// Every host answers, unless it was told not to.
    Icmp,
    /// A server on this port sends back what comes.
    Udp(u16),
}

/// A socket that is connected to the peer. It belongs to the network namespace that it was opened in.
#[derive(Debug)]
pub(super) struct Prober {
    socket: Socket,
    pub(super) address: SocketAddr,
    echo: Echo,
    /// Whether the kernel hands over the header of IPv4.
    has_ip_header: bool,
    /// Tells our probes from others'.
    token: [u8; 8],
}

/// How long, and how often.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) length: Duration,
    pub(super) interval: Duration,
    pub(super) step: Duration,
}

impl Prober {
    /// Opens it to the first address of `peer` that there is a route to.
    pub(super) fn open(peer: &str, echo: Echo, interface: Option<&str>) -> Result<Self, Failure> {
        let port = match echo {
            Echo::Icmp => 0,
            Echo::Udp(port) => port,
        };
        let addresses = (peer, port).to_socket_addrs().map_err(|error| {
            Failure::refused(format!(
                "cannot find the address of {peer}: {error}; give an address, or a name that is known there"
            ))
        })?;
        let mut refusal = Failure::refused(format!("{peer} has no address"));
        for address in addresses {
            match Self::connected(address, echo, interface) {
                Ok(prober) => return Ok(prober),
                Err(failure) => refusal = failure,
            }
        }
        Err(refusal)
    }

    fn connected(
        address: SocketAddr,
        echo: Echo,
        interface: Option<&str>,
    ) -> Result<Self, Failure> {
        let (socket, is_raw) = match echo {
            Echo::Icmp => icmp_socket(address)?,
            Echo::Udp(_) => {
                let udp = Socket::new(Domain::for_address(address), Type::DGRAM, None);
                (udp.map_err(failed("open a UDP socket"))?, false)
            }
        };
        if let Some(interface) = interface {
            socket
                .bind_device(Some(interface.as_bytes()))
                .map_err(|error| {
                    Failure::refused(format!("cannot probe through {interface}: {error}"))
                })?;
        }
        socket.connect(&address.into()).map_err(|error| {
            let address = address.ip();
            Failure::refused(format!(
                "cannot probe {address}: {error}; look at the routes there"
            ))
        })?;
        socket
            .set_nonblocking(true)
            .map_err(failed("set a socket up"))?;
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH);
        let moment = since_1970.unwrap_or_default().as_nanos();
        // Its low half, which changes from one run to the next.
        let [token @ .., _, _, _, _, _, _, _, _] = moment.to_le_bytes();
        Ok(Self {
            socket,
            address,
            echo,
            has_ip_header: is_raw && address.is_ipv4(),
            token,
        })
    }

    /// Sends a probe. An error of an earlier one that is reported now doesn't keep it from being sent.
    fn send(&self, number: u32) -> io::Result<()> {
        let probe = self.probe(number);
        let sent = (&self.socket).write(&probe);
        sent.or_else(|_| (&self.socket).write(&probe)).map(|_| ())
    }

    fn probe(&self, number: u32) -> Vec<u8> {
        let mut content = [0; CONTENT];
        content[..8].copy_from_slice(&self.token);
        content[8..12].copy_from_slice(&number.to_be_bytes());
        if self.echo != Echo::Icmp {
            return content.to_vec();
        }
        let kind = if self.address.is_ipv4() { 8 } else { 128 };
        let mut probe = vec![kind, 0, 0, 0, self.token[0], self.token[1], 0, 0];
        probe[6..].copy_from_slice(&number.to_be_bytes()[2..]);
        probe.extend(content);
        // That of ICMPv6 is the kernel's work.
        if self.address.is_ipv4() {
            let sum = checksum(&probe).to_be_bytes();
            probe[2..4].copy_from_slice(&sum);
        }
        probe
    }

    /// Numbers of the probes that were answered since; errors that routers reported are no answers.
    fn answers(&self) -> impl Iterator<Item = u32> {
        let mut packet = [0; 2048];
        let received = move |_| match (&self.socket).read(&mut packet) {
            Ok(length) => Some(self.number(&packet[..length])),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            Err(_) => Some(None),
        };
        (0..BURST).map_while(received).flatten()
    }

    /// Which probe this answers; none if it is something else.
    fn number(&self, packet: &[u8]) -> Option<u32> {
        let mut content = packet;
        if self.has_ip_header {
            let words = usize::from(content.first()? & 0xf);
            content = content.get(4 * words..)?;
        }
        if self.echo == Echo::Icmp {
            let kind = if self.address.is_ipv4() { 0 } else { 129 };
            if content.first() != Some(&kind) {
                return None;
            }
            content = content.get(HEADER..)?;
        }
        let number = content.strip_prefix(&self.token)?.first_chunk()?;
        Some(u32::from_be_bytes(*number))
    }

    /// Probes until the plan is done or a signal comes, and waits for the last answers; a second signal ends that too.
    /// With `interface` its counters are read at the start of each step. Second: whether all of the plan was done.
    pub(super) fn record(
        &self,
        plan: Plan,
        interface: Option<&str>,
        signals: &Interruption,
        progress: &mut Progress,
    ) -> Result<(Recording, bool), Failure> {
        let mut course = Course {
            prober: self,
            start: Instant::now(),
            end: plan.length,
            answered: 0,
            recording: Recording::default(),
        };
        let (mut next, mut next_reading) = (Duration::ZERO, Duration::ZERO);
        loop {
            let now = course.start.elapsed();
            if now >= next && now < course.end {
                course.probe()?;
                next = now.max(next + plan.interval);
            }
            // Also at the end, once.
            if let Some(interface) = interface.filter(|_| now >= next_reading) {
                course.count(interface, now)?;
                let is_last = now >= course.end;
                next_reading = match is_last {
                    true => Duration::MAX,
                    false => course.end.min(next_reading + plan.step),
                };
            }
            let is_over = now >= course.end;
            if is_over && (course.has_all_answers() || now >= course.end + PATIENCE) {
                break;
            }
            let due = if is_over {
                course.end + PATIENCE
            } else {
                next.min(course.end)
            };
            progress.tell(now, course.recording.probes.len(), course.answered);
            let due = due.min(next_reading).min(progress.due());
            if course.wait(due, signals)? {
                if is_over {
                    course.forget_open();
                    break;
                }
                course.end = course.start.elapsed();
                next_reading = next_reading.min(course.end);
            }
        }
        course.recording.length = nanoseconds(course.end);
        Ok((course.recording, course.end == plan.length))
    }
}

/// A recording that is under way.
struct Course<'a> {
    prober: &'a Prober,
    start: Instant,
    /// When the last probe has been sent.
    end: Duration,
    answered: usize,
    recording: Recording,
}

impl Course<'_> {
    /// Sends the next probe. If even the first can't be sent, there is no use in going on.
    fn probe(&mut self) -> Result<(), Failure> {
        let probes = &mut self.recording.probes;
        let number = u32::try_from(probes.len()).unwrap_or(u32::MAX);
        let sent = self.start.elapsed();
        match self.prober.send(number) {
            Err(error) if number == 0 => {
                let address = self.prober.address.ip();
                return Err(Failure::refused(format!(
                    "cannot send a probe to {address}: {error}; look at routes and firewall there"
                )));
            }
            // Our own queue was full: that says nothing of the link.
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => return Ok(()),
            // What can't be sent since the link is down is lost.
            Err(_) | Ok(()) => {}
        }
        probes.push(Probe {
            sent: nanoseconds(sent),
            round_trip: None,
        });
        Ok(())
    }

    /// Reads the counters. Without the interface the measuring is over, with what there is.
    fn count(&mut self, interface: &str, now: Duration) -> Result<(), Failure> {
        match read_counters(interface, now) {
            Ok(reading) => self.recording.readings.push(reading),
            Err(failure) if self.recording.readings.is_empty() => return Err(failure),
            Err(failure) => {
                note(&format!("{}; the measuring ends here", failure.message));
                self.end = self.end.min(now);
            }
        }
        Ok(())
    }

    fn has_all_answers(&self) -> bool {
        self.answered == self.recording.probes.len()
    }

    /// Waits until that moment, an answer, or a signal; whether it was a signal.
    fn wait(&mut self, due: Duration, signals: &Interruption) -> Result<bool, Failure> {
        let rest = due.saturating_sub(self.start.elapsed());
        let socket = &self.prober.socket;
        let mut fds = [
            PollFd::new(signals, PollFlags::IN),
            PollFd::new(socket, PollFlags::IN),
        ];
        let timeout = Timespec::try_from(rest).ok();
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(failed("wait for answers")(error.into())),
        }
        let [signal, answer] = fds.map(|fd| !fd.revents().is_empty());
        if answer {
            self.take_answers();
        }
        Ok(signal && signals.has_come())
    }

    /// The first answer of each probe counts.
    fn take_answers(&mut self) {
        for number in self.prober.answers() {
            let now = nanoseconds(self.start.elapsed());
            let index = usize::try_from(number).unwrap_or(usize::MAX);
            let Some(probe) = self.recording.probes.get_mut(index) else {
                continue;
            };
            let round_trip = now.saturating_sub(probe.sent);
            if probe.round_trip.is_none() && round_trip <= nanoseconds(PATIENCE) {
                probe.round_trip = Some(round_trip);
                self.answered += 1;
            }
        }
    }

    /// Leaves out those that might still be answered.
    fn forget_open(&mut self) {
        let now = nanoseconds(self.start.elapsed());
        self.recording.probes.retain(|probe| {
            probe.round_trip.is_some() || now.saturating_sub(probe.sent) > nanoseconds(PATIENCE)
        });
    }
}

/// A socket for ICMP echoes, and whether it is a raw one. Unprivileged ones come first; who may open them is a matter of a
/// sysctl, `net.ipv4.ping_group_range`, and in a new namespace nobody may.
fn icmp_socket(address: SocketAddr) -> Result<(Socket, bool), Failure> {
    let domain = Domain::for_address(address);
    let protocol = match address {
        SocketAddr::V4(_) => Protocol::ICMPV4,
        SocketAddr::V6(_) => Protocol::ICMPV6,
    };
    if let Ok(socket) = Socket::new(domain, Type::DGRAM, Some(protocol)) {
        return Ok((socket, false));
    }
    let socket = Socket::new(domain, Type::RAW, Some(protocol)).map_err(|error| {
        Failure::refused(format!(
            "cannot open a socket for ICMP: {error}; run it as root, let your group ping (sysctl net.ipv4.ping_group_range), \
             or use --udp PORT if an echo server listens there"
        ))
    })?;
    Ok((socket, true))
}

/// Reads the counters of an interface of this thread's network namespace.
pub(super) fn read_counters(interface: &str, at: Duration) -> Result<Reading, Failure> {
    let path = "/proc/thread-self/net/dev";
    let text = fs::read_to_string(path).map_err(failed("read the interface's counters"))?;
    let (ingress, egress) = counters_of(&text, interface).ok_or_else(|| {
        Failure::refused(format!(
            "cannot read the counters of {interface}: no such interface"
        ))
    })?;
    Ok(Reading {
        at: nanoseconds(at),
        egress,
        ingress,
    })
}

/// Bytes that an interface has received and sent, of the kernel's table.
fn counters_of(table: &str, interface: &str) -> Option<(u64, u64)> {
    let mut lines = table.lines().filter_map(|line| line.rsplit_once(':'));
    let (_, numbers) = lines.find(|(name, _)| name.trim() == interface)?;
    let mut numbers = numbers.split_whitespace().map(str::parse);
    let received = numbers.next()?.ok()?;
    let sent = numbers.nth(7)?.ok()?;
    Some((received, sent))
}

/// The internet checksum of bytes of an even number (RFC 1071).
fn checksum(bytes: &[u8]) -> u16 {
    let pairs = bytes.chunks_exact(2);
    let mut sum: u32 = pairs
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap_or_default()
}

fn nanoseconds(time: Duration) -> Nanoseconds {
    Nanoseconds::try_from(time.as_nanos()).unwrap_or(Nanoseconds::MAX)
}

fn failed(operation: &'static str) -> impl Fn(io::Error) -> Failure {
    move |error| Failure::failed(format!("cannot {operation}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prober(echo: Echo, address: &str, has_ip_header: bool) -> Prober {
        Prober {
            socket: Socket::new(Domain::IPV4, Type::DGRAM, None).unwrap(),
            address: address.parse().unwrap(),
            echo,
            has_ip_header,
            token: *b"sandwire",
        }
    }

    #[test]
    fn an_answer_is_known_by_kind_token_and_number() {
        let prober = prober(Echo::Icmp, "192.0.2.1:0", true);
        let mut answer = vec![0x45; 20];
        answer.extend(prober.probe(70_000));
        assert_eq!(prober.number(&answer), None, "our own request");
        answer[20] = 0;
        assert_eq!(prober.number(&answer), Some(70_000));
        for length in 0..20 + HEADER + 12 {
            assert_eq!(prober.number(&answer[..length]), None, "{length}");
        }
        answer[20 + HEADER] ^= 1;
        assert_eq!(prober.number(&answer), None, "another's token");
    }

    #[test]
    fn echoes_of_udp_and_icmpv6_have_no_ip_header() {
        let udp = prober(Echo::Udp(7), "192.0.2.1:7", false);
        assert_eq!(udp.number(&udp.probe(5)), Some(5));
        let icmp = prober(Echo::Icmp, "[2001:db8::1]:0", false);
        let mut answer = icmp.probe(5);
        answer[0] = 129;
        assert_eq!(icmp.number(&answer), Some(5));
    }

    /// The sum of a message with its checksum is all ones.
    #[test]
    fn the_checksum_makes_the_sum_all_ones() {
        let probe = prober(Echo::Icmp, "192.0.2.1:0", false).probe(0x1_ff03);
        assert_eq!(checksum(&probe), 0);
        assert_eq!(
            checksum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]),
            0x220d
        );
    }

    #[test]
    fn counters_are_read_from_the_kernels_table() {
        let table = "Inter-|   Receive                    |  Transmit\n \
             face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed\n    \
             lo:  10 1 0 0 0 0 0 0 10 1 0 0 0 0 0 0\n  eth0:1234 9 0 0 0 0 0 0 56789 8 0 0 0 0 0 0\n";
        assert_eq!(counters_of(table, "eth0"), Some((1234, 56_789)));
        assert_eq!(counters_of(table, "eth"), None);
        assert_eq!(counters_of("eth0: 5", "eth0"), None);
    }
}

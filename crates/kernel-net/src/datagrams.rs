//! Many datagrams by one system call, with the destination that each had before it was given to us.
//!
//! A [`Receiver`] and a [`Sender`] keep their memory from call to call. Neither waits: sockets are to be
//! non-blocking, and who waits for them does so elsewhere.

use std::{
    collections::HashMap,
    io, mem,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6},
    ops::Range,
    os::fd::{AsFd, AsRawFd},
    ptr,
    time::{Duration, Instant},
};

/// Bytes of control messages for one datagram: its destination.
const CONTROL_BYTES: usize = 64;
/// Most datagrams that the kernel takes as one (`UDP_MAX_SEGMENTS` of older kernels).
const SEGMENTS_MAX: usize = 64;
/// Most bytes of one send, whatever the headers.
const SEND_BYTES_MAX: usize = 65_000;
/// How long nothing is joined for an address after the kernel has refused that, and how many such addresses are known.
const APART: Duration = Duration::from_secs(10);
const APART_MAX: usize = 1024;

/// Control messages, aligned as the kernel wants them.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Control([u8; CONTROL_BYTES]);

/// A datagram as it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram<'a> {
    /// Who sent it.
    pub from: SocketAddr,
    /// Where it was sent to, on sockets of [`crate::transparent::udp_listener`].
    pub to: Option<SocketAddr>,
    /// What is in it.
    pub payload: &'a [u8],
}

/// Receives datagrams.
pub struct Receiver {
    bytes_each: usize,
    buffer: Vec<u8>,
    names: Vec<libc::sockaddr_storage>,
    controls: Vec<Control>,
    iovecs: Vec<libc::iovec>,
    headers: Vec<libc::mmsghdr>,
}

// SAFETY: the pointers in `iovecs` and `headers` are written anew before each use, and lead to this value's own
// vectors.
unsafe impl Send for Receiver {}

impl Receiver {
    /// Memory for `count` datagrams of at most `bytes_each`; longer ones are dropped.
    #[must_use]
    pub fn new(count: usize, bytes_each: usize) -> Self {
        // SAFETY: all of these are plain data, for which zeros are a value.
        let (name, iovec, header) = unsafe { (mem::zeroed(), mem::zeroed(), mem::zeroed()) };
        Self {
            bytes_each,
            buffer: vec![0; count * bytes_each],
            names: vec![name; count],
            controls: vec![Control([0; CONTROL_BYTES]); count],
            iovecs: vec![iovec; count],
            headers: vec![header; count],
        }
    }

    /// Takes what is there, and says how many datagrams that is.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if there is none, or what the kernel says of the socket.
    pub fn receive(&mut self, socket: impl AsFd) -> io::Result<usize> {
        for index in 0..self.headers.len() {
            self.iovecs[index] = libc::iovec {
                iov_base: self.buffer[index * self.bytes_each..].as_mut_ptr().cast(),
                iov_len: self.bytes_each,
            };
            let header = &mut self.headers[index].msg_hdr;
            header.msg_name = (&raw mut self.names[index]).cast();
            header.msg_namelen = socklen(mem::size_of::<libc::sockaddr_storage>());
            header.msg_iov = &raw mut self.iovecs[index];
            header.msg_iovlen = 1;
            header.msg_control = self.controls[index].0.as_mut_ptr().cast();
            header.msg_controllen = CONTROL_BYTES;
            header.msg_flags = 0;
        }
        let count = libc::c_uint::try_from(self.headers.len()).expect("a few datagrams");
        // SAFETY: every header leads to a name, an iovec, a buffer and control memory of its own, of the lengths
        // that it says, and all of them live in `self` until the call returns.
        let received = unsafe {
            libc::recvmmsg(
                socket.as_fd().as_raw_fd(),
                self.headers.as_mut_ptr(),
                count,
                libc::MSG_DONTWAIT,
                ptr::null_mut(),
            )
        };
        usize::try_from(received).map_err(|_| io::Error::last_os_error())
    }

    /// A datagram of the last [`Receiver::receive`]. None if it was too long, or its sender is no address.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<Datagram<'_>> {
        let header = self.headers.get(index)?;
        if header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0 {
            return None;
        }
        let length = usize::try_from(header.msg_len).ok()?;
        let start = index * self.bytes_each;
        Some(Datagram {
            from: address_of(&self.names[index])?,
            to: self.destination(index),
            payload: self
                .buffer
                .get(start..start + length.min(self.bytes_each))?,
        })
    }

    fn destination(&self, index: usize) -> Option<SocketAddr> {
        let header = &self.headers[index].msg_hdr;
        // SAFETY: the header's control memory is `self.controls[index]`, which the kernel has filled up to the
        // length that is in the header; the macros stay within it.
        unsafe {
            let mut control = libc::CMSG_FIRSTHDR(header);
            while let Some(message) = control.as_ref() {
                let is_destination = matches!(
                    (message.cmsg_level, message.cmsg_type),
                    (libc::SOL_IP, libc::IP_ORIGDSTADDR) | (libc::SOL_IPV6, libc::IPV6_ORIGDSTADDR)
                );
                if is_destination {
                    let mut name: libc::sockaddr_storage = mem::zeroed();
                    let length = message
                        .cmsg_len
                        .saturating_sub(libc::CMSG_LEN(0) as usize)
                        .min(mem::size_of_val(&name));
                    ptr::copy_nonoverlapping(
                        libc::CMSG_DATA(control),
                        (&raw mut name).cast::<u8>(),
                        length,
                    );
                    return address_of(&name);
                }
                control = libc::CMSG_NXTHDR(header, control);
            }
        }
        None
    }
}

/// What became of datagrams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// The kernel took them.
    pub sent: usize,
    /// It refused them, or had no room.
    pub refused: usize,
}

/// Sends datagrams: neighbours of one length to one address as one packet, which the kernel or the card splits.
pub struct Sender {
    names: Vec<libc::sockaddr_storage>,
    controls: Vec<Control>,
    iovecs: Vec<libc::iovec>,
    headers: Vec<libc::mmsghdr>,
    /// Datagrams in each header.
    counts: Vec<usize>,
    /// Datagrams of the last call that weren't sent.
    refused: Vec<Range<usize>>,
    can_join: bool,
    /// Addresses for which nothing is joined, with the time when that was refused: what doesn't fit on the way to one
    /// says nothing of others.
    apart: HashMap<SocketAddr, Instant>,
}

// SAFETY: the pointers in `iovecs` and `headers` are written anew in each call, and not read after it.
unsafe impl Send for Sender {}

impl Default for Sender {
    fn default() -> Self {
        Self {
            names: Vec::new(),
            controls: Vec::new(),
            iovecs: Vec::new(),
            headers: Vec::new(),
            counts: Vec::new(),
            refused: Vec::new(),
            can_join: true,
            apart: HashMap::new(),
        }
    }
}

impl Sender {
    /// One that joins nothing: every datagram is a packet of its own for the kernel, too.
    #[must_use]
    pub fn one_by_one() -> Self {
        Self {
            can_join: false,
            ..Self::default()
        }
    }

    /// Sends datagrams, each to its address; what there is no room for is not sent. On a connected socket all
    /// of them go to its peer (`connected`). `now` says for how long joining has been refused.
    pub fn send(
        &mut self,
        socket: impl AsFd,
        datagrams: &[(SocketAddr, &[u8])],
        connected: bool,
        now: Instant,
    ) -> Sent {
        self.refused.clear();
        self.send_from(0, socket, datagrams, connected, now);
        let refused: usize = self.refused.iter().map(Range::len).sum();
        Sent {
            sent: datagrams.len() - refused,
            refused,
        }
    }

    /// Whether that one of the last [`Sender::send`] wasn't sent, counted from 0.
    #[must_use]
    pub fn has_refused(&self, index: usize) -> bool {
        self.refused.iter().any(|range| range.contains(&index))
    }

    fn send_from(
        &mut self,
        first: usize,
        socket: impl AsFd,
        datagrams: &[(SocketAddr, &[u8])],
        connected: bool,
        now: Instant,
    ) {
        self.lay_out(&datagrams[first..], connected, now);
        let fd = socket.as_fd().as_raw_fd();
        // Headers that the kernel is done with, and the datagram that comes next.
        let (mut done, mut next) = (0, first);
        while done < self.headers.len() {
            let rest = &mut self.headers[done..];
            let count = libc::c_uint::try_from(rest.len()).unwrap_or(libc::c_uint::MAX);
            // SAFETY: every header leads to a name, iovecs and control memory in vectors of `self` that aren't
            // changed between `lay_out` and here, and the iovecs to `datagrams`, which is borrowed.
            let sent = unsafe { libc::sendmmsg(fd, rest.as_mut_ptr(), count, libc::MSG_DONTWAIT) };
            if let Ok(sent) = usize::try_from(sent)
                && sent > 0
            {
                next += self.counts[done..done + sent].iter().sum::<usize>();
                done += sent;
                continue;
            }
            match io::Error::last_os_error().raw_os_error() {
                Some(libc::EINTR) => continue,
                Some(libc::EAGAIN | libc::ENOBUFS) => {
                    self.refused.push(next..datagrams.len());
                    break;
                }
                // No segmentation on this way: every one by itself for a while.
                Some(libc::EIO | libc::EINVAL | libc::EMSGSIZE) if self.counts[done] > 1 => {
                    self.keep_apart(datagrams[next].0, now);
                    self.send_from(next, socket, datagrams, connected, now);
                    break;
                }
                _ => {
                    self.refused.push(next..next + self.counts[done]);
                    next += self.counts[done];
                    done += 1;
                }
            }
        }
    }

    fn keep_apart(&mut self, address: SocketAddr, now: Instant) {
        if self.apart.len() >= APART_MAX {
            self.apart.retain(|_, since| now - *since < APART);
        }
        if self.apart.len() >= APART_MAX {
            // Those that are still refused come back.
            self.apart.clear();
        }
        self.apart.insert(address, now);
    }

    /// How many of the first datagrams are sent as one.
    fn count_together(&mut self, datagrams: &[(SocketAddr, &[u8])], now: Instant) -> usize {
        if !self.can_join {
            return 1;
        }
        let count = joined(datagrams);
        // Mostly there is nothing to look up.
        if count == 1 || self.apart.is_empty() {
            return count;
        }
        match self.apart.get(&datagrams[0].0) {
            Some(since) if now - *since < APART => 1,
            Some(_) => {
                self.apart.remove(&datagrams[0].0);
                count
            }
            None => count,
        }
    }

    fn lay_out(&mut self, datagrams: &[(SocketAddr, &[u8])], connected: bool, now: Instant) {
        self.names.clear();
        self.controls.clear();
        self.iovecs.clear();
        self.headers.clear();
        self.counts.clear();
        for (_, payload) in datagrams {
            self.iovecs.push(libc::iovec {
                iov_base: payload.as_ptr().cast_mut().cast(),
                iov_len: payload.len(),
            });
        }
        let mut rest = datagrams;
        while let Some(&(address, first)) = rest.first() {
            let count = self.count_together(rest, now);
            self.names.push(storage_of(address));
            self.controls.push(segment_control(first.len()));
            self.counts.push(count);
            rest = &rest[count..];
        }
        let mut start = 0;
        for index in 0..self.counts.len() {
            let count = self.counts[index];
            // SAFETY: plain data, for which zeros are a value.
            let mut header: libc::mmsghdr = unsafe { mem::zeroed() };
            let message = &mut header.msg_hdr;
            if !connected {
                message.msg_name = (&raw mut self.names[index]).cast();
                message.msg_namelen = length_of(&self.names[index]);
            }
            message.msg_iov = &raw mut self.iovecs[start];
            message.msg_iovlen = count;
            if count > 1 {
                message.msg_control = self.controls[index].0.as_mut_ptr().cast();
                message.msg_controllen = segment_control_length();
            }
            self.headers.push(header);
            start += count;
        }
    }
}

/// How many of the first datagrams can be sent as one: of one address and length, the last may be shorter.
fn joined(datagrams: &[(SocketAddr, &[u8])]) -> usize {
    let (address, first) = datagrams[0];
    let mut count = 1;
    let mut bytes = first.len();
    if first.is_empty() {
        return 1;
    }
    for (other, payload) in &datagrams[1..] {
        let fits = *other == address
            && !payload.is_empty()
            && payload.len() <= first.len()
            && bytes + payload.len() <= SEND_BYTES_MAX
            && count < SEGMENTS_MAX;
        if !fits {
            break;
        }
        count += 1;
        bytes += payload.len();
        if payload.len() < first.len() {
            break;
        }
    }
    count
}

fn segment_control_length() -> usize {
    // SAFETY: a computation on a number.
    unsafe { libc::CMSG_SPACE(2) as usize }
}

/// The control message that says how long each segment is.
fn segment_control(length: usize) -> Control {
    let mut control = Control([0; CONTROL_BYTES]);
    let segment = u16::try_from(length).unwrap_or(u16::MAX);
    // SAFETY: plain data, for which zeros are a value; a computation on a number.
    let (mut header, length) = unsafe { (mem::zeroed::<libc::cmsghdr>(), libc::CMSG_LEN(2)) };
    header.cmsg_len = length as usize;
    header.cmsg_level = libc::SOL_UDP;
    header.cmsg_type = libc::UDP_SEGMENT;
    // SAFETY: the memory is longer than header and value together, and aligned for the header.
    unsafe {
        let start = control.0.as_mut_ptr().cast::<libc::cmsghdr>();
        start.write(header);
        libc::CMSG_DATA(start)
            .cast::<u16>()
            .write_unaligned(segment);
    }
    control
}

fn socklen(length: usize) -> libc::socklen_t {
    libc::socklen_t::try_from(length).expect("addresses are short")
}

fn length_of(name: &libc::sockaddr_storage) -> libc::socklen_t {
    socklen(if libc::c_int::from(name.ss_family) == libc::AF_INET {
        mem::size_of::<libc::sockaddr_in>()
    } else {
        mem::size_of::<libc::sockaddr_in6>()
    })
}

fn storage_of(address: SocketAddr) -> libc::sockaddr_storage {
    // SAFETY: plain data, for which zeros are a value; both kinds of address fit into the storage and are no
    // stricter aligned.
    unsafe {
        let mut storage: libc::sockaddr_storage = mem::zeroed();
        let start = &raw mut storage;
        match address {
            SocketAddr::V4(address) => {
                let name = &mut *start.cast::<libc::sockaddr_in>();
                name.sin_family = crate::number::narrow(libc::AF_INET);
                name.sin_port = address.port().to_be();
                name.sin_addr.s_addr = u32::from_ne_bytes(address.ip().octets());
            }
            SocketAddr::V6(address) => {
                let name = &mut *start.cast::<libc::sockaddr_in6>();
                name.sin6_family = crate::number::narrow(libc::AF_INET6);
                name.sin6_port = address.port().to_be();
                name.sin6_addr.s6_addr = address.ip().octets();
                name.sin6_scope_id = address.scope_id();
            }
        }
        storage
    }
}

fn address_of(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    let start = &raw const *storage;
    match libc::c_int::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says that it is one, and the storage is longer and as strictly aligned.
            let name = unsafe { &*start.cast::<libc::sockaddr_in>() };
            let ip = Ipv4Addr::from(name.sin_addr.s_addr.to_ne_bytes());
            Some(SocketAddrV4::new(ip, u16::from_be(name.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let name = unsafe { &*start.cast::<libc::sockaddr_in6>() };
            let ip = Ipv6Addr::from(name.sin6_addr.s6_addr);
            let port = u16::from_be(name.sin6_port);
            Some(SocketAddrV6::new(ip, port, 0, name.sin6_scope_id).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    fn pair() -> (UdpSocket, UdpSocket) {
        let one = UdpSocket::bind("127.0.0.1:0").unwrap();
        let other = UdpSocket::bind("127.0.0.1:0").unwrap();
        for socket in [&one, &other] {
            socket.set_nonblocking(true).unwrap();
        }
        (one, other)
    }

    #[test]
    fn addresses_of_both_families_come_back() {
        for text in ["192.0.2.1:53", "[2001:db8::7]:65535", "[fe80::1%3]:1"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(address_of(&storage_of(address)), Some(address));
        }
    }

    #[test]
    fn datagrams_arrive_one_by_one_however_they_were_joined() {
        let (one, other) = pair();
        let to = other.local_addr().unwrap();
        let sizes = [200, 200, 200, 100, 300, 0, 300, 300];
        let payloads: Vec<Vec<u8>> = sizes.iter().map(|size| vec![7; *size]).collect();
        let datagrams: Vec<(SocketAddr, &[u8])> = payloads
            .iter()
            .map(|payload| (to, payload.as_slice()))
            .collect();
        let sent = Sender::default().send(&one, &datagrams, false, Instant::now());
        assert_eq!((sent.sent, sent.refused), (sizes.len(), 0));
        let mut receiver = Receiver::new(16, 2048);
        let count = receiver.receive(&other).unwrap();
        let lengths: Vec<usize> = (0..count)
            .map(|index| receiver.get(index).unwrap().payload.len())
            .collect();
        assert_eq!(lengths, sizes);
        assert_eq!(receiver.get(0).unwrap().from, one.local_addr().unwrap());
        let nothing = receiver.receive(&other).unwrap_err();
        assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn it_is_known_which_datagrams_the_kernel_has_refused() {
        let (one, other) = pair();
        let to = other.local_addr().unwrap();
        // Longer than any datagram, and of a family that the socket hasn't.
        let (long, strange) = (vec![7; 70_000], "[::1]:9".parse().unwrap());
        let datagrams: [(SocketAddr, &[u8]); 6] = [
            (to, &[7; 200]),
            (to, &[7; 200]),
            (to, &long),
            (to, &[7; 300]),
            (strange, &[7; 300]),
            (to, &[7; 300]),
        ];
        let mut sender = Sender::default();
        let sent = sender.send(&one, &datagrams, false, Instant::now());
        assert_eq!((sent.sent, sent.refused), (4, 2));
        let refused: Vec<usize> = (0..6).filter(|index| sender.has_refused(*index)).collect();
        assert_eq!(refused, [2, 4]);
        sender.send(&one, &datagrams[..2], false, Instant::now());
        assert!(!sender.has_refused(2));
    }

    #[test]
    fn datagrams_that_can_not_be_joined_keep_no_others_apart() {
        let (one, other) = pair();
        let (odd, _) = pair();
        // The kernel splits nothing for a socket without checksums.
        leave_out_checksums(&odd);
        let payload = [7; 200];
        let to_other: [(SocketAddr, &[u8]); 2] = [(other.local_addr().unwrap(), &payload); 2];
        let to_one: [(SocketAddr, &[u8]); 2] = [(one.local_addr().unwrap(), &payload); 2];
        let mut sender = Sender::default();
        let now = Instant::now();
        let both = [to_one, to_other].concat();
        let sent = sender.send(&odd, &both, false, now);
        assert_eq!((sent.sent, sent.refused), (4, 0));
        assert_eq!(sender.counts, [1, 1]);
        let sent = sender.send(&one, &to_other, false, now);
        assert_eq!(
            (sent.sent, sender.counts.as_slice()),
            (2, [1, 1].as_slice())
        );
        let third = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to_third: [(SocketAddr, &[u8]); 2] = [(third.local_addr().unwrap(), &payload); 2];
        let sent = sender.send(&one, &to_third, false, now);
        assert_eq!((sent.sent, sender.counts.as_slice()), (2, [2].as_slice()));
        // Ten seconds later it is tried again.
        let sent = sender.send(&one, &to_other, false, now + APART);
        assert_eq!((sent.sent, sender.counts.as_slice()), (2, [2].as_slice()));
        let mut receiver = Receiver::new(16, 2048);
        assert_eq!(receiver.receive(&other).unwrap(), 6);
    }

    #[test]
    fn addresses_that_are_kept_apart_are_bounded() {
        let mut sender = Sender::default();
        let now = Instant::now();
        for number in 0..10_000 {
            sender.keep_apart((Ipv4Addr::from_bits(number), 1).into(), now);
            assert!(sender.apart.len() <= APART_MAX);
        }
    }

    fn leave_out_checksums(socket: &UdpSocket) {
        let on: libc::c_int = 1;
        let length = socklen(mem::size_of_val(&on));
        let fd = socket.as_raw_fd();
        // SAFETY: the kernel reads one `int` behind the pointer, which lives until the call returns.
        let outcome = unsafe {
            libc::setsockopt(
                fd,
                libc::SOL_SOCKET,
                libc::SO_NO_CHECK,
                (&raw const on).cast(),
                length,
            )
        };
        assert_eq!(outcome, 0);
    }

    #[test]
    fn a_datagram_that_is_too_long_is_left_out() {
        let (one, other) = pair();
        one.send_to(&[1; 100], other.local_addr().unwrap()).unwrap();
        let mut receiver = Receiver::new(2, 50);
        assert_eq!(receiver.receive(&other).unwrap(), 1);
        assert_eq!(receiver.get(0), None);
    }

    #[test]
    fn only_neighbours_of_one_kind_are_joined() {
        let (one, other): (SocketAddr, SocketAddr) = (
            "192.0.2.1:1".parse().unwrap(),
            "192.0.2.1:2".parse().unwrap(),
        );
        let payload = [0_u8; 300];
        let short = &payload[..200];
        assert_eq!(joined(&[(one, &payload), (one, short), (one, short)]), 2);
        assert_eq!(joined(&[(one, short), (one, &payload)]), 1);
        assert_eq!(joined(&[(one, &payload), (other, &payload)]), 1);
        assert_eq!(joined(&[(one, &payload), (one, &[])]), 1);
        let many = vec![(one, &payload[..]); 1000];
        assert_eq!(joined(&many), SEGMENTS_MAX);
    }
}

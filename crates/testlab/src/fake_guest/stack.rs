//! The fake guest's network stack: smoltcp on a TAP, polled by the guest's one thread.
//!
//! `turn` waits for a frame for a moment, lets the stack work, and serves whoever called. Calls outward
//! are loops around `turn`, so the guest goes on answering while it waits.

use std::{
    cell::RefCell,
    collections::{BTreeMap, VecDeque},
    fs::File,
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    rc::Rc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use smoltcp::{
    iface::{Config, Interface, SocketHandle, SocketSet},
    phy::{ChecksumCapabilities, Device, DeviceCapabilities, Medium, RxToken, TxToken},
    socket::{icmp, tcp, udp},
    time::Instant as StackInstant,
    wire::{
        EthernetAddress, Icmpv4Packet, Icmpv4Repr, Icmpv6Packet, Icmpv6Repr, IpAddress, IpCidr,
        Ipv4Cidr,
    },
};

use super::{FRAMES_KEPT_MAX, GuestNetwork, frame};
use crate::tun;

/// An open TAP with an IP stack and servers on it.
pub(super) struct Stack {
    tap: Tap,
    interface: Interface,
    sockets: SocketSet<'static>,
    web: Vec<SocketHandle>,
    echo: Vec<SocketHandle>,
    udp_echo: SocketHandle,
    /// What the callers of the web server have sent so far.
    requests: BTreeMap<SocketHandle, Vec<u8>>,
    value: String,
    next_port: u16,
    network: GuestNetwork,
    /// When it last asked for its gateways, or began.
    asked_at: Instant,
}

impl Stack {
    pub(super) fn open(name: &str, network: GuestNetwork) -> Result<Self> {
        let mut tap = Tap::open(name)?;
        let now = StackInstant::now();
        let address = EthernetAddress(network.mac);
        let mut interface = Interface::new(Config::new(address.into()), &mut tap, now);
        let (mut fits, mut tap_arp) = (true, None);
        interface.update_ip_addrs(|addresses| {
            for (ip, length) in [
                (IpAddress::from(network.ipv4.0), network.ipv4.1),
                (network.ipv6.0.into(), network.ipv6.1),
                (link_local(network.mac), 64),
            ] {
                fits &= addresses.push(IpCidr::new(ip, length)).is_ok();
            }
            // This stack hears ARP answers of its own networks alone, and knows no gateway that is merely on the link.
            let own = Ipv4Cidr::new(network.ipv4.0, network.ipv4.1);
            if !own.contains_addr(&network.ipv4_gateway) {
                let beside = Ipv4Addr::from_bits(network.ipv4_gateway.to_bits() ^ 1);
                fits &= addresses.push(IpCidr::new(beside.into(), 31)).is_ok();
                tap_arp = Some((beside, network.ipv4.0));
            }
        });
        tap.arp = tap_arp;
        ensure!(fits, "the stack has no room for the guest's addresses");
        let routes = interface.routes_mut();
        routes.add_default_ipv4_route(network.ipv4_gateway)?;
        routes.add_default_ipv6_route(network.ipv6_gateway)?;
        let mut sockets = SocketSet::new(Vec::new());
        let mut several = |count: usize| -> Vec<SocketHandle> {
            (0..count).map(|_| sockets.add(tcp_socket())).collect()
        };
        let (web, echo) = (several(8), several(8));
        let udp_echo = sockets.add(udp_socket());
        sockets
            .get_mut::<udp::Socket>(udp_echo)
            .bind(ECHO_PORT)
            .context("receive on the echo port")?;
        Ok(Self {
            tap,
            interface,
            sockets,
            web,
            echo,
            udp_echo,
            requests: BTreeMap::new(),
            value: String::new(),
            next_port: 49_152,
            network,
            asked_at: Instant::now(),
        })
    }

    /// Waits up to a few milliseconds for a frame, and does what is to be done.
    pub(super) fn turn(&mut self) -> Result<()> {
        self.remember_gateways();
        let now = StackInstant::now();
        let next = self.interface.poll_delay(now, &self.sockets);
        let wait = next.map_or(TURN_MAX, |delay| Duration::from(delay).min(TURN_MAX));
        self.tap.wait(wait)?;
        let now = StackInstant::now();
        self.interface.poll(now, &mut self.tap, &mut self.sockets);
        self.tap.fault()?;
        self.serve_echo()?;
        self.serve_web()?;
        self.interface
            .poll(StackInstant::now(), &mut self.tap, &mut self.sockets);
        self.tap.fault()
    }

    /// Asks for its gateways before the stack forgets them, which it does after a minute; then it drops what it wants to send
    /// until it knows them again. A real guest goes on sending while it asks.
    fn remember_gateways(&mut self) {
        if self.asked_at.elapsed() < ASK_AGAIN {
            return;
        }
        self.asked_at = Instant::now();
        let GuestNetwork {
            mac,
            ipv4,
            ipv4_gateway,
            ipv6,
            ipv6_gateway,
        } = self.network;
        self.tap
            .send(&frame::arp_request(mac, ipv4.0, ipv4_gateway));
        self.tap
            .send(&frame::neighbour_solicitation(mac, ipv6.0, ipv6_gateway));
    }

    pub(super) fn send_frame(&mut self, frame: &[u8]) -> Result<()> {
        self.tap.send(frame);
        self.tap.fault()
    }

    pub(super) fn flood(&mut self, frames: &[Vec<u8>], span: Duration) -> Result<u64> {
        ensure!(!frames.is_empty(), "a flood of nothing");
        let (started, mut sent) = (Instant::now(), 0);
        while started.elapsed() < span {
            for frame in frames.iter().cycle().take(256) {
                self.tap.send(frame);
            }
            self.tap.fault()?;
            sent += 256;
        }
        Ok(sent)
    }

    pub(super) fn take_received(&mut self) -> Vec<Vec<u8>> {
        self.tap.received.drain(..).collect()
    }

    pub(super) fn ping(&mut self, target: IpAddr, patience: Duration) -> Result<Duration> {
        let identifier = self.take_port();
        let mut socket = icmp::Socket::new(icmp_buffer(), icmp_buffer());
        socket
            .bind(icmp::Endpoint::Ident(identifier))
            .context("bind the ping socket")?;
        let handle = self.sockets.add(socket);
        let result = self.ping_with(handle, identifier, target, patience);
        self.sockets.remove(handle);
        result
    }

    fn ping_with(
        &mut self,
        handle: SocketHandle,
        identifier: u16,
        target: IpAddr,
        patience: Duration,
    ) -> Result<Duration> {
        let started = Instant::now();
        let checksums = ChecksumCapabilities::default();
        let socket = self.sockets.get_mut::<icmp::Socket>(handle);
        match target {
            IpAddr::V4(_) => {
                let echo = Icmpv4Repr::EchoRequest {
                    ident: identifier,
                    seq_no: 1,
                    data: PING_PAYLOAD,
                };
                let bytes = socket.send(echo.buffer_len(), target.into())?;
                echo.emit(&mut Icmpv4Packet::new_unchecked(bytes), &checksums);
            }
            IpAddr::V6(target) => {
                let echo = Icmpv6Repr::EchoRequest {
                    ident: identifier,
                    seq_no: 1,
                    data: PING_PAYLOAD,
                };
                let source = self.interface.get_source_address_ipv6(&target);
                let bytes = socket.send(echo.buffer_len(), target.into())?;
                let mut packet = Icmpv6Packet::new_unchecked(bytes);
                echo.emit(&source, &target, &mut packet, &checksums);
            }
        }
        while started.elapsed() < patience {
            self.turn()?;
            let socket = self.sockets.get_mut::<icmp::Socket>(handle);
            while let Ok((bytes, from)) = socket.recv() {
                // 0 and 129: echo reply of ICMP and ICMPv6; anything else is an error message.
                if IpAddr::from(from) == target && matches!(bytes.first(), Some(0 | 129)) {
                    return Ok(started.elapsed());
                }
            }
        }
        bail!("no answer to a ping of {target} within {patience:?}")
    }

    /// The first answer, and who sent it.
    pub(super) fn exchange_udp(
        &mut self,
        target: SocketAddr,
        payload: &[u8],
        patience: Duration,
    ) -> Result<(Vec<u8>, SocketAddr)> {
        let port = self.take_port();
        let mut socket = udp_socket();
        socket.bind(port).context("bind a UDP port")?;
        socket
            .send_slice(
                payload,
                udp::UdpMetadata::from(smoltcp::wire::IpEndpoint::from(target)),
            )
            .context("send a UDP packet")?;
        let handle = self.sockets.add(socket);
        let started = Instant::now();
        let mut answer = None;
        while answer.is_none() && started.elapsed() < patience {
            self.turn()?;
            let socket = self.sockets.get_mut::<udp::Socket>(handle);
            let received = socket.recv().ok();
            answer = received.map(|(bytes, about)| {
                let from = SocketAddr::new(about.endpoint.addr.into(), about.endpoint.port);
                (bytes.to_vec(), from)
            });
        }
        self.sockets.remove(handle);
        answer.with_context(|| format!("no UDP answer from {target} within {patience:?}"))
    }

    pub(super) fn exchange_tcp(
        &mut self,
        target: SocketAddr,
        payload: &[u8],
        patience: Duration,
    ) -> Result<Vec<u8>> {
        let port = self.take_port();
        let mut socket = tcp_socket();
        socket
            .connect(self.interface.context(), target, port)
            .context("connect")?;
        let handle = self.sockets.add(socket);
        let result = self.exchange_tcp_with(handle, target, payload, patience);
        self.sockets.get_mut::<tcp::Socket>(handle).abort();
        let turned = self.turn();
        self.sockets.remove(handle);
        turned.and(result)
    }

    fn exchange_tcp_with(
        &mut self,
        handle: SocketHandle,
        target: SocketAddr,
        payload: &[u8],
        patience: Duration,
    ) -> Result<Vec<u8>> {
        let started = Instant::now();
        let (mut sent, mut answer, mut connected) = (0, Vec::new(), false);
        while started.elapsed() < patience {
            self.turn()?;
            let socket = self.sockets.get_mut::<tcp::Socket>(handle);
            connected |= socket.may_send();
            if connected && sent < payload.len() && socket.can_send() {
                sent += socket.send_slice(&payload[sent..])?;
            }
            if connected && sent == payload.len() {
                socket.close();
            }
            while socket.can_recv() {
                socket.recv(|bytes| {
                    answer.extend_from_slice(bytes);
                    (bytes.len(), ())
                })?;
            }
            match socket.state() {
                tcp::State::TimeWait | tcp::State::Closed if connected => return Ok(answer),
                tcp::State::Closed => bail!("connection to {target} refused"),
                _ => {}
            }
        }
        let stage = if connected { "answered" } else { "connected" };
        bail!("not {stage} by {target} within {patience:?}")
    }

    fn serve_echo(&mut self) -> Result<()> {
        let socket = self.sockets.get_mut::<udp::Socket>(self.udp_echo);
        while let Ok((bytes, from)) = socket.recv() {
            // With the address that was called as the source: left to itself, the stack takes its
            // link-local one for whoever is off the link.
            let (bytes, to) = (bytes.to_vec(), from);
            // A full queue loses it, as a network would.
            let _ = socket.send_slice(&bytes, to);
        }
        for handle in &self.echo {
            let socket = self.sockets.get_mut::<tcp::Socket>(*handle);
            keep_listening(socket, ECHO_PORT)?;
            while socket.can_recv() && socket.send_queue() == 0 {
                let bytes = socket.recv(|bytes| (bytes.len(), bytes.to_vec()))?;
                socket.send_slice(&bytes)?;
            }
            if !socket.may_recv() && socket.may_send() && socket.send_queue() == 0 {
                socket.close();
            }
        }
        Ok(())
    }

    fn serve_web(&mut self) -> Result<()> {
        for handle in &self.web {
            let socket = self.sockets.get_mut::<tcp::Socket>(*handle);
            if !socket.is_open() {
                self.requests.remove(handle);
            }
            keep_listening(socket, WEB_PORT)?;
            let request = self.requests.entry(*handle).or_default();
            while socket.can_recv() {
                socket.recv(|bytes| {
                    request.extend_from_slice(bytes);
                    (bytes.len(), ())
                })?;
            }
            let Some((method, body)) = whole_request(request) else {
                continue;
            };
            if method == "PUT" || method == "POST" {
                self.value = body;
            }
            let length = self.value.len();
            let answer = format!(
                "HTTP/1.0 200 OK\r\nContent-Length: {length}\r\n\r\n{}",
                self.value
            );
            if socket.can_send() {
                socket.send_slice(answer.as_bytes())?;
            }
            socket.close();
            request.clear();
        }
        Ok(())
    }

    fn take_port(&mut self) -> u16 {
        self.next_port = self.next_port.checked_add(1).unwrap_or(49_152);
        self.next_port
    }
}

/// The method and body of a request, once it is complete.
fn whole_request(bytes: &[u8]) -> Option<(String, String)> {
    let text = String::from_utf8_lossy(bytes);
    let (head, body) = text.split_once("\r\n\r\n")?;
    let method = head.split(' ').next()?.to_owned();
    let length = head
        .lines()
        .find_map(|line| {
            let (name, value) = line.split_once(':')?;
            let length = value.trim().parse::<usize>().ok()?;
            name.eq_ignore_ascii_case("content-length")
                .then_some(length)
        })
        .unwrap_or(0);
    (body.len() >= length).then(|| (method, body[..length].to_owned()))
}

fn keep_listening(socket: &mut tcp::Socket<'_>, port: u16) -> Result<()> {
    if !socket.is_open() {
        socket.listen(port).context("listen")?;
    }
    Ok(())
}

/// The address that the kernel would make from the Ethernet address.
fn link_local(mac: [u8; 6]) -> IpAddress {
    let [a, b, c, d, e, f] = mac.map(u16::from);
    IpAddress::v6(
        0xfe80,
        0,
        0,
        0,
        ((a ^ 2) << 8) | b,
        (c << 8) | 0xff,
        0xfe00 | d,
        (e << 8) | f,
    )
}

fn tcp_socket() -> tcp::Socket<'static> {
    let buffer = || tcp::SocketBuffer::new(vec![0; 16 * 1024]);
    tcp::Socket::new(buffer(), buffer())
}

fn udp_socket() -> udp::Socket<'static> {
    let buffer = || udp::PacketBuffer::new(vec![udp::PacketMetadata::EMPTY; 32], vec![0; 65_536]);
    udp::Socket::new(buffer(), buffer())
}

fn icmp_buffer() -> icmp::PacketBuffer<'static> {
    icmp::PacketBuffer::new(vec![icmp::PacketMetadata::EMPTY; 8], vec![0; 4096])
}

/// Longest time that `turn` waits, so that requests are noticed.
const TURN_MAX: Duration = Duration::from_millis(2);
/// Well before smoltcp's 60 s, for the answers to come in time on a slow machine too.
const ASK_AGAIN: Duration = Duration::from_secs(20);
const ECHO_PORT: u16 = 7;
const WEB_PORT: u16 = 80;
const PING_PAYLOAD: &[u8] = b"sandwire fake guest";
const FRAME_MAX: usize = 1514;

/// An open TAP. The first error of the kernel is kept and ends the guest at its next turn: smoltcp's
/// tokens can't return one.
struct Tap {
    file: Rc<File>,
    fault: Rc<RefCell<Option<std::io::Error>>>,
    arp: ArpSource,
    received: VecDeque<Vec<u8>>,
}

impl Tap {
    fn open(name: &str) -> Result<Self> {
        ensure!(
            std::path::Path::new("/proc/thread-self/net/dev").exists(),
            "no /proc to look for the TAP {name} in"
        );
        let interfaces = std::fs::read_to_string("/proc/thread-self/net/dev")?;
        // Opening would create it.
        ensure!(
            interfaces
                .lines()
                .any(|line| line.trim_start().starts_with(&format!("{name}:"))),
            "no TAP {name} in this namespace"
        );
        Ok(Self {
            file: Rc::new(tun::open(name, Medium::Ethernet)?),
            fault: Rc::default(),
            arp: None,
            received: VecDeque::new(),
        })
    }

    fn wait(&self, patience: Duration) -> Result<()> {
        let mut descriptors = [PollFd::new(&*self.file, PollFlags::IN)];
        let patience = Timespec::try_from(patience).context("a wait out of range")?;
        match poll(&mut descriptors, Some(&patience)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error).context("wait for the TAP"),
        }
    }

    fn send(&self, frame: &[u8]) {
        let sender = Sender {
            file: Rc::clone(&self.file),
            fault: Rc::clone(&self.fault),
            arp: self.arp,
        };
        sender.send(frame);
    }

    fn fault(&self) -> Result<()> {
        match self.fault.borrow_mut().take() {
            Some(error) => Err(error).context("the fake guest's TAP failed"),
            None => Ok(()),
        }
    }
}

impl Device for Tap {
    type RxToken<'a> = Frame;
    type TxToken<'a> = Sender;

    fn receive(&mut self, _now: StackInstant) -> Option<(Frame, Sender)> {
        let mut bytes = vec![0; FRAME_MAX];
        match (&*self.file).read(&mut bytes) {
            Ok(length) => bytes.truncate(length),
            Err(error) => {
                if error.kind() != ErrorKind::WouldBlock {
                    *self.fault.borrow_mut() = Some(error);
                }
                return None;
            }
        }
        if self.received.len() == FRAMES_KEPT_MAX {
            self.received.pop_front();
        }
        self.received.push_back(bytes.clone());
        self.transmit(StackInstant::ZERO)
            .map(|sender| (Frame(bytes), sender))
    }

    fn transmit(&mut self, _now: StackInstant) -> Option<Sender> {
        Some(Sender {
            file: Rc::clone(&self.file),
            fault: Rc::clone(&self.fault),
            arp: self.arp,
        })
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = FRAME_MAX;
        capabilities
    }
}

struct Frame(Vec<u8>);

impl RxToken for Frame {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, work: F) -> R {
        work(&self.0)
    }
}

/// An address of the stack by which it mustn't ask for others, and that by which it asks.
type ArpSource = Option<(Ipv4Addr, Ipv4Addr)>;

struct Sender {
    file: Rc<File>,
    fault: Rc<RefCell<Option<std::io::Error>>>,
    arp: ArpSource,
}

impl Sender {
    fn send(&self, frame: &[u8]) {
        match (&*self.file).write(frame) {
            Ok(_) => {}
            // A full queue loses the frame, as a network would.
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => *self.fault.borrow_mut() = Some(error),
        }
    }
}

impl TxToken for Sender {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, work: F) -> R {
        let mut frame = vec![0; length];
        let result = work(&mut frame);
        let is_arp = frame.get(12..14) == Some(&[0x08, 0x06]);
        if let (true, Some((from, to)), Some(sender)) = (is_arp, self.arp, frame.get_mut(28..32))
            && *sender == from.octets()
        {
            sender.copy_from_slice(&to.octets());
        }
        self.send(&frame);
        result
    }
}

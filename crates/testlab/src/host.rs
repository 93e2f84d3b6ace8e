//! Lets a lab play a host: an uplink, and a world beyond it with servers that say who called.
//!
//! ```text
//!   lab (the host)                           namespace "beyond"
//!   up0 203.0.113.1/24  ── veth ──  eth0 203.0.113.2/24   HTTP 80, echo 7 and who-am-I 9 (TCP, UDP)
//!       2001:db8:1::1/64                 2001:db8:1::2/64
//! ```
//! Beyond knows no route but to the uplink's own networks, so a packet that left the host with a clone
//! or guest address as its source is never answered: what is answered was masqueraded.

mod udp;

use std::{
    fs,
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

pub use udp::serve_udp;

use crate::{command, namespace::Namespace};

/// The host's interface to the world beyond.
pub const UPLINK: &str = "up0";
/// The host's own IPv4 address on the uplink.
pub const HOST_IPV4: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);
/// The host's own IPv6 address on the uplink.
pub const HOST_IPV6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 1);
/// IPv4 address of the server beyond.
pub const BEYOND_IPV4: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 2);
/// IPv6 address of the server beyond.
pub const BEYOND_IPV6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 2);
/// Port that answers every HTTP request with `beyond: hello ADDRESS` of the caller.
pub const HTTP_PORT: u16 = 80;
/// Port that sends back what it gets, TCP and UDP.
pub const ECHO_PORT: u16 = 7;
/// Port that answers with the caller's address and port, TCP and UDP.
pub const WHO_AM_I_PORT: u16 = 9;

/// Not the peer's index: the kernel takes an interface whose peer has the same index for a physical one
/// and queues its carrier's changes behind those of all other namespaces, up to seconds
/// (`linkwatch_urgent_event` in net/core/link_watch.c).
const UPLINK_INDEX: u32 = 1000;

/// The world beyond the host's uplink.
#[derive(Debug)]
pub struct Beyond {
    namespace: Namespace,
}

impl Beyond {
    /// Gives the calling thread's network namespace an uplink with servers behind it. Turns
    /// forwarding on nowhere: that is the product's task.
    ///
    /// # Errors
    /// If `ip` fails or a server can't listen.
    pub fn attach() -> Result<Self> {
        let beyond = Self {
            namespace: Namespace::create("beyond")?,
        };
        beyond.connect()?;
        beyond.namespace.inside(|| {
            serve_tcp(HTTP_PORT, answer_http)?;
            serve_tcp(ECHO_PORT, echo)?;
            serve_tcp(WHO_AM_I_PORT, say_caller)?;
            serve_udp(ECHO_PORT, |packet, _| packet.to_vec())?;
            serve_udp(WHO_AM_I_PORT, |_, caller| caller_text(caller).into_bytes())
        })?;
        // The kernel may tell IPv6 of a new carrier late.
        for server in servers() {
            wait_for_server(SocketAddr::new(server, HTTP_PORT), Duration::from_secs(10))?;
        }
        Ok(beyond)
    }

    /// Makes the uplink, with addresses and default routes: also again, after somebody deleted it.
    ///
    /// # Errors
    /// If `ip` fails.
    pub fn connect(&self) -> Result<()> {
        command::run(&format!(
            "ip link add {UPLINK} index {UPLINK_INDEX} type veth peer name eth0 netns beyond"
        ))?;
        command::run(&format!("ip address add {HOST_IPV4}/24 dev {UPLINK}"))?;
        command::run(&format!("ip link set {UPLINK} up"))?;
        self.run(&format!("ip address add {BEYOND_IPV4}/24 dev eth0"))?;
        self.run("ip link set eth0 up")?;
        command::run(&format!("ip route add default via {BEYOND_IPV4}"))?;
        if has_ipv6() {
            command::run(&format!("ip address add {HOST_IPV6}/64 dev {UPLINK} nodad"))?;
            self.run(&format!("ip address add {BEYOND_IPV6}/64 dev eth0 nodad"))?;
            command::run(&format!("ip -6 route add default via {BEYOND_IPV6}"))?;
        }
        Ok(())
    }

    /// Takes the uplink away, as if its card were pulled.
    ///
    /// # Errors
    /// If `ip` fails.
    pub fn disconnect(&self) -> Result<()> {
        command::run(&format!("ip link delete {UPLINK}"))?;
        Ok(())
    }

    /// File of its namespace.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.namespace.path()
    }

    /// Runs a line of words in it and returns its standard output.
    ///
    /// # Errors
    /// Also if the command ends with a status other than 0.
    pub fn run(&self, line: &str) -> Result<String> {
        self.namespace.run(line)
    }

    /// Runs a closure on a thread in it.
    ///
    /// # Errors
    /// If the closure fails.
    pub fn inside<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        self.namespace.inside(work)
    }

    /// Lets it answer to a prefix (of clone addresses) through the host, as a pool with routed
    /// clone addresses needs it.
    ///
    /// # Errors
    /// If `ip` fails.
    pub fn route_through_host(&self, prefix: &str) -> Result<()> {
        let gateway: IpAddr = if prefix.contains(':') {
            HOST_IPV6.into()
        } else {
            HOST_IPV4.into()
        };
        self.run(&format!("ip route add {prefix} via {gateway}"))?;
        Ok(())
    }
}

/// Whether the host has IPv6: not if it was booted with `ipv6.disable=1`, nor where it is switched off.
fn has_ipv6() -> bool {
    let off = fs::read_to_string("/proc/sys/net/ipv6/conf/all/disable_ipv6");
    off.is_ok_and(|off| off.trim() == "0")
}

/// The addresses of the server beyond, of the IP versions that there are.
fn servers() -> Vec<IpAddr> {
    let ipv6 = has_ipv6().then_some(BEYOND_IPV6.into());
    [IpAddr::from(BEYOND_IPV4)]
        .into_iter()
        .chain(ipv6)
        .collect()
}

/// The wildcard of all IP versions that there are.
fn wildcard() -> IpAddr {
    if has_ipv6() {
        Ipv6Addr::UNSPECIFIED.into()
    } else {
        Ipv4Addr::UNSPECIFIED.into()
    }
}

/// Listens on a TCP port of all addresses of the calling thread's namespace, IPv4 and IPv6, and
/// answers each connection on a thread of its own until the process ends.
///
/// # Errors
/// If the port can't be had.
pub fn serve_tcp(port: u16, answer: fn(TcpStream) -> std::io::Result<()>) -> Result<()> {
    let listener =
        TcpListener::bind((wildcard(), port)).with_context(|| format!("listen on {port}"))?;
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // A caller that goes away early is its own affair.
            thread::spawn(move || answer(stream));
        }
    });
    Ok(())
}

/// Waits until a TCP server accepts connections.
///
/// # Errors
/// If it doesn't within the given time.
pub fn wait_for_server(server: SocketAddr, patience: Duration) -> Result<()> {
    let deadline = Instant::now() + patience;
    loop {
        match TcpStream::connect_timeout(&server, Duration::from_millis(100)) {
            Ok(_) => return Ok(()),
            Err(error) if Instant::now() >= deadline => {
                return Err(error).with_context(|| format!("wait for {server}"));
            }
            Err(_) => thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// Answers one HTTP request with the caller's address.
///
/// # Errors
/// If the caller goes away.
pub fn answer_http(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let caller = stream.peer_addr()?.ip().to_canonical();
    let mut request = [0; 2048];
    let mut length = 0;
    while !request[..length].windows(4).any(|end| end == b"\r\n\r\n") && length < request.len() {
        match stream.read(&mut request[length..])? {
            0 => return Ok(()),
            count => length += count,
        }
    }
    let body = format!("beyond: hello {caller}\n");
    write!(
        stream,
        "HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

fn echo(mut stream: TcpStream) -> std::io::Result<()> {
    let mut back = stream.try_clone()?;
    std::io::copy(&mut stream, &mut back).map(drop)
}

fn say_caller(mut stream: TcpStream) -> std::io::Result<()> {
    let caller = stream.peer_addr()?;
    stream.write_all(caller_text(caller).as_bytes())
}

fn caller_text(caller: SocketAddr) -> String {
    SocketAddr::new(caller.ip().to_canonical(), caller.port()).to_string()
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;
    use crate::{http, lab};

    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn the_world_beyond_answers_in_both_families() {
        lab::run(|_| {
            let _beyond = Beyond::attach().unwrap();
            let second = Duration::from_secs(1);
            for (server, host) in [
                (IpAddr::from(BEYOND_IPV4), IpAddr::from(HOST_IPV4)),
                (BEYOND_IPV6.into(), HOST_IPV6.into()),
            ] {
                let answer = http::request(server, HTTP_PORT, "GET", "/", None, second).unwrap();
                assert_eq!(answer.body, format!("beyond: hello {host}\n"));
                let socket = UdpSocket::bind((host, 0)).unwrap();
                socket.set_read_timeout(Some(second)).unwrap();
                socket.send_to(b"?", (server, WHO_AM_I_PORT)).unwrap();
                let mut packet = [0; 100];
                let (length, from) = socket.recv_from(&mut packet).unwrap();
                assert_eq!(from, SocketAddr::new(server, WHO_AM_I_PORT));
                let own = socket.local_addr().unwrap().to_string();
                assert_eq!(packet[..length], *own.as_bytes());
            }
        });
    }
}

//! The configuration: one TOML file for both roles.
//!
//! Texts become checked values here, and each error names the key that it is about. What is in other files
//! (certificates, cgroups) is looked at when it is used.

mod change;
mod owners;
mod ports;
mod text;

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use rustls::pki_types::ServerName;
use sandwire_api::policy::CLOUD_METADATA;

pub use ports::{PortRange, Protocol};

use self::owners::Owners;
use crate::wire::NAME_BYTES_MAX;

/// Where the file is unless told otherwise.
pub const DEFAULT_PATH: &str = "/etc/sandwire/relay.toml";
/// Cgroups that may have a sender's name, each with a listening port of its own.
pub const CGROUPS_MAX: usize = 64;
/// Connections whose other end doesn't read that a relay has room for at least: one for each of two hosts.
pub const UNREAD_PARTS_MIN: usize = 2;

/// Why a file is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// It can't be read.
    #[error("cannot read the relay's configuration {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// It isn't TOML, or has keys that there aren't.
    #[error("the relay's configuration {path}: {source}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: Box<toml::de::Error>,
    },
    /// A value makes no sense.
    #[error("the relay's configuration {path}: {key}: {reason}")]
    Value {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// What is wrong and what to do.
        reason: String,
    },
}

/// Everything that the relay is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Folder of the socket for metrics.
    pub folder: PathBuf,
    /// Where the report of connections goes: a file, or standard output.
    pub report: Option<PathBuf>,
    /// Certificates.
    pub tls: TlsFiles,
    /// Bounds.
    pub limits: Limits,
    /// The host's side, if it is one.
    pub egress: Option<Egress>,
    /// The peer's side, if it is one.
    pub deliver: Option<Deliver>,
}

/// Files in PEM form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// Our certificate, and those between it and an authority.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Who may sign certificates of other relays.
    pub authorities: PathBuf,
}

/// Bounds, each with a default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// TCP connections of one sender at once.
    pub connections_per_sender: usize,
    /// Pairs of addresses of one sender between which datagrams go.
    pub flows_per_sender: usize,
    /// TCP connections of all senders at once, at the host.
    pub connections: usize,
    /// Pairs of addresses of all senders, at the host.
    pub flows: usize,
    /// TCP connections of one host at once, at the peer, whatever senders it names.
    pub connections_per_host: usize,
    /// Pairs of addresses of one host, at the peer, whatever senders it names.
    pub flows_per_host: usize,
    /// Connections of hosts that haven't begun: not yet in TLS, or before their first bytes in it. At the host: those of
    /// addresses of which the daemon is asked whose they are.
    pub openings: usize,
    /// Bytes that are buffered for each direction of a connection.
    pub buffer_bytes: usize,
    /// Bytes that are held for all connections in QUIC whose other end doesn't read; by the machine's memory if it isn't said.
    pub unread_bytes: Option<usize>,
    /// Bytes of datagrams that wait for a peer; further ones are dropped.
    pub datagram_queue_bytes: usize,
    /// Sockets that answer in the name of somebody else, kept for the next answer.
    pub answer_sockets: usize,
    /// How long a TCP connection may be silent.
    pub tcp_idle: Duration,
    /// How long what was sent on a TCP connection may go unanswered.
    pub tcp_unanswered: Duration,
    /// How long datagrams between two addresses may be silent.
    pub udp_idle: Duration,
    /// How long a connection may take to be made, to a peer and to a destination.
    pub connect: Duration,
}

impl Limits {
    /// Bytes that may be held for one connection in QUIC whose other end doesn't read, with all that is around them.
    #[must_use]
    pub fn unread_part_bytes(&self) -> usize {
        self.buffer_bytes.saturating_mul(16)
    }
}

/// The host's side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Egress {
    /// Ports of ours, TCP and UDP, on the loopback: this one for senders with addresses, those after it for
    /// cgroups.
    pub listen_port: u16,
    /// The daemon whose leases are senders.
    pub daemon: Option<PathBuf>,
    /// What times between attempts are drawn from.
    pub seed: u64,
    /// Relays that deliver.
    pub peers: Vec<Peer>,
    /// Senders that are no leases.
    pub senders: Vec<Sender>,
    /// What is redirected.
    pub redirects: Vec<Redirect>,
    /// Whose an address or a cgroup's place is: made of `senders`.
    owners: Owners,
}

/// A relay that delivers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its name here.
    pub name: String,
    /// Where it listens, by UDP and TCP.
    pub address: SocketAddr,
    /// Name that its certificate must have.
    pub server_name: ServerName<'static>,
    /// How it is spoken to.
    pub transport: Transport,
}

/// How a peer is spoken to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// TCP in TLS connections, datagrams by QUIC, or in TLS where QUIC doesn't get through.
    #[default]
    Auto,
    /// All by QUIC.
    Quic,
    /// All in TLS connections.
    Tls,
}

/// A sender that is no lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sender {
    /// What it is called.
    pub name: Arc<str>,
    /// How it is known.
    pub origin: Origin,
}

/// How a sender is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Its packets come in with these sources.
    Forwarded(Vec<IpNet>),
    /// Processes of this host send from these addresses: an identity.
    Identity(Vec<IpNet>),
    /// Processes of a cgroup, or of one below it.
    Cgroup {
        /// The cgroup.
        path: PathBuf,
        /// Which of the ports after [`Egress::listen_port`] is its own, from 1. It keeps it as long as the relay runs.
        place: u16,
    },
}

impl Egress {
    /// The sender that has an address, by the longest prefix.
    pub(crate) fn sender_of(&self, address: IpAddr) -> Option<&Sender> {
        self.senders.get(self.owners.of_address(address)?)
    }

    /// The sender whose cgroup has that place.
    pub(crate) fn sender_at(&self, place: u16) -> Option<&Sender> {
        self.senders.get(self.owners.of_place(place)?)
    }
}

impl Origin {
    /// Whether that address says that it is this sender.
    #[must_use]
    pub fn has(&self, address: IpAddr) -> bool {
        let mut prefixes = self.prefixes().iter();
        prefixes.any(|prefix| prefix.contains(&address))
    }

    /// Its addresses, if it is known by these.
    pub(crate) fn prefixes(&self) -> &[IpNet] {
        match self {
            Self::Forwarded(prefixes) | Self::Identity(prefixes) => prefixes,
            Self::Cgroup { .. } => &[],
        }
    }
}

/// What is redirected, and by whom it is delivered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Redirect {
    /// Sources of packets that come in.
    pub from: Vec<IpNet>,
    /// Senders, by their place in [`Egress::senders`].
    pub senders: Vec<usize>,
    /// Destinations.
    pub to: Vec<IpNet>,
    /// Protocols, each once. What has another goes nowhere, where both are redirected on all ports.
    pub protocols: Vec<Protocol>,
    /// Ports of destinations.
    pub ports: Vec<PortRange>,
    /// The peer, by its place in [`Egress::peers`].
    pub via: usize,
}

/// The peer's side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deliver {
    /// Where to listen, by UDP and TCP.
    pub listen: Vec<SocketAddr>,
    /// Names of which a host's certificate must have one.
    pub clients: Vec<ServerName<'static>>,
    /// Where it may deliver.
    pub allow: Vec<IpNet>,
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(path, &text)
    }

    /// Reads a text; the path is for errors.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        text::parse(path, text)
    }
}

impl Redirect {
    /// Whether it covers that destination.
    ///
    /// The loopback is each machine's own: only a prefix that has nothing else in it means that of the peer.
    #[must_use]
    pub fn covers(&self, protocol: Protocol, destination: SocketAddr) -> bool {
        let ip = destination.ip();
        let loopback = LOOPBACK.iter().find(|prefix| prefix.contains(&ip));
        self.protocols.contains(&protocol)
            && self
                .ports
                .iter()
                .any(|ports| ports.contains(destination.port()))
            && self
                .to
                .iter()
                .filter(|prefix| prefix.contains(&ip))
                .any(|prefix| loopback.is_none_or(|loopback| loopback.contains(prefix)))
    }

    /// Destinations of who has a loopback in common with us.
    pub(crate) fn to_from_here(&self) -> Vec<IpNet> {
        self.to.iter().copied().flat_map(without_loopback).collect()
    }

    /// Whether nothing of what its senders have for its destinations may go another way.
    #[must_use]
    pub fn takes_all(&self) -> bool {
        let has = |protocol| self.protocols.contains(protocol);
        self.ports.contains(&PortRange::ALL) && Protocol::ALL.iter().all(has)
    }
}

impl Deliver {
    /// Whether it may deliver there.
    ///
    /// What is special (loopback, the own network's addresses, cloud metadata, multicast) has to be allowed by a
    /// prefix that has nothing else in it.
    #[must_use]
    pub fn allows(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        let metadata = CLOUD_METADATA.map(IpNet::from);
        // It may be several: metadata is among link-local addresses.
        let special = SPECIAL.iter().chain(&metadata);
        let special: Vec<_> = special.filter(|prefix| prefix.contains(&address)).collect();
        let mut allow = self.allow.iter();
        allow.any(|allowed| {
            allowed.contains(&address) && special.iter().all(|special| special.contains(allowed))
        })
    }
}

/// A prefix as smaller ones that have nothing of the loopback in them, unless it has nothing else.
fn without_loopback(prefix: IpNet) -> Vec<IpNet> {
    let Some(hole) = LOOPBACK
        .iter()
        .find(|hole| prefix.contains(*hole) && prefix != **hole)
    else {
        return vec![prefix];
    };
    let mut rest = Vec::new();
    let mut around = prefix;
    while around != *hole {
        let Ok(halves) = around.subnets(around.prefix_len() + 1) else {
            break;
        };
        let (with, beside): (Vec<IpNet>, Vec<IpNet>) = halves.partition(|half| half.contains(hole));
        rest.extend(beside);
        around = with.first().copied().unwrap_or(*hole);
    }
    rest
}

const LOOPBACK: [IpNet; 2] = [ipv4([127, 0, 0, 0], 8), ipv6([0, 0, 0, 0, 0, 0, 0, 1], 128)];

/// Where nobody wants to be delivered by mistake, besides [`CLOUD_METADATA`].
const SPECIAL: [IpNet; 11] = [
    ipv4([0, 0, 0, 0], 8),
    ipv4([127, 0, 0, 0], 8),
    ipv4([169, 254, 0, 0], 16),
    ipv4([192, 0, 0, 0], 24),
    ipv4([224, 0, 0, 0], 4),
    ipv4([240, 0, 0, 0], 4),
    ipv6([0, 0, 0, 0, 0, 0, 0, 0], 128),
    ipv6([0, 0, 0, 0, 0, 0, 0, 1], 128),
    ipv6([0x64, 0xff9b, 0, 0, 0, 0, 0, 0], 96),
    ipv6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10),
    ipv6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8),
];

const fn ipv4([a, b, c, d]: [u8; 4], bits: u8) -> IpNet {
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), bits))
}

const fn ipv6([a, b, c, d, e, f, g, h]: [u16; 8], bits: u8) -> IpNet {
    IpNet::V6(Ipv6Net::new_assert(
        Ipv6Addr::new(a, b, c, d, e, f, g, h),
        bits,
    ))
}

/// Whether a text can be a sender's or a peer's name.
fn is_name(text: &str) -> bool {
    !text.is_empty() && text.len() <= NAME_BYTES_MAX && !text.chars().any(char::is_control)
}

#[cfg(test)]
mod tests;

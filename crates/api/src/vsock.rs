//! A lease's vsock channel: who may speak to whom by it, and what is going on in it.
//!
//! Addresses are those of the virtio specification (§5.10): a context identifier (CID) and a port, 32 bits
//! each. CIDs are scoped by tenant, so every clone of a snapshot may have the same one.

use std::{collections::BTreeMap, fmt, net::SocketAddr, str::FromStr};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::name::Name;

/// CID that a guest has unless something else is asked for: the first that isn't reserved.
pub const DEFAULT_GUEST_CID: u32 = 3;
/// CID by which every guest knows its host.
pub const HOST_CID: u32 = 2;

/// What owns the guest's vsock device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VsockKind {
    /// sandwire, as a vhost-user back end: QEMU, Cloud Hypervisor's generic vhost-user, crosvm.
    #[default]
    VhostUser,
    /// The VMM, with a Unix socket on the host: Firecracker, Cloud Hypervisor, libkrun.
    Hybrid,
}

/// What is asked of a channel when a lease is acquired.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct VsockRequest {
    /// What owns the device. Default: `vhost_user`.
    pub kind: VsockKind,
    /// CID that the guest has, at least 3. Default: 3.
    pub cid: Option<u32>,
    /// CID by which siblings of the same tenant may call this guest, if their policy names its lease. Unique
    /// in the tenant, at least 3. Default: none; siblings use the ports of their rules on CID 2.
    pub virtual_cid: Option<u32>,
    /// What the guest may reach. Default: the pool's, and that is nothing unless it says otherwise.
    pub policy: Option<VsockPolicy>,
}

/// What a guest may reach by vsock. What no rule names is refused with RST and counted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct VsockPolicy {
    /// Rules, at most 256; no two may cover the same port.
    pub rules: Vec<VsockRule>,
}

/// One rule: a port on CID 2, and where a connection to it leads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VsockRule {
    /// The port that the guest connects to, or a range of them: `1024`, `5000-5009`.
    #[schema(value_type = String, example = "1024")]
    pub port: PortRange,
    /// Where that leads.
    pub to: VsockDestination,
    /// Whether the destination is first told, in a line of its own, who calls:
    /// `SANDWIRE/1 tenant=1000 lease=web-1 cid=3 port=1024\n`. Default: false.
    #[serde(default)]
    pub identity: bool,
}

/// Where a connection from a guest leads.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case", tag = "kind", deny_unknown_fields)]
pub enum VsockDestination {
    /// The socket `PATH_PORT` beside the lease's own, made by whoever owns the lease; the convention of
    /// Firecracker and Cloud Hypervisor.
    Host,
    /// A Unix socket of the host. Only for root, and for those who may manage the pool as far as root has named it.
    Unix {
        /// Its absolute path.
        path: String,
    },
    /// A TCP service that the host can reach. As with a Unix socket.
    Tcp {
        /// Its address.
        #[schema(value_type = String)]
        address: SocketAddr,
    },
    /// A service of the host on AF_VSOCK, where the kernel has it. As with a Unix socket.
    Vsock {
        /// CID as the host's kernel knows it.
        cid: u32,
        /// Port.
        port: u32,
    },
    /// Another sandbox of this host.
    Sandbox {
        /// Its lease.
        lease: Name,
        /// Whose lease. Default: the same owner; another one only for those who may manage the pool.
        #[serde(default)]
        owner_uid: Option<u32>,
        /// Port in that guest. With a range, the first port of the range leads to this one, and so on.
        port: u32,
    },
}

/// What a lease's guest may reach by vsock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeaseVsockPolicy {
    /// Whether it is a policy of its own instead of its pool's.
    pub own: bool,
    /// The policy.
    pub policy: VsockPolicy,
}

/// Ports from `first` to `last`, both included. Written as `1024` or `5000-5009`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortRange {
    first: u32,
    last: u32,
}

/// Why a text is no [`PortRange`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{text}' is neither a port nor a range of ports: write 1024 or 5000-5009, up to 4294967294"
)]
pub struct InvalidPortRange {
    /// What was given, cut to a printable length.
    pub text: String,
}

impl PortRange {
    /// A single port. None for 4294967295, which the specification gives no socket (VMADDR_PORT_ANY).
    #[must_use]
    pub fn single(port: u32) -> Option<Self> {
        Self::new(port, port)
    }

    /// From `first` to `last`, both included. None if that is empty or has port 4294967295.
    #[must_use]
    pub fn new(first: u32, last: u32) -> Option<Self> {
        (first <= last && last != u32::MAX).then_some(Self { first, last })
    }

    /// The first port.
    #[must_use]
    pub fn first(self) -> u32 {
        self.first
    }

    /// The last port.
    #[must_use]
    pub fn last(self) -> u32 {
        self.last
    }

    /// Whether the port is one of them.
    #[must_use]
    pub fn contains(self, port: u32) -> bool {
        (self.first..=self.last).contains(&port)
    }

    /// Whether a port is in both.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}

impl FromStr for PortRange {
    type Err = InvalidPortRange;

    fn from_str(text: &str) -> Result<Self, InvalidPortRange> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        first
            .parse()
            .ok()
            .zip(last.parse().ok())
            .and_then(|(first, last)| Self::new(first, last))
            .ok_or_else(|| InvalidPortRange {
                text: text.chars().take(80).collect(),
            })
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last {
            write!(formatter, "{}", self.first)
        } else {
            write!(formatter, "{}-{}", self.first, self.last)
        }
    }
}

impl Serialize for PortRange {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PortRange {
    /// A single port may be a number, too.
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Number(i64),
            Text(String),
        }
        let text = match Written::deserialize(deserializer) {
            Ok(Written::Number(port)) => port.to_string(),
            Ok(Written::Text(text)) => text,
            Err(_) => {
                return Err(serde::de::Error::custom(
                    "a port or a range of ports is wanted: write \"1024\" or \"5000-5009\"",
                ));
            }
        };
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// A lease's channel, with all that a VMM and a client on the host need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VsockChannel {
    /// What owns the guest's device.
    pub kind: VsockKind,
    /// The guest's CID.
    pub cid: u32,
    /// CID by which siblings may call it.
    pub virtual_cid: Option<u32>,
    /// The Unix socket by which the host reaches the guest: connect, write `CONNECT PORT\n`, read `OK PORT\n`.
    /// With `hybrid` the VMM makes it; else it is there.
    #[schema(example = "/run/sandwire/vsock/web.17/vsock.sock")]
    pub socket: String,
    /// The same for SEQPACKET. Absent with `hybrid`: those VMMs have streams only.
    pub seqpacket_socket: Option<String>,
    /// The vhost-user socket for the VMM. Absent with `hybrid`.
    pub vhost_user_socket: Option<String>,
    /// What to tell QEMU; empty with `hybrid`.
    pub qemu_arguments: Vec<String>,
    /// What to tell Cloud Hypervisor; with `vhost_user` its v53 or a newer one.
    pub cloud_hypervisor_arguments: Vec<String>,
    /// Body of Firecracker's `PUT /vsock`, as JSON; absent with `vhost_user`.
    pub firecracker_vsock: Option<String>,
}

/// Type of a vsock socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum VsockType {
    /// Bytes in order, without boundaries.
    #[default]
    Stream,
    /// Messages in order.
    Seqpacket,
}

/// Why something of a guest or towards one was refused or cut off. Each is a counter of the VM.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum VsockRefusal {
    /// No rule of its policy covers the port.
    Policy,
    /// From or to CID 0, 1, the guest's own, or one that nobody has.
    Cid,
    /// The packet's source is not the guest's CID.
    ForgedSource,
    /// A header that makes no sense: unknown operation or type, length beyond the descriptors.
    Malformed,
    /// More than the credit that it was given.
    Credit,
    /// A packet for a connection that doesn't exist, or not in that state.
    NoConnection,
    /// Its limit of connections is reached.
    TooManyConnections,
    /// It opens connections faster than its limit allows.
    TooFast,
    /// Its limit of buffered bytes, or that of all guests, is reached.
    Memory,
    /// A SEQPACKET message over the ceiling.
    MessageTooLong,
    /// SEQPACKET towards a peer that only has streams.
    SeqpacketUnsupported,
    /// The destination couldn't be reached: no such socket, refused, no such sandbox.
    Unreachable,
    /// It didn't answer in time.
    TimedOut,
    /// A client of the host that said something else than `CONNECT PORT\n`.
    Handshake,
    /// A chain of descriptors that loops, leaves the guest's memory or has the wrong direction.
    BadDescriptors,
}

/// State of a connection, as far as the guest has been told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VsockState {
    /// One side has asked, the other hasn't answered.
    Connecting,
    /// Both may send.
    Established,
    /// The guest sends no more.
    GuestClosed,
    /// The peer sends no more.
    PeerClosed,
    /// Both send no more; what is in flight is being delivered.
    Closing,
}

/// One connection, as `sandwire vsock list` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VsockConnection {
    /// Lease of the guest.
    pub lease: Name,
    /// Whose lease.
    pub owner_uid: u32,
    /// Stream or messages.
    #[serde(rename = "type")]
    pub socket_type: VsockType,
    /// Whether the guest asked for it.
    pub from_guest: bool,
    /// The guest's CID.
    pub guest_cid: u32,
    /// The guest's port. Null with a hybrid channel, as are both credits: only the guest's VMM knows them.
    pub guest_port: Option<u32>,
    /// The other side's CID as the guest sees it.
    pub peer_cid: u32,
    /// The other side's port as the guest sees it.
    pub peer_port: u32,
    /// What the other side is: a path, an address, a lease, or `client` for whoever connected on the host.
    pub peer: String,
    /// State.
    pub state: VsockState,
    /// Bytes from the guest.
    pub egress_bytes: u64,
    /// Bytes to the guest.
    pub ingress_bytes: u64,
    /// Bytes that the guest may still be sent.
    pub peer_credit: Option<u32>,
    /// Bytes that the guest may still send.
    pub own_credit: Option<u32>,
    /// Bytes from the guest that the other side hasn't taken.
    pub queued_bytes: u64,
    /// Bytes to the guest that it hasn't been given: what the other side has sent meanwhile. Null where nothing tells: until it is
    /// connected, and of the host's AF_VSOCK before Linux 6.17.
    #[serde(default)]
    pub queued_ingress_bytes: Option<u64>,
    /// Milliseconds since it was asked for.
    pub age_milliseconds: u64,
}

/// Between whom a connection is.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum VsockClass {
    /// The guest called a service of the host.
    GuestToHost,
    /// A client of the host called the guest.
    HostToGuest,
    /// The guest called another one, or was called by it.
    GuestToGuest,
}

impl VsockClass {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::GuestToHost, Self::HostToGuest, Self::GuestToGuest];
}

/// Counters of a channel's connections of one class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct VsockClassTraffic {
    /// Connections now.
    pub connections: u64,
    /// Connections that the guest opened.
    pub opened_by_guest: u64,
    /// Connections that were opened towards the guest.
    pub opened_by_peers: u64,
    /// Bytes from the guest.
    pub egress_bytes: u64,
    /// Bytes to the guest.
    pub ingress_bytes: u64,
}

/// Counters of a channel since it was made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VsockTraffic {
    /// Whether a VMM is connected now. With `hybrid`: whether its socket is there.
    pub attached: bool,
    /// Connections now.
    pub connections: u64,
    /// Connections that the guest opened.
    pub opened_by_guest: u64,
    /// Connections that were opened towards the guest.
    pub opened_by_peers: u64,
    /// Bytes from the guest.
    pub egress_bytes: u64,
    /// Bytes to the guest.
    pub ingress_bytes: u64,
    /// Packets from the guest; 0 with `hybrid`, where the VMM has them.
    pub egress_packets: u64,
    /// Packets to the guest; 0 with `hybrid`.
    pub ingress_packets: u64,
    /// Bytes buffered for it now.
    pub buffered_bytes: u64,
    /// Packets that captures of it had no room for, since their readers were too slow: their files have gaps.
    #[serde(default)]
    pub capture_dropped_packets: u64,
    /// What was refused, by reason; reasons that never occurred are absent.
    pub refusals: BTreeMap<VsockRefusal, u64>,
    /// The same by who is connected with whom. Calls of the host to a `hybrid` guest are its VMM's, and not here.
    #[serde(default)]
    pub classes: BTreeMap<VsockClass, VsockClassTraffic>,
}

/// A lease's channel with its counters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeaseVsock {
    /// Name of the lease.
    pub lease: Name,
    /// Whose lease.
    pub owner_uid: u32,
    /// Its pool.
    pub pool: Name,
    /// The channel.
    pub channel: VsockChannel,
    /// Its counters. Absent while the service for vsock doesn't answer.
    pub traffic: Option<VsockTraffic>,
}

impl VsockTraffic {
    /// Adds the figures of another channel, or of another time: counters and what there is now alike.
    pub fn add(&mut self, other: &Self) {
        self.attached |= other.attached;
        self.connections += other.connections;
        self.opened_by_guest += other.opened_by_guest;
        self.opened_by_peers += other.opened_by_peers;
        self.egress_bytes += other.egress_bytes;
        self.ingress_bytes += other.ingress_bytes;
        self.egress_packets += other.egress_packets;
        self.ingress_packets += other.ingress_packets;
        self.buffered_bytes += other.buffered_bytes;
        self.capture_dropped_packets += other.capture_dropped_packets;
        for (reason, count) in &other.refusals {
            *self.refusals.entry(*reason).or_default() += count;
        }
        for (class, traffic) in &other.classes {
            self.classes.entry(*class).or_default().add(traffic);
        }
    }
}

impl VsockClassTraffic {
    fn add(&mut self, other: &Self) {
        self.connections += other.connections;
        self.opened_by_guest += other.opened_by_guest;
        self.opened_by_peers += other.opened_by_peers;
        self.egress_bytes += other.egress_bytes;
        self.ingress_bytes += other.ingress_bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_may_be_written_as_a_number() {
        let read = |port: &str| {
            let text = format!(r#"{{"rules": [{{"port": {port}, "to": {{"kind": "host"}}}}]}}"#);
            serde_json::from_str::<VsockPolicy>(&text).map(|policy| policy.rules[0].port)
        };
        assert_eq!(read("9000").unwrap(), PortRange::single(9000).unwrap());
        assert_eq!(
            read(r#""9000-9009""#).unwrap(),
            PortRange::new(9000, 9009).unwrap()
        );
        for wrong in ["-1", "4294967295", "1.5", r#""x""#, "[1]", "true"] {
            let error = read(wrong).unwrap_err().to_string();
            assert!(
                error.contains("1024") && error.contains("5000-5009"),
                "{wrong}: {error}"
            );
        }
    }
}

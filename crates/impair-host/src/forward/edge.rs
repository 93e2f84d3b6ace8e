//! How a forwarder fetches packets from its interfaces, and gives them to these.

use std::fmt;

use sandwire_engine::{
    Graph, GraphError,
    io::{Raw, Ring, Xdp},
};

/// Ethernet header and one VLAN tag.
const HEADER_BYTES: u32 = 18;
/// What an engine's packets can hold at most.
const FRAME_BYTES_MAX: u32 = 65_000;
/// What AF_XDP's buffers may have: the first is less memory.
const XDP_BUFFER_BYTES: [u32; 2] = [2048, 4096];

/// What fits a page with the headroom of XDP, in whose drivers whole packets lie: a veth takes 3506 bytes, some cards a few less.
const XDP_MTU_MAX: u32 = 3500;

/// How packets are fetched from interfaces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Edge {
    /// Rings: the fastest that leaves everything on the host as it is.
    #[default]
    Auto,
    /// Raw sockets: a system call for each packet.
    Raw,
    /// AF_PACKET rings.
    Ring,
    /// AF_XDP, of queue 0. It needs the offloads of whoever sends off, and turns them off while it runs where it can.
    Xdp,
}

impl Edge {
    /// Bytes that a frame is longer than the MTU: Ethernet, and VLAN tags.
    pub(super) fn header_bytes(self) -> u32 {
        match self {
            Self::Auto | Self::Raw | Self::Ring => HEADER_BYTES,
            Self::Xdp => Xdp::HEADER_BYTES,
        }
    }

    /// The largest MTU of an interface that packets are fetched from.
    pub(super) fn mtu_max(self) -> u32 {
        match self {
            Self::Auto | Self::Raw | Self::Ring => FRAME_BYTES_MAX - HEADER_BYTES,
            Self::Xdp => Xdp::mtu_max(XDP_BUFFER_BYTES[1]).min(XDP_MTU_MAX),
        }
    }
}

/// One of the two edges, as it is put into every graph.
#[derive(Clone, Debug)]
pub(super) enum EdgeApp {
    Raw(Raw),
    Ring(Ring),
    Xdp(Xdp),
}

impl EdgeApp {
    /// The one by which packets of that MTU are fetched.
    pub(super) fn new(edge: Edge, interface: &str, mtu: u32) -> Self {
        match edge {
            Edge::Raw => Self::Raw(Raw::interface(interface)),
            Edge::Auto | Edge::Ring => Self::Ring(Ring::interface(interface)),
            Edge::Xdp => {
                let xdp = Xdp::interface(interface);
                Self::Xdp(if mtu > Xdp::mtu_max(XDP_BUFFER_BYTES[0]) {
                    xdp.buffer_bytes(XDP_BUFFER_BYTES[1])
                } else {
                    xdp
                })
            }
        }
    }

    pub(super) fn add_to(&self, graph: &mut Graph, name: &str) -> Result<(), GraphError> {
        match self.clone() {
            Self::Raw(raw) => graph.app(name, raw)?,
            Self::Ring(ring) => graph.app(name, ring)?,
            Self::Xdp(xdp) => graph.app(name, xdp)?,
        };
        Ok(())
    }
}

impl fmt::Display for Edge {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Auto => "auto",
            Self::Raw => "raw sockets",
            Self::Ring => "AF_PACKET rings",
            Self::Xdp => "AF_XDP",
        })
    }
}

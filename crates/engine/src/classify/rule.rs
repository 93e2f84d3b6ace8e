//! Rules over headers.

use std::fmt;
use std::ops::RangeInclusive;

use ipnet::IpNet;
use thiserror::Error;

use super::{Headers, IpVersion};

/// A rule: what it leaves open matches anything, what it asks for must be there and be so.
///
/// The empty rule matches every frame. A rule that asks for a version, protocol, address or port matches only IP. One
/// that asks for ports matches only packets that have them: no ICMP, and of a fragmented datagram only the first
/// fragment. To hold all fragments of a flow, ask for addresses and protocol alone.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Match {
    /// IPv4 or IPv6.
    pub version: Option<IpVersion>,
    /// What the packet carries, by IANA's number.
    pub protocol: Option<u8>,
    /// Where it comes from.
    pub source: Option<IpNet>,
    /// Where it goes.
    pub destination: Option<IpNet>,
    /// From which port.
    pub source_ports: Option<RangeInclusive<u16>>,
    /// To which port.
    pub destination_ports: Option<RangeInclusive<u16>>,
    /// The identifier of the outermost VLAN tag.
    pub vlan: Option<u16>,
}

/// A rule that can't match anything.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum MatchError {
    /// Source, destination and version aren't all of one kind.
    #[error("rule {rule}: it asks for IPv4 and IPv6 at once; make two rules")]
    Versions {
        /// The rule.
        rule: String,
    },
    /// A range that ends before it starts.
    #[error("rule {rule}: {ports:?} is an empty range of ports; put the lower one first")]
    EmptyRange {
        /// The rule.
        rule: String,
        /// The range.
        ports: RangeInclusive<u16>,
    },
    /// A protocol without ports, but ports.
    #[error(
        "rule {rule}: protocol {protocol} has no ports; leave the ports out, or ask for tcp, udp or sctp"
    )]
    NoPorts {
        /// The rule.
        rule: String,
        /// The protocol.
        protocol: u8,
    },
    /// Past what a tag can say.
    #[error("rule {rule}: there is no VLAN {vlan}; the highest is 4095")]
    Vlan {
        /// The rule.
        rule: String,
        /// The identifier.
        vlan: u16,
    },
}

impl Match {
    /// Whether a frame with these headers is meant.
    #[must_use]
    pub fn matches(&self, headers: &Headers) -> bool {
        if self.vlan.is_some() && self.vlan != headers.vlan {
            return false;
        }
        let Some(ip) = &headers.ip else {
            return !self.asks_for_ip();
        };
        let in_range = |ports: &RangeInclusive<u16>, port: Option<u16>| {
            port.is_some_and(|port| ports.contains(&port))
        };
        let (from, to) = ip.ports.unzip();
        self.version.is_none_or(|version| version == ip.version)
            && self.protocol.is_none_or(|protocol| protocol == ip.protocol)
            && self.source.is_none_or(|net| net.contains(&ip.source))
            && self
                .destination
                .is_none_or(|net| net.contains(&ip.destination))
            && (self.source_ports.as_ref()).is_none_or(|ports| in_range(ports, from))
            && (self.destination_ports.as_ref()).is_none_or(|ports| in_range(ports, to))
    }

    /// Whether it asks for ports, so that later fragments never match.
    #[must_use]
    pub fn asks_for_ports(&self) -> bool {
        self.source_ports.is_some() || self.destination_ports.is_some()
    }

    /// The rule for the way back: with source and destination exchanged.
    #[must_use]
    pub fn reversed(&self) -> Self {
        Self {
            source: self.destination,
            destination: self.source,
            source_ports: self.destination_ports.clone(),
            destination_ports: self.source_ports.clone(),
            ..*self
        }
    }

    /// Finds what keeps it from ever matching.
    ///
    /// # Errors
    ///
    /// Says what that is.
    pub fn check(&self) -> Result<(), MatchError> {
        let version_of = |net: &IpNet| match net {
            IpNet::V4(_) => IpVersion::V4,
            IpNet::V6(_) => IpVersion::V6,
        };
        let nets = [&self.source, &self.destination].into_iter().flatten();
        let mut versions = nets.map(version_of).chain(self.version);
        let first = versions.next();
        let rule = || self.to_string();
        if versions.any(|version| Some(version) != first) {
            return Err(MatchError::Versions { rule: rule() });
        }
        let ranges = [&self.source_ports, &self.destination_ports];
        if let Some(ports) = ranges.into_iter().flatten().find(|ports| ports.is_empty()) {
            let ports = ports.clone();
            return Err(MatchError::EmptyRange {
                rule: rule(),
                ports,
            });
        }
        if let Some(protocol) = self.protocol
            && self.asks_for_ports()
            && !super::has_ports(protocol)
        {
            return Err(MatchError::NoPorts {
                rule: rule(),
                protocol,
            });
        }
        if let Some(vlan) = self.vlan
            && vlan > super::VLAN_ID_MASK
        {
            return Err(MatchError::Vlan { rule: rule(), vlan });
        }
        Ok(())
    }

    fn asks_for_ip(&self) -> bool {
        self.version.is_some()
            || self.protocol.is_some()
            || self.source.is_some()
            || self.destination.is_some()
            || self.asks_for_ports()
    }
}

impl fmt::Display for Match {
    /// As `ipv4 protocol 17 from 10.0.0.0/8 port 53 to 192.0.2.1/32 port 1024-65535 vlan 7`, or `anything`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        parts.extend(self.version.map(|version| version.to_string()));
        parts.extend(self.protocol.map(|protocol| format!("protocol {protocol}")));
        let ends = [
            ("from", &self.source, &self.source_ports),
            ("to", &self.destination, &self.destination_ports),
        ];
        for (word, net, ports) in ends {
            if net.is_some() || ports.is_some() {
                parts.push(word.to_owned());
            }
            parts.extend(net.map(|net| net.to_string()));
            parts.extend(
                ports
                    .as_ref()
                    .map(|ports| match ports.clone().into_inner() {
                        (first, last) if first == last => format!("port {first}"),
                        (first, last) => format!("port {first}-{last}"),
                    }),
            );
        }
        parts.extend(self.vlan.map(|vlan| format!("vlan {vlan}")));
        if parts.is_empty() {
            return f.write_str("anything");
        }
        f.write_str(&parts.join(" "))
    }
}

impl fmt::Display for IpVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "ipv4",
            Self::V6 => "ipv6",
        })
    }
}

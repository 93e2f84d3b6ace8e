//! Which destinations a policy allows.

use std::net::IpAddr;

use ipnet::IpNet;
use sandwire_api::drop_reason::DropReason;

use super::{
    Packet,
    packet::{ICMP, ICMPV6, TCP, UDP},
    world::{Policy, PortRule, Prefix},
};

/// Whether anything like a route to it exists.
pub(crate) fn destination(destination: IpAddr) -> Result<(), DropReason> {
    let unroutable = match destination {
        IpAddr::V4(address) => {
            if address.is_multicast() || address.is_broadcast() {
                return Err(DropReason::Multicast);
            }
            matches!(address.octets()[0], 0 | 127 | 240..)
        }
        IpAddr::V6(address) => {
            if address.is_multicast() {
                return Err(DropReason::Multicast);
            }
            address.is_unspecified()
                || address.is_loopback()
                || address.segments()[0] & 0xffc0 == 0xfe80
                || address.to_ipv4_mapped().is_some()
        }
    };
    if unroutable {
        return Err(DropReason::Destination);
    }
    Ok(())
}

/// Judges by the rules of the longest prefix, then by the default.
pub(crate) fn egress(policy: &Policy, frame: &[u8], packet: &Packet) -> Result<(), DropReason> {
    judge(policy, frame, packet, false)
}

/// The same for what may not leave at all, not even as a part that is of no use.
pub(crate) fn strictly(policy: &Policy, frame: &[u8], packet: &Packet) -> Result<(), DropReason> {
    judge(policy, frame, packet, true)
}

fn judge(
    policy: &Policy,
    frame: &[u8],
    packet: &Packet,
    is_strict: bool,
) -> Result<(), DropReason> {
    let prefix = longest(&policy.prefixes, packet.destination);
    let allowed = match prefix {
        None => policy.allow,
        Some(prefix) if prefix.rules.is_empty() => prefix.allow,
        Some(prefix) => prefix
            .rules
            .iter()
            .find(|rule| covers(rule, frame, packet, is_strict))
            .map_or(policy.allow, |rule| rule.allow),
    };
    if allowed {
        return Ok(());
    }
    let reason = prefix.and_then(|prefix| DropReason::from_number(prefix.reason));
    Err(reason.unwrap_or(DropReason::Policy))
}

pub(crate) fn longest(prefixes: &[Prefix], address: IpAddr) -> Option<&Prefix> {
    let covering = prefixes
        .iter()
        .filter(|prefix| match (prefix.net, address) {
            (IpNet::V4(net), IpAddr::V4(address)) => net.contains(&address),
            (IpNet::V6(net), IpAddr::V6(address)) => net.contains(&address),
            _ => false,
        });
    covering.max_by_key(|prefix| prefix.net.prefix_len())
}

/// Whether a rule covers the packet: by protocol and destination port, by protocol alone where there
/// are no ports. A further fragment of some of a protocol's ports is denied by none, unless strictly.
pub(crate) fn covers(rule: &PortRule, frame: &[u8], packet: &Packet, is_strict: bool) -> bool {
    let protocol = match (packet.protocol, packet.version) {
        (ICMPV6, 6) => ICMP,
        (other, _) => other,
    };
    if ![0, protocol, packet.protocol].contains(&rule.protocol) {
        return false;
    }
    if packet.is_later_fragment() && matches!(packet.protocol, TCP | UDP) {
        return is_strict || rule.allow || (rule.first <= 1 && rule.last == u16::MAX);
    }
    match packet.ports(frame) {
        Some((_, port)) if matches!(rule.protocol, TCP | UDP) => {
            (rule.first..=rule.last).contains(&port)
        }
        _ => true,
    }
}

/// Judges a packet to an address of the host itself.
pub(crate) fn host_service(
    policy: &Policy,
    frame: &[u8],
    packet: &Packet,
) -> Result<(), DropReason> {
    let icmp = if packet.version == 4 { ICMP } else { ICMPV6 };
    // Of later fragments only the protocol is known.
    let echo = policy.host_icmp
        && packet.protocol == icmp
        && (packet.is_echo_request(frame) || packet.is_later_fragment());
    let service = policy
        .services
        .iter()
        .any(|service| covers(service, frame, packet, true));
    if policy.host_all || echo || service {
        return Ok(());
    }
    Err(DropReason::HostService)
}

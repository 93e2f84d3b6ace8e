//! Routing as the kernel is told of it, one IP version after the other.
//!
//! A host may have IPv6 switched off: `net.ipv6.conf.all.disable_ipv6` has the route by the loopback refused, `ipv6.disable=1`
//! all of it. That is no reason to let IPv4 go its way.

use sandwire_kernel_net::{
    Error, interface,
    netlink::{Request, Socket},
    routing_rule::{self, Fate, RoutingRule, TABLE_PROHIBITED, Version},
};

use super::{Part, SteeringError, TABLE_LOCAL, parts};
use crate::config::Egress;

/// Tells the kernel of the routes of a version, and of those of these rules that are for it.
///
/// # Errors
/// What the kernel refused first. It has been told the rest.
pub(super) fn route(
    socket: &mut Socket,
    version: Version,
    rules: &[RoutingRule],
) -> Result<(), Error> {
    let loopback = interface::find(socket, "lo")?
        .ok_or_else(|| Error::missing_interface("lo"))?
        .index;
    let mut request = Request::new();
    routing_rule::set_default(&mut request, version, TABLE_LOCAL, Fate::Local(loopback));
    routing_rule::set_default(&mut request, version, TABLE_PROHIBITED, Fate::Prohibited);
    for rule in rules.iter().filter(|rule| rule.version == version) {
        rule.add(&mut request);
    }
    socket.execute(request)
}

/// Rules of ours that the kernel has, of both versions.
pub(super) fn listed(socket: &mut Socket) -> Result<Vec<RoutingRule>, SteeringError> {
    let mut rules = routing_rule::list(socket, TABLE_LOCAL)?;
    rules.extend(routing_rule::list(socket, TABLE_PROHIBITED)?);
    Ok(rules)
}

/// Whether anything of a version is redirected, so that the kernel has to know what there is for it.
pub(super) fn is_redirected(egress: &Egress, version: Version) -> bool {
    let parts = parts(egress);
    let mut of_version = parts.iter().filter(|part| part.version() == version);
    of_version.any(Part::has_any)
}

impl Part<'_> {
    /// Whether anybody sends anything that it is about.
    fn has_any(&self) -> bool {
        let has_addresses = !self.forwarded.is_empty() || !self.own.is_empty();
        let has_places = !self.places.is_empty();
        (has_addresses && !self.to.is_empty()) || (has_places && !self.to_from_here.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::egress, *};

    #[test]
    fn a_version_is_redirected_where_somebody_sends_it_somewhere() {
        for (redirect, versions) in [
            (
                "from = [\"10.0.0.0/8\"]\nto = [\"0.0.0.0/0\", \"::/0\"]",
                [true, false],
            ),
            (
                "from = [\"10.0.0.0/8\", \"fd64::/64\"]\nto = [\"0.0.0.0/0\"]",
                [true, false],
            ),
            (
                "from = [\"10.0.0.0/8\", \"fd64::/64\"]\nto = [\"::/0\"]",
                [false, true],
            ),
            (
                "senders = [\"web\"]\nto = [\"0.0.0.0/0\", \"::/0\"]",
                [true, false],
            ),
            (
                "senders = [\"batch\"]\nto = [\"198.51.100.0/24\"]",
                [true, false],
            ),
            (
                "senders = [\"batch\"]\nto = [\"0.0.0.0/0\", \"::/0\"]",
                [true, true],
            ),
        ] {
            let egress = egress(redirect);
            let found = Version::ALL.map(|version| is_redirected(&egress, version));
            assert_eq!(found, versions, "{redirect}");
        }
    }
}

//! Routing rules of a configuration: what is marked is the host's own, and what isn't is prohibited, unless the host sends it itself.

use sandwire_kernel_net::{
    nft::RELAY_MARK_MASK,
    routing_rule::{Action, PRIORITY_PROHIBITED, RoutingRule, TABLE_PROHIBITED, Version},
};

use super::{PRIORITY_UNSEEN, Part, TABLE_LOCAL, entrances, merged, number, parts};
use crate::config::Egress;

const PRIORITY_LOCAL: u32 = PRIORITY_OWN - 1;
/// Leads what the host sends itself to [`PRIORITY_BEHIND`].
const PRIORITY_OWN: u32 = PRIORITY_PROHIBITED - 1;
const PRIORITY_BEHIND: u32 = PRIORITY_UNSEEN + 1;

/// All routing rules of a configuration, each once.
pub(super) fn rules(egress: &Egress) -> Vec<RoutingRule> {
    let marks = entrances(egress).into_iter().flat_map(|entrance| {
        Version::ALL.map(|version| {
            let mut rule = RoutingRule::new(version, PRIORITY_LOCAL, TABLE_LOCAL);
            rule.mark = Some((entrance.mark, RELAY_MARK_MASK));
            rule
        })
    });
    let prohibitions: Vec<RoutingRule> =
        parts(egress).iter().flat_map(Part::prohibitions).collect();
    let is_prohibiting = |version| prohibitions.iter().any(|rule| rule.version == version);
    let prohibiting = Version::ALL.into_iter().filter(|one| is_prohibiting(*one));
    let exemptions: Vec<RoutingRule> = prohibiting.flat_map(exemption).collect();
    let mut rules: Vec<RoutingRule> = Vec::new();
    for rule in marks.chain(exemptions).chain(prohibitions) {
        if !rules.contains(&rule) {
            rules.push(rule);
        }
    }
    rules
}

/// Rules by which what the host sends itself goes past those that prohibit. Packets that come in are meant, and the host may have an
/// address among their sources: in each clone prefix it has one.
fn exemption(version: Version) -> [RoutingRule; 2] {
    let rule = |priority| RoutingRule::new(version, priority, TABLE_PROHIBITED);
    let behind = RoutingRule {
        action: Action::Nothing,
        ..rule(PRIORITY_BEHIND)
    };
    let own = RoutingRule {
        action: Action::GoTo(PRIORITY_BEHIND),
        is_own: true,
        ..rule(PRIORITY_OWN)
    };
    [behind, own]
}

impl Part<'_> {
    /// Rules by which nothing of it leaves unmarked.
    pub(super) fn prohibitions(&self) -> Vec<RoutingRule> {
        let version = self.version();
        let mut protocols = vec![None];
        if !self.redirect.takes_all() {
            let some = self.redirect.protocols.iter();
            protocols = some
                .map(|protocol| Some(number(*protocol).number()))
                .collect();
        }
        let mut rules = Vec::new();
        for from in &self.forwarded {
            for to in &self.to {
                for protocol in &protocols {
                    let mut rule = RoutingRule::new(version, PRIORITY_PROHIBITED, TABLE_PROHIBITED);
                    // A prefix of length 0 is no condition, and isn't listed as one.
                    rule.from = Some(*from).filter(|prefix| prefix.prefix_len() > 0);
                    rule.to = Some(*to).filter(|prefix| prefix.prefix_len() > 0);
                    rule.protocol = *protocol;
                    rule.mark = Some((0, RELAY_MARK_MASK));
                    rules.extend(self.of_ports(rule));
                }
                if let Some(rule) = rules.last().copied()
                    && rule.protocol.is_some()
                {
                    // Errors that quote it are to be looked at, too.
                    rules.push(RoutingRule {
                        priority: PRIORITY_UNSEEN,
                        protocol: Some(self.icmp().number()),
                        ports: None,
                        ..rule
                    });
                }
            }
        }
        rules
    }

    /// A rule for each range of ports, and one for what has none, such as fragments.
    fn of_ports(&self, rule: RoutingRule) -> Vec<RoutingRule> {
        let ranges = merged(&self.redirect.ports);
        // The kernel takes neither port 0 nor 65535: then all ports.
        if ranges
            .iter()
            .any(|range| range.first == 0 || range.last == u16::MAX)
        {
            return vec![rule];
        }
        let exact = ranges.into_iter().map(|range| RoutingRule {
            ports: Some((range.first, range.last)),
            ..rule
        });
        let unseen = RoutingRule {
            priority: PRIORITY_UNSEEN,
            ..rule
        };
        exact.chain([unseen]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::egress, *};

    #[test]
    fn what_the_host_sends_itself_goes_past_what_prohibits() {
        let egress = egress(
            "from = [\"10.64.0.0/16\"]\nsenders = [\"web\"]\nto = [\"198.51.100.0/24\"]\nprotocols = [\"udp\"]",
        );
        let rules = rules(&egress);
        let prohibits =
            |rule: &&RoutingRule| rule.table == TABLE_PROHIBITED && rule.action == Action::LookUp;
        let own = rules.iter().find(|rule| rule.is_own).unwrap();
        let Action::GoTo(target) = own.action else {
            panic!("it leads elsewhere: {own:?}");
        };
        let priorities: Vec<u32> = rules
            .iter()
            .filter(prohibits)
            .map(|one| one.priority)
            .collect();
        assert_eq!(priorities, [5301, 5302]);
        assert!(
            priorities
                .iter()
                .all(|one| (own.priority + 1..target).contains(one))
        );
        let behind = rules.iter().find(|rule| rule.priority == target).unwrap();
        assert_eq!(behind.action, Action::Nothing);
        // Marked packets that come back by the loopback aren't to meet it.
        let marked = rules.iter().filter(|rule| rule.table == TABLE_LOCAL);
        assert!(marked.into_iter().all(|rule| rule.priority < own.priority));
        let of_version = |version| rules.iter().filter(move |rule| rule.version == version);
        assert!(of_version(Version::V6).all(|rule| rule.table == TABLE_LOCAL));
    }
}

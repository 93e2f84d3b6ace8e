//! The host's nftables table of an instance: constant rules that look things up in sets.
//!
//! | chain | hook, priority | what it does |
//! |---|---|---|
//! | `raw` | prerouting, -300 | drops what a sandbox sends with a source that isn't routed to it; keeps traffic among sandboxes that may talk out of connection tracking |
//! | `publish` | prerouting, -100 | published ports, for connections from elsewhere |
//! | `publish_local` | output, -100 | published ports, for connections of the host itself |
//! | `input` | input, 0 | what sandboxes may use of the host |
//! | `forward` | forward, 0 | what sandboxes may reach beyond the host, and each other |
//! | `uplink` | postrouting, 100 | masquerades what leaves for elsewhere |
//!
//! Every chain passes what it has no rule for, so traffic that isn't a sandbox's is untouched; the
//! first match in every chain is an interface of ours. -300 is before connection tracking (-200), the
//! other priorities are those that `nft` calls dstnat, filter and srcnat. A chain of somebody else's
//! that drops still drops: accepting here ends our chain only.
//!
//! Where nothing is to be judged or translated, because all pools are eBPF ones that masquerade nothing and no
//! port is published, there is only a chain `raw` of another kind, [`Extent::Guard`]: the other chains
//! make the kernel track every connection of the host, which costs its packets to and from sandboxes more than
//! all else that we do.
//!
//! Sets grow with pools and published ports, and with the addresses that these leave alone. Names of sets end in the IP version.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::{IpNet, Ipv4Net};
use sandwire_api::{
    identity::LOOPBACK6,
    policy::CLOUD_METADATA,
    pool::{HostService, UplinkPolicy},
    published_port::{Protocol as PublishedProtocol, PublishPort},
};
use sandwire_kernel_net::nft::{
    Batch, CT_STATUS_DNAT, Chain, ChainKind, CtState, Direction, Element, Family, Field, Hook,
    ICMP_ECHO_REQUEST, ICMPV6_ECHO_REQUEST, Key, KeyPart, Policy, Protocol, RELAY_MARK_FIRST,
    RELAY_MARK_MASK, Rule, Set, SetKind,
};

use super::hosted::Hosted;
use crate::plan::{Plan, names};

mod connections;
mod extent;
mod watch;

pub(super) use connections::forget_begun;
use extent::Extent;
pub(super) use extent::{
    add_elements, change_elements, cut_back, falls_short, has_no_pool, is_sound, make_anew,
    publish, remove_elements, same_rules, settle, spare,
};
pub(super) use watch::watch;

const TCP_SYN: u8 = 0x02;
const RAW: &str = "raw";
const PUBLISH: &str = "publish";
const PUBLISH_LOCAL: &str = "publish_local";
const INPUT: &str = "input";
const FORWARD: &str = "forward";
const UPLINK: &str = "uplink";
/// Interfaces of the host that lead to slots.
const HOST_ENDS: &str = "host_ends";

/// Name of the table.
pub(super) fn name(instance: &str) -> String {
    format!("sandwire-{instance}")
}

/// Sets and maps that exist once per IP version.
#[derive(Clone, Copy)]
enum PerFamily {
    /// Pairs of prefixes whose sandboxes may talk.
    Siblings,
    /// Prefixes that may use all of the host's services.
    Trusted,
    /// Prefixes that may ping the host.
    Pingers,
    /// Prefixes, protocols and ports of the host that they may use.
    Services,
    /// Prefixes whose packets have passed their policy before they reach the host's stack.
    Judged,
    /// Prefixes that may reach cloud metadata.
    Metadata,
    /// Prefixes that may reach beyond the host.
    Routed,
    /// Prefixes that do so behind the host's address.
    Masqueraded,
    /// Published ports of one address of the host.
    Ports,
    /// Published ports of all addresses of the host.
    AnyPorts,
    /// Addresses on the host that published ports leave alone.
    Spared,
    /// Prefixes, and the chains that bound their connections.
    Bounds,
    /// How many connections an address has.
    Open,
    /// How many connections an address begins.
    Begun,
}

impl PerFamily {
    const ALL: [Self; 14] = [
        Self::Siblings,
        Self::Trusted,
        Self::Pingers,
        Self::Services,
        Self::Judged,
        Self::Metadata,
        Self::Routed,
        Self::Masqueraded,
        Self::Ports,
        Self::AnyPorts,
        Self::Spared,
        Self::Bounds,
        Self::Open,
        Self::Begun,
    ];

    /// Whether the table has it to that extent. What counts connections has them tracked.
    fn is_part_of(self, extent: Extent) -> bool {
        extent == Extent::Full || !matches!(self, Self::Bounds | Self::Open | Self::Begun)
    }

    /// Whether its elements are those of pools alone.
    fn is_of_pools(self) -> bool {
        !matches!(
            self,
            Self::Ports | Self::AnyPorts | Self::Spared | Self::Open | Self::Begun
        )
    }

    fn name(self, family: Family) -> String {
        let name = match self {
            Self::Siblings => "siblings",
            Self::Trusted => "trusted",
            Self::Pingers => "pingers",
            Self::Services => "services",
            Self::Judged => "judged",
            Self::Metadata => "metadata",
            Self::Routed => "routed",
            Self::Masqueraded => "masqueraded",
            Self::Ports => "ports",
            Self::AnyPorts => "any_ports",
            Self::Spared => "spared",
            Self::Bounds => "bounds",
            Self::Open => "open",
            Self::Begun => "begun",
        };
        let version = if family == Family::Ipv4 { 4 } else { 6 };
        format!("{name}{version}")
    }

    fn add(self, batch: &mut Batch<'_>, family: Family) {
        let address = Field::Address(family);
        let (kind, key): (_, &[Field]) = match self {
            Self::Siblings => (SetKind::Ranges, &[address, address]),
            Self::Services => (SetKind::Ranges, &[address, Field::Protocol, Field::Port]),
            Self::Ports => (
                SetKind::MapToPort(family),
                &[address, Field::Protocol, Field::Port],
            ),
            Self::AnyPorts => (SetKind::MapToPort(family), &[Field::Protocol, Field::Port]),
            Self::Spared => (SetKind::Exact, &[address]),
            Self::Bounds => (SetKind::RangesToChains, &[address]),
            Self::Open | Self::Begun => (connections::set_kind(self), &[address]),
            _ => (SetKind::Ranges, &[address]),
        };
        let name = &self.name(family);
        batch.add_set(&Set { name, kind, key });
    }
}

/// Adds everything constant to a table that has nothing.
fn write(batch: &mut Batch<'_>, instance: &str, extent: Extent) {
    batch.add_set(&Set {
        name: HOST_ENDS,
        kind: SetKind::Ranges,
        key: &[Field::InterfaceName],
    });
    for family in Family::ALL {
        let sets = PerFamily::ALL.into_iter();
        for set in sets.filter(|set| set.is_part_of(extent)) {
            set.add(batch, family);
        }
    }
    let chains = [
        (RAW, ChainKind::Filter, Hook::Prerouting, -300),
        (PUBLISH, ChainKind::Nat, Hook::Prerouting, -100),
        (PUBLISH_LOCAL, ChainKind::Nat, Hook::Output, -100),
        (INPUT, ChainKind::Filter, Hook::Input, 0),
        (FORWARD, ChainKind::Filter, Hook::Forward, 0),
        (UPLINK, ChainKind::Nat, Hook::Postrouting, 100),
    ];
    let is_wanted = |name: &str| extent == Extent::Full || name == RAW;
    for (name, kind, hook, priority) in chains.into_iter().filter(|(name, ..)| is_wanted(name)) {
        batch.add_chain(&Chain::Base {
            name,
            kind,
            hook,
            priority,
            policy: Policy::Accept,
        });
    }
    for (chain, rule) in rules(instance, extent) {
        batch.add_rule(chain, &rule);
    }
}

/// The table's rules with their chains, in order.
fn rules(instance: &str, extent: Extent) -> Vec<(&'static str, Rule)> {
    if extent == Extent::Guard {
        return guard_rules(instance);
    }
    let mut rules = raw_rules(instance);
    rules.extend(publish_rules());
    rules.extend(input_rules());
    rules.extend(forward_rules(instance));
    for family in Family::ALL {
        let rule = Rule::new()
            .interface_not_in(Direction::Destination, HOST_ENDS)
            .key_in(&[source(family)], &PerFamily::Masqueraded.name(family));
        rules.push((UPLINK, rule.masquerade()));
    }
    rules
}

fn source(family: Family) -> KeyPart {
    KeyPart::Address(family, Direction::Source)
}

fn destination(family: Family) -> KeyPart {
    KeyPart::Address(family, Direction::Destination)
}

fn from_sandbox() -> Rule {
    Rule::new().interface_in(Direction::Source, HOST_ENDS)
}

fn guard_rules(instance: &str) -> Vec<(&'static str, Rule)> {
    let by_the_data_path = Rule::new()
        .interface(Direction::Source, &names::shared_interface(instance))
        .accept();
    let past_it = from_sandbox().comment("past the data path");
    vec![(RAW, by_the_data_path), (RAW, past_it.counter().drop())]
}

fn raw_rules(instance: &str) -> Vec<(&'static str, Rule)> {
    let mut rules = vec![
        // Only the eBPF data path sends here, after it has checked the source; the sandbox's
        // route may still lead elsewhere while its slot is being moved. First, because comparing a
        // name costs less than looking it up.
        (
            RAW,
            Rule::new()
                .interface(Direction::Source, &names::shared_interface(instance))
                .accept(),
        ),
        (
            RAW,
            Rule::new()
                .interface_not_in(Direction::Source, HOST_ENDS)
                .accept(),
        ),
        (
            RAW,
            Rule::new()
                .comment("foreign source")
                .from_elsewhere()
                .counter()
                .drop(),
        ),
        (RAW, Rule::new().to_this_host().accept()),
    ];
    for family in Family::ALL {
        let pair = [source(family), destination(family)];
        let rule = Rule::new().key_in(&pair, &PerFamily::Siblings.name(family));
        rules.push((RAW, rule.notrack()));
    }
    rules
}

fn publish_rules() -> Vec<(&'static str, Rule)> {
    let mut rules = Vec::new();
    for chain in [PUBLISH, PUBLISH_LOCAL] {
        // Of a connection of the host's from before any was tracked, one in its midst is the first that is seen.
        rules.push((chain, Rule::new().without_tcp_flags(TCP_SYN).accept()));
        for family in Family::ALL {
            let local = || {
                let mut rule = Rule::new().family(family);
                for loopback in loopbacks(family) {
                    rule = rule.address_outside(Direction::Destination, loopback);
                }
                rule.to_this_host()
                    .key_not_in(&[destination(family)], &PerFamily::Spared.name(family))
            };
            let (port, protocol) = (KeyPart::DestinationPort, KeyPart::Protocol);
            let ports = PerFamily::Ports.name(family);
            let of_address = [destination(family), protocol, port];
            rules.push((
                chain,
                local().destination_from_map(family, &of_address, &ports),
            ));
            let any = PerFamily::AnyPorts.name(family);
            rules.push((
                chain,
                local().destination_from_map(family, &[protocol, port], &any),
            ));
        }
    }
    rules
}

/// What never leaves the host: its own loopback, and those of identities, which of IPv4 are part of it.
fn loopbacks(family: Family) -> Vec<IpNet> {
    match family {
        Family::Ipv4 => vec![Ipv4Net::new_assert(Ipv4Addr::LOCALHOST, 8).into()],
        Family::Ipv6 => vec![
            IpNet::from(IpAddr::from(Ipv6Addr::LOCALHOST)),
            LOOPBACK6.into(),
        ],
    }
}

fn metadata_rules(chain: &'static str) -> Vec<(&'static str, Rule)> {
    CLOUD_METADATA
        .map(|address| {
            let family = match address {
                IpAddr::V4(_) => Family::Ipv4,
                IpAddr::V6(_) => Family::Ipv6,
            };
            let rule = Rule::new()
                .comment("cloud metadata")
                .address(Direction::Destination, address)
                .key_not_in(&[source(family)], &PerFamily::Metadata.name(family));
            // Where it goes to was another address when it was judged.
            let translated = rule.clone().status(CT_STATUS_DNAT);
            let others = rule.key_not_in(&[source(family)], &PerFamily::Judged.name(family));
            [translated, others].map(|rule| (chain, rule.counter().drop()))
        })
        .concat()
}

fn input_rules() -> Vec<(&'static str, Rule)> {
    let answered = CtState::ESTABLISHED | CtState::RELATED;
    let mut rules = vec![(
        INPUT,
        Rule::new()
            .interface_not_in(Direction::Source, HOST_ENDS)
            .accept(),
    )];
    rules.extend(metadata_rules(INPUT));
    rules.push((INPUT, Rule::new().state(answered).accept()));
    rules.extend(connections::rules_of(INPUT));
    for family in Family::ALL {
        // What the relay takes leaves by another way, and only if it may leave.
        let relayed = Rule::new()
            .mark_is(RELAY_MARK_FIRST, RELAY_MARK_MASK)
            .key_in(&[source(family)], &PerFamily::Routed.name(family));
        rules.push((INPUT, relayed.accept()));
    }
    for family in Family::ALL {
        let (icmp, echo) = match family {
            Family::Ipv4 => (Protocol::Icmp, ICMP_ECHO_REQUEST),
            Family::Ipv6 => (Protocol::Icmpv6, ICMPV6_ECHO_REQUEST),
        };
        let trusted = Rule::new().key_in(&[source(family)], &PerFamily::Trusted.name(family));
        let pingers = Rule::new()
            .key_in(&[source(family)], &PerFamily::Pingers.name(family))
            .icmp(icmp, echo);
        let key = [source(family), KeyPart::Protocol, KeyPart::DestinationPort];
        let services = Rule::new().key_in(&key, &PerFamily::Services.name(family));
        rules.extend([trusted, pingers, services].map(|rule| (INPUT, rule.accept())));
    }
    let service = || Rule::new().comment("service of the host");
    // Somebody's rule has led it to the host after it was judged by another destination.
    rules.push((INPUT, service().status(CT_STATUS_DNAT).counter().drop()));
    for family in Family::ALL {
        let judged = Rule::new().key_in(&[source(family)], &PerFamily::Judged.name(family));
        rules.push((INPUT, judged.accept()));
    }
    rules.push((INPUT, service().counter().drop()));
    rules
}

fn forward_rules(instance: &str) -> Vec<(&'static str, Rule)> {
    let between = || from_sandbox().interface_in(Direction::Destination, HOST_ENDS);
    let mut rules = Vec::new();
    // The answer would not come back this way: sandboxes of a pool talk directly.
    rules.push((
        FORWARD,
        between()
            .comment("published port of a sandbox")
            .status(CT_STATUS_DNAT)
            .counter()
            .drop(),
    ));
    // What the eBPF programs let one sandbox send to another, and is too large for the way past the stack.
    let shared = names::shared_interface(instance);
    let judged = Rule::new()
        .interface(Direction::Source, &shared)
        .interface(Direction::Destination, &shared);
    rules.push((FORWARD, judged.accept()));
    for family in Family::ALL {
        let pair = [source(family), destination(family)];
        let allowed = between().key_in(&pair, &PerFamily::Siblings.name(family));
        rules.push((FORWARD, allowed.accept()));
    }
    rules.push((FORWARD, between().comment("other sandbox").counter().drop()));
    rules.push((
        FORWARD,
        Rule::new()
            .interface_not_in(Direction::Source, HOST_ENDS)
            .accept(),
    ));
    rules.extend(metadata_rules(FORWARD));
    let answered = CtState::ESTABLISHED | CtState::RELATED;
    rules.push((FORWARD, Rule::new().state(answered).accept()));
    rules.extend(connections::rules_of(FORWARD));
    for family in Family::ALL {
        // Such a packet would leave with its clone address, past the masquerade. One that is to leave
        // with it may be an answer to a call that came past the stack, by the eBPF data path.
        let masqueraded = PerFamily::Masqueraded.name(family);
        let untracked = Rule::new()
            .key_in(&[source(family)], &masqueraded)
            .state(CtState::INVALID);
        rules.push((FORWARD, untracked.counter().drop()));
        let routed = Rule::new().key_in(&[source(family)], &PerFamily::Routed.name(family));
        rules.push((FORWARD, routed.accept()));
    }
    rules.push((
        FORWARD,
        Rule::new().comment("uplink denied").counter().drop(),
    ));
    rules
}

/// Leaves out what other pools need as well: the shared interface.
fn keep_shared(instance: &str, set: &str, elements: &mut Vec<Element>) {
    if set == HOST_ENDS {
        let shared = Element::interface_name(&names::shared_interface(instance));
        elements.retain(|element| !shared.contains(element));
    }
}

/// The elements that a pool has in each set of a table of that extent. Of eBPF slots, what reaches the host's stack
/// has passed its policy already: that of the lease, by where it went then. The pool's own holds for what is translated since.
fn elements(instance: &str, pool: &Hosted, extent: Extent) -> Vec<(String, Vec<Element>)> {
    let plan = &pool.plan;
    let policy = &plan.spec.policy;
    let is_judged = pool.serves_ebpf() && !pool.serves_nft();
    let mut ends = Element::interface_names(&format!("sw{}-", plan.tag));
    if pool.serves_ebpf() {
        ends.extend(Element::interface_name(&names::shared_interface(instance)));
    }
    let mut elements = vec![(HOST_ENDS.to_owned(), ends)];
    for family in Family::ALL {
        let prefixes = clone_prefixes(plan, family);
        if prefixes.is_empty() {
            continue;
        }
        let mut add = |set: PerFamily, of_set| elements.push((set.name(family), of_set));
        let single = || {
            prefixes
                .iter()
                .copied()
                .flat_map(Element::prefix)
                .collect::<Vec<_>>()
        };
        if policy.clone_to_clone && !is_judged {
            let pair = |from: &IpNet| {
                let key = Key::default().prefix(*from);
                prefixes
                    .iter()
                    .map(move |to| Element::ranges(key.clone().prefix(*to)))
                    .collect()
            };
            let pairs: Vec<Vec<_>> = prefixes.iter().map(pair).collect();
            add(PerFamily::Siblings, pairs.concat());
        }
        if is_judged {
            add(PerFamily::Judged, single());
        }
        if policy.cloud_metadata {
            add(PerFamily::Metadata, single());
        }
        if policy.uplink != UplinkPolicy::Deny || is_judged {
            add(PerFamily::Routed, single());
        }
        if policy.uplink == UplinkPolicy::Masquerade {
            add(PerFamily::Masqueraded, single());
        }
        if extent == Extent::Full {
            add(PerFamily::Bounds, connections::elements(pool, &prefixes));
        }
        if policy.host_services.contains(&HostService::All) {
            add(PerFamily::Trusted, single());
        }
        if policy.host_services.contains(&HostService::Icmp) {
            add(PerFamily::Pingers, single());
        }
        let services = service_ranges(&policy.host_services);
        let of_services = prefixes.iter().flat_map(|prefix| {
            services.iter().map(|(protocol, first, last)| {
                let key = Key::default().prefix(*prefix).protocol(*protocol);
                Element::ranges(key.ports(*first, *last))
            })
        });
        add(PerFamily::Services, of_services.collect());
    }
    elements.retain(|(_, of_set)| !of_set.is_empty());
    elements
}

fn clone_prefixes(plan: &Plan, family: Family) -> Vec<IpNet> {
    let of_family = |prefix: &&IpNet| matches!(prefix, IpNet::V4(_)) == (family == Family::Ipv4);
    let prefixes = plan.clone_prefixes.iter().filter(of_family);
    prefixes.copied().collect()
}

/// Port ranges of each protocol, joined where they overlap: the kernel refuses elements that do.
fn service_ranges(services: &[HostService]) -> Vec<(Protocol, u16, u16)> {
    let mut ranges: Vec<(Protocol, u16, u16)> = Vec::new();
    for wanted in [Protocol::Tcp, Protocol::Udp] {
        let mut of_protocol: Vec<(u16, u16)> = services
            .iter()
            .filter_map(|service| match (service, wanted) {
                (HostService::Tcp(first, last), Protocol::Tcp)
                | (HostService::Udp(first, last), Protocol::Udp) => Some((*first, *last)),
                _ => None,
            })
            .collect();
        of_protocol.sort_unstable();
        for (first, last) in of_protocol {
            match ranges.last_mut() {
                Some((protocol, _, end)) if *protocol == wanted && first <= *end => {
                    *end = last.max(*end);
                }
                _ => ranges.push((wanted, first, last)),
            }
        }
    }
    ranges
}

fn write_ports(batch: &mut Batch<'_>, ports: &[(PublishPort, Vec<IpAddr>)]) {
    for family in Family::ALL {
        for set in [PerFamily::Ports, PerFamily::AnyPorts] {
            batch.clear_set(&set.name(family));
        }
    }
    // Together: a message for each would be too much for one transaction.
    let mut by_set: BTreeMap<String, Vec<Element>> = BTreeMap::new();
    for (port, clone_addresses) in ports {
        for clone_address in clone_addresses {
            let is_same_family = |address: IpAddr| address.is_ipv4() == clone_address.is_ipv4();
            if !port.host_address.is_none_or(is_same_family) {
                continue;
            }
            let (set, key) = match port.host_address {
                Some(address) => (PerFamily::Ports, Key::default().address(address)),
                None => (PerFamily::AnyPorts, Key::default()),
            };
            let family = if clone_address.is_ipv4() {
                Family::Ipv4
            } else {
                Family::Ipv6
            };
            let protocol = match port.protocol {
                PublishedProtocol::Tcp => Protocol::Tcp,
                PublishedProtocol::Udp => Protocol::Udp,
            };
            let element = Element::exact(key.protocol(protocol).port(port.host_port))
                .leads_to(*clone_address, port.clone_port);
            by_set.entry(set.name(family)).or_default().push(element);
        }
    }
    for (set, elements) in by_set {
        batch.add_elements(&set, &elements);
    }
}

fn write_spared(batch: &mut Batch<'_>, addresses: &BTreeSet<IpAddr>) {
    for family in Family::ALL {
        let set = PerFamily::Spared.name(family);
        batch.clear_set(&set);
        let of_family = addresses
            .iter()
            .filter(|address| address.is_ipv4() == (family == Family::Ipv4));
        let elements: Vec<_> = of_family
            .map(|address| Element::exact(Key::default().address(*address)))
            .collect();
        batch.add_elements(&set, &elements);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_services_are_joined() {
        let services = [
            HostService::Tcp(80, 90),
            HostService::Udp(53, 53),
            HostService::Tcp(85, 100),
            HostService::All,
            HostService::Tcp(443, 443),
        ];
        let expected = vec![
            (Protocol::Tcp, 80, 100),
            (Protocol::Tcp, 443, 443),
            (Protocol::Udp, 53, 53),
        ];
        assert_eq!(service_ranges(&services), expected);
    }
}

//! What the kernel is told, so that chosen packets come to our sockets and go nowhere else.
//!
//! One nftables table, some routing rules, and two routing tables of one route each; nothing per sandbox:
//!
//! | where | what |
//! |---|---|
//! | chain `prerouting` | packets of slots, after their own address translation: those to be redirected get a mark and our socket, and are dropped if there is none |
//! | chain `output` | packets of this host's cgroups, then those of its identities: those to be redirected get a mark |
//! | chains `translated`, `forwarded` | what of processes and of slots only then has a redirected destination, since a rule of the host's translates it, is dropped |
//! | chain `postrouting` | marked packets that leave after all, as the rules by mark are gone, are dropped |
//! | rules by mark | marked packets are the host's own: from `output` they come back in by the loopback |
//! | rule for what the host sends itself | it goes past the next ones: its source may be among theirs |
//! | rules by source and destination | what isn't marked may not leave: the eBPF data path hands such packets to the host's stack, a host whose nftables were flushed refuses them, and containers that are children of an interface have them dropped |
//!
//! Where cgroups are senders, [`ends`] is a second table.
//!
//! All of it stays when the relay ends. `apply` changes it in one step, [`clear`] takes it away.

mod ahead;
mod cgroups;
mod claim;
mod clear;
mod ends;
mod entrance;
mod former;
mod processes;
mod routing;
mod rules;
pub(crate) mod upkeep;
mod watch;
mod written;

use std::{io, path::PathBuf};

use ipnet::IpNet;
use rustix::io::Errno;
use sandwire_kernel_net::{
    netlink::{Request, Socket},
    nft::{
        self, Batch, Chain, ChainKind, Direction, Element, Family, Field, Flows, Hook, Key,
        KeyPart, Policy, RELAY_FLOWS, RELAY_MARK_MASK, Rule, Set, SetKind,
    },
    routing_rule::{PRIORITY_PROHIBITED, RoutingRule, Version},
};

use self::{
    cgroups::CgroupNumber,
    former::Steered,
    routing::{is_redirected, listed, route},
    rules::rules,
    written::{Content, Written, commit},
};
use crate::config::{Egress, Origin, PortRange, Protocol, Redirect};
pub use ahead::{Ahead, AheadError, ahead};
pub use cgroups::{check as check_cgroups, missing};
pub(crate) use claim::Claim;
pub use clear::clear;
pub(crate) use entrance::{Entrance, entrances};
pub(crate) use upkeep::{has_table, is_told};

/// What the kernel says of a table or set that isn't there.
const NOT_THERE: i32 = Errno::NOENT.raw_os_error();
/// Name of the table.
pub const TABLE: &str = nft::RELAY_TABLE;
/// Routing table by which marked packets are the host's own.
pub const TABLE_LOCAL: u32 = 53_570;

/// Mark of packets that were looked at and may go their way.
pub(crate) const MARK_PASS: u32 = nft::RELAY_MARK_FIRST - MARK_STEP;
const MARK_STEP: u32 = 1 << 24;
/// Rules about packets that the table hasn't looked at, behind those that say exactly what is redirected.
const PRIORITY_UNSEEN: u32 = PRIORITY_PROHIBITED + 1;
/// `mangle`: after connection tracking and slots' own checks, before addresses of the host's are translated.
const PRIORITY: i32 = -150;

/// ICMPv6 types by which neighbours ask for each other's Ethernet addresses, and answer.
const NEIGHBOURS: [u8; 2] = [135, 136];

const PREROUTING: &str = "prerouting";
const OUTPUT: &str = "output";
const TRANSLATED: &str = "translated";
const FORWARDED: &str = "forwarded";
const POSTROUTING: &str = "postrouting";
const TAKE: &str = "take";
const GIVE: &str = "give";
const OWN: &str = "own";
const OWN_REST: &str = "own_rest";

/// Why the kernel isn't told.
#[derive(Debug, thiserror::Error)]
pub enum SteeringError {
    /// It refuses.
    #[error("steer traffic to the relay: {0}")]
    Kernel(#[from] sandwire_kernel_net::Error),
    /// It refuses what there is for IPv6 alone; all else is told.
    #[error(
        "steer IPv6 traffic to the relay: {0}; if IPv6 is switched off here, switch it on, on the loopback too, or \
         leave its addresses out of `to`"
    )]
    Ipv6(#[source] sandwire_kernel_net::Error),
    /// A cgroup isn't there, or isn't one.
    #[error("steer traffic of the cgroup {path}: {source}")]
    Cgroup {
        /// Its folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Somebody else does, who would be in the way.
    #[error(
        "another relay steers in this network namespace, and there can be one: end that one first"
    )]
    Taken,
    /// What it does would come back to it.
    #[error(
        "redirect {redirect} takes what the relay itself sends to the peer {peer}, since it runs in the cgroup {path}: \
         run it in another one, or leave the peer's address out of `to`"
    )]
    OwnCgroup {
        /// The cgroup's folder.
        path: PathBuf,
        /// Which redirect of the configuration, from 1.
        redirect: usize,
        /// Name of the peer.
        peer: String,
    },
}

/// Sources and destinations.
type Ends<'a> = (&'a [IpNet], &'a [IpNet]);

/// What one redirect is for one IP version.
struct Part<'a> {
    redirect: &'a Redirect,
    family: Family,
    /// Sources of packets that come in.
    forwarded: Vec<IpNet>,
    /// Sources of the host's own packets.
    own: Vec<IpNet>,
    /// Places of cgroups that are senders.
    places: Vec<u16>,
    to: Vec<IpNet>,
    /// The same for processes of the host.
    to_from_here: Vec<IpNet>,
    name: String,
}

fn parts(egress: &Egress) -> Vec<Part<'_>> {
    let mut parts = Vec::new();
    for (redirect, number) in egress.redirects.iter().zip(1..) {
        let mut forwarded = redirect.from.clone();
        let (mut own, mut places) = (Vec::new(), Vec::new());
        for sender in &redirect.senders {
            match &egress.senders[*sender].origin {
                Origin::Forwarded(prefixes) => forwarded.extend(prefixes),
                Origin::Identity(prefixes) => own.extend(prefixes),
                Origin::Cgroup { place, .. } => places.push(*place),
            }
        }
        for family in Family::ALL {
            let version = if family == Family::Ipv4 { 4 } else { 6 };
            parts.push(Part {
                redirect,
                family,
                forwarded: of_family(&forwarded, family),
                own: of_family(&own, family),
                places: places.clone(),
                to: of_family(&redirect.to, family),
                to_from_here: of_family(&redirect.to_from_here(), family),
                name: format!("{number}_{version}"),
            });
        }
    }
    parts
}

/// The prefixes of a family, without those that lie in others: the kernel takes no elements that overlap.
fn of_family(prefixes: &[IpNet], family: Family) -> Vec<IpNet> {
    let is_v4 = family == Family::Ipv4;
    let of_family = prefixes
        .iter()
        .copied()
        .filter(|prefix| matches!(prefix, IpNet::V4(_)) == is_v4)
        .collect();
    IpNet::aggregate(&of_family)
}

impl Part<'_> {
    fn version(&self) -> Version {
        match self.family {
            Family::Ipv4 => Version::V4,
            Family::Ipv6 => Version::V6,
        }
    }

    fn source(&self) -> KeyPart {
        KeyPart::Address(self.family, Direction::Source)
    }

    fn destination(&self) -> KeyPart {
        KeyPart::Address(self.family, Direction::Destination)
    }

    fn address(&self) -> Field {
        Field::Address(self.family)
    }

    /// Destinations, protocols and ports that are redirected, behind what a key begins with.
    fn ends(&self, start: &Key, destinations: &[IpNet]) -> Vec<Element> {
        let mut elements = Vec::new();
        for to in destinations {
            for protocol in Protocol::ALL {
                if !self.redirect.protocols.contains(&protocol) {
                    continue;
                }
                for ports in merged(&self.redirect.ports) {
                    // Nobody means port 0, and whoever sends there must not get past what takes all ports.
                    let first = if ports == PortRange::ALL {
                        0
                    } else {
                        ports.first
                    };
                    let key = start
                        .clone()
                        .prefix(*to)
                        .protocol(number(protocol))
                        .ports(first, ports.last);
                    elements.push(Element::ranges(key));
                }
            }
        }
        elements
    }

    /// A set of sources with destinations, and with all that has to fit besides.
    fn add_flows(&self, batch: &mut Batch<'_>, kind: &str, (from, to): Ends<'_>) -> String {
        let name = format!("{kind}{}", self.name);
        add_set(batch, &name, &Flows::key(self.family));
        let elements = from
            .iter()
            .flat_map(|source| self.ends(&Key::default().prefix(*source), to));
        batch.add_elements(&name, &elements.collect::<Vec<_>>());
        name
    }

    /// A set of sources with destinations alone.
    fn add_pairs(&self, batch: &mut Batch<'_>, kind: &str, (from, to): Ends<'_>) -> String {
        let name = format!("{kind}{}", self.name);
        add_set(batch, &name, &[self.address(), self.address()]);
        let elements = from.iter().flat_map(|source| {
            to.iter()
                .map(|to| Element::ranges(Key::default().prefix(*source).prefix(*to)))
        });
        batch.add_elements(&name, &elements.collect::<Vec<_>>());
        name
    }

    fn flow_key(&self) -> [KeyPart; 4] {
        [
            self.source(),
            self.destination(),
            KeyPart::Protocol,
            KeyPart::DestinationPort,
        ]
    }

    /// The same for what the answer to it had that an ICMP error quotes.
    fn quoted_key(&self) -> [KeyPart; 4] {
        [
            self.source(),
            self.destination(),
            KeyPart::QuotedProtocol(self.family),
            KeyPart::QuotedSourcePort(self.family),
        ]
    }

    fn icmp(&self) -> nft::Protocol {
        match self.family {
            Family::Ipv4 => nft::Protocol::Icmp,
            Family::Ipv6 => nft::Protocol::Icmpv6,
        }
    }

    /// Types of ICMP errors that might quote what came inside TLS. Where all is redirected, none leaves anyway.
    fn errors(&self) -> &'static [u8] {
        match self.family {
            _ if self.redirect.takes_all() => &[],
            Family::Ipv4 => &[3, 11, 12],
            Family::Ipv6 => &[1, 2, 3, 4],
        }
    }

    fn write_forwarded(&self, batch: &mut Batch<'_>) {
        if self.forwarded.is_empty() || self.to.is_empty() {
            return;
        }
        let ends = (&*self.forwarded, &*self.to);
        let flows = self.add_flows(batch, RELAY_FLOWS, ends);
        let pairs = self.add_pairs(batch, "from_pairs", ends);
        let taken = Rule::new().key_in(&self.flow_key(), &flows);
        batch.add_rule(PREROUTING, &taken.jump(TAKE));
        let translated = Rule::new().key_in(&self.flow_key(), &flows);
        batch.add_rule(FORWARDED, &translated.counter().drop());
        for kind in self.errors() {
            let quoting = Rule::new().icmp(self.icmp(), *kind);
            let quoting = quoting.key_in(&self.quoted_key(), &flows);
            let quoting = quoting.comment("it quotes what came inside TLS");
            batch.add_rule(PREROUTING, &quoting.counter().drop());
        }
        let rest = Rule::new().key_in(&[self.source(), self.destination()], &pairs);
        batch.add_rule(PREROUTING, &self.rest(rest));
    }

    /// To be written behind all that is known by its cgroup, and to [`processes::write_own`].
    fn write_own(&self, batch: &mut Batch<'_>) {
        if self.own.is_empty() || self.to_from_here.is_empty() {
            return;
        }
        let ends = (&*self.own, &*self.to_from_here);
        let flows = self.add_flows(batch, "own", ends);
        let taken = Rule::new().key_in(&self.flow_key(), &flows);
        batch.add_rule(OUTPUT, &taken.jump(OWN));
        let translated = Rule::new().key_in(&self.flow_key(), &flows);
        batch.add_rule(TRANSLATED, &translated.counter().drop());
        if self.redirect.takes_all() {
            let pairs = self.add_pairs(batch, "own_pairs", ends);
            let rest = Rule::new().key_in(&[self.source(), self.destination()], &pairs);
            batch.add_rule(OUTPUT, &rest.jump(OWN_REST));
            let translated = Rule::new().key_in(&[self.source(), self.destination()], &pairs);
            batch.add_rule(TRANSLATED, &translated.counter().drop());
        }
    }

    fn write_cgroups(&self, batch: &mut Batch<'_>, cgroups: &[Steered]) {
        let wanted: Vec<_> = cgroups
            .iter()
            .filter(|steered| self.places.contains(&steered.entrance.place))
            .collect();
        if wanted.is_empty() || self.to_from_here.is_empty() {
            return;
        }
        let flows = format!("to{}", self.name);
        add_set(
            batch,
            &flows,
            &[self.address(), Field::Protocol, Field::Port],
        );
        batch.add_elements(&flows, &self.ends(&Key::default(), &self.to_from_here));
        let all = format!("to_all{}", self.name);
        add_set(batch, &all, &[self.address()]);
        let destinations: Vec<Element> = self
            .to_from_here
            .iter()
            .copied()
            .flat_map(Element::prefix)
            .collect();
        batch.add_elements(&all, &destinations);
        for steered in wanted {
            let key = [
                self.destination(),
                KeyPart::Protocol,
                KeyPart::DestinationPort,
            ];
            let taken = steered.rule().key_in(&key, &flows);
            let taken = taken.set_mark(steered.entrance.mark, RELAY_MARK_MASK);
            batch.add_rule(OUTPUT, &taken.accept());
            let translated = steered.rule().key_in(&key, &flows);
            batch.add_rule(TRANSLATED, &translated.counter().drop());
            if self.redirect.takes_all() {
                let rest = steered.rule().key_in(&[self.destination()], &all);
                batch.add_rule(OUTPUT, &self.rest(rest));
                let translated = steered.rule().key_in(&[self.destination()], &all);
                batch.add_rule(TRANSLATED, &translated.counter().drop());
            }
        }
    }

    /// What becomes of packets between redirected addresses that the relay doesn't take.
    fn rest(&self, rule: Rule) -> Rule {
        if self.redirect.takes_all() {
            return neither(rule);
        }
        rule.set_mark(MARK_PASS, RELAY_MARK_MASK)
    }
}

/// Begins a chain that looks at destinations once more, behind all that may have changed them: the host's own address translation
/// comes after our look. What only then is to be redirected isn't known to the relay by what it was sent to, and is dropped.
fn begin_behind_translation(batch: &mut Batch<'_>, name: &str, hook: Hook) {
    batch.add_chain(&Chain::Base {
        name,
        kind: ChainKind::Filter,
        hook,
        priority: i32::MAX,
        policy: Policy::Accept,
    });
}

/// Drops what the relay can't carry, of what it is to carry all of.
fn neither(rule: Rule) -> Rule {
    let rule = rule.comment("neither TCP nor UDP, though all is redirected");
    rule.counter().drop()
}

fn add_set(batch: &mut Batch<'_>, name: &str, key: &[Field]) {
    let kind = SetKind::Ranges;
    batch.add_set(&Set { name, kind, key });
}

fn number(protocol: Protocol) -> nft::Protocol {
    match protocol {
        Protocol::Tcp => nft::Protocol::Tcp,
        Protocol::Udp => nft::Protocol::Udp,
    }
}

/// Ranges of ports, joined where they overlap.
fn merged(ports: &[PortRange]) -> Vec<PortRange> {
    let mut sorted = ports.to_vec();
    sorted.sort_by_key(|range| (range.first, range.last));
    let mut joined: Vec<PortRange> = Vec::new();
    for range in sorted {
        match joined.last_mut() {
            Some(last) if range.first <= last.last => last.last = last.last.max(range.last),
            _ => joined.push(range),
        }
    }
    joined
}

/// Writes the whole table, into an empty one.
fn write(batch: &mut Batch<'_>, egress: &Egress, cgroups: &[Steered]) {
    for (name, kind, hook) in [
        (PREROUTING, ChainKind::Filter, Hook::Prerouting),
        (OUTPUT, ChainKind::Route, Hook::Output),
    ] {
        batch.add_chain(&Chain::Base {
            name,
            kind,
            hook,
            priority: PRIORITY,
            policy: Policy::Accept,
        });
    }
    batch.add_chain(&Chain::Regular(TAKE));
    batch.add_chain(&Chain::Regular(GIVE));
    let entrances = entrances(egress);
    let of_addresses = entrances[0].mark;
    for entrance in &entrances {
        let is_marked = || Rule::new().mark_is(entrance.mark, RELAY_MARK_MASK);
        let came_back = is_marked().interface(Direction::Source, "lo");
        batch.add_rule(PREROUTING, &came_back.jump(GIVE));
        for address in entrance.addresses() {
            batch.add_rule(GIVE, &is_marked().give_to_socket(address).accept());
        }
    }
    for kind in NEIGHBOURS {
        // What there is for ARP no rule sees. What isn't for this host, routing rules refuse.
        let found = Rule::new().icmp(nft::Protocol::Icmpv6, kind);
        batch.add_rule(PREROUTING, &found.accept());
    }
    if processes::has_own(egress) {
        processes::write_guard(batch, &entrances);
        processes::write_silence(batch);
        processes::begin_translated(batch);
    }
    let without = Rule::new().comment("no relay takes it");
    batch.add_rule(GIVE, &without.counter().drop());
    let elsewhere = Rule::new().comment("foreign source").from_elsewhere();
    batch.add_rule(TAKE, &elsewhere.counter().drop());
    let marked = Rule::new().set_mark(of_addresses, RELAY_MARK_MASK);
    batch.add_rule(TAKE, &marked.jump(GIVE));
    // What this host sends itself may have a source among those of sandboxes: they come in by other interfaces.
    let own = Rule::new().interface(Direction::Source, "lo");
    batch.add_rule(PREROUTING, &own.accept());
    let parts = parts(egress);
    if parts.iter().any(|part| !part.forwarded.is_empty()) {
        begin_behind_translation(batch, FORWARDED, Hook::Forward);
    }
    for part in &parts {
        part.write_forwarded(batch);
        part.write_cgroups(batch, cgroups);
    }
    if parts.iter().any(|part| !part.own.is_empty()) {
        processes::write_own(batch, of_addresses, cgroups);
    }
    for part in &parts {
        part.write_own(batch);
    }
}

/// What the kernel was told of that may change without us.
pub(crate) struct Told {
    cgroups: Vec<Option<CgroupNumber>>,
    written: Written,
}

/// Tells the kernel what is to come to our sockets; nothing of it can leave otherwise from then on. Cgroups that aren't
/// there are left out: nobody is in them.
///
/// # Errors
/// The kernel refuses: what was told before holds then, or some of both. Or what is said to be a cgroup is none: all
/// else is told.
pub(crate) fn apply(egress: &Egress) -> Result<Told, SteeringError> {
    let cgroups = cgroups::present(egress);
    let written = apply_present(egress, &cgroups)?;
    check(egress)?;
    Ok(Told { cgroups, written })
}

/// Looks for what [`apply`] would find wrong after it has told the rest.
///
/// # Errors
/// What is said to be a cgroup is none, or what the relay sends would come back to it.
pub(crate) fn check(egress: &Egress) -> Result<(), SteeringError> {
    cgroups::check(egress)?;
    cgroups::check_own(egress)
}

/// The same with those cgroups that are there. What is left of those that were told before is steered on.
pub(crate) fn apply_present(
    egress: &Egress,
    cgroups: &[Option<CgroupNumber>],
) -> Result<Written, SteeringError> {
    let mut socket = Socket::route()?;
    let wanted = rules(egress);
    let there = listed(&mut socket)?;
    let new: Vec<RoutingRule> = wanted
        .iter()
        .copied()
        .filter(|rule| !there.contains(rule))
        .collect();
    route(&mut socket, Version::V4, &new)?;
    // A host may have it switched off. Whether that matters is said once all else is told.
    let ipv6 = route(&mut socket, Version::V6, &new);
    let mut netfilter = Socket::netfilter()?;
    // First: what is redirected from then on is noted down when it ends.
    let ends = ends::tell(egress, &mut netfilter)?;
    let mut batch = Batch::new(TABLE);
    batch.recreate_table();
    let table = fill_table(batch, &mut netfilter, egress, cgroups)?;
    // Last, as before that the old table may need them.
    let mut removals = Request::new();
    for rule in there.iter().filter(|rule| !wanted.contains(rule)) {
        rule.delete(&mut removals);
    }
    socket.execute(removals)?;
    match ipv6 {
        Err(error) if is_redirected(egress, Version::V6) => Err(SteeringError::Ipv6(error)),
        _ => Ok(Written::new(table, ends)),
    }
}

/// Tells the kernel of other cgroups, where all else is as it was. Returns what the table has then.
///
/// # Errors
/// The kernel refuses, also where the table is gone; nothing has changed then. So it doesn't undo what [`clear`] does at
/// the same time: that takes the table away first of all.
fn apply_cgroups(
    egress: &Egress,
    cgroups: &[Option<CgroupNumber>],
) -> Result<Content, SteeringError> {
    let mut netfilter = Socket::netfilter()?;
    let mut batch = Batch::new(TABLE);
    batch.empty_table();
    fill_table(batch, &mut netfilter, egress, cgroups)
}

fn fill_table(
    mut batch: Batch<'_>,
    netfilter: &mut Socket,
    egress: &Egress,
    cgroups: &[Option<CgroupNumber>],
) -> Result<Content, SteeringError> {
    let before = nft::cgroup_rules(netfilter, TABLE)?;
    write(
        &mut batch,
        egress,
        &former::steered(egress, cgroups, &before),
    );
    commit(batch, netfilter)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::Config;

    pub(super) fn egress(redirect: &str) -> Egress {
        let text = format!(
            "[tls]\ncertificate = \"a\"\nkey = \"b\"\nauthorities = \"c\"\n[egress]\n\
             [[peer]]\nname = \"p\"\naddress = \"192.0.2.1:1\"\nserver_name = \"p.example\"\n\
             [[sender]]\nname = \"web\"\nidentity = [\"10.0.0.5\"]\n\
             [[sender]]\nname = \"batch\"\ncgroup = \"/sys/fs/cgroup/batch\"\n\
             [[redirect]]\nvia = \"p\"\n{redirect}\n"
        );
        let config = Config::parse(Path::new("relay.toml"), &text).unwrap();
        config.egress.unwrap()
    }

    #[test]
    fn what_overlaps_becomes_one_element() {
        let egress = egress(
            "from = [\"10.64.0.0/16\", \"10.64.3.0/24\"]\nto = [\"0.0.0.0/0\", \"198.51.100.0/24\"]\n\
             ports = [443, \"400-500\", \"450-600\", 80]",
        );
        let parts = parts(&egress);
        let [v4, v6] = &parts[..] else {
            panic!("a part for each version");
        };
        assert_eq!((v4.forwarded.len(), v4.to.len()), (1, 1));
        assert_eq!((v6.forwarded.len(), v6.to.len()), (0, 0));
        let ports = merged(&v4.redirect.ports);
        let ends: Vec<_> = ports
            .iter()
            .map(|range| (range.first, range.last))
            .collect();
        assert_eq!(ends, [(80, 80), (400, 600)]);
        // Two protocols with two ranges each.
        assert_eq!(v4.ends(&Key::default(), &v4.to).len(), 4);
    }

    #[test]
    fn unmarked_packets_of_slots_are_prohibited_and_those_of_the_host_are_not() {
        let all = egress(
            "from = [\"10.64.0.0/16\"]\nsenders = [\"web\", \"batch\"]\nto = [\"0.0.0.0/0\"]",
        );
        let rules: Vec<RoutingRule> = parts(&all).iter().flat_map(Part::prohibitions).collect();
        assert_eq!(rules.len(), 1);
        assert_eq!(rules[0].from, Some("10.64.0.0/16".parse().unwrap()));
        assert_eq!((rules[0].to, rules[0].protocol), (None, None));
        assert_eq!(rules[0].mark, Some((0, RELAY_MARK_MASK)));
        let some =
            egress("from = [\"10.64.0.0/16\"]\nto = [\"198.51.100.0/24\"]\nprotocols = [\"udp\"]");
        let rules: Vec<RoutingRule> = parts(&some).iter().flat_map(Part::prohibitions).collect();
        let protocols: Vec<_> = rules.iter().map(|rule| rule.protocol).collect();
        assert_eq!(protocols, [Some(17), Some(1)]);
        let some = egress(
            "from = [\"10.64.0.0/16\"]\nto = [\"198.51.100.0/24\"]\nprotocols = [\"tcp\"]\nports = [443, \"80-90\"]",
        );
        let rules: Vec<RoutingRule> = parts(&some).iter().flat_map(Part::prohibitions).collect();
        let said: Vec<_> = rules
            .iter()
            .map(|rule| (rule.priority, rule.ports))
            .collect();
        let expected = [
            (5301, Some((80, 90))),
            (5301, Some((443, 443))),
            (5302, None),
            (5302, None),
        ];
        assert_eq!(said, expected);
        let last =
            egress("from = [\"10.64.0.0/16\"]\nto = [\"::/0\", \"0.0.0.0/0\"]\nports = [65535]");
        let rules: Vec<RoutingRule> = parts(&last).iter().flat_map(Part::prohibitions).collect();
        let said: Vec<_> = rules
            .iter()
            .map(|rule| (rule.priority, rule.ports))
            .collect();
        assert_eq!(said, [(5301, None), (5301, None), (5302, None)]);
    }

    #[test]
    fn each_cgroup_has_an_entrance_of_its_own() {
        let egress = egress("senders = [\"batch\"]\nto = [\"0.0.0.0/0\"]");
        let entrances = entrances(&egress);
        assert_eq!(entrances.len(), 2);
        assert_eq!((entrances[0].place, entrances[1].place), (0, 1));
        assert_eq!(entrances[1].port, egress.listen_port + 1);
        assert_ne!(entrances[0].mark, entrances[1].mark);
        assert_ne!(entrances[0].mark, MARK_PASS);
    }
}

//! Other people's firewall rules that would block sandboxes' traffic, by name.
//!
//! Two readers ([`nft`] and [`legacy`]) turn a rule set into the same small model: base chains,
//! rules with the interfaces that they are limited to, verdicts. [`obstacles`] then follows two
//! packets of each uplink through the forward hook, from it to a slot and from a slot to it.
//! Conditions that it doesn't understand make a rule conditional; so what it reports is a warning
//! and never a certainty. It never changes a rule: it says which command the user may run.

pub(super) mod legacy;
pub(super) mod nft;

use serde::Serialize;

/// Start of the names of all host interfaces of slots.
const SLOT_INTERFACES: &str = "sw";

/// Rules of one program in one family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ruleset {
    pub(super) chains: Vec<Chain>,
}

/// A chain of rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chain {
    pub(super) program: Program,
    /// `ip`, `ip6`, `inet`.
    pub(super) family: String,
    pub(super) table: String,
    pub(super) name: String,
    /// Hook, for base chains.
    pub(super) hook: Option<String>,
    /// Whether packets that no rule decided on are dropped.
    pub(super) drops_by_policy: bool,
    pub(super) rules: Vec<Rule>,
}

/// The program by which the rules were made, and are to be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Program {
    /// nftables, or iptables in its nft variant.
    Nft,
    /// The older iptables, whose rules nft doesn't show.
    IptablesLegacy,
}

/// A rule, as far as we understand it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rule {
    /// Handle (nft) or position from 1 (iptables).
    pub(super) handle: u64,
    /// Limits on the interface that the packet came by.
    pub(super) input: Vec<InterfaceMatch>,
    /// Limits on the interface that the packet leaves by.
    pub(super) output: Vec<InterfaceMatch>,
    /// Whether it has other conditions, which may or may not hold.
    pub(super) conditional: bool,
    pub(super) verdict: Verdict,
}

/// A limit on an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InterfaceMatch {
    /// Names; a `*` or `+` at the end stands for any rest.
    pub(super) names: Vec<String>,
    /// Whether it holds for all other interfaces instead.
    pub(super) negated: bool,
}

/// What a rule does with a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Accept,
    /// `drop` or `reject`.
    Drop,
    Jump(String),
    /// Like a jump, but what falls through there doesn't come back to this chain.
    Goto(String),
    Return,
    /// Counts, logs, marks, translates.
    Continue,
}

/// A rule or a policy that may block sandboxes' traffic.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Obstacle {
    pub(super) program: Program,
    pub(super) family: String,
    pub(super) table: String,
    pub(super) chain: String,
    /// Hook whose packets it sees.
    pub(super) hook: String,
    /// Handle of the rule, or its position with the older iptables; absent for a policy.
    pub(super) rule: Option<u64>,
    /// What it blocks.
    pub(super) problem: String,
    /// Uplinks of which it does, if that depends on them.
    pub(super) uplinks: Vec<String>,
    /// Commands that the user may run.
    pub(super) advice: String,
}

/// An end of a packet's way through the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End<'a> {
    Slot,
    /// By name.
    Uplink(&'a str),
}

/// A packet that must get through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Packet<'a> {
    input: End<'a>,
    output: End<'a>,
}

/// One of each direction, and last one from a slot to another, which leaves by no uplink. A host without uplinks may get one
/// that no rule names.
fn packets(uplinks: &[String]) -> Vec<(&str, Packet<'_>)> {
    let names: Vec<&str> = match uplinks {
        [] => vec![""],
        names => names.iter().map(String::as_str).collect(),
    };
    let both = |name| {
        let (input, output) = (End::Slot, End::Uplink(name));
        let out = Packet { input, output };
        let back = Packet {
            input: output,
            output: input,
        };
        [(name, out), (name, back)]
    };
    let between = Packet {
        input: End::Slot,
        output: End::Slot,
    };
    let by_uplinks = names.into_iter().flat_map(both);
    by_uplinks.chain([("", between)]).collect()
}

impl Packet<'_> {
    fn is_between_slots(self) -> bool {
        self.input == End::Slot && self.output == End::Slot
    }
}

const BETWEEN_SLOTS: &str = "it drops what goes between sandboxes of `nft` pools, unless a rule before it accepts: this matters \
    only to pools with clone_to_clone";

/// What is to be let through a base chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reach<'a> {
    /// Packets to these uplinks and from there, and between sandboxes.
    Uplinks(&'a [String]),
    /// Packets between sandboxes alone.
    Slots,
}

/// All that may block. `uplinks` are the interfaces by which packets leave the host.
pub(super) fn obstacles(ruleset: &Ruleset, uplinks: &[String]) -> Vec<Obstacle> {
    let mut found: Vec<Obstacle> = Vec::new();
    for base in &ruleset.chains {
        let Some(hook) = base.hook.as_deref() else {
            continue;
        };
        let mut of_base: Vec<Obstacle> = Vec::new();
        if hook == "forward" {
            for (uplink, packet) in packets(uplinks) {
                let mut walk = Walk {
                    ruleset,
                    packet,
                    drops: Vec::new(),
                };
                let fell_through = !walk.chain(base, 0);
                let mut drops = walk.drops;
                if fell_through && base.drops_by_policy {
                    drops.push(policy(base, hook));
                }
                let is_between = packet.is_between_slots();
                for mut obstacle in drops {
                    // What lets packets through to an uplink lets them through between sandboxes, too.
                    let is_told = is_between && of_base.iter().any(|told| told.is_at(&obstacle));
                    if is_told {
                        continue;
                    }
                    if is_between {
                        BETWEEN_SLOTS.clone_into(&mut obstacle.problem);
                    }
                    add(&mut of_base, obstacle, uplink);
                }
            }
        } else if base.drops_by_policy
            && matches!(hook, "input" | "output" | "prerouting" | "postrouting")
        {
            of_base.push(policy(base, hook));
        }
        for mut obstacle in of_base {
            obstacle.advice = match obstacle.problem == BETWEEN_SLOTS {
                true => advice(ruleset, base, Reach::Slots),
                false => advice(ruleset, base, Reach::Uplinks(&obstacle.uplinks)),
            };
            if !found.contains(&obstacle) {
                found.push(obstacle);
            }
        }
    }
    found
}

/// One that blocks several uplinks is told of once.
fn add(found: &mut Vec<Obstacle>, obstacle: Obstacle, uplink: &str) {
    let is_same = |other: &Obstacle| {
        let uplinks = other.uplinks.clone();
        let of_these = Obstacle {
            uplinks,
            ..obstacle.clone()
        };
        *other == of_these
    };
    let place = found.iter().position(is_same).unwrap_or_else(|| {
        found.push(obstacle.clone());
        found.len() - 1
    });
    let names = &mut found[place].uplinks;
    if !uplink.is_empty() && !names.iter().any(|name| name == uplink) {
        names.push(uplink.to_owned());
    }
}

/// A packet on its way through the chains of a hook.
struct Walk<'a> {
    ruleset: &'a Ruleset,
    packet: Packet<'a>,
    drops: Vec<Obstacle>,
}

/// Chains that jump to each other deeper than this are not followed; the kernel refuses 16.
const DEPTH_MAX: u8 = 16;

impl Walk<'_> {
    /// Follows the packet through a chain; whether its fate is certainly decided there.
    fn chain(&mut self, chain: &Chain, depth: u8) -> bool {
        for rule in &chain.rules {
            if !self.interfaces_match(rule) {
                continue;
            }
            match &rule.verdict {
                Verdict::Accept if !rule.conditional => return true,
                Verdict::Return if !rule.conditional => return false,
                Verdict::Drop if !rule.conditional => {
                    self.drops.push(self.dropped_by(chain, rule));
                    return true;
                }
                // A conditional jump may lead to a drop that is meant for others.
                Verdict::Jump(name) | Verdict::Goto(name)
                    if depth < DEPTH_MAX && !rule.conditional =>
                {
                    let target = self.ruleset.find(chain, name);
                    let is_decided = target.is_some_and(|target| self.chain(target, depth + 1));
                    if is_decided || matches!(rule.verdict, Verdict::Goto(_)) {
                        return is_decided;
                    }
                }
                _ => {}
            }
        }
        false
    }

    fn interfaces_match(&self, rule: &Rule) -> bool {
        let all = |limits: &[InterfaceMatch], end| limits.iter().all(|limit| limit.holds(end));
        all(&rule.input, self.packet.input) && all(&rule.output, self.packet.output)
    }

    fn dropped_by(&self, chain: &Chain, rule: &Rule) -> Obstacle {
        let direction = match self.packet.input {
            End::Slot => "from sandboxes to the uplink",
            End::Uplink(_) => "from the uplink to sandboxes",
        };
        Obstacle {
            program: chain.program,
            family: chain.family.clone(),
            table: chain.table.clone(),
            chain: chain.name.clone(),
            hook: "forward".to_owned(),
            rule: Some(rule.handle),
            problem: format!("it drops what goes {direction}, unless a rule before it accepts"),
            uplinks: Vec::new(),
            // What lets it through depends on all that it blocks.
            advice: String::new(),
        }
    }
}

impl Obstacle {
    /// Whether it is the same rule, or the same chain's policy.
    fn is_at(&self, other: &Self) -> bool {
        (&self.chain, self.rule) == (&other.chain, other.rule)
    }
}

impl InterfaceMatch {
    fn holds(&self, end: End<'_>) -> bool {
        let named = self.names.iter().any(|pattern| match end {
            End::Slot => names_slots(pattern),
            End::Uplink(name) => matches_name(pattern, name),
        });
        named != self.negated
    }
}

/// Whether a pattern covers all interfaces of slots.
fn names_slots(pattern: &str) -> bool {
    pattern
        .strip_suffix(['*', '+'])
        .is_some_and(|start| SLOT_INTERFACES.starts_with(start))
}

fn matches_name(pattern: &str, name: &str) -> bool {
    match pattern.strip_suffix(['*', '+']) {
        Some(start) => name.starts_with(start),
        None => pattern == name,
    }
}

impl Ruleset {
    fn find(&self, from: &Chain, name: &str) -> Option<&Chain> {
        self.chains
            .iter()
            .find(|chain| chain.name == name && chain.is_beside(from))
    }

    fn has_beside(&self, chain: &Chain, name: &str) -> bool {
        self.find(chain, name).is_some()
    }
}

impl Chain {
    fn is_beside(&self, other: &Chain) -> bool {
        (self.program, &self.family, &self.table) == (other.program, &other.family, &other.table)
    }

    /// Whether the iptables command owns it, in either variant.
    fn is_of_iptables(&self) -> bool {
        self.program == Program::IptablesLegacy
            || (matches!(self.family.as_str(), "ip" | "ip6")
                && matches!(
                    self.table.as_str(),
                    "filter" | "nat" | "mangle" | "raw" | "security"
                )
                && self.name == self.name.to_uppercase())
    }
}

fn policy(chain: &Chain, hook: &str) -> Obstacle {
    let problem = match hook {
        "forward" => {
            "its policy drops what goes between sandboxes and the uplink, unless a rule accepts"
        }
        "input" => {
            "its policy drops what sandboxes send to the host itself, unless a rule accepts: this matters only to \
             pools with host_services"
        }
        "output" => {
            "its policy drops what the host itself sends to sandboxes, unless a rule accepts"
        }
        "prerouting" => {
            "its policy drops everything that arrives at the host, unless a rule accepts"
        }
        _ => "its policy drops everything that leaves the host, unless a rule accepts",
    };
    Obstacle {
        program: chain.program,
        family: chain.family.clone(),
        table: chain.table.clone(),
        chain: chain.name.clone(),
        hook: hook.to_owned(),
        rule: None,
        problem: problem.to_owned(),
        uplinks: Vec::new(),
        advice: String::new(),
    }
}

/// A zone of its own lets sandboxes reach each other as their pools say, and no service of the host's; policies let them reach
/// the uplinks' zones, and be called from there. firewalld writes no rules of a policy for a zone without interfaces, as the
/// default zone often is, so an uplink without one is put there.
fn firewalld(uplinks: &[String]) -> String {
    let set = |what: &str| format!("firewall-cmd --permanent {what}");
    // What was made for another uplink is there.
    let make = |kind: &str, kinds: &str, name: &str| {
        let (list, new) = (
            set(&format!("--get-{kinds}")),
            set(&format!("--new-{kind}={name}")),
        );
        format!("{{ {list} | grep -qw {name} || {new}; }}")
    };
    // A policy may have the name that a zone is to have, and `sw+` may be in another zone: earlier advice made them so.
    let former = set("--quiet --delete-policy=sandwire");
    let mut commands = vec![
        format!("{{ {former} 2>/dev/null || true; }}"),
        make("zone", "zones", "sandwire"),
        set("--zone=sandwire --change-interface=sw+"),
        set("--zone=sandwire --add-forward"),
    ];
    for (policy, own_side, other_side) in [
        ("sandwire-out", "ingress", "egress"),
        ("sandwire-in", "egress", "ingress"),
    ] {
        let of = |what: &str| set(&format!("--policy={policy} {what}"));
        commands.extend([
            make("policy", "policies", policy),
            of(&format!("--add-{own_side}-zone=sandwire")),
            of("--set-target=ACCEPT"),
        ]);
        for uplink in uplinks {
            let bind = set(&format!("--zone=$zone --change-interface={uplink}"));
            commands.push(format!(
                "{{ zone=$(firewall-cmd --get-zone-of-interface={uplink}) || \
                 {{ zone=$(firewall-cmd --get-default-zone) && {bind}; }}; }}"
            ));
            commands.push(of(&format!("--add-{other_side}-zone=$zone")));
        }
        if uplinks.is_empty() {
            commands.push(of(&format!("--add-{other_side}-zone=ANY")));
        }
    }
    commands.push("firewall-cmd --reload".to_owned());
    commands.join(" && ")
}

/// The commands by which the user can let slots' packets through a base chain. Those that are forwarded are let through to
/// uplinks and from there alone: an interface of Docker's, say, leads to ports that nobody has published.
fn advice(ruleset: &Ruleset, chain: &Chain, reach: Reach<'_>) -> String {
    let Chain {
        family,
        table,
        name,
        ..
    } = chain;
    if chain.table == "firewalld" {
        return match reach {
            Reach::Uplinks(uplinks) => firewalld(uplinks),
            Reach::Slots => {
                "zone=$(firewall-cmd --get-zone-of-interface=sw+) && firewall-cmd --permanent --zone=$zone --add-forward && \
                             firewall-cmd --reload"
                    .to_owned()
            }
        };
    }
    if chain.is_of_iptables() {
        return iptables(ruleset, chain, reach);
    }
    let hook = chain.hook.as_deref().unwrap_or_default();
    let accept = |input: &str, output: &str| {
        let side = |key: &str, name: &str| match name {
            "" => String::new(),
            name => format!("{key} \"{name}\" "),
        };
        format!(
            "nft insert rule {family} {table} {name} {}{}accept",
            side("iifname", input),
            side("oifname", output)
        )
    };
    ways(hook, "sw*", reach, accept)
}

/// [`advice`] for a chain that the iptables command owns.
fn iptables(ruleset: &Ruleset, chain: &Chain, reach: Reach<'_>) -> String {
    let Chain {
        family,
        table,
        name,
        ..
    } = chain;
    let hook = chain.hook.as_deref().unwrap_or_default();
    let command = match (family.as_str(), chain.program) {
        ("ip6", Program::Nft) => "ip6tables",
        ("ip6", Program::IptablesLegacy) => "ip6tables-legacy",
        (_, Program::Nft) => "iptables",
        (_, Program::IptablesLegacy) => "iptables-legacy",
    };
    // Docker keeps this chain for its users and never clears it.
    let target = if hook == "forward" && ruleset.has_beside(chain, "DOCKER-USER") {
        "DOCKER-USER"
    } else {
        name
    };
    let table = if table == "filter" {
        String::new()
    } else {
        format!("-t {table} ")
    };
    let accept = |input: &str, output: &str| {
        let side = |flag: &str, name: &str| match name {
            "" => String::new(),
            name => format!("{flag} {name} "),
        };
        format!(
            "{command} {table}-I {target} {}{}-j ACCEPT",
            side("-i", input),
            side("-o", output)
        )
    };
    let mut advice = ways(hook, "sw+", reach, accept);
    if ruleset.has_beside(chain, "ufw-before-forward") && hook == "forward" {
        let file = if family == "ip6" {
            "before6.rules"
        } else {
            "before.rules"
        };
        advice.push_str(&format!(
            "; to keep it over a restart of ufw, add the same rules with '-A ufw{}-before-forward' to /etc/ufw/{file}",
            if family == "ip6" { "6" } else { "" }
        ));
    }
    advice
}

/// The commands for all ways that packets of slots' interfaces take through a hook: `accept` has that for one, from an
/// interface to another, where an empty name is any.
fn ways(
    hook: &str,
    slots: &str,
    reach: Reach<'_>,
    accept: impl Fn(&str, &str) -> String,
) -> String {
    let commands = match (hook, reach) {
        ("input" | "prerouting", _) => vec![accept(slots, "")],
        ("output" | "postrouting", _) => vec![accept("", slots)],
        (_, Reach::Uplinks([])) => vec![accept(slots, ""), accept("", slots)],
        // Which sandboxes may reach each other their pools say.
        (_, Reach::Slots) => vec![accept(slots, slots)],
        (_, Reach::Uplinks(uplinks)) => {
            let both = |uplink: &String| [accept(slots, uplink), accept(uplink, slots)];
            let by_uplinks = uplinks.iter().flat_map(both);
            [accept(slots, slots)]
                .into_iter()
                .chain(by_uplinks)
                .collect()
        }
    };
    commands.join(" && ")
}

#[cfg(test)]
mod tests;

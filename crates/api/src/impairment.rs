//! A bad network: what is to happen to the packets of a sandbox, of an interface, of a link.
//!
//! The same types are read from TOML, from JSON and from a line of text (`delay 50ms loss 1%`). Quantities are texts with
//! units. A value of these types may still ask for what can't be: [`Impairment::check`] says which rule and field. What the models
//! do is `impair`'s.

pub mod check;
pub mod lease;
pub mod models;
mod presentation;
pub mod preset;
pub mod quantity;
pub mod report;
pub mod text;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub use check::InvalidImpairment;
pub use lease::{ImpairmentCleared, ImpairmentSummary, InterfaceImpairment, LeaseImpairment};
pub use models::{
    Checksum, Corrupt, Delay, Distribution, Flap, Loss, LossKind, LossTable, Mtu, NatRebind, Order,
    Queue, QueueKind, Rate, Reorder, Trace,
};
pub use preset::{PRESETS, Preset};
pub use quantity::{BitRate, InvalidQuantity, PacketRange, Percent, Ports, QueueLimit, TimeSpan};
pub use report::{LineReport, Packets, RuleReport, State, Timing, Way};
pub use text::InvalidText;

use crate::name::Name;

/// What happens to packets, both ways. Without rules nothing does.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Impairment {
    /// Of all random decisions: the same seed and the same packets give the same losses. Below 2^63. Default: 0.
    pub seed: u64,
    /// What becomes of packets when the engine has died. Default: `closed`.
    pub on_death: OnDeath,
    /// How late 99 of 100 packets may be released for the run to count as valid. Default: the larger of 1 ms and 1% of the rule's delay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<TimeSpan>,
    /// Rules, at most 256. The first that matches a packet decides; what none matches passes untouched and at once.
    #[serde(
        rename = "rule",
        alias = "rules",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub rules: Vec<Rule>,
}

/// What becomes of the packets of an impaired interface while no engine lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnDeath {
    /// They are dropped and counted.
    #[default]
    Closed,
    /// They pass, unimpaired.
    Open,
}

/// Which way packets go, as the sandbox sees it: egress leaves it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// Both ways, each with random numbers and queues of its own.
    #[default]
    Both,
    /// Out of the sandbox.
    Egress,
    /// Into the sandbox.
    Ingress,
}

/// What happens to some of the packets. What isn't set doesn't happen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Rule {
    /// Its name in reports, unique. Its random numbers depend on it, and not on where the rule stands. Default: `rule-` and its
    /// number, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<Name>,
    /// Which way. Default: `both`.
    pub direction: Direction,
    /// Which packets. Default: all.
    #[serde(rename = "match", skip_serializing_if = "Match::is_all")]
    pub matches: Match,
    /// A network by name, such as `lte`, whose settings fill those that are absent here. See `sandwire impair presets`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preset: Option<Name>,
    /// Whether the way is cut: everything is dropped, as `partition`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub partition: bool,
    /// Whether the rule swallows what it matches, as `blackhole`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub blackhole: bool,
    /// A line that comes and goes: `up 10s down 1s`, or a table.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = presentation::flap)]
    pub flap: Option<Flap>,
    /// The largest packet that passes: `1400`, or a table.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = presentation::mtu)]
    pub mtu: Option<Mtu>,
    /// Which are lost: `1%`, or a table.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = presentation::loss)]
    pub loss: Option<Loss>,
    /// The bottleneck: `10mbit`, or a table.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = presentation::rate)]
    pub rate: Option<Rate>,
    /// The bottleneck, from a trace: a file, or a table. Not together with `rate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = presentation::trace)]
    pub trace: Option<Trace>,
    /// How long packets are under way: `50ms`, or a table.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = presentation::delay)]
    pub delay: Option<Delay>,
    /// Packets that others overtake: `5% distance 3`, or a table.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = presentation::reorder)]
    pub reorder: Option<Reorder>,
    /// Packets that arrive twice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duplicate: Option<Percent>,
    /// Packets with flipped bits: `0.1%`, or a table.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = presentation::corrupt)]
    pub corrupt: Option<Corrupt>,
    /// A NAT that forgets its mappings: `30s`, or a table.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = presentation::nat_rebind)]
    pub nat_rebind: Option<NatRebind>,
}

/// Which packets. All that is given must hold. Fragments after the first carry no ports and match only where none are asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Match {
    /// IP version, 4 or 6.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<u8>,
    /// `tcp`, `udp`, `icmp` (ICMP and ICMPv6), or a number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub protocol: Option<Protocol>,
    /// Addresses of the sandbox.
    #[serde(
        skip_serializing_if = "Option::is_none",
        deserialize_with = "presentation::network"
    )]
    #[schema(value_type = Option<String>)]
    pub local: Option<IpNet>,
    /// Addresses of the far side.
    #[serde(
        skip_serializing_if = "Option::is_none",
        deserialize_with = "presentation::network"
    )]
    #[schema(value_type = Option<String>, example = "10.0.0.0/8")]
    pub peer: Option<IpNet>,
    /// Ports of the sandbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<Ports>,
    /// Ports of the far side.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer_port: Option<Ports>,
    /// VLAN, 1 to 4094.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vlan: Option<u16>,
}

/// A protocol above IP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// ICMP and ICMPv6.
    Icmp,
    /// The one of that number.
    Number(u8),
}

/// Rules that an impairment may have, after presets have been filled in.
pub const RULES_MAX: usize = 256;

impl Impairment {
    /// Whether no packet can be affected.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        self.rules.iter().all(Rule::is_nothing)
    }

    /// The name of the rule at this place, given or not.
    #[must_use]
    pub fn rule_name(&self, index: usize) -> String {
        let name = self.rules.get(index).and_then(|rule| rule.name.as_ref());
        name.map_or_else(|| format!("rule-{}", index + 1), Name::to_string)
    }

    /// Reads the files of traces with `read`, which gets their paths as they were written, and puts the content in its place.
    ///
    /// # Errors
    /// Whatever `read` says, with rule and field.
    pub fn read_files<E: std::fmt::Display>(
        &mut self,
        mut read: impl FnMut(&str) -> Result<String, E>,
    ) -> Result<(), InvalidImpairment> {
        for index in 0..self.rules.len() {
            let name = self.rule_name(index);
            let Some(trace) = &mut self.rules[index].trace else {
                continue;
            };
            if trace.content.is_some() {
                continue;
            }
            let content = read(&trace.file).map_err(|error| {
                let problem = format!("read {}: {error}", trace.file);
                InvalidImpairment::field(&name, "trace", problem)
            })?;
            trace.content = Some(content);
        }
        Ok(())
    }

    /// The same without the content of traces, which may be long.
    #[must_use]
    pub fn without_contents(&self) -> Self {
        let without = |rule: &Rule| Rule {
            trace: rule.trace.as_ref().map(|trace| Trace {
                file: trace.file.clone(),
                content: None,
                ..*trace
            }),
            ..rule.clone()
        };
        Self {
            rules: self.rules.iter().map(without).collect(),
            ..self.clone()
        }
    }
}

impl Rule {
    /// Whether packets that match pass untouched.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        let unimpaired = Self {
            name: self.name.clone(),
            direction: self.direction,
            matches: self.matches.clone(),
            ..Self::default()
        };
        *self == unimpaired
    }
}

impl Match {
    /// Whether it is every packet.
    #[must_use]
    pub fn is_all(&self) -> bool {
        *self == Self::default()
    }
}

impl Direction {
    /// Whether packets of `one`, which is one of the two ways, are meant.
    #[must_use]
    pub fn covers(self, one: Self) -> bool {
        self == Self::Both || self == one
    }
}

#[cfg(test)]
mod tests;

//! What can happen to the packets of a rule: one type for each field of [`Rule`](super::Rule).
//!
//! Each can be written as a text, which is what follows its word on the command line (`rate = "10mbit codel"`), or as a
//! table of the same settings.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::quantity::{BitRate, PacketRange, Percent, QueueLimit, TimeSpan};

/// Which packets are lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Each packet for itself.
    Independent {
        /// Of the packets.
        share: Percent,
    },
    /// Two states, good and bad: losses in bursts.
    GilbertElliott {
        /// From good to bad, per packet.
        p: Percent,
        /// From bad to good, per packet.
        r: Percent,
        /// Of the packets in the bad state.
        loss_bad: Percent,
        /// Of the packets in the good state.
        loss_good: Percent,
    },
    /// Four states, as in netem's `loss state`: bursts with gaps in them, and single losses.
    FourState {
        /// From receiving to a burst of losses.
        p13: Percent,
        /// From a burst of losses to receiving.
        p31: Percent,
        /// From losing to receiving within a burst.
        p32: Percent,
        /// From receiving to losing within a burst.
        p23: Percent,
        /// From receiving to a single loss.
        p14: Percent,
    },
    /// These packets and no others.
    Packets {
        /// Their numbers within the rule, from 0.
        packets: Vec<PacketRange>,
    },
}

/// A [`Loss`] as a table. Which settings belong together is checked when it is read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LossTable {
    /// `independent` (with `share`), `gilbert-elliott` (with `p`, `r`, `loss_bad`, `loss_good`), `4-state` (with `p13` to
    /// `p14`) or `packets` (with `packets`). Default: `packets` if these are given, else `independent`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<LossKind>,
    /// Share of packets lost.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share: Option<Percent>,
    /// From good to bad, per packet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p: Option<Percent>,
    /// From bad to good, per packet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub r: Option<Percent>,
    /// Loss in the bad state. Default: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_bad: Option<Percent>,
    /// Loss in the good state. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_good: Option<Percent>,
    /// From receiving to a burst of losses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p13: Option<Percent>,
    /// From a burst of losses to receiving. Default: what `p13` leaves of 100%, as in netem.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p31: Option<Percent>,
    /// From losing to receiving within a burst. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p32: Option<Percent>,
    /// From receiving to losing within a burst. Default: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p23: Option<Percent>,
    /// From receiving to a single loss. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p14: Option<Percent>,
    /// Numbers of packets within the rule, from 0: `[3, 17, "20-29"]`.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub packets: Vec<PacketRange>,
}

/// Names of loss models.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LossKind {
    /// See [`Loss::Independent`].
    Independent,
    /// See [`Loss::GilbertElliott`].
    GilbertElliott,
    /// See [`Loss::FourState`].
    #[serde(rename = "4-state")]
    FourState,
    /// See [`Loss::Packets`].
    Packets,
}

/// How long packets are under way beyond what rate and queue cost them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(remote = "Self", deny_unknown_fields, default)]
pub struct Delay {
    /// The part that all packets have.
    pub mean: TimeSpan,
    /// How far delays differ: half the range of `uniform`, the standard deviation of the others. Default: not.
    pub jitter: TimeSpan,
    /// Default: `uniform`.
    pub distribution: Distribution,
    /// Delays to choose from, each equally often, added to `mean`; instead of `jitter` and `distribution`. At most 10,000.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub samples: Vec<TimeSpan>,
    /// Of successive packets' jitter, below 100%. Default: none.
    pub correlation: Percent,
    /// Whether a packet waits for those before it. Default: `keep`.
    pub order: Order,
    /// What may be under way at once. Default: 262,144 packets, 256 MiB; more is refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<QueueLimit>,
}

/// What jitter looks like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Distribution {
    /// All delays in the range, equally often.
    #[default]
    Uniform,
    /// The bell curve.
    Normal,
    /// Pareto with index 3: mostly a little less than the mean, seldom far more.
    Pareto,
    /// One part normal to three parts Pareto.
    ParetoNormal,
}

/// Whether jitter lets packets overtake each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// No: each waits for those before it.
    #[default]
    Keep,
    /// Yes.
    Any,
}

/// A line of so many bits per second, and the queue before it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(remote = "Self", deny_unknown_fields)]
pub struct Rate {
    /// Bits per second of Ethernet frames, 10 kbit to 10 gbit.
    pub rate: BitRate,
    /// What waits for the line. Default: `drop-tail`.
    #[serde(default)]
    pub queue: QueueKind,
    /// What may wait. Default: 10,000 packets, 16 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<QueueLimit>,
    /// How long packets may wait, for `codel` and `fq-codel`. Default: 5 ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<TimeSpan>,
    /// For how long they may wait longer. Default: 100 ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<TimeSpan>,
    /// Queues of `fq-codel`. Default: 1024.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flows: Option<u32>,
    /// Bytes that each queue of `fq-codel` sends in its turn. Default: 1514.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantum: Option<u32>,
    /// Bytes that each frame occupies beyond its own; negative if the line carries less than the Ethernet header. Default: 0.
    #[serde(default)]
    pub overhead: i32,
    /// Whether frames are cut into ATM cells, as ADSL does. Default: false.
    #[serde(default)]
    pub cells: bool,
}

/// A line whose opportunities to send a Mahimahi trace gives, and the queue before it. Instead of a [`Rate`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(remote = "Self", deny_unknown_fields)]
pub struct Trace {
    /// The file, relative to where the command is run, or to the scenario's or the lab's own file.
    #[serde(default)]
    pub file: String,
    /// What is in the file. Whoever sends an impairment to a service puts it here; the service reads no files of others. Absent in
    /// what is shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// What waits for the line. Default: `drop-tail`.
    #[serde(default)]
    pub queue: QueueKind,
    /// What may wait. Default: 10,000 packets, 16 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<QueueLimit>,
    /// See [`Rate::target`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<TimeSpan>,
    /// See [`Rate::interval`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<TimeSpan>,
    /// See [`Rate::flows`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flows: Option<u32>,
    /// See [`Rate::quantum`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantum: Option<u32>,
}

/// What waits for a line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum QueueKind {
    /// First in, first out; what doesn't fit is dropped.
    #[default]
    DropTail,
    /// One queue that is kept short (RFC 8289).
    Codel,
    /// A short queue for each flow, and turns between them (RFC 8290).
    FqCodel,
}

/// The queue of a [`Rate`] or of a [`Trace`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Queue {
    /// See [`Rate::queue`].
    pub kind: QueueKind,
    /// See [`Rate::limit`].
    pub limit: Option<QueueLimit>,
    /// See [`Rate::target`].
    pub target: Option<TimeSpan>,
    /// See [`Rate::interval`].
    pub interval: Option<TimeSpan>,
    /// See [`Rate::flows`].
    pub flows: Option<u32>,
    /// See [`Rate::quantum`].
    pub quantum: Option<u32>,
}

/// Packets that others overtake.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(remote = "Self", deny_unknown_fields)]
pub struct Reorder {
    /// Of the packets that are held back.
    pub share: Percent,
    /// How many later packets overtake each of them, 1 to 10,000. Default: 1.
    #[serde(default = "one")]
    pub distance: u32,
    /// After how long it goes on though fewer came. Default: 100 ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within: Option<TimeSpan>,
}

/// Packets that arrive with flipped bits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(remote = "Self", deny_unknown_fields)]
pub struct Corrupt {
    /// Of the packets.
    pub share: Percent,
    /// Bits that flip in each, behind the Ethernet header, 1 to 1000. Default: 1.
    #[serde(default = "one")]
    pub bits: u32,
    /// Whether the checksums are made right again, so that the receiver's stack doesn't notice. Default: `broken`.
    #[serde(default)]
    pub checksum: Checksum,
}

/// What becomes of the checksums of a corrupted packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Checksum {
    /// They stay as they are: the receiver's stack drops the packet.
    #[default]
    Broken,
    /// They are made right: what flips below the IP and transport headers reaches the program.
    Repaired,
}

/// A line that comes and goes: up for a while, then down, again and again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(remote = "Self", deny_unknown_fields)]
pub struct Flap {
    /// How long packets pass.
    pub up: TimeSpan,
    /// How long they are dropped then.
    pub down: TimeSpan,
    /// Time from when it is set until the first `up` begins; it passes packets until then. Default: none.
    #[serde(default)]
    pub after: TimeSpan,
}

/// The largest packet that passes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(remote = "Self", deny_unknown_fields)]
pub struct Mtu {
    /// Bytes of an IP packet, 68 to 65,535.
    pub bytes: u32,
    /// Whether the sender of a larger one is told by ICMP, as a router does that can't fragment. Default: true; false makes a black
    /// hole for path MTU discovery.
    #[serde(default = "yes")]
    pub icmp: bool,
    /// Whether IPv4 packets that may be fragmented are. Default: true; otherwise they are dropped.
    #[serde(default = "yes")]
    pub fragment: bool,
}

/// A NAT on the way that forgets: from time to time the far side sees the sandbox's flows come from another port, or
/// address.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(remote = "Self", deny_unknown_fields, default)]
pub struct NatRebind {
    /// Time between changes. Default: there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every: Option<TimeSpan>,
    /// Time from when it is set to the first change. Default: `every`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<TimeSpan>,
    /// Addresses that flows come from, one after the other; packets to them must come back this way. Default: the address stays
    /// and the port changes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<IpAddr>,
}

fn one() -> u32 {
    1
}

fn yes() -> bool {
    true
}

/// A line says what waits for it in fields of its own, so that its table is flat.
macro_rules! with_queue {
    ($($line:ident),*) => {$(
        impl $line {
            /// What waits for the line.
            #[must_use]
            pub fn queue(&self) -> Queue {
                Queue {
                    kind: self.queue,
                    limit: self.limit,
                    target: self.target,
                    interval: self.interval,
                    flows: self.flows,
                    quantum: self.quantum,
                }
            }

            /// The same line with this queue.
            #[must_use]
            pub fn with_queue(self, queue: Queue) -> Self {
                Self {
                    queue: queue.kind,
                    limit: queue.limit,
                    target: queue.target,
                    interval: queue.interval,
                    flows: queue.flows,
                    quantum: queue.quantum,
                    ..self
                }
            }
        }
    )*};
}

with_queue!(Rate, Trace);

impl TryFrom<LossTable> for Loss {
    type Error = InvalidLoss;

    fn try_from(table: LossTable) -> Result<Self, InvalidLoss> {
        let kind = table.model.unwrap_or(if table.packets.is_empty() {
            LossKind::Independent
        } else {
            LossKind::Packets
        });
        let needed = |name: &'static str, value: Option<Percent>| {
            value.ok_or(InvalidLoss::Missing { kind, name })
        };
        let loss = match kind {
            LossKind::Independent => Self::Independent {
                share: needed("share", table.share)?,
            },
            LossKind::GilbertElliott => Self::GilbertElliott {
                p: needed("p", table.p)?,
                r: needed("r", table.r)?,
                loss_bad: table.loss_bad.unwrap_or(Percent::all()),
                loss_good: table.loss_good.unwrap_or_default(),
            },
            LossKind::FourState => {
                let p13 = needed("p13", table.p13)?;
                let rest = Percent {
                    billionths: Percent::all().billionths.saturating_sub(p13.billionths),
                };
                Self::FourState {
                    p13,
                    p31: table.p31.unwrap_or(rest),
                    p32: table.p32.unwrap_or_default(),
                    p23: table.p23.unwrap_or(Percent::all()),
                    p14: table.p14.unwrap_or_default(),
                }
            }
            LossKind::Packets => Self::Packets {
                packets: table.packets.clone(),
            },
        };
        let known = LossTable::from(loss.clone());
        let foreign = table
            .given()
            .find(|(name, _)| !known.given().any(|(other, _)| other == *name));
        match foreign {
            Some((name, _)) => Err(InvalidLoss::Foreign { kind, name }),
            None => Ok(loss),
        }
    }
}

impl From<Loss> for LossTable {
    fn from(loss: Loss) -> Self {
        let none = Self::default();
        match loss {
            Loss::Independent { share } => Self {
                model: Some(LossKind::Independent),
                share: Some(share),
                ..none
            },
            Loss::GilbertElliott {
                p,
                r,
                loss_bad,
                loss_good,
            } => Self {
                model: Some(LossKind::GilbertElliott),
                p: Some(p),
                r: Some(r),
                loss_bad: Some(loss_bad),
                loss_good: Some(loss_good),
                ..none
            },
            Loss::FourState {
                p13,
                p31,
                p32,
                p23,
                p14,
            } => Self {
                model: Some(LossKind::FourState),
                p13: Some(p13),
                p31: Some(p31),
                p32: Some(p32),
                p23: Some(p23),
                p14: Some(p14),
                ..none
            },
            Loss::Packets { packets } => Self {
                model: Some(LossKind::Packets),
                packets,
                ..none
            },
        }
    }
}

impl LossTable {
    /// Settings that are there, by name.
    fn given(&self) -> impl Iterator<Item = (&'static str, Percent)> + use<> {
        let packets = (!self.packets.is_empty()).then_some(Percent::default());
        [
            ("share", self.share),
            ("p", self.p),
            ("r", self.r),
            ("loss_bad", self.loss_bad),
            ("loss_good", self.loss_good),
            ("p13", self.p13),
            ("p31", self.p31),
            ("p32", self.p32),
            ("p23", self.p23),
            ("p14", self.p14),
            ("packets", packets),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
    }
}

/// Why a [`LossTable`] is no [`Loss`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidLoss {
    /// A setting lacks.
    #[error("loss model {kind} needs {name}")]
    Missing {
        /// The model.
        kind: LossKind,
        /// The setting.
        name: &'static str,
    },
    /// A setting of another model.
    #[error("loss model {kind} has no {name}: choose another model, or leave it out")]
    Foreign {
        /// The model.
        kind: LossKind,
        /// The setting.
        name: &'static str,
    },
}

//! From what users write to what the models take.
//!
//! Moments in what comes out, when a line goes down, a trace begins or a NAT forgets, count from the moment of
//! [`CompiledRule::settings_from`]: nothing here knows the time.

mod both;

use std::hash::Hasher;

use sandwire_api::impairment::{self as api, Protocol};
use sandwire_api::impairment::{
    Checksum, Corrupt, Delay, Distribution as DistributionName, Impairment, InvalidImpairment,
    Loss, Match as MatchSpec, Mtu, NatRebind, Order, Queue, QueueKind, QueueLimit, Rate, Reorder,
    Rule, Trace as TraceSpec,
    check::{QUEUE_BYTES_MAX, QUEUE_PACKETS_MAX},
};
use sandwire_engine::classify::{self, IpVersion, Match};

pub use self::both::Compiled;
use self::both::Traces;
use crate::{
    Nanoseconds,
    corrupt::CorruptModel,
    delay::{DelayModel, Distribution, Samples},
    flap::FlapModel,
    line::Capacity,
    loss::{FourState, LossModel, PacketList},
    mtu::{MtuModel, WithoutDf},
    nat::NatModel,
    queue::{CodelSettings, FqCodelSettings, Limit, QueueModel},
    random::Direction,
    rate::Overhead,
    reorder::ReorderModel,
    settings::{Bottleneck, DELAY_LIMIT, Settings},
    trace::TraceError,
};

/// Why an impairment can't be carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    /// It asks for what can't be.
    #[error(transparent)]
    Invalid(#[from] InvalidImpairment),
    /// A trace isn't one.
    #[error("rule '{rule}', trace {file}: {source}")]
    Trace {
        /// Name of the rule.
        rule: String,
        /// The file.
        file: String,
        /// What is wrong with it.
        source: TraceError,
    },
    /// Nobody has read a trace's file.
    #[error(
        "rule '{rule}', trace {file}: its content isn't here; whoever sends an impairment to a service reads the file first"
    )]
    TraceNotRead {
        /// Name of the rule.
        rule: String,
        /// The file.
        file: String,
    },
}

/// One rule, for one direction.
#[derive(Clone, Debug, PartialEq)]
pub struct CompiledRule {
    /// Its name.
    pub name: String,
    /// A packet is meant if any of these matches.
    pub matches: Vec<Match>,
    /// Whether the checksums of corrupted packets are made right.
    pub repairs_checksums: bool,
    /// How late 99 of 100 packets may be.
    pub budget: Nanoseconds,
    /// Moments in it count from 0.
    settings: Settings,
}

/// What a timing budget is at least, unless the impairment says otherwise.
const BUDGET_MIN: Nanoseconds = 1_000_000;

/// How long a packet is held back for others at most, unless the impairment says otherwise.
const REORDER_WAIT: Nanoseconds = 100_000_000;

/// The rules for one direction, in their order.
///
/// # Errors
/// Says which rule and field is wrong, and how.
pub fn compile(
    impairment: &Impairment,
    direction: Direction,
) -> Result<Vec<CompiledRule>, CompileError> {
    compile_resolved(&impairment.resolved()?, direction, &mut Traces::default())
}

/// The same of one whose presets are filled in.
fn compile_resolved<'a>(
    resolved: &'a Impairment,
    direction: Direction,
    traces: &mut Traces<'a>,
) -> Result<Vec<CompiledRule>, CompileError> {
    let way = match direction {
        Direction::Egress => api::Direction::Egress,
        Direction::Ingress => api::Direction::Ingress,
    };
    let rules = (0..).zip(&resolved.rules);
    rules
        .filter(|(_, rule)| rule.direction.covers(way))
        .map(|(index, rule)| {
            let settings = settings(rule, &resolved.rule_name(index), traces)?;
            let budget = resolved.budget.map_or_else(
                || (rule.delay.as_ref()).map_or(0, |delay| delay.mean.as_nanoseconds() / 100),
                |budget| budget.as_nanoseconds(),
            );
            let is_default = resolved.budget.is_none();
            Ok(CompiledRule {
                name: resolved.rule_name(index),
                matches: matches(&rule.matches, direction),
                repairs_checksums: (rule.corrupt.as_ref())
                    .is_some_and(|corrupt| corrupt.checksum == Checksum::Repaired),
                budget: if is_default {
                    budget.max(BUDGET_MIN)
                } else {
                    budget
                },
                settings,
            })
        })
        .collect()
}

impl CompiledRule {
    /// Its settings, if it begins at `now`.
    #[must_use]
    pub fn settings_from(&self, now: Nanoseconds) -> Settings {
        let mut settings = self.settings.clone();
        if let Some(flap) = &mut settings.flap {
            flap.start = flap.start.saturating_add(now);
        }
        if let Some(nat) = &mut settings.nat {
            nat.first = nat.first.saturating_add(now);
        }
        if let Some(bottleneck) = &mut settings.bottleneck
            && let Capacity::Trace { start, .. } = &mut bottleneck.capacity
        {
            *start = start.saturating_add(now);
        }
        settings
    }

    /// Its settings, if it takes the place of `before`, with which `running` began: what is the same goes on.
    #[must_use]
    pub fn settings_after(&self, now: Nanoseconds, before: &Self, running: &Settings) -> Settings {
        let mut settings = self.settings_from(now);
        if self.settings.flap == before.settings.flap {
            settings.flap = running.flap;
        }
        if self.settings.nat == before.settings.nat {
            settings.nat.clone_from(&running.nat);
        }
        let capacity = |settings: &Settings| {
            let bottleneck = settings.bottleneck.as_ref();
            bottleneck.map(|bottleneck| bottleneck.capacity.clone())
        };
        if capacity(&self.settings) == capacity(&before.settings)
            && let (Some(new), Some(running)) = (&mut settings.bottleneck, &running.bottleneck)
        {
            new.capacity = running.capacity.clone();
        }
        settings
    }

    /// Whether it has the same settings as another.
    #[must_use]
    pub fn has_settings_of(&self, other: &Self) -> bool {
        self.settings == other.settings
    }

    /// Whether it translates addresses or ports.
    #[must_use]
    pub fn translates(&self) -> bool {
        self.settings.nat.is_some()
    }

    /// The number of its random streams: the same for the same name, wherever the rule stands.
    #[must_use]
    pub fn stream(&self) -> u32 {
        let mut hash = Fnv(0x811c_9dc5);
        hash.write(self.name.as_bytes());
        hash.0
    }
}

/// FNV-1a with 32 bits (<http://www.isthe.com/chongo/tech/comp/fnv/>). Part of every recorded run: never change it.
struct Fnv(u32);

impl Hasher for Fnv {
    fn finish(&self) -> u64 {
        self.0.into()
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
        }
    }
}

fn matches(spec: &MatchSpec, direction: Direction) -> Vec<Match> {
    let version = spec.version.map(|version| match version {
        4 => IpVersion::V4,
        _ => IpVersion::V6,
    });
    let ports = |ports: api::Ports| ports.first..=ports.last;
    let egress = Match {
        version,
        protocol: None,
        source: spec.local,
        destination: spec.peer,
        source_ports: spec.port.map(ports),
        destination_ports: spec.peer_port.map(ports),
        vlan: spec.vlan,
    };
    let one = match direction {
        Direction::Egress => egress,
        Direction::Ingress => egress.reversed(),
    };
    let protocols: &[u8] = match &spec.protocol {
        None => return vec![one],
        Some(Protocol::Tcp) => &[classify::TCP],
        Some(Protocol::Udp) => &[classify::UDP],
        Some(Protocol::Icmp) => &[classify::ICMP, classify::ICMPV6],
        Some(Protocol::Number(number)) => &[*number],
    };
    let with = |protocol: &u8| Match {
        protocol: Some(*protocol),
        ..one.clone()
    };
    protocols.iter().map(with).collect()
}

fn settings<'a>(
    rule: &'a Rule,
    name: &str,
    traces: &mut Traces<'a>,
) -> Result<Settings, CompileError> {
    let bottleneck = match (&rule.rate, &rule.trace) {
        (Some(rate), _) => Some(from_rate(rate)),
        (None, Some(trace)) => Some(from_trace(trace, name, traces)?),
        (None, None) => None,
    };
    let flap = rule.flap.as_ref().map(|flap| FlapModel {
        up: flap.up.as_nanoseconds(),
        down: flap.down.as_nanoseconds(),
        start: flap.after.as_nanoseconds(),
    });
    let delay_limit = rule.delay.as_ref().and_then(|delay| delay.limit);
    Ok(Settings {
        nat: rule.nat_rebind.as_ref().map(from_rebind),
        partition: rule.partition,
        blackhole: rule.blackhole,
        flap,
        mtu: rule.mtu.as_ref().map(from_mtu),
        loss: rule.loss.as_ref().map(from_loss),
        bottleneck,
        delay: rule.delay.as_ref().map(from_delay),
        delay_limit: delay_limit.map_or(DELAY_LIMIT, from_limit),
        reorder: rule.reorder.as_ref().map(from_reorder),
        duplicate: rule.duplicate.map_or(0.0, api::Percent::share),
        corrupt: rule.corrupt.as_ref().map(from_corrupt),
        ..Settings::default()
    })
}

fn from_loss(loss: &Loss) -> LossModel {
    match loss {
        Loss::Independent { share } => LossModel::Independent {
            probability: share.share(),
        },
        Loss::GilbertElliott {
            p,
            r,
            loss_bad,
            loss_good,
        } => LossModel::GilbertElliott {
            p: p.share(),
            r: r.share(),
            loss_bad: loss_bad.share(),
            loss_good: loss_good.share(),
        },
        Loss::FourState {
            p13,
            p31,
            p32,
            p23,
            p14,
        } => LossModel::FourState(FourState {
            p13: p13.share(),
            p31: p31.share(),
            p32: p32.share(),
            p23: p23.share(),
            p14: p14.share(),
        }),
        Loss::Packets { packets } => {
            let ranges = packets.iter().map(|range| (range.first, range.last));
            LossModel::Exact(PacketList::new(ranges))
        }
    }
}

fn from_delay(delay: &Delay) -> DelayModel {
    let distribution = match delay.distribution {
        _ if !delay.samples.is_empty() => {
            let samples = delay.samples.iter().map(|sample| sample.as_nanoseconds());
            Distribution::Table(Samples::new(samples.collect()))
        }
        DistributionName::Uniform => Distribution::Uniform,
        DistributionName::Normal => Distribution::Normal,
        DistributionName::Pareto => Distribution::Pareto,
        DistributionName::ParetoNormal => Distribution::ParetoNormal,
    };
    DelayModel {
        constant: delay.mean.as_nanoseconds(),
        jitter: delay.jitter.as_nanoseconds(),
        distribution,
        correlation: delay.correlation.share(),
        keep_order: delay.order == Order::Keep,
    }
}

fn from_rate(rate: &Rate) -> Bottleneck {
    Bottleneck {
        capacity: Capacity::Rate {
            bits_per_second: rate.rate.bits_per_second,
            overhead: Overhead {
                bytes: rate.overhead,
                cells: rate.cells,
            },
        },
        queue: from_queue(&rate.queue()),
    }
}

fn from_trace<'a>(
    trace: &'a TraceSpec,
    rule: &str,
    traces: &mut Traces<'a>,
) -> Result<Bottleneck, CompileError> {
    let (rule, file) = (rule.to_owned(), trace.file.clone());
    let Some(content) = &trace.content else {
        return Err(CompileError::TraceNotRead { rule, file });
    };
    let read = traces.read(content);
    let read = read.map_err(|source| CompileError::Trace { rule, file, source })?;
    Ok(Bottleneck {
        capacity: Capacity::Trace {
            trace: read,
            start: 0,
        },
        queue: from_queue(&trace.queue()),
    })
}

fn from_queue(queue: &Queue) -> QueueModel {
    let limit = queue.limit.map_or_else(Limit::default, from_limit);
    let usual = CodelSettings::default();
    let codel = CodelSettings {
        target: (queue.target).map_or(usual.target, |target| target.as_nanoseconds()),
        interval: (queue.interval).map_or(usual.interval, |interval| interval.as_nanoseconds()),
        limit,
    };
    let usual = FqCodelSettings::default();
    match queue.kind {
        QueueKind::DropTail => QueueModel::DropTail(limit),
        QueueKind::Codel => QueueModel::Codel(codel),
        QueueKind::FqCodel => QueueModel::FqCodel(FqCodelSettings {
            codel,
            flows: (queue.flows)
                .and_then(|flows| usize::try_from(flows).ok())
                .unwrap_or(usual.flows),
            quantum: queue.quantum.unwrap_or(usual.quantum),
        }),
    }
}

/// What isn't limited is only limited by what may be asked for at most.
fn from_limit(limit: QueueLimit) -> Limit {
    let packets = limit.packets.unwrap_or(QUEUE_PACKETS_MAX);
    Limit {
        packets: usize::try_from(packets).unwrap_or(usize::MAX),
        bytes: limit.bytes.unwrap_or(QUEUE_BYTES_MAX),
    }
}

fn from_mtu(mtu: &Mtu) -> MtuModel {
    MtuModel {
        bytes: mtu.bytes,
        answer: mtu.icmp,
        without_df: if mtu.fragment {
            WithoutDf::Fragment
        } else {
            WithoutDf::Drop
        },
    }
}

fn from_reorder(reorder: &Reorder) -> ReorderModel {
    ReorderModel {
        probability: reorder.share.share(),
        distance: reorder.distance,
        wait_max: (reorder.within).map_or(REORDER_WAIT, |within| within.as_nanoseconds()),
    }
}

fn from_corrupt(corrupt: &Corrupt) -> CorruptModel {
    CorruptModel {
        probability: corrupt.share.share(),
        bits: corrupt.bits,
        first_byte: 14,
    }
}

fn from_rebind(rebind: &NatRebind) -> NatModel {
    let every = rebind.every.map(|every| every.as_nanoseconds());
    NatModel {
        first: (rebind.after).map_or(every.unwrap_or(0), |after| after.as_nanoseconds()),
        every,
        addresses: rebind.addresses.clone(),
    }
}

#[cfg(test)]
mod tests;

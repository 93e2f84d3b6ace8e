//! Whether an impairment can be: every number in its range, every combination one that means something.

use std::{collections::BTreeSet, fmt};

use ipnet::IpNet;

use super::{
    Corrupt, Delay, Direction, Distribution, Flap, Impairment, Loss, Match, Mtu, NatRebind,
    Percent, Protocol, Queue, QueueKind, QueueLimit, RULES_MAX, Rate, Reorder, Rule, TimeSpan,
    Trace, preset::Preset,
};

/// What is wrong with an impairment.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidImpairment {
    /// The seed is too large for TOML's integers.
    #[error("seed is {seed}: it must be below 2^63")]
    Seed {
        /// What was given.
        seed: u64,
    },
    /// The budget makes no sense.
    #[error("budget is {budget}: it must be above 0")]
    Budget {
        /// What was given.
        budget: TimeSpan,
    },
    /// There are too many rules.
    #[error("{count} rules: at most {RULES_MAX} are possible; a preset counts as two")]
    TooManyRules {
        /// How many.
        count: usize,
    },
    /// Two rules have one name.
    #[error("two rules for one way are called '{name}': give each a name of its own")]
    NameTwice {
        /// The name.
        name: String,
    },
    /// A field of a rule.
    #[error("rule '{rule}', {field}: {problem}")]
    Field {
        /// Name of the rule.
        rule: String,
        /// The field, such as `loss` or `delay.jitter`.
        field: &'static str,
        /// What is wrong, and what is possible.
        problem: String,
    },
}

/// Packets that a queue or a delay may hold when asked: beyond that a process runs out of memory before it is full.
pub const QUEUE_PACKETS_MAX: u64 = 1 << 20;
/// Bytes that a queue or a delay may hold when asked.
pub const QUEUE_BYTES_MAX: u64 = 1 << 30;
/// Bits per second that a line may have.
pub const BITS_PER_SECOND: std::ops::RangeInclusive<u64> = 10_000..=10_000_000_000;
/// Ranges of packets that a list of losses may have, samples of a delay, opportunities in a text of a trace.
pub const LIST_MAX: usize = 10_000;

const HOUR: TimeSpan = TimeSpan::milliseconds(3_600_000);
const WEEK: TimeSpan = TimeSpan::milliseconds(7 * 24 * 3_600_000);
const MICROSECOND: TimeSpan = TimeSpan { nanoseconds: 1_000 };

/// What is wrong with a field of a rule that the caller knows.
type Problem = (&'static str, String);
type Checked = Result<(), Problem>;

impl InvalidImpairment {
    pub(super) fn field(rule: &str, field: &'static str, problem: String) -> Self {
        Self::Field {
            rule: rule.to_owned(),
            field,
            problem,
        }
    }

    /// The rule that is wrong, by name.
    #[must_use]
    pub fn rule(&self) -> Option<&str> {
        match self {
            Self::Field { rule: name, .. } | Self::NameTwice { name } => Some(name),
            Self::Seed { .. } | Self::Budget { .. } | Self::TooManyRules { .. } => None,
        }
    }
}

impl Impairment {
    /// Whether it can be done. Files that it names aren't looked at.
    ///
    /// # Errors
    /// The first thing that is wrong, with rule and field.
    pub fn check(&self) -> Result<(), InvalidImpairment> {
        self.resolved().map(drop)
    }

    /// The same after a check, with presets filled in and every rule named. A rule with a preset becomes one for each
    /// way that it covers, each with all that the rule says itself: a `nat_rebind` is in both.
    ///
    /// # Errors
    /// As [`Impairment::check`].
    pub fn resolved(&self) -> Result<Self, InvalidImpairment> {
        if self.seed > i64::MAX.unsigned_abs() {
            return Err(InvalidImpairment::Seed { seed: self.seed });
        }
        if let Some(budget) = self.budget.filter(|budget| budget.nanoseconds <= 0) {
            return Err(InvalidImpairment::Budget { budget });
        }
        // Before anything is built from them.
        if self.rules.len() > RULES_MAX {
            let count = self.rules.len();
            return Err(InvalidImpairment::TooManyRules { count });
        }
        let mut names = BTreeSet::new();
        let mut rules = Vec::with_capacity(self.rules.len());
        for (index, rule) in self.rules.iter().enumerate() {
            let name = self.rule_name(index);
            let in_field = |(field, problem)| InvalidImpairment::field(&name, field, problem);
            let mut named = rule.clone();
            named.name = name.parse().ok();
            // With its preset filled in it is for one way.
            check_ways(&named).map_err(in_field)?;
            let resolved = with_preset(named).map_err(in_field)?;
            for rule in &resolved {
                check_rule(rule).map_err(in_field)?;
                // One name for what happens each way is fine.
                let ways = [Direction::Egress, Direction::Ingress];
                for way in ways.into_iter().filter(|way| rule.direction.covers(*way)) {
                    if !names.insert((name.clone(), way == Direction::Egress)) {
                        return Err(InvalidImpairment::NameTwice { name });
                    }
                }
            }
            rules.extend(resolved);
        }
        if rules.len() > RULES_MAX {
            let count = rules.len();
            return Err(InvalidImpairment::TooManyRules { count });
        }
        Ok(Self {
            rules,
            ..self.clone()
        })
    }
}

/// The rule itself, or one for each way with what its preset says.
fn with_preset(mut rule: Rule) -> Result<Vec<Rule>, Problem> {
    let Some(name) = rule.preset.take() else {
        return Ok(vec![rule]);
    };
    let preset = Preset::find(name.as_str()).ok_or_else(|| {
        let known: Vec<&str> = super::PRESETS.iter().map(|preset| preset.name).collect();
        (
            "preset",
            format!("there is no '{name}': use {}", known.join(", ")),
        )
    })?;
    let ways = [Direction::Egress, Direction::Ingress];
    let ways = ways.into_iter().filter(|way| rule.direction.covers(*way));
    Ok(ways
        .map(|way| {
            let base = preset.rule(way);
            let own = rule.clone();
            let has_line = own.rate.is_some() || own.trace.is_some();
            Rule {
                direction: way,
                flap: own.flap.or(base.flap),
                mtu: own.mtu.or(base.mtu),
                loss: own.loss.or(base.loss),
                rate: own.rate.or(base.rate.filter(|_| !has_line)),
                delay: own.delay.or(base.delay),
                reorder: own.reorder.or(base.reorder),
                duplicate: own.duplicate.or(base.duplicate),
                corrupt: own.corrupt.or(base.corrupt),
                ..own
            }
        })
        .collect())
}

/// Whether the rule, as it was written, is for all the ways that it needs.
fn check_ways(rule: &Rule) -> Checked {
    if rule.nat_rebind.is_some() && rule.direction != Direction::Both {
        let problem = format!(
            "the rule must be for both ways, since answers are translated back; it is for {}",
            rule.direction
        );
        return Err(("nat_rebind", problem));
    }
    Ok(())
}

fn check_rule(rule: &Rule) -> Checked {
    check_match(&rule.matches)?;
    rule.flap.as_ref().map_or(Ok(()), check_flap)?;
    rule.mtu.as_ref().map_or(Ok(()), check_mtu)?;
    rule.loss.as_ref().map_or(Ok(()), check_loss)?;
    rule.rate.as_ref().map_or(Ok(()), check_rate)?;
    rule.trace.as_ref().map_or(Ok(()), check_trace)?;
    if rule.rate.is_some() && rule.trace.is_some() {
        return Err((
            "trace",
            "rate is there too; a rule has one line, so choose".to_owned(),
        ));
    }
    rule.delay.as_ref().map_or(Ok(()), check_delay)?;
    rule.reorder.as_ref().map_or(Ok(()), check_reorder)?;
    rule.duplicate
        .map_or(Ok(()), |share| check_share("duplicate", share))?;
    rule.corrupt.as_ref().map_or(Ok(()), check_corrupt)?;
    rule.nat_rebind.as_ref().map_or(Ok(()), check_nat_rebind)
}

fn check_match(matches: &Match) -> Checked {
    if let Some(version) = matches.version.filter(|version| ![4, 6].contains(version)) {
        return Err(("match.version", format!("{version} is neither 4 nor 6")));
    }
    let version_of = |net: &IpNet| if net.addr().is_ipv4() { 4 } else { 6 };
    let mut version = matches.version;
    for (field, net) in [
        ("match.local", &matches.local),
        ("match.peer", &matches.peer),
    ] {
        let Some(net) = net else { continue };
        let own = version_of(net);
        if version.is_some_and(|version| version != own) {
            return Err((
                field,
                format!("{net} is IPv{own}, the rest of the match is not: no packet has both"),
            ));
        }
        version = Some(own);
    }
    let has_ports = matches.protocol.is_none_or(|protocol| match protocol {
        Protocol::Tcp | Protocol::Udp => true,
        Protocol::Icmp => false,
        // TCP, UDP, DCCP, SCTP, UDP-Lite.
        Protocol::Number(number) => [6, 17, 33, 132, 136].contains(&number),
    });
    for (field, ports) in [
        ("match.port", matches.port),
        ("match.peer_port", matches.peer_port),
    ] {
        if ports.is_some() && !has_ports {
            return Err((
                field,
                "the protocol has no ports; use protocol tcp or udp".to_owned(),
            ));
        }
    }
    match matches.vlan {
        Some(vlan) => check_number("match.vlan", vlan.into(), 1, 4094),
        None => Ok(()),
    }
}

fn check_loss(loss: &Loss) -> Checked {
    match loss {
        Loss::Independent { share } => check_share("loss", *share),
        Loss::GilbertElliott {
            p,
            r,
            loss_bad,
            loss_good,
        } => {
            check_share("loss.p", *p)?;
            check_share("loss.r", *r)?;
            check_share("loss.loss_bad", *loss_bad)?;
            check_share("loss.loss_good", *loss_good)
        }
        Loss::FourState {
            p13,
            p31,
            p32,
            p23,
            p14,
        } => {
            check_share("loss.p13", *p13)?;
            check_share("loss.p31", *p31)?;
            check_share("loss.p32", *p32)?;
            check_share("loss.p23", *p23)?;
            check_share("loss.p14", *p14)?;
            check_sum("loss.p14", "p13 and p14", *p13, *p14)?;
            check_sum("loss.p32", "p31 and p32", *p31, *p32)
        }
        Loss::Packets { packets } => {
            if packets.is_empty() {
                return Err(("loss.packets", "there is none in the list".to_owned()));
            }
            check_length("loss.packets", packets.len())
        }
    }
}

fn check_sum(field: &'static str, what: &str, one: Percent, two: Percent) -> Checked {
    let sum = one.billionths.saturating_add(two.billionths);
    if sum > Percent::all().billionths {
        let sum = Percent { billionths: sum };
        return Err((
            field,
            format!("{what} leave one state, and are {sum} together: at most 100%"),
        ));
    }
    Ok(())
}

fn check_delay(delay: &Delay) -> Checked {
    check_time("delay", delay.mean, TimeSpan::default(), HOUR)?;
    check_time("delay.jitter", delay.jitter, TimeSpan::default(), HOUR)?;
    check_length("delay.samples", delay.samples.len())?;
    for sample in &delay.samples {
        check_time("delay.samples", *sample, TimeSpan::default(), HOUR)?;
    }
    let has_jitter = delay.jitter != TimeSpan::default();
    let has_samples = !delay.samples.is_empty();
    if has_jitter && has_samples {
        return Err((
            "delay.samples",
            "jitter is there too; samples say all of it".to_owned(),
        ));
    }
    if delay.distribution != Distribution::Uniform && !has_jitter {
        let problem = format!("{} needs jitter, such as 10ms", delay.distribution);
        return Err(("delay.distribution", problem));
    }
    if delay.correlation != Percent::default() {
        let below = Percent {
            billionths: Percent::all().billionths - 1,
        };
        check_range(
            "delay.correlation",
            delay.correlation,
            Percent::default(),
            below,
        )?;
        if !has_jitter && !has_samples {
            let problem = "without jitter all delays are equal: there is nothing to correlate";
            return Err(("delay.correlation", problem.to_owned()));
        }
    }
    check_limit("delay.limit", delay.limit)
}

fn check_rate(rate: &Rate) -> Checked {
    let bits = rate.rate.bits_per_second;
    if !BITS_PER_SECOND.contains(&bits) {
        return Err((
            "rate",
            format!("{} is not between 10kbit and 10gbit", rate.rate),
        ));
    }
    if !(-64..=256).contains(&rate.overhead) {
        return Err((
            "rate.overhead",
            format!("{} is not between -64 and 256 bytes", rate.overhead),
        ));
    }
    let fields = QueueFields {
        queue: "rate.queue",
        limit: "rate.limit",
        target: "rate.target",
        interval: "rate.interval",
        flows: "rate.flows",
        quantum: "rate.quantum",
    };
    check_queue(&rate.queue(), &fields)
}

fn check_trace(trace: &Trace) -> Checked {
    if trace.file.is_empty() && trace.content.is_none() {
        return Err((
            "trace.file",
            "there is neither a file nor content".to_owned(),
        ));
    }
    if let Some(problem) = path_problem(&trace.file) {
        return Err(("trace.file", problem.to_owned()));
    }
    let fields = QueueFields {
        queue: "trace.queue",
        limit: "trace.limit",
        target: "trace.target",
        interval: "trace.interval",
        flows: "trace.flows",
        quantum: "trace.quantum",
    };
    check_queue(&trace.queue(), &fields)
}

/// Why no text can hold the path of a trace's file, if none can.
pub(super) fn path_problem(path: &str) -> Option<&'static str> {
    path.contains(['"', '\n', '\0'])
        .then_some("the path has a quote or a line break in it; rename the file")
}

/// What the settings of a queue are called where they stand.
struct QueueFields {
    queue: &'static str,
    limit: &'static str,
    target: &'static str,
    interval: &'static str,
    flows: &'static str,
    quantum: &'static str,
}

fn check_queue(queue: &Queue, fields: &QueueFields) -> Checked {
    check_limit(fields.limit, queue.limit)?;
    let is_codel = queue.kind != QueueKind::DropTail;
    let is_fair = queue.kind == QueueKind::FqCodel;
    let foreign = [
        (
            fields.target,
            queue.target.is_some() && !is_codel,
            "codel or fq-codel",
        ),
        (
            fields.interval,
            queue.interval.is_some() && !is_codel,
            "codel or fq-codel",
        ),
        (fields.flows, queue.flows.is_some() && !is_fair, "fq-codel"),
        (
            fields.quantum,
            queue.quantum.is_some() && !is_fair,
            "fq-codel",
        ),
    ];
    if let Some((field, _, kinds)) = foreign.into_iter().find(|(_, is_foreign, _)| *is_foreign) {
        let problem = format!("only a queue of {kinds} has it; see {}", fields.queue);
        return Err((field, problem));
    }
    let minute = TimeSpan::milliseconds(60_000);
    if let Some(interval) = queue.interval {
        check_time(fields.interval, interval, MICROSECOND, minute)?;
    }
    if let Some(target) = queue.target {
        let interval = queue.interval.unwrap_or(TimeSpan::milliseconds(100));
        check_time(fields.target, target, MICROSECOND, interval)?;
    }
    if let Some(flows) = queue.flows {
        check_number(fields.flows, flows.into(), 1, 65_536)?;
    }
    match queue.quantum {
        Some(quantum) => check_number(fields.quantum, quantum.into(), 64, 65_536),
        None => Ok(()),
    }
}

fn check_reorder(reorder: &Reorder) -> Checked {
    check_share("reorder", reorder.share)?;
    check_number("reorder.distance", reorder.distance.into(), 1, 10_000)?;
    let within = reorder.within.unwrap_or(TimeSpan::milliseconds(100));
    check_time("reorder.within", within, MICROSECOND, HOUR)
}

fn check_corrupt(corrupt: &Corrupt) -> Checked {
    check_share("corrupt", corrupt.share)?;
    check_number("corrupt.bits", corrupt.bits.into(), 1, 1000)
}

fn check_flap(flap: &Flap) -> Checked {
    check_time("flap.up", flap.up, MICROSECOND, WEEK)?;
    check_time("flap.down", flap.down, MICROSECOND, WEEK)?;
    check_time("flap.after", flap.after, TimeSpan::default(), WEEK)
}

fn check_mtu(mtu: &Mtu) -> Checked {
    check_number("mtu", mtu.bytes.into(), 68, 65_535)
}

fn check_nat_rebind(rebind: &NatRebind) -> Checked {
    if let Some(every) = rebind.every {
        check_time("nat_rebind.every", every, TimeSpan::milliseconds(1), WEEK)?;
    }
    if let Some(after) = rebind.after {
        check_time("nat_rebind.after", after, TimeSpan::default(), WEEK)?;
    }
    if rebind.every.is_none() && rebind.after.is_none() {
        return Err(("nat_rebind", "say when: every 30s, or after 10s".to_owned()));
    }
    if rebind.addresses.len() > 64 {
        let count = rebind.addresses.len();
        return Err((
            "nat_rebind.addresses",
            format!("{count} are too many: at most 64"),
        ));
    }
    Ok(())
}

fn check_share(field: &'static str, share: Percent) -> Checked {
    check_range(field, share, Percent::default(), Percent::all())
}

fn check_time(field: &'static str, time: TimeSpan, least: TimeSpan, most: TimeSpan) -> Checked {
    check_range(field, time, least, most)
}

fn check_number(field: &'static str, number: u64, least: u64, most: u64) -> Checked {
    check_range(field, number, least, most)
}

fn check_range<T: PartialOrd + fmt::Display>(
    field: &'static str,
    value: T,
    least: T,
    most: T,
) -> Checked {
    if value < least || value > most {
        return Err((field, format!("{value} is not between {least} and {most}")));
    }
    Ok(())
}

fn check_length(field: &'static str, count: usize) -> Checked {
    if count > LIST_MAX {
        return Err((field, format!("{count} are too many: at most {LIST_MAX}")));
    }
    Ok(())
}

fn check_limit(field: &'static str, limit: Option<QueueLimit>) -> Checked {
    let Some(limit) = limit else {
        return Ok(());
    };
    if let Some(packets) = limit.packets {
        let is_possible = (1..=QUEUE_PACKETS_MAX).contains(&packets);
        let problem = || format!("{packets} packets: 1 to {QUEUE_PACKETS_MAX} are possible");
        is_possible
            .then_some(())
            .ok_or_else(|| (field, problem()))?;
    }
    if let Some(bytes) = limit.bytes {
        let is_possible = (64..=QUEUE_BYTES_MAX).contains(&bytes);
        let problem = || format!("{bytes} bytes: 64 to {QUEUE_BYTES_MAX} are possible");
        is_possible
            .then_some(())
            .ok_or_else(|| (field, problem()))?;
    }
    Ok(())
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Both => "both",
            Self::Egress => "egress",
            Self::Ingress => "ingress",
        })
    }
}

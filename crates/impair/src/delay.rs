//! How long each packet is under way, beyond what rate and queue cost it.
//!
//! A model gives each packet an absolute deadline: its departure, plus a constant, plus jitter drawn from
//! a distribution. A deadline is never before the departure: a negative delay becomes none. With
//! correlation the jitter of successive packets is a Gaussian chain whose values are mapped to the
//! distribution by its quantiles, so the distribution stays what was asked for (netem mixes uniform
//! numbers, which narrows it).

use std::sync::Arc;

use crate::{Nanoseconds, random::Draw};

/// What the jitter looks like.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Distribution {
    /// Every value from minus to plus the jitter, equally often.
    #[default]
    Uniform,
    /// Normal; the jitter is its standard deviation.
    Normal,
    /// Pareto with index 3, as netem's table, moved to mean 0; the jitter is its standard deviation.
    Pareto,
    /// One part normal to three parts Pareto, as netem's table, with mean 0; the jitter is its standard deviation.
    ParetoNormal,
    /// The user's own samples, in nanoseconds, equally often each; the jitter means nothing. With none
    /// the delay is the constant alone.
    Table(Samples),
}

/// Samples in ascending order. Copies share them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Samples(Arc<[Nanoseconds]>);

/// What delays packets.
#[derive(Clone, Debug, PartialEq)]
pub struct DelayModel {
    /// The part that is the same for all packets, in nanoseconds.
    pub constant: Nanoseconds,
    /// How far the rest goes, in nanoseconds; see [`Distribution`].
    pub jitter: Nanoseconds,
    /// What the rest looks like.
    pub distribution: Distribution,
    /// Of the jitter of successive packets, from 0 up to 1.
    pub correlation: f64,
    /// Whether a packet waits for those before it. If not, jitter lets packets overtake each other.
    pub keep_order: bool,
}

/// A model and its state.
#[derive(Clone, Debug)]
pub struct Delay {
    model: DelayModel,
    /// The last value of the chain that correlates.
    chain: Option<f64>,
    /// Of another, for distributions that take two numbers for each packet.
    second_chain: Option<f64>,
    last_deadline: Nanoseconds,
}

/// Standard deviation of a Pareto distribution with index 3 and minimum 1: sqrt(3/4).
const PARETO_DEVIATION: f64 = 0.866_025_403_784_438_6;
/// Its mean.
const PARETO_MEAN: f64 = 1.5;
/// Standard deviation of a quarter of a normal and three quarters of a Pareto number: sqrt(10)/4.
const MIXED_DEVIATION: f64 = 0.790_569_415_042_094_8;

impl Samples {
    /// Takes samples in any order.
    #[must_use]
    pub fn new(mut samples: Vec<Nanoseconds>) -> Self {
        samples.sort_unstable();
        Self(samples.into())
    }

    fn quantile(&self, unit: f64) -> Nanoseconds {
        let Some(last) = self.0.len().checked_sub(1) else {
            return 0;
        };
        let index = nanoseconds(libm::floor(unit * precise(self.0.len() as u64)));
        self.0[usize::try_from(index).unwrap_or(last).min(last)]
    }
}

impl DelayModel {
    /// The same delay for every packet.
    #[must_use]
    pub fn constant(constant: Nanoseconds) -> Self {
        Self {
            constant,
            jitter: 0,
            distribution: Distribution::Uniform,
            correlation: 0.0,
            keep_order: true,
        }
    }
}

impl Delay {
    /// A model that has delayed nothing yet.
    #[must_use]
    pub fn new(model: DelayModel) -> Self {
        Self {
            model,
            chain: None,
            second_chain: None,
            last_deadline: 0,
        }
    }

    /// Goes on with another model. The chains go on too. If order is kept, nothing arrives before `latest`.
    pub fn reconfigure(&mut self, model: DelayModel, latest: Nanoseconds) {
        self.model = model;
        self.last_deadline = self.last_deadline.max(latest);
    }

    /// Lets what comes overtake what is under way, as that goes nowhere.
    pub fn forget_order(&mut self) {
        self.last_deadline = 0;
    }

    /// When a packet that departs now arrives; never before now.
    pub fn deadline(&mut self, now: Nanoseconds, draw: &mut Draw) -> Nanoseconds {
        let delay = self.sample(draw);
        let mut deadline = now.saturating_add(delay);
        if self.model.keep_order {
            deadline = deadline.max(self.last_deadline);
            self.last_deadline = deadline;
        }
        deadline
    }

    fn sample(&mut self, draw: &mut Draw) -> Nanoseconds {
        let constant = self.model.constant;
        let is_table = matches!(self.model.distribution, Distribution::Table(_));
        if self.model.jitter == 0 && !is_table {
            return constant;
        }
        let correlation = self.model.correlation;
        let first = linked(&mut self.chain, correlation, draw);
        let unit = match &self.model.distribution {
            Distribution::Table(samples) => {
                return constant.saturating_add(samples.quantile(distribution_of_normal(first)));
            }
            Distribution::Uniform => 2.0 * distribution_of_normal(first) - 1.0,
            Distribution::Normal => first,
            Distribution::Pareto => (pareto(first) - PARETO_MEAN) / PARETO_DEVIATION,
            Distribution::ParetoNormal => {
                let second = linked(&mut self.second_chain, correlation, draw);
                (0.25 * second + 0.75 * (pareto(first) - PARETO_MEAN)) / MIXED_DEVIATION
            }
        };
        nanoseconds(precise(constant) + unit * precise(self.model.jitter))
    }
}

/// A normal number that correlates with the last one of its chain.
fn linked(chain: &mut Option<f64>, correlation: f64, draw: &mut Draw) -> f64 {
    let fresh = draw.normal();
    let rest = libm::sqrt((1.0 - correlation * correlation).max(0.0));
    let next = chain.map_or(fresh, |last| correlation * last + rest * fresh);
    *chain = Some(next);
    next
}

/// The share of normal numbers below this one.
fn distribution_of_normal(value: f64) -> f64 {
    0.5 * libm::erfc(-value * core::f64::consts::FRAC_1_SQRT_2)
}

/// The Pareto number, of index 3 and minimum 1, of the same quantile as a normal one.
fn pareto(normal: f64) -> f64 {
    // The share above, since that is exact in the long tail.
    1.0 / libm::cbrt(distribution_of_normal(-normal).max(f64::MIN_POSITIVE))
}

#[expect(
    clippy::cast_precision_loss,
    reason = "exact up to 104 days, and to 2⁻⁵³ of it beyond"
)]
fn precise(value: u64) -> f64 {
    value as f64
}

/// The whole nanosecond next to it; none if it is negative.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "`as` takes what is out of range to the nearest bound, which is what is meant"
)]
fn nanoseconds(value: f64) -> Nanoseconds {
    libm::round(value) as u64
}

#[cfg(test)]
mod tests;

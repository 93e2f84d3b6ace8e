//! Which packets are lost.
//!
//! A model is asked once for every packet of its flow, in order, with the packet's number and its random
//! numbers; it answers whether the packet is lost. The two Markov models keep a state from packet to
//! packet and begin in their good state. A loss is nothing else than a loss: full queues and limits have
//! causes of their own.

use std::sync::Arc;

use crate::random::Draw;

/// How packets are lost. Probabilities are from 0 to 1; checking what users write is not our job.
#[derive(Clone, Debug, PartialEq)]
pub enum LossModel {
    /// Each packet for itself.
    Independent {
        /// That a packet is lost.
        probability: f64,
    },
    /// Gilbert and Elliott's two states, with netem's parameters.
    GilbertElliott {
        /// From good to bad, per packet.
        p: f64,
        /// From bad to good, per packet.
        r: f64,
        /// That a packet is lost in the bad state (netem's `1-h`).
        loss_bad: f64,
        /// That a packet is lost in the good state (netem's `1-k`).
        loss_good: f64,
    },
    /// Salsano's four states.
    FourState(FourState),
    /// These packets and no others.
    Exact(PacketList),
}

/// The 4-state Markov model of S. Salsano, F. Ludovici, A. Ordine and D. Giannuzzi, "Definition of a general
/// and intuitive loss model for packet networks", 2012, §4.1.
///
/// State 1 receives in a gap, 2 receives in a burst, 3 loses in a burst, 4 loses a single packet in a
/// gap and goes back to 1. netem's code compared with `<` on both sides, so that a random number equal to
/// a bound changed nothing; here each number falls in exactly one interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FourState {
    /// From 1 to 3: a burst begins.
    pub p13: f64,
    /// From 3 to 1: the burst ends.
    pub p31: f64,
    /// From 3 to 2: a packet gets through within the burst.
    pub p32: f64,
    /// From 2 to 3: the burst goes on losing.
    pub p23: f64,
    /// From 1 to 4: a single loss.
    pub p14: f64,
}

/// Numbers of packets, as ranges in ascending order that don't touch. Copies share them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PacketList {
    ranges: Arc<[(u64, u64)]>,
}

/// A loss model and its state.
#[derive(Clone, Debug)]
pub struct Loss {
    model: LossModel,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// State 1 of the four, the good one of the two.
    Gap,
    /// State 2.
    BurstReceiving,
    /// State 3 of the four, the bad one of the two.
    BurstLosing,
    /// State 4.
    SingleLoss,
}

impl Loss {
    /// A model in its first state.
    #[must_use]
    pub fn new(model: LossModel) -> Self {
        Self {
            model,
            state: State::Gap,
        }
    }

    /// Whether the next packet, which has this number, is lost.
    pub fn is_lost(&mut self, packet: u64, draw: &mut Draw) -> bool {
        match &self.model {
            LossModel::Independent { probability } => draw.happens(*probability),
            LossModel::GilbertElliott {
                p,
                r,
                loss_bad,
                loss_good,
            } => {
                let (leave, loss, other) = if self.state == State::Gap {
                    (*p, *loss_good, State::BurstLosing)
                } else {
                    (*r, *loss_bad, State::Gap)
                };
                if draw.happens(leave) {
                    self.state = other;
                }
                draw.happens(loss)
            }
            LossModel::FourState(model) => {
                self.state = model.next(self.state, draw.unit());
                matches!(self.state, State::BurstLosing | State::SingleLoss)
            }
            LossModel::Exact(list) => list.contains(packet),
        }
    }
}

impl LossModel {
    /// What share of packets is lost in the long run; none for an exact list, which depends on how many come.
    #[must_use]
    pub fn expected_share(&self) -> Option<f64> {
        match self {
            Self::Independent { probability } => Some(*probability),
            Self::GilbertElliott {
                p,
                r,
                loss_bad,
                loss_good,
            } => {
                let bad = if *p > 0.0 { p / (p + r) } else { 0.0 };
                Some(bad * loss_bad + (1.0 - bad) * loss_good)
            }
            Self::FourState(model) => model.expected_share(),
            Self::Exact(_) => None,
        }
    }
}

impl FourState {
    fn next(&self, state: State, unit: f64) -> State {
        match state {
            State::Gap if unit < self.p14 => State::SingleLoss,
            State::Gap if unit < self.p14 + self.p13 => State::BurstLosing,
            State::BurstReceiving if unit < self.p23 => State::BurstLosing,
            State::BurstLosing if unit < self.p32 => State::BurstReceiving,
            State::BurstLosing if unit < self.p32 + self.p31 => State::Gap,
            State::SingleLoss => State::Gap,
            unchanged => unchanged,
        }
    }

    /// From the balance of flows: π₃ p31 = π₁ p13, π₂ p23 = π₃ p32, π₄ = π₁ p14. None if a state is never
    /// left, since it then depends on how many packets come.
    fn expected_share(&self) -> Option<f64> {
        if self.p13 > 0.0 && (self.p31 <= 0.0 || (self.p32 > 0.0 && self.p23 <= 0.0)) {
            return None;
        }
        let losing = if self.p13 > 0.0 {
            self.p13 / self.p31
        } else {
            0.0
        };
        let receiving = if losing > 0.0 && self.p32 > 0.0 {
            losing * self.p32 / self.p23
        } else {
            0.0
        };
        Some((losing + self.p14) / (1.0 + losing + receiving + self.p14))
    }
}

impl PacketList {
    /// Makes a list of ranges, each with its first and its last packet, in any order. Ranges that are the
    /// wrong way round hold nothing.
    #[must_use]
    pub fn new(ranges: impl IntoIterator<Item = (u64, u64)>) -> Self {
        let mut sorted: Vec<(u64, u64)> = ranges
            .into_iter()
            .filter(|(first, last)| first <= last)
            .collect();
        sorted.sort_unstable();
        let mut ranges: Vec<(u64, u64)> = Vec::with_capacity(sorted.len());
        for (first, last) in sorted {
            match ranges.last_mut() {
                Some(previous) if first <= previous.1.saturating_add(1) => {
                    previous.1 = previous.1.max(last);
                }
                _ => ranges.push((first, last)),
            }
        }
        Self {
            ranges: ranges.into(),
        }
    }

    /// Whether the packet of this number is in the list.
    #[must_use]
    pub fn contains(&self, packet: u64) -> bool {
        let after = self.ranges.partition_point(|(first, _)| *first <= packet);
        after > 0 && packet <= self.ranges[after - 1].1
    }
}

#[cfg(test)]
mod tests;

//! The log of decisions: one record for each packet, when its fate is known.
//!
//! The pipeline makes no records of its own: what it releases and drops says everything, so who wants no
//! log pays nothing. Who wants one makes a record of each [`Released`] and [`Dropped`]. The same packets at
//! the same moments give the same records, but for the actual release, and for what a consumer left
//! [`Unread`](DropCause::Unread).

use serde::{Deserialize, Serialize};

use crate::{
    DropCause, Nanoseconds,
    pipeline::{Dropped, Released},
};

/// What became of one packet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    /// Its number within the rule, from 0.
    pub number: u64,
    /// 0 for the packet or its first fragment; the others count from 1.
    pub part: u32,
    /// Whether it is the second of a pair.
    pub is_copy: bool,
    /// Its fate.
    #[serde(flatten)]
    pub verdict: Verdict,
}

/// A packet's fate. Moments are the caller's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum Verdict {
    /// It got through.
    Released {
        /// When it was due.
        planned: Nanoseconds,
        /// When it was really sent, as the caller says; none if it doesn't know.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        actual: Option<Nanoseconds>,
        /// Bits that were flipped.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        bit_flips: Vec<u64>,
    },
    /// It was dropped.
    Dropped {
        /// When, in virtual time.
        at: Nanoseconds,
        /// By what.
        cause: DropCause,
    },
}

impl Decision {
    /// The record of a packet that got through, and was sent at `actual`.
    #[must_use]
    pub fn released<T>(packet: &Released<T>, actual: Option<Nanoseconds>) -> Self {
        Self {
            number: packet.number,
            part: packet.part,
            is_copy: packet.is_copy,
            verdict: Verdict::Released {
                planned: packet.deadline,
                actual,
                bit_flips: packet.bit_flips.clone(),
            },
        }
    }

    /// The record of a packet that was dropped.
    #[must_use]
    pub fn dropped<T>(packet: &Dropped<T>) -> Self {
        Self {
            number: packet.number,
            part: packet.part,
            is_copy: packet.is_copy,
            verdict: Verdict::Dropped {
                at: packet.at,
                cause: packet.cause,
            },
        }
    }

    /// The record without what depends on when somebody fetched the packet: equal in every run of the same input.
    #[must_use]
    pub fn planned(mut self) -> Self {
        if let Verdict::Released { actual, .. } = &mut self.verdict {
            *actual = None;
        }
        self
    }
}

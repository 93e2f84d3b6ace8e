//! Who is told what becomes of packets that rules matched.

use super::{Observation, Observer, frame::Framed};
use crate::{
    Nanoseconds,
    decision::Decision,
    pipeline::{Dropped, Released},
    random::Direction,
};

/// Takes what rules drop, and tells the observer.
pub(super) struct Reporter<'a> {
    pub(super) direction: Direction,
    pub(super) answers: &'a mut Vec<Vec<u8>>,
    pub(super) observer: &'a mut Option<Observer>,
}

impl Reporter<'_> {
    pub(super) fn dropped(&mut self, rule: &str, mut dropped: Dropped<Framed>) {
        self.answers.extend(dropped.answer.take());
        if let Some(observer) = self.observer {
            observer(&Observation {
                rule,
                direction: self.direction,
                came: dropped.packet.came(),
                decision: Decision::dropped(&dropped),
                frame: dropped.packet.frame(),
            });
        }
    }

    pub(super) fn released(&mut self, rule: &str, now: Nanoseconds, released: &Released<Framed>) {
        if let Some(observer) = self.observer {
            observer(&Observation {
                rule,
                direction: self.direction,
                came: released.packet.came(),
                decision: Decision::released(released, Some(now)),
                frame: released.packet.frame(),
            });
        }
    }
}

//! Guests that needn't kick, since their worker looks into their rings anyway before it sleeps.
//!
//! A kick is a system call of the guest's VMM, or an exit of the guest, for each packet. Whoever puts a guest here leaves
//! the ring as it is while it is served; the worker looks at all of them in each round, and asks for kicks before it
//! sleeps.

use std::collections::VecDeque;

/// See the module.
#[derive(Debug, Default)]
pub struct Awake {
    /// Their numbers, in the order in which they came.
    slots: VecDeque<u32>,
}

impl Awake {
    /// One more, unless it is there.
    pub fn add(&mut self, slot: u32) {
        if !self.contains(slot) {
            self.slots.push_back(slot);
        }
    }

    /// Whether it is one of them.
    #[must_use]
    pub fn contains(&self, slot: u32) -> bool {
        self.slots.contains(&slot)
    }

    /// One of them, from 0 on.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<u32> {
        self.slots.get(index).copied()
    }

    /// Takes out the one that is there longest, if they are more than so many.
    pub fn take_beyond(&mut self, most: usize) -> Option<u32> {
        if self.slots.len() <= most {
            return None;
        }
        self.slots.pop_front()
    }
}

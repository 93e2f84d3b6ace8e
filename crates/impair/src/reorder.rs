//! Packets that are held back until others have passed.
//!
//! A packet is chosen when it has got through its delay. It waits until `distance` packets have passed that come
//! here after it and aren't chosen themselves, and leaves right behind the last of them; or at the end of
//! `wait_max`, whichever is first. So with steady traffic the share of packets that really leave out of
//! order is the probability, and a chosen packet is late by `distance` places (RFC 4737 §4.2: its
//! extent, as long as no second one is held meanwhile). With little traffic a packet may find
//! nobody to be overtaken by; the counter of packets out of order tells.

use std::collections::VecDeque;

use crate::Nanoseconds;

/// Which packets are held back, and for how long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReorderModel {
    /// That a packet is held back, from 0 to 1.
    pub probability: f64,
    /// How many must pass; 0 counts as 1.
    pub distance: u32,
    /// How long it waits for them at most, in nanoseconds.
    pub wait_max: Nanoseconds,
}

/// Packets held back, in the order of both of their bounds.
#[derive(Debug)]
pub(crate) struct Held<T> {
    items: VecDeque<HeldItem<T>>,
    /// Packets that passed so far.
    passed: u64,
    bytes: u64,
}

#[derive(Debug)]
struct HeldItem<T> {
    item: T,
    bytes: u32,
    /// It leaves when so many have passed.
    leaves_after: u64,
    leaves_at: Nanoseconds,
}

impl<T> Default for Held<T> {
    fn default() -> Self {
        Self {
            items: VecDeque::new(),
            passed: 0,
            bytes: 0,
        }
    }
}

impl<T> Held<T> {
    pub(crate) fn len(&self) -> usize {
        self.items.len()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// When the first has waited for long enough.
    pub(crate) fn next_deadline(&self) -> Option<Nanoseconds> {
        self.items.front().map(|held| held.leaves_at)
    }

    pub(crate) fn hold(&mut self, now: Nanoseconds, model: &ReorderModel, bytes: u32, item: T) {
        self.bytes += u64::from(bytes);
        self.items.push_back(HeldItem {
            item,
            bytes,
            leaves_after: self.leaves_after(model),
            leaves_at: now.saturating_add(model.wait_max),
        });
    }

    /// Counts a packet that passes.
    pub(crate) fn pass(&mut self) {
        self.passed += 1;
    }

    /// The next one that enough others have passed.
    pub(crate) fn overtaken(&mut self) -> Option<T> {
        let first = self.items.front()?;
        (first.leaves_after <= self.passed)
            .then(|| self.pop())
            .flatten()
    }

    /// The first, however long it has waited.
    pub(crate) fn pop(&mut self) -> Option<T> {
        let first = self.items.pop_front()?;
        self.bytes -= u64::from(first.bytes);
        Some(first.item)
    }

    /// Nothing that is here stays longer than what comes now; without a model it leaves at once.
    pub(crate) fn reconfigure(&mut self, now: Nanoseconds, model: Option<&ReorderModel>) {
        let latest = now.saturating_add(model.map_or(0, |model| model.wait_max));
        let after = model.map_or(self.passed, |model| self.leaves_after(model));
        for held in &mut self.items {
            held.leaves_at = held.leaves_at.min(latest);
            held.leaves_after = held.leaves_after.min(after);
        }
    }

    fn leaves_after(&self, model: &ReorderModel) -> u64 {
        self.passed + u64::from(model.distance.max(1))
    }
}

//! What processors have let through of NICs, each counting in lines of its own.
//!
//! Programs add to the line of their processor without atomics, so nobody else may ever write there. What was let
//! through of a lease is the sum of the NIC's lines, less what that was when the lease began, which is in the daemon's own
//! line: zeroing a figure and taking it away is one store to that. Drops are in `counters`, and so is what came from
//! other maps or is counted by programs that don't know of ledgers.

use std::{
    mem::offset_of,
    os::fd::BorrowedFd,
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{
    Error,
    abi::{Ledger, Plain as _},
    map::Words,
};

const WORD: usize = size_of::<u64>();
/// In the daemon's line; the others have credits there, which are the programs' own.
const LEASE: usize = offset_of!(Ledger, lease) / WORD;
/// Words of figures, which come first.
const FIGURES: usize = LEASE;

/// The map of ledgers, of this layout or of another.
#[derive(Debug)]
pub(crate) struct Ledgers {
    lines: Words<AtomicU64>,
    nics: u32,
    /// Those that have lines. The daemon's are behind theirs.
    processors: u32,
}

impl Ledgers {
    /// Takes a map that was made for so many NICs.
    pub(crate) fn new(descriptor: BorrowedFd<'_>, nics: u32) -> Result<Self, Error> {
        let lines = Words::new("ledgers", descriptor)?;
        let processors = (lines.entries() / nics).saturating_sub(1);
        Ok(Self {
            lines,
            nics,
            processors,
        })
    }

    /// What was let through of a NIC since [`Self::begin`].
    pub(crate) fn read(&self, nic: u32) -> Ledger {
        let figures = (0..FIGURES).flat_map(|word| self.figure(nic, word).to_ne_bytes());
        let rest = std::iter::repeat_n(0, size_of::<Ledger>() - FIGURES * WORD);
        let bytes: Vec<u8> = figures.chain(rest).collect();
        Ledger::read(&bytes).expect("as many bytes as a value has")
    }

    /// Counts a NIC from zero, for a lease.
    pub(crate) fn begin(&self, nic: u32, lease: u32) {
        for word in 0..FIGURES {
            self.take(nic, word);
        }
        self.daemons(nic)[LEASE].store(lease.into(), Ordering::Relaxed);
    }

    /// For which lease a NIC was last counted from zero.
    pub(crate) fn lease(&self, nic: u32) -> u64 {
        self.daemons(nic)[LEASE].load(Ordering::Relaxed)
    }

    /// Takes a figure away, in one step, and returns it. What is counted meanwhile stays.
    pub(crate) fn take(&self, nic: u32, word: usize) -> u64 {
        let sum = self.sum(nic, word);
        sum.saturating_sub(self.daemons(nic)[word].swap(sum, Ordering::Release))
    }

    /// How many processors have lines.
    #[cfg(test)]
    pub(crate) fn processors(&self) -> u32 {
        self.processors
    }

    fn figure(&self, nic: u32, word: usize) -> u64 {
        // Before the sum, which then is no less than the one that was written here. Only where a kernel lets programs
        // interrupt each other may it be, by what has got lost.
        let before = self.daemons(nic)[word].load(Ordering::Acquire);
        self.sum(nic, word).saturating_sub(before)
    }

    fn sum(&self, nic: u32, word: usize) -> u64 {
        let lines = (0..self.processors).map(|processor| self.line(processor, nic));
        lines.fold(0, |sum, line| {
            sum.wrapping_add(line[word].load(Ordering::Relaxed))
        })
    }

    /// A NIC's line of the daemon.
    pub(crate) fn daemons(&self, nic: u32) -> &[AtomicU64] {
        self.line(self.processors, nic)
    }

    /// A NIC's line of a processor.
    pub(crate) fn line(&self, processor: u32, nic: u32) -> &[AtomicU64] {
        assert!(nic < self.nics, "NIC {nic} of {}", self.nics);
        self.lines.of(processor * self.nics + nic)
    }
}

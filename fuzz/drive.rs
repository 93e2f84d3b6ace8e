//! Drives the entry point of a fuzz target without a fuzzer: over the target's seeds, and over bytes made of them that
//! are always the same.

use std::{fs, path::Path};

/// Runs an entry point on the seeds in `fuzz/seeds/TARGET` and on these, and on so many cases made of them.
pub(crate) fn drive(target: &str, entry: impl Fn(&[u8]), more: &[Vec<u8>], cases: u64) {
    let mut seeds = seeds_of(target);
    seeds.extend_from_slice(more);
    for seed in &seeds {
        entry(seed);
    }
    for case in 0..cases {
        entry(&mutated(&seeds, &mut Dice::of(case)));
    }
}

/// In the order of their names, so that every machine makes the same cases of them.
fn seeds_of(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/seeds")
        .join(target);
    let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    let mut files: Vec<_> = entries
        .map(|entry| entry.expect("a folder can be read").path())
        .collect();
    assert!(!files.is_empty(), "{folder:?} has seeds");
    files.sort();
    let read = |file| fs::read(file).expect("a seed can be read");
    files.iter().map(read).collect()
}

/// A seed with some of its bytes overwritten, doubled, cut out, or swapped for those of another seed.
fn mutated(seeds: &[Vec<u8>], dice: &mut Dice) -> Vec<u8> {
    let mut bytes = seeds[dice.below(seeds.len())].clone();
    for _ in 0..dice.below(6) {
        let (one, two) = (dice.below(bytes.len() + 1), dice.below(bytes.len() + 1));
        let from = one.min(two);
        let to = one.max(two).min(from + 40);
        match dice.below(8) {
            0 => {
                bytes.drain(from..to);
            }
            1 => bytes.extend_from_within(from..to),
            2 => bytes.extend_from_within(from..),
            3 => bytes.truncate(one),
            4 => {
                let other = &seeds[dice.below(seeds.len())];
                let start = dice.below(other.len() + 1);
                let end = other.len().min(start + dice.below(30));
                bytes.splice(from..to, other[start..end].iter().copied());
            }
            5 => bytes.insert(from, dice.byte()),
            6 if from < bytes.len() => bytes[from] ^= 1 << dice.below(8),
            _ if from < bytes.len() => bytes[from] = dice.byte(),
            _ => {}
        }
        bytes.truncate(BYTES_MAX);
    }
    bytes
}

/// Numbers that follow from a first one (xorshift64).
struct Dice(u64);

impl Dice {
    fn of(case: u64) -> Self {
        Self((case + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    /// A number below `most`, or 0.
    fn below(&mut self, most: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let number = usize::try_from(self.0 >> 33).unwrap_or_default();
        number % most.max(1)
    }

    /// Any byte, or one that means something to a parser of texts.
    fn byte(&mut self) -> u8 {
        match self.below(2) {
            0 => TEXT[self.below(TEXT.len())],
            _ => u8::try_from(self.below(256)).unwrap_or_default(),
        }
    }
}

const TEXT: &[u8] = b"0123456789%-.;=\"\n{}[]x \xff";
/// Bytes of a case, at most.
const BYTES_MAX: usize = 20_000;

//! The fuzz targets of `fuzz/`, for a short while and always with the same bytes: no nightly compiler needed.

#[path = "../../../fuzz/entries/classifier.rs"]
mod classifier;
#[path = "../../../fuzz/entries/pcap_reader.rs"]
mod pcap_reader;

use sandwire_engine::io::pcap::{Format, Writer};

const CASES: u64 = 20_000;

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

    fn byte(&mut self) -> u8 {
        u8::try_from(self.below(256)).unwrap_or_default()
    }
}

/// A seed with some of its bytes overwritten, doubled, cut off or inserted.
fn mutated(seeds: &[Vec<u8>], case: u64) -> Vec<u8> {
    let mut dice = Dice::of(case);
    let mut bytes = seeds[dice.below(seeds.len())].clone();
    for _ in 0..dice.below(6) {
        let place = dice.below(bytes.len());
        match dice.below(5) {
            0 if !bytes.is_empty() => bytes[place] = dice.byte(),
            1 if !bytes.is_empty() => bytes[place] ^= 1 << dice.below(8),
            2 => bytes.truncate(place),
            3 => bytes.extend_from_within(place..),
            _ => bytes.insert(place, dice.byte()),
        }
        bytes.truncate(20_000);
    }
    bytes
}

fn drive(entry: impl Fn(&[u8]), seeds: &[Vec<u8>]) {
    for seed in seeds {
        entry(seed);
    }
    for case in 0..CASES {
        entry(&mutated(seeds, case));
    }
}

/// Frames: UDP in IPv4 in a VLAN, and TCP in IPv6 behind each kind of extension header.
fn frames() -> Vec<Vec<u8>> {
    let mut v4 = vec![2; 12];
    v4.extend([0x81, 0, 0, 7, 8, 0]);
    v4.extend([0x46, 0, 0, 32, 0, 1, 0x20, 0, 64, 17, 0, 0]);
    v4.extend([10, 0, 0, 1, 10, 0, 0, 2, 1, 1, 1, 1]);
    v4.extend([0x10, 0xe1, 0, 53, 0, 8, 0, 0]);
    let mut v6 = vec![2; 12];
    v6.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 48, 0, 64]);
    v6.extend([0xfd; 32]);
    for kind in [43, 44, 51, 60, 6] {
        v6.extend([kind, 0, 0, 1, 0, 0, 0, 0]);
    }
    v6.extend([0x10, 0xe1, 0, 53, 0, 8, 0, 0]);
    vec![v4, v6, Vec::new()]
}

#[test]
fn the_classifier() {
    drive(classifier::run, &frames());
}

#[test]
fn the_reader_of_captures() {
    let seeds = [Format::Pcap, Format::Pcapng].map(|format| {
        let mut writer = Writer::new(Vec::new(), format, &["a", "b"]).unwrap();
        for frame in frames() {
            writer.write(1, 5_000_000_000, &frame, Some("why")).unwrap();
        }
        writer.into_inner()
    });
    drive(pcap_reader::run, &seeds);
}

//! Bytes that can be told from their position, so that nothing lost, doubled or moved goes unseen.
//!
//! Eight bytes at a time by SplitMix64 of (seed, position): quicker than a hash, and it says where it is wrong.

/// An endless row of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Content {
    seed: u64,
}

impl Content {
    /// The row of this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// Fills with the bytes from `position` on.
    pub fn fill(self, position: u64, bytes: &mut [u8]) {
        let mut at = position;
        let mut rest = bytes;
        while !rest.is_empty() {
            let word = self.word(at / 8);
            let skip = (at % 8) as usize;
            let count = rest.len().min(8 - skip);
            let (now, later) = rest.split_at_mut(count);
            now.copy_from_slice(&word[skip..skip + count]);
            at += count as u64;
            rest = later;
        }
    }

    /// The first `count` bytes.
    #[must_use]
    pub fn take(self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.fill(0, &mut bytes);
        bytes
    }

    /// Where the first wrong byte is, if these aren't the bytes from `position` on.
    #[must_use]
    pub fn wrong(self, position: u64, bytes: &[u8]) -> Option<u64> {
        let mut expected = [0; 4096];
        let mut at = position;
        for piece in bytes.chunks(expected.len()) {
            let expected = &mut expected[..piece.len()];
            self.fill(at, expected);
            if piece != expected {
                let differs = piece
                    .iter()
                    .zip(expected)
                    .position(|(is, should)| is != should);
                return differs.map(|index| at + index as u64);
            }
            at += piece.len() as u64;
        }
        None
    }

    fn word(self, index: u64) -> [u8; 8] {
        let mut value = self
            .seed
            .wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (value ^ (value >> 31)).to_le_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_piece_of_a_row_is_recognised_and_any_other_byte_is_found() {
        let content = Content::new(7);
        let mut all = content.take(20_000);
        for start in [0, 1, 7, 8, 4095, 9999] {
            assert_eq!(content.wrong(start as u64, &all[start..]), None);
        }
        assert_eq!(content.wrong(1, &all), Some(1));
        all[12_345] ^= 1;
        assert_eq!(content.wrong(0, &all), Some(12_345));
        assert_ne!(Content::new(8).take(64), all[..64]);
    }
}

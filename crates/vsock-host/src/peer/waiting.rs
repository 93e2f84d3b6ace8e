//! Messages that wait for a descriptor, one behind the other in blocks.
//!
//! Each has its length in front, in as few bytes as it takes, and so costs little more than its payload: a guest may
//! spend its whole credit on messages of one byte. Only messages of no bytes, which cost no credit, are counted.

use std::collections::VecDeque;

/// Most messages of no bytes that wait.
pub const MOST_EMPTY: usize = 1024;

/// Bytes of a block; a message that is longer has one of its own.
const BLOCK: usize = 4096;
/// Most bytes that a length takes.
const LENGTH_BYTES: usize = 5;

/// A queue of messages.
#[derive(Debug, Default)]
pub struct Waiting {
    /// In each: length, message, length, message … In the first from `start` on.
    blocks: VecDeque<Vec<u8>>,
    start: usize,
    bytes: usize,
    empty: usize,
}

impl Waiting {
    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Bytes that wait, lengths and all.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Puts a message at the end. `payload` is how much of it costs credit. False if too many of no bytes wait.
    #[must_use]
    pub fn push(&mut self, message: &[u8], payload: usize) -> bool {
        if payload == 0 {
            if self.empty == MOST_EMPTY {
                return false;
            }
            self.empty += 1;
        }
        let most = message.len() + LENGTH_BYTES;
        let mut block = match self.blocks.pop_back() {
            Some(last) if last.capacity() - last.len() >= most => last,
            full => {
                self.blocks.extend(full);
                Vec::with_capacity(most.max(BLOCK))
            }
        };
        let before = block.len();
        put_length(&mut block, message.len());
        block.extend_from_slice(message);
        self.bytes += block.len() - before;
        self.blocks.push_back(block);
        true
    }

    /// The first message.
    #[must_use]
    pub fn first(&self) -> Option<&[u8]> {
        let bytes = &self.blocks.front()?[self.start..];
        let (length, used) = length_at(bytes);
        Some(&bytes[used..][..length])
    }

    /// Removes the first message, of which `payload` cost credit.
    pub fn pop(&mut self, payload: usize) {
        let Some(first) = self.blocks.front() else {
            return;
        };
        let (length, used) = length_at(&first[self.start..]);
        self.start += used + length;
        self.bytes -= used + length;
        self.empty -= usize::from(payload == 0);
        if self.start == first.len() {
            self.blocks.pop_front();
            self.start = 0;
        }
    }
}

/// Seven bits in each byte, the lowest first; the eighth says that more follow.
fn put_length(block: &mut Vec<u8>, mut length: usize) {
    loop {
        let [low, ..] = length.to_le_bytes();
        length >>= 7;
        if length == 0 {
            return block.push(low & 0x7f);
        }
        block.push(low | 0x80);
    }
}

/// The length in front of these bytes, and how many of them it takes.
fn length_at(bytes: &[u8]) -> (usize, usize) {
    let (mut length, mut used) = (0, 0);
    for byte in bytes {
        length |= usize::from(byte & 0x7f) << (7 * used);
        used += 1;
        if byte & 0x80 == 0 {
            break;
        }
    }
    (length, used)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_out_as_they_went_in() {
        let mut waiting = Waiting::default();
        for round in 0..3_u8 {
            for length in 0..100_usize {
                assert!(waiting.push(&vec![round; length], length));
            }
            for length in 0..50_usize {
                assert_eq!(waiting.first().expect("a message").len(), length);
                waiting.pop(length);
            }
            for length in 50..100_usize {
                assert_eq!(waiting.first(), Some(&vec![round; length][..]));
                waiting.pop(length);
            }
            assert!(waiting.is_empty());
            assert_eq!(waiting.first(), None);
        }
    }

    #[test]
    fn messages_of_one_byte_cost_no_more_than_two_more() {
        let mut waiting = Waiting::default();
        // With a byte of marks, as between siblings.
        for _ in 0..10_000 {
            assert!(waiting.push(&[1, 7], 1));
        }
        assert_eq!(waiting.bytes(), 3 * 10_000);
        let held: usize = waiting.blocks.iter().map(Vec::capacity).sum();
        assert!(held <= waiting.bytes() + 2 * BLOCK, "{held}");
        for _ in 0..9_000 {
            waiting.pop(1);
        }
        let held: usize = waiting.blocks.iter().map(Vec::capacity).sum();
        assert!(held <= waiting.bytes() + 2 * BLOCK, "{held}");
    }

    #[test]
    fn lengths_of_any_size_come_out_as_they_went_in() {
        let mut waiting = Waiting::default();
        let lengths = [0, 1, 127, 128, 16_383, 16_384, 3_000_000];
        for length in lengths {
            assert!(waiting.push(&vec![7; length], length));
        }
        for length in lengths {
            assert_eq!(waiting.first().map(<[u8]>::len), Some(length));
            waiting.pop(length);
        }
        assert!(waiting.is_empty());
        assert_eq!(waiting.bytes(), 0);
    }

    #[test]
    fn only_messages_of_no_bytes_are_counted() {
        let mut waiting = Waiting::default();
        for _ in 0..MOST_EMPTY {
            assert!(waiting.push(&[0], 0));
        }
        assert!(!waiting.push(&[0], 0));
        assert!(waiting.push(&[0, 1], 1));
        waiting.pop(0);
        assert!(waiting.push(&[0], 0));
    }
}

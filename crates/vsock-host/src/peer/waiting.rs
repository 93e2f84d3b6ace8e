//! Messages that wait for a descriptor, one behind the other in one buffer.
//!
//! Each has its length in front, and so costs little more than its payload: a guest may spend its whole credit
//! on messages of one byte. Only messages of no bytes, which cost no credit, are counted.

/// Most messages of no bytes that wait.
pub const MOST_EMPTY: usize = 1024;

const LENGTH_BYTES: usize = size_of::<u32>();

/// A queue of messages.
#[derive(Debug, Default)]
pub struct Waiting {
    /// From `start` on: length, message, length, message …
    bytes: Vec<u8>,
    start: usize,
    empty: usize,
}

impl Waiting {
    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.start == self.bytes.len()
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
        if self.start > self.bytes.len() / 2 {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        let length = u32::try_from(message.len()).expect("a message is far smaller than 4 GiB");
        self.bytes.extend(length.to_ne_bytes());
        self.bytes.extend(message);
        true
    }

    /// The first message.
    #[must_use]
    pub fn first(&self) -> Option<&[u8]> {
        let (length, rest) = self.bytes[self.start..].split_first_chunk::<LENGTH_BYTES>()?;
        Some(&rest[..u32::from_ne_bytes(*length) as usize])
    }

    /// Removes the first message, of which `payload` cost credit.
    pub fn pop(&mut self, payload: usize) {
        let Some(length) = self.first().map(<[u8]>::len) else {
            return;
        };
        self.start += LENGTH_BYTES + length;
        self.empty -= usize::from(payload == 0);
        if self.is_empty() {
            *self = Self::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_out_as_they_went_in_and_cost_little() {
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
        for _ in 0..10_000 {
            assert!(waiting.push(&[1], 1));
        }
        assert!(waiting.bytes.capacity() <= 2 * 5 * 10_000);
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

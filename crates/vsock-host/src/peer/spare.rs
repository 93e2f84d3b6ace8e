//! Memory for backlogs, used again: a page that is new to the process costs more than what is copied into it.

/// Most buffers, and the largest, in bytes: a connection's promise, as `Vec` grows to it.
const MOST: usize = 4;
const LARGEST: usize = 2 << 20;

/// Buffers that nobody uses now; those of a worker's connections.
#[derive(Debug, Default)]
pub struct Spare(Vec<Vec<u8>>);

impl Spare {
    /// An empty buffer.
    #[must_use]
    pub fn take(&mut self) -> Vec<u8> {
        self.0.pop().unwrap_or_default()
    }

    /// A buffer isn't needed any more.
    pub fn give(&mut self, mut buffer: Vec<u8>) {
        if self.0.len() < MOST && buffer.capacity() <= LARGEST {
            buffer.clear();
            self.0.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_buffers_of_a_bounded_size_are_kept_and_come_back_empty() {
        let mut spare = Spare::default();
        assert_eq!(spare.take().capacity(), 0);
        let mut large = Vec::with_capacity(LARGEST);
        large.push(7);
        spare.give(large);
        let again = spare.take();
        assert!(again.is_empty() && again.capacity() >= LARGEST);
        spare.give(Vec::with_capacity(LARGEST + 1));
        assert_eq!(spare.take().capacity(), 0, "too large to be kept");
        for _ in 0..=MOST {
            spare.give(vec![7; 16]);
        }
        let kept = std::iter::repeat_with(|| spare.take());
        assert_eq!(
            kept.take_while(|buffer| buffer.capacity() != 0).count(),
            MOST
        );
    }
}

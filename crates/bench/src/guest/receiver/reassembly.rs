//! Which bytes of a stream have come, in whatever order. Pure.
//!
//! Packets of one connection overtake each other on a host when its sender moves to another processor.
//! A guest that threw away what comes early would turn that into losses, which real ones don't have. So
//! it keeps account of ranges, and tells the sender by SACK (RFC 2018), and of what came twice by
//! D-SACK (RFC 2883), as Linux does.

/// Ranges that are kept account of; the farthest is forgotten when there are more.
const RANGES_MAX: usize = 64;
/// Blocks that fit into a header without timestamps.
const BLOCKS_MAX: usize = 3;

/// One direction of a connection. Numbers are TCP's, modulo 2^32.
#[derive(Debug)]
pub(super) struct Reassembly {
    expected: u32,
    /// Beyond `expected`, by distance, without overlaps or contact.
    ranges: Vec<Range>,
    /// What came last, if it is worth telling.
    latest: Option<Range>,
}

/// Bytes from one number up to, not including, another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    start: u32,
    end: u32,
}

impl Reassembly {
    /// A stream whose first byte has this number.
    pub(super) fn new(first: u32) -> Self {
        Self {
            expected: first,
            ranges: Vec::new(),
            latest: None,
        }
    }

    /// The number of the first byte that is missing.
    pub(super) fn expected(&self) -> u32 {
        self.expected
    }

    /// Takes bytes. Returns how many more now stand before the first missing one.
    pub(super) fn take(&mut self, start: u32, length: u32) -> u32 {
        let before = self.expected;
        let mut new = Range {
            start,
            end: start.wrapping_add(length),
        };
        self.latest = Some(new);
        if self.distance(new.end) == 0 || self.distance(new.end) > u32::MAX / 2 {
            return 0; // all of it is known: `latest` tells the sender
        }
        if self.distance(new.start) > u32::MAX / 2 {
            new.start = self.expected;
        }
        self.insert(new);
        if let Some(first) = self.ranges.first().filter(|first| first.start == before) {
            self.expected = first.end;
            self.ranges.remove(0);
            self.latest = None;
        }
        self.expected.wrapping_sub(before)
    }

    /// TCP's options: what has come beyond the first missing byte, the latest first.
    pub(super) fn options(&self) -> Vec<u8> {
        let holds = |range: &&Range, latest: Range| {
            self.distance(range.start) <= self.distance(latest.start)
                && self.distance(latest.end) <= self.distance(range.end)
        };
        let mut blocks: Vec<Range> = Vec::new();
        if let Some(latest) = self.latest {
            let around = self.ranges.iter().find(|range| holds(range, latest));
            blocks.push(around.copied().unwrap_or(latest));
        }
        for range in &self.ranges {
            if !blocks.contains(range) {
                blocks.push(*range);
            }
        }
        blocks.truncate(BLOCKS_MAX);
        if blocks.is_empty() {
            return Vec::new();
        }
        let mut options = vec![1, 1, 5, u8::try_from(2 + 8 * blocks.len()).unwrap_or(2)];
        for block in blocks {
            options.extend(block.start.to_be_bytes());
            options.extend(block.end.to_be_bytes());
        }
        options
    }

    fn insert(&mut self, mut new: Range) {
        let origin = self.expected;
        let distance = |number: u32| number.wrapping_sub(origin);
        self.ranges.retain(|range| {
            let is_apart = distance(range.end) < distance(new.start)
                || distance(new.end) < distance(range.start);
            if !is_apart {
                if distance(range.start) < distance(new.start) {
                    new.start = range.start;
                }
                if distance(range.end) > distance(new.end) {
                    new.end = range.end;
                }
            }
            is_apart
        });
        let place = self
            .ranges
            .partition_point(|range| distance(range.start) < distance(new.start));
        self.ranges.insert(place, new);
        self.ranges.truncate(RANGES_MAX);
    }

    fn distance(&self, number: u32) -> u32 {
        number.wrapping_sub(self.expected)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(reassembly: &Reassembly) -> Vec<(u32, u32)> {
        let options = reassembly.options();
        let words = options.get(4..).unwrap_or_default().chunks_exact(8);
        let word = |bytes: &[u8]| u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        words
            .map(|block| (word(block), word(&block[4..])))
            .collect()
    }

    #[test]
    fn in_order_there_is_nothing_to_tell() {
        let mut stream = Reassembly::new(u32::MAX - 50);
        assert_eq!(stream.take(u32::MAX - 50, 100), 100);
        assert_eq!(stream.take(49, 100), 100);
        assert_eq!((stream.expected(), blocks(&stream)), (149, vec![]));
    }

    #[test]
    fn what_comes_early_is_told_the_latest_first() {
        let mut stream = Reassembly::new(0);
        for (start, length) in [(100, 50), (300, 50), (200, 50), (150, 10)] {
            assert_eq!(stream.take(start, length), 0);
        }
        assert_eq!(blocks(&stream), [(100, 160), (200, 250), (300, 350)]);
        assert_eq!(stream.take(0, 100), 160);
        assert_eq!(
            (stream.expected(), blocks(&stream)),
            (160, vec![(200, 250), (300, 350)])
        );
    }

    #[test]
    fn what_comes_twice_is_told_too() {
        let mut stream = Reassembly::new(0);
        stream.take(0, 1000);
        assert_eq!(stream.take(200, 100), 0);
        assert_eq!(
            (stream.expected(), blocks(&stream)),
            (1000, vec![(200, 300)])
        );
        assert_eq!(stream.take(900, 200), 100, "half of it is new");
        assert_eq!(blocks(&stream), []);
    }

    #[test]
    fn any_order_gives_the_whole() {
        let parts: Vec<u32> = (0..40).collect();
        for step in [3, 7, 11, 13, 37, 39] {
            let mut stream = Reassembly::new(u32::MAX - 1000);
            let mut sum = 0;
            for part in &parts {
                let part = part * step % 41 % 40;
                let start = (u32::MAX - 1000).wrapping_add(part * 100);
                sum += stream.take(start, 100);
            }
            for part in &parts {
                sum += stream.take((u32::MAX - 1000).wrapping_add(part * 100), 100);
            }
            assert_eq!(sum, 4000, "step {step}");
            assert!(stream.ranges.is_empty());
        }
    }
}

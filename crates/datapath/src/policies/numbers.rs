//! Numbers of rule lists.

use crate::Error;

/// Counts up, and from the beginning again at the end: so a number is given again as late as can be, long after the last
/// packet that was under way with it.
#[derive(Debug)]
pub(super) struct Numbers {
    next: u32,
    /// Somebody's, or behind the last.
    end: u32,
}

impl Numbers {
    /// Those behind the last that somebody has. Zero is no list's.
    pub(super) fn behind(last: u32) -> Self {
        Self {
            next: last.saturating_add(1),
            end: u32::MAX,
        }
    }

    /// The first of so many neighbouring numbers that nobody has. `used` says which somebody has; it is asked for at the end
    /// of those that are known to be free.
    pub(super) fn take(
        &mut self,
        count: usize,
        used: impl FnOnce() -> Result<Vec<u32>, Error>,
    ) -> Result<u32, Error> {
        let full = Error::Full {
            map: "rule_lists",
            entries: u32::MAX,
        };
        let Ok(count) = u32::try_from(count) else {
            return Err(full);
        };
        if self.end - self.next < count {
            let mut used = used()?;
            used.sort_unstable();
            let found = gap(&used, self.next, count).or_else(|| gap(&used, 1, count));
            (self.next, self.end) = found.ok_or(full)?;
        }
        let first = self.next;
        self.next += count;
        Ok(first)
    }
}

/// From where to where, from this number on, nobody has so many numbers.
fn gap(used: &[u32], from: u32, count: u32) -> Option<(u32, u32)> {
    let mut start = from;
    let behind = used.iter().copied().filter(|number| *number >= from);
    for number in behind.chain([u32::MAX]) {
        if number - start >= count {
            return Some((start, number));
        }
        start = number.checked_add(1)?;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn never() -> Result<Vec<u32>, Error> {
        panic!("nobody needs to know what is used")
    }

    #[test]
    fn numbers_count_up_without_looking() {
        let mut numbers = Numbers::behind(0);
        assert_eq!(numbers.take(3, never).unwrap(), 1);
        assert_eq!(numbers.take(0, never).unwrap(), 4);
        assert_eq!(numbers.take(1, never).unwrap(), 4);
        assert_eq!(Numbers::behind(70).take(1, never).unwrap(), 71);
    }

    #[test]
    fn at_the_end_those_are_given_again_that_nobody_has() {
        let used = || Ok(vec![u32::MAX - 3, 8, 2, 4]);
        let mut numbers = Numbers::behind(u32::MAX - 3);
        assert_eq!(numbers.take(2, used).unwrap(), u32::MAX - 2);
        assert_eq!(numbers.take(3, used).unwrap(), 5, "2 and 4 are used");
        assert_eq!(numbers.take(1, used).unwrap(), 9, "and so is 8");
        assert_eq!(numbers.take(1000, never).unwrap(), 10);
        // Of another process, whose last list has the last number.
        let mut numbers = Numbers::behind(u32::MAX);
        assert_eq!(numbers.take(1, used).unwrap(), 1);
        assert_eq!(numbers.take(1, used).unwrap(), 3);
    }

    #[test]
    fn more_than_there_are_free_is_refused() {
        let used = || Ok(vec![u32::MAX / 2]);
        let mut numbers = Numbers::behind(u32::MAX / 2);
        let many = u32::MAX as usize / 2 + 1;
        let text = numbers.take(many, used).unwrap_err().to_string();
        assert!(text.contains("rule_lists"), "{text}");
        let text = numbers.take(usize::MAX, never).unwrap_err().to_string();
        assert!(text.contains("rule_lists"), "{text}");
        assert_eq!(numbers.take(1, never).unwrap(), u32::MAX / 2 + 1);
    }
}

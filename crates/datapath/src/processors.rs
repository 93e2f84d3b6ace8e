//! The processors of this machine: those that are there, and those that the kernel could take in later.

use std::fs;

use crate::Error;

/// Also those that are switched off. Numbered in ranges, as in `0-3,8-11`.
const PRESENT: &str = "/sys/devices/system/cpu/present";
/// Also those that may be plugged in; in a virtual machine that is often a hundred and more.
const POSSIBLE: &str = "/sys/devices/system/cpu/possible";

/// How many processors there are. Where numbers are left out, they count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Processors {
    /// Those that are there.
    pub(crate) here: u32,
    /// Those that may come.
    pub(crate) later: u32,
}

impl Processors {
    pub(crate) fn count() -> Result<Self, Error> {
        let read = |path| {
            let text = fs::read_to_string(path);
            let text =
                text.map_err(|source| Error::system("count the processors by", path, source))?;
            end_of(&text).ok_or_else(|| {
                let source = std::io::ErrorKind::InvalidData.into();
                Error::system("count the processors by", path, source)
            })
        };
        let here = read(PRESENT)?;
        Ok(Self {
            here,
            later: read(POSSIBLE)?.saturating_sub(here),
        })
    }
}

/// One more than the last number of a list of ranges.
fn end_of(ranges: &str) -> Option<u32> {
    let last = ranges.trim().rsplit(['-', ',']).next()?;
    last.parse::<u32>().ok()?.checked_add(1)
}

#[cfg(test)]
mod tests {
    use super::{Processors, end_of};

    #[test]
    fn lists_end_with_the_last_number() {
        for (text, end) in [("0\n", 1), ("0-3\n", 4), ("0,2-5\n", 6), ("0-1,7", 8)] {
            assert_eq!(end_of(text), Some(end), "{text}");
        }
        for text in ["", "\n", "0-", "all", "4294967295"] {
            assert_eq!(end_of(text), None, "{text}");
        }
    }

    #[test]
    fn those_here_and_those_to_come_are_all_that_there_may_be() {
        let Processors { here, later } = Processors::count().unwrap();
        let all = aya::util::nr_cpus().unwrap();
        assert_eq!(usize::try_from(here + later).unwrap(), all);
        assert!(here > 0);
    }
}

//! Which groups of sandboxes may talk, in the kernel of a model.

use std::collections::BTreeSet;

use sandwire_datapath::GROUP_PAIRS_MAX;

use super::failure::failed;
use crate::error::NetworkError;

/// Pairs of numbers, and how many there is room for.
#[derive(Debug)]
pub(crate) struct Groups {
    pub(crate) pairs: BTreeSet<(u32, u32)>,
    pub(crate) pairs_max: usize,
    /// There is no data path yet that could be told; what it had before is there.
    pub(crate) is_closed: bool,
    /// What it was told, in order.
    pub(crate) told: Vec<BTreeSet<(u32, u32)>>,
}

impl Default for Groups {
    fn default() -> Self {
        Self {
            pairs: BTreeSet::new(),
            pairs_max: GROUP_PAIRS_MAX as usize,
            is_closed: false,
            told: Vec::new(),
        }
    }
}

impl Groups {
    /// Has exactly these pairs. A kernel that has no memory for an entry has some of them by then.
    pub(super) fn set(
        &mut self,
        pairs: &BTreeSet<(u32, u32)>,
        has_memory: bool,
    ) -> Result<(), NetworkError> {
        self.told.push(pairs.clone());
        self.pairs.retain(|pair| pairs.contains(pair));
        if pairs.len() > self.pairs_max {
            return Err(failed("add group pairs"));
        }
        if !has_memory {
            self.pairs.extend(pairs.iter().take(1));
            return Err(failed("add group pairs"));
        }
        self.pairs.clone_from(pairs);
        Ok(())
    }
}

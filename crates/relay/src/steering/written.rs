//! The rules and elements that were written, by which it is seen whether somebody has changed them.

use std::cell::Cell;

use sandwire_kernel_net::{
    netlink::Socket,
    nft::{self, Batch},
};

use super::{NOT_THERE, SteeringError, TABLE, ends::TABLE_ENDS};

/// Chain and number of instructions of each rule of a table, chain by chain.
type Rules = Vec<(String, usize)>;

/// What a table has.
#[derive(Debug, Default)]
pub(super) struct Content {
    rules: Rules,
    /// Sets, and how many elements each has. What rules enter by themselves isn't among them.
    elements: Vec<(String, usize)>,
}

/// What both tables have.
#[derive(Debug, Default)]
pub(crate) struct Written {
    pub(super) table: Content,
    pub(super) ends: Content,
    /// The kernel's tables had all of it after the transaction of this number.
    had_at: Cell<Option<u32>>,
}

impl Written {
    /// What these tables have.
    pub(super) fn new(table: Content, ends: Content) -> Self {
        Self {
            table,
            ends,
            had_at: Cell::default(),
        }
    }

    /// Whether the kernel has just these rules, and as many elements. It isn't asked for them while nobody has changed a
    /// table: there may be very many.
    pub(super) fn holds(&self, netfilter: &mut Socket) -> Result<bool, SteeringError> {
        // Before the look: what changes during it is seen the next time.
        let generation = nft::generation(netfilter)?;
        if generation.is_some() && generation == self.had_at.get() {
            return Ok(true);
        }
        let has_all = self.is_there(netfilter)?;
        self.had_at.set(generation.filter(|_| has_all));
        Ok(has_all)
    }

    fn is_there(&self, netfilter: &mut Socket) -> Result<bool, SteeringError> {
        for (table, written) in [(TABLE, &self.table), (TABLE_ENDS, &self.ends)] {
            if by_chain(&nft::rules(netfilter, table)?) != written.rules {
                return Ok(false);
            }
            for (set, count) in &written.elements {
                if elements(netfilter, table, set)? != Some(*count) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }
}

/// Carries out a batch that makes all of a table; what that is.
pub(super) fn commit(batch: Batch<'_>, netfilter: &mut Socket) -> Result<Content, SteeringError> {
    let rules = by_chain(batch.rules());
    let (table, sets) = (batch.table().to_owned(), batch.extended().to_vec());
    batch.commit(netfilter)?;
    let mut content = Content {
        rules,
        elements: Vec::new(),
    };
    for set in sets {
        // By the kernel's own word: it may have made fewer of them than it was given. What it doesn't tell of isn't
        // watched; all is done, and no reason to say otherwise.
        if let Ok(Some(count)) = elements(netfilter, &table, &set) {
            content.elements.push((set, count));
        }
    }
    Ok(content)
}

/// How many elements a set has, if it is there.
fn elements(
    netfilter: &mut Socket,
    table: &str,
    set: &str,
) -> Result<Option<usize>, SteeringError> {
    match nft::count_elements(netfilter, table, set) {
        Ok(count) => Ok(Some(count)),
        Err(error) if error.errno() == Some(NOT_THERE) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The kernel lists chains in an order of its own. The order within each stays.
fn by_chain(rules: &[(String, usize)]) -> Rules {
    let mut rules = rules.to_vec();
    rules.sort_by(|one, other| one.0.cmp(&other.0));
    rules
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_compared_in_their_order_within_each_chain() {
        let rules = |of: &[(&str, usize)]| {
            let rules: Rules = of
                .iter()
                .map(|(chain, count)| ((*chain).to_owned(), *count))
                .collect();
            by_chain(&rules)
        };
        let written = rules(&[("output", 3), ("give", 5), ("output", 2)]);
        assert_eq!(written, rules(&[("give", 5), ("output", 3), ("output", 2)]));
        assert_ne!(written, rules(&[("give", 5), ("output", 2), ("output", 3)]));
        assert_ne!(written, rules(&[("give", 5)]));
    }
}

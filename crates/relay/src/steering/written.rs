//! The rules that were written, by which it is seen whether somebody has changed them.

use sandwire_kernel_net::{
    netlink::Socket,
    nft::{self, Batch},
};

use super::{SteeringError, TABLE, ends::TABLE_ENDS};

/// Chain and number of instructions of each rule of a table, chain by chain.
pub(super) type Rules = Vec<(String, usize)>;

/// What both tables have.
#[derive(Debug, Default)]
pub(crate) struct Written {
    pub(super) table: Rules,
    pub(super) ends: Rules,
}

impl Written {
    /// Whether the kernel has just these rules.
    pub(super) fn holds(&self, netfilter: &mut Socket) -> Result<bool, SteeringError> {
        for (table, written) in [(TABLE, &self.table), (TABLE_ENDS, &self.ends)] {
            if by_chain(&nft::rules(netfilter, table)?) != *written {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Carries out a batch that makes all rules of a table; these.
pub(super) fn commit(batch: Batch<'_>, netfilter: &mut Socket) -> Result<Rules, SteeringError> {
    let rules = by_chain(batch.rules());
    batch.commit(netfilter)?;
    Ok(rules)
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

//! From what a user wrote to what the programs look up.

use ipnet::IpNet;
use sandwire_api::pool::PolicySpec;

use crate::abi;

/// A policy as the programs look it up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Compiled {
    /// The fixed part.
    pub policy: abi::Policy,
    /// Prefixes, with the policy's index left zero and `list` as a position in `lists` plus one.
    pub prefixes: Vec<(abi::PrefixKey, abi::PrefixValue)>,
    /// Lists of rules.
    pub lists: Vec<abi::RuleList>,
}

/// Why a policy can't be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// More prefixes than [`PREFIXES_MAX`].
    #[error("the policy has {0} prefixes; at most {PREFIXES_MAX} are possible")]
    Prefixes(usize),
    /// Too many rules on one prefix.
    #[error("{0} and the prefixes around it have {1} rules; at most {max} are possible", max = abi::RULES_MAX)]
    Rules(IpNet, usize),
    /// An IPv6 prefix that stands for IPv4 addresses.
    #[error("{0} stands for IPv4 addresses; write them as IPv4")]
    Mapped(IpNet),
    /// Too many services of the host.
    #[error("the policy lists {0} host services; at most {max} are possible", max = abi::SERVICES_MAX)]
    Services(usize),
    /// A rate or burst out of range.
    #[error("{field} is {value}; {range} is possible")]
    Rate {
        /// Field of the specification.
        field: &'static str,
        /// What it said.
        value: u64,
        /// What it may be.
        range: &'static str,
    },
}

/// Most prefixes of one policy.
pub const PREFIXES_MAX: usize = 100_000;

/// Compiles a policy. `clone_prefixes` are those of all pools of the instance: no rule lets packets to
/// clone addresses out that no sandbox has.
///
/// # Errors
/// It is more than the maps hold, or out of range.
pub fn compile(spec: &PolicySpec, clone_prefixes: &[IpNet]) -> Result<Compiled, PolicyError> {
    todo!("{spec:?} {clone_prefixes:?}")
}

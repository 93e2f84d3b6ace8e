//! Versions of the specification, and which operations each has.

use crate::{environment::Operation, error::Error};

/// A version of the CNI specification that the plugin speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Version {
    /// Addresses say which family they are of; `CHECK` is there.
    V0_4,
    /// Lists of plugins only.
    V1_0,
    /// `GC` and `STATUS`; interfaces have an MTU.
    V1_1,
}

impl Version {
    /// Every version, the oldest first.
    pub(crate) const ALL: [Self; 3] = [Self::V0_4, Self::V1_0, Self::V1_1];
    /// The newest.
    pub(crate) const NEWEST: Self = Self::V1_1;

    /// As in `cniVersion`.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::V0_4 => "0.4.0",
            Self::V1_0 => "1.0.0",
            Self::V1_1 => "1.1.0",
        }
    }

    /// Reads `cniVersion`. A configuration without it is one of 0.1.0, says the specification.
    pub(crate) fn parse(text: Option<&str>) -> Result<Self, Error> {
        let text = text.unwrap_or("0.1.0");
        let found = Self::ALL.into_iter().find(|known| known.as_str() == text);
        found.ok_or_else(|| Error::IncompatibleVersion {
            reason: format!(
                "the network configuration has cniVersion {text:?}; this plugin speaks {}",
                Self::ALL.map(Self::as_str).join(", ")
            ),
        })
    }

    /// Wants the version to have the operation.
    pub(crate) fn check(self, operation: Operation) -> Result<(), Error> {
        let is_new = matches!(operation, Operation::Gc | Operation::Status);
        if is_new && self < Self::V1_1 {
            return Err(Error::IncompatibleVersion {
                reason: format!(
                    "cniVersion {} has no {operation}: it came with 1.1.0",
                    self.as_str()
                ),
            });
        }
        Ok(())
    }
}

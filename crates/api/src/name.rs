//! Names that users give: of instances, pools and leases.
//!
//! All three end up in names of kernel objects, file names and URLs, so they share one alphabet.
//! Parsing is the only way in: a `Name` that exists is valid.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

/// A name of 1 to 63 characters from `a-z`, `0-9`, `-` and `_`, starting with a letter or digit.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, ToSchema)]
#[schema(value_type = String, pattern = "^[a-z0-9][a-z0-9_-]{0,62}$", example = "web")]
pub struct Name(String);

/// Longest name in bytes: the length of a DNS label.
pub const NAME_LENGTH_MAX: usize = 63;

/// Why a text is not a [`Name`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{text}' is not a valid name: use 1 to {NAME_LENGTH_MAX} of a-z, 0-9, '-' and '_', \
     starting with a letter or digit"
)]
pub struct InvalidName {
    /// What was given, cut to a printable length.
    pub text: String,
}

impl Name {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let starts_well =
            text.starts_with(|first: char| first.is_ascii_lowercase() || first.is_ascii_digit());
        let in_alphabet = text.bytes().all(|byte| {
            byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_".contains(&byte)
        });
        if starts_well && in_alphabet && text.len() <= NAME_LENGTH_MAX {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidName {
                text: text.chars().take(80).collect(),
            })
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_alphabet_are_taken() {
        for text in ["a", "0", "web-1", "agent_7", &"x".repeat(63)] {
            assert_eq!(text.parse::<Name>().unwrap().as_str(), text);
        }
    }

    #[test]
    fn what_could_escape_a_path_or_a_kernel_name_is_refused() {
        for text in [
            "",
            "-a",
            "_a",
            "A",
            "a.b",
            "a/b",
            "..",
            "a b",
            "ä",
            &"x".repeat(64),
        ] {
            assert!(text.parse::<Name>().is_err(), "{text:?} was taken");
        }
    }
}

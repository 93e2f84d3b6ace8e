//! Prefixes on the command line, with an error that says how one is written: that of their own parser speaks of addresses.

use std::str::FromStr;

/// Reads a prefix that is written as this example.
pub(crate) fn prefix<T: FromStr>(
    example: &'static str,
) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text| {
        text.parse()
            .map_err(|_| format!("write an address with its prefix length, as {example}"))
    }
}

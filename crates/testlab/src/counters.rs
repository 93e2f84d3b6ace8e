//! What counters of nftables have counted.

use anyhow::{Context, Result};
use serde_json::Value;

/// Packets of all counters in a listing by `nft -j` together.
///
/// # Errors
/// If it is no such listing.
pub fn packets(listing: &str) -> Result<u64> {
    let document: Value = serde_json::from_str(listing).context("read what nft lists")?;
    let items = document["nftables"]
        .as_array()
        .context("nft lists nothing")?;
    let counted = items
        .iter()
        .filter_map(|item| item["rule"]["expr"].as_array())
        .flatten()
        .filter_map(|expression| expression["counter"]["packets"].as_u64());
    Ok(counted.sum())
}

#[cfg(test)]
mod tests {
    use super::packets;

    #[test]
    fn counters_of_all_rules_are_added_up() {
        let listing = r#"{"nftables": [{"metainfo": {}}, {"table": {"name": "t"}},
            {"rule": {"expr": [{"match": {}}, {"counter": {"packets": 3, "bytes": 300}}]}},
            {"rule": {"expr": [{"counter": {"packets": 4, "bytes": 9}}, {"drop": null}]}}]}"#;
        assert_eq!(packets(listing).unwrap(), 7);
        assert!(packets("{}").is_err());
    }
}

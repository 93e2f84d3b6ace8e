//! Prefixes in documents, with an error that says how one is written: that of their own parser speaks of addresses.

use std::str::FromStr;

use serde::{Deserialize, Deserializer, de::Error};

/// Reads a text as a prefix.
pub(crate) fn parse<T: FromStr, E: Error>(text: &str) -> Result<T, E> {
    text.parse().map_err(|_| {
        let shown: String = text.chars().take(80).collect();
        E::custom(format_args!(
            "'{shown}' is no prefix: write an address with its length, as 10.64.0.0/16 or fd00:c10e::/64"
        ))
    })
}

/// For a field that may be absent.
pub(crate) fn optional<'de, T, D>(deserializer: D) -> Result<Option<T>, D::Error>
where
    T: FromStr,
    D: Deserializer<'de>,
{
    let text = Option::<String>::deserialize(deserializer)?;
    text.map(|text| parse(&text)).transpose()
}

/// For a list.
///
/// # Errors
/// One of them is no prefix.
pub fn list<'de, T, D>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    T: FromStr,
    D: Deserializer<'de>,
{
    let texts = Vec::<String>::deserialize(deserializer)?;
    texts.iter().map(|text| parse(text)).collect()
}

/// For a list that may be absent.
pub(crate) fn optional_list<'de, T, D>(deserializer: D) -> Result<Option<Vec<T>>, D::Error>
where
    T: FromStr,
    D: Deserializer<'de>,
{
    let texts = Option::<Vec<String>>::deserialize(deserializer)?;
    let prefixes = texts.map(|texts| texts.iter().map(|text| parse(text)).collect());
    prefixes.transpose()
}

#[cfg(test)]
mod tests {
    use crate::{attach::Attach, pool::PoolSpec};

    #[test]
    fn who_leaves_the_length_out_is_told_how_a_prefix_is_written() {
        let plan = r#""addresses":{"plan":"prefix","ipv4":"10.64.0.0/16"}"#;
        for pool in [
            r#"{"name":"web","addresses":{"plan":"prefix","ipv4":"10.64.0.0"}}"#.to_owned(),
            format!(r#"{{"name":"web","guest":{{"ipv4":"10.64.0.0"}},{plan}}}"#),
            format!(
                r#"{{"name":"web","parent":{{"interface":"a","subnets":["10.64.0.0"]}},{plan}}}"#
            ),
            format!(
                r#"{{"name":"web","policy":{{"egress":{{"rules":[{{"action":"deny","prefixes":["10.64.0.0"]}}]}}}},{plan}}}"#
            ),
        ] {
            let error = serde_json::from_str::<PoolSpec>(&pool).unwrap_err();
            let told = "'10.64.0.0' is no prefix: write an address with its length";
            assert!(error.to_string().contains(told), "{pool}: {error}");
        }
        let attach = r#"{"netns":"/run/netns/a","routes":["::"]}"#;
        let error = serde_json::from_str::<Attach>(attach).unwrap_err();
        assert!(error.to_string().contains("'::' is no prefix"), "{error}");
        let attach: Attach = serde_json::from_str(r#"{"netns":"/a","routes":null}"#).unwrap();
        assert_eq!(attach.routes, None);
    }
}

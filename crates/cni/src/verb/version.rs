//! `VERSION`: which versions of the specification the plugin speaks.

use serde_json::{Value, json};

use crate::{error::Error, version::Version};

/// The answer. What comes in may be nothing.
pub(crate) fn answer(text: &[u8]) -> Result<String, Error> {
    let asked = if text.trim_ascii().is_empty() {
        Value::Null
    } else {
        serde_json::from_slice(text).map_err(|error| Error::Undecodable {
            reason: error.to_string(),
        })?
    };
    let version = asked["cniVersion"].as_str();
    let document = json!({
        "cniVersion": version.unwrap_or(Version::NEWEST.as_str()),
        "supportedVersions": Version::ALL.map(Version::as_str),
    });
    Ok(format!("{document:#}\n"))
}

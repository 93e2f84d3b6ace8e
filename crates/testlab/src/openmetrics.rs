//! Metrics as Prometheus's own client library reads them: its parser of OpenMetrics refuses whatever the standard does.

use std::collections::BTreeSet;

use anyhow::{Context, Result};

use crate::command;

/// Prints the name of each family that has samples. Debian's Python: another one hasn't its packages.
const READER: &str = r"/usr/bin/python3 -c '
import sys
from prometheus_client.openmetrics.parser import text_string_to_metric_families
for family in text_string_to_metric_families(sys.stdin.read()):
    if family.samples:
        print(family.name)
'";

/// Names of the families that have samples, counters' without `_total`.
///
/// # Errors
/// If the text isn't OpenMetrics; the error says where.
pub fn families(text: &str) -> Result<BTreeSet<String>> {
    let names = command::shell_with_input(READER, text)
        .with_context(|| format!("this isn't OpenMetrics:\n{text}"))?;
    Ok(names.lines().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::families;

    #[test]
    fn what_is_not_by_the_standard_is_refused() {
        let sound = "# TYPE sent counter\nsent_total{to=\"a\"} 3\n# EOF\n";
        assert_eq!(families(sound).unwrap(), ["sent".to_owned()].into());
        for damaged in [
            sound.replace("# EOF\n", ""),
            sound.replace("sent_total", "sent"),
            sound.replace("\"a\"", "a"),
            sound.replace(" 3", " three"),
        ] {
            families(&damaged).unwrap_err();
        }
    }
}

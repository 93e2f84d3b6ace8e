//! Policies of any kind as files: TOML for people, JSON for programs.

use std::path::Path;

use serde::{Serialize, de::DeserializeOwned};

use crate::{failure::Failure, patient::Patient};

/// Reads a policy from a file, TOML or JSON; `-` is standard input.
pub(crate) fn read_policy<P: DeserializeOwned>(file: &Path, operation: &str) -> Result<P, Failure> {
    let shown = file.display();
    let refuse =
        |reason: String| Failure::refused(format!("cannot {operation}: {shown}: {reason}"));
    let text = if file == Path::new("-") {
        std::io::read_to_string(Patient(std::io::stdin()))
    } else {
        std::fs::read_to_string(file)
    }
    .map_err(|error| refuse(error.to_string()))?;
    parse_policy(&text).map_err(refuse)
}

/// The same of a text. One that says nothing may be what is left of a program that has failed, and as a policy it would
/// allow nearly everything.
pub(crate) fn parse_policy<P: DeserializeOwned>(text: &str) -> Result<P, String> {
    if text.lines().all(is_silent) {
        return Err("it is empty; for a policy of defaults alone write {}".to_owned());
    }
    if text.trim_start().starts_with('{') {
        serde_json::from_str(text).map_err(|error| error.to_string())
    } else {
        toml::from_str(text).map_err(|error| error.to_string())
    }
}

/// Whether a line of TOML is blank or a comment.
fn is_silent(line: &str) -> bool {
    let line = line.trim();
    line.is_empty() || line.starts_with('#')
}

/// The policy as TOML, with a comment that says whose it is: the lease's own or its pool's.
pub(crate) fn policy_text(policy: &impl Serialize, own: bool) -> String {
    let whose = if own {
        "# The lease's own policy.\n"
    } else {
        "# The pool's policy.\n"
    };
    match toml::to_string(policy) {
        Ok(text) => format!("{whose}{text}"),
        Err(error) => format!("# cannot be written as TOML: {error}; use --json\n"),
    }
}

#[cfg(test)]
mod tests {
    use sandwire_api::pool::PolicySpec;

    use super::parse_policy;

    #[test]
    fn a_text_that_says_nothing_is_no_policy() {
        for text in ["", "\n \n", "# The pool's policy.\n\n  # more"] {
            let error = parse_policy::<PolicySpec>(text).unwrap_err();
            assert!(error.contains("empty"), "{error}");
        }
    }

    #[test]
    fn defaults_can_be_asked_for() {
        let asked = parse_policy::<PolicySpec>("{}").unwrap();
        assert_eq!(asked, PolicySpec::default());
    }
}

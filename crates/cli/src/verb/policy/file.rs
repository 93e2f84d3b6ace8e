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

/// The same of a text.
pub(crate) fn parse_policy<P: DeserializeOwned>(text: &str) -> Result<P, String> {
    if text.trim_start().starts_with('{') {
        serde_json::from_str(text).map_err(|error| error.to_string())
    } else {
        toml::from_str(text).map_err(|error| error.to_string())
    }
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

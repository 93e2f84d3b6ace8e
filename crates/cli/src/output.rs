//! Standard output and standard error of every verb.

use std::{
    io::{ErrorKind, IsTerminal, Write},
    process::ExitCode,
};

use serde::Serialize;
use serde_json::json;

use crate::{
    failure::{Failure, Outcome},
    patient::Patient,
};

/// Where answers go, and in which form.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    /// Whether to print JSON instead of text for people.
    pub(crate) json: bool,
}

impl Output {
    /// Prints an answer: `document` as JSON, or what `human` makes of it.
    pub(crate) fn answer<T: Serialize>(
        self,
        document: &T,
        human: impl FnOnce(&T) -> String,
    ) -> Outcome {
        let mut text = if self.json {
            serde_json::to_string_pretty(document).map_err(|error| {
                Failure::failed(format!("cannot write the answer as JSON: {error}"))
            })?
        } else {
            human(document)
        };
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        self.write(&text)
    }

    /// Writes text to standard output. A reader that has gone away is not an error.
    pub(crate) fn write(self, text: &str) -> Outcome {
        match Patient(std::io::stdout()).write_all(text.as_bytes()) {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Failure::failed(format!(
                "cannot write to standard output: {error}"
            ))),
            _ => Ok(ExitCode::SUCCESS),
        }
    }

    /// Says on standard error why it ended badly; with `--json` also as a document.
    pub(crate) fn fail(self, failure: &Failure) -> ExitCode {
        note(&failure.message);
        self.fail_quietly(failure)
    }

    /// As [`Output::fail`], where a document has been written already: there is only one.
    pub(crate) fn fail_by_status(self, failure: &Failure) -> ExitCode {
        note(&failure.message);
        ExitCode::from(failure.exit_status)
    }

    /// As [`Output::fail`], where the text has been written already.
    pub(crate) fn fail_quietly(self, failure: &Failure) -> ExitCode {
        if self.json {
            // The status says it too; there is nobody left to tell that writing failed.
            let _ = self.write(&format!("{:#}\n", json!({ "error": failure })));
        }
        ExitCode::from(failure.exit_status)
    }
}

/// A line of ours on standard error.
pub(crate) fn note(message: &str) {
    let line = format!("sandwire: {message}\n");
    let _ = Patient(std::io::stderr()).write_all(line.as_bytes());
}

/// Whether people read standard output, and want colours.
pub(crate) fn wants_colour() -> bool {
    std::io::stdout().is_terminal()
        && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
        && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

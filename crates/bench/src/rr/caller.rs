//! A stand-in that does something at each word and answers with a figure.

use std::{
    io::{BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use anyhow::{Context, Result};

use super::load::line;

/// The process. It is killed when dropped.
pub(super) struct Caller {
    row: &'static str,
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Caller {
    /// Starts it for a row of the record.
    pub(super) fn start(mut command: Command, row: &'static str) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start a process of row {row}"))?;
        let requests = child.stdin.take().context("a pipe was asked for")?;
        let answers = child.stdout.take().context("a pipe was asked for")?;
        Ok(Self {
            row,
            child,
            requests,
            answers: BufReader::new(answers),
        })
    }

    /// What it answers to these words.
    pub(super) fn ask(&mut self, words: &str) -> Result<f64> {
        let row = self.row;
        writeln!(self.requests, "{words}")
            .with_context(|| format!("cannot ask a process of row {row} for '{words}'"))?;
        let said = line(&mut self.answers)
            .with_context(|| format!("cannot measure '{words}' of row {row}"))?;
        said.parse()
            .with_context(|| format!("row {row} says '{said}' of '{words}'"))
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        // Already ended, or ended here: there is nobody to tell.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

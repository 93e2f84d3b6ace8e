//! Runs programs and wants them to succeed.
//!
//! A command is given as one line of words without quoting: `run("ip link set lo up")`. What needs
//! quoting or a pipe goes through [`shell`]. A failure names the command, its status and what it said.

use std::{
    io::Write,
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
};

use anyhow::{Context, Result, bail, ensure};

/// A process that is killed with its owner.
#[derive(Debug)]
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a line of words and returns its standard output.
///
/// # Errors
/// Also if the command ends with a status other than 0; the error then holds what it said.
pub fn run(line: &str) -> Result<String> {
    let mut words = line.split_whitespace();
    let program = words.next().context("an empty command line")?;
    output_of(Command::new(program).args(words))
}

/// Runs a script with `sh -e` and returns its standard output.
///
/// # Errors
/// Also if the script ends with a status other than 0; the error then holds what it said.
pub fn shell(script: &str) -> Result<String> {
    output_of(Command::new("sh").args(["-e", "-c", script]))
}

/// Runs a program with a text as its standard input, as in `nft -f -`.
///
/// # Errors
/// Also if the command ends with a status other than 0; the error then holds what it said.
pub fn run_with_input(line: &str, input: &str) -> Result<String> {
    let mut words = line.split_whitespace();
    let program = words.next().context("an empty command line")?;
    feed(Command::new(program).args(words), input)
}

/// Runs a script with `sh -e` and a text as its standard input.
///
/// # Errors
/// Also if the script ends with a status other than 0; the error then holds what it said.
pub fn shell_with_input(script: &str, input: &str) -> Result<String> {
    feed(Command::new("sh").args(["-e", "-c", script]), input)
}

fn feed(command: &mut Command, input: &str) -> Result<String> {
    let line = line_of(command);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("start '{line}'"))?;
    let mut stdin = child.stdin.take().context("the child has no input")?;
    stdin
        .write_all(input.as_bytes())
        .with_context(|| format!("write to '{line}'"))?;
    drop(stdin);
    let output = child
        .wait_with_output()
        .with_context(|| format!("wait for '{line}'"))?;
    text_of(&line, &output)
}

/// Runs a prepared command and returns its standard output.
///
/// # Errors
/// Also if the command ends with a status other than 0; the error then holds what it said.
pub fn output_of(command: &mut Command) -> Result<String> {
    let line = line_of(command);
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("start '{line}'"))?;
    text_of(&line, &output)
}

/// Whether a program is on the PATH.
#[must_use]
pub fn is_on_path(program: &str) -> bool {
    find(program).is_some()
}

/// Where a program is on the PATH.
#[must_use]
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|folder| folder.join(program))
        .find(|path| path.is_file())
}

/// Fails with the list of programs that are not on the PATH.
///
/// # Errors
/// If one of them is not there.
pub fn require_on_path(programs: &[&str]) -> Result<()> {
    let missing: Vec<&str> = programs
        .iter()
        .copied()
        .filter(|program| !is_on_path(program))
        .collect();
    ensure!(
        missing.is_empty(),
        "not on the PATH: {}; `cargo xtask setup` installs what is missing",
        missing.join(", ")
    );
    Ok(())
}

fn text_of(line: &str, output: &Output) -> Result<String> {
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!(
            "'{line}' failed ({}): {}{}",
            output.status,
            stderr.trim(),
            stdout.trim()
        );
    }
    Ok(stdout)
}

fn line_of(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_command_says_what_it_said() {
        let error = shell("echo reason >&2; exit 3").unwrap_err().to_string();
        assert!(error.contains("reason") && error.contains('3'), "{error}");
    }

    #[test]
    fn input_reaches_the_command() {
        assert_eq!(run_with_input("cat", "text").unwrap(), "text");
    }
}

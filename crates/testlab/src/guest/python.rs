//! Python for a guest: what the modules that tests use are made of.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, ensure};

use super::cpio::Archive;
use crate::command;

/// Debian's own: another one on the PATH may have its modules anywhere.
pub(super) const INTERPRETER: &str = "/usr/bin/python3";
/// Names the files of modules for sockets and JSON, and of all that these import.
const FILES: &str = "\
import errno, json, socket, struct, sys
for module in list(sys.modules.values()):
    if getattr(module, '__file__', None):
        print(module.__file__)
";

/// Adds the modules, where the interpreter looks for them. Those that aren't in Python need no libraries but its own.
pub(super) fn add_modules(archive: &mut Archive) -> Result<()> {
    let list = command::output_of(Command::new(INTERPRETER).args(["-I", "-c", FILES]))
        .context("ask Python for its modules (package python3)")?;
    for file in list.lines() {
        ensure!(
            Path::new(file).is_absolute(),
            "Python has a module at {file}"
        );
        let content = fs::read(file).with_context(|| format!("read {file}"))?;
        archive.file(file.trim_start_matches('/'), &content);
    }
    Ok(())
}

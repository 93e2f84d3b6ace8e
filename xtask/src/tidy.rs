//! The project's own rules, where no other tool checks them.
//!
//! Each rule is a pure function from text to findings, tested on text; this file only walks the tree.
//! Rules are about shape (who may import whom, where `unsafe` may stand, how long a function may
//! be) and about promises of the documents (links that lead somewhere, commands that exist).

mod bpf;
mod documents;
mod imports;
mod source;

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result};

use crate::workspace;

/// A broken rule.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Finding {
    /// File, relative to the workspace's root.
    pub(crate) path: PathBuf,
    /// Line, from 1.
    pub(crate) line: usize,
    /// What is wrong and what to do.
    pub(crate) message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{}:{}: {}",
            self.path.display(),
            self.line,
            self.message
        )
    }
}

/// Runs `cargo xtask tidy`.
pub(crate) fn run() -> Result<ExitCode> {
    let mut findings = imports::check(&workspace::metadata()?.packages);
    for path in files()? {
        let full = workspace::root().join(&path);
        let extension = path.extension().and_then(|extension| extension.to_str());
        if !matches!(extension, Some("rs" | "md" | "c" | "h")) {
            continue;
        }
        let text =
            fs::read_to_string(&full).with_context(|| format!("reading {}", full.display()))?;
        findings.extend(match extension {
            Some("rs") => source::check(&path, &text),
            Some("c" | "h") => bpf::check(&path, &text),
            _ => documents::check(&path, &text, workspace::root()),
        });
    }
    findings.sort();
    for finding in &findings {
        println!("{finding}");
    }
    if findings.is_empty() {
        eprintln!("tidy: clean");
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("tidy: {} findings", findings.len());
    Ok(ExitCode::FAILURE)
}

/// Files of the tree, relative to its root, without what cargo and git keep there.
fn files() -> Result<Vec<PathBuf>> {
    let root = workspace::root();
    let mut found = Vec::new();
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let entries =
            fs::read_dir(&folder).with_context(|| format!("listing {}", folder.display()))?;
        for entry in entries {
            let entry = entry.with_context(|| format!("listing {}", folder.display()))?;
            let (path, name) = (entry.path(), entry.file_name());
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if name != "target" && name != ".git" {
                    folders.push(path);
                }
            } else if let Ok(relative) = path.strip_prefix(root) {
                found.push(relative.to_path_buf());
            }
        }
    }
    Ok(found)
}

fn finding(path: &Path, line: usize, message: impl Into<String>) -> Finding {
    Finding {
        path: path.to_path_buf(),
        line,
        message: message.into(),
    }
}

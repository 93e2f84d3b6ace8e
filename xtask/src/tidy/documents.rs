//! Rules about documents: links lead somewhere, and commands of this project exist.

use std::{
    fs,
    path::{Path, PathBuf},
};

use clap::{CommandFactory, Parser, error::ErrorKind};

use super::{Finding, finding};

/// Checks one Markdown file, whose links are relative to it.
pub(super) fn check(path: &Path, text: &str, root: &Path) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut fence: Option<bool> = None;
    for (line, number) in text.lines().zip(1..) {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            let is_shell = matches!(language.trim(), "sh" | "bash" | "console" | "shell");
            fence = if fence.is_some() {
                None
            } else {
                Some(is_shell)
            };
            continue;
        }
        match fence {
            Some(true) => findings.extend(check_command(path, number, line)),
            Some(false) => {}
            None => findings.extend(check_links(path, number, line, text, root)),
        }
    }
    findings
}

fn check_command(path: &Path, number: usize, line: &str) -> Option<Finding> {
    let line = line.trim_start();
    let line = line
        .strip_prefix("$ ")
        .or(line.strip_prefix("# "))
        .unwrap_or(line);
    let line = line.split(" #").next().unwrap_or(line);
    let line = line.strip_prefix("sudo -E ").unwrap_or(line);
    let rest = line.strip_prefix("cargo xtask")?;
    if rest.contains(['[', '|', '<', '…', '$', '\\']) {
        return None;
    }
    let words = std::iter::once("cargo xtask").chain(rest.split_whitespace());
    let error = crate::Arguments::try_parse_from(words).err()?;
    let is_help = matches!(
        error.kind(),
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
    );
    let names: Vec<String> = crate::Arguments::command()
        .get_subcommands()
        .map(|command| command.get_name().to_owned())
        .collect();
    let message = format!("`{line}` is no command; there are: {}", names.join(", "));
    (!is_help).then(|| finding(path, number, message))
}

fn check_links(path: &Path, number: usize, line: &str, text: &str, root: &Path) -> Vec<Finding> {
    targets(line)
        .filter(|target| !target.contains("://") && !target.starts_with("mailto:"))
        .filter(|target| !leads_somewhere(path, target, text, root))
        .map(|target| finding(path, number, format!("the link to {target} leads nowhere")))
        .collect()
}

/// What the line's Markdown links point to.
fn targets(line: &str) -> impl Iterator<Item = &str> {
    line.split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')'))
        .map(|(target, _)| target.split(' ').next().unwrap_or(target))
}

fn leads_somewhere(path: &Path, target: &str, text: &str, root: &Path) -> bool {
    let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
    if file.is_empty() {
        return has_heading(text, anchor);
    }
    let folder = path.parent().unwrap_or(Path::new(""));
    let full: PathBuf = root.join(folder).join(file);
    if anchor.is_empty() || full.extension().is_none_or(|extension| extension != "md") {
        return full.exists();
    }
    fs::read_to_string(full).is_ok_and(|text| has_heading(&text, anchor))
}

fn has_heading(text: &str, anchor: &str) -> bool {
    text.lines()
        .filter(|line| line.starts_with('#'))
        .any(|line| anchor_of(line.trim_start_matches('#').trim()) == anchor)
}

/// The anchor that Git forges make of a heading.
fn anchor_of(heading: &str) -> String {
    heading
        .chars()
        .filter_map(|character| match character {
            ' ' => Some('-'),
            '-' | '_' => Some(character),
            _ if character.is_alphanumeric() => character.to_lowercase().next(),
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(text: &str) -> Vec<String> {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("docs")).unwrap();
        fs::write(
            root.path().join("docs/operate.md"),
            "# How to\n## Start: a `daemon`\n",
        )
        .unwrap();
        check(Path::new("README.md"), text, root.path())
            .into_iter()
            .map(|finding| finding.message)
            .collect()
    }

    #[test]
    fn links_that_lead_somewhere_are_clean() {
        let text = "# Title\n[a](docs/operate.md) [b](docs/operate.md#start-a-daemon) [c](#title)
            [d](https://example.com/x) ![e](docs/)\n";
        assert_eq!(messages(text), Vec::<String>::new());
    }

    #[test]
    fn links_that_lead_nowhere_are_found() {
        for target in ["docs/none.md", "docs/operate.md#stop", "#none"] {
            let found = messages(&format!("see [this]({target})\n"));
            assert_eq!(found, [format!("the link to {target} leads nowhere")]);
        }
    }

    #[test]
    fn commands_that_exist_are_clean() {
        let text = "```sh\ncargo xtask test netns --require # why\n$ cargo xtask setup\n\
                    # cargo xtask test unit\nls\n```\n";
        assert_eq!(messages(text), Vec::<String>::new());
    }

    #[test]
    fn commands_that_do_not_exist_are_found() {
        for command in ["cargo xtask fly", "# cargo xtask test --nonsense"] {
            let found = messages(&format!("```sh\n{command}\n```\n"));
            assert_eq!(found.len(), 1, "{command}");
        }
    }

    #[test]
    fn links_in_code_are_code() {
        assert_eq!(messages("```\n[a](none.md)\n```\n"), Vec::<String>::new());
    }
}

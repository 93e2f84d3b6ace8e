//! Puts a Debian package together from the release executable and what `packaging/` has, by `dpkg-deb`.
//!
//! [`entries`] says which file of the tree goes where; `packaging/debian` has the description and the scripts, which enable
//! nothing. What depends on the executable is read from it: processor, version of libc, completions.

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result, ensure};

use crate::{
    command,
    staging::{self, Content, Entry},
    workspace,
};

/// Puts a Debian package together.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    wanted: staging::Wanted,
    /// Version of the package, as Debian counts.
    #[arg(long, value_name = "VERSION", default_value = env!("CARGO_PKG_VERSION"))]
    package_version: String,
}

/// What apt keeps of the administrator's, and asks about when it is exchanged.
const CONFIGURATION: &str = "etc/sandwire/sandwire.toml";
const DOCUMENTS: &str = "usr/share/doc/sandwire";
/// Folders of the tree whose files go to a folder of the package, and how these are named.
const FOLDERS: &[(&str, &[&str], &str)] = &[
    ("packaging/systemd", &["service"], "usr/lib/systemd/system"),
    ("packaging/systemd", &["network"], "usr/lib/systemd/network"),
    ("packaging/sysusers.d", &["conf"], "usr/lib/sysusers.d"),
    (
        "packaging/NetworkManager",
        &["conf"],
        "usr/lib/NetworkManager/conf.d",
    ),
    (
        "packaging/cni",
        &["conflist"],
        "usr/share/doc/sandwire/packaging/cni",
    ),
    (
        "packaging/kubernetes",
        &["yaml"],
        "usr/share/doc/sandwire/packaging/kubernetes",
    ),
    ("docs", &["md"], "usr/share/doc/sandwire/docs"),
    (
        "docs/recipes",
        &["md"],
        "usr/share/doc/sandwire/docs/recipes",
    ),
    (
        "docs/decisions",
        &["md"],
        "usr/share/doc/sandwire/docs/decisions",
    ),
];
const SCRIPTS: [&str; 3] = ["postinst", "prerm", "postrm"];
/// Completions: shell, and where its are.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "usr/share/bash-completion/completions/sandwire"),
    ("zsh", "usr/share/zsh/vendor-completions/_sandwire"),
    ("fish", "usr/share/fish/vendor_completions.d/sandwire.fish"),
];

/// Runs `cargo xtask deb`.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let executable = arguments.wanted.executable()?;
    let output = arguments.wanted.output("debian")?;
    let package = build(
        workspace::root(),
        &executable,
        &arguments.package_version,
        &output,
        &[],
    )?;
    println!("{}", package.display());
    Ok(ExitCode::SUCCESS)
}

/// Puts the package together from this tree and executable; where it is. `more` is what `dpkg-deb` is told besides.
fn build(
    tree: &Path,
    executable: &Path,
    version: &str,
    output: &Path,
    more: &[&str],
) -> Result<PathBuf> {
    let bytes =
        fs::read(executable).with_context(|| format!("reading {}", executable.display()))?;
    let architecture = staging::architecture(&bytes)
        .with_context(|| format!("{} is no executable for Debian", executable.display()))?;
    // Paths of programs are relative to the workspace's root, ours to the caller's folder.
    fs::create_dir_all(output).with_context(|| format!("creating {}", output.display()))?;
    let (executable, output) = (fs::canonicalize(executable)?, fs::canonicalize(output)?);
    let staging = tempfile::tempdir_in(&output).context("creating a folder for the files")?;
    let root = staging.path().join("root");
    staging::folder(&root, Path::new(""))?;
    for entry in entries(tree, &executable)? {
        entry.put(&root)?;
    }
    let template = fs::read_to_string(tree.join("packaging/debian/control"))?;
    let control = control(
        &template,
        &[
            ("@VERSION@", version),
            ("@ARCHITECTURE@", architecture),
            ("@LIBC@", &libc_version(&bytes)),
            ("@KIBIBYTES@", &(size_of(&root)? / 1024).to_string()),
        ],
    )?;
    for entry in control_entries(tree, control) {
        entry.put(&root)?;
    }
    let package = output.join(format!("sandwire_{version}_{architecture}.deb"));
    let (from, to) = (root.to_string_lossy(), package.to_string_lossy());
    let arguments = [more, &["--root-owner-group", "--build", &from, &to]].concat();
    command::program("dpkg-deb", arguments)
        .output()
        .context("putting the package together")?;
    Ok(package)
}

/// All files that are installed.
fn entries(tree: &Path, executable: &Path) -> Result<Vec<Entry>> {
    let copy = |path: PathBuf, from: PathBuf| Entry {
        path,
        content: Content::Copy(from),
        is_executable: false,
    };
    let mut entries = vec![
        Entry {
            is_executable: true,
            ..copy("usr/bin/sandwire".into(), executable.to_owned())
        },
        copy(CONFIGURATION.into(), tree.join("packaging/sandwire.toml")),
        Entry {
            path: "usr/lib/cni/sandwire-cni".into(),
            content: Content::Link("../../bin/sandwire"),
            is_executable: false,
        },
        Entry {
            path: Path::new(DOCUMENTS).join("copyright"),
            content: Content::Text(copyright(tree)?),
            is_executable: false,
        },
    ];
    for name in ["README.md", "ARCHITECTURE.md", "CHANGELOG.md"] {
        entries.push(copy(Path::new(DOCUMENTS).join(name), tree.join(name)));
    }
    for (from, endings, to) in FOLDERS {
        let listed = fs::read_dir(tree.join(from)).with_context(|| format!("listing {from}"))?;
        for file in listed {
            let path = file?.path();
            let ending = path.extension().and_then(|ending| ending.to_str());
            if let (Some(name), Some(ending)) = (path.file_name(), ending)
                && endings.contains(&ending)
            {
                entries.push(copy(Path::new(to).join(name), path.clone()));
            }
        }
    }
    for (shell, path) in COMPLETIONS {
        let script = command::program(executable, ["completion", shell])
            .output()
            .context("asking the executable for completions, for which it has to run here")?;
        entries.push(Entry {
            path: path.into(),
            content: Content::Text(script),
            is_executable: false,
        });
    }
    entries.sort_by(|one, other| one.path.cmp(&other.path));
    Ok(entries)
}

/// What tells dpkg about the package.
fn control_entries(tree: &Path, control: String) -> Vec<Entry> {
    let text = |name: &str, text: String| Entry {
        path: Path::new("DEBIAN").join(name),
        content: Content::Text(text),
        is_executable: false,
    };
    let script = |name| Entry {
        path: Path::new("DEBIAN").join(name),
        content: Content::Copy(tree.join("packaging/debian").join(name)),
        is_executable: true,
    };
    let mut entries = vec![
        text("control", control),
        text("conffiles", format!("/{CONFIGURATION}\n")),
    ];
    entries.extend(SCRIPTS.map(script));
    entries
}

/// Bytes of all files below a folder.
fn size_of(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let facts = fs::symlink_metadata(&path)?;
        bytes += if facts.is_dir() {
            size_of(&path)?
        } else {
            facts.len()
        };
    }
    Ok(bytes)
}

/// The description, with values for all that it leaves open.
fn control(template: &str, values: &[(&str, &str)]) -> Result<String> {
    let mut text = template.to_owned();
    for (name, value) in values {
        ensure!(text.contains(name), "the description has no {name}");
        text = text.replace(name, value);
    }
    ensure!(
        !text.contains('@'),
        "the description leaves something open:\n{text}"
    );
    Ok(text)
}

/// The oldest libc that has what the executable names of it.
fn libc_version(executable: &[u8]) -> String {
    const PREFIX: &[u8] = b"GLIBC_2.";
    let numbers = executable
        .windows(PREFIX.len() + 3)
        .filter_map(|window| window.strip_prefix(PREFIX))
        .filter_map(|rest| {
            let digits = rest.iter().take_while(|byte| byte.is_ascii_digit());
            let text: String = digits.map(|&byte| char::from(byte)).collect();
            text.parse::<u32>().ok()
        });
    // Debian 12 has 2.36, and nothing older is tried.
    format!("2.{}", numbers.max().unwrap_or(36))
}

fn copyright(tree: &Path) -> Result<String> {
    let mit = fs::read_to_string(tree.join("LICENSE-MIT")).context("reading LICENSE-MIT")?;
    Ok(format!(
        "sandwire may be used under the terms of the MIT licence or of the Apache licence, version 2.0, as you like. On Debian systems the latter \
         is in /usr/share/common-licenses/Apache-2.0. The former:\n\n{mit}"
    ))
}

#[cfg(test)]
mod installed;
#[cfg(test)]
mod tests;

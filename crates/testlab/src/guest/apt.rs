//! apt, asked for packages that are never installed: the machine's own, those of another suite, or those for 64-bit ARM.
//!
//! Other packages come from the machine's own mirror; their lists are kept in the cache, and the machine's sources stay
//! as they are. Which keys a mirror is trusted by is the machine's own affair.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result};

use crate::command;

/// apt with one set of lists.
pub(super) struct Apt {
    options: Vec<String>,
}

impl Apt {
    /// With the machine's own lists.
    pub(super) fn own() -> Self {
        Self {
            options: vec!["-oAPT::Sandbox::User=root".to_owned()],
        }
    }

    /// With those of another suite.
    pub(super) fn of_suite(cache: &Path, suite: &str) -> Result<Self> {
        let folder = cache.join(format!("apt-{suite}"));
        Self::own().with_sources(&folder, &format!("deb {} {suite} main\n", mirror()?))
    }

    /// With those of the machine's own release for 64-bit ARM.
    pub(super) fn of_arm(cache: &Path) -> Result<Self> {
        let source = format!("deb [arch=arm64] {} {} main\n", mirror()?, codename()?);
        let mut apt = Self::own().with_sources(&cache.join("apt-arm64"), &source)?;
        apt.options.extend([
            "-oAPT::Architecture=arm64".to_owned(),
            "-oAPT::Architectures=arm64".to_owned(),
        ]);
        Ok(apt)
    }

    fn with_sources(mut self, folder: &Path, line: &str) -> Result<Self> {
        fs::create_dir_all(folder.join("lists/partial")).context("prepare apt's lists")?;
        let sources = folder.join("sources.list");
        fs::write(&sources, line).with_context(|| format!("write {}", sources.display()))?;
        self.options.extend([
            format!("-oDir::Etc::sourcelist={}", sources.display()),
            "-oDir::Etc::sourceparts=/dev/null".to_owned(),
            format!("-oDir::State::lists={}", folder.join("lists").display()),
            format!("-oDir::Cache={}", folder.display()),
        ]);
        Ok(self)
    }

    /// A program of apt's.
    pub(super) fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.arg("-q").args(&self.options);
        command
    }

    /// Tries it again with new lists if it fails: they are missing or too old.
    pub(super) fn with_lists(&self, attempt: impl Fn() -> Result<()>) -> Result<()> {
        if attempt().is_err() {
            command::output_of(self.command("apt-get").arg("update"))?;
            attempt()?;
        }
        Ok(())
    }

    /// Downloads packages and all that they need, as for an empty system, into an empty folder.
    pub(super) fn download(&self, packages: &[&str], folder: &Path) -> Result<()> {
        fs::create_dir_all(folder.join("partial"))
            .with_context(|| format!("create {}", folder.display()))?;
        self.with_lists(|| {
            command::output_of(
                self.command("apt-get")
                    .args(["-y", "--no-install-recommends", "--download-only"])
                    .args(["-oDebug::NoLocking=1", "-oDir::State::status=/dev/null"])
                    .arg(format!("-oDir::Cache::Archives={}", folder.display()))
                    .arg("install")
                    .args(packages),
            )?;
            Ok(())
        })
    }
}

/// Where the machine gets the main packages of its own release from.
fn mirror() -> Result<String> {
    let codename = codename()?;
    let targets = command::output_of(
        Command::new("apt-get")
            .args(["indextargets", "--format"])
            .arg("$(RELEASE) $(COMPONENT) $(REPO_URI)")
            .arg("Created-By: Packages"),
    )?;
    let wanted = format!("{codename} main ");
    let mirror = targets.lines().find_map(|line| line.strip_prefix(&wanted));
    let mirror = mirror.with_context(|| format!("apt has no packages of '{codename}'"))?;
    Ok(mirror.to_owned())
}

/// The machine's own release, as suites are named.
fn codename() -> Result<String> {
    let release = fs::read_to_string("/etc/os-release").context("find this machine's release")?;
    let codename = release
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
        .context("/etc/os-release names no release")?;
    Ok(codename.trim_matches('"').to_owned())
}

//! The kernel of QEMU guests: Debian's cloud kernel, fetched with `apt-get download` and unpacked into
//! the cache, with nothing installed.
//!
//! A lab has no way to the world, so the kernel is fetched before one is made.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use rustix::fs::{FlockOperation, flock};

use super::cache_folder;
use crate::command;

/// An unpacked kernel.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// The bootable image.
    pub image: PathBuf,
    /// Folder of its modules, `…/lib/modules/VERSION`.
    pub modules: PathBuf,
}

impl Kernel {
    /// The kernel in the cache; fetches it first if there is none.
    ///
    /// # Errors
    /// If apt can't deliver it.
    pub fn fetch() -> Result<Self> {
        let cache = cache_folder()?;
        let lock = File::create(cache.join("kernel.lock")).context("lock the guest cache")?;
        flock(&lock, FlockOperation::LockExclusive).context("lock the guest cache")?;
        let root = cache.join("kernel");
        if !root.join(COMPLETE).exists() {
            download(&cache, &root).context("fetch a kernel for QEMU guests")?;
            File::create(root.join(COMPLETE)).context("complete the guest cache")?;
        }
        let modules = only_entry(&root.join("lib/modules"))?;
        let version = modules
            .file_name()
            .context("a kernel without a version")?
            .to_string_lossy()
            .into_owned();
        Ok(Self {
            image: root.join("boot").join(format!("vmlinuz-{version}")),
            modules,
        })
    }

    /// Paths of these modules and of all that they need, in the order to load them.
    ///
    /// # Errors
    /// If there is no such module.
    pub fn modules_for(&self, names: &[&str]) -> Result<Vec<PathBuf>> {
        in_order(&dependencies(&self.modules)?, names)
    }
}

/// File that says that a folder of the cache is whole.
const COMPLETE: &str = "complete";
const PACKAGE: &str = "linux-image-cloud-amd64";

fn download(cache: &Path, root: &Path) -> Result<()> {
    let fresh = cache.join("kernel.new");
    for folder in [&fresh, root] {
        if folder.exists() {
            fs::remove_dir_all(folder).context("clear the guest cache")?;
        }
    }
    fs::create_dir(&fresh).context("create the guest cache")?;
    let attempt = || -> Result<()> {
        let depends = command::run(&format!("apt-cache depends --important {PACKAGE}"))?;
        let image = depends
            .lines()
            .filter_map(|line| line.trim().strip_prefix("Depends: "))
            .find(|name| name.starts_with("linux-image-"))
            .with_context(|| format!("apt knows no package {PACKAGE}"))?;
        command::output_of(
            Command::new("apt-get")
                .args(["-q", "-o", "APT::Sandbox::User=root", "download", image])
                .current_dir(&fresh),
        )?;
        Ok(())
    };
    if attempt().is_err() {
        // The package lists are missing or too old.
        command::run("apt-get -q update")?;
        attempt()?;
    }
    let package = only_entry(&fresh)?;
    command::output_of(Command::new("dpkg").arg("-x").arg(&package).arg(&fresh))?;
    fs::remove_file(&package).context("remove the kernel's package")?;
    let modules = only_entry(&fresh.join("lib/modules"))?;
    write_dependencies(&fresh, &modules)?;
    fs::rename(&fresh, root).context("complete the guest cache")
}

/// Has busybox write `modules.dep`, which Debian's package leaves to its installation.
fn write_dependencies(root: &Path, modules: &Path) -> Result<()> {
    let version = modules.file_name().context("modules without a version")?;
    command::output_of(
        Command::new("busybox")
            .arg("depmod")
            .arg("-b")
            .arg(root)
            .arg(version),
    )?;
    let file = modules.join("modules.dep");
    ensure!(file.exists(), "depmod didn't write {}", file.display());
    Ok(())
}

/// What each module needs, by path, from `modules.dep`.
pub(super) fn dependencies(modules: &Path) -> Result<BTreeMap<PathBuf, Vec<PathBuf>>> {
    let file = modules.join("modules.dep");
    let text = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    Ok(lines
        .map(|(module, needed)| {
            let needed = needed.split_whitespace().map(|path| modules.join(path));
            (modules.join(module), needed.collect())
        })
        .collect())
}

/// Paths of these modules and of all that they need, in the order to load them.
pub(super) fn in_order(
    dependencies: &BTreeMap<PathBuf, Vec<PathBuf>>,
    names: &[&str],
) -> Result<Vec<PathBuf>> {
    let mut ordered = Vec::new();
    let mut seen = BTreeSet::new();
    for name in names {
        let path = dependencies
            .keys()
            .find(|path| path.file_stem().is_some_and(|stem| stem == *name))
            .with_context(|| format!("the kernel has no module {name}"))?;
        visit(dependencies, path, &mut seen, &mut ordered);
    }
    Ok(ordered)
}

fn visit(
    dependencies: &BTreeMap<PathBuf, Vec<PathBuf>>,
    path: &Path,
    seen: &mut BTreeSet<PathBuf>,
    ordered: &mut Vec<PathBuf>,
) {
    if !seen.insert(path.to_owned()) {
        return;
    }
    for needed in dependencies.get(path).into_iter().flatten() {
        visit(dependencies, needed, seen, ordered);
    }
    ordered.push(path.to_owned());
}

fn only_entry(folder: &Path) -> Result<PathBuf> {
    let mut entries = fs::read_dir(folder)
        .with_context(|| format!("list {}", folder.display()))?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<Vec<_>, _>>()?;
    ensure!(
        entries.len() == 1,
        "{} holds {} entries instead of one",
        folder.display(),
        entries.len()
    );
    Ok(entries.remove(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_come_after_what_they_need() {
        let path = |name: &str| PathBuf::from(format!("/m/{name}.ko"));
        let dependencies = BTreeMap::from([
            (path("net"), vec![path("core"), path("ring")]),
            (path("ring"), vec![path("core")]),
            (path("core"), vec![]),
        ]);
        let ordered = in_order(&dependencies, &["net", "core"]).unwrap();
        assert_eq!(ordered, [path("core"), path("ring"), path("net")]);
        in_order(&dependencies, &["absent"]).unwrap_err();
    }
}

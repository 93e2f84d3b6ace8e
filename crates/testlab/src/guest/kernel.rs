//! Kernels of QEMU guests: Debian's cloud kernels, fetched with `apt-get download` and unpacked into
//! the cache, with nothing installed.
//!
//! [`Kernel::fetch`] takes the one of the machine's own sources; [`Kernel::fetch_series`] another, from
//! a suite beside the machine's own: same mirror, its lists kept in the cache, the machine's sources
//! untouched. A lab has no way to the world, so a kernel is fetched before one is made.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, anyhow, ensure};

use super::{apt::Apt, cache_folder, lock_cache};
use crate::command;

/// A series of kernels that the product must work on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Series {
    /// Linux 6.1: the oldest; no TCX.
    Linux6_1,
    /// Linux 6.12: TCX, but neither 6.16's checksum flag nor later look-up flags.
    Linux6_12,
}

impl Series {
    /// As it begins the kernel's version.
    #[must_use]
    pub fn version(self) -> &'static str {
        match self {
            Self::Linux6_1 => "6.1",
            Self::Linux6_12 => "6.12",
        }
    }

    /// Debian's suites that have it, the first that delivers counts.
    fn suites(self) -> &'static [&'static str] {
        match self {
            Self::Linux6_1 => &["bookworm"],
            Self::Linux6_12 => &["bookworm-backports", "trixie"],
        }
    }
}

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
        let _lock = lock_cache(&cache, "kernel")?;
        let root = cache.join("kernel");
        if !root.join(COMPLETE).exists() {
            download(&Apt::own(), PACKAGE, &cache, &root)
                .context("fetch a kernel for QEMU guests")?;
        }
        Self::unpacked(&root)
    }

    /// A kernel of this series; fetches it first if there is none.
    ///
    /// # Errors
    /// If apt can't deliver it from the machine's own mirror.
    pub fn fetch_series(series: Series) -> Result<Self> {
        let own = Self::fetch()?;
        if own.is_of(series) {
            return Ok(own);
        }
        let cache = cache_folder()?;
        let _lock = lock_cache(&cache, "kernel")?;
        let root = cache.join(format!("kernel-{}", series.version()));
        if !root.join(COMPLETE).exists() {
            let attempts = series.suites().iter().map(|suite| {
                let apt = Apt::of_suite(&cache, suite)?;
                download(&apt, PACKAGE, &cache, &root)
                    .with_context(|| format!("ask the suite {suite}"))
            });
            first_success(attempts)
                .with_context(|| format!("fetch a kernel of the series {}", series.version()))?;
        }
        let kernel = Self::unpacked(&root)?;
        ensure!(
            kernel.is_of(series),
            "Debian's kernel is {} now, not of the series {}",
            kernel.version(),
            series.version()
        );
        Ok(kernel)
    }

    /// The kernel for 64-bit ARM of the machine's own release; fetches it first if there is none.
    ///
    /// # Errors
    /// If apt can't deliver it.
    pub(super) fn fetch_arm() -> Result<Self> {
        let cache = cache_folder()?;
        let _lock = lock_cache(&cache, "kernel")?;
        let root = cache.join("kernel-arm64");
        if !root.join(COMPLETE).exists() {
            download(&Apt::of_arm(&cache)?, ARM_PACKAGE, &cache, &root)
                .context("fetch a kernel for ARM guests")?;
        }
        Self::unpacked(&root)
    }

    /// Its version, as `uname -r` prints it.
    #[must_use]
    pub fn version(&self) -> String {
        let name = self.modules.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    fn is_of(&self, series: Series) -> bool {
        let rest = self
            .version()
            .strip_prefix(series.version())
            .map(str::to_owned);
        rest.is_some_and(|rest| rest.starts_with('.'))
    }

    fn unpacked(root: &Path) -> Result<Self> {
        let modules = only_entry(&root.join("lib/modules"))?;
        let mut kernel = Self {
            image: PathBuf::new(),
            modules,
        };
        kernel.image = root.join(format!("boot/vmlinuz-{}", kernel.version()));
        Ok(kernel)
    }

    /// Paths of these modules and of all that they need, in the order to load them. What this kernel has built
    /// in needs no loading.
    ///
    /// # Errors
    /// If there is no such module.
    pub fn modules_for(&self, names: &[&str]) -> Result<Vec<PathBuf>> {
        let file = self.modules.join("modules.builtin");
        let text = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
        let built_in: BTreeSet<_> = text
            .lines()
            .filter_map(|line| Path::new(line).file_stem())
            .collect();
        let names: Vec<&str> = names
            .iter()
            .copied()
            .filter(|name| !built_in.contains(OsStr::new(name)))
            .collect();
        in_order(&dependencies(&self.modules)?, &names)
    }
}

/// File that says that a folder of the cache is whole.
const COMPLETE: &str = "complete";
const PACKAGE: &str = "linux-image-cloud-amd64";
const ARM_PACKAGE: &str = "linux-image-cloud-arm64";

fn first_success<T>(attempts: impl Iterator<Item = Result<T>>) -> Result<T> {
    let mut last = anyhow!("nobody was asked");
    for attempt in attempts {
        match attempt {
            Ok(value) => return Ok(value),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn download(apt: &Apt, package: &str, cache: &Path, root: &Path) -> Result<()> {
    let fresh = cache.join("kernel.new");
    for folder in [&fresh, root] {
        if folder.exists() {
            fs::remove_dir_all(folder).context("clear the guest cache")?;
        }
    }
    fs::create_dir(&fresh).context("create the guest cache")?;
    apt.with_lists(|| {
        let depends =
            command::output_of(
                apt.command("apt-cache")
                    .args(["depends", "--important", package]),
            )?;
        let image = depends
            .lines()
            .filter_map(|line| line.trim().strip_prefix("Depends: "))
            .find(|name| name.starts_with("linux-image-"))
            .with_context(|| format!("apt knows no package {package}"))?;
        let mut download = apt.command("apt-get");
        download.args(["download", image]).current_dir(&fresh);
        command::output_of(&mut download)?;
        Ok(())
    })?;
    let package = only_entry(&fresh)?;
    command::output_of(Command::new("dpkg").arg("-x").arg(&package).arg(&fresh))?;
    fs::remove_file(&package).context("remove the kernel's package")?;
    move_out_of_usr(&fresh)?;
    // busybox neither lists nor loads packed modules.
    command::shell(&format!(
        "find '{}' -name '*.ko.xz' -print0 | xargs -0 -r xz -d",
        fresh.display()
    ))?;
    let modules = only_entry(&fresh.join("lib/modules"))?;
    write_dependencies(&fresh, &modules)?;
    File::create(fresh.join(COMPLETE)).context("complete the guest cache")?;
    fs::rename(&fresh, root).context("complete the guest cache")
}

/// Modules are below `lib`; since Debian 13 the package has them below `usr/lib`.
fn move_out_of_usr(root: &Path) -> Result<()> {
    let (merged, plain) = (root.join("usr/lib"), root.join("lib"));
    if merged.join("modules").exists() {
        fs::rename(&merged, &plain).with_context(|| format!("move {}", merged.display()))?;
    }
    Ok(())
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
    fn modules_are_found_in_packages_of_any_debian() {
        for folder in ["lib/modules", "usr/lib/modules"] {
            let root = tempfile::tempdir().unwrap();
            fs::create_dir_all(root.path().join(folder).join("6.12")).unwrap();
            move_out_of_usr(root.path()).unwrap();
            let kernel = Kernel::unpacked(root.path()).unwrap();
            assert_eq!(kernel.version(), "6.12");
            assert!(kernel.modules.exists());
        }
    }

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

//! Puts the plugin where runtimes look for it, and a network configuration.

use std::{
    env, fs, io,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
};

use crate::{PLUGIN_NAME, error::InstallError};

/// Name of the example in the folder of networks. Runtimes take the first one by name that they can read.
const EXAMPLE_NAME: &str = "10-sandwire.conflist";
/// The example, as in the manifests.
const EXAMPLE: &str = include_str!("../../../packaging/cni/10-sandwire.conflist");

/// Where to put what.
#[derive(Clone, Debug)]
pub struct Install {
    /// Folder of plugins.
    pub bin_dir: PathBuf,
    /// Folder of network configurations.
    pub conf_dir: PathBuf,
    /// Whether to copy the executable instead of linking to it: into a folder of another root file system.
    pub copy: bool,
    /// A network configuration to put there under its own name, instead of the example.
    pub conflist: Option<PathBuf>,
}

/// What was put where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installed {
    /// The plugin.
    pub plugin: PathBuf,
    /// The executable that it is a link to, or a copy of.
    pub executable: PathBuf,
    /// Whether the plugin was there already, and as it should be.
    pub plugin_was_there: bool,
    /// The network configuration.
    pub conflist: PathBuf,
    /// What was done about it.
    pub placed: Placed,
}

/// What was done about the network configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placed {
    /// The example was written.
    Example,
    /// A file of the example's name was there, and stays as it is.
    Kept,
    /// The one that was given is there now, whatever was there before.
    Given,
}

/// Installs the running executable as a plugin. What is there already is replaced if it is the plugin or the
/// network configuration that was given, and kept if the example has its name.
///
/// # Errors
/// Names the file. What was done before stays.
pub fn install(wanted: &Install) -> Result<Installed, InstallError> {
    let executable = env::current_exe().map_err(at("find", Path::new("/proc/self/exe")))?;
    for folder in [&wanted.bin_dir, &wanted.conf_dir] {
        fs::create_dir_all(folder).map_err(at("make the folder", folder))?;
    }
    let plugin = wanted.bin_dir.join(PLUGIN_NAME);
    let plugin_was_there = !wanted.copy && fs::read_link(&plugin).is_ok_and(|to| to == executable);
    if !plugin_was_there {
        place(wanted, &executable, &plugin)?;
    }
    let (conflist, placed) = match &wanted.conflist {
        Some(given) => (put_given(wanted, given)?, Placed::Given),
        None => put_example(wanted)?,
    };
    Ok(Installed {
        plugin,
        executable,
        plugin_was_there,
        conflist,
        placed,
    })
}

fn put_example(wanted: &Install) -> Result<(PathBuf, Placed), InstallError> {
    let conflist = wanted.conf_dir.join(EXAMPLE_NAME);
    let created = fs::File::create_new(&conflist)
        .and_then(|mut file| io::Write::write_all(&mut file, EXAMPLE.as_bytes()));
    match created {
        Ok(()) => Ok((conflist, Placed::Example)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok((conflist, Placed::Kept)),
        Err(source) => Err(at("write", &conflist)(source)),
    }
}

fn put_given(wanted: &Install, given: &Path) -> Result<PathBuf, InstallError> {
    let name = given
        .file_name()
        .ok_or(io::ErrorKind::InvalidFilename.into());
    let name = name.map_err(at("read", given))?;
    let text = fs::read(given).map_err(at("read", given))?;
    let conflist = wanted.conf_dir.join(name);
    let fresh = fresh(&wanted.conf_dir);
    fs::write(&fresh, text)
        .and_then(|()| fs::rename(&fresh, &conflist))
        .map_err(|source| {
            // The first error says it all.
            let _ = fs::remove_file(&fresh);
            at("write", &conflist)(source)
        })?;
    Ok(conflist)
}

/// A name that nobody looks at, of what gets another one when it is whole.
fn fresh(folder: &Path) -> PathBuf {
    folder.join(format!(".{PLUGIN_NAME}.{}", std::process::id()))
}

/// Under another name first: whoever starts the plugin finds the old one or the new one.
fn place(wanted: &Install, executable: &Path, plugin: &Path) -> Result<(), InstallError> {
    let fresh = wanted
        .bin_dir
        .join(format!(".{PLUGIN_NAME}.{}", std::process::id()));
    let made = if wanted.copy {
        fs::copy(executable, &fresh)
            .and_then(|_| fs::set_permissions(&fresh, fs::Permissions::from_mode(0o755)))
    } else {
        symlink(executable, &fresh)
    };
    made.and_then(|()| fs::rename(&fresh, plugin))
        .map_err(|source| {
            // The first error says it all.
            let _ = fs::remove_file(&fresh);
            at("put the plugin at", plugin)(source)
        })
}

fn at(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> InstallError {
    let path = path.to_owned();
    move |source| InstallError {
        operation,
        path,
        source,
    }
}

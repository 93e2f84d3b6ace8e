//! Puts the plugin where runtimes look for it, and a network configuration.

use std::{
    env, fs,
    io::{self, Write},
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
    // Before anything is written: a folder that can't be written to may have one, too.
    if fs::symlink_metadata(&conflist).is_ok() {
        return Ok((conflist, Placed::Kept));
    }
    // Unlike a rename, a link never takes the place of a file.
    let put = put_whole(
        &wanted.conf_dir,
        |fresh| write(fresh, EXAMPLE.as_bytes()),
        |fresh| {
            let linked = fs::hard_link(fresh, &conflist);
            let _ = fs::remove_file(fresh);
            linked
        },
    );
    match put {
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
    put_whole(
        &wanted.conf_dir,
        |fresh| write(fresh, &text),
        |fresh| fs::rename(fresh, &conflist),
    )
    .map_err(at("write", &conflist))?;
    Ok(conflist)
}

fn place(wanted: &Install, executable: &Path, plugin: &Path) -> Result<(), InstallError> {
    let make = |fresh: &Path| match wanted.copy {
        true => copy(executable, fresh),
        false => symlink(executable, fresh),
    };
    put_whole(&wanted.bin_dir, make, |fresh| fs::rename(fresh, plugin))
        .map_err(at("put the plugin at", plugin))
}

/// Makes a file under a name that nobody looks at, and has it settle under its own one when it is whole and on its disk:
/// who starts a plugin or reads a network finds the old one or the new one, also after a crash.
fn put_whole(
    folder: &Path,
    make: impl FnOnce(&Path) -> io::Result<()>,
    settle: impl FnOnce(&Path) -> io::Result<()>,
) -> io::Result<()> {
    let fresh = folder.join(format!(".{PLUGIN_NAME}.{}", std::process::id()));
    // In a container the number may be that of one that was killed.
    let _ = fs::remove_file(&fresh);
    let put = make(&fresh).and_then(|()| settle(&fresh));
    match put {
        // Not every file system can have a folder written down.
        Ok(()) => drop(fs::File::open(folder).and_then(|folder| folder.sync_all())),
        // The first error says it all.
        Err(_) => drop(fs::remove_file(&fresh)),
    }
    put
}

fn write(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut file = fs::File::create_new(path)?;
    file.write_all(text)?;
    file.sync_all()
}

fn copy(executable: &Path, path: &Path) -> io::Result<()> {
    fs::copy(executable, path)?;
    let file = fs::File::open(path)?;
    file.set_permissions(fs::Permissions::from_mode(0o755))?;
    file.sync_all()
}

fn at(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> InstallError {
    let path = path.to_owned();
    move |source| InstallError {
        operation,
        path,
        source,
    }
}

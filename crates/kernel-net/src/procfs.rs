//! A procfs of our own, for the few settings that only `/proc/sys/net` has.
//!
//! In the ordinary `/proc` the entries of all namespaces share hash chains, since they have the same
//! parent and name; with thousands of namespaces each lookup walks thousands of entries. A private
//! instance that is thrown away now and then keeps the chains short. It shows the settings of the
//! namespace that the calling thread is in, like every procfs.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::fd::OwnedFd,
};

use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
    mount::{FsMountFlags, FsOpenFlags, MountAttrFlags},
};

use crate::{Error, capability::Required};

/// Capabilities for a private procfs.
pub const REQUIRED_CAPABILITIES: Required = Required {
    operations: "procfs",
    capabilities: &["CAP_SYS_ADMIN", "CAP_NET_ADMIN"],
    reason: "mount a private procfs, write network settings of a namespace",
};

/// Settings opened before the instance is renewed.
const USES_MAX: u32 = 100;

/// A procfs that is mounted nowhere.
#[derive(Debug)]
pub struct PrivateProcfs {
    root: OwnedFd,
    uses: u32,
}

impl PrivateProcfs {
    /// Makes one.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn new() -> Result<Self, Error> {
        Ok(Self {
            root: mount().map_err(|errno| Error::system("mount", "private procfs", errno))?,
            uses: 0,
        })
    }

    /// Writes a setting of the calling thread's namespace, by its path below `/proc/sys`.
    ///
    /// # Errors
    /// There is no such setting, or the kernel refuses the value.
    pub fn write(&mut self, setting: &str, value: &str) -> Result<(), Error> {
        let failed = |source| Error::system("write", format!("setting {setting}"), source);
        let mut file = self.open(setting, OFlags::WRONLY).map_err(failed)?;
        file.write_all(value.as_bytes()).map_err(failed)
    }

    /// Reads a setting of the calling thread's namespace, without its closing newline.
    ///
    /// # Errors
    /// There is no such setting.
    pub fn read(&mut self, setting: &str) -> Result<String, Error> {
        let failed = |source| Error::system("read", format!("setting {setting}"), source);
        let mut file = self.open(setting, OFlags::RDONLY).map_err(failed)?;
        let mut value = String::new();
        file.read_to_string(&mut value).map_err(failed)?;
        Ok(value.trim_end().to_owned())
    }

    fn open(&mut self, setting: &str, flags: OFlags) -> io::Result<File> {
        if self.uses >= USES_MAX {
            self.root = mount()?;
            self.uses = 0;
        }
        self.uses += 1;
        let path = format!("sys/{setting}");
        let file = rustix::fs::openat(&self.root, path, flags | OFlags::CLOEXEC, Mode::empty())?;
        Ok(file.into())
    }
}

fn mount() -> Result<OwnedFd, Errno> {
    let context = rustix::mount::fsopen("proc", FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    rustix::mount::fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}

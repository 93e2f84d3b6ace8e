//! Real containers by podman with its CNI back end, crun and conmon underneath, in a lab.
//!
//! Images are not needed: each container runs on one folder with a static busybox. Storage, configuration and state are in the
//! lab's own folder. Containers get no cgroups, and the lab's `/sys/fs/cgroup` is hidden by an empty folder, so that none of the
//! machine's can be touched.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use anyhow::{Context, Result, ensure};
use rustix::mount::{MountFlags, mount};
use serde_json::Value;

use crate::{command, lab::Lab};

/// Programs of busybox that containers find on their PATH.
const APPLETS: [&str; 10] = [
    "cat", "echo", "httpd", "ip", "nc", "ping", "printf", "sh", "sleep", "true",
];
/// `get ADDRESS PORT SECONDS`: an HTTP answer with its head. Not wget, since a static glibc's getservbyname, which it calls,
/// crashes without its libraries.
const GET: &str = "#!/bin/sh\nprintf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w \"$3\" \"$1\" \"$2\"\n";
/// Where Debian has the reference plugins.
pub const REFERENCE_PLUGINS: &str = "/usr/lib/cni";

/// podman in a lab. Its containers end with the lab.
#[derive(Debug)]
pub struct Podman {
    folder: PathBuf,
}

impl Podman {
    /// Prepares a folder of the lab for it, with an empty one for networks.
    ///
    /// # Errors
    /// If busybox isn't there, or something can't be written or mounted.
    pub fn prepare(lab: &Lab) -> Result<Self> {
        let folder = lab.folder().join("podman");
        let podman = Self { folder };
        for below in ["networks", "plugins", "rootfs/bin", "rootfs/www"] {
            fs::create_dir_all(podman.folder.join(below))?;
        }
        for below in ["proc", "sys", "dev", "etc", "tmp", "run"] {
            fs::create_dir_all(podman.rootfs().join(below))?;
        }
        let busybox = command::find("busybox").context("busybox isn't there")?;
        fs::copy(busybox, podman.rootfs().join("bin/busybox")).context("copy busybox")?;
        for applet in APPLETS {
            symlink("busybox", podman.rootfs().join("bin").join(applet))?;
        }
        let get = podman.rootfs().join("bin/get");
        fs::write(&get, GET)?;
        fs::set_permissions(&get, fs::Permissions::from_mode(0o755))?;
        if Path::new("/sys/fs/cgroup").is_dir() {
            let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
            mount("none", "/sys/fs/cgroup", "tmpfs", flags, None).context("hide the cgroups")?;
        }
        podman.write_configuration()?;
        Ok(podman)
    }

    fn write_configuration(&self) -> Result<()> {
        let containers = format!(
            "[network]\nnetwork_backend = \"cni\"\nnetwork_config_dir = {:?}\n\
             cni_plugin_dirs = [{:?}, {REFERENCE_PLUGINS:?}]\n\
             [engine]\nruntime = \"crun\"\ncgroup_manager = \"cgroupfs\"\nevents_logger = \"none\"\n\
             [containers]\ncgroups = \"disabled\"\nlog_driver = \"none\"\n",
            self.networks(),
            self.plugins(),
        );
        let storage = format!(
            "[storage]\ndriver = \"vfs\"\ngraphroot = {:?}\nrunroot = {:?}\n",
            self.folder.join("graph"),
            self.folder.join("run"),
        );
        fs::write(self.folder.join("containers.conf"), containers)?;
        fs::write(self.folder.join("storage.conf"), storage)?;
        Ok(())
    }

    /// Folder of network configurations.
    #[must_use]
    pub fn networks(&self) -> PathBuf {
        self.folder.join("networks")
    }

    /// Folder of plugins that are found before the reference ones.
    #[must_use]
    pub fn plugins(&self) -> PathBuf {
        self.folder.join("plugins")
    }

    /// The containers' root.
    #[must_use]
    pub fn rootfs(&self) -> PathBuf {
        self.folder.join("rootfs")
    }

    /// A podman command, ready to run.
    #[must_use]
    pub fn command(&self, line: &str) -> Command {
        let mut command = Command::new("podman");
        command
            .arg("--root")
            .arg(self.folder.join("graph"))
            .arg("--runroot")
            .arg(self.folder.join("run"))
            .arg("--tmpdir")
            .arg(self.folder.join("tmp"))
            .args(["--storage-driver", "vfs"])
            .args(line.split_whitespace())
            .env("CONTAINERS_CONF", self.folder.join("containers.conf"))
            .env("CONTAINERS_STORAGE_CONF", self.folder.join("storage.conf"))
            .env("TMPDIR", &self.folder)
            .env_remove("XDG_RUNTIME_DIR")
            .stdin(Stdio::null());
        command
    }

    /// Runs a podman command and returns what it did.
    ///
    /// # Errors
    /// If it can't be started.
    pub fn output(&self, line: &str) -> Result<Output> {
        self.command(line)
            .output()
            .with_context(|| format!("start 'podman {line}'"))
    }

    /// Runs a podman command that must succeed; returns its standard output.
    ///
    /// # Errors
    /// If it ends with a status other than 0; the error then holds what it said.
    pub fn run(&self, line: &str) -> Result<String> {
        let output = self.output(line)?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success(),
            "'podman {line}' failed ({}): {}",
            output.status,
            said.trim()
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Starts a container in the background; `flags` are podman's, `program` what it runs.
    ///
    /// # Errors
    /// If that fails.
    pub fn start(&self, name: &str, flags: &str, program: &str) -> Result<()> {
        let rootfs = self.rootfs().display().to_string();
        let line = format!(
            "run -d --name {name} {flags} --cgroups=disabled --security-opt seccomp=unconfined \
             --no-hosts --rootfs {rootfs} {program}"
        );
        self.run(&line).map(drop)
    }

    /// The networks of a container, as `podman inspect` shows them.
    ///
    /// # Errors
    /// If there is no such container.
    pub fn networks_of(&self, name: &str) -> Result<Value> {
        let text = self.run(&format!("inspect {name}"))?;
        let document: Value = serde_json::from_str(&text).context("read 'podman inspect'")?;
        Ok(document[0]["NetworkSettings"]["Networks"].clone())
    }
}

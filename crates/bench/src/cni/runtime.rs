//! What a container runtime does of CNI: namespaces, and plugins started as the specification says.

use std::{
    env,
    io::Write,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
};

use anyhow::{Context, Result, ensure};
use sandwire_api::name::Name;
use serde_json::json;

use crate::private_host;

/// Case of the reference plugin.
pub(super) const BRIDGE: &str = "bridge";
/// Where distributions and the project itself put the reference plugins.
const PLUGIN_FOLDERS: [&str; 3] = ["/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni"];

/// Namespaces of containers. They go with it.
pub(super) struct Containers {
    names: Vec<String>,
}

impl Containers {
    /// Makes so many namespaces.
    pub(super) fn create(case: &str, count: u32) -> Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let mut containers = Self { names: Vec::new() };
        for _ in 0..count {
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let name = format!("container-{case}-{number}");
            private_host::run("ip", &["netns", "add", &name])?;
            containers.names.push(name);
        }
        Ok(containers)
    }
}

impl Drop for Containers {
    fn drop(&mut self) {
        // Whatever this leaves ends with the namespaces of the benchmark.
        for name in &self.names {
            let _ = private_host::run("ip", &["netns", "delete", name]);
        }
    }
}

/// A plugin with its configuration.
pub(super) struct Plugin {
    executable: PathBuf,
    folder: PathBuf,
    config: String,
}

impl Plugin {
    /// This executable under the plugin's name.
    pub(super) fn ours(folder: &Path, pool: &Name) -> Result<Self> {
        let executable = folder.join("sandwire-cni");
        if !executable.exists() {
            let own = env::current_exe().context("cannot find this executable")?;
            symlink(own, &executable).context("cannot link to this executable")?;
        }
        let config = json!({
            "cniVersion": "1.0.0",
            "name": format!("net-{pool}"),
            "type": "sandwire-cni",
            "pool": pool,
            "socket": folder.join("sandwire.sock"),
        });
        Ok(Self {
            executable,
            folder: folder.to_owned(),
            config: config.to_string(),
        })
    }

    /// The reference plugin with addresses from a range; or why it can't be run.
    pub(super) fn bridge(folder: &Path) -> Result<Self, String> {
        let mut folders = PLUGIN_FOLDERS.iter().map(Path::new);
        let found = folders
            .find(|folder| folder.join("bridge").is_file() && folder.join("host-local").is_file());
        let found = found.ok_or("Debian's package containernetworking-plugins is not installed")?;
        let config = json!({
            "cniVersion": "1.0.0",
            "name": "net-bridge",
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": true,
            "ipam": {
                "type": "host-local",
                "dataDir": folder.join("host-local"),
                "ranges": [[{ "subnet": "10.66.0.0/16" }]],
                "routes": [{ "dst": "0.0.0.0/0" }],
            },
        });
        Ok(Self {
            executable: found.join("bridge"),
            folder: found.to_owned(),
            config: config.to_string(),
        })
    }

    /// Adds a container to the network.
    pub(super) fn add(&self, containers: &Containers, number: u32) -> Result<()> {
        self.run("ADD", containers, number)
    }

    /// Deletes it from there.
    pub(super) fn del(&self, containers: &Containers, number: u32) -> Result<()> {
        self.run("DEL", containers, number)
    }

    fn run(&self, verb: &str, containers: &Containers, number: u32) -> Result<()> {
        let name = &containers.names[number as usize];
        let mut child = Command::new(&self.executable)
            .env_clear()
            .env("PATH", env::var_os("PATH").unwrap_or_default())
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", name)
            .env("CNI_NETNS", Path::new("/run/netns").join(name))
            .env("CNI_IFNAME", "eth0")
            .env("CNI_PATH", &self.folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", self.executable.display()))?;
        let mut input = child.stdin.take().context("a pipe was asked for")?;
        input.write_all(self.config.as_bytes())?;
        drop(input);
        let output = child.wait_with_output().context("cannot wait")?;
        ensure!(
            output.status.success(),
            "{verb} of {name} failed: {}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(())
    }
}

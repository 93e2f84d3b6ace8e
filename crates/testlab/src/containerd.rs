//! Pods by containerd, as a kubelet asks it for them: through its runtime interface (CRI), runc underneath, in a lab.
//!
//! A pod is its sandbox alone, the process that holds its namespaces: what has a network is that, whatever runs beside it. Its image is
//! a static busybox. Storage, configuration and state are in the lab's own folder; cgroups are below one that nobody else has.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::{
    cgroup::Cgroup,
    command::{self, Process},
    lab::Lab,
};

/// The interpreter that Debian's package of gRPC is for.
const PYTHON: &str = "/usr/bin/python3";
const CRI: &str = include_str!("containerd/cri.py");
const IMAGE: &str = "localhost/pause:1";
const START_PATIENCE: Duration = Duration::from_secs(60);
/// Moves into its own cgroup, which is then the root of all that it sees, and becomes containerd.
const START: &str = r#"echo $$ > "$0/cgroup.procs" && exec unshare --cgroup --mount --propagation unchanged \
  sh -c 'mount -t cgroup2 none /sys/fs/cgroup && exec containerd --config "$0"' "$1""#;

/// containerd in a lab. Its pods end with it.
#[derive(Debug)]
pub struct Containerd {
    folder: PathBuf,
    // In this order: who is in the cgroup ends before it.
    _process: Process,
    cgroup: Cgroup,
}

/// A pod's addresses, and the process that holds its namespaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Its addresses, the first one first.
    pub ips: Vec<String>,
    /// That process, as the lab knows it.
    pub pid: u32,
}

impl Containerd {
    /// Starts it with CNI's folders `plugins` and `networks`, and has it know its image.
    ///
    /// # Errors
    /// If it can't be started, or doesn't answer; the error then holds its log.
    pub fn start(lab: &Lab, plugins: &Path, networks: &Path) -> Result<Self> {
        let folder = lab.folder().join("containerd");
        fs::create_dir(&folder)?;
        let config = folder.join("config.toml");
        fs::write(&config, configuration(&folder, plugins, networks))?;
        let image = image(&folder).context("make an image")?;
        let cgroup = Cgroup::create()?;
        let log = fs::File::create(folder.join("log"))?;
        let process = Command::new("sh")
            .args(["-c", START, cgroup.path()])
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .context("start containerd")?;
        let containerd = Self {
            folder,
            _process: Process(process),
            cgroup,
        };
        containerd
            .import(&image)
            .with_context(|| format!("containerd says: {}", containerd.log()))?;
        Ok(containerd)
    }

    fn import(&self, image: &Path) -> Result<()> {
        let socket = self.socket();
        let deadline = Instant::now() + START_PATIENCE;
        let line = format!("ctr --address {} version", socket.display());
        while let Err(error) = command::run(&line) {
            ensure!(Instant::now() < deadline, "it doesn't answer: {error:#}");
            thread::sleep(Duration::from_millis(50));
        }
        command::run(&format!(
            "ctr --address {} --namespace k8s.io images import {}",
            socket.display(),
            image.display()
        ))
        .map(drop)
    }

    fn socket(&self) -> PathBuf {
        self.folder.join("containerd.sock")
    }

    /// What it has said so far.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }

    fn call(&self, words: &[&str]) -> Result<Value> {
        let mut command = Command::new(PYTHON);
        command.args(["-c", CRI]).arg(self.socket()).args(words);
        let said = command::output_of(&mut command)?;
        serde_json::from_str(&said).with_context(|| format!("read the answer {said}"))
    }

    /// Starts a pod; its number. `more` are ports of the host and the pod, `HOST:POD`, and annotations, `NAME=VALUE`.
    ///
    /// # Errors
    /// What containerd says, with what the plugin said.
    pub fn run_pod(&self, name: &str, more: &[&str]) -> Result<String> {
        let logs = self.folder.join("logs");
        let mut words = vec!["run", name, logs.to_str().context("the path is no text")?];
        words.extend(more);
        let answer = self.call(&words)?;
        let number = answer["id"].as_str().context("a pod without a number")?;
        Ok(number.to_owned())
    }

    /// What is known of a pod.
    ///
    /// # Errors
    /// What containerd says.
    pub fn pod(&self, number: &str) -> Result<Pod> {
        let answer = self.call(&["status", number])?;
        let ips = answer["ips"].as_array().into_iter().flatten();
        let pid = answer["pid"].as_u64().context("a pod without a process")?;
        Ok(Pod {
            ips: ips
                .filter_map(|ip| ip.as_str())
                .map(str::to_owned)
                .collect(),
            pid: u32::try_from(pid)?,
        })
    }

    /// The numbers of all pods, of those that couldn't be started or ended as well.
    ///
    /// # Errors
    /// What containerd says.
    pub fn pods(&self) -> Result<Vec<String>> {
        let answer = self.call(&["pods"])?;
        let pods = answer.as_array().into_iter().flatten();
        Ok(pods.filter_map(Value::as_str).map(str::to_owned).collect())
    }

    /// Ends a pod's process and takes its network away, as often as one likes.
    ///
    /// # Errors
    /// What containerd says, with what the plugin said.
    pub fn stop_pod(&self, number: &str) -> Result<()> {
        self.call(&["stop", number]).map(drop)
    }

    /// Forgets a pod that has been stopped.
    ///
    /// # Errors
    /// What containerd says.
    pub fn remove_pod(&self, number: &str) -> Result<()> {
        self.call(&["remove", number]).map(drop)
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        let cgroup = Path::new(self.cgroup.path());
        // Pods that the test left, and who looks after them. The cgroup's owner tells of what can't be removed.
        let _ = fs::write(cgroup.join("cgroup.kill"), "1");
        for _ in 0..200 {
            let remove = format!(
                "find {} -mindepth 1 -depth -type d -delete",
                cgroup.display()
            );
            if command::run(&remove).is_ok() {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

fn configuration(folder: &Path, plugins: &Path, networks: &Path) -> String {
    // No cgroups of pods' own: the hierarchy of version 2 may have no controllers.
    format!(
        "version = 2\nroot = {root:?}\nstate = {state:?}\n\
         [grpc]\naddress = {socket:?}\n\
         [plugins.\"io.containerd.grpc.v1.cri\"]\nsandbox_image = {IMAGE:?}\ndisable_cgroup = true\n\
         disable_apparmor = true\nrestrict_oom_score_adj = true\nstream_server_port = \"0\"\n\
         [plugins.\"io.containerd.grpc.v1.cri\".containerd]\nsnapshotter = \"native\"\n\
         [plugins.\"io.containerd.grpc.v1.cri\".cni]\nbin_dir = {plugins:?}\nconf_dir = {networks:?}\n",
        root = folder.join("root"),
        state = folder.join("state"),
        socket = folder.join("containerd.sock"),
    )
}

/// An archive of an image as docker writes them, whose program sleeps.
fn image(folder: &Path) -> Result<PathBuf> {
    let (root, parts) = (folder.join("image"), folder.join("parts"));
    fs::create_dir_all(root.join("bin"))?;
    fs::create_dir(&parts)?;
    let busybox = command::find("busybox").context("busybox isn't there")?;
    fs::copy(busybox, root.join("bin/busybox")).context("copy busybox")?;
    symlink("busybox", root.join("bin/sleep"))?;
    let (layer, archive) = (parts.join("layer.tar"), folder.join("image.tar"));
    command::run(&format!(
        "tar -cf {} -C {} .",
        layer.display(),
        root.display()
    ))?;
    let digest = command::run(&format!("sha256sum {}", layer.display()))?;
    let digest = digest.split(' ').next().unwrap_or_default();
    let config = json!({
        "architecture": if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" },
        "os": "linux",
        "config": { "Entrypoint": ["/bin/sleep", "1000000"] },
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{digest}")] },
    });
    fs::write(parts.join("config.json"), config.to_string())?;
    let manifest =
        json!([{ "Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"] }]);
    fs::write(parts.join("manifest.json"), manifest.to_string())?;
    command::run(&format!(
        "tar -cf {} -C {} .",
        archive.display(),
        parts.display()
    ))?;
    Ok(archive)
}

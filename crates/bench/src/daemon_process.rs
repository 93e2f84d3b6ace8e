//! The daemon under test: this same executable as a child process, spoken to over its API.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use sandwire_api::{
    client::{Blocking, ClientError},
    name::Name,
    pool::{PoolSpec, SlotCounts},
};
use serde_json::json;

use crate::{host, private_host, progress::Step, world};

/// Longest time that any single step of a benchmark may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);
/// Time between two looks at a pool that fills. Slots take milliseconds, and looking costs the
/// daemon time.
const LOOK_INTERVAL: Duration = Duration::from_millis(4);

/// Address families of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Families {
    /// IPv4 alone, as in the recipe.
    V4,
    /// IPv4 and IPv6, as is the default.
    Dual,
}

/// A running daemon. It is killed when dropped.
pub(crate) struct DaemonProcess {
    folder: PathBuf,
    child: Child,
    client: Blocking,
    /// Network namespace that it runs in, if it isn't ours.
    namespace: Option<String>,
    instance: String,
}

impl DaemonProcess {
    /// Starts a daemon without pools whose state is kept in `folder`, and waits until it is ready.
    pub(crate) fn start(folder: &Path) -> Result<Self> {
        Self::start_in(folder, None)
    }

    /// The same in a named network namespace, with an instance name of its own.
    pub(crate) fn start_in(folder: &Path, namespace: Option<&str>) -> Result<Self> {
        Self::start_with(folder, namespace, "")
    }

    /// The same with further lines of configuration.
    pub(crate) fn start_with(
        folder: &Path,
        namespace: Option<&str>,
        settings: &str,
    ) -> Result<Self> {
        let instance = namespace.unwrap_or("bench").replace('_', "-");
        let socket = folder.join("sandwire.sock");
        let config = format!(
            "instance = \"{instance}\"\nstate_dir = {:?}\nsocket = {socket:?}\n{}{settings}",
            folder.join("state"),
            namespace.map_or("", |_| world::DAEMON_SETTINGS),
        );
        fs::write(folder.join("sandwire.toml"), config)
            .context("cannot write the daemon's configuration")?;
        let mut daemon = Self {
            folder: folder.to_path_buf(),
            child: spawn(folder, namespace)?,
            client: Blocking::new(socket).with_timeout(PATIENCE),
            namespace: namespace.map(str::to_owned),
            instance,
        };
        daemon.wait_ready()?;
        Ok(daemon)
    }

    /// Ends the daemon by SIGKILL, as a crash would.
    pub(crate) fn kill(&mut self) -> Result<()> {
        self.child.kill().context("cannot kill the daemon")?;
        self.child.wait().context("cannot wait for the daemon")?;
        Ok(())
    }

    /// Starts it again after [`kill`](Self::kill) and returns how long it took to be ready.
    pub(crate) fn restart(&mut self) -> Result<Duration> {
        let started = Instant::now();
        self.child = spawn(&self.folder, self.namespace.as_deref())?;
        self.wait_ready()?;
        Ok(started.elapsed())
    }

    /// Ends the daemon as a service manager does.
    pub(crate) fn stop(mut self) -> Result<()> {
        kill_process(Pid::from_child(&self.child), Signal::TERM)
            .context("cannot stop the daemon")?;
        let status = self.child.wait().context("cannot wait for the daemon")?;
        if !status.success() {
            bail!("the daemon ended with {status}; its log:\n{}", self.log());
        }
        Ok(())
    }

    /// The name of its instance.
    pub(crate) fn instance(&self) -> &str {
        &self.instance
    }

    /// A client of its own for another thread.
    pub(crate) fn new_client(&self) -> Blocking {
        Blocking::new(self.folder.join("sandwire.sock")).with_timeout(PATIENCE)
    }

    /// Our client.
    pub(crate) fn client(&self) -> &Blocking {
        &self.client
    }

    /// Creates a pool and waits until it is full. Returns for each slot the seconds from the
    /// request until it was seen ready.
    pub(crate) fn fill(&self, spec: &PoolSpec, step: &Step) -> Result<Vec<f64>> {
        let started = Instant::now();
        self.client.create_pool(spec)?;
        let mut ready_at = Vec::new();
        let mut watched = self.client.pool(&spec.name)?;
        loop {
            let seconds = started.elapsed().as_secs_f64();
            let ready = watched.slots.ready;
            ready_at.resize((ready as usize).max(ready_at.len()), seconds);
            step.at(ready);
            if ready >= spec.size {
                return Ok(ready_at);
            }
            if started.elapsed() > PATIENCE {
                bail!(
                    "the pool has {ready} of {} slots after {} s; the daemon's log:\n{}",
                    spec.size,
                    PATIENCE.as_secs(),
                    self.log()
                );
            }
            std::thread::sleep(LOOK_INTERVAL);
            watched = self.client.pool(&spec.name)?;
        }
    }

    /// Has the programs of the kind's data path loaded, which happens once in a daemon's life, by making
    /// and deleting a pool of one slot. Returns the seconds that its first slot took.
    pub(crate) fn warm_up(&self, kind: Kind, step: &Step) -> Result<f64> {
        let spec = pool_of(kind, 1, Families::Dual)?;
        let ready_at = self.fill(&spec, step)?;
        self.delete(&spec.name)?;
        private_host::settle()?;
        Ok(ready_at.last().copied().unwrap_or_default())
    }

    /// Memory that the daemon keeps resident, in KiB.
    pub(crate) fn resident_kibibytes(&self) -> Result<u64> {
        host::resident_kibibytes(self.child.id())
    }

    /// How many of a pool's slots are in which state.
    pub(crate) fn slots(&self, pool: &Name) -> Result<SlotCounts> {
        Ok(self.client.pool(pool)?.slots)
    }

    /// Waits until a pool holds `ready` free slots and is at rest.
    pub(crate) fn wait_full(&self, pool: &Name, ready: u32) -> Result<()> {
        private_host::wait_until("the pool is full", PATIENCE, || {
            let slots = self.slots(pool)?;
            Ok(slots.ready == ready && slots.building == 0)
        })
    }

    /// Deletes a pool and waits until none of its interfaces and namespaces is left. Returns how
    /// long that took.
    pub(crate) fn delete(&self, pool: &Name) -> Result<Duration> {
        let started = Instant::now();
        self.client.delete_pool(pool)?;
        private_host::wait_until("the devices of the pool are gone", PATIENCE, || {
            let looked = Instant::now();
            let interfaces = private_host::interfaces()?;
            let is_slot = |name: &String| name.starts_with("sw") && name.contains('-');
            let is_gone = !interfaces.iter().any(is_slot) && private_host::named_namespaces()? == 0;
            if !is_gone {
                // Looking at thousands of interfaces must not take the time that it measures.
                std::thread::sleep(looked.elapsed() * 4);
            }
            Ok(is_gone)
        })?;
        Ok(started.elapsed())
    }

    fn wait_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let problem = match self.client.health() {
                Ok(health) if health.ready => return Ok(()),
                Ok(health) => format!("{:?}", health.problems),
                Err(error @ ClientError::Decode { .. }) => return Err(error.into()),
                Err(error) => error.to_string(),
            };
            let ended = self.child.try_wait().context("cannot look at the daemon")?;
            if ended.is_some() || Instant::now() > deadline {
                bail!(
                    "the daemon is not ready ({problem}); its log:\n{}",
                    self.log()
                );
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Whether it still runs and what it logged last, for errors.
    pub(crate) fn state(&mut self) -> String {
        let life = match self.child.try_wait() {
            Ok(None) => "runs".to_owned(),
            Ok(Some(status)) => format!("has ended ({status})"),
            Err(error) => format!("cannot be asked: {error}"),
        };
        format!("the daemon {life}; its log:\n{}\n", self.log())
    }

    fn log(&self) -> String {
        let text = fs::read_to_string(self.folder.join("log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }
}

impl Drop for DaemonProcess {
    fn drop(&mut self) {
        // Already ended, or ended here: there is nobody to tell.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(folder: &Path, namespace: Option<&str>) -> Result<Child> {
    let log = File::options()
        .create(true)
        .append(true)
        .open(folder.join("log"))
        .context("cannot write the daemon's log")?;
    let executable = std::env::current_exe().context("cannot find this executable")?;
    let mut command = match namespace {
        Some(namespace) => world::command_in(namespace, &executable.to_string_lossy()),
        None => Command::new(executable),
    };
    command
        .args(["daemon", "--config"])
        .arg(folder.join("sandwire.toml"))
        .env("SANDWIRE_LOG", "warn")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .context("cannot start the daemon")
}

/// Kinds of slots by data path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A namespace, and nftables in it.
    NetnsNft,
    /// A namespace, and programs on its interfaces.
    NetnsEbpf,
    /// A TAP with a program on it.
    HostEbpf,
}

/// A pool for a benchmark: all defaults but its size and families.
pub(crate) fn pool(size: u32, families: Families) -> Result<PoolSpec> {
    pool_of(Kind::NetnsNft, size, families)
}

/// The same of any kind.
pub(crate) fn pool_of(kind: Kind, size: u32, families: Families) -> Result<PoolSpec> {
    let (kind, data_path) = match kind {
        Kind::NetnsNft => ("netns", "nft"),
        Kind::NetnsEbpf => ("netns", "ebpf"),
        Kind::HostEbpf => ("host", "ebpf"),
    };
    let mut spec = json!({
        "name": "bench",
        "kind": kind,
        "data_path": data_path,
        "size": size,
        "addresses": { "plan": "prefix", "ipv4": "10.64.0.0/16", "ipv6": "fd00:c10e::/64" },
    });
    if families == Families::V4 {
        spec["guest"] = json!({ "ipv6": "" });
        spec["addresses"] = json!({ "plan": "prefix", "ipv4": "10.64.0.0/16" });
    }
    serde_json::from_value(spec).context("the benchmark's pool is not a valid one")
}

#[cfg(test)]
mod tests {
    use super::*;
    use sandwire_api::slot::{DataPath, SlotKind};

    #[test]
    fn the_pools_are_valid_and_of_their_families() {
        let v4 = pool(200, Families::V4).unwrap();
        assert_eq!((v4.size, v4.guest.ipv6), (200, None));
        let dual = pool(200, Families::Dual).unwrap();
        assert!(dual.guest.ipv4.is_some() && dual.guest.ipv6.is_some());
        let host = pool_of(Kind::HostEbpf, 200, Families::Dual).unwrap();
        assert_eq!(
            (host.kind, host.data_path),
            (SlotKind::Host, DataPath::Ebpf)
        );
    }
}

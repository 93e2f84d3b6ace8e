//! The built `sandwire` executable: its daemon, killed and restarted at will, and its verbs.
//!
//! Only the executable and its documented interfaces are used, as a user would. A daemon that a test
//! leaves running ends with its [`Daemon`], by SIGKILL; what it made stays for the test's lab to end.

use std::{
    env,
    fs::{self, File},
    net::IpAddr,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::{
    http::{self, Answer},
    suspend::Suspended,
};

/// A daemon in the calling process's namespaces.
#[derive(Debug)]
pub struct Daemon {
    executable: PathBuf,
    folder: PathBuf,
    config: PathBuf,
    child: Option<Child>,
}

impl Daemon {
    /// Writes a configuration into a folder, starts the daemon with it and waits until it is ready.
    /// Socket and state folder are set to be inside the folder, so the configuration must not.
    ///
    /// # Errors
    /// If the daemon ends or isn't ready within [`START_PATIENCE`]; the error then holds its log.
    pub fn start(executable: &Path, folder: &Path, config: &str) -> Result<Self> {
        let mut daemon = Self::prepare(executable, folder, config)?;
        daemon.restart()?;
        Ok(daemon)
    }

    /// Like [`Daemon::start`], without starting it.
    ///
    /// # Errors
    /// If the configuration can't be written.
    pub fn prepare(executable: &Path, folder: &Path, config: &str) -> Result<Self> {
        let daemon = Self {
            executable: executable.to_owned(),
            folder: folder.to_owned(),
            config: folder.join("sandwire.toml"),
            child: None,
        };
        daemon.configure(config)?;
        Ok(daemon)
    }

    /// Writes another configuration, for its next start.
    ///
    /// # Errors
    /// If it can't be written.
    pub fn configure(&self, config: &str) -> Result<()> {
        let text = format!(
            "socket = {:?}\nstate_dir = {:?}\n{config}",
            self.socket(),
            self.state_folder(),
        );
        fs::write(&self.config, text).with_context(|| format!("write {}", self.config.display()))
    }

    /// Starts the daemon again and waits until it is ready. Returns how long that took.
    ///
    /// # Errors
    /// If it ends or isn't ready within [`START_PATIENCE`]; the error then holds its log.
    pub fn restart(&mut self) -> Result<Duration> {
        let started = Instant::now();
        self.spawn()?;
        self.wait_ready(START_PATIENCE)?;
        Ok(started.elapsed())
    }

    /// Starts the daemon without waiting.
    ///
    /// # Errors
    /// If it runs already or can't be started.
    pub fn spawn(&mut self) -> Result<()> {
        ensure!(self.child.is_none(), "the daemon runs already");
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.log_path())
            .context("open the daemon's log")?;
        let child = Command::new(&self.executable)
            .args(["daemon", "--config"])
            .arg(&self.config)
            .env("RUST_BACKTRACE", "1")
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("start {}", self.executable.display()))?;
        self.child = Some(child);
        Ok(())
    }

    /// Waits until `/healthz` answers 200.
    ///
    /// # Errors
    /// If the daemon ends or isn't ready in time; the error then holds its log.
    pub fn wait_ready(&mut self, patience: Duration) -> Result<()> {
        let deadline = Instant::now() + patience;
        let mut last = "no answer yet".to_owned();
        while Instant::now() < deadline {
            let child = self.child.as_mut().context("the daemon doesn't run")?;
            if let Some(status) = child.try_wait().context("look after the daemon")? {
                self.child = None;
                bail!("the daemon ended ({status}); its log:\n{}", self.log());
            }
            match self.http("GET", "/healthz", None) {
                Ok(answer) if answer.status == 200 => return Ok(()),
                Ok(answer) => last = answer.body,
                Err(error) => last = format!("{error:#}"),
            }
            thread::sleep(Duration::from_millis(5));
        }
        bail!(
            "the daemon isn't ready after {patience:?} ({last}); its log:\n{}",
            self.log()
        )
    }

    /// Stops the daemon as Ctrl-Z does, until what is returned is dropped.
    ///
    /// # Errors
    /// If it doesn't run, or doesn't stand within half a minute.
    pub fn suspend(&self) -> Result<Suspended> {
        let child = self.child.as_ref().context("the daemon doesn't run")?;
        Suspended::new(pid_of(child))
    }

    /// Ends the daemon by SIGKILL.
    ///
    /// # Errors
    /// If it doesn't run.
    pub fn kill(&mut self) -> Result<()> {
        let mut child = self.child.take().context("the daemon doesn't run")?;
        child.kill().context("kill the daemon")?;
        let status = child.wait().context("wait for the daemon")?;
        ensure!(
            status.signal() == Some(Signal::KILL.as_raw()),
            "the daemon had ended by itself ({status}); its log:\n{}",
            self.log()
        );
        Ok(())
    }

    /// Ends the daemon by SIGTERM, as a service manager does.
    ///
    /// # Errors
    /// If it doesn't run, or doesn't end within a minute.
    pub fn terminate(&mut self) -> Result<ExitStatus> {
        let mut child = self.child.take().context("the daemon doesn't run")?;
        kill_process(pid_of(&child), Signal::TERM).context("terminate the daemon")?;
        let deadline = Instant::now() + Duration::from_secs(60);
        while Instant::now() < deadline {
            if let Some(status) = child.try_wait().context("wait for the daemon")? {
                return Ok(status);
            }
            thread::sleep(Duration::from_millis(5));
        }
        child.kill().context("kill the daemon")?;
        child.wait().context("wait for the daemon")?;
        bail!("the daemon didn't end on SIGTERM; its log:\n{}", self.log())
    }

    /// Its process number, if it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Its socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.folder.join("sandwire.sock")
    }

    /// Its state folder.
    #[must_use]
    pub fn state_folder(&self) -> PathBuf {
        self.folder.join("state")
    }

    /// What it has logged so far, over all its lives.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_else(|error| format!("(no log: {error})"))
    }

    /// A request to its API.
    ///
    /// # Errors
    /// If there is no answer.
    pub fn http(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Answer> {
        let body = body.map(Value::to_string);
        let patience = Duration::from_secs(30);
        http::request_unix(&self.socket(), method, path, body.as_deref(), patience)
    }

    /// A verb of the command line, ready to run against this daemon.
    #[must_use]
    pub fn command(&self, verb: &str) -> Command {
        let mut command = Command::new(&self.executable);
        command
            .arg("--socket")
            .arg(self.socket())
            .args(verb.split_whitespace());
        command
    }

    /// Runs a verb of the command line, with its arguments in one line, and returns what it did.
    ///
    /// # Errors
    /// If it can't be started.
    pub fn output(&self, verb: &str) -> Result<Output> {
        self.command(verb)
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("start 'sandwire {verb}'"))
    }

    /// Runs a verb of the command line with `--json` and returns its document.
    ///
    /// # Errors
    /// If it fails or doesn't print JSON.
    pub fn json(&self, verb: &str) -> Result<Value> {
        let output = self.output(&format!("--json {verb}"))?;
        let stdout = String::from_utf8_lossy(&output.stdout);
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success(),
            "'sandwire {verb}' failed ({}): {}{stdout}",
            output.status,
            stderr.trim()
        );
        serde_json::from_str(&stdout)
            .with_context(|| format!("'sandwire {verb}' printed no JSON: {stdout}"))
    }

    /// Acquires a slot of a pool by the command line.
    ///
    /// # Errors
    /// If that is refused, or the pool lacks an address family.
    pub fn acquire(&self, pool: &str, name: &str) -> Result<Lease> {
        Lease::read(&self.json(&format!("acquire {pool} {name}"))?)
    }

    /// A request to its API that must succeed; returns the document that comes back.
    ///
    /// # Errors
    /// If it is refused, or no JSON comes back.
    pub fn call(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
        let answer = http::successful(self.http(method, path, body)?)
            .with_context(|| format!("{method} {path}"))?;
        if answer.body.is_empty() {
            return Ok(Value::Null);
        }
        answer.json()
    }

    /// Creates a pool from its specification and waits until all its slots are ready.
    ///
    /// # Errors
    /// If it is refused, or not filled within a minute.
    pub fn create_pool(&self, spec: &Value) -> Result<()> {
        self.call("POST", "/v1/pools", Some(spec))?;
        let name = spec["name"].as_str().context("a pool has a name")?;
        let size = spec["size"].as_u64().unwrap_or(8);
        self.wait_pool(name, size, Duration::from_secs(60))?;
        Ok(())
    }

    /// Gives a lease a policy of its own.
    ///
    /// # Errors
    /// If it is refused.
    pub fn set_policy(&self, lease: &str, policy: &Value) -> Result<()> {
        let path = format!("/v1/leases/{lease}/policy");
        self.call("PUT", &path, Some(policy))?;
        Ok(())
    }

    /// Waits until a pool has this many ready slots. Returns how long that took.
    ///
    /// # Errors
    /// If it hasn't within the given time; the error then holds the pool and the log.
    pub fn wait_pool(&self, pool: &str, ready: u64, patience: Duration) -> Result<Duration> {
        let started = Instant::now();
        loop {
            let answer = self.http("GET", &format!("/v1/pools/{pool}"), None)?;
            let state = answer.json()?;
            if state["slots"]["ready"]
                .as_u64()
                .is_some_and(|count| count >= ready)
            {
                return Ok(started.elapsed());
            }
            if started.elapsed() > patience {
                bail!(
                    "pool {pool} hasn't {ready} ready slots after {patience:?}: {state}\n{}",
                    self.log()
                );
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn log_path(&self) -> PathBuf {
        self.folder.join("daemon.log")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What a VMM needs of a lease in a pool with both address families.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Name of the lease.
    pub name: String,
    /// Name of the slot's namespace; none in host slots.
    pub namespace: Option<String>,
    /// File of the namespace that the TAP is in: the slot's, or that of the calling process.
    pub path: PathBuf,
    /// Name of the TAP.
    pub tap: String,
    /// IPv4 clone address.
    pub ipv4: IpAddr,
    /// IPv6 clone address.
    pub ipv6: IpAddr,
}

impl Lease {
    /// Reads it from the document that `sandwire acquire --json` prints.
    ///
    /// # Errors
    /// If something is missing in it.
    pub fn read(document: &Value) -> Result<Self> {
        let text = |pointer: &str| -> Result<String> {
            let value = document.pointer(pointer).and_then(Value::as_str);
            let value = value.with_context(|| format!("no {pointer} in the lease {document}"))?;
            Ok(value.to_owned())
        };
        let namespace = text("/netns_name").ok();
        let path = match namespace {
            Some(_) => text("/netns")?,
            None => OWN_NAMESPACE.to_owned(),
        };
        Ok(Self {
            name: text("/name")?,
            namespace,
            path: PathBuf::from(path),
            tap: text("/nics/0/tap")?,
            ipv4: text("/nics/0/ipv4/clone_address")?.parse()?,
            ipv6: text("/nics/0/ipv6/clone_address")?.parse()?,
        })
    }
}

/// Where host slots are, as a file.
const OWN_NAMESPACE: &str = "/proc/self/ns/net";

/// The `sandwire` executable that was built with the tests: named by the variable
/// `SANDWIRE_EXECUTABLE`, or beside the folder of the running executable.
///
/// # Errors
/// If there is none.
pub fn executable() -> Result<PathBuf> {
    if let Some(path) = env::var_os("SANDWIRE_EXECUTABLE") {
        return Ok(PathBuf::from(path));
    }
    beside("sandwire")
}

/// The executable without its symbols, a tenth of the size, to be put into a guest. Written into a folder on the way.
///
/// # Errors
/// If there is none, or it can't be written.
pub fn stripped(folder: &Path) -> Result<Vec<u8>> {
    let target = folder.join("sandwire.stripped");
    // binutils come with the C compiler.
    crate::command::run(&format!(
        "strip -o {} {}",
        target.display(),
        executable()?.display()
    ))?;
    fs::read(&target).with_context(|| format!("read {}", target.display()))
}

/// An executable that was built with the tests, beside the folder of the running executable.
pub(crate) fn beside(name: &str) -> Result<PathBuf> {
    let own = env::current_exe().context("find the running executable")?;
    own.ancestors()
        .skip(1)
        .take(2)
        .map(|folder| folder.join(name))
        .find(|path| path.is_file())
        .with_context(|| {
            format!(
                "no executable {name} beside {}: build it by `cargo build --workspace` (sandwire may \
                 be named in SANDWIRE_EXECUTABLE instead)",
                own.display()
            )
        })
}

/// How long a daemon may take until it is ready.
pub const START_PATIENCE: Duration = Duration::from_secs(240);

fn pid_of(child: &Child) -> Pid {
    Pid::from_child(child)
}

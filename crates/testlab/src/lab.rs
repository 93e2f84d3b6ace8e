//! Runs a test in network, mount, PID, IPC and host-name namespaces of its own.
//!
//! A test calls [`run`] with its body as a closure. Outside, `run` starts the test executable once
//! more for this one test, in new namespaces, waits for it, and compares the machine's own network
//! before and after. Inside, `run` mounts what a host has (fresh `/proc` and `/sys`, an empty `/run`
//! with `/run/netns`, empty `/dev/shm` and `/sys/fs/bpf`), brings the loopback up and calls the body. When the body ends or the deadline
//! passes, the kernel ends every process of the PID namespace, and with them all the test made.
//!
//! ```text
//! #[test]
//! #[ignore = "needs root: cargo xtask test netns"]
//! fn an_interface_can_be_created() {
//!     sandwire_testlab::lab::run(|lab| {
//!         lab.run("ip link add sw0 type veth peer name sw1");
//!         assert!(lab.run("ip -o link").contains("sw0"));
//!     });
//! }
//! ```

use std::{
    any::type_name,
    env,
    ffi::CStr,
    fmt::Debug,
    fs,
    io::Read,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use rustix::mount::{MountFlags, mount, mount_bind_recursive, mount_move};

use crate::{
    command,
    guest::{
        kernel::{Kernel, Series},
        machine::{self, Setting},
    },
    namespace::Namespace,
    snapshot::{BPF_FOLDER, Snapshot},
};

/// Longest time that a test may take unless it says otherwise.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// Runs a test in a lab of its own. To be called with a closure, in the test function itself.
///
/// # Panics
/// If the test fails, takes longer than [`DEADLINE`], or changes something of the machine.
pub fn run<F, R>(body: F)
where
    F: FnOnce(&Lab) -> R,
    R: Outcome,
{
    run_within(DEADLINE, body);
}

/// Like [`run`], with another deadline.
///
/// # Panics
/// If the test fails, takes longer than `deadline`, or changes something of the machine.
pub fn run_within<F, R>(deadline: Duration, body: F)
where
    F: FnOnce(&Lab) -> R,
    R: Outcome,
{
    let test = test_of(type_name::<F>());
    if env::var(INSIDE).is_ok_and(|inside| inside == test) {
        let lab = Lab::enter().unwrap_or_else(|error| panic!("set up the lab: {error:#}"));
        body(&lab).expect_success();
        fs::write(
            env::var_os(MARKER).expect("the outer test names its marker"),
            "",
        )
        .expect("the outer test's marker can be written");
        return;
    }
    if let Err(error) = run_in_child(&test, deadline) {
        panic!("{error:#}");
    }
}

/// Like [`run_within`], with the lab in a QEMU guest that runs another kernel. The guest is emulated: what
/// takes a second here takes ten there.
///
/// # Panics
/// If there is no such kernel, the test fails, or it takes longer than `deadline`.
pub fn run_on<F, R>(series: Series, deadline: Duration, body: F)
where
    F: FnOnce(&Lab) -> R,
    R: Outcome,
{
    run_on_with(series, deadline, |_| {}, body);
}

/// Where a guest has the files of [`run_on_with`].
pub const FILES: &str = "/files";

/// Like [`run_on`], with files: what `prepare` puts into the folder that it is given is in [`FILES`] there.
///
/// # Panics
/// As [`run_on`].
pub fn run_on_with<F, R>(series: Series, deadline: Duration, prepare: impl FnOnce(&Path), body: F)
where
    F: FnOnce(&Lab) -> R,
    R: Outcome,
{
    let machine = |test: &str| {
        let files = tempfile::tempdir().context("make a temporary folder")?;
        prepare(files.path());
        run_in_machine(series, test, deadline, files.path(), Setting::default())
    };
    run_by(machine, deadline, body);
}

/// Like [`run_on`], on a machine with one processor, where [`machine::plug_in_processor`] plugs in a second.
///
/// # Panics
/// As [`run_on`].
pub fn run_on_pluggable<F, R>(series: Series, deadline: Duration, body: F)
where
    F: FnOnce(&Lab) -> R,
    R: Outcome,
{
    let setting = Setting {
        spare_processor: true,
        ..Setting::default()
    };
    run_on_machine(series, setting, deadline, body);
}

/// Like [`run_on`], on a machine with two cards of virtio-net, [`machine::CARDS`], and a cable between them.
///
/// # Panics
/// As [`run_on`].
pub fn run_on_with_cards<F, R>(series: Series, deadline: Duration, body: F)
where
    F: FnOnce(&Lab) -> R,
    R: Outcome,
{
    let setting = Setting {
        cards: true,
        ..Setting::default()
    };
    run_on_machine(series, setting, deadline, body);
}

/// Like [`run_on`], with more arguments of the kernel, among them settings (`sysctl.net.core.bpf_jit_harden=2`). New network
/// namespaces have the settings of IPv4 that the machine's first one has.
///
/// # Panics
/// As [`run_on`].
pub fn run_booted<F, R>(series: Series, arguments: &'static str, deadline: Duration, body: F)
where
    F: FnOnce(&Lab) -> R,
    R: Outcome,
{
    let setting = Setting {
        kernel_arguments: arguments,
        ..Setting::default()
    };
    run_on_machine(series, setting, deadline, body);
}

fn run_on_machine<F, R>(series: Series, setting: Setting, deadline: Duration, body: F)
where
    F: FnOnce(&Lab) -> R,
    R: Outcome,
{
    let machine = |test: &str| {
        let none = tempfile::tempdir().context("make a temporary folder")?;
        run_in_machine(series, test, deadline, none.path(), setting)
    };
    run_by(machine, deadline, body);
}

/// Has a machine run the test, or its body if this is that machine.
fn run_by<F, R>(machine: impl FnOnce(&str) -> Result<()>, deadline: Duration, body: F)
where
    F: FnOnce(&Lab) -> R,
    R: Outcome,
{
    let test = test_of(type_name::<F>());
    if env::var(INSIDE).is_ok_and(|inside| inside == test) {
        run_within(deadline, body);
        return;
    }
    if let Err(error) = machine(&test) {
        panic!("{error:#}");
    }
}

/// What the body of a test may return: nothing, or a `Result`.
pub trait Outcome {
    /// Panics if it is an error.
    fn expect_success(self);
}

impl Outcome for () {
    fn expect_success(self) {}
}

impl<E: Debug> Outcome for Result<(), E> {
    fn expect_success(self) {
        if let Err(error) = self {
            panic!("{error:?}");
        }
    }
}

/// The namespaces that a test runs in.
#[derive(Debug)]
pub struct Lab {
    folder: PathBuf,
}

impl Lab {
    /// Turns the fresh namespaces of this process into a small host. [`run`] does it for a test; a
    /// program that was started by [`isolated`] does it itself.
    ///
    /// # Errors
    /// If this process isn't the first of its PID namespace, or something can't be mounted.
    pub fn enter() -> Result<Self> {
        ensure!(
            std::process::id() == 1,
            "a lab must be the first process of its PID namespace"
        );
        mount_sys()?;
        mount_bpf()?;
        mount_tmpfs("/run", c"mode=0755")?;
        // podman has its locks there, by one name for all.
        if Path::new("/dev/shm").is_dir() {
            mount_tmpfs("/dev/shm", c"mode=1777")?;
        }
        let folder = PathBuf::from("/run/lab");
        fs::create_dir(&folder).context("create /run/lab")?;
        // As `ip netns add` leaves it: a shared mount, so that namespaces mounted later are seen
        // in the mount namespaces that `ip netns exec` makes.
        let anchor = Namespace::create("anchor").context("prepare /run/netns")?;
        drop(anchor);
        command::run("ip link set lo up")?;
        Ok(Self { folder })
    }

    /// An empty folder on a tmpfs, gone with the lab.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Runs a line of words and returns its standard output.
    ///
    /// # Panics
    /// If it fails.
    #[track_caller]
    pub fn run(&self, line: &str) -> String {
        command::run(line).unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// Runs a script with `sh -e`.
    ///
    /// # Panics
    /// If it fails.
    #[track_caller]
    pub fn shell(&self, script: &str) -> String {
        command::shell(script).unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// Creates a network namespace under `/run/netns`.
    ///
    /// # Panics
    /// If that fails.
    #[track_caller]
    #[must_use]
    pub fn namespace(&self, name: &str) -> Namespace {
        Namespace::create(name).unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// Interfaces, routes, nftables, named namespaces and mounts of the lab as they are now, once the kernel is done with them.
    ///
    /// # Panics
    /// If `ip` or `nft` fails.
    #[track_caller]
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        Snapshot::take_settled().unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// Wants the lab to be as it was, within a few seconds.
    ///
    /// # Panics
    /// If it isn't; the message lists the differences.
    #[track_caller]
    pub fn assert_unchanged(&self, before: &Snapshot) {
        if let Err(error) = before.wait_unchanged(Duration::from_secs(5)) {
            panic!("{error:#}");
        }
    }
}

fn mount_tmpfs(folder: &str, options: &CStr) -> Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    mount("tmpfs", folder, "tmpfs", flags, Some(options))
        .with_context(|| format!("mount a tmpfs on {folder}"))
}

/// A fresh `/sys` for the new network namespace, keeping the control groups of the machine's.
fn mount_sys() -> Result<()> {
    let cgroups = Path::new("/sys/fs/cgroup");
    let aside = Path::new("/run");
    let keep_cgroups = cgroups.is_dir() && fs::read_dir(cgroups)?.next().is_some();
    if keep_cgroups {
        mount_bind_recursive(cgroups, aside).context("set /sys/fs/cgroup aside")?;
    }
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("sysfs", "/sys", "sysfs", flags, None).context("mount a fresh /sys")?;
    if keep_cgroups {
        mount_move(aside, cgroups).context("bring /sys/fs/cgroup back")?;
    }
    Ok(())
}

/// A BPF file system of the lab's own, so that what a test pins is neither the machine's nor another
/// test's, and ends with the lab. A kernel without BPF has no place for it.
fn mount_bpf() -> Result<()> {
    if !Path::new(BPF_FOLDER).is_dir() {
        return Ok(());
    }
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("bpf", BPF_FOLDER, "bpf", flags, Some(c"mode=0700"))
        .context("mount a file system for BPF objects")
}

/// Starts this executable again for one test, in new namespaces, and watches it.
fn run_in_child(test: &str, deadline: Duration) -> Result<()> {
    command::require_on_path(&["setpriv", "unshare", "ip", "nft"])?;
    let scratch = tempfile::tempdir().context("make a temporary folder")?;
    // Reachable for tests that become another user.
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755))?;
    let marker = scratch.path().join("passed");
    let before = Snapshot::take()?;
    let executable = env::current_exe().context("find the test executable")?;
    let mut command = isolated(&executable);
    command
        .args(["--exact", test, "--include-ignored", "--nocapture"])
        .args(["--test-threads", "1"])
        .env(INSIDE, test)
        .env(MARKER, &marker);
    let ended = watch(&mut command, deadline)?;
    let verdict = match ended.status {
        None => bail!(
            "{test}: not done after {deadline:?}\n--- output of the lab ---\n{}",
            ended.output
        ),
        Some(status) => status,
    };
    ensure!(
        verdict.success() && marker.exists(),
        "{test} failed in its lab ({verdict})\n--- output of the lab ---\n{}",
        ended.output
    );
    before
        .wait_unchanged(Duration::from_secs(10))
        .with_context(|| format!("{test} changed the machine"))
}

/// Has a guest with another kernel run this executable for one test.
#[expect(
    clippy::print_stdout,
    reason = "what a test printed there belongs here"
)]
fn run_in_machine(
    series: Series,
    test: &str,
    deadline: Duration,
    files: &Path,
    setting: Setting,
) -> Result<()> {
    let kernel = Kernel::fetch_series(series)?;
    let scratch = tempfile::tempdir().context("make a temporary folder")?;
    let executable = env::current_exe().context("find the test executable")?;
    let job = machine::Job {
        executable: &executable,
        arguments: &[
            "--exact",
            test,
            "--include-ignored",
            "--nocapture",
            "--test-threads",
            "1",
        ],
        variables: &[(INSIDE, test), (MARKER, "/tmp/passed")],
        files,
        setting,
    };
    let ended = machine::run(&kernel, scratch.path(), &job, deadline)?;
    // As in `run_in_child`, a filter that matches no test would also exit with 0.
    let ran = ended.console.contains("test result: ok. 1 passed");
    ensure!(
        ended.status == Some(0) && ran,
        "{test} failed on Linux {}\n--- console of the guest ---\n{}",
        kernel.version(),
        ended.console
    );
    // The runner shows it if it was asked for the output of tests that pass.
    println!("{}", ended.console);
    Ok(())
}

/// A command that will run a program as the first process of new namespaces. All of it ends when the
/// calling thread does.
#[must_use]
pub fn isolated(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "unshare"])
        .args(["--net", "--mount", "--pid", "--uts", "--ipc"])
        .args(["--propagation", "private", "--mount-proc"])
        .args(["--fork", "--kill-child=KILL", "--"])
        .arg(program);
    command
}

struct Ended {
    /// None if the deadline passed first.
    status: Option<ExitStatus>,
    output: String,
}

fn watch(command: &mut Command, patience: Duration) -> Result<Ended> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("start the lab")?;
    let stdout = child.stdout.take().context("the lab has no output")?;
    let stderr = child.stderr.take().context("the lab has no error output")?;
    let readers = [read_all(stdout), read_all(stderr)];
    let status = wait_until(&mut child, Instant::now() + patience)?;
    if status.is_none() {
        // The first process of the PID namespace dies with `unshare`, everything else with it.
        child.kill().context("end the lab")?;
        child.wait().context("end the lab")?;
    }
    let output = readers
        .into_iter()
        .map(|reader| reader.join().unwrap_or_default())
        .collect();
    Ok(Ended { status, output })
}

fn read_all(mut stream: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // What came before an error is still worth showing.
        let _ = stream.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

fn wait_until(child: &mut Child, deadline: Instant) -> Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = child.try_wait().context("wait for the lab")? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// Name of the test, as the test harness knows it, from the type name of a closure in it.
fn test_of(closure: &str) -> String {
    let path = closure
        .split("::{{closure}}")
        .next()
        .filter(|path| path.len() < closure.len())
        .expect("the body of a lab test must be a closure in the test function");
    let (_crate, test) = path.split_once("::").expect("a test is inside a crate");
    test.to_owned()
}

/// Tells the child which test it is the lab of.
const INSIDE: &str = "SANDWIRE_LAB_TEST";
/// File that the child creates when the body has passed: a filter that matches no test would also
/// exit with 0.
const MARKER: &str = "SANDWIRE_LAB_MARKER";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_test_is_read_off_its_closure() {
        let name = test_of("sandwire_slot::build::tests::a_slot_is_built::{{closure}}");
        assert_eq!(name, "build::tests::a_slot_is_built");
    }

    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn a_lab_has_only_a_loopback() {
        run(|lab| {
            let links = lab.run("ip -o link");
            assert_eq!(links.lines().count(), 1, "{links}");
            assert!(links.contains("lo:") && links.contains("UP"), "{links}");
        });
    }

    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn a_failing_test_fails_with_its_output() {
        if env::var_os(INSIDE).is_some() {
            run(|_| -> () { panic!("the reason") });
        }
        let panic =
            std::panic::catch_unwind(|| run(|_| -> () { panic!("the reason") })).unwrap_err();
        let message = panic.downcast_ref::<String>().unwrap();
        assert!(message.contains("the reason"), "{message}");
    }

    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn a_test_that_never_ends_is_ended_with_its_processes() {
        let mark = "300.0625";
        let patience = Duration::from_secs(1);
        let attempt = || {
            run_within(patience, move |_| {
                // A process that has left its parent and its session.
                Command::new("setsid")
                    .args(["--fork", "sleep", mark])
                    .status()
                    .unwrap();
                thread::sleep(Duration::from_secs(60));
            });
        };
        if env::var_os(INSIDE).is_some() {
            attempt();
        }
        let started = Instant::now();
        std::panic::catch_unwind(attempt).unwrap_err();
        assert!(started.elapsed() < Duration::from_secs(20));
        let left = processes_with(mark);
        assert!(left.is_empty(), "still there: {left:?}");
    }

    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn a_leak_inside_a_lab_is_seen() {
        run(|lab| {
            let before = lab.snapshot();
            lab.run("ip link add left type veth peer name right");
            let differences = before.differences(&lab.snapshot());
            assert!(
                differences.contains("left behind: interface"),
                "{differences}"
            );
            lab.run("ip link delete left");
            lab.assert_unchanged(&before);
        });
    }

    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn a_named_namespace_is_seen_by_ip_netns() {
        run(|lab| {
            let namespace = lab.namespace("beyond");
            assert!(lab.run("ip netns list").contains("beyond"));
            let inside = lab.run("ip netns exec beyond readlink /proc/self/ns/net");
            let ours = fs::read_link("/proc/thread-self/ns/net").unwrap();
            assert_ne!(inside.trim(), ours.to_str().unwrap());
            drop(namespace);
            assert!(!lab.run("ip netns list").contains("beyond"));
        });
    }

    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn what_is_pinned_in_a_lab_is_seen_there_and_nowhere_else() {
        run(|lab| {
            assert!(lab.run("findmnt -n -o FSTYPE /sys/fs/bpf").contains("bpf"));
            let before = lab.snapshot();
            lab.run(
                "bpftool map create /sys/fs/bpf/left type array key 4 value 4 entries 1 name left",
            );
            let differences = before.differences(&lab.snapshot());
            assert!(
                differences.contains("left behind: pinned BPF object left"),
                "{differences}"
            );
        });
        // Left behind on purpose: that it isn't the machine's is what `run` compares last.
    }

    fn processes_with(word: &str) -> Vec<String> {
        let entries = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
        entries
            .filter_map(|entry| fs::read_to_string(entry.path().join("cmdline")).ok())
            .filter(|line| line.split('\0').any(|argument| argument == word))
            .collect()
    }
}

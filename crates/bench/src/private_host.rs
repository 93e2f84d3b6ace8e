//! Namespaces that play a host for a benchmark, so that it touches nothing of the machine.
//!
//! The executable starts itself again as the first process of a PID namespace, with a network and a
//! mount namespace of its own. There `netns 1` is the played host, `/run` is empty, and whatever is
//! left when the benchmark ends, ends with it. What is the machine's nevertheless is in [`leftovers`].

mod leftovers;

use std::{
    env,
    ffi::OsString,
    fs,
    io::{self, Read},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use rustix::{
    mount::{MountFlags, mount},
    process::{Resource, getrlimit, setrlimit},
};

pub(crate) use leftovers::{
    remove_folder_if_interrupted, remove_if_interrupted, status_unless_interrupted,
};

/// Name of the interface by which [`settle`] sees that the kernel has caught up.
const CANARY: &str = "canary0";
/// How long the kernel may take to get rid of what was deleted.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(120);

/// Starts this executable again with the same arguments and `marker`, in namespaces of its own, and
/// waits for it.
pub(crate) fn enter(marker: &str) -> Result<ExitCode> {
    enter_with(&[marker.into()])
}

/// The same with more arguments than a marker.
pub(crate) fn enter_with(more: &[OsString]) -> Result<ExitCode> {
    start(&["--net"], more)
}

/// The same in the machine's network, to fetch something; [`leave_network`] is to follow.
pub(crate) fn enter_but_network(more: &[OsString]) -> Result<ExitCode> {
    start(&[], more)
}

/// Becomes this executable with the same arguments and more, in a network namespace of its own. It is still the first
/// process, and holds the life line.
pub(crate) fn leave_network(more: &[OsString]) -> Result<ExitCode> {
    let executable = env::current_exe().context("cannot find this executable")?;
    let error = Command::new("unshare")
        .args(["--net", "--"])
        .arg(executable)
        .args(env::args_os().skip(1))
        .args(more)
        .exec();
    Err(error).context("cannot start unshare, of the package util-linux")
}

fn start(more_namespaces: &[&str], more: &[OsString]) -> Result<ExitCode> {
    let executable = env::current_exe().context("cannot find this executable")?;
    let mut child = Command::new("unshare")
        .args(more_namespaces)
        .args([
            "--mount",
            "--pid",
            "--fork",
            "--mount-proc",
            "--kill-child",
            "--",
        ])
        .arg(executable)
        .args(env::args_os().skip(1))
        .args(more)
        .env("PATH", search_path())
        .stdin(Stdio::piped())
        .spawn()
        .context("cannot start unshare, of the package util-linux")?;
    // Held open until the end, however it comes: see `end_with_parent`.
    let _life_line = child.stdin.take();
    let status = child.wait().context("cannot wait for unshare")?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(ExitCode::from(code.unwrap_or(2)))
}

/// Where programs are looked for: where a shell does, and where root's own are, which `su` and some scripts leave out.
fn search_path() -> OsString {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    env::join_paths(folders).unwrap_or(path)
}

/// Ends this process, and with it the namespaces and all that runs in them, when the one that
/// [`enter`]ed is gone. As the first process of its namespace it would outlive Ctrl-C otherwise.
pub(crate) fn end_with_parent() {
    thread::spawn(|| {
        let mut nothing = [0; 64];
        // Nobody ever writes: a read returns when the other end closes, or fails.
        while matches!(io::stdin().read(&mut nothing), Ok(length) if length > 0) {}
        leftovers::end_interrupted();
    });
}

/// Gives the namespaces that we are in what a host has: an empty `/run`, its own `/sys`, loopback.
pub(crate) fn furnish() -> Result<()> {
    let nothing = MountFlags::empty();
    mount("run", "/run", "tmpfs", nothing, c"mode=755").context("cannot mount an empty /run")?;
    mount("sysfs", "/sys", "sysfs", nothing, None).context("cannot mount /sys")?;
    mount("bpf", "/sys/fs/bpf", "bpf", nothing, c"mode=700").context("cannot mount /sys/fs/bpf")?;
    fs::create_dir("/run/netns").context("cannot create /run/netns")?;
    // Thousands of TAPs and sockets are open at once.
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).context("cannot raise the limit of open files")?;
    run("ip", &["link", "set", "lo", "up"])
}

/// Waits until the kernel has got rid of all that was deleted before.
///
/// One kernel thread cleans up deleted namespaces, in order and in batches. So once a namespace that
/// was deleted last is gone, and another one that was deleted after that, nothing before is left.
pub(crate) fn settle() -> Result<()> {
    for _ in 0..2 {
        run("ip", &["netns", "add", CANARY])?;
        let peer = ["type", "veth", "peer", "name", "inside", "netns", CANARY];
        run("ip", &[&["link", "add", CANARY], peer.as_slice()].concat())?;
        run("ip", &["netns", "del", CANARY])?;
        wait_until("the kernel cleans up namespaces", SETTLE_TIMEOUT, || {
            Ok(!interfaces()?.iter().any(|name| name == CANARY))
        })?;
    }
    Ok(())
}

/// Names of the interfaces of the played host.
pub(crate) fn interfaces() -> Result<Vec<String>> {
    let text = fs::read_to_string("/proc/net/dev").context("cannot list interfaces")?;
    let names = text.lines().skip(2).filter_map(|line| line.split_once(':'));
    Ok(names.map(|(name, _)| name.trim().to_owned()).collect())
}

/// How many named network namespaces there are.
pub(crate) fn named_namespaces() -> Result<usize> {
    let entries = fs::read_dir(Path::new("/run/netns")).context("cannot list /run/netns")?;
    Ok(entries.count())
}

/// Asks again and again until the answer is yes.
pub(crate) fn wait_until(
    what: &str,
    patience: Duration,
    mut is_so: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let deadline = Instant::now() + patience;
    while !is_so()? {
        if Instant::now() > deadline {
            bail!("waited {} s in vain until {what}", patience.as_secs());
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Runs a command that must succeed.
pub(crate) fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start {program}; `cargo xtask setup` installs it"))?;
    if !output.status.success() {
        bail!(
            "`{program} {}` failed: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}

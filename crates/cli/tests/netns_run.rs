//! `run`, `cleanup` and `doctor` with a daemon and kernel objects of their own.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

use std::{
    fs,
    os::unix::process::CommandExt,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use sandwire_testlab::{
    fake_guest::FakeGuest,
    lab::{self, Lab},
    namespace,
    sandwire::{self, Daemon},
};

const CONFIG: &str = r#"
instance = "running"
[[pool]]
name = "web"
size = 2
addresses = { plan = "prefix", ipv4 = "10.64.0.0/24", ipv6 = "fd00:c10e::/64" }
"#;

fn start(lab: &Lab) -> Daemon {
    let executable = sandwire::executable().unwrap();
    let daemon = Daemon::start(&executable, lab.folder(), CONFIG).unwrap();
    daemon.wait_pool("web", 2, Duration::from_secs(60)).unwrap();
    daemon
}

/// Starts a shell script by `run`, without waiting for it.
fn run_script(daemon: &Daemon, flags: &str, script: &str) -> Child {
    let mut command = daemon.command(&format!("run {flags} --"));
    command.args(["sh", "-c", script]);
    command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Exit status, standard output and standard error of a script that ran to its end.
fn finish(child: Child) -> (i32, String, String) {
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (
        output.status.code().unwrap(),
        text(output.stdout),
        text(output.stderr),
    )
}

fn leases(daemon: &Daemon) -> usize {
    daemon.json("list").unwrap().as_array().unwrap().len()
}

fn wait_until(what: &str, mut happens: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !happens() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_command_runs_inside_its_slot_and_its_end_is_ours() {
    lab::run(|lab| {
        let daemon = start(lab);
        let script =
            "ls /sys/class/net; echo $SANDWIRE_TAP; ip -4 -o addr show dev uplink0; exit 7";
        let (status, stdout, stderr) = finish(run_script(&daemon, "", script));
        assert_eq!(status, 7, "{stderr}");
        let words: Vec<&str> = stdout.split_whitespace().collect();
        assert_eq!(
            words[..4],
            ["lo", "uplink0", "vmtap0", "vmtap0"],
            "{stdout}"
        );
        assert!(stdout.contains("10.64.0."), "{stdout}");
        assert_eq!(leases(&daemon), 0, "the lease was not released");
        let (status, ..) = finish(run_script(&daemon, "--name a1", "kill -KILL $$"));
        assert_eq!(status, 128 + 9);
        assert_eq!(leases(&daemon), 0);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn the_hosts_own_sys_is_left_alone() {
    lab::run(|lab| {
        let daemon = start(lab);
        let mounts = || {
            let all = fs::read_to_string("/proc/self/mountinfo").unwrap();
            let below = |line: &&str| {
                line.split(' ')
                    .nth(4)
                    .is_some_and(|path| path.starts_with("/sys"))
            };
            all.lines()
                .filter(below)
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        let before = mounts();
        assert!(!before.is_empty());
        let (status, ..) = finish(run_script(&daemon, "", "true"));
        assert_eq!((status, mounts()), (0, before));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_signal_to_us_reaches_the_command_once_and_its_status_comes_back() {
    lab::run(|lab| {
        let daemon = start(lab);
        let file = lab.folder().join("signals");
        let shown = file.display();
        let script = format!(
            "trap 'echo usr1 >>{shown}' USR1; trap 'echo term >>{shown}; exit 3' TERM; echo up >{shown}; \
             while :; do sleep 0.05; done"
        );
        let child = run_script(&daemon, "--name a1", &script);
        let read = || fs::read_to_string(&file).unwrap_or_default();
        wait_until("the start", || read() == "up\n");
        lab.run(&format!("kill -USR1 {}", child.id()));
        wait_until("USR1", || read() == "up\nusr1\n");
        lab.run(&format!("kill -TERM {}", child.id()));
        let (status, _, stderr) = finish(child);
        assert_eq!(
            (status, read().as_str()),
            (3, "up\nusr1\nterm\n"),
            "{stderr}"
        );
        assert_eq!(leases(&daemon), 0);
    });
}

/// Whether a process has a say in what SIGTERM does to it.
fn catches_signals(process: u32) -> bool {
    const SIGTERM: u32 = 15;
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let mut masks = status.lines().filter_map(|line| {
        let (name, mask) = line.split_once(":\t")?;
        ["SigBlk", "SigCgt"]
            .contains(&name)
            .then(|| u64::from_str_radix(mask, 16).unwrap())
    });
    masks.any(|mask| mask & (1 << (SIGTERM - 1)) != 0)
}

/// Nothing of what was asked may be carried out once nobody waits for it.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn who_waits_for_a_daemon_that_stands_still_can_be_ended_and_leaves_no_lease() {
    lab::run(|lab| {
        let daemon = start(lab);
        for (signal, flags, expected) in [
            ("INT", "--pool web --name a1", 130),
            ("TERM", "--pool web", 143),
            ("INT", "", 130),
        ] {
            let suspended = daemon.suspend().unwrap();
            let child = run_script(&daemon, flags, "touch /run/lab/has-begun");
            wait_until("it listens to signals", || catches_signals(child.id()));
            thread::sleep(Duration::from_millis(500));
            let asked = Instant::now();
            lab.run(&format!("kill -{signal} {}", child.id()));
            let (status, _, stderr) = finish(child);
            assert_eq!(status, expected, "{flags}: {stderr}");
            assert!(asked.elapsed() < Duration::from_secs(5), "{flags}");
            assert!(stderr.contains("before a slot was there"), "{stderr}");
            drop(suspended);
            thread::sleep(Duration::from_millis(500));
            assert_eq!(leases(&daemon), 0, "{flags}");
        }
        assert!(!lab.folder().join("has-begun").exists());
    });
}

/// As a service manager may leave it to what it starts: no signal says then that the command has ended.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn the_end_of_a_command_is_seen_under_a_parent_that_ignores_its_children() {
    lab::run(|lab| {
        let daemon = start(lab);
        let run = daemon.command("run --name a1 --");
        let mut command = Command::new("env");
        command.arg("--ignore-signal=CHLD").arg(run.get_program());
        command.args(run.get_args());
        command.args(["sh", "-c", "grep SigIgn /proc/self/status; exit 7"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        wait_until("the end", || child.try_wait().unwrap().is_some());
        let (status, stdout, stderr) = finish(child);
        assert_eq!(status, 7, "{stderr}");
        assert_eq!(leases(&daemon), 0, "the lease was not released");
        let ignored = stdout.split_whitespace().last().unwrap();
        let ignored = u64::from_str_radix(ignored, 16).unwrap();
        let child_ended = 1 << (17 - 1);
        assert_eq!(ignored & child_ended, 0, "the command ignores its children");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_command_that_cannot_start_leaves_no_lease() {
    lab::run(|lab| {
        let daemon = start(lab);
        let output = daemon.output("run -- /nonexistent/vmm").unwrap();
        assert_eq!(output.status.code(), Some(127));
        assert_eq!(leases(&daemon), 0);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_lease_that_was_there_before_is_not_taken_for_ours() {
    lab::run(|lab| {
        let daemon = start(lab);
        daemon.json("acquire web a1").unwrap();
        let output = daemon.output("run --name a1 -- true").unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(leases(&daemon), 1, "the lease of another was released");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn without_privileges_run_is_refused_before_anything_is_acquired() {
    lab::run(|lab| {
        let daemon = start(lab);
        let mut command = daemon.command("run -- true");
        let output = command.uid(65_534).gid(65_534).output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert!(message.contains("needs root"), "{message}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_vmm_with_a_tap_of_its_own_is_noticed() {
    lab::run(|lab| {
        let daemon = start(lab);
        // What Firecracker does as root if it is given a name that doesn't exist.
        let script = r#"python3 -c '
import fcntl, os, struct, time
tun = os.open("/dev/net/tun", os.O_RDWR)
fcntl.ioctl(tun, 0x400454ca, struct.pack("16sH22x", b"wrongtap", 0x1002))
time.sleep(8)'"#;
        let (status, _, stderr) = finish(run_script(&daemon, "", script));
        assert_eq!(status, 0, "{stderr}");
        assert!(
            stderr.contains("has TAP wrongtap open, but not the slot's TAP vmtap0"),
            "{stderr}"
        );
        assert_eq!(stderr.matches("warning:").count(), 1, "{stderr}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn cleanup_removes_what_is_ours_and_nothing_else() {
    lab::run(|lab| {
        let before = lab.snapshot();
        lab.run("ip netns add sandwire.runningx.web.0");
        lab.run("ip link add other0 type bridge");
        lab.run("ip link set other0 alias sandwire:runningx");
        lab.run("nft add table inet mine");
        let mut daemon = start(lab);
        let refused = daemon.output("cleanup --instance running").unwrap();
        assert_eq!(refused.status.code(), Some(1), "a daemon runs");
        daemon.kill().unwrap();

        let dry = daemon.json("cleanup --instance running --dry-run").unwrap();
        let found = dry["found"].as_array().unwrap().len();
        assert!(
            found >= 6,
            "two namespaces, two interfaces, the shared one and the table: {dry:#}"
        );
        let done = daemon.json("cleanup --instance running").unwrap();
        assert_eq!(done["removed"].as_array().unwrap().len(), found, "{done:#}");
        let again = daemon.json("cleanup --instance running").unwrap();
        assert_eq!(again["found"], serde_json::json!([]));

        assert!(lab.run("ip netns list").contains("sandwire.runningx.web.0"));
        lab.run("ip netns delete sandwire.runningx.web.0");
        lab.run("ip link delete other0");
        lab.run("nft delete table inet mine");
        lab.assert_unchanged(&before);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn cleanup_keeps_slots_in_use_unless_forced() {
    lab::run(|lab| {
        let mut daemon = start(lab);
        let lease = daemon.json("acquire web a1").unwrap();
        let path = lease["netns"].as_str().unwrap();
        let mut user = namespace::command_in(path.as_ref(), "sleep")
            .arg("60")
            .spawn()
            .unwrap();
        daemon.kill().unwrap();
        let refused = || daemon.output("cleanup --instance running").unwrap();
        wait_until("the refusal", || {
            let output = refused();
            output.status.code() == Some(1)
                && String::from_utf8_lossy(&output.stderr).contains("sleep")
        });
        let forced = daemon.json("cleanup --instance running --force").unwrap();
        assert_eq!(forced["failures"], serde_json::json!([]));
        user.kill().unwrap();
        user.wait().unwrap();
    });
}

/// A VMM that was given its TAP needn't enter the slot's namespace.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn cleanup_keeps_a_slot_whose_tap_is_open_outside_of_it() {
    lab::run(|lab| {
        let mut daemon = start(lab);
        let lease = daemon.json("acquire web a1").unwrap();
        let path = lease["netns"].as_str().unwrap();
        let guest = FakeGuest::attach(path.as_ref(), "vmtap0").unwrap();
        daemon.kill().unwrap();
        let dry = daemon.json("cleanup --instance running --dry-run").unwrap();
        let found = dry["found"].as_array().unwrap();
        let used: Vec<_> = found
            .iter()
            .filter(|object| !object["used_by"].is_null())
            .collect();
        assert_eq!(used.len(), 1, "{dry:#}");
        let name = path.rsplit('/').next().unwrap();
        assert_eq!(used[0]["name"], name);
        assert_eq!(used[0]["used_by"][0]["pid"], std::process::id());
        let refused = daemon.output("cleanup --instance running").unwrap();
        let message = String::from_utf8(refused.stderr).unwrap();
        assert_eq!(refused.status.code(), Some(1), "{message}");
        assert!(message.contains(name), "{message}");
        assert!(fs::exists(path).unwrap());
        guest.detach().unwrap();
        let done = daemon.json("cleanup --instance running").unwrap();
        assert_eq!(done["failures"], serde_json::json!([]));
        assert!(!fs::exists(path).unwrap());
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn the_doctor_names_a_forward_policy_and_leaves_nothing_behind() {
    lab::run(|lab| {
        lab.run("nft add table inet mine");
        lab.shell(
            "nft 'add chain inet mine passing { type filter hook forward priority 0; policy drop; }'",
        );
        let before = lab.snapshot();
        let executable = sandwire::executable().unwrap();
        let output = std::process::Command::new(executable)
            .args(["doctor", "--json"])
            .output()
            .unwrap();
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let obstacles = report["firewall"].as_array().unwrap();
        assert!(
            obstacles
                .iter()
                .any(|found| found["table"] == "mine" && found["chain"] == "passing"),
            "{report:#}"
        );
        assert_eq!(report["works"], true, "{report:#}");
        lab.assert_unchanged(&before);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn the_doctor_tries_what_it_can_without_privileges() {
    lab::run(|_lab| {
        let mut command = std::process::Command::new(sandwire::executable().unwrap());
        let output = command
            .args(["doctor", "--json"])
            .uid(65_534)
            .gid(65_534)
            .output()
            .unwrap();
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let findings = report["findings"].as_array().unwrap();
        let found = |name: &str| {
            let finding = findings.iter().find(|finding| finding["name"] == name);
            finding.unwrap()["found"].clone()
        };
        assert_eq!(found("veth"), true, "{report:#}");
        assert_eq!(found("rights of this process"), false, "{report:#}");
    });
}

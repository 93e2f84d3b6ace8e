//! The daemon's life: stops that don't wait, and starts beside a daemon that runs.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    thread,
    time::{Duration, Instant},
};

use sandwire_testlab::{
    lab::{self, Lab},
    sandwire::{self, Daemon},
};

/// How long a stop may take while something of the kernel's has to be waited for that never comes.
const STOP: Duration = Duration::from_secs(8);

fn config(mtu: u32) -> String {
    format!(
        r#"
instance = "life"
[[pool]]
name = "web"
size = 3
data_path = "nft"
tap = {{ mtu = {mtu} }}
addresses = {{ plan = "prefix", ipv4 = "10.64.0.0/24", ipv6 = "fd00:c10e::/64" }}
"#
    )
}

fn start(lab: &Lab) -> Daemon {
    let executable = sandwire::executable().unwrap();
    let daemon = Daemon::start(&executable, lab.folder(), &config(1500)).unwrap();
    daemon.wait_pool("web", 3, Duration::from_secs(60)).unwrap();
    daemon
}

/// Lets no slot be torn down any more: its file stays.
fn keep_slots(lab: &Lab) {
    lab.run("mount -o remount,bind,ro /run/netns");
}

fn wait_until_slots_go(daemon: &Daemon) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let pool = daemon.call("GET", "/v1/pools/web", None).unwrap();
        if pool["slots"]["tearing_down"].as_u64() > Some(0) {
            return;
        }
        assert!(Instant::now() < deadline, "{pool}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Stops it; it then comes back, and has all its slots again.
fn stops_at_once_and_comes_back(lab: &Lab, daemon: &mut Daemon) {
    let asked = Instant::now();
    assert!(daemon.terminate().unwrap().success());
    let took = asked.elapsed();
    assert!(took < STOP, "the stop took {took:?}:\n{}", daemon.log());
    lab.run("mount -o remount,bind,rw /run/netns");
    daemon.restart().unwrap();
    daemon.wait_pool("web", 3, Duration::from_secs(60)).unwrap();
    daemon.json("acquire web a").unwrap();
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_stop_does_not_wait_for_a_reload() {
    lab::run(|lab| {
        let mut daemon = start(lab);
        keep_slots(lab);
        // Its slots have to be built anew.
        daemon.configure(&config(1400)).unwrap();
        lab.run(&format!("kill -HUP {}", daemon.pid().unwrap()));
        wait_until_slots_go(&daemon);
        stops_at_once_and_comes_back(lab, &mut daemon);
        let pool = daemon.call("GET", "/v1/pools/web", None).unwrap();
        assert_eq!(pool["spec"]["tap"]["mtu"], 1400, "{pool}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_stop_does_not_wait_for_the_pools_of_a_start() {
    lab::run(|lab| {
        let mut daemon = start(lab);
        daemon.terminate().unwrap();
        keep_slots(lab);
        daemon.configure(&config(1400)).unwrap();
        daemon.spawn().unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while !daemon.log().contains("cannot tear a slot down") {
            assert!(Instant::now() < deadline, "{}", daemon.log());
            thread::sleep(Duration::from_millis(10));
        }
        stops_at_once_and_comes_back(lab, &mut daemon);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_stop_does_not_wait_for_a_deletion_and_the_one_who_asked_is_told() {
    lab::run(|lab| {
        let mut daemon = start(lab);
        keep_slots(lab);
        let mut deletion = daemon.command("pool delete web --json");
        let deletion = thread::spawn(move || deletion.output().unwrap());
        wait_until_slots_go(&daemon);
        stops_at_once_and_comes_back(lab, &mut daemon);
        let output = deletion.join().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("is stopping"), "{said}");
    });
}

/// Runs a second daemon that must end by itself.
fn second(lab: &Lab, text: &str) -> Output {
    let config = lab.folder().join("second.toml");
    fs::write(&config, text).unwrap();
    Command::new("timeout")
        .arg("10")
        .arg(sandwire::executable().unwrap())
        .args(["daemon", "--config"])
        .arg(&config)
        .output()
        .unwrap()
}

#[track_caller]
fn assert_refused(output: &Output, word: &str) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains(word), "{stderr}");
}

/// What a slot has in the kernel.
fn slots() -> Vec<PathBuf> {
    let names = fs::read_dir("/run/netns").unwrap();
    let mut names: Vec<PathBuf> = names.map(|entry| entry.unwrap().path()).collect();
    names.retain(|path| path.to_string_lossy().contains("sandwire."));
    names.sort();
    names
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_second_daemon_of_an_instance_is_refused_whatever_its_folders_are() {
    lab::run(|lab| {
        let daemon = start(lab);
        daemon.json("acquire web a").unwrap();
        daemon.wait_pool("web", 3, Duration::from_secs(60)).unwrap();
        let before = slots();
        assert_eq!(before.len(), 4);
        let folder = lab.folder().join("other");
        let text = format!("instance = \"life\"\nstate_dir = {folder:?}\n");
        let output = second(lab, &text);
        assert_refused(&output, "instance 'life'");
        let pid = daemon.pid().unwrap().to_string();
        assert_refused(&output, &pid);
        assert_eq!(slots(), before);
        // Another name is another daemon's.
        let text = format!("instance = \"other\"\nstate_dir = {folder:?}\n");
        let output = second(lab, &text);
        // Ended by `timeout`.
        assert_eq!(output.status.code(), Some(124));
        assert_eq!(slots(), before);
        assert_eq!(daemon.http("GET", "/healthz", None).unwrap().status, 200);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_daemon_whose_socket_is_another_ones_makes_nothing() {
    lab::run(|lab| {
        let daemon = start(lab);
        let before = lab.snapshot();
        let folder = lab.folder().join("other");
        let text = format!(
            "instance = \"other\"\nsocket = {:?}\nstate_dir = {folder:?}\n[[pool]]\nname = \"db\"\n\
             data_path = \"nft\"\naddresses = {{ plan = \"prefix\", ipv4 = \"10.65.0.0/24\", ipv6 = \"fd00:db::/64\" }}",
            daemon.socket()
        );
        assert_refused(&second(lab, &text), "another daemon listens on");
        lab.assert_unchanged(&before);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_refused_daemon_ends_no_service_of_the_one_that_runs() {
    lab::run(|lab| {
        let group = "[vsock]\nenabled = true\n[[vsock.group]]\nname = \"team\"\nuids = [1000]\n";
        let executable = sandwire::executable().unwrap();
        let text = format!("instance = \"life\"\n{group}");
        let daemon = Daemon::start(&executable, lab.folder(), &text).unwrap();
        let service = control_socket(&daemon.state_folder().join("vsock/groups/team"));
        let answers = || std::os::unix::net::UnixStream::connect(&service).is_ok();
        assert!(answers(), "{}", daemon.log());
        for instance in ["life", "other"] {
            let text = format!(
                "instance = \"{instance}\"\nsocket = {:?}\nstate_dir = {:?}\n[vsock]\nenabled = true\n",
                lab.folder().join("second.sock"),
                daemon.state_folder()
            );
            assert_refused(&second(lab, &text), "another daemon");
            assert!(answers(), "{}", daemon.log());
        }
    });
}

fn control_socket(folder: &Path) -> PathBuf {
    folder.join("control.sock")
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn cleanup_beside_a_daemon_is_refused_wherever_its_folders_are() {
    lab::run(|lab| {
        let daemon = start(lab);
        daemon.json("acquire web a").unwrap();
        daemon.wait_pool("web", 3, Duration::from_secs(60)).unwrap();
        let before = slots();
        let cleanup = || {
            Command::new(sandwire::executable().unwrap())
                .args(["cleanup", "--instance", "life"])
                .output()
                .unwrap()
        };
        assert_refused(&cleanup(), "its daemon runs");
        assert_eq!(slots(), before);
        drop(daemon);
        assert!(cleanup().status.success());
        assert_eq!(slots(), [""; 0].map(PathBuf::from));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_uplink_that_is_not_there_is_told_at_the_start() {
    lab::run(|lab| {
        lab.run("ip link add there0 type veth peer name other0");
        let executable = sandwire::executable().unwrap();
        let text = "instance = \"life\"\nuplinks = [\"there0\", \"nope0\"]\n";
        let daemon = Daemon::start(&executable, lab.folder(), text).unwrap();
        let log = daemon.log();
        let told: Vec<_> = log
            .lines()
            .filter(|line| line.contains("`uplinks`"))
            .collect();
        assert_eq!(told.len(), 1, "{log}");
        assert!(
            told[0].contains("WARN") && told[0].contains("nope0"),
            "{log}"
        );
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn cleanup_of_another_instance_leaves_the_one_that_runs_alone() {
    lab::run(|lab| {
        let daemon = start(lab);
        let before = slots();
        let state = daemon.state_folder();
        let cleanup = |rest: &[&str]| {
            Command::new(sandwire::executable().unwrap())
                .args(["cleanup", "--instance", "two"])
                .args(rest)
                .output()
                .unwrap()
        };
        let with_state = ["--state-dir", state.to_str().unwrap()];
        assert_refused(&cleanup(&with_state), "a daemon of another instance");
        assert!(cleanup(&[]).status.success());
        assert_eq!(slots(), before);
        drop(daemon);
        assert_refused(&cleanup(&with_state), "is that of instance 'life'");
        assert!(state.join("journal.sqlite").exists());
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn cleanup_is_not_refused_for_the_daemon_of_another_instance_in_the_usual_folder() {
    lab::run(|_| {
        fs::create_dir_all("/run/sandwire").unwrap();
        let lock = fs::File::create("/run/sandwire/daemon.lock").unwrap();
        lock.lock().unwrap();
        let executable = sandwire::executable().unwrap();
        let cleanup = Command::new(executable)
            .args(["cleanup", "--instance", "two"])
            .output()
            .unwrap();
        assert!(cleanup.status.success(), "{cleanup:?}");
    });
}

//! Identities as a user makes them, by the executable alone.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::{Duration, SystemTime},
};

use sandwire_testlab::{
    lab::{self, Lab},
    sandwire,
};
use serde_json::Value;

const DEADLINE: Duration = Duration::from_secs(600);

/// A cgroup of the test alone, removed at its end.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new() -> Self {
        let beside = Path::new("/sys/fs/cgroup/unified");
        let hierarchy = if beside.is_dir() {
            beside
        } else {
            Path::new("/sys/fs/cgroup")
        };
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let path = hierarchy.join(format!("sandwire-test-{}", now.unwrap().as_nanos()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process that has just ended is in its cgroup for a moment longer.
        for _ in 0..200 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        eprintln!("left over: {}", self.0.display());
    }
}

fn identity(arguments: &[&str]) -> Output {
    let executable = sandwire::executable().unwrap();
    let mut command = Command::new(executable);
    command.arg("identity").args(arguments).output().unwrap()
}

/// The answer of one that must succeed, as JSON.
fn done(arguments: &[&str]) -> Value {
    let output = identity(&[arguments, &["--json"]].concat());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {error}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Standard error of one that must be refused.
fn refused(arguments: &[&str]) -> String {
    let output = identity(arguments);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {error}");
    error
}

/// Which source address a process of the cgroup has towards an address of the host.
fn source(lab: &Lab, cgroup: &Cgroup) -> String {
    let script = format!(
        "echo 0 > {}/cgroup.procs; exec python3 -c 'import socket; s = socket.socket(type=socket.SOCK_DGRAM); \
         s.connect((\"192.0.2.1\", 9)); print(s.getsockname()[0])'",
        cgroup.path()
    );
    lab.shell(&script).trim().to_owned()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_identity_from_add_to_remove() {
    lab::run_within(DEADLINE, |lab| {
        lab.run("ip addr add 192.0.2.1/32 dev lo");
        let cgroup = Cgroup::new();
        assert_eq!(source(lab, &cgroup), "192.0.2.1");
        let name = ["--name", "web"];
        let address = ["--address", "10.77.0.1", "--address", "fd77::1"];
        let added = done(&[&["add", cgroup.path()][..], &name, &address].concat());
        assert_eq!(added["name"], "web");
        assert_eq!(added["loopback"][0], "127.1.0.1");
        assert_eq!(source(lab, &cgroup), "10.77.0.1");
        let listed = done(&["list"]);
        assert_eq!(listed[0]["addresses"][1], "fd77::1");
        let shown = done(&["show", "web"]);
        assert_eq!(shown["state"], "active");
        assert_eq!(shown["cgroup"], cgroup.path());
        let text = identity(&["show", "web"]).stdout;
        assert!(String::from_utf8(text).unwrap().contains("127.1.0.1"));

        let again = refused(&["add", cgroup.path(), "--address", "10.77.0.2"]);
        assert!(again.contains("has an identity already, web"), "{again}");
        let nowhere = refused(&["add", "/nowhere", "--address", "10.77.0.2"]);
        assert!(nowhere.contains("is no cgroup"), "{nowhere}");
        let missing = refused(&["remove", "other"]);
        assert!(missing.contains("sandwire identity list"), "{missing}");

        assert_eq!(done(&["remove", "web"])["name"], "web");
        assert_eq!(done(&["list"]), serde_json::json!([]));
        assert_eq!(source(lab, &cgroup), "192.0.2.1");
    });
}

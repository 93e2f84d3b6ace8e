//! The log of a vsock service that its daemon has started.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

use std::{
    fs::{self, File},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use sandwire_api::vsock::{VsockKind, VsockPolicy};
use sandwire_testlab::sandwire;
use sandwire_vsock_host::{
    address::VmKey,
    control::{Client, VmSpec, control_socket},
    limits::Limits,
};

struct Service(Child);

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts one whose log is that file.
fn start(folder: &Path, log: &Path) -> Service {
    start_as(&sandwire::executable().unwrap(), folder, log)
}

fn start_as(executable: &Path, folder: &Path, log: &Path) -> Service {
    let log = File::options().create(true).append(true).open(log).unwrap();
    let service = Command::new(executable)
        .args(["vsock", "serve", "--detach", "--seccomp", "kill"])
        .arg("--folder")
        .arg(folder)
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn();
    Service(service.unwrap())
}

/// Whoever connects to a channel's sockets is logged, as often as it likes.
#[test]
fn a_long_log_begins_anew_while_the_service_runs() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("service.log");
    fs::write(&path, vec![b'.'; (4 << 20) + 1]).unwrap();
    let _service = start(folder.path(), &path);
    let patience = Instant::now() + Duration::from_secs(30);
    loop {
        let text = fs::read_to_string(&path).unwrap();
        if text.contains("the vsock service is ready") {
            assert!(text.len() < 4096, "{} bytes", text.len());
            return;
        }
        assert!(Instant::now() < patience, "{} bytes", text.len());
        thread::sleep(Duration::from_millis(20));
    }
}

fn until(what: &str, mut happens: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !happens() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Adds a guest; where its VMM connects.
fn add(client: &mut Client, folder: &Path, name: &str) -> PathBuf {
    let folder = folder.join(name);
    fs::create_dir(&folder).unwrap();
    let spec = VmSpec {
        key: VmKey {
            tenant: 1000,
            lease: name.parse().unwrap(),
        },
        kind: VsockKind::VhostUser,
        folder: folder.clone(),
        cid: 3,
        virtual_cid: None,
        policy: VsockPolicy { rules: Vec::new() },
        limits: Limits::default(),
    };
    client.add_vm(spec).unwrap();
    folder.join("vhost.sock")
}

#[test]
fn a_guest_that_comes_and_goes_without_end_leaves_others_their_lines() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("service.log");
    let _service = start(folder.path(), &log);
    let read = || fs::read_to_string(&log).unwrap();
    until("it is ready", || read().contains("is ready"));
    let control = control_socket(folder.path());
    let mut client = Client::connect(&control, Duration::from_secs(10)).unwrap();
    let loud = add(&mut client, folder.path(), "loud");
    let quiet = add(&mut client, folder.path(), "quiet");
    for _ in 0..500 {
        UnixStream::connect(&loud).unwrap();
    }
    UnixStream::connect(&quiet).unwrap();
    until("the other is heard of", || {
        read().contains("the VMM has gone vm=quiet of user 1000")
    });
    let of_loud = read().matches("vm=loud of user 1000").count();
    assert!((1..=50).contains(&of_loud), "{of_loud}");
    until("it is told how many were left out", || {
        UnixStream::connect(&quiet).unwrap();
        thread::sleep(Duration::from_millis(500));
        read()
            .lines()
            .any(|line| line.contains("left_out=") && line.contains("vm=loud of user 1000"))
    });
}

/// Who starts one does so by `/proc/self/exe`, whose name it would have.
#[test]
fn a_service_is_called_by_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("service.log");
    let exe = folder.path().join("exe");
    std::os::unix::fs::symlink(sandwire::executable().unwrap(), &exe).unwrap();
    let service = start_as(&exe, folder.path(), &log);
    let ready = || fs::read_to_string(&log).unwrap().contains("is ready");
    until("it is ready", ready);
    let comm = fs::read_to_string(format!("/proc/{}/comm", service.0.id())).unwrap();
    assert_eq!(comm, "sandwire\n");
}

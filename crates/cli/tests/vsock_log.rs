//! The log of a vsock service that its daemon has started.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

use std::{
    fs::{self, File},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use sandwire_testlab::sandwire;

struct Service(Child);

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Whoever connects to a channel's sockets is logged, as often as it likes.
#[test]
fn a_long_log_begins_anew_while_the_service_runs() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("service.log");
    fs::write(&path, vec![b'.'; (4 << 20) + 1]).unwrap();
    let log = File::options().append(true).open(&path).unwrap();
    let service = Command::new(sandwire::executable().unwrap())
        .args(["vsock", "serve", "--detach", "--seccomp", "kill"])
        .arg("--folder")
        .arg(folder.path())
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn();
    let _service = Service(service.unwrap());
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

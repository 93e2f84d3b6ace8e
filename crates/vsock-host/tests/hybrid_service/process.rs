//! The service as a child process.

use std::{
    collections::BTreeMap,
    env,
    ffi::OsString,
    fs,
    os::unix::{fs::PermissionsExt, net::UnixStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use sandwire_api::vsock::VsockKind;
use sandwire_vsock_host::{
    control::{Client, VmSpec, control_socket},
    limits::Limits,
};

use super::{
    SERVE,
    hybrid::{PATIENCE, key, policy, until},
};

/// A service in a folder of its own; killed at the end.
pub(crate) struct Service {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) process: Child,
}

fn start_in(folder: &Path, change: impl FnOnce(&mut Command)) -> Child {
    let mut command = again(
        "a_folder_that_is_a_file_is_refused_by_name",
        SERVE,
        folder.into(),
    );
    change(&mut command);
    let process = command.spawn().expect("the service's process");
    until("the service answers", || {
        Client::connect(&control_socket(folder), PATIENCE)
            .is_ok_and(|mut client| client.hello().is_ok())
    });
    process
}

/// This executable, for one test, with SIGTERM blocked in all its threads, as the service itself blocks it in
/// the thread that starts the others.
pub(crate) fn again(test: &str, variable: &str, value: OsString) -> Command {
    let mut command = Command::new("env");
    command
        .arg("--block-signal=TERM")
        .arg(env::current_exe().expect("this executable"))
        .args(["--exact", test, "--test-threads=1", "--nocapture"])
        .env(variable, value)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    command
}

impl Service {
    pub(crate) fn start() -> Self {
        Self::start_with(|_| ())
    }

    pub(crate) fn start_with(change: impl FnOnce(&mut Command)) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).expect("its mode");
        let process = start_in(folder.path(), change);
        Self { folder, process }
    }

    pub(crate) fn client(&self) -> Client {
        Client::connect(&control_socket(self.folder.path()), PATIENCE).expect("the control socket")
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A guest whose folder is made.
    pub(crate) fn spec(&self, lease: &str, kind: VsockKind, rules: &[&str]) -> VmSpec {
        let folder = self.path(lease);
        fs::create_dir_all(&folder).expect("the guest's folder");
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).expect("its mode");
        VmSpec {
            key: key(lease),
            kind,
            folder,
            cid: 3,
            virtual_cid: None,
            policy: policy(rules),
            limits: Limits::default(),
        }
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill().expect("SIGKILL");
        self.process.wait().expect("its end");
    }

    pub(crate) fn restart(&mut self) {
        self.process = start_in(self.folder.path(), |_| ());
    }

    pub(crate) fn call(&self, lease: &str, port: u32) -> std::io::Result<UnixStream> {
        let path = self.path(lease).join(format!("vsock.sock_{port}"));
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(stream)
    }

    /// What the kernel says about each thread. The first one is this executable's own, not the service's.
    pub(crate) fn statuses(&self) -> Vec<BTreeMap<String, String>> {
        let path = format!("/proc/{}/task", self.process.id());
        let tasks = fs::read_dir(path).expect("its threads");
        tasks
            .map(|task| task.expect("a thread").path())
            .filter(|task| !task.ends_with(self.process.id().to_string()))
            .map(|task| {
                fs::read_to_string(task.join("status"))
                    .expect("a thread's status")
                    .lines()
                    .filter_map(|line| line.split_once(':'))
                    .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
                    .collect()
            })
            .collect()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

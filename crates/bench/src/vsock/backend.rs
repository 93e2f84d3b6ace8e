//! What is measured: the service as a process of its own, or `vhost-device-vsock` in its place.
//!
//! Both keep to the same convention on the host: a Unix socket per guest for those who call it, and
//! `SOCKET_PORT` beside it for what it calls. So one driver and one host serve for both.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use sandwire_api::vsock::{PortRange, VsockDestination, VsockKind, VsockPolicy, VsockRule};
use sandwire_vsock_guest::{Guest, Settings};
use sandwire_vsock_host::{
    address::VmKey,
    control::{self, Client, VmSpec},
    limits::Limits,
};
use tempfile::TempDir;

use super::role::Role;
use crate::{cpu, private_host};

/// CID of the first guest.
const FIRST_CID: u32 = 3;
/// Ports that lead to sockets of the host.
const PORTS: (u32, u32) = (1000, 60_000);
/// Connections per second that nobody opens.
pub(super) const NO_LIMIT: u32 = 10_000_000;
const PATIENCE: Duration = Duration::from_secs(60);

/// What to start.
#[derive(Clone, Copy, Debug)]
pub(super) enum Program<'a> {
    /// The service of this executable.
    Sandwire {
        /// How long it looks for work before it sleeps.
        busy_poll: Duration,
        /// Bytes that a connection may buffer.
        connection_bytes: u32,
        /// Connections that a guest may open per second.
        connects_per_second: u32,
    },
    /// An executable of `vhost-device-vsock`.
    VhostDevice(&'a Path),
}

impl Program<'_> {
    /// The service as it is by default, and no limit of connections per second: what is measured is how fast it
    /// could be.
    pub(super) fn sandwire() -> Self {
        Program::Sandwire {
            busy_poll: Duration::ZERO,
            connection_bytes: Limits::default().connection_bytes,
            connects_per_second: NO_LIMIT,
        }
    }
}

/// A process with some guests' sockets. It is ended when dropped.
pub(super) struct Backend {
    child: Child,
    /// Each guest's folder.
    vms: Vec<PathBuf>,
    folder: TempDir,
    last_port: u32,
}

impl Backend {
    /// Starts it for `vms` guests, and waits until their sockets are there.
    pub(super) fn start(program: Program<'_>, vms: usize) -> Result<Self> {
        // In memory: no disk should have a say in this.
        let folder = tempfile::tempdir_in("/run").context("cannot make a folder")?;
        let mut folders = Vec::new();
        for vm in 0..vms {
            let path = folder.path().join(vm.to_string());
            fs::create_dir(&path).context("cannot make a guest's folder")?;
            folders.push(path);
        }
        let log = File::create(folder.path().join("log")).context("cannot write a log")?;
        let mut command = match program {
            Program::Sandwire { busy_poll, .. } => serve(folder.path(), busy_poll)?,
            Program::VhostDevice(path) => vhost_device(path, &folders),
        };
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let child = Role::Service.run(|| command.spawn().context("cannot start the service"))?;
        let mut backend = Self {
            child,
            vms: folders,
            folder,
            last_port: PORTS.0,
        };
        if let Program::Sandwire {
            connection_bytes,
            connects_per_second,
            ..
        } = program
        {
            let limits = Limits {
                connection_bytes,
                connects_per_second,
                ..Limits::default()
            };
            let mut client = backend.client()?;
            for (folder, number) in backend.vms.iter().zip(0..) {
                client.add_vm(spec(number, folder, limits.clone())?)?;
            }
        }
        for vm in 0..vms {
            let path = backend.vhost_socket(vm);
            backend.wait_for(&path)?;
        }
        Ok(backend)
    }

    /// Talks to the service, once it listens.
    pub(super) fn client(&mut self) -> Result<Client> {
        let socket = control::control_socket(&self.folder.path().join("service"));
        self.wait_for(&socket)?;
        // The socket's file is there a moment before anybody listens at it.
        let mut client = None;
        private_host::wait_until("the service answers", PATIENCE, || {
            client = Client::connect(&socket, PATIENCE).ok();
            Ok(client.is_some())
        })?;
        client.context("the service doesn't answer")
    }

    fn wait_for(&mut self, path: &Path) -> Result<()> {
        let log = self.folder.path().join("log");
        private_host::wait_until("the service listens", PATIENCE, || {
            if let Some(status) = self
                .child
                .try_wait()
                .context("cannot look at the service")?
            {
                let log = fs::read_to_string(&log).unwrap_or_default();
                bail!("the service has ended ({status}); its log:\n{log}");
            }
            Ok(path.exists())
        })
    }

    /// Where a folder may be made for a further guest.
    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The vhost-user socket of a guest.
    pub(super) fn vhost_socket(&self, vm: usize) -> PathBuf {
        self.vms[vm].join(control::VHOST_SOCKET)
    }

    /// The socket by which the host calls a guest.
    pub(super) fn socket(&self, vm: usize) -> PathBuf {
        self.vms[vm].join(control::STREAM_SOCKET)
    }

    /// The socket that a guest reaches at a port of the host.
    pub(super) fn host_socket(&self, vm: usize, port: u32) -> PathBuf {
        self.vms[vm].join(format!("{}_{port}", control::STREAM_SOCKET))
    }

    /// A port that hasn't been used.
    pub(super) fn new_port(&mut self) -> u32 {
        self.last_port += 1;
        self.last_port
    }

    /// Its process.
    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Processor time of all its threads.
    pub(super) fn time(&self) -> Result<Duration> {
        cpu::process_time(self.pid())
    }

    /// Boots a guest for each socket.
    pub(super) fn boot(&self, settings: &Settings) -> Result<Vec<Guest>> {
        (0..self.vms.len())
            .map(|vm| Ok(Guest::connect(settings, &self.vhost_socket(vm))?))
            .collect()
    }

    /// Its last words, for errors.
    pub(super) fn log(&self) -> String {
        let text = fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(5)..].join("\n")
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        // Asked first, so that nothing of it is left on the disk; then made to.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let has_ended = private_host::wait_until("it ends", Duration::from_secs(5), || {
            Ok(self.child.try_wait()?.is_some())
        });
        if has_ended.is_err() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// What a guest's program asks for by `SO_VM_SOCKETS_BUFFER_SIZE`. It bounds what is on its way to the guest, and
/// with a kernel of 2026 from it too; Linux's default is 256 KiB. The Unix sockets of the limit have up to 4 MiB.
pub(super) const GUEST_BUFFER: u32 = 1 << 20;

/// A guest that reads 4 KiB at a time as Linux does, with as many packets out as fit its queue.
pub(super) fn guest_settings() -> Settings {
    Settings {
        memory: vec![(0, 1 << 20), (1 << 32, 24 << 20)],
        transmit_slots: 256,
        buffer_bytes: GUEST_BUFFER,
        timeout: Duration::from_secs(20),
        ..Settings::default()
    }
}

fn serve(folder: &Path, busy_poll: Duration) -> Result<Command> {
    let executable = std::env::current_exe().context("cannot find this executable")?;
    let mut command = Command::new(executable);
    command
        .args(["vsock", "serve", "--threads", "1", "--busy-poll-us"])
        .arg(busy_poll.as_micros().to_string())
        .arg("--folder")
        .arg(folder.join("service"))
        .env("SANDWIRE_LOG", "warn");
    Ok(command)
}

fn vhost_device(path: &Path, folders: &[PathBuf]) -> Command {
    let mut command = Command::new(path);
    for (folder, cid) in folders.iter().zip(FIRST_CID..) {
        command.arg("--vm").arg(format!(
            "guest-cid={cid},socket={},uds-path={}",
            folder.join(control::VHOST_SOCKET).display(),
            folder.join(control::STREAM_SOCKET).display(),
        ));
    }
    command
}

fn spec(number: u32, folder: &Path, limits: Limits) -> Result<VmSpec> {
    let port = PortRange::new(PORTS.0, PORTS.1).context("no such ports")?;
    let rule = VsockRule {
        port,
        to: VsockDestination::Host,
        identity: false,
    };
    Ok(VmSpec {
        key: key(number)?,
        kind: VsockKind::VhostUser,
        folder: folder.to_owned(),
        cid: FIRST_CID + number,
        virtual_cid: None,
        policy: VsockPolicy { rules: vec![rule] },
        limits,
    })
}

/// The guest of that number.
pub(super) fn key(number: u32) -> Result<VmKey> {
    Ok(VmKey {
        tenant: 0,
        lease: format!("vm-{number}").parse()?,
    })
}

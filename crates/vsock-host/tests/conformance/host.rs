//! A host with guests, in this process.

use std::{
    io::{Read, Write},
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use sandwire_api::{
    name::Name,
    vsock::{
        PortRange, VsockConnection, VsockDestination, VsockPolicy, VsockRefusal, VsockRule,
        VsockTraffic, VsockType,
    },
};
use sandwire_vsock_guest::{Guest, Operation, Settings};
use sandwire_vsock_host::{
    address::VmKey,
    budget::Budget,
    directory::{Directory, Face, Placement},
    hybrid::callee::Callee,
    lifeline::Lifeline,
    limits::Limits,
    listener::{Descriptors, listen_on},
    statistics::VmCounters,
    worker::{self, Command, VmError, VmSetup, WorkerHandle, WorkerSettings},
};
use tempfile::TempDir;

/// How long anything may take before the test fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
/// Tenant of the guests that aren't said to be another's.
pub(crate) const TENANT: u32 = 1000;
/// A port that every policy made by [`to_host`] here has.
pub(crate) const PORT: u32 = 1024;

/// The service's workers and directory.
pub(crate) struct Host {
    folder: TempDir,
    pub(crate) directory: Arc<Directory>,
    pub(crate) budget: Arc<Budget>,
    workers: Vec<(WorkerHandle, Option<JoinHandle<()>>)>,
    vms: usize,
}

/// A guest's place on the host.
pub(crate) struct Vm {
    pub(crate) key: VmKey,
    pub(crate) folder: PathBuf,
    pub(crate) counters: Arc<VmCounters>,
    pub(crate) worker: WorkerHandle,
}

impl Host {
    pub(crate) fn new(workers: usize) -> Self {
        Self::with_settings(workers, &WorkerSettings::default(), 2 << 30)
    }

    pub(crate) fn with_settings(count: usize, settings: &WorkerSettings, bytes: u64) -> Self {
        let directory = Arc::new(Directory::new());
        let budget = Arc::new(Budget::new(bytes));
        let workers = (0..count)
            .map(|index| {
                let (handle, thread) = worker::spawn(
                    index,
                    directory.clone(),
                    budget.clone(),
                    settings.clone(),
                    Lifeline::default(),
                )
                .expect("starting a worker");
                (handle, Some(thread))
            })
            .collect();
        Self {
            folder: tempfile::tempdir().expect("a folder"),
            directory,
            budget,
            workers,
            vms: 0,
        }
    }

    /// A guest with CID 3 that may reach the host's port [`PORT`].
    pub(crate) fn vm(&mut self) -> Vm {
        self.vm_with(Limits::default(), to_host(&[PORT]))
    }

    pub(crate) fn vm_with(&mut self, limits: Limits, policy: VsockPolicy) -> Vm {
        let lease = format!("vm-{}", self.vms);
        self.vm_named(TENANT, &lease, None, limits, policy)
    }

    pub(crate) fn vm_named(
        &mut self,
        tenant: u32,
        lease: &str,
        virtual_cid: Option<u32>,
        limits: Limits,
        policy: VsockPolicy,
    ) -> Vm {
        let key = VmKey {
            tenant,
            lease: name(lease),
        };
        let folder = self.folder.path().join(format!("{tenant}-{lease}"));
        std::fs::create_dir(&folder).expect("a guest's folder");
        let worker = self.workers[self.vms % self.workers.len()].0.clone();
        self.vms += 1;
        let vm = Vm {
            key,
            folder,
            counters: Arc::new(VmCounters::default()),
            worker,
        };
        self.place(&vm, virtual_cid, policy);
        vm.serve(limits);
        vm
    }

    fn place(&self, vm: &Vm, virtual_cid: Option<u32>, policy: VsockPolicy) {
        self.add(Placement {
            key: vm.key.clone(),
            face: Face::Local(vm.worker.clone()),
            cid: 3,
            virtual_cid,
            socket: vm.stream_socket(),
            policy,
        });
    }

    /// A guest whose VMM owns its device; the socket on which that VMM is to listen.
    pub(crate) fn hybrid(&self, lease: &str, virtual_cid: u32) -> PathBuf {
        let socket = self.folder.path().join(format!("{lease}.sock"));
        self.add(Placement {
            key: VmKey {
                tenant: TENANT,
                lease: name(lease),
            },
            face: Face::Hybrid(Arc::new(Callee::new(&Limits::default(), Arc::default()))),
            cid: 3,
            virtual_cid: Some(virtual_cid),
            socket: socket.clone(),
            policy: VsockPolicy::default(),
        });
        socket
    }

    fn add(&self, placement: Placement) {
        self.directory
            .add(placement)
            .expect("adding the guest to the directory");
    }

    /// A guest that was removed is there again, as after a restart of the service.
    pub(crate) fn add_again(&self, vm: &Vm, limits: Limits, policy: VsockPolicy) {
        self.place(vm, None, policy);
        vm.serve(limits);
    }

    /// Removes a guest, as the service does.
    pub(crate) fn remove(&self, vm: &Vm) {
        self.directory.remove(&vm.key);
        let (sender, receiver) = mpsc::sync_channel(1);
        vm.worker.send(Command::RemoveVm(vm.key.clone(), sender));
        receiver.recv_timeout(PATIENCE).expect("removing a guest");
    }

    /// Changes what a guest may reach, as the service does.
    pub(crate) fn set_policy(&self, vm: &Vm, policy: VsockPolicy) {
        self.directory
            .set_policy(&vm.key, policy)
            .expect("the guest is in the directory");
        vm.worker.send(Command::PolicyChanged(vm.key.clone()));
    }

    /// All connections of all workers.
    pub(crate) fn list(&self) -> Vec<VsockConnection> {
        let mut all = Vec::new();
        for (worker, _) in &self.workers {
            let (sender, receiver) = mpsc::sync_channel(1);
            worker.send(Command::List(None, sender));
            all.extend(receiver.recv_timeout(PATIENCE).expect("listing"));
        }
        all
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        for (handle, thread) in &mut self.workers {
            handle.send(Command::Stop);
            let ended = thread.take().map(JoinHandle::join);
            if !std::thread::panicking() {
                assert!(matches!(ended, Some(Ok(()))), "a worker panicked");
            }
        }
    }
}

impl Vm {
    fn serve(&self, limits: Limits) {
        self.ask_to_serve(self.setup(limits))
            .expect("adding a guest");
    }

    /// Its sockets, listening, for whoever is to serve it.
    pub(crate) fn setup(&self, limits: Limits) -> VmSetup {
        let listener = |path: PathBuf, kind, descriptors| {
            listen_on(&path, kind, descriptors).expect("listening on a guest's socket")
        };
        let (taken, refused) = (Descriptors::Taken, Descriptors::Refused);
        VmSetup {
            key: self.key.clone(),
            cid: 3,
            limits,
            vhost_listener: listener(self.vhost_socket(), VsockType::Stream, taken).into(),
            stream_listener: listener(self.stream_socket(), VsockType::Stream, refused),
            seqpacket_listener: listener(self.seqpacket_socket(), VsockType::Seqpacket, refused),
            counters: self.counters.clone(),
        }
    }

    /// Has its worker serve a guest: what that says.
    pub(crate) fn ask_to_serve(&self, setup: VmSetup) -> Result<(), VmError> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.worker.send(Command::AddVm(Box::new(setup), sender));
        receiver
            .recv_timeout(PATIENCE)
            .expect("an answer from the worker")
    }

    pub(crate) fn vhost_socket(&self) -> PathBuf {
        self.folder.join("vhost.sock")
    }

    pub(crate) fn stream_socket(&self) -> PathBuf {
        self.folder.join("vsock.sock")
    }

    pub(crate) fn seqpacket_socket(&self) -> PathBuf {
        self.folder.join("vsock.sock_seqpacket")
    }

    /// Where `to = host` leads for a port.
    pub(crate) fn port_socket(&self, port: u32) -> PathBuf {
        self.folder.join(format!("vsock.sock_{port}"))
    }

    pub(crate) fn boot(&self) -> Guest {
        self.boot_with(&Settings::default())
    }

    pub(crate) fn boot_with(&self, settings: &Settings) -> Guest {
        Guest::connect(settings, &self.vhost_socket()).expect("booting a guest")
    }

    /// The owner of the lease listens for what `to = host` leads to.
    pub(crate) fn service(&self, port: u32) -> UnixListener {
        UnixListener::bind(self.port_socket(port)).expect("listening as a service of the host")
    }

    /// A client of the host that has said `CONNECT port` and not waited.
    pub(crate) fn dial(&self, port: u32) -> UnixStream {
        let mut client = patient(UnixStream::connect(self.stream_socket()).expect("connecting"));
        client
            .write_all(format!("CONNECT {port}\n").as_bytes())
            .expect("the handshake");
        client
    }

    pub(crate) fn traffic(&self) -> VsockTraffic {
        self.counters.snapshot()
    }

    pub(crate) fn refused(&self, reason: VsockRefusal) -> u64 {
        self.traffic().refusals.get(&reason).copied().unwrap_or(0)
    }

    /// Waits until that many connections are left.
    pub(crate) fn wait_for_connections(&self, count: u64) {
        eventually("the number of connections", || {
            self.traffic().connections == count
        });
    }
}

pub(crate) fn name(text: &str) -> Name {
    text.parse().expect("a name")
}

/// A policy that leads these ports to the host.
pub(crate) fn to_host(ports: &[u32]) -> VsockPolicy {
    policy(ports.iter().map(|port| rule(*port, VsockDestination::Host)))
}

pub(crate) fn rule(port: u32, to: VsockDestination) -> VsockRule {
    VsockRule {
        port: PortRange::single(port).expect("a port"),
        to,
        identity: false,
    }
}

pub(crate) fn policy(rules: impl IntoIterator<Item = VsockRule>) -> VsockPolicy {
    VsockPolicy {
        rules: rules.into_iter().collect(),
    }
}

/// Sockets of the host give up when the test would.
pub(crate) fn patient(stream: UnixStream) -> UnixStream {
    stream
        .set_read_timeout(Some(PATIENCE))
        .expect("a time-out to read");
    stream
        .set_write_timeout(Some(PATIENCE))
        .expect("a time-out to write");
    stream
}

pub(crate) fn accept(listener: &UnixListener) -> UnixStream {
    listener.set_nonblocking(true).expect("not to block");
    let mut accepted = None;
    eventually("a connection to the service", || {
        accepted = listener.accept().ok().map(|(stream, _)| stream);
        accepted.is_some()
    });
    let stream = accepted.expect("it was accepted");
    stream.set_nonblocking(false).expect("to block");
    patient(stream)
}

/// Reads up to and with the newline, byte by byte, as clients do.
pub(crate) fn read_line(stream: &mut UnixStream) -> String {
    let mut line = Vec::new();
    let mut byte = [0];
    while line.last() != Some(&b'\n') {
        match stream.read(&mut byte) {
            Ok(0) => break,
            Ok(_) => line.push(byte[0]),
            Err(error) => panic!("no whole line, only {line:?}: {error}"),
        }
    }
    String::from_utf8(line).expect("a line is text")
}

pub(crate) fn read_exact(stream: &mut UnixStream, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    stream.read_exact(&mut bytes).expect("reading");
    bytes
}

/// Held by tests that take much memory, and by those that measure it.
pub(crate) static MUCH_MEMORY: Mutex<()> = Mutex::new(());

#[track_caller]
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "{what}: not in {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The device has done nothing that it may not.
#[track_caller]
pub(crate) fn clean(guest: &Guest) {
    assert!(guest.violations().is_empty(), "{:?}", guest.violations());
}

/// A stream from the guest to the host, with both ends.
pub(crate) fn connected(vm: &Vm, guest: &mut Guest) -> (sandwire_vsock_guest::Socket, UnixStream) {
    let path = vm.port_socket(PORT);
    drop(std::fs::remove_file(&path));
    let listener = vm.service(PORT);
    let socket = guest.open_stream(PORT).expect("connecting to the host");
    (socket, accept(&listener))
}

/// Sends until the peer's socket takes nothing more, nor the device; how much that was.
fn fill(guest: &mut Guest, socket: sandwire_vsock_guest::Socket) -> usize {
    let block = vec![7; 64 * 1024];
    let mut sent = 0;
    loop {
        while guest.socket(socket).credit() != 0 {
            sent += guest.try_send(socket, &block).expect("sending");
            guest.poll();
        }
        // What it has been told meanwhile.
        guest.run_for(Duration::from_millis(5)).expect("running");
        if guest.socket(socket).credit() == 0 {
            return sent;
        }
    }
}

/// A stream that is promised so many bytes, since guest and peer have used what it was promised before.
#[track_caller]
pub(crate) fn use_until(
    bytes: u32,
    guest: &mut Guest,
    socket: sandwire_vsock_guest::Socket,
    peer: &mut UnixStream,
) {
    let mut left = 0;
    eventually("a larger promise", || {
        left += fill(guest, socket);
        peer.set_nonblocking(true).expect("not to block");
        let mut some = vec![0; 1 << 20];
        while let Ok(read) = peer.read(&mut some) {
            left -= read;
        }
        guest.socket(socket).peer_buf_alloc >= bytes
    });
    peer.set_nonblocking(false).expect("to block");
    read_exact(peer, left);
    eventually("all of it", || {
        let request = guest.header(socket, Operation::CreditRequest);
        guest.put(request);
        guest.run_for(Duration::from_millis(5)).expect("running");
        guest.socket(socket).credit() >= bytes
    });
}

/// A guest works: a stream there, bytes both ways, a stream back.
#[track_caller]
pub(crate) fn works(vm: &Vm, guest: &mut Guest) {
    let (socket, mut peer) = connected(vm, guest);
    guest.send(socket, b"ping").expect("sending");
    assert_eq!(read_exact(&mut peer, 4), b"ping");
    peer.write_all(b"pong").expect("writing");
    assert_eq!(guest.receive_exact(socket, 4).expect("receiving"), b"pong");
    guest.close(socket).expect("closing");
}

/// A thread that sends back what it gets, until the end.
pub(crate) fn echo(stream: UnixStream) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let mut reader = stream.try_clone().expect("a second handle");
        let mut writer = stream;
        drop(std::io::copy(&mut reader, &mut writer));
        drop(writer.shutdown(std::net::Shutdown::Write));
    })
}

pub(crate) fn seqpacket_listener(path: &Path) -> OwnedFd {
    listen_on(path, VsockType::Seqpacket, Descriptors::Refused).expect("listening for messages")
}

/// A listener whose backlog is full after one connection.
pub(crate) fn short_listener(path: &Path) -> OwnedFd {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
    drop(std::fs::remove_file(path));
    let listener = socket(AddressFamily::UNIX, SocketType::STREAM, None).expect("a socket");
    bind(&listener, &SocketAddrUnix::new(path).expect("a path")).expect("binding");
    listen(&listener, 0).expect("listening");
    listener
}

/// Connects, unless that would have to wait.
pub(crate) fn connect_now(path: &Path) -> Option<OwnedFd> {
    use rustix::net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with,
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let client =
        socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).expect("a socket");
    connect(&client, &SocketAddrUnix::new(path).expect("a path"))
        .is_ok()
        .then_some(client)
}

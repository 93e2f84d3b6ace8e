//! The service for vsock as its own process, channels in it, and servers on the host that guests call.

use std::{
    fs,
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use sandwire_api::vsock::{PortRange, VsockDestination, VsockPolicy, VsockRule, VsockTraffic};
use sandwire_testlab::{
    lab::Lab,
    sandwire,
    traffic::{Stream, receive_on, send_on},
};
use sandwire_vsock_host::{
    address::VmKey,
    control::{Client, VmSpec, control_socket},
    limits::Limits,
};
use socket2::{Domain, SockAddr, Socket, Type};

pub(crate) const SECOND: Duration = Duration::from_secs(1);
/// The device's name in QEMU.
pub(crate) const DEVICE: &str = "vsock0";
/// What `lab-vsock` serves in each guest.
pub(crate) const GUEST_ECHO: u32 = 7;
pub(crate) const GUEST_MESSAGES: u32 = 8;
pub(crate) const GUEST_HASH: u32 = 9;
pub(crate) const GUEST_COMMANDS: u32 = 11;

/// `sandwire vsock serve`.
pub(crate) struct Service {
    folder: PathBuf,
    child: Child,
}

impl Service {
    pub(crate) fn start(lab: &Lab) -> Self {
        let folder = lab.folder().join("vsock");
        let child = serve(&folder);
        let service = Self { folder, child };
        service.client();
        service
    }

    /// A control connection; waits until the service listens.
    pub(crate) fn client(&self) -> Client {
        let socket = control_socket(&self.folder);
        let deadline = Instant::now() + 10 * SECOND;
        loop {
            match Client::connect(&socket, 10 * SECOND) {
                Ok(client) => return client,
                Err(error) if Instant::now() > deadline => panic!("{error}"),
                Err(_) => thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// Ends it by SIGKILL and starts it anew: nobody tells it of its channels.
    pub(crate) fn kill_and_restart(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.child = serve(&self.folder);
        self.client();
    }

    pub(crate) fn add(&self, name: &str, rules: Vec<VsockRule>) -> Channel {
        let folder = self.folder.join(name);
        fs::create_dir(&folder).unwrap();
        let spec = VmSpec {
            key: key(name),
            kind: sandwire_api::vsock::VsockKind::VhostUser,
            folder: folder.clone(),
            cid: 3,
            virtual_cid: None,
            policy: VsockPolicy { rules },
            limits: Limits::default(),
        };
        self.client().add_vm(spec).unwrap();
        Channel { folder }
    }

    pub(crate) fn traffic(&self, name: &str) -> VsockTraffic {
        let mut answer = self.client().traffic(Some(key(name))).unwrap();
        answer.remove(0).traffic
    }

    /// Waits until a VMM is attached to the channel, or none is.
    pub(crate) fn wait_attached(&self, name: &str, attached: bool) {
        until(&format!("{name} is attached: {attached}"), || {
            self.traffic(name).attached == attached
        });
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn serve(folder: &Path) -> Child {
    Command::new(sandwire::executable().unwrap())
        .args(["vsock", "serve", "--folder"])
        .arg(folder)
        .stdin(Stdio::null())
        .spawn()
        .unwrap()
}

/// All leases here have the same owner.
pub(crate) fn key(name: &str) -> VmKey {
    VmKey {
        tenant: 1000,
        lease: name.parse().unwrap(),
    }
}

/// The sockets of one guest.
pub(crate) struct Channel {
    folder: PathBuf,
}

impl Channel {
    /// The channel of a lease.
    pub(crate) fn in_folder(folder: &Path) -> Self {
        Self {
            folder: folder.to_owned(),
        }
    }

    pub(crate) fn vhost_user_socket(&self) -> PathBuf {
        self.folder.join("vhost.sock")
    }

    /// What QEMU is told. Not `reconnect`: with it QEMU 7.2 doesn't wait until the socket is connected, and
    /// ends.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let socket = self.vhost_user_socket();
        let chardev = format!("socket,id={DEVICE},path={}", socket.display());
        let device = format!("vhost-user-vsock-pci,id={DEVICE}-device,chardev={DEVICE},bus=slot0");
        vec!["-chardev".to_owned(), chardev, "-device".to_owned(), device]
    }

    /// Connects to a port of the guest.
    pub(crate) fn connect(&self, port: u32) -> UnixStream {
        self.try_connect(port).expect("the guest accepts")
    }

    /// Connects to a port of the guest; nothing if the guest doesn't accept.
    pub(crate) fn try_connect(&self, port: u32) -> Option<UnixStream> {
        let mut stream = UnixStream::connect(self.folder.join("vsock.sock")).unwrap();
        stream.set_read_timeout(Some(120 * SECOND)).unwrap();
        stream.set_write_timeout(Some(120 * SECOND)).unwrap();
        writeln!(stream, "CONNECT {port}").unwrap();
        let mut answer = Vec::new();
        while answer.last() != Some(&b'\n') {
            let mut byte = [0];
            stream.read_exact(&mut byte).ok()?;
            answer.push(byte[0]);
        }
        assert!(answer.starts_with(b"OK "), "{answer:?}");
        Some(stream)
    }

    /// Connects to a port of the guest by messages.
    pub(crate) fn connect_seqpacket(&self, port: u32) -> Socket {
        let socket = Socket::new(Domain::UNIX, Type::SEQPACKET, None).unwrap();
        let path = self.folder.join("vsock.sock_seqpacket");
        socket.connect(&SockAddr::unix(path).unwrap()).unwrap();
        socket.set_read_timeout(Some(60 * SECOND)).unwrap();
        socket.send(format!("CONNECT {port}\n").as_bytes()).unwrap();
        let answer = receive(&socket);
        assert!(answer.starts_with(b"OK "), "{answer:?}");
        socket
    }

    /// Sends blocks to the guest, closes that half, and wants the guest to have seen exactly them.
    pub(crate) fn assert_carries_in(&self, blocks: u64) -> Duration {
        let started = Instant::now();
        let mut stream = self.connect(GUEST_HASH);
        let sent = send_on(&mut stream, blocks).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert_eq!(answer.trim(), sent.to_string());
        started.elapsed()
    }
}

/// The next message.
pub(crate) fn receive(mut socket: &Socket) -> Vec<u8> {
    let mut message = vec![0; 512 * 1024];
    let count = socket.read(&mut message).unwrap();
    message.truncate(count);
    message
}

/// A Unix socket on the host, each connection answered by a thread.
pub(crate) fn serve_stream(path: &Path, answer: fn(UnixStream)) {
    let listener = UnixListener::bind(path).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            thread::spawn(move || answer(stream));
        }
    });
}

/// Echoes messages, each as it came.
pub(crate) fn serve_messages(path: &Path) {
    let listener = Socket::new(Domain::UNIX, Type::SEQPACKET, None).unwrap();
    listener.bind(&SockAddr::unix(path).unwrap()).unwrap();
    listener.listen(16).unwrap();
    thread::spawn(move || {
        loop {
            let (socket, _) = listener.accept().unwrap();
            thread::spawn(move || {
                loop {
                    let message = receive(&socket);
                    if message.is_empty() {
                        return;
                    }
                    socket.send(&message).unwrap();
                }
            });
        }
    });
}

/// Answers a stream of blocks, after its end, by its length and hash.
pub(crate) fn answer_hash(mut stream: UnixStream) {
    let received: Stream = receive_on(&mut stream).unwrap();
    writeln!(stream, "{received}").unwrap();
}

/// Sends back whatever comes.
pub(crate) fn echo(mut stream: UnixStream) {
    let mut buffer = vec![0; 65_536];
    while let Ok(count @ 1..) = stream.read(&mut buffer) {
        if stream.write_all(&buffer[..count]).is_err() {
            return;
        }
    }
}

/// A port of CID 2 that leads to a Unix socket of the host.
pub(crate) fn to_unix(port: u32, path: &Path) -> VsockRule {
    rule(
        port,
        VsockDestination::Unix {
            path: path.to_str().unwrap().to_owned(),
        },
    )
}

/// A port of CID 2 that leads to a port of another guest.
pub(crate) fn to_guest(port: u32, lease: &str, at: u32) -> VsockRule {
    rule(
        port,
        VsockDestination::Sandbox {
            lease: lease.parse().unwrap(),
            owner_uid: None,
            port: at,
        },
    )
}

fn rule(port: u32, to: VsockDestination) -> VsockRule {
    VsockRule {
        port: PortRange::single(port).unwrap(),
        to,
        identity: false,
    }
}

#[track_caller]
pub(crate) fn until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + 30 * SECOND;
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

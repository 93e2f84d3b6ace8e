//! What the tests of the hybrid face share: a router with a guest in it, services of the host, and a VMM
//! that speaks its side of the convention.

#![allow(dead_code, reason = "each test file uses its part")]

use std::{
    collections::HashMap,
    io::{self, BufRead, BufReader, Read, Write},
    net::Shutdown,
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use sandwire_api::vsock::{VsockConnection, VsockPolicy};
use sandwire_vsock_host::{
    address::VmKey,
    budget::Budget,
    capture::Sink,
    directory::{Directory, Face, Placement},
    hybrid::{
        callee::Callee,
        router::{self, HybridSetup, RouterCommand, RouterError, RouterHandle},
    },
    lifeline::Lifeline,
    limits::Limits,
    statistics::VmCounters,
};

/// Longest that anything here may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A router of its own in a folder of its own.
pub(crate) struct Lab {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) directory: Arc<Directory>,
    pub(crate) budget: Arc<Budget>,
    pub(crate) router: RouterHandle,
    thread: Option<JoinHandle<()>>,
    counters: HashMap<VmKey, Arc<VmCounters>>,
}

pub(crate) fn key(lease: &str) -> VmKey {
    VmKey {
        tenant: 1000,
        lease: lease.parse().expect("a name"),
    }
}

/// A policy from lines such as `1024 {"kind": "host"}`; a `+` before the port asks for the identity line.
pub(crate) fn policy(rules: &[&str]) -> VsockPolicy {
    let rules: Vec<String> = rules
        .iter()
        .map(|rule| {
            let (port, to) = rule.split_once(' ').expect("a port and a destination");
            let identity = port.starts_with('+');
            let port = port.trim_start_matches('+');
            format!(r#"{{"port": "{port}", "to": {to}, "identity": {identity}}}"#)
        })
        .collect();
    serde_json::from_str(&format!(r#"{{"rules": [{}]}}"#, rules.join(","))).expect("a policy")
}

/// A rule to a Unix socket.
pub(crate) fn to_unix(port: &str, path: &Path) -> String {
    format!(r#"{port} {{"kind": "unix", "path": "{}"}}"#, path.display())
}

impl Lab {
    pub(crate) fn new() -> Self {
        Self::with_total(Limits::default().total_bytes)
    }

    /// With so many bytes for all guests.
    pub(crate) fn with_total(bytes: u64) -> Self {
        let directory = Arc::new(Directory::new());
        let budget = Arc::new(Budget::new(bytes));
        let spawned = router::spawn(directory.clone(), budget.clone(), Lifeline::default());
        let (router, thread) = spawned.expect("a router");
        Self {
            folder: tempfile::tempdir().expect("a folder"),
            directory,
            budget,
            router,
            thread: Some(thread),
            counters: HashMap::new(),
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The VMM's socket of a guest.
    pub(crate) fn socket(&self, lease: &str) -> PathBuf {
        self.path(&format!("{lease}.sock"))
    }

    pub(crate) fn add(&mut self, lease: &str, rules: &[&str]) -> Result<(), RouterError> {
        self.add_with(lease, rules, Limits::default())
    }

    pub(crate) fn add_with(
        &mut self,
        lease: &str,
        rules: &[&str],
        limits: Limits,
    ) -> Result<(), RouterError> {
        let key = key(lease);
        let counters = Arc::new(VmCounters::default());
        let placement = Placement {
            key: key.clone(),
            face: Face::Hybrid(Arc::new(Callee::new(&limits, counters.clone()))),
            cid: 3,
            virtual_cid: None,
            socket: self.socket(lease),
            policy: policy(rules),
        };
        self.directory.add(placement).expect("a place for it");
        self.counters.insert(key.clone(), counters.clone());
        let setup = HybridSetup {
            key,
            cid: 3,
            socket: self.socket(lease),
            place: None,
            limits,
            counters,
        };
        self.ask(|answer| RouterCommand::Add(Box::new(setup), answer))
    }

    pub(crate) fn set_policy(&self, lease: &str, rules: &[&str]) -> Result<(), RouterError> {
        self.ask(|answer| RouterCommand::SetPolicy(key(lease), policy(rules), answer))
    }

    pub(crate) fn remove(&self, lease: &str) {
        self.ask(|answer| RouterCommand::Remove(key(lease), answer));
        self.directory.remove(&key(lease));
    }

    pub(crate) fn capture(&self, lease: &str, sink: Option<Arc<Sink>>) {
        self.router
            .send(RouterCommand::SetCapture(key(lease), sink));
        // Commands are obeyed in order.
        let _ = self.list();
    }

    pub(crate) fn list(&self) -> Vec<VsockConnection> {
        self.ask(|answer| RouterCommand::List(None, answer))
    }

    pub(crate) fn counters(&self, lease: &str) -> &VmCounters {
        &self.counters[&key(lease)]
    }

    fn ask<T>(&self, command: impl FnOnce(SyncSender<T>) -> RouterCommand) -> T {
        let (sender, answer): (_, Receiver<T>) = sync_channel(1);
        self.router.send(command(sender));
        answer.recv_timeout(PATIENCE).expect("the router's answer")
    }

    /// As the VMM does when its guest calls a port.
    pub(crate) fn call(&self, lease: &str, port: u32) -> io::Result<UnixStream> {
        let stream = UnixStream::connect(self.path(&format!("{lease}.sock_{port}")))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(stream)
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.router.send(RouterCommand::Stop);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the router's end");
        }
    }
}

/// A service of the host: each connection gets a thread.
pub(crate) fn serve(path: &Path, each: impl Fn(UnixStream) + Send + Sync + 'static) {
    let listener = UnixListener::bind(path).expect("a service's socket");
    let each = Arc::new(each);
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let each = each.clone();
            thread::spawn(move || each(stream));
        }
    });
}

/// Sends back whatever comes, and ends when the other side does.
pub(crate) fn echo(mut stream: UnixStream) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(length @ 1..) = stream.read(&mut buffer) {
        if stream.write_all(&buffer[..length]).is_err() {
            return;
        }
    }
    let _ = stream.shutdown(Shutdown::Write);
}

/// Reads a line byte by byte, so that nothing after it is taken.
pub(crate) fn read_line(stream: &mut impl Read) -> String {
    let mut line = Vec::new();
    let mut byte = [0];
    while stream.read(&mut byte).expect("reading a line") == 1 {
        line.push(byte[0]);
        if byte == *b"\n" {
            break;
        }
    }
    String::from_utf8(line).expect("text")
}

/// A VMM as far as the host sees it: reads `CONNECT PORT\n`, and if the guest listens there, answers and
/// hands the connection to it.
pub(crate) fn vmm(
    path: &Path,
    port: u32,
    answer: &'static str,
    guest: impl Fn(UnixStream) + Send + Sync + 'static,
) {
    serve(path, move |mut stream| {
        let line = read_line(&mut stream);
        if line == format!("CONNECT {port}\n") {
            stream.write_all(answer.as_bytes()).expect("answering");
            guest(stream);
        }
    });
}

/// Waits until something is true.
pub(crate) fn until(what: &str, mut is_true: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_true() {
        assert!(Instant::now() < end, "it never came true that {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Bytes that differ everywhere, and can be told at any position.
pub(crate) fn pattern(start: u64, into: &mut [u8]) {
    for (index, piece) in into.chunks_exact_mut(8).enumerate() {
        let number = start / 8 + index as u64;
        let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        piece.copy_from_slice(&mixed.to_le_bytes());
    }
}

/// First line that a service reads.
pub(crate) fn first_line(stream: &UnixStream) -> String {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).expect("a line");
    line
}

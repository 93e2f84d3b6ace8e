//! A real TCP receiver beyond the veth: the kernel's sockets, read by threads as fast as they can.
//!
//! Its work falls on this machine's processors, much of it on the sender's own.

use std::{
    io::{ErrorKind, Read},
    net::{SocketAddrV4, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context, Result};

use crate::world;

/// Where fake guests send to.
pub(super) const PORT: u16 = 5001;
const BUFFER: usize = 256 * 1024;
/// How often it is looked whether to end.
const LOOK: Duration = Duration::from_millis(100);

/// A listening receiver. Its connections end when it is dropped.
pub(super) struct Receiver {
    bytes: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    accepting: Option<thread::JoinHandle<()>>,
}

impl Receiver {
    /// Listens in a namespace.
    pub(super) fn listen(namespace: &str, address: SocketAddrV4) -> Result<Self> {
        let listener = world::inside(namespace, || {
            TcpListener::bind(address).context("cannot listen beyond the uplink")
        })?;
        listener.set_nonblocking(true)?;
        let (bytes, stop) = (
            Arc::new(AtomicU64::new(0)),
            Arc::new(AtomicBool::new(false)),
        );
        let accepting = thread::spawn({
            let (bytes, stop) = (bytes.clone(), stop.clone());
            move || accept(&listener, &bytes, &stop)
        });
        Ok(Self {
            bytes,
            stop,
            accepting: Some(accepting),
        })
    }

    /// Bytes that programs have got so far.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Its threads return by themselves; a panic there has been printed.
        let _ = self.accepting.take().map(thread::JoinHandle::join);
    }
}

fn accept(listener: &TcpListener, bytes: &AtomicU64, stop: &AtomicBool) {
    thread::scope(|scope| {
        while !stop.load(Ordering::Relaxed) {
            match listener.accept() {
                Ok((stream, _)) => {
                    scope.spawn(move || drain(stream, bytes, stop));
                }
                Err(_) => thread::sleep(Duration::from_millis(5)),
            }
        }
    });
}

fn drain(mut stream: TcpStream, bytes: &AtomicU64, stop: &AtomicBool) {
    let mut buffer = vec![0; BUFFER];
    let ready = stream
        .set_nonblocking(false)
        .and(stream.set_read_timeout(Some(LOOK)));
    while ready.is_ok() && !stop.load(Ordering::Relaxed) {
        match stream.read(&mut buffer) {
            Ok(0) => return,
            Ok(length) => {
                bytes.fetch_add(length as u64, Ordering::Relaxed);
            }
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => {}
                _ => return,
            },
        }
    }
}

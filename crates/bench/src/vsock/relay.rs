//! The router beside VMMs that own their device: what a gibibyte through it costs, against a relay that
//! copies by `read` and `write` and does nothing else.

use std::{
    fs,
    io::{Read, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use sandwire_api::vsock::{PortRange, VsockDestination, VsockKind, VsockPolicy, VsockRule};
use sandwire_vsock_host::{
    control::{STREAM_SOCKET, VmSpec},
    limits::Limits,
};

use super::{
    backend::{self, Backend, Program},
    buffer::Buffer,
    host::{self, READ_BYTES},
    role::{Role, join},
    throughput::precise,
};
use crate::cpu;

const GIBIBYTE: f64 = 1_073_741_824.0;
const PORT: u32 = 2000;
const WARM_UP: Duration = Duration::from_millis(200);

/// What a relay did.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figures {
    /// Gigabits per second.
    pub(super) gigabits: f64,
    /// Seconds of processor time of the relay alone.
    pub(super) cpu_per_gibibyte: f64,
}

/// The service's router, which splices.
pub(super) fn by_splice(time: Duration) -> Result<Figures> {
    let mut backend = Backend::start(Program::sandwire(), 0)?;
    let folder = backend.folder().join("hybrid");
    fs::create_dir(&folder).context("cannot make a guest's folder")?;
    let target = folder.join("target");
    let listener = host::listen(&target)?;
    let rule = VsockRule {
        port: PortRange::single(PORT).context("no such port")?,
        to: VsockDestination::Unix {
            path: target.to_string_lossy().into_owned(),
        },
        identity: false,
    };
    backend.client()?.add_vm(VmSpec {
        key: backend::key(0)?,
        kind: VsockKind::Hybrid,
        folder: folder.clone(),
        cid: 3,
        virtual_cid: None,
        policy: VsockPolicy { rules: vec![rule] },
        limits: Limits::default(),
    })?;
    // As the VMM does when its guest calls that port.
    let sender = connect(&folder.join(format!("{STREAM_SOCKET}_{PORT}")))?;
    let receiver = host::accept(&listener).context("the router doesn't call")?;
    measure(sender, &receiver, time, || backend.time())
}

/// A thread that copies.
pub(super) fn by_copying(time: Duration) -> Result<Figures> {
    let (sender, mut from) = UnixStream::pair().context("cannot make a pair of sockets")?;
    let (mut to, receiver) = UnixStream::pair().context("cannot make a pair of sockets")?;
    let spent = AtomicU64::new(0);
    thread::scope(|scope| {
        let relay = scope.spawn(|| {
            Role::Service.pin()?;
            let mut bytes = Buffer::new(0, READ_BYTES);
            while let count @ 1.. = from.read(&mut bytes).context("cannot read")? {
                to.write_all(&bytes[..count]).context("cannot write")?;
                let nanoseconds = u64::try_from(cpu::thread_time().as_nanos())?;
                spent.store(nanoseconds, Ordering::Relaxed);
            }
            Ok(to.shutdown(Shutdown::Write)?)
        });
        let figures = measure(sender, &receiver, time, || {
            Ok(Duration::from_nanos(spent.load(Ordering::Relaxed)))
        });
        join(relay)?;
        figures
    })
}

fn connect(path: &Path) -> Result<UnixStream> {
    UnixStream::connect(path).with_context(|| format!("cannot connect to {}", path.display()))
}

/// Writes at one end, reads at the other, and asks what the relay has spent.
fn measure(
    sender: UnixStream,
    receiver: &UnixStream,
    time: Duration,
    spent: impl Fn() -> Result<Duration>,
) -> Result<Figures> {
    let (received, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        let stop = &stop;
        let writer = scope.spawn(move || {
            Role::Guest.pin()?;
            let (bytes, mut sender) = (Buffer::new(0x5a, READ_BYTES), sender);
            while !stop.load(Ordering::Relaxed) {
                sender.write_all(&bytes).context("cannot write")?;
            }
            Ok(sender.shutdown(Shutdown::Write)?)
        });
        let reader = scope.spawn(|| {
            Role::Host.pin()?;
            let (mut bytes, mut receiver) = (Buffer::new(0, READ_BYTES), receiver);
            while let count @ 1.. = receiver.read(&mut bytes).context("cannot read")? {
                received.fetch_add(count as u64, Ordering::Relaxed);
            }
            Ok(())
        });
        thread::sleep(WARM_UP);
        let (before, started) = (spent(), Instant::now());
        let bytes = received.load(Ordering::Relaxed);
        thread::sleep(time);
        let seconds = started.elapsed().as_secs_f64();
        let bytes = precise(received.load(Ordering::Relaxed) - bytes);
        let after = spent();
        stop.store(true, Ordering::Relaxed);
        join(writer)?;
        join(reader)?;
        let cpu = after?.saturating_sub(before?).as_secs_f64();
        Ok(Figures {
            gigabits: bytes * 8.0 / 1e9 / seconds,
            cpu_per_gibibyte: cpu / (bytes / GIBIBYTE).max(f64::MIN_POSITIVE),
        })
    })
}

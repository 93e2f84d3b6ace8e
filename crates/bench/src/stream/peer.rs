//! The machine beyond the uplink, played: the receiver of the figures.
//!
//! Seed 004's receiver is another machine, so what receiving costs is not the host's to pay. A TCP of
//! this machine would be: the kernel does its work where the frame was sent, on the sender's processor,
//! and it would be the larger part of what is measured there. So here the uplink is a TAP, whose queue
//! takes a frame as a network card's does, and one thread on a processor of its own takes frames out of
//! it, counts and acknowledges them ([`Connections`]). Its acknowledgements enter the host on that
//! processor, as they would by an interrupt there.
//!
//! When there is nothing to take it looks away for a moment instead of sleeping: a sender never pays
//! for waking a network card.

mod connections;

use std::{
    fs,
    net::Ipv4Addr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};
use rustix::thread::gettid;
use sandwire_kernel_net::tap::Opened;

use crate::{
    cpu,
    guest::{FRAME_MAX, read, wait, write},
    packet::Frame,
};
use connections::Connections;

/// How long it looks away from an empty queue: about what network cards gather frames for.
const PAUSE: Duration = Duration::from_micros(20);
/// Empty looks in a row after which the rest is acknowledged: Linux's 40 ms.
const PAUSES_MAX: u32 = 2000;

/// A running peer. It ends when this is dropped.
pub(super) struct Peer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Result<()>>>,
}

/// Written by the peer's thread alone.
#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    thread: AtomicI32,
    bytes: AtomicU64,
    paused: AtomicU64,
    answering: AtomicU64,
}

/// What the peer's thread has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct PeerTime {
    /// Seconds that it ran outside the kernel.
    pub(super) user: f64,
    /// Seconds that it ran in the kernel, `answering` included.
    pub(super) system: f64,
    /// Seconds in which its acknowledgements went into the host: the host's own work.
    pub(super) answering: f64,
    /// Seconds in which it had nothing to do.
    pub(super) paused: f64,
}

impl Peer {
    /// Starts a peer that expects streams from `source` on the uplink.
    pub(super) fn start(uplink: Arc<Opened>, source: Ipv4Addr) -> Self {
        let shared = Arc::new(Shared::default());
        let thread = thread::spawn({
            let shared = shared.clone();
            move || serve(&uplink, source, &shared)
        });
        Self {
            shared,
            thread: Some(thread),
        }
    }

    /// Payload that has come in order so far.
    pub(super) fn bytes(&self) -> u64 {
        self.shared.bytes.load(Ordering::Relaxed)
    }

    /// What its thread has done so far.
    pub(super) fn time(&self) -> Result<PeerTime> {
        let thread = self.shared.thread.load(Ordering::Relaxed);
        let path = format!("/proc/self/task/{thread}/stat");
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        let (user, system) = cpu::of_thread(&text).context("/proc has another form")?;
        let seconds =
            |time: &AtomicU64| Duration::from_nanos(time.load(Ordering::Relaxed)).as_secs_f64();
        Ok(PeerTime {
            user: user.as_secs_f64(),
            system: system.as_secs_f64(),
            answering: seconds(&self.shared.answering),
            paused: seconds(&self.shared.paused),
        })
    }

    /// Ends it. Fails if it failed, or if anything came that nobody could have meant.
    pub(super) fn end(mut self) -> Result<()> {
        self.shared.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("a peer ends once")?;
        thread.join().map_err(|_| anyhow!("the peer panicked"))?
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        // Somebody who cares how it ended calls `end`.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl PeerTime {
    /// What was done since `before`.
    pub(super) fn since(&self, before: &Self) -> Self {
        Self {
            user: self.user - before.user,
            system: self.system - before.system,
            answering: self.answering - before.answering,
            paused: self.paused - before.paused,
        }
    }
}

fn serve(uplink: &Opened, source: Ipv4Addr, shared: &Shared) -> Result<()> {
    let thread = gettid().as_raw_nonzero().get();
    shared.thread.store(thread, Ordering::Relaxed);
    // Alone with the sender on one processor, it must sleep for the sender to run.
    let is_alone = thread::available_parallelism().is_ok_and(|count| count.get() < 2);
    cpu::pin(1)?;
    let mut buffer = vec![0; FRAME_MAX];
    // What the last run has left behind is nobody's.
    while read(uplink, &mut buffer)?.is_some() {}
    let mut connections = Connections::from(source);
    let mut pauses = 0;
    while !shared.stop.load(Ordering::Relaxed) {
        if let Some(bytes) = read(uplink, &mut buffer)? {
            pauses = 0;
            if let Some(answer) = connections.take(bytes) {
                send(uplink, &answer, shared)?;
            }
            shared.bytes.store(connections.bytes(), Ordering::Relaxed);
            continue;
        }
        let started = Instant::now();
        if is_alone {
            wait(uplink, PAUSE)?;
        }
        while started.elapsed() < PAUSE {
            std::hint::spin_loop();
        }
        add(&shared.paused, started.elapsed());
        pauses += 1;
        if pauses == PAUSES_MAX {
            for answer in connections.rest() {
                send(uplink, &answer, shared)?;
            }
        }
    }
    if let Some(last) = connections.last_wrong() {
        bail!(
            "{} frames came beyond the uplink with a wrong source address or checksum, at last one of {last}",
            connections.wrong()
        );
    }
    Ok(())
}

fn send(uplink: &Opened, answer: &Frame, shared: &Shared) -> Result<()> {
    let started = Instant::now();
    write(uplink, answer.with_header())?;
    add(&shared.answering, started.elapsed());
    Ok(())
}

fn add(time: &AtomicU64, more: Duration) {
    let more = u64::try_from(more.as_nanos()).unwrap_or(0);
    time.fetch_add(more, Ordering::Relaxed);
}

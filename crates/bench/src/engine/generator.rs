//! Who offers load: the kernel itself sends one frame again and again, as fast as a processor can.
//!
//! A program in user space costs as much to send a frame as the forwarder does, and the other end's work on it, up to
//! the edge app's ring, is done by the sender's processor too: it would be the sender that is measured. Here frames
//! are pages that the kernel recycles, sent by XDP in batches (`BPF_PROG_TEST_RUN` with live frames), so that most of
//! that processor is left for the other end's work. It offers more than any forwarder takes, to each the same.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
};

use anyhow::{Context, Result, anyhow, ensure};
use aya::{
    Ebpf, EbpfLoader,
    programs::{TestRun, TestRunAttrs, TestRunOptions, Xdp},
};
use sandwire_kernel_net::{interface, netlink::Socket, netns::Home};

use crate::{
    cpu,
    rig::{INTERFACES, OUTER, Rig},
    world,
};

/// Frames of one call, which can't be ended before: some tenths of a second. Each call makes and dissolves a pool of
/// pages, which takes 25 ms.
const CALL_FRAMES: u32 = 250_000;
/// Frames that the kernel sends at once.
const BATCH_FRAMES: u32 = 64;

/// Sends until it ends.
pub(super) struct Generator {
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
}

/// Has the middle's interface take frames that XDP sends: its end then reads by NAPI, as network cards do.
pub(super) fn prepare(rig: &Rig) -> Result<()> {
    let output = world::command_in(&rig.middle, "ethtool")
        .args(["-K", INTERFACES[0], "gro", "on"])
        .output()
        .context("cannot start ethtool, of the package of that name")?;
    let problem = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "`ethtool -K {} gro on` failed: {}",
        INTERFACES[0],
        problem.trim()
    );
    Ok(())
}

impl Generator {
    /// Starts to send this frame from the left host, on the processor before the last.
    pub(super) fn start(rig: &Rig, frame: Vec<u8>) -> Result<Self> {
        let namespace = rig.left.clone();
        let ends = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&ends);
        let (ready, when_ready) = mpsc::channel();
        let thread = thread::spawn(move || {
            let _inside = Home::here()?.enter(&namespace)?;
            cpu::pin(1)?;
            let mut object = load()?;
            let program = program_of(&mut object)?;
            // Whoever started this waits for it.
            let _ = ready.send(());
            while !is_over.load(Ordering::Relaxed) {
                send(program, &frame)?;
            }
            Ok(())
        });
        let mut this = Self {
            ends,
            thread: Some(thread),
        };
        if when_ready.recv().is_err() {
            this.stop()?;
        }
        Ok(this)
    }

    /// Ends it.
    pub(super) fn end(mut self) -> Result<()> {
        self.stop()
    }

    fn stop(&mut self) -> Result<()> {
        self.ends.store(true, Ordering::Relaxed);
        let Some(thread) = self.thread.take() else {
            return Ok(());
        };
        let outcome = thread.join();
        outcome.map_err(|_| anyhow!("the generator panicked"))?
    }
}

impl Drop for Generator {
    fn drop(&mut self) {
        // The error that led here says more.
        let _ = self.stop();
    }
}

fn load() -> Result<Ebpf> {
    let found = interface::find(&mut Socket::route()?, OUTER)?;
    let index = found.with_context(|| format!("there is no {OUTER}"))?.index;
    EbpfLoader::new()
        .override_global("interface", &index.0, true)
        .load(GENERATE)
        .context("cannot load the generator's program")
}

fn program_of(object: &mut Ebpf) -> Result<&mut Xdp> {
    let program = object.program_mut("generate");
    let program: &mut Xdp = program
        .context("the generator has no program")?
        .try_into()?;
    program.load()?;
    Ok(program)
}

fn send(program: &Xdp, frame: &[u8]) -> Result<()> {
    let sent = program.test_run(TestRunOptions {
        data_in: Some(frame),
        repeat: CALL_FRAMES,
        attrs: TestRunAttrs::new().xdp_live_frames(BATCH_FRAMES),
        ..TestRunOptions::new()
    });
    sent.context("cannot send frames by XDP, which needs Linux 5.18")?;
    Ok(())
}

const GENERATE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/generate.o"));

//! One row: a guest's TAP to write to, and the uplink's other side.

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    rc::Rc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use sandwire_kernel_net::{interface, tap::Opened};

use super::{
    Exit,
    load::{ANSWERED_PORT, Load, PORT},
    sink::{Look, Sink, drain, has_tc, look_at},
};
use crate::{
    cpu, guest,
    packet::Frame,
    way::{Place, Sandbox},
    world,
};

/// An address that [`policy`](crate::way::policy) denies.
const DENIED: Ipv4Addr = Ipv4Addr::new(203, 0, 50, 7);
/// Loads that are sent to be looked at.
pub(super) const TRIAL_LOADS: u32 = 8;

/// Which loads a row is measured with, by where they leave.
pub(super) type Takes = fn(Exit, Load) -> bool;

/// A guest that sends.
pub(super) struct Lane {
    name: String,
    /// Whether it is measured with a load that leaves so.
    takes: Takes,
    sandbox: Sandbox,
    tap: Opened,
    sink: Rc<Sink>,
}

/// A closer look at a few loads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Trial {
    /// Frames sent.
    pub(super) sent: u32,
    /// Frames that came.
    pub(super) arrived: u32,
    /// Of these, with a wrong source or wrong checksums.
    pub(super) wrong: u32,
}

/// What the clock said while loads were sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Clocked {
    cpu: Duration,
    wall: Duration,
    loads: u32,
    /// Frames that were taken away again.
    arrived: u64,
}

impl Clocked {
    /// Per load of so many frames.
    pub(super) fn sample(self, frames: usize) -> Sample {
        let sent = u64::from(self.loads) * frames as u64;
        let lost = u32::try_from(sent.saturating_sub(self.arrived)).unwrap_or(u32::MAX);
        Sample {
            cpu_ns: self.cpu.as_secs_f64() * 1e9 / f64::from(self.loads),
            wall_ns: self.wall.as_secs_f64() * 1e9 / f64::from(self.loads),
            lost: f64::from(lost),
        }
    }
}

/// Sends batches until the sample is long enough, the first of them unseen. What takes away what has come is not on the clock.
pub(super) fn clocked(
    sample_us: u32,
    load: Load,
    send: impl Fn() -> Result<()>,
    take: impl Fn() -> Result<u64>,
) -> Result<Clocked> {
    let enough = Duration::from_micros(sample_us.into());
    send()?;
    take()?;
    let mut clocked = Clocked::default();
    while clocked.cpu < enough {
        let (started, cpu_before) = (Instant::now(), cpu::thread_time());
        send()?;
        clocked.cpu += cpu::thread_time() - cpu_before;
        clocked.wall += started.elapsed();
        clocked.loads += load.batch();
        clocked.arrived += take()?;
    }
    Ok(clocked)
}

/// One measurement, per load.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Sample {
    /// Processor time.
    pub(super) cpu_ns: f64,
    /// Time.
    pub(super) wall_ns: f64,
    /// Frames that did not arrive, in all.
    pub(super) lost: f64,
}

impl Lane {
    /// Opens a sandbox's TAP.
    pub(super) fn open(
        name: &str,
        sandbox: &Sandbox,
        sink: Rc<Sink>,
        takes: Takes,
    ) -> Result<Self> {
        Ok(Self {
            name: name.to_owned(),
            takes,
            tap: world::open_tap(&sandbox.namespace, &sandbox.tap, sandbox.has_offloads)?,
            sandbox: sandbox.clone(),
            sink,
        })
    }

    /// The name of its rows.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Whether it is measured with this load.
    pub(super) fn takes(&self, exit: Exit, load: Load) -> bool {
        (self.takes)(exit, load)
    }

    /// The guest.
    pub(super) fn sandbox(&self) -> &Sandbox {
        &self.sandbox
    }

    /// Takes away what has arrived at the uplink that is a TAP.
    pub(super) fn empty_tap(&self) -> Result<u64> {
        self.sink.empty_tap()
    }

    /// Sends a few loads and looks at each frame that arrives.
    pub(super) fn examine(&mut self, exit: Exit, load: Load) -> Result<Trial> {
        let frames = self.frames(exit, load);
        self.sink.capture(exit, true)?;
        self.sink.look(exit, self.sandbox.clone)?;
        let mut trial = Trial::default();
        for _ in 0..TRIAL_LOADS {
            for frame in &frames {
                self.write(frame)?;
                trial.sent += 1;
            }
            let look = self.sink.look(exit, self.sandbox.clone)?;
            trial.arrived += look.frames;
            trial.wrong += look.wrong;
        }
        self.sink.capture(exit, false)?;
        Ok(trial)
    }

    /// Sends to an address of the deny list, which the host would route beyond its veth. Returns whether
    /// it came there: a measurement of a stage that isn't there would be worth nothing.
    pub(super) fn lets_denied_through(&mut self) -> Result<bool> {
        let target = SocketAddrV4::new(DENIED, PORT);
        let frames = Load::Udp64.frames(&self.sandbox, target);
        self.sink.capture(Exit::Veth, true)?;
        self.sink.look(Exit::Veth, self.sandbox.clone)?;
        for frame in &frames {
            self.write(frame)?;
        }
        let look = self.sink.look(Exit::Veth, self.sandbox.clone)?;
        self.sink.capture(Exit::Veth, false)?;
        Ok(look.frames > 0)
    }

    /// Sends batches until the sample is long enough.
    pub(super) fn sample(&mut self, exit: Exit, load: Load, sample_us: u32) -> Result<Sample> {
        let frames = self.frames(exit, load);
        // Read before the first batch, which comes there too.
        let before = self.sink.veth_frames()?;
        let send = || self.batch(&frames, load);
        let mut clocked = clocked(sample_us, load, send, || self.sink.empty_tap())?;
        if exit == Exit::Veth {
            let first = u64::from(load.batch()) * frames.len() as u64;
            clocked.arrived = (self.sink.veth_frames()? - before).saturating_sub(first);
        }
        Ok(clocked.sample(frames.len()))
    }

    fn frames(&self, exit: Exit, load: Load) -> Vec<Frame> {
        let target = match exit {
            Exit::Tap => world::BEYOND_TAP,
            Exit::Veth => world::BEYOND_VETH,
        };
        load.frames(&self.sandbox, SocketAddrV4::new(target, PORT))
    }

    fn batch(&self, frames: &[Frame], load: Load) -> Result<()> {
        for _ in 0..load.batch() {
            for frame in frames {
                self.write(frame)?;
            }
        }
        Ok(())
    }

    /// The host's namespace.
    pub(super) fn host(&self) -> &str {
        self.sink.host()
    }

    /// Sends the first frame of a load to who is beyond the TAP.
    pub(super) fn speak(&self, load: Load) -> Result<()> {
        let frames = self.frames(Exit::Tap, load);
        let first = frames.first().context("a load without frames")?;
        self.write(first)?;
        self.sink.empty_tap()?;
        Ok(())
    }

    /// Has a frame come in from beyond the TAP that leads out.
    pub(super) fn receive(&self, frame: &Frame) -> Result<()> {
        self.sink.send(frame)
    }

    /// Throws away what has come for the guest, and returns how many frames that were.
    pub(super) fn empty_own_tap(&self) -> Result<u64> {
        let mut frames = 0;
        drain(&self.tap, &mut self.sink.buffer(), |_| frames += 1)?;
        Ok(frames)
    }

    /// Looks at all answers that have come for the guest.
    pub(super) fn look_at_answers(&self) -> Result<Look> {
        let mut found = Look::default();
        let has_header = self.sandbox.has_offloads;
        drain(&self.tap, &mut self.sink.buffer(), |bytes| {
            look_at(bytes, has_header, ANSWERED_PORT, &mut found, |seen| {
                seen.source == world::BEYOND_TAP && seen.target == self.sandbox.guest
            });
        })?;
        Ok(found)
    }

    /// Sends one frame.
    pub(super) fn write(&self, frame: &Frame) -> Result<()> {
        let bytes = if self.sandbox.has_offloads {
            frame.with_header()
        } else {
            frame.plain()
        };
        guest::write(&self.tap, bytes)
    }
}

/// A further guest of the kernel's host whose TAP has nothing but a program of the bench's own on it: `redirect`
/// sends on to the TAP that leads out, `drop` drops.
pub(super) fn bare(place: &Place, sink: &Rc<Sink>, program: &str, takes: Takes) -> Result<Lane> {
    ensure!(has_tc(), "there is no `tc`, of the package iproute2");
    let host = place.world.name();
    world::batch(
        host,
        &format!("tuntap add name {program} mode tap vnet_hdr\nlink set {program} up"),
    )?;
    let out = interface::find(&mut world::netlink_of(host)?, world::TAP)?;
    let out = out.context("the uplink is gone")?.index;
    let object = world::write_object(PROGRAMS)?;
    let tc = |words: &str| -> Result<()> {
        let output = world::command_in(host, "tc")
            .args(words.split_whitespace())
            .output()
            .context("cannot start tc")?;
        let problem = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "`tc {words}` failed: {problem}");
        Ok(())
    };
    tc(&format!("qdisc add dev {program} ingress"))?;
    tc(&format!(
        "filter add dev {program} ingress bpf direct-action object-file {} section {program} classid :{:x}",
        object.path().display(),
        out.0
    ))?;
    let source = Ipv4Addr::new(192, 168, 241, 2);
    let sandbox = Sandbox {
        tap: program.to_owned(),
        guest: source,
        clone: source,
        ..place.sandboxes.first().context("no guest")?.clone()
    };
    Lane::open(program, &sandbox, sink.clone(), takes)
}

const PROGRAMS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/redirect.o"));

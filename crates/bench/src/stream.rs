//! The suite `stream`: seed 004's experiment. A guest sends small or large writes by TCP to a receiver
//! beyond the uplink; what matters is how much arrives and what it costs the host.
//!
//! Fake guests send each write as a frame of its own, so that packets are as small as the writes. A
//! second set of rows has a real guest, a Linux in user mode: it joins small writes as any TCP does,
//! and is limited by its own system calls, so there the host's cost per bit is what to look at.

mod receiver;

use std::{
    collections::BTreeMap,
    net::SocketAddrV4,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};

use crate::{
    cpu::{self, Spent},
    guest::{
        linux::{self, Linux},
        sender::{self, Sent, Stream},
    },
    host::HostFacts,
    progress::Step,
    record::Record,
    way::{Place, Plan, Switches, Way, policy},
    world,
};
use receiver::Receiver;

/// Seed 004 has four threads that send.
const CONNECTIONS: u16 = 4;
/// Before the measurement begins, connections find their pace.
const WARM_UP: Duration = Duration::from_millis(500);
const GUEST_PATIENCE: Duration = Duration::from_secs(60);

/// Sizes of the suite.
#[derive(Clone, Debug)]
pub(crate) struct Sizes {
    /// Seconds that one measurement takes.
    pub(crate) seconds: u32,
    /// How often each is repeated; all ways take turns.
    pub(crate) runs: u32,
    /// Whether real guests are run too.
    pub(crate) linux: bool,
    /// Run only these ways; all if empty.
    pub(crate) only: Vec<Way>,
}

const WAYS: [Way; 6] = [
    Way::Kernel,
    Way::KernelNat,
    Way::XdpGeneric,
    Way::EbpfNetns,
    Way::EbpfHost,
    Way::Xdp,
];

/// A write's size, and the name of its rows.
const WRITES: [(&str, u32); 2] = [("64", 64), ("16k", 16_384)];

/// Runs the suite. To be called inside a private host.
pub(crate) fn run(sizes: &Sizes) -> Result<Record> {
    let settings = BTreeMap::from([
        ("seconds".to_owned(), u64::from(sizes.seconds)),
        ("runs".to_owned(), u64::from(sizes.runs)),
        ("connections".to_owned(), u64::from(CONNECTIONS)),
    ]);
    let mut record = Record::new("stream", HostFacts::read()?, settings);
    record.not_run("vhost", vhost_reason());
    let mut places = Vec::new();
    for way in WAYS {
        if !sizes.only.is_empty() && !sizes.only.contains(&way) {
            continue;
        }
        let _step = Step::begin(&format!("set up {}", way.name()), 1);
        match place(way) {
            Ok(place) => {
                if let Some(note) = place.note {
                    record.not_run(&format!("{} of a pool", way.name()), note);
                }
                places.push((way, place));
            }
            Err(error) => record.not_run(way.name(), &format!("{error:#}")),
        }
    }
    for run in 0..sizes.runs {
        for (name, payload) in WRITES {
            for (way, place) in &places {
                let label = format!("{name} B by {}, run {}", way.name(), run + 1);
                let _step = Step::begin(&label, sizes.seconds);
                let stream = Stream {
                    target: SocketAddrV4::new(world::BEYOND_VETH, receiver::PORT),
                    connections: CONNECTIONS,
                    payload,
                };
                let figures = measure(place, &stream, sizes.seconds)
                    .with_context(|| format!("cannot measure {label}"))?;
                figures.add(&mut record, way.name(), name, payload);
            }
        }
    }
    if sizes.linux {
        real_guests(sizes, &places, &mut record)?;
    }
    for (_, place) in places {
        place.end()?;
    }
    add_ratios(&mut record);
    Ok(record)
}

fn vhost_reason() -> &'static str {
    if Path::new("/dev/vhost-net").exists() {
        "only a VMM can drive /dev/vhost-net, and this suite's guests are none"
    } else {
        "this kernel has no /dev/vhost-net"
    }
}

fn place(way: Way) -> Result<Place> {
    let full = Switches {
        deny_list: true,
        limit: true,
    };
    let plan = Plan {
        slots: 1,
        leases: 1,
        policies: vec![policy(full)?],
    };
    Place::build(way, &plan, |_| {})
}

/// What one measurement found.
struct Figures {
    /// Bytes that the receiver's program got while it was measured.
    bytes: u64,
    seconds: f64,
    /// The machine's processors in that time.
    spent: Spent,
    /// The fake guest's own time, as a share of the whole.
    guest: f64,
    setbacks: u64,
}

impl Figures {
    fn add(&self, record: &mut Record, case: &str, name: &str, payload: u32) {
        let bytes = precise(self.bytes);
        let gigabits = bytes * 8.0 / 1e9;
        let host = self.spent.system + self.spent.softirq;
        let percent = |seconds: f64| seconds / self.seconds * 100.0;
        let figures = [
            ("throughput", "Mbit/s", gigabits * 1000.0 / self.seconds),
            ("packets", "1/s", bytes / f64::from(payload) / self.seconds),
            ("cpu_user", "%", percent(self.spent.user - self.guest)),
            ("cpu_system", "%", percent(self.spent.system)),
            ("cpu_softirq", "%", percent(self.spent.softirq)),
            ("cpu_guest", "%", percent(self.guest + self.spent.guest)),
            ("cpu_stolen", "%", percent(self.spent.stolen)),
            ("host_cpu_per_gigabit", "ms", host * 1000.0 / gigabits),
            ("setbacks", "1/s", precise(self.setbacks) / self.seconds),
        ];
        for (metric, unit, value) in figures {
            record.add(case, &format!("tcp_{name}_{metric}"), unit, &[value]);
        }
    }
}

fn measure(place: &Place, stream: &Stream, seconds: u32) -> Result<Figures> {
    let sandbox = place.sandboxes.first().context("no guest")?;
    let tap = world::open_tap(&sandbox.namespace, &sandbox.tap, sandbox.has_offloads)?;
    let receiver = Receiver::listen(place.world.beyond(), stream.target)?;
    let stop = Arc::new(AtomicBool::new(false));
    thread::scope(|scope| {
        let sending = scope.spawn(|| -> Result<Sent> {
            cpu::pin(0)?;
            sender::send(sandbox, &tap, stream, &stop)
        });
        thread::sleep(WARM_UP);
        let watched = watch(&receiver, seconds, || !sending.is_finished());
        stop.store(true, Ordering::Relaxed);
        let sent = sending
            .join()
            .map_err(|_| anyhow!("the guest panicked"))??;
        let mut figures = watched?;
        let share = figures.seconds / sent.elapsed.as_secs_f64();
        figures.guest = sent.guest.as_secs_f64() * share;
        figures.setbacks = sent.setbacks;
        Ok(figures)
    })
}

/// Looks at receiver and processors for some seconds, or for as long as something goes on.
fn watch(receiver: &Receiver, seconds: u32, goes_on: impl Fn() -> bool) -> Result<Figures> {
    let (before, bytes_before, started) = (Spent::read()?, receiver.bytes(), Instant::now());
    let end = started + Duration::from_secs(seconds.into());
    while Instant::now() < end && goes_on() {
        thread::sleep(Duration::from_millis(20));
    }
    Ok(Figures {
        bytes: receiver.bytes() - bytes_before,
        seconds: started.elapsed().as_secs_f64(),
        spent: Spent::read()?.since(&before),
        guest: 0.0,
        setbacks: 0,
    })
}

/// The same with a Linux in user mode for the guest.
fn real_guests(sizes: &Sizes, places: &[(Way, Place)], record: &mut Record) -> Result<()> {
    let name = |way: Way| format!("{}_linux", way.name());
    for (way, place) in places {
        if !way.has_offloads() {
            let reason = "this guest's driver cannot be told to do without segmentation offload";
            record.not_run(&name(*way), reason);
            continue;
        }
        if let Some(reason) = linux::missing() {
            record.not_run(&name(*way), &reason);
            continue;
        }
        let folder = tempfile::tempdir_in("/run")?;
        linux::write_initramfs(folder.path())?;
        let sandbox = place.sandboxes.first().context("no guest")?;
        let _step = Step::begin(&format!("a real guest by {}", way.name()), 1);
        let target = Some(world::BEYOND_VETH);
        let mut guest = Linux::start(sandbox, folder.path(), way.name(), target)?;
        guest.wait_ready(Instant::now() + GUEST_PATIENCE)?;
        for _ in 0..sizes.runs {
            for ((write, payload), (port, _)) in WRITES.iter().zip(linux::SIZES) {
                let target = SocketAddrV4::new(world::BEYOND_VETH, port);
                let receiver = Receiver::listen(place.world.beyond(), target)?;
                crate::private_host::wait_until("the guest sends", GUEST_PATIENCE, || {
                    Ok(receiver.bytes() > 0)
                })?;
                thread::sleep(WARM_UP);
                let figures = watch(&receiver, sizes.seconds, || true)?;
                figures.add(record, &name(*way), write, *payload);
            }
        }
    }
    Ok(())
}

fn add_ratios(record: &mut Record) {
    for (name, write, above, below) in [
        (
            "stream_64_ebpf_vs_kernel_nat",
            "64_packets",
            "ebpf_host",
            "kernel_nat",
        ),
        (
            "stream_64_ebpf_vs_kernel",
            "64_packets",
            "ebpf_host",
            "kernel",
        ),
        (
            "stream_64_ebpf_vs_xdp_generic",
            "64_packets",
            "ebpf_host",
            "xdp_generic",
        ),
        (
            "stream_64_xdp_vs_kernel_nat",
            "64_packets",
            "xdp",
            "kernel_nat",
        ),
        (
            "stream_16k_ebpf_vs_xdp_generic",
            "16k_throughput",
            "ebpf_host",
            "xdp_generic",
        ),
        (
            "stream_16k_ebpf_vs_kernel_nat",
            "16k_throughput",
            "ebpf_host",
            "kernel_nat",
        ),
    ] {
        let metric = format!("tcp_{write}");
        record.add_ratio(name, (above, &metric), (below, &metric));
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "bytes of a minute are far below 2^52"
)]
fn precise(count: u64) -> f64 {
    count as f64
}

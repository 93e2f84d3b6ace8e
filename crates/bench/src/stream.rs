//! The suite `stream`: seed 004's experiment. A guest sends small or large writes by TCP to a receiver
//! beyond the uplink; what matters is how much arrives and what it costs the host.
//!
//! Fake guests send each write as a frame of its own, so that packets are as small as the writes. They
//! send to a played machine ([`peer`]), whose work is not the host's and is left out of the host's time,
//! as in the seed. A second set of rows (`..._socket`) sends to a TCP of this machine, which then does
//! the work of two. A third (`..._linux`) has a real guest, a Linux in user mode: it joins small writes
//! as any TCP does. It is processes of this machine, limited by their own system calls, which the kernel counts as any
//! others: so of these rows it is told what arrives, and nothing of the host's time.

mod peer;
mod socket;

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, SocketAddrV4},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use sandwire_kernel_net::tap::Opened;

use crate::{
    cpu::{self, Spent},
    guest::{
        linux::{self, Linux},
        sender::{self, Sent, Stream},
    },
    host::HostFacts,
    progress::Step,
    record::Record,
    way::{Limit, Place, Plan, Switches, Way, policy},
    world::{self, TAP},
};
use peer::{Peer, PeerTime};

/// Seed 004 has four threads that send.
const CONNECTIONS: u16 = 4;
/// Before the measurement begins, connections find their pace.
const WARM_UP: Duration = Duration::from_millis(500);
const GUEST_PATIENCE: Duration = Duration::from_secs(60);
/// Frames that the uplink holds: all that can be on their way, so that a peer that is late loses none.
const UPLINK_QUEUE: u32 = 2 * sender::PACKETS_MAX * CONNECTIONS as u32;
/// The second set of rows is a comparison, no result: this part of the time does for it.
const SOCKET_SHARE: u32 = 4;

/// To whom fake guests send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Receiver {
    /// A played machine beyond the uplink, whose work is not the host's.
    Peer,
    /// A TCP of this machine's, whose work falls on the same processors.
    Socket,
}

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
    /// To whom fake guests send: all there are if empty.
    pub(crate) receivers: Vec<Receiver>,
}

/// A way with its guest's network, and the far end of its uplink, held open for as long as it is there.
struct Lane {
    way: Way,
    place: Place,
    uplink: Arc<Opened>,
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
    cpu::go_first();
    let lanes = open_lanes(sizes, &mut record);
    let receivers = [Receiver::Peer, Receiver::Socket];
    let is_wanted =
        |receiver: &Receiver| sizes.receivers.is_empty() || sizes.receivers.contains(receiver);
    for run in 0..sizes.runs {
        for receiver in receivers.iter().filter(|receiver| is_wanted(receiver)) {
            let seconds = receiver.share_of(sizes.seconds);
            for (name, payload) in WRITES {
                for lane in &lanes {
                    let case = receiver.case(lane.way);
                    let label = format!("{name} B by {case}, run {}", run + 1);
                    let _step = Step::begin(&label, seconds);
                    let figures = measure(lane, *receiver, payload, seconds)
                        .with_context(|| format!("cannot measure {label}"))?;
                    figures.add(&mut record, &case, name, payload);
                }
            }
        }
    }
    if sizes.linux {
        real_guests(sizes, &lanes, &mut record)?;
    }
    for lane in lanes {
        lane.place.end()?;
    }
    add_ratios(&mut record);
    Ok(record)
}

impl Receiver {
    /// The name of the rows of a way that sends to it.
    fn case(self, way: Way) -> String {
        match self {
            Self::Peer => way.name().to_owned(),
            Self::Socket => format!("{}_socket", way.name()),
        }
    }

    fn share_of(self, seconds: u32) -> u32 {
        match self {
            Self::Peer => seconds,
            Self::Socket => seconds.div_ceil(SOCKET_SHARE),
        }
    }
}

/// Builds all ways; one that can't be built is not run.
fn open_lanes(sizes: &Sizes, record: &mut Record) -> Vec<Lane> {
    let mut lanes = Vec::new();
    for way in WAYS {
        if !sizes.only.is_empty() && !sizes.only.contains(&way) {
            continue;
        }
        let _step = Step::begin(&format!("set up {}", way.name()), 1);
        match open_lane(way) {
            Ok(lane) => {
                if let Some(note) = lane.place.note {
                    record.not_run(&format!("{} of a pool", way.name()), note);
                }
                lanes.push(lane);
            }
            Err(error) => record.not_run(way.name(), &format!("{error:#}")),
        }
    }
    lanes
}

fn open_lane(way: Way) -> Result<Lane> {
    let place = place(way)?;
    world::ip_in(
        place.world.name(),
        &format!("link set dev {TAP} txqueuelen {UPLINK_QUEUE}"),
    )?;
    Ok(Lane {
        way,
        uplink: Arc::new(place.world.open_tap()?),
        place,
    })
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
        limit: Limit::Wide,
    };
    let plan = Plan {
        slots: 1,
        leases: 1,
        policies: vec![policy(full)?],
    };
    Place::build(way, &plan, |_| {})
}

/// What one measurement found.
#[derive(Default)]
struct Figures {
    /// Bytes that the receiver got while it was measured.
    bytes: u64,
    seconds: f64,
    /// The machine's processors in that time.
    spent: Spent,
    /// The fake guest's own time, as a share of the whole. None of a real one, whose time can't be told from the host's.
    guest: Option<f64>,
    /// Time in which the fake guest could not send, likewise.
    stalled: f64,
    setbacks: u64,
    /// What the played receiver did, if it was one.
    peer: Option<PeerTime>,
}

impl Figures {
    /// The played receiver's own time is taken out of the machine's: it stands for another machine. What
    /// its acknowledgements cost on their way in is the host's.
    fn add(&self, record: &mut Record, case: &str, name: &str, payload: u32) {
        let bytes = precise(self.bytes);
        let gigabits = bytes * 8.0 / 1e9;
        let percent = |seconds: f64| seconds.max(0.0) / self.seconds * 100.0;
        let mut figures = vec![
            ("throughput", "Mbit/s", gigabits * 1000.0 / self.seconds),
            ("packets", "1/s", bytes / f64::from(payload) / self.seconds),
            ("cpu_stolen", "%", percent(self.spent.stolen)),
        ];
        if let Some(guest) = self.guest {
            let peer = self.peer.unwrap_or_default();
            let user = self.spent.user - guest - peer.user;
            let system = self.spent.system - (peer.system - peer.answering);
            let host = system + self.spent.softirq;
            figures.extend([
                ("cpu_user", "%", percent(user)),
                ("cpu_system", "%", percent(system)),
                ("cpu_softirq", "%", percent(self.spent.softirq)),
                ("cpu_guest", "%", percent(guest + self.spent.guest)),
                ("host_cpu_per_gigabit", "ms", host * 1000.0 / gigabits),
                ("guest_stalled", "%", percent(self.stalled)),
                ("setbacks", "1/s", precise(self.setbacks) / self.seconds),
            ]);
        }
        if let Some(peer) = self.peer {
            let busy = self.seconds - peer.paused;
            figures.push(("peer_busy", "%", percent(busy)));
        }
        for (metric, unit, value) in figures {
            record.add(case, &format!("tcp_{name}_{metric}"), unit, &[value]);
        }
    }
}

fn measure(lane: &Lane, receiver: Receiver, payload: u32, seconds: u32) -> Result<Figures> {
    let sandbox = lane.place.sandboxes.first().context("no guest")?;
    match receiver {
        Receiver::Peer => {
            let peer = Peer::start(lane.uplink.clone(), sandbox.clone);
            let stream = stream_to(world::BEYOND_TAP, payload);
            let figures = send(lane, &stream, |goes_on| {
                let before = peer.time()?;
                let mut figures = watch(|| peer.bytes(), seconds, goes_on)?;
                figures.peer = Some(peer.time()?.since(&before));
                Ok(figures)
            });
            // Why the peer failed says more than that its sender got no answer.
            peer.end().and(figures)
        }
        Receiver::Socket => {
            let stream = stream_to(world::BEYOND_VETH, payload);
            let socket = socket::Receiver::listen(lane.place.world.beyond(), stream.target)?;
            send(lane, &stream, |goes_on| {
                watch(|| socket.bytes(), seconds, goes_on)
            })
        }
    }
}

fn stream_to(address: Ipv4Addr, payload: u32) -> Stream {
    Stream {
        target: SocketAddrV4::new(address, socket::PORT),
        connections: CONNECTIONS,
        payload,
    }
}

/// Lets a fake guest send for as long as `watched` takes. That is told how to ask whether it still does.
fn send(
    lane: &Lane,
    stream: &Stream,
    watched: impl FnOnce(&dyn Fn() -> bool) -> Result<Figures>,
) -> Result<Figures> {
    let sandbox = lane.place.sandboxes.first().context("no guest")?;
    let tap = world::open_tap(&sandbox.namespace, &sandbox.tap, sandbox.has_offloads)?;
    let (is_open, stop) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        let sending = scope.spawn(|| -> Result<Sent> {
            cpu::pin(0)?;
            sender::send(sandbox, &tap, stream, &is_open, &stop)
        });
        while !is_open.load(Ordering::Relaxed) && !sending.is_finished() {
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(WARM_UP);
        let watched = watched(&|| !sending.is_finished());
        stop.store(true, Ordering::Relaxed);
        let sent = sending
            .join()
            .map_err(|_| anyhow!("the guest panicked"))??;
        let mut figures = watched?;
        let share = figures.seconds / sent.elapsed.as_secs_f64();
        figures.guest = Some(sent.guest.as_secs_f64() * share);
        figures.stalled = sent.stalled.as_secs_f64() * share;
        figures.setbacks = sent.setbacks;
        Ok(figures)
    })
}

/// Looks at receiver and processors for some seconds, or for as long as something goes on.
fn watch(bytes: impl Fn() -> u64, seconds: u32, goes_on: impl Fn() -> bool) -> Result<Figures> {
    let (before, bytes_before, started) = (Spent::read()?, bytes(), Instant::now());
    let end = started + Duration::from_secs(seconds.into());
    while Instant::now() < end && goes_on() {
        thread::sleep(Duration::from_millis(20));
    }
    Ok(Figures {
        bytes: bytes() - bytes_before,
        seconds: started.elapsed().as_secs_f64(),
        spent: Spent::read()?.since(&before),
        ..Figures::default()
    })
}

/// The same with a Linux in user mode for the guest.
fn real_guests(sizes: &Sizes, lanes: &[Lane], record: &mut Record) -> Result<()> {
    let name = |way: Way| format!("{}_linux", way.name());
    for Lane { way, place, .. } in lanes {
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
        linux::prepare(folder.path())?;
        let sandbox = place.sandboxes.first().context("no guest")?;
        let _step = Step::begin(&format!("a real guest by {}", way.name()), 1);
        let reason =
            "this guest is processes of the host, so its time can't be told from the host's";
        record.not_run(&format!("{} cpu", name(*way)), reason);
        let target = Some(world::BEYOND_VETH);
        let mut guest = Linux::start(sandbox, folder.path(), way.name(), target)?;
        guest.wait_ready(Instant::now() + GUEST_PATIENCE)?;
        for _ in 0..sizes.runs {
            for ((write, payload), (port, _)) in WRITES.iter().zip(linux::SIZES) {
                let target = SocketAddrV4::new(world::BEYOND_VETH, port);
                let receiver = socket::Receiver::listen(place.world.beyond(), target)?;
                crate::private_host::wait_until("the guest sends", GUEST_PATIENCE, || {
                    Ok(receiver.bytes() > 0)
                })?;
                thread::sleep(WARM_UP);
                let figures = watch(|| receiver.bytes(), sizes.seconds, || true)?;
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
            SMALL,
            "ebpf_host",
            "kernel_nat",
        ),
        ("stream_64_ebpf_vs_kernel", SMALL, "ebpf_host", "kernel"),
        (
            "stream_64_ebpf_vs_xdp_generic",
            SMALL,
            "ebpf_host",
            "xdp_generic",
        ),
        ("stream_64_xdp_vs_kernel_nat", SMALL, "xdp", "kernel_nat"),
        (
            "stream_16k_ebpf_vs_xdp_generic",
            LARGE,
            "ebpf_host",
            "xdp_generic",
        ),
        (
            "stream_16k_ebpf_vs_kernel_nat",
            LARGE,
            "ebpf_host",
            "kernel_nat",
        ),
    ] {
        record.add_ratio(name, (above, write), (below, write));
        let (above, below) = (format!("{above}_socket"), format!("{below}_socket"));
        record.add_ratio(&format!("{name}_socket"), (&above, write), (&below, write));
    }
}

/// What small writes are compared by, and large ones.
const SMALL: &str = "tcp_64_packets";
const LARGE: &str = "tcp_16k_throughput";

#[expect(
    clippy::cast_precision_loss,
    reason = "bytes of a minute are far below 2^52"
)]
fn precise(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_s_time_is_told_only_where_the_guest_s_is_known() {
        let mut record = Record::new("stream", HostFacts::default(), BTreeMap::new());
        let mut figures = Figures {
            bytes: 125_000_000,
            seconds: 2.0,
            spent: Spent {
                user: 1.0,
                system: 0.5,
                softirq: 0.25,
                ..Spent::default()
            },
            ..Figures::default()
        };
        figures.add(&mut record, "kernel_linux", "64", 64);
        let metrics: Vec<_> = record.rows.iter().map(|row| &*row.metric).collect();
        assert_eq!(
            metrics,
            ["tcp_64_throughput", "tcp_64_packets", "tcp_64_cpu_stolen"]
        );
        figures.guest = Some(0.5);
        figures.add(&mut record, "kernel", "64", 64);
        let median = |metric| record.row("kernel", metric).map(|row| row.median);
        assert_eq!(median("tcp_64_throughput"), Some(500.0));
        assert_eq!(median("tcp_64_cpu_user"), Some(25.0));
        assert_eq!(median("tcp_64_cpu_guest"), Some(25.0));
        assert_eq!(median("tcp_64_host_cpu_per_gigabit"), Some(750.0));
    }
}

//! `sandwire impair` beside the kernel's netem: the same settings and the same traffic on an interface each, at the
//! same time, in a guest with Debian's kernel.
//!
//! Where both mean the same, both have to measure the same. Where they don't, ours has to do what
//! docs/impair-models.md says ("Compared with netem"). The guest is emulated, so the packets are few, the bounds
//! wide, and delays are judged by quartiles, which a stall of the machine doesn't move.

#![allow(
    clippy::unwrap_used,
    reason = "a test ends at the first thing that fails"
)]
#![allow(
    clippy::print_stdout,
    reason = "what was measured is worth reading also where all is well"
)]

use std::{
    collections::BTreeSet,
    fmt,
    net::UdpSocket,
    os::unix::net::UnixStream,
    path::PathBuf,
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

use sandwire_testlab::{
    command,
    guest::kernel::Series,
    lab::{self, Lab},
    namespace, sandwire,
};
use serde_json::Value;

const MILLISECOND: Duration = Duration::from_millis(1);
/// When nothing has come for so long after the last was sent, nothing more comes.
const SILENCE: Duration = Duration::from_millis(1500);
/// Milliseconds by which a packet may be early: one comes, for the engine, when the breath begins that reads it, and a
/// breath takes long in an emulated guest.
const BREATH: f64 = 20.0;
/// Ethernet, IPv4 and UDP headers.
const HEADERS: usize = 14 + 20 + 8;

/// Two hosts behind veths, `netem` and `ours`, each with a socket there and one here, and our service.
struct World<'a> {
    lab: &'a Lab,
    netem: Pair,
    ours: Pair,
    service: Child,
    folder: PathBuf,
}

/// A socket there and one here.
struct Pair {
    far: UdpSocket,
    near: UdpSocket,
}

impl Pair {
    /// Neighbours are known and IPv6 is silent, so that the impaired packets are those of the tests.
    fn make(lab: &Lab, name: &str, network: &str) -> Self {
        lab.shell(&format!(
            "ip netns add {name}
             ip link add {name} address 02:00:00:00:09:01 type veth \
                peer name eth0 address 02:00:00:00:09:02 netns {name}
             ip link set {name} addrgenmode none; ip -n {name} link set eth0 addrgenmode none
             ip addr add {network}.1/24 dev {name}; ip link set {name} up
             ip -n {name} addr add {network}.2/24 dev eth0; ip -n {name} link set eth0 up
             ip neigh add {network}.2 lladdr 02:00:00:00:09:02 dev {name}
             ip -n {name} neigh add {network}.1 lladdr 02:00:00:00:09:01 dev eth0",
        ));
        let (here, there) = (format!("{network}.1:7000"), format!("{network}.2:7000"));
        let path = namespace::path_of(name);
        let far = namespace::inside(&path, || Ok(UdpSocket::bind(&there)?)).unwrap();
        let near = UdpSocket::bind(&here).unwrap();
        far.connect(&here).unwrap();
        near.connect(&there).unwrap();
        Self { far, near }
    }
}

impl<'a> World<'a> {
    fn start(lab: &'a Lab) -> Self {
        let folder = lab.folder().join("impair");
        let service = Command::new(sandwire::executable().unwrap())
            .args(["impair", "serve", "--folder"])
            .arg(&folder)
            .spawn()
            .unwrap();
        let world = Self {
            lab,
            netem: Pair::make(lab, "netem", "10.9.0"),
            ours: Pair::make(lab, "ours", "10.9.1"),
            service,
            folder,
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        while UnixStream::connect(world.folder.join("control.sock")).is_err() {
            assert!(Instant::now() < deadline, "the service does not listen");
            thread::sleep(10 * MILLISECOND);
        }
        world
    }

    /// The same traffic from both hosts at the same time, so that whatever the machine does meanwhile it does to
    /// both: under netem, and under ours.
    fn compare(&self, netem: &str, ours: &str, traffic: Traffic) -> [Measured; 2] {
        self.set("--egress", ours);
        let netem_line = format!("tc -n netem qdisc add dev eth0 root netem {netem}");
        self.lab.run(&netem_line);
        let [first, second] = thread::scope(|scope| {
            [&self.netem, &self.ours]
                .map(|pair| scope.spawn(|| traffic.run(&pair.far, &pair.near)))
                .map(|running| running.join().unwrap())
        });
        self.lab.run("tc -n netem qdisc del dev eth0 root");
        println!("netem     {netem}: {first}");
        println!("sandwire  {ours}: {second}");
        [first, second]
    }

    /// What the service says that it dropped, by cause.
    fn dropped(&self) -> Value {
        let shown: Value = serde_json::from_str(&self.verb(&["show", "--json"])).unwrap();
        shown[0]["egress"]["line"]["rules"][0]["dropped"].clone()
    }

    fn set(&self, direction: &str, settings: &str) {
        let rule = format!("seed 4; match protocol=udp {settings}");
        self.verb(&["--netns", "ours", direction, &rule]);
    }

    fn clear(&self) {
        self.verb(&["clear", "--all"]);
        let deadline = Instant::now() + Duration::from_secs(30);
        while self.verb(&["show"]) != "nothing is impaired\n" {
            assert!(Instant::now() < deadline, "the detour stays");
            thread::sleep(10 * MILLISECOND);
        }
    }

    #[track_caller]
    fn verb(&self, arguments: &[&str]) -> String {
        let mut verb = Command::new(sandwire::executable().unwrap());
        verb.arg("impair").args(arguments);
        command::output_of(verb.env("SANDWIRE_IMPAIR_FOLDER", &self.folder))
            .unwrap_or_else(|error| panic!("{error:#}"))
    }
}

impl Drop for World<'_> {
    fn drop(&mut self) {
        let _ = self.service.kill();
        let _ = self.service.wait();
    }
}

/// Numbered datagrams at a steady pace.
#[derive(Clone, Copy)]
struct Traffic {
    count: u32,
    gap: Duration,
    /// Of a datagram, without headers.
    bytes: usize,
}

impl Traffic {
    fn paced(count: u32, gap: Duration) -> Self {
        Self {
            count,
            gap,
            bytes: 64,
        }
    }

    fn run(self, from: &UdpSocket, to: &UdpSocket) -> Measured {
        to.set_read_timeout(Some(SILENCE)).unwrap();
        let (sent, came) = thread::scope(|scope| {
            let sending = scope.spawn(|| self.send(from));
            let (mut came, mut bytes) = (Vec::new(), vec![0; self.bytes]);
            loop {
                let over = sending.is_finished();
                match to.recv(&mut bytes) {
                    Ok(_) => {
                        let number = u32::from_be_bytes(bytes[..4].try_into().unwrap());
                        came.push((number, Instant::now()));
                    }
                    Err(_) if over => break,
                    Err(_) => {}
                }
            }
            (sending.join().unwrap(), came)
        });
        Measured {
            traffic: self,
            sent,
            came,
        }
    }

    fn send(self, from: &UdpSocket) -> Vec<Instant> {
        let start = Instant::now();
        let mut datagram = vec![0; self.bytes];
        let send = |number: u32| {
            let due = start + number * self.gap;
            thread::sleep(due.saturating_duration_since(Instant::now()));
            datagram[..4].copy_from_slice(&number.to_be_bytes());
            let now = Instant::now();
            from.send(&datagram).unwrap();
            now
        };
        (0..self.count).map(send).collect()
    }
}

/// What was sent when, and what came when.
struct Measured {
    traffic: Traffic,
    sent: Vec<Instant>,
    came: Vec<(u32, Instant)>,
}

impl Measured {
    /// Number and delay in milliseconds of each that came, in this order, without copies.
    fn first(&self) -> Vec<(u32, f64)> {
        let mut seen = BTreeSet::new();
        let firsts = self.came.iter().filter(|(number, _)| seen.insert(*number));
        let delay = |number: u32, at: Instant| at - self.sent[number as usize];
        firsts
            .map(|&(number, at)| (number, delay(number, at).as_secs_f64() * 1e3))
            .collect()
    }

    fn lost(&self) -> BTreeSet<u32> {
        let came: BTreeSet<u32> = self.came.iter().map(|(number, _)| *number).collect();
        let sent = 0..self.traffic.count;
        sent.filter(|number| !came.contains(number)).collect()
    }

    /// Of all that were sent, this many.
    #[allow(clippy::cast_precision_loss, reason = "a few hundred packets")]
    fn share(&self, packets: usize) -> f64 {
        packets as f64 / f64::from(self.traffic.count)
    }

    fn loss(&self) -> f64 {
        self.share(self.lost().len())
    }

    fn copies(&self) -> f64 {
        self.share(self.came.len() - self.first().len())
    }

    /// Those that came after a later one (RFC 4737 §3).
    fn late(&self) -> f64 {
        let mut latest = 0;
        let late = self.first().into_iter().filter(|&(number, _)| {
            let late = number < latest;
            latest = latest.max(number);
            late
        });
        self.share(late.count())
    }

    /// Those that took less than so many milliseconds.
    fn quick(&self, limit: f64) -> f64 {
        let all = self.first();
        self.share(all.iter().filter(|(_, delay)| *delay < limit).count())
    }

    /// Least, first quartile, median, third quartile of the delays in milliseconds.
    fn quartiles(&self) -> [f64; 4] {
        let mut delays: Vec<f64> = self.first().iter().map(|(_, delay)| *delay).collect();
        delays.sort_by(f64::total_cmp);
        let last = delays.len().saturating_sub(1);
        [0, 1, 2, 3].map(|quarter| delays.get(last * quarter / 4).copied().unwrap_or(0.0))
    }

    /// Mean and standard deviation of the delays in milliseconds.
    fn mean(&self) -> (f64, f64) {
        let delays: Vec<f64> = self.first().iter().map(|(_, delay)| *delay).collect();
        let number = f64::from(u32::try_from(delays.len().max(1)).unwrap());
        let mean = delays.iter().sum::<f64>() / number;
        let squares = delays.iter().map(|delay| (delay - mean).powi(2));
        (mean, (squares.sum::<f64>() / number).sqrt())
    }

    /// Bits of whole frames per second while eight packets came, the median.
    fn rate(&self) -> f64 {
        let frames = f64::from(u32::try_from((self.traffic.bytes + HEADERS) * 8).unwrap());
        let times: Vec<Instant> = self.came.iter().map(|(_, at)| *at).collect();
        let taken = times.windows(9).map(|window| window[8] - window[0]);
        let mut taken: Vec<f64> = taken.map(|taken| taken.as_secs_f64()).collect();
        taken.sort_by(f64::total_cmp);
        let median = taken.get(taken.len() / 2);
        median.map_or(0.0, |median| 8.0 * frames / median)
    }
}

impl fmt::Display for Measured {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [least, lower, median, upper] = self.quartiles();
        let (mean, deviation) = self.mean();
        write!(
            formatter,
            "{} sent, {} came, lost {:.1}%, copies {:.1}%, late {:.1}%, {:.0} kbit/s; \
             ms: least {least:.1}, quartiles {lower:.1} {median:.1} {upper:.1}, mean {mean:.1} ± {deviation:.1}",
            self.sent.len(),
            self.came.len(),
            self.loss() * 1e2,
            self.copies() * 1e2,
            self.late() * 1e2,
            self.rate() / 1e3,
        )
    }
}

/// Whether both figures are as far from what was asked for as this, at most; else what is wrong.
fn both_are(what: &str, figures: [f64; 2], wanted: f64, tolerance: f64) -> Result<(), String> {
    println!(
        "          {what}: netem {:.3}, sandwire {:.3}",
        figures[0], figures[1]
    );
    if figures
        .iter()
        .all(|figure| (figure - wanted).abs() <= tolerance)
    {
        return Ok(());
    }
    Err(format!("{what}: {figures:?}, not {wanted} ± {tolerance}"))
}

#[track_caller]
fn assert_both(what: &str, figures: [f64; 2], wanted: f64, tolerance: f64) {
    both_are(what, figures, wanted, tolerance).unwrap_or_else(|wrong| panic!("{wrong}"));
}

/// For what measures time: an emulated guest that the machine leaves none is late with everything, by chance. What is
/// wrong of itself is so each time.
#[track_caller]
fn assert_once_of_four(measure: impl Fn() -> Result<(), String>) {
    for _ in 0..3 {
        match measure() {
            Ok(()) => return,
            Err(wrong) => println!("once more: {wrong}"),
        }
    }
    measure().unwrap_or_else(|wrong| panic!("{wrong}"));
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn impair_measures_as_netem_does_or_differs_as_documented() {
    lab::run_on(Series::Linux6_1, Duration::from_secs(900), |lab| {
        let world = World::start(lab);
        let plain = Traffic::paced(100, 5 * MILLISECOND).run(&world.ours.far, &world.ours.near);
        println!("nothing: {plain}");
        assert!(plain.loss() == 0.0 && plain.late() == 0.0, "{plain}");
        // What counts packets before what measures time.
        loss_and_duplication_differ(&world);
        shares_agree(&world);
        limits_differ(&world);
        order_differs(&world);
        rates_agree(&world);
        delays_agree(&world);
        directions_differ(&world);
    });
}

/// At a pace at which no packet can overtake another.
fn delays_agree(world: &World<'_>) {
    let traffic = Traffic::paced(200, 21 * MILLISECOND);
    assert_once_of_four(|| {
        let both = world.compare("delay 50ms 10ms", "delay 50ms 10ms", traffic);
        let all = both.map(|measured| measured.quartiles());
        for [least, ..] in all {
            assert!(least >= 40.0 - BREATH, "too early: {all:?}");
        }
        both_are("median delay", all.map(|all| all[2]), 50.0, 6.0)?;
        // Half of what is uniform over 20 ms lies within 10 ms.
        both_are("its spread", all.map(|all| all[3] - all[1]), 10.0, 3.5)
    });
}

/// Five standard deviations of a share of 10% of 600 packets are 6.1%.
fn shares_agree(world: &World<'_>) {
    let traffic = Traffic::paced(600, 2 * MILLISECOND);
    // A rule that goes on counts on: for the same numbers both runs have to begin with a new one.
    world.clear();
    let [netem, ours] = world.compare("loss 10%", "loss 10%", traffic);
    assert_both("loss", [netem.loss(), ours.loss()], 0.1, 0.061);
    world.clear();
    let [again, ours_again] = world.compare("loss 10%", "loss 10%", traffic);
    // The same seed loses the same packets; netem draws anew.
    assert_eq!(ours.lost(), ours_again.lost());
    assert_ne!(netem.lost(), again.lost());

    let both = world.compare("duplicate 10%", "duplicate 10%", traffic);
    let copies = [0, 1].map(|which| both[which].copies());
    assert_both("copies", copies, 0.1, 0.061);
    assert_both("loss", both.map(|measured| measured.loss()), 0.0, 0.0);
}

/// Both count the frame with its Ethernet header, and add what was said.
fn rates_agree(world: &World<'_>) {
    let traffic = Traffic {
        count: 90,
        gap: Duration::ZERO,
        bytes: 1000,
    };
    assert_once_of_four(|| {
        let both = world.compare("rate 1mbit", "rate 1mbit", traffic);
        let rates = [0, 1].map(|which| both[which].rate());
        assert_both("loss", both.map(|measured| measured.loss()), 0.0, 0.0);
        both_are("rate", rates, 1e6, 0.1e6)
    });
    // 250 more make 1292 bytes of 1042.
    assert_once_of_four(|| {
        let both = world.compare("rate 1mbit 250", "rate 1mbit overhead 250", traffic);
        let rates = both.map(|measured| measured.rate());
        both_are("rate with overhead", rates, 1042e6 / 1292.0, 0.07e6)
    });
}

/// Jitter reorders under netem, and here only if so asked. What is chosen for reordering is early there, late here.
fn order_differs(world: &World<'_>) {
    let dense = Traffic::paced(300, 5 * MILLISECOND);
    let median = |measured: &Measured| measured.quartiles()[2];
    assert_once_of_four(|| {
        let [netem, kept] = world.compare("delay 50ms 20ms", "delay 50ms 20ms", dense);
        assert!(netem.late() > 0.2, "{netem}");
        assert!(kept.late() == 0.0, "{kept}");
        // Order is paid for with delay.
        let is_paid = median(&kept) > median(&netem) + 2.0;
        is_paid.then_some(()).ok_or(format!("{netem}; {kept}"))
    });
    assert_once_of_four(|| {
        let [netem, any] = world.compare("delay 50ms 20ms", "delay 50ms 20ms order any", dense);
        let medians = [median(&netem), median(&any)];
        both_are("median delay, any order", medians, 50.0, 8.0)?;
        assert!(any.late() > 0.2, "{any}");
        assert!((netem.late() - any.late()).abs() < 0.2, "{netem}; {any}");
        Ok(())
    });

    let reorder = "delay 50ms reorder 10%";
    let traffic = Traffic::paced(300, 10 * MILLISECOND);
    let [netem, ours] = world.compare(reorder, reorder, traffic);
    // Five standard deviations of 10% of 300 packets are 8.7%.
    let chosen = [netem.quick(30.0), ours.late()];
    assert_both("chosen for reordering", chosen, 0.1, 0.087);
    assert!(ours.quick(50.0 - BREATH) == 0.0, "{ours}");
    assert!(netem.late() > 1.5 * ours.late(), "{netem}; {ours}");
}

/// All that is under way counts against netem's limit, and what that drops is lost without a cause.
fn limits_differ(world: &World<'_>) {
    let traffic = Traffic::paced(200, 2 * MILLISECOND);
    let [netem, ours] = world.compare("delay 500ms limit 50", "delay 500ms", traffic);
    assert!(netem.loss() > 0.5, "{netem}");
    assert!(ours.loss() == 0.0, "{ours}");
    // Where a limit was asked for, both drop; here that is no loss.
    let traffic = Traffic {
        count: 90,
        gap: Duration::ZERO,
        bytes: 1000,
    };
    let queue = ["rate 1mbit limit 20", "rate 1mbit limit 20 packets"];
    assert_once_of_four(|| {
        world.clear();
        let both = world.compare(queue[0], queue[1], traffic);
        let dropped = world.dropped();
        assert_eq!(dropped["queue_full"], both[1].lost().len(), "{dropped}");
        assert!(dropped.get("loss").is_none(), "{dropped}");
        let came = [0, 1].map(|which| both[which].share(both[which].came.len()) * 90.0);
        // Beside the 20, what has left while the burst came: an emulated guest needs some time for it.
        both_are("through a queue of 20", came, 27.0, 8.0)
    });
}

/// netem first doubles, then takes one of the two away.
fn loss_and_duplication_differ(world: &World<'_>) {
    let traffic = Traffic::paced(50, 2 * MILLISECOND);
    let settings = "loss 100% duplicate 100%";
    let [netem, ours] = world.compare(settings, settings, traffic);
    assert!(netem.loss() == 0.0 && netem.copies() == 0.0, "{netem}");
    assert_eq!(ours.came.len(), 0, "{ours}");
}

/// netem has what leaves the interface only. Ours has each direction for itself.
fn directions_differ(world: &World<'_>) {
    let traffic = Traffic::paced(50, 5 * MILLISECOND);
    world.clear();
    world.set("--ingress", "delay 50ms");
    world
        .lab
        .run("tc -n netem qdisc add dev eth0 root netem delay 50ms");
    let median = |from, to| traffic.run(from, to).quartiles()[2];
    assert_once_of_four(|| {
        let (netem, ours) = (&world.netem, &world.ours);
        let netem = [
            median(&netem.near, &netem.far),
            median(&netem.far, &netem.near),
        ];
        let ours = [median(&ours.near, &ours.far), median(&ours.far, &ours.near)];
        println!("in and out: netem {netem:.1?}, sandwire --ingress {ours:.1?}");
        both_are("delayed", [netem[1], ours[0]], 50.0, 8.0)?;
        let is_undelayed = netem[0] < 25.0 && ours[1] < 25.0;
        let wrong = format!("delayed the other way too: {netem:?} {ours:?}");
        is_undelayed.then_some(()).ok_or(wrong)
    });
}

//! What an identity adds to a datagram of UDP, and how soon a server on the wildcard receives at all its addresses.
//!
//! A process beyond the wire and the server send each other datagrams in batches, on one processor, which no other is
//! awake on: what the kernel does until a datagram is in the other's queue, it does within the sender's call, and so the
//! call's time is the datagram's whole cost. The queue is emptied, and counted, when the clock stands.

use std::{
    io::ErrorKind,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use super::{
    Extent,
    caller::Caller,
    load::say,
    place::{Case, Place},
};
use crate::{cpu, progress::Step, record::Record, statistics::median, world};

/// Datagrams of a batch: they fit into a socket's queue as it is by default.
const BATCH: u32 = 100;
/// Who is measured listens here.
const PORT: u16 = 5001;
/// A server of the host's beside an identity whose port that is.
const BESIDE: u16 = 5002;
/// Where sockets come and go.
const NEW: u16 = 5003;
/// Between two datagrams of those who wait for a server.
const PACE: Duration = Duration::from_micros(100);
/// The daemon rests after it has looked for new sockets, and is at rest by then.
const REST: Duration = Duration::from_millis(250);
/// Whoever waits longer for a datagram waits in vain.
const PATIENCE: Duration = Duration::from_secs(5);
/// Directions, as seen from the server.
const WAYS: [&str; 2] = ["in", "out"];

fn rounds(extent: &Extent) -> u32 {
    if extent.is_quick() { 50 } else { 1000 }
}

fn servers(extent: &Extent) -> u32 {
    if extent.is_quick() { 10 } else { 100 }
}

/// Datagrams of each row in each direction.
pub(super) fn count(extent: &Extent) -> u64 {
    u64::from(BATCH * rounds(extent))
}

pub(super) fn measure(extent: &Extent, record: &mut Record) -> Result<()> {
    let bare = Place::create(Case::Bare)?;
    let identity = Place::create(Case::Identity)?;
    let several = Place::of_several_addresses()?;
    let mut lanes = vec![
        Lane::start("bare", &bare)?,
        Lane::start("identity", &identity)?,
    ];
    match Lane::start("identity_several", &several) {
        Ok(lane) => {
            lanes.push(lane);
            lanes.push(Lane::start_beside("host_beside_several", &several)?);
            if let Err(error) = receive(extent, &several, record) {
                record.not_run("identity_several_receives", &format!("{error:#}"));
            }
        }
        Err(error) => record.not_run("identity_several", &format!("{error:#}")),
    }
    exchange(extent, lanes, record)
}

/// A server, and who is beyond the wire.
struct Lane {
    row: &'static str,
    target: SocketAddr,
    server: Caller,
    beyond: Caller,
    /// What a datagram took in each round so far, in microseconds.
    times: Vec<f64>,
}

impl Lane {
    /// With a server where the place has it.
    fn start(row: &'static str, place: &Place) -> Result<Self> {
        let server = place.server_command(&format!("datagrams {PORT}"))?;
        Self::with(row, place, place.target(PORT), server)
    }

    /// With one of the host's own, where the place has an identity.
    fn start_beside(row: &'static str, place: &Place) -> Result<Self> {
        let target = SocketAddr::from((world::HOST_ADDRESS, BESIDE));
        let server = place.host_command(&format!("datagrams {BESIDE}"))?;
        Self::with(row, place, target, server)
    }

    fn with(row: &'static str, place: &Place, target: SocketAddr, server: Command) -> Result<Self> {
        let port = target.port();
        let mut lane = Self {
            row,
            target,
            server: Caller::start(server, row)?,
            beyond: Caller::start(place.client_command(&format!("datagrams {port}"))?, row)?,
            times: Vec::new(),
        };
        lane.wait()?;
        Ok(lane)
    }

    /// Until the server is there and receives at the address.
    fn wait(&mut self) -> Result<()> {
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            if self.batch("in").is_ok() {
                return Ok(());
            }
            thread::sleep(REST);
        }
        self.batch("in").map(drop)
    }

    /// The middle of a batch's times, in microseconds.
    fn batch(&mut self, way: &str) -> Result<f64> {
        let beyond = SocketAddr::from((world::BEYOND_VETH, self.target.port()));
        let (sender, receiver, target) = match way {
            "in" => (&mut self.beyond, &mut self.server, self.target),
            _ => (&mut self.server, &mut self.beyond, beyond),
        };
        let time = sender.ask(&format!("send {target}"))?;
        let come = receiver.ask("drain")?;
        ensure!(
            come == f64::from(BATCH),
            "of {BATCH} datagrams to {target}, {come} came to row {}",
            self.row
        );
        Ok(time)
    }
}

/// Batches of all rows, in turn. A row that loses a datagram takes part no more, and the record says so: what an identity
/// costs is known although one of several addresses lost something. All are compared with the first.
fn exchange(extent: &Extent, mut lanes: Vec<Lane>, record: &mut Record) -> Result<()> {
    let rounds = rounds(extent);
    for way in WAYS {
        let step = Step::begin(&format!("datagrams {way}"), rounds);
        for lane in &mut lanes {
            lane.times.clear();
        }
        for round in 0..rounds {
            let mut order: Vec<usize> = (0..lanes.len()).collect();
            // Who comes first has a warmer or a colder cache: that must not always be the same one.
            order.rotate_left(round as usize % lanes.len());
            for place in order {
                let lane = &mut lanes[place];
                match lane.batch(way) {
                    Ok(time) => lane.times.push(time),
                    Err(error) if place > 0 => record.not_run(lane.row, &format!("{error:#}")),
                    Err(error) => return Err(error),
                }
            }
            lanes.retain(|lane| lane.times.len() > round as usize);
            step.at(round);
        }
        compare(way, &lanes, record);
    }
    Ok(())
}

/// What each row adds to the first, round by round.
fn compare(way: &str, lanes: &[Lane], record: &mut Record) {
    for lane in lanes {
        record.add(lane.row, &format!("datagram_{way}_us"), "us", &lane.times);
    }
    for lane in &lanes[1..] {
        let pairs = lane.times.iter().zip(&lanes[0].times);
        let added: Vec<f64> = pairs.map(|(own, first)| own - first).collect();
        let name = format!("{}_datagram_{way}_added_us", lane.row);
        record.add("by_round", &name, "us", &added);
        record.insert_ratio(&name, median(&added).unwrap_or(f64::NAN));
    }
}

/// From a server's `bind` on the wildcard until it has the first of the datagrams that come to a further address all the time.
fn receive(extent: &Extent, place: &Place, record: &mut Record) -> Result<()> {
    let row = "identity_several";
    let servers = servers(extent);
    let step = Step::begin("servers of UDP", servers);
    let target = place.target(NEW);
    let mut server = Caller::start(
        place.server_command(&format!("datagrams {}", NEW + 1))?,
        row,
    )?;
    let mut flood = Caller::start(place.client_command(&format!("flood {target}"))?, row)?;
    // It has begun.
    flood.ask("")?;
    let mut times = Vec::new();
    for number in 0..servers {
        thread::sleep(REST);
        times.push(server.ask("serve")?);
        step.at(number);
    }
    record.add(row, "receives_after_ms", "ms", &times);
    let name = "identity_several_receives_after_ms";
    record.insert_ratio(name, median(&times).unwrap_or(f64::NAN));
    record.note(
        name,
        "from bind until a datagram to a further address is there; one is sent each 0.1 ms or a bit more",
    );
    Ok(())
}

/// The process at either end: a batch is sent, or received, at each word.
pub(super) fn stand_in(port: u16) -> Result<()> {
    cpu::pin(0)?;
    let socket = bound_to(port)?;
    for line in std::io::stdin().lines() {
        let line = line.context("cannot read what to do")?;
        let figure = match line.split_once(' ') {
            Some(("send", target)) => send(&socket, target.parse()?)?,
            None if line == "drain" => f64::from(drain(&socket)?),
            None if line == "serve" => serve()?,
            _ => bail!("'{line}' can't be done"),
        };
        say(&format!("{figure}"))?;
    }
    Ok(())
}

fn bound_to(port: u16) -> Result<UdpSocket> {
    UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))
        .with_context(|| format!("cannot bind UDP to port {port}"))
}

fn send(socket: &UdpSocket, target: SocketAddr) -> Result<f64> {
    let mut times = Vec::new();
    for _ in 0..BATCH {
        let begun = Instant::now();
        let sent = socket.send_to(&[0; 64], target);
        times.push(begun.elapsed().as_secs_f64() * 1e6);
        sent.with_context(|| format!("cannot send to {target}"))?;
    }
    median(&times).context("no datagrams")
}

/// Takes what has come, and says how much that was.
fn drain(socket: &UdpSocket) -> Result<u32> {
    socket.set_nonblocking(true)?;
    let mut come = 0;
    loop {
        match socket.recv(&mut [0; 64]) {
            Ok(_) => come += 1,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(error).context("cannot receive"),
        }
    }
    socket.set_nonblocking(false)?;
    Ok(come)
}

/// A server that comes, hears something, and goes: how many milliseconds that took.
fn serve() -> Result<f64> {
    let begun = Instant::now();
    let socket = bound_to(NEW)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.recv(&mut [0; 64]).context("nothing came")?;
    Ok(begun.elapsed().as_secs_f64() * 1e3)
}

/// The process that sends all the time, whether or not anybody is there.
pub(super) fn flood(target: SocketAddr) -> Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).context("cannot bind UDP")?;
    say("0")?;
    loop {
        // Nobody is at that port at times, which isn't told to a socket that isn't connected.
        socket
            .send_to(&[0; 64], target)
            .with_context(|| format!("cannot send to {target}"))?;
        thread::sleep(PACE);
    }
}

//! Requests and answers of one byte over many connections: the server, the client, and what they took.
//!
//! Both are processes with the same number of threads, each of which waits for all its connections at once. The client
//! measures, once everything is warm.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process::{Child, ChildStdout, Command, Stdio},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use rustix::{
    buffer::spare_capacity,
    event::epoll::{self, CreateFlags, EventData, EventFlags},
};

use super::{Extent, Size, place::Place};
use crate::cpu::{self, Spent};

/// Before the measured time.
const WARM_UP: Duration = Duration::from_millis(200);
/// How often threads look whether it is over.
const LOOK: rustix::time::Timespec = rustix::time::Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};
const EVENTS: usize = 64;

/// What the measured time brought.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figures {
    pub(super) seconds: f64,
    transactions: f64,
    /// Seconds of processors that both processes had.
    pub(super) cpu: f64,
    pub(super) user: f64,
    pub(super) system: f64,
    /// What the whole machine did, others included.
    pub(super) machine: Spent,
}

impl Figures {
    /// Transactions per second.
    pub(super) fn rate(&self) -> f64 {
        self.transactions / self.seconds
    }

    /// The same for each hundredth of a processor that was used.
    pub(super) fn per_cpu_percent(&self) -> f64 {
        self.rate() / (self.cpu / self.seconds * 100.0)
    }
}

/// A running server. It is killed when dropped.
pub(super) struct Server {
    child: Child,
}

impl Server {
    /// Starts it where the place has it.
    pub(super) fn start(place: &Place, size: Size) -> Result<Self> {
        let Size { flows, threads } = size;
        let words = format!("server {} {flows} {threads}", place.listens_at());
        let mut command = place.server_command(&words)?;
        let mut child = command
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the server")?;
        let lines = child.stdout.take().context("a pipe was asked for")?;
        let server = Self { child };
        expect(&mut BufReader::new(lines), "ready")?;
        Ok(server)
    }

    /// Has a client call for a while.
    pub(super) fn measure(&self, place: &Place, size: Size, extent: &Extent) -> Result<Figures> {
        let Size { flows, threads } = size;
        let words = format!(
            "client {} {flows} {threads} {} {}",
            place.target(),
            extent.milliseconds(),
            self.child.id()
        );
        let mut command = place.client_command(&words)?;
        let mut client = Running(
            command
                .stdout(Stdio::piped())
                .spawn()
                .context("cannot start the client")?,
        );
        let lines = client.0.stdout.take().context("a pipe was asked for")?;
        let said = line(&mut BufReader::new(lines))?;
        let words: Result<Vec<f64>, _> = said.split(' ').map(str::parse).collect();
        let Ok([transactions, seconds, cpu, user, system, rest @ ..]) = words.as_deref() else {
            bail!("the client says '{said}'");
        };
        let [machine_user, machine_system, softirq] = *rest else {
            bail!("the client says '{said}'");
        };
        ensure!(*transactions > 0.0, "no request was answered");
        Ok(Figures {
            seconds: *seconds,
            transactions: *transactions,
            cpu: *cpu,
            user: *user,
            system: *system,
            machine: Spent {
                user: machine_user,
                system: machine_system,
                softirq,
                ..Spent::default()
            },
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

/// A client that ends with this value.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        end(&mut self.0);
    }
}

fn end(child: &mut Child) {
    // Already ended, or ended here: there is nobody to tell.
    let _ = child.kill();
    let _ = child.wait();
}

/// What processes have used so far.
struct Used {
    total: Duration,
    user: Duration,
    system: Duration,
    machine: Spent,
}

impl Used {
    fn read(processes: &[u32]) -> Result<Self> {
        let mut used = Self {
            total: Duration::ZERO,
            user: Duration::ZERO,
            system: Duration::ZERO,
            machine: Spent::read()?,
        };
        for process in processes {
            used.total += cpu::process_time(*process)?;
            let path = format!("/proc/{process}/stat");
            let text =
                std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
            let (user, system) = cpu::of_thread(&text).context("/proc has another form")?;
            used.user += user;
            used.system += system;
        }
        Ok(used)
    }
}

/// The next line of a process.
pub(super) fn line(lines: &mut BufReader<ChildStdout>) -> Result<String> {
    let mut line = String::new();
    lines
        .read_line(&mut line)
        .context("cannot read what a process says")?;
    ensure!(!line.is_empty(), "a process ended early");
    Ok(line.trim().to_owned())
}

/// Waits for a line that must be this one.
pub(super) fn expect(lines: &mut BufReader<ChildStdout>, expected: &str) -> Result<()> {
    let found = line(lines)?;
    ensure!(
        found == expected,
        "a process says '{found}' instead of '{expected}'"
    );
    Ok(())
}

/// This executable as one of the stand-ins, behind what `front` does first.
pub(super) fn stand_in(mut front: Command, words: &str) -> Command {
    front
        .args(["bench", "rr", "--stand-in", words])
        .stderr(Stdio::inherit());
    front
}

pub(super) fn say(line: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").context("cannot say how far it is")?;
    out.flush().context("cannot say how far it is")
}

/// The server: one set of connections after the other, until it is killed.
pub(super) fn serve(address: SocketAddr, flows: usize, threads: usize) -> Result<()> {
    let listener = TcpListener::bind(address).context("cannot listen")?;
    say("ready")?;
    loop {
        let mut shares = shares(threads);
        for number in 0..flows {
            let (stream, _) = listener.accept().context("cannot accept")?;
            stream.set_nodelay(true)?;
            shares[number % threads].push(stream);
        }
        thread::scope(|scope| {
            for mut share in shares {
                // A connection that is cut off is the client's end.
                scope.spawn(move || turn(&mut share, None, &AtomicU64::new(0)));
            }
        });
    }
}

/// The client: connects, calls until everything is warm, and says what came of the measured time.
pub(super) fn call(
    address: SocketAddr,
    flows: usize,
    threads: usize,
    milliseconds: u64,
    server: u32,
) -> Result<()> {
    let processes = [server, std::process::id()];
    let mut shares = shares(threads);
    for number in 0..flows {
        let stream = TcpStream::connect(address).context("cannot connect")?;
        stream.set_nodelay(true)?;
        shares[number % threads].push(stream);
    }
    let stop = AtomicBool::new(false);
    let counts: Vec<AtomicU64> = shares.iter().map(|_| AtomicU64::new(0)).collect();
    let total = || -> u64 {
        counts
            .iter()
            .map(|count| count.load(Ordering::Relaxed))
            .sum()
    };
    thread::scope(|scope| {
        let (stop, counts) = (&stop, &counts);
        for (mut share, count) in shares.into_iter().zip(counts) {
            scope.spawn(move || {
                for stream in &mut share {
                    stream.write_all(&[1])?;
                }
                turn(&mut share, Some(stop), count)
            });
        }
        thread::sleep(WARM_UP);
        let said = measured(&processes, Duration::from_millis(milliseconds), total);
        stop.store(true, Ordering::Relaxed);
        say(&said?)
    })
}

/// What is done within a time: counts and what processes have used are read by one thread, one after the other.
fn measured(processes: &[u32], time: Duration, total: impl Fn() -> u64) -> Result<String> {
    let (before, used_before, begun) = (total(), Used::read(processes)?, Instant::now());
    thread::sleep(time);
    let (after, used, seconds) = (total(), Used::read(processes)?, begun.elapsed());
    let machine = used.machine.since(&used_before.machine);
    Ok(format!(
        "{} {} {} {} {} {} {} {}",
        after - before,
        seconds.as_secs_f64(),
        (used.total - used_before.total).as_secs_f64(),
        (used.user - used_before.user).as_secs_f64(),
        (used.system - used_before.system).as_secs_f64(),
        machine.user,
        machine.system,
        machine.softirq
    ))
}

fn shares(threads: usize) -> Vec<Vec<TcpStream>> {
    (0..threads).map(|_| Vec::new()).collect()
}

/// Answers each byte by one, until it is time or until all connections have ended.
fn turn(
    streams: &mut [TcpStream],
    stop: Option<&AtomicBool>,
    count: &AtomicU64,
) -> std::io::Result<()> {
    let poller = epoll::create(CreateFlags::CLOEXEC)?;
    for (place, stream) in streams.iter().enumerate() {
        let data = EventData::new_u64(place as u64);
        epoll::add(&poller, stream, data, EventFlags::IN)?;
    }
    let mut open = streams.len();
    let mut events = Vec::with_capacity(EVENTS);
    let mut byte = [0];
    while open > 0 && !stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
        events.clear();
        epoll::wait(&poller, spare_capacity(&mut events), Some(&LOOK))?;
        let mut done = 0;
        for event in &events {
            let place = usize::try_from(event.data.u64()).unwrap_or(usize::MAX);
            let Some(stream) = streams.get_mut(place) else {
                continue;
            };
            if !matches!(stream.read(&mut byte), Ok(1)) {
                epoll::delete(&poller, &*stream)?;
                open -= 1;
                continue;
            }
            stream.write_all(&byte)?;
            done += 1;
        }
        count.fetch_add(done, Ordering::Relaxed);
    }
    Ok(())
}

//! Requests and answers of one byte over many connections: the server, the client, and what they took.
//!
//! Both are processes with the same number of threads, each of which waits for all its connections at once. They stay for
//! the whole suite, and are at rest but for short slices, so that all rows are measured within the same moment of a noisy
//! machine. What they used is read when they rest.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{
        Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use rustix::{
    buffer::spare_capacity,
    event::epoll::{self, CreateFlags, EventData, EventFlags},
};

use super::{Size, place::Place};
use crate::{
    cpu::{self, Spent},
    tcp,
};

const PORT: u16 = 5001;
/// How often threads look whether it goes on.
const LOOK: rustix::time::Timespec = rustix::time::Timespec {
    tv_sec: 0,
    tv_nsec: 20_000_000,
};
/// What is on its way at the end of a slice has arrived by then.
const REST: Duration = Duration::from_millis(5);
const EVENTS: usize = 64;

/// What a slice of time brought, or several.
#[derive(Clone, Copy, Debug, Default)]
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

    /// Adds another slice.
    pub(super) fn add(&mut self, other: &Self) {
        self.seconds += other.seconds;
        self.transactions += other.transactions;
        self.cpu += other.cpu;
        self.user += other.user;
        self.system += other.system;
        self.machine.user += other.machine.user;
        self.machine.system += other.machine.system;
        self.machine.softirq += other.machine.softirq;
    }

    /// The same for each hundredth of a processor that was used.
    pub(super) fn per_cpu_percent(&self) -> f64 {
        self.rate() / (self.cpu / self.seconds * 100.0)
    }
}

/// A server and a client with all their connections. They are killed when dropped.
pub(super) struct Pair {
    _server: Running,
    client: Running,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Pair {
    /// Starts them where the place has them.
    pub(super) fn start(place: &Place, size: Size) -> Result<Self> {
        let Size { flows, threads } = size;
        let words = format!("server {PORT} {flows} {threads}");
        let mut server = Running::start(place.server_command(&words)?, "server")?;
        let lines = server.0.stdout.take().context("a pipe was asked for")?;
        expect(&mut BufReader::new(lines), "ready")?;
        let process = server.0.id();
        let words = format!("client {} {flows} {threads} {process}", place.target(PORT));
        let mut client = Running::start(place.client_command(&words)?, "client")?;
        let requests = client.0.stdin.take().context("a pipe was asked for")?;
        let lines = client.0.stdout.take().context("a pipe was asked for")?;
        let mut answers = BufReader::new(lines);
        expect(&mut answers, "ready")?;
        Ok(Self {
            _server: server,
            client,
            requests,
            answers,
        })
    }

    /// Lets them run for a while.
    pub(super) fn slice(&mut self, milliseconds: u32) -> Result<Figures> {
        writeln!(self.requests, "{milliseconds}").context("cannot ask the client")?;
        let said = line(&mut self.answers)
            .with_context(|| format!("the client {} failed", self.client.0.id()))?;
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

/// A process that ends with this value.
struct Running(Child);

impl Running {
    fn start(mut command: Command, what: &str) -> Result<Self> {
        let child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start the {what}"))?;
        Ok(Self(child))
    }
}

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

/// The server, on the wildcard as servers are, until it is killed.
pub(super) fn serve(port: u16, flows: usize, threads: usize) -> Result<()> {
    let listener = tcp::listen((Ipv4Addr::UNSPECIFIED, port).into(), tcp::CUBIC)?;
    say("ready")?;
    let mut shares = shares(threads);
    for number in 0..flows {
        let (stream, _) = listener.accept().context("cannot accept")?;
        stream.set_nodelay(true)?;
        shares[number % threads].push(stream);
    }
    let gate = Gate::new(true);
    thread::scope(|scope| {
        for mut share in shares {
            let gate = &gate;
            // A connection that is cut off is the client's end.
            scope.spawn(move || turn(&mut share, gate, &AtomicU64::new(0)));
        }
    });
    Ok(())
}

/// The client: connects, and calls for as long as each line of its input says.
pub(super) fn call(address: SocketAddr, flows: usize, threads: usize, server: u32) -> Result<()> {
    let processes = [server, std::process::id()];
    let mut shares = shares(threads);
    for number in 0..flows {
        let mut stream = tcp::connect(address, tcp::CUBIC)?;
        stream.set_nodelay(true)?;
        // The first request: an answer to each is on its way from now on.
        stream.write_all(&[1])?;
        shares[number % threads].push(stream);
    }
    let gate = Gate::new(false);
    let counts: Vec<AtomicU64> = shares.iter().map(|_| AtomicU64::new(0)).collect();
    let total = || -> u64 {
        counts
            .iter()
            .map(|count| count.load(Ordering::Relaxed))
            .sum()
    };
    thread::scope(|scope| {
        for (mut share, count) in shares.into_iter().zip(&counts) {
            let gate = &gate;
            scope.spawn(move || turn(&mut share, gate, count));
        }
        let done = say("ready").and_then(|()| {
            std::io::stdin().lines().try_for_each(|line| {
                let milliseconds = line.context("cannot read how long")?.parse()?;
                let time = Duration::from_millis(milliseconds);
                say(&slice(&gate, &processes, time, total)?)
            })
        });
        if let Err(error) = done {
            // Threads that wait at the gate would keep this process; whoever measures sees it end.
            eprintln!("the client ends: {error:#}");
        }
        std::process::exit(1)
    })
}

/// What is done within a slice of time. Processes rest when they are looked at.
fn slice(
    gate: &Gate,
    processes: &[u32],
    time: Duration,
    total: impl Fn() -> u64,
) -> Result<String> {
    let (before, used_before, begun) = (total(), Used::read(processes)?, Instant::now());
    gate.set(true);
    thread::sleep(time);
    gate.set(false);
    let seconds = begun.elapsed();
    thread::sleep(REST);
    let (after, used) = (total(), Used::read(processes)?);
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

/// Where threads wait between slices.
struct Gate {
    is_open: AtomicBool,
    lock: Mutex<()>,
    opened: Condvar,
}

impl Gate {
    fn new(is_open: bool) -> Self {
        Self {
            is_open: AtomicBool::new(is_open),
            lock: Mutex::default(),
            opened: Condvar::new(),
        }
    }

    fn set(&self, is_open: bool) {
        let _held = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_open.store(is_open, Ordering::Relaxed);
        self.opened.notify_all();
    }

    fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Relaxed)
    }

    fn pass(&self) {
        let held = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.opened.wait_while(held, |()| !self.is_open());
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

fn shares(threads: usize) -> Vec<Vec<TcpStream>> {
    (0..threads).map(|_| Vec::new()).collect()
}

/// Answers each byte by one while the gate is open, until all connections have ended.
fn turn(streams: &mut [TcpStream], gate: &Gate, count: &AtomicU64) -> std::io::Result<()> {
    let poller = epoll::create(CreateFlags::CLOEXEC)?;
    for (place, stream) in streams.iter().enumerate() {
        let data = EventData::new_u64(place as u64);
        epoll::add(&poller, stream, data, EventFlags::IN)?;
    }
    let mut open = streams.len();
    let mut events = Vec::with_capacity(EVENTS);
    let mut byte = [0];
    while open > 0 {
        if !gate.is_open() {
            gate.pass();
        }
        events.clear();
        epoll::wait(&poller, spare_capacity(&mut events), Some(&LOOK))?;
        let mut done = 0;
        for event in &events {
            // What isn't read now is told of again.
            if !gate.is_open() {
                break;
            }
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

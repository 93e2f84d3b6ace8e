//! Connecting to where a [`Route`] leads, without blocking and without a thread.
//!
//! A [`Dial`] does all that must happen before bytes of the guest may flow: the connect, the hybrid handshake
//! with a sibling (`CONNECT PORT\n`, `OK PORT\n`), the identity line. It reads exactly to the newline of the
//! answer; what follows belongs to the connection.
//!
//! Use: [`Dial::start`], then [`Dial::advance`] at once. While that says [`Progress::Pending`], wait until
//! [`Dial::fd`] is readable and call it again. That descriptor is the dial's own and stays the same over
//! retries; the connected socket comes with [`Progress::Done`] and is registered nowhere. Whoever dials
//! keeps the deadline ([`crate::limits::Limits::connect_timeout`]) and drops the dial when it is over.
//!
//! A full backlog is tried again for as long as the dial lives. A sibling behind a hybrid VMM that isn't
//! there is tried again for [`SIBLING_PATIENCE`]: it may be booting. One that closes without an answer, as a VMM says
//! that its guest has refused, is asked again [`CLOSES`] times, as it may be a clone that has not yet read its CID: each time is
//! work for that VMM. Everything else that refuses has refused.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, epoll, poll},
    io::Errno,
    net::{
        AddressFamily, SendFlags, SocketFlags, SocketType, connect, send, socket_with, socketpair,
        sockopt,
    },
};
use sandwire_api::vsock::{VsockRefusal, VsockType};

use crate::{
    descriptors,
    directory::{Route, Target},
    hybrid::line::{Heard, Line},
    listener::refuse_descriptors,
    packet::flags,
    place::Spot,
    readiness::{Interest, Timer, timespec},
    socket_file::SocketFile,
    tcp,
    worker::Command,
};

/// How long a sibling behind a hybrid VMM is tried again that isn't there. Less than the two
/// seconds that a Linux guest waits for its own connect.
pub const SIBLING_PATIENCE: Duration = Duration::from_secs(1);
/// How often one that closes without an answer is asked again.
pub const CLOSES: u8 = 2;
/// Pause before the second attempt; doubled for each further one.
const PAUSE_FIRST: Duration = Duration::from_millis(5);
/// Longest pause.
const PAUSE_MAX: Duration = Duration::from_millis(100);
/// Marks of the identity line as a message: it is whole.
const MARKS: u8 = flags::END_OF_MESSAGE.to_le_bytes()[0];

/// A connection being opened.
#[derive(Debug)]
pub struct Dial {
    route: Route,
    kind: VsockType,
    stage: Stage,
    /// What of the current line is still to be written.
    outgoing: Vec<u8>,
    /// What has been read of the sibling's answer.
    answer: Line,
    pause: Duration,
    patience: Instant,
    /// How often it may still be closed without an answer.
    closes: u8,
    /// Reports whatever the stage waits for.
    waiting: OwnedFd,
    timer: Option<Timer>,
}

#[derive(Debug)]
enum Stage {
    /// Not tried yet, or tried in vain.
    Start,
    /// Until the pause is over.
    Pause,
    /// Until TCP or AF_VSOCK has an answer.
    Connecting(OwnedFd),
    /// `CONNECT PORT\n` is being written.
    Asking(OwnedFd),
    /// `OK PORT\n` is awaited.
    Answer(OwnedFd),
    /// The identity line is being written.
    Introducing(OwnedFd),
    /// It is over.
    Over,
}

/// How far a dial is.
#[derive(Debug)]
pub enum Progress {
    /// Call again when [`Dial::fd`] is readable.
    Pending,
    /// Connected; non-blocking.
    Done(OwnedFd),
    /// It can't be reached.
    Failed(VsockRefusal),
}

/// What a step of a dial says.
enum Step {
    /// To the next one at once.
    On(Stage),
    /// Wait in this one.
    Wait(Stage, Interest),
    /// Connected.
    Done(OwnedFd),
}

impl Dial {
    /// Prepares it; nothing is connected before [`Self::advance`].
    ///
    /// # Errors
    /// [`VsockRefusal::Memory`] when the process has no descriptors left for guests.
    pub fn start(route: &Route, kind: VsockType) -> Result<Self, VsockRefusal> {
        let waiting =
            epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|_| VsockRefusal::Memory)?;
        if descriptors::is_reserved(&waiting) {
            return Err(VsockRefusal::Memory);
        }
        Ok(Self {
            route: route.clone(),
            kind,
            stage: Stage::Start,
            outgoing: Vec::new(),
            answer: Line::default(),
            pause: PAUSE_FIRST,
            patience: Instant::now() + SIBLING_PATIENCE,
            closes: CLOSES,
            waiting,
            timer: None,
        })
    }

    /// The descriptor that is readable when [`Self::advance`] has something to do; the same for the life of
    /// the dial.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.waiting.as_fd()
    }

    /// What to wait for at [`Self::fd`]: always reading.
    #[must_use]
    pub fn interest(&self) -> Interest {
        Interest::READ
    }

    /// Goes as far as is possible without waiting. Not to be called after it has said anything but
    /// [`Progress::Pending`].
    pub fn advance(&mut self) -> Progress {
        loop {
            let step = match std::mem::replace(&mut self.stage, Stage::Over) {
                Stage::Start => self.connect(),
                Stage::Pause => self.resume(),
                Stage::Connecting(socket) => self.connected(socket),
                Stage::Asking(socket) => self.ask(socket),
                Stage::Answer(socket) => self.read_answer(socket),
                Stage::Introducing(socket) => self.introduce(socket),
                Stage::Over => Err(VsockRefusal::Unreachable),
            };
            match step {
                Ok(Step::On(stage)) => self.stage = stage,
                Ok(Step::Wait(stage, interest)) => {
                    self.stage = stage;
                    return match self.watch(interest) {
                        Ok(()) => Progress::Pending,
                        Err(_) => Progress::Failed(VsockRefusal::Memory),
                    };
                }
                Ok(Step::Done(socket)) => {
                    let _ = epoll::delete(&self.waiting, &socket);
                    return Progress::Done(socket);
                }
                Err(refusal) => return Progress::Failed(refusal),
            }
        }
    }

    fn connect(&mut self) -> Result<Step, VsockRefusal> {
        match &self.route.target {
            Target::Unix(path) | Target::OfOwner(path) => {
                let path = path.clone();
                match self.connect_unix(&path) {
                    Ok(socket) => Ok(Step::On(self.introduction(socket))),
                    Err(Errno::AGAIN) => self.try_later(),
                    Err(error) => Err(refusal(error)),
                }
            }
            Target::HybridVm { socket, port, .. } => {
                let (path, port) = (socket.clone(), *port);
                match self.connect_unix(&path) {
                    Ok(socket) => {
                        self.outgoing = format!("CONNECT {port}\n").into_bytes();
                        Ok(Step::On(Stage::Asking(socket)))
                    }
                    Err(Errno::AGAIN) => self.try_later(),
                    Err(error) => self.try_patiently(refusal(error)),
                }
            }
            Target::Tcp(address) => self.connect_tcp(*address),
            Target::Vsock { cid, port } => self.connect_vsock(*cid, *port),
            Target::LocalVm { vm, worker, port } => {
                let (ours, theirs) = socketpair(
                    AddressFamily::UNIX,
                    socket_type(self.kind),
                    SocketFlags::NONBLOCK | SocketFlags::CLOEXEC,
                    None,
                )
                .and_then(|(ours, theirs)| Ok((not_reserved(ours)?, not_reserved(theirs)?)))
                .map_err(refusal)?;
                worker.send(Command::Connect {
                    vm: vm.clone(),
                    port: *port,
                    socket: theirs,
                    kind: self.kind,
                    caller: self.route.caller.clone(),
                });
                Ok(Step::On(Stage::Answer(ours)))
            }
        }
    }

    /// Connects to the socket at a path, and to nothing that a link there leads to: the owner of a guest's
    /// folder has only its own rights, and would otherwise reach whatever ours reach.
    fn connect_unix(&self, path: &Path) -> Result<OwnedFd, Errno> {
        let found = match self.route.target {
            Target::Unix(_) => SocketFile::find(path),
            // Its owner may have mounted something over the folder that never answers.
            _ => Spot::of(path)
                .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::NOENT))
                .and_then(|spot| spot.find()),
        };
        let found = found.map_err(|error| match error {
            Errno::NOTSOCK => Errno::CONNREFUSED,
            error => error,
        })?;
        let socket = self.socket(AddressFamily::UNIX)?;
        match connect(&socket, &found.address()?) {
            Ok(()) => Ok(socket),
            Err(error) => {
                if error == Errno::ACCESS {
                    let path = path.display();
                    tracing::debug!(%path, "the vsock service may not connect: its group needs the right to write");
                }
                Err(error)
            }
        }
    }

    fn connect_tcp(&mut self, address: std::net::SocketAddr) -> Result<Step, VsockRefusal> {
        let family = if address.is_ipv4() {
            AddressFamily::INET
        } else {
            AddressFamily::INET6
        };
        let socket = self.socket(family).map_err(refusal)?;
        // Each write of a guest is a packet of its own already; holding it back only adds latency.
        sockopt::set_tcp_nodelay(&socket, true).map_err(refusal)?;
        tcp::reset_when_closed(&socket).map_err(refusal)?;
        // No reason to refuse a connection.
        let _ = tcp::bound_unsent(&socket, tcp::UNSENT_BYTES);
        let outcome = connect(&socket, &address);
        self.connect_outcome(socket, outcome)
    }

    fn connect_vsock(&mut self, cid: u32, port: u32) -> Result<Step, VsockRefusal> {
        let socket = self.socket(AddressFamily::VSOCK).map_err(refusal)?;
        let outcome = connect_vsock(&socket, cid, port);
        self.connect_outcome(socket, outcome)
    }

    fn connect_outcome(
        &mut self,
        socket: OwnedFd,
        outcome: Result<(), Errno>,
    ) -> Result<Step, VsockRefusal> {
        match outcome {
            Ok(()) => Ok(Step::On(self.introduction(socket))),
            Err(Errno::INPROGRESS) => Ok(Step::Wait(Stage::Connecting(socket), Interest::WRITE)),
            Err(error) => Err(refusal(error)),
        }
    }

    fn connected(&mut self, socket: OwnedFd) -> Result<Step, VsockRefusal> {
        let mut polled = [PollFd::new(&socket, PollFlags::OUT)];
        if !matches!(poll(&mut polled, Some(&timespec(Duration::ZERO))), Ok(1..)) {
            return Ok(Step::Wait(Stage::Connecting(socket), Interest::WRITE));
        }
        match sockopt::socket_error(&socket) {
            Ok(Ok(())) => Ok(Step::On(self.introduction(socket))),
            Ok(Err(error)) | Err(error) => Err(refusal(error)),
        }
    }

    fn socket(&self, family: AddressFamily) -> Result<OwnedFd, Errno> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = not_reserved(socket_with(family, socket_type(self.kind), flags, None)?)?;
        if family == AddressFamily::UNIX {
            refuse_descriptors(&socket);
        }
        Ok(socket)
    }

    /// What comes after the connection: the identity line, if there is one.
    fn introduction(&mut self, socket: OwnedFd) -> Stage {
        let has_marks = self.kind == VsockType::Seqpacket
            && matches!(self.route.target, Target::LocalVm { .. });
        self.outgoing = match &self.route.identity {
            // A message like those that follow, each of which a sibling's end takes with its marks.
            Some(line) if has_marks => [&[MARKS][..], line.as_bytes()].concat(),
            Some(line) => line.clone().into_bytes(),
            None => Vec::new(),
        };
        Stage::Introducing(socket)
    }

    /// Writes what is outgoing; whether all of it went.
    fn write(&mut self, socket: &OwnedFd) -> Result<bool, Errno> {
        while !self.outgoing.is_empty() {
            match send(socket, &self.outgoing, SendFlags::NOSIGNAL) {
                Ok(written) => drop(self.outgoing.drain(..written)),
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    fn ask(&mut self, socket: OwnedFd) -> Result<Step, VsockRefusal> {
        match self.write(&socket) {
            Ok(true) => Ok(Step::On(Stage::Answer(socket))),
            Ok(false) => Ok(Step::Wait(Stage::Asking(socket), Interest::WRITE)),
            Err(error) => self.ask_again(refusal(error)),
        }
    }

    fn introduce(&mut self, socket: OwnedFd) -> Result<Step, VsockRefusal> {
        match self.write(&socket).map_err(refusal)? {
            true => Ok(Step::Done(socket)),
            false => Ok(Step::Wait(Stage::Introducing(socket), Interest::WRITE)),
        }
    }

    fn read_answer(&mut self, socket: OwnedFd) -> Result<Step, VsockRefusal> {
        match self.answer.read(&socket, self.kind) {
            Ok(Heard::Partly) => Ok(Step::Wait(Stage::Answer(socket), Interest::READ)),
            Ok(Heard::Line) if is_ok(self.answer.text()) => Ok(Step::On(self.introduction(socket))),
            Ok(Heard::Line | Heard::TooLong) => Err(VsockRefusal::Unreachable),
            Ok(Heard::End) => self.ask_again(VsockRefusal::Unreachable),
            Err(error) => self.ask_again(refusal(error)),
        }
    }

    /// Waits and tries again if this is a sibling whose VMM may be coming up; else it has refused.
    fn try_patiently(&mut self, refusal: VsockRefusal) -> Result<Step, VsockRefusal> {
        let hybrid = matches!(self.route.target, Target::HybridVm { .. });
        let transient = refusal == VsockRefusal::Unreachable;
        if hybrid && transient && Instant::now() < self.patience {
            self.try_later()
        } else {
            Err(refusal)
        }
    }

    /// After a close without an answer: waits and asks once more, a few times, if this is a sibling whose VMM can be asked.
    fn ask_again(&mut self, refusal: VsockRefusal) -> Result<Step, VsockRefusal> {
        let Target::HybridVm { callee, .. } = &self.route.target else {
            return Err(refusal);
        };
        if refusal != VsockRefusal::Unreachable || self.closes == 0 {
            return Err(refusal);
        }
        callee.admit_again(&self.route.caller, Instant::now())?;
        self.closes -= 1;
        self.pause = PAUSE_MAX;
        self.try_later()
    }

    fn try_later(&mut self) -> Result<Step, VsockRefusal> {
        self.answer = Line::default();
        let pause = self.pause;
        self.pause = (pause * 2).min(PAUSE_MAX);
        if self.timer.is_none() {
            self.timer = Some(Timer::new().map_err(|_| VsockRefusal::Memory)?);
        }
        if let Some(timer) = &self.timer {
            timer.set(pause).map_err(|_| VsockRefusal::Memory)?;
        }
        Ok(Step::Wait(Stage::Pause, Interest::READ))
    }

    fn resume(&mut self) -> Result<Step, VsockRefusal> {
        match &self.timer {
            Some(timer) if !timer.has_expired() => Ok(Step::Wait(Stage::Pause, Interest::READ)),
            _ => Ok(Step::On(Stage::Start)),
        }
    }

    /// Lets [`Self::fd`] become readable when the stage can go on.
    fn watch(&self, interest: Interest) -> Result<(), Errno> {
        let fd = match (&self.stage, &self.timer) {
            (
                Stage::Connecting(socket)
                | Stage::Asking(socket)
                | Stage::Answer(socket)
                | Stage::Introducing(socket),
                _,
            ) => socket.as_fd(),
            (_, Some(timer)) => timer.as_fd(),
            (_, None) => return Err(Errno::BADF),
        };
        let data = epoll::EventData::new_u64(0);
        match epoll::add(&self.waiting, fd, data, interest.flags()) {
            Err(Errno::EXIST) => epoll::modify(&self.waiting, fd, data, interest.flags()),
            outcome => outcome,
        }
    }
}

/// What stays of a dial: its own descriptors are the next one's, so they say little of how many are left.
fn not_reserved(socket: OwnedFd) -> Result<OwnedFd, Errno> {
    match descriptors::is_reserved(&socket) {
        true => Err(Errno::MFILE),
        false => Ok(socket),
    }
}

fn socket_type(kind: VsockType) -> SocketType {
    match kind {
        VsockType::Stream => SocketType::STREAM,
        VsockType::Seqpacket => SocketType::SEQPACKET,
    }
}

/// Connects to the host's own AF_VSOCK, whose addresses rustix doesn't know.
fn connect_vsock(socket: &OwnedFd, cid: u32, port: u32) -> Result<(), Errno> {
    const LENGTH: libc::socklen_t = 16;
    const { assert!(size_of::<libc::sockaddr_vm>() == LENGTH as usize) };
    // SAFETY: an address is plain numbers, for which zero is valid.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = AddressFamily::VSOCK.as_raw();
    address.svm_cid = cid;
    address.svm_port = port;
    // SAFETY: the pointer is to a whole `sockaddr_vm` that outlives the call, and the length is its size.
    let outcome = unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), LENGTH) };
    if outcome == 0 {
        Ok(())
    } else {
        Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO))
    }
}

/// Whether the answer is `OK PORT`.
fn is_ok(line: &[u8]) -> bool {
    let mut words = line
        .split(u8::is_ascii_whitespace)
        .filter(|word| !word.is_empty());
    let port = |word: &[u8]| !word.is_empty() && word.iter().all(u8::is_ascii_digit);
    words.next() == Some(b"OK") && words.next().is_some_and(port) && words.next().is_none()
}

/// What a failed connect means.
fn refusal(error: Errno) -> VsockRefusal {
    match error {
        Errno::PROTOTYPE | Errno::PROTONOSUPPORT | Errno::SOCKTNOSUPPORT => {
            VsockRefusal::SeqpacketUnsupported
        }
        Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS => VsockRefusal::Memory,
        Errno::TIMEDOUT => VsockRefusal::TimedOut,
        _ => VsockRefusal::Unreachable,
    }
}

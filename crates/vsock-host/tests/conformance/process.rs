//! The service as a process of its own: killed and started again, with a thousand guests, and with a VMM that
//! takes the memory away under it.
//!
//! The process is this test's own executable, told to run [`the_service_answers_with_its_threads`].

use std::{
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::{
    fs::{MemfdFlags, fstatfs, ftruncate, memfd_create},
    process::{Pid, Resource, Rlimit, getrlimit, prlimit, setrlimit},
};
use sandwire_api::vsock::{VsockKind, VsockPolicy};
use sandwire_vsock_guest::{
    Guest, GuestError, Settings,
    socket::State,
    wire::{Message, Region, Wire, request, session},
};
use sandwire_vsock_host::{
    address::VmKey,
    control::{Client, VmSpec, control_socket},
    limits::Limits,
    service,
};
use tempfile::TempDir;

use crate::host::{PATIENCE, PORT, TENANT, accept, eventually, name, read_exact, to_host};

const FOLDER: &str = "SANDWIRE_TEST_VSOCK_FOLDER";
const WORKERS: usize = 2;

/// Also the service of the other tests: they start this test alone with a folder in its environment.
#[test]
fn the_service_answers_with_its_threads() {
    if let Some(folder) = std::env::var_os(FOLDER) {
        let settings = service::Settings {
            threads: Some(WORKERS),
            ..service::Settings::new(folder.into())
        };
        return service::run(&settings).expect("the service");
    }
    let service = Service::start();
    let (_, process, threads) = service.client().hello().expect("an answer");
    assert_eq!((process, threads), (service.child.id(), WORKERS));
}

struct Service {
    folder: TempDir,
    child: Child,
}

impl Service {
    fn start() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let child = spawn(folder.path());
        let service = Self { folder, child };
        service.client();
        service
    }

    fn start_again(&mut self) {
        self.child = spawn(self.folder.path());
        self.client();
    }

    fn kill(&mut self) {
        self.child.kill().expect("killing the service");
        self.child.wait().expect("its end");
    }

    /// Once it answers.
    fn client(&self) -> Client {
        let path = control_socket(self.folder.path());
        let mut client = None;
        eventually("the service's answer", || {
            client = Client::connect(&path, PATIENCE).ok();
            client.as_mut().is_some_and(|client| client.hello().is_ok())
        });
        client.expect("it answered")
    }

    fn add(&self, client: &mut Client, lease: &str) -> VmSpec {
        let folder = self.folder.path().join(lease);
        std::fs::create_dir(&folder).expect("a guest's folder");
        let vm = VmSpec {
            key: VmKey {
                tenant: TENANT,
                lease: name(lease),
            },
            kind: VsockKind::VhostUser,
            folder,
            cid: 3,
            virtual_cid: None,
            policy: to_host(&[PORT]),
            limits: Limits::default(),
        };
        client.add_vm(vm.clone()).expect("adding a guest");
        vm
    }

    /// Changes the limit of its descriptors, and tells the former one.
    fn limit_descriptors(&self, most: Option<u64>) -> Option<u64> {
        let pid = Pid::from_child(&self.child);
        let maximum = getrlimit_of(pid).maximum;
        let limit = Rlimit {
            current: most,
            maximum,
        };
        prlimit(Some(pid), Resource::Nofile, limit)
            .expect("limiting its descriptors")
            .current
    }

    /// How long it has run on a processor, in ticks of 10 ms.
    fn ticks(&self) -> u64 {
        let path = format!("/proc/{}/stat", self.child.id());
        let stat = std::fs::read_to_string(path).expect("reading /proc");
        let (_, fields) = stat.rsplit_once(')').expect("its name");
        let fields: Vec<&str> = fields.split_whitespace().collect();
        let ticks = |field: usize| -> u64 { fields[field].parse().expect("a number") };
        ticks(11) + ticks(12)
    }

    /// A line of its `/proc/PID/status`, as a number.
    fn status(&self, field: &str) -> u64 {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(path).expect("reading /proc");
        let value = status
            .lines()
            .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))
            .expect("the kernel says so");
        value
            .trim()
            .trim_end_matches(" kB")
            .parse()
            .expect("a number")
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn getrlimit_of(pid: Pid) -> Rlimit {
    let path = format!("/proc/{}/limits", pid.as_raw_nonzero());
    let limits = std::fs::read_to_string(path).expect("reading /proc");
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"))
        .expect("the kernel says so");
    let mut numbers = line.split_whitespace().map(|word| word.parse().ok());
    Rlimit {
        current: numbers.next().flatten(),
        maximum: numbers.next().flatten(),
    }
}

fn spawn(folder: &Path) -> Child {
    Command::new(std::env::current_exe().expect("this executable"))
        .args(["--exact", "process::the_service_answers_with_its_threads"])
        .env(FOLDER, folder)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("starting the service")
}

fn listener(vm: &VmSpec) -> UnixListener {
    let path = PathBuf::from(format!("{}_{PORT}", vm.stream_socket().display()));
    drop(std::fs::remove_file(&path));
    UnixListener::bind(path).expect("listening as a service of the host")
}

#[track_caller]
fn works(vm: &VmSpec, guest: &mut Guest) {
    let listener = listener(vm);
    let socket = guest.open_stream(PORT).expect("connecting to the host");
    let mut peer = accept(&listener);
    guest.send(socket, b"ping").expect("sending");
    assert_eq!(read_exact(&mut peer, 4), b"ping");
    peer.write_all(b"pong").expect("writing");
    assert_eq!(guest.receive_exact(socket, 4).expect("it"), b"pong");
    guest.close(socket).expect("closing");
}

#[test]
fn a_service_that_is_killed_comes_back_with_its_guests_and_they_reconnect() {
    let mut service = Service::start();
    let mut client = service.client();
    let vms = ["first", "second"].map(|lease| service.add(&mut client, lease));
    let mut guests = vms
        .each_ref()
        .map(|vm| Guest::connect(&Settings::default(), &vm.vhost_socket()).expect("booting"));
    for round in 1..=2 {
        let mut sockets = Vec::new();
        for (vm, guest) in vms.iter().zip(&mut guests) {
            works(vm, guest);
            let listener = listener(vm);
            let socket = guest.open_stream(PORT).expect("connecting");
            sockets.push((socket, accept(&listener)));
        }
        service.kill();
        for guest in &mut guests {
            let gone = guest.run_for(Duration::from_secs(5));
            assert!(matches!(gone, Err(GuestError::BackEndGone)), "{gone:?}");
        }
        service.start_again();
        assert_eq!(service.client().vms().expect("the guests").len(), 2);
        for ((vm, guest), socket) in vms.iter().zip(&mut guests).zip(sockets) {
            let (socket, _peer) = socket;
            eventually("the guest's socket", || {
                guest.reconnect(&vm.vhost_socket()).is_ok()
            });
            guest
                .wait_until("the event", |guest| guest.transport_resets() == round)
                .expect("the event");
            assert_eq!(guest.socket(socket).state, State::Reset);
            works(vm, guest);
            assert!(guest.violations().is_empty(), "{:?}", guest.violations());
        }
    }
}

/// Descriptors that a guest of this size takes in this process, and more.
const DESCRIPTORS_PER_GUEST: u64 = 12;

#[test]
fn a_thousand_guests_take_no_further_thread_and_little_memory() {
    let limit = getrlimit(Resource::Nofile);
    let mut raised = limit;
    raised.current = limit.maximum;
    setrlimit(Resource::Nofile, raised).expect("as many descriptors as are allowed");
    let most = raised.current.unwrap_or(u64::MAX);
    assert!(
        most > 1000 * DESCRIPTORS_PER_GUEST + 1000,
        "the limit of open files is {most}: this test needs 13000 (ulimit -Hn)"
    );
    let service = Service::start();
    let mut client = service.client();
    let first = service.add(&mut client, "first");
    let small = Settings {
        queue_size: 128,
        memory: vec![(0, 1 << 20)],
        receive_buffers: 64,
        transmit_slots: 2,
        ..Settings::default()
    };
    let mut first_guest = Guest::connect(&small, &first.vhost_socket()).expect("booting");
    works(&first, &mut first_guest);
    let threads = service.status("Threads");
    let memory = service.status("RssAnon");
    let (_, _, told) = client.hello().expect("how many threads");

    let vms: Vec<VmSpec> = (0..1000)
        .map(|number| service.add(&mut client, &format!("vm-{number}")))
        .collect();
    let mut guests: Vec<Guest> = vms
        .iter()
        .map(|vm| Guest::connect(&small, &vm.vhost_socket()).expect("booting"))
        .collect();
    let grown = service.status("RssAnon") - memory;
    assert!(grown / 1000 <= 100, "{} KiB per idle guest", grown / 1000);
    for (vm, guest) in vms.iter().zip(&mut guests).step_by(50) {
        works(vm, guest);
    }
    // All of them have a connection at once.
    let mut open = Vec::new();
    for (vm, guest) in vms.iter().zip(&mut guests) {
        let listener = listener(vm);
        let socket = guest.open_stream(PORT).expect("connecting");
        guest.send(socket, b"here").expect("sending");
        let mut peer = accept(&listener);
        assert_eq!(read_exact(&mut peer, 4), b"here");
        open.push(peer);
    }
    assert_eq!(service.status("Threads"), threads);
    assert_eq!(client.hello().expect("how many threads").2, told);
    drop(guests);
    for vm in vms {
        client.remove_vm(vm.key).expect("removing a guest");
    }
    works(&first, &mut first_guest);
}

#[test]
fn a_vmm_that_takes_its_memory_away_takes_nobody_with_it() {
    let mut service = Service::start();
    let mut client = service.client();
    let vm = service.add(&mut client, "hostile");
    let other = service.add(&mut client, "neighbour");
    let mut guest = Guest::connect(&Settings::default(), &other.vhost_socket()).expect("booting");
    let region = Region::new(0, 1 << 20).expect("memory");
    let messages = session(&region, 256).expect("messages");
    let mut wire = Wire::connect(&vm.vhost_socket(), PATIENCE).expect("connecting");
    let started = messages.len() - 4;
    for message in &messages[..started] {
        wire.say(message).expect("the back end goes along");
    }
    ftruncate(&region.file, 0).expect("taking the memory away");
    for message in &messages {
        if message.bytes[..4] == request::SET_VRING_KICK.to_le_bytes() {
            rustix::io::write(&message.fds[0], &1u64.to_ne_bytes()).expect("a kick");
        }
    }
    let until = Instant::now() + Duration::from_millis(300);
    while Instant::now() < until {
        works(&other, &mut guest);
    }
    let ended = service.child.try_wait().expect("asking for it");
    assert!(ended.is_none(), "the service has ended: {ended:?}");
    drop(wire);
    let mut again = Guest::connect(&Settings::default(), &vm.vhost_socket()).expect("booting");
    works(&vm, &mut again);
}

/// A mapping of part of a huge page can't be undone, nor be replaced when the page isn't there.
#[test]
fn a_vmm_that_shares_part_of_a_huge_page_takes_nobody_with_it() {
    let service = Service::start();
    let mut client = service.client();
    let vm = service.add(&mut client, "hostile");
    let other = service.add(&mut client, "neighbour");
    let mut guest = Guest::connect(&Settings::default(), &other.vhost_socket()).expect("booting");
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB;
    let file = memfd_create("guest", flags).expect("a memfd");
    let page = fstatfs(&file).expect("its file system").f_bsize;
    ftruncate(&file, page.cast_unsigned()).expect("growing it");
    let region = Region {
        file,
        base: 0,
        size: 1 << 20,
    };
    let mut wire = Wire::connect(&vm.vhost_socket(), PATIENCE).expect("connecting");
    let said = session(&region, 256)
        .expect("messages")
        .iter()
        .try_for_each(|message| wire.say(message).map(drop));
    assert!(said.is_err(), "the back end goes along");
    works(&other, &mut guest);
    let mut again = Guest::connect(&Settings::default(), &vm.vhost_socket()).expect("booting");
    works(&vm, &mut again);
}

#[test]
fn a_policy_that_is_changed_through_the_control_socket_counts_at_once() {
    let service = Service::start();
    let mut client = service.client();
    let vm = service.add(&mut client, "changing");
    let mut guest = Guest::connect(&Settings::default(), &vm.vhost_socket()).expect("booting");
    let listener = listener(&vm);
    let socket = guest.open_stream(PORT).expect("connecting");
    let _peer = accept(&listener);
    client
        .set_policy(vm.key.clone(), VsockPolicy::default())
        .expect("changing the policy");
    guest
        .wait_until("RST", |guest| guest.socket(socket).state == State::Reset)
        .expect("RST");
    let refused = guest.open_stream(PORT);
    assert!(matches!(refused, Err(GuestError::Reset)), "{refused:?}");
    let traffic = client.traffic(Some(vm.key)).expect("the counters");
    assert_eq!(traffic[0].traffic.opened_by_guest, 1);
}

#[test]
fn callers_wait_without_a_processor_until_there_are_descriptors_again() {
    let service = Service::start();
    let mut client = service.client();
    let vm = service.add(&mut client, "scarce");
    let mut guest = Guest::connect(&Settings::default(), &vm.vhost_socket()).expect("booting");
    works(&vm, &mut guest);
    let former = service.limit_descriptors(Some(3));
    let _vmm = UnixStream::connect(vm.vhost_socket()).expect("a second VMM");
    let mut caller = UnixStream::connect(vm.stream_socket()).expect("a client");
    let asks = UnixStream::connect(control_socket(service.folder.path())).expect("the daemon");
    caller.write_all(b"nonsense\n").expect("writing");
    let before = service.ticks();
    std::thread::sleep(Duration::from_secs(2));
    let spent = service.ticks() - before;
    assert!(spent < 20, "{spent} ticks of 10 ms in 2 s");
    service.limit_descriptors(former);
    caller.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    assert_eq!(caller.read(&mut [0; 8]).ok(), Some(0), "it is turned away");
    drop(asks);
    service.client();
    works(&vm, &mut guest);
}

#[test]
fn vmms_with_many_pieces_of_memory_leave_room_for_those_with_few() {
    const HOSTILE: usize = 33;
    const PIECES: u64 = 512;
    const PIECE: u64 = 4096;
    let service = Service::start();
    let mut client = service.client();
    let region = Region::new(0, PIECE).expect("memory");
    let mut wires = Vec::new();
    for number in 0..HOSTILE {
        let vm = service.add(&mut client, &format!("hostile{number}"));
        let mut wire = Wire::connect(&vm.vhost_socket(), PATIENCE).expect("connecting");
        // MQ, CONFIGURE_MEM_SLOTS.
        let features = Message::words(request::SET_PROTOCOL_FEATURES, &[1 | 1 << 15]);
        wire.say(&Message::new(request::GET_FEATURES, &[]))
            .expect("features");
        wire.say(&Message::new(request::GET_PROTOCOL_FEATURES, &[]))
            .expect("features");
        wire.say(&Message::words(
            request::SET_FEATURES,
            &[1 << 32 | 1 << 30 | 1],
        ))
        .expect("features");
        wire.say(&features).expect("features");
        for piece in 0..PIECES {
            let start = piece * PIECE;
            let words = [0, start, PIECE, (1 << 40) + start, 0];
            let file = region.file.try_clone().expect("a descriptor");
            let added = wire.say(&Message::words(request::ADD_MEM_REG, &words).with(file));
            if added.is_err() {
                break;
            }
        }
        // Until all of it is served, or the back end has hung up.
        let _ = wire.say(&Message::new(request::GET_MAX_MEM_SLOTS, &[]));
        wires.push(wire);
    }
    let vm = service.add(&mut client, "neighbour");
    let mut guest = Guest::connect(&Settings::default(), &vm.vhost_socket()).expect("booting");
    works(&vm, &mut guest);
}

//! vsock with real guests: Debian's kernels and their own drivers, on QEMU, against the service as a process.
//!
//! The guests have no network. What they do they are told over a serial line (`testlab`'s `lab-vsock`), so a
//! test knows both ends of every connection.

#![allow(
    clippy::unwrap_used,
    reason = "a test ends at the first thing that fails"
)]

#[path = "guest_vsock/firecracker.rs"]
mod firecracker;
mod vsock;

use std::{
    fs,
    io::{Read, Write},
    path::Path,
    process::Stdio,
    time::{Duration, Instant},
};

use sandwire_api::vsock::{VsockPolicy, VsockRefusal, VsockState};
use sandwire_testlab::{
    guest::{
        kernel::{Kernel, Series},
        vsock::{Guest, Recipe},
    },
    lab::{self, Lab},
    sandwire::{self, Daemon},
};
use serde_json::Value;

use self::vsock::{
    Channel, DEVICE, GUEST_ECHO, GUEST_HASH, GUEST_MESSAGES, SECOND, Service, answer_hash, echo,
    key, receive, serve_messages, serve_stream, to_guest, to_unix, until,
};

/// What the host serves in these tests, as the guest sees it: ports of CID 2.
const HASH: u32 = 1000;
const ECHO: u32 = 1001;
const MESSAGES: u32 = 1002;
const SIBLING: u32 = 1003;
const SIBLING_HASH: u32 = 1004;

/// A service, and what is needed for guests of one kernel.
struct World {
    service: Service,
    recipe: Recipe,
}

impl World {
    fn new(lab: &Lab, kernel: &Kernel) -> Self {
        let at = |name: &str| lab.folder().join(name);
        serve_stream(&at("hash.sock"), answer_hash);
        serve_stream(&at("echo.sock"), echo);
        serve_messages(&at("messages.sock"));
        Self {
            service: Service::start(lab),
            recipe: Recipe::prepare(kernel, lab.folder()).unwrap(),
        }
    }

    /// A channel from which the host's services can be reached.
    fn channel(&self, lab: &Lab, name: &str) -> Channel {
        let at = |name: &str| lab.folder().join(name);
        let rules = vec![
            to_unix(HASH, &at("hash.sock")),
            to_unix(ECHO, &at("echo.sock")),
            to_unix(MESSAGES, &at("messages.sock")),
        ];
        self.service.add(name, rules)
    }

    fn boot(&self, name: &str, channel: &Channel) -> Guest {
        let guest = self.recipe.boot(name, &channel.arguments()).unwrap();
        self.service.wait_attached(name, true);
        guest
    }
}

/// Has the guest send blocks to the host, and wants the host to have seen exactly them. The host answers
/// after the guest has closed its half: so that has arrived, and the other half is still open.
fn assert_carries_out(guest: &mut Guest, blocks: u64) -> Duration {
    assert_carries_to(guest, HASH, blocks)
}

fn assert_carries_to(guest: &mut Guest, port: u32, blocks: u64) -> Duration {
    let started = Instant::now();
    let said = guest
        .agent()
        .run(&format!("send 2 {port} {blocks}"))
        .unwrap();
    let [sent, answer, _took] = said.split(" | ").collect::<Vec<_>>()[..] else {
        panic!("{said}");
    };
    assert_eq!(answer, sent);
    started.elapsed()
}

fn assert_echoes(channel: &Channel, text: &str) {
    let mut stream = channel.connect(GUEST_ECHO);
    stream.write_all(text.as_bytes()).unwrap();
    let mut back = vec![0; text.len()];
    stream.read_exact(&mut back).unwrap();
    assert_eq!(back, text.as_bytes());
}

/// What a guest sees of a connection that was reset: Linux reads the end first, and not always an error.
fn assert_has_ended(seen: &str) {
    assert!(seen == "end" || seen.contains("reset"), "{seen}");
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn streams_arrive_whole_in_both_directions_on_linux_6_1() {
    let kernel = Kernel::fetch_series(Series::Linux6_1).unwrap();
    lab::run_within(240 * SECOND, move |lab| assert_streams(lab, &kernel));
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn streams_arrive_whole_in_both_directions_on_linux_6_12() {
    let kernel = Kernel::fetch_series(Series::Linux6_12).unwrap();
    lab::run_within(240 * SECOND, move |lab| assert_streams(lab, &kernel));
}

/// In writes of 64 KiB, which newer guests send in packets of two descriptors.
fn assert_streams(lab: &Lab, kernel: &Kernel) {
    let world = World::new(lab, kernel);
    let channel = world.channel(lab, "one");
    let mut guest = world.boot("one", &channel);
    let out = assert_carries_out(&mut guest, STREAM_BLOCKS);
    let into = channel.assert_carries_in(STREAM_BLOCKS);
    eprintln!(
        "{}: {STREAM_BLOCKS} blocks of 64 KiB: guest to host {out:.1?}, host to guest {into:.1?}",
        kernel.version()
    );
    let traffic = world.service.traffic("one");
    assert!(
        traffic.egress_bytes >= STREAM_BLOCKS * 65_536,
        "{traffic:?}"
    );
    assert!(
        traffic.ingress_bytes >= STREAM_BLOCKS * 65_536,
        "{traffic:?}"
    );
    assert!(traffic.refusals.is_empty(), "{traffic:?}");
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn a_thousand_connections_are_open_at_once_on_linux_6_1() {
    let kernel = Kernel::fetch_series(Series::Linux6_1).unwrap();
    lab::run_within(240 * SECOND, move |lab| assert_crowd(lab, &kernel));
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn a_thousand_connections_are_open_at_once_on_linux_6_12() {
    let kernel = Kernel::fetch_series(Series::Linux6_12).unwrap();
    lab::run_within(240 * SECOND, move |lab| assert_crowd(lab, &kernel));
}

fn assert_crowd(lab: &Lab, kernel: &Kernel) {
    let world = World::new(lab, kernel);
    let channel = world.channel(lab, "one");
    let mut guest = world.boot("one", &channel);
    let crowd = guest.agent().run(&format!("crowd 2 {ECHO} 1000")).unwrap();
    assert_eq!(crowd, "1000");

    let state = || {
        let traffic = world.service.traffic("one");
        format!("{traffic:?}; console: {}", world.recipe.console("one"))
    };
    let mut streams: Vec<_> = (0..1000)
        .map(|number| {
            let stream = channel.try_connect(GUEST_ECHO);
            stream.unwrap_or_else(|| panic!("connection {number}: {}", state()))
        })
        .collect();
    for (number, stream) in streams.iter_mut().enumerate() {
        stream.write_all(&number.to_le_bytes()).unwrap();
    }
    for (number, stream) in streams.iter_mut().enumerate() {
        let mut back = [0; size_of::<usize>()];
        let read = stream.read_exact(&mut back);
        read.unwrap_or_else(|error| panic!("connection {number}: {error}: {}", state()));
        assert_eq!(usize::from_le_bytes(back), number);
    }
    let traffic = world.service.traffic("one");
    assert!(traffic.connections >= 1000, "{traffic:?}");
    drop(streams);
    until("all connections are gone", || {
        world.service.traffic("one").connections == 0
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn messages_keep_their_boundaries_on_linux_6_1() {
    let kernel = Kernel::fetch_series(Series::Linux6_1).unwrap();
    lab::run_within(240 * SECOND, move |lab| assert_messages(lab, &kernel));
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn messages_keep_their_boundaries_on_linux_6_12() {
    let kernel = Kernel::fetch_series(Series::Linux6_12).unwrap();
    lab::run_within(240 * SECOND, move |lab| assert_messages(lab, &kernel));
}

fn assert_messages(lab: &Lab, kernel: &Kernel) {
    let world = World::new(lab, kernel);
    let channel = world.channel(lab, "one");
    let other = world
        .service
        .add("two", vec![to_guest(SIBLING, "one", GUEST_MESSAGES)]);
    let mut guest = world.boot("one", &channel);
    let lengths = "1 2 4096 65536 3 100000 7";
    let said = guest
        .agent()
        .run(&format!("messages 2 {MESSAGES} {lengths}"));
    // A Unix socket of the host has boundaries, but no mark for the end of a record.
    assert_eq!(said.unwrap(), lengths);

    let socket = channel.connect_seqpacket(GUEST_MESSAGES);
    for length in [1, 5000, 65_536, 2, 100_000] {
        let message: Vec<u8> = (0..=249).cycle().take(length).collect();
        assert_eq!(socket.send(&message).unwrap(), length);
        assert!(
            receive(&socket) == message,
            "{length} bytes came back otherwise"
        );
    }

    // Between guests, both boundaries and marks arrive.
    let mut sibling = world.boot("two", &other);
    let said = sibling
        .agent()
        .run(&format!("messages 2 {SIBLING} 10 20 70000 80000"));
    assert_eq!(said.unwrap(), "10 20! 70000 80000!");
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn guests_reach_each_other_only_by_policy_on_linux_6_1() {
    let kernel = Kernel::fetch_series(Series::Linux6_1).unwrap();
    lab::run_within(240 * SECOND, move |lab| assert_siblings(lab, &kernel));
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn guests_reach_each_other_only_by_policy_on_linux_6_12() {
    let kernel = Kernel::fetch_series(Series::Linux6_12).unwrap();
    lab::run_within(240 * SECOND, move |lab| assert_siblings(lab, &kernel));
}

fn assert_siblings(lab: &Lab, kernel: &Kernel) {
    let world = World::new(lab, kernel);
    let caller_channel = world.service.add("caller", vec![]);
    let called_channel = world.service.add("called", vec![]);
    let mut caller = world.boot("caller", &caller_channel);
    let _called = world.boot("called", &called_channel);

    let greet = format!("greet 2 {SIBLING} hello");
    let error = caller.agent().run(&greet).unwrap_err().to_string();
    assert!(error.contains("reset"), "{error}");
    let refusals = world.service.traffic("caller").refusals;
    assert_eq!(
        refusals.get(&VsockRefusal::Policy),
        Some(&1),
        "{refusals:?}"
    );

    let rules = vec![
        to_guest(SIBLING, "called", GUEST_ECHO),
        to_guest(SIBLING_HASH, "called", GUEST_HASH),
    ];
    let mut client = world.service.client();
    client
        .set_policy(key("caller"), VsockPolicy { rules })
        .unwrap();
    assert_eq!(caller.agent().run(&greet).unwrap(), "hello");
    // In writes of 64 KiB, and the answer after one half of the connection has ended.
    assert_carries_to(&mut caller, SIBLING_HASH, SIBLING_BLOCKS);

    // What is open ends with the rule that allowed it.
    until("the greeting's connection is gone", || {
        world.service.traffic("called").connections == 0
    });
    let held = caller.agent().begin(&format!("hold 2 {SIBLING}")).unwrap();
    until("the connection is open", || {
        world.service.traffic("called").connections == 1
    });
    let none = VsockPolicy::default();
    client.set_policy(key("caller"), none).unwrap();
    let ended = caller.agent().wait(&held, 10 * SECOND).unwrap();
    assert_has_ended(&ended);
    until("the sibling's half is gone", || {
        world.service.traffic("called").connections == 0
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn a_killed_vmm_ends_its_own_connections_alone_on_linux_6_1() {
    let kernel = Kernel::fetch_series(Series::Linux6_1).unwrap();
    lab::run_within(240 * SECOND, move |lab| assert_kill(lab, &kernel));
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn a_killed_vmm_ends_its_own_connections_alone_on_linux_6_12() {
    let kernel = Kernel::fetch_series(Series::Linux6_12).unwrap();
    lab::run_within(240 * SECOND, move |lab| assert_kill(lab, &kernel));
}

fn assert_kill(lab: &Lab, kernel: &Kernel) {
    let world = World::new(lab, kernel);
    let channel = world.channel(lab, "one");
    let other = world
        .service
        .add("two", vec![to_guest(SIBLING, "one", GUEST_ECHO)]);
    let mut guest = world.boot("one", &channel);
    let mut sibling = world.boot("two", &other);
    let mut here = channel.connect(GUEST_ECHO);
    let mut elsewhere = other.connect(GUEST_ECHO);
    let between = sibling.agent().begin(&format!("hold 2 {SIBLING}")).unwrap();
    until("the siblings are connected", || {
        let open = world.service.client().connections(Some(key("two")));
        let states: Vec<_> = open.unwrap().iter().map(|one| one.state).collect();
        states == [VsockState::Established; 2]
    });

    guest.vmm().kill().unwrap();
    world.service.wait_attached("one", false);
    let ended = here.read(&mut [0; 8]);
    assert!(!matches!(ended, Ok(1..)), "{ended:?}");
    // The guest may hear of the end before whoever called has seen that the call was taken.
    let ended = sibling.agent().wait(&between, 10 * SECOND);
    assert_has_ended(&ended.unwrap_or_else(|error| error.to_string()));
    elsewhere.write_all(b"still here").unwrap();
    let mut back = [0; 10];
    elsewhere.read_exact(&mut back).unwrap();
    assert_eq!(&back, b"still here");

    let _next = world.boot("one", &channel);
    assert_echoes(&channel, "a new guest");
    let greet = format!("greet 2 {SIBLING} again");
    assert_eq!(sibling.agent().run(&greet).unwrap(), "again");
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn a_running_guest_is_served_again_on_linux_6_1() {
    let kernel = Kernel::fetch_series(Series::Linux6_1).unwrap();
    lab::run_within(240 * SECOND, move |lab| assert_served_again(lab, &kernel));
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn a_running_guest_is_served_again_on_linux_6_12() {
    let kernel = Kernel::fetch_series(Series::Linux6_12).unwrap();
    lab::run_within(240 * SECOND, move |lab| assert_served_again(lab, &kernel));
}

fn assert_served_again(lab: &Lab, kernel: &Kernel) {
    let mut world = World::new(lab, kernel);
    let channel = world.channel(lab, "one");
    let mut guest = world.boot("one", &channel);
    assert_carries_out(&mut guest, 16);
    let mut open = channel.connect(GUEST_ECHO);
    world.service.kill_and_restart();
    let ended = open.read(&mut [0; 8]);
    assert!(!matches!(ended, Ok(1..)), "{ended:?}");
    // QEMU's device doesn't connect again by itself: it is taken out and plugged in anew.
    guest.unplug(DEVICE).unwrap();
    guest.plug(DEVICE, &channel.vhost_user_socket()).unwrap();
    world.service.wait_attached("one", true);
    until("the driver has the device again", || {
        channel.try_connect(GUEST_ECHO).is_some()
    });
    assert_carries_out(&mut guest, 16);
    channel.assert_carries_in(16);
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn clones_get_the_device_after_their_restore_on_linux_6_1() {
    let kernel = Kernel::fetch_series(Series::Linux6_1).unwrap();
    lab::run_within(240 * SECOND, move |lab| assert_clones(lab, &kernel));
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn clones_get_the_device_after_their_restore_on_linux_6_12() {
    let kernel = Kernel::fetch_series(Series::Linux6_12).unwrap();
    lab::run_within(240 * SECOND, move |lab| assert_clones(lab, &kernel));
}

fn assert_clones(lab: &Lab, kernel: &Kernel) {
    let world = World::new(lab, kernel);
    let saved = world.recipe.boot_to_save().unwrap();
    let saved = saved.save(&world.recipe).unwrap();
    let names = ["first", "second", "third"];
    let channels = names.map(|name| world.channel(lab, name));
    let mut clones = names.map(|name| saved.restore(name).unwrap());
    for (clone, channel) in clones.iter_mut().zip(&channels) {
        clone.plug(DEVICE, &channel.vhost_user_socket()).unwrap();
    }
    for (name, (clone, channel)) in names.iter().zip(clones.iter_mut().zip(&channels)) {
        world.service.wait_attached(name, true);
        until("the clone's driver has the device", || {
            channel.try_connect(GUEST_ECHO).is_some()
        });
        assert_echoes(channel, name);
        assert_carries_out(clone, 16);
        channel.assert_carries_in(16);
    }
    // All are CID 3, and told apart.
    for name in names {
        let traffic = world.service.traffic(name);
        assert_eq!(traffic.opened_by_guest, 1, "{name}: {traffic:?}");
    }
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn a_lease_says_what_qemu_needs_on_linux_6_1() {
    let kernel = Kernel::fetch_series(Series::Linux6_1).unwrap();
    lab::run_within(240 * SECOND, move |lab| assert_lease(lab, &kernel));
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn a_lease_says_what_qemu_needs_on_linux_6_12() {
    let kernel = Kernel::fetch_series(Series::Linux6_12).unwrap();
    lab::run_within(240 * SECOND, move |lab| assert_lease(lab, &kernel));
}

fn assert_lease(lab: &Lab, kernel: &Kernel) {
    let (daemon, lease) = leased(lab, "vhost-user");
    let arguments = lease["vsock"]["qemu_arguments"].as_array().unwrap();
    let arguments: Vec<String> = arguments
        .iter()
        .map(|argument| argument.as_str().unwrap().to_owned())
        .collect();
    let recipe = Recipe::prepare(kernel, lab.folder()).unwrap();
    let mut guest = recipe.boot("one", &arguments).unwrap();

    let connect = format!("vsock connect one {GUEST_ECHO}");
    assert_eq!(said_through(lab, &daemon, &connect), "by the command line");

    let greet = format!("greet 2 {SIBLING} hello");
    guest.agent().run(&greet).unwrap_err();
    let allow = daemon.output(&format!("vsock policy allow one {SIBLING} host"));
    assert!(allow.unwrap().status.success());
    let mut listen = daemon.command(&format!("vsock listen one {SIBLING} --exec cat"));
    let mut listener = listen.stdin(Stdio::null()).spawn().unwrap();
    until("the host answers", || {
        Path::new(lease["vsock"]["socket"].as_str().unwrap())
            .with_file_name(format!("vsock.sock_{SIBLING}"))
            .exists()
    });
    assert_eq!(guest.agent().run(&greet).unwrap(), "hello");
    listener.kill().unwrap();
    listener.wait().unwrap();
}

/// A daemon and its lease `one` with a channel of this kind.
fn leased(lab: &Lab, kind: &str) -> (Daemon, Value) {
    let folder = lab.folder().join("daemon");
    fs::create_dir(&folder).unwrap();
    let config = "instance = \"channels\"\n[vsock]\nenabled = true\n";
    let daemon = Daemon::start(&sandwire::executable().unwrap(), &folder, config).unwrap();
    let create = "pool create web --size 1 --ipv4 10.64.0.0/24 --wait";
    daemon.json(create).unwrap();
    let lease = daemon.json(&format!("acquire web one --vsock={kind}"));
    (daemon, lease.unwrap())
}

/// What comes back when a verb has said something to who echoes.
fn said_through(lab: &Lab, daemon: &Daemon, verb: &str) -> String {
    let executable = sandwire::executable().unwrap();
    let socket = daemon.socket();
    lab.shell(&format!(
        "printf 'by the command line' | {} --socket {} {verb}",
        executable.display(),
        socket.display()
    ))
}

/// 1 GiB.
const STREAM_BLOCKS: u64 = 16_384;
/// 64 MiB.
const SIBLING_BLOCKS: u64 = 1024;

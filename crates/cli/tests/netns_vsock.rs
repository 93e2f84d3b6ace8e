//! Leases with vsock channels, from the command line to a guest's virtqueues and back.
//!
//! The guest is one without a VM: it speaks vhost-user to the channel's socket as QEMU does. The service is the
//! real process, which the daemon starts.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

#[path = "netns_vsock/captures.rs"]
mod captures;
#[path = "netns_vsock/clients.rs"]
mod clients;
#[path = "netns_vsock/groups.rs"]
mod groups;
#[path = "netns_vsock/metrics.rs"]
mod metrics;
#[path = "netns_vsock/of_pools.rs"]
mod of_pools;
#[path = "netns_vsock/own_vsock.rs"]
mod own_vsock;

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    os::unix::{
        net::{UnixListener, UnixStream},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    net::sockopt::socket_peercred,
    process::{Pid, Signal, kill_process},
};
use sandwire_testlab::{
    lab::{self, Lab},
    sandwire::{self, Daemon},
};
use sandwire_vsock_guest::{Guest, Kind, Settings, Socket, socket::State};
use serde_json::Value;

const CONFIG: &str = r#"
instance = "channels"
[vsock]
enabled = true
threads = 2
[vsock.limits]
connection_bytes = 65536
[[pool]]
name = "web"
size = 3
quarantine_seconds = 0
addresses = { plan = "prefix", ipv4 = "10.64.0.0/24", ipv6 = "fd00:c10e::/64" }
"#;

/// A daemon with its services, which are ended too when the test is over.
struct World {
    daemon: Daemon,
    /// Names of groups with a service of their own.
    groups: &'static [&'static str],
}

impl World {
    fn start(lab: &Lab) -> Self {
        Self::start_with(lab, CONFIG, &[])
    }

    fn start_with(lab: &Lab, config: &str, groups: &'static [&'static str]) -> Self {
        let executable = sandwire::executable().unwrap();
        let daemon = Daemon::start(&executable, lab.folder(), config).unwrap();
        let world = Self { daemon, groups };
        let pool = world.daemon.wait_pool("web", 3, Duration::from_secs(60));
        pool.unwrap();
        world
    }

    fn folder(&self) -> PathBuf {
        self.daemon.state_folder().join("vsock")
    }

    /// The process of the service of everybody who is in no group.
    fn service(&self) -> Option<Pid> {
        service_at(&self.folder())
    }

    /// The process of a group's service.
    fn service_of(&self, group: &str) -> Option<Pid> {
        service_at(&self.folder().join("groups").join(group))
    }

    /// A lease with a channel that another user acquires, and its guest.
    fn lease_of(&self, uid: u32, name: &str) -> Guest {
        let verb = format!("--json acquire web {name} --vsock");
        let mut command = self.daemon.command(&verb);
        let (done, output, errors) = finish(piped(command.uid(uid).gid(uid)).spawn().unwrap());
        assert!(done, "{errors}");
        let lease: Value = serde_json::from_str(&output).unwrap();
        guest_of(&lease)
    }

    /// A lease with a channel, and its guest.
    fn lease(&self, name: &str) -> (Value, Guest) {
        let lease = self
            .daemon
            .json(&format!("acquire web {name} --vsock"))
            .unwrap();
        let guest = guest_of(&lease);
        (lease, guest)
    }

    fn spawn(&self, verb: &str) -> Child {
        let mut command = self.daemon.command(verb);
        piped(&mut command).spawn().unwrap()
    }

    /// Runs a verb that must succeed.
    fn run(&self, verb: &str) -> String {
        let output = self.daemon.output(verb).unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let errors = text(&output.stderr);
        assert!(output.status.success(), "{verb}: {errors}");
        text(&output.stdout)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // The daemon first, which would start it again.
        let _ = self.daemon.terminate();
        let groups = self.folder().join("groups");
        let groups = self.groups.iter().map(|group| groups.join(group));
        for folder in std::iter::once(self.folder()).chain(groups) {
            if let Some(service) = service_at(&folder) {
                let _ = kill_process(service, Signal::TERM);
                wait_until("the service ends", || service_at(&folder).is_none());
            }
        }
    }
}

/// The process that serves a folder.
fn service_at(folder: &Path) -> Option<Pid> {
    let control = UnixStream::connect(folder.join("control.sock")).ok()?;
    Some(socket_peercred(&control).ok()?.pid)
}

/// The guest of a lease that was acquired with a channel.
fn guest_of(lease: &Value) -> Guest {
    let socket = lease["vsock"]["vhost_user_socket"].as_str().unwrap();
    Guest::connect(&Settings::default(), Path::new(socket)).unwrap()
}

fn piped(command: &mut Command) -> &mut Command {
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
}

fn wait_until(what: &str, mut happens: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !happens() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Connects from the guest until the other side is there.
fn open_until(guest: &mut Guest, port: u32) -> Socket {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match guest.open_stream(port) {
            Ok(socket) => return socket,
            Err(error) => assert!(Instant::now() < deadline, "port {port}: {error}"),
        }
        guest.run_for(Duration::from_millis(50)).unwrap();
    }
}

/// Sends to somebody who sends it back.
fn echo(guest: &mut Guest, socket: Socket, text: &str) {
    guest.send(socket, text.as_bytes()).unwrap();
    let back = guest.receive_exact(socket, text.len()).unwrap();
    assert_eq!(back, text.as_bytes());
}

/// Ends a child as Ctrl-C does, and returns what it printed.
fn interrupt(child: Child) -> (bool, String, String) {
    let pid = Pid::from_child(&child);
    kill_process(pid, Signal::INT).unwrap();
    finish(child)
}

fn finish(child: Child) -> (bool, String, String) {
    let output = child.wait_with_output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        output.status.success(),
        text(&output.stdout),
        text(&output.stderr),
    )
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_guest_and_its_host_speak_with_each_other_until_the_lease_ends() {
    lab::run_within(Duration::from_secs(120), |lab| {
        let world = World::start(lab);
        let (lease, mut guest) = world.lease("a");
        assert_eq!(guest.cid(), 3);

        // The host calls: both ways, and the end of each direction is passed on.
        guest.listen(Kind::Stream, 52);
        let mut child = world.spawn("vsock connect a 52");
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(b"question").unwrap();
        drop(stdin);
        let socket = guest.accept(Kind::Stream, 52).unwrap();
        assert_eq!(guest.receive_to_end(socket).unwrap(), b"question");
        guest.send(socket, b"answer after the end").unwrap();
        guest.close(socket).unwrap();
        let (done, output, errors) = finish(child);
        assert!(done, "{errors}");
        assert_eq!(output, "answer after the end");

        // A port where nobody listens.
        let child = world.spawn("vsock connect a 53");
        guest.run_for(Duration::from_millis(500)).unwrap();
        let pid = Pid::from_child(&child);
        wait_until("connect ends", || {
            guest.run_for(Duration::from_millis(10)).unwrap();
            rustix::process::test_kill_process(pid).is_err() || is_zombie(pid)
        });
        let (done, _, errors) = finish(child);
        assert!(!done && errors.contains("refuse"), "{errors}");

        let folder = PathBuf::from(lease["vsock"]["socket"].as_str().unwrap());
        let folder = folder.parent().unwrap().to_owned();
        assert!(folder.is_dir());
        world.run("release a");
        assert!(!folder.exists(), "the folder goes with the lease");
        let ended = guest.wait_until("the end", |guest| guest.poll() == usize::MAX);
        assert!(ended.is_err(), "the device is gone");
    });
}

fn is_zombie(pid: Pid) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    status.is_ok_and(|text| text.contains(") Z "))
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_a_guest_may_reach_changes_while_it_runs() {
    lab::run_within(Duration::from_secs(120), |lab| {
        let world = World::start(lab);
        let (_, mut guest) = world.lease("a");
        assert!(guest.open_stream(1024).is_err(), "nothing may be reached");

        world.run("vsock policy allow a 1024 host");
        let listener = world.spawn("vsock listen a 1024 --exec cat");
        let socket = open_until(&mut guest, 1024);
        echo(&mut guest, socket, "hello");

        let found = world.daemon.json("vsock list a").unwrap();
        let row = &found[0];
        assert_eq!(found.as_array().unwrap().len(), 1, "{found}");
        assert_eq!(row["state"], "established");
        assert_eq!(
            (&row["from_guest"], &row["peer_port"]),
            (&true.into(), &1024.into())
        );
        assert_eq!(
            (&row["egress_bytes"], &row["ingress_bytes"]),
            (&5.into(), &5.into())
        );
        // What the guest is told is the configuration's `connection_bytes`, less what was not told of yet.
        let credit = row["own_credit"].as_u64().unwrap();
        assert!((65_536 - 5..=65_536).contains(&credit), "{row}");
        assert_eq!(guest.socket(socket).peer_buf_alloc, 65_536);
        let shown = world.run("show a");
        assert!(shown.contains("a VMM is attached, 1 connection"), "{shown}");

        world.run("vsock policy reset a");
        let reset = guest.receive_to_end(socket);
        assert!(reset.is_err(), "the connection is reset: {reset:?}");
        assert!(guest.open_stream(1024).is_err());
        let channel = world.daemon.json("vsock list a --channels").unwrap();
        let refused = &channel[0]["traffic"]["refusals"]["policy"];
        assert!(refused.as_u64().unwrap() >= 2, "{channel}");
        let (done, _, errors) = interrupt(listener);
        assert!(done, "{errors}");
        let left = world.folder();
        let sockets = fs::read_dir(left)
            .unwrap()
            .flatten()
            .filter(|entry| entry.path().join("vsock.sock_1024").exists());
        assert_eq!(sockets.count(), 0, "the listener's socket goes with it");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn connections_outlive_the_daemon_and_the_service_comes_back_by_itself() {
    lab::run_within(Duration::from_secs(120), |lab| {
        let mut world = World::start(lab);
        let (lease, mut guest) = world.lease("a");
        let (_, _other) = world.lease("b");
        world.run("vsock policy allow a 1024 host");
        let listener = world.spawn("vsock listen a 1024 --exec cat");
        let socket = open_until(&mut guest, 1024);
        echo(&mut guest, socket, "before");

        world.daemon.kill().unwrap();
        echo(&mut guest, socket, "while the daemon is away");
        world.daemon.restart().unwrap();
        echo(&mut guest, socket, "with the next daemon");
        let found = world.daemon.json("vsock list").unwrap();
        assert_eq!(found.as_array().unwrap().len(), 1, "{found}");

        let service = world.service().unwrap();
        kill_process(service, Signal::KILL).unwrap();
        wait_until("another service is there", || {
            world.service().is_some_and(|pid| pid != service)
        });
        let path = PathBuf::from(lease["vsock"]["vhost_user_socket"].as_str().unwrap());
        wait_until("its channel is there", || {
            UnixStream::connect(&path).is_ok()
        });
        guest.reconnect(&path).unwrap();
        let socket = open_until(&mut guest, 1024);
        echo(&mut guest, socket, "with the next service");
        let channels = world.daemon.json("vsock list --channels").unwrap();
        assert_eq!(channels.as_array().unwrap().len(), 2);
        // Its command would go on for as long as the connection does.
        guest.close(socket).unwrap();
        interrupt(listener);

        // A lease that ends while the service is away leaves nothing, and neither does one of before.
        world.daemon.kill().unwrap();
        let stray = world.folder().join("web.200");
        fs::create_dir(&stray).unwrap();
        world.daemon.restart().unwrap();
        wait_until("a stray folder is swept", || !stray.exists());
        assert!(path.exists());
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn siblings_reach_each_other_and_captures_have_their_packets() {
    lab::run_within(Duration::from_secs(120), |lab| {
        let world = World::start(lab);
        let (_, mut caller) = world.lease("a");
        let (_, mut called) = world.lease("b");
        world.run("vsock policy allow a 5000 sandbox:b:7000");
        let file = lab.folder().join("a.pcap");
        let capture = world.spawn(&format!("vsock capture a -w {}", file.display()));
        wait_until("the capture runs", || file.exists());

        called.listen(Kind::Stream, 7000);
        let socket = caller.start_open(Kind::Stream, 2, 5000);
        let accepted = called.accept(Kind::Stream, 7000).unwrap();
        caller
            .wait_until("it is connected", |guest| {
                guest.socket(socket).state != State::Connecting
            })
            .unwrap();
        caller.send(socket, b"sibling").unwrap();
        caller.run_for(Duration::from_millis(50)).unwrap();
        assert_eq!(called.receive_exact(accepted, 7).unwrap(), b"sibling");

        wait_until("it is in the file", || {
            let bytes = fs::read(&file).unwrap();
            bytes.windows(7).any(|window| window == b"sibling")
        });
        let (done, _, errors) = interrupt(capture);
        assert!(done, "{errors}");
        let mut bytes = Vec::new();
        fs::File::open(&file)
            .unwrap()
            .read_to_end(&mut bytes)
            .unwrap();
        let magic = u32::from_ne_bytes(bytes[..4].try_into().unwrap());
        assert!([0xa1b2_c3d4, 0xa1b2_3c4d].contains(&magic), "{magic:x}");
        assert_eq!(u32::from_ne_bytes(bytes[20..24].try_into().unwrap()), 271);
        let has_text = bytes.windows(7).any(|window| window == b"sibling");
        assert!(
            has_text,
            "the packet is in the file of {} bytes",
            bytes.len()
        );
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn where_vsock_is_not_enabled_nothing_of_it_is_there_and_a_channel_is_refused() {
    lab::run(|lab| {
        let config = CONFIG.replace("enabled = true", "enabled = false");
        let executable = sandwire::executable().unwrap();
        let daemon = Daemon::start(&executable, lab.folder(), &config).unwrap();
        daemon.wait_pool("web", 3, Duration::from_secs(60)).unwrap();
        let output = daemon.output("acquire web a --vsock").unwrap();
        assert_eq!(output.status.code(), Some(1));
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(errors.contains("enabled = true"), "{errors}");
        assert_eq!(daemon.json("list").unwrap().as_array().unwrap().len(), 0);
        assert!(!daemon.state_folder().join("vsock").exists());
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_guest_whose_vmm_owns_the_device_is_reached_and_reaches_another() {
    lab::run_within(Duration::from_secs(120), |lab| {
        let world = World::start(lab);
        let (_, mut other) = world.lease("a");
        let lease = world.daemon.json("acquire web h --vsock=hybrid").unwrap();
        let socket = PathBuf::from(lease["vsock"]["socket"].as_str().unwrap());
        // What a VMM does: its own socket, and the guest's answer.
        let vmm = UnixListener::bind(&socket).unwrap();
        let child = world.spawn("vsock connect h 52");
        let (mut client, _) = vmm.accept().unwrap();
        let mut line = [0; 11];
        client.read_exact(&mut line).unwrap();
        assert_eq!(&line, b"CONNECT 52\n");
        client.write_all(b"OK 1024\nfrom the guest").unwrap();
        drop(client);
        let (done, output, errors) = finish(child);
        assert!(done && output == "from the guest", "{errors}");
        join_ports(lab, &world, &vmm, &socket);

        // The guest calls port 5000: its VMM connects to the socket of that name.
        let port = PathBuf::from(format!("{}_5000", socket.display()));
        assert!(UnixStream::connect(&port).is_err(), "no rule, no socket");
        world.run("vsock policy allow h 5000 sandbox:a:7000");
        other.listen(Kind::Stream, 7000);
        let mut guest = UnixStream::connect(&port).unwrap();
        guest.write_all(b"hello").unwrap();
        let accepted = other.accept(Kind::Stream, 7000).unwrap();
        assert_eq!(other.receive_exact(accepted, 5).unwrap(), b"hello");
        world.run("vsock policy reset h");
        assert!(UnixStream::connect(&port).is_err());
        world.run("release h");
        assert!(!socket.parent().unwrap().exists());
    });
}

/// `vsock forward` and `vsock listen` beside a VMM that owns its device.
fn join_ports(lab: &Lab, world: &World, vmm: &UnixListener, socket: &Path) {
    let path = lab.folder().join("hybrid.sock");
    let forward = world.spawn(&format!("vsock forward h {} 80", path.display()));
    let mut client = None;
    wait_until("the socket is there", || {
        client = UnixStream::connect(&path).ok();
        client.is_some()
    });
    let mut client = client.unwrap();
    let (mut asked, _) = vmm.accept().unwrap();
    let mut line = [0; 11];
    asked.read_exact(&mut line).unwrap();
    assert_eq!(&line, b"CONNECT 80\n");
    asked.write_all(b"OK 1025\na page").unwrap();
    drop(asked);
    let mut page = String::new();
    client.read_to_string(&mut page).unwrap();
    assert_eq!(page, "a page");
    let (done, _, errors) = interrupt(forward);
    assert!(done, "{errors}");

    world.run("vsock policy allow h 6000 host");
    let listener = world.spawn("vsock listen h 6000");
    let port = PathBuf::from(format!("{}_6000", socket.display()));
    let mut guest = None;
    wait_until("the port is open", || {
        guest = UnixStream::connect(&port).ok();
        guest.is_some()
    });
    guest.unwrap().write_all(b"to the host").unwrap();
    let (done, output, errors) = finish(listener);
    assert!(done && output == "to the host", "{errors}");
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn messages_keep_their_bounds_between_the_command_line_and_a_guest() {
    lab::run_within(Duration::from_secs(120), |lab| {
        // A message may be longer than `vsock connect` reads at a time.
        let limits = "connection_bytes = 2097152\nmessage_bytes = 1048576";
        let config = CONFIG.replace("connection_bytes = 65536", limits);
        let world = World::start_with(lab, &config, &[]);
        let (_, mut guest) = world.lease("a");
        guest.listen(Kind::Seqpacket, 60);
        let mut child = world.spawn("vsock connect a 60 --seqpacket");
        let mut stdin = child.stdin.take().unwrap();
        let socket = guest.accept(Kind::Seqpacket, 60).unwrap();
        // A guest sends no more at once than its own buffer holds.
        guest.socket_mut(socket).buf_alloc = 1024 * 1024;
        for message in ["first", "and the second"] {
            stdin.write_all(message.as_bytes()).unwrap();
            let received = guest.receive_message(socket).unwrap();
            assert_eq!(received.unwrap().0, message.as_bytes());
        }
        let found = world.daemon.json("vsock list a").unwrap();
        assert_eq!(found[0]["type"], "seqpacket", "{found}");

        let reader = thread::spawn(move || finish(child));
        let long = "m".repeat(300 * 1024);
        guest.send_message(socket, b"short,", false).unwrap();
        guest.send_message(socket, long.as_bytes(), true).unwrap();
        drop(stdin);
        let ended = guest.receive_message(socket).unwrap();
        assert_eq!(ended, None, "the end of standard input is told");
        guest.close(socket).unwrap();
        let (done, output, errors) = reader.join().unwrap();
        assert!(done, "{errors}");
        assert_eq!(output.len(), 6 + long.len());
        assert_eq!(output, format!("short,{long}"));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn ports_of_the_host_and_of_a_guest_are_joined_both_ways() {
    lab::run_within(Duration::from_secs(120), |lab| {
        let world = World::start(lab);
        let (_, mut guest) = world.lease("a");
        guest.listen(Kind::Stream, 80);

        // Clients of a TCP port of the host, and of a Unix socket, reach the guest.
        let tcp = world.spawn("vsock forward a 127.0.0.1:8080 80");
        let path = lab.folder().join("web.sock");
        let unix = world.spawn(&format!("vsock forward a {} 80", path.display()));
        let mut client = None;
        wait_until("the port is open", || {
            client = TcpStream::connect("127.0.0.1:8080").ok();
            client.is_some()
        });
        question(&mut guest, client.unwrap(), |client| {
            client.shutdown(std::net::Shutdown::Write)
        });
        let mut client = None;
        wait_until("the socket is there", || {
            client = UnixStream::connect(&path).ok();
            client.is_some()
        });
        question(&mut guest, client.unwrap(), |client| {
            client.shutdown(std::net::Shutdown::Write)
        });

        // The guest reaches services of the host.
        let server = std::net::TcpListener::bind("127.0.0.1:5432").unwrap();
        world.run("vsock policy allow a 5432-5433 host");
        let back = world.spawn("vsock forward --from-guest a 127.0.0.1:5432 5432");
        let socket = open_until(&mut guest, 5432);
        let (mut served, _) = server.accept().unwrap();
        guest.send(socket, b"query").unwrap();
        let mut query = [0; 5];
        served.read_exact(&mut query).unwrap();
        assert_eq!(&query, b"query");
        served.write_all(b"rows").unwrap();
        drop(served);
        assert_eq!(guest.receive_to_end(socket).unwrap(), b"rows");
        guest.close(socket).unwrap();

        for child in [tcp, unix, back] {
            let (done, _, errors) = interrupt(child);
            assert!(done, "{errors}");
        }
        assert!(!path.exists(), "the socket goes with its command");
        assert!(guest.open_stream(5432).is_err(), "nobody is there any more");
    });
}

/// A client of the host asks and ends its direction; the guest hears that and answers to the end.
fn question<C: Read + Write>(
    guest: &mut Guest,
    mut client: C,
    end: impl Fn(&C) -> std::io::Result<()>,
) {
    client.write_all(b"question").unwrap();
    end(&client).unwrap();
    let socket = guest.accept(Kind::Stream, 80).unwrap();
    assert_eq!(guest.receive_to_end(socket).unwrap(), b"question");
    guest.send(socket, b"answer after the end").unwrap();
    guest.close(socket).unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "answer after the end");
}

//! The service as a process: this test executable again, as it can't be any other one from here.

mod guests;
#[path = "../hybrid/mod.rs"]
mod hybrid;
mod process;

use std::{
    env,
    fs::{self, File},
    io::{Read, Write},
    net::Shutdown,
    os::unix::{
        fs::{MetadataExt, PermissionsExt, chown},
        net::{UnixDatagram, UnixListener, UnixStream},
    },
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use hybrid::{PATIENCE, echo, key, policy, serve, to_unix, until};
use process::{Service, again};
use rustix::{
    process::{Resource, Rlimit, setrlimit},
    thread::{CapabilitySet, capabilities, set_capabilities},
};
use sandwire_api::vsock::{VsockKind, VsockState};
use sandwire_vsock_host::{
    control::{ClientError, RefusalCode, VmSpec, control_socket},
    seccomp,
    service::{self, Seccomp, ServiceError, Settings},
};

/// Names the folder in the process that is to be the service.
const SERVE: &str = "SANDWIRE_TEST_VSOCK_SERVE";
/// User and group that it is to become.
const USER: &str = "SANDWIRE_TEST_VSOCK_USER";
/// How many descriptors it may have, whoever it is.
const DESCRIPTORS: &str = "SANDWIRE_TEST_VSOCK_DESCRIPTORS";
/// In the process that is to try what the filter refuses.
const PROBE: &str = "SANDWIRE_TEST_VSOCK_PROBE";

/// Also the service of the other tests: they start this test alone with a folder in its environment.
#[test]
fn a_folder_that_is_a_file_is_refused_by_name() {
    if let Some(folder) = env::var_os(SERVE) {
        let mut settings = Settings::new(folder.into());
        settings.threads = Some(1);
        settings.user = env::var(USER).ok().map(|user| {
            let id = user.parse().expect("a number");
            (id, id)
        });
        settings.seccomp = Seccomp::Kill;
        if let Ok(count) = env::var(DESCRIPTORS) {
            limit_descriptors(count.parse().expect("a number"));
        }
        service::run(&settings).expect("the service");
        return;
    }
    let file = tempfile::NamedTempFile::new().expect("a file");
    let error = service::run(&Settings::new(file.path().to_owned())).expect_err("it is a file");
    assert!(matches!(error, ServiceError::Folder { .. }), "{error}");
    assert!(
        error
            .to_string()
            .contains(&file.path().display().to_string()),
        "{error}"
    );
}

/// Limits this process for good: root could raise it again by a capability.
fn limit_descriptors(count: u64) {
    let limit = Rlimit {
        current: Some(count),
        maximum: Some(count),
    };
    setrlimit(Resource::Nofile, limit).expect("a lower limit");
    let mut left = capabilities(None).expect("capabilities");
    left.effective.remove(CapabilitySet::SYS_RESOURCE);
    left.permitted.remove(CapabilitySet::SYS_RESOURCE);
    set_capabilities(None, left).expect("fewer capabilities");
}

fn assert_echoes(mut stream: UnixStream) {
    stream.write_all(b"hello").expect("writing");
    stream.shutdown(Shutdown::Write).expect("an end");
    let mut back = Vec::new();
    stream.read_to_end(&mut back).expect("the echo");
    assert_eq!(back, b"hello");
}

#[test]
fn killed_and_started_again_it_serves_the_same_guests() {
    let mut service = Service::start();
    let echoing = service.path("echo");
    serve(&echoing, echo);
    let rule = to_unix("7", &echoing);
    let mut client = service.client();
    for number in 0..20 {
        let kind = if number % 2 == 0 {
            VsockKind::Hybrid
        } else {
            VsockKind::VhostUser
        };
        let spec = service.spec(&format!("vm{number}"), kind, &[&rule]);
        client.add_vm(spec).expect("a guest");
    }
    client.remove_vm(key("vm3")).expect("removing one");
    client
        .set_policy(key("vm4"), policy(&[&to_unix("8", &echoing)]))
        .expect("another policy");
    let before = client.vms().expect("the guests");
    assert_eq!(before.len(), 19);
    assert_echoes(service.call("vm0", 7).expect("a connection"));
    service.kill();
    service.restart();
    let mut client = service.client();
    assert_eq!(client.vms().expect("the guests"), before);
    assert_echoes(service.call("vm0", 7).expect("a connection"));
    assert_echoes(
        service
            .call("vm4", 8)
            .expect("a connection by the changed policy"),
    );
    service.call("vm4", 7).expect_err("the earlier policy");
    for vm in before.iter().filter(|vm| vm.kind == VsockKind::VhostUser) {
        UnixStream::connect(vm.vhost_socket()).expect("a vhost-user socket");
        UnixStream::connect(vm.stream_socket()).expect("a socket for clients");
    }
}

#[test]
fn who_cannot_be_served_at_a_start_is_so_at_the_next_unless_its_folder_is_gone() {
    let mut service = Service::start();
    let specs = ["kept", "gone"].map(|name| service.spec(name, VsockKind::VhostUser, &[]));
    let mut client = service.client();
    for spec in &specs {
        client.add_vm(spec.clone()).expect("a guest");
    }
    let [kept, gone] = specs;
    service.kill();
    fs::remove_dir_all(&gone.folder).expect("removing a folder");
    let socket = kept.vhost_socket();
    fs::remove_file(&socket).expect("removing a socket");
    fs::write(&socket, "in the way").expect("writing a file");
    service.restart();
    assert!(service.client().vms().expect("the guests").is_empty());
    service.kill();
    fs::remove_file(&socket).expect("removing a file");
    // Somebody else's by now.
    fs::create_dir(&gone.folder).expect("a folder");
    service.restart();
    assert_eq!(service.client().vms().expect("the guests"), [kept]);
    UnixStream::connect(&socket).expect("a vhost-user socket");
}

/// A path is that of the next lease's folder, too.
#[test]
fn what_has_taken_a_folders_place_is_left_alone() {
    let mut service = Service::start();
    let rule = to_unix("7", &service.path("echo"));
    let [early, late, hybrid] = [
        ("early", VsockKind::VhostUser),
        ("late", VsockKind::VhostUser),
        ("hybrid", VsockKind::Hybrid),
    ]
    .map(|(name, kind)| service.spec(name, kind, &[&rule]));
    let mut client = service.client();
    for spec in [&early, &late, &hybrid] {
        client.add_vm(spec.clone()).expect("a guest");
    }
    let replaced = |spec: &VmSpec, sockets: &[&str]| -> Vec<UnixListener> {
        let aside = spec.folder.with_extension("aside");
        fs::rename(&spec.folder, aside).expect("moving a folder");
        fs::create_dir(&spec.folder).expect("the next one");
        let bind = |socket: &&str| UnixListener::bind(spec.folder.join(socket));
        let bound = sockets.iter().map(bind);
        bound.map(|socket| socket.expect("a socket")).collect()
    };
    let _held = replaced(&early, &["vhost.sock", "vsock.sock"]);
    client.remove_vm(early.key.clone()).expect("a late removal");
    for socket in [early.vhost_socket(), early.stream_socket()] {
        UnixStream::connect(socket).expect("the next one's socket");
    }
    let _held = replaced(&hybrid, &["vsock.sock_7"]);
    client.remove_vm(hybrid.key).expect("a late removal");
    service.call("hybrid", 7).expect("the next one's socket");
    service.kill();
    replaced(&late, &[]);
    service.restart();
    assert!(service.client().vms().expect("the guests").is_empty());
    let sockets = fs::read_dir(&late.folder).expect("the next one's folder");
    assert_eq!(sockets.count(), 0);
    let remembered = fs::read_dir(service.path("vms")).expect("the memory");
    assert_eq!(remembered.count(), 0);
}

#[test]
fn sigterm_ends_it_in_order_and_nothing_is_forgotten() {
    let systemd = tempfile::tempdir().expect("a folder");
    let told = systemd.path().join("notify");
    let told = UnixDatagram::bind(&told)
        .map(|socket| (socket, told))
        .expect("a socket");
    let mut service = Service::start_with(|command| {
        command.env("NOTIFY_SOCKET", &told.1);
    });
    let hears = |what: &str| {
        let mut message = [0; 64];
        let length = told.0.recv(&mut message).expect("a message");
        assert!(String::from_utf8_lossy(&message[..length]).contains(what));
    };
    hears("READY=1");
    let spec = service.spec(
        "web",
        VsockKind::Hybrid,
        &[&to_unix("7", Path::new("/nowhere"))],
    );
    service.client().add_vm(spec.clone()).expect("a guest");
    let pid = i32::try_from(service.process.id()).expect("a process");
    let pid = rustix::process::Pid::from_raw(pid).expect("a process");
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("SIGTERM");
    let status = service.process.wait().expect("its end");
    assert!(status.success(), "{status}");
    hears("STOPPING=1");
    assert!(!control_socket(service.folder.path()).exists());
    assert!(!spec.folder.join("vsock.sock_7").exists());
    service.restart();
    assert_eq!(service.client().vms().expect("the guests"), [spec]);
}

#[test]
fn a_second_service_in_the_same_folder_is_refused() {
    let service = Service::start();
    let error = service::run(&Settings::new(service.folder.path().to_owned()))
        .expect_err("there is one already");
    assert!(matches!(error, ServiceError::Control(_)), "{error}");
    service.client().hello().expect("the first goes on");
}

#[test]
fn bad_input_is_refused_with_its_reason_and_changes_nothing() {
    let service = Service::start();
    let mut client = service.client();
    let good = service.spec("web", VsockKind::VhostUser, &[]);
    let with = |change: fn(&mut VmSpec)| {
        let mut spec = service.spec("bad", VsockKind::VhostUser, &[]);
        change(&mut spec);
        spec
    };
    let mut first = good.clone();
    first.virtual_cid = Some(40);
    client.add_vm(first.clone()).expect("a guest");
    let _taken = {
        let path = service.path("taken");
        fs::create_dir(&path).expect("a folder");
        UnixListener::bind(path.join("vhost.sock")).expect("somebody's socket")
    };
    let mut taken = service.spec("bad", VsockKind::VhostUser, &[]);
    taken.folder = service.path("taken");
    let cases: [(VmSpec, RefusalCode, &str); 10] = [
        (first.clone(), RefusalCode::InUse, "already"),
        (with(|spec| spec.cid = 2), RefusalCode::Invalid, "CID 2"),
        (
            with(|spec| spec.cid = u32::MAX),
            RefusalCode::Invalid,
            "reserved",
        ),
        (
            with(|spec| spec.virtual_cid = Some(1)),
            RefusalCode::Invalid,
            "virtual CID 1",
        ),
        (
            with(|spec| spec.virtual_cid = Some(40)),
            RefusalCode::InUse,
            "in use by web",
        ),
        (
            with(|spec| spec.folder = "relative".into()),
            RefusalCode::Invalid,
            "isn't absolute",
        ),
        (
            with(|spec| spec.folder = format!("/{}", "x".repeat(100)).into()),
            RefusalCode::Invalid,
            "107 bytes",
        ),
        (
            with(|spec| spec.folder = "/nonexistent".into()),
            RefusalCode::Failed,
            "/nonexistent of vsock channel",
        ),
        (
            with(|spec| spec.limits.connection_bytes = 100),
            RefusalCode::Invalid,
            "connection_bytes",
        ),
        (taken.clone(), RefusalCode::InUse, "somebody listens"),
    ];
    for (spec, code, says) in cases {
        match client.add_vm(spec) {
            Err(ClientError::Refused { code: is, message }) => {
                assert_eq!(is, code, "{message}");
                assert!(message.contains(says), "{message}");
            }
            other => panic!("{says}: {other:?}"),
        }
    }
    let there = fs::read_dir(service.path("taken")).expect("the folder");
    assert_eq!(there.count(), 1, "not half of it");
    assert_eq!(client.vms().expect("the guests"), [first]);
    assert_eq!(
        fs::read_dir(service.path("vms"))
            .expect("the memory")
            .count(),
        1
    );
    let overlap = policy(&[r#"1-5 {"kind": "host"}"#, r#"5 {"kind": "host"}"#]);
    let error = client
        .set_policy(key("web"), overlap)
        .expect_err("an overlap");
    assert!(error.to_string().contains("port 5"), "{error}");
    let error = client
        .set_policy(key("nobody"), policy(&[]))
        .expect_err("nobody");
    assert!(
        matches!(
            error,
            ClientError::Refused {
                code: RefusalCode::NotFound,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn a_control_connection_that_talks_nonsense_or_not_at_all_hurts_nobody() {
    let service = Service::start();
    let path = control_socket(service.folder.path());
    let _silent: Vec<UnixStream> = (0..8)
        .map(|_| UnixStream::connect(&path).expect("a connection"))
        .collect();
    let mut half = UnixStream::connect(&path).expect("a connection");
    half.write_all(b"{\"request\": \"hel")
        .expect("half a request");
    let mut nonsense = UnixStream::connect(&path).expect("a connection");
    nonsense
        .set_read_timeout(Some(PATIENCE))
        .expect("a time-out");
    nonsense
        .write_all(b"GET / HTTP/1.1\n\xff\n")
        .expect("nonsense");
    let answer = hybrid::read_line(&mut nonsense);
    assert!(
        answer.contains("\"refused\"") && answer.contains("no request"),
        "{answer}"
    );
    let mut endless = UnixStream::connect(&path).expect("a connection");
    endless
        .set_write_timeout(Some(PATIENCE))
        .expect("a time-out");
    let piece = [b'x'; 64 * 1024];
    let ended = (0..64).any(|_| endless.write_all(&piece).is_err());
    assert!(ended, "four megabytes without a newline were taken");
    half.write_all(b"lo\"}\n").expect("the other half");
    let answer = hybrid::read_line(&mut half);
    assert!(answer.contains("\"hello\""), "{answer}");
}

#[test]
fn what_goes_on_is_listed_and_counted() {
    let service = Service::start();
    let echoing = service.path("echo");
    serve(&echoing, echo);
    let mut client = service.client();
    for lease in ["a", "b"] {
        let spec = service.spec(lease, VsockKind::Hybrid, &[&to_unix("7", &echoing)]);
        client.add_vm(spec).expect("a guest");
    }
    let mut stream = service.call("a", 7).expect("a connection");
    stream.write_all(b"12345").expect("writing");
    stream.read_exact(&mut [0; 5]).expect("the echo");
    let _vmm = UnixListener::bind(service.path("a").join("vsock.sock")).expect("a VMM's socket");
    let listed = client.connections(Some(key("a"))).expect("a list");
    assert_eq!(listed.len(), 1);
    assert_eq!(
        (listed[0].state, listed[0].peer_port),
        (VsockState::Established, 7)
    );
    assert_eq!(listed[0].peer, echoing.display().to_string());
    assert!(
        client
            .connections(Some(key("b")))
            .expect("a list")
            .is_empty()
    );
    client
        .connections(Some(key("c")))
        .expect_err("no such guest");
    let traffic = client.traffic(None).expect("counters");
    let of_a = &traffic[0].traffic;
    assert_eq!(
        (of_a.egress_bytes, of_a.ingress_bytes, of_a.attached),
        (5, 5, true)
    );
    assert_eq!(
        (traffic[1].traffic.connections, traffic[1].traffic.attached),
        (0, false)
    );
}

#[test]
fn a_capture_ends_with_its_connection_and_tells_why_if_it_ends_before() {
    let service = Service::start();
    let echoing = service.path("echo");
    serve(&echoing, echo);
    let spec = service.spec("a", VsockKind::Hybrid, &[&to_unix("7", &echoing)]);
    service.client().add_vm(spec).expect("a guest");
    let path = service.path("a.pcap");
    let file = File::create(&path).expect("a file");
    let running = service
        .client()
        .capture(key("a"), None, &file)
        .expect("a capture");
    let error = service
        .client()
        .capture(key("a"), None, &file)
        .expect_err("one at a time");
    assert!(error.to_string().contains("captured already"), "{error}");
    assert_echoes(service.call("a", 7).expect("a connection"));
    until("packets are in the file", || {
        file.metadata().expect("its size").len() > 500
    });
    drop(running);
    let full = fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .expect("a full disk");
    let mut running = retry(|| service.client().capture(key("a"), None, &full));
    let outcome = running
        .wait(PATIENCE)
        .expect("its end")
        .expect("an outcome");
    assert!(outcome.reason.expect("a reason").contains("no space"));
    let mut running = retry(|| service.client().capture(key("a"), None, &file));
    // The guest and the service go on.
    assert_echoes(service.call("a", 7).expect("a connection"));
    service
        .client()
        .remove_vm(key("a"))
        .expect("removing the guest");
    let outcome = running
        .wait(PATIENCE)
        .expect("its end")
        .expect("an outcome");
    assert!(outcome.reason.expect("a reason").contains("was removed"));
    let error = service
        .client()
        .capture(key("z"), None, &file)
        .expect_err("no such guest");
    assert!(
        matches!(
            error,
            ClientError::Refused {
                code: RefusalCode::NotFound,
                ..
            }
        ),
        "{error}"
    );
}

/// The end of a connection is learnt of a little later than it happens.
fn retry<T>(mut attempt: impl FnMut() -> Result<T, ClientError>) -> T {
    let mut result = None;
    until("it succeeds", || {
        result = attempt().ok();
        result.is_some()
    });
    result.expect("the result")
}

#[test]
fn clients_that_never_speak_are_bounded_and_given_up() {
    let service = Service::start();
    let mut spec = service.spec("a", VsockKind::VhostUser, &[]);
    spec.limits.handshakes = 16;
    spec.limits.handshake_timeout = Duration::from_millis(300);
    service.client().add_vm(spec.clone()).expect("a guest");
    let descriptors = || {
        let path = format!("/proc/{}/fd", service.process.id());
        fs::read_dir(path).expect("its descriptors").count()
    };
    let before = descriptors();
    let mut silent: Vec<UnixStream> = (0..1000)
        .map(|_| UnixStream::connect(spec.stream_socket()).expect("a connection"))
        .collect();
    thread::sleep(Duration::from_millis(100));
    assert!(
        descriptors() <= before + 40,
        "{} descriptors",
        descriptors()
    );
    for stream in &mut silent {
        stream.set_read_timeout(Some(PATIENCE)).expect("a time-out");
        assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0, "it was given up");
    }
}

/// Else the daemon takes it for gone, and nobody gets a channel.
#[test]
fn guests_connections_leave_descriptors_for_who_asks_the_service() {
    let service = Service::start_with(|command| {
        command.env(DESCRIPTORS, "256");
    });
    let echoing = service.path("echo");
    serve(&echoing, echo);
    let rule = to_unix("7", &echoing);
    let spec = service.spec("a", VsockKind::Hybrid, &[&rule]);
    service.client().add_vm(spec).expect("a guest");
    let mut taken = Vec::new();
    let is_refused = (0..256).any(|_| {
        let mut stream = service.call("a", 7).expect("the router's socket");
        let is_served = stream.write_all(b"x").is_ok() && stream.read_exact(&mut [0]).is_ok();
        taken.push(stream);
        !is_served
    });
    assert!(is_refused, "no end of {} connections", taken.len());
    let mut client = service.client();
    client.hello().expect("an answer");
    let another = service.spec("b", VsockKind::VhostUser, &[]);
    client.add_vm(another).expect("another guest");
    // They come back.
    taken.clear();
    until("there is one again", || {
        let mut stream = service.call("a", 7).expect("the router's socket");
        stream.write_all(b"x").is_ok() && stream.read_exact(&mut [0]).is_ok()
    });
}

/// Whose calls, one after the other, each leave one: what the call itself took comes back.
#[test]
fn vhost_user_guests_and_their_clients_leave_descriptors_for_who_asks_the_service() {
    let service = Service::start_with(|command| {
        command.env(DESCRIPTORS, "256");
    });
    let echoing = service.path("echo");
    serve(&echoing, echo);
    let rule = to_unix("7", &echoing);
    let mut spec = service.spec("a", VsockKind::VhostUser, &[&rule]);
    // Nobody who says nothing makes way by that.
    spec.limits.handshake_timeout = PATIENCE * 2;
    service.client().add_vm(spec.clone()).expect("a guest");
    let mut guest = guests::boot(&spec);
    let calls: Vec<_> = (0..256).map_while(|_| guest.open_stream(7).ok()).collect();
    assert!(calls.len() < 256, "no end of {} connections", calls.len());
    let another = service.spec("b", VsockKind::VhostUser, &[]);
    service.client().add_vm(another).expect("another guest");
    // Who has said nothing yet has one, too.
    let clients: Vec<_> = (0..64)
        .map(|_| UnixStream::connect(spec.stream_socket()).expect("the guest's socket"))
        .collect();
    let mut last = clients.last().expect("a client");
    last.set_read_timeout(Some(PATIENCE)).expect("a time-out");
    assert_eq!(last.read(&mut [0]).expect("the end"), 0);
    let another = service.spec("c", VsockKind::VhostUser, &[]);
    service.client().add_vm(another).expect("another guest");
    drop(guest);
    drop(clients);
    let mut guest = guests::boot(&spec);
    until("there is one again", || guest.open_stream(7).is_ok());
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn it_keeps_no_right_that_it_has_no_use_for() {
    let service = Service::start_with(|command| {
        command.env(USER, "65534");
    });
    let threads = service.statuses();
    assert!(
        threads.len() >= 4,
        "control, captures, router, a worker: {threads:?}"
    );
    for status in &threads {
        let is = |name: &str| status[name].as_str();
        assert_eq!(is("Uid"), "65534\t65534\t65534\t65534");
        assert_eq!(is("Gid"), "65534\t65534\t65534\t65534");
        assert_eq!(is("Groups"), "");
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(is(set), "0000000000000000", "{set} of {}", is("Name"));
        }
        assert_eq!((is("NoNewPrivs"), is("Seccomp")), ("1", "2"));
    }
    let memory = fs::metadata(service.path("vms")).expect("its memory");
    assert_eq!((memory.uid(), memory.mode() & 0o777), (65_534, 0o700));
    let folder = fs::metadata(service.path("")).expect("its folder");
    assert_eq!(folder.uid(), 0, "where root makes channels' folders");
    // And it does its work like that.
    let echoing = service.path("echo");
    serve(&echoing, echo);
    fs::set_permissions(&echoing, fs::Permissions::from_mode(0o777)).expect("its mode");
    let spec = service.spec("a", VsockKind::Hybrid, &[&to_unix("7", &echoing)]);
    service.client().add_vm(spec).expect("a guest");
    assert_echoes(service.call("a", 7).expect("a connection"));
}

/// Root's own files are its, and so are others' sockets; nothing else is left of what root may.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn without_a_user_it_keeps_the_one_capability_that_it_reaches_others_sockets_by() {
    const DAC_OVERRIDE: &str = "0000000000000002";
    let service = Service::start();
    let threads = service.statuses();
    assert!(threads.len() >= 4, "{threads:?}");
    for status in &threads {
        let is = |name: &str| status[name].as_str();
        assert_eq!(is("Uid"), "0\t0\t0\t0");
        for set in ["CapPrm", "CapEff"] {
            assert_eq!(is(set), DAC_OVERRIDE, "{set} of {}", is("Name"));
        }
        for set in ["CapInh", "CapBnd", "CapAmb"] {
            assert_eq!(is(set), "0000000000000000", "{set} of {}", is("Name"));
        }
        assert_eq!((is("NoNewPrivs"), is("Seccomp")), ("1", "2"));
    }
    // And it does its work like that, for a guest of another user's and at a service of one.
    let echoing = service.path("echo");
    serve(&echoing, echo);
    let spec = service.spec("a", VsockKind::Hybrid, &[&to_unix("7", &echoing)]);
    for (path, mode) in [(&echoing, 0o600), (&spec.folder, 0o700)] {
        chown(path, Some(65_534), Some(65_534)).expect("another owner");
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("its mode");
    }
    let mut client = service.client();
    client.add_vm(spec.clone()).expect("a guest");
    assert_echoes(service.call("a", 7).expect("a connection"));
    client.remove_vm(spec.key).expect("the guest's end");
    let left = fs::read_dir(&spec.folder).expect("its folder").count();
    assert_eq!(left, 0, "sockets stay in another's folder");
}

/// Also the process in which the others try it.
#[test]
fn what_the_filter_refuses_fails_and_what_the_service_needs_does_not() {
    if let Some(mode) = env::var_os(PROBE) {
        let mode = if mode == "kill" {
            Seccomp::Kill
        } else {
            Seccomp::Refuse
        };
        let folder = tempfile::tempdir().expect("a folder");
        seccomp::install(mode).expect("the filter");
        probe(folder.path());
        // The folder can't be listed any more, and so not removed.
        std::mem::forget(folder);
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let run = |mode: &str| {
        let test = "what_the_filter_refuses_fails_and_what_the_service_needs_does_not";
        let mut command = again(test, PROBE, mode.into());
        command.env("TMPDIR", folder.path()).stderr(Stdio::null());
        command.status().expect("the probing process")
    };
    assert!(run("refuse").success(), "an assertion failed in it");
    let killed = std::os::unix::process::ExitStatusExt::signal(&run("kill"));
    assert_eq!(killed, Some(31), "SIGSYS");
    let left = fs::read_dir(folder.path()).expect("what both have left");
    let written: Vec<_> = left
        .map(|entry| fs::read(entry.expect("a folder").path().join("new")).expect("a file"))
        .collect();
    assert_eq!(written, [b"xy", b"xy"], "not before that");
}

fn probe(folder: &Path) {
    use rustix::{
        fs::{Mode, OFlags, open},
        io::Errno,
        net::{AddressFamily, SocketType, socket},
    };
    let created = folder.join("new");
    let flags = sandwire_vsock_host::state::CREATE_FLAGS;
    let file = open(&created, flags, Mode::RUSR | Mode::WUSR).expect("a new file");
    rustix::io::write(&file, b"x").expect("writing it");
    // As the C library reads what it wants to know of the machine; it goes on without.
    let opened = open(
        "/etc/passwd",
        OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    assert_eq!(opened.err(), Some(Errno::PERM));
    rustix::io::write(&file, b"y").expect("writing it");
    assert_eq!(open(&created, flags, Mode::RUSR).err(), Some(Errno::EXIST));
    for flags in [OFlags::RDONLY, OFlags::WRONLY, OFlags::RDWR, OFlags::PATH] {
        let opened = open("/etc/passwd", flags, Mode::empty());
        assert_eq!(opened.err(), Some(Errno::PERM), "{flags:?}");
        let opened = open(&created, flags | OFlags::CREATE, Mode::empty());
        assert_eq!(opened.err(), Some(Errno::PERM), "{flags:?} with CREATE");
    }
    Command::new("/bin/true").spawn().expect_err("a process");
    for family in [AddressFamily::NETLINK, AddressFamily::PACKET] {
        let made = socket(family, SocketType::RAW, None);
        assert_eq!(made.err(), Some(Errno::PERM), "{family:?}");
    }
    socket(AddressFamily::UNIX, SocketType::STREAM, None).expect("a Unix socket");
    thread::Builder::new().spawn(|| ()).expect_err("a thread");
}

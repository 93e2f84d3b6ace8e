//! The server on a real socket, with the client of the API and with callers that behave badly.

use std::{
    fs::File,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream as Stream,
    },
    path::PathBuf,
    thread,
    time::Instant,
};

use rustix::{
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
    process::{Resource, Rlimit, getrlimit, setrlimit},
};
use sandwire_api::{
    client::{Client, ClientError},
    error::{ApiError, ErrorCode},
    lease::{AcquireLease, ReleaseOutcome},
    trace::{Direction, Frame, Stage, TraceLine, TracePacket, Verdict},
};
use sandwire_vsock_host::listener::refuse_descriptors;
use tempfile::TempDir;
use tokio::task::JoinHandle;

use super::*;
use crate::{
    config::SocketConfig,
    http::{self, App},
    model::{self, ModelNetwork},
    socket,
};

struct Lab {
    socket: PathBuf,
    client: Arc<Client>,
    network: Arc<ModelNetwork>,
    router: Router,
    stop: watch::Sender<bool>,
    server: JoinHandle<()>,
    _folder: TempDir,
}

impl Lab {
    /// Has a pool `web`. The caller is the daemon's own user, so it is privileged.
    fn new() -> Self {
        Self::with_pool(&model::pool("web", 1))
    }

    fn with_pool(spec: &sandwire_api::pool::PoolSpec) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (slots, network) = model::open(folder.path());
        model::fill(&slots, spec);
        let socket = folder.path().join("s.sock");
        let config = SocketConfig {
            path: socket.clone(),
            mode: 0o600,
            uid: None,
            gid: None,
        };
        let listener = socket::bind(&config).unwrap();
        listener.set_nonblocking(true).unwrap();
        let listener = UnixListener::from_std(listener).unwrap();
        let (stop, stopped) = watch::channel(false);
        let router = http::router(App::new(slots, false));
        Self {
            client: Arc::new(Client::new(&socket)),
            server: tokio::spawn(serve(listener, router.clone(), stopped)),
            router,
            socket,
            network,
            stop,
            _folder: folder,
        }
    }

    /// Connects as user 1002, who manages the pool, unless that one has too many connections.
    fn connect_as_manager(&self, users: &Arc<Users>) -> Option<UnixStream> {
        let caller = Caller {
            uid: 1002,
            gid: 1002,
            privileged: false,
        };
        let admission = Users::admit(users, caller.uid)?;
        let permit = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        let place = Place::new(permit, Some(admission));
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (router, stop) = (self.router.clone(), self.stop.subscribe());
        tokio::spawn(converse(theirs, caller, place, router, stop));
        Some(ours)
    }

    /// What the daemon answers to these bytes, until it closes the connection.
    async fn answer_to(&self, request: Vec<u8>) -> String {
        let socket = self.socket.clone();
        tokio::task::spawn_blocking(move || {
            let mut stream = Stream::connect(socket).unwrap();
            // A daemon that answers early may close before it has read all.
            let _ = stream.write_all(&request);
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            String::from_utf8(answer).unwrap()
        })
        .await
        .unwrap()
    }
}

fn acquire(name: &str) -> AcquireLease {
    AcquireLease {
        pool: "web".parse().unwrap(),
        name: Some(name.parse().unwrap()),
        clone_address: None,
        ttl_seconds: None,
        policy: None,
        process: false,
        vsock: None,
        attach: None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_client_and_the_daemon_understand_each_other() {
    let lab = Lab::new();
    let client = &lab.client;
    assert!(client.health().await.unwrap().ready);
    let first = client.acquire(&acquire("a")).await.unwrap();
    let again = client.acquire(&acquire("a")).await.unwrap();
    assert!(first.new && !again.new);
    assert_eq!(first.lease, again.lease);
    let name = &first.lease.name;
    assert_eq!(
        client.leases().await.unwrap(),
        std::slice::from_ref(&first.lease)
    );
    assert_eq!(client.lease(name, None).await.unwrap().lease, first.lease);

    let port = sandwire_api::published_port::PublishPort {
        protocol: sandwire_api::published_port::Protocol::Udp,
        host_address: Some("2001:db8::1".parse().unwrap()),
        host_port: 5353,
        clone_port: 53,
        nic: 0,
    };
    let refused = client.publish(name, None, &port, false).await.unwrap_err();
    assert!(refused.is_refusal(), "the lease has no IPv6: {refused}");
    let port = sandwire_api::published_port::PublishPort {
        host_address: Some("192.0.2.1".parse().unwrap()),
        ..port
    };
    let published = client.publish(name, None, &port, true).await.unwrap();
    assert_eq!(
        client.ports().await.unwrap(),
        std::slice::from_ref(&published)
    );
    assert_eq!(client.lease_ports(name, None).await.unwrap(), [published]);
    let uid = Some(first.lease.owner_uid);
    client
        .withdraw(name, uid, port.protocol, port.host_port, port.host_address)
        .await
        .unwrap();
    assert_eq!(client.ports().await.unwrap(), []);

    let released = client.release(name, None).await.unwrap();
    assert_eq!(released.outcome, ReleaseOutcome::Released);
    let error = client.release(name, None).await.unwrap_err();
    assert_eq!(error.code(), Some(ErrorCode::NotFound));

    let spec = model::pool("other", 2);
    assert_eq!(client.create_pool(&spec).await.unwrap().spec, spec);
    assert_eq!(
        client.resize_pool(&spec.name, 1).await.unwrap().spec.size,
        1
    );
    assert_eq!(client.pool(&spec.name).await.unwrap().spec.size, 1);
    client.delete_pool(&spec.name).await.unwrap();
    assert_eq!(client.pools().await.unwrap().len(), 1);
    assert!(
        client
            .metrics()
            .await
            .unwrap()
            .contains("sandwire_acquires_total 1\n")
    );
    assert!(client.openapi().await.unwrap()["openapi"].is_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn open_taps_come_over_the_socket_and_the_daemon_keeps_none() {
    let lab = Lab::with_pool(&model::ebpf_pool("web", 1));
    let name = lab.client.acquire(&acquire("a")).await.unwrap().lease.name;
    for _ in 0..50 {
        let taps = lab.client.taps(&name, None).await.unwrap();
        let guests = std::mem::take(&mut *lab.network.guests.lock().unwrap());
        assert_eq!((taps.len(), guests.len()), (2, 2));
        for (number, tap) in taps.into_iter().enumerate() {
            let mut tap = Stream::from(tap);
            write!(tap, "tap {number}").unwrap();
        }
        // Each reaches its end only if nobody else has the TAP.
        for (number, guest) in guests.into_iter().enumerate() {
            let mut guest = Stream::from(guest);
            guest
                .set_read_timeout(Some(Duration::from_secs(60)))
                .unwrap();
            let mut text = String::new();
            guest.read_to_string(&mut text).unwrap();
            assert_eq!(text, format!("tap {number}"));
        }
    }
    let error = lab
        .client
        .taps(&"none".parse().unwrap(), None)
        .await
        .unwrap_err();
    assert_eq!(error.code(), Some(ErrorCode::NotFound));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_asks_for_taps_and_goes_leaves_none_open() {
    let lab = Lab::with_pool(&model::ebpf_pool("web", 1));
    lab.client.acquire(&acquire("a")).await.unwrap();
    let socket = lab.socket.clone();
    tokio::task::spawn_blocking(move || {
        let mut stream = Stream::connect(socket).unwrap();
        stream
            .write_all(
                b"GET /v1/leases/a/taps HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: sandwire-fd\r\n\r\n",
            )
            .unwrap();
        // Plain reads have no room for descriptors: the kernel drops them.
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        assert!(answer.starts_with(b"HTTP/1.1 101 "), "{}", String::from_utf8_lossy(&answer));
        assert!(answer.ends_with(b"\r\n\r\n\0"));
    })
    .await
    .unwrap();
    let guests = std::mem::take(&mut *lab.network.guests.lock().unwrap());
    assert_eq!(guests.len(), 2);
    for guest in guests {
        let mut guest = Stream::from(guest);
        guest
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        assert_eq!(guest.read(&mut [0]).unwrap(), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_client_follows_a_trace_and_sets_policies() {
    let lab = Lab::with_pool(&model::ebpf_pool("web", 1));
    let client = &lab.client;
    let name = client.acquire(&acquire("a")).await.unwrap().lease.name;
    let mut trace = client.trace(&name, None).await.unwrap();
    assert_eq!(trace.next().await.unwrap(), Some(TraceLine::Begin));
    let policy = sandwire_api::pool::PolicySpec {
        route_mark: Some(7),
        ..Default::default()
    };
    let set = client.set_policy(&name, None, &policy).await.unwrap();
    assert!(set.own && client.policy(&name, None).await.unwrap() == set);
    assert!(!client.reset_policy(&name, None).await.unwrap().own);
    assert_eq!(client.traffic().await.unwrap().len(), 1);
    assert!(!client.drop_reasons().await.unwrap().is_empty());
    client.release(&name, None).await.unwrap();
    assert!(matches!(
        trace.next().await.unwrap(),
        Some(TraceLine::End { .. })
    ));
    assert_eq!(trace.next().await.unwrap(), None);
    let error = client.trace(&name, None).await.unwrap_err();
    assert_eq!(error.code(), Some(ErrorCode::NotFound));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_connections_at_once_are_all_served() {
    let limit = getrlimit(Resource::Nofile);
    let current = limit.maximum;
    setrlimit(Resource::Nofile, Rlimit { current, ..limit }).unwrap();
    let lab = Lab::new();
    let socket = lab.socket.clone();
    tokio::task::spawn_blocking(move || {
        let mut streams: Vec<Stream> = (0..1000)
            .map(|_| Stream::connect(&socket).unwrap())
            .collect();
        for stream in &mut streams {
            stream
                .write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
                .unwrap();
        }
        for stream in &mut streams {
            let mut head = [0; 15];
            stream.read_exact(&mut head).unwrap();
            assert_eq!(&head, b"HTTP/1.1 200 OK");
        }
    })
    .await
    .unwrap();
    assert!(lab.client.health().await.unwrap().ready);
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_beyond_the_limit_wait_for_others_to_end() {
    let limit = getrlimit(Resource::Nofile);
    let current = limit.maximum;
    setrlimit(Resource::Nofile, Rlimit { current, ..limit }).unwrap();
    let lab = Lab::new();
    let socket = lab.socket.clone();
    let idle: Vec<Stream> = tokio::task::spawn_blocking(move || {
        (0..CONNECTIONS_MAX)
            .map(|_| Stream::connect(&socket).unwrap())
            .collect()
    })
    .await
    .unwrap();
    let client = Arc::clone(&lab.client);
    let mut late = tokio::spawn(async move { client.health().await });
    assert!(
        timeout(Duration::from_millis(100), &mut late)
            .await
            .is_err()
    );
    drop(idle);
    assert!(late.await.unwrap().unwrap().ready);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_never_ends_is_refused_at_the_limit() {
    let lab = Lab::new();
    let mut request =
        b"POST /v1/leases HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
    for _ in 0..192 {
        request.extend(b"10000\r\n");
        request.extend([b' '; 0x10000]);
        request.extend(b"\r\n");
    }
    let answer = lab.answer_to(request).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    assert!(lab.client.health().await.unwrap().ready);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_of_ten_megabytes_is_refused_and_the_refusal_seen() {
    let lab = Lab::new();
    let size = 10 << 20;
    let mut request =
        format!("POST /v1/pools HTTP/1.1\r\nconnection: close\r\ncontent-length: {size}\r\n\r\n")
            .into_bytes();
    request.extend(vec![b'x'; size]);
    let answer = lab.answer_to(request).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    assert!(answer.contains("8388608 bytes"), "{answer}");
    let claimed = b"POST /v1/pools HTTP/1.1\r\nexpect: 100-continue\r\n\
        connection: close\r\ncontent-length: 10485760\r\n\r\n";
    let answer = lab.answer_to(claimed.to_vec()).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_http_is_answered_with_400_and_harms_nobody() {
    let lab = Lab::new();
    for garbage in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01"[..],
        b"hello\r\n\r\n",
        &[0; 4096],
    ] {
        let answer = lab.answer_to(garbage.to_vec()).await;
        assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    }
    let long = format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(1 << 20));
    let answer = lab.answer_to(long.into_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 4"), "{answer}");
    // Every connection of a user's may hold so much.
    let large = "a".repeat(4 * HEAD_BYTES_MAX);
    let large = format!("GET /healthz HTTP/1.1\r\nx: {large}\r\n\r\n");
    let answer = lab.answer_to(large.into_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
    assert!(lab.client.health().await.unwrap().ready);
}

/// Tokio's clock is set forward whenever nothing else is to be done, so this takes no time.
#[tokio::test]
async fn a_caller_that_does_not_finish_a_request_is_disconnected() {
    let lab = Lab::new();
    let mut stream = UnixStream::connect(&lab.socket).await.unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut stream, b"GET /healthz HT")
        .await
        .unwrap();
    // The server has taken the connection up when it answers another one.
    assert!(lab.client.health().await.unwrap().ready);
    tokio::time::pause();
    let begun = tokio::time::Instant::now();
    let mut rest = Vec::new();
    tokio::io::AsyncReadExt::read_to_end(&mut stream, &mut rest)
        .await
        .unwrap();
    assert!(begun.elapsed() <= HEAD_TIMEOUT + Duration::from_secs(1));
    tokio::time::resume();
    assert!(lab.client.health().await.unwrap().ready);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_run_when_the_daemon_stops_are_finished() {
    let lab = Lab::new();
    let name = lab.client.acquire(&acquire("a")).await.unwrap().lease.name;
    lab.network.withdrawals.set_shut(true);
    let client = Arc::clone(&lab.client);
    let release = tokio::spawn(async move { client.release(&name, None).await });
    while lab.network.withdrawals.waiting() == 0 {
        sleep(Duration::from_millis(1)).await;
    }
    lab.stop.send_replace(true);
    let late = loop {
        match Client::new(&lab.socket).health().await {
            Ok(_) => sleep(Duration::from_millis(1)).await,
            Err(error) => break error,
        }
    };
    assert!(
        matches!(
            late,
            ClientError::Connect { .. } | ClientError::Transport { .. }
        ),
        "{late}"
    );
    assert!(!release.is_finished() && !lab.server.is_finished());
    lab.network.withdrawals.set_shut(false);
    let released = release.await.unwrap().unwrap();
    assert_eq!(released.outcome, ReleaseOutcome::Released);
    timeout(Duration::from_secs(60), lab.server)
        .await
        .unwrap()
        .unwrap();
}

/// Whoever may connect could otherwise hold up each restart.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_does_not_wait_for_callers_that_neither_read_nor_go_on() {
    let packet = TracePacket {
        time: 1,
        nic: 0,
        direction: Direction::Egress,
        verdict: Verdict::Drop,
        stage: Stage::Policy,
        reason: None,
        target: None,
        length: 192,
        segments: 1,
        frame: Frame(vec![2; 192]),
    };
    let unread_answers = "GET /v1/openapi.json HTTP/1.1\r\nhost: x\r\n\r\n".repeat(200);
    for said in [
        "GET /v1/leases/a/trace HTTP/1.1\r\nhost: x\r\n\r\n",
        &unread_answers,
        "GET /healthz HT",
        "POST /v1/leases HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{",
        "POST /v1/leases HTTP/1.1\r\nhost: x\r\ncontent-length: 9000000\r\n\r\n{",
    ] {
        let lab = Lab::with_pool(&model::ebpf_pool("web", 1));
        lab.client.acquire(&acquire("a")).await.unwrap();
        let mut stuck = UnixStream::connect(&lab.socket).await.unwrap();
        tokio::io::AsyncWriteExt::write_all(&mut stuck, said.as_bytes())
            .await
            .unwrap();
        for _ in 0..100 {
            for _ in 0..100 {
                lab.network.send(&packet);
            }
            sleep(Duration::from_millis(2)).await;
        }
        let begun = Instant::now();
        lab.stop.send_replace(true);
        lab.server.await.unwrap();
        let first = said.lines().next().unwrap();
        assert!(begun.elapsed() < STOP_TIMEOUT / 3, "{first}");
    }
}

/// As of somebody who was killed while the daemon stood still.
#[tokio::test]
async fn nothing_is_handed_out_to_a_caller_that_has_gone() {
    let lab = Lab::new();
    let mut gone = Stream::connect(&lab.socket).unwrap();
    let body = r#"{"pool":"web","name":"a"}"#;
    let request = format!(
        "POST /v1/leases HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    gone.write_all(request.as_bytes()).unwrap();
    // The server is a task of this thread, and hasn't run yet.
    drop(gone);
    sleep(Duration::from_millis(200)).await;
    assert_eq!(lab.client.leases().await.unwrap(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_whose_made_up_name_nobody_has_read_is_released() {
    let lab = Lab::new();
    let ask = |body: &'static str| {
        let socket = lab.socket.clone();
        tokio::task::spawn_blocking(move || {
            let mut stream = Stream::connect(socket).unwrap();
            let length = body.len();
            let head =
                format!("POST /v1/leases HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n");
            stream.write_all((head + body).as_bytes()).unwrap();
            // The answer is there, and only its first byte is read.
            stream.read_exact(&mut [0]).unwrap();
            stream
        })
    };
    let read = ask(r#"{"pool":"web"}"#).await.unwrap();
    let read = tokio::task::spawn_blocking(move || {
        let mut read = read;
        while !read_some(&mut read).ends_with('}') {}
    });
    read.await.unwrap();
    let named = ask(r#"{"pool":"web","name":"a"}"#).await.unwrap();
    drop(named);
    let unread = ask(r#"{"pool":"web"}"#).await.unwrap();
    assert_eq!(lab.client.leases().await.unwrap().len(), 3);
    drop(unread);
    let ended = async {
        while lab.client.leases().await.unwrap().len() > 2 {
            sleep(Duration::from_millis(1)).await;
        }
    };
    let ended = timeout(Duration::from_secs(60), ended).await;
    ended.expect("nobody was told of it");
    let left = lab.client.leases().await.unwrap();
    let names: Vec<&str> = left.iter().map(|lease| lease.name.as_str()).collect();
    assert_eq!(names, ["a", "lease-0000"]);
}

fn read_some(stream: &mut Stream) -> String {
    let mut buffer = [0; 4096];
    let length = stream.read(&mut buffer).unwrap();
    assert!(length > 0, "the answer is not whole");
    String::from_utf8_lossy(&buffer[..length]).into_owned()
}

/// Who goes away each time could otherwise have any number of things begun.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_caller_that_has_gone_asked_for_counts_as_its_connection_until_it_is_done() {
    let lab = Lab::new();
    let lease = lab.client.acquire(&acquire("a")).await.unwrap().lease;
    let uid = lease.owner_uid;
    let question = format!("GET /v1/leases/a?owner_uid={uid} HTTP/1.1\r\nhost: x\r\n\r\n");
    let users = Arc::new(Users::default());
    let inspections = &lab.network.inspections;
    inspections.set_shut(true);
    let mut begun = 0;
    for _ in 0..200 {
        let Some(mut caller) = lab.connect_as_manager(&users) else {
            continue;
        };
        tokio::io::AsyncWriteExt::write_all(&mut caller, question.as_bytes())
            .await
            .unwrap();
        begun += 1;
        let waits = async {
            while inspections.waiting() < begun {
                sleep(Duration::from_millis(1)).await;
            }
        };
        let _ = timeout(Duration::from_secs(10), waits).await;
    }
    let of_root = lab.client.release(&lease.name, None);
    let of_root = timeout(Duration::from_secs(10), of_root).await;
    // Before anything is asserted: the runtime waits for what it has begun.
    inspections.set_shut(false);
    assert_eq!(begun, CONNECTIONS_PER_USER_MAX as usize);
    let released = of_root.expect("it waits for a user").unwrap();
    assert_eq!(released.outcome, ReleaseOutcome::Released);
    let over = async {
        while users.connections() > 0 {
            sleep(Duration::from_millis(1)).await;
        }
    };
    let over = timeout(Duration::from_secs(60), over).await;
    over.expect("places come free again");
}

#[tokio::test(flavor = "multi_thread")]
async fn thirty_clients_at_once_get_a_lease_each() {
    let lab = Lab::new();
    let mut spec = model::pool("many", 3);
    spec.size = 30;
    lab.client.create_pool(&spec).await.unwrap();
    let begun = Instant::now();
    while lab.client.pool(&spec.name).await.unwrap().slots.ready < 30 {
        assert!(begun.elapsed() < Duration::from_secs(60));
    }
    let socket = lab.socket.clone();
    let clients: Vec<_> = (0..30)
        .map(|_| {
            let socket = socket.clone();
            thread::spawn(move || {
                let client = sandwire_api::client::Blocking::new(socket);
                let request = AcquireLease {
                    pool: "many".parse().unwrap(),
                    name: None,
                    clone_address: None,
                    ttl_seconds: None,
                    policy: None,
                    process: false,
                    vsock: None,
                    attach: None,
                };
                client.acquire(&request).unwrap().lease
            })
        })
        .collect();
    let leases = tokio::task::spawn_blocking(move || {
        clients
            .into_iter()
            .map(|client| client.join().unwrap())
            .collect::<Vec<_>>()
    })
    .await
    .unwrap();
    let slots: std::collections::BTreeSet<u32> = leases.iter().map(|lease| lease.slot).collect();
    assert_eq!(slots.len(), 30);
}

/// A TCP socket whose close waits, since nobody takes what was written to it.
fn lingering() -> (OwnedFd, Option<TcpListener>) {
    let peer = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let mut stream = TcpStream::connect(peer.local_addr().unwrap()).unwrap();
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::from_secs(20))).unwrap();
    stream.set_nonblocking(true).unwrap();
    while stream.write(&[0; 65_536]).is_ok() {}
    (stream.into(), Some(peer))
}

fn send_along(stream: &Stream, bytes: &[u8], descriptor: &OwnedFd) -> rustix::io::Result<usize> {
    let mut room = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut room);
    let descriptors = [descriptor.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    let bytes = [std::io::IoSlice::new(bytes)];
    sendmsg(stream, &bytes, &mut control, SendFlags::NOSIGNAL)
}

/// Before Linux 6.16 nothing can refuse them, and they are closed when they are read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn descriptors_that_a_caller_sends_along_hold_up_nobody() {
    const BEGIN: &[u8] = b"GET /healthz HTTP/1.1\r\n";
    let lab = Lab::new();
    let (one, _other) = Stream::pair().unwrap();
    let can_refuse = refuse_descriptors(&one);
    let mut callers = Vec::new();
    for _ in 0..4 {
        let stream = Stream::connect(&lab.socket).unwrap();
        let (descriptor, peer) = match can_refuse {
            true => lingering(),
            false => (File::open("/dev/null").unwrap().into(), None),
        };
        let sent = send_along(&stream, BEGIN, &descriptor);
        // The last one to close it isn't to be this thread.
        let kept = sent.is_err().then_some(descriptor);
        callers.push((stream, peer, kept));
    }
    let answered = timeout(Duration::from_secs(5), lab.client.health()).await;
    assert!(answered.expect("it waits for the callers").unwrap().ready);
    for (mut stream, peer, kept) in callers {
        drop(peer);
        assert_eq!(kept.is_some(), can_refuse);
        if can_refuse {
            stream.write_all(BEGIN).unwrap();
        }
        stream
            .write_all(b"host: x\r\nconnection: close\r\n\r\n")
            .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    }
}

#[test]
fn what_a_user_with_too_many_connections_gets_is_an_error_of_the_api() {
    let text = std::str::from_utf8(TOO_MANY).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let error: ApiError = serde_json::from_str(body).unwrap();
    assert_eq!(error.code, ErrorCode::Unavailable);
    let length = format!("content-length: {}", body.len());
    assert!(head.lines().any(|line| line == length), "{head}");
}

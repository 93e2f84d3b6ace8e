//! The router beside a VMM that owns its device: real sockets on both sides.

mod hybrid;

use std::{
    fs::{self, File},
    io::{ErrorKind, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    sync::{Arc, atomic::Ordering::Relaxed, mpsc},
    thread,
    time::{Duration, Instant},
};

use hybrid::{Lab, echo, pattern, read_line, serve, to_unix, until, vmm};
use sandwire_api::vsock::{VsockRefusal, VsockState};
use sandwire_vsock_host::{
    capture::Captures,
    hybrid::{
        relay::WIDE_BYTES,
        router::{RouterCommand, RouterError},
    },
    limits::Limits,
    listener::ListenerError,
    readiness::Waker,
    tcp::UNSENT_BYTES,
};

/// Everything until the end.
fn rest(stream: &mut UnixStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        Err(error) => panic!("reading to the end: {error}"),
    }
    bytes
}

#[test]
fn only_ports_with_a_rule_have_a_socket() {
    let mut lab = Lab::new();
    let service = lab.path("service");
    serve(&service, echo);
    lab.add(
        "web",
        &[&to_unix("1024", &service), r#"80 {"kind": "host"}"#],
    )
    .expect("a guest");
    let mut stream = lab.call("web", 1024).expect("an allowed port");
    stream.write_all(b"hello").expect("writing");
    stream.shutdown(Shutdown::Write).expect("an end");
    assert_eq!(rest(&mut stream), b"hello");
    for port in [80, 1025] {
        let error = lab.call("web", port).expect_err("nobody listens");
        assert_eq!(error.kind(), ErrorKind::NotFound, "port {port}");
    }
}

#[test]
fn a_hundred_megabytes_arrive_whole_before_the_end_and_the_answer_comes_back_after_it() {
    const BYTES: u64 = 100 * 1024 * 1024;
    const PIECE: usize = 192 * 1024;
    let mut lab = Lab::new();
    let service = lab.path("service");
    serve(&service, |mut stream| {
        let (mut at, mut wrong) = (0_u64, 0_u64);
        let (mut piece, mut expected) = (vec![0; PIECE], vec![0; PIECE]);
        loop {
            let wanted = PIECE.min(usize::try_from(BYTES - at).expect("a size"));
            if wanted == 0 || stream.read_exact(&mut piece[..wanted]).is_err() {
                break;
            }
            pattern(at, &mut expected[..wanted]);
            wrong += u64::from(piece[..wanted] != expected[..wanted]);
            at += wanted as u64;
        }
        // The other direction is still open after the end of this one.
        let end = stream.read(&mut piece).expect("an end");
        let verdict = format!("{at} {wrong} {end}");
        stream.write_all(verdict.as_bytes()).expect("a verdict");
    });
    lab.add("web", &[&to_unix("7", &service)]).expect("a guest");
    let mut stream = lab.call("web", 7).expect("a connection");
    let mut piece = vec![0; PIECE];
    let mut at = 0;
    while at < BYTES {
        let length = PIECE.min(usize::try_from(BYTES - at).expect("a size"));
        pattern(at, &mut piece[..length]);
        stream.write_all(&piece[..length]).expect("writing");
        at += length as u64;
    }
    stream.shutdown(Shutdown::Write).expect("an end");
    let verdict = rest(&mut stream);
    assert_eq!(String::from_utf8_lossy(&verdict), format!("{BYTES} 0 0"));
    until("the relay is gone", || lab.list().is_empty());
    let traffic = lab.counters("web").snapshot();
    assert_eq!(traffic.egress_bytes, BYTES);
    assert_eq!(traffic.ingress_bytes, verdict.len() as u64);
    assert_eq!((traffic.connections, traffic.buffered_bytes), (0, 0));
}

#[test]
fn a_side_that_closed_altogether_ends_the_relay_though_the_other_is_silent() {
    let mut lab = Lab::new();
    let service = lab.path("service");
    let listener = UnixListener::bind(&service).expect("a service");
    lab.add("web", &[&to_unix("7", &service)]).expect("a guest");
    let stream = lab.call("web", 7).expect("a connection");
    let (mut peer, _) = listener.accept().expect("the service's side");
    until("it is established", || lab.list().len() == 1);
    drop(stream);
    until("the relay is gone", || lab.list().is_empty());
    assert_eq!(peer.read(&mut [0; 8]).expect("an end"), 0);
}

/// TCP is told of what was broken off, and of an end once all has arrived.
#[test]
fn a_tcp_service_is_told_of_a_reset_and_of_an_end_for_what_it_is() {
    const MUCH: usize = 16 << 20;
    let mut lab = Lab::new();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a TCP service");
    let address = listener.local_addr().expect("its address");
    let rule = format!(r#"7 {{"kind": "tcp", "address": "{address}"}}"#);
    lab.add("web", &[&rule]).expect("a guest");
    let open = |lab: &Lab| {
        let stream = lab.call("web", 7).expect("a connection");
        let (peer, _) = listener.accept().expect("the service's side");
        peer.set_read_timeout(Some(hybrid::PATIENCE))
            .expect("a time-out");
        (stream, peer)
    };
    let assert_reset = |mut peer: TcpStream| {
        let heard = peer.read_to_end(&mut Vec::new());
        let heard = heard.map_err(|error| error.kind());
        assert_eq!(heard, Err(ErrorKind::ConnectionReset));
    };
    // A Unix socket that is closed with bytes unread is reset. It is an end all the same, and nothing before it is lost.
    let (mut stream, mut peer) = open(&lab);
    peer.write_all(b"unread").expect("writing");
    until("it is there", || {
        lab.counters("web").snapshot().ingress_bytes == 6
    });
    stream.write_all(b"an upload").expect("writing");
    drop(stream);
    let mut heard = String::new();
    peer.read_to_string(&mut heard).expect("an end");
    assert_eq!(heard, "an upload");
    let (mut stream, mut peer) = open(&lab);
    let reader = thread::spawn(move || {
        // Late, so that much is in the kernel when the guest ends.
        thread::sleep(Duration::from_millis(50));
        let mut got = Vec::new();
        peer.read_to_end(&mut got).map(|_| got.len())
    });
    stream.write_all(&vec![1; MUCH]).expect("writing");
    drop(stream);
    let got = reader.join().expect("the reader");
    assert_eq!(got.expect("an end"), MUCH);
    until("it is gone", || lab.list().is_empty());
    let (_stream, peer) = open(&lab);
    until("it is established", || lab.list().len() == 1);
    lab.set_policy("web", &[]).expect("no rule");
    assert_reset(peer);
}

#[test]
fn what_a_service_said_before_it_closed_arrives_although_it_took_no_more() {
    let mut lab = Lab::new();
    let service = lab.path("service");
    serve(&service, |mut stream| {
        stream.write_all(&[7; 50_000]).expect("a farewell");
    });
    lab.add("web", &[&to_unix("7", &service)]).expect("a guest");
    let mut stream = lab.call("web", 7).expect("a connection");
    // The service may have closed already; then this fails, and the farewell is to be had nonetheless.
    let _ = stream.write_all(&[1; 200_000]);
    assert_eq!(rest(&mut stream).len(), 50_000);
}

#[test]
fn the_identity_line_comes_first_and_names_who_calls() {
    let mut lab = Lab::new();
    let service = lab.path("service");
    serve(&service, |mut stream| {
        let line = read_line(&mut stream);
        stream.write_all(line.as_bytes()).expect("repeating it");
    });
    let rule = to_unix("+1024-1030", &service);
    lab.add("web-1", &[&rule]).expect("a guest");
    let mut stream = lab.call("web-1", 1026).expect("a connection");
    assert_eq!(
        String::from_utf8_lossy(&rest(&mut stream)),
        "SANDWIRE/1 tenant=1000 lease=web-1 cid=3 port=1026\n"
    );
}

#[test]
fn a_change_of_policy_opens_closes_and_breaks_off() {
    let mut lab = Lab::new();
    let (one, two) = (lab.path("one"), lab.path("two"));
    serve(&one, echo);
    serve(&two, echo);
    let rules = [
        &*to_unix("1", &one),
        &to_unix("2", &one),
        &to_unix("3", &one),
    ];
    lab.add("web", &rules).expect("a guest");
    let mut streams: Vec<UnixStream> = (1..=3)
        .map(|port| lab.call("web", port).expect("a connection"))
        .collect();
    until("they are established", || {
        lab.counters("web").snapshot().opened_by_guest == 3
    });
    // 1 stays, 2 leads elsewhere, 3 is no longer allowed, 4 is new.
    let rules = [
        &*to_unix("1", &one),
        &to_unix("2", &two),
        &to_unix("4", &two),
    ];
    lab.set_policy("web", &rules).expect("another policy");
    assert_eq!(rest(&mut streams[1]), b"");
    assert_eq!(rest(&mut streams[2]), b"");
    streams[0].write_all(b"still").expect("writing");
    streams[0].read_exact(&mut [0; 5]).expect("the echo");
    lab.call("web", 3).expect_err("no longer allowed");
    lab.call("web", 4).expect("newly allowed");
    assert_eq!(lab.counters("web").refused(VsockRefusal::Policy), 2);
}

#[test]
fn a_policy_that_can_t_be_had_changes_nothing() {
    let mut lab = Lab::new();
    let service = lab.path("service");
    serve(&service, echo);
    lab.add("web", &[&to_unix("1", &service)]).expect("a guest");
    let mut stream = lab.call("web", 1).expect("a connection");
    let _taken = UnixListener::bind(lab.path("web.sock_9")).expect("somebody else's socket");
    let rules = [&*to_unix("2", &service), &to_unix("9", &service)];
    let error = lab.set_policy("web", &rules).expect_err("9 is taken");
    let RouterError::Listen {
        port: 9, source, ..
    } = error
    else {
        panic!("another error: {error}");
    };
    assert!(matches!(source, ListenerError::InUse(_)), "{source}");
    lab.call("web", 2).expect_err("not half of it");
    stream.write_all(b"x").expect("writing");
    stream.read_exact(&mut [0]).expect("the echo");
    lab.call("web", 1).expect("the earlier policy");
}

#[test]
fn a_sibling_is_called_by_its_port_and_bytes_with_its_answer_are_not_lost() {
    let mut lab = Lab::new();
    lab.add("db", &[]).expect("a sibling");
    lab.add(
        "web",
        &[r#"100-101 {"kind": "sandbox", "lease": "db", "port": 5432}"#],
    )
    .expect("a guest");
    vmm(
        &lab.socket("db"),
        5433,
        "OK 1073741824\nwelcome",
        |mut stream| {
            assert_eq!(read_line(&mut stream), "thanks\n");
        },
    );
    let mut stream = lab.call("web", 101).expect("a connection");
    stream
        .write_all(b"thanks\n")
        .expect("writing before the answer");
    assert_eq!(rest(&mut stream), b"welcome");
    let mut refused = lab.call("web", 100).expect("a connection");
    assert_eq!(rest(&mut refused), b"", "nobody listens on 5432");
    assert_eq!(lab.counters("web").refused(VsockRefusal::Unreachable), 1);
}

#[test]
fn callers_leave_each_other_and_the_host_connections_of_a_sibling() {
    const TO_DB: [&str; 1] = [r#"1 {"kind": "sandbox", "lease": "db", "port": 5}"#];
    let mut lab = Lab::new();
    let limits = Limits {
        connections: 16,
        ..Limits::default()
    };
    lab.add_with("db", &[], limits).expect("a sibling");
    lab.add("loud", &TO_DB).expect("a guest");
    lab.add("quiet", &TO_DB).expect("another");
    vmm(&lab.socket("db"), 5, "OK 9\n", echo);
    let flood: Vec<UnixStream> = (0..100)
        .map(|_| lab.call("loud", 1).expect("a call"))
        .collect();
    let refused = |vm, reason| lab.counters(vm).refused(reason);
    until("all are connected or refused", || {
        lab.counters("loud").snapshot().opened_by_guest == 6
            && refused("db", VsockRefusal::TooManyConnections) == 94
            && refused("loud", VsockRefusal::Unreachable) == 94
    });
    let mut stream = lab.call("quiet", 1).expect("a call");
    stream.write_all(b"x").expect("writing");
    stream.read_exact(&mut [0]).expect("the echo");
    drop(flood);
    until("they are gone", || lab.list().len() == 1);
    let mut stream = lab.call("loud", 1).expect("there is room again");
    stream.write_all(b"x").expect("writing");
    stream.read_exact(&mut [0]).expect("the echo");
}

#[test]
fn a_sibling_whose_vmm_is_starting_is_tried_again() {
    let mut lab = Lab::new();
    lab.add("db", &[]).expect("a sibling");
    lab.add(
        "web",
        &[r#"1 {"kind": "sandbox", "lease": "db", "port": 5}"#],
    )
    .expect("a guest");
    let mut stream = lab.call("web", 1).expect("a connection");
    thread::sleep(Duration::from_millis(150));
    vmm(&lab.socket("db"), 5, "OK 9\n", echo);
    stream.write_all(b"now").expect("writing");
    stream.shutdown(Shutdown::Write).expect("an end");
    assert_eq!(rest(&mut stream), b"now");
}

#[test]
fn a_sibling_that_never_answers_is_given_up_and_counted() {
    let mut lab = Lab::new();
    let limits = Limits {
        connect_timeout: Duration::from_millis(200),
        ..Limits::default()
    };
    lab.add("db", &[]).expect("a sibling");
    lab.add_with(
        "web",
        &[r#"1 {"kind": "sandbox", "lease": "db", "port": 5}"#],
        limits,
    )
    .expect("a guest");
    let _deaf = UnixListener::bind(lab.socket("db")).expect("a VMM that doesn't answer");
    let begun = Instant::now();
    let mut stream = lab.call("web", 1).expect("a connection");
    assert_eq!(rest(&mut stream), b"");
    assert!(begun.elapsed() >= Duration::from_millis(200));
    assert_eq!(lab.counters("web").refused(VsockRefusal::TimedOut), 1);
}

#[test]
fn an_answer_that_never_ends_is_no_answer() {
    let mut lab = Lab::new();
    lab.add("db", &[]).expect("a sibling");
    lab.add(
        "web",
        &[r#"1 {"kind": "sandbox", "lease": "db", "port": 5}"#],
    )
    .expect("a guest");
    serve(&lab.socket("db"), |mut stream| {
        while stream.write_all(&[b'O'; 4096]).is_ok() {}
    });
    let mut stream = lab.call("web", 1).expect("a connection");
    assert_eq!(rest(&mut stream), b"");
    assert_eq!(lab.counters("web").refused(VsockRefusal::Unreachable), 1);
}

#[test]
fn connections_and_their_rate_are_bounded_for_each_guest_alone() {
    let mut lab = Lab::new();
    let service = lab.path("service");
    serve(&service, echo);
    let few = Limits {
        connections: 3,
        ..Limits::default()
    };
    let slow = Limits {
        connects_per_second: 5,
        ..Limits::default()
    };
    lab.add_with("few", &[&to_unix("1", &service)], few)
        .expect("a guest");
    lab.add_with("slow", &[&to_unix("1", &service)], slow)
        .expect("a guest");
    let of_few: Vec<UnixStream> = (0..8)
        .map(|_| lab.call("few", 1).expect("a call"))
        .collect();
    let of_slow: Vec<UnixStream> = (0..8)
        .map(|_| lab.call("slow", 1).expect("a call"))
        .collect();
    until("all are accepted or refused", || {
        let refused = |vm, reason| lab.counters(vm).refused(reason);
        refused("few", VsockRefusal::TooManyConnections) == 5
            && refused("slow", VsockRefusal::TooFast) == 3
    });
    assert_eq!(lab.list().len(), 8);
    drop((of_few, of_slow));
    until("all are gone", || lab.list().is_empty());
    let mut again = lab.call("few", 1).expect("there is room again");
    again.write_all(b"x").expect("writing");
    again.read_exact(&mut [0]).expect("the echo");
}

#[test]
fn a_reader_that_does_not_read_holds_its_own_connection_only_and_no_more_than_the_limit() {
    const LIMIT: u64 = 16 * 1024;
    let mut lab = Lab::new();
    let (deaf, service) = (lab.path("deaf"), lab.path("service"));
    let _deaf = UnixListener::bind(&deaf).expect("a service that doesn't read");
    serve(&service, echo);
    let limits = Limits {
        connection_bytes: 16 * 1024,
        ..Limits::default()
    };
    lab.add_with(
        "web",
        &[&to_unix("1", &deaf), &to_unix("2", &service)],
        limits,
    )
    .expect("a guest");
    let mut stuck = lab.call("web", 1).expect("a connection");
    fill(&mut stuck);
    let buffered = lab.counters("web").buffered_bytes.load(Relaxed);
    assert!((1..=LIMIT).contains(&buffered), "{buffered}");
    let listed = lab.list();
    assert_eq!(listed[0].queued_bytes, buffered);
    assert_eq!(listed[0].state, VsockState::Established);
    let mut other = lab.call("web", 2).expect("another connection");
    other.write_all(b"x").expect("writing");
    other.read_exact(&mut [0]).expect("the echo");
    drop(stuck);
    // The kernel keeps what was written for a reader that may still come.
    lab.remove("web");
    assert_eq!(lab.counters("web").buffered_bytes.load(Relaxed), 0);
}

#[test]
fn what_waits_of_all_guests_together_is_bounded() {
    const TOTAL: u64 = 64 * 1024;
    let mut lab = Lab::with_total(TOTAL);
    let deaf = lab.path("deaf");
    let _deaf = UnixListener::bind(&deaf).expect("a service that doesn't read");
    let mut held = Vec::new();
    for guest in ["one", "two"] {
        lab.add(guest, &[&to_unix("1", &deaf)]).expect("a guest");
        for _ in 0..16 {
            let mut stream = lab.call(guest, 1).expect("a connection");
            fill(&mut stream);
            held.push(stream);
        }
    }
    let buffered = |guest| lab.counters(guest).buffered_bytes.load(Relaxed);
    until("what waits of both is counted for all", || {
        lab.budget.promised() == buffered("one") + buffered("two")
    });
    let all = lab.budget.promised();
    assert!((1..=TOTAL).contains(&all), "{all}");
    for guest in ["one", "two"] {
        lab.remove(guest);
    }
    assert_eq!(lab.budget.promised(), 0);
}

#[test]
fn a_full_socket_takes_more_than_usual_as_long_as_its_guest_has_few_connections() {
    /// A pipe's worth, by which the last write may go beyond a socket's limit.
    const PIPE: u64 = 64 * 1024;
    let mut lab = Lab::new();
    let deaf = lab.path("deaf");
    let service = UnixListener::bind(&deaf).expect("a service that doesn't read");
    // Enough for the two sockets of one connection.
    let limits = Limits {
        guest_bytes: 2 * WIDE_BYTES as u64,
        ..Limits::default()
    };
    lab.add_with("web", &[&to_unix("1", &deaf)], limits)
        .expect("a guest");
    let held = [0; 2].map(|_: u64| {
        let mut caller = lab.call("web", 1).expect("a connection");
        let (called, _) = service.accept().expect("it is passed on");
        fill(&mut caller);
        let bytes = rustix::io::ioctl_fionread(&called).expect("the kernel tells");
        (bytes, caller, called)
    });
    let (wide, [alone, beside]) = (WIDE_BYTES as u64, [held[0].0, held[1].0]);
    assert!((wide * 3 / 4..=wide + PIPE).contains(&alone), "{alone}");
    assert!(beside < wide * 5 / 8, "{beside} beside another");
}

/// However much TCP would take for a service that is slow or far away.
#[test]
fn a_tcp_service_that_does_not_read_has_no_more_waiting_in_the_kernel_than_others() {
    const PACKET: u64 = 64 * 1024;
    let mut lab = Lab::new();
    let service = TcpListener::bind("127.0.0.1:0").expect("a service that doesn't read");
    let address = service.local_addr().expect("its address");
    let limits = Limits {
        guest_bytes: 2 * WIDE_BYTES as u64,
        ..Limits::default()
    };
    let rule = format!(r#"1 {{"kind": "tcp", "address": "{address}"}}"#);
    lab.add_with("web", &[&rule], limits).expect("a guest");
    let passed_on = || lab.counters("web").snapshot().egress_bytes;
    let held = [0; 2].map(|_: u64| {
        let before = passed_on();
        let mut caller = lab.call("web", 1).expect("a connection");
        let (called, _) = service.accept().expect("it is passed on");
        // Until nothing moves any more, in this order: what arrives meanwhile doesn't count as held.
        let mut last = 0;
        until("all that is taken is taken", || {
            fill(&mut caller);
            let passed = passed_on() - before;
            let arrived = rustix::io::ioctl_fionread(&called).expect("the kernel tells");
            let held = passed.saturating_sub(arrived);
            std::mem::replace(&mut last, held) == held && held > 0
        });
        (last, caller, called)
    });
    let [alone, beside] = [held[0].0, held[1].0];
    let (wide, few) = (WIDE_BYTES as u64, u64::from(UNSENT_BYTES));
    assert!((wide / 2..=wide + PACKET).contains(&alone), "{alone}");
    assert!(beside <= few + PACKET, "{beside} beside another");
}

#[test]
fn what_waits_for_the_guest_is_not_listed_as_what_came_from_it() {
    let mut lab = Lab::new();
    let service = lab.path("service");
    let listener = UnixListener::bind(&service).expect("a service");
    lab.add("web", &[&to_unix("7", &service)]).expect("a guest");
    let mut stream = lab.call("web", 7).expect("a connection");
    let (mut peer, _) = listener.accept().expect("the service's side");
    fill(&mut peer);
    until("it waits for the guest", || {
        lab.counters("web").snapshot().buffered_bytes > 0
    });
    // The service's socket is full besides.
    until("what waits there is counted with it", || {
        let buffered = lab.counters("web").snapshot().buffered_bytes;
        lab.list()[0].queued_ingress_bytes > Some(buffered)
    });
    let listed = lab.list().remove(0);
    assert_eq!(listed.queued_bytes, 0);
    let told = (listed.guest_port, listed.own_credit, listed.peer_credit);
    assert_eq!(told, (None, None, None), "only its VMM knows them");
    fill(&mut stream);
    until("more waits for the service", || {
        lab.list()[0].queued_bytes > 0
    });
}

#[test]
fn who_waits_for_its_guest_s_memory_goes_on_in_the_end() {
    let mut lab = Lab::new();
    let service = lab.path("service");
    let listener = UnixListener::bind(&service).expect("a service");
    let limits = Limits {
        guest_bytes: 64 * 1024,
        ..Limits::default()
    };
    lab.add_with("web", &[&to_unix("1", &service)], limits)
        .expect("a guest");
    // Far more than may wait, both ways, before anybody reads.
    let ends = [(); 20].map(|()| {
        let mut caller = lab.call("web", 1).expect("a connection");
        let (mut called, _) = listener.accept().expect("it is passed on");
        let sent = [fill(&mut caller), fill(&mut called)];
        [(caller, sent[1]), (called, sent[0])]
    });
    let read_to_end = |(mut stream, sent): (UnixStream, usize)| {
        stream.set_nonblocking(false).expect("to block");
        let patience = Some(Duration::from_secs(60));
        stream.set_read_timeout(patience).expect("a time");
        stream.shutdown(Shutdown::Write).expect("an end");
        let mut received = Vec::new();
        stream
            .read_to_end(&mut received)
            .expect("all that was sent");
        assert_eq!(received.len(), sent);
    };
    thread::scope(|scope| {
        for end in ends.into_iter().flatten() {
            scope.spawn(move || read_to_end(end));
        }
    });
}

/// Writes until nothing more is taken. How many bytes were.
fn fill(stream: &mut UnixStream) -> usize {
    stream.set_nonblocking(true).expect("not to block");
    let mut taken = 0;
    until("the sockets are full", || {
        let before = taken;
        while let Ok(bytes) = stream.write(&[1; 4096]) {
            taken += bytes;
        }
        thread::sleep(Duration::from_millis(20));
        taken == before
    });
    taken
}

#[test]
fn two_hundred_idle_connections_cost_two_descriptors_each() {
    let mut lab = Lab::new();
    let service = lab.path("service");
    let limits = Limits {
        connects_per_second: 100_000,
        ..Limits::default()
    };
    let listener = UnixListener::bind(&service).expect("a service");
    lab.add_with("web", &[&to_unix("1", &service)], limits)
        .expect("a guest");
    let mut ends = Vec::new();
    let descriptors = || fs::read_dir("/proc/self/fd").expect("descriptors").count();
    let before = descriptors();
    for _ in 0..200 {
        let mut stream = lab.call("web", 1).expect("a connection");
        let (mut peer, _) = listener.accept().expect("the service's side");
        stream.write_all(b"x").expect("writing");
        peer.read_exact(&mut [0]).expect("reading");
        ends.push((stream, peer));
    }
    // Two here, two in the router, and at most a few spare pipes; other tests share this process, so there is
    // some room.
    let more = descriptors() - before;
    assert!(more < 200 * 5, "{more}");
}

#[test]
fn a_guest_that_is_removed_leaves_no_socket_and_no_connection() {
    let mut lab = Lab::new();
    let service = lab.path("service");
    serve(&service, echo);
    lab.add("web", &[&to_unix("1-5", &service)])
        .expect("a guest");
    let mut stream = lab.call("web", 3).expect("a connection");
    until("it is established", || lab.list().len() == 1);
    lab.remove("web");
    assert_eq!(rest(&mut stream), b"");
    assert!(lab.list().is_empty());
    for port in 1..=5 {
        assert!(!lab.path(&format!("web.sock_{port}")).exists());
    }
}

/// Ports and lengths of the data packets of a capture that keeps nothing of them, in order.
fn data_packets(file: &Path) -> Vec<(u32, u64)> {
    // The file's header; a record's, the monitor's and the packet's own.
    const FILE: usize = 24;
    const RECORD: usize = 16 + 32 + 44;
    let bytes = fs::read(file).expect("the capture");
    let word = |record: &[u8], at: usize| {
        u32::from_le_bytes(record[at..at + 4].try_into().expect("four bytes"))
    };
    bytes[FILE..]
        .chunks_exact(RECORD)
        .filter(|record| record[78] == 5)
        .map(|record| (word(record, 68), word(record, 72).into()))
        .collect()
}

#[test]
fn a_guest_with_many_full_sockets_does_not_hold_up_its_neighbour() {
    const MANY: usize = 100;
    const EACH: usize = 64 * 1024;
    let mut lab = Lab::new();
    for (lease, port) in [("flood", "7"), ("web", "8")] {
        let service = lab.path(lease);
        lab.add(lease, &[&to_unix(port, &service)])
            .expect("a guest");
    }
    let listener = |lease| UnixListener::bind(lab.path(lease)).expect("a service");
    let (flooded, called) = (listener("flood"), listener("web"));
    let open = |lease, port, listener: &UnixListener| {
        let stream = lab.call(lease, port).expect("a connection");
        (stream, listener.accept().expect("the service's side").0)
    };
    let mut flood: Vec<_> = (0..MANY).map(|_| open("flood", 7, &flooded)).collect();
    let (mut stream, mut peer) = open("web", 8, &called);
    until("all are established", || lab.list().len() == MANY + 1);
    // One capture of both tells who was served when.
    let captures = Captures::spawn(Arc::new(Waker::new().expect("an eventfd")));
    let captures = captures.expect("the capture thread");
    let file = lab.path("both.pcap");
    let output = File::create(&file).expect("a file").into();
    let sink = captures
        .start(output, 0, Arc::default())
        .expect("a capture");
    for lease in ["flood", "web"] {
        lab.capture(lease, Some(Arc::clone(&sink)));
    }
    // The router waits for whoever asked it, and finds all of this afterwards.
    let (sender, answer) = mpsc::sync_channel(0);
    lab.router.send(RouterCommand::List(None, sender));
    for (stream, _) in &mut flood {
        stream.write_all(&[1; EACH]).expect("writing");
    }
    stream.write_all(b"hello").expect("writing");
    answer.recv().expect("the router goes on");
    peer.read_exact(&mut [0; 5]).expect("the neighbour's");
    until("the flood is through", || {
        lab.counters("flood").snapshot().egress_bytes == (MANY * EACH) as u64
    });
    sink.end();
    drop(captures);
    let before_it = data_packets(&file).into_iter();
    let before_it = before_it.take_while(|(port, _)| *port != 8);
    let before_it: u64 = before_it.map(|(_, bytes)| bytes).sum();
    assert!(before_it <= 3 << 20, "{before_it} bytes were before it");
}

//! Guests that speak with each other, where a policy says so.

use sandwire_api::vsock::{VsockDestination, VsockRefusal, VsockRule};
use sandwire_vsock_guest::{
    Content, Guest, GuestError, Kind, Socket,
    packet::{HOST_CID, SHUTDOWN_SEND},
    socket::State,
};
use sandwire_vsock_host::limits::Limits;

use crate::host::{
    Host, TENANT, Vm, clean, eventually, name, policy, read_line, rule, to_host, works,
};

const ALIAS: u32 = 2000;
const SERVICE: u32 = 7;

fn sandbox(lease: &str) -> VsockDestination {
    VsockDestination::Sandbox {
        lease: name(lease),
        owner_uid: None,
        port: SERVICE,
    }
}

struct Pair {
    _host: Host,
    caller: Vm,
    callee: Vm,
    a: Guest,
    b: Guest,
}

impl Pair {
    /// `caller` may reach port 7 of `callee` as port 2000 of CID 2, or as CID 77.
    fn new(workers: usize) -> Self {
        let mut host = Host::new(workers);
        let limits = Limits::default;
        let caller = host.vm_named(
            TENANT,
            "caller",
            None,
            limits(),
            policy([
                rule(ALIAS, sandbox("callee")),
                rule(crate::host::PORT, VsockDestination::Host),
            ]),
        );
        let callee = host.vm_named(
            TENANT,
            "callee",
            Some(77),
            limits(),
            to_host(&[crate::host::PORT]),
        );
        let (a, b) = (caller.boot(), callee.boot());
        Self {
            _host: host,
            caller,
            callee,
            a,
            b,
        }
    }

    fn open(&mut self, kind: Kind, cid: u64, port: u32) -> (Socket, Socket) {
        self.b.listen(kind, SERVICE);
        let from = self.a.start_open(kind, cid, port);
        let to = self.b.accept(kind, SERVICE).expect("accepting");
        self.a
            .wait_until("the answer", |guest| {
                guest.socket(from).state != State::Connecting
            })
            .expect("an answer");
        assert_eq!(self.a.socket(from).state, State::Established);
        (from, to)
    }

    fn clean(self) {
        clean(&self.a);
        clean(&self.b);
    }
}

#[test]
fn a_guest_reaches_a_sibling_by_its_alias_port() {
    for workers in [1, 2] {
        let mut pair = Pair::new(workers);
        let (from, to) = pair.open(Kind::Stream, HOST_CID, ALIAS);
        assert_eq!(pair.b.socket(to).address.peer_cid, HOST_CID);
        pair.a.send(from, b"question").expect("sending");
        assert_eq!(pair.b.receive_exact(to, 8).expect("it"), b"question");
        pair.b.send(to, b"answer").expect("sending");
        assert_eq!(pair.a.receive_exact(from, 6).expect("it"), b"answer");
        pair.a.shut_down(from, SHUTDOWN_SEND);
        assert_eq!(pair.b.receive_to_end(to).expect("the end"), b"");
        pair.b.send(to, b"last words").expect("sending");
        assert_eq!(pair.a.receive_exact(from, 10).expect("it"), b"last words");
        pair.b.shut_down(to, SHUTDOWN_SEND);
        assert_eq!(pair.a.receive_to_end(from).expect("the end"), b"");
        pair.a.close(from).expect("closing");
        pair.b.close(to).expect("closing");
        pair.caller.wait_for_connections(0);
        pair.callee.wait_for_connections(0);
        pair.clean();
    }
}

#[test]
fn who_called_is_listed_by_lease_and_another_tenants_by_user_too() {
    let mut host = Host::new(1);
    let callee = host.vm_named(TENANT, "callee", None, Limits::default(), policy([]));
    let mut called = callee.boot();
    called.listen(Kind::Stream, SERVICE);
    let to_callee = VsockDestination::Sandbox {
        lease: name("callee"),
        owner_uid: Some(TENANT),
        port: SERVICE,
    };
    for (tenant, listed) in [(TENANT, "web"), (7, "web of user 7")] {
        let rules = policy([rule(ALIAS, to_callee.clone())]);
        let caller = host.vm_named(tenant, "web", None, Limits::default(), rules);
        let mut calling = caller.boot();
        let socket = calling.start_open(Kind::Stream, HOST_CID, ALIAS);
        let accepted = called.accept(Kind::Stream, SERVICE).expect("accepting");
        let connections = host.list();
        let found = connections.iter().find(|found| !found.from_guest);
        assert_eq!(found.map(|found| &*found.peer), Some(listed));
        calling.reset(socket);
        called.close(accepted).expect("closing");
        callee.wait_for_connections(0);
    }
}

#[test]
fn a_guest_reaches_a_sibling_by_its_virtual_cid() {
    let mut pair = Pair::new(2);
    let (from, to) = pair.open(Kind::Stream, 77, SERVICE);
    pair.a.send(from, b"by CID").expect("sending");
    assert_eq!(pair.b.receive_exact(to, 6).expect("it"), b"by CID");
    pair.b.send(to, b"back").expect("sending");
    assert_eq!(pair.a.receive_exact(from, 4).expect("it"), b"back");
    let refused = pair.a.open(Kind::Stream, 77, SERVICE + 1);
    assert!(matches!(refused, Err(GuestError::Reset)), "{refused:?}");
    assert_eq!(pair.caller.refused(VsockRefusal::Policy), 1);
    pair.clean();
}

#[test]
fn a_sibling_is_told_who_calls_in_front_of_bytes_and_of_messages() {
    let mut host = Host::new(2);
    let introduced = VsockRule {
        identity: true,
        ..rule(ALIAS, sandbox("callee"))
    };
    let (none, rules) = (policy([]), policy([introduced]));
    let caller = host.vm_named(TENANT, "caller", None, Limits::default(), rules);
    let callee = host.vm_named(TENANT, "callee", None, Limits::default(), none);
    let mut pair = Pair {
        a: caller.boot(),
        b: callee.boot(),
        _host: host,
        caller,
        callee,
    };
    let line = format!("SANDWIRE/1 tenant={TENANT} lease=caller cid=3 port={ALIAS}\n");
    let (from, to) = pair.open(Kind::Stream, HOST_CID, ALIAS);
    pair.a.send(from, b"bytes").expect("sending");
    let told = pair.b.receive_exact(to, line.len() + 5).expect("it");
    assert_eq!(told, format!("{line}bytes").as_bytes());

    let (from, to) = pair.open(Kind::Seqpacket, HOST_CID, ALIAS);
    pair.a
        .send_message(from, b"message", true)
        .expect("sending");
    let mut message = || pair.b.receive_message(to).expect("receiving");
    assert_eq!(message(), Some((line.into_bytes(), false)));
    assert_eq!(message(), Some((b"message".to_vec(), true)));
    pair.clean();
}

#[test]
fn both_ends_and_both_records_of_messages_are_kept() {
    let mut pair = Pair::new(2);
    let (from, to) = pair.open(Kind::Seqpacket, HOST_CID, ALIAS);
    for (number, length) in (0u64..).zip([1, 100, 4096, 65_536, 65_537, 200_000, 3]) {
        let message = Content::new(number).take(length);
        let record = number % 2 == 0;
        let thread = std::thread::scope(|threads| {
            let b = &mut pair.b;
            let receiver = threads.spawn(move || b.receive_message(to));
            pair.a
                .send_message(from, &message, record)
                .expect("sending");
            receiver.join().expect("the sibling")
        });
        let (got, got_record) = thread.expect("receiving").expect("a message");
        assert_eq!((got.len(), got_record), (length, record));
        assert_eq!(got, message);
    }
    pair.a.close(from).expect("closing");
    assert!(pair.b.receive_message(to).expect("the end").is_none());
    pair.clean();
}

#[test]
fn a_sibling_that_does_not_listen_answers_with_rst() {
    let mut pair = Pair::new(2);
    let from = pair.a.start_open(Kind::Stream, HOST_CID, ALIAS);
    eventually("RST", || {
        pair.b.poll();
        pair.a.poll();
        pair.a.socket(from).state == State::Reset
    });
    pair.caller.wait_for_connections(0);
    pair.callee.wait_for_connections(0);
    pair.clean();
}

/// Calls until it is refused; how often the other answered.
fn flood(caller: &mut Guest, callee: &mut Guest) -> usize {
    let mut answered = 0;
    loop {
        let socket = caller.start_open(Kind::Stream, HOST_CID, ALIAS);
        eventually("an answer", || {
            callee.poll();
            caller.poll();
            caller.socket(socket).state != State::Connecting
        });
        if caller.socket(socket).state != State::Established {
            return answered;
        }
        answered += 1;
    }
}

#[test]
fn a_sibling_that_calls_without_end_leaves_room_for_others() {
    let mut host = Host::new(2);
    let few = Limits {
        connections: 40,
        shutdown_timeout: std::time::Duration::from_millis(200),
        ..Limits::default()
    };
    let [first, second] = ["first", "second"].map(|lease| {
        let calls = policy([rule(ALIAS, sandbox("callee"))]);
        host.vm_named(TENANT, lease, None, Limits::default(), calls)
    });
    let own = to_host(&[crate::host::PORT]);
    let callee = host.vm_named(TENANT, "callee", None, few, own);
    let (mut a, mut b, mut called) = (first.boot(), second.boot(), callee.boot());
    called.listen(Kind::Stream, SERVICE);
    assert_eq!(flood(&mut a, &mut called), 15);
    assert_eq!(flood(&mut b, &mut called), 8);
    assert_eq!(callee.refused(VsockRefusal::TooManyConnections), 2);
    works(&callee, &mut called);
    called.listen(Kind::Stream, 5000);
    let mut client = callee.dial(5000);
    called.accept(Kind::Stream, 5000).expect("a client's call");
    assert!(read_line(&mut client).starts_with("OK "));
    drop(a);
    eventually("what the first had to be free again", || {
        called.poll();
        callee.traffic().connections < 15
    });
    assert!(flood(&mut b, &mut called) > 0);
    clean(&called);
}

#[test]
fn nobody_is_called_by_whom_no_rule_allows() {
    let mut pair = Pair::new(2);
    pair.b.listen(Kind::Stream, SERVICE);
    pair.a.listen(Kind::Stream, SERVICE);
    // Not back, not by the sibling's own CID, and not by another port.
    for (cid, port) in [
        (HOST_CID, ALIAS),
        (HOST_CID, SERVICE),
        (77, SERVICE),
        (3, SERVICE),
    ] {
        let refused = pair.b.open(Kind::Stream, cid, port);
        assert!(matches!(refused, Err(GuestError::Reset)), "{refused:?}");
    }
    assert!(pair.a.try_accept(Kind::Stream, SERVICE).is_none());
    assert_eq!(pair.caller.traffic().connections, 0);
    pair.clean();
}

#[test]
fn another_tenants_guest_of_the_same_name_is_another_one() {
    let mut host = Host::new(1);
    let limits = Limits::default;
    let caller = host.vm_named(
        1,
        "caller",
        None,
        limits(),
        policy([rule(ALIAS, sandbox("callee"))]),
    );
    let other = host.vm_named(2, "callee", Some(77), limits(), to_host(&[]));
    let mut a = caller.boot();
    let mut b = other.boot();
    b.listen(Kind::Stream, SERVICE);
    for (cid, port) in [(HOST_CID, ALIAS), (77, SERVICE)] {
        let refused = a.open(Kind::Stream, cid, port);
        assert!(matches!(refused, Err(GuestError::Reset)), "{refused:?}");
    }
    assert!(b.try_accept(Kind::Stream, SERVICE).is_none());
    clean(&a);
    clean(&b);
}

#[test]
fn a_sibling_that_does_not_read_stops_the_other_and_holds_little() {
    let mut pair = Pair::new(2);
    let (from, to) = pair.open(Kind::Stream, HOST_CID, ALIAS);
    let content = Content::new(11);
    let all = content.take(8_000_000);
    let mut sent = 0;
    for _ in 0..100 {
        sent += pair.a.try_send(from, &all[sent..]).expect("sending");
        pair.a
            .run_for(std::time::Duration::from_millis(3))
            .expect("running");
        pair.b
            .run_for(std::time::Duration::from_millis(1))
            .expect("running");
    }
    assert!(sent < 5_000_000, "{sent} bytes taken though nobody reads");
    assert!(pair.caller.traffic().buffered_bytes <= 1024 * 1024);
    assert!(pair.callee.traffic().buffered_bytes <= 1024 * 1024);
    let got = std::thread::scope(|threads| {
        let b = &mut pair.b;
        let reader = threads.spawn(move || b.receive_exact(to, 8_000_000));
        pair.a.send(from, &all[sent..]).expect("sending the rest");
        reader.join().expect("the sibling").expect("receiving")
    });
    assert_eq!(content.wrong(0, &got), None);
    pair.clean();
}

#[test]
fn a_sibling_that_goes_away_resets_the_other() {
    let mut pair = Pair::new(2);
    let (from, _) = pair.open(Kind::Stream, HOST_CID, ALIAS);
    let (caller, callee) = (&pair.caller, &pair.callee);
    drop(pair.b);
    pair.a
        .wait_until("the end", |guest| guest.socket(from).at_end())
        .expect("the end");
    callee.wait_for_connections(0);
    works(caller, &mut pair.a);
    works(callee, &mut callee.boot());
    clean(&pair.a);
}

#[test]
fn two_siblings_send_to_each_other_at_once() {
    let mut pair = Pair::new(2);
    let (from, to) = pair.open(Kind::Stream, HOST_CID, ALIAS);
    let length = 3_000_000;
    let run = |guest: &mut Guest, socket: Socket, out: Content, into: Content| {
        let all = out.take(length);
        let (mut sent, mut got) = (0, Vec::new());
        let mut bytes = vec![0; 64 * 1024];
        while sent < length || got.len() < length {
            sent += guest.try_send(socket, &all[sent..]).expect("sending");
            guest.poll();
            let count = guest.try_receive(socket, &mut bytes).expect("receiving");
            got.extend_from_slice(&bytes[..count]);
            let done = sent == length && got.len() == length;
            let must_wait = sent == length || guest.socket(socket).credit() == 0;
            if count == 0 && must_wait && !done {
                guest.wait(crate::host::PATIENCE).expect("something to do");
            }
        }
        assert_eq!(into.wrong(0, &got), None);
    };
    std::thread::scope(|threads| {
        let (a, b) = (&mut pair.a, &mut pair.b);
        let other = threads.spawn(move || run(b, to, Content::new(1), Content::new(2)));
        run(a, from, Content::new(2), Content::new(1));
        other.join().expect("the sibling");
    });
    pair.clean();
}

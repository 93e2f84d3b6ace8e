#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    sync::{Arc, Condvar},
    time::{Duration, Instant},
};

use sandwire_api::{pool::PoolSpec, slot::SlotKind};
use sandwire_impair_host::control::{Cleared, Request, Response, Way};
use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::model::{self, ModelNetwork};

const ROOT: Caller = Caller {
    uid: 0,
    gid: 0,
    privileged: true,
};

/// A service that does what it is told, and sometimes doesn't say so.
#[derive(Default)]
struct Service {
    targets: Mutex<BTreeMap<Target, (Owner, Impairment)>>,
    /// Ends the connection instead of the answer to this many-th request for an impairment from now on.
    silent_at: Mutex<Option<usize>>,
    /// Ends the connection instead of ending an impairment.
    ends_nothing: Mutex<bool>,
    /// Packets under way keep impairments from ending.
    holds: Mutex<bool>,
    let_go: Condvar,
    /// Ends that are waited for.
    ending: Mutex<usize>,
    /// Connections that were accepted.
    calls: std::sync::atomic::AtomicUsize,
}

impl Service {
    /// Listens in that folder, for as long as the test runs.
    fn start(folder: &Path) -> Arc<Self> {
        let service = Arc::new(Self::default());
        let listener = UnixListener::bind(control_socket(folder)).unwrap();
        let shared = Arc::clone(&service);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                shared.calls.fetch_add(1, Ordering::Relaxed);
                let shared = Arc::clone(&shared);
                thread::spawn(move || shared.serve(&stream));
            }
        });
        service
    }

    fn serve(&self, mut stream: &UnixStream) {
        let lines = BufReader::new(stream.try_clone().unwrap()).lines();
        for line in lines.map_while(Result::ok) {
            let Some(answer) = self.answer(serde_json::from_str(&line).unwrap()) else {
                return;
            };
            let mut text = serde_json::to_vec(&answer).unwrap();
            text.push(b'\n');
            stream.write_all(&text).unwrap();
        }
    }

    fn answer(&self, request: Request) -> Option<Response> {
        Some(match request {
            Request::Hello => Response::Hello {
                version: String::new(),
                pid: 1,
                threads: 1,
                netns_inode: None,
            },
            Request::Set {
                target,
                owner,
                impairment,
                ..
            } => {
                let new = (owner, *impairment);
                self.targets.lock().unwrap().insert(target, new);
                let mut silent_at = self.silent_at.lock().unwrap();
                if *silent_at == Some(0) {
                    return None;
                }
                *silent_at = silent_at.map(|rest| rest - 1);
                Response::Done
            }
            Request::Clear { .. } if *self.ends_nothing.lock().unwrap() => return None,
            Request::Clear { target, flush } => {
                *self.ending.lock().unwrap() += 1;
                let holds = self.holds.lock().unwrap();
                drop(self.let_go.wait_while(holds, |holds| *holds && !flush));
                let known = self.targets.lock().unwrap().remove(&target);
                let cleared = Cleared {
                    was_impaired: known.is_some(),
                    ..Cleared::default()
                };
                Response::Cleared { cleared }
            }
            Request::List { .. } => Response::Targets {
                targets: self.list(),
            },
        })
    }

    fn list(&self) -> Vec<Status> {
        let targets = self.targets.lock().unwrap();
        let status = |(target, (owner, impairment)): (&Target, &(Owner, Impairment))| Status {
            target: target.clone(),
            owner: owner.clone(),
            state: State::Impaired,
            impairment: impairment.clone(),
            ifindex: 1,
            thread: 0,
            egress: Way::default(),
            ingress: Way::default(),
        };
        targets.iter().map(status).collect()
    }

    /// How its targets are impaired.
    fn texts(&self) -> Vec<String> {
        let targets = self.targets.lock().unwrap();
        targets
            .values()
            .map(|(_, impairment)| impairment.to_string())
            .collect()
    }
}

/// A lease `a` of root's with two interfaces, and a service.
struct Lab {
    slots: Arc<Slots>,
    network: Arc<ModelNetwork>,
    impairments: Impairments,
    service: Arc<Service>,
    folder: TempDir,
}

impl Lab {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (slots, network) = model::open(folder.path());
        let spec = PoolSpec {
            kind: SlotKind::Host,
            ..model::ebpf_pool("web", 1)
        };
        model::fill(&slots, &spec);
        let request = serde_json::from_value(json!({"pool": "web", "name": "a"})).unwrap();
        slots.acquire(ROOT, &request).unwrap();
        Self {
            slots,
            network,
            impairments: Impairments::new(folder.path().to_owned(), false, &"b".parse().unwrap()),
            service: Service::start(folder.path()),
            folder,
        }
    }

    fn set(&self, text: &str) -> Result<LeaseImpairment, ImpairError> {
        let impairment = text.parse().unwrap();
        let name = "a".parse().unwrap();
        self.impairments
            .set(&self.slots, ROOT, None, &name, &impairment)
    }

    fn clear(&self, flush: bool) -> Result<ImpairmentCleared, ImpairError> {
        let name = "a".parse().unwrap();
        self.impairments
            .clear(&self.slots, ROOT, None, &name, flush)
    }

    /// Slots whose packets are left to whoever diverts them.
    fn led(&self) -> usize {
        self.network.impaired.lock().unwrap().len()
    }
}

/// What a service that was killed remembers of lease `a`.
fn left_text(lab: &Lab) -> String {
    let impairment: Impairment = "delay 50ms".parse().unwrap();
    let lease = LeaseKey {
        owner_uid: 0,
        name: "a".parse().unwrap(),
    };
    let remembered = json!({
        "target": {"interface": "tap"},
        "owner": lab.impairments.owner_of(&lease),
        "impairment": impairment,
        "force": false,
        "inode": 1,
        "ifindex": 1,
    });
    remembered.to_string()
}

fn wait_until(what: &str, happens: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !happens() {
        assert!(Instant::now() < deadline, "{what}: not so");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Else what is set on the first interface stays, and what is set on the second is ended with what was there before.
#[test]
fn a_lease_is_not_impaired_anew_while_its_end_is_waited_for() {
    let lab = Lab::new();
    lab.set("delay 50ms").unwrap();
    assert_eq!(lab.service.texts(), ["delay 50ms", "delay 50ms"]);
    *lab.service.holds.lock().unwrap() = true;
    let (refused, flushed) = thread::scope(|scope| {
        let waiting = scope.spawn(|| lab.clear(false));
        wait_until("it is waited", || *lab.service.ending.lock().unwrap() > 0);
        let refused = lab.set("delay 7ms");
        // Who doesn't want to wait needn't.
        let flushed = lab.clear(true);
        *lab.service.holds.lock().unwrap() = false;
        lab.service.let_go.notify_all();
        waiting.join().unwrap().unwrap();
        (refused, flushed)
    });
    assert!(matches!(refused, Err(ImpairError::Ending { .. })));
    assert!(flushed.unwrap().was_impaired);
    assert_eq!((lab.service.texts().len(), lab.led()), (0, 0));
    lab.set("delay 7ms").unwrap();
    assert_eq!(lab.service.texts(), ["delay 7ms", "delay 7ms"]);
    assert_eq!(lab.led(), 1);
}

#[test]
fn a_change_that_nobody_has_confirmed_is_taken_back() {
    let lab = Lab::new();
    let look = || lab.impairments.look(&lab.slots).unwrap();
    for before in [None, Some("delay 5ms")] {
        if let Some(before) = before {
            lab.set(before).unwrap();
        }
        *lab.service.silent_at.lock().unwrap() = Some(1);
        let broken = lab.set("delay 50ms");
        assert!(matches!(
            broken,
            Err(ImpairError::Service(ClientError::Broken { .. }))
        ));
        assert_eq!(lab.service.texts(), ["delay 50ms", "delay 50ms"]);
        assert_eq!(lab.led(), 1, "until it is known that it isn't impaired");
        *lab.service.silent_at.lock().unwrap() = None;
        look();
        let expected = before.map_or(Vec::new(), |before| vec![before; 2]);
        assert_eq!(lab.service.texts(), expected);
        assert_eq!(lab.led(), usize::from(before.is_some()));
        look();
        assert_eq!(lab.service.texts(), expected, "once is enough");
    }
}

/// What somebody asks for in the meantime counts.
#[test]
fn a_later_change_is_not_taken_back_with_one_that_nobody_has_confirmed() {
    let lab = Lab::new();
    *lab.service.silent_at.lock().unwrap() = Some(1);
    lab.set("delay 50ms").unwrap_err();
    *lab.service.silent_at.lock().unwrap() = None;
    lab.set("delay 7ms").unwrap();
    lab.impairments.look(&lab.slots).unwrap();
    assert_eq!(lab.service.texts(), ["delay 7ms", "delay 7ms"]);
    assert_eq!(lab.led(), 1);
}

#[test]
fn a_change_that_nobody_has_confirmed_is_taken_back_after_an_end_that_failed() {
    let lab = Lab::new();
    *lab.service.silent_at.lock().unwrap() = Some(1);
    lab.set("delay 50ms").unwrap_err();
    *lab.service.silent_at.lock().unwrap() = None;
    *lab.service.ends_nothing.lock().unwrap() = true;
    lab.clear(true).unwrap_err();
    *lab.service.ends_nothing.lock().unwrap() = false;
    assert_eq!(lab.service.texts(), ["delay 50ms", "delay 50ms"]);
    lab.impairments.look(&lab.slots).unwrap();
    assert_eq!((lab.service.texts().len(), lab.led()), (0, 0));
}

/// It would be the next one's of that name.
#[test]
fn nothing_is_taken_back_of_a_lease_that_has_ended() {
    let lab = Lab::new();
    *lab.service.silent_at.lock().unwrap() = Some(1);
    lab.set("delay 50ms").unwrap_err();
    let lease = LeaseKey {
        owner_uid: 0,
        name: "a".parse().unwrap(),
    };
    assert!(lab.impairments.pending.has(&lease));
    lab.impairments.lease_has_ended(&lease);
    assert!(!lab.impairments.pending.has(&lease));
}

/// As of one whose time is over, of which the service may know only later than the next lease of that name is there.
#[test]
fn nothing_is_taken_back_of_a_lease_that_has_ended_by_itself() {
    let lab = Lab::new();
    *lab.service.silent_at.lock().unwrap() = Some(1);
    lab.set("delay 50ms").unwrap_err();
    let name = "a".parse().unwrap();
    let lease = LeaseKey {
        owner_uid: 0,
        name: "a".parse().unwrap(),
    };
    let later = LeaseInterfaces {
        acquired_at: 0,
        ..lab.slots.interfaces(ROOT, None, &name).unwrap()
    };
    lab.impairments
        .pending
        .forget_ended(|_| Some(later.clone()));
    assert!(!lab.impairments.pending.has(&lease), "that is another one");
    lab.set("delay 50ms").unwrap_err();
    assert!(lab.impairments.pending.has(&lease));
    lab.slots.release(ROOT, None, &name).unwrap();
    // As a service leaves it that was killed and that nobody starts.
    std::fs::remove_file(control_socket(lab.folder.path())).unwrap();
    let left = lab
        .folder
        .path()
        .join(sandwire_impair_host::control::TARGETS);
    std::fs::create_dir(&left).unwrap();
    std::fs::write(left.join("1-1.json"), left_text(&lab)).unwrap();
    lab.impairments.look(&lab.slots).unwrap_err();
    assert!(!lab.impairments.pending.has(&lease));
}

/// Who had waited for the packets that were dropped may not have gone yet.
#[test]
fn a_lease_is_impaired_anew_at_once_after_its_packets_were_dropped() {
    let lab = Lab::new();
    lab.set("delay 50ms").unwrap();
    *lab.service.holds.lock().unwrap() = true;
    thread::scope(|scope| {
        let waiting = scope.spawn(|| lab.clear(false));
        wait_until("it is waited", || *lab.service.ending.lock().unwrap() > 0);
        lab.clear(true).unwrap();
        let followers = &lab.impairments.endings.followers;
        let before = followers.load(Ordering::Relaxed);
        let set = scope.spawn(|| lab.set("delay 7ms"));
        wait_until("it lets that go first", || {
            followers.load(Ordering::Relaxed) > before || set.is_finished()
        });
        *lab.service.holds.lock().unwrap() = false;
        lab.service.let_go.notify_all();
        waiting.join().unwrap().unwrap();
        set.join().unwrap().unwrap();
    });
    assert_eq!(lab.service.texts(), ["delay 7ms", "delay 7ms"]);
    assert_eq!(lab.led(), 1);
}

#[test]
fn a_service_that_has_ended_leaves_no_lease_on_another_way() {
    let lab = Lab::new();
    lab.set("delay 50ms").unwrap();
    assert_eq!(lab.led(), 1);
    std::fs::remove_file(control_socket(lab.folder.path())).unwrap();
    lab.impairments.look(&lab.slots).unwrap();
    assert_eq!(lab.led(), 0);
}

/// As one that was stopped (SIGSTOP): each who asks would wait for half a minute, and leave a connection in its queue.
#[test]
fn a_service_that_does_not_answer_is_asked_by_who_looks_after_it_alone() {
    let lab = Lab::new();
    lab.set("delay 50ms").unwrap();
    let late = || {
        Err(ImpairError::Service(ClientError::Broken {
            operation: "list its targets",
            source: io::ErrorKind::WouldBlock.into(),
        }))
    };
    lab.impairments.note_looked(&late());
    let calls = || lab.service.calls.load(Ordering::Relaxed);
    let before = calls();
    let name = "a".parse().unwrap();
    let summary = lab.impairments.summary_now(0, &name).unwrap();
    assert!(summary.service_alive, "it is there");
    let refusal = lab.set("delay 7ms").unwrap_err().to_string();
    assert!(refusal.contains("hasn't answered in time"), "{refusal}");
    lab.impairments.all().unwrap_err();
    assert_eq!(calls(), before);
    lab.impairments.look(&lab.slots).unwrap();
    lab.set("delay 7ms").unwrap();
    // One that is gone is said to be.
    lab.impairments.note_looked(&late());
    let left = lab
        .folder
        .path()
        .join(sandwire_impair_host::control::TARGETS);
    std::fs::remove_file(control_socket(lab.folder.path())).unwrap();
    std::fs::create_dir(&left).unwrap();
    std::fs::write(left.join("1-1.json"), left_text(&lab)).unwrap();
    lab.impairments.look(&lab.slots).unwrap_err();
    let refusal = lab.set("delay 7ms").unwrap_err();
    assert!(matches!(refusal, ImpairError::NotStarted(_)), "{refusal}");
}

/// A lease that goes as if it was impaired, which an earlier daemon has left so.
fn left_another_way(has_service: bool) -> Lab {
    let lab = Lab::new();
    let lease = LeaseKey {
        owner_uid: 0,
        name: "a".parse().unwrap(),
    };
    lab.slots.set_impaired(&lease, true).unwrap();
    if !has_service {
        std::fs::remove_file(control_socket(lab.folder.path())).unwrap();
    }
    lab
}

/// As of a daemon that was killed before the service had done what it was asked for, or after.
#[test]
fn a_lease_that_an_earlier_daemon_has_led_another_way_is_led_as_usual() {
    for has_service in [true, false] {
        let lab = left_another_way(has_service);
        lab.impairments.look(&lab.slots).unwrap();
        assert_eq!(lab.led(), 0, "{has_service}");
    }
}

/// The pool is served by and by, and then its lease goes as usual, with nobody having asked for it.
#[test]
fn a_lease_of_a_pool_that_was_refused_at_the_start_is_led_as_usual_later() {
    for has_service in [true, false] {
        let lab = left_another_way(has_service);
        let set_refused = |is| *lab.network.is_pool_refused.lock().unwrap() = is;
        set_refused(true);
        for _ in 0..2 {
            lab.impairments.look(&lab.slots).unwrap_err();
            assert_eq!(lab.led(), 1);
            let may_be = &lab.impairments.may_be;
            assert!(may_be.load(Ordering::Relaxed), "it is looked again");
        }
        set_refused(false);
        lab.impairments.look(&lab.slots).unwrap();
        assert_eq!(lab.led(), 0, "{has_service}");
    }
}

/// As of a daemon that was killed meanwhile.
#[test]
fn a_lease_that_an_earlier_daemon_has_impaired_by_half_is_impaired_as_a_whole() {
    let (short, long) = ("delay 7ms", "delay 50ms");
    for (halves, expected) in [
        ([Some(long), None], long),
        ([None, Some(long)], long),
        ([Some(short), Some(long)], short),
    ] {
        let mut lab = Lab::new();
        lab.set(long).unwrap();
        let name = "a".parse().unwrap();
        let found = lab.slots.interfaces(ROOT, None, &name).unwrap();
        let owner = lab.impairments.owner_of(&found.lease);
        for (target, half) in targets_of(&found).into_iter().zip(halves) {
            let mut targets = lab.service.targets.lock().unwrap();
            match half {
                Some(text) => targets.insert(target, (owner.clone(), text.parse().unwrap())),
                None => targets.remove(&target),
            };
        }
        let before = lab.service.texts();
        lab.impairments =
            Impairments::new(lab.folder.path().to_owned(), false, &"b".parse().unwrap());
        let look = || lab.impairments.look(&lab.slots).unwrap();
        // Who has all of it end has it end as it is.
        let ending = lab.impairments.endings.begin(&found.lease, false);
        look();
        assert_eq!(lab.service.texts(), before);
        drop(ending);
        look();
        assert_eq!(lab.service.texts(), [expected; 2]);
        assert_eq!(lab.led(), 1);
        // What somebody takes away later isn't what an earlier daemon has left.
        let first = targets_of(&found).remove(0);
        lab.service.targets.lock().unwrap().remove(&first);
        look();
        assert_eq!(lab.service.texts(), [expected]);
    }
}

/// A service may impair leases of several daemons, and then of the same names.
#[test]
fn leases_of_another_instance_stay_as_they_are() {
    let lab = Lab::new();
    let theirs = Target {
        netns: None,
        interface: "theirs".to_owned(),
        side: Side::Host,
    };
    let owner = |instance: Option<&str>| Owner::Lease {
        uid: 0,
        lease: "a".parse().unwrap(),
        instance: instance.map(|instance| instance.parse().unwrap()),
    };
    for other in [None, Some("c")] {
        let new = (owner(other), "loss 1%".parse().unwrap());
        let targets = &lab.service.targets;
        targets.lock().unwrap().insert(theirs.clone(), new);
        lab.impairments.look(&lab.slots).unwrap();
        assert_eq!(lab.service.texts(), ["loss 1%"]);
        assert_eq!(lab.led(), 0, "nor is it taken for our own");
        assert!(!lab.clear(true).unwrap().was_impaired);
        assert_eq!(lab.service.texts(), ["loss 1%"]);
    }
    // Of one's own that has ended nothing stays.
    let ours = (owner(Some("b")), "loss 1%".parse().unwrap());
    lab.service.targets.lock().unwrap().insert(theirs, ours);
    lab.impairments.may_be.store(true, Ordering::Relaxed);
    lab.impairments.look(&lab.slots).unwrap();
    assert_eq!(lab.service.texts(), [""; 0]);
}

/// Where leases come and go by hundreds, each would have all of the service's targets listed.
#[test]
fn the_end_of_a_lease_that_is_not_impaired_is_nothing_to_look_at() {
    use std::{
        pin::pin,
        task::{Context, Waker},
    };
    let lab = Lab::new();
    let is_told = || {
        let told = pin!(lab.impairments.ended.notified());
        told.poll(&mut Context::from_waker(Waker::noop()))
            .is_ready()
    };
    let key = |name: &str| LeaseKey {
        owner_uid: 0,
        name: name.parse().unwrap(),
    };
    lab.set("delay 50ms").unwrap();
    lab.impairments.lease_has_ended(&key("other"));
    assert!(!is_told());
    lab.impairments.lease_has_ended(&key("a"));
    assert!(is_told());
}

//! UDP sockets that receive at addresses which they aren't bound to: who is told of them, how many there may be, and what is left.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

#[path = "netns_sockets/stage.rs"]
#[allow(dead_code, reason = "the other tests have more players")]
mod stage;

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sandwire_identity::{Bound, Identities, LISTENERS_MAX, Refusal};
use sandwire_testlab::{
    lab::{self, Lab},
    namespace::Namespace,
};
use serde_json::{Value, json};

use self::stage::{Application, Cgroups, folder, new_identity};

const DEADLINE: Duration = Duration::from_secs(600);
const ASK: &str = "c = fresh(SOCK_DGRAM, AF_INET); c.sendto(b'question', ('10.77.0.9', 5353))";

/// An identity of two addresses, its application, and a peer on the wire.
struct Scene {
    web: Application,
    peer: Application,
    identities: Identities,
    cgroups: Cgroups,
    _wire: Namespace,
}

impl Scene {
    fn set(lab: &Lab) -> Self {
        let wire = stage::wire(lab);
        let mut cgroups = Cgroups::new();
        let cgroup = cgroups.make("web");
        let identities = Identities::new(folder());
        identities
            .add(&new_identity(&cgroup, &["10.77.0.1", "10.77.0.9"]))
            .unwrap();
        Self {
            web: Application::start(Some(&cgroup), None),
            peer: Application::start(None, Some("peer")),
            identities,
            cgroups,
            _wire: wire,
        }
    }

    fn listeners(&self) -> u64 {
        self.identities.show("web").unwrap().listeners
    }

    /// What a server in `s` answers to somebody at the further address, as those see it.
    fn asked(&mut self) -> Value {
        self.peer.run(ASK);
        self.web.run("heard(s)");
        self.peer.run("r = answer(c)")
    }
}

/// Entries of a map with the values' bytes, by the kernel's own word.
fn entries(lab: &Lab, map: &str) -> Vec<Value> {
    let map = folder().join("v2").join(map);
    let text = lab.run(&format!("bpftool -j map dump pinned {}", map.display()));
    serde_json::from_str(&text).unwrap()
}

fn is_readable(bound: &Bound) -> bool {
    let mut waited = [PollFd::new(bound, PollFlags::IN)];
    poll(&mut waited, Some(&Timespec::default())).unwrap() > 0
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_daemon_is_told_of_sockets_that_come_and_go() {
    lab::run_within(DEADLINE, |lab| {
        let mut scene = Scene::set(lab);
        let mut bound = scene.identities.bound().unwrap().unwrap();
        // Clients, and what isn't UDP, are none of its business.
        scene
            .web
            .run("c = udp('0.0.0.0', 0); l = listen('0.0.0.0', 5353)");
        assert!(!is_readable(&bound) && !bound.take());
        scene.web.run("s = udp('0.0.0.0', 5353)");
        assert!(is_readable(&bound) && bound.take() && !bound.take());
        scene.identities.enter_receivers().unwrap();
        scene.web.run("s.close()");
        assert!(bound.take());
        // Nor are those of an identity that has one address.
        let cgroup = scene.cgroups.make("one");
        scene
            .identities
            .add(&new_identity(&cgroup, &["10.77.0.2"]))
            .unwrap();
        let mut one = Application::start(Some(&cgroup), None);
        assert_eq!(one.run("s = udp('0.0.0.0', 5353)"), Value::Null);
        assert!(!is_readable(&bound) && !bound.take());
        let shown = lab.run(&format!("bpftool cgroup show {}", cgroup.display()));
        assert_eq!(shown.matches("on_post_bind").count(), 0, "{shown}");
        drop(one);
        for name in ["one", "web"] {
            scene.identities.remove(name).unwrap();
        }
        assert!(!folder().join("v2/on_udp").exists());
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn sockets_that_outlive_their_identity_are_nowhere_entered_any_more() {
    lab::run_within(DEADLINE, |lab| {
        let mut scene = Scene::set(lab);
        let cgroup = scene.cgroups.make("other");
        let addresses = ["10.77.0.2", "10.77.0.3"];
        let identities = scene.identities.clone();
        identities.add(&new_identity(&cgroup, &addresses)).unwrap();
        let mut other = Application::start(Some(&cgroup), None);
        for application in [&mut scene.web, &mut other] {
            application.run("l = listen('0.0.0.0', 80); s = udp('0.0.0.0', 5353)");
        }
        identities.enter_receivers().unwrap();
        let counts = || ["listeners", "receivers"].map(|map| entries(lab, map).len());
        assert_eq!(counts(), [2, 2]);
        // One that no daemon has looked at yet.
        scene.web.run("late = udp('0.0.0.0', 5454)");
        identities.remove("web").unwrap();
        assert_eq!(counts(), [1, 1]);
        identities.enter_receivers().unwrap();
        assert_eq!(counts(), [1, 1]);
        // Those that are open are none the worse for it.
        assert_eq!(
            scene.web.run("l.close(); s.close(); late.close()"),
            Value::Null
        );
        identities.remove("other").unwrap();
        assert_eq!(counts(), [0, 0]);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn one_identity_cannot_take_the_room_of_all_receivers() {
    lab::run_within(DEADLINE, |lab| {
        let mut scene = Scene::set(lab);
        scene
            .web
            .run("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))");
        let made = format!("u = [udp('10.77.0.1', 20000 + n) for n in range({LISTENERS_MAX})]");
        assert_eq!(scene.web.run(&made), Value::Null);
        assert_eq!(scene.listeners(), LISTENERS_MAX as u64);
        // One more has its own address alone, and is counted.
        assert_eq!(scene.web.run("s = udp('0.0.0.0', 5353)"), Value::Null);
        scene.identities.enter_receivers().unwrap();
        assert_eq!(entries(lab, "receivers").len(), LISTENERS_MAX);
        scene.peer.run(ASK);
        assert_eq!(scene.web.run("hears(s)"), json!("TIMEOUT"));
        scene.peer.run("c.sendto(b'question', ('10.77.0.1', 5353))");
        assert_eq!(scene.web.run("r = hears(s)"), json!("question"));
        let refused = scene.identities.show("web").unwrap().counters.refused;
        assert_eq!(refused.get(&Refusal::Listeners), Some(&1));
        // A place that was given back is there for the next.
        scene
            .web
            .run("u.pop().close(); s.close(); s = udp('0.0.0.0', 5353)");
        scene.identities.enter_receivers().unwrap();
        assert_eq!(scene.asked(), json!(["answer", "10.77.0.9"]));
        scene.web.run("s.close(); r = [each.close() for each in u]");
        assert_eq!(scene.listeners(), 0);
        let deadline = Instant::now() + Duration::from_secs(60);
        while !entries(lab, "receivers").is_empty() {
            assert!(Instant::now() < deadline);
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_socket_that_is_bound_again_and_again_is_one_receiver() {
    lab::run_within(DEADLINE, |lab| {
        let mut scene = Scene::set(lab);
        scene.web.run(
            "\
import ctypes
def dissolve(bound):
    ctypes.CDLL(None).connect(bound.fileno(), struct.pack('16x'), 16)",
        );
        scene.web.run("s = udp('10.77.0.9', 0)");
        for address in ["10.77.0.1", "10.77.0.9", "10.77.0.1"] {
            scene.identities.enter_receivers().unwrap();
            let again = format!("dissolve(s); s.bind(('{address}', 0))");
            assert_eq!(scene.web.run(&again), Value::Null);
        }
        scene.identities.enter_receivers().unwrap();
        assert_eq!(entries(lab, "receivers").len(), 1);
        let refused = scene.identities.show("web").unwrap().counters.refused;
        assert_eq!(refused.get(&Refusal::Listeners), Some(&3));
        // Others have their place.
        scene.web.run("s.close(); s = udp('0.0.0.0', 5353)");
        scene.identities.enter_receivers().unwrap();
        assert_eq!(scene.asked(), json!(["answer", "10.77.0.9"]));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn many_callers_are_answered_from_where_each_has_asked() {
    lab::run_within(DEADLINE, |lab| {
        let mut scene = Scene::set(lab);
        scene.web.run("s = udp('0.0.0.0', 5353)");
        scene.identities.enter_receivers().unwrap();
        // Connected, so an answer from elsewhere isn't heard.
        let is_missing = "\
def is_missing(client):
    try: return answer(client)[0] != 'answer'
    except OSError: return True";
        assert_eq!(scene.peer.run(is_missing), Value::Null);
        scene.peer.run(
            "asked = [dial(('10.77.0.1', '10.77.0.9')[n % 2], 5353, kind=SOCK_DGRAM, patience=5) for n in range(900)]",
        );
        for begin in (0..900).step_by(180) {
            let some = format!("asked[{begin}:{begin} + 180]");
            scene
                .peer
                .run(&format!("for c in {some}: c.send(b'question')"));
            scene.web.run("for n in range(180): heard(s)");
            let missing = format!("r = [c.getpeername() for c in {some} if is_missing(c)]");
            assert_eq!(scene.peer.run(&missing), json!([]), "from {begin}");
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn identities_of_one_family_receive_at_all_their_addresses() {
    lab::run_within(DEADLINE, |lab| {
        let wire = stage::wire(lab);
        let mut cgroups = Cgroups::new();
        let mut peer = Application::start(None, Some("peer"));
        let identities = Identities::new(folder());
        let families = [
            ("four", ["10.77.0.1", "10.77.0.9"]),
            ("six", ["fd77::1", "fd77::9"]),
        ];
        for (name, addresses) in families {
            let cgroup = cgroups.make(name);
            identities.add(&new_identity(&cgroup, &addresses)).unwrap();
            let mut server = Application::start(Some(&cgroup), None);
            assert_eq!(server.run("s = udp('::', 5353)"), Value::Null);
            identities.enter_receivers().unwrap();
            for address in addresses {
                peer.run(&format!(
                    "c = dial('{address}', 5353, kind=SOCK_DGRAM); c.send(b'question')"
                ));
                server.run("heard(s)");
                assert_eq!(peer.run("r = answer(c)"), json!(["answer", address]));
            }
        }
        drop((peer, wire));
    });
}

/// Takes a flag from a value, as the kernel shows it: 32 bits at an offset.
fn without_flag(entry: &Value, offset: usize, flag: u32) -> String {
    let mut bytes: Vec<u8> = entry["value"]
        .as_array()
        .unwrap()
        .iter()
        .map(|byte| {
            u8::from_str_radix(byte.as_str().unwrap().trim_start_matches("0x"), 16).unwrap()
        })
        .collect();
    let word: &mut [u8; 4] = (&mut bytes[offset..offset + 4]).try_into().unwrap();
    *word = (u32::from_ne_bytes(*word) & !flag).to_ne_bytes();
    hex(&bytes)
}

fn hex(bytes: &[u8]) -> String {
    let bytes: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    bytes.join(" ")
}

/// Makes the identity what a former version would have made: without the flags that say it has several addresses, without the programs
/// that go by them, and without the maps.
fn make_former(lab: &Lab, cgroup: u64) {
    const IDENTITY_SEVERAL: u32 = 64;
    const OWNER_SEVERAL: u32 = 16;
    let maps = folder().join("v2");
    for (map, offset, flag) in [
        ("identities", 12, IDENTITY_SEVERAL),
        ("addresses", 4, OWNER_SEVERAL),
    ] {
        for entry in entries(lab, map) {
            let key: Vec<&str> = entry["key"]
                .as_array()
                .unwrap()
                .iter()
                .map(|byte| byte.as_str().unwrap().trim_start_matches("0x"))
                .collect();
            lab.run(&format!(
                "bpftool map update pinned {} key hex {} value hex {}",
                maps.join(map).display(),
                key.join(" "),
                without_flag(&entry, offset, flag),
            ));
        }
    }
    let links = maps.join("links").join(cgroup.to_string());
    for pin in ["on_post_bind4", "on_post_bind6"] {
        std::fs::remove_file(links.join(pin)).unwrap();
    }
    for map in ["receivers", "receiving", "bound", "asked", "has_receivers"] {
        std::fs::remove_file(maps.join(map)).unwrap();
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn after_an_upgrade_sockets_of_former_identities_receive_too() {
    lab::run_within(DEADLINE, |lab| {
        let mut scene = Scene::set(lab);
        make_former(lab, scene.identities.show("web").unwrap().cgroup_id);
        assert!(scene.identities.bound().unwrap().is_none());
        scene.web.run("old = udp('0.0.0.0', 5354)");
        assert_eq!(scene.identities.renew().unwrap(), 1);
        assert!(scene.identities.bound().unwrap().is_some());
        scene.web.run("s = udp('0.0.0.0', 5353)");
        scene.identities.enter_receivers().unwrap();
        assert_eq!(scene.asked(), json!(["answer", "10.77.0.9"]));
        assert_eq!(entries(lab, "receivers").len(), 1);
        // Once more, with the same programs: nothing is lost.
        assert_eq!(scene.identities.renew().unwrap(), 1);
        assert_eq!(scene.asked(), json!(["answer", "10.77.0.9"]));
        scene.web.run("s.close(); s = udp('0.0.0.0', 5353)");
        scene.identities.enter_receivers().unwrap();
        assert_eq!(scene.asked(), json!(["answer", "10.77.0.9"]));
    });
}

//! Adding and removing: what is refused, what a crash leaves, and what is left in the end.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

#[path = "netns_sockets/stage.rs"]
#[allow(dead_code, reason = "the other test has more players")]
mod stage;

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs,
    os::unix::ffi::OsStrExt,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use sandwire_identity::{Error, Identities, Refusal, State};
use sandwire_testlab::lab::{self, Lab};

use self::stage::{Application, Cgroups, folder, new_identity};

const DEADLINE: Duration = Duration::from_secs(600);

/// Addresses of the loopback interface, the kernel's own word.
fn addresses(lab: &Lab) -> String {
    lab.run("ip -o addr show dev lo")
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_identity_leaves_nothing_behind() {
    lab::run_within(DEADLINE, |lab| {
        let mut cgroups = Cgroups::new();
        let cgroup = cgroups.make("web");
        let before = addresses(lab);
        let identities = Identities::new(folder());
        assert_eq!(identities.list().unwrap(), []);
        let added = identities
            .add(&new_identity(&cgroup, &["10.77.0.1", "fd77::1"]))
            .unwrap();
        assert_eq!(added.name.as_str(), "web");
        let now = addresses(lab);
        for address in [
            "10.77.0.1/32",
            "fd77::1/128",
            "fd53:7764:6c6f:6f70::100/128",
        ] {
            assert!(now.contains(address), "{now}");
        }
        let tree = lab.run(&format!("bpftool cgroup show {}", cgroup.display()));
        assert_eq!(tree.matches("on_").count(), 20, "{tree}");
        assert_eq!(identities.show("web").unwrap(), added);
        identities.remove(cgroup.to_str().unwrap()).unwrap();
        assert_eq!(addresses(lab), before);
        assert_eq!(identities.list().unwrap(), []);
        // Programs leave when the kernel gets round to it.
        let deadline = Instant::now() + Duration::from_secs(60);
        while lab
            .run(&format!("bpftool cgroup show {}", cgroup.display()))
            .contains("on_")
        {
            assert!(Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(20));
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_a_crash_left_is_taken_back_by_the_next_call() {
    lab::run_within(DEADLINE, |lab| {
        assert_what_a_crash_left_is_taken_back(lab, false);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_a_crash_left_of_one_with_tcp_only_is_taken_back() {
    lab::run_within(DEADLINE, |lab| {
        assert_what_a_crash_left_is_taken_back(lab, true);
    });
}

fn assert_what_a_crash_left_is_taken_back(lab: &Lab, tcp_only: bool) {
    let mut cgroups = Cgroups::new();
    let cgroup = cgroups.make("web");
    let before = addresses(lab);
    let identities = Identities::new(folder());
    let mut new = new_identity(&cgroup, &["10.77.0.1", "fd77::1"]);
    new.tcp_only = tcp_only;
    let mut steps = 0;
    identities.add_watched(&new, &mut |_| steps += 1).unwrap();
    let mut removals = 0;
    identities
        .remove_watched("web", &mut |_| removals += 1)
        .unwrap();
    assert!(steps > 20 && removals > 5, "{steps} and {removals}");
    for fatal in 0..steps {
        die_at(fatal, |watch| {
            let _ = identities.add_watched(&new, watch);
        });
        assert_eq!(identities.list().unwrap(), [], "after step {fatal} of add");
        assert_eq!(addresses(lab), before, "after step {fatal} of add");
    }
    for fatal in 0..removals {
        identities.add(&new).unwrap();
        die_at(fatal, |watch| {
            let _ = identities.remove_watched("web", watch);
        });
        let left = identities.list().unwrap();
        // Before the first step nothing has happened yet.
        if fatal == 0 {
            assert_eq!(left.len(), 1);
            identities.remove("web").unwrap();
        } else {
            assert_eq!(left, [], "after step {fatal} of remove");
        }
        assert_eq!(addresses(lab), before, "after step {fatal} of remove");
    }
    identities.add(&new).unwrap();
    identities.remove("web").unwrap();
}

/// Does something that ends as by SIGKILL before one of its steps: nothing is undone.
fn die_at(fatal: usize, work: impl FnOnce(&mut dyn FnMut(&'static str))) {
    let mut step = 0;
    let mut watch = |_: &'static str| {
        assert!(step != fatal, "dies here");
        step += 1;
    };
    assert!(catch_unwind(AssertUnwindSafe(|| work(&mut watch))).is_err());
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_cannot_be_had_is_refused_and_changes_nothing() {
    lab::run_within(DEADLINE, |lab| {
        let mut cgroups = Cgroups::new();
        let (web, other) = (cgroups.make("web"), cgroups.make("other"));
        let inner = cgroups.make("web/inner");
        lab.run("ip addr add 192.0.2.1/24 dev lo");
        let identities = Identities::new(folder());
        identities.add(&new_identity(&web, &["10.77.0.1"])).unwrap();
        let before = addresses(lab);
        let listed = identities.list().unwrap();
        let root = web.parent().unwrap().parent().unwrap();
        let cases: [(&Path, &[&str], &str); 11] = [
            (Path::new("/nowhere"), &["10.77.0.2"], "is no cgroup"),
            (Path::new("/tmp"), &["10.77.0.2"], "not in a cgroup v2"),
            (root, &["10.77.0.2"], "the root of the cgroup"),
            (&inner, &["10.77.0.2"], "can't be nested"),
            (&web, &["10.77.0.2"], "has an identity already"),
            (&other, &["10.77.0.1"], "of identity web already"),
            (&other, &["192.0.2.1"], "interface lo already"),
            (&other, &["127.0.0.1"], "can't be the address"),
            (&other, &["10.77.0.2", "10.77.0.2"], "given twice"),
            (&other, &[], "1 to 16 addresses"),
            (&other, &["0.0.0.0"], "wildcard"),
        ];
        for (cgroup, texts, reason) in cases {
            let error = identities.add(&new_identity(cgroup, texts)).unwrap_err();
            let text = error.to_string();
            assert!(error.is_refusal() && text.contains(reason), "{text}");
        }
        let mut new = new_identity(&other, &["10.77.0.2"]);
        new.interface = "nowhere0".to_owned();
        let error = identities.add(&new).unwrap_err().to_string();
        assert!(error.contains("no interface nowhere0"), "{error}");
        let hook = format!(
            "{} sock_create pinned {}/v2/programs/*/on_sock_create",
            other.display(),
            folder().display()
        );
        // Without flags: it shares the hook with nobody.
        lab.shell(&format!("bpftool cgroup attach {hook}"));
        let error = identities.add(&new_identity(&other, &["10.77.0.2"]));
        assert!(matches!(error, Err(Error::NotShared { .. })), "{error:?}");
        lab.shell(&format!("bpftool cgroup detach {hook}"));
        let missing = identities.remove("nobody").unwrap_err();
        assert!(matches!(missing, Error::NoIdentity { .. }));
        assert_eq!(addresses(lab), before);
        assert_eq!(identities.list().unwrap(), listed);
        let version1 = Path::new("/sys/fs/cgroup/cpu");
        if version1.is_dir() {
            let error = identities.add(&new_identity(version1, &["10.77.0.2"]));
            assert!(error.unwrap_err().to_string().contains("version 1"));
        }
        let elsewhere = Identities::new(Path::new("/tmp/identity"));
        let error = elsewhere.add(&new_identity(&other, &["10.77.0.2"]));
        assert!(matches!(error, Err(Error::NoBpffs { .. })));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_address_of_the_host_that_is_lent_stays() {
    lab::run_within(DEADLINE, |lab| {
        let mut cgroups = Cgroups::new();
        let cgroup = cgroups.make("web");
        lab.run("ip addr add 10.77.0.9/32 dev lo");
        let before = addresses(lab);
        let identities = Identities::new(folder());
        let mut new = new_identity(&cgroup, &["10.77.0.1", "10.77.0.9"]);
        new.existing = true;
        identities.add(&new).unwrap();
        identities.remove("web").unwrap();
        assert_eq!(addresses(lab), before);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn the_host_does_not_call_by_an_identity_s_address() {
    lab::run_within(DEADLINE, |lab| {
        let _wire = stage::wire(lab);
        let mut cgroups = Cgroups::new();
        let cgroup = cgroups.make("web");
        let identities = Identities::new(folder());
        // As a prefix of 128 bits it is more like the peer's than the host's own.
        let mut new = new_identity(&cgroup, &["2001:db8::5"]);
        new.interface = "uplink".to_owned();
        identities.add(&new).unwrap();
        let mut peer = Application::start(None, Some("peer"));
        peer.run("l = listen('2001:db8::2', 9000)");
        let call = "r = dial('2001:db8::2', 9000).getsockname()[0]";
        let mut host = Application::start(None, None);
        assert_eq!(host.run(call), "2001:db8::1");
        let mut web = Application::start(Some(&cgroup), None);
        assert_eq!(web.run(call), "2001:db8::5");
        let deprecated =
            |interface: &str| lab.run(&format!("ip -o -6 addr show dev {interface} deprecated"));
        for (interface, address) in [
            ("uplink", "2001:db8::5/128"),
            ("lo", "fd53:7764:6c6f:6f70::100/128"),
        ] {
            assert!(deprecated(interface).contains(address), "{interface}");
        }
        identities.remove("web").unwrap();
        assert_eq!([deprecated("uplink"), deprecated("lo")], ["", ""]);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_identity_ends_with_its_cgroup() {
    lab::run_within(DEADLINE, |lab| {
        let mut cgroups = Cgroups::new();
        let cgroup = cgroups.make("web");
        let before = addresses(lab);
        let identities = Identities::new(folder());
        identities
            .add(&new_identity(&cgroup, &["10.77.0.1"]))
            .unwrap();
        let mut application = Application::start(Some(&cgroup), None);
        application.run("l = listen('0.0.0.0', 8080)");
        let parent = cgroup.parent().unwrap();
        fs::write(parent.join("cgroup.procs"), application.id().to_string()).unwrap();
        fs::remove_dir(&cgroup).unwrap();
        // The socket is still that of the identity.
        assert_eq!(identities.show("web").unwrap().state, State::Dying);
        drop(application);
        let deadline = Instant::now() + Duration::from_secs(60);
        while !identities.list().unwrap().is_empty() {
            assert!(Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(addresses(lab), before);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_cgroup_whose_path_is_no_text_is_refused() {
    lab::run_within(DEADLINE, |lab| {
        let mut cgroups = Cgroups::new();
        let name = OsStr::from_bytes(b"web\xff");
        let cgroup = cgroups.make("parent").join(name);
        fs::create_dir(&cgroup).unwrap();
        let before = addresses(lab);
        let identities = Identities::new(folder());
        let mut new = new_identity(&cgroup, &["10.77.0.1"]);
        new.name = Some("web".parse().unwrap());
        let added = identities.add(&new);
        // Not one that the next command forgets.
        assert_eq!(identities.list().unwrap().len(), usize::from(added.is_ok()));
        assert!(added.unwrap_err().is_refusal());
        assert_eq!(addresses(lab), before);
        fs::remove_dir(&cgroup).unwrap();
    });
}

/// As a service that is started anew: the kernel lets go of the cgroup of before by and by.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_cgroup_that_is_made_anew_has_its_identity_at_once() {
    lab::run_within(DEADLINE, |_| {
        let mut cgroups = Cgroups::new();
        let cgroup = cgroups.make("web");
        let identities = Identities::new(folder());
        let new = new_identity(&cgroup, &["10.77.0.1"]);
        identities.add(&new).unwrap();
        let again = || {
            fs::remove_dir(&cgroup).unwrap();
            fs::create_dir(&cgroup).unwrap();
            identities.add(&new)
        };
        for round in 0..10 {
            let added = again().unwrap_or_else(|error| panic!("round {round}: {error}"));
            assert_eq!(added.state, State::Active);
        }
        // While a socket of before is open, what differs can't be had; what to do is said.
        let mut application = Application::start(Some(&cgroup), None);
        application.run("l = listen('0.0.0.0', 8080)");
        let parent = cgroup.parent().unwrap();
        fs::write(parent.join("cgroup.procs"), application.id().to_string()).unwrap();
        again().unwrap();
        let mut other = new.clone();
        other.addresses = stage::addresses(&["10.77.0.1", "10.77.0.9"]);
        fs::remove_dir(&cgroup).unwrap();
        fs::create_dir(&cgroup).unwrap();
        let error = identities.add(&other).unwrap_err();
        let text = error.to_string();
        assert!(error.is_refusal(), "{text}");
        assert!(text.contains("sandwire identity remove web"), "{text}");
        // One below the path of a cgroup that is gone isn't in it.
        let inner = cgroups.make("web/inner");
        identities
            .add(&new_identity(&inner, &["10.77.0.2"]))
            .unwrap();
        identities.remove("inner").unwrap();
        identities.remove("web").unwrap();
        identities.add(&new).unwrap();
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn one_that_cannot_be_removed_is_in_nobody_s_way() {
    lab::run_within(DEADLINE, |lab| {
        let mut cgroups = Cgroups::new();
        let names = ["one", "two", "three"];
        let [one, two, three] = names.map(|name| cgroups.make(name));
        let before = addresses(lab);
        let identities = Identities::new(folder());
        let added = identities.add(&new_identity(&one, &["10.77.0.1"]));
        // A mount on the folder of its pins holds it fast.
        let pins = folder().join(format!("v2/links/{}", added.unwrap().cgroup_id));
        lab.run(&format!("mount --bind {0} {0}", pins.display()));
        identities.add(&new_identity(&two, &["10.77.0.2"])).unwrap();
        for cgroup in [&one, &two] {
            fs::remove_dir(cgroup).unwrap();
        }
        let mut repaired = identities.repair().unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while repaired.ended.is_empty() {
            assert!(Instant::now() < deadline, "{repaired:?}");
            std::thread::sleep(Duration::from_millis(20));
            repaired = identities.repair().unwrap();
        }
        assert_eq!(repaired.ended, ["two"]);
        let said = identities.repair().unwrap().failures.join("; ");
        assert!(
            said.contains("identity one") && said.contains("v2/links"),
            "{said}"
        );
        identities
            .add(&new_identity(&three, &["10.77.0.3"]))
            .unwrap();
        identities.remove("three").unwrap();
        lab.run(&format!("umount {}", pins.display()));
        assert_eq!(identities.repair().unwrap().failures, [""; 0]);
        assert_eq!(identities.list().unwrap(), []);
        assert_eq!(addresses(lab), before);
    });
}

/// As NetworkManager does when it turns networking off.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn addresses_that_somebody_takes_off_their_interface_come_back() {
    lab::run_within(DEADLINE, |lab| {
        let mut cgroups = Cgroups::new();
        let cgroup = cgroups.make("web");
        let identities = Identities::new(folder());
        // Of these, one is the host's, and one goes to another interface.
        lab.run("ip link add elsewhere0 type bridge");
        lab.run("ip address add 10.77.0.3/32 dev lo");
        let mut new = new_identity(&cgroup, &["10.77.0.1", "fd77::1", "10.77.0.2", "10.77.0.3"]);
        new.existing = true;
        identities.add(&new).unwrap();
        let before = addresses(lab);
        for address in [
            "10.77.0.1/32",
            "fd77::1/128",
            "fd53:7764:6c6f:6f70::100/128",
        ] {
            lab.run(&format!("ip address delete {address} dev lo"));
        }
        let repaired = identities.repair().unwrap();
        assert_eq!(
            (repaired.restored, repaired.failures),
            (vec!["web".to_owned()], vec![])
        );
        // In another order: an address that comes back is the last one.
        let sorted = |text: String| {
            let lines = text
                .lines()
                .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
            let mut lines: Vec<String> = lines.collect();
            lines.sort();
            lines
        };
        assert_eq!(sorted(addresses(lab)), sorted(before));
        let mut application = Application::start(Some(&cgroup), None);
        application.run("l = listen('fd77::1', 80)");
        assert_eq!(identities.repair().unwrap().restored, [""; 0]);
        lab.run("ip address delete 10.77.0.2/32 dev lo");
        lab.run("ip address delete 10.77.0.3/32 dev lo");
        lab.run("ip address add 10.77.0.2/32 dev elsewhere0");
        let repaired = identities.repair().unwrap();
        assert_eq!((repaired.restored, repaired.failures), (vec![], vec![]));
        identities.remove("web").unwrap();
    });
}

/// What is left in a map: its elements, as `bpftool` tells them.
fn elements(lab: &Lab, map: &str) -> usize {
    let pin = folder().join("v2").join(map);
    let dump = lab.run(&format!("bpftool -j map dump pinned {}", pin.display()));
    let dump: serde_json::Value = serde_json::from_str(&dump).unwrap();
    dump.as_array().unwrap().len()
}

/// As when a host loses many containers at once.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn those_that_end_together_leave_nothing_but_what_is_still_used() {
    const MAPS: [&str; 9] = [
        "records",
        "addresses",
        "policies",
        "prefixes",
        "rule_lists",
        "texts",
        "tallies",
        "tcp_tallies",
        "dialers",
    ];
    lab::run_within(DEADLINE, |lab| {
        let mut cgroups = Cgroups::new();
        let kept = cgroups.make("kept");
        let identities = Identities::new(folder());
        let mut new = new_identity(&kept, &["10.77.1.1", "fd77::1:1"]);
        new.policy = stage::policy(RULES);
        let kept = identities.add(&new).unwrap();
        let before = (addresses(lab), MAPS.map(|map| elements(lab, map)));
        let leaving: Vec<_> = (1..=30)
            .map(|index| cgroups.make(&format!("c{index}")))
            .collect();
        for (index, cgroup) in (1..).zip(&leaving) {
            let (v4, v6) = (format!("10.77.0.{index}"), format!("fd77::{index}"));
            let mut new = new_identity(cgroup, &[v4.as_str(), v6.as_str()][..1 + index % 2]);
            new.tcp_only = index % 3 == 0;
            new.policy = stage::policy(RULES);
            identities.add(&new).unwrap();
        }
        assert_eq!(identities.list().unwrap().len(), 31);
        for cgroup in &leaving {
            fs::remove_dir(cgroup).unwrap();
        }
        let deadline = Instant::now() + Duration::from_secs(60);
        while identities.list().unwrap().len() > 1 {
            assert!(Instant::now() < deadline);
            thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(identities.list().unwrap()[0].name, kept.name);
        assert_eq!(identities.policy("kept").unwrap(), stage::policy(RULES));
        let after = (addresses(lab), MAPS.map(|map| elements(lab, map)));
        assert_eq!(after, before, "of {MAPS:?}");
        let folders = fs::read_dir(identities.links()).unwrap();
        assert_eq!(folders.count(), 1);
    });
}

/// A policy with prefixes and lists of ports.
const RULES: &str = r#"{"egress": {"rules": [
    {"action": "allow", "prefixes": ["192.0.2.0/24"], "ports": ["tcp/80", "tcp/8000-8100"]},
    {"action": "deny", "prefixes": ["2001:db8::/32"]}
]}}"#;

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn traffic_and_refusals_are_counted() {
    lab::run_within(DEADLINE, |lab| {
        let _wire = stage::wire(lab);
        let mut cgroups = Cgroups::new();
        let cgroup = cgroups.make("web");
        let identities = Identities::new(folder());
        identities
            .add(&new_identity(&cgroup, &["10.77.0.1"]))
            .unwrap();
        let mut peer = Application::start(None, Some("peer"));
        let mut web = Application::start(Some(&cgroup), None);
        peer.run("s = udp('192.0.2.2', 9000)");
        web.run("c = fresh(SOCK_DGRAM, AF_INET)");
        for _ in 0..5 {
            web.run("c.sendto(b'question', ('192.0.2.2', 9000))");
            peer.run("heard(s)");
            web.run("answer(c)");
        }
        web.run("listen('192.0.2.1', 80)");
        let counters = identities.show("web").unwrap().counters;
        assert_eq!(
            (counters.egress.packets, counters.egress.bytes),
            (5, 5 * 36)
        );
        assert_eq!(
            (counters.ingress.packets, counters.ingress.bytes),
            (5, 5 * 34)
        );
        assert_eq!(counters.refused[&Refusal::BindAddress], 1);
        drop(web);
        // Another identity of the same cgroup begins at zero.
        identities.remove("web").unwrap();
        let added = identities.add(&new_identity(&cgroup, &["10.77.0.1"]));
        assert_eq!(added.unwrap().counters.egress.packets, 0);
    });
}

/// What runs on a cgroup by the kernel's own word: program by hook.
fn programs(lab: &Lab, cgroup: &Path) -> BTreeMap<String, u64> {
    let shown = lab.run(&format!("bpftool -j cgroup show {}", cgroup.display()));
    let shown: Vec<serde_json::Value> = serde_json::from_str(&shown).unwrap();
    let hooks = shown.iter();
    hooks
        .map(|hook| {
            let name = hook["attach_type"].as_str().unwrap().to_owned();
            (name, hook["id"].as_u64().unwrap())
        })
        .collect()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn programs_are_exchanged_while_sockets_are_made_and_used() {
    // Sockets without an identity would have the host's address, and what stays open is heard all the time.
    const SOCKETS: &str = "\
import os
wrong = []; made = 0
while not made or not os.path.exists(end):
    s = fresh(SOCK_DGRAM, AF_INET); s.connect(('192.0.2.2', 9)); name = s.getsockname()[0]; s.close()
    if name != '10.77.0.1': wrong.append(name)
    c.send(b'x'); c.recv(1); made += 1
r = wrong[:3] or made";
    lab::run_within(DEADLINE, |lab| {
        let _wire = stage::wire(lab);
        let mut cgroups = Cgroups::new();
        let cgroup = cgroups.make("web");
        let identities = Identities::new(folder());
        assert_eq!(identities.renew().unwrap(), 0);
        let added = identities
            .add(&new_identity(&cgroup, &["10.77.0.1", "fd77::1"]))
            .unwrap();
        let mut web = Application::start(Some(&cgroup), None);
        web.run("l = listen('0.0.0.0', 8080); c = dial('10.77.0.1', 8080); d = l.accept()[0]");
        web.run(
            "import threading; threading.Thread(daemon=True, target=lambda: [d.send(x) for x in iter(lambda: d.recv(1), b'')]).start()",
        );
        let before = programs(lab, &cgroup);
        assert_eq!(before.len(), 20, "{before:?}");
        let packets = identities.show("web").unwrap().counters.egress.packets;
        let end = lab.folder().join("end");
        let sockets = format!("end = '{}'\n{SOCKETS}", end.display());
        let (made, renewals) = thread::scope(|scope| {
            let maker = scope.spawn(|| web.run(&sockets));
            let renewals = [(); 10].map(|()| identities.renew());
            fs::write(&end, "").unwrap();
            (maker.join().unwrap(), renewals)
        });
        for renewal in renewals {
            assert_eq!(renewal.unwrap(), 1);
        }
        let made = made.as_u64().unwrap_or_else(|| panic!("{made}"));
        let after = programs(lab, &cgroup);
        assert_eq!(after.len(), before.len(), "{after:?}");
        assert!(
            after.iter().all(|(hook, id)| before[hook] != *id),
            "{after:?}"
        );
        let counted = identities.show("web").unwrap().counters.egress.packets;
        assert!(counted >= packets + 2 * made, "{counted}");

        // A hook that this build has and the last had not; and one that is no more.
        let links = folder().join(format!("v2/links/{}", added.cgroup_id));
        fs::rename(links.join("on_connect4"), links.join("on_former")).unwrap();
        assert_eq!(identities.renew().unwrap(), 1);
        assert_eq!(programs(lab, &cgroup).len(), before.len());
        assert!(!links.join("on_former").exists());
        let dial =
            "s = fresh(SOCK_DGRAM, AF_INET); s.connect(('192.0.2.2', 9)); r = s.getsockname()[0]";
        assert_eq!(web.run(dial), "10.77.0.1");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn programs_are_loaded_once_for_all_and_anew_where_they_are_not_whole() {
    lab::run_within(DEADLINE, |lab| {
        let mut cgroups = Cgroups::new();
        let identities = Identities::new(folder());
        let pins = folder().join("v2");
        let sets = || {
            let entries = fs::read_dir(pins.join("programs")).unwrap();
            let mut sets = entries.map(|entry| entry.unwrap().path());
            let only = sets.next().unwrap();
            assert_eq!(sets.next(), None);
            only
        };
        // Nothing of one that is refused.
        let stranger = cgroups.make("stranger");
        let refused = new_identity(&stranger, &["127.0.0.1"]);
        identities.add(&refused).unwrap_err();
        lab.run("ip addr add 10.77.0.99/32 dev lo");
        let taken = new_identity(&stranger, &["10.77.0.99"]);
        identities.add(&taken).unwrap_err();
        assert!(pins.join("records").exists() && !pins.join("programs").exists());
        let mut add = |number: u8| {
            let cgroup = cgroups.make(&format!("web{number}"));
            let address = format!("10.77.0.{number}");
            identities.add(&new_identity(&cgroup, &[&address])).unwrap();
            programs(lab, &cgroup)
        };
        let first = add(1);
        assert_eq!(add(2), first);
        // As a crash leaves them.
        fs::remove_file(sets().join("on_sock_ops")).unwrap();
        let third = add(3);
        assert!(third.iter().all(|(hook, id)| first[hook] != *id));
        assert_eq!(add(4), third);
        // With this map, the pinned programs would ask nobody.
        let before = sets();
        fs::remove_file(pins.join("asked")).unwrap();
        let fifth = add(5);
        assert!(fifth.iter().all(|(hook, id)| third[hook] != *id));
        assert_ne!(sets(), before);
        assert_eq!(identities.renew().unwrap(), 5);
        let renewed = add(6);
        assert!(renewed.iter().all(|(hook, id)| fifth[hook] != *id));
        let is_loaded = |id: &u64| {
            let shown = lab.shell("bpftool -j prog show");
            shown.contains(&format!(r#"{{"id":{id},"#))
        };
        assert!(renewed.values().all(is_loaded));
        for number in 1..=6 {
            identities.remove(&format!("web{number}")).unwrap();
        }
        assert!(!pins.join("programs").exists());
        // What one that was killed before it had a record leaves; and a first one in the place of a last one has pins.
        fs::create_dir_all(pins.join("programs/0")).unwrap();
        assert_eq!(identities.list().unwrap(), []);
        assert!(!pins.join("programs").exists());
        add(7);
        fs::remove_dir(identities.show("web7").unwrap().cgroup).unwrap();
        add(8);
        assert!(sets().join("on_bind4").exists());
        identities.remove("web8").unwrap();
        let end = Instant::now() + Duration::from_secs(20);
        while renewed.values().any(is_loaded) {
            assert!(Instant::now() < end, "they stay loaded");
            thread::sleep(Duration::from_millis(50));
        }
    });
}

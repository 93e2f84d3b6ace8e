//! What `/metrics` has of bytes that were moved, by class, for each pool and each lease.

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use sandwire_testlab::{lab, openmetrics};
use sandwire_vsock_guest::{Guest, Kind, Socket};

use super::{CONFIG, World, echo, finish, groups::call, interrupt, open_until, wait_until};

/// The series of vsock, each with its labels as they are written, and their values.
fn scrape(world: &World) -> BTreeMap<String, u64> {
    let answer = world.daemon.http("GET", "/metrics", None).unwrap();
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert!(answer.body.ends_with("# EOF\n"), "{}", answer.body);
    let series = answer.body.lines().filter(|line| {
        line.starts_with("sandwire_vsock_") || line.starts_with("sandwire_lease_vsock_")
    });
    series
        .map(|line| {
            let (name, value) = line.rsplit_once(' ').unwrap();
            (name.to_owned(), value.parse().unwrap())
        })
        .collect()
}

/// Waits until series have these values.
#[track_caller]
fn wait_for(world: &World, wanted: &[(String, u64)]) {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let found = scrape(world);
        let is_there = |(name, value): &&(String, u64)| found.get(name) == Some(value);
        let Some(missing) = wanted.iter().find(|wanted| !is_there(wanted)) else {
            return;
        };
        assert!(Instant::now() < deadline, "{missing:?} isn't in {found:#?}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Bytes and connections of a class: from guests, to guests, opened by guests, opened by peers, open now.
fn class(of: &str, class: &str, figures: [u64; 5]) -> Vec<(String, u64)> {
    let [egress, ingress, by_guest, by_peer, now] = figures;
    let (subject, labels) = match of {
        "web" => ("sandwire_vsock", "pool=\"web\"".to_owned()),
        lease => (
            "sandwire_lease_vsock",
            format!("pool=\"web\",owner=\"0\",lease=\"{lease}\""),
        ),
    };
    let series =
        |what: &str, more: &str| format!("{subject}_{what}{{{labels},class=\"{class}\"{more}}}");
    let mut wanted = vec![
        (series("bytes_total", ",direction=\"egress\""), egress),
        (series("bytes_total", ",direction=\"ingress\""), ingress),
        (series("connections", ""), now),
    ];
    if class != "host_to_guest" {
        wanted.push((series("opened_total", ",by=\"guest\""), by_guest));
    }
    if class != "guest_to_host" {
        wanted.push((series("opened_total", ",by=\"peer\""), by_peer));
    }
    wanted
}

/// The host calls port 52 of the guest, asks 300 bytes and hears 200.
fn call_from_the_host(world: &World, lease: &str, guest: &mut Guest) {
    guest.listen(Kind::Stream, 52);
    let mut child = world.spawn(&format!("vsock connect {lease} 52"));
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(&[b'q'; 300]).unwrap();
    drop(stdin);
    let socket = guest.accept(Kind::Stream, 52).unwrap();
    assert_eq!(guest.receive_to_end(socket).unwrap().len(), 300);
    guest.send(socket, &[b'a'; 200]).unwrap();
    guest.close(socket).unwrap();
    let (done, output, errors) = finish(child);
    assert!(done && output.len() == 200, "{errors}");
}

/// A guest calls another by port 5000, says 5000 bytes and hears 70.
fn call_a_sibling(caller: &mut Guest, called: &mut Guest) -> (Socket, Socket) {
    let (socket, accepted) = call(caller, 5000, called);
    caller.send(socket, &[b's'; 5000]).unwrap();
    caller.run_for(Duration::from_millis(50)).unwrap();
    assert_eq!(called.receive_exact(accepted, 5000).unwrap().len(), 5000);
    called.send(accepted, &[b't'; 70]).unwrap();
    called.run_for(Duration::from_millis(50)).unwrap();
    assert_eq!(caller.receive_exact(socket, 70).unwrap().len(), 70);
    (socket, accepted)
}

/// A hybrid guest calls one of its ports, says something and hears an answer of two bytes.
fn call_from_a_hybrid(socket: &str, port: u32, serve: impl FnOnce()) -> UnixStream {
    let mut stream = UnixStream::connect(format!("{socket}_{port}")).unwrap();
    stream.write_all(&[b'h'; 40]).unwrap();
    serve();
    let mut answer = [0; 2];
    stream.read_exact(&mut answer).unwrap();
    stream
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn metrics_tell_whose_bytes_they_are_and_between_whom() {
    lab::run_within(Duration::from_secs(180), |lab| {
        let world = World::start_with(lab, &format!("metrics_per_lease = true\n{CONFIG}"), &[]);
        assert!(
            scrape(&world).is_empty(),
            "nothing before the first channel"
        );
        let (_, mut a) = world.lease("a");
        let (_, mut b) = world.lease("b");
        let nothing = scrape(&world);

        world.run("vsock policy allow a 1024 host");
        world.run("vsock policy allow a 5000 sandbox:b:7000");
        let listener = world.spawn("vsock listen a 1024 --exec cat");
        let to_host = open_until(&mut a, 1024);
        echo(&mut a, to_host, &"x".repeat(1000));
        call_from_the_host(&world, "b", &mut b);
        let (sibling, accepted) = call_a_sibling(&mut a, &mut b);
        // Attempts before the listener was there are not opened.
        let figures = [
            class("a", "guest_to_host", [1000, 1000, 1, 0, 1]),
            class("a", "host_to_guest", [0; 5]),
            class("a", "guest_to_guest", [5000, 70, 1, 0, 1]),
            class("b", "guest_to_host", [0; 5]),
            class("b", "host_to_guest", [200, 300, 0, 1, 0]),
            class("b", "guest_to_guest", [70, 5000, 0, 1, 1]),
            class("web", "guest_to_host", [1000, 1000, 1, 0, 1]),
            class("web", "host_to_guest", [200, 300, 0, 1, 0]),
            class("web", "guest_to_guest", [5070, 5070, 1, 1, 2]),
        ];
        wait_for(&world, &figures.concat());

        // A guest whose VMM has the device: a service of the host, and a sibling.
        let hybrid = world.daemon.json("acquire web h --vsock=hybrid").unwrap();
        let socket = hybrid["vsock"]["socket"].as_str().unwrap();
        let path: PathBuf = lab.folder().join("service.sock");
        let service = UnixListener::bind(&path).unwrap();
        world.run(&format!(
            "vsock policy allow h 6000 unix:{}",
            path.display()
        ));
        world.run("vsock policy allow h 5000 sandbox:b:7000");
        let first = call_from_a_hybrid(socket, 6000, || {
            let (mut stream, _) = service.accept().unwrap();
            stream.read_exact(&mut [0; 40]).unwrap();
            stream.write_all(b"ok").unwrap();
        });
        let second = call_from_a_hybrid(socket, 5000, || {
            let accepted = b.accept(Kind::Stream, 7000).unwrap();
            assert_eq!(b.receive_exact(accepted, 40).unwrap().len(), 40);
            b.send(accepted, b"ok").unwrap();
            b.close(accepted).unwrap();
        });
        drop((first, second));
        a.close(sibling).unwrap();
        b.run_for(Duration::from_millis(50)).unwrap();
        b.close(accepted).unwrap();
        a.close(to_host).unwrap();
        let pool = [
            class("web", "guest_to_host", [1040, 1002, 2, 0, 0]),
            class("web", "host_to_guest", [200, 300, 0, 1, 0]),
            class("web", "guest_to_guest", [5112, 5112, 2, 2, 0]),
        ];
        let leases = [
            class("h", "guest_to_host", [40, 2, 1, 0, 0]),
            class("h", "guest_to_guest", [40, 2, 1, 0, 0]),
            class("b", "guest_to_guest", [72, 5040, 0, 2, 0]),
        ];
        wait_for(&world, &[pool.concat(), leases.concat()].concat());
        let metrics = world.daemon.http("GET", "/metrics", None).unwrap().body;
        let families = openmetrics::families(&metrics).unwrap();
        for wanted in [
            "vsock_bytes",
            "lease_vsock_bytes",
            "lease_packets",
            "daemon",
        ] {
            let wanted = format!("sandwire_{wanted}");
            assert!(families.contains(&wanted), "{wanted} isn't in {families:?}");
        }

        // As many series as before for each, but for the reasons of refusals; and what ended is not lost.
        let lasting = |series: &BTreeMap<String, u64>, of: &str| {
            let names = series.keys().filter(|name| !name.contains("_refused_"));
            names.filter(|name| name.contains(of)).count()
        };
        let now = scrape(&world);
        for of in ["sandwire_vsock_", "lease=\"a\"", "lease=\"b\""] {
            assert_eq!(lasting(&now, of), lasting(&nothing, of), "{of}: {now:#?}");
        }
        for lease in ["a", "b", "h"] {
            world.run(&format!("release {lease}"));
        }
        wait_until("leases that ended have no series", || {
            let names = scrape(&world);
            names.keys().all(|name| !name.contains("lease"))
        });
        wait_for(&world, &pool.concat());
        interrupt(listener);
    });
}

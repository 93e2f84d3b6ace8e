//! Processes of the host whose traffic is relayed: identities, cgroups.

use std::{net::TcpListener, time::Duration};

use sandwire_testlab::{host::ECHO_PORT, lab};

use super::{DEADLINE, FETCH, everything_works};
use crate::stage::{DESTINATIONS, MARKER, Stage, executable, wait_for};

const ADDRESSES: [&str; 2] = ["10.70.0.5", "fd70::5"];

/// A datagram there and back, again if it was lost while a peer is being connected.
fn exchange(destination: &str) -> String {
    format!(
        "python3 -c 'import socket, sys\n\
         s = socket.socket(socket.AF_INET6 if \":\" in \"{destination}\" else socket.AF_INET, socket.SOCK_DGRAM)\n\
         s.settimeout(1)\n\
         for _ in range(60):\n\
         \x20   s.sendto(b\"{MARKER}\", (\"{destination}\", {ECHO_PORT}))\n\
         \x20   try:\n\
         \x20       print(s.recv(100).decode())\n\
         \x20       sys.exit()\n\
         \x20   except TimeoutError: pass\n\
         sys.exit(1)'"
    )
}

/// The way to the relay leads by the host's loopback; that doesn't make it a service of the host.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_identity_is_relayed_that_may_reach_no_service_of_the_host() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("auto");
        stage.add_identity(ADDRESSES);
        stage.start_peer();
        stage.start_host();
        let capture = stage.capture();
        for destination in DESTINATIONS {
            let host = match destination.parse().unwrap() {
                std::net::IpAddr::V4(address) => address.to_string(),
                std::net::IpAddr::V6(address) => format!("[{address}]"),
            };
            let fetch = format!("curl -sS --max-time 20 http://{host}:8080/page");
            assert_eq!(stage.in_identity(&fetch).as_deref(), Ok(MARKER));
            let answer = stage.in_identity(&exchange(destination)).unwrap();
            assert_eq!(answer.trim(), MARKER);
        }
        // The host itself is as far away as ever.
        let _services = ["0.0.0.0:8099", "[::1]:8099"].map(|at| TcpListener::bind(at).unwrap());
        for service in ["127.0.0.1:8099", "203.0.113.1:8099", "[::1]:8099"] {
            let line = format!("curl -sS --max-time 5 http://{service}/");
            let refused = stage.in_identity(&line).unwrap_err();
            assert!(refused.contains("curl: (7)"), "{refused}");
        }
        let send = "python3 -c 'import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b\"?\", (\"203.0.113.1\", 8099))'";
        let refused = stage.in_identity(send).unwrap_err();
        assert!(refused.contains("PermissionError"), "{refused}");
        capture.has_nothing_in_the_clear(true);
        let report = stage.report();
        for source in ["10.70.0.5:", "[fd70::5]:"] {
            let line = report.lines().find(|line| line.contains(source));
            let line = line.unwrap_or_else(|| panic!("{source} is missing in {report}"));
            assert!(line.contains(r#""sender":"other""#), "{line}");
        }
    });
}

/// A server, and calls to it by TCP and UDP: what each answers, by lines.
const CALLS: &str = r#"
import socket, sys, threading
is_ipv6 = ":" in sys.argv[1]
def server(kind):
    s = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET, kind)
    if is_ipv6: s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    s.bind(("", 9000))
    return s
def tcp(s):
    while True:
        c = s.accept()[0]
        c.sendall(c.recv(100))
def udp(s):
    while True:
        s.sendto(*s.recvfrom(100))
for kind, serve in [(socket.SOCK_STREAM, tcp), (socket.SOCK_DGRAM, udp)]:
    s = server(kind)
    if kind == socket.SOCK_STREAM: s.listen()
    threading.Thread(target=serve, args=[s], daemon=True).start()
    for to in sys.argv[1:]:
        c = socket.socket(s.family, kind)
        c.settimeout(5)
        try:
            c.connect((to, 9000))
            c.send(to.encode())
            print(c.recv(100).decode())
        except OSError as error: print(to, kind, error)
"#;

/// Its hooks lead datagrams for 127.0.0.1 to its own address, if that is where its socket is.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_identity_of_which_everything_is_redirected_keeps_its_addresses() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("auto");
        stage.add_identity(ADDRESSES);
        stage.redirect_everywhere();
        stage.start_peer();
        stage.start_host();
        let capture = stage.capture();
        let script = stage.write("calls.py", CALLS);
        for own in [["10.70.0.5", "127.0.0.1"], ["fd70::5", "::1"]] {
            let line = format!("python3 {} {}", script.display(), own.join(" "));
            let answers = stage.in_identity(&line).unwrap();
            let answers: Vec<&str> = answers.lines().collect();
            assert_eq!(answers, [own, own].concat());
        }
        for destination in DESTINATIONS {
            let answer = stage.in_identity(&exchange(destination)).unwrap();
            assert_eq!(answer.trim(), MARKER);
        }
        capture.has_nothing_in_the_clear(true);
        assert!(!stage.report_of("host").contains(":9000"));
    });
}

/// It comes in by the loopback, with a source among those of sandboxes.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_the_host_has_with_itself_is_not_redirected() {
    lab::run_within(DEADLINE, |lab| {
        let mut stage = Stage::build("auto");
        stage.redirect_everywhere();
        stage.start_peer();
        stage.start_host();
        let script = stage.write("calls.py", CALLS);
        let line = format!("python3 {} 10.64.0.1", script.display());
        assert_eq!(lab.run(&line), "10.64.0.1\n10.64.0.1\n");
        assert!(!stage.report_of("host").contains(":9000"));
    });
}

/// Any process of the host may bind to any address that the host has.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_process_of_a_cgroup_is_no_identity_by_its_address() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("auto");
        stage.add_identity(ADDRESSES);
        let all = "senders = [\"lab\", \"batch\", \"other\"]\n";
        let apart = "senders = [\"lab\", \"other\"]\n";
        stage.exchange("host", all, apart);
        let of_batch =
            "senders = [\"batch\"]\nto = [\"2001:db8:5::/64\"]\nvia = \"beyond\"\n[[redirect]]\n";
        stage.exchange("host", apart, &format!("{of_batch}{apart}"));
        stage.start_peer();
        stage.start_host();
        let capture = stage.capture();
        let fetch = "curl -sS --max-time 10 --interface 10.70.0.5 http://198.51.100.7:8080/page";
        let fetch_or_say = format!("sh -c '{fetch} || echo cut off'");
        assert_eq!(stage.in_identity(fetch).as_deref(), Ok(MARKER));
        assert_eq!(stage.in_cgroup(&fetch_or_say).trim(), "cut off");
        // Where a redirect of its own covers it, too, however far behind the identity's.
        stage.exchange(
            "host",
            "to = [\"2001:db8:5::/64\"]",
            "to = [\"192.0.2.0/24\"]",
        );
        let of_batch =
            "[[redirect]]\nsenders = [\"batch\"]\nto = [\"198.51.100.0/24\"]\nvia = \"beyond\"\n";
        stage.append("host", of_batch);
        assert!(stage.reload("host").contains("is read again"));
        assert_eq!(stage.in_cgroup(fetch), MARKER);
        assert_eq!(stage.in_identity(fetch).as_deref(), Ok(MARKER));
        capture.has_nothing_in_the_clear(true);
        wait_for("connections are reported", || {
            stage.report_of("host").matches("10.70.0.5:").count() == 3
        });
        let report = stage.report_of("host");
        let of = |sender: &str| report.matches(&format!("\"sender\":\"{sender}\"")).count();
        assert_eq!([of("other"), of("batch")], [2, 1], "{report}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_cgroup_of_which_everything_is_redirected_keeps_its_loopback() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("auto");
        stage.redirect_everywhere();
        stage.start_peer();
        stage.start_host();
        let page = stage.in_cgroup("curl -sS --max-time 60 http://198.51.100.7:8080/page");
        assert_eq!(page, MARKER);
        sandwire_testlab::host::serve_tcp(8099, sandwire_testlab::host::answer_http).unwrap();
        for here in ["127.0.0.1", "127.0.0.53", "[::1]"] {
            let fetch = format!("curl -sS --max-time 5 http://{here}:8099/");
            assert!(stage.in_cgroup(&fetch).contains("hello"), "{here}");
        }
        // Who calls the relay itself is nobody of the cgroup.
        let call = "curl -sS --max-time 5 http://127.0.0.1:15002/";
        assert!(sandwire_testlab::command::run(call).is_err());
        assert!(!stage.report_of("host").contains("127.0.0.1:15002"));
    });
}

/// The tables are there, and nothing is in them.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn rules_of_which_a_table_or_chain_was_emptied_come_back() {
    lab::run_within(DEADLINE, |lab| {
        let mut stage = Stage::build("auto");
        stage.start_peer();
        stage.start_host();
        let list = |table: &str| lab.run(&format!("nft -s -t list table inet {table}"));
        for (emptied, table) in [
            ("table inet sandwire-relay", "sandwire-relay"),
            ("chain inet sandwire-relay output", "sandwire-relay"),
            ("table inet sandwire-relay-ends", "sandwire-relay-ends"),
        ] {
            let before = list(table);
            lab.run(&format!("nft flush {emptied}"));
            wait_for("the rules are there again", || list(table) == before);
        }
        let capture = stage.capture();
        assert_eq!(stage.in_cgroup(FETCH), MARKER);
        everything_works(&stage);
        capture.has_nothing_in_the_clear(true);
        // What is there isn't taken for what is gone, also where it has changed.
        stage.make_cgroup_anew();
        wait_for("it is steered anew", || {
            stage.host_log().contains("a cgroup was made anew")
        });
        std::thread::sleep(Duration::from_secs(4));
        let restored = "sandwire_relay_steering_restored_total 3\n";
        assert!(stage.metrics("host").contains(restored));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn rules_that_were_flushed_come_back_and_those_that_were_cleared_do_not() {
    lab::run_within(DEADLINE, |lab| {
        let mut stage = Stage::build("auto");
        stage.start_peer();
        stage.start_host();
        let is_there = || lab.run("nft list tables").contains("sandwire-relay");
        let rules = || lab.run("ip rule") + &lab.run("ip -6 rule");
        let before = rules();
        lab.run("nft flush ruleset");
        wait_for("the rules are there again", is_there);
        let capture = stage.capture();
        assert_eq!(stage.in_cgroup(FETCH), MARKER);
        everything_works(&stage);
        capture.has_nothing_in_the_clear(true);
        assert_eq!(rules(), before);
        let restored = "sandwire_relay_steering_restored_total 1\n";
        assert!(stage.metrics("host").contains(restored));
        lab.run(&format!("{} relay clear", executable().display()));
        let cleared = rules();
        stage.make_cgroup_anew_without_the_other();
        std::thread::sleep(Duration::from_secs(4));
        assert!(!is_there(), "what was cleared came back");
        assert_eq!(rules(), cleared);
        assert_eq!(stage.in_cgroup(FETCH), MARKER);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_is_taken_out_of_sets_comes_back() {
    lab::run_within(DEADLINE, |lab| {
        let mut stage = Stage::build("auto");
        stage.start_peer();
        stage.start_host();
        let list = || lab.run("nft -s list table inet sandwire-relay");
        let before = list();
        let names: Vec<&str> = before
            .lines()
            .filter_map(|line| line.trim().strip_prefix("set ")?.strip_suffix(" {"))
            .collect();
        assert!(!names.is_empty(), "{before}");
        for name in names {
            lab.run(&format!("nft flush set inet sandwire-relay {name}"));
        }
        assert_ne!(list(), before);
        wait_for("they are there again", || list() == before);
        let restored = "sandwire_relay_steering_restored_total 1\n";
        wait_for("it is counted", || stage.metrics("host").contains(restored));
        let capture = stage.capture();
        assert_eq!(stage.in_cgroup(FETCH), MARKER);
        everything_works(&stage);
        capture.has_nothing_in_the_clear(true);
    });
}

//! What is redirected never leaves in the clear, whatever becomes of the relay and of what it has told the kernel.

use std::{
    io::Write,
    net::{SocketAddr, TcpStream, UdpSocket},
    time::Duration,
};

use sandwire_testlab::{
    command,
    host::{self, ECHO_PORT},
    lab,
};

use super::{DEADLINE, ask, everything_works, fetch};
use crate::stage::{DESTINATIONS, MARKER, Stage, wait_for};

const FETCH: &str = "curl -sS --max-time 60 http://198.51.100.7:8080/page";

/// Datagrams get through.
fn by_udp() {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    let server = SocketAddr::new(DESTINATIONS[0].parse().unwrap(), ECHO_PORT);
    ask(&socket, server, MARKER.as_bytes());
}

/// As at the host's start, when nothing has been steered yet.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_relay_that_can_not_start_lets_nothing_out() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("auto");
        stage.start_peer();
        stage.certify_host("host.example", Duration::from_secs(1));
        std::thread::sleep(Duration::from_secs(2));
        let capture = stage.capture();
        let refused = stage.host_refuses();
        stage.nothing_is_answered();
        stage.cgroup_is_cut_off();
        capture.has_nothing_in_the_clear(false);
        assert!(
            refused.contains("has expired") && refused.contains("sandwire relay clear"),
            "{refused}"
        );
        stage.certify_host("host.example", Duration::from_secs(3600));
        stage.start_host();
        fetch(&stage);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn cgroups_that_changed_while_the_relay_was_away_are_steered_when_it_comes_back() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("auto");
        stage.start_peer();
        stage.start_host();
        assert_eq!(stage.in_cgroup(FETCH), MARKER);
        stage.kill_host();
        stage.make_cgroup_anew_without_the_other();
        stage.start_host();
        let capture = stage.capture();
        assert_eq!(stage.in_cgroup(FETCH), MARKER);
        everything_works(&stage);
        stage.make_other_cgroup();
        wait_for("it is steered, too", || {
            stage.host_log().contains("a cgroup was made anew")
        });
        assert_eq!(stage.in_other_cgroup(FETCH), MARKER);
        capture.has_nothing_in_the_clear(true);
    });
}

/// Rules name a cgroup by its number: no rule can wait for the next one of that name. Whoever makes it can.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_steers_a_cgroup_before_anything_runs_in_it_lets_nothing_out() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("auto");
        // As at the host's start, and after a restart of the service while the relay is away.
        for restart in [false, true] {
            if restart {
                stage.make_cgroup_anew();
            }
            let capture = stage.capture();
            let said = stage.steer_in_cgroup().unwrap();
            assert!(said.contains("dropped until a relay runs"), "{said}");
            stage.cgroup_is_cut_off();
            stage.nothing_is_answered();
            capture.has_nothing_in_the_clear(false);
        }
        stage.start_peer();
        stage.start_host();
        everything_works(&stage);
        let capture = stage.capture();
        for _ in 0..20 {
            stage.make_cgroup_anew();
            assert_eq!(stage.steer_and_run_in_cgroup(FETCH), MARKER);
        }
        capture.has_nothing_in_the_clear(true);
    });
}

/// As when a service is started anew that had more to say than its destination has taken: the kernel goes on with that.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_a_former_cgroup_has_left_to_send_does_not_leave_in_the_clear() {
    const PORT: u16 = 9999;
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("auto");
        stage.start_peer();
        stage.start_host();
        let never_reads = |_| {
            std::thread::sleep(DEADLINE);
            Ok(())
        };
        stage
            .inside_dest(|| host::serve_tcp(PORT, never_reads))
            .unwrap();
        let capture = stage.capture();
        let leave = format!(
            "python3 -c 'import socket\n\
             s = socket.create_connection((\"198.51.100.7\", {PORT}))\n\
             s.settimeout(2)\n\
             try:\n\
             \x20   while True: s.send(b\"{MARKER}\" * 1000)\n\
             except TimeoutError: pass'"
        );
        stage.in_cgroup(&leave);
        for _ in 0..3 {
            stage.make_cgroup_anew();
            assert_eq!(stage.steer_and_run_in_cgroup(FETCH), MARKER);
        }
        // The kernel asks for room ever more rarely.
        std::thread::sleep(Duration::from_secs(5));
        capture.has_nothing_in_the_clear(true);
    });
}

/// What still comes for a connection that its process has closed, the kernel answers in nobody's name and of no cgroup.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_the_kernel_says_of_a_closed_connection_is_said_to_the_relay() {
    const SLOW_PORT: u16 = 9998;
    const BULK_PORT: u16 = 9997;
    lab::run_within(DEADLINE, |lab| {
        let mut stage = Stage::build("auto");
        stage.start_peer();
        stage.start_host();
        let slowly = |mut stream: TcpStream| loop {
            stream.write_all(MARKER.as_bytes())?;
            std::thread::sleep(Duration::from_millis(20));
        };
        let in_bulk = |mut stream: TcpStream| loop {
            stream.write_all(&MARKER.as_bytes().repeat(1000))?;
        };
        stage.inside_dest(|| {
            host::serve_tcp(SLOW_PORT, slowly).unwrap();
            host::serve_tcp(BULK_PORT, in_bulk).unwrap();
        });
        let capture = stage.capture();
        let rounds = [
            // It awaits the end: acknowledgements.
            (
                ECHO_PORT,
                "c.send(b\"x\"); c.recv(1); c.close(); time.sleep(1)",
            ),
            // More comes instead: resets.
            (SLOW_PORT, "c.recv(100); c.close(); time.sleep(1)"),
            // It is gone at once, with much under way to it.
            (BULK_PORT, "c.recv(100); os.kill(os.getpid(), 9)"),
        ];
        for (count, (port, then)) in rounds.into_iter().enumerate() {
            for ip in DESTINATIONS {
                stage.in_cgroup(&format!(
                    "sh -c 'python3 -c \"$0\" || true' 'import os, socket, time\n\
                     c = socket.create_connection((\"{ip}\", {port}))\n{then}'"
                ));
            }
            // Long before it would give up.
            wait_for("the relay hears of it", || {
                stage.report_of("host").lines().count() == 2 * (count + 1)
            });
            // As when the service is started anew, whose last connections are just over.
            stage.make_cgroup_anew();
            stage.steer_in_cgroup().unwrap();
        }
        wait_for("the kernel keeps no connection of the relay", || {
            let all = lab.run("ss -Htan");
            !all.lines()
                .any(|line| !line.starts_with("TIME-WAIT") && line.contains("198.51.100.7:"))
        });
        capture.has_nothing_in_the_clear(true);
        let table = lab.run("nft list table inet sandwire-relay-ends");
        assert!(
            table.contains("what the kernel says of a closed connection"),
            "{table}"
        );
        stage.clear();
        assert!(!lab.run("nft list tables").contains("sandwire-relay"));
    });
}

/// What is told belongs to the relay that runs, and to what it has read.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn steering_ahead_changes_nothing_that_a_running_relay_has_told() {
    lab::run_within(DEADLINE, |lab| {
        let mut stage = Stage::build("auto");
        stage.start_peer();
        stage.start_host();
        let told = || lab.run("nft list table inet sandwire-relay") + &lab.run("ip rule");
        let before = told();
        stage.redirect_udp();
        let said = stage.steer_in_cgroup().unwrap();
        assert!(said.contains("the relay that runs"), "{said}");
        assert_eq!(told(), before);
        // A relay that stands can't steer what is new: who asks hears of it.
        stage.make_cgroup_anew_while_the_relay_stands(|stage| {
            let refused = stage.steer_in_cgroup().unwrap_err();
            assert!(refused.contains("hasn't steered the cgroup"), "{refused}");
        });
        stage.clear();
        let said = stage.steer_in_cgroup().unwrap();
        assert!(said.contains("in the clear"), "{said}");
        assert!(!lab.run("nft list tables").contains("sandwire-relay"));
    });
}

/// Both would tell the kernel anew in turn, each for itself.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_second_relay_leaves_what_the_first_one_has_told() {
    lab::run_within(DEADLINE, |lab| {
        let mut stage = Stage::build("auto");
        stage.start_peer();
        stage.start_host();
        let told = || lab.run("nft list table inet sandwire-relay") + &lab.run("ip rule");
        let before = told();
        stage.exchange("host", "/host\"\n", "/second\"\n");
        stage.exchange("host", "[egress]\n", "[egress]\nlisten_port = 16001\n");
        stage.redirect_udp();
        let refused = stage.host_refuses();
        assert!(
            refused.contains("another relay steers") && !refused.contains("dropped"),
            "{refused}"
        );
        let said = stage.steer_in_cgroup().unwrap();
        assert!(said.contains("the relay that runs"), "{said}");
        assert_eq!(told(), before);
        everything_works(&stage);
        stage.clear();
        let said = stage.steer_in_cgroup().unwrap();
        assert!(said.contains("in the clear"), "{said}");
        stage.kill_host();
        let said = stage.steer_in_cgroup().unwrap();
        assert!(said.contains("dropped until a relay runs"), "{said}");
        assert_ne!(told(), before);
    });
}

/// As when a service is started anew at that very moment.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn steering_that_is_ended_while_the_relay_learns_of_a_new_cgroup_stays_ended() {
    lab::run_within(DEADLINE, |lab| {
        let mut stage = Stage::build("auto");
        stage.start_peer();
        for round in 0..30 {
            stage.start_host();
            // Both take some milliseconds to begin.
            std::thread::scope(|scope| {
                let stage = &stage;
                stage.make_cgroup_anew_while_the_relay_stands(|_| {
                    scope.spawn(|| stage.clear());
                    std::thread::sleep(Duration::from_millis(1) * (round % 10));
                });
            });
            // Longer than it leaves what it finds in part.
            std::thread::sleep(Duration::from_millis(if round % 10 == 0 {
                3000
            } else {
                30
            }));
            let left = lab.run("nft list tables") + &lab.run("ip rule") + &lab.run("ip -6 rule");
            assert!(
                !left.contains("sandwire-relay") && !left.contains("5357"),
                "round {round}: {left}"
            );
            let log = stage.host_log();
            assert!(!log.contains("can't be told anew"), "round {round}: {log}");
            stage.kill_host();
        }
    });
}

/// As systemd-networkd does at its start.
fn delete_rules() {
    for version in ["-4", "-6"] {
        for table in [53_570, 53_571] {
            let line = format!("ip {version} rule delete table {table}");
            while command::run(&line).is_ok() {}
        }
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn routing_rules_that_somebody_deletes_come_back_and_nothing_leaves_without_them() {
    lab::run_within(DEADLINE, |lab| {
        let mut stage = Stage::build("auto");
        stage.start_peer();
        stage.start_host();
        assert_eq!(stage.in_cgroup(FETCH), MARKER);
        let rules = || lab.run("ip rule") + &lab.run("ip -6 rule");
        let before = rules();
        let capture = stage.capture();
        delete_rules();
        wait_for("the rules are there again", || rules() == before);
        assert_eq!(stage.in_cgroup(FETCH), MARKER);
        everything_works(&stage);
        stage.kill_host();
        delete_rules();
        stage.cgroup_is_cut_off();
        stage.nothing_is_answered();
        stage.start_host();
        assert_eq!(rules(), before);
        assert_eq!(stage.in_cgroup(FETCH), MARKER);
        capture.has_nothing_in_the_clear(true);
        // All at once, as when firewall and network are set up anew.
        lab.run("nft flush ruleset");
        delete_rules();
        wait_for("the rules are there again", || rules() == before);
        wait_for("the table is there again", || {
            lab.run("nft list tables").contains("sandwire-relay")
        });
        let capture = stage.capture();
        assert_eq!(stage.in_cgroup(FETCH), MARKER);
        everything_works(&stage);
        capture.has_nothing_in_the_clear(true);
        let restored = "sandwire_relay_steering_restored_total 1\n";
        assert!(stage.metrics("host").contains(restored));
    });
}

/// What it sends to its peer would come back to it, for ever.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_relay_that_would_carry_its_own_connections_says_so() {
    lab::run_within(DEADLINE, |_| {
        let stage = Stage::build("auto");
        stage.redirect_everywhere();
        let refused = stage.host_refuses_in_cgroup();
        assert!(
            refused.contains("takes what the relay itself sends to the peer beyond"),
            "{refused}"
        );
    });
}

/// Both relays run, and datagrams pass.
fn with_udp_redirected() -> Stage {
    let mut stage = Stage::build("auto");
    stage.redirect_udp();
    stage.start_peer();
    stage.start_host();
    stage.inside_box(by_udp);
    stage
}

/// An ICMP error has the beginning of what it is about, which is an answer that came inside TLS.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn errors_about_late_answers_take_nothing_of_them_out() {
    lab::run_within(DEADLINE, |_| {
        let stage = with_udp_redirected();
        let capture = stage.capture();
        let leave = format!(
            "python3 -c 'import socket, time\n\
             for family, to in ((socket.AF_INET, \"198.51.100.7\"), (socket.AF_INET6, \"2001:db8:5::7\")):\n\
             \x20   s = socket.socket(family, socket.SOCK_DGRAM)\n\
             \x20   s.sendto(b\"{MARKER}\", (to, 7))\n\
             \x20   s.close()\n\
             time.sleep(2)'"
        );
        stage.inside_box(|| command::shell(&leave).unwrap());
        stage.in_cgroup(&leave);
        stage.name_is_resolved();
        for (sender, flows) in [("lab", 3), ("batch", 2)] {
            let of_it = format!("\"sender\":\"{sender}\"");
            let is_its = |line: &&str| {
                let was_answered = !line.contains("\"from_destination_bytes\":0");
                line.contains(&of_it) && line.contains(":7\"") && was_answered
            };
            wait_for("all is delivered and answered", || {
                let report = stage.report_of("peer");
                report.lines().filter(is_its).count() >= flows
            });
        }
        capture.has_nothing_in_the_clear(true);
    });
}

/// No application means it, but whoever wants to get something out past the relay might.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn port_0_is_no_way_past_a_redirect_of_all_ports() {
    lab::run_within(DEADLINE, |_| {
        let stage = with_udp_redirected();
        let capture = stage.capture();
        let send = format!(
            "python3 -c 'import socket, struct\n\
             payload = b\"{MARKER}\"\n\
             for family, to in ((socket.AF_INET, \"198.51.100.7\"), (socket.AF_INET6, \"2001:db8:5::7\")):\n\
             \x20   s = socket.socket(family, socket.SOCK_RAW, socket.IPPROTO_UDP)\n\
             \x20   if family == socket.AF_INET6: s.setsockopt(socket.IPPROTO_IPV6, 7, 6)\n\
             \x20   s.sendto(struct.pack(\"!HHHH\", 4000, 0, 8 + len(payload), 0) + payload, (to, 0))'"
        );
        stage.inside_box(|| command::shell(&send).unwrap());
        stage.inside_box(by_udp);
        capture.has_nothing_in_the_clear(true);
    });
}

/// As kube-proxy does with a service's address. The host's rules translate it behind the place where the relay takes what is redirected.
const SERVICES: &str = "
table inet services {
    chain output {
        type nat hook output priority -100;
        ip daddr 10.96.0.5 tcp dport 80 dnat ip to 198.51.100.7:8080
        ip daddr 10.96.0.5 udp dport 53 dnat ip to 198.51.100.7:7
        ip6 daddr fd96::5 tcp dport 80 dnat ip6 to [2001:db8:5::7]:8080
        ip6 daddr fd96::5 udp dport 53 dnat ip6 to [2001:db8:5::7]:7
    }
}
";

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_the_host_translates_to_a_redirected_destination_does_not_leave_in_the_clear() {
    lab::run_within(DEADLINE, |lab| {
        let mut stage = Stage::build("auto");
        stage.add_identity(["10.70.0.5", "fd70::5"]);
        stage.start_peer();
        stage.start_host();
        let services = stage.write("services.nft", SERVICES);
        lab.run(&format!("nft -f {}", services.display()));
        // Who isn't redirected gets there.
        for service in ["10.96.0.5", "[fd96::5]"] {
            let fetch = format!("curl -sS --max-time 20 http://{service}/page");
            assert_eq!(lab.run(&fetch), MARKER);
        }
        let in_cgroup = |line: &str| stage.in_cgroup(line);
        let in_identity = |line: &str| stage.in_identity(line).unwrap();
        let senders: [&dyn Fn(&str) -> String; 2] = [&in_cgroup, &in_identity];
        for run in senders {
            let capture = stage.capture();
            for service in ["10.96.0.5", "fd96::5"] {
                let call = format!(
                    "python3 -c 'import socket\n\
                     udp = socket.socket(socket.AF_INET6 if \":\" in \"{service}\" else socket.AF_INET, socket.SOCK_DGRAM)\n\
                     try: udp.sendto(b\"{MARKER}\", (\"{service}\", 53))\n\
                     except OSError: pass\n\
                     try:\n\
                     \x20   socket.create_connection((\"{service}\", 80), 2)\n\
                     \x20   print(\"connected\")\n\
                     except OSError: print(\"cut off\")'"
                );
                assert_eq!(run(&call).trim(), "cut off", "{service}");
            }
            assert_eq!(run(FETCH), MARKER);
            capture.has_nothing_in_the_clear(true);
        }
    });
}

/// What is let past the relay by its port may be led to one that is redirected.
const REDIRECTS: &str = "
table inet services {
    chain prerouting {
        type nat hook prerouting priority -100;
        ip daddr 198.51.100.7 udp dport 5353 dnat ip to 198.51.100.7:7
        ip6 daddr 2001:db8:5::7 udp dport 5353 dnat ip6 to [2001:db8:5::7]:7
    }
}
";

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_sandbox_s_port_that_is_translated_to_a_redirected_one_does_not_leave_in_the_clear() {
    lab::run_within(DEADLINE, |lab| {
        let mut stage = Stage::build("auto");
        let via = "via = \"beyond\"\n";
        stage.exchange("host", via, &format!("ports = [7]\n{via}"));
        stage.start_peer();
        stage.start_host();
        stage.inside_box(by_udp);
        let services = stage.write("services.nft", REDIRECTS);
        lab.run(&format!("nft -f {}", services.display()));
        let capture = stage.capture();
        let send = format!(
            "python3 -c 'import socket\n\
             for family, to in ((socket.AF_INET, \"198.51.100.7\"), (socket.AF_INET6, \"2001:db8:5::7\")):\n\
             \x20   socket.socket(family, socket.SOCK_DGRAM).sendto(b\"{MARKER}\", (to, 5353))'"
        );
        stage.inside_box(|| command::shell(&send).unwrap());
        stage.inside_box(by_udp);
        capture.has_nothing_in_the_clear(true);
    });
}

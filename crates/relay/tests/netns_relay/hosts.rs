//! Hosts that aren't like others: without IPv6, and with services and users of their own.

use std::{
    net::{SocketAddr, UdpSocket},
    thread,
    time::Duration,
};

use sandwire_testlab::{command, host::ECHO_PORT, lab};

use super::{DEADLINE, FETCH, ask, everything_works};
use crate::stage::{DESTINATIONS, MARKER, Stage, wait_for};

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_host_without_ipv6_redirects_ipv4_and_lets_nothing_out() {
    lab::run_within(DEADLINE, |lab| {
        let mut stage = Stage::build("auto");
        stage.start_peer();
        command::shell("echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6").unwrap();
        let capture = stage.capture();
        let refused = stage.host_refuses();
        stage.nothing_is_answered();
        stage.cgroup_is_cut_off();
        capture.has_nothing_in_the_clear(false);
        assert!(
            refused.contains("steer IPv6 traffic to the relay")
                && refused.contains("is dropped until the relay runs"),
            "{refused}"
        );
        stage.exchange("host", ", \"2001:db8:5::/64\"", "");
        stage.start_host();
        let capture = stage.capture();
        assert_eq!(stage.in_box(FETCH).as_deref(), Ok(MARKER));
        assert_eq!(stage.in_cgroup(FETCH), MARKER);
        // Longer than it leaves what it finds in part.
        thread::sleep(Duration::from_secs(3));
        let metrics = stage.metrics("host");
        let restored = "sandwire_relay_steering_restored_total 0\n";
        assert!(metrics.contains(restored), "{metrics}");
        capture.has_nothing_in_the_clear(true);
        stage.clear();
        let left = lab.run("nft list tables") + &lab.run("ip rule") + &lab.run("ip -6 rule");
        assert!(
            !left.contains("sandwire-relay") && !left.contains("5357"),
            "{left}"
        );
    });
}

/// As when the host's own name server is started while sandboxes ask others by the relay.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_service_of_the_host_gets_a_port_once_no_answers_come_from_there() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("auto");
        stage.start_peer();
        stage.start_host();
        let server = SocketAddr::new(DESTINATIONS[0].parse().unwrap(), ECHO_PORT);
        let socket = stage.inside_box(|| UdpSocket::bind("0.0.0.0:0").unwrap());
        ask(&socket, server, MARKER.as_bytes());
        let mut service = None;
        wait_for("the port can be had", || {
            service = UdpSocket::bind(("0.0.0.0", ECHO_PORT)).ok();
            service.is_some()
        });
        for _ in 0..20 {
            socket.send_to(b"?", server).unwrap();
            thread::sleep(Duration::from_millis(50));
        }
        let reason = format!("a service of this host has UDP port {ECHO_PORT} on all addresses");
        let said = || stage.host_log().matches(&reason).count();
        wait_for("it is said", || said() > 0);
        assert!(said() < 3, "{}", stage.host_log());
        drop(service);
        ask(&socket, server, MARKER.as_bytes());
    });
}

/// Whoever had it besides could take others' datagrams.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn nobody_else_gets_a_port_of_the_relay() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("auto");
        stage.start_peer();
        stage.start_host();
        let bind = "python3 -c 'import errno, socket, sys\n\
             for address in (\"127.0.0.1\", \"0.0.0.0\", \"::1\"):\n\
             \x20   family = socket.AF_INET6 if \":\" in address else socket.AF_INET\n\
             \x20   for port in (15001, 15002, 15003):\n\
             \x20       for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):\n\
             \x20           s = socket.socket(family, socket.SOCK_DGRAM)\n\
             \x20           s.setsockopt(socket.SOL_SOCKET, option, 1)\n\
             \x20           try: s.bind((address, port))\n\
             \x20           except OSError as error:\n\
             \x20               if error.errno == errno.EADDRINUSE: continue\n\
             \x20           sys.exit(f\"{address} {port} {option}\")'";
        command::shell(bind).unwrap();
        stage.kill_host();
        stage.start_host();
        everything_works(&stage);
    });
}

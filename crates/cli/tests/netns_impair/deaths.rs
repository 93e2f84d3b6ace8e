//! SIGKILL, SIGTERM, and interfaces that go.

use std::thread;

use sandwire_impair_host::control::{Client, Owner, Side, State, Target};
use sandwire_testlab::{
    iperf3::Server,
    lab::{self, Lab},
};

use crate::lab::{
    Service, command, command_in, interfaces, interfaces_with_default_routes, iperf3_from_far,
    round_trip, wait_until,
};

/// Whether the far host reaches us.
fn is_reached(lab: &Lab) -> bool {
    lab.shell("ip netns exec far ping -n -q -c 3 -i 0.05 -W 0.3 10.9.0.1 || true")
        .contains(" 0% packet loss")
}

/// Bytes that iperf3 moves while the service is killed amid them.
fn killed_under_iperf3(lab: &Lab, service: &mut Service) -> Vec<u64> {
    let report = thread::scope(|scope| {
        let running = scope.spawn(|| {
            lab.shell(
                "ip netns exec far timeout -s INT 7 iperf3 -J -c 10.9.0.1 -t 4 -i 0.5 || true",
            )
        });
        let before = received(lab);
        wait_until("iperf3 is at it", || received(lab) > before + 1_000_000);
        service.kill();
        running.join().unwrap()
    });
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    let intervals = report["intervals"].as_array().unwrap().iter();
    intervals
        .map(|interval| interval["sum"]["bytes"].as_u64().unwrap())
        .collect()
}

fn received(lab: &Lab) -> u64 {
    let bytes = lab.run("cat /sys/class/net/near0/statistics/rx_bytes");
    bytes.trim().parse().unwrap()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_killed_service_leaves_its_targets_closed_and_takes_them_up_again() {
    lab::run(|lab| {
        interfaces(lab);
        let mut service = Service::start(lab);
        service.run("--netns far --both 'delay 10ms'");
        wait_until("it is reached", || is_reached(lab));
        let _server = Server::start(None).unwrap();
        let bytes = killed_under_iperf3(lab, &mut service);
        assert!(bytes[0] > 100_000, "{bytes:?}");
        let after: u64 = bytes.iter().skip(5).sum();
        assert_eq!(after, 0, "{bytes:?}");
        assert!(!is_reached(lab));

        service.restart();
        wait_until("the target is taken up again", || is_reached(lab));
        let (least, _) = round_trip(lab);
        assert!(least >= 20.0, "{least}");
        let shown = service.shown();
        assert!(
            shown["egress"]["dead_dropped"].as_u64() > Some(3),
            "{shown:#}"
        );
        service.run("clear --all");
        let (least, _) = round_trip(lab);
        assert!(least < 5.0, "{least}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_killed_service_leaves_its_targets_open_if_that_was_said() {
    lab::run(|lab| {
        interfaces(lab);
        let mut service = Service::start(lab);
        service.run("--netns far --both 'delay 10ms' --on-death open");
        let _server = Server::start(None).unwrap();
        let bytes = killed_under_iperf3(lab, &mut service);
        let after: u64 = bytes.iter().skip(5).sum();
        assert!(after > 1_000_000, "{bytes:?}");
        let (least, _) = round_trip(lab);
        assert!(least < 5.0, "{least}");
        service.restart();
        let shown = service.shown();
        assert!(
            shown["egress"]["dead_passed"].as_u64() > Some(3),
            "{shown:#}"
        );
        let report = iperf3_from_far("10.9.0.1 -t 1");
        assert!(report["end"]["sum_received"]["bytes"].as_u64() > Some(1_000_000));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_a_service_started_by_ip_netns_exec_has_left_is_found() {
    lab::run(|lab| {
        interfaces(lab);
        lab.run("ip netns add beside");
        let mut service = Service::at(lab);
        let line = "--netns far --both 'delay 10ms'";
        let mut verb = command_in("beside", &service.folder, line);
        let started = verb.output().unwrap();
        let said = String::from_utf8(started.stderr).unwrap();
        assert!(started.status.success(), "{said}");
        let (_, pid) = said.split_once("(process ").unwrap();
        let pid = pid.split(',').next().unwrap();
        wait_until("it is reached", || is_reached(lab));

        lab.run(&format!("kill -KILL {pid}"));
        let socket = service.folder.join("control.sock");
        wait_until("it is gone", || Client::connect(&socket).is_err());
        assert!(!is_reached(lab), "closed was said");
        service.restart();
        wait_until("the target is taken up again", || is_reached(lab));
        let (least, _) = round_trip(lab);
        assert!(least >= 20.0, "{least}");
        service.run("clear --all");
        let (least, _) = round_trip(lab);
        assert!(least < 5.0, "{least}");
    });
}

/// Whoever needed it first may be in a sandbox, which a service in there would keep for ever.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_service_started_from_within_a_namespace_is_in_the_machines() {
    lab::run(|lab| {
        interfaces_with_default_routes(lab);
        let service = Service::at(lab);
        // The default route of `far` isn't the machine's.
        let line = "--interface far0 --side sandbox --both 'delay 10ms'";
        let started = command_in("far", &service.folder, line).output().unwrap();
        let said = String::from_utf8(started.stderr).unwrap();
        assert!(started.status.success(), "{said}");
        assert!(said.contains("started the impairment service"), "{said}");
        let (least, _) = round_trip(lab);
        assert!(least >= 20.0, "{least}");

        service.run("--interface near0 --both 'delay 1ms' --force");
        let shown = service.run("show --json");
        assert!(!shown.contains("/proc/"), "near0 is in its own: {shown}");
        service.run("clear --all");
        lab.run("ip netns del far");
        wait_until("the namespace goes", || {
            !lab.run("ip -o link").contains("near0")
        });
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_service_that_is_told_to_end_leaves_nothing() {
    lab::run(|lab| {
        interfaces(lab);
        let before = lab.snapshot();
        let mut service = Service::start(lab);
        service.run("--netns far --both 'delay 10ms'");
        service.run("--interface near0 --both 'delay 10ms'");
        let (least, _) = round_trip(lab);
        assert!(least >= 40.0, "{least}");
        service.terminate();
        let (least, _) = round_trip(lab);
        assert!(least < 5.0, "{least}");
        assert_eq!(lab.run("ip -n far -o link").matches("swd").count(), 0);
        lab.assert_unchanged(&before);
        service.restart();
        assert_eq!(service.run("show"), "nothing is impaired\n");
    });
}

/// It ends when the packets have gone that are under way, and who is connected may go on asking until then.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_service_that_ends_impairs_nothing_more() {
    lab::run(|lab| {
        interfaces(lab);
        let mut service = Service::start(lab);
        service.run("--netns far --both 'delay 30s'");
        let mut client = Client::connect(&service.folder.join("control.sock")).unwrap();
        client.hello().unwrap();
        lab.shell("ip netns exec far ping -n -q -c 1 -W 0.1 10.9.0.1 || true");
        let refusal = thread::scope(|scope| {
            let ending = scope.spawn(|| service.terminate());
            let far = client.list().unwrap().pop().unwrap().target;
            wait_until("it ends", || {
                let status = client.list().unwrap().pop().unwrap();
                status.state == State::Draining
            });
            let near = Target {
                netns: None,
                interface: "near0".to_owned(),
                side: Side::Host,
            };
            let impairment = "delay 10ms".parse().unwrap();
            let set = client.set(&near, &Owner::User { uid: 0 }, &impairment);
            // With the last one the process ends, perhaps before it has answered.
            let _ = client.clear(&far, true);
            ending.join().unwrap();
            set
        });
        assert!(is_reached(lab), "{refusal:?}");
        let refusal = refusal.unwrap_err().to_string();
        assert!(refusal.contains("is ending"), "{refusal}");
    });
}

/// Also one that somebody has it end already, and waits for.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_service_that_ends_while_somebody_clears_leaves_the_interface_in_touch() {
    lab::run(|lab| {
        interfaces(lab);
        let mut service = Service::start(lab);
        service.run("--netns far --both 'delay 15s'");
        lab.shell("ip netns exec far ping -n -q -c 1 -W 0.1 10.9.0.1 || true");
        let mut clearing = command(&service.folder, "clear --netns far")
            .spawn()
            .unwrap();
        wait_until("it is cleared", || {
            service.shown()["state"]["state"] == "draining"
        });
        service.terminate();
        wait_until("it is reached", || is_reached(lab));
        // The process may have ended before it has answered.
        clearing.wait().unwrap();
        service.restart();
        assert_eq!(service.run("show"), "nothing is impaired\n");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_interface_that_goes_ends_its_diversion_and_that_is_said() {
    lab::run(|lab| {
        interfaces(lab);
        let service = Service::start(lab);
        service.run("--netns far --both 'delay 10ms'");
        lab.run("ip link del near0");
        wait_until("the diversion ends", || {
            service.shown()["state"]["state"] == "ended"
        });
        assert!(service.run("show").contains("ended: the interface is gone"));
        assert_eq!(lab.run("ip -n far -o link").matches("swd").count(), 0);
        service.run("clear --all");
        assert_eq!(service.run("show"), "nothing is impaired\n");
    });
}

/// Its programs go along, and would send packets to whatever has the TAPs' numbers there.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_interface_that_moves_to_another_namespace_is_impaired_no_more() {
    lab::run(|lab| {
        interfaces(lab);
        let service = Service::start(lab);
        service.run("--interface near0 --both 'delay 10ms'");
        lab.run("ip netns add other");
        lab.run("ip link set near0 netns other");
        lab.run("ip -n other addr add 10.9.0.1/24 dev near0");
        lab.run("ip -n other link set near0 up");
        wait_until("the diversion ends", || {
            service.shown()["state"]["state"] == "ended"
        });
        assert!(service.run("show").contains("ended: the interface is gone"));
        let programs = lab.run("ip netns exec other bpftool net show dev near0");
        assert!(!programs.contains("divert"), "{programs}");
        lab.run("ip netns exec other ping -n -q -c 1 -W 5 10.9.0.2");
        service.run("clear --all");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_tap_that_somebody_deletes_ends_its_diversion_and_that_is_said() {
    lab::run(|lab| {
        interfaces(lab);
        let service = Service::start(lab);
        service.run("--interface near0 --both 'delay 10ms'");
        let links = lab.run("ip -o link show");
        let tap = links
            .split_whitespace()
            .find(|word| word.starts_with("swd"));
        lab.run(&format!(
            "ip link delete {}",
            tap.unwrap().trim_end_matches(':')
        ));
        wait_until("the diversion ends", || {
            service.shown()["state"]["state"] == "ended"
        });
        assert!(
            service
                .run("show")
                .contains("ended: somebody has deleted a TAP of ours")
        );
        wait_until("it is reached", || is_reached(lab));
        service.run("clear --all");
    });
}

/// What a dead service has left of a target that is gone is removed by the next.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_target_that_went_while_the_service_was_dead_is_forgotten() {
    lab::run(|lab| {
        interfaces(lab);
        let mut service = Service::start(lab);
        service.run("--netns far --both 'delay 10ms'");
        service.kill();
        lab.run("ip link del near0");
        service.restart();
        assert_eq!(service.run("show"), "nothing is impaired\n");
        assert!(!std::path::Path::new("/sys/fs/bpf/sandwire-impair").exists());
    });
}

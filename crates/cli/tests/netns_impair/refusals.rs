//! What is refused, and that nothing is changed then.

use std::process::Command;

use sandwire_testlab::lab;

use crate::lab::{Service, command, interfaces, interfaces_with_default_routes, round_trip, verb};

/// Runs the verb, which has to be refused; why.
#[track_caller]
fn refused(service: &Service, line: &str) -> String {
    let output = service.output(line);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{line}: {said}");
    said
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_cannot_be_meant_is_refused_with_the_reason() {
    lab::run(|lab| {
        interfaces(lab);
        lab.run("ip route add default via 10.9.0.2 dev near0");
        let service = Service::start(lab);
        let before = lab.snapshot();
        for (line, words) in [
            ("--interface lo --both 'delay 5ms'", "loopback"),
            ("--interface nope --both 'delay 5ms'", "no such interface"),
            (
                "--netns /nowhere --interface far0 --both 'delay 5ms'",
                "/nowhere",
            ),
            (
                "--netns /etc/passwd --interface far0 --both 'delay 5ms'",
                "no file of a namespace",
            ),
            ("--pid 999999 --both 'delay 5ms'", "no process 999999"),
            ("--netns nope --both 'delay 5ms'", "`ip netns` lists them"),
            ("record 10.9.0.2 --pid 999999", "no process 999999"),
            ("serve --frame-bytes-max 10", "64..=65000"),
            ("serve --packets-max 100000000", "1..=16777216"),
            ("--both 'delay 5ms'", "--interface"),
            ("--netns far", "--preset"),
            ("--netns far --both 'delay -5ms'", "-5ms"),
            ("--netns far --both 'loss 101%'", "101%"),
            ("--netns far --both 'speed 5'", "'speed'"),
            ("--netns far --preset nowhere", "nowhere"),
            (
                "--netns far --egress 'ingress delay 5ms'",
                "other direction",
            ),
            ("--interface near0 --both 'delay 5ms'", "default route"),
        ] {
            let said = refused(&service, line);
            assert!(said.contains(words), "{line}: {said}");
        }
        lab.assert_unchanged(&before);
        assert_eq!(service.run("show"), "nothing is impaired\n");

        service.run("--interface near0 --both 'delay 5ms' --force");
        let (least, _) = round_trip(lab);
        assert!(least >= 10.0, "{least}");
    });
}

/// Where the service is has nothing to do with it.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_service_in_a_namespace_knows_the_default_route_of_the_machine() {
    lab::run(|lab| {
        interfaces_with_default_routes(lab);
        let mut service = Service::at(lab);
        service.start_in("far");
        let said = refused(&service, "--interface near0 --both 'delay 5ms'");
        assert!(said.contains("default route"), "{said}");
        service.run("--netns far --both 'delay 5ms'");
        // The machine's own namespace isn't that of the service, and has no name.
        service.run("--interface near0 --both 'delay 1ms' --force");
        assert!(service.run("show --json").contains("/proc/1/ns/net"));
        service.run("clear --all");
    });
}

/// Flows of the machine's own take either way.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn each_interface_of_a_default_route_by_several_is_refused() {
    lab::run(|lab| {
        interfaces(lab);
        lab.shell(
            "ip link add other0 type veth peer name other1; ip link set other1 up
             ip link set other0 up; ip addr add 10.8.0.1/24 dev other0
             ip route add default nexthop via 10.8.0.2 dev other0 nexthop via 10.9.0.2 dev near0",
        );
        let service = Service::start(lab);
        for name in ["near0", "other0"] {
            let said = refused(&service, &format!("--interface {name} --both 'delay 5ms'"));
            assert!(said.contains("default route"), "{said}");
        }
    });
}

/// A bridge has the default route, and the interface is its port.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_port_of_the_bridge_with_the_default_route_is_refused_too() {
    lab::run(|lab| {
        interfaces(lab);
        lab.shell(
            "ip addr flush dev near0; ip link add br0 type bridge; ip link set near0 master br0
             ip addr add 10.9.0.1/24 dev br0; ip link set br0 up
             ip route add default via 10.9.0.2 dev br0",
        );
        let service = Service::start(lab);
        let said = refused(&service, "--interface near0 --both 'delay 5ms'");
        assert!(said.contains("by br0"), "{said}");
    });
}

/// Whoever names only an interface means the one where they are, and not where the service is.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_interface_without_a_namespace_is_the_callers_own() {
    lab::run(|lab| {
        interfaces(lab);
        // The same name on both sides.
        lab.run("ip link set dev near0 name far0");
        let service = Service::start(lab);
        let verb_by = |how: &str, line: &str| {
            let verb = command(&service.folder, line);
            let mut words = how.split_whitespace();
            let mut command = Command::new(words.next().unwrap());
            command.args(words).arg(verb.get_program());
            command.args(verb.get_args());
            command.env("SANDWIRE_IMPAIR_FOLDER", &service.folder);
            let output = command.output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            let printed = String::from_utf8(output.stdout).unwrap();
            (output.status.code(), printed, said)
        };
        let far = "ip netns exec far";
        let (status, _, said) = verb_by(far, "--interface far0 --egress 'delay 10ms'");
        assert_eq!(status, Some(0), "{said}");
        let shown = service.shown();
        assert_eq!(shown["target"]["netns"], "/run/netns/far", "{shown:#}");
        // As for every interface that is named alone, it is the end that leads to the sandbox.
        assert_eq!(shown["target"]["side"], "host", "{shown:#}");
        let (_, shown, said) = verb_by(far, "show --interface far0");
        assert!(shown.contains("impaired"), "{shown} {said}");
        assert_eq!(
            service.run("show --interface far0"),
            "nothing is impaired\n"
        );
        verb_by(far, "clear --interface far0");
        assert_eq!(service.run("show"), "nothing is impaired\n");

        service.run("--interface far0 --egress 'delay 10ms'");
        let shown = service.shown();
        assert_eq!(shown["target"].get("netns"), None, "{shown:#}");
        service.run("clear --interface far0");

        // One that has no name can't be told to the service.
        let (status, _, said) = verb_by("unshare --net", "--interface far0 --both 'delay 10ms'");
        assert_eq!(status, Some(1), "{said}");
        assert!(said.contains("--pid PID"), "{said}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_another_service_diverts_is_left_alone() {
    lab::run(|lab| {
        interfaces(lab);
        let first = Service::start(lab);
        first.run("--netns far --both 'delay 10ms'");
        let other = lab.folder().join("other");
        let output = verb(&other, "--netns far --both 'delay 50ms'");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("another process"), "{said}");
        // It was started by the verb, which says so.
        assert!(said.contains("started the impairment service"), "{said}");
        let (least, _) = round_trip(lab);
        assert!((20.0..40.0).contains(&least), "{least}");
    });
}

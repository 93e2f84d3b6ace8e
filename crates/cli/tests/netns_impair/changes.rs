//! Interfaces that become others while they are impaired.

use sandwire_testlab::lab;

use crate::lab::{Service, interfaces, round_trip, wait_until};

/// By its number it is the same: it stays impaired, also over the service's death, and is shown as it is called.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_renamed_interface_stays_impaired_under_its_new_name() {
    lab::run(|lab| {
        interfaces(lab);
        let mut service = Service::start(lab);
        service.run("--netns far --both 'delay 10ms'");
        lab.run("ip -n far link set far0 name other");
        assert!(round_trip(lab).0 >= 20.0);
        assert_eq!(service.shown()["target"]["interface"], "other");
        service.kill();
        service.restart();
        assert!(round_trip(lab).0 >= 20.0);
        assert_eq!(service.shown()["target"]["interface"], "other");
        let said = service.run("clear --netns far --interface other");
        assert!(said.contains("impaired no more"), "{said}");
        assert!(round_trip(lab).0 < 20.0);
    });
}

/// The engine's frames have a length. What is longer is dropped with a cause of its own, and nothing else is.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn frames_longer_than_the_engines_are_counted_apart() {
    lab::run(|lab| {
        interfaces(lab);
        let service = Service::start(lab);
        service.run("--netns far --both 'delay 5ms'");
        lab.shell("ip link set near0 mtu 9000; ip -n far link set far0 mtu 9000");
        let ping = |bytes: u32| {
            lab.shell(&format!(
                "ping -n -q -c 3 -i 0.05 -W 1 -s {bytes} 10.9.0.2 || true"
            ))
        };
        let passes = || wait_until("three pass", || ping(1900).contains("3 received"));
        passes();
        let long = ping(8000);
        assert!(long.contains("0 received"), "{long}");
        let ingress = &service.shown()["ingress"];
        assert_eq!(ingress["too_long"], 3, "{ingress:#}");
        assert_eq!(ingress["unread"], 0, "{ingress:#}");
        let table = service.run("show");
        assert!(
            table.contains("3 too long, see --frame-bytes-max"),
            "{table}"
        );
        assert!(table.contains("far: delay 5ms"), "{table}");
        passes();
    });
}

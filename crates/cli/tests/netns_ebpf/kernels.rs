//! What must hold on every kernel that we support.

use std::net::{IpAddr, SocketAddr};

use sandwire_testlab::{
    fake_guest::FakeGuest,
    guest::kernel::Series,
    host::{BEYOND_IPV4, BEYOND_IPV6, HOST_IPV4, WHO_AM_I_PORT},
    lab::{self, Lab},
};

use crate::{
    assert_in_touch,
    ebpf::{POOLS, SECOND, StackWatch, World},
};

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn slots_of_both_kinds_work_from_the_first_packet_on() {
    lab::run(|lab| {
        assert_works_from_the_first_packet_on(lab);
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn slots_of_both_kinds_work_on_linux_6_1() {
    lab::run_on(Series::Linux6_1, 150 * SECOND, |lab| {
        assert_works_from_the_first_packet_on(lab);
        assert_all_programs_load(lab);
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn slots_of_both_kinds_work_on_linux_6_12() {
    lab::run_on(Series::Linux6_12, 150 * SECOND, |lab| {
        assert_works_from_the_first_packet_on(lab);
        assert_all_programs_load(lab);
    });
}

/// What must hold on every kernel that we support.
fn assert_works_from_the_first_packet_on(lab: &Lab) {
    let world = World::start(lab, "route", 2);
    let watch = StackWatch::start();
    for pool in POOLS {
        let (lease, guest) = world.guest(pool, &format!("{pool}-a"));
        let (other, _neighbour) = world.guest(pool, &format!("{pool}-b"));
        assert_in_touch(&lease, &guest);
        assert!(seen_as(&guest, BEYOND_IPV4).starts_with(&format!("{}:", lease.ipv4)));
        assert!(seen_as(&guest, BEYOND_IPV6).starts_with(&format!("[{}]:", lease.ipv6)));
        for address in [lease.ipv4, lease.ipv6] {
            world
                .beyond
                .run(&format!("ping -n -q -c 1 -W 5 {address}"))
                .unwrap();
        }
        guest.ping(other.ipv4, SECOND).unwrap_err();
        guest.ping(HOST_IPV4.into(), SECOND).unwrap_err();
        let detail = world.detail(&lease);
        assert_eq!(detail["data_path"], "ebpf", "{detail}");
        let drops = detail["traffic"]["drops"].to_string();
        assert!(drops.contains("other_sandbox"), "{drops}");
        assert!(drops.contains("host_service"), "{drops}");
    }
    assert_eq!(watch.packets(), 0, "packets went through the host's stack");
}

/// By what address a guest is seen beyond, with its port.
fn seen_as(guest: &FakeGuest, server: impl Into<IpAddr>) -> String {
    let target = SocketAddr::new(server.into(), WHO_AM_I_PORT);
    let answer = guest.exchange_udp(target, b"?", 5 * SECOND).unwrap();
    String::from_utf8(answer).unwrap()
}

/// The daemon loads every program at its start, those that are not attached too.
fn assert_all_programs_load(lab: &Lab) {
    let loaded = lab.run("bpftool prog show");
    for name in [
        "from_guest",
        "from_uplink",
        "from_host",
        "tap_to_host_end",
        "uplink_to_tap",
        "cross_over",
        "from_guest_xdp",
        "to_guest_xdp",
    ] {
        // The kernel keeps fifteen bytes of a name.
        let kept: String = name.chars().take(15).collect();
        assert!(
            loaded.contains(&format!("name {kept} ")),
            "no {name} in:\n{loaded}"
        );
    }
}

//! What must hold on every kernel that we support.

use std::net::{IpAddr, SocketAddr};

use sandwire_testlab::{
    fake_guest::FakeGuest,
    guest::kernel::Series,
    host::{BEYOND_IPV4, BEYOND_IPV6, HOST_IPV4, WHO_AM_I_PORT},
    lab::{self, Lab},
    pinger::Pinger,
    sandwire::Lease,
};
use serde_json::json;

use crate::{
    assert_in_touch,
    ebpf::{
        POOLS, SECOND, StackWatch, World, assert_a_port_is_published, assert_none_lost, wait_until,
    },
    moves::begin_move,
    uplinks::{assert_fq_delays_tcp, assert_fq_sends_later},
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
    lab::run_on(Series::Linux6_1, 900 * SECOND, |lab| {
        let mut world = assert_works_from_the_first_packet_on(lab);
        assert_all_programs_load(lab);
        assert_a_life_goes_well(lab, &mut world);
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn slots_of_both_kinds_work_on_linux_6_12_with_strict_settings() {
    lab::run_booted(Series::Linux6_12, STRICT, 900 * SECOND, |lab| {
        assert_eq!(
            lab.run("sysctl -n net.ipv4.conf.all.arp_ignore").trim(),
            "2"
        );
        let mut world = assert_works_from_the_first_packet_on(lab);
        assert_all_programs_load(lab);
        assert_a_life_goes_well(lab, &mut world);
    });
}

/// What guides to harden a host say, and, of ARP, what kube-proxy (`strictARP`) and load balancers want.
const STRICT: &str = "lockdown=integrity sysctl.net.core.bpf_jit_harden=2 sysctl.kernel.unprivileged_bpf_disabled=2 \
    sysctl.kernel.kptr_restrict=2 sysctl.net.ipv4.conf.all.rp_filter=1 sysctl.net.ipv4.conf.default.rp_filter=1 \
    sysctl.net.ipv4.conf.all.arp_ignore=2 sysctl.net.ipv4.conf.all.arp_announce=2";

/// What must hold on every kernel that we support.
fn assert_works_from_the_first_packet_on(lab: &Lab) -> World {
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
    world
}

/// What comes between the first packet and the last trace of sandwire on a host.
fn assert_a_life_goes_well(lab: &Lab, world: &mut World) {
    assert_the_doctor_is_right(world);
    let spec = json!({"name": "web", "size": 1, "data_path": "nft", "policy": {"uplink": "route"},
        "addresses": {"plan": "prefix", "ipv4": "10.66.0.0/24", "ipv6": "fd00:c10e:2::/64"}});
    world.daemon.create_pool(&spec).unwrap();
    world.route_back(2);
    let (lease, guest) = world.guest("web", "moved");
    assert_in_touch(&lease, &guest);
    for data_path in ["ebpf", "nft", "ebpf"] {
        let pinger = ping_slowly_to(world, &lease);
        begin_move(world, "web", data_path);
        wait_until("the lease has moved", 60 * SECOND, || {
            world.detail(&lease)["data_path"] == data_path
        });
        // A move waits 10 ms for answers under way, which an emulated guest that has to wait for its processor may exceed once.
        let pinged = pinger.stop().unwrap();
        assert!(
            pinged.sent > 0 && pinged.lost.len() <= 1,
            "to {data_path}: {pinged:?}"
        );
        assert_in_touch(&lease, &guest);
    }
    assert_a_port_is_published(world, "moved");
    assert_a_group_is_among_itself(world);
    lab.run("tc qdisc replace dev up0 root fq");
    let pinger = ping_slowly_to(world, &lease);
    world.daemon.kill().unwrap();
    world.daemon.restart().unwrap();
    assert_none_lost(pinger, "while the daemon came back");
    assert_in_touch(&lease, &guest);
    assert_eq!(world.detail(&lease)["defects"], json!([]));
    assert_fq_sends_later(world);
    assert_fq_delays_tcp(lab, world);
    guest.detach().unwrap();
    assert_nothing_is_left(lab, world);
}

/// Debian's kernels have all of these.
fn assert_the_doctor_is_right(world: &World) {
    let report = world.daemon.json("doctor").unwrap();
    let findings = report["findings"].as_array().unwrap();
    for name in [
        "programs load",
        "routing tables (`route_table`)",
        "uplink up0",
        "cls_bpf",
        "identities",
        "macvlan",
        "ipvlan",
        "fq",
    ] {
        let mut named = findings.iter().filter(|finding| finding["name"] == name);
        let finding = named.next().unwrap();
        assert_eq!(finding["found"], true, "{finding}");
    }
}

fn ping_slowly_to(world: &World, lease: &Lease) -> Pinger {
    Pinger::start(&world.beyond.path(), lease.ipv4, SECOND / 50).unwrap()
}

/// A policy changes under two sandboxes that could not reach each other.
fn assert_a_group_is_among_itself(world: &World) {
    let (one, first) = world.guest("netns", "first");
    let (two, second) = world.guest("host", "second");
    assert_in_touch(&one, &first);
    assert_in_touch(&two, &second);
    first.ping(two.ipv4, SECOND).unwrap_err();
    let together = json!({"uplink": "route", "group": "together", "clone_to_clone": true});
    for lease in [&one, &two] {
        world.daemon.set_policy(&lease.name, &together).unwrap();
    }
    for address in [two.ipv4, two.ipv6] {
        first.ping(address, 5 * SECOND).unwrap();
    }
}

/// `cleanup` takes away what a daemon that was killed left, and nothing of it is seen then.
fn assert_nothing_is_left(lab: &Lab, world: &mut World) {
    world.daemon.kill().unwrap();
    world.daemon.json("cleanup --instance lab").unwrap();
    let again = world.daemon.json("cleanup --instance lab").unwrap();
    assert_eq!(again["found"], json!([]));
    assert!(!lab.run("nft list tables").contains("sandwire"));
    for interface in ["up0", "lo"] {
        for hook in ["ingress", "egress"] {
            let filters = lab.shell(&format!("tc filter show dev {interface} {hook} || true"));
            assert_eq!(filters, "", "{interface}");
        }
    }
    assert_eq!(lab.run("ls /sys/fs/bpf"), "");
    let names = lab.run("ip -o link");
    assert!(!names.contains("sandwire"), "{names}");
    wait_until("the programs are gone", 20 * SECOND, || {
        !lab.run("bpftool prog show").contains("from_")
    });
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
        "from_child",
        "to_child",
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

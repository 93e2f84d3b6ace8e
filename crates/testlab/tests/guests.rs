//! The guests themselves, on slots made with `ip` and `nft`: the product has no part in these tests.
//!
//! If they fail, so will the product's tests with guests, for a reason that isn't the product's.

#![allow(
    clippy::unwrap_used,
    reason = "a test ends at the first thing that fails"
)]

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    thread,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use sandwire_testlab::{
    command,
    fake_guest::{FakeGuest, GuestNetwork},
    guest::{
        kernel::{Kernel, Series},
        qemu::Recipe,
        user_mode_linux::UserModeLinux,
        web::GuestWeb,
    },
    host::{BEYOND_IPV4, BEYOND_IPV6, Beyond, HTTP_PORT},
    lab::{self, Lab},
    namespace::{self, Namespace},
};

const SECOND: Duration = Duration::from_secs(1);

/// A namespace with a TAP, stateful 1:1 NAT, and a veth to the lab.
struct Slot {
    namespace: Namespace,
    ipv4: IpAddr,
    ipv6: IpAddr,
}

impl Slot {
    fn build(lab: &Lab, number: u16) -> Self {
        let name = format!("slot{number}");
        let namespace = lab.namespace(&name);
        let ipv4 = Ipv4Addr::from([10, 64, 0, u8::try_from(number).unwrap() + 2]);
        let ipv6 = Ipv6Addr::new(0xfd00, 0xc10e, 0, 0, 0, 0, 0, number + 2);
        lab.shell(&format!(
            "ip link add out{number} address 02:00:00:00:01:01 type veth peer name uplink0 netns {name} \
                 address 02:00:00:00:01:02
             ip link set out{number} up
             ip neighbour add {ipv4} lladdr 02:00:00:00:01:02 dev out{number}
             ip -6 neighbour add {ipv6} lladdr 02:00:00:00:01:02 dev out{number}"
        ));
        let inside = format!(
            "ip address add {ipv4}/32 dev uplink0
             ip address add {ipv6}/128 dev uplink0 nodad
             ip link set uplink0 up
             ip tuntap add vmtap0 mode tap vnet_hdr
             ip link set vmtap0 address 02:73:77:00:00:01
             ip address add 192.168.241.1/29 dev vmtap0
             ip address add fd00:5eed::1/64 dev vmtap0 nodad
             ip link set vmtap0 up
             ip neighbour add 169.254.0.1 lladdr 02:00:00:00:01:01 dev uplink0
             ip -6 neighbour add fe80::ffff lladdr 02:00:00:00:01:01 dev uplink0
             ip route add default via 169.254.0.1 dev uplink0 onlink
             ip -6 route add default via fe80::ffff dev uplink0
             sysctl -q -w net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1"
        );
        command::output_of(
            namespace::command_in(&namespace.path(), "sh").args(["-e", "-c", &inside]),
        )
        .unwrap();
        let rules = format!(
            "table inet slot {{
               chain in {{ type nat hook prerouting priority dstnat;
                 iifname uplink0 dnat ip to 192.168.241.2
                 iifname uplink0 dnat ip6 to fd00:5eed::2; }};
               chain out {{ type nat hook postrouting priority srcnat;
                 oifname uplink0 ip saddr 192.168.241.2 snat to {ipv4}
                 oifname uplink0 ip6 saddr fd00:5eed::2 snat to {ipv6}; }};
             }}"
        );
        command::output_of(namespace::command_in(&namespace.path(), "nft").arg(&rules)).unwrap();
        lab.run(&format!("ip route add {ipv4}/32 dev out{number}"));
        lab.run(&format!("ip -6 route add {ipv6}/128 dev out{number}"));
        Self {
            namespace,
            ipv4: ipv4.into(),
            ipv6: ipv6.into(),
        }
    }
}

/// A lab that forwards, with slots and a masqueraded uplink.
fn host_with_slots(lab: &Lab, count: u16) -> (Beyond, Vec<Slot>) {
    let beyond = Beyond::attach().unwrap();
    lab.run("sysctl -q -w net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1");
    command::run_with_input(
        "nft -f -",
        "table inet host { chain out { type nat hook postrouting priority srcnat; \
           oifname up0 masquerade; }; }",
    )
    .unwrap();
    (
        beyond,
        (0..count).map(|number| Slot::build(lab, number)).collect(),
    )
}

/// Every guest is reached at its own addresses, keeps its own value, and fetches from beyond.
fn assert_separate_guests(slots: &[Slot]) {
    for slot in slots {
        for address in [slot.ipv4, slot.ipv6] {
            command::run(&format!("ping -c 1 -W 10 {address}")).unwrap();
            GuestWeb::at(address).wait(10 * SECOND).unwrap();
        }
        GuestWeb::at(slot.ipv4)
            .store(&slot.ipv4.to_string())
            .unwrap();
    }
    for slot in slots {
        let read = GuestWeb::at(slot.ipv6).value().unwrap();
        assert_eq!(read, slot.ipv4.to_string());
        for (server, own) in [
            (IpAddr::from(BEYOND_IPV4), "203.0.113.1"),
            (BEYOND_IPV6.into(), "2001:db8:1::1"),
        ] {
            let target = SocketAddr::new(server, HTTP_PORT);
            let page = GuestWeb::at(slot.ipv4).fetch(target).unwrap();
            assert_eq!(page, format!("beyond: hello {own}\n"));
            assert!(GuestWeb::at(slot.ipv6).ping(server).unwrap());
        }
    }
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn user_mode_linux_guests_serve_and_fetch() {
    lab::run(|lab| {
        let (_beyond, slots) = host_with_slots(lab, 2);
        let network = GuestNetwork::default();
        let initramfs = UserModeLinux::initramfs(lab.folder(), &network).unwrap();
        let start = |(number, slot): (usize, &Slot)| {
            let (path, name) = (slot.namespace.path(), format!("guest{number}"));
            UserModeLinux::start(&path, "vmtap0", lab.folder(), &name, &initramfs).unwrap()
        };
        let mut guests: Vec<_> = slots.iter().enumerate().map(start).collect();
        for guest in &mut guests {
            guest.wait_ready(60 * SECOND).unwrap();
        }
        assert_separate_guests(&slots);
        for guest in &mut guests {
            // Else it counts what it doesn't have as memory, and sometimes has too little to start.
            let console = guest.console();
            assert!(!console.contains("exec-shield gap"), "{console}");
            guest.vmm().kill().unwrap();
        }
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn how_a_user_mode_linux_ended_at_its_start_is_told() {
    lab::run(|lab| {
        let (_beyond, slots) = host_with_slots(lab, 1);
        let network = GuestNetwork::default();
        let initramfs = UserModeLinux::initramfs(lab.folder(), &network).unwrap();
        let path = slots[0].namespace.path();
        let mut guest =
            UserModeLinux::start(&path, "vmtap0", lab.folder(), "killed", &initramfs).unwrap();
        while !guest.console().contains("Kernel command line") {
            thread::sleep(SECOND / 100);
        }
        let pid = i32::try_from(guest.vmm().pid()).unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
        let error = guest.wait_ready(60 * SECOND).unwrap_err().to_string();
        assert!(error.contains("SIGKILL"), "{error}");
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn qemu_clones_of_one_snapshot_are_different_machines() {
    let kernel = Kernel::fetch().unwrap();
    lab::run_within(180 * SECOND, |lab| {
        let (_beyond, slots) = host_with_slots(lab, 3);
        let network = GuestNetwork::default();
        let mut recipe = Recipe::prepare(&kernel, &network, lab.folder()).unwrap();
        let original = recipe.boot(&slots[0].namespace.path(), "vmtap0").unwrap();
        let snapshot = original.save(&recipe).unwrap();
        let restore = |(number, slot): (usize, &Slot)| {
            let name = format!("clone{number}");
            snapshot
                .restore(&name, &slot.namespace.path(), "vmtap0")
                .unwrap()
        };
        let mut clones: Vec<_> = slots.iter().enumerate().map(restore).collect();
        assert_separate_guests(&slots);
        for clone in &mut clones {
            clone.vmm().kill().unwrap();
        }
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn a_lab_runs_on_linux_6_1() {
    lab::run_on(Series::Linux6_1, 300 * SECOND, |lab| {
        assert_lab_works_on(lab, Series::Linux6_1);
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn a_lab_runs_on_linux_6_12() {
    lab::run_on(Series::Linux6_12, 300 * SECOND, |lab| {
        assert_lab_works_on(lab, Series::Linux6_12);
    });
}

/// The kernel is the one asked for, and what labs need of it is there.
fn assert_lab_works_on(lab: &Lab, series: Series) {
    let version = lab.run("uname -r");
    assert!(version.starts_with(series.version()), "{version}");
    let (_beyond, slots) = host_with_slots(lab, 1);
    let guest = FakeGuest::attach(&slots[0].namespace.path(), "vmtap0").unwrap();
    assert!(guest.ping(BEYOND_IPV4.into(), 10 * SECOND).is_ok());
    lab.run("tc qdisc replace dev up0 root fq");
    lab.run("tc qdisc add dev up0 clsact");
    assert!(lab.snapshot().differences(&lab.snapshot()).is_empty());
}

//! The `xdp` data path: which TAPs may have it, and what is said of the others.

use std::{
    net::{IpAddr, SocketAddr},
    os::fd::AsFd,
};

use sandwire_kernel_net::{
    interface,
    netlink::{Request, Socket},
    probe::bpf::{Hook, Program},
    xdp,
};
use sandwire_slot::{
    kernel::KernelNetwork,
    network::Network,
    plan::{Plan, SlotNumber, SlotPlan},
};
use sandwire_testlab::{
    command,
    host::{BEYOND_IPV4, Beyond, HTTP_PORT},
    lab::{self, Lab},
};
use serde_json::Value;

use crate::fixture::{
    INSTANCE, IPV4, prepare,
    sandbox::{attach, tenancy},
    talk::PATIENCE,
    tear_down, web,
};

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn xdp_is_used_where_the_tap_is_proven_and_said_why_not_elsewhere() {
    lab::run(|lab| {
        let beyond = Beyond::attach().unwrap();
        lab.run("ip -6 route add unreachable default metric 9999");
        let plan = xdp_pool();
        let network = prepare(&plan);
        beyond.route_through_host(IPV4).unwrap();
        let slot = plan.slot(SlotNumber(0));
        network.build(&slot).unwrap();
        let attached = lab.run(&format!("ip -d link show {}", slot.host_interface));
        assert!(attached.contains("prog/xdp"), "{attached}");
        let note = || network.inspect(&slot).data_path_note.unwrap_or_default();
        assert!(note().contains("nobody has the TAP open"), "{}", note());
        network.activate(&slot, &tenancy(&network, &plan)).unwrap();
        // As a VMM does that wants offloads.
        let opened = network.open_taps(&slot).unwrap();
        assert!(note().contains("virtio-net headers"), "{}", note());
        drop(opened);
        let guest = attach(&slot);
        // The lab's uplink is a veth, whose other end takes no frames from XDP.
        assert!(note().contains("uplink up0"), "{}", note());
        assert!(!note().contains("uplink lo"), "{}", note());
        // As its entry says.
        let dump = "bpftool -j map dump pinned $(find /sys/fs/bpf/sandwire -name xdp_nics)";
        let known = command::shell(dump).unwrap();
        assert!(known.contains("key"), "{known}");
        for server in [IpAddr::from(BEYOND_IPV4)] {
            for _ in 0..5 {
                guest.ping(server, PATIENCE).unwrap();
            }
            let page = guest.fetch(SocketAddr::new(server, HTTP_PORT), PATIENCE);
            assert!(page.unwrap().contains("10.64.0.2"));
        }
        assert_eq!(network.inspect(&slot).defects, []);
        lab.run(&format!("ip link set dev {} xdp off", slot.host_interface));
        assert_eq!(network.inspect(&slot).defects.len(), 1);
        assert_eq!(network.repair(&slot)[0].action, "repaired");
        assert_eq!(network.inspect(&slot).defects, []);
        assert_somebody_elses_stays(lab, &network, &slot);
        drop(guest);
        tear_down(&network, &[slot]);
        network.remove_pool(&plan).unwrap();
        let left = lab.run("ip -d link");
        assert!(!left.contains("xdp"), "{left}");
    });
}

/// A program that isn't ours is told of and left alone, until its owner takes it off.
fn assert_somebody_elses_stays(lab: &Lab, network: &KernelNetwork, slot: &SlotPlan) {
    let tap = &slot.host_interface;
    let theirs = Program::load(Hook::NativeXdp).unwrap();
    lab.run(&format!("ip link set dev {tap} xdp off"));
    let mut route = Socket::route().unwrap();
    let index = interface::find(&mut route, tap).unwrap().unwrap().index;
    let mut request = Request::new();
    xdp::attach(&mut request, index, theirs.descriptor().as_fd());
    route.execute(request).unwrap();
    let program = || {
        let text = lab.run(&format!("ip -j -d link show {tap}"));
        let links: Value = serde_json::from_str(&text).unwrap();
        links[0]["xdp"]["prog"]["id"].clone()
    };
    let before = program();
    for _ in 0..2 {
        let defects = network.inspect(slot).defects;
        assert_eq!(defects.len(), 1, "{defects:?}");
        let left = network.repair(slot).remove(0);
        assert_eq!(left.action, "reported");
        let advice = format!("ip link set dev {tap} xdp off");
        assert!(left.problem.contains(&advice), "{}", left.problem);
        assert_eq!(program(), before, "it was replaced");
    }
    lab.run(&format!("ip link set dev {tap} xdp off"));
    assert_eq!(network.repair(slot)[0].action, "repaired");
    assert_eq!(network.inspect(slot).defects, []);
}

/// A pool of the `xdp` data path.
fn xdp_pool() -> Plan {
    let mut spec = web("host", r#"{"uplink":"route"}"#).spec;
    spec.data_path = sandwire_api::slot::DataPath::Xdp;
    Plan::new(&INSTANCE.parse().unwrap(), &spec).unwrap()
}

//! Filters, XDP programs and half-made TAPs in a lab, judged by `tc`, `bpftool` and `ip`.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::{
    os::fd::{AsFd, OwnedFd},
    time::Duration,
};

use sandwire_kernel_net::{
    interface::{self, InterfaceIndex},
    netlink::{Request, Socket},
    probe::bpf::{Hook, Program},
    qdisc, tap,
    tc::{self, Filter, Place},
    xdp,
};
use sandwire_testlab::{
    guest::kernel::Series,
    lab::{self, Lab},
};
use serde_json::Value;

const OPTIONS: tap::Options = tap::Options {
    vnet_header: true,
    multi_queue: false,
    owner: Some(1000),
    group: None,
};

fn json(lab: &Lab, line: &str) -> Value {
    serde_json::from_str(&lab.run(line)).unwrap()
}

/// The first of a list whose field has this value.
fn entry<'a>(list: &'a Value, field: &str, value: &Value) -> Option<&'a Value> {
    list.as_array()
        .unwrap()
        .iter()
        .find(|entry| entry[field] == *value)
}

/// A veth pair `one` and `two`, raised.
fn pair(lab: &Lab, socket: &mut Socket) -> InterfaceIndex {
    lab.shell(
        "ip link add one type veth peer name two
         ip link set one up; ip link set two up",
    );
    interface::find(socket, "one").unwrap().unwrap().index
}

fn filter(interface: InterfaceIndex, hook: tc::Hook, program: &Program) -> Filter<'_> {
    Filter {
        place: Place {
            interface,
            hook,
            priority: 49152,
            handle: 1,
        },
        class_id: Some(12),
        program: program.descriptor().as_fd(),
        name: "everything_passes",
    }
}

/// The BPF filter on a hook; `tc` lists each priority by itself too.
fn shown(lab: &Lab, hook: &str) -> Option<Value> {
    let listed = json(lab, &format!("tc -j filter show dev one {hook}"));
    let filters = listed.as_array().unwrap().iter();
    let mut filters = filters.filter(|filter| filter["options"]["handle"].is_string());
    let found = filters.next().cloned();
    assert!(filters.next().is_none(), "{listed}");
    found
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_filter_is_added_replaced_and_deleted() {
    lab::run(|lab| {
        let mut socket = Socket::route().unwrap();
        let one = pair(lab, &mut socket);
        let programs = [Hook::Tcx, Hook::Tcx].map(|hook| Program::load(hook).unwrap());
        for (hook, name) in [(tc::Hook::Ingress, "ingress"), (tc::Hook::Egress, "egress")] {
            assert_eq!(tc::list(&mut socket, one, hook).unwrap(), []);
            assert_eq!(tc::filter_qdisc(&mut socket, one).unwrap(), None);
            let mut request = Request::new();
            match hook {
                tc::Hook::Ingress => tc::add_ingress(&mut request, one),
                tc::Hook::Egress => tc::add_clsact(&mut request, one),
            }
            let first = filter(one, hook, &programs[0]);
            first.add(&mut request);
            socket.execute(request).unwrap();
            let kind = match hook {
                tc::Hook::Ingress => "ingress",
                tc::Hook::Egress => "clsact",
            };
            let qdisc = tc::filter_qdisc(&mut socket, one).unwrap();
            assert_eq!(qdisc.as_deref(), Some(kind));

            let seen = shown(lab, name).unwrap();
            assert_eq!(
                (&seen["protocol"], &seen["pref"]),
                (&"all".into(), &49152.into())
            );
            let options = &seen["options"];
            assert_eq!(options["handle"], "0x1");
            assert_eq!(options["flowid"], ":c");
            assert_eq!(options["bpf_name"], "everything_passes");
            assert_eq!(options["direct-action"], true);
            let listed = tc::list(&mut socket, one, hook).unwrap();
            assert_eq!(listed.len(), 1);
            assert_eq!(listed[0].place, first.place);
            assert_eq!(listed[0].class_id, Some(12));
            assert!(listed[0].is_direct_action);
            let id = options["prog"]["id"].as_u64().unwrap();
            assert_eq!(listed[0].program_id.map(u64::from), Some(id));

            let mut request = Request::new();
            first.add(&mut request);
            assert!(socket.execute(request).unwrap_err().is_existing());
            let mut request = Request::new();
            filter(one, hook, &programs[1]).replace(&mut request);
            socket.execute(request).unwrap();
            let replaced = shown(lab, name).unwrap();
            assert_ne!(replaced["options"]["prog"]["id"].as_u64(), Some(id));
            let net = json(lab, "bpftool -j net");
            let seen = entry(&net[0]["tc"], "devname", &"one".into()).unwrap();
            assert_eq!(seen["id"], replaced["options"]["prog"]["id"], "{net}");

            let mut request = Request::new();
            first.place.delete(&mut request);
            socket.execute(request).unwrap();
            assert_eq!(shown(lab, name), None);
            let mut request = Request::new();
            first.place.delete(&mut request);
            assert!(socket.execute(request).unwrap_err().is_missing());
            let mut request = Request::new();
            tc::delete_qdisc(&mut request, one);
            socket.execute(request).unwrap();
        }
        assert!(!lab.run("tc qdisc show dev one").contains("clsact"));
        let nowhere = InterfaceIndex(4711);
        assert_eq!(tc::filter_qdisc(&mut socket, nowhere).unwrap(), None);
        assert_eq!(
            tc::list(&mut socket, nowhere, tc::Hook::Ingress).unwrap(),
            []
        );
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_an_xdp_program_is_attached_replaced_and_detached() {
    lab::run(|lab| {
        let mut socket = Socket::route().unwrap();
        let one = pair(lab, &mut socket);
        let programs = [Hook::NativeXdp; 2].map(|hook| Program::load(hook).unwrap());
        let [first, second] = [0, 1].map(|number: usize| programs[number].descriptor().as_fd());
        assert_eq!(xdp::find(&mut socket, one).unwrap(), None);
        let mut request = Request::new();
        xdp::attach(&mut request, one, first);
        socket.execute(request).unwrap();
        let links = json(lab, "ip -j -d link show dev one");
        let seen = &links[0]["xdp"];
        assert_eq!(seen["mode"], 1, "native: {links}");
        let id = xdp::find(&mut socket, one).unwrap();
        assert_eq!(id.map(u64::from), seen["prog"]["id"].as_u64());

        let mut request = Request::new();
        xdp::attach(&mut request, one, second);
        let error = socket.execute(request).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EBUSY), "{error}");
        let mut request = Request::new();
        xdp::replace(&mut request, one, second);
        socket.execute(request).unwrap();
        assert_ne!(xdp::find(&mut socket, one).unwrap(), id);
        let mut request = Request::new();
        xdp::detach(&mut request, one);
        socket.execute(request).unwrap();
        assert_eq!(xdp::find(&mut socket, one).unwrap(), None);
        let links = json(lab, "ip -j -d link show dev one");
        assert_eq!(links[0]["xdp"], Value::Null);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_tap_stays_only_when_it_is_told_to() {
    lab::run(|lab| {
        let mut socket = Socket::route().unwrap();
        let index = InterfaceIndex(700);
        let building = tap::create_transient("half", Some(index), OPTIONS).unwrap();
        let found = interface::find(&mut socket, "half").unwrap().unwrap();
        assert_eq!(found.index, index);
        let tun = found.tun.unwrap();
        assert_eq!((tun.is_persistent, tun.owner), (false, Some(1000)));
        // Whoever dies here leaves nothing.
        drop(building);
        assert_eq!(interface::find(&mut socket, "half").unwrap(), None);

        let building = tap::create_transient("whole", None, OPTIONS).unwrap();
        building.make_persistent().unwrap();
        assert!(
            tap::open_existing("whole", OPTIONS).unwrap().is_none(),
            "it is open"
        );
        drop(building);
        let shown = json(lab, "ip -j -d link show dev whole");
        assert_eq!(
            shown[0]["linkinfo"]["info_data"]["persist"], true,
            "{shown}"
        );

        let opened = tap::open_existing("whole", OPTIONS).unwrap().unwrap();
        let handed = OwnedFd::from(opened);
        assert!(tap::open_existing("whole", OPTIONS).unwrap().is_none());
        drop(handed);
        assert!(tap::open_existing("whole", OPTIONS).unwrap().is_some());
        let missing = tap::open_existing("never", OPTIONS).unwrap_err();
        assert!(missing.is_missing(), "{missing}");
        assert_eq!(interface::find(&mut socket, "never").unwrap(), None);
    });
}

/// An interface with three queues, each with a discipline of its own, the second with this one.
fn with_queues(lab: &Lab, discipline: &str) -> (Socket, interface::Interface) {
    lab.shell(&format!(
        "ip link add many numtxqueues 3 type veth peer name other; ip link set many up
         tc qdisc replace dev many root handle 1: mq
         tc qdisc replace dev many parent 1:2 {discipline}"
    ));
    let mut socket = Socket::route().unwrap();
    let found = interface::find(&mut socket, "many").unwrap().unwrap();
    (socket, found)
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_the_discipline_of_each_queue_is_listed() {
    lab::run(|lab| {
        let (mut socket, many) = with_queues(lab, "tbf rate 1mbit burst 10k latency 10ms");
        lab.run("tc qdisc add dev many clsact");
        assert_eq!(many.queue.as_deref(), Some("mq"));
        let mut listed = qdisc::list(&mut socket, many.index).unwrap();
        listed.sort_by_key(|qdisc| qdisc.parent);
        let listed: Vec<(u32, &str)> = listed
            .iter()
            .map(|qdisc| (qdisc.parent, qdisc.kind.as_str()))
            .collect();
        let first = listed[0].1.to_owned();
        let expected = [
            (0x1_0001, first.as_str()),
            (0x1_0002, "tbf"),
            (0x1_0003, &first),
            (0xffff_fff1, "clsact"),
            (0xffff_ffff, "mq"),
        ];
        assert_eq!(listed, expected);
        assert!(!qdisc::honours_departures(&mut socket, &many).unwrap());
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn departures_are_honoured_if_each_queue_does_on_linux_6_12() {
    lab::run_on(Series::Linux6_12, Duration::from_secs(120), |lab| {
        let (mut socket, many) = with_queues(lab, "fq");
        assert!(!qdisc::honours_departures(&mut socket, &many).unwrap());
        for class in [1, 3] {
            lab.run(&format!("tc qdisc replace dev many parent 1:{class} fq"));
        }
        assert!(qdisc::honours_departures(&mut socket, &many).unwrap());
        lab.run("tc qdisc replace dev many parent 1:3 pfifo");
        assert!(!qdisc::honours_departures(&mut socket, &many).unwrap());
    });
}

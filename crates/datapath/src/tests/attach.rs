//! Attachments on uplinks and the shared interface, among other people's.

use std::os::fd::{AsFd, OwnedFd};

use aya::programs::{ProgramInfo, SchedClassifier, TcAttachType};
use sandwire_kernel_net::{
    bpf::{self, BPF_TCX_INGRESS, BPF_XDP, ProgramType, XDP_FLAGS_DRV_MODE},
    netlink::{Request, Socket},
    tc,
};
use sandwire_testlab::lab::{self, Lab};

use super::{index_of, json, names_in, open, settings};
use crate::{
    Datapath, Defect, Error, FILTER_HANDLE, FILTER_PRIORITY, Order, Program, Settings, Uplink,
    abi::UplinkFlag, sys,
};

fn uplink(name: &str) -> Uplink {
    Uplink {
        index: index_of(name),
        name: name.to_owned(),
        fq: false,
        xdp: false,
    }
}

/// Two pairs, of which `up0` and `up1` are uplinks, and a bridge.
fn interfaces(lab: &Lab) {
    lab.shell(
        "ip link add up0 type veth peer name far0; ip link add up1 type veth peer name far1
         ip link add swtest type bridge
         for name in up0 up1 far0 far1 swtest; do ip link set $name up; done",
    );
}

/// Names of the programs on a hook, in the order in which they run.
fn programs_on(interface: &str, hook: TcAttachType) -> Vec<String> {
    let (_, programs) = SchedClassifier::query_tcx(interface, hook).unwrap();
    let name = |program: &ProgramInfo| program.name_as_str().unwrap().to_owned();
    programs.iter().map(name).collect()
}

fn ids_on(interface: &str, hook: TcAttachType) -> Vec<u32> {
    let (_, programs) = SchedClassifier::query_tcx(interface, hook).unwrap();
    programs.iter().map(ProgramInfo::id).collect()
}

/// Somebody else's program that passes everything on, attached until the link is dropped.
fn somebody_elses(interface: &str) -> OwnedFd {
    // r0 = -1 (next); exit
    let next = [
        [0xb7, 0, 0, 0, 0xff, 0xff, 0xff, 0xff],
        [0x95, 0, 0, 0, 0, 0, 0, 0],
    ];
    let program = bpf::load(ProgramType::Classifier, "somebody_elses", &next).unwrap();
    bpf::create_link(program.as_fd(), index_of(interface), BPF_TCX_INGRESS, 0).unwrap()
}

fn repaired(interface: &str, text: &'static str) -> Defect {
    Defect {
        interface: interface.to_owned(),
        text,
        failure: None,
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_new_process_replaces_the_programs_in_place() {
    lab::run(|lab| {
        interfaces(lab);
        let settings = settings();
        let datapath = open(&settings);
        datapath.attach_shared(index_of("swtest")).unwrap();
        datapath
            .set_uplinks(&[uplink("up0"), uplink("up1")])
            .unwrap();
        let links = names_in(&settings.folder.join("links"));
        assert_eq!(links.len(), 3, "{links:?}");
        for name in ["up0", "up1"] {
            assert_eq!(programs_on(name, TcAttachType::Ingress), ["from_uplink"]);
        }
        assert_eq!(programs_on("swtest", TcAttachType::Egress), ["from_host"]);
        assert_eq!(datapath.inspect(), []);
        let before = (
            ids_on("up0", TcAttachType::Ingress),
            ids_on("swtest", TcAttachType::Egress),
        );
        drop(datapath);
        assert_eq!(programs_on("up0", TcAttachType::Ingress), ["from_uplink"]);

        let other = somebody_elses("up0");
        let datapath = open(&settings);
        datapath.attach_shared(index_of("swtest")).unwrap();
        datapath.set_uplinks(&[uplink("up0")]).unwrap();
        let ours = sys::program_id(datapath.program(Program::FromUplink)).unwrap();
        let now = ids_on("up0", TcAttachType::Ingress);
        assert_eq!(
            (now.len(), now[0]),
            (2, ours),
            "in its old place, before the other"
        );
        assert_ne!(now[0], before.0[0]);
        assert_ne!(ids_on("swtest", TcAttachType::Egress), before.1);
        assert!(programs_on("up1", TcAttachType::Ingress).is_empty());
        assert_eq!(datapath.uplinks.entries().unwrap().len(), 1);
        assert_eq!(names_in(&settings.folder.join("links")).len(), 2);
        drop(other);
        Datapath::remove(&settings.folder).unwrap();
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_our_place_among_others_is_the_one_that_was_chosen() {
    lab::run(|lab| {
        interfaces(lab);
        let others = ["up0", "up1"].map(somebody_elses);
        let datapath = open(&settings());
        datapath.set_uplinks(&[uplink("up0")]).unwrap();
        assert_eq!(
            programs_on("up0", TcAttachType::Ingress),
            ["from_uplink", "somebody_elses"]
        );
        drop(datapath);
        let last = Settings {
            order: Order::Last,
            ..settings()
        };
        let datapath = open(&last);
        datapath.set_uplinks(&[uplink("up1")]).unwrap();
        assert_eq!(
            programs_on("up1", TcAttachType::Ingress),
            ["somebody_elses", "from_uplink"]
        );
        drop(others);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_what_somebody_detached_is_put_back() {
    lab::run(|lab| {
        interfaces(lab);
        let settings = settings();
        let datapath = open(&settings);
        datapath.attach_shared(index_of("swtest")).unwrap();
        datapath.set_uplinks(&[uplink("up0")]).unwrap();
        let links = settings.folder.join("links");
        for name in names_in(&links) {
            lab.run(&format!(
                "bpftool link detach pinned {}",
                links.join(name).display()
            ));
        }
        assert!(programs_on("up0", TcAttachType::Ingress).is_empty());
        let shared = format!("{} (shared)", index_of("swtest"));
        let detached = "our program was detached";
        assert_eq!(
            datapath.inspect(),
            [repaired("up0", detached), repaired(&shared, detached)]
        );
        assert_eq!(programs_on("up0", TcAttachType::Ingress), ["from_uplink"]);
        assert_eq!(datapath.inspect(), []);
        datapath.uplinks.remove(&index_of("up0").0).unwrap();
        let unknown = "the programs did not know it as an uplink";
        assert_eq!(datapath.inspect(), [repaired("up0", unknown)]);
        assert_eq!(datapath.inspect(), []);
        lab.run("ip link del swtest");
        let defects = datapath.inspect();
        assert_eq!(defects.len(), 1, "{defects:?}");
        assert_eq!(defects[0].failure.as_deref(), Some("no such interface"));
        let error = datapath.attach_shared(index_of("lo")).and_then(|()| {
            datapath.attach_shared(sandwire_kernel_net::interface::InterfaceIndex(4711))
        });
        let text = error.unwrap_err().to_string();
        assert_eq!(
            text,
            "cannot attach a program to the shared interface #4711: No such device (os error 19)"
        );
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_an_uplink_that_goes_is_forgotten_and_may_come_back() {
    lab::run(|lab| {
        interfaces(lab);
        let datapath = open(&settings());
        let uplinks = [uplink("up0"), uplink("up1")];
        datapath.set_uplinks(&uplinks).unwrap();
        lab.run("ip link del up0");
        assert_eq!(datapath.inspect(), [], "an uplink may go");
        datapath.set_uplinks(&uplinks).unwrap();
        let known: Vec<u32> = datapath
            .uplinks
            .entries()
            .unwrap()
            .iter()
            .map(|(index, _)| *index)
            .collect();
        assert_eq!(known, [uplinks[1].index.0]);
        assert_eq!(datapath.inspect(), []);
        // It comes back, by chance with the number that it had.
        lab.shell(&format!(
            "ip link add up0 index {} type veth peer name far0",
            uplinks[0].index.0
        ));
        datapath.set_uplinks(&uplinks).unwrap();
        assert_eq!(programs_on("up0", TcAttachType::Ingress), ["from_uplink"]);
        assert_eq!(datapath.uplinks.entries().unwrap().len(), 2);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_without_tcx_filters_do_the_same() {
    lab::run(|lab| {
        interfaces(lab);
        let settings = settings();
        let mut datapath = open(&settings);
        datapath.features.tcx = false;
        lab.shell(
            "tc qdisc add dev up0 clsact
             tc filter add dev up0 ingress prio 7 protocol all u32 match u32 1 0xffffffff flowid 1:1",
        );
        datapath.attach_shared(index_of("swtest")).unwrap();
        datapath
            .set_uplinks(&[uplink("up0"), uplink("up1")])
            .unwrap();
        let filter = bpf_filter("up0", "ingress").unwrap();
        assert_eq!(filter["pref"], FILTER_PRIORITY);
        assert_eq!(filter["options"]["bpf_name"], "from_uplink");
        assert_eq!(filter["options"]["direct-action"], true);
        let id = |filter: &serde_json::Value| filter["options"]["prog"]["id"].as_u64().unwrap();
        let before = id(&filter);
        assert_eq!(
            bpf_filter("swtest", "egress").unwrap()["options"]["bpf_name"],
            "from_host"
        );
        assert_eq!(datapath.inspect(), []);
        drop(datapath);

        let mut datapath = open(&settings);
        datapath.features.tcx = false;
        datapath.set_uplinks(&[uplink("up0")]).unwrap();
        assert_ne!(id(&bpf_filter("up0", "ingress").unwrap()), before);
        assert!(bpf_filter("up1", "ingress").is_none());
        lab.run(&format!(
            "tc filter del dev up0 ingress pref {FILTER_PRIORITY}"
        ));
        assert_eq!(
            datapath.inspect(),
            [repaired("up0", "our program was detached")]
        );
        lab.run("tc qdisc del dev up0 clsact");
        assert_eq!(
            datapath.inspect(),
            [repaired("up0", "our program was detached")]
        );
        assert_eq!(datapath.inspect(), []);
        lab.run("ip link del up0");
        assert_eq!(datapath.inspect(), []);
        datapath.set_uplinks(&[]).unwrap();
    });
}

/// A data path as on a kernel without TCX.
fn without_tcx(settings: &Settings) -> Datapath {
    let opened = Datapath::open(settings).unwrap();
    let mut datapath = opened.datapath;
    datapath.features.tcx = false;
    datapath
}

/// Numbers of the programs that filters have on the way in.
fn filters_on(interface: &str) -> Vec<u32> {
    let mut socket = Socket::route().unwrap();
    let listed = tc::list(&mut socket, index_of(interface), tc::Hook::Ingress).unwrap();
    let mut ids: Vec<u32> = listed
        .iter()
        .map(|filter| filter.program_id.unwrap())
        .collect();
    ids.sort_unstable();
    ids
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_without_tcx_instances_share_an_uplink() {
    lab::run(|lab| {
        interfaces(lab);
        let folders = ["one", "two"].map(crate::folder_for);
        let [one, two] = folders.map(|folder| {
            without_tcx(&Settings {
                folder,
                ..settings()
            })
        });
        let id =
            |datapath: &Datapath| sys::program_id(datapath.program(Program::FromUplink)).unwrap();
        let up0 = [uplink("up0")];
        // As an earlier version of the first one left it.
        lab.run("tc qdisc add dev up0 clsact");
        let earlier = tc::Filter {
            place: tc::Place {
                interface: index_of("up0"),
                hook: tc::Hook::Ingress,
                priority: FILTER_PRIORITY,
                handle: FILTER_HANDLE,
            },
            class_id: None,
            program: one.program(Program::FromUplink),
            name: "from_uplink",
        };
        let mut request = Request::new();
        earlier.add(&mut request);
        Socket::route().unwrap().execute(request).unwrap();
        two.set_uplinks(&up0).unwrap();
        one.set_uplinks(&up0).unwrap();
        let mut both = vec![id(&one), id(&two)];
        both.sort_unstable();
        for datapath in [&one, &two, &one] {
            assert_eq!(datapath.inspect(), [], "they take each other's place");
            assert_eq!(filters_on("up0"), both);
        }
        two.set_uplinks(&[]).unwrap();
        assert_eq!(filters_on("up0"), [id(&one)]);
        assert_eq!(one.inspect(), []);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_without_tcx_new_maps_leave_no_filter_on_a_former_uplink() {
    lab::run(|lab| {
        interfaces(lab);
        let datapath = without_tcx(&settings());
        datapath
            .set_uplinks(&[uplink("up0"), uplink("up1")])
            .unwrap();
        drop(datapath);
        let datapath = without_tcx(&Settings {
            nics_max: 128,
            ..settings()
        });
        datapath.set_uplinks(&[uplink("up1")]).unwrap();
        assert_eq!(filters_on("up0"), [0; 0]);
        assert_eq!(filters_on("up1").len(), 1);
    });
}

/// The BPF filter on a hook as `tc` lists it, which lists each priority by itself too.
fn bpf_filter(interface: &str, hook: &str) -> Option<serde_json::Value> {
    let listed = json("tc", &["-j", "filter", "show", "dev", interface, hook]);
    let listed = listed.as_array().unwrap().clone();
    listed
        .into_iter()
        .find(|filter| filter["kind"] == "bpf" && filter["options"]["bpf_name"].is_string())
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_filter_on_a_host_end_is_replaced_in_place_and_among_others() {
    lab::run(|lab| {
        interfaces(lab);
        let settings = settings();
        let datapath = open(&settings);
        let place = tc::Place {
            interface: index_of("up0"),
            hook: tc::Hook::Ingress,
            priority: FILTER_PRIORITY,
            handle: FILTER_HANDLE,
        };
        let mut socket = Socket::route().unwrap();
        let mut request = Request::new();
        tc::add_ingress(&mut request, place.interface);
        let filter = |program| tc::Filter {
            place,
            class_id: Some(12),
            program,
            name: "from_guest",
        };
        filter(datapath.program(Program::FromGuest)).add(&mut request);
        socket.execute(request).unwrap();
        lab.run("tc filter add dev up0 ingress prio 7 protocol all u32 match u32 1 0xffffffff flowid 1:1");
        let before = tc::list(&mut socket, place.interface, place.hook).unwrap();
        let opened_again = open(&settings);
        let mut request = Request::new();
        filter(opened_again.program(Program::FromGuest)).replace(&mut request);
        socket.execute(request).unwrap();
        let after = tc::list(&mut socket, place.interface, place.hook).unwrap();
        assert_eq!((before.len(), after.len()), (1, 1));
        assert_ne!(before[0].program_id, after[0].program_id);
        assert_eq!((after[0].place, after[0].class_id), (place, Some(12)));
        let listed = bpf_filter("up0", "ingress").unwrap();
        assert_eq!(listed["options"]["bpf_name"], "from_guest");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_xdp_on_an_uplink_comes_and_goes_with_the_setting() {
    lab::run(|lab| {
        interfaces(lab);
        let datapath = open(&settings());
        let with_xdp = Uplink {
            xdp: true,
            ..uplink("up0")
        };
        let wanted = std::slice::from_ref(&with_xdp);
        // A veth whose other end doesn't collect packets has nowhere to put a frame.
        let refusals = datapath.set_uplinks(wanted).unwrap();
        assert!(
            matches!(&refusals[..], [Error::TakesNoFrames { interface }] if interface == "up0"),
            "{refusals:?}"
        );
        let seen = &json("bpftool", &["-j", "net"])[0]["xdp"];
        assert_eq!(seen.as_array().unwrap().len(), 0, "{seen}");
        let value = datapath.uplinks.get(&with_xdp.index.0).unwrap().unwrap();
        assert_eq!(value.flags, 0);
        assert_eq!(datapath.inspect(), []);
        assert!(!datapath.takes_frames_otherwise());
        lab.run("ethtool -K far0 gro on");
        assert!(datapath.takes_frames_otherwise());
        assert!(datapath.set_uplinks(wanted).unwrap().is_empty());
        assert!(!datapath.takes_frames_otherwise());
        let seen = &json("bpftool", &["-j", "net"])[0]["xdp"];
        assert_eq!(
            (&seen[0]["devname"], &seen[0]["mode"]),
            (&"up0".into(), &"driver".into())
        );
        assert_eq!(programs_on("up0", TcAttachType::Ingress), ["from_uplink"]);
        let value = datapath.uplinks.get(&with_xdp.index.0).unwrap().unwrap();
        assert_eq!(value.flags, UplinkFlag::Xdp.number());
        assert_eq!(datapath.inspect(), []);
        datapath.set_uplinks(&[uplink("up0")]).unwrap();
        let seen = &json("bpftool", &["-j", "net"])[0]["xdp"];
        assert_eq!(seen.as_array().unwrap().len(), 0, "{seen}");
        assert_eq!(programs_on("up0", TcAttachType::Ingress), ["from_uplink"]);
        let value = datapath.uplinks.get(&with_xdp.index.0).unwrap().unwrap();
        assert_eq!(value.flags, 0);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_an_uplink_that_takes_no_frames_any_more_has_no_xdp_and_is_not_given_it_in_vain() {
    lab::run(|lab| {
        interfaces(lab);
        let datapath = open(&settings());
        lab.run("ethtool -K far0 gro on");
        let with_xdp = Uplink {
            xdp: true,
            ..uplink("up0")
        };
        let wanted = std::slice::from_ref(&with_xdp);
        assert!(datapath.set_uplinks(wanted).unwrap().is_empty());
        assert!(!datapath.takes_frames_otherwise());
        lab.run("ethtool -K far0 gro off");
        assert!(datapath.takes_frames_otherwise());
        let takes_none = |refusals: Vec<Error>| {
            assert!(
                matches!(&refusals[..], [Error::TakesNoFrames { interface }] if interface == "up0"),
                "{refusals:?}"
            );
            let value = datapath.uplinks.get(&with_xdp.index.0).unwrap().unwrap();
            assert_eq!(value.flags, 0);
            assert!(!datapath.takes_frames_otherwise());
        };
        takes_none(datapath.set_uplinks(wanted).unwrap());
        let seen = &json("bpftool", &["-j", "net"])[0]["xdp"];
        assert_eq!(seen.as_array().unwrap().len(), 0, "{seen}");
        // Whoever tried to attach ours would be told that the place is taken.
        let theirs = datapath.program(Program::ToGuestXdp);
        let theirs = bpf::create_link(theirs, with_xdp.index, BPF_XDP, XDP_FLAGS_DRV_MODE).unwrap();
        takes_none(datapath.set_uplinks(wanted).unwrap());
        drop(theirs);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_an_uplink_that_refuses_xdp_leaves_it_to_the_others() {
    lab::run(|lab| {
        interfaces(lab);
        let datapath = open(&settings());
        for name in ["far0", "far1"] {
            lab.run(&format!("ethtool -K {name} gro on"));
        }
        let uplinks = ["up0", "up1"].map(|name| Uplink {
            xdp: true,
            ..uplink(name)
        });
        let flags = || {
            let value = |uplink: &Uplink| datapath.uplinks.get(&uplink.index.0).unwrap();
            uplinks
                .each_ref()
                .map(|uplink| value(uplink).unwrap().flags)
        };
        let xdp = UplinkFlag::Xdp.number();
        let theirs = datapath.program(Program::ToGuestXdp);
        let index = uplinks[1].index;
        let theirs = bpf::create_link(theirs, index, BPF_XDP, XDP_FLAGS_DRV_MODE).unwrap();
        for _ in 0..2 {
            let refusals = datapath.set_uplinks(&uplinks).unwrap();
            assert_eq!(refusals.len(), 1, "{refusals:?}");
            let text = refusals[0].to_string();
            assert!(
                text.contains("interface up1") && refusals[0].is_busy(),
                "{text}"
            );
            assert_eq!(flags(), [xdp, 0]);
            for interface in ["up0", "up1"] {
                assert_eq!(
                    programs_on(interface, TcAttachType::Ingress),
                    ["from_uplink"]
                );
            }
            assert_eq!(datapath.inspect(), []);
        }
        drop(theirs);
        assert!(datapath.set_uplinks(&uplinks).unwrap().is_empty());
        assert_eq!(flags(), [xdp, xdp]);
        assert_eq!(datapath.inspect(), []);
    });
}

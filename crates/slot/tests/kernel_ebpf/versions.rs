//! Programs of another version by the maps in use, as they are on slots after an upgrade: who looks at a slot exchanges them.

use std::{
    os::fd::AsFd,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use sandwire_datapath::{FILTER_PRIORITY, abi::ABI_VERSION, folder_for};
use sandwire_kernel_net::{
    interface,
    netlink::{Request, Socket},
    tc::{self, Filter, Hook},
};
use sandwire_slot::{
    kernel::KernelNetwork,
    network::Network,
    plan::{Plan, SlotPlan},
};
use sandwire_testlab::{
    lab::{self, Lab},
    namespace,
    older_program::OlderProgram,
    pinger::Pinger,
};
use serde_json::Value;

use crate::fixture::{
    EBPF_KINDS, INSTANCE, prepare,
    sandbox::{Sandbox, tenancy},
    tear_down, web,
};

const HERE: &str = "/proc/self/ns/net";

/// Where a slot has a program.
struct Spot {
    netns: String,
    interface: String,
    /// The C file that it is from, without its ending.
    file: &'static str,
    program: &'static str,
}

impl Spot {
    /// All that a slot has.
    fn of(slot: &SlotPlan) -> Vec<Self> {
        let here = Self {
            netns: HERE.to_owned(),
            interface: slot.host_interface.clone(),
            file: "from_guest",
            program: "from_guest",
        };
        if !slot.has_netns() {
            return vec![here];
        }
        let inside = |interface: &str, program| Self {
            netns: slot.netns_path(),
            interface: interface.to_owned(),
            file: "slot",
            program,
        };
        vec![
            here,
            inside(&slot.nics[0].tap, "tap_to_host_end"),
            inside("uplink0", "uplink_to_tap"),
        ]
    }

    /// Puts a program into the place of the one that is there.
    fn exchange(&self, program: &OlderProgram) {
        namespace::inside(self.netns.as_ref(), || {
            let mut route = Socket::route()?;
            let found = interface::find(&mut route, &self.interface)?.expect("it is there");
            let listed = tc::list(&mut route, found.index, Hook::Ingress)?;
            let ours = listed
                .iter()
                .find(|filter| filter.place.priority == FILTER_PRIORITY)
                .expect("it has a program of ours");
            let mut request = Request::new();
            let filter = Filter {
                place: ours.place,
                class_id: ours.class_id,
                program: program.as_fd(),
                name: &ours.name,
            };
            filter.replace(&mut request);
            Ok(route.execute(request)?)
        })
        .unwrap();
    }

    /// The hash of the instructions of the program that is there.
    fn tag(&self) -> String {
        let line = format!("tc -j filter show dev {} ingress", self.interface);
        let shown = namespace::run_in(self.netns.as_ref(), &line).unwrap();
        let shown: Value = serde_json::from_str(&shown).unwrap();
        let mut filters = shown.as_array().unwrap().iter();
        let is_it = |filter: &&Value| filter["options"]["bpf_name"] == self.program;
        let found = filters.find(is_it).unwrap_or_else(|| panic!("{shown}"));
        let tag = found["options"]["prog"]["tag"].as_str();
        tag.unwrap_or_else(|| panic!("{shown}")).to_owned()
    }

    /// The same of the product's own.
    fn own_tag(&self, lab: &Lab) -> String {
        let pin = maps().join("programs").join(self.program);
        let shown = lab.run(&format!("bpftool -j prog show pinned {}", pin.display()));
        let shown: Value = serde_json::from_str(&shown).unwrap();
        shown["tag"].as_str().unwrap().to_owned()
    }
}

/// Maps in use.
fn maps() -> PathBuf {
    folder_for(INSTANCE).join(format!("v{ABI_VERSION}"))
}

/// A daemon that comes after another takes the slot over, and looks at it.
fn take_over(plan: &Plan, slot: &SlotPlan) -> KernelNetwork {
    let network = KernelNetwork::open(INSTANCE).unwrap();
    network.add_pool(plan).unwrap();
    network.adopt(slot, Some(&tenancy(&network, plan))).unwrap();
    network.switch_over().unwrap();
    assert_eq!(network.inspect(slot).defects, []);
    network
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn programs_of_another_version_are_exchanged_under_traffic() {
    lab::run(|lab| {
        for kind in EBPF_KINDS {
            let plan = web(kind, "{}");
            let network = prepare(&plan);
            let sandbox = Sandbox::start(&network, &plan, 0);
            let spots = Spot::of(&sandbox.slot);
            let own = || -> Vec<_> { spots.iter().map(|spot| spot.own_tag(lab)).collect() };
            let there = || -> Vec<_> { spots.iter().map(Spot::tag).collect() };
            assert_eq!(there(), own(), "{kind}");
            for spot in &spots {
                let older = OlderProgram::load(lab.folder(), &maps(), spot.file, spot.program);
                spot.exchange(&older.unwrap());
                assert_ne!(spot.tag(), spot.own_tag(lab), "{kind}: {}", spot.program);
            }
            drop(network);

            let ping = |address| {
                let interval = Duration::from_millis(5);
                Pinger::start(Path::new(HERE), address, interval).unwrap()
            };
            let pingers = sandbox.clone_addresses().map(ping);
            thread::sleep(Duration::from_millis(300));
            let network = take_over(&plan, &sandbox.slot);
            assert_eq!(there(), own(), "{kind}");
            thread::sleep(Duration::from_millis(300));
            for pinger in pingers {
                let pinged = pinger.stop().unwrap();
                assert!(pinged.sent > 0 && pinged.lost.is_empty(), "{pinged:?}");
            }
            tear_down(&network, &[sandbox.slot]);
            network.remove_pool(&plan).unwrap();
        }
    });
}

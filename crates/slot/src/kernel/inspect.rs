//! Looks at every object of a slot, and repairs what can be repaired under a running sandbox.

use std::net::IpAddr;

use sandwire_api::{
    lease::TapStatus,
    slot::{DataPath, Defect, TapUse},
};
use sandwire_datapath::NicIndex;
use sandwire_kernel_net::{
    conntrack,
    interface::{self, Interface, InterfaceIndex},
    netlink::{Request, Socket},
    netns::{self, Home},
    nft::{self, Batch},
    route,
};

use super::{
    Worker,
    build::{Build, Unhindered},
    container,
    ebpf::Ebpf,
    filters::{self, Attachment, Found},
    host_slot,
    host_table::same_rules,
    interfaces, lock, moving, own_addresses, slot_table,
    tap_status::{is_for_anybody, tap_status, tap_use},
};
use crate::{error::NetworkError, network::Inspection, plan::SlotPlan};

/// Something wrong with a slot, as a value that says what would put it right.
enum Wrong {
    Namespace,
    Tap(usize, TapUse),
    Uplink,
    SlotRoute(IpAddr),
    Table,
    HostEnd,
    HostRoute(IpAddr),
    /// A host end of this name gets IPv6 addresses from the kernel.
    MakesAddresses(String),
    /// A program on the host end of this number, or on the only one, and what is there.
    Program(usize, Found),
    /// A program inside the namespace.
    ProgramInside,
    /// The TAP beside a container's interface, and what is wrong with it.
    Beside(&'static str),
    /// A container's interface that is a child, and what is wrong with it.
    Child(&'static str),
    /// The TAP of a host slot that a former version left to every user.
    ForAnybody(usize),
    /// What the eBPF data path knows of the slot.
    Entry,
    Unseen(NetworkError),
}

/// The eBPF data path with the number of the shared interface, for slots that use it.
type Path<'a> = Option<(&'a Ebpf, InterfaceIndex)>;

pub(super) fn reported(object: String, problem: impl Into<String>) -> Defect {
    Defect {
        object,
        problem: problem.into(),
        action: "reported".to_owned(),
    }
}

pub(super) fn repaired(object: String, problem: impl Into<String>) -> Defect {
    Defect {
        object,
        problem: problem.into(),
        action: "repaired".to_owned(),
    }
}

/// The inspection of a slot that could not be looked at.
pub(super) fn unseen(slot: &SlotPlan, error: &NetworkError) -> Inspection {
    let object = format!("network namespace {}", slot.netns_name);
    Inspection {
        taps: missing_taps(slot),
        defects: vec![reported(object, error.to_string())],
        connections: None,
        data_path_note: None,
    }
}

pub(super) fn inspect(
    home: &Home,
    worker: &mut Worker,
    path: Path<'_>,
    slot: &SlotPlan,
) -> Inspection {
    let (inspection, wrong) = look(home, worker, path, slot);
    if let (Some((ebpf, _)), true) = (path, wrong.is_empty()) {
        ebpf.switch.catch_up(slot);
    }
    let defects = wrong.iter().map(|wrong| wrong.defect(slot)).collect();
    let of_uplinks = || path.and_then(|(ebpf, _)| lock(&ebpf.refusals).note());
    Inspection {
        defects,
        data_path_note: inspection.data_path_note.or_else(of_uplinks),
        ..inspection
    }
}

pub(super) fn repair(
    home: &Home,
    worker: &mut Worker,
    path: Path<'_>,
    slot: &SlotPlan,
) -> Vec<Defect> {
    let (_, wrong) = look(home, worker, path, slot);
    wrong
        .iter()
        .map(|wrong| {
            let defect = wrong.defect(slot);
            match put_right(home, worker, path, slot, wrong) {
                None => defect,
                Some(Ok(())) => repaired(defect.object, defect.problem),
                Some(Err(error)) => reported(defect.object, format!("{}; {error}", defect.problem)),
            }
        })
        .collect()
}

fn missing_taps(slot: &SlotPlan) -> Vec<TapStatus> {
    slot.nics
        .iter()
        .map(|nic| tap_status(nic, TapUse::Missing, None))
        .collect()
}

fn look(
    home: &Home,
    worker: &mut Worker,
    path: Path<'_>,
    slot: &SlotPlan,
) -> (Inspection, Vec<Wrong>) {
    let mut inspection = Inspection::default();
    let mut wrong = Vec::new();
    if let (true, Some(path)) = (slot.is_container(), path) {
        let seen = look_at_container(home, worker, path, slot, &mut wrong);
        wrong.extend(seen.err().map(Wrong::Unseen));
        return (inspection, wrong);
    }
    if let (false, Some(path)) = (slot.has_netns(), path) {
        let seen = look_at_host_slot(worker, path, slot, &mut inspection, &mut wrong);
        wrong.extend(seen.err().map(Wrong::Unseen));
        return (inspection, wrong);
    }
    if netns::is_mounted(&slot.netns_name) {
        let seen = look_inside(home, path, slot, &mut inspection, &mut wrong);
        wrong.extend(seen.err().map(Wrong::Unseen));
    } else {
        inspection.taps = missing_taps(slot);
        wrong.push(Wrong::Namespace);
    }
    let seen = look_at_host_end(worker, path, slot, &mut wrong);
    wrong.extend(seen.err().map(Wrong::Unseen));
    (inspection, wrong)
}

/// A container slot has its entry, and once it is leased a host end, and a TAP at the other end if that is wanted.
fn look_at_container(
    home: &Home,
    worker: &mut Worker,
    (ebpf, shared): (&Ebpf, InterfaceIndex),
    slot: &SlotPlan,
    wrong: &mut Vec<Wrong>,
) -> Result<(), NetworkError> {
    if slot.attach.is_some() && slot.is_child() {
        wrong.extend(container::child_problem(home, worker, ebpf, slot)?.map(Wrong::Child));
    } else if slot.attach.is_some() {
        look_at_host_end(worker, Some((ebpf, shared)), slot, wrong)?;
        // Without a host end all is made anew.
        if !wrong.iter().any(|wrong| matches!(wrong, Wrong::HostEnd)) {
            wrong.extend(container::tap_problem(home, worker, ebpf, slot)?.map(Wrong::Beside));
        }
        return Ok(());
    }
    if !container::is_ready(ebpf, shared, slot) {
        wrong.push(Wrong::Entry);
    }
    Ok(())
}

/// A host slot has nothing but its TAPs, the programs on them and its entries.
fn look_at_host_slot(
    worker: &mut Worker,
    (ebpf, shared): (&Ebpf, InterfaceIndex),
    slot: &SlotPlan,
    inspection: &mut Inspection,
    wrong: &mut Vec<Wrong>,
) -> Result<(), NetworkError> {
    let mut indexes = Vec::new();
    for (number, nic) in slot.nics.iter().enumerate() {
        let found = interface::find_with_traffic(&mut worker.route, &nic.tap)?;
        let used = tap_use(slot, nic, found.as_ref());
        inspection.taps.push(tap_status(nic, used, found.as_ref()));
        if matches!(used, TapUse::Missing | TapUse::Foreign) {
            wrong.push(Wrong::Tap(number, used));
            continue;
        }
        let Some(found) = found else { continue };
        indexes.push(found.index);
        if !found.is_up {
            wrong.push(Wrong::HostEnd);
        }
        if is_for_anybody(&found) {
            wrong.push(Wrong::ForAnybody(number));
        }
        wrong.extend(making_addresses(&found));
        look_at_program(worker, ebpf, slot, (number, found.index), wrong)?;
        if slot.data_path == DataPath::Xdp {
            inspection.data_path_note = super::xdp::note(ebpf, &found);
        }
    }
    if indexes.len() == slot.nics.len() && !ebpf.is_written(slot, &indexes, shared) {
        wrong.push(Wrong::Entry);
    }
    Ok(())
}

/// Whoever changes all interfaces may come to this one when the shared one has been put right already.
fn making_addresses(host_end: &Interface) -> Option<Wrong> {
    let name = || Wrong::MakesAddresses(host_end.name.clone());
    host_end.makes_addresses.then(name)
}

/// Looks at the programs on the host end of this number.
fn look_at_program(
    worker: &mut Worker,
    ebpf: &Ebpf,
    slot: &SlotPlan,
    (number, host_end): (usize, InterfaceIndex),
    wrong: &mut Vec<Wrong>,
) -> Result<(), NetworkError> {
    let mut found = ebpf.find(slot).map_or(Ok(Found::Nothing), |first| {
        attachment_on(first, number, host_end).look(&mut worker.route, ebpf)
    })?;
    if slot.data_path == DataPath::Xdp {
        found = found.min(super::xdp::look(&mut worker.route, ebpf, host_end)?);
    }
    if found != Found::Itself {
        wrong.push(Wrong::Program(number, found));
    }
    Ok(())
}

/// The program on a host end, given the first of the slot's entries.
fn attachment_on(first: NicIndex, number: usize, host_end: InterfaceIndex) -> Attachment {
    let position = u32::try_from(number).expect("a slot has at most 8 interfaces");
    Attachment::host_end(host_end, NicIndex(first.0 + position))
}

fn look_inside(
    home: &Home,
    path: Path<'_>,
    slot: &SlotPlan,
    inspection: &mut Inspection,
    wrong: &mut Vec<Wrong>,
) -> Result<(), NetworkError> {
    let inside = home.enter(&slot.netns_name)?;
    let mut route = Socket::route()?;
    let mut netfilter = Socket::netfilter()?;
    let present = interface::list_with_traffic(&mut route)?;
    for (number, nic) in slot.nics.iter().enumerate() {
        let found = present.iter().find(|interface| interface.name == nic.tap);
        let used = tap_use(slot, nic, found);
        inspection.taps.push(tap_status(nic, used, found));
        if matches!(used, TapUse::Missing | TapUse::Foreign) {
            wrong.push(Wrong::Tap(number, used));
        }
    }
    let uplink = present
        .iter()
        .find(|interface| interface.name == slot.slot_interface);
    match uplink.filter(|uplink| uplink.is_up) {
        None => wrong.push(Wrong::Uplink),
        Some(uplink) => {
            // Documentation addresses: any destination beyond the slot would do.
            for beyond in [
                IpAddr::from([192, 0, 2, 1]),
                IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1]),
            ] {
                let is_routed = slot
                    .clone_addresses()
                    .any(|own| own.is_ipv4() == beyond.is_ipv4());
                if is_routed && route::lookup(&mut route, beyond)? != Some(uplink.index) {
                    wrong.push(Wrong::SlotRoute(beyond));
                }
            }
        }
    }
    match path {
        None => {
            let rules = nft::rules(&mut netfilter, slot_table::NAME)?;
            if !same_rules(rules, &slot_table::rules(slot)) {
                wrong.push(Wrong::Table);
            }
            inspection.connections = conntrack::count(&mut netfilter).ok();
        }
        Some((ebpf, _)) => {
            for attachment in interfaces::attachments_inside(slot) {
                let is_present = present
                    .iter()
                    .any(|found| found.index == attachment.interface);
                if is_present && attachment.look(&mut route, ebpf)? != Found::Itself {
                    wrong.push(Wrong::ProgramInside);
                    break;
                }
            }
        }
    }
    drop(inside);
    Ok(())
}

fn look_at_host_end(
    worker: &mut Worker,
    path: Path<'_>,
    slot: &SlotPlan,
    wrong: &mut Vec<Wrong>,
) -> Result<(), NetworkError> {
    let found = interface::find(&mut worker.route, &slot.host_interface)?;
    let Some(host_end) = found.filter(|found| found.is_up) else {
        wrong.push(Wrong::HostEnd);
        return Ok(());
    };
    wrong.extend(making_addresses(&host_end));
    if let Some((ebpf, shared)) = path {
        look_at_program(worker, ebpf, slot, (0, host_end.index), wrong)?;
        if !ebpf.is_written(slot, &[host_end.index], shared) {
            wrong.push(Wrong::Entry);
        }
        return Ok(());
    }
    for address in slot.clone_addresses() {
        if route::lookup(&mut worker.route, address)? != Some(host_end.index) {
            wrong.push(Wrong::HostRoute(address));
        }
    }
    Ok(())
}

impl Wrong {
    fn defect(&self, slot: &SlotPlan) -> Defect {
        let namespace = || format!("network namespace {}", slot.netns_name);
        match self {
            Self::Namespace => reported(namespace(), "it is gone"),
            Self::Tap(nic, used) => {
                let object = format!("tap {} of slot {}", slot.nics[*nic].tap, slot.netns_name);
                let problem = match used {
                    TapUse::Foreign => {
                        "it is not the one that was made for the slot: it has no network"
                    }
                    _ => "it is gone",
                };
                reported(object, problem)
            }
            Self::Uplink => {
                let object = format!(
                    "interface {} of slot {}",
                    slot.slot_interface, slot.netns_name
                );
                reported(object, "it is gone or down")
            }
            Self::SlotRoute(beyond) => {
                let version = if beyond.is_ipv4() { "IPv4" } else { "IPv6" };
                let object = format!("{version} default route of slot {}", slot.netns_name);
                reported(object, "it does not lead to the host")
            }
            Self::Table => {
                let object = format!("nft table {} of slot {}", slot_table::NAME, slot.netns_name);
                reported(object, "its rules are missing or changed")
            }
            Self::HostEnd => reported(
                format!("interface {}", slot.host_interface),
                "it is gone or down",
            ),
            Self::HostRoute(address) => {
                let problem = format!("it does not lead to {}", slot.host_interface);
                reported(format!("route {address}"), problem)
            }
            Self::MakesAddresses(name) => {
                reported(format!("interface {name}"), own_addresses::PROBLEM)
            }
            Self::Program(number, found) => {
                let host_end = slot.host_ends().nth(*number).unwrap_or_default();
                let problem = match found {
                    Found::Foreign => "another program is in its place in the driver",
                    Found::OtherMaps => {
                        "it uses other maps than the daemon, whose policies don't reach it"
                    }
                    _ => "it is gone or replaced",
                };
                reported(format!("eBPF program on {host_end}"), problem)
            }
            Self::ProgramInside => reported(
                format!("eBPF program in slot {}", slot.netns_name),
                "it is gone or replaced",
            ),
            Self::ForAnybody(nic) => reported(
                format!("tap {} of slot {}", slot.nics[*nic].tap, slot.netns_name),
                "any user of the host may open it: release the lease and acquire another",
            ),
            Self::Beside(problem) => reported(tap_beside(slot), *problem),
            Self::Child(problem) => reported(container::name_of(slot), *problem),
            Self::Entry => reported(
                format!("eBPF entry of slot {}", slot.netns_name),
                "it is not what it should be",
            ),
            Self::Unseen(error) => reported(namespace(), error.to_string()),
        }
    }
}

fn tap_beside(slot: &SlotPlan) -> String {
    let attach = slot.attach.as_ref();
    let tap = attach.and_then(|attach| attach.request.tap.as_ref());
    let name = tap.map_or("", |tap| tap.name.as_str());
    format!("tap {name} beside the interface of {}", slot.host_interface)
}

/// Repairs one thing; `None` if that is not possible.
fn put_right(
    home: &Home,
    worker: &mut Worker,
    path: Path<'_>,
    slot: &SlotPlan,
    wrong: &Wrong,
) -> Option<Result<(), NetworkError>> {
    if let Wrong::MakesAddresses(name) = wrong {
        return Some(own_addresses::end_on(worker, name));
    }
    if let Some((ebpf, shared)) = path {
        return put_right_ebpf(home, worker, ebpf, shared, slot, wrong);
    }
    match wrong {
        Wrong::Namespace | Wrong::Unseen(_) | Wrong::Tap(_, TapUse::Foreign) => None,
        _ if !netns::is_mounted(&slot.netns_name) => None,
        Wrong::Tap(nic, _) => Some(restore_tap(home, worker, slot, *nic)),
        Wrong::Uplink | Wrong::SlotRoute(_) => Some(restore_uplink(home, worker, slot)),
        Wrong::Table => Some(restore_table(home, slot)),
        Wrong::HostEnd | Wrong::HostRoute(_) => {
            Some(interfaces::configure_host_end(worker, slot, false).map(drop))
        }
        Wrong::Program(..)
        | Wrong::ProgramInside
        | Wrong::MakesAddresses(_)
        | Wrong::Beside(_)
        | Wrong::Child(_)
        | Wrong::ForAnybody(_)
        | Wrong::Entry => None,
    }
}

/// Repairs one thing of a slot that uses eBPF; `None` if that is not possible.
fn put_right_ebpf(
    home: &Home,
    worker: &mut Worker,
    ebpf: &Ebpf,
    shared: InterfaceIndex,
    slot: &SlotPlan,
    wrong: &Wrong,
) -> Option<Result<(), NetworkError>> {
    let has_netns = slot.has_netns();
    match wrong {
        Wrong::HostEnd if slot.is_container() => {
            Some(restore_container(home, worker, ebpf, shared, slot))
        }
        Wrong::Namespace | Wrong::Unseen(_) | Wrong::Tap(_, TapUse::Foreign) => None,
        _ if slot.is_child() => Some(container::restore_child(home, worker, ebpf, shared, slot)),
        _ if has_netns && !netns::is_mounted(&slot.netns_name) => None,
        Wrong::Tap(nic, _) if has_netns => {
            let restored = restore_tap(home, worker, slot, *nic);
            Some(restored.and_then(|()| moving::attach_inside(home, ebpf, slot)))
        }
        Wrong::Tap(nic, _) => Some(host_slot::restore_tap(worker, ebpf, shared, slot, *nic)),
        Wrong::Uplink | Wrong::SlotRoute(_) => Some(
            restore_uplink(home, worker, slot)
                .and_then(|()| moving::attach_inside(home, ebpf, slot))
                .and_then(|()| restore_host_ends(worker, ebpf, shared, slot)),
        ),
        Wrong::ProgramInside => Some(moving::attach_inside(home, ebpf, slot)),
        Wrong::Beside(_) => Some(container::restore_tap(home, worker, ebpf, slot)),
        Wrong::HostEnd | Wrong::Program(..) | Wrong::Entry => {
            Some(restore_host_ends(worker, ebpf, shared, slot))
        }
        Wrong::Table
        | Wrong::HostRoute(_)
        | Wrong::MakesAddresses(_)
        | Wrong::Child(_)
        | Wrong::ForAnybody(_) => None,
    }
}

/// A pair is gone with both its ends, or there with both. One that went with its namespace stays gone.
fn restore_container(
    home: &Home,
    worker: &mut Worker,
    ebpf: &Ebpf,
    shared: InterfaceIndex,
    slot: &SlotPlan,
) -> Result<(), NetworkError> {
    if interface::find(&mut worker.route, &slot.host_interface)?.is_some() {
        return restore_host_ends(worker, ebpf, shared, slot);
    }
    let build = Build {
        steps: &Unhindered,
        slot,
        ebpf: Some((ebpf, shared)),
    };
    container::attach(&build, home, worker, ebpf, shared)
}

/// Entries, programs and settings of the slot's interfaces on the host.
fn restore_host_ends(
    worker: &mut Worker,
    ebpf: &Ebpf,
    shared: InterfaceIndex,
    slot: &SlotPlan,
) -> Result<(), NetworkError> {
    let host_ends = moving::host_ends(worker, slot)?;
    let first = ebpf.reserve(slot)?;
    if !ebpf.is_written(slot, &host_ends, shared) {
        ebpf.write(slot, &host_ends, shared)?;
    }
    for (number, host_end) in host_ends.iter().enumerate() {
        let attachment = attachment_on(first, number, *host_end);
        attachment.restore(&mut worker.route, &ebpf.datapath)?;
        if slot.data_path == DataPath::Xdp {
            let position = u32::try_from(number).expect("a slot has at most 8 interfaces");
            let tap = (slot.nics[number].tap.as_str(), *host_end);
            let entry = NicIndex(first.0 + position);
            super::xdp::restore(&mut worker.route, ebpf, tap, entry)?;
        }
    }
    let mut request = Request::new();
    for (name, host_end) in slot.host_ends().zip(&host_ends) {
        interfaces::raise(&mut request, slot, name, *host_end);
    }
    Ok(worker.route.execute(request)?)
}

fn restore_tap(
    home: &Home,
    worker: &mut Worker,
    slot: &SlotPlan,
    nic: usize,
) -> Result<(), NetworkError> {
    let inside = home.enter(&slot.netns_name)?;
    interfaces::create_tap(slot, nic)?;
    let mut request = Request::new();
    let qdiscs = match worker.has_qdiscs {
        true => filters::prepare_taps(&mut request, [interfaces::tap_index(nic)]),
        false => 0,
    };
    interfaces::configure_tap(&mut request, slot, nic);
    let done = filters::execute_prepared(&mut Socket::route()?, request, qdiscs);
    drop(inside);
    worker.has_qdiscs &= done?;
    Ok(())
}

/// A veth is gone with both its ends, or there with both.
fn restore_uplink(home: &Home, worker: &mut Worker, slot: &SlotPlan) -> Result<(), NetworkError> {
    let inside = home.enter(&slot.netns_name)?;
    let mut route = Socket::route()?;
    let is_new = interface::find(&mut route, &slot.slot_interface)?.is_none();
    let mut request = Request::new();
    let mut qdiscs = 0;
    if is_new {
        route.execute(interfaces::veth(slot, home))?;
        if worker.has_qdiscs {
            qdiscs = filters::prepare(&mut request, [interfaces::UPLINK]);
        }
    }
    interfaces::configure_uplink(&mut request, slot);
    worker.has_qdiscs &= filters::execute_prepared(&mut route, request, qdiscs)?;
    drop(inside);
    if slot.is_ebpf() {
        // Its host end is restored with the programs on it.
        return Ok(());
    }
    interfaces::configure_host_end(worker, slot, is_new).map(drop)
}

fn restore_table(home: &Home, slot: &SlotPlan) -> Result<(), NetworkError> {
    let inside = home.enter(&slot.netns_name)?;
    let mut batch = Batch::new(slot_table::NAME);
    batch.recreate_table();
    slot_table::write(&mut batch, slot);
    let done = batch.commit(&mut Socket::netfilter()?);
    drop(inside);
    Ok(done?)
}

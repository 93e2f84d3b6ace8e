//! Looks at every object of a slot, and repairs what can be repaired under a running sandbox.

use std::net::IpAddr;

use sandwire_api::{
    lease::{TapStatus, TrafficCount},
    slot::{Defect, TapUse},
};
use sandwire_kernel_net::{
    conntrack,
    interface::{self, Interface},
    netlink::{Request, Socket},
    netns::{self, Home},
    nft::{self, Batch},
    route,
};

use super::{Worker, host_table::same_rules, interfaces, slot_table};
use crate::{
    error::NetworkError,
    network::Inspection,
    plan::{NicPlan, SlotPlan},
};

/// Something wrong with a slot, as a value that says what would put it right.
enum Wrong {
    Namespace,
    Tap(usize, TapUse),
    Uplink,
    SlotRoute(IpAddr),
    Table,
    HostEnd,
    HostRoute(IpAddr),
    Unseen(NetworkError),
}

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

pub(super) fn inspect(home: &Home, worker: &mut Worker, slot: &SlotPlan) -> Inspection {
    let (inspection, wrong) = look(home, worker, slot);
    let defects = wrong.iter().map(|wrong| wrong.defect(slot)).collect();
    Inspection {
        defects,
        ..inspection
    }
}

pub(super) fn repair(home: &Home, worker: &mut Worker, slot: &SlotPlan) -> Vec<Defect> {
    let (_, wrong) = look(home, worker, slot);
    wrong
        .iter()
        .map(|wrong| {
            let defect = wrong.defect(slot);
            match put_right(home, worker, slot, wrong) {
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

fn look(home: &Home, worker: &mut Worker, slot: &SlotPlan) -> (Inspection, Vec<Wrong>) {
    let mut inspection = Inspection::default();
    let mut wrong = Vec::new();
    if netns::is_mounted(&slot.netns_name) {
        let seen = look_inside(home, slot, &mut inspection, &mut wrong);
        wrong.extend(seen.err().map(Wrong::Unseen));
    } else {
        inspection.taps = missing_taps(slot);
        wrong.push(Wrong::Namespace);
    }
    let seen = look_at_host_end(worker, slot, &mut wrong);
    wrong.extend(seen.err().map(Wrong::Unseen));
    (inspection, wrong)
}

fn look_inside(
    home: &Home,
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
        let used = found.map_or(TapUse::Missing, |found| tap_use(nic, found));
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
    let rules = nft::rules(&mut netfilter, slot_table::NAME)?;
    if !same_rules(rules, &slot_table::rules(slot)) {
        wrong.push(Wrong::Table);
    }
    inspection.connections = conntrack::count(&mut netfilter).ok();
    drop(inside);
    Ok(())
}

fn look_at_host_end(
    worker: &mut Worker,
    slot: &SlotPlan,
    wrong: &mut Vec<Wrong>,
) -> Result<(), NetworkError> {
    let found = interface::find(&mut worker.route, &slot.host_interface)?;
    let Some(host_end) = found.filter(|found| found.is_up) else {
        wrong.push(Wrong::HostEnd);
        return Ok(());
    };
    for address in slot.clone_addresses() {
        if route::lookup(&mut worker.route, address)? != Some(host_end.index) {
            wrong.push(Wrong::HostRoute(address));
        }
    }
    Ok(())
}

fn tap_use(nic: &NicPlan, found: &Interface) -> TapUse {
    let is_ours = found.tun.is_some_and(|tun| tun.is_tap && tun.is_persistent)
        && found.mac == Some(nic.gateway_mac.0);
    match (is_ours, found.has_carrier) {
        (false, _) => TapUse::Foreign,
        (true, true) => TapUse::Attached,
        (true, false) => TapUse::Unused,
    }
}

/// What a TAP receives is what the sandbox sends.
fn tap_status(nic: &NicPlan, used: TapUse, found: Option<&Interface>) -> TapStatus {
    let traffic = found.map(|found| found.traffic).unwrap_or_default();
    TapStatus {
        tap: nic.tap.clone(),
        used,
        egress: TrafficCount {
            packets: traffic.received_packets,
            bytes: traffic.received_bytes,
            dropped: traffic.received_dropped,
        },
        ingress: TrafficCount {
            packets: traffic.sent_packets,
            bytes: traffic.sent_bytes,
            dropped: traffic.sent_dropped,
        },
    }
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
            Self::Unseen(error) => reported(namespace(), error.to_string()),
        }
    }
}

/// Repairs one thing; `None` if that is not possible.
fn put_right(
    home: &Home,
    worker: &mut Worker,
    slot: &SlotPlan,
    wrong: &Wrong,
) -> Option<Result<(), NetworkError>> {
    match wrong {
        Wrong::Namespace | Wrong::Unseen(_) | Wrong::Tap(_, TapUse::Foreign) => None,
        _ if !netns::is_mounted(&slot.netns_name) => None,
        Wrong::Tap(nic, _) => Some(restore_tap(home, slot, *nic)),
        Wrong::Uplink | Wrong::SlotRoute(_) => Some(restore_uplink(home, worker, slot)),
        Wrong::Table => Some(restore_table(home, slot)),
        Wrong::HostEnd | Wrong::HostRoute(_) => {
            Some(interfaces::configure_host_end(&mut worker.route, slot).map(drop))
        }
    }
}

fn restore_tap(home: &Home, slot: &SlotPlan, nic: usize) -> Result<(), NetworkError> {
    let inside = home.enter(&slot.netns_name)?;
    interfaces::create_tap(slot, nic)?;
    let mut request = Request::new();
    interfaces::configure_tap(&mut request, slot, nic);
    let done = Socket::route()?.execute(request);
    drop(inside);
    Ok(done?)
}

/// A veth is gone with both its ends, or there with both.
fn restore_uplink(home: &Home, worker: &mut Worker, slot: &SlotPlan) -> Result<(), NetworkError> {
    let inside = home.enter(&slot.netns_name)?;
    let mut route = Socket::route()?;
    if interface::find(&mut route, &slot.slot_interface)?.is_none() {
        route.execute(interfaces::veth(slot, home))?;
    }
    let mut request = Request::new();
    interfaces::configure_uplink(&mut request, slot);
    route.execute(request)?;
    drop(inside);
    interfaces::configure_host_end(&mut worker.route, slot).map(drop)
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

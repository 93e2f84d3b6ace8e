//! Takes TAPs away from future users, unless somebody has them open.
//!
//! A single-queue TAP is opened here, which keeps everybody else out while it is renamed; if that is
//! refused as busy, a VMM has it. A multi-queue TAP can be opened by many, so it is renamed first and
//! then asked for its open queues; but not if it has some already, because a TAP that goes down for a
//! moment loses its IPv6 addresses and its neighbours. A renamed TAP is deleted with its namespace:
//! deleting it at once would cost the kernel 17 to 21 ms.

use std::os::fd::OwnedFd;

use sandwire_kernel_net::{
    interface::{self, Change, Interface},
    netlink::{Request, Socket},
    netns::{self, Home},
    tap,
};

use super::interfaces::tap_options;
use crate::{
    error::NetworkError,
    network::Withdrawal,
    plan::{NicPlan, SlotPlan},
};

pub(super) fn withdraw_taps(home: &Home, slot: &SlotPlan) -> Result<Withdrawal, NetworkError> {
    // Nobody finds a TAP in a namespace that has no name any more.
    if !netns::is_mounted(&slot.netns_name) {
        return Ok(Withdrawal::Free);
    }
    let inside = home.enter(&slot.netns_name)?;
    let mut route = Socket::route()?;
    let present = interface::list(&mut route)?;
    let taps: Vec<(usize, &Interface)> = slot
        .nics
        .iter()
        .enumerate()
        .filter_map(|(nic, plan)| {
            let found = present
                .iter()
                .find(|interface| interface.name == plan.tap)?;
            found.tun.map(|_| (nic, found))
        })
        .collect();
    let withdrawn = withdraw(&mut route, slot, &taps, |nic| format!("withdrawn{nic}"))?;
    drop(inside);
    Ok(withdrawn)
}

/// Opens the slot's TAPs as a VMM would, in order.
pub(super) fn open_taps(home: &Home, slot: &SlotPlan) -> Result<Vec<OwnedFd>, NetworkError> {
    let inside = match slot.has_netns() {
        true => Some(home.enter(&slot.netns_name)?),
        false => None,
    };
    let open = |nic: &NicPlan| {
        let opened = tap::open_existing(&nic.tap, tap_options(slot))?;
        let in_use = || NetworkError::Conflict {
            object: format!("tap {} of slot {}", nic.tap, slot.netns_name),
            with: "a process that has it open".to_owned(),
            advice: "end that process first".to_owned(),
        };
        opened.map(OwnedFd::from).ok_or_else(in_use)
    };
    let opened = slot.nics.iter().map(open).collect();
    drop(inside);
    opened
}

/// Renames TAPs out of the way, each to what `hidden` makes of its position, unless somebody has one
/// open.
pub(super) fn withdraw(
    route: &mut Socket,
    slot: &SlotPlan,
    taps: &[(usize, &Interface)],
    hidden: impl Fn(usize) -> String,
) -> Result<Withdrawal, NetworkError> {
    if slot.tap_multi_queue {
        let is_open = |tap: &Interface| tap.tun.is_some_and(|tun| tun.queues > 0);
        if taps.iter().any(|(_, tap)| is_open(tap)) {
            return Ok(Withdrawal::Held);
        }
        rename(route, taps, &hidden, true)?;
        for (nic, _) in taps {
            let now = interface::find(route, &hidden(*nic))?;
            if now.as_ref().is_some_and(is_open) {
                rename(route, taps, &hidden, false)?;
                return Ok(Withdrawal::Held);
            }
        }
        return Ok(Withdrawal::Free);
    }
    let mut ours = Vec::with_capacity(taps.len());
    for (_, tap) in taps {
        match tap::open(&tap.name, tap_options(slot))? {
            Some(opened) => ours.push(opened),
            None => return Ok(Withdrawal::Held),
        }
    }
    rename(route, taps, &hidden, true)?;
    drop(ours);
    Ok(Withdrawal::Free)
}

/// Renames TAPs out of the way, or back. They go down first: kernels before 6.2 insist.
fn rename(
    route: &mut Socket,
    taps: &[(usize, &Interface)],
    hidden: &impl Fn(usize) -> String,
    away: bool,
) -> Result<(), NetworkError> {
    let mut request = Request::new();
    for (nic, tap) in taps {
        let hidden = hidden(*nic);
        let step = |rename, up| Change {
            name: &tap.name,
            index: Some(tap.index),
            rename,
            up,
            ..Change::default()
        };
        if away {
            step(None, Some(false)).apply(&mut request);
            step(Some(&hidden), None).apply(&mut request);
        } else {
            step(Some(&tap.name), None).apply(&mut request);
            step(None, Some(true)).apply(&mut request);
        }
    }
    Ok(route.execute(request)?)
}

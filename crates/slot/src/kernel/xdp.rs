//! The fast way of host slots in the `xdp` data path: a program in the TAP's driver.
//!
//! It may only touch frames whose checksum is complete and that are no super-packets. That is so if who
//! has the TAP open asked for no virtio-net headers, in which alone a frame could say otherwise. The
//! kernel tells of every opening and closing; until it has, and for anything but plain packets of
//! flows that are known, the tc programs do it all.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    thread,
    time::Duration,
};

use sandwire_datapath::{NicIndex, Program, abi::NicFlag};
use sandwire_kernel_net::{
    interface::{self, Interface, InterfaceIndex, Watcher},
    netlink::{Request, Socket},
    xdp,
};

use super::{ebpf::Ebpf, filters::Found, lock};
use crate::error::NetworkError;

/// How soon the watcher notices that nobody needs it any more.
const WATCH_AT_MOST: Duration = Duration::from_millis(500);

/// TAPs that have the program, and their entries, found from either: many slots go at once.
#[derive(Default)]
pub(super) struct Taps {
    entries: HashMap<InterfaceIndex, NicIndex>,
    /// More than one of an entry whose TAP was made anew.
    taps: HashMap<NicIndex, Vec<InterfaceIndex>>,
}

impl Taps {
    pub(super) fn know(&mut self, tap: InterfaceIndex, entry: NicIndex) {
        let former = self.entries.insert(tap, entry);
        if former == Some(entry) {
            return;
        }
        if let Some(former) = former
            && let Some(its) = self.taps.get_mut(&former)
        {
            its.retain(|other| *other != tap);
        }
        self.taps.entry(entry).or_default().push(tap);
    }

    /// Returns the TAPs that an entry had.
    pub(super) fn forget(&mut self, entry: NicIndex) -> Vec<InterfaceIndex> {
        let taps = self.taps.remove(&entry).unwrap_or_default();
        for tap in &taps {
            self.entries.remove(tap);
        }
        taps
    }

    fn entry_of(&self, tap: InterfaceIndex) -> Option<NicIndex> {
        self.entries.get(&tap).copied()
    }

    fn entries(&self) -> impl Iterator<Item = NicIndex> {
        self.entries.values().copied()
    }
}

/// Puts the program on a TAP that has none.
pub(super) fn attach(
    request: &mut Request,
    ebpf: &Ebpf,
    tap: InterfaceIndex,
    index: NicIndex,
) -> Result<(), NetworkError> {
    ebpf.know_xdp(tap, index)?;
    xdp::attach(request, tap, ebpf.datapath.program(Program::FromGuestXdp));
    Ok(())
}

/// Puts the program where it belongs, unless somebody else's is there: a driver runs but one.
pub(super) fn restore(
    route: &mut Socket,
    ebpf: &Ebpf,
    (name, tap): (&str, InterfaceIndex),
    index: NicIndex,
) -> Result<(), NetworkError> {
    match look(route, ebpf, tap)? {
        Found::Foreign => Err(NetworkError::Conflict {
            object: format!("the XDP program of tap {name}"),
            with: "a program of somebody else's in its driver".to_owned(),
            advice: format!(
                "take that off (ip link set dev {name} xdp off), or have the pool's data path be ebpf, where it may stay"
            ),
        }),
        _ => {
            ebpf.know_xdp(tap, index)?;
            exchange(route, ebpf, tap)
        }
    }
}

/// Looks for the program on a TAP. One of ours, of another start, that goes by the maps in use is exchanged in place.
pub(super) fn look(
    route: &mut Socket,
    ebpf: &Ebpf,
    tap: InterfaceIndex,
) -> Result<Found, NetworkError> {
    let program = Program::FromGuestXdp;
    match xdp::find(route, tap)? {
        None => return Ok(Found::Nothing),
        found if found == ebpf.program_known_as(program).0 => {}
        Some(found) if !ebpf.datapath.is_ours(found, program)? => return Ok(Found::Foreign),
        Some(found) if !ebpf.datapath.shares_maps(found)? => return Ok(Found::OtherMaps),
        Some(_) => exchange(route, ebpf, tap)?,
    }
    Ok(Found::Itself)
}

/// Puts the program in the place of the one that is there.
pub(super) fn exchange(
    route: &mut Socket,
    ebpf: &Ebpf,
    tap: InterfaceIndex,
) -> Result<(), NetworkError> {
    let mut request = Request::new();
    let program = ebpf.datapath.program(Program::FromGuestXdp);
    xdp::replace(&mut request, tap, program);
    Ok(route.execute(request)?)
}

/// Follows TAPs as they are opened and closed, once per data path. To be called by a thread in the
/// host's namespace.
pub(super) fn watch(ebpf: &Arc<Ebpf>) -> Result<(), NetworkError> {
    if ebpf
        .is_watched
        .swap(true, std::sync::atomic::Ordering::SeqCst)
    {
        return Ok(());
    }
    let started = start(Arc::downgrade(ebpf));
    if started.is_err() {
        ebpf.is_watched
            .store(false, std::sync::atomic::Ordering::SeqCst);
    }
    started
}

fn start(weak: Weak<Ebpf>) -> Result<(), NetworkError> {
    let watcher = Watcher::new()?;
    let route = Socket::route()?;
    thread::Builder::new()
        .name("xdp".to_owned())
        .spawn(move || watch_until_gone(&weak, watcher, route))
        .map_err(|error| NetworkError::Kernel {
            operation: "start",
            object: "a thread that follows TAPs".to_owned(),
            source: Box::new(error),
        })?;
    Ok(())
}

fn watch_until_gone(weak: &Weak<Ebpf>, mut watcher: Watcher, mut route: Socket) {
    let mut all = true;
    loop {
        let changed = match all {
            true => interface::list(&mut route).map(Some),
            false => watcher.changed(WATCH_AT_MOST),
        };
        let Some(ebpf) = weak.upgrade() else { return };
        match changed {
            Ok(Some(changed)) => {
                all = false;
                changed.iter().for_each(|changed| judge(&ebpf, changed));
            }
            Ok(None) => all = true,
            Err(error) => {
                tracing::error!(%error, "cannot follow TAPs: XDP is not used");
                for index in lock(&ebpf.xdp).entries() {
                    ebpf.datapath.set_flag(index, NicFlag::Xdp, false);
                }
                ebpf.is_watched
                    .store(false, std::sync::atomic::Ordering::SeqCst);
                return;
            }
        }
    }
}

/// Says whether XDP may touch the frames of a TAP.
fn judge(ebpf: &Ebpf, tap: &Interface) {
    let known = lock(&ebpf.xdp).entry_of(tap.index);
    if let Some(index) = known {
        let is_proven = why_not(tap).is_none();
        ebpf.datapath.set_flag(index, NicFlag::Xdp, is_proven);
    }
}

fn why_not(tap: &Interface) -> Option<&'static str> {
    match tap.tun {
        None => Some("it is no TAP"),
        Some(_) if !tap.has_carrier => Some("nobody has the TAP open"),
        Some(tun) if tun.has_vnet_header => Some(
            "the TAP was opened with virtio-net headers, by which frames may lack their checksum or \
             be many in one; have the VMM open it without (QEMU: vnet_hdr=off)",
        ),
        Some(_) => None,
    }
}

fn is_impaired(ebpf: &Ebpf, tap: &Interface) -> bool {
    let known = lock(&ebpf.xdp).entry_of(tap.index);
    known.is_some_and(|index| {
        let flags = ebpf.datapath.nic(index).flags;
        flags & NicFlag::Impaired.number() != 0
    })
}

/// Why packets of a TAP don't go by XDP, if so.
pub(super) fn note(ebpf: &Ebpf, tap: &Interface) -> Option<String> {
    judge(ebpf, tap);
    if is_impaired(ebpf, tap) {
        return Some("ebpf instead of xdp: the lease is impaired".to_owned());
    }
    let of_tap = why_not(tap).map(str::to_owned);
    let of_uplinks = || {
        let mut refusals = lock(&ebpf.refusals).xdp.clone();
        refusals.extend(lock(&ebpf.xdp_failures).clone());
        (!refusals.is_empty()).then(|| refusals.join("; "))
    };
    let reason = of_tap.or_else(of_uplinks)?;
    Some(format!("ebpf instead of xdp: {reason}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_forgotten_with_the_taps_that_are_still_its() {
        let [old, new, moved] = [1, 2, 3].map(InterfaceIndex);
        let [entry, other] = [NicIndex(10), NicIndex(11)];
        let mut taps = Taps::default();
        for (tap, of) in [
            (old, entry),
            (new, entry),
            (new, entry),
            (moved, entry),
            (moved, other),
        ] {
            taps.know(tap, of);
        }
        assert_eq!(taps.forget(entry), [old, new]);
        assert_eq!((taps.entry_of(old), taps.entry_of(new)), (None, None));
        assert_eq!(taps.entry_of(moved), Some(other));
        assert_eq!(taps.forget(entry), []);
        assert_eq!(taps.forget(other), [moved]);
        assert_eq!(taps.entries().count(), 0);
    }
}

//! Attachments on uplinks and on the shared interface.
//!
//! Where the kernel has TCX, a program is attached by a link that is pinned in the instance's folder:
//! it stays when the daemon ends, a new version of the program takes its place without a gap, and
//! programs of others keep their places before or behind it. Elsewhere a `cls_bpf` filter on a clsact
//! qdisc does the same; an interface that has had a clsact qdisc keeps it, because others may use it.

use std::{
    collections::BTreeSet,
    fs,
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
    sync::{MutexGuard, PoisonError},
};

use sandwire_kernel_net::{
    bpf::{self, BPF_TCX_EGRESS, BPF_TCX_INGRESS, BPF_XDP, XDP_FLAGS_DRV_MODE},
    interface::{self, InterfaceIndex},
    netlink::{Request, Socket},
    tc, xdp,
};

use crate::{
    Datapath, Error, Order, Program,
    abi::{UplinkFlag, UplinkValue},
    group_number,
    pins::LINKS,
    sys,
};

/// Priority of our filters: behind those of lower number, before those of higher number, which see
/// only what ours passes on.
pub const FILTER_PRIORITY: u16 = 0xc000;
/// Handle of our filters on interfaces that no other instance has to do with.
pub const FILTER_HANDLE: u32 = 1;

const SHARED_PIN: &str = "shared";
const UPLINK_PIN: &str = "uplink-";
const XDP_PIN: &str = "xdp-";

/// An interface that packets may leave by without the host's own stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uplink {
    /// Its number.
    pub index: InterfaceIndex,
    /// Its name, for errors.
    pub name: String,
    /// Whether its queues honour departure times (`fq`).
    pub fq: bool,
    /// Whether XDP is used on it.
    pub xdp: bool,
}

/// Something of ours that was not as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Defect {
    /// Name of the interface.
    pub interface: String,
    /// What was wrong.
    pub text: &'static str,
    /// Why it could not be repaired; `None` if it has been.
    pub failure: Option<String>,
}

/// What should be attached, since the last call that said so.
#[derive(Debug, Default)]
pub(crate) struct Wanted {
    shared: Option<InterfaceIndex>,
    uplinks: Vec<Uplink>,
    /// Those of them that go without XDP because they took no frames from it.
    taking_none: BTreeSet<InterfaceIndex>,
    /// Whether filters of an earlier start have been looked for.
    has_looked: bool,
}

/// Where a program is attached by a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hook {
    Tc(tc::Hook),
    Xdp,
}

/// One program on one hook of one interface.
#[derive(Clone, Debug)]
struct Spot {
    pin: String,
    index: InterfaceIndex,
    name: String,
    hook: Hook,
    program: Program,
}

/// What was found at a spot before it was put right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    AsItShouldBe,
    AnotherProgram,
    Nothing,
    NoInterface,
}

impl Datapath {
    fn wanted(&self) -> MutexGuard<'_, Wanted> {
        // Written as a whole.
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts `from_host` on the egress of the shared interface; replaces an older program in place.
    ///
    /// # Errors
    /// The kernel refuses, or there is no such interface.
    pub fn attach_shared(&self, index: InterfaceIndex) -> Result<(), Error> {
        let mut wanted = self.wanted();
        let spot = shared_spot(index);
        if self.put_right(&spot)? == Found::NoInterface {
            let missing = std::io::Error::from_raw_os_error(libc::ENODEV);
            let object = format!("the shared interface {index}");
            return Err(Error::system("attach a program to", object, missing));
        }
        wanted.shared = Some(index);
        Ok(())
    }

    /// Makes exactly these interfaces the uplinks. One that is gone is forgotten, one where XDP is refused is an uplink
    /// without. Returns why, of each of those. Where the driver took no frames from XDP, it isn't attached again while
    /// the driver says so without it: that would make the rings of a network card anew, for nothing.
    ///
    /// # Errors
    /// The first refusal of the kernel; the other interfaces are done.
    pub fn set_uplinks(&self, uplinks: &[Uplink]) -> Result<Vec<Error>, Error> {
        let mut wanted = self.wanted();
        wanted.uplinks = uplinks.to_vec();
        let (mut failure, mut refusals) = (None, Vec::new());
        let mut keep = BTreeSet::from([SHARED_PIN.to_owned()]);
        let mut present = BTreeSet::new();
        let took_none = std::mem::take(&mut wanted.taking_none);
        for uplink in &mut wanted.uplinks {
            let found = self.put_on_uplink(uplink, &took_none, &mut refusals);
            keep.extend(spots_of(uplink).into_iter().map(|spot| spot.pin));
            let outcome = found.and_then(|is_there| {
                if is_there {
                    present.insert(uplink.index.0);
                    self.uplinks.set(&uplink.index.0, &value_of(uplink))?;
                }
                Ok(())
            });
            failure = failure.or(outcome.err());
        }
        let taking_none = refusals.iter().filter_map(|(index, refusal)| {
            matches!(refusal, Error::TakesNoFrames { .. }).then_some(*index)
        });
        wanted.taking_none = taking_none.collect();
        let known = self.uplinks.entries()?;
        for (index, _) in known.iter().filter(|(index, _)| !present.contains(index)) {
            self.uplinks.remove(index)?;
        }
        let mut others: BTreeSet<u32> = known.iter().map(|(index, _)| *index).collect();
        if !self.features.tcx && !wanted.has_looked {
            // New maps know nothing of those that the old ones had.
            let found = filtered_uplinks(&self.folder)?.into_iter();
            others.extend(found.map(|(_, place)| place.interface.0));
            wanted.has_looked = true;
        }
        let is_wanted = |index: &u32| uplinks.iter().any(|uplink| uplink.index.0 == *index);
        others.retain(|index| !is_wanted(index));
        self.detach_others(&keep, others)?;
        let refusals = refusals.into_iter().map(|(_, refusal)| refusal);
        failure.map_or(Ok(refusals.collect()), Err)
    }

    /// Puts the programs on an uplink; where XDP is refused, or of no use, it becomes one without, and [`Self::detach_others`]
    /// takes that program off. Returns whether the interface is there.
    fn put_on_uplink(
        &self,
        uplink: &mut Uplink,
        took_none: &BTreeSet<InterfaceIndex>,
        refusals: &mut Vec<(InterfaceIndex, Error)>,
    ) -> Result<bool, Error> {
        let mut is_there = true;
        for spot in spots_of(uplink) {
            let is_xdp = spot.hook == Hook::Xdp;
            let found = if is_xdp {
                self.put_xdp_right(&spot, took_none)
            } else {
                self.put_right(&spot)
            };
            match found {
                Ok(found) => is_there &= found != Found::NoInterface,
                Err(error) if is_xdp => {
                    uplink.xdp = false;
                    refusals.push((uplink.index, error));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(is_there)
    }

    fn put_xdp_right(
        &self,
        spot: &Spot,
        took_none: &BTreeSet<InterfaceIndex>,
    ) -> Result<Found, Error> {
        if took_none.contains(&spot.index) {
            check_takes_frames(spot)?;
        }
        let found = self.put_right(spot)?;
        if found != Found::NoInterface {
            check_takes_frames(spot)?;
        }
        Ok(found)
    }

    /// Whether an uplink takes frames from XDP that took none when [`Self::set_uplinks`] asked it, or takes none any more:
    /// then call that again. Of a driver that takes them only while it has a program, the former can't be seen.
    #[must_use]
    pub fn takes_frames_otherwise(&self) -> bool {
        let wanted = self.wanted();
        wanted.uplinks.iter().any(|uplink| {
            let was_asked = uplink.xdp || wanted.taking_none.contains(&uplink.index);
            // One that can't be asked may be gone.
            was_asked
                && xdp::features(uplink.index)
                    .is_ok_and(|now| now.is_some_and(|now| now.takes_frames != uplink.xdp))
        })
    }

    /// Looks whether the programs are still on the shared interface and the uplinks, and puts them back.
    /// An uplink that is gone is no defect.
    #[must_use]
    pub fn inspect(&self) -> Vec<Defect> {
        let wanted = self.wanted();
        let shared = wanted.shared.map(shared_spot);
        let spots = wanted.uplinks.iter().flat_map(spots_of).chain(shared);
        let mut defects: Vec<Defect> = spots.filter_map(|spot| self.inspect_spot(&spot)).collect();
        for uplink in &wanted.uplinks {
            defects.extend(self.inspect_entry(uplink));
        }
        defects
    }

    fn inspect_spot(&self, spot: &Spot) -> Option<Defect> {
        let (text, failure) = match self.put_right(spot) {
            Ok(Found::AsItShouldBe) => return None,
            Ok(Found::NoInterface) if spot.pin != SHARED_PIN => return None,
            Ok(Found::NoInterface) => ("it is gone", Some("no such interface".to_owned())),
            Ok(Found::AnotherProgram) => ("another program was in the place of ours", None),
            Ok(Found::Nothing) => ("our program was detached", None),
            Err(error) => ("our program is not attached", Some(error.to_string())),
        };
        Some(Defect {
            interface: spot.name.clone(),
            text,
            failure,
        })
    }

    fn inspect_entry(&self, uplink: &Uplink) -> Option<Defect> {
        let value = value_of(uplink);
        let is_there = match self.uplinks.get(&uplink.index.0) {
            Ok(found) => found == Some(value),
            Err(_) => false,
        };
        if is_there || !self.has_interface(uplink) {
            return None;
        }
        let repaired = self.uplinks.set(&uplink.index.0, &value);
        Some(Defect {
            interface: uplink.name.clone(),
            text: "the programs did not know it as an uplink",
            failure: repaired.err().map(|error| error.to_string()),
        })
    }

    fn has_interface(&self, uplink: &Uplink) -> bool {
        let find = || interface::find(&mut Socket::route()?, &uplink.name);
        find().is_ok_and(|found| found.is_some_and(|found| found.index == uplink.index))
    }

    fn pin_of(&self, spot: &Spot) -> PathBuf {
        self.folder.join(LINKS).join(&spot.pin)
    }

    fn put_right(&self, spot: &Spot) -> Result<Found, Error> {
        match spot.hook {
            Hook::Tc(hook) if !self.features.tcx => self.put_filter_right(spot, hook),
            _ => self.put_link_right(spot),
        }
    }

    fn put_link_right(&self, spot: &Spot) -> Result<Found, Error> {
        let path = self.pin_of(spot);
        let program = self.program(spot.program);
        let failed = |source| {
            Error::system(
                "attach a program to",
                format!("interface {}", spot.name),
                source,
            )
        };
        let mut found = Found::Nothing;
        if let Some(link) = sys::open_pin(&path).map_err(failed)? {
            let info = sys::link_info(link.as_fd()).map_err(failed)?;
            // Of a link whose interface is gone, or that somebody detached, the kernel says 0.
            if info.ifindex == spot.index.0 {
                if info.program == sys::program_id(program).map_err(failed)? {
                    return Ok(Found::AsItShouldBe);
                }
                sys::update_link(link.as_fd(), program).map_err(failed)?;
                return Ok(Found::AnotherProgram);
            }
            fs::remove_file(&path).map_err(failed)?;
        }
        let (attach_type, flags) = self.link_type(spot.hook);
        match bpf::create_link(program, spot.index, attach_type, flags) {
            Ok(link) => sys::pin(link.as_fd(), &path).map_err(failed)?,
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => found = Found::NoInterface,
            Err(error) => return Err(failed(error)),
        }
        Ok(found)
    }

    fn link_type(&self, hook: Hook) -> (u32, u32) {
        let order = match self.order {
            // Without naming another program, that is before or behind all of them.
            Order::First => sys::BPF_F_BEFORE,
            Order::Last => sys::BPF_F_AFTER,
        };
        match hook {
            Hook::Tc(tc::Hook::Ingress) => (BPF_TCX_INGRESS, order),
            Hook::Tc(tc::Hook::Egress) => (BPF_TCX_EGRESS, order),
            Hook::Xdp => (BPF_XDP, XDP_FLAGS_DRV_MODE),
        }
    }

    fn put_filter_right(&self, spot: &Spot, hook: tc::Hook) -> Result<Found, Error> {
        let program = self.program(spot.program);
        let mut socket = Socket::route()?;
        let place = self.place_of(spot, hook);
        let listed = tc::list(&mut socket, spot.index, hook)?;
        let ours = listed.iter().find(|filter| filter.place == place);
        let id = sys::program_id(program)
            .map_err(|source| Error::system("look at", "a program", source))?;
        let found = match ours {
            Some(filter) if filter.program_id == Some(id) => return Ok(Found::AsItShouldBe),
            Some(_) => Found::AnotherProgram,
            None => Found::Nothing,
        };
        let mut request = Request::new();
        tc::add_clsact(&mut request, spot.index);
        match socket.execute(request) {
            // Anything else that is missing would be the kernel's: a kind of qdisc.
            Err(error) if error.errno() == Some(libc::ENODEV) => return Ok(Found::NoInterface),
            // Ours from before, or somebody else's: it serves either way.
            Err(error) if error.is_existing() => {}
            other => other?,
        }
        let mut request = Request::new();
        self.filter(spot, place, program).replace(&mut request);
        // Earlier versions had one place for all instances.
        let earlier = tc::Place {
            handle: FILTER_HANDLE,
            ..place
        };
        let is_earlier = |filter: &&tc::Listed| filter.place == earlier && earlier != place;
        let id = listed
            .iter()
            .find(is_earlier)
            .and_then(|filter| filter.program_id);
        if let Some(id) = id
            && self.shares_maps(id)?
        {
            earlier.delete(&mut request);
        }
        socket.execute(request)?;
        Ok(found)
    }

    fn place_of(&self, spot: &Spot, hook: tc::Hook) -> tc::Place {
        if spot.pin != SHARED_PIN {
            return place_on_uplink(&self.folder, spot.index);
        }
        tc::Place {
            interface: spot.index,
            hook,
            priority: FILTER_PRIORITY,
            handle: FILTER_HANDLE,
        }
    }

    fn filter<'a>(&self, spot: &Spot, place: tc::Place, program: BorrowedFd<'a>) -> tc::Filter<'a> {
        tc::Filter {
            place,
            class_id: None,
            program,
            name: spot.program.name(),
        }
    }

    /// Removes the attachments on interfaces that are no uplinks any more.
    fn detach_others(&self, keep: &BTreeSet<String>, others: BTreeSet<u32>) -> Result<(), Error> {
        let folder = self.folder.join(LINKS);
        let failed = |source| {
            let object = format!("attachments in {}", folder.display());
            Error::system("remove", object, source)
        };
        for entry in fs::read_dir(&folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            if !keep.contains(&*entry.file_name().to_string_lossy()) {
                // Without that the program stays until the kernel gets round to the link's end.
                if let Some(link) = sys::open_pin(&entry.path()).map_err(failed)? {
                    sys::detach_link(link.as_fd()).map_err(failed)?;
                }
                fs::remove_file(entry.path()).map_err(failed)?;
            }
        }
        if self.features.tcx {
            return Ok(());
        }
        for index in others {
            let mut request = Request::new();
            place_on_uplink(&self.folder, InterfaceIndex(index)).delete(&mut request);
            match Socket::route()?.execute(request) {
                // The filter, its qdisc or the interface is gone.
                Err(error) if error.is_missing() || error.errno() == Some(libc::EINVAL) => {}
                other => other?,
            }
        }
        Ok(())
    }
}

/// Asked once our program is in place: before, drivers such as virtio-net's say no, since they make the queues for it
/// only then. Kernels that can't tell (before 6.3) aren't asked.
fn check_takes_frames(spot: &Spot) -> Result<(), Error> {
    match xdp::features(spot.index)? {
        Some(features) if !features.takes_frames => Err(Error::TakesNoFrames {
            interface: spot.name.clone(),
        }),
        _ => Ok(()),
    }
}

/// Interfaces that have an instance's filter for uplinks, as on kernels without TCX, and where. `folder` is that of its
/// pins.
///
/// # Errors
/// The kernel refuses.
pub fn filtered_uplinks(
    folder: &Path,
) -> Result<Vec<(String, tc::Place)>, sandwire_kernel_net::Error> {
    let mut socket = Socket::route()?;
    let mut found = Vec::new();
    for interface in interface::list(&mut socket)? {
        let place = place_on_uplink(folder, interface.index);
        // It may go while we look.
        let filters = tc::list(&mut socket, interface.index, place.hook).unwrap_or_default();
        if filters.iter().any(|filter| filter.place == place) {
            found.push((interface.name, place));
        }
    }
    Ok(found)
}

/// Where an instance's filter on an uplink is. Instances may have an uplink in common, so the handle is a number of the
/// folder, by which each finds its own, whatever has become of its maps.
fn place_on_uplink(folder: &Path, interface: InterfaceIndex) -> tc::Place {
    // Without a slash at its end.
    let folder = folder.components().as_path().to_string_lossy();
    tc::Place {
        interface,
        hook: tc::Hook::Ingress,
        priority: FILTER_PRIORITY,
        // The kernel itself gives out lower ones.
        handle: group_number(&folder) & 0x3fff_ffff | 0x4000_0000,
    }
}

fn shared_spot(index: InterfaceIndex) -> Spot {
    Spot {
        pin: SHARED_PIN.to_owned(),
        index,
        name: format!("{index} (shared)"),
        hook: Hook::Tc(tc::Hook::Egress),
        program: Program::FromHost,
    }
}

fn spots_of(uplink: &Uplink) -> Vec<Spot> {
    let spot = |pin, hook, program| Spot {
        pin: format!("{pin}{}", uplink.index.0),
        index: uplink.index,
        name: uplink.name.clone(),
        hook,
        program,
    };
    let tc = spot(UPLINK_PIN, Hook::Tc(tc::Hook::Ingress), Program::FromUplink);
    let xdp = uplink
        .xdp
        .then(|| spot(XDP_PIN, Hook::Xdp, Program::ToGuestXdp));
    std::iter::once(tc).chain(xdp).collect()
}

fn value_of(uplink: &Uplink) -> UplinkValue {
    let flags = [(UplinkFlag::Fq, uplink.fq), (UplinkFlag::Xdp, uplink.xdp)];
    let set = flags.into_iter().filter(|(_, is_set)| *is_set);
    UplinkValue {
        flags: set.fold(0, |flags, (flag, _)| flags | flag.number()),
        reserved: 0,
    }
}

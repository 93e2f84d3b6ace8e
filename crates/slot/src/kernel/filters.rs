//! The programs of the eBPF data path on a slot's interfaces.
//!
//! Each sits as a `cls_bpf` filter on an ingress qdisc of ours. Filters of other priorities on the same
//! qdisc are the user's own and stay: lower ones see packets before ours, higher ones what ours lets pass.
//! Where the kernel has no TCX (before Linux 6.6) it is a clsact qdisc, which has an egress too: diversions
//! have no other place there. Both serve ours; an ingress qdisc is the cheaper one by far among many, since
//! the kernel goes through a list of all blocks of filters for each block, and clsact has two.
//!
//! Slots of the nft data path have clsact qdiscs without filters: an interface that is up drops what it has to
//! send for some milliseconds while it gets one, and slots move to eBPF under traffic.

use std::os::fd::{AsRawFd, BorrowedFd};

use sandwire_datapath::{Datapath, FILTER_HANDLE, FILTER_PRIORITY, NicIndex, Program};
use sandwire_kernel_net::{
    Error as KernelError,
    interface::InterfaceIndex,
    netlink::{Request, Socket},
    tc::{self, Filter, Hook, Place},
};

use super::ebpf::Ebpf;
use crate::{error::NetworkError, plan::SlotPlan};

/// What the kernel says of a filter on an interface without a qdisc.
const NO_QDISC: i32 = rustix::io::Errno::INVAL.raw_os_error();
/// What a kernel without `sch_ingress`, or without queue disciplines at all, says of a qdisc.
const UNKNOWN_QDISC: [i32; 2] = [
    rustix::io::Errno::NOENT.raw_os_error(),
    rustix::io::Errno::OPNOTSUPP.raw_os_error(),
];

/// Adds the qdiscs that filters will need to interfaces that are still down, as the first messages of a
/// request. Returns how many.
pub(super) fn prepare(
    request: &mut Request,
    interfaces: impl IntoIterator<Item = InterfaceIndex>,
) -> usize {
    add_to_each(request, interfaces, tc::add_clsact)
}

/// The same for TAPs, which send without a queue.
pub(super) fn prepare_taps(
    request: &mut Request,
    taps: impl IntoIterator<Item = InterfaceIndex>,
) -> usize {
    taps.into_iter()
        .map(|tap| prepare(request, [tap]) + spare_queues(request, [tap]))
        .sum()
}

/// Has TAPs that are still down send without a queue. Returns how many messages that takes.
///
/// A TAP takes whatever it is given: what its ring has no room for is dropped, and nobody is told to wait. So a queue before it
/// never holds a packet. It only costs: a lock for each, and memory when the TAP is raised, for each of a multi-queue TAP's 256 queues
/// (`MAX_TAP_QUEUES`): 24 KiB of `pfifo_fast`, 68 of `fq_codel`.
pub(super) fn spare_queues(
    request: &mut Request,
    taps: impl IntoIterator<Item = InterfaceIndex>,
) -> usize {
    add_to_each(request, taps, tc::add_noqueue)
}

fn add_to_each(
    request: &mut Request,
    interfaces: impl IntoIterator<Item = InterfaceIndex>,
    add: fn(&mut Request, InterfaceIndex),
) -> usize {
    let mut count = 0;
    for interface in interfaces {
        add(request, interface);
        count += 1;
    }
    count
}

/// Carries out a request that begins with so many qdiscs. Returns whether the kernel knows them: the nft
/// data path does without.
pub(super) fn execute_prepared(
    route: &mut Socket,
    request: Request,
    qdiscs: usize,
) -> Result<bool, KernelError> {
    let mut are_known = true;
    for (position, error) in route.execute_all(request) {
        let is_unknown = error
            .errno()
            .is_some_and(|errno| UNKNOWN_QDISC.contains(&errno));
        if position >= qdiscs || !is_unknown {
            return Err(error);
        }
        are_known = false;
    }
    Ok(are_known)
}

/// What is in the place of a program of ours, the worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Found {
    /// Somebody else's, where there is room for one alone.
    Foreign,
    /// Nothing, or something else.
    Nothing,
    /// One by other maps than those in use: nobody writes there any more.
    OtherMaps,
    /// It.
    Itself,
}

/// A program on a hook of an interface.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attachment {
    pub(super) interface: InterfaceIndex,
    program: Program,
    class_id: Option<u32>,
}

impl Attachment {
    /// On a slot's host end.
    pub(super) fn host_end(interface: InterfaceIndex, first: NicIndex) -> Self {
        Self {
            interface,
            program: Program::FromGuest,
            class_id: Some(first.0),
        }
    }

    /// On a TAP in a slot's namespace.
    pub(super) fn tap(interface: InterfaceIndex) -> Self {
        Self {
            interface,
            program: Program::TapToHostEnd,
            class_id: None,
        }
    }

    /// On `uplink0` in a slot's namespace.
    pub(super) fn uplink(interface: InterfaceIndex, slot: &SlotPlan) -> Self {
        // The program tells interfaces apart by the last byte of the guest's address; 0 is no class.
        let first = slot.nics.first().map_or(0, |nic| nic.guest_mac.0[5]);
        Self {
            interface,
            program: Program::UplinkToTap,
            class_id: Some(u32::from(first) + 1),
        }
    }

    /// On one of two interfaces in a container's namespace that are joined: `other` is the other one, whose number has
    /// the 16 bits of a class id.
    pub(super) fn cross_over(interface: InterfaceIndex, other: InterfaceIndex) -> Self {
        Self {
            interface,
            program: Program::CrossOver,
            class_id: Some(other.0),
        }
    }

    /// Whether a filter is where ours would be.
    pub(super) fn is_place_taken(
        interface: InterfaceIndex,
        route: &mut Socket,
    ) -> Result<bool, KernelError> {
        let listed = tc::list(route, interface, Hook::Ingress)?;
        Ok(listed
            .iter()
            .any(|filter| filter.place == place_on(interface)))
    }

    /// On a container's interface that is a child of one of the host's.
    pub(super) fn child(interface: InterfaceIndex, first: NicIndex) -> [Self; 2] {
        [Program::FromChild, Program::ToChild].map(|program| Self {
            interface,
            program,
            class_id: Some(first.0),
        })
    }

    fn hook(self) -> Hook {
        match self.program {
            Program::FromChild => Hook::Egress,
            _ => Hook::Ingress,
        }
    }

    fn place(self) -> Place {
        Place {
            hook: self.hook(),
            ..place_on(self.interface)
        }
    }

    fn name(self) -> &'static str {
        match self.program {
            Program::TapToHostEnd => "tap_to_host_end",
            Program::UplinkToTap => "uplink_to_tap",
            Program::CrossOver => "cross_over",
            Program::FromChild => "from_child",
            Program::ToChild => "to_child",
            _ => "from_guest",
        }
    }

    /// Adds the qdisc and the filter to an interface that has neither.
    pub(super) fn add(self, request: &mut Request, datapath: &Datapath) {
        self.add_qdisc(request, datapath);
        self.add_filter(request, datapath);
    }

    /// Adds the filter to an interface that has a qdisc for it.
    pub(super) fn add_filter(self, request: &mut Request, datapath: &Datapath) {
        self.filter(datapath).add(request);
    }

    fn add_qdisc(self, request: &mut Request, datapath: &Datapath) {
        let is_of_child = matches!(self.program, Program::FromChild | Program::ToChild);
        if datapath.features().tcx && !is_of_child {
            tc::add_ingress(request, self.interface);
        } else {
            tc::add_clsact(request, self.interface);
        }
    }

    fn filter(self, datapath: &Datapath) -> Filter<'_> {
        Filter {
            place: self.place(),
            class_id: self.class_id,
            program: datapath.program(self.program),
            name: self.name(),
        }
    }

    /// Puts the filter where it belongs, whatever is there.
    pub(super) fn restore(
        self,
        route: &mut Socket,
        datapath: &Datapath,
    ) -> Result<(), KernelError> {
        let mut request = Request::new();
        self.filter(datapath).replace(&mut request);
        match route.execute(request) {
            Err(error) if error.errno() == Some(NO_QDISC) => {}
            other => return other,
        }
        let mut request = Request::new();
        self.add_qdisc(&mut request, datapath);
        match route.execute(request) {
            // It was something else that the kernel didn't like.
            Err(error) if error.is_existing() => {}
            other => other?,
        }
        let mut request = Request::new();
        self.filter(datapath).replace(&mut request);
        route.execute(request)
    }

    /// Takes the filter away; the qdisc stays for whoever else uses it.
    pub(super) fn remove(self, route: &mut Socket) -> Result<(), KernelError> {
        delete(self.place(), route)
    }

    /// Takes whatever is in the place of a filter of ours away.
    pub(super) fn clear(interface: InterfaceIndex, route: &mut Socket) -> Result<(), KernelError> {
        delete(place_on(interface), route)
    }

    /// Looks for the filter. If its program goes by the maps in use, but is of another version than the one that is
    /// loaded, that is exchanged in place.
    pub(super) fn look(self, route: &mut Socket, ebpf: &Ebpf) -> Result<Found, NetworkError> {
        let listed = tc::list(route, self.interface, self.hook())?;
        let found = listed.iter().find(|filter| {
            filter.place == self.place() && filter.is_direct_action && filter.name == self.name()
        });
        let Some(found) = found else {
            return Ok(Found::Nothing);
        };
        let (id, tag) = ebpf.program_known_as(self.program);
        if let Some(number) = found.program_id
            && found.program_id != id
            && !ebpf.datapath.shares_maps(number)?
        {
            return Ok(Found::OtherMaps);
        }
        if found.class_id != self.class_id {
            return Ok(Found::Nothing);
        }
        if found.program_id != id && found.program_tag != tag {
            self.restore(route, &ebpf.datapath)?;
        }
        Ok(Found::Itself)
    }
}

fn delete(place: Place, route: &mut Socket) -> Result<(), KernelError> {
    let mut request = Request::new();
    place.delete(&mut request);
    match route.execute(request) {
        Err(error) if error.is_missing() || error.errno() == Some(NO_QDISC) => Ok(()),
        other => other,
    }
}

/// Where filters of ours are on an interface that has no second one.
fn place_on(interface: InterfaceIndex) -> Place {
    Place {
        interface,
        hook: Hook::Ingress,
        priority: FILTER_PRIORITY,
        handle: FILTER_HANDLE,
    }
}

/// Number of a program, and hash of its instructions.
pub(super) type KnownAs = (Option<u32>, Option<[u8; 8]>);

/// How listings name a program.
pub(super) fn known_as(program: BorrowedFd<'_>) -> KnownAs {
    let path = format!("/proc/self/fdinfo/{}", program.as_raw_fd());
    let info = std::fs::read_to_string(path).unwrap_or_default();
    let value = |field: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(field));
        line.map(str::trim)
    };
    let tag = value("prog_tag:").and_then(|text| u64::from_str_radix(text, 16).ok());
    let id = value("prog_id:").and_then(|text| text.parse().ok());
    (id, tag.map(u64::to_be_bytes))
}

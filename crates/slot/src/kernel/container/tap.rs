//! The TAP beside a container's interface, for a microVM in there: what comes in by the one goes out by the other.
//!
//! A program of one instruction does it, on the ingress of both
//! ([decision 27](../../../../../docs/decisions/0027-a-program-joins-tap-and-interface.md)). Until the last step the TAP
//! is this process's own, and goes with it. From then on it is found from the host end: by its alias, in the namespace
//! that the host end leads to.

use std::os::fd::AsFd;

use sandwire_api::attach::AttachTap;
use sandwire_kernel_net::{
    Error as KernelError,
    interface::{self, Change, Interface, InterfaceIndex},
    netlink::{Request, Socket},
    netns::{Home, Inside},
    tap::{self, Opened},
};

use super::{Container, open};
use crate::{
    error::NetworkError,
    kernel::{
        Worker,
        build::{Build, BuildStep, Unhindered},
        ebpf::Ebpf,
        filters::{self, Attachment, Found},
    },
    plan::{NicPlan, SlotPlan},
};

/// Numbers of joined interfaces are class ids, of which programs see 16 bits.
const INDEX_MAX: u32 = 0xffff;

/// The TAP that a lease has beside its interface.
pub(super) struct Beside<'a> {
    slot: &'a SlotPlan,
    nic: &'a NicPlan,
    wanted: &'a AttachTap,
}

impl<'a> Beside<'a> {
    /// None if the lease wants none.
    pub(super) fn of(slot: &'a SlotPlan) -> Option<Self> {
        let wanted = slot.attach.as_ref()?.request.tap.as_ref()?;
        let nic = slot.nics.first()?;
        Some(Self { slot, nic, wanted })
    }

    fn name(&self) -> &str {
        self.wanted.name.as_str()
    }

    fn is_ours(&self, found: &Interface) -> bool {
        let is_tap = found.tun.is_some_and(|tun| tun.is_tap && tun.is_persistent);
        is_tap && found.alias.as_deref() == Some(&*self.slot.host_alias)
    }

    /// Makes the TAP, unless it is there, and joins it with the container's interface. The thread and the socket are in
    /// the namespace.
    pub(super) fn make(
        &self,
        build: &Build<'_>,
        route: &mut Socket,
        ebpf: &Ebpf,
        own: InterfaceIndex,
    ) -> Result<(), NetworkError> {
        // Dropped on error, and the TAP with it.
        let (opened, tap) = build.step(BuildStep::Tap, || self.create(route))?;
        build.step(BuildStep::Filters, || {
            for index in [own, tap] {
                check_index(index)?;
            }
            Attachment::cross_over(tap, own).restore(route, &ebpf.datapath)?;
            self.raise(route, tap)?;
            Ok(Attachment::cross_over(own, tap).restore(route, &ebpf.datapath)?)
        })?;
        match opened {
            Some(opened) => build.step(BuildStep::Persist, || Ok(opened.make_persistent()?)),
            None => Ok(()),
        }
    }

    fn create(&self, route: &mut Socket) -> Result<(Option<Opened>, InterfaceIndex), NetworkError> {
        match interface::find(route, self.name())? {
            // Its VMM may have it open: it stays when only the pair is made again.
            Some(found) if self.is_ours(&found) => return Ok((None, found.index)),
            Some(_) => return Err(self.is_taken()),
            None => {}
        }
        let options = tap::Options {
            vnet_header: self.slot.tap_vnet_header,
            multi_queue: false,
            owner: self.wanted.owner_uid,
            group: self.wanted.owner_gid,
        };
        let opened = tap::create_transient(self.name(), None, options).map_err(|error| {
            // Somebody made one meanwhile.
            match error.is_existing() {
                true => self.is_taken(),
                false => error.into(),
            }
        })?;
        opened.set_carrier(false)?;
        let found = interface::find(route, self.name())?
            .ok_or_else(|| KernelError::missing_interface(self.name()))?;
        let mut request = Request::new();
        let settings = Change {
            name: self.name(),
            index: Some(found.index),
            alias: Some(&self.slot.host_alias),
            mac: Some(self.nic.gateway_mac.0),
            mtu: Some(self.slot.mtu),
            no_generated_addresses: true,
            ..Change::default()
        };
        settings.apply(&mut request);
        filters::spare_queues(&mut request, [found.index]);
        route.execute(request)?;
        Ok((Some(opened), found.index))
    }

    fn raise(&self, route: &mut Socket, index: InterfaceIndex) -> Result<(), KernelError> {
        let mut request = Request::new();
        let raised = Change {
            name: self.name(),
            index: Some(index),
            up: Some(true),
            ..Change::default()
        };
        raised.apply(&mut request);
        route.execute(request)
    }

    fn is_taken(&self) -> NetworkError {
        NetworkError::Conflict {
            object: format!("tap {} in the namespace of the lease", self.name()),
            with: "one of that name".to_owned(),
            advice: "delete it, or give another name".to_owned(),
        }
    }

    /// What is wrong with the TAP, if anything.
    fn look(
        &self,
        route: &mut Socket,
        ebpf: &Ebpf,
        own: InterfaceIndex,
    ) -> Result<Option<&'static str>, NetworkError> {
        let Some(found) = interface::find(route, self.name())? else {
            return Ok(Some("it is gone"));
        };
        if !self.is_ours(&found) {
            return Ok(Some("it is not the one that was made for the lease"));
        }
        if !found.is_up {
            return Ok(Some("it is down"));
        }
        for attachment in [
            Attachment::cross_over(found.index, own),
            Attachment::cross_over(own, found.index),
        ] {
            if attachment.look(route, ebpf)? != Found::Itself {
                return Ok(Some("it is not joined with the interface"));
            }
        }
        Ok(None)
    }
}

/// A number that a program can be told.
fn check_index(index: InterfaceIndex) -> Result<(), NetworkError> {
    if index.0 <= INDEX_MAX {
        return Ok(());
    }
    Err(NetworkError::Conflict {
        object: format!("interface {index} in the namespace of the lease"),
        with: "the 65535 numbers that can be joined".to_owned(),
        advice: "use a namespace that hasn't had so many interfaces".to_owned(),
    })
}

/// Enters the namespace of a lease; none if it is gone, or another one has its path now.
fn enter(home: &Home, slot: &SlotPlan) -> Option<Inside> {
    let (record, nic) = (slot.attach.as_ref()?, slot.nics.first()?);
    let file = open(home, &record.request.netns).ok()?;
    let inside = home.enter_open(file.as_fd()).ok()?;
    let target = Container { home, record, nic };
    target.check_identity().ok().map(|()| inside)
}

/// The lease's interface, seen from its namespace: the other end of the host end.
fn own_interface(
    worker: &mut Worker,
    route: &mut Socket,
    slot: &SlotPlan,
) -> Result<Option<InterfaceIndex>, NetworkError> {
    let Some(record) = &slot.attach else {
        return Ok(None);
    };
    let host_end = interface::find(&mut worker.route, &slot.host_interface)?;
    let host_end = host_end.map(|host_end| host_end.index);
    let own = interface::find(route, record.request.interface.as_str())?;
    let own = own.filter(|own| host_end.is_some() && own.peer == host_end);
    Ok(own.map(|own| own.index))
}

/// What is wrong with the TAP of a lease that has its interface. Nothing of one that wants none, nor of one whose
/// namespace nothing leads to any more.
pub(in crate::kernel) fn problem(
    home: &Home,
    worker: &mut Worker,
    ebpf: &Ebpf,
    slot: &SlotPlan,
) -> Result<Option<&'static str>, NetworkError> {
    let Some(beside) = Beside::of(slot) else {
        return Ok(None);
    };
    let Some(inside) = enter(home, slot) else {
        return Ok(None);
    };
    let mut route = Socket::route()?;
    drop(inside);
    match own_interface(worker, &mut route, slot)? {
        Some(own) => beside.look(&mut route, ebpf, own),
        None => Ok(None),
    }
}

/// Puts right what [`problem`] found.
pub(in crate::kernel) fn restore(
    home: &Home,
    worker: &mut Worker,
    ebpf: &Ebpf,
    slot: &SlotPlan,
) -> Result<(), NetworkError> {
    let (Some(beside), Some(inside)) = (Beside::of(slot), enter(home, slot)) else {
        return Ok(());
    };
    let mut route = Socket::route()?;
    let build = Build {
        steps: &Unhindered,
        slot,
        ebpf: None,
    };
    let made = match own_interface(worker, &mut route, slot)? {
        Some(own) => beside.make(&build, &mut route, ebpf, own),
        None => Ok(()),
    };
    drop(inside);
    made
}

/// Deletes a TAP that no host end leads to any more, because somebody has deleted the pair.
pub(super) fn delete_alone(
    home: &Home,
    worker: &mut Worker,
    slot: &SlotPlan,
) -> Result<(), NetworkError> {
    let Some(beside) = Beside::of(slot) else {
        return Ok(());
    };
    if interface::find(&mut worker.route, &slot.host_interface)?.is_some() {
        return Ok(());
    }
    let Some(inside) = enter(home, slot) else {
        return Ok(());
    };
    let mut route = Socket::route()?;
    drop(inside);
    let found = interface::find(&mut route, beside.name())?;
    if !found.is_some_and(|found| beside.is_ours(&found)) {
        return Ok(());
    }
    let mut request = Request::new();
    interface::delete(&mut request, beside.name());
    match route.execute(request) {
        Err(error) if error.is_missing() => Ok(()),
        other => Ok(other?),
    }
}

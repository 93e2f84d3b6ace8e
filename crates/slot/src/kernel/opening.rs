//! The eBPF data path of an instance, opened for the first pool that needs it.

use std::sync::{Arc, atomic::Ordering};

use sandwire_kernel_net::interface::InterfaceIndex;

use super::{KernelNetwork, Worker, ebpf::Ebpf, redirects, xdp};
use crate::{error::NetworkError, plan::SlotPlan};

impl KernelNetwork {
    /// The eBPF data path, opened if it isn't. `host` is locked, so that it is opened once.
    pub(super) fn open_ebpf(&self) -> Result<&Arc<Ebpf>, NetworkError> {
        if let Some(ebpf) = self.ebpf.get() {
            return Ok(ebpf);
        }
        let waits = !self.has_switched.load(Ordering::Relaxed);
        let ebpf = Arc::new(Ebpf::open(&self.settings.ebpf, waits)?);
        Ok(self.ebpf.get_or_init(|| ebpf))
    }

    /// The data path that a slot needs, with the shared interface; none for nft.
    pub(super) fn ebpf_of(
        &self,
        slot: &SlotPlan,
    ) -> Result<Option<(&Ebpf, InterfaceIndex)>, NetworkError> {
        if !slot.is_ebpf() {
            return Ok(None);
        }
        let opened = self.opened().ok_or_else(|| NetworkError::Conflict {
            object: format!("slot {}", slot.netns_name),
            with: "the eBPF data path, which is not open".to_owned(),
            advice: "see what is said of its pool".to_owned(),
        });
        opened.map(Some)
    }

    /// The data path if it is open, with the shared interface.
    pub(super) fn opened(&self) -> Option<(&Ebpf, InterfaceIndex)> {
        let shared = InterfaceIndex(self.shared.load(Ordering::Relaxed));
        self.ebpf.get().map(|ebpf| (&**ebpf, shared))
    }

    /// Has the data path know what may leave only by the relay, now and from now on.
    pub(super) fn follow_redirects(
        &self,
        ebpf: &Arc<Ebpf>,
        worker: &mut Worker,
    ) -> Result<(), NetworkError> {
        // Before it is read: so no change is missed.
        redirects::watch(ebpf)?;
        redirects::tell(ebpf, &mut worker.route, &mut worker.netfilter)
    }

    /// Puts the programs on the shared interface and the uplinks.
    pub(super) fn attach_host(
        &self,
        worker: &mut Worker,
        shared: InterfaceIndex,
        wants_xdp: bool,
    ) -> Result<(), NetworkError> {
        let ebpf = self.open_ebpf()?;
        self.follow_redirects(ebpf, worker)?;
        if wants_xdp {
            xdp::watch(ebpf)?;
        }
        let wanted = self.settings.uplinks.as_deref();
        let uplinks = ebpf.find_uplinks(worker, &self.settings.instance, wanted, wants_xdp)?;
        ebpf.attach(shared, &uplinks)
    }
}

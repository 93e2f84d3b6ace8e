//! What the host's side is asked to serve.

use sandwire_api::slot::DataPath;

use crate::plan::Plan;

/// A pool that the host serves.
#[derive(Clone, Debug)]
pub(super) struct Hosted {
    pub(super) plan: Plan,
    /// The data path that some of its slots may still have.
    pub(super) from: Option<DataPath>,
}

impl Hosted {
    pub(super) fn serves_nft(&self) -> bool {
        self.plan.spec.data_path == DataPath::Nft || self.from == Some(DataPath::Nft)
    }

    pub(super) fn uses_xdp(&self) -> bool {
        self.plan.spec.data_path == DataPath::Xdp
    }

    pub(super) fn serves_ebpf(&self) -> bool {
        let is_ebpf = |data_path| data_path != DataPath::Nft;
        is_ebpf(self.plan.spec.data_path) || self.from.is_some_and(is_ebpf)
    }
}

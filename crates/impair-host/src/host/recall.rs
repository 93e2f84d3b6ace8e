//! What an earlier process has left: taken up again, or removed.

use std::path::Path;

use sandwire_datapath::divert::{self, Diversion};
use sandwire_kernel_net::{
    interface::{self, InterfaceIndex},
    netlink::Socket,
};

use super::Host;
use crate::{diversion::folder_of, error::Error, namespace::Namespace, state::Remembered};

impl Host {
    /// Takes up what an earlier process has left, or removes it.
    pub(crate) fn recall(&mut self) -> Result<(), Error> {
        let (found, errors) = self.memory.read()?;
        for error in errors {
            tracing::error!(%error, "an impaired interface that can't be recalled");
        }
        for remembered in found {
            let target = remembered.target.clone();
            match self.take_up(&remembered) {
                Ok(()) => tracing::info!(%target, "impaired as before"),
                Err(error) => {
                    tracing::warn!(%target, %error, "not impaired any more");
                    self.give_up(&remembered, &error);
                }
            }
        }
        Ok(())
    }

    pub(super) fn take_up(&mut self, remembered: &Remembered) -> Result<(), Error> {
        let (namespace, name) = self.find(remembered)?;
        let mut remembered = remembered.clone();
        remembered.target.interface = name;
        self.begin(namespace, remembered)
    }

    /// The namespace of a remembered target, if it is the same, with the same interface; and what that is called now.
    fn find(&self, remembered: &Remembered) -> Result<(Namespace, String), Error> {
        let target = &remembered.target;
        let namespace = Namespace::open(target.netns.as_deref())?;
        let missing = || Error::NoInterface {
            target: target.clone(),
        };
        if namespace.inode != remembered.inode
            || is_another(remembered.cookie, || namespace.cookie())
        {
            return Err(missing());
        }
        let index = InterfaceIndex(remembered.ifindex);
        let found = namespace.inside(|| {
            let mut socket = Socket::route()?;
            Ok(interface::find_by_index(&mut socket, index)?)
        })?;
        let name = found.ok_or_else(missing)?.name;
        Ok((namespace, name))
    }

    /// Forgets a target that can't be taken up for this reason. What another service has done with the interface meanwhile, whose
    /// TAPs are there, is not ours to take away.
    pub(super) fn give_up(&self, remembered: &Remembered, error: &Error) {
        if !matches!(error, Error::Diverted { .. }) {
            self.forget(remembered);
            return;
        }
        if let Err(error) = self.memory.remove(remembered.inode, remembered.ifindex) {
            tracing::error!(target = %remembered.target, %error, "it can't be forgotten");
        }
    }

    pub(super) fn forget(&self, remembered: &Remembered) {
        let (inode, ifindex) = (remembered.inode, remembered.ifindex);
        let folder = folder_of(&self.settings.pins, inode, InterfaceIndex(ifindex));
        // Filters are taken off by who gets into their namespace. Where that has lost its name they stay, and let packets pass.
        let detached = match self.find(remembered) {
            Ok((namespace, _)) => self.detach_in(&namespace, &folder, InterfaceIndex(ifindex)),
            Err(error) => Err(error),
        };
        let detached = detached.or_else(|_| divert::remove(&folder).map_err(Error::from));
        let forgotten = detached.and(self.memory.remove(inode, ifindex));
        if let Err(error) = forgotten {
            tracing::error!(target = %remembered.target, %error, "what is left of it can't be removed");
        }
    }

    fn detach_in(
        &self,
        namespace: &Namespace,
        folder: &Path,
        interface: InterfaceIndex,
    ) -> Result<(), Error> {
        let uses_links = self.settings.uses_links;
        namespace.inside(|| {
            let diversion = Diversion::open(folder, interface, uses_links)?;
            Ok(diversion.detach()?)
        })
    }
}

/// Whether a namespace isn't the one of that cookie, though it has its inode.
fn is_another(remembered: Option<u64>, found: impl FnOnce() -> Option<u64>) -> bool {
    remembered.is_some_and(|remembered| found().is_some_and(|found| found != remembered))
}

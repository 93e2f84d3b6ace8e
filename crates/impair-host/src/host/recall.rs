//! What an earlier process has left: taken up again, or removed.

use std::path::Path;

use sandwire_datapath::divert::{self, Diversion};
use sandwire_kernel_net::interface::InterfaceIndex;

use super::{Host, index_in};
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
                    self.forget(&remembered);
                }
            }
        }
        Ok(())
    }

    fn take_up(&mut self, remembered: &Remembered) -> Result<(), Error> {
        let namespace = self.find(remembered)?;
        self.begin(namespace, remembered.clone())
    }

    /// The namespace of a remembered target, if it is the same, with the same interface.
    fn find(&self, remembered: &Remembered) -> Result<Namespace, Error> {
        let target = &remembered.target;
        let namespace = Namespace::open(target.netns.as_deref())?;
        let missing = || Error::NoInterface {
            target: target.clone(),
        };
        if namespace.inode != remembered.inode {
            return Err(missing());
        }
        let found = index_in(&namespace, target)?;
        if found != Some(InterfaceIndex(remembered.ifindex)) {
            return Err(missing());
        }
        Ok(namespace)
    }

    pub(super) fn forget(&self, remembered: &Remembered) {
        let (inode, ifindex) = (remembered.inode, remembered.ifindex);
        let folder = folder_of(&self.settings.pins, inode, InterfaceIndex(ifindex));
        // Filters are taken off by who gets into their namespace; where the namespace is gone they are too.
        let detached = match self.find(remembered) {
            Ok(namespace) => self.detach_in(&namespace, &folder, InterfaceIndex(ifindex)),
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

//! Hears of cgroups at the moment when they are made, so that hardly anything is sent in one before it is steered.

use std::{io, sync::Arc};

use sandwire_kernel_net::folders::FolderWatch;
use tokio::sync::Notify;

use super::cgroups::paths;
use crate::config::Egress;

/// Waits for new folders beside the cgroups of a configuration, and beside those that these are in.
pub(super) struct Watch {
    folders: FolderWatch,
    made: Arc<Notify>,
}

impl Watch {
    /// Of those that are there.
    ///
    /// # Errors
    /// As of [`FolderWatch::start`].
    pub(super) fn new(egress: &Egress) -> io::Result<Self> {
        let made = Arc::<Notify>::default();
        let notified = Arc::clone(&made);
        let heard = move || notified.notify_one();
        let folders = FolderWatch::start("cgroups", heard, |error| {
            tracing::warn!(%error, "new cgroups aren't told of any more; they are looked for each second");
        })?;
        let watch = Self { folders, made };
        watch.cover(egress);
        Ok(watch)
    }

    /// Watches all folders that are there now and in which a part of a cgroup's path could be made. Those that it has
    /// already stay as they are.
    pub(super) fn cover(&self, egress: &Egress) {
        for parent in paths(egress).filter_map(|path| path.parent()) {
            self.folders.cover(parent);
        }
    }

    /// Waits until something was made.
    pub(super) async fn heard(&self) {
        self.made.notified().await;
    }
}

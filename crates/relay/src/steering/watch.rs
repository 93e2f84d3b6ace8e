//! Hears of cgroups at the moment when they are made, so that hardly anything is sent in one before it is steered.

use std::{io, mem::MaybeUninit, os::fd::OwnedFd, sync::Arc, thread};

use rustix::{
    fs::inotify::{self, CreateFlags, Reader, WatchFlags},
    io::Errno,
};
use tokio::sync::Notify;

use super::cgroups::paths;
use crate::config::Egress;

/// Waits for new folders beside the cgroups of a configuration, and beside those that these are in.
pub(super) struct Watch {
    inotify: Arc<OwnedFd>,
    made: Arc<Notify>,
}

impl Watch {
    /// Of those that are there. What the kernel tells is read by a thread that ends with the process.
    ///
    /// # Errors
    /// There are no more descriptors, root has as many of these as the kernel lets it (`fs.inotify.max_user_instances`), or
    /// no thread can be had.
    pub(super) fn new(egress: &Egress) -> io::Result<Self> {
        let watch = Self {
            inotify: Arc::new(inotify::init(CreateFlags::CLOEXEC)?),
            made: Arc::default(),
        };
        watch.cover(egress);
        let (inotify, made) = (watch.inotify.clone(), watch.made.clone());
        thread::Builder::new()
            .name("cgroups".to_owned())
            .spawn(move || listen(&inotify, &made))?;
        Ok(watch)
    }

    /// Watches all folders that are there now and in which a part of a cgroup's path could be made. Those that it has
    /// already stay as they are.
    pub(super) fn cover(&self, egress: &Egress) {
        let flags = WatchFlags::CREATE | WatchFlags::ONLYDIR;
        for folder in paths(egress).flat_map(|path| path.ancestors().skip(1)) {
            // One that isn't there is heard of when it is made.
            let _ = inotify::add_watch(&self.inotify, folder, flags);
        }
    }

    /// Waits until something was made.
    pub(super) async fn heard(&self) {
        self.made.notified().await;
    }
}

fn listen(inotify: &OwnedFd, made: &Notify) {
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut events = Reader::new(inotify, &mut buffer);
    loop {
        match events.next() {
            Ok(_) => made.notify_one(),
            Err(Errno::INTR) => {}
            Err(error) => {
                tracing::warn!(%error, "new cgroups aren't told of any more; they are looked for each second");
                return;
            }
        }
    }
}

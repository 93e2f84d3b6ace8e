//! Hears of identities that are added and removed, so that published ports leave a new one's addresses alone at once.

use std::{
    io,
    mem::MaybeUninit,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

use rustix::{
    fs::inotify::{self, CreateFlags, Reader, WatchFlags},
    io::Errno,
};
use tokio::sync::Notify;

/// Waits for folders that are made and removed in the one where each identity has its own, and for those above it.
pub(crate) struct Watch {
    folder: PathBuf,
    inotify: Arc<OwnedFd>,
    changed: Arc<Notify>,
}

impl Watch {
    /// What the kernel tells is read by a thread that ends with the process.
    ///
    /// # Errors
    /// There are no more descriptors, root has as many of these as the kernel lets it (`fs.inotify.max_user_instances`), or
    /// no thread can be had.
    pub(crate) fn new(folder: &Path) -> io::Result<Self> {
        let watch = Self {
            folder: folder.to_owned(),
            inotify: Arc::new(inotify::init(CreateFlags::CLOEXEC)?),
            changed: Arc::default(),
        };
        watch.cover();
        let (inotify, changed) = (watch.inotify.clone(), watch.changed.clone());
        thread::Builder::new()
            .name("identities".to_owned())
            .spawn(move || listen(&inotify, &changed))?;
        Ok(watch)
    }

    /// Waits until something has changed since the last time.
    pub(crate) async fn heard(&self) {
        self.changed.notified().await;
        self.cover();
    }

    /// Watches all folders on the way that are there now. Those that it has already stay as they are.
    fn cover(&self) {
        let flags = WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::ONLYDIR;
        for folder in self.folder.ancestors() {
            // One that isn't there is heard of when it is made.
            let _ = inotify::add_watch(&self.inotify, folder, flags);
        }
    }
}

fn listen(inotify: &OwnedFd, changed: &Notify) {
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut events = Reader::new(inotify, &mut buffer);
    loop {
        match events.next() {
            Ok(_) => changed.notify_one(),
            Err(Errno::INTR) => {}
            Err(error) => {
                tracing::warn!(%error, "new identities aren't told of any more; they are looked for from time to time");
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, time::Duration};

    use sandwire_testlab::lab;
    use tokio::{runtime, time::timeout};

    use super::*;

    /// Whether it hears of something; it would be told in an instant.
    fn hears(watch: &Watch, patience: Duration) -> bool {
        let runtime = runtime::Builder::new_current_thread().enable_time().build();
        let heard = async { timeout(patience, watch.heard()).await.is_ok() };
        runtime.expect("a runtime").block_on(heard)
    }

    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn folders_on_a_bpffs_are_heard_of_as_they_come_and_go() {
        const LONG: Duration = Duration::from_secs(60);
        lab::run(|_| {
            let top = Path::new("/sys/fs/bpf/watched");
            let links = top.join("v2/links");
            let watch = Watch::new(&links).expect("an inotify instance");
            for folder in [top, &top.join("v2"), &links, &links.join("4711")] {
                fs::create_dir(folder).expect("a bpffs of the lab's own");
                assert!(hears(&watch, LONG), "{}", folder.display());
                while hears(&watch, Duration::from_millis(50)) {}
            }
            fs::remove_dir(links.join("4711")).expect("it is empty");
            assert!(hears(&watch, LONG), "its end");
        });
    }
}

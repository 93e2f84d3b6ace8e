//! Hears of identities as they are added, so that published ports leave a new one's addresses alone at once.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use sandwire_kernel_net::folders::FolderWatch;
use tokio::sync::Notify;

/// Waits for folders that are made in the one where each identity has its own, and for those above it.
pub(crate) struct Watch {
    folder: PathBuf,
    folders: FolderWatch,
    made: Arc<Notify>,
}

impl Watch {
    /// # Errors
    /// As of [`FolderWatch::start`].
    pub(crate) fn new(folder: &Path) -> io::Result<Self> {
        let made = Arc::<Notify>::default();
        let notified = Arc::clone(&made);
        let heard = move || notified.notify_one();
        let folders = FolderWatch::start("identities", heard, |error| {
            tracing::warn!(%error, "new identities aren't told of any more; they are looked for every five seconds");
        })?;
        folders.cover(folder);
        Ok(Self {
            folder: folder.to_owned(),
            folders,
            made,
        })
    }

    /// Waits until something was made since the last time.
    pub(crate) async fn heard(&self) {
        self.made.notified().await;
        self.folders.cover(&self.folder);
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
    fn folders_on_a_bpffs_are_heard_of_as_they_are_made() {
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
        });
    }
}

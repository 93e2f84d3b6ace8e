//! Hears of folders at the moment when they are made, by inotify.

use std::{io, mem::MaybeUninit, os::fd::OwnedFd, path::Path, sync::Arc, thread};

use rustix::{
    fs::inotify::{self, CreateFlags, Reader, WatchFlags},
    io::Errno,
};

/// Which folders are watched for what is made in them.
#[derive(Debug)]
pub struct FolderWatch(Arc<OwnedFd>);

impl FolderWatch {
    /// Calls `heard` each time that something was made in a folder that is watched, on a thread of this name that
    /// ends with the process; and `failed` once, if the kernel tells no more.
    ///
    /// # Errors
    /// There are no more descriptors, root has as many of these as the kernel lets it (`fs.inotify.max_user_instances`), or
    /// no thread can be had.
    pub fn start(
        thread: &str,
        heard: impl Fn() + Send + 'static,
        failed: impl FnOnce(io::Error) + Send + 'static,
    ) -> io::Result<Self> {
        let inotify = Arc::new(inotify::init(CreateFlags::CLOEXEC)?);
        let heard_by = Arc::clone(&inotify);
        thread::Builder::new()
            .name(thread.to_owned())
            .spawn(move || failed(listen(&heard_by, heard)))?;
        Ok(Self(inotify))
    }

    /// Watches a folder and those that it is in, as far as they are there: a missing one is heard of when it is made, and is to
    /// be covered then. Those that are watched already stay as they are.
    pub fn cover(&self, folder: &Path) {
        let flags = WatchFlags::CREATE | WatchFlags::ONLYDIR;
        let folders: Vec<&Path> = folder.ancestors().collect();
        // From the top: one that is made meanwhile is either there to be watched, or heard of in the one that it is in.
        for folder in folders.into_iter().rev() {
            let _ = inotify::add_watch(&self.0, folder, flags);
        }
    }
}

/// Until it fails.
fn listen(inotify: &OwnedFd, heard: impl Fn()) -> io::Error {
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut events = Reader::new(inotify, &mut buffer);
    loop {
        match events.next() {
            Ok(_) => heard(),
            Err(Errno::INTR) => {}
            Err(error) => return error.into(),
        }
    }
}

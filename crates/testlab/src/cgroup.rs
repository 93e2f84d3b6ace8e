//! Cgroups of a test alone.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result};

/// An empty cgroup of version 2, removed with its owner.
#[derive(Debug)]
pub struct Cgroup(PathBuf);

impl Cgroup {
    /// Makes one that no other test has.
    ///
    /// # Errors
    /// If there is no such hierarchy, or nothing can be made in it.
    pub fn create() -> Result<Self> {
        let beside = Path::new("/sys/fs/cgroup/unified");
        let hierarchy = if beside.is_dir() {
            beside
        } else {
            Path::new("/sys/fs/cgroup")
        };
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
        let path = hierarchy.join(format!("sandwire-test-{}", now.as_nanos()));
        fs::create_dir(&path).with_context(|| format!("create {}", path.display()))?;
        Ok(Self(path))
    }

    /// Its folder.
    ///
    /// # Panics
    /// Never: the path is made of text.
    #[must_use]
    pub fn path(&self) -> &str {
        self.0.to_str().expect("the path is text")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process that has just ended is in its cgroup for a moment longer.
        for _ in 0..200 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
        eprintln!("left over: {}", self.0.display());
    }
}

//! A service that somebody has started beside himself, by this same executable.

use std::{fs, io};

/// Leaves the session of whoever started it, and takes the executable's name: the kernel gives one that is started as
/// `/proc/self/exe` that of the file there.
pub(crate) fn begin() -> io::Result<()> {
    rustix::process::setsid()?;
    // Of the first thread, which is the process's. Without it, it serves all the same.
    let _ = fs::write("/proc/self/comm", "sandwire");
    Ok(())
}

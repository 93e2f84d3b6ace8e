//! What a benchmark makes that is the machine's, and so doesn't go with the namespaces.
//!
//! Who makes it removes it in the end. If the benchmark is interrupted before, [`end_interrupted`] does; nothing is registered or
//! forgotten any more from then on.

use std::{
    fs, io,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process_group};

/// How long is waited for those that have been killed.
const TIMEOUT: Duration = Duration::from_secs(10);
static ALL: Mutex<Leftovers> = Mutex::new(Leftovers {
    groups: Vec::new(),
    cgroups: Vec::new(),
    folders: Vec::new(),
});

struct Leftovers {
    /// Process groups that write into the folders.
    groups: Vec<Pid>,
    cgroups: Vec<PathBuf>,
    folders: Vec<PathBuf>,
}

/// Has a cgroup and those below it removed by whoever ends this process early.
pub(crate) fn remove_if_interrupted(cgroup: &Path) {
    all().cgroups.push(cgroup.to_owned());
}

/// The same for a folder with all that is in it.
pub(crate) fn remove_folder_if_interrupted(folder: &Path) {
    all().folders.push(folder.to_owned());
}

/// Runs a command that is ended early, with all that it started, if this process is.
pub(crate) fn status_unless_interrupted(command: &mut Command) -> io::Result<ExitStatus> {
    let mut leftovers = all();
    let mut child = command.process_group(0).spawn()?;
    let group = Pid::from_child(&child);
    leftovers.groups.push(group);
    drop(leftovers);
    let status = child.wait();
    all().groups.retain(|one| *one != group);
    status
}

/// Removes all there is, and ends this process.
pub(super) fn end_interrupted() -> ! {
    // Held until the end: nobody starts anything more.
    let leftovers = all();
    leftovers.remove();
    std::process::exit(130);
}

fn all() -> MutexGuard<'static, Leftovers> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Leftovers {
    fn remove(&self) {
        for group in &self.groups {
            // It may have ended by itself.
            let _ = kill_process_group(*group, Signal::KILL);
        }
        self.cgroups.iter().for_each(|cgroup| remove_cgroup(cgroup));
        self.folders.iter().for_each(|folder| remove_folder(folder));
    }
}

/// Ends what is in a cgroup, and removes it. One that has gone already is fine.
fn remove_cgroup(cgroup: &Path) {
    let _ = fs::write(cgroup.join("cgroup.kill"), "1");
    let deadline = Instant::now() + TIMEOUT;
    while cgroup.exists() && Instant::now() < deadline {
        let entries = fs::read_dir(cgroup).into_iter().flatten().flatten();
        let inner = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        inner.for_each(|entry| remove_cgroup(&entry.path()));
        // Until those that were killed are gone, the kernel refuses.
        if fs::remove_dir(cgroup).is_err() {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

fn remove_folder(folder: &Path) {
    let deadline = Instant::now() + TIMEOUT;
    while folder.exists() && Instant::now() < deadline {
        // Those that were killed may write until they are gone.
        if fs::remove_dir_all(folder).is_err() {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::private_host::wait_until;

    #[test]
    fn what_is_being_written_goes_with_who_writes_it() {
        let outer = tempfile::tempdir().unwrap();
        let folder = outer.path().join("build");
        fs::create_dir(&folder).unwrap();
        // The shell has a process of its own for each folder; both are of the group.
        let write = "i=0; while :; do mkdir \"$0/$i\" 2>&-; i=$((i+1)); done";
        let mut command = Command::new("sh");
        command.args(["-c", write]).arg(&folder).process_group(0);
        let mut writer = command.spawn().unwrap();
        wait_until("it writes", TIMEOUT, || Ok(folder.join("1").exists())).unwrap();
        let leftovers = Leftovers {
            groups: vec![Pid::from_child(&writer)],
            cgroups: Vec::new(),
            folders: vec![folder.clone(), outer.path().join("never made")],
        };
        leftovers.remove();
        let ended = wait_until("it ends", TIMEOUT, || Ok(writer.try_wait()?.is_some()));
        let _ = writer.kill();
        ended.unwrap();
        assert!(!folder.exists() && outer.path().exists());
    }

    #[test]
    fn a_command_that_ends_by_itself_is_forgotten() {
        let status = status_unless_interrupted(Command::new("sh").args(["-c", "exit 3"]));
        assert_eq!(status.unwrap().code(), Some(3));
        assert!(all().groups.is_empty());
        assert!(status_unless_interrupted(&mut Command::new("/nowhere")).is_err());
    }
}

//! Notices a sandbox that looks fine and has no network.
//!
//! A VMM that finds its TAP missing, or is given another name, may silently make a TAP of its own
//! (Firecracker as root does). So while the command runs, the daemon is asked every second who sits
//! on the slot's TAP, and the command's processes are searched for TAPs that they have open.

use std::{
    collections::BTreeSet,
    fs,
    sync::mpsc::{self, RecvTimeoutError, Sender},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use rustix::process::Pid;
use sandwire_api::{lease::Lease, lease::TapStatus, name::Name, slot::TapUse};

use crate::{Context, output::note, verb::show::tap_use_text};

/// Time between two looks.
const INTERVAL: Duration = Duration::from_secs(1);
/// Time that a VMM is given to open its TAP.
const GRACE: Duration = Duration::from_secs(5);
/// Time that the daemon is given to answer; it may be restarting.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// The thread that watches.
pub(super) struct Watch {
    stop: Sender<()>,
    thread: JoinHandle<Vec<String>>,
}

impl Watch {
    /// Starts to watch the processes of `child` on the slot of `lease`.
    pub(super) fn start(context: &Context, lease: &Lease, child: Pid) -> Self {
        let client = context.client().with_timeout(ANSWER_MAX);
        let name: Name = lease.name.clone();
        let child = child.as_raw_nonzero().get();
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let started = Instant::now();
            let mut told = Vec::new();
            while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                // A daemon that doesn't answer right now is no news of the sandbox.
                let Ok(detail) = client.lease(&name, None) else {
                    continue;
                };
                for warning in warnings(&detail.taps, started.elapsed(), || open_taps(child)) {
                    if !told.contains(&warning) {
                        note(&format!("warning: {warning}"));
                        told.push(warning);
                    }
                }
            }
            told
        });
        Self { stop, thread }
    }

    /// Ends it; what it has warned of.
    pub(super) fn stop(self) -> Vec<String> {
        drop(self.stop);
        self.thread.join().unwrap_or_default()
    }
}

/// What is wrong with the slot's TAPs. `open_taps` finds the TAPs that the command has open; it
/// costs a walk through `/proc` and is called only if it matters.
fn warnings(
    taps: &[TapStatus],
    elapsed: Duration,
    open_taps: impl FnOnce() -> BTreeSet<String>,
) -> Vec<String> {
    let mut warnings: Vec<String> = taps
        .iter()
        .filter(|tap| matches!(tap.used, TapUse::Missing | TapUse::Foreign))
        .map(|tap| format!("TAP {} of the slot is {}", tap.tap, tap_use_text(tap.used)))
        .collect();
    let nobody_attached = !taps.is_empty() && taps.iter().all(|tap| tap.used == TapUse::Unused);
    if nobody_attached && elapsed >= GRACE {
        let open = open_taps();
        if !open.is_empty() {
            let open: Vec<String> = open.into_iter().collect();
            let expected: Vec<&str> = taps.iter().map(|tap| tap.tap.as_str()).collect();
            warnings.push(format!(
                "the command has TAP {} open, but not the slot's TAP {}: it took another one or made one of its \
                 own, and has no network; give it the name in SANDWIRE_TAP, in the namespace it was started in",
                open.join(", "),
                expected.join(", ")
            ));
        }
    }
    warnings
}

/// Names of the TAPs that a process and its descendants have open.
fn open_taps(root: i32) -> BTreeSet<String> {
    let parents: Vec<(i32, i32)> = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(|pid: i32| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            Some((pid, parent_of(&stat)?))
        })
        .collect();
    descendants(root, &parents)
        .into_iter()
        .flat_map(taps_of_process)
        .collect()
}

fn taps_of_process(pid: i32) -> Vec<String> {
    let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else {
        return Vec::new();
    };
    descriptors
        .filter_map(Result::ok)
        .filter(|entry| {
            fs::read_link(entry.path()).is_ok_and(|target| target.as_os_str() == "/dev/net/tun")
        })
        .filter_map(|entry| {
            let number = entry.file_name();
            let info =
                fs::read_to_string(format!("/proc/{pid}/fdinfo/{}", number.to_str()?)).ok()?;
            tap_of_fdinfo(&info)
        })
        .collect()
}

/// The interface that an open `/dev/net/tun` belongs to, if any.
pub(crate) fn tap_of_fdinfo(info: &str) -> Option<String> {
    let name = info
        .lines()
        .find_map(|line| line.strip_prefix("iff:"))?
        .trim();
    (!name.is_empty()).then(|| name.to_owned())
}

/// The parent in the text of `/proc/PID/stat`. The program's name, in parentheses, may hold anything.
fn parent_of(stat: &str) -> Option<i32> {
    let after_name = &stat[stat.rfind(')')? + 1..];
    after_name.split_whitespace().nth(1)?.parse().ok()
}

/// A process and all that descend from it, given pairs of process and parent.
fn descendants(root: i32, parents: &[(i32, i32)]) -> BTreeSet<i32> {
    let mut found = BTreeSet::from([root]);
    loop {
        let before = found.len();
        found.extend(
            parents
                .iter()
                .filter(|(_, parent)| found.contains(parent))
                .map(|(pid, _)| *pid)
                .collect::<Vec<_>>(),
        );
        if found.len() == before {
            return found;
        }
    }
}

#[cfg(test)]
mod tests {
    use sandwire_api::lease::TrafficCount;

    use super::*;

    fn tap(used: TapUse) -> TapStatus {
        TapStatus {
            tap: "vmtap0".to_owned(),
            used,
            egress: TrafficCount::default(),
            ingress: TrafficCount::default(),
        }
    }

    fn open(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn a_vmm_on_another_tap_is_warned_of_after_the_grace() {
        let taps = [tap(TapUse::Unused)];
        assert!(warnings(&taps, GRACE / 2, || open(&["tap0"])).is_empty());
        let warned = warnings(&taps, GRACE, || open(&["tap0"]));
        assert_eq!(warned.len(), 1);
        assert!(warned[0].contains("has TAP tap0 open, but not the slot's TAP vmtap0"));
    }

    #[test]
    fn a_command_without_any_tap_is_no_vmm() {
        assert!(warnings(&[tap(TapUse::Unused)], GRACE * 9, || open(&[])).is_empty());
    }

    #[test]
    fn a_vmm_on_its_tap_is_fine() {
        let look = || panic!("nothing to look for");
        assert!(warnings(&[tap(TapUse::Attached)], GRACE * 9, look).is_empty());
    }

    #[test]
    fn a_tap_that_is_not_ours_is_warned_of_at_once() {
        for used in [TapUse::Foreign, TapUse::Missing] {
            assert_eq!(
                warnings(&[tap(used)], Duration::ZERO, || open(&[])).len(),
                1
            );
        }
    }

    #[test]
    fn the_interface_is_read_from_fdinfo() {
        assert_eq!(
            tap_of_fdinfo("pos:\t0\nflags:\t02\niff:\tvmtap0\n").as_deref(),
            Some("vmtap0")
        );
        assert_eq!(tap_of_fdinfo("pos:\t0\niff:\t\n"), None);
    }

    #[test]
    fn a_parent_is_found_behind_any_program_name() {
        assert_eq!(parent_of("42 (a) b (c)) S 7 42 42 0"), Some(7));
        assert_eq!(parent_of("42 (cut"), None);
    }

    #[test]
    fn descendants_are_found_in_any_order() {
        let parents = [(5, 4), (4, 3), (3, 2), (9, 1)];
        assert_eq!(descendants(3, &parents), BTreeSet::from([3, 4, 5]));
    }
}

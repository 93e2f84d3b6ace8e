//! Who used the processors: the calling thread, and the whole machine.

use std::{fs, time::Duration};

use anyhow::{Context, Result};
use rustix::{
    process::{setpriority_process, setsid},
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
    time::{ClockId, clock_gettime},
};

/// Ticks of `/proc/stat` per second: `USER_HZ`, the same on every architecture that we know.
const TICKS_PER_SECOND: f64 = 100.0;

/// Processor time of the calling thread. It includes softirqs that ran on its back, unless the kernel
/// keeps account of them apart (`CONFIG_IRQ_TIME_ACCOUNTING`, off in most).
pub(crate) fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let nanoseconds = time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs();
    Duration::from_nanos(nanoseconds)
}

/// Keeps the calling thread on one processor: the last one for zero, the one before for one, and so
/// on, as far as there are any. The first does most of what a machine does by itself.
pub(crate) fn pin(from_last: usize) -> Result<()> {
    let allowed = sched_getaffinity(None).context("cannot ask for the processors")?;
    let usable: Vec<usize> = (0..CpuSet::MAX_CPU)
        .filter(|cpu| allowed.is_set(*cpu))
        .collect();
    let place = usable.len().saturating_sub(1 + from_last);
    let cpu = *usable.get(place).context("no processor")?;
    let mut only = CpuSet::new();
    only.set(cpu);
    sched_setaffinity(None, &only).context("cannot stay on a processor")
}

/// Lets the calling thread, and whatever it starts from now on, go before what else runs on the machine.
///
/// Niceness counts only within a session where the kernel groups processes by them (`autogroup` in
/// sched(7)); so this becomes one, and the niceness is the group's too.
pub(crate) fn go_first() {
    const NICENESS: i32 = -15;
    // Each is refused somewhere: then other programs disturb more, and that is all.
    let _ = setsid();
    let _ = fs::write("/proc/self/autogroup", NICENESS.to_string());
    let _ = setpriority_process(None, NICENESS);
}

/// Processor time of a thread outside the kernel and in it, by the text of its `stat` in `/proc`.
pub(crate) fn of_thread(stat: &str) -> Option<(Duration, Duration)> {
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut ticks = fields.split(' ').skip(11).map_while(|field| {
        let ticks: u32 = field.parse().ok()?;
        Some(Duration::from_secs_f64(f64::from(ticks) / TICKS_PER_SECOND))
    });
    Some((ticks.next()?, ticks.next()?))
}

/// Processor time of all threads of a process that still run.
pub(crate) fn process_time(pid: u32) -> Result<Duration> {
    let folder = format!("/proc/{pid}/task");
    let tasks = fs::read_dir(&folder).with_context(|| format!("cannot list {folder}"))?;
    let mut nanoseconds = 0_u64;
    for task in tasks {
        let path = task
            .with_context(|| format!("cannot list {folder}"))?
            .path()
            .join("schedstat");
        // A thread may end between being listed and being read.
        let text = fs::read_to_string(path).unwrap_or_default();
        let first = text.split(' ').next().and_then(|first| first.parse().ok());
        nanoseconds += first.unwrap_or(0);
    }
    Ok(Duration::from_nanos(nanoseconds))
}

/// Seconds that all processors together have spent since the machine was started.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Spent {
    /// In programs.
    pub(crate) user: f64,
    /// In the kernel, on behalf of programs.
    pub(crate) system: f64,
    /// In the kernel, for packets and timers.
    pub(crate) softirq: f64,
    /// In guests of KVM.
    pub(crate) guest: f64,
    /// Waiting for the hypervisor: time that nobody here had.
    pub(crate) stolen: f64,
}

impl Spent {
    /// Reads `/proc/stat`.
    pub(crate) fn read() -> Result<Self> {
        let text = fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
        Self::parse(&text).context("/proc/stat has another form")
    }

    /// The kernel counts a guest's time as its VMM's user time too; it is taken out here.
    fn parse(text: &str) -> Option<Self> {
        let line = text.lines().find(|line| line.starts_with("cpu "))?;
        let ticks: Vec<f64> = line
            .split_whitespace()
            .skip(1)
            .map_while(|field| field.parse().ok())
            .collect();
        let seconds = |place: usize| ticks.get(place).map(|ticks| ticks / TICKS_PER_SECOND);
        let guest = seconds(8)? + seconds(9)?;
        Some(Self {
            user: seconds(0)? + seconds(1)? - guest,
            system: seconds(2)?,
            softirq: seconds(5)? + seconds(6)?,
            guest,
            stolen: seconds(7)?,
        })
    }

    /// What was spent since `before`.
    pub(crate) fn since(&self, before: &Self) -> Self {
        Self {
            user: self.user - before.user,
            system: self.system - before.system,
            softirq: self.softirq - before.softirq,
            guest: self.guest - before.guest,
            stolen: self.stolen - before.stolen,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guests_time_is_not_its_vmms() {
        let text = "cpu  1000 100 500 9000 10 20 80 5 300 0\ncpu0 1 2 3\n";
        let spent = Spent::parse(text).unwrap();
        let expected = Spent {
            user: 8.0,
            system: 5.0,
            softirq: 1.0,
            guest: 3.0,
            stolen: 0.05,
        };
        assert_eq!(spent, expected);
        assert_eq!(Spent::parse("intr 5\n"), None);
    }

    #[test]
    fn a_threads_time_is_found_whatever_it_is_called() {
        let text = "7 (a) b (c) R 1 7 7 0 -1 64 10 0 0 0 150 25 3 4 20 0 1 0 99";
        let expected = (Duration::from_millis(1500), Duration::from_millis(250));
        assert_eq!(of_thread(text), Some(expected));
        assert_eq!(of_thread("7 (a) R 1 7"), None);
    }

    #[test]
    fn a_thread_that_works_spends_time() {
        let before = thread_time();
        let mut sum = 0_u64;
        while thread_time() < before + Duration::from_millis(2) {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert!(sum > 0 && Spent::read().unwrap().user > 0.0);
    }
}

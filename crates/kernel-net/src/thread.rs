//! How the kernel schedules a thread.

use std::io;

/// Lets everybody else go first: a thread that works in the background, for milliseconds at a
/// time and mostly inside the kernel, must not make a request wait.
///
/// Three things are asked for. `nice`, an absolute value, is the share when all processors are busy.
/// `SCHED_BATCH` says that waking up is no reason to interrupt another thread. A slice of 0.1 ms
/// (kernel 6.12 and later; ignored before) is how long the scheduler protects this thread from
/// one that wakes up; the default of about 3 ms would be the delay of the request.
///
/// # Errors
/// The kernel refuses, for example under a seccomp filter; the thread is scheduled as before.
pub fn work_in_background(nice: i32) -> io::Result<()> {
    set_scheduling(libc::SCHED_BATCH, nice)
}

/// Lets this thread answer a request as soon as it wakes up: with a slice of 0.1 ms (kernel 6.12 and
/// later) it may interrupt threads of the default slice, instead of waiting for the end of theirs.
/// Its share of the processors stays the same.
///
/// # Errors
/// The kernel refuses; the thread is scheduled as before.
pub fn answer_promptly() -> io::Result<()> {
    let nice = rustix::process::getpriority_process(None)?;
    set_scheduling(libc::SCHED_OTHER, nice)
}

fn set_scheduling(policy: i32, nice: i32) -> io::Result<()> {
    let attributes = libc::sched_attr {
        size: u32::try_from(size_of::<libc::sched_attr>()).expect("the size is 48"),
        sched_policy: u32::try_from(policy).expect("policies are small numbers"),
        sched_flags: 0,
        sched_nice: nice,
        sched_priority: 0,
        sched_runtime: SLICE_NANOSECONDS,
        sched_deadline: 0,
        sched_period: 0,
    };
    let (this_thread, flags) = (0, 0);
    // SAFETY: the kernel only reads `size` bytes of the attributes, which outlive the call.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_sched_setattr,
            this_thread,
            &raw const attributes,
            flags,
        )
    };
    if answer == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// The shortest that the kernel takes (`kernel/sched/syscalls.c`, `__setparam_fair`).
const SLICE_NANOSECONDS: u64 = 100_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_background_thread_is_scheduled_as_asked() {
        std::thread::spawn(|| {
            work_in_background(7).unwrap();
            let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
            // Fields 19 (nice) and 41 (policy) of proc(5), counted behind the name's bracket.
            let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
            assert_eq!((fields[19 - 3], fields[41 - 3]), ("7", "3"), "{stat}");
        })
        .join()
        .unwrap();
    }
}

//! The system calls that the service has a use for; all others are refused once everything is open.
//!
//! A path can't be looked at by a filter, but flags can: files are only ever opened to be created, so nothing
//! that exists can be read or overwritten. Nothing can be executed, and no thread or process started: all
//! threads are there by then.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter_all_threads,
};

use rustix::fs::OFlags;

use crate::{place::FOLDER_FLAGS, service::Seccomp, socket_file::LOOK_FLAGS, state::CREATE_FLAGS};

/// Why there is no filter.
#[derive(Debug, thiserror::Error)]
pub enum SeccompError {
    /// None can be made for this machine.
    #[error(
        "make the filter of system calls: {0}; start with it off if this machine is of another kind"
    )]
    Compile(seccompiler::BackendError),
    /// The kernel takes none.
    #[error("install the filter of system calls: {0}; start with it off if this kernel has none")]
    Install(seccompiler::Error),
}

/// Installs the filter in all threads of the process, for good.
///
/// # Errors
/// See [`SeccompError`].
pub fn install(mode: Seccomp) -> Result<(), SeccompError> {
    let refusal = match mode {
        Seccomp::Off => return Ok(()),
        Seccomp::Refuse => SeccompAction::Errno(libc::EPERM.unsigned_abs()),
        Seccomp::Kill => SeccompAction::KillProcess,
    };
    // The first one, as the other doesn't let a further one be installed.
    for program in [refusing_reads(), program(refusal)] {
        let program = program.map_err(SeccompError::Compile)?;
        apply_filter_all_threads(&program).map_err(SeccompError::Install)?;
    }
    Ok(())
}

/// Files that the C library would read. It does where a thread has much memory to give back (`overcommit_memory`), and takes a
/// refusal for a no; it must not be killed for it.
const READ_FLAGS: OFlags = OFlags::RDONLY.union(OFlags::CLOEXEC);

fn refusing_reads() -> Result<BpfProgram, seccompiler::BackendError> {
    let rules = BTreeMap::from([
        (libc::SYS_openat, vec![opening(2, READ_FLAGS)?]),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_open, vec![opening(1, READ_FLAGS)?]),
    ]);
    let refusal = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let architecture = TargetArch::try_from(std::env::consts::ARCH)?;
    SeccompFilter::new(rules, SeccompAction::Allow, refusal, architecture)?.try_into()
}

/// Opening a file with these flags and no others.
fn opening(argument: u8, flags: OFlags) -> Result<SeccompRule, seccompiler::BackendError> {
    // Added by some libraries, without a meaning on 64-bit machines.
    let mask = u64::from(u32::MAX) & !u64::from(OFlags::LARGEFILE.bits());
    only(
        argument,
        SeccompCmpOp::MaskedEq(mask),
        u64::from(flags.bits()),
    )
}

fn program(refusal: SeccompAction) -> Result<BpfProgram, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        ALLOWED.iter().map(|call| (*call, Vec::new())).collect();
    let exec = u64::from(libc::PROT_EXEC.unsigned_abs());
    // Memory of guests is mapped and threads have stacks, but nothing new becomes code.
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![only(2, SeccompCmpOp::MaskedEq(exec), 0)?]);
    }
    // A path that is only looked at gives nothing to read or write, and reading is refused by the other filter.
    let opened = |argument| -> Result<Vec<_>, _> {
        let flags = [CREATE_FLAGS, LOOK_FLAGS, FOLDER_FLAGS, READ_FLAGS];
        flags
            .into_iter()
            .map(|flags| opening(argument, flags))
            .collect()
    };
    rules.insert(libc::SYS_openat, opened(2)?);
    #[cfg(target_arch = "x86_64")]
    rules.insert(libc::SYS_open, opened(1)?);
    // A thread that is still starting gives itself its name.
    let set_name = u64::from(libc::PR_SET_NAME.unsigned_abs());
    rules.insert(libc::SYS_prctl, vec![only(0, SeccompCmpOp::Eq, set_name)?]);
    let families = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_VSOCK];
    let families: Result<Vec<_>, _> = families
        .iter()
        .map(|family| only(0, SeccompCmpOp::Eq, u64::from(family.unsigned_abs())))
        .collect();
    rules.insert(libc::SYS_socket, families?);
    let architecture = TargetArch::try_from(std::env::consts::ARCH)?;
    SeccompFilter::new(rules, refusal, SeccompAction::Allow, architecture)?.try_into()
}

fn only(
    argument: u8,
    operator: SeccompCmpOp,
    value: u64,
) -> Result<SeccompRule, seccompiler::BackendError> {
    let length = SeccompCmpArgLen::Dword;
    SeccompRule::new(vec![SeccompCondition::new(
        argument, length, operator, value,
    )?])
}

/// What is allowed with any arguments.
const ALLOWED: &[i64] = &[
    // Bytes.
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_preadv2,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_splice,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_close,
    // Sockets and pipes.
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_listen,
    libc::SYS_pipe2,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_socketpair,
    // Descriptors.
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_fchmod,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_ftruncate,
    libc::SYS_ioctl,
    libc::SYS_lseek,
    libc::SYS_readlinkat,
    // Files: sockets and what is remembered. Creating is above.
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_unlinkat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rename,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_unlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_stat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lstat,
    // Waiting.
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_io_destroy,
    libc::SYS_io_getevents,
    libc::SYS_io_submit,
    libc::SYS_nanosleep,
    libc::SYS_ppoll,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    // Memory.
    libc::SYS_brk,
    libc::SYS_madvise,
    libc::SYS_mremap,
    libc::SYS_munmap,
    // Threads and their end.
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_membarrier,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_tgkill,
];

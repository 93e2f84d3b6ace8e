//! Where what a VMM handed over ends: in threads that nobody waits for.
//!
//! The last one to let go of a guest's memory frees it, which takes the kernel 0.15 s per GiB; and that is us if the
//! VMM was killed. Descriptors of kinds that no VMM has a reason for ([`is_known`]) are worse: closing one may wait for
//! whatever its VMM likes (a file of its own FUSE, a TCP socket that lingers). So the threads that serve guests give
//! both away. A guest whose VMM's strange descriptors aren't closed yet gets no other VMM ([`Disposal::is_held_up`]);
//! so there are never more of them than one VMM can hand over at once.

use std::{
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::net::UnixListener,
    },
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc::{Sender, channel},
    },
    thread,
};

use rustix::{
    fs::{FileType, fcntl_get_seals, fstat, readlinkat_raw},
    io::{Errno, ReadWriteFlags, preadv2},
    net::{Shutdown, SocketFlags, accept_with, shutdown},
};

/// The way to these threads, for what came from one guest's VMMs. Without threads, all of it ends on the spot.
#[derive(Clone, Debug, Default)]
pub struct Disposal {
    threads: Option<Threads>,
    /// Strange descriptors of that guest that are being closed.
    strange: Arc<AtomicUsize>,
    /// Its descriptors of memory, and mappings, that wait for their end.
    memory: Arc<AtomicUsize>,
}

/// Most descriptors and mappings of a guest's memory that may wait for their end; its VMM has to wait then. More than one
/// that means well hands over at once.
const WAITING_MAX: usize = 2048;

#[derive(Clone, Debug)]
struct Threads {
    memory: Sender<Remains>,
    strange: Sender<Remains>,
}

/// What ends when it is dropped.
pub(crate) type Remains = Box<dyn Send>;

/// Memory that nothing points into any more.
struct Mapped {
    start: *mut u8,
    size: usize,
}

// SAFETY: whoever has it may unmap it, from any thread; nothing else is done with it.
unsafe impl Send for Mapped {}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: see `Disposal::unmap`, the only place where one is made.
        unsafe { libc::munmap(self.start.cast(), self.size) };
    }
}

/// So many things that wait.
struct Counted {
    counter: Arc<AtomicUsize>,
    things: usize,
}

impl Counted {
    fn new(counter: &Arc<AtomicUsize>, things: usize) -> Self {
        counter.fetch_add(things, Ordering::Relaxed);
        Self {
            counter: Arc::clone(counter),
            things,
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.counter.fetch_sub(self.things, Ordering::Release);
    }
}

impl Disposal {
    /// Starts the threads, for the worker of that number. They end when nobody can give them anything any more.
    ///
    /// # Errors
    /// No threads can be had.
    pub fn spawn(worker: usize) -> io::Result<Self> {
        let start = |name: String| -> io::Result<Sender<Remains>> {
            let (sender, receiver) = channel::<Remains>();
            let drop_all = move || receiver.into_iter().for_each(drop);
            thread::Builder::new().name(name).spawn(drop_all)?;
            Ok(sender)
        };
        let threads = Threads {
            memory: start(format!("free-{worker}"))?,
            strange: start(format!("close-{worker}"))?,
        };
        Ok(Self {
            threads: Some(threads),
            strange: Arc::default(),
            memory: Arc::default(),
        })
    }

    /// The same threads, for another guest.
    #[must_use]
    pub fn for_another(&self) -> Self {
        Self {
            threads: self.threads.clone(),
            strange: Arc::default(),
            memory: Arc::default(),
        }
    }

    /// Whether strange descriptors aren't closed yet, or too much memory waits.
    #[must_use]
    pub fn is_held_up(&self) -> bool {
        self.strange.load(Ordering::Acquire) != 0 || self.is_full()
    }

    /// Whether a guest's VMM hands memory over faster than it is freed.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.memory.load(Ordering::Acquire) >= WAITING_MAX
    }

    /// Closes what came from a VMM. Whether all of it was what a VMM has a reason to hand over.
    pub fn close(&self, descriptors: Vec<OwnedFd>) -> bool {
        let (known, strange): (Vec<_>, Vec<_>) = descriptors
            .into_iter()
            // Which is nothing to close.
            .filter(|fd| !is_eventfd(fd.as_fd()))
            .partition(|fd| is_memory(fd.as_fd()));
        if !known.is_empty() {
            let counted = Counted::new(&self.memory, known.len());
            self.give(|threads| &threads.memory, (known, counted));
        }
        let all_known = strange.is_empty();
        if !all_known {
            self.close_strange(strange);
        }
        all_known
    }

    /// Closes a listener of VMMs. Whoever wasn't accepted may have sent descriptors already, and they end with it.
    pub fn close_listener(&self, listener: UnixListener) {
        let listener = OwnedFd::from(listener);
        // Nobody is let in any more.
        let _ = shutdown(&listener, Shutdown::Both);
        let first = accept_with(&listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC);
        // Where nobody waits there is nothing to wait for, and it needn't wait behind what others left.
        if !matches!(first, Err(Errno::AGAIN | Errno::INVAL)) {
            self.close_strange(first.into_iter().chain([listener]).collect());
        }
    }

    /// Closes what may make whoever does it wait. Until it is done, the guest is held up.
    pub fn close_strange(&self, strange: Vec<OwnedFd>) {
        let counted = Counted::new(&self.strange, 1);
        self.give(|threads| &threads.strange, (strange, counted));
    }

    /// Unmaps a guest's memory.
    ///
    /// # Safety
    /// It is a mapping of the caller's that nothing points into.
    pub unsafe fn unmap(&self, start: *mut u8, size: usize) {
        let mapped = Mapped { start, size };
        let counted = Counted::new(&self.memory, 1);
        self.give(|threads| &threads.memory, (mapped, counted));
    }

    /// One whose threads do nothing: all that they were given is where it says.
    #[cfg(test)]
    pub(crate) fn stuck() -> (Self, std::sync::mpsc::Receiver<Remains>) {
        let (memory, receiver) = channel();
        let strange = memory.clone();
        let disposal = Self {
            threads: Some(Threads { memory, strange }),
            ..Self::default()
        };
        (disposal, receiver)
    }

    fn give(&self, which: impl Fn(&Threads) -> &Sender<Remains>, remains: impl Send + 'static) {
        if let Some(threads) = &self.threads {
            // A thread that isn't there any more leaves it to us.
            drop(which(threads).send(Box::new(remains)));
        }
    }
}

/// Whether a VMM has a reason to hand this over: an eventfd, or memory. Doesn't ask whoever is behind it.
#[must_use]
pub fn is_known(fd: BorrowedFd<'_>) -> bool {
    is_eventfd(fd) || is_memory(fd)
}

/// Whether it is an eventfd.
#[must_use]
pub fn is_eventfd(fd: BorrowedFd<'_>) -> bool {
    const NAME: &[u8] = b"anon_inode:[eventfd]";
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let mut name = [0; NAME.len() + 1];
    let read = readlinkat_raw(rustix::fs::CWD, path, &mut name);
    read.is_ok_and(|length| &name[..length] == NAME)
}

/// Whether its pages come from memory, or from a file system of this host that can say that it would have to wait.
/// FUSE and network file systems can't; they are refused without a word to them.
fn is_memory(fd: BorrowedFd<'_>) -> bool {
    // memfd, tmpfs and hugetlbfs have seals.
    if fcntl_get_seals(fd).is_ok() {
        return true;
    }
    let mut byte = [0];
    let mut bytes = [io::IoSliceMut::new(&mut byte)];
    let could = match preadv2(fd, &mut bytes, 0, ReadWriteFlags::NOWAIT) {
        Ok(_) => true,
        Err(error) => error == Errno::AGAIN,
    };
    could
        && fstat(fd)
            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::unix::net::UnixStream};

    use rustix::{
        event::{EventfdFlags, epoll, eventfd},
        fs::{MemfdFlags, memfd_create},
        time::{TimerfdClockId, TimerfdFlags, timerfd_create},
    };

    use super::*;
    use crate::memory::{Memory, Placing};

    #[test]
    fn eventfds_memory_and_local_files_are_known_and_nothing_else() {
        let file = || tempfile::tempfile().expect("a file");
        let known: [OwnedFd; 3] = [
            eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"),
            memfd_create("guest", MemfdFlags::CLOEXEC).expect("a memfd"),
            file().into(),
        ];
        for fd in known {
            assert!(is_known(fd.as_fd()), "{fd:?}");
        }
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC);
        let strange: [OwnedFd; 6] = [
            epoll::create(epoll::CreateFlags::CLOEXEC).expect("an epoll instance"),
            timer.expect("a timer"),
            rustix::pipe::pipe().expect("a pipe").0,
            UnixStream::pair().expect("a pair").0.into(),
            File::open("/dev/zero").expect("opening it").into(),
            File::open("/proc/self/status").expect("opening it").into(),
        ];
        for fd in strange {
            assert!(!is_known(fd.as_fd()), "{fd:?}");
        }
    }

    #[test]
    fn what_waits_for_its_end_is_bounded() {
        let (disposal, receiver) = Disposal::stuck();
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).expect("a memfd");
        for _ in 0..WAITING_MAX {
            assert!(!disposal.is_full());
            assert!(disposal.close(vec![file.try_clone().expect("a descriptor")]));
        }
        assert!(disposal.is_full() && disposal.is_held_up());
        assert!(!disposal.for_another().is_held_up());
        drop(receiver);
        assert!(!disposal.is_held_up());
    }

    #[test]
    fn memory_is_unmapped_by_the_thread_and_not_by_who_is_done_with_it() {
        const NAME: &str = "memory-that-another-thread-unmaps";
        let (disposal, receiver) = Disposal::stuck();
        let is_mapped = || {
            let maps = std::fs::read_to_string("/proc/self/maps").expect("the mappings");
            maps.contains(NAME)
        };
        let file = File::from(memfd_create(NAME, MemfdFlags::CLOEXEC).expect("a memfd"));
        file.set_len(0x1000).expect("growing it");
        let placing = Placing {
            guest: 0,
            user: 0,
            size: 0x1000,
            offset: 0,
        };
        let mut memory = Memory::new(disposal);
        memory.add(placing, &file).expect("mapping");
        memory.clear();
        drop(memory);
        assert!(is_mapped());
        drop(receiver);
        assert!(!is_mapped());
    }
}

//! Guest memory that its VMM takes away under us.
//!
//! A VMM may make the file of a guest's memory shorter at any time, and whoever then touches the mapping gets
//! SIGBUS. One guest's VMM must not end the service of all others; so the signal's handler puts empty memory
//! in the place of the region that is gone, and marks the region. Whoever serves the guest looks at the mark
//! and lets go of that VMM. System calls on such memory fail with EFAULT, without a signal.
//!
//! A SIGBUS anywhere else ends the process, as it would have.

use std::{
    io,
    mem::MaybeUninit,
    ptr,
    sync::{
        Once,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

/// Most regions of all guests together.
const REGIONS: usize = 16384;

/// Of these, so many are for guests that have few: those with many can't take the last ones.
const FOR_FEW: usize = REGIONS / 2;

/// One region. Claimed by `taken`; `start` is 0 until all of it is known.
struct Entry {
    taken: AtomicBool,
    start: AtomicUsize,
    size: AtomicUsize,
    gone: AtomicBool,
}

static ENTRIES: [Entry; REGIONS] = [const {
    Entry {
        taken: AtomicBool::new(false),
        start: AtomicUsize::new(0),
        size: AtomicUsize::new(0),
        gone: AtomicBool::new(false),
    }
}; REGIONS];

static INSTALLED: Once = Once::new();

/// A mapping that is watched over, as long as this lives.
#[derive(Debug)]
pub struct Watched {
    index: usize,
}

impl Watched {
    /// Watches over a mapping of guest memory; whether its guest has `few` of them.
    ///
    /// # Errors
    /// When there are too many.
    ///
    /// # Safety
    /// From now until the value is dropped, the range is a mapping of the caller that nothing but guest
    /// memory lies in: it may be replaced by empty memory at any time.
    pub unsafe fn new(start: *mut u8, size: usize, few: bool) -> io::Result<Self> {
        INSTALLED.call_once(install);
        let free = |entry: &Entry| {
            let claim =
                entry
                    .taken
                    .compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed);
            claim.is_ok()
        };
        let first = if few { 0 } else { FOR_FEW };
        let index = first
            + ENTRIES[first..]
                .iter()
                .position(free)
                .ok_or(io::ErrorKind::OutOfMemory)?;
        let entry = &ENTRIES[index];
        entry.size.store(size, Ordering::Relaxed);
        entry.gone.store(false, Ordering::Relaxed);
        entry.start.store(start.addr(), Ordering::Release);
        Ok(Self { index })
    }

    /// Whether it was taken away.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        ENTRIES[self.index].gone.load(Ordering::Relaxed)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let entry = &ENTRIES[self.index];
        entry.start.store(0, Ordering::Release);
        entry.taken.store(false, Ordering::Release);
    }
}

fn install() {
    // SAFETY: the handler does only what a handler may: atomics and system calls. All zeros are a valid
    // action without flags and mask.
    let installed = unsafe {
        let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
        action.sa_sigaction = on_bus_error as *const () as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut())
    };
    if installed != 0 {
        let error = io::Error::last_os_error();
        tracing::error!(%error, "a VMM that shortens its guest's memory will end this service");
    }
}

extern "C" fn on_bus_error(
    _signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    // SAFETY: with SA_SIGINFO the kernel passes a valid structure, whose address field is set for SIGBUS.
    let address = unsafe { (*info).si_addr() }.addr();
    for entry in &ENTRIES {
        let start = entry.start.load(Ordering::Acquire);
        let size = entry.size.load(Ordering::Relaxed);
        if start != 0 && address.wrapping_sub(start) < size {
            entry.gone.store(true, Ordering::Relaxed);
            // SAFETY: `Watched::new`'s caller has promised that the range may be replaced. The thread that
            // touched it is the one that serves the guest, so it isn't being unmapped now.
            let mapped = unsafe {
                libc::mmap(
                    ptr::with_exposed_provenance_mut(start),
                    size,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
                    -1,
                    0,
                )
            };
            if mapped != libc::MAP_FAILED {
                return;
            }
        }
    }
    // Not ours: happen again, without a handler.
    // SAFETY: restoring the default action is allowed in a handler.
    unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
}

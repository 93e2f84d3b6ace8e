//! How a guest is interrupted: by an eventfd that its VMM has made, without waiting for that VMM.
//!
//! A `write` to an eventfd waits while its counter is full, and both counter and mode are the VMM's, which may change
//! them between a look and the write. The kernel itself never waits when it signals one. So it is asked to: an
//! asynchronous read of nothing (`io_submit`), upon whose end it signals the eventfd that goes with it. It is over when
//! the call returns, and takes half a microsecond more than `write`.
//!
//! On a kernel without asynchronous I/O, or whose `fs.aio-max-nr` is used up, it is a `write` to what was made
//! non-blocking.

use std::{
    cell::Cell,
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    rc::Rc,
};

use rustix::{
    fs::{MemfdFlags, OFlags, fcntl_getfl, fcntl_setfl, memfd_create},
    io::Errno,
};

/// Signals that may be under way, or not asked about, at once.
const ROOM: usize = 64;

/// What interrupts guests; one per thread that serves some.
#[derive(Debug, Default)]
pub struct Bell {
    signals: Option<Signals>,
}

/// A VMM's eventfd, with what rings it.
#[derive(Debug)]
pub struct Call {
    file: File,
    bell: Rc<Bell>,
}

impl Bell {
    /// With asynchronous I/O, if the kernel has some for us.
    #[must_use]
    pub fn new() -> Self {
        let signals = Signals::new();
        if let Err(error) = &signals {
            tracing::warn!(
                %error,
                "no asynchronous I/O (fs.aio-max-nr, CONFIG_AIO): a VMM whose eventfd blocks can hold up other guests"
            );
        }
        Self {
            signals: signals.ok(),
        }
    }
}

impl Call {
    /// Takes over what a VMM has handed over.
    #[must_use]
    pub fn new(file: File, bell: &Rc<Bell>) -> Self {
        if bell.signals.is_none() {
            let nonblocking =
                fcntl_getfl(&file).and_then(|flags| fcntl_setfl(&file, flags | OFlags::NONBLOCK));
            if let Err(error) = nonblocking {
                tracing::debug!(fd = file.as_raw_fd(), %error, "a call descriptor stays as it is");
            }
        }
        Self {
            file,
            bell: Rc::clone(bell),
        }
    }

    /// Interrupts the guest.
    pub fn ring(&self) {
        match &self.bell.signals {
            Some(signals) => signals.signal(self.file.as_fd()),
            None => {
                // A full counter means that the guest is being told already; a closed one that nobody is there.
                let _ = rustix::io::write(&self.file, &1_u64.to_ne_bytes());
            }
        }
    }
}

/// The kernel's side of it.
#[derive(Debug)]
struct Signals {
    context: libc::c_ulong,
    /// What nothing is read from.
    empty: OwnedFd,
    /// Since the kernel was last asked about them.
    sent: Cell<usize>,
}

/// `struct iocb` of `linux/aio_abi.h`.
#[repr(C)]
#[derive(Default)]
struct Request {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    file: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    eventfd: u32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Outcome {
    data: u64,
    request: u64,
    result: [i64; 2],
}

/// IOCB_CMD_PREAD and IOCB_FLAG_RESFD.
const READ: u16 = 0;
const WITH_EVENTFD: u32 = 1;

impl Signals {
    fn new() -> io::Result<Self> {
        let empty = memfd_create("nothing", MemfdFlags::CLOEXEC)?;
        let mut context: libc::c_ulong = 0;
        // SAFETY: the kernel writes the context's number to this variable, which lives through the call.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, 2 * ROOM, &raw mut context) };
        if made != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            context,
            empty,
            sent: Cell::new(0),
        })
    }

    fn signal(&self, eventfd: BorrowedFd<'_>) {
        if self.sent.get() >= ROOM {
            self.forget();
        }
        self.sent.set(self.sent.get() + 1);
        // What is no eventfd is refused: nobody listens there.
        if self.submit(eventfd) == Err(Errno::AGAIN) {
            self.forget();
            let _ = self.submit(eventfd);
        }
    }

    fn submit(&self, eventfd: BorrowedFd<'_>) -> Result<(), Errno> {
        let number = |fd: BorrowedFd<'_>| u32::try_from(fd.as_raw_fd()).unwrap_or(u32::MAX);
        let mut request = Request {
            opcode: READ,
            file: number(self.empty.as_fd()),
            flags: WITH_EVENTFD,
            eventfd: number(eventfd),
            ..Request::default()
        };
        let mut requests = [&raw mut request];
        // SAFETY: one request, which lives through the call; the kernel keeps no pointer to it, and reads no bytes.
        let sent = unsafe {
            libc::syscall(
                libc::SYS_io_submit,
                self.context,
                1_usize,
                requests.as_mut_ptr(),
            )
        };
        match sent {
            1 => Ok(()),
            _ => Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)),
        }
    }

    /// Makes room: nobody wants to know how it went.
    fn forget(&self) {
        let mut outcomes = [Outcome::default(); 4 * ROOM];
        let now = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: there is room for as many outcomes as are asked for, and both live through the call.
        unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.context,
                0_usize,
                outcomes.len(),
                outcomes.as_mut_ptr(),
                &raw const now,
            )
        };
        self.sent.set(0);
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // SAFETY: the context is ours, and nothing of it is under way.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn rung(call: &OwnedFd) -> u64 {
        let mut counter = [0; 8];
        rustix::io::read(call, &mut counter).expect("the counter");
        u64::from_ne_bytes(counter)
    }

    fn call(bell: &Rc<Bell>, fd: &OwnedFd) -> Call {
        Call::new(File::from(fd.try_clone().expect("a descriptor")), bell)
    }

    #[test]
    fn each_ring_counts_also_after_there_was_no_more_room() {
        let bells = [Bell::new(), Bell::default()];
        assert!(
            bells[0].signals.is_some(),
            "this kernel has asynchronous I/O"
        );
        for bell in bells.map(Rc::new) {
            let eventfd = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
            let call = call(&bell, &eventfd);
            for _ in 0..10_000 {
                call.ring();
            }
            assert_eq!(rung(&eventfd), 10_000);
        }
    }

    #[test]
    fn what_is_full_and_blocks_or_is_no_eventfd_is_not_waited_for() {
        let bell = Rc::new(Bell::new());
        let full = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        let call_full = call(&bell, &full);
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).expect("filling it");
        let (_reader, pipe) = rustix::pipe::pipe().expect("a pipe");
        let call_pipe = call(&bell, &pipe);
        for _ in 0..3 * ROOM {
            call_full.ring();
            call_pipe.ring();
        }
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        call(&bell, &eventfd).ring();
        assert_eq!(rung(&eventfd), 1);
    }
}

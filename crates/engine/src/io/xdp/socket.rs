//! An AF_XDP socket: its memory, its four rings, and the frames that travel on them.
//!
//! The memory is cut into buffers of one size. A buffer belongs to the kernel while its address is on the fill ring,
//! or on the send ring and not yet on the completion ring; otherwise to us. Half of the buffers only receive: read,
//! they go back on the fill ring at once. The others only send, and wait in a stack, so that the one used last, which
//! is the likeliest to be in the cache, is used next. Frames are copied between these buffers and the engine's
//! packets: the engine's pool stays one for all apps, and a packet that waits for long keeps no buffer from the kernel.
//!
//! The two rings that we write have twice as many entries as there are buffers to write. The kernel shows a received
//! frame first and only then that it has taken the buffer off the fill ring (`xsk_flush` in `net/xdp/xsk.c`): in
//! between, the frame read and its buffer given back, an entry of the past and one of the future name the same buffer.

#![allow(
    unsafe_code,
    reason = "buffers are in memory that the kernel writes too"
)]

use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::thread;
use std::time::Duration;

use sandwire_kernel_net::interface::InterfaceIndex;

use super::ring::{Consumer, Mapping, Producer};

/// How many times, a millisecond apart, a queue is asked for that is taken: a grace period, a task of the kernel that waits
/// its turn, and then for the lock of all network configuration, which others may hold for seconds, take less.
const RELEASE_TRIES: u32 = 5000;

/// How a socket came to be bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bound {
    pub(super) zero_copy: bool,
    pub(super) need_wakeup: bool,
}

/// What the kernel did when it was asked to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sent {
    /// It took all, or will.
    All,
    /// It has no room for now.
    Later,
    /// The interface is down.
    Down,
    /// The interface is gone.
    Gone,
}

/// Sizes of a socket.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    /// Buffers to receive with, as many to send with, and entries of each ring that the kernel writes; a power of
    /// two.
    pub(super) ring: u32,
    /// Bytes of a buffer, 2048 or 4096.
    pub(super) buffer_bytes: u32,
}

impl Sizes {
    /// Entries of each ring that we write.
    fn written_ring(self) -> u32 {
        self.ring * 2
    }
}

/// A bound socket.
#[derive(Debug)]
pub(super) struct Socket {
    fill: Producer<u64>,
    completion: Consumer<u64>,
    receive: Consumer<libc::xdp_desc>,
    send: Producer<libc::xdp_desc>,
    /// Buffers of ours to send with.
    free: Vec<u64>,
    sizes: Sizes,
    bound: Bound,
    /// Frames handed to the kernel that it has refused to send since.
    pub(super) refused: u64,
    /// Addresses from the kernel that lie outside of the memory.
    pub(super) invalid: u64,
    /// Calls that send a whole ring.
    calls_max: u32,
    /// Closed before the memory goes.
    descriptor: OwnedFd,
    memory: Mapping,
}

impl Socket {
    /// Makes a socket and binds it to a queue of an interface of the thread's namespace.
    pub(super) fn bind(
        interface: InterfaceIndex,
        queue: u32,
        sizes: Sizes,
        may_zero_copy: bool,
    ) -> Result<Self, (&'static str, io::Error)> {
        let step = |name| move |error| (name, error);
        let descriptor = open().map_err(step("open a socket"))?;
        let socket = descriptor.as_fd();
        let buffers = sizes.ring * 2;
        let bytes = buffers as usize * sizes.buffer_bytes as usize;
        let memory = Mapping::anonymous(bytes).map_err(step("map memory for buffers"))?;
        register(socket, &memory, sizes.buffer_bytes).map_err(step("register buffers"))?;
        for (ring, entries) in [
            (libc::XDP_UMEM_FILL_RING, sizes.written_ring()),
            (libc::XDP_UMEM_COMPLETION_RING, sizes.ring),
            (libc::XDP_RX_RING, sizes.ring),
            (libc::XDP_TX_RING, sizes.written_ring()),
        ] {
            set(socket, libc::SOL_XDP, ring, &entries).map_err(step("make rings"))?;
        }
        let mut this = Rings::map(socket, sizes)
            .map_err(step("map rings"))?
            .into_socket(sizes, memory, descriptor);
        this.relax_limits();
        this.bound = bind_in_time(this.descriptor.as_fd(), interface, queue, may_zero_copy)
            .map_err(step("bind the socket"))?;
        this.share_buffers();
        Ok(this)
    }

    /// For a map of sockets.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// How it is bound.
    pub(super) fn bound(&self) -> Bound {
        self.bound
    }

    /// The longest frame that can come in.
    pub(super) fn received_bytes_max(&self) -> usize {
        (self.sizes.buffer_bytes - RECEIVE_HEADROOM) as usize
    }

    /// Frames that came in and wait.
    pub(super) fn received(&mut self) -> usize {
        self.receive.waiting() as usize
    }

    /// Reads the oldest of the frames that the last call of [`Socket::received`] counted. What isn't a frame of ours
    /// reads as empty.
    #[inline]
    pub(super) fn read(&mut self, read: impl FnOnce(&[u8])) -> bool {
        let Some(descriptor) = self.receive.read() else {
            return false;
        };
        let start = descriptor.addr;
        let end = start.checked_add(u64::from(descriptor.len));
        if end.is_none_or(|end| end > self.memory.bytes() as u64) {
            self.invalid += 1;
            read(&[]);
            return true;
        }
        // SAFETY: it is inside the memory, which is mapped as long as we live, and the kernel gave it to us by the
        // ring; it gets it back below, after the reader is done.
        let frame = unsafe {
            let address = self.memory.address().add(index_of(start));
            std::slice::from_raw_parts(address.as_ptr(), descriptor.len as usize)
        };
        read(frame);
        let buffer = start & !u64::from(self.sizes.buffer_bytes - 1);
        // Twice as long as there are receiving buffers: at most one entry of each waits, and one is of the past.
        let has_room = self.fill.write(buffer);
        debug_assert!(has_room, "the fill ring is full");
        true
    }

    /// Gives the kernel back what was read.
    pub(super) fn finish_reading(&mut self) {
        self.receive.release();
        self.fill.publish();
        if self.bound.need_wakeup && self.fill.wants_wakeup() {
            // SAFETY: without a buffer nothing is written.
            unsafe {
                let flags = libc::MSG_DONTWAIT;
                libc::recvfrom(
                    self.descriptor.as_raw_fd(),
                    ptr::null_mut(),
                    0,
                    flags,
                    ptr::null_mut(),
                    ptr::null_mut(),
                );
            }
        }
    }

    /// Takes back the buffers of frames that were sent; how many may be written.
    pub(super) fn reclaim(&mut self) -> usize {
        if self.completion.waiting() > 0 {
            while let Some(address) = self.completion.read() {
                if address < self.memory.bytes() as u64 {
                    self.free
                        .push(address & !u64::from(self.sizes.buffer_bytes - 1));
                } else {
                    self.invalid += 1;
                }
            }
            self.completion.release();
        }
        self.free.len()
    }

    /// Whether a frame of that length can be sent: the kernel keeps the buffer of one that can't.
    pub(super) fn is_length_possible(&self, length: usize) -> bool {
        (ETHERNET_HEADER..=self.sizes.buffer_bytes as usize).contains(&length)
    }

    /// Puts a frame on the send ring. False if its length is impossible, or no buffer is free.
    #[inline]
    pub(super) fn write(&mut self, frame: &[u8]) -> bool {
        if !self.is_length_possible(frame.len()) {
            return false;
        }
        let Some(buffer) = self.free.pop() else {
            return false;
        };
        // SAFETY: the buffer is inside the memory, long enough, and on the stack because it is ours alone.
        unsafe {
            let address = self.memory.address().add(index_of(buffer));
            ptr::copy_nonoverlapping(frame.as_ptr(), address.as_ptr(), frame.len());
        }
        #[expect(clippy::cast_possible_truncation, reason = "at most a buffer's size")]
        let entry = libc::xdp_desc {
            addr: buffer,
            len: frame.len() as u32,
            options: 0,
        };
        // Twice as long as there are sending buffers: at most one entry of each waits, and one is of the past.
        let has_room = self.send.write(entry);
        debug_assert!(has_room, "the send ring is full");
        true
    }

    /// Frames on the send ring that the kernel has not taken.
    pub(super) fn unsent(&self) -> usize {
        self.send.waiting() as usize
    }

    /// Has the kernel send what was written.
    pub(super) fn flush(&mut self) -> Sent {
        self.send.publish();
        if self.bound.need_wakeup && !self.send.wants_wakeup() {
            return Sent::All;
        }
        let mut calls = self.calls_max;
        while calls > 0 && self.send.waiting() > 0 {
            match self.kick().map_err(|error| error.raw_os_error()) {
                Ok(()) => return Sent::All,
                Err(Some(libc::EINTR)) => {}
                // One frame that it has taken, and not sent.
                Err(Some(libc::EBUSY)) => self.refused += 1,
                Err(Some(libc::ENETDOWN)) => return Sent::Down,
                Err(Some(libc::ENXIO | libc::ENODEV)) => return Sent::Gone,
                // Enough for one call, or no memory. How far it came isn't always to be seen.
                Err(_) => calls -= 1,
            }
        }
        if self.send.waiting() == 0 {
            Sent::All
        } else {
            Sent::Later
        }
    }

    /// Whether the interface is up, without waiting for a frame to be sent.
    pub(super) fn state(&self) -> Sent {
        match self.kick().map_err(|error| error.raw_os_error()) {
            Err(Some(libc::ENETDOWN)) => Sent::Down,
            Err(Some(libc::ENXIO | libc::ENODEV)) => Sent::Gone,
            _ => Sent::All,
        }
    }

    /// What the kernel has counted.
    pub(super) fn statistics(&self) -> libc::xdp_statistics {
        // SAFETY: all zero is a value of this structure of integers.
        let mut statistics: libc::xdp_statistics = unsafe { mem::zeroed() };
        // A kernel that doesn't tell leaves zeros.
        let _ = get(self.descriptor(), libc::XDP_STATISTICS, &mut statistics);
        statistics
    }

    fn kick(&self) -> io::Result<()> {
        // SAFETY: without a buffer nothing is read.
        let answer = unsafe {
            let flags = libc::MSG_DONTWAIT;
            libc::sendto(
                self.descriptor.as_raw_fd(),
                ptr::null(),
                0,
                flags,
                ptr::null(),
                0,
            )
        };
        if answer < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Lets one call send a whole ring, and receivers be slow; older kernels and processes without
    /// the right to it do with less.
    fn relax_limits(&mut self) {
        let budget = self.sizes.ring;
        if set(
            self.descriptor(),
            libc::SOL_XDP,
            XDP_MAX_TX_SKB_BUDGET,
            &budget,
        )
        .is_ok()
        {
            self.calls_max = 1;
        }
        let _ = set(
            self.descriptor(),
            libc::SOL_SOCKET,
            libc::SO_SNDBUFFORCE,
            &SEND_BUFFER,
        );
    }

    /// Gives one half of the buffers to the kernel to receive into, and keeps the other.
    fn share_buffers(&mut self) {
        let address = |buffer| u64::from(buffer) * u64::from(self.sizes.buffer_bytes);
        for buffer in 0..self.sizes.ring {
            let has_room = self.fill.write(address(buffer));
            debug_assert!(has_room, "a fresh ring has room for its size");
        }
        self.fill.publish();
        let sending = self.sizes.ring..self.sizes.ring * 2;
        self.free = sending.rev().map(address).collect();
    }
}

/// The rings of a socket that isn't bound yet.
struct Rings {
    fill: Producer<u64>,
    completion: Consumer<u64>,
    receive: Consumer<libc::xdp_desc>,
    send: Producer<libc::xdp_desc>,
}

impl Rings {
    fn map(socket: BorrowedFd<'_>, sizes: Sizes) -> io::Result<Self> {
        // SAFETY: all zero is a value of this structure of integers.
        let mut offsets: libc::xdp_mmap_offsets = unsafe { mem::zeroed() };
        get(socket, libc::XDP_MMAP_OFFSETS, &mut offsets)?;
        let map = |page, ring: &libc::xdp_ring_offset, entry: usize, entries: u32| {
            let start = usize::try_from(ring.desc).map_err(io::Error::other)?;
            Mapping::of(socket, page, start + entry * entries as usize)
        };
        let frame = size_of::<libc::xdp_desc>();
        let address = size_of::<u64>();
        let (ours, theirs) = (sizes.written_ring(), sizes.ring);
        let misfit = || io::Error::other("the kernel's rings have an unknown shape");
        let fill = map(PAGE_FILL, &offsets.fr, address, ours)?;
        let completion = map(PAGE_COMPLETION, &offsets.cr, address, theirs)?;
        let receive = map(libc::XDP_PGOFF_RX_RING, &offsets.rx, frame, theirs)?;
        let send = map(libc::XDP_PGOFF_TX_RING, &offsets.tx, frame, ours)?;
        Ok(Self {
            fill: Producer::new(fill, &offsets.fr, ours).ok_or_else(misfit)?,
            completion: Consumer::new(completion, &offsets.cr, theirs).ok_or_else(misfit)?,
            receive: Consumer::new(receive, &offsets.rx, theirs).ok_or_else(misfit)?,
            send: Producer::new(send, &offsets.tx, ours).ok_or_else(misfit)?,
        })
    }

    fn into_socket(self, sizes: Sizes, memory: Mapping, descriptor: OwnedFd) -> Socket {
        Socket {
            fill: self.fill,
            completion: self.completion,
            receive: self.receive,
            send: self.send,
            free: Vec::new(),
            sizes,
            bound: Bound {
                zero_copy: false,
                need_wakeup: false,
            },
            refused: 0,
            invalid: 0,
            calls_max: 1 + sizes.ring / SENT_PER_CALL,
            descriptor,
            memory,
        }
    }
}

fn open() -> io::Result<OwnedFd> {
    // SAFETY: a call without addresses.
    let descriptor = unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

fn register(socket: BorrowedFd<'_>, memory: &Mapping, buffer_bytes: u32) -> io::Result<()> {
    let registration = libc::xdp_umem_reg {
        addr: memory.address().addr().get() as u64,
        len: memory.bytes() as u64,
        chunk_size: buffer_bytes,
        headroom: 0,
        flags: 0,
        tx_metadata_len: 0,
    };
    set(socket, libc::SOL_XDP, libc::XDP_UMEM_REG, &registration)
}

/// Binds, also right after another socket was closed: the kernel lets go of its queue later, in a task of its own
/// (`xp_release_deferred`).
#[expect(
    clippy::disallowed_methods,
    reason = "nothing tells when the queue is free"
)]
fn bind_in_time(
    socket: BorrowedFd<'_>,
    interface: InterfaceIndex,
    queue: u32,
    may_zero_copy: bool,
) -> io::Result<Bound> {
    for _ in 0..RELEASE_TRIES {
        match bind(socket, interface, queue, may_zero_copy) {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                thread::sleep(Duration::from_millis(1));
            }
            answer => return answer,
        }
    }
    bind(socket, interface, queue, may_zero_copy)
}

/// Binds as well as the driver can: without copies, else with, and without wake-ups before Linux 5.4.
fn bind(
    socket: BorrowedFd<'_>,
    interface: InterfaceIndex,
    queue: u32,
    may_zero_copy: bool,
) -> io::Result<Bound> {
    let ways = [(true, true), (false, true), (false, false)];
    let mut last = io::Error::from_raw_os_error(libc::EOPNOTSUPP);
    for (zero_copy, need_wakeup) in ways {
        if zero_copy && !may_zero_copy {
            continue;
        }
        let copy = if zero_copy {
            libc::XDP_ZEROCOPY
        } else {
            libc::XDP_COPY
        };
        let wakeup = if need_wakeup {
            libc::XDP_USE_NEED_WAKEUP
        } else {
            0
        };
        match bind_as(socket, interface, queue, copy | wakeup) {
            Ok(()) => {
                return Ok(Bound {
                    zero_copy,
                    need_wakeup,
                });
            }
            // A queue that is taken is so in every way.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => return Err(error),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn bind_as(
    socket: BorrowedFd<'_>,
    interface: InterfaceIndex,
    queue: u32,
    flags: u16,
) -> io::Result<()> {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "address families are small"
    )]
    let address = libc::sockaddr_xdp {
        sxdp_family: libc::AF_XDP as u16,
        sxdp_flags: flags,
        sxdp_ifindex: interface.0,
        sxdp_queue_id: queue,
        sxdp_shared_umem_fd: 0,
    };
    // SAFETY: the address lives until the call returns.
    let answer = unsafe {
        libc::bind(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            length_of::<libc::sockaddr_xdp>(),
        )
    };
    if answer < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Sets an option to a value that the kernel reads as such.
fn set<T: Copy>(socket: BorrowedFd<'_>, level: i32, option: i32, value: &T) -> io::Result<()> {
    // SAFETY: the value lives until the call returns.
    let answer = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            ptr::from_ref(value).cast(),
            length_of::<T>(),
        )
    };
    if answer < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Asks for an option of AF_XDP, whose value is integers.
fn get<T: Copy>(socket: BorrowedFd<'_>, option: i32, value: &mut T) -> io::Result<()> {
    let mut length = length_of::<T>();
    // SAFETY: the kernel writes at most `length` bytes of integers, and the value lives until the call returns.
    let answer = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_XDP,
            option,
            ptr::from_mut(value).cast(),
            &raw mut length,
        )
    };
    if answer < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn length_of<T>() -> libc::socklen_t {
    #[expect(clippy::cast_possible_truncation, reason = "small structures")]
    let length = size_of::<T>() as libc::socklen_t;
    length
}

fn index_of(address: u64) -> usize {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "checked to be inside of memory"
    )]
    let index = address as usize;
    index
}

/// Bytes that the kernel keeps free before a received frame.
pub(super) const RECEIVE_HEADROOM: u32 = 256;
/// Frames that one call sends unless more is asked for.
const SENT_PER_CALL: u32 = 32;
/// Since Linux 6.17.
const XDP_MAX_TX_SKB_BUDGET: i32 = 9;
const ETHERNET_HEADER: usize = 14;
/// Bytes, as the kernel counts the memory of frames on their way.
const SEND_BUFFER: i32 = 8 << 20;
const PAGE_FILL: libc::off_t = 0x1_0000_0000;
const PAGE_COMPLETION: libc::off_t = 0x1_8000_0000;

//! Receiving a message with what came along with it.

use std::{
    mem::{MaybeUninit, size_of},
    os::fd::{AsRawFd, BorrowedFd},
    ptr,
};

use rustix::io::Errno;

use super::last_error;

/// What came along with a message.
pub(super) struct Received {
    /// It was longer.
    pub(super) is_truncated: bool,
    /// Who sent it.
    pub(super) has_credentials: bool,
    /// The mark for the end of a record.
    pub(super) ends_record: bool,
}

/// Receives a message of at most `room` bytes.
pub(super) fn receive(
    fd: BorrowedFd<'_>,
    buffer: &mut Vec<u8>,
    room: usize,
) -> Result<Received, Errno> {
    const CONTROL: usize = 64;
    const { assert!(CONTROL >= size_of::<libc::cmsghdr>() + size_of::<libc::ucred>()) };
    let mut control = [0_u64; CONTROL / size_of::<u64>()];
    let mut piece = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: room,
    };
    // SAFETY: all zeros are a valid message header.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    message.msg_iov = &raw mut piece;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = CONTROL;
    // SAFETY: the buffer has room for that many bytes, and control for its length. Descriptors can't come
    // with it unnoticed: there is no room for them beside credentials... and CLOEXEC is set.
    let received = unsafe {
        libc::recvmsg(
            fd.as_raw_fd(),
            &raw mut message,
            libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC,
        )
    };
    let received = usize::try_from(received).map_err(|_| last_error())?;
    close_descriptors(&message);
    // SAFETY: the kernel has written that many bytes, at most `room`.
    unsafe { buffer.set_len(received) };
    Ok(Received {
        is_truncated: message.msg_flags & libc::MSG_TRUNC != 0,
        has_credentials: message.msg_controllen != 0,
        ends_record: message.msg_flags & libc::MSG_EOR != 0,
    })
}

/// Closes descriptors that a client sent along; nobody here wants them.
fn close_descriptors(message: &libc::msghdr) {
    // SAFETY: the kernel has filled the control buffer that `message` points to, and its length; the macros
    // stay within it. Each descriptor in it is ours alone.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while let Some(control) = header.as_ref() {
            if control.cmsg_level == libc::SOL_SOCKET && control.cmsg_type == libc::SCM_RIGHTS {
                let bytes = control.cmsg_len - libc::CMSG_LEN(0) as usize;
                let data = libc::CMSG_DATA(control).cast::<libc::c_int>();
                for index in 0..bytes / size_of::<libc::c_int>() {
                    libc::close(ptr::read_unaligned(data.add(index)));
                }
            }
            header = libc::CMSG_NXTHDR(message, control);
        }
    }
}

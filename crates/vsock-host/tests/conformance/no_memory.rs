//! Sends that the kernel has no memory for: they are made again, though no event says when.
//!
//! The kernel is made to say so by a filter of system calls in the workers' threads, which asks a thread of the test.

use std::{
    io::{self, ErrorKind},
    mem::MaybeUninit,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    sync::mpsc,
    thread,
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    net::{RecvFlags, recv},
};
use sandwire_vsock_guest::{Kind, packet::HOST_CID};

use crate::host::{Host, PORT, accept, clean, eventually, read_exact, seqpacket_listener};

/// As many fail: the first attempt, the one upon being told that there is room, and more.
const FAILURES: u32 = 4;

/// A filter for the calling thread, and threads that it starts, that asks about sends to peers; where it asks.
fn ask_about_sends() -> OwnedFd {
    const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const SKIP_UNLESS: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
    // Offsets in `struct seccomp_data`: the call's number, the lower half of its third argument.
    let (number, flags) = (0, if cfg!(target_endian = "big") { 36 } else { 32 });
    let call = u32::try_from(libc::SYS_sendmsg).expect("a small number");
    let to_peers = (libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT).cast_unsigned();
    let step = |code: u32, k, jf| libc::sock_filter {
        code: u16::try_from(code).expect("a small number"),
        jt: 0,
        jf,
        k,
    };
    let mut steps = [
        step(LOAD, number, 0),
        step(SKIP_UNLESS, call, 3),
        step(LOAD, flags, 0),
        step(SKIP_UNLESS, to_peers, 1),
        step(RETURN, libc::SECCOMP_RET_USER_NOTIF, 0),
        step(RETURN, libc::SECCOMP_RET_ALLOW, 0),
    ];
    let program = libc::sock_fprog {
        len: 6,
        filter: steps.as_mut_ptr(),
    };
    // SAFETY: a call without pointers.
    let promised = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(promised, 0, "{}", io::Error::last_os_error());
    // SAFETY: the program and its steps live through the call, which copies them.
    let listener = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &raw const program,
        )
    };
    let listener = libc::c_int::try_from(listener).expect("a descriptor");
    assert!(listener >= 0, "{}", io::Error::last_os_error());
    // SAFETY: the kernel has just made it, for us alone.
    unsafe { OwnedFd::from_raw_fd(listener) }
}

/// Answers what the filter asks until nobody is left: the first [`FAILURES`] sends fail. How many did.
fn refuse_sends(listener: &OwnedFd) -> u32 {
    let mut failed = 0;
    loop {
        let mut events = [PollFd::new(listener, PollFlags::IN)];
        poll(&mut events, None).expect("waiting");
        if !events[0].revents().contains(PollFlags::IN) {
            return failed;
        }
        // SAFETY: all zeros are valid, and what the kernel wants to be given.
        let mut asked: libc::seccomp_notif = unsafe { MaybeUninit::zeroed().assume_init() };
        let receive = libc::SECCOMP_IOCTL_NOTIF_RECV;
        // SAFETY: it writes a question of that size.
        if unsafe { libc::ioctl(listener.as_raw_fd(), receive, &raw mut asked) } != 0 {
            // Who asked has ended meanwhile.
            continue;
        }
        let fails = failed < FAILURES;
        failed += u32::from(fails);
        let go_on = u32::try_from(libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE).expect("1");
        let mut answer = libc::seccomp_notif_resp {
            id: asked.id,
            val: 0,
            error: if fails { -libc::ENOBUFS } else { 0 },
            flags: if fails { 0 } else { go_on },
        };
        let send = libc::SECCOMP_IOCTL_NOTIF_SEND;
        // SAFETY: it reads an answer of that size.
        let answered = unsafe { libc::ioctl(listener.as_raw_fd(), send, &raw mut answer) };
        assert_eq!(answered, 0, "{}", io::Error::last_os_error());
    }
}

/// Runs a test whose workers' first sends to peers fail.
fn while_sends_fail(test: impl FnOnce() + Send) {
    let (sender, receiver) = mpsc::sync_channel(1);
    let failed = thread::scope(|threads| {
        let answering = threads.spawn(move || {
            let listener = receiver.recv().expect("a filter");
            refuse_sends(&listener)
        });
        threads.spawn(move || {
            sender.send(ask_about_sends()).expect("somebody to answer");
            test();
        });
        answering.join().expect("answering")
    });
    assert_eq!(failed, FAILURES);
}

#[test]
fn bytes_that_the_kernel_had_no_memory_for_arrive() {
    while_sends_fail(|| {
        let mut host = Host::new(1);
        let vm = host.vm();
        let mut guest = vm.boot();
        let listener = vm.service(PORT);
        let socket = guest.open_stream(PORT).expect("connecting");
        let mut peer = accept(&listener);
        guest.send(socket, b"hello").expect("sending");
        assert_eq!(read_exact(&mut peer, 5), b"hello");
        clean(&guest);
    });
}

#[test]
fn a_message_that_the_kernel_had_no_memory_for_arrives() {
    while_sends_fail(|| {
        let mut host = Host::new(1);
        let vm = host.vm();
        let mut guest = vm.boot();
        let listener = seqpacket_listener(&vm.port_socket(PORT));
        let socket = guest
            .open(Kind::Seqpacket, HOST_CID, PORT)
            .expect("connecting");
        let peer = rustix::net::accept(&listener).expect("a connection");
        guest
            .send_message(socket, b"hello", false)
            .expect("sending");
        let mut got = [0; 8];
        eventually("the message", || {
            match recv(&peer, &mut got[..], RecvFlags::DONTWAIT) {
                Ok((length, _)) => length == 5,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock);
                    false
                }
            }
        });
        assert_eq!(&got[..5], b"hello");
        clean(&guest);
    });
}

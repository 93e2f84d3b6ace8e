//! The host's end, over socket pairs.

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair, sockopt,
};

use super::*;

fn pair(kind: SocketType, framing: Framing) -> (Peer, OwnedFd) {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, flags, None).expect("a pair");
    let peer = Peer::new(ours, framing);
    if framing != Framing::Stream {
        peer.prepare_messages(256 * 1024).expect("options");
    }
    (peer, theirs)
}

fn piece(bytes: &[u8]) -> libc::iovec {
    libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    }
}

fn received(theirs: &OwnedFd, most: usize) -> Vec<u8> {
    let mut bytes = vec![0; most];
    let length = recv(theirs, &mut bytes[..], RecvFlags::empty()).map_or(0, |(_, length)| length);
    bytes.truncate(length);
    bytes
}

#[test]
fn what_the_descriptor_does_not_take_waits_in_order() {
    let (mut peer, theirs) = pair(SocketType::STREAM, Framing::Stream);
    let block: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    let mut sent = 0;
    while !peer.has_backlog() {
        let Wrote::Bytes(_) = peer.write(
            &[piece(&block[..60_000]), piece(&block[60_000..])],
            &mut Spare::default(),
        ) else {
            panic!("it is open");
        };
        sent += block.len();
    }
    assert_eq!(
        peer.write(&[piece(&block)], &mut Spare::default()),
        Wrote::Bytes(0),
        "behind what waits already"
    );
    sent += block.len();
    assert!(peer.waiting() > block.len());
    let mut got: Vec<u8> = Vec::new();
    while got.len() < sent {
        let more = received(&theirs, 1 << 20);
        got.extend(&more);
        assert!(matches!(
            peer.flush(&mut 1024, &mut Spare::default()),
            Wrote::Bytes(_)
        ));
        assert!(
            !more.is_empty() || peer.has_backlog(),
            "it stopped at {} of {sent}",
            got.len()
        );
    }
    assert!(got.chunks(block.len()).all(|chunk| chunk == block));
    assert_eq!((peer.waiting(), peer.buffered()), (0, 0));
}

/// Else a reader that is as quick as the service keeps it from its other guests.
#[test]
fn messages_that_waited_are_passed_on_in_turns() {
    let (mut peer, theirs) = pair(SocketType::SEQPACKET, Framing::Message);
    let mut sent = 0_u16;
    while peer.messages.bytes() < 10 * 3 {
        let message = sent.to_le_bytes();
        let wrote = peer.write_message(&[piece(&message)], flags::END_OF_MESSAGE);
        assert!(matches!(wrote, Wrote::Bytes(_)));
        sent += 1;
    }
    assert!(peer.is_full && !peer.is_out_of_turn);
    let all = std::iter::repeat_with(|| received(&theirs, 8));
    let mut got: Vec<_> = all.take_while(|message| !message.is_empty()).collect();
    assert_eq!(got.len(), usize::from(sent) - 10);
    for (turn, passed, left) in [(0, 0, 0), (7, 7, 0), (5, 3, 2)] {
        let mut spent = turn;
        let wrote = peer.flush(&mut spent, &mut Spare::default());
        assert_eq!((wrote, spent), (Wrote::Bytes(2 * passed), left));
        // Nothing will tell that it is writable.
        assert!(!peer.is_full);
        assert_eq!(peer.is_out_of_turn, peer.has_backlog());
    }
    got.extend((0..10).map(|_| received(&theirs, 8)));
    let expected = (0..sent).map(|number| number.to_le_bytes().to_vec());
    assert!(got.into_iter().eq(expected), "in order");
}

#[test]
fn a_unix_socket_gets_its_buffer_and_tcp_keeps_its_own_but_for_what_it_cannot_send() {
    let prepared = |fd: OwnedFd| {
        let before = sockopt::socket_send_buffer_size(&fd).expect("its size");
        let peer = Peer::new(fd, Framing::Stream);
        peer.prepare_stream(8192).expect("an option");
        let after = sockopt::socket_send_buffer_size(peer.fd()).expect("its size");
        (before, after)
    };
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a listener");
    let address = listener.local_addr().expect("its address");
    let connected = || {
        let stream = std::net::TcpStream::connect(address).expect("connecting");
        stream.set_nonblocking(true).expect("not to block");
        stream
    };
    let (before, after) = prepared(connected().into());
    assert_eq!(before, after);
    // A service that doesn't read: what it has no room for isn't sent.
    let mut peer = Peer::new(connected().into(), Framing::Stream);
    for promise in [64 * 1024, 1024 * 1024] {
        peer.prepare_stream(promise).expect("an option");
        peer.discard();
        let block = vec![7; 64 * 1024];
        while !peer.has_backlog() {
            let wrote = peer.write(&[piece(&block)], &mut Spare::default());
            assert!(matches!(wrote, Wrote::Bytes(_)));
        }
        let unsent = unsent(peer.fd());
        let bounds = promise / 2..=promise + 64 * 1024;
        assert!(bounds.contains(&unsent), "{unsent} of {promise}");
    }
    let (ours, _theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
    let (before, after) = prepared(ours.into());
    assert!(after < before, "{before} bytes, then {after}");
}

/// Bytes of TCP that couldn't be sent yet.
fn unsent(fd: BorrowedFd<'_>) -> usize {
    const SIOCOUTQNSD: libc::Ioctl = 0x894b;
    let mut bytes: libc::c_int = 0;
    // SAFETY: the call writes an int, for which there is room.
    let done = unsafe { libc::ioctl(fd.as_raw_fd(), SIOCOUTQNSD, &raw mut bytes) };
    assert_eq!(done, 0, "{}", io::Error::last_os_error());
    usize::try_from(bytes).expect("a length")
}

#[test]
fn a_reader_that_is_gone_is_noticed() {
    let (mut peer, theirs) = pair(SocketType::STREAM, Framing::Stream);
    drop(theirs);
    assert_eq!(
        peer.write(&[piece(b"hello")], &mut Spare::default()),
        Wrote::Closed
    );
    assert_eq!(peer.read(&[piece(&[0; 8])]), Read::End);
}

#[test]
fn messages_keep_their_bounds_and_nothing_is_no_end() {
    let (mut peer, theirs) = pair(SocketType::SEQPACKET, Framing::Message);
    assert_eq!(peer.write_message(&[piece(b"he")], 0), Wrote::Bytes(0));
    assert_eq!(peer.assembled(), 2);
    assert_eq!(
        peer.write_message(&[piece(b"llo")], flags::END_OF_MESSAGE),
        Wrote::Bytes(5)
    );
    assert_eq!(received(&theirs, 100), b"hello");
    let mut scratch = Vec::new();
    assert_eq!(peer.read_message(&mut scratch, 10, 10), Read::Nothing);
    for message in [b"".as_slice(), b"0123456789", b"0123456789a", b"x"] {
        send(&theirs, message, SendFlags::empty()).expect("sending");
    }
    drop(theirs);
    assert_eq!(peer.read_message(&mut scratch, 10, 10), Read::Message);
    let empty = peer.outgoing.take().expect("a message of nothing");
    assert_eq!((empty.bytes.len(), empty.marks), (0, flags::END_OF_MESSAGE));
    assert_eq!(peer.read_message(&mut scratch, 10, 10), Read::Message);
    assert_eq!(
        peer.outgoing.take().expect("a message").bytes,
        b"0123456789"
    );
    assert_eq!(peer.read_message(&mut scratch, 10, 10), Read::TooLong);
    assert_eq!(peer.read_message(&mut scratch, 10, 10), Read::Message);
    assert_eq!(peer.outgoing.take().expect("a message").bytes, b"x");
    assert_eq!(peer.read_message(&mut scratch, 10, 10), Read::End);
}

/// Who closes with a message unread resets the connection, of which the kernel speaks first.
#[test]
fn what_was_said_before_a_reset_is_read_and_the_reset_comes_after_it() {
    for (room, sends) in [(10, false), (3, false), (10, true)] {
        let (mut peer, theirs) = pair(SocketType::SEQPACKET, Framing::Message);
        for message in [b"read".as_slice(), b"unread"] {
            let wrote = peer.write_message(&[piece(message)], flags::END_OF_MESSAGE);
            assert!(matches!(wrote, Wrote::Bytes(1..)));
        }
        assert_eq!(received(&theirs, 100), b"read");
        send(&theirs, b"answer", SendFlags::empty()).expect("sending");
        drop(theirs);
        if sends {
            // It is told of then, and not again.
            let wrote = peer.write_message(&[piece(b"late")], flags::END_OF_MESSAGE);
            assert_eq!(wrote, Wrote::Closed);
        }
        let mut scratch = Vec::new();
        if room < 10 {
            assert_eq!(peer.read_message(&mut scratch, 10, room), Read::NoRoom(6));
        }
        assert_eq!(peer.read_message(&mut scratch, 10, 10), Read::Message);
        assert_eq!(peer.outgoing.take().expect("a message").bytes, b"answer");
        for room in [10, room] {
            assert_eq!(peer.read_message(&mut scratch, 10, room), Read::Broken);
        }
    }
}

/// As AF_VSOCK, which machines that build this don't all have.
#[test]
fn a_message_whose_length_is_unknown_waits_for_room_for_any() {
    let (mut peer, theirs) = pair(SocketType::SEQPACKET, Framing::Message);
    peer.tells_length = false;
    let mut scratch = Vec::new();
    assert_eq!(peer.read_message(&mut scratch, 10, 9), Read::Nothing);
    for message in [b"x".as_slice(), b"0123456789", b"0123456789a"] {
        send(&theirs, message, SendFlags::empty()).expect("sending");
        assert_eq!(peer.read_message(&mut scratch, 10, 9), Read::NoRoom(10));
        let read = peer.read_message(&mut scratch, 10, 10);
        match message.len() {
            11.. => assert_eq!(read, Read::TooLong),
            _ => assert_eq!(peer.outgoing.take().expect("a message").bytes, message),
        }
        assert_eq!(peer.read_message(&mut scratch, 10, 9), Read::Nothing);
    }
}

/// Of AF_VSOCK, for which this pair stands in: what is said beside a message isn't part of it.
#[test]
fn a_mark_that_the_kernel_carries_is_in_no_message_however_long_it_waits() {
    let (mut peer, theirs) = pair(SocketType::SEQPACKET, Framing::Message);
    peer.has_records = true;
    let record = flags::END_OF_MESSAGE | flags::END_OF_RECORD;
    let mut sent = 0_u16;
    while peer.messages.bytes() < 10 * 4 {
        let message = sent.to_le_bytes();
        let wrote = peer.write_message(&[piece(&message[..1])], 0);
        assert_eq!((wrote, peer.assembled()), (Wrote::Bytes(0), 1));
        let wrote = peer.write_message(&[piece(&message[1..])], record);
        let waits = peer.has_backlog();
        assert_eq!(wrote, Wrote::Bytes(if waits { 0 } else { 2 }));
        sent += 1;
    }
    assert_eq!(peer.waiting(), 2 * 10);
    for number in 0..sent {
        assert_eq!(received(&theirs, 8), number.to_le_bytes());
        peer.flush(&mut 1024, &mut Spare::default());
    }
    assert_eq!((peer.waiting(), peer.buffered()), (0, 0));
}

#[test]
fn siblings_keep_the_marks() {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let (one, two) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a pair");
    let (mut one, mut two) = (
        Peer::new(one, Framing::MarkedMessage),
        Peer::new(two, Framing::MarkedMessage),
    );
    let record = flags::END_OF_MESSAGE | flags::END_OF_RECORD;
    for (message, bits) in [
        (b"a".as_slice(), record),
        (b"", flags::END_OF_MESSAGE),
        (b"bc", record),
    ] {
        let sent = u32::try_from(message.len()).expect("short");
        assert_eq!(
            one.write_message(&[piece(message)], bits),
            Wrote::Bytes(sent)
        );
        assert_eq!(two.read_message(&mut Vec::new(), 10, 10), Read::Message);
        let outgoing = two.outgoing.take().expect("a message");
        assert_eq!((outgoing.bytes.as_slice(), outgoing.marks), (message, bits));
    }
    drop(one);
    assert_eq!(two.read_message(&mut Vec::new(), 10, 10), Read::End);
}

#[test]
fn messages_of_nothing_do_not_pile_up() {
    let (mut peer, theirs) = pair(SocketType::SEQPACKET, Framing::Message);
    let stopped =
        (0..1_000_000).find(|_| peer.write_message(&[], flags::END_OF_MESSAGE) == Wrote::TooMany);
    assert!(
        stopped.is_some(),
        "they cost no credit, so there must be another bound"
    );
    drop(theirs);
}

#[test]
fn descriptors_that_come_with_a_message_are_closed() {
    let (mut peer, theirs) = pair(SocketType::SEQPACKET, Framing::MarkedMessage);
    let (read, write) = rustix::pipe::pipe().expect("a pipe");
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
    let fds = [write.as_fd()];
    assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&fds)));
    let bytes = [io::IoSlice::new(b"\x01hello")];
    rustix::net::sendmsg(&theirs, &bytes, &mut control, SendFlags::empty()).expect("sending");
    drop(write);
    assert_eq!(peer.read_message(&mut Vec::new(), 10, 10), Read::Message);
    let end = rustix::io::read(&read, &mut [0]).expect("the pipe has no writer left");
    assert_eq!(end, 0);
}

#[test]
fn an_end_is_believed_only_of_the_descriptor_that_has_ended() {
    let (peer, theirs) = pair(SocketType::STREAM, Framing::Stream);
    let brought = EventFlags::IN | EventFlags::HUP | EventFlags::RDHUP;
    let events = peer.confirm(brought);
    assert!(events.contains(EventFlags::IN));
    assert!(!events.intersects(EventFlags::HUP | EventFlags::RDHUP));
    rustix::net::shutdown(&theirs, Shutdown::Write).expect("shutting");
    let events = peer.confirm(brought);
    assert!(events.contains(EventFlags::RDHUP) && !events.contains(EventFlags::HUP));
    drop(theirs);
    assert!(peer.confirm(brought).contains(brought));
}

//! Rules that lead to a service on the host's own AF_VSOCK.
//!
//! The host is a guest of QEMU with one of Debian's kernels, whose loopback transport stands in for whatever the
//! host has behind its AF_VSOCK. The service is a socket of that kernel.

use std::{
    io::{ErrorKind, IoSliceMut, Read, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    thread,
    time::Duration,
};

use rustix::net::{RecvAncillaryBuffer, RecvFlags, RecvMsg, ReturnFlags, SendFlags, recvmsg, send};
use sandwire_testlab::{
    guest::kernel::Series,
    lab::{self, Lab},
};
use sandwire_vsock_guest::{Guest, GuestError, Kind, packet::SHUTDOWN_SEND};
use socket2::{Domain, SockAddr, Socket, Type};

use super::{World, wait_until};

/// VMADDR_CID_LOCAL.
const LOCAL: u32 = 1;
/// Sends back what it has heard, after the end.
const REPEAT: u32 = 9000;
/// Sends back each message as it comes.
const MESSAGES: u32 = 9001;
const NOBODY: u32 = 9002;
/// Answers one message with many at once, and later another one with one that is too long.
const MANY: u32 = 9003;
/// So many of so many bytes each are more than a guest's socket holds.
const AT_ONCE: u8 = 10;
const MESSAGE_BYTES: usize = 60_000;
/// What the guest's socket is made to hold.
const SMALL_BUFFER: u32 = 65_536;
/// More than any buffer on the way takes at once.
const BYTES: u32 = 1 << 20;

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn services_on_the_hosts_own_vsock_are_reached_on_linux_6_1() {
    lab::run_on(Series::Linux6_1, Duration::from_secs(300), |lab| {
        assert_reached(lab);
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn services_on_the_hosts_own_vsock_are_reached_on_linux_6_12() {
    lab::run_on(Series::Linux6_12, Duration::from_secs(300), |lab| {
        assert_reached(lab);
    });
}

fn assert_reached(lab: &Lab) {
    serve(Type::STREAM, REPEAT, repeat);
    serve(Type::SEQPACKET, MESSAGES, repeat_messages);
    serve(Type::SEQPACKET, MANY, say_much);
    let world = World::start(lab);
    let (_, mut guest) = world.lease("a");
    let hybrid = world.daemon.json("acquire web h --vsock=hybrid").unwrap();
    let hybrid = hybrid["vsock"]["socket"].as_str().unwrap();
    assert!(guest.open_stream(5000).is_err(), "no rule allows it");
    for lease in ["a", "h"] {
        let services = [REPEAT, MESSAGES, NOBODY, MANY];
        for (port, to) in (5000..).zip(services) {
            let rule = format!("{port} vsock:{LOCAL}:{to}");
            world.run(&format!("vsock policy allow {lease} {rule}"));
        }
    }

    let sent: Vec<u8> = (0..BYTES / 4).flat_map(u32::to_le_bytes).collect();
    from_our_device(&mut guest, &sent);
    more_at_once_than_the_guest_holds(&mut guest);
    from_a_hybrid(hybrid, &sent);
    let refusals = |lease: &str| {
        let shown = world.daemon.json(&format!("vsock list {lease} --channels"));
        shown.unwrap()[0]["traffic"]["refusals"]["unreachable"].clone()
    };
    wait_until("both have been refused", || {
        ["a", "h"].map(refusals).iter().all(|count| *count == 1)
    });
}

/// A guest whose device is ours: all of it arrives, both ways, and half of the connection ends by itself.
fn from_our_device(guest: &mut Guest, sent: &[u8]) {
    let socket = guest.open_stream(5000).unwrap();
    for write in sent.chunks(65_536) {
        guest.send(socket, write).unwrap();
    }
    guest.shut_down(socket, SHUTDOWN_SEND);
    let back = guest.receive_to_end(socket).unwrap();
    assert!(back == sent, "{} bytes came back otherwise", back.len());
    guest.close(socket).unwrap();

    let socket = guest.open(Kind::Seqpacket, 2, 5001).unwrap();
    for (length, record) in [(1, true), (4096, false), (65_536, true), (60_001, false)] {
        let message = &sent[..length];
        guest.send_message(socket, message, record).unwrap();
        let (back, ends_record) = guest.receive_message(socket).unwrap().unwrap();
        assert!(back == message, "{length} bytes came back otherwise");
        assert_eq!(ends_record, record, "{length} bytes");
    }
    guest.close(socket).unwrap();
    assert!(guest.open_stream(5002).is_err(), "nobody is there");
}

/// No message is sent before the guest has room for it, whole; and one that it never has room for is refused.
fn more_at_once_than_the_guest_holds(guest: &mut Guest) {
    let socket = guest.open(Kind::Seqpacket, 2, 5003).unwrap();
    guest.send_message(socket, b"many", false).unwrap();
    guest.run_for(Duration::from_millis(500)).unwrap();
    for number in 0..AT_ONCE {
        let (message, _) = guest.receive_message(socket).unwrap().unwrap();
        assert!(message == [number; MESSAGE_BYTES], "message {number}");
    }
    assert_eq!(guest.violations(), [] as [String; 0]);

    guest.socket_mut(socket).buf_alloc = SMALL_BUFFER;
    guest.send_message(socket, b"as much", false).unwrap();
    let (message, _) = guest.receive_message(socket).unwrap().unwrap();
    assert_eq!(message.len(), SMALL_BUFFER as usize, "all that it holds");
    guest.send_message(socket, b"more", false).unwrap();
    let refused = guest.receive_message(socket);
    assert!(matches!(refused, Err(GuestError::Reset)), "{refused:?}");
    assert_eq!(guest.violations(), [] as [String; 0]);
}

/// A guest whose VMM has the device: the router's splice, to and from AF_VSOCK.
fn from_a_hybrid(socket: &str, sent: &[u8]) {
    let mut stream = UnixStream::connect(format!("{socket}_5000")).unwrap();
    stream.write_all(sent).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut back = Vec::new();
    stream.read_to_end(&mut back).unwrap();
    assert!(back == sent, "{} bytes came back otherwise", back.len());

    let mut stream = UnixStream::connect(format!("{socket}_5002")).unwrap();
    let ended = stream.read(&mut [0; 8]);
    let is_over = |kind| kind == ErrorKind::ConnectionReset;
    assert!(
        matches!(&ended, Ok(0)) || ended.as_ref().is_err_and(|error| is_over(error.kind())),
        "{ended:?}"
    );
}

/// Listens on the kernel's own AF_VSOCK; each connection has a thread.
fn serve(kind: Type, port: u32, answer: fn(Socket)) {
    let listener = Socket::new(Domain::VSOCK, kind, None).unwrap();
    listener.bind(&SockAddr::vsock(LOCAL, port)).unwrap();
    listener.listen(16).unwrap();
    thread::spawn(move || {
        loop {
            let (socket, from) = listener.accept().unwrap();
            let (cid, _) = from.as_vsock_address().unwrap();
            assert_eq!(cid, LOCAL, "who calls is the host itself");
            thread::spawn(move || answer(socket));
        }
    });
}

fn repeat(mut socket: Socket) {
    let mut heard = Vec::new();
    socket.read_to_end(&mut heard).unwrap();
    socket.write_all(&heard).unwrap();
}

/// With the mark for the end of a record where it came with one.
fn repeat_messages(socket: Socket) {
    let mut message = vec![0; 1 << 18];
    loop {
        let received = recvmsg(
            &socket,
            &mut [IoSliceMut::new(&mut message)],
            &mut RecvAncillaryBuffer::default(),
            RecvFlags::empty(),
        );
        let Ok(RecvMsg {
            bytes: length @ 1..,
            flags,
            ..
        }) = received
        else {
            return;
        };
        let mark = match flags.contains(ReturnFlags::EOR) {
            true => SendFlags::EOR,
            false => SendFlags::empty(),
        };
        assert_eq!(send(&socket, &message[..length], mark).unwrap(), length);
    }
}

fn say_much(socket: Socket) {
    let asked = |mut socket: &Socket| socket.read(&mut [0; 64]).unwrap();
    asked(&socket);
    for number in 0..AT_ONCE {
        let message = [number; MESSAGE_BYTES];
        assert_eq!(socket.send(&message).unwrap(), MESSAGE_BYTES);
    }
    for length in [SMALL_BUFFER as usize, SMALL_BUFFER as usize + 1] {
        asked(&socket);
        assert_eq!(socket.send(&vec![1; length]).unwrap(), length);
    }
}

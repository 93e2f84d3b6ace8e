//! A client of the host that says anything: it is connected only for `CONNECT PORT\n`, and what follows stays
//! in its socket.

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
};
use sandwire_api::vsock::VsockType;
use sandwire_vsock_host::hybrid::handshake::{Asked, Handshake};

/// One case: the type of the socket, where the bytes are cut, the bytes.
pub(crate) fn run(bytes: &[u8]) {
    let [kind, cut, said @ ..] = bytes else {
        return;
    };
    let (kind, socket_type) = match kind & 1 {
        0 => (VsockType::Stream, SocketType::STREAM),
        _ => (VsockType::Seqpacket, SocketType::SEQPACKET),
    };
    let said = &said[..said.len().min(4096)];
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, socket_type, flags, None).expect("a pair of sockets");
    let mut handshake = Handshake::new(ours, kind);
    let cut = usize::from(*cut).min(said.len());
    let mut asked = handshake.advance();
    for piece in [&said[..cut], &said[cut..]] {
        if asked == Asked::Pending && !piece.is_empty() {
            send(&theirs, piece, SendFlags::NOSIGNAL).expect("saying it");
            asked = handshake.advance();
        } else if kind == VsockType::Stream && matches!(asked, Asked::Connect { .. }) {
            send(&theirs, piece, SendFlags::NOSIGNAL).expect("saying more");
        }
    }
    let Asked::Connect { port } = asked else {
        return;
    };
    if kind == VsockType::Seqpacket {
        return;
    }
    let line = said.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let text = std::str::from_utf8(line).expect("only text connects");
    let digits = text.split_whitespace().last().unwrap_or_default();
    assert_eq!(digits.parse(), Ok(port), "{text:?}");
    let mut rest = vec![0; said.len() + 1];
    let left = recv(handshake.into_socket(), &mut rest[..], RecvFlags::DONTWAIT)
        .map_or(0, |(count, _)| count);
    assert_eq!(&rest[..left], &said[line.len() + 1..], "payload is kept");
}

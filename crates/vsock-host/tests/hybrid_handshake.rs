//! Both sides of the handshake, over whatever pieces the bytes come in.

use std::{
    io::{ErrorKind, Read, Write},
    os::{fd::OwnedFd, unix::net::UnixStream},
};

use proptest::prelude::*;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
};
use sandwire_api::vsock::VsockType;
use sandwire_vsock_host::hybrid::handshake::{Asked, Handshake, answer};

fn pair(kind: SocketType) -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    socketpair(AddressFamily::UNIX, kind, flags, None).expect("a pair of sockets")
}

/// Sends the bytes in pieces, asking after each, and gives the first verdict with what is left in the socket
/// once all is sent.
fn shake(bytes: &[u8], cuts: &[usize]) -> (Asked, Vec<u8>) {
    let (client, server) = pair(SocketType::STREAM);
    let mut handshake = Handshake::new(server, VsockType::Stream);
    let mut client = UnixStream::from(client);
    let mut verdict = handshake.advance();
    assert_eq!(verdict, Asked::Pending, "nothing was said yet");
    let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (bytes.len() + 1)).collect();
    cuts.extend([0, bytes.len()]);
    cuts.sort_unstable();
    for piece in cuts.windows(2) {
        client
            .write_all(&bytes[piece[0]..piece[1]])
            .expect("writing a piece");
        if verdict == Asked::Pending {
            verdict = handshake.advance();
        }
    }
    let mut left = Vec::new();
    let mut server = UnixStream::from(handshake.into_socket());
    match server.read_to_end(&mut left) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
    }
    (verdict, left)
}

proptest! {
    #[test]
    fn a_line_in_any_pieces_names_its_port_and_the_rest_stays(
        port in 0..u32::MAX,
        rest in proptest::collection::vec(any::<u8>(), 0..200),
        cuts in proptest::collection::vec(any::<usize>(), 0..12),
    ) {
        let mut bytes = format!("CONNECT {port}\n").into_bytes();
        bytes.extend_from_slice(&rest);
        let (verdict, left) = shake(&bytes, &cuts);
        prop_assert_eq!(verdict, Asked::Connect { port });
        prop_assert_eq!(left, rest);
    }

    #[test]
    fn the_verdict_on_any_bytes_does_not_depend_on_their_pieces(
        bytes in prop_oneof![
            proptest::collection::vec(any::<u8>(), 0..80),
            "(?i)con?nect[ \t]{0,2}[0-9+-]{0,11}[ \r]?\n?.{0,9}".prop_map(String::into_bytes),
        ],
        cuts in proptest::collection::vec(any::<usize>(), 0..12),
    ) {
        let (whole, left) = shake(&bytes, &[]);
        let (in_pieces, left_of_pieces) = shake(&bytes, &cuts);
        prop_assert_eq!(whole, in_pieces);
        // After a refusal the socket is closed, so what is left in it doesn't matter.
        if whole != Asked::Failed {
            prop_assert_eq!(left, left_of_pieces);
        }
        let newline = bytes.iter().position(|byte| *byte == b'\n');
        let expected = match newline {
            Some(at) if at < 32 => model(&bytes[..at]),
            None if bytes.len() < 32 => Asked::Pending,
            _ => Asked::Failed,
        };
        prop_assert_eq!(whole, expected);
    }
}

/// The line as the convention has it, said in another way than the parser does.
fn model(line: &[u8]) -> Asked {
    let text = String::from_utf8_lossy(line);
    let words: Vec<&str> = text
        .split(|character: char| character.is_ascii_whitespace())
        .filter(|word| !word.is_empty())
        .collect();
    match words[..] {
        [verb, port] if verb.eq_ignore_ascii_case("connect") && !port.starts_with('+') => {
            match port.parse() {
                Ok(port) if port != u32::MAX => Asked::Connect { port },
                _ => Asked::Failed,
            }
        }
        _ => Asked::Failed,
    }
}

#[test]
fn a_line_that_never_ends_is_refused_at_its_thirty_second_byte() {
    let (verdict, left) = shake(&[b'C'; 31], &[]);
    assert_eq!((verdict, left.len()), (Asked::Pending, 0));
    let (verdict, _) = shake(&[b'C'; 32], &[]);
    assert_eq!(verdict, Asked::Failed);
}

#[test]
fn a_client_that_goes_away_has_failed() {
    let (client, server) = pair(SocketType::STREAM);
    let mut handshake = Handshake::new(server, VsockType::Stream);
    send(&client, b"CONNECT 10", SendFlags::empty()).expect("half a line");
    assert_eq!(handshake.advance(), Asked::Pending);
    drop(client);
    assert_eq!(handshake.advance(), Asked::Failed);
}

#[test]
fn with_messages_the_first_one_is_the_handshake() {
    for (message, verdict) in [
        (&b"CONNECT 22\n"[..], Asked::Connect { port: 22 }),
        (b"CONNECT 22", Asked::Connect { port: 22 }),
        (b"CONNECT 22\nmore", Asked::Failed),
        (b"CONNECT ", Asked::Failed),
        (&[b' '; 40], Asked::Failed),
    ] {
        let (client, server) = pair(SocketType::SEQPACKET);
        let mut handshake = Handshake::new(server, VsockType::Seqpacket);
        assert_eq!(handshake.advance(), Asked::Pending);
        send(&client, message, SendFlags::empty()).expect("the first message");
        send(&client, b"second", SendFlags::empty()).expect("the second message");
        assert_eq!(
            handshake.advance(),
            verdict,
            "{:?}",
            message.escape_ascii().to_string()
        );
        let mut next = [0; 64];
        let server = handshake.into_socket();
        let (length, _) = recv(&server, &mut next, RecvFlags::empty()).expect("the next message");
        assert_eq!(&next[..length], b"second");
    }
}

#[test]
fn the_answer_is_ok_and_the_port_of_the_host() {
    let (client, server) = pair(SocketType::STREAM);
    answer(&server, 1_073_741_824).expect("answering");
    let mut line = [0; 64];
    let (length, _) = recv(&client, &mut line, RecvFlags::empty()).expect("the answer");
    assert_eq!(&line[..length], b"OK 1073741824\n");
}

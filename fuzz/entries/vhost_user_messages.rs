//! A VMM that says anything, without descriptors: it is answered or hung up on, and nobody waits for it.

use std::{
    io::Write,
    os::unix::net::UnixStream,
    sync::{Arc, Mutex},
};

use sandwire_vsock_host::front_end::{FrontEnd, Served, Transport, lock};

/// Bytes that fit the socket's buffer, whatever pieces they come in.
const MOST: usize = 16 * 1024;

/// One case: requests whose length is right, if the first byte says so, or the bytes as they are.
pub(crate) fn run(bytes: &[u8]) {
    let Some((first, said)) = bytes.split_first() else {
        return;
    };
    let said = &said[..said.len().min(MOST)];
    let said = if first & 1 == 0 {
        said.to_vec()
    } else {
        framed(said)
    };
    let (ours, mut theirs) = UnixStream::pair().expect("a pair of sockets");
    let transport = Arc::new(Mutex::new(Transport::new(3)));
    let mut front_end = FrontEnd::new(ours, &transport).expect("a front end");
    theirs.write_all(&said).expect("saying it");
    drop(theirs.shutdown(std::net::Shutdown::Write));
    // Each message takes 12 bytes at least; after the last one the VMM is gone.
    for _ in 0..=said.len() / 12 + 1 {
        match front_end.serve() {
            Served::One => drop(lock(&transport).take_changes()),
            Served::Nothing | Served::Over(_) => return,
        }
    }
    panic!("it served more messages than there were");
}

/// Messages of up to 31 bytes, each with the number and the length that the first two bytes name.
fn framed(said: &[u8]) -> Vec<u8> {
    let mut messages = Vec::new();
    let mut rest = said;
    while let [request, size, more @ ..] = rest {
        let size = usize::from(size % 32).min(more.len());
        let (payload, later) = more.split_at(size);
        let length = u32::try_from(size).expect("less than 32");
        for field in [u32::from(request % 48), 1, length] {
            messages.extend(field.to_le_bytes());
        }
        messages.extend(payload);
        rest = later;
        if messages.len() > MOST {
            break;
        }
    }
    messages
}

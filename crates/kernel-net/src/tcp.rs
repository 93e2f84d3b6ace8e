//! What the kernel knows of a TCP connection (`TCP_INFO`).

use std::{
    io, mem,
    os::fd::{AsFd, AsRawFd},
    time::Duration,
};

/// What became of that which was sent last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Segments that are sent and not acknowledged.
    pub unacknowledged: u32,
    /// How many times in a row something was sent that nobody has answered: of these segments, or a question whether
    /// the other end, which had no room, has some now. An answer that there is none sets it back too.
    pub attempts: u8,
    /// Since when the other end has acknowledged nothing, not even anew what it had acknowledged before.
    pub unheard: Duration,
}

/// What became of that which was sent last on a TCP connection.
///
/// # Errors
/// It is no TCP socket.
pub fn sent(socket: impl AsFd) -> io::Result<Sent> {
    // SAFETY: all of its fields are integers, for which zero is a value.
    let mut info: libc::tcp_info = unsafe { mem::zeroed() };
    let mut length = libc::socklen_t::try_from(mem::size_of_val(&info)).expect("a small structure");
    // SAFETY: the kernel writes at most `length` bytes behind the pointer, which are those of `info`; both live until
    // the call returns.
    let outcome = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut length,
        )
    };
    if outcome != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Sent {
        unacknowledged: info.tcpi_unacked,
        attempts: info.tcpi_retransmits.max(info.tcpi_probes),
        unheard: Duration::from_millis(info.tcpi_last_ack_recv.into()),
    })
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream, UdpSocket};

    use super::*;

    #[test]
    fn a_connection_is_asked_and_another_socket_refused() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let sent = sent(&stream).unwrap();
        assert_eq!((sent.unacknowledged, sent.attempts), (0, 0));
        assert!(sent.unheard < Duration::from_secs(60));
        super::sent(UdpSocket::bind("127.0.0.1:0").unwrap()).unwrap_err();
    }
}

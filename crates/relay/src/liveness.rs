//! Has TCP notice that the other end is gone without a word: a machine without power, a microVM that was killed.
//!
//! While nothing is on its way. Of what is, TCP's own patience says when it is lost, after a quarter of an hour; a shorter
//! one (`TCP_USER_TIMEOUT`) would also end connections whose other end is there and doesn't read.

use std::{io, time::Duration};

use rustix::net::sockopt as option;
use tokio::net::TcpStream;

/// How long it may be silent until it is asked, how often it is asked then, and how many times.
const SILENCE: Duration = Duration::from_secs(15);
const BETWEEN: Duration = Duration::from_secs(5);
const TIMES: u32 = 3;

/// Ends a connection some seconds after its other end has gone.
pub(crate) fn end_when_gone(stream: &TcpStream) -> io::Result<()> {
    option::set_tcp_keepidle(stream, SILENCE)?;
    option::set_tcp_keepintvl(stream, BETWEEN)?;
    option::set_tcp_keepcnt(stream, TIMES)?;
    Ok(option::set_socket_keepalive(stream, true)?)
}

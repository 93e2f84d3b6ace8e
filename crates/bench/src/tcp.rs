//! TCP sockets that don't depend on how the machine controls congestion.

use std::{
    net::{SocketAddr, TcpListener, TcpStream},
    time::Duration,
};

use anyhow::{Context, Result};
use socket2::{Domain, SockRef, Socket, Type};

/// Linux's own way to control congestion, and the seeds'.
pub(crate) const CUBIC: &str = "cubic";
const CONNECT_PATIENCE: Duration = Duration::from_secs(5);

/// A connection whose end here controls congestion by the kernel's module of that name. That is set of the socket, since a
/// namespace other than the first may set only what is for everybody; and before it connects, since BBR, where that is the
/// machine's own, leaves its pacing behind.
pub(crate) fn connect(address: SocketAddr, congestion: &str) -> Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)
        .context("cannot make a socket")?;
    control(&socket, congestion)?;
    socket
        .connect_timeout(&address.into(), CONNECT_PATIENCE)
        .with_context(|| format!("cannot connect to {address}"))?;
    Ok(socket.into())
}

/// A listener whose connections control congestion like that.
pub(crate) fn listen(address: SocketAddr, congestion: &str) -> Result<TcpListener> {
    let listener =
        TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))?;
    control(&SockRef::from(&listener), congestion)?;
    Ok(listener)
}

fn control(socket: &Socket, congestion: &str) -> Result<()> {
    socket
        .set_tcp_congestion(congestion.as_bytes())
        .with_context(|| format!("cannot have connections controlled by {congestion}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn congestion_of(stream: &TcpStream) -> String {
        let name = SockRef::from(stream).tcp_congestion().unwrap();
        let name = String::from_utf8(name).unwrap();
        name.trim_end_matches('\0').to_owned()
    }

    #[test]
    fn both_ends_control_congestion_as_asked() {
        // Always part of the kernel; the machine's own is seldom this.
        let listener = listen("127.0.0.1:0".parse().unwrap(), "reno").unwrap();
        let here = connect(listener.local_addr().unwrap(), "reno").unwrap();
        let (there, _) = listener.accept().unwrap();
        assert_eq!(congestion_of(&here), "reno");
        assert_eq!(congestion_of(&there), "reno");
    }

    #[test]
    fn an_unknown_way_is_refused_by_its_name() {
        let refused = listen("127.0.0.1:0".parse().unwrap(), "none-such").unwrap_err();
        assert!(format!("{refused:#}").contains("none-such"), "{refused:#}");
    }
}

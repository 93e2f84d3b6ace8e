//! One client for each guest, all sending at once as fast as they can.
//!
//! A client is a thread with a socket of its own, where the seed has a process: they begin at the same
//! moment, so the spread between guests is the network's and not that of starting programs.

use std::{
    fs,
    io::{ErrorKind, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    sync::{Arc, Barrier},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};

use crate::{tcp, world};

const PORT: u16 = 5001;
/// Bytes that a client writes at once, as iperf does.
const WRITE: usize = 128 * 1024;
const STACK: usize = 128 * 1024;
/// A client that can't send for so long looks at the clock.
const LOOK: Duration = Duration::from_millis(200);

/// What clients have sent.
#[derive(Debug)]
pub(super) struct Rates {
    /// What each target took, in Mbit/s.
    pub(super) megabits: Vec<f64>,
    /// Segments that had to be sent again, of all clients.
    pub(super) repeated: u32,
}

/// Sends to all targets for a while. `congestion` is the name of the kernel's way to control congestion.
pub(super) fn run(
    namespace: &str,
    targets: &[Ipv4Addr],
    congestion: &str,
    duration: Duration,
) -> Result<Rates> {
    let before = repeated(namespace)?;
    let megabits = send_all(namespace, targets, congestion, duration)?;
    Ok(Rates {
        megabits,
        repeated: repeated(namespace)?.wrapping_sub(before),
    })
}

/// Segments that the TCP of a namespace has sent again so far.
fn repeated(namespace: &str) -> Result<u32> {
    let text = world::inside(namespace, || {
        fs::read_to_string("/proc/thread-self/net/snmp").context("cannot read TCP's counters")
    })?;
    counter(&text, "Tcp:", "RetransSegs").context("TCP's counters have another form")
}

/// A counter in a file where a line of values follows a line of names.
fn counter(text: &str, protocol: &str, name: &str) -> Option<u32> {
    let mut lines = text.lines().filter(|line| line.starts_with(protocol));
    let (names, values) = (lines.next()?, lines.next()?);
    let mut pairs = names.split(' ').zip(values.split(' '));
    pairs.find(|(found, _)| *found == name)?.1.parse().ok()
}

fn send_all(
    namespace: &str,
    targets: &[Ipv4Addr],
    congestion: &str,
    duration: Duration,
) -> Result<Vec<f64>> {
    let streams: Vec<TcpStream> = world::inside(namespace, || {
        targets
            .iter()
            .map(|target| tcp::connect(SocketAddr::from((*target, PORT)), congestion))
            .collect()
    })?;
    let barrier = Arc::new(Barrier::new(streams.len()));
    let mut clients = Vec::new();
    for stream in streams {
        let barrier = barrier.clone();
        let client = thread::Builder::new()
            .stack_size(STACK)
            .spawn(move || send(stream, &barrier, duration))
            .context("cannot start a client")?;
        clients.push(client);
    }
    clients
        .into_iter()
        .map(|client| client.join().map_err(|_| anyhow!("a client panicked"))?)
        .collect()
}

fn send(mut stream: TcpStream, barrier: &Barrier, duration: Duration) -> Result<f64> {
    static NOTHING: [u8; WRITE] = [0; WRITE];
    let ready = stream.set_write_timeout(Some(LOOK));
    barrier.wait();
    ready.context("cannot prepare a client")?;
    let started = Instant::now();
    let mut megabits = 0.0;
    while started.elapsed() < duration {
        let bytes = match stream.write(&NOTHING) {
            Ok(length) => u32::try_from(length).unwrap_or(0),
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => 0,
                _ => return Err(error).context("a guest has ended the connection"),
            },
        };
        megabits += f64::from(bytes) * 8e-6;
    }
    Ok(megabits / started.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_is_found_under_its_name() {
        let text = "Ip: Forwarding\nIp: 1\nTcp: ActiveOpens RetransSegs InErrs\nTcp: 7 42 0\n";
        assert_eq!(counter(text, "Tcp:", "RetransSegs"), Some(42));
        assert_eq!(counter(text, "Tcp:", "Unknown"), None);
        assert_eq!(counter(text, "Udp:", "InErrs"), None);
    }
}

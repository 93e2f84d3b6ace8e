//! Somebody else on the host who speaks netlink: asks for an interface, gives it an address and takes it
//! away again, over and over, and notes how long each answer takes.

use std::{
    net::{IpAddr, Ipv4Addr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use ipnet::IpNet;
use sandwire_kernel_net::{
    address::Address,
    interface,
    netlink::{Request, Socket},
};

use crate::statistics;

/// Time between two requests: often enough to meet every long hold of the kernel's lock, seldom
/// enough to slow nobody down.
const PAUSE: Duration = Duration::from_millis(2);
const ADDRESS: Ipv4Addr = Ipv4Addr::new(127, 77, 0, 1);

/// A running bystander. It ends when it is dropped.
pub(super) struct Bystander {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<Waits>>>,
}

/// How long answers took.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Waits(Vec<f64>);

impl Bystander {
    /// Starts one in our own network namespace.
    pub(super) fn start() -> Result<Self> {
        let socket = Socket::route()?;
        let stop = Arc::new(AtomicBool::new(false));
        let thread = thread::spawn({
            let stop = stop.clone();
            move || work(socket, &stop)
        });
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }

    /// Ends it and returns what it saw.
    pub(super) fn end(mut self) -> Result<Waits> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("it was ended before")?;
        thread
            .join()
            .map_err(|_| anyhow!("the bystander panicked"))?
    }
}

impl Drop for Bystander {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Only if a measurement failed: that error is the one to tell.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn work(mut socket: Socket, stop: &AtomicBool) -> Result<Waits> {
    let loopback = interface::find(&mut socket, "lo")?.context("there is no loopback")?;
    let address = Address::new(loopback.index, IpNet::new(IpAddr::V4(ADDRESS), 32)?);
    let mut waits = Waits::default();
    while !stop.load(Ordering::Relaxed) {
        waits.time(|| Ok(interface::find(&mut socket, "lo").map(drop)?))?;
        let mut add = Request::new();
        address.add(&mut add);
        waits.time(|| Ok(socket.execute(add)?))?;
        let mut delete = Request::new();
        address.delete(&mut delete);
        waits.time(|| Ok(socket.execute(delete)?))?;
        thread::sleep(PAUSE);
    }
    Ok(waits)
}

impl Waits {
    fn time(&mut self, request: impl FnOnce() -> Result<()>) -> Result<()> {
        let started = Instant::now();
        request()?;
        self.0.push(started.elapsed().as_secs_f64() * 1000.0);
        Ok(())
    }

    /// The longest of all, in milliseconds.
    pub(super) fn longest_ms(&self) -> f64 {
        self.0.iter().copied().fold(0.0, f64::max)
    }

    /// What 99 of 100 did not exceed, in milliseconds.
    pub(super) fn p99_ms(&self) -> f64 {
        statistics::percentile(&self.0, 99).unwrap_or(f64::NAN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_wait_is_found() {
        let waits = Waits(vec![0.5, 80.0, 0.25]);
        assert_eq!((waits.longest_ms(), waits.p99_ms()), (80.0, 80.0));
    }
}

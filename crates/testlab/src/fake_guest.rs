//! A guest without a VM: a thread that opens a TAP and speaks IP on it.
//!
//! It answers ARP, neighbour discovery and ping, serves echo (TCP and UDP port 7) and a small web page
//! (port 80: GET answers the stored value, PUT stores one), calls out on request, and sends whatever
//! frame a test makes up. It opens the TAP as Firecracker does, by name and without multi-queue, but
//! without the virtio header: frames are plain Ethernet. Dropping it closes the TAP.
//!
//! The thread ends by itself when the TAP goes away under it; calls then fail with that reason.

pub mod frame;
mod stack;

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
    sync::mpsc::{Receiver, Sender, channel},
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context, Result, bail};

use crate::namespace;
use stack::Stack;

/// What the guest believes of its network. The default is the default of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestNetwork {
    /// Its Ethernet address.
    pub mac: [u8; 6],
    /// Its IPv4 address and prefix length.
    pub ipv4: (Ipv4Addr, u8),
    /// Its IPv4 gateway. One outside the network of its address is on its link, and can't be called itself.
    pub ipv4_gateway: Ipv4Addr,
    /// Its IPv6 address and prefix length.
    pub ipv6: (Ipv6Addr, u8),
    /// Its IPv6 gateway.
    pub ipv6_gateway: Ipv6Addr,
}

impl Default for GuestNetwork {
    fn default() -> Self {
        Self {
            mac: [0x06, 0x00, 0xc0, 0xa8, 0xf1, 0x02],
            ipv4: (Ipv4Addr::new(192, 168, 241, 2), 29),
            ipv4_gateway: Ipv4Addr::new(192, 168, 241, 1),
            ipv6: (Ipv6Addr::new(0xfd00, 0x5eed, 0, 0, 0, 0, 0, 2), 64),
            ipv6_gateway: Ipv6Addr::new(0xfd00, 0x5eed, 0, 0, 0, 0, 0, 1),
        }
    }
}

/// A running fake guest.
#[derive(Debug)]
pub struct FakeGuest {
    requests: Option<Sender<Request>>,
    thread: Option<JoinHandle<Result<()>>>,
    network: GuestNetwork,
}

/// Something for the guest's thread to do with its stack.
type Request = Box<dyn FnOnce(&mut Stack) + Send>;

impl FakeGuest {
    /// Opens a TAP in the namespace of this file, with the default addresses.
    ///
    /// # Errors
    /// If there is no such TAP or somebody else has it.
    pub fn attach(netns: &Path, tap: &str) -> Result<Self> {
        Self::attach_as(netns, tap, GuestNetwork::default())
    }

    /// Like [`FakeGuest::attach`], with other addresses.
    ///
    /// # Errors
    /// If there is no such TAP or somebody else has it.
    pub fn attach_as(netns: &Path, tap: &str, network: GuestNetwork) -> Result<Self> {
        let (requests, inbox) = channel();
        let (ready, opened) = channel();
        let thread = std::thread::spawn({
            let (netns, tap) = (netns.to_owned(), tap.to_owned());
            move || {
                namespace::inside(&netns, move || match Stack::open(&tap, network) {
                    Ok(stack) => {
                        // Fails only if the caller is gone; then the inbox is closed too.
                        let _ = ready.send(());
                        serve(stack, &inbox)
                    }
                    Err(error) => Err(error),
                })
            }
        });
        if opened.recv().is_err() {
            let ended = thread.join().ok().context("the fake guest panicked")?;
            ended?;
            bail!("the fake guest ended early");
        }
        // A TAP that is down never gets there, and may be what a test is about.
        namespace::wait_until_up(netns, tap, Duration::from_secs(1))?;
        Ok(Self {
            requests: Some(requests),
            thread: Some(thread),
            network,
        })
    }

    /// What it believes of its network.
    #[must_use]
    pub fn network(&self) -> GuestNetwork {
        self.network
    }

    /// Sends one ping and waits for the answer. Returns how long it took.
    ///
    /// # Errors
    /// If no answer comes in time.
    pub fn ping(&self, target: IpAddr, patience: Duration) -> Result<Duration> {
        self.call(move |stack| stack.ping(target, patience))
    }

    /// Sends one UDP packet and waits for one back.
    ///
    /// # Errors
    /// If none comes in time.
    ///
    /// # Panics
    /// If one comes from another address or port than was called: a real guest's connected socket would never
    /// get it, and who expects no answer must hear of one that came all the same.
    pub fn exchange_udp(
        &self,
        target: SocketAddr,
        payload: &[u8],
        patience: Duration,
    ) -> Result<Vec<u8>> {
        let payload = payload.to_vec();
        let (answer, from) =
            self.call(move |stack| stack.exchange_udp(target, &payload, patience))?;
        assert_eq!(from, target, "who answers isn't who was called");
        Ok(answer)
    }

    /// Connects, sends everything, closes its side, and returns what came until the other side closed.
    ///
    /// # Errors
    /// If the connection is refused, reset, or not done in time.
    pub fn exchange_tcp(
        &self,
        target: SocketAddr,
        payload: &[u8],
        patience: Duration,
    ) -> Result<Vec<u8>> {
        let payload = payload.to_vec();
        self.call(move |stack| stack.exchange_tcp(target, &payload, patience))
    }

    /// GETs `/` from a web server and returns the body.
    ///
    /// # Errors
    /// If there is no answer in time.
    pub fn fetch(&self, target: SocketAddr, patience: Duration) -> Result<String> {
        let request = b"GET / HTTP/1.0\r\n\r\n";
        let answer = self.exchange_tcp(target, request, patience)?;
        let text = String::from_utf8_lossy(&answer);
        let (_, body) = text
            .split_once("\r\n\r\n")
            .with_context(|| format!("not HTTP: {text}"))?;
        Ok(body.to_owned())
    }

    /// Puts a frame on the wire as it is. [`frame`] makes some.
    ///
    /// # Errors
    /// If the TAP doesn't take it.
    pub fn send_frame(&self, frame: &[u8]) -> Result<()> {
        let frame = frame.to_vec();
        self.call(move |stack| stack.send_frame(&frame))
    }

    /// Puts frames on the wire as fast as the TAP takes them, one after the other, for a time. Returns how
    /// many. The guest answers nobody meanwhile.
    ///
    /// # Errors
    /// If the TAP doesn't take them.
    pub fn flood(&self, frames: Vec<Vec<u8>>, span: Duration) -> Result<u64> {
        self.call(move |stack| stack.flood(&frames, span))
    }

    /// The frames that arrived since the last call, oldest first; at most the last
    /// [`FRAMES_KEPT_MAX`].
    ///
    /// # Errors
    /// If the guest has ended.
    pub fn received_frames(&self) -> Result<Vec<Vec<u8>>> {
        self.call(|stack| Ok(stack.take_received()))
    }

    /// Closes the TAP.
    ///
    /// # Errors
    /// If the guest had ended by itself; says why.
    pub fn detach(mut self) -> Result<()> {
        self.end()
    }

    fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Stack) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (answer, inbox) = channel();
        let request: Request = Box::new(move |stack| {
            // Nobody waits any more if this fails.
            let _ = answer.send(work(stack));
        });
        let gone = "the fake guest has ended: its TAP is gone or down";
        let requests = self.requests.as_ref().context(gone)?;
        requests.send(request).ok().context(gone)?;
        inbox.recv().context(gone)?
    }

    fn end(&mut self) -> Result<()> {
        self.requests = None;
        match self.thread.take().map(JoinHandle::join) {
            None => Ok(()),
            Some(Ok(ended)) => ended,
            Some(Err(_)) => bail!("the fake guest panicked"),
        }
    }
}

impl Drop for FakeGuest {
    fn drop(&mut self) {
        // A test that cares calls `detach`.
        let _ = self.end();
    }
}

/// Number of received frames that a fake guest keeps for the test to see.
pub const FRAMES_KEPT_MAX: usize = 4096;

/// Runs the guest until its owner is gone.
fn serve(mut stack: Stack, inbox: &Receiver<Request>) -> Result<()> {
    use std::sync::mpsc::TryRecvError;
    loop {
        match inbox.try_recv() {
            Ok(request) => request(&mut stack),
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => return Ok(()),
        }
        stack.turn()?;
    }
}

#[cfg(test)]
mod tests;

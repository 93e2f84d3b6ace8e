//! The service's end of control connections: who asks, what, and the answer.
//!
//! One thread serves all of them without blocking. A connection whose answer hasn't been read is asked for
//! nothing more until it has.

use std::{
    collections::HashMap, io, mem::MaybeUninit, os::fd::OwnedFd, path::Path, sync::Arc,
    time::Instant,
};

use rustix::{
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketFlags, accept_with,
        recvmsg, send, sockopt::socket_peercred,
    },
    process::geteuid,
};
use sandwire_api::vsock::VsockType;

use super::{REQUEST_MAX, RefusalCode, Request, Response};
use crate::{
    address::VmKey,
    capture::{SNAP_LENGTH, Sink},
    listener::{ACCEPT_PAUSE, Descriptors, ListenerError, is_callers_own, listen_on},
    readiness::{Interest, Poller, Ready},
    service::channels::{ChannelError, Channels},
};

/// Control connections at once; further ones are closed.
const PEERS_MAX: usize = 64;
/// Bytes read at once.
const READ_BYTES: usize = 64 * 1024;

/// All control connections. Who embeds it waits with its poller, and gives back what is ready.
#[derive(Debug)]
pub struct Server {
    listener: OwnedFd,
    /// Who may connect: root, who started us, and our own user.
    known: [u32; 3],
    peers: HashMap<u64, Peer>,
    pause: Option<Instant>,
    next: u64,
    first_token: u64,
}

#[derive(Debug)]
struct Peer {
    socket: OwnedFd,
    incoming: Vec<u8>,
    outgoing: Vec<u8>,
    /// A descriptor that came along and hasn't been asked to be used yet.
    fd: Option<OwnedFd>,
    capture: Option<(VmKey, Arc<Sink>)>,
    writing: bool,
}

impl Server {
    /// Listens in the service's folder. Tokens from `first_token` on are its own.
    ///
    /// # Errors
    /// Another service there, mostly.
    pub fn listen(path: &Path, first_token: u64) -> Result<Self, ListenerError> {
        Ok(Self {
            listener: listen_on(path, VsockType::Stream, Descriptors::Taken)?,
            known: [0, geteuid().as_raw(), geteuid().as_raw()],
            peers: HashMap::new(),
            pause: None,
            next: first_token,
            first_token,
        })
    }

    /// Has the listener watched. The process is who it is to be by now.
    ///
    /// # Errors
    /// Of `epoll_ctl`.
    pub fn watch(&mut self, poller: &Poller) -> io::Result<()> {
        self.known[2] = geteuid().as_raw();
        poller.add(&self.listener, self.first_token, Interest::READ)
    }

    /// Until when callers wait since there were no descriptors; then [`Self::listen_again`].
    #[must_use]
    pub fn pause(&self) -> Option<Instant> {
        self.pause
    }

    /// Has the listener watched again if its pause is over.
    pub fn listen_again(&mut self, poller: &Poller) {
        let now = Instant::now();
        if self.pause.is_some_and(|until| until <= now) {
            let watched = poller.add(&self.listener, self.first_token, Interest::READ);
            self.pause = watched.is_err().then_some(now + ACCEPT_PAUSE);
        }
    }

    /// Does what a ready socket asks for.
    pub fn ready(&mut self, ready: Ready, poller: &Poller, channels: &mut Channels) {
        if ready.token == self.first_token {
            self.accept(poller);
            return;
        }
        let Some(peer) = self.peers.get_mut(&ready.token) else {
            return;
        };
        if !peer.serve(channels) {
            self.close(ready.token, channels);
            return;
        }
        peer.rewatch(poller, ready.token);
    }

    /// Tells those whose capture has ended by itself, and why.
    pub fn tell_ended_captures(&mut self, poller: &Poller, channels: &mut Channels) {
        for (token, peer) in &mut self.peers {
            let Some((key, sink)) = &peer.capture else {
                continue;
            };
            let outcome = sink.outcome();
            let Some(reason) = outcome.reason else {
                continue;
            };
            channels.end_capture(key, sink);
            peer.capture = None;
            peer.answer(&Response::CaptureEnded {
                recorded: outcome.recorded,
                dropped: outcome.dropped,
                reason,
            });
            // What can't be written now is when the socket can take it.
            let _ = peer.flush();
            peer.rewatch(poller, *token);
        }
    }

    fn accept(&mut self, poller: &Poller) {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = match accept_with(&self.listener, flags) {
            Ok(socket) => socket,
            Err(error) => {
                if error != Errno::AGAIN && !is_callers_own(error) {
                    let _ = poller.remove(&self.listener);
                    self.pause = Some(Instant::now() + ACCEPT_PAUSE);
                }
                return;
            }
        };
        let uid = socket_peercred(&socket).map(|peer| peer.uid.as_raw());
        if !uid.is_ok_and(|uid| self.known.contains(&uid)) || self.peers.len() >= PEERS_MAX {
            tracing::warn!(?uid, "a control connection was closed at once");
            return;
        }
        self.next += 1;
        if poller.add(&socket, self.next, Interest::READ).is_ok() {
            self.peers.insert(
                self.next,
                Peer {
                    socket,
                    incoming: Vec::new(),
                    outgoing: Vec::new(),
                    fd: None,
                    capture: None,
                    writing: false,
                },
            );
        }
    }

    fn close(&mut self, token: u64, channels: &mut Channels) {
        if let Some(peer) = self.peers.remove(&token)
            && let Some((key, sink)) = &peer.capture
        {
            channels.end_capture(key, sink);
        }
    }
}

impl Peer {
    /// Goes as far as it can; false when the connection is over.
    fn serve(&mut self, channels: &mut Channels) -> bool {
        loop {
            if self.flush().is_err() {
                return false;
            }
            if !self.outgoing.is_empty() {
                return true;
            }
            if let Some(end) = self.incoming.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.incoming.drain(..=end).collect();
                let answer = self.obey(&line, channels);
                self.answer(&answer);
                continue;
            }
            if self.incoming.len() > REQUEST_MAX {
                self.answer(&refused(
                    RefusalCode::Invalid,
                    format!("a request of more than {REQUEST_MAX} bytes"),
                ));
                // It is told, if it still listens; what comes next can't be understood.
                let _ = self.flush();
                return false;
            }
            match self.read() {
                Ok(Some(0)) | Err(_) => return false,
                Ok(Some(_)) => {}
                Ok(None) => return true,
            }
        }
    }

    /// Reads what is there, with a descriptor if one comes along. None: nothing now.
    fn read(&mut self) -> Result<Option<usize>, Errno> {
        let mut bytes = [0; READ_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut along = RecvAncillaryBuffer::new(&mut space);
        let mut pieces = [io::IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let read = match recvmsg(&self.socket, &mut pieces, &mut along, flags) {
            Ok(message) => message.bytes,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(error) => return Err(error),
        };
        for message in along.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fd = fds.last();
            }
        }
        self.incoming.extend_from_slice(&bytes[..read]);
        Ok(Some(read))
    }

    fn answer(&mut self, response: &Response) {
        match serde_json::to_vec(response) {
            Ok(line) => {
                self.outgoing.extend_from_slice(&line);
                self.outgoing.push(b'\n');
            }
            Err(error) => tracing::error!(%error, "an answer couldn't be written as JSON"),
        }
    }

    /// Writes what is outgoing, as far as it goes.
    fn flush(&mut self) -> Result<(), Errno> {
        let mut written = 0;
        let outcome = loop {
            if written == self.outgoing.len() {
                break Ok(());
            }
            match send(&self.socket, &self.outgoing[written..], SendFlags::NOSIGNAL) {
                Ok(bytes) => written += bytes,
                Err(Errno::AGAIN) => break Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => break Err(error),
            }
        };
        self.outgoing.drain(..written);
        outcome
    }

    /// Waits for what the connection can't go on without.
    fn rewatch(&mut self, poller: &Poller, token: u64) {
        let writing = !self.outgoing.is_empty();
        if std::mem::replace(&mut self.writing, writing) == writing {
            return;
        }
        let interest = if writing {
            Interest::WRITE
        } else {
            Interest::READ
        };
        let again = poller
            .remove(&self.socket)
            .and_then(|()| poller.add(&self.socket, token, interest));
        if let Err(error) = again {
            tracing::warn!(%error, "a control connection can't be watched any more");
        }
    }

    fn obey(&mut self, line: &[u8], channels: &mut Channels) -> Response {
        let fd = self.fd.take();
        let request = match serde_json::from_slice(line) {
            Ok(request) => request,
            Err(error) => {
                let message = format!("that is no request: {error}");
                return refused(RefusalCode::Invalid, message);
            }
        };
        self.carry_out(request, fd, channels)
            .unwrap_or_else(|error| refused(error.code(), error.to_string()))
    }

    fn carry_out(
        &mut self,
        request: Request,
        fd: Option<OwnedFd>,
        channels: &mut Channels,
    ) -> Result<Response, ChannelError> {
        Ok(match request {
            Request::Hello => Response::Hello {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                pid: std::process::id(),
                threads: channels.threads(),
            },
            Request::AddVm { vm } => {
                channels.add(vm)?;
                Response::Done
            }
            Request::RemoveVm { key } => {
                channels.remove(&key)?;
                Response::Done
            }
            Request::SetPolicy { key, policy } => {
                channels.set_policy(&key, policy)?;
                Response::Done
            }
            Request::ListVms => Response::Vms {
                vms: channels.list(),
            },
            Request::ListConnections { key } => Response::Connections {
                connections: channels.connections(key.as_ref())?,
            },
            Request::Traffic { key } => Response::Traffic {
                vms: channels.traffic(key.as_ref())?,
            },
            Request::Capture { key, snap_length } => {
                return self.start_capture(key, snap_length, fd, channels);
            }
        })
    }

    fn start_capture(
        &mut self,
        key: VmKey,
        snap_length: Option<u32>,
        fd: Option<OwnedFd>,
        channels: &mut Channels,
    ) -> Result<Response, ChannelError> {
        let Some(fd) = fd else {
            let message = "a capture needs a file to write to, sent along with the request";
            return Ok(refused(RefusalCode::Invalid, message.to_owned()));
        };
        if self.capture.is_some() {
            let message = "this connection has a capture already; open another";
            return Ok(refused(RefusalCode::InUse, message.to_owned()));
        }
        let snap_length = snap_length.unwrap_or(SNAP_LENGTH).min(SNAP_LENGTH);
        let sink = channels.start_capture(&key, fd, snap_length)?;
        self.capture = Some((key, sink));
        Ok(Response::CaptureStarted)
    }
}

fn refused(code: RefusalCode, message: String) -> Response {
    Response::Refused { code, message }
}

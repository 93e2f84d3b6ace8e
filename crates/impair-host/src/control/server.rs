//! The service's end of control connections: a thread for each, since a request may have to wait for packets.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::{
        fd::AsFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::sockopt::socket_peercred,
    process::geteuid,
};

use super::{
    Cleared, PEERS_MAX, REQUEST_MAX, RefusalCode, Request, Response, Target, client::connect,
};
use crate::{
    error::Error,
    host::{Host, SharedHost},
};

/// How long a start waits for room in the queue of who listens in its place.
const QUEUE_PATIENCE: Duration = Duration::from_millis(100);

/// Where control connections come in.
#[derive(Debug)]
pub(crate) struct Server {
    listener: UnixListener,
    host: SharedHost,
    peers: Arc<AtomicUsize>,
}

impl Server {
    /// Listens at that path, in the place of a socket that nobody listens at any more.
    pub(crate) fn listen(path: &Path, host: SharedHost) -> io::Result<Self> {
        let listener = match UnixListener::bind(path) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                if is_served(path) {
                    let text = "another service listens there; end it, or choose another folder";
                    return Err(io::Error::new(io::ErrorKind::AddrInUse, text));
                }
                std::fs::remove_file(path)?;
                UnixListener::bind(path)?
            }
            other => other?,
        };
        listener.set_nonblocking(true)?;
        Ok(Self {
            listener,
            host,
            peers: Arc::default(),
        })
    }

    /// What becomes readable when somebody connects.
    pub(crate) fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Whether another connection may be served beside those that are.
    pub(crate) fn has_room(&self) -> bool {
        self.peers.load(Ordering::Relaxed) < PEERS_MAX
    }

    /// Accepts who has connected, if anybody has and there is room.
    pub(crate) fn accept(&self) {
        if !self.has_room() {
            return;
        }
        let Ok((stream, _)) = self.listener.accept() else {
            return;
        };
        let uid = socket_peercred(&stream).map(|peer| peer.uid.as_raw());
        if !uid.is_ok_and(|uid| uid == 0 || uid == geteuid().as_raw()) {
            tracing::warn!(?uid, "a control connection was closed at once");
            return;
        }
        self.peers.fetch_add(1, Ordering::Relaxed);
        let (host, peers) = (self.host.clone(), self.peers.clone());
        let serve = move || {
            if let Err(error) = serve(stream, &host) {
                tracing::debug!(%error, "a control connection broke");
            }
            peers.fetch_sub(1, Ordering::Relaxed);
        };
        if let Err(error) = thread::Builder::new().name("control".into()).spawn(serve) {
            self.peers.fetch_sub(1, Ordering::Relaxed);
            tracing::warn!(%error, "a control connection has no thread");
        }
    }
}

/// Whether somebody listens there, be it that nobody is accepted.
fn is_served(path: &Path) -> bool {
    match connect(path, QUEUE_PATIENCE) {
        Ok(_) => true,
        Err(error) => error.kind() == io::ErrorKind::TimedOut,
    }
}

fn serve(stream: UnixStream, host: &SharedHost) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    let mut output = stream.try_clone()?;
    let mut input = BufReader::new(stream);
    let limit = u64::try_from(REQUEST_MAX).unwrap_or(u64::MAX);
    loop {
        let mut line = Vec::new();
        let length = (&mut input).take(limit).read_until(b'\n', &mut line)?;
        if length == 0 {
            return Ok(());
        }
        let is_whole = line.ends_with(b"\n");
        let answer = if is_whole || length < REQUEST_MAX {
            obey(&line, host, &output)
        } else {
            let message = format!("a request of more than {REQUEST_MAX} bytes");
            refused(RefusalCode::Invalid, message)
        };
        let mut text = serde_json::to_vec(&answer)?;
        text.push(b'\n');
        output.write_all(&text)?;
        if !is_whole {
            // What comes next can't be understood.
            return Ok(());
        }
    }
}

fn obey(line: &[u8], host: &SharedHost, asker: &UnixStream) -> Response {
    match serde_json::from_slice(line) {
        Ok(request) => carry_out(request, host, asker)
            .unwrap_or_else(|error| refused(error.code(), error.to_string())),
        Err(error) => {
            let message = format!("that is no request: {error}");
            refused(RefusalCode::Invalid, message)
        }
    }
}

fn carry_out(request: Request, host: &SharedHost, asker: &UnixStream) -> Result<Response, Error> {
    Ok(match request {
        Request::Hello => hello(&host.lock()),
        Request::Set {
            target,
            owner,
            impairment,
            force,
        } => {
            host.with(&target, |host| {
                refuse_left(&target, asker)?;
                host.set(&target, &owner, &impairment, force)
            })?;
            Response::Done
        }
        Request::Clear { target, flush } => Response::Cleared {
            cleared: clear(host, &target, flush, asker)?,
        },
        Request::List { traces_of, only_of } => Response::Targets {
            targets: host.lock().list(only_of.as_ref(), traces_of.as_ref())?,
        },
    })
}

fn hello(host: &Host) -> Response {
    Response::Hello {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        threads: host.threads(),
        netns_inode: Some(host.own_inode()),
    }
}

/// Refuses to change anything for somebody who has given up: that one believes it to have failed, and what has been asked for since
/// would be undone, by threads that are in no order.
fn refuse_left(target: &Target, asker: impl AsFd) -> Result<(), Error> {
    // Who only says nothing more still waits for the answer.
    let mut polled = [PollFd::new(&asker, PollFlags::empty())];
    let now = Timespec::default();
    let told = poll(&mut polled, Some(&now));
    let has_left = told.is_ok() && polled[0].revents().contains(PollFlags::HUP);
    match has_left {
        true => Err(Error::Left {
            target: target.clone(),
        }),
        false => Ok(()),
    }
}

/// Others may ask meanwhile.
fn clear(
    host: &SharedHost,
    target: &Target,
    flush: bool,
    asker: &UnixStream,
) -> Result<Cleared, Error> {
    let leaving = host.with(target, |host| {
        refuse_left(target, asker)?;
        host.begin_clear(target, flush)
    })?;
    let Some(leaving) = leaving else {
        return Ok(Cleared::default());
    };
    let cleared = leaving.wait()?;
    host.finish_clear(&leaving)?;
    Ok(cleared)
}

fn refused(code: RefusalCode, message: String) -> Response {
    Response::Refused { code, message }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

    use std::net::Shutdown;

    use sandwire_engine::PoolLimits;

    use super::*;
    use crate::{
        control::{Owner, Side},
        host::Settings,
    };

    /// As of a service that was stopped (SIGSTOP), or that took long to take up others' targets.
    #[test]
    fn nothing_is_begun_for_who_has_given_up_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let settings = Settings {
            memory: folder.path().join("targets"),
            pins: folder.path().join("pins"),
            threads: 1,
            targets_max: 1,
            limits: PoolLimits::default(),
            uses_links: true,
        };
        let host = SharedHost::new(Host::start(settings).unwrap());
        let target = Target {
            netns: None,
            interface: "nosuch".to_owned(),
            side: Side::Host,
        };
        let set = || Request::Set {
            target: target.clone(),
            owner: Owner::User { uid: 0 },
            impairment: Box::new("delay 1ms".parse().unwrap()),
            force: false,
        };
        let clear = || Request::Clear {
            target: target.clone(),
            flush: false,
        };
        let (asker, served) = UnixStream::pair().unwrap();
        for _ in 0..2 {
            let refusal = carry_out(set(), &host, &served).unwrap_err();
            assert!(matches!(refusal, Error::NoInterface { .. }), "{refusal}");
            carry_out(clear(), &host, &served).unwrap();
            asker.shutdown(Shutdown::Write).unwrap();
        }
        drop(asker);
        for request in [set(), clear()] {
            let refusal = carry_out(request, &host, &served).unwrap_err();
            assert!(matches!(refusal, Error::Left { .. }), "{refusal}");
        }
    }
}

//! The open TAPs of a lease, passed over the daemon's socket.
//!
//! The daemon answers 101 and then sends one byte with the descriptors (`SCM_RIGHTS`). The kernel may
//! give that byte to the reader together with the end of the answer's head, and drops descriptors that
//! the reader made no room for; so every read here has room for them, and no HTTP library is used.

use std::{
    io::{self, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    time::Instant,
};

use hyper::{Method, StatusCode, body::Bytes};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use tokio::{io::Interest, net::UnixStream, time::timeout};

use super::{Answer, Call, Client, ClientError, lease_path};
use crate::{name::Name, slot::NICS_MAX};

/// Longest head and error that is read.
const ANSWER_BYTES_MAX: usize = 64 * 1024;

impl Client {
    /// The TAPs of a lease, opened by the daemon, in the order of its interfaces. A VMM that takes open
    /// TAPs (QEMU, Cloud Hypervisor) then needs neither rights on them nor their namespace. As long as one of them
    /// is open anywhere, the lease's slot is in use.
    pub async fn taps(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
    ) -> Result<Vec<OwnedFd>, ClientError> {
        let call = Call::new(Method::GET, lease_path(name, "/taps", owner_uid));
        let begun = Instant::now();
        let stream = timeout(self.timeout, self.open_stream()).await;
        let stream = stream
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            .map_err(|source| ClientError::Connect {
                path: self.socket.clone(),
                source,
            })?;
        let exchange = Exchange {
            stream,
            answer: Vec::new(),
            descriptors: Vec::new(),
        };
        let left = self.timeout.saturating_sub(begun.elapsed());
        let received = match timeout(left, exchange.run(&call.path)).await {
            Ok(received) => received,
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        };
        match received.map_err(|error| call.unanswered(&self.socket, error))? {
            Received::Taps(descriptors) if descriptors.is_empty() => {
                Err(call.undecodable(101, &"no descriptors came with it"))
            }
            Received::Taps(descriptors) => Ok(descriptors),
            Received::Refusal(answer) => Err(match answer.checked(&call) {
                Err(error) => error,
                Ok(_) => call.undecodable(200, &"the connection was not upgraded"),
            }),
        }
    }
}

/// What the daemon answered.
enum Received {
    Taps(Vec<OwnedFd>),
    Refusal(Answer),
}

/// The conversation on one connection.
struct Exchange {
    stream: UnixStream,
    answer: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

impl Exchange {
    async fn run(mut self, path: &str) -> io::Result<Received> {
        let request = format!(
            "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: {}\r\n\r\n",
            crate::TAPS_PROTOCOL
        );
        write_all(&self.stream, request.as_bytes()).await?;
        let head_end = loop {
            if let Some(end) = find(&self.answer, b"\r\n\r\n") {
                break end + 4;
            }
            self.read().await?;
        };
        let head = Head::parse(&self.answer[..head_end])?;
        if head.status == StatusCode::SWITCHING_PROTOCOLS {
            while self.answer.len() <= head_end {
                self.read().await?;
            }
            return Ok(Received::Taps(self.descriptors));
        }
        while self.answer.len() < head_end.saturating_add(head.length) {
            self.read().await?;
        }
        let body = Bytes::copy_from_slice(&self.answer[head_end..head_end + head.length]);
        Ok(Received::Refusal(Answer {
            status: head.status,
            body,
        }))
    }

    /// Reads what there is, and waits if there is nothing.
    async fn read(&mut self) -> io::Result<()> {
        let (bytes, descriptors) = self
            .stream
            .async_io(Interest::READABLE, || receive(&self.stream))
            .await?;
        if bytes.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.answer.extend(bytes);
        self.descriptors.extend(descriptors);
        if self.answer.len() > ANSWER_BYTES_MAX {
            return Err(io::Error::other("the answer is too long"));
        }
        Ok(())
    }
}

/// Receives bytes and the descriptors that come with them.
fn receive(stream: &UnixStream) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = vec![0; 4096];
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(NICS_MAX as usize))];
    let mut control = RecvAncillaryBuffer::new(&mut room);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(
        stream.as_fd(),
        &mut [IoSliceMut::new(&mut bytes)],
        &mut control,
        flags,
    )?;
    bytes.truncate(received.bytes);
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    Ok((bytes, descriptors))
}

async fn write_all(stream: &UnixStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.writable().await?;
        match stream.try_write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn find(text: &[u8], pattern: &[u8]) -> Option<usize> {
    text.windows(pattern.len()).position(|part| part == pattern)
}

/// What matters of the head of an answer.
struct Head {
    status: StatusCode,
    length: usize,
}

impl Head {
    fn parse(head: &[u8]) -> io::Result<Self> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidData);
        let text = std::str::from_utf8(head).map_err(|_| invalid())?;
        let mut lines = text.split("\r\n");
        let status = lines
            .next()
            .and_then(|line| line.strip_prefix("HTTP/1.1 ")?.get(..3))
            .and_then(|digits| StatusCode::from_bytes(digits.as_bytes()).ok())
            .ok_or_else(invalid)?;
        let length = lines
            .filter_map(|line| line.split_once(':'))
            .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
            .map_or(Ok(0), |(_, value)| value.trim().parse())
            .map_err(|_| invalid())?;
        if length > ANSWER_BYTES_MAX {
            return Err(invalid());
        }
        Ok(Self { status, length })
    }
}

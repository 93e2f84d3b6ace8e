//! A lease's packets, one by one, while the answer to one request lasts.

use std::path::PathBuf;

use http_body_util::{BodyExt, Full};
use hyper::{
    Method,
    body::{Bytes, Incoming},
    client::conn::http1::SendRequest,
};
use tokio::time::timeout;

use super::{Answer, Call, Client, ClientError, lease_path};
use crate::{name::Name, trace::TraceLine};

/// Longest line that is taken: several times what a packet needs.
const LINE_BYTES_MAX: usize = 64 * 1024;

/// A running trace. Dropping it ends the trace.
#[derive(Debug)]
pub struct Trace {
    body: Incoming,
    /// Bytes that came and are not yet lines.
    pending: Vec<u8>,
    call: Call,
    socket: PathBuf,
    /// Held so that the connection lasts as long as the trace.
    _connection: SendRequest<Full<Bytes>>,
}

impl Client {
    /// Begins to watch a lease's packets.
    pub async fn trace(&self, name: &Name, owner_uid: Option<u32>) -> Result<Trace, ClientError> {
        let call = Call::new(Method::GET, lease_path(name, "/trace", owner_uid));
        match timeout(self.timeout, self.begin_trace(call)).await {
            Ok(result) => result,
            Err(_) => Err(ClientError::Transport {
                operation: format!("trace lease {name}"),
                path: self.socket.clone(),
                source: "the answer took too long".into(),
            }),
        }
    }

    async fn begin_trace(&self, call: Call) -> Result<Trace, ClientError> {
        let (body, connection) = self.stream(&call).await?;
        Ok(Trace {
            body,
            pending: Vec::new(),
            call,
            socket: self.socket.clone(),
            _connection: connection,
        })
    }

    /// Sends a request whose answer goes on until one side ends it.
    pub(super) async fn stream(
        &self,
        call: &Call,
    ) -> Result<(Incoming, SendRequest<Full<Bytes>>), ClientError> {
        let request = call.request(&self.socket)?;
        let mut connection = self.connect().await?;
        let response = connection
            .send_request(request)
            .await
            .map_err(|error| call.unanswered(&self.socket, error))?;
        let status = response.status();
        let body = response.into_body();
        if status.is_success() {
            return Ok((body, connection));
        }
        let body = body
            .collect()
            .await
            .map_err(|error| call.unanswered(&self.socket, error))?
            .to_bytes();
        let answer = Answer { status, body };
        Err(match answer.checked(call) {
            Err(error) => error,
            Ok(_) => call.undecodable(status.as_u16(), &"a stream has status 200"),
        })
    }
}

impl Trace {
    /// The next line; nothing once the daemon has ended the trace. Waits as long as no packet comes.
    pub async fn next(&mut self) -> Result<Option<TraceLine>, ClientError> {
        loop {
            if let Some(line) = self.take_line()? {
                return Ok(Some(line));
            }
            match self.body.frame().await {
                None => return Ok(None),
                Some(Err(error)) => return Err(self.call.unanswered(&self.socket, error)),
                Some(Ok(frame)) => {
                    if let Some(data) = frame.data_ref() {
                        self.pending.extend_from_slice(data);
                    }
                }
            }
        }
    }

    fn take_line(&mut self) -> Result<Option<TraceLine>, ClientError> {
        let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') else {
            return if self.pending.len() > LINE_BYTES_MAX {
                Err(self.call.undecodable(200, &"a line without end"))
            } else {
                Ok(None)
            };
        };
        let line = serde_json::from_slice(&self.pending[..end])
            .map_err(|error| self.call.undecodable(200, &error));
        self.pending.drain(..=end);
        line.map(Some)
    }
}

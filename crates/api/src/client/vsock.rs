//! vsock channels of leases: their figures, connections and policies, and captures of their packets.

use std::path::PathBuf;

use http_body_util::{BodyExt, Full};
use hyper::{
    Method,
    body::{Bytes, Incoming},
    client::conn::http1::SendRequest,
};
use tokio::time::timeout;

use super::{Call, Client, ClientError, lease_path};
use crate::{
    name::Name,
    vsock::{LeaseVsock, LeaseVsockPolicy, VsockConnection, VsockPolicy, VsockRule},
};

/// A running capture: bytes of a pcap file (LINKTYPE_VSOCK) as packets come. Dropping it ends the capture.
#[derive(Debug)]
pub struct Capture {
    body: Incoming,
    call: Call,
    socket: PathBuf,
    /// Held so that the connection lasts as long as the capture.
    _connection: SendRequest<Full<Bytes>>,
}

impl Client {
    /// Channels of all leases that the caller may see, with their counters.
    pub async fn vsock_channels(&self) -> Result<Vec<LeaseVsock>, ClientError> {
        self.json(Call::new(Method::GET, "/v1/vsock")).await
    }

    /// A lease's channel with its counters.
    pub async fn vsock(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
    ) -> Result<LeaseVsock, ClientError> {
        let path = lease_path(name, "/vsock", owner_uid);
        self.json(Call::new(Method::GET, path)).await
    }

    /// Connections of all channels that the caller may see.
    pub async fn vsock_connections(&self) -> Result<Vec<VsockConnection>, ClientError> {
        self.json(Call::new(Method::GET, "/v1/vsock/connections"))
            .await
    }

    /// Connections of a lease's channel.
    pub async fn lease_vsock_connections(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
    ) -> Result<Vec<VsockConnection>, ClientError> {
        let path = lease_path(name, "/vsock/connections", owner_uid);
        self.json(Call::new(Method::GET, path)).await
    }

    /// What a lease's guest may reach by vsock.
    pub async fn vsock_policy(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
    ) -> Result<LeaseVsockPolicy, ClientError> {
        let path = lease_path(name, "/vsock/policy", owner_uid);
        self.json(Call::new(Method::GET, path)).await
    }

    /// Gives a lease's channel a policy of its own, at once.
    pub async fn set_vsock_policy(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
        policy: &VsockPolicy,
    ) -> Result<LeaseVsockPolicy, ClientError> {
        let path = lease_path(name, "/vsock/policy", owner_uid);
        self.json(Call::with_body(Method::PUT, path, policy)).await
    }

    /// Adds a rule to what a lease's guest may reach by vsock, at once.
    pub async fn add_vsock_rule(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
        rule: &VsockRule,
    ) -> Result<LeaseVsockPolicy, ClientError> {
        let path = lease_path(name, "/vsock/policy", owner_uid);
        self.json(Call::with_body(Method::POST, path, rule)).await
    }

    /// Gives a lease's channel its pool's policy again.
    pub async fn reset_vsock_policy(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
    ) -> Result<LeaseVsockPolicy, ClientError> {
        let path = lease_path(name, "/vsock/policy", owner_uid);
        self.json(Call::new(Method::DELETE, path)).await
    }

    /// Begins to capture a channel's packets, each cut to `snap_bytes` of payload.
    pub async fn vsock_capture(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
        snap_bytes: Option<u32>,
    ) -> Result<Capture, ClientError> {
        let mut path = lease_path(name, "/vsock/capture", owner_uid);
        if let Some(bytes) = snap_bytes {
            let separator = if owner_uid.is_some() { '&' } else { '?' };
            path = format!("{path}{separator}snap_bytes={bytes}");
        }
        let call = Call::new(Method::GET, path);
        match timeout(self.timeout, self.stream(&call)).await {
            Ok(result) => result.map(|(body, connection)| Capture {
                body,
                call,
                socket: self.socket.clone(),
                _connection: connection,
            }),
            Err(_) => Err(call.unanswered(&self.socket, "the answer took too long")),
        }
    }
}

impl Capture {
    /// The next bytes of the file; nothing once the capture has ended. Waits as long as no packet comes.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        loop {
            match self.body.frame().await {
                None => return Ok(None),
                Some(Err(error)) => return Err(self.call.unanswered(&self.socket, error)),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
            }
        }
    }
}

//! The client for programs that aren't asynchronous: each call returns when the answer is there.

use std::{io, net::IpAddr, os::fd::OwnedFd, path::PathBuf, time::Duration};

use hyper::body::Bytes;
use tokio::runtime::{Builder, Runtime};

use super::{Acquired, Capture, Client, ClientError, Trace};
use crate::{
    attach::AttachedState,
    drop_reason::DropReasonText,
    health::Health,
    identity::ListedIdentity,
    impairment::{Impairment, ImpairmentCleared, LeaseImpairment},
    lease::{AcquireLease, Lease, LeaseDetail, LeasePolicy, Released},
    name::Name,
    pool::{ChangePool, PolicySpec, Pool, PoolSpec},
    published_port::{Protocol, PublishPort, PublishedPort},
    trace::TraceLine,
    traffic::LeaseTraffic,
    vsock::{LeaseVsock, LeaseVsockPolicy, VsockConnection, VsockPolicy, VsockRule},
};

/// A [`Client`] with a runtime of its own on the calling thread. Not for use inside a runtime.
///
/// Each method does what the method of the same name does there.
#[derive(Debug)]
pub struct Blocking {
    runtime: io::Result<Runtime>,
    client: Client,
}

#[expect(missing_docs, reason = "the methods are described at `Client`")]
impl Blocking {
    /// A client of the daemon that listens on `socket`. It connects when first used.
    #[must_use]
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            runtime: Builder::new_current_thread().enable_all().build(),
            client: Client::new(socket),
        }
    }

    /// The same client with another limit on the time that a request may take.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.client = self.client.with_timeout(timeout);
        self
    }

    pub fn health(&self) -> Result<Health, ClientError> {
        self.wait(self.client.health())
    }

    pub fn metrics(&self) -> Result<String, ClientError> {
        self.wait(self.client.metrics())
    }

    pub fn openapi(&self) -> Result<serde_json::Value, ClientError> {
        self.wait(self.client.openapi())
    }

    pub fn pools(&self) -> Result<Vec<Pool>, ClientError> {
        self.wait(self.client.pools())
    }

    pub fn create_pool(&self, spec: &PoolSpec) -> Result<Pool, ClientError> {
        self.wait(self.client.create_pool(spec))
    }

    pub fn pool(&self, name: &Name) -> Result<Pool, ClientError> {
        self.wait(self.client.pool(name))
    }

    pub fn change_pool(&self, name: &Name, change: &ChangePool) -> Result<Pool, ClientError> {
        self.wait(self.client.change_pool(name, change))
    }

    pub fn resize_pool(&self, name: &Name, size: u32) -> Result<Pool, ClientError> {
        self.wait(self.client.resize_pool(name, size))
    }

    pub fn delete_pool(&self, name: &Name) -> Result<(), ClientError> {
        self.wait(self.client.delete_pool(name))
    }

    pub fn identities(&self) -> Result<Vec<ListedIdentity>, ClientError> {
        self.wait(self.client.identities())
    }

    pub fn leases(&self) -> Result<Vec<Lease>, ClientError> {
        self.wait(self.client.leases())
    }

    pub fn acquire(&self, request: &AcquireLease) -> Result<Acquired, ClientError> {
        self.wait(self.client.acquire(request))
    }

    pub fn lease(&self, name: &Name, owner_uid: Option<u32>) -> Result<LeaseDetail, ClientError> {
        self.wait(self.client.lease(name, owner_uid))
    }

    pub fn attached(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
    ) -> Result<AttachedState, ClientError> {
        self.wait(self.client.attached(name, owner_uid))
    }

    pub fn release(&self, name: &Name, owner_uid: Option<u32>) -> Result<Released, ClientError> {
        self.wait(self.client.release(name, owner_uid))
    }

    pub fn policy(&self, name: &Name, owner_uid: Option<u32>) -> Result<LeasePolicy, ClientError> {
        self.wait(self.client.policy(name, owner_uid))
    }

    pub fn set_policy(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
        policy: &PolicySpec,
    ) -> Result<LeasePolicy, ClientError> {
        self.wait(self.client.set_policy(name, owner_uid, policy))
    }

    pub fn reset_policy(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
    ) -> Result<LeasePolicy, ClientError> {
        self.wait(self.client.reset_policy(name, owner_uid))
    }

    pub fn impairment(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
    ) -> Result<LeaseImpairment, ClientError> {
        self.wait(self.client.impairment(name, owner_uid))
    }

    pub fn impair(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
        impairment: &Impairment,
    ) -> Result<LeaseImpairment, ClientError> {
        self.wait(self.client.impair(name, owner_uid, impairment))
    }

    pub fn end_impairment(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
        flush: bool,
    ) -> Result<ImpairmentCleared, ClientError> {
        self.wait(self.client.end_impairment(name, owner_uid, flush))
    }

    pub fn traffic(&self) -> Result<Vec<LeaseTraffic>, ClientError> {
        self.wait(self.client.traffic())
    }

    pub fn drop_reasons(&self) -> Result<Vec<DropReasonText>, ClientError> {
        self.wait(self.client.drop_reasons())
    }

    pub fn taps(&self, name: &Name, owner_uid: Option<u32>) -> Result<Vec<OwnedFd>, ClientError> {
        self.wait(self.client.taps(name, owner_uid))
    }

    pub fn trace(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
    ) -> Result<BlockingTrace<'_>, ClientError> {
        let trace = self.wait(self.client.trace(name, owner_uid))?;
        Ok(BlockingTrace {
            client: self,
            trace,
        })
    }

    pub fn lease_ports(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
    ) -> Result<Vec<PublishedPort>, ClientError> {
        self.wait(self.client.lease_ports(name, owner_uid))
    }

    pub fn publish(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
        port: &PublishPort,
        hide_host_service: bool,
    ) -> Result<PublishedPort, ClientError> {
        self.wait(
            self.client
                .publish(name, owner_uid, port, hide_host_service),
        )
    }

    pub fn withdraw(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
        protocol: Protocol,
        host_port: u16,
        host_address: Option<IpAddr>,
    ) -> Result<(), ClientError> {
        self.wait(
            self.client
                .withdraw(name, owner_uid, protocol, host_port, host_address),
        )
    }

    pub fn ports(&self) -> Result<Vec<PublishedPort>, ClientError> {
        self.wait(self.client.ports())
    }

    pub fn vsock_channels(&self) -> Result<Vec<LeaseVsock>, ClientError> {
        self.wait(self.client.vsock_channels())
    }

    pub fn vsock(&self, name: &Name, owner_uid: Option<u32>) -> Result<LeaseVsock, ClientError> {
        self.wait(self.client.vsock(name, owner_uid))
    }

    pub fn vsock_connections(&self) -> Result<Vec<VsockConnection>, ClientError> {
        self.wait(self.client.vsock_connections())
    }

    pub fn lease_vsock_connections(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
    ) -> Result<Vec<VsockConnection>, ClientError> {
        self.wait(self.client.lease_vsock_connections(name, owner_uid))
    }

    pub fn vsock_policy(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
    ) -> Result<LeaseVsockPolicy, ClientError> {
        self.wait(self.client.vsock_policy(name, owner_uid))
    }

    pub fn set_vsock_policy(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
        policy: &VsockPolicy,
    ) -> Result<LeaseVsockPolicy, ClientError> {
        self.wait(self.client.set_vsock_policy(name, owner_uid, policy))
    }

    pub fn add_vsock_rule(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
        rule: &VsockRule,
    ) -> Result<LeaseVsockPolicy, ClientError> {
        self.wait(self.client.add_vsock_rule(name, owner_uid, rule))
    }

    pub fn reset_vsock_policy(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
    ) -> Result<LeaseVsockPolicy, ClientError> {
        self.wait(self.client.reset_vsock_policy(name, owner_uid))
    }

    pub fn vsock_capture(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
        snap_bytes: Option<u32>,
    ) -> Result<BlockingCapture<'_>, ClientError> {
        let capture = self.wait(self.client.vsock_capture(name, owner_uid, snap_bytes))?;
        Ok(BlockingCapture {
            client: self,
            capture,
        })
    }

    fn wait<T>(
        &self,
        request: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, ClientError> {
        match &self.runtime {
            Ok(runtime) => runtime.block_on(request),
            // No descriptor was left for an event queue.
            Err(error) => Err(ClientError::Connect {
                path: self.client.socket.clone(),
                source: io::Error::new(error.kind(), error.to_string()),
            }),
        }
    }
}

/// A running [`Trace`]. Dropping it ends the trace.
#[derive(Debug)]
pub struct BlockingTrace<'a> {
    client: &'a Blocking,
    trace: Trace,
}

impl BlockingTrace<'_> {
    /// Does what [`Trace::next`] does.
    #[expect(
        clippy::should_implement_trait,
        reason = "it may fail, and has the name that it has there"
    )]
    pub fn next(&mut self) -> Result<Option<TraceLine>, ClientError> {
        self.client.wait(self.trace.next())
    }
}

/// A running [`Capture`]. Dropping it ends the capture.
#[derive(Debug)]
pub struct BlockingCapture<'a> {
    client: &'a Blocking,
    capture: Capture,
}

impl BlockingCapture<'_> {
    /// Does what [`Capture::next`] does.
    #[expect(
        clippy::should_implement_trait,
        reason = "it may fail, and has the name that it has there"
    )]
    pub fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        self.client.wait(self.capture.next())
    }
}

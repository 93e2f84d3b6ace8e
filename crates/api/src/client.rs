//! Talks to the daemon over its Unix socket.
//!
//! [`Client`] has one method for each operation of the API. It keeps connections open between
//! requests: one for a caller that asks one thing after another, as many as requests run at once
//! otherwise. A connection that the daemon closed in between is replaced without the caller
//! noticing. A request that may have reached the daemon is repeated only if it changes nothing there
//! (GET, as RFC 9110 §9.2.2 allows). [`Blocking`] is the same for programs that aren't asynchronous.

use std::{
    error::Error,
    io,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use http_body_util::{BodyExt, Full};
use hyper::{
    Method, Request, StatusCode,
    body::Bytes,
    client::conn::http1::SendRequest,
    header::{CONTENT_TYPE, HOST},
};
use hyper_util::rt::TokioIo;
use serde::{Serialize, de::DeserializeOwned};
use tokio::{
    net::UnixStream,
    time::{sleep, timeout},
};

use crate::{
    attach::AttachedState,
    drop_reason::DropReasonText,
    error::{ApiError, ErrorCode},
    health::Health,
    identity::ListedIdentity,
    lease::{AcquireLease, Lease, LeaseDetail, LeasePolicy, Released},
    name::Name,
    pool::{ChangePool, PolicySpec, Pool, PoolSpec},
    published_port::{Protocol, PublishPort, PublishedPort},
    traffic::LeaseTraffic,
};

mod blocking;
mod impairment;
mod taps;
mod trace;
mod versions;
mod vsock;

pub use blocking::{Blocking, BlockingCapture, BlockingTrace};
pub use trace::Trace;
pub use vsock::Capture;

/// How long a request may take before the client gives up, unless told otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// Connections that are not used for so long are not used again: the daemon closes idle ones.
const IDLE_MAX: Duration = Duration::from_secs(15);
/// How long to try while the daemon has more callers than it has accepted.
const QUEUE_PATIENCE: Duration = Duration::from_secs(10);
/// How often.
const QUEUE_POLL: Duration = Duration::from_millis(10);
/// Most idle connections that a client keeps.
const IDLE_CONNECTIONS_MAX: usize = 64;

/// Why the daemon could not be asked, or what it answered instead.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// There is no connection.
    #[error("cannot connect to {}: {source}{}", path.display(), advice(source))]
    Connect {
        /// The daemon's socket.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The connection broke, or the answer took too long. The request may have been carried out.
    #[error("cannot {operation}: no answer from {}: {source}", path.display())]
    Transport {
        /// Method and path of the request.
        operation: String,
        /// The daemon's socket.
        path: PathBuf,
        /// What went wrong.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The daemon refused or failed.
    #[error("{0}")]
    Api(#[from] ApiError),
    /// The answer is not what this version of the API says.
    #[error("cannot {operation}: the answer with status {status} can't be read: {reason}")]
    Decode {
        /// Method and path of the request.
        operation: String,
        /// HTTP status of the answer.
        status: u16,
        /// Why.
        reason: String,
    },
}

impl ClientError {
    /// Whether the daemon refused before anything changed, as opposed to having failed.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Api(error) if error.code.is_refusal())
    }

    /// The daemon's code, if it answered with one.
    #[must_use]
    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            Self::Api(error) => Some(error.code),
            _ => None,
        }
    }
}

/// What to do about a failed connection.
fn advice(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            "; is the daemon running? Start it by `systemctl start sandwire` or `sandwire daemon`"
        }
        io::ErrorKind::PermissionDenied => {
            "; this user may not use the socket: the daemon's configuration decides by \
             `socket_mode` and `socket_gid` who may"
        }
        io::ErrorKind::WouldBlock => "; the daemon accepts nobody: does it stand still?",
        _ => "",
    }
}

/// A lease as the daemon handed it out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acquired {
    /// The lease.
    pub lease: Lease,
    /// False if the caller held a lease of that name and pool already, and this is it.
    pub new: bool,
}

/// An asynchronous client. Cheap to make: it connects when first used.
///
/// Needs a tokio runtime with I/O and time. May be shared between tasks.
#[derive(Debug)]
pub struct Client {
    socket: PathBuf,
    timeout: Duration,
    idle: Mutex<Vec<Idle>>,
}

#[derive(Debug)]
struct Idle {
    connection: SendRequest<Full<Bytes>>,
    since: Instant,
}

impl Client {
    /// A client of the daemon that listens on `socket`.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            timeout: DEFAULT_TIMEOUT,
            idle: Mutex::new(Vec::new()),
        }
    }

    /// The same client with another limit on the time that a request may take.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// The daemon's socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Whether the daemon and its data path work. An answer that they don't is not an error.
    pub async fn health(&self) -> Result<Health, ClientError> {
        let call = Call::new(Method::GET, "/healthz");
        let answer = self.send(&call).await?;
        match answer.json(&call) {
            Ok(health) => Ok(health),
            Err(_) => answer.checked(&call)?.json(&call),
        }
    }

    /// The daemon's metrics in the text format of Prometheus.
    pub async fn metrics(&self) -> Result<String, ClientError> {
        let call = Call::new(Method::GET, "/metrics");
        let answer = self.ask(&call).await?;
        String::from_utf8(answer.body.to_vec()).map_err(|error| call.undecodable(200, &error))
    }

    /// The description of the API, an OpenAPI document.
    pub async fn openapi(&self) -> Result<serde_json::Value, ClientError> {
        self.json(Call::new(Method::GET, "/v1/openapi.json")).await
    }

    /// The pools that the caller may see.
    pub async fn pools(&self) -> Result<Vec<Pool>, ClientError> {
        self.json(Call::new(Method::GET, "/v1/pools")).await
    }

    /// Creates a pool; it fills in the background.
    pub async fn create_pool(&self, spec: &PoolSpec) -> Result<Pool, ClientError> {
        self.json(Call::with_body(Method::POST, "/v1/pools", spec))
            .await
    }

    /// One pool.
    pub async fn pool(&self, name: &Name) -> Result<Pool, ClientError> {
        self.json(Call::new(Method::GET, format!("/v1/pools/{name}")))
            .await
    }

    /// Changes a pool: its size, its policy, its data path.
    pub async fn change_pool(&self, name: &Name, change: &ChangePool) -> Result<Pool, ClientError> {
        let path = format!("/v1/pools/{name}");
        self.json(Call::with_body(Method::PATCH, path, change))
            .await
    }

    /// Changes how many slots a pool keeps ready.
    pub async fn resize_pool(&self, name: &Name, size: u32) -> Result<Pool, ClientError> {
        let change = ChangePool {
            size: Some(size),
            ..ChangePool::default()
        };
        self.change_pool(name, &change).await
    }

    /// Deletes a pool that has no leases, with its slots.
    pub async fn delete_pool(&self, name: &Name) -> Result<(), ClientError> {
        let call = Call::new(Method::DELETE, format!("/v1/pools/{name}"));
        self.ask(&call).await.map(|_| ())
    }

    /// The leases that the caller may see.
    pub async fn leases(&self) -> Result<Vec<Lease>, ClientError> {
        self.json(Call::new(Method::GET, "/v1/leases")).await
    }

    /// Acquires a slot.
    pub async fn acquire(&self, request: &AcquireLease) -> Result<Acquired, ClientError> {
        let call = Call::with_body(Method::POST, "/v1/leases", request);
        let answer = self.ask(&call).await?;
        Ok(Acquired {
            new: answer.status == StatusCode::CREATED,
            lease: answer.json(&call)?,
        })
    }

    /// One lease, with what the kernel says of its slot now.
    ///
    /// `owner_uid` names somebody else's lease, for those who may see it. Default: the caller's own.
    pub async fn lease(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
    ) -> Result<LeaseDetail, ClientError> {
        self.json(Call::new(Method::GET, lease_path(name, "", owner_uid)))
            .await
    }

    /// Compares a lease's interface in somebody's namespace with how it was made.
    pub async fn attached(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
    ) -> Result<AttachedState, ClientError> {
        self.json(Call::new(
            Method::GET,
            lease_path(name, "/attached", owner_uid),
        ))
        .await
    }

    /// Ends a lease. The answer says if a VMM still keeps the slot.
    pub async fn release(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
    ) -> Result<Released, ClientError> {
        self.json(Call::new(Method::DELETE, lease_path(name, "", owner_uid)))
            .await
    }

    /// What a lease may reach.
    pub async fn policy(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
    ) -> Result<LeasePolicy, ClientError> {
        let path = lease_path(name, "/policy", owner_uid);
        self.json(Call::new(Method::GET, path)).await
    }

    /// Gives a lease a policy of its own, at once.
    pub async fn set_policy(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
        policy: &PolicySpec,
    ) -> Result<LeasePolicy, ClientError> {
        let path = lease_path(name, "/policy", owner_uid);
        self.json(Call::with_body(Method::PUT, path, policy)).await
    }

    /// Gives a lease its pool's policy again.
    pub async fn reset_policy(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
    ) -> Result<LeasePolicy, ClientError> {
        let path = lease_path(name, "/policy", owner_uid);
        self.json(Call::new(Method::DELETE, path)).await
    }

    /// Traffic of all leases that the caller may see.
    pub async fn traffic(&self) -> Result<Vec<LeaseTraffic>, ClientError> {
        self.json(Call::new(Method::GET, "/v1/traffic")).await
    }

    /// The identities of the host, and those of the daemon's configuration that aren't there.
    pub async fn identities(&self) -> Result<Vec<ListedIdentity>, ClientError> {
        self.json(Call::new(Method::GET, "/v1/identities")).await
    }

    /// Why packets are dropped: every reason with its meaning.
    pub async fn drop_reasons(&self) -> Result<Vec<DropReasonText>, ClientError> {
        self.json(Call::new(Method::GET, "/v1/drop-reasons")).await
    }

    /// The host ports that lead to a lease.
    pub async fn lease_ports(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
    ) -> Result<Vec<PublishedPort>, ClientError> {
        let path = lease_path(name, "/ports", owner_uid);
        self.json(Call::new(Method::GET, path)).await
    }

    /// Publishes a host port to a lease. Root may hide a service of the host that listens there.
    pub async fn publish(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
        port: &PublishPort,
        hide_host_service: bool,
    ) -> Result<PublishedPort, ClientError> {
        let mut path = lease_path(name, "/ports", owner_uid);
        if hide_host_service {
            let separator = if owner_uid.is_some() { '&' } else { '?' };
            path = format!("{path}{separator}hide_host_service=true");
        }
        self.json(Call::with_body(Method::POST, path, port)).await
    }

    /// Withdraws a published host port. `host_address` is the one that it was published with.
    pub async fn withdraw(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
        protocol: Protocol,
        host_port: u16,
        host_address: Option<IpAddr>,
    ) -> Result<(), ClientError> {
        let mut path = lease_path(name, &format!("/ports/{protocol}/{host_port}"), owner_uid);
        if let Some(address) = host_address {
            let separator = if owner_uid.is_some() { '&' } else { '?' };
            path = format!("{path}{separator}host_address={address}");
        }
        let call = Call::new(Method::DELETE, path);
        self.ask(&call).await.map(|_| ())
    }

    /// All published host ports that the caller may see.
    pub async fn ports(&self) -> Result<Vec<PublishedPort>, ClientError> {
        self.json(Call::new(Method::GET, "/v1/ports")).await
    }

    async fn json<T: DeserializeOwned>(&self, call: Call) -> Result<T, ClientError> {
        match self.ask(&call).await?.json(&call) {
            Err(error) => Err(self.with_versions(error).await),
            read => read,
        }
    }

    /// Sends a request that has to succeed.
    async fn ask(&self, call: &Call) -> Result<Answer, ClientError> {
        match self.send(call).await?.checked(call) {
            Err(error) => Err(self.with_versions(error).await),
            answer => answer,
        }
    }

    async fn send(&self, call: &Call) -> Result<Answer, ClientError> {
        match timeout(self.timeout, self.exchange(call)).await {
            Ok(result) => result,
            Err(_) => Err(call.unanswered(
                &self.socket,
                format!("it took longer than {} s", self.timeout.as_secs_f64()),
            )),
        }
    }

    async fn exchange(&self, call: &Call) -> Result<Answer, ClientError> {
        let mut request = call.request(&self.socket)?;
        loop {
            let (mut connection, fresh) = match self.take_idle().await {
                Some(connection) => (connection, false),
                None => (self.connect().await?, true),
            };
            match connection.try_send_request(request).await {
                Ok(response) => {
                    let status = response.status();
                    let body = response
                        .into_body()
                        .collect()
                        .await
                        .map_err(|error| call.unanswered(&self.socket, error))?
                        .to_bytes();
                    self.keep(connection);
                    return Ok(Answer { status, body });
                }
                // An idle connection that the daemon has closed gives the request back unsent, unless it
                // was closed while the request was being written.
                Err(mut error) => match error.take_message() {
                    Some(unsent) if !fresh => request = unsent,
                    None if !fresh && call.method == Method::GET => {
                        request = call.request(&self.socket)?;
                    }
                    _ => return Err(call.unanswered(&self.socket, error.into_error())),
                },
            }
        }
    }

    async fn connect(&self) -> Result<SendRequest<Full<Bytes>>, ClientError> {
        let refused = |source| ClientError::Connect {
            path: self.socket.clone(),
            source,
        };
        let stream = self.open_stream().await.map_err(refused)?;
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| refused(io::Error::other(error)))?;
        // Its errors reach the sender too.
        tokio::spawn(connection);
        Ok(sender)
    }

    /// A connection, for which it waits a while where too many others do: the kernel lets who doesn't block wait for nothing.
    async fn open_stream(&self) -> io::Result<UnixStream> {
        let begun = Instant::now();
        loop {
            match UnixStream::connect(&self.socket).await {
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock
                        && begun.elapsed() < QUEUE_PATIENCE =>
                {
                    sleep(QUEUE_POLL).await;
                }
                outcome => return outcome,
            }
        }
    }

    async fn take_idle(&self) -> Option<SendRequest<Full<Bytes>>> {
        loop {
            let candidate = self.idle().pop()?;
            let mut connection = candidate.connection;
            if candidate.since.elapsed() < IDLE_MAX && connection.ready().await.is_ok() {
                return Some(connection);
            }
        }
    }

    fn keep(&self, connection: SendRequest<Full<Bytes>>) {
        let mut idle = self.idle();
        if idle.len() < IDLE_CONNECTIONS_MAX && !connection.is_closed() {
            idle.push(Idle {
                connection,
                since: Instant::now(),
            });
        }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Idle>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn lease_path(name: &Name, below: &str, owner_uid: Option<u32>) -> String {
    match owner_uid {
        Some(uid) => format!("/v1/leases/{name}{below}?owner_uid={uid}"),
        None => format!("/v1/leases/{name}{below}"),
    }
}

/// One request, before it is sent.
#[derive(Debug)]
struct Call {
    method: Method,
    path: String,
    body: Option<Bytes>,
}

impl Call {
    fn new(method: Method, path: impl Into<String>) -> Self {
        Self {
            method,
            path: path.into(),
            body: None,
        }
    }

    fn with_body(method: Method, path: impl Into<String>, body: &impl Serialize) -> Self {
        let body = serde_json::to_vec(body).expect("types of the API have string keys only");
        Self {
            method,
            path: path.into(),
            body: Some(Bytes::from(body)),
        }
    }

    fn request(&self, socket: &Path) -> Result<Request<Full<Bytes>>, ClientError> {
        let mut request = Request::builder()
            .method(self.method.clone())
            .uri(&self.path)
            .header(HOST, "localhost");
        if self.body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        request
            .body(Full::new(self.body.clone().unwrap_or_default()))
            .map_err(|error| self.unanswered(socket, error))
    }

    fn operation(&self) -> String {
        format!("{} {}", self.method, self.path)
    }

    fn unanswered(
        &self,
        socket: &Path,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> ClientError {
        ClientError::Transport {
            operation: self.operation(),
            path: socket.to_owned(),
            source: source.into(),
        }
    }

    fn undecodable(&self, status: u16, reason: &dyn std::fmt::Display) -> ClientError {
        ClientError::Decode {
            operation: self.operation(),
            status,
            reason: reason.to_string(),
        }
    }
}

/// One answer, read to its end.
struct Answer {
    status: StatusCode,
    body: Bytes,
}

impl Answer {
    /// The answer if it is a success, else the daemon's error.
    fn checked(self, call: &Call) -> Result<Self, ClientError> {
        if self.status.is_success() {
            Ok(self)
        } else {
            Err(ClientError::Api(self.json(call)?))
        }
    }

    fn json<T: DeserializeOwned>(&self, call: &Call) -> Result<T, ClientError> {
        serde_json::from_slice(&self.body)
            .map_err(|error| call.undecodable(self.status.as_u16(), &error))
    }
}

#[cfg(test)]
mod tests;

//! `/v1/leases/{name}/trace`: what becomes of each packet of a lease, while the connection lasts.
//!
//! A thread takes packets from the slot service and hands lines on, as many at a time as there are; who reads
//! slowly holds up that thread alone, and is told how many packets were lost meanwhile. The trace
//! ends when the reader goes, when the lease ends, and when the daemon stops.

use std::{
    collections::HashMap,
    convert::Infallible,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{
    body::Body,
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use hyper::body::Bytes;
use sandwire_api::{error::ErrorCode, name::Name, trace::TraceLine};
use sandwire_slot::service::{Caller, Trace, Traced};
use tokio::sync::mpsc::{Sender, channel};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    App, blocking,
    extract::{Path, Peer, Query},
    failure::{Failure, Failures},
    leases::Owner,
    stream::Chunks,
};

/// Traces at a time, of all users: each has a thread.
const TRACES_MAX: u32 = 16;
/// Traces at a time of one user who isn't root.
const TRACES_PER_USER_MAX: u32 = 4;
/// Traces at a time of all users who aren't root: they can't keep root from looking.
const TRACES_OF_USERS_MAX: u32 = TRACES_MAX - TRACES_PER_USER_MAX;
/// How soon it is noticed that the reader has gone, or the daemon stops, while no packet comes.
const QUIET_MAX: Duration = Duration::from_millis(100);
/// How long a line may wait for others to come with it.
const GATHER_MAX: Duration = Duration::from_millis(20);
/// Chunks that wait for the reader.
const CHUNKS_MAX: usize = 4;
/// Bytes of a chunk, more or less.
const CHUNK_BYTES: usize = 16 * 1024;

/// Why the slot service tells of no more packets.
const ENDED: &str = "the lease has ended, or its packets can't be followed any more";

/// The traces that run.
#[derive(Default)]
pub(crate) struct Traces {
    counts: Mutex<Counts>,
    stopping: AtomicBool,
}

#[derive(Default)]
struct Counts {
    of_root: u32,
    of_users: HashMap<u32, u32>,
}

impl Traces {
    /// Ends all traces soon, and refuses new ones.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Waits until the daemon stops.
    pub(super) async fn stopped(&self) {
        while !self.is_stopping() {
            tokio::time::sleep(QUIET_MAX).await;
        }
    }

    /// Lets a trace or a capture run.
    pub(super) fn admit(self: &Arc<Self>, caller: Caller) -> Result<Admission, Failure> {
        let refuse = |reason: &str| Err(Failure::new(ErrorCode::Unavailable, reason));
        if self.is_stopping() {
            return refuse("the daemon is stopping: try again when it is back");
        }
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let of_users: u32 = counts.of_users.values().sum();
        let of_user = counts.of_users.get(&caller.uid).copied().unwrap_or(0);
        if of_users + counts.of_root >= TRACES_MAX
            || (of_users >= TRACES_OF_USERS_MAX && !caller.privileged)
        {
            return refuse("too many traces and captures are running: end one");
        }
        if of_user >= TRACES_PER_USER_MAX && !caller.privileged {
            return refuse("this user has too many traces and captures running: end one");
        }
        *counts.of(caller) += 1;
        Ok(Admission {
            traces: Arc::clone(self),
            caller,
        })
    }
}

impl Counts {
    fn of(&mut self, caller: Caller) -> &mut u32 {
        match caller.privileged {
            true => &mut self.of_root,
            false => self.of_users.entry(caller.uid).or_default(),
        }
    }
}

/// One running trace or capture; ends when dropped.
pub(super) struct Admission {
    traces: Arc<Traces>,
    caller: Caller,
}

impl Drop for Admission {
    fn drop(&mut self) {
        let counts = &self.traces.counts;
        let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.of(self.caller) -= 1;
        counts.of_users.retain(|_, count| *count > 0);
    }
}

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(trace))
}

/// Traces a lease: a line of JSON for each packet, until the connection is closed or the lease ends. Only in the
/// eBPF data paths.
#[utoipa::path(
    get,
    path = "/v1/leases/{name}/trace",
    operation_id = "trace_lease",
    tag = "leases",
    params(("name" = Name, Path, description = "Name of the lease"), Owner),
    responses(
        (
            status = 200,
            description = "Lines, each a TraceLine",
            body = TraceLine,
            content_type = "application/x-ndjson"
        ),
        Failures
    )
)]
async fn trace(
    State(app): State<Arc<App>>,
    Peer(caller): Peer,
    Path(name): Path<Name>,
    Query(owner): Query<Owner>,
) -> Result<Response, Failure> {
    let admission = app.traces.admit(caller)?;
    let trace = blocking(move || Ok(app.slots.trace(caller, owner.owner_uid, &name)?)).await?;
    let (sender, receiver) = channel(CHUNKS_MAX);
    let lines = Lines {
        sender,
        chunk: Vec::new(),
    };
    tokio::task::spawn_blocking(move || lines.pass_on(&trace, &admission.traces));
    let kind = [(header::CONTENT_TYPE, "application/x-ndjson")];
    Ok((kind, Body::new(Chunks(receiver))).into_response())
}

/// Lines on their way to the reader.
struct Lines {
    sender: Sender<Result<Bytes, Infallible>>,
    chunk: Vec<u8>,
}

/// The reader has gone.
struct Gone;

impl Lines {
    fn pass_on(mut self, trace: &Trace, traces: &Traces) {
        // Nobody is left to be told.
        let _ = self.run(trace, traces);
    }

    fn run(&mut self, trace: &Trace, traces: &Traces) -> Result<(), Gone> {
        self.push(&TraceLine::Begin)?;
        self.flush()?;
        loop {
            if traces.is_stopping() {
                return self.end("the daemon is stopping");
            }
            if self.sender.is_closed() {
                return Err(Gone);
            }
            if !self.take(trace, QUIET_MAX)? {
                return self.end(ENDED);
            }
            let gathered = Instant::now();
            while !self.chunk.is_empty() {
                let left = GATHER_MAX.saturating_sub(gathered.elapsed());
                if left.is_zero() {
                    self.flush()?;
                } else if !self.take(trace, left)? {
                    return self.end(ENDED);
                }
            }
        }
    }

    /// Takes what there is within the time. False if nothing will follow.
    fn take(&mut self, trace: &Trace, at_most: Duration) -> Result<bool, Gone> {
        match trace.next(at_most) {
            Traced::Packet(packet) => self.push(&TraceLine::Packet(packet))?,
            Traced::Lost(count) => self.push(&TraceLine::Lost { count })?,
            Traced::Nothing => {}
            Traced::End => return Ok(false),
        }
        Ok(true)
    }

    fn push(&mut self, line: &TraceLine) -> Result<(), Gone> {
        serde_json::to_writer(&mut self.chunk, line).expect("a line has string keys only");
        self.chunk.push(b'\n');
        if self.chunk.len() >= CHUNK_BYTES {
            self.flush()
        } else {
            Ok(())
        }
    }

    fn flush(&mut self) -> Result<(), Gone> {
        let chunk = Bytes::from(std::mem::take(&mut self.chunk));
        self.sender.blocking_send(Ok(chunk)).map_err(|_| Gone)
    }

    fn end(&mut self, reason: &str) -> Result<(), Gone> {
        let reason = reason.to_owned();
        self.push(&TraceLine::End { reason })?;
        self.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_leave_root_some_traces() {
        let traces = Arc::new(Traces::default());
        let caller = |uid| Caller {
            uid,
            gid: uid,
            privileged: uid == 0,
        };
        let admit = |uid| traces.admit(caller(uid)).ok();
        let of_users: Vec<Admission> = (1000..1100).map_while(admit).collect();
        let of_root: Vec<Admission> = std::iter::from_fn(|| admit(0)).collect();
        assert_eq!((of_users.len(), of_root.len()), (12, 4));
        drop(of_users);
        let of_one: Vec<Admission> = std::iter::from_fn(|| admit(1000)).collect();
        assert_eq!(of_one.len(), 4);
        drop((of_one, of_root));
        assert_eq!(
            std::iter::from_fn(|| admit(0)).take(99).count(),
            99,
            "each ends at once"
        );
    }
}

//! The service on a model of the kernel.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use sandwire_api::{
    error::ErrorCode,
    lease::{AcquireLease, LeaseState, ReleaseOutcome},
    name::Name,
    pool::PoolSpec,
    published_port::{Protocol, PublishPort},
    slot::DataPath,
};
use tempfile::TempDir;

use super::*;
use crate::{
    error::ServiceError,
    journal::Journal,
    model::{
        Interlude, Kernel, ManualClock, ModelNetwork, Power,
        channels::{ModelChannels, ModelService},
    },
};

mod access;
mod acquire;
mod attach;
mod channels;
mod crash;
mod damage;
mod moves;
mod policies;
mod pools;
mod ports;
mod release;

const ROOT: Caller = Caller {
    uid: 0,
    gid: 0,
    privileged: true,
};
const ALICE: Caller = Caller {
    uid: 1000,
    gid: 100,
    privileged: false,
};
const BOB: Caller = Caller {
    uid: 1001,
    gid: 100,
    privileged: false,
};

/// A host: what outlives the service.
struct Host {
    folder: TempDir,
    kernel: Arc<Kernel>,
    service: Arc<ModelService>,
    clock: Arc<ManualClock>,
}

impl Host {
    fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
            kernel: Arc::new(Kernel::default()),
            service: Arc::default(),
            clock: Arc::new(ManualClock::new()),
        }
    }

    fn start(&self) -> Arc<Slots> {
        self.start_with(&Power::unlimited()).unwrap()
    }

    fn start_with(&self, power: &Power) -> Result<Arc<Slots>, ServiceError> {
        let settings = Settings {
            instance: name("test"),
            state_dir: self.folder.path().to_owned(),
            builders: 2,
            audit_interval: Duration::from_secs(60),
        };
        let (mut journal, contents) =
            Journal::open(&settings.state_dir, &settings.instance, "this boot")?;
        journal.run_on(power);
        let network = Arc::new(ModelNetwork {
            kernel: Arc::clone(&self.kernel),
            power: power.clone(),
        });
        let clock: Arc<dyn Clock> = self.clock.clone();
        let channels = Arc::new(ModelChannels {
            service: Arc::clone(&self.service),
            power: power.clone(),
        });
        Slots::start(settings, network, channels, clock, journal, contents)
    }

    /// A running service with a full pool `web` of the given size.
    fn with_pool(size: u32) -> (Self, Arc<Slots>) {
        let host = Self::new();
        let slots = host.start();
        slots.create_pool(&spec("web", size)).unwrap();
        slots.await_ready("web", size);
        (host, slots)
    }

    fn advance(&self, slots: &Slots, by: Duration) {
        self.clock.advance(by);
        slots.shared.wake_all();
    }

    /// Lets time go by, in steps shorter than any interval, until something holds.
    #[track_caller]
    fn advance_until(&self, slots: &Slots, what: &str, holds: impl Fn(&State) -> bool) {
        slots.wait_until(what, |state| {
            self.clock.advance(Duration::from_secs(1));
            slots.shared.wake_all();
            holds(state)
        });
    }
}

impl Slots {
    /// Waits until something holds of the service's state.
    #[track_caller]
    fn wait_until(&self, what: &str, holds: impl Fn(&State) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut state = self.shared.lock();
        while !holds(&state) {
            let now = Instant::now();
            let counts: Vec<_> = state
                .pools
                .values()
                .map(|entry| entry.pool.counts())
                .collect();
            assert!(now < deadline, "waited in vain until {what}: {counts:?}");
            // Not every change is told to `changed`.
            let timeout = (deadline - now).min(Duration::from_millis(10));
            state = self.shared.wait(&self.shared.changed, state, Some(timeout));
        }
    }

    #[track_caller]
    fn await_ready(&self, pool: &str, ready: u32) {
        let pool = name(pool);
        self.wait_until(&format!("{ready} slots are ready"), |state| {
            let counts = state.pools[&pool].pool.counts();
            counts.ready == ready && counts.building == 0
        });
    }

    #[track_caller]
    fn await_health(&self, ready: bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.health().ready != ready {
            assert!(Instant::now() < deadline, "{:#?}", self.health());
            let state = self.shared.lock();
            let timeout = Some(Duration::from_millis(10));
            drop(self.shared.wait(&self.shared.changed, state, timeout));
        }
    }

    /// Waits until nothing is being built or torn down, all pools have their size if they can, and no
    /// rest is over that would let another number be built.
    #[track_caller]
    fn await_quiet(&self) {
        self.wait_until("all is quiet", |state| {
            let now = self.shared.now();
            state.pools.values().all(|entry| {
                let counts = entry.pool.counts();
                let rest_ends = entry.pool.next_rest_end();
                rest_ends.is_none_or(|at| at > now)
                    && counts.building == 0
                    && counts.tearing_down == 0
                    && (counts.ready == entry.pool.size() || entry.has_no_number())
            })
        });
    }

    fn take(&self, request: &str) -> Result<Acquired, ServiceError> {
        self.acquire(ROOT, &request_of(request))
    }

    fn give_back(&self, lease: &str) -> Result<sandwire_api::lease::Released, ServiceError> {
        self.release(ROOT, None, &name(lease))
    }
}

impl PoolEntry {
    fn has_no_number(&self) -> bool {
        let counts = self.pool.counts();
        counts.ready + counts.leased + counts.held + counts.quarantined == self.plan.slots_max
    }
}

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

/// A pool of the nft data path with at most 13 slots, with interfaces of both families, resting for 3 s.
fn spec(pool: &str, size: u32) -> PoolSpec {
    let text = format!(
        r#"{{"name": "{pool}", "size": {size}, "data_path": "nft",
             "addresses": {{"plan": "prefix", "ipv4": "10.64.0.0/28", "ipv6": "fd00:c10e::/64"}}}}"#
    );
    serde_json::from_str(&text).unwrap()
}

/// `web`, `web:a` for a lease named a, and further fields as JSON behind a space.
fn request_of(text: &str) -> AcquireLease {
    let (head, more) = text.split_once(' ').unwrap_or((text, ""));
    let (pool, lease) = head.split_once(':').unwrap_or((head, ""));
    let lease = if lease.is_empty() {
        String::new()
    } else {
        format!(r#", "name": "{lease}""#)
    };
    let more = if more.is_empty() {
        String::new()
    } else {
        format!(", {more}")
    };
    serde_json::from_str(&format!(r#"{{"pool": "{pool}"{lease}{more}}}"#)).unwrap()
}

#[track_caller]
fn code<T: std::fmt::Debug>(result: Result<T, ServiceError>) -> ErrorCode {
    result.expect_err("this should be refused").code()
}

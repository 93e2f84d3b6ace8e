//! Starting: from the journal and what the kernel has to a service at work.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
    path::Path,
    sync::{Arc, Condvar, Mutex, RwLock},
    thread,
    time::Duration,
};

use sandwire_api::{lease::LeaseState, name::Name, pool::PoolSpec, slot::DataPath};

use super::{Damage, LeaseEntry, PoolEntry, Settings, Shared, Slots, State, ports::lease_of};
use crate::{
    channel::{Channels, NoChannels},
    clock::Clock,
    error::ServiceError,
    journal::{Contents, Journal, ReleasedSlot},
    lease::LeaseRecord,
    network::Network,
    plan::{Plan, check_route_mark},
    pool::{Rest, SlotState},
    published::Publication,
    reclaim::{self, Actions, SlotKey},
};

/// How long packets may still look at policies of the daemon before.
const ADOPTION_GRACE: Duration = Duration::from_secs(2);
const GOES_PAST_THE_RELAY: &str =
    "what the relay redirects may leave in the clear by this mark: set another one";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

impl Slots {
    /// Opens the state folder, adopts what a daemon before left there and in the kernel, and starts
    /// to fill the pools. Slots are not inspected one by one before this returns.
    ///
    /// # Errors
    /// The state folder can't be used, or the kernel not be asked. Pools that the host refuses are
    /// no error: they are tried again, and [`Slots::health`] tells of them.
    pub fn open(
        settings: Settings,
        network: Arc<dyn Network>,
        clock: Arc<dyn Clock>,
    ) -> Result<Arc<Self>, ServiceError> {
        Self::open_with_channels(settings, network, Arc::new(NoChannels), clock)
    }

    /// The same with a service for vsock.
    ///
    /// # Errors
    /// Those of [`Slots::open`]. That the service doesn't answer is no error.
    pub fn open_with_channels(
        settings: Settings,
        network: Arc<dyn Network>,
        channels: Arc<dyn Channels>,
        clock: Arc<dyn Clock>,
    ) -> Result<Arc<Self>, ServiceError> {
        let boot_id = fs::read_to_string(BOOT_ID)
            .map_err(|error| ServiceError::system("read", Path::new(BOOT_ID), error))?;
        let (journal, contents) =
            Journal::open(&settings.state_dir, &settings.instance, boot_id.trim())?;
        Self::start(settings, network, channels, clock, journal, contents)
    }

    pub(super) fn start(
        settings: Settings,
        network: Arc<dyn Network>,
        channels: Arc<dyn Channels>,
        clock: Arc<dyn Clock>,
        journal: Journal,
        contents: Contents,
    ) -> Result<Arc<Self>, ServiceError> {
        let state = recover(&settings, &*network, journal, contents)?;
        let shared = Arc::new(Shared {
            settings,
            network,
            channels_gates: (0..channels.services()).map(|_| RwLock::new(())).collect(),
            channels,
            clock,
            state: Mutex::new(state),
            build_work: Condvar::new(),
            tear_down_work: Condvar::new(),
            audit_work: Condvar::new(),
            changed: Condvar::new(),
            pools_gate: Mutex::new(()),
            ports_gate: Mutex::new(()),
            policies_gate: Mutex::new(()),
            earlier: RwLock::default(),
            traces: Mutex::default(),
        });
        shared.adopt_pools();
        shared.note_earlier();
        let has_pools = !shared.lock().pools.is_empty();
        if has_pools && !shared.sync_ports() {
            // The kernel may have ports of leases that have ended.
            shared.lock().hold_tear_downs();
        }
        let slots = Arc::new(Self {
            shared,
            threads: Mutex::new(Vec::new()),
        });
        slots.start_threads()?;
        slots.watch_host();
        Ok(slots)
    }

    /// Without that, damage is found by inspections alone.
    fn watch_host(&self) {
        let weak = Arc::downgrade(&self.shared);
        let tell = move |is_damaged: bool| match weak.upgrade() {
            Some(shared) => {
                if is_damaged {
                    shared.lock().host_is_due = true;
                    shared.audit_work.notify_one();
                }
                true
            }
            None => false,
        };
        if let Err(error) = self.shared.network.watch_host(Box::new(tell)) {
            tracing::warn!(%error, "what somebody deletes is seen by the next inspection, not at once");
        }
    }

    fn start_threads(&self) -> Result<(), ServiceError> {
        type Work = fn(&Shared);
        let builders = (0..self.shared.settings.builders.max(1)).map(|number| {
            (
                format!("builder {number}"),
                Shared::build_until_stopped as Work,
            )
        });
        let others = [
            (
                "tear-down".to_owned(),
                Shared::tear_down_until_stopped as Work,
            ),
            ("auditor".to_owned(), Shared::audit_until_stopped as Work),
        ];
        for (name, work) in builders.chain(others) {
            let shared = Arc::clone(&self.shared);
            let thread = thread::Builder::new()
                .name(name)
                .spawn(move || work(&shared))
                .map_err(|error| {
                    ServiceError::system("start a thread", Path::new("/proc/self/task"), error)
                })?;
            self.threads
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner)
                .push(thread);
        }
        Ok(())
    }
}

impl Shared {
    /// Brings the data path to what the journal says. Before anything else works on slots.
    fn adopt_pools(&self) {
        let names: Vec<Name> = {
            let state = self.lock();
            let added = state
                .pools
                .iter()
                .filter(|(_, entry)| entry.not_added.is_none());
            added.map(|(name, _)| name.clone()).collect()
        };
        for name in names {
            if let Err(error) = self.adopt_pool(&name) {
                tracing::error!(pool = %name, %error, "cannot bring a pool's data path up to date");
                if let Some(entry) = self.lock().pools.get_mut(&name) {
                    entry.not_added = Some(error.to_string());
                }
            }
        }
        self.sync_group_pairs();
        if let Err(error) = self.network.switch_over() {
            tracing::error!(%error, "not all packets go by the data path's new layout yet");
        }
        self.lock().adoption_ends = Some(self.now() + ADOPTION_GRACE);
    }
}

/// Brings pools and kernel to what the journal says.
fn recover(
    settings: &Settings,
    network: &dyn Network,
    journal: Journal,
    contents: Contents,
) -> Result<State, ServiceError> {
    let Contents {
        pools: specs,
        leases,
        released,
        ports,
        moves,
    } = contents;
    let (journal, leases) = drop_untold(journal, leases)?;
    let pools = prepare_pools(settings, network, specs, &moves)?;
    let settled = network.settle_pools().inspect_err(|error| {
        tracing::error!(%error, "what a former change has left of pools on the host stays, trying again");
    });
    let is_unsettled = settled.is_err();
    let inventory = network
        .inventory()
        .map_err(|source| ServiceError::Network {
            operation: "take stock of",
            object: "what the kernel has by our name".to_owned(),
            source,
        })?;
    let plans: BTreeMap<Name, &Plan> = pools
        .iter()
        .map(|(name, entry)| (name.clone(), &*entry.plan))
        .collect();
    let actions = reclaim::decide(&settings.instance, &plans, &leases, &released, &inventory);
    log_actions(&actions);
    let mut state = State {
        journal,
        pools,
        leases: super::leases::Leases::default(),
        tenants: HashMap::new(),
        acquiring: HashMap::new(),
        expiries: std::collections::BTreeSet::new(),
        policies: super::policies::Policies::default(),
        adoption_ends: None,
        ports: Vec::new(),
        port_changes: super::ports::Changes::default(),
        ports_dirty: None,
        spared: None,
        published_to: std::collections::HashSet::new(),
        unpublishing: Vec::new(),
        lease_numbers: 0..0,
        repairs: std::collections::VecDeque::new(),
        defects: super::health::Defects::default(),
        counters: super::Counters::default(),
        ended: BTreeMap::new(),
        ended_channels: BTreeMap::new(),
        earlier_channels: super::counted::EarlierChannels::default(),
        channels: super::channels::Comparisons::default(),
        former_rests: super::rests::FormerRests::default(),
        stopping: false,
        host_is_due: false,
        is_unsettled,
        has_built_wanted: false,
    };
    reclaim_leftovers(&mut state, network, &actions);
    state.apply(&actions, leases, &released);
    state.restore_ports(ports);
    Ok(state)
}

fn reclaim_leftovers(state: &mut State, network: &dyn Network, actions: &Actions) {
    for result in network.reclaim(&actions.reclaim) {
        if let Err(error) = result {
            tracing::error!(%error, "cannot reclaim a leftover");
            state.defects.left_over(error.to_string());
        }
    }
}

/// Forgets leases that nobody was told of, because the daemon before ended while it made their interfaces. What it had
/// made of them belongs to nobody then, and is torn down.
fn drop_untold(
    mut journal: Journal,
    leases: Vec<LeaseRecord>,
) -> Result<(Journal, Vec<LeaseRecord>), ServiceError> {
    let (told, untold): (Vec<_>, Vec<_>) = leases
        .into_iter()
        .partition(|lease| lease.attach.as_ref().is_none_or(|attach| attach.is_done));
    for lease in &untold {
        tracing::info!(lease = %lease.key, "a lease that nobody was told of is dropped");
        journal.remove_lease(&lease.key)?;
    }
    Ok((journal, told))
}

/// Prepares the host for the pools of the journal, as far as it lets.
fn prepare_pools(
    settings: &Settings,
    network: &dyn Network,
    specs: Vec<PoolSpec>,
    moves: &[(Name, DataPath)],
) -> Result<BTreeMap<Name, PoolEntry>, ServiceError> {
    let planned = specs.iter().map(|spec| {
        Plan::kept(&settings.instance, spec).map_err(|source| ServiceError::Plan {
            pool: spec.name.clone(),
            source,
        })
    });
    let plans = planned.collect::<Result<Vec<_>, _>>()?;
    network.expect_pools(&plans.iter().collect::<Vec<_>>());
    let mut pools = BTreeMap::new();
    for (spec, plan) in specs.into_iter().zip(plans) {
        let name = spec.name;
        if let Err(error) = check_route_mark(&spec.policy) {
            tracing::error!(pool = %name, %error, "{GOES_PAST_THE_RELAY}");
        }
        let mut entry = PoolEntry::new(plan);
        let from = moves.iter().find(|(pool, _)| *pool == name);
        let from = from.map(|(_, data_path)| *data_path);
        if let Err(error) = network.take_up_pool(&entry.plan, from) {
            tracing::error!(pool = %name, %error, "cannot prepare the host for a pool");
            entry.not_added = Some(error.to_string());
        }
        if let Some(from) = from {
            entry.begin_move(from);
        }
        pools.insert(name, entry);
    }
    Ok(pools)
}

impl State {
    fn apply(&mut self, actions: &Actions, leases: Vec<LeaseRecord>, released: &[ReleasedSlot]) {
        let rests: HashMap<SlotKey, &Rest> = released
            .iter()
            .map(|slot| ((slot.pool.clone(), slot.slot), &slot.rest))
            .collect();
        let rest_of = |slot: &SlotKey| rests.get(slot).map(|rest| (*rest).clone());
        for slot in &actions.adopt {
            self.adopt(slot, SlotState::Ready);
        }
        for slot in &actions.tear_down {
            self.adopt(slot, SlotState::TearingDown(rest_of(slot)));
            if let Some(entry) = self.pools.get_mut(&slot.0) {
                entry.tear_down.push_back(slot.1);
            }
        }
        for slot in &actions.rest {
            if let Some(rest) = rest_of(slot) {
                self.adopt(slot, SlotState::Resting(rest));
            }
        }
        for record in leases {
            self.adopt_lease(record);
        }
        let damaged = actions.repair.iter().map(|slot| (slot, Damage::Pieces));
        let missing = actions
            .rebuild
            .iter()
            .map(|slot| (slot, Damage::Everything));
        let repairs = damaged.chain(missing);
        self.repairs = repairs
            .map(|(slot, damage)| (slot.clone(), damage))
            .collect();
        for entry in self.pools.values_mut() {
            if let Some(from) = entry.moving_from() {
                // Nobody knows which data path they have.
                entry.begin_move(from);
            }
            entry.trim();
        }
    }

    /// Slots of which the kernel may have something, by the numbers of their pools and their own.
    pub(super) fn present_slots(&self) -> BTreeSet<(u32, u32)> {
        let pools = self.pools.values();
        let present = pools.flat_map(|entry| {
            let present = entry.pool.states().filter(|(_, state)| state.is_present());
            present.map(|(number, _)| (entry.plan.number, number.0))
        });
        present.collect()
    }

    fn adopt(&mut self, (pool, number): &SlotKey, state: SlotState) {
        if let Some(entry) = self.pools.get_mut(pool) {
            entry.pool.adopt(*number, state);
        }
    }

    fn adopt_lease(&mut self, record: LeaseRecord) {
        if let Some(Err(error)) = record.policy.as_deref().map(check_route_mark) {
            tracing::error!(lease = %record.key, %error, "{GOES_PAST_THE_RELAY}");
        }
        let slot = (record.pool.clone(), record.slot);
        let is_releasing = record.state == LeaseState::Releasing;
        let state = if is_releasing {
            SlotState::Held
        } else {
            SlotState::Leased
        };
        self.adopt(&slot, state);
        self.tenants.insert(slot, record.key.clone());
        if record.channel.is_some() {
            self.earlier_channels.expect(record.key.clone());
        }
        if let Some(expiry) = record.expiry
            && !is_releasing
        {
            self.expiries
                .insert((expiry.since_boot, record.key.clone()));
        }
        let lease = LeaseEntry {
            record,
            policy: None,
            is_busy: false,
            is_opening: false,
            held_by: None,
        };
        self.leases.insert(lease.record.key.clone(), lease);
    }

    fn restore_ports(&mut self, ports: Vec<sandwire_api::published_port::PublishedPort>) {
        for published in ports {
            let lease = self.leases.get(&lease_of(&published));
            let slot = lease.and_then(|lease| self.slot_plan(&lease.record).ok());
            match slot.map(|slot| Publication::new(published, &slot)) {
                Some(Ok(publication)) => self.ports.push(publication),
                Some(Err(error)) => tracing::error!(%error, "a published port is given up"),
                None => tracing::error!("a published port of a lease that is gone is given up"),
            }
        }
    }
}

fn log_actions(actions: &Actions) {
    tracing::info!(
        adopted = actions.adopt.len(),
        leased = actions.keep.len(),
        damaged = actions.repair.len(),
        missing = actions.rebuild.len(),
        torn_down = actions.tear_down.len(),
        resting = actions.rest.len(),
        reclaimed = actions.reclaim.len(),
        "took over what was there"
    );
}

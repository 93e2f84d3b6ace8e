//! A kernel for tests that keeps slots in memory and does what it is told.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::IpAddr,
    os::fd::OwnedFd,
    path::Path,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use sandwire_api::{
    lease::{TapHolder, TapStatus, TrafficCount},
    name::Name,
    pool::PoolSpec,
    published_port::PublishPort,
    slot::{DataPath, Defect, SlotKind, TapUse},
    trace::TracePacket,
    traffic::Traffic,
};
use sandwire_slot::{
    channel::{Channels, NoChannels},
    clock::SystemClock,
    error::NetworkError,
    network::{Inspection, Inventory, Leftover, Network, TraceSource, TracedPacket, Withdrawal},
    plan::{Plan, SlotPlan},
    service::{Settings, Slots},
};

pub(crate) mod channels;

/// The kernel. Slots are known by the names of their namespaces.
#[derive(Default)]
pub(crate) struct ModelNetwork {
    slots: Mutex<BTreeSet<String>>,
    /// Before withdrawals of TAPs.
    pub(crate) withdrawals: Gate,
    /// Before inspections of slots.
    pub(crate) inspections: Gate,
    /// Slots whose packets are left to whoever diverts them.
    pub(crate) impaired: Mutex<BTreeSet<String>>,
    /// Nothing can be said of that: the host refused the pool at the start.
    pub(crate) is_pool_refused: Mutex<bool>,
    /// Somebody has every TAP open.
    pub(crate) is_held: Mutex<bool>,
    /// What each slot of an eBPF pool has counted.
    pub(crate) traffic: Mutex<Traffic>,
    /// What an older layout of the data path has counted, by number of the pool.
    pub(crate) before: Mutex<BTreeMap<u32, Traffic>>,
    /// The other ends of all TAPs that were opened: each ends when nobody has the TAP any more.
    pub(crate) guests: Mutex<Vec<OwnedFd>>,
    /// Slots whose packets are told of, by pool and number.
    traced: Mutex<BTreeSet<(u32, u32)>>,
    packets: Arc<Mutex<VecDeque<TracedPacket>>>,
    /// Traces end at once.
    pub(crate) is_trace_broken: Mutex<bool>,
}

/// The stream of all traced packets.
struct ModelTrace {
    packets: Arc<Mutex<VecDeque<TracedPacket>>>,
    is_broken: bool,
}

impl TraceSource for ModelTrace {
    fn next_event(&mut self, at_most: Duration) -> Result<Option<TracedPacket>, NetworkError> {
        if self.is_broken {
            return Err(NetworkError::Several(Vec::new()));
        }
        let begun = Instant::now();
        loop {
            if let Some(packet) = self.packets.lock().unwrap().pop_front() {
                return Ok(Some(packet));
            }
            if begun.elapsed() >= at_most {
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Where calls wait while it is shut.
#[derive(Default)]
pub(crate) struct Gate {
    is_shut: Mutex<bool>,
    opened: Condvar,
    waiting: AtomicUsize,
}

impl Gate {
    pub(crate) fn set_shut(&self, is_shut: bool) {
        *self.is_shut.lock().unwrap() = is_shut;
        self.opened.notify_all();
    }

    /// How many calls are going through.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    fn pass(&self) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let is_shut = self.is_shut.lock().unwrap();
        drop(self.opened.wait_while(is_shut, |is_shut| *is_shut).unwrap());
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ModelNetwork {
    /// Sends a packet through every traced slot. Returns how many these are.
    pub(crate) fn send(&self, packet: &TracePacket) -> usize {
        let traced = self.traced.lock().unwrap();
        let events = traced.iter().map(|(pool, slot)| TracedPacket {
            pool: *pool,
            slot: *slot,
            packet: packet.clone(),
        });
        self.packets.lock().unwrap().extend(events);
        traced.len()
    }
}

impl Network for ModelNetwork {
    fn add_pool(&self, _: &Plan) -> Result<(), NetworkError> {
        Ok(())
    }

    fn take_up_pool(&self, plan: &Plan, _: Option<DataPath>) -> Result<(), NetworkError> {
        self.add_pool(plan)
    }

    fn settle_pools(&self) -> Result<(), NetworkError> {
        Ok(())
    }

    fn remove_pool(&self, _: &Plan) -> Result<(), NetworkError> {
        Ok(())
    }

    fn build(&self, slot: &SlotPlan) -> Result<(), NetworkError> {
        self.slots.lock().unwrap().insert(slot.netns_name.clone());
        Ok(())
    }

    fn withdraw_taps(&self, _: &SlotPlan) -> Result<Withdrawal, NetworkError> {
        self.withdrawals.pass();
        if *self.is_held.lock().unwrap() {
            return Ok(Withdrawal::Held);
        }
        Ok(Withdrawal::Free)
    }

    fn tap_holders(&self, _: &SlotPlan) -> Vec<TapHolder> {
        vec![TapHolder {
            pid: 17,
            command: "firecracker".to_owned(),
        }]
    }

    fn tear_down(&self, slots: &[SlotPlan]) -> Vec<Result<(), NetworkError>> {
        let mut known = self.slots.lock().unwrap();
        slots
            .iter()
            .map(|slot| {
                known.remove(&slot.netns_name);
                Ok(())
            })
            .collect()
    }

    fn attach(&self, _: &SlotPlan) -> Result<(), NetworkError> {
        Ok(())
    }

    fn inspect(&self, slot: &SlotPlan) -> Inspection {
        self.inspections.pass();
        let taps = slot.nics.iter().map(|nic| TapStatus {
            tap: nic.tap.clone(),
            used: TapUse::Unused,
            egress: TrafficCount::default(),
            ingress: TrafficCount::default(),
        });
        Inspection {
            taps: taps.collect(),
            ..Inspection::default()
        }
    }

    fn repair(&self, _: &SlotPlan) -> Vec<Defect> {
        Vec::new()
    }

    fn inventory(&self) -> Result<Inventory, NetworkError> {
        Ok(Inventory::default())
    }

    fn reclaim(&self, leftovers: &[Leftover]) -> Vec<Result<(), NetworkError>> {
        leftovers.iter().map(|_| Ok(())).collect()
    }

    fn set_published_ports(&self, _: &[(PublishPort, Vec<IpAddr>)]) -> Result<(), NetworkError> {
        Ok(())
    }

    fn inspect_host(&self, _: &[Name]) -> Vec<Defect> {
        Vec::new()
    }

    fn traffic(&self, slot: &SlotPlan) -> Option<Traffic> {
        let counted = self.traffic.lock().unwrap();
        (slot.data_path != DataPath::Nft).then(|| counted.clone())
    }

    fn finish_migration(&self) -> BTreeMap<u32, Traffic> {
        let moved = std::mem::take(&mut *self.before.lock().unwrap());
        let mut counted = self.traffic.lock().unwrap();
        moved.values().for_each(|moved| counted.add(moved));
        moved
    }

    fn open_taps(&self, slot: &SlotPlan) -> Result<Vec<OwnedFd>, NetworkError> {
        let mut guests = self.guests.lock().unwrap();
        let open = |_| {
            let (guest, tap) = std::os::unix::net::UnixStream::pair().unwrap();
            guests.push(guest.into());
            tap.into()
        };
        Ok(slot.nics.iter().map(open).collect())
    }

    fn set_impaired(&self, slot: &SlotPlan, impaired: bool) -> Result<(), NetworkError> {
        if *self.is_pool_refused.lock().unwrap() {
            return Err(NetworkError::Several(Vec::new()));
        }
        let mut all = self.impaired.lock().unwrap();
        if impaired {
            all.insert(slot.netns_name.clone());
        } else {
            all.remove(&slot.netns_name);
        }
        Ok(())
    }

    fn set_trace(&self, slot: &SlotPlan, traced: bool) -> Result<(), NetworkError> {
        let place = (slot.pool_number, slot.number.0);
        let mut places = self.traced.lock().unwrap();
        if slot.data_path == DataPath::Nft {
            return Err(NetworkError::Conflict {
                object: "trace".to_owned(),
                with: "the nft data path".to_owned(),
                advice: "move the pool".to_owned(),
            });
        }
        if traced {
            places.insert(place);
        } else {
            places.remove(&place);
        }
        Ok(())
    }

    fn trace_events(&self) -> Result<Box<dyn TraceSource>, NetworkError> {
        Ok(Box::new(ModelTrace {
            packets: Arc::clone(&self.packets),
            is_broken: *self.is_trace_broken.lock().unwrap(),
        }))
    }
}

/// A slot service on a model of the kernel.
pub(crate) fn open(state_dir: &Path) -> (Arc<Slots>, Arc<ModelNetwork>) {
    open_with(state_dir, Arc::new(NoChannels))
}

/// The same with a service for vsock.
pub(crate) fn open_with(
    state_dir: &Path,
    channels: Arc<dyn Channels>,
) -> (Arc<Slots>, Arc<ModelNetwork>) {
    let network = Arc::new(ModelNetwork::default());
    let slots = open_on(state_dir, network.clone(), channels);
    (slots, network)
}

/// The same on a kernel that is there.
pub(crate) fn open_on(
    state_dir: &Path,
    network: Arc<ModelNetwork>,
    channels: Arc<dyn Channels>,
) -> Arc<Slots> {
    let settings = Settings {
        instance: "test".parse().unwrap(),
        state_dir: state_dir.to_owned(),
        builders: 2,
        audit_interval: Duration::from_secs(3600),
    };
    let clock = Arc::new(SystemClock);
    Slots::open_with_channels(settings, network, channels, clock).unwrap()
}

/// A pool that user 1000 may use, user 1001 may only acquire from, and user 1002 manages.
pub(crate) fn pool(name: &str, third_byte: u8) -> PoolSpec {
    toml::from_str(&format!(
        r#"
name = "{name}"
size = 4
data_path = "nft"
guest = {{ ipv6 = "" }}
addresses = {{ plan = "prefix", ipv4 = "10.64.{third_byte}.0/24" }}
access = [
    {{ verbs = ["acquire", "publish", "show"], uids = [1000] }},
    {{ verbs = ["acquire"], uids = [1001] }},
    {{ verbs = ["manage"], uids = [1002] }},
]
"#
    ))
    .unwrap()
}

/// The same with the eBPF data path and two interfaces per sandbox.
pub(crate) fn ebpf_pool(name: &str, third_byte: u8) -> PoolSpec {
    PoolSpec {
        data_path: DataPath::Ebpf,
        nics: 2,
        ..pool(name, third_byte)
    }
}

/// The same for containers.
pub(crate) fn container_pool(name: &str, third_byte: u8) -> PoolSpec {
    PoolSpec {
        kind: SlotKind::Container,
        data_path: DataPath::Ebpf,
        ..pool(name, third_byte)
    }
}

/// Makes a pool and waits until it is full and the host has been looked at.
pub(crate) fn fill(slots: &Slots, spec: &PoolSpec) {
    slots.create_pool(spec).unwrap();
    let begun = Instant::now();
    while slots.pool(&spec.name).unwrap().slots.ready < spec.size || !slots.health().ready {
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "pool is not full"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

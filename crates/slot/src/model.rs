//! A kernel made of a few maps, for tests of everything above it.
//!
//! The [`Kernel`] outlives the service, as the real one does. It watches what is done to it and
//! notes what must never happen. [`Power`] counts the steps of kernel and journal and cuts them off
//! after a given one: what SIGKILL does, at a moment that a seed determines.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard},
};

use sandwire_api::{
    lease::{TapHolder, TapStatus, TrafficCount},
    name::Name,
    pool::PolicySpec,
    published_port::PublishPort,
    slot::{DataPath, Defect, TapUse},
    traffic::Traffic,
};

use crate::{
    error::NetworkError,
    network::{
        Inspection, Inventory, Leftover, Listener, Network, PolicyIndex, Tenancy, TraceSource,
        Withdrawal,
    },
    plan::{Plan, SlotPlan},
};

pub(crate) mod channels;
mod checks;
mod clock;
mod failure;
mod groups;
mod interlude;
mod power;
mod traces;

pub(crate) use self::{clock::ManualClock, interlude::Interlude, power::Power};
use self::{
    failure::{defect, failed},
    groups::Groups,
    traces::NoTraces,
};

/// What survives a crash of the service.
#[derive(Debug, Default)]
pub(crate) struct Kernel {
    state: Mutex<KernelState>,
    /// No build goes on while somebody has it.
    pub(crate) builds_gate: Mutex<()>,
}

#[derive(Debug, Default)]
pub(crate) struct KernelState {
    /// By name of the namespace.
    pub(crate) slots: BTreeMap<String, ModelSlot>,
    pub(crate) pools: BTreeSet<String>,
    pub(crate) ports: Vec<(PublishPort, Vec<IpAddr>)>,
    pub(crate) port_lists: u32,
    /// Sockets of the host at any port.
    pub(crate) listeners: Vec<Listener>,
    /// Operations that fail until told otherwise.
    pub(crate) failing: BTreeSet<&'static str>,
    /// Things that must never happen, but did.
    pub(crate) violations: Vec<String>,
    pub(crate) builds: u32,
    pub(crate) withdrawals: u32,
    /// How often somebody looked for who has a TAP open.
    pub(crate) searches: u32,
    /// How often what nobody's plan has was taken away.
    pub(crate) settlings: u32,
    pub(crate) has_netkit: bool,
    /// Policies that the data path knows, by number.
    pub(crate) policies: BTreeMap<u32, PolicySpec>,
    /// Pools that there were when the data path got to know a policy.
    pub(crate) pools_of_policies: BTreeMap<u32, BTreeSet<String>>,
    /// How often the policies of many slots were changed at once.
    pub(crate) policy_changes: u32,
    next_policy: u32,
    pub(crate) groups: Groups,
    /// Interfaces in others' namespaces, by name of their host end.
    pub(crate) attached: BTreeMap<String, PathBuf>,
    /// Namespaces that there are not.
    pub(crate) missing_namespaces: BTreeSet<PathBuf>,
    /// The kernel's numbers of those that there are.
    pub(crate) cookies: BTreeMap<PathBuf, u64>,
    /// Slots whose packets are told of.
    pub(crate) traced: BTreeSet<String>,
    /// Slots that were moved to another data path, by name of the namespace.
    pub(crate) moved: Vec<String>,
    /// The host refuses pools whose TAPs have this MTU.
    pub(crate) refused_mtu: Option<u32>,
    /// What somebody does the next time that a namespace is looked for.
    pub(crate) interlude: Option<Interlude>,
}

#[derive(Debug)]
pub(crate) struct ModelSlot {
    pub(crate) pool: String,
    pub(crate) number: u32,
    /// Whether the host's interface is there: without it the slot is only a piece.
    pub(crate) is_complete: bool,
    pub(crate) has_tap: bool,
    pub(crate) has_vmm: bool,
    /// A sound slot's TAP is there because nobody deleted it.
    pub(crate) is_damaged: bool,
    pub(crate) data_path: DataPath,
    /// What the data path knows of its tenant, if its packets pass.
    pub(crate) tenancy: Option<Tenancy>,
}

impl Kernel {
    pub(crate) fn lock(&self) -> MutexGuard<'_, KernelState> {
        self.state.lock().unwrap()
    }

    /// Makes an operation fail from now on, or work again.
    pub(crate) fn fail(&self, operation: &'static str, fails: bool) {
        let mut state = self.lock();
        if fails {
            state.failing.insert(operation);
        } else {
            state.failing.remove(operation);
        }
    }

    /// What a VMM does: opens the slot's TAP. Returns whether there was one.
    pub(crate) fn start_vmm(&self, netns: &str) -> bool {
        match self.lock().slots.get_mut(netns) {
            Some(slot) if slot.has_tap => {
                slot.has_vmm = true;
                true
            }
            _ => false,
        }
    }

    pub(crate) fn stop_vmm(&self, netns: &str) {
        if let Some(slot) = self.lock().slots.get_mut(netns) {
            slot.has_vmm = false;
        }
    }

    pub(crate) fn damage(&self, netns: &str) {
        self.lock().slots.get_mut(netns).unwrap().is_damaged = true;
    }

    pub(crate) fn remove(&self, netns: &str) {
        self.lock().slots.remove(netns).unwrap();
    }

    /// Slots of a pool that are complete, by number.
    pub(crate) fn numbers(&self, pool: &str) -> Vec<u32> {
        let state = self.lock();
        let slots = state.slots.values();
        let mut numbers: Vec<u32> = slots
            .filter(|slot| slot.pool == pool && slot.is_complete)
            .map(|slot| slot.number)
            .collect();
        numbers.sort_unstable();
        numbers
    }

    #[track_caller]
    pub(crate) fn assert_unviolated(&self) {
        let violations = std::mem::take(&mut self.lock().violations);
        assert!(violations.is_empty(), "{violations:#?}");
    }
}

/// The service's way to the [`Kernel`], for as long as there is power.
pub(crate) struct ModelNetwork {
    pub(crate) kernel: Arc<Kernel>,
    pub(crate) power: Power,
}

impl ModelNetwork {
    /// Begins a call.
    fn enter(&self, operation: &'static str) -> Result<MutexGuard<'_, KernelState>, NetworkError> {
        let state = self.kernel.lock();
        if self.power.step() && !state.failing.contains(operation) {
            Ok(state)
        } else {
            Err(failed(operation))
        }
    }

    /// Ends a call: the power may fail between its effect and the caller's knowing of it.
    fn leave(&self, operation: &'static str) -> Result<(), NetworkError> {
        self.power
            .step()
            .then_some(())
            .ok_or_else(|| failed(operation))
    }

    fn tear_down_one(&self, slot: &SlotPlan) -> Result<(), NetworkError> {
        let mut state = self.enter("tear down")?;
        state.check_unpublished(slot);
        state.attached.remove(&slot.host_interface);
        let Some(found) = state.slots.get_mut(&slot.netns_name) else {
            return Ok(());
        };
        if found.has_vmm {
            let name = slot.netns_name.clone();
            state
                .violations
                .push(format!("{name} torn down under a VMM"));
            return Ok(());
        }
        found.is_complete = false;
        self.leave("tear down")?;
        state.slots.remove(&slot.netns_name);
        self.leave("tear down")
    }
}

impl Network for ModelNetwork {
    fn add_pool(&self, plan: &Plan) -> Result<(), NetworkError> {
        let mut state = self.enter("add pool")?;
        if state.refused_mtu == Some(plan.spec.tap.mtu) {
            return Err(failed("add pool"));
        }
        state.pools.insert(plan.spec.name.to_string());
        self.leave("add pool")
    }

    fn take_up_pool(&self, plan: &Plan, _: Option<DataPath>) -> Result<(), NetworkError> {
        self.add_pool(plan)
    }

    fn settle_pools(&self) -> Result<(), NetworkError> {
        self.enter("settle pools")?.settlings += 1;
        self.leave("settle pools")
    }

    fn check_ebpf(&self) -> Result<(), NetworkError> {
        drop(self.enter("check ebpf")?);
        self.leave("check ebpf")
    }

    fn remove_pool(&self, plan: &Plan) -> Result<(), NetworkError> {
        let mut state = self.enter("remove pool")?;
        let pool = plan.spec.name.as_str();
        if state.slots.values().any(|slot| slot.pool == pool) {
            state
                .violations
                .push(format!("pool {pool} removed before its slots"));
        }
        state.pools.remove(pool);
        self.leave("remove pool")
    }

    fn build(&self, slot: &SlotPlan) -> Result<(), NetworkError> {
        drop(self.kernel.builds_gate.lock());
        let mut state = self.enter("build")?;
        if slot.is_container() {
            // Nothing that can be seen is made of it yet.
            if state.attached.contains_key(&slot.host_interface) {
                let name = &slot.netns_name;
                state.violations.push(format!("{name} built over another"));
            }
            state.builds += 1;
            return self.leave("build");
        }
        let mut name = slot.netns_name.split('.');
        let pool = name.nth(2).unwrap().to_owned();
        if !state.pools.contains(&pool) {
            state
                .violations
                .push(format!("slot built before pool {pool}"));
        }
        let new = ModelSlot {
            pool,
            number: slot.number.0,
            is_complete: true,
            has_tap: true,
            has_vmm: false,
            is_damaged: false,
            data_path: slot.data_path,
            tenancy: None,
        };
        if state.slots.insert(slot.netns_name.clone(), new).is_some() {
            let name = &slot.netns_name;
            state.violations.push(format!("{name} built over another"));
        }
        state.builds += 1;
        self.leave("build")
    }

    fn withdraw_taps(&self, slot: &SlotPlan) -> Result<Withdrawal, NetworkError> {
        let mut state = self.enter("withdraw")?;
        state.withdrawals += 1;
        state.attached.remove(&slot.host_interface);
        let withdrawal = match state.slots.get_mut(&slot.netns_name) {
            Some(found) if found.has_vmm => Withdrawal::Held,
            Some(found) => {
                found.has_tap = false;
                Withdrawal::Free
            }
            None => Withdrawal::Free,
        };
        self.leave("withdraw")?;
        Ok(withdrawal)
    }

    fn tap_holders(&self, _: &SlotPlan) -> Vec<TapHolder> {
        self.kernel.lock().searches += 1;
        vec![TapHolder {
            pid: 17,
            command: "firecracker".to_owned(),
        }]
    }

    fn tear_down(&self, slots: &[SlotPlan]) -> Vec<Result<(), NetworkError>> {
        slots.iter().map(|slot| self.tear_down_one(slot)).collect()
    }

    fn inspect(&self, slot: &SlotPlan) -> Inspection {
        let state = self.kernel.lock();
        if slot.is_container() {
            let is_there = state.attached.contains_key(&slot.host_interface);
            let defects = match slot.attach.is_some() && !is_there {
                true => vec![defect("reported")],
                false => Vec::new(),
            };
            return Inspection {
                defects,
                ..Inspection::default()
            };
        }
        let found = state.slots.get(&slot.netns_name);
        let is_sound = found.is_some_and(|found| {
            found.has_tap && !found.is_damaged && found.data_path == slot.data_path
        });
        let used = match found {
            Some(found) if found.has_vmm => TapUse::Attached,
            Some(_) => TapUse::Unused,
            None => TapUse::Missing,
        };
        let taps = slot.nics.iter().map(|nic| TapStatus {
            tap: nic.tap.clone(),
            used,
            egress: TrafficCount::default(),
            ingress: TrafficCount::default(),
        });
        Inspection {
            taps: taps.collect(),
            defects: if is_sound {
                Vec::new()
            } else {
                vec![defect("reported")]
            },
            connections: Some(0),
            ..Inspection::default()
        }
    }

    fn repair(&self, slot: &SlotPlan) -> Vec<Defect> {
        let Ok(mut state) = self.enter("repair") else {
            return vec![defect("reported")];
        };
        match state.slots.get_mut(&slot.netns_name) {
            Some(found) if found.is_damaged || !found.is_complete => {
                (found.is_damaged, found.is_complete) = (false, true);
                vec![defect("repaired")]
            }
            _ => Vec::new(),
        }
    }

    fn inventory(&self) -> Result<Inventory, NetworkError> {
        let state = self.enter("inventory")?;
        let mut inventory = Inventory::default();
        for (name, slot) in &state.slots {
            if slot.is_complete {
                inventory.slots.push((slot.pool.clone(), slot.number));
            } else {
                inventory.leftovers.push(Leftover::Namespace(name.clone()));
            }
        }
        let attached = state.attached.keys().cloned();
        inventory
            .leftovers
            .extend(attached.map(Leftover::Interface));
        Ok(inventory)
    }

    fn check_netkit(&self) -> Result<(), NetworkError> {
        let has_netkit = self.kernel.lock().has_netkit;
        has_netkit.then_some(()).ok_or(NetworkError::NoNetkit {
            reason: "Operation not supported".to_owned(),
        })
    }

    fn find_namespace(&self, path: &Path) -> Result<Option<u64>, NetworkError> {
        self.kernel.play_interlude();
        Ok(self.kernel.lock().cookies.get(path).copied())
    }

    fn attach(&self, slot: &SlotPlan) -> Result<(), NetworkError> {
        let mut state = self.enter("attach")?;
        let attach = slot.attach.as_ref().unwrap();
        if state.missing_namespaces.contains(&attach.request.netns) {
            return Err(failed("attach"));
        }
        let (name, netns) = (slot.host_interface.clone(), attach.request.netns.clone());
        if state.attached.insert(name, netns).is_some() {
            let name = &slot.netns_name;
            state
                .violations
                .push(format!("{name} attached over another"));
        }
        drop(state);
        self.leave("attach")
    }

    fn reclaim(&self, leftovers: &[Leftover]) -> Vec<Result<(), NetworkError>> {
        let one = |leftover: &Leftover| {
            let mut state = self.enter("reclaim")?;
            match leftover {
                Leftover::Namespace(name) => drop(state.slots.remove(name)),
                Leftover::Interface(name) => drop(state.attached.remove(name)),
                Leftover::Alias(_) | Leftover::Child(_) => {}
            }
            self.leave("reclaim")
        };
        leftovers.iter().map(one).collect()
    }

    fn listeners(&self, _: &PublishPort) -> Vec<Listener> {
        self.kernel.lock().listeners.clone()
    }

    fn set_published_ports(
        &self,
        ports: &[(PublishPort, Vec<IpAddr>)],
    ) -> Result<(), NetworkError> {
        let mut state = self.enter("publish")?;
        state.ports = ports.to_vec();
        state.port_lists += 1;
        if state.failing.contains("confirm ports") {
            return Err(failed("confirm ports"));
        }
        drop(state);
        self.leave("publish")
    }

    fn change_pool(&self, _: &Plan, _: Option<DataPath>) -> Result<(), NetworkError> {
        drop(self.enter("change pool")?);
        self.leave("change pool")
    }

    fn add_policy(&self, policy: &PolicySpec) -> Result<PolicyIndex, NetworkError> {
        let mut state = self.enter("add policy")?;
        state.next_policy += 1;
        let number = state.next_policy;
        state.policies.insert(number, policy.clone());
        let pools = state.pools.clone();
        state.pools_of_policies.insert(number, pools);
        drop(state);
        self.leave("add policy")?;
        Ok(PolicyIndex(number))
    }

    fn remove_policy(&self, policy: PolicyIndex) {
        if let Ok(mut state) = self.enter("remove policy") {
            state.check_unused(policy.0);
            state.policies.remove(&policy.0);
        }
    }

    fn finish_adoption(&self, policies: &BTreeSet<PolicyIndex>, _: &BTreeSet<(u32, u32)>) {
        if let Ok(mut state) = self.enter("finish adoption") {
            let known: Vec<u32> = state.policies.keys().copied().collect();
            for policy in known {
                if !policies.contains(&PolicyIndex(policy)) {
                    state.check_unused(policy);
                    state.policies.remove(&policy);
                }
            }
        }
    }

    fn group_pairs_max(&self) -> usize {
        self.kernel.lock().groups.pairs_max
    }

    fn set_group_pairs(&self, pairs: &BTreeSet<(u32, u32)>) -> Result<bool, NetworkError> {
        let mut state = self.enter("set group pairs")?;
        if state.groups.is_closed {
            return Ok(false);
        }
        let has_memory = !state.failing.contains("add group pairs");
        state.groups.set(pairs, has_memory)?;
        drop(state);
        self.leave("set group pairs")?;
        Ok(true)
    }

    fn activate(&self, slot: &SlotPlan, tenancy: &Tenancy) -> Result<(), NetworkError> {
        let mut state = self.enter("activate")?;
        let found = state.slots.get(&slot.netns_name);
        if found.is_some_and(|found| found.data_path == DataPath::Nft) {
            return Err(failed("activate"));
        }
        state.set_tenancy(slot, Some(*tenancy));
        drop(state);
        self.leave("activate")
    }

    fn deactivate(&self, slot: &SlotPlan) -> Result<(), NetworkError> {
        let mut state = self.enter("deactivate")?;
        state.set_tenancy(slot, None);
        state.traced.remove(&slot.netns_name);
        drop(state);
        self.leave("deactivate")
    }

    fn set_policy(&self, slot: &SlotPlan, tenancy: &Tenancy) -> Result<(), NetworkError> {
        self.enter("set policy")?.set_tenancy(slot, Some(*tenancy));
        self.leave("set policy")
    }

    fn set_policies(&self, changes: &[(SlotPlan, Tenancy)]) -> Vec<Result<(), NetworkError>> {
        self.kernel.lock().policy_changes += 1;
        let set = |(slot, tenancy): &(SlotPlan, Tenancy)| self.set_policy(slot, tenancy);
        changes.iter().map(set).collect()
    }

    fn adopt(&self, slot: &SlotPlan, tenancy: Option<&Tenancy>) -> Result<(), NetworkError> {
        self.enter("adopt")?.set_tenancy(slot, tenancy.copied());
        self.leave("adopt")
    }

    fn move_slot(
        &self,
        slot: &SlotPlan,
        tenancy: Option<&Tenancy>,
    ) -> Result<Option<Traffic>, NetworkError> {
        let mut state = self.enter("move")?;
        state.moved.push(slot.netns_name.clone());
        let tenancy = tenancy.copied().filter(|_| slot.is_ebpf());
        state.set_tenancy(slot, tenancy);
        if let Some(found) = state.slots.get_mut(&slot.netns_name) {
            found.data_path = slot.data_path;
        }
        drop(state);
        self.leave("move").map(|()| None)
    }

    fn set_trace(&self, slot: &SlotPlan, traced: bool) -> Result<(), NetworkError> {
        let mut state = self.enter("trace")?;
        if traced {
            state.traced.insert(slot.netns_name.clone());
        } else {
            state.traced.remove(&slot.netns_name);
        }
        Ok(())
    }

    fn trace_events(&self) -> Result<Box<dyn TraceSource>, NetworkError> {
        Ok(Box::new(NoTraces))
    }

    fn inspect_host(&self, _pools: &[Name]) -> Vec<Defect> {
        let fails = self.kernel.lock().failing.contains("host");
        if fails {
            vec![defect("reported")]
        } else {
            Vec::new()
        }
    }
}

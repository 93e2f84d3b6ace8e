//! A service for vsock made of a map. It outlives the service of slots, as the real one does.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard},
};

use sandwire_api::vsock::{
    VsockConnection, VsockDestination, VsockPolicy, VsockState, VsockTraffic, VsockType,
};

use super::Power;
use crate::{
    channel::{Capture, ChannelError, ChannelPlan, Channels, Whose},
    lease::LeaseKey,
};

/// Who has a service of its own. Everybody else's is the first.
pub(crate) const GROUP_UID: u32 = 1001;

/// Folder of all channels.
pub(crate) const FOLDER: &str = "/run/sandwire/vsock";

/// What survives a crash of the service of slots.
#[derive(Debug, Default)]
pub(crate) struct ModelService {
    state: Mutex<ServiceState>,
    /// No channel is opened while somebody has it.
    pub(crate) opens_gate: Mutex<()>,
}

#[derive(Debug, Default)]
pub(crate) struct ServiceState {
    pub(crate) channels: BTreeMap<LeaseKey, ChannelPlan>,
    pub(crate) folders: BTreeSet<PathBuf>,
    /// What the second has of a lease whose owner's service it was.
    pub(crate) former: Option<ChannelPlan>,
    /// Those that the first was asked to open there meanwhile.
    pub(crate) refused_opens: u32,
    /// None answers.
    pub(crate) is_down: bool,
    /// The one that doesn't, though others may.
    pub(crate) down: Option<usize>,
    /// It refuses to open anything.
    pub(crate) refuses: bool,
    /// A policy that it refuses for this lease.
    pub(crate) refused_policy: Option<(LeaseKey, VsockPolicy)>,
    /// Channels that it has opened so far.
    pub(crate) opened: u32,
    pub(crate) generation: u64,
    /// Services of the host to which others than root may lead guests.
    pub(crate) host_services: Vec<VsockDestination>,
    /// Questions that were about all of a service's channels.
    pub(crate) told_of_all: u32,
    /// Messages that it was sent.
    pub(crate) messages: u32,
}

impl ModelService {
    pub(crate) fn lock(&self) -> MutexGuard<'_, ServiceState> {
        self.state.lock().unwrap()
    }

    /// Goes away, or comes back with what it had.
    pub(crate) fn set_down(&self, is_down: bool) {
        let mut state = self.lock();
        state.is_down = is_down;
        state.generation += 1;
    }
}

/// The service as one service of slots talks to it.
pub(crate) struct ModelChannels {
    pub(crate) service: Arc<ModelService>,
    pub(crate) power: Power,
}

impl ServiceState {
    fn answers(&self, service: usize) -> bool {
        !self.is_down && self.down != Some(service)
    }
}

fn service_of(owner_uid: u32) -> usize {
    usize::from(owner_uid == GROUP_UID)
}

impl ModelChannels {
    fn enter(&self, service: usize) -> Result<MutexGuard<'_, ServiceState>, ChannelError> {
        let mut state = self.service.lock();
        state.messages += 1;
        if self.power.step() && state.answers(service) {
            Ok(state)
        } else {
            Err(down())
        }
    }

    fn enter_for(&self, lease: &LeaseKey) -> Result<MutexGuard<'_, ServiceState>, ChannelError> {
        self.enter(service_of(lease.owner_uid))
    }

    /// The channels of services that answer.
    fn of(&self, whose: Whose<'_>) -> Result<Vec<ChannelPlan>, ChannelError> {
        if matches!(whose, Whose::Owners(_)) {
            self.service.lock().told_of_all += 1;
        }
        let services: BTreeSet<usize> = match whose {
            Whose::Lease(lease) => [service_of(lease.owner_uid)].into(),
            Whose::Owners(owners) => owners.iter().map(|uid| service_of(*uid)).collect(),
        };
        let mut answers = services.iter().filter_map(|service| {
            let state = self.enter(*service).ok()?;
            let channels = state.channels.values();
            let of_service =
                channels.filter(|channel| service_of(channel.lease.owner_uid) == *service);
            Some(of_service.cloned().collect())
        });
        let mut channels: Vec<ChannelPlan> = answers.next().ok_or_else(down)?;
        channels.extend(answers.flatten());
        if let Whose::Lease(lease) = whose {
            channels.retain(|channel| channel.lease == *lease);
        }
        Ok(channels)
    }

    fn leave(&self) -> Result<(), ChannelError> {
        self.power.step().then_some(()).ok_or_else(down)
    }
}

fn down() -> ChannelError {
    ChannelError::Down {
        socket: Path::new(FOLDER).join("control.sock"),
        reason: "as told".to_owned(),
    }
}

impl Channels for ModelChannels {
    fn folder(&self) -> Option<&Path> {
        Some(Path::new(FOLDER))
    }

    fn services(&self) -> usize {
        2
    }

    fn service_of(&self, owner_uid: u32) -> usize {
        service_of(owner_uid)
    }

    fn check(&self, owner_uid: u32) -> Result<(), ChannelError> {
        match self.service.lock().answers(service_of(owner_uid)) {
            false => Err(down()),
            true => Ok(()),
        }
    }

    fn may_lead_to(&self, to: &VsockDestination) -> bool {
        self.service.lock().host_services.contains(to)
    }

    fn open(&self, channel: &ChannelPlan) -> Result<(), ChannelError> {
        drop(self.service.opens_gate.lock());
        let mut state = self.enter_for(&channel.lease)?;
        if state.refuses {
            return Err(ChannelError::Refused("as told".to_owned()));
        }
        let is_taken = |former: &ChannelPlan| former.folder == channel.folder;
        if state.former.as_ref().is_some_and(is_taken) {
            state.refused_opens += 1;
            return Err(ChannelError::Refused("somebody listens there".to_owned()));
        }
        state.folders.insert(channel.folder.clone());
        self.leave()?;
        state
            .channels
            .insert(channel.lease.clone(), channel.clone());
        state.opened += 1;
        self.leave()
    }

    fn close(&self, service: usize, lease: &LeaseKey) -> Result<(), ChannelError> {
        let mut state = self.enter(service)?;
        match service == service_of(lease.owner_uid) {
            true => drop(state.channels.remove(lease)),
            false => state.former = None,
        }
        self.leave()
    }

    fn remove_folder(&self, folder: &Path) -> Result<(), ChannelError> {
        let mut state = self.service.lock();
        self.leave()?;
        state.folders.remove(folder);
        Ok(())
    }

    fn set_policy(&self, lease: &LeaseKey, policy: &VsockPolicy) -> Result<(), ChannelError> {
        let mut state = self.enter_for(lease)?;
        if matches!(&state.refused_policy, Some((of, refused)) if of == lease && refused == policy)
        {
            return Err(ChannelError::Refused("as told".to_owned()));
        }
        let channel = state
            .channels
            .get_mut(lease)
            .ok_or_else(|| ChannelError::Refused("no such channel".to_owned()))?;
        channel.policy = policy.clone();
        self.leave()
    }

    fn list(&self, service: usize) -> Result<Vec<ChannelPlan>, ChannelError> {
        let state = self.enter(service)?;
        let channels = state.channels.values();
        let of_service = channels.filter(|channel| service_of(channel.lease.owner_uid) == service);
        let former = state.former.iter().filter(|_| service == 1);
        Ok(of_service.chain(former).cloned().collect())
    }

    fn has_folder(&self, channel: &ChannelPlan) -> bool {
        self.service.lock().folders.contains(&channel.folder)
    }

    fn sweep(&self, wanted: &HashSet<PathBuf>) {
        let mut state = self.service.lock();
        // Who has crashed knows other channels than the journal.
        if !self.power.step() {
            return;
        }
        state.folders.retain(|folder| wanted.contains(folder));
    }

    fn traffic(&self, of: Whose<'_>) -> Result<BTreeMap<LeaseKey, VsockTraffic>, ChannelError> {
        let counted = VsockTraffic {
            egress_bytes: 7,
            ..VsockTraffic::default()
        };
        let channels = self.of(of)?.into_iter();
        Ok(channels
            .map(|channel| (channel.lease, counted.clone()))
            .collect())
    }

    /// One connection each.
    fn connections(&self, of: Whose<'_>) -> Result<Vec<VsockConnection>, ChannelError> {
        Ok(self.of(of)?.iter().map(connection).collect())
    }

    fn capture(&self, lease: &LeaseKey, _: u32) -> Result<Capture, ChannelError> {
        drop(self.enter_for(lease)?);
        let (bytes, _writer) = std::os::unix::net::UnixStream::pair().unwrap();
        Ok(Capture {
            bytes: bytes.into(),
            hold: Box::new(|| true),
        })
    }

    fn generation(&self, _: usize) -> u64 {
        self.service.lock().generation
    }

    fn problems(&self) -> Vec<(String, String)> {
        let is_down = self.service.lock().is_down;
        let problem = || ("vsock service".to_owned(), down().to_string());
        is_down.then(problem).into_iter().collect()
    }
}

fn connection(channel: &ChannelPlan) -> VsockConnection {
    VsockConnection {
        lease: channel.lease.name.clone(),
        owner_uid: channel.lease.owner_uid,
        socket_type: VsockType::Stream,
        from_guest: true,
        guest_cid: channel.cid,
        guest_port: Some(1),
        peer_cid: 2,
        peer_port: 1024,
        peer: "client".to_owned(),
        state: VsockState::Established,
        egress_bytes: 7,
        ingress_bytes: 0,
        peer_credit: Some(0),
        own_credit: Some(0),
        queued_bytes: 0,
        queued_ingress_bytes: Some(0),
        age_milliseconds: 1,
    }
}

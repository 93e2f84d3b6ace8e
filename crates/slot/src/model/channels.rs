//! A service for vsock made of a map. It outlives the service of slots, as the real one does.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard},
};

use sandwire_api::vsock::{
    VsockConnection, VsockDestination, VsockPolicy, VsockState, VsockTraffic, VsockType,
};

use super::Power;
use crate::{
    channel::{Capture, ChannelError, ChannelPlan, Channels},
    lease::LeaseKey,
};

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
    /// It doesn't answer.
    pub(crate) is_down: bool,
    /// It refuses to open anything.
    pub(crate) refuses: bool,
    /// A policy that it refuses for this lease.
    pub(crate) refused_policy: Option<(LeaseKey, VsockPolicy)>,
    /// Channels that it has opened so far.
    pub(crate) opened: u32,
    pub(crate) generation: u64,
    /// Services of the host to which others than root may lead guests.
    pub(crate) host_services: Vec<VsockDestination>,
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

impl ModelChannels {
    fn enter(&self) -> Result<MutexGuard<'_, ServiceState>, ChannelError> {
        let mut state = self.service.lock();
        state.messages += 1;
        if self.power.step() && !state.is_down {
            Ok(state)
        } else {
            Err(down())
        }
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

    fn check(&self, _: u32) -> Result<(), ChannelError> {
        match self.service.lock().is_down {
            true => Err(down()),
            false => Ok(()),
        }
    }

    fn may_lead_to(&self, to: &VsockDestination) -> bool {
        self.service.lock().host_services.contains(to)
    }

    fn open(&self, channel: &ChannelPlan) -> Result<(), ChannelError> {
        drop(self.service.opens_gate.lock());
        let mut state = self.enter()?;
        if state.refuses {
            return Err(ChannelError::Refused("as told".to_owned()));
        }
        state.folders.insert(channel.folder.clone());
        self.leave()?;
        state
            .channels
            .insert(channel.lease.clone(), channel.clone());
        state.opened += 1;
        self.leave()
    }

    fn close(&self, lease: &LeaseKey, folder: &Path) -> Result<(), ChannelError> {
        let mut state = self.enter()?;
        state.channels.remove(lease);
        self.leave()?;
        state.folders.remove(folder);
        self.leave()
    }

    fn set_policy(&self, lease: &LeaseKey, policy: &VsockPolicy) -> Result<(), ChannelError> {
        let mut state = self.enter()?;
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

    fn list(&self) -> Result<Vec<ChannelPlan>, ChannelError> {
        let state = self.enter()?;
        Ok(state.channels.values().cloned().collect())
    }

    fn sweep(&self, wanted: &[ChannelPlan]) {
        let mut state = self.service.lock();
        // Who has crashed knows other channels than the journal.
        if !self.power.step() {
            return;
        }
        state
            .folders
            .retain(|folder| wanted.iter().any(|channel| channel.folder == *folder));
    }

    fn traffic(
        &self,
        of: Option<&LeaseKey>,
    ) -> Result<BTreeMap<LeaseKey, VsockTraffic>, ChannelError> {
        let state = self.enter()?;
        let counted = VsockTraffic {
            egress_bytes: 7,
            ..VsockTraffic::default()
        };
        let leases = state.channels.keys();
        Ok(leases
            .filter(|lease| of.is_none_or(|of| of == *lease))
            .map(|lease| (lease.clone(), counted.clone()))
            .collect())
    }

    /// One connection each.
    fn connections(&self, of: Option<&LeaseKey>) -> Result<Vec<VsockConnection>, ChannelError> {
        let state = self.enter()?;
        let channels = state.channels.values();
        let of_channels = channels.filter(|channel| of.is_none_or(|of| *of == channel.lease));
        Ok(of_channels.map(connection).collect())
    }

    fn capture(&self, _: &LeaseKey, _: u32) -> Result<Capture, ChannelError> {
        drop(self.enter()?);
        let (bytes, _writer) = std::os::unix::net::UnixStream::pair().unwrap();
        Ok(Capture {
            bytes: bytes.into(),
            hold: Box::new(|| true),
        })
    }

    fn generation(&self) -> u64 {
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
        guest_port: 1,
        peer_cid: 2,
        peer_port: 1024,
        peer: "client".to_owned(),
        state: VsockState::Established,
        egress_bytes: 7,
        ingress_bytes: 0,
        peer_credit: 0,
        own_credit: 0,
        queued_bytes: 0,
        age_milliseconds: 1,
    }
}

//! A service for vsock that keeps channels in memory.

use std::{
    collections::{BTreeMap, HashSet},
    io::Write,
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use sandwire_api::vsock::{
    VsockClass, VsockClassTraffic, VsockConnection, VsockDestination, VsockPolicy, VsockRefusal,
    VsockState, VsockTraffic, VsockType,
};
use sandwire_slot::{
    channel::{Capture, ChannelError, ChannelPlan, Channels, Whose},
    lease::LeaseKey,
};

/// The service. Each channel has one connection, and one refusal.
#[derive(Default)]
pub(crate) struct ModelChannels {
    channels: Mutex<BTreeMap<LeaseKey, ChannelPlan>>,
    pub(crate) is_down: AtomicBool,
    /// Captures end at once.
    pub(crate) captures_end: AtomicBool,
    /// Whether that is since the service is gone.
    pub(crate) captures_break: AtomicBool,
    /// What hands on captures: the writing end stays open.
    captures: Mutex<Vec<std::io::PipeWriter>>,
}

impl ModelChannels {
    fn answer(&self) -> Result<(), ChannelError> {
        if self.is_down.load(Ordering::Relaxed) {
            return Err(ChannelError::Down {
                socket: "/run/sandwire/vsock/control.sock".into(),
                reason: "as told".to_owned(),
            });
        }
        Ok(())
    }

    fn of(&self, of: Whose<'_>) -> Vec<ChannelPlan> {
        let channels = self.channels.lock().unwrap();
        let wanted = |lease: &LeaseKey| match of {
            Whose::Lease(of) => of == lease,
            Whose::Owners(owners) => owners.contains(&lease.owner_uid),
        };
        let all = channels.values();
        all.filter(|channel| wanted(&channel.lease))
            .cloned()
            .collect()
    }
}

impl Channels for ModelChannels {
    fn folder(&self) -> Option<&Path> {
        Some(Path::new("/run/sandwire/vsock"))
    }

    fn services(&self) -> usize {
        1
    }

    fn service_of(&self, _: u32) -> usize {
        0
    }

    fn check(&self, _: u32) -> Result<(), ChannelError> {
        self.answer()
    }

    /// To what `host_services` in the tests' configuration would list.
    fn may_lead_to(&self, to: &VsockDestination) -> bool {
        matches!(to, VsockDestination::Unix { path } if path == "/run/log.sock")
    }

    fn open(&self, channel: &ChannelPlan) -> Result<(), ChannelError> {
        self.answer()?;
        let mut channels = self.channels.lock().unwrap();
        channels.insert(channel.lease.clone(), channel.clone());
        Ok(())
    }

    fn close(&self, _: usize, lease: &LeaseKey) -> Result<(), ChannelError> {
        self.answer()?;
        self.channels.lock().unwrap().remove(lease);
        Ok(())
    }

    fn remove_folder(&self, _: &Path) -> Result<(), ChannelError> {
        Ok(())
    }

    fn set_policy(&self, lease: &LeaseKey, policy: &VsockPolicy) -> Result<(), ChannelError> {
        self.answer()?;
        let mut channels = self.channels.lock().unwrap();
        channels.get_mut(lease).unwrap().policy = policy.clone();
        Ok(())
    }

    fn list(&self, _: usize) -> Result<Vec<ChannelPlan>, ChannelError> {
        self.answer()?;
        let channels = self.channels.lock().unwrap();
        Ok(channels.values().cloned().collect())
    }

    fn has_folder(&self, _: &ChannelPlan) -> bool {
        true
    }

    fn sweep(&self, _: &HashSet<PathBuf>) {}

    fn traffic(&self, of: Whose<'_>) -> Result<BTreeMap<LeaseKey, VsockTraffic>, ChannelError> {
        self.answer()?;
        let of_class = VsockClassTraffic {
            connections: 1,
            opened_by_guest: 3,
            egress_bytes: 1000,
            ..VsockClassTraffic::default()
        };
        let counted = VsockTraffic {
            attached: true,
            connections: 1,
            opened_by_guest: 3,
            egress_bytes: 1000,
            refusals: [(VsockRefusal::Policy, 2)].into(),
            classes: [(VsockClass::GuestToHost, of_class)].into(),
            ..VsockTraffic::default()
        };
        let channels = self.of(of).into_iter();
        Ok(channels
            .map(|channel| (channel.lease, counted.clone()))
            .collect())
    }

    fn connections(&self, of: Whose<'_>) -> Result<Vec<VsockConnection>, ChannelError> {
        self.answer()?;
        Ok(self.of(of).iter().map(connection).collect())
    }

    /// A file that is as long as the snap length, and goes on.
    fn capture(&self, _: &LeaseKey, snap_bytes: u32) -> Result<Capture, ChannelError> {
        self.answer()?;
        let (reader, mut writer) = std::io::pipe().unwrap();
        let bytes = vec![7; usize::try_from(snap_bytes).unwrap().min(4096)];
        writer.write_all(&bytes).unwrap();
        let breaks = self.captures_break.load(Ordering::Relaxed);
        if !self.captures_end.load(Ordering::Relaxed) {
            self.captures.lock().unwrap().push(writer);
        }
        Ok(Capture {
            bytes: reader.into(),
            hold: Box::new(move || !breaks),
        })
    }

    fn generation(&self, _: usize) -> u64 {
        0
    }

    fn problems(&self) -> Vec<(String, String)> {
        Vec::new()
    }
}

fn connection(channel: &ChannelPlan) -> VsockConnection {
    VsockConnection {
        lease: channel.lease.name.clone(),
        owner_uid: channel.lease.owner_uid,
        socket_type: VsockType::Stream,
        from_guest: true,
        guest_cid: channel.cid,
        guest_port: Some(40_000),
        peer_cid: 2,
        peer_port: 1024,
        peer: "client".to_owned(),
        state: VsockState::Established,
        egress_bytes: 1000,
        ingress_bytes: 0,
        peer_credit: Some(65_536),
        own_credit: Some(262_144),
        queued_bytes: 0,
        queued_ingress_bytes: Some(0),
        age_milliseconds: 5,
    }
}

//! The services for vsock, as the slot service needs them.
//!
//! Each is a process of its own that outlives the daemon: one for everybody, and one for each group of users
//! that the configuration names. What is asked of one goes over a connection that is kept; nothing here forks
//! while a lease is handed out. [`watch`] keeps the processes running, [`folder`] makes and removes the folders
//! of channels.

mod folder;
mod service;
mod strays;
mod watch;

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    fs::DirBuilder,
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use sandwire_api::{
    name::Name,
    vsock::{VsockConnection, VsockDestination, VsockPolicy, VsockTraffic},
};
use sandwire_slot::{
    channel::{Capture, ChannelError, ChannelPlan, Channels, Whose},
    lease::LeaseKey,
};
use sandwire_vsock_host::{address::VmKey, control::VmSpec, limits::Limits};

use self::{folder::Folders, service::Service, watch::Watch};
use crate::config::VsockConfig;

/// Name of the folder that has a folder for each group's service.
const GROUPS: &str = "groups";

/// All services.
pub(crate) struct VsockServices {
    folders: Folders,
    /// The first is everybody's who is in no group.
    services: Vec<Arc<Service>>,
    /// Services of the host to which others than root may lead guests.
    host_services: Vec<VsockDestination>,
    /// Ended when dropped.
    _watches: Vec<Watch>,
}

impl VsockServices {
    /// Finds the services, starts those that aren't there, and waits a little for them. One that doesn't come
    /// is no error: it is told as a problem and tried again.
    ///
    /// # Errors
    /// The folder can't be made.
    pub(crate) fn start(config: &VsockConfig) -> io::Result<Self> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(&config.folder)?;
        let names: Vec<&Name> = config.groups.iter().map(|group| &group.name).collect();
        strays::end_all_but(&names, &config.folder.join(GROUPS));
        let everybody = Service::new(None, &[], &config.folder, &config.service);
        let groups = config.groups.iter().map(|group| {
            let folder = config.folder.join(GROUPS).join(group.name.as_str());
            Service::new(
                Some(group.name.clone()),
                &group.uids,
                &folder,
                &group.service,
            )
        });
        let services: Vec<Arc<Service>> = std::iter::once(everybody)
            .chain(groups)
            .map(Arc::new)
            .collect();
        let watches = services
            .iter()
            .map(Watch::start)
            .collect::<io::Result<Vec<_>>>()?;
        for service in &services {
            service.await_up();
        }
        Ok(Self {
            folders: Folders::new(&config.folder)?,
            services,
            host_services: config.host_services.clone(),
            _watches: watches,
        })
    }

    /// The service that carries a user's channels.
    fn of(&self, uid: u32) -> &Service {
        &self.services[self.service_of(uid)]
    }

    /// Asks the service of one lease, or those of some owners, and puts together what is answered. That one doesn't answer
    /// is told as a problem, and keeps nobody from what the others say.
    fn gather<T>(
        &self,
        of: Whose<'_>,
        ask: impl Fn(&Service, Option<VmKey>) -> Result<Vec<T>, ChannelError>,
    ) -> Result<Vec<T>, ChannelError> {
        let owners = match of {
            Whose::Lease(lease) => return ask(self.of(lease.owner_uid), Some(vm_key(lease))),
            Whose::Owners(owners) => owners,
        };
        let asked: BTreeSet<usize> = owners.iter().map(|uid| self.service_of(*uid)).collect();
        let (mut answers, mut has_answer, mut failed) = (Vec::new(), false, None);
        for service in asked {
            match ask(&self.services[service], None) {
                Ok(found) => {
                    answers.extend(found);
                    has_answer = true;
                }
                Err(error) => failed = Some(error),
            }
        }
        match failed {
            Some(error) if !has_answer => Err(error),
            _ => Ok(answers),
        }
    }
}

impl Channels for VsockServices {
    fn folder(&self) -> Option<&Path> {
        Some(self.folders.base())
    }

    fn services(&self) -> usize {
        self.services.len()
    }

    fn service_of(&self, owner_uid: u32) -> usize {
        let group = self.services.iter().position(|it| it.has(owner_uid));
        group.unwrap_or(0)
    }

    fn check(&self, owner_uid: u32) -> Result<(), ChannelError> {
        self.of(owner_uid).check()
    }

    fn may_lead_to(&self, to: &VsockDestination) -> bool {
        self.host_services.contains(to)
    }

    fn open(&self, channel: &ChannelPlan) -> Result<(), ChannelError> {
        let uid = channel.lease.owner_uid;
        let service = self.of(uid);
        let gid = service.gid()?;
        let is_new = self.folders.make(&channel.folder, uid, gid)?;
        let opened = service.add(&vm_spec(channel, &service.settings.limits));
        // Else it has what others have made there: a VMM's socket, or the owner's.
        if opened.is_err()
            && is_new
            && let Err(error) = self.folders.remove(&channel.folder)
        {
            tracing::warn!(%error, "the folder of a vsock channel that could not be opened is left");
        }
        opened
    }

    fn close(&self, service: usize, lease: &LeaseKey) -> Result<(), ChannelError> {
        self.services[service].remove(vm_key(lease))
    }

    fn remove_folder(&self, folder: &Path) -> Result<(), ChannelError> {
        self.folders.remove(folder)
    }

    fn set_policy(&self, lease: &LeaseKey, policy: &VsockPolicy) -> Result<(), ChannelError> {
        let service = self.of(lease.owner_uid);
        service.set_policy(&vm_key(lease), policy)
    }

    fn list(&self, service: usize) -> Result<Vec<ChannelPlan>, ChannelError> {
        let vms = self.services[service].vms()?;
        Ok(vms.into_iter().map(channel_plan).collect())
    }

    fn has_folder(&self, channel: &ChannelPlan) -> bool {
        let (folder, uid) = (&channel.folder, channel.lease.owner_uid);
        if !self.folders.has(folder) {
            return false;
        }
        // The service may have become another user; then it may not enter, and nobody else would notice.
        if let Ok(gid) = self.of(uid).gid() {
            self.folders.keep_group(folder, uid, gid);
        }
        true
    }

    fn sweep(&self, wanted: &HashSet<PathBuf>) {
        self.folders.sweep(wanted);
    }

    fn traffic(&self, of: Whose<'_>) -> Result<BTreeMap<LeaseKey, VsockTraffic>, ChannelError> {
        let counted = self.gather(of, Service::traffic)?;
        Ok(counted
            .into_iter()
            .map(|vm| (lease_key(vm.key), vm.traffic))
            .collect())
    }

    fn connections(&self, of: Whose<'_>) -> Result<Vec<VsockConnection>, ChannelError> {
        self.gather(of, Service::connections)
    }

    fn capture(&self, lease: &LeaseKey, snap_bytes: u32) -> Result<Capture, ChannelError> {
        self.of(lease.owner_uid).capture(vm_key(lease), snap_bytes)
    }

    fn generation(&self, service: usize) -> u64 {
        self.services[service].generation()
    }

    fn problems(&self) -> Vec<(String, String)> {
        self.services
            .iter()
            .filter_map(|service| service.problem())
            .collect()
    }
}

fn vm_key(lease: &LeaseKey) -> VmKey {
    VmKey {
        tenant: lease.owner_uid,
        lease: lease.name.clone(),
    }
}

fn lease_key(key: VmKey) -> LeaseKey {
    LeaseKey {
        owner_uid: key.tenant,
        name: key.lease,
    }
}

fn vm_spec(channel: &ChannelPlan, limits: &Limits) -> VmSpec {
    VmSpec {
        key: vm_key(&channel.lease),
        kind: channel.kind,
        folder: channel.folder.clone(),
        cid: channel.cid,
        virtual_cid: channel.virtual_cid,
        policy: channel.policy.clone(),
        limits: limits.clone(),
    }
}

fn channel_plan(vm: VmSpec) -> ChannelPlan {
    ChannelPlan {
        lease: lease_key(vm.key),
        kind: vm.kind,
        folder: vm.folder,
        cid: vm.cid,
        virtual_cid: vm.virtual_cid,
        policy: vm.policy,
    }
}

/// A control socket's error, as those see it who asked for a channel.
fn down(socket: &Path, reason: impl ToString) -> ChannelError {
    ChannelError::Down {
        socket: PathBuf::from(socket),
        reason: reason.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use sandwire_api::vsock::VsockKind;
    use sandwire_slot::channel::checks;
    use sandwire_vsock_host::policy;

    use super::*;

    /// Else leases could be given a policy with which their channels can't be opened.
    #[test]
    fn slots_and_the_service_take_the_same_policies() {
        let socket = Path::new("/run/sandwire/vsock/web.1/vsock.sock");
        for to in [
            r#"{"kind": "host"}"#,
            r#"{"kind": "unix", "path": "/run/service"}"#,
            r#"{"kind": "unix", "path": "service"}"#,
            r#"{"kind": "tcp", "address": "127.0.0.1:80"}"#,
            r#"{"kind": "tcp", "address": "127.0.0.1:0"}"#,
            r#"{"kind": "tcp", "address": "0.0.0.0:80"}"#,
            r#"{"kind": "tcp", "address": "[ff02::1]:80"}"#,
            r#"{"kind": "vsock", "cid": 1, "port": 5}"#,
            r#"{"kind": "vsock", "cid": 0, "port": 5}"#,
            r#"{"kind": "vsock", "cid": 1, "port": 4294967295}"#,
            r#"{"kind": "sandbox", "lease": "db", "port": 4294967293}"#,
            r#"{"kind": "sandbox", "lease": "db", "port": 4294967294}"#,
        ] {
            for (kind, identity) in [
                (VsockKind::VhostUser, false),
                (VsockKind::VhostUser, true),
                (VsockKind::Hybrid, false),
                (VsockKind::Hybrid, true),
            ] {
                let rule = format!(r#"{{"port": "7-8", "to": {to}, "identity": {identity}}}"#);
                let policy: VsockPolicy =
                    serde_json::from_str(&format!(r#"{{"rules": [{rule}]}}"#)).unwrap();
                assert_eq!(
                    checks::check_policy(&policy, kind).is_ok(),
                    policy::check(&policy, kind, socket).is_ok(),
                    "{kind:?}: {rule}"
                );
            }
        }
    }
}

//! Who is where, and who may reach whom.
//!
//! One [`Directory`] is shared by all threads. A guest's packet or connection asks it for a [`Route`]; what
//! no rule of the guest's policy allows has none. The lock is held for a look-up only, never across a system
//! call, so a change of policy is seen by the next connection; existing ones are looked at again by whoever
//! carries them.
//!
//! CIDs say nothing about who somebody is: every clone may have the same. A guest is known by its lease, and
//! by the descriptor that its packets come from.

use std::{
    collections::HashMap,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
    time::Instant,
};

use sandwire_api::vsock::{
    HOST_CID, VsockClass, VsockDestination, VsockPolicy, VsockRefusal, VsockRule, VsockType,
};

use crate::{
    address::VmKey,
    hybrid::callee::{Callee, Seat},
    worker::WorkerHandle,
};

/// Where a connection of a guest leads.
#[derive(Clone, Debug)]
pub struct Route {
    /// What to connect to.
    pub target: Target,
    /// The line that the target is told first, with its newline.
    pub identity: Option<String>,
    /// What the target is called in a list: a path, an address, a lease.
    pub peer: String,
    /// Who calls.
    pub caller: VmKey,
}

impl Route {
    /// Whether both lead to the same place in the same way, so that a connection may stay.
    #[must_use]
    pub fn same(&self, other: &Self) -> bool {
        self.peer == other.peer && self.identity == other.identity
    }

    /// Takes a connection of the guest that it leads to, for as long as what this gives is kept. None where others count:
    /// the worker of a guest whose device is ours, and services for themselves.
    ///
    /// # Errors
    /// [`VsockRefusal::Unreachable`] where that guest has none for this caller.
    pub fn seat(&self, now: Instant) -> Result<Option<Seat>, VsockRefusal> {
        match &self.target {
            Target::HybridVm { callee, .. } => callee.admit(&self.caller, now).map(Some),
            _ => Ok(None),
        }
    }

    /// Between whom its connections are.
    #[must_use]
    pub fn class(&self) -> VsockClass {
        match &self.target {
            Target::Unix(_) | Target::OfOwner(_) | Target::Tcp(_) | Target::Vsock { .. } => {
                VsockClass::GuestToHost
            }
            Target::HybridVm { .. } | Target::LocalVm { .. } => VsockClass::GuestToGuest,
        }
    }
}

/// What a route ends at.
#[derive(Clone, Debug)]
pub enum Target {
    /// A Unix socket of the host.
    Unix(PathBuf),
    /// A Unix socket in the caller's own folder.
    OfOwner(PathBuf),
    /// A TCP service.
    Tcp(SocketAddr),
    /// A service on the host's own AF_VSOCK.
    Vsock {
        /// CID as the host's kernel knows it.
        cid: u32,
        /// Port.
        port: u32,
    },
    /// A guest whose VMM owns its device.
    HybridVm {
        /// The VMM's socket.
        socket: PathBuf,
        /// Port in that guest.
        port: u32,
        /// What its siblings have of it.
        callee: Arc<Callee>,
    },
    /// A guest whose device is ours.
    LocalVm {
        /// Which.
        vm: VmKey,
        /// The worker that serves it.
        worker: WorkerHandle,
        /// Port in that guest.
        port: u32,
    },
}

/// Who serves a guest's device.
#[derive(Clone, Debug)]
pub enum Face {
    /// One of our workers.
    Local(WorkerHandle),
    /// Its VMM; what its siblings have of it.
    Hybrid(Arc<Callee>),
}

/// A guest, as the directory knows it.
#[derive(Clone, Debug)]
pub struct Placement {
    /// Which.
    pub key: VmKey,
    /// Who serves its device.
    pub face: Face,
    /// The CID that it believes to have.
    pub cid: u32,
    /// CID by which siblings of its tenant may call it.
    pub virtual_cid: Option<u32>,
    /// Its Unix socket; what `to = host` leads to is called after it.
    pub socket: PathBuf,
    /// What it may reach.
    pub policy: VsockPolicy,
}

/// Why a guest isn't taken in.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DirectoryError {
    /// A CID that the specification reserves.
    #[error("{which} {cid} of vsock channel {vm} is reserved; choose one from 3 to 4294967294")]
    ReservedCid {
        /// Whose.
        vm: VmKey,
        /// `CID` or `virtual CID`.
        which: &'static str,
        /// What was asked for.
        cid: u32,
    },
    /// A virtual CID that another guest of the tenant has.
    #[error(
        "virtual CID {cid} of vsock channel {vm} is in use by {by}; choose another, or none: rules reach \
         siblings by ports of CID 2 as well"
    )]
    CidInUse {
        /// Whose.
        vm: VmKey,
        /// What was asked for.
        cid: u32,
        /// Who has it.
        by: VmKey,
    },
    /// It is there already.
    #[error("there is a vsock channel for {0} already; remove it first")]
    Exists(VmKey),
    /// It isn't there.
    #[error("there is no vsock channel for {0}")]
    Unknown(VmKey),
}

/// All guests of this service.
#[derive(Debug, Default)]
pub struct Directory {
    inner: RwLock<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    vms: HashMap<VmKey, Placement>,
    /// By tenant and virtual CID.
    virtual_cids: HashMap<(u32, u32), VmKey>,
}

impl Directory {
    /// Without any guest.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes a guest in.
    ///
    /// # Errors
    /// Reserved CIDs, a virtual CID that a sibling has, a guest that is there already. Nothing has changed
    /// then.
    pub fn add(&self, vm: Placement) -> Result<(), DirectoryError> {
        let reserved = |which, cid| DirectoryError::ReservedCid {
            vm: vm.key.clone(),
            which,
            cid,
        };
        if !assignable(vm.cid) {
            return Err(reserved("CID", vm.cid));
        }
        let mut inner = self.write();
        if inner.vms.contains_key(&vm.key) {
            return Err(DirectoryError::Exists(vm.key));
        }
        if let Some(cid) = vm.virtual_cid {
            if !assignable(cid) {
                return Err(reserved("virtual CID", cid));
            }
            let name = (vm.key.tenant, cid);
            if let Some(by) = inner.virtual_cids.get(&name) {
                let by = by.clone();
                return Err(DirectoryError::CidInUse {
                    vm: vm.key,
                    cid,
                    by,
                });
            }
            inner.virtual_cids.insert(name, vm.key.clone());
        }
        inner.vms.insert(vm.key.clone(), vm);
        Ok(())
    }

    /// Forgets a guest; whether it was there.
    pub fn remove(&self, key: &VmKey) -> bool {
        let mut inner = self.write();
        let Some(vm) = inner.vms.remove(key) else {
            return false;
        };
        if let Some(cid) = vm.virtual_cid {
            inner.virtual_cids.remove(&(key.tenant, cid));
        }
        true
    }

    /// Replaces what a guest may reach. Who carries its connections is told separately.
    ///
    /// # Errors
    /// No such guest.
    pub fn set_policy(&self, key: &VmKey, policy: VsockPolicy) -> Result<(), DirectoryError> {
        match self.write().vms.get_mut(key) {
            Some(vm) => {
                vm.policy = policy;
                Ok(())
            }
            None => Err(DirectoryError::Unknown(key.clone())),
        }
    }

    /// The guest as it was taken in.
    #[must_use]
    pub fn get(&self, key: &VmKey) -> Option<Placement> {
        self.read().vms.get(key).cloned()
    }

    /// Where a guest's connection to `port` of `cid` leads: by a rule for that port of CID 2, or, where `cid`
    /// is a sibling's virtual CID, by a rule that leads to that port of that sibling.
    ///
    /// # Errors
    /// [`VsockRefusal::Cid`] for a CID that is nobody or the guest itself, [`VsockRefusal::Policy`] where no rule allows it,
    /// [`VsockRefusal::SeqpacketUnsupported`] where the destination only has streams,
    /// [`VsockRefusal::Unreachable`] for a sandbox without a channel.
    pub fn route(
        &self,
        from: &VmKey,
        cid: u32,
        port: u32,
        kind: VsockType,
    ) -> Result<Route, VsockRefusal> {
        let inner = self.read();
        let caller = inner.vms.get(from).ok_or(VsockRefusal::NoConnection)?;
        let (rule, port) = inner.rule(caller, cid, port)?;
        let (target, peer) = inner.target(caller, rule, port, kind)?;
        Ok(Route {
            target,
            identity: rule.identity.then(|| identity_line(caller, port)),
            peer,
            caller: caller.key.clone(),
        })
    }

    fn read(&self) -> RwLockReadGuard<'_, Inner> {
        // Each change is one insertion or removal: nothing is half done after a panic.
        self.inner.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Inner> {
        self.inner.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// The rule that allows it, and the port of CID 2 that it stands for.
    fn rule<'a>(
        &self,
        caller: &'a Placement,
        cid: u32,
        port: u32,
    ) -> Result<(&'a VsockRule, u32), VsockRefusal> {
        let rules = &caller.policy.rules;
        if cid == HOST_CID {
            let rule = rules.iter().find(|rule| rule.port.contains(port));
            return rule.map(|rule| (rule, port)).ok_or(VsockRefusal::Policy);
        }
        if !assignable(cid) || cid == caller.cid {
            return Err(VsockRefusal::Cid);
        }
        let sibling = self
            .virtual_cids
            .get(&(caller.key.tenant, cid))
            .ok_or(VsockRefusal::Cid)?;
        rules
            .iter()
            .find_map(|rule| Some((rule, alias(rule, &caller.key, sibling, port)?)))
            .ok_or(VsockRefusal::Policy)
    }

    fn target(
        &self,
        caller: &Placement,
        rule: &VsockRule,
        port: u32,
        kind: VsockType,
    ) -> Result<(Target, String), VsockRefusal> {
        let streams_only = match kind {
            VsockType::Stream => Ok(()),
            VsockType::Seqpacket => Err(VsockRefusal::SeqpacketUnsupported),
        };
        match &rule.to {
            VsockDestination::Host => {
                let path = host_path(&caller.socket, port);
                let peer = path.display().to_string();
                Ok((Target::OfOwner(path), peer))
            }
            VsockDestination::Unix { path } => Ok((Target::Unix(path.into()), path.clone())),
            VsockDestination::Tcp { address } => {
                streams_only?;
                Ok((Target::Tcp(*address), address.to_string()))
            }
            VsockDestination::Vsock { cid, port } => {
                let (cid, port) = (*cid, *port);
                Ok((Target::Vsock { cid, port }, format!("vsock {cid}:{port}")))
            }
            VsockDestination::Sandbox {
                lease,
                owner_uid,
                port: first,
            } => {
                let key = VmKey {
                    tenant: owner_uid.unwrap_or(caller.key.tenant),
                    lease: lease.clone(),
                };
                if key == caller.key {
                    // A pool's policy may name a lease of its own.
                    return Err(VsockRefusal::Cid);
                }
                let port = first + (port - rule.port.first());
                let vm = self.vms.get(&key).ok_or(VsockRefusal::Unreachable)?;
                let peer = match owner_uid {
                    Some(uid) if *uid != caller.key.tenant => {
                        format!("{lease}:{port} of user {uid}")
                    }
                    _ => format!("{lease}:{port}"),
                };
                let target = match &vm.face {
                    Face::Local(worker) => Target::LocalVm {
                        vm: key,
                        worker: worker.clone(),
                        port,
                    },
                    Face::Hybrid(callee) => {
                        streams_only?;
                        Target::HybridVm {
                            socket: vm.socket.clone(),
                            port,
                            callee: callee.clone(),
                        }
                    }
                };
                Ok((target, peer))
            }
        }
    }
}

/// The port of CID 2 that stands for `port` of `sibling` in this rule, if the rule leads there.
fn alias(rule: &VsockRule, caller: &VmKey, sibling: &VmKey, port: u32) -> Option<u32> {
    let VsockDestination::Sandbox {
        lease,
        owner_uid,
        port: first,
    } = &rule.to
    else {
        return None;
    };
    let tenant = owner_uid.unwrap_or(caller.tenant);
    if (tenant, lease) != (sibling.tenant, &sibling.lease) {
        return None;
    }
    let alias = rule.port.first().checked_add(port.checked_sub(*first)?)?;
    rule.port.contains(alias).then_some(alias)
}

/// The socket that `to = host` leads to: `PATH_PORT`, for messages as well as for streams.
#[must_use]
pub fn host_path(socket: &Path, port: u32) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(format!("_{port}"));
    path.into()
}

/// Whether a guest may have the CID: not 0 to 2, and not the wildcard 4294967295.
#[must_use]
pub fn assignable(cid: u32) -> bool {
    cid > HOST_CID && cid != u32::MAX
}

fn identity_line(caller: &Placement, port: u32) -> String {
    let VmKey { tenant, lease } = &caller.key;
    let cid = caller.cid;
    format!("SANDWIRE/1 tenant={tenant} lease={lease} cid={cid} port={port}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Limits;

    fn key(tenant: u32, lease: &str) -> VmKey {
        VmKey {
            tenant,
            lease: lease.parse().expect("a name"),
        }
    }

    fn vm(tenant: u32, lease: &str, virtual_cid: Option<u32>, rules: &str) -> Placement {
        Placement {
            key: key(tenant, lease),
            face: Face::Hybrid(Arc::new(Callee::new(&Limits::default(), Arc::default()))),
            cid: 3,
            virtual_cid,
            socket: format!("/run/{tenant}.{lease}/vsock.sock").into(),
            policy: serde_json::from_str(&format!(r#"{{"rules": [{rules}]}}"#)).expect("rules"),
        }
    }

    const RULES: &str = r#"
        {"port": "1", "to": {"kind": "host"}},
        {"port": "10-19", "to": {"kind": "sandbox", "lease": "db", "port": 5432}, "identity": true},
        {"port": "20", "to": {"kind": "sandbox", "lease": "db", "owner_uid": 7, "port": 80}},
        {"port": "30", "to": {"kind": "sandbox", "lease": "gone", "port": 80}},
        {"port": "40", "to": {"kind": "tcp", "address": "127.0.0.1:80"}},
        {"port": "50", "to": {"kind": "sandbox", "lease": "web", "port": 80}}"#;

    fn directory() -> Directory {
        let directory = Directory::new();
        for vm in [
            vm(1000, "web", Some(50), RULES),
            vm(1000, "db", Some(51), ""),
            vm(7, "db", Some(51), ""),
            vm(1000, "other", Some(52), ""),
        ] {
            directory.add(vm).expect("a guest");
        }
        directory
    }

    fn route(cid: u32, port: u32) -> Result<(String, u32), VsockRefusal> {
        let from = key(1000, "web");
        let route = directory().route(&from, cid, port, VsockType::Stream)?;
        Ok(match route.target {
            Target::HybridVm { socket, port, .. } => (socket.display().to_string(), port),
            Target::Unix(path) | Target::OfOwner(path) => (path.display().to_string(), 0),
            other => (format!("{other:?}"), 0),
        })
    }

    #[test]
    fn ports_of_the_host_lead_where_the_rules_say() {
        let to = |path: &str, port| Ok((path.to_owned(), port));
        assert_eq!(route(2, 1), to("/run/1000.web/vsock.sock_1", 0));
        assert_eq!(route(2, 10), to("/run/1000.db/vsock.sock", 5432));
        assert_eq!(route(2, 19), to("/run/1000.db/vsock.sock", 5441));
        assert_eq!(route(2, 20), to("/run/7.db/vsock.sock", 80));
        assert_eq!(route(2, 21), Err(VsockRefusal::Policy));
        assert_eq!(route(2, 30), Err(VsockRefusal::Unreachable));
        assert_eq!(route(2, 50), Err(VsockRefusal::Cid), "itself");
        assert_eq!(route(50, 80), Err(VsockRefusal::Cid), "itself");
    }

    #[test]
    fn virtual_cids_are_the_tenants_own_and_lead_no_further_than_the_rules() {
        let db = "/run/1000.db/vsock.sock".to_owned();
        assert_eq!(route(51, 5432), Ok((db.clone(), 5432)));
        assert_eq!(route(51, 5441), Ok((db, 5441)));
        // That port is allowed of the other tenant's, which isn't meant by this CID.
        for port in [80, 5431, 5442, 10, 0, u32::MAX] {
            assert_eq!(route(51, port), Err(VsockRefusal::Policy), "{port}");
        }
        assert_eq!(route(52, 5432), Err(VsockRefusal::Policy));
        for cid in [0, 1, 3, 53, u32::MAX] {
            assert_eq!(route(cid, 1), Err(VsockRefusal::Cid), "{cid}");
        }
    }

    #[test]
    fn who_calls_is_named_by_lease_and_by_the_port_of_the_rule() {
        let from = key(1000, "web");
        let directory = directory();
        for (cid, port) in [(2, 12), (51, 5434)] {
            let route = directory
                .route(&from, cid, port, VsockType::Stream)
                .expect("a route");
            let line = "SANDWIRE/1 tenant=1000 lease=web cid=3 port=12\n";
            assert_eq!(route.identity.as_deref(), Some(line));
            assert_eq!((&*route.peer, &route.caller), ("db:5434", &from));
        }
    }

    #[test]
    fn messages_go_only_where_they_are_understood() {
        let directory = directory();
        let from = key(1000, "web");
        let messages = |port| directory.route(&from, 2, port, VsockType::Seqpacket).err();
        assert_eq!(messages(1), None);
        assert_eq!(messages(10), Some(VsockRefusal::SeqpacketUnsupported));
        assert_eq!(messages(40), Some(VsockRefusal::SeqpacketUnsupported));
    }

    #[test]
    fn a_virtual_cid_is_had_once_in_a_tenant_until_its_guest_goes() {
        let directory = directory();
        let error = directory
            .add(vm(1000, "new", Some(51), ""))
            .expect_err("it is taken");
        let by = key(1000, "db");
        assert!(
            matches!(&error, DirectoryError::CidInUse { by: is, .. } if *is == by),
            "{error}"
        );
        assert!(
            directory.get(&key(1000, "new")).is_none(),
            "nothing has changed"
        );
        assert!(directory.remove(&by));
        directory
            .add(vm(1000, "new", Some(51), ""))
            .expect("it is free");
        for cid in [0, 1, 2, u32::MAX] {
            let error = directory
                .add(vm(9, "bad", Some(cid), ""))
                .expect_err("reserved");
            assert!(
                matches!(error, DirectoryError::ReservedCid { .. }),
                "{error}"
            );
        }
    }
}

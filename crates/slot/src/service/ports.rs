//! Publishing host ports to leases.

use std::{
    collections::{BTreeSet, HashSet},
    net::{IpAddr, SocketAddr},
    sync::PoisonError,
};

use sandwire_api::{
    name::Name,
    pool::AccessVerb,
    published_port::{Protocol, PublishPort, PublishedPort},
};

use super::{Caller, Shared, Slots, State};
use crate::{
    error::{NetworkError, ServiceError},
    lease::LeaseKey,
    plan::SlotPlan,
    published::{self, Publication},
};

/// Published ports of one user's leases, unless root publishes more. Each change tells the kernel all ports of all
/// users anew.
const PORTS_PER_USER_MAX: usize = 256;

impl Slots {
    /// Publishes a host port to a lease. Asking again for the same one changes nothing. Where the host itself listens,
    /// its service is hidden from callers elsewhere only if root says so.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn publish(
        &self,
        caller: Caller,
        owner_uid: Option<u32>,
        name: &Name,
        port: &PublishPort,
        hide_host_service: bool,
    ) -> Result<PublishedPort, ServiceError> {
        let shared = &self.shared;
        let key = caller.lease_key(owner_uid, name);
        let state = shared.lock();
        let mut publication = state.new_publication(caller, &key, port)?;
        let is_known = state.ports.contains(&publication);
        if !is_known {
            shared.check_port_may_be_taken(caller, port)?;
            state.check_may_be_published(caller, &publication)?;
        }
        drop(state);
        if !is_known {
            shared.check_hides_nobody(caller, &publication, hide_host_service)?;
        }

        let mut state = shared.lock();
        // The lease may have ended meanwhile, or somebody else have published the port.
        publication = state.new_publication(caller, &key, port)?;
        let published = publication.published.clone();
        let is_new = !state.ports.contains(&publication);
        if is_new {
            state.check_may_be_published(caller, &publication)?;
            if let Err(error) = state.journal.insert_port(&published) {
                state.journal_failed();
                return Err(error.into());
            }
            state.ports.push(publication.clone());
            state.port_changes.made += 1;
        }
        let change = state.port_changes.made;
        drop(state);

        let undo = |state: &mut State| {
            if is_new {
                state.take_port_back(&publication);
            }
        };
        let told = shared.tell_ports_since(change, undo);
        told.map_err(|source| ServiceError::Network {
            operation: "publish",
            object: published::describe(port),
            source,
        })?;
        // Whoever asked for the same just before may have failed, and taken it back.
        if !is_new && !shared.lock().ports.contains(&publication) {
            return Err(ServiceError::Late {
                object: format!("publishing {}", published::describe(port)),
                state: "try again".to_owned(),
            });
        }
        Ok(published)
    }

    /// Has published ports leave what is for these addresses on the host to who has them for himself, as identities have
    /// theirs: for exactly these.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn spare_addresses(&self, addresses: BTreeSet<IpAddr>) -> Result<(), ServiceError> {
        let shared = &self.shared;
        let _gate = shared
            .ports_gate
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if shared.lock().spared.as_ref() == Some(&addresses) {
            return Ok(());
        }
        let spared = shared.network.spare_addresses(&addresses);
        spared.map_err(|source| ServiceError::Network {
            operation: "spare",
            object: "addresses that aren't the host's own".to_owned(),
            source,
        })?;
        shared.lock().spared = Some(addresses);
        Ok(())
    }

    /// Withdraws a host port from a lease.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn withdraw(
        &self,
        caller: Caller,
        owner_uid: Option<u32>,
        name: &Name,
        protocol: Protocol,
        host_port: u16,
        host_address: Option<IpAddr>,
    ) -> Result<(), ServiceError> {
        let shared = &self.shared;
        let key = caller.lease_key(owner_uid, name);
        let mut state = shared.lock();
        state.lease(caller, &key)?;
        let place = state.ports.iter().position(|other| {
            let port = &other.published.port;
            is_of(&other.published, &key)
                && (port.protocol, port.host_port, port.host_address)
                    == (protocol, host_port, host_address)
        });
        let Some(place) = place else {
            return Err(ServiceError::NotFound {
                object: format!("published {protocol} port {host_port} of lease '{name}'"),
            });
        };
        let publication = state.ports.remove(place);
        if let Err(error) = state.journal.remove_port(&publication.published) {
            state.ports.push(publication);
            state.journal_failed();
            return Err(error.into());
        }
        state.port_changes.made += 1;
        let change = state.port_changes.made;
        drop(state);

        let told = shared.tell_ports_since(change, |state| state.put_port_back(publication));
        told.map_err(|source| ServiceError::Network {
            operation: "withdraw",
            object: format!("{protocol} port {host_port}"),
            source,
        })
    }

    /// The published ports of all leases that the caller may see.
    #[must_use]
    pub fn published_ports(&self, caller: Caller) -> Vec<PublishedPort> {
        let state = self.shared.lock();
        let ports = state.ports.iter().map(|port| &port.published);
        ports
            .filter(|port| state.lease(caller, &lease_of(port)).is_ok())
            .cloned()
            .collect()
    }

    /// How many ports are published, of all users.
    #[must_use]
    pub fn published_ports_count(&self) -> usize {
        self.shared.lock().ports.len()
    }

    /// The published ports of a lease.
    ///
    /// # Errors
    /// There is no such lease for this caller.
    pub fn lease_ports(
        &self,
        caller: Caller,
        owner_uid: Option<u32>,
        name: &Name,
    ) -> Result<Vec<PublishedPort>, ServiceError> {
        let key = caller.lease_key(owner_uid, name);
        let state = self.shared.lock();
        state.lease(caller, &key)?;
        Ok(state.ports_of(&key))
    }
}

impl Shared {
    /// Tells the kernel the published ports, unless it knows them; on failure it is told again later. Returns whether it
    /// knows them.
    pub(super) fn sync_ports(&self) -> bool {
        let change = self.lock().port_changes.made;
        self.tell_ports_since(change, |_| {})
            .inspect_err(|error| {
                tracing::error!(%error, "cannot bring the published ports up to date; trying again");
            })
            .is_ok()
    }

    /// Has the kernel know the published ports as they are after a change, or later. All ports are written each time, so
    /// that of many who wait for one another the first writes for all who have made their changes by then. A change of
    /// which the kernel can't be told is undone before anybody else tells it: it would be told the change after all, and
    /// nobody know.
    pub(super) fn tell_ports_since(
        &self,
        change: u64,
        undo: impl FnOnce(&mut State),
    ) -> Result<(), NetworkError> {
        let _gate = self
            .ports_gate
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut state = self.lock();
        if state.ports_dirty.is_none() && state.port_changes.told >= Some(change) {
            return Ok(());
        }
        let now = state.port_changes.made;
        let wanted = state.ports_for_kernel();
        drop(state);
        self.tell_ports(&wanted, now)
            .inspect_err(|_| undo(&mut self.lock()))
    }

    /// Makes the kernel's ports exactly these, by who has the gate. On failure nobody knows which it has, so that it is
    /// told again later; slots of leases that have ended wait for that.
    fn tell_ports(&self, wanted: &PortsForKernel, change: u64) -> Result<(), NetworkError> {
        let told = self.network.set_published_ports(wanted);
        let mut state = self.lock();
        match &told {
            Ok(()) => {
                state.ports_dirty = None;
                state.port_changes.told = Some(change);
                state.published_to = clone_addresses(wanted);
                state.tear_down_unpublished();
            }
            Err(error) => state.ports_dirty = Some(error.to_string()),
        }
        drop(state);
        self.tear_down_work.notify_one();
        told
    }
}

/// How often the published ports have changed.
#[derive(Debug, Default)]
pub(super) struct Changes {
    made: u64,
    /// After how many of these changes the kernel was told the ports. None yet: what it has of an earlier daemon may be others.
    told: Option<u64>,
}

/// Ports that the host publishes: what was asked for, and the clone addresses that it leads to.
type PortsForKernel = [(PublishPort, Vec<IpAddr>)];

fn clone_addresses(ports: &PortsForKernel) -> HashSet<IpAddr> {
    ports
        .iter()
        .flat_map(|(_, addresses)| addresses)
        .copied()
        .collect()
}

impl Shared {
    /// What a published port leads away from the host may be a service of the host itself.
    fn check_port_may_be_taken(
        &self,
        caller: Caller,
        port: &PublishPort,
    ) -> Result<(), ServiceError> {
        let first = self.network.unprivileged_port_start();
        if caller.privileged || port.host_port >= first {
            return Ok(());
        }
        Err(ServiceError::Forbidden {
            uid: caller.uid,
            operation: "publish",
            object: format!(
                "{}: those below {first} are root's (net.ipv4.ip_unprivileged_port_start)",
                published::describe(port)
            ),
        })
    }
}

impl Shared {
    /// A service of the host that begins to listen later is hidden all the same.
    fn check_hides_nobody(
        &self,
        caller: Caller,
        publication: &Publication,
        hide_host_service: bool,
    ) -> Result<(), ServiceError> {
        if hide_host_service && caller.privileged {
            return Ok(());
        }
        let port = &publication.published.port;
        let mut listeners = self.network.listeners(port);
        let state = self.lock();
        listeners.retain(|one| publication.hides(one) && !state.is_spared(one.address));
        drop(state);
        let Some(hidden) = listeners.first() else {
            return Ok(());
        };
        let at = SocketAddr::new(hidden.address, port.host_port);
        let listens = match port.protocol {
            Protocol::Tcp => "listens",
            Protocol::Udp => "has a socket",
        };
        Err(ServiceError::Conflict {
            operation: "publish",
            object: published::describe(port),
            reason: format!(
                "the host itself {listens} there, at {at}, and nobody elsewhere would reach that any more: publish \
                 another port or address, or end that service; root may hide it (--hide-host-service)"
            ),
        })
    }
}

impl State {
    pub(super) fn ports_of(&self, key: &LeaseKey) -> Vec<PublishedPort> {
        let ports = self.ports.iter().map(|port| &port.published);
        ports.filter(|port| is_of(port, key)).cloned().collect()
    }

    /// What the kernel is about to be told.
    pub(super) fn ports_for_kernel(&mut self) -> Vec<(PublishPort, Vec<IpAddr>)> {
        let wanted: Vec<_> = self
            .ports
            .iter()
            .map(|port| (port.published.port.clone(), port.clone_addresses.clone()))
            .collect();
        self.published_to.extend(clone_addresses(&wanted));
        wanted
    }

    /// Ends the ports of a lease that has ended. Returns whether the kernel may still have some, and is to be told: the
    /// slot is torn down after that.
    pub(super) fn end_ports(&mut self, key: &LeaseKey, slot: &SlotPlan) -> bool {
        let before = self.ports.len();
        self.ports.retain(|port| !is_of(&port.published, key));
        let had_ports = self.ports.len() < before || self.is_published_to(slot);
        self.port_changes.made += u64::from(had_ports);
        had_ports
    }

    /// Undoes a publication of which the kernel could not be told.
    fn take_port_back(&mut self, publication: &Publication) {
        self.ports.retain(|other| other != publication);
        self.port_changes.made += 1;
        if self.journal.remove_port(&publication.published).is_err() {
            self.journal_failed();
        }
    }

    /// Undoes a withdrawal of which the kernel could not be told.
    fn put_port_back(&mut self, publication: Publication) {
        // The lease may have ended meanwhile, and its ports with it; another may have its name, or the port.
        if !self.is_of_a_lease(&publication) || self.check_port_is_free(&publication).is_err() {
            return;
        }
        if self.journal.insert_port(&publication.published).is_err() {
            self.journal_failed();
        }
        self.ports.push(publication);
        self.port_changes.made += 1;
    }

    /// Whether ports may lead to it in the kernel.
    fn is_published_to(&self, slot: &SlotPlan) -> bool {
        let mut addresses = slot.clone_addresses();
        addresses.any(|address| self.published_to.contains(&address))
    }

    /// Queues the slots to which no port leads any more. Of a lease that ended while the kernel was told, it still knows
    /// the ports: who ended it tells it next.
    pub(super) fn tear_down_unpublished(&mut self) {
        for (pool, number) in std::mem::take(&mut self.unpublishing) {
            let Some(plan) = self.pools.get(&pool).map(|entry| &entry.plan) else {
                continue;
            };
            if self.is_published_to(&plan.slot(number)) {
                self.unpublishing.push((pool, number));
            } else if let Some(entry) = self.pools.get_mut(&pool) {
                entry.tear_down.push_back(number);
            }
        }
    }

    /// Lets all slots that are out of use wait until the kernel knows the published ports.
    pub(super) fn hold_tear_downs(&mut self) {
        for (pool, entry) in &mut self.pools {
            let numbers = entry.tear_down.drain(..);
            self.unpublishing
                .extend(numbers.map(|number| (pool.clone(), number)));
        }
    }

    /// Whether there is the lease that the port was published to.
    fn is_of_a_lease(&self, publication: &Publication) -> bool {
        let lease = self.leases.get(&lease_of(&publication.published));
        let slot = lease.and_then(|lease| self.slot_plan(&lease.record).ok());
        let now = slot.map(|slot| Publication::new(publication.published.clone(), &slot));
        matches!(now, Some(Ok(now)) if now == *publication)
    }

    fn new_publication(
        &self,
        caller: Caller,
        key: &LeaseKey,
        port: &PublishPort,
    ) -> Result<Publication, ServiceError> {
        self.demand_publish(caller, key)?;
        let lease = self.lease(caller, key)?;
        let state = match (lease.is_releasing(), lease.is_opening) {
            (true, _) => Some("released"),
            // It may still come to nothing, and its address be another's.
            (false, true) => Some("made"),
            (false, false) => None,
        };
        if let Some(state) = state {
            return Err(ServiceError::Conflict {
                operation: "publish",
                object: published::describe(port),
                reason: format!("lease '{}' is being {state}", key.name),
            });
        }
        let published = PublishedPort {
            lease: key.name.clone(),
            owner_uid: key.owner_uid,
            port: port.clone(),
        };
        let slot = self.slot_plan(&lease.record)?;
        if slot.is_child() {
            return Err(ServiceError::Conflict {
                operation: "publish",
                object: published::describe(port),
                reason: format!(
                    "the host can't reach lease '{}', which is on its parent's network under its own address",
                    key.name
                ),
            });
        }
        Publication::new(published, &slot)
    }

    fn check_may_be_published(
        &self,
        caller: Caller,
        publication: &Publication,
    ) -> Result<(), ServiceError> {
        self.check_address_is_the_hosts(&publication.published.port)?;
        self.check_port_is_free(publication)?;
        self.check_room_for_port(caller, &publication.published)
    }

    fn demand_publish(&self, caller: Caller, key: &LeaseKey) -> Result<(), ServiceError> {
        let lease = self.lease(caller, key)?;
        let spec = &self.pool(&lease.record.pool)?.plan.spec;
        caller.demand(AccessVerb::Publish, "publish ports of", spec)
    }

    fn check_room_for_port(
        &self,
        caller: Caller,
        asked: &PublishedPort,
    ) -> Result<(), ServiceError> {
        let user = asked.owner_uid;
        let ports = self.ports.iter().map(|port| &port.published);
        let count = ports.filter(|port| port.owner_uid == user).count();
        if caller.privileged || count < PORTS_PER_USER_MAX {
            return Ok(());
        }
        Err(ServiceError::Conflict {
            operation: "publish",
            object: published::describe(&asked.port),
            reason: format!(
                "user {user} has {count} published ports, and may have {PORTS_PER_USER_MAX}: withdraw one"
            ),
        })
    }

    fn is_spared(&self, address: IpAddr) -> bool {
        let spared = self.spared.as_ref();
        spared.is_some_and(|spared| spared.contains(&address))
    }

    fn check_address_is_the_hosts(&self, port: &PublishPort) -> Result<(), ServiceError> {
        match port.host_address {
            Some(address) if self.is_spared(address) => Err(ServiceError::Conflict {
                operation: "publish",
                object: published::describe(port),
                reason: "that is an identity's address, and what comes there is for its sockets: name one of the \
                         host's own, or none for all of these"
                    .to_owned(),
            }),
            _ => Ok(()),
        }
    }

    fn check_port_is_free(&self, publication: &Publication) -> Result<(), ServiceError> {
        let Some(other) = self.ports.iter().find(|other| other.meets(publication)) else {
            return Ok(());
        };
        Err(ServiceError::Conflict {
            operation: "publish",
            object: published::describe(&publication.published.port),
            // Whose lease it is, is none of the caller's business.
            reason: format!(
                "{} is published",
                published::describe(&other.published.port)
            ),
        })
    }
}

pub(super) fn lease_of(port: &PublishedPort) -> LeaseKey {
    LeaseKey {
        owner_uid: port.owner_uid,
        name: port.lease.clone(),
    }
}

/// Whether it is that lease's, without a copy of its name: all ports are looked through whenever a lease ends.
fn is_of(port: &PublishedPort, lease: &LeaseKey) -> bool {
    port.owner_uid == lease.owner_uid && port.lease == lease.name
}

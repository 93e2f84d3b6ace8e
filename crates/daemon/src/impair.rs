//! Bad networks for leases: carried out by the impairment service, a process of its own that outlives the daemon.
//!
//! The service remembers what is impaired, on behalf of which lease; nothing is remembered here. A slot's interfaces are
//! never handed out again but torn down and made anew, so no lease inherits an impairment; what the service still
//! lists of a lease that has ended, a [`sweep`] takes off its list. Leases that aren't impaired cost nothing.

mod endings;
mod known;
mod left;
mod pending;
mod sweep;

use std::{
    io,
    path::PathBuf,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use sandwire_api::{
    impairment::{
        Impairment, ImpairmentCleared, ImpairmentSummary, InterfaceImpairment, InvalidImpairment,
        LeaseImpairment,
    },
    name::Name,
};
use sandwire_impair_host::{
    control::{self, Client, ClientError, Owner, Side, State, Status, Target, control_socket},
    launch::{self, Home, LaunchError},
};
use sandwire_slot::{
    error::ServiceError,
    lease::LeaseKey,
    service::{Caller, LeaseInterfaces, Slots},
};
use tokio::sync::Notify;

pub(crate) use self::sweep::sweep;
use self::{
    endings::Endings,
    known::Known,
    pending::{Before, Pending},
};

/// Why a lease isn't impaired, or not any more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ImpairError {
    /// There is no such lease for the caller, or it is about to end.
    #[error(transparent)]
    Lease(#[from] ServiceError),
    /// It can't be meant.
    #[error("impair lease {lease}: {source}")]
    Impairment {
        lease: Name,
        source: InvalidImpairment,
    },
    /// There is no service, and none can be had.
    #[error("start the impairment service: {0}")]
    Launch(LaunchError),
    /// There is no service, and it isn't the daemon's to start one.
    #[error("{0} Start it by `systemctl start sandwire-impair`")]
    NotStarted(ClientError),
    /// The daemon's interfaces aren't the service's.
    #[error(
        "impair lease {lease}: the impairment service, process {pid}, is in another network namespace than the daemon; \
         end it (SIGTERM), and start it where the daemon is"
    )]
    Elsewhere { lease: Name, pid: u32 },
    /// Somebody has an earlier impairment of it end.
    #[error(
        "impair lease {lease}: an earlier impairment is ending and its packets are still under way; try again, or have them \
         dropped by `sandwire impair clear {lease} --flush`"
    )]
    Ending { lease: Name },
    /// The service refused or failed.
    #[error(transparent)]
    Service(ClientError),
}

/// The instance of a daemon whose configuration doesn't name one.
const DEFAULT_INSTANCE: &str = "default";

/// How long a change waits for others who are told that the packets for which they had waited were dropped.
const FLUSHED_MAX: Duration = Duration::from_secs(10);

/// The way to the impairment service.
#[derive(Debug)]
pub(crate) struct Impairments {
    folder: PathBuf,
    /// The daemon's, whose leases alone are its own to end: a service may have others' too. None for the default one.
    instance: Option<Name>,
    /// Whether the daemon starts the service. Under systemd that does.
    starts: bool,
    /// Whether some lease may be impaired.
    may_be: AtomicBool,
    /// Held while a lease is impaired, and while those are looked for that have ended.
    gate: Mutex<()>,
    /// Which leases are impaired, as of the last look.
    known: Known,
    /// Of which it isn't known what came of a change.
    pending: Pending,
    /// Those that somebody has end.
    endings: Endings,
    /// Whether it was looked what an earlier daemon has left half done.
    is_taken_up: AtomicBool,
    /// Whether packets of all leases go where they should, as of the last look. Until then all leases are looked at.
    is_led: AtomicBool,
    /// The service has not answered the last look in time. Until it answers one nobody else asks it: each would wait for as long, and leave
    /// a connection in its queue.
    is_late: AtomicBool,
    /// Told when a lease has ended.
    ended: Notify,
}

impl Impairments {
    /// By the service of that folder, for the daemon of that instance.
    pub(crate) fn new(folder: PathBuf, starts: bool, instance: &Name) -> Self {
        let is_default = instance.as_str() == DEFAULT_INSTANCE;
        Self {
            folder,
            instance: (!is_default).then(|| instance.clone()),
            starts,
            // An earlier daemon may have left some.
            may_be: AtomicBool::new(true),
            gate: Mutex::new(()),
            known: Known::default(),
            pending: Pending::default(),
            endings: Endings::default(),
            is_taken_up: AtomicBool::new(false),
            is_led: AtomicBool::new(false),
            is_late: AtomicBool::new(false),
            ended: Notify::new(),
        }
    }

    /// Impairs a lease from now on, or changes how: all its interfaces, or none.
    pub(crate) fn set(
        &self,
        slots: &Slots,
        caller: Caller,
        owner_uid: Option<u32>,
        name: &Name,
        impairment: &Impairment,
    ) -> Result<LeaseImpairment, ImpairError> {
        impairment
            .check()
            .map_err(|source| ImpairError::Impairment {
                lease: name.clone(),
                source,
            })?;
        let found = slots.interfaces(caller, owner_uid, name)?;
        // Before the lease is held: a service takes a while to start.
        let mut client = self.connect_or_start()?;
        refuse_elsewhere(&mut client, &found)?;
        self.endings.await_flushed(&found.lease, FLUSHED_MAX);
        let _gate = self.lock_gate();
        if self.endings.has(&found.lease) {
            return Err(ImpairError::Ending {
                lease: name.clone(),
            });
        }
        self.may_be.store(true, Ordering::Relaxed);
        let owner = self.owner_of(&found.lease);
        slots.with_interfaces(caller, owner_uid, name, |found| {
            // XDP comes before what diverts, and would send packets past it.
            slots.set_impaired(&found.lease, true)?;
            let set = set_all(&mut client, found, &owner, impairment);
            set.or_else(|failed| self.set_has_failed(slots, found, *failed))
        })??;
        self.pending.remove(&found.lease);
        self.known.insert(found.lease.clone(), impairment);
        report(&mut client, &found, &owner)
    }

    /// Has the lease as it was, or has that seen to when the service answers again.
    fn set_has_failed(
        &self,
        slots: &Slots,
        found: &LeaseInterfaces,
        failed: Failed,
    ) -> Result<(), ImpairError> {
        let lease = &found.lease;
        if failed.is_uncertain {
            self.pending.insert(found, failed.before);
            self.ended.notify_one();
        } else if !self.known.has(lease) && !self.pending.has(lease) {
            slots.set_impaired(lease, false)?;
        }
        Err(failed.error)
    }

    /// How a lease is impaired, and what became of its packets.
    pub(crate) fn show(
        &self,
        slots: &Slots,
        caller: Caller,
        owner_uid: Option<u32>,
        name: &Name,
    ) -> Result<LeaseImpairment, ImpairError> {
        let found = slots.interfaces(caller, owner_uid, name)?;
        match self.connect_if_needed()? {
            Some(mut client) => report(&mut client, &found, &self.owner_of(&found.lease)),
            None => Ok(unimpaired(&found.lease)),
        }
    }

    /// Ends the impairment of a lease. Unless flushed, waits for its packets, while the lease may be released.
    pub(crate) fn clear(
        &self,
        slots: &Slots,
        caller: Caller,
        owner_uid: Option<u32>,
        name: &Name,
        flush: bool,
    ) -> Result<ImpairmentCleared, ImpairError> {
        let found = slots.interfaces(caller, owner_uid, name)?;
        let mut sum = ImpairmentCleared::default();
        let Some(mut client) = self.connect_to_clear()? else {
            return Ok(sum);
        };
        // Not while somebody impairs it, nor the other way round.
        let (ending, statuses) = {
            let _gate = self.lock_gate();
            let statuses = listed(&mut client, &self.owner_of(&found.lease))?;
            (self.endings.begin(&found.lease, flush), statuses)
        };
        let mut failure = None;
        for status in statuses {
            match client.clear(&status.target, flush) {
                Ok(cleared) => {
                    sum.was_impaired |= cleared.was_impaired;
                    sum.released += cleared.released;
                    sum.flushed += cleared.flushed;
                }
                Err(error) => failure = failure.or(Some(ImpairError::Service(error))),
            }
        }
        // Not while somebody looks, who may have seen it.
        let _gate = self.lock_gate();
        drop(ending);
        if failure.is_none() {
            self.pending.remove(&found.lease);
            self.known.remove(&found.lease);
            slots.set_impaired(&found.lease, false)?;
        }
        failure.map_or(Ok(sum), Err)
    }

    /// What the service says of all leases that are impaired.
    pub(crate) fn all(&self) -> Result<Vec<(LeaseKey, Status)>, ImpairError> {
        if !self.may_be.load(Ordering::Relaxed) {
            return Ok(Vec::new());
        }
        let Some(mut client) = self.connect_if_needed()? else {
            return Ok(Vec::new());
        };
        let all = client.list().map_err(ImpairError::Service)?.into_iter();
        Ok(all
            .filter_map(|status| Some((self.lease_of(&status.owner)?, status)))
            .collect())
    }

    /// Whether a lease is impaired, as of the last look; asks nobody.
    pub(crate) fn summary(&self, owner_uid: u32, name: &Name) -> Option<ImpairmentSummary> {
        if !self.may_be.load(Ordering::Relaxed) {
            return None;
        }
        let name = name.clone();
        self.known.summary(&LeaseKey { owner_uid, name })
    }

    /// The same, with whether the service listens now.
    pub(crate) fn summary_now(&self, owner_uid: u32, name: &Name) -> Option<ImpairmentSummary> {
        let mut summary = self.summary(owner_uid, name)?;
        if !self.is_late.load(Ordering::Relaxed) {
            summary.service_alive = self.connect().is_ok();
        }
        Some(summary)
    }

    /// Says that a lease has ended, which may have been impaired.
    pub(crate) fn lease_has_ended(&self, lease: &LeaseKey) {
        // What it had isn't the next one's of that name.
        let was_pending = self.pending.remove(lease);
        let was_impaired = self.known.remove(lease) || was_pending;
        if was_impaired {
            self.ended.notify_one();
        }
    }

    /// Says that the service impairs a lease.
    #[cfg(test)]
    pub(crate) fn note(&self, lease: LeaseKey, impairment: &Impairment) {
        self.known.insert(lease, impairment);
    }

    fn owner_of(&self, lease: &LeaseKey) -> Owner {
        Owner::Lease {
            uid: lease.owner_uid,
            lease: lease.name.clone(),
            instance: self.instance.clone(),
        }
    }

    /// The lease, if it is one of this daemon's.
    fn lease_of(&self, owner: &Owner) -> Option<LeaseKey> {
        match owner {
            Owner::Lease {
                uid,
                lease,
                instance,
            } if *instance == self.instance => Some(LeaseKey {
                owner_uid: *uid,
                name: lease.clone(),
            }),
            Owner::Lease { .. } | Owner::User { .. } => None,
        }
    }

    /// Leases that a service has left impaired, alive or dead.
    fn left(&self) -> Vec<(LeaseKey, Impairment)> {
        let left = launch::left(&self.folder).of_leases.into_iter();
        left.filter_map(|(owner, impairment)| Some((self.lease_of(&owner)?, impairment)))
            .collect()
    }

    fn lock_gate(&self) -> MutexGuard<'_, ()> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connect(&self) -> Result<Client, ClientError> {
        let path = control_socket(&self.folder);
        if self.is_late.load(Ordering::Relaxed) {
            let text = "it hasn't answered in time, and is asked again by and by";
            let source = io::Error::new(io::ErrorKind::TimedOut, text);
            return Err(ClientError::Connect { path, source });
        }
        Client::connect(&path)
    }

    /// None if there is no service, and none has left an impaired lease.
    fn connect_if_needed(&self) -> Result<Option<Client>, ImpairError> {
        match self.connect() {
            Ok(client) => Ok(Some(client)),
            Err(error) if !error.is_late() && self.left().is_empty() => Ok(None),
            Err(error) => Err(ImpairError::Service(error)),
        }
    }

    /// The same; what a service has left that has died, another takes up first.
    fn connect_to_clear(&self) -> Result<Option<Client>, ImpairError> {
        match self.connect_if_needed() {
            Err(_) => self.connect_or_start().map(Some),
            other => other,
        }
    }

    fn connect_or_start(&self) -> Result<Client, ImpairError> {
        // One that is there but late isn't to be started.
        if self.is_late.load(Ordering::Relaxed) {
            return self.connect().map_err(ImpairError::Service);
        }
        if !self.starts {
            return self.connect().map_err(ImpairError::NotStarted);
        }
        let connected = launch::connect_or_start(&self.folder, Home::Own);
        let (client, launched) = connected.map_err(|error| match error {
            LaunchError::Busy(error) => ImpairError::Service(error),
            error => ImpairError::Launch(error),
        })?;
        if let Some(launch::Launched { mut child, log }) = launched {
            tracing::info!(pid = child.id(), log = %log.display(), "started the impairment service");
            // Somebody has to ask how it ended.
            let wait = move || match child.wait() {
                Ok(status) => tracing::info!(%status, "the impairment service has ended"),
                Err(error) => tracing::warn!(%error, "the impairment service can't be waited for"),
            };
            let waiter = thread::Builder::new().name("impair-wait".to_owned());
            if let Err(error) = waiter.spawn(wait) {
                tracing::warn!(%error, "no thread waits for the impairment service");
            }
        }
        Ok(client)
    }
}

/// What the service diverts for a lease.
fn targets_of(found: &LeaseInterfaces) -> Vec<Target> {
    let target = |one: &sandwire_slot::service::LeaseInterface| Target {
        netns: one.netns.clone(),
        interface: one.interface.clone(),
        side: Side::Host,
    };
    found.interfaces.iter().map(target).collect()
}

fn listed(client: &mut Client, owner: &Owner) -> Result<Vec<Status>, ImpairError> {
    client.list_of(owner).map_err(ImpairError::Service)
}

/// The same with the content of traces.
fn listed_whole(client: &mut Client, owner: &Owner) -> Result<Vec<Status>, ImpairError> {
    let listed = client.list_with_traces_of(owner);
    listed.map_err(ImpairError::Service)
}

/// What is in the daemon's own namespace is named without one, and would be another interface to a service elsewhere.
fn refuse_elsewhere(client: &mut Client, found: &LeaseInterfaces) -> Result<(), ImpairError> {
    let hello = client.hello().map_err(ImpairError::Service)?;
    let is_here = || hello.is_here().is_ok_and(|is_here| is_here);
    if found.interfaces.iter().all(|one| one.netns.is_some()) || is_here() {
        return Ok(());
    }
    Err(ImpairError::Elsewhere {
        lease: found.lease.name.clone(),
        pid: hello.pid,
    })
}

/// Why a lease isn't impaired as it should be, and what has become of it.
#[derive(Debug)]
struct Failed {
    error: ImpairError,
    /// What couldn't be taken back, or of which it isn't known whether it is to be.
    before: Vec<Before>,
    /// Whether it isn't known how the lease is impaired.
    is_uncertain: bool,
}

impl Failed {
    /// Nothing has changed.
    fn certainly(error: ImpairError) -> Box<Self> {
        Box::new(Self {
            error,
            before: Vec::new(),
            is_uncertain: false,
        })
    }
}

/// All or none: where one can't be impaired, the others become what they were.
fn set_all(
    client: &mut Client,
    found: &LeaseInterfaces,
    owner: &Owner,
    impairment: &Impairment,
) -> Result<(), Box<Failed>> {
    let targets = targets_of(found);
    // Of a single one nothing is taken back.
    let before = match targets.len() {
        0 | 1 => Vec::new(),
        _ => listed_whole(client, owner).map_err(Failed::certainly)?,
    };
    let was = |target: &Target| {
        let mut all = before.iter();
        let found = all.find(|status| status.target == *target && status.state == State::Impaired);
        (
            target.clone(),
            found.map(|status| status.impairment.clone()),
        )
    };
    for (count, target) in targets.iter().enumerate() {
        let Err(error) = client.set(target, owner, impairment) else {
            continue;
        };
        let is_refused = matches!(error, ClientError::Refused { .. });
        let mut failed = Failed::certainly(ImpairError::Service(error));
        failed.is_uncertain = !is_refused;
        for done in &targets[..count] {
            let (done, was) = was(done);
            let undone = match &was {
                Some(impairment) => client.set(&done, owner, impairment),
                None => client.clear(&done, true).map(drop),
            };
            if let Err(error) = undone {
                tracing::warn!(target = %done, %error, "an impairment isn't taken back yet");
                failed.before.push((done, was));
                failed.is_uncertain = true;
            }
        }
        if !is_refused && targets.len() > 1 {
            failed.before.push(was(target));
        }
        return Err(failed);
    }
    Ok(())
}

fn unimpaired(lease: &LeaseKey) -> LeaseImpairment {
    LeaseImpairment {
        lease: lease.name.clone(),
        owner_uid: lease.owner_uid,
        impairment: None,
        interfaces: Vec::new(),
    }
}

fn report(
    client: &mut Client,
    found: &LeaseInterfaces,
    owner: &Owner,
) -> Result<LeaseImpairment, ImpairError> {
    let targets = targets_of(found);
    let mut report = unimpaired(&found.lease);
    for status in listed(client, owner)? {
        if targets.contains(&status.target) {
            report.interfaces.push(InterfaceImpairment {
                valid: status.egress.line.valid && status.ingress.line.valid,
                interface: status.target.interface,
                state: status.state,
                egress: status.egress,
                ingress: status.ingress,
            });
            report.impairment = Some(status.impairment);
        }
    }
    Ok(report)
}

/// Where the service is unless the configuration says otherwise.
pub(crate) fn default_folder() -> PathBuf {
    PathBuf::from(control::DEFAULT_FOLDER)
}

#[cfg(test)]
mod tests;

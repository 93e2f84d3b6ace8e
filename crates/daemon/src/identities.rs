//! Identities without a namespace, as the daemon sees them.
//!
//! But for UDP at several addresses (`receivers`) they don't need it: what there is is in the kernel, and commands repair
//! what they find. A daemon that starts has them run the programs of its version; while it runs it looks from time to
//! time for those whose cgroup is gone, so that their addresses go without a command, and has published ports leave alone
//! what is for the others, as soon as one is added. Those of its configuration it adds itself (`declared`).

use std::{collections::BTreeSet, path::Path, sync::Arc, time::Duration};

use sandwire_api::{
    health::Problem,
    identity::{Identity, ListedIdentity},
    name::Name,
};
use sandwire_identity::{Error, FOLDER, Identities};
use sandwire_slot::service::Slots;
use tokio::{
    sync::{Mutex, OwnedMutexGuard},
    time::{MissedTickBehavior, interval},
};

use crate::{
    config::DeclaredIdentity, declared::DeclaredIdentities, identity_watch::Watch,
    receivers::Receivers,
};

/// How often it is looked, though nothing was heard. The kernel tells nobody when the last socket of a cgroup that was removed
/// is closed.
const INTERVAL: Duration = Duration::from_secs(5);

/// The identities of this host.
pub(crate) struct HostIdentities {
    identities: Identities,
    declared: DeclaredIdentities,
    turn: Arc<Mutex<()>>,
}

impl HostIdentities {
    /// As this instance of the daemon has them.
    pub(crate) fn new(folder: &Path, instance: Name) -> Self {
        Self {
            identities: Identities::new(folder),
            declared: DeclaredIdentities::new(instance),
            turn: Arc::default(),
        }
    }

    /// Has them be as a configuration says, from the next look on.
    pub(crate) fn declare(&self, declared: Vec<DeclaredIdentity>) {
        self.declared.declare(declared);
    }

    /// Has them be as the configuration says, as far as they can be now.
    pub(crate) fn look_at_declared(&self) {
        self.declared.look(&self.identities);
    }

    /// To be held by who looks since a configuration was read. A look may wait for a stopped command without end, on a thread: of
    /// those there are as many as are needed to answer requests, and each reload would take one more.
    pub(crate) async fn turn(&self) -> OwnedMutexGuard<()> {
        Arc::clone(&self.turn).lock_owned().await
    }

    /// Does no more of what a configuration says.
    pub(crate) fn stop(&self) {
        self.declared.stop();
    }

    /// What isn't as the configuration says.
    pub(crate) fn problems(&self) -> Vec<Problem> {
        self.declared.problems()
    }

    /// As the commands have them.
    pub(crate) fn of_host(&self) -> Identities {
        self.identities.clone()
    }

    /// All of them as they are at this moment, whoever is changing them; none where there never was one.
    pub(crate) fn snapshot(&self) -> Result<Vec<Identity>, Error> {
        self.identities.snapshot()
    }

    /// The same, and those of the configuration that aren't there.
    pub(crate) fn listed(&self) -> Result<Vec<ListedIdentity>, Error> {
        let found = self.snapshot()?;
        let awaited = self.declared.awaited(&found).into_iter();
        let awaited = awaited.map(ListedIdentity::Awaited);
        let found = found.into_iter().map(ListedIdentity::Found);
        Ok(found.chain(awaited).collect())
    }

    /// Has those that are there run the programs of this version.
    fn renew(&self) {
        match self.identities.renew() {
            Ok(_) | Err(Error::OtherNamespace { .. }) => {}
            Err(error) => tracing::warn!(
                %error,
                "identities go on with the programs of another version; 'sandwire identity renew' tries again"
            ),
        }
    }

    /// Has published ports leave alone what is for the addresses of those that there are.
    pub(crate) fn spare(&self, slots: &Slots) {
        let addresses = match self.identities.list() {
            Ok(listed) => {
                let addresses = listed.into_iter().flat_map(|identity| identity.addresses);
                addresses.collect()
            }
            // Theirs aren't addresses of this host.
            Err(Error::OtherNamespace { .. }) => BTreeSet::new(),
            Err(error) => {
                tracing::warn!(%error, "published ports may take what is for new identities");
                return;
            }
        };
        if let Err(error) = slots.spare_addresses(addresses) {
            tracing::warn!(%error, "published ports may take what is for new identities");
        }
    }

    /// Takes away what has ended, and puts addresses back.
    fn look(&self) {
        match self.identities.repair() {
            Ok(repaired) => {
                for name in repaired.ended.iter().chain(&repaired.incomplete) {
                    tracing::info!(identity = name, "an identity has ended");
                }
                for name in &repaired.restored {
                    tracing::warn!(
                        identity = name,
                        "somebody had taken addresses of an identity off their interface; they are there again"
                    );
                }
                for reason in &repaired.failures {
                    tracing::warn!("{reason}");
                }
            }
            // Those of another namespace are looked after there.
            Err(Error::OtherNamespace { .. }) => {}
            Err(error) => tracing::warn!(%error, "identities can't be looked after"),
        }
    }
}

/// Where identities are unless somebody wants them elsewhere.
pub(crate) fn default_folder() -> &'static Path {
    Path::new(FOLDER)
}

/// Looks when one is added, and from time to time, for ever; begins with an upgrade.
pub(crate) async fn sweep(
    identities: Arc<HostIdentities>,
    slots: Arc<Slots>,
    receivers: Receivers,
) {
    let (ours, its_slots) = (Arc::clone(&identities), Arc::clone(&slots));
    let begin = move || {
        // An upgrade takes longer, and a table that was made anew knows none of them.
        ours.spare(&its_slots);
        ours.renew();
    };
    if let Err(error) = tokio::task::spawn_blocking(begin).await {
        tracing::error!(%error, "an upgrade of identities ended early");
    }
    let watch = Watch::new(&identities.identities.links()).inspect_err(
        |error| tracing::warn!(%error, "new identities are looked for every five seconds"),
    );
    let mut turns = interval(INTERVAL);
    turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        match &watch {
            Ok(watch) => tokio::select! {
                _ = turns.tick() => {}
                // It is still being added. Looking, below, waits for that; this needn't.
                () = watch.heard() => receivers.look_for_identities(),
                () = identities.declared.due() => {}
            },
            Err(_) => tokio::select! {
                _ = turns.tick() => {}
                () = identities.declared.due() => {}
            },
        }
        let (ours, slots) = (Arc::clone(&identities), Arc::clone(&slots));
        let look = move || {
            ours.look();
            ours.look_at_declared();
            ours.spare(&slots);
        };
        if let Err(error) = tokio::task::spawn_blocking(look).await {
            tracing::error!(%error, "a look at identities ended early");
        }
        receivers.look_for_identities();
    }
}

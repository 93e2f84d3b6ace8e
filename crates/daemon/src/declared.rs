//! Identities of the configuration: added as their cgroups come, changed and removed as the file says.
//!
//! [`plan`] says what is to be done; here it is done, and told. One look at a time; it is looked at the start, upon a reload,
//! from time to time, and as soon as a declared cgroup is made. Which identities came from the configuration stands in their
//! records (decision 44), so nothing here outlives the daemon.

mod plan;

use std::{
    collections::BTreeMap,
    fs, io, mem,
    os::unix::fs::MetadataExt,
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use sandwire_api::{
    health::Problem,
    identity::{Awaited, AwaitedIdentity, Identity},
    name::Name,
};
use sandwire_identity::{Cgroup, Error, Identities};
use sandwire_kernel_net::folders::FolderWatch;
use tokio::{
    sync::Notify,
    time::{Instant, sleep, sleep_until},
};

use self::plan::{Place, Step, plan};
use crate::config::DeclaredIdentity;

/// Between two looks, however often cgroups come and go.
const PAUSE: Duration = Duration::from_millis(100);
/// Between two things that were made and are no declared cgroups: a user who makes folders where one could be, and to whom systemd
/// leaves that, can do so without end.
const CALM: Duration = Duration::from_millis(10);
/// Looks in a row while the kernel still has to let go of a cgroup's predecessor: some milliseconds, unless its sockets are open.
const HURRIED_LOOKS: u32 = 20;
/// One that couldn't be added is tried again after so long: to fail may cost most of a second of a processor.
const RETRY: Duration = Duration::from_secs(60);

/// What the configuration says of identities, and what came of it.
pub(crate) struct DeclaredIdentities {
    instance: Name,
    /// Held for a whole look.
    attempts: Mutex<Attempts>,
    told: Mutex<Told>,
    /// Something was made where a declared cgroup could be.
    made: Arc<Notify>,
    stopping: AtomicBool,
}

/// What is remembered from one look to the next.
#[derive(Default)]
struct Attempts {
    /// Those that couldn't be added.
    failed: BTreeMap<Name, Failed>,
    /// Those whose cgroups were said to be awaited.
    told_awaited: Vec<Name>,
    /// Whether what isn't declared any more is gone.
    is_settled: bool,
}

struct Failed {
    cgroup: u64,
    again: Instant,
    reason: String,
}

/// What others are told, without waiting for a look.
#[derive(Default)]
struct Told {
    declared: Arc<[DeclaredIdentity]>,
    /// No look has seen them.
    is_new: bool,
    /// Numbers of what was there in the place of their cgroups at the last look.
    found: BTreeMap<Name, u64>,
    problems: Vec<Problem>,
    watch: Option<FolderWatch>,
    /// Looks in a row that found one whose cgroup's predecessor hasn't ended.
    waiting_looks: u32,
    rested: Option<Instant>,
}

impl DeclaredIdentities {
    /// Of none, until [`DeclaredIdentities::declare`].
    pub(crate) fn new(instance: Name) -> Self {
        Self {
            instance,
            attempts: Mutex::default(),
            told: Mutex::default(),
            made: Arc::default(),
            stopping: AtomicBool::new(false),
        }
    }

    /// Those that aren't among these, as their cgroup isn't there, or as they can't be added.
    pub(crate) fn awaited(&self, listed: &[Identity]) -> Vec<AwaitedIdentity> {
        let declared = Arc::clone(&lock(&self.told).declared);
        let is_listed = |name: &Name| listed.iter().any(|one| one.name == *name);
        let awaited = declared.iter().filter(|one| !is_listed(&one.name));
        awaited
            .map(|one| AwaitedIdentity {
                name: one.name.clone(),
                state: Awaited::Awaited,
                cgroup: one.new.cgroup.clone(),
                addresses: one.new.addresses.clone(),
                prefixes: one.new.prefixes.clone(),
            })
            .collect()
    }

    /// What is wrong with them.
    pub(crate) fn problems(&self) -> Vec<Problem> {
        lock(&self.told).problems.clone()
    }

    /// Has those of a configuration in place of those before, from the next look on.
    pub(crate) fn declare(&self, declared: Vec<DeclaredIdentity>) {
        let mut told = lock(&self.told);
        told.declared = declared.into();
        told.is_new = true;
        // Before the look, so that none comes between the two.
        self.cover(&mut told);
    }

    /// Ends a look that is under way, between two steps.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    /// Waits until it is to be looked at once.
    pub(crate) async fn due(&self) {
        loop {
            if (1..HURRIED_LOOKS).contains(&lock(&self.told).waiting_looks) {
                break;
            }
            self.made.notified().await;
            if self.has_new_cgroup() {
                break;
            }
            sleep(CALM).await;
        }
        let rested = lock(&self.told).rested;
        if let Some(rested) = rested {
            sleep_until(rested).await;
        }
    }

    /// Whether a declared cgroup is there that wasn't at the last look.
    fn has_new_cgroup(&self) -> bool {
        let mut told = lock(&self.told);
        self.cover(&mut told);
        let is_new = told.has_new_cgroup();
        if is_new {
            told.waiting_looks = 0;
        }
        is_new
    }

    /// Does what is to be done, as far as that can be. Waits for whoever has locked the identities, who may be stopped.
    pub(crate) fn look(&self, identities: &Identities) {
        let mut attempts = lock(&self.attempts);
        let declared = {
            let mut told = lock(&self.told);
            if mem::take(&mut told.is_new) {
                *attempts = Attempts::default();
            }
            Arc::clone(&told.declared)
        };
        if declared.is_empty() && attempts.is_settled {
            return;
        }
        // Sooner than what is looked at: what comes between the two is new.
        let found = found(&declared).collect();
        let placed: Vec<(DeclaredIdentity, Place)> = declared
            .iter()
            .map(|identity| (identity.clone(), place(&identity.new.cgroup)))
            .collect();
        let mut look = Look {
            identities,
            attempts: &mut attempts,
            problems: Vec::new(),
            is_settled: true,
            waits_for_an_end: false,
            has_waited: lock(&self.told).waiting_looks >= HURRIED_LOOKS,
        };
        match identities.standing() {
            Ok(standing) => {
                for step in plan(&placed, &standing, &self.instance) {
                    if self.stopping.load(Ordering::Relaxed) {
                        return;
                    }
                    look.carry_out(step);
                }
            }
            // Those that are there are of another namespace, and so none of ours.
            Err(Error::OtherNamespace { .. }) if declared.is_empty() => {}
            Err(error) => {
                look.is_settled = false;
                look.fail(None, format!("they can't be looked at: {error}"));
            }
        }
        let (problems, waits) = (look.problems, look.waits_for_an_end);
        attempts.is_settled = look.is_settled;
        lock(&self.told).take(found, problems, waits);
    }

    /// Watches where declared cgroups could be made.
    fn cover(&self, told: &mut Told) {
        if told.watch.is_none() && !told.declared.is_empty() {
            match self.start_watch() {
                Ok(watch) => told.watch = Some(watch),
                Err(error) => tracing::warn!(
                    %error,
                    "new cgroups of declared identities are looked for every five seconds"
                ),
            }
        }
        let Some(watch) = &told.watch else {
            return;
        };
        for identity in told.declared.iter() {
            if let Some(parent) = identity.new.cgroup.parent() {
                watch.cover(parent);
            }
        }
    }

    fn start_watch(&self) -> io::Result<FolderWatch> {
        let made = Arc::clone(&self.made);
        FolderWatch::start(
            "cgroups",
            move || made.notify_one(),
            |error| {
                tracing::warn!(
                    %error,
                    "new cgroups of declared identities aren't told of any more; they are looked for every five seconds"
                );
            },
        )
    }
}

impl Told {
    /// Whether a declared cgroup is there that wasn't at the last look.
    fn has_new_cgroup(&self) -> bool {
        found(&self.declared).any(|(name, number)| self.found.get(&name) != Some(&number))
    }

    /// What came of a look.
    fn take(&mut self, found: BTreeMap<Name, u64>, problems: Vec<Problem>, waits_for_an_end: bool) {
        for problem in &problems {
            if !self.problems.contains(problem) {
                let (subject, message) = (&problem.subject, &problem.message);
                tracing::error!(subject, "{message}");
            }
        }
        self.problems = problems;
        self.found = found;
        self.waiting_looks = if waits_for_an_end {
            self.waiting_looks.saturating_add(1)
        } else {
            0
        };
        self.rested = Some(Instant::now() + PAUSE);
    }
}

/// One look, while it lasts.
struct Look<'a> {
    identities: &'a Identities,
    attempts: &'a mut Attempts,
    problems: Vec<Problem>,
    is_settled: bool,
    waits_for_an_end: bool,
    /// Whether an end has been waited for longer than the kernel takes by itself.
    has_waited: bool,
}

impl Look<'_> {
    fn carry_out(&mut self, step: Step<'_>) {
        match step {
            Step::Remove(standing) => match self.identities.remove_standing(standing) {
                Ok(removed) => {
                    tracing::info!(identity = %removed.name, "removed an identity that the configuration has no more");
                }
                // Somebody else was faster.
                Err(Error::NoIdentity { .. }) => {}
                Err(error) => {
                    self.is_settled = false;
                    self.fail(Some(&standing.name), error.to_string());
                }
            },
            Step::Add(identity, cgroup) => self.add(identity, cgroup),
            Step::SetPolicy(identity, standing) => {
                let policy = &identity.new.policy;
                match self.identities.set_policy_of_standing(standing, policy) {
                    Ok(()) => {
                        tracing::info!(identity = %identity.name, "changed the policy of an identity");
                    }
                    Err(Error::NoIdentity { .. }) => {}
                    Err(error) => self.fail_as_declared(&identity.name, &error.to_string()),
                }
            }
            Step::Await(identity) => {
                if !self.attempts.told_awaited.contains(&identity.name) {
                    self.attempts.told_awaited.push(identity.name.clone());
                    let cgroup = identity.new.cgroup.display();
                    tracing::info!(identity = %identity.name, %cgroup, "an identity waits for its cgroup");
                }
            }
            Step::AwaitEnd(identity, former) => {
                self.await_end(&identity.name, former.name.as_str());
            }
            Step::Tell(identity, reason) => self.fail_as_declared(&identity.name, &reason),
        }
    }

    /// Tells what is in the way, once that has been there for longer than the kernel takes by itself.
    fn await_end(&mut self, name: &Name, former: &str) {
        self.waits_for_an_end = true;
        if self.has_waited {
            let reason = format!(
                "identity {former} of a cgroup that is gone is in the way until its last socket is closed; end \
                 it with them, or at once: sandwire identity remove {former}"
            );
            self.fail_as_declared(name, &reason);
        }
    }

    fn add(&mut self, identity: &DeclaredIdentity, cgroup: u64) {
        let name = &identity.name;
        let now = Instant::now();
        let failed = self.attempts.failed.get(name);
        if let Some(failed) = failed.filter(|it| it.cgroup == cgroup && now < it.again) {
            let reason = failed.reason.clone();
            return self.fail_as_declared(name, &reason);
        }
        let failed = self.attempts.failed.remove(name);
        let has_failed = failed.is_some_and(|it| it.cgroup == cgroup);
        // Others' additions wait for this one; the next look is patience enough.
        match self.identities.add_at_once(&identity.new) {
            Ok(_) => {
                self.attempts.told_awaited.retain(|awaited| awaited != name);
                let cgroup = identity.new.cgroup.display();
                tracing::info!(identity = %name, %cgroup, "added an identity");
            }
            // The kernel lets go of most in some milliseconds.
            Err(Error::Dying { .. }) if !(self.has_waited || has_failed) => {
                self.waits_for_an_end = true;
            }
            // It can't go on in one more cgroup while sockets of so many before are open.
            Err(Error::Dying { name: former, path })
                if former == name.as_str() || path == identity.new.cgroup =>
            {
                self.await_end(name, &former);
            }
            // It was there a moment ago.
            Err(Error::NoCgroup { .. }) => {}
            Err(error) => {
                let reason = error.to_string();
                self.fail_as_declared(name, &reason);
                let again = Instant::now() + RETRY;
                let failed = Failed {
                    cgroup,
                    again,
                    reason,
                };
                self.attempts.failed.insert(name.clone(), failed);
            }
        }
    }

    fn fail_as_declared(&mut self, name: &Name, reason: &str) {
        self.fail(
            Some(name),
            format!("not as the configuration says: {reason}"),
        );
    }

    fn fail(&mut self, name: Option<&Name>, message: String) {
        let subject = name.map_or("identities".to_owned(), |name| format!("identity {name}"));
        self.problems.push(Problem {
            subject,
            message,
            // Leases don't need them.
            blocking: false,
        });
    }
}

/// Numbers of what is there in the place of declared cgroups, whatever it is.
fn found(declared: &[DeclaredIdentity]) -> impl Iterator<Item = (Name, u64)> {
    declared.iter().filter_map(|identity| {
        let found = fs::metadata(&identity.new.cgroup).ok()?;
        Some((identity.name.clone(), found.ino()))
    })
}

fn place(cgroup: &Path) -> Place {
    match Cgroup::open(cgroup) {
        Ok(Cgroup { path, id, .. }) => Place::There { path, id },
        Err(Error::NoCgroup { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            Place::Absent
        }
        Err(error) => Place::Unusable(error.to_string()),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::{
        future::{Future, poll_fn},
        pin::pin,
        task::Poll,
    };

    use tokio::time::{advance, timeout};

    use super::*;
    use crate::config::Config;

    /// `web` of a cgroup, declared and looked at.
    fn declared(cgroup: &Path, identities: &Identities) -> DeclaredIdentities {
        let text = format!(
            "[[identity]]\nname = \"web\"\ncgroup = {cgroup:?}\naddresses = [\"10.0.0.5\"]\n"
        );
        let config = Config::parse(&text, Path::new("s.toml")).unwrap();
        let declared = DeclaredIdentities::new(config.instance);
        declared.declare(config.identities);
        declared.look(identities);
        declared
    }

    fn nowhere() -> Identities {
        Identities::new(Path::new("/nonexistent/sandwire-identity"))
    }

    #[tokio::test]
    async fn a_cgroup_is_heard_of_as_it_is_made() {
        let folder = tempfile::tempdir().unwrap();
        let cgroup = folder.path().join("web.slice/web.service");
        let declared = declared(&cgroup, &nowhere());
        assert_eq!(declared.problems(), []);
        // The second one before anybody can have watched the first.
        fs::create_dir_all(&cgroup).unwrap();
        let heard = timeout(Duration::from_secs(60), declared.due()).await;
        assert!(heard.is_ok());
        declared.look(&nowhere());
        let problems = declared.problems();
        assert!(problems[0].message.contains("not in a cgroup v2"));
        assert_eq!(problems[0].subject, "identity web");
        // What can't be used is no news, whatever is made beside it.
        assert!(!declared.has_new_cgroup());
    }

    #[tokio::test(start_paused = true)]
    async fn who_makes_other_folders_without_end_is_looked_at_from_time_to_time() {
        let folder = tempfile::tempdir().unwrap();
        let cgroup = folder.path().join("web");
        let declared = declared(&cgroup, &nowhere());
        advance(PAUSE).await;
        let begun = Instant::now();
        let mut due = pin!(declared.due());
        declared.made.notify_one();
        let is_due = poll_fn(|context| Poll::Ready(due.as_mut().poll(context).is_ready())).await;
        assert!(!is_due);
        fs::create_dir(&cgroup).unwrap();
        declared.made.notify_one();
        due.await;
        assert!(begun.elapsed() >= CALM);
    }

    #[test]
    fn what_could_not_be_looked_at_is_looked_at_again_also_if_nothing_is_declared() {
        let folder = tempfile::tempdir().unwrap();
        let maps = folder.path().join("v2");
        fs::create_dir(&maps).unwrap();
        let identities = Identities::new(folder.path());
        let declared = DeclaredIdentities::new("default".parse().unwrap());
        declared.look(&identities);
        let problems = declared.problems();
        assert!(problems[0].message.contains("can't be looked at"));
        fs::remove_dir(&maps).unwrap();
        declared.look(&identities);
        assert_eq!(declared.problems(), []);
    }
}

//! Looks each second, and when a cgroup is made, whether the kernel still does what it was told, while the relay runs.
//!
//! A cgroup that was deleted and made again is another one. Who loads a firewall anew often begins by flushing all of
//! nftables, our table too, and who flushes only its rules leaves it there, empty: from then on processes of the host send in the clear, and nothing else at all. Who sets up
//! the network anew may delete routing rules: from then on the eBPF data path sends in the clear. What
//! [`super::clear`] took away stays away.

use std::{future::pending, sync::Arc, time::Duration};

use sandwire_kernel_net::{
    netlink::Socket,
    nft,
    routing_rule::{RoutingRule, TABLE_PROHIBITED, Version, has_route},
};
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep, sleep_until},
};

use super::{
    NOT_THERE, SteeringError, TABLE, TABLE_LOCAL, Told, Written, apply, apply_cgroups,
    apply_present,
    cgroups::{CgroupNumber, present},
    ends::{self, TABLE_ENDS},
    is_redirected, listed, rules,
    watch::Watch,
};
use crate::{config::Egress, metrics::Metrics};

const LOOK: Duration = Duration::from_secs(1);
/// Between looks for cgroups while others' are being made, so that whoever makes many doesn't keep us busy.
const PAUSE: Duration = Duration::from_millis(5);

/// What the kernel still knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Known {
    All,
    /// Somebody has taken some of it away, who isn't [`super::clear`].
    Part,
    Nothing,
}

/// What it has to know, besides the table.
#[derive(Default)]
pub(super) struct Wanted {
    rules: Vec<RoutingRule>,
    /// Of which there have to be the routes that rules lead to.
    versions: Vec<Version>,
    /// Whether the other table has to be there.
    needs_ends: bool,
}

impl Wanted {
    fn by(egress: &Egress) -> Self {
        // Of IPv6 there may be nothing to be had, which doesn't matter where none is redirected.
        let is_wanted =
            |version: &Version| *version == Version::V4 || is_redirected(egress, *version);
        let versions: Vec<Version> = Version::ALL.into_iter().filter(is_wanted).collect();
        let mut rules = rules(egress);
        rules.retain(|rule| versions.contains(&rule.version));
        Self {
            rules,
            versions,
            needs_ends: ends::is_needed(egress),
        }
    }
}

/// What the kernel knows of what was written into the tables, and of what is wanted besides.
pub(super) fn known(wanted: &Wanted, written: &Written) -> Result<Known, SteeringError> {
    let mut netfilter = Socket::netfilter()?;
    let tables = nft::tables(&mut netfilter)?;
    let has = |name: &str| tables.iter().any(|table| table == name);
    let has_tables = has(TABLE) && (!wanted.needs_ends || has(TABLE_ENDS));
    let has_tables = has_tables && written.holds(&mut netfilter)?;
    // Looked at in the order in which `clear` takes it away.
    let there = listed(&mut Socket::route()?)?;
    let has_rules = wanted.rules.iter().all(|rule| there.contains(rule));
    let (mut has_routes, mut has_any_route) = (true, false);
    for version in Version::ALL {
        let is_wanted = wanted.versions.contains(&version);
        for table in [TABLE_LOCAL, TABLE_PROHIBITED] {
            let is_there = match has_route(version, table) {
                // A kernel without IPv6 can't be asked for its routes.
                Err(_) if version == Version::V6 && !is_wanted => false,
                is_there => is_there?,
            };
            has_routes &= is_there || !is_wanted;
            has_any_route |= is_there;
        }
    }
    if has_tables && has_rules && has_routes {
        return Ok(Known::All);
    }
    let is_nothing = !has(TABLE) && !has(TABLE_ENDS) && there.is_empty() && !has_any_route;
    Ok(if is_nothing {
        Known::Nothing
    } else {
        Known::Part
    })
}

/// Whether the kernel has been told anything that holds still.
///
/// # Errors
/// It can't be asked.
pub(crate) fn is_told() -> Result<bool, SteeringError> {
    Ok(known(&Wanted::default(), &Written::default())? != Known::Nothing)
}

/// Whether the table is there, by which what is redirected is dropped where no relay takes it.
///
/// # Errors
/// The kernel can't be asked.
pub(crate) fn has_table() -> Result<bool, SteeringError> {
    let tables = nft::tables(&mut Socket::netfilter()?)?;
    Ok(tables.iter().any(|table| table == TABLE))
}

/// Another configuration to tell the kernel, and who waits for it to be told.
pub(crate) struct Change {
    pub(crate) egress: Arc<Egress>,
    pub(crate) done: oneshot::Sender<Result<(), SteeringError>>,
}

/// Why it is looked what the kernel knows.
enum Reason {
    /// It is time to look at all.
    Due,
    /// A cgroup may have been made.
    Heard,
    Change(Change),
}

/// Tells the kernel again what it has lost, and what changes, for ever.
pub(crate) async fn keep(
    mut egress: Arc<Egress>,
    mut told: Told,
    mut changes: mpsc::Receiver<Change>,
    metrics: Arc<Metrics>,
) {
    let mut wanted = Wanted::by(&egress);
    let watch = Watch::new(&egress).inspect_err(|error| {
        tracing::warn!(%error, "it isn't told when a cgroup is made; that is looked for each second");
    });
    let watch = watch.ok();
    // At once: something may have been made before it was listened for.
    let mut due = Instant::now();
    let mut was_part = false;
    loop {
        let is_due = match wait(watch.as_ref(), due, &mut changes).await {
            Reason::Due => true,
            Reason::Heard => false,
            Reason::Change(change) => {
                exchange(&mut egress, &mut told, change);
                wanted = Wanted::by(&egress);
                true
            }
        };
        if let Some(watch) = &watch {
            // First: what is made from now on is heard of.
            watch.cover(&egress);
        }
        let now = present(&egress);
        // While one is missing, nobody is in it; that is no reason to wait with another one.
        let is_new = |(now, known): (&Option<_>, _)| now.is_some() && now != known;
        let has_new = now.iter().zip(&told.cgroups).any(is_new);
        if !is_due && !has_new {
            sleep(PAUSE).await;
            continue;
        }
        let known = known(&wanted, &told.written).unwrap_or_else(|error| {
            tracing::error!(%error, "it can't be seen whether the rules are there");
            Known::All
        });
        // `clear` works in steps: what it has begun is over a second later.
        let is_part = known == Known::Part;
        let is_lost = is_due && is_part && was_part;
        if is_due {
            was_part = is_part;
            due = Instant::now() + LOOK;
        }
        if known == Known::Nothing || !(has_new || is_lost) {
            continue;
        }
        tell_again(&egress, (&mut told, now), is_lost, &metrics);
    }
}

/// Tells the kernel of the cgroups of now, or all anew of which a part `is_lost`.
fn tell_again(
    egress: &Egress,
    (told, now): (&mut Told, Vec<Option<CgroupNumber>>),
    is_lost: bool,
    metrics: &Metrics,
) {
    let outcome = if is_lost {
        apply_present(egress, &now).map(|written| told.written = written)
    } else {
        apply_cgroups(egress, &now).map(|table| told.written.table = table)
    };
    if outcome.is_ok() {
        told.cgroups = now;
    }
    match outcome {
        Ok(()) if is_lost => {
            metrics.steering_restored.add(1);
            tracing::warn!(
                "rules in nftables or of routing, or elements of sets, were gone, as after `nft flush ruleset`; they are there again"
            );
        }
        Ok(()) => tracing::info!("a cgroup was made anew; its traffic is steered here"),
        Err(SteeringError::Kernel(error)) if !is_lost && error.errno() == Some(NOT_THERE) => {
            tracing::info!(
                "a cgroup was made anew while the rules were taken away; they come back within two seconds, unless \
                 `sandwire relay clear` has ended them"
            );
        }
        Err(error) => tracing::error!(%error, "the rules can't be told anew"),
    }
}

/// Tells the kernel another configuration; the former again, if it takes only a part of that.
fn exchange(egress: &mut Arc<Egress>, told: &mut Told, change: Change) {
    let outcome = match apply(&change.egress) {
        Ok(now) => {
            (*egress, *told) = (change.egress, now);
            Ok(())
        }
        Err(error) => {
            match apply_present(egress, &told.cgroups) {
                Ok(written) => told.written = written,
                Err(error) => tracing::error!(%error, "the former rules can't be told anew"),
            }
            Err(error)
        }
    };
    // Who waited is gone where the relay ends.
    let _ = change.done.send(outcome);
}

async fn wait(watch: Option<&Watch>, due: Instant, changes: &mut mpsc::Receiver<Change>) -> Reason {
    let heard = async {
        match watch {
            Some(watch) => watch.heard().await,
            None => pending().await,
        }
    };
    tokio::select! {
        () = sleep_until(due) => Reason::Due,
        () = heard => Reason::Heard,
        Some(change) = changes.recv() => Reason::Change(change),
    }
}

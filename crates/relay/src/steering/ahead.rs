//! Steering without a relay: what is redirected is told, and dropped until one runs.
//!
//! For what starts a sender in a cgroup of its own. Rules name a cgroup by its number, so no rule can be there before the
//! cgroup is; whoever has just made it waits here before it lets anything run in it.

use std::{
    path::PathBuf,
    thread::sleep,
    time::{Duration, Instant},
};

use sandwire_kernel_net::{netlink::Socket, nft};

use super::{Claim, SteeringError, TABLE, apply_present, cgroups, has_table, is_told, parts};
use crate::{
    config::{Config, Egress},
    metrics,
};

/// How long a relay that runs may take; it needs some milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(5);
/// How long somebody who steers may take to tell the kernel anything at all.
const BEGINNING: Duration = Duration::from_secs(2);

/// What holds now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ahead {
    /// The relay that runs has told the kernel of all cgroups that are there.
    ByRelay,
    /// None runs; we have told the kernel.
    Told,
    /// One runs, and `sandwire relay clear` has ended its steering: all leaves in the clear.
    Cleared,
}

/// Why what is redirected may leave in the clear.
#[derive(Debug, thiserror::Error)]
pub enum AheadError {
    /// Nothing is redirected here.
    #[error("the configuration has no section [egress]: nothing is redirected on this host")]
    NoEgress,
    /// The kernel refuses.
    #[error(transparent)]
    Steering(#[from] SteeringError),
    /// The relay that runs doesn't.
    #[error(
        "the relay that runs hasn't steered the cgroup {} in {} s: its log may say why; if the cgroup is new in the \
         configuration, have that read again (`systemctl reload sandwire-relay`)",
        .0.display(), PATIENCE.as_secs()
    )]
    NotSteered(PathBuf),
}

/// Has the kernel know what is redirected, with the cgroups that are there now. Where a relay runs, it is waited for: the
/// file may have changed since it was read, and what is told is the relay's to say. So it is where that one has another file.
///
/// # Errors
/// See [`AheadError`].
pub fn ahead(config: &Config) -> Result<Ahead, AheadError> {
    let egress = config.egress.as_ref().ok_or(AheadError::NoEgress)?;
    let begun = Instant::now();
    // Each time: it may end while it is waited for.
    let _claim = loop {
        let is_ready = metrics::is_served(&config.folder);
        // One that isn't may have another folder, or hasn't got that far.
        if !is_ready && let Some(claim) = Claim::take() {
            break claim;
        }
        let elapsed = begun.elapsed();
        if is_told()? {
            let has_table = is_ready || has_table()?;
            match unsteered(egress)? {
                None if has_table || elapsed >= PATIENCE => return Ok(Ahead::ByRelay),
                Some(missing) if elapsed >= PATIENCE => {
                    return Err(AheadError::NotSteered(missing));
                }
                _ => {}
            }
        } else if is_ready || elapsed >= BEGINNING {
            return Ok(Ahead::Cleared);
        }
        sleep(PAUSE);
    };
    apply_present(egress, &cgroups::present(egress))?;
    cgroups::check(egress)?;
    Ok(Ahead::Told)
}

/// A cgroup that is there, is redirected, and isn't known to the kernel's rules.
fn unsteered(egress: &Egress) -> Result<Option<PathBuf>, SteeringError> {
    cgroups::check(egress)?;
    let parts = parts(egress);
    let is_redirected = |place: &u16| {
        let mut parts = parts.iter();
        parts.any(|part| part.places.contains(place) && !part.to_from_here.is_empty())
    };
    // First: one that is made anew meanwhile is another one's to wait for.
    let present = cgroups::present(egress);
    let told = nft::cgroup_rules(&mut Socket::netfilter()?, TABLE)?;
    let missing = egress.cgroups().zip(present).find(|((_, place), now)| {
        is_redirected(place) && now.is_some_and(|now| told.iter().all(|rule| rule.id != now.id))
    });
    Ok(missing.map(|((path, _), _)| path.clone()))
}

//! Looks each second whether the kernel still does what it was told, while the relay runs.
//!
//! A cgroup that was deleted and made again is another one. Who loads a firewall anew often begins by flushing all of
//! nftables, our table too: from then on processes of the host send in the clear, and nothing else at all. What
//! [`super::clear`] took away stays away.

use std::{sync::Arc, time::Duration};

use sandwire_kernel_net::{netlink::Socket, nft};

use super::{CgroupNumber, SteeringError, TABLE, apply_present, cgroups_present, listed};
use crate::{config::Egress, metrics::Metrics};

const LOOK: Duration = Duration::from_secs(1);

/// What the kernel still knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    All,
    /// Routing alone: somebody has flushed nftables.
    Routing,
    Nothing,
}

fn known() -> Result<Known, SteeringError> {
    let tables = nft::tables(&mut Socket::netfilter()?)?;
    if tables.iter().any(|table| table == TABLE) {
        return Ok(Known::All);
    }
    // Looked at second, as `clear` takes it away second.
    let is_there = !listed(&mut Socket::route()?)?.is_empty();
    Ok(if is_there {
        Known::Routing
    } else {
        Known::Nothing
    })
}

/// Tells the kernel again what it has lost, for ever. `cgroups` are those that it was told of.
pub(crate) async fn keep(
    egress: Egress,
    mut cgroups: Vec<Option<CgroupNumber>>,
    metrics: Arc<Metrics>,
) {
    let mut was_flushed = false;
    loop {
        tokio::time::sleep(LOOK).await;
        let now = cgroups_present(&egress);
        // While one is missing, nobody is in it; that is no reason to wait with another one.
        let is_new = |(now, known): (&Option<_>, _)| now.is_some() && now != known;
        let has_new = now.iter().zip(&cgroups).any(is_new);
        let known = known().unwrap_or_else(|error| {
            tracing::error!(%error, "it can't be seen whether the rules are there");
            Known::All
        });
        // `clear` works in two steps: what it has begun is over at the next look.
        let is_routing_alone = known == Known::Routing;
        let is_flushed = is_routing_alone && was_flushed;
        was_flushed = is_routing_alone;
        if known == Known::Nothing || !(has_new || is_flushed) {
            continue;
        }
        match apply_present(&egress, &now) {
            Ok(()) => {
                if is_flushed {
                    metrics.steering_restored.add(1);
                    tracing::warn!(
                        "the rules in nftables were gone, as after `nft flush ruleset`; they are there again"
                    );
                } else {
                    tracing::info!("a cgroup was made anew; its traffic is steered here");
                }
                cgroups = now;
            }
            Err(error) => tracing::error!(%error, "the rules can't be told anew"),
        }
    }
}

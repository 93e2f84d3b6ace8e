//! `STATUS`: whether an `ADD` would succeed now.
//!
//! A pool that is being refilled is well, since `ADD` waits for it; one that can't be refilled isn't. One that is full is
//! well, too: runtimes take what is told here for the state of the whole node, whose containers lack nothing.

use sandwire_api::{
    client::ClientError,
    error::ErrorCode,
    health::{Health, Problem},
    name::Name,
    pool::Pool,
    slot::SlotKind,
};

use crate::{error::Error, network::Network};

pub(crate) fn run(network: &Network) -> Result<String, Error> {
    let name = network.pool()?;
    let client = network.client();
    let unavailable = |error: ClientError| Error::Unavailable {
        reason: error.to_string(),
    };
    let health = client.health().map_err(unavailable)?;
    let problems = problems_for(&name, &health);
    if !problems.is_empty() {
        let reason = format!("the daemon is not ready: {}", problems.join("; "));
        return Err(Error::Impaired { reason });
    }
    match client.pool(&name) {
        Ok(pool) => obstacle(&pool).map_or(Ok(String::new()), |reason| {
            Err(Error::Unavailable { reason })
        }),
        Err(error) if error.code() == Some(ErrorCode::NotFound) => Err(Error::Unavailable {
            reason: format!(
                "there is no pool {name}: create it by `sandwire pool create {name} --kind container`"
            ),
        }),
        Err(error) => Err(unavailable(error)),
    }
}

/// What keeps the daemon from serving this pool; what is wrong with another one doesn't.
fn problems_for(name: &Name, health: &Health) -> Vec<String> {
    let is_ours = |problem: &&Problem| {
        let of_pool = problem.subject.strip_prefix("pool ");
        of_pool.is_none_or(|pool| pool == name.as_str())
    };
    let blocking = health.problems.iter().filter(|problem| problem.blocking);
    blocking
        .filter(is_ours)
        .map(|problem| format!("{}: {}", problem.subject, problem.message))
        .collect()
}

/// Why nothing can be taken from a pool that isn't full, neither now nor soon.
fn obstacle(pool: &Pool) -> Option<String> {
    let name = &pool.spec.name;
    if pool.spec.kind != SlotKind::Container {
        return Some(format!(
            "the slots of pool {name} are no interfaces for containers: name a pool of kind `container`"
        ));
    }
    let slots = &pool.slots;
    let is_full = slots.leased + slots.held >= pool.slots_max;
    if slots.ready > 0 || is_full {
        return None;
    }
    if let Some(error) = &pool.last_error {
        return Some(format!(
            "pool {name} has no slot ready, and building one failed: {error}"
        ));
    }
    (pool.spec.size == 0).then(|| format!("pool {name} keeps no slots ready: give it a size"))
}

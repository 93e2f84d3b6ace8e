//! `STATUS`: whether an `ADD` would succeed now.
//!
//! A pool that is being refilled is well, since `ADD` waits for it; one that can't be refilled isn't.

use sandwire_api::{client::ClientError, error::ErrorCode, pool::Pool, slot::SlotKind};

use crate::{error::Error, network::Network};

pub(crate) fn run(network: &Network) -> Result<String, Error> {
    let name = network.pool()?;
    let client = network.client();
    let unavailable = |error: ClientError| Error::Unavailable {
        reason: error.to_string(),
    };
    let health = client.health().map_err(unavailable)?;
    if !health.ready {
        let problems = health.problems.iter().filter(|problem| problem.blocking);
        let problems: Vec<String> = problems
            .map(|problem| format!("{}: {}", problem.subject, problem.message))
            .collect();
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

/// Why nothing can be taken from a pool, neither now nor soon.
fn obstacle(pool: &Pool) -> Option<String> {
    let name = &pool.spec.name;
    if pool.spec.kind != SlotKind::Container {
        return Some(format!(
            "the slots of pool {name} are no interfaces for containers: name a pool of kind `container`"
        ));
    }
    let slots = &pool.slots;
    if slots.ready > 0 {
        return None;
    }
    if slots.leased + slots.held >= pool.slots_max {
        return Some(format!(
            "all {} slots of pool {name} are leased: its prefix has no more",
            pool.slots_max
        ));
    }
    if let Some(error) = &pool.last_error {
        return Some(format!(
            "pool {name} has no slot ready, and building one failed: {error}"
        ));
    }
    (pool.spec.size == 0).then(|| format!("pool {name} keeps no slots ready: give it a size"))
}

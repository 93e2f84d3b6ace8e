//! `ADD`: takes a slot, whose interface the daemon puts into the container's namespace, and publishes its ports.
//!
//! If anything fails after the slot was taken, it is given back.

use std::{
    io,
    net::IpAddr,
    thread,
    time::{Duration, Instant},
};

use ipnet::IpNet;
use sandwire_api::{
    attach::Attached,
    client::{Acquired, Blocking, ClientError},
    error::ErrorCode,
    lease::LeaseState,
    name::Name,
    policy::RateLimit,
    pool::{AddressPlan, Pool},
};

use crate::{
    answer,
    environment::Attachment,
    error::Error,
    network::Network,
    wish::{RangeSet, Wish},
};

/// How long to wait for a pool that many containers have emptied at once. Building a slot takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);
/// The first pause between two looks, and the longest: who empties a pool at once are many, and each look is a request.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

pub(crate) fn run(network: &Network, attachment: &Attachment) -> Result<String, Error> {
    let mut wish = wish(network, attachment)?;
    let lease = network.lease(&attachment.container);
    look_at_namespace(attachment)?;
    let client = network.client();
    fit_to_pool(&client, &mut wish)?;
    let operation = format!(
        "add interface {} to container {} in network {}",
        attachment.container.interface,
        attachment.container.id,
        network.name()
    );
    let acquired = acquire(&client, &wish, &lease, &operation)?;
    let acquired = acquired.ok_or_else(|| Error::AddedAlready {
        container: attachment.container.id.clone(),
        interface: attachment.container.interface.to_string(),
        lease: lease.clone(),
    })?;
    let attached = settle(&client, &wish, &lease, acquired, &operation);
    let attached = attached.inspect_err(|_| take_back(&client, &lease))?;
    Ok(answer::of_add(
        network.version,
        &attachment.container.id,
        &attached,
        wish.dns,
        wish.previous,
    ))
}

/// What the configuration asks for. Whoever has a result of others is a later plugin of a chain.
pub(crate) fn wish(network: &Network, attachment: &Attachment) -> Result<Wish, Error> {
    let is_later = network.previous()?.is_some();
    Wish::parse(network, attachment, is_later)
}

/// A namespace that is gone means that the container is, which has a code of its own.
pub(super) fn look_at_namespace(attachment: &Attachment) -> Result<(), Error> {
    match std::fs::metadata(&attachment.netns) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(Error::UnknownContainer {
            reason: format!(
                "container {} has no network namespace {}",
                attachment.container.id,
                attachment.netns.display()
            ),
        }),
        // The daemon says what is wrong with it.
        _ => Ok(()),
    }
}

/// What has to be known of the pool before a slot is taken: its policy, to which limits are added, and where its
/// addresses are.
fn fit_to_pool(client: &Blocking, wish: &mut Wish) -> Result<(), Error> {
    let limits = wish.limits.take();
    let needs_policy = limits.is_some() && wish.lease.policy.is_none();
    if needs_policy || !wish.ranges.is_empty() {
        let name = &wish.lease.pool;
        let found = client.pool(name);
        let pool = found.map_err(|source| of_pool(format!("ask for pool {name}"), source))?;
        check_ranges(&wish.ranges, &pool)?;
        if needs_policy {
            wish.lease.policy = Some(pool.spec.policy);
        }
    }
    if let (Some(limits), Some(policy)) = (limits, &mut wish.lease.policy) {
        set_rate(&mut policy.limits.ingress, limits.ingress);
        set_rate(&mut policy.limits.egress, limits.egress);
    }
    wish.limits = limits;
    Ok(())
}

/// Puts a rate with its burst in the place of the one that there is. A runtime that names none of a direction has
/// nothing against the one that there is, nor has it a word for packets.
fn set_rate(limit: &mut RateLimit, wanted: RateLimit) {
    if wanted.bits_per_second.is_some() {
        limit.bits_per_second = wanted.bits_per_second;
        limit.burst_bytes = wanted.burst_bytes;
    }
}

fn check_ranges(sets: &[RangeSet], pool: &Pool) -> Result<(), Error> {
    let prefixes: Vec<IpNet> = match pool.spec.addresses {
        AddressPlan::Prefix { ipv4, ipv6 } => {
            let ipv6 = ipv6.map(IpNet::from);
            ipv4.map(IpNet::from).into_iter().chain(ipv6).collect()
        }
        AddressPlan::FirecrackerClones { ipv6 } => ipv6.map(IpNet::from).into_iter().collect(),
    };
    for (index, set) in sets.iter().enumerate() {
        let is_covered =
            |range: &crate::wish::AddressRange| prefixes.iter().any(|prefix| range.covers(*prefix));
        if !set.iter().any(is_covered) {
            let prefixes: Vec<String> = prefixes.iter().map(IpNet::to_string).collect();
            return Err(Error::InvalidConfig {
                key: format!("runtimeConfig.ipRanges[{index}]"),
                reason: format!(
                    "pool {} hands out addresses of {}, which are not all in these ranges; make a pool for them",
                    pool.spec.name,
                    prefixes.join(" and ")
                ),
            });
        }
    }
    Ok(())
}

/// Takes a slot, and waits a while for one where the pool is empty. `None` if the lease has been there before.
fn acquire(
    client: &Blocking,
    wish: &Wish,
    lease: &Name,
    operation: &str,
) -> Result<Option<Acquired>, Error> {
    let deadline = Instant::now() + PATIENCE;
    for pause in pauses() {
        match client.acquire(&wish.lease) {
            Ok(acquired) => return Ok(Some(acquired).filter(|acquired| acquired.new)),
            Err(error) if error.code() == Some(ErrorCode::PoolEmpty) => {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(Error::of_client(operation, error));
                }
                thread::sleep(pause.min(left));
            }
            // It is there, and was asked for otherwise.
            Err(error)
                if error.code() == Some(ErrorCode::Conflict)
                    && client
                        .lease(lease, None)
                        .is_ok_and(|found| found.lease.state == LeaseState::Active) =>
            {
                return Ok(None);
            }
            Err(error) => return Err(of_pool(operation.to_owned(), error)),
        }
    }
    unreachable!("pauses have no end")
}

/// Pauses between looks: each twice as long as the one before, up to the longest.
fn pauses() -> impl Iterator<Item = Duration> {
    let next = |pause: &Duration| Some((*pause * 2).min(LONGEST_PAUSE));
    std::iter::successors(Some(FIRST_PAUSE), next)
}

/// What follows once there is a slot.
fn settle(
    client: &Blocking,
    wish: &Wish,
    lease: &Name,
    acquired: Acquired,
    operation: &str,
) -> Result<Attached, Error> {
    let attached = acquired.lease.attached.ok_or_else(|| Error::Failed {
        operation: operation.to_owned(),
        source: ClientError::Decode {
            operation: "POST /v1/leases".to_owned(),
            status: 201,
            reason: "it has no `attached`: the daemon is of an older version".to_owned(),
        },
    })?;
    let has = |address: &IpAddr| {
        let mut all = attached.addresses.iter();
        all.any(|one| one.address.addr() == *address)
    };
    if let Some(missing) = wish.addresses.iter().find(|address| !has(address)) {
        return Err(Error::InvalidConfig {
            key: "runtimeConfig.ips".to_owned(),
            reason: format!(
                "no slot of pool {} has {missing} beside {}: ask for one address, or for those of one slot",
                wish.lease.pool, wish.addresses[0]
            ),
        });
    }
    for port in &wish.ports {
        // Some runtimes listen at the port themselves while the container is there, to reserve it.
        client
            .publish(lease, None, port, true)
            .map_err(|source| of_pool(operation.to_owned(), source))?;
    }
    Ok(attached)
}

/// Gives a slot back; if that fails, the runtime's `DEL` will.
fn take_back(client: &Blocking, lease: &Name) {
    if let Err(error) = client.release(lease, None) {
        eprintln!("sandwire-cni: cannot release lease {lease}, whose ADD failed: {error}");
    }
}

/// A refused request is the configuration's fault where the daemon says so.
fn of_pool(operation: String, source: ClientError) -> Error {
    match source.code() {
        Some(ErrorCode::InvalidRequest | ErrorCode::NotFound | ErrorCode::Unsupported) => {
            Error::Unfit { operation, source }
        }
        _ => Error::of_client(operation, source),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_pool_is_asked_more_and_more_seldom() {
        let millis: Vec<u128> = pauses().take(8).map(|pause| pause.as_millis()).collect();
        assert_eq!(millis, [5, 10, 20, 40, 80, 160, 200, 200]);
        let mut waited = Duration::ZERO;
        let looks = pauses().take_while(|pause| {
            waited += *pause;
            waited < PATIENCE
        });
        assert!(looks.count() < 60);
    }
}

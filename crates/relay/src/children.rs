//! Sandboxes whose packets the relay can't take: containers whose interfaces are children of the host's.
//!
//! What they send passes no place of the host's stack. The daemon reads what is redirected from the kernel, as
//! [`crate::steering`] has told it, and has their own programs drop that, so nothing of it leaves in the clear. Here it is
//! said to who configures the relay: an error where a redirect names such a pool's addresses, a note where it covers
//! them among others.

use std::{collections::BTreeSet, fmt, path::Path, sync::Arc, time::Duration};

use ipnet::IpNet;
use sandwire_api::{
    client::{Client, ClientError},
    pool::{AddressPlan, Pool, PoolSpec},
};
use serde::Serialize;
use tokio::{sync::watch, time::sleep};

use crate::{
    config::{Egress, Origin, Redirect},
    metrics::Metrics,
};

/// How often the daemon is asked for its pools.
const REFRESH: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(5);

/// A redirect, and a pool that it covers and can't redirect.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct NotRelayed {
    /// Which redirect of the configuration, from 1.
    pub redirect: usize,
    /// Name of the pool.
    pub pool: String,
    /// What the interfaces of its containers are.
    pub device: &'static str,
    /// Of which interface of the host.
    pub parent: String,
    /// Whether one of its sources has addresses of this pool alone.
    pub is_named: bool,
}

impl fmt::Display for NotRelayed {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            redirect,
            pool,
            device,
            parent,
            ..
        } = self;
        write!(
            formatter,
            "redirect {redirect} covers pool '{pool}', whose containers' interfaces are {device} children of {parent}: \
             what they send passes no place where it could be taken into TLS, and is dropped (not_relayed)"
        )
    }
}

/// A redirect that is meant for such a pool.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0}; give the pool pairs instead (device = \"veth\"), or take its addresses out of the redirect"
)]
pub struct NamedChild(NotRelayed);

/// All that the redirects cover and can't redirect.
#[must_use]
pub fn find(egress: &Egress, pools: &[Pool]) -> Vec<NotRelayed> {
    let mut found = Vec::new();
    for (redirect, number) in egress.redirects.iter().zip(1..) {
        let sources = sources(egress, redirect);
        for spec in pools.iter().map(|pool| &pool.spec) {
            let Some(parent) = spec.parent.as_ref().filter(|_| spec.device.is_child()) else {
                continue;
            };
            let own = prefixes(spec);
            let meets = |is_met: fn(&IpNet, &IpNet) -> bool| {
                sources
                    .iter()
                    .any(|source| own.iter().any(|own| is_met(source, own)))
            };
            let is_named = meets(|source, own| own.contains(source));
            if is_named || meets(|source, own| source.contains(own)) {
                found.push(NotRelayed {
                    redirect: number,
                    pool: spec.name.to_string(),
                    device: spec.device.name(),
                    parent: parent.interface.to_string(),
                    is_named,
                });
            }
        }
    }
    found
}

/// The same, of which none may be named.
///
/// # Errors
/// The first that is.
pub fn check(found: Vec<NotRelayed>) -> Result<Vec<NotRelayed>, NamedChild> {
    match found.iter().find(|found| found.is_named) {
        Some(named) => Err(NamedChild(named.clone())),
        None => Ok(found),
    }
}

/// Asks a daemon.
///
/// # Errors
/// It doesn't answer.
pub async fn ask(egress: &Egress, daemon: &Path) -> Result<Vec<NotRelayed>, ClientError> {
    let pools = Client::new(daemon).with_timeout(PATIENCE).pools().await?;
    Ok(find(egress, &pools))
}

/// Logs each once, and counts them, for ever.
pub(crate) async fn keep(
    egress: watch::Receiver<Arc<Egress>>,
    daemon: Arc<Path>,
    metrics: Arc<Metrics>,
) {
    let mut told = BTreeSet::new();
    loop {
        // Who asks for leases says why the daemon doesn't answer.
        let now = egress.borrow().clone();
        if let Ok(found) = ask(&now, &daemon).await {
            metrics.pools_not_relayed.set(found.len() as u64);
            for found in found {
                if !told.contains(&found) {
                    tracing::warn!("{found}");
                    told.insert(found);
                }
            }
        }
        sleep(REFRESH).await;
    }
}

/// Prefixes whose packets come in by an interface.
fn sources(egress: &Egress, redirect: &Redirect) -> Vec<IpNet> {
    let mut sources = redirect.from.clone();
    for sender in &redirect.senders {
        if let Origin::Forwarded(prefixes) = &egress.senders[*sender].origin {
            sources.extend(prefixes);
        }
    }
    sources
}

fn prefixes(spec: &PoolSpec) -> Vec<IpNet> {
    let (ipv4, ipv6) = match spec.addresses {
        AddressPlan::Prefix { ipv4, ipv6 } => (ipv4, ipv6),
        AddressPlan::FirecrackerClones { ipv6 } => (None, ipv6),
    };
    let ipv4 = ipv4.map(IpNet::V4).into_iter();
    ipv4.chain(ipv6.map(IpNet::V6)).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::config::Config;

    fn egress(from: &str) -> Egress {
        let text = format!(
            "[tls]\ncertificate = \"a\"\nkey = \"b\"\nauthorities = \"c\"\n[egress]\n\
             [[peer]]\nname = \"p\"\naddress = \"192.0.2.1:1\"\nserver_name = \"p.example\"\n\
             [[sender]]\nname = \"lan\"\naddresses = [\"10.9.0.0/24\"]\n\
             [[redirect]]\nvia = \"p\"\nto = [\"0.0.0.0/0\"]\n{from}\n"
        );
        let config = Config::parse(Path::new("relay.toml"), &text).unwrap();
        config.egress.unwrap()
    }

    fn pool(name: &str, device: &str, addresses: &Value) -> Pool {
        let parent = (device != "veth").then(|| json!({"interface": "up0"}));
        let pool = json!({
            "spec": {"name": name, "kind": "container", "device": device, "parent": parent, "addresses": addresses},
            "slots_max": 1, "last_error": null,
            "slots": {"ready": 0, "building": 0, "leased": 0, "held": 0, "tearing_down": 0, "quarantined": 0},
        });
        serde_json::from_value(pool).unwrap()
    }

    #[test]
    fn a_redirect_of_children_is_an_error_where_it_names_them_and_a_note_where_it_covers_them() {
        let pools = [
            pool(
                "boxes",
                "veth",
                &json!({"plan": "prefix", "ipv4": "10.8.0.0/24"}),
            ),
            pool(
                "lan",
                "macvlan",
                &json!({"plan": "prefix", "ipv4": "10.9.0.0/25", "ipv6": "fd00:9::/64"}),
            ),
        ];
        for (from, expected) in [
            ("from = [\"10.8.0.0/24\", \"::/128\"]", None),
            ("from = [\"10.0.0.0/8\"]", Some(false)),
            ("from = [\"::/0\"]", Some(false)),
            ("from = [\"10.8.0.0/24\"]\nsenders = [\"lan\"]", Some(false)),
            ("from = [\"10.9.0.0/25\"]", Some(true)),
            ("from = [\"0.0.0.0/0\", \"fd00:9::7\"]", Some(true)),
        ] {
            let found = find(&egress(from), &pools);
            let is_named: Option<bool> = found.first().map(|found| found.is_named);
            assert_eq!(
                (is_named, found.len()),
                (expected, usize::from(expected.is_some())),
                "{from}"
            );
            match check(found) {
                Ok(_) => assert_ne!(expected, Some(true), "{from}"),
                Err(error) => {
                    let text = error.to_string();
                    let begins = "redirect 1 covers pool 'lan', whose containers' interfaces are macvlan children of up0";
                    assert!(expected == Some(true) && text.starts_with(begins), "{text}");
                }
            }
        }
    }
}

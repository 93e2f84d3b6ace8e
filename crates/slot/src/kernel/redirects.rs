//! What may leave only by the relay, for sandboxes whose packets don't pass the host's stack: children.
//!
//! The relay says it by the host's routing rules, which stay when it ends, and by which every other sandbox's packets go
//! anyway. Here they are read, and told to the data path: when the first pool of children comes, whenever rules change,
//! and when the host is inspected.

use std::{
    sync::{Arc, Weak, atomic::Ordering},
    thread,
    time::Duration,
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use sandwire_datapath::policy::Redirect;
use sandwire_kernel_net::{
    netlink::Socket,
    routing_rule::{self, PRIORITY_PROHIBITED, RoutingRule, TABLE_PROHIBITED, Version, Watcher},
};

use super::{ebpf::Ebpf, lock};
use crate::error::NetworkError;

/// How soon the watcher notices that nobody needs it any more.
const WATCH_AT_MOST: Duration = Duration::from_millis(500);

/// Tells the data path what the rules say now.
pub(super) fn tell(ebpf: &Ebpf, route: &mut Socket) -> Result<(), NetworkError> {
    // One at a time: else the inspection could tell what they said before, after the watcher has told what they say.
    let _telling = lock(&ebpf.tells_rules);
    let rules = routing_rule::list(route, TABLE_PROHIBITED)?;
    let redirects: Vec<Redirect> = rules.iter().filter_map(redirect_of).collect();
    Ok(ebpf.datapath.set_redirects(&redirects)?)
}

fn redirect_of(rule: &RoutingRule) -> Option<Redirect> {
    let all = match rule.version {
        Version::V4 => IpNet::V4(Ipv4Net::default()),
        Version::V6 => IpNet::V6(Ipv6Net::default()),
    };
    (rule.priority == PRIORITY_PROHIBITED).then(|| Redirect {
        from: rule.from.unwrap_or(all),
        to: rule.to.unwrap_or(all),
        protocol: rule.protocol,
        ports: rule.ports,
    })
}

/// Follows the rules from now on, once per data path. To be called by a thread in the host's namespace.
pub(super) fn watch(ebpf: &Arc<Ebpf>) -> Result<(), NetworkError> {
    if ebpf.follows_rules.swap(true, Ordering::SeqCst) {
        return Ok(());
    }
    let started = Watcher::new()
        .and_then(|watcher| Ok((watcher, Socket::route()?)))
        .map_err(NetworkError::from)
        .and_then(|(watcher, route)| {
            let weak = Arc::downgrade(ebpf);
            thread::Builder::new()
                .name("rules".to_owned())
                .spawn(move || watch_until_gone(&weak, watcher, route))
                .map_err(|error| NetworkError::Kernel {
                    operation: "start",
                    object: "a thread that follows routing rules".to_owned(),
                    source: Box::new(error),
                })
        });
    if started.is_err() {
        ebpf.follows_rules.store(false, Ordering::SeqCst);
    }
    started.map(drop)
}

fn watch_until_gone(weak: &Weak<Ebpf>, mut watcher: Watcher, mut route: Socket) {
    loop {
        let changed = watcher.changed(WATCH_AT_MOST);
        let Some(ebpf) = weak.upgrade() else { return };
        match changed {
            Ok(false) => {}
            Ok(true) => {
                if let Err(error) = tell(&ebpf, &mut route) {
                    tracing::error!(%error, "containers may not know yet what leaves only by the relay");
                }
            }
            Err(error) => {
                // The inspection begins anew.
                tracing::error!(%error, "cannot follow what leaves only by the relay");
                ebpf.follows_rules.store(false, Ordering::SeqCst);
                return;
            }
        }
    }
}

//! What may leave only by the relay, as the data path knows it.
//!
//! The relay has told the host: by its nftables table, which takes that, and by routing rules, which refuse it where it wasn't
//! taken. Both stay when it ends. Here both are read, and told to the data path: when the first pool comes, whenever rules
//! change, and when the host is inspected. Children, whose packets don't pass the host's stack, have it dropped. What others
//! send is led to the stack, whatever the host's routes say: its own look-up does so too, but only while the rules are there,
//! which somebody else may flush.

use std::{
    collections::HashSet,
    sync::{Arc, Weak, atomic::Ordering},
    thread,
    time::Duration,
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use sandwire_datapath::policy::Redirect;
use sandwire_kernel_net::{
    netlink::Socket,
    nft::{self, Flows},
    routing_rule::{self, PRIORITY_PROHIBITED, RoutingRule, TABLE_PROHIBITED, Version, Watcher},
};

use super::{ebpf::Ebpf, lock};
use crate::error::NetworkError;

const TCP: u8 = 6;
const UDP: u8 = 17;
const ALL_PORTS: (u16, u16) = (0, u16::MAX);

/// How soon the watcher notices that nobody needs it any more.
const WATCH_AT_MOST: Duration = Duration::from_millis(500);

/// Tells the data path what the host is told now.
pub(super) fn tell(
    ebpf: &Ebpf,
    route: &mut Socket,
    netfilter: &mut Socket,
) -> Result<(), NetworkError> {
    // One at a time: else the inspection could tell what they said before, after the watcher has told what they say.
    let _telling = lock(&ebpf.tells_rules);
    // The table first: the relay changes it before it takes rules away.
    let flows = nft::relayed(netfilter)?;
    let rules = routing_rule::list(route, TABLE_PROHIBITED)?;
    Ok(ebpf.datapath.set_redirects(&redirects(&flows, &rules))?)
}

/// What either says, each once.
fn redirects(flows: &[Vec<Flows>], rules: &[RoutingRule]) -> Vec<Redirect> {
    let of_rules = rules.iter().filter_map(of_rule);
    let all = of_rules.chain(flows.iter().flat_map(|of_one| of_flows(of_one)));
    let mut seen = HashSet::new();
    all.filter(|redirect| seen.insert(*redirect)).collect()
}

fn of_rule(rule: &RoutingRule) -> Option<Redirect> {
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

/// Those of one redirect. The table takes TCP and UDP alone; where it takes all of both, it lets nothing else leave.
fn of_flows(flows: &[Flows]) -> impl Iterator<Item = Redirect> {
    let takes_all = [TCP, UDP].iter().all(|protocol| {
        let mut flows = flows.iter();
        flows.any(|flows| flows.protocol == *protocol && flows.ports == ALL_PORTS)
    });
    flows.iter().map(move |flows| Redirect {
        from: flows.from,
        to: flows.to,
        protocol: (!takes_all).then_some(flows.protocol),
        ports: (flows.ports != ALL_PORTS).then_some(flows.ports),
    })
}

/// Follows the rules from now on, once per data path. To be called by a thread in the host's namespace.
pub(super) fn watch(ebpf: &Arc<Ebpf>) -> Result<(), NetworkError> {
    if ebpf.follows_rules.swap(true, Ordering::SeqCst) {
        return Ok(());
    }
    let started = Watcher::new()
        .and_then(|watcher| Ok((watcher, Socket::route()?, Socket::netfilter()?)))
        .map_err(NetworkError::from)
        .and_then(|(watcher, route, netfilter)| {
            let weak = Arc::downgrade(ebpf);
            thread::Builder::new()
                .name("rules".to_owned())
                .spawn(move || watch_until_gone(&weak, watcher, (route, netfilter)))
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

fn watch_until_gone(
    weak: &Weak<Ebpf>,
    mut watcher: Watcher,
    (mut route, mut netfilter): (Socket, Socket),
) {
    loop {
        let changed = watcher.changed(WATCH_AT_MOST);
        let Some(ebpf) = weak.upgrade() else { return };
        match changed {
            Ok(false) => {}
            Ok(true) => {
                if let Err(error) = tell(&ebpf, &mut route, &mut netfilter) {
                    tracing::error!(%error, "the data path may not know yet what leaves only by the relay");
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

#[cfg(test)]
mod tests {
    use super::*;

    fn flows(from: &str, to: &str, protocol: u8, ports: (u16, u16)) -> Flows {
        Flows {
            from: from.parse().unwrap(),
            to: to.parse().unwrap(),
            protocol,
            ports,
        }
    }

    fn rule(from: &str, to: &str, protocol: Option<u8>, ports: Option<(u16, u16)>) -> RoutingRule {
        RoutingRule {
            from: Some(from.parse().unwrap()),
            to: Some(to.parse().unwrap()),
            protocol,
            ports,
            ..RoutingRule::new(Version::V4, PRIORITY_PROHIBITED, TABLE_PROHIBITED)
        }
    }

    const FROM: &str = "10.64.0.0/16";
    const TO: &str = "198.51.100.0/24";

    #[test]
    fn table_and_rules_say_the_same_in_the_same_words() {
        for (protocols, ports, protocol, of_rules) in [
            (&[TCP, UDP][..], ALL_PORTS, None, None),
            (&[UDP], ALL_PORTS, Some(UDP), None),
            (&[TCP], (443, 445), Some(TCP), Some((443, 445))),
        ] {
            let of_table: Vec<Flows> = protocols
                .iter()
                .map(|protocol| flows(FROM, TO, *protocol, ports))
                .collect();
            let rules = [rule(FROM, TO, protocol, of_rules)];
            let of_table = [of_table];
            let both = redirects(&of_table, &rules);
            assert_eq!(both.len(), 1, "{both:?}");
            assert_eq!(redirects(&of_table, &[]), both);
            assert_eq!(redirects(&[], &rules), both);
        }
    }

    #[test]
    fn what_only_one_of_them_says_counts() {
        let of_table = [vec![flows(FROM, TO, TCP, ALL_PORTS)]];
        let unseen = RoutingRule {
            priority: PRIORITY_PROHIBITED + 1,
            ..rule(FROM, TO, Some(1), None)
        };
        let both = redirects(&of_table, &[rule(FROM, TO, Some(UDP), None), unseen]);
        let protocols: Vec<_> = both.iter().map(|redirect| redirect.protocol).collect();
        assert_eq!(protocols, [Some(UDP), Some(TCP)]);
    }

    #[test]
    fn other_protocols_may_leave_where_no_redirect_takes_all() {
        let tcp = flows(FROM, TO, TCP, ALL_PORTS);
        let udp = flows(FROM, TO, UDP, ALL_PORTS);
        let dns = flows(FROM, TO, UDP, (53, 53));
        for (of_table, expected) in [
            (vec![vec![tcp, dns]], vec![Some(TCP), Some(UDP)]),
            (vec![vec![tcp], vec![udp]], vec![Some(TCP), Some(UDP)]),
            (vec![vec![tcp, udp]], vec![None]),
        ] {
            let found = redirects(&of_table, &[]);
            let protocols: Vec<_> = found.iter().map(|redirect| redirect.protocol).collect();
            assert_eq!(protocols, expected);
        }
    }
}

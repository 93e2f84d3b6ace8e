//! Interfaces by which packets leave the host, and which of their settings keep sandboxes' packets from it.
//!
//! What the kernel and the configuration say is read in one place; what is to be warned of is decided by pure functions.

use std::{collections::BTreeSet, fs};

use sandwire_api::pool::{Pool, PoolSpec};
use sandwire_daemon::config::Config;
use sandwire_kernel_net::{
    interface::{self, Interface, InterfaceIndex},
    netlink::Socket,
    route::{self, Listed},
    routing_rule::{self, Action, RoutingRule},
};

use super::{host, report::Warning};

/// The uplinks of this network namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Uplinks {
    /// Those that the configuration names, if it does. Packets of eBPF pools leave by them.
    pub(super) configured: Option<Vec<String>>,
    /// Those that a default route leads out by, each of its next hops. All other packets leave by them.
    pub(super) of_default_routes: Vec<String>,
    /// The same of the tables that pools have of their own, or that routing rules have for their marks.
    of_tables: Vec<String>,
    /// Those whose IPv6 default route comes from a router's advertisement.
    advertised: Vec<String>,
    /// Whether there is an IPv6 default route at all.
    has_ipv6_route: bool,
    /// Those that have IPv6 addresses of more than their link.
    with_ipv6: Vec<String>,
    /// Interfaces that are in a VRF, each with its name.
    in_vrf: Vec<(String, String)>,
}

impl Uplinks {
    /// As they are now, where the configuration and a daemon's pools are these. What can't be read is left out; why not is told by
    /// those who need it.
    pub(super) fn find(config: Option<&Config>, pools: &[Pool]) -> Self {
        let configured = config.into_iter().flat_map(|config| &config.pools);
        let own = OwnRouting::of(configured.chain(pools.iter().map(|pool| &pool.spec)));
        let mut found =
            Socket::route().map_or_else(|_| Self::default(), |socket| Self::routed(socket, own));
        found.with_ipv6 =
            with_global_ipv6(&fs::read_to_string("/proc/net/if_inet6").unwrap_or_default());
        found.configured = config.and_then(|config| config.datapath.uplinks.clone());
        found
    }

    /// What routes say, those of the main table and of the pools' own.
    fn routed(mut socket: Socket, own: OwnRouting) -> Self {
        let interfaces = interface::list(&mut socket).unwrap_or_default();
        let name = |index| {
            let found = interfaces.iter().find(|found| found.index == index)?;
            let leads_out = found.kind.as_deref() != Some("loopback") && found.name != "lo";
            leads_out.then(|| found.name.clone())
        };
        let rules = routing_rule::list_all(&mut socket).unwrap_or_default();
        let mut of_tables = BTreeSet::new();
        for table in own.all_tables(&rules) {
            let routes = route::list_table(&mut socket, table).unwrap_or_default();
            of_tables.extend(Self::of(&routes, name).of_default_routes);
        }
        Self {
            of_tables: of_tables.into_iter().collect(),
            in_vrf: in_vrf(&interfaces),
            ..Self::of(&route::list(&mut socket).unwrap_or_default(), name)
        }
    }

    /// Those of the default routes among these; `name` knows interfaces that lead out of the host.
    fn of(routes: &[Listed], name: impl Fn(InterfaceIndex) -> Option<String>) -> Self {
        let (mut all, mut advertised) = (BTreeSet::new(), BTreeSet::new());
        let mut has_ipv6_route = false;
        for route in routes {
            if route.destination.prefix_len() != 0 || route.unreachable {
                continue;
            }
            let Some(name) = route.interface.and_then(&name) else {
                continue;
            };
            has_ipv6_route |= route.destination.addr().is_ipv6();
            if route.by_router_advertisement {
                advertised.insert(name.clone());
            }
            all.insert(name);
        }
        Self {
            of_default_routes: all.into_iter().collect(),
            advertised: advertised.into_iter().collect(),
            has_ipv6_route,
            ..Self::default()
        }
    }

    /// All by which packets of some pool may leave.
    pub(super) fn all(&self) -> Vec<String> {
        let configured = self.configured.iter().flatten();
        let of_routes = self.of_default_routes.iter().chain(&self.of_tables);
        let all: BTreeSet<&String> = of_routes.chain(configured).collect();
        all.into_iter().cloned().collect()
    }

    /// Settings that keep packets of sandboxes from getting through. `read` gives a setting.
    pub(super) fn warnings(&self, read: impl Fn(&str) -> Option<String>) -> Vec<Warning> {
        let mut warnings = Vec::new();
        for (setting, what) in [(IPV4_FORWARDING, "IPv4"), (IPV6_FORWARDING, "IPv6")] {
            if read(setting).as_deref() == Some("0") {
                let problem = format!(
                    "the host forwards no {what} packets by default; the daemon turns it on for its own interfaces, the \
                     uplink needs it too"
                );
                warnings.push(warning(setting, problem, "1"));
            }
        }
        let all = self.all();
        for uplink in &all {
            warnings.extend(without_forwarding(uplink, &read));
            warnings.extend(self.deaf_to_routers(uplink, &read));
        }
        for (name, vrf) in &self.in_vrf {
            let is_configured = self
                .configured
                .as_ref()
                .is_some_and(|all| all.contains(name));
            if all.is_empty() || all.contains(name) && !is_configured {
                warnings.push(in_a_vrf(name, vrf));
            }
        }
        // With one uplink every way is the same way.
        if all.len() > 1 {
            for uplink in strict_reverse_path(&all, &read) {
                let problem = "strict reverse path filter on one of several uplinks: it drops answers to sandboxes that \
                               come by another uplink than the one to their sender";
                let setting = format!("net/ipv4/conf/{uplink}/rp_filter");
                warnings.push(warning(&setting, problem.to_owned(), "2"));
            }
        }
        warnings
    }

    /// An uplink whose IPv6 default route comes from its router, and goes once the host forwards: the kernel hears
    /// routers then only where `accept_ra` is 2. Where it is 0 a program hears them.
    fn deaf_to_routers(
        &self,
        uplink: &str,
        read: impl Fn(&str) -> Option<String>,
    ) -> Option<Warning> {
        let accept = format!("net/ipv6/conf/{uplink}/accept_ra");
        if read(&accept)? != "1" {
            return None;
        }
        let own = read(&format!("net/ipv6/conf/{uplink}/forwarding"));
        let is_deaf = own.is_some_and(|value| value != "0");
        let has = |names: &[String]| names.iter().any(|name| name == uplink);
        let problem = if has(&self.advertised) && is_deaf {
            "its IPv6 default route comes from a router's advertisement, and the kernel hears no further ones while it \
             forwards: the route ends when it expires"
        } else if has(&self.advertised) && read(IPV6_FORWARDING).as_deref() == Some("0") {
            "its IPv6 default route comes from a router's advertisement, and forwarding would make the kernel drop it: \
             pools with IPv6 are refused"
        } else if is_deaf && !self.has_ipv6_route && has(&self.with_ipv6) {
            "there is no IPv6 default route, and the kernel hears no router's advertisement while it forwards: neither \
             sandboxes nor the host reach anybody beyond the link"
        } else {
            return None;
        };
        Some(warning(&accept, problem.to_owned(), "2"))
    }
}

/// How pools are routed otherwise than the host is.
#[derive(Debug, Default)]
struct OwnRouting {
    tables: BTreeSet<u32>,
    marks: BTreeSet<u32>,
}

impl OwnRouting {
    fn of<'a>(pools: impl Iterator<Item = &'a PoolSpec>) -> Self {
        let mut own = Self::default();
        for pool in pools {
            own.tables.extend(pool.policy.route_table);
            own.marks.extend(pool.policy.route_mark);
        }
        own
    }

    /// Their tables, and those that rules have for their marks.
    fn all_tables(self, rules: &[RoutingRule]) -> BTreeSet<u32> {
        let meets = |rule: &&RoutingRule| {
            let Some((bits, mask)) = rule.mark.filter(|(_, mask)| *mask != 0) else {
                return false;
            };
            let is_met = self.marks.iter().any(|mark| mark & mask == bits);
            is_met && !rule.is_own && rule.action == Action::LookUp
        };
        let of_marks = rules.iter().filter(meets).map(|rule| rule.table);
        self.tables.iter().copied().chain(of_marks).collect()
    }
}

const IPV4_FORWARDING: &str = "net/ipv4/ip_forward";
const IPV6_FORWARDING: &str = "net/ipv6/conf/all/forwarding";

/// An uplink that the kernel forwards no IPv4 packets from, though it does from others. IPv6 asks for all interfaces
/// together.
fn without_forwarding(uplink: &str, read: impl Fn(&str) -> Option<String>) -> Option<Warning> {
    let setting = format!("net/ipv4/conf/{uplink}/forwarding");
    let is_off = read(IPV4_FORWARDING)? != "0" && read(&setting)? == "0";
    let problem = "nothing that comes in by this uplink is forwarded: through the host's own stack, neither answers nor calls \
                   reach sandboxes";
    is_off.then(|| warning(&setting, problem.to_owned(), "1"))
}

/// Uplinks whose strict reverse path filter would drop packets, if these come by another way than answers leave.
fn strict_reverse_path(uplinks: &[String], read: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let value = |interface: &str| {
        let text = read(&format!("net/ipv4/conf/{interface}/rp_filter"))?;
        text.parse::<u8>().ok()
    };
    // The kernel takes the larger of the two; 1 is strict, 2 is loose.
    let of_all = value("all").unwrap_or(0);
    let is_strict = |uplink: &&String| value(uplink).unwrap_or(0).max(of_all) == 1;
    uplinks.iter().filter(is_strict).cloned().collect()
}

/// What is to be said of a setting, and the value that it should have.
fn warning(setting: &str, problem: String, value: &str) -> Warning {
    // A dot in the name of an interface, such as a VLAN's, is no separator.
    let subject = match setting.contains('.') {
        true => setting.to_owned(),
        false => setting.replace('/', "."),
    };
    Warning {
        advice: format!(
            "sysctl -w {subject}={value} (to keep it over a boot, {subject}={value} in a file of /etc/sysctl.d)"
        ),
        subject,
        problem,
    }
}

/// Interfaces of a VRF, with its name.
fn in_vrf(interfaces: &[Interface]) -> Vec<(String, String)> {
    let vrf_of = |interface: &Interface| {
        let master = interfaces
            .iter()
            .find(|other| Some(other.index) == interface.master)?;
        let is_vrf = master.kind.as_deref() == Some("vrf");
        is_vrf.then(|| (interface.name.clone(), master.name.clone()))
    };
    interfaces.iter().filter_map(vrf_of).collect()
}

fn in_a_vrf(name: &str, vrf: &str) -> Warning {
    Warning {
        subject: name.to_owned(),
        problem: format!(
            "it is in the VRF {vrf}, by whose table the host's own stack routes what comes in there: answers to sandboxes that are \
             masqueraded are lost, and it is no uplink while no default route of the main table leads out by it"
        ),
        advice: format!(
            "for eBPF pools name it in `uplinks`, with uplink = \"route\" and route_table = the table of {vrf} (ip vrf show) in \
             their policies"
        ),
    }
}

/// Interfaces with addresses of more than their link, from the text of `/proc/net/if_inet6`.
fn with_global_ipv6(text: &str) -> Vec<String> {
    const GLOBAL: &str = "00";
    let mut found = BTreeSet::new();
    for line in text.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        if let [_, _, _, GLOBAL, _, name] = fields.as_slice() {
            found.insert((*name).to_owned());
        }
    }
    found.into_iter().collect()
}

/// The settings of this namespace.
pub(super) fn own_warnings(uplinks: &Uplinks) -> Vec<Warning> {
    uplinks.warnings(host::setting)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

    use sandwire_kernel_net::routing_rule::Version;

    use super::*;

    fn listed(destination: &str, interface: Option<u32>) -> Listed {
        Listed {
            destination: destination.parse().unwrap(),
            interface: interface.map(InterfaceIndex),
            gateway: None,
            metric: None,
            unreachable: false,
            by_router_advertisement: false,
        }
    }

    fn names(index: InterfaceIndex) -> Option<String> {
        (index.0 != 1).then(|| format!("eth{}", index.0))
    }

    /// The warnings' subjects, where the settings are these; all others can't be read.
    fn subjects(uplinks: &Uplinks, settings: &[(&str, &str)]) -> Vec<String> {
        let read = |name: &str| {
            let found = settings.iter().find(|(setting, _)| *setting == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        let warnings = uplinks.warnings(read);
        warnings
            .into_iter()
            .map(|warning| warning.subject)
            .collect()
    }

    fn with_default_routes(names: &[&str]) -> Uplinks {
        Uplinks {
            of_default_routes: names.iter().map(|name| (*name).to_owned()).collect(),
            ..Uplinks::default()
        }
    }

    #[test]
    fn every_next_hop_of_a_default_route_is_an_uplink() {
        let unreachable = Listed {
            unreachable: true,
            ..listed("::/0", Some(9))
        };
        let routes = [
            listed("0.0.0.0/0", Some(3)),
            listed("0.0.0.0/0", Some(4)),
            listed("::/0", Some(3)),
            listed("10.0.0.0/8", Some(5)),
            listed("0.0.0.0/0", None),
            // The loopback.
            listed("::/0", Some(1)),
            unreachable,
        ];
        let found = Uplinks::of(&routes, names);
        assert_eq!(found.of_default_routes, ["eth3", "eth4"]);
        assert!(found.has_ipv6_route && found.advertised.is_empty());
    }

    #[test]
    fn rules_lead_to_tables_by_the_bits_of_a_mark_that_count() {
        let rule = |table, mark| RoutingRule {
            mark,
            ..RoutingRule::new(Version::V4, 100, table)
        };
        let rules = [
            rule(101, Some((0x10, 0xffff_ffff))),
            rule(102, Some((0x10, 0xf0))),
            rule(103, Some((0x20, 0xf0))),
            // Packets of all marks.
            rule(254, None),
            rule(104, Some((0, 0))),
            // Those that the host sends.
            RoutingRule {
                is_own: true,
                ..rule(105, Some((0x13, 0xff)))
            },
            RoutingRule {
                action: Action::Nothing,
                ..rule(106, Some((0x13, 0xff)))
            },
        ];
        let tables = |own: OwnRouting| own.all_tables(&rules).into_iter().collect::<Vec<_>>();
        let own = |tables: &[u32], marks: &[u32]| OwnRouting {
            tables: tables.iter().copied().collect(),
            marks: marks.iter().copied().collect(),
        };
        assert_eq!(tables(own(&[], &[0x10])), [101, 102]);
        assert_eq!(tables(own(&[7], &[0x13])), [7, 102]);
        assert!(tables(own(&[], &[])).is_empty());
    }

    #[test]
    fn what_the_configuration_names_is_judged_beside_default_routes() {
        let uplinks = Uplinks {
            configured: Some(vec!["wan0".to_owned(), "eth0".to_owned()]),
            ..with_default_routes(&["eth0"])
        };
        assert_eq!(uplinks.all(), ["eth0", "wan0"]);
        let settings = [
            ("net/ipv4/conf/wan0/rp_filter", "1"),
            ("net/ipv4/conf/eth0/rp_filter", "2"),
        ];
        assert_eq!(
            subjects(&uplinks, &settings),
            ["net.ipv4.conf.wan0.rp_filter"]
        );
    }

    #[test]
    fn an_uplink_in_a_vrf_is_told_of_unless_the_configuration_names_it() {
        let in_vrf = |uplinks| Uplinks {
            in_vrf: vec![("eth1".to_owned(), "red".to_owned())],
            ..uplinks
        };
        let warned = |uplinks| subjects(&in_vrf(uplinks), &[]);
        assert_eq!(warned(Uplinks::default()), ["eth1"]);
        assert_eq!(warned(with_default_routes(&["eth0", "eth1"])), ["eth1"]);
        // The host may be managed by it.
        assert!(warned(with_default_routes(&["eth0"])).is_empty());
        let configured = Uplinks {
            configured: Some(vec!["eth1".to_owned()]),
            ..with_default_routes(&["eth1"])
        };
        assert!(warned(configured).is_empty());
    }

    #[test]
    fn an_uplink_of_its_own_may_forward_nothing() {
        let uplinks = with_default_routes(&["eth0", "eth0.7"]);
        let settings = |of_all| {
            [
                ("net/ipv4/ip_forward", of_all),
                ("net/ipv4/conf/eth0/forwarding", "1"),
                ("net/ipv4/conf/eth0.7/forwarding", "0"),
            ]
        };
        assert_eq!(
            subjects(&uplinks, &settings("1")),
            ["net/ipv4/conf/eth0.7/forwarding"]
        );
        // It is what is said of all that the daemon changes then.
        assert_eq!(subjects(&uplinks, &settings("0")), ["net.ipv4.ip_forward"]);
    }

    #[test]
    fn a_route_that_a_router_told_takes_a_kernel_that_goes_on_to_listen() {
        const ACCEPT: &str = "net.ipv6.conf.eth3.accept_ra";
        let advertised = Listed {
            by_router_advertisement: true,
            ..listed("::/0", Some(3))
        };
        let warned = |routes: &[Listed], accept, forwarding| {
            let uplinks = Uplinks {
                with_ipv6: with_global_ipv6(IF_INET6),
                configured: Some(vec!["eth3".to_owned()]),
                ..Uplinks::of(routes, names)
            };
            let settings = [
                ("net/ipv6/conf/eth3/accept_ra", accept),
                ("net/ipv6/conf/eth3/forwarding", forwarding),
                ("net/ipv6/conf/all/forwarding", forwarding),
            ];
            let mut subjects = subjects(&uplinks, &settings);
            subjects.retain(|subject| subject != "net.ipv6.conf.all.forwarding");
            subjects
        };
        for forwarding in ["0", "1"] {
            assert_eq!(warned(&[advertised], "1", forwarding), [ACCEPT]);
            // Heard by the kernel all the same, or by somebody else.
            assert!(warned(&[advertised], "2", forwarding).is_empty());
            assert!(warned(&[advertised], "0", forwarding).is_empty());
            let by_hand = listed("::/0", Some(3));
            assert!(warned(&[by_hand], "1", forwarding).is_empty());
        }
        // It has gone already.
        assert_eq!(warned(&[], "1", "1"), [ACCEPT]);
        assert!(warned(&[], "1", "0").is_empty());
    }

    const IF_INET6: &str = "\
00000000000000000000000000000001 01 80 10 80       lo
fe800000000000000000000000000002 04 40 20 80     eth4
fd000000000000000000000000000002 03 40 00 80     eth3
";

    #[test]
    fn addresses_of_a_link_alone_are_no_way_out() {
        assert_eq!(with_global_ipv6(IF_INET6), ["eth3"]);
    }

    #[test]
    fn the_larger_reverse_path_setting_counts() {
        let uplinks = ["eth0".to_owned(), "eth1".to_owned(), "eth2".to_owned()];
        let strict = |of_all: &str| {
            strict_reverse_path(&uplinks, |name| {
                let value = match name.split('/').nth(3)? {
                    "all" => of_all,
                    "eth0" => "0",
                    "eth1" => "1",
                    _ => "2",
                };
                Some(value.to_owned())
            })
        };
        assert_eq!(strict("0"), ["eth1"]);
        assert_eq!(strict("1"), ["eth0", "eth1"]);
        assert!(strict("2").is_empty());
    }
}

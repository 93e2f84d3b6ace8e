//! Default routes that the kernel has learned by itself, which netlink tells of like those that programs make.

use std::{
    fs,
    net::{IpAddr, Ipv6Addr},
};

use ipnet::IpNet;

use super::Listed;
use crate::{Error, interface::Interface};

/// IPv6 default routes that the kernel itself has learned from router advertisements, of all tables in one namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LearnedDefaults(Vec<Learned>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Learned {
    interface: String,
    gateway: IpAddr,
    metric: u32,
}

impl LearnedDefaults {
    /// Those in the calling thread's namespace.
    ///
    /// # Errors
    /// The kernel's list can't be read.
    pub fn read() -> Result<Self, Error> {
        const LIST: &str = "/proc/thread-self/net/ipv6_route";
        let text =
            fs::read_to_string(LIST).map_err(|source| Error::system("read", LIST, source))?;
        Ok(Self::of(&text))
    }

    /// The same from the text of `/proc/net/ipv6_route`.
    fn of(text: &str) -> Self {
        Self(text.lines().filter_map(learned_default).collect())
    }

    /// Whether all default routes by an interface are such ones, and none a program's, of the routes that [`super::list`] gives. The kernel's
    /// list doesn't say in which table a route is.
    #[must_use]
    pub fn are_all_of(&self, interface: &Interface, routes: &[Listed]) -> bool {
        let is_learned = |route: &Listed| {
            self.0.iter().any(|learned| {
                learned.interface == interface.name
                    && route.gateway == Some(learned.gateway)
                    && route.metric == Some(learned.metric)
            })
        };
        let mut defaults = routes.iter().filter(|route| {
            matches!(route.destination, IpNet::V6(to) if to.prefix_len() == 0)
                && route.interface == Some(interface.index)
        });
        defaults.all(is_learned)
    }
}

/// A line that tells of a default route that the kernel has learned.
fn learned_default(line: &str) -> Option<Learned> {
    /// `RTF_DEFAULT | RTF_ADDRCONF`.
    const LEARNED: u32 = 0x0001_0000 | 0x0004_0000;
    let number = |text| u32::from_str_radix(text, 16).ok();
    let fields: Vec<&str> = line.split_whitespace().collect();
    let &[_, "00", _, _, gateway, metric, _, _, flags, interface] = fields.as_slice() else {
        return None;
    };
    let gateway = u128::from_str_radix(gateway, 16).ok()?;
    (number(flags)? & LEARNED == LEARNED).then_some(())?;
    Some(Learned {
        interface: interface.to_owned(),
        gateway: Ipv6Addr::from_bits(gateway).into(),
        metric: number(metric)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interface::{InterfaceIndex, Traffic};

    /// As a kernel lists them that has heard a router on `e7`, with a program's route and its own on `e8`, and a program's
    /// alone on `e9`.
    const ROUTES: &str = "\
fe800000000000000000000000000000 40 00000000000000000000000000000000 00 00000000000000000000000000000000 00000100 00000001 00000000 00000001       e7
00000000000000000000000000000000 00 00000000000000000000000000000000 00 fe800000000000004007adfffe2e0f51 00000400 00000001 00000000 00450003       e7
00000000000000000000000000000000 00 00000000000000000000000000000000 00 fe800000000000004007adfffe2e0f51 00000400 00000001 00000000 00450003       e8
00000000000000000000000000000000 00 00000000000000000000000000000000 00 fe800000000000000000000000000099 00000005 00000001 00000000 00000003       e8
00000000000000000000000000000000 00 00000000000000000000000000000000 00 fe800000000000000000000000000099 00000005 00000001 00000000 00000003       e9
00000000000000000000000000000001 80 00000000000000000000000000000000 00 00000000000000000000000000000000 00000000 00000002 00000000 80200001       lo
ff000000000000000000000000000000 08 00000000000000000000000000000000 00 00000000000000000000000000000000 00000100 00000004 00000000 00000001       e7
00000000000000000000000000000000 00 00000000000000000000000000000000 00 00000000000000000000000000000000 ffffffff 00000001 00000000 00200200       lo
";

    fn interface(name: &str, index: u32) -> Interface {
        Interface {
            index: InterfaceIndex(index),
            name: name.to_owned(),
            alias: None,
            kind: None,
            mac: None,
            is_ethernet: true,
            queue: None,
            mtu: 1500,
            group: 0,
            master: None,
            lower: None,
            peer: None,
            peer_namespace: None,
            is_up: true,
            makes_addresses: true,
            has_carrier: true,
            traffic: Traffic::default(),
            tun: None,
        }
    }

    /// A default route of the main table, as netlink tells of it.
    fn listed(index: u32, gateway: &str, metric: u32) -> Listed {
        Listed {
            destination: "::/0".parse().unwrap(),
            interface: Some(InterfaceIndex(index)),
            gateway: Some(gateway.parse().unwrap()),
            metric: Some(metric),
            unreachable: false,
            by_router_advertisement: true,
        }
    }

    #[test]
    fn what_the_kernel_learned_itself_is_told_from_what_a_program_made() {
        const ROUTER: &str = "fe80::4007:adff:fe2e:f51";
        let found = LearnedDefaults::of(ROUTES);
        let are_all =
            |name, index, routes: &[Listed]| found.are_all_of(&interface(name, index), routes);
        let of_e7 = listed(7, ROUTER, 1024);
        let of_e8 = listed(8, ROUTER, 1024);
        let own_of_e8 = listed(8, "fe80::99", 5);
        let own_of_e9 = listed(9, "fe80::99", 5);
        assert!(are_all("e7", 7, &[of_e7, own_of_e8]));
        assert!(!are_all("e8", 8, &[own_of_e8, of_e8]));
        assert!(!are_all("e9", 9, &[own_of_e9]));
        // The program's is in another table, of which netlink's list of the main one doesn't tell.
        assert!(are_all("e8", 8, &[of_e8]));
        assert!(LearnedDefaults::read().is_ok() || !crate::ipv6::is_known());
    }
}
